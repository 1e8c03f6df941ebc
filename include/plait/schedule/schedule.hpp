// A pipeline schedule as data: sizes, the stages on each rank, and the order of each rank's actions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/version.hpp"

namespace plait {

/// The sizes that a schedule may have, which `pipeline_shape::legal` checks wherever one comes in. An action has room
/// for a number of chunks and microbatches; ranks, and the number of *cells* (a microbatch in a stage), are bounded so
/// that no product of sizes overflows an int. What is no schedule at all is refused before memory is allocated.
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

/// A computation of a rank for one microbatch in one of its chunks of the model.
///
/// A *backward* is either one action, B, or two (arXiv 2401.10241): I gives the gradient of the chunk's input, on which
/// the stage before waits, and W the gradients of its weights, on which no stage waits.
enum class action_kind : std::uint8_t { forward, backward, input_backward, weight_backward };

/// F, B, I or W.
constexpr char letter(action_kind kind) { return "FBIW"[static_cast<std::size_t>(kind)]; }

/// True for B and I, which give the gradient that the stage before waits for.
constexpr bool gives_input_gradient(action_kind kind) {
  return kind == action_kind::backward || kind == action_kind::input_backward;
}
/// True for B and W, after which the activations of the microbatch are no longer needed.
constexpr bool frees_activations(action_kind kind) {
  return kind == action_kind::backward || kind == action_kind::weight_backward;
}

/// The stage whose result an action of `stage` needs: a forward that of the stage before, B and I that of the stage
/// after. -1: none.
constexpr int source_of(const pipeline_shape& shape, action_kind kind, int stage) {
  if (kind == action_kind::forward) return stage - 1;
  return gives_input_gradient(kind) && stage + 1 < shape.stages() ? stage + 1 : -1;
}
/// The stage that needs the result of an action of `stage`; -1: none.
constexpr int target_of(const pipeline_shape& shape, action_kind kind, int stage) {
  if (kind == action_kind::forward) return stage + 1 < shape.stages() ? stage + 1 : -1;
  return gives_input_gradient(kind) ? stage - 1 : -1;
}

/// One entry of a schedule. Generators, verifier, simulator, executor and trace share it; which stage a chunk is, the
/// `pipeline_shape` says.
struct action {
  action_kind kind = action_kind::forward;
  std::uint8_t chunk = 0;        ///< of the rank's own chunks, 0 to v - 1
  std::uint16_t microbatch = 0;  ///< 0 to m - 1

  friend constexpr bool operator==(const action&, const action&) = default;
};
static_assert(sizeof(action) == 4);

constexpr action forward_of(int chunk, int microbatch) {
  return {action_kind::forward, static_cast<std::uint8_t>(chunk), static_cast<std::uint16_t>(microbatch)};
}
constexpr action backward_of(int chunk, int microbatch) {
  return {action_kind::backward, static_cast<std::uint8_t>(chunk), static_cast<std::uint16_t>(microbatch)};
}
constexpr action input_backward_of(int chunk, int microbatch) {
  return {action_kind::input_backward, static_cast<std::uint8_t>(chunk), static_cast<std::uint16_t>(microbatch)};
}
constexpr action weight_backward_of(int chunk, int microbatch) {
  return {action_kind::weight_backward, static_cast<std::uint8_t>(chunk), static_cast<std::uint16_t>(microbatch)};
}

/// "F3.1": the forward of microbatch 3 in chunk 1.
inline std::string describe(const action& a) { return cat({letter(a.kind), a.microbatch, ".", a.chunk}); }

static_assert(forward_of(max_chunks, 0).chunk == max_chunks && forward_of(0, max_microbatches).microbatch == 65535,
              "an action has room for every legal chunk and microbatch");

/// A short text that works in constant expressions of every compiler; what does not fit is cut off.
struct schedule_name {
  char text[32]{};

  constexpr schedule_name() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): a name is written as a literal
  constexpr schedule_name(std::string_view name) {
    for (std::size_t i = 0; i < name.size() && i + 1 < sizeof text; ++i) text[i] = name[i];
  }
  constexpr schedule_name(const char* name) : schedule_name(std::string_view(name)) {}
  constexpr std::string_view view() const { return text; }
  std::string str() const { return text; }

  friend constexpr bool operator==(const schedule_name&, const schedule_name&) = default;
};

/// Who computes what in which order: the whole of a pipeline schedule, as data. Communication is derived from it
/// (`program.hpp`), so are its times (`simulate.hpp`) and whether it is legal (`verify.hpp`).
///
///     schedule s = parse_schedule("interleaved:2", ranks, microbatches);  // or interleaved<2>::make(...), or your own
///     require_verified(s);                                                // complete, ordered, free of deadlock
///     auto programs = rank_program(s, costs);                 // what each rank computes, sends and receives
///     for (const step_entry& step : programs[my_rank]) ...  // an executor
///
/// Usable in constant expressions, where it must not outlive the expression.
struct schedule {
  schedule_name name;
  pipeline_shape shape;
  std::vector<std::vector<action>> order;  ///< of each rank, first to last
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
