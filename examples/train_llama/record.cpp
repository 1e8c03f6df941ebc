#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "../about.hpp"
#include "../number_text.hpp"
#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/step_data.hpp"
#include "plait/io/json_tree.hpp"
#include "plait/io/mapped_file.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/models/hugging_face_directory.hpp"
#include "plait/models/llama_config_json.hpp"
#include "plait/nn/parameter/info.hpp"
#include "plait/schedule/parse.hpp"
#include "plan.hpp"
#include "run.hpp"
#include "train_llama/data/tokens.hpp"

namespace {

/// Returns a digest of bytes and of the `digest` of earlier bytes. If any one word differs, the digest differs.
std::uint64_t digest_of(std::span<const std::byte> bytes, std::uint64_t digest) {
  while (!bytes.empty()) {
    std::uint64_t word = 0;
    const std::size_t n = std::min(bytes.size(), sizeof word);
    std::memcpy(&word, bytes.data(), n);
    digest = (digest ^ word) * 0x9E3779B97F4A7C15ull;
    digest ^= digest >> 32;
    bytes = bytes.subspan(n);
  }
  return digest;
}

/// Returns "4432803 bytes with digest 0123456789abcdef" for a file. In a file of more than 64 MiB the digest covers the
/// first MiB, with any header, the last MiB, and 4096 pieces of 4 KiB between them. So it finds another data set, but
/// maybe not a few changed tokens.
std::string content_text(const std::string& path) {
  constexpr std::size_t whole = std::size_t{64} << 20, end = std::size_t{1} << 20, piece = 4096, pieces = 4096;
  const plait::mapped_file file(path, "--data");
  const std::span<const std::byte> bytes = file.bytes();
  std::uint64_t digest = bytes.size();
  if (bytes.size() <= whole) {
    digest = digest_of(bytes, digest);
  } else {
    digest = digest_of(bytes.first(end), digest);
    for (std::size_t i = 0; i < pieces; ++i)
      digest = digest_of(bytes.subspan(end + (bytes.size() - 2 * end - piece) / pieces * i, piece), digest);
    digest = digest_of(bytes.last(end), digest);
  }
  return fmt::format("{} bytes with digest {:016x}", bytes.size(), digest);
}

/// Returns the files that one --data names: one file, or Megatron's two.
std::vector<std::string> files_of(const std::string& path) {
  std::string stem = path;
  if (stem.ends_with(".bin") || stem.ends_with(".idx")) stem.resize(stem.size() - 4);
  std::vector<std::string> files;
  std::error_code ignored;
  for (const std::string& file : {path, stem + ".bin", stem + ".idx"})
    if (std::filesystem::is_regular_file(file, ignored) && std::find(files.begin(), files.end(), file) == files.end())
      files.push_back(file);
  return files;
}

}  // namespace

std::string data_text(const options& opt) {
  std::string text;
  for (std::size_t i = 0; i < opt.data.size(); ++i) {
    for (const std::string& file : files_of(opt.data[i]))
      text += fmt::format("{}{}", text.empty() ? "" : ", ", content_text(file));
    const plait::token_format format = plait::token_format_from(opt.data_format);
    const plait::token_format is = format == plait::token_format::automatic
                                       ? plait::guess_token_format(opt.data[i], !opt.tokenizer.empty())
                                       : format;
    text += fmt::format(" as {}", plait::name_of(is));
    if (is == plait::token_format::text) text += " for a tokenizer of " + content_text(opt.tokenizer);
    if (!opt.data_weights.empty()) text += fmt::format(" at weight {}", opt.data_weights[i]);
  }
  return text + fmt::format(", {} held out", opt.held_out);
}

