#include "options.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>

#include "plait/schedule/parse.hpp"
#include "recompute.hpp"

namespace {

void one_of(const char* knob, const std::string& value, std::initializer_list<const char*> legal) {
  std::string list;
  for (const char* l : legal) {
    if (value == l) return;
    list += (list.empty() ? "" : ", ") + std::string(l);
  }
  plait::fail(fmt::format("{} '{}' is unknown; legal are {}", knob, value, list));
}

void within(const char* knob, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value < least) plait::fail(fmt::format("{} is {}; at least {} is legal", knob, value, least));
  if (value > most) plait::fail(fmt::format("{} is {}; at most {} is legal", knob, value, most));
}

/// Refuses options that are for another kind of device.
void check_device(const options& opt) {
  if (opt.device == "cuda") {
    if (opt.backend == "mpi")
      plait::fail(
          "--backend mpi moves the host's memory; with --device cuda, --backend nccl is legal (which mpirun may start) "
          "and threads");
    if (opt.precision == "double")
      plait::fail("--precision double is not there for --device cuda; legal are float, bf16 and bf16-no-masters");
    // What is instantiated; see cuda_float.cpp and cuda_bf16.cpp.
    if (opt.precision == "float" && opt.strategy != "sp")
      plait::fail("--device cuda --precision float is built for --strategy sp alone; here it is " + opt.strategy +
                  " (bf16 has either)");
    if (opt.tf32 && opt.precision != "float")
      plait::fail("--tf32 is for --precision float; here it is " + opt.precision);
    if (opt.attention_kernel == "cudnn" && !in_bf16(opt))
      plait::fail("--attention-kernel cudnn computes in bf16; with --precision " + opt.precision +
                  ", auto and own are legal");
    if (opt.attention_sums == "any" && (!in_bf16(opt) || opt.attention_kernel == "own"))
      plait::fail(
          "--attention-sums any is an order of cuDNN's, which computes in bf16; it needs --precision bf16 and "
          "--attention-kernel auto or cudnn, and here they are " +
          opt.precision + " and " + opt.attention_kernel);
    if (opt.graph == "on" && opt.dropout > 0)
      plait::fail(
          fmt::format("--graph on with --dropout {}: a replay would drop the same elements in every step; legal "
                      "are --graph off and --dropout 0",
                      opt.dropout));
    if (opt.threads != 1)
      plait::fail(
          fmt::format("--threads is {}, but with --device cuda no product runs on the CPU; leave it out", opt.threads));
    return;
  }
  if (opt.backend == "nccl")
    plait::fail("--backend nccl moves the memory of GPUs: give --device cuda, or --backend threads or mpi");
  if (opt.tf32) plait::fail("--tf32 needs --device cuda; the CPU computes float in full");
  if (opt.graph == "on") plait::fail("--graph on needs --device cuda; on the CPU, auto and off are legal");
  if (!opt.products.empty())
    plait::fail("--products needs --device cuda; the libraries of the CPU choose their algorithms themselves");
  if (opt.attention_kernel != "auto")
    plait::fail("--attention-kernel " + opt.attention_kernel + " needs --device cuda; on the CPU, auto is legal");
  if (opt.attention_sums != "fixed")
    plait::fail("--attention-sums " + opt.attention_sums + " needs --device cuda; on the CPU every sum has one order");
}

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
    if (o == app.get_help_ptr()) continue;
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

/// Reads --data-weights, of so many --data.
std::vector<double> parse_weights(const std::string& text, std::size_t sources) {
  std::vector<double> weights;
  for (std::size_t at = 0; !text.empty() && at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    const std::string word = text.substr(at, end - at);
    char* rest = nullptr;
    weights.push_back(std::strtod(word.c_str(), &rest));
    if (word.empty() || *rest != '\0')
      plait::fail(fmt::format("--data-weights {}: '{}' is no number; legal is as in 0.7,0.3", text, word));
    at = end + 1;
  }
  if (!weights.empty() && weights.size() != sources)
    plait::fail(fmt::format("--data-weights {}: {} weights for {} --data; give one for each, as in 0.7,0.3", text,
                            weights.size(), sources));
  return weights;
}

