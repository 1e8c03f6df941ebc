// Matrix products on the CPU: float and bf16 by oneDNN, double by OpenBLAS. Only the definitions need oneDNN's headers.
// Callers use `gemm` of device/cpu.hpp, which checks the problem first.
#pragma once

#include <cblas.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/gemm_problem.hpp"

namespace plait {

/// Products of float, and of bf16 with results in float or, rounded once, in bf16, by oneDNN's matmul. Compiled
/// primitives are cached by problem: a new shape costs 0.1 to 0.3 ms, a known one a hash lookup. On some processors
/// splitting m or n changes bits; device/deterministic_products.hpp has products that keep them. Without bf16
/// instructions, float copies of the factors are multiplied. Only one thread may use it at a time.
class onednn_gemm {
 public:
  /// A product uses `threads` threads, whatever OpenMP's number is in the calling thread. OpenMP's number is kept.
  explicit onednn_gemm(int threads = 1);
  ~onednn_gemm();
  onednn_gemm(const onednn_gemm&) = delete;
  onednn_gemm& operator=(const onednn_gemm&) = delete;

  /// `problem` must have been checked, and have no size of zero.
  void run(const gemm_problem& problem, float alpha, const float* a, const float* b, float beta, float* c);
  void run(const gemm_problem& problem, float alpha, const bf16* a, const bf16* b, float beta, float* c);
  void run(const gemm_problem& problem, float alpha, const bf16* a, const bf16* b, float beta, bf16* c);

  /// Whether this processor multiplies bf16 in hardware.
  static bool supports_bf16();
  /// Whether up to 256 terms are added one after the other, in products of at least 16 rows and columns. True with
  /// AVX-512, except for bf16 with AMX, whose tiles add in another order.
  static bool adds_in_order(dtype numbers);

 private:
  class primitives;
  template <class Out>
  void run_bf16(const gemm_problem& problem, float alpha, const bf16* a, const bf16* b, float beta, Out* c);

  std::unique_ptr<primitives> primitives_;
  int threads_;
};

namespace detail {

/// Sets OpenBLAS's number of threads, which is global to the process, while a product runs. If products of several
/// threads run at the same time, the first one's number holds for all. After the last one, the program's number
/// returns.
class openblas_threads {
 public:
  explicit openblas_threads(int threads) {
    const std::lock_guard lock(mutex_);
    if (running_++ != 0) return;
    before_ = openblas_get_num_threads();
    inside_ = threads;
    if (inside_ != before_) openblas_set_num_threads(inside_);
  }
  ~openblas_threads() {
    const std::lock_guard lock(mutex_);
    if (--running_ == 0 && inside_ != before_) openblas_set_num_threads(before_);
  }
  openblas_threads(const openblas_threads&) = delete;
  openblas_threads& operator=(const openblas_threads&) = delete;

 private:
  static inline std::mutex mutex_;
  static inline int running_ = 0, before_ = 0, inside_ = 0;
};

}  // namespace detail

/// Products of double by OpenBLAS, with at most `threads` threads each. `problem` must have been checked, and have no
/// size of zero.
inline void openblas_gemm(int threads, const gemm_problem& problem, double alpha, const double* a, const double* b,
                          double beta, double* c) {
  const auto narrow = [&](std::int64_t value) {
    if (value > std::numeric_limits<blasint>::max())
      fail({problem.text(), ": a size exceeds what this OpenBLAS takes"});
    return static_cast<blasint>(value);
  };
  const detail::openblas_threads inside(threads);
  cblas_dgemm(CblasRowMajor, problem.trans_a ? CblasTrans : CblasNoTrans, problem.trans_b ? CblasTrans : CblasNoTrans,
              narrow(problem.m), narrow(problem.n), narrow(problem.k), alpha, a, narrow(problem.lda), b,
              narrow(problem.ldb), beta, c, narrow(problem.ldc));
}

}  // namespace plait

#ifndef PLAIT_COMPILED
#if __has_include(<omp.h>)
#include <omp.h>
#else
extern "C" {  // for compilers without OpenMP's header; oneDNN's runtime has them
void omp_set_num_threads(int);
int omp_get_max_threads();
}
#endif

// oneDNN's C interface: its C++ wrapper costs every translation unit over half a second of compile time.
#include <oneapi/dnnl/dnnl.h>
#include <oneapi/dnnl/dnnl_debug.h>

