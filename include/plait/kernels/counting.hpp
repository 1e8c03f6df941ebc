// Every kernel for the counting device, which computes nothing. Kernels with a large share of a step's time count the
// bytes that they would move, or the operations that they would compute; the others do nothing. A dry run with a kernel
// that is missing here does not compile.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "plait/core/box.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/counting.hpp"
#include "plait/kernels/settings.hpp"

namespace plait::kernels {

namespace detail {

/// Returns the product of the first `Most` sizes among a kernel's arguments, which is the length of its arrays.
template <int Most, class... Arguments>
std::int64_t elements(const Arguments&... arguments) {
  std::int64_t product = 1;
  int seen = 0;
  const auto take = [&](const auto& argument) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(argument)>, std::int64_t>)
      if (seen < Most) product *= argument, ++seen;
  };
  (take(arguments), ...);
  return product;
}

/// Counts a kernel that moves `arrays` arrays of `values` values of type T.
template <class T>
void pass(counting_device& device, double arrays, std::int64_t values) {
  device.count_moved(arrays * static_cast<double>(values) * sizeof(T));
}

/// Counts an activation of `values` values, which moves `arrays` such arrays. Its computation may take longer than the
/// move.
template <class T>
void activate(counting_device& device, double arrays, std::int64_t values, bool backward) {
  device.count_activation(arrays * static_cast<double>(values) * sizeof(T), static_cast<double>(values), backward);
}

inline double visible_pairs(const attention_shape& s) {
  double pairs = static_cast<double>(s.q_len) * static_cast<double>(s.k_len);
  if (!s.mask.sees_all()) {
    pairs = 0;
    for (std::int64_t i = 0; i < s.q_len; ++i) {
      const std::int64_t first = std::max<std::int64_t>(s.mask.first(s.q_offset + i) - s.k_offset, 0);
      pairs += static_cast<double>(std::max<std::int64_t>(s.visible(i) - first, 0));
    }
  }
  return pairs * static_cast<double>(s.batch * s.heads * s.head_dim);
}

/// Counts attention, whose shape is among the arguments.
template <class T, class... Arguments>
void attend(counting_device& device, double operations, const Arguments&... arguments) {
  const auto take = [&](const auto& argument) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(argument)>, attention_shape>) {
      const bool forward = operations <= 4;
      device.count_attention<T>(operations * visible_pairs(argument), argument.k_len, forward);
      if (!forward && std::is_same_v<T, bf16>) device.count_fixed_order_attention(argument.fixed_order_bytes());
    }
  };
  (take(arguments), ...);
}

/// Counts rotary positions: rows by heads by head_dim, the arguments after the stride of the source.
template <class T, class... Arguments>
void rotate_heads(counting_device& device, std::int64_t, const Arguments&... arguments) {
  pass<T>(device, 2, elements<3>(arguments...));
}

/// Counts the copy of a part, which is the box among the arguments.
template <class T, class... Arguments>
void pass_box(counting_device& device, const Arguments&... arguments) {
  const auto take = [&](const auto& argument) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(argument)>, box>)
      pass<T>(device, 2, argument.local_size());
  };
  (take(arguments), ...);
}

/// Counts a pass over logits: rows by valid columns.
template <class T, class... Arguments>
void pass_logits(counting_device& device, double arrays, const Arguments&... arguments) {
  const auto take = [&](const auto& argument) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(argument)>, vocabulary_range>)
      pass<T>(device, arrays, elements<1>(arguments...) * argument.valid());
  };
  (take(arguments), ...);
}

}  // namespace detail

// ---- kernels of one type, by their arguments after the first pointer ---------------------------------------------

#define PLAIT_COUNTS(kernel, ...)                                                  \
  template <class T, class... Arguments>                                           \
  void kernel(counting_device& device, T* const&, const Arguments&... arguments) { \
    __VA_ARGS__;                                                                   \
  }
/// Counts `arrays` arrays, whose length is the product of the first `sizes` sizes.
#define PLAIT_PASSES(kernel, arrays, sizes) \
  PLAIT_COUNTS(kernel, detail::pass<T>(device, arrays, detail::elements<sizes>(arguments...)))

