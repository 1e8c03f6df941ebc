#include "options.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "plait/data/text.hpp"
#include "plait/data/token_source.hpp"
#include "plait/mesh/parse.hpp"
#include "plait/models/llama_config_json.hpp"
#include "plait/models/strategies.hpp"

namespace {

void one_of(const char* knob, const std::string& value, std::initializer_list<const char*> legal) {
  std::string list;
  for (const char* l : legal) {
    if (value == l) return;
    list += (list.empty() ? "" : ", ") + std::string(l);
  }
  plait::fail(fmt::format("{} '{}' is unknown; legal are {}", knob, value, list));
}

/// `value` must be a multiple of `parts`.
void divides(const char* knob, std::int64_t value, const std::string& by, std::int64_t parts) {
  if (value % parts == 0) return;
  plait::fail(fmt::format("{} is {}, which is not divisible by {} = {}; the nearest that are: {} and {}", knob, value, by, parts,
                          value / parts * parts, (value / parts + 1) * parts));
}

void at_least(const char* knob, std::int64_t value, std::int64_t least) {
  if (value < least) plait::fail(fmt::format("{} is {}; at least {} is legal", knob, value, least));
}

}  // namespace

bool parse(int argc, char** argv, options& opt) {
  CLI::App app{"Trains a Llama on text, on any mesh of data- and tensor-parallel ranks, and samples from it."};
  app.get_formatter()->column_width(34);
  app.add_option("--mesh", opt.mesh, "extents of the axes dp and tp, as in dp=2,tp=4")->capture_default_str();
  app.add_option("--backend", opt.backend, "threads: ranks of this process; mpi: under mpirun")->capture_default_str();
  app.add_option("--model", opt.model, "a preset or a Hugging Face config.json")->capture_default_str();
  app.add_option("--strategy", opt.strategy, "sp: tensor and sequence parallel; tp: tensor parallel alone")->capture_default_str();
  app.add_option("--store", opt.store, "whole: parameters replicated over dp; sharded: stored over dp, gathered for use")->capture_default_str();
  app.add_option("--data", opt.data, "text files (bytes), Megatron .bin/.idx or flat .bin token files");
  app.add_option("--data-format", opt.data_format, "auto, bytes, megatron or nanogpt")->capture_default_str();
  app.add_option("--steps", opt.steps, "optimizer steps")->capture_default_str();
  app.add_option("--seq", opt.seq, "tokens in a sequence")->capture_default_str();
  app.add_option("--micro-batch", opt.micro_batch, "sequences per data-parallel rank in a microbatch")->capture_default_str();
  app.add_option("--global-batch", opt.global_batch, "sequences per step over all ranks; 0: one microbatch")->capture_default_str();
  app.add_option("--seed", opt.seed, "of weights, data order and dropout")->capture_default_str();
  app.add_option("--precision", opt.precision, "float or double")->capture_default_str();
  app.add_option("--recompute", opt.recompute, "none, selective or full")->capture_default_str();
  app.add_option("--lr", opt.lr, "peak learning rate")->capture_default_str();
  app.add_option("--warmup", opt.warmup, "warm-up steps; -1: a tenth of the steps")->capture_default_str();
  app.add_option("--min-lr-ratio", opt.min_lr_ratio, "last learning rate over the peak")->capture_default_str();
  app.add_option("--lr-schedule", opt.lr_schedule, "cosine, linear or constant")->capture_default_str();
  app.add_option("--clip", opt.clip, "limit of the global gradient norm; 0: none")->capture_default_str();
  app.add_option("--weight-decay", opt.weight_decay, "of matrices")->capture_default_str();
  app.add_option("--dropout", opt.dropout, "on the output of each residual branch")->capture_default_str();
  app.add_option("--label-smoothing", opt.label_smoothing, "weight of the uniform distribution")->capture_default_str();
  app.add_option("--z-loss", opt.z_loss, "weight of lse^2 in the loss")->capture_default_str();
  app.add_option("--held-out", opt.held_out, "fraction of the data kept for evaluation at the end")->capture_default_str();
  app.add_option("--threads", opt.threads, "threads of each rank's matrix products")->capture_default_str();
  app.add_option("--log", opt.log, "JSON lines: one per step, then a summary");
  app.add_option("--plot", opt.plot, "loss curve as SVG");
  app.add_option("--sample", opt.sample, "bytes of text to sample at the end; 0: none")->capture_default_str();
  app.add_option("--temperature", opt.temperature, "of the sampling; 0: the likeliest")->capture_default_str();
  app.add_option("--prompt", opt.prompt, "what the sampled text begins with")->capture_default_str();
  app.add_flag("--dry-run", opt.dry_run, "print the plan (layouts, collectives, memory) and stop");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return false;
  } catch (const CLI::ParseError& e) {
    plait::fail(std::string(e.what()) + " (--help lists the options)");
  }
  one_of("--backend", opt.backend, {"threads", "mpi"});
  one_of("--strategy", opt.strategy, {"sp", "tp"});
  one_of("--store", opt.store, {"whole", "sharded"});
  one_of("--precision", opt.precision, {"float", "double"});
  one_of("--recompute", opt.recompute, {"none", "selective", "full"});
  at_least("--steps", opt.steps, 0);
  at_least("--seq", opt.seq, 1);
  at_least("--micro-batch", opt.micro_batch, 1);
  at_least("--global-batch", opt.global_batch, 0);
  at_least("--threads", opt.threads, 1);
  at_least("--sample", opt.sample, 0);
  const auto in_range = [](const char* knob, double value, double low, double below) {
    if (!(value >= low && value < below))
      plait::fail(fmt::format("{} is {}; legal is at least {} and below {}", knob, value, low, below));
  };
  in_range("--dropout", opt.dropout, 0, 1);
  in_range("--label-smoothing", opt.label_smoothing, 0, 1);
  in_range("--z-loss", opt.z_loss, 0, 1e6);
  in_range("--clip", opt.clip, 0, 1e30);
  in_range("--weight-decay", opt.weight_decay, 0, 1e6);
  in_range("--temperature", opt.temperature, 0, 1e6);
  return true;
}

