// Gathered keys, exchanged heads, and the hybrid of exchanged heads and a ring equal one rank: forward, all gradients,
// bytes sent and kept.
#include "../support/context_check.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using alone = with_context<megatron_sp, whole_sequence>;
using four = megatron_sp::mesh;

layer_values on_one_rank(const attention_case& c) { return attend_on<double, alone>(four{1, 1, 1, 1}, c)[0]; }

/// Context parallelism over two axes: heads are exchanged over `inside`, keys and values go around over cp.
struct inside : axis_tag<"inside"> {};
struct both : megatron_sp {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<inside>, axis<tp>, axis<tp_rep>>;
};
template <class Placement>
using hybrid = with_context<both, ulysses<inside, ring<cp>>, Placement>;
using five = both::mesh;

}  // namespace

TEST_CASE("gathered keys, contiguous") {
  check_context<double, with_context<megatron_sp, all_gather_kv<cp>>>(
      {four{1, 2, 1, 1}, four{1, 4, 1, 1}, four{1, 8, 1, 1}, four{2, 2, 2, 1}}, on_one_rank);
}
TEST_CASE("gathered keys, zigzag") {
  check_context<double, with_context<megatron_sp, all_gather_kv<cp>, zigzag>>(
      {four{1, 1, 1, 1}, four{1, 2, 1, 1}, four{1, 4, 1, 1}, four{1, 8, 1, 1}, four{1, 2, 2, 1}}, on_one_rank);
}
TEST_CASE("exchanged heads, contiguous") {
  check_context<double, with_context<megatron_sp, ulysses<cp>>>(
      {four{1, 2, 1, 1}, four{1, 4, 1, 1}, four{1, 8, 1, 1}, four{2, 2, 2, 1}}, on_one_rank);
}
TEST_CASE("exchanged heads, zigzag") {
  check_context<double, with_context<megatron_sp, ulysses<cp>, zigzag>>(
      {four{1, 1, 1, 1}, four{1, 2, 1, 1}, four{1, 4, 1, 1}, four{1, 8, 1, 1}, four{1, 2, 2, 1}}, on_one_rank);
}
TEST_CASE("exchanged heads inside, a ring outside, contiguous") {
  check_context<double, hybrid<contiguous>>(
      {five{1, 2, 2, 1, 1}, five{1, 1, 2, 1, 1}, five{1, 2, 4, 1, 1}, five{1, 4, 2, 1, 1}}, on_one_rank);
}
TEST_CASE("exchanged heads inside, a ring outside, zigzag") {
  check_context<double, hybrid<zigzag>>(
      {five{1, 2, 2, 1, 1}, five{1, 2, 1, 1, 1}, five{1, 2, 4, 1, 1}, five{1, 2, 2, 2, 1}}, on_one_rank);
}
