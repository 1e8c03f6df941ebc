#pragma once

#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/checkpoint/step_directory.hpp"

namespace plait::test {

/// Writes a small step of two files: a tensor in three boxes, a scalar, a tensor of eight-byte elements, and a blob.
/// All values are made from `seed`.
inline manifest write_small_step(file_system& files, const step_in_progress& step, unsigned seed) {
  const auto value = [&](std::int64_t index) { return static_cast<unsigned char>(31 * index + 7 * seed + 1); };
  manifest m;
  m.step = step.step();
  m.layout = "two writers";
  m.scalars = {{"seed", std::int64_t{seed}}};
  const auto part = [](std::vector<std::int64_t> offset, std::vector<std::int64_t> extent, std::uint32_t file) {
    stored_box out;
    std::copy(offset.begin(), offset.end(), out.offset.begin());
    std::copy(extent.begin(), extent.end(), out.extent.begin());
    out.stored.file = file;
    return out;
  };
  m.tensors = {{"w",
                safetensors_dtype::f32,
                {4, 6},
                {part({0, 0}, {2, 6}, 0), part({2, 0}, {2, 2}, 1), part({2, 2}, {2, 4}, 1)}},
               {"n", safetensors_dtype::i64, {}, {part({}, {}, 0)}},
               {"m", safetensors_dtype::f64, {5}, {part({0}, {5}, 1)}},
               {"none", safetensors_dtype::u8, {0}, {}}};
  m.blobs = {{"text", {1, 0, 0, 11}}};
  for (std::uint32_t writer = 0; writer < 2; ++writer) {
    std::vector<safetensors_declaration> tensors;
    std::vector<stored_bytes*> places;
    for (stored_tensor& tensor : m.tensors) {
      for (stored_box& box : tensor.boxes) {
        if (box.stored.file != writer) continue;
        tensors.push_back(
            {entry_name(tensor, box),
             tensor.dtype,
             {box.extent.begin(), box.extent.begin() + static_cast<std::ptrdiff_t>(tensor.shape.size())}});
        places.push_back(&box.stored);
      }
    }
    if (writer == 1) {
      tensors.push_back({"blob.text", safetensors_dtype::u8, {11}});
      places.push_back(&m.blobs[0].stored);
    }
    safetensors_stream file(files, step.path() + "/" + data_file_name(writer), plan_safetensors(tensors, {}, "x"));
    std::vector<unsigned char> data;
    for (std::uint64_t i = file.plan().header.size(); i < file.plan().file_bytes; ++i)
      data.push_back(value(static_cast<std::int64_t>(i)));
    file.append(std::as_bytes(std::span(data)).first(30));
    file.append(std::as_bytes(std::span(data)).subspan(30));
    file.finish();
    for (std::size_t i = 0; i < places.size(); ++i) {
      places[i]->position = file.plan().positions[i];
      places[i]->bytes = file.plan().bytes[i];
      places[i]->crc32c = file.crc32c_of_tensors()[i];
    }
    m.files.push_back(
        {data_file_name(writer), file.plan().file_bytes, file.plan().header.size(), file.header_crc32c()});
  }
  return m;
}

/// Writes and commits a small step.
inline void save_small_step(file_system& files, step_root& root, std::uint64_t step) {
  step_in_progress saving = root.begin(step);
  saving.commit(write_small_step(files, saving, static_cast<unsigned>(step)));
}

}  // namespace plait::test
