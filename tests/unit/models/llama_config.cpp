// program: files
// The architecture of a Llama: presets and their numbers, config.json for each type of model, and files that plait
// writes.
#include "plait/models/llama_config.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "plait/checkpoint/safetensors.hpp"
#include "plait/models/llama_config_json.hpp"
#include "support/llama_configs.hpp"
#include "support/temp_folder.hpp"
#include "support/test_data.hpp"
#include "train_llama/machine.hpp"

using plait::llama_config;
using plait::llama_preset_config;
using plait::parameter_count;

TEST_CASE("published models have the published numbers of parameters") {
  CHECK(parameter_count(llama_preset_config("smollm-135m")) == 134'515'008);
  CHECK(parameter_count(llama_preset_config("smollm-360m")) == 361'821'120);
  CHECK(parameter_count(llama_preset_config("smollm-1.7b")) == 1'711'376'384);
  CHECK(parameter_count(llama_preset_config("llama-2-7b")) == 6'738'415'616);
  CHECK(parameter_count(llama_preset_config("llama-3-8b")) == 8'030'261'248);
  CHECK(parameter_count(llama_preset_config("llama-3.2-1b")) == 1'235'814'400);
  CHECK(parameter_count(llama_preset_config("mistral-7b-v0.1")) == 7'241'732'096);
  CHECK(parameter_count(llama_preset_config("qwen2.5-0.5b")) == 494'032'768);
  CHECK(parameter_count(llama_preset_config("qwen2.5-7b")) == 7'615'616'512);
  CHECK(parameter_count(llama_preset_config("qwen3-0.6b")) == 596'049'920);
  CHECK(parameter_count(llama_preset_config("qwen3-8b")) == 8'190'735'360);
  CHECK(parameter_count(llama_preset_config("mixtral-8x7b-v0.1")) == 46'702'792'704);
  CHECK(parameter_count(llama_preset_config("qwen1.5-moe-a2.7b")) == 14'315'784'192);
  CHECK(parameter_count(llama_preset_config("qwen3-30b-a3b")) == 30'532'122'624);
  CHECK(parameter_count(llama_preset_config("olmoe-1b-7b")) == 6'919'161'856);
  CHECK(parameter_count(llama_preset_config("dots.llm1")) == 142'774'373'888);
}

TEST_CASE("parameters and operations, counted by hand") {
  llama_config c{.vocab = 10, .hidden = 6, .layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 2, .ffn = 5};
  const std::int64_t layer = 6 + 6 + 8 * 6 + 2 * (4 * 6) + 6 * 8 + 3 * (5 * 6);
  CHECK(parameter_count(c) == 2 * 60 + 2 * layer + 6);
  const auto flops = plait::flops_per_token(c, 7);
  CHECK(flops.weights == 6 * (60 + 2 * layer + 6));
  CHECK(flops.attention == 12 * 2 * 8 * 7);
  CHECK(flops.total() == flops.weights + flops.attention);
  CHECK(flops.causal() == flops.weights + flops.attention / 2);

  c.tie_embeddings = true;
  CHECK(parameter_count(c) == 60 + 2 * layer + 6);
  CHECK(plait::flops_per_token(c, 7).weights == flops.weights);
  c.attention_bias = true;
  CHECK(parameter_count(c) == 60 + 2 * (layer + 8 + 4 + 4 + 6) + 6);
  c.mlp_bias = true;
  CHECK(parameter_count(c) == 60 + 2 * (layer + 22 + 5 + 5 + 6) + 6);

  c.attention_bias = c.mlp_bias = false;
  c.qkv_bias = true;
  CHECK(parameter_count(c) == 60 + 2 * (layer + 8 + 4 + 4) + 6);
  c.qk_norm = true;
  CHECK(parameter_count(c) == 60 + 2 * (layer + 16 + 2 + 2) + 6);
  c.sliding_window = 3;
  CHECK(parameter_count(c) == 60 + 2 * (layer + 16 + 2 + 2) + 6);
  c.qk_norm_over_heads = true;
  CHECK(parameter_count(c) == 60 + 2 * (layer + 16 + 8 + 4) + 6);
}

TEST_CASE("a token is multiplied with the experts that it chooses") {
  llama_config c{.vocab = 10, .hidden = 6, .layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 2, .ffn = 5};
  const std::int64_t dense = parameter_count(c);
  c.mixture = {.experts = 8, .router = {.chosen = 2}, .shared_ffn = 3, .shared_gate = true};
  CHECK(parameter_count(c) == dense + 2 * (7 * 3 * 30 + 8 * 6 + 3 * 18 + 6));
  CHECK(plait::active_parameter_count(c) == dense + 2 * (1 * 3 * 30 + 8 * 6 + 3 * 18 + 6));
  llama_config mixed = c;
  mixed.mixture.dense_layers = 1, mixed.mixture.dense_ffn = 7;
  CHECK(parameter_count(mixed) == dense + (7 * 3 * 30 + 8 * 6 + 3 * 18 + 6) + (3 * 6 * 7 - 3 * 6 * 5));
  CHECK(plait::flops_per_token(c, 7).weights == 6.0 * (plait::active_parameter_count(c) - 60));
}

TEST_CASE("a sliding window leaves less of the attention than the causal mask") {
  llama_config c;
  const auto causal = [&](std::int64_t window) {
    c.sliding_window = window;
    return plait::flops_per_token(c, 64);
  };
  const auto whole = causal(0);
  for (const std::int64_t window : {64, 65, 4096}) CHECK(causal(window).causal() == whole.causal());
  // A 64 x 64 square has 4096 pairs; 2048 are below its diagonal, and 2048 - 48 * 48 / 2 in a band of 16.
  CHECK(causal(16).attention == whole.attention);
  CHECK(causal(16).total() == whole.total());
  CHECK(causal(16).causal() == whole.weights + whole.attention * (2048 - 48 * 48 / 2) / 4096);
}

TEST_CASE("utilisation, calculated by hand") {
  // SmolLM-135M at 2048 tokens: 6 * 134,515,008 + 12 * 30 * 576 * 2048 operations a token.
  const auto flops = plait::flops_per_token(llama_preset_config("smollm-135m"), 2048);
  CHECK(flops.weights == 807'090'048);
  CHECK(flops.attention == 424'673'280);
  CHECK(flops.causal() == 1'019'426'688);
  // 8 GPUs of 312 TFLOP/s, a million tokens a second: 1.231763328e15 of 2.496e15.
  CHECK(plait::model_flops_utilisation(1e6, flops.total(), 312, 8) == doctest::Approx(0.4934949).epsilon(1e-6));
  CHECK(plait::model_flops_utilisation(1e6, flops.total(), 0, 8) == 0);
  // A separate input embedding is only looked up: Llama 3 8B multiplies with 8,030,261,248 - 128,256 * 4096 weights.
  CHECK(plait::flops_per_token(llama_preset_config("llama-3-8b"), 8192).weights == 6 * 7'504'924'672.0);
}

TEST_CASE("the peaks of GPUs, by CUDA's names") {
  using enum plait::product_kind;
  CHECK(plait::known_peak_tflops("NVIDIA A100-SXM4-80GB", bf16) == 312);
  CHECK(plait::known_peak_tflops("NVIDIA A100 80GB PCIe", f32) == 19.5);
  CHECK(plait::known_peak_tflops("NVIDIA A10", bf16) == 125);
  CHECK(plait::known_peak_tflops("NVIDIA H100 80GB HBM3", bf16) == 989);
  CHECK(plait::known_peak_tflops("NVIDIA H100 PCIe", bf16) == 756);
  CHECK(plait::known_peak_tflops("NVIDIA H200", bf16) == 989);
  CHECK(plait::known_peak_tflops("NVIDIA H200", tf32) == 494.7);
  CHECK(plait::known_peak_tflops("NVIDIA L40S", bf16) == 362);
  for (const char* other :
       {"", "NVIDIA GeForce RTX 4090", "NVIDIA A1000", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "H1000"})
    CHECK(plait::known_peak_tflops(other, bf16) == 0);
}

TEST_CASE("every preset is valid, has a unique name, and is found") {
  std::set<std::string_view> names;
  for (const auto& preset : plait::llama_presets) {
    CAPTURE(preset.name);
    CHECK_NOTHROW(validate(preset.config, "preset"));
    CHECK(names.insert(preset.name).second);
    CHECK(llama_preset_config(preset.name) == preset.config);
  }
  for (const char* name : {"tiny", "small"}) {
    const llama_config c = llama_preset_config(name);
    CHECK(c.vocab == 256);
    for (std::int64_t dim : {c.hidden, c.heads, c.kv_heads, c.ffn}) CHECK(dim % 8 == 0);
  }
  CHECK(llama_preset_config("tiny").hidden == 128);
  CHECK(llama_preset_config("small").hidden == 256);
  CHECK_ERROR(llama_preset_config("huge"), "model", "'huge'", "tiny, small", "llama-3-8b");
}

TEST_CASE("invalid values are refused by key") {
  const auto refuse = [](auto change, auto... parts) {
    llama_config c;
    change(c);
    CHECK_ERROR(validate(c, "here"), "here: ", parts...);
  };
  CHECK_NOTHROW(validate(llama_config{}, "here"));
  refuse([](auto& c) { c.vocab = 0; }, "vocab_size is 0", "1 to");
  refuse([](auto& c) { c.hidden = -4; }, "hidden_size is -4");
  refuse([](auto& c) { c.hidden = INT64_MAX; }, "hidden_size");
  refuse([](auto& c) { c.layers = 0; }, "num_hidden_layers");
  refuse([](auto& c) { c.heads = 0; }, "num_attention_heads");
  refuse([](auto& c) { c.kv_heads = 0; }, "num_key_value_heads");
  refuse([](auto& c) { c.kv_heads = 3; }, "num_attention_heads is 8", "num_key_value_heads 3", "multiple");
  refuse([](auto& c) { c.kv_heads = 16; }, "num_key_value_heads 16");
  refuse([](auto& c) { c.head_dim = 15; }, "head_dim is 15", "even");
  refuse([](auto& c) { c.head_dim = 1 << 20; }, "head_dim", "1 to 131072");
  refuse([](auto& c) { c.ffn = 0; }, "intermediate_size");
  refuse([](auto& c) { c.max_position = 0; }, "max_position_embeddings");
  refuse([](auto& c) { c.attention_bias = c.qkv_bias = true; }, "attention_bias and qkv_bias", "q, k, v and o");
  refuse([](auto& c) { c.sliding_window = -1; }, "sliding_window is -1", "0 (none) to 2147483648");
  refuse([](auto& c) { c.sliding_window = INT64_MAX; }, "sliding_window is 9223372036854775807");
  refuse([](auto& c) { c.rms_eps = 0; }, "rms_norm_eps");
  refuse([](auto& c) { c.rope_theta = std::numeric_limits<double>::quiet_NaN(); }, "rope_theta");
  refuse([](auto& c) { c.initializer_range = -1; }, "initializer_range");
  const auto refuse_rope = [&](auto change, auto... parts) {
    refuse([&](auto& c) { c.rope.kind = plait::rope_kind::llama3, change(c.rope); }, parts...);
  };
  refuse_rope([](auto& r) { r.factor = 0.5; }, "rope_scaling.factor is 0.5");
  refuse_rope([](auto& r) { r.low_freq_factor = 0; }, "rope_scaling.low_freq_factor");
  refuse_rope([](auto& r) { r.high_freq_factor = 1; }, "rope_scaling.high_freq_factor", "larger");
  refuse_rope([](auto& r) { r.original_max_position = 0; }, "original_max_position_embeddings");
}

TEST_CASE("valid extents of tp for a model's sizes are listed, as a checkpoint's sizes are fixed") {
  const auto legal = [](const char* name) { return plait::legal_tensor_ranks(plait::llama_preset_config(name)); };
  CHECK(legal("llama-3-8b") == "1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32");
  CHECK(legal("smollm-135m") == "1, 2, 3, 6, 9");
  CHECK(legal("qwen2.5-0.5b") == "1, 2, 4, 6, 8, 10, 12, 14");  // 14 heads in two groups
  const auto refused = [](const char* name, std::int64_t tp) {
    return error_of([&] { check_tensor_ranks(plait::llama_preset_config(name), tp, "--mesh"); });
  };
  plait::check_tensor_ranks(plait::llama_preset_config("llama-3-8b"), 16, "--mesh");
  CHECK(refused("llama-3-8b", 12) ==
        "--mesh: tp=12 is more than num_key_value_heads, which is 8, and no multiple of it: the ranks that share a kv "
        "head must be equally many; the model's sizes are what they are, and the extents of tp up to 64 that suit all "
        "of them are 1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32");
  CHECK(contains(refused("smollm-135m", 18), "tp=18 is more than the model's num_attention_heads, which is 9"));
  const llama_config narrow{.heads = 12, .kv_heads = 3, .head_dim = 8, .ffn = 5};
  CHECK(error_of([&] { check_tensor_ranks(narrow, 6, "--mesh"); }) ==
        "--mesh: tp=6 is more than the model's intermediate_size, which is 5; the model's sizes are what they are, and "
        "the extents of tp up to 64 that suit all of them are 1, 2, 3");
}

namespace {

using plait::parse_llama_config;
using plait::test::config_with;
using plait::test::minimal_config;
using plait::test::mistral_config;
using plait::test::parse_config;

// The keys of the model families as published, with their values.
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

const std::string qwen2 = R"({
  "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
  "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
  "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
  "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
  "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true,
  "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936})";
const std::string qwen3 = R"({
  "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
  "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
  "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
  "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
  "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936})";

}  // namespace

TEST_CASE("Llama 2, Llama 3, SmolLM, Mistral, Qwen 2.5 and Qwen 3") {
  CHECK(parse_config(llama_2) == plait::llama_preset_config("llama-2-7b"));
  CHECK(parse_config(llama_3_2) == plait::llama_preset_config("llama-3.2-1b"));
  CHECK(parse_config(smollm) == plait::llama_preset_config("smollm-135m"));
  CHECK(parse_config(mistral_config) == plait::llama_preset_config("mistral-7b-v0.1"));
  CHECK(parse_config(qwen2) == plait::llama_preset_config("qwen2.5-0.5b"));
  CHECK(parse_config(qwen3) == plait::llama_preset_config("qwen3-0.6b"));
}

TEST_CASE("the variants of Hugging Face's files have the files' numbers of weights") {
  const auto read = [](const std::string& name) {
    const std::string folder = plait::test::test_data() + "/llama_" + name;
    const llama_config c = plait::read_llama_config(folder + "/config.json");
    const plait::safetensors_reader file(folder + "/model.safetensors");
    std::int64_t weights = 0;
    for (const auto& entry : file.entries()) weights += entry.size();
    CAPTURE(name);
    CHECK(parameter_count(c) == weights);
    return c;
  };
  for (const char* name : {"mha", "gqa_tied", "lora"}) {
    const llama_config llama = read(name);
    CHECK(!llama.qkv_bias);
    CHECK(!llama.qk_norm);
    CHECK(llama.sliding_window == 0);
  }
  const llama_config two = read("qwen2"), three = read("qwen3"), windowed = read("mistral");
  CHECK(two.qkv_bias);
  CHECK(!two.qk_norm);
  CHECK(!two.attention_bias);
  CHECK(two.sliding_window == 0);  // the file has 3, and a key that disables it
  CHECK(three.qk_norm);
  CHECK(!three.qkv_bias);
  CHECK(three.head_dim == 8);
  CHECK(three.hidden == 24);
  CHECK(windowed.sliding_window == 5);
  CHECK(!windowed.qkv_bias);
  CHECK(!windowed.qk_norm);
}

TEST_CASE("absent keys have the defaults of each model type") {
  const auto of = [](const std::string& type, const std::string& more = "") {
    return parse_config(
        config_with("\"hidden_size\": 64, \"num_attention_heads\": 32, \"model_type\": \"" + type + "\"" + more));
  };
  const llama_config m = of("mistral"), q2 = of("qwen2"), q3 = of("qwen3");
  CHECK(m.kv_heads == 8);
  CHECK(q2.kv_heads == 32);
  CHECK(q3.kv_heads == 32);
  CHECK(of("mistral", R"(, "num_key_value_heads": null)").kv_heads == 32);
  CHECK(of("mistral", R"(, "head_dim": null)").head_dim == 2);
  CHECK(q2.head_dim == 2);
  CHECK(q3.head_dim == 128);
  CHECK(m.max_position == 131072);
  CHECK(q2.max_position == 32768);
  CHECK(q3.max_position == 32768);
  CHECK(m.sliding_window == 4096);
  CHECK(q2.sliding_window == 0);
  CHECK(q3.sliding_window == 0);
  CHECK(of("qwen2", R"(, "use_sliding_window": true, "max_window_layers": 0)").sliding_window == 4096);
}

TEST_CASE("sliding windows: all layers or none") {
  const auto of = [](const std::string& type, const std::string& more) {
    return parse_config(
        config_with("\"num_key_value_heads\": 4, \"head_dim\": 8, \"model_type\": \"" + type + "\", " + more));
  };
  CHECK(of("mistral", R"("sliding_window": 7)").sliding_window == 7);
  CHECK(of("mistral", R"("sliding_window": null)").sliding_window == 0);
  CHECK(of("mistral", R"("sliding_window": null, "layer_types": ["full_attention", "full_attention"])") ==
        of("mistral", R"("sliding_window": null)"));
  CHECK(of("mistral", R"("sliding_window": 7, "layer_types": ["sliding_attention", "sliding_attention"])")
            .sliding_window == 7);
  CHECK(of("llama", R"("sliding_window": 2048)").sliding_window == 0);  // no two positions are so far apart
  CHECK_ERROR(of("llama", R"("sliding_window": 2047)"), "'sliding_window' is 2047", "model_type is mistral");
  for (const char* type : {"qwen2", "qwen3"}) {
    CAPTURE(type);
    const std::string used = R"("use_sliding_window": true, "sliding_window": 7)";
    CHECK(of(type, R"("use_sliding_window": false, "sliding_window": 7, "max_window_layers": 1)").sliding_window == 0);
    CHECK(of(type, R"("use_sliding_window": true, "sliding_window": null, "max_window_layers": 1)").sliding_window ==
          0);
    CHECK(of(type, used + R"(, "max_window_layers": 0)").sliding_window == 7);
    CHECK(of(type, used + R"(, "max_window_layers": 2)").sliding_window == 0);
    CHECK(of(type, used).sliding_window == 0);  // only layers from the 28th on would use it
    CHECK(of(type, used + R"(, "max_window_layers": 1, "layer_types": ["sliding_attention", "sliding_attention"])")
              .sliding_window == 7);
    CHECK(of(type, used + R"(, "max_window_layers": 0, "layer_types": ["full_attention", "full_attention"])")
              .sliding_window == 0);
    CHECK_ERROR(of(type, used + R"(, "max_window_layers": 1)"), "'max_window_layers' is 1", "0 (all layers",
                "at least num_hidden_layers, 2", "layers that differ are not supported");
    CHECK_ERROR(of(type, used + R"(, "max_window_layers": -1)"), "'max_window_layers' is -1");
    CHECK_ERROR(of(type, used + R"(, "num_hidden_layers": 29)"), "'max_window_layers' is 28");
    CHECK_ERROR(of(type, used + R"(, "layer_types": ["full_attention", "sliding_attention"])"), "'layer_types' is [",
                "2 (num_hidden_layers) times", "layers that differ are not supported");
    CHECK_ERROR(of(type, used + R"(, "layer_types": ["sliding_attention"])"), "'layer_types'", "2 (num_hidden_layers)");
    CHECK_ERROR(of(type, used + R"(, "layer_types": ["chunked_attention", "chunked_attention"])"), "'layer_types'",
                "chunked_attention");
    CHECK_ERROR(of(type, R"("layer_types": ["sliding_attention", "sliding_attention"])"), "'layer_types'",
                "times \"full_attention\", there being no sliding window");
    CHECK_ERROR(of(type, R"("use_sliding_window": true, "sliding_window": 0)"), "'sliding_window' is 0",
                "null or at least 1");
    CHECK_ERROR(of(type, R"("use_sliding_window": 1)"), "'use_sliding_window'", "true or false");
  }
  CHECK_ERROR(of("mistral", R"("sliding_window": 0)"), "'sliding_window' is 0", "null or at least 1");
  CHECK_ERROR(of("mistral", R"("sliding_window": 4e20)"), "'sliding_window'", "whole number");
  CHECK_ERROR(of("mistral", R"("sliding_window": 7, "use_sliding_window": false)"), "'use_sliding_window' is false");
  CHECK_ERROR(of("mistral", R"("sliding_window": 7, "max_window_layers": 1)"), "'max_window_layers' is 1");
  CHECK_ERROR(of("mistral", R"("sliding_window": 7, "layer_types": ["full_attention", "full_attention"])"),
              "'layer_types'", "\"sliding_attention\"");
  CHECK_ERROR(of("llama", R"("layer_types": ["sliding_attention", "sliding_attention"])"), "'layer_types'",
              "no sliding window");
  CHECK_ERROR(of("llama", R"("layer_types": "full_attention")"), "'layer_types'", "a list of strings");
  CHECK_ERROR(of("llama", R"("layer_types": ["full_attention", 1])"), "'layer_types'", "a list of strings");
}

TEST_CASE("defaults of absent keys, null head_dim, both spellings of rope scaling") {
  const llama_config c = parse_config(minimal_config);
  CHECK(c.kv_heads == 4);
  CHECK(c.head_dim == 8);
  CHECK(c.max_position == 2048);
  CHECK(c.rms_eps == 1e-6);
  CHECK(c.rope_theta == 10000);
  CHECK(c.rope.kind == plait::rope_kind::none);
  CHECK(!c.tie_embeddings);
  CHECK(parse_config(config_with(R"("head_dim": null, "num_key_value_heads": null)")) == c);
  CHECK(parse_config(config_with(R"("head_dim": 16, "num_key_value_heads": 2)")).head_dim == 16);
  CHECK(parse_config(config_with(R"("attention_bias": true, "mlp_bias": true)")).mlp_bias);

  const std::string values =
      R"("factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 4096)";
  const llama_config scaled =
      parse_config(config_with(R"("rope_theta": 5e5, "rope_scaling": {"type": "llama3", )" + values + "}"));
  CHECK(scaled.rope == plait::rope_scaling{plait::rope_kind::llama3, 8, 1, 4, 4096});
  CHECK(scaled.rope_theta == 5e5);
  CHECK(parse_config(config_with(R"("rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", )" + values + "}")) ==
        scaled);
  CHECK(parse_config(config_with(R"("rope_parameters": {"rope_theta": 5e5, "rope_type": "default"})")).rope_theta ==
        5e5);
  CHECK(parse_config(config_with(R"("rope_scaling": {"rope_type": "default"})")) == c);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const auto rope = [&](const std::string& member) {
      return parse_config(config_with("\"rope_theta\": 5e5, \"" + std::string(key) + "\": {" + member + "}"));
    };
    CHECK(rope(R"("rope_type": "default", "rope_theta": 7)").rope_theta == 7);
    CHECK(rope(R"("rope_type": "llama3", "partial_rotary_factor": 1.0, )" + values) == scaled);
    CHECK_ERROR(rope(R"("rope_type": "default", "partial_rotary_factor": 0.5)"),
                "'" + std::string(key) + ".partial_rotary_factor' is 0.5");
    CHECK_ERROR(rope(R"("factor": 2.0)"), "'" + std::string(key) + ".factor' is 2.0", "\"default\" it has no effect");
    CHECK_ERROR(rope(R"("rope_type": "llama3", "mscale": 2, )" + values), ".mscale' is 2", "\"llama3\" it has no");
  }
}

TEST_CASE("rotary keys, padding and names of functions are read as transformers reads them") {
  const auto goldens = nlohmann::json::parse(plait::read_file(plait::test::test_data() + "/llama_configs.json", ""));
  REQUIRE(goldens["read"].size() >= 20);
  for (const auto& golden : goldens["read"]) {
    auto file = goldens["small"];
    file.update(golden["config"]);
    CAPTURE(file.dump());
    const llama_config c = parse_config(file.dump());
    const auto frequencies = plait::rotary_frequencies(c);
    const auto expected = golden["inv_freq"].get<std::vector<double>>();
    REQUIRE(frequencies.size() == expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i)
      CHECK(std::abs(frequencies[i] - expected[i]) <= 1e-12 * expected[i]);
    CHECK(c.pad_token == (golden["padding_idx"].is_null() ? -1 : golden["padding_idx"].get<std::int64_t>()));
  }
  for (const int token : {31, -32}) {
    auto file = goldens["small"];
    file["pad_token_id"] = token;
    CHECK_ERROR(parse_config(file.dump()), "'pad_token_id' is " + std::to_string(token), "0 to 30");
  }
}

TEST_CASE("files and presets; a written file is read unchanged") {
  temp_folder dir;
  for (const auto& preset : plait::llama_presets) {
    CHECK(plait::load_llama_config(dir.write("config.json", plait::llama_config_text(preset.config))) == preset.config);
    CHECK(plait::load_llama_config(std::string(preset.name)) == preset.config);
  }
  llama_config odd{.head_dim = 6, .rms_eps = 1.1e-7, .rope_theta = 12345.678, .attention_bias = true, .mlp_bias = true};
  odd.initializer_range = 1.0 / 24;
  odd.pad_token = 255;
  CHECK(parse_llama_config(plait::llama_config_text(odd), "text") == odd);
  CHECK(contains(plait::llama_config_text(odd), "\"rope_scaling\": null"));
  CHECK(contains(plait::llama_config_text(plait::llama_preset_config("llama-3.2-1b")), "\"factor\": 32.0"));

  for (const bool bias : {false, true}) {
    for (const std::int64_t window : {0, 3}) {
      const auto round = [](const llama_config& c, const char* type) {
        const std::string text = plait::llama_config_text(c);
        CHECK(contains(text, "\"model_type\": \"" + std::string(type) + "\""));
        CHECK(parse_llama_config(text, "text") == c);
      };
      round({.attention_bias = bias, .qk_norm = true, .sliding_window = window}, "qwen3");
      round({.qkv_bias = bias, .sliding_window = window}, bias ? "qwen2" : window > 0 ? "mistral" : "llama");
    }
  }
  CHECK_ERROR(plait::llama_config_text({.qkv_bias = true, .qk_norm = true, .mlp_bias = true}), "qwen3, which does not",
              "qkv_bias, mlp_bias");
  CHECK_ERROR(plait::llama_config_text({.qkv_bias = true, .mlp_bias = true}), "qwen2, which does not have mlp_bias");
  CHECK_ERROR(plait::llama_config_text({.attention_bias = true, .mlp_bias = true, .sliding_window = 3}),
              "mistral, which does not have attention_bias, mlp_bias");

  CHECK_ERROR(plait::load_llama_config(plait::test::test_data() + "/llama_mha"), "model", "is the folder of a model",
              "llama_mha/config.json'", "open_model_directory");
  CHECK_ERROR(plait::load_llama_config("gigantic"), "model", "'gigantic'", "tiny", "config.json");
  CHECK_ERROR(plait::load_llama_config(dir / "absent.json"), "model", "absent.json", "No such file");
  CHECK_ERROR(plait::load_llama_config(dir.write("bad.json", "{")), "model", "bad.json", "malformed JSON");
}
