// Token files: their formats, a stream over several files, and text as one token for each byte.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/text.hpp"
#include "plait/io/json.hpp"
#include "plait/io/mapped_file.hpp"
#include "plait/io/posix_file_system.hpp"

namespace plait {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and are read in place");

/// The format of a token file. `automatic` chooses megatron for an `.idx`, a `.bin` next to an `.idx`, or the stem of
/// both. Another `.bin` is nanogpt. Other files are text with a tokenizer, and bytes without one.
enum class token_format {
  automatic,
  bytes,     ///< any file; each byte is a token, vocabulary 256
  text,      ///< a UTF-8 file that a tokenizer reads
  megatron,  ///< `.bin` and `.idx` of Megatron-LM's indexed dataset
  nanogpt,   ///< flat uint16 tokens without a header
};

constexpr const char* name_of(token_format format) {
  constexpr const char* names[] = {"auto", "bytes", "text", "megatron", "nanogpt"};
  return names[static_cast<int>(format)];
}

/// Returns the format called `name`. Throws `error` with --data-format and the legal names for other names.
inline token_format token_format_from(std::string_view name) {
  for (auto format : {token_format::automatic, token_format::bytes, token_format::text, token_format::megatron,
                      token_format::nanogpt})
    if (name == name_of(format)) return format;
  fail({"--data-format: unknown format '", name, "'; legal are auto, bytes, text, megatron, nanogpt"});
}

/// The integer type of the tokens in a file.
enum class token_type : std::uint8_t { u8, i8, i16, u16, i32, i64 };

/// Returns f(T()) for the type T that a `token_type` names.
template <class F>
constexpr auto with_type(token_type type, F&& f) {
  if (type == token_type::u8) return f(std::uint8_t{});
  if (type == token_type::i8) return f(std::int8_t{});
  if (type == token_type::i16) return f(std::int16_t{});
  if (type == token_type::u16) return f(std::uint16_t{});
  if (type == token_type::i32) return f(std::int32_t{});
  return f(std::int64_t{});
}
constexpr std::int64_t size_of(token_type type) {
  return with_type(type, [](auto token) { return static_cast<std::int64_t>(sizeof token); });
}

namespace detail {

/// A data file that is read piece by piece, or the tokens made from a text file. It is not mapped: if a mapped file
/// becomes shorter during a run, a signal ends the program; here an error is thrown.
class data_file {
 public:
  data_file(const std::string& path, std::vector<std::int32_t> tokens) : path_(path), tokens_(std::move(tokens)) {
    size_ = static_cast<std::int64_t>(std::as_bytes(std::span(tokens_)).size());
  }
  data_file(const std::string& path, std::string flag) : path_(path), flag_(std::move(flag)) {
    try {
      file_ = machine_files().open(path);
      size_ = static_cast<std::int64_t>(file_->size());
    } catch (const error& e) {
      fail({flag_, ": ", e.what()});
    }
  }
  const std::string& path() const { return path_; }
  /// Returns the size in bytes when the file was opened.
  std::int64_t size() const { return size_; }
  /// Reads elements [first, first + count) of an array that begins at byte `start`.
  template <class T>
  void read(std::int64_t start, std::int64_t first, std::int64_t count, T* out) const {
    const auto from = static_cast<std::size_t>(start + first * static_cast<std::int64_t>(sizeof(T)));
    const auto bytes = std::as_writable_bytes(std::span(out, static_cast<std::size_t>(count)));
    if (!file_) {
      std::ranges::copy(std::as_bytes(std::span(tokens_)).subspan(from, bytes.size()), bytes.begin());
      return;
    }
    try {
      file_->read(from, bytes);
    } catch (const error& e) {
      fail({flag_, ": ", e.what(), "; it had ", size_, " bytes when it was opened"});
    }
  }
  template <class T>
  T read_one(std::int64_t start, std::int64_t index) const {
    T value{};
    read(start, index, 1, &value);
    return value;
  }

