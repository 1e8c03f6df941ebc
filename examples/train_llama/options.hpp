// The options of the trainer, and the setup of a run, which all ranks share.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/value_checks.hpp"
#include "plait/core/error.hpp"
#include "plait/core/recompute.hpp"
#include "plait/core/types.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/models/llama_config.hpp"
#include "plait/nn/attention/policy.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/optim/lr_schedule.hpp"
#include "plait/parallel/placement.hpp"
#include "plait/schedule/parse.hpp"
#include "plait/schedule/schedule.hpp"
#include "train_llama/data/sampler.hpp"

namespace plait {
struct model_directory;
class tokenizer;
}  // namespace plait
struct prediction;
struct run_plan;

/// Throws `plait::error` with a text that fmt formats.
template <class... Args>
[[noreturn]] void reject(fmt::format_string<Args...> text, Args&&... args) {
  plait::fail(fmt::format(text, std::forward<Args>(args)...));
}

/// The axes that --mesh names, outermost first.
using user_mesh = plait::mesh<plait::axis<plait::dp>, plait::axis<plait::pp>, plait::axis<plait::ep>,
                              plait::axis<plait::cp>, plait::axis<plait::tp>>;

/// The values of the command line, checked as far as possible without ranks.
struct options {
  std::string command;  ///< generate or evaluate; empty: the program trains
  std::string mesh = "dp=1,pp=1,cp=1,tp=1";
  bool mixture = false;  ///< whether the model has experts; set by `prepare`
  std::string device = "cpu";
  std::string backend = "threads";
  double deadline = 600;  ///< seconds; 0: none
  std::string model = "tiny";
  std::string init_from;  ///< a model directory, a saved step or a folder of them; empty: random weights
  std::string export_hf;  ///< a model directory of Hugging Face; empty: none
  std::string weights_order = "hugging-face", export_order = "hugging-face";
  std::int64_t lora = 0;   ///< rank of the adapters of the blocks' linears; 0: none
  double lora_alpha = -1;  ///< the adapters' product is scaled by alpha / rank; -1 before parsing: twice the rank
  std::string lora_linears = "all";  ///< which have adapters
  std::string attention_mask = "model";
  std::string strategy = "sp";
  std::string data_parallel = "replicated";
  std::string shard = "even";
  std::string replicate_over = "none";
  std::int64_t prefetch = 1;
  std::string reshard_after_forward = "on";
  std::string overlap = "on";
  std::int64_t tensor_overlap = 1;
  std::string reduce_in = "full";
  std::string attention = "ring:zigzag";
  std::string schedule = "1f1b";
  std::string split = "flops";
  std::vector<std::string> data;
  std::string data_format = "auto";
  std::string tokenizer;  ///< a tokenizer.json or its directory; in a `setup`, the file of the model, if known
  std::string data_weights_text;
  std::vector<double> data_weights;   ///< one for each of `data`; empty: they are one stream
  std::string documents = "joined";   ///< or apart
  std::int64_t end_of_document = -1;  ///< a token; -1: documents end as the files' index says
  std::string on_new_data = "stop", on_new_schedule = "stop";
  std::int64_t steps = 100;
  std::int64_t seq = 128;
  std::int64_t micro_batch = 4;
  std::int64_t global_batch = 0;  ///< 0: one microbatch per step
  std::int64_t seed = 1;
  std::string precision = "float";
  std::string gradients = "full";
  std::string moments = "full";
  std::string deterministic = "off";
  plait::deterministic_leaves leaves{};  ///< of --deterministic
  std::string check = "first";
  plait::value_check compared{};  ///< of --check
  std::string offload = "none";
  std::string recompute = "none";
  double lr = 3e-3;
  std::int64_t warmup = -1;  ///< -1: a tenth of the steps
  double min_lr_ratio = 0.1;
  std::string lr_schedule = "cosine";
  double clip = 1.0;
  std::string on_nonfinite = "stop";
  double weight_decay = 0.1;
  std::string optimizer = "adamw";
  double muon_momentum = 0.95;
  std::string muon_scale = "match_rms_adamw";
  double muon_lr_ratio = 1.0;
  double dropout = 0;
  double label_smoothing = 0;
  double balance_loss = 0, router_z_loss = 0, expert_limit = 0, expert_bias_rate = 0;  ///< of models with experts
  std::string balance_over = "sequence";
  std::string expert_rows = "counted";
  double z_loss = 0;
  std::int64_t loss_chunks = 1;
  std::string held_out_text = "0";
  double held_out = 0;          ///< the fraction of `data` that --held-out keeps
  std::string held_out_file;    ///< or the file that it names; empty: none
  std::int64_t eval_every = 0;  ///< steps from one evaluation to the next; 0: only at the end
  int threads = 1;
  bool tf32 = false;
  std::string graph = "auto";
  std::string attention_kernel = "auto";
  std::string attention_sums = "fixed";
  double peak_tflops = 0;  ///< 0: the known peak of the device
  std::string log, plot, report, trace, timeline;
  std::int64_t log_hashes = 0;  ///< steps from one hash of the parameters to the next; 0: none
  bool log_gradient_hashes = false;
  std::string checkpoint_dir;   ///< empty: nothing is saved
  std::int64_t save_every = 0;  ///< steps; 0: only at the end
  std::int64_t keep = 3, keep_every = 0;
  std::string keep_best = "none";
  std::string checkpoint_io = "auto";
  std::string checkpoint_staging = "pinned";
  std::string resume = "none";
  std::string products;       ///< the file of measured products; empty: nothing is measured
  std::int64_t sample = 200;  ///< the default applies only if tokens are bytes
  double temperature = 0.8;
  std::string prompt = "And ";
  bool dry_run = false;
  double memory_share = 1;                 ///< the largest share of the available memory that a run may need
  std::string cluster;                     ///< hardware, or hardware:ranks, for predictions; empty: none
  std::string plan = "given";              ///< or auto: the parts of the layout that are not given are chosen
  std::vector<std::string> given_options;  ///< names of options on the command line or in --config

