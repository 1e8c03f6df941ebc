// The definitions of safetensors.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/json_reader.hpp"
#include "plait/io/mapped_file.hpp"

namespace plait {

namespace detail {

/// Receives the events of the JSON parser and accepts the header's one shape:
/// `{"__metadata__": {key: string, ..}, name: {"dtype": string, "shape": [..], "data_offsets": [begin, end]}, ..}`.
/// No tree is built, so a hostile header costs a few bytes of memory for each of its own.
class safetensors_header {
 public:
  struct tensor {
    std::string name;
    std::optional<safetensors_dtype> dtype;
    std::optional<std::vector<std::int64_t>> shape;
    std::optional<std::vector<std::int64_t>> offsets;
  };
  std::vector<tensor> tensors;
  safetensors_metadata metadata;

  explicit safetensors_header(const std::string& source) : source_(source) {}

  // The interface that nlohmann::json::sax_parse calls; each returns whether to go on.
  bool null() { return unexpected("null"); }
  bool boolean(bool) { return unexpected("true or false"); }
  bool number_float(double, const std::string& text) { return unexpected(text); }
  bool number_integer(std::int64_t value) { return unexpected(std::to_string(value)); }
  bool number_unsigned(std::uint64_t value) {
    if (place_ != place::numbers) return unexpected(std::to_string(value));
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
      return unexpected(std::to_string(value));
    numbers_->push_back(static_cast<std::int64_t>(value));
    return true;
  }
  template <class Binary>
  bool binary(Binary&) {
    return unexpected("binary data");
  }
  bool string(std::string& value) {
    if (place_ == place::metadata) {
      metadata.back().second = std::move(value);
      return true;
    }
    if (place_ != place::field || field_ != "dtype") return unexpected(cat({"the string \"", value, "\""}));
    tensor& t = tensors.back();
    t.dtype = find_safetensors_dtype(value);
    if (!t.dtype) bad(cat({"tensor '", t.name, "' has the unknown dtype \"", value, "\"; legal are ", legal_dtypes()}));
    place_ = place::tensor;
    return true;
  }
  bool start_object(std::size_t) {
    if (place_ == place::before) return go(place::root);
    if (place_ == place::value) return go(in_metadata_ ? place::metadata : place::tensor);
    return unexpected("an object");
  }
  bool key(std::string& name) {
    switch (place_) {
      case place::root:
        if (!names_.insert(name).second) bad(cat({"the name '", name, "' appears twice"}));
        in_metadata_ = name == "__metadata__";
        if (!in_metadata_) tensors.push_back({std::move(name), {}, {}, {}});
        return go(place::value);
      case place::metadata:
        if (!metadata_keys_.insert(name).second) bad(cat({"the __metadata__ key '", name, "' appears twice"}));
        metadata.emplace_back(std::move(name), "");
        return true;
      default:
        field_ = std::move(name);
        return check_field();
    }
  }
  bool end_object() {
    if (place_ == place::metadata) return go(place::root);
    if (place_ == place::tensor) {
      const tensor& t = tensors.back();
      const char* missing = !t.dtype ? "dtype" : !t.shape ? "shape" : !t.offsets ? "data_offsets" : nullptr;
      if (missing != nullptr) bad(cat({"tensor '", t.name, "' has no ", missing}));
      return go(place::root);
    }
    return go(place::after);
  }
  bool start_array(std::size_t) {
    if (place_ != place::field || field_ == "dtype") return unexpected("an array");
    tensor& t = tensors.back();
    numbers_ = &(field_ == "shape" ? t.shape : t.offsets).emplace();
    return go(place::numbers);
  }
  bool end_array() { return go(place::tensor); }
  template <class Exception>
  bool parse_error(std::size_t, const std::string&, const Exception& e) {
    bad(cat({"malformed JSON: ", std::string_view(e.what()).substr(0, 300)}));
  }

  [[noreturn]] void bad(const std::string& what) const { fail({source_, ": safetensors header: ", what}); }

 private:
  enum class place { before, root, value, metadata, tensor, field, numbers, after };

  bool go(place next) {
    place_ = next;
    return true;
  }
  bool unexpected(const std::string& what) const {
    const std::string where =
        place_ == place::before     ? "at the start, where { is legal"
        : place_ == place::metadata ? "as a value of __metadata__, where a string is legal"
        : in_metadata_              ? "as __metadata__, where an object is legal"
        : place_ == place::field    ? cat({"as ", field_, " of tensor '", tensors.back().name, "'"})
        : place_ == place::numbers
            ? cat({"in ", field_, " of tensor '", tensors.back().name, "', where whole numbers from 0 are legal"})
            : cat({"as tensor '", tensors.back().name, "', where an object is legal"});
    bad(cat({"found ", what, " ", where}));
  }
  bool check_field() {
    tensor& t = tensors.back();
    const bool dtype = field_ == "dtype", shape = field_ == "shape", offsets = field_ == "data_offsets";
    if (!dtype && !shape && !offsets) {
      bad(cat({"tensor '", t.name, "' has the unknown key '", field_, "'; legal are dtype, shape, data_offsets"}));
    }
    if ((dtype && t.dtype) || (shape && t.shape) || (offsets && t.offsets)) {
      bad(cat({"tensor '", t.name, "' has the key '", field_, "' twice"}));
    }
    return go(place::field);
  }
  static std::string legal_dtypes() {
    std::string names;
    for (const auto& row : safetensors_dtypes) {
      names += names.empty() ? "" : ", ";
      names += row.name;
    }
    return names;
  }

