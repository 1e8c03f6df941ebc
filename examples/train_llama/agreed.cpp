#include "agreed.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "data_text.hpp"
#include "plait/core/vector.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/models/hugging_face_directory.hpp"
#include "plait/schedule/parse.hpp"

namespace {

enum class compared { by_value, not_at_all, by_what_it_names, by_whether_it_is_given };

/// How options are compared that ranks may be given differently; all others are compared as they are.
constexpr struct {
  std::string_view option;
  compared how;
} exceptions[] = {
    {"--log", compared::not_at_all},           // rank 0 writes it
    {"--plot", compared::not_at_all},          // likewise
    {"--report", compared::not_at_all},        // likewise
    {"--peak-tflops", compared::not_at_all},   // rank 0 reports by it
    {"--memory-share", compared::not_at_all},  // each host is looked at by itself
    {"--threads", compared::not_at_all},       // machines may have more or fewer cores; no result depends on it
    {"--checkpoint-dir", compared::by_whether_it_is_given},  // rank 0's is taken, which all must be able to write to
    {"--cluster", compared::by_what_it_names},               // it is compared by the layout that follows
    {"--trace", compared::by_whether_it_is_given},           // rank 0 writes it, but every rank looks at the step
    {"--timeline", compared::by_whether_it_is_given},        // likewise
    {"--products", compared::by_what_it_names},              // rank 0 writes it; all read it, maybe from other folders
    {"--model", compared::by_what_it_names},                 // files may lie in other folders on other machines
    {"--data", compared::by_what_it_names},                  // likewise
    {"--init-from", compared::by_what_it_names},             // likewise
};

compared how_to_compare(std::string_view option) {
  for (const auto& e : exceptions)
    if (e.option == option) return e.how;
  return compared::by_value;
}

/// "21 tensors, digest 0123456789abcdef": of names, shapes, types and the first page of each.
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

/// "step-00000004, digest 0123456789abcdef": of its manifest, which has the checksums of all data.
std::string step_text(const std::string& path) {
  const std::string text = plait::read_whole(plait::machine_files(), path + "/manifest.json");
  return fmt::format("{}, digest {:016x}", std::filesystem::path(path).filename().string(),
                     digest_of(std::as_bytes(std::span(text)), text.size()));
}

/// Calls f(key, value) for each key of a model's config.json.
template <class Config, class F>
void each_key(Config& c, F&& f) {
  f("vocab_size", c.vocab);
  f("hidden_size", c.hidden);
  f("num_hidden_layers", c.layers);
  f("num_attention_heads", c.heads);
  f("num_key_value_heads", c.kv_heads);
  f("head_dim", c.head_dim);
  f("intermediate_size", c.ffn);
  f("max_position_embeddings", c.max_position);
  f("rms_norm_eps", c.rms_eps);
  f("rope_theta", c.rope_theta);
  f("rope_scaling.rope_type", c.rope.kind);
  f("rope_scaling.factor", c.rope.factor);
  f("rope_scaling.low_freq_factor", c.rope.low_freq_factor);
  f("rope_scaling.high_freq_factor", c.rope.high_freq_factor);
  f("rope_scaling.original_max_position_embeddings", c.rope.original_max_position);
  f("tie_word_embeddings", c.tie_embeddings);
  f("attention_bias", c.attention_bias);
  f("mlp_bias", c.mlp_bias);
  f("qkv_bias", c.qkv_bias);
  f("qk_norm", c.qk_norm);
  f("sliding_window", c.sliding_window);
  f("pad_token_id", c.pad_token);
  f("initializer_range", c.initializer_range);
}

/// Reads a value of `model_settings`; returns whether it is one.
template <class T>
bool read(const std::string& text, T& value) {
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  return problem == std::errc() && end == text.data() + text.size();
}
bool read(const std::string& text, bool& value) {
  value = text == "true";
  return value || text == "false";
}
bool read(const std::string& text, plait::rope_kind& value) {
  value = text == "llama3" ? plait::rope_kind::llama3 : plait::rope_kind::none;
  return text == "llama3" || text == "none";
}

}  // namespace

plait::dynamic_vector<plait::setting> model_settings(const plait::llama_config& c) {
  plait::dynamic_vector<plait::setting> settings;
  each_key(c, [&](const char* key, const auto& value) {
    if constexpr (std::is_same_v<decltype(value), const plait::rope_kind&>)
      settings.push_back({key, value == plait::rope_kind::llama3 ? "llama3" : "none"});
    else
      settings.push_back({key, fmt::format("{}", value)});
  });
  return settings;
}

std::optional<plait::llama_config> model_of(const plait::dynamic_vector<plait::setting>& settings) {
  plait::llama_config c;
  bool whole = true;
  each_key(c, [&](const std::string& key, auto& value) {
    const auto flag =
        std::find_if(settings.begin(), settings.end(), [&](const plait::setting& k) { return k.name == key; });
    whole = whole && flag != settings.end() && read(flag->value, value);
  });
  return whole ? std::optional(c) : std::nullopt;
}

plait::dynamic_vector<plait::setting> agreed_settings(const setup& s) {
  plait::dynamic_vector<plait::setting> settings = {
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
  std::vector<std::string> files;
  for (const std::string& path : s.opt.data)
    for (std::string& file : files_of(path)) files.push_back(std::move(file));
  for (std::size_t i = 0; i < files.size(); ++i)
    settings.push_back(
        {i == 0 ? "--data" : fmt::format("--data's file {}", i + 1),
         fmt::format("{} of {}", std::filesystem::path(files[i]).filename().string(), content_text(files[i]))});
  // What a rank makes of the options follows from them and the model, but is what must be the same.
  std::string layers;
  for (const plait::stage_layers& part : s.stages)
    layers += fmt::format("{}{}", layers.empty() ? "" : ",", part.size());
  const std::string schedule = plait::to_csv(s.schedule);
  const std::uint64_t digest = digest_of(std::as_bytes(std::span(schedule)), schedule.size());
  settings.push_back({"--schedule's digest", fmt::format("{:016x}", digest)});
  settings.push_back({"--split's layers", layers});
  if (s.opt.plan == "auto")  // of --cluster's file, which may lie in other folders
    settings.push_back({"--plan's layout", fmt::format("{} {} {} {} {}", s.opt.mesh, s.opt.schedule,
                                                       s.opt.data_parallel, s.opt.micro_batch, s.opt.recompute)});
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
