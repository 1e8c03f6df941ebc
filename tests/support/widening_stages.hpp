#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "plait/parallel/executor.hpp"
#include "plait/schedule/generators.hpp"

/// A pipeline of stages that compute a few numbers each. Every stage sends one number more than it receives.
namespace plait::test {

/// A message: a few numbers in the device's memory.
struct numbers {
  using value_type = double;
  buffer<cpu> memory;
  std::size_t count = 0;

  numbers() = default;
  numbers(const context<cpu>& ctx, std::size_t n) : memory(make_buffer<double>(ctx.device, n)), count(n) {}
  double* data() { return memory.data<double>(); }
  std::int64_t size() const { return static_cast<std::int64_t>(count); }
  explicit operator bool() const { return count > 0; }
};

/// Stage s takes s + 2 numbers and gives s + 3: each output is weight * (sum of inputs) + its index. The first stage
/// makes its input from the microbatch; the loss is the sum of the last output.
struct widening {
  using activation = numbers;
  using gradient = numbers;
  struct saved {
    std::vector<double> x;
  };

  const pipeline_shape& shape;
  int rank;
  std::vector<double> weights;  ///< of each chunk
  std::vector<double> gradients;
  std::vector<int> finished_at;  ///< the number of passes of each chunk when it was finished
  std::vector<int> passes;
  double loss = 0;
  int kept = 0, most_kept = 0;

  widening(const pipeline_shape& s, int r) : shape(s), rank(r) {
    for (int c = 0; c < s.chunks; ++c) weights.push_back(0.5 + 0.1 * s.stage_of(r, c));
    gradients.resize(weights.size());
    finished_at.resize(weights.size(), -1);
    passes.resize(weights.size());
  }
  std::size_t width(int stage) const { return static_cast<std::size_t>(stage) + 2; }
  numbers input(const context<cpu>& ctx, int chunk) { return {ctx, width(shape.stage_of(rank, chunk))}; }
  numbers output_gradient(const context<cpu>& ctx, int chunk) { return {ctx, width(shape.stage_of(rank, chunk) + 1)}; }

  numbers forward(const context<cpu>& ctx, int chunk, int microbatch, numbers x, saved* keep) {
    const int stage = shape.stage_of(rank, chunk);
    if (stage == 0) {
      REQUIRE(!x);
      x = numbers(ctx, width(0));
      for (std::size_t i = 0; i < x.count; ++i) x.data()[i] = microbatch + 0.25 * static_cast<double>(i);
    }
    REQUIRE(x.count == width(stage));
    double sum = 0;
    for (std::size_t i = 0; i < x.count; ++i) sum += x.data()[i];
    numbers y(ctx, width(stage + 1));
    for (std::size_t i = 0; i < y.count; ++i)
      y.data()[i] = weights[static_cast<std::size_t>(chunk)] * sum + static_cast<double>(i);
    if (keep) {
      keep->x.assign(x.data(), x.data() + x.count);
      most_kept = std::max(most_kept, ++kept);
    }
    if (stage + 1 < shape.stages()) return y;
    for (std::size_t i = 0; i < y.count; ++i) loss += y.data()[i];
    return {};
  }
  numbers backward(const context<cpu>& ctx, int chunk, int, saved& keep, numbers dy, weight_work* deferred) {
    const int stage = shape.stage_of(rank, chunk);
    const auto at = static_cast<std::size_t>(chunk);
    double up = 0;
    if (stage + 1 == shape.stages()) {
      REQUIRE(!dy);
      up = static_cast<double>(width(stage + 1));
    } else {
      REQUIRE(dy.count == width(stage + 1));
      for (std::size_t i = 0; i < dy.count; ++i) up += dy.data()[i];
    }
    REQUIRE(keep.x.size() == width(stage));
    microbatch<cpu> mb(ctx);
    mb.deferred = deferred;
    mb.on_weights([this, at, up, &keep] {
      for (double v : keep.x) gradients[at] += up * v;
      ++passes[at];
      --kept;
    });
    if (stage == 0) return {};
    numbers dx(ctx, width(stage));
    for (std::size_t i = 0; i < dx.count; ++i) dx.data()[i] = up * weights[at];
    return dx;
  }
  void perform(const context<cpu>&, const step_entry& e) {
    if (e.op != step_op::reduce) return;
    const int chunk = shape.chunk_of(e.unit);  // each stage is one unit
    REQUIRE(finished_at[static_cast<std::size_t>(chunk)] == -1);
    finished_at[static_cast<std::size_t>(chunk)] = passes[static_cast<std::size_t>(chunk)];
  }
};
static_assert(pipeline_stages<widening, cpu>);

/// The order of gpipe. With `split`, backward passes have two halves, and those of weights come last.
inline schedule all_forward_all_backward(int ranks, int chunks, int microbatches, stage_placement placement,
                                         bool split) {
  const pipeline_shape shape{ranks, chunks, microbatches, placement};
  schedule plan = forward_schedule(shape, microbatches);
  for (int wave = 0; wave < microbatches + shape.stages() - 1; ++wave)
    for (int stage = 0; stage < shape.stages(); ++stage) {
      const int microbatch = wave - (shape.stages() - 1 - stage), chunk = shape.chunk_of(stage);
      if (microbatch < 0 || microbatch >= microbatches) continue;
      plan.order[static_cast<std::size_t>(shape.rank_of(stage))].push_back(split ? input_backward_of(chunk, microbatch)
                                                                                 : backward_of(chunk, microbatch));
    }
  for (int stage = 0; split && stage < shape.stages(); ++stage)
    for (int microbatch = microbatches; microbatch-- > 0;)
      plan.order[static_cast<std::size_t>(shape.rank_of(stage))].push_back(
          weight_backward_of(shape.chunk_of(stage), microbatch));
  return plan;
}

}  // namespace plait::test