namespace {

enum class compared { by_value, not_at_all, by_what_it_names, by_whether_it_is_given };

/// Options that may differ between ranks, and how they are compared. All other options must be equal.
constexpr struct {
  std::string_view option;
  compared how;
} exceptions[] = {
    {"--log", compared::not_at_all},           // rank 0 writes it
    {"--plot", compared::not_at_all},          // rank 0 writes it
    {"--report", compared::not_at_all},        // rank 0 writes it
    {"--peak-tflops", compared::not_at_all},   // only rank 0 uses it
    {"--memory-share", compared::not_at_all},  // each host is checked separately
    {"--threads", compared::not_at_all},       // machines may have more or fewer cores; no result depends on it
    {"--checkpoint-dir", compared::by_whether_it_is_given},  // all ranks use rank 0's, and must be able to write to it
    {"--cluster", compared::by_what_it_names},               // compared by the resulting layout
    {"--trace", compared::by_whether_it_is_given},           // rank 0 writes it, but every rank records the step
    {"--timeline", compared::by_whether_it_is_given},        // rank 0 writes it, but every rank records the step
    {"--products", compared::by_what_it_names},              // rank 0 writes it; all read it, maybe from other folders
    {"--model", compared::by_what_it_names},                 // files may be in other folders on other machines
    {"--data", compared::by_what_it_names},                  // files may be in other folders on other machines
    {"--init-from", compared::by_what_it_names},             // files may be in other folders on other machines
    {"--tokenizer", compared::by_what_it_names},             // files may be in other folders on other machines
};

compared how_to_compare(std::string_view option) {
  for (const auto& e : exceptions)
    if (e.option == option) return e.how;
  return compared::by_value;
}

/// Returns "21 tensors, digest 0123456789abcdef". The digest is of names, shapes, types and the first page of each.
std::string weights_text(const plait::model_directory& weights) {
  std::uint64_t digest = weights.entries.size();
  const auto add = [&](std::string_view text) { digest = digest_of(std::as_bytes(std::span(text)), digest); };
  std::vector<std::byte> page;
  for (const plait::weight_tensor& e : weights.entries) {
    add(e.name);
    add(plait::name_of(e.dtype));
    for (const std::int64_t extent : e.shape) add(std::to_string(extent));
    const auto width = static_cast<std::int64_t>(size_of(e.dtype));
    const std::int64_t some = std::min<std::int64_t>(e.size(), 4096 / width);
    page.resize(static_cast<std::size_t>(some * width));
    e.read(0, some, page.data());
    digest = digest_of(page, digest);
  }
  return fmt::format("{} tensors, digest {:016x}", weights.entries.size(), digest);
}

/// Returns "step-00000004, digest 0123456789abcdef". The digest is of the manifest, which has checksums of all data.
std::string step_text(const std::string& path) {
  const std::string text = plait::read_whole(plait::machine_files(), path + "/manifest.json");
  return fmt::format("{}, digest {:016x}", std::filesystem::path(path).filename().string(),
                     digest_of(std::as_bytes(std::span(text)), text.size()));
}

/// Returns the keys of a model's config.json with their values as JSON, with numbers in their shortest form.
std::vector<plait::setting> model_settings(const plait::llama_config& c) {
  std::vector<plait::setting> settings;
  const auto keys = plait::parse_json<nlohmann::ordered_json>(plait::llama_config_text(c), "config.json");
  for (const auto& [key, value] : keys.items())
    settings.push_back({key, value.is_number_float() ? fmt::format("{}", value.get<double>()) : value.dump()});
  return settings;
}

/// Returns the model that `model_settings` describes; nothing if there is no model, or one of an older program.
std::optional<plait::llama_config> model_of(const std::vector<plait::setting>& settings) try {
  nlohmann::json keys;
  for (const plait::setting& k : settings) keys[k.name] = plait::parse_json<nlohmann::json>(k.value, k.name);
  return plait::parse_llama_config(keys.dump(), "config.json");
} catch (const plait::error&) {
  return {};
}

}  // namespace

