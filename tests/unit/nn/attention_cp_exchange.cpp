// program: attention_cp
// Gathered keys, exchanged heads, and the hybrid of exchanged heads and a ring equal one rank: forward, all gradients,
// bytes sent and kept.
#include "support/context_check.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// Context parallelism over two axes: heads are exchanged over `inside`, keys and values travel around a ring over cp.
struct inside : axis_tag<"inside"> {};
struct both : megatron_sp {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<inside>, axis<tp>, axis<tp_rep>>;
};
template <class Placement>
using hybrid = context_parallel<both, ulysses<inside, ring<cp>>, Placement>;
using five = both::mesh;

}  // namespace

TEST_CASE("gathered keys, contiguous") {
  check_context<double, context_parallel<megatron_sp, all_gather_kv<cp>>>(
      {four{1, 2, 1, 1}, four{1, 5, 1, 1}, four{1, 4, 1, 1}, four{1, 8, 1, 1}, four{2, 2, 2, 1}});
}
TEST_CASE("gathered keys, zigzag") {
  check_context<double, context_parallel<megatron_sp, all_gather_kv<cp>, zigzag>>(
      {four{1, 1, 1, 1}, four{1, 2, 1, 1}, four{1, 3, 1, 1}, four{1, 7, 1, 1}, four{1, 4, 1, 1}, four{1, 8, 1, 1},
       four{1, 2, 2, 1}});
}
TEST_CASE("exchanged heads, contiguous") {
  check_context<double, context_parallel<megatron_sp, ulysses<cp>>>(
      {four{1, 2, 1, 1}, four{1, 4, 1, 1}, four{1, 8, 1, 1}, four{2, 2, 2, 1}});
}
TEST_CASE("exchanged heads, zigzag") {
  check_context<double, context_parallel<megatron_sp, ulysses<cp>, zigzag>>(
      {four{1, 1, 1, 1}, four{1, 2, 1, 1}, four{1, 4, 1, 1}, four{1, 8, 1, 1}, four{1, 2, 2, 1}});
}
TEST_CASE("exchanged heads inside, a ring outside, contiguous") {
  check_context<double, hybrid<contiguous>>(
      {five{1, 2, 2, 1, 1}, five{1, 1, 2, 1, 1}, five{1, 2, 4, 1, 1}, five{1, 4, 2, 1, 1}});
}
TEST_CASE("exchanged heads inside, a ring outside, zigzag") {
  check_context<double, hybrid<zigzag>>(
      {five{1, 2, 2, 1, 1}, five{1, 2, 1, 1, 1}, five{1, 2, 4, 1, 1}, five{1, 2, 2, 2, 1}});
}

TEST_CASE("bytes sent by gathered keys and exchanged heads") {
  using gathered = context_parallel<megatron_sp, all_gather_kv<cp>, zigzag>;
  using exchanged = context_parallel<megatron_sp, ulysses<cp>>;
  for (const std::int64_t ranks : {2, 4, 8})
    for (const std::int64_t kv : {2, 8}) {
      attention_case c;
      c.kv_size = kv;
      const auto elements = [&](std::int64_t heads_of_token) {
        return static_cast<std::uint64_t>(c.batch_size * c.seq_size * heads_of_token * 4) * sizeof(double);
      };
      const auto others = static_cast<std::uint64_t>(ranks - 1);
      const sent_bytes keys = context_bytes<double, gathered>(four{1, ranks, 1, 1}, c);
      CHECK(keys.forward == others * elements(2 * kv));
      CHECK(keys.backward == 2 * others * elements(2 * kv));
      const sent_bytes swapped = context_bytes<double, exchanged>(four{1, ranks, 1, 1}, c);
      const std::uint64_t all_heads = elements(c.heads_size + 2 * std::max(kv, ranks) + c.heads_size);
      CHECK(swapped.forward * static_cast<std::uint64_t>(ranks) == others * all_heads);
      CHECK(swapped.backward == swapped.forward);
    }
}

TEST_CASE("heads that the ranks cannot divide are refused") {
  attention_case c;
  c.seq_size = 36, c.heads_size = 12, c.kv_size = 6;
  using exchanged = context_parallel<megatron_sp, ulysses<cp>>;
  CHECK(layer_refusal<double, exchanged>(four{1, 4, 1, 1}, c, {}) ==
        "layer: ulysses shares out the heads of a rank over cp = 4, but a rank has 12 query heads and 6 kv heads; the "
        "extents that divide them (or are a multiple of the kv heads) are 1, 2, 3, 6, 12");
  CHECK(layer_refusal<double, exchanged>(four{1, 9, 1, 1}, c, {}).find("cp = 9") != std::string::npos);
  CHECK(layer_refusal<double, exchanged>(four{1, 12, 1, 1}, c, {}).empty());
}