namespace plait {

namespace detail {

/// Sets OpenMP's number of threads for the calling thread while it lives. The program's own number returns afterwards.
class openmp_threads {
 public:
  explicit openmp_threads(int threads) : before_(omp_get_max_threads()), changed_(before_ != threads) {
    if (changed_) omp_set_num_threads(threads);
  }
  ~openmp_threads() {
    if (changed_) omp_set_num_threads(before_);
  }
  openmp_threads(const openmp_threads&) = delete;
  openmp_threads& operator=(const openmp_threads&) = delete;

 private:
  int before_;
  bool changed_;
};

template <auto Destroy>
struct onednn_destroy {
  template <class Object>
  void operator()(Object* object) const {
    Destroy(object);
  }
};
/// Owns one oneDNN object.
template <class Object, auto Destroy>
using onednn_owner = std::unique_ptr<Object, onednn_destroy<Destroy>>;

using onednn_engine = onednn_owner<dnnl_engine, dnnl_engine_destroy>;
using onednn_stream = onednn_owner<dnnl_stream, dnnl_stream_destroy>;
using onednn_memory = onednn_owner<dnnl_memory, dnnl_memory_destroy>;
using onednn_primitive = onednn_owner<dnnl_primitive, dnnl_primitive_destroy>;
using onednn_primitive_desc = onednn_owner<dnnl_primitive_desc, dnnl_primitive_desc_destroy>;
using onednn_attributes = onednn_owner<dnnl_primitive_attr, dnnl_primitive_attr_destroy>;
using onednn_post_ops = onednn_owner<dnnl_post_ops, dnnl_post_ops_destroy>;

/// Throws `plait::error`, "`what`: could not `act` (oneDNN's word for the reason)", unless `status` is success.
PLAIT_INLINE void onednn_check(dnnl_status_t status, const std::string& what, const char* act) {
  if (status != dnnl_success) fail({what, ": could not ", act, " (", dnnl_status2str(status), ")"});
}

/// The memory layout of a matrix, as oneDNN describes it: a value in its version 2, an object in version 3.
class onednn_matrix {
 public:
  /// `refused` is the start of error texts.
  onednn_matrix(const std::string& refused, std::int64_t rows, std::int64_t columns, dnnl_data_type_t type,
                std::int64_t row_stride, std::int64_t column_stride) {
    const dnnl_dims_t sizes = {rows, columns}, strides = {row_stride, column_stride};
    const char* const act = "describe a matrix";
#if DNNL_VERSION_MAJOR >= 3
    dnnl_memory_desc_t made = nullptr;
    onednn_check(dnnl_memory_desc_create_with_strides(&made, 2, sizes, type, strides), refused, act);
    held_.reset(made);
#else
    onednn_check(dnnl_memory_desc_init_by_strides(&held_, 2, sizes, type, strides), refused, act);
#endif
  }

#if DNNL_VERSION_MAJOR >= 3
  const_dnnl_memory_desc_t get() const { return held_.get(); }

 private:
  onednn_owner<dnnl_memory_desc, dnnl_memory_desc_destroy> held_;
#else
  const dnnl_memory_desc_t* get() const { return &held_; }

 private:
  dnnl_memory_desc_t held_;
#endif
};

}  // namespace detail

/// The compiled primitives of one thread, with their stream and engine. The engine is kept here because two libraries
/// with hidden symbols have two of each static object, and a product's engine must be its stream's.
class onednn_gemm::primitives {
 public:
  primitives() {
    dnnl_engine_t engine = nullptr;
    detail::onednn_check(dnnl_engine_create(&engine, dnnl_cpu, 0), "oneDNN", "create an engine of the processor");
    engine_.reset(engine);
    dnnl_stream_t stream = nullptr;
    detail::onednn_check(dnnl_stream_create(&stream, engine, dnnl_stream_default_flags), "oneDNN", "create a stream");
    stream_.reset(stream);
  }

