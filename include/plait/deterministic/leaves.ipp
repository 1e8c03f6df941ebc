// The definitions of leaves.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <numeric>
#include <utility>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/layout.hpp"

namespace plait {

PLAIT_INLINE token_leaves::token_leaves(const deterministic_leaves& order, const layout& tokens, const mesh_shape& mesh,
                                        const dim_sizes& sizes, std::int64_t rank, token_grain grain, std::string name)
    : order_(order), tokens_(tokens), mesh_(mesh), sizes_(sizes), name_(std::move(name)) {
  const bool zigzag = tokens.dims.size() >= 2 && tokens.dims[1].dim == dim_of<zseq>;
  if (tokens.dims.size() < 2 || !(tokens.dims[0].dim == dim_of<batch>) ||
      !(zigzag || tokens.dims[1].dim == dim_of<seq>))
    fail({name_, ": deterministic sums have an order for rows of [batch, seq], and these are of ", describe(tokens)});
  if (zigzag && order.zigzag < 1)
    fail({name_, ": deterministic sums of a sequence in zigzag order need to know its ranks: give the context ",
          "leaves_under<strategy>(leaves, mesh)"});
  const box here = local_box(tokens, mesh, sizes, rank);
  const std::int64_t length = here.global[1];
  chunks_ = order.sequence * (grain == token_grain::fine ? order.features : 1);
  samples_ = order.samples;
  batch_ = here.global[0], local_batch_ = here.local[0], first_batch_ = here.offset[0], local_tokens_ = here.local[1];
  if (length % chunks_ != 0)
    fail({name_, ": deterministic sums cut a sequence of ", length, " tokens into ", chunks_,
          " chunks (deterministic_leaves::sequence = ", order.sequence,
          chunks_ == order.sequence ? "" : cat({" times deterministic_leaves::features = ", order.features}),
          "), which do not divide it"});
  chunk_ = length / chunks_;
  sequence_ = zigzag ? sequence_order::zigzag(length, order.zigzag) : sequence_order::original(length);
  pieces_ = pieces_of(here.offset[1], here.local[1]);
  const std::int64_t ranks = batch_ / local_batch_;
  if (samples_ % ranks != 0)
    fail({name_, ": deterministic sums have deterministic_leaves::samples = ", samples_, " leaves of samples, which ",
          ranks, " ranks of ", describe(tokens), " cannot share out; legal are multiples of ", ranks});
}

PLAIT_INLINE std::vector<token_leaves::piece> token_leaves::pieces_of(std::int64_t offset, std::int64_t length) const {
  std::vector<piece> all;
  for (const token_run& run : sequence_.runs(offset, length)) {
    if (run.position % chunk_ != 0 || run.length % chunk_ != 0) {
      const std::int64_t runs = sequence_.length() / run.length, finer = chunks_ / order_.sequence;
      fail({name_, ": deterministic_leaves::sequence = ", order_.sequence, " makes chunks of ", chunk_,
            " tokens, and ranks have ", run.length, " neighbours of ", describe(tokens_), "; legal are multiples of ",
            runs / std::gcd(runs, finer)});
    }
    for (std::int64_t at = 0; at < run.length; at += chunk_) all.push_back({(run.position + at) / chunk_, run.at + at});
  }
  return all;
}

PLAIT_INLINE std::vector<token_leaves::leaf> token_leaves::of_microbatch(std::int64_t index, std::int64_t count) const {
  const std::int64_t all = batch_ * count, group = all / samples_;
  if (all % samples_ != 0 || local_batch_ % group != 0)
    fail({name_, ": deterministic_leaves::samples = ", samples_, " leaves of ", all, " samples in a step are ",
          all % samples_ != 0 ? "uneven" : cat({group, " samples each"}), ", and a microbatch has ", local_batch_,
          " on a rank; legal are multiples of ", batch_ / local_batch_ * count, " that divide ", all});
  std::vector<leaf> leaves;
  const std::int64_t first = (first_batch_ * count + index * local_batch_) / group;
  for (const piece& p : pieces_)
    for (std::int64_t s = 0; s < local_batch_ / group; ++s) {
      leaf l{p.chunk * samples_ + first + s, {}};
      for (std::int64_t b = s * group; b < (s + 1) * group; ++b) {
        const rows next{b * local_tokens_ + p.at, chunk_};
        if (!l.parts.empty() && l.parts.back().first + l.parts.back().count == next.first)
          l.parts.back().count += next.count;
        else
          l.parts.push_back(next);
      }
      leaves.push_back(std::move(l));
    }
  return leaves;
}

PLAIT_INLINE std::vector<leaf_range> token_leaves::of_step(std::int64_t rank) const {
  const box there = local_box(tokens_, mesh_, sizes_, rank);
  const std::int64_t first = there.offset[0] * samples_ / batch_, count = there.local[0] * samples_ / batch_;
  std::vector<leaf_range> all;
  for (const piece& p : pieces_of(there.offset[1], there.local[1]))
    all.push_back({p.chunk * samples_ + first, p.chunk * samples_ + first + count});
  return all;
}

PLAIT_INLINE std::int64_t feature_leaves(const deterministic_leaves& order, std::int64_t size) {
  return std::gcd(order.features, size);
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