 private:
  std::string path_, flag_;
  std::unique_ptr<const open_file> file_;  ///< null: `tokens_` has the tokens
  std::vector<std::int32_t> tokens_;
  std::int64_t size_ = 0;
};

}  // namespace detail

/// The places of the documents in a token file. Entries are read from the file's index; none are kept in memory.
struct document_index {
  std::shared_ptr<const detail::data_file> file;
  std::int64_t offsets = 0;    ///< byte of the i64 array of the sequences' byte offsets
  std::int64_t sequences = 0;  ///< elements of that array
  std::int64_t starts = 0;     ///< byte of the i64 array of the documents' first sequences
  std::int64_t documents = 0;  ///< elements of that array; the last may be the end of the file
  std::int64_t token_bytes = 1;

  /// Returns the token at which document `d` begins; `end` for d >= `documents`.
  std::int64_t begin(std::int64_t d, std::int64_t end) const {
    if (d >= documents) return end;
    const auto sequence = file->read_one<std::int64_t>(starts, d);
    return sequence >= sequences ? end : file->read_one<std::int64_t>(offsets, sequence) / token_bytes;
  }
  /// Returns the last document that begins at token `place` or before; -1 if none does.
  std::int64_t holding(std::int64_t place, std::int64_t end) const {
    std::int64_t low = -1, high = documents;  // the answer is in [low, high)
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (begin(middle, end) <= place ? low : high) = middle;
    }
    return low;
  }
};

/// The tokens of one file: `count` integers of `type`, from the first byte of `file`.
struct token_file {
  std::shared_ptr<const detail::data_file> file;
  token_type type = token_type::u8;
  std::int64_t count = 0;
  document_index index{};  ///< without a file if the format has no index
};

namespace detail {

/// Reads the header fields of a Megatron index in order. Throws an error with the place if the file ends too early.
class index_reader {
 public:
  index_reader(const mapped_file& file, const std::string& flag) : file_(file), flag_(flag) {}

  template <class T>
  T next(const char* what) {
    T value{};
    std::memcpy(&value, take(1, sizeof(T), what), sizeof(T));
    return value;
  }
  /// Returns the next `count` elements of `size` bytes. They are unaligned, so the caller copies each.
  const std::byte* take(std::uint64_t count, std::uint64_t size, const char* what) {
    const std::uint64_t left = file_.bytes().size() - position_;
    if (count > left / size) {
      bad(cat({"is truncated: its ", what, " would need ", count, " x ", size, " bytes from byte ", position_, ", and ",
               left, " are left"}));
    }
    const std::byte* start = file_.bytes().data() + position_;
    position_ += count * size;
    return start;
  }
  std::uint64_t left() const { return file_.bytes().size() - position_; }
  /// Returns the position of the next byte.
  std::int64_t position() const { return static_cast<std::int64_t>(position_); }
  [[noreturn]] void bad(const std::string& what) const { fail({flag_, ": '", file_.path(), "' ", what}); }

 private:
  const mapped_file& file_;
  const std::string& flag_;
  std::uint64_t position_ = 0;
};

template <class T>
T element(const std::byte* start, std::uint64_t index) {
  T value{};
  std::memcpy(&value, start + index * sizeof(T), sizeof(T));
  return value;
}

inline token_type megatron_token_type(const index_reader& index, std::uint8_t code) {
  using enum token_type;
  constexpr token_type integers[] = {u8, i8, i16, i32, i64};  // types of the codes 1 to 5
  if (code == 6 || code == 7)
    index.bad(cat({"stores floating-point numbers (dtype code ", code, "); tokens are integers"}));
  if (code < 1 || code > 8) index.bad(cat({"has the unknown dtype code ", code, "; legal are 1 to 5 and 8"}));
  return code == 8 ? u16 : integers[code - 1];
}

}  // namespace detail

