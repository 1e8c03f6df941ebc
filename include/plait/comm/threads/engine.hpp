// The interface by which in-process ranks work on a device's memory. It includes no CUDA, and ranks without an engine
// work on the host's memory (comm/threads/work.hpp).
#pragma once

#include "plait/core/macros_off.hpp"
#include "plait/version.hpp"

namespace plait::threads {

namespace detail {
struct operation;
struct part;
}  // namespace detail

/// A point in a stream that an engine keeps in an operation, and uses again when the operation is used again.
class device_mark {
 public:
  virtual ~device_mark() = default;
};

/// Does the work of operations on memory that the processor cannot touch. One for each rank, called by the rank's
/// thread only. Ranks meet on the host as they do without one; no call waits for the device.
class device_engine {
 public:
  virtual ~device_engine() = default;

  /// Throws `plait::error` unless the device can use `data`; `what` names the operation.
  virtual void check(const char* what, const void* data) const = 0;
  /// Marks in `mine` what this rank's stream holds so far: the operation comes after it. Called with the world locked.
  virtual void arrive(detail::part& mine) = 0;
  /// Enqueues all of the operation's work, after the marks of all parts, and marks its end. Called by one rank.
  virtual void run(detail::operation& op) = 0;
  /// Makes this rank's stream wait for the operation's end.
  virtual void leave(detail::operation& op) = 0;
  /// Whether the device has passed the operation's end.
  virtual bool reached(detail::operation& op) const = 0;
};

}  // namespace plait::threads

#include "plait/core/macros_on.hpp"
