// The exception that plait throws, the functions that throw it, and errors whose text a `static_assert` and an
// exception share (layout/errors.hpp, schedule/errors.hpp).
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait {

/// Every error that plait reports at run time. The text names the wrong field, its value, and the legal values.
class error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An error that every rank of a run throws with the same text, so that one rank may report it for all.
class error_of_all : public error {
 public:
  using error::error;
};

/// Throws `error(text)` unless `condition` holds. The caller evaluates `text` in any case: pass literals, or call
/// `fail` in the failing branch.
inline void require(bool condition, const char* text) {
  if (!condition) throw error(text);
}

[[noreturn, gnu::cold, gnu::noinline]] inline void fail(const std::string& text) { throw error(text); }
/// Throws an error whose text joins the pieces: `fail({"rank is ", rank, "; the group has ", size, " ranks"})`.
[[noreturn, gnu::cold, gnu::noinline]] inline void fail(std::initializer_list<text_piece> pieces) {
  throw error(cat(pieces));
}

/// The text of an error. An error is a value of an enumeration such as `layout_error`.
template <auto Error>
inline constexpr const char* error_text = nullptr;

/// Instantiated when a check fails. `Facts` are types that the compiler prints, such as the place, the states and the
/// operation. No two errors share a number, even in different enumerations. Otherwise clang 16 reports ambiguous
/// specialisations instead of the text.
template <auto Error, class... Facts>
struct refused {};

/// Gives an error its text, PLAIT_TEXT, and begins its `refused`. The body that follows is a `static_assert` with that
/// text. The body stands outside of the macro, so that compilers' messages mention no macro.
#define PLAIT_ERROR(error)                                     \
  template <>                                                  \
  inline constexpr const char* error_text<error> = PLAIT_TEXT; \
  template <class... Facts>                                    \
  struct refused<error, Facts...>

namespace detail {

/// The texts of an enumeration's errors, from the first error to the last.
template <class Error, Error First, Error Last>
inline constexpr auto error_texts = []<std::size_t... Is>(std::index_sequence<Is...>) {
  constexpr auto first = static_cast<std::size_t>(First);
  static_assert((error_text<static_cast<Error>(first + Is)> && ...), "an error has no text");
  return std::array{error_text<static_cast<Error>(first + Is)>...};
}(std::make_index_sequence<static_cast<std::size_t>(Last) - static_cast<std::size_t>(First) + 1>{});

/// Returns the text of one of these errors, or of `ok`, which is 0 in every enumeration.
template <class Error, Error First, Error Last>
constexpr const char* text_among(Error e) {
  if (e == Error::ok) return error_text<Error::ok>;
  return error_texts<Error, First, Last>[static_cast<std::size_t>(e) - static_cast<std::size_t>(First)];
}

struct accepted {};

template <bool Ok, class Refusal>
struct consequence_of {
  using type = accepted;
};
template <class Refusal>
struct consequence_of<false, Refusal> {
  using type = typename Refusal::type;
};

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
