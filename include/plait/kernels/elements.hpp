#pragma once

#include <cstdint>

#include "plait/version.hpp"

namespace plait::kernels {

/// `size` elements in a device's memory that a kernel reads: one of the many tensors of one launch.
template <class G>
struct const_elements {
  const G* data = nullptr;
  std::int64_t size = 0;
};

}  // namespace plait::kernels
