#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/model_weights.hpp"
#include "plait/comm/threads.hpp"
#include "plait/models/export_hugging_face.hpp"
#include "plait/models/hugging_face_directory.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/linear/lora.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/generators.hpp"
#include "support/temp_folder.hpp"
#include "support/test_data.hpp"
#include "support/texts.hpp"
#include "support/whole_tensor.hpp"

namespace {

using namespace plait;
using strategy_here = megatron_sp;
using stage_type = llama<float, strategy_here>;
using model_type = pipeline<stage_type>;

/// The layout of a model on ranks.
struct ranks_of_model {
  std::int64_t dp = 1, pp = 1, tp = 1;
  zero_level level = zero_level::replicated;
  bool interleaved = false;
};

constexpr std::int64_t batch_size = 2;

/// Calls body(context, world, model) on each rank.
template <class Body>
void on_ranks(const llama_config& config, const ranks_of_model& m, Body&& body, std::int64_t length = 24,
              const llama_options& options = {}) {
  const tensor_extents split = split_tensor_ranks(m.tp, config.kv_heads);
  mesh_shape shape;
  shape.add(axis_of<dp>, m.dp);
  shape.add(axis_of<pp>, m.pp);
  shape.add(axis_of<cp>, 1);
  shape.add(axis_of<tp>, split.tp);
  shape.add(axis_of<tp_rep>, split.tp_rep);
  threads::run(static_cast<int>(shape.size()), [&](threads::communicator comm) {
    pipeline_world ranks(shape, any_communicator(comm));
    cpu device;
    const context<cpu> ctx{device, ranks.stage(),
                           llama_sizes<strategy_here>(config, ranks.stage().shape(), batch_size, length), 7};
    const auto pp_ranks = static_cast<int>(m.pp);
    const schedule plan = m.interleaved ? make_schedule<interleaved<2>>(pp_ranks, pp_ranks)
                                        : make_schedule<one_f_one_b>(pp_ranks, pp_ranks);
    const stage_costs costs{std::vector<double>(static_cast<std::size_t>(config.layers), 1.0)};
    model_type model(ctx, ranks.along(), plan, split_layers(costs, plan.shape.stages()),
                     [&](stage_layers part, stage_type* first) {
                       return std::make_unique<stage_type>(ctx, config, options, part, first);
                     },
                     {.parallel = {.level = m.level}});
    body(ctx, ranks, model);
  });
}

/// The largest distance of a rank's logits from the golden ones; 0 on ranks without the last stage.
double distance_of_logits(const context<cpu>& ctx, model_type& model, const safetensors_reader& golden) {
  using tokens = typename model_type::tokens;
  tokens ids(ctx);
  const auto all = golden.read<std::int64_t>("input_ids");
  const box& b = ids.part();
  const std::int64_t length = golden.at("input_ids").shape[1];
  for (std::int64_t i = 0; i < b.local[0]; ++i)
    for (std::int64_t j = 0; j < b.local[1]; ++j)
      ids.data()[i * b.local[1] + j] = all[static_cast<std::size_t>((b.offset[0] + i) * length + b.offset[1] + j)];
  const auto scores = model.score(ctx, ids);
  if (!model.has_last_stage()) return 0;
  const auto padded = test::gathered(ctx, layout_v<typename model_type::logits::spec>, scores.data());
  const std::int64_t vocab = golden.at("logits").shape[2], columns = ctx.sizes.of(dim_of<plait::vocab>);
  std::vector<float> logits;
  for (std::int64_t row = 0; row < batch_size * length; ++row)
    for (std::int64_t v = 0; v < vocab; ++v) logits.push_back(padded[static_cast<std::size_t>(row * columns + v)]);
  return test::distance(logits, golden.read<double>("logits"));
}

/// The tensors of a directory as bytes, by name.
std::map<std::string, std::string> tensors_of(const std::string& folder) {
  std::map<std::string, std::string> all;
  const safetensors_directory files(folder);
  for (const weight_tensor& e : files.entries()) {
    const std::vector<std::byte> bytes = bytes_of(e);
    all[e.name] = cat({name_of(e.dtype), detail::shape_text(e.shape),
                       std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size())});
  }
  return all;
}

