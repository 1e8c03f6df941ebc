// Which of several weighted sources each sample of a run comes from. It knows no data and stores nothing: a run goes on
// at any sample, on any mesh.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plait/core/error.hpp"

namespace plait {

/// The sources of a run's samples by their global index, in proportion to weights. Sample i has the phase
/// i * 2654435769 mod 2^32, which is the fractional part of i times the golden ratio in whole numbers, and comes from
/// the source in whose part of [0, 2^32) that lies, the parts being as long as the weights say. So the first n samples
/// have n * w of a source but for about log n, whatever n is (Kronecker's sequence; Niederreiter 1992, section 3.1),
/// and which of a source's samples it is follows by a sum of floors in logarithmic time.
class blend {
 public:
  struct pick {
    std::size_t source;
    std::int64_t index;  ///< of the source's own samples, from 0
  };

  /// Weights need not add up to 1. `flag` is what error texts call them. Throws `error` for no weights, one that is not
  /// finite and above 0, and one that is less than 2^-32 of their sum.
  explicit blend(const std::vector<double>& weights, const std::string& flag = "weights") {
    double sum = 0, before = 0;
    if (weights.empty()) fail({flag, ": no weight given"});
    for (const double w : weights) {
      if (!(w > 0 && std::isfinite(w))) fail({flag, ": ", w, " is no weight; legal are numbers above 0"});
      sum += w;
    }
    if (!std::isfinite(sum)) fail({flag, ": the weights add up to more than a double holds"});
    ends_.push_back(0);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      before += weights[i];
      ends_.push_back(i + 1 == weights.size() ? period
                                              : static_cast<std::uint64_t>(std::llround(std::ldexp(before / sum, 32))));
      if (ends_[i + 1] <= ends_[i])
        fail({flag, ": ", weights[i], " is less than one sample in 2^32 of ", sum, "; leave the source out"});
    }
  }

  std::size_t sources() const { return ends_.size() - 1; }

  /// Returns the source of sample `index` >= 0 of the run, and which of its samples it is.
  pick at(std::int64_t index) const {
    const auto i = static_cast<std::uint64_t>(index);
    const std::uint64_t phase = i * step % period, rest = i % period, rounds = i / period;
    std::size_t source = 0;
    while (ends_[source + 1] <= phase) ++source;
    const std::uint64_t low = ends_[source], high = ends_[source + 1];
    return {source, static_cast<std::int64_t>(rounds * (high - low) + below(rest, high) - below(rest, low))};
  }

 private:
  static constexpr std::uint64_t period = std::uint64_t{1} << 32, step = 2654435769;  // 2^32 / golden ratio, and odd

  /// Returns how many of the first n < 2^32 samples have a phase below x <= 2^32: each adds
  /// floor(y / 2^32) - floor((y - x) / 2^32) for y = j * step.
  static std::uint64_t below(std::uint64_t n, std::uint64_t x) {
    return n + sum_of_floors(n, 0) - sum_of_floors(n, period - x);
  }
  /// Returns the sum of floor((step * j + b) / 2^32) over j in [0, n), modulo 2^64, by Euclid's algorithm (Knuth 1998,
  /// section 3.3.3, on Dedekind sums).
  static std::uint64_t sum_of_floors(std::uint64_t n, std::uint64_t b) {
    std::uint64_t a = step, m = period, sum = 0;
    while (n > 0) {
      sum += (n % 2 == 0 ? n / 2 * (n - 1) : (n - 1) / 2 * n) * (a / m) + n * (b / m);
      a %= m;
      b %= m;
      const std::uint64_t most = a * n + b;  // below 2^64: a and b are below m, and n m falls
      if (most < m) break;
      n = most / m;
      b = most % m;
      const std::uint64_t old = m;
      m = a;
      a = old;
    }
    return sum;
  }

  std::vector<std::uint64_t> ends_;  ///< of the sources' parts, from 0 to 2^32
};

}  // namespace plait
