#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "plait/device/cpu.hpp"
#include "plait/tensor/redistribution.hpp"

/// Gathers whole tensors from a mesh and compares them with others.
namespace plait::test {

/// The whole tensor on every rank.
template <class T>
std::vector<T> gathered(const context<cpu>& ctx, const layout& lies, const T* part) {
  layout whole;
  for (const dim_placement& p : lies.dims) whole.dims.push_back({p.dim, {}});
  const ready_plan moves(lies, whole, ctx.ranks, ctx.sizes, "gathered");
  std::vector<T> full(static_cast<std::size_t>(moves.target().local_size()));
  moves.run(ctx.device, part, full.data(), dtype_of<T>);
  return full;
}

/// Largest difference, relative to the largest golden value.
template <class T>
double distance(const std::vector<T>& got, const std::vector<double>& golden) {
  double largest = 0, worst = 0;
  for (std::size_t i = 0; i < golden.size(); ++i) {
    largest = std::max(largest, std::abs(golden[i]));
    worst = std::max(worst, std::abs(static_cast<double>(got[i]) - golden[i]));
  }
  return worst / largest;
}

}  // namespace plait::test
