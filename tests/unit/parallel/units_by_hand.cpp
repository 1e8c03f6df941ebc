// ZeRO in a user's training loop, with layers but without tokens and an embedding: parameter_units called directly.
#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/kernels/cpu/random.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/linear.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "plait/parallel/units.hpp"
#include "support/on_mesh.hpp"

using namespace plait;

namespace {

using features = spec<shard<batch, dp>, hidden, invariant<tp>>;
using wide = spec<shard<batch, dp>, shard<ffn, tp>>;
struct up {
  using input = features;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = wide;
  static constexpr bool bias = true;
};
struct down {
  using input = wide;
  using weight = spec<hidden, shard<ffn, tp>>;
  using output = features;
};
using block = sequential<linear<double, up>, linear<double, down>>;

constexpr zero_level all_levels[] = {zero_level::replicated, zero_level::optimizer, zero_level::gradients,
                                     zero_level::parameters};

/// Calls that a loop may forget or repeat.
enum class mistake {
  none,
  no_gather,
  no_gradients,
  no_reduction,
  reduce_twice,
  add_after_reduce,
  no_finish,
  finish_twice,
  abandon
};

/// Losses of four steps that learn y = x, with two blocks, each a unit.
std::vector<double> train(std::int64_t data, std::int64_t columns, zero_level level, mistake made = mistake::none,
                          const data_axes& axes = {}) {
  const mesh<axis<dp>, axis<tp>> m(data, columns);
  std::vector<double> losses;
  test::on_mesh(m, sizes_of<batch, hidden, ffn>(16, 6, 20), 7, [&](const context<cpu>& ctx) {
    std::vector<block> blocks;
    for (const char* name : {"first", "second"})
      blocks.emplace_back(linear<double, up>(ctx, std::string(name) + ".up"),
                          linear<double, down>(ctx, std::string(name) + ".down"));
    parameter_units<double, cpu> units(ctx, level, axes);
    for (block& b : blocks) units.add(ctx, 0, [&](auto&& f) { b.visit(f); });
    for (block& b : blocks) b.visit([&](auto& p) { p.initialize(ctx); });
    adamw<double> optimizer;
    const bool gathers = level == zero_level::parameters && made != mistake::no_gather;

    for (int step = 0; step < 4; ++step) {
      tensor<double, features> x(ctx);
      kernels::fill_normal(ctx.device, x.data(), x.part(), 7, static_cast<std::uint64_t>(step), 0.0, 1.0);
      block::saved kept[2];
      std::vector<tensor<double, features>> between;
      units.begin_step(ctx);
      for (int unit = 0; unit < 2; ++unit) {
        if (gathers) units.gather(ctx, unit);
        units.enter(ctx, unit, false);
        between.push_back(
            blocks[static_cast<std::size_t>(unit)].forward(ctx, unit == 0 ? x : between.back(), &kept[unit]));
        if (gathers) units.release(unit);
      }
      tensor<double, dual_t<features>> d(ctx);
      double loss = 0;
      for (std::int64_t i = 0; i < x.size(); ++i) {
        const double error = between.back().data()[i] - x.data()[i];
        loss += error * error / (16 * 6);
        d.data()[i] = 2 * error / (16 * 6);
      }
      for (int unit = 1; unit >= 0; --unit) {
        if (gathers) units.gather(ctx, unit);
        units.enter(ctx, unit, made != mistake::no_gradients);
        d = blocks[static_cast<std::size_t>(unit)].backward(ctx, unit == 0 ? x : between[0], kept[unit], d);
        if (made != mistake::no_reduction) units.reduce(ctx, unit);
        if (made == mistake::reduce_twice) units.reduce(ctx, unit);
        if (made == mistake::add_after_reduce)
          blocks[static_cast<std::size_t>(unit)].backward(ctx, unit == 0 ? x : between[0], kept[unit], d);
        if (gathers) units.release(unit);
      }
      if (made == mistake::abandon && step == 1) {  // as if an exception had been thrown here
        units.abandon_step();
        continue;
      }
      decltype(units)::gradients reduced;
      const int last = made == mistake::no_reduction ? -1 : made == mistake::no_finish ? 0 : 1;
      for (int unit = last; unit >= 0; --unit) units.finish_reduction(ctx, unit, reduced);
      if (made == mistake::finish_twice) units.finish_reduction(ctx, 0, reduced);
      optimizer.begin_step(ctx, 1e-2);
      for (auto& g : reduced) optimizer.update(ctx, std::move(g));
      if (data > 1) ctx.ranks.group(axis_list(axis_of<dp>)).all_reduce(&loss, &loss, 1, dtype::f64, reduce_op::sum);
      if (ctx.ranks.rank() == 0) losses.push_back(loss);
    }
  });
  return losses;
}

void check_near(const std::vector<double>& losses, const std::vector<double>& one) {
  REQUIRE(losses.size() == one.size());
  for (std::size_t i = 0; i < one.size(); ++i) CHECK(losses[i] == doctest::Approx(one[i]).epsilon(1e-10));
}

}  // namespace

