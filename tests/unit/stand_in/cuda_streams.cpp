// The stand-in CUDA runtime: streams, events, graphs, memory and products.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "stand_in/cuda/cublasLt.h"
#include "stand_in/cuda/cuda_runtime.h"

namespace {

constexpr std::size_t capacity = 64 << 20;
const bool configured = setenv("PLAIT_STAND_IN_MEMORY", std::to_string(capacity).c_str(), 1) == 0 &&
                        setenv("PLAIT_STAND_IN_DEVICES", "2", 1) == 0;

__global__ void increment(int* p) { ++*p; }
__global__ void append(int* list, int value) { list[++list[0]] = value; }

struct stream {
  cudaStream_t handle = nullptr;
  explicit stream(unsigned flags = cudaStreamNonBlocking) {
    REQUIRE(cudaStreamCreateWithFlags(&handle, flags) == cudaSuccess);
  }
  stream(const stream&) = delete;
  ~stream() { cudaStreamDestroy(handle); }
  operator cudaStream_t() const { return handle; }
};
struct event {
  cudaEvent_t handle = nullptr;
  event() { REQUIRE(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming) == cudaSuccess); }
  event(const event&) = delete;
  ~event() { cudaEventDestroy(handle); }
  operator cudaEvent_t() const { return handle; }
};

