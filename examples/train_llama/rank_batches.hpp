#pragma once

#include <algorithm>
#include <cstdint>

#include "options.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/tensor/context.hpp"

/// Reads a rank's part of microbatches from --data: the samples of its data rank, and of each the positions that the
/// rank has. `Tokens` is the tensor of a microbatch's ids.
template <class Tokens, class Strategy, plait::compute_device Device>
class rank_batches {
 public:
  rank_batches(const setup& s, const plait::context<Device>& ctx, bool documents)
      : s_(s),
        ctx_(ctx),
        documents_(documents),
        order_(plait::sequence_order_of<Strategy>(ctx.ranks.shape(), ctx.sizes)) {}

  /// Where this rank's positions are in a sequence.
  const plait::sequence_order& order() const { return order_; }

  /// Fills microbatch i of a step whose first sample is `first`, as --data counts them.
  void fill(std::int64_t first, std::int64_t i, plait::host_tokens& ids, plait::host_tokens& labels,
            plait::host_starts& starts) const {
    const plait::box& part = ids.stored_part();
    const auto sample = [&](std::int64_t row) {
      return first + row - part.offset[0] +
             plait::first_sample_in_step(ctx_.deterministic, i, s_.microbatches, part.global[0], part.offset[0],
                                         part.local[0]);
    };
    fill_with(
        ids, labels, starts, [&](std::int64_t row, auto... rest) { s_.data->fill(sample(row), rest...); },
        [&](std::int64_t row, auto... rest) { s_.data->starts(sample(row), rest...); });
  }

  /// Fills microbatch i of those that are held out. Where the last has more sequences than are left, the labels of the
  /// others are `ignored`, so that every mesh judges by the same tokens.
  void fill_held_out(std::int64_t i, std::int64_t ignored, plait::host_tokens& ids, plait::host_tokens& labels,
                     plait::host_starts& starts) const {
    const std::int64_t last = s_.data->held_out_samples() - 1;
    const auto sample = [&](std::int64_t row) { return std::min(last, i * s_.sequences + row); };
    fill_with(
        ids, labels, starts, [&](std::int64_t row, auto... rest) { s_.data->fill_held_out(sample(row), rest...); },
        [&](std::int64_t row, auto... rest) { s_.data->starts_held_out(sample(row), rest...); });
    std::fill(labels.row(held_out_rows(i, ids.stored_part())), labels.data() + labels.size(), ignored);
  }

  /// Microbatches of what is held out.
  std::int64_t held_out() const { return (s_.data->held_out_samples() + s_.sequences - 1) / s_.sequences; }

  /// This rank's targets that count in what is held out: all but those that `ignored` stands for.
  std::int64_t held_out_targets(std::int64_t ignored) const {
    const plait::box part =
        plait::local_box(plait::layout_v<typename Tokens::spec>, ctx_.ranks.shape(), ctx_.sizes, ctx_.ranks.rank());
    std::int64_t counted = 0;
    for (std::int64_t i = 0; !documents_ && i < held_out(); ++i) counted += held_out_rows(i, part) * part.local[1];
    if (!documents_) return counted;
    plait::host_tokens ids(part, order_), labels(part, order_);
    plait::host_starts starts(part, order_);
    for (std::int64_t i = 0; i < held_out(); ++i) {
      fill_held_out(i, ignored, ids, labels, starts);
      counted += labels.size() - std::count(labels.data(), labels.data() + labels.size(), ignored);
    }
    return counted;
  }

 private:
  /// The rows of microbatch i of those that are held out that this rank has of it: all, but for the last.
  std::int64_t held_out_rows(std::int64_t i, const plait::box& part) const {
    return std::clamp<std::int64_t>(s_.data->held_out_samples() - i * s_.sequences - part.offset[0], 0, part.local[0]);
  }

  /// `read` is given a sample of the microbatch, the first position of some tokens that follow each other, how many,
  /// and where they go; `read_starts` likewise, for the documents.
  template <class Read, class ReadStarts>
  void fill_with(plait::host_tokens& ids, plait::host_tokens& labels, plait::host_starts& starts, Read&& read,
                 ReadStarts&& read_starts) const {
    for (std::int64_t row = 0; row < ids.rows(); ++row)
      for (const plait::token_run& run : ids.runs()) {
        read(ids.sample(row), run.position, run.length, ids.row(row) + run.at, labels.row(row) + run.at);
        if (documents_) read_starts(ids.sample(row), run.position, run.length, starts.row(row) + run.at);
      }
  }

  const setup& s_;
  const plait::context<Device>& ctx_;
  bool documents_;
  plait::sequence_order order_;
};
