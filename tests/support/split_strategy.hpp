#pragma once

#include "plait/layout/mesh.hpp"
#include "plait/layout/spec.hpp"

namespace plait::test {

/// Tensor and sequence parallelism on a mesh of two axes.
struct split {
  using mesh = plait::mesh<axis<dp>, axis<tp>>;
  using residual = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
};

}  // namespace plait::test
