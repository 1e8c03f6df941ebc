#pragma once

// A stand-in for cuDNN 9, for tests: the part of its C interface that plait uses. The graphs are in cudnn_frontend.h.

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>

enum cudnnStatus_t { CUDNN_STATUS_SUCCESS = 0, CUDNN_STATUS_NOT_INITIALIZED = 1001, CUDNN_STATUS_BAD_PARAM = 2000 };

struct cudnnContext {
  cudaStream_t stream = nullptr;
  int device = 0;
};
using cudnnHandle_t = cudnnContext*;

namespace stand_in {

/// Set by tests: the version of the library. And the number of handles.
inline std::atomic<std::size_t> cudnn_version{91400};
inline std::atomic<int> cudnn_handles{0};

}  // namespace stand_in

inline std::size_t cudnnGetVersion() { return stand_in::cudnn_version; }
inline const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_SUCCESS           ? "CUDNN_STATUS_SUCCESS"
         : status == CUDNN_STATUS_NOT_INITIALIZED ? "CUDNN_STATUS_NOT_INITIALIZED"
                                                  : "CUDNN_STATUS_BAD_PARAM";
}
inline cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return CUDNN_STATUS_NOT_INITIALIZED;
  ++stand_in::cudnn_handles;
  *handle = new cudnnContext{nullptr, device};
  return CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  if (handle == nullptr) return CUDNN_STATUS_BAD_PARAM;
  --stand_in::cudnn_handles;
  delete handle;
  return CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  if (handle == nullptr) return CUDNN_STATUS_BAD_PARAM;
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}
