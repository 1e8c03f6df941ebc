// A `llama_config` from and to the config.json of Hugging Face; it needs nlohmann/json.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/io/mapped_file.hpp"
#include "plait/models/llama_config.hpp"

namespace plait {

/// The model described by the text of a Hugging Face `config.json` of the type llama (Llama 2 and 3, SmolLM), mistral,
/// qwen2 or qwen3; absent keys mean what they mean to transformers. Every key is read, known to change no number, or
/// refused (models/config_keys.hpp). Throws `error` whose text starts with `source`, the name of the file, and names
/// the key.
llama_config parse_llama_config(std::string_view text, const std::string& source);

/// Reads a `config.json`. Errors as `parse_llama_config`, and `field` in the text when the file cannot be read.
inline llama_config read_llama_config(const std::string& path, const std::string& field = "model") {
  return parse_llama_config(read_file(path, field), cat({field, ": '", path, "'"}));
}

/// Reads what a user may call a model: the name of a preset, or a path (it has a '/' or ends in ".json") of a
/// `config.json`.
inline llama_config load_llama_config(const std::string& name_or_path, const std::string& field = "model") {
  if (const llama_config* preset = find_llama_preset(name_or_path)) return *preset;
  if (const auto file = std::filesystem::path(name_or_path) / "config.json"; std::filesystem::exists(file))
    fail({field, ": '", name_or_path, "' is the folder of a model; its shape alone, to begin from random weights, is '",
          file.string(), "', and with its weights open_model_directory opens it"});
  if (name_or_path.find('/') != std::string::npos || name_or_path.ends_with(".json"))
    return read_llama_config(name_or_path, field);
  fail({field, ": unknown model '", name_or_path, "'; presets are ", llama_preset_names(),
        "; or give the path of a config.json"});
}

/// `config` as the text of a Hugging Face `config.json`; `parse_llama_config` reads it back unchanged. `torch_dtype` is
/// the type of the weights in its directory. Throws `error` naming the fields if no model type has them at once.
std::string llama_config_text(const llama_config& config, const std::string& torch_dtype = "float32");

/// Writes a `config.json` in one step; `error` naming `field` when it cannot.
inline void write_llama_config(const llama_config& config, const std::string& path, const std::string& field) {
  write_file_atomically(path, llama_config_text(config), field);
}

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/models/llama_config_json.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
