// Every kernel for the device that computes nothing. Those that are most of a step's time say what they would do, in
// kernels/counting.hpp; the others, here, do nothing. A kernel that is missing in both does not compile in a dry
// run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "plait/core/box.hpp"
#include "plait/device/counting.hpp"
#include "plait/kernels/attention_shape.hpp"
#include "plait/kernels/cross_entropy_settings.hpp"

namespace plait::kernels {

// The kernels that are most of a step's time beside products, for the device that computes nothing: each says what it
// would read and write, or how many operations it would compute.

namespace detail {

/// The product of the first `Most` sizes among a kernel's arguments, by which its arrays are long.
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

/// A kernel that passes `arrays` arrays of so many values of type T.
template <class T>
void pass(counting_device& device, double arrays, std::int64_t values) {
  device.count_moved(arrays * static_cast<double>(values) * sizeof(T));
}

/// An activation of so many values, which passes `arrays` arrays of them.
template <class T>
void activate(counting_device& device, double arrays, std::int64_t values, bool backward) {
  device.count_activation(arrays * static_cast<double>(values) * sizeof(T), static_cast<double>(values), backward);
}

inline double visible_pairs(const attention_shape& s) {
  double pairs = static_cast<double>(s.q_len) * static_cast<double>(s.k_len);
  if (s.causal) {  // row i sees q_offset - k_offset + i + 1 keys, at least none and at most all
    pairs = 0;
    for (std::int64_t i = 0; i < s.q_len; ++i) pairs += static_cast<double>(s.visible(i));
  }
  return pairs * static_cast<double>(s.batch * s.heads * s.head_dim);
}

/// Attention: its shape is among the arguments.
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

/// Rotary positions of rows by heads by head_dim, which follow the pointers to the tables.
template <class T, class First, class... Arguments>
void rotate_heads(counting_device& device, const First& first, const Arguments&... arguments) {
  if constexpr (std::is_same_v<First, std::int64_t>)  // the stride of where the values come from
    pass<T>(device, 2, elements<3>(arguments...));
  else
    pass<T>(device, 2, elements<3>(first, arguments...));
}

/// A part is read and written: the box among the arguments.
template <class T, class... Arguments>
void pass_box(counting_device& device, const Arguments&... arguments) {
  const auto take = [&](const auto& argument) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(argument)>, box>)
      pass<T>(device, 2, argument.local_size());
  };
  (take(arguments), ...);
}

/// The loss: its rows by its valid columns.
template <class T, class... Arguments>
void pass_logits(counting_device& device, double arrays, const Arguments&... arguments) {
  const auto take = [&](const auto& argument) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(argument)>, vocabulary_range>)
      pass<T>(device, arrays, elements<1>(arguments...) * argument.valid());
  };
  (take(arguments), ...);
}

}  // namespace detail

/// Elementwise kernels, by the arrays that they read and write.
template <class T, class... Arguments>
void accumulate(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 3, detail::elements<1>(arguments...));
}
template <class T, class... Arguments>
void add(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 3, detail::elements<1>(arguments...));
}
template <class T, class... Arguments>
void axpy(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 3, detail::elements<1>(arguments...));
}
template <class T, class... Arguments>
void multiply(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 3, detail::elements<1>(arguments...));
}
template <class T, class... Arguments>
void scale(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 2, detail::elements<1>(arguments...));
}
template <class T, class... Arguments>
void fill(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 1, detail::elements<1>(arguments...));
}
template <class T, class... Arguments>
void relu_forward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 2, detail::elements<1>(arguments...));
}
template <class T, class... Arguments>
void relu_backward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 3, detail::elements<1>(arguments...));
}
template <class From, class To, class... Arguments>
void cast(counting_device& device, From* const&, To* const&, const Arguments&... arguments) {
  device.count_moved(static_cast<double>(detail::elements<1>(arguments...)) * (sizeof(From) + sizeof(To)));
}
/// Those of rows and columns.
template <class T, class... Arguments>
void rms_norm_forward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 2, detail::elements<2>(arguments...));
}
template <class T, class... Arguments>
void rms_norm_backward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 3, detail::elements<2>(arguments...));
}
template <class T, class... Arguments>
void layer_norm_forward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 2, detail::elements<2>(arguments...));
}
template <class T, class... Arguments>
void layer_norm_backward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 3, detail::elements<2>(arguments...));
}
template <class T, class... Arguments>
void rms_apply(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 2, detail::elements<2>(arguments...));
}
template <class T, class... Arguments>
void layer_norm_apply(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 2, detail::elements<2>(arguments...));
}
template <class T, class... Arguments>
void layer_norm_backward_dx(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 3, detail::elements<2>(arguments...));
}
template <class T, class... Arguments>
void layer_norm_backward_dweight(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 2, detail::elements<2>(arguments...));
}
template <class T, class... Arguments>
void add_bias(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 2, detail::elements<2>(arguments...));
}
template <class T, class... Arguments>
void bias_gradient(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 1, detail::elements<2>(arguments...));
}
/// Activations, which processors may take longer to compute than to move.
template <class T, class... Arguments>
void gelu_forward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::activate<T>(device, 2, detail::elements<1>(arguments...), false);
}
template <class T, class... Arguments>
void gelu_backward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::activate<T>(device, 3, detail::elements<1>(arguments...), true);
}
template <class T, class... Arguments>
void gelu_tanh_forward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::activate<T>(device, 2, detail::elements<1>(arguments...), false);
}
template <class T, class... Arguments>
void gelu_tanh_backward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::activate<T>(device, 3, detail::elements<1>(arguments...), true);
}
template <class T, class... Arguments>
void silu_forward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::activate<T>(device, 2, detail::elements<1>(arguments...), false);
}
template <class T, class... Arguments>
void silu_backward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::activate<T>(device, 3, detail::elements<1>(arguments...), true);
}
template <class T, class... Arguments>
void swiglu_forward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::activate<T>(device, 3, detail::elements<2>(arguments...), false);
}
template <class T, class... Arguments>
void swiglu_backward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::activate<T>(device, 5, detail::elements<2>(arguments...), true);
}
/// Rotary positions: heads' values are read and written; the stride of where they come from is not a size.
template <class T, class... Arguments>
void rope_forward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::rotate_heads<T>(device, arguments...);
}
template <class T, class... Arguments>
void rope_backward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::rotate_heads<T>(device, arguments...);
}
template <class Id, class T, class... Arguments>
void embedding_forward(counting_device& device, Id* const&, T* const&, const Arguments&... arguments) {
  detail::pass<T>(device, 2, detail::elements<2>(arguments...));
}
/// Gradients are read, and added to those of the table.
template <class Id, class T, class G, class... Arguments>
void embedding_backward(counting_device& device, Id* const&, T* const&, G* const&, const Arguments&... arguments) {
  device.count_moved(static_cast<double>(detail::elements<2>(arguments...)) * (sizeof(T) + 2 * sizeof(G)));
}
/// Dropout of a part: a box has its extents.
template <class T, class... Arguments>
void dropout_forward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass_box<T>(device, arguments...);
}
template <class T, class... Arguments>
void dropout_backward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass_box<T>(device, arguments...);
}
template <class T, class... Arguments>
void cross_entropy_max(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass_logits<T>(device, 1, arguments...);
}
template <class T, class... Arguments>
void cross_entropy_statistics(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass_logits<T>(device, 1, arguments...);
}
template <class T, class... Arguments>
void cross_entropy_local_statistics(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass_logits<T>(device, 1, arguments...);
}
template <class T, class... Arguments>
void cross_entropy_backward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::pass_logits<T>(device, 2, arguments...);
}

