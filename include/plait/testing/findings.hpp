// The findings of parity checks, as texts for any test framework (`CHECK(findings.text() == "")`).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::testing {

class findings {
 public:
  bool empty() const { return all_.empty(); }
  std::size_t size() const { return all_.size(); }
  /// Returns the findings, one per line, at most twenty.
  std::string text() const {
    std::string lines;
    for (std::size_t i = 0; i < all_.size() && i < 20; ++i) lines += all_[i] + "\n";
    if (all_.size() > 20) append(lines, {"and ", all_.size() - 20, " more\n"});
    return lines;
  }
  void add(std::string what) { all_.push_back(std::move(what)); }
  /// Adds the findings of another check, each with the prefix `where`.
  void add(const findings& other, const std::string& where) {
    for (const std::string& what : other.all_) all_.push_back(cat({where, ": ", what}));
  }
  void require(bool holds, const std::string& what) {
    if (!holds) add(what);
  }

 private:
  std::vector<std::string> all_;
};

/// Returns the largest difference of two arrays divided by the largest element of `b` (at least `floor`). It is
/// infinite if the sizes differ or a number is not finite.
inline double largest_difference(const std::vector<double>& a, const std::vector<double>& b, double floor = 1e-3) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, size = floor;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return INFINITY;
    difference = std::max(difference, std::abs(a[i] - b[i]));
    size = std::max(size, std::abs(b[i]));
  }
  return difference / size;
}

}  // namespace plait::testing

#include "plait/core/macros_on.hpp"
