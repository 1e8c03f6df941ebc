// Deterministic results over NCCL, whose collectives add in varying orders: here it only moves partial sums.
// program: training_nccl
// timeout: 240
#include <doctest/doctest.h>

#include "cuda/models/deterministic_llama.hpp"
#include "plait/comm/launch/nccl.hpp"
#include "support/nccl_devices.hpp"

using namespace plait;
using namespace plait::test;

namespace {
deterministic_result deterministic_on_nccl(const deterministic_layout& l) {
  return train_deterministic(
      [](int ranks, const cuda::options& device, auto&& body) {
        nccl::run(devices(ranks), device, nccl::options{.deadline = 60},
                  [&](nccl::communicator& comm, cuda& own) { body(comm, own); });
      },
      l);
}
}  // namespace

TEST_CASE("one hash, loss and norm over NCCL") {
  const different_orders unkind;
  const deterministic_result one = deterministic_on_nccl({});
  for (const deterministic_layout& l :
       {deterministic_layout{1, 1, 2, 2}, {2, 1, 1, 1, zero_level::gradients}, {1, 2, 2, 1}}) {
    if (devices(static_cast<int>(l.dp * l.cp * l.tp)).empty()) continue;
    CHECK(deterministic_on_nccl(l) == one);
  }
}
