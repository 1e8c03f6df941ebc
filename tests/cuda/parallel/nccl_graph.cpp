// program: training_nccl
// timeout: 300
// Collectives of the NCCL communicator recorded in a CUDA graph and replayed.
#include <doctest/doctest.h>

#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/launch/nccl.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/cuda/kernels.hpp"
#include "plait/models/llama.hpp"
#include "plait/models/mixture_llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/graph_step.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/generators.hpp"
#include "support/nccl_runs.hpp"
#include "support/texts.hpp"

using namespace plait;
using rank_comm = nccl::communicator;

namespace {

using plait::test::devices;
using plait::test::text_of;
using plait::test::text_thrown_by;

constexpr std::size_t n = 37;

/// Arrays of one rank, and a step that uses every kind of collective, direct and started.
struct step {
  cuda& device;
  rank_comm& comm;
  std::size_t ranks = static_cast<std::size_t>(comm.size());
  buffer<cuda> x = room(n), sum = room(n), all = room(n * ranks), part = room(n), turned = room(n * ranks),
               ring = room(n), beside = room(n);

  buffer<cuda> room(std::size_t count) { return make_buffer<float>(device, count); }

  void run() {
    comm.all_reduce(x.data(), sum.data(), n, dtype::f32, reduce_op::sum);
    request gathering = comm.start_all_gather(sum.data(), all.data(), n, dtype::f32);
    device.copy(beside.data(), x.data(), n * 4, device.main_stream());  // in parallel with the all-gather
    gathering.wait();
    comm.reduce_scatter(all.data(), part.data(), n, dtype::f32, reduce_op::max);
    comm.all_to_all(all.data(), turned.data(), n, dtype::f32);
    const int next = (comm.rank() + 1) % comm.size(), previous = (comm.rank() + comm.size() - 1) % comm.size();
    comm.begin_group();
    request sent = comm.start_send(x.data(), n, dtype::f32, next);
    request got = comm.start_receive(ring.data(), n, dtype::f32, previous);
    comm.end_group();
    sent.wait();
    got.wait();
    comm.broadcast(part.data(), n, dtype::f32, comm.size() - 1);
    kernels::accumulate(device, ring.data<float>(), x.data<float>(), static_cast<std::int64_t>(n));
  }
  void start(float value) { kernels::fill(device, x.data<float>(), static_cast<std::int64_t>(n), value); }
  std::vector<float> read() {
    std::vector<float> out;
    for (buffer<cuda>* b : {&x, &sum, &all, &part, &turned, &ring, &beside}) {
      const std::size_t at = out.size();
      out.resize(at + b->bytes() / 4);
      device.download(out.data() + at, b->data(), b->bytes(), device.main_stream());
    }
    return out;
  }
};

}  // namespace

TEST_CASE("nccl in a graph: every replay has the results of the calls") {
  for (const int ranks : {1, 2, 4}) {
    CAPTURE(ranks);
    CHECK(text_of(ranks, {.deadline = 60}, [](rank_comm& comm, cuda& device) {
            step s{device, comm};
            const auto first = static_cast<float>(comm.rank() + 1);
            std::vector<std::vector<float>> expected;
            s.start(first);
            for (int turn = 0; turn < 4; ++turn) {
              s.run();
              expected.push_back(s.read());
            }
            CHECK(expected[1] != expected[0]);
            cuda_graph graph(device);
            s.start(first);
            graph.record([&] { s.run(); });
            CHECK(s.read()[0] == first);  // recording did not run it
            for (int turn = 0; turn < 3; ++turn) {
              graph.launch();
              CHECK(s.read() == expected[static_cast<std::size_t>(turn)]);
            }
            s.run();  // calls and replays alternate
            CHECK(s.read() == expected[3]);
            comm.barrier();
          }) == "");
  }
}

