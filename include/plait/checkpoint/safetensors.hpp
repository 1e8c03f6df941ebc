// The safetensors format: element types and conversions, headers and indices. Files are read whole by mapping them, and
// written at once or in pieces. Malformed files: tests/unit/checkpoint/safetensors.cpp.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
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
#include "plait/core/types.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/io/crc32c.hpp"
#include "plait/io/file_system.hpp"
#include "plait/io/json.hpp"
#include "plait/io/mapped_file.hpp"

namespace plait {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian and are used in place");

/// The element types of the safetensors format that plait reads and writes.
enum class safetensors_dtype : std::uint8_t { boolean, u8, i8, i16, u16, f16, bf16, i32, u32, f32, i64, u64, f64 };

namespace detail {

/// The names of the types, in the order of the enumeration.
inline constexpr std::string_view safetensors_names[] = {"BOOL", "U8",  "I8",  "I16", "U16", "F16", "BF16",
                                                         "I32",  "U32", "F32", "I64", "U64", "F64"};

}  // namespace detail

constexpr std::string_view name_of(safetensors_dtype type) {
  return detail::safetensors_names[static_cast<std::size_t>(type)];
}
/// Bytes of one element.
constexpr std::uint64_t size_of(safetensors_dtype type) {
  constexpr std::uint64_t sizes[] = {1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8};
  return sizes[static_cast<std::size_t>(type)];
}
constexpr std::optional<safetensors_dtype> find_safetensors_dtype(std::string_view name) {
  const auto* const found = std::find(std::begin(detail::safetensors_names), std::end(detail::safetensors_names), name);
  if (found == std::end(detail::safetensors_names)) return std::nullopt;
  return static_cast<safetensors_dtype>(found - detail::safetensors_names);
}
/// Returns the type of a plait tensor's elements in a file.
constexpr safetensors_dtype safetensors_dtype_of(dtype type) {
  constexpr safetensors_dtype types[] = {safetensors_dtype::f32, safetensors_dtype::f64, safetensors_dtype::bf16,
                                         safetensors_dtype::i32, safetensors_dtype::i64, safetensors_dtype::u8};
  return types[static_cast<std::size_t>(type)];
}

namespace detail {

inline std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (std::int64_t n : shape) append(text, {(text.empty() ? "" : ", "), n});
  return cat({"[", text, "]"});
}

}  // namespace detail

/// Whether a type is one of the floating-point types of weights; loads convert these to each other.
constexpr bool is_floating(safetensors_dtype type) {
  return type == safetensors_dtype::f64 || type == safetensors_dtype::f32 || type == safetensors_dtype::f16 ||
         type == safetensors_dtype::bf16;
}

/// Returns the number of elements of a shape that a reader has accepted. If an extent is 0, other extents' product may
/// overflow.
inline std::int64_t elements_of_shape(std::span<const std::int64_t> shape) {
  for (const std::int64_t extent : shape)
    if (extent == 0) return 0;
  std::int64_t n = 1;
  for (const std::int64_t extent : shape) n *= extent;
  return n;
}

/// One tensor of a file: row-major elements in `bytes`, which need not be aligned. A scalar has the shape {}.
struct safetensors_entry {
  std::string name;
  safetensors_dtype dtype = safetensors_dtype::f32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;

  /// Number of elements; correct for entries that a reader or writer has accepted.
  std::int64_t size() const { return static_cast<std::int64_t>(bytes.size() / size_of(dtype)); }
};

using safetensors_metadata = std::vector<std::pair<std::string, std::string>>;

/// The longest header that readers of the format accept.
inline constexpr std::uint64_t safetensors_max_header = 100'000'000;

/// Returns the bytes of a tensor, or nothing if they do not fit 63 bits or an extent is negative.
inline std::optional<std::uint64_t> safetensors_bytes(const std::vector<std::int64_t>& shape, safetensors_dtype type) {
  std::uint64_t bytes = size_of(type);
  bool empty = false;
  for (std::int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    empty = empty || extent == 0;
  }
  if (empty) return 0;
  for (std::int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(extent), &bytes)) return std::nullopt;
  }
  if (bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
  return bytes;
}

