// The choice between plait's own attention on a GPU and that of a library, and the interface of such a library. It
// includes neither.
#pragma once

#include <cstdint>

#include "plait/core/types.hpp"

namespace plait {

class cuda;
namespace kernels {
struct attention_shape;
}

/// Whose attention a GPU runs: `own` is plait's kernels. `cudnn` is the library's; it is an error where the library is
/// absent or does not support the shape. `automatic` is the library's for shapes that it supports, otherwise plait's.
enum class attention_backend : std::uint8_t { automatic, own, cudnn };

/// Attention in bf16 by another library, see plait/kernels/cuda/attention_cudnn.hpp. Arrays, strides and lse mean what
/// they mean for `kernels::attention_forward` and `attention_backward`; gradients are overwritten.
class attention_library {
 public:
  virtual ~attention_library() = default;

  /// Whether both directions can be had for this shape. The first question for a shape may take long.
  virtual bool supports(const kernels::attention_shape& shape, dtype type) = 0;
  virtual void forward(cuda& device, const bf16* q, const bf16* k, const bf16* v, bf16* o, float* lse,
                       const kernels::attention_shape& shape) = 0;
  virtual void backward(cuda& device, const bf16* q, const bf16* k, const bf16* v, const bf16* o, const float* lse,
                        const bf16* d_o, bf16* dq, bf16* dk, bf16* dv, const kernels::attention_shape& shape) = 0;

 protected:
  attention_library() = default;
  attention_library(const attention_library&) = default;
  attention_library& operator=(const attention_library&) = default;
};

/// The choice of a device's owner. The program owns the library, which outlives its use; null: there is none.
struct attention_choice {
  attention_backend backend = attention_backend::automatic;
  attention_library* library = nullptr;
};

}  // namespace plait
