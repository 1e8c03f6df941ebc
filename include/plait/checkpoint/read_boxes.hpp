// Reads parts of the tensors of a saved step, whatever boxes they were written in. It knows ranges of a tensor and no
// ranks: checkpoint/load_state.hpp does. Next: checkpoint/manifest.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
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

/// The data of a saved step. Used by one thread.
class box_reader {
 public:
  /// `path` is the step's directory, whose manifest must outlive this.
  box_reader(file_system& files, std::string path, const manifest& saved)
      : path_(std::move(path)), saved_(saved), open_(files, paths_of(path_, saved)) {}

  /// Reads the elements of `wanted`, a box of the tensor, row-major, into `out`. Boxes that are needed whole are read
  /// whole and their checksums compared; of others there are sums to compare (`take_partly_read`). Throws `error` that
  /// names the tensor, the box, file and position where they differ, and the path where it cannot be read.
  void read(const stored_tensor& tensor, const box& wanted, std::byte* out) {
    const std::size_t width = size_of(tensor.dtype);
    for (const std::uint32_t i : boxes_.overlapping(tensor, wanted)) {
      const stored_box& stored = tensor.boxes[i];
      const box whole = tensor.box_of(stored);
      const std::optional<box> common = intersection(whole, wanted);
      if (!common) continue;
      const std::int64_t elements = common->local_size();
      if (elements == whole.local_size() && detail::common_run(*common, whole, wanted).first == elements) {
        read_checked(tensor, stored, out + static_cast<std::size_t>(detail::place_in(wanted, common->offset)) * width);
      } else if (elements == whole.local_size()) {
        scratch_.grow(stored.stored.bytes);
        read_checked(tensor, stored, scratch_.data());
        detail::each_common_run(*common, whole, wanted, [&](std::int64_t from, std::int64_t to, std::int64_t n) {
          std::memcpy(out + static_cast<std::size_t>(to) * width,
                      scratch_.data() + static_cast<std::size_t>(from) * width, static_cast<std::size_t>(n) * width);
        });
      } else {
        partly_.push_back({&tensor, i, 0, 0});
        read_part(stored, whole, wanted, *common, width, out);
      }
    }
  }
  /// Returns which boxes overlap, for whoever plans reads.
  stored_boxes& boxes() { return boxes_; }
  /// Reads a box whole, for its checksum alone.
  void verify(const stored_tensor& tensor, std::uint32_t box) {
    scratch_.grow(tensor.boxes[box].stored.bytes);
    read_checked(tensor, tensor.boxes[box], scratch_.data());
  }
  /// Throws the `error` of a box whose checksum is another.
  [[noreturn]] void damaged(const stored_tensor& tensor, const stored_box& b) const {
    damaged(b.stored, cat({"tensor '", tensor.name, "' box ", text_of_box(tensor, b)}));
  }
  /// Returns what was partly read since the last call.
  std::vector<partly_read> take_partly_read() { return std::exchange(partly_, {}); }
  /// Reads a blob. Throws `error` as for tensors.
  std::string read(const stored_blob& blob) {
    std::string text(blob.stored.bytes, '\0');
    const auto bytes = std::as_writable_bytes(std::span(text));
    file(blob.stored.file).read(blob.stored.position, bytes);
    bytes_ += bytes.size();
    if (crc32c(bytes) != blob.stored.crc32c) damaged(blob.stored, cat({"blob '", blob.name, "'"}));
    return text;
  }
  /// Bytes read so far.
  std::uint64_t bytes() const { return bytes_; }
  /// Returns a data file, for whoever reads from it (checkpoint/reads_ahead.hpp); `add_bytes` says how much.
  std::shared_ptr<const file_handle> hold(std::uint32_t file) { return open_.hold(file); }
  void add_bytes(std::uint64_t bytes) { bytes_ += bytes; }

 private:
  static constexpr std::int64_t long_run = stored_boxes::long_run;
  static constexpr std::int64_t most_at_once = 4 << 20;

