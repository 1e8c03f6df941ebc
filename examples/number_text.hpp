#pragma once

#include <fmt/format.h>

#include <charconv>
#include <concepts>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

/// Returns the number that is all of `text`; nothing if there is none, or if N cannot hold it.
template <class N, class... Base>
std::optional<N> number_of(std::string_view text, Base... base) {
  N value{};
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value, base...);
  if (problem != std::errc{} || end != text.data() + text.size()) return {};
  return value;
}

/// Returns a value of at least 0 in three digits, in the largest unit in which it is at least 1. Each unit is a
/// thousand times the unit before it.
inline std::string three_digits(double value, std::initializer_list<const char*> units) {
  const char* const* unit = units.begin();
  for (; unit + 1 != units.end() && value >= 999.5; ++unit) value /= 1000;
  const int digits = unit == units.begin() || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return fmt::format("{:.{}f}{}", value, digits, *unit);
}

/// Returns "1.23 MB" for 1234567.
inline std::string size_text(double bytes) { return three_digits(bytes, {" B", " kB", " MB", " GB", " TB"}); }

/// Returns "12.3 ms" for 0.0123.
inline std::string duration_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} us", 1e6 * seconds);
  if (seconds < 1) return fmt::format("{:.1f} ms", 1e3 * seconds);
  return fmt::format("{:.3f} s", seconds);
}

/// Returns "1 rank" or "2 ranks".
template <std::integral N>
std::string counted(N n, const char* what, const char* plural = "s") {
  return fmt::format("{} {}{}", n, what, n == 1 ? "" : plural);
}
