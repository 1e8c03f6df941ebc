// The definitions of manifest.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cinttypes>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/json_writer.hpp"

namespace plait {

namespace detail {

/// Checks that the boxes of one tensor, which lie in it, cover each element exactly once.
///
/// How many boxes an element is in is a function on the grid of elements; its differences along every dimension are a
/// sum of signed corners, 2^n for each box, and are zero where it is known to be that of the whole tensor. So the
/// corners of the boxes must cancel up to those of the tensor, which sorting shows. At the first corner, in row-major
/// order, that is left over, the function differs from 1 by just that corner's sum: it names an element.
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
    complain(twice ? *more : *fewer, twice);
  }

 private:
  /// Dimensions that no box divides say nothing. The corners of the others are counted in a grid that has one more
  /// point than elements along each.
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
  /// A corner's sign is negative for an odd number of upper ends; side 0 has what is positive for a box.
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
  [[noreturn]] void complain(std::uint64_t key, bool twice) const {
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

/// The state of `check_manifest`.
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
    if (!legal) fail({source_, ": the file '", path, "' is none in the step's directory data/"});
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
    if (*bytes == 0) return;  // and no box, since none fits
    cover_check(tensor, where).run();
  }
  void check_box(const stored_tensor& tensor, const stored_box& part, const std::string& where) const {
    std::uint64_t bytes = size_of(tensor.dtype);
    bool legal = true;
    for (std::size_t d = 0; d < max_dims; ++d) {
      const std::int64_t offset = part.offset[d], extent = part.extent[d];
      if (d < tensor.shape.size()) {
        legal = legal && offset >= 0 && extent >= 1 && extent <= tensor.shape[d] && offset <= tensor.shape[d] - extent;
        bytes *= static_cast<std::uint64_t>(extent);  // no more than the tensor's, if it is legal
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

  /// The ranges of each file follow each other from the end of its header to its end.
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
                "', and what is before it ends at ", position, "; there are no holes or overlaps in a file"});
        }
        position += ranges[next].bytes;
      }
      if (position != file.bytes) {
        fail(
            {source_, ": the file '", file.path, "' has ", file.bytes, " bytes, and what is in it ends at ", position});
      }
    }
  }

  const manifest& m_;
  const std::string& source_;
};

inline constexpr std::size_t manifest_hex_digits = 16;

/// Receives the events of the JSON parser and accepts the one shape of a manifest. No tree is built.
class manifest_reader {
 public:
  manifest out;

  explicit manifest_reader(const std::string& source) : source_(source) {}

