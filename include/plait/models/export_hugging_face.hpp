// Writes a model from any mesh as a directory that transformers opens: config.json and safetensors.
// models/hugging_face_directory.hpp reads one.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/checkpoint/agree.hpp"
#include "plait/checkpoint/model_weights.hpp"
#include "plait/checkpoint/step_data.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/tensor_names.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/io/mapped_file.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/models/llama_config_json.hpp"
#include "plait/models/weights_order.hpp"

namespace plait {

/// Options of `export_hugging_face`.
struct export_options {
  std::uint64_t shard_bytes = 5'000'000'000;  ///< most bytes of tensors per file, as in transformers
  std::optional<safetensors_dtype> dtype{};   ///< F64, F32 or BF16; default: the type of the master values
  /// A model directory to imitate: its tokenizer and the keys of its config.json without an effect on numbers (such as
  /// end-of-text tokens) are copied. If it is a config.json, only keys are copied. Empty: none.
  std::string like{};
  /// The tool whose tensor names and order are used; config.json always has Hugging Face's format. transformers only
  /// opens its own order; `open_model_directory` opens each.
  weights_order order = weights_order::hugging_face;
  std::string field = "path";  ///< the user's setting that gives the path; error texts begin with it
};

namespace detail {

/// Writes the files of a model directory other than weights: shapes and tokenizer.
void write_beside_weights(const llama_config& config, safetensors_dtype dtype, const safetensors_shards& shards,
                          const std::string& folder, const export_options& how);

}  // namespace detail

/// Writes `model`, a llama or a pipeline of them, to the new directory `path`, which appears when it is complete. Each
/// rank writes its own parts of the master values, so all ranks must see the same file system. The files do not depend
/// on the mesh. Low-rank adapters are merged into the written weights, W + scale * B A; the model keeps them separate.
/// Collective over `all`, the ranks of all stages.
///
/// Throws the same `error` on every rank, and leaves no files, if `path` exists or differs between ranks. Throws also
/// if the disk is full, or if no model type of Hugging Face has this shape.
template <compute_device Device, class Model>
void export_hugging_face(const context<Device>& ctx, any_communicator& all, Model& model, const llama_config& config,
                         const std::string& path, const export_options& how = {}) {
  using precision = typename Model::precision_type;
  const safetensors_dtype dtype = how.dtype.value_or(safetensors_dtype_of(dtype_of<master_of<precision>>));
  const std::string source = cat({how.field, ": '", path, "'"});
  std::vector<safetensors_declaration> tensors = shapes_of(ctx, model, dtype);
  std::erase_if(tensors, [](const auto& t) { return is_of_adapter(t.name) || is_last_load(t.name); });
  // Every rank has equal tensors, and so the same error.
  const safetensors_shards shards(declared_in_order(tensors, how.order, config, source), how.shard_bytes, source);
  std::optional<atomic_folder> folder;
  agree(ctx.device, all, [&] {
    if (how.shard_bytes == 0) fail({source, ": shard_bytes is 0; at least 1 is legal"});
    if (dtype != safetensors_dtype::f64 && dtype != safetensors_dtype::f32 && dtype != safetensors_dtype::bf16)
      fail({source, ": dtype is ", name_of(dtype), "; legal are F64, F32 and BF16"});
    if (all.rank() != 0) return;
    folder.emplace(path, how.field);
    detail::write_beside_weights(config, dtype, shards, folder->temporary(), how);
    create_files(shards, folder->temporary(), how.field);
  });
  const std::string temporary = gather_texts(ctx.device, all, folder ? folder->temporary() : std::string())[0];
  require_one_directory(ctx.device, all, temporary, cat({how.field, ": "}));
  const auto adapters = detail::gather_adapters(ctx, model);
  agree(ctx.device, all, [&] {
    const auto place = [&](const std::string& name) { return place_in_order(name, how.order, config, source); };
    write_weights(ctx, model, shards, dtype, temporary, how.field, place, adapters);
  });
  agree(ctx.device, all, [&] {
    if (folder) folder->commit();
  });
}

// Writes the weights of a saved step, from any layout, as a directory that transformers opens. It needs no model, no
// ranks, and memory for a few rows only. models/export_hugging_face.hpp exports a running model.

/// Writes the weights of a step to the new directory `path`, which appears when it is complete. `step` is the step's
/// directory and `saved` its manifest. `wanted` are the tensors of a model of the shape `config` (`shapes_of`); their
/// dtype is ignored. Elements are converted to `how.dtype`, by default the type in the step; checksums are verified.
///
/// Throws `error`, and leaves no files, if the step is damaged or its tensors are not exactly the model's. Throws also
/// if tensors have several types and `how.dtype` is not set, and in the cases of `export_hugging_face`.
inline void export_step(const manifest& saved, const std::string& step, const llama_config& config,
                        std::vector<safetensors_declaration> wanted, const std::string& path,
                        const export_options& how = {}, file_system& files = machine_files()) {
  constexpr std::uint64_t chunk_bytes = 8 << 20;
  const std::string source = cat({how.field, ": '", path, "'"});
  const std::vector<const stored_tensor*> tensors = tensors_of_step(saved, wanted, cat({"'", step, "'"}), true);
  if (tensors.empty()) fail({"'", step, "' has no weights"});
  if (how.shard_bytes == 0) fail({source, ": shard_bytes is 0; at least 1 is legal"});
  for (const stored_tensor* t : tensors)  // a common type would round some of them silently
    if (!how.dtype && t->dtype != tensors.front()->dtype)
      fail({"'", step, "' has tensors of several types: '", tensors.front()->name, "' is ",
            name_of(tensors.front()->dtype), ", and '", t->name, "' ", name_of(t->dtype),
            "; choose the type of the export by dtype"});
  const safetensors_dtype type = how.dtype.value_or(tensors.front()->dtype);
  const auto written = weight_dtype_of(type);
  if (!written) fail({source, ": dtype is ", name_of(type), "; legal are F64, F32 and BF16"});
  for (safetensors_declaration& w : wanted) w.dtype = type;
  const safetensors_shards shards(declared_in_order(wanted, how.order, config, source), how.shard_bytes, source);

  atomic_folder folder(path, how.field);
  detail::write_beside_weights(config, type, shards, folder.temporary(), how);
  create_files(shards, folder.temporary(), how.field);
  flat_reader reader(files, step, saved);
  std::vector<std::byte> in, out;
  detail::weight_writer writer(shards, folder.temporary(), how.field);
  for (const stored_tensor* t : tensors) {
    const weight_place place = place_in_order(t->name, how.order, config, source);
    each_chunk(*t, chunk_bytes, [&](std::int64_t begin, std::int64_t end, std::uint64_t bytes) {
      in.resize(bytes);
      reader.read(*t, begin, end, in.data());
      out.resize(static_cast<std::size_t>(end - begin) * size_of(type));
      convert_elements(t->dtype, *written, in.data(), out.data(), end - begin, t->name);
      writer.write(place, t->shape, begin, out, size_of(type));
    });
  }
  writer.close();
  folder.commit();
}

}  // namespace plait

