// Deterministic sums over a feature dim that ranks shard, such as ffn in a product, with their all-reduce or
// reduce-scatter.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/function_ref.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/deterministic/exchange.hpp"
#include "plait/deterministic/leaves.hpp"
#include "plait/deterministic/sums.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/check.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/redistribution.hpp"

namespace plait {

/// A sum over a dim in deterministic leaves, consecutive on each rank, with its all-reduce or reduce-scatter. Ranks may
/// have different numbers of leaves.
template <compute_device Device>
class feature_sum {
 public:
  feature_sum() = default;
  /// `placed` shards `dim`, which has `leaves` leaves; `moves` is the plan for the result. Throws `plait::error` that
  /// names `name` if ranks cannot divide the leaves, or `moves` is an unsupported plan.
  feature_sum(const context<Device>& ctx, const layout& placed, dim_id dim, std::int64_t leaves,
              const ready_plan& moves, const std::string& name)
      : leaves_(leaves), name_(name) {
    const mesh_shape& mesh = ctx.ranks.shape();
    const axis_list axes = ctx.ranks.pruned(placed.axes_of(dim));
    const std::int64_t ranks = mesh.size(axes);
    const std::vector<leaf_range> of_rank = leaves_of_ranks(ctx.sizes, dim, ranks, leaves);
    if (of_rank.empty()) {
      const dim_placement shared{dim, axes};
      fail({name, ": deterministic sums cut ", dim.text(), " = ", ctx.sizes.of(dim), " into ", leaves,
            " leaves (deterministic_leaves::features = ", ctx.deterministic.features, "), which ", ranks, " ranks of ",
            describe(axes), " cannot divide; legal are features with a common divisor with ", ctx.sizes.of(dim),
            " that is a multiple of ", ctx.sizes.of(dim) / common_part(shared, mesh, ctx.sizes),
            detail::or_blocks(shared, mesh, ctx.sizes, leaves)});
    }
    own_ = of_rank[static_cast<std::size_t>(mesh.index_in(ctx.ranks.rank(), axes))];
    if (moves.trivial()) {
      if (ranks > 1)
        fail({name, ": a sum over ranks of ", describe(axes), " stays partial, which has no deterministic order"});
      return;
    }
    moved_ = moves.single();
    axis_list over;
    for (const redistribution_step& s : moves.planned().steps)
      if (s.kind != transition_kind::relabel) over = s.axes;
    if (!moved_ || moved_->kind == transition_kind::all_gather || mesh.size(over) != ranks)
      fail({name, ": deterministic sums have an order for sums that one all-reduce or reduce-scatter over ",
            describe(axes), " completes; here it is ", describe_steps(moves.planned())});
    std::vector<std::vector<tree_node>> members;
    for (const std::int64_t r : ranks_of_group(mesh, over, ctx.ranks.rank()))
      members.push_back(roots_of({&of_rank[static_cast<std::size_t>(mesh.index_in(r, axes))], 1}, leaves));
    exchange_ = deterministic_exchange(*moved_->comm, std::move(members), leaves);
  }

  explicit operator bool() const { return local_leaves() > 0; }
  std::int64_t local_leaves() const { return own_.end - own_.begin; }

  /// Calls product(leaf of this rank, A* out, bool adds) for each leaf, with room for `elements` sums. `adds` is as for
  /// `deterministic_sum::add`, and never set unless `may_add`. Then calls done(const A* sum) with this rank's part of
  /// the complete sum. If ranks joined the sum and `into` is not null, the part is in `into`.
  template <class A>
  void run(Device& device, std::int64_t elements, bool may_add, function_ref<void(std::int64_t, A*, bool)> product,
           A* into, function_ref<void(const A*)> done) const {
    deterministic_sum<A, Device> sum(elements, leaves_);
    for (std::int64_t i = 0; i < local_leaves(); ++i)
      sum.add(device, own_.begin + i, may_add, [&](A* out, bool adds) { product(i, out, adds); });
    partial_sums<A, Device> own = sum.parts();
    if (exchange_) {
      if (moved_->kind == transition_kind::all_reduce)
        own = exchange_.run_everywhere(device, std::move(own), elements, into);
      else
        own = exchange_.run(device, in_parts(device, std::move(own), elements), parts(), into);
    }
    if (own.values.size() != 1) fail({name_, ": a deterministic sum over ", leaves_, " leaves is not complete"});
    done(own.values[0]);
  }

 private:
  /// Returns the sums in an order in which each rank's part is contiguous.
  template <class A>
  partial_sums<A, Device> in_parts(Device& device, partial_sums<A, Device> own, std::int64_t elements) const {
    if (moved_->outer == 1) return own;
    const std::int64_t block = elements / moved_->outer * static_cast<std::int64_t>(sizeof(A));
    for (A*& values : own.values) {
      own.memory.push_back(make_collective_buffer<A>(device, static_cast<std::size_t>(elements)));
      A* const to = own.memory.back().template data<A>();
      for (const element_range& part : parts()) {
        const std::int64_t row = part.size() / moved_->outer * static_cast<std::int64_t>(sizeof(A));
        kernels::copy_2d(device, values + part.begin / moved_->outer, to + part.begin, moved_->outer, row, block, row);
      }
      values = to;
    }
    return own;
  }
  /// Returns the elements of each rank's part of the sum.
  std::vector<element_range> parts() const {
    std::vector<element_range> all;
    const std::int64_t row = moved_->outer * moved_->inner;
    for (std::size_t k = 0; k + 1 < moved_->begins.size(); ++k)
      all.push_back({moved_->begins[k] * row, moved_->begins[k + 1] * row});
    return all;
  }

  std::int64_t leaves_ = 0;
  leaf_range own_;  ///< leaves of this rank
  std::optional<single_collective> moved_;
  deterministic_exchange exchange_;
  std::string name_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
