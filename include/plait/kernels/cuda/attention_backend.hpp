#pragma once

#include <string>

#include "plait/core/error.hpp"
#include "plait/device/attention_choice.hpp"
#include "plait/kernels/attention_shape.hpp"

namespace plait::kernels {

/// Which attention a call with this choice runs: `own` or `cudnn`, never `automatic`. Adding to gradients is plait's
/// alone. Throws `plait::error` where the choice is cuDNN and it cannot do this.
inline attention_backend attention_backend_for(const attention_choice& choice, const attention_shape& shape, dtype type,
                                               attention_accumulate accumulate = {}) {
  if (choice.backend == attention_backend::own) return attention_backend::own;
  const bool forced = choice.backend == attention_backend::cudnn;
  if (forced && choice.library == nullptr) {
    fail("attention: cuDNN is chosen, but the device was given no attention_library");
  }
  const bool adds = accumulate.queries || accumulate.keys_and_values;
  const bool possible = choice.library != nullptr && !adds && choice.library->supports(shape, type);
  if (forced && !possible) {
    fail("attention: cuDNN is chosen, but does not support " + std::string(name_of(type)) +
         ", head_dim = " + std::to_string(shape.head_dim) + ", q_len = " + std::to_string(shape.q_len) +
         ", k_len = " + std::to_string(shape.k_len) + ", offsets " + std::to_string(shape.q_offset) + " and " +
         std::to_string(shape.k_offset) + (adds ? ", adding to gradients" : "") +
         "; choose attention_backend::automatic or own");
  }
  return possible ? attention_backend::cudnn : attention_backend::own;
}

/// The choice of a device that has one, else the default.
template <class Device>
attention_choice attention_choice_of(const Device& device) {
  if constexpr (requires { device.attention(); }) {
    return device.attention();
  } else {
    return {};
  }
}

}  // namespace plait::kernels
