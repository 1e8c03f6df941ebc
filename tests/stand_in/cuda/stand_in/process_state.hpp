// The state of the process and its threads: last errors, current devices, captures, and settings of tests. Streams are
// in stream.hpp.
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

#include "api_types.hpp"
#include "operations.hpp"

namespace stand_in {

inline thread_local cudaError_t last_error = cudaSuccess;
inline thread_local int current_device = 0;
inline thread_local bool device_chosen = false;  ///< whether the thread has called cudaSetDevice
/// By threads that have not called cudaSetDevice. On a GPU each of these calls would make a context on device 0.
inline std::atomic<int> calls_without_device{0};
inline std::atomic<cudaError_t> lost_device{cudaSuccess};  ///< set by tests: the error of queries of events
inline thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
inline thread_local std::vector<std::shared_ptr<capture>> captures_of_thread;

/// Whether this thread may do what only drivers and libraries may: record an event of another device than the stream's.
inline thread_local bool is_library = false;

inline std::atomic<double> abort_seconds{0};  ///< set by tests: the time that an abort of a communicator takes
/// Set by tests: an abort returns only after this number of aborts has started.
inline std::atomic<int> aborts_together{0};
inline std::atomic<int> aborts_begun{0};

inline cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

inline int device_count() {
  static const int count = [] {
    const char* text = std::getenv("PLAIT_STAND_IN_DEVICES");
    return text ? std::atoi(text) : 1;
  }();
  return count;
}

/// Whether another process uses the device in the mode EXCLUSIVE_PROCESS, so that no context can be made on it.
inline bool is_taken(int device) {
  static const char* const text = std::getenv("PLAIT_STAND_IN_TAKEN");
  return text && std::atoi(text) == device;
}

enum class stream_order { late, eager, random };

}  // namespace stand_in
