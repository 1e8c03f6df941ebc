// program: files
#include "plait/models/hugging_face_directory.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/safetensors.hpp"
#include "support/temp_folder.hpp"
#include "support/test_data.hpp"

namespace {

using plait::model_directory;
using plait::open_model_directory;
using plait::safetensors_directory;
using plait::safetensors_entry;

/// Tensors of one dim, by name, filled with one value.
using values = std::map<std::string, std::pair<std::int64_t, float>>;

void write_file(const std::string& path, const values& tensors) {
  std::vector<std::vector<float>> memory;
  std::vector<safetensors_entry> entries;
  memory.reserve(tensors.size());
  for (const auto& [name, what] : tensors) {
    memory.emplace_back(static_cast<std::size_t>(what.first), what.second);
    entries.push_back(
        {name, plait::safetensors_dtype::f32, {what.first}, std::as_bytes(std::span(std::as_const(memory.back())))});
  }
  plait::write_safetensors(path, entries);
}
std::string index_of(const std::string& map) {
  return R"({"metadata": {"total_size": 4}, "weight_map": {)" + map + "}}";
}

const std::string shape = R"("model_type": "llama", "vocab_size": 4, "hidden_size": 4, "num_hidden_layers": 1,
  "num_attention_heads": 2, "intermediate_size": 8})";
const std::string untied = "{" + shape, tied = R"({"tie_word_embeddings": true, )" + shape;

void open_weights(const std::string& path, const std::string& field = "path") { safetensors_directory(path, field); }
/// Opens a directory of one file.
model_directory opened(const std::string& text, const values& tensors) {
  const temp_folder dir;
  dir.write("config.json", text);
  write_file(dir / "model.safetensors", tensors);
  return open_model_directory(dir / "");
}
std::string names_of(const model_directory& d) {
  std::string names;
  for (const auto& entry : d.entries) names += (names.empty() ? "" : " ") + entry.name;
  return names;
}

}  // namespace

TEST_CASE("a directory of one file, as transformers writes it") {
  const std::string folder = plait::test::test_data() + "/llama_qwen3";
  const model_directory d = open_model_directory(folder);
  CHECK(d.config == plait::read_llama_config(folder + "/config.json"));
  const plait::safetensors_reader file(folder + "/model.safetensors");
  REQUIRE(d.entries.size() == file.entries().size());
  for (const auto& entry : d.entries) CHECK(same_elements(entry, weight_in_memory(file.at(entry.name))));
  CHECK(d.source() == "path: '" + folder + "'");
  CHECK(d.files.file_of("model.norm.weight") == "model.safetensors");
}

