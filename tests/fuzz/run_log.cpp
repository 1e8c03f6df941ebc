// Reads the log of a run: any text gives an error, or steps in ascending order that are equal when compared with
// themselves.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <string_view>

#include "checkpoint_tool/compare_runs.hpp"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  try {
    const plait::run_log log = plait::read_run_log(std::string_view(reinterpret_cast<const char*>(data), size), "x");
    const auto not_after = [](const plait::logged_step& a, const plait::logged_step& b) { return a.step >= b.step; };
    if (std::adjacent_find(log.steps.begin(), log.steps.end(), not_after) != log.steps.end()) std::abort();
    const plait::run_comparison found = plait::compare_runs(log, log);
    if (!found.equal() || found.compared.size() != log.steps.size()) std::abort();
    for (const plait::logged_step& s : log.steps)
      for (const auto& [name, hash] : s.weights)
        if (!name.starts_with(plait::layer_of(name))) std::abort();
  } catch (const plait::error&) {
  }
  return 0;
}
