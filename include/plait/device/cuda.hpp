// A GPU as a device: two streams, a pool of memory, products by cuBLASLt, and graphs of its main stream's work. Host
// code may include it. kernels/cuda/kernels.hpp has the kernels, which nvcc compiles; plait/cuda.hpp includes all.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/allocator.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/device/cuda_memory.hpp"
#include "plait/device/device.hpp"
#include "plait/device/gemm_cublas.hpp"
#include "plait/device/gemm_cublaslt.hpp"
#include "plait/io/byte_buffer.hpp"

namespace plait::detail {

// An owner of CUDA streams that plait makes, and a function that waits for a stream in another thread. `cuda::stream`
// is a handle without an owner.

struct stream_destroyer {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};
/// A destroyed stream still runs the operations that it holds.
using owned_stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, stream_destroyer>;

inline owned_stream make_stream(int priority = 0) {
  cudaStream_t made = nullptr;
  cuda_check(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, priority), "making a stream");
  return owned_stream(made);
}
/// Makes a stream of the highest priority on the calling thread's GPU. It is for communication, because work that waits
/// for communication leaves the GPU idle.
inline owned_stream make_urgent_stream() {
  int least = 0, greatest = 0;
  cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for stream priorities");
  return make_stream(greatest);
}

/// Returns a function that waits for the stream's current work, in any thread and without using a core. It selects the
/// device in that thread; otherwise CUDA's calls would allocate memory on the first device.
inline std::function<void()> waiter_for(cudaStream_t stream, int device) {
  const std::shared_ptr<std::remove_pointer_t<cudaEvent_t>> event =
      make_event(cudaEventDisableTiming | cudaEventBlockingSync);
  cuda_check(cudaEventRecord(event.get(), stream), "recording an event");
  return [event, device] {
    cuda_check(cudaSetDevice(device), "choosing the GPU");
    cuda_check(cudaEventSynchronize(event.get()), "waiting for an event");
  };
}

}  // namespace plait::detail

struct __nv_bfloat16;  // NOLINT: of cuda_bf16.h

namespace plait {

class cuda;
namespace kernels {
struct attention_shape;
}

/// The implementation of attention on a GPU. `own`: plait's kernels. `cudnn`: cuDNN; an error if it is absent or does
/// not support the shape. `automatic`: cuDNN for shapes that it supports, otherwise plait's kernels.
enum class attention_backend : std::uint8_t { automatic, own, cudnn };

/// Attention in bf16 by another library; see plait/kernels/cuda/attention_cudnn.hpp. Arrays, strides and lse have the
/// meaning of `kernels::attention_forward` and `attention_backward`; gradients are overwritten.
class attention_library {
 public:
  virtual ~attention_library() = default;

  /// Whether the library supports both directions for this shape. The first call for a shape may take long.
  virtual bool supports(const kernels::attention_shape& shape, dtype type) = 0;
  virtual void forward(cuda& device, const bf16* q, const bf16* k, const bf16* v, bf16* o, float* lse,
                       const kernels::attention_shape& shape) = 0;
  virtual void backward(cuda& device, const bf16* q, const bf16* k, const bf16* v, const bf16* o, const float* lse,
                        const bf16* d_o, bf16* dq, bf16* dk, bf16* dv, const kernels::attention_shape& shape) = 0;

