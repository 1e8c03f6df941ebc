// Measures products on the shapes of a Llama's linears: `cuda::gemm` against the fastest of all algorithms that
// cuBLASLt offers for the product; each is tried.
#include <cublasLt.h>

#include "harness.hpp"

namespace {

using namespace bench;

constexpr std::size_t search_workspace = std::size_t{256} << 20;  // for any algorithm; more than plait's workspace

void check(cublasStatus_t status, const char* doing) {
  if (status != CUBLAS_STATUS_SUCCESS)
    plait::fail(std::string("cuBLASLt: ") + cublasLtGetStatusString(status) + ", " + doing);
}

/// One row-major product C = op(A) op(B) + beta D. D is C itself or, with `residual`, another array; see `cuda::gemm`.
struct product {
  std::string id;
  double step_calls;
  bool trans_a, trans_b;
  std::int64_t m, n, k;
  double beta;
  bool residual = false;

  double operations() const { return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k); }
  std::int64_t lda() const { return trans_a ? m : k; }
  std::int64_t ldb() const { return trans_b ? k : n; }
};

/// Calls with every algorithm that the heuristic returns for a product. cuBLASLt is column-major, so it computes the
/// transposed product with the factors exchanged.
template <class Out>
class candidates {
 public:
  candidates(const product& p, int most) : p_(p) {
    check(cublasLtCreate(&handle_), "creating a handle");
    check(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing the product");
    const cublasOperation_t first = p.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                            second = p.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    check(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first),
          "describing it");
    check(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second),
          "describing it");
    a_ = matrix(CUDA_R_16BF, p.trans_a ? p.k : p.m, p.trans_a ? p.m : p.k);
    b_ = matrix(CUDA_R_16BF, p.trans_b ? p.n : p.k, p.trans_b ? p.k : p.n);
    c_ = matrix(std::is_same_v<Out, float> ? CUDA_R_32F : CUDA_R_16BF, p.m, p.n);
    cublasLtMatmulPreference_t wanted = nullptr;
    check(cublasLtMatmulPreferenceCreate(&wanted), "asking for algorithms");
    const std::uint64_t workspace = search_workspace;
    check(cublasLtMatmulPreferenceSetAttribute(wanted, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                               sizeof workspace),
          "asking for algorithms");
    found_.resize(static_cast<std::size_t>(most));
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle_, operation_, b_, a_, c_, c_, wanted, most, found_.data(), &count);
    cublasLtMatmulPreferenceDestroy(wanted);
    check(status, "asking for algorithms");
    found_.resize(static_cast<std::size_t>(count));
  }
  candidates(const candidates&) = delete;
  candidates& operator=(const candidates&) = delete;
  ~candidates() {
    for (const cublasLtMatrixLayout_t layout : {a_, b_, c_}) cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulDescDestroy(operation_);
    cublasLtDestroy(handle_);
  }

  std::size_t size() const { return found_.size(); }
  std::size_t workspace(std::size_t i) const { return found_[i].workspaceSize; }

  /// Returns whether the algorithm accepted the product.
  bool run(std::size_t i, const bf16* a, const bf16* b, const Out* d, Out* c, void* workspace,
           cudaStream_t stream) const {
    const float one = 1, beta = static_cast<float>(p_.beta);
    return found_[i].state == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatmul(handle_, operation_, &one, b, b_, a, a_, &beta, d, c_, c, c_, &found_[i].algo, workspace,
                          search_workspace, stream) == CUBLAS_STATUS_SUCCESS;
  }

 private:
  static cublasLtMatrixLayout_t matrix(cudaDataType_t type, std::int64_t rows, std::int64_t columns) {
    cublasLtMatrixLayout_t layout = nullptr;
    check(cublasLtMatrixLayoutCreate(&layout, type, static_cast<std::uint64_t>(columns),
                                     static_cast<std::uint64_t>(rows), columns),
          "describing a matrix");
    return layout;
  }

  product p_;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, c_ = nullptr;
  std::vector<cublasLtMatmulHeuristicResult_t> found_;
};

/// Returns the candidates in the order of their times in one quick try, without those that refuse.
template <class Call>
std::vector<std::size_t> ranked(cuda& device, std::size_t count, const Call& call) {
  stopwatch watch(device);
  std::vector<std::pair<double, std::size_t>> times;
  for (std::size_t i = 0; i < count; ++i) {
    if (!call(i)) continue;
    double least = 1e9;
    for (int again = 0; again < 2; ++again) least = std::min(least, watch.seconds([&] { call(i); }));
    times.emplace_back(least, i);
  }
  std::sort(times.begin(), times.end());
  std::vector<std::size_t> order;
  for (const auto& [seconds, i] : times) order.push_back(i);
  return order;
}

