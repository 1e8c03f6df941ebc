// Tokenizers in Hugging Face's tokenizer.json: byte-pair encoding, after normalisation and splitting of the text.
#pragma once

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/text.hpp"
#include "plait/io/json.hpp"
#include "plait/io/json_tree.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/models/config_keys.hpp"

namespace plait {

namespace detail {

/// A regular expression that splits text, with Unicode's letters, digits and spaces.
class text_pattern {
 public:
  /// Throws `error`, which begins with `source`, if the pattern is not a regular expression or matches no text.
  text_pattern(const std::string& pattern, std::string source) : source_(std::move(source)) {
    int problem = 0;
    PCRE2_SIZE at = 0;
    code_.reset(pcre2_compile(as_units(pattern), pattern.size(), PCRE2_UTF | PCRE2_UCP, &problem, &at, nullptr));
    if (!code_) fail({source_, ": '", pattern, "' is no regular expression: at byte ", at, ", ", message(problem)});
    std::uint32_t matches_empty = 0;
    pcre2_pattern_info(code_.get(), PCRE2_INFO_MATCHEMPTY, &matches_empty);
    if (matches_empty != 0) fail({source_, ": '", pattern, "' matches the empty text, which splits nothing"});
    static_cast<void>(pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE));  // if it fails, matches take longer
  }
  /// Calls f(part, matched) in order for the parts of `text` that the expression matches, and for the parts between
  /// them.
  /// `text` is UTF-8.
  template <class F>
  void split(std::string_view text, F&& f) const {
    const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(
        pcre2_match_data_create_from_pattern(code_.get(), nullptr), pcre2_match_data_free);
    for (std::size_t at = 0; at < text.size();) {
      const int found =
          pcre2_match(code_.get(), as_units(text), text.size(), at, PCRE2_NO_UTF_CHECK, match.get(), nullptr);
      if (found < 0 && found != PCRE2_ERROR_NOMATCH) fail({source_, ": at byte ", at, " of a text, ", message(found)});
      const PCRE2_SIZE* const range = pcre2_get_ovector_pointer(match.get());
      const std::size_t begin = found < 0 ? text.size() : range[0], end = found < 0 ? text.size() : range[1];
      if (begin > at) f(text.substr(at, begin - at), false);
      if (end > begin) f(text.substr(begin, end - begin), true);
      at = end;
    }
  }

 private:
  static PCRE2_SPTR as_units(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }
  static std::string message(int problem) {
    std::array<PCRE2_UCHAR, 256> text{};
    pcre2_get_error_message(problem, text.data(), text.size());
    return reinterpret_cast<const char*>(text.data());
  }
  struct free_code {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
  };
  std::unique_ptr<pcre2_code, free_code> code_;
  std::string source_;
};

/// Translates an expression of Oniguruma, which Hugging Face uses, to an equal one of PCRE2. Throws `error`, which
/// begins with `source`, for syntax that the two read differently.
inline std::string ported_pattern(std::string_view pattern, const std::string& source) {
  static const text_pattern legal(
      R"(\\(?:[sSdDrnt]|[pP]\{\w\w?\}|\W)|\[\^?(?:\\(?:[sSdDrnt]|[pP]\{\w\w?\}|\W)|[^][\\&])+]|)"
      R"(\((?!\?)|\(\?(?:i?:|<?[=!])|[)|*+?.]|\{\d+(?:,\d*)?\}(?!\+)|[^][\\^$(){}|*+?.])",
      "the syntax");
  std::string out;
  legal.split(pattern, [&](std::string_view part, bool is_legal) {
    if (!is_legal)
      fail({source, ": '", pattern, "' has '", part, "' at byte ", part.data() - pattern.data(),
            "; legal are letters, classes, \\s, \\d, \\r, \\n, \\t, \\p{} of a general category, counts, "
            "and groups that begin with (?:, (?i:, (?= and (?!"});
    for (std::size_t at = 0; at < part.size(); ++at) {
      out += part[at];
      if (part[at] != '\\') continue;
      const char escaped = part[++at];
      if (escaped == 's' || escaped == 'S')  // PCRE2's \s has one more character, U+180E
        append(out, {escaped == 's' ? 'p' : 'P', "{White_Space}"});
      else
        out += escaped;
    }
  });
  return out;
}

/// GPT-2's letters for bytes: printable ones stand for themselves, others have code points from 256 on.
struct byte_letters {
  std::array<std::string, 256> letter;
  std::unordered_map<std::string_view, char> byte;

