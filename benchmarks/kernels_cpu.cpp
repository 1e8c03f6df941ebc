#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "plait/kernels/kernels.hpp"

/// Measures the rates of the cpu device and its kernels on one thread. `FLOP` counts the arithmetic that the result
/// needs (causal attention: half of the square). `bytes` counts each byte once that is read or written; compare with
/// `copy`, the memory's rate.
namespace {

using plait::cpu;
namespace kernels = plait::kernels;
using std::int64_t;

std::vector<float> values(int64_t n) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(n));
  const std::size_t drawn = std::min<std::size_t>(x.size(), 1 << 14);  // numbers are repeated: drawing all is slow
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = i < drawn ? normal(generator) : x[i - drawn];
  return x;
}

void count_flop(benchmark::State& state, double flop) {
  state.counters["FLOP"] = benchmark::Counter(flop, benchmark::Counter::kIsIterationInvariantRate);
}

void count_bytes(benchmark::State& state, int64_t bytes) { state.SetBytesProcessed(state.iterations() * bytes); }

template <class T>
void gemm(benchmark::State& state) {
  const int64_t m = state.range(0), n = state.range(1), k = state.range(2), transposed = state.range(3);
  const bool ta = transposed == 2, tb = transposed == 1;
  cpu device;
  const std::vector<T> a(static_cast<std::size_t>(m * k), T(1)), b(static_cast<std::size_t>(k * n), T(0.5));
  std::vector<T> c(static_cast<std::size_t>(m * n));
  for (auto _ : state) {
    device.gemm(ta, tb, m, n, k, T(1), a.data(), ta ? m : k, b.data(), tb ? k : n, ta ? T(1) : T(0), c.data(), n);
    benchmark::DoNotOptimize(c.data());
  }
  count_flop(state, 2.0 * static_cast<double>(m * n * k));
}
/// The products of a Llama step of hidden size 512 with 1024 tokens: forward (1), input gradient (0), weight gradient
/// (2).
void llama_shapes(benchmark::internal::Benchmark* b) {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{512, 512}, {1024, 512}, {2816, 512}, {512, 1408}}) {
    b->Args({1024, n, k, 1});
    b->Args({1024, k, n, 0});
    b->Args({n, k, 1024, 2});
  }
  b->Args({8, 8, 8, 0})->Args({32, 32, 32, 0});
}
BENCHMARK(gemm<float>)->Apply(llama_shapes);
BENCHMARK(gemm<double>)->Args({1024, 512, 512, 1})->Args({8, 8, 8, 0});

void gemm_bf16(benchmark::State& state) {
  if (!cpu::supports_bf16()) return state.SkipWithError("no bf16 instructions");
  const int64_t m = 1024, n = 2816, k = 512;
  cpu device;
  const std::vector<plait::bf16> a(static_cast<std::size_t>(m * k), plait::to_bf16(1)),
      b(static_cast<std::size_t>(k * n), plait::to_bf16(1));
  std::vector<float> c(static_cast<std::size_t>(m * n));
  for (auto _ : state) device.gemm(false, true, m, n, k, 1.0f, a.data(), k, b.data(), k, 0.0f, c.data(), n);
  count_flop(state, 2.0 * static_cast<double>(m * n * k));
}
BENCHMARK(gemm_bf16);

struct attention_case {
  kernels::attention_shape s;
  std::vector<float> q, k, v, o, lse, dq, dk, dv;
  explicit attention_case(const benchmark::State& state) {
    s.batch = 2;
    s.q_len = s.k_len = state.range(0);
    s.heads = 8;
    s.kv_heads = state.range(1);
    s.head_dim = 64;
    s.scale = 0.125;
    q = values(s.batch * s.q_len * s.heads * 64);
    k = v = values(s.batch * s.k_len * s.kv_heads * 64);
    o = dq = q;
    dk = dv = k;
    lse = values(s.batch * s.heads * s.q_len);
  }
  double flop() const { return 0.5 * 4.0 * static_cast<double>(s.batch * s.heads * s.q_len * s.k_len * s.head_dim); }
};

void attention_forward(benchmark::State& state) {
  attention_case c(state);
  cpu device;
  for (auto _ : state)
    kernels::attention_forward(device, c.q.data(), c.k.data(), c.v.data(), c.o.data(), c.lse.data(), c.s);
  count_flop(state, c.flop());
}
BENCHMARK(attention_forward)->Args({512, 8})->Args({512, 2})->Args({1024, 8})->Args({1024, 2})->Args({4096, 8});

void attention_backward(benchmark::State& state) {
  attention_case c(state);
  cpu device;
  kernels::attention_forward(device, c.q.data(), c.k.data(), c.v.data(), c.o.data(), c.lse.data(), c.s);
  for (auto _ : state) {
    kernels::attention_backward(device, c.q.data(), c.k.data(), c.v.data(), c.o.data(), c.lse.data(), c.q.data(),
                                c.dq.data(), c.dk.data(), c.dv.data(), c.s);
  }
  count_flop(state, 2.5 * c.flop());
}
BENCHMARK(attention_backward)->Args({512, 8})->Args({512, 2})->Args({1024, 8})->Args({1024, 2})->Args({4096, 8});

constexpr int64_t elements = int64_t{1} << 24;  // 64 MiB of floats, twice the cache

void copy(benchmark::State& state) {
  const auto x = values(elements);
  std::vector<float> y(x.size());
  for (auto _ : state) {
    std::memcpy(y.data(), x.data(), x.size() * 4);
    benchmark::ClobberMemory();
  }
  count_bytes(state, elements * 8);
}
BENCHMARK(copy);