std::string data_folder(const std::string& name) { return plait::test::test_data() + "/llama_" + name; }

/// Four layers with initial values that depend on the seed only.
llama_config four_layers(bool tied) {
  llama_config c;
  c.vocab = 29, c.hidden = 16, c.layers = 4, c.heads = 4, c.kv_heads = 2, c.head_dim = 4, c.ffn = 24;
  c.tie_embeddings = tied;
  c.attention_bias = true;
  return c;
}

const std::vector<ranks_of_model> layouts = {{1, 1, 1},
                                             {2, 2, 2},
                                             {1, 2, 4},
                                             {2, 2, 1, zero_level::parameters},
                                             {2, 1, 2, zero_level::parameters},
                                             {2, 2, 1, zero_level::optimizer},
                                             {2, 2, 2, zero_level::replicated, true},
                                             {2, 2, 1, zero_level::parameters, true}};

}  // namespace

TEST_CASE("a directory of transformers on dp, pp and tp has its logits, and is exported with the same bits") {
  const temp_folder out;
  const auto check = [&](const std::string& name, const ranks_of_model& m) {
    CAPTURE(name);
    CAPTURE(m.pp);
    const model_directory from = open_model_directory(data_folder(name));
    const safetensors_reader golden(data_folder(name) + "/golden.safetensors");
    std::vector<double> distances(static_cast<std::size_t>(m.dp * m.pp * m.tp));
    const std::string to = out / cat({name, m.dp, m.pp, m.tp});
    const auto body = [&](const context<cpu>& ctx, pipeline_world& ranks, model_type& model) {
      load_weights(ctx, model, from.entries, from.source());
      distances[static_cast<std::size_t>(ranks.root().rank())] = distance_of_logits(ctx, model, golden);
      const std::string like = data_folder(name) + (m.dp == 1 ? "/config.json" : "");
      export_hugging_face(ctx, ranks.root(), model, from.config, to, {.like = like});
    };
    on_ranks(from.config, m, body, golden.at("input_ids").shape[1]);
    CHECK(*std::max_element(distances.begin(), distances.end()) > 0);
    for (const double d : distances) CHECK(d < 1e-5);
    CHECK(tensors_of(to) == tensors_of(data_folder(name)));
    const model_directory again = open_model_directory(to);
    CHECK(again.config == from.config);
    CHECK(contains(read_file(to + "/config.json", ""), "\"eos_token_id\": 2") ==
          contains(read_file(data_folder(name) + "/config.json", ""), "\"eos_token_id\": 2"));
  };
  for (const char* name : {"mha", "gqa_tied", "rope_scaling", "padding", "qwen2", "qwen3", "mistral"})
    check(name, {2, 2, 2});
  check("gqa_tied", {1, 2, 4});
  check("mha", {2, 1, 2, zero_level::parameters});
  check("qwen2", {2, 2, 1, zero_level::parameters});
}

TEST_CASE("every layout exports the same files, and loads them") {
  for (const bool tied : {false, true}) {
    const temp_folder out;
    const llama_config config = four_layers(tied);
    std::set<std::string> files;
    std::vector<std::uint64_t> hashes;
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      const std::string to = out / std::to_string(i);
      on_ranks(config, layouts[i], [&](const context<cpu>& ctx, pipeline_world& ranks, model_type& model) {
        model.visit([&](auto& p) { p.initialize(ctx); });
        export_hugging_face(ctx, ranks.root(), model, config, to);
        const std::uint64_t hash = weights_hash(ctx, model);
        if (ranks.root().rank() == 0) hashes.push_back(hash);
      });
      files.insert(read_file(to + "/model.safetensors", ""));
    }
    CHECK(files.size() == 1);
    CHECK(out.entries() == layouts.size());  // no further entry
    const model_directory from = open_model_directory(out / "0");
    CHECK(from.entries.size() == (tied ? 1u : 2u) + 1 + 4 * 13);
    for (const ranks_of_model& m : layouts)
      on_ranks(config, m, [&](const context<cpu>& ctx, pipeline_world& ranks, model_type& model) {
        model.visit([&](auto& p) { p.fill_values(ctx, [&](float* v) { std::fill(v, v + p.size(), -1.0f); }); });
        load_weights(ctx, model, from.entries, from.source());
        const std::uint64_t hash = weights_hash(ctx, model);
        if (ranks.root().rank() == 0) hashes.push_back(hash);
      });
    CHECK(std::set(hashes.begin(), hashes.end()).size() == 1);
  }
}

