// A training step as data: the passes of a pipeline by units of parameters, and what data parallelism adds to them,
// gathers, releases, reductions, the norm and updates, in one order for each rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plait/core/text.hpp"
#include "plait/schedule/schedule.hpp"

namespace plait {

/// A message from one stage to the next (an activation) or to the one before (its gradient).
enum class transfer_kind : std::uint8_t { activation, gradient };

/// One message between two ranks. Stages on one rank hand over in place: that is no transfer.
struct transfer {
  transfer_kind kind = transfer_kind::activation;
  int from_stage = 0;
  int to_stage = 0;
  int microbatch = 0;

  friend constexpr bool operator==(const transfer&, const transfer&) = default;
};

/// "activation 3: stage 1 -> 2"
inline std::string describe(const transfer& t) {
  return cat({t.kind == transfer_kind::activation ? "activation " : "gradient ", t.microbatch, ": stage ", t.from_stage,
              " -> ", t.to_stage});
}

/// The kinds of entries. Gathers, reductions, sends and receives are started where they stand; an entry that needs one
/// waits for it: a pass for its input and its unit's gather, the norm and updates for reductions. In a hybrid a
/// reduction has two parts: `reduce` sums a unit's gradient over the ranks that share it out, and `reduce_copies`,
/// which waits for that, the piece of a rank over those that hold the same piece. Where stages share parameters,
/// `reduce_ties`, which waits for what is before, is the last part: the sum over these stages.
enum class step_op : std::uint8_t {
  pass,
  send,
  receive,
  gather,
  release,
  reduce,
  norm,
  update,
  reduce_copies,
  reduce_ties
};

/// One entry of a rank's program. A pipeline's program has passes, sends and receives, and passes of whole stages; a
/// step's has passes by units, and the other kinds too.
struct step_entry {
  step_op op = step_op::pass;
  int unit = -1;             ///< of a pass, gather, release, reduction or update; -1: of a whole stage
  plait::action pass{};      ///< of a pass: which one
  plait::transfer transfer;  ///< of a send or a receive

  friend constexpr bool operator==(const step_entry&, const step_entry&) = default;
};

/// "F3.1", "F3.1 of unit 5", "gather of unit 5", "send activation 3: stage 1 -> 2", "the norm"
inline std::string describe(const step_entry& e) {
  switch (e.op) {
    case step_op::pass:
      return e.unit < 0 ? describe(e.pass) : cat({describe(e.pass), " of unit ", e.unit});
    case step_op::send:
      return "send " + describe(e.transfer);
    case step_op::receive:
      return "receive " + describe(e.transfer);
    case step_op::gather:
      return cat({"gather of unit ", e.unit});
    case step_op::release:
      return cat({"release of unit ", e.unit});
    case step_op::reduce:
      return cat({"reduction of unit ", e.unit});
    case step_op::update:
      return cat({"update of unit ", e.unit});
    case step_op::reduce_copies:
      return cat({"reduction of the copies of unit ", e.unit});
    case step_op::reduce_ties:
      return cat({"reduction of unit ", e.unit, " over tied stages"});
    default:
      return "the norm";
  }
}

/// Parameters that are gathered, reduced and updated together: by default those of a block, the embedding, the head. A
/// forward pass of a stage goes through its units in order, a backward pass in the reverse order.
struct step_unit {
  int stage = 0;                ///< whose pass uses it
  std::int64_t parameters = 0;  ///< elements on a rank, when they are gathered over the data axes
  bool trainable = true;
  /// The unit of another rank's stage that holds the same parameters, such as a tied embedding: the two sum what they
  /// have reduced. -1: none.
  int tied_to = -1;
  /// Another unit of this rank whose parameters its passes use too, as a head uses the embedding's. -1: none.
  int uses = -1;
  /// Which buffer of a pool holds its gradient from the first addition to the end of its reduction, for which the next
  /// user of the buffer waits; -1: its own.
  int gradient_buffer = -1;
};

/// How many of parameter, gradient and optimizer state are sharded over the data axes (ZeRO, arXiv 1910.02054): none;
/// the optimizer state; also the reduced gradient; also the parameters between their uses.
enum class zero_level : std::uint8_t { replicated, optimizer, gradients, parameters };

/// A policy of data parallelism as data: where a unit's parameters, gradient and optimizer state lie, and how far
/// communication runs ahead of its users.
struct data_parallel {
  zero_level level = zero_level::replicated;
  /// Level `parameters`: how many uses ahead a unit's gather starts; 0: when it is needed.
  int prefetch = 1;
  /// Level `parameters`: whether a unit is released after a forward pass, and gathered again for the backward pass.
  bool reshard_after_forward = true;
  /// Whether a unit's reduction starts when its last gradient is there; else all start after the last pass.
  bool overlap = true;
  /// Levels from `gradients` on: how many buffers the units share for gradients that are not reduced; 0: each has its
  /// own, as accumulation over microbatches needs.
  int gradient_buffers = 0;
  /// Whether every update needs the norm over all gradients, to clip by it.
  bool clip = true;
  /// Levels beyond `replicated`: whether the pieces of some ranks are equal, so that reduced pieces are summed over
  /// those too. A pipeline derives it from its `data_axes::replicate`.
  bool hybrid = false;
};

/// One unit for each stage.
inline std::vector<step_unit> units_of_stages(const pipeline_shape& shape, bool trainable = true) {
  std::vector<step_unit> all(static_cast<std::size_t>(shape.stages()));
  for (std::size_t stage = 0; stage < all.size(); ++stage) {
    all[stage].stage = static_cast<int>(stage);
    all[stage].trainable = trainable;
  }
  return all;
}

/// The units whose parameters a pass of unit `u` uses: itself, and the one that it shares, if there is one.
struct used_units {
  int unit[2] = {-1, -1};
  constexpr const int* begin() const { return unit; }
  constexpr const int* end() const { return unit + (unit[1] < 0 ? 1 : 2); }
};

/// A whole step: what every rank of a pipeline does, in order. Ranks along the data axes do the same.
struct step_schedule {
  pipeline_shape shape;
  data_parallel policy;
  std::vector<step_unit> units;                   ///< of all stages, in the order of a forward pass
  std::vector<std::vector<step_entry>> programs;  ///< of each rank of the pipeline

  /// Whether parameters lie gathered between steps.
  constexpr bool gathered_between_steps() const { return policy.level != zero_level::parameters; }
  constexpr used_units used_by(int unit) const { return {{unit, units[static_cast<std::size_t>(unit)].uses}}; }
  constexpr int rank_of(int unit) const { return shape.rank_of(units[static_cast<std::size_t>(unit)].stage); }
  /// The last part of a unit's reduction, for which its update and the norm wait.
  constexpr step_op last_reduction(int unit) const {
    if (units[static_cast<std::size_t>(unit)].tied_to >= 0) return step_op::reduce_ties;
    return policy.hybrid ? step_op::reduce_copies : step_op::reduce;
  }
};

/// Whether a pass adds to the gradient of its unit.
constexpr bool adds_gradient(action_kind kind) {
  return kind == action_kind::backward || kind == action_kind::weight_backward;
}
/// Whether a schedule has backward passes.
constexpr bool trains(const schedule& s) {
  for (const auto& order : s.order)
    for (const action& a : order)
      if (a.kind != action_kind::forward) return true;
  return false;
}
/// Whether a pass reads the parameters of its unit. The gradients of weights are made of activations alone.
constexpr bool reads_parameters(action_kind kind) { return kind != action_kind::weight_backward; }

}  // namespace plait
