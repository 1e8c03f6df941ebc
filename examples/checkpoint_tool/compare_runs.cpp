#include "checkpoint_tool/compare_runs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "commands.hpp"
#include "plait/io/json.hpp"
#include "plait/io/mapped_file.hpp"
#include "plait/parallel/step_result.hpp"
#include "steps.hpp"
#include "table.hpp"

namespace {

/// The most parameters of a step that are listed.
constexpr std::size_t most_listed = 8;

/// Returns ascending numbers as text, with consecutive ones joined: "1 to 3, 5, 8".
std::string steps_text(std::span<const std::int64_t> steps) {
  std::string text;
  for (std::size_t begin = 0, end = 0; begin < steps.size(); begin = end) {
    for (end = begin + 1; end < steps.size() && steps[end] == steps[end - 1] + 1;) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", steps[begin]);
    if (end - begin > 1) text += fmt::format("{}{}", end - begin > 2 ? " to " : ", ", steps[end - 1]);
  }
  return text;
}
std::string steps_text(const plait::run_log& log, bool hashed) {
  std::vector<std::int64_t> steps;
  for (const plait::logged_step& s : log.steps)
    if (!hashed || !s.weights.empty()) steps.push_back(s.step);
  return steps_text(steps);
}

std::string number_text(double value) { return std::isfinite(value) ? plait::json_number(value) : "not finite"; }

plait::run_log read(const std::string& argument, const std::string& path) {
  const plait::mapped_file file(path, argument);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  plait::run_log log = plait::read_run_log(text, argument + ": '" + path + "'");
  if (steps_text(log, true).empty())
    plait::fail({argument, ": '", path, "' has no hashes, so that nothing is known of its weights; train_llama writes ",
                 "them with --log-hashes N, every N steps"});
  return log;
}

/// Prints the content of a log, and problems in it.
void print_log(char name, const std::string& path, const plait::run_log& log) {
  fmt::print("{}: {}, steps {}, hashed at {}\n", name, printable(path), steps_text(log, false), steps_text(log, true));
  if (log.cut_short) fmt::print("{}: its last line is not whole, and left out\n", name);
  if (!log.repeated.empty())
    fmt::print("{}: the run went back and made steps {} again; the last ones count\n", name, steps_text(log.repeated));
  if (!log.hashed_anew.empty())
    fmt::print("{}: a run that went on from step {} had other weights than were there\n", name,
               steps_text(log.hashed_anew));
}

/// Prints names that only one log has.
void print_unmatched(const std::vector<std::string>& names, char of, const char* what) {
  for (std::size_t i = 0; i < std::min(names.size(), most_listed); ++i)
    fmt::print("only in {}: {} {}\n", of, what, printable(names[i]));
  if (names.size() > most_listed) fmt::print("only in {}: {} more\n", of, names.size() - most_listed);
}

/// Prints the parameters whose hashes differ in a step. `what` is "gradient" or "parameter".
void print_differences(const plait::hash_difference& hashes, const char* what, std::int64_t step) {
  print_unmatched(hashes.only_a, 'A', what);
  print_unmatched(hashes.only_b, 'B', what);
  if (hashes.differing.empty()) {
    if (hashes.compared > 0)
      fmt::print("{}s at step {}: all {} that both have are equal\n", what, step, hashes.compared);
    return;
  }
  const plait::hash_difference::entry& first = hashes.differing.front();
  fmt::print("{}s at step {}: {} of {} differ, the first is {} of {}\n", what, step, hashes.differing.size(),
             hashes.compared, printable(first.name), printable(plait::layer_of(first.name)));
  table rows({{what}, {"layer"}, {"A"}, {"B"}});
  for (std::size_t i = 0; i < std::min(hashes.differing.size(), most_listed); ++i) {
    const plait::hash_difference::entry& e = hashes.differing[i];
    rows.add({e.name, std::string(plait::layer_of(e.name)), plait::hex_text(e.a), plait::hex_text(e.b)});
  }
  fmt::print("\n{}", rows.text());
  if (hashes.differing.size() > most_listed) fmt::print("({} more)\n", hashes.differing.size() - most_listed);
  fmt::print("\n");
}

/// Prints the first step that differs. If its weights are equal or unknown, also prints the first step whose weights
/// differ.
void print_first_difference(const plait::run_comparison& found) {
  const plait::step_difference& first = found.differences.front();
  std::vector<std::int64_t> before = found.compared;
  std::erase_if(before, [&](std::int64_t step) { return step >= first.step; });
  fmt::print(
      "\nfirst difference: step {}{}\n", first.step,
      before.empty() ? ", the first that can be compared" : fmt::format("; equal before: {}", steps_text(before)));
  if (!first.numbers.empty()) {
    table numbers({{"number"}, {"A", table::align::right}, {"B", table::align::right}});
    for (const plait::number_difference& n : first.numbers)
      numbers.add({std::string(n.name), number_text(n.a), number_text(n.b)});
    fmt::print("\n{}\n", numbers.text());
  }
  print_differences(first.gradients, "gradient", first.step);
  print_differences(first.weights, "parameter", first.step);
  const plait::step_difference* const weights = found.first_weights();
  if (weights == nullptr) fmt::print("parameters: equal wherever both logs have hashes\n");
  if (weights == nullptr || weights == &first) return;
  const auto next = std::find(found.hashed.begin(), found.hashed.end(), weights->step);
  fmt::print("first different parameters: step {}{}\n", weights->step,
             next == found.hashed.begin() ? ", the first that is hashed in both"
                                          : fmt::format("; equal at step {}, hashed before it", *std::prev(next)));
  print_differences(weights->gradients, "gradient", weights->step);
  print_differences(weights->weights, "parameter", weights->step);
}

}  // namespace

bool compare_runs(const std::string& a, const std::string& b) {
  const plait::run_log in_a = read("A", a), in_b = read("B", b);
  print_log('A', a, in_a);
  print_log('B', b, in_b);
  const plait::run_comparison found = plait::compare_runs(in_a, in_b);
  if (found.hashed.empty())
    plait::fail({"no step has hashes in both logs: A has them at ", steps_text(in_a, true), ", B at ",
                 steps_text(in_b, true), "; give both runs the same --log-hashes"});
  for (const auto& [steps, text] :
       {std::pair(&found.only_a, "only in A: steps"), std::pair(&found.only_b, "only in B: steps"),
        std::pair(&found.hashed_only_b, "no hashes in A: steps"),
        std::pair(&found.hashed_only_a, "no hashes in B: steps")})
    if (!steps->empty()) fmt::print("{} {}\n", text, steps_text(*steps));
  if (!found.apart.empty())
    fmt::print("nothing to compare: steps {}, hashes in one log and numbers in the other\n", steps_text(found.apart));
  if (!found.equal()) print_first_difference(found);
  fmt::print("steps: {} equal, {} different, {} in one log only; hashes compared at {}\n",
             found.compared.size() - found.differences.size(), found.differences.size(),
             found.only_a.size() + found.only_b.size(), steps_text(found.hashed));
  const bool whole = found.only_a.empty() && found.only_b.empty() && found.apart.empty();
  fmt::print("{}\n", !found.equal() ? "different" : whole ? "equal" : "equal, in the steps that both have");
  return found.equal();
}
