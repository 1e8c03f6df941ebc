// Matrix products on a GPU by cuBLASLt, with a bias, an addend or row sums of a factor in one pass. Only this header
// includes <cublasLt.h>. Callers use `gemm` of device/cuda.hpp, which checks the problem first.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "plait/core/macros_off.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/device/gemm_problem.hpp"
#include "plait/device/product_choices.hpp"

namespace plait::detail {

// Times a product on a GPU; it writes to scratch memory in place of its output. Test: tests/cuda/device/products.cpp.

/// Scratch memory of CUDA's default pool and two events, for products in one stream. If an exception interrupts a
/// measurement, the memory is released in the order of the stream.
class product_timer {
 public:
  product_timer(std::size_t bytes, cudaStream_t stream) : stream_(stream) {
    const cudaError_t status = cudaMallocAsync(&scratch_, bytes, stream);
    if (status == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      scratch_ = nullptr;
      return;
    }
    cuda_check(status, "allocating scratch memory for a product");
  }
  product_timer(const product_timer&) = delete;
  product_timer& operator=(const product_timer&) = delete;
  ~product_timer() {
    if (scratch_ != nullptr) cudaFreeAsync(scratch_, stream_);
  }

  /// Returns whether the scratch memory could be allocated.
  bool has_room() const { return scratch_ != nullptr; }

  /// Returns the shortest of three runs, after one run that loads the kernel. `start(scratch)` puts the product into
  /// the stream.
  template <class Start>
  double microseconds_of(const Start& start) const {
    float best = 0;
    for (int turn = 0; turn < 4; ++turn) {
      cuda_check(cudaEventRecord(begin_.get(), stream_), "recording an event");
      start(scratch_);
      cuda_check(cudaEventRecord(end_.get(), stream_), "recording an event");
      cuda_check(cudaEventSynchronize(end_.get()), "waiting for an event");
      float milliseconds = 0;
      cuda_check(cudaEventElapsedTime(&milliseconds, begin_.get(), end_.get()), "timing a product");
      if (turn > 0) best = turn == 1 ? milliseconds : std::min(best, milliseconds);
    }
    return 1e3 * static_cast<double>(best);
  }

 private:
  cudaStream_t stream_;
  void* scratch_ = nullptr;
  owned_event begin_ = make_event(cudaEventDefault), end_ = make_event(cudaEventDefault);
};

}  // namespace plait::detail

namespace plait {
namespace detail {

inline void cublas_check(cublasStatus_t status, const gemm_problem& problem, const char* doing) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const char* const text = cublasLtGetStatusString(status);
  fail({problem.text(), ": cuBLASLt: ", doing, ": ", text != nullptr ? text : std::to_string(status)});
}

}  // namespace detail

/// Additional work of a product when it writes C. `bias` [n], on a 16-byte boundary, is added to every row. `addend`
/// [m, n] replaces C as an input, without a copy: C = product + beta * addend. Null: unused.
template <class C>
struct gemm_epilogue {
  const C* bias = nullptr;
  const C* addend = nullptr;
};

/// Row-major products by cuBLASLt. It is column-major, so it computes the transposed product with exchanged factors,
/// which costs no copy. Descriptors and algorithms are cached by problem: a new problem costs tens of microseconds on
/// the host, a known one a hash lookup. The algorithm is the first that its heuristic proposes, or the one of `adopt`.
/// Only one thread may use it.
class cublaslt_gemm {
 public:
  cublaslt_gemm() {
    const cublasStatus_t status = cublasLtCreate(&handle_);
    if (status != CUBLAS_STATUS_SUCCESS) detail::cublas_check(status, {}, "creating a handle");
  }
  cublaslt_gemm(const cublaslt_gemm&) = delete;
  cublaslt_gemm& operator=(const cublaslt_gemm&) = delete;
  ~cublaslt_gemm() {
    entries_.clear();
    cublasLtDestroy(handle_);
  }

