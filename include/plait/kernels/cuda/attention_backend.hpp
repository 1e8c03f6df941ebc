// Decides whether a call of attention on a GPU runs plait's kernels or a library.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/settings.hpp"

namespace plait::kernels {

/// The types of outputs and gradients for inputs of type T: T, or the type of statistics. With the latter, results of
/// pieces can be added without rounding each time.
template <class R, class T>
concept attention_result = std::same_as<R, T> || std::same_as<R, statistic_of<T>>;

/// The properties of an attention call that its shape does not contain.
struct attention_request {
  dtype type = dtype::bf16;  ///< of queries, keys and values
  bool gradients = false;    ///< whether this is the backward pass
  attention_accumulate accumulate{};
  bool float_output = false;     ///< whether the output has the type of statistics
  bool float_gradients = false;  ///< whether the gradients have the type of statistics
  bool has_output = true;        ///< whether the backward pass gets o, and not only the result of `attention_delta`
};

/// Returns the shape with which a library is queried and called. Rows of lse have no gaps. Neither do arrays that are
/// first written in bf16 because the caller wants float or a sum (kernels/cuda/attention.hpp).
inline attention_shape library_shape(const attention_shape& shape, const attention_request& request) {
  attention_shape s = shape.checked();
  const std::int64_t q_token = s.heads * s.head_dim, k_token = s.kv_heads * s.head_dim;
  s.lse_stride = s.q_len;
  if (s.q_len > 0 && (!request.gradients || request.accumulate.keys_and_values)) s.k_len = s.visible(s.q_len - 1);
  if (request.float_output) s.o_stride = q_token;
  if (request.float_gradients || request.accumulate.queries) s.dq_stride = q_token;
  if (request.float_gradients || request.accumulate.keys_and_values) s.dk_stride = s.dv_stride = k_token;
  return s;
}

/// Returns the backend for a call: `own` or `cudnn`, never `automatic`. Only plait's kernels support `first_visible`,
/// `end_visible`, rules, `score`, a backward pass without o, and queries that see no keys. The library decides on
/// masks, strides and sizes. Throws `plait::error` if the choice is cuDNN and it cannot run the call.
inline attention_backend attention_backend_for(const attention_choice& choice, const attention_shape& shape,
                                               const attention_request& request = {}) {
  if (choice.backend == attention_backend::own) return attention_backend::own;
  const bool forced = choice.backend == attention_backend::cudnn;
  if (forced && choice.library == nullptr) {
    fail(
        "attention: cuDNN is chosen, but the device was given no attention_library; give cuda::use_attention one, or "
        "choose attention_backend::own");
  }
  std::string alone;
  if (!request.has_output) alone += ", gradients without the output";
  if (shape.first_visible != nullptr) alone += ", first_visible";
  if (shape.end_visible != nullptr) alone += ", end_visible";
  if (shape.mask.allows != nullptr) alone += ", a rule of the mask";
  if (shape.score.cap > 0) alone += ", a cap of scores";
  if (shape.score.alibi) alone += ", ALiBi";
  const attention_shape asked_for = library_shape(shape, request);
  if (asked_for.q_len == 0 || asked_for.k_len == 0) return attention_backend::own;  // they write at most zeros
  const bool possible = choice.library != nullptr && alone.empty() && choice.library->supports(asked_for, request.type);
  if (forced && !possible) {
    const std::string asked =
        alone.empty() ? cat({name_of(request.type), ", head_dim = ", shape.head_dim, ", q_len = ", shape.q_len,
                             ", k_len = ", shape.k_len, ", offsets ", shape.q_offset, " and ", shape.k_offset,
                             (shape.mask == attention_mask{} ? "" : cat({", mask ", describe(shape.mask)}))})
                      : alone.substr(2);
    fail({"attention: cuDNN is chosen, but does not support ", asked, "; choose attention_backend::automatic or own"});
  }
  return possible ? attention_backend::cudnn : attention_backend::own;
}

/// Returns the device's choice if it has one, else the default.
template <class Device>
attention_choice attention_choice_of(const Device& device) {
  if constexpr (requires { device.attention(); }) {
    return device.attention();
  } else {
    return {};
  }
}

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
