// Converts a `llama_config` from and to Hugging Face's config.json; requires nlohmann/json.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/json.hpp"
#include "plait/io/mapped_file.hpp"
#include "plait/models/llama_config.hpp"

namespace plait {

/// Returns the model that the text of a Hugging Face `config.json` describes. Its type is llama (Llama 2 and 3,
/// SmolLM), mistral, qwen2 or qwen3, or a type with experts. Absent keys have the defaults of transformers. Each key
/// either is read, has no effect on numbers, or is refused (models/config_keys.hpp). Throws `error`, which begins with
/// `source`, the name of the file, and names the key.
llama_config parse_llama_config(std::string_view text, const std::string& source);

/// Reads a `config.json`. Throws like `parse_llama_config`, and with `field` in the text if the file cannot be read.
inline llama_config read_llama_config(const std::string& path, const std::string& field = "model") {
  return parse_llama_config(read_file(path, field), cat({field, ": '", path, "'"}));
}

/// Loads the model that a user names: a preset, or the path of a `config.json` (it has a '/' or ends in ".json").
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

/// Returns `config` as the text of a Hugging Face `config.json`, which `parse_llama_config` reads back unchanged.
/// `torch_dtype` is the type of the directory's weights. Throws `error` with the fields' names if no model type has all
/// of them.
std::string llama_config_text(const llama_config& config, const std::string& torch_dtype = "float32");

}  // namespace plait

#if !defined(PLAIT_COMPILED) || defined(PLAIT_COMPILING_FILES)
#include <nlohmann/json.hpp>

#include "plait/io/json_tree.hpp"
#include "plait/models/config_keys.hpp"

