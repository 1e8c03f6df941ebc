// program: training
// timeout: 300
// A recorded training step has the results of the step itself; a step that cannot be replayed is refused.
#include <cstdlib>
#include <optional>
#include <vector>

#include "cuda/parallel/small_training.hpp"
#include "plait/comm/threads/cuda.hpp"
#include "plait/parallel/graph_step.hpp"
#include "plait/parallel/placement.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/generators.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("a replayed step has the same bits as the step") {
  scenario s = small_scenario();
  for (const optimizer_options& optimizer : every_optimizer()) {
    s.optimizer = optimizer;
    const auto plain = train_small(s, false), graph = train_small(s, true);
    CHECK(graph.losses == plain.losses);
    CHECK(graph.weights == plain.weights);
    CHECK(plain.losses.back() != plain.losses.front());
  }
}

TEST_CASE("values set between replays are used by the next step") {
  const scenario s = small_scenario();
  const auto plain = train_small(s, false, true), graph = train_small(s, true, true);
  CHECK(graph.losses == plain.losses);
  CHECK(graph.weights == plain.weights);
  CHECK(plain.losses != train_small(s, false).losses);
}

TEST_CASE("a step that is launched after replays reuses the graph's memory") {
  const scenario s = small_scenario();
  on_gpu(s, 1, s.batch / s.microbatches, [&](const context<cuda>& ctx) {
    small_run run(ctx, s, true);
    for (int i = 0; i < 3; ++i) run.train(0);
    CHECK(run.replayed->replaying());
    CHECK(ctx.device.scratch_bytes() > 0);
    const std::size_t reserved = ctx.device.reserved_bytes();
    run.initialize();
    run.train(0);
    CHECK_FALSE(run.replayed->replaying());
    run.train(0);
    CHECK(run.replayed->replaying());
    CHECK(ctx.device.reserved_bytes() == reserved);
  });
}

TEST_CASE("dropout is refused") {
  scenario s = small_scenario();
  s.options.dropout = 0.1;
  CHECK_THROWS_WITH_AS(train_small(s, true), doctest::Contains("graph_step: dropout = 0.1"), plait::error);
}

TEST_CASE("in-process ranks are refused") {
  const scenario s = small_scenario();
  CHECK_THROWS_WITH_AS(on_gpu(s, 2, 4,
                              [&](const context<cuda>& ctx) {
                                small_model model(ctx, s.config, s.options);
                                adamw<bf16, cuda> optimizer;
                                training_step step(ctx, model, optimizer, 1, 1.0);
                                graph_step replayed(ctx, step);
                              }),
                       doctest::Contains("2 in-process ranks meet on the host"), plait::error);
}

TEST_CASE("in-process stages of a pipeline with one rank each are refused") {
  const scenario s = small_scenario();
  const mesh_shape shape = mesh<axis<dp>, axis<pp>, axis<cp>, axis<tp>, axis<tp_rep>>{1, 2, 1, 1, 1}.shape();
  const auto make = [&](threads::communicator c, cuda& device) {
    pipeline_world ranks(shape, any_communicator(c));
    const context<cuda> ctx{device, ranks.stage(), llama_sizes<megatron_sp>(s.config, ranks.stage().shape(), 4, s.seq),
                            7};
    const schedule plan = make_schedule<one_f_one_b>(2, 2);
    pipeline<small_model> model(ctx, ranks.along(), plan, split_layers({{1.0, 1.0}, 0.2, 0.7}, 2),
                                [&](stage_layers part, small_model* first) {
                                  return std::make_unique<small_model>(ctx, s.config, s.options, part, first);
                                });
    adamw<bf16, cuda> optimizer;
    training_step step(ctx, model, optimizer, 1.0);
    graph_step replayed(ctx, step);
  };
  CHECK_THROWS_WITH_AS(threads::run(2, cuda::options{}, make), doctest::Contains("2 in-process ranks meet on the host"),
                       plait::error);
}

TEST_CASE("a graph owns its scratch memory: replays do not write to later buffers") {
  cuda device;
  constexpr std::size_t n = 1000;
  std::vector<float> numbers(n, 3), zeros(n, 0), read(n);
  auto source = make_buffer<float>(device, n), result = make_buffer<float>(device, n);
  device.upload(source.data(), numbers.data(), n * sizeof(float), device.main_stream());
  std::optional<buffer<cuda>> kept;  // allocated during recording, and released later
  const auto work = [&](bool keep) {
    auto scratch = make_buffer<float>(device, n), more = make_buffer<float>(device, n);
    device.copy(scratch.data(), source.data(), n * sizeof(float), device.main_stream());
    device.copy(more.data(), scratch.data(), n * sizeof(float), device.main_stream());
    device.copy(result.data(), more.data(), n * sizeof(float), device.main_stream());
    if (keep) kept = std::move(more);
  };
  work(false);
  const std::size_t cached = device.cached_bytes();
  {
    cuda_graph graph(device);
    graph.record([&] { work(true); });
    CHECK(graph.scratch_bytes() >= 2 * n * sizeof(float));
    CHECK(device.scratch_bytes() == graph.scratch_bytes());
    kept.reset();
    std::vector<buffer<cuda>> later;
    for (int i = 0; i < 4; ++i) {
      later.push_back(make_buffer<float>(device, n));
      device.upload(later.back().data(), zeros.data(), n * sizeof(float), device.main_stream());
    }
    graph.launch();
    for (const auto& b : later) {
      device.download(read.data(), b.data(), n * sizeof(float), device.main_stream());
      CHECK(read == zeros);
    }
    device.download(read.data(), result.data(), n * sizeof(float), device.main_stream());
    CHECK(read == numbers);
    CHECK_THROWS(graph.record([&] { throw plait::error("in the middle"); }));
    CHECK(device.scratch_bytes() == 0);
    graph.record([&] { work(false); });
  }
  CHECK(device.scratch_bytes() == 0);
  CHECK(device.cached_bytes() >= cached);
}

TEST_CASE("an operation that a graph cannot record is an error, and the device still works") {
  cuda device;
  cuda_graph graph(device);
  float number = 1;
  auto there = make_buffer<float>(device, 1);
  CHECK_THROWS_WITH_AS(graph.launch(), "cuda_graph: nothing is recorded", plait::error);
  CHECK_THROWS_WITH_AS(graph.record([&] { device.upload(there.data(), &number, sizeof number, device.main_stream()); }),
                       doctest::Contains("an upload inside a captured stream"), plait::error);
  CHECK_THROWS_WITH_AS(graph.record([&] { make_buffer<float>(device, 12345); }),
                       doctest::Contains("a captured step asks for"), plait::error);
  device.upload(there.data(), &number, sizeof number, device.main_stream());
  number = 0;
  device.download(&number, there.data(), sizeof number, device.main_stream());
  CHECK(number == 1);
}

#ifdef PLAIT_CUDA_STAND_IN
TEST_CASE("a model whose attention the GPU cannot run is refused when it is made") {
  scenario s = small_scenario();
  s.config.head_dim = 256;
  ::setenv("PLAIT_STAND_IN_SHARED_KB", "99", 1);
  CHECK_THROWS_WITH_AS(on_gpu(s, 1, 4, [&](const context<cuda>& ctx) { small_model model(ctx, s.config, s.options); }),
                       doctest::Contains("head_dim = 256 in bf16 needs 135936 bytes of shared memory"), plait::error);
  ::unsetenv("PLAIT_STAND_IN_SHARED_KB");
}
#endif
