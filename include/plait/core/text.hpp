// Texts put together from pieces, without format strings, and a hash of bytes.
#pragma once

#include <bit>
#include <cinttypes>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <string_view>

#include "plait/version.hpp"

namespace plait {

/// A piece of a text: text as it is, or a number that is written out. It refers to text that its caller keeps until the
/// call is over. So a message costs two stores a piece at the place that may need it. Sums of strings cost it a
/// destructor each, and compilers most of their time.
class text_piece {
 public:
  text_piece(const std::string_view& text) : view_(&text), kind_(kind::view) {}                // NOLINT
  text_piece(const char* text) : literal_(text), kind_(kind::literal) {}                       // NOLINT
  text_piece(const std::string& text) : text_(&text), kind_(kind::text) {}                     // NOLINT
  text_piece(char letter) : bits_(static_cast<unsigned char>(letter)), kind_(kind::letter) {}  // NOLINT
  text_piece(bool) = delete;  ///< which would be written as a letter: say what it means
  template <std::signed_integral T>
  text_piece(T number) : bits_(static_cast<std::uint64_t>(std::int64_t{number})), kind_(kind::integer) {}  // NOLINT
  template <std::unsigned_integral T>
    requires(!std::same_as<T, bool>)
  text_piece(T number) : bits_(number), kind_(kind::natural) {}  // NOLINT
  template <std::floating_point T>
  text_piece(T number) : bits_(std::bit_cast<std::uint64_t>(double{number})), kind_(kind::real) {}  // NOLINT

  /// Real numbers are written with six digits at most, as "%g" does.
  void append_to(std::string& out) const;

 private:
  enum class kind : std::uint8_t { view, literal, text, letter, integer, natural, real };
  union {
    const std::string_view* view_;
    const char* literal_;
    const std::string* text_;
    std::uint64_t bits_;  ///< the number
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

/// Returns FNV-1a, 64 bits, of some bytes; `hash` is the hash of the bytes before them. It has one value on all ranks
/// and machines, and is not cryptographic.
constexpr std::uint64_t fnv1a(std::string_view bytes, std::uint64_t hash = 14695981039346656037ull) {
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

}  // namespace plait
