// Reads a whole committed step, or one rank's file of it, and compares every checksum.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/share.hpp"
#include "plait/checkpoint/step_data.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/io/file_system.hpp"

namespace plait {

/// Returns all faults of a step, one sentence each; nothing if the step equals what was saved. Reads every byte once.
/// `each`, if given, is called before each range of bytes; an exception from it ends the work.
inline std::vector<std::string> verify_step(file_system& files, const std::string& path,
                                            const std::function<void()>& each = {}) {
  manifest saved;
  try {
    saved = read_step(files, path);
  } catch (const error& e) {
    return {e.what()};
  }
  step_data data(files, path, saved);
  std::vector<std::string> found;
  const auto check = [&](const stored_bytes& stored, auto&& name) {  // `name` is only called for error texts
    if (each) each();
    try {
      if (!data.is_whole(stored)) found.push_back(data.damage(stored, name()));
    } catch (const error& e) {
      found.push_back(cat({name(), " cannot be read: ", e.what()}));
    }
  };
  for (std::uint32_t i = 0; i < saved.files.size(); ++i) {
    const stored_file& file = saved.files[i];
    try {
      const std::uint64_t size = data.hold(i)->size();
      if (size != file.bytes)
        found.push_back(cat({"'", detail::path_in(path, file.path), "' has ", size, " bytes, and the manifest says ",
                             file.bytes, size < file.bytes ? ": it is truncated" : ""}));
    } catch (const error& e) {
      found.push_back(e.what());
      continue;
    }
    check({i, file.header_crc32c, 0, file.header_bytes}, [] { return std::string("the header"); });
  }
  for (const stored_blob& blob : saved.blobs) check(blob.stored, [&] { return detail::name_of_blob(blob); });
  for (const stored_tensor& tensor : saved.tensors)
    for (const stored_box& part : tensor.boxes) check(part.stored, [&] { return detail::name_of_box(tensor, part); });
  return found;
}

namespace detail {

/// Returns the header, tensors and blobs of a writer's file, with their checksums.
inline std::vector<stored_bytes> ranges_of(const written_share& share) {
  std::vector<stored_bytes> all{{0, share.file.header_crc32c, 0, share.file.header_bytes}};
  for (const stored_tensor& t : share.tensors)
    for (const stored_box& b : t.boxes) all.push_back(b.stored);
  for (const stored_blob& b : share.blobs) all.push_back(b.stored);
  return all;
}

/// Re-reads a rank's data file and compares its checksums, some bytes at a time.
class own_file_check {
 public:
  enum class state { unfinished, whole, faulty };

  own_file_check(std::uint64_t step, std::string path, std::vector<stored_bytes> ranges)
      : step_(step), path_(std::move(path)), ranges_(std::move(ranges)) {}

  std::uint64_t step() const { return step_; }

  /// Reads the next bytes, at most 8 MiB. Unreadable bytes count as a fault.
  state read_next(file_system& files) {
    try {
      if (!file_) file_ = files.open(path_);
      if (at_ == ranges_.size()) return state::whole;
      const stored_bytes& range = ranges_[at_];
      const std::uint64_t some = std::min(std::uint64_t{8} << 20, range.bytes - done_);
      sum_ = crc32c_of(*file_, range.position + done_, some, buffer_, sum_);
      done_ += some;
      if (done_ < range.bytes) return state::unfinished;
      if (sum_ != range.crc32c) return state::faulty;
      ++at_;
      done_ = 0;
      sum_ = 0;
      return at_ == ranges_.size() ? state::whole : state::unfinished;
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
  std::size_t at_ = 0;  ///< index of the range, and its bytes read so far
  std::uint64_t done_ = 0;
  std::uint32_t sum_ = 0;
};

/// Decides which steps a rank re-reads: as few as possible, so that a verified step is always among the kept steps
/// after the next save.
class check_turns {
 public:
  /// Returns whether to re-read the step that was just committed, if the newest `last` steps are kept. With `last` 1
  /// the answer is no, because the next save would remove the step.
  bool is_next(std::uint64_t last) {
    ++since_;
    if (last < 2 || (is_known_ && since_ < last - 1)) return false;
    since_ = 0;
    return is_known_ = true;
  }
  /// Notes that the last verification did not complete.
  void forget() { is_known_ = false; }

 private:
  bool is_known_ = false;
  std::uint64_t since_ = 0;  ///< steps committed since the last one that was re-read
};

}  // namespace detail

}  // namespace plait

#include "plait/core/macros_on.hpp"
