// The formats of token files, how one file is opened, and where documents lie in it. The values of tokens are not
// checked here: token_source.hpp checks them if they are read, and joins several files.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/io/mapped_file.hpp"
#include "plait/io/posix_file_system.hpp"

namespace plait {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and are read in place");

/// How the tokens lie in a file.
enum class token_format {
  automatic,  ///< `.idx`, `.bin` with an `.idx` beside it, or the stem of both: megatron; another `.bin`:
              ///< nanogpt; all else: bytes
  bytes,      ///< any file; each byte is a token, vocabulary 256
  megatron,   ///< `.bin` and `.idx` of Megatron-LM's indexed dataset
  nanogpt,    ///< flat uint16 tokens without a header
};

constexpr const char* name_of(token_format format) {
  switch (format) {
    case token_format::automatic:
      return "auto";
    case token_format::bytes:
      return "bytes";
    case token_format::megatron:
      return "megatron";
    case token_format::nanogpt:
      return "nanogpt";
  }
  return "?";
}

/// The format called `name`; `error` naming `flag` and the legal names otherwise.
inline token_format token_format_from(std::string_view name, const std::string& flag = "format") {
  for (auto format : {token_format::automatic, token_format::bytes, token_format::megatron, token_format::nanogpt}) {
    if (name == name_of(format)) return format;
  }
  fail({flag, ": unknown format '", name, "'; legal are auto, bytes, megatron, nanogpt"});
}

/// The integer type that a file stores its tokens in.
enum class token_type : std::uint8_t { u8, i8, i16, u16, i32, i64 };

constexpr std::int64_t size_of(token_type type) {
  switch (type) {
    case token_type::u8:
    case token_type::i8:
      return 1;
    case token_type::i16:
    case token_type::u16:
      return 2;
    case token_type::i32:
      return 4;
    case token_type::i64:
      return 8;
  }
  return 1;
}

namespace detail {

/// A data file that is read piece by piece and not mapped: one that becomes shorter while a run reads it ends in words,
/// where a mapped one would end in a signal.
class data_file {
 public:
  data_file(const std::string& path, std::string flag) : flag_(std::move(flag)) {
    try {
      file_ = machine_files().open(path);
      size_ = static_cast<std::int64_t>(file_->size());
    } catch (const error& e) {
      fail({flag_, ": ", e.what()});
    }
  }
  const std::string& path() const { return file_->path(); }
  /// Returns the bytes that it had when it was opened.
  std::int64_t size() const { return size_; }
  /// Reads elements [first, first + count) of an array that begins at byte `start`.
  template <class T>
  void read(std::int64_t start, std::int64_t first, std::int64_t count, T* out) const {
    try {
      file_->read(static_cast<std::uint64_t>(start + first * static_cast<std::int64_t>(sizeof(T))),
                  std::as_writable_bytes(std::span(out, static_cast<std::size_t>(count))));
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
  std::string flag_;
  std::unique_ptr<const open_file> file_;
  std::int64_t size_ = 0;
};

}  // namespace detail

/// Where the documents of a token file lie, as its index says: entries are looked up in the file, and none are held.
struct document_index {
  std::shared_ptr<const detail::data_file> file;
  std::int64_t offsets = 0;    ///< byte of the i64 array of the sequences' byte offsets
  std::int64_t sequences = 0;  ///< in that array
  std::int64_t starts = 0;     ///< byte of the i64 array of the documents' first sequences
  std::int64_t documents = 0;  ///< in that array; the last may be the end of the file
  std::int64_t token_bytes = 1;

  /// Returns the token at which document `d` begins; for those from `documents` on, `end`.
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
  document_index index{};  ///< without a file where the format has none
};

namespace detail {

/// Reads the header fields of a Megatron index in order, and says where a file ends too early.
class index_reader {
 public:
  index_reader(const mapped_file& file, const std::string& flag) : file_(file), flag_(flag) {}