/// Opens Megatron-LM's indexed dataset. `path` is the `.bin`, the `.idx`, or their common stem. Sequences are read as
/// one stream in the order of the file. Samples may cross the borders of documents, as in Megatron's GPT data set. The
/// index has: "MMIDIDX\0\0", u64 version 1, u8 dtype code, u64 sequences, u64 documents, i32 length of each sequence,
/// i64 byte offset of each sequence, i64 first sequence of each document, and optionally one i8 mode each.
inline token_file open_megatron(const std::string& path, const std::string& flag) {
  std::string stem = path;
  if (stem.ends_with(".bin") || stem.ends_with(".idx")) stem.resize(stem.size() - 4);
  const mapped_file index_file(stem + ".idx", flag);
  auto tokens = std::make_shared<const detail::data_file>(stem + ".bin", flag);

  detail::index_reader index(index_file, flag);
  if (std::memcmp(index.take(9, 1, "magic"), "MMIDIDX\0\0", 9) != 0) {
    index.bad("is not a Megatron index: it does not start with \"MMIDIDX\"");
  }
  if (const auto version = index.next<std::uint64_t>("version"); version != 1) {
    index.bad(cat({"has version ", version, "; version 1 is legal"}));
  }
  const token_type type = detail::megatron_token_type(index, index.next<std::uint8_t>("dtype code"));
  const auto sequences = index.next<std::uint64_t>("number of sequences");
  const auto documents = index.next<std::uint64_t>("number of documents");
  const std::byte* lengths = index.take(sequences, 4, "sequence lengths");
  document_index where{.file = std::make_shared<const detail::data_file>(stem + ".idx", flag),
                       .offsets = index.position(),
                       .sequences = static_cast<std::int64_t>(sequences),
                       .documents = static_cast<std::int64_t>(documents),
                       .token_bytes = size_of(type)};
  const std::byte* offsets = index.take(sequences, 8, "sequence offsets");
  where.starts = index.position();
  const std::byte* starts = index.take(documents, 8, "document starts");
  if (index.left() != 0 && index.left() != sequences) {
    index.bad(cat({"has ", index.left(), " bytes after its last field"}));
  }
  const std::int64_t bytes = tokens->size();
  std::int64_t end = 0;
  for (std::uint64_t s = 0; s < sequences; ++s) {
    const auto length = detail::element<std::int32_t>(lengths, s);
    const auto offset = detail::element<std::int64_t>(offsets, s);
    if (length < 0) index.bad(cat({"gives sequence ", s, " the length ", length}));
    if (offset != end) {
      index.bad(cat({"places sequence ", s, " at byte ", offset, " and the one before ends at ", end,
                     "; sequences must follow each other without gaps"}));
    }
    end += length * size_of(type);  // cannot overflow: before it, end <= bytes
    if (end > bytes) {
      fail({flag, ": '", tokens->path(), "' is truncated: sequence ", s, " of its index ends at byte ", end,
            ", and the file has ", bytes});
    }
  }
  if (end != bytes) {
    fail({flag, ": '", tokens->path(), "' has ", bytes, " bytes, and its index describes ", end,
          "; they do not belong together"});
  }
  std::int64_t previous = 0;
  for (std::uint64_t d = 0; d < documents; ++d) {
    const auto start = detail::element<std::int64_t>(starts, d);
    if (start < previous || static_cast<std::uint64_t>(start) > sequences) {
      index.bad(cat({"lets document ", d, " start at sequence ", start, "; legal are ", previous, " to ", sequences}));
    }
    previous = start;
  }
  return {std::move(tokens), type, end / size_of(type), std::move(where)};
}

