// program: training_nccl
// Pipelines over NCCL or its stand-in. Under every schedule the executor's sends and receives, all in one queue, finish
// and deliver the right messages.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "plait/comm/launch/nccl.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/parallel/executor.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/generators.hpp"
#include "support/nccl_devices.hpp"

using namespace plait;

namespace {

using plait::test::devices;

constexpr std::size_t width = 1000;

struct numbers {
  using value_type = double;
  buffer<cuda> memory;

  numbers() = default;
  explicit numbers(const context<cuda>& ctx) : memory(make_buffer<double>(ctx.device, width)) {}
  double* data() { return memory.data<double>(); }
  std::int64_t size() const { return memory.empty() ? 0 : static_cast<std::int64_t>(width); }
  explicit operator bool() const { return !memory.empty(); }
};

/// Every stage doubles its input. The first stage makes its input from the microbatch's index; the gradient starts as
/// the last stage's input.
struct doubling {
  using activation = numbers;
  using gradient = numbers;
  struct saved {};

  const pipeline_shape& shape;
  int rank;
  std::vector<double> first_gradients;  ///< of each microbatch, on the rank with the first stage
  int wrong = 0;

  numbers input(const context<cuda>& ctx, int) { return numbers(ctx); }
  numbers output_gradient(const context<cuda>& ctx, int) { return numbers(ctx); }
  numbers doubled(const context<cuda>& ctx, numbers x) {
    numbers y(ctx);
    ctx.device.copy(y.data(), x.data(), y.memory.bytes(), ctx.device.main_stream());
    kernels::accumulate(ctx.device, static_cast<const double*>(x.data()), y.data(), static_cast<std::int64_t>(width));
    return y;
  }
  numbers forward(const context<cuda>& ctx, int chunk, int microbatch, numbers x, saved*) {
    const int stage = shape.stage_of(rank, chunk);
    if (stage == 0) {
      x = numbers(ctx);
      const std::vector<double> start(width, microbatch + 1);
      ctx.device.upload(x.data(), start.data(), x.memory.bytes(), ctx.device.main_stream());
    }
    x = doubled(ctx, std::move(x));
    if (stage + 1 < shape.stages()) return x;
    last.resize(static_cast<std::size_t>(shape.microbatches));
    last[static_cast<std::size_t>(microbatch)] = std::move(x);
    return {};
  }
  numbers backward(const context<cuda>& ctx, int chunk, int microbatch, saved&, numbers dy, weight_work*) {
    const int stage = shape.stage_of(rank, chunk);
    if (stage + 1 == shape.stages()) dy = std::move(last[static_cast<std::size_t>(microbatch)]);
    dy = doubled(ctx, std::move(dy));
    if (stage > 0) return dy;
    std::vector<double> values(width);
    ctx.device.download(values.data(), dy.data(), dy.memory.bytes(), ctx.device.main_stream());
    const double expected = (microbatch + 1) * std::ldexp(1.0, 2 * shape.stages());
    wrong += static_cast<int>(width) - static_cast<int>(std::count(values.begin(), values.end(), expected));
    first_gradients.push_back(values[0]);
    return {};
  }

  std::vector<numbers> last{};
};

template <class Policy>
void check(int ranks, int microbatches) {
  if (devices(ranks).empty()) return;
  const schedule plan = make_schedule<Policy>(ranks, microbatches);
  CAPTURE(plan.name.str());
  CAPTURE(ranks);
  mesh_shape whole;
  whole.add(axis_of<pp>, ranks);
  CHECK_NOTHROW(nccl::run(devices(ranks), {.workspace_bytes = 4096}, {.deadline = 60, .check_pointers = true},
                          [&](nccl::communicator& comm, cuda& device) {
                            pipeline_world all(whole, any_communicator(comm));
                            context<cuda> ctx{device, all.stage(), {}, 1};
                            step_executor<cuda> executor(all.along(), plan);
                            doubling stages{plan.shape, comm.rank(), {}};
                            executor.run(ctx, stages);
                            device.synchronize();
                            CHECK(stages.wrong == 0);
                            const bool has_first = plan.shape.rank_of(0) == comm.rank();
                            CHECK(stages.first_gradients.size() ==
                                  static_cast<std::size_t>(has_first ? microbatches : 0));
                          }));
}

}  // namespace

TEST_CASE("one chunk a rank") {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    check<gpipe>(ranks, 5);
    check<one_f_one_b>(ranks, 2 * ranks);
    check<zb_h1>(ranks, 2 * ranks + 1);
    check<zb_h2>(ranks, 2 * ranks);
  }
}

TEST_CASE("several chunks a rank") {
  for (const int ranks : {2, 4}) {
    check<interleaved<2>>(ranks, 2 * ranks);
    check<interleaved<3>>(ranks, ranks);
    check<zb_v>(ranks, 2 * ranks);
    check<dualpipe_v>(ranks, 2 * ranks);
  }
}