std::vector<plait::setting> agreed_settings(const setup& s) {
  std::vector<plait::setting> settings = {
      {"plait", fmt::format("{}.{}.{}", PLAIT_VERSION_MAJOR, PLAIT_VERSION_MINOR, PLAIT_VERSION_PATCH)}};
  for (const auto& [name, value] : s.opt.by_name) {
    const compared how = how_to_compare(name);
    if (how == compared::by_value) settings.push_back({name, value});
    if (how == compared::by_whether_it_is_given && value != "''") settings.push_back({name, ""});
  }
  for (const auto& [key, value] : model_settings(s.config)) settings.push_back({"--model's " + key, value});
  settings.push_back({"--init-from", s.weights              ? weights_text(*s.weights)
                                     : s.first_step.empty() ? ""
                                                            : step_text(s.first_step)});
  if (s.tokenizer) settings.push_back({"--tokenizer", content_text(s.opt.tokenizer)});
  std::vector<std::string> files;
  for (const std::string& path : s.opt.data)
    for (std::string& file : files_of(path)) files.push_back(std::move(file));
  for (std::size_t i = 0; i < files.size(); ++i)
    settings.push_back(
        {i == 0 ? "--data" : fmt::format("--data's file {}", i + 1),
         fmt::format("{} of {}", std::filesystem::path(files[i]).filename().string(), content_text(files[i]))});
  // Layouts are derived from the options and the model. They are compared, too, because they must be equal.
  std::string layers;
  for (const plait::stage_layers& part : s.stages)
    layers += fmt::format("{}{}", layers.empty() ? "" : ",", part.size());
  const std::string schedule = plait::to_csv(s.schedule);
  const std::uint64_t digest = digest_of(std::as_bytes(std::span(schedule)), schedule.size());
  settings.push_back({"--schedule's digest", fmt::format("{:016x}", digest)});
  settings.push_back({"--split's layers", layers});
  if (s.opt.plan == "auto")  // the layout depends on --cluster's file, which may be in other folders
    settings.push_back(
        {"--plan's layout", fmt::format("{} {} {} {} {} {}", s.opt.mesh, s.opt.schedule, s.opt.data_parallel,
                                        s.opt.micro_batch, s.opt.recompute, s.opt.offload)});
  if (!s.opt.products.empty()) {
    const auto bytes = std::as_bytes(std::span(s.products));
    settings.push_back({"--products", s.products.empty()
                                          ? "a file that is not there yet"
                                          : fmt::format("a file with digest {:016x}", digest_of(bytes, bytes.size()))});
  }
  if (s.as_graph) settings.push_back({"steps replayed as a graph", ""});
  if (s.cudnn) settings.push_back({"cuDNN's attention", ""});
  return settings;
}

namespace {

plait::chosen_files chosen(const options& opt) {
  using plait::file_io;
  const file_io io = opt.checkpoint_io == "uring"     ? file_io::uring
                     : opt.checkpoint_io == "threads" ? file_io::threads
                                                      : file_io::automatic;
  return plait::choose_files(io, "--checkpoint-io");
}

}  // namespace

plait::file_system& checkpoint_files(const options& opt) { return *chosen(opt).files; }

std::string checkpoint_io_text(const options& opt) {
  if (opt.checkpoint_dir.empty()) return {};
  const plait::chosen_files files = chosen(opt);
  if (files.io == plait::file_io::uring) return "steps are written through io_uring (--checkpoint-io uring)\n";
  return "steps are written by threads" + (files.why.empty() ? "" : ", since " + files.why) +
         " (--checkpoint-io threads)\n";
}

