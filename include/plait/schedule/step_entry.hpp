// One entry of what a rank does in a step, in order: a pass, a send or a receive, and what data parallelism adds. The
// orders of ranks are made elsewhere: schedule/program.hpp for a pipeline's, schedule/step/expand.hpp for a step's.
#pragma once

#include <cstdint>
#include <string>

#include "plait/core/text.hpp"
#include "plait/schedule/action.hpp"
#include "plait/schedule/transfer.hpp"

namespace plait {

/// The kinds of entries. Gathers, reductions, sends and receives are started where they stand; whoever needs one waits
/// for it: a pass for its input and its unit's gather, the norm and updates for reductions. In a hybrid a reduction has
/// two parts: `reduce` sums a unit's gradient over the ranks that share it out, and `reduce_copies`, which waits for
/// that, the piece of a rank over those that hold the same piece. Where stages share parameters, `reduce_ties`, which
/// waits for what is before, is the last part: the sum over these stages.
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

}  // namespace plait
