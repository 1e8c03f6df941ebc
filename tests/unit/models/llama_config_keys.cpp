// program: files
// Keys of config.json: each is read, ignored as harmless, or refused by name. Also malformed files.
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

TEST_CASE("unsupported values are refused by key") {
  for (const char* type : {"gpt2", "gemma2", "olmo2", "deepseek_v3", "ministral", "phi3", ""}) {
    CHECK_ERROR(
        parse_config(config_with("\"model_type\": \"" + std::string(type) + "\"")), "config.json", "'model_type'", type,
        R"(legal is "dots1", "llama", "mistral", "mixtral", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")");
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
  // Keys of SmolLM2.
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

TEST_CASE("each key is read, harmless or refused, and the keys of transformers' classes are known") {
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
      const int lists = plait::used_config_keys.contains(key) + plait::harmless_config_keys.contains(key) +
                        plait::mixture_config_keys.contains(key) + is_refused(key);
      CHECK(lists == 1);
    }
  }
  CHECK(seen.size() >= 38);
  // A key that is read is always checked; a harmless one is never checked.
  for (const std::string_view name : plait::used_config_keys) {
    const std::string key(name);
    CAPTURE(key);
    CHECK(!plait::harmless_config_keys.contains(key));
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
  for (const std::string_view name : plait::mixture_config_keys) {  // a Llama has no experts
    CHECK(parse_config(config_with("\"" + std::string(name) + "\": null")) == parse_config(minimal_config));
    CHECK_ERROR(parse_config(config_with("\"" + std::string(name) + "\": 1")), "'" + std::string(name) + "' is 1",
                "legal is null");
  }
  for (const auto& refused : plait::refused_config_keys) {
    const std::string key = "\"" + std::string(refused.key) + "\": ";
    CHECK(parse_config(config_with(key + std::string(refused.legal))) == parse_config(minimal_config));
    CHECK(parse_config(config_with(key + "null")) == parse_config(minimal_config));
    CHECK_ERROR(parse_config(config_with(key + "\"another\"")), "'" + std::string(refused.key) + "' is \"another\"",
                "legal is " + std::string(refused.legal));
  }
  CHECK_ERROR(parse_config(config_with(R"("residual_scale": 0.5)")), "config.json: key 'residual_scale' is 0.5",
              "its meaning is unknown", "take it out");
  CHECK(parse_config(config_with(R"("residual_scale": null)")) == parse_config(minimal_config));
  CHECK_ERROR(parse_config(R"({"model_type": "llama", "model_type": "qwen2"})"), "'model_type' appears twice");
}

TEST_CASE("malformed files are refused by name") {
  for (const char* text : {"", "{", "nonsense", "{\"a\": }", "[1,", "\xff\xfe{}"}) {
    CHECK_ERROR(parse_config(text), "config.json", "malformed JSON");
  }
  CHECK_ERROR(parse_config("version https://git-lfs.github.com/spec/v1\nsize 700\n"), "config.json",
              "not JSON but a pointer of Git LFS", "git lfs pull");
  CHECK_ERROR(parse_config(std::string((64 << 20) + 1, ' ')), "config.json: 67108865 bytes are too long");
  CHECK_ERROR(parse_config("[]"), "config.json", "not an object");
  std::string many = "[{}";
  for (int i = 0; i < 100000; ++i) many += ",{}";  // quadratic time would take hours
  CHECK_ERROR(parse_config(many + "]"), "config.json", "not an object");
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

TEST_CASE("the depth of nested objects and lists is limited") {
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

TEST_CASE("the keys of mixtures have no defaults, and unsupported values are refused") {
  const auto mixture = [](const std::string& type, const std::string& member) {
    auto json = nlohmann::json::parse(config_with("\"num_key_value_heads\": 4, \"num_experts_per_tok\": 3, \"" +
                                                  std::string(type == "mixtral" ? "num_local_experts" : "num_experts") +
                                                  "\": 6, \"model_type\": \"" + type + "\""));
    if (type != "mixtral") json["norm_topk_prob"] = false;
    if (type.starts_with("qwen")) json["moe_intermediate_size"] = 20;
    if (type == "qwen2_moe") json["shared_expert_intermediate_size"] = 28;
    json.update(nlohmann::json::parse("{" + member + "}"));
    return parse_config(json.dump());
  };
  const plait::llama_config one = mixture("mixtral", ""), two = mixture("qwen2_moe", ""),
                            three = mixture("qwen3_moe", ""), olmoe = mixture("olmoe", "");
  CHECK(one.mixture == plait::mixture_config{.experts = 6, .router = {.chosen = 3}});
  CHECK((one.ffn == 48 && one.sliding_window == 0 && one.rope_theta == 1e6 && one.rms_eps == 1e-5));
  CHECK(two.mixture ==
        plait::mixture_config{
            .experts = 6, .router = {.chosen = 3, .normalised = false}, .shared_ffn = 28, .shared_gate = true});
  CHECK((two.ffn == 20 && two.qkv_bias));
  CHECK(three.mixture == plait::mixture_config{.experts = 6, .router = {.chosen = 3, .normalised = false}});
  CHECK((three.ffn == 20 && three.qk_norm));
  CHECK(mixture("qwen3_moe", R"("num_experts": null, "num_local_experts": 6)") == three);
  CHECK(mixture("qwen3_moe", R"("mlp_only_layers": [], "decoder_sparse_step": 1, "router_aux_loss_coef": 0.1)") ==
        three);
  CHECK(parse_config(plait::llama_config_text(two, "float32")) == two);
  CHECK(parse_config(plait::llama_config_text(three, "float32")) == three);
  CHECK(parse_config(plait::llama_config_text(one, "float32")) == one);
  CHECK(olmoe.mixture == three.mixture);
  CHECK((olmoe.ffn == 48 && olmoe.qk_norm && olmoe.qk_norm_over_heads && olmoe.rms_eps == 1e-5));
  CHECK(parse_config(plait::llama_config_text(olmoe, "float32")) == olmoe);
  CHECK_ERROR(mixture("olmoe", R"("clip_qkv": 8.0)"), "'clip_qkv' is 8.0; legal is null");
  CHECK_ERROR(mixture("olmoe", R"("moe_intermediate_size": 20)"), "'moe_intermediate_size' is 20; legal is null");
  CHECK_ERROR(mixture("olmoe", R"("norm_topk_prob": null)"), "'norm_topk_prob' is missing");

  for (const char* key : {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"})
    CHECK_ERROR(mixture("qwen3_moe", "\"" + std::string(key) + "\": null"), key, "is missing");
  CHECK_ERROR(mixture("mixtral", R"("num_local_experts": null)"), "'num_local_experts' is missing");
  CHECK_ERROR(mixture("qwen2_moe", R"("shared_expert_intermediate_size": null)"), "is missing");
  CHECK_ERROR(mixture("mixtral", R"("num_local_experts": 0)"), "'num_local_experts' is 0; legal is at least 1");
  CHECK_ERROR(mixture("qwen3_moe", R"("num_local_experts": 5)"), "'num_local_experts' is 5; legal is 6");
  CHECK_ERROR(mixture("mixtral", R"("num_experts_per_tok": 7)"), "num_experts_per_tok is 7; legal are 1 to 6");
  CHECK_ERROR(mixture("mixtral", R"("moe_intermediate_size": 7)"), "'moe_intermediate_size' is 7; legal is null");
  CHECK_ERROR(mixture("mixtral", R"("norm_topk_prob": false)"), "'norm_topk_prob' is false; legal is true");
  CHECK_ERROR(mixture("qwen3_moe", R"("mlp_only_layers": [1])"),
              "'mlp_only_layers' is [1]; legal is a list of the first layers, [0, 1, ..]");
  CHECK_ERROR(mixture("qwen3_moe", R"("decoder_sparse_step": 2)"), "'decoder_sparse_step' is 2; legal is 1");
  CHECK_ERROR(mixture("qwen3_moe", R"("shared_expert_intermediate_size": 8)"), "is 8; legal is null");
  CHECK_ERROR(mixture("qwen2_moe", R"("use_sliding_window": true, "sliding_window": 4)"), "is true; legal is false");

  const plait::llama_config mixed = mixture("qwen3_moe", R"("mlp_only_layers": [0])");
  CHECK((mixed.mixture.dense_layers == 1 && mixed.mixture.dense_ffn == 48 && mixed.ffn == 20));
  CHECK(parse_config(plait::llama_config_text(mixed, "float32")) == mixed);

  const auto refused = [](plait::llama_config c, auto&& spoil) {
    spoil(c);
    return error_of([&] { plait::llama_config_text(c, "float32"); });
  };
  const std::string no_type = "config.json: no model type of Hugging Face computes this model: it would be ";
  CHECK(refused(one, [](auto& c) { c.mixture.router.normalised = false; }) ==
        no_type + "mixtral, which does not have weights that are not normalised");
  CHECK(refused(two, [](auto& c) { c.mixture.shared_gate = false; }) ==
        no_type + "qwen2_moe, which does not have a shared expert without a gate");
  CHECK(refused(one, [](auto& c) { c.mixture.dense_layers = 1; }) ==
        no_type + "mixtral, which does not have layers without experts");
  CHECK(refused(three, [](auto& c) { c.mixture.router.scale = 2, c.mixture.shared_ffn = 8; }) ==
        no_type + "qwen3_moe, which does not have a shared expert, this router");
  CHECK(refused(olmoe, [](auto& c) { c.head_dim += 2, c.qkv_bias = true, c.mixture.router.groups = 2; }) ==
        no_type + "olmoe, which does not have qkv_bias, heads * head_dim other than hidden, this router");
  CHECK(refused(olmoe, [](auto& c) { c.sliding_window = 4, c.mixture.shared_ffn = 8, c.mixture.dense_layers = 1; }) ==
        no_type + "olmoe, which does not have layers without experts, sliding_window, a shared expert");
  CHECK(refused(olmoe, [](auto& c) { c.mixture = {}; }) ==
        no_type + "qwen3, which does not have norms of q and k over all heads");
  const auto invalid = [&](auto&& spoil) {
    plait::llama_config c = two;
    spoil(c);
    return error_of([&] { plait::validate(c, "model"); });
  };
  CHECK(invalid([](auto& c) { c.qk_norm_over_heads = true; }) ==
        "model: qk_norm_over_heads is true, and qk_norm false; legal is false, or true for both");
  CHECK(invalid([](auto& c) { c.mixture.experts = 0; }) ==
        "model: shared_expert_intermediate_size is 28, and num_experts 0; legal is 0, as a shared expert needs other "
        "experts");
  CHECK(invalid([](auto& c) { c.mixture.shared_ffn = 0; }) ==
        "model: the gate of a shared expert, and shared_expert_intermediate_size 0; legal is at least 1");
  CHECK(invalid([](auto& c) { c.mixture.router.scale = 0; }) ==
        "model: routed_scaling_factor is 0; legal is a positive number");
  CHECK(invalid([](auto& c) { c.mixture.dense_layers = 2; }) ==
        "model: first_k_dense_replace is 2; legal are 0 to 1, so that a layer has experts");
  CHECK(invalid([](auto& c) { c.mixture.dense_layers = 1; }) ==
        "model: intermediate_size is 0; legal are 1 to 1048576");
  CHECK(invalid([](auto& c) { c.mlp_bias = true; }) ==
        "model: mlp_bias is true; experts have no biases, so false is legal");
}

TEST_CASE("dots.llm1 has DeepSeek-V3's router, and dense first layers") {
  const auto dots = [](const std::string& member) {
    auto json = nlohmann::json::parse(config_with(R"("num_key_value_heads": 4, "model_type": "dots1")"));
    json.update(nlohmann::json::parse(R"({"first_k_dense_replace": 1, "moe_intermediate_size": 20, "n_group": 2,
      "n_routed_experts": 6, "n_shared_experts": 2, "norm_topk_prob": false, "num_experts_per_tok": 3,
      "routed_scaling_factor": 2.5, "sliding_window": null, "topk_group": 1})"));
    json.update(nlohmann::json::parse("{" + member + "}"));
    return parse_config(json.dump());
  };
  const plait::llama_config c = dots("");
  CHECK(c.mixture == plait::mixture_config{.experts = 6,
                                           .router = {.chosen = 3,
                                                      .scores = plait::kernels::expert_scores::sigmoid,
                                                      .normalised = false,
                                                      .scale = 2.5,
                                                      .groups = 2,
                                                      .chosen_groups = 1,
                                                      .group_scores = plait::kernels::group_scores::two_largest},
                                           .correction_bias = true,
                                           .shared_ffn = 40,
                                           .dense_layers = 1,
                                           .dense_ffn = 48});
  CHECK((c.ffn == 20 && c.qk_norm && !c.qkv_bias && c.sliding_window == 0));
  CHECK(dots(R"("scoring_func": "noaux_tc", "moe_layer_freq": 1, "topk_method": "noaux_tc")") == c);
  CHECK(dots(R"("scoring_func": "sigmoid")") == c);
  const plait::llama_config plain = dots(R"("first_k_dense_replace": 0, "n_group": null, "topk_group": null)");
  CHECK((plain.mixture.router.groups == 1 && plain.mixture.dense_layers == 0 && plain.mixture.dense_ffn == 0));
  for (const plait::llama_config& model : {c, plain})
    CHECK(parse_config(plait::llama_config_text(model, "float32")) == model);

  for (const char* key : {"n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
                          "norm_topk_prob", "routed_scaling_factor"})
    CHECK_ERROR(dots("\"" + std::string(key) + "\": null"), key, "is missing");
  CHECK_ERROR(dots(R"("scoring_func": "softmax")"), "'scoring_func' is \"softmax\"; legal is \"noaux_tc\"");
  CHECK_ERROR(dots(R"("n_shared_experts": 0)"), "n_shared_experts is 0; legal are 1 to 1024");
  CHECK_ERROR(dots(R"("n_group": 4)"),
              "n_group is 4; legal are those that divide num_experts, which is 6, by 2 or more");
  CHECK_ERROR(dots(R"("topk_group": 3)"), "topk_group is 3; legal are 1 to 2");
  CHECK_ERROR(dots(R"("num_experts_per_tok": 4)"), "num_experts_per_tok is 4; legal are 1 to 3");
  CHECK_ERROR(dots(R"("sliding_window": 8, "max_window_layers": 1)"), "'max_window_layers' is 1; legal is 0");
  const auto refused = [&](auto&& spoil) {
    plait::llama_config other = c;
    spoil(other);
    return error_of([&] { plait::llama_config_text(other, "float32"); });
  };
  const std::string no_dots =
      "config.json: no model type of Hugging Face computes this model: it would be dots1, which does not have ";
  CHECK(refused([](auto& m) { m.qk_norm = false, m.qkv_bias = true; }) == no_dots + "qkv_bias, q and k without norms");
  CHECK(refused([](auto& m) { m.sliding_window = 4, m.mixture.shared_ffn = 30; }) ==
        no_dots + "sliding_window, this width of a shared expert");
  CHECK(refused([](auto& m) {
          m.mixture.router.scores = {}, m.mixture.router.group_scores = {}, m.mixture.shared_gate = true;
        }) == no_dots + "probabilities by softmax, groups by their largest score, a gate of the shared expert");
}
