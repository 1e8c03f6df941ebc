// The deterministic sums of a mixture's experts: over their width for each row, and over tokens for their weights.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/deterministic/exchange.hpp"
#include "plait/deterministic/feature_sum.hpp"
#include "plait/deterministic/gradient_terms.hpp"
#include "plait/device/deterministic_products.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/redistribution.hpp"

namespace plait::detail {

/// A factor [rows, ...] of a product over rows: `width` of the `stride` columns in each row.
template <class T>
struct expert_factor {
  const T* first;
  std::int64_t width, stride;
};

/// The deterministic stages of a mixture. Ranks that share the width of experts complete the sum of each row before
/// they send it back. So a token's rows are complete, and are added in the order of its choice. The weights' gradients
/// are sums over the leaves of tokens. The rows of a leaf are added in the order of tokens.
template <class Precision, compute_device Device>
class deterministic_experts {
  using T = activation_of<Precision>;
  using G = gradient_of<Precision>;
  using A = arithmetic<T>;
  using terms = gradient_terms<Precision, Device>;

 public:
  deterministic_experts() = default;
  /// `d` is the derivation of the mixture. Throws `plait::error` that names `name` if no deterministic order exists.
  template <class Derivation>
  deterministic_experts(const context<Device>& ctx, const Derivation& d, const std::string& name) {
    const mesh_shape& mesh = ctx.ranks.shape();
    for (axis_id axis : ctx.ranks.pruned(d.up.dims[0].axes))
      if (!d.moved.contains(axis))
        fail({name, ": deterministic sums have no order for the sum over ranks of ", axis.text(),
              ", which shards experts and no tokens; legal are axes of experts that shard tokens too"});
    const dim_id width = d.up.dims[1].dim;
    axes_ = d.up.dims[1].axes;
    layout pending, complete;
    pending.dims.push_back(d.up.dims[2]), complete = pending;
    for (axis_id axis : axes_) pending.set(axis, state::partial), complete.set(axis, state::replicated);
    const ready_plan moves(pending, complete, ctx.ranks, ctx.sizes, name + ": rows of experts");
    columns_ = feature_sum<Device>(ctx, d.up, width, feature_leaves(ctx.deterministic, ctx.sizes.of(width)), moves,
                                   name + ": rows of experts");
    const axis_list over = ctx.ranks.pruned(d.moved);
    for (const std::int64_t r : ranks_of_group(mesh, over, ctx.ranks.rank()))
      tokens_.emplace_back(ctx.deterministic, without_dims(d.gathered, d.up), mesh, ctx.sizes, r, token_grain::coarse,
                           name);
    leaves_ = tokens_[0].of_groups(over);
  }

  explicit operator bool() const { return !tokens_.empty(); }
  /// The leaves of the rows that arrive at a rank's experts.
  const token_leaves& leaves() const { return leaves_; }
  /// Returns the layout of sums that are complete here; otherwise they would be partial over the ranks that share the
  /// experts' width.
  layout complete(layout a) const {
    for (axis_id axis : axes_)
      if (a.state_of(axis) == state::partial) a.set(axis, state::replicated);
    return a;
  }

  /// Computes out [rows, hidden] from the products of each leaf of the width. product(first column, columns, A* out, A
  /// beta) must compute out = product + beta * out. Collective over the ranks that share the width.
  template <class Product>
  void sum_width(Device& device, std::int64_t rows, std::int64_t hidden, std::int64_t width, T* out,
                 Product&& product) const {
    const std::int64_t columns = width / columns_.local_leaves(), size = rows * hidden;
    if (size == 0) return;
    A* into = nullptr;
    if constexpr (std::is_same_v<A, T>) into = out;
    columns_.template run<A>(
        device, size, false, [&](std::int64_t i, A* to, bool) { product(i * columns, columns, to, A(0)); }, into,
        [&](const A* sum) {
          if constexpr (!std::is_same_v<A, T>)
            kernels::cast(device, sum, out, size);
          else if (sum != out)
            device.copy(out, sum, static_cast<std::size_t>(size) * sizeof(T), device.main_stream());
        });
  }