  /// `problem` must have been checked, and have no size of zero. In, Out: (float, float), (double, double), (bf16,
  /// bf16) or (bf16, float); sums are in float or double. `workspace` is device memory that only this stream's products
  /// use.
  ///
  /// `row_sums` [m], if not null, is overwritten with the sums of op(A)'s rows, and no bias is possible. Returns false
  /// and computes nothing if cuBLASLt has no algorithm that also computes them.
  template <class In, class Out>
  bool run(const gemm_problem& problem, double alpha, const In* a, const In* b, double beta, Out* c,
           const gemm_epilogue<Out>& epilogue, Out* row_sums, bool tf32, void* workspace, std::size_t workspace_bytes,
           cudaStream_t stream) {
    static_assert(std::is_same_v<In, Out> || (std::is_same_v<In, bf16> && std::is_same_v<Out, float>));
    const Out* const read = epilogue.addend != nullptr ? epilogue.addend : c;
    const key k{problem,
                dtype_of<In>,
                dtype_of<Out>,
                tf32 && std::is_same_v<In, float>,
                beta != 0,
                row_sums != nullptr        ? vector_use::row_sums
                : epilogue.bias != nullptr ? vector_use::bias
                                           : vector_use::nothing,
                {alignment(a), alignment(b), alignment(read), alignment(c)},
                workspace_bytes};
    auto found = entries_.find(k);
    const bool is_new = found == entries_.end();
    if (is_new) {
      if (entries_.size() >= max_entries) entries_.clear();
      found = entries_.emplace(k, make_entry(k)).first;
    }
    entry& e = found->second;
    if (!e.exists) return false;
    if (k.also != vector_use::nothing) {
      const void* const vector = row_sums != nullptr ? row_sums : epilogue.bias;
      set(e.operation.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector, problem);
    }
    using scalar = std::conditional_t<std::is_same_v<In, double>, double, float>;
    const scalar factor = static_cast<scalar>(alpha), keep = static_cast<scalar>(beta);
    const auto multiply = [&](const cublasLtMatmulAlgo_t& algorithm, Out* to) {
      return cublasLtMatmul(handle_, e.operation.get(), &factor, b, e.b.get(), a, e.a.get(), &keep, read, e.c.get(), to,
                            e.c.get(), &algorithm, workspace, workspace_bytes, stream);
    };
    if (is_new && candidates_ > 1 && choices_.find(text_of(k)) == nullptr) measure_new<Out>(k, e, multiply, stream);
    detail::cublas_check(multiply(e.algorithm, c), problem, "starting the product");
    return true;
  }

  /// Makes one algorithm compute all later products with equal number of terms, types and transpositions, for all other
  /// sizes. The algorithm splits no sum; a product that it cannot compute is refused. Splitting rows or columns then
  /// changes no bit, because tiles of one size add the terms of each sum in one order.
  void pin() {
    pins_ = true;
    entries_.clear();
  }

  /// Makes each later new problem time this number of proposed algorithms, three times each, into scratch memory of the
  /// size of C. Without scratch memory, or during capture, the problem is skipped, and `choices().unmeasured()` lists
  /// it. Results still come from the first algorithm, so that all ranks compute equal bits; `adopt` uses the measured
  /// choices.
  void measure(int candidates) {
    if (candidates < 1 || candidates > most_candidates)
      fail({"products: ", candidates, " candidates, must be 1 (nothing is measured) to ", most_candidates});
    if (candidates > 1 && pins_) refuse_choices();
    candidates_ = candidates;
    entries_.clear();
  }
  /// Returns the measured or adopted choices.
  const product_choices& choices() {
    if (choices_.machine().empty()) choices_ = product_choices(machine());
    return choices_;
  }
  /// Uses these algorithms for later products; products without a choice use the first proposal. Throws if the choices
  /// were measured on another GPU model, or with another version of the library.
  void adopt(const product_choices& all) {
    if (pins_ && all.size() != 0) refuse_choices();
    product_choices checked(machine());
    checked.merge(all);
    adopted_ = choices_ = std::move(checked);
    candidates_ = 1;
    entries_.clear();
  }

 private:
  static constexpr int most_candidates = 64;

  [[noreturn]] static void refuse_choices() {
    fail(
        "products: cuda::options::deterministic has one algorithm for each kind of product, so none can be measured or "
        "chosen; measure 1 candidate (nothing), or leave deterministic off");
  }

  /// Returns the GPU model and the library's version. The order of proposals depends on both.
  static std::string machine() {
    int device = 0;
    cudaDeviceProp properties{};
    detail::cuda_check(cudaGetDevice(&device), "asking for the GPU");
    detail::cuda_check(cudaGetDeviceProperties(&properties, device), "asking for the GPU");
    return cat({properties.name, ", cuBLASLt ", cublasLtGetVersion()});
  }

