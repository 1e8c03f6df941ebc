#include "options.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>

#include "plait/data/text.hpp"
#include "plait/data/token_source.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/mesh/parse.hpp"
#include "plait/models/llama_config_json.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/nn/strategies.hpp"
#include "plait/schedule/parse.hpp"

namespace {

constexpr std::int64_t max_threads = 1024;
constexpr std::int64_t max_threads_of_a_gpu = 64;

void one_of(const char* knob, const std::string& value, std::initializer_list<const char*> legal) {
  std::string list;
  for (const char* l : legal) {
    if (value == l) return;
    list += (list.empty() ? "" : ", ") + std::string(l);
  }
  plait::fail(fmt::format("{} '{}' is unknown; legal are {}", knob, value, list));
}

/// `value`, which the user may choose freely, must be a multiple of `parts`.
void divides(const char* knob, std::int64_t value, const std::string& by, std::int64_t parts) {
  if (value % parts == 0) return;
  const std::int64_t below = value / parts * parts, above = below + parts;
  const std::string nearest = below == 0 ? fmt::format("the least that is: {}", above)
                                         : fmt::format("the nearest that are: {} and {}", below, above);
  plait::fail(fmt::format("{} is {}, which is not divisible by {} = {}; {}", knob, value, by, parts, nearest));
}

/// `value`, a size of the model, must be a multiple of the extent of `axis`.
void splits(const char* key, std::int64_t value, const char* axis, std::int64_t extent) {
  if (value % extent == 0) return;
  std::string legal;
  for (std::int64_t d = 1; d <= std::min<std::int64_t>(value, 64); ++d)
    if (value % d == 0) legal += (legal.empty() ? "" : ", ") + std::to_string(d);
  plait::fail(fmt::format("--mesh: {}={} does not divide the model's {}, which is {}; extents up to 64 that do: {}",
                          axis, extent, key, value, legal));
}

void within(const char* knob, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value < least) plait::fail(fmt::format("{} is {}; at least {} is legal", knob, value, least));
  if (value > most) plait::fail(fmt::format("{} is {}; at most {} is legal", knob, value, most));
}

/// What is written at the end must be writable at the beginning. Leaves no trace.
void writable(const char* knob, const std::string& path) {
  std::error_code ignored;
  const auto kind = std::filesystem::status(path, ignored).type();
  const bool in_place = kind == std::filesystem::file_type::character || kind == std::filesystem::file_type::fifo;
  if (!path.empty() && !in_place) plait::atomic_file(path, knob);
}

