// The definitions of safetensors.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <map>
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
#include "plait/core/text.hpp"
#include "plait/io/json.hpp"
#include "plait/io/mapped_file.hpp"

namespace plait {

namespace detail {

/// Reads the header's one shape:
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

  safetensors_header(std::string_view text, const std::string& source)
      : source_(source + ": safetensors header"), in_(text, source_) {
    const std::size_t first = text.find_first_not_of(" \t\r\n");
    if (first == text.npos || text[first] != '{') bad({"it does not start with {"});
    std::unordered_set<std::string> names;
    in_.object({"at the start"}, [&](std::string& name) {
      if (!names.insert(name).second) bad({"the name '", name, "' appears twice"});
      if (name == "__metadata__") return read_metadata();
      tensors.push_back({std::move(name), {}, {}, {}});
      read_tensor(tensors.back());
    });
    in_.end();
  }

  [[noreturn]] void bad(std::initializer_list<text_piece> what) const { fail({source_, ": ", cat(what)}); }

 private:
  void read_metadata() {
    std::unordered_set<std::string> keys;
    in_.object({"as __metadata__"}, [&](std::string& key) {
      if (!keys.insert(key).second) bad({"the __metadata__ key '", key, "' appears twice"});
      std::string value = in_.text({"as a value of __metadata__"});
      metadata.emplace_back(std::move(key), std::move(value));
    });
  }
  void read_tensor(tensor& t) {
    const std::string what = cat({"tensor '", t.name, "'"});
    in_.object({"as ", what}, [&](const std::string& key) {
      const bool dtype = key == "dtype", shape = key == "shape";
      if (!dtype && !shape && key != "data_offsets")
        bad({what, " has the unknown key '", key, "'; legal are dtype, shape, data_offsets"});
      if (dtype ? t.dtype.has_value() : shape ? t.shape.has_value() : t.offsets.has_value())
        bad({what, " has the key '", key, "' twice"});
      if (dtype) {
        read_dtype(t, what);
      } else {
        read_numbers((shape ? t.shape : t.offsets).emplace(), {"in ", key, " of ", what});
      }
    });
    const char* missing = !t.dtype ? "dtype" : !t.shape ? "shape" : !t.offsets ? "data_offsets" : nullptr;
    if (missing != nullptr) bad({what, " has no ", missing});
  }
  void read_dtype(tensor& t, const std::string& what) {
    const std::string name = in_.text({"as dtype of ", what});
    t.dtype = find_safetensors_dtype(name);
    if (t.dtype) return;
    std::string legal;
    for (const auto& row : safetensors_dtypes) append(legal, {legal.empty() ? "" : ", ", row.name});
    bad({what, " has the unknown dtype \"", name, "\"; legal are ", legal});
  }
  void read_numbers(std::vector<std::int64_t>& out, json_place where) {
    constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    in_.list(where, [&] { out.push_back(static_cast<std::int64_t>(in_.whole_number(where, most))); });
  }

  const std::string source_;
  json_parser in_;
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

  detail::safetensors_header header(text, source);
  safetensors_table out;
  out.metadata = std::move(header.metadata);
  auto& tensors = header.tensors;
  for (const auto& t : tensors) {
    if (t.offsets->size() != 2) {
      header.bad({"tensor '", t.name, "' has ", t.offsets->size(), " data_offsets; legal are 2"});
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
      header.bad({range, ", and the data before it end at ", position,
                  "; tensors must follow each other without holes or overlaps"});
    }
    if (end < begin) header.bad({range, ", which end before they begin"});
    if (end > data_bytes) header.bad({range, ", and the file has ", data_bytes, " bytes of data; it is truncated"});
    const auto bytes = safetensors_bytes(*t.shape, *t.dtype);
    if (!bytes || *bytes != end - begin) {
      header.bad({range, ", and its shape and dtype take ",
                  bytes ? std::to_string(*bytes) : std::string("more than 2^63"), " bytes"});
    }
    out.tensors.push_back({std::move(t.name), *t.dtype, std::move(*t.shape), data_begin + begin, end - begin});
    position = end;
  }
  if (position != data_bytes) {
    header.bad({"the tensors end at byte ", position, " of the data, and the file has ", data_bytes});
  }
  return out;
}

PLAIT_INLINE std::map<std::string, std::string> parse_safetensors_index(std::string_view text,
                                                                        const std::string& source) {
  if (const std::string_view other = foreign_file(text); !other.empty())
    fail({source, ": this is no JSON but ", other});
  const auto no_map = [&] {
    fail({source, ": it has no weight_map, an object from the names of tensors to those of files"});
  };
  json_parser in(text, source);
  if (in.next() != '{') no_map();
  std::map<std::string, std::string> out;
  bool seen = false;
  const auto read_file_of = [&](std::string& tensor) {
    if (in.next() != '"') in.unexpected({"as the file of tensor '", tensor, "'"}, "the name of a .safetensors file");
    std::string name = in.text({});
    if (!name.ends_with(".safetensors") || name.find_first_of(std::string_view("/\\\0", 3)) != name.npos)
      fail({source, ": the file of tensor '", tensor, "' is ", json_string(name.substr(0, 200)),
            "; legal is the name of a .safetensors file in the same folder"});
    const auto [place, is_new] = out.emplace(std::move(tensor), std::move(name));
    if (!is_new) fail({source, ": the key '", place->first, "' appears twice in weight_map"});
  };
  in.object({"at the start"}, [&](const std::string& key) {
    if (key != "weight_map") return in.skip();
    if (std::exchange(seen, true)) fail({source, ": the key 'weight_map' appears twice in one object"});
    if (in.next() != '{') no_map();
    in.object({"as weight_map"}, read_file_of);
  });
  in.end();
  if (!seen) no_map();
  return out;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
