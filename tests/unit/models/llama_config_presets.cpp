// program: files
#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <set>
#include <string>

#include "plait/models/llama_config.hpp"
#include "support/temp_folder.hpp"
#include "train_llama/machine.hpp"

using plait::llama_config;
using plait::llama_preset_config;
using plait::parameter_count;

TEST_CASE("published shapes have the published numbers of parameters") {
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
}

TEST_CASE("of a mixture's experts a token is multiplied with those it chooses") {
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
  // The square of 64 has 4096 pairs; below its diagonal lie 2048, and 2048 - 48 * 48 / 2 in a band of 16.
  CHECK(causal(16).attention == whole.attention);
  CHECK(causal(16).total() == whole.total());
  CHECK(causal(16).causal() == whole.weights + whole.attention * (2048 - 48 * 48 / 2) / 4096);
}

TEST_CASE("utilisation, by hand") {
  // SmolLM-135M at 2048 tokens: 6 * 134,515,008 + 12 * 30 * 576 * 2048 operations a token.
  const auto flops = plait::flops_per_token(llama_preset_config("smollm-135m"), 2048);
  CHECK(flops.weights == 807'090'048);
  CHECK(flops.attention == 424'673'280);
  CHECK(flops.causal() == 1'019'426'688);
  // 8 GPUs of 312 TFLOP/s, a million tokens a second: 1.231763328e15 of 2.496e15.
  CHECK(plait::model_flops_utilisation(1e6, flops.total(), 312, 8) == doctest::Approx(0.4934949).epsilon(1e-6));
  CHECK(plait::model_flops_utilisation(1e6, flops.total(), 0, 8) == 0);
  // An input embedding of its own is a look-up: Llama 3 8B multiplies with 8,030,261,248 - 128,256 * 4096.
  CHECK(plait::flops_per_token(llama_preset_config("llama-3-8b"), 8192).weights == 6 * 7'504'924'672.0);
}

TEST_CASE("the peaks of GPUs, by the names that CUDA gives them") {
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

TEST_CASE("every preset is valid, named once, and found") {
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

TEST_CASE("values that make no model are refused by key") {
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

TEST_CASE("the extents of tp that suit a model's sizes are said, since a checkpoint's sizes are fixed") {
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