/// What is for one kind of device only.
void check_device(const options& opt) {
  if (opt.device == "cuda") {
    if (opt.backend == "mpi")
      plait::fail(
          "--backend mpi moves the host's memory; with --device cuda, --backend nccl is legal (which mpirun may start) "
          "and threads");
    if (opt.precision == "double")
      plait::fail("--precision double is not there for --device cuda; legal are float and bf16");
    // What is instantiated; see cuda_float.cu and cuda_bf16.cu.
    const bool plain = opt.strategy == "sp" && opt.store == "whole";
    if (opt.precision == "float" && !plain)
      plait::fail(
          "--device cuda --precision float is built for --strategy sp with --store whole alone; here they are " +
          opt.strategy + " and " + opt.store + " (bf16 has either)");
    if (opt.strategy == "tp" && opt.store == "sharded")
      plait::fail("--device cuda is built for --strategy tp or --store sharded, not for both; sp is legal with either");
    if (opt.tf32 && opt.precision != "float")
      plait::fail("--tf32 is for --precision float; here it is " + opt.precision);
    if (opt.attention_kernel == "cudnn" && opt.precision != "bf16")
      plait::fail("--attention-kernel cudnn computes in bf16; with --precision " + opt.precision +
                  ", auto and own are legal");
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
  if (opt.precision == "bf16")
    plait::fail("--precision bf16 needs --device cuda; on the CPU, float and double are legal");
  if (opt.tf32) plait::fail("--tf32 needs --device cuda; the CPU computes float in full");
  if (opt.graph == "on") plait::fail("--graph on needs --device cuda; on the CPU, auto and off are legal");
  if (opt.attention_kernel != "auto")
    plait::fail("--attention-kernel " + opt.attention_kernel + " needs --device cuda; on the CPU, auto is legal");
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

}  // namespace

namespace {

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

}  // namespace

namespace {

/// What is wrong with a command line that CLI11 cannot read, by the option that is meant.
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

/// Whether two paths lead to one file, which need not be there.
bool same_file(const std::string& a, const std::string& b) {
  std::error_code ignored;
  if (std::filesystem::equivalent(a, b, ignored)) return true;
  const auto plain = [&](const std::string& path) {
    return std::filesystem::weakly_canonical(std::filesystem::absolute(path, ignored), ignored);
  };
  return plain(a) == plain(b);
}

}  // namespace

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
  app.add_option("--strategy", opt.strategy, "sp: tensor and sequence parallel; tp: tensor parallel alone")
      ->capture_default_str();
  app.add_option("--store", opt.store,
                 "whole: parameters replicated over dp; sharded: stored over dp, gathered for use")
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
  app.add_option("--steps", opt.steps, "optimizer steps")->capture_default_str();
  app.add_option("--seq", opt.seq, "tokens in a sequence")->capture_default_str();
  app.add_option("--micro-batch", opt.micro_batch, "sequences per data-parallel rank in a microbatch")
      ->capture_default_str();
  app.add_option("--global-batch", opt.global_batch, "sequences per step over all ranks; 0: one microbatch")
      ->capture_default_str();
  app.add_option("--seed", seed, "of weights, data order and dropout")->capture_default_str();
  app.add_option("--precision", opt.precision, "float, double (cpu) or bf16 (cuda, with float master weights)")
      ->capture_default_str();
  app.add_flag("--tf32", opt.tf32, "on cuda in float: products on tensor cores, with factors of 10 bits");
  app.add_option("--recompute", opt.recompute, "none, selective or full")->capture_default_str();
  app.add_option("--lr", opt.lr, "peak learning rate")->capture_default_str();
  app.add_option("--warmup", opt.warmup, "warm-up steps; -1: a tenth of the steps")->capture_default_str();
  app.add_option("--min-lr-ratio", opt.min_lr_ratio, "last learning rate over the peak")->capture_default_str();
  app.add_option("--lr-schedule", opt.lr_schedule, "cosine, linear or constant")->capture_default_str();
  app.add_option("--clip", opt.clip, "limit of the global gradient norm; 0: none")->capture_default_str();
  app.add_option("--on-nonfinite", opt.on_nonfinite,
                 "a step whose gradients are not finite changes no weight: then stop, or skip it and go on")
      ->capture_default_str();
  app.add_option("--weight-decay", opt.weight_decay, "of matrices")->capture_default_str();
  app.add_option("--dropout", opt.dropout, "on the output of each residual branch")->capture_default_str();
  app.add_option("--label-smoothing", opt.label_smoothing, "weight of the uniform distribution")->capture_default_str();
  app.add_option("--z-loss", opt.z_loss, "weight of lse^2 in the loss")->capture_default_str();
  app.add_option("--held-out", opt.held_out, "fraction of the data kept for evaluation at the end")
      ->capture_default_str();
  app.add_option("--threads", opt.threads, "threads of each rank's matrix products, on the CPU")->capture_default_str();
  app.add_option("--graph", opt.graph, "on cuda, steps replayed as a graph: on, off or auto (where it can be)")
      ->capture_default_str();
  app.add_option("--attention-kernel", opt.attention_kernel, "on cuda: own, cudnn, or auto (cuDNN's where it can be)")
      ->capture_default_str();
  app.add_option("--peak-tflops", opt.peak_tflops,
                 "peak of a device (on the CPU, of a process), for MFU; 0: as known for the GPU")
      ->capture_default_str();
  app.add_option("--log", opt.log, "JSON lines: one per step, then a summary");
  app.add_option("--plot", opt.plot, "loss curve as SVG");
  app.add_option("--trace", opt.trace, "one step of all ranks as JSON for chrome://tracing or ui.perfetto.dev");
  app.add_option("--timeline", opt.timeline, "the pipeline's step as SVG, simulated and measured");
  app.add_option("--sample", opt.sample, "bytes of text to sample at the end; 0: none")->capture_default_str();
  app.add_option("--temperature", opt.temperature, "of the sampling; 0: the likeliest")->capture_default_str();
  app.add_option("--prompt", opt.prompt, "what the sampled text begins with")->capture_default_str();
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
  one_of("--strategy", opt.strategy, {"sp", "tp"});
  one_of("--store", opt.store, {"whole", "sharded"});
  one_of("--split", opt.split, {"flops", "measured", "even"});
  one_of("--attention", opt.attention,
         {"ring", "ring:zigzag", "ring:contiguous", "all_gather_kv", "all_gather_kv:zigzag", "all_gather_kv:contiguous",
          "ulysses", "ulysses:zigzag", "ulysses:contiguous"});
  one_of("--precision", opt.precision, {"float", "double", "bf16"});
  one_of("--graph", opt.graph, {"auto", "on", "off"});
  one_of("--attention-kernel", opt.attention_kernel, {"auto", "own", "cudnn"});
  one_of("--recompute", opt.recompute, {"none", "selective", "full"});
  // With these limits no count of samples or tokens overflows.
  within("--steps", opt.steps, 0, std::int64_t{1} << 32);
  within("--seq", opt.seq, 1, std::int64_t{1} << 31);
  within("--micro-batch", opt.micro_batch, 1, 1 << 20);
  within("--global-batch", opt.global_batch, 0, 1 << 24);
  within("--seed", seed, 0, std::int64_t{1} << 62);
  within("--threads", opt.threads, 1, 1024);
  within("--sample", opt.sample, 0, 1 << 24);
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
  one_of("--on-nonfinite", opt.on_nonfinite, {"stop", "skip"});
  in_range("--weight-decay", opt.weight_decay, 0, 1e6);
  in_range("--temperature", opt.temperature, 0, 1e6);
  in_range("--peak-tflops", opt.peak_tflops, 0, 1e9);
  check_device(opt);
  return true;
}

