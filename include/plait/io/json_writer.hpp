// Writes JSON: strings, numbers and objects; and checks that text is UTF-8.
#pragma once

#include <charconv>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/text.hpp"
#include "plait/version.hpp"

namespace plait {

/// Number of bytes of the well-formed UTF-8 sequence at the start of `text` (Unicode, table 3-7), 0 if there is none.
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

/// `text` as a JSON string with its quotes. The text should be UTF-8; bytes from 0x80 pass unchanged.
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

/// The shortest decimal number that reads back as exactly `value`, with a point or an exponent, so that readers that
/// tell integers from floats see a float; `null` for infinities and NaN, which JSON lacks.
inline std::string json_number(double value) {
  if (!std::isfinite(value)) return "null";
  char buffer[32];
  std::string text(buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr);
  if (text.find_first_of(".e") == text.npos) text += ".0";
  return text;
}

/// Builds one JSON object, keys in the order of the calls. The caller gives each key once.
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

  /// The object on one line.
  std::string text() const { return cat({"{", members_, "}"}); }
  /// The object with each of its own members on a line.
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

}  // namespace plait