PLAIT_PASSES(accumulate, 3, 1)
PLAIT_PASSES(add, 3, 1)
PLAIT_PASSES(axpy, 3, 1)
PLAIT_PASSES(multiply, 3, 1)
PLAIT_PASSES(scale, 2, 1)
PLAIT_PASSES(fill, 1, 1)
PLAIT_PASSES(norm_forward, 2, 2)
PLAIT_PASSES(norm_backward, 3, 2)
PLAIT_PASSES(norm_apply, 2, 2)
PLAIT_PASSES(norm_backward_dx, 3, 2)
PLAIT_PASSES(norm_backward_dweight, 2, 2)
PLAIT_PASSES(add_bias, 2, 2)
PLAIT_PASSES(bias_gradient, 1, 2)
PLAIT_PASSES(gather_rows, 2, 2)
PLAIT_PASSES(multiply_by_gates, 3, 2)
PLAIT_PASSES(multiply_by_gates_backward, 3, 2)

PLAIT_COUNTS(swiglu_forward, detail::activate<T>(device, 3, detail::elements<2>(arguments...), false))
PLAIT_COUNTS(swiglu_backward, detail::activate<T>(device, 5, detail::elements<2>(arguments...), true))
PLAIT_COUNTS(rope_forward, detail::rotate_heads<T>(device, arguments...))
PLAIT_COUNTS(rope_backward, detail::rotate_heads<T>(device, arguments...))
PLAIT_COUNTS(dropout_forward, detail::pass_box<T>(device, arguments...))
PLAIT_COUNTS(dropout_backward, detail::pass_box<T>(device, arguments...))
PLAIT_COUNTS(cross_entropy_max, detail::pass_logits<T>(device, 1, arguments...))
PLAIT_COUNTS(cross_entropy_statistics, detail::pass_logits<T>(device, 1, arguments...))
PLAIT_COUNTS(cross_entropy_local_statistics, detail::pass_logits<T>(device, 1, arguments...))
PLAIT_COUNTS(cross_entropy_backward, detail::pass_logits<T>(device, 2, arguments...))
// 4 operations for each visible pair of positions and each element of a head, 10 in the backward pass.
PLAIT_COUNTS(attention_forward, detail::attend<std::remove_const_t<T>>(device, 4, arguments...))
PLAIT_COUNTS(attention_backward, detail::attend<std::remove_const_t<T>>(device, 10, arguments...))

#undef PLAIT_PASSES
#undef PLAIT_COUNTS

// ---- kernels of several types ------------------------------------------------------------------------------------

template <class From, class To, class... Arguments>
void cast(counting_device& device, From* const&, To* const&, const Arguments&... arguments) {
  device.count_moved(static_cast<double>(detail::elements<1>(arguments...)) * (sizeof(From) + sizeof(To)));
}
template <activation_function Function, class T>
void activation_forward(counting_device& device, const T*, T*, std::int64_t n) {
  Function == activation_function::relu ? detail::pass<T>(device, 2, n) : detail::activate<T>(device, 2, n, false);
}
template <activation_function Function, class T>
void activation_backward(counting_device& device, const T*, const T*, T*, std::int64_t n) {
  Function == activation_function::relu ? detail::pass<T>(device, 3, n) : detail::activate<T>(device, 3, n, true);
}
template <class Id, class T, class... Arguments>
void embedding_forward(counting_device& device, Id* const&, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 2, detail::elements<2>(arguments...));
}
/// The gradient is read, and added to the gradient of the table.
template <class Id, class T, class G, class... Arguments>
void embedding_backward(counting_device& device, Id* const&, T* const&, G* const&, const Arguments&... arguments) {
  device.count_moved(static_cast<double>(detail::elements<2>(arguments...)) * (sizeof(T) + 2 * sizeof(G)));
}
/// AdamW reads all arrays of a tensor, and writes all but its gradient.
template <class Tensor, std::size_t Extent, class... Arguments>
void adamw_update(counting_device& device, const std::span<Tensor, Extent>& tensors, const Arguments&...) {
  double bytes = 0;
  for (const auto& t : tensors)
    bytes +=
        static_cast<double>(t.size) * (sizeof(*t.gradient) + 2 * (sizeof(*t.master) + sizeof(*t.m) + sizeof(*t.v)) +
                                       (t.weight == nullptr ? 0 : sizeof(*t.weight)));
  device.count_moved(bytes);
}
/// The sum of squares over many tensors.
template <class Part, std::size_t Extent, class... Arguments>
void add_sum_squares(counting_device& device, const std::span<Part, Extent>& parts, const Arguments&...) {
  double bytes = 0;
  for (const auto& p : parts) bytes += static_cast<double>(p.size) * sizeof(*p.data);
  device.count_moved(bytes);
}

