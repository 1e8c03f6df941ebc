// Texts that are joined from pieces, without format strings, and a hash of bytes.
#pragma once

#include <bit>
#include <cinttypes>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <string_view>

#include "plait/version.hpp"

namespace plait {

/// A piece of a text: a string as it is, or a number to be formatted. It refers to a string that its caller keeps until
/// the call returns. A message then costs the caller only two stores per piece; sums of std::string cost a destructor
/// each and much compile time.
class text_piece {
 public:
  text_piece(const std::string_view& text) : view_(&text), kind_(kind::view) {}                // NOLINT
  text_piece(const char* text) : literal_(text), kind_(kind::literal) {}                       // NOLINT
  text_piece(const std::string& text) : text_(&text), kind_(kind::text) {}                     // NOLINT
  text_piece(char letter) : bits_(static_cast<unsigned char>(letter)), kind_(kind::letter) {}  // NOLINT
  text_piece(bool) = delete;  ///< a bool would be formatted as a number: pass a word instead
  template <std::signed_integral T>
  text_piece(T number) : bits_(static_cast<std::uint64_t>(std::int64_t{number})), kind_(kind::integer) {}  // NOLINT
  template <std::unsigned_integral T>
    requires(!std::same_as<T, bool>)
  text_piece(T number) : bits_(number), kind_(kind::natural) {}  // NOLINT
  template <std::floating_point T>
  text_piece(T number) : bits_(std::bit_cast<std::uint64_t>(double{number})), kind_(kind::real) {}  // NOLINT

  /// Formats real numbers with at most six digits, as "%g" does.
  void append_to(std::string& out) const;

 private:
  enum class kind : std::uint8_t { view, literal, text, letter, integer, natural, real };
  union {
    const std::string_view* view_;
    const char* literal_;
    const std::string* text_;
    std::uint64_t bits_;  ///< the bits of the number
  };
  kind kind_;
};

inline void text_piece::append_to(std::string& out) const {
  if (kind_ == kind::view) {
    out += *view_;
  } else if (kind_ == kind::literal) {
    out += literal_;
  } else if (kind_ == kind::text) {
    out += *text_;
  } else if (kind_ == kind::letter) {
    out += static_cast<char>(bits_);
  } else {
    char digits[32];
    if (kind_ == kind::real)
      std::snprintf(digits, sizeof digits, "%g", std::bit_cast<double>(bits_));
    else if (kind_ == kind::natural)
      std::snprintf(digits, sizeof digits, "%" PRIu64, bits_);
    else
      std::snprintf(digits, sizeof digits, "%" PRId64, static_cast<std::int64_t>(bits_));
    out += digits;
  }
}

/// A text of less than `Size` bytes in place, for constant expressions and for bytes that ranks send. A longer text is
/// truncated.
template <std::size_t Size>
struct fixed_text {
  char text[Size]{};

  constexpr fixed_text() = default;
  // NOLINTBEGIN(google-explicit-constructor): a name is written as a literal
  constexpr fixed_text(std::string_view from) {
    for (std::size_t i = 0; i < from.size() && i + 1 < Size; ++i) text[i] = from[i];
  }
  constexpr fixed_text(const char* from) : fixed_text(std::string_view(from)) {}
  fixed_text(const std::string& from) : fixed_text(std::string_view(from)) {}
  // NOLINTEND(google-explicit-constructor)
  constexpr std::string_view view() const { return text; }
  std::string str() const { return text; }

  friend constexpr bool operator==(const fixed_text&, const fixed_text&) = default;
};

/// Appends the pieces: `append(line, {"rank ", rank, " of ", size})`.
[[gnu::noinline]] inline void append(std::string& out, std::initializer_list<text_piece> pieces) {
  for (const text_piece& piece : pieces) piece.append_to(out);
}

/// Returns the pieces as one text: `cat({"rank ", rank, " of ", size})`.
[[gnu::noinline]] inline std::string cat(std::initializer_list<text_piece> pieces) {
  std::string out;
  append(out, pieces);
  return out;
}

/// Returns the 64-bit FNV-1a hash of some bytes; `hash` is the hash of the preceding bytes. The value is equal on all
/// ranks and machines. The hash is not cryptographic.
constexpr std::uint64_t fnv1a(std::string_view bytes, std::uint64_t hash = 14695981039346656037ull) {
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

}  // namespace plait
