// The number of layers of each rank of a pipeline, for an even split. The planner prices 10^5 layouts, so it does not
// search a split that balances costs, as parallel/placement.hpp does.
#pragma once

#include <cstdint>

#include "plan_llama/planner/training_layout.hpp"

namespace plait::planner {

/// An even split of layers over stages. Remaining layers go to the stages in the middle, then to the first stage, and
/// at last to the last one: these two also have an embedding and an output projection.
struct stage_split {
  std::int64_t stages = 1, base = 1, rest = 0;

  constexpr stage_split(std::int64_t layers, std::int64_t n) : stages(n), base(layers / n), rest(layers % n) {}

  /// Returns the number of layers of one stage.
  constexpr std::int64_t of_stage(std::int64_t stage) const {
    if (stage == stages - 1) return base;  // the rest is less than the number of stages
    if (stage == 0) return base + (rest == stages - 1 && stages > 1 ? 1 : 0);
    return base + (stage <= rest ? 1 : 0);
  }
};

/// The numbers of blocks of a stage or of a rank: usual ones, and first ones of a model with experts.
struct block_counts {
  std::int64_t alike = 0, first = 0;

  constexpr std::int64_t all() const { return alike + first; }
  bool operator==(const block_counts&) const = default;
};
constexpr block_counts blocks_of_stage(const transformer_shape& m, std::int64_t stages, std::int64_t stage) {
  const stage_split split{m.layers, stages};
  const std::int64_t here = split.of_stage(stage);
  std::int64_t left = m.dense_layers;
  for (std::int64_t s = 0; s < stage && left > 0; ++s) left -= split.of_stage(s);
  const std::int64_t first = left < 0 ? 0 : left < here ? left : here;
  return {here - first, first};
}

/// Returns the stage of a rank's chunk: chunk c of rank r is stage c pp + r, and on the way back of a vee 2 pp - 1 - r.
constexpr std::int64_t stage_of(const training_layout& l, std::int64_t rank, std::int64_t chunk) {
  if (l.schedule == schedule_kind::zb_v && chunk == 1) return 2 * l.pp - 1 - rank;
  return chunk * l.pp + rank;
}

constexpr block_counts blocks_of_rank(const training_layout& l, const transformer_shape& m, std::int64_t rank) {
  block_counts sum;
  for (std::int64_t c = 0; c < l.chunks; ++c) {
    const block_counts here = blocks_of_stage(m, l.stages(), stage_of(l, rank, c));
    sum.alike += here.alike, sum.first += here.first;
  }
  return sum;
}

/// Returns the rank of the pipeline that has the output projection: the last, or in a vee the first.
constexpr std::int64_t last_rank(const training_layout& l) { return l.schedule == schedule_kind::zb_v ? 0 : l.pp - 1; }

}  // namespace plait::planner
