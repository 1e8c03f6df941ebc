// program: training_nccl
// stand-in: only
// Tensor parallelism does not slow down pipelines over NCCL. On the stand-in's clock, a step of a small Llama takes as
// long as the same schedule with equally long actions that have no collectives.
#ifdef PLAIT_CUDA_STAND_IN
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/launch/nccl.hpp"
#include "plait/device/cuda.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/generators.hpp"
#include "plait/schedule/simulate.hpp"
#include "support/nccl_devices.hpp"

namespace {

namespace pl = plait;

constexpr int stage_ranks = 4, microbatches_in_step = 8;
constexpr double message_time = 4000;  ///< short compared with an action, whose collectives take at least as long

/// Integers, so sums are exact.
double cost(const stand_in::task& what) {
  using stand_in::work;
  if (what.kind == work::message) return message_time;
  if (what.kind == work::collective) return 1000 + what.size;
  return what.kind == work::product ? what.size : 0;
}

struct clock_on {
  clock_on() { stand_in::runtime::instance().set_clock(cost); }
  clock_on(const clock_on&) = delete;
  ~clock_on() { stand_in::runtime::instance().set_clock(nullptr); }
};

double now(const pl::context<pl::cuda>& ctx) { return stand_in::time_of(ctx.device.main_stream().handle()); }

/// The times of actions, by stage, with the reduction after a chunk's last one.
struct durations {
  struct range {
    double least = std::numeric_limits<double>::infinity(), most = 0;
    void add(double t) { least = std::min(least, t), most = std::max(most, t); }
  };
  struct stage {
    range forward, backward, weight_backward, reduction;  ///< backward: with or without the weights' part
    std::int64_t elements = 0;                            ///< of a message
  };
  std::mutex mutex;
  std::vector<stage> stages;
  explicit durations(const pl::pipeline_shape& shape) : stages(static_cast<std::size_t>(shape.stages())) {}

  void add(int place, range stage::*which, double t) {
    const std::lock_guard lock(mutex);
    (stages[static_cast<std::size_t>(place)].*which).add(t);
  }
};

/// A Llama's stages with a clock: the time of an action is that of its shortest run, which waits for no message.
struct timed_llama {
  using model_type = pl::llama<float, pl::megatron_sp, pl::cuda>;
  using activation = model_type::activation;
  using gradient = model_type::gradient;
  using saved = model_type::saved;
  using range = durations::range durations::stage::*;

  pl::pipeline<model_type>& model;
  pl::pipeline<model_type>::batch& data;
  model_type::mean& loss;
  durations& times;
  int rank;

  template <class F>
  auto timed(const pl::context<pl::cuda>& ctx, int chunk, range which, F&& f) {
    const double begin = now(ctx);
    auto result = f(*model.stages()[static_cast<std::size_t>(chunk)]);
    times.add(model.shape().stage_of(rank, chunk), which, now(ctx) - begin);
    return result;
  }
  activation input(const pl::context<pl::cuda>& ctx, int chunk) {
    activation x(ctx);
    const std::lock_guard lock(times.mutex);
    times.stages[static_cast<std::size_t>(model.shape().stage_of(rank, chunk))].elements = x.size();
    return x;
  }
  gradient output_gradient(const pl::context<pl::cuda>& ctx, int) { return gradient(ctx); }
  activation forward(const pl::context<pl::cuda>& ctx, int chunk, int i, activation x, saved* kept) {
    auto& [ids, labels] = data[static_cast<std::size_t>(i)];
    return timed(ctx, chunk, &durations::stage::forward, [&](model_type& stage) {
      x = stage.forward_layers(ctx, ids, std::move(x), kept);
      if (!stage.part().last) return std::move(x);
      loss.add(ctx, stage.forward_loss(ctx, std::move(x), labels, kept));
      return activation{};
    });
  }
  gradient backward(const pl::context<pl::cuda>& ctx, int chunk, int i, saved& kept, gradient dy,
                    pl::weight_work* deferred) {
    pl::microbatch<pl::cuda> mb(ctx);
    pl::weight_work later;
    mb.deferred = deferred ? &later : nullptr;
    auto& [ids, labels] = data[static_cast<std::size_t>(i)];
    dy = timed(ctx, chunk, &durations::stage::backward, [&](model_type& stage) {
      if (stage.part().last) dy = stage.backward_loss(mb, labels, kept, loss.seed());
      return stage.backward_layers(mb, ids, kept, std::move(dy));
    });
    if (deferred)
      deferred->add([this, &ctx, chunk, work = std::move(later)]() mutable {
        timed(ctx, chunk, &durations::stage::weight_backward, [&](model_type&) { return work.run(), 0; });
      });
    return dy;
  }
  void perform(const pl::context<pl::cuda>& ctx, const pl::step_entry& e) {
    if (e.op != pl::step_op::reduce) return;
    timed(ctx, model.shape().chunk_of(e.unit), &durations::stage::reduction, [&](model_type& stage) {
      stage.visit([&](auto& p) { static_cast<void>(p.reduce(ctx)); });
      return 0;
    });
  }
};

/// Stages that take given times and send messages of the same size, and call no communicator themselves.
struct idle_stages {
  struct numbers {
    using value_type = float;
    pl::buffer<pl::cuda> memory;
    float* data() { return memory.data<float>(); }
    std::int64_t size() const { return static_cast<std::int64_t>(memory.bytes() / sizeof(float)); }
    explicit operator bool() const { return !memory.empty(); }
  };
  using activation = numbers;
  using gradient = numbers;
  struct saved {};

