// Pretrains a Llama on a text, with data, pipeline, context and tensor parallelism, and ZeRO. It saves checkpoints,
// which any other mesh resumes, evaluates a held-out loss, and prints progress. Copy it, and edit its settings.
//
//     pretrain TEXT [STEPS [threads [DP PP CP TP]]]                      threads of this process
//     mpirun -n 8 pretrain TEXT STEPS mpi                                processes, where CMake has found MPI
//     torchrun --nproc-per-node 8 --no-python pretrain TEXT STEPS nccl   GPUs, compiled with PLAIT_WITH_NCCL
#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/saver.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/comm/threads.hpp"
#include "plait/models/llama.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/evaluate.hpp"
#include "plait/parallel/optim/lr_schedule.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/parse.hpp"
#ifdef PLAIT_WITH_MPI
#include "plait/comm/mpi.hpp"
#endif
#ifdef PLAIT_WITH_NCCL
#include "plait/comm/launch/nccl.hpp"
#include "plait/cuda.hpp"
#endif

namespace {

namespace pl = plait;

// ---- settings ------------------------------------------------------------------------------------------------------

using precision = float;  // pl::bf16: mixed precision with float masters
using strategy = pl::context_parallel<pl::megatron_sp, pl::ring<pl::cp>, pl::zigzag>;

struct settings {
  std::int64_t dp = 1, pp = 2, cp = 2, tp = 2;  // ranks along each axis
  const char* schedule = "1f1b";                // or gpipe, interleaved:2, zb_h1, zb_v, ...
  pl::zero_level zero = pl::zero_level::optimizer;

  pl::llama_config model{
      .vocab = 256, .hidden = 64, .layers = 4, .heads = 4, .kv_heads = 2, .head_dim = 16, .ffn = 176};
  std::int64_t length = 64, samples = 4;  // tokens in a sequence; samples in a microbatch, on all data ranks together
  std::int64_t microbatches = 4;          // in a step
  double rate = 3e-3, clip = 1.0;
  std::uint64_t seed = 1;

  std::int64_t save_every = 20, evaluate_every = 10, held_out = 8;  // steps, steps, microbatches
  std::string directory = "pretrain-steps";
};

// ---- data ----------------------------------------------------------------------------------------------------------

/// A text as windows of `length` + 1 bytes. The last windows are held out for evaluation.
struct text_windows {
  std::vector<unsigned char> bytes;
  std::int64_t length = 0, held_out = 0;

  std::int64_t count() const { return (static_cast<std::int64_t>(bytes.size()) - 1) / length; }
  /// Returns the window of training sample `n`: all training windows, mixed and repeated, the same on every mesh.
  std::int64_t of_sample(std::int64_t n) const { return n % (count() - held_out) * 7919 % (count() - held_out); }
  std::int64_t of_held_out(std::int64_t n) const { return count() - held_out + n; }

