#pragma once

#include <doctest/doctest.h>

#include <string>

namespace plait::test {

/// Whether `part` stands in `text`; both are printed if it does not.
inline bool has(const std::string& text, const std::string& part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found) MESSAGE("not found: " << part << "\nin: " << text);
  return found;
}

}  // namespace plait::test
