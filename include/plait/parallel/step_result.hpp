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
  double loss = 0;           ///< mean over the counted tokens of the global batch; 0 where no token counts
  double gradient_norm = 0;  ///< before clipping
  std::int64_t tokens = 0;   ///< counted tokens of the global batch
  bool skipped = false;      ///< whether the gradients were not finite, so that no weight has changed
  double auxiliary = 0;      ///< what layers add to the loss, as mixtures of experts do; `loss` is without it
};

/// Hashes (FNV-1a) of a parameter's name and its elements as they lie in row-major order, without padding: equal hashes
/// mean equal bits, on whatever mesh.
struct parameter_hash {
  std::string name;
  std::uint64_t value = 0;                  ///< of the master values
  std::optional<std::uint64_t> gradient{};  ///< of the reduced gradient; nothing: not asked for, or frozen

  bool operator==(const parameter_hash&) const = default;
};

/// Returns a hash as 16 hexadecimal digits.
inline std::string hex_text(std::uint64_t hash) {
  std::string text(16, '0');
  for (std::size_t i = text.size(); hash != 0; hash >>= 4) text[--i] = "0123456789abcdef"[hash & 15];
  return text;
}

}  // namespace plait
