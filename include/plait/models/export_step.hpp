// Writes the weights of a saved step, whatever layouts saved it, as a directory that transformers opens. It needs no
// model and no ranks, and memory for a few rows. A model that runs: models/export_hugging_face.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/convert.hpp"
#include "plait/checkpoint/read_flat.hpp"
#include "plait/checkpoint/tensors_of_step.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/models/export_hugging_face.hpp"

namespace plait {

/// Writes the weights of a step to the new directory `path`, which appears when all of it is written. `step` is the
/// step's directory, `saved` its manifest, and `wanted` the tensors of a model of the shape `config` (`shapes_of`),
/// whose dtype is ignored. Elements are converted to `how.dtype`, by default to what the step has; checksums are
/// compared. Throws `error`, and leaves nothing behind, where the step has not the model's tensors, all of them and no
/// others, or has several types of them and no `how.dtype` chooses one, or is damaged, and as `export_hugging_face`
/// does.
inline void export_step(const manifest& saved, const std::string& step, const llama_config& config,
                        std::vector<safetensors_declaration> wanted, const std::string& path,
                        const export_options& how = {}, file_system& files = machine_files()) {
  constexpr std::uint64_t chunk_bytes = 8 << 20;
  const std::string source = cat({how.field, ": '", path, "'"});
  const std::vector<const stored_tensor*> tensors = tensors_of_step(saved, wanted, cat({"'", step, "'"}), true);
  if (tensors.empty()) fail({"'", step, "' has no weights"});
  if (how.shard_bytes == 0) fail({source, ": shard_bytes is 0; at least 1 is legal"});
  for (const stored_tensor* t : tensors)  // one type for all would round some of them in silence
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
  std::map<std::size_t, file_of_parts> open;
  for (const stored_tensor* t : tensors) {
    const weight_place place = place_in_order(t->name, how.order, config, source);
    const safetensors_shards::place& where = shards.of(place.tensor);
    const std::int64_t row = t->shape.empty() ? 1 : elements_of(*t) / std::max<std::int64_t>(t->shape[0], 1);
    if (!open.contains(where.file))
      open.emplace(
          where.file,
          file_of_parts::open((std::filesystem::path(folder.temporary()) / shards.files()[where.file].name).string(),
                              how.field));
    each_chunk(*t, chunk_bytes, [&](std::int64_t begin, std::int64_t end, std::uint64_t bytes) {
      in.resize(bytes);
      reader.read(*t, begin, end, in.data());
      out.resize(static_cast<std::size_t>(end - begin) * size_of(type));
      convert_saved(t->dtype, *written, in.data(), out.data(), end - begin, t->name);
      detail::write_run(open.at(where.file), where.offset, place, row, begin, out, size_of(type));
    });
  }
  for (auto& [index, file] : open) file.close();
  folder.commit();
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