  byte_letters() {
    unsigned further = 256;
    for (unsigned b = 0; b < 256; ++b) {
      const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
      const unsigned point = printable ? b : further++;
      letter[b] = point < 128
                      ? std::string{static_cast<char>(point)}
                      : std::string{static_cast<char>(0xc0 | (point >> 6)), static_cast<char>(0x80 | (point & 63))};
      byte.emplace(letter[b], static_cast<char>(b));
    }
  }
  static const byte_letters& all() {
    static const byte_letters letters;
    return letters;
  }
  /// Returns the bytes of a token; the token itself, if one of its characters has no byte.
  std::string bytes_of(const std::string& token) const {
    std::string bytes;
    for (std::string_view rest = token; !rest.empty(); rest.remove_prefix(utf8_length(rest))) {
      const auto found = byte.find(rest.substr(0, utf8_length(rest)));
      if (found == byte.end()) return token;
      bytes += found->second;
    }
    return bytes;
  }
};

/// Hashes strings and views alike, so that a map of strings can be searched by a view.
struct text_hash : std::hash<std::string_view> {
  using is_transparent = void;
};
template <class T>
using text_map = std::unordered_map<std::string, T, text_hash, std::equal_to<>>;

/// Returns `text` with `content` in place of each `pattern`, which is not empty.
inline std::string replaced(std::string_view text, std::string_view pattern, std::string_view content) {
  std::string out;
  for (std::size_t at; (at = text.find(pattern)) != text.npos; text.remove_prefix(at + pattern.size()))
    append(out, {text.substr(0, at), content});
  return out += text;
}

}  // namespace detail

/// The tokenizer of a tokenizer.json. It makes the same tokens as Hugging Face's tokenizers, or refuses the file.
/// Several threads may use one tokenizer.
class tokenizer {
 public:
  /// Reads a file. Throws `error` for settings that this class does not support. The error names `flag`, the file, the
  /// key and the legal values.
  explicit tokenizer(const std::string& path, const std::string& flag = "tokenizer")
      : source_(flag + ": '" + path + "'") {
    std::string text;
    try {
      text = read_whole(machine_files(), path);
    } catch (const error& e) {
      fail({flag, ": ", e.what()});
    }
    const json file = parse_json(text, source_);
    if (!file.is_object()) fail({source_, ": this is no JSON object"});
    const reader r(file, source_);
    known(r, {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
              "decoder", "model"});
    for (const char* key : {"truncation", "padding"})
      if (r.has(key)) r.bad(key, file.at(key), "null");
    read_model(r.object("model"), file.at("model"));
    each_part(file, "normalizer", "normalizers", [&](const reader& part) { add_normalizer(part); });
    normalizers_ = stages_.size();
    if (r.has("added_tokens")) read_added(file.at("added_tokens"));
    each_part(file, "pre_tokenizer", "pretokenizers", [&](const reader& part) { add_pre_tokenizer(part); });
    each_part(file, "post_processor", "processors", [&](const reader& part) { read_post_processor(part); });
    static_cast<void>(r.object("decoder"));  // required: it says how blanks are decoded
    each_part(file, "decoder", "decoders", [&](const reader& part) { add_decoder(part); });
  }

  /// Returns one more than the largest token.
  std::int64_t size() const { return static_cast<std::int64_t>(texts_.size()); }
  /// Returns the special tokens that begin a text for the model; there may be none.
  const std::vector<std::int64_t>& prefix() const { return prefix_; }

  /// Returns the tokens of a text, without `prefix`. Special tokens in the text are recognized. Throws `error` if the
  /// text is not UTF-8, or has a character that the vocabulary cannot express.
  std::vector<std::int64_t> encode(std::string_view text) const {
    if (!is_utf8(text)) fail({source_, ": the text is not UTF-8"});
    std::vector<std::int64_t> out;
    detail::text_map<std::vector<std::int64_t>> seen;
    const sink add_word = [&](std::string_view word, bool) {
      constexpr std::size_t most = 1 << 20;  // cached words
      if (seen.size() > most) seen.clear();
      auto found = seen.find(word);
      if (found == seen.end()) found = seen.emplace(word, tokens_of_word(word)).first;
      out.insert(out.end(), found->second.begin(), found->second.end());
    };
    const auto split_added = [&](const added& some, std::string_view piece, auto&& rest) {
      if (!some.any) return rest(piece);
      some.any->split(piece, [&](std::string_view part, bool matched) {
        matched ? out.push_back(some.tokens.find(part)->second) : rest(part);
      });
    };
    split_added(added_[0], text, [&](std::string_view piece) {
      run(0, normalizers_, piece, piece.data() == text.data(), [&](std::string_view normal, bool begins) {
        split_added(added_[1], normal, [&](std::string_view part) {
          run(normalizers_, stages_.size(), part, begins && part.data() == normal.data(), add_word);
        });
      });
    });
    return out;
  }