namespace plait {

namespace detail {

/// Reads the object `rope`, the old "rope_scaling" or the new "rope_parameters"; `c` is the top level. Without a type,
/// the default type is used. An original length at the top level has precedence over the one inside;
/// max_position_embeddings (`longest`) is the default for both.
inline rope_scaling parse_rope_scaling(const config_reader& rope, const config_reader& c, std::int64_t longest) {
  const char* key = rope.has("rope_type") ? "rope_type" : "type";
  const std::string type = rope.has(key) ? rope.string(key) : "default";
  if (type != "default" && type != "llama3")
    rope.bad(key, type, "\"default\" or \"llama3\"; linear, dynamic, yarn and longrope are not supported");
  rope.only("partial_rotary_factor", 1.0);
  rope.each_key([&](const std::string& name) {
    const bool known = type == "default" ? default_rope_keys.contains(name) : llama3_rope_keys.contains(name);
    if (!known) rope.unknown(name, cat({"with the rope_type \"", type, "\" it has no effect, so take it out"}));
  });
  if (type == "default") return {};
  constexpr const char* original = "original_max_position_embeddings";
  return {.kind = rope_kind::llama3,
          .factor = rope.number("factor"),
          .low_freq_factor = rope.number("low_freq_factor"),
          .high_freq_factor = rope.number("high_freq_factor"),
          .original_max_position = c.has(original) ? c.integer(original) : rope.integer(original, longest)};
}

/// Reads the base and the scaling of rotary positions; `theta` is the base if no key gives one.
inline void parse_rope(const config_reader& c, const std::string& source, double theta, llama_config& out) {
  out.rope_theta = c.number("rope_theta", theta);
  const bool old_rope = c.has("rope_scaling") && !c.object("rope_scaling").empty();
  if (old_rope && c.has("rope_parameters")) {
    fail({source, ": keys 'rope_scaling' and 'rope_parameters' are both given; they are two names for one thing"});
  }
  if (const char* const key = old_rope ? "rope_scaling" : "rope_parameters"; c.has(key)) {
    const auto rope = c.object(key);
    out.rope = parse_rope_scaling(rope, c, out.max_position);
    out.rope_theta = rope.number("rope_theta", out.rope_theta);  // has precedence over the top level's
  }
}

/// A Hugging Face model type that is a Llama or a variant of it, with its defaults for absent keys.
struct llama_family {
  std::string_view model_type;
  std::string_view architecture;
  std::int64_t kv_heads;  ///< 0: the number of heads
  std::int64_t head_dim;  ///< 0: hidden / heads
  std::int64_t max_position;
  bool mixture = false;  ///< whether models of this type have experts
  double rms_eps = 1e-6;
  double rope_theta = 10000;
};

inline constexpr std::array<llama_family, 9> llama_families{{
    {"dots1", "Dots1ForCausalLM", 32, 0, 2048, true},
    {"llama", "LlamaForCausalLM", 0, 0, 2048},
    {"mistral", "MistralForCausalLM", 8, 0, 131072},
    {"mixtral", "MixtralForCausalLM", 8, 0, 131072, true, 1e-5, 1e6},
    {"olmoe", "OlmoeForCausalLM", 0, 0, 4096, true, 1e-5},
    {"qwen2", "Qwen2ForCausalLM", 32, 0, 32768},
    {"qwen2_moe", "Qwen2MoeForCausalLM", 16, 0, 32768, true},
    {"qwen3", "Qwen3ForCausalLM", 32, 128, 32768},
    {"qwen3_moe", "Qwen3MoeForCausalLM", 4, 0, 32768, true},
}};

inline const llama_family* find_llama_family(std::string_view model_type) {
  for (const llama_family& family : llama_families) {
    if (family.model_type == model_type) return &family;
  }
  return nullptr;
}

/// Reads the experts of a dots.llm1 and their width; it has DeepSeek-V3's router.
inline mixture_config parse_deepseek_mixture(const config_reader& c, const std::string& source, std::int64_t& width) {
  mixture_config m;
  m.experts = c.integer("n_routed_experts");
  m.router = {.chosen = c.integer("num_experts_per_tok"),
              .scores = kernels::expert_scores::sigmoid,
              .normalised = c.boolean("norm_topk_prob"),
              .scale = c.number("routed_scaling_factor"),
              .groups = c.integer("n_group", 1),
              .chosen_groups = c.integer("topk_group", 1),
              .group_scores = kernels::group_scores::two_largest};
  m.correction_bias = true;
  m.dense_layers = c.integer("first_k_dense_replace", 0);
  if (m.dense_layers > 0) m.dense_ffn = width;
  width = c.integer("moe_intermediate_size");
  require_within(source, "n_shared_experts", c.integer("n_shared_experts"), 1 << 10);
  m.shared_ffn = width * c.integer("n_shared_experts");
  c.only("moe_layer_freq", 1);
  if (c.has("scoring_func") && c.string("scoring_func") != "sigmoid") c.only("scoring_func", "noaux_tc");
  c.only("topk_method", "noaux_tc");
  return m;
}

/// Reads the experts of a model and their width. No key has a default, because transformers' defaults differ from
/// published models.
inline mixture_config parse_mixture(const config_reader& c, const std::string& source, std::string_view model_type,
                                    std::int64_t& width) {
  if (model_type == "dots1") return parse_deepseek_mixture(c, source, width);
  mixture_config m;
  const bool local = !c.has("num_experts") && (c.has("num_local_experts") || model_type == "mixtral");
  const char* const key = local ? "num_local_experts" : "num_experts";
  m.experts = c.integer(key);
  if (m.experts < 1) c.bad(key, m.experts, "at least 1");
  if (!local) c.only("num_local_experts", m.experts);
  m.router.chosen = c.integer("num_experts_per_tok");
  if (model_type == "mixtral") {
    for (const char* other : {"decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size"})
      c.only(other, nullptr);
    c.only("norm_topk_prob", true);
  } else if (model_type == "olmoe") {
    for (const char* other : {"decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size"})
      c.only(other, nullptr);
    m.router.normalised = c.boolean("norm_topk_prob");
  } else {
    c.only("decoder_sparse_step", 1);
    auto first = nlohmann::json::array();
    while (c.has("mlp_only_layers") && first.size() < c.at("mlp_only_layers").size()) first.push_back(first.size());
    if (c.has("mlp_only_layers") && c.at("mlp_only_layers") != first)
      c.bad("mlp_only_layers", c.at("mlp_only_layers"), "a list of the first layers, [0, 1, ..]");
    m.dense_layers = static_cast<std::int64_t>(first.size());
    if (m.dense_layers > 0) m.dense_ffn = width;
    c.only("use_sliding_window", false);
    m.router.normalised = c.boolean("norm_topk_prob");
    width = c.integer("moe_intermediate_size");
  }
  if (model_type == "qwen2_moe")
    m.shared_ffn = c.integer("shared_expert_intermediate_size"), m.shared_gate = true;
  else
    c.only("shared_expert_intermediate_size", nullptr);
  return m;
}

/// Returns the window of all layers; 0: none. Refuses layers that differ, and keys that contradict each other.
inline std::int64_t parse_sliding_window(const config_reader& c, std::string_view model_type, std::int64_t layers) {
  // transformers' Llama ignores these keys, so a Mistral with the type llama would lose its window.
  if (model_type == "llama" && c.has("sliding_window") &&
      c.integer("sliding_window") < c.integer("max_position_embeddings", 2048))
    c.bad("sliding_window", c.integer("sliding_window"),
          "null, as a llama has no window; if the model has one, its model_type is mistral");
  const bool mistral = model_type == "mistral" || model_type == "mixtral", dots = model_type == "dots1",
             by_layers = dots || model_type.starts_with("qwen");
  std::int64_t window = 0;
  if (mistral || dots || (by_layers && c.boolean("use_sliding_window", false))) {
    window = c.given("sliding_window") ? c.integer("sliding_window", 0) : model_type == "mixtral" ? 0 : 4096;
    if (window < 1 && c.has("sliding_window")) c.bad("sliding_window", window, "null or at least 1");
  }
  if (mistral && window > 0) {  // keys of Qwen, which transformers' Mistral ignores
    c.only("use_sliding_window", true);
    c.only("max_window_layers", 0);
  }
  const std::string differ = ": layers that differ are not supported";
  if (c.has("layer_types")) {  // has precedence over max_window_layers
    const auto types = c.strings("layer_types");
    const auto all = [&](const char* type) {
      return static_cast<std::int64_t>(types.size()) == layers &&
             std::count(types.begin(), types.end(), type) == layers;
    };
    const bool sliding = all("sliding_attention"), full = all("full_attention");
    const std::string times = cat({layers, " (num_hidden_layers) times "});
    if (window == 0 && !full) c.bad("layer_types", types, times + "\"full_attention\", there being no sliding window");
    if (mistral && window > 0 && !sliding) c.bad("layer_types", types, times + "\"sliding_attention\"");
    if (!sliding && !full)
      c.bad("layer_types", types, cat({times, "\"sliding_attention\" or \"full_attention\"", differ}));
    return sliding ? window : 0;
  }
  if (by_layers && window > 0) {  // layers from max_window_layers on have the window
    const std::int64_t first = c.integer("max_window_layers", dots ? 62 : 28);
    if (first != 0 && (first < 0 || first < layers))
      c.bad("max_window_layers", first,
            cat({"0 (all layers have the sliding window) or at least num_hidden_layers, ", layers, " (none has it)",
                 differ}));
    return first == 0 ? window : 0;
  }
  return window;
}

/// Returns the token whose row of the embedding has no gradient, or -1. As in PyTorch, a negative value counts from the
/// end.
inline std::int64_t parse_pad_token(const config_reader& c, std::int64_t vocab) {
  if (!c.has("pad_token_id")) return -1;
  const std::int64_t token = c.integer("pad_token_id");
  if (token >= vocab || token < -vocab)
    c.bad("pad_token_id", token, cat({"null, or a token of the vocabulary, 0 to ", vocab - 1}));
  return token < 0 ? vocab + token : token;
}

}  // namespace detail

PLAIT_INLINE llama_config parse_llama_config(std::string_view text, const std::string& source) {
  const nlohmann::json json = parse_json(text, source);
  if (!json.is_object()) fail({source, ": the JSON is not an object; a config.json of a Llama is expected"});
  const detail::config_reader c(json, source);

  const std::string type = c.string("model_type");
  const detail::llama_family* const family = detail::find_llama_family(type);
  if (!family) {
    std::string legal;
    for (const detail::llama_family& f : detail::llama_families)
      append(legal, {legal.empty() ? "\"" : ", \"", f.model_type, "\""});
    c.bad("model_type", type, legal);
  }
  detail::check_config_keys(c, family->mixture);
  if (c.has("hidden_act") && c.string("hidden_act") != "swish") c.only("hidden_act", "silu");  // two names for one

  llama_config out;
  out.vocab = c.integer("vocab_size");
  out.hidden = c.integer("hidden_size");
  out.layers = c.integer("num_hidden_layers");
  out.heads = c.integer("num_attention_heads");
  const bool own_kv_heads = c.given("num_key_value_heads") || family->kv_heads == 0;
  out.kv_heads = c.integer("num_key_value_heads", own_kv_heads ? out.heads : family->kv_heads);
  if (c.has("head_dim") || family->head_dim > 0) {
    out.head_dim = c.integer("head_dim", family->head_dim);
  } else {
    if (out.heads < 1 || out.hidden % out.heads != 0) {
      fail({source, ": hidden_size ", out.hidden, " is not a multiple of num_attention_heads ", out.heads,
            ", and head_dim is not given"});
    }
    out.head_dim = out.hidden / out.heads;
  }
  out.ffn = c.integer("intermediate_size");
  if (family->mixture) out.mixture = detail::parse_mixture(c, source, type, out.ffn);
  out.max_position = c.integer("max_position_embeddings", family->max_position);
  out.rms_eps = c.number("rms_norm_eps", family->rms_eps);
  out.initializer_range = c.number("initializer_range", 0.02);
  out.tie_embeddings = c.boolean("tie_word_embeddings", false);
  out.attention_bias = c.boolean("attention_bias", false);
  out.mlp_bias = c.boolean("mlp_bias", false);
  out.qkv_bias = type.starts_with("qwen2");
  out.qk_norm_over_heads = type == "olmoe";
  out.qk_norm = type.starts_with("qwen3") || type == "dots1" || out.qk_norm_over_heads;
  out.sliding_window = detail::parse_sliding_window(c, type, out.layers);
  // The model type determines these, so a file with other values is refused.
  if (type != "llama" && !out.qk_norm) c.only("attention_bias", false);
  if (type != "llama") c.only("mlp_bias", false);
  c.only("qkv_bias", out.qkv_bias);
  c.only("qk_norm", out.qk_norm);

  out.pad_token = detail::parse_pad_token(c, out.vocab);

  detail::parse_rope(c, source, family->rope_theta, out);
  validate(out, source);
  return out;
}

namespace detail {

/// Returns the model type that computes what `config` describes. Throws `error` with the fields' names if none does.
inline const llama_family& family_of(const llama_config& config) {
  const auto found = [&](const char* type,
                         std::initializer_list<std::pair<const char*, bool>> not_with) -> const auto& {
    std::string extra;
    for (const auto& [field, set] : not_with) {
      if (set) extra += (extra.empty() ? "" : ", ") + std::string(field);
    }
    if (!extra.empty())
      fail({"config.json: no model type of Hugging Face computes this model: it would be ", type,
            ", which does not have ", extra});
    return *find_llama_family(type);
  };
  const mixture_config& m = config.mixture;
  const kernels::router_settings plain{.chosen = m.router.chosen, .normalised = m.router.normalised};
  if (m.correction_bias) {
    const kernels::router_settings& r = m.router;
    return found("dots1", {{"qkv_bias", config.qkv_bias},
                           {"q and k without norms", !config.qk_norm},
                           {"sliding_window", config.sliding_window > 0},
                           {"probabilities by softmax", r.scores != kernels::expert_scores::sigmoid},
                           {"groups by their largest score", r.group_scores != kernels::group_scores::two_largest},
                           {"this width of a shared expert", m.shared_ffn == 0 || m.shared_ffn % config.ffn != 0},
                           {"a gate of the shared expert", m.shared_gate}});
  }
  if (m.experts > 0) {
    const std::pair<const char*, bool> router{"this router", m.router != plain},
        shared{"a shared expert", m.shared_ffn > 0};
    const std::pair<const char*, bool> window{"sliding_window", config.sliding_window > 0};
    if (config.qk_norm_over_heads)
      return found("olmoe", {{"qkv_bias", config.qkv_bias},
                             {"heads * head_dim other than hidden", config.heads * config.head_dim != config.hidden},
                             {"layers without experts", m.dense_layers > 0},
                             window,
                             shared,
                             router});
    if (config.qk_norm) return found("qwen3_moe", {{"qkv_bias", config.qkv_bias}, window, shared, router});
    if (config.qkv_bias)
      return found("qwen2_moe", {{"attention_bias", config.attention_bias},
                                 {"a shared expert without a gate", !m.shared_gate},
                                 window,
                                 router});
    return found("mixtral", {{"attention_bias", config.attention_bias},
                             {"weights that are not normalised", !m.router.normalised},
                             {"layers without experts", m.dense_layers > 0},
                             shared,
                             router});
  }
  if (config.qk_norm)
    return found("qwen3", {{"qkv_bias", config.qkv_bias},
                           {"mlp_bias", config.mlp_bias},
                           {"norms of q and k over all heads", config.qk_norm_over_heads}});
  if (config.qkv_bias)
    return found("qwen2", {{"attention_bias", config.attention_bias}, {"mlp_bias", config.mlp_bias}});
  if (config.sliding_window == 0) return *find_llama_family("llama");
  return found("mistral", {{"attention_bias", config.attention_bias}, {"mlp_bias", config.mlp_bias}});
}

inline void add_mixture(json_object& json, const llama_config& config, std::string_view model_type) {
  const mixture_config& m = config.mixture;
  if (m.correction_bias) {
    json.add("first_k_dense_replace", m.dense_layers).add("moe_intermediate_size", config.ffn);
    json.add("n_group", m.router.groups).add("n_routed_experts", m.experts);
    json.add("n_shared_experts", m.shared_ffn / config.ffn).add("norm_topk_prob", m.router.normalised);
    json.add("num_experts_per_tok", m.router.chosen).add("routed_scaling_factor", m.router.scale);
    json.add_null("sliding_window").add("topk_group", m.router.chosen_groups);
    return;
  }
  json.add("num_experts_per_tok", m.router.chosen);
  if (model_type == "mixtral") {
    json.add("num_local_experts", m.experts);
    return;
  }
  if (model_type == "olmoe") {
    json.add("norm_topk_prob", m.router.normalised).add("num_experts", m.experts);
    return;
  }
  std::vector<std::int64_t> dense(static_cast<std::size_t>(m.dense_layers));
  std::iota(dense.begin(), dense.end(), 0);
  json.add("decoder_sparse_step", 1).add("mlp_only_layers", dense);
  json.add("moe_intermediate_size", config.ffn).add("norm_topk_prob", m.router.normalised);
  json.add("num_experts", m.experts);
  if (m.shared_ffn > 0) json.add("shared_expert_intermediate_size", m.shared_ffn);
}

}  // namespace detail

PLAIT_INLINE std::string llama_config_text(const llama_config& config, const std::string& torch_dtype) {
  const detail::llama_family& family = detail::family_of(config);
  const bool llama = family.model_type == "llama", qwen = family.model_type.starts_with("qwen");
  json_object json;
  json.add("architectures", std::vector<std::string_view>{family.architecture});
  if (llama || config.qk_norm) json.add("attention_bias", config.attention_bias);
  json.add("attention_dropout", 0.0).add("head_dim", config.head_dim);
  json.add("hidden_act", "silu").add("hidden_size", config.hidden).add("initializer_range", config.initializer_range);
  json.add("intermediate_size", config.mixture.dense_layers > 0 ? config.mixture.dense_ffn : config.ffn)
      .add("max_position_embeddings", config.max_position);
  if (config.mixture.experts > 0) detail::add_mixture(json, config, family.model_type);
  if (qwen && config.sliding_window > 0) json.add("max_window_layers", 0);
  if (llama) json.add("mlp_bias", config.mlp_bias);
  json.add("model_type", family.model_type).add("num_attention_heads", config.heads);
  json.add("num_hidden_layers", config.layers).add("num_key_value_heads", config.kv_heads);
  if (config.pad_token >= 0) json.add("pad_token_id", config.pad_token);
  if (llama) json.add("pretraining_tp", 1);
  json.add("rms_norm_eps", config.rms_eps);
  if (config.rope.kind == rope_kind::llama3) {
    const auto& r = config.rope;
    json_object rope;
    rope.add("factor", r.factor).add("high_freq_factor", r.high_freq_factor).add("low_freq_factor", r.low_freq_factor);
    rope.add("original_max_position_embeddings", r.original_max_position).add("rope_type", "llama3");
    json.add("rope_scaling", rope);
  } else {
    json.add_null("rope_scaling");
  }
  json.add("rope_theta", config.rope_theta);
  if (config.sliding_window > 0) json.add("sliding_window", config.sliding_window);
  json.add("tie_word_embeddings", config.tie_embeddings).add("torch_dtype", torch_dtype);
  if (qwen) json.add("use_sliding_window", config.sliding_window > 0);
  json.add("vocab_size", config.vocab);
  return json.lines();
}

}  // namespace plait
#endif

#include "plait/core/macros_on.hpp"