namespace {

constexpr std::string_view between = ", --";     ///< separates options in the text that a step has of them
constexpr std::string_view of_model = "model:";  ///< prefix of a model's keys in a step

struct found_step {
  std::string path;
  plait::manifest saved;
};

/// Opens a step, and compares its tensors with those of the plans.
found_step fitting_step(const setup& s, const std::string& path, bool weights_only) {
  plait::file_system& files = plait::machine_files();
  std::vector<plait::invalid_step> invalid_steps;
  found_step out{plait::detail::step_path(files, path, invalid_steps), {}};
  out.saved = plait::read_step(files, out.path);
  if (const std::string missing = plait::missing_data(files, out.path, out.saved); !missing.empty())
    plait::fail(missing);
  std::vector<plait::safetensors_declaration> wanted;
  const auto has_adapters = [&] {
    return std::any_of(out.saved.tensors.begin(), out.saved.tensors.end(),
                       [](const plait::stored_tensor& t) { return plait::is_of_adapter(t.name); });
  };
  for (const run_plan& plan : *s.plans)
    for (const plait::safetensors_declaration& t : plan.state)
      if (!weights_only || (!plait::is_of_optimizer(t.name) && (!plait::is_of_adapter(t.name) || has_adapters())))
        wanted.push_back(t);
  static_cast<void>(plait::tensors_of_step(out.saved, wanted, "'" + out.path + "'", weights_only));
  return out;
}

std::string line_of(const char* option, const found_step& step, const char* what) {
  std::uint64_t bytes = 0;
  for (const plait::stored_file& file : step.saved.files) bytes += file.bytes;
  return fmt::format("{}: step {} of '{}', {}, saved as '{}', fits; {}\n", option, step.saved.step, step.path,
                     size_text(static_cast<double>(bytes)), step.saved.layout, what);
}

/// Returns the newest step in --checkpoint-dir. Throws if this user cannot write steps there.
std::optional<std::uint64_t> newest_in(const std::string& directory) {
  plait::file_system& files = plait::machine_files();
  const auto kind = files.kind_of(directory);
  if (kind && *kind != plait::file_kind::directory) plait::fail({"'", directory, "' is not a directory"});
  const std::filesystem::path parent = std::filesystem::path(directory).parent_path();
  const std::string written = kind ? directory : parent.empty() ? "." : parent.string();
  if (::access(written.c_str(), W_OK | X_OK) != 0)
    plait::fail({"cannot write to '", written, "': ", std::strerror(errno)});
  if (!kind) return {};
  const auto newest = plait::newest_step(files, directory);
  return newest ? std::optional(newest->step) : std::nullopt;
}

/// Returns the options in a step's text of them, without hyphens before their names.
std::vector<std::pair<std::string_view, std::string_view>> options_in(std::string_view text) {
  std::vector<std::pair<std::string_view, std::string_view>> all;
  text.remove_prefix(std::min<std::size_t>(text.size(), 2));  // the first "--"
  while (!text.empty()) {
    const std::string_view one = text.substr(0, text.find(between));
    text.remove_prefix(std::min(text.size(), one.size() + between.size()));
    all.emplace_back(one.substr(0, one.find(' ')), one.substr(std::min(one.size(), one.find(' ') + 1)));
  }
  return all;
}

/// Calls f(name, value, saved value) for each option whose value in the step differs. Skips options that the step
/// lacks.
template <class F>
void each_changed(const setup& s, const plait::loaded_state& loaded, F&& f) {
  const std::string was = loaded.find_scalar<std::string>("train.options").value_or(""), is = training_text(s);
  for (const auto& [name, value] : options_in(is))
    for (const auto& [name_then, value_then] : options_in(was))
      if (name == name_then && value != value_then) f(name, value, value_then);
}

}  // namespace

std::string saved_text(const plait::loaded_state& loaded, const char* scalar) {
  return loaded.find_scalar<std::string>(scalar).value_or("not recorded: older than this record");
}

std::string training_text(const setup& s) {
  constexpr std::string_view names[] = {
      "--strategy",      "--optimizer",    "--muon-momentum",   "--muon-scale",   "--muon-lr-ratio",
      "--weight-decay",  "--clip",         "--dropout",         "--documents",    "--label-smoothing",
      "--z-loss",        "--precision",    "--gradients",       "--moments",      "--reduce-in",
      "--deterministic", "--on-nonfinite", "--end-of-document", "--balance-loss", "--balance-over",
      "--router-z-loss", "--expert-limit", "--expert-bias-rate"};
  std::string text = fmt::format("--global-batch {}", s.microbatches * s.sequences);
  for (const auto& [key, value] : model_settings(s.config))
    text += fmt::format("{}{}{} {}", between, of_model, key, value);
  for (const auto& [name, value] : s.opt.by_name)
    if (std::find(std::begin(names), std::end(names), name) != std::end(names))
      text += fmt::format("{}{} {}", between, name.substr(2), value);
  // A switch that is off is not among the options by name. The text names it, because older steps lack some switches.
  text += fmt::format("{}held-out {}", between,
                      s.opt.held_out_file.empty() ? s.opt.held_out_text : content_text(s.opt.held_out_file));
  text += fmt::format("{0}lora {1}{0}lora-alpha {2}{0}lora-linears {3}", between, s.opt.lora, s.opt.lora_alpha,
                      s.opt.lora_linears);
  return text + fmt::format("{}tf32 {}", between, s.opt.tf32);
}