  /// Returns the text of tokens, including special ones. If the tokens end within a character, so does the text. A
  /// token that the vocabulary lacks becomes its number, as in "<7>".
  std::string decode(std::span<const std::int64_t> tokens) const {
    std::vector<std::string> texts;
    for (const std::int64_t token : tokens)
      texts.push_back(is_named(token) ? *texts_[static_cast<std::size_t>(token)] : cat({"<", token, ">"}));
    for (const auto& decode : decoders_) decode(texts);
    return joined(texts);
  }

 private:
  using json = nlohmann::json;
  using reader = detail::config_reader;
  using pattern = detail::text_pattern;
  /// Takes a part of a text, and whether the text begins with it.
  using sink = std::function<void(std::string_view, bool)>;
  using stage = std::function<void(std::string_view, bool, const sink&)>;
  using decoder = std::function<void(std::vector<std::string>&)>;

  // Reading of the file.

  static void known(const reader& r, std::initializer_list<std::string_view> keys) {
    r.each_key([&](const std::string& key) {
      if (std::find(keys.begin(), keys.end(), key) != keys.end()) return;
      std::string legal = "legal are";
      for (const std::string_view one : keys) append(legal, {one == *keys.begin() ? " " : ", ", one});
      r.unknown(key, legal);
    });
  }
  [[noreturn]] static void unknown_type(const reader& r, const char* legal) { r.bad("type", r.string("type"), legal); }

  /// Calls f(part) for the object `key` of `owner`. If it is a Sequence, calls f for each part in its `list`.
  template <class F>
  void each_part(const json& owner, const std::string& key, const char* list, F&& f) const {
    const auto found = owner.find(key);
    if (found != owner.end() && !found->is_null()) parts_of(*found, key, list, f);
  }
  template <class F>
  void parts_of(const json& value, const std::string& place, const char* list, F& f) const {
    if (!value.is_object()) fail({source_, ": key '", place, "' is not an object"});
    const reader r(value, source_, place + ".");
    if (r.string("type") != "Sequence") return f(r);
    known(r, {"type", list});
    if (!r.has(list) || !value.at(list).is_array()) fail({source_, ": key '", place, ".", list, "' is no list"});
    for (std::size_t i = 0; i < value.at(list).size(); ++i)
      parts_of(value.at(list)[i], cat({place, ".", list, "[", i, "]"}), list, f);
  }

