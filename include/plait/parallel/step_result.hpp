// The numbers that a training step returns, and the hashes of a parameter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "plait/version.hpp"

namespace plait {

/// The numbers of one optimizer step, equal on every rank.
struct step_result {
  double loss = 0;           ///< mean over the counted tokens of the global batch; 0 without counted tokens
  double gradient_norm = 0;  ///< before clipping
  std::int64_t tokens = 0;   ///< counted tokens of the global batch
  bool skipped = false;      ///< whether gradients were not finite, so no weight has changed
  double auxiliary = 0;      ///< auxiliary losses of layers, such as mixtures of experts; not included in `loss`
};

/// Hashes (FNV-1a) of a parameter's name and its elements in row-major order, without padding. Equal hashes mean equal
/// bits, on any mesh.
struct parameter_hash {
  std::string name;
  std::uint64_t value = 0;                  ///< of the master values
  std::optional<std::uint64_t> gradient{};  ///< of the reduced gradient; none if not requested or frozen

  bool operator==(const parameter_hash&) const = default;
};

/// Returns a hash as 16 hexadecimal digits.
inline std::string hex_text(std::uint64_t hash) {
  std::string text(16, '0');
  for (std::size_t i = text.size(); hash != 0; hash >>= 4) text[--i] = "0123456789abcdef"[hash & 15];
  return text;
}

}  // namespace plait
