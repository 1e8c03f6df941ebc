// The deterministic sums of linears that share an input: over contracted features, over output features for the input's
// gradient, and over tokens for the weights' gradients.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/deterministic/feature_sum.hpp"
#include "plait/deterministic/gradient_terms.hpp"
#include "plait/device/deterministic_products.hpp"

namespace plait::detail {

/// The layout in memory of linears' matrices. The input is [rows, inner]. Outputs are side by side as [rows, total],
/// and weights are stacked as [total, inner]. The weight of a single linear may also be [inner, total].
struct linear_extents {
  std::int64_t rows = 1, inner = 1, total = 0;
  bool inputs_first = false;
  std::vector<std::int64_t> columns;  ///< of each branch
};

/// The deterministic stages of linears. Sums are computed in the type of arithmetic, and rounded once.
template <class Precision, compute_device Device>
class deterministic_linear {
  using T = activation_of<Precision>;
  using W = weight_of<Precision>;
  using G = gradient_of<Precision>;
  using A = arithmetic<T>;
  static constexpr std::int64_t one_sum = deterministic_products::chunk;

 public:
  deterministic_linear() = default;
  /// `d` is the derivation of the linears. Throws `plait::error` if no deterministic order exists for them.
  template <class Linears>
  deterministic_linear(const context<Device>& ctx, const Linears& d, const ready_plan& resolve,
                       const ready_plan& spread, linear_extents extents, const std::string& name)
      : x_(std::move(extents)) {
    const auto refuse = [&](const char* what) { require_any_order(ctx, name, what); };
    if constexpr (!has_deterministic_products<Device>) {
      refuse("products on this device");
    } else if (!ctx.device.deterministic()) {
      fail({name, ": deterministic sums need a device whose products have one order: set its options::deterministic"});
    }
    const layout& weight = d.branches[0].placed;
    if (const dim_id dim = leading(weight, d.branches[0].output, false); has_feature_leaves(dim, weight)) {
      contracted_ = feature_sum<Device>(ctx, weight, dim, feature_leaves(ctx.deterministic, ctx.sizes.of(dim)), resolve,
                                        name + ": output");
    } else if (!resolve.trivial()) {
      refuse("an output that is summed over ranks without leaves");
    }
    std::int64_t leaves = 0;
    axis_list axes;
    std::vector<dim_id> dims;
    for (const auto& b : d.branches) {
      const dim_id dim = leading(b.placed, b.output, true);
      dims.push_back(dim);
      const bool cut = has_feature_leaves(dim, b.placed);
      const axis_list over = ctx.ranks.pruned(b.placed.axes_of(dim));
      if (&b != d.branches.data() && (cut != (leaves > 0) || !(over == axes)))
        refuse("linears that share an input and are sharded over different ranks");
      axes = over;
      if (cut) leaves = std::gcd(leaves, feature_leaves(ctx.deterministic, ctx.sizes.of(dim)));
    }
    if (leaves > 0) {
      own_ = feature_sum<Device>(ctx, weight, dims[0], leaves, spread, name + ": gradient of the input");
      require_equal_leaves(ctx, dims, axes, leaves, name);
    }
    if (leaves == 0 && !spread.trivial()) refuse("a gradient of the input that is summed over ranks without leaves");
    tokens_ = token_leaves(ctx.deterministic, without_dims(d.gathered, d.branches[0].weight), ctx.ranks.shape(),
                           ctx.sizes, ctx.ranks.rank(), token_grain::coarse, name);
    made_ = true;
  }

  explicit operator bool() const { return made_; }
  /// Whether outputs are sums over leaves of features, which `forward` computes. Otherwise a product computes them.
  bool sums_output() const { return static_cast<bool>(contracted_); }
  bool sums_input_gradient() const { return static_cast<bool>(own_); }
  const token_leaves& tokens() const { return tokens_; }