  /// Fills this rank's part of a microbatch. `window(sample)` returns the window of a sample of the microbatch.
  template <class Window>
  void fill(pl::host_tokens& ids, pl::host_tokens& labels, Window&& window) const {
    for (std::int64_t row = 0; row < ids.rows(); ++row)
      for (const pl::token_run& run : ids.runs())  // in zigzag order a rank has two ranges of positions
        for (std::int64_t i = 0; i < run.length; ++i) {
          const std::int64_t at = window(ids.sample(row)) * length + run.position + i;
          ids.row(row)[run.at + i] = bytes[static_cast<std::size_t>(at)];
          labels.row(row)[run.at + i] = bytes[static_cast<std::size_t>(at + 1)];
        }
  }
};

text_windows read_text(const char* path, const settings& s) {
  text_windows text{{}, s.length, s.held_out * s.samples};
  std::FILE* const file = std::fopen(path, "rb");
  if (!file) pl::fail({"cannot read ", path});
  for (int byte; (byte = std::getc(file)) != EOF;) text.bytes.push_back(static_cast<unsigned char>(byte));
  std::fclose(file);
  if (text.count() <= text.held_out)
    pl::fail({path, " has ", text.bytes.size(), " bytes, and ", text.held_out, " sequences of ", s.length,
              " are held out; use a longer text, or lower settings::held_out"});
  return text;
}

// ---- the loop ------------------------------------------------------------------------------------------------------

volatile std::sig_atomic_t interrupted = 0;

template <class Device>
void train(Device& device, const pl::any_communicator& all, const settings& s, const text_windows& text,
           std::int64_t steps) {
  using stage = pl::llama<precision, strategy, Device>;
  pl::mesh_shape mesh;
  for (const auto& [axis, extent] : {std::pair{pl::axis_of<pl::dp>, s.dp},
                                     {pl::axis_of<pl::pp>, s.pp},
                                     {pl::axis_of<pl::cp>, s.cp},
                                     {pl::axis_of<pl::tp>, s.tp},
                                     {pl::axis_of<pl::tp_rep>, std::int64_t{1}}})
    mesh.add(axis, extent);
  pl::pipeline_world ranks(mesh, all);
  const pl::context<Device> ctx{device, ranks.stage(),
                                pl::llama_sizes<strategy>(s.model, ranks.stage().shape(), s.samples, s.length), s.seed};

  const pl::schedule plan = pl::parse_schedule(s.schedule, static_cast<int>(s.pp), static_cast<int>(s.microbatches));
  const auto parts = pl::split_layers(pl::stage_costs_of(pl::llama_part_flops(s.model, s.length), s.model.layers),
                                      plan.shape.stages());
  pl::pipeline_options options;
  options.parallel.level = s.dp * s.cp > 1 ? s.zero : pl::zero_level::replicated;
  pl::pipeline<stage> model(
      ctx, ranks.along(), plan, parts,
      [&](pl::stage_layers part, stage* first) {
        return std::make_unique<stage>(ctx, s.model, pl::llama_options{}, part, first);
      },
      options);
  pl::adamw<precision, Device> optimizer;
  const pl::lr_schedule rate({.peak = s.rate, .steps = steps, .warmup_steps = std::min<std::int64_t>(10, steps)});

  pl::checkpoint_saver saver(device, ranks.root(), {.directory = s.directory, .keep = {.last = 2}});
  const auto found = pl::resume_or_initialize(ctx, ranks.root(), model, optimizer, s.directory);  // of any mesh
  std::int64_t done = found ? static_cast<std::int64_t>(found->step) : 0;
  const bool speaks = ranks.root().rank() == 0;
  if (speaks && found) std::printf("resumed %s\n", found->path.c_str());
  const auto report = [&](const std::vector<pl::finished_save>& saves) {
    for (const pl::finished_save& save : saves)
      if (speaks)
        std::printf("%s step %d%s\n", save.failure.empty() ? "saved" : "did not save", static_cast<int>(save.step),
                    save.failure.empty() ? "" : (": " + save.failure).c_str());
  };

  pl::training_step<stage> step(ctx, model, optimizer, s.clip);
  const auto begin = std::chrono::steady_clock::now();
  const std::int64_t begun = done;
  for (bool ends = done >= steps; !ends;) {
    const std::int64_t first = done * s.microbatches * s.samples;
    step.load(ctx, first, [&](std::int64_t k, pl::host_tokens& ids, pl::host_tokens& labels) {
      text.fill(ids, labels, [&](std::int64_t sample) { return text.of_sample(first + k * s.samples + sample); });
    });
    optimizer.begin_step(ctx, rate.at(done));
    step.run(ctx);
    const pl::step_result result = step.result(ctx);
    ++done;
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const double each = seconds / static_cast<double>(done - begun);
    if (speaks)
      std::printf("%4.0f s left  step %d  loss %.4f  norm %.3f  %.0f tokens/s\n",
                  each * static_cast<double>(steps - done), static_cast<int>(done), result.loss, result.gradient_norm,
                  static_cast<double>(result.tokens) / each);
    const bool stop = pl::all_reduce_scalar(device, ranks.root(), interrupted ? 1.0 : 0.0, pl::reduce_op::max) != 0;
    ends = stop || done == steps;
    if (done % s.evaluate_every == 0 || ends) {
      const auto fill = [&](std::int64_t k, pl::host_tokens& ids, pl::host_tokens& labels, pl::host_starts&) {
        text.fill(ids, labels, [&](std::int64_t sample) { return text.of_held_out(k * s.samples + sample); });
      };
      const auto loss = pl::evaluate(ctx, model, s.held_out, fill, [] { return false; });
      if (speaks) std::printf("held-out loss %.4f\n", loss->mean());
    }
    if (done % s.save_every == 0 || ends)
      report(saver.save(ctx, model, optimizer, static_cast<std::uint64_t>(done)));  // copies, and returns
    report(saver.finished(device));
  }
  report(saver.wait(device));
}

}  // namespace

int main(int argc, char** argv) try {
  settings s;
  for (int i = 4; i < std::min(argc, 8); ++i) *std::array{&s.dp, &s.pp, &s.cp, &s.tp}[i - 4] = std::atoll(argv[i]);
  const std::string backend = argc > 3 ? argv[3] : "threads";
  if (argc < 2) return std::fprintf(stderr, "usage: pretrain TEXT [STEPS [threads|mpi|nccl [DP PP CP TP]]]\n"), 2;
  const std::int64_t steps = argc > 2 ? std::atoll(argv[2]) : 100;
  const text_windows text = read_text(argv[1], s);
  for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, [](int) { interrupted = 1; });
  const auto on_cpu = [&](const auto& ranks) {
    pl::cpu device;
    train(device, pl::any_communicator(ranks), s, text, steps);
  };
  if (backend == "threads") {
    pl::threads::run(static_cast<int>(s.dp * s.pp * s.cp * s.tp), on_cpu);
    return 0;
  }
#ifdef PLAIT_WITH_MPI
  if (backend == "mpi") return pl::mpi::run(argc, argv, on_cpu);
#endif
#ifdef PLAIT_WITH_NCCL
  if (backend == "nccl") {
    pl::cuda device({.device = pl::nccl::place_from_environment().local_rank});
    train(device, pl::any_communicator(pl::nccl::from_environment(device)), s, text, steps);
    return 0;
  }
#endif
  pl::fail({"backend '", backend, "' is not threads, or was not compiled in: mpi, nccl"});
} catch (const std::exception& e) {
  std::fprintf(stderr, "pretrain: %s\n", e.what());
  return 1;
}
