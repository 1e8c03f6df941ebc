// The complete gradient of a parameter, which is what optimizers take. Next: nn/parameter.hpp, whose `reduce` makes
// one.
#pragma once

#include <cstdint>
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

}  // namespace plait
