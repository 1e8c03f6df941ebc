// The machinery of errors whose text a `static_assert` and an exception share.
#pragma once

#include <array>
#include <cstddef>
#include <utility>

#include "plait/version.hpp"

namespace plait {

/// The text of an error, a value of an enumeration such as `layout_error`. It is written once: an exception has it from
/// `text_of`, the `static_assert` from `refused`. Each error specialises both, because compilers show the line of the
/// source that refuses, and a line that a macro wrote for all errors would be pages long.
template <auto Error>
inline constexpr const char* error_text = nullptr;

/// Instantiated when a check refuses. `Facts` are types that a compiler prints: where, in which states, by whom. No two
/// errors have the same number, of whatever enumeration: clang 16 takes specialisations for both for ambiguous, and
/// prints that in place of the text.
template <auto Error, class... Facts>
struct refused {};

namespace detail {

/// The texts of the errors of an enumeration, from the first to the last of them.
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
