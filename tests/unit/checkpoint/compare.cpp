// program: steps
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "checkpoint_tool/tensor_difference.hpp"
#include "plait/checkpoint/step_data.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "support/memory_file_system.hpp"
#include "support/small_step.hpp"
#include "support/temp_folder.hpp"

namespace {

using plait::safetensors_dtype;
using plait::tensor_difference;
using plait::test::memory_file_system;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double no_number = std::numeric_limits<double>::quiet_NaN();

template <class T>
tensor_difference difference(safetensors_dtype type, std::vector<T> a, std::vector<T> b) {
  tensor_difference out;
  plait::add_difference(type, std::as_bytes(std::span(a)), std::as_bytes(std::span(b)), out);
  return out;
}

/// Writes a matrix [rows, columns] of numbers 0, 1, 2, ... as one file, in boxes of `by` rows and columns. Returns the
/// step's manifest.
plait::manifest save_in_boxes(memory_file_system& files, const std::string& root, std::int64_t rows,
                              std::int64_t columns, std::array<std::int64_t, 2> by) {
  plait::manifest m;
  m.step = 1;
  m.layout = "boxes";
  m.tensors = {{"w", safetensors_dtype::f32, {rows, columns}, {}}};
  std::vector<plait::safetensors_declaration> declared;
  std::vector<float> data;
  for (std::int64_t r = 0; r < rows; r += by[0]) {
    for (std::int64_t c = 0; c < columns; c += by[1]) {
      plait::stored_box& part = m.tensors[0].boxes.emplace_back();
      part.offset = {r, c};
      part.extent = {std::min(by[0], rows - r), std::min(by[1], columns - c)};
      declared.push_back({entry_name(m.tensors[0], part), safetensors_dtype::f32, {part.extent[0], part.extent[1]}});
      for (std::int64_t i = r; i < r + part.extent[0]; ++i)
        for (std::int64_t j = c; j < c + part.extent[1]; ++j) data.push_back(static_cast<float>(i * columns + j));
    }
  }
  plait::step_root writer(files, root);
  plait::step_in_progress saving = writer.begin(1);
  plait::safetensors_stream file(files, saving.path() + "/" + plait::data_file_name(0),
                                 plait::plan_safetensors(declared, {}, "x"));
  file.append(std::as_bytes(std::span(data)));
  file.finish();
  const auto& plan = file.plan();
  for (std::size_t i = 0; i < declared.size(); ++i)
    m.tensors[0].boxes[i].stored = {0, file.crc32c_of_tensors()[i], plan.positions[i], plan.bytes[i]};
  m.files = {{plait::data_file_name(0), plan.file_bytes, plan.header.size(), file.header_crc32c()}};
  saving.commit(m);
  return m;
}

std::string step_in(const std::string& root) { return root + "/step-00000001"; }

}  // namespace

TEST_CASE("a chunk has whole rows if a row fits, and at least one element") {
  const plait::stored_tensor cube{"t", safetensors_dtype::f32, {10, 6, 4}, {}};
  CHECK(plait::chunk_elements(cube, 4 * 1000) == 960);  // 4 * 240, although the tensor has 240 elements
  CHECK(plait::chunk_elements(cube, 4 * 100) == 96);    // planes of 24
  CHECK(plait::chunk_elements(cube, 4 * 23) == 20);     // rows of 4
  CHECK(plait::chunk_elements(cube, 4 * 3) == 3);
  CHECK(plait::chunk_elements(cube, 0) == 1);
  CHECK(plait::chunk_elements({"s", safetensors_dtype::f64, {}, {}}, 16) == 2);
  CHECK(plait::chunk_elements({"e", safetensors_dtype::f64, {0, 7}, {}}, 16) > 0);
}

