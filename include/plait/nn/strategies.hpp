// Strategies of the literature, and templates that change the attention policy or the storage of a strategy.
#pragma once

#include <numeric>
#include <string>

#include "plait/core/error.hpp"
#include "plait/layout/errors.hpp"
#include "plait/nn/strategy.hpp"

namespace plait {

/// The part of the tensor-parallel ranks over which kv heads are replicated, when there are fewer kv heads than ranks:
/// the tensor dimension of a mesh is the two axes `tp` and `tp_rep` then, and no rule changes.
struct tp_rep : axis_tag<"tp_rep"> {};

/// Tensor and sequence parallelism as in Megatron-LM (Korthikanti et al. 2022): the residual stream is sharded along
/// the sequence between the parallel linears, so norms and residual sums are shared out too. Over cp the sequence stays
/// sharded inside attention as well, as a ring; an extent of 1 costs nothing.
struct megatron_sp {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>, axis<tp_rep>>;
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp, tp_rep>, hidden>;
  using query_heads = shard<heads, tp, tp_rep>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp, tp_rep>;
  using vocabulary = shard<vocab, tp, tp_rep>;
  using attention = ring<cp>;
};

/// Tensor parallelism alone (Shoeybi et al. 2019): the residual stream is whole on every tensor-parallel rank.
struct megatron_tp : megatron_sp {
  using residual = spec<shard<batch, dp>, shard<seq, cp>, hidden, invariant<tp, tp_rep>>;
};

namespace detail {

/// The residual of a strategy under another attention policy: its sequence is sharded over the policy's axes first,
/// then over the tensor axes that sharded it before. The axes of the former policy are invariant unless they are used
/// again.
template <class Base, class Policy, class Dim>
struct residual_in_context {
  static constexpr layout value = [] {
    layout a = layout_v<typename Base::residual>;
    const axis_list before = context_axes<typename attention_of_strategy<Base>::type>;
    axis_list over = context_axes<Policy>;
    for (dim_placement& p : a.dims) {
      if (!(p.dim == dim_of<seq> || p.dim == dim_of<zseq>)) continue;
      for (axis_id axis : p.axes)
        if (!over.contains(axis) && !before.contains(axis)) over.push_back(axis);
      p = {dim_of<Dim>, over};
    }
    for (axis_id axis : before)
      if (!over.contains(axis)) a.set(axis, state::invariant);
    for (axis_id axis : over)
      if (const int at = a.invariant.find(axis); at >= 0) a.invariant.erase(static_cast<std::size_t>(at));
    return a;
  }();
};
template <class Policy, class Placement>
struct context_tags {
  using dims = type_list<typename Placement::dim>;
  using axes = typename Policy::axes;
};

}  // namespace detail

/// `Base` with another attention policy and placement of the sequence: `context_parallel<megatron_sp, ring<cp>,
/// zigzag>`.
template <class Base, attention_policy Policy, class Placement = contiguous>
struct context_parallel : Base {
  using residual = spec_from<detail::residual_in_context<Base, Policy, typename Placement::dim>,
                             typename Base::residual, detail::context_tags<Policy, Placement>>;
  using attention = Policy;
};

/// `Base` with parameters stored sharded over the data-parallel ranks and gathered for a whole step: weights with a
/// hidden dim are sharded along it between steps. Those without one stay whole: norms of heads, and biases of q, k, v
/// and ffn. It shows what a strategy's `stored` does; a step under `zero_level::parameters` gathers unit by unit, as
/// ZeRO-3 does (Rajbhandari et al. 2020), and divides whatever shapes there are.
template <class Base>
struct stored_over_dp : Base {
  template <class Weight>
  using stored = shard_further<Weight, hidden, dp>;
};

/// The extents of tp and tp_rep for a number of tensor-parallel ranks: tp gets those that share out the kv heads.
struct tensor_extents {
  std::int64_t tp = 1, tp_rep = 1;
};
inline tensor_extents split_tensor_ranks(std::int64_t ranks, std::int64_t kv_heads) {
  const std::int64_t shared = std::gcd(ranks, kv_heads);
  return {shared, ranks / shared};
}

// A strategy for blocks whose attention and MLP run in parallel, with one gather and one reduction.

namespace detail {

/// The residual with the axes of a branch's weights in another state, which shard nothing of it then.
template <class S, state State>
struct beside_value {
  static constexpr layout value = [] {
    layout a = layout_v<typename S::residual>;
    for (axis_id axis : sharding_axes(layout_v<spec<typename S::query_heads>>)) {
      for (dim_placement& p : a.dims)
        if (const int at = p.axes.find(axis); at >= 0) p.axes.erase(static_cast<std::size_t>(at));
      a.set(axis, State);
    }
    return a;
  }();
};

}  // namespace detail

/// `Base` for blocks whose branches stand side by side (PaLM, Chowdhery et al. 2022): y = x + attention(norm(x)) +
/// mlp(norm(x)). Attention and MLP take the stream replicated over the axes of their weights and end partial over them.
/// So `sum<residual, residual, attention, mlp>` gathers once and reduces once for both, forward and backward.
template <class Base>
struct in_parallel : Base {
  static_assert(detail::sharding_axes(layout_v<spec<typename Base::query_heads>>) ==
                    detail::sharding_axes(layout_v<spec<typename Base::feed_forward>>),
                "branches side by side need heads and ffn sharded over the same axes, in the same order");
  using branch_input = spec_from<detail::beside_value<Base, state::replicated>, typename Base::residual,
                                 spec<typename Base::query_heads>>;
  using branch_output =
      spec_from<detail::beside_value<Base, state::partial>, typename Base::residual, spec<typename Base::query_heads>>;
};

}  // namespace plait
