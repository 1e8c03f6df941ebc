// The complete gradient of a parameter, which is what optimizers take.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "plait/core/precision.hpp"
#include "plait/device/device.hpp"

namespace plait {

template <class Precision, compute_device Device>
class parameter;

/// The complete gradient of a parameter: `parameter::reduce` returns it, and nothing else of a parameter is taken by an
/// optimizer.
template <class Precision, compute_device Device>
class reduced_gradient {
 public:
  using precision_type = Precision;

  reduced_gradient(reduced_gradient&&) noexcept = default;
  reduced_gradient& operator=(reduced_gradient&&) noexcept = default;

  plait::parameter<Precision, Device>& parameter() const { return *parameter_; }
  /// This rank's piece of its part, which is in the dual layout of `parameter().stored()`.
  const gradient_of<Precision>* data() const { return std::as_const(*parameter_).gradient(); }
  std::int64_t size() const { return parameter_->piece().size(); }

 private:
  friend class plait::parameter<Precision, Device>;
  explicit reduced_gradient(plait::parameter<Precision, Device>& p) : parameter_(&p) {}
  plait::parameter<Precision, Device>* parameter_;
};

namespace detail {
/// Refuses to compile where an optimizer of another precision is to update parameters.
template <class OfOptimizer, class OfParameters>
constexpr void require_one_precision() {
  static_assert(std::is_same_v<OfOptimizer, OfParameters>,
                "the optimizer is of another precision than the parameters: write adamw<double> or muon<double> for "
                "layers of double, and so for float and bf16");
}
}  // namespace detail

}  // namespace plait
