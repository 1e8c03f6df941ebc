// A rank's part of a tensor as runs that are contiguous here and in the whole: which element of the whole is this one?
// Counter-based random numbers are keyed by it.
#pragma once

#include <cstdint>

#include "plait/core/box.hpp"
#include "plait/core/compiled.hpp"

namespace plait::kernels {

/// A box as runs of elements that are contiguous in the local and in the global order: run r begins at local r * length
/// and at global base + sum over d of index d of r * stride[d].
struct run_map {
  std::int64_t length = 0;
  std::int64_t runs = 0;
  std::int64_t base = 0;
  int dims = 0;
  std::int64_t extent[max_dims] = {};
  std::int64_t stride[max_dims] = {};

  static constexpr run_map of(const box& part) {
    run_map map;
    map.runs = map.length = 1;
    std::int64_t stride = 1;  // global elements between neighbours along a dim
    bool contiguous = true;   // everything further in lies here entirely
    for (int d = part.dims - 1; d >= 0; --d) {
      map.base += part.offset[d] * stride;
      if (contiguous) {
        map.length *= part.local[d];
        contiguous = part.local[d] == part.global[d];
      } else if (part.local[d] != 1) {
        map.runs *= part.local[d];
        map.stride[map.dims] = stride;
        map.extent[map.dims++] = part.local[d];
      }
      stride *= part.global[d];
    }
    return map;
  }

  /// Returns the global index where a run begins; innermost dims come first in the arrays.
  PLAIT_HOST_DEVICE constexpr std::int64_t global_of(std::int64_t run) const {
    std::int64_t at = base;
    for (int d = 0; d < dims; ++d) {
      const std::int64_t outer = run / extent[d];
      at += (run - outer * extent[d]) * stride[d];
      run = outer;
    }
    return at;
  }
  /// Returns the global index of an element that is here.
  PLAIT_HOST_DEVICE constexpr std::int64_t global_of_element(std::int64_t local) const {
    if (runs == 1) return base + local;
    const std::int64_t run = local / length;
    return global_of(run) + (local - run * length);
  }
};

}  // namespace plait::kernels