  bool given(std::string_view option) const {
    return std::find(given_options.begin(), given_options.end(), option) != given_options.end();
  }

  /// The values of all options as text, by name, and the switches that are on. Ranks of several processes compare them
  /// (record.cpp).
  std::vector<std::pair<std::string, std::string>> by_name;
};

/// Whether layers compute in bf16.
inline bool in_bf16(const options& opt) { return opt.precision.starts_with("bf16"); }

/// Whether gradients are kept in bf16.
inline bool has_bf16_gradients(const options& opt) { return opt.gradients == "bf16"; }

/// Returns the number types of a run in words, such as "bf16, gradients in bf16".
inline std::string precision_text(const options& opt) {
  return opt.precision + (has_bf16_gradients(opt) ? ", gradients in bf16" : "");
}

/// The setup of a run, which all ranks share: the options, and the objects that they name.
struct setup {
  options opt;
  plait::llama_config config{};
  plait::mesh_shape mesh{};  ///< of dp, pp, cp, tp and tp_rep
  plait::schedule schedule{};
  std::vector<plait::stage_layers> stages{};  ///< split by counted costs, or evenly
  plait::pipeline_options parallel{};
  plait::chosen_policy context = plait::chosen_policy::ring;
  bool zigzag = true;
  std::int64_t microbatches = 1;
  std::int64_t sequences = 1;            ///< in a microbatch over the whole mesh
  std::optional<plait::sampler> data{};  ///< nothing if the run makes no step
  plait::lr_schedule rate;
  double entropy = 0;        ///< unigram entropy of the data, nats; 0 if not known
  bool bytes = false;        ///< whether a token of the data is a byte
  std::string data_text{};   ///< describes all that a place in the data depends on, if steps are saved or resumed
  std::string rate_text{};   ///< describes all that the learning rate of a step depends on
  std::int64_t devices = 1;  ///< GPUs, or on the CPU processes, that the ranks run on
  bool cudnn = false;        ///< whether attention may be cuDNN's
  bool as_graph = false;     ///< whether steps are replayed as a CUDA graph
  std::string products{};    ///< the content of the file of --products; empty: there is none yet
  std::shared_ptr<const std::vector<run_plan>> plans{};  ///< of a rank of each stage of the mesh's pipeline
  plait::layer_recompute recompute{};
  plait::deterministic_leaves deterministic{};              ///< of --deterministic
  std::shared_ptr<const plait::model_directory> weights{};  ///< the open directory of --init-from; null: it names none
  std::string first_step{};     ///< the saved step that --init-from names, or the newest in its folder; empty: none
  std::string invalid_steps{};  ///< newer steps there that are not whole, and why
  std::shared_ptr<const plait::tokenizer> tokenizer{};  ///< null: there is no text, or its tokens are bytes
  std::vector<std::int64_t> end_tokens{};               ///< tokens that end a text of `generate`
  std::shared_ptr<const prediction> predicted{};        ///< of the planner, for --cluster; null: without --cluster
  std::optional<plait::sampler> held_out{};             ///< the file that --held-out names; nothing if it is a fraction

