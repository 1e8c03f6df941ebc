// Parses JSON of other programs into nlohmann's tree, with limits to its length and depth and each key once. To read
// JSON without a tree, or to write it: io/json.hpp.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/json.hpp"
#include "plait/io/mapped_file.hpp"

namespace plait {

/// Most bytes of a text; the longest of models on the hub are indices of weights, with about 10 MiB.
inline constexpr std::size_t max_json_bytes = std::size_t{64} << 20;

namespace detail {

/// Receives the events of the parser for a first pass that builds no tree, and refuses what `parse_json` does. The
/// parser's own callbacks would do it in one pass, but with them each object's end looks at all objects before it.
template <class Json>
class json_check final : public nlohmann::json_sax<Json> {
 public:
  using text_t = typename Json::string_t;
  explicit json_check(const std::string& source) : source_(source) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(typename Json::number_integer_t) override { return true; }
  bool number_unsigned(typename Json::number_unsigned_t) override { return true; }
  bool number_float(typename Json::number_float_t, const text_t&) override { return true; }
  bool string(text_t&) override { return true; }
  bool binary(typename Json::binary_t&) override { return true; }
  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }
  bool key(text_t& name) override {
    if (!keys_.back().insert(name).second) fail({source_, ": the key '", name, "' appears twice in one object"});
    return true;
  }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception& e) override {
    fail({source_, ": malformed JSON: ", e.what()});
  }

 private:
  bool open() {
    if (keys_.size() == max_json_depth)
      fail({source_, ": the JSON has more than ", max_json_depth, " levels of objects and lists in each other"});
    keys_.emplace_back();
    return true;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  const std::string& source_;
  std::vector<std::set<std::string>> keys_;  // of the objects that are open; a list has none
};

}  // namespace detail

/// Returns the tree of `text`; with `nlohmann::ordered_json`, keys stay in the order of the text. Throws `error`, its
/// text starting with `source`, for malformed JSON and for a key that one object has twice. Throws it also for more
/// than `max_json_bytes` or `max_json_depth` levels. Code that prints or destroys a tree may call itself for each
/// level.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& source) {
  if (text.size() > max_json_bytes)
    fail({source, ": ", text.size(), " bytes are too long for JSON of this kind; legal are up to ", max_json_bytes});
  if (const std::string_view other = foreign_file(text); !other.empty())
    fail({source, ": this is no JSON but ", other});
  if (const std::size_t zero = text.find('\0'); zero != text.npos)
    fail({source, ": malformed JSON: there is a zero byte at ", zero, ", where the parser would stop"});
  detail::json_check<Json> check(source);
  Json::sax_parse(text, &check);
  return Json::parse(text);
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
