// program: golden
#include <doctest/doctest.h>

#include <cmath>
#include <deque>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/checkpoint/model_weights.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/comm/threads.hpp"
#include "plait/models/llama.hpp"
#include "plait/models/llama_config_json.hpp"
#include "plait/nn/linear/lora.hpp"
#include "plait/nn/strategy.hpp"
#include "support/golden_model.hpp"
#include "support/temp_folder.hpp"
#include "support/test_data.hpp"
#include "support/texts.hpp"
#include "support/whole_tensor.hpp"

namespace {

using namespace plait;
using plait::test::gathered;
using strategy_here = megatron_sp;

template <class T>
plait::test::golden_findings run_golden(const std::string& name, std::int64_t dp_ranks, std::int64_t tp_ranks) {
  const std::string folder = plait::test::test_data() + "/llama_" + name;
  const llama_config config = read_llama_config(folder + "/config.json");
  const tensor_extents tensor_ranks = split_tensor_ranks(tp_ranks, config.kv_heads);
  const auto weights = weights_of_file(folder + "/model.safetensors", "path");
  return plait::test::run_golden<llama<T, strategy_here>, strategy_here>(
      folder, config, weights, strategy_here::mesh{dp_ranks, 1, tensor_ranks.tp, tensor_ranks.tp_rep}.shape());
}

template <class T>
void check_golden(const std::string& name, std::int64_t dp_ranks, std::int64_t tp_ranks) {
  CAPTURE(name);
  CAPTURE(dp_ranks);
  CAPTURE(tp_ranks);
  plait::test::check_golden(run_golden<T>(name, dp_ranks, tp_ranks), 20, 1e-5, 1e-5);
}

}  // namespace

TEST_CASE("Llama and its variants equal Hugging Face's in logits, loss and gradients") {
  for (const char* name : {"mha", "gqa_tied", "rope_scaling", "smollm", "padding", "qwen2", "qwen3", "mistral"}) {
    check_golden<float>(name, 1, 1);
    check_golden<float>(name, 2, 1);
  }
}

TEST_CASE("Llama equals Hugging Face's on tensor-parallel meshes, with few kv heads and a padded vocabulary") {
  for (const char* name : {"mha", "gqa_tied", "rope_scaling", "padding", "qwen2", "qwen3", "mistral"}) {
    check_golden<float>(name, 1, 2);
    check_golden<float>(name, 2, 4);
  }
}

TEST_CASE("Llama equals Hugging Face's where ranks divide neither heads nor widths nor the batch") {
  for (const std::int64_t tp_ranks : {6, 8, 14}) check_golden<float>("qwen2", 1, tp_ranks);  // 14 heads in two groups
  check_golden<float>("smollm", 2, 3);
  check_golden<float>("mha", 1, 3);
}

namespace {

/// peft's logits, loss, and the gradients of A and B; there are no others.
template <class S>
void check_adapted(std::int64_t dp_ranks, std::int64_t tp_ranks) {
  CAPTURE(dp_ranks);
  CAPTURE(tp_ranks);
  const std::string folder = plait::test::test_data() + "/llama_lora";
  const llama_config config = read_llama_config(folder + "/config.json");
  std::vector<weight_tensor> weights = weights_of_file(folder + "/model.safetensors", "path");
  for (weight_tensor& t : weights_of_file(folder + "/adapter_model.safetensors", "path"))
    weights.push_back(std::move(t)), weights.back().name.erase(0, plait::test::peft_prefix.size());
  const lora_options adapter{.rank = 3, .scale = 2.0};
  const tensor_extents split = split_tensor_ranks(tp_ranks, config.kv_heads);
  const auto found = plait::test::run_golden<llama<double, S>, S>(
      folder, config, weights, typename S::mesh{dp_ranks, 1, split.tp, split.tp_rep}.shape(), true,
      {.attention = {.lora = {.q = adapter, .v = adapter}}, .mlp = {.down = adapter}});
  CHECK(found.gradients.size() == 12);
  plait::test::check_golden(found, 12, 1e-6, 1e-6);
}

}  // namespace

TEST_CASE("a Llama with adapters on q, v and down equals Hugging Face's peft") {
  check_adapted<megatron_sp>(1, 1);
  check_adapted<megatron_sp>(2, 1);
  check_adapted<megatron_sp>(1, 2);
  check_adapted<megatron_sp>(2, 4);
  check_adapted<megatron_tp>(2, 2);
}

TEST_CASE("more ranks than heads are refused, naming both") {
  CHECK_ERROR(run_golden<float>("smollm", 2, 4), "llama: tp=4 is more than the model's num_attention_heads",
              "which is 3; ", "the extents of tp up to 64 that suit all of them are 1, 2, 3");
}

