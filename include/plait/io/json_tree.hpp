// Parses JSON of other programs into nlohmann's tree, with limits on length and depth, and without repeated keys.
// io/json.hpp reads and writes JSON without a tree.
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

/// The most bytes of a text. The longest texts of models on the hub are indices of weights, with about 10 MiB.
inline constexpr std::size_t max_json_bytes = std::size_t{64} << 20;

namespace detail {

/// Receives the parser's events in a first pass that builds no tree, and throws the errors of `parse_json`. With the
/// parser's own callbacks one pass would do, but each end of an object would visit all objects before it.
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
  std::vector<std::set<std::string>> keys_;  // of the open objects; a list has no keys
};

}  // namespace detail

/// Returns the tree of `text`; with `nlohmann::ordered_json`, keys keep the order of the text. Throws `error`, whose
/// text starts with `source`, for malformed JSON and for a key that occurs twice in one object. It also throws for more
/// than `max_json_bytes` or `max_json_depth` levels. Code that prints or destroys a tree may recurse once for each
/// level.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& source) {
  if (text.size() > max_json_bytes)
    fail({source, ": ", text.size(), " bytes are too long for JSON of this kind; legal are up to ", max_json_bytes});
  if (const std::string_view other = other_format(text); !other.empty())
    fail({source, ": this is not JSON but ", other});
  if (const std::size_t zero = text.find('\0'); zero != text.npos)
    fail({source, ": malformed JSON: there is a zero byte at ", zero, ", where the parser would stop"});
  detail::json_check<Json> check(source);
  Json::sax_parse(text, &check);
  return Json::parse(text);
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