namespace {

/// The schedule and who has which layers.
void plan_stages(setup& s, std::int64_t pp) {
  const auto ranks = static_cast<int>(pp), microbatches = static_cast<int>(s.microbatches);
  plait::llama_part_times parts = plait::llama_part_flops(s.config, s.opt.seq);
  if (s.opt.split == "even") parts = {.layer = {1, 2, 1, 1}, .embedding = {0, 0, 0, 0}, .head = {0, 0, 0, 0}};
  const plait::stage_costs balance = plait::stage_costs_of(parts, s.config.layers);
  const auto split = [&](const plait::schedule& plan) {
    if (plan.shape.stages() > s.config.layers)
      plait::fail(
          fmt::format("--schedule {} has {} stages on pp={} ranks, but the model has {}; legal are a smaller "
                      "pp, fewer chunks, and a model of at least as many layers",
                      s.opt.schedule, plan.shape.stages(), pp,
                      s.config.layers == 1 ? "1 layer" : fmt::format("{} layers", s.config.layers)));
    return plait::split_layers(balance, plan.shape.stages());
  };
  // What an automatic schedule costs depends on who has which layers, and that on its number of chunks.
  plait::schedule_costs costs;
  if (s.opt.schedule.starts_with("automatic")) {
    plait::schedule like =
        plait::parse_schedule(s.opt.schedule.ends_with(":2") ? "zb_v" : "zb_h1", ranks, microbatches);
    costs = plait::schedule_costs_of(parts, split(like));
  }
  s.schedule = plait::parse_schedule(s.opt.schedule, ranks, microbatches, costs);
  s.stages = split(s.schedule);
}

}  // namespace