/// Converts IEEE binary16 to float, exactly.
inline float float_from_f16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  float magnitude = 0;
  if (exponent == 31) {
    magnitude = fraction != 0 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  } else {
    magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                              : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

namespace detail {

/// The bits of an F16 element.
struct f16_bits {
  std::uint16_t bits;
};
/// Returns the value of a stored element: a float for F16, otherwise the element itself.
template <class Stored>
auto value_of_element(Stored stored) {
  if constexpr (std::same_as<Stored, f16_bits>)
    return float_from_f16(stored.bits);
  else
    return stored;
}

/// Calls f(Stored{}) with the type in which elements of `type` are stored.
template <class F>
decltype(auto) with_stored_type(safetensors_dtype type, F&& f) {
  switch (type) {
    case safetensors_dtype::boolean:
    case safetensors_dtype::u8:
      return f(std::uint8_t{});
    case safetensors_dtype::i8:
      return f(std::int8_t{});
    case safetensors_dtype::i16:
      return f(std::int16_t{});
    case safetensors_dtype::u16:
      return f(std::uint16_t{});
    case safetensors_dtype::i32:
      return f(std::int32_t{});
    case safetensors_dtype::u32:
      return f(std::uint32_t{});
    case safetensors_dtype::i64:
      return f(std::int64_t{});
    case safetensors_dtype::u64:
      return f(std::uint64_t{});
    case safetensors_dtype::f16:
      return f(f16_bits{});
    case safetensors_dtype::bf16:
      return f(bf16{});
    case safetensors_dtype::f32:
      return f(float{});
    case safetensors_dtype::f64:
      break;
  }
  return f(double{});
}

}  // namespace detail

/// Copies the elements of `entry` to `out` as `T`, row-major, `entry.size()` elements. double, float and bf16 come from
/// F64, F32, F16 and BF16, rounded to nearest even (F64 to bf16 by way of float). Integers come from BOOL and every
/// integer type; values that do not fit throw `error`. Integers and floating point are not converted to each other:
/// other pairs throw `error`.
template <class T>
  requires(std::floating_point<T> || std::same_as<T, bf16> || (std::integral<T> && !std::same_as<T, bool>))
void copy_elements(const safetensors_entry& entry, T* out) {
  detail::with_stored_type(entry.dtype, [&](auto stored) {
    using number = decltype(detail::value_of_element(stored));
    if constexpr (std::integral<T> != std::integral<number>) {
      fail({"tensor '", entry.name, "': ", name_of(entry.dtype), " elements cannot be read as ",
            std::integral<T> ? "integers" : "floating point"});
    } else {
      for (std::size_t i = 0; i < entry.bytes.size() / sizeof stored; ++i) {
        auto element = stored;
        std::memcpy(&element, entry.bytes.data() + i * sizeof element, sizeof element);
        const number value = detail::value_of_element(element);
        if constexpr (!std::integral<T>) {
          out[i] = converted<T>(value);
        } else {
          if (!std::in_range<T>(value))
            fail({"tensor '", entry.name, "': the element ", value, " does not fit ", 8 * sizeof(T), " bits"});
          out[i] = static_cast<T>(value);
        }
      }
    }
  });
}

/// Returns the plait type of weights stored as F64, F32 or BF16; nothing for other types.
constexpr std::optional<dtype> weight_dtype_of(safetensors_dtype type) {
  for (const dtype one : {dtype::f64, dtype::f32, dtype::bf16})
    if (safetensors_dtype_of(one) == type) return one;
  return std::nullopt;
}

/// Converts `n` elements of a file to F64, F32 or BF16, as `copy_elements` does. Elements that already have the wanted
/// type are copied, for every type. `out` must be aligned for its elements. Throws as `copy_elements`, naming `name`,
/// and for other types.
inline void convert_elements(safetensors_dtype from, dtype to, const std::byte* in, std::byte* out, std::int64_t n,
                             const std::string& name) {
  const auto count = static_cast<std::size_t>(n);
  const safetensors_entry entry{name, from, {n}, {in, count * size_of(from)}};
  if (safetensors_dtype_of(to) == from)
    std::memcpy(out, in, count * size_of(to));
  else if (to == dtype::f64)
    copy_elements(entry, reinterpret_cast<double*>(out));
  else if (to == dtype::f32)
    copy_elements(entry, reinterpret_cast<float*>(out));
  else if (to == dtype::bf16)
    copy_elements(entry, reinterpret_cast<bf16*>(out));
  else
    fail({"tensor '", name, "' holds ", name_of(from), " elements, which do not become ", plait::name_of(to)});
}

namespace detail {

/// Returns up to twenty names in quotes.
inline std::string quoted(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(names.size(), 20); ++i)
    append(text, {i == 0 ? "'" : ", '", names[i], "'"});
  if (names.size() > 20) append(text, {" and ", names.size() - 20, " more"});
  return text;
}

}  // namespace detail

