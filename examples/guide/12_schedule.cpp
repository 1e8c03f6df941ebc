// Adds a pipeline schedule. A group has as many microbatches as there are ranks. A rank runs all forward passes of a
// group, then all its backward passes. The schedule keeps no more activations than 1F1B.
#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/parallel/executor.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/simulate.hpp"
#include "plait/schedule/verified.hpp"
#include "plait/tensor/tensor.hpp"

namespace pl = plait;

struct grouped {
  static constexpr std::string_view name = "grouped";
  static constexpr pl::schedule make(const pl::pipeline_shape& shape) {
    pl::schedule s{name, shape, {}};
    for (int rank = 0; rank < shape.ranks; ++rank) {
      std::vector<pl::action> order;
      for (int first = 0; first < shape.microbatches; first += shape.ranks) {
        const int last = std::min(first + shape.ranks, shape.microbatches);
        for (int i = first; i < last; ++i) order.push_back(pl::forward_of(0, i));
        for (int i = first; i < last; ++i) order.push_back(pl::backward_of(0, i));
      }
      s.order.push_back(order);
    }
    return s;
  }
};
static_assert(pl::verify<grouped, pl::pipeline_ranks<4>, pl::microbatches<16>, pl::activations_at_most<4>>());

/// The stages of the pipeline: y = w x, one weight on each rank.
struct scales {
  using rows = pl::spec<pl::batch, pl::hidden>;
  using activation = pl::tensor<float, rows>;
  using gradient = pl::tensor<float, pl::dual_t<rows>>;
  using saved = activation;

  bool first, last;
  float weight = 2, sum = 0;  // the weight and its gradient

  activation input(const pl::context<pl::cpu>& ctx, int) { return activation(ctx); }
  gradient output_gradient(const pl::context<pl::cpu>& ctx, int) { return gradient(ctx); }
  activation forward(const pl::context<pl::cpu>& ctx, int, int microbatch, activation x, saved* keep) {
    if (first) x = activation(ctx);
    activation y(ctx);
    for (int i = 0; i < y.size(); ++i) {
      if (first) x.data()[i] = static_cast<float>(microbatch + i);
      y.data()[i] = weight * x.data()[i];
    }
    if (keep) *keep = std::move(x);
    return last ? activation() : std::move(y);
  }
  gradient backward(const pl::context<pl::cpu>& ctx, int, int, saved& x, gradient dy, pl::weight_work*) {
    gradient dx(ctx);
    for (int i = 0; i < dx.size(); ++i) {
      const float up = last ? 1 : dy.data()[i];  // the loss is the sum of all outputs
      sum += up * x.data()[i];
      dx.data()[i] = up * weight;
    }
    return first ? gradient() : std::move(dx);
  }
};

int main() try {
  const pl::schedule plan = pl::make_schedule<grouped>(/*ranks=*/4, /*microbatches=*/8);
  for (const pl::schedule& s : {pl::make_schedule<pl::gpipe>(4, 8), pl::make_schedule<pl::one_f_one_b>(4, 8), plan})
    std::printf("%-8s %4.1f %% idle, at most %g activations\n", s.name.text,
                100 * pl::simulate(s, pl::schedule_costs{}).makespan_idle(), pl::peak_activations(s));

  pl::schedule wrong = plan;
  std::swap(wrong.order[3][0], wrong.order[3][4]);
  std::printf("a mistake: %s\n", pl::describe(pl::verify(wrong)).c_str());

  const pl::mesh<pl::axis<pl::pp, 4>> mesh;
  pl::threads::run(4, [&](pl::threads::communicator all) {
    pl::pipeline_world ranks(mesh.shape(), pl::any_communicator(all));
    pl::cpu device;
    const pl::context<pl::cpu> ctx{device, ranks.stage(), pl::sizes_of<pl::batch, pl::hidden>(1, 2)};
    scales stage{all.rank() == 0, all.rank() == 3};
    pl::step_executor<pl::cpu>(ranks.along(), plan).run(ctx, stage);
    // The inputs are k and k + 1 for 8 microbatches k: their sum is 64. Three other stages double it each.
    if (all.rank() == 0) std::printf("the gradient of the first weight: %g\n", stage.sum);
  });
} catch (const pl::error& e) {
  std::fprintf(stderr, "12_schedule: %s\n", e.what());
  return 1;
}
