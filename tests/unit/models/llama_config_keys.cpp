// program: files
// Keys of config.json: each is read, or harmless, or refused by name; and files that are malformed.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <string_view>

#include "plait/io/mapped_file.hpp"
#include "plait/models/config_keys.hpp"
#include "support/llama_configs.hpp"
#include "support/temp_folder.hpp"
#include "support/test_data.hpp"

namespace {

using plait::test::config_with;
using plait::test::minimal_config;
using plait::test::mistral_config;
using plait::test::parse_config;

}  // namespace

TEST_CASE("what is not supported is refused by key") {
  for (const char* type : {"gpt2", "gemma2", "qwen2_moe", "qwen3_moe", "mixtral", "ministral", "phi3", ""}) {
    CHECK_ERROR(parse_config(config_with("\"model_type\": \"" + std::string(type) + "\"")), "config.json",
                "'model_type'", type, R"(legal is "llama", "mistral", "qwen2" or "qwen3")");
  }
  for (const char* type : {"llama", "mistral", "qwen2", "qwen3"}) {
    const auto asks = [&](const std::string& member) {
      return parse_config(
          config_with("\"num_key_value_heads\": 4, \"model_type\": \"" + std::string(type) + "\", " + member));
    };
    const bool two = std::string(type) == "qwen2", three = std::string(type) == "qwen3";
    CAPTURE(type);
    if (std::string(type) == "llama" || three) {
      CHECK(asks(R"("attention_bias": true)").attention_bias);
    } else {
      CHECK_ERROR(asks(R"("attention_bias": true)"), "'attention_bias' is true", "legal is false");
    }
    if (std::string(type) != "llama") CHECK_ERROR(asks(R"("mlp_bias": true)"), "'mlp_bias' is true", "legal is false");
    CHECK_ERROR(asks(two ? R"("qkv_bias": false)" : R"("qkv_bias": true)"), "'qkv_bias'", two ? "true" : "false");
    CHECK_ERROR(asks(three ? R"("qk_norm": false)" : R"("qk_norm": true)"), "'qk_norm'", three ? "true" : "false");
    CHECK_ERROR(asks(R"("use_mrope": true)"), "'use_mrope' is true");
    CHECK_ERROR(asks(R"("rope_scaling": {"rope_type": "yarn", "factor": 4.0})"), "'rope_scaling.rope_type'", "yarn");
  }
  CHECK_ERROR(parse_config(config_with(R"("hidden_act": "gelu")")), "'hidden_act'", "gelu", "silu");
  // SmolLM2's own.
  CHECK_NOTHROW(parse_config(config_with(R"("is_llama_config": true, "transformers.js_config": {"dtype": "q4"})")));
  CHECK_ERROR(parse_config(config_with(R"("is_llama_config": false)")), "'is_llama_config' is false", "legal is true");
  CHECK_ERROR(plait::parse_llama_config(std::string(R"({"model_type": "llama"})") + std::string("\0more", 5), "x"),
              "x: malformed JSON: there is a zero byte at 23");
  CHECK_ERROR(parse_config(config_with(R"("pretraining_tp": 2)")), "'pretraining_tp' is 2", "legal is 1");
  CHECK_ERROR(parse_config(config_with(R"("attention_dropout": 0.1)")), "'attention_dropout'");
  CHECK_ERROR(parse_config(config_with(R"("partial_rotary_factor": 0.5)")), "'partial_rotary_factor'");
  CHECK_ERROR(parse_config(config_with(R"("quantization_config": {"bits": 4})")), "'quantization_config'");
  for (const char* type : {"linear", "dynamic", "yarn", "longrope"}) {
    const std::string rope = R"("rope_scaling": {"factor": 2.0, "type": ")" + std::string(type) + "\"}";
    CHECK_ERROR(parse_config(config_with(rope)), "'rope_scaling.type'", type, "llama3");
  }
  CHECK_ERROR(parse_config(config_with(R"("rope_parameters": {"rope_type": "yarn"})")), "'rope_parameters.rope_type'",
              "yarn");
  CHECK_ERROR(parse_config(config_with(R"("rope_scaling": {"rope_type": "llama3"})")),
              "'rope_scaling.factor' is missing");
  CHECK_ERROR(parse_config(config_with(R"("rope_scaling": "llama3")")), "'rope_scaling'", "an object");
  CHECK_ERROR(
      parse_config(config_with(R"("rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "default"})")),
      "both");
}

