// program: schedules
// Races of overlapped communication that were found in public training programs, each as a fault in a step that
// `verify` refuses. NVIDIA/Megatron-LM#4609, a buffer that is reused while it holds a gradient, has no case: in a step
// no two gradients share memory.
#include <doctest/doctest.h>

#include <iterator>
#include <string>

#include "plait/schedule/errors.hpp"
#include "plait/schedule/expand.hpp"
#include "plait/schedule/parse.hpp"
#include "plait/schedule/verify.hpp"
#include "support/made_steps.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("a step with a published race is refused before it runs") {
  using enum step_op;
  const step_schedule offloaded = with_offload(step_of("gpipe", 1, 2, zero2, 3)), tied = tied_twice("1f1b", 4);
  const step_schedule one = step_of("gpipe", 1, 2, zero1), two = step_of("gpipe", 1, 2, zero2),
                      three = step_of("gpipe", 1, 2, zero3);
  for (const step_schedule* s : {&offloaded, &tied, &one, &two, &three}) REQUIRE(describe(verify(*s)) == "ok");
  REQUIRE(entry_at(offloaded, {reload, 1}) == step_entry{reload, 1, forward_of(0, 0)});
  const struct {
    const char *report, *what;
    step_schedule step;
    step_error refused;
  } races[] = {
      {"NVIDIA/Megatron-LM#7400, whose cause is not known", "ranks start what they share in different orders",
       moved(tied, {reduce_ties, 1}, {reduce_ties, 0}), step_error::collectives_cross},
      {"NVIDIA/Megatron-LM#7398", "activations are copied back from memory that their copy to the host still fills",
       moved(offloaded, {reload, 1}, {drop, 1}), step_error::reloaded_on_device},
      {"pytorch/pytorch#180665", "memory is freed while another stream copies it to the host",
       without(without(offloaded, {drop, 0}), {reload, 0}), step_error::used_while_copied},
      {"meta-pytorch/torchtune#1867 and #1936",
       "saved tensors are deleted before the stream that offloads has read them",
       moved(offloaded, {drop, 0}, {offload, 0}), step_error::dropped_without_copy},
      {"huggingface/trl#7195 and axolotl-ai-cloud/axolotl#3833", "a pass begins before the wait for its reload",
       moved(offloaded, {reload, 1}, {pass, 1, 2}), step_error::used_after_drop},
      {"NVIDIA/Megatron-LM#4433 and #5975", "buffers of a pass are used again before its backward pass",
       without(offloaded, {reload, 0}), step_error::used_after_drop},
      {"NVIDIA/TensorRT-LLM#18023", "memory is given back that a later pass still reads and writes",
       moved(offloaded, {drop, 0}, {offload, 0}, 1), step_error::dropped_in_use},
      {"NVIDIA/Megatron-LM#6187", "a gradient is reduced on a side stream while a pass still adds to it",
       moved(two, {reduce, 1}, {pass, 1, 3}), step_error::reduced_too_early},
      {"NVIDIA/Megatron-LM#5788", "a gathered parameter is released while a pass reads it",
       moved(three, {release, 1}, {pass, 1}), step_error::used_after_release},
      {"NVIDIA/Megatron-LM#3670", "gradients are scaled while they are reduced", moved(two, {norm}, {reduce, 0}),
       step_error::norm_too_early},
      {"NVIDIA/Megatron-LM#950 and #663", "a unit is updated, and its last values stay where passes read them",
       without(one, {gather, 1}), step_error::ends_released},
      {"NVIDIA/Megatron-LM#4769", "parameters are gathered before they are updated",
       moved(one, {gather, 1}, {update, 1}), step_error::gathered_twice},
      {"karpathy/nanochat#843", "a collective that is under way loses the memory that it writes",
       moved(three, {release, 2}, {gather, 2}, 1), step_error::used_after_release},
      {"Nerogar/OneTrainer#1306", "parameters are released after the forward pass, and the backward pass reads them",
       without(three, {gather, 0, 1}), step_error::used_after_release},
      {"huggingface/diffusers#13502", "a pass does not wait for the parameters that it reads",
       moved(three, {gather, 1}, {pass, 1}, 1), step_error::used_before_gather},
  };
  static_assert(std::size(races) == 15);
  for (const auto& r : races) {
    CAPTURE(std::string(r.report) + ": " + r.what);
    CHECK(verify(r.step).code == r.refused);
  }
}
