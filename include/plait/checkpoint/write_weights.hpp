// Writes a model's weights into safetensors files of a folder, each rank its own parts: nothing is gathered, and no
// rank holds more than it has.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/checkpoint/agree.hpp"
#include "plait/checkpoint/box_runs.hpp"
#include "plait/checkpoint/safetensors_shards.hpp"
#include "plait/checkpoint/weight_tensor.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/file_of_parts.hpp"
#include "plait/layout/local_box.hpp"
#include "plait/nn/parameter.hpp"

namespace plait {
namespace detail {

/// "name <tab> extents, separated by commas", and back.
inline std::string line_of(const parameter_info& info) {
  std::string line = info.name + '\t';
  for (std::int64_t n : info.shape) append(line, {line.back() == '\t' ? "" : ",", n});
  return line + '\n';
}
inline safetensors_declaration shape_of_line(std::string_view line, safetensors_dtype dtype) {
  const std::size_t tab = line.rfind('\t');
  safetensors_declaration out{std::string(line.substr(0, tab)), dtype, {}};
  const char *at = line.data() + tab + 1, *const end = line.data() + line.size();
  while (at < end) {
    std::int64_t extent = 0;
    at = std::from_chars(at, end, extent).ptr + 1;
    out.shape.push_back(extent);
  }
  return out;
}

/// Whether this rank writes its piece of `p`: of ranks that have the same elements, the one with coordinate 0 does.
template <class Precision, compute_device Device>
bool writes(const context<Device>& ctx, const parameter<Precision, Device>& p) {
  const mesh_shape& mesh = ctx.ranks.shape();
  for (axis_id axis : mesh.axes) {
    const bool cut = p.stored().sharded_by(axis) || (p.home() && p.home()->axes().contains(axis));
    if (!cut && ctx.ranks.coordinate(axis) != 0) return false;
  }
  return p.counts();
}

/// Elements as a file has them.
template <class To, class From>
void convert_into(std::vector<std::byte>& out, const From* values, std::size_t count) {
  out.resize(count * sizeof(To));
  for (std::size_t i = 0; i < count; ++i) {
    const To value = converted<To>(values[i]);
    std::memcpy(out.data() + i * sizeof(To), &value, sizeof(To));
  }
}
template <class From>
void convert_into(safetensors_dtype type, std::vector<std::byte>& out, const From* values, std::size_t count) {
  if (type == safetensors_dtype::f64) return convert_into<double>(out, values, count);
  if (type == safetensors_dtype::f32) return convert_into<float>(out, values, count);
  if (type == safetensors_dtype::bf16) return convert_into<bf16>(out, values, count);
  fail({"weights are written as F64, F32 or BF16, not as ", name_of(type)});
}

/// Writes elements from `begin` on of a tensor that lies as `place` says, and begins at byte `offset` of a file.
inline void write_run(file_of_parts& file, std::uint64_t offset, const weight_place& place, std::int64_t row,
                      std::int64_t begin, const std::vector<std::byte>& bytes, std::size_t width) {
  if (!place.row_at) return file.write(offset + static_cast<std::uint64_t>(begin) * width, bytes.data(), bytes.size());
  const std::int64_t end = begin + static_cast<std::int64_t>(bytes.size() / width);
  each_row_run(begin, end, row, place.row_at, [&](std::int64_t at, std::int64_t to, std::int64_t n) {
    file.write(offset + static_cast<std::uint64_t>(to) * width,
               bytes.data() + static_cast<std::size_t>(at - begin) * width, static_cast<std::size_t>(n) * width);
  });
}

}  // namespace detail

/// Returns the names and logical shapes of all parameters, sorted by name, as the same list on every rank: those of all
/// stages of a `pipeline`, along which this is collective.
template <compute_device Device, class Model>
std::vector<safetensors_declaration> shapes_of(const context<Device>& ctx, Model& model, safetensors_dtype dtype) {
  std::string lines;
  model.visit([&](auto& p) {
    if (p.counts()) lines += detail::line_of(p.info());
  });
  std::vector<std::string> stages{lines};
  if constexpr (requires { model.executor().along(); })
    stages = gather_texts(ctx.device, model.executor().along(), lines);
  std::vector<safetensors_declaration> all;
  for (const std::string& text : stages)
    for (std::size_t at = 0, end = 0; at < text.size(); at = end + 1) {
      end = text.find('\n', at);
      all.push_back(detail::shape_of_line(std::string_view(text).substr(at, end - at), dtype));
    }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return all;
}

/// Makes the files in `folder`, with their headers and full sizes. For one rank.
inline void create_files(const safetensors_shards& shards, const std::string& folder, const std::string& field) {
  for (const auto& f : shards.files()) {
    file_of_parts file = file_of_parts::create((std::filesystem::path(folder) / f.name).string(), f.bytes, field);
    file.write(0, f.header.data(), f.header.size());
    file.close();
  }
}

/// Writes this rank's share of the master values, converted to `dtype`, into files that `create_files` has made and
/// this rank sees; to where `place` says that a parameter's rows are, if it is given. Each element is written by one
/// rank. Not collective. Throws `error` starting with `field`.
template <compute_device Device, class Model>
void write_weights(const context<Device>& ctx, Model& model, const safetensors_shards& shards, safetensors_dtype dtype,
                   const std::string& folder, const std::string& field,
                   const std::function<weight_place(const std::string&)>& place = {}) {
  std::map<std::size_t, file_of_parts> files;
  std::vector<std::byte> converted_run;
  model.visit([&](auto& p) {
    const parameter_piece own = p.piece();
    if (own.size() == 0 || !detail::writes(ctx, p)) return;
    using master = typename std::remove_cvref_t<decltype(p)>::master_type;
    std::vector<master> values(static_cast<std::size_t>(own.size()));
    ctx.device.download(values.data(), std::as_const(p).value(), values.size() * sizeof(master),
                        ctx.device.main_stream());
    const weight_place there = place ? place(p.name()) : weight_place{p.name()};
    const safetensors_shards::place& where = shards.of(there.tensor);
    if (!files.contains(where.file))
      files.emplace(where.file, file_of_parts::open(
                                    (std::filesystem::path(folder) / shards.files()[where.file].name).string(), field));
    file_of_parts& file = files.at(where.file);
    std::int64_t logical = 1;
    for (std::int64_t n : p.info().shape) logical *= n;
    const std::int64_t row = p.info().shape.empty() ? 1 : logical / std::max<std::int64_t>(p.info().shape[0], 1);
    detail::each_run_of(p.part(), own, logical, [&](std::int64_t to, std::int64_t from, std::int64_t count) {
      detail::convert_into(dtype, converted_run, values.data() + (from - own.begin), static_cast<std::size_t>(count));
      detail::write_run(file, where.offset, there, row, to, converted_run, size_of(dtype));
    });
  });
  for (auto& [index, file] : files) file.close();
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
