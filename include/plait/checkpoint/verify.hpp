// Reads a whole committed step, or one rank's file of it, and compares every checksum; or compares two steps by their
// elements.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/checkpoint/share.hpp"
#include "plait/checkpoint/step_data.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/io/file_system.hpp"

namespace plait {

namespace detail {

/// Reads the ranges of a step's files and puts what is wrong into words.
class step_verifier {
 public:
  step_verifier(file_system& files, const std::string& path, const std::function<void()>& each)
      : files_(files), path_(path), each_(each) {}

  std::vector<std::string> run() {
    try {
      manifest_ = read_step(files_, path_);
    } catch (const error& e) {
      return {e.what()};
    }
    data_.emplace(files_, path_, manifest_);
    for (std::uint32_t i = 0; i < manifest_.files.size(); ++i) check_file(i);
    for (const stored_blob& blob : manifest_.blobs) check(blob.stored, [&] { return name_of_blob(blob); });
    for (const stored_tensor& tensor : manifest_.tensors)
      for (const stored_box& part : tensor.boxes) check(part.stored, [&] { return name_of_box(tensor, part); });
    return std::move(found_);
  }

 private:
  void check_file(std::uint32_t i) {
    const stored_file& file = manifest_.files[i];
    try {
      const std::uint64_t size = data_->hold(i)->size();
      if (size != file.bytes)
        found_.push_back(cat({"'", path_in(path_, file.path), "' has ", size, " bytes, and the manifest says ",
                              file.bytes, size < file.bytes ? ": it is truncated" : ""}));
    } catch (const error& e) {
      found_.push_back(e.what());
      return;
    }
    check({i, file.header_crc32c, 0, file.header_bytes}, [] { return std::string("the header"); });
  }
  /// `name` is called for the text of an error.
  template <class Name>
  void check(const stored_bytes& stored, Name&& name) {
    if (each_) each_();
    try {
      if (!data_->is_whole(stored)) found_.push_back(data_->damage(stored, name()));
    } catch (const error& e) {
      found_.push_back(cat({name(), " cannot be read: ", e.what()}));
    }
  }