  static constexpr std::size_t max_entries = 4096;

  /// How a product uses a vector, its third input besides the factors. Texts of choices contain the number.
  enum class vector_use : std::uint8_t { nothing = 0, bias = 1, row_sums = 2 };

  struct key {
    gemm_problem problem;
    dtype in, out;
    bool tf32, accumulates;
    vector_use also;
    std::uint16_t aligned[4];
    std::size_t workspace;
    bool operator==(const key&) const = default;
  };
  struct key_hash {
    std::size_t operator()(const key& k) const {
      std::uint64_t h = detail::mixed(k.problem.hash(), static_cast<std::uint64_t>(k.also) * 512 +
                                                            static_cast<std::uint64_t>(k.in) * 64 +
                                                            static_cast<std::uint64_t>(k.out) * 8 + k.accumulates);
      for (const std::uint16_t word : k.aligned) h = detail::mixed(h, word);
      return static_cast<std::size_t>(h);
    }
  };

  static std::string text_of(const key& k) {
    const gemm_problem& p = k.problem;
    std::string text = cat({name_of(k.in), " ", name_of(k.out), " ", int{p.trans_a}, int{p.trans_b}});
    for (const std::int64_t n : {p.m, p.n, p.k, p.lda, p.ldb, p.ldc}) append(text, {" ", n});
    append(text, {" ", int{k.tf32}, int{k.accumulates}, static_cast<int>(k.also), " ", k.workspace});
    for (const std::uint16_t bytes : k.aligned) append(text, {" ", int{bytes}});
    return text;
  }

  template <class Descriptor, cublasStatus_t (*Destroy)(Descriptor)>
  struct destroyer {
    void operator()(std::remove_pointer_t<Descriptor>* d) const { Destroy(d); }
  };
  template <class Descriptor, cublasStatus_t (*Destroy)(Descriptor)>
  using owned = std::unique_ptr<std::remove_pointer_t<Descriptor>, destroyer<Descriptor, Destroy>>;
  using owned_layout = owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;

  struct entry {
    owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy> operation;
    owned_layout a, b, c;
    cublasLtMatmulAlgo_t algorithm;
    bool exists;  ///< false: no algorithm also computes the row sums
  };

