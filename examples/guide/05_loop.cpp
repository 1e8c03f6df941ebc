// A training loop with data and checkpoints: a Llama trains on a text on four ranks, stops, and continues on two ranks.
#include <cstdio>
#include <exception>
#include <string>

#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/saver.hpp"
#include "plait/comm/threads.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/train_step.hpp"

namespace pl = plait;

const std::string text = [] {  // each letter follows from the two before it
  std::string t = "ab";
  while (t.size() < 2000) t += static_cast<char>('a' + (t[t.size() - 1] * 3 + t[t.size() - 2]) % 26);
  return t;
}();
void read(std::int64_t from, std::int64_t count, std::int64_t* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = text[static_cast<std::size_t>(from + i)] - 'a';
}

void report(const pl::finished_save& save) {
  if (save.failure.empty()) return;
  std::printf("step %d was not saved: %s\n", static_cast<int>(save.step), save.failure.c_str());
}

void train(const pl::mesh_shape& mesh, const std::string& folder, std::uint64_t steps) {
  pl::threads::run(static_cast<int>(mesh.size()), [&](pl::threads::communicator all) {
    pl::world world(mesh, all);
    pl::any_communicator& ranks = world.root();
    pl::cpu device;
    const pl::llama_config config{
        .vocab = 26, .hidden = 32, .layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 8, .ffn = 64};
    constexpr std::int64_t sequences = 4, length = 16;  // `sequences` in a microbatch, on all ranks together
    constexpr int microbatches = 2;
    const pl::context<pl::cpu> context{device, world, pl::llama_sizes<pl::megatron_sp>(config, mesh, sequences, length),
                                       /*seed=*/1};
    pl::llama<double, pl::megatron_sp> model(context, config);
    pl::adamw<double> optimizer;

    pl::checkpoint_saver saver(device, ranks, {.directory = folder, .keep = {.last = 3}});
    const auto found = pl::resume_or_initialize(context, ranks, model, optimizer, folder);  // of any layout
    std::uint64_t done = found ? found->step : 0;
    pl::training_step step(context, model, optimizer, microbatches, /*clip=*/1.0);
    while (done < steps) {
      const auto first = static_cast<std::int64_t>(done) * microbatches * sequences;  // this step's first sample
      step.load(context, first, [&](std::int64_t k, pl::host_tokens& ids, pl::host_tokens& labels) {
        for (std::int64_t row = 0; row < ids.rows(); ++row)  // the samples of microbatch k that this rank has
          for (const pl::token_run& run : ids.runs()) {      // and the positions: one run, or two in zigzag order
            const std::int64_t from = (first + k * sequences + ids.sample(row)) * length + run.position;
            read(from, run.length, ids.row(row) + run.at);
            read(from + 1, run.length, labels.row(row) + run.at);
          }
      });
      optimizer.begin_step(context, /*learning_rate=*/1e-2);
      step.run(context);
      ++done;
      if (const double loss = step.result(context).loss; world.rank() == 0)
        std::printf("  step %d  loss %.6f\n", static_cast<int>(done), loss);
      if (done % 2 == 0) saver.save(context, model, optimizer, done);  // copies, and returns
      for (const auto& save : saver.finished(device)) report(save);
    }
    for (const auto& save : saver.wait(device)) report(save);
  });
}

int main() try {
  std::printf("dp=2, tp=2\n");
  train(pl::megatron_sp::mesh(2, 1, 2, 1).shape(), "steps", 4);
  std::printf("then cp=2\n");
  train(pl::megatron_sp::mesh(1, 2, 1, 1).shape(), "steps", 6);
  std::printf("one rank, from the beginning\n");
  train(pl::megatron_sp::mesh(1, 1, 1, 1).shape(), "other_steps", 6);
} catch (const std::exception& e) {
  std::fprintf(stderr, "05_loop: %s\n", e.what());
  return 1;
}
