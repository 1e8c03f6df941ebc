// Checks that a program computes the same on several ranks as on one. Records of two runs are compared by global index,
// for any layouts; the result is the first step and array that differ.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/boxes.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/comm/deadline.hpp"
#include "plait/core/box.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/tensor/interop.hpp"
#include "plait/testing/program_record.hpp"

/// Any program can record its arrays, once on one rank and once on several:
///
///     pl::testing::program_record record(ctx, "runs/tp4");           // or a program_run, which is in memory
///     for (int i = 0; i < steps; ++i) {
///       record.step(i);
///       train_step();
///       record.add("up.output", h);                                  // a pl::part, a tensor or a view, with its spec
///       record.add("up.gradient", pl::part<float, pl::dual_t<up_weight>>(ctx, dw));
///       record.add_scalar<pl::spec<pl::partial<dp>>>("loss", loss);  // a number on the host
///     }
///     record.finish();
///
/// After all ranks of both runs have ended, one process compares the records. It returns the first difference, or none:
///
///     const pl::testing::program_run one("runs/one"), many("runs/tp4");
///     std::puts(pl::testing::compare_runs(one, many, {.relative = 1e-5}).text().c_str());
namespace plait::testing {

/// Numbers a and b of two runs are equal if |a - b| <= relative * m + absolute. m is the largest finite magnitude of
/// the array in both runs. Integers must be identical. A NaN differs from every number, including a NaN.
struct parity_limits {
  double relative = 1e-5;
  double absolute = 0;
  /// Like `relative`, for ranks whose numbers must be equal by their spec. 0: identical.
  double replicas = 0;
};

/// The first difference of two runs.
struct program_difference {
  std::string what;        ///< empty: no difference
  std::int64_t step = -1;  ///< -1: the difference concerns the runs as a whole
  std::string array{};     ///< empty: it concerns the step as a whole
  // If elements differ:
  std::vector<std::int64_t> index{};  ///< in the whole array
  double one = 0, many = 0;           ///< the element in the first and in the second run
  double ratio = 0;                   ///< second over first run, if equal in all differing elements; 0: not equal
  std::string axes{};                 ///< the axes whose extents explain the ratio: "tp", "dp or tp", "dp*tp"

  bool empty() const { return what.empty(); }
  /// Returns one line, or an empty text if the runs are equal.
  std::string text() const {
    std::string where = step < 0 ? "" : cat({"step ", step, array.empty() ? "" : ", ", array, ": "});
    return empty() ? "" : where + what;
  }
};

namespace detail {

struct array_part {
  int rank;
  const recorded_array* array;
};
using array_parts = std::vector<array_part>;  // of all ranks that have the array

inline std::string number_text(double x, int digits = 9) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*g", digits, x);
  return text;
}
/// Returns "1 on rank 0 and 2 on rank 1", with enough digits to show the difference.
inline std::string two_numbers(double a, const std::string& of_a, double b, const std::string& of_b) {
  const int digits = number_text(a) == number_text(b) ? 17 : 9;
  return cat({number_text(a, digits), of_a, " and ", number_text(b, digits), of_b});
}
/// "(batch=8, hidden=16)", the shape of the whole array.
inline std::string shape_of(const exported_layout& lies) {
  std::string text;
  for (const exported_layout::dim& d : lies.dims) append(text, {text.empty() ? "" : ", ", d.name, "=", d.global});
  return cat({"(", text, ")"});
}
/// "dp=1,tp=4".
inline std::string mesh_of(const exported_layout& lies) {
  std::string text;
  for (const exported_layout::axis& a : lies.mesh) append(text, {text.empty() ? "" : ",", a.name, "=", a.extent});
  return text;
}
inline box box_of(const exported_layout& lies) {
  box part;
  for (const exported_layout::dim& d : lies.dims) {
    const int i = part.dims++;
    part.global[i] = d.global, part.offset[i] = d.offset, part.local[i] = d.local;
  }
  return part;
}
/// Returns the index in the whole array of element `i` of a part.
inline std::vector<std::int64_t> global_index(const box& part, std::size_t i) {
  std::vector<std::int64_t> index(static_cast<std::size_t>(part.dims));
  auto rest = static_cast<std::int64_t>(i);
  for (int d = part.dims; d-- > 0; rest /= part.local[d])
    index[static_cast<std::size_t>(d)] = part.offset[d] + rest % part.local[d];
  return index;
}
/// " at [batch=3, hidden=0]", or nothing for a scalar.
inline std::string index_text(const exported_layout& lies, const std::vector<std::int64_t>& index) {
  std::string text;
  for (std::size_t d = 0; d < index.size(); ++d)
    append(text, {d == 0 ? " at [" : ", ", lies.dims[d].name, "=", index[d]});
  return text.empty() ? text : text + "]";
}

template <class Number>
std::vector<Number> numbers_of(const recorded_array& a) {
  const safetensors_entry entry{a.name, a.type, {}, a.bytes};
  std::vector<Number> out(static_cast<std::size_t>(entry.size()));
  copy_elements(entry, out.data());
  return out;
}

/// The elements in which two arrays differ.
template <class Number>
struct differing {
  std::vector<std::size_t> at;
  double limit = 0;