/// The content of a safetensors file.
struct safetensors_contents {
  std::vector<safetensors_entry> entries;  ///< in the order of their data
  safetensors_metadata metadata;
};

/// A tensor of a file, and the position of its bytes in the file.
struct safetensors_position {
  std::string name;
  safetensors_dtype dtype = safetensors_dtype::f32;
  std::vector<std::int64_t> shape;
  std::uint64_t position = 0, bytes = 0;
};

/// The header of a safetensors file.
struct safetensors_table {
  std::vector<safetensors_position> tensors;  ///< in the order of their data
  safetensors_metadata metadata;
};

/// Returns the number of bytes before the data: 8 and the header's bytes. `start` has the file's first bytes, at least
/// 8 if the file is that long. Throws `error`, whose text starts with `source`, for shorter files.
std::uint64_t safetensors_header_end(std::span<const std::byte> start, std::uint64_t file_bytes,
                                     const std::string& source);

/// Reads the header of a safetensors file: u64 length N of the header, JSON of N bytes, data. `start` has the file's
/// bytes at least up to the data, `file_bytes` is the length of the file. White space around the JSON is allowed, all
/// else is strict. The tensors' data must follow each other without holes or overlaps to the end of the file. Each
/// tensor has the bytes of its shape, and names and keys are unique. Throws `error`, whose text starts with `source`
/// and names the tensor.
safetensors_table parse_safetensors_header(std::span<const std::byte> start, std::uint64_t file_bytes,
                                           const std::string& source);

inline constexpr const char* safetensors_file_name = "model.safetensors";
inline constexpr const char* safetensors_index_name = "model.safetensors.index.json";

/// Returns the file of each tensor from the text of a model.safetensors.index.json. Throws `error`, whose text starts
/// with `source`, if it has no weight_map. It also throws if an entry is not a .safetensors file in the folder.
std::map<std::string, std::string> parse_safetensors_index(std::string_view text, const std::string& source);

/// Reads the bytes of a whole safetensors file. The spans of the result point into `file`. Throws as
/// `parse_safetensors_header`.
inline safetensors_contents parse_safetensors(std::span<const std::byte> file, const std::string& source) {
  safetensors_table table = parse_safetensors_header(file, file.size(), source);
  safetensors_contents out{{}, std::move(table.metadata)};
  for (safetensors_position& t : table.tensors)
    out.entries.push_back({std::move(t.name), t.dtype, std::move(t.shape), file.subspan(t.position, t.bytes)});
  return out;
}

/// An open safetensors file. The entries point into the mapped file and live as long as any copy of the reader.
class safetensors_reader {
 public:
  /// Throws as `mapped_file` and `parse_safetensors` do; the text has `field` and the path.
  explicit safetensors_reader(const std::string& path, const std::string& field = "path")
      : file_(std::make_shared<const mapped_file>(path, field)),
        source_(cat({field, ": '", path, "'"})),
        contents_(parse_safetensors(file_->bytes(), source_)) {
    by_name_.resize(contents_.entries.size());
    for (std::size_t i = 0; i < by_name_.size(); ++i) by_name_[i] = i;
    std::sort(by_name_.begin(), by_name_.end(), [&](std::size_t a, std::size_t b) { return name(a) < name(b); });
  }

  const std::vector<safetensors_entry>& entries() const { return contents_.entries; }
  const safetensors_metadata& metadata() const { return contents_.metadata; }

