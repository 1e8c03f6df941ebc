// The tokens of a microbatch in chunks, for a head and a loss that treat each token by itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/errors.hpp"
#include "plait/layout/layout.hpp"
#include "plait/tensor/context.hpp"

namespace plait::detail {

/// Each rank's positions of a sequence, cut into chunks of equal size. Arrays are [samples, positions, any], and may
/// have the positions of several ranks one after the other, as gathered ones do; a chunk then has a piece of each.
class token_chunks {
 public:
  token_chunks() = default;
  /// `x` is the layout of the head's input [samples, positions, features]. Throws `error` where chunks do not divide a
  /// rank's positions, or would have parts of leaves of deterministic sums.
  template <compute_device Device>
  token_chunks(const context<Device>& ctx, std::int64_t chunks, const layout& x)
      : chunks_(chunks), dim_(x.dims[1].dim) {
    if (chunks == 1) return;
    if (!even(x.dims[1], ctx.ranks.shape(), ctx.sizes))
      fail({"language model: loss_chunks = ", chunks, " needs ranks with equally many positions; legal here is 1"});
    const box part = local_box(x, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
    const std::int64_t here = part.local[1];
    if (chunks < 1 || here % chunks != 0)
      fail({"language model: loss_chunks = ", chunks, "; legal are those that divide the ", here,
            " positions of a sequence that each rank has"});
    piece_ = here / chunks;
    if (sums_in_order(ctx)) require_whole_leaves(ctx, part.global[1]);
  }

  /// How many there are; 1: all tokens at once.
  std::int64_t count() const { return chunks_; }
  /// The context of one of them.
  template <compute_device Device>
  context<Device> context_of_one(const context<Device>& whole) const {
    context<Device> part = whole;
    if (chunks_ == 1) return part;
    part.sizes.set(dim_, whole.sizes.of(dim_) / chunks_);
    part.deterministic.token_chunks = chunks_, part.deterministic.chunk_positions = piece_;
    return part;
  }
  /// Copies chunk i of `all`, [samples, positions, any], to `part`.
  template <class All, class Part, compute_device Device>
  void take(Device& on, std::int64_t i, const All& all, Part& part) const {
    const std::int64_t bytes = bytes_of_piece(part);
    kernels::copy_2d(on, reinterpret_cast<const std::byte*>(all.data()) + i * bytes, part.data(), pieces(part), bytes,
                     chunks_ * bytes, bytes);
  }
  /// Copies `part` to chunk i of `all`.
  template <class Part, class All, compute_device Device>
  void put(Device& on, std::int64_t i, const Part& part, All& all) const {
    const std::int64_t bytes = bytes_of_piece(part);
    kernels::copy_2d(on, part.data(), reinterpret_cast<std::byte*>(all.data()) + i * bytes, pieces(part), bytes, bytes,
                     chunks_ * bytes);
  }

 private:
  /// Throws where a chunk has a part of a leaf of deterministic sums over `length` positions.
  template <compute_device Device>
  void require_whole_leaves(const context<Device>& ctx, std::int64_t length) const {
    const bool sequence = dim_ == dim_of<seq> || dim_ == dim_of<zseq>;
    if (!sequence) require_any_order(ctx, "language model", cat({"loss_chunks = ", chunks_, "; legal is 1"}));
    const std::int64_t leaves = ctx.deterministic.sequence;
    if (leaves * piece_ % length != 0)
      fail({"language model: loss_chunks = ", chunks_, " makes chunks of ", piece_, " positions on each rank, which ",
            "are no whole leaves of deterministic_leaves::sequence = ", leaves, "; legal are multiples of ",
            length / piece_, " there"});
  }
  /// Positions that follow each other in a chunk and in the whole.
  template <class Part>
  std::int64_t pieces(const Part& part) const {
    return part.part().local[0] * part.part().local[1] / piece_;
  }
  template <class Part>
  std::int64_t bytes_of_piece(const Part& part) const {
    const box& b = part.part();
    return part.size() / (b.local[0] * b.local[1]) * piece_ * static_cast<std::int64_t>(sizeof(*part.data()));
  }

  std::int64_t chunks_ = 1, piece_ = 0;  ///< positions of a chunk that one rank has
  dim_id dim_{};
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
