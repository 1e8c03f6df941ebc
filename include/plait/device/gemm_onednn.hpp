#pragma once

#if __has_include(<omp.h>)
#include <omp.h>
#else
extern "C" void omp_set_num_threads(int);  // a compiler without OpenMP's header still links oneDNN's runtime
#endif

#include <bit>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>

#include "plait/device/gemm_problem.hpp"

namespace plait {

/// Float products, and bf16 products with float results, by oneDNN's matmul. Compiled primitives are kept by problem: a
/// new shape costs 0.1 to 0.3 ms, a known one a hash lookup. Splitting m or n does not change a bit of the result.
/// Belongs to one thread.
class onednn_gemm {
 public:
  onednn_gemm() : engine_(process_engine()), stream_(engine_) {}

  /// `problem` has been checked and has no size of zero. `In` is float or bf16.
  template <class In>
  void run(const gemm_problem& problem, float alpha, const In* a, const In* b, float beta, float* c) {
    const entry_key key{problem, alpha, beta, dtype_of<In>};
    auto found = entries_.find(key);
    if (found == entries_.end()) {
      if (entries_.size() >= max_entries) entries_.clear();
      found = entries_.emplace(key, make_entry(key)).first;
    }
    entry& e = found->second;
    e.a.set_data_handle(const_cast<In*>(a));  // oneDNN has one memory type for inputs and outputs
    e.b.set_data_handle(const_cast<In*>(b));
    e.c.set_data_handle(c);
    const dnnl_exec_arg_t args[] = {
        {DNNL_ARG_SRC, e.a.get()}, {DNNL_ARG_WEIGHTS, e.b.get()}, {DNNL_ARG_DST, e.c.get()}};
    if (dnnl_primitive_execute(e.primitive.get(), stream_.get(), 3, args) != dnnl_success) {
      fail(problem.text() + ": oneDNN could not execute this product");
    }
  }

  std::size_t cached_primitives() const { return entries_.size(); }

  /// Whether this processor multiplies bf16 in hardware.
  static bool supports_bf16() {
    const auto isa = static_cast<int>(dnnl::get_effective_cpu_isa());
    const auto bf16_isa = static_cast<int>(dnnl::cpu_isa::avx512_core_bf16);
    return (isa & bf16_isa) == bf16_isa;
  }

  /// Threads that products started by the calling thread use.
  static void set_threads(int threads) { omp_set_num_threads(threads); }

 private:
  static constexpr std::size_t max_entries = 4096;

  struct entry_key {
    gemm_problem problem;
    float alpha;
    float beta;
    dtype type;
    bool operator==(const entry_key&) const = default;
  };
  struct entry_hash {
    std::size_t operator()(const entry_key& key) const {
      const gemm_problem& p = key.problem;
      std::uint64_t h = (static_cast<std::uint64_t>(key.type) << 2) + (p.trans_a ? 2u : 0u) + (p.trans_b ? 1u : 0u);
      const auto mix = [&h](std::uint64_t word) {  // multiply-rotate, odd constant from the golden ratio
        h = std::rotl((h ^ word) * 0x9E3779B97F4A7C15ull, 29);
      };
      mix(static_cast<std::uint64_t>(p.m));
      mix(static_cast<std::uint64_t>(p.n));
      mix(static_cast<std::uint64_t>(p.k));
      mix(static_cast<std::uint64_t>(p.lda));
      mix(static_cast<std::uint64_t>(p.ldb));
      mix(static_cast<std::uint64_t>(p.ldc));
      mix((std::uint64_t{std::bit_cast<std::uint32_t>(key.alpha)} << 32) | std::bit_cast<std::uint32_t>(key.beta));
      return static_cast<std::size_t>(h);
    }
  };
  struct entry {
    dnnl::matmul primitive;
    dnnl::memory a, b, c;
  };

  static const dnnl::engine& process_engine() {
    static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    return engine;
  }

  /// One thread at a time: oneDNN shares compiled primitives between threads, in a way that thread sanitizer cannot
  /// follow.
  entry make_entry(const entry_key& key) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    using dnnl::memory;
    const gemm_problem& p = key.problem;
    const auto in_type = key.type == dtype::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
    const auto strides = [](bool transposed, std::int64_t ld) {
      return transposed ? memory::dims{1, ld} : memory::dims{ld, 1};
    };
    try {
      const memory::desc a({p.m, p.k}, in_type, strides(p.trans_a, p.lda));
      const memory::desc b({p.k, p.n}, in_type, strides(p.trans_b, p.ldb));
      const memory::desc c({p.m, p.n}, memory::data_type::f32, strides(false, p.ldc));
      dnnl::post_ops post;
#if DNNL_VERSION_MAJOR >= 3
      if (key.alpha != 1.0f) post.append_eltwise(dnnl::algorithm::eltwise_linear, key.alpha, 0.0f);
#else
      if (key.alpha != 1.0f) post.append_eltwise(1.0f, dnnl::algorithm::eltwise_linear, key.alpha, 0.0f);
#endif
      if (key.beta != 0.0f) post.append_sum(key.beta);
      dnnl::primitive_attr attributes;
      attributes.set_post_ops(post);
#if DNNL_VERSION_MAJOR >= 3
      const dnnl::matmul::primitive_desc description(engine_, a, b, c, attributes);
#else
      const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(a, b, c), attributes, engine_);
#endif
      return {dnnl::matmul(description), memory(a, engine_, nullptr), memory(b, engine_, nullptr),
              memory(c, engine_, nullptr)};
    } catch (const dnnl::error& e) {
      fail(p.text() + ": oneDNN refuses this product: " + e.what());
    }
  }

  dnnl::engine engine_;
  dnnl::stream stream_;
  std::unordered_map<entry_key, entry, entry_hash> entries_;
};

}  // namespace plait
