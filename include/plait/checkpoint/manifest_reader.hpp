// Receives the JSON of a manifest from a parser, strictly, without a tree of it. What is consistent beyond its shape:
// checkpoint/manifest_check.hpp; the text itself: checkpoint/manifest_json.hpp.
#pragma once

#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "plait/checkpoint/manifest.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

namespace detail {

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

}  // namespace detail

}  // namespace plait

#include "plait/core/macros_on.hpp"
