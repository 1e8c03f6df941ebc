// The CPU as a device: its memory, its products by oneDNN and OpenBLAS, and streams that are always finished. Other
// computations are kernels (kernels/kernels.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/allocator.hpp"
#include "plait/device/deterministic_products.hpp"
#include "plait/device/device.hpp"
#ifdef PLAIT_PLAIN_PRODUCTS
#include "plait/device/gemm_problem.hpp"
#else
#include "plait/device/gemm_cpu.hpp"
#endif

namespace plait {

namespace detail {
#ifdef PLAIT_PLAIN_PRODUCTS
using float_gemm = plain_gemm;
inline void double_gemm(int, const gemm_problem& problem, double alpha, const double* a, const double* b, double beta,
                        double* c) {
  plain_product(problem, alpha, a, b, beta, c);
}
#else
using float_gemm = onednn_gemm;
inline void double_gemm(int threads, const gemm_problem& problem, double alpha, const double* a, const double* b,
                        double beta, double* c) {
  openblas_gemm(threads, problem, alpha, a, b, beta, c);
}
#endif
}  // namespace detail

/// One rank's share of the CPU. All work runs at once in the calling thread, so its streams and events are always
/// finished. It sets the number of threads of OpenMP and OpenBLAS for the duration of a product, and restores them
/// afterwards.
class cpu {
 public:
  struct options {
    /// Threads that one product may use; at least 1. OpenBLAS, for products of double, has one number for the whole
    /// process. If products of several devices run at the same time, the first one's number holds.
    int threads = 1;
    /// Whether sums in products have one order for all sizes (device/deterministic_products.hpp), as contexts with
    /// deterministic sums require. It needs `threads` = 1.
    bool deterministic = false;
    /// The program's own allocator, with boundaries of 64 bytes; empty: the process's heap. In products, oneDNN and
    /// OpenBLAS always allocate from that heap.
    memory_functions<> memory{};
  };

  using stream = finished_stream;
  using event = finished_event;

  cpu() : cpu(options{}) {}
  explicit cpu(options settings);
  ~cpu();
  cpu(const cpu&) = delete;
  cpu& operator=(const cpu&) = delete;

  /// Runs the first product of the process, which initialises oneDNN (7 ms). The constructor calls it. Call it before
  /// threads start, to keep this time out of measured or concurrent code.
  static void warm_up();

  int threads() const { return options_.threads; }
  bool deterministic() const { return options_.deterministic; }
  stream main_stream() const { return {}; }
  stream side_stream() const { return {}; }
  void synchronize() const {}

  /// Returns uninitialised memory on a 64-byte boundary; null for 0 bytes. Throws `plait::error` if memory is
  /// exhausted.
  void* allocate(std::size_t bytes, stream = {}) { return allocator_.allocate(bytes); }
  void release(void* pointer, stream = {}) { allocator_.release(pointer); }

  void copy(void* to, const void* from, std::size_t bytes, stream = {}) const {
    if (bytes != 0) std::memmove(to, from, bytes);
  }
  void zero(void* to, std::size_t bytes, stream = {}) const {
    if (bytes != 0) std::memset(to, 0, bytes);
  }

  void upload(void* to, const void* from_host, std::size_t bytes, stream s = {}) const {
    copy(to, from_host, bytes, s);
  }
  void download(void* to_host, const void* from, std::size_t bytes, stream s = {}) const {
    copy(to_host, from, bytes, s);
  }

  std::size_t bytes_in_use() const { return allocator_.bytes_in_use(); }
  std::size_t peak_bytes() const { return allocator_.peak_bytes(); }
  std::size_t cached_bytes() const { return allocator_.cached_bytes(); }
  /// Bytes from `options::memory` or the heap: blocks in use and released ones.
  std::size_t reserved_bytes() const { return allocator_.reserved_bytes(); }
  void reset_peak() { allocator_.reset_peak(); }
  void release_cache() { allocator_.release_cache(); }