TEST_CASE("different elements are counted and measured, in every type") {
  const auto floats = difference<float>(safetensors_dtype::f32, {1, 2, -8, 0}, {1, 2.5, -8, -0.0f});
  CHECK(floats.elements == 4);
  CHECK(floats.differing == 2);
  CHECK(floats.absolute == 0.5);
  CHECK(floats.relative == 0.2);
  CHECK(floats.largest == 8);
  CHECK_FALSE(floats.identical());
  CHECK(floats.within(0.0625));
  CHECK_FALSE(floats.within(0.06));

  const std::uint16_t one = 0x3c00, two = 0x4000;
  CHECK(difference<std::uint16_t>(safetensors_dtype::f16, {one}, {two}).absolute == 1);
  CHECK(difference<std::uint16_t>(safetensors_dtype::bf16, {0x3f80}, {0x4040}).absolute == 2);
  CHECK(difference<double>(safetensors_dtype::f64, {1e300}, {-1e300}).relative == 2);
  CHECK(difference<std::int8_t>(safetensors_dtype::i8, {-128}, {127}).absolute == 255);
  CHECK(difference<std::int16_t>(safetensors_dtype::i16, {5}, {-5}).absolute == 10);
  CHECK(difference<std::uint8_t>(safetensors_dtype::boolean, {0, 1}, {1, 1}).differing == 1);
  CHECK(difference<std::uint16_t>(safetensors_dtype::u16, {one}, {two}).absolute == two - one);
  CHECK(difference<std::int32_t>(safetensors_dtype::i32, {-7}, {-7}).identical());
  CHECK(difference<std::uint32_t>(safetensors_dtype::u32, {0}, {4'000'000'000u}).absolute == 4e9);
  const std::int64_t large = std::int64_t{1} << 62;  // as a double it equals its neighbours
  CHECK(difference<std::int64_t>(safetensors_dtype::i64, {large}, {large + 1}).absolute == 1);
  CHECK(difference<std::int64_t>(safetensors_dtype::i64, {-large - large}, {large + (large - 1)}).absolute == 0x1p64);
  CHECK(difference<std::uint64_t>(safetensors_dtype::u64, {~std::uint64_t{0}}, {0}).absolute == 0x1p64);
}

TEST_CASE("NaN differs infinitely from a number, and equals NaN") {
  CHECK(difference<double>(safetensors_dtype::f64, {no_number, infinity}, {no_number, infinity}).identical());
  CHECK(difference<double>(safetensors_dtype::f64, {no_number}, {-no_number}).absolute == 0);
  CHECK(difference<double>(safetensors_dtype::f64, {no_number}, {-no_number}).differing == 1);
  CHECK(difference<double>(safetensors_dtype::f64, {no_number}, {1}).absolute == infinity);
  CHECK(difference<double>(safetensors_dtype::f64, {infinity}, {-infinity}).absolute == infinity);
  CHECK(difference<double>(safetensors_dtype::f64, {3, infinity}, {3, 0}).largest == 3);
  CHECK_FALSE(difference<double>(safetensors_dtype::f64, {3, infinity}, {3, 0}).within(1e300));
  CHECK(difference<double>(safetensors_dtype::f64, {0}, {-0.0}).within(0));
}

TEST_CASE("a comparison of tensors of different sizes is refused") {
  tensor_difference out;
  const std::array<std::byte, 8> bytes{};
  CHECK_THROWS_AS(plait::add_difference(safetensors_dtype::f32, bytes, std::span(bytes).first(4), out), plait::error);
  CHECK_THROWS_AS(
      plait::add_difference(safetensors_dtype::f32, std::span(bytes).first(7), std::span(bytes).first(7), out),
      plait::error);
}

TEST_CASE("steps in different boxes are equal with chunks of any size, and one different element is found") {
  memory_file_system files;
  const std::vector<std::array<std::int64_t, 2>> cuts{{7, 5}, {3, 5}, {7, 2}, {2, 3}, {1, 1}};
  std::vector<plait::manifest> saved;
  for (std::size_t i = 0; i < cuts.size(); ++i)
    saved.push_back(save_in_boxes(files, "r" + std::to_string(i), 7, 5, cuts[i]));
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    for (const std::uint64_t chunk : {1, 8, 20, 24, 60, 1000}) {
      plait::flat_reader a(files, step_in("r0"), saved[0]), b(files, step_in("r" + std::to_string(i)), saved[i]);
      const auto found = plait::compare_tensors(a, saved[0].tensors[0], b, saved[i].tensors[0], chunk);
      CHECK(found.elements == 35);
      CHECK(found.identical());
      CHECK(found.largest == 34);
    }
  }
  // Every byte of every split file, with its previous checksum.
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    const std::string path = step_in("r" + std::to_string(i)), data = path + "/" + saved[i].files[0].path;
    for (std::size_t at = saved[i].files[0].header_bytes; at < saved[i].files[0].bytes; ++at) {
      files.contents(data)[at] ^= 1;
      for (const std::uint64_t chunk : {8, 20, 1000}) {
        plait::flat_reader a(files, step_in("r0"), saved[0]), b(files, path, saved[i]);
        CHECK_ERROR(plait::compare_tensors(a, saved[0].tensors[0], b, saved[i].tensors[0], chunk),
                    "is damaged: tensor 'w' box [");
      }
      files.contents(data)[at] ^= 1;
    }
  }
}

TEST_CASE("a scalar, an empty tensor and 8-byte elements are read completely, and in order only") {
  memory_file_system files;
  plait::step_root writer(files, "r");
  plait::test::save_small_step(files, writer, 1);
  const plait::manifest m = plait::read_step(files, step_in("r"));
  plait::flat_reader reader(files, step_in("r"), m);
  for (const plait::stored_tensor& tensor : m.tensors) {
    std::uint64_t bytes = 0;
    plait::each_chunk(tensor, 16, [&](std::int64_t begin, std::int64_t end, std::uint64_t size) {
      std::vector<std::byte> chunk(size);
      reader.read(tensor, begin, end, chunk.data());
      bytes += size;
    });
    CHECK(bytes == static_cast<std::uint64_t>(plait::elements_of(tensor)) * size_of(tensor.dtype));
  }
  CHECK(reader.read(m.blobs[0]).size() == 11);
  std::array<std::byte, 64> out;
  reader.read(m.tensors[0], 0, 2, out.data());
  CHECK_THROWS_WITH(reader.read(m.tensors[0], 3, 4, out.data()), "the elements of 'w' are read out of order");
  plait::flat_reader other(files, step_in("r"), m);
  CHECK_THROWS_WITH(plait::compare_tensors(reader, m.tensors[0], other, m.tensors[2], 64),
                    "tensor 'w' and tensor 'm' are of another shape or type");
}