TEST_CASE("nccl in a graph: the watch over lost ranks neither disturbs a recording nor counts it as work") {
  const nccl::options quick{.deadline = 2};
  CHECK(text_of(2, quick, [](rank_comm& comm, cuda& device) {
          step s{device, comm};
          s.start(1.0f);
          s.run();
          for (int i = 0; i < 40; ++i) comm.all_reduce(s.x.data(), s.x.data(), n, dtype::f32, reduce_op::max);
          device.synchronize();
          // A program may record a stream itself, in the strictest mode.
          const cudaStream_t stream = device.main_stream().handle();
          cudaGraph_t graph = nullptr;
          REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
          for (int i = 0; i < 40; ++i) comm.all_reduce(s.x.data(), s.x.data(), n, dtype::f32, reduce_op::max);
          std::this_thread::sleep_for(std::chrono::milliseconds(2500));  // longer than the deadline
          REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
          std::this_thread::sleep_for(std::chrono::milliseconds(300));
          cudaGraphDestroy(graph);
          comm.barrier();
        }) == "");
}

TEST_CASE("nccl in a graph: operations for which the host must wait are refused") {
  const std::string barrier = text_of(2, {.deadline = 60}, [](rank_comm& comm, cuda& device) {
    cuda_graph graph(device);
    graph.record([&] { comm.barrier(); });
  });
  CHECK((devices(2).empty() || barrier.find("is part of a graph, which runs later") != std::string::npos));
  const std::string before = text_of(2, {.deadline = 60}, [](rank_comm& comm, cuda& device) {
    step s{device, comm};
    s.start(1.0f);
    request open = comm.start_all_reduce(s.x.data(), s.sum.data(), n, dtype::f32, reduce_op::sum);
    cuda_graph graph(device);
    graph.record([&] { comm.all_reduce(s.x.data(), s.sum.data(), n, dtype::f32, reduce_op::sum); });
  });
  CHECK((devices(2).empty() || before.find("was started before the stream was recorded") != std::string::npos));
}