/// Returns the error of a command line that CLI11 cannot read, by the option that is meant.
std::string reading_error(const CLI::App& app, const CLI::ParseError& e, const std::vector<std::string>& words) {
  const std::string why = e.what(), unread = "Could not convert: ", name = why.substr(0, why.find(" = "));
  if (dynamic_cast<const CLI::ExtrasError*>(&e) != nullptr) {
    for (const std::string& word : words)  // the first that looks like an option and is none
      if (word.size() > 1 && word[0] == '-' && word.find_first_of("0123456789.") != 1 &&
          app.get_option_no_throw(word.substr(0, word.find('='))) == nullptr)
        return "there is no option " + word;
  }
  if (dynamic_cast<const CLI::ConversionError*>(&e) != nullptr && name.starts_with(unread)) {
    if (const CLI::Option* const o = app.get_option_no_throw(name.substr(unread.size()))) {
      const std::string type = o->get_type_name();
      return o->get_name() + " is '" + (o->results().empty() ? std::string() : o->results().back()) + "', which is " +
             (type == "INT"     ? "no whole number, or too large a one"
              : type == "FLOAT" ? "no number"
                                : "neither true nor false");
    }
  }
  return why;
}

}  // namespace

plait::numerics parse_deterministic(const std::string& text) {
  if (text == "off") return {};
  std::vector<std::int64_t> leaves;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    const std::string word = text.substr(at, end - at);
    char* rest = nullptr;
    const long long n = std::strtoll(word.c_str(), &rest, 10);
    if (word.empty() || *rest != '\0' || n < 1 || n > 4096 || leaves.size() == 3)
      plait::fail(fmt::format(
          "--deterministic {}: legal are off, and one to three numbers of leaves from 1 to 4096, as in 8,16,4", text));
    leaves.push_back(n);
    at = end + 1;
  }
  return {leaves[0], leaves.size() > 1 ? leaves[1] : leaves[0], leaves.size() > 2 ? leaves[2] : 1};
}

