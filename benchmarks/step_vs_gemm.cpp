#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <random>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/train_step.hpp"
#include "timing.hpp"

/// Compares a whole training step of Llama on one rank (forward, loss, backward, clipping, AdamW) with only the matrix
/// products of its linears, as raw calls of the product library, in turn. The step's rate counts the linears' FLOPs,
/// then also attention's (its causal half), over the time of the whole step. The step in bf16 runs in the same turns.
/// Times are processor times of one thread, so a machine with other work gives the same ratios.
namespace {

using plait::cpu;
using std::int64_t;

/// The products of a linear, y = x w', dx = dy w, dw += dy' x, on its own memory, as in the model.
class raw_linear {
 public:
  raw_linear(int64_t rows, int64_t out, int64_t in)
      : rows_(rows),
        out_(out),
        in_(in),
        x_(size(rows, in)),
        w_(size(out, in)),
        y_(size(rows, out)),
        dx_(size(rows, in)),
        dw_(size(out, in)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (std::vector<float>* v : {&x_, &w_, &y_})
      for (float& value : *v) value = 0.1f * normal(random);
  }
  void forward(cpu& device) {
    device.gemm(false, true, rows_, out_, in_, 1.0f, x_.data(), in_, w_.data(), in_, 0.0f, y_.data(), out_);
  }
  void backward(cpu& device) {
    device.gemm(false, false, rows_, in_, out_, 1.0f, y_.data(), out_, w_.data(), in_, 0.0f, dx_.data(), in_);
    device.gemm(true, false, out_, in_, rows_, 1.0f, y_.data(), out_, x_.data(), in_, 1.0f, dw_.data(), in_);
  }
  double flop() const { return 6.0 * static_cast<double>(rows_ * out_ * in_); }