  /// Returns the tensor called `wanted`, or null.
  const safetensors_entry* find(std::string_view wanted) const {
    const auto found = std::lower_bound(by_name_.begin(), by_name_.end(), wanted,
                                        [&](std::size_t i, std::string_view key) { return name(i) < key; });
    return found != by_name_.end() && name(*found) == wanted ? &contents_.entries[*found] : nullptr;
  }
  /// Returns the tensor called `wanted`. Throws `error` if there is none.
  const safetensors_entry& at(std::string_view wanted) const {
    if (const auto* entry = find(wanted)) return *entry;
    fail({source_, ": there is no tensor '", wanted, "' among its ", entries().size()});
  }
  /// Returns the elements of tensor `wanted` as `T`. Throws as `at` and `copy_elements`.
  template <class T>
  std::vector<T> read(std::string_view wanted) const {
    const safetensors_entry& entry = at(wanted);
    std::vector<T> out(static_cast<std::size_t>(entry.size()));
    copy_elements(entry, out.data());
    return out;
  }

 private:
  std::string_view name(std::size_t i) const { return contents_.entries[i].name; }

  std::shared_ptr<const mapped_file> file_;
  std::string source_;
  safetensors_contents contents_;
  std::vector<std::size_t> by_name_;
};

/// In files that plait writes, the data start at a multiple of this many bytes (a page).
inline constexpr std::uint64_t safetensors_alignment = 4096;

/// A tensor of a file whose data are written later: row-major, a scalar has the shape {}.
struct safetensors_declaration {
  std::string name;
  safetensors_dtype dtype = safetensors_dtype::f32;
  std::vector<std::int64_t> shape;
};

/// The positions of everything in a file, in bytes from its start.
struct safetensors_plan {
  std::string header;                    ///< the first bytes of the file: header length and header, padded with spaces
  std::vector<std::uint64_t> positions;  ///< of each tensor's data, in the order of declaration
  std::vector<std::uint64_t> bytes;      ///< of each tensor
  std::uint64_t file_bytes = 0;
};

/// Returns the plan of a file with the data of `tensors` in this order. The data start at a multiple of
/// `safetensors_alignment`. Throws `error`, whose text starts with `source`, for a name that is empty, reserved, used
/// twice or not UTF-8. It also throws for sizes that overflow or need too long a header.
inline safetensors_plan plan_safetensors(const std::vector<safetensors_declaration>& tensors,
                                         const safetensors_metadata& metadata, const std::string& source) {
  std::unordered_set<std::string_view> names;
  const auto claim = [&](const std::string& name) {
    if (!is_utf8(name)) fail({source, ": the name '", name, "' is not UTF-8"});
    if (!names.insert(name).second) fail({source, ": the name '", name, "' is used twice"});
  };
  json_object header;
  if (!metadata.empty()) {
    json_object values;
    for (const auto& [key, value] : metadata) {
      claim(key);
      if (!is_utf8(value)) fail({source, ": the metadata of '", key, "' is not UTF-8"});
      values.add(key, value);
    }
    header.add("__metadata__", values);
  }
  names.clear();
  safetensors_plan out;
  std::uint64_t end = 0;  // end of the data, relative to their start
  for (const safetensors_declaration& tensor : tensors) {
    if (tensor.name.empty() || tensor.name == "__metadata__")
      fail({source, ": '", tensor.name, "' cannot be the name of a tensor"});
    claim(tensor.name);
    const auto bytes = safetensors_bytes(tensor.shape, tensor.dtype);
    if (!bytes || *bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) - end)
      fail({source, ": tensor '", tensor.name, "' makes the file longer than 2^63 bytes, or an extent is negative"});
    out.positions.push_back(end);
    out.bytes.push_back(*bytes);
    end += *bytes;
    header.add(tensor.name, json_object()
                                .add("dtype", name_of(tensor.dtype))
                                .add("shape", tensor.shape)
                                .add("data_offsets", std::vector<std::uint64_t>{end - *bytes, end}));
  }
  std::string text = header.text();
  const std::uint64_t unpadded = 8 + text.size();
  text.append((safetensors_alignment - unpadded % safetensors_alignment) % safetensors_alignment, ' ');
  if (text.size() > safetensors_max_header) {
    fail({source, ": ", tensors.size(), " tensors make a header of ", text.size(), " bytes; readers accept ",
          safetensors_max_header, "; use several files"});
  }
  const std::uint64_t length = text.size();
  out.header.resize(8);
  std::memcpy(out.header.data(), &length, 8);
  out.header += text;
  for (std::uint64_t& position : out.positions) position += out.header.size();
  out.file_bytes = out.header.size() + end;
  return out;
}