/// Opens a flat file of uint16 tokens, as nanoGPT's data scripts write.
inline token_file open_nanogpt(const std::string& path, const std::string& flag) {
  auto file = std::make_shared<const detail::data_file>(path, flag);
  const std::int64_t bytes = file->size();
  if (bytes % 2 != 0) {
    fail({flag, ": '", path, "' has ", bytes, " bytes, an odd number; it is truncated, or its tokens are not uint16"});
  }
  // llm.c's files of 16-bit tokens begin with the first number, those of 32-bit tokens with the second.
  const std::int32_t magic = bytes >= 4 ? file->read_one<std::int32_t>(0, 0) : 0;
  if (magic == 20240520 || magic == 20240801) {
    fail({flag, ": '", path, "' has the header of llm.c, for tokens of ", magic == 20240520 ? 16 : 32,
          " bits; nanoGPT's format is flat uint16 tokens without a header"});
  }
  return {std::move(file), token_type::u16, bytes / 2};
}

/// Throws `error` if a file does not look like the format that was guessed from its name: it has the header of another
/// program, zero bytes in a text, or tokens of 32 or 64 bits in place of 16. If the data are meant so, the user gives
/// the format by --data-format.
inline void check_guess(const token_file& tokens, const std::string& flag) {
  const bool text = tokens.type == token_type::u8;
  std::vector<std::uint8_t> start(static_cast<std::size_t>(std::min<std::int64_t>(tokens.file->size(), 1 << 14)));
  tokens.file->read(0, 0, static_cast<std::int64_t>(start.size()), start.data());
  const auto refuse = [&](std::string_view why) {
    fail({flag, ": '", tokens.file->path(), "' ", why, "; it would be read as ", text ? "bytes of text" : "uint16",
          ", and if that is meant, give --data-format ", name_of(text ? token_format::bytes : token_format::nanogpt)});
  };
  const std::string_view other = other_format({reinterpret_cast<const char*>(start.data()), start.size()});
  if (!other.empty()) refuse(cat({"is ", other}));
  if (text) {
    if (std::find(start.begin(), start.end(), 0) != start.end()) refuse("is no text, as it has zero bytes");
    return;
  }
  // The upper half of a little-endian 32-bit token is zero below 65536, and below 4 in the largest vocabularies in use.
  constexpr std::size_t fewest_bytes = 256;  // fewer bytes may look so by chance
  int lower = 0, upper = 0;
  for (std::size_t i = 0; i + 4 <= start.size(); i += 4) {
    lower = std::max(lower, start[i] + 256 * start[i + 1]);
    upper = std::max(upper, start[i + 2] + 256 * start[i + 3]);
  }
  if (start.size() >= fewest_bytes && upper < 16 && lower > 16 * upper)
    refuse(cat({"seems to have tokens of 32 or 64 bits, as every second 16 bits are below ", upper + 1,
                "; write them as uint16, or as megatron with an .idx that says how wide they are"}));
}

/// Opens any file as bytes.
inline token_file open_bytes(const std::string& path, const std::string& flag) {
  auto file = std::make_shared<const detail::data_file>(path, flag);
  const std::int64_t count = file->size();
  return {std::move(file), token_type::u8, count};
}

/// A function that returns the tokens of a text.
using text_encoder = std::function<std::vector<std::int64_t>(std::string_view text)>;

/// Reads a whole file as text.
inline token_file open_text(const std::string& path, const std::string& flag, const text_encoder& encode) {
  std::vector<std::int32_t> tokens;
  try {
    for (const std::int64_t token : encode(read_whole(machine_files(), path)))
      tokens.push_back(static_cast<std::int32_t>(token));
  } catch (const error& e) {
    fail({flag, ": '", path, "': ", e.what()});
  }
  const auto count = static_cast<std::int64_t>(tokens.size());
  return {std::make_shared<const detail::data_file>(path, std::move(tokens)), token_type::i32, count};
}

