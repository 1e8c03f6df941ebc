// Typed access to the keys of a JSON object that somebody else has written; what is wrong is said by file and key.
#pragma once

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::detail {

/// Typed access to one JSON object; every complaint names the file and the key.
class config_reader {
 public:
  config_reader(const nlohmann::json& object, std::string source, std::string prefix = "")
      : object_(object), source_(std::move(source)), prefix_(std::move(prefix)) {}

  /// Present, null or not.
  bool given(const char* key) const { return object_.contains(key); }
  /// Present and not null.
  bool has(const char* key) const {
    const auto found = object_.find(key);
    return found != object_.end() && !found->is_null();
  }
  std::int64_t integer(const char* key) const {
    const nlohmann::json& value = at(key);
    if (value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX) bad(key, value, "a smaller whole number");
    if (value.is_number_integer()) return value.get<std::int64_t>();
    bad(key, value, "a whole number");
  }
  std::int64_t integer(const char* key, std::int64_t fallback) const { return has(key) ? integer(key) : fallback; }
  double number(const char* key) const {
    const nlohmann::json& value = at(key);
    if (!value.is_number()) bad(key, value, "a number");
    return value.get<double>();
  }
  double number(const char* key, double fallback) const { return has(key) ? number(key) : fallback; }
  bool boolean(const char* key, bool fallback) const {
    if (!has(key)) return fallback;
    const nlohmann::json& value = at(key);
    if (!value.is_boolean()) bad(key, value, "true or false");
    return value.get<bool>();
  }
  std::string string(const char* key) const {
    const nlohmann::json& value = at(key);
    if (!value.is_string()) bad(key, value, "a string");
    return value.get<std::string>();
  }
  std::vector<std::string> strings(const char* key) const {
    const nlohmann::json& value = at(key);
    const auto is_string = [](const nlohmann::json& element) { return element.is_string(); };
    if (!value.is_array() || !std::all_of(value.begin(), value.end(), is_string)) bad(key, value, "a list of strings");
    return value.get<std::vector<std::string>>();
  }
  config_reader object(const char* key) const {
    const nlohmann::json& value = at(key);
    if (!value.is_object()) bad(key, value, "an object");
    return {value, source_, cat({prefix_, key, "."})};
  }
  /// Refuses any value but `legal`, if the key is there.
  void only(const char* key, const nlohmann::json& legal) const {
    if (has(key) && at(key) != legal) bad(key, at(key), legal.dump());
  }
  /// Calls f(key) for each key that is not null.
  template <class F>
  void each_key(F&& f) const {
    for (const auto& [key, value] : object_.items())
      if (!value.is_null()) f(key);
  }
  bool empty() const { return object_.empty(); }
  /// Refuses a key, whatever its value.
  [[noreturn]] void unknown(const std::string& key, const std::string& advice) const {
    fail({source_, ": key '", prefix_, key, "' is ", excerpt(*object_.find(key)),
          ", and what it means is not known here; ", advice});
  }
  [[noreturn]] void bad(const char* key, const nlohmann::json& value, const std::string& legal) const {
    fail({source_, ": key '", prefix_, key, "' is ", excerpt(value), "; legal is ", legal});
  }

 private:
  const nlohmann::json& at(const char* key) const {
    if (!has(key)) fail({source_, ": key '", prefix_, key, "' is missing"});
    return *object_.find(key);
  }
  static std::string excerpt(const nlohmann::json& value) {
    std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    if (text.size() > 60) text = text.substr(0, 57) + "...";
    return text;
  }

  const nlohmann::json& object_;
  std::string source_;
  std::string prefix_;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