setup prepare(const options& opt, std::int64_t ranks) {
  using user_mesh =
      plait::mesh<plait::axis<plait::dp>, plait::axis<plait::pp>, plait::axis<plait::cp>, plait::axis<plait::tp>>;
  if (const std::int64_t wanted = plait::parse_mesh<user_mesh>(opt.mesh).size(); ranks == 1 && wanted > 1)
    plait::fail(fmt::format("--mesh {} has {} ranks, but --backend {} was started as one process: start it with {} {}",
                            opt.mesh, wanted, opt.backend,
                            opt.backend == "nccl" ? "torchrun --nproc-per-node" : "mpirun -n", wanted));
  const plait::mesh_shape given = plait::parse_mesh<user_mesh>(opt.mesh, ranks);
  const std::int64_t dp = given.extent(plait::axis_of<plait::dp>), tp = given.extent(plait::axis_of<plait::tp>);
  const std::int64_t pp = given.extent(plait::axis_of<plait::pp>), cp = given.extent(plait::axis_of<plait::cp>);
  const std::int64_t all = given.size();

  setup s{opt,
          plait::load_llama_config(opt.model),
          {},
          {},
          {},
          plait::chosen_policy::ring,
          cp > 1 && !opt.attention.ends_with(":contiguous"),  // on one rank the orders are the same
          1,
          1,
          {},
          plait::lr_schedule({.peak = opt.lr,
                              .steps = std::max<std::int64_t>(opt.steps, 1),
                              .warmup_steps = opt.warmup < 0 ? std::min(opt.steps, (opt.steps + 9) / 10) : opt.warmup,
                              .min_ratio = opt.min_lr_ratio,
                              .decay = plait::lr_decay_from(opt.lr_schedule)}),
          0};
  const plait::llama_config& c = s.config;
  const std::string by = "the extent of tp";
  splits("num_attention_heads", c.heads, "tp", tp);
  splits("intermediate_size", c.ffn, "tp", tp);
  if (opt.attention.starts_with("all_gather_kv")) s.context = plait::chosen_policy::all_gather_kv;
  if (opt.attention.starts_with("ulysses")) s.context = plait::chosen_policy::ulysses;
  if (cp > 1 && !s.zigzag && (opt.device == "cuda" || opt.strategy != "sp" || opt.store != "whole"))
    plait::fail("--attention " + opt.attention +
                " is built for --device cpu, --strategy sp and --store whole alone; legal here is " +
                opt.attention.substr(0, opt.attention.find(':')) + ":zigzag");
  if (cp > 1 && s.zigzag) divides("--seq", opt.seq, "2 x cp, the pieces of a sequence in zigzag order,", 2 * cp);
  if (cp > 1) divides("--seq", opt.seq, "the extent of cp", cp);
  if (opt.strategy == "sp") divides("--seq", opt.seq, cp > 1 ? "the extents of cp and tp, cp x tp" : by, cp * tp);
  if (opt.store == "sharded") splits("hidden_size", c.hidden, "dp", dp);
  if (opt.backend == "threads" && !opt.dry_run) {
    const std::int64_t most = opt.device == "cuda" ? max_threads_of_a_gpu : max_threads;
    if (all > most)
      plait::fail(fmt::format("--mesh {}: {} ranks; one {} (--backend threads) runs at most {}", opt.mesh, all,
                              opt.device == "cuda" ? "GPU" : "process", most));
  }
  const plait::tensor_extents t = plait::split_tensor_ranks(tp, c.kv_heads);
  const std::int64_t local_heads = c.heads / tp, group = c.heads / c.kv_heads;
  if (local_heads % group != 0 && group % local_heads != 0)
    plait::fail(
        fmt::format("--mesh: with tp={}, each rank has {} of {} heads, which are neither whole groups nor a whole part "
                    "of one group of {} "
                    "(num_key_value_heads is {}); choose a tp that divides num_key_value_heads or a multiple of it",
                    tp, local_heads, c.heads, group, c.kv_heads));
  if (opt.seq > c.max_position)
    plait::fail(fmt::format("--seq is {}, but the model's max_position_embeddings is {}", opt.seq, c.max_position));
  s.mesh.add(plait::axis_of<plait::dp>, dp);
  s.mesh.add(plait::axis_of<plait::pp>, pp);
  s.mesh.add(plait::axis_of<plait::cp>, cp);
  s.mesh.add(plait::axis_of<plait::tp>, t.tp);
  s.mesh.add(plait::axis_of<plait::tp_rep>, t.tp_rep);
  s.devices = opt.backend == "threads" ? 1 : all;
  const bool meets_on_host = opt.backend == "threads" && all > 1;
  const bool watched = !opt.trace.empty() || !opt.timeline.empty();
  if (opt.graph == "on" && watched)
    plait::fail("--graph on with --trace or --timeline: nobody sees what a replayed step does; legal is --graph off");
  if (opt.graph == "on" && meets_on_host)
    plait::fail(
        fmt::format("--graph on: {} ranks that share a GPU (--backend threads) meet on the host for every collective, "
                    "which a graph "
                    "cannot replay; legal are --graph off, one rank, and --backend nccl",
                    all));
  if (opt.graph == "on" && pp > 1)
    plait::fail(
        fmt::format("--graph on with pp={}: the host of a stage waits for each message, which a graph cannot replay; "
                    "legal are --graph off and pp=1",
                    pp));
  s.as_graph = opt.device == "cuda" && opt.graph != "off" && opt.dropout == 0 && !meets_on_host && pp == 1 && !watched;
  s.sequences = opt.micro_batch * dp;
  const std::int64_t global = opt.global_batch == 0 ? s.sequences : opt.global_batch;
  divides("--global-batch", global, fmt::format("--micro-batch {} times dp={}", opt.micro_batch, dp), s.sequences);
  s.microbatches = global / s.sequences;
  if (s.microbatches > plait::max_microbatches)
    plait::fail(fmt::format("--global-batch {} has {} microbatches; at most {} are legal", global, s.microbatches,
                            plait::max_microbatches));
  plan_stages(s, pp);
  if (opt.data.empty()) {
    if (!opt.dry_run) plait::fail("--data is missing: name a text file, or token files (.bin)");
    return s;
  }
  plait::token_source source(
      {.paths = opt.data, .format = plait::token_format_from(opt.data_format), .vocab = c.vocab});
  source.check_tokens();
  s.entropy = plait::unigram_entropy(source);
  s.data.emplace(source, plait::sampler_config{.seq = opt.seq, .seed = opt.seed, .held_out = opt.held_out});
  if (opt.held_out > 0 && s.data->held_out_samples() < s.sequences)
    plait::fail(fmt::format(
        "--held-out {} keeps {} sequences, and one microbatch over the mesh takes {} (--micro-batch {} times "
        "dp={}); keep a larger fraction, or 0",
        opt.held_out, s.data->held_out_samples(), s.sequences, opt.micro_batch, dp));
  if (opt.dry_run) return s;
  for (const unsigned char byte : opt.sample > 0 ? opt.prompt : std::string())
    if (byte >= c.vocab)
      plait::fail(
          fmt::format("--prompt: its byte {} is no token, as the model's vocab_size is {}; choose another prompt, or "
                      "--sample 0",
                      static_cast<int>(byte), c.vocab));
  const std::pair<const char*, const std::string*> outputs[] = {
      {"--log", &opt.log}, {"--plot", &opt.plot}, {"--trace", &opt.trace}, {"--timeline", &opt.timeline}};
  std::vector<std::pair<const char*, std::string>> inputs;
  for (const std::string& path : opt.data)
    for (const char* ending : {"", ".bin", ".idx"}) inputs.emplace_back("--data", path + ending);
  inputs.emplace_back("--model", opt.model);
  if (opt.schedule.ends_with(".csv")) inputs.emplace_back("--schedule", opt.schedule);
  for (const auto& [knob, path] : outputs)
    for (const auto& [other, input] : inputs)
      if (!path->empty() && same_file(*path, input))
        plait::fail(fmt::format("{} would overwrite '{}', which {} reads; name another file", knob, *path, other));
  for (const auto& [knob, path] : outputs) writable(knob, *path);
  for (const auto& [knob, path] : outputs)
    for (const auto& [other, same] : outputs)
      if (knob != other && !path->empty() && same_file(*path, *same) && !std::filesystem::is_character_file(*path))
        plait::fail(fmt::format("{} and {} both name '{}'; they need a file each", knob, other, *path));
  return s;
}