/// Returns the format that `token_format::automatic` chooses for `path`.
inline token_format guess_token_format(const std::string& path, bool has_tokenizer = false) {
  const auto exists = [](const std::string& name) {
    std::error_code ignored;
    return std::filesystem::exists(name, ignored);
  };
  if (path.ends_with(".idx")) return token_format::megatron;
  if (path.ends_with(".bin")) {
    return exists(path.substr(0, path.size() - 4) + ".idx") ? token_format::megatron : token_format::nanogpt;
  }
  if (!exists(path) && exists(path + ".bin") && exists(path + ".idx")) return token_format::megatron;
  return has_tokenizer ? token_format::text : token_format::bytes;
}

/// The files of a token source, and options for reading them.
struct token_source_config {
  std::vector<std::string> paths;  ///< one or more; joined in this order
  token_format format = token_format::automatic;
  std::int64_t vocab = 256;  ///< every token must be below it
  /// The token that ends a document; -1: documents end where the files' index says. The end of a file also ends a
  /// document.
  std::int64_t end_of_document = -1;
  std::string flag = "--data";  ///< the option that names `paths`
};

/// One stream of tokens over one or several files, readable at any place. A copy shares the open files. Reading is
/// const and safe from several threads. If a file becomes shorter while it is read, `error` is thrown.
class token_source {
 public:
  /// Opens every file and checks headers and sizes. Throws `error` if there is no path, for an empty, malformed or
  /// truncated file, for files of different formats, and for a file that does not look like the format that `automatic`
  /// chose. Token values are checked when they are read (`read`, `token_counts`).
  explicit token_source(token_source_config config, const text_encoder& encode = {}) : config_(std::move(config)) {
    const std::string& flag = config_.flag;
    if (config_.paths.empty()) fail({flag, ": no file given; name one or more text or token files"});
    if (config_.vocab < 1) fail({"--model: the vocabulary has ", config_.vocab, " tokens; at least 1 is legal"});
    for (const std::string& path : config_.paths) {
      const token_format format =
          config_.format == token_format::automatic ? guess_token_format(path, encode != nullptr) : config_.format;
      if (format_ != token_format::automatic && format != format_) {
        fail({flag, ": '", config_.paths.front(), "' is read as ", name_of(format_), " and '", path, "' as ",
              name_of(format), "; all files must have one format"});
      }
      format_ = format;
      add(open(path, encode));
      if (config_.format == token_format::automatic &&
          (format == token_format::bytes || format == token_format::nanogpt))
        check_guess(segments_.back().tokens, flag);
    }
    if (config_.end_of_document < -1 || config_.end_of_document >= config_.vocab)
      fail({"--end-of-document is ", config_.end_of_document, "; legal are the tokens, 0 to ", config_.vocab - 1,
            ", and -1 for none"});
  }

  /// Returns the number of tokens of all files together; at least 1.
  std::int64_t size() const { return segments_.back().first + segments_.back().tokens.count; }
  /// Returns the format of the files; never `automatic`.
  token_format format() const { return format_; }
  std::int64_t vocab() const { return config_.vocab; }
  const token_source_config& config() const { return config_; }

  /// Copies tokens [first, first + count) to `out`. Throws `error` if the range is not inside [0, size()), or if a
  /// token is negative or not below the vocabulary. The text names file, position, token and vocabulary.
  void read(std::int64_t first, std::int64_t count, std::int64_t* out) const {
    require_inside(first, count);
    if (count == 0) return;
    for (auto segment = segment_of(first); count > 0; ++segment) {
      const std::int64_t start = first - segment->first;
      const std::int64_t n = std::min(count, segment->tokens.count - start);
      copy(*segment, start, n, out);
      first += n;
      count -= n;
      out += n;
    }
  }

  /// Returns whether the source knows where documents begin and end: the files have an index, or a token ends
  /// documents.
  bool knows_documents() const { return config_.end_of_document >= 0 || format_ == token_format::megatron; }

