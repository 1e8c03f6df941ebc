// Parses JSON that somebody else has written into nlohmann's tree, with a limit to its depth and each key once. Large
// headers are read without a tree: checkpoint/safetensors_reader.hpp. To write JSON: io/json_writer.hpp.
#pragma once

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// Most levels of objects and lists in each other in a file; those of models on the hub have up to four.
inline constexpr int max_json_depth = 64;

/// Returns the tree of `text`; with `nlohmann::ordered_json`, keys stay in the order of the text. Throws `error`, its
/// text starting with `source`, for malformed JSON, for more than `max_json_depth` levels (what prints or destroys a
/// tree may call itself for each) and for a key that one object has twice, of which readers would take either.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& source) {
  using event = typename Json::parse_event_t;
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto accept = [&](int depth, event what, const Json& parsed) {
    if (depth > max_json_depth)
      fail({source, ": the JSON has more than ", max_json_depth, " levels of objects and lists in each other"});
    if (what == event::object_start) keys.emplace_back();
    if (what == event::object_end) keys.pop_back();
    if (what == event::key && !keys.back().insert(parsed.template get<std::string>()).second)
      fail({source, ": the key '", parsed.template get<std::string>(), "' appears twice in one object"});
    return true;
  };
  if (const std::size_t zero = text.find('\0'); zero != text.npos)
    fail({source, ": malformed JSON: there is a zero byte at ", zero, ", where the parser would stop"});
  try {
    return Json::parse(text, accept);
  } catch (const nlohmann::json::exception& e) {
    fail({source, ": malformed JSON: ", e.what()});
  }
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