TEST_CASE("each key is read, or harmless, or refused, and those of transformers' own classes are known") {
  const auto goldens = nlohmann::json::parse(plait::read_file(plait::test::test_data() + "/llama_configs.json", ""));
  const auto is_refused = [](const std::string& key) {
    return std::any_of(plait::refused_config_keys.begin(), plait::refused_config_keys.end(),
                       [&](const auto& refused) { return refused.key == key; });
  };
  std::set<std::string> seen;
  for (const auto& [type, keys] : goldens["defaults"].items()) {
    CAPTURE(type);
    CHECK(keys["model_type"] == type);
    CHECK(keys.size() >= 30);
    CHECK(parse_config(keys.dump()).hidden == keys["hidden_size"].get<std::int64_t>());
    for (const auto& [key, value] : keys.items()) {
      CAPTURE(key);
      seen.insert(key);
      const int lists = plait::detail::is_among(plait::used_config_keys, key) +
                        plait::detail::is_among(plait::harmless_config_keys, key) + is_refused(key);
      CHECK(lists == 1);
    }
  }
  CHECK(seen.size() >= 38);
  // One that is read is checked, whatever else the file says; one that is harmless is not looked at.
  for (const std::string_view name : plait::used_config_keys) {
    const std::string key(name);
    CAPTURE(key);
    CHECK(!plait::detail::is_among(plait::harmless_config_keys, key));
    auto file = nlohmann::json::parse(mistral_config);
    if (key == "rope_theta" || key.starts_with("use_") || key.starts_with("max_w") || key == "layer_types")
      file["sliding_window"] = 4096;
    if (key == "use_sliding_window" || key == "max_window_layers") file["model_type"] = "qwen2";
    if (key == "max_window_layers") file["use_sliding_window"] = true;
    if (key == "original_max_position_embeddings")
      file["rope_scaling"] = {{"type", "llama3"}, {"factor", 8}, {"low_freq_factor", 1}, {"high_freq_factor", 4}};
    file[key] = nlohmann::json::parse(R"({"wrong": 1})");
    CHECK_ERROR(parse_config(file.dump()), "'" + key);
  }
  for (const std::string_view name : plait::harmless_config_keys) {
    CHECK(!is_refused(std::string(name)));
    CHECK(parse_config(config_with("\"" + std::string(name) + R"(": {"any": ["value"]})")) ==
          parse_config(minimal_config));
  }
  for (const auto& refused : plait::refused_config_keys) {
    const std::string key = "\"" + std::string(refused.key) + "\": ";
    CHECK(parse_config(config_with(key + std::string(refused.legal))) == parse_config(minimal_config));
    CHECK(parse_config(config_with(key + "null")) == parse_config(minimal_config));
    CHECK_ERROR(parse_config(config_with(key + "\"another\"")), "'" + std::string(refused.key) + "' is \"another\"",
                "legal is " + std::string(refused.legal));
  }
  CHECK_ERROR(parse_config(config_with(R"("residual_scale": 0.5)")), "config.json: key 'residual_scale' is 0.5",
              "what it means is not known", "take it out");
  CHECK(parse_config(config_with(R"("residual_scale": null)")) == parse_config(minimal_config));
  CHECK_ERROR(parse_config(R"({"model_type": "llama", "model_type": "qwen2"})"), "'model_type' appears twice");
}

TEST_CASE("malformed files are refused by name") {
  for (const char* text : {"", "{", "nonsense", "{\"a\": }", "[1,", "\xff\xfe{}"}) {
    CHECK_ERROR(parse_config(text), "config.json", "malformed JSON");
  }
  CHECK_ERROR(parse_config("version https://git-lfs.github.com/spec/v1\nsize 700\n"), "config.json",
              "no JSON but a pointer of Git LFS", "git lfs pull");
  CHECK_ERROR(parse_config(std::string((64 << 20) + 1, ' ')), "config.json: 67108865 bytes are too long");
  CHECK_ERROR(parse_config("[]"), "config.json", "no object");
  std::string many = "[{}";
  for (int i = 0; i < 100000; ++i) many += ",{}";  // hours, where each looks at those before it
  CHECK_ERROR(parse_config(many + "]"), "config.json", "no object");
  CHECK_ERROR(parse_config("{}"), "config.json", "'model_type' is missing");
  for (const char* key :
       {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}) {
    auto json = nlohmann::json::parse(minimal_config);
    json.erase(key);
    CHECK_ERROR(parse_config(json.dump()), "config.json", std::string("'") + key + "' is missing");
    for (const char* wrong : {"\"8\"", "8.5", "true", "[8]", "18446744073709551615"}) {
      CHECK_ERROR(parse_config(config_with("\"" + std::string(key) + "\": " + wrong)), std::string("'") + key + "' is ",
                  wrong, "whole number");
    }
    CHECK_ERROR(parse_config(config_with("\"" + std::string(key) + "\": 0")), key);
    CHECK_ERROR(parse_config(config_with("\"" + std::string(key) + "\": -8")), key);
    CHECK_ERROR(parse_config(config_with("\"" + std::string(key) + "\": 9223372036854775807")), key);
  }
  CHECK_ERROR(parse_config(config_with(R"("hidden_size": 33)")), "hidden_size 33", "num_attention_heads 4");
  CHECK_ERROR(parse_config(config_with(R"("rms_norm_eps": "small")")), "'rms_norm_eps'", "a number");
  CHECK_ERROR(parse_config(config_with(R"("tie_word_embeddings": 1)")), "'tie_word_embeddings'", "true or false");
  CHECK_ERROR(parse_config(config_with(R"("num_key_value_heads": 3)")), "num_key_value_heads 3");
}

TEST_CASE("a file may nest its objects and lists only so deep") {
  const auto nested = [](const char* key, std::size_t depth, bool objects) {
    std::string value;
    for (std::size_t i = 0; i < depth; ++i) value += objects ? "{\"a\": " : "[";
    value += "1";
    for (std::size_t i = 0; i < depth; ++i) value += objects ? "}" : "]";
    return minimal_config.substr(0, minimal_config.size() - 1) + ", \"" + key + "\": " + value + "}";
  };
  for (bool objects : {true, false}) {
    CHECK(parse_config(nested("id2label", 63, objects)) ==
          parse_config(minimal_config));  // the file itself is one level
    CHECK_ERROR(parse_config(nested("hidden_act", 63, objects)), "'hidden_act' is ", "legal is a string");
    for (std::size_t depth : {std::size_t{64}, std::size_t{1000000}})
      for (const char* key : {"id2label", "hidden_act", "num_key_value_heads"})
        CHECK_ERROR(parse_config(nested(key, depth, objects)),
                    "config.json: the JSON has more than 64 levels of objects and lists in each other");
  }
  CHECK_ERROR(parse_config(std::string(1000000, '[')), "config.json: the JSON has more than 64 levels");
}