TEST_CASE("every layout exports weights with adapters merged into them, whose logits are peft's") {
  const temp_folder out;
  const std::string data = data_folder("lora"), prefix = "base_model.model.";  // peft's, for every adapter
  const model_directory from = open_model_directory(data);
  const safetensors_reader adapters(data + "/adapter_model.safetensors"), golden(data + "/golden.safetensors");
  std::vector<weight_tensor> entries = from.entries;
  for (weight_tensor& t : weights_in_memory(adapters.entries())) {
    t.name = t.name.substr(prefix.size());
    entries.push_back(t);
  }
  const lora_options adapter{.rank = 3, .scale = 2.0};
  const llama_options options{.attention = {.lora = {.q = adapter, .v = adapter}}, .mlp = {.down = adapter}};
  const std::int64_t length = golden.at("input_ids").shape[1];
  const auto distance = [&](const ranks_of_model& m, const std::vector<weight_tensor>& weights, const std::string& to,
                            const llama_options& how) {
    std::vector<double> distances(static_cast<std::size_t>(m.dp * m.pp * m.tp));
    const auto body = [&](const context<cpu>& ctx, pipeline_world& ranks, model_type& model) {
      load_weights(ctx, model, std::span<const weight_tensor>(weights), "weights");
      if (weights.size() > from.entries.size())  // the base weights again; the adapters stay as they are
        load_weights(ctx, model, from.entries, "weights", {}, is_of_adapter);
      if (!to.empty()) export_hugging_face(ctx, ranks.root(), model, from.config, to);
      distances[static_cast<std::size_t>(ranks.root().rank())] = distance_of_logits(ctx, model, golden);
    };
    on_ranks(from.config, m, body, length, how);
    return *std::max_element(distances.begin(), distances.end());
  };
  CHECK(distance({}, from.entries, "", {}) > 0.01);  // adapters have an effect
  std::set<std::string> files;
  for (const ranks_of_model& m :
       {ranks_of_model{1, 1, 1}, {1, 2, 4}, {2, 1, 2, zero_level::parameters}, {2, 2, 1, zero_level::optimizer}}) {
    const std::string to = out / cat({m.dp, m.pp, m.tp});
    CHECK(distance(m, entries, to, options) < 1e-5);
    files.insert(read_file(to + "/model.safetensors", ""));
  }
  CHECK(files.size() == 1);
  const model_directory merged = open_model_directory(out / "111");
  CHECK(merged.entries.size() == from.entries.size());
  CHECK(distance({}, merged.entries, "", {}) < 1e-5);
}

TEST_CASE("in bf16 the product of an adapter is rounded before it is added") {
  const auto in_bf16 = [](std::initializer_list<float> values) {
    std::vector<bf16> all;
    for (const float v : values) all.push_back(to_bf16(v));
    return all;
  };
  const plait::detail::whole_adapter<bf16> adapter{in_bf16({1, 1.0078125f, 0, 1}), in_bf16({1, 1, 0, 2}), 2, 0.5};
  std::vector<bf16> weights = in_bf16({-1, 1, 1});  // the last of row 0, and row 1
  adapter.add_to(1, weights.data(), 3);
  CHECK(to_float(weights[0]) == 0.0f);  // 0.5 * (1.0078125 + 1) = 1.00390625 is 1 in bf16
  CHECK(to_float(weights[1]) == 1.0f);
  CHECK(to_float(weights[2]) == 2.0f);
}