  template <class T>
  T next(const char* what) {
    T value{};
    std::memcpy(&value, take(1, sizeof(T), what), sizeof(T));
    return value;
  }
  /// `count` elements of `size` bytes; unaligned, so the caller copies each out.
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
  /// The byte that is read next.
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
  switch (code) {
    case 1:
      return token_type::u8;
    case 2:
      return token_type::i8;
    case 3:
      return token_type::i16;
    case 4:
      return token_type::i32;
    case 5:
      return token_type::i64;
    case 6:
    case 7:
      index.bad(cat({"stores floating-point numbers (dtype code ", code, "); tokens are integers"}));
    case 8:
      return token_type::u16;
    default:
      index.bad(cat({"has the unknown dtype code ", code, "; legal are 1 to 5 and 8"}));
  }
}

}  // namespace detail

/// Opens Megatron-LM's indexed dataset. `path` is the `.bin`, the `.idx`, or what both names have in common. The
/// sequences are read as one stream in the order of the file; samples may cross the borders of documents, as in
/// Megatron's GPT data set, and the index says where those are. Index: "MMIDIDX\0\0", u64 version 1, u8 dtype code, u64
/// sequences, u64 documents, i32 length of each sequence, i64 byte offset of each sequence, i64 first sequence of each
/// document, perhaps one i8 mode each.
inline token_file open_megatron(const std::string& path, const std::string& flag) {
  std::string stem = path;
  if (stem.ends_with(".bin") || stem.ends_with(".idx")) stem.resize(stem.size() - 4);
  const mapped_file index_file(stem + ".idx", flag);
  auto tokens = std::make_shared<const detail::data_file>(stem + ".bin", flag);

  detail::index_reader index(index_file, flag);
  if (std::memcmp(index.take(9, 1, "magic"), "MMIDIDX\0\0", 9) != 0) {
    index.bad("is no Megatron index: it does not start with \"MMIDIDX\"");
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
    end += length * size_of(type);  // cannot overflow: end <= bytes held before
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

/// Opens a flat file of uint16 tokens, as nanoGPT's data scripts write it.
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

/// Throws `error` where a file does not look like the format that was guessed from its name: one of another program's,
/// zero bytes in what would be text, and tokens of 32 or 64 bits where 16 are read. For data that do look so and are
/// meant, the format is given by `format_flag`.
inline void check_guess(const token_file& tokens, const std::string& flag, const std::string& format_flag) {
  const bool text = tokens.type == token_type::u8;
  std::vector<std::uint8_t> start(static_cast<std::size_t>(std::min<std::int64_t>(tokens.file->size(), 1 << 14)));
  tokens.file->read(0, 0, static_cast<std::int64_t>(start.size()), start.data());
  const auto refuse = [&](std::string_view why) {
    fail({flag, ": '", tokens.file->path(), "' ", why, "; it would be read as ", text ? "bytes of text" : "uint16",
          ", and if that is meant, give ", format_flag, " ",
          name_of(text ? token_format::bytes : token_format::nanogpt)});
  };
  const std::string_view other = foreign_file({reinterpret_cast<const char*>(start.data()), start.size()});
  if (!other.empty()) refuse(cat({"is ", other}));
  if (text) {
    if (std::find(start.begin(), start.end(), 0) != start.end()) refuse("is no text, as it has zero bytes");
    return;
  }
  // Upper halves of little-endian words: zero below 65536, and below 4 for the largest vocabularies in use.
  constexpr std::size_t fewest_bytes = 256;  // in which chance makes nothing look so
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

/// Returns the format that `token_format::automatic` takes `path` for.
inline token_format guess_token_format(const std::string& path) {
  const auto exists = [](const std::string& name) {
    std::error_code ignored;
    return std::filesystem::exists(name, ignored);
  };
  if (path.ends_with(".idx")) return token_format::megatron;
  if (path.ends_with(".bin")) {
    return exists(path.substr(0, path.size() - 4) + ".idx") ? token_format::megatron : token_format::nanogpt;
  }
  if (!exists(path) && exists(path + ".bin") && exists(path + ".idx")) return token_format::megatron;
  return token_format::bytes;
}

}  // namespace plait