namespace {

struct training_size {
  std::int64_t layers = 4, microbatches = 4;
};
/// Changes to a training run between its steps.
struct disturbance {
  bool weights_set = false;  ///< all weights are set before the fourth step
  bool spoilt = false;       ///< the same, and they are NaN in the three steps before
  bool asked_late = false;   ///< only the last step's results are read
  int failing_step = -1;     ///< rank 1 fails in this step
  int failing_product = 0;   ///< at this product
  int aborting_step = -1;    ///< rank 1 aborts before this step
};

constexpr std::int64_t vocabulary = 32;

/// Loads step `i`, of some samples.
template <class Step>
void load_step(const context<cuda>& ctx, Step& step, std::int64_t i, std::int64_t samples) {
  step.load(ctx, samples * i, [&](std::int64_t m, host_tokens& ids, host_tokens& labels) {
    for (std::int64_t t = 0; t < ids.size(); ++t) {
      ids.data()[t] = (i * 7 + m * 5 + t * 3) % vocabulary;
      labels.data()[t] = (i + m + t) % vocabulary;
    }
  });
}

/// A mesh of dp x pp x tp ranks.
mesh_shape mesh_of(std::int64_t dp_ranks, std::int64_t stages, std::int64_t tp_ranks) {
  return mesh<axis<dp>, axis<pp>, axis<cp>, axis<tp>, axis<tp_rep>>{dp_ranks, stages, 1, tp_ranks, 1}.shape();
}

/// The losses of six steps of a small Llama as a pipeline, with -1 for NaN, and the weights of each rank afterwards.
template <class Policy>
std::pair<std::vector<double>, std::vector<std::uint64_t>> train_pipeline(const mesh_shape& shape, bool as_graph,
                                                                          const training_size& size,
                                                                          const pipeline_options& options = {},
                                                                          const disturbance& disturbed = {}) {
  using S = megatron_sp;
  using model_type = llama<float, S, cuda>;
  const llama_config config{
      .vocab = vocabulary, .hidden = 16, .layers = size.layers, .heads = 2, .kv_heads = 2, .ffn = 32};
  const std::int64_t microbatches = size.microbatches, seq = 8;
  const schedule plan = make_schedule<Policy>(static_cast<int>(shape.extent(axis_of<pp>)), microbatches);
  std::vector<double> losses;
  std::vector<std::uint64_t> hashes(static_cast<std::size_t>(shape.size()));
  nccl::run(devices(static_cast<int>(shape.size())), cuda::options{.workspace_bytes = 1 << 20},
            nccl::options{.deadline = 60}, [&](rank_comm& comm, cuda& device) {
              pipeline_world ranks(shape, any_communicator(comm));
              const mesh_shape& stage = ranks.stage().shape();
              const context<cuda> ctx{device, ranks.stage(), llama_sizes<S>(config, stage, 4, seq), 7};
              const auto parts = split_layers(
                  {std::vector<double>(static_cast<std::size_t>(config.layers), 1.0), 0.2, 0.7}, plan.shape.stages());
              pipeline<model_type> model(
                  ctx, ranks.along(), plan, parts,
                  [&](stage_layers part, model_type* first) {
                    return std::make_unique<model_type>(ctx, config, llama_options{}, part, first);
                  },
                  options);
              model.visit([&](auto& p) { p.initialize(ctx); });
              adamw<float, cuda> optimizer;
              training_step step(ctx, model, optimizer, 1.0);
              std::optional<graph_step<decltype(step)>> replayed;
              if (as_graph) replayed.emplace(ctx, step);
              constexpr std::int64_t steps = 6;
              for (std::int64_t i = 0; i < steps; ++i) {
                if (disturbed.spoilt && i == 0)
                  model.visit([&](auto& p) {
                    const std::vector<float> none(static_cast<std::size_t>(p.size()), std::nanf(""));
                    p.fill_values(ctx, [&](float* values) {
                      device.upload(values, none.data(), none.size() * sizeof(float), device.main_stream());
                    });
                  });
                if ((disturbed.weights_set || disturbed.spoilt) && i == 3)
                  model.visit([&](auto& p) { p.initialize(ctx); });
#ifdef PLAIT_CUDA_STAND_IN
                if (comm.rank() == 1 && i == disturbed.failing_step)
                  stand_in::failing_product = disturbed.failing_product;
#endif
                if (comm.rank() == 1 && i == disturbed.aborting_step) comm.abort("for a test");
                load_step(ctx, step, i, 4 * microbatches);
                optimizer.begin_step(ctx, 1e-2);
                as_graph ? replayed->run(ctx) : step.run(ctx);
                if (disturbed.asked_late && i + 1 < steps) continue;
                const double loss = step.result(ctx).loss;
                if (comm.rank() == 0) losses.push_back(std::isnan(loss) ? -1 : loss);
              }
              if (as_graph) CHECK(replayed->replaying());
              // The deadline applies also where a stage is one rank.
              const std::string last = comm.shared_state().home->report("now");
              CHECK((last.find("replayed step") != std::string::npos) == as_graph);
              hashes[static_cast<std::size_t>(comm.rank())] = weights_hash(ctx, model);
            });
  return {losses, hashes};
}

template <class Policy>
std::vector<double> check_recorded_pipeline(const mesh_shape& shape, const training_size& size,
                                            const pipeline_options& options = {}, const disturbance& disturbed = {}) {
  if (devices(static_cast<int>(shape.size())).empty()) return {};
  CAPTURE(describe(shape));
  CAPTURE(static_cast<int>(options.parallel.level));
  const auto plain = train_pipeline<Policy>(shape, false, size, options, disturbed),
             graph = train_pipeline<Policy>(shape, true, size, options, disturbed);
  CHECK((disturbed.asked_late || plain.first.front() != plain.first.back()));
  CHECK(graph.first == plain.first);
  CHECK(graph.second == plain.second);
  return plain.first;
}

}  // namespace