TEST_CASE("shards are merged by their index, and each tensor is once where the index says") {
  const temp_folder dir;
  const auto refused = [&](const std::string& index) {
    dir.write("model.safetensors.index.json", index_of(index));
    return error_of([&] { open_weights(dir / "", "--field"); });
  };
  write_file(dir / "one.safetensors", {{"a", {2, 1}}, {"b", {3, 2}}});
  write_file(dir / "two.safetensors", {{"c", {1, 3}}});
  const std::string whole = R"("a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors")";
  dir.write("model.safetensors.index.json", index_of(whole));
  const safetensors_directory files(dir / "", "--field");
  REQUIRE(files.entries().size() == 3);
  CHECK(files.entries()[2].name == "c");
  CHECK(files.file_of("b") == "one.safetensors");
  CHECK_ERROR(files.file_of("d"), "--field", "no tensor 'd' among its 3");

  CHECK(contains(refused(R"("a": "one.safetensors", "c": "two.safetensors")"), "tensor 'b' in one.safetensors"));
  CHECK(contains(refused(whole + R"(, "d": "two.safetensors")"), "no tensor 'd' in two.safetensors"));
  CHECK(contains(refused(R"("a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors")"),
                 "tensor 'b' in one.safetensors, and model.safetensors.index.json says that it is in two.safetensors"));
  CHECK(contains(refused(whole + R"(, "d": "six.safetensors", "e": "ten.safetensors")"),
                 "lacks files that model.safetensors.index.json names: 'six.safetensors', 'ten.safetensors'"));
  CHECK(contains(refused(whole + R"(, "a": "two.safetensors")"), "the key 'a' appears twice"));
  for (const char* name : {"../one.safetensors", "/tmp/one.safetensors", "sub/one.safetensors", "..", "", "one.bin",
                           "a\\\\one.safetensors", "one.safetensors\\u0000.safetensors"})
    CHECK(contains(refused(R"("a": ")" + std::string(name) + "\""),
                   "legal is the name of a .safetensors file in the same folder"));
  for (const char* text : {"{}", "[]", "7", R"({"weight_map": []})"}) {
    dir.write("model.safetensors.index.json", text);
    CHECK_ERROR(open_weights(dir / ""), "index.json': it has no weight_map");
  }
  dir.write("model.safetensors.index.json", "{\"weight_map\": {\"a\": 7}}");
  CHECK_ERROR(open_weights(dir / ""),
              "found 7 as the file of tensor 'a', where the name of a .safetensors file is legal");
  dir.write("model.safetensors.index.json", "{\"metadata\": " + std::string(100000, '['));
  CHECK_ERROR(open_weights(dir / ""), "more than 64 levels");

  write_file(dir / "two.safetensors", {{"a", {2, 9}}, {"c", {1, 3}}});
  CHECK(contains(refused(whole), "has the tensor 'a' twice, in one.safetensors and in two.safetensors"));
  write_file(dir / "model.safetensors", {{"a", {2, 9}}});
  CHECK(contains(refused(whole), "has both model.safetensors and model.safetensors.index.json"));
}

TEST_CASE("a file in place of a directory, and the reverse") {
  const temp_folder dir;
  write_file(dir / "model-1.safetensors", {{"a", {2, 1}}});
  dir.write("model.safetensors.index.json", index_of(R"("a": "model-1.safetensors")"));
  const std::string folder = std::filesystem::path(dir / "").parent_path().string();
  for (const char* name : {"model-1.safetensors", "model.safetensors.index.json"})
    CHECK_ERROR(open_weights(dir / name), "is a file; name the folder", "'" + folder + "'");
  CHECK_ERROR(plait::safetensors_reader(dir / "model.safetensors.index.json"), "this is JSON",
              "or the folder that has the index of a model in shards");
  CHECK_ERROR(plait::safetensors_reader{folder}, "is a folder; name a file");
  CHECK_ERROR(open_weights(dir / "absent"), "cannot open", "absent", "No such file", "a folder on this machine");
  std::filesystem::create_symlink("model.safetensors", dir / "model.safetensors");  // a link to itself
  CHECK_ERROR(open_weights(folder), "cannot look for '", "/model.safetensors'", "symbolic links");
  std::filesystem::remove(dir / "model.safetensors");
  std::filesystem::remove(dir / "model.safetensors.index.json");
  CHECK_ERROR(open_weights(folder), "has neither model.safetensors nor model.safetensors.index.json",
              "it has 'model-1.safetensors', and no index");
  for (const char* name : {"c.safetensors", "a.safetensors", "b.safetensors"}) dir.write(name, "");
  CHECK_ERROR(open_weights(folder),
              "it has 'a.safetensors', 'b.safetensors', 'c.safetensors', 'model-1.safetensors', and");
  for (const char* name : {"a.safetensors", "b.safetensors", "c.safetensors", "model-1.safetensors"})
    std::filesystem::remove(dir / name);
  dir.write("pytorch_model.bin", "pickle");
  CHECK_ERROR(open_weights(folder), "pytorch_model.bin can run any code");
  write_file(dir / "model.safetensors", {{"a", {2, 1}}});
  CHECK_ERROR(open_model_directory(folder), "path", "config.json", "No such file");
}