  // The interface that nlohmann::json::sax_parse calls; each returns whether to go on.
  bool null() { return unexpected("null"); }
  bool boolean(bool value) { return place_ == place::scalar ? scalar(value) : unexpected("true or false"); }
  bool number_float(double value, const std::string& text) {
    return place_ == place::scalar ? scalar(value) : unexpected(text);
  }
  bool number_integer(std::int64_t value) {
    return place_ == place::scalar ? scalar(value) : unexpected(std::to_string(value));
  }
  bool number_unsigned(std::uint64_t value) {
    switch (place_) {
      case place::numbers:
        numbers_.push_back(value);
        return true;
      case place::version:
        if (value != manifest_version)
          bad(cat({"its version is ", value, "; this plait reads version ", manifest_version}));
        versioned_ = true;
        return go(place::root);
      case place::step:
        out.step = value;
        return go(place::root);
      case place::scalar:
        if (std::in_range<std::int64_t>(value)) return scalar(static_cast<std::int64_t>(value));
        return scalar(value);
      default:
        return unexpected(std::to_string(value));
    }
  }
  template <class Binary>
  bool binary(Binary&) {
    return unexpected("binary data");
  }
  bool string(std::string& value) {
    switch (place_) {
      case place::format:
        if (value != manifest_format) bad(cat({"its format is '", value, "'; legal is '", manifest_format, "'"}));
        return go(place::root);
      case place::layout:
        out.layout = std::move(value);
        return go(place::root);
      case place::scalar:
        return scalar(std::move(value));
      case place::scalar_bits:
        out.scalars.back().second = double_of_bits(value);
        return go(place::scalar_end);
      case place::dtype:
        out.tensors.back().dtype = dtype_called(value);
        return go(place::tensor);
      case place::numbers:
        if (list_ != list::file || !numbers_.empty() || !out.files.back().path.empty()) break;
        out.files.back().path = std::move(value);
        return true;
      default:
        break;
    }
    return unexpected(cat({"the string \"", value, "\""}));
  }
  bool start_object(std::size_t) {
    switch (place_) {
      case place::before:
        return go(place::root);
      case place::scalars_value:
        return go(place::scalars);
      case place::blobs_value:
        return go(place::blobs);
      case place::tensors_value:
        return go(place::tensors);
      case place::scalar:
        return go(place::scalar_key);
      case place::tensor_value:
        return go(place::tensor);
      default:
        return unexpected("an object");
    }
  }
  bool key(std::string& name) {
    switch (place_) {
      case place::root:
        return root_key(name);
      case place::scalars:
        out.scalars.emplace_back(std::move(name), false);
        return go(place::scalar);
      case place::scalar_key:
        if (name != "float64")
          bad(cat({"the scalar '", out.scalars.back().first, "' has the unknown key '", name, "'"}));
        return go(place::scalar_bits);
      case place::blobs:
        out.blobs.push_back({std::move(name), {}});
        return expect(list::blob);
      case place::tensors:
        out.tensors.push_back({std::move(name), {}, {}, {}});
        seen_ = {};
        return go(place::tensor_value);
      case place::tensor:
        return tensor_key(name);
      default:
        return unexpected(cat({"the key '", name, "'"}));
    }
  }
  bool end_object() {
    switch (place_) {
      case place::tensor:
        finish_tensor();
        return go(place::tensors);
      case place::scalar_end:
        return go(place::scalars);
      case place::scalars:
      case place::blobs:
      case place::tensors:
        return go(place::root);
      case place::root:
        for (std::size_t i = 0; i < root_keys.size(); ++i) {
          if (!root_seen_[i]) bad(cat({"it has no ", root_keys[i].name}));
        }
        return go(place::after);
      default:
        return unexpected("the end of an object");
    }
  }
  bool start_array(std::size_t) {
    if (place_ == place::files_value) return go(place::files);
    if (place_ == place::files) {
      out.files.emplace_back();
      expect(list::file);
    }
    if (place_ != place::list_value) return unexpected("an array");
    numbers_.clear();
    return go(place::numbers);
  }
  bool end_array() {
    if (place_ == place::files) return go(place::root);
    switch (list_) {
      case list::file: {
        stored_file& file = out.files.back();
        if (numbers_.size() != 3 || file.path.empty())
          bad("a file is [path, bytes, bytes of header, CRC-32C of header]");
        file.bytes = numbers_[0];
        file.header_bytes = numbers_[1];
        file.header_crc32c = narrow(numbers_[2], "CRC-32C");
        return go(place::files);
      }
      case list::blob:
        if (numbers_.size() != 4)
          bad(cat({"the blob '", out.blobs.back().name, "' has ", numbers_.size(), " numbers, not 4"}));
        out.blobs.back().stored = range_at(0);
        return go(place::blobs);
      case list::shape:
        for (const std::uint64_t extent : numbers_) out.tensors.back().shape.push_back(signed_of(extent));
        return go(place::tensor);
      case list::boxes:
        boxes_.swap(numbers_);
        return go(place::tensor);
    }
    return false;
  }
  template <class Exception>
  bool parse_error(std::size_t, const std::string&, const Exception& e) {
    bad(cat({"malformed JSON: ", std::string_view(e.what()).substr(0, 300)}));
  }

  [[noreturn]] void bad(std::string_view what) const { fail({source_, ": ", what}); }

 private:
  enum class place : std::uint8_t {
    before,
    root,
    after,
    format,
    version,
    step,
    layout,
    files_value,
    files,
    scalars_value,
    scalars,
    scalar,
    scalar_key,
    scalar_bits,
    scalar_end,
    blobs_value,
    blobs,
    tensors_value,
    tensors,
    tensor_value,
    tensor,
    dtype,
    list_value,
    numbers
  };
  enum class list : std::uint8_t { file, blob, shape, boxes };
  struct root_key_row {
    std::string_view name;
    place next;
  };
  static constexpr std::array<root_key_row, 8> root_keys{{{"format", place::format},
                                                          {"version", place::version},
                                                          {"step", place::step},
                                                          {"layout", place::layout},
                                                          {"files", place::files_value},
                                                          {"scalars", place::scalars_value},
                                                          {"blobs", place::blobs_value},
                                                          {"tensors", place::tensors_value}}};
  static constexpr std::array<std::string_view, 3> tensor_keys{"dtype", "shape", "boxes"};

