// Mixtures of experts equal transformers' in logits, loss and every gradient on every mesh, and go back to a directory
// with the same bits.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/models/export_hugging_face.hpp"
#include "plait/models/hugging_face_directory.hpp"
#include "plait/models/mixture_llama.hpp"
#include "plait/parallel/world.hpp"
#include "support/golden_model.hpp"
#include "support/temp_folder.hpp"
#include "support/test_data.hpp"

namespace {

using namespace plait;

std::string folder_of(const std::string& name) { return plait::test::test_data() + "/llama_" + name; }

mesh_shape ranks_of(std::int64_t d, std::int64_t e, std::int64_t c, std::int64_t t) {
  return megatron_experts::mesh{d, e, c, t, 1}.shape();
}

/// The bytes of each tensor of a file, by name and shape.
std::map<std::string, std::vector<std::byte>> tensors_of(const std::string& file) {
  std::map<std::string, std::vector<std::byte>> all;
  for (const weight_tensor& t : weights_of_file(file, "file")) {
    auto& bytes = all[t.name + plait::detail::shape_text(t.shape)];
    bytes.resize(static_cast<std::size_t>(t.size()) * size_of(t.dtype));
    t.read(0, t.size(), bytes.data());
  }
  return all;
}

/// Values for a model's adapters under peft's names, which have each expert's number.
template <class Model>
std::vector<weight_tensor> adapters_of(Model& model) {
  std::vector<weight_tensor> all;
  const auto add = [&](std::string name, std::vector<std::int64_t> shape) {
    const auto read = [seed = std::hash<std::string>()(name) % 101](std::int64_t i, std::int64_t end, std::byte* out) {
      for (; i < end; ++i, out += sizeof(float)) {
        const float value = 0.01f * static_cast<float>((seed + 7 * static_cast<std::size_t>(i)) % 101);
        std::memcpy(out, &value, sizeof value);
      }
    };
    all.push_back({std::move(name), safetensors_dtype::f32, std::move(shape), read});
  };
  model.visit([&](auto& p) {
    if (!is_of_adapter(p.name())) return;
    const std::vector<std::int64_t>& shape = p.info().shape;
    const std::size_t at = p.name().find("experts.") + 8;
    if (shape.size() == 2) return add(p.name(), shape);
    for (std::int64_t e = 0; e < shape[0]; ++e)
      add(cat({p.name().substr(0, at), e, ".", p.name().substr(at)}), {shape[1], shape[2]});
  });
  return all;
}

template <strategy S>
void check_models(const std::vector<mesh_shape>& meshes) {
  for (const char* name : {"mixtral", "qwen2_moe", "qwen3_moe", "dots1", "olmoe"}) {
    const model_directory from = open_model_directory(folder_of(name));
    for (const mesh_shape& mesh : meshes) {
      CAPTURE(name);
      CAPTURE(describe(mesh));
      plait::test::check_golden(
          plait::test::run_golden<mixture_llama<float, S>, S>(folder_of(name), from.config, from.entries, mesh), 20,
          4e-6);  // transformers' own float32 is up to 2e-6 away
    }
  }
}

}  // namespace

TEST_CASE("mixtures equal transformers' with experts over an axis of their own") {
  check_models<megatron_experts>({ranks_of(1, 1, 1, 1), ranks_of(1, 2, 1, 1), ranks_of(2, 1, 1, 2),
                                  ranks_of(1, 2, 2, 1), ranks_of(1, 2, 1, 2), ranks_of(1, 1, 2, 2)});
}

TEST_CASE("and over the tensor-parallel axes") {
  check_models<experts_over_tp<megatron_experts>>({ranks_of(1, 1, 1, 2), ranks_of(1, 2, 1, 2), ranks_of(2, 1, 2, 2)});
}

