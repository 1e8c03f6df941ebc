// A hash of all weights that does not depend on the mesh, for tests and logs.
#pragma once

#include <cstdint>
#include <vector>

#include "plait/parallel/gather_whole.hpp"  // IWYU pragma: export
#include "plait/parallel/parameter_hashes.hpp"

namespace plait {

/// Returns the hash of all weights, of which these are the hashes: the sum of those, each folded onto its lower half.
inline std::uint64_t weights_hash(const std::vector<parameter_hash>& all) {
  std::uint64_t sum = 0;
  for (const parameter_hash& p : all) sum += p.value ^ (p.value >> 32);
  return sum;
}

/// A hash of all weights, without padding: equal hashes mean equal weights, on whatever mesh and however the layers are
/// shared out. Collective over the mesh, and over the stages of a pipeline.
template <compute_device Device, class Model>
std::uint64_t weights_hash(const context<Device>& ctx, Model& model) {
  return weights_hash(parameter_hashes(ctx, model));
}

}  // namespace plait
