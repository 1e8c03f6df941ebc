#pragma once

#include <numeric>
#include <string>

#include "plait/core/error.hpp"
#include "plait/nn/strategy.hpp"

namespace plait {

/// The part of the tensor-parallel ranks over which kv heads are replicated, when there are fewer kv heads than ranks:
/// the tensor dimension of a mesh is the two axes `tp` and `tp_rep` then, and no rule changes.
struct tp_rep : axis_tag<"tp_rep"> {};

/// Tensor and sequence parallelism as in Megatron-LM (Korthikanti et al. 2022): the residual stream is sharded along
/// the sequence between the parallel linears, so norms and residual sums are shared out too.
struct megatron_sp {
  using mesh = plait::mesh<axis<dp>, axis<tp>, axis<tp_rep>>;
  using residual = spec<shard<batch, dp>, shard<seq, tp, tp_rep>, hidden>;
  using heads = shard<plait::heads, tp, tp_rep>;
  using kv_heads = shard<plait::kv_heads, tp>;
  using ffn = shard<plait::ffn, tp, tp_rep>;
  using vocab = shard<plait::vocab, tp, tp_rep>;
};

/// Tensor parallelism alone (Shoeybi et al. 2019): the residual stream is whole on every tensor-parallel rank.
struct megatron_tp : megatron_sp {
  using residual = spec<shard<batch, dp>, seq, hidden, invariant<tp, tp_rep>>;
};

/// `Base` with parameters stored sharded over the data-parallel ranks and gathered for use, as ZeRO-3 does (Rajbhandari
/// et al. 2020): every weight has a hidden dim, and that is what dp shards between steps.
template <class Base>
struct stored_over_dp : Base {
  template <class Weight>
  using stored = shard_further<Weight, hidden, dp>;
};

/// The extents of tp and tp_rep for a number of tensor-parallel ranks: as many as share out the kv heads go to tp.
struct tensor_extents {
  std::int64_t tp = 1, tp_rep = 1;
};
inline tensor_extents split_tensor_ranks(std::int64_t ranks, std::int64_t kv_heads) {
  const std::int64_t shared = std::gcd(ranks, kv_heads);
  return {shared, ranks / shared};
}

}  // namespace plait