  /// Writes for each token of [first, first + count) where its document begins, but at least `from`, which is <= first.
  /// Throws `error` as `read`, and if `knows_documents` is false.
  void document_starts(std::int64_t from, std::int64_t first, std::int64_t count, std::int64_t* out) const {
    if (!knows_documents())
      fail({config_.flag, ": files of format ", name_of(format_),
            " do not say where documents end; name the token by --end-of-document"});
    require_inside(first, count);
    if (first < from) fail({"token_source: documents of token ", first, " asked for, seen from token ", from});
    config_.end_of_document < 0 ? starts_by_index(from, first, count, out) : starts_by_token(from, first, count, out);
  }

 private:
  struct segment_t {
    std::int64_t first;  // place of the file's first token in the stream
    token_file tokens;
  };

  void require_inside(std::int64_t first, std::int64_t count) const {
    if (first < 0 || count < 0 || first > size() - count)
      fail({config_.flag, ": tokens [", first, ", ", first, " + ", count, ") asked for, and the data has ", size()});
  }

  std::vector<segment_t>::const_iterator segment_of(std::int64_t place) const {
    return std::upper_bound(segments_.begin(), segments_.end(), place,
                            [](std::int64_t p, const segment_t& s) { return p < s.first; }) -
           1;
  }

  token_file open(const std::string& path, const text_encoder& encode) const {
    if (format_ == token_format::megatron) return open_megatron(path, config_.flag);
    if (format_ == token_format::nanogpt) return open_nanogpt(path, config_.flag);
    if (format_ == token_format::bytes) return open_bytes(path, config_.flag);
    if (!encode) fail({"--data-format text needs a tokenizer, which makes tokens of it"});
    return open_text(path, config_.flag, encode);
  }
  void add(token_file tokens) {
    if (tokens.count == 0) fail({config_.flag, ": '", tokens.file->path(), "' is empty"});
    const std::int64_t first = segments_.empty() ? 0 : size();
    segments_.push_back({first, std::move(tokens)});
  }

  void starts_by_index(std::int64_t from, std::int64_t first, std::int64_t count, std::int64_t* out) const {
    for (std::int64_t place = first; place < first + count;) {
      const segment_t& segment = *segment_of(place);
      const std::int64_t end = segment.tokens.count;
      const std::int64_t document = segment.tokens.index.holding(place - segment.first, end);
      const std::int64_t begin = document < 0 ? 0 : segment.tokens.index.begin(document, end);
      const std::int64_t following = segment.first + segment.tokens.index.begin(document + 1, end);
      const std::int64_t next = std::clamp(following, place + 1, std::min(segment.first + end, first + count));
      std::fill(out + (place - first), out + (next - first), std::max(from, segment.first + begin));
      place = next;
    }
  }
  void starts_by_token(std::int64_t from, std::int64_t first, std::int64_t count, std::int64_t* out) const {
    if (count == 0) return;
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(first + count - from));
    read(from, first + count - from, tokens.data());
    auto segment = segment_of(from);
    std::int64_t begin = from;
    for (std::int64_t place = from; place < first + count; ++place) {
      if (place == segment->first + segment->tokens.count) {
        ++segment;
        begin = place;
      }
      if (place >= first) out[place - first] = begin;
      if (tokens[static_cast<std::size_t>(place - from)] == config_.end_of_document) begin = place + 1;
    }
  }

  void copy(const segment_t& segment, std::int64_t start, std::int64_t count, std::int64_t* out) const {
    with_type(segment.tokens.type, [&]<class T>(T) { copy_as<T>(segment, start, count, out); });
  }
  template <class T>
  void copy_as(const segment_t& segment, std::int64_t start, std::int64_t count, std::int64_t* out) const {
    constexpr std::int64_t most = 1 << 13;
    T chunk[most];
    std::uint64_t largest = 0;  // a negative token is huge as unsigned
    for (std::int64_t at = 0; at < count; at += most) {
      const std::int64_t n = std::min(most, count - at);
      segment.tokens.file->read(0, start + at, n, chunk);
      for (std::int64_t i = 0; i < n; ++i) {
        out[at + i] = static_cast<std::int64_t>(chunk[i]);
        largest = std::max(largest, static_cast<std::uint64_t>(out[at + i]));
      }
    }
    if (largest < static_cast<std::uint64_t>(config_.vocab)) return;
    const std::int64_t* bad =
        std::find_if(out, out + count, [this](std::int64_t token) { return token < 0 || token >= config_.vocab; });
    fail({config_.flag, ": '", segment.tokens.file->path(), "' has token ", *bad, " at position ", start + (bad - out),
          ", and the vocabulary of --model has ", config_.vocab, " tokens"});
  }

  token_source_config config_;
  token_format format_ = token_format::automatic;
  std::vector<segment_t> segments_;
};

