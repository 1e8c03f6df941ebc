// Trains a language model whose blocks have mixtures of experts, on the bytes of a text: first on one rank, then on
// eight. The eight are a pipeline of two stages, with experts over two ranks and tensor parallelism over two. The
// losses are the same.
//
//   moe [TEXT]     examples/data/kjv.txt if none is given
#include "plait/nn/moe.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/models/language_model.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/norm.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/generators.hpp"
#include "train_llama/data/tokens.hpp"

namespace pl = plait;
using pl::axis, pl::dp, pl::ep, pl::shard, pl::spec, pl::tp;

// dp and ep shard samples, and tp the tokens of a sample. ep also shards experts, and tp the inner features of each.
struct strategy {
  using mesh = pl::mesh<axis<dp>, axis<ep>, axis<tp>>;
  using residual = spec<shard<pl::batch, dp, ep>, shard<pl::seq, tp>, pl::hidden>;
  using query_heads = shard<pl::heads, tp>;
  using key_heads = shard<pl::kv_heads, tp>;
  using feed_forward = shard<pl::ffn, tp>;
  using vocabulary = shard<pl::vocab, tp>;
};
struct mixture {
  using input = strategy::residual;
  using weight = spec<shard<pl::experts, ep>, shard<pl::ffn, tp>, pl::hidden>;
  using output = strategy::residual;
};

using specs = pl::transformer_specs<strategy>;
using norm = pl::rms_norm<double, specs::residual>;
using attention = pl::self_attention<double, strategy>;
using experts = pl::moe<double, mixture>;
using block = pl::sequential<pl::residual<norm, attention>, pl::residual<norm, experts>>;
using embedding = pl::embedding<double, specs::embedding>;
using output = pl::linear<double, specs::head>;
using head = pl::sequential<norm, output>;
using loss = pl::cross_entropy_loss<double, specs::logits, specs::tokens>;
using model = pl::language_model<embedding, block, head, loss>;

constexpr std::int64_t vocab = 256, layers = 2, microbatches = 4, samples = 4, sequence = 32, steps = 20;

std::unique_ptr<model> make_stage(const pl::context<pl::cpu>& ctx, pl::stage_layers part, const model* first) {
  return std::make_unique<model>(
      ctx, vocab, part, pl::language_model_options{.order = pl::sequence_order::original(sequence)}, first,
      [&] { return embedding(ctx, vocab, "embed_tokens"); },
      [&](std::int64_t i) {
        const std::string name = "layers." + std::to_string(i);
        const pl::attention_options rotated{.frequencies = pl::kernels::rope_inverse_frequencies(8, 1e4)};
        return block({norm(ctx, 1e-6, name + ".input_layernorm"), attention(ctx, name + ".self_attn", rotated)},
                     {norm(ctx, 1e-6, name + ".post_attention_layernorm"),
                      experts(ctx, name + ".mlp", {.router = {.chosen = 2}, .losses = {.balance = {0.01}}})});
      },
      [&](const auto& of_head, const auto&) {
        return head(norm(of_head, 1e-6, "norm"),
                    output(of_head, "lm_head", {.shape = {vocab, 32}, .hidden_layer = false}));
      });
}

using mesh = pl::mesh<axis<pl::pp>, axis<dp>, axis<ep>, axis<tp>>;

std::vector<double> train(const mesh& shape, const pl::token_source& text) {
  std::vector<double> losses;
  pl::threads::run(static_cast<int>(shape.size()), [&](pl::threads::communicator all) {
    pl::pipeline_world ranks(shape.shape(), pl::any_communicator(all));
    pl::cpu device;
    const pl::context<pl::cpu> ctx{
        device, ranks.stage(),
        pl::sizes_of<pl::batch, pl::seq, pl::hidden, pl::heads, pl::kv_heads, pl::head_dim, pl::ffn, pl::vocab,
                     pl::experts>(samples, sequence, 32, 4, 4, 8, 64, vocab, 8),
        /*seed=*/1};
    const pl::schedule plan = pl::make_schedule<pl::one_f_one_b>(ranks.along().size(), microbatches);
    const auto parts = pl::split_layers({std::vector<double>(layers, 1.0), 0, 0}, plan.shape.stages());
    pl::pipeline<model> stages(ctx, ranks.along(), plan, parts,
                               [&](pl::stage_layers part, const model* first) { return make_stage(ctx, part, first); });
    pl::initialize(ctx, stages);

    pl::adamw<double> optimizer;
    pl::training_step step(ctx, stages, optimizer, /*clip=*/1.0);
    for (std::int64_t i = 0; i < steps; ++i) {
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
      if (const double now = step.result(ctx).loss; all.rank() == 0) losses.push_back(now);
    }
  });
  return losses;
}

int main(int count, char** arguments) try {
  const pl::token_source text(
      {.paths = {count > 1 ? arguments[1] : "examples/data/kjv.txt"}, .vocab = vocab, .flag = "text"});
  const std::vector<double> one = train(mesh(1, 1, 1, 1), text), many = train(mesh(2, 1, 2, 2), text);
  double apart = 0;
  for (std::size_t i = 0; i < one.size(); ++i) {
    apart = std::max(apart, std::abs(one[i] - many[i]) / one[i]);
    if (i % 5 == 4) std::printf("step %2zu  loss %.12f on one rank, %.12f with pp=2, ep=2, tp=2\n", i, one[i], many[i]);
  }
  std::printf("the losses differ by %.1e at most\n", apart);
  return apart < 1e-10 && one.back() < one.front() ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "moe: %s\n", e.what());
  return 1;
}