TEST_CASE("in bf16, in shards, and back with the same bits") {
  const temp_folder out;
  const llama_config config = four_layers(true);
  const export_options how{.shard_bytes = 3000, .dtype = safetensors_dtype::bf16};
  for (const auto& [from, to] : {std::pair{"", "first"}, {"first", "second"}})
    on_ranks(config, {2, 2, 2},
             [&, from = from, to = to](const context<cpu>& ctx, pipeline_world& ranks, model_type& m) {
               if (const std::string name = from; name.empty()) {
                 m.visit([&](auto& p) { p.initialize(ctx); });
               } else {
                 const model_directory d = open_model_directory(out / name);
                 load_weights(ctx, m, d.entries, d.source());
               }
               export_hugging_face(ctx, ranks.root(), m, config, out / to, how);
             });
  CHECK(tensors_of(out / "first") == tensors_of(out / "second"));
  CHECK(std::filesystem::exists(out / "first/model.safetensors.index.json"));
  CHECK(!std::filesystem::exists(out / "first/model.safetensors"));
  const model_directory d = open_model_directory(out / "first");
  CHECK(d.config == config);
  CHECK(contains(read_file(out / "first/config.json", ""), "\"torch_dtype\": \"bfloat16\""));
  std::set<std::string> names;
  for (const auto& e : d.entries) {
    names.insert(d.files.file_of(e.name));
    CHECK(e.dtype == safetensors_dtype::bf16);
  }
  CHECK(names.size() >= 5);
  CHECK(names.begin()->starts_with("model-00001-of-0"));
}

TEST_CASE("loading is strict over all stages, with the same error on every rank") {
  std::deque<std::vector<float>> memory;
  std::vector<safetensors_entry> whole;
  const llama_config config = four_layers(false);
  on_ranks(config, {}, [&](const context<cpu>&, pipeline_world&, model_type& model) {
    model.visit([&](auto& p) {
      const auto& values = memory.emplace_back(static_cast<std::size_t>(p.size()), 1.0f);
      whole.push_back({p.name(), safetensors_dtype::f32, p.info().shape, std::as_bytes(std::span(values))});
    });
  });
  const auto message = [&](const std::vector<safetensors_entry>& entries) {
    std::vector<std::string> texts(4);
    on_ranks(config, {1, 2, 2}, [&](const context<cpu>& ctx, pipeline_world& ranks, model_type& model) {
      model.visit([&](auto& p) { p.initialize(ctx); });
      const std::uint64_t before = weights_hash(ctx, model);
      std::string& text = texts[static_cast<std::size_t>(ranks.root().rank())];
      text = test::text_thrown_by([&] { load_weights(ctx, model, entries, "file"); });
      if (!text.empty() && weights_hash(ctx, model) != before) text += " BUT CHANGED";
    });
    CHECK(std::set(texts.begin(), texts.end()).size() == 1);
    return texts[0];
  };
  const auto without = [&](const std::vector<std::string>& parts) {
    std::vector<safetensors_entry> left = whole;
    for (const std::string& part : parts) std::erase_if(left, [&](const auto& e) { return contains(e.name, part); });
    return left;
  };
  CHECK(message(whole) == "");
  // A file with fewer layers has all tensors of the first stage.
  const std::string fewer = message(without({"layers.3."}));
  CHECK(contains(fewer, "file: the model needs tensors that are missing: 'model.layers.3.input_layernorm.weight', '"));
  CHECK(contains(fewer, "'model.layers.3.mlp.down_proj.weight'"));
  CHECK(!contains(fewer, "belong"));
  // Biases of both stages.
  const std::string biases = message(without({"0.self_attn.q_proj.bias", "3.self_attn.q_proj.bias"}));
  CHECK(biases ==
        "file: the model needs tensors that are missing: 'model.layers.0.self_attn.q_proj.bias', "
        "'model.layers.3.self_attn.q_proj.bias'");
  // Renamed tensors: both lists name them. A layer too many; a wrong shape in the last stage.
  auto renamed = whole;
  for (auto& e : renamed)
    if (e.name == "lm_head.weight") e.name = "output.weight";
  CHECK(message(renamed) ==
        "file: the model needs tensors that are missing: 'lm_head.weight'; tensors that belong to no parameter of the "
        "model: 'output.weight'");
  auto more = whole;
  for (int i = 0; i < 25; ++i) more.push_back(whole[0]), more.back().name = cat({"layers.4.", i});
  const std::string extra = message(more);
  CHECK(contains(extra, "file: tensors that belong to no parameter of the model: 'layers.4.0', 'layers.4.1', "));
  CHECK(contains(extra, "'layers.4.19' and 5 more"));
  auto misfit = whole;
  misfit.back().shape = {16, 29}, misfit.back().name = "lm_head.weight";
  CHECK(contains(message(misfit), "tensor 'lm_head.weight' has the shape [16, 29], and the model needs [29, 16]"));
  auto twice = whole;
  twice.push_back(whole[3]);
  CHECK(message(twice) == "file: two tensors are called '" + whole[3].name + "'");
}

