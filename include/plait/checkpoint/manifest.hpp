// The contents of a saved step: tensors as boxes (each a range of bytes of a file), scalars and blobs. In the JSON, one
// array of numbers has all boxes of a tensor, so that millions of boxes are read in seconds.
#pragma once

#include <algorithm>
#include <bit>
#include <charconv>
#include <cinttypes>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "plait/checkpoint/safetensors.hpp"
#include "plait/core/box.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/io/json.hpp"

namespace plait {

/// A range of bytes of one file, counted from the file's first byte.
struct stored_bytes {
  std::uint32_t file = 0;  ///< index into `manifest::files`
  std::uint32_t crc32c = 0;
  std::uint64_t position = 0;
  std::uint64_t bytes = 0;
  friend bool operator==(const stored_bytes&, const stored_bytes&) = default;
};

/// A box of a tensor, row-major, without gaps. Entries from the tensor's rank on are 0.
struct stored_box {
  per_dim offset{}, extent{};
  stored_bytes stored;
  friend bool operator==(const stored_box&, const stored_box&) = default;
};

/// A tensor with up to `max_dims` dimensions ({} is a scalar). Its boxes cover it exactly once. No box is empty, so a
/// tensor without elements has no boxes.
struct stored_tensor {
  std::string name;
  safetensors_dtype dtype = safetensors_dtype::f32;
  std::vector<std::int64_t> shape;
  std::vector<stored_box> boxes;

  /// Returns a stored box as a `box`, whose `global` is the tensor's shape.
  box box_of(const stored_box& part) const {
    box out;
    out.dims = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), out.global.begin());
    out.offset = part.offset;
    out.local = part.extent;
    return out;
  }
  friend bool operator==(const stored_tensor&, const stored_tensor&) = default;
};

/// Named bytes that are not a tensor, such as the state of a tokenizer.
struct stored_blob {
  std::string name;
  stored_bytes stored;
  friend bool operator==(const stored_blob&, const stored_blob&) = default;
};

/// A data file: a safetensors file that contains boxes and blobs without gaps.
struct stored_file {
  std::string path;                 ///< relative to the step's directory: "data/w00017.safetensors"
  std::uint64_t bytes = 0;          ///< of the whole file
  std::uint64_t header_bytes = 0;   ///< of the part before the data: length, header, padding
  std::uint32_t header_crc32c = 0;  ///< of the header bytes
  friend bool operator==(const stored_file&, const stored_file&) = default;
};

/// The version of manifests that this plait writes and reads.
inline constexpr std::uint64_t manifest_version = 1;
/// The value of "format" in every manifest.
inline constexpr std::string_view manifest_format = "plait checkpoint";

/// A scalar keeps its type and every bit. Integers that fit 64 signed bits are `std::int64_t`, larger ones
/// `std::uint64_t`. A double may be infinite or a NaN.
using stored_scalar = std::variant<bool, std::int64_t, std::uint64_t, double, std::string>;
/// Values that are saved with tensors, by name, such as the position in the data, a seed, or settings.
using saved_scalars = std::vector<std::pair<std::string, stored_scalar>>;

/// Everything that a committed step holds.
struct manifest {
  std::uint64_t step = 0;
  std::string layout;  ///< the layout of the writer as text, for people
  std::vector<stored_file> files;
  saved_scalars scalars;
  std::vector<stored_blob> blobs;
  std::vector<stored_tensor> tensors;
  friend bool operator==(const manifest&, const manifest&) = default;
};

/// Returns a box as text, such as "[0:2, 4:8]"; "[]" for the box of a scalar.
inline std::string text_of_box(const stored_tensor& tensor, const stored_box& part) {
  std::string out = "[";
  for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
    append(out, {d == 0 ? "" : ", ", part.offset[d], ":", part.offset[d] + part.extent[d]});
  }
  return out + "]";
}