  /// Reads a box whole and compares its checksum, while its bytes are in the cache. Large ones, which the system reads
  /// past its own cache to memory that lies behind a page as they do in the file, are copied from there where `out`
  /// does not.
  void read_checked(const stored_tensor& tensor, const stored_box& stored, std::byte* out) {
    constexpr std::uint64_t at_once = std::uint64_t{4} << 20, page = 4096, large = std::uint64_t{1} << 20;
    const file_handle& from = file(stored.stored.file);
    const std::uint64_t behind = stored.stored.position % page;
    const bool copies = stored.stored.bytes >= large && reinterpret_cast<std::uintptr_t>(out) % page != behind;
    if (copies) bounce_.grow(at_once + page);
    std::uint32_t sum = 0;
    for (std::uint64_t at = 0; at < stored.stored.bytes; at += at_once) {
      const std::uint64_t bytes = std::min(at_once, stored.stored.bytes - at);
      const std::span<std::byte> some(copies ? bounce_.data() + behind : out + at, bytes);
      from.read(stored.stored.position + at, some);
      sum = crc32c(some, sum);
      if (copies) std::memcpy(out + at, some.data(), bytes);
    }
    bytes_ += stored.stored.bytes;
    if (sum != stored.stored.crc32c) damaged(tensor, stored);
  }

  /// Reads the runs of a box in the order of the file, several at a time where they are short, and sums them up in the
  /// last of `partly_`.
  void read_part(const stored_box& stored, const box& whole, const box& wanted, const box& common, std::size_t width,
                 std::byte* out) {
    const auto w = static_cast<std::int64_t>(width);
    struct piece {
      std::int64_t from, to, bytes;
    };
    std::vector<piece> together;
    std::int64_t summed = 0, last_gap = -1;
    std::uint32_t power = 0;
    const auto zeros_to = [&](std::int64_t end) {  // runs that follow each other in equal steps share a power
      if (end - summed != last_gap) power = detail::crc32c_power(static_cast<std::uint64_t>(last_gap = end - summed));
      partly_.back().sum = detail::crc32c_multiply(power, partly_.back().sum);
      summed = end;
    };
    const auto flush = [&] {
      if (together.empty()) return;
      const std::int64_t begin = together.front().from, end = together.back().from + together.back().bytes;
      std::span<std::byte> into(out + together.front().to, static_cast<std::size_t>(end - begin));
      if (together.size() > 1) {
        scratch_.grow(static_cast<std::size_t>(end - begin));
        into = scratch_.first(into.size());
      }
      file(stored.stored.file).read(stored.stored.position + static_cast<std::uint64_t>(begin), into);
      bytes_ += into.size();
      for (const piece& p : together) {
        const auto bytes = std::span<const std::byte>(into).subspan(static_cast<std::size_t>(p.from - begin),
                                                                    static_cast<std::size_t>(p.bytes));
        zeros_to(p.from + p.bytes);
        partly_.back().sum ^= crc32c(bytes);
        partly_.back().bytes += bytes.size();
        if (together.size() > 1) std::memcpy(out + p.to, bytes.data(), bytes.size());
      }
      together.clear();
    };
    detail::each_common_run(common, whole, wanted, [&](std::int64_t from, std::int64_t to, std::int64_t n) {
      const piece next{from * w, to * w, n * w};
      if (!together.empty() &&
          (next.bytes >= long_run || next.from + next.bytes - together.front().from > most_at_once))
        flush();
      together.push_back(next);
    });
    flush();
    zeros_to(static_cast<std::int64_t>(stored.stored.bytes));
  }

  static std::vector<std::string> paths_of(const std::string& path, const manifest& saved) {
    std::vector<std::string> all;
    for (const stored_file& f : saved.files) all.push_back(path + "/" + f.path);
    return all;
  }
  const file_handle& file(std::uint32_t i) { return open_.at(i); }
  [[noreturn]] void damaged(const stored_bytes& where, const std::string& what) const {
    fail({"'", path_, "/", saved_.files[where.file].path, "' is damaged: ", what, ", ", where.bytes, " bytes from ",
          where.position, " on, has another checksum than when it was written"});
  }

  std::string path_;
  const manifest& saved_;
  open_files open_;
  stored_boxes boxes_;
  byte_buffer scratch_, bounce_;
  std::vector<partly_read> partly_;
  std::uint64_t bytes_ = 0;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
