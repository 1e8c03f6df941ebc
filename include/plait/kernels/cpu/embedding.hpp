// Table lookup on the CPU for a range of the vocabulary: `table` [rows_local, width] holds the rows first ... first +
// rows_local - 1. An id outside [0, vocab) is an error that names it. An id in another rank's range gives zeros, so the
// result is partial (nn/embedding.hpp). Test: tests/unit/kernels/rope_embedding.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/simd.hpp"

namespace plait::kernels {

namespace detail {
template <class Id>
void check_id(Id id, std::int64_t token, std::int64_t vocab) {
  if (id < 0 || static_cast<std::int64_t>(id) >= vocab) {
    fail({"embedding: token ", token, " has id ", id, ", legal are 0 to ", vocab - 1});
  }
}
}  // namespace detail

/// y[t] = table[ids[t] - first], or zeros; y is [tokens, width].
template <class T, class Id>
void embedding_forward(cpu&, const Id* ids, const T* table, T* y, std::int64_t tokens, std::int64_t width,
                       std::int64_t first, std::int64_t rows_local, std::int64_t vocab) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    detail::check_id(ids[t], t, vocab);
    const std::int64_t row = static_cast<std::int64_t>(ids[t]) - first;
    if (row >= 0 && row < rows_local) {
      std::copy_n(table + row * width, width, y + t * width);
    } else {
      std::fill_n(y + t * width, width, T{});
    }
  }
}

/// dtable[ids[t] - first] += dy[t] for the ids in range, in the order of the tokens.
template <class T, class Id>
void embedding_backward(cpu&, const Id* ids, const T* dy, gradient_of<T>* dtable, std::int64_t tokens,
                        std::int64_t width, std::int64_t first, std::int64_t rows_local, std::int64_t vocab) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    detail::check_id(ids[t], t, vocab);
    const std::int64_t row = static_cast<std::int64_t>(ids[t]) - first;
    if (row < 0 || row >= rows_local) continue;
    gradient_of<T>* const target = dtable + row * width;
    const T* const source = dy + t * width;
    PLAIT_IVDEP
    for (std::int64_t c = 0; c < width; ++c) target[c] += widened(source[c]);
  }
}

PLAIT_COMPILED_TEMPLATE(void embedding_backward(cpu&, const std::int32_t*, const float*, gradient_of<float>*,
                                                std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void embedding_backward(cpu&, const std::int64_t*, const float*, gradient_of<float>*,
                                                std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void embedding_backward(cpu&, const std::int32_t*, const bf16*, gradient_of<bf16>*,
                                                std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void embedding_backward(cpu&, const std::int64_t*, const bf16*, gradient_of<bf16>*,
                                                std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void embedding_backward(cpu&, const std::int32_t*, const double*, gradient_of<double>*,
                                                std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void embedding_backward(cpu&, const std::int64_t*, const double*, gradient_of<double>*,
                                                std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t))

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
