// A pipeline over layers that the program defines: y = tanh(w x), four stages on two ranks, four microbatches.
#include <cmath>
#include <cstdio>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/parallel/executor.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/generators.hpp"
#include "plait/tensor/tensor.hpp"

namespace pl = plait;

using rows = pl::spec<pl::batch, pl::hidden>;  // on the mesh of a stage: the mesh without pp

struct own_stages {
  using activation = pl::tensor<float, rows>;
  using gradient = pl::tensor<float, pl::dual_t<rows>>;
  struct saved {  // of one stage and one microbatch
    activation x, y;
  };

  const pl::pipeline_shape& shape;
  int rank;
  std::vector<float> weights = std::vector<float>(shape.chunks, 0.9f), gradients = std::vector<float>(shape.chunks);
  double loss = 0;

  bool is_first(int chunk) const { return shape.stage_of(rank, chunk) == 0; }
  bool is_last(int chunk) const { return shape.stage_of(rank, chunk) == shape.stages() - 1; }

  activation input(const pl::context<pl::cpu>& ctx, int) { return activation(ctx); }
  gradient output_gradient(const pl::context<pl::cpu>& ctx, int) { return gradient(ctx); }

  activation forward(const pl::context<pl::cpu>& ctx, int chunk, int microbatch, activation x, saved* keep) {
    if (is_first(chunk)) {  // the first stage receives no message
      x = activation(ctx);
      for (int i = 0; i < x.size(); ++i) x.data()[i] = 0.1f * static_cast<float>(i + microbatch);
    }
    activation y(ctx);
    for (int i = 0; i < x.size(); ++i) y.data()[i] = std::tanh(weights[chunk] * x.data()[i]);
    activation to_next;
    if (!is_last(chunk)) {
      to_next = activation(ctx);
      ctx.device.copy(to_next.data(), y.data(), sizeof(float) * y.size());
    } else {
      for (int i = 0; i < y.size(); ++i) loss += 0.5 * y.data()[i] * y.data()[i];
    }
    if (keep) *keep = {std::move(x), std::move(y)};
    return to_next;
  }

  gradient backward(const pl::context<pl::cpu>& ctx, int chunk, int, saved& kept, gradient dy, pl::weight_work*) {
    gradient dx(ctx);
    for (int i = 0; i < dx.size(); ++i) {
      const float y = kept.y.data()[i], up = (is_last(chunk) ? y : dy.data()[i]) * (1 - y * y);
      gradients[chunk] += up * kept.x.data()[i];
      dx.data()[i] = up * weights[chunk];
    }
    return is_first(chunk) ? gradient() : std::move(dx);
  }
};

int main() try {
  const pl::schedule plan = pl::make_schedule<pl::interleaved<2>>(/*ranks=*/2, /*microbatches=*/4);
  const pl::mesh<pl::axis<pl::pp, 2>> mesh;
  pl::threads::run(2, [&](pl::threads::communicator all) {
    pl::pipeline_world ranks(mesh.shape(), pl::any_communicator(all));
    pl::cpu device;
    const pl::context<pl::cpu> ctx{device, ranks.stage(), pl::sizes_of<pl::batch, pl::hidden>(2, 4)};
    own_stages stages{plan.shape, all.rank()};
    pl::step_executor<pl::cpu> executor(ranks.along(), plan);
    for (int step = 0; step < 3; ++step) {
      stages.loss = 0, stages.gradients = {0, 0};
      executor.run(ctx, stages);
      for (int chunk = 0; chunk < 2; ++chunk) stages.weights[chunk] -= 0.05f * stages.gradients[chunk];
      if (all.rank() == 1) std::printf("step %d  loss %.4f\n", step, stages.loss);
    }
  });
} catch (const pl::error& e) {
  std::fprintf(stderr, "06_pipeline: %s\n", e.what());
  return 1;
}