  bool go(place next) {
    place_ = next;
    return true;
  }
  bool expect(list what) {
    list_ = what;
    return go(place::list_value);
  }
  bool scalar(stored_scalar value) {
    out.scalars.back().second = std::move(value);
    return go(place::scalars);
  }
  bool unexpected(std::string_view what) const {
    std::string where = last_key_.empty() ? "" : cat({" in or after '", last_key_, "'"});
    if (!out.tensors.empty() && last_key_ == "tensors") append(where, {", at tensor '", out.tensors.back().name, "'"});
    bad(cat({"found ", what.substr(0, 300), where, ", where it is not legal"}));
  }
  bool root_key(const std::string& name) {
    for (std::size_t i = 0; i < root_keys.size(); ++i) {
      if (name != root_keys[i].name) continue;
      if (std::exchange(root_seen_[i], true)) bad(cat({"the key '", name, "' appears twice"}));
      if (i > 1 && !versioned_) bad(cat({"the key '", name, "' stands before the version"}));
      last_key_ = name;
      return go(root_keys[i].next);
    }
    bad(cat({"the key '", name, "' is unknown in version ", manifest_version}));
  }
  bool tensor_key(const std::string& name) {
    for (std::size_t i = 0; i < tensor_keys.size(); ++i) {
      if (name != tensor_keys[i]) continue;
      if (std::exchange(seen_[i], true)) bad_tensor(cat({" has the key '", name, "' twice"}));
      return i == 0 ? go(place::dtype) : expect(i == 1 ? list::shape : list::boxes);
    }
    bad_tensor(cat({" has the unknown key '", name, "'; legal are dtype, shape, boxes"}));
  }
  [[noreturn]] void bad_tensor(std::string_view what) const {
    bad(cat({"tensor '", out.tensors.back().name, "'", what}));
  }
  safetensors_dtype dtype_called(const std::string& name) const {
    if (const auto found = find_safetensors_dtype(name)) return *found;
    bad_tensor(cat({" has the unknown dtype '", name, "'"}));
  }
  double double_of_bits(const std::string& digits) const {
    std::uint64_t bits = 0;
    const auto [end, fault] = std::from_chars(digits.data(), digits.data() + digits.size(), bits, 16);
    if (fault != std::errc() || end != digits.data() + digits.size() || digits.size() != manifest_hex_digits)
      bad(cat({"the scalar '", out.scalars.back().first, "' is '", digits, "'; legal are 16 hexadecimal digits"}));
    return std::bit_cast<double>(bits);
  }
  std::uint32_t narrow(std::uint64_t value, const char* what) const {
    if (!std::in_range<std::uint32_t>(value)) bad(cat({"the ", what, " ", value, " does not fit 32 bits"}));
    return static_cast<std::uint32_t>(value);
  }
  std::int64_t signed_of(std::uint64_t value) const {
    if (!std::in_range<std::int64_t>(value))
      bad_tensor(cat({" has the number ", value, ", which does not fit 63 bits"}));
    return static_cast<std::int64_t>(value);
  }
  stored_bytes range_at(std::size_t at) const {
    return {narrow(numbers_[at], "index of a file"), narrow(numbers_[at + 3], "CRC-32C"), numbers_[at + 1],
            numbers_[at + 2]};
  }
  /// The boxes can be told apart when the number of dimensions is known.
  void finish_tensor() {
    for (std::size_t i = 0; i < tensor_keys.size(); ++i) {
      if (!seen_[i]) bad_tensor(cat({" has no ", tensor_keys[i]}));
    }
    numbers_.swap(boxes_);
    stored_tensor& tensor = out.tensors.back();
    const std::size_t dims = tensor.shape.size(), row = 2 * dims + 4;
    if (dims > static_cast<std::size_t>(max_dims))
      bad_tensor(cat({" has ", dims, " dimensions; legal are up to ", max_dims}));
    if (numbers_.size() % row != 0)
      bad_tensor(cat({" has ", numbers_.size(), " numbers of boxes; each of its boxes takes ", row}));
    tensor.boxes.resize(numbers_.size() / row);
    std::size_t at = 0;
    for (stored_box& part : tensor.boxes) {
      for (std::size_t d = 0; d < dims; ++d) {
        part.offset[d] = signed_of(numbers_[at + d]);
        part.extent[d] = signed_of(numbers_[at + dims + d]);
      }
      part.stored = range_at(at + 2 * dims);
      at += row;
    }
  }

  const std::string& source_;
  place place_ = place::before;
  list list_ = list::file;
  bool versioned_ = false;
  std::array<bool, root_keys.size()> root_seen_{};
  std::array<bool, tensor_keys.size()> seen_{};
  std::string last_key_;
  std::vector<std::uint64_t> numbers_, boxes_;
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

/// A scalar as a JSON value. JSON has no infinity and no NaN: such a double is an object with its bits.
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

PLAIT_INLINE std::string manifest_text(const manifest& m, const std::string& source) {
  check_manifest(m, source);
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
  return out + "}\n}\n";
}

PLAIT_INLINE manifest parse_manifest(std::string_view text, const std::string& source) {
  detail::manifest_reader reader(source);
  if (text.find('\0') != text.npos) reader.bad("it contains a zero byte");  // the JSON parser would stop there
  nlohmann::json::sax_parse(text.data(), text.data() + text.size(), &reader);
  check_manifest(reader.out, source);
  return std::move(reader.out);
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
