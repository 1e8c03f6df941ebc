#pragma once

#include <fmt/format.h>

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