TEST_CASE("nccl in a graph: the stages of a pipeline are recorded, and replayed with the same bits") {
  const training_size two_layers{.layers = 2}, four_layers{.layers = 4};  // one layer for each part
  check_recorded_pipeline<one_f_one_b>(mesh_of(1, 2, 1), two_layers);
  check_recorded_pipeline<one_f_one_b>(mesh_of(1, 2, 2), two_layers);
  check_recorded_pipeline<zb_v>(mesh_of(1, 2, 1), four_layers);
  // Values that are set between replays are used by the next step, on every stage and for sharded parameters.
  check_recorded_pipeline<one_f_one_b>(mesh_of(1, 2, 1), two_layers, {}, {.weights_set = true});
  pipeline_options options{.parallel = {.level = zero_level::parameters}};
  check_recorded_pipeline<one_f_one_b>(mesh_of(2, 2, 1), two_layers, options, {.weights_set = true});
}

TEST_CASE(
    "nccl in a graph: every policy of data parallelism is recorded, and has the losses of replicated parameters") {
  const training_size little{.layers = 2, .microbatches = 2};
  std::vector<double> replicated;
  for (const zero_level level :
       {zero_level::replicated, zero_level::optimizer, zero_level::gradients, zero_level::parameters}) {
    pipeline_options options{.parallel = {.level = level}};
    const std::vector<double> losses = check_recorded_pipeline<one_f_one_b>(mesh_of(2, 1, 2), little, options);
    if (level == zero_level::replicated) replicated = losses;
    for (std::size_t i = 0; i < losses.size(); ++i) CHECK(std::abs(losses[i] - replicated[i]) <= 1e-5 * replicated[i]);
  }
}

TEST_CASE("nccl in a graph: steps with gradients that are not finite, and results that are not read") {
  pipeline_options options{.parallel = {.level = zero_level::gradients}};
  for (const disturbance& disturbed : {disturbance{.spoilt = true}, {.asked_late = true}})
    check_recorded_pipeline<one_f_one_b>(mesh_of(2, 1, 1), {.layers = 1, .microbatches = 1}, options, disturbed);
}

namespace {

/// The losses of five steps of a small Llama with experts over ep=2 and tp=2, and the weights of each rank.
std::pair<std::vector<double>, std::vector<std::uint64_t>> train_mixture(bool padded, bool as_graph) {
  using S = megatron_experts;
  const llama_config config{
      .vocab = vocabulary,
      .hidden = 16,
      .layers = 2,
      .heads = 2,
      .kv_heads = 2,
      .ffn = 32,
      .mixture = {.experts = 4, .router = {.chosen = 2}, .correction_bias = true, .shared_ffn = 16}};
  llama_options options{.mixture_losses = {.balance = {0.01, balance_over::step}, .z_loss = 0.01},
                        .expert_limit = 1.5,
                        .padded_experts = padded,
                        .expert_bias_rate = 0.01};
  const mesh_shape shape = S::mesh{1, 2, 1, 2, 1}.shape();
  std::vector<double> losses;
  std::vector<std::uint64_t> hashes(4);
  nccl::run(devices(4), cuda::options{.workspace_bytes = 1 << 20}, nccl::options{.deadline = 60},
            [&](rank_comm& comm, cuda& device) {
              world ranks(shape, any_communicator(comm));
              const context<cuda> ctx{device, ranks, llama_sizes<S>(config, shape, 4, 8), 7};
              mixture_llama<float, S, cuda> model(ctx, config, options);
              model.visit([&](auto& p) { p.initialize(ctx); });
              adamw<float, cuda> optimizer;
              training_step step(ctx, model, optimizer, 2, 1.0);
              std::optional<graph_step<decltype(step)>> replayed;
              if (as_graph) replayed.emplace(ctx, step);
              for (std::int64_t i = 0; i < 5; ++i) {
                load_step(ctx, step, i, 8);
                optimizer.begin_step(ctx, 1e-2);
                as_graph ? replayed->run(ctx) : step.run(ctx);
                const double loss = step.result(ctx).loss;
                if (comm.rank() == 0) losses.push_back(loss);
              }
              if (as_graph) CHECK(replayed->replaying());
              hashes[static_cast<std::size_t>(comm.rank())] = weights_hash(ctx, model);
            });
  return {losses, hashes};
}

}  // namespace

