// Whole tensors of a model's weights, wherever they lie, read in parts: from a safetensors file in blocks, from memory,
// or as rows of another tensor (models/weights_order.hpp). No file is mapped, so that one which shrinks meanwhile
// is an error in words.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/safetensors_format.hpp"
#include "plait/checkpoint/safetensors_reader.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/file_system.hpp"
#include "plait/io/posix_file_system.hpp"

namespace plait {

/// A tensor with a name, whose elements are read when somebody asks for them.
struct weight_tensor {
  std::string name;
  safetensors_dtype dtype = safetensors_dtype::f32;
  std::vector<std::int64_t> shape;
  /// Reads elements [begin, end), counted row-major, into `out`. Several threads may call it at once.
  std::function<void(std::int64_t begin, std::int64_t end, std::byte* out)> read;

  /// Number of elements.
  std::int64_t size() const { return elements_of_shape(shape); }
};

/// A tensor that lies in memory, which must outlive the result. Throws `error` that names it if it has not the bytes
/// that its shape takes.
inline weight_tensor weight_in_memory(const safetensors_entry& entry) {
  if (safetensors_bytes(entry.shape, entry.dtype) != entry.bytes.size())
    fail({"tensor '", entry.name, "' has ", entry.bytes.size(), " bytes, which are not those of its shape ",
          detail::shape_text(entry.shape), " in ", name_of(entry.dtype)});
  return {entry.name, entry.dtype, entry.shape,
          [bytes = entry.bytes, width = size_of(entry.dtype)](std::int64_t begin, std::int64_t end, std::byte* out) {
            if (begin == end) return;
            std::memcpy(out, bytes.data() + static_cast<std::size_t>(begin) * width,
                        static_cast<std::size_t>(end - begin) * width);
          }};
}
inline std::vector<weight_tensor> weights_in_memory(std::span<const safetensors_entry> entries) {
  std::vector<weight_tensor> all;
  for (const safetensors_entry& e : entries) all.push_back(weight_in_memory(e));
  return all;
}

/// Opens a safetensors file and returns its tensors, in the order of their data; nothing but the header is read before
/// somebody asks for elements. The tensors keep the file open. Throws `error` that starts with `field` and names the
/// path where it cannot be opened or read, and as `parse_safetensors_header`; `weight_tensor::read` throws `error` that
/// names the path where the file has become shorter since.
inline std::vector<weight_tensor> weights_of_file(const std::string& path, const std::string& field,
                                                  file_system& files = machine_files()) {
  const std::string source = cat({field, ": '", path, "'"});
  std::shared_ptr<const open_file> file;
  std::uint64_t size = 0;
  std::vector<std::byte> start(8);
  try {
    file = files.open(path);
    size = file->size();
    file->read(0, std::span(start).first(static_cast<std::size_t>(std::min<std::uint64_t>(size, 8))));
  } catch (const error& e) {
    fail({field, ": ", e.what()});
  }
  start.resize(safetensors_header_end(start, size, source));
  try {
    file->read(0, start);
  } catch (const error& e) {
    fail({field, ": ", e.what()});
  }
  std::vector<weight_tensor> all;
  for (safetensors_position& t : parse_safetensors_header(start, size, source).tensors)
    all.push_back(
        {std::move(t.name), t.dtype, std::move(t.shape),
         [file, position = t.position, width = size_of(t.dtype)](std::int64_t begin, std::int64_t end, std::byte* out) {
           file->read(position + static_cast<std::uint64_t>(begin) * width,
                      {out, static_cast<std::size_t>(end - begin) * width});
         }});
  return all;
}

/// Where the rows of a tensor lie in one of another tool, which may have those of others too.
struct weight_place {
  std::string tensor;                                  ///< its name there
  std::int64_t rows = 0;                               ///< that it has there
  std::function<std::int64_t(std::int64_t)> row_at{};  ///< which of them row i is; empty: the i-th
};

/// Calls f(first element, its place, elements) for runs of the elements [begin, end) of a tensor, whose rows have `row`
/// elements, that follow each other where row i is row `row_at(i)` too.
template <class RowAt, class F>
void each_row_run(std::int64_t begin, std::int64_t end, std::int64_t row, RowAt&& row_at, F&& f) {
  while (begin < end) {
    const std::int64_t first = begin / row, there = row_at(first);
    std::int64_t last = first + 1;
    while (last * row < end && row_at(last) == there + (last - first)) ++last;
    const std::int64_t n = std::min(end, last * row) - begin;
    f(begin, there * row + begin % row, n);
    begin += n;
  }
}

/// Calls f(begin, end) for pieces of `n` elements of `type` of some MB each.
template <class F>
void each_block(std::int64_t n, safetensors_dtype type, F&& f) {
  const auto most = static_cast<std::int64_t>((std::size_t{4} << 20) / size_of(type));
  for (std::int64_t begin = 0; begin < n; begin += most) f(begin, std::min(n, begin + most));
}

/// Returns whether two tensors have the same type, shape and elements, which are read in blocks.
inline bool same_elements(const weight_tensor& a, const weight_tensor& b) {
  if (a.dtype != b.dtype || a.shape != b.shape) return false;
  bool same = true;
  std::vector<std::byte> here, there;
  each_block(a.size(), a.dtype, [&](std::int64_t begin, std::int64_t end) {
    if (!same) return;
    here.resize(static_cast<std::size_t>(end - begin) * size_of(a.dtype));
    there.resize(here.size());
    a.read(begin, end, here.data());
    b.read(begin, end, there.data());
    same = here == there;
  });
  return same;
}

/// Returns all bytes of a tensor.
inline std::vector<std::byte> bytes_of(const weight_tensor& tensor) {
  std::vector<std::byte> all(static_cast<std::size_t>(tensor.size()) * size_of(tensor.dtype));
  tensor.read(0, tensor.size(), all.data());
  return all;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