  file_system& files_;
  const std::string& path_;
  const std::function<void()>& each_;
  manifest manifest_;
  std::optional<step_data> data_;
  std::vector<std::string> found_;
};

}  // namespace detail

/// Returns all that is wrong with a step, each in a sentence; nothing if it is exactly what was saved. Reads every byte
/// of it once. `each`, if given, is called before each range of bytes, and its exceptions end the work.
inline std::vector<std::string> verify_step(file_system& files, const std::string& path,
                                            const std::function<void()>& each = {}) {
  return detail::step_verifier(files, path, each).run();
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

/// Reads a rank's data file again and compares its checksums, some bytes at a time.
class own_file_check {
 public:
  enum class state { under_way, whole, faulty };

  own_file_check(std::uint64_t step, std::string path, std::vector<stored_bytes> ranges)
      : step_(step), path_(std::move(path)), ranges_(std::move(ranges)) {}

  std::uint64_t step() const { return step_; }

  /// Reads the next bytes, at most 8 MiB. What cannot be read is faulty.
  state read_next(file_system& files) {
    try {
      if (!file_) file_ = files.open(path_);
      if (at_ == ranges_.size()) return state::whole;
      const stored_bytes& range = ranges_[at_];
      const std::uint64_t some = std::min(std::uint64_t{8} << 20, range.bytes - done_);
      sum_ = crc32c_of(*file_, range.position + done_, some, buffer_, sum_);
      done_ += some;
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

/// Which steps a rank reads again: as few as possible, so that one verified step is among the steps that stay after the
/// next save.
class check_turns {
 public:
  /// Returns whether a step that has just been committed is one to read again, where the newest `last` stay. Where only
  /// the newest does, it would be gone before a question about it.
  bool is_next(std::uint64_t last) {
    ++since_;
    if (last < 2 || (is_known_ && since_ < last - 1)) return false;
    since_ = 0;
    return is_known_ = true;
  }
  /// Notes that what was begun came to nothing.
  void forget() { is_known_ = false; }

 private:
  bool is_known_ = false;
  std::uint64_t since_ = 0;  ///< steps that were committed after the one that was read
};

}  // namespace detail

/// By how much the elements of two tensors a and b of one shape and type differ.
struct tensor_difference {
  std::uint64_t elements = 0;   ///< that were compared
  std::uint64_t differing = 0;  ///< in any bit: 0 and -0 count, and so do two NaNs
  double largest = 0;           ///< the largest finite |a| or |b|
  double absolute = 0;  ///< the largest |a - b|; infinite where one is finite and the other not; two NaNs are alike
  double relative = 0;  ///< the largest |a - b| / max(|a|, |b|) of one element; at most 2, or infinite

  bool identical() const { return differing == 0; }
  /// Whether no element differs by more than `tolerance` times the largest of the tensor. Noise in elements that are
  /// small relative to others counts for as little as in a product with the tensor.
  bool within(double tolerance) const { return absolute <= tolerance * largest; }
};

namespace detail {

inline void add_size(double x, tensor_difference& into) {
  const double size = std::abs(x);
  if (size <= std::numeric_limits<double>::max()) into.largest = std::max(into.largest, size);
}

/// Adds two elements that differ. `gap` is |a - b| of numbers that are both finite.
inline void add_gap(double a, double b, double gap, tensor_difference& into) {
  ++into.differing;
  if (std::isnan(a) && std::isnan(b)) return;
  if (!std::isfinite(a) || !std::isfinite(b)) {
    into.absolute = into.relative = std::numeric_limits<double>::infinity();
  } else if (gap > 0) {
    into.absolute = std::max(into.absolute, gap);
    into.relative = std::max(into.relative, gap / std::max(std::abs(a), std::abs(b)));
  }
}

/// Adds elements that are stored as `Stored`.
template <class Stored>
void add_elements(std::span<const std::byte> a, std::span<const std::byte> b, tensor_difference& into) {
  const auto value = [](Stored stored) {
    if constexpr (std::same_as<Stored, bf16>)
      return to_float(stored);
    else
      return value_of_element(stored);
  };
  for (std::size_t at = 0; at < a.size(); at += sizeof(Stored)) {
    Stored x{}, y{};
    std::memcpy(&x, a.data() + at, sizeof(Stored));
    std::memcpy(&y, b.data() + at, sizeof(Stored));
    const auto p = value(x), q = value(y);
    add_size(static_cast<double>(p), into);
    if (std::memcmp(&x, &y, sizeof(Stored)) == 0) continue;
    add_size(static_cast<double>(q), into);
    double gap = 0;
    if constexpr (std::integral<decltype(value(x))>) {  // exact in 64 bits too
      const auto u = static_cast<std::uint64_t>(p), v = static_cast<std::uint64_t>(q);
      gap = static_cast<double>(p > q ? u - v : v - u);
    } else {
      gap = std::abs(static_cast<double>(p) - static_cast<double>(q));
    }
    add_gap(static_cast<double>(p), static_cast<double>(q), gap, into);
  }
  into.elements += a.size() / sizeof(Stored);
}

}  // namespace detail

/// Adds elements of two tensors to what is known of their difference. Throws `error` if there are not as many of each.
inline void add_difference(safetensors_dtype type, std::span<const std::byte> a, std::span<const std::byte> b,
                           tensor_difference& into) {
  if (a.size() != b.size() || a.size() % size_of(type) != 0)
    fail({"elements of ", a.size(), " and of ", b.size(), " bytes cannot be compared as ", name_of(type)});
  detail::with_stored_type(type, [&]<class Stored>(Stored) { detail::add_elements<Stored>(a, b, into); });
}

/// Reads two tensors of one shape and type from end to end, with memory for about `chunk_bytes` of each, and compares
/// them. Throws `error` where they are of another shape or type, and as `flat_reader::read` does for what cannot be
/// read or is damaged.
inline tensor_difference compare_tensors(flat_reader& a, const stored_tensor& in_a, flat_reader& b,
                                         const stored_tensor& in_b, std::uint64_t chunk_bytes) {
  if (in_a.shape != in_b.shape || in_a.dtype != in_b.dtype)
    fail({"tensor '", in_a.name, "' and tensor '", in_b.name, "' are of another shape or type"});
  tensor_difference out;
  std::vector<std::byte> values_a, values_b;
  each_chunk(in_a, chunk_bytes, [&](std::int64_t begin, std::int64_t end, std::uint64_t bytes) {
    values_a.resize(bytes);
    values_b.resize(bytes);
    a.read(in_a, begin, end, values_a.data());
    b.read(in_b, begin, end, values_b.data());
    add_difference(in_a.dtype, values_a, values_b, out);
  });
  return out;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