  const std::string& source_;
  place place_ = place::before;
  bool in_metadata_ = false;
  std::string field_;
  std::vector<std::int64_t>* numbers_ = nullptr;
  std::unordered_set<std::string> names_, metadata_keys_;
};

}  // namespace detail

PLAIT_INLINE std::uint64_t safetensors_header_end(std::span<const std::byte> start, std::uint64_t file_bytes,
                                                  const std::string& source) {
  if (file_bytes < 8)
    fail({source, ": ", file_bytes, " bytes are no safetensors file; it starts with 8 bytes of header length"});
  std::uint64_t length = 0;
  std::memcpy(&length, start.data(), 8);
  if (length > safetensors_max_header || length > file_bytes - 8) {  // a length may begin as another format does
    const std::string_view other = foreign_file({reinterpret_cast<const char*>(start.data()), start.size()});
    if (!other.empty()) fail({source, ": this is no safetensors file but ", other});
  }
  if (length > safetensors_max_header) {
    if (std::to_integer<char>(start[0]) == '{')
      fail({source,
            ": this is JSON, an index or a config.json perhaps; name a .safetensors file, or the folder that has the "
            "index of a model in shards"});
    fail({source, ": the safetensors header claims ", length, " bytes; legal are up to ", safetensors_max_header});
  }
  if (length > file_bytes - 8) {
    fail({source, ": truncated: the safetensors header claims ", length, " bytes, and ", file_bytes - 8, " are left"});
  }
  return 8 + length;
}

PLAIT_INLINE safetensors_table parse_safetensors_header(std::span<const std::byte> start, std::uint64_t file_bytes,
                                                        const std::string& source) {
  const std::uint64_t data_begin = safetensors_header_end(start, file_bytes, source);
  const std::string_view text(reinterpret_cast<const char*>(start.data()) + 8, data_begin - 8);
  const std::uint64_t data_bytes = file_bytes - data_begin;

  detail::safetensors_header header(source);
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first == text.npos || text[first] != '{') header.bad("it does not start with {");
  if (text.find('\0') != text.npos) header.bad("it contains a zero byte");  // the JSON parser would stop there
  nlohmann::json::sax_parse(text.begin(), text.end(), &header);

  safetensors_table out;
  out.metadata = std::move(header.metadata);
  auto& tensors = header.tensors;
  for (const auto& t : tensors) {
    if (t.offsets->size() != 2) {
      header.bad(cat({"tensor '", t.name, "' has ", t.offsets->size(), " data_offsets; legal are 2"}));
    }
  }
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t x, std::size_t y) { return *tensors[x].offsets < *tensors[y].offsets; });
  std::uint64_t position = 0;
  for (const std::size_t i : order) {
    auto& t = tensors[i];
    const auto begin = static_cast<std::uint64_t>((*t.offsets)[0]), end = static_cast<std::uint64_t>((*t.offsets)[1]);
    const std::string range = cat({"tensor '", t.name, "' has data_offsets [", begin, ", ", end, "]"});
    if (begin != position) {
      header.bad(cat({range, ", and the data before it end at ", position,
                      "; tensors must follow each other without holes or overlaps"}));
    }
    if (end < begin) header.bad(range + ", which end before they begin");
    if (end > data_bytes)
      header.bad(cat({range, ", and the file has ", data_bytes, " bytes of data; it is truncated"}));
    const auto bytes = safetensors_bytes(*t.shape, *t.dtype);
    if (!bytes || *bytes != end - begin) {
      header.bad(cat({range, ", and its shape and dtype take ",
                      bytes ? std::to_string(*bytes) : std::string("more than 2^63"), " bytes"}));
    }
    out.tensors.push_back({std::move(t.name), *t.dtype, std::move(*t.shape), data_begin + begin, end - begin});
    position = end;
  }
  if (position != data_bytes) {
    header.bad(cat({"the tensors end at byte ", position, " of the data, and the file has ", data_bytes}));
  }
  return out;
}

PLAIT_INLINE std::map<std::string, std::string> parse_safetensors_index(std::string_view text,
                                                                        const std::string& source) {
  const nlohmann::json json = parse_json(text, source);
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (map == json.end() || !map->is_object())
    fail({source, ": it has no weight_map, an object from the names of tensors to those of files"});
  std::map<std::string, std::string> out;
  for (const auto& [tensor, file] : map->items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : std::string();
    if (!name.ends_with(".safetensors") || name.find_first_of(std::string_view("/\\\0", 3)) != name.npos)
      fail({source, ": the file of tensor '", tensor, "' is ",
            file.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace).substr(0, 200),
            "; legal is the name of a .safetensors file in the same folder"});
    out.emplace(tensor, name);
  }
  return out;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
