// Calls of CUDA's runtime: their check, owners of events, the launch of kernels, their dynamic shared memory, and the
// faults that kernels report. `relaxed_capture` allows calls while another part of the program captures a graph. Test:
// tests/cuda/device/launch.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait::detail {

/// Throws `plait::error` with the action `doing`, CUDA's name of the error and its text.
inline void cuda_check(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // otherwise the next launch would report this error
  fail({"cuda: ", doing, ": ", cudaGetErrorName(status), ": ", cudaGetErrorString(status)});
}

struct event_destroyer {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using owned_event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, event_destroyer>;

inline owned_event make_event(unsigned flags = cudaEventDisableTiming) {
  cudaEvent_t made = nullptr;
  cuda_check(cudaEventCreateWithFlags(&made, flags), "making an event");
  return owned_event(made);
}

}  // namespace plait::detail

/// The block's dynamic shared memory as an array of T, aligned to 16 bytes. All kernels share one name for it, because
/// `extern` arrays of one name must have one type.
#ifdef PLAIT_CUDA_STAND_IN
#define PLAIT_DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(__stand_in_dynamic_shared())
#else
#define PLAIT_DYNAMIC_SHARED(T, name)                                   \
  extern __shared__ __align__(16) unsigned char plait_dynamic_shared[]; \
  T* const name = reinterpret_cast<T*>(plait_dynamic_shared)
#endif

namespace plait::detail {

struct launch_shape {
  dim3 grid = dim3(1);
  dim3 block = dim3(1);
  std::size_t shared_bytes = 0;  ///< dynamic shared memory per block
};

/// Returns the number of blocks of `per_block` that cover n things: at least 1, at most the limit of a grid's first
/// dimension. Kernels loop with the grid's stride over the rest.
inline unsigned blocks_for(std::int64_t n, std::int64_t per_block, std::int64_t most = 0x7fffffff) {
  const std::int64_t blocks = (n + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > most ? most : blocks);
}

/// Puts a kernel into a stream. Throws `plait::error` if the launch is refused. Errors of the running kernel appear at
/// the next synchronisation.
template <class... Parameters, class... Arguments>
void launch(cudaStream_t stream, const launch_shape& shape, void (*kernel)(Parameters...), Arguments... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments));
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "launching a kernel");
}
template <class Device, class... Parameters, class... Arguments>
  requires requires(const Device& d) { d.main_stream().handle(); }
void launch(const Device& device, const launch_shape& shape, void (*kernel)(Parameters...), Arguments... arguments) {
  launch(device.main_stream().handle(), shape, kernel, arguments...);
}

/// Lets a kernel use `bytes` of dynamic shared memory, if that is more than the 48 KB that every kernel may use.
template <class... Parameters>
void allow_shared(void (*kernel)(Parameters...), std::size_t bytes) {
  if (bytes <= 48 * 1024) return;
  cuda_check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             "asking for shared memory");
}

/// Returns whether a stream is being captured into a graph.
inline bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda_check(cudaStreamIsCapturing(stream, &status), "asking for a capture");
  return status != cudaStreamCaptureStatusNone;
}

/// While it lives, the thread may query events, wait for streams, and allocate and release memory. That holds although
/// another stream is being captured, in any capture mode. None of these calls may be part of the captured graph.
class relaxed_capture {
 public:
  relaxed_capture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  relaxed_capture(const relaxed_capture&) = delete;
  relaxed_capture& operator=(const relaxed_capture&) = delete;
  ~relaxed_capture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace plait::detail

namespace plait {

/// The first data error that kernels have found since the last synchronisation. They cannot throw, so they write it to
/// device memory.
struct device_fault {
  static constexpr int none = 0, embedding_id = 1, cross_entropy_target = 2;

  int code = none;
  int row = 0;
  long long value = 0;
  long long limit = 0;  ///< valid values are 0 to limit - 1
};

/// Returns the text of the error, in the words of the CPU's kernel.
inline std::string text_of(const device_fault& fault) {
  const std::string row = std::to_string(fault.row), value = std::to_string(fault.value);
  const std::string last = std::to_string(fault.limit - 1);
  switch (fault.code) {
    case device_fault::embedding_id:
      return cat({"embedding: token ", row, " has id ", value, ", legal are 0 to ", last});
    case device_fault::cross_entropy_target:
      return cat({"cross_entropy: row ", row, " has target ", value, ", legal are 0 to ", last, " and ignore_index"});
    default:
      return cat({"a kernel reported an unknown fault, code ", fault.code});
  }
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