void cross_entropy(benchmark::State& state) {
  const int64_t rows = 512, vocab = 32000;
  auto logits = values(rows * vocab);
  const std::vector<int64_t> targets(static_cast<std::size_t>(rows), 77);
  std::vector<float> maximum(targets.size()), sum(targets.size()), target(targets.size()), loss(targets.size());
  const std::vector<float> scale(targets.size(), 1.0f);
  const kernels::vocabulary_range range{vocab, 0, vocab};
  cpu device;
  for (auto _ : state) {
    kernels::cross_entropy_local_statistics(device, logits.data(), targets.data(), maximum.data(), sum.data(),
                                            target.data(), static_cast<float*>(nullptr), rows, range, {});
    kernels::cross_entropy_loss(device, targets.data(), maximum.data(), sum.data(), target.data(),
                                static_cast<float*>(nullptr), loss.data(), rows, range, {});
    kernels::cross_entropy_backward(device, logits.data(), targets.data(), maximum.data(), sum.data(), scale.data(),
                                    logits.data(), rows, range, {});
  }
  count_bytes(state, rows * vocab * 12);
}
BENCHMARK(cross_entropy);

void rms_norm(benchmark::State& state) {
  const int64_t columns = 512, rows = elements / columns;
  const auto x = values(elements), w = values(columns);
  std::vector<float> y(x.size()), inv(static_cast<std::size_t>(rows));
  cpu device;
  for (auto _ : state)
    kernels::norm_forward(device, x.data(), w.data(), nullptr, y.data(), nullptr, inv.data(), rows, columns, 1e-5);
  count_bytes(state, elements * 8);
}
BENCHMARK(rms_norm);

void rms_norm_backward(benchmark::State& state) {
  const int64_t columns = 512, rows = elements / columns;
  const auto x = values(elements), w = values(columns), dy = values(elements);
  std::vector<float> dx(x.size()), dw(w.size()), inv(static_cast<std::size_t>(rows), 1.0f);
  cpu device;
  for (auto _ : state) {
    kernels::norm_backward(device, x.data(), w.data(), dy.data(), nullptr, inv.data(), dx.data(), dw.data(), nullptr,
                           rows, columns);
  }
  count_bytes(state, elements * 12);
}
BENCHMARK(rms_norm_backward);

void swiglu(benchmark::State& state) {
  const int64_t ffn = 1408, rows = elements / (2 * ffn);
  const auto x = values(rows * 2 * ffn);
  std::vector<float> y(static_cast<std::size_t>(rows * ffn));
  cpu device;
  for (auto _ : state) kernels::swiglu_forward(device, x.data(), y.data(), rows, ffn);
  count_bytes(state, rows * ffn * 12);
}
BENCHMARK(swiglu);

void swiglu_backward(benchmark::State& state) {
  const int64_t ffn = 1408, rows = elements / (2 * ffn);
  const auto x = values(rows * 2 * ffn), dy = values(rows * ffn);
  std::vector<float> dx(x.size());
  cpu device;
  for (auto _ : state) kernels::swiglu_backward(device, x.data(), dy.data(), dx.data(), rows, ffn);
  count_bytes(state, rows * ffn * 20);
}
BENCHMARK(swiglu_backward);

void rope(benchmark::State& state) {
  const int64_t heads = 8, dim = 64, rows = elements / (heads * dim);
  auto x = values(elements);
  cpu device;
  std::vector<int64_t> positions(1024);
  for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int64_t>(i);
  std::vector<float> cosine(1024 * 32), sine(1024 * 32);
  kernels::rope_table<float>(device, positions.data(), 1024, kernels::rope_inverse_frequencies(dim, 1e4), cosine.data(),
                             sine.data());
  for (auto _ : state)
    kernels::rope_forward(device, x.data(), heads * dim, x.data(), cosine.data(), sine.data(), rows, heads, dim,
                          heads * dim, 1024);
  count_bytes(state, elements * 8);
}
BENCHMARK(rope);

void adamw(benchmark::State& state) {
  auto p = values(elements), m = p, v = values(elements);
  const auto g = values(elements);
  for (auto& x : v) x = std::abs(x);
  cpu device;
  const kernels::adamw_tensor<float, float, float> one{p.data(), g.data(), m.data(), v.data(), nullptr, elements, 0.01};
  const kernels::adamw_settings settings;
  const auto scalars = kernels::adamw_scalars_of(settings, 1e-3, 1);
  for (auto _ : state) kernels::adamw_update(device, std::span(&one, 1), settings, &scalars);
  count_bytes(state, elements * 28);
}
BENCHMARK(adamw);

void sum_squares(benchmark::State& state) {
  const auto x = values(elements);
  cpu device;
  const kernels::const_elements<float> one{x.data(), elements};
  double squares = 0;
  for (auto _ : state) {
    kernels::add_sum_squares(device, std::span(&one, 1), &squares);
    benchmark::DoNotOptimize(squares);
  }
  count_bytes(state, elements * 4);
}
BENCHMARK(sum_squares);

void cast_to_bf16(benchmark::State& state) {
  const auto x = values(elements);
  std::vector<plait::bf16> y(x.size());
  cpu device;
  for (auto _ : state) kernels::cast(device, x.data(), y.data(), elements);
  count_bytes(state, elements * 6);
}
BENCHMARK(cast_to_bf16);

void dropout(benchmark::State& state) {
  auto x = values(elements);
  plait::box part;
  part.dims = 1;
  part.global[0] = part.local[0] = elements;
  cpu device;
  for (auto _ : state) kernels::dropout_forward(device, x.data(), x.data(), part, 1, 2, 0.1);
  count_bytes(state, elements * 8);
}
BENCHMARK(dropout);

}  // namespace

BENCHMARK_MAIN();
