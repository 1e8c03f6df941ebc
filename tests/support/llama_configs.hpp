#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "plait/models/llama_config_json.hpp"

/// Texts of config.json files.
namespace plait::test {

/// Mistral's config.json as published, with its values.
inline const std::string mistral_config = R"({
  "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
  "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
  "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 32000})";
/// The keys that every file has.
inline const std::string minimal_config =
    R"({"model_type": "llama", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2,
  "num_attention_heads": 4, "intermediate_size": 48})";

/// `minimal_config` with `member` added, or with `member` instead of the member of the same key.
inline std::string config_with(const std::string& member) {
  auto json = nlohmann::json::parse(minimal_config);
  json.update(nlohmann::json::parse("{" + member + "}"));
  return json.dump();
}
inline llama_config parse_config(const std::string& text) { return parse_llama_config(text, "config.json"); }

}  // namespace plait::test
