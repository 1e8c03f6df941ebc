#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/data/atomic_file.hpp"
#include "plait/data/json_writer.hpp"
#include "plait/data/mapped_file.hpp"
#include "plait/models/llama_config.hpp"

namespace plait {

namespace detail {

/// Most levels of objects and lists in each other in a config.json; models on the hub have up to four.
inline constexpr int max_config_depth = 64;

/// Typed access to one JSON object; every complaint names the file and the key.
class config_reader {
 public:
  config_reader(const nlohmann::json& object, std::string source, std::string prefix = "")
      : object_(object), source_(std::move(source)), prefix_(std::move(prefix)) {}

  /// Present and not null.
  bool has(const char* key) const {
    const auto found = object_.find(key);
    return found != object_.end() && !found->is_null();
  }
  std::int64_t integer(const char* key) const {
    const nlohmann::json& value = at(key);
    if (value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX) bad(key, value, "a smaller whole number");
    if (value.is_number_integer()) return value.get<std::int64_t>();
    bad(key, value, "a whole number");
  }
  std::int64_t integer(const char* key, std::int64_t fallback) const { return has(key) ? integer(key) : fallback; }
  double number(const char* key) const {
    const nlohmann::json& value = at(key);
    if (!value.is_number()) bad(key, value, "a number");
    return value.get<double>();
  }
  double number(const char* key, double fallback) const { return has(key) ? number(key) : fallback; }
  bool boolean(const char* key, bool fallback) const {
    if (!has(key)) return fallback;
    const nlohmann::json& value = at(key);
    if (!value.is_boolean()) bad(key, value, "true or false");
    return value.get<bool>();
  }
  std::string string(const char* key) const {
    const nlohmann::json& value = at(key);
    if (!value.is_string()) bad(key, value, "a string");
    return value.get<std::string>();
  }
  config_reader object(const char* key) const {
    const nlohmann::json& value = at(key);
    if (!value.is_object()) bad(key, value, "an object");
    return {value, source_, prefix_ + key + "."};
  }
  /// Refuses any value but `legal`, if the key is there.
  void only(const char* key, const nlohmann::json& legal) const {
    if (has(key) && at(key) != legal) bad(key, at(key), legal.dump());
  }
  [[noreturn]] void bad(const char* key, const nlohmann::json& value, const std::string& legal) const {
    fail(source_ + ": key '" + prefix_ + key + "' is " + shown(value) + "; legal is " + legal);
  }

 private:
  const nlohmann::json& at(const char* key) const {
    if (!has(key)) fail(source_ + ": key '" + prefix_ + key + "' is missing");
    return *object_.find(key);
  }
  static std::string shown(const nlohmann::json& value) {
    std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    if (text.size() > 60) text = text.substr(0, 57) + "...";
    return text;
  }