 protected:
  attention_library() = default;
  attention_library(const attention_library&) = default;
  attention_library& operator=(const attention_library&) = default;
};

/// The device owner's choice. The program owns the library, which must outlive its use; null: no library.
struct attention_choice {
  attention_backend backend = attention_backend::automatic;
  attention_library* library = nullptr;
};

/// CUDA's bf16 has plait's format: layers take `__nv_bfloat16*` as `bf16*`, without a cast.
template <>
inline constexpr bool same_bits<__nv_bfloat16, bf16> = true;

/// Converts a pointer to plait's type, for a struct of pointers such as `attention_inputs`, or for a kernel of plait.
inline bf16* from_cuda(__nv_bfloat16* pointer) { return elements_of<bf16>(pointer); }
inline const bf16* from_cuda(const __nv_bfloat16* pointer) { return elements_of<bf16>(pointer); }
/// Converts a pointer to CUDA's type, for a kernel of the program: from `parameter::used_value`, or from a tensor.
inline __nv_bfloat16* to_cuda(bf16* pointer) { return reinterpret_cast<__nv_bfloat16*>(pointer); }
inline const __nv_bfloat16* to_cuda(const bf16* pointer) { return reinterpret_cast<const __nv_bfloat16*>(pointer); }

/// One rank's GPU. All calls but `download` and `synchronize` are asynchronous to the host (`upload` copies its source
/// first). Work is put into streams, and memory is bound to the stream of its allocation. Only its rank's thread may
/// use it. Several ranks may share a GPU, each with its own device object.
///
/// Needs compute capability 8.0 (bf16 tensor cores).
class cuda {
 public:
  struct options {
    int device = 0;     ///< CUDA's index of the GPU
    bool tf32 = false;  ///< float products round factors to 10 bits of mantissa (tensor cores); else full float
    std::size_t workspace_bytes = std::size_t{32} << 20;  ///< for products; cuBLAS recommends 32 MiB for Hopper
    /// A stream of the caller to work on; null: the device makes one.
    cudaStream_t main = nullptr;
    /// Other GPUs of this process that may access this device's memory, as NCCL has them do.
    std::vector<int> peers{};
    /// Whether data that only optimizers use is in pinned host memory, which their kernels access over the bus. It is
    /// AdamW's moments, Muon's momenta, and float masters of narrower weights. Results keep every bit. An update takes
    /// as long as the bus needs for these bytes, in both directions at once: within one kernel, reads, computation and
    /// writes overlap. Prefetching the next bucket's state during an update would hide only the update's own work. That
    /// is a hundredth of the time (16 bytes per element at 25 GB/s, 28 at 3 TB/s), and would need device memory for two
    /// buckets' state.
    bool offload_optimizer = false;
    /// Whether sums in products have one order for all sizes (`cublaslt_gemm::pin`), and attention uses plait's
    /// kernels. Contexts with deterministic sums require it.
    bool deterministic = false;
    /// The program's own allocator of the GPU's memory, with boundaries of 256 bytes, in the order of the stream that
    /// it gets. Empty: a pool of this device object. With its own allocator, the program itself must give `peers`
    /// access. Memory of CUDA's libraries, of NCCL and of `measure_products` does not come from it.
    memory_functions<cudaStream_t> memory{};
  };

  class event;

  /// A non-owning handle of a CUDA stream.
  class stream {
   public:
    stream() = default;
    explicit stream(cudaStream_t handle) : handle_(handle) {}
    cudaStream_t handle() const { return handle_; }
    void synchronize() const { detail::cuda_check(cudaStreamSynchronize(handle_), "waiting for a stream"); }
    /// Makes all later work in this stream wait for the event.
    void wait(const event& e) const;
    bool operator==(const stream&) const = default;

   private:
    cudaStream_t handle_ = nullptr;
  };

  /// A point in a stream, without a time.
  class event {
   public:
    void record(stream s) { detail::cuda_check(cudaEventRecord(handle(), s.handle()), "recording an event"); }
    void synchronize() const { detail::cuda_check(cudaEventSynchronize(handle()), "waiting for an event"); }
    bool done() const {
      const detail::relaxed_capture relaxed;
      const cudaError_t status = cudaEventQuery(handle());
      if (status == cudaErrorNotReady) {
        static_cast<void>(cudaGetLastError());
        return false;
      }
      detail::cuda_check(status, "asking for an event");
      return true;
    }
    cudaEvent_t handle() const { return handle_.get(); }

   private:
    detail::owned_event handle_ = detail::make_event();
  };

  cuda() : cuda(options{}) {}
  /// Throws `plait::error` if the device does not exist or is too old.
  explicit cuda(options settings)
      : options_(std::move(settings)),
        name_(select(options_.device)),
        pool_(options_.device, options_.peers, options_.memory),
        allocator_(pool_) {
    if (options_.main == nullptr) own_main_ = detail::make_stream();
    main_ = stream(options_.main == nullptr ? own_main_.get() : options_.main);
    own_side_ = detail::make_urgent_stream();
    side_ = stream(own_side_.get());
    own_copies_ = detail::make_stream();
    copies_ = stream(own_copies_.get());
    workspace_ = allocate(options_.workspace_bytes);
    faults_ = static_cast<device_fault*>(allocate(sizeof(device_fault)));
    zero(faults_, sizeof(device_fault), main_);
    own_bytes_ = allocator_.bytes_in_use();
    if (!options_.deterministic) return;
    gemm_.pin();
    attention_.backend = attention_backend::own;
  }
  cuda(const cuda&) = delete;
  cuda& operator=(const cuda&) = delete;
  ~cuda() {
    cudaSetDevice(options_.device);
    allocator_.release(workspace_, key(main_));
    allocator_.release(faults_, key(main_));
    for (void* const memory : own_) allocator_.release(memory, key(main_));
    for (const stream& s : {side_, copies_}) cudaStreamSynchronize(s.handle());
    allocator_.release_cache();
    cudaStreamSynchronize(main_.handle());
  }