#if !defined(PLAIT_COMPILED) || defined(PLAIT_COMPILING_FILES)
#include <nlohmann/json.hpp>

#include "plait/io/json_tree.hpp"
#include "plait/models/config_keys.hpp"

namespace plait {

namespace detail {

/// The tokenizer files of a model directory.
inline constexpr std::array tokenizer_files = std::to_array<std::string_view>(
    {"added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt", "special_tokens_map.json",
     "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"});

inline std::string_view torch_name(safetensors_dtype type) {
  return type == safetensors_dtype::f64 ? "float64" : type == safetensors_dtype::f32 ? "float32" : "bfloat16";
}

/// Returns the text of config.json with the keys of another file that do not affect numbers, except those that the
/// shape or the weights determine.
inline std::string exported_config(const llama_config& config, safetensors_dtype dtype, const export_options& how) {
  const std::string text = llama_config_text(config, std::string(torch_name(dtype)));
  if (how.like.empty()) return text;
  const std::filesystem::path like(how.like);
  const std::string from = (std::filesystem::is_regular_file(like) ? like : like / "config.json").string();
  nlohmann::json json = nlohmann::json::parse(text);
  const nlohmann::json old = parse_json(read_file(from, how.field), from);
  for (const auto& [key, value] : old.items())
    if (harmless_config_keys.contains(key) && key != "dtype" && key != "transformers_version" && !json.contains(key))
      json[key] = value;
  return json.dump(2) + "\n";
}

PLAIT_INLINE void write_beside_weights(const llama_config& config, safetensors_dtype dtype,
                                       const safetensors_shards& shards, const std::string& folder,
                                       const export_options& how) {
  const std::filesystem::path to(folder), like(how.like);
  write_file_atomically((to / "config.json").string(), exported_config(config, dtype, how), how.field);
  if (shards.files().size() > 1)
    write_file_atomically((to / safetensors_index_name).string(), shards.index(), how.field);
  for (const std::string_view name : tokenizer_files)
    if (!how.like.empty() && std::filesystem::exists(like / name))
      write_file_atomically((to / name).string(), read_file((like / name).string(), how.field), how.field);
}

}  // namespace detail

}  // namespace plait
#endif

#include "plait/core/macros_on.hpp"
