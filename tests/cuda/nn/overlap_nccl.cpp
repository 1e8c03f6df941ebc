// program: training_nccl
// Linears with collectives in chunks, in parallel with products, over NCCL, which runs them in another stream. Values
// equal those of whole collectives; kept and sent bytes are as a dry run predicts.
#include <doctest/doctest.h>

#include "plait/comm/launch/nccl.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/linear/policy.hpp"
#include "plait/testing/layer_parity.hpp"
#include "support/linear_policies.hpp"
#include "support/nccl_devices.hpp"

using namespace plait;
using namespace plait::test;

namespace {

// cuBLASLt may use another product for fewer rows; the stand-in does not.
#ifdef PLAIT_CUDA_STAND_IN
constexpr double tolerance = 0;
#else
constexpr double tolerance = 1e-5;
#endif

struct on_nccl {
  template <class F>
  void operator()(int ranks, F&& body) const {
    nccl::run(devices(ranks), cuda::options{.workspace_bytes = 1 << 20}, nccl::options{.deadline = 60},
              [&](nccl::communicator& comm, cuda& device) { body(comm, device); });
  }
};

template <class Policy>
void check_linear(const two& mesh) {
  const dim_sizes sizes = sizes_of<batch, seq, hidden, ffn>(4, 24, 32, 64);
  const auto values = [&](std::int64_t chunks) {
    const auto make = [chunks](const auto& ctx) {
      return linear<float, Policy, testing::device_of<decltype(ctx)>>(ctx, "layer", {.overlap = chunks});
    };
    return testing::run_on(mesh, sizes, make, {}, on_nccl{});
  };
  const auto whole = values(1);
  for (const std::int64_t chunks : {2, 3, 5}) {
    const auto cut = values(chunks);
    for (std::size_t r = 0; r < whole.size(); ++r) {
      CAPTURE(chunks);
      CAPTURE(r);
      CHECK(testing::compare_layers(cut[r], whole[r], tolerance).text() == "");
      CHECK(cut[r].sent.total().wire == whole[r].sent.total().wire);
      CHECK(cut[r].sent.total().calls > whole[r].sent.total().calls);
    }
  }
}

}  // namespace

TEST_CASE("over NCCL linears with collectives in chunks have the results of those without") {
  for (const two& mesh : {two{1, 2}, two{2, 2}, two{1, 4}}) {
    if (devices(static_cast<int>(mesh.size())).empty()) continue;
    check_linear<policy<rows_split, column, wide, true>>(mesh);
    check_linear<policy<wide, row, rows_split, true>>(mesh);
    check_linear<policy<wide, row, rows_whole, true>>(mesh);
  }
}