  /// The rows of one leaf, as indices of this rank's rows, sorted by expert. `begin` has the start of each expert's
  /// rows.
  struct leaf_rows {
    std::int64_t number = 0;
    std::vector<std::int32_t> rows;
    std::vector<std::int64_t> begin{0};
  };
  /// Returns the rows of each leaf of a microbatch. `peers` has the rank that each row came from, in the group of the
  /// exchange, and `tokens` its token there. `begin` has the start of each expert's rows.
  std::vector<leaf_rows> by_leaf(std::int64_t index, std::int64_t count, const std::vector<std::int64_t>& begin,
                                 const std::vector<std::int32_t>& peers,
                                 const std::vector<std::int32_t>& tokens) const {
    std::vector<leaf_rows> all;
    std::vector<std::vector<std::size_t>> of_token(tokens_.size());
    for (std::size_t p = 0; p < tokens_.size(); ++p)
      for (const token_leaves::leaf& l : tokens_[p].of_microbatch(index, count)) {
        for (const token_leaves::rows& part : l.parts) {
          const auto end = static_cast<std::size_t>(part.first + part.count);
          if (of_token[p].size() < end) of_token[p].resize(end);
          std::fill_n(of_token[p].begin() + part.first, part.count, all.size());
        }
        all.emplace_back().number = l.number;
      }
    for (std::size_t e = 0; e + 1 < begin.size(); ++e) {
      for (auto i = static_cast<std::size_t>(begin[e]); i < static_cast<std::size_t>(begin[e + 1]); ++i)
        all[of_token[static_cast<std::size_t>(peers[i])][static_cast<std::size_t>(tokens[i])]].rows.push_back(
            static_cast<std::int32_t>(i));
      for (leaf_rows& l : all) l.begin.push_back(static_cast<std::int64_t>(l.rows.size()));
    }
    return all;
  }

  /// Adds a' b over the rows of each leaf to the sums of one weight, [experts, a.width, b.width].
  void add_products(Device& device, terms& to, const std::vector<leaf_rows>& leaves, expert_factor<T> a,
                    expert_factor<T> b) const {
    const std::int64_t size = a.width * b.width;
    for (const leaf_rows& l : leaves) {
      const auto n = static_cast<std::int64_t>(l.rows.size());
      auto of_a = make_buffer<T>(device, static_cast<std::size_t>(n * a.stride)),
           of_b = make_buffer<T>(device, static_cast<std::size_t>(n * b.stride));
      auto rows_of_leaf = make_buffer<std::int32_t>(device, l.rows.size());
      auto* const from = rows_of_leaf.template data<std::int32_t>();
      device.upload(from, l.rows.data(), l.rows.size() * sizeof(std::int32_t), device.main_stream());
      kernels::gather_rows(device, a.first, from, of_a.template data<T>(), n, a.stride);
      kernels::gather_rows(device, b.first, from, of_b.template data<T>(), n, b.stride);
      to.add_leaf(device, l.number, [&](G* out) {
        device.zero(out, static_cast<std::size_t>(to.elements()) * sizeof(G), device.main_stream());
        for (std::size_t e = 0; e + 1 < l.begin.size(); ++e)  // numbers without an expert here have no rows
          if (const std::int64_t at = l.begin[e], rows = l.begin[e + 1] - at; rows > 0)
            device.gemm(true, false, a.width, b.width, rows, A(1), of_a.template data<T>() + at * a.stride, a.stride,
                        of_b.template data<T>() + at * b.stride, b.stride, A(0),
                        out + static_cast<std::int64_t>(e) * size, b.width);
      });
    }
  }

 private:
  axis_list axes_;  ///< axes that share the width
  feature_sum<Device> columns_;
  std::vector<token_leaves> tokens_;  ///< of each peer whose rows arrive at this rank's experts
  token_leaves leaves_;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
