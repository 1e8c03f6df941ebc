// Ranges of layers and collectives in a profiler. With NVTX itself: the ranges compile, and layers run within them.
#define PLAIT_NVTX
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "plait/comm/threads/cuda.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/loss.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "support/split_strategy.hpp"

using namespace plait;

namespace {

using plait::test::split;
using specs = transformer_specs<split>;
using rows = split::residual;

/// Every kind of layer except attention, forward and backward, on one of two ranks. Weight gradients are deferred.
void run_block(context<cuda>& ctx) {
  using norm = rms_norm<float, rows, cuda>;
  using mlp = swiglu_mlp<float, split, cuda>;
  embedding<float, specs::embedding, cuda> embed(ctx, 32, "embed");
  residual<norm, mlp> block(norm(ctx, 1e-5, "block.norm"), mlp(ctx, "block.mlp"), {0.1, "block.dropout"});
  layer_norm<float, rows, cuda> last(ctx, 1e-5, "last");
  linear<float, specs::head, cuda> head(ctx, "head");
  cross_entropy_loss<float, specs::logits, specs::tokens, cuda> loss(ctx, 32);
  const auto start = [&](auto& p) {
    p.initialize(ctx);
    p.gather(ctx);
    p.zero_gradient(ctx);
  };
  embed.visit(start), block.visit(start), last.visit(start), head.visit(start);

  tensor<std::int64_t, specs::tokens, cuda> ids(ctx);
  ctx.device.zero(ids.data(), static_cast<std::size_t>(ids.size()) * 8, ctx.device.main_stream());
  weight_work later;
  microbatch<cuda> mb = ctx;
  mb.deferred = &later;
  residual<norm, mlp>::saved kept;
  layer_norm<float, rows, cuda>::saved last_kept;
  linear_saved<cuda> head_kept;
  decltype(loss)::saved loss_kept;
  const auto x = embed.forward(mb, ids);
  const auto y = block.forward(mb, x, &kept);
  const auto z = last.forward(mb, y, &last_kept);
  auto logits = head.forward(mb, z, &head_kept);
  token_mean<decltype(loss)::output, specs::tokens, cuda> mean(ctx);
  mean.count(ctx, ids.size());
  mean.begin(ctx);
  mean.add(ctx, loss.forward(mb, logits, ids, &loss_kept));
  const auto dlogits = loss.backward(mb, std::move(logits), ids, loss_kept, mean.seed());
  const auto dz = head.backward(mb, z, head_kept, dlogits);
  const auto dy = last.backward(mb, y, last_kept, dz);
  const auto dx = block.backward(mb, x, kept, dy);
  embed.backward(mb, ids, dx);
  later.run();
  block.visit([&](auto& p) { static_cast<void>(p.reduce(ctx)); });
  ctx.device.synchronize();
}

template <class F>
void on_two_ranks(F&& body) {
  threads::run(2, cuda::options{.workspace_bytes = 4 << 20}, [&](threads::communicator c, cuda& device) {
    world ranks(split::mesh{1, 2}.shape(), c);
    context<cuda> ctx{device, ranks, {}, 3};
    ctx.sizes.set(dim_of<batch>, 2);
    ctx.sizes.set(dim_of<seq>, 4);
    ctx.sizes.set(dim_of<hidden>, 8);
    ctx.sizes.set(dim_of<ffn>, 16);
    ctx.sizes.set(dim_of<vocab>, 32);
    body(ctx);
  });
}

}  // namespace

#ifdef PLAIT_CUDA_STAND_IN
TEST_CASE("ranges: every layer and every collective of a block, by name and balanced") {
  on_two_ranks([](context<cuda>& ctx) {
    stand_in::nvtx() = {};
    ctx.ranks.ledger().clear();
    run_block(ctx);
    const stand_in::nvtx_thread seen = stand_in::nvtx();
    CHECK(seen.open.empty());
    const auto count = [&](const std::string& name) {
      return std::count_if(seen.ranges.begin(), seen.ranges.end(), [&](const auto& r) { return r.name == name; });
    };
    for (const std::string layer : {"embed", "block.norm", "block.mlp", "block.dropout", "last", "head",
                                    "block.mlp.gate_proj", "block.mlp.down_proj", "cross_entropy"}) {
      CAPTURE(layer);
      CHECK(count(layer + " forward") == 1);
      CHECK(count(layer + " backward") == 1);
      const bool no_weights = layer == "block.mlp" || layer == "block.dropout" || layer == "cross_entropy";
      CHECK(count(layer + " weight gradients") == (no_weights ? 0 : 1));
    }

    // The ranges of collectives agree with the ledger, with its bytes. None is outside a layer, and none contains a
    // range.
    std::uint64_t calls = 0;
    for (int k = 0; k < collective_kinds; ++k) {
      const auto kind = static_cast<collective>(k);
      const ledger::entry booked = ctx.ranks.ledger().total("tp", kind);
      std::uint64_t bytes = 0;
      for (const auto& r : seen.ranges)
        if (r.name == std::string(name_of(kind)) + " tp") bytes += r.payload;
      CAPTURE(std::string(name_of(kind)));
      CHECK(static_cast<std::uint64_t>(count(std::string(name_of(kind)) + " tp")) == booked.calls);
      CHECK(bytes == booked.payload);
      calls += booked.calls;
    }
    CHECK(calls > 8);
    std::size_t layers = 0;
    for (std::size_t i = 0; i < seen.ranges.size(); ++i) {
      const auto& r = seen.ranges[i];
      CHECK(!r.open);
      if (r.payload == 0) ++layers;
      if (r.payload != 0 && i + 1 < seen.ranges.size()) CHECK(seen.ranges[i + 1].depth <= r.depth);
    }
    CHECK(layers + calls == seen.ranges.size());
    const auto inner = std::find_if(seen.ranges.begin(), seen.ranges.end(),
                                    [](const auto& r) { return r.name == "block.mlp.gate_proj forward"; });
    REQUIRE(inner != seen.ranges.begin());
    CHECK((inner - 1)->name == "block.mlp forward");
    CHECK(inner->depth == 1);
  });
}

TEST_CASE("ranges: an exception closes them; the cpu has none") {
  stand_in::nvtx() = {};
  cuda device;
  cpu host;
  try {
    const range outer(device, "outer");
    const range inner("inner", 5);
    const range nothing(host, "host");
    throw 1;
  } catch (int) {
  }
  const auto& seen = stand_in::nvtx();
  CHECK(seen.open.empty());
  REQUIRE(seen.ranges.size() == 2);
  CHECK(seen.ranges[1].payload == 5);
  CHECK(seen.ranges[1].depth == 1);
}
#else
TEST_CASE("ranges: a block runs within them") { CHECK_NOTHROW(on_two_ranks(run_block)); }
#endif
