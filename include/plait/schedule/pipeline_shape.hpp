#pragma once

#include <cstdint>

#include "plait/version.hpp"

namespace plait {

/// How the stages of a model lie on the ranks of its pipeline.
///
/// * `straight`: stage = chunk * ranks + rank. The model passes the ranks in the same direction once per chunk
///   (arXiv 2104.04473).
/// * `vee`: odd chunks run backwards, so that the last stage of one chunk and the first of the next are on one rank
///   (the V schedules of arXiv 2405.15362, DualPipeV).
enum class stage_placement : std::uint8_t { straight, vee };

/// The sizes of a pipeline, and which stage is where. Stages are numbered in the order of a forward pass.
///
///     constexpr pipeline_shape shape{.ranks = 4, .chunks = 2, .microbatches = 16, .placement = stage_placement::vee};
///     static_assert(shape.stages() == 8 && shape.stage_of(3, 1) == 4 && shape.rank_of(7) == 0);
struct pipeline_shape {
  int ranks = 1;         ///< p: extent of the pipeline axis
  int chunks = 1;        ///< v: stages on each rank
  int microbatches = 1;  ///< m, per step
  stage_placement placement = stage_placement::straight;

  constexpr int stages() const { return ranks * chunks; }
  constexpr int stage_of(int rank, int chunk) const {
    return chunk * ranks + (runs_backwards(chunk) ? ranks - 1 - rank : rank);
  }
  constexpr int chunk_of(int stage) const { return stage / ranks; }
  constexpr int rank_of(int stage) const {
    const int place = stage % ranks;
    return runs_backwards(chunk_of(stage)) ? ranks - 1 - place : place;
  }

  friend constexpr bool operator==(const pipeline_shape&, const pipeline_shape&) = default;

 private:
  constexpr bool runs_backwards(int chunk) const { return placement == stage_placement::vee && chunk % 2 == 1; }
};

}  // namespace plait
