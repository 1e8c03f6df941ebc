// Measures the cost of layouts, pipelines and their communication: a training step on a mesh of four axes against the
// same step on one rank, per core. Ranks are threads and more than the cores, so other ranks use the time of a bubble.
// It also times raw products in the shapes of one rank, because smaller products are slower in any program.
//
//   bench_four_axes [--rounds N] [--hidden N] [--layers N] [--seq N] [--microbatches N]
#include <fmt/format.h>

#include <exception>
#include <optional>
#include <thread>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/parse.hpp"
#include "timing.hpp"

using namespace plait;

namespace {

using strategy_type = context_parallel<megatron_sp, ring<cp>, zigzag>;
using model_type = llama<float, strategy_type>;

struct layout_of_ranks {
  std::int64_t pp_ranks, cp_ranks, tp_ranks;
  const char* schedule;
};

struct speed {
  double rate = 0;       ///< tokens a second of the best step
  double processor = 0;  ///< processor seconds that all ranks together take for a token, in the cheapest step
};

speed measure(const layout_of_ranks& l, const llama_config& c, std::int64_t seq_length, std::int64_t microbatches,
              std::int64_t rounds) {
  mesh_shape shape;
  shape.add(axis_of<dp>, 1);
  shape.add(axis_of<pp>, l.pp_ranks);
  shape.add(axis_of<cp>, l.cp_ranks);
  shape.add(axis_of<tp>, l.tp_ranks);
  shape.add(axis_of<tp_rep>, 1);
  speed best{0, 1e30};
  const auto tokens = static_cast<double>(microbatches * seq_length);
  threads::run(static_cast<int>(shape.size()), [&](threads::communicator comm) {
    pipeline_world ranks(shape, any_communicator(comm));
    cpu device;
    context<cpu> ctx{device, ranks.stage(), llama_sizes<strategy_type>(c, ranks.stage().shape(), 1, seq_length), 1};
    const schedule plan = parse_schedule(l.schedule, static_cast<int>(l.pp_ranks), static_cast<int>(microbatches));
    const llama_part_times parts = llama_part_flops(c, seq_length);
    const auto split = split_layers(stage_costs_of(parts, c.layers), plan.shape.stages());
    pipeline<model_type> model(
        ctx, ranks.along(), plan, split,
        [&](stage_layers part, model_type* first) {
          return std::make_unique<model_type>(ctx, c, llama_options{}, part, first);
        },
        pipeline_options{.costs = schedule_costs_of(parts, split)});
    adamw<float> optimizer;
    model.visit([&](auto& p) { p.initialize(ctx); });
    training_step step(ctx, model, optimizer, 1.0);
    for (std::int64_t i = 0; i <= rounds; ++i) {  // the first one warms up
      step.load(ctx, i * microbatches, [&](std::int64_t k, auto& ids, auto& labels) {
        for (std::int64_t t = 0; t < ids.size(); ++t)
          ids.data()[t] = (t * 31 + k) % c.vocab, labels.data()[t] = (t * 17 + k) % c.vocab;
      });
      optimizer.begin_step(ctx, 1e-3);
      ranks.root().barrier();
      double used = 0;
      const double took = bench::seconds([&] {
        used = bench::processor_seconds([&] { step.run(ctx); });
        ranks.root().barrier();
      });
      ranks.root().all_reduce(&used, &used, 1, dtype::f64, reduce_op::sum);
      if (comm.rank() != 0 || i == 0) continue;
      best.rate = std::max(best.rate, tokens / took);
      best.processor = std::min(best.processor, used / tokens);
    }
  });
  return best;
}

/// Returns the FLOPs per processor second of the products of all linears, forward and backward, on a rank with 1/cp of
/// the rows and 1/tp of the heads, of ffn and of the vocabulary.
double rate_of_products(const llama_config& c, std::int64_t rows, std::int64_t cp_ranks, std::int64_t tp_ranks) {
  struct shape {
    std::int64_t out, in;
  };
  const std::int64_t heads = c.heads * c.head_dim / tp_ranks, ffn = c.ffn / tp_ranks;
  std::vector<shape> shapes;
  for (std::int64_t layer = 0; layer < c.layers; ++layer)
    for (const shape& s : {shape{heads + 2 * c.kv_heads * c.head_dim / tp_ranks, c.hidden}, shape{c.hidden, heads},
                           shape{2 * ffn, c.hidden}, shape{c.hidden, ffn}})
      shapes.push_back(s);
  shapes.push_back({c.vocab / tp_ranks, c.hidden});
  rows /= cp_ranks;
  cpu device;
  std::vector<std::vector<float>> x, w, dw;
  std::vector<float> y, dx;
  double flop = 0;
  for (const shape& s : shapes) {
    const auto size = [](std::int64_t a, std::int64_t b) { return static_cast<std::size_t>(a * b); };
    x.emplace_back(size(rows, s.in), 0.1f), w.emplace_back(size(s.out, s.in), 0.1f), dw.emplace_back(w.back().size());
    y.resize(std::max(y.size(), size(rows, s.out))), dx.resize(std::max(dx.size(), size(rows, s.in)));
    flop += 6.0 * static_cast<double>(rows * s.out * s.in);
  }
  const auto all = [&] {
    for (std::size_t i = 0; i < shapes.size(); ++i)
      device.gemm(false, true, rows, shapes[i].out, shapes[i].in, 1.0f, x[i].data(), shapes[i].in, w[i].data(),
                  shapes[i].in, 0.0f, y.data(), shapes[i].out);
    for (std::size_t i = shapes.size(); i-- > 0;) {
      const auto [out, in] = shapes[i];
      device.gemm(false, false, rows, in, out, 1.0f, y.data(), out, w[i].data(), in, 0.0f, dx.data(), in);
      device.gemm(true, false, out, in, rows, 1.0f, y.data(), out, x[i].data(), in, 1.0f, dw[i].data(), in);
    }
  };
  all();
  std::vector<double> took;
  for (int i = 0; i < 16; ++i) took.push_back(bench::processor_seconds(all));
  return flop / bench::median(took);
}

}  // namespace