TEST_CASE("nccl in a graph: padded experts exchange rows, and biases and loads change, with the same bits") {
  if (devices(4).empty()) return;
  const auto plain = train_mixture(true, false), graph = train_mixture(true, true);
  CHECK(graph.first == plain.first);
  CHECK(graph.second == plain.second);
  CHECK(plain.first.back() < plain.first.front());
  const std::vector<double> counted = train_mixture(false, false).first;
  for (std::size_t i = 0; i < counted.size(); ++i) CHECK(plain.first[i] == doctest::Approx(counted[i]).epsilon(1e-5));
}

#ifdef PLAIT_CUDA_STAND_IN
TEST_CASE("nccl: a rank that throws inside a step, recorded or not, ends the others, and all memory is free") {
  const auto free_bytes = [] {
    std::size_t free = 0, total = 0;
    REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
    return free;
  };
  pipeline_options options{.parallel = {.level = zero_level::parameters}};
  const std::size_t before = free_bytes();
  const auto ends = [&](const mesh_shape& shape, bool as_graph, int step, int product) {
    CAPTURE(describe(shape));
    CAPTURE(as_graph);
    CAPTURE(step);
    CAPTURE(product);
    const std::string text = text_thrown_by([&] {
      train_pipeline<one_f_one_b>(shape, as_graph, {}, options, {.failing_step = step, .failing_product = product});
    });
    CHECK(text.find("rank 1: gemm(") == 0);
    CHECK(text.find("cuBLASLt: starting the product: ") != std::string::npos);
    CHECK(free_bytes() == before);
  };
  const mesh_shape stages = mesh_of(2, 2, 1);
  for (const int product : {1, 17, 70}) ends(stages, false, 1, product);
  for (const int step : {1, 2}) ends(stages, true, step, 12);  // before and while the step is recorded
}

TEST_CASE("nccl in a graph: a rank that ends all ranks while each owns a recorded step does so quickly") {
  pipeline_options options{.parallel = {.level = zero_level::parameters}};
  const double begun = comm_clock();
  const std::string text =
      text_thrown_by([&] { train_pipeline<one_f_one_b>(mesh_of(2, 2, 1), true, {}, options, {.aborting_step = 4}); });
  CHECK(text.find("rank 1 called abort: for a test") != std::string::npos);
  CHECK(comm_clock() - begun < 45);  // the grace is 60 s
}

TEST_CASE("nccl in a graph: a watched replay is an operation in flight") {
  std::barrier both(2);
  const std::string text = text_of(2, {.deadline = 2}, [&](rank_comm& comm, cuda& device) {
    step s{device, comm};
    s.start(1.0f);
    s.run();
    cuda_graph graph(device);
    graph.record([&] { s.run(); });
    device.synchronize();
    comm.barrier();
    // Until the watching threads of both ranks have seen that all operations before the replay are done.
    const auto is_open = [&] { return comm.shared_state().home->report("now").find(" started") != std::string::npos; };
    while (is_open()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    both.arrive_and_wait();
    stand_in::lost_device = cudaErrorIllegalAddress;
    graph.launch();
    any_communicator(comm).watch("replayed step");
    // Repeats until the watching thread has ended the ranks; then this call throws.
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      comm.all_gather(s.x.data(), s.all.data(), 0, dtype::f32);
    }
  });
  stand_in::lost_device = cudaSuccess;
  CHECK(text.find("at replayed step #") != std::string::npos);
}
#endif
