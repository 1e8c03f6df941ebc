// A stand-in for CUB's map of one array to another: one operation of a stream.
#pragma once

#include "../../cuda_runtime.h"

namespace cub {

struct DeviceTransform {
  template <class In, class Out, class Count, class Map>
  static cudaError_t Transform(const In* in, Out* out, Count count, Map map, cudaStream_t stream = nullptr) {
    if (count < 0) return stand_in::fail(cudaErrorInvalidValue);
    return stand_in::call([&](stand_in::runtime& r) {
      const auto s = r.find(stream);
      if (!s || s->device != stand_in::current_device) return cudaErrorInvalidResourceHandle;
      for (const void* p : {static_cast<const void*>(in), static_cast<const void*>(out)})
        stand_in::check_argument(r, p, "cub::DeviceTransform");
      return r.enqueue(s, [=] {
        for (Count i = 0; i < count; ++i) out[i] = map(in[i]);
      });
    });
  }
};

}  // namespace cub