int main(int argc, char** argv) try {
  const bench::numbers given(argc, argv);
  llama_config c;
  c.hidden = given.of("--hidden", 512);
  c.heads = c.hidden / 64, c.kv_heads = c.heads / 2, c.head_dim = 64;
  c.ffn = 3 * c.hidden;
  c.vocab = 4096;
  c.layers = given.of("--layers", 8);
  const std::int64_t rounds = given.of("--rounds", 3), seq_length = given.of("--seq", 512);
  const std::int64_t microbatches = given.of("--microbatches", 8);
  const auto cores = static_cast<double>(std::thread::hardware_concurrency());
  fmt::print("hidden {}, {} layers, {} microbatches of {} tokens, {:.0f} cores; target: 0.85 on 8 ranks\n", c.hidden,
             c.layers, microbatches, seq_length, cores);
  fmt::print("{:24} {:>12} {:>10} {:>20}\n", "ranks", "tokens/s", "per core", "per processor second");
  std::optional<speed> one;
  for (const layout_of_ranks& l :
       {layout_of_ranks{1, 1, 1, "1f1b"}, {2, 2, 2, "1f1b"}, {2, 2, 2, "zb_h1"}, {2, 2, 2, "interleaved:2"}}) {
    const speed now = measure(l, c, seq_length, microbatches, rounds);
    if (!one) one = now;
    const std::int64_t ranks = l.pp_ranks * l.cp_ranks * l.tp_ranks;
    fmt::print("{:24} {:12.0f} {:10.3f} {:20.3f}\n",
               fmt::format("pp={} cp={} tp={} {}", l.pp_ranks, l.cp_ranks, l.tp_ranks, l.schedule), now.rate,
               now.rate / one->rate / std::min(cores, static_cast<double>(ranks)), one->processor / now.processor);
  }
  const double whole = rate_of_products(c, seq_length, 1, 1), parts = rate_of_products(c, seq_length, 2, 2);
  fmt::print("products alone, of shapes of cp=2 tp=2: {:.3f} of those of one rank, per processor second\n",
             parts / whole);
} catch (const std::exception& e) {
  fmt::print(stderr, "bench_four_axes: {}\n", e.what());
  return 1;
}
