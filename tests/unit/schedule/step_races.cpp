// program: schedules
// Races of overlapped communication that were found in public training programs, each as a fault in a step that
// `verify` refuses. NVIDIA/Megatron-LM#4609, a buffer that is reused while it holds a gradient, has no case: in a step
// no two gradients share memory.
#include <doctest/doctest.h>

#include <cstddef>
#include <iterator>
#include <string>
#include <vector>

#include "plait/schedule/errors.hpp"
#include "plait/schedule/expand.hpp"
#include "plait/schedule/parse.hpp"
#include "plait/schedule/verify.hpp"
#include "support/made_steps.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// A race: where it was reported, what went wrong, and how to insert the fault into a step.
struct race {
  const char* report;
  const char* what;
  step_schedule step;
  void (*put_in)(step_schedule&);
  step_error refused;
};

void before(step_schedule& s, step_op op, int unit, int which, step_op other, int of, int other_which = 0) {
  move(s, 0, place_of(s, 0, op, unit, which), place_of(s, 0, other, of, other_which));
}

step_schedule offloaded() { return with_offload(step_of("gpipe", 1, 2, zero2, 3)); }

/// Two units of the first stage are tied to two of the last one.
step_schedule tied_twice() {
  std::vector<step_unit> units = units_of(2, 3);
  units[0].tied_to = 5, units[5].tied_to = 0, units[1].tied_to = 4, units[4].tied_to = 1;
  return expand(parse_schedule("1f1b", 2, 4), units, plain);
}

const race races[] = {
    {"NVIDIA/Megatron-LM#7400, whose cause is not known", "ranks start what they share in different orders",
     tied_twice(), [](step_schedule& s) { before(s, step_op::reduce_ties, 1, 0, step_op::reduce_ties, 0); },
     step_error::collectives_cross},
    {"NVIDIA/Megatron-LM#7398", "activations are copied back from memory that their copy to the host still fills",
     offloaded(), [](step_schedule& s) { before(s, step_op::reload, 1, 0, step_op::drop, 1); },
     step_error::reloaded_on_device},
    {"pytorch/pytorch#180665", "memory is freed while another stream copies it to the host", offloaded(),
     [](step_schedule& s) {
       erase(s, 0, place_of(s, 0, step_op::drop, 0));
       erase(s, 0, place_of(s, 0, step_op::reload, 0));
     },
     step_error::used_while_copied},
    {"meta-pytorch/torchtune#1867 and #1936", "saved tensors are deleted before the stream that offloads has read them",
     offloaded(), [](step_schedule& s) { before(s, step_op::drop, 0, 0, step_op::offload, 0); },
     step_error::dropped_without_copy},
    {"huggingface/trl#7195 and axolotl-ai-cloud/axolotl#3833", "a pass begins before the wait for its reload",
     offloaded(),
     [](step_schedule& s) {
       const step_entry late{step_op::reload, 1, forward_of(0, 0), {}};
       const int at = place_of(s, 0, step_op::reload, 1), pass = place_of(s, 0, step_op::pass, 1, 2);
       REQUIRE(s.programs[0][static_cast<std::size_t>(at)] == late);
       move(s, 0, at, pass);
     },
     step_error::used_after_drop},
    {"NVIDIA/Megatron-LM#4433 and #5975", "buffers of a pass are used again before its backward pass", offloaded(),
     [](step_schedule& s) { erase(s, 0, place_of(s, 0, step_op::reload, 0)); }, step_error::used_after_drop},
    {"NVIDIA/TensorRT-LLM#18023", "memory is given back that a later pass still reads and writes", offloaded(),
     [](step_schedule& s) { move(s, 0, place_of(s, 0, step_op::drop, 0), place_of(s, 0, step_op::offload, 0) + 1); },
     step_error::dropped_in_use},
    {"NVIDIA/Megatron-LM#6187", "a gradient is reduced on a side stream while a pass still adds to it",
     step_of("gpipe", 1, 2, zero2), [](step_schedule& s) { before(s, step_op::reduce, 1, 0, step_op::pass, 1, 3); },
     step_error::reduced_too_early},
    {"NVIDIA/Megatron-LM#5788", "a gathered parameter is released while a pass reads it", step_of("gpipe", 1, 2, zero3),
     [](step_schedule& s) { before(s, step_op::release, 1, 0, step_op::pass, 1); }, step_error::used_after_release},
    {"NVIDIA/Megatron-LM#3670", "gradients are scaled while they are reduced", step_of("gpipe", 1, 2, zero2),
     [](step_schedule& s) { before(s, step_op::norm, -1, 0, step_op::reduce, 0); }, step_error::norm_too_early},
    {"NVIDIA/Megatron-LM#950 and #663", "a unit is updated, and its last values stay where passes read them",
     step_of("gpipe", 1, 2, zero1), [](step_schedule& s) { erase(s, 0, place_of(s, 0, step_op::gather, 1)); },
     step_error::ends_released},
    {"NVIDIA/Megatron-LM#4769", "parameters are gathered before they are updated", step_of("gpipe", 1, 2, zero1),
     [](step_schedule& s) { before(s, step_op::gather, 1, 0, step_op::update, 1); }, step_error::gathered_twice},
    {"karpathy/nanochat#843", "a collective that is under way loses the memory that it writes",
     step_of("gpipe", 1, 2, zero3),
     [](step_schedule& s) { move(s, 0, place_of(s, 0, step_op::release, 2), place_of(s, 0, step_op::gather, 2) + 1); },
     step_error::used_after_release},
    {"Nerogar/OneTrainer#1306", "parameters are released after the forward pass, and the backward pass reads them",
     step_of("gpipe", 1, 2, zero3), [](step_schedule& s) { erase(s, 0, place_of(s, 0, step_op::gather, 0, 1)); },
     step_error::used_after_release},
    {"huggingface/diffusers#13502", "a pass does not wait for the parameters that it reads",
     step_of("gpipe", 1, 2, zero3),
     [](step_schedule& s) { move(s, 0, place_of(s, 0, step_op::gather, 1), place_of(s, 0, step_op::pass, 1) + 1); },
     step_error::used_before_gather},
};

}  // namespace

static_assert(std::size(races) == 15);

TEST_CASE("a step with a published race is refused before it runs") {
  for (const race& r : races) {
    CAPTURE(std::string(r.report) + ": " + r.what);
    REQUIRE(describe(verify(r.step)) == "ok");
    step_schedule s = r.step;
    r.put_in(s);
    CHECK(describe(verify(s)).find(text_of(r.refused)) != std::string::npos);
  }
}
