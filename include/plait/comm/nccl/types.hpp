// NCCL's names for dtypes and reductions, and the check of its results. It is the one header that includes <nccl.h>.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <string>

#include "plait/comm/reduce.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"

namespace plait::nccl::detail {

constexpr ncclDataType_t type_of(dtype type) {
  switch (type) {
    case dtype::f32:
      return ncclFloat32;
    case dtype::f64:
      return ncclFloat64;
    case dtype::bf16:
      return ncclBfloat16;
    case dtype::i32:
      return ncclInt32;
    case dtype::i64:
      return ncclInt64;
    case dtype::u8:
      break;
  }
  return ncclUint8;
}

constexpr ncclRedOp_t op_of(reduce_op op) {
  return op == reduce_op::sum ? ncclSum : op == reduce_op::max ? ncclMax : ncclMin;
}

[[noreturn]] inline void call_failed(ncclResult_t result, const char* call) {
  fail({call, " failed: ", ncclGetErrorString(result), " (", ncclGetLastError(nullptr), ")"});
}
inline void check(ncclResult_t result, const char* call) {
  if (result != ncclSuccess && result != ncclInProgress) call_failed(result, call);
}

}  // namespace plait::nccl::detail

#include "plait/core/macros_on.hpp"