/// Returns the name of a box in its data file: the tensor's name, followed by the box unless it is the whole tensor.
inline std::string entry_name(const stored_tensor& tensor, const stored_box& part) {
  const bool whole = std::equal(tensor.shape.begin(), tensor.shape.end(), part.extent.begin());
  return whole ? tensor.name : tensor.name + text_of_box(tensor, part);
}

/// Throws `error`, whose text starts with `source`, unless a step can be loaded from `m`. Names must be UTF-8, not
/// empty, and unique. Files must be at different paths below data/ without "." or "..". Boxes must lie in their
/// tensors, have the bytes of their extents, and cover each element exactly once. Ranges of bytes must follow the
/// header of their file up to its end, without holes or overlaps. The text names the tensor and the first element that
/// is missing or covered twice. Takes O(n log n) for n boxes.
void check_manifest(const manifest& m, const std::string& source);

/// Returns the text of `m`. Throws `error`, whose text starts with `source`, as `check_manifest` does.
std::string manifest_text(const manifest& m, const std::string& source = "manifest");

/// Reads the text of a manifest strictly: exactly the keys that `manifest_text` writes, in its order. Checks the result
/// with `check_manifest`. Throws `error`, whose text starts with `source`.
manifest parse_manifest(std::string_view text, const std::string& source = "manifest");

namespace detail {

/// Writes and reads the manifest of one rank, without `check_manifest`. The text has no line break at its end, so an
/// incomplete text is never valid.
std::string unchecked_text(const manifest& m);
manifest manifest_from(std::string_view text, const std::string& source);

}  // namespace detail

}  // namespace plait

#if !defined(PLAIT_COMPILED) || defined(PLAIT_COMPILING_FILES)
namespace plait {

namespace detail {

/// Checks that the boxes of one tensor, which must lie in it, cover each element exactly once.
///
/// The number of boxes that contain an element is a function on the grid of elements. Its differences along all
/// dimensions are a sum of signed corners, 2^n for each box. So after cancellation, the corners of all boxes must equal
/// the tensor's, which sorting checks. At the first remaining corner, in row-major order, the function differs from 1
/// by that corner's sum. So that corner names an element.
class cover_check {
 public:
  cover_check(const stored_tensor& tensor, const std::string& where) : tensor_(tensor), where_(where) {}

  void run() {
    choose_dims();
    std::size_t corners = std::size_t{1} << dims_.size();
    for (std::vector<std::uint64_t>& side : sides_) side.reserve((tensor_.boxes.size() + 1) * ((corners + 1) / 2));
    stored_box whole;
    std::copy(tensor_.shape.begin(), tensor_.shape.end(), whole.extent.begin());
    add_corners(whole, 1);
    for (const stored_box& part : tensor_.boxes) add_corners(part, 0);
    for (std::vector<std::uint64_t>& side : sides_) std::sort(side.begin(), side.end());
    const auto [more, fewer] = std::mismatch(sides_[0].begin(), sides_[0].end(), sides_[1].begin(), sides_[1].end());
    if (more == sides_[0].end() && fewer == sides_[1].end()) return;
    const bool twice = fewer == sides_[1].end() || (more != sides_[0].end() && *more < *fewer);
    fail_at(twice ? *more : *fewer, twice);
  }

