// program: training_nccl
// Context parallelism over NCCL, whose messages run in parallel with the main stream: every policy equals one rank.
#include "cuda/nn/attention_cp_ranks.hpp"
#include "plait/comm/launch/nccl.hpp"
#include "support/nccl_devices.hpp"

using namespace plait;
using namespace plait::test;

namespace {

template <class Policy>
context_arrays on_ranks(const context_inputs& in, int ranks, bool zigzag, bool as_graph = false) {
  const auto launch = [](int count, auto&& body) {
    nccl::run(devices(count), cuda::options{.workspace_bytes = 1 << 20}, nccl::options{.deadline = 60},
              [&](nccl::communicator& comm, cuda& device) { body(comm, device); });
  };
  return attend_on<float, Policy>(launch, in, ranks, zigzag, as_graph);
}

void check_near(const context_arrays& got, const context_arrays& expected) {
  check_below(errors_of(got, expected), 1e-5);
}

}  // namespace

TEST_CASE("over NCCL every policy on several ranks equals one rank") {
  context_sizes sizes;
  sizes.seq = 48;
  const context_inputs in = random_inputs<float>(sizes, true);
  const context_arrays one = on_ranks<chosen<cp>>(in, 1, false);
  for (const int ranks : {2, 3, 4}) {
    if (devices(ranks).empty()) continue;
    CAPTURE(ranks);
    for (const bool zigzag : {false, true}) check_near(on_ranks<ring<cp>>(in, ranks, zigzag), one);
    check_near(on_ranks<all_gather_kv<cp>>(in, ranks, true), one);
    if (ranks != 3) check_near(on_ranks<ulysses<cp>>(in, ranks, true), one);  // three does not divide the heads
  }
}

TEST_CASE("a pass over NCCL recorded in a graph has the same bits") {
  if (devices(3).empty()) return;
  context_sizes sizes;
  sizes.seq = 48;
  const context_inputs in = random_inputs<float>(sizes, false);
  const context_arrays called = on_ranks<ring<cp>>(in, 3, true), replayed = on_ranks<ring<cp>>(in, 3, true, true);
  CHECK(called.o == replayed.o);
  CHECK(called.dq == replayed.dq);
  CHECK(called.dk == replayed.dk);
  CHECK(called.dv == replayed.dv);
}
