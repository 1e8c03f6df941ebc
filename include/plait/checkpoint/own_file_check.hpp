// A rank's data file of a committed step, read again and compared with its checksums, a piece at a time, so that
// whoever has time for it can do something else in between. The whole step at once: checkpoint/verify.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/share.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/io/crc32c.hpp"
#include "plait/io/file_system.hpp"

namespace plait::detail {

/// Returns the header, tensors and blobs of a writer's file, with their checksums.
inline std::vector<stored_bytes> ranges_of(const written_share& share) {
  std::vector<stored_bytes> all{{0, share.file.header_crc32c, 0, share.file.header_bytes}};
  for (const stored_tensor& t : share.tensors)
    for (const stored_box& b : t.boxes) all.push_back(b.stored);
  for (const stored_blob& b : share.blobs) all.push_back(b.stored);
  return all;
}

class own_file_check {
 public:
  enum class state { under_way, whole, faulty };

  own_file_check(std::uint64_t step, std::string path, std::vector<stored_bytes> ranges)
      : step_(step), path_(std::move(path)), ranges_(std::move(ranges)) {}

  std::uint64_t step() const { return step_; }

  /// Reads the next bytes, at most 8 MiB. What cannot be read is faulty.
  state go_on(file_system& files) {
    try {
      if (!file_) file_ = files.open(path_);
      if (at_ == ranges_.size()) return state::whole;
      const stored_bytes& range = ranges_[at_];
      constexpr std::uint64_t piece = std::uint64_t{8} << 20, page = 4096;
      buffer_.grow(piece + page);
      const std::span<std::byte> some(buffer_.data() + (range.position + done_) % page,
                                      std::min(piece, range.bytes - done_));
      file_->read(range.position + done_, some);
      sum_ = crc32c(some, sum_);
      done_ += some.size();
      if (done_ < range.bytes) return state::under_way;
      if (sum_ != range.crc32c) return state::faulty;
      ++at_;
      done_ = 0;
      sum_ = 0;
      return at_ == ranges_.size() ? state::whole : state::under_way;
    } catch (const std::exception&) {
      return state::faulty;
    }
  }

 private:
  std::uint64_t step_;
  std::string path_;
  std::vector<stored_bytes> ranges_;
  std::unique_ptr<open_file> file_;
  byte_buffer buffer_;
  std::size_t at_ = 0;  ///< the range, and how much of it is done
  std::uint64_t done_ = 0;
  std::uint32_t sum_ = 0;
};

/// Which steps a rank reads again: as few as keep one among those that stay after the next save.
class check_turns {
 public:
  /// Returns whether a step that has just been committed is one to read again, where the newest `last` stay. Where only
  /// the newest does, it would be gone before anybody asks.
  bool is_next(std::uint64_t last) {
    ++since_;
    if (last < 2 || (is_known_ && since_ < last - 1)) return false;
    since_ = 0;
    return is_known_ = true;
  }
  /// Says that what was begun came to nothing.
  void forget() { is_known_ = false; }

 private:
  bool is_known_ = false;
  std::uint64_t since_ = 0;  ///< steps that were committed after the one that was read
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
