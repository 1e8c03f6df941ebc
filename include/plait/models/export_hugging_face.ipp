// The definitions of export_hugging_face.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "plait/core/compiled.hpp"
#include "plait/io/json_tree.hpp"
#include "plait/io/mapped_file.hpp"
#include "plait/models/config_keys.hpp"

namespace plait {

namespace detail {

/// Files of a model directory that are about text, not weights.
inline constexpr std::array tokenizer_files = std::to_array<std::string_view>(
    {"added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt", "special_tokens_map.json",
     "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"});

inline std::string_view torch_name(safetensors_dtype type) {
  return type == safetensors_dtype::f64 ? "float64" : type == safetensors_dtype::f32 ? "float32" : "bfloat16";
}

/// The text of config.json, with the harmless keys of another, except keys that the shape or the weights give.
inline std::string exported_config(const llama_config& config, safetensors_dtype dtype, const export_options& how) {
  const std::string text = llama_config_text(config, std::string(torch_name(dtype)));
  if (how.like.empty()) return text;
  const std::filesystem::path like(how.like);
  const std::string from = (std::filesystem::is_regular_file(like) ? like : like / "config.json").string();
  nlohmann::json json = nlohmann::json::parse(text);
  const nlohmann::json old = parse_json(read_file(from, how.field), from);
  for (const auto& [key, value] : old.items())
    if (is_among(harmless_config_keys, key) && key != "dtype" && key != "transformers_version" && !json.contains(key))
      json[key] = value;
  return json.dump(2) + "\n";
}

PLAIT_INLINE void write_beside_weights(const llama_config& config, safetensors_dtype dtype,
                                       const safetensors_shards& shards, const std::string& folder,
                                       const export_options& how) {
  const std::filesystem::path to(folder), like(how.like);
  write_file_atomically((to / "config.json").string(), exported_config(config, dtype, how), how.field);
  if (shards.files().size() > 1)
    write_file_atomically((to / safetensors_index_name).string(), shards.index(), how.field);
  for (const std::string_view name : tokenizer_files)
    if (!how.like.empty() && std::filesystem::exists(like / name))
      write_file_atomically((to / name).string(), read_file((like / name).string(), how.field), how.field);
}

}  // namespace detail

}  // namespace plait
