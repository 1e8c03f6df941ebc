// The definitions of safetensors_directory.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/json_reader.hpp"

namespace plait {

PLAIT_INLINE std::map<std::string, std::string> parse_safetensors_index(std::string_view text,
                                                                        const std::string& source) {
  const nlohmann::json json = parse_json(text, source);
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (map == json.end() || !map->is_object())
    fail({source, ": it has no weight_map, an object from the names of tensors to those of files"});
  std::map<std::string, std::string> out;
  for (const auto& [tensor, file] : map->items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : std::string();
    if (!name.ends_with(".safetensors") || name.find_first_of(std::string_view("/\\\0", 3)) != name.npos)
      fail({source, ": the file of tensor '", tensor, "' is ",
            file.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace).substr(0, 200),
            "; legal is the name of a .safetensors file in the same folder"});
    out.emplace(tensor, name);
  }
  return out;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
