// The sizes of a pipeline, their limits, and which stage lies on which rank. Which layers a stage holds is another
// question: parallel/layer_split.hpp.
#pragma once

#include <cstdint>
#include <string>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// The sizes that a schedule may have, which `pipeline_shape::legal` checks wherever one comes in. An action has room
/// for so many chunks and microbatches; ranks, and the number of *cells* (a microbatch in a stage), are bounded so that
/// no product of sizes overflows an int, and that what is not a schedule at all is refused before memory is asked for.
/// Checking and simulating a schedule takes some hundred bytes for each of its cells.
inline constexpr int max_pipeline_ranks = 1024, max_chunks = 255, max_microbatches = 65535, max_cells = 1 << 22;

/// These sizes in words, for messages.
#define PLAIT_SCHEDULE_SIZES                                                                                \
  "the shape of a pipeline needs 1 to 1024 ranks, 1 to 255 chunks on each and 1 to 65535 microbatches, of " \
  "which the product is at most 4194304"

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

  /// True for the sizes that a schedule may have. The other members, and all that is made of a shape, rely on it.
  constexpr bool legal() const {
    return ranks >= 1 && ranks <= max_pipeline_ranks && chunks >= 1 && chunks <= max_chunks && microbatches >= 1 &&
           microbatches <= max_microbatches && std::int64_t{ranks} * chunks * microbatches <= max_cells;
  }

  friend constexpr bool operator==(const pipeline_shape&, const pipeline_shape&) = default;

 private:
  constexpr bool runs_backwards(int chunk) const { return placement == stage_placement::vee && chunk % 2 == 1; }
};

namespace detail {

/// Throws `error`, which begins with `who`, unless the sizes are legal.
constexpr void require_legal(const char* who, const pipeline_shape& shape) {
  if (!shape.legal())
    fail({who, " (", shape.ranks, " ranks, ", shape.chunks, " chunks each, ", shape.microbatches,
          " microbatches): " PLAIT_SCHEDULE_SIZES});
}

}  // namespace detail

}  // namespace plait

#include "plait/core/macros_on.hpp"
