#include "options.hpp"

#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <limits>
#include <system_error>

#include "../number_text.hpp"
#include "../reading_error.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/layout/parse.hpp"
#include "plait/plan/hardware.hpp"

namespace {

/// Calls f(), and puts hyphens before its errors: these begin with the name of an option without hyphens.
template <class F>
auto by_option(F&& f) {
  try {
    return f();
  } catch (const plait::error& e) {
    plait::fail({"--", e.what()});
  }
}

}  // namespace

plait::mesh_shape parse_mesh(const options& opt, std::int64_t ranks) {
  return by_option([&] { return plait::parse_mesh<user_mesh>(opt.mesh, ranks); });
}

plait::schedule parse_schedule(const options& opt, int ranks, int microbatches, const plait::schedule_costs& costs) {
  return by_option([&] { return plait::parse_schedule(opt.schedule, ranks, microbatches, costs); });
}

namespace {

/// Returns the words of a list.
std::vector<std::string> words_of(const std::string& text, char between) {
  std::vector<std::string> words;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(between, at), text.size());
    words.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return words;
}

/// Returns the number that a word consists of, as in 1e-3 or +2; nothing if it is not a number.
std::optional<double> real_of(const std::string& word) {
  char* rest = nullptr;
  const double number = std::strtod(word.c_str(), &rest);
  return word.empty() || *rest != '\0' ? std::nullopt : std::optional(number);
}

/// Reads --data-weights for `sources` --data. Throws `plait::error` if it is not a list of as many numbers.
std::vector<double> parse_weights(const std::string& text, std::size_t sources) {
  std::vector<double> weights;
  if (text.empty()) return weights;
  for (const std::string& word : words_of(text, ',')) {
    const std::optional<double> weight = real_of(word);
    if (!weight) reject("--data-weights {}: '{}' is not a number; legal is a list as in 0.7,0.3", text, word);
    weights.push_back(*weight);
  }
  if (weights.size() != sources)
    reject("--data-weights {}: {} weights for {} --data; give one for each, as in 0.7,0.3", text, weights.size(),
           sources);
  return weights;
}

/// Reads --held-out: a fraction, or a file.
void parse_held_out(options& opt) {
  const std::string& text = opt.held_out_text;
  const std::optional<double> fraction = real_of(text);
  opt.held_out = fraction.value_or(0);
  if (fraction) return;
  std::error_code ignored;
  if (text.empty() || (!std::filesystem::exists(text, ignored) && !std::filesystem::exists(text + ".bin", ignored)))
    reject("--held-out '{}' is neither a file nor a fraction, at least 0 and below 1", text);
  opt.held_out_file = text;
}
bool holds_out(const options& opt) { return opt.held_out != 0 || !opt.held_out_file.empty(); }

/// Whether a number is whole, and from 1 to `most`.
bool counts(const std::optional<double>& n, double most) { return n && *n >= 1 && *n <= most && *n == std::floor(*n); }

/// Reads --deterministic. Throws `plait::error` unless it is off or one to three numbers.
plait::deterministic_leaves parse_deterministic(const std::string& text) {
  if (text == "off") return {};
  std::vector<std::int64_t> leaves;
  for (const std::string& word : words_of(text, ',')) {
    const std::optional<double> n = real_of(word);
    if (!counts(n, 4096) || leaves.size() == 3)
      reject("--deterministic {}: legal are off, and one to three numbers of leaves from 1 to 4096, as in 8,16,4",
             text);
    leaves.push_back(static_cast<std::int64_t>(*n));
  }
  return {leaves[0], leaves.size() > 1 ? leaves[1] : leaves[0], leaves.size() > 2 ? leaves[2] : 1};
}

/// Reads --check. Throws `plait::error` for values that its help does not have.
plait::value_check parse_check(const std::string& text) {
  const auto refuse = [&] {
    reject(
        "--check {}: legal are first, off, always and every:N, N at least 1, each with a tolerance at "
        "least 0 and below 1 behind it, as in every:100:1e-5",
        text);
  };
  std::vector<std::string> words = words_of(text, ':');
  plait::value_check how = plait::value_check::first;
  if (words[0] == "every") {
    const std::optional<double> n = real_of(words.size() > 1 ? words[1] : "");
    if (!counts(n, 1e15)) refuse();
    how = plait::value_check::every(static_cast<std::int64_t>(*n));
    words.erase(words.begin());
  } else if (words[0] == "off" || words[0] == "always") {
    how = words[0] == "off" ? plait::value_check::off : plait::value_check::always;
  } else if (words[0] != "first") {
    refuse();
  }
  if (words.size() == 1) return how;
  const std::optional<double> tolerance = real_of(words[1]);
  if (words.size() > 2 || !tolerance || !(*tolerance >= 0 && *tolerance < 1)) refuse();
  return how.within(*tolerance);
}

[[noreturn]] void refuse_recompute(const std::string& text) {
  reject(
      "--recompute '{}' is unknown; legal are none, selective, full, every:K (each K-th layer in full) and "
      "budget:SIZE (bytes that a rank's layers may keep, as in budget:512M)",
      text);
}

}  // namespace

