#include <fmt/format.h>

#include <cstring>
#include <exception>
#include <memory>
#include <optional>

#include "plait/comm/threads.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "raw_block.hpp"
#include "timing.hpp"

/// Compares a transformer block under a strategy (types, layouts, derived collectives, layers) with the same block
/// written by hand, in turn: forward, backward, weight gradients and their reduction. The exit code is 1 if a bit of
/// the output, of the input's gradient or of a weight's gradient differs.
namespace {

using plait::cpu;
using std::int64_t;
using strategy = plait::megatron_sp;
using model_type = plait::llama<float, strategy>;
using norm = plait::rms_norm<float, strategy::residual>;
using activation = plait::tensor<float, strategy::residual>;

model_type::block typed_block(const plait::context<cpu>& ctx, const plait::llama_config& c) {
  plait::attention_options options;
  options.frequencies = plait::kernels::rope_inverse_frequencies(c.head_dim, c.rope_theta, std::nullopt);
  using attention = plait::self_attention<float, strategy>;
  using mlp = plait::swiglu_mlp<float, strategy>;
  return model_type::block({norm(ctx, c.rms_eps, "norm_1"), attention(ctx, "attention", options)},
                           {norm(ctx, c.rms_eps, "norm_2"), mlp(ctx, "mlp")});
}

struct outcome {
  std::vector<double> typed, raw;
  bool equal = true;
};

outcome compare(const plait::llama_config& c, int ranks, int64_t sequences, int64_t seq, int64_t rounds) {
  outcome result;
  plait::threads::run(ranks, [&](plait::threads::communicator comm) {
    plait::world w(strategy::mesh(1, 1, ranks, 1).shape(), comm);
    cpu device;
    plait::context<cpu> ctx{device, w, plait::llama_sizes<strategy>(c, w.shape(), sequences, seq), 1};
    model_type::block block = typed_block(ctx, c);
    block.visit([&](auto& p) { p.initialize(ctx); });
    plait::gather_parameters(ctx, block);

    bench::raw_block raw(device, comm, {sequences, seq, c.hidden, c.heads, c.head_dim, c.ffn, c.rms_eps, c.rope_theta});
    float* weight = raw.weights();
    block.visit([&](auto& p) {
      std::copy_n(p.used_value(), p.used_size(), weight);
      weight += p.used_size();
    });

    activation x(ctx), y;
    plait::tensor<float, plait::dual_t<strategy::residual>> dy(ctx), dx;
    plait::kernels::fill_normal(device, x.data(), x.part(), 1, 1, 0.0, 1.0);
    plait::kernels::fill_normal(device, dy.data(), dy.part(), 1, 2, 0.0, 1.0);
    const auto run_typed = [&] {
      plait::zero_gradients(ctx, block);
      model_type::block::saved kept;
      y = block.forward(ctx, x, &kept);
      dx = block.backward(ctx, x, kept, dy);
      block.visit([&](auto& p) { static_cast<void>(p.reduce(ctx)); });
    };
    const auto run_raw = [&] {
      raw.zero_gradients();
      raw.forward(x.data());
      raw.backward(x.data(), dy.data());
      raw.reduce_gradients();
    };
    run_typed();
    run_raw();
    const auto same = [](const float* a, const float* b, int64_t n) {
      return std::memcmp(a, b, static_cast<std::size_t>(n) * sizeof(float)) == 0;
    };
    bool equal = same(y.data(), raw.output(), y.size()) && same(dx.data(), raw.input_gradient(), dx.size());
    const float* gradient = raw.gradients();
    block.visit([&](auto& p) {
      equal = equal && same(p.gradient(), gradient, p.size());
      gradient += p.size();
    });
    int differs = equal ? 0 : 1;
    comm.all_reduce(&differs, &differs, 1, plait::dtype::i32, plait::reduce_op::max);

    std::vector<double> typed_times, raw_times;
    for (int64_t i = 0; i < rounds; ++i) {
      for (int64_t turn : {i % 2, 1 - i % 2}) {  // both are first equally often
        comm.barrier();
        const double t = bench::seconds([&] {
          if (turn == 0)
            run_typed();
          else
            run_raw();
          comm.barrier();
        });
        (turn == 0 ? typed_times : raw_times).push_back(t);
      }
    }
    if (comm.rank() == 0) result = {typed_times, raw_times, differs == 0};
  });
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const bench::numbers given(argc, argv);
    given.only({"--hidden", "--ranks", "--seq", "--sequences", "--rounds"});
    const int64_t seq = given.of("--seq", 256), sequences = given.of("--sequences", 2),
                  rounds = given.of("--rounds", 0);
    const int64_t only_hidden = given.of("--hidden", 0), only_ranks = given.of("--ranks", 0);
    bool equal = true;
    for (const int64_t hidden : {int64_t{512}, int64_t{128}}) {
      if (only_hidden != 0 && only_hidden != hidden) continue;
      for (const int64_t ranks : {int64_t{1}, int64_t{2}}) {
        if (only_ranks != 0 && only_ranks != ranks) continue;
        const int64_t runs = rounds != 0 ? rounds : hidden == 512 ? 60 : 400;
        const outcome r = compare(plait::llama_preset_config("bench-" + std::to_string(hidden)),
                                  static_cast<int>(ranks), sequences, seq, runs);
        fmt::print(
            "hidden {:3}, tp={}, {} x {} tokens: by hand {:8.3f} ms, typed {:8.3f} ms, ratio of minima {:.4f}, of "
            "medians {:.4f}; results {}\n",
            hidden, ranks, sequences, seq, bench::least(r.raw) * 1e3, bench::least(r.typed) * 1e3,
            bench::least(r.typed) / bench::least(r.raw), bench::median(r.typed) / bench::median(r.raw),
            r.equal ? "are equal in every bit" : "DIFFER");
        std::fflush(stdout);
        equal = equal && r.equal;
      }
    }
    return equal ? 0 : 1;
  } catch (const std::exception& e) {
    fmt::print(stderr, "typed_vs_raw: {}\n", e.what());
    return 1;
  }
}