 private:
  /// Chooses the dimensions that some box divides; the others need no check. Corners are numbered in a grid that has
  /// one more point than elements along each of these dimensions.
  void choose_dims() {
    std::uint64_t points = 1;
    for (std::size_t d = tensor_.shape.size(); d-- > 0;) {
      const auto undivided = [&](const stored_box& b) { return b.extent[d] == tensor_.shape[d]; };
      if (std::all_of(tensor_.boxes.begin(), tensor_.boxes.end(), undivided) && !tensor_.boxes.empty()) continue;
      dims_.push_back({d, points});
      if (__builtin_mul_overflow(points, static_cast<std::uint64_t>(tensor_.shape[d]) + 1, &points))
        fail({where_, " is divided along too many dimensions for its size"});
    }
  }
  /// Adds the corners of a box. A corner is negative if it has an odd number of upper ends. `side` 0 counts a box's
  /// positive corners in `sides_[0]`.
  void add_corners(const stored_box& part, std::size_t side) {
    for (std::size_t corner = 0; corner < std::size_t{1} << dims_.size(); ++corner) {
      std::uint64_t key = 0;
      std::size_t upper = 0;
      for (std::size_t i = 0; i < dims_.size(); ++i) {
        const auto [d, stride] = dims_[i];
        const std::size_t end = corner >> i & 1;
        upper += end;
        key += stride * static_cast<std::uint64_t>(part.offset[d] + (end != 0 ? part.extent[d] : 0));
      }
      sides_[(side + upper) % 2].push_back(key);
    }
  }
  [[noreturn]] void fail_at(std::uint64_t key, bool twice) const {
    std::vector<std::int64_t> element(tensor_.shape.size());
    for (std::size_t i = dims_.size(); i-- > 0;) {
      element[dims_[i].dim] = static_cast<std::int64_t>(key / dims_[i].stride);
      key %= dims_[i].stride;
    }
    std::string at, boxes;
    for (const std::int64_t index : element) append(at, {at.empty() ? "" : ", ", index});
    int named = 0;
    for (const stored_box& part : tensor_.boxes) {
      bool inside = true;
      for (std::size_t d = 0; d < element.size(); ++d) {
        inside = inside && part.offset[d] <= element[d] && element[d] < part.offset[d] + part.extent[d];
      }
      if (inside && named++ < 2) boxes += (named == 1 ? " " : " and ") + text_of_box(tensor_, part);
    }
    fail({where_, ": the element [", at, "] is in ", twice ? "more than one box:" : "no box", twice ? boxes : ""});
  }

  struct divided {
    std::size_t dim;
    std::uint64_t stride;
  };
  const stored_tensor& tensor_;
  const std::string& where_;
  std::vector<divided> dims_;  ///< from the last dimension to the first
  std::vector<std::uint64_t> sides_[2];
};

/// The steps of `check_manifest`, with the names and ranges seen so far.
class manifest_check {
 public:
  manifest_check(const manifest& m, const std::string& source) : m_(m), source_(source) {}

  void run() {
    std::unordered_set<std::string_view> paths;
    for (const stored_file& file : m_.files) {
      check_path(file.path);
      if (!paths.insert(file.path).second) fail({source_, ": the file '", file.path, "' is listed twice"});
      if (file.header_bytes > file.bytes) {
        fail({source_, ": the file '", file.path, "' of ", file.bytes, " bytes has a header of ", file.header_bytes});
      }
    }
    if (!is_utf8(m_.layout)) fail({source_, ": the layout is not UTF-8"});
    std::unordered_set<std::string_view> scalars, blobs, tensors;
    for (const auto& [name, value] : m_.scalars) {
      claim(scalars, "scalar", name);
      const std::string* text = std::get_if<std::string>(&value);
      if (text != nullptr && !is_utf8(*text)) fail({source_, ": the scalar '", name, "' is not UTF-8"});
    }
    for (const stored_blob& blob : m_.blobs) {
      claim(blobs, "blob", blob.name);
      check_range(blob.stored, cat({source_, ": blob '", blob.name, "'"}));
    }
    for (const stored_tensor& tensor : m_.tensors) {
      claim(tensors, "tensor", tensor.name);
      check_tensor(tensor);
    }
    check_files();
  }