  /// The largest power of two up to 256 that divides an address: heuristics may use it, so it is part of the key.
  static std::uint16_t alignment(const void* pointer) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer) | 256u;
    return static_cast<std::uint16_t>(address & (~address + 1));
  }

  template <class Value>
  static void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const Value& value,
                  const gemm_problem& p) {
    detail::cublas_check(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value), p,
                         "describing the product");
  }

  /// The layout of a stored row-major matrix of `rows` rows, which are columns for cuBLASLt.
  static owned_layout make_layout(cudaDataType_t type, std::int64_t rows, std::int64_t columns, std::int64_t ld,
                                  const gemm_problem& p) {
    cublasLtMatrixLayout_t layout = nullptr;
    detail::cublas_check(cublasLtMatrixLayoutCreate(&layout, type, static_cast<std::uint64_t>(columns),
                                                    static_cast<std::uint64_t>(rows), ld),
                         p, "describing a matrix");
    return owned_layout(layout);
  }

  /// Describes a problem, without an algorithm.
  entry describe(const key& k) const {
    const gemm_problem& p = k.problem;
    const bool is_double = k.in == dtype::f64;
    const auto type_of = [](dtype type) {
      return type == dtype::f64 ? CUDA_R_64F : type == dtype::bf16 ? CUDA_R_16BF : CUDA_R_32F;
    };
    const cublasComputeType_t compute = is_double ? CUBLAS_COMPUTE_64F
                                        : k.tf32  ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                  : CUBLAS_COMPUTE_32F;
    entry e{};
    cublasLtMatmulDesc_t operation = nullptr;
    detail::cublas_check(cublasLtMatmulDescCreate(&operation, compute, is_double ? CUDA_R_64F : CUDA_R_32F), p,
                         "describing the product");
    e.operation.reset(operation);
    set(operation, CUBLASLT_MATMUL_DESC_TRANSA, p.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, p);
    set(operation, CUBLASLT_MATMUL_DESC_TRANSB, p.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, p);
    if (k.also == vector_use::bias) set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS, p);
    if (k.also == vector_use::row_sums)  // cuBLASLt's B is our a
      set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BGRADB, p);
    e.a = make_layout(type_of(k.in), p.trans_a ? p.k : p.m, p.trans_a ? p.m : p.k, p.lda, p);
    e.b = make_layout(type_of(k.in), p.trans_b ? p.n : p.k, p.trans_b ? p.k : p.n, p.ldb, p);
    e.c = make_layout(type_of(k.out), p.m, p.n, p.ldc, p);
    return e;
  }
  entry make_entry(const key& k) {
    const gemm_problem& p = k.problem;
    entry e = describe(k);
    if (pins_) {
      pin(e, k);
      return e;
    }
    const product_choices::choice* const chosen = adopted_.size() == 0 ? nullptr : adopted_.find(text_of(k));
    const int at = chosen == nullptr ? 0 : chosen->candidate;
    const proposals found = proposed(e, k, at + 1);
    e.exists = found.count > 0;
    if (!e.exists) return e;
    if (found.count <= at)
      fail({p.text(), ": the choice is candidate ", at, ", but cuBLASLt has ", found.count,
            " here; measure the products anew"});
    e.algorithm = found.algorithm(at);
    return e;
  }

  /// Sets the entry's algorithm, from data that no layout splits. It takes the heuristic's proposals for a square of
  /// 512 with as many terms. It uses the first one that also computes narrow, short and long products.
  void pin(entry& e, const key& k) {
    const gemm_problem& p = k.problem;
    e.exists = k.also != vector_use::row_sums;
    if (!e.exists) return;
    const auto refuse = [&](const char* why) {
      fail({p.text(), ": cuda::options::deterministic has one algorithm for products of ", p.k, " terms, ", why});
    };
    if (*std::min_element(std::begin(k.aligned), std::end(k.aligned)) < 16)
      refuse("which needs parts of matrices that begin at multiples of 16 bytes");
    auto found = pinned_.find(kind_of(k));
    if (found == pinned_.end()) {
      const key like = of_size(k, 512, 512);
      const entry square = describe(like);
      const proposals all = proposed(square, like, most_candidates);
      const auto* const best = std::find_if(all.results.data(), all.results.data() + all.count,
                                            [&](const auto& result) { return computes_all_sizes(result.algo, k); });
      if (best == all.results.data() + all.count) refuse("and none of cuBLASLt's computes every size");
      found = pinned_.emplace(kind_of(k), best->algo).first;
    }
    if (!computes(found->second, e)) refuse("which cannot compute this one");
    e.algorithm = found->second;
  }
  /// Returns a key like `k` for m rows and n columns, without gaps and workspace.
  static key of_size(key k, std::int64_t m, std::int64_t n) {
    gemm_problem& p = k.problem;
    p.m = m, p.n = n, p.lda = p.trans_a ? m : p.k, p.ldb = p.trans_b ? p.k : n, p.ldc = n;
    k.workspace = 0;
    for (std::uint16_t& bytes : k.aligned) bytes = 16;
    return k;
  }
  bool computes(const cublasLtMatmulAlgo_t& algorithm, const entry& e) const {
    cublasLtMatmulHeuristicResult_t result{};
    return cublasLtMatmulAlgoCheck(handle_, e.operation.get(), e.b.get(), e.a.get(), e.c.get(), e.c.get(), &algorithm,
                                   &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize == 0;
  }
  bool computes_all_sizes(const cublasLtMatmulAlgo_t& algorithm, const key& k) const {
    for (const std::int64_t m : {8, 24, 512, 16384})
      for (const std::int64_t n : {8, 24, 512, 16384})
        if (!computes(algorithm, describe(of_size(k, m, n)))) return false;
    return true;
  }
  static std::string kind_of(const key& k) {
    return cat({name_of(k.in), " ", name_of(k.out), " ", int{k.problem.trans_a}, int{k.problem.trans_b}, int{k.tf32},
                " ", k.problem.k, " ", static_cast<int>(k.also)});
  }

  /// Times the proposals for a new problem; `multiply(algorithm, to)` starts the product. Proposals after the first
  /// that the library turns out not to support are skipped.
  template <class Out, class Multiply>
  void measure_new(const key& k, const entry& e, const Multiply& multiply, cudaStream_t stream) {
    static_cast<void>(choices());
    if (detail::is_captured(stream)) return choices_.leave_out(text_of(k), 0);
    const std::size_t bytes =
        static_cast<std::size_t>(k.problem.m) * static_cast<std::size_t>(k.problem.ldc) * sizeof(Out);
    const detail::product_timer timer(bytes, stream);
    if (!timer.has_room()) return choices_.leave_out(text_of(k), bytes);
    const proposals all = proposed(e, k, candidates_);
    product_choices::choice chosen;
    for (int i = 0; i < all.count; ++i) {
      cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
      const double took = timer.microseconds_of([&](void* scratch) {
        if (status == CUBLAS_STATUS_SUCCESS) status = multiply(all.algorithm(i), static_cast<Out*>(scratch));
      });
      if (i > 0 && (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE)) continue;
      detail::cublas_check(status, k.problem, "timing the product");
      if (i == 0) chosen.first = took;
      if (i == 0 || took < chosen.microseconds) chosen.candidate = i, chosen.microseconds = took;
    }
    choices_.set(text_of(k), chosen);
  }

  /// The proposals of the heuristic, in its order. (nvcc 13.0 fails to compile a vector of them.)
  struct proposals {
    std::array<cublasLtMatmulHeuristicResult_t, most_candidates> results{};
    int count = 0;
    const cublasLtMatmulAlgo_t& algorithm(int i) const { return results[static_cast<std::size_t>(i)].algo; }
  };
  /// Returns at most `most` algorithms that can compute the product. Throws if there is none, unless row sums of a
  /// factor are wanted.
  proposals proposed(const entry& e, const key& k, int most) const {
    const gemm_problem& p = k.problem;
    cublasLtMatmulPreference_t wanted = nullptr;
    detail::cublas_check(cublasLtMatmulPreferenceCreate(&wanted), p, "choosing an algorithm");
    const owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy> owner(wanted);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      detail::cublas_check(cublasLtMatmulPreferenceSetAttribute(wanted, attribute, &value, sizeof value), p,
                           "choosing an algorithm");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{k.workspace});
    // If a sum is split over blocks, its parts are added in the type of the arithmetic, never in the output's bf16.
    std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE;
    if (!pins_) reductions |= CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
    // The factors are exchanged: cuBLASLt's A is our b.
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, std::uint32_t{k.aligned[1]});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, std::uint32_t{k.aligned[0]});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, std::uint32_t{k.aligned[2]});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, std::uint32_t{k.aligned[3]});
    proposals all;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle_, e.operation.get(), e.b.get(), e.a.get(), e.c.get(), e.c.get(), wanted,
                                       std::min(most, most_candidates), all.results.data(), &all.count);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && all.count == 0)) {
      all.count = 0;
      if (k.also == vector_use::row_sums) return all;
      refuse_product(k);
    }
    detail::cublas_check(status, p, "choosing an algorithm");
    // If a result's state is not success, its other members are not valid.
    const auto end = all.results.begin() + all.count;
    const auto valid = std::remove_if(all.results.begin(), end,
                                      [](const auto& result) { return result.state != CUBLAS_STATUS_SUCCESS; });
    if (valid == end) return all;
    if (most < most_candidates) {
      all = proposed(e, k, most_candidates);
      all.count = std::min(all.count, most);
      return all;
    }
    all.count = static_cast<int>(valid - all.results.begin());
    if (all.count == 0 && k.also != vector_use::row_sums) refuse_product(k);
    return all;
  }
  [[noreturn]] static void refuse_product(const key& k) {
    fail({k.problem.text(), ": cuBLASLt has no algorithm for this product of ", name_of(k.in), " to ", name_of(k.out),
          " with ", k.workspace, " bytes of workspace (cuda::options::workspace_bytes)"});
  }

  cublasLtHandle_t handle_ = nullptr;
  int candidates_ = 1;
  bool pins_ = false;
  std::unordered_map<std::string, cublasLtMatmulAlgo_t> pinned_;
  product_choices choices_, adopted_;
  std::unordered_map<key, entry, key_hash> entries_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