  /// Selects this GPU in the calling thread, for a device that was made in another thread.
  void bind_thread() const { detail::cuda_check(cudaSetDevice(options_.device), "choosing the GPU"); }

  int index() const { return options_.device; }
  const std::string& name() const { return name_; }
  /// Returns the bytes of shared memory that a kernel may ask for.
  std::size_t shared_bytes_per_block() const {
    int bytes = 0;
    detail::cuda_check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, options_.device),
                       "asking for the GPU");
    return static_cast<std::size_t>(bytes);
  }
  stream main_stream() const { return main_; }
  stream side_stream() const { return side_; }
  /// Copies of activations to host memory and back run here, concurrently with the other streams.
  stream copy_stream() const { return copies_; }

  /// Waits for all streams. Throws `plait::error` if a kernel found a data error, such as a token id outside the
  /// vocabulary.
  void synchronize() {
    for (const stream& s : {side_, copies_}) s.synchronize();
    device_fault found{};
    download(&found, faults_, sizeof found, main_);
    if (found.code == 0) return;
    zero(faults_, sizeof(device_fault), main_);
    fail(text_of(found));
  }
  /// Where kernels report errors, because they cannot throw; in device memory.
  device_fault* faults() const { return faults_; }

  /// Returns uninitialised memory on a 256-byte boundary, from a pool of this device object; null for 0 bytes. A
  /// released block is reused without a call to CUDA. If memory is exhausted, throws `plait::error` with the bytes of
  /// each use. During capture of a stream, throws it if no released block serves.
  void* allocate(std::size_t bytes, stream s) { return allocator_.allocate(bytes, key(s)); }
  void* allocate(std::size_t bytes) { return allocate(bytes, main_); }
  /// As `allocate` on the main stream, for buffers of collectives: from the memory of `serve_collectives`, if there is
  /// some. Throws `plait::error` that names the option if that memory is exhausted.
  void* allocate_for_collectives(std::size_t bytes) {
    return allocator_.allocate(bytes, pool_.key_for_collectives(key(main_)));
  }
  /// As `allocate` on the main stream, for data that only optimizers use (`options::offload_optimizer`).
  void* allocate_for_optimizers(std::size_t bytes) {
    return options_.offload_optimizer ? allocate_on_host(bytes) : allocate(bytes);
  }
  /// Returns pinned host memory in the order of the main stream, for offloaded data.
  void* allocate_on_host(std::size_t bytes) {
    has_host_memory_ = true;
    return on_host_.allocate(bytes, key(main_));
  }
  /// As `allocate`, for memory that the device keeps until its destructor, such as digests of checked values.
  /// `bytes_in_use` does not count it.
  void* allocate_own(std::size_t bytes) {
    const std::size_t before = allocator_.bytes_in_use();
    void* const memory = allocate(bytes);
    own_bytes_ += allocator_.bytes_in_use() - before;
    own_.push_back(memory);
    return memory;
  }
  /// Gives the device memory that a communication library has registered. Throws if it has such memory already.
  void serve_collectives(registered_memory memory) { pool_.serve_collectives(std::move(memory)); }
  /// Returns the memory of `serve_collectives`; empty if there is none.
  const registered_memory& served_to_collectives() const { return pool_.served_to_collectives(); }
  void release(void* pointer, stream s) {
    if (has_host_memory_ && on_host_.owns(pointer)) return on_host_.release(pointer, key(s));
    allocator_.release(pointer, key(s));
  }
  void release(void* pointer) { release(pointer, main_); }

  void copy(void* to, const void* from, std::size_t bytes, stream s) const {
    if (bytes == 0 || to == from) return;
    const cudaMemcpyKind kind = has_host_memory_ ? cudaMemcpyDefault : cudaMemcpyDeviceToDevice;
    detail::cuda_check(cudaMemcpyAsync(to, from, bytes, kind, s.handle()), "copying");
  }
  void zero(void* to, std::size_t bytes, stream s) const {
    if (bytes != 0) detail::cuda_check(cudaMemsetAsync(to, 0, bytes, s.handle()), "zeroing");
  }
  /// Copies to the device by way of the device's pinned memory, so the source may change or be freed when this returns,
  /// on every GPU. Throws during capture, because the graph would copy the recorded bytes at every replay.
  void upload(void* to, const void* from_host, std::size_t bytes, stream s) const {
    if (bytes == 0) return;
    if (capturing(s)) fail("cuda: an upload inside a captured stream; upload before the graph is launched");
    uploads_.upload(to, from_host, bytes, s.handle());
  }
  void download(void* to_host, const void* from, std::size_t bytes, stream s) const {
    if (bytes == 0) return;
    start_download(to_host, from, bytes, s);
    s.synchronize();
  }
  /// As `download`, to `memory_for_downloads`. The bytes are there after a `waiter` of the stream has waited.
  void start_download(void* to_pinned, const void* from, std::size_t bytes, stream s) const {
    if (bytes == 0) return;
    if (capturing(s)) fail("cuda: a download inside a captured stream; download after the graph was launched");
    detail::cuda_check(cudaMemcpyAsync(to_pinned, from, bytes, cudaMemcpyDefault, s.handle()), "downloading");
  }
  static host_memory memory_for_downloads() { return detail::pinned_staging::functions(); }
  /// Returns a function that waits, in any thread, for the stream's current work.
  std::function<void()> waiter(stream s) const { return detail::waiter_for(s.handle(), options_.device); }

  /// As `options::peers`, also for memory that was allocated before.
  void allow_access_from(const std::vector<int>& peers) { pool_.allow_access_from(peers); }

  static bool capturing(stream s) { return detail::is_captured(s.handle()); }

  /// Bytes in use as requested, without the device's own workspace; their peak; bytes in released blocks.
  std::size_t bytes_in_use() const { return allocator_.bytes_in_use() - own_bytes_; }
  std::size_t peak_bytes() const { return allocator_.peak_bytes() - own_bytes_; }
  std::size_t cached_bytes() const { return allocator_.cached_bytes(); }
  /// Bytes from the pool or `options::memory`: blocks in use, with the device's own workspace, and released ones.
  /// Registered memory in such blocks counts as well.
  std::size_t reserved_bytes() const { return allocator_.reserved_bytes(); }
  void reset_peak() { allocator_.reset_peak(); }
  /// Bytes of host memory that hold offloaded data now.
  std::size_t host_bytes_in_use() const { return on_host_.bytes_in_use(); }
  /// Returns released blocks to the driver, for NCCL's communicators, libraries and other programs, which cannot use
  /// them otherwise. Waits for the GPU.
  void release_cache() {
    allocator_.release_cache();
    for (const stream& s : {main_, side_, copies_}) s.synchronize();
    pool_.trim();
  }
  /// Returns cached blocks to the driver before a library allocates memory. It waits for no stream of the program,
  /// leaves the program's own allocator unchanged, and does nothing during capture.
  void release_unused() {
    if (options_.memory || capturing(main_)) return;
    allocator_.release_cache();
    if (own_main_ != nullptr) main_.synchronize();
    pool_.trim();
  }
  /// Begins and ends scratch memory; see `caching_allocator`.
  using scratch = caching_allocator<detail::cuda_pool&>::scratch;
  std::shared_ptr<scratch> begin_scratch() { return allocator_.begin_scratch(); }
  void end_scratch() { allocator_.end_scratch(); }
  /// Returns scratch memory to the cache, for later work of the main stream.
  void release_scratch(const std::shared_ptr<scratch>& owned) { allocator_.release_scratch(owned, key(main_)); }
  std::size_t scratch_bytes() const { return allocator_.scratch_bytes(); }
  /// Sets the bytes that the plan predicts for a rank; out-of-memory errors show them.
  void expect_bytes(std::size_t bytes) { pool_.expected = bytes; }

  /// C[m,n] = alpha * op(A)[m,k] * op(B)[k,n] + beta * C, row-major, as `cpu::gemm`, on the main stream. Types: (float,
  /// float), (double, double), (bf16, bf16), and (bf16, float), where the float C may be an accumulated gradient (beta
  /// = 1). Sums are in float, or in double. Throws if the epilogue's bias is not on a 16-byte boundary.
  template <class In, class Out>
  void gemm(bool trans_a, bool trans_b, std::int64_t m, std::int64_t n, std::int64_t k, double alpha, const In* a,
            std::int64_t lda, const In* b, std::int64_t ldb, double beta, Out* c, std::int64_t ldc,
            gemm_epilogue<Out> epilogue = {}) {
    const gemm_problem problem{trans_a, trans_b, m, n, k, lda, ldb, ldc};
    problem.check();
    if (reinterpret_cast<std::uintptr_t>(epilogue.bias) % 16 != 0)
      fail({problem.text(), ": the bias must begin at a multiple of 16 bytes, which cuBLASLt may read at once"});
    if (m == 0 || n == 0) return;
    if (k == 0) return no_terms(problem, beta, c, epilogue.bias == nullptr && epilogue.addend == nullptr);
    gemm_.run(problem, alpha, a, b, beta, c, epilogue, static_cast<Out*>(nullptr), options_.tf32, workspace_,
              options_.workspace_bytes, main_.handle());
  }

  /// Computes `gemm`, and in the same pass row_sums[i] = sum over k of op(A)[i, k], in float. If A is the gradient of a
  /// linear's output and C that of its weight, row_sums is the gradient of its bias. Returns false and computes nothing
  /// if cuBLASLt has no algorithm for both. That includes doubles, tf32 (the sums would be of rounded numbers), and a
  /// `row_sums` that is not on a 16-byte boundary.
  template <class In, class Out>
  [[nodiscard]] bool gemm_with_row_sums(bool trans_a, bool trans_b, std::int64_t m, std::int64_t n, std::int64_t k,
                                        double alpha, const In* a, std::int64_t lda, const In* b, std::int64_t ldb,
                                        double beta, Out* c, std::int64_t ldc, Out* row_sums) {
    const gemm_problem problem{trans_a, trans_b, m, n, k, lda, ldb, ldc};
    problem.check();
    if (std::is_same_v<In, double> || (std::is_same_v<In, float> && options_.tf32)) return false;
    if (m == 0 || n == 0 || k == 0 || reinterpret_cast<std::uintptr_t>(row_sums) % 16 != 0) return false;
    return gemm_.run(problem, alpha, a, b, beta, c, {}, row_sums, options_.tf32, workspace_, options_.workspace_bytes,
                     main_.handle());
  }

  /// Computes `gemm` for each group. A run is consecutive groups with one size and equal distances; padded experts have
  /// one or two. If there are at most two, or the stream is captured, each run is one call of cuBLAS. Otherwise one
  /// call computes all groups, and reads the addresses from device memory. In three cases cuBLASLt computes one product
  /// after the other: bf16 into float; bf16 or tf32 off the boundaries of `cublas_gemm_groups::takes`; and
  /// `options::deterministic`.
  template <class In, class Out>
  void gemm_groups(double alpha, const std::vector<gemm_group<In, Out>>& groups, double beta) {
    for (const auto& group : groups) group.problem.check();
    if (!options_.deterministic && gemm_in_runs(alpha, groups, beta)) return;
    if constexpr (std::is_same_v<In, Out>) {
      if (!options_.deterministic && cublas_gemm_groups::takes(groups, options_.tf32))
        return gemm_in_one_call(alpha, groups, beta);
    }
    for (const auto& [p, a, b, c] : groups)
      gemm(p.trans_a, p.trans_b, p.m, p.n, p.k, alpha, a, p.lda, b, p.ldb, beta, c, p.ldc);
  }

  /// Measures this number of algorithms for each new product from now on (`cublaslt_gemm::measure`); `use_products`
  /// uses the results. For several ranks use `agree_on_products`.
  void measure_products(int candidates) { gemm_.measure(candidates); }
  const product_choices& products() { return gemm_.choices(); }
  void use_products(const product_choices& choices) { gemm_.adopt(choices); }

  /// Selects the implementation of attention: plait's kernels, or a library. The library must outlive its use here.
  void use_attention(attention_choice choice) {
    if (options_.deterministic && choice.backend != attention_backend::own)
      fail(
          "cuda: options::deterministic has one order of sums, which a library's attention may not keep; legal is "
          "attention_backend::own");
    attention_ = choice;
  }
  bool deterministic() const { return options_.deterministic; }
  const attention_choice& attention() const { return attention_; }

  static constexpr bool supports_bf16() { return true; }

 private:
  static std::uintptr_t key(stream s) { return reinterpret_cast<std::uintptr_t>(s.handle()); }

  /// Checks the device, selects it in this thread, and returns its name.
  static std::string select(int device) {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
      static_cast<void>(cudaGetLastError());
      fail({"cuda: there is no CUDA device here",
            status != cudaSuccess ? cat({" (", cudaGetErrorString(status), ")"}) : ""});
    }
    if (device < 0 || device >= count) {
      fail({"cuda: options::device = ", device, ", must be 0 to ", count - 1});
    }
    detail::cuda_check(cudaSetDevice(device), "choosing the GPU");
    cudaDeviceProp properties{};
    detail::cuda_check(cudaGetDeviceProperties(&properties, device), "asking for the GPU");
    if (properties.major < 8) {
      fail({"cuda: device ", device, " (", properties.name, ") has compute capability ", properties.major, ".",
            properties.minor, ", must be at least 8.0; choose another by options::device"});
    }
    return properties.name;
  }

  /// Makes one call for each run of groups. Returns false, and computes nothing, if there are too many runs.
  template <class In, class Out>
  bool gemm_in_runs(double alpha, const std::vector<gemm_group<In, Out>>& groups, double beta) {
    std::vector<std::size_t> runs;  // their first groups
    const std::size_t most = capturing(main_) ? groups.size() : 2;
    for (std::size_t i = 0; i < groups.size(); i += cublas_gemm_groups::run_length(groups, i)) {
      if (runs.size() == most) return false;
      runs.push_back(i);
    }
    runs.push_back(groups.size());
    for (std::size_t r = 0; r + 1 < runs.size(); ++r) {
      const auto& [p, a, b, c] = groups[runs[r]];
      const std::size_t count = runs[r + 1] - runs[r];
      if (count > 1 && p.m > 0 && p.n > 0 && p.k > 0) {
        if (!groups_.has_handle()) release_unused();
        groups_.run_strided(alpha, &groups[runs[r]], count, beta, options_.tf32, workspace_, options_.workspace_bytes,
                            main_.handle());
        continue;
      }
      for (std::size_t i = runs[r]; i < runs[r + 1]; ++i)
        gemm(p.trans_a, p.trans_b, p.m, p.n, p.k, alpha, groups[i].a, p.lda, groups[i].b, p.ldb, beta, groups[i].c,
             p.ldc);
    }
    return true;
  }
  template <class T>
  void gemm_in_one_call(double alpha, const std::vector<gemm_group<T, T>>& groups, double beta) {
    std::vector<gemm_group<T, T>> present;
    for (const auto& group : groups) {
      const gemm_problem& p = group.problem;
      if (p.m == 0 || p.n == 0) continue;
      if (p.k == 0) {
        no_terms(p, beta, group.c, true);
      } else {
        present.push_back(group);
      }
    }
    if (present.empty()) return;
    const std::size_t count = present.size(), bytes = 3 * count * sizeof(void*);
    std::vector<const void*> addresses(3 * count);
    for (std::size_t i = 0; i < count; ++i)
      addresses[i] = present[i].b, addresses[count + i] = present[i].a, addresses[2 * count + i] = present[i].c;
    if (bytes > addresses_bytes_) {
      addresses_ = static_cast<const void**>(allocate_own(2 * bytes));
      addresses_bytes_ = 2 * bytes;
    }
    if (!groups_.has_handle()) release_unused();
    upload(addresses_, addresses.data(), bytes, main_);
    groups_.run(alpha, present, beta, addresses_, options_.tf32, workspace_, options_.workspace_bytes, main_.handle());
  }

  /// C = beta * C, the result of a product over k = 0.
  template <class Out>
  void no_terms(const gemm_problem& p, double beta, Out* c, bool plain) {
    if (!plain || (beta != 0 && beta != 1)) fail({p.text(), ": with k = 0, beta must be 0 or 1, without an epilogue"});
    if (beta == 1) return;
    const auto row = static_cast<std::size_t>(p.n) * sizeof(Out), pitch = static_cast<std::size_t>(p.ldc) * sizeof(Out);
    detail::cuda_check(cudaMemset2DAsync(c, pitch, 0, row, static_cast<std::size_t>(p.m), main_.handle()), "zeroing");
  }

  options options_;
  std::string name_;
  detail::owned_stream own_main_, own_side_, own_copies_;  ///< outlive the memory, which is released in them
  detail::cuda_pool pool_;
  caching_allocator<detail::cuda_pool&> allocator_;
  caching_allocator<detail::pinned_memory> on_host_;  ///< for offloaded data
  mutable detail::upload_ring uploads_;
  cublaslt_gemm gemm_;
  attention_choice attention_;
  stream main_, side_, copies_;
  bool has_host_memory_ = false;  ///< whether host memory was ever allocated
  void* workspace_ = nullptr;
  device_fault* faults_ = nullptr;
  std::size_t own_bytes_ = 0;
  std::vector<void*> own_;  ///< blocks of `allocate_own`
  cublas_gemm_groups groups_;
  const void** addresses_ = nullptr;  ///< addresses of matrices for `groups_`, in device memory
  std::size_t addresses_bytes_ = 0;
};

