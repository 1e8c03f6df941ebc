#include "plait/models/llama_config_json.hpp"

#include <doctest/doctest.h>

#include <string>

#include "temp_folder.hpp"

namespace {

using plait::llama_config;
using plait::parse_llama_config;

// The keys of the three model families as they are published, values included.
const std::string llama_2 = R"({
  "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
  "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "float16", "use_cache": true,
  "vocab_size": 32000})";
const std::string llama_3_2 = R"({
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "head_dim": 64,
  "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
  "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
  "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "vocab_size": 128256})";
const std::string smollm = R"({
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "hidden_act": "silu",
  "hidden_size": 576, "initializer_range": 0.02, "intermediate_size": 1536, "max_position_embeddings": 2048,
  "mlp_bias": false, "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
  "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
  "rope_theta": 10000.0, "tie_word_embeddings": true, "vocab_size": 49152})";

const std::string minimal = R"({"model_type": "llama", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2,
  "num_attention_heads": 4, "intermediate_size": 48})";

/// `minimal` with `member` added, or put in the place of the key it names.
std::string with(const std::string& member) {
  auto json = nlohmann::json::parse(minimal);
  json.update(nlohmann::json::parse("{" + member + "}"));
  return json.dump();
}
llama_config parse(const std::string& text) { return parse_llama_config(text, "config.json"); }

}  // namespace

TEST_CASE("Llama 2, Llama 3 and SmolLM") {
  CHECK(parse(llama_2) == plait::llama_preset_config("llama-2-7b"));
  CHECK(parse(llama_3_2) == plait::llama_preset_config("llama-3.2-1b"));
  CHECK(parse(smollm) == plait::llama_preset_config("smollm-135m"));
}

TEST_CASE("defaults of absent keys, null head_dim, both spellings of rope scaling") {
  const llama_config c = parse(minimal);
  CHECK(c.kv_heads == 4);
  CHECK(c.head_dim == 8);
  CHECK(c.max_position == 2048);
  CHECK(c.rms_eps == 1e-6);
  CHECK(c.rope_theta == 10000);
  CHECK(c.rope.kind == plait::rope_kind::none);
  CHECK(!c.tie_embeddings);
  CHECK(parse(with(R"("head_dim": null, "num_key_value_heads": null)")) == c);
  CHECK(parse(with(R"("head_dim": 16, "num_key_value_heads": 2)")).head_dim == 16);
  CHECK(parse(with(R"("attention_bias": true, "mlp_bias": true)")).mlp_bias);

  const std::string values =
      R"("factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 4096)";
  const llama_config scaled = parse(with(R"("rope_theta": 5e5, "rope_scaling": {"type": "llama3", )" + values + "}"));
  CHECK(scaled.rope == plait::rope_scaling{plait::rope_kind::llama3, 8, 1, 4, 4096});
  CHECK(scaled.rope_theta == 5e5);
  CHECK(parse(with(R"("rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", )" + values + "}")) == scaled);
  CHECK(parse(with(R"("rope_parameters": {"rope_theta": 5e5, "rope_type": "default"})")).rope_theta == 5e5);
  CHECK(parse(with(R"("rope_scaling": {"rope_type": "default"})")) == c);
}

TEST_CASE("what is not supported is refused by key") {
  CHECK_ERROR(parse(with(R"("model_type": "mistral")")), "config.json", "'model_type'", "mistral", "llama");
  CHECK_ERROR(parse(with(R"("hidden_act": "gelu")")), "'hidden_act'", "gelu", "silu");
  CHECK_ERROR(parse(with(R"("pretraining_tp": 2)")), "'pretraining_tp' is 2", "legal is 1");
  CHECK_ERROR(parse(with(R"("attention_dropout": 0.1)")), "'attention_dropout'");
  CHECK_ERROR(parse(with(R"("partial_rotary_factor": 0.5)")), "'partial_rotary_factor'");
  CHECK_ERROR(parse(with(R"("quantization_config": {"bits": 4})")), "'quantization_config'");
  for (const char* type : {"linear", "dynamic", "yarn", "longrope"}) {
    const std::string rope = R"("rope_scaling": {"factor": 2.0, "type": ")" + std::string(type) + "\"}";
    CHECK_ERROR(parse(with(rope)), "'rope_scaling.type'", type, "llama3");
  }
  CHECK_ERROR(parse(with(R"("rope_parameters": {"rope_type": "yarn"})")), "'rope_parameters.rope_type'", "yarn");
  CHECK_ERROR(parse(with(R"("rope_scaling": {"factor": 2.0})")), "'rope_scaling.rope_type'");
  CHECK_ERROR(parse(with(R"("rope_scaling": {"rope_type": "llama3"})")), "'rope_scaling.factor' is missing");
  CHECK_ERROR(parse(with(R"("rope_scaling": "llama3")")), "'rope_scaling'", "an object");
  CHECK_ERROR(parse(with(R"("rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "default"})")),
              "both");
}