TEST_CASE("buffers of old files, base models and tied heads") {
  const values whole = {
      {"lm_head.weight", {4, 1}}, {"model.embed_tokens.weight", {4, 1}}, {"model.norm.weight", {4, 2}}};
  values old = whole;
  old["model.layers.0.self_attn.rotary_emb.inv_freq"] = {2, 3};
  CHECK(names_of(opened(untied, old)) == "lm_head.weight model.embed_tokens.weight model.norm.weight");

  // A file that also stores a tied head: equal to the table, different, or without the table.
  const model_directory equal = opened(tied, whole);
  CHECK(names_of(equal) == "model.embed_tokens.weight model.norm.weight");
  CHECK(equal.config.tie_embeddings);
  values differs = whole;
  differs["lm_head.weight"] = {4, 5};
  const model_directory separate = opened(tied, differs);
  CHECK(names_of(separate) == "lm_head.weight model.embed_tokens.weight model.norm.weight");
  CHECK(!separate.config.tie_embeddings);
  const model_directory alone = opened(tied, {{"lm_head.weight", {4, 1}}, {"model.norm.weight", {4, 2}}});
  CHECK(names_of(alone) == "model.embed_tokens.weight model.norm.weight");
  CHECK(alone.config.tie_embeddings);
  CHECK(!opened(untied, whole).config.tie_embeddings);  // the config ties nothing, and the file stores both

  const values base = {{"embed_tokens.weight", {4, 1}}, {"norm.weight", {4, 2}}};
  CHECK(names_of(opened(tied, base)) == "model.embed_tokens.weight model.norm.weight");
  CHECK_ERROR(opened(untied, base), "a base model without a head", "'lm_head.weight'", "AutoModelForCausalLM");
  values with_head = base;
  with_head["lm_head.weight"] = {4, 5};
  CHECK(names_of(opened(untied, with_head)) == "model.embed_tokens.weight lm_head.weight model.norm.weight");
  values mixed = base;
  mixed["model.norm.weight"] = {4, 2};
  CHECK_ERROR(opened(untied, mixed), "'embed_tokens.weight', of a base model, and 'model.norm.weight'");
}

TEST_CASE("weights in the order of Megatron and of Meta, with a config.json") {
  using plait::weights_order;
  const std::string data = plait::test::test_data() + "/llama_conversions/";
  const temp_folder dir;
  std::filesystem::copy(data + "config.json", dir / "config.json");
  const plait::safetensors_reader expected(data + "hugging_face.safetensors");
  for (const auto& [file, order] : {std::pair{"hugging_face", weights_order::hugging_face},
                                    {"megatron", weights_order::megatron},
                                    {"meta", weights_order::meta}}) {
    CAPTURE(file);
    std::filesystem::copy(data + file + ".safetensors", dir / "model.safetensors",
                          std::filesystem::copy_options::overwrite_existing);
    const model_directory d = open_model_directory(dir / "", "--init-from", order);
    CHECK(d.entries.size() == expected.entries().size());
    for (const auto& entry : d.entries) CHECK(same_elements(entry, weight_in_memory(expected.at(entry.name))));
  }
  CHECK_ERROR(open_model_directory(dir / ""), "path: '", "have the names of meta, and order is");
}

TEST_CASE("a file that is truncated after it was opened gives an error text") {
  const temp_folder dir;
  write_file(dir / "model.safetensors", {{"a", {1000, 1}}, {"b", {3000, 2}}});
  const safetensors_directory files(dir / "");
  const auto size = std::filesystem::file_size(dir / "model.safetensors");
  std::filesystem::resize_file(dir / "model.safetensors", size - 8000);
  std::vector<float> a(1000), b(3000);
  files.entries()[0].read(0, 1000, reinterpret_cast<std::byte*>(a.data()));
  CHECK(a == std::vector<float>(1000, 1));
  CHECK_ERROR(files.entries()[1].read(0, 3000, reinterpret_cast<std::byte*>(b.data())),
              "model.safetensors' is truncated: it ends at byte " + std::to_string(size - 8000));
  CHECK_ERROR(open_weights(dir / ""), "it is truncated");
}
