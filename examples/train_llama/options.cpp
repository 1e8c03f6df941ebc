#include "options.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "../reading_error.hpp"
#include "check_options.hpp"
#include "number_lists.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/schedule/parse.hpp"

namespace {

/// The command line without its first word, and without the values of any --data but the last: as with every other
/// option, the last counts.
std::vector<std::string> last_data(int argc, char** argv) {
  const auto is_data = [](const std::string& word) { return word == "--data" || word.starts_with("--data="); };
  std::vector<std::string> words;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (const auto earlier = std::find_if(words.begin(), words.end(), is_data);
        is_data(word) && earlier != words.end()) {
      const auto end = std::find_if(earlier + 1, words.end(), [](const std::string& w) { return w.starts_with("--"); });
      words.erase(earlier, end);
    }
    words.push_back(word);
  }
  return words;
}

/// The options of a parsed command line by name: numbers in their shortest form, so that 1e-3 is 0.001, no text as '',
/// and of switches those that are on.
std::vector<std::pair<std::string, std::string>> named_values(const CLI::App& app) {
  std::vector<std::pair<std::string, std::string>> all;
  for (const CLI::Option* o : app.get_options()) {
    if (o == app.get_help_ptr() || o == app.get_version_ptr() || !o->get_configurable()) continue;
    if (o->get_items_expected_max() == 0) {
      if (o->count() > 0 && o->as<bool>()) all.emplace_back(o->get_name(), "");
      continue;
    }
    std::string value = o->count() > 0 ? "" : o->get_default_str();
    if (o->count() > 0)
      for (const std::string& word : o->reduced_results()) value += (value.empty() ? "" : " ") + word;
    if (o->get_type_name() == "FLOAT") value = fmt::format("{}", std::strtod(value.c_str(), nullptr));
    if (o->get_type_name() == "INT") value = fmt::format("{}", std::strtoll(value.c_str(), nullptr, 0));
    all.emplace_back(o->get_name(), value.empty() ? "''" : std::move(value));
  }
  return all;
}

}  // namespace