setup prepare(const options& opt, std::int64_t ranks) {
  using user_mesh = plait::mesh<plait::axis<plait::dp>, plait::axis<plait::tp>>;
  const plait::mesh_shape given = plait::parse_mesh<user_mesh>(opt.mesh, ranks);
  const std::int64_t dp = given.extent(plait::axis_of<plait::dp>), tp = given.extent(plait::axis_of<plait::tp>);

  setup s{opt, plait::load_llama_config(opt.model), {}, 1, 1, {},
          plait::lr_schedule({.peak = opt.lr, .steps = std::max<std::int64_t>(opt.steps, 1),
                              .warmup_steps = opt.warmup < 0 ? std::min(opt.steps, (opt.steps + 9) / 10) : opt.warmup,
                              .min_ratio = opt.min_lr_ratio, .decay = plait::lr_decay_from(opt.lr_schedule)}),
          0};
  const plait::llama_config& c = s.config;
  const std::string by = "the extent of tp";
  divides("num_attention_heads", c.heads, by, tp);
  divides("intermediate_size", c.ffn, by, tp);
  if (opt.strategy == "sp") divides("--seq", opt.seq, by, tp);
  if (opt.store == "sharded") divides("hidden_size", c.hidden, "the extent of dp", dp);
  const plait::tensor_extents t = plait::split_tensor_ranks(tp, c.kv_heads);
  const std::int64_t local_heads = c.heads / tp, group = c.heads / c.kv_heads;
  if (local_heads % group != 0 && group % local_heads != 0)
    plait::fail(fmt::format("tp={}: each rank has {} of {} heads, which are neither whole groups nor a whole part of one group of {} "
                            "(num_key_value_heads is {}); choose a tp that divides num_key_value_heads or a multiple of it",
                            tp, local_heads, c.heads, group, c.kv_heads));
  if (opt.seq > c.max_position)
    plait::fail(fmt::format("--seq is {}, but the model's max_position_embeddings is {}", opt.seq, c.max_position));
  s.mesh = plait::megatron_sp::mesh(dp, t.tp, t.tp_rep).shape();
  s.sequences = opt.micro_batch * dp;
  const std::int64_t global = opt.global_batch == 0 ? s.sequences : opt.global_batch;
  divides("--global-batch", global, fmt::format("--micro-batch {} times dp={}", opt.micro_batch, dp), s.sequences);
  s.microbatches = global / s.sequences;
  if (opt.data.empty()) {
    if (!opt.dry_run) plait::fail("--data is missing: name a text file, or token files (.bin)");
    return s;
  }
  plait::token_source source({.paths = opt.data, .format = plait::token_format_from(opt.data_format), .vocab = c.vocab});
  source.check_tokens();
  s.entropy = plait::unigram_entropy(source);
  s.data.emplace(source, plait::sampler_config{.seq = opt.seq, .seed = opt.seed, .held_out = opt.held_out});
  return s;
}