 private:
  void claim(std::unordered_set<std::string_view>& names, const char* kind, const std::string& name) const {
    if (name.empty()) fail({source_, ": a ", kind, " has no name"});
    if (!is_utf8(name)) fail({source_, ": the name of the ", kind, " '", name, "' is not UTF-8"});
    if (!names.insert(name).second) fail({source_, ": the ", kind, " '", name, "' appears twice"});
  }
  void check_path(const std::string& path) const {
    bool legal = path.starts_with("data/") && is_utf8(path);
    for (const char c : path) legal = legal && static_cast<unsigned char>(c) >= 0x20 && c != '\\';
    for (std::size_t begin = 0; legal && begin <= path.size();) {
      const std::size_t end = std::min(path.find('/', begin), path.size());
      const std::string_view part = std::string_view(path).substr(begin, end - begin);
      legal = !part.empty() && part != "." && part != "..";
      begin = end + 1;
    }
    if (!legal) fail({source_, ": the file '", path, "' is not in the step's directory data/"});
  }
  void check_range(const stored_bytes& stored, const std::string& where) const {
    if (stored.file >= m_.files.size())
      fail({where, " is in file ", stored.file, "; the files are 0 to ", m_.files.size(), ", exclusive"});
    const stored_file& file = m_.files[stored.file];
    if (stored.position > file.bytes || stored.bytes > file.bytes - stored.position) {
      fail({where, " has ", stored.bytes, " bytes from byte ", stored.position, " of '", file.path, "', which has ",
            file.bytes});
    }
  }
  void check_tensor(const stored_tensor& tensor) const {
    const std::string where = cat({source_, ": tensor '", tensor.name, "'"});
    if (tensor.shape.size() > static_cast<std::size_t>(max_dims))
      fail({where, " has ", tensor.shape.size(), " dimensions; legal are up to ", max_dims});
    const auto bytes = safetensors_bytes(tensor.shape, tensor.dtype);
    if (!bytes) fail({where, " has a negative extent, or takes more than 2^63 bytes"});
    for (const stored_box& part : tensor.boxes) check_box(tensor, part, where);
    if (*bytes == 0) return;  // it has no boxes, because no box is empty
    cover_check(tensor, where).run();
  }
  void check_box(const stored_tensor& tensor, const stored_box& part, const std::string& where) const {
    std::uint64_t bytes = size_of(tensor.dtype);
    bool legal = true;
    for (std::size_t d = 0; d < max_dims; ++d) {
      const std::int64_t offset = part.offset[d], extent = part.extent[d];
      if (d < tensor.shape.size()) {
        legal = legal && offset >= 0 && extent >= 1 && extent <= tensor.shape[d] && offset <= tensor.shape[d] - extent;
        bytes *= static_cast<std::uint64_t>(extent);  // at most the tensor's bytes, if the box is valid
      } else {
        legal = legal && offset == 0 && extent == 0;
      }
    }
    if (!legal) {
      std::string numbers;
      for (std::size_t d = 0; d < max_dims; ++d) append(numbers, {" ", part.offset[d], "+", part.extent[d]});
      fail({where, " has a box that is empty or not in it, as offset+extent:", numbers});
    }
    if (bytes != part.stored.bytes) {
      fail({where, ": its box ", text_of_box(tensor, part), " has ", part.stored.bytes, " bytes, and its extents take ",
            bytes});
    }
    if (part.stored.file < m_.files.size() && part.stored.bytes <= m_.files[part.stored.file].bytes &&
        part.stored.position <= m_.files[part.stored.file].bytes - part.stored.bytes)
      return;
    check_range(part.stored, cat({where, ": its box ", text_of_box(tensor, part)}));
  }

  /// Checks that the ranges of each file are consecutive, from the end of its header to the end of the file.
  void check_files() const {
    struct range {
      std::uint32_t file;
      std::uint64_t position, bytes;
      const std::string* name;
      bool operator<(const range& other) const {
        return std::tie(file, position, bytes) < std::tie(other.file, other.position, other.bytes);
      }
    };
    std::vector<range> ranges;
    const auto add = [&](const stored_bytes& s, const std::string& name) {
      ranges.push_back({s.file, s.position, s.bytes, &name});
    };
    for (const stored_blob& blob : m_.blobs) add(blob.stored, blob.name);
    for (const stored_tensor& tensor : m_.tensors) {
      for (const stored_box& part : tensor.boxes) add(part.stored, tensor.name);
    }
    std::sort(ranges.begin(), ranges.end());
    std::size_t next = 0;
    for (std::uint32_t i = 0; i < m_.files.size(); ++i) {
      const stored_file& file = m_.files[i];
      std::uint64_t position = file.header_bytes;
      for (; next < ranges.size() && ranges[next].file == i; ++next) {
        if (ranges[next].position != position) {
          fail({source_, ": '", *ranges[next].name, "' begins at byte ", ranges[next].position, " of '", file.path,
                "', and the range before it ends at ", position, "; there are no holes or overlaps in a file"});
        }
        position += ranges[next].bytes;
      }
      if (position != file.bytes) {
        fail({source_, ": the file '", file.path, "' has ", file.bytes, " bytes, and its last range ends at ",
              position});
      }
    }
  }

