// program: training
// A recorded training step: the same numbers as the step itself, and what cannot be replayed is refused.
#include <cstdlib>
#include <optional>
#include <vector>

#include "plait/comm/threads/cuda.hpp"
#include "plait/train/graph_step.hpp"
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

namespace {

scenario small_scenario() {
  scenario s;
  s.config = small_config(4, 2);
  s.config.head_dim = 8;
  s.batch = 4;
  s.seq = 8;
  s.microbatches = 2;
  return s;
}

using model_type = llama<bf16, megatron_sp, cuda>;

/// Runs body(context) on in-process ranks that share a GPU, a microbatch of `batch` samples in all.
template <class Body>
void on_gpu(const scenario& s, std::int64_t ranks, std::int64_t batch, const Body& body) {
  threads::run(static_cast<int>(ranks), cuda::options{}, [&](threads::communicator c, cuda& device) {
    world mesh(megatron_sp::mesh{ranks, 1, 1, 1}.shape(), c);
    body(context<cuda>{device, mesh, llama_sizes<megatron_sp>(s.config, mesh.shape(), batch, s.seq), 7});
  });
}

/// The losses of six steps, and the weights after them. With `interrupted`, all weights are set anew before the fifth.
std::pair<std::vector<double>, std::uint64_t> train(const scenario& s, bool as_graph, bool interrupted = false) {
  std::pair<std::vector<double>, std::uint64_t> out;
  on_gpu(s, 1, s.batch / s.microbatches, [&](const context<cuda>& ctx) {
    model_type model(ctx, s.config, s.options);
    model.visit([&](auto& p) { p.initialize(ctx); });
    chosen_optimizer<bf16, cuda> optimizer(s.optimizer);
    training_step step(ctx, model, optimizer, s.microbatches, 1.0);
    graph_step replayed(ctx, step);
    for (std::int64_t i = 0; i < 6; ++i) {
      if (interrupted && i == 4) model.visit([&](auto& p) { p.initialize(ctx); });
      step.load(ctx, i * s.batch, [&](std::int64_t m, auto& ids, auto& labels) {
        fill_tokens(s, i * s.batch + m * s.batch / s.microbatches, ids, labels);
      });
      optimizer.begin_step(ctx, 1e-3 * static_cast<double>(i + 1));
      if (as_graph)
        replayed.run(ctx);
      else
        step.run(ctx);
      out.first.push_back(step.result(ctx).loss);
    }
    CHECK(replayed.replaying() == as_graph);
    out.second = weights_hash(ctx, model);
  });
  return out;
}

}  // namespace

TEST_CASE("a replayed step has the same bits as the step") {
  scenario s = small_scenario();
  for (const optimizer_options& optimizer : {optimizer_options(adamw_options{}), optimizer_options(muon_options{})}) {
    s.optimizer = optimizer;
    const auto plain = train(s, false), graph = train(s, true);
    CHECK(graph.first == plain.first);
    CHECK(graph.second == plain.second);
    CHECK(plain.first.back() != plain.first.front());
  }
}

TEST_CASE("values that somebody sets between replays are those of the next step") {
  const scenario s = small_scenario();
  const auto plain = train(s, false, true), graph = train(s, true, true);
  CHECK(graph.first == plain.first);
  CHECK(graph.second == plain.second);
  CHECK(plain.first != train(s, false).first);
}

TEST_CASE("dropout is refused") {
  scenario s = small_scenario();
  s.options.dropout = 0.1;
  CHECK_THROWS_WITH_AS(train(s, true), doctest::Contains("graph_step: dropout = 0.1"), plait::error);
}

TEST_CASE("in-process ranks are refused") {
  const scenario s = small_scenario();
  CHECK_THROWS_WITH_AS(on_gpu(s, 2, 4,
                              [&](const context<cuda>& ctx) {
                                model_type model(ctx, s.config, s.options);
                                adamw<bf16, cuda> optimizer;
                                training_step step(ctx, model, optimizer, 1, 1.0);
                                graph_step replayed(ctx, step);
                              }),
                       doctest::Contains("2 in-process ranks meet on the host"), plait::error);
}

TEST_CASE("a graph owns its scratch memory: replays write to no buffer that was made later") {
  cuda device;
  constexpr std::size_t n = 1000;
  std::vector<float> numbers(n, 3), zeros(n, 0), read(n);
  auto source = make_buffer<float>(device, n), result = make_buffer<float>(device, n);
  device.upload(source.data(), numbers.data(), n * sizeof(float), device.main_stream());
  std::optional<buffer<cuda>> kept;  // made while it is recorded, and released later
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

TEST_CASE("what a graph cannot hold is an error, and the device goes on") {
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
  CHECK_THROWS_WITH_AS(on_gpu(s, 1, 4, [&](const context<cuda>& ctx) { model_type model(ctx, s.config, s.options); }),
                       doctest::Contains("head_dim = 256 in bf16 needs 135936 bytes of shared memory"), plait::error);
  ::unsetenv("PLAIT_STAND_IN_SHARED_KB");
}
#endif
