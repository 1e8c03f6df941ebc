// Writes a safetensors file whose tensors are declared first and arrive piece by piece, and keeps their checksums.
// Whole tensors at once: checkpoint/safetensors_writer.hpp. Several threads that share a file write by the plan
// themselves.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/safetensors_writer.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/crc32c.hpp"
#include "plait/io/file_system.hpp"

namespace plait {

/// A safetensors file on its way to the disk. Destroyed before `finish`, it leaves a file that no reader accepts.
class safetensors_stream {
 public:
  /// Creates the file, which must not exist, and writes its header.
  safetensors_stream(file_system& files, const std::string& path, safetensors_plan plan)
      : plan_(std::move(plan)), sums_(plan_.bytes.size(), 0), file_(files.create(path)) {
    const auto header = std::as_bytes(std::span(plan_.header));
    header_sum_ = crc32c(header);
    file_->write(0, header);
    end_ = header.size();
  }

  /// Writes the next bytes of the data, which may end anywhere, within a tensor or after several. Throws `error` when
  /// they are more than were declared.
  void append(std::span<const std::byte> bytes) {
    expect(bytes);
    file_->write(end_, bytes);
    sum_up(bytes);
  }
  /// Appends bytes that stay as they are until `finish` has returned or this is destroyed: they are summed up
  /// while the system writes them, where it does so by itself (`open_file::start_write`).
  void append_lasting(std::span<const std::byte> bytes) {
    expect(bytes);
    file_->start_write(end_, bytes);
    sum_up(bytes);
  }

  /// Syncs and closes the file. Throws `error` if bytes are missing.
  void finish() {
    if (end_ != plan_.file_bytes)
      fail({"'", file_->path(), "': ", plan_.file_bytes - end_, " bytes of what was declared are missing"});
    file_->sync();
    file_.reset();
  }

  const safetensors_plan& plan() const { return plan_; }
  /// Returns the checksum of the header with its length and padding.
  std::uint32_t header_crc32c() const { return header_sum_; }
  /// Returns the checksum of each tensor's data, in the order they were declared; of what has been appended so far.
  const std::vector<std::uint32_t>& crc32c_of_tensors() const { return sums_; }

 private:
  void expect(std::span<const std::byte> bytes) const {
    if (bytes.size() > plan_.file_bytes - end_) {
      fail({"'", file_->path(), "': ", bytes.size(), " bytes are too many; ", plan_.file_bytes - end_,
            " are left of what was declared"});
    }
  }
  void sum_up(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const std::uint64_t left = plan_.positions[tensor_] + plan_.bytes[tensor_] - end_;
      const auto some = bytes.first(std::min<std::uint64_t>(left, bytes.size()));
      sums_[tensor_] = crc32c(some, sums_[tensor_]);
      end_ += some.size();
      bytes = bytes.subspan(some.size());
      if (some.size() == left) ++tensor_;
    }
  }

  safetensors_plan plan_;
  std::vector<std::uint32_t> sums_;
  std::unique_ptr<open_file> file_;
  std::uint32_t header_sum_ = 0;
  std::uint64_t end_ = 0;   ///< of what has been written
  std::size_t tensor_ = 0;  ///< the one that the next byte is of, unless it has none
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
