#include "agreed.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data_text.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/models/hugging_face_directory.hpp"
#include "plait/schedule/csv.hpp"

namespace {

enum class compared { by_value, not_at_all, by_what_it_names, by_whether_it_is_given };

/// How options are compared that ranks may be given differently; all others are compared as they are.
constexpr struct {
  std::string_view option;
  compared how;
} exceptions[] = {
    {"--log", compared::not_at_all},          // rank 0 writes it
    {"--plot", compared::not_at_all},         // likewise
    {"--peak-tflops", compared::not_at_all},  // rank 0 reports by it
    {"--threads", compared::not_at_all},      // machines may have more or fewer cores; no result depends on it
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

}  // namespace

std::vector<plait::knob> model_knobs(const plait::llama_config& c) {
  std::vector<plait::knob> knobs;
  const auto add = [&](const char* key, auto value) { knobs.push_back({key, fmt::format("{}", value)}); };
  add("vocab_size", c.vocab);
  add("hidden_size", c.hidden);
  add("num_hidden_layers", c.layers);
  add("num_attention_heads", c.heads);
  add("num_key_value_heads", c.kv_heads);
  add("head_dim", c.head_dim);
  add("intermediate_size", c.ffn);
  add("max_position_embeddings", c.max_position);
  add("rms_norm_eps", c.rms_eps);
  add("rope_theta", c.rope_theta);
  add("rope_scaling.rope_type", c.rope.kind == plait::rope_kind::llama3 ? "llama3" : "none");
  add("rope_scaling.factor", c.rope.factor);
  add("rope_scaling.low_freq_factor", c.rope.low_freq_factor);
  add("rope_scaling.high_freq_factor", c.rope.high_freq_factor);
  add("rope_scaling.original_max_position_embeddings", c.rope.original_max_position);
  add("tie_word_embeddings", c.tie_embeddings);
  add("attention_bias", c.attention_bias);
  add("mlp_bias", c.mlp_bias);
  add("qkv_bias", c.qkv_bias);
  add("qk_norm", c.qk_norm);
  add("sliding_window", c.sliding_window);
  add("pad_token_id", c.pad_token);
  add("initializer_range", c.initializer_range);
  return knobs;
}

std::vector<plait::knob> agreed_knobs(const setup& s) {
  std::vector<plait::knob> knobs = {
      {"plait", fmt::format("{}.{}.{}", PLAIT_VERSION_MAJOR, PLAIT_VERSION_MINOR, PLAIT_VERSION_PATCH)}};
  for (const auto& [name, value] : s.opt.by_name) {
    const compared how = how_to_compare(name);
    if (how == compared::by_value) knobs.push_back({name, value});
    if (how == compared::by_whether_it_is_given && value != "''") knobs.push_back({name, ""});
  }
  for (const auto& [key, value] : model_knobs(s.config)) knobs.push_back({"--model's " + key, value});
  knobs.push_back({"--init-from", s.weights              ? weights_text(*s.weights)
                                  : s.first_step.empty() ? ""
                                                         : step_text(s.first_step)});
  std::vector<std::string> files;
  for (const std::string& path : s.opt.data)
    for (std::string& file : files_of(path)) files.push_back(std::move(file));
  for (std::size_t i = 0; i < files.size(); ++i)
    knobs.push_back(
        {i == 0 ? "--data" : fmt::format("--data's file {}", i + 1),
         fmt::format("{} of {}", std::filesystem::path(files[i]).filename().string(), content_text(files[i]))});
  // What a rank makes of the options follows from them and the model, but is what must be the same.
  std::string layers;
  for (const plait::stage_layers& part : s.stages)
    layers += fmt::format("{}{}", layers.empty() ? "" : ",", part.size());
  const std::string schedule = plait::to_csv(s.schedule);
  const std::uint64_t digest = digest_of(std::as_bytes(std::span(schedule)), schedule.size());
  knobs.push_back({"--schedule's digest", fmt::format("{:016x}", digest)});
  knobs.push_back({"--split's layers", layers});
  if (s.opt.plan == "auto")  // of --cluster's file, which may lie in other folders
    knobs.push_back({"--plan's layout", fmt::format("{} {} {} {} {}", s.opt.mesh, s.opt.schedule, s.opt.data_parallel,
                                                    s.opt.micro_batch, s.opt.recompute)});
  if (!s.opt.products.empty()) {
    const auto bytes = std::as_bytes(std::span(s.products));
    knobs.push_back({"--products", s.products.empty()
                                       ? "a file that is not there yet"
                                       : fmt::format("a file with digest {:016x}", digest_of(bytes, bytes.size()))});
  }
  if (s.as_graph) knobs.push_back({"steps replayed as a graph", ""});
  if (s.cudnn) knobs.push_back({"cuDNN's attention", ""});
  return knobs;
}