/// 4 operations for each visible pair of positions and each element of a head, and 10 backward.
template <class T, class... Arguments>
void attention_forward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::attend<std::remove_const_t<T>>(device, 4, arguments...);
}
template <class T, class... Arguments>
void attention_backward(counting_device& device, T* const&, const Arguments&... arguments) {
  detail::attend<std::remove_const_t<T>>(device, 10, arguments...);
}

/// AdamW: all of a tensor's arrays are read, and all but its gradient written.
template <class Tensor, std::size_t Extent, class... Arguments>
void adamw_update(counting_device& device, const std::span<Tensor, Extent>& tensors, const Arguments&...) {
  double bytes = 0;
  for (const auto& t : tensors)
    bytes +=
        static_cast<double>(t.size) * (sizeof(*t.gradient) + 2 * (sizeof(*t.master) + sizeof(*t.m) + sizeof(*t.v)) +
                                       (t.weight == nullptr ? 0 : sizeof(*t.weight)));
  device.count_moved(bytes);
}
/// The sum of squares of parts.
template <class Part, std::size_t Extent, class... Arguments>
void add_sum_squares(counting_device& device, const std::span<Part, Extent>& parts, const Arguments&...) {
  double bytes = 0;
  for (const auto& p : parts) bytes += static_cast<double>(p.size) * sizeof(*p.data);
  device.count_moved(bytes);
}

template <class... Arguments>
void add_exact_squares(counting_device&, const Arguments&...) {}
template <class... Arguments>
void attention_delta(counting_device&, const Arguments&...) {}
template <class... Arguments>
void clip(counting_device&, const Arguments&...) {}
template <class... Arguments>
void copy_2d(counting_device&, const Arguments&...) {}
template <class... Arguments>
void copy_3d(counting_device&, const Arguments&...) {}
template <class... Arguments>
void copy_box(counting_device&, const Arguments&...) {}
template <class... Arguments>
void cross_entropy_loss(counting_device&, const Arguments&...) {}
template <class... Arguments>
void cross_entropy_rescale(counting_device&, const Arguments&...) {}
template <class... Arguments>
void digest(counting_device&, const Arguments&...) {}
template <class... Arguments>
void divide_by_norm(counting_device&, const Arguments&...) {}
template <class... Arguments>
void fill_from(counting_device&, const Arguments&...) {}
template <class... Arguments>
void fill_normal(counting_device&, const Arguments&...) {}
template <class... Arguments>
void fill_uniform(counting_device&, const Arguments&...) {}
template <class... Arguments>
void layer_norm_backward_dots(counting_device&, const Arguments&...) {}
template <class... Arguments>
void layer_norm_statistics(counting_device&, const Arguments&...) {}
template <class... Arguments>
void merge_lse(counting_device&, const Arguments&...) {}
template <class... Arguments>
void muon_momentum(counting_device&, const Arguments&...) {}
template <class... Arguments>
void muon_update(counting_device&, const Arguments&...) {}
template <class... Arguments>
void reciprocal(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_inverse(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_norm_backward_apply(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_norm_backward_dot(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_norm_backward_dweight(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_norm_backward_dx(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rope_table(counting_device&, const Arguments&...) {}
template <class... Arguments>
void row_centred_squares(counting_device&, const Arguments&...) {}
template <class... Arguments>
void row_sum_squares(counting_device&, const Arguments&...) {}
template <class... Arguments>
void row_sums(counting_device&, const Arguments&...) {}
template <class... Arguments>
void sum_of_bins(counting_device&, const Arguments&...) {}
template <class... Arguments>
void sum_of_multiples(counting_device&, const Arguments&...) {}
template <class... Arguments>
void sum(counting_device&, const Arguments&...) {}

}  // namespace plait::kernels
