#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "options.hpp"
#include "plait/comm/any_communicator.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/core/error.hpp"
#include "plait/core/types.hpp"
#include "plait/kernels/philox.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/train_step.hpp"
#include "train_llama/data/text.hpp"

/// Draws text from a model that takes bytes for tokens, alike on every mesh.
template <class Model, plait::compute_device Device>
class text_sampler {
 public:
  /// `order` says where this rank's positions are in a sequence.
  text_sampler(const setup& s, const plait::context<Device>& ctx, plait::any_communicator& ranks, Model& model,
               const plait::sequence_order& order)
      : s_(s), ctx_(ctx), ranks_(ranks), model_(model), order_(order) {}

  /// Returns the prompt and what follows it, a byte per token; shorter where `stop_asked()` says, alike on all ranks,
  /// that the run ends. Collective.
  template <class Stop>
  std::vector<std::int64_t> text(Stop&& stop_asked) {
    std::vector<std::int64_t> text = plait::encode_bytes(s_.opt.prompt);
    if (text.empty()) text.push_back('\n');
    document_starts starts;  // one document
    if (model_.documents()) {
      starts = document_starts(ctx_);
      plait::upload(ctx_, plait::host_starts(starts.part(), order_), starts);
    }
    const auto total = static_cast<std::int64_t>(text.size()) + s_.opt.sample;
    for (auto place = static_cast<std::int64_t>(text.size()); place < total; ++place) {
      const std::int64_t length = std::min(place, s_.opt.seq), from = place - length;
      tokens ids(ctx_);
      plait::host_tokens host(ids.part(), order_);
      host.fill([&](std::int64_t, std::int64_t at) {
        return at < length ? text[static_cast<std::size_t>(from + at)] : std::int64_t{0};
      });
      plait::upload(ctx_, host, ids);
      text.push_back(draw(model_.score(ctx_, ids, starts ? starts.data() : nullptr), length, place));
      if (stop_asked()) break;
    }
    return text;
  }

 private:
  using tokens = typename Model::tokens;
  using document_starts = typename Model::stage_type::document_starts;
  using score_type = plait::activation_of<typename Model::precision_type>;

  /// The next token after `length` tokens in row 0: Gumbel-max over the whole vocabulary, with random numbers keyed by
  /// the place and the token, so that every mesh draws the same text. Nothing but one score per rank is communicated.
  std::int64_t draw(const typename Model::logits& scores, std::int64_t length, std::int64_t place) {
    const plait::box& part = scores.part();
    const std::int64_t vocab = s_.config.vocab, columns = part.local[2];
    constexpr double none = std::numeric_limits<double>::infinity();
    double best = -none;
    std::int64_t token = -1, last = -1;  // where the last token's scores are here
    for (std::int64_t at = 0; scores && part.offset[0] == 0 && at < part.local[1]; ++at)
      if (order_.position(part.offset[1] + at) == length - 1) last = at;
    if (last >= 0) {
      std::vector<score_type> row(static_cast<std::size_t>(columns));
      ctx_.device.download(row.data(), scores.data() + last * columns, row.size() * sizeof(score_type),
                           ctx_.device.main_stream());
      for (std::int64_t c = 0; c < columns && part.offset[2] + c < vocab; ++c) {
        auto score = static_cast<double>(plait::widened(row[static_cast<std::size_t>(c)]));
        if (s_.opt.temperature > 0) {
          const double u = plait::kernels::uniform(ctx_.seed, 0x7361'6d70'6c65,
                                                   static_cast<std::uint64_t>(place * vocab + part.offset[2] + c));
          score = score / s_.opt.temperature - std::log(-std::log(std::max(u, 1e-300)));
        }
        if (score > best) best = score, token = part.offset[2] + c;
      }
    }
    const double top = plait::all_reduce_scalar(ctx_.device, ranks_, best, plait::reduce_op::max);
    // Of tokens with the same score the first wins, whichever rank has it.
    const bool wins = best == top && token >= 0;
    const double winner = -plait::all_reduce_scalar(ctx_.device, ranks_, wins ? -static_cast<double>(token) : -none,
                                                    plait::reduce_op::max);
    if (winner == none)
      plait::fail(
          "sampling: no token has a finite score, so the last step's update has ruined the weights; try a smaller "
          "--lr");
    return static_cast<std::int64_t>(winner);
  }

  const setup& s_;
  const plait::context<Device>& ctx_;
  plait::any_communicator& ranks_;
  Model& model_;
  const plait::sequence_order& order_;
};