bool parse(int argc, char** argv, options& opt, bool speaks) {
  CLI::App app{"Trains a Llama on text, on any mesh of data- and tensor-parallel ranks, and samples from it.",
               "train_llama"};
  app.get_formatter()->column_width(34);
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  auto seed = static_cast<std::int64_t>(opt.seed);
  app.add_option("--mesh", opt.mesh, "extents of the axes dp, pp, cp and tp, as in dp=2,tp=4")->capture_default_str();
  app.add_option("--device", opt.device, "cpu or cuda")->capture_default_str();
  app.add_option("--backend", opt.backend,
                 "threads: ranks of this process, on cuda they share a GPU; mpi: under mpirun; nccl: a GPU per rank, "
                 "under torchrun, srun or mpirun, or all in this process")
      ->capture_default_str();
  app.add_option("--model", opt.model, "a preset or a Hugging Face config.json")->capture_default_str();
  app.add_option("--init-from", opt.init_from,
                 "the weights to begin from: a model directory of Hugging Face, which has the model's shape too, or, "
                 "with --model, a saved step or the newest in a folder of them, whatever layout saved it");
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
                 "what gradients travel as when they are summed over data ranks: full (their own type) or bf16")
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
  app.add_option("--steps", opt.steps, "optimizer steps")->capture_default_str();
  app.add_option("--seq", opt.seq, "tokens in a sequence")->capture_default_str();
  app.add_option("--micro-batch", opt.micro_batch, "sequences per data-parallel rank in a microbatch")
      ->capture_default_str();
  app.add_option("--global-batch", opt.global_batch, "sequences per step over all ranks; 0: one microbatch")
      ->capture_default_str();
  app.add_option("--seed", seed, "of weights, data order and dropout")->capture_default_str();
  app.add_option(
         "--precision", opt.precision,
         "float, double (cpu), bf16 (with float master weights; slower than float on a CPU without avx512_bf16) or "
         "bf16-no-masters (weights in bf16 alone, rounded stochastically)")
      ->capture_default_str();
  app.add_option(
         "--moments", opt.moments,
         "of AdamW, for each element two: full (floats; with --precision double doubles), bf16 or int8 (8 bits, "
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
  app.add_flag("--tf32", opt.tf32, "on cuda in float: products on tensor cores, with factors of 10 bits");
  app.add_option("--recompute", opt.recompute,
                 "what layers make again for the backward pass: none, selective (what is cheap), full (all but their "
                 "input), every:K (each K-th layer in full), or budget:SIZE (the cheapest with which a rank's layers "
                 "keep no more than, for instance, 512M)")
      ->capture_default_str();
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
  app.add_option(
         "--resume", opt.resume,
         "what to go on from: none, a saved step or a folder of them, or auto (the newest in --checkpoint-dir, if "
         "there is one), on whatever mesh and with whatever layout it was saved")
      ->capture_default_str();
  app.add_option("--lr", opt.lr, "peak learning rate")->capture_default_str();
  app.add_option("--warmup", opt.warmup, "warm-up steps; -1: a tenth of the steps")->capture_default_str();
  app.add_option("--min-lr-ratio", opt.min_lr_ratio, "last learning rate over the peak")->capture_default_str();
  app.add_option("--lr-schedule", opt.lr_schedule, "cosine, linear or constant")->capture_default_str();
  app.add_option("--clip", opt.clip, "limit of the global gradient norm; 0: none")->capture_default_str();
  app.add_option(
         "--clip-norm", opt.clip_norm,
         "by which norm a step clips: its own (exact), for which every update waits, or that of the step before "
         "(delayed; the first by its own), so that updates hide reductions; then a step whose gradients are not "
         "finite cannot be skipped. With --clip 0 nothing is clipped, and with delayed no update waits for a norm")
      ->capture_default_str();
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
  app.add_option(
         "--held-out", opt.held_out,
         "fraction of the data, of each of several, kept for evaluation at the end, which draws from several by "
         "--data-weights")
      ->capture_default_str();
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
  app.add_option("--log", opt.log, "JSON lines: one per step, then a summary");
  app.add_option("--log-hashes", opt.log_hashes,
                 "every so many steps, before the first and after the last, log a hash of each parameter, by which "
                 "checkpoint_tool compare-runs finds where two runs differ; 0: never")
      ->capture_default_str();
  app.add_flag("--log-gradient-hashes", opt.log_gradient_hashes,
               "with --log-hashes, also one of each parameter's gradient, summed over all ranks and not yet clipped");
  app.add_option("--plot", opt.plot, "loss curve as SVG");
  app.add_option("--trace", opt.trace, "one step of all ranks as JSON for chrome://tracing or ui.perfetto.dev");
  app.add_option("--timeline", opt.timeline, "a step as SVG, simulated and measured");
  app.add_option("--sample", opt.sample, "bytes of text to sample at the end; 0: none")->capture_default_str();
  app.add_option("--temperature", opt.temperature, "of the sampling; 0: the likeliest")->capture_default_str();
  app.add_option("--prompt", opt.prompt, "what the sampled text begins with")->capture_default_str();
  app.add_option("--cluster", opt.cluster,
                 "the machine, to predict a step's time and memory: known hardware or a description that ends in "
                 ".json, and its number of ranks, as in cpu:8 or my.json:8 (see plan_llama --calibrate)");
  app.add_option(
         "--plan", opt.plan,
         "given, or auto: of --mesh, --schedule, --data-parallel, --micro-batch and --recompute, what is not given is "
         "that of the layout that is predicted to be fastest on --cluster for --global-batch")
      ->capture_default_str();
  app.add_flag("--dry-run", opt.dry_run, "print the plan (layouts, collectives, memory) and stop");
  const std::vector<std::string> words = last_data(argc, argv);
  try {
    std::vector<std::string> reversed(words.rbegin(), words.rend());  // the order in which CLI11 takes them
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    if (speaks) fmt::print("{}", app.help());
    return false;
  } catch (const CLI::ParseError& e) {
    plait::fail(reading_error(app, e, words) + " (--help lists the options)");
  }
  opt.by_name = named_values(app);
  one_of("--device", opt.device, {"cpu", "cuda"});
  one_of("--backend", opt.backend, {"threads", "mpi", "nccl"});
  for (const auto& [knob, folder] : {std::pair{"--init-from", &opt.init_from}, {"--export-hf", &opt.export_hf}})
    if (app.count(knob) > 0 && folder->empty())
      plait::fail(fmt::format("{} is empty; name a folder, or leave it out", knob));
  opt.model_given = app.count("--model") > 0;
  one_of("--plan", opt.plan, {"given", "auto"});
  opt.mesh_given = app.count("--mesh") > 0;
  opt.schedule_given = app.count("--schedule") > 0;
  opt.data_parallel_given = app.count("--data-parallel") > 0;
  opt.micro_batch_given = app.count("--micro-batch") > 0;
  opt.recompute_given = app.count("--recompute") > 0;
  opt.weights_order_given = app.count("--weights-order") > 0;
  one_of("--weights-order", opt.weights_order, {"hugging-face", "megatron", "meta"});
  one_of("--export-order", opt.export_order, {"hugging-face", "megatron", "meta"});
  if (app.count("--export-order") > 0 && opt.export_hf.empty())
    plait::fail("--export-order " + opt.export_order + " is for --export-hf, which names the directory to write");
  if (opt.weights_order_given && opt.init_from.empty())
    plait::fail("--weights-order " + opt.weights_order + " is for --init-from, which names a model directory");
  opt.data_weights = parse_weights(weights, opt.data.size());
  one_of("--documents", opt.documents, {"joined", "apart"});
  if (opt.end_of_document != -1 && !keeps_documents_apart(opt))
    plait::fail(fmt::format("--end-of-document {} is for --documents apart; joined documents have no ends",
                            opt.end_of_document));
  one_of("--on-new-data", opt.on_new_data, {"stop", "begin"});
  if (app.count("--on-new-data") > 0 && opt.resume == "none")
    plait::fail("--on-new-data " + opt.on_new_data + " is for --resume, which names what was trained before");
  one_of("--on-new-schedule", opt.on_new_schedule, {"stop", "follow"});
  if (app.count("--on-new-schedule") > 0 && opt.resume == "none")
    plait::fail("--on-new-schedule " + opt.on_new_schedule + " is for --resume, which names what was trained before");
  one_of("--keep-best", opt.keep_best, {"none", "held-out"});
  if (opt.keep_best == "held-out" && opt.held_out == 0)
    plait::fail("--keep-best held-out needs --held-out, which says what fraction of the data is kept for evaluation");
  one_of("--strategy", opt.strategy, {"sp", "tp"});
  one_of("--data-parallel", opt.data_parallel, {"replicated", "zero1", "zero2", "zero3"});
  one_of("--shard", opt.shard, {"even", "whole", "blocks"});
  if (opt.data_parallel == "replicated" && app.count("--shard") > 0)
    plait::fail("--shard " + opt.shard + " is for --data-parallel zero1 to zero3; replicated cuts nothing");
  if (opt.data_parallel != "replicated" && opt.shard != "whole" && opt.optimizer == "muon")
    plait::fail("--optimizer muon needs whole matrices, which --data-parallel " + opt.data_parallel + " with --shard " +
                opt.shard + " cuts; legal are --shard whole and --data-parallel replicated");
  one_of("--replicate-over", opt.replicate_over, {"none", "dp", "cp"});
  one_of("--reshard-after-forward", opt.reshard_after_forward, {"on", "off"});
  one_of("--overlap", opt.overlap, {"on", "off"});
  opt.overlap_given = app.count("--overlap") > 0;
  one_of("--reduce-in", opt.reduce_in, {"full", "bf16"});
  if (opt.reduce_in == "bf16" && opt.precision == "double")
    plait::fail("--reduce-in bf16 is for gradients in float; with --precision double, full is legal");
  within("--prefetch", opt.prefetch, 0, 1 << 20);
  within("--tensor-overlap", opt.tensor_overlap, 1, 1 << 20);
  if (opt.data_parallel != "zero3") {
    if (app.count("--prefetch") > 0)
      plait::fail(fmt::format("--prefetch {} is for --data-parallel zero3; with {} parameters stay gathered",
                              opt.prefetch, opt.data_parallel));
    if (app.count("--reshard-after-forward") > 0)
      plait::fail("--reshard-after-forward " + opt.reshard_after_forward + " is for --data-parallel zero3; with " +
                  opt.data_parallel + " parameters stay gathered");
  }
  if (opt.data_parallel == "replicated" && opt.replicate_over != "none")
    plait::fail("--replicate-over " + opt.replicate_over +
                " is for --data-parallel zero1 to zero3; replicated cuts nothing");
  one_of("--split", opt.split, {"flops", "measured", "even"});
  one_of("--attention", opt.attention,
         {"ring", "ring:zigzag", "ring:contiguous", "all_gather_kv", "all_gather_kv:zigzag", "all_gather_kv:contiguous",
          "ulysses", "ulysses:zigzag", "ulysses:contiguous"});
  one_of("--precision", opt.precision, {"float", "double", "bf16", "bf16-no-masters"});
  if (opt.precision == "bf16-no-masters" && opt.strategy != "sp")
    plait::fail("--precision bf16-no-masters is built for --strategy sp alone; here it is " + opt.strategy);
  one_of("--graph", opt.graph, {"auto", "on", "off"});
  one_of("--attention-kernel", opt.attention_kernel, {"auto", "own", "cudnn"});
  one_of("--attention-sums", opt.attention_sums, {"fixed", "any"});
  parse_recompute(opt.recompute);
  opt.leaves = parse_deterministic(opt.deterministic);
  if (opt.leaves.canonical()) {
    const auto not_with = [](const char* knob, const std::string& value, const char* legal) {
      plait::fail(
          fmt::format("--deterministic has one order of sums, which {} {} has not; legal is {}", knob, value, legal));
    };
    if (opt.device != "cpu") not_with("--device", opt.device, "cpu");
    if (opt.threads != 1) not_with("--threads", std::to_string(opt.threads), "1");
    if (opt.tensor_overlap != 1) not_with("--tensor-overlap", std::to_string(opt.tensor_overlap), "1");
    if (opt.reduce_in != "full") not_with("--reduce-in", opt.reduce_in, "full");
    if (opt.moments == "int8") not_with("--moments", opt.moments, "full or bf16");
  }
  // With these limits no count of samples or tokens overflows.
  within("--steps", opt.steps, 0, std::int64_t{1} << 32);
  if (opt.steps == 0 && !(opt.trace.empty() && opt.timeline.empty()))
    plait::fail(fmt::format("{} shows a step, and --steps 0 has none; leave it out",
                            opt.trace.empty() ? "--timeline" : "--trace"));
  within("--seq", opt.seq, 1, std::int64_t{1} << 31);
  within("--micro-batch", opt.micro_batch, 1, 1 << 20);
  within("--global-batch", opt.global_batch, 0, 1 << 24);
  within("--seed", seed, 0, std::int64_t{1} << 62);
  within("--threads", opt.threads, 1, 1024);
  within("--sample", opt.sample, 0, 1 << 24);
  within("--log-hashes", opt.log_hashes, 0, std::int64_t{1} << 32);
  if (opt.log_hashes > 0 && opt.log.empty())
    plait::fail(fmt::format("--log-hashes {} needs --log, which names the file that the hashes are written to",
                            opt.log_hashes));
  if (opt.log_gradient_hashes && opt.log_hashes == 0)
    plait::fail("--log-gradient-hashes needs --log-hashes, which says every how many steps; at least 1 is legal");
  if (opt.warmup != -1) within("--warmup", opt.warmup, 0, opt.steps);
  opt.seed = static_cast<std::uint64_t>(seed);
  const auto in_range = [](const char* knob, double value, double low, double below) {
    if (!(value >= low && value < below))
      plait::fail(fmt::format("{} is {}; legal is at least {} and below {}", knob, value, low, below));
  };
  in_range("--dropout", opt.dropout, 0, 1);
  in_range("--label-smoothing", opt.label_smoothing, 0, 1);
  in_range("--z-loss", opt.z_loss, 0, 1e6);
  in_range("--clip", opt.clip, 0, 1e30);
  one_of("--clip-norm", opt.clip_norm, {"exact", "delayed"});
  one_of("--on-nonfinite", opt.on_nonfinite, {"stop", "skip"});
  if (opt.clip_norm == "delayed" && opt.on_nonfinite == "skip")
    plait::fail(
        "--on-nonfinite skip needs --clip-norm exact: with delayed, updates begin before all gradients are known to be "
        "finite; legal is stop");
  in_range("--weight-decay", opt.weight_decay, 0, 1e6);
  one_of("--optimizer", opt.optimizer, {"adamw", "muon"});
  if (opt.optimizer == "muon" && opt.precision == "bf16-no-masters")
    plait::fail(
        "--optimizer muon needs master weights, which --precision bf16-no-masters has not; legal are --optimizer adamw "
        "and --precision float, double and bf16");
  one_of("--moments", opt.moments, {"full", "bf16", "int8"});
  if (opt.checkpoint_dir.empty()) {
    const auto needs = [](const char* option) {
      plait::fail(std::string(option) + " needs --checkpoint-dir, which names where the training state is saved");
    };
    if (app.count("--save-every") != 0) needs("--save-every");
    if (app.count("--keep") != 0) needs("--keep");
    if (app.count("--keep-every") != 0) needs("--keep-every");
    if (app.count("--keep-best") != 0) needs("--keep-best");
    if (app.count("--checkpoint-io") != 0) needs("--checkpoint-io");
    if (opt.resume == "auto") needs("--resume auto");
  }
  one_of("--checkpoint-io", opt.checkpoint_io, {"auto", "uring", "threads"});
  if (opt.save_every < 0) plait::fail(fmt::format("--save-every is {}; at least 0 is legal", opt.save_every));
  if (opt.keep < 1) plait::fail(fmt::format("--keep is {}; at least 1 is legal", opt.keep));
  if (opt.keep_every < 0) plait::fail(fmt::format("--keep-every is {}; at least 0 is legal", opt.keep_every));
  if (opt.resume.empty()) plait::fail("--resume is empty; legal are none, auto, a saved step, or a folder of them");
  one_of("--offload", opt.offload, {"none", "optimizer"});
  if (offloads(opt) && opt.device == "cpu")
    plait::fail(
        "--offload optimizer: with --device cpu the optimizer's state is in the host's memory; legal are none, "
        "and --device cuda");
  if (opt.optimizer == "muon" && opt.moments == "int8")
    plait::fail("--moments int8 is for --optimizer adamw; with muon, full and bf16 are legal");
  if (opt.moments == "int8" && opt.data_parallel != "replicated" && opt.shard == "even")
    plait::fail("--moments int8 has a scale for each 256 elements, which --data-parallel " + opt.data_parallel +
                " with --shard even cuts; legal are --shard blocks, --shard whole and --data-parallel replicated");
  in_range("--muon-momentum", opt.muon_momentum, 0, 1);
  one_of("--muon-scale", opt.muon_scale, {"match_rms_adamw", "original"});
  in_range("--muon-lr-ratio", opt.muon_lr_ratio, 1e-6, 1e6);
  for (const char* knob : {"--muon-momentum", "--muon-scale", "--muon-lr-ratio"})
    if (opt.optimizer != "muon" && app.count(knob) > 0)
      plait::fail(fmt::format("{} is for --optimizer muon; here it is {}", knob, opt.optimizer));
  in_range("--temperature", opt.temperature, 0, 1e6);
  in_range("--peak-tflops", opt.peak_tflops, 0, 1e9);
  check_device(opt);
  return true;
}
