// program: files
#include "plait/models/llama_conversions.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "plait/checkpoint/safetensors_reader.hpp"
#include "plait/models/llama_config_json.hpp"
#include "support/temp_folder.hpp"

namespace {

using plait::converted_weights;
using plait::safetensors_reader;

const std::string conversions = std::string(PLAIT_TEST_DATA) + "/llama_conversions/";

bool equal(const converted_weights& got, const safetensors_reader& expected) {
  return got.entries.size() == expected.entries().size() &&
         std::all_of(got.entries.begin(), got.entries.end(), [&](const auto& e) {
           const auto* const same = expected.find(e.name);
           return same && same->dtype == e.dtype && same->shape == e.shape &&
                  std::equal(e.bytes.begin(), e.bytes.end(), same->bytes.begin(), same->bytes.end());
         });
}

}  // namespace

TEST_CASE("weights of Megatron and of Meta are Hugging Face's, bit for bit") {
  const plait::llama_config config = plait::read_llama_config(conversions + "config.json");
  const safetensors_reader expected(conversions + "hugging_face.safetensors"),
      megatron(conversions + "megatron.safetensors"), meta(conversions + "meta.safetensors");
  REQUIRE(expected.entries().size() == 21);
  const converted_weights from_megatron = plait::weights_from_megatron(megatron.entries(), config, "file");
  CHECK(equal(from_megatron, expected));
  CHECK(from_megatron.memory.size() == 2 * 5);  // what is not fused is not copied
  const converted_weights from_meta = plait::weights_from_meta(meta.entries(), config, "file");
  CHECK(equal(from_meta, expected));
  CHECK(from_meta.memory.size() == 2 * 2);
}

TEST_CASE("the biases of fused projections are split alike") {
  plait::llama_config c{.hidden = 4, .layers = 1, .heads = 4, .kv_heads = 2, .head_dim = 2, .ffn = 3};
  std::vector<float> qkv(16), fc1(6);
  for (std::size_t i = 0; i < qkv.size(); ++i) qkv[i] = static_cast<float>(i);
  for (std::size_t i = 0; i < fc1.size(); ++i) fc1[i] = static_cast<float>(i);
  const std::vector<plait::safetensors_entry> entries = {
      {"decoder.layers.11.self_attention.linear_qkv.bias",
       plait::safetensors_dtype::f32,
       {16},
       std::as_bytes(std::span(qkv))},
      {"decoder.layers.11.mlp.linear_fc1.bias", plait::safetensors_dtype::f32, {6}, std::as_bytes(std::span(fc1))}};
  const converted_weights got = plait::weights_from_megatron(entries, c, "file");
  const auto values = [&](const std::string& name) {
    for (const auto& e : got.entries) {
      std::vector<float> all(static_cast<std::size_t>(e.size()));
      copy_elements(e, all.data());
      if (e.name == name) return all;
    }
    return std::vector<float>();
  };
  CHECK(values("model.layers.11.self_attn.q_proj.bias") == std::vector<float>{0, 1, 2, 3, 8, 9, 10, 11});
  CHECK(values("model.layers.11.self_attn.k_proj.bias") == std::vector<float>{4, 5, 12, 13});
  CHECK(values("model.layers.11.self_attn.v_proj.bias") == std::vector<float>{6, 7, 14, 15});
  CHECK(values("model.layers.11.mlp.gate_proj.bias") == std::vector<float>{0, 1, 2});
  CHECK(values("model.layers.11.mlp.up_proj.bias") == std::vector<float>{3, 4, 5});
}

TEST_CASE("a tensor that is unknown or has another size is refused") {
  const plait::llama_config config = plait::read_llama_config(conversions + "config.json");
  const safetensors_reader megatron(conversions + "megatron.safetensors"), meta(conversions + "meta.safetensors");
  CHECK_ERROR(plait::weights_from_megatron(meta.entries(), config, "file"), "file: tensor '", "none that Megatron has");
  CHECK_ERROR(plait::weights_from_meta(megatron.entries(), config, "file"), "file: tensor '", "none that Meta has");
  plait::llama_config wider = config;
  wider.kv_heads = 3;
  CHECK_ERROR(plait::weights_from_meta(meta.entries(), wider, "file"), "attention.wk.weight' has 8 rows",
              "the model needs 12");
  CHECK_ERROR(plait::weights_from_megatron(megatron.entries(), wider, "file"), "linear_qkv.weight' has 40 rows",
              "the model needs 48");
  std::vector<plait::safetensors_entry> odd = meta.entries();
  odd[0].name = "layers.x.attention.wq.weight";
  CHECK_ERROR(plait::weights_from_meta(odd, config, "file"), "'layers.x.attention.wq.weight'");
}
