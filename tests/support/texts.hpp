#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <string_view>

#include "plait/core/error.hpp"

namespace plait::test {

/// The text of the error that call() throws, or "".
template <class Call>
std::string text_thrown_by(Call&& call) {
  try {
    call();
  } catch (const error& e) {
    return e.what();
  }
  return "";
}

/// Whether `text` contains `part`; prints both if it does not.
inline bool has(const std::string& text, const std::string& part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found) MESSAGE("not found: " << part << "\nin: " << text);
  return found;
}

/// The number of occurrences of `part` in `text`.
inline std::size_t occurrences(std::string_view text, std::string_view part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != text.npos; at = text.find(part, at + part.size())) ++n;
  return n;
}

}  // namespace plait::test