  const manifest& m_;
  const std::string& source_;
};

inline constexpr std::size_t manifest_hex_digits = 16;

/// Reads manifests, which have one fixed structure.
class manifest_reader {
 public:
  manifest_reader(std::string_view text, const std::string& source) : in_(text, source), source_(source) {}

  manifest run() {
    in_.members({"at the start"}, {{"format", [&] { read_format(); }},
                                   {"version", [&] { read_version(); }},
                                   {"step", [&] { out_.step = in_.whole_number({"as the step"}); }},
                                   {"layout", [&] { out_.layout = in_.text({"as the layout"}); }},
                                   {"files", [&] { read_files(); }},
                                   {"scalars", [&] { read_scalars(); }},
                                   {"blobs", [&] { read_blobs(); }},
                                   {"tensors", [&] { read_tensors(); }}});
    in_.end();
    return std::move(out_);
  }

 private:
  [[noreturn]] void bad(std::initializer_list<text_piece> what) const { fail({source_, ": ", cat(what)}); }

  void read_format() {
    const std::string format = in_.text({"as the format"});
    if (format != manifest_format) bad({"its format is '", format, "'; legal is '", manifest_format, "'"});
  }
  void read_version() {
    const std::uint64_t version = in_.whole_number({"as the version"});
    if (version != manifest_version) bad({"its version is ", version, "; this plait reads version ", manifest_version});
  }
  void read_files() {
    in_.list({"as the files"}, [&] {
      stored_file& file = out_.files.emplace_back();
      std::size_t n = 0;
      numbers_.clear();
      in_.list({"in the files"}, [&] {
        if (n++ == 0)
          file.path = in_.text({"in a file"});
        else
          numbers_.push_back(in_.whole_number({"in a file"}));
      });
      if (n != 4) bad({"a file is [path, bytes, bytes of header, CRC-32C of header]"});
      file.bytes = numbers_[0];
      file.header_bytes = numbers_[1];
      file.header_crc32c = narrow(numbers_[2], "CRC-32C");
    });
  }
  void read_scalars() {
    in_.object({"as the scalars"}, [&](std::string& name) {
      stored_scalar value = read_scalar(name, {"as the scalar '", name, "'"});
      out_.scalars.emplace_back(std::move(name), std::move(value));
    });
  }
  void read_blobs() {
    in_.object({"as the blobs"}, [&](std::string& name) {
      read_numbers({"as the blob '", name, "'"}, numbers_);
      if (numbers_.size() != 4) bad({"the blob '", name, "' has ", numbers_.size(), " numbers, not 4"});
      out_.blobs.push_back({std::move(name), range_at(0)});
    });
  }
  void read_tensors() {
    in_.object({"as the tensors"}, [&](std::string& name) {
      out_.tensors.push_back({std::move(name), {}, {}, {}});
      read_tensor(out_.tensors.back());
    });
  }

