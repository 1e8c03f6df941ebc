// JSON without a tree: writes strings, numbers and objects, and reads a text value by value. UTF-8 is checked.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait {

/// Returns the length of the well-formed UTF-8 sequence at the start of `text` (Unicode, table 3-7), or 0 if there is
/// none.
inline std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto follows = [&](std::size_t i) { return byte(i) >= 0x80 && byte(i) <= 0xbf; };
  const unsigned lead = byte(0);
  if (lead < 0x80) return text.empty() ? 0 : 1;
  if (lead >= 0xc2 && lead <= 0xdf) return follows(1) ? 2 : 0;
  if (lead >= 0xe0 && lead <= 0xef) {
    const bool overlong = lead == 0xe0 && byte(1) < 0xa0;
    const bool surrogate = lead == 0xed && byte(1) > 0x9f;
    return follows(1) && follows(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (lead >= 0xf0 && lead <= 0xf4) {
    const bool overlong = lead == 0xf0 && byte(1) < 0x90;
    const bool beyond = lead == 0xf4 && byte(1) > 0x8f;
    return follows(1) && follows(2) && follows(3) && !overlong && !beyond ? 4 : 0;
  }
  return 0;
}

/// Whether all of `text` is well-formed UTF-8.
inline bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

/// Returns `text` as a JSON string with its quotes. The text should be UTF-8; bytes from 0x80 on are copied unchanged.
inline std::string json_string(std::string_view text) {
  constexpr char digits[] = "0123456789abcdef";
  std::string out = "\"";
  for (char c : text) {
    const auto value = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (value < 0x20 || value == 0x7f) {
      out += {'\\', 'u', '0', '0', digits[value >> 4], digits[value & 15]};
    } else {
      out += c;
    }
  }
  return out + '"';
}

/// Returns the shortest decimal number that reads back as exactly `value`. It has a point or an exponent, so that
/// readers take it for a float. JSON has no infinities and NaN; they become `null`.
inline std::string json_number(double value) {
  if (!std::isfinite(value)) return "null";
  char buffer[32];
  std::string text(buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr);
  if (text.find_first_of(".e") == text.npos) text += ".0";
  return text;
}

/// Builds one JSON object with keys in the order of the calls. The caller must pass each key only once.
class json_object {
 public:
  json_object& add(std::string_view key, std::string_view value) { return add_text(key, json_string(value)); }
  json_object& add(std::string_view key, const char* value) { return add(key, std::string_view(value)); }
  json_object& add(std::string_view key, bool value) { return add_text(key, value ? "true" : "false"); }
  json_object& add(std::string_view key, std::floating_point auto value) {
    return add_text(key, json_number(static_cast<double>(value)));
  }
  template <std::integral Integer>
  json_object& add(std::string_view key, Integer value) {
    return add_text(key, std::to_string(value));
  }
  json_object& add(std::string_view key, const json_object& value) { return add_text(key, value.text()); }
  template <class T>
  json_object& add(std::string_view key, const std::vector<T>& values) {
    json_object list;
    for (const T& value : values) list.add("", value);
    return add_text(key, cat({"[", list.values_, "]"}));
  }
  json_object& add_null(std::string_view key) { return add_text(key, "null"); }

  /// Returns the object on one line.
  std::string text() const { return cat({"{", members_, "}"}); }
  /// Returns the object with one line for each of its direct members.
  std::string lines() const { return members_.empty() ? "{}\n" : cat({"{\n  ", indented_, "\n}\n"}); }

 private:
  json_object& add_text(std::string_view key, const std::string& value) {
    const std::string member = cat({json_string(key), ": ", value});
    if (!members_.empty()) {
      members_ += ", ";
      indented_ += ",\n  ";
      values_ += ", ";
    }
    members_ += member;
    indented_ += member;
    values_ += value;
    return *this;
  }

  std::string members_, indented_, values_;
};

/// The most nested levels of objects and lists in a file; files of models on the hub have up to four.
inline constexpr int max_json_depth = 64;

/// The place of a value in a text, as words that are joined for errors: {"in ", key, " of tensor '", name, "'"}.
using json_place = std::initializer_list<std::string_view>;

/// Reads a JSON text from its first byte to its last. The caller requests each value as the kind that is valid there.
/// Throws `error`, whose text starts with `source`, for malformed JSON (with its position) and for a value of another
/// kind. The second text contains the caller's `where`: "found 4 as dtype of tensor 't', where a string is legal".
class json_parser {
 public:
  /// `text` and `source` must outlive this object.
  json_parser(std::string_view text, const std::string& source)
      : source_(source), text_(text), at_(text.data()), end_(text.data() + text.size()) {}

  /// Calls member(key) for each member of an object. The call must read the member's value.
  template <class Member>
  void object(json_place where, Member&& member) {
    if (next() != '{') unexpected(where, "an object");
    ++at_;
    if (take('}')) return;
    do {
      if (next() != '"') malformed("a key in quotes");
      std::string key = string();
      require(':');
      member(key);
    } while (take(','));
    require('}');
  }
  /// Reads an object that has these members in this order, and no others: keys, and calls that read their values.
  void members(json_place where, std::initializer_list<std::pair<std::string_view, std::function<void()>>> all) {
    const auto* next = all.begin();
    const auto refuse = [&](const std::string& found) {
      const std::string legal = next == all.end() ? "its end" : cat({"the key '", next->first, "'"});
      fail({source_, ": found ", found, " ", text_of(where), ", where ", legal, " is legal"});
    };
    object(where, [&](const std::string& key) {
      if (next == all.end() || key != next->first) refuse(cat({"the key '", key, "'"}));
      (next++)->second();
    });
    if (next != all.end()) refuse("the end");
  }
  /// Calls element() for each element of a list. The call must read the element.
  template <class Element>
  void list(json_place where, Element&& element) {
    if (next() != '[') unexpected(where, "an array");
    ++at_;
    if (take(']')) return;
    do {
      element();
    } while (take(','));
    require(']');
  }
  std::string text(json_place where) {
    if (next() != '"') unexpected(where, "a string");
    return string();
  }
  /// Reads an integer from 0 to `most`.
  std::uint64_t whole_number(json_place where, std::uint64_t most = std::numeric_limits<std::uint64_t>::max()) {
    const char first = next();
    std::uint64_t value = 0;
    const char* const last = first == '0' ? at_ + 1 : end_;  // no longer number begins with 0
    const auto [stop, fault] = std::from_chars(at_, last, value);
    const bool has_more = stop != end_ && (*stop == '.' || *stop == 'e' || *stop == 'E');
    const bool is_whole = first >= '0' && first <= '9' && fault == std::errc() && !has_more && value <= most;
    if (!is_whole) unexpected(where, "a whole number from 0");
    at_ = stop;
    return value;
  }
  /// Returns the first character of the next value, which determines its kind; 0 at the end of the text.
  char next() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
    return at_ == end_ ? '\0' : *at_;
  }
  /// Reads a number, or true, false or null, and returns its text.
  std::string_view word() {
    const char first = next();
    for (const std::string_view literal : {"true", "false", "null"})
      if (std::string_view(at_, end_).starts_with(literal)) return taken(literal.size());
    if (first != '-' && (first < '0' || first > '9')) malformed("a value");
    const char* const begin = at_;
    if (first == '-') ++at_;
    if (at_ != end_ && *at_ == '0')
      ++at_;
    else
      digits();
    if (at_ != end_ && *at_ == '.') ++at_, digits();
    if (at_ != end_ && (*at_ == 'e' || *at_ == 'E')) {
      ++at_;
      if (at_ != end_ && (*at_ == '+' || *at_ == '-')) ++at_;
      digits();
    }
    return {begin, at_};
  }
  /// Reads and ignores a value of any kind. Throws for more than `max_json_depth` nested levels.
  void skip(int depth = 0) {
    if (depth > max_json_depth)
      fail({source_, ": the JSON has more than ", max_json_depth, " levels of objects and lists in each other"});
    const char first = next();
    if (first == '{') return object({}, [&](const std::string&) { skip(depth + 1); });
    if (first == '[') return list({}, [&] { skip(depth + 1); });
    first == '"' ? static_cast<void>(string()) : static_cast<void>(word());
  }
  /// Throws if anything but white space is left.
  void end() {
    next();
    if (at_ != end_) malformed("the end of the text");
  }
  /// Throws the `error` for the next value, where `legal` describes the valid values.
  [[noreturn]] void unexpected(json_place where, std::string_view legal) {
    const char first = next();
    const std::string found = first == '{'   ? "an object"
                              : first == '[' ? "an array"
                              : first == '"' ? cat({"the string \"", string().substr(0, 300), "\""})
                                             : std::string(word().substr(0, 300));
    fail({source_, ": found ", found, " ", text_of(where), ", where ", legal, " is legal"});
  }

 private:
  static std::string text_of(json_place where) {
    std::string text;
    for (const std::string_view piece : where) text += piece;
    return text;
  }
  [[noreturn]] void malformed(std::string_view legal) const {
    std::string found = "the text ends";
    if (at_ != end_) {
      const auto byte = static_cast<unsigned char>(*at_);
      found = byte == 0                     ? "there is a zero byte"
              : byte > 0x20 && byte <= 0x7e ? cat({"there is '", std::string_view(at_, 1), "'"})
                                            : cat({"there is a byte ", int{byte}});
    }
    fail({source_, ": malformed JSON: ", found, " at byte ", at_ - text_.data(), ", where ", legal, " is legal"});
  }
  std::string_view taken(std::size_t n) {
    at_ += n;
    return {at_ - n, n};
  }
  bool take(char c) {
    if (at_ == end_ || next() != c || at_ == end_) return false;
    ++at_;
    return true;
  }
  void require(char c) {
    if (!take(c)) malformed(cat({"'", std::string_view(&c, 1), "'"}));
  }
  void digits() {
    const char* const begin = at_;
    while (at_ != end_ && *at_ >= '0' && *at_ <= '9') ++at_;
    if (at_ == begin) malformed("a digit");
  }
  std::string string() {
    std::string out;
    for (++at_;;) {
      const char* const begin = at_;
      const auto is_plain = [](char c) { return c >= 0x20 && c <= 0x7e && c != '"' && c != '\\'; };
      while (at_ != end_ && is_plain(*at_)) ++at_;
      out.append(begin, at_);
      if (at_ == end_) malformed("a character of a string");
      if (*at_ == '"') return ++at_, out;
      if (*at_ == '\\') {
        append_escaped(out);
      } else if (const std::size_t length = utf8_length({at_, end_}); length > 1 || *at_ == 0x7f) {
        out += taken(length);
      } else {
        malformed("a character of a string in UTF-8");
      }
    }
  }
  void append_escaped(std::string& out) {
    constexpr std::string_view names = "\"\\/bfnrt", values = "\"\\/\b\f\n\r\t";
    ++at_;
    const std::size_t i = at_ == end_ ? names.npos : names.find(*at_);
    if (i != names.npos) return ++at_, out.push_back(values[i]);
    if (at_ == end_ || *at_ != 'u') malformed("an escape sequence");
    std::uint32_t code = hexadecimal();
    const bool high = code >= 0xd800 && code <= 0xdbff;
    if (high) {
      if (!std::string_view(at_, end_).starts_with("\\u")) malformed("the second half of a surrogate pair");
      ++at_;
      const std::uint32_t low = hexadecimal();
      if (low < 0xdc00 || low > 0xdfff) malformed("the second half of a surrogate pair before it");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    if (!high && code >= 0xdc00 && code <= 0xdfff) malformed("the first half of a surrogate pair before it");
    const auto add = [&](std::uint32_t byte) { out.push_back(static_cast<char>(byte)); };
    if (code < 0x80) return add(code);
    if (code < 0x800) return add(0xc0 | code >> 6), add(0x80 | (code & 63));
    if (code < 0x10000) return add(0xe0 | code >> 12), add(0x80 | (code >> 6 & 63)), add(0x80 | (code & 63));
    add(0xf0 | code >> 18), add(0x80 | (code >> 12 & 63)), add(0x80 | (code >> 6 & 63)), add(0x80 | (code & 63));
  }
  /// Reads the letter u and four hexadecimal digits.
  std::uint32_t hexadecimal() {
    std::uint32_t code = 0;
    ++at_;
    const char* const stop = at_ + std::min<std::ptrdiff_t>(4, end_ - at_);
    const char* const last = std::from_chars(at_, stop, code, 16).ptr;
    at_ = last;
    if (last != stop || stop == end_) malformed("a hexadecimal digit");
    return code;
  }

  const std::string& source_;
  std::string_view text_;
  const char *at_, *end_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