recompute_request parse_recompute(const std::string& text) {
  using plait::recompute;
  for (const recompute mode : {recompute::none, recompute::selective, recompute::full})
    if (text == plait::name_of(mode)) return {mode, {}, {}};
  if (text.starts_with("every:")) {
    const auto k = number_of<std::int64_t>(text.substr(6));
    if (!k || *k < 1) refuse_recompute(text);
    return {plait::layer_recompute::every(*k), k, {}};
  }
  if (!text.starts_with("budget:")) refuse_recompute(text);
  std::string size = text.substr(7);
  std::int64_t factor = 1;
  constexpr std::string_view units = "KMGT";
  if (const std::size_t unit = size.empty() ? units.npos : units.find(size.back()); unit != units.npos) {
    factor <<= 10 * (unit + 1);
    size.pop_back();
  }
  const auto number = number_of<std::int64_t>(size);
  if (!number || *number < 1 || *number > std::numeric_limits<std::int64_t>::max() / 4096 / factor)
    refuse_recompute(text);
  return {{}, {}, *number * factor};
}

namespace {

/// Throws unless a whole number is from `least` to `most`.
template <std::integral T>
void within(const char* flag, T value, T least, T most) {
  if (value < least) reject("{} is {}; at least {} is legal", flag, value, least);
  if (value > most) reject("{} is {}; at most {} is legal", flag, value, most);
}
/// Throws unless a number is at least `low` and below `below`.
void in_range(const char* flag, double value, double low, double below) {
  if (!(value >= low && value < below)) reject("{} is {}; legal is at least {} and below {}", flag, value, low, below);
}

/// Returns the value of an option as text.
std::string value_of(const options& opt, std::string_view name) {
  const auto found =
      std::find_if(opt.by_name.begin(), opt.by_name.end(), [&](const auto& one) { return one.first == name; });
  return found == opt.by_name.end() ? "" : found->second;
}

/// A condition that makes a command line illegal, and its error text. In the text, {--option} is that option's value.
struct rule {
  bool broken;
  std::string_view text;
};

/// Throws the error of the first broken rule.
void check_rules(const options& opt, std::initializer_list<rule> rules) {
  for (const rule& r : rules) {
    if (!r.broken) continue;
    std::string text(r.text);
    for (std::size_t at = 0; (at = text.find("{--", at)) != text.npos;) {
      const std::size_t end = text.find('}', at);
      const std::string value = value_of(opt, text.substr(at + 1, end - at - 1));
      text.replace(at, end + 1 - at, value);
      at += value.size();
    }
    plait::fail(text);
  }
}

/// Checks options that name inputs, and options that need them.
void check_inputs(const options& opt) {
  const bool blank_mesh = opt.mesh.find_first_not_of(' ') == std::string::npos;
  check_rules(
      opt,
      {{opt.given("--deadline") && opt.backend == "threads",
        "--deadline is for --backend mpi and nccl; a deadlock of threads is found without one: leave it out"},
       {opt.given("--mesh") && blank_mesh, "--mesh is empty; name axes and extents, as in dp=2,tp=4, or leave it out"},
       {!opt.report.empty() && opt.log.empty(), "--report needs --log, the file that it is made from"},
       {opt.given("--export-order") && opt.export_hf.empty(),
        "--export-order {--export-order} is for --export-hf, which names the directory to write"},
       {opt.given("--weights-order") && opt.init_from.empty(),
        "--weights-order {--weights-order} is for --init-from, which names a model directory"},
       {opt.end_of_document != -1 && !keeps_documents_apart(opt),
        "--end-of-document {--end-of-document} is for --documents apart; joined documents have no ends"},
       {opt.given("--on-new-data") && opt.resume == "none",
        "--on-new-data {--on-new-data} is for --resume, which names an earlier step"},
       {opt.given("--on-new-schedule") && opt.resume == "none",
        "--on-new-schedule {--on-new-schedule} is for --resume, which names an earlier step"},
       {opt.keep_best == "held-out" && !holds_out(opt),
        "--keep-best held-out needs --held-out, which names the data for evaluation"},
       {opt.eval_every > 0 && !holds_out(opt),
        "--eval-every {--eval-every} needs --held-out, which names the data for evaluation"}});
}

/// Refuses options for training if there is a command, which does not train.
void check_command(const options& opt) {
  if (opt.command.empty()) return;
  for (const char* flag : {"--log", "--plot", "--trace", "--timeline", "--export-hf", "--checkpoint-dir", "--resume",
                           "--eval-every", "--lora", "--lora-alpha", "--lora-linears"})
    if (opt.given(flag)) reject("{} is for training, and {} trains nothing; leave it out", flag, opt.command);
  if (opt.steps != 0) reject("--steps is {}, and {} makes none; leave it out", opt.steps, opt.command);
  check_rules(opt, {{opt.command == "generate" && opt.sample == 0, "--sample is 0; generate takes at least 1"},
                    {opt.command == "evaluate" && !holds_out(opt),
                     "evaluate needs --held-out, which names a file, or a fraction of --data"}});
}

/// Refuses options for a pipeline if there is none. But a schedule from a file may order the passes of one rank.
void check_pipeline(const options& opt) {
  if (opt.schedule.ends_with(".csv") || parse_mesh(opt).extent(plait::axis_of<plait::pp>) > 1) return;
  static_cast<void>(parse_schedule(opt, 1, 4));  // throws if no schedule has this name
  check_rules(opt, {{opt.schedule != "1f1b",
                     "--schedule {--schedule} orders the stages of a pipeline, and with pp=1 there is none; legal are "
                     "1f1b, and more ranks along pp"},
                    {opt.given("--split"),
                     "--split {--split} divides layers over the stages of a pipeline, and with pp=1 there is one; "
                     "leave it out"}});
}

/// Checks how the model, its data and its parameters are cut.
void check_layout(const options& opt) {
  const bool replicated = opt.data_parallel == "replicated", gathered = opt.data_parallel != "zero3";
  const bool level_is_planned = opt.plan == "auto" && !opt.given("--data-parallel");
  check_rules(
      opt,
      {{replicated && opt.given("--shard"),
        "--shard {--shard} is for --data-parallel zero1 to zero3; replicated cuts nothing"},
       {!replicated && opt.shard != "whole" && opt.optimizer == "muon",
        "--optimizer muon needs whole matrices, which --data-parallel {--data-parallel} with --shard {--shard} cuts; "
        "legal are --shard whole and --data-parallel replicated"},
       {gathered && opt.given("--prefetch"),
        "--prefetch {--prefetch} is for --data-parallel zero3; with {--data-parallel} parameters stay gathered"},
       {gathered && opt.given("--reshard-after-forward"),
        "--reshard-after-forward {--reshard-after-forward} is for --data-parallel zero3; with {--data-parallel} "
        "parameters stay gathered"},
       {replicated && !level_is_planned && opt.replicate_over != "none",
        "--replicate-over {--replicate-over} is for --data-parallel zero1 to zero3; replicated cuts nothing"}});
  if (opt.plan != "auto" && (opt.given("--split") || opt.given("--schedule"))) check_pipeline(opt);
}

/// Checks number types, and the order of sums.
void check_numerics(const options& opt) {
  const bool bf16_gradients = has_bf16_gradients(opt), alone = opt.precision == "bf16-no-masters";
  check_rules(opt,
              {{alone && opt.strategy != "sp",
                "--precision bf16-no-masters is built for --strategy sp alone; here it is {--strategy}"},
               {bf16_gradients && !in_bf16(opt),
                "--gradients bf16 is for --precision bf16 and bf16-no-masters; with {--precision}, full is legal"},
               {bf16_gradients && opt.strategy != "sp",
                "--gradients bf16 is built for --strategy sp alone; here it is {--strategy}"},
               {opt.reduce_in == "bf16" && opt.precision == "double",
                "--reduce-in bf16 is for gradients in float; with --precision double, full is legal"},
               {opt.reduce_in == "bf16" && bf16_gradients,
                "--reduce-in bf16 is for gradients in float; with --gradients bf16, full is legal, which is "
                "bf16, and float"},
               {opt.reduce_in == "float" && !bf16_gradients && opt.precision == "double",
                "--reduce-in float is for --gradients bf16; here they are in double, and legal is full"},
               {opt.reduce_in == "float" && !bf16_gradients,
                "--reduce-in float is for --gradients bf16; here they are in float, and legal are full and bf16"}});
  if (!opt.leaves) return;
  const auto only = [&](const char* flag, bool holds, const char* legal) {
    if (!holds)
      reject("--deterministic has one order of sums, which {} {} does not have; legal is {}", flag, value_of(opt, flag),
             legal);
  };
  only("--device", opt.device == "cpu", "cpu");
  only("--threads", opt.threads == 1, "1");
  only("--tensor-overlap", opt.tensor_overlap == 1, "1");
  only("--gradients", opt.gradients == "full", "full");
  only("--reduce-in", opt.reduce_in == "full", "full");
  only("--moments", opt.moments != "int8", "full or bf16");
  only("--lora", opt.lora == 0, "0");
}

/// Checks options of adapters, and that there are weights to adapt.
void check_lora(const options& opt) {
  const bool adapts = opt.lora > 0, resumes = opt.resume != "none" && opt.resume != "auto";
  if (adapts) in_range("--lora-alpha", opt.lora_alpha, 1e-6, 1e6);
  check_rules(
      opt,
      {{!adapts && opt.given("--lora-alpha"), "--lora-alpha is for --lora, which gives the rank of the adapters"},
       {!adapts && opt.given("--lora-linears"), "--lora-linears is for --lora, which gives the rank of the adapters"},
       {adapts && opt.init_from.empty() && !resumes && !opt.dry_run,
        "--lora {--lora} trains adapters alone, and random weights would stay random; name weights by "
        "--init-from, or a step that has adapters by --resume"}});
}

/// Checks the steps, and options of outputs and sampling.
void check_steps(const options& opt) {
  if (opt.warmup != -1) within<std::int64_t>("--warmup", opt.warmup, 0, opt.steps);
  const bool no_text = opt.sample == 0;
  check_rules(
      opt, {{opt.steps == 0 && !opt.trace.empty(), "--trace shows a step, and --steps 0 has none; leave it out"},
            {opt.steps == 0 && !opt.timeline.empty(), "--timeline shows a step, and --steps 0 has none; leave it out"},
            {opt.steps == 0 && !opt.report.empty(), "--report shows steps, and --steps 0 has none; leave it out"},
            {opt.log_hashes > 0 && opt.log.empty(),
             "--log-hashes {--log-hashes} needs --log, which names the file that the hashes are written to"},
            {opt.log_gradient_hashes && opt.log_hashes == 0,
             "--log-gradient-hashes needs --log-hashes, which sets how often; at least 1 is legal"},
            {no_text && opt.given("--prompt") && !opt.prompt.empty(),
             "--prompt is for the text that is sampled at the end, and --sample 0 samples none"},
            {no_text && opt.given("--temperature"),
             "--temperature is for the text that is sampled at the end, and --sample 0 samples none"}});
}

/// Checks options of the optimizer.
void check_training(const options& opt) {
  const bool muon = opt.optimizer == "muon", int8 = opt.moments == "int8";
  check_rules(
      opt,
      {{opt.given("--min-lr-ratio") && opt.lr_schedule == "constant",
        "--min-lr-ratio {--min-lr-ratio} changes nothing with --lr-schedule constant; leave it out"},
       {muon && opt.precision == "bf16-no-masters",
        "--optimizer muon needs master weights, which --precision bf16-no-masters does not have; legal are --optimizer "
        "adamw and --precision float, double and bf16"},
       {muon && int8, "--moments int8 is for --optimizer adamw; with muon, full and bf16 are legal"},
       {int8 && opt.data_parallel != "replicated" && opt.shard == "even",
        "--moments int8 has a scale for each 256 elements, which --data-parallel {--data-parallel} with --shard "
        "even cuts; legal are --shard blocks, --shard whole and --data-parallel replicated"}});
  for (const char* flag : {"--muon-momentum", "--muon-scale", "--muon-lr-ratio"})
    if (!muon && opt.given(flag)) reject("{} is for --optimizer muon; here it is {}", flag, opt.optimizer);
}

void check_saving(const options& opt) {
  if (opt.checkpoint_dir.empty()) {
    std::string needs = opt.resume == "auto" ? "--resume auto" : "";
    for (const char* flag :
         {"--save-every", "--keep", "--keep-every", "--keep-best", "--checkpoint-io", "--checkpoint-staging"})
      if (opt.given(flag)) needs = flag;
    if (!needs.empty()) reject("{} needs --checkpoint-dir, which names where the training state is saved", needs);
  }
  if (opt.resume.empty()) plait::fail("--resume is empty; legal are none, auto, a saved step, or a folder of them");
}

/// Refuses options that are for GPUs.
void check_cpu(const options& opt) {
  check_rules(
      opt,
      {{opt.offload != "none",
        "--offload {--offload}: with --device cpu everything is in the host's memory; legal are none, and --device "
        "cuda"},
       {opt.backend == "nccl",
        "--backend nccl moves the memory of GPUs: give --device cuda, or --backend threads or mpi"},
       {opt.tf32, "--tf32 needs --device cuda; the CPU computes float in full"},
       {opt.checkpoint_staging != "pinned",
        "--checkpoint-staging {--checkpoint-staging} is for --device cuda; on the CPU no memory is pinned: leave "
        "it out"},
       {opt.graph == "on", "--graph on needs --device cuda; on the CPU, auto and off are legal"},
       {!opt.products.empty(),
        "--products needs --device cuda; the libraries of the CPU choose their algorithms themselves"},
       {opt.attention_kernel != "auto",
        "--attention-kernel {--attention-kernel} needs --device cuda; on the CPU, auto is legal"},
       {opt.attention_sums != "fixed",
        "--attention-sums {--attention-sums} needs --device cuda; on the CPU every sum has one order"}});
}

/// Refuses options that are for the CPU, and types that are not instantiated for GPUs (CMakeLists.txt).
void check_gpu(const options& opt) {
  check_rules(
      opt,
      {{opt.backend == "mpi",
        "--backend mpi moves the host's memory; with --device cuda, --backend nccl is legal (which mpirun may start) "
        "and threads"},
       {opt.precision == "double",
        "--precision double is not supported for --device cuda; legal are float, bf16 and bf16-no-masters"},
       {opt.precision == "float" && opt.strategy != "sp",
        "--device cuda --precision float is built for --strategy sp alone; here it is {--strategy} (bf16 has either)"},
       {opt.tf32 && opt.precision != "float", "--tf32 is for --precision float; here it is {--precision}"},
       {opt.attention_kernel == "cudnn" && !in_bf16(opt),
        "--attention-kernel cudnn computes in bf16; with --precision {--precision}, auto and own are legal"},
       {opt.attention_sums == "any" && (!in_bf16(opt) || opt.attention_kernel == "own"),
        "--attention-sums any is an order of cuDNN's, which computes in bf16; it needs --precision bf16 and "
        "--attention-kernel auto or cudnn, and here they are {--precision} and {--attention-kernel}"},
       {opt.graph == "on" && opt.dropout > 0,
        "--graph on with --dropout {--dropout}: a replay would drop the same elements in every step; legal are --graph "
        "off and --dropout 0"},
       {opt.threads != 1,
        "--threads is {--threads}, but with --device cuda no product runs on the CPU; leave it out"}});
}

/// Refuses options that do not fit together, without a look at files and ranks. Throws `plait::error` with a text that
/// names the option and its legal values.
void check_options(const options& opt) {
  check_inputs(opt);
  check_command(opt);
  check_layout(opt);
  check_numerics(opt);
  check_lora(opt);
  check_rules(opt, {{parse_recompute(opt.recompute).budget && offloads_activations(opt),
                     "--recompute {--recompute} with --offload {--offload}: a budget counts activations that stay on "
                     "the device; legal with it are none, selective, full and every:K"}});
  check_steps(opt);
  check_training(opt);
  check_saving(opt);
  opt.device == "cuda" ? check_gpu(opt) : check_cpu(opt);
  with_types(opt, []<class, class>() {});  // throws if this program is not built for them
}

/// Returns the command line without its first word, and without all --data but the last: as for every other option,
/// only the last counts.
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

/// Replaces a command, generate or evaluate, by the options that it means.
std::vector<std::string> without_command(std::vector<std::string> words, options& opt) {
  if (words.empty() || (words[0] != "generate" && words[0] != "evaluate")) return words;
  opt.command = words[0];
  if (words.size() > 1 && (words[1] == "--help" || words[1] == "-h")) return {words[1]};
  if (words.size() < 2 || words[1].empty() || words[1][0] == '-')
    reject("{} needs a saved step, a folder of them or a model directory, as in {} run/step-00000100", opt.command,
           opt.command);
  const std::vector<std::string> means{"--init-from", words[1], "--steps", "0"};
  words.erase(words.begin(), words.begin() + 2);
  words.insert(words.begin(), means.begin(), means.end());
  return words;
}

/// Returns the options of a parsed command line by name. Numbers are in their shortest form (1e-3 is 0.001), an empty
/// text is '', and only switches that are on are listed.
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

/// The options of a command line in groups, with checks of their values.
class option_list {
 public:
  explicit option_list(CLI::App& app) : app_(app) {
    app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }
  CLI::App& app() { return app_; }
  void group(const char* name) { app_.option_defaults()->group(name); }
  template <class T>
  CLI::Option* add(const char* flag, T& value, const std::string& help) {
    return app_.add_option(flag, value, help)->capture_default_str();
  }
  /// A whole number from `least` to `most`.
  template <std::integral T>
  void add(const char* flag, T& value, std::type_identity_t<T> least, std::type_identity_t<T> most,
           const std::string& help) {
    add(flag, value, help);
    checks_.push_back([=, &value] { within(flag, value, least, most); });
  }
  /// A number that is at least `low` and below `below`.
  void add(const char* flag, double& value, double low, double below, const std::string& help) {
    add(flag, value, help);
    checks_.push_back([=, &value] { in_range(flag, value, low, below); });
  }
  /// An option that is one of some words.
  void choice(const char* flag, std::string& value, std::initializer_list<const char*> legal, const std::string& help) {
    add(flag, value, help);
    checks_.push_back([=, &value, words = std::vector<std::string>(legal.begin(), legal.end())] {
      if (std::find(words.begin(), words.end(), value) == words.end())
        reject("{} '{}' is unknown; legal are {}", flag, value, fmt::join(words, ", "));
    });
  }
  /// An option that names `what`. It must not be empty, as it is if a shell variable is not set.
  void path(const char* flag, std::string& value, const char* what, const std::string& help) {
    const CLI::Option* const option = add(flag, value, help);
    checks_.push_back([=, &value] {
      if (option->count() > 0 && value.empty()) reject("{} is empty; name {}, or leave it out", flag, what);
    });
  }
  /// Throws `plait::error` for a word or a path that is not legal.
  void check() const {
    for (const std::function<void()>& one : checks_) one();
  }

