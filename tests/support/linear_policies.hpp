#pragma once

#include "plait/layout/mesh.hpp"
#include "plait/layout/spec.hpp"

/// Specs of layers on a mesh dp x tp, and a policy of a linear made of any three of them.
namespace plait::test {

using two = plait::mesh<axis<dp>, axis<tp>>;

template <class Input, class Weight, class Output, bool Bias = false>
struct policy {
  using mesh = two;
  using input = Input;
  using weight = Weight;
  using output = Output;
  static constexpr bool bias = Bias;
};

using rows_split = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
using rows_whole = spec<shard<batch, dp>, seq, hidden, invariant<tp>>;
using rows_replicated = spec<shard<batch, dp>, seq, hidden, replicate<tp>>;
using rows_pending = spec<shard<batch, dp>, seq, hidden, partial<tp>>;
using wide = spec<shard<batch, dp>, seq, shard<ffn, tp>>;
using column = spec<shard<ffn, tp>, hidden>;
using row = spec<hidden, shard<ffn, tp>>;

}  // namespace plait::test