TEST_CASE("weights in three orders are one model on every layout") {
  const std::string data = plait::test::test_data() + "/llama_conversions/";
  const temp_folder dir;
  std::filesystem::copy(data + "config.json", dir / "config.json");
  std::set<std::uint64_t> hashes;
  for (const auto& [file, order] : {std::pair{"hugging_face", weights_order::hugging_face},
                                    {"megatron", weights_order::megatron},
                                    {"meta", weights_order::meta}}) {
    std::filesystem::copy(data + file + ".safetensors", dir / "model.safetensors",
                          std::filesystem::copy_options::overwrite_existing);
    const model_directory from = open_model_directory(dir / "", "--init-from", order);
    for (const ranks_of_model& m : {ranks_of_model{1, 1, 1}, {1, 2, 1}, {2, 1, 1, zero_level::parameters}})
      on_ranks(from.config, m, [&](const context<cpu>& ctx, pipeline_world& ranks, model_type& model) {
        load_weights(ctx, model, from.entries, from.source());
        const std::uint64_t hash = weights_hash(ctx, model);
        if (ranks.root().rank() == 0) hashes.insert(hash);
      });
  }
  CHECK(hashes.size() == 1);
}

TEST_CASE("every layout exports the orders of Megatron and of Meta as these tools write them") {
  const std::string data = plait::test::test_data() + "/llama_conversions/";
  const temp_folder dir;
  std::filesystem::copy(data + "config.json", dir / "config.json");
  std::filesystem::copy(data + "hugging_face.safetensors", dir / "model.safetensors");
  const model_directory from = open_model_directory(dir / "");
  const auto bytes = [](const std::string& file) {
    std::map<std::string, std::vector<std::byte>> all;
    for (const weight_tensor& t : weights_of_file(file, "file"))
      if (t.name != "rope.freqs") all[t.name + plait::detail::shape_text(t.shape)] = bytes_of(t);  // it is computed
    return all;
  };
  for (const char* order : {"megatron", "meta"})
    for (const ranks_of_model& m : {ranks_of_model{1, 1, 1}, {1, 2, 1}, {2, 1, 1, zero_level::parameters}}) {
      CAPTURE(order);
      const std::string to = dir / cat({order, m.dp, m.pp});
      on_ranks(from.config, m, [&](const context<cpu>& ctx, pipeline_world& ranks, model_type& model) {
        load_weights(ctx, model, from.entries, from.source());
        export_hugging_face(ctx, ranks.root(), model, from.config, to, {.order = weights_order_from(order)});
      });
      CHECK(bytes(to + "/model.safetensors") == bytes(data + order + ".safetensors"));
    }
  // Several tensor-parallel ranks read parts of a fused tensor, in shards, and write it.
  const llama_config config = [] {
    llama_config c = four_layers(true);
    c.attention_bias = false;
    return c;
  }();
  for (const weights_order order : {weights_order::megatron, weights_order::meta}) {
    std::set<std::uint64_t> hashes;
    const std::string to = dir / cat({"cut", name_of(order)});
    on_ranks(config, {1, 2, 4}, [&](const context<cpu>& ctx, pipeline_world& ranks, model_type& model) {
      model.visit([&](auto& p) { p.initialize(ctx); });
      export_hugging_face(ctx, ranks.root(), model, config, to, {.shard_bytes = 4000, .order = order});
      const std::uint64_t hash = weights_hash(ctx, model);
      if (ranks.root().rank() == 0) hashes.insert(hash);
    });
    const model_directory back = open_model_directory(to, "--init-from", order);
    on_ranks(config, {2, 1, 2, zero_level::parameters},
             [&](const context<cpu>& ctx, pipeline_world& ranks, model_type& model) {
               load_weights(ctx, model, back.entries, back.source());
               const std::uint64_t hash = weights_hash(ctx, model);
               if (ranks.root().rank() == 0) hashes.insert(hash);
             });
    CHECK(hashes.size() == 1);
  }
}