/// The moves between tokens and the rows of experts read and write each row once.
template <class T, class S>
void sum_rows(counting_device& device, const T*, const std::int32_t*, const S*, T*, std::int64_t tokens, std::int64_t k,
              std::int64_t width) {
  device.count_moved(static_cast<double>(tokens * (k + 1) * width) * sizeof(T));
}
template <class T, class S>
void sum_rows_backward(counting_device& device, const T*, const std::int32_t*, const S*, const T*, T*, S*,
                       std::int64_t tokens, std::int64_t k, std::int64_t width) {
  device.count_moved(static_cast<double>(tokens * (2 * k + 1) * width) * sizeof(T));
}

// ---- kernels that are a small part of a step ---------------------------------------------------------------------

#define PLAIT_COUNTS_NOTHING(kernel) \
  template <class... Arguments>      \
  void kernel(counting_device&, const Arguments&...) {}

PLAIT_COUNTS_NOTHING(add_exact_squares)
PLAIT_COUNTS_NOTHING(add_router_loss_gradient)
PLAIT_COUNTS_NOTHING(drop_choices)
PLAIT_COUNTS_NOTHING(attention_delta)
PLAIT_COUNTS_NOTHING(choose_experts)
PLAIT_COUNTS_NOTHING(choose_experts_backward)
PLAIT_COUNTS_NOTHING(clip)
PLAIT_COUNTS_NOTHING(copy_2d)
PLAIT_COUNTS_NOTHING(copy_3d)
PLAIT_COUNTS_NOTHING(copy_box)
PLAIT_COUNTS_NOTHING(count_experts)
PLAIT_COUNTS_NOTHING(cross_entropy_loss)
PLAIT_COUNTS_NOTHING(cross_entropy_rescale)
PLAIT_COUNTS_NOTHING(digest)
PLAIT_COUNTS_NOTHING(divide_by_norm)
PLAIT_COUNTS_NOTHING(document_ends)
PLAIT_COUNTS_NOTHING(fill_from)
PLAIT_COUNTS_NOTHING(fill_normal)
PLAIT_COUNTS_NOTHING(fill_uniform)
PLAIT_COUNTS_NOTHING(join_sinks)
PLAIT_COUNTS_NOTHING(norm_backward_dots)
PLAIT_COUNTS_NOTHING(norm_statistics)
PLAIT_COUNTS_NOTHING(merge_lse)
PLAIT_COUNTS_NOTHING(muon_momentum)
PLAIT_COUNTS_NOTHING(muon_update)
PLAIT_COUNTS_NOTHING(reciprocal)
PLAIT_COUNTS_NOTHING(rope_table)
PLAIT_COUNTS_NOTHING(router_loss)
PLAIT_COUNTS_NOTHING(row_squares)
PLAIT_COUNTS_NOTHING(row_sums)
PLAIT_COUNTS_NOTHING(sink_gradients)
PLAIT_COUNTS_NOTHING(sort_arrivals)
PLAIT_COUNTS_NOTHING(sort_choices)
PLAIT_COUNTS_NOTHING(sum_of_bins)
PLAIT_COUNTS_NOTHING(sum_of_multiples)
PLAIT_COUNTS_NOTHING(sum)
PLAIT_COUNTS_NOTHING(update_router_state)

#undef PLAIT_COUNTS_NOTHING

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