/// Returns the entropy in nats, -sum p log p, of a distribution given by counts, or by shares that need not add up to
/// 1. It is the loss of the best model that ignores context.
inline double entropy(std::span<const double> counts) {
  double total = 0;
  for (double n : counts) total += n;
  double sum = 0;
  for (double n : counts) {
    if (n > 0) sum += n * std::log(total / n);
  }
  return total > 0 ? sum / total : 0;
}

/// Returns how often each token of the vocabulary occurs in a source. Reads all of it. Throws `error` as
/// `token_source::read`.
inline std::vector<double> token_counts(const token_source& source) {
  std::vector<double> counts(static_cast<std::size_t>(source.vocab()));
  std::vector<std::int64_t> chunk(1 << 14);
  for (std::int64_t first = 0; first < source.size();) {
    const std::int64_t n = std::min<std::int64_t>(source.size() - first, static_cast<std::int64_t>(chunk.size()));
    source.read(first, n, chunk.data());
    for (std::int64_t i = 0; i < n; ++i) ++counts[static_cast<std::size_t>(chunk[static_cast<std::size_t>(i)])];
    first += n;
  }
  return counts;
}

/// Returns the bytes of a text as tokens.
inline std::vector<std::int64_t> encode_bytes(std::string_view text) {
  std::vector<std::int64_t> tokens;
  tokens.reserve(text.size());
  for (char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

/// Returns `text` made safe for a terminal. Printable ASCII and well-formed UTF-8 stay, and so do line feeds and tabs
/// unless `one_line`. Control characters (also U+0080 to U+009F, which some terminals obey) and stray bytes become
/// `\xHH`.
inline std::string printable(std::string_view text, bool one_line = false) {
  constexpr char digits[] = "0123456789abcdef";
  std::string out;
  const auto escape = [&](char c) {
    const auto value = static_cast<unsigned char>(c);
    if (c == '\n')
      out += "\\n";
    else
      out += {'\\', 'x', digits[value >> 4], digits[value & 15]};
  };
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const auto lead = static_cast<unsigned char>(text[0]);
    const bool control = (lead < 0x20 && (one_line || (lead != '\n' && lead != '\t'))) || lead == 0x7f;
    const bool upper_control = length == 2 && lead == 0xc2 && static_cast<unsigned char>(text[1]) < 0xa0;
    const std::size_t taken = std::max<std::size_t>(length, 1);
    if (length == 0 || control || upper_control) {
      for (char c : text.substr(0, taken)) escape(c);
    } else {
      out += text.substr(0, taken);
    }
    text.remove_prefix(taken);
  }
  return out;
}

/// Returns byte tokens as printable text. A token that is not a byte becomes `<token>`.
inline std::string decode_bytes(std::span<const std::int64_t> tokens) {
  std::string out, run;
  for (std::int64_t token : tokens) {
    if (token >= 0 && token < 256) {
      run += static_cast<char>(static_cast<unsigned char>(token));
      continue;
    }
    append(out, {printable(run), "<", token, ">"});
    run.clear();
  }
  return out + printable(run);
}

}  // namespace plait