  /// Returns the model directory or config.json whose keys and tokenizer an exported model gets; empty: none.
  std::string exported_like() const {
    return weights ? opt.init_from : plait::find_llama_preset(opt.model) ? "" : opt.model;
  }
  /// The held-out data; null: none.
  const plait::sampler* judged() const {
    if (held_out) return &*held_out;
    return data && data->held_out_samples() > 0 ? &*data : nullptr;
  }
  /// Whether the first weights are not random.
  bool begins_from_weights() const { return weights != nullptr || !first_step.empty(); }
};

/// Parses and checks the command line. Throws `plait::error` with a text that names the option. Returns false for
/// --help, and prints the help if this process `speaks`.
bool parse(int argc, char** argv, options& opt, bool speaks = true);

/// The values of --data-parallel, by the level that they name.
inline constexpr const char* level_names[] = {"replicated", "zero1", "zero2", "zero3"};
inline plait::zero_level level_of(const options& opt) {
  return static_cast<plait::zero_level>(std::find(level_names, std::end(level_names), opt.data_parallel) - level_names);
}

/// Returns whether attention stays within documents.
inline bool keeps_documents_apart(const options& opt) { return opt.documents == "apart"; }

/// Whether the optimizer's state is in host memory.
inline bool offloads_optimizer(const options& opt) { return opt.offload == "optimizer" || opt.offload == "both"; }
/// Whether activations are in host memory between the passes that make and use them.
inline bool offloads_activations(const options& opt) { return opt.offload == "activations" || opt.offload == "both"; }

/// Returns the step that --trace and --timeline show in a run that continues after `resumed` steps: not one of the
/// first steps, if there are others.
inline std::int64_t traced_step(const options& opt, std::int64_t resumed) {
  return std::max(resumed, std::min(resumed + 2, opt.steps - 1));
}

/// Reads the model's configuration and the data, and checks that sizes are divisible. `ranks` < 0: the ranks of the
/// mesh.
setup prepare(const options& opt, std::int64_t ranks);

/// Returns the tokens of --prompt: those of the tokenizer, after the tokens that begin a text, or bytes.
std::vector<std::int64_t> prompt_tokens(const setup& s);
/// Returns tokens as text for a terminal, without those that begin a text.
std::string text_of(const setup& s, std::span<const std::int64_t> tokens);

// The types that this program is built for: all, unless CMake's options PLAIT_TRAINER_PRECISIONS and
// PLAIT_TRAINER_STRATEGIES list some.
#ifdef PLAIT_TRAINER_PRECISIONS
using built_precisions = void(PLAIT_TRAINER_PRECISIONS);
#else
using built_precisions = void;
#endif
#ifdef PLAIT_TRAINER_STRATEGIES
using built_strategies = void(PLAIT_TRAINER_STRATEGIES);
#else
using built_strategies = void;
#endif
template <class T, class List>
inline constexpr bool is_built = true;
template <class T, class... Built>
inline constexpr bool is_built<T, void(Built...)> = (std::is_same_v<T, Built> || ...);

