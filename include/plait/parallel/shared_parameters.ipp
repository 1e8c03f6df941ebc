// The definitions of shared_parameters.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <bit>
#include <cstdint>
#include <string>

#include "plait/core/compiled.hpp"

namespace plait::detail {

PLAIT_INLINE std::string made_as(const parameter_info& info) {
  std::string text = info.name;
  if (info.decays) text += " decays";
  if (info.hidden_layer) text += " hidden";
  const auto add = [&text](auto number) {
    text += ' ';
    text += std::to_string(number);
  };
  for (std::int64_t n : info.shape) add(n);
  add(std::bit_cast<std::uint64_t>(info.init.mean));
  add(std::bit_cast<std::uint64_t>(info.init.std));
  return text;
}

}  // namespace plait::detail