  /// C[m,n] = alpha * op(A)[m,k] * op(B)[k,n] + beta * C, row-major. op transposes if its flag is set; lda, ldb, ldc
  /// are the elements between stored rows. With beta = 0, C may be uninitialised. A, B and C are all float or all
  /// double, or A and B are bf16. For bf16, C is float, or bf16 rounded once from sums in float. Throws `plait::error`
  /// for negative sizes or a leading dimension shorter than a row.
  template <class T, class Out>
    requires(std::is_floating_point_v<T> || std::is_same_v<T, bf16>) &&
            (std::is_same_v<Out, T> || std::is_same_v<Out, arithmetic<T>>)
  void gemm(bool trans_a, bool trans_b, std::int64_t m, std::int64_t n, std::int64_t k,
            std::type_identity_t<arithmetic<T>> alpha, const T* a, std::int64_t lda, const T* b, std::int64_t ldb,
            std::type_identity_t<arithmetic<T>> beta, Out* c, std::int64_t ldc) {
    const gemm_problem problem{trans_a, trans_b, m, n, k, lda, ldb, ldc};
    problem.check();
    if (m == 0 || n == 0) return;
    if (k == 0) return scale_matrix(m, n, beta, c, ldc);
    if (options_.deterministic) return deterministic_products_.run(float_gemm_, problem, alpha, a, b, beta, c);
    if constexpr (std::is_same_v<T, double>) {
      detail::double_gemm(options_.threads, problem, alpha, a, b, beta, c);
    } else {
      float_gemm_.run(problem, alpha, a, b, beta, c);
    }
  }

  /// Whether bf16 products run in hardware here (avx512_bf16 or amx_bf16). Without it they are as exact, but slower
  /// than products of float.
  static bool supports_bf16() { return detail::float_gemm::supports_bf16(); }

 private:
  /// The source of memory: the program's allocator if there is one, else the heap.
  struct heap {
    static constexpr std::size_t boundary = 64;
    void* try_allocate(std::size_t bytes, std::uintptr_t) const {
      if (programs) return programs.allocate_aligned(boundary, "cpu", bytes);
      return ::operator new(bytes, std::align_val_t{boundary}, std::nothrow);
    }
    void* allocate(std::size_t bytes, std::uintptr_t stream) const {
      void* const pointer = try_allocate(bytes, stream);
      if (pointer == nullptr) fail({"cpu: out of memory, ", bytes, " bytes were asked for"});
      return pointer;
    }
    void release(void* pointer, std::size_t bytes, std::uintptr_t) const noexcept {
      if (programs) return programs.release(pointer, bytes);
      ::operator delete(pointer, std::align_val_t{boundary});
    }
    memory_functions<> programs;
  };

  options options_;
  caching_allocator<heap> allocator_;
  detail::float_gemm float_gemm_;
  deterministic_products deterministic_products_;
};

static_assert(compute_device<cpu>);

PLAIT_COMPILED_TEMPLATE(class caching_allocator<cpu::heap>)

#ifndef PLAIT_COMPILED
PLAIT_INLINE cpu::cpu(options settings)
    : options_(std::move(settings)), allocator_(heap{options_.memory}), float_gemm_(options_.threads) {
  if (options_.threads < 1) {
    fail({"cpu: options::threads = ", options_.threads, ", must be at least 1"});
  }
  if (options_.deterministic && options_.threads != 1)
    fail({"cpu: options::deterministic is for options::threads = 1, and here they are ", options_.threads});
  options_.memory.require_both("cpu");
  warm_up();
}

PLAIT_INLINE cpu::~cpu() = default;

PLAIT_INLINE void cpu::warm_up() {
  static std::once_flag once;
  std::call_once(once, [] {
    const float in[4] = {1, 2, 3, 4};
    float out[4];
    detail::float_gemm().run({false, false, 2, 2, 2, 2, 2, 2}, 1.0f, in, in, 0.0f, out);
  });
}
#endif

}  // namespace plait

#include "plait/core/macros_on.hpp"
