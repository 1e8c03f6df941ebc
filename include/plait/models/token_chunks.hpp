// The tokens of a microbatch in chunks, for a head and a loss that process each token independently.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "plait/core/box.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/layout.hpp"
#include "plait/tensor/context.hpp"

namespace plait::detail {

/// Divides each rank's positions of a sequence into chunks. Ranks' numbers of positions differ by one at most. Every
/// chunk has the same number of positions on every rank. The last chunk ends with the rank's last position, so it may
/// repeat some of the previous chunk. Arrays are [samples, positions, any]. A gathered array has the positions of
/// several ranks one after another; a chunk of it has a piece of each.
class token_chunks {
 public:
  token_chunks() = default;
  /// `x` is the layout of the head's input [samples, positions, features]. There are at most `chunks` chunks. Throws
  /// `error` if a rank has fewer positions, or if a chunk would split a leaf of deterministic sums.
  template <compute_device Device>
  token_chunks(const context<Device>& ctx, std::int64_t chunks, const layout& x)
      : ranks_(ctx.ranks.shape().size(x.dims[1].axes)), length_(ctx.sizes.of(x.dims[1].dim)), dim_(x.dims[1].dim) {
    if (chunks == 1) return;
    const std::int64_t least = length_ / ranks_, most = (length_ + ranks_ - 1) / ranks_;
    if (chunks < 1 || chunks > least)
      fail({"language model: loss_chunks = ", chunks, "; legal are 1 to ", least,
            ", as many as each rank has positions of a sequence"});
    if (const std::int64_t block = ctx.sizes.block_of(dim_);
        block > 1 && !even(x.dims[1], ctx.ranks.shape(), ctx.sizes))
      fail({"language model: loss_chunks = ", chunks, " needs ranks whose positions of a sequence differ by one at ",
            "most, and ", ranks_, " ranks share out ", dim_.text(), " = ", length_, " in blocks of ", block,
            "; legal is 1"});
    piece_ = (most + chunks - 1) / chunks;
    count_ = (most + piece_ - 1) / piece_;
    if (sums_in_order(ctx)) require_whole_leaves(ctx, chunks);
  }

  /// The number of chunks; 1: all tokens at once.
  std::int64_t count() const { return count_; }
  /// Returns the context of one chunk.
  template <compute_device Device>
  context<Device> context_of_one(const context<Device>& whole) const {
    context<Device> part = whole;
    if (count_ == 1) return part;
    part.sizes.set(dim_, piece_ * ranks_);
    part.deterministic.token_chunks = count_, part.deterministic.chunk_positions = piece_;
    return part;
  }
  /// Copies chunk i of `all`, [samples, positions, any], to `part`.
  template <class All, class Part, compute_device Device>
  void take(Device& on, std::int64_t i, const All& all, Part& part) const {
    for_each_piece(i, all.part(), [&](const piece& p) { copy_positions(on, all, p.in_all, part, p.in_chunk, piece_); });
  }
  /// Copies chunk i of `labels` to `part`. Labels that the previous chunk has become `ignored`, so each counts once.
  template <class Labels, compute_device Device>
  void take_labels(Device& on, std::int64_t i, const Labels& labels, std::int64_t ignored, Labels& part) const {
    if (have_repeats() && i + 1 == count_) kernels::fill(on, part.data(), part.size(), ignored);
    for_each_piece(i, labels.part(), [&](const piece& p) {
      copy_positions(on, labels, p.in_all + p.repeated, part, p.in_chunk + p.repeated, piece_ - p.repeated);
    });
  }
  /// Copies `part` to chunk i of `all`, except positions that the previous chunk has written.
  template <class Part, class All, compute_device Device>
  void put(Device& on, std::int64_t i, const Part& part, All& all) const {
    for_each_piece(i, all.part(), [&](const piece& p) {
      copy_positions(on, part, p.in_chunk + p.repeated, all, p.in_all + p.repeated, piece_ - p.repeated);
    });
  }

 private:
  /// One rank's positions of a chunk.
  struct piece {
    std::int64_t in_all = 0, in_chunk = 0;  ///< begin in an array of all positions, and in one of the chunk
    std::int64_t repeated = 0;              ///< number of first positions that the previous chunk also has
  };

  bool have_repeats() const { return count_ * piece_ * ranks_ != length_; }
  /// Throws if a chunk splits a leaf of deterministic sums.
  template <compute_device Device>
  void require_whole_leaves(const context<Device>& ctx, std::int64_t chunks) const {
    const bool sequence = dim_ == dim_of<seq> || dim_ == dim_of<zseq>;
    if (!sequence) require_any_order(ctx, "language model", cat({"loss_chunks = ", chunks, "; legal is 1"}));
    const std::int64_t leaves = ctx.deterministic.sequence;
    if (have_repeats())
      fail({"language model: loss_chunks = ", chunks, " does not divide the positions of a sequence that each rank ",
            "has, as deterministic sums need it; legal is 1"});
    if (leaves * piece_ % length_ != 0)
      fail({"language model: loss_chunks = ", chunks, " makes chunks of ", piece_, " positions on each rank, which ",
            "are not whole leaves of deterministic_leaves::sequence = ", leaves, "; legal are multiples of ",
            length_ / piece_, " there"});
  }
  /// Calls f(piece) for each rank whose positions are in an array with the box `part`.
  template <class F>
  void for_each_piece(std::int64_t i, const box& part, F&& f) const {
    piece p;
    for (std::int64_t r = 0; r < ranks_; ++r) {
      const std::int64_t begin = part_begin(length_, ranks_, r) - part.offset[1];
      if (begin < 0 || begin >= part.local[1]) continue;
      const std::int64_t positions = part_begin(length_, ranks_, r + 1) - part.offset[1] - begin;
      const std::int64_t first = std::min(i * piece_, positions - piece_);
      p.in_all = begin + first;
      p.repeated = i * piece_ - first;
      f(p);
      p.in_chunk += piece_;
    }
  }
  /// Copies `count` positions of each sample.
  template <class From, class To, compute_device Device>
  static void copy_positions(Device& on, const From& from, std::int64_t from_first, To& to, std::int64_t to_first,
                             std::int64_t count) {
    const box &in = from.part(), &out = to.part();
    const std::int64_t position =
        from.size() / (in.local[0] * in.local[1]) * static_cast<std::int64_t>(sizeof(*from.data()));
    kernels::copy_2d(on, reinterpret_cast<const std::byte*>(from.data()) + from_first * position,
                     reinterpret_cast<std::byte*>(to.data()) + to_first * position, in.local[0], count * position,
                     in.local[1] * position, out.local[1] * position);
  }

  std::int64_t count_ = 1, piece_ = 0;  ///< number of chunks; positions of a chunk on one rank
  std::int64_t ranks_ = 1, length_ = 0;
  dim_id dim_{};
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