template <class... Parameters, class... Arguments>
cudaError_t launch(cudaStream_t s, void (*kernel)(Parameters...), Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.stream = s;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

int* zeros(int n) {
  int* p = nullptr;
  REQUIRE(cudaMalloc(&p, static_cast<std::size_t>(n) * sizeof(int)) == cudaSuccess);
  REQUIRE(cudaMemset(p, 0, static_cast<std::size_t>(n) * sizeof(int)) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  return p;
}
std::vector<int> list_of(const int* p, std::size_t n, cudaStream_t s) {
  std::vector<int> values(n);
  REQUIRE(cudaMemcpyAsync(values.data(), p, n * sizeof(int), cudaMemcpyDeviceToHost, s) == cudaSuccess);
  return values;
}

}  // namespace

TEST_CASE("stand-in: work runs when somebody asks for it, not before") {
  stream s;
  int ran = 0;
  cudaLaunchHostFunc(
      s, [](void* p) { ++*static_cast<int*>(p); }, &ran);
  CHECK(ran == 0);
  CHECK(cudaStreamQuery(s) == cudaErrorNotReady);
  CHECK(cudaStreamSynchronize(s) == cudaSuccess);
  CHECK(ran == 1);
  CHECK(cudaStreamQuery(s) == cudaSuccess);

  event e;
  cudaLaunchHostFunc(
      s, [](void* p) { ++*static_cast<int*>(p); }, &ran);
  cudaEventRecord(e, s);
  cudaLaunchHostFunc(
      s, [](void* p) { *static_cast<int*>(p) = 100; }, &ran);
  int polls = 0;
  while (cudaEventQuery(e) == cudaErrorNotReady) ++polls;
  CHECK(polls > 0);
  CHECK(ran == 2);  // up to the event, no further
  cudaDeviceSynchronize();
  CHECK(ran == 100);
}

TEST_CASE("stand-in: streams may run at once, or when they like, in every legal order") {
  auto& order = stand_in::runtime::instance().order;
  stream a, b;
  int* pinned = nullptr;
  REQUIRE(cudaMallocHost(&pinned, sizeof(int)) == cudaSuccess);
  order = stand_in::stream_order::eager;
  *pinned = 0;
  launch(a, increment, pinned);
  CHECK(*pinned == 1);  // though nobody asked
  order = stand_in::stream_order::random;
  int late = 0, early = 0, first = 0;
  for (int i = 0; i < 50; ++i) {
    int* list = zeros(4);
    event e;
    launch(a, append, list, 1);
    cudaEventRecord(e, a);
    cudaStreamWaitEvent(b, e, 0);
    launch(b, append, list, 2);
    launch(a, append, list, 3);
    *pinned = 0;
    launch(a, increment, pinned);
    (*pinned == 0 ? late : early)++;
    cudaDeviceSynchronize();
    const auto got = list_of(list, 4, a);
    CHECK(got[1] == 1);
    first += got[2] == 2;
    cudaFree(list);
  }
  order = stand_in::stream_order::late;
  CHECK(late > 0);
  CHECK(early > 0);
  CHECK(first > 0);
  CHECK(first < 50);
  cudaFreeHost(pinned);
}

TEST_CASE("stand-in: kernels and events are put into streams of the current device only") {
  stream s;
  int* p = zeros(1);
  event here;
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  event there;
  CHECK(launch(s, increment, p) == cudaErrorInvalidResourceHandle);
  CHECK(cudaEventRecord(there, s) == cudaErrorInvalidResourceHandle);
  CHECK(cudaEventRecord(here, s) == cudaSuccess);  // of the stream's device, whatever the current one
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  CHECK(launch(s, increment, p) == cudaSuccess);
  cudaFree(p);
  static_cast<void>(cudaGetLastError());
}

TEST_CASE("stand-in: the host's memory is read late, pinned or not") {
  stream s;
  int* device = zeros(2);
  int* pinned = nullptr;
  REQUIRE(cudaMallocHost(&pinned, sizeof(int)) == cudaSuccess);
  int pageable = 1;
  *pinned = 1;
  cudaMemcpyAsync(device, &pageable, sizeof(int), cudaMemcpyHostToDevice, s);
  cudaMemcpyAsync(device + 1, pinned, sizeof(int), cudaMemcpyHostToDevice, s);
  pageable = 2;
  *pinned = 2;
  CHECK(list_of(device, 2, s) == std::vector<int>{2, 2});
  cudaMemcpyAsync(pinned, device, sizeof(int), cudaMemcpyDeviceToHost, s);
  *pinned = 3;
  CHECK(*pinned == 3);
  cudaStreamSynchronize(s);
  CHECK(*pinned == 2);
  CHECK(cudaMemcpyAsync(device, device + 1, sizeof(int), cudaMemcpyHostToDevice, s) == cudaErrorInvalidValue);
  cudaFreeHost(pinned);
  cudaFree(device);
  static_cast<void>(cudaGetLastError());
}

TEST_CASE("stand-in: events order streams, and nothing else does") {
  int* list = zeros(8);
  stream a, b;
  event e;
  launch(a, append, list, 1);
  cudaEventRecord(e, a);
  launch(a, append, list, 2);
  cudaStreamWaitEvent(b, e, 0);
  launch(b, append, list, 3);
  CHECK(list_of(list, 3, b) == std::vector<int>{2, 1, 3});  // b waits for the event, not for what follows it
  CHECK(list_of(list, 4, a) == std::vector<int>{3, 1, 3, 2});

  // The legacy stream waits for blocking streams, and they for it.
  stream blocking(cudaStreamDefault);
  launch(blocking, append, list, 4);
  launch(nullptr, append, list, 5);
  launch(blocking, append, list, 6);
  CHECK(list_of(list, 7, blocking) == std::vector<int>{6, 1, 3, 2, 4, 5, 6});
  cudaFree(list);
}

TEST_CASE("stand-in: a destroyed stream still does its work") {
  int* list = zeros(4);
  {
    stream s;
    launch(s, append, list, 1);
  }
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(list_of(list, 2, nullptr) == std::vector<int>{1, 1});
  cudaFree(list);
}

TEST_CASE("stand-in: many host threads") {
  int* counters = zeros(8);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([=] {
      stream s;
      for (int i = 0; i < 50; ++i) {
        launch(s, increment, counters + t);
        if (i % 10 == 0) cudaStreamSynchronize(s);
      }
      cudaStreamSynchronize(s);
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK(list_of(counters, 8, nullptr) == std::vector<int>(8, 50));
  cudaFree(counters);
}

TEST_CASE("stand-in: graphs follow events into other streams, and are replayed") {
  int* list = zeros(16);
  stream a, b;
  event fork, join;
  REQUIRE(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  launch(a, append, list, 1);
  cudaEventRecord(fork, a);
  cudaStreamWaitEvent(b, fork, 0);
  cudaStreamCaptureStatus status{};
  CHECK(cudaStreamIsCapturing(b, &status) == cudaSuccess);
  CHECK(status == cudaStreamCaptureStatusActive);
  launch(b, append, list, 2);
  cudaEventRecord(join, b);
  cudaStreamWaitEvent(a, join, 0);
  launch(a, append, list, 3);
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(a, &graph) == cudaSuccess);
  CHECK(cudaStreamIsCapturing(b, &status) == cudaSuccess);
  CHECK(status == cudaStreamCaptureStatusNone);
  CHECK(list_of(list, 1, a) == std::vector<int>{0});  // captured, not run
  cudaGraphExec_t executable = nullptr;
  CHECK(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  CHECK(cudaGraphLaunch(executable, a) == cudaSuccess);
  CHECK(cudaGraphLaunch(executable, a) == cudaSuccess);
  CHECK(list_of(list, 7, a) == std::vector<int>{6, 1, 2, 3, 1, 2, 3});
  CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
  cudaFree(list);
}

TEST_CASE("stand-in: what a capture forbids ends it") {
  int* device = zeros(1);
  stream a, b;
  event e;
  const auto capture_with = [&](cudaStreamCaptureMode mode, const std::function<cudaError_t()>& forbidden,
                                cudaError_t error) {
    REQUIRE(cudaStreamBeginCapture(a, mode) == cudaSuccess);
    launch(a, increment, device);
    CHECK(forbidden() == error);
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(a, &graph) == (error == cudaSuccess ? cudaSuccess : cudaErrorStreamCaptureInvalidated));
    if (graph) cudaGraphDestroy(graph);
  };
  const auto local = cudaStreamCaptureModeThreadLocal, relaxed = cudaStreamCaptureModeRelaxed;
  const auto unsupported = cudaErrorStreamCaptureUnsupported;
  int host = 0;
  void* p = nullptr;
  const auto allocate = [&] { return cudaMalloc(&p, 4); };
  capture_with(
      local, [&] { return cudaStreamSynchronize(a); }, unsupported);
  capture_with(
      relaxed, [&] { return cudaStreamSynchronize(a); }, unsupported);
  capture_with(
      local, [&] { return cudaStreamSynchronize(b); }, cudaSuccess);
  capture_with(
      local, [&] { return cudaDeviceSynchronize(); }, unsupported);
  capture_with(
      local, [&] { return cudaStreamQuery(a); }, unsupported);
  capture_with(local, allocate, unsupported);
  capture_with(relaxed, allocate, cudaSuccess);
  capture_with(
      local, [&] { return cudaMemcpyAsync(&host, device, 4, cudaMemcpyDeviceToHost, a); }, unsupported);
  cudaEventRecord(e, b);
  capture_with(
      local, [&] { return cudaStreamWaitEvent(a, e, 0); }, cudaErrorStreamCaptureIsolation);
  cudaFree(p);

  REQUIRE(cudaStreamBeginCapture(a, local) == cudaSuccess);
  cudaEventRecord(e, a);
  cudaStreamWaitEvent(b, e, 0);
  launch(b, increment, device);
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(a, &graph) == cudaErrorStreamCaptureUnjoined);
  CHECK(graph == nullptr);
  CHECK(list_of(device, 1, a) == std::vector<int>{0});
  cudaFree(device);
  static_cast<void>(cudaGetLastError());
}

TEST_CASE("stand-in: memory can run out, and released memory comes back in stream order") {
  void *p = nullptr, *q = nullptr;
  CHECK(cudaMalloc(&p, capacity + 1) == cudaErrorMemoryAllocation);
  CHECK(p == nullptr);
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
  std::size_t free_bytes = 0, total_bytes = 0;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  CHECK(free_bytes == capacity);
  CHECK(total_bytes == capacity);

  stream s;
  REQUIRE(cudaMallocAsync(&p, capacity / 2, s) == cudaSuccess);
  REQUIRE(cudaMallocAsync(&q, capacity / 4, s) == cudaSuccess);
  void* r = nullptr;
  CHECK(cudaMallocAsync(&r, capacity / 2, s) == cudaErrorMemoryAllocation);
  CHECK(cudaFreeAsync(p, s) == cudaSuccess);
  CHECK(cudaFreeAsync(p, s) == cudaErrorInvalidValue);
  CHECK(cudaMallocAsync(&r, capacity / 2, s) == cudaSuccess);
  CHECK(list_of(static_cast<int*>(r), 1, s) == std::vector<int>{-1});  // fresh memory is NaN
  cudaFreeAsync(q, s);
  cudaFreeAsync(r, s);
  cudaStreamSynchronize(s);
  cudaMemGetInfo(&free_bytes, &total_bytes);
  CHECK(free_bytes == capacity);
  static_cast<void>(cudaGetLastError());
}

namespace {

struct matrix {
  std::vector<float> values;
  std::uint64_t rows, cols;
  bool row_major;
  std::size_t ld() const { return (row_major ? cols : rows) + 3; }
  std::size_t at(std::uint64_t i, std::uint64_t j) const { return row_major ? i * ld() + j : j * ld() + i; }
  matrix(std::uint64_t r, std::uint64_t c, bool row) : rows(r), cols(c), row_major(row) {
    values.resize(ld() * (row ? r : c));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(static_cast<int>(i * 7 % 23) - 11);
  }
};

/// A matrix on the device in a type of cuBLASLt, with the layout that describes it.
struct device_matrix {
  cudaDataType_t type;
  std::size_t n;
  void* p = nullptr;
  cublasLtMatrixLayout_t layout = nullptr;
  device_matrix(const matrix& m, cudaDataType_t t) : type(t), n(m.values.size()) {
    std::vector<char> bytes(n * stand_in::bytes_of(t));
    for (std::size_t i = 0; i < n; ++i) stand_in::store<float>(t, bytes.data(), i, m.values[i]);
    cudaMalloc(&p, bytes.size());
    cudaMemcpy(p, bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
    cublasLtMatrixLayoutCreate(&layout, t, m.rows, m.cols, static_cast<std::int64_t>(m.ld()));
    const std::int32_t order = m.row_major ? CUBLASLT_ORDER_ROW : CUBLASLT_ORDER_COL;
    cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, sizeof order);
  }
  ~device_matrix() {
    cudaFree(p);
    cublasLtMatrixLayoutDestroy(layout);
  }
  float value(std::size_t i) const {
    std::vector<char> bytes(n * stand_in::bytes_of(type));
    cudaMemcpy(bytes.data(), p, bytes.size(), cudaMemcpyDeviceToHost);
    return stand_in::load<float>(type, bytes.data(), i);
  }
};

}  // namespace

TEST_CASE("stand-in: products in every transposition, order and type") {
  cublasLtHandle_t handle = nullptr;
  REQUIRE(cublasLtCreate(&handle) == CUBLAS_STATUS_SUCCESS);
  struct types {
    cudaDataType_t in, out;
  };
  for (const types t : {types{CUDA_R_32F, CUDA_R_32F}, types{CUDA_R_64F, CUDA_R_64F}, types{CUDA_R_16BF, CUDA_R_16BF},
                        types{CUDA_R_16BF, CUDA_R_32F}}) {
    for (int variant = 0; variant < 16; ++variant) {
      const bool trans_a = variant & 1, trans_b = variant & 2, rows_in = variant & 4, rows_out = variant & 8;
      const std::uint64_t m = 5, n = 7, k = 9;
      const matrix a(trans_a ? k : m, trans_a ? m : k, rows_in), b(trans_b ? n : k, trans_b ? k : n, rows_in);
      const matrix c(m, n, rows_out), d(m, n, rows_out);
      device_matrix da(a, t.in), db(b, t.in), dc(c, t.out), dd(d, t.out);
      const bool wide = t.in == CUDA_R_64F;
      cublasLtMatmulDesc_t desc = nullptr;
      cublasLtMatmulDescCreate(&desc, wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, wide ? CUDA_R_64F : CUDA_R_32F);
      const std::int32_t op_a = trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
      cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a);
      cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b);
      cublasLtMatmulHeuristicResult_t best{};
      int found = 0;
      CHECK(cublasLtMatmulAlgoGetHeuristic(handle, desc, da.layout, db.layout, dc.layout, dd.layout, nullptr, 1, &best,
                                           &found) == CUBLAS_STATUS_SUCCESS);
      CHECK(found == 1);
      const float alpha = 2, beta = 3;
      const double wide_alpha = 2, wide_beta = 3;
      CHECK(cublasLtMatmul(handle, desc, wide ? static_cast<const void*>(&wide_alpha) : &alpha, da.p, da.layout, db.p,
                           db.layout, wide ? static_cast<const void*>(&wide_beta) : &beta, dc.p, dc.layout, dd.p,
                           dd.layout, &best.algo, nullptr, 0, nullptr) == CUBLAS_STATUS_SUCCESS);
      int wrong = 0;
      for (std::uint64_t i = 0; i < m; ++i) {
        for (std::uint64_t j = 0; j < n; ++j) {
          float sum = 0;
          for (std::uint64_t p = 0; p < k; ++p) {
            sum += a.values[trans_a ? a.at(p, i) : a.at(i, p)] * b.values[trans_b ? b.at(j, p) : b.at(p, j)];
          }
          sum = 2 * sum + 3 * c.values[c.at(i, j)];
          if (t.out == CUDA_R_16BF) sum = stand_in::bf16_value(stand_in::bf16_bits(sum));
          wrong += dd.value(d.at(i, j)) != sum;
        }
      }
      CAPTURE(variant);
      CHECK(wrong == 0);
      cublasLtMatmulDescDestroy(desc);
    }
  }
  cublasLtDestroy(handle);
}
