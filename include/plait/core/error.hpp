// The exception that plait throws, and the functions that throw it. Errors that a compiler reports as well have
// their texts in layout/errors.hpp and schedule/errors.hpp; messages are put together with core/text.hpp.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait {

/// Every error that plait reports at run time. The text names the field that is wrong, its value, and what would be
/// legal.
class error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An error that every rank of a run throws, with the same text, so that one of them may report it for all.
class error_of_all : public error {
 public:
  using error::error;
};

/// Throws `error(text)` unless `condition` holds. `text` is evaluated by the caller: pass literals, or build it in the
/// failing branch with `fail`.
inline void require(bool condition, const char* text) {
  if (!condition) throw error(text);
}

[[noreturn]] inline void fail(const std::string& text) { throw error(text); }
/// Throws an error with the pieces as its text: `fail({"rank is ", rank, "; the group has ", size, " ranks"})`.
[[noreturn]] inline void fail(std::initializer_list<text_piece> pieces) { throw error(cat(pieces)); }

}  // namespace plait

#include "plait/core/macros_on.hpp"
