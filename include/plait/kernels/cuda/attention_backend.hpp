// The decision which attention a call on a GPU runs, plait's or a library's. It computes nothing; a device's choice is
// device/attention_choice.hpp, and kernels/cuda/attention_forward.hpp and kernels/cuda/attention_backward.hpp ask
// here.
#pragma once

#include <concepts>
#include <string>

#include "plait/core/error.hpp"
#include "plait/core/precision.hpp"
#include "plait/device/attention_choice.hpp"
#include "plait/kernels/attention_shape.hpp"

namespace plait::kernels {

/// The types of outputs and gradients where inputs are of type T: the same, or that of statistics, in which the results
/// of pieces add up without being rounded each time.
template <class R, class T>
concept attention_result = std::same_as<R, T> || std::same_as<R, statistic_of<T>>;

/// The demands of a call of attention beside its shape.
struct attention_request {
  dtype type = dtype::bf16;  ///< of queries, keys and values
  attention_accumulate accumulate{};
  bool statistics = false;   ///< whether the output or the gradients are in the type of statistics, float
  bool given_delta = false;  ///< whether the backward pass is given what `attention_delta` makes
};

/// Which attention a call with this choice runs: `own` or `cudnn`, never `automatic`. Plait's alone are adding to
/// gradients, outputs and gradients in float, a given delta and `first_visible`; masks, strides and sizes are the
/// library's to judge. Throws `plait::error` where the choice is cuDNN and it cannot do this.
inline attention_backend attention_backend_for(const attention_choice& choice, const attention_shape& shape,
                                               const attention_request& request = {}) {
  if (choice.backend == attention_backend::own) return attention_backend::own;
  const bool forced = choice.backend == attention_backend::cudnn;
  if (forced && choice.library == nullptr) {
    fail("attention: cuDNN is chosen, but the device was given no attention_library");
  }
  std::string alone;
  if (request.accumulate.queries || request.accumulate.keys_and_values) alone += ", adding to gradients";
  if (request.statistics) alone += ", results in float";
  if (request.given_delta) alone += ", a given delta";
  if (shape.first_visible != nullptr) alone += ", first_visible";
  const bool possible = choice.library != nullptr && alone.empty() && choice.library->supports(shape, request.type);
  if (forced && !possible) {
    const std::string asked =
        alone.empty() ? cat({name_of(request.type), ", head_dim = ", shape.head_dim, ", q_len = ", shape.q_len,
                             ", k_len = ", shape.k_len, ", offsets ", shape.q_offset, " and ", shape.k_offset,
                             (shape.window > 0 ? cat({", window = ", shape.window}) : "")})
                      : alone.substr(2);
    fail({"attention: cuDNN is chosen, but does not support ", asked, "; choose attention_backend::automatic or own"});
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