TEST_CASE("a mixture goes back to a directory with the same bits, from every mesh and in shards") {
  using model_type = mixture_llama<float, megatron_experts>;
  for (const char* name : {"mixtral", "qwen2_moe", "qwen3_moe", "dots1", "olmoe"}) {
    const model_directory from = open_model_directory(folder_of(name));
    const auto published = tensors_of(folder_of(name) + "/model.safetensors");
    const temp_folder out;
    int exports = 0;
    for (const mesh_shape& mesh : {ranks_of(1, 1, 1, 1), ranks_of(1, 2, 1, 2), ranks_of(2, 4, 1, 1)}) {
      const std::string to = out / std::to_string(exports++);
      threads::run(static_cast<int>(mesh.size()), [&](threads::communicator all) {
        world ranks(mesh, all);
        cpu device;
        const context<cpu> ctx{device, ranks, llama_sizes<megatron_experts>(from.config, mesh, 8, 8)};
        model_type model(ctx, from.config);
        load_weights(ctx, model, from.entries, from.source());
        any_communicator whole(all);
        export_hugging_face(ctx, whole, model, from.config, to, {.shard_bytes = exports == 3 ? 20000u : 1000000u});
      });
      std::map<std::string, std::vector<std::byte>> written;
      std::size_t files = 0;
      for (const auto& file : std::filesystem::directory_iterator(to))
        if (file.path().extension() == ".safetensors") ++files, written.merge(tensors_of(file.path().string()));
      CHECK(written == published);
      CHECK((files > 2) == (exports == 3));
      CHECK(open_model_directory(to).config == from.config);
    }
  }
}

TEST_CASE("adapters of experts are merged into what every mesh exports") {
  const model_directory from = open_model_directory(folder_of("dots1"));
  const auto published = tensors_of(folder_of("dots1") + "/model.safetensors");
  const temp_folder out;
  const lora_options adapter{.rank = 2, .scale = 2};
  std::vector<std::map<std::string, std::vector<std::byte>>> exports;
  for (const mesh_shape& mesh : {ranks_of(1, 1, 1, 1), ranks_of(1, 2, 1, 2), ranks_of(2, 4, 1, 1)}) {
    const std::string to = out / std::to_string(exports.size());
    threads::run(static_cast<int>(mesh.size()), [&](threads::communicator all) {
      world ranks(mesh, all);
      cpu device;
      const context<cpu> ctx{device, ranks, llama_sizes<megatron_experts>(from.config, mesh, 8, 8)};
      mixture_llama<float, megatron_experts> model(ctx, from.config, {.mlp = {.gate = adapter, .down = adapter}});
      std::vector<weight_tensor> entries = weights_of_experts(adapters_of(model), from.config, "adapters");
      entries.insert(entries.end(), from.entries.begin(), from.entries.end());
      load_weights(ctx, model, std::span<const weight_tensor>(entries), from.source());
      any_communicator whole(all);
      export_hugging_face(ctx, whole, model, from.config, to);
    });
    exports.push_back(tensors_of(to + "/model.safetensors"));
  }
  CHECK(exports[1] == exports[0]);
  CHECK(exports[2] == exports[0]);
  CHECK(exports[0].size() == published.size());
  for (const auto& [name, bytes] : exports[0]) {
    CAPTURE(name);
    const bool adapted = name.find("gate_proj") != name.npos || name.find("down_proj") != name.npos;
    CHECK((bytes != published.at(name)) == (adapted && name.find("shared_experts") == name.npos));
  }
}

TEST_CASE("transformers' stacks of experts are the same model") {
  const temp_folder dir;
  std::filesystem::copy(folder_of("qwen3_moe") + "/config.json", dir / "config.json");
  std::filesystem::copy(folder_of("qwen3_moe") + "/stacked.safetensors", dir / "model.safetensors");
  const model_directory one = open_model_directory(folder_of("qwen3_moe")), other = open_model_directory(dir / "");
  CHECK(one.entries.size() == other.entries.size());
  for (const weight_tensor& e : one.entries) {
    CAPTURE(e.name);
    CHECK(plait::test::values_of(other.entries, e.name) == plait::test::values_of(one.entries, e.name));
  }
}

