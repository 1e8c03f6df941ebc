// The texts of the calls that do not fit a parameter's life.
#pragma once

#include <string>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/nn/parameter/info.hpp"

namespace plait::detail {

[[noreturn]] inline void refuse_ungathered(const std::string& name, parameter_state state) {
  fail({"parameter ", name, " is used while it is ", name_of(state),
        ": call gather(ctx) after its values change and before a layer reads it"});
}
[[noreturn]] inline void refuse_adding(const std::string& name, bool frozen, bool reduced) {
  if (frozen) fail({"parameter ", name, " is frozen, and has no gradient"});
  fail({"parameter ", name,
        reduced
            ? ": a backward pass adds to a gradient that has been reduced; call zero_gradient(ctx) to begin a new sum"
            : ": a backward pass adds to a gradient that has not begun; call zero_gradient(ctx) before it"});
}
[[noreturn]] inline void refuse_unplaced(const std::string& name) {
  fail({"parameter ", name,
        ": a backward pass adds to its gradient, for which data parallelism has lent no memory; "
        "enter(ctx, unit, true) comes before the pass"});
}
[[noreturn]] inline void refuse_reduction(const std::string& name, bool frozen, bool reduced) {
  if (frozen) fail({"parameter ", name, " is frozen, and has no gradient to reduce"});
  fail({"parameter ", name,
        reduced
            ? ": reduce is called twice for one gradient, which would count it more than once; what it returned the "
              "first time goes to the optimizer"
            : ": reduce without a gradient; call zero_gradient(ctx), then backward passes, then reduce(ctx)"});
}
[[noreturn]] inline void refuse_lost_gradient(const std::string& name) {
  fail({"parameter ", name,
        ": zero_gradient would lose a gradient that passes have added to and that was not reduced; call reduce(ctx) "
        "before it, or discard_gradient(ctx) in its place"});
}
[[noreturn]] inline void refuse_incomplete(const std::string& name) {
  fail({"parameter ", name,
        ": its gradient is read before it is complete, so that it is this rank's term of a sum; call reduce(ctx) "
        "before"});
}
[[noreturn]] inline void refuse_finish(const std::string& name) {
  fail({"parameter ", name, ": finish_reduction without start_reduction(ctx), which starts what it waits for"});
}
[[noreturn]] inline void refuse_unordered(const std::string& name) {
  fail({"parameter ", name,
        ": its layer adds to the gradient in an order that depends on the layout, and the context's numerics are "
        "canonical (deterministic); use layers that have a canonical order, or leave numerics out"});
}
[[noreturn]] inline void refuse_unset_values(const std::string& name, bool callers, const std::string& stored) {
  if (callers)
    fail({"parameter ", name, ": gather would overwrite the caller's weights with values that nobody has set, as ",
          stored, " in memory of its own; set them by fill_values(ctx, fill), or load them"});
  fail({"parameter ", name,
        ": gather would have layers read values that nobody has set; call initialize(ctx) on every "
        "parameter, set values by fill_values(ctx, fill), or load them"});
}
[[noreturn]] inline void refuse_late_layer(const std::string& name) {
  fail({"parameter ", name,
        ": a layer begins to use it after data parallelism has laid it beside others, whose canonical sums "
        "(deterministic) would miss what this layer adds; make all layers before the training step"});
}
[[noreturn]] inline void refuse_narrow(const std::string& name) {
  fail({"parameter ", name, ": canonical numerics (deterministic) sum gradients in float or double, and here they are ",
        "bf16; use another precision"});
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