  const nlohmann::json& object_;
  std::string source_;
  std::string prefix_;
};

/// `rope` is the old "rope_scaling" or the new "rope_parameters".
inline rope_scaling parse_rope_scaling(const config_reader& rope) {
  const char* key = rope.has("rope_type") ? "rope_type" : "type";
  if (!rope.has(key)) rope.bad("rope_type", nullptr, "\"default\" or \"llama3\"");
  const std::string type = rope.string(key);
  if (type == "default") return {};
  if (type != "llama3")
    rope.bad(key, type, "\"default\" or \"llama3\"; linear, dynamic, yarn and longrope are not supported");
  return {.kind = rope_kind::llama3,
          .factor = rope.number("factor"),
          .low_freq_factor = rope.number("low_freq_factor"),
          .high_freq_factor = rope.number("high_freq_factor"),
          .original_max_position = rope.integer("original_max_position_embeddings")};
}

}  // namespace detail

/// The model described by the text of a Hugging Face `config.json` (Llama 2, Llama 3, SmolLM). Keys that do not shape
/// the computation are ignored; keys that ask for what plait does not compute are refused. Throws `error` whose text
/// starts with `source`, the name of the file, and names the key.
inline llama_config parse_llama_config(std::string_view text, const std::string& source) {
  nlohmann::json json;
  // What prints a value that is refused calls itself for each level.
  const auto not_too_deep = [&](int depth, nlohmann::json::parse_event_t, const nlohmann::json&) {
    if (depth > detail::max_config_depth)
      fail(source + ": the JSON has more than " + std::to_string(detail::max_config_depth) +
           " levels of objects and lists in each other");
    return true;
  };
  try {
    json = nlohmann::json::parse(text, not_too_deep);
  } catch (const nlohmann::json::exception& e) {
    fail(source + ": malformed JSON: " + e.what());
  }
  if (!json.is_object()) fail(source + ": the JSON is no object; a config.json of a Llama is expected");
  const detail::config_reader c(json, source);

  if (const std::string type = c.string("model_type"); type != "llama") c.bad("model_type", type, "\"llama\"");
  c.only("hidden_act", "silu");
  c.only("pretraining_tp", 1);
  c.only("attention_dropout", 0.0);
  c.only("partial_rotary_factor", 1.0);
  c.only("quantization_config", nullptr);

  llama_config out;
  out.vocab = c.integer("vocab_size");
  out.hidden = c.integer("hidden_size");
  out.layers = c.integer("num_hidden_layers");
  out.heads = c.integer("num_attention_heads");
  out.kv_heads = c.integer("num_key_value_heads", out.heads);
  if (c.has("head_dim")) {
    out.head_dim = c.integer("head_dim");
  } else {
    if (out.heads < 1 || out.hidden % out.heads != 0) {
      fail(source + ": hidden_size " + std::to_string(out.hidden) + " is no multiple of num_attention_heads " +
           std::to_string(out.heads) + ", and head_dim is not given");
    }
    out.head_dim = out.hidden / out.heads;
  }
  out.ffn = c.integer("intermediate_size");
  out.max_position = c.integer("max_position_embeddings", 2048);
  out.rms_eps = c.number("rms_norm_eps", 1e-6);
  out.initializer_range = c.number("initializer_range", 0.02);
  out.tie_embeddings = c.boolean("tie_word_embeddings", false);
  out.attention_bias = c.boolean("attention_bias", false);
  out.mlp_bias = c.boolean("mlp_bias", false);

  out.rope_theta = c.number("rope_theta", 10000.0);
  if (c.has("rope_scaling") && c.has("rope_parameters")) {
    fail(source + ": keys 'rope_scaling' and 'rope_parameters' are both given; they are two names for one thing");
  }
  if (c.has("rope_scaling")) out.rope = detail::parse_rope_scaling(c.object("rope_scaling"));
  if (c.has("rope_parameters")) {
    const auto rope = c.object("rope_parameters");
    out.rope = detail::parse_rope_scaling(rope);
    out.rope_theta = rope.number("rope_theta", out.rope_theta);
  }
  validate(out, source);
  return out;
}

/// Reads a `config.json`. Errors as `parse_llama_config`, and `knob` in the text when the file cannot be read.
inline llama_config read_llama_config(const std::string& path, const std::string& knob = "--model") {
  return parse_llama_config(read_file(path, knob), knob + ": '" + path + "'");
}

/// What `--model` takes: the name of a preset, or a path (it has a '/' or ends in ".json") of a `config.json`.
inline llama_config load_llama_config(const std::string& name_or_path, const std::string& knob = "--model") {
  if (const llama_config* preset = find_llama_preset(name_or_path)) return *preset;
  if (name_or_path.find('/') != std::string::npos || name_or_path.ends_with(".json"))
    return read_llama_config(name_or_path, knob);
  fail(knob + ": unknown model '" + name_or_path + "'; presets are " + llama_preset_names() +
       "; or give the path of a config.json");
}

/// `config` as the text of a Hugging Face `config.json`; `parse_llama_config` reads it back unchanged. `torch_dtype` is
/// what the weights beside it are stored in.
inline std::string llama_config_text(const llama_config& config, const std::string& torch_dtype = "float32") {
  json_object json;
  json.add("architectures", std::vector<std::string_view>{"LlamaForCausalLM"});
  json.add("attention_bias", config.attention_bias).add("attention_dropout", 0.0).add("head_dim", config.head_dim);
  json.add("hidden_act", "silu").add("hidden_size", config.hidden).add("initializer_range", config.initializer_range);
  json.add("intermediate_size", config.ffn)
      .add("max_position_embeddings", config.max_position)
      .add("mlp_bias", config.mlp_bias);
  json.add("model_type", "llama").add("num_attention_heads", config.heads).add("num_hidden_layers", config.layers);
  json.add("num_key_value_heads", config.kv_heads).add("pretraining_tp", 1).add("rms_norm_eps", config.rms_eps);
  if (config.rope.kind == rope_kind::llama3) {
    const auto& r = config.rope;
    json_object rope;
    rope.add("factor", r.factor).add("high_freq_factor", r.high_freq_factor).add("low_freq_factor", r.low_freq_factor);
    rope.add("original_max_position_embeddings", r.original_max_position).add("rope_type", "llama3");
    json.add("rope_scaling", rope);
  } else {
    json.add_null("rope_scaling");
  }
  json.add("rope_theta", config.rope_theta).add("tie_word_embeddings", config.tie_embeddings);
  json.add("torch_dtype", torch_dtype).add("vocab_size", config.vocab);
  return json.lines();
}

/// Writes a `config.json` in one step; `error` naming `knob` when it cannot.
inline void write_llama_config(const llama_config& config, const std::string& path, const std::string& knob) {
  write_file_atomically(path, llama_config_text(config), knob);
}

}  // namespace plait
