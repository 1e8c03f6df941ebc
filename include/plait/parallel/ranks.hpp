// The axes of data parallelism, the form in which gradients travel over them, and its communicators, apart from those
// of layers.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "plait/comm/world.hpp"
#include "plait/core/tag.hpp"

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
  /// gradients while they travel, and each term, and each partial sum that a backend sends on, is rounded by at most
  /// 2^-9 of itself.
  bf16,
  /// Of gradients in bf16: widened to float, for twice their bytes, so that the sum over ranks is rounded once. A step
  /// has memory for such a copy as well.
  f32
};
constexpr const char* name_of(gradient_wire wire) {
  return wire == gradient_wire::full ? "full" : wire == gradient_wire::bf16 ? "bf16" : "f32";
}

/// The communicators of data parallelism on one rank. Gathers and reductions have their own, so that a gather of the
/// next unit does not queue behind the reduction of the last, and neither behind a collective of a layer.
class data_ranks {
 public:
  /// Throws where an axis is named twice; those that the mesh does not have, or has one rank along, do not count.
  data_ranks(world& ranks, const data_axes& axes);

  world& ranks() const { return *ranks_; }
  /// In the mesh's order, of more than one rank.
  const axis_list& shard() const { return shard_; }
  const axis_list& replicate() const { return replicate_; }
  const axis_list& all() const { return all_; }

  /// The communicators over some axes, in the mesh's order; made at the first use, which is collective over the world.
  any_communicator& gathers(const axis_list& axes) { return ranks_->group(axes, world::channel::gathers); }
  any_communicator& reductions(const axis_list& axes) { return ranks_->group(axes, world::channel::reductions); }
  /// The cost of updating the arrays that each of so many ranks along `axes` owns so far, with bucket_cut::whole.
  std::vector<double>& loads(const axis_list& axes, std::int64_t owners);

 private:
  world* ranks_;
  axis_list shard_, replicate_, all_;
  std::vector<std::pair<axis_list, std::vector<double>>> loads_;
};

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/parallel/ranks.ipp"  // IWYU pragma: keep
#endif
