// Ring attention on up to 8 ranks equals one rank: forward, all gradients, bytes sent and kept.
#include "../support/context_check.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using alone = with_context<megatron_sp, whole_sequence>;
using four = megatron_sp::mesh;

layer_values on_one_rank(const attention_case& c) { return attend_on<double, alone>(four{1, 1, 1, 1}, c)[0]; }

}  // namespace

TEST_CASE("ring, contiguous") {
  check_context<double, megatron_sp>({four{1, 2, 1, 1}, four{1, 4, 1, 1}, four{1, 8, 1, 1}, four{2, 2, 2, 1}},
                                     on_one_rank);
}

TEST_CASE("ring, zigzag") {
  check_context<double, with_context<megatron_sp, ring<cp>, zigzag>>(
      {four{1, 1, 1, 1}, four{1, 2, 1, 1}, four{1, 4, 1, 1}, four{1, 8, 1, 1}, four{1, 2, 2, 1}, four{1, 2, 1, 2}},
      on_one_rank);
}

TEST_CASE("ring, zigzag, in float") {
  check_context<float, with_context<megatron_sp, ring<cp>, zigzag>>({four{1, 4, 1, 1}, four{1, 2, 2, 1}}, on_one_rank);
}
