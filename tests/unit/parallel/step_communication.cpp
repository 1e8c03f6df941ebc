// The communication that a step hides, measured, agrees with the simulation of its program.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "plait/comm/host_values.hpp"
#include "plait/comm/threads.hpp"
#include "plait/parallel/train_step.hpp"
#include "support/sleeping_model.hpp"
#include "support/slow_link.hpp"
#include "support/texts.hpp"
#include "train_llama/observe/communication.hpp"
#include "train_llama/observe/run_log.hpp"
#include "train_llama/observe/step_events.hpp"

using namespace plait;
using plait::test::has;

namespace {

struct communicated {
  std::vector<axis_communication> communication;
  step_wait longest;
};

/// Measurements of the third to fifth step, on sleeping ranks with a throttled link.
communicated run_blocks(const testing::sleeping_shape& s, const data_parallel& policy) {
  communicated found;
  threads::run(s.ranks, [&](threads::communicator c) {
    world w(megatron_sp::mesh{s.ranks, 1, 1, 1}.shape(),
            any_communicator(testing::slow_communicator(c, testing::throttled_link(s.bandwidth))));
    cpu device;
    const context<cpu> ctx{device, w, testing::sleeping_model::sizes(s, w.shape()), 1};
    testing::sleeping_model model(ctx, s);
    adamw<float> optimizer;
    pipeline_options how;
    how.parallel = policy;
    training_step step(ctx, model, optimizer, s.microbatches, 1.0, how);
    step.model().visit([&](auto& p) { p.initialize(ctx); });
    communication_clock clock(w.ledger());
    for (std::int64_t i = 0; i < 5; ++i) {
      if (i == 2) clock.begin();
      step.load(ctx, i * s.ranks * s.microbatches, [](std::int64_t, host_tokens& ids, host_tokens& labels) {
        std::fill_n(ids.data(), ids.size(), 1);
        std::fill_n(labels.data(), labels.size(), 2);
      });
      optimizer.begin_step(ctx, 1e-3);
      step.run(ctx);
      static_cast<void>(step.result(ctx));
    }
    const std::uint64_t sent = w.ledger().total().wire;
    const std::vector<axis_communication> all = communication_of_ranks(device, w.root(), clock.since());
    CHECK(w.ledger().total().wire == sent);  // the measurement itself is not counted
    if (c.rank() != s.ranks - 1) return;
    found.communication = all;
    const auto& executor = step.model().executor();
    found.longest =
        longest_wait(executor.step(), 0, step.model().executor().measured().waits(), "dp", step.model().unit_names());
  });
  return found;
}

/// All-reduces of the gradients of all blocks take `share` of the backward passes. With fewer elements the ranks
/// compute less for them.
testing::sleeping_shape blocks(double share) {
  testing::sleeping_shape s{.ranks = 2, .layers = 4, .block = 0.03, .elements = 1 << 13};
  const double backward = 2 * s.block * s.layers;
  // An all-reduce sends 2 (n - 1) / n of the elements.
  s.bandwidth = 4.0 * static_cast<double>(s.elements) * s.layers / (share * backward);
  return s;
}

}  // namespace

TEST_CASE("the measured hidden share equals that of the simulation") {
  struct tried {
    const char* name;
    data_parallel policy;
    double share;
  };
  for (const tried& t :
       {tried{"replicated, half", {}, 0.5}, tried{"replicated, twice as long", {}, 2},
        tried{"zero1", {.level = zero_level::optimizer}, 1}, tried{"zero3", {.level = zero_level::parameters}, 0.5}}) {
    INFO(t.name);
    const testing::sleeping_shape s = blocks(t.share);
    const double expected = testing::simulate_sleeping(s, t.policy, 4, 4).hidden_share();
    communicated m;
    for (int tries = 3; tries > 0; --tries) {  // a busy machine may disturb one try; a mistake fails all
      m = run_blocks(s, t.policy);
      REQUIRE(m.communication.size() == 1);
      if (std::abs(m.communication[0].hidden() - expected) < 0.2) break;
    }
    const axis_communication& dp = m.communication[0];
    CHECK(dp.axes == "dp");
    CAPTURE(expected);
    CHECK(std::abs(dp.hidden() - expected) < 0.2);
    CHECK(dp.worst <= dp.hidden() + 1e-9);
    CHECK(dp.worst_rank >= 0);
    CHECK(dp.worst_rank < 2);
    CHECK(has(format_hidden(m.communication), "hidden dp "));
  }
}

TEST_CASE("without overlap nothing is hidden, and the summary names the waits") {
  const communicated m = run_blocks(blocks(1), {.overlap = false});
  REQUIRE(m.communication.size() == 1);
  CHECK(m.communication[0].hidden() < 0.1);
  CHECK(m.longest.who == "the norm");
  CHECK(has(m.longest.what, "the reduction of "));
  CHECK(has(m.longest.text(5), "the norm waited "));
  CHECK(has(m.longest.text(5), " ms a step for the reduction of block."));
}

TEST_CASE("measurements of ranks are combined by axes, with the mean and the worst") {
  threads::run(3, [](threads::communicator c) {
    any_communicator all(c);
    cpu device;
    std::vector<axis_times> mine;
    if (c.rank() != 1) mine.push_back({"pp", 1.0 + c.rank(), 0.5});
    mine.push_back({"dp", 4, c.rank() == 1 ? 3.0 : 1.0});
    mine.push_back({"tp", std::nan(""), std::nan("")});
    const std::vector<axis_communication> got = communication_of_ranks(device, all, mine);
    REQUIRE(got.size() == 3);
    CHECK(got[0].axes == "pp");
    CHECK(got[0].seconds == 2);
    CHECK(got[0].waited == 0.5);
    CHECK(got[0].hidden() == 0.75);
    CHECK(got[0].worst == 0.5);
    CHECK(got[0].worst_rank == 0);
    CHECK(got[1].axes == "dp");
    CHECK(got[1].worst == 0.25);
    CHECK(got[1].worst_rank == 1);
    CHECK(std::isnan(got[2].seconds));
    CHECK(std::isnan(got[2].worst));
    CHECK(got[2].worst_rank == -1);
    CHECK(communication_of_ranks(device, all, {}).empty());
  });
}
