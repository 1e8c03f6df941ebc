// The limit of an expert's rows per sequence. It drops the same choices on every mesh.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/layout.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/redistribution.hpp"
#include "plait/tensor/sequence_order.hpp"

namespace plait {

/// The limit of rows that an expert takes of a sequence: `factor` times its even share, rounded up, factor * chosen *
/// length / experts. Experts take first choices first, in the order of the text, then second choices, and so on
/// (GShard, Lepikhin et al. 2020, whose groups are sequences here). A choice beyond the limit is dropped: its weight
/// counts as zero, and the other weights stay as they are. The dropped choices do not depend on the mesh.
struct expert_limit {
  double factor = 0;       ///< 0: no limit
  sequence_order order{};  ///< of the tokens; default: the text's
};

namespace detail {

/// Drops the choices beyond a limit. Ranks that share a sequence exchange its choices.
template <compute_device Device>
class expert_capacity {
 public:
  expert_capacity() = default;
  /// `choice` is the layout [samples, positions, chosen].
  expert_capacity(const context<Device>& ctx, const layout& choice, const dim_sizes& sizes, std::int64_t experts,
                  const expert_limit& how, const std::string& name)
      : factor_(how.factor), experts_(experts) {
    if (!(factor_ >= 0))
      fail({name, ": the limit of experts is ", factor_, " times their share; legal is 0 (none) or more"});
    if (factor_ == 0) return;
    if (choice.dims.size() != 3)
      fail(
          {name, ": a limit of experts is one of each sequence; legal is an input of samples, positions and features"});
    if (choice.dims[1].dim == dim_of<zseq> && how.order.length() == 0)
      fail({name, ": its tokens lie in zigzag order (zseq), and expert_limit::order does not say which"});
    layout whole = choice;
    for (axis_id axis : choice.dims[1].axes) whole.set(axis, state::invariant);
    gather_ = ready_plan(choice, whole, ctx.ranks, sizes, name);
    const box here = local_box(choice, ctx.ranks.shape(), sizes, ctx.ranks.rank());
    samples_ = here.local[0], first_ = here.offset[1], length_ = here.local[1], chosen_ = here.local[2];
    const std::int64_t positions = here.global[1];
    const sequence_order order = how.order.length() == 0 ? sequence_order::original(positions) : how.order;
    if (order.length() != positions)
      fail({name, ": expert_limit::order is of ", order.length(), " positions, and a sequence has ", positions});
    std::vector<std::int32_t> in_text(static_cast<std::size_t>(positions));
    for (std::int64_t i = 0; i < positions; ++i)
      in_text[static_cast<std::size_t>(order.position(i))] = static_cast<std::int32_t>(i);
    positions_ = positions;
    in_text_ = make_buffer<std::int32_t>(ctx.device, in_text.size());
    ctx.device.upload(in_text_.data(), in_text.data(), in_text_.bytes(), ctx.device.main_stream());
    limit_ = static_cast<std::int64_t>(
        std::ceil(factor_ * static_cast<double>(chosen_ * positions) / static_cast<double>(experts)));
  }

  /// Whether there is a limit.
  explicit operator bool() const { return factor_ > 0; }
  /// The most rows that an expert takes of `length` tokens of one sequence.
  std::int64_t most_of(std::int64_t length) const { return factor_ > 0 ? std::min(limit_, length) : length; }
  /// Sets the dropped choices in [samples, positions, chosen] to -1. Collective over the ranks of a sequence.
  void drop(Device& on, std::int32_t* choice) const {
    buffer<Device> gathered;
    if (!gather_.trivial()) {
      gathered = buffer<Device>::for_collectives(
          on, static_cast<std::size_t>(gather_.target().local_size()) * sizeof(std::int32_t));
      gather_.run(on, choice, gathered.data(), dtype::i32);
    }
    kernels::drop_choices(on, gathered.empty() ? choice : gathered.template data<std::int32_t>(),
                          in_text_.template data<std::int32_t>(), positions_, choice, samples_, first_, length_,
                          chosen_, experts_, limit_);
  }

 private:
  double factor_ = 0;
  std::int64_t experts_ = 0, limit_ = 0, positions_ = 0;
  std::int64_t samples_ = 0, first_ = 0, length_ = 0, chosen_ = 0;  ///< of this rank's tokens
  buffer<Device> in_text_;                                          ///< for each position in the text, the index of its
                                                                    ///< token
  ready_plan gather_;
};

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