  /// y = x W', redistributed to the output's layout, plus `addend` if that is not null.
  void forward(Device& device, const T* x, const W* w, T* y, const T* addend, std::int64_t size) const {
    const std::int64_t width = x_.inner / contracted_.local_leaves();
    contracted_.template run<A>(
        device, x_.rows * x_.total, width <= one_sum,
        [&](std::int64_t i, A* out, bool adds) {
          const W* const from = w + i * width * (x_.inputs_first ? x_.total : 1);
          device.gemm(false, !x_.inputs_first, x_.rows, x_.total, width, A(1), x + i * width, x_.inner, from,
                      x_.inputs_first ? x_.total : x_.inner, A(adds), out, x_.total);
        },
        place_of(y, addend), [&](const A* sum) { put(device, sum, y, addend, size); });
  }
  /// dx = d W, redistributed to the input's layout, plus `addend`.
  void backward(Device& device, const T* d, const W* w, T* dx, const T* addend, std::int64_t size) const {
    const bool alone = x_.columns.size() == 1 && x_.columns[0] / own_.local_leaves() <= one_sum;
    own_.template run<A>(
        device, x_.rows * x_.inner, alone,
        [&](std::int64_t i, A* out, bool adds) {
          std::int64_t at = 0;
          for (const std::int64_t columns : x_.columns) {
            const std::int64_t width = columns / own_.local_leaves(), first = at + i * width;
            device.gemm(false, x_.inputs_first, x_.rows, x_.inner, width, A(1), d + first, x_.total,
                        w + first * (x_.inputs_first ? 1 : x_.inner), x_.inputs_first ? x_.total : x_.inner,
                        A(adds || at > 0), out, x_.inner);
            at += columns;
          }
        },
        place_of(dx, addend), [&](const A* sum) { put(device, sum, dx, addend, size); });
  }
  /// Adds d' x of a microbatch to the sums over tokens, for all weights.
  void add_weights(Device& device, gradient_terms<Precision, Device>& terms, std::int64_t index, std::int64_t count,
                   const T* d, const T* x) const {
    terms.add(device, index, count, one_sum, [&](const token_leaves::leaf& leaf, G* out, bool adds) {
      buffer<Device> room_d, room_x;
      const T *a = rows_of_leaf(device, leaf, d, x_.total, room_d),
              *b = rows_of_leaf(device, leaf, x, x_.inner, room_x);
      std::int64_t m = x_.total, n = x_.inner;
      if (x_.inputs_first) std::swap(a, b), std::swap(m, n);
      device.gemm(true, false, m, n, leaf.count(), A(1), a, m, b, n, A(adds), out, n);
    });
  }

 private:
  /// Returns y if the complete sum may be written there, which saves a copy; else null.
  static A* place_of(T* y, const T* addend) {
    if constexpr (std::is_same_v<A, T>)
      return addend ? nullptr : y;
    else
      return nullptr;
  }
  static void put(Device& device, const A* sum, T* y, const T* addend, std::int64_t size) {
    if constexpr (std::is_same_v<A, T>) {
      if (addend) return kernels::add(device, sum, addend, y, size);
      if (sum == y) return;
      device.copy(y, sum, static_cast<std::size_t>(size) * sizeof(T), device.main_stream());
    } else {
      kernels::cast(device, sum, y, size);
    }
    if (addend) kernels::accumulate(device, addend, y, size);
  }
  /// Throws unless each rank of `axes` has the same leaves of all `dims`. Ranks must have whole leaves of the first
  /// dim.
  static void require_equal_leaves(const context<Device>& ctx, const std::vector<dim_id>& dims, const axis_list& axes,
                                   std::int64_t leaves, const std::string& name) {
    const std::int64_t ranks = ctx.ranks.shape().size(axes);
    const std::vector<leaf_range> of_first = leaves_of_ranks(ctx.sizes, dims[0], ranks, leaves);
    const auto with_size = [&](dim_id dim) { return cat({dim.text(), " = ", ctx.sizes.of(dim)}); };
    for (const dim_id dim : dims)
      if (leaves_of_ranks(ctx.sizes, dim, ranks, leaves) != of_first)
        fail({name, ": deterministic sums join ", leaves, " leaves of ", with_size(dims[0]), " with as many of ",
              with_size(dim), ", and one of ", ranks, " ranks of ", describe(axes), " has others of these; legal are ",
              "blocks of ", ctx.sizes.of(dims[0]) / leaves, " and ", ctx.sizes.of(dim) / leaves, " (dim_sizes::set)"});
  }
  /// Returns the first dim of a weight that is (or is not) a dim of its output.
  static dim_id leading(const layout& weight, const layout& output, bool own) {
    for (const dim_placement& p : weight.dims)
      if (output.has(p.dim) == own) return p.dim;
    return {};
  }
  bool made_ = false;
  linear_extents x_;
  feature_sum<Device> contracted_, own_;
  token_leaves tokens_;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
