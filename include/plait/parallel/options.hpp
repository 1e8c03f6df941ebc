// The choices of a pipeline's step: its policy of data parallelism, the axes and the form in which gradients travel,
// and the costs that order its messages.
#pragma once

#include <cstdint>

#include "plait/core/tag.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/parallel/placement.hpp"
#include "plait/schedule/schedule.hpp"
#include "plait/schedule/simulate.hpp"

namespace plait {

/// The axes over which a step's data is spread, so that the gradients of parameters are sums over them. With levels of
/// `zero_level` beyond `replicated`, parameters are cut over `shard`; over `replicate` the pieces are equal, which
/// makes a hybrid: sharded within, replicated over.
struct data_axes {
  axis_list shard = axis_list(axis_of<dp>, axis_of<cp>);
  axis_list replicate{};
};

/// The form in which gradients travel over the data axes, where they are summed.
enum class gradient_wire : std::uint8_t {
  full,  ///< in their own type, in place
  /// Rounded to the nearest bf16, for half the bytes of floats: a step then has memory for a copy of a bucket's
  /// gradients while they travel. Each term, and each partial sum that a backend forwards, is rounded by at most 2^-9
  /// of itself.
  bf16,
  /// Of gradients in bf16: widened to float, for twice their bytes, so that the sum over ranks is rounded once. A step
  /// has memory for such a copy as well.
  f32
};
constexpr const char* name_of(gradient_wire wire) {
  return wire == gradient_wire::full ? "full" : wire == gradient_wire::bf16 ? "bf16" : "f32";
}

/// How the parameters of a pipeline's stages lie over data-parallel ranks, and when they move.
struct pipeline_options {
  data_parallel parallel{};
  data_axes axes{};
  bucket_cut cut = bucket_cut::even;
  gradient_wire wire = gradient_wire::full;
  schedule_costs costs{};
};

}  // namespace plait