std::string changed_options(const setup& s, const plait::loaded_state& loaded) {
  std::string text;
  each_changed(s, loaded, [&](std::string_view name, std::string_view value, std::string_view before) {
    text += fmt::format("{}--{} {}, which was {}", text.empty() ? "" : "; ", name, value, before);
  });
  return text;
}

std::optional<plait::llama_config> saved_model(const plait::loaded_state& loaded) {
  const std::string text = loaded.find_scalar<std::string>("train.options").value_or("");
  std::vector<plait::setting> settings;
  for (const auto& [name, value] : options_in(text))
    if (name.starts_with(of_model)) settings.push_back({std::string(name.substr(of_model.size())), std::string(value)});
  return model_of(settings);
}

std::string other_model_than(const plait::llama_config& config, const plait::loaded_state& loaded) {
  const std::optional<plait::llama_config> there = saved_model(loaded);
  if (!there) return {};
  std::string other;
  const auto compare = [&](const char* key, const auto& here, const auto& in_step) {
    if (other.empty() && here != in_step) other = fmt::format("{} is {}, and the step has {}", key, here, in_step);
  };
  compare("vocab_size", config.vocab, there->vocab);
  compare("hidden_size", config.hidden, there->hidden);
  compare("num_hidden_layers", config.layers, there->layers);
  compare("num_attention_heads", config.heads, there->heads);
  compare("num_key_value_heads", config.kv_heads, there->kv_heads);
  compare("head_dim", config.head_dim, there->head_dim);
  compare("intermediate_size", config.ffn, there->ffn);
  compare("tie_word_embeddings", config.tie_embeddings, there->tie_embeddings);
  compare("attention_bias", config.attention_bias, there->attention_bias);
  compare("mlp_bias", config.mlp_bias, there->mlp_bias);
  compare("qkv_bias", config.qkv_bias, there->qkv_bias);
  compare("qk_norm", config.qk_norm, there->qk_norm);
  compare("qk_norm_over_heads", config.qk_norm_over_heads, there->qk_norm_over_heads);
  compare("num_experts", config.mixture.experts, there->mixture.experts);
  compare("shared_expert_intermediate_size", config.mixture.shared_ffn, there->mixture.shared_ffn);
  return other;
}

bool judges_otherwise(const setup& s, const plait::loaded_state& loaded) {
  bool otherwise = false;
  each_changed(s, loaded, [&](std::string_view name, std::string_view, std::string_view) {
    for (const char* judging : {"documents", "end-of-document", "label-smoothing", "z-loss", "held-out"})
      otherwise = otherwise || name == judging;
  });
  return otherwise;
}

saved_adapters adapters_saved(const plait::loaded_state& loaded) {
  saved_adapters found;
  const std::string text = loaded.find_scalar<std::string>("train.options").value_or("");
  for (const auto& [name, value] : options_in(text)) {
    if (name == "lora") found.rank = std::atoll(std::string(value).c_str());
    if (name == "lora-alpha") found.alpha = std::atof(std::string(value).c_str());
    if (name == "lora-linears") found.linears = value;
  }
  return found;
}

std::string why_not_resumed(const setup& s, const std::string& path, const std::string& why) {
  try {
    plait::file_system& files = plait::machine_files();
    std::vector<plait::invalid_step> invalid_steps;
    const std::string step = plait::detail::step_path(files, path, invalid_steps);
    const plait::loaded_state saved{.path = step, .scalars = plait::read_step(files, step).scalars};
    const saved_adapters there = adapters_saved(saved);
    if (there.rank != s.opt.lora && there.rank > 0)
      return fmt::format("'{}' has adapters of rank {}, and --lora is {}; legal is --lora {}", step, there.rank,
                         s.opt.lora, there.rank);
    if (there.rank > 0 && there.linears != s.opt.lora_linears)
      return fmt::format("'{}' has adapters on {} linears, and --lora-linears is {}; legal is --lora-linears {}", step,
                         there.linears, s.opt.lora_linears, there.linears);
    if (there.rank != s.opt.lora)
      return fmt::format("'{}' has no adapters, and --lora is {}; --init-from begins adapters of its weights", step,
                         s.opt.lora);
    const std::string other = changed_options(s, saved);
    return other.empty() ? why : fmt::format("this run has other options than '{}': {}; {}", step, other, why);
  } catch (const plait::error&) {  // `why` has the error of the state already
    return why;
  }
}

