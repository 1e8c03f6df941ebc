// The mixture of experts of a transformer block, under a strategy that says where experts are.
#pragma once

#include "plait/core/macros_off.hpp"
#include "plait/nn/moe.hpp"
#include "plait/nn/strategy.hpp"

namespace plait {

/// A strategy for mixtures of experts. `expert` says how experts are placed, such as `shard<experts, ep>`. The optional
/// `expert_feed_forward` says how the width of each expert is, such as `shard<ffn, tp>`; without it each expert is
/// whole on its rank.
template <class S>
concept mixture_strategy = strategy<S> && requires { typename S::expert; };

namespace detail {

template <class S>
struct expert_width {
  using type = ffn;
};
template <class S>
  requires requires { typename S::expert_feed_forward; }
struct expert_width<S> {
  using type = typename S::expert_feed_forward;
};

}  // namespace detail

/// The policy of `moe` under a strategy: tokens come and go as the residual lies.
template <mixture_strategy S>
struct mixture_policy {
  using derived_from = S;
  using mesh = typename S::mesh;
  using input = typename S::residual;
  using weight = spec<typename S::expert, typename detail::expert_width<S>::type, hidden>;
  using output = typename S::residual;
};

/// Tensor and sequence parallelism as in Megatron-LM beside experts over an axis of their own, which shards samples
/// too. Each expert is sharded over tp as an MLP is.
struct megatron_experts {
  using mesh = plait::mesh<axis<dp>, axis<ep>, axis<cp>, axis<tp>, axis<tp_rep>>;
  using residual = spec<shard<batch, dp, ep>, shard<seq, cp, tp, tp_rep>, hidden>;
  using query_heads = shard<heads, tp, tp_rep>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp, tp_rep>;
  using vocabulary = shard<vocab, tp, tp_rep>;
  using attention = ring<cp>;
  using expert = shard<experts, ep>;
  using expert_feed_forward = shard<ffn, tp, tp_rep>;
};

/// `Base` with experts over the tensor-parallel axes too, each whole on its rank: rows travel in place of sums.
template <mixture_strategy Base>
struct experts_over_tp : Base {
  using expert = shard<experts, ep, tp, tp_rep>;
  using expert_feed_forward = ffn;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
