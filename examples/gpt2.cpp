// Trains the GPT-2 of gpt2.hpp on the bytes of a text, first on one rank, then on four: a pipeline of two stages, each
// on two tensor-parallel ranks. Ranks are threads of this process. The losses are the same.
//
//   gpt2 [TEXT]     examples/data/kjv.txt if none is given
#include "gpt2.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/generators.hpp"
#include "train_llama/data/tokens.hpp"

namespace pl = plait;
using strategy = pl::megatron_sp;
using stage = gpt2::model<double, strategy>;
using mesh = pl::mesh<pl::axis<pl::pp>, pl::axis<pl::dp>, pl::axis<pl::cp>, pl::axis<pl::tp>, pl::axis<pl::tp_rep>>;

constexpr std::int64_t microbatches = 4, samples = 2, sequence = 32, steps = 20;

std::vector<double> train(const mesh& shape, const pl::token_source& text) {
  std::vector<double> losses;
  pl::threads::run(static_cast<int>(shape.size()), [&](pl::threads::communicator all) {
    pl::pipeline_world ranks(shape.shape(), pl::any_communicator(all));
    pl::cpu device;
    gpt2::config config;
    config.vocab = 256, config.positions = sequence, config.hidden = 64, config.layers = 4, config.heads = 4;
    const pl::context<pl::cpu> ctx{device, ranks.stage(),
                                   gpt2::sizes<strategy>(config, ranks.stage().shape(), samples, sequence), /*seed=*/1};

    // Four layers over the stages. The embedding and the head share one table, on whatever stages they are.
    const pl::schedule plan = pl::make_schedule<pl::one_f_one_b>(ranks.along().size(), microbatches);
    const pl::stage_costs costs{std::vector<double>(static_cast<std::size_t>(config.layers), 1.0), 0, 0};
    const auto parts = pl::split_layers(costs, plan.shape.stages());
    pl::pipeline<stage> model(ctx, ranks.along(), plan, parts, [&](pl::stage_layers part, const stage* first) {
      return std::make_unique<stage>(ctx, config, part, first);
    });
    pl::initialize(ctx, model);

    pl::adamw<double> optimizer;
    pl::training_step step(ctx, model, optimizer, /*clip=*/1.0);
    for (std::int64_t i = 0; i < steps; ++i) {
      // Sample n, counted over all steps, is the text from byte 97 n on, on every rank.
      const std::int64_t first_sample = i * microbatches * samples;
      step.load(ctx, first_sample, [&](std::int64_t k, pl::host_tokens& ids, pl::host_tokens& labels) {
        for (std::int64_t row = 0; row < ids.rows(); ++row)
          for (const pl::token_run& run : ids.runs()) {
            const std::int64_t sample = first_sample + k * samples + ids.sample(row);
            const std::int64_t from = sample * 97 % (text.size() - sequence) + run.position;
            text.read(from, run.length, ids.row(row) + run.at);
            text.read(from + 1, run.length, labels.row(row) + run.at);
          }
      });
      optimizer.begin_step(ctx, /*learning_rate=*/3e-3);
      step.run(ctx);
      const pl::step_result result = step.result(ctx);
      if (all.rank() == 0) losses.push_back(result.loss);
    }
  });
  return losses;
}

int main(int count, char** arguments) try {
  const pl::token_source text(
      {.paths = {count > 1 ? arguments[1] : "examples/data/kjv.txt"}, .vocab = 256, .flag = "text"});
  const std::vector<double> one = train(mesh(1, 1, 1, 1, 1), text), many = train(mesh(2, 1, 1, 2, 1), text);
  double apart = 0;
  for (std::size_t i = 0; i < one.size(); ++i) {
    apart = std::max(apart, std::abs(one[i] - many[i]) / one[i]);
    if (i % 5 == 4) std::printf("step %2zu  loss %.12f on one rank, %.12f with pp=2, tp=2\n", i, one[i], many[i]);
  }
  std::printf("the losses differ by %.1e at most\n", apart);
  return apart < 1e-10 && one.back() < one.front() ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "gpt2: %s\n", e.what());
  return 1;
}