 private:
  static std::size_t size(int64_t a, int64_t b) { return static_cast<std::size_t>(a * b); }
  int64_t rows_, out_, in_;
  std::vector<float> x_, w_, y_, dx_, dw_;
};

std::vector<raw_linear> linears_of(const plait::llama_config& c, int64_t rows) {
  std::vector<raw_linear> all;
  for (int64_t i = 0; i < c.layers; ++i) {
    all.emplace_back(rows, (c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden);
    all.emplace_back(rows, c.hidden, c.heads * c.head_dim);
    all.emplace_back(rows, 2 * c.ffn, c.hidden);
    all.emplace_back(rows, c.hidden, c.ffn);
  }
  all.emplace_back(rows, c.vocab, c.hidden);
  return all;
}

/// Returns the FLOPs of attention: two products forward and five backward (scores are computed again), over the half
/// that a causal mask leaves.
double attention_flop(const plait::llama_config& c, int64_t sequences, int64_t seq) {
  return 0.5 * 7 * 2.0 * static_cast<double>(c.layers * sequences * seq * seq * c.heads * c.head_dim);
}

/// A model that trains on random tokens.
template <class Precision>
class training {
  using model = plait::llama<Precision, plait::megatron_sp>;

 public:
  training(plait::context<cpu>& ctx, const plait::llama_config& c, int64_t microbatches, int64_t loss_chunks = 1)
      : ctx_(ctx),
        model_(ctx, c, {.loss_chunks = loss_chunks}),
        step_(ctx, model_, optimizer_, microbatches, 1.0),
        vocab_(static_cast<std::uint32_t>(c.vocab)) {
    plait::initialize(ctx, model_);
  }
  void step() {
    const auto by_chance = [&](int64_t, int64_t) { return static_cast<int64_t>(random_() % vocab_); };
    step_.load(ctx_, 0, [&](int64_t, auto& ids, auto& labels) { ids.fill(by_chance), labels.fill(by_chance); });
    optimizer_.begin_step(ctx_, 1e-4);
    step_.run(ctx_);
  }

 private:
  plait::context<cpu>& ctx_;
  model model_;
  plait::adamw<Precision> optimizer_;
  plait::training_step<model> step_;
  std::mt19937 random_{1};
  std::uint32_t vocab_;
};

void compare(const plait::llama_config& c, int64_t sequences, int64_t seq, int64_t microbatches, int64_t rounds) {
  plait::threads::run(1, [&](plait::threads::communicator ranks) {
    plait::world w(plait::megatron_sp::mesh(1, 1, 1, 1).shape(), ranks);
    cpu device;
    plait::context<cpu> ctx{device, w, plait::llama_sizes<plait::megatron_sp>(c, w.shape(), sequences, seq), 1};
    training<float> whole(ctx, c, microbatches);
    training<plait::bf16> half(ctx, c, microbatches);
    std::vector<raw_linear> linears = linears_of(c, sequences * seq);
    const auto products = [&] {
      for (int64_t i = 0; i < microbatches; ++i) {
        for (raw_linear& l : linears) l.forward(device);
        for (std::size_t l = linears.size(); l-- > 0;) linears[l].backward(device);
      }
    };
    whole.step();
    half.step();
    products();
    std::vector<double> of_step, of_half, of_products;
    for (int64_t i = 0; i < rounds; ++i) {
      of_products.push_back(bench::processor_seconds(products));
      of_step.push_back(bench::processor_seconds([&] { whole.step(); }));
      of_half.push_back(bench::processor_seconds([&] { half.step(); }));
    }
    double flop = 0;
    for (const raw_linear& l : linears) flop += l.flop();
    flop *= static_cast<double>(microbatches);
    const double more = flop + attention_flop(c, sequences * microbatches, seq);
    const auto report = [&](const char* what, double a, double b, double in_bf16) {
      fmt::print(
          "hidden {:4}, {} x {} x {} tokens, {:6}: products {:6.1f} GFLOP/s, step {:6.1f}, ratio {:.3f} (with "
          "attention's FLOPs {:.3f}); in bf16 the step is {:.2f} times as fast\n",
          c.hidden, microbatches, sequences, seq, what, flop / b * 1e-9, flop / a * 1e-9, b / a, more / flop * b / a,
          a / in_bf16);
    };
    report("best", bench::least(of_step), bench::least(of_products), bench::least(of_half));
    report("median", bench::median(of_step), bench::median(of_products), bench::median(of_half));
    if (!cpu::supports_bf16()) fmt::print("(This processor has no instructions for bf16.)\n");
    std::fflush(stdout);
  });
}

/// Compares a step whose loss is computed in chunks of tokens with one that has all logits at once: times, and peak
/// memory.
void compare_chunks(int64_t hidden, int64_t vocab, int64_t seq, int64_t chunks, int64_t rounds) {
  plait::threads::run(1, [&](plait::threads::communicator ranks) {
    plait::world w(plait::megatron_sp::mesh(1, 1, 1, 1).shape(), ranks);
    cpu device;
    plait::llama_config c = plait::llama_preset_config("bench-512", "chunks");
    c.hidden = hidden, c.ffn = 3 * hidden, c.head_dim = hidden / c.heads, c.vocab = vocab, c.layers = 2;
    c.max_position = seq;
    plait::context<cpu> ctx{device, w, plait::llama_sizes<plait::megatron_sp>(c, w.shape(), 1, seq), 1};
    std::vector<double> times[2];
    std::size_t peaks[2];
    training<float> whole(ctx, c, 1), chunked(ctx, c, 1, chunks);
    for (training<float>* const one : {&whole, &chunked}) {
      one->step();
      const std::size_t before = device.bytes_in_use();
      device.reset_peak();
      one->step();
      peaks[one == &chunked] = device.peak_bytes() - before;
    }
    for (int64_t i = 0; i < rounds; ++i)
      for (training<float>* const one : {&whole, &chunked})
        times[one == &chunked].push_back(bench::processor_seconds([&] { one->step(); }));
    const double logits = 4.0 * static_cast<double>(seq * vocab);
    fmt::print(
        "loss in {} chunks, hidden {}, vocabulary {}, {} tokens: {:.3f} times the time at best, {:.3f} of medians; at "
        "its "
        "peak a step needs {:.0f} MB, {:.0f} with all logits, which alone are {:.0f}\n",
        chunks, hidden, vocab, seq, bench::least(times[1]) / bench::least(times[0]),
        bench::median(times[1]) / bench::median(times[0]), static_cast<double>(peaks[1]) * 1e-6,
        static_cast<double>(peaks[0]) * 1e-6, logits * 1e-6);
    std::fflush(stdout);
  });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const bench::numbers given(argc, argv);
    given.only({"--hidden", "--seq", "--sequences", "--microbatches", "--vocab", "--rounds"});
    const int64_t hidden = given.of("--hidden", 0), seq = given.of("--seq", 512),
                  sequences = given.of("--sequences", 4);
    const int64_t microbatches = given.of("--microbatches", 1), rounds = given.of("--rounds", 5);
    std::vector<int64_t> sizes{512, 1024};
    if (hidden != 0) sizes = {hidden};
    for (const int64_t size : sizes)
      compare(plait::llama_preset_config("bench-" + std::to_string(size), "--hidden"), sequences, seq, microbatches,
              rounds);
    compare_chunks(sizes[0] / 2, given.of("--vocab", 131072), 16 * seq, 32, std::min<int64_t>(rounds, 2));
  } catch (const std::exception& e) {
    fmt::print(stderr, "step_vs_gemm: {}\n", e.what());
    return 1;
  }
}