  differing(const std::vector<Number>& a, const std::vector<Number>& b, double relative, double absolute) {
    double largest = 0;
    for (const std::vector<Number>* all : {&a, &b})
      for (const Number x : *all)
        if (const double size = std::abs(static_cast<double>(x)); std::isfinite(size))
          largest = std::max(largest, size);
    limit = relative * largest + absolute;
    for (std::size_t i = 0; i < a.size(); ++i)
      if (a[i] != b[i] && (std::integral<Number> || !(std::abs(static_cast<double>(a[i] - b[i])) <= limit)))
        at.push_back(i);
  }
};

/// Returns how the ranks' records of one array disagree in shape or layout, or an empty text.
inline std::string declaration_difference(const array_parts& parts) {
  const auto declared = [](const recorded_array& a) {
    std::string text = cat({name_of(a.type), " ", a.lies.spec, " of ", shape_of(a.lies)});
    return cat({text, " on the mesh ", mesh_of(a.lies)});
  };
  std::set<std::vector<std::int64_t>> places;
  std::int64_t expected = 1;
  for (const exported_layout::axis& a : parts[0].array->lies.mesh) expected *= a.extent;
  for (const array_part& p : parts) {
    const std::string first = declared(*parts[0].array), other = declared(*p.array);
    if (first != other)
      return cat({"rank ", parts[0].rank, " records ", first, ", and rank ", p.rank, " records ", other});
    std::vector<std::int64_t> place;
    for (const exported_layout::axis& a : p.array->lies.mesh) place.push_back(a.coordinate);
    places.insert(place);
  }
  std::vector<std::size_t> ranks;
  for (const array_part& p : parts) ranks.push_back(static_cast<std::size_t>(p.rank));
  if (static_cast<std::int64_t>(places.size()) == expected) return "";
  return cat({"only ", plait::detail::ranks_text(ranks), " recorded it, which are ", places.size(), " of the ",
              expected, " places of the mesh ", mesh_of(parts[0].array->lies)});
}

/// Returns an error text: `ranks` have other numbers than the rank of `a`, for example at element `i` of the part of
/// `b`.
template <class Number>
std::string replica_difference(const array_part& a, const array_part& b, const std::vector<std::size_t>& ranks,
                               std::size_t i) {
  std::string states;
  const exported_layout& lies = a.array->lies;
  for (std::size_t k = 0; k < lies.mesh.size(); ++k)
    if (lies.mesh[k].coordinate != b.array->lies.mesh[k].coordinate)
      append(states, {states.empty() ? "" : " and ", lies.mesh[k].state, " over ", lies.mesh[k].name});
  const auto value = [&](const array_part& p) { return static_cast<double>(numbers_of<Number>(*p.array)[i]); };
  const auto of_rank = [](int rank) { return cat({" on rank ", rank}); };
  return cat({plait::detail::ranks_text(ranks), ranks.size() == 1 ? " differs" : " differ", " from rank ", a.rank,
              ", although ", lies.spec, " is ", states.empty() ? "the spec of one part" : states, ": the element",
              index_text(lies, global_index(box_of(lies), i)), " is ",
              two_numbers(value(a), of_rank(a.rank), value(b), of_rank(b.rank))});
}

/// A whole array, assembled from the parts of ranks.
template <class Number>
struct whole_array {
  std::vector<Number> values;
  std::string fault{};  ///< how ranks differ whose parts should be equal, or empty
};

/// Sums partial parts, and parts along the axes `summed`. Copies other parts to their places, each once.
template <class Number>
whole_array<Number> assemble(const array_parts& parts, const std::set<std::string>& summed, double replicas) {
  const box all = plait::detail::whole_box(box_of(parts[0].array->lies));
  whole_array<Number> out{std::vector<Number>(static_cast<std::size_t>(all.global_size()))};
  std::map<std::vector<std::int64_t>, const array_part*> first_at;
  const array_part *first = nullptr, *other = nullptr;
  std::vector<std::size_t> faulty;
  std::size_t at = 0;
  for (const array_part& p : parts) {
    const exported_layout& lies = p.array->lies;
    const box part = box_of(lies);
    std::vector<std::int64_t> key;
    for (const exported_layout::axis& a : lies.mesh)
      key.push_back(a.state == name_of(state::partial) || summed.contains(a.name) ? a.coordinate : 0);
    key.insert(key.end(), part.offset.begin(), part.offset.end());
    const std::vector<Number> own = numbers_of<Number>(*p.array);
    const auto [place, is_new] = first_at.try_emplace(key, &p);
    if (is_new) {
      plait::detail::each_common_run(part, part, all, [&](std::int64_t from, std::int64_t to, std::int64_t n) {
        for (std::int64_t i = 0; i < n; ++i)
          out.values[static_cast<std::size_t>(to + i)] += own[static_cast<std::size_t>(from + i)];
      });
      continue;
    }
    const std::vector<Number> before = numbers_of<Number>(*place->second->array);
    const auto& differ = differing<Number>(before, own, replicas, 0).at;
    const auto found = std::find_if(differ.begin(), differ.end(), [&](std::size_t i) {
      return before[i] == before[i] || own[i] == own[i];  // a NaN in both is found by the comparison of runs
    });
    if (found == differ.end() || (first != nullptr && first != place->second)) continue;
    if (first == nullptr) first = place->second, other = &p, at = *found;
    faulty.push_back(static_cast<std::size_t>(p.rank));
  }
  if (first != nullptr) out.fault = replica_difference<Number>(*first, *other, faulty, at);
  return out;
}

/// Calls f with each set of the numbers below n, as bits, small sets first, until f returns true.
template <class F>
void each_subset(std::size_t n, F&& f) {
  for (int size = 1; size <= static_cast<int>(n); ++size)
    for (unsigned set = 1; set < 1u << n; ++set)
      if (std::popcount(set) == size && f(set)) return;
}

/// Returns a text with the sum over unequal replicas that gives the other run's array, if there is one.
template <class Number>
std::string missing_sum(const array_parts& parts, const std::vector<Number>& expected, const parity_limits& limits) {
  std::vector<std::string> axes;
  for (const exported_layout::axis& a : parts[0].array->lies.mesh)
    if (a.extent > 1 && (a.state == name_of(state::replicated) || a.state == name_of(state::invariant)))
      axes.push_back(a.name);
  std::string text;
  each_subset(axes.size(), [&](unsigned set) {
    std::set<std::string> summed;
    std::string label;
    for (std::size_t i = 0; i < axes.size(); ++i)
      if ((set >> i & 1u) != 0) summed.insert(axes[i]), append(label, {label.empty() ? "" : "*", axes[i]});
    const whole_array<Number> sum = assemble<Number>(parts, summed, limits.replicas);
    if (!sum.fault.empty() || !differing<Number>(sum.values, expected, limits.relative, limits.absolute).at.empty())
      return false;
    text = cat({"; their sum over ", label, " equals the other run: a reduction over ", label, " is missing"});
    return true;
  });
  return text;
}

/// The axes whose extents may be a wrong factor, each with that factor.
inline std::vector<std::pair<std::string, double>> factors_of(const exported_layout& one, const exported_layout& many) {
  std::map<std::string, std::pair<double, double>> extents;
  for (const exported_layout::axis& a : one.mesh) extents[a.name] = {a.extent, 1};
  for (const exported_layout::axis& a : many.mesh) {
    const auto place = extents.try_emplace(a.name, 1, 1).first;
    place->second.second = static_cast<double>(a.extent);
  }
  std::vector<std::pair<std::string, double>> factors;
  for (const auto& [name, n] : extents) {
    const double more = std::max(n.first, n.second), less = std::min(n.first, n.second);
    if (more > 1) factors.emplace_back(name, more > less ? more / less : more);
  }
  return factors;
}

/// Finds the common ratio of all differing elements, and the axes that explain it.
template <class Number>
void find_ratio(const std::vector<Number>& one, const std::vector<Number>& many, const differing<Number>& found,
                const std::vector<std::pair<std::string, double>>& factors, program_difference& d) {
  const auto holds = [&](double ratio) {
    return std::all_of(found.at.begin(), found.at.end(), [&](std::size_t i) {
      return std::abs(static_cast<double>(many[i]) - ratio * static_cast<double>(one[i])) <= found.limit;
    });
  };
  int size = 0;
  each_subset(factors.size(), [&](unsigned set) {
    if (size != 0 && std::popcount(set) > size) return true;
    double n = 1;
    std::string label;
    for (std::size_t i = 0; i < factors.size(); ++i)
      if ((set >> i & 1u) != 0) n *= factors[i].second, append(label, {label.empty() ? "" : "*", factors[i].first});
    for (const double ratio : {n, 1 / n})
      if ((size == 0 || d.ratio == ratio) && holds(ratio)) {
        append(d.axes, {size == 0 ? "" : " or ", label});
        d.ratio = ratio, size = std::popcount(set);
      }
    return false;
  });
  if (size != 0 || found.at.size() < 2) return;
  const auto smaller = [&](std::size_t i, std::size_t j) {
    return std::abs(static_cast<double>(one[i])) < std::abs(static_cast<double>(one[j]));
  };
  const std::size_t largest = *std::max_element(found.at.begin(), found.at.end(), smaller);
  const double ratio = static_cast<double>(many[largest]) / static_cast<double>(one[largest]);
  if (std::abs(ratio - 1) > 0.01 && holds(ratio)) d.ratio = ratio;  // close to 1, noise resembles a ratio
}

/// Compares the arrays of two runs that have equal shapes and kinds.
template <class Number>
program_difference array_difference(const array_parts& one, const array_parts& many, const parity_limits& limits) {
  program_difference d;
  const whole_array<Number> a = assemble<Number>(one, {}, limits.replicas);
  const whole_array<Number> b = assemble<Number>(many, {}, limits.replicas);
  if (!a.fault.empty())
    d.what = cat({"in the first run, ", a.fault, b.fault.empty() ? missing_sum(one, b.values, limits) : ""});
  else if (!b.fault.empty())
    d.what = cat({"in the second run, ", b.fault, missing_sum(many, a.values, limits)});
  const differing<Number> found(a.values, b.values, limits.relative, limits.absolute);
  if (!d.what.empty() || found.at.empty()) return d;
  const exported_layout &first = one[0].array->lies, &second = many[0].array->lies;
  const std::size_t at = found.at[0];
  d.index = global_index(plait::detail::whole_box(box_of(first)), at);
  d.one = static_cast<double>(a.values[at]), d.many = static_cast<double>(b.values[at]);
  find_ratio(a.values, b.values, found, factors_of(first, second), d);
  d.what = cat({found.at.size(), " of ", a.values.size(), " elements differ by more than ", number_text(found.limit),
                "; the first", index_text(first, d.index), " is ",
                two_numbers(d.one, cat({" in the first run (", mesh_of(first), ")"}), d.many,
                            cat({" in the second (", mesh_of(second), ")"}))});
  if (d.ratio != 0 && d.axes.empty()) append(d.what, {"; each is ", number_text(d.ratio), " times the first run's"});
  if (!d.axes.empty())
    append(d.what,
           {"; each is ", d.ratio < 1 ? "1/" : "", number_text(std::max(d.ratio, 1 / d.ratio)),
            d.ratio < 1 ? " of" : " times", " the first run's, a factor that the extent of ", d.axes, " gives"});
  return d;
}

inline array_parts parts_of(const program_run& run, std::size_t step, const std::string& name) {
  array_parts parts;
  for (const auto& [rank, record] : run.by_rank())
    if (const recorded_array* const a = record.steps[step].find(name)) parts.push_back({rank, a});
  return parts;
}

inline program_difference compare_array(const array_parts& one, const array_parts& many, const parity_limits& limits) {
  if (one.empty() || many.empty()) return {cat({"is in the ", one.empty() ? "second" : "first", " run alone"})};
  if (const std::string fault = declaration_difference(one); !fault.empty()) return {"in the first run, " + fault};
  if (const std::string fault = declaration_difference(many); !fault.empty()) return {"in the second run, " + fault};
  const recorded_array &a = *one[0].array, &b = *many[0].array;
  const std::string first = shape_of(a.lies), second = shape_of(b.lies);
  if (first != second) return {cat({"is ", first, " in the first run and ", second, " in the second"})};
  if (is_floating(a.type) != is_floating(b.type))
    return {cat({"is ", name_of(a.type), " in the first run and ", name_of(b.type), " in the second"})};
  return is_floating(a.type) ? array_difference<double>(one, many, limits)
                             : array_difference<std::int64_t>(one, many, limits);
}

/// Returns the names of a step's arrays in both runs, in the order of their recording, those of the first run first.
inline std::vector<std::string> names_in(const program_run& one, const program_run& many, std::size_t step) {
  std::vector<std::string> names;
  std::set<std::string> known;
  for (const program_run* run : {&one, &many})
    for (const auto& [rank, record] : run->by_rank())
      for (const recorded_array& a : record.steps[step].arrays)
        if (known.insert(a.name).second) names.push_back(a.name);
  return names;
}

/// Compares the numbers of the i-th step of each rank in both runs. The result's `step` is this number, or -1 at the
/// end.
inline program_difference next_step(const program_run& one, const program_run& many, std::size_t i) {
  program_difference d;
  std::string first;
  for (const program_run* run : {&one, &many})
    for (const auto& [rank, record] : run->by_rank()) {
      const bool more = i < record.steps.size();
      const std::int64_t number = more ? record.steps[i].number : -1;
      const std::string text = cat({"rank ", rank, " of the ", run == &one ? "first" : "second", " run ",
                                    more ? cat({"records step ", number, " next"}) : std::string("has no more steps")});
      if (first.empty()) first = text, d.step = number;
      if (number != d.step) return {cat({first, ", and ", text}), std::max(number, d.step)};
    }
  return d;
}

inline std::string missing_ranks(const program_run& run, const char* name) {
  if (run.by_rank().empty()) return cat({"the ", name, " run has no record"});
  const int ranks = run.by_rank().begin()->second.ranks;
  for (int r = 0; r < ranks; ++r)
    if (!run.by_rank().contains(r)) return cat({"the ", name, " run has no record of rank ", r, " of ", ranks});
  return "";
}

}  // namespace detail

