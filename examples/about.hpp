#pragma once

#include <string>

#include "plait/core/error.hpp"

/// Runs f. Puts `argument` before the text of an error that f throws, unless the text begins with an option.
template <class F>
auto about(const std::string& argument, F&& f) {
  try {
    return f();
  } catch (const plait::error& e) {
    const std::string why = e.what();
    plait::fail(why.starts_with("--") ? why : argument + ": " + why);
  }
}
