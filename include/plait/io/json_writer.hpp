// Writes JSON: strings, numbers and objects. There is no reader here: checkpoint/safetensors_reader.hpp and
// models/llama_config_json.hpp read with nlohmann/json.
#pragma once

#include <charconv>
#include <cmath>
#include <concepts>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/text.hpp"

namespace plait {

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