inline void cuda::stream::wait(const event& e) const {
  detail::cuda_check(cudaStreamWaitEvent(handle_, e.handle(), 0), "ordering streams");
}

static_assert(compute_device<cuda>);

/// Work of a device's main stream, recorded once and replayed with one launch, which removes the gaps between small
/// kernels. The recording holds addresses and numbers, so every replay uses the same memory. Memory that `work`
/// allocates from the device belongs to the graph until its end. The caller must keep buffers that existed before the
/// recording. The device must outlive the graph.
class cuda_graph {
 public:
  explicit cuda_graph(cuda& device) : device_(device) {}
  cuda_graph(const cuda_graph&) = delete;
  cuda_graph& operator=(const cuda_graph&) = delete;
  ~cuda_graph() { reset(); }

  explicit operator bool() const { return executable_ != nullptr; }

  /// Records the work that `work` puts into the main stream, without running it. An identical run of `work` must have
  /// come before, so that the memory it allocates is cached. `work` may not wait for the device, upload or download.
  /// Otherwise throws `plait::error` and records nothing.
  template <class Work>
  void record(Work&& work) {
    reset();
    const cudaStream_t stream = device_.main_stream().handle();
    scratch_ = device_.begin_scratch();
    if (const cudaError_t status = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
        status != cudaSuccess) {
      release();
      detail::cuda_check(status, "beginning a graph");
    }
    cudaGraph_t graph = nullptr;
    try {
      std::forward<Work>(work)();
    } catch (...) {
      static_cast<void>(cudaStreamEndCapture(stream, &graph));
      static_cast<void>(cudaGetLastError());
      if (graph != nullptr) cudaGraphDestroy(graph);
      release();
      throw;
    }
    device_.end_scratch();
    cudaError_t status = cudaStreamEndCapture(stream, &graph);
    if (status == cudaSuccess) {
      status = cudaGraphInstantiate(&executable_, graph, 0);
      cudaGraphDestroy(graph);
    }
    if (status == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());
    executable_ = nullptr;
    release();
    detail::cuda_check(status, "recording a graph");
  }

  /// Puts the recorded work into the main stream.
  void launch() {
    if (executable_ == nullptr) fail("cuda_graph: nothing is recorded");
    detail::cuda_check(cudaGraphLaunch(executable_, device_.main_stream().handle()), "launching a graph");
  }

  /// Deletes the recording. Its memory is reused in the main stream, and so after the last replay.
  void reset() {
    if (executable_ == nullptr) return;
    cudaGraphExecDestroy(std::exchange(executable_, nullptr));
    release();
  }

  /// Bytes of device memory that belong to the graph, without buffers from before the recording.
  std::size_t scratch_bytes() const { return scratch_ == nullptr ? 0 : scratch_->bytes(); }

 private:
  void release() { device_.release_scratch(std::exchange(scratch_, nullptr)); }

  cuda& device_;
  std::shared_ptr<cuda::scratch> scratch_;
  cudaGraphExec_t executable_ = nullptr;
};

#if !defined(PLAIT_CUDA_KERNELS) && !defined(PLAIT_COMPILED_CUDA)
template <class D>
  requires std::is_base_of_v<cuda, D>
inline constexpr bool has_kernels<D> = false;
#endif

}  // namespace plait

#include "plait/core/macros_on.hpp"
