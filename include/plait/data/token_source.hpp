// One or several token files as one stream, every token checked against the vocabulary. It makes no samples:
// data/sampler.hpp does. The formats are in data/token_file.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/data/token_file.hpp"

namespace plait {

/// The files of a token source, and how they are read.
struct token_source_config {
  std::vector<std::string> paths;  ///< one or more; joined in this order, with nothing in between
  token_format format = token_format::automatic;
  std::int64_t vocab = 256;            ///< every token must be below
  std::string knob = "--data";         ///< what error texts call `paths`
  std::string vocab_knob = "--model";  ///< what error texts call `vocab`
};

/// One stream of tokens over one or several files, readable at any place. A copy shares the mapped files; reading is
/// const and safe from several threads.
class token_source {
 public:
  /// Opens every file and checks headers and sizes; throws `error` for no path, an empty file, a malformed or truncated
  /// one, and for files of different formats. Token values are checked where they are read (`read`, `check_tokens`).
  explicit token_source(token_source_config config) : config_(std::move(config)) {
    const std::string& knob = config_.knob;
    if (config_.paths.empty()) fail({knob, ": no file given; name one or more text or token files"});
    if (config_.vocab < 1)
      fail({config_.vocab_knob, ": the vocabulary has ", config_.vocab, " tokens; at least 1 is legal"});
    for (const std::string& path : config_.paths) {
      const token_format format = config_.format == token_format::automatic ? guess_token_format(path) : config_.format;
      if (format_ != token_format::automatic && format != format_) {
        fail({knob, ": '", config_.paths.front(), "' is read as ", name_of(format_), " and '", path, "' as ",
              name_of(format), "; all files must have one format"});
      }
      format_ = format;
      add(open(path));
    }
  }

  /// Number of tokens of all files together; at least 1.
  std::int64_t size() const { return segments_.back().first + segments_.back().tokens.count; }
  /// The format that was read; never `automatic`.
  token_format format() const { return format_; }
  std::int64_t vocab() const { return config_.vocab; }
  const token_source_config& config() const { return config_; }

  /// Copies tokens [first, first + count) to `out`. Throws `error` when the range is not inside [0, size()), and when a
  /// token is negative or not below the vocabulary: the text names file, position, token and vocabulary.
  void read(std::int64_t first, std::int64_t count, std::int64_t* out) const {
    if (first < 0 || count < 0 || first > size() - count) {
      fail({config_.knob, ": tokens [", first, ", ", first, " + ", count, ") asked for, and the data has ", size()});
    }
    if (count == 0) return;
    auto segment = std::upper_bound(segments_.begin(), segments_.end(), first,
                                    [](std::int64_t place, const segment_t& s) { return place < s.first; }) -
                   1;
    for (; count > 0; ++segment) {
      const std::int64_t start = first - segment->first;
      const std::int64_t n = std::min(count, segment->tokens.count - start);
      copy(*segment, start, n, out);
      first += n;
      count -= n;
      out += n;
    }
  }

  /// Reads every token once and throws as `read` does; close to a billion tokens per second. For a check before
  /// training.
  void check_tokens() const {
    std::vector<std::int64_t> chunk(1 << 14);
    for (std::int64_t first = 0; first < size();) {
      const std::int64_t n = std::min<std::int64_t>(size() - first, static_cast<std::int64_t>(chunk.size()));
      read(first, n, chunk.data());
      first += n;
    }
  }

 private:
  struct segment_t {
    std::int64_t first;  // place of its first token in the stream
    token_file tokens;
  };

  token_file open(const std::string& path) const {
    switch (format_) {
      case token_format::megatron:
        return open_megatron(path, config_.knob);
      case token_format::nanogpt:
        return open_nanogpt(path, config_.knob);
      default:
        return open_bytes(path, config_.knob);
    }
  }
  void add(token_file tokens) {
    if (tokens.count == 0) fail({config_.knob, ": '", tokens.file->path(), "' is empty"});
    const std::int64_t first = segments_.empty() ? 0 : size();
    segments_.push_back({first, std::move(tokens)});
  }

  void copy(const segment_t& segment, std::int64_t start, std::int64_t count, std::int64_t* out) const {
    switch (segment.tokens.type) {
      case token_type::u8:
        return copy_as<std::uint8_t>(segment, start, count, out);
      case token_type::i8:
        return copy_as<std::int8_t>(segment, start, count, out);
      case token_type::i16:
        return copy_as<std::int16_t>(segment, start, count, out);
      case token_type::u16:
        return copy_as<std::uint16_t>(segment, start, count, out);
      case token_type::i32:
        return copy_as<std::int32_t>(segment, start, count, out);
      case token_type::i64:
        return copy_as<std::int64_t>(segment, start, count, out);
    }
  }
  template <class T>
  void copy_as(const segment_t& segment, std::int64_t start, std::int64_t count, std::int64_t* out) const {
    const std::byte* source = segment.tokens.file->bytes().data();
    std::uint64_t largest = 0;  // a negative token is huge as unsigned
    for (std::int64_t i = 0; i < count; ++i) {
      out[i] = static_cast<std::int64_t>(detail::element<T>(source, static_cast<std::uint64_t>(start + i)));
      largest = std::max(largest, static_cast<std::uint64_t>(out[i]));
    }
    if (largest < static_cast<std::uint64_t>(config_.vocab)) return;
    const std::int64_t* bad =
        std::find_if(out, out + count, [this](std::int64_t token) { return token < 0 || token >= config_.vocab; });
    fail({config_.knob, ": '", segment.tokens.file->path(), "' has token ", *bad, " at position ", start + (bad - out),
          ", and the vocabulary of ", config_.vocab_knob, " has ", config_.vocab, " tokens"});
  }

  token_source_config config_;
  token_format format_ = token_format::automatic;
  std::vector<segment_t> segments_;
};

}  // namespace plait
