#pragma once

#include <string>

#include "plait/core/error.hpp"

/// Runs f. Puts `argument` before the text of an error that f throws, unless the text begins with an option. An error
/// of all ranks stays one.
template <class F>
auto about(const std::string& argument, F&& f) {
  const auto named = [&](const std::string& why) { return why.starts_with("--") ? why : argument + ": " + why; };
  try {
    return f();
  } catch (const plait::error_of_all& e) {
    throw plait::error_of_all(named(e.what()));
  } catch (const plait::error& e) {
    plait::fail(named(e.what()));
  }
}
