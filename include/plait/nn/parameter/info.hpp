// What a layer says of a parameter that it makes: name, shape, initial values, and what optimizers may do to it. It
// holds no values. Next: nn/parameter.hpp for the parameter, train/optim/muon_options.hpp for a reader of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plait/version.hpp"

namespace plait {

/// How a parameter starts: normal with a deviation, or a constant.
struct initializer {
  double mean = 0;
  double std = 0.02;
};

/// Describes a parameter to its users.
struct parameter_info {
  std::string name;                 ///< unique in a model; Hugging Face's, in models
  std::vector<std::int64_t> shape;  ///< logical and global, without padding; only the leading dim may be padded
  initializer init;
  bool decays = true;  ///< whether weight decay applies: matrices yes, norm weights and biases no
  /// Whether the first and the last stage of a pipeline both have this parameter, as a tied embedding: its gradient is
  /// summed over the two.
  bool tied_across_stages = false;
  /// Whether it belongs to a hidden layer. The rows of embeddings, of learned positions and of a model's head stand for
  /// one token or place each: they say no, and optimizers of matrices leave them alone (train/optim/muon_options.hpp).
  bool hidden_layer = true;
};

}  // namespace plait