  void read_model(const reader& r, const json& model) {
    known(r, {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
              "byte_fallback", "ignore_merges", "vocab", "merges"});
    r.only("type", "BPE");
    r.only("dropout", 0);
    r.only("continuing_subword_prefix", "");
    r.only("end_of_word_suffix", "");
    static_cast<void>(r.object("vocab"));
    for (const auto& [text, token] : model.at("vocab").items()) name(text, token, "model.vocab");
    fuse_unknown_ = r.boolean("fuse_unk", false);
    ignore_merges_ = r.boolean("ignore_merges", false);
    if (r.has("unk_token")) unknown_ = token_called(r.string("unk_token"), "model.unk_token");
    if (r.boolean("byte_fallback", false))
      for (int b = 0; b < 256; ++b) fallback_.push_back(token_called(fallback_text(b), "model.byte_fallback"));
    if (!r.has("merges") || !model.at("merges").is_array()) fail({source_, ": key 'model.merges' is no list"});
    std::int64_t rank = 0;
    for (const json& merge : model.at("merges")) {
      std::string first, second;
      if (merge.is_string()) {
        const std::string both = merge.get<std::string>();
        const std::size_t blank = both.find(' ');
        first = both.substr(0, blank);
        if (blank != both.npos && both.find(' ', blank + 1) == both.npos) second = both.substr(blank + 1);
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        first = merge[0].get<std::string>(), second = merge[1].get<std::string>();
      }
      if (first.empty() || second.empty())
        fail({source_, ": key 'model.merges' has ", merge.dump(),
              "; legal are two tokens, as in \"a b\" or [\"a\",\"b\"]"});
      merges_[pair_of(token_called(first, "model.merges"), token_called(second, "model.merges"))] = {
          rank++, token_called(first + second, "model.merges")};
    }
  }
  static std::string fallback_text(int byte) {
    constexpr std::string_view digits = "0123456789ABCDEF";
    const auto b = static_cast<std::size_t>(byte);
    return {'<', '0', 'x', digits[b >> 4], digits[b & 15], '>'};
  }
  std::int64_t token_called(const std::string& text, const char* key) const {
    const auto found = vocab_.find(text);
    if (found == vocab_.end())
      fail({source_, ": key '", key, "' needs the token '", text, "', which model.vocab lacks"});
    return found->second;
  }
  void name(const std::string& text, const json& number, const std::string& key) {
    constexpr std::int64_t most = 1 << 24;
    if (!number.is_number_unsigned() || number.get<std::uint64_t>() >= most)
      fail({source_, ": key '", key, "' has ", number.dump(), " for '", text, "'; legal is a number below ", most});
    const auto token = number.get<std::int64_t>();
    if (token >= size()) texts_.resize(static_cast<std::size_t>(token) + 1);
    std::optional<std::string>& there = texts_[static_cast<std::size_t>(token)];
    if (there && *there != text)
      fail({source_, ": key '", key, "' has ", token, " for '", text, "', and for '", *there, "', too"});
    if (const auto [known_as, is_new] = vocab_.try_emplace(text, token); known_as->second != token)
      fail({source_, ": key '", key, "' has ", token, " for '", text, "', which is ", known_as->second, ", too"});
    there = text;
  }

  /// Tokens that are recognized in a text before all others.
  struct added {
    detail::text_map<std::int64_t> tokens{};
    std::optional<pattern> any{};  ///< nothing: there are none
  };
  void read_added(const json& list) {
    if (!list.is_array()) fail({source_, ": key 'added_tokens' is no list"});
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::string place = cat({"added_tokens[", i, "]."});
      if (!list[i].is_object()) fail({source_, ": key 'added_tokens[", i, "]' is not an object"});
      const reader r(list[i], source_, place);
      known(r, {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
      for (const char* key : {"single_word", "lstrip", "rstrip"}) r.only(key, false);
      std::string text = r.string("content");
      if (text.empty()) r.bad("content", text, "a text");
      name(text, r.at("id"), place + "id");
      const std::int64_t token = vocab_.find(text)->second;
      const bool normalized = r.boolean("normalized", false);
      if (normalized)
        run(0, normalizers_, std::string(text), true, [&](std::string_view normal, bool) { text = normal; });
      texts_[static_cast<std::size_t>(token)] = text;
      added_[normalized ? 1 : 0].tokens.emplace(text, token);
    }
    for (added& some : added_) {
      std::vector<std::string> texts;
      for (const auto& [text, token] : some.tokens) texts.push_back(quoted(text));
      std::sort(texts.begin(), texts.end(), std::greater<>());  // a longer text before its prefixes
      std::string any;
      for (const std::string& text : texts) append(any, {any.empty() ? "" : "|", text});
      if (!any.empty()) some.any.emplace(any, source_);
    }
  }

  void add_normalizer(const reader& r) {
    const std::string type = r.string("type");
    if (type == "Prepend") {
      known(r, {"type", "prepend"});
      stages_.push_back([with = r.string("prepend")](std::string_view text, bool begins, const sink& next) {
        next(with + std::string(text), begins);
      });
    } else if (type == "Replace") {
      add_replacement(r);
    } else if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
      known(r, {"type"});
      const int how = UTF8PROC_STABLE | (type.back() == 'C' ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
                      (type[2] == 'K' ? UTF8PROC_COMPAT : 0);
      stages_.push_back([how](std::string_view text, bool begins, const sink& next) {
        utf8proc_uint8_t* made = nullptr;
        const utf8proc_ssize_t size =
            utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                         static_cast<utf8proc_ssize_t>(text.size()), &made, static_cast<utf8proc_option_t>(how));
        const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(made, std::free);
        if (size < 0) throw std::bad_alloc();  // the text is UTF-8, so memory is the only reason
        next({reinterpret_cast<const char*>(made), static_cast<std::size_t>(size)}, begins);
      });
    } else {
      unknown_type(r, "Sequence, NFC, NFD, NFKC, NFKD, Prepend or Replace");
    }
  }
  /// Returns the text that a Replace or a Split looks for. Only Split may have a regular expression.
  static std::string text_to_find(const reader& r) {
    const reader found = r.object("pattern");
    known(found, {"String"});
    if (found.string("String").empty()) found.bad("String", "", "a text");
    return found.string("String");
  }
  void add_replacement(const reader& r) {
    known(r, {"type", "pattern", "content"});
    add_replacement(text_to_find(r), r.string("content"));
  }
  void add_replacement(std::string from, std::string to) {
    stages_.push_back(
        [=](std::string_view text, bool begins, const sink& next) { next(detail::replaced(text, from, to), begins); });
  }