 private:
  CLI::App& app_;
  std::vector<std::function<void()>> checks_;
};

// With these limits no count of samples or tokens overflows.
constexpr std::int64_t most_steps = std::int64_t{1} << 32, no_limit = std::numeric_limits<std::int64_t>::max();

void add_ranks_and_model(option_list& list, options& opt) {
  list.group("Ranks");
  list.add("--mesh", opt.mesh, "extents of the axes dp, pp, ep (experts), cp and tp, as in dp=2,tp=4");
  list.choice("--device", opt.device, {"cpu", "cuda"}, "cpu or cuda");
  list.choice("--backend", opt.backend, {"threads", "mpi", "nccl"},
              "threads: ranks are threads of this process, which share a GPU on cuda; mpi: ranks of mpirun; nccl: a "
              "GPU for each rank, started by torchrun, srun or mpirun, or all in this process");
  list.add("--deadline", opt.deadline, 0, 1e9,
           "with mpi and nccl: if a collective takes more seconds than this, a rank is lost, and all ranks end; 0: "
           "wait for ever");
  list.group("Model");
  list.add("--model", opt.model, "a Hugging Face config.json, or a preset: " + plait::llama_preset_names());
  list.add("--attention-mask", opt.attention_mask,
           "which tokens a token sees: model (as config.json has it), causal (itself and all before) or window:N "
           "(itself and N - 1 before)");
  list.path(
      "--init-from", opt.init_from, "a folder",
      "initial weights: a Hugging Face model directory, a saved step of any layout, or a folder of steps, of which the "
      "newest is taken; the model's shape is read from it too, except for steps of import-hf, which need --model");
  list.choice("--weights-order", opt.weights_order, {"hugging-face", "megatron", "meta"},
              "names and order of the tensors of --init-from, if it has a Hugging Face config.json: hugging-face, "
              "megatron (q, k, v and gate, up in one) or meta (rotary pairs)");
  list.path("--export-hf", opt.export_hf, "a folder",
            "a new directory, to which the trained model is written for transformers");
  list.choice("--export-order", opt.export_order, {"hugging-face", "megatron", "meta"},
              "names and order of the tensors that --export-hf writes: hugging-face, which transformers opens, "
              "megatron or meta, as --weights-order reads them");
  list.add("--lora", opt.lora, 0, 1 << 20,
           "rank of low-rank adapters of the blocks' linears; only the adapters are trained, and the weights of "
           "--init-from stay as they are; 0: no adapters");
  list.add("--lora-alpha", opt.lora_alpha,
           "with --lora, the scale of the adapters, which is divided by the rank; -1: twice the rank");
  list.choice("--lora-linears", opt.lora_linears, {"all", "shared", "attention"},
              "with --lora, the linears that have adapters: all (of the blocks), shared (all but the experts that a "
              "router chooses) or attention; routers and gates have none");
}

void add_parallelism(option_list& list, options& opt) {
  list.group("Parallelism");
  list.choice("--strategy", opt.strategy, {"sp", "tp"}, "sp: tensor and sequence parallel; tp: tensor parallel only");
  list.choice("--data-parallel", opt.data_parallel, {"replicated", "zero1", "zero2", "zero3"},
              "state that is cut over the data ranks of dp and cp: nothing (replicated), the optimizer's state "
              "(zero1), also reduced gradients (zero2), also parameters between their uses (zero3)");
  list.choice("--shard", opt.shard, {"even", "whole", "blocks"},
              "with zero1 to zero3, where units of parameters are cut: even (anywhere), whole (between matrices, for "
              "muon), or blocks (of 256 elements, for --moments int8)");
  list.choice("--replicate-over", opt.replicate_over, {"none", "dp", "cp"},
              "with zero1 to zero3, a hybrid: parts are equal over this axis, dp or cp, and cut over the other; none: "
              "cut over both");
  list.add("--prefetch", opt.prefetch, 0, 1 << 20, "with zero3, how many uses ahead a unit's parameters are gathered");
  list.choice("--reshard-after-forward", opt.reshard_after_forward, {"on", "off"},
              "with zero3, whether parameters are released after a forward pass and gathered again: on or off");
  list.choice("--overlap", opt.overlap, {"on", "off"},
              "on: a unit's gradients are reduced during the backward pass; off: after it");
  list.add("--tensor-overlap", opt.tensor_overlap, 1, 1 << 20,
           "chunks in which linears gather and reduce over tp while their products run; 1: no overlap");
  list.choice("--reduce-in", opt.reduce_in, {"full", "bf16", "float"},
              "number type in which gradients are summed over data ranks: full (their own type), bf16, or, if "
              "--gradients keeps them in bf16, float, which rounds each sum once");
  list.choice("--attention", opt.attention,
              {"ring", "ring:zigzag", "ring:contiguous", "all_gather_kv", "all_gather_kv:zigzag",
               "all_gather_kv:contiguous", "ulysses", "ulysses:zigzag", "ulysses:contiguous"},
              "attention over a sequence that cp shards: ring, all_gather_kv or ulysses, then :zigzag or :contiguous, "
              "the order of the sequence");
  list.add("--schedule", opt.schedule, fmt::format("schedule of the pipeline: {}", plait::schedule_names));
  list.choice(
      "--split", opt.split, {"flops", "measured", "even"},
      "how layers are divided over the stages: flops (by counted operations, including the head's), measured, or even");
}

void add_data_and_steps(option_list& list, options& opt) {
  list.group("Data");
  list.app()
      .add_option("--data", opt.data,
                  "text files (bytes, or text for --tokenizer), Megatron .bin/.idx or flat .bin token files")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  list.add("--data-format", opt.data_format, "auto, bytes, text, megatron or nanogpt");
  list.path("--tokenizer", opt.tokenizer, "a tokenizer.json, or its folder",
            "a Hugging Face tokenizer.json, or its folder, which tokenizes text in --data, --held-out and --prompt; "
            "without it, the one in --init-from's model directory, or the one that a saved step was trained with");
  list.add("--data-weights", opt.data_weights_text,
           "as in 0.7,0.3: samples are drawn from each --data in this proportion; a source that is used up begins "
           "again in another order; without it, all --data are one stream");
  list.choice("--documents", opt.documents, {"joined", "apart"},
              "joined: tokens see earlier documents of their sequence; apart: they do not, and no loss is taken across "
              "documents");
  list.add("--end-of-document", opt.end_of_document,
           "the token that ends a document; -1: documents end where the index of Megatron files says");
  list.choice("--on-new-data", opt.on_new_data, {"stop", "begin"},
              "if the step of --resume was trained on other data: stop, or begin the new data");
  list.choice("--on-new-schedule", opt.on_new_schedule, {"stop", "follow"},
              "if the step of --resume was trained with another learning rate schedule (--lr, --warmup, "
              "--min-lr-ratio, --lr-schedule, --steps): stop, or follow the new one from that step on");
  list.group("Steps");
  list.add("--steps", opt.steps, 0, most_steps, "optimizer steps");
  list.add("--seq", opt.seq, 1, std::int64_t{1} << 31, "tokens in a sequence");
  list.add("--micro-batch", opt.micro_batch, 1, 1 << 20, "sequences per data-parallel rank in a microbatch");
  list.add("--global-batch", opt.global_batch, 0, 1 << 24, "sequences per step over all ranks; 0: one microbatch");
  list.add("--seed", opt.seed, 0, std::int64_t{1} << 62, "seed of weights, data order and dropout");
}

void add_numbers(option_list& list, options& opt) {
  list.group("Numbers and memory");
  list.choice("--precision", opt.precision, {"float", "double", "bf16", "bf16-no-masters"},
              "float, double (cpu), bf16 (with float master weights; slower than float on a CPU without avx512_bf16) "
              "or bf16-no-masters (weights only in bf16, rounded stochastically)");
  list.choice("--gradients", opt.gradients, {"full", "bf16"},
              "number type of the parameters' gradients: full (float; double with --precision double) or, with "
              "--precision bf16 and bf16-no-masters, bf16, to which each pass adds a sum in float");
  list.choice("--moments", opt.moments, {"full", "bf16", "int8"},
              "number type of the optimizer's moments, two for each element in AdamW, one in Muon: full (float; double "
              "with --precision double), bf16 or int8 (8 bits, and a scale for each 256 elements); bf16 and int8 are "
              "rounded stochastically");
  list.choice("--offload", opt.offload, {"none", "optimizer", "activations", "both"},
              "on cuda, state in pinned host memory in place of the GPU's: none, optimizer (moments, and the float "
              "masters of bf16; an update waits for the bus), activations (between the passes of a layer, which hide "
              "the copies if the bus is fast enough) or both; no bit of a result changes");
  list.add("--deterministic", opt.deterministic,
           "equal bits on every mesh, schedule and number of microbatches, on the CPU: off, or the numbers of leaves "
           "into which sums over features, samples of a step and the sequence are cut, as in 8,16,4; 8 means 8,8,1");
  list.add("--check", opt.check,
           "steps in which ranks compare values that must be equal (tokens, parameters, gradients, inputs of layers): "
           "first (also the first after a load), off, always, or every:N steps; a second number, as in every:100:1e-5, "
           "allows differences up to this share of a value's norm");
  list.app().add_flag("--tf32", opt.tf32, "on cuda in float: products on tensor cores, with factors of 10 bits");
  list.add("--recompute", opt.recompute,
           "what layers compute again for the backward pass: none, selective (cheap operations), full (all but their "
           "input), every:K (every K-th layer in full), or budget:SIZE (the cheapest choice with which a rank's layers "
           "keep no more than, for instance, 512M)");
}

void add_checkpoints(option_list& list, options& opt) {
  list.group("Checkpoints");
  list.path("--checkpoint-dir", opt.checkpoint_dir, "a folder",
            "folder of saved training states: one is saved at the end, and when a signal ends the run; SIGUSR1 saves "
            "at once");
  list.add("--save-every", opt.save_every, 0, no_limit, "steps between two saves; 0: save only at the end");
  list.add("--keep", opt.keep, 1, no_limit, "number of newest saved steps to keep");
  list.add("--keep-every", opt.keep_every, 0, no_limit,
           "saved steps that this number divides are kept too; 0: none of them");
  list.choice("--keep-best", opt.keep_best, {"none", "held-out"},
              "none, or held-out: each save computes the loss on --held-out, and the step with the lowest loss is kept "
              "too, in this run and in runs that continue it");
  list.choice("--checkpoint-io", opt.checkpoint_io, {"auto", "uring", "threads"},
              "how steps are written: uring (io_uring), threads (ordinary calls), or auto (uring if available)");
  list.choice("--checkpoint-staging", opt.checkpoint_staging, {"pinned", "pageable"},
              "on cuda, the host memory to which a save copies, twice a rank's share: pinned, or pageable, for which "
              "training waits longer");
  list.add("--resume", opt.resume,
           "where to continue from: none, a saved step or a folder of steps, or auto (the newest in --checkpoint-dir, "
           "if there is one); mesh and layout may differ from the saved ones");
}

void add_training(option_list& list, options& opt) {
  list.group("Optimizer and loss");
  list.add("--lr", opt.lr, "peak learning rate");
  list.add("--warmup", opt.warmup, "warm-up steps; -1: a tenth of the steps");
  list.add("--min-lr-ratio", opt.min_lr_ratio, "last learning rate over the peak");
  list.add("--lr-schedule", opt.lr_schedule, "cosine, linear or constant");
  list.add("--clip", opt.clip, 0, 1e30, "limit of the global gradient norm; 0: none");
  list.choice("--on-nonfinite", opt.on_nonfinite, {"stop", "skip"},
              "a step whose gradients are not finite changes no weight: then stop, or skip it and continue");
  list.add("--weight-decay", opt.weight_decay, 0, 1e6, "weight decay of matrices");
  list.choice("--optimizer", opt.optimizer, {"adamw", "muon"},
              "adamw, or muon: the matrices of hidden layers move in nearly orthogonal directions, and AdamW updates "
              "the embedding, the head and everything else");
  list.add("--muon-momentum", opt.muon_momentum, 0, 1, "Nesterov momentum of Muon");
  list.choice("--muon-scale", opt.muon_scale, {"match_rms_adamw", "original"},
              "size of Muon's updates: match_rms_adamw (as large as AdamW's, for its --lr) or original (by the matrix' "
              "shape, for a larger --muon-lr-ratio)");
  list.add("--muon-lr-ratio", opt.muon_lr_ratio, 1e-6, 1e6, "learning rate of Muon's matrices over --lr");
  list.add("--dropout", opt.dropout, 0, 1, "dropout on the output of each residual branch");
  list.add("--label-smoothing", opt.label_smoothing, 0, 1, "weight of the uniform distribution");
  list.add("--z-loss", opt.z_loss, 0, 1e6, "weight of lse^2 in the loss");
  list.add("--loss-chunks", opt.loss_chunks, 1, 1 << 20,
           "chunks of a microbatch's tokens; only one chunk at a time has its logits in memory");
  list.add("--balance-loss", opt.balance_loss, 0, 1e6,
           "weight of the loss that keeps experts evenly chosen, over the tokens of --balance-over");
  list.choice(
      "--balance-over", opt.balance_over, {"sequence", "microbatch", "step"},
      "tokens over which --balance-loss counts choices: each sequence, each microbatch on all ranks, or the step "
      "(by the counts of the step before); only microbatch depends on the number of microbatches");
  list.add("--router-z-loss", opt.router_z_loss, 0, 1e6, "weight of lse^2 of the experts' scores");
  list.add("--expert-bias-rate", opt.expert_bias_rate, 0, 1e6,
           "change per step of the biases that balance experts without a loss");
  list.add("--expert-limit", opt.expert_limit, 0, 1e6,
           "most rows that an expert takes of a sequence, over its even share; 0: all");
  list.choice(
      "--expert-rows", opt.expert_rows, {"counted", "padded"},
      "rows that ranks send to experts: counted (the host waits for the counts in each pass) or padded (to what "
      "--expert-limit allows, so that a graph can replay the step)");
}

void add_evaluation_and_device(option_list& list, options& opt) {
  list.group("Evaluation");
  list.add("--held-out", opt.held_out_text,
           "data for the evaluation at the end: a file, as for --data, or the fraction of each --data that is kept for "
           "it; --data-weights also apply to it");
  list.add("--eval-every", opt.eval_every, 0, most_steps, "steps between two evaluations; 0: evaluate only at the end");
  list.group("Device");
  list.add("--threads", opt.threads, 1, 1024, "threads of each rank's matrix products, on the CPU");
  list.choice("--graph", opt.graph, {"auto", "on", "off"},
              "on cuda, replay steps as a graph: on, off or auto (if possible)");
  list.choice("--attention-kernel", opt.attention_kernel, {"auto", "own", "cudnn"},
              "on cuda: own, cudnn, or auto (cuDNN's if possible)");
  list.choice("--attention-sums", opt.attention_sums, {"fixed", "any"},
              "on cuda, the order in which cuDNN sums attention's gradients: fixed (equal bits in every run) or any "
              "(faster)");
  list.path("--products", opt.products, "a file",
            "on cuda, file of the algorithms of matrix products: read if it exists, otherwise measured in the first "
            "step and written");
  list.add("--peak-tflops", opt.peak_tflops, 0, 1e9,
           "peak of a device (on the CPU, of a process), for MFU; 0: the known value of the GPU");
}

void add_outputs(option_list& list, options& opt) {
  list.group("Logs and pictures");
  list.path("--log", opt.log, "a file",
            "JSON lines: one per step, then a summary; the log of an earlier run is renamed to FILE.1");
  list.add(
      "--log-hashes", opt.log_hashes, 0, most_steps,
      "steps between two hashes of each parameter in the log, which checkpoint_tool compare-runs compares; 0: none");
  list.app().add_flag(
      "--log-gradient-hashes", opt.log_gradient_hashes,
      "with --log-hashes, also a hash of each parameter's gradient, summed over all ranks and not yet clipped");
  list.path("--plot", opt.plot, "a file", "loss curve as SVG, with held-out losses and the earlier runs in --log");
  list.path("--report", opt.report, "a file",
            "an HTML page about the run, written at its end from --log: curves, communication, memory, options, and "
            "the step of --timeline; train_llama report LOG PAGE makes one from a log");
  list.path("--trace", opt.trace, "a file", "one step of all ranks as JSON for chrome://tracing or ui.perfetto.dev");
  list.path("--timeline", opt.timeline, "a file", "a step as SVG, simulated and measured");
  list.group("Sampled text");
  list.add("--sample", opt.sample, 0, 1 << 24,
           "tokens of text to sample at the end; 0: none, which is the default if tokens are not bytes");
  list.add("--temperature", opt.temperature, 0, 1e6, "temperature of sampling; 0: always the likeliest token");
  list.add("--prompt", opt.prompt, "beginning of the sampled text");
}

void add_planning(option_list& list, options& opt) {
  list.group("Planning");
  list.path("--cluster", opt.cluster, "hardware",
            fmt::format("the machine, to predict a step's time and memory: {}, or a description that ends in .json, "
                        "and its number of ranks, as in cpu:8 or my.json:8 (see plan_llama --calibrate)",
                        plait::planner::hardware_names()));
  list.choice("--plan", opt.plan, {"given", "auto"},
              "given, or auto: --mesh, --schedule, --data-parallel, --replicate-over, --micro-batch, --recompute and, "
              "on cuda, --offload, if not given, become those of the layout that is predicted to be fastest on "
              "--cluster for --global-batch");
  list.add("--memory-share", opt.memory_share, 1e-12, 1e9,
           "share of the available memory that a run may need; a run that needs more is refused before it starts");
  list.app().add_flag("--dry-run", opt.dry_run, "print the plan (layouts, collectives, memory) and stop");
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
  app.footer(
      "Commands, before the options:\n"
      "  generate STEP --prompt TEXT     print text that begins with TEXT\n"
      "  evaluate STEP --held-out FILE   print the loss over a file\n"
      "STEP is what --init-from takes: a saved step, a folder of them, or a model directory of Hugging Face.");
  option_list list(app);
  add_ranks_and_model(list, opt);
  add_parallelism(list, opt);
  add_data_and_steps(list, opt);
  add_numbers(list, opt);
  add_checkpoints(list, opt);
  add_training(list, opt);
  add_evaluation_and_device(list, opt);
  add_outputs(list, opt);
  add_planning(list, opt);
  list.group("Options in a file");
  app.set_config("--config", "",
                 "a TOML file of options, as --write-config writes it; options on the command line take precedence");
  app.allow_config_extras(CLI::config_extras_mode::error);
  std::string written;
  const CLI::Option* const writes =
      app.add_option("--write-config", written, "write the given options to a file, and stop")->configurable(false);
  const std::vector<std::string> words = without_command(last_data(argc, argv), opt);
  try {
    std::vector<std::string> reversed(words.rbegin(), words.rend());  // CLI11 takes them in reverse order
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
    reject("{} (--help lists the options)", reading_error(app, e, words));
  }
  opt.by_name = named_values(app);
  for (const CLI::Option* o : app.get_options())
    if (o->count() > 0) opt.given_options.push_back(o->get_name());
  opt.data_weights = parse_weights(opt.data_weights_text, opt.data.size());
  parse_held_out(opt);
  if (opt.lora_alpha == -1) opt.lora_alpha = 2 * static_cast<double>(opt.lora);
  opt.leaves = parse_deterministic(opt.deterministic);
  opt.compared = parse_check(opt.check);
  list.check();
  check_options(opt);
  if (writes->count() == 0) return true;
  if (speaks) plait::write_file_atomically(written, app.config_to_str(), "--write-config");
  return false;
}