  stored_scalar read_scalar(const std::string& name, json_place where) {
    const char first = in_.next();
    if (first == '"') return in_.text(where);
    if (first == '{') return read_bits(name, where);
    if (first == '[') in_.unexpected(where, "a scalar");
    const std::string_view word = in_.word();
    if (word == "true" || word == "false") return word == "true";
    std::int64_t whole = 0;
    std::uint64_t large = 0;
    double number = 0;
    const auto is = [&](auto& value) {
      const auto [end, fault] = std::from_chars(word.data(), word.data() + word.size(), value);
      return fault == std::errc() && end == word.data() + word.size();
    };
    if (is(whole)) return whole;
    if (is(large)) return large;
    if (is(number)) return number;
    bad({"found ", word.substr(0, 300), " as the scalar '", name, "', where a number of 64 bits is legal"});
  }
  /// JSON has no infinity and no NaN: `scalar_text` writes them as {"float64": digits}.
  double read_bits(const std::string& name, json_place where) {
    std::string digits;
    in_.members(where, {{"float64", [&] { digits = in_.text(where); }}});
    std::uint64_t bits = 0;
    const auto [end, fault] = std::from_chars(digits.data(), digits.data() + digits.size(), bits, 16);
    if (fault != std::errc() || end != digits.data() + digits.size() || digits.size() != manifest_hex_digits)
      bad({"the scalar '", name, "' is '", digits, "'; legal are 16 hexadecimal digits"});
    return std::bit_cast<double>(bits);
  }
  void read_numbers(json_place where, std::vector<std::uint64_t>& out) {
    out.clear();
    in_.list(where, [&] { out.push_back(in_.whole_number(where)); });
  }
  void read_tensor(stored_tensor& tensor) {
    const std::string what = cat({"tensor '", tensor.name, "'"});
    in_.members({"in ", what}, {{"dtype", [&] { read_dtype(tensor, what); }},
                                {"shape", [&] { read_shape(tensor, what); }},
                                {"boxes", [&] {
                                   read_numbers({"in boxes of ", what}, numbers_);
                                 }}});
    add_boxes(tensor, what);
  }
  void read_dtype(stored_tensor& tensor, const std::string& what) {
    const std::string name = in_.text({"as dtype of ", what});
    const auto dtype = find_safetensors_dtype(name);
    if (!dtype) bad({what, " has the unknown dtype '", name, "'"});
    tensor.dtype = *dtype;
  }
  void read_shape(stored_tensor& tensor, const std::string& what) {
    in_.list({"in shape of ", what}, [&] {
      tensor.shape.push_back(signed_of(in_.whole_number({"in shape of ", what}), what));
    });
  }
  /// Splits `numbers_` into boxes, once the number of dimensions is known.
  void add_boxes(stored_tensor& tensor, const std::string& what) {
    const std::size_t dims = tensor.shape.size(), row = 2 * dims + 4;
    if (dims > static_cast<std::size_t>(max_dims))
      bad({what, " has ", dims, " dimensions; legal are up to ", max_dims});
    if (numbers_.size() % row != 0)
      bad({what, " has ", numbers_.size(), " numbers of boxes; each of its boxes takes ", row});
    tensor.boxes.resize(numbers_.size() / row);
    std::size_t at = 0;
    for (stored_box& part : tensor.boxes) {
      for (std::size_t d = 0; d < dims; ++d) {
        part.offset[d] = signed_of(numbers_[at + d], what);
        part.extent[d] = signed_of(numbers_[at + dims + d], what);
      }
      part.stored = range_at(at + 2 * dims);
      at += row;
    }
  }
  std::uint32_t narrow(std::uint64_t value, const char* what) const {
    if (!std::in_range<std::uint32_t>(value)) bad({"the ", what, " ", value, " does not fit 32 bits"});
    return static_cast<std::uint32_t>(value);
  }
  std::int64_t signed_of(std::uint64_t value, const std::string& what) const {
    if (!std::in_range<std::int64_t>(value)) bad({what, " has the number ", value, ", which does not fit 63 bits"});
    return static_cast<std::int64_t>(value);
  }
  stored_bytes range_at(std::size_t at) const {
    return {narrow(numbers_[at], "index of a file"), narrow(numbers_[at + 3], "CRC-32C"), numbers_[at + 1],
            numbers_[at + 2]};
  }

