// program: files
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "plait/checkpoint/safetensors.hpp"
#include "plait/models/llama_config_json.hpp"
#include "plait/models/weights_order.hpp"
#include "support/temp_folder.hpp"
#include "support/test_data.hpp"

namespace {

using plait::safetensors_reader;
using plait::weight_tensor;

const std::string conversions = plait::test::test_data() + "/llama_conversions/";

std::vector<weight_tensor> tensors_of(const std::string& name) {
  return plait::weights_of_file(conversions + name + ".safetensors", "file");
}
bool equal(const std::vector<weight_tensor>& got, const safetensors_reader& expected) {
  return got.size() == expected.entries().size() && std::all_of(got.begin(), got.end(), [&](const auto& e) {
           const auto* const same = expected.find(e.name);
           if (!same || !same_elements(e, weight_in_memory(*same))) return false;
           // Reads rows in parts, each from the middle of one row to the middle of another.
           std::vector<std::byte> parts(same->bytes.size());
           const auto width = static_cast<std::int64_t>(size_of(e.dtype));
           for (std::int64_t begin = 0; begin < e.size(); begin += 7)
             e.read(begin, std::min(begin + 7, e.size()), parts.data() + begin * width);
           return std::equal(parts.begin(), parts.end(), same->bytes.begin());
         });
}

}  // namespace

TEST_CASE("weights of Megatron and of Meta equal Hugging Face's bit for bit") {
  const plait::llama_config config = plait::read_llama_config(conversions + "config.json");
  const safetensors_reader expected(conversions + "hugging_face.safetensors");
  REQUIRE(expected.entries().size() == 21);
  CHECK(equal(plait::weights_from_megatron(tensors_of("megatron"), config, "file"), expected));
  CHECK(equal(plait::weights_from_meta(tensors_of("meta"), config, "file"), expected));
}

TEST_CASE("the order is given by name, and an order that does not fit the tensors is refused") {
  using plait::weights_order;
  const plait::llama_config config = plait::read_llama_config(conversions + "config.json");
  const safetensors_reader expected(conversions + "hugging_face.safetensors");
  for (const char* file : {"hugging_face", "megatron", "meta"})
    for (const char* name : {"hugging-face", "megatron", "meta"}) {
      CAPTURE(file);
      CAPTURE(name);
      const weights_order order = plait::weights_order_from(name);
      CHECK(name_of(order) == name);
      const weights_order there = order_of_names(tensors_of(file));
      if (order == there)
        CHECK(equal(weights_in_order(tensors_of(file), order, config, "dir"), expected));
      else
        CHECK_ERROR(weights_in_order(tensors_of(file), order, config, "dir"), "dir: its tensors, such as '",
                    "have the names of " + std::string(name_of(there)) + ", and order is " + name,
                    "legal is order " + std::string(name_of(there)));
    }
  CHECK_ERROR(plait::weights_order_from("nemo"), "order 'nemo' is unknown; legal are hugging-face, megatron, meta");
  CHECK(weights_in_order({}, weights_order::hugging_face, config, "dir").empty());
  for (const weights_order order : {weights_order::megatron, weights_order::meta})
    CHECK_ERROR(weights_in_order({}, order, config, "dir"), "dir: it has no tensors");
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
  const auto got = plait::weights_from_megatron(plait::weights_in_memory(entries), c, "file");
  const auto values = [&](const std::string& name) {
    for (const auto& e : got) {
      std::vector<float> all(static_cast<std::size_t>(e.size()));
      e.read(0, e.size(), reinterpret_cast<std::byte*>(all.data()));
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

TEST_CASE("an unknown tensor, or one of another size, is refused") {
  const plait::llama_config config = plait::read_llama_config(conversions + "config.json");
  const std::vector<weight_tensor> megatron = tensors_of("megatron"), meta = tensors_of("meta");
  CHECK_ERROR(plait::weights_from_megatron(meta, config, "file"), "file: tensor '", "not one that Megatron has");
  CHECK_ERROR(plait::weights_from_meta(megatron, config, "file"), "file: tensor '", "not one that Meta has");
  plait::llama_config wider = config;
  wider.kv_heads = 3;
  CHECK_ERROR(plait::weights_from_meta(meta, wider, "file"), "attention.wk.weight' has 8 rows", "the model needs 12");
  CHECK_ERROR(plait::weights_from_megatron(megatron, wider, "file"), "linear_qkv.weight' has 40 rows",
              "the model needs 48");
  plait::llama_config unpadded = config;
  unpadded.vocab = 3;
  CHECK_ERROR(plait::weights_from_megatron(megatron, unpadded, "file"), "has 5 rows, and config.json a vocab_size of 3",
              "Megatron pads the vocabulary, and with the vocab_size 5 its last tokens never occur");
  std::vector<weight_tensor> odd = meta;
  odd[0].name = "layers.x.attention.wq.weight";
  CHECK_ERROR(plait::weights_from_meta(odd, config, "file"), "'layers.x.attention.wq.weight'");
}

TEST_CASE("a tensor or a model that an order does not support is refused") {
  using plait::weights_order;
  plait::llama_config c;
  const auto place = [&](const char* name, weights_order order) {
    return place_in_order(name, order, c, "out").tensor;
  };
  CHECK(place("lm_head.weight", weights_order::hugging_face) == "lm_head.weight");
  CHECK(place("lm_head.weight", weights_order::megatron) == "output_layer.weight");
  CHECK(place("model.layers.12.input_layernorm.weight", weights_order::megatron) ==
        "decoder.layers.12.self_attention.linear_qkv.layer_norm_weight");
  CHECK(place("model.layers.12.mlp.up_proj.bias", weights_order::megatron) == "decoder.layers.12.mlp.linear_fc1.bias");
  CHECK(place("model.layers.3.mlp.up_proj.weight", weights_order::meta) == "layers.3.feed_forward.w3.weight");
  CHECK_ERROR(place("model.layers.0.self_attn.k_norm.weight", weights_order::meta),
              "out: the order meta has no tensor for 'model.layers.0.self_attn.k_norm.weight'");
  CHECK_ERROR(place("extra", weights_order::megatron), "out: the order megatron has no tensor for 'extra'");
  for (const weights_order order : {weights_order::hugging_face, weights_order::megatron, weights_order::meta})
    require_order(order, c, "out");
  c.qk_norm = true;
  require_order(weights_order::megatron, c, "out");
  CHECK_ERROR(require_order(weights_order::meta, c, "out"), "out: the order meta has no tensors for norms of q and k");
  c.mlp_bias = true;
  CHECK_ERROR(require_order(weights_order::meta, c, "out"), "out: the order meta has no tensors for biases");
}
