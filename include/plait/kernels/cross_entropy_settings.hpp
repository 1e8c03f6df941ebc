// The options of a loss, and the columns of the vocabulary that a rank has, as the kernels of all devices take them.
// The steps of the loss are explained in kernels/cpu/cross_entropy.hpp; the layer is nn/loss.hpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plait/version.hpp"

namespace plait::kernels {

struct cross_entropy_settings {
  std::int64_t ignore_index = -100;  ///< rows with this target have no loss and no gradient
  double label_smoothing = 0.0;      ///< weight of the uniform distribution over the vocabulary
  double z_loss = 0.0;               ///< adds z_loss * lse^2 to a row's loss
};

/// Which columns of the vocabulary a rank's logits are.
struct vocabulary_range {
  std::int64_t columns = 0;       ///< local columns, padding included
  std::int64_t first_column = 0;  ///< global index of the first of them
  std::int64_t vocab = 0;         ///< true size of the vocabulary, without padding

  /// Local columns that are not padding.
  constexpr std::int64_t valid() const { return std::clamp<std::int64_t>(vocab - first_column, 0, columns); }
};

}  // namespace plait::kernels
