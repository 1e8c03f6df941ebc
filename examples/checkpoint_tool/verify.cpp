#include "plait/checkpoint/verify.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "../number_text.hpp"
#include "commands.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/io/posix_file_system.hpp"
#include "steps.hpp"
#include "table.hpp"

namespace {

struct tally {
  std::size_t whole = 0, damaged = 0, faults = 0;
  double bytes = 0, seconds = 0;  ///< of whole steps
};

std::string rate_text(double bytes, double seconds) {
  return fmt::format("{} read in {:.2f} s, {:.2f} GB/s", size_text(bytes), seconds, bytes / seconds * 1e-9);
}

void verify_one(const std::string& path, tally& all) {
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<std::string> faults = plait::verify_step(plait::machine_files(), path);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (faults.empty()) {
    const auto bytes = static_cast<double>(bytes_of(plait::read_step(plait::machine_files(), path)));
    fmt::print("{}: whole, {}\n", printable(path), rate_text(bytes, seconds));
    ++all.whole;
    all.bytes += bytes;
    all.seconds += seconds;
  } else {
    fmt::print("{}: {}\n", printable(path), counted(faults.size(), "fault"));
    for (const std::string& fault : faults) fmt::print("  {}\n", printable(fault));
    ++all.damaged;
    all.faults += faults.size();
  }
  std::fflush(stdout);  // the next step may take long
}

}  // namespace

bool verify(const std::string& path) {
  const place at = find_place("PATH", path);
  std::vector<std::string> steps{at.path};
  if (!at.is_step) {
    steps.clear();
    const plait::step_list found = about("PATH", [&] { return plait::list_steps(plait::machine_files(), at.path); });
    for (const plait::committed_step& step : found.committed) steps.push_back(step.path);
    for (const plait::invalid_step& step : found.invalid) steps.push_back(step.path);
    if (steps.empty()) plait::fail({"PATH: '", path, "' holds no steps"});
  }
  tally all;
  for (const std::string& step : steps) verify_one(step, all);
  if (steps.size() > 1) {
    fmt::print("{} whole{}", counted(all.whole, "step"), all.whole > 0 ? ": " + rate_text(all.bytes, all.seconds) : "");
    fmt::print("; {} damaged, {}\n", all.damaged, counted(all.faults, "fault"));
  }
  return all.damaged == 0;
}
