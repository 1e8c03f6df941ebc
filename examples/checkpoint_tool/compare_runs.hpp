// Compares the logs of two runs step by step, in every bit: finds the steps, numbers and parameters that differ.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "train_llama/observe/run_log.hpp"

namespace plait {

/// Returns the layer of a parameter, by its name: the part up to the first number, as `model.layers.3` for
/// `model.layers.3.mlp.up_proj.weight`. Without a number it is all but the last part, as `model.norm`.
constexpr std::string_view layer_of(std::string_view parameter) {
  for (std::size_t begin = 0; begin < parameter.size();) {
    const std::size_t end = std::min(parameter.find('.', begin), parameter.size());
    const std::string_view part = parameter.substr(begin, end - begin);
    if (!part.empty() && part.find_first_not_of("0123456789") == part.npos) return parameter.substr(0, end);
    begin = end + 1;
  }
  const std::size_t last = parameter.find_last_of('.');
  return last == parameter.npos ? parameter : parameter.substr(0, last);
}

/// A number of a step whose bits differ in the two logs.
struct number_difference {
  std::string_view name;  ///< its name in the log
  double a = 0, b = 0;
};

/// The difference of two logs' hashes of a step, of weights or of gradients.
struct hash_difference {
  struct entry {
    std::string name;
    std::uint64_t a = 0, b = 0;
  };
  std::size_t compared = 0;                 ///< names that both have
  std::vector<entry> differing{};           ///< in A's order
  std::vector<std::string> only_a, only_b;  ///< names, in the order of their log

  bool equal() const { return differing.empty() && only_a.empty() && only_b.empty(); }
};

/// A step at which two runs differ, with all differences.
struct step_difference {
  std::int64_t step = 0;
  std::vector<number_difference> numbers{};
  hash_difference weights{}, gradients{};  ///< empty if only one log has hashes

  bool equal() const { return numbers.empty() && weights.equal() && gradients.equal(); }
};

/// The comparison of two runs. Steps are in ascending order.
struct run_comparison {
  std::vector<std::int64_t> compared;        ///< steps for which both logs have numbers, or both have hashes
  std::vector<std::int64_t> only_a, only_b;  ///< steps that only one log has
  std::vector<std::int64_t> apart;           ///< steps with only numbers in one log and only hashes in the other
  std::vector<std::int64_t> hashed, hashed_only_a, hashed_only_b;  ///< common steps, by logs with hashes of weights
  std::vector<step_difference> differences;                        ///< the compared steps that differ

  bool equal() const { return differences.empty(); }
  /// Returns the first compared step whose weights differ; null: there is none.
  const step_difference* first_weights() const {
    for (const step_difference& d : differences)
      if (!d.weights.equal()) return &d;
    return nullptr;
  }
};

/// Compares two lists of hashes by name.
inline hash_difference compare_hashes(const named_hashes& a, const named_hashes& b) {
  hash_difference out;
  std::unordered_map<std::string_view, std::uint64_t> left;
  for (const auto& [name, hash] : b) left.emplace(name, hash);
  for (const auto& [name, hash] : a) {
    const auto found = left.find(name);
    if (found == left.end()) {
      out.only_a.push_back(name);
      continue;
    }
    ++out.compared;
    if (found->second != hash) out.differing.push_back({name, hash, found->second});
    left.erase(found);
  }
  for (const auto& [name, hash] : b)
    if (left.contains(name)) out.only_b.push_back(name);
  return out;
}

/// Compares one step in two logs. Numbers are equal if their bits are. All numbers that are not finite are equal,
/// because the log has null for each.
inline step_difference compare_steps(const logged_step& a, const logged_step& b) {
  step_difference out{.step = a.step};
  const auto compare = [&](std::string_view name, double x, double y) {
    if (std::bit_cast<std::uint64_t>(x) != std::bit_cast<std::uint64_t>(y)) out.numbers.push_back({name, x, y});
  };
  if (a.numbers && b.numbers) {
    compare("lr", a.numbers->lr, b.numbers->lr);
    compare("loss", a.numbers->loss, b.numbers->loss);
    compare("grad_norm", a.numbers->grad_norm, b.numbers->grad_norm);
  }
  if (!a.gradients.empty() && !b.gradients.empty()) out.gradients = compare_hashes(a.gradients, b.gradients);
  if (!a.weights.empty() && !b.weights.empty()) out.weights = compare_hashes(a.weights, b.weights);
  return out;
}

/// Compares the runs of two logs at the steps that both have.
inline run_comparison compare_runs(const run_log& a, const run_log& b) {
  run_comparison out;
  auto i = a.steps.begin(), j = b.steps.begin();
  while (i != a.steps.end() || j != b.steps.end()) {
    if (j == b.steps.end() || (i != a.steps.end() && i->step < j->step)) {
      out.only_a.push_back((i++)->step);
    } else if (i == a.steps.end() || j->step < i->step) {
      out.only_b.push_back((j++)->step);
    } else {
      const bool hashed_both = !i->weights.empty() && !j->weights.empty();
      (hashed_both || (i->numbers && j->numbers) ? out.compared : out.apart).push_back(i->step);
      if (hashed_both)
        out.hashed.push_back(i->step);
      else if (!i->weights.empty() || !j->weights.empty())
        (j->weights.empty() ? out.hashed_only_a : out.hashed_only_b).push_back(i->step);
      step_difference found = compare_steps(*i++, *j++);
      if (!found.equal()) out.differences.push_back(std::move(found));
    }
  }
  return out;
}

}  // namespace plait