TEST_CASE("a file that is truncated while a model is loaded gives an error text, not a signal") {
  const temp_folder dir;
  for (const char* name : {"config.json", "model.safetensors"})
    std::filesystem::copy(data_folder("mha") + "/" + name, dir / name);
  const model_directory from = open_model_directory(dir / "");
  std::filesystem::resize_file(dir / "model.safetensors", 5000);
  CHECK_ERROR(on_ranks(from.config, {1, 2, 2},
                       [&](const context<cpu>& ctx, pipeline_world&, model_type& model) {
                         load_weights(ctx, model, from.entries, from.source());
                       }),
              "path: '", "model.safetensors' is truncated: it ends at byte ");
}

TEST_CASE("an impossible export is refused on every rank, and leaves no files") {
  const temp_folder out;
  out.write("file", "");
  std::filesystem::create_directories(out / "full/of");
  std::filesystem::create_directory(out / "empty");
  const auto refused = [&](const std::string& to, llama_config config, const export_options& how = {}) {
    std::vector<std::string> texts(4);
    const llama_config made = four_layers(false);
    on_ranks(made, {2, 2, 1}, [&](const context<cpu>& ctx, pipeline_world& ranks, model_type& model) {
      model.visit([&](auto& p) { p.initialize(ctx); });
      texts[static_cast<std::size_t>(ranks.root().rank())] =
          test::text_thrown_by([&] { export_hugging_face(ctx, ranks.root(), model, config, to, how); });
    });
    CHECK(std::set(texts.begin(), texts.end()).size() == 1);
    return texts[0];
  };
  const llama_config config = four_layers(false);
  CHECK(contains(refused(out / "full", config), "path: '" + out / "full" + "' is there already"));
  CHECK(contains(refused(out / "file", config), "is there already"));
  CHECK(contains(refused(out / "absent/model", config), "cannot make the folder"));
  CHECK(
      contains(refused(out / "a", config, {.dtype = safetensors_dtype::i32}), "dtype is I32; legal are F64, F32 and"));
  CHECK(contains(refused(out / "a", config, {.shard_bytes = 0}), "shard_bytes is 0"));
  CHECK(contains(refused(out / "a", config, {.like = out / "absent"}), "absent/config.json"));
  CHECK(
      contains(refused(out / "a", config, {.order = weights_order::meta}),
               "the order meta has no tensors for biases, which this model has; legal are hugging-face and megatron"));
  llama_config neither = config;
  neither.qk_norm = neither.mlp_bias = true;
  CHECK(contains(refused(out / "a", neither), "qwen3, which does not have mlp_bias"));
  CHECK(out.entries() == 3);
  CHECK(refused(out / "empty/", config) == "");
  CHECK(std::filesystem::exists(out / "empty/model.safetensors"));
  CHECK(out.entries() == 3);
}
