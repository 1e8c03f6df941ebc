// One or several token files as one stream, every token checked against the vocabulary. It makes no samples:
// sampler.hpp does. The formats are in token_file.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "train_llama/data/token_file.hpp"

namespace plait {

/// The files of a token source, and how they are read.
struct token_source_config {
  std::vector<std::string> paths;  ///< one or more; joined in this order, with nothing in between
  token_format format = token_format::automatic;
  std::int64_t vocab = 256;  ///< every token must be below
  /// The token that ends a document; -1: documents end where the files' index says. The end of a file ends one too.
  std::int64_t end_of_document = -1;
  std::string flag = "paths";          ///< what error texts call `paths`
  std::string format_flag = "format";  ///< what error texts call `format`
  std::string vocab_flag = "vocab";    ///< what error texts call `vocab`
  std::string end_of_document_flag = "end_of_document";
};

/// One stream of tokens over one or several files, readable at any place. A copy shares the open files; reading is
/// const and safe from several threads, and a file that becomes shorter while it is read is an `error`.
class token_source {
 public:
  /// Opens every file and checks headers and sizes; throws `error` for no path, an empty file, a malformed or truncated
  /// one, for files of different formats, and for one that does not look like what `automatic` takes it for. Token
  /// values are checked where they are read (`read`, `check_tokens`).
  explicit token_source(token_source_config config) : config_(std::move(config)) {
    const std::string& flag = config_.flag;
    if (config_.paths.empty()) fail({flag, ": no file given; name one or more text or token files"});
    if (config_.vocab < 1)
      fail({config_.vocab_flag, ": the vocabulary has ", config_.vocab, " tokens; at least 1 is legal"});
    for (const std::string& path : config_.paths) {
      const token_format format = config_.format == token_format::automatic ? guess_token_format(path) : config_.format;
      if (format_ != token_format::automatic && format != format_) {
        fail({flag, ": '", config_.paths.front(), "' is read as ", name_of(format_), " and '", path, "' as ",
              name_of(format), "; all files must have one format"});
      }
      format_ = format;
      add(open(path));
      if (config_.format == token_format::automatic && format != token_format::megatron)
        check_guess(segments_.back().tokens, flag, config_.format_flag);
    }
    if (config_.end_of_document < -1 || config_.end_of_document >= config_.vocab)
      fail({config_.end_of_document_flag, " is ", config_.end_of_document, "; legal are the tokens, 0 to ",
            config_.vocab - 1, ", and -1 for none"});
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

  /// Returns whether it is known where documents begin and end: the files have an index, or a token ends documents.
  bool knows_documents() const { return config_.end_of_document >= 0 || format_ == token_format::megatron; }

  /// Writes, for each token of [first, first + count), where its document begins, or `from` <= first where that is
  /// before. Throws `error` as `read`, and where `knows_documents` is false.
  void document_starts(std::int64_t from, std::int64_t first, std::int64_t count, std::int64_t* out) const {
    if (!knows_documents())
      fail({config_.flag, ": files of format ", name_of(format_), " do not say where documents end; name the token by ",
            config_.end_of_document_flag});
    require_inside(first, count);
    if (first < from) fail({"token_source: documents of token ", first, " asked for, seen from token ", from});
    config_.end_of_document < 0 ? starts_by_index(from, first, count, out) : starts_by_token(from, first, count, out);
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

  void require_inside(std::int64_t first, std::int64_t count) const {
    if (first < 0 || count < 0 || first > size() - count)
      fail({config_.flag, ": tokens [", first, ", ", first, " + ", count, ") asked for, and the data has ", size()});
  }

  std::vector<segment_t>::const_iterator segment_of(std::int64_t place) const {
    return std::upper_bound(segments_.begin(), segments_.end(), place,
                            [](std::int64_t p, const segment_t& s) { return p < s.first; }) -
           1;
  }

  token_file open(const std::string& path) const {
    switch (format_) {
      case token_format::megatron:
        return open_megatron(path, config_.flag);
      case token_format::nanogpt:
        return open_nanogpt(path, config_.flag);
      default:
        return open_bytes(path, config_.flag);
    }
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
          ", and the vocabulary of ", config_.vocab_flag, " has ", config_.vocab, " tokens"});
  }

  token_source_config config_;
  token_format format_ = token_format::automatic;
  std::vector<segment_t> segments_;
};

}  // namespace plait