bool parse(int argc, char** argv, options& opt, bool speaks) {
  CLI::App app{
      "Trains a Llama on text, on any mesh of data-, pipeline-, context- and tensor-parallel ranks, and samples from "
      "it.",
      "train_llama"};
  app.get_formatter()->column_width(34);
  app.set_version_flag("--version",
                       fmt::format("plait {}.{}.{}", PLAIT_VERSION_MAJOR, PLAIT_VERSION_MINOR, PLAIT_VERSION_PATCH));
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  const auto group = [&](const char* name) { app.option_defaults()->group(name); };
  auto seed = static_cast<std::int64_t>(opt.seed);
  group("Ranks");
  app.add_option("--mesh", opt.mesh, "extents of the axes dp, pp, cp and tp, as in dp=2,tp=4")->capture_default_str();
  app.add_option("--device", opt.device, "cpu or cuda")->capture_default_str();
  app.add_option("--backend", opt.backend,
                 "threads: ranks of this process, on cuda they share a GPU; mpi: under mpirun; nccl: a GPU per rank, "
                 "under torchrun, srun or mpirun, or all in this process")
      ->capture_default_str();
  app.add_option(
         "--deadline", opt.deadline,
         "with mpi and nccl, the seconds after which a collective that is not over ends all ranks, since one is "
         "lost; 0: they wait for ever")
      ->capture_default_str();
  group("Model");
  app.add_option("--model", opt.model, "a preset or a Hugging Face config.json")->capture_default_str();
  app.add_option("--init-from", opt.init_from,
                 "the weights to begin from: a model directory of Hugging Face, or a saved step or the "
                 "newest in a folder of them, whatever layout saved it; all have the model's shape, too, but steps of "
                 "import-hf, which need --model");
  app.add_option("--weights-order", opt.weights_order,
                 "whose names and order the tensors of --init-from have, beside a config.json of Hugging Face: "
                 "hugging-face, megatron (q, k, v and gate, up in one) or meta (rotary pairs)")
      ->capture_default_str();
  app.add_option("--export-hf", opt.export_hf,
                 "a new directory, to which the trained model is written as transformers opens it");
  app.add_option("--export-order", opt.export_order,
                 "in whose names and order --export-hf writes the tensors: hugging-face, which transformers opens, "
                 "megatron or meta, as --weights-order reads them")
      ->capture_default_str();
  group("Parallelism");
  app.add_option("--strategy", opt.strategy, "sp: tensor and sequence parallel; tp: tensor parallel alone")
      ->capture_default_str();
  app.add_option(
         "--data-parallel", opt.data_parallel,
         "what is cut over the data ranks of dp and cp: nothing (replicated), the optimizer's state (zero1), also "
         "reduced gradients (zero2), also parameters between their uses (zero3)")
      ->capture_default_str();
  app.add_option(
         "--shard", opt.shard,
         "with zero1 to zero3, where units of parameters are cut: even (anywhere), whole (between matrices, for "
         "muon), or blocks (of 256 elements, for --moments int8)")
      ->capture_default_str();
  app.add_option(
         "--replicate-over", opt.replicate_over,
         "with zero1 to zero3, a hybrid: pieces are not cut over this axis, dp or cp, but equal; none: over both "
         "they are cut")
      ->capture_default_str();
  app.add_option("--prefetch", opt.prefetch, "with zero3, how many uses ahead a unit's parameters are gathered")
      ->capture_default_str();
  app.add_option("--reshard-after-forward", opt.reshard_after_forward,
                 "with zero3, whether parameters are released after a forward pass and gathered again: on or off")
      ->capture_default_str();
  app.add_option("--overlap", opt.overlap,
                 "whether a unit's gradients are reduced under the backward pass (on) or after it (off)")
      ->capture_default_str();
  app.add_option("--tensor-overlap", opt.tensor_overlap,
                 "in how many chunks linears gather and reduce over tp, beside their products; 1: not beside them")
      ->capture_default_str();
  app.add_option("--reduce-in", opt.reduce_in,
                 "what gradients travel as when they are summed over data ranks: full (their own type), bf16, or, of "
                 "those that --gradients keeps in bf16, float, in which sums are rounded once")
      ->capture_default_str();
  app.add_option("--attention", opt.attention,
                 "how attention sees a sequence that is sharded over cp: ring, all_gather_kv or ulysses, then "
                 ":zigzag or :contiguous, how it is placed")
      ->capture_default_str();
  app.add_option("--schedule", opt.schedule, fmt::format("of the pipeline: {}", plait::schedule_names))
      ->capture_default_str();
  app.add_option("--split", opt.split,
                 "of the layers over the stages: flops (by counted operations, with the head's), measured, or even")
      ->capture_default_str();
  group("Data");
  app.add_option("--data", opt.data, "text files (bytes), Megatron .bin/.idx or flat .bin token files")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--data-format", opt.data_format, "auto, bytes, megatron or nanogpt")->capture_default_str();
  std::string weights;
  app.add_option("--data-weights", weights,
                 "as in 0.7,0.3: samples are drawn from each --data in this proportion, which begins again, in another "
                 "order, as often as it takes; without it, --data are one stream");
  app.add_option(
         "--documents", opt.documents,
         "joined: tokens see those of documents before theirs in a sequence; apart: they do not, and no loss is "
         "taken across documents")
      ->capture_default_str();
  app.add_option("--end-of-document", opt.end_of_document,
                 "the token that ends a document; -1: documents end where the index of Megatron files says")
      ->capture_default_str();
  app.add_option("--on-new-data", opt.on_new_data,
                 "where --resume names a step that was trained on other data: stop, or begin the new data")
      ->capture_default_str();
  app.add_option(
         "--on-new-schedule", opt.on_new_schedule,
         "where --resume names a step that was trained with another course of the learning rate (--lr, --warmup, "
         "--min-lr-ratio, --lr-schedule, --steps): stop, or follow the new one from that step on")
      ->capture_default_str();
  group("Steps");
  app.add_option("--steps", opt.steps, "optimizer steps")->capture_default_str();
  app.add_option("--seq", opt.seq, "tokens in a sequence")->capture_default_str();
  app.add_option("--micro-batch", opt.micro_batch, "sequences per data-parallel rank in a microbatch")
      ->capture_default_str();
  app.add_option("--global-batch", opt.global_batch, "sequences per step over all ranks; 0: one microbatch")
      ->capture_default_str();
  app.add_option("--seed", seed, "of weights, data order and dropout")->capture_default_str();
  group("Numbers and memory");
  app.add_option(
         "--precision", opt.precision,
         "float, double (cpu), bf16 (with float master weights; slower than float on a CPU without avx512_bf16) or "
         "bf16-no-masters (weights in bf16 alone, rounded stochastically)")
      ->capture_default_str();
  app.add_option("--gradients", opt.gradients,
                 "what the gradients of parameters are kept in: full (float; with --precision double double) or, with "
                 "--precision bf16 and bf16-no-masters, bf16, to which each pass adds a sum in float")
      ->capture_default_str();
  app.add_option("--moments", opt.moments,
                 "of AdamW, for each element two, and of Muon, one: full (floats; with --precision double doubles), "
                 "bf16 or int8 (8 bits, "
                 "and a scale for each 256), rounded stochastically")
      ->capture_default_str();
  app.add_option(
         "--offload", opt.offload,
         "on cuda: what lies in the host's memory, pinned, and not on the GPU: none, or optimizer (moments, and "
         "the float masters of bf16); an update waits for the bus, and no bit of it changes")
      ->capture_default_str();
  app.add_option(
         "--deterministic", opt.deterministic,
         "the same bits on every mesh, schedule and number of microbatches, on the CPU: off, or into how many leaves "
         "sums are cut over features, samples of a step and the sequence, as in 8,16,4; 8 is 8,8,1")
      ->capture_default_str();
  app.add_option("--check", opt.check,
                 "in which steps ranks compare what must be equal on them (tokens, parameters, gradients, what layers "
                 "take): first (and the first after a load), off, always, or every:N steps; with a number behind a "
                 "second colon, as in every:100:1e-5, differences up to so much of a value's norm are no error")
      ->capture_default_str();
  app.add_flag("--tf32", opt.tf32, "on cuda in float: products on tensor cores, with factors of 10 bits");
  app.add_option("--recompute", opt.recompute,
                 "what layers make again for the backward pass: none, selective (what is cheap), full (all but their "
                 "input), every:K (each K-th layer in full), or budget:SIZE (the cheapest with which a rank's layers "
                 "keep no more than, for instance, 512M)")
      ->capture_default_str();
  group("Checkpoints");
  app.add_option("--checkpoint-dir", opt.checkpoint_dir,
                 "where the training state is saved, at the end and when a signal ends the run; SIGUSR1 saves at once");
  app.add_option("--save-every", opt.save_every,
                 "save every so many steps, while training goes on; 0: not before the end")
      ->capture_default_str();
  app.add_option("--keep", opt.keep, "how many of the newest saved steps stay")->capture_default_str();
  app.add_option("--keep-every", opt.keep_every, "saved steps that this number divides stay too; 0: none of them")
      ->capture_default_str();
  app.add_option("--keep-best", opt.keep_best,
                 "none, or held-out: each save computes the loss of what --held-out keeps, and the step that has the "
                 "least stays too, in this run and those that go on from it")
      ->capture_default_str();
  app.add_option("--checkpoint-io", opt.checkpoint_io,
                 "how steps are written: uring (io_uring), threads (ordinary calls), or auto, which is the first where "
                 "it is there")
      ->capture_default_str();
  app.add_option("--checkpoint-staging", opt.checkpoint_staging,
                 "on cuda: the host's memory that a save copies to, twice a rank's share: pinned, or pageable, for "
                 "which training waits longer")
      ->capture_default_str();
  app.add_option(
         "--resume", opt.resume,
         "what to go on from: none, a saved step or a folder of them, or auto (the newest in --checkpoint-dir, if "
         "there is one), on whatever mesh and with whatever layout it was saved")
      ->capture_default_str();
  group("Optimizer and loss");
  app.add_option("--lr", opt.lr, "peak learning rate")->capture_default_str();
  app.add_option("--warmup", opt.warmup, "warm-up steps; -1: a tenth of the steps")->capture_default_str();
  app.add_option("--min-lr-ratio", opt.min_lr_ratio, "last learning rate over the peak")->capture_default_str();
  app.add_option("--lr-schedule", opt.lr_schedule, "cosine, linear or constant")->capture_default_str();
  app.add_option("--clip", opt.clip, "limit of the global gradient norm; 0: none")->capture_default_str();
  app.add_option("--on-nonfinite", opt.on_nonfinite,
                 "a step whose gradients are not finite changes no weight: then stop, or skip it and go on")
      ->capture_default_str();
  app.add_option("--weight-decay", opt.weight_decay, "of matrices")->capture_default_str();
  app.add_option(
         "--optimizer", opt.optimizer,
         "adamw, or muon: the matrices of hidden layers move in nearly orthogonal directions, and AdamW updates "
         "the embedding, the head and everything else")
      ->capture_default_str();
  app.add_option("--muon-momentum", opt.muon_momentum, "Nesterov's, of Muon")->capture_default_str();
  app.add_option("--muon-scale", opt.muon_scale,
                 "of Muon's updates: match_rms_adamw (as large as AdamW's, for its --lr) or original (by the matrix' "
                 "shape, for a larger --muon-lr-ratio)")
      ->capture_default_str();
  app.add_option("--muon-lr-ratio", opt.muon_lr_ratio, "learning rate of Muon's matrices over --lr")
      ->capture_default_str();
  app.add_option("--dropout", opt.dropout, "on the output of each residual branch")->capture_default_str();
  app.add_option("--label-smoothing", opt.label_smoothing, "weight of the uniform distribution")->capture_default_str();
  app.add_option("--z-loss", opt.z_loss, "weight of lse^2 in the loss")->capture_default_str();
  group("Evaluation");
  app.add_option(
         "--held-out", opt.held_out,
         "fraction of the data, of each of several, kept for evaluation at the end, which draws from several by "
         "--data-weights")
      ->capture_default_str();
  group("Device");
  app.add_option("--threads", opt.threads, "threads of each rank's matrix products, on the CPU")->capture_default_str();
  app.add_option("--graph", opt.graph, "on cuda, steps replayed as a graph: on, off or auto (where it can be)")
      ->capture_default_str();
  app.add_option("--attention-kernel", opt.attention_kernel, "on cuda: own, cudnn, or auto (cuDNN's where it can be)")
      ->capture_default_str();
  app.add_option("--attention-sums", opt.attention_sums,
                 "on cuda, the order in which cuDNN sums attention's gradients: fixed (equal bits in every run) or any "
                 "(faster)")
      ->capture_default_str();
  app.add_option("--products", opt.products,
                 "on cuda, file of the algorithms of matrix products: read if it is there, else measured in the first "
                 "step and written");
  app.add_option("--peak-tflops", opt.peak_tflops,
                 "peak of a device (on the CPU, of a process), for MFU; 0: as known for the GPU")
      ->capture_default_str();
  group("Logs and pictures");
  app.add_option(
      "--log", opt.log,
      "JSON lines: one per step, then a summary; what an earlier run has logged there is renamed, to FILE.1");
  app.add_option("--log-hashes", opt.log_hashes,
                 "every so many steps, before the first and after the last, log a hash of each parameter, by which "
                 "checkpoint_tool compare-runs finds where two runs differ; 0: never")
      ->capture_default_str();
  app.add_flag("--log-gradient-hashes", opt.log_gradient_hashes,
               "with --log-hashes, also one of each parameter's gradient, summed over all ranks and not yet clipped");
  app.add_option("--plot", opt.plot, "loss curve as SVG, with held-out losses and what --log has of earlier runs");
  app.add_option("--report", opt.report,
                 "a page (HTML) of what --log has when the run ends: curves, communication, memory, options, and the "
                 "step of --timeline; train_llama report LOG PAGE makes one of a log");
  app.add_option("--trace", opt.trace, "one step of all ranks as JSON for chrome://tracing or ui.perfetto.dev");
  app.add_option("--timeline", opt.timeline, "a step as SVG, simulated and measured");
  group("Sampled text");
  app.add_option("--sample", opt.sample,
                 "bytes of text to sample at the end, from a model of bytes; 0: none, as with data that are tokens")
      ->capture_default_str();
  app.add_option("--temperature", opt.temperature, "of the sampling; 0: the likeliest")->capture_default_str();
  app.add_option("--prompt", opt.prompt, "what the sampled text begins with")->capture_default_str();
  group("Planning");
  app.add_option("--cluster", opt.cluster,
                 "the machine, to predict a step's time and memory: known hardware or a description that ends in "
                 ".json, and its number of ranks, as in cpu:8 or my.json:8 (see plan_llama --calibrate)");
  app.add_option("--plan", opt.plan,
                 "given, or auto: of --mesh, --schedule, --data-parallel, --replicate-over, --micro-batch and "
                 "--recompute, what is not given is "
                 "that of the layout that is predicted to be fastest on --cluster for --global-batch")
      ->capture_default_str();
  app.add_option(
         "--memory-share", opt.memory_share,
         "the share of the memory available here that a run may need: one that needs more is refused before it starts")
      ->capture_default_str();
  app.add_flag("--dry-run", opt.dry_run, "print the plan (layouts, collectives, memory) and stop");
  group("Options in a file");
  app.set_config("--config", "", "a TOML file of options, such as --write-config writes; the command line comes first");
  app.allow_config_extras(CLI::config_extras_mode::error);
  std::string written;
  const CLI::Option* const writes =
      app.add_option("--write-config", written, "write the options that are given to a file, and stop")
          ->configurable(false);
  const std::vector<std::string> words = last_data(argc, argv);
  try {
    std::vector<std::string> reversed(words.rbegin(), words.rend());  // the order in which CLI11 takes them
    app.parse(reversed);
    check_whole_numbers(app);
  } catch (const CLI::CallForVersion& version) {
    if (speaks) fmt::print("{}\n", version.what());
    return false;
  } catch (const CLI::CallForHelp&) {
    if (speaks) fmt::print("{}", app.help());
    return false;
  } catch (const CLI::FileError& e) {
    plait::fail({"--config: ", e.what()});
  } catch (const CLI::ConfigError& e) {
    const std::string why = e.what(), unread = "INI was not able to parse ";
    const std::string name = "--" + why.substr(std::min(why.size(), unread.size()));
    plait::fail({"--config: ", why.starts_with(unread) ? "there is no option " + name + like(app, name) : why});
  } catch (const CLI::ParseError& e) {
    plait::fail(reading_error(app, e, words) + " (--help lists the options)");
  }
  opt.by_name = named_values(app);
  const given_option given = [&](const char* option) { return app.count(option) > 0; };
  opt.model_given = given("--model");
  opt.sample_given = given("--sample") || given("--prompt") || given("--temperature");
  opt.mesh_given = given("--mesh");
  opt.schedule_given = given("--schedule");
  opt.data_parallel_given = given("--data-parallel");
  opt.micro_batch_given = given("--micro-batch");
  opt.recompute_given = given("--recompute");
  opt.replicate_over_given = given("--replicate-over");
  opt.weights_order_given = given("--weights-order");
  opt.overlap_given = given("--overlap");
  opt.attention_given = given("--attention");
  opt.seed = static_cast<std::uint64_t>(seed);
  opt.data_weights = parse_weights(weights, opt.data.size());
  opt.leaves = parse_deterministic(opt.deterministic);
  opt.compared = parse_check(opt.check);
  check_options(opt, given);
  if (writes->count() == 0) return true;
  if (speaks) plait::write_file_atomically(written, app.config_to_str(), "--write-config");
  return false;
}