void check_resumed(const setup& s, const plait::loaded_state& loaded) {
  const auto same = [&](const char* option, const char* scalar, std::int64_t here) {
    const auto there = loaded.scalar<std::int64_t>(scalar);
    if (there != here)
      throw plait::error_of_all(plait::cat({option, " is ", here, ", and '", loaded.path, "' was saved with ", there,
                                            ", by which it knows its place in the data; legal is ", there}));
  };
  same("--seed", "train.seed", s.opt.seed);
  same("--seq", "train.seq", s.opt.seq);
  const std::string there = saved_text(loaded, "train.data");
  if (s.data && there != s.data_text && s.opt.on_new_data == "stop" && !there.empty())
    throw plait::error_of_all(
        plait::cat({"--data, --data-weights or --held-out is not what '", loaded.path,
                    "' was saved with, so that its place in the data means nothing: it was [", there, "], and is [",
                    s.data_text, "]; --on-new-data begin continues with the first sample of the new data"}));
  const std::string rate = saved_text(loaded, "train.rate");
  if (static_cast<std::int64_t>(loaded.step) < s.opt.steps && rate != s.rate_text && s.opt.on_new_schedule == "stop" &&
      !rate.empty())
    throw plait::error_of_all(
        plait::cat({"--lr, --lr-schedule, --min-lr-ratio, --warmup or --steps gives another learning rate than '",
                    loaded.path, "' was trained with: it was [", rate, "], and is [", s.rate_text,
                    "]; --on-new-schedule follow continues at step ", loaded.step + 1, " of the new schedule"}));
}

std::string planned_state_text(const setup& s) {
  std::string text;
  const std::string& directory = s.opt.checkpoint_dir;
  std::optional<std::uint64_t> newest;
  if (!directory.empty()) static_cast<void>(checkpoint_files(s.opt));  // throws if the run would
  if (!directory.empty()) newest = about("--checkpoint-dir", [&] { return newest_in(directory); });
  std::int64_t begins = 0;
  const std::string resumed = s.opt.resume == "none"   ? ""
                              : s.opt.resume != "auto" ? s.opt.resume
                              : newest                 ? directory
                                                       : "";
  if (!resumed.empty()) {
    std::string other;
    const found_step step = about("--resume", [&] {
      found_step found = [&] {
        try {
          return fitting_step(s, resumed, false);
        } catch (const plait::error& e) {
          plait::fail(why_not_resumed(s, resumed, e.what()));
        }
      }();
      const plait::loaded_state state{.step = found.saved.step, .path = found.path, .scalars = found.saved.scalars};
      check_resumed(s, state);
      other = changed_options(s, state);
      return found;
    });
    begins = static_cast<std::int64_t>(step.saved.step);
    if (begins > s.opt.steps)
      reject("--steps is {}, and {} were done before --resume {}; ask for more steps", s.opt.steps, begins,
             s.opt.resume);
    text += line_of("--resume", step, "its bytes are compared with their checksums when it is loaded");
    if (!other.empty()) text += fmt::format("--resume: other options than before: {}\n", other);
  } else if (s.opt.resume == "auto") {
    text += fmt::format("--resume auto: nothing is saved in '{}' yet\n", directory);
  }
  if (!s.first_step.empty())
    text += line_of("--init-from", about("--init-from", [&] { return fitting_step(s, s.first_step, true); }),
                    resumed.empty() ? "its weights are taken, with a new optimizer" : "--resume takes its place");
  if (newest && static_cast<std::int64_t>(*newest) > begins)
    plait::fail({"--checkpoint-dir: '", directory, "' has step ", *newest, " already, and this run begins after step ",
                 begins, "; --resume auto continues from the newest; another directory can take this run's steps"});
  return text;
}