/// Compares two runs, usually one rank and several. Returns the first step and array that differ, in the first run's
/// order of recording. The runs may differ in ranks, meshes and specs, and may use float, double or bf16. Further
/// differences are: an array or a step that only one run has, another order of steps, other shapes, and every NaN.
/// Parts that differ although their spec makes them equal are also a difference.
inline program_difference compare_runs(const program_run& one, const program_run& many,
                                       const parity_limits& limits = {}) {
  for (const auto& [run, name] : {std::pair{&one, "first"}, std::pair{&many, "second"}})
    if (const std::string missing = detail::missing_ranks(*run, name); !missing.empty()) return {missing};
  bool compared = false;
  for (std::size_t i = 0;; ++i) {
    const program_difference step = detail::next_step(one, many, i);
    if (!step.empty()) return step;
    if (step.step < 0) break;
    for (const std::string& name : detail::names_in(one, many, i)) {
      program_difference d =
          detail::compare_array(detail::parts_of(one, i, name), detail::parts_of(many, i, name), limits);
      d.step = step.step, d.array = name, compared = true;
      if (!d.empty()) return d;
    }
  }
  for (const auto& [run, name] : {std::pair{&one, "first"}, std::pair{&many, "second"}})
    for (const auto& [rank, record] : run->by_rank())
      if (!record.finished)
        return {cat(
            {"rank ", rank, " of the ", name, " run did not finish its record; call finish() after its last step"})};
  return {compared ? "" : "there is nothing to compare: no array is recorded"};
}

}  // namespace plait::testing

#include "plait/core/macros_on.hpp"
