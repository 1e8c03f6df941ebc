// Reads the tensors of a saved step from end to end in row-major order, some elements at a time, whatever boxes they
// were written in: memory for a chunk does for a tensor of any size. Parts of any shape: checkpoint/reads_ahead.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/boxes.hpp"
#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/reads_ahead.hpp"
#include "plait/checkpoint/step_data.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/file_system.hpp"

namespace plait {

/// Returns the number of elements of a tensor, whose manifest was checked.
inline std::int64_t elements_of(const stored_tensor& tensor) { return elements_of_shape(tensor.shape); }

/// Returns how many elements to read at once: as many as fit in `bytes`, at least one, in whole rows where a row fits
/// (whole planes of rows where those do), so that a chunk is one box.
inline std::int64_t chunk_elements(const stored_tensor& tensor, std::uint64_t bytes) {
  const auto most = static_cast<std::int64_t>(std::max<std::uint64_t>(bytes / size_of(tensor.dtype), 1));
  std::int64_t row = 1;
  for (std::size_t d = tensor.shape.size(); d-- > 0;) {
    if (tensor.shape[d] == 0 || row > most / tensor.shape[d]) break;
    row *= tensor.shape[d];
  }
  return most - most % row;
}

/// Calls f(begin, end, bytes) for each chunk of a tensor in turn: elements [begin, end), which take about
/// `chunk_bytes`.
template <class F>
void each_chunk(const stored_tensor& tensor, std::uint64_t chunk_bytes, F&& f) {
  const std::int64_t size = elements_of(tensor), chunk = chunk_elements(tensor, chunk_bytes);
  for (std::int64_t begin = 0; begin < size; begin += std::min(size - begin, chunk)) {
    const std::int64_t end = begin + std::min(size - begin, chunk);
    f(begin, end, static_cast<std::uint64_t>(end - begin) * size_of(tensor.dtype));
  }
}

/// Reads a step's tensors one after the other, each from its first element to its last. Used by one thread.
class flat_reader {
 public:
  /// `path` is the step's directory, whose manifest must outlive this.
  flat_reader(file_system& files, std::string path, const manifest& saved)
      : saved_(saved), data_(files, std::move(path), saved) {}

  /// Reads the next elements of a tensor into `out`, from `begin` on, up to `end`; with the last of them, the checksums
  /// of all its boxes have been compared. Throws `error` that names the tensor, box, file and position where they
  /// differ, and as `reads_ahead::finish` does; or if the elements are not the next ones.
  void read(const stored_tensor& tensor, std::int64_t begin, std::int64_t end, std::byte* out) {
    if (begin == 0) begin_tensor(tensor);
    if (tensor_ != &tensor || begin != next_) fail({"the elements of '", tensor.name, "' are read out of order"});
    stored_box all;
    std::copy(tensor.shape.begin(), tensor.shape.end(), all.extent.begin());
    std::vector<wanted_box> wanted;
    for (const box& part : boxes_of_flat_range(tensor.box_of(all), begin, end)) {
      wanted.push_back({&tensor, part, out});
      out += static_cast<std::uint64_t>(part.local_size()) * size_of(tensor.dtype);
    }
    reads_ahead ahead(saved_, data_, std::move(wanted), {});
    ahead.finish();
    for (const auto& [owner, part] : ahead.take_partly_read()) {
      const auto found = sums_.try_emplace(part.box, 0u).first;
      found->second ^= part.sum;
    }
    next_ = end;
    if (end == elements_of(tensor)) end_tensor();
  }
  /// Reads a blob whole. Throws `error` as for tensors.
  std::string read(const stored_blob& blob) { return data_.read(blob); }

 private:
  void begin_tensor(const stored_tensor& tensor) {
    tensor_ = &tensor;
    next_ = 0;
    sums_.clear();
  }
  /// Boxes that lay in one chunk were compared when they were read.
  void end_tensor() {
    for (const auto& [box, sum] : sums_) {
      const stored_box& stored = tensor_->boxes[box];
      if (sum != stored.stored.crc32c) data_.damaged(*tensor_, stored);
    }
    tensor_ = nullptr;
  }

  const manifest& saved_;
  step_data data_;
  const stored_tensor* tensor_ = nullptr;  ///< the one that is being read
  std::int64_t next_ = 0;
  std::map<std::uint32_t, std::uint32_t> sums_;  ///< by box, of those that are read in parts
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
