// A sum of two tensors that its first reader computes: the residual stream between two branches, where a
// product has not added it.
#pragma once

#include <concepts>
#include <utility>

#include "plait/kernels/kernels.hpp"
#include "plait/nn/layer.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait {

/// A tensor, or the sum of two: then it is open until it is computed, in the memory of the first. A layer may
/// take its input so, and add in its first pass over it. Move-only.
template <class T, spec_like Spec, compute_device Device>
class open_sum {
 public:
  using tensor_type = tensor<T, Spec, Device>;

  /// A sum that is closed.
  explicit open_sum(tensor_type value) : value_(std::move(value)) {}
  /// `addend` may be a view, of what lives until the sum is closed.
  open_sum(tensor_type value, tensor_type addend) : value_(std::move(value)), addend_(std::move(addend)) {}

  bool open() const { return static_cast<bool>(addend_); }
  /// Where the sum is, or is to be: until then, what `addend` is to be added to.
  T* data() { return value_.data(); }
  /// Null where the sum is closed.
  const T* addend() const { return addend_.data(); }
  /// Notes that the caller has computed the sum.
  void closed() { addend_.reset(); }
  /// Computes the sum, in a pass of its own where that is still to be done.
  const tensor_type& close(Device& device) {
    if (open()) kernels::accumulate(device, addend_.data(), value_.data(), value_.size());
    closed();
    return value_;
  }
  tensor_type take(Device& device) && {
    close(device);
    return std::move(value_);
  }
  /// Takes over the memory of the addend, if that is a view of it; otherwise releases it.
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

/// A layer that takes its input as an open sum as well, and closes it without a pass of its own where it can.
template <class L>
concept closes_sums = layer<L> && requires(L& l, const microbatch<typename L::device>& mb,
                                           open_sum<typename L::value_type, typename L::input, typename L::device>& x,
                                           typename L::saved& saved) { l.forward(mb, x, &saved); };

/// A layer whose output is then one, too.
template <class L>
concept leaves_sums =
    closes_sums<L> &&
    requires(L& l, const microbatch<typename L::device>& mb,
             open_sum<typename L::value_type, typename L::input, typename L::device>& x, typename L::saved& saved) {
      {
        l.forward(mb, x, &saved)
      } -> std::same_as<open_sum<typename L::value_type, typename L::output, typename L::device>>;
    };

namespace detail {

/// A view of a tensor, as a sum that is closed.
template <class T, class Spec, class Device>
open_sum<T, Spec, Device> closed_view(const microbatch<Device>& mb, const tensor<T, Spec, Device>& x) {
  return open_sum<T, Spec, Device>(tensor<T, Spec, Device>(mb.ctx, const_cast<T*>(x.data())));
}

/// Whether a layer that takes an addend adds it in a pass that it makes anyway. A layer need not declare it; the layers
/// of the library declare by `adds_in_product` where a reduction comes between.
template <layer L>
bool adds_in_product(const L& l) {
  if constexpr (requires { l.adds_in_product(); })
    return l.adds_in_product();
  else
    return adds_to_output<L>;
}

}  // namespace detail
}  // namespace plait