  void add_pre_tokenizer(const reader& r) {
    const std::string type = r.string("type");
    if (type == "ByteLevel") {
      known(r, {"type", "add_prefix_space", "trim_offsets", "use_regex"});
      if (r.boolean("add_prefix_space", true)) add_prefix(" ", false);
      if (r.boolean("use_regex", true))
        add_split(R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)");
      stages_.push_back([](std::string_view text, bool begins, const sink& next) {
        std::string letters;
        for (const char c : text) letters += detail::byte_letters::all().letter[static_cast<unsigned char>(c)];
        next(letters, begins);
      });
    } else if (type == "Digits") {
      known(r, {"type", "individual_digits"});
      add_split(r.boolean("individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)");
    } else if (type == "Split") {
      known(r, {"type", "pattern", "behavior", "invert"});
      const std::string behavior = r.string("behavior");
      if (behavior != "Isolated" && behavior != "Removed") r.bad("behavior", behavior, "Isolated or Removed");
      const reader found = r.object("pattern");
      if (found.has("Regex")) known(found, {"Regex"});
      add_split(found.has("Regex") ? found.string("Regex") : quoted(text_to_find(r)), behavior == "Removed",
                r.boolean("invert", false));
    } else if (type == "Metaspace") {
      known(r, {"type", "replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
      const std::string blank = blank_of(r), scheme = scheme_of(r);
      add_replacement(" ", blank);
      if (scheme != "never") add_prefix(blank, scheme == "first");
      if (r.boolean("split", true)) add_split(cat({blank, "[^", blank, "]*|[^", blank, "]+"}));
    } else {
      unknown_type(r, "Sequence, ByteLevel, Split, Digits or Metaspace");
    }
  }
  /// Returns the letter by which a Metaspace replaces a blank.
  static std::string blank_of(const reader& r) {
    const std::string blank = r.string("replacement");
    if (utf8_length(blank) != blank.size() || blank.size() < 2)
      r.bad("replacement", blank, "one character beyond ASCII");
    return blank;
  }
  static std::string scheme_of(const reader& r) {
    if (!r.has("prepend_scheme")) return r.boolean("add_prefix_space", true) ? "always" : "never";
    const std::string scheme = r.string("prepend_scheme");
    if (scheme != "always" && scheme != "first" && scheme != "never")
      r.bad("prepend_scheme", scheme, "always, first or never");
    return scheme;
  }
  /// Adds a stage that puts `prefix` before parts which lack it: all parts, or only the first of a text.
  void add_prefix(std::string prefix, bool first_alone) {
    stages_.push_back([=](std::string_view text, bool begins, const sink& next) {
      if (text.starts_with(prefix) || (first_alone && !begins)) return next(text, begins);
      next(prefix + std::string(text), begins);
    });
  }
  void add_split(const std::string& expression, bool removes = false, bool inverted = false) {
    const auto parts = std::make_shared<const pattern>(detail::ported_pattern(expression, source_), source_);
    stages_.push_back([=](std::string_view text, bool begins, const sink& next) {
      parts->split(text, [&](std::string_view part, bool matched) {
        if (!removes || matched == inverted) next(part, begins && part.data() == text.data());
      });
    });
  }
  /// Returns an expression that matches exactly `text`.
  static std::string quoted(std::string_view text) {
    std::string out;
    for (const char c : text)
      append(out, {std::string_view("\\.+*?()[]{}|^$-#&~ ").find(c) == text.npos ? "" : "\\", c});
    return out;
  }

  void read_post_processor(const reader& r) {
    const std::string type = r.string("type");
    if (type == "ByteLevel")
      return known(r, {"type", "add_prefix_space", "trim_offsets", "use_regex"});  // changes offsets only
    if (type != "TemplateProcessing") unknown_type(r, "Sequence, ByteLevel or TemplateProcessing");
    known(r, {"type", "single", "pair", "special_tokens"});
    const json& single = r.at("single");
    const auto bad = [&] { r.bad("single", single, "special tokens, and then the sequence A"); };
    if (!single.is_array() || single.empty()) bad();
    if (single.back() != json{{"Sequence", {{"id", "A"}, {"type_id", 0}}}}) bad();
    for (std::size_t i = 0; i + 1 < single.size(); ++i) {
      if (!single[i].contains("SpecialToken")) bad();
      const std::string id = reader(single[i], source_, "post_processor.single.").object("SpecialToken").string("id");
      const reader special = r.object("special_tokens").object(id.c_str());
      const json& ids = special.at("ids");
      for (const json& token : ids) {
        if (!token.is_number_unsigned() || !is_named(token.get<std::int64_t>()))
          special.bad("ids", ids, "a list of tokens of the vocabulary");
        prefix_.push_back(token.get<std::int64_t>());
      }
    }
  }

  void add_decoder(const reader& r) {
    const std::string type = r.string("type");
    const auto each = [this](auto change) {
      decoders_.push_back([change](std::vector<std::string>& texts) {
        for (std::size_t i = 0; i < texts.size(); ++i) texts[i] = change(texts[i], i);
      });
    };
    const auto fuse = [this] { decoders_.push_back([](std::vector<std::string>& texts) { texts = {joined(texts)}; }); };
    if (type == "ByteLevel") {
      known(r, {"type", "add_prefix_space", "trim_offsets", "use_regex"});
      each([](const std::string& text, std::size_t) { return detail::byte_letters::all().bytes_of(text); });
      fuse();
    } else if (type == "ByteFallback") {
      known(r, {"type"});
      each([](const std::string& text, std::size_t) { return byte_of(text); });
    } else if (type == "Fuse") {
      known(r, {"type"});
      fuse();
    } else if (type == "Replace") {
      known(r, {"type", "pattern", "content"});
      each([from = text_to_find(r), to = r.string("content")](const std::string& text, std::size_t) {
        return detail::replaced(text, from, to);
      });
    } else if (type == "Strip") {
      known(r, {"type", "content", "start", "stop"});
      const std::string content = r.string("content");
      if (content.empty()) r.bad("content", content, "a character");
      each([content, start = r.integer("start"), stop = r.integer("stop")](std::string_view text, std::size_t) {
        for (std::int64_t i = 0; i < start && text.starts_with(content); ++i) text.remove_prefix(content.size());
        for (std::int64_t i = 0; i < stop && text.ends_with(content); ++i) text.remove_suffix(content.size());
        return std::string(text);
      });
    } else if (type == "Metaspace") {
      known(r, {"type", "replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
      each([blank = blank_of(r), drops = scheme_of(r) != "never"](const std::string& text, std::size_t i) {
        return detail::replaced(text, blank, i == 0 && drops ? "" : " ");
      });
    } else {
      unknown_type(r, "Sequence, ByteLevel, ByteFallback, Fuse, Replace, Strip or Metaspace");
    }
  }
  /// Returns the byte of a token such as "<0x0A>", and other tokens unchanged.
  static std::string byte_of(const std::string& text) {
    const std::size_t digits = text.find_first_not_of("0123456789abcdefABCDEF", 3);
    if (text.size() != 6 || !text.starts_with("<0x") || digits != 5 || text[5] != '>') return text;
    return {static_cast<char>(std::stoi(text.substr(3, 2), nullptr, 16))};
  }

  // Encoding and decoding.

  bool is_named(std::int64_t token) const {
    return token >= 0 && token < size() && texts_[static_cast<std::size_t>(token)].has_value();
  }
  static std::string joined(const std::vector<std::string>& texts) {
    std::string out;
    for (const std::string& text : texts) out += text;
    return out;
  }

  /// Runs stages [at, last) on a text, and calls `end` with the results.
  void run(std::size_t at, std::size_t last, std::string_view text, bool begins, const sink& end) const {
    if (at == last) return end(text, begins);
    stages_[at](text, begins, [&](std::string_view part, bool first) { run(at + 1, last, part, first, end); });
  }

  /// A character or a merged token, in a linked list whose elements keep their places.
  struct symbol {
    std::int64_t token;
    std::size_t before, after;
  };
  static constexpr std::size_t none = std::numeric_limits<std::size_t>::max();

  std::vector<std::int64_t> tokens_of_word(std::string_view word) const {
    if (const auto whole = vocab_.find(word); ignore_merges_ && whole != vocab_.end()) return {whole->second};
    std::vector<symbol> symbols = symbols_of(word);
    struct candidate {
      std::int64_t rank;
      std::size_t left;
      std::uint64_t pair;
      std::int64_t token;
      bool operator>(const candidate& other) const { return std::tie(rank, left) > std::tie(other.rank, other.left); }
    };
    std::priority_queue<candidate, std::vector<candidate>, std::greater<>> queue;
    const auto pair_at = [&](std::size_t left) {
      return pair_of(symbols[left].token, symbols[symbols[left].after].token);
    };
    const auto consider = [&](std::size_t left) {
      if (left == none || symbols[left].after == none) return;
      const auto found = merges_.find(pair_at(left));
      if (found != merges_.end()) queue.push({found->second.first, left, found->first, found->second.second});
    };
    for (std::size_t i = 0; i < symbols.size(); ++i) consider(i);
    while (!queue.empty()) {
      const candidate best = queue.top();
      queue.pop();
      symbol& left = symbols[best.left];
      if (left.token == gone || left.after == none || pair_at(best.left) != best.pair) continue;  // already merged
      symbol& right = symbols[left.after];
      left.token = best.token;
      left.after = std::exchange(right.after, none);
      right.token = gone;
      if (left.after != none) symbols[left.after].before = best.left;
      consider(left.before);
      consider(best.left);
    }
    std::vector<std::int64_t> tokens;
    for (std::size_t at = 0; at < symbols.size() && at != none; at = symbols[at].after)
      tokens.push_back(symbols[at].token);
    return tokens;
  }
  std::vector<symbol> symbols_of(std::string_view word) const {
    std::vector<symbol> symbols;
    const auto add = [&](std::int64_t token) {
      if (!symbols.empty()) symbols.back().after = symbols.size();
      symbols.push_back({token, symbols.empty() ? none : symbols.size() - 1, none});
    };
    bool after_unknown = false;
    for (std::size_t length; !word.empty(); word.remove_prefix(length)) {
      length = utf8_length(word);
      const auto found = vocab_.find(word.substr(0, length));
      const bool is_unknown = found == vocab_.end() && fallback_.empty();
      if (found != vocab_.end()) {
        add(found->second);
      } else if (!is_unknown) {
        for (const char c : word.substr(0, length)) add(fallback_[static_cast<unsigned char>(c)]);
      } else if (unknown_ < 0) {
        fail({source_, ": the vocabulary has no token for '", word.substr(0, length), "', and no unk_token"});
      } else if (!(fuse_unknown_ && after_unknown)) {
        add(unknown_);
      }
      after_unknown = is_unknown;
    }
    return symbols;
  }
  static constexpr std::int64_t gone = -1;
  static std::uint64_t pair_of(std::int64_t first, std::int64_t second) {
    return static_cast<std::uint64_t>(first) << 32 | static_cast<std::uint64_t>(second);
  }

  std::string source_;
  detail::text_map<std::int64_t> vocab_;
  std::vector<std::optional<std::string>> texts_;                                    ///< by token
  std::unordered_map<std::uint64_t, std::pair<std::int64_t, std::int64_t>> merges_;  ///< rank and token, by pair
  std::vector<std::int64_t> fallback_;                                               ///< tokens of bytes; empty: none
  std::int64_t unknown_ = -1;                                                        ///< the unknown token; -1: none
  bool fuse_unknown_ = false, ignore_merges_ = false;
  std::array<added, 2> added_;   ///< tokens that are recognized in the text, and in the normalised text
  std::vector<stage> stages_;    ///< from a text without added tokens to words
  std::size_t normalizers_ = 0;  ///< number of stages before the second of `added_`
  std::vector<decoder> decoders_;
  std::vector<std::int64_t> prefix_;
};

}  // namespace plait