template <class Out>
void measure(cuda& device, const options& o, parts& all, const product& p, void* workspace) {
  const auto a = random_arrays<bf16>(device, p.m * p.k, 1), b = random_arrays<bf16>(device, p.k * p.n, 1, -0.02, 0.02);
  const auto c = random_arrays<Out>(device, p.m * p.n, 1);
  const auto d = p.residual ? random_arrays<Out>(device, p.m * p.n, 1) : c;
  const candidates<Out> search(p, o.tiny ? 8 : o.quick ? 48 : 128);
  const cudaStream_t stream = device.main_stream().handle();
  const auto call = [&](std::size_t i) { return search.run(i, a(0), b(0), d(0), c(0), workspace, stream); };
  const std::vector<std::size_t> order = ranked(device, search.size(), call);
  if (order.empty()) plait::fail("cuBLASLt has no algorithm");

  const auto ours = [&] {
    device.gemm(p.trans_a, p.trans_b, p.m, p.n, p.k, 1.0, a(0), p.lda(), b(0), p.ldb(), p.beta, c(0), p.n,
                plait::gemm_epilogue<Out>{.addend = p.residual ? d(0) : nullptr});
  };
  std::vector<timed_call> calls;
  calls.push_back({p.id, p.operations(), 1, [&](int) { ours(); }});
  for (std::size_t i = 0; i < std::min<std::size_t>(order.size(), 5); ++i)
    calls.push_back({"algorithm " + std::to_string(order[i]), p.operations(), 1, [&, i](int) { call(order[i]); }});
  take_turns(device, calls, o, all);
  if (calls.size() < 2 || calls[0].id != p.id) plait::fail("nothing to compare");
  std::size_t best = 1;
  for (std::size_t i = 2; i < calls.size(); ++i)
    if (median(calls[i].seconds) < median(calls[best].seconds)) best = i;
  const double share =
      median_of_rounds(calls[best].seconds, calls[0].seconds, [](double other, double own) { return other / own; });
  row(p.id, share)
      .number("teraflops", p.operations() / median(calls[0].seconds) / 1e12)
      .number("best_teraflops", p.operations() / median(calls[best].seconds) / 1e12)
      .number("seconds", median(calls[0].seconds))
      .number("operations", p.operations())
      .number("algorithms", static_cast<double>(order.size()))
      .number("best_is_choice", static_cast<double>(order[best - 1]))
      .number("best_workspace", static_cast<double>(search.workspace(order[best - 1])))
      .number("step_calls", p.step_calls)
      .known(p.operations() / median(calls[best].seconds) / 1e12, "TFLOP/s")
      .print();

  // The algorithm chosen by measuring, in turn with the best.
  device.measure_products(16);
  ours();
  device.use_products(plait::product_choices(device.products()));
  std::vector<timed_call> both{{p.id + ".measured", p.operations(), 1, [&](int) { ours(); }}};
  both.push_back({"the best", p.operations(), 1, [&](int) { call(order[best - 1]); }});
  take_turns(device, both, o, all);
  device.use_products(plait::product_choices(device.products().machine()));  // removes all choices
  if (both.size() < 2) plait::fail("nothing to compare with the choice by measuring");
  row(p.id + ".measured",
      median_of_rounds(both[1].seconds, both[0].seconds, [](double other, double own) { return other / own; }))
      .number("teraflops", p.operations() / median(both[0].seconds) / 1e12)
      .number("seconds", median(both[0].seconds))
      .number("step_calls", p.step_calls)
      .known(p.operations() / median(both[1].seconds) / 1e12, "TFLOP/s")
      .print();
}

void measure_all(cuda& device, const options& o, parts& all) {
  const shapes s = shapes::of(o);
  const auto workspace = plait::make_buffer<unsigned char>(device, search_workspace);
  void* const scratch = const_cast<void*>(workspace.data());
  const std::int64_t hidden = s.model.hidden, heads = s.model.heads * s.model.head_dim, t = s.tokens;
  const struct {
    const char* name;
    std::int64_t in, out;
  } linears[] = {{"qkv", hidden, s.qkv()},
                 {"attention_output", heads, hidden},
                 {"gate_up", hidden, 2 * s.model.ffn},
                 {"down", s.model.ffn, hidden},
                 {"head", hidden, s.model.vocab}};
  for (const auto& l : linears) {
    const std::string id = std::string("linears.") + l.name;
    // A linear that ends a residual branch also adds the residual.
    const bool ends = l.out == hidden;
    const auto m = static_cast<double>(s.microbatches);
    const double times = std::string(l.name) == "head" ? 1 : static_cast<double>(s.model.layers);
    const product forward{id + ".forward", times * m, false, true, t, l.out, l.in, ends ? 1.0 : 0.0, ends};
    const product input{id + ".input_gradient", times * m, false, false, t, l.in, l.out, 0};
    const product weight{id + ".weight_gradient", times * (m - 1), true, false, l.out, l.in, t, 1};  // the first writes
    for (const product& p : {forward, input})
      if (o.wants(p.id)) all.run(p.id, [&] { measure<bf16>(device, o, all, p, scratch); });
    if (o.wants(weight.id)) all.run(weight.id, [&] { measure<float>(device, o, all, weight, scratch); });
  }
}

}  // namespace

int main(int count, char** arguments) {
  return bench::run_main(count, arguments, {"--tokens"}, [](const options& o, parts& all) {
    cuda device;
    measure_all(device, o, all);
  });
}