TEST_CASE("a user's loop has every level of ZeRO, and the losses of one rank") {
  const std::vector<double> one = train(1, 1, zero_level::replicated);
  CHECK(one.back() < one.front());
  for (const auto& [data, tensor_ranks] : {std::pair{2, 1}, {4, 1}, {2, 2}})
    for (const zero_level level : all_levels) {
      CAPTURE(data);
      CAPTURE(tensor_ranks);
      CAPTURE(static_cast<int>(level));
      check_near(train(data, tensor_ranks, level), one);
    }
}

TEST_CASE("calls that such a loop forgets or repeats are refused by name") {
  const auto refused = [](mistake made, zero_level level, const char* text) {
    CAPTURE(text);
    CHECK_THROWS_WITH_AS(train(2, 1, level, made), doctest::Contains(text), error);
  };
  refused(mistake::no_gather, zero_level::parameters, "parameter first.up.weight is used while it is stale");
  for (const zero_level level : all_levels) {
    refused(mistake::no_gradients, level,
            "second.down.weight: a backward pass adds to its gradient, for which data parallelism has lent no memory; "
            "enter(ctx, unit, true) comes before the pass");
    refused(mistake::no_reduction, level, "up.weight: zero_gradient would lose a gradient that passes have added to");
  }
  for (const zero_level level : {zero_level::replicated, zero_level::optimizer, zero_level::gradients}) {
    refused(mistake::reduce_twice, level, "reduce of unit 1, second, whose reduction is under way already");
    refused(mistake::add_after_reduce, level, "second.down.weight: this `saved` was used by a backward pass before");
    refused(mistake::no_finish, level,
            "begin_step of unit 1, second, whose reduction is under way: call finish_reduction before");
    refused(mistake::finish_twice, level, "finish_reduction of unit 0, first, without reduce before it");
  }
}

TEST_CASE("an aborted step leaves nothing behind for the next one, not even reductions in flight") {
  const std::vector<double> one = train(1, 1, zero_level::replicated, mistake::abandon);
  REQUIRE(one.size() == 3);
  CHECK(one.back() < one.front());
  for (const zero_level level : all_levels)
    for (int attempt = 0; attempt < 5; ++attempt) {
      CAPTURE(static_cast<int>(level));
      check_near(train(4, 1, level, mistake::abandon), one);
    }
}

TEST_CASE("if only an axis of copies sums a parameter's gradient, every rank has the whole parameter") {
  // The weights are sharded over tp, over which the pieces of other parameters would be split.
  const data_axes hybrid{.shard = axis_list(axis_of<tp>), .replicate = axis_list(axis_of<dp>)};
  const std::vector<double> one = train(1, 1, zero_level::replicated);
  for (const zero_level level : all_levels) {
    CAPTURE(static_cast<int>(level));
    check_near(train(2, 2, level, mistake::none, hybrid), one);
  }
}

TEST_CASE("a unit in the memory of another is refused by both parameters") {
  test::on_mesh(mesh<axis<dp>, axis<tp>>(2, 1), sizes_of<batch, hidden, ffn>(16, 6, 20), 7,
                [](const context<cpu>& ctx) {
                  std::vector<double> weight(6 * 20), gradient(6 * 20);
                  const auto make = [&](const char* name) {
                    return linear<double, down>(ctx, name, {.memory = {weight.data(), gradient.data()}});
                  };
                  auto first = make("first"), second = make("second");
                  parameter_units<double, cpu> units(ctx, zero_level::replicated, {});
                  units.add(ctx, 0, [&](auto&& f) { first.visit(f); });
                  CHECK_THROWS_WITH_AS(
                      units.add(ctx, 0, [&](auto&& f) { second.visit(f); }),
                      doctest::Contains("the values of parameter second.weight share memory of the caller's with "
                                        "the values of parameter first.weight"),
                      error);
                });
}