/// Calls `f.operator()<Precision, S>()` if the program is built for these types. Throws `error` otherwise.
template <class Precision, class S, class F>
auto if_built(const options& opt, F& f) -> decltype(f.template operator()<Precision, S>()) {
  constexpr std::string_view without = "this program was built without it, as examples/run.sh does; build it with";
  if constexpr (!is_built<Precision, built_precisions>) {
    reject("--precision {}{}: {} -DPLAIT_TRAINER_PRECISIONS=all", opt.precision,
           has_bf16_gradients(opt) ? " with --gradients bf16" : "", without);
  } else if constexpr (!is_built<S, built_strategies>) {
    if (opt.mixture) reject("--model: the strategy of mixtures of experts: {} -DPLAIT_TRAINER_STRATEGIES=all", without);
    reject("--strategy {}: {} -DPLAIT_TRAINER_STRATEGIES=all", opt.strategy, without);
  } else {
    return f.template operator()<Precision, S>();
  }
}

/// Calls `f.operator()<Precision, S>()` with the types that --precision, --gradients and --strategy name. options.cpp
/// refuses other combinations, because every instantiation takes long to compile.
template <class F>
auto with_types(const options& opt, F&& f) {
  using plait::megatron_sp;
  if (opt.precision == "bf16-no-masters")
    return has_bf16_gradients(opt) ? if_built<plait::bf16_gradients, megatron_sp>(opt, f)
                                   : if_built<plait::bf16_no_masters, megatron_sp>(opt, f);
  if (has_bf16_gradients(opt)) return if_built<plait::bf16_gradients_float_masters, megatron_sp>(opt, f);
  const auto with = [&]<class S>() {
    if constexpr (!plait::mixture_strategy<S>)
      if (opt.precision == "double") return if_built<double, S>(opt, f);
    if (opt.precision == "bf16") return if_built<plait::bf16, S>(opt, f);
    return if_built<float, S>(opt, f);
  };
  if (opt.mixture) return with.template operator()<plait::megatron_experts>();
  return opt.strategy == "sp" ? with.template operator()<megatron_sp>()
                              : with.template operator()<plait::megatron_tp>();
}

/// The value of --recompute: modes, or a budget of bytes that a rank's layers may keep.
struct recompute_request {
  plait::layer_recompute modes;
  std::optional<std::int64_t> every, budget;
};

/// Reads none, selective, full, every:K or budget:SIZE, as in budget:512M. Throws for other texts.
recompute_request parse_recompute(const std::string& text);

/// Returns the modes of all layers: the given ones, or the cheapest that fit the budget on every rank of the pipeline,
/// found by dry runs. If a budget cannot be met, throws an error with the least that can.
plait::layer_recompute recompute_of(const setup& s);

/// Reads --mesh. `ranks` < 0: the ranks of the mesh. Throws `plait::error` as `plait::parse_mesh`.
plait::mesh_shape parse_mesh(const options& opt, std::int64_t ranks = -1);
/// Reads --schedule. Throws `plait::error` as `plait::parse_schedule`.
plait::schedule parse_schedule(const options& opt, int ranks, int microbatches,
                               const plait::schedule_costs& costs = {});

/// The options of a saved step's adapters.
struct saved_adapters {
  std::int64_t rank = 0;        ///< 0: it has none
  double alpha = 0;             ///< --lora-alpha
  std::string linears = "all";  ///< --lora-linears

  bool operator==(const saved_adapters&) const = default;
};

/// A model's shape, and the weights that --init-from names.
struct opened_model {
  plait::llama_config config;
  std::shared_ptr<const plait::model_directory> weights{};  ///< null: --init-from names no directory
  std::string first_step{}, invalid_steps{};                ///< as in `setup`
  std::string data{};                                       ///< description of the data of that step's run
  std::string tokenizer{};                                  ///< the file that run had; empty: none
  std::int64_t seq = 0;                                     ///< --seq of that run; 0: unknown
  saved_adapters adapters{};
};
opened_model open_model(const options& opt);