  /// `in` is the type of a and b, `out` the type of c.
  void run(const gemm_problem& problem, float alpha, const void* a, const void* b, dtype in, float beta, void* c,
           dtype out) {
    const entry_key key{problem, alpha, beta, in, out};
    auto found = entries_.find(key);
    if (found == entries_.end()) {
      if (entries_.size() >= max_entries) entries_.clear();
      found = entries_.emplace(key, make_entry(key)).first;
    }
    entry& e = found->second;
    const dnnl_exec_arg_t args[] = {
        {DNNL_ARG_SRC, e.a.get()}, {DNNL_ARG_WEIGHTS, e.b.get()}, {DNNL_ARG_DST, e.c.get()}};
    // oneDNN has one memory type for inputs and outputs, without const.
    if (dnnl_memory_set_data_handle(e.a.get(), const_cast<void*>(a)) != dnnl_success ||
        dnnl_memory_set_data_handle(e.b.get(), const_cast<void*>(b)) != dnnl_success ||
        dnnl_memory_set_data_handle(e.c.get(), c) != dnnl_success ||
        dnnl_primitive_execute(e.primitive.get(), stream_.get(), 3, args) != dnnl_success) {
      fail({problem.text(), ": oneDNN could not execute this product"});
    }
  }

  std::vector<float> scratch;  ///< for `widened_product`

 private:
  static constexpr std::size_t max_entries = 4096;

  struct entry_key {
    gemm_problem problem;
    float alpha;
    float beta;
    dtype in, out;
    bool operator==(const entry_key&) const = default;
  };
  struct entry_hash {
    std::size_t operator()(const entry_key& key) const {
      const std::uint64_t h = detail::mixed(
          key.problem.hash(), static_cast<std::uint64_t>(key.in) * 8 + static_cast<std::uint64_t>(key.out));
      return static_cast<std::size_t>(detail::mixed(
          h, std::uint64_t{std::bit_cast<std::uint32_t>(key.alpha)} << 32 | std::bit_cast<std::uint32_t>(key.beta)));
    }
  };
  struct entry {
    detail::onednn_primitive primitive;
    detail::onednn_memory a, b, c;
  };

  /// Only one thread at a time runs this: oneDNN shares compiled primitives between threads, and thread sanitizer
  /// cannot follow how.
  entry make_entry(const entry_key& key) const {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    const gemm_problem& p = key.problem;
    const std::string refused = p.text() + ": oneDNN refuses this product";
    const auto type_of = [](dtype type) { return type == dtype::bf16 ? dnnl_bf16 : dnnl_f32; };
    const auto matrix = [&](std::int64_t rows, std::int64_t columns, dnnl_data_type_t type, bool transposed,
                            std::int64_t ld) {
      return detail::onednn_matrix(refused, rows, columns, type, transposed ? 1 : ld, transposed ? ld : 1);
    };
    const detail::onednn_matrix a = matrix(p.m, p.k, type_of(key.in), p.trans_a, p.lda);
    const detail::onednn_matrix b = matrix(p.k, p.n, type_of(key.in), p.trans_b, p.ldb);
    const detail::onednn_matrix c = matrix(p.m, p.n, type_of(key.out), false, p.ldc);

    dnnl_primitive_t made = nullptr;
    const detail::onednn_primitive_desc description =
        describe(refused, a, b, c, attributes(refused, key.alpha, key.beta, key.in));
    detail::onednn_check(dnnl_primitive_create(&made, description.get()), refused, "create a matmul primitive");
    detail::onednn_primitive primitive(made);
    const auto memory = [&](const detail::onednn_matrix& shape) {
      dnnl_memory_t created = nullptr;
      detail::onednn_check(dnnl_memory_create(&created, shape.get(), engine_.get(), DNNL_MEMORY_NONE), refused,
                           "create a memory object");
      return detail::onednn_memory(created);
    };
    return {std::move(primitive), memory(a), memory(b), memory(c)};
  }

  /// Post-ops that turn C = A B into C = alpha * A B + beta * C, or, for bf16, alpha * (A B + beta / alpha * C). For a
  /// bf16 scale before the sum, oneDNN has only its slow reference implementation.
  static detail::onednn_attributes attributes(const std::string& refused, float alpha, float beta, dtype in) {
    const auto check = [&](dnnl_status_t status) { detail::onednn_check(status, refused, "set alpha and beta"); };
    dnnl_post_ops_t made = nullptr;
    check(dnnl_post_ops_create(&made));
    const detail::onednn_post_ops post(made);
    const auto add_scale = [&] {
#if DNNL_VERSION_MAJOR >= 3
      if (alpha != 1.0f) check(dnnl_post_ops_append_eltwise(made, dnnl_eltwise_linear, alpha, 0.0f));
#else
      if (alpha != 1.0f) check(dnnl_post_ops_append_eltwise(made, 1.0f, dnnl_eltwise_linear, alpha, 0.0f));
#endif
    };
    const auto add_sum = [&](float factor) {
#if DNNL_VERSION_MAJOR >= 3
      if (factor != 0.0f) check(dnnl_post_ops_append_sum(made, factor, 0, dnnl_data_type_undef));
#else
      if (factor != 0.0f) check(dnnl_post_ops_append_sum(made, factor));
#endif
    };
    if (in == dtype::bf16 && alpha != 0.0f) {
      add_sum(beta / alpha);
      add_scale();
    } else {
      add_scale();
      add_sum(beta);
    }
    dnnl_primitive_attr_t created = nullptr;
    check(dnnl_primitive_attr_create(&created));
    detail::onednn_attributes with(created);
    check(dnnl_primitive_attr_set_post_ops(created, made));  // oneDNN copies them
    return with;
  }