  const pl::pipeline_shape& shape;
  const durations& times;
  int rank;

  const durations::stage& of(int chunk) const {
    return times.stages[static_cast<std::size_t>(shape.stage_of(rank, chunk))];
  }
  void spend(const pl::context<pl::cuda>& ctx, const durations::range& t) {
    stand_in::set_time(ctx.device.main_stream().handle(), now(ctx) + t.least);
  }
  numbers room(const pl::context<pl::cuda>& ctx) {
    return {pl::make_buffer<float>(ctx.device, static_cast<std::size_t>(times.stages.back().elements))};
  }
  numbers input(const pl::context<pl::cuda>& ctx, int) { return room(ctx); }
  numbers output_gradient(const pl::context<pl::cuda>& ctx, int) { return room(ctx); }
  numbers forward(const pl::context<pl::cuda>& ctx, int chunk, int, numbers, saved*) {
    spend(ctx, of(chunk).forward);
    return shape.stage_of(rank, chunk) + 1 == shape.stages() ? numbers{} : room(ctx);
  }
  numbers backward(const pl::context<pl::cuda>& ctx, int chunk, int, saved&, numbers, pl::weight_work* deferred) {
    spend(ctx, of(chunk).backward);
    if (deferred) deferred->add([this, &ctx, chunk] { spend(ctx, of(chunk).weight_backward); });
    return shape.stage_of(rank, chunk) == 0 ? numbers{} : room(ctx);
  }
  void perform(const pl::context<pl::cuda>& ctx, const pl::step_entry& e) {
    if (e.op == pl::step_op::reduce) spend(ctx, of(shape.chunk_of(e.unit)).reduction);
  }
};

/// Calls prepare(context, along, measured) on all ranks. `measured` runs the function that prepare passes to it, and
/// starts at one time on all ranks. Returns the longest time.
template <class Prepare>
double run_ranks(const pl::mesh_shape& shape, const pl::dim_sizes& sizes, const Prepare& prepare) {
  std::mutex mutex;
  double longest = 0;
  const auto ranks = static_cast<int>(shape.size());
  pl::nccl::run(pl::test::devices(ranks), {.workspace_bytes = 1 << 16}, {.deadline = 60},
                [&](pl::nccl::communicator& comm, pl::cuda& device) {
                  pl::pipeline_world all(shape, pl::any_communicator(comm));
                  const pl::context<pl::cuda> ctx{device, all.stage(), sizes, 7};
                  prepare(ctx, all.along(), [&](auto&& work) {
                    comm.barrier();
                    const double begin = now(ctx);
                    work();
                    const double took = now(ctx) - begin;
                    const std::lock_guard lock(mutex);
                    longest = std::max(longest, took);
                  });
                });
  return longest;
}

pl::mesh_shape mesh_of(std::int64_t tp) {
  using namespace pl;
  return mesh<axis<dp>, axis<pp>, axis<cp>, axis<pl::tp>, axis<tp_rep>>{1, stage_ranks, 1, tp, 1}.shape();
}

/// The time of a step, or of the replay of a recorded one.
double train(const pl::schedule& plan, durations& times, bool as_graph = false) {
  using model_type = timed_llama::model_type;
  const pl::llama_config config{.vocab = 32, .hidden = 16, .layers = 8, .heads = 2, .kv_heads = 2, .ffn = 32};
  const auto parts = pl::split_layers({std::vector<double>(8, 1.0), 0.2, 0.7}, plan.shape.stages());
  const auto shape = mesh_of(2);
  const auto sizes = pl::llama_sizes<pl::megatron_sp>(config, shape, 1, 8);
  return run_ranks(shape, sizes, [&](const auto& ctx, pl::any_communicator& along, const auto& measured) {
    pl::pipeline<model_type> model(ctx, along, plan, parts, [&](pl::stage_layers part, model_type* first) {
      return std::make_unique<model_type>(ctx, config, pl::llama_options{}, part, first);
    });
    model.visit([&](auto& p) { p.initialize(ctx); });
    pl::pipeline<model_type>::batch data;
    for (int i = 0; i < microbatches_in_step; ++i) {
      data.emplace_back(model_type::tokens(ctx), model_type::tokens(ctx));
      for (auto* ids : {&data.back().first, &data.back().second})
        ctx.device.zero(ids->data(), static_cast<std::size_t>(ids->size()) * sizeof(std::int64_t),
                        ctx.device.main_stream());
    }
    model_type::mean loss(ctx);
    loss.count(ctx, data[0].second.size() * microbatches_in_step);
    timed_llama stages{model, data, loss, times, along.rank()};
    const auto begin = [&] {
      pl::gather_parameters(ctx, model);
      pl::zero_gradients(ctx, model);
      loss.begin(ctx);
    };
    begin();
    pl::step_executor<pl::cuda> executor(along, pl::expand(plan, pl::units_of_stages(plan.shape), {.clip = false}));
    if (!as_graph) return measured([&] { executor.run(ctx, stages); });
    executor.release_by_schedule();
    for (int i = 0; i < 2; ++i) {
      executor.run(ctx, stages);
      begin();
    }
    pl::cuda_graph graph(ctx.device);
    graph.record([&] { executor.run(ctx, stages); });
    measured([&] { graph.launch(); });
  });
}

/// The time of the same schedule without tensor parallelism.
double idle(const pl::schedule& plan, const durations& times) {
  return run_ranks(mesh_of(1), {}, [&](const auto& ctx, pl::any_communicator& along, const auto& measured) {
    pl::step_executor<pl::cuda> executor(along, pl::expand(plan, pl::units_of_stages(plan.shape), {.clip = false}));
    idle_stages stages{plan.shape, times, along.rank()};
    measured([&] { executor.run(ctx, stages); });
  });
}

double simulated(const pl::schedule& plan, const durations& times) {
  pl::schedule_costs costs{.link = message_time};
  for (const durations::stage& s : times.stages)
    costs.stages.push_back({s.forward.least, s.backward.least, s.backward.least,
                            s.weight_backward.most > 0 ? s.weight_backward.least : 0});
  return pl::simulate(plan, costs).makespan;
}

template <class Policy>
void check_step(bool as_graph) {
  const pl::schedule plan = pl::make_schedule<Policy>(stage_ranks, microbatches_in_step);
  const clock_on clock;
  durations times(plan.shape), unused(plan.shape);
  const double step = train(plan, times), alone = idle(plan, times), ideal = simulated(plan, times);
  const double replay = as_graph ? train(plan, unused, true) : step;
  MESSAGE(plan.name.str() << ": " << step / alone << " of the step without collectives, " << step / ideal
                          << " of the simulation" << (as_graph ? "; replayed, " + std::to_string(replay / alone) : ""));
  for (const double time : {step, replay}) {
    CHECK(time <= 1.03 * alone);
    CHECK(time >= 0.97 * alone);
    CHECK(time <= 1.03 * ideal);
    CHECK(time >= ideal);
  }
}

}  // namespace

TEST_CASE("tensor parallelism does not slow a pipeline: 1F1B") { check_step<plait::one_f_one_b>(true); }
TEST_CASE("tensor parallelism does not slow a pipeline: interleaved") { check_step<plait::interleaved<2>>(false); }
TEST_CASE("tensor parallelism does not slow a pipeline: ZB-H1") { check_step<plait::zb_h1>(false); }
TEST_CASE("tensor parallelism does not slow a pipeline: ZB-V") { check_step<plait::zb_v>(true); }
#endif
