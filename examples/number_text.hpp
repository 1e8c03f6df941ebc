#pragma once

#include <fmt/format.h>

#include <concepts>
#include <string>

/// 1234567 as "1.23 MB".
inline std::string size_text(double bytes) {
  const char* unit = "B";
  for (const char* next : {"kB", "MB", "GB", "TB"}) {
    if (bytes < 999.5) break;
    bytes /= 1000;
    unit = next;
  }
  return fmt::format("{:.{}f} {}", bytes, *unit == 'B' || bytes >= 99.95 ? 0 : bytes >= 9.995 ? 1 : 2, unit);
}

/// 0.0123 as "12.3 ms".
inline std::string duration_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} us", 1e6 * seconds);
  if (seconds < 1) return fmt::format("{:.1f} ms", 1e3 * seconds);
  return fmt::format("{:.3f} s", seconds);
}

/// "1 rank" or "2 ranks".
template <std::integral N>
std::string counted(N n, const char* what, const char* plural = "s") {
  return fmt::format("{} {}{}", n, what, n == 1 ? "" : plural);
}