  json_parser in_;
  const std::string& source_;
  manifest out_;
  std::vector<std::uint64_t> numbers_;
};

/// Appends a number in decimal digits, after a comma unless it is the first of a list.
template <class Integer>
void append_number(std::string& out, Integer value) {
  char digits[24];
  if (out.back() != '[') out += ',';
  out.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}
inline void append_range(std::string& out, const stored_bytes& stored) {
  append_number(out, stored.file);
  append_number(out, stored.position);
  append_number(out, stored.bytes);
  append_number(out, stored.crc32c);
}

/// Returns a scalar as a JSON value. JSON has no infinity and no NaN, so these become an object with their bits.
inline std::string scalar_text(const stored_scalar& value) {
  if (const auto* number = std::get_if<double>(&value); number != nullptr && !std::isfinite(*number)) {
    char digits[manifest_hex_digits + 1];
    std::snprintf(digits, sizeof digits, "%016" PRIx64, std::bit_cast<std::uint64_t>(*number));
    return cat({"{\"float64\": \"", digits, "\"}"});
  }
  struct writer {
    std::string operator()(bool b) const { return b ? "true" : "false"; }
    std::string operator()(std::int64_t i) const { return std::to_string(i); }
    std::string operator()(std::uint64_t i) const { return std::to_string(i); }
    std::string operator()(double d) const { return json_number(d); }
    std::string operator()(const std::string& s) const { return json_string(s); }
  };
  return std::visit(writer{}, value);
}

}  // namespace detail

PLAIT_INLINE void check_manifest(const manifest& m, const std::string& source) {
  detail::manifest_check(m, source).run();
}

PLAIT_INLINE manifest detail::manifest_from(std::string_view text, const std::string& source) {
  return manifest_reader(text, source).run();
}

PLAIT_INLINE std::string detail::unchecked_text(const manifest& m) {
  std::string out = cat({"{\n\"format\": ", json_string(manifest_format), ",\n\"version\": ", manifest_version,
                         ",\n\"step\": ", m.step, ",\n\"layout\": ", json_string(m.layout), ",\n\"files\": ["});
  const auto next_line = [&](bool first) { out += first ? "\n" : ",\n"; };
  for (const stored_file& file : m.files) {
    next_line(&file == &m.files.front());
    append(out, {"[", json_string(file.path), ",", file.bytes, ",", file.header_bytes, ",", file.header_crc32c, "]"});
  }
  out += "],\n\"scalars\": {";
  for (const auto& scalar : m.scalars) {
    next_line(&scalar == &m.scalars.front());
    append(out, {json_string(scalar.first), ": ", detail::scalar_text(scalar.second)});
  }
  out += "},\n\"blobs\": {";
  for (const stored_blob& blob : m.blobs) {
    next_line(&blob == &m.blobs.front());
    append(out, {json_string(blob.name), ": ["});
    detail::append_range(out, blob.stored);
    out += ']';
  }
  out += "},\n\"tensors\": {";
  for (const stored_tensor& tensor : m.tensors) {
    next_line(&tensor == &m.tensors.front());
    append(out, {json_string(tensor.name), ": {\"dtype\": \"", name_of(tensor.dtype), "\", \"shape\": ["});
    for (const std::int64_t extent : tensor.shape) detail::append_number(out, extent);
    out += "], \"boxes\": [";
    for (const stored_box& part : tensor.boxes) {
      for (std::size_t d = 0; d < tensor.shape.size(); ++d) detail::append_number(out, part.offset[d]);
      for (std::size_t d = 0; d < tensor.shape.size(); ++d) detail::append_number(out, part.extent[d]);
      detail::append_range(out, part.stored);
    }
    out += "]}";
  }
  return out + "}\n}";
}

PLAIT_INLINE std::string manifest_text(const manifest& m, const std::string& source) {
  check_manifest(m, source);
  return detail::unchecked_text(m) + "\n";
}

PLAIT_INLINE manifest parse_manifest(std::string_view text, const std::string& source) {
  manifest m = detail::manifest_from(text, source);
  check_manifest(m, source);
  return m;
}

}  // namespace plait
#endif

#include "plait/core/macros_on.hpp"
