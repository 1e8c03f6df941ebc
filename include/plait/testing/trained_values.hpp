// The values that training leaves: parameters and gradients as whole arrays with names, and what was kept.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/parallel/executor.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/testing/findings.hpp"

namespace plait::testing {

struct named_values {
  std::string name;
  std::vector<double> values;  ///< without padding
  bool clean_padding = true;   ///< whether the rows beyond the logical shape are zero
};

/// All of a parameter or its gradient, without its padding; `local` is this rank's part. Collective.
template <class Parameter, class E, class Device>
named_values gather_full(const context<Device>& ctx, const Parameter& p, const E* local) {
  const std::vector<E> all = gather_whole(ctx, p, local);
  std::size_t logical = 1;
  for (std::int64_t n : p.info().shape) logical *= static_cast<std::size_t>(n);
  named_values out{p.name(), {}, true};
  for (std::size_t i = logical; i < all.size(); ++i) out.clean_padding &= widened(all[i]) == 0;
  for (std::size_t i = 0; i < logical; ++i) out.values.push_back(converted<double>(all[i]));
  return out;
}

/// Master values of all parameters that the model visits. Collective.
template <class Device, class Model>
std::vector<named_values> gather_values(const context<Device>& ctx, Model& model) {
  std::vector<named_values> all;
  model.visit([&](auto& p) { all.push_back(gather_full(ctx, p, std::as_const(p).value())); });
  return all;
}
/// Reduced gradients of the trainable ones, as the last step has left them. Collective.
template <class Device, class Model>
std::vector<named_values> gather_gradients(const context<Device>& ctx, Model& model) {
  std::vector<named_values> all;
  model.visit([&](auto& p) {
    if (p.trainable()) all.push_back(gather_full(ctx, p, std::as_const(p).gradient()));
  });
  return all;
}

/// The most microbatches that a rank kept at a time, as its events tell.
inline int most_kept(const std::vector<pipeline_event>& events) {
  int now = 0, most = 0;
  for (const pipeline_event& e : events) {
    if (e.step.op != step_op::pass) continue;
    if (e.step.pass.kind == action_kind::forward) most = std::max(most, ++now);
    if (frees_activations(e.step.pass.kind)) --now;
  }
  return most;
}

inline double norm_of(const std::vector<double>& v) {
  double squares = 0;
  for (double x : v) squares += x * x;
  return std::sqrt(squares);
}

inline std::string scientific(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", x);
  return text;
}

/// Each array of `got` against the one of that name in `expected`, which may have more: relative in the
/// Euclidean norm, or where `vanishes` says so relative to `scale`.
inline findings compare_named(const std::vector<named_values>& got, const std::vector<named_values>& expected,
                              double tolerance, const std::function<bool(const std::string&)>& vanishes = {},
                              double scale = 1.0) {
  findings found;
  found.require(!got.empty(), "there is nothing to compare");
  for (const named_values& a : got) {
    const named_values* b = nullptr;
    for (const named_values& e : expected)
      if (e.name == a.name) b = &e;
    if (!b) {
      found.add(a.name + " is not on one rank");
      continue;
    }
    found.require(a.clean_padding, a.name + " has padding that is not zero");
    if (a.values.size() != b->values.size()) {
      found.add(a.name + " has another size than on one rank");
      continue;
    }
    double difference = relative_difference(a.values, b->values);
    if (vanishes && vanishes(a.name)) {
      std::vector<double> d = a.values;
      for (std::size_t i = 0; i < d.size(); ++i) d[i] -= b->values[i];
      difference = norm_of(d) / scale;
    }
    if (!(difference <= tolerance)) found.add(cat({a.name, " differs by ", scientific(difference)}));
  }
  return found;
}

}  // namespace plait::testing

#include "plait/core/macros_on.hpp"