namespace {

template <class F>
void on_tiny_llama(bool tied, F&& body) {
  threads::run(2, [&](threads::communicator comm) {
    llama_config config;
    config.vocab = 7, config.hidden = 8, config.layers = 1, config.heads = config.kv_heads = 2, config.head_dim = 4,
    config.ffn = 8;
    config.tie_embeddings = tied;
    world ranks(megatron_sp::mesh{1, 1, 2, 1}.shape(), comm);
    cpu device;
    context<cpu> ctx{device, ranks, llama_sizes<megatron_sp>(config, ranks.shape(), 2, 4), 3};
    llama<float, megatron_sp> model(ctx, config);
    std::deque<std::vector<float>> memory;
    std::vector<safetensors_entry> entries;
    model.visit([&](auto& p) {
      std::int64_t n = 1;
      for (std::int64_t extent : p.info().shape) n *= extent;
      auto& values = memory.emplace_back(static_cast<std::size_t>(n));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i + 1);
      entries.push_back({p.name(), safetensors_dtype::f32, p.info().shape, std::as_bytes(std::span(values))});
      std::fill(p.value(), p.value() + p.size(), -1.0f);
    });
    body(ctx, model, entries);
  });
}

}  // namespace

TEST_CASE("each rank loads its part, and padding is zero") {
  on_tiny_llama(false, [](auto& ctx, auto& model, auto& entries) {
    load_weights(ctx, model, entries, "file");
    model.visit([&](auto& p) {
      const auto full = gathered(ctx, p.stored(), p.value());
      std::int64_t logical = 1;
      for (std::int64_t extent : p.info().shape) logical *= extent;
      bool right = true;
      for (std::size_t i = 0; i < full.size(); ++i)
        right = right && full[i] == (static_cast<std::int64_t>(i) < logical ? static_cast<float>(i + 1) : 0.0f);
      if (!right) fail("wrong values in " + p.name());
    });
  });
}

TEST_CASE("a checkpoint that does not fit is refused, naming the tensor, and changes nothing") {
  const auto refused = [](bool tied, auto&& spoil) {
    std::string text;
    on_tiny_llama(tied, [&](auto& ctx, auto& model, auto& entries) {
      spoil(entries);
      std::string what = plait::test::text_thrown_by(
          [&] { load_weights(ctx, model, entries, "file", plait::test::tied_names(model.config())); });
      bool same = true;
      model.visit([&](auto& p) { same = same && p.value()[0] == -1.0f; });
      if (!what.empty() && !same) what += " BUT CHANGED";
      if (ctx.ranks.rank() == 0) text = what;
    });
    return text;
  };
  const auto lacks = [](std::string text, std::string part) {
    return text.find(part) == text.npos || text.find("BUT CHANGED") != text.npos ? "'" + text + "' lacks '" + part + "'"
                                                                                 : "";
  };
  CHECK(lacks(refused(false, [](auto& e) { e.erase(e.begin() + 3); }),
              "file: the model needs tensors that are missing: 'model.layers.0.self_attn.k_proj.weight'") == "");
  CHECK(lacks(refused(false, [](auto& e) { e.push_back(e[0]), e.back().name = "extra"; }),
              "file: tensors that belong to no parameter of the model: 'extra'") == "");
  CHECK(lacks(refused(false,
                      [](auto& e) {
                        e[0].shape = {8, 7};
                      }),
              "file: tensor 'model.embed_tokens.weight' has the shape [8, 7], and the model needs [7, 8]") == "");
  CHECK(lacks(refused(false, [](auto& e) { e[1].dtype = safetensors_dtype::i32; }),
              "file: tensor 'model.layers.0.input_layernorm.weight' holds I32 elements; weights are F64, F32, F16 or "
              "BF16") == "");
  std::vector<std::byte> others;
  CHECK(lacks(refused(true,
                      [&](auto& e) {
                        others.assign(e[0].bytes.begin(), e[0].bytes.end());
                        others.back() ^= std::byte{1};
                        e.push_back(e[0]), e.back().name = "lm_head.weight", e.back().bytes = others;
                      }),
              "file: tensor 'lm_head.weight' differs from 'model.embed_tokens.weight'") == "");
  CHECK(lacks(refused(true, [](auto& e) { e[0].bytes = e[0].bytes.first(8); }),
              "tensor 'model.embed_tokens.weight' has 8 bytes, which are not those of its shape [7, 8] in F32") == "");
  CHECK(refused(true, [](auto& e) { e.push_back(e[0]), e.back().name = "lm_head.weight"; }) == "");
  CHECK(refused(true, [](auto&) {}) == "");
}
