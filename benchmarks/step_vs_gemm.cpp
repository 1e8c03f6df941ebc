#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/train_step.hpp"
#include "raw_linears.hpp"
#include "timing.hpp"
#include "training.hpp"

/// Compares a whole training step of Llama on one rank (forward, loss, backward, clipping, AdamW) with only the matrix
/// products of its linears, as raw calls of the product library, in turn. The step's rate counts the linears' FLOPs,
/// then also attention's (its causal half), over the time of the whole step. The step in bf16 runs in the same turns.
/// Times are processor times of one thread, so a machine with other work gives the same ratios.
namespace {

using plait::cpu;
using std::int64_t;

/// Returns the FLOPs of attention: two products forward and five backward (scores are computed again), over the half
/// that a causal mask leaves.
double attention_flop(const plait::llama_config& c, int64_t sequences, int64_t seq) {
  return 0.5 * 7 * 2.0 * static_cast<double>(c.layers * sequences * seq * seq * c.heads * c.head_dim);
}

template <class Precision>
using training = bench::training<plait::llama<Precision, plait::megatron_sp>>;

void compare(const plait::llama_config& c, int64_t sequences, int64_t seq, int64_t microbatches, int64_t rounds) {
  plait::threads::run(1, [&](plait::threads::communicator ranks) {
    plait::world w(plait::megatron_sp::mesh(1, 1, 1, 1).shape(), ranks);
    cpu device;
    plait::context<cpu> ctx{device, w, plait::llama_sizes<plait::megatron_sp>(c, w.shape(), sequences, seq), 1};
    training<float> whole(ctx, c, microbatches);
    training<plait::bf16> half(ctx, c, microbatches);
    bench::raw_linears linears(c, sequences * seq);
    const auto products = [&] {
      for (int64_t i = 0; i < microbatches; ++i) linears.pass(device);
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
    const double flop = linears.flop() * static_cast<double>(microbatches),
                 more = flop + attention_flop(c, sequences * microbatches, seq);
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
    training<float> whole(ctx, c, 1), chunked(ctx, c, 1, {.loss_chunks = chunks});
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