  detail::onednn_primitive_desc describe(const std::string& refused, const detail::onednn_matrix& a,
                                         const detail::onednn_matrix& b, const detail::onednn_matrix& c,
                                         const detail::onednn_attributes& with) const {
    const char* const act = "create a descriptor for a matmul primitive";
    dnnl_primitive_desc_t made = nullptr;
#if DNNL_VERSION_MAJOR >= 3
    detail::onednn_check(
        dnnl_matmul_primitive_desc_create(&made, engine_.get(), a.get(), b.get(), nullptr, c.get(), with.get()),
        refused, act);
#else
    dnnl_matmul_desc_t matmul;
    detail::onednn_check(dnnl_matmul_desc_init(&matmul, a.get(), b.get(), nullptr, c.get()), refused, act);
    detail::onednn_check(dnnl_primitive_desc_create(&made, &matmul, with.get(), engine_.get(), nullptr), refused, act);
#endif
    return detail::onednn_primitive_desc(made);
  }

  detail::onednn_engine engine_;
  detail::onednn_stream stream_;
  std::unordered_map<entry_key, entry, entry_hash> entries_;
};

PLAIT_INLINE onednn_gemm::onednn_gemm(int threads) : primitives_(std::make_unique<primitives>()), threads_(threads) {}
PLAIT_INLINE onednn_gemm::~onednn_gemm() = default;

PLAIT_INLINE void onednn_gemm::run(const gemm_problem& problem, float alpha, const float* a, const float* b, float beta,
                                   float* c) {
  const detail::openmp_threads inside(threads_);
  primitives_->run(problem, alpha, a, b, dtype::f32, beta, c, dtype::f32);
}

/// oneDNN emulates bf16 on some processors without it, and refuses it on others.
template <class Out>
void onednn_gemm::run_bf16(const gemm_problem& problem, float alpha, const bf16* a, const bf16* b, float beta, Out* c) {
  if (supports_bf16()) {
    const detail::openmp_threads inside(threads_);
    primitives_->run(problem, alpha, a, b, dtype::bf16, beta, c, dtype_of<Out>);
  } else {
    widened_product(*this, primitives_->scratch, problem, alpha, a, b, beta, c);
  }
}
PLAIT_INLINE void onednn_gemm::run(const gemm_problem& problem, float alpha, const bf16* a, const bf16* b, float beta,
                                   float* c) {
  run_bf16(problem, alpha, a, b, beta, c);
}
PLAIT_INLINE void onednn_gemm::run(const gemm_problem& problem, float alpha, const bf16* a, const bf16* b, float beta,
                                   bf16* c) {
  run_bf16(problem, alpha, a, b, beta, c);
}

namespace detail {
/// Whether oneDNN uses these instructions; DNNL_MAX_CPU_ISA may forbid them.
inline bool onednn_uses(dnnl_cpu_isa_t instructions) {
  return (static_cast<int>(dnnl_get_effective_cpu_isa()) & static_cast<int>(instructions)) ==
         static_cast<int>(instructions);
}
}  // namespace detail

PLAIT_INLINE bool onednn_gemm::supports_bf16() {
  static const bool supported = detail::onednn_uses(dnnl_cpu_isa_avx512_core_bf16);
  return supported;
}
PLAIT_INLINE bool onednn_gemm::adds_in_order(dtype numbers) {
  static const bool vectors = detail::onednn_uses(dnnl_cpu_isa_avx512_core),
                    tiles = detail::onednn_uses(dnnl_cpu_isa_avx512_core_amx);
  return vectors && !(tiles && numbers == dtype::bf16);
}

}  // namespace plait
#endif

#include "plait/core/macros_on.hpp"
