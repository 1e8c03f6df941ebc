// Policies of linears and embeddings in one line each, for programs that have many and a strategy for none. A policy
// may as well be a struct of one's own: nn/linear.hpp says what it may have.
#pragma once

#include "plait/layout/spec.hpp"

namespace plait {

/// The policy of a linear without a bias, or of an embedding: `linear<float, layer_policy<input, weight, output>>`.
template <spec_like Input, spec_like Weight, spec_like Output>
struct layer_policy {
  using input = Input;
  using weight = Weight;
  using output = Output;
};
/// The policy of a linear with a bias.
template <spec_like Input, spec_like Weight, spec_like Output>
struct biased_policy : layer_policy<Input, Weight, Output> {
  static constexpr bool bias = true;
};

}  // namespace plait