/// Writes a safetensors file in one step. Tensors with wider elements come first, otherwise in the given order, so that
/// each is aligned to its element size. Throws as `plan_safetensors` and `atomic_file` do, naming `field`. It also
/// throws for data whose length does not fit the shape.
inline void write_safetensors(const std::string& path, std::vector<safetensors_entry> entries,
                              const safetensors_metadata& metadata = {}, const std::string& field = "path") {
  std::stable_sort(entries.begin(), entries.end(),
                   [](const auto& a, const auto& b) { return size_of(a.dtype) > size_of(b.dtype); });
  const std::string source = cat({field, ": '", path, "'"});
  std::vector<safetensors_declaration> tensors;
  for (const safetensors_entry& entry : entries) tensors.push_back({entry.name, entry.dtype, entry.shape});
  const safetensors_plan plan = plan_safetensors(tensors, metadata, source);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].bytes.size() != plan.bytes[i]) {
      fail({source, ": tensor '", entries[i].name, "' has ", entries[i].bytes.size(),
            " bytes, and its shape and dtype take ", plan.bytes[i]});
    }
  }
  atomic_file file(path, field);
  file.write(plan.header);
  for (const safetensors_entry& entry : entries) file.write(entry.bytes.data(), entry.bytes.size());
  file.commit();
}

/// A safetensors file that is being written. If destroyed before `finish`, it leaves a file that no reader accepts.
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

  /// Writes the next bytes of the data. A call may end within a tensor or span several. Throws `error` for more bytes
  /// than were declared.
  void append(std::span<const std::byte> bytes) {
    expect(bytes);
    file_->write(end_, bytes);
    sum_up(bytes);
  }
  /// Appends bytes that must not change until `finish` has returned or this is destroyed. Their checksum is computed
  /// while the system writes them (`open_file::start_write`).
  void append_lasting(std::span<const std::byte> bytes) {
    expect(bytes);
    file_->start_write(end_, bytes);
    sum_up(bytes);
  }

  /// Syncs and closes the file. Throws `error` if bytes are missing.
  void finish() {
    if (end_ != plan_.file_bytes)
      fail({"'", file_->path(), "': ", plan_.file_bytes - end_, " declared bytes are missing"});
    file_->sync();
    file_.reset();
  }

  const safetensors_plan& plan() const { return plan_; }
  /// Returns the checksum of the header, including its length and padding.
  std::uint32_t header_crc32c() const { return header_sum_; }
  /// Returns the checksums of each tensor's data, in the order of declaration, for the bytes appended so far.
  const std::vector<std::uint32_t>& crc32c_of_tensors() const { return sums_; }

 private:
  void expect(std::span<const std::byte> bytes) const {
    if (bytes.size() > plan_.file_bytes - end_) {
      fail({"'", file_->path(), "': ", bytes.size(), " bytes are too many; ", plan_.file_bytes - end_,
            " declared bytes are left"});
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
  std::uint64_t end_ = 0;   ///< position after the last written byte
  std::size_t tensor_ = 0;  ///< index of the tensor of the next byte, unless that tensor is empty
};

}  // namespace plait

#if !defined(PLAIT_COMPILED) || defined(PLAIT_COMPILING_FILES)
namespace plait {

namespace detail {

/// Reads headers, which have one fixed structure: `{"__metadata__": {key: string, ..}, name: {"dtype": string, "shape":
/// [..], "data_offsets": [begin, end]}, ..}`. It builds no tree, so a hostile header costs only a few bytes of memory
/// per byte.
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
    for (const std::string_view one : safetensors_names) append(legal, {legal.empty() ? "" : ", ", one});
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
    fail({source, ": ", file_bytes, " bytes are not a safetensors file; it starts with 8 bytes of header length"});
  std::uint64_t length = 0;
  std::memcpy(&length, start.data(), 8);
  // A file of another format may begin with any number.
  if (length > safetensors_max_header || length > file_bytes - 8) {
    const std::string_view other = other_format({reinterpret_cast<const char*>(start.data()), start.size()});
    if (!other.empty()) fail({source, ": this is not a safetensors file but ", other});
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
  if (const std::string_view other = other_format(text); !other.empty())
    fail({source, ": this is not JSON but ", other});
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
#endif

#include "plait/core/macros_on.hpp"