TEST_CASE("malformed files are refused by name") {
  for (const char* text : {"", "{", "nonsense", "{\"a\": }", "[1,", "\xff\xfe{}"}) {
    CHECK_ERROR(parse(text), "config.json", "malformed JSON");
  }
  CHECK_ERROR(parse("[]"), "config.json", "no object");
  CHECK_ERROR(parse("{}"), "config.json", "'model_type' is missing");
  for (const char* key :
       {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}) {
    auto json = nlohmann::json::parse(minimal);
    json.erase(key);
    CHECK_ERROR(parse(json.dump()), "config.json", std::string("'") + key + "' is missing");
    for (const char* wrong : {"\"8\"", "8.5", "true", "[8]", "18446744073709551615"}) {
      CHECK_ERROR(parse(with("\"" + std::string(key) + "\": " + wrong)), std::string("'") + key + "' is ", wrong,
                  "whole number");
    }
    CHECK_ERROR(parse(with("\"" + std::string(key) + "\": 0")), key);
    CHECK_ERROR(parse(with("\"" + std::string(key) + "\": -8")), key);
    CHECK_ERROR(parse(with("\"" + std::string(key) + "\": 9223372036854775807")), key);
  }
  CHECK_ERROR(parse(with(R"("hidden_size": 33)")), "hidden_size 33", "num_attention_heads 4");
  CHECK_ERROR(parse(with(R"("rms_norm_eps": "small")")), "'rms_norm_eps'", "a number");
  CHECK_ERROR(parse(with(R"("tie_word_embeddings": 1)")), "'tie_word_embeddings'", "true or false");
  CHECK_ERROR(parse(with(R"("num_key_value_heads": 3)")), "num_key_value_heads 3");
}

TEST_CASE("a file may nest its objects and lists only so deep") {
  const auto nested = [](const char* key, std::size_t depth, bool objects) {
    std::string value;
    for (std::size_t i = 0; i < depth; ++i) value += objects ? "{\"a\": " : "[";
    value += "1";
    for (std::size_t i = 0; i < depth; ++i) value += objects ? "}" : "]";
    return minimal.substr(0, minimal.size() - 1) + ", \"" + key + "\": " + value + "}";
  };
  for (bool objects : {true, false}) {
    CHECK(parse(nested("ignored", 63, objects)) == parse(minimal));  // the file itself is one level
    CHECK_ERROR(parse(nested("hidden_act", 63, objects)), "'hidden_act' is ", "legal is \"silu\"");
    for (std::size_t depth : {std::size_t{64}, std::size_t{1000000}})
      for (const char* key : {"ignored", "hidden_act", "hidden_size"})
        CHECK_ERROR(parse(nested(key, depth, objects)),
                    "config.json: the JSON has more than 64 levels of objects and lists in each other");
  }
  CHECK_ERROR(parse(std::string(1000000, '[')), "config.json: the JSON has more than 64 levels");
}

TEST_CASE("files and presets; what is written reads back") {
  temp_folder dir;
  for (const auto& preset : plait::llama_presets) {
    plait::write_llama_config(preset.config, dir / "config.json", "--save");
    CHECK(plait::load_llama_config(dir / "config.json") == preset.config);
    CHECK(plait::load_llama_config(std::string(preset.name)) == preset.config);
  }
  llama_config odd{.head_dim = 6, .rms_eps = 1.1e-7, .rope_theta = 12345.678, .attention_bias = true, .mlp_bias = true};
  odd.initializer_range = 1.0 / 24;
  CHECK(parse_llama_config(plait::llama_config_text(odd), "text") == odd);
  CHECK(contains(plait::llama_config_text(odd), "\"rope_scaling\": null"));
  CHECK(contains(plait::llama_config_text(plait::llama_preset_config("llama-3.2-1b")), "\"factor\": 32.0"));

  CHECK_ERROR(plait::load_llama_config("gigantic"), "--model", "'gigantic'", "tiny", "config.json");
  CHECK_ERROR(plait::load_llama_config(dir / "absent.json"), "--model", "absent.json", "No such file");
  CHECK_ERROR(plait::load_llama_config(dir.write("bad.json", "{")), "--model", "bad.json", "malformed JSON");
  CHECK_ERROR(plait::write_llama_config({}, dir / "no/config.json", "--save"), "--save", "no/config.json");
}