TEST_CASE("a model without experts, and one with them, are different types") {
  const model_directory from = open_model_directory(folder_of("mixtral"));
  threads::run(1, [&](threads::communicator all) {
    world ranks(ranks_of(1, 1, 1, 1), all);
    cpu device;
    const context<cpu> ctx{device, ranks, llama_sizes<megatron_experts>(from.config, ranks.shape(), 2, 8)};
    CHECK_ERROR((llama<float, megatron_experts>(ctx, from.config)),
                "llama: num_experts is 4; legal is 0, and mixture_llama has experts");
    llama_config dense = from.config;
    dense.mixture = {};
    CHECK_ERROR((mixture_llama<float, megatron_experts>(ctx, dense)),
                "mixture_llama: num_experts is 0; legal is at least 1, and llama has none");
    CHECK_ERROR((llama<float, megatron_experts>(ctx, dense, {.mixture_losses = {.z_loss = 1}})),
                "llama: llama_options::mixture_losses, and model.layers.0.mlp is no mixture; legal is none of them");
    CHECK_ERROR((mixture_llama<float, megatron_experts>(ctx, from.config, {.expert_bias_rate = 0.1})),
                "mixture_llama: llama_options::expert_bias_rate is 0.1, and the configuration has no correction bias; "
                "legal is 0");
    CHECK_ERROR((mixture_llama<float, megatron_experts>(ctx, from.config, {.mixture_losses = {.z_loss = -1}})),
                "model.layers.0.mlp: z_loss = -1; legal is 0 (none) or more");
  });
}

TEST_CASE("directories whose experts do not fit the configuration are refused") {
  const model_directory from = open_model_directory(folder_of("mixtral"));
  const std::vector<weight_tensor> whole = weights_of_file(folder_of("mixtral") + "/model.safetensors", "path");
  const auto refused = [&](const llama_config& config, std::vector<weight_tensor> entries) {
    return error_of([&] { weights_of_experts(entries, config, "dir"); });
  };
  CHECK_NOTHROW(weights_of_experts(whole, from.config, "dir"));
  llama_config other = from.config;
  other.mixture.experts = 5;
  CHECK(refused(other, whole) ==
        "dir: expert 4 of 'model.layers.0.mlp.experts.down_proj.weight' is missing; the model has 5 experts");
  other.mixture.experts = 3;
  CHECK(refused(other, whole) ==
        "dir: 'model.layers.0.mlp.experts.down_proj.weight' has expert 3, and the model has 3 experts");
  auto entries = whole;
  for (weight_tensor& e : entries)
    if (e.name == "model.layers.0.block_sparse_moe.experts.2.w1.weight") e.shape = {24, 16};
  CHECK(refused(from.config, entries) ==
        "dir: tensor 'model.layers.0.block_sparse_moe.experts.2.w1.weight' has the shape [24, 16] in F32, and "
        "'model.layers.0.block_sparse_moe.experts.0.w1.weight' [16, 24] in F32; legal are equal ones");
  for (weight_tensor& e : entries)
    if (e.name == "model.layers.0.block_sparse_moe.experts.2.w1.weight")
      e.name = "model.layers.0.block_sparse_moe.experts.2.w4.weight";
  CHECK(refused(from.config, entries) ==
        "dir: tensor 'model.layers.0.block_sparse_moe.experts.2.w4.weight' is none that Mixtral has for a Llama");
  const auto renamed = [&](const std::string& name) {
    auto all = whole;
    for (weight_tensor& e : all)
      if (e.name == "model.layers.0.block_sparse_moe.experts.2.w1.weight") e.name = name;
    return refused(from.config, all);
  };
  for (const char* number : {"02", "99999999999999999999"}) {
    const std::string name = cat({"model.layers.0.block_sparse_moe.experts.", number, ".w1.weight"});
    CHECK(renamed(name) == "dir: tensor '" + name + "' is none that Hugging Face has for a Llama");
  }
  CHECK(renamed("model.layers.0.mlp.experts.1.gate_proj.weight").starts_with("dir: tensor 'model.layers.0."));
  CHECK(renamed("model.layers.0.mlp.experts.1.gate_proj.weight")
            .ends_with("' is one of two for expert 1 of 'model.layers.0.mlp.experts.gate_proj.weight'"));
  const std::vector<weight_tensor> stacked{
      {"model.layers.0.mlp.experts.gate_up_proj", safetensors_dtype::f32, {4, 8, 24}, {}}};
  CHECK(refused(from.config, stacked) ==
        "dir: tensor 'model.layers.0.mlp.experts.gate_up_proj' has the shape [4, 8, 24], and the model needs [4, 32, "
        "24]");
  CHECK_ERROR(place_in_order("model.layers.0.mlp.experts.up_proj.weight", weights_order::megatron, from.config, "dir"),
              "dir: the order megatron has no tensor for 'model.layers.0.mlp.experts.up_proj.weight'");
  CHECK_ERROR(require_order(weights_order::megatron, from.config, "dir"),
              "dir: the order megatron has no tensors for experts, which this model has; legal is hugging-face");
}
