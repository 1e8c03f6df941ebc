// The sum of two tensors that its first reader computes, such as the residual stream between two branches.
#pragma once

#include <concepts>
#include <utility>

#include "plait/kernels/kernels.hpp"
#include "plait/nn/layer.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait {

/// A tensor, or the sum of two. The sum is open until it is computed, in the memory of the first tensor. A layer may
/// take an open sum as its input, and add the terms in its first pass over them. Move-only.
template <class T, spec_like Spec, compute_device Device>
class open_sum {
 public:
  using tensor_type = tensor<T, Spec, Device>;

  /// Makes a closed sum.
  explicit open_sum(tensor_type value) : value_(std::move(value)) {}
  /// Makes an open sum. `addend` may be a view of memory that lives until the sum is closed.
  open_sum(tensor_type value, tensor_type addend) : value_(std::move(value)), addend_(std::move(addend)) {}

  bool open() const { return static_cast<bool>(addend_); }
  /// The memory of the sum; while it is open, this holds the first term.
  T* data() { return value_.data(); }
  /// The second term; null if the sum is closed.
  const T* addend() const { return addend_.data(); }
  /// Records that the caller has computed the sum.
  void closed() { addend_.reset(); }
  /// Computes the sum in a separate pass, unless it is closed.
  const tensor_type& close(Device& device) {
    if (open()) kernels::accumulate(device, addend_.data(), value_.data(), value_.size());
    closed();
    return value_;
  }
  tensor_type take(Device& device) && {
    close(device);
    return std::move(value_);
  }
  /// Takes ownership of the addend's memory if the addend is a view of it; otherwise releases it.
  void hold(tensor_type memory) {
    if (open() && addend_.data() == memory.data()) addend_ = std::move(memory);
  }
  template <spec_like Other>
  open_sum<T, Other, Device> as() && {
    return {std::move(value_).template as<Other>(), std::move(addend_).template as<Other>()};
  }

 private:
  tensor_type value_, addend_;
};

/// A layer that also accepts an open sum as its input. It closes the sum, if possible without a separate pass.
template <class L>
concept accepts_open_sum =
    layer<L> && requires(L& l, const microbatch<typename L::device>& mb,
                         open_sum<typename L::value_type, typename L::input, typename L::device>& x,
                         typename L::saved& saved) { l.forward(mb, x, &saved); };

/// A layer that then also returns an open sum.
template <class L>
concept returns_open_sum =
    accepts_open_sum<L> &&
    requires(L& l, const microbatch<typename L::device>& mb,
             open_sum<typename L::value_type, typename L::input, typename L::device>& x, typename L::saved& saved) {
      {
        l.forward(mb, x, &saved)
      } -> std::same_as<open_sum<typename L::value_type, typename L::output, typename L::device>>;
    };

namespace detail {

/// A view of a tensor as a closed sum.
template <class T, class Spec, class Device>
open_sum<T, Spec, Device> closed_view(const microbatch<Device>& mb, const tensor<T, Spec, Device>& x) {
  return open_sum<T, Spec, Device>(tensor<T, Spec, Device>(mb.ctx, const_cast<T*>(x.data())));
}

/// Whether a layer adds its addend in a pass that it needs in any case. A layer need not declare it. The library's
/// layers declare it by `adds_in_product`, which is false if a reduction follows the product.
template <layer L>
bool adds_in_product(const L& l) {
  if constexpr (requires { l.adds_in_product(); })
    return l.adds_in_product();
  else
    return adds_to_output<L>;
}

}  // namespace detail
}  // namespace plait
