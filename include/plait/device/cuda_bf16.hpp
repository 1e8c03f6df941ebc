// CUDA's bf16 as plait's: `__nv_bfloat16*` stands where layers take `bf16*`, without a cast.
#pragma once

#include "plait/core/dtype.hpp"
#include "plait/core/same_bits.hpp"

struct __nv_bfloat16;  // NOLINT: of cuda_bf16.h

namespace plait {

template <>
inline constexpr bool same_bits<__nv_bfloat16, bf16> = true;

/// Returns the array in plait's type, for a struct of pointers such as `attention_inputs`, or a kernel of plait's.
inline bf16* from_cuda(__nv_bfloat16* pointer) { return elements_of<bf16>(pointer); }
inline const bf16* from_cuda(const __nv_bfloat16* pointer) { return elements_of<bf16>(pointer); }
/// Returns the array in CUDA's type, for a kernel of the program's own: of `parameter::used_value`, or of a tensor.
inline __nv_bfloat16* to_cuda(bf16* pointer) { return reinterpret_cast<__nv_bfloat16*>(pointer); }
inline const __nv_bfloat16* to_cuda(const bf16* pointer) { return reinterpret_cast<const __nv_bfloat16*>(pointer); }

}  // namespace plait
