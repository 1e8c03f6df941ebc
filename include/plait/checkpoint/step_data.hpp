// The data files of a saved step: which boxes of a tensor there are, blobs, the checksums of whole boxes. Tensors are
// read by checkpoint/reads_ahead.hpp, and from end to end by checkpoint/read_flat.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/boxes.hpp"
#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/stored_boxes.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/io/crc32c.hpp"
#include "plait/io/file_system.hpp"
#include "plait/io/open_files.hpp"

namespace plait {

/// Tells of a box that was not read whole what was read: where all of its elements were read once, by whatever readers,
/// the sums of these add up (by exclusive or) to its checksum.
struct partly_read {
  const stored_tensor* tensor = nullptr;
  std::uint32_t box = 0;    ///< index in `tensor->boxes`
  std::uint32_t sum = 0;    ///< as if those of the box that were not read were zeros that leave no trace
  std::uint64_t bytes = 0;  ///< how many
};

/// The data of a saved step. Used by one thread at a time.
class step_data {
 public:
  /// `path` is the step's directory, whose manifest must outlive this.
  step_data(file_system& files, std::string path, const manifest& saved)
      : path_(std::move(path)), saved_(saved), open_(files, paths_of(path_, saved)) {}

  /// Returns which boxes overlap, for whoever plans reads.
  stored_boxes& boxes() { return boxes_; }
  /// Reads a box for its checksum alone. Throws as `damaged`, and as `open_file::read` and `file_system::open`.
  void verify(const stored_tensor& tensor, std::uint32_t box) {
    constexpr std::uint64_t at_once = std::uint64_t{4} << 20, page = 4096;
    const stored_bytes& stored = tensor.boxes[box].stored;
    const open_file& from = open_.at(stored.file);
    scratch_.grow(static_cast<std::size_t>(std::min(stored.bytes, at_once) + page));
    std::byte* const to = scratch_.data() + stored.position % page;  // as in the file: the system's cache is passed
    std::uint32_t sum = 0;
    for (std::uint64_t at = 0; at < stored.bytes; at += at_once) {
      const std::span<std::byte> some(to, static_cast<std::size_t>(std::min(at_once, stored.bytes - at)));
      from.read(stored.position + at, some);
      sum = crc32c(some, sum);
    }
    bytes_ += stored.bytes;
    if (sum != stored.crc32c) damaged(tensor, tensor.boxes[box]);
  }
  /// Throws the `error` of a box whose checksum is another: it names the tensor, box, file and position.
  [[noreturn]] void damaged(const stored_tensor& tensor, const stored_box& b) const {
    damaged(b.stored, cat({"tensor '", tensor.name, "' box ", text_of_box(tensor, b)}));
  }
  /// Reads a blob. Throws `error` as for tensors.
  std::string read(const stored_blob& blob) {
    std::string text(blob.stored.bytes, '\0');
    const auto bytes = std::as_writable_bytes(std::span(text));
    open_.at(blob.stored.file).read(blob.stored.position, bytes);
    bytes_ += bytes.size();
    if (crc32c(bytes) != blob.stored.crc32c) damaged(blob.stored, cat({"blob '", blob.name, "'"}));
    return text;
  }
  /// Bytes read so far.
  std::uint64_t bytes() const { return bytes_; }
  /// Returns a data file, for whoever reads from it (checkpoint/reads_ahead.hpp); `add_bytes` says how much.
  std::shared_ptr<const open_file> hold(std::uint32_t file) { return open_.hold(file); }
  void add_bytes(std::uint64_t bytes) { bytes_ += bytes; }

 private:
  static std::vector<std::string> paths_of(const std::string& path, const manifest& saved) {
    std::vector<std::string> all;
    for (const stored_file& f : saved.files) all.push_back(path + "/" + f.path);
    return all;
  }
  [[noreturn]] void damaged(const stored_bytes& where, const std::string& what) const {
    fail({"'", path_, "/", saved_.files[where.file].path, "' is damaged: ", what, ", ", where.bytes, " bytes from ",
          where.position, " on, has another checksum than when it was written"});
  }

  std::string path_;
  const manifest& saved_;
  open_files open_;
  stored_boxes boxes_;
  byte_buffer scratch_;
  std::uint64_t bytes_ = 0;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
