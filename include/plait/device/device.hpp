// The concept of a device: memory, streams, events and products.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "plait/core/dtype.hpp"

namespace plait {

class cpu;
class cuda;

/// A place that computes. Layers are written against this concept, and a kernel for each device; `cpu` models it, and
/// `cuda` with real streams. A device object belongs to one rank and is used by that rank's thread only
/// (`allocate` and `release` may be called from any thread).
///
/// * `stream` is a small copyable handle that names an ordered queue of work; `main_stream()` is where gemm and the
///   kernels run, `side_stream()` is where communication that overlaps them runs. A device without queues returns
///   handles whose operations have already finished.
/// * `event` marks a point in a stream: `record(stream)`, `stream.wait(event)`, `event.synchronize()`, `event.done()`.
/// * `copy` and `zero` work on the device's memory; `upload` and `download` are the only ways in and out. The source of
///   an upload may be changed when the call returns, the target of a download is complete when it returns.
/// * memory is bound to the stream it was allocated on: after `release(ptr, stream)` it is reused only on `stream`.
template <class D>
concept compute_device = requires(D& d, typename D::stream s, typename D::event e, void* to, const void* from,
                                  std::size_t bytes, std::int64_t n, const float* in, float* out) {
  { d.main_stream() } -> std::same_as<typename D::stream>;
  { d.side_stream() } -> std::same_as<typename D::stream>;
  { d.allocate(bytes, s) } -> std::same_as<void*>;
  d.release(to, s);
  d.copy(to, from, bytes, s);
  d.zero(to, bytes, s);
  d.upload(to, from, bytes, s);
  d.download(to, from, bytes, s);
  d.synchronize();
  d.gemm(false, true, n, n, n, 1.0f, in, n, in, n, 0.0f, out, n);
  { d.supports_bf16() } -> std::convertible_to<bool>;
  s.synchronize();
  s.wait(e);
  e.record(s);
  e.synchronize();
  { e.done() } -> std::convertible_to<bool>;
};

/// Whether the kernels of layers on a device are compiled here, or elsewhere in the program. Of `cuda` device/cuda.hpp
/// says so, which files that compile no kernels may include as well.
template <class D>
inline constexpr bool has_kernels = true;

/// Whether a device computes nothing, and is there to find out what a program would do (device/counting.hpp).
template <class D>
inline constexpr bool only_counts = requires { D::only_counts; };

/// Whether a device has products whose sums can have one order, as canonical numerics need.
template <class D>
concept has_canonical_products = requires(const D& device) {
  { device.canonical() } -> std::convertible_to<bool>;
};

}  // namespace plait
