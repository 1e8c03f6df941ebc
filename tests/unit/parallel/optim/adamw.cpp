// program: training_step
// Compares AdamW and clipping with PyTorch, and the gradient norm on meshes with one rank.
#include "plait/parallel/optim/adamw.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "plait/nn/strategy.hpp"
#include "plait/parallel/gradient_norm.hpp"
#include "support/on_mesh.hpp"
#include "support/test_data.hpp"

using namespace plait;

namespace {

struct matrix_rows : dim_tag<"matrix_rows"> {};
struct matrix_cols : dim_tag<"matrix_cols"> {};
struct vector_dim : dim_tag<"vector_dim"> {};
using two = plait::mesh<axis<dp>, axis<tp>>;

std::vector<double> numbers(const nlohmann::json& flat) { return flat.at("values").get<std::vector<double>>(); }

void check_close(const double* a, const std::vector<double>& b, double tolerance) {
  for (std::size_t i = 0; i < b.size(); ++i) CHECK(std::abs(a[i] - b[i]) <= tolerance * std::max(1.0, std::abs(b[i])));
}

/// Runs the golden steps; every rank of `ranks` along dp stores the same parameters and makes the same steps.
void run_golden(const nlohmann::json& golden, const nlohmann::json& steps, double limit, std::int64_t ranks) {
  const dim_sizes sizes = sizes_of<matrix_rows, matrix_cols, vector_dim>(5, 3, 7);
  test::on_mesh(two{ranks, 1}, sizes, 1, [&](const context<cpu>& ctx) {
    const auto& s = golden.at("settings");
    adamw<double> optimizer({s.at("beta1"), s.at("beta2"), s.at("eps"), s.at("weight_decay")});
    std::vector<double> matrix = numbers(golden.at("start").at("matrix")),
                        vector = numbers(golden.at("start").at("vector"));
    std::vector<double> dmatrix(15), dvector(7);
    const layout m = layout_v<spec<matrix_rows, matrix_cols>>, v = layout_v<spec<vector_dim>>;
    const layout alike = layout_v<spec<batch, invariant<dp, tp>>>;  // its gradient is the same on all ranks
    parameter<double, cpu> pm(ctx, {"matrix", {5, 3}, {}, true}, m, m, alike,
                              {ctx.device, 15, matrix.data(), dmatrix.data()});
    parameter<double, cpu> pv(ctx, {"vector", {7}, {}, false}, v, v, alike,
                              {ctx.device, 7, vector.data(), dvector.data()});
    for (std::size_t i = 0; i < steps.size(); ++i) {
      std::ranges::copy(numbers(golden.at("gradients")[i].at("matrix")), dmatrix.begin());
      std::ranges::copy(numbers(golden.at("gradients")[i].at("vector")), dvector.begin());
      pm.begin_gradient();
      pv.begin_gradient();
      auto gm = pm.reduce(ctx), gv = pv.reduce(ctx);
      gradient_norm<double> norm;
      norm.add(ctx, gm);
      norm.add(ctx, gv);
      const double total = norm.total(ctx);
      CHECK(total == doctest::Approx(steps[i].at("grad_norm").get<double>()).epsilon(1e-13));
      optimizer.begin_step(ctx, s.at("lr"), clip_factor(total, limit));
      optimizer.update(ctx, std::move(gm));
      optimizer.update(ctx, std::move(gv));
      check_close(matrix.data(), numbers(steps[i].at("matrix")), 1e-13);
      check_close(vector.data(), numbers(steps[i].at("vector")), 1e-13);
    }
    CHECK(optimizer.step() == static_cast<std::int64_t>(steps.size()));
  });
}

}  // namespace

TEST_CASE("five steps of PyTorch's AdamW, with and without clipping") {
  std::ifstream file(plait::test::test_data() + "/adamw.json");
  const auto golden = nlohmann::json::parse(file);
  for (const std::int64_t ranks : {1, 2}) {
    run_golden(golden, golden.at("unclipped"), 0.0, ranks);
    run_golden(golden, golden.at("clipped"), golden.at("max_norm"), ranks);
  }
}

TEST_CASE("the corrections of bias count the updates of each parameter") {
  struct one : dim_tag<"one"> {};
  using whole = spec<one, invariant<dp, tp>>;
  test::on_mesh(two{1, 1}, sizes_of<one>(1), 1, [](const context<cpu>& ctx) {
    constexpr double rate = 0.01, beta1 = 0.9, beta2 = 0.999;
    // A scalar under Adam as in the paper, by the number of its own updates.
    struct plain {
      double value = 1, m = 0, v = 0;
      int updates = 0;
      void update(double g) {
        ++updates;
        m = beta1 * m + (1 - beta1) * g, v = beta2 * v + (1 - beta2) * g * g;
        value -= rate * (m / (1 - std::pow(beta1, updates))) / (std::sqrt(v / (1 - std::pow(beta2, updates))) + 1e-8);
      }
    };
    const adamw_options options{.beta1 = beta1, .beta2 = beta2, .weight_decay = 0};
    adamw<double> optimizer(options);
    std::map<std::string, plain> expected;
    std::map<std::string, tensor<double, whole, cpu>> values;
    tensor<double, whole, cpu> gradient(ctx);
    const auto update = [&](const std::string& name, double g) {
      if (!values.contains(name)) values.emplace(name, ctx).first->second.data()[0] = 1;
      gradient.data()[0] = g;
      optimizer.update(ctx, name, values.at(name), gradient, false);
      expected[name].update(g);
      CHECK(values.at(name).data()[0] == doctest::Approx(expected[name].value).epsilon(1e-12));
    };
    const auto steps = [&](int first, int last) {
      for (int step = first; step <= last; ++step) {
        optimizer.begin_step(ctx, rate);
        update("every step", 0.5 + 0.1 * step);
        if (step % 3 == 0) update("every third", 0.3 * step);
        if (step >= 7) update("from the seventh on", 1.0 / step);
      }
    };
    steps(1, 12);
    CHECK(optimizer.missed_steps() ==
          std::map<std::string, std::int64_t>{{"every third", 8}, {"from the seventh on", 6}});
    // A replayed graph calls begin_step only; its steps count for all parameters that it updates.
    for (int i = 0; i < 4; ++i) optimizer.begin_step(ctx, rate);
    CHECK(optimizer.missed_steps() ==
          std::map<std::string, std::int64_t>{{"every third", 8}, {"from the seventh on", 6}});
    // No parameter has missed a skipped step, also if the skip is found out later.
    const kernels::clip_numbers skip{.norm = 0, .factor = 0, .update = 0, .skips = 1};
    const auto skipped = [&](const std::vector<std::string>& updated) {
      optimizer.begin_step(ctx, rate);
      optimizer.clip_by(ctx, &skip);
      gradient.data()[0] = 1;
      for (const std::string& name : updated) optimizer.update(ctx, name, values.at(name), gradient, false);
    };
    const std::vector<std::string> all{"every step", "every third"}, some{"every step"};
    const std::vector<std::vector<std::vector<std::string>>> found_out{
        {some}, {all, some}, {some, all}, {all, some, all}};
    for (const auto& steps_before : found_out) {
      for (const auto& updated : steps_before) skipped(updated);
      for (std::size_t i = 0; i < steps_before.size(); ++i) optimizer.forget_step();
      CHECK(optimizer.missed_steps() ==
            std::map<std::string, std::int64_t>{{"every third", 8}, {"from the seventh on", 6}});
    }
    for (auto& [name, plain] : expected) plain.updates += 4;  // by the graph
    optimizer.begin_step(ctx, rate);
    update("every step", 1.7), update("every third", 0.1), update("from the seventh on", 0.2);
    // Another optimizer continues from this one's state.
    adamw<double> other(options);
    other.resume(optimizer.step(), optimizer.missed_steps());
    other.begin_step(ctx, rate);
    CHECK(other.missed_steps().empty());  // for the parameters that it has updated
  });
}

TEST_CASE("the state of one model cannot be used for another") {
  test::on_mesh(two{1, 1}, sizes_of<vector_dim>(2), 1, [](const context<cpu>& ctx) {
    const layout lies = layout_v<spec<vector_dim>>, alike = layout_v<spec<batch, invariant<dp, tp>>>;
    std::vector<double> values(2, 1.0), gradient(2, 0.5);
    const auto made = [&] {
      return std::make_unique<parameter<double, cpu>>(
          ctx, parameter_info{"weight", {2}, {}, false}, lies, lies, alike,
          parameter_place<double, cpu>{ctx.device, 2, values.data(), gradient.data()});
    };
    auto one = made(), other = made();
    adamw<double> optimizer;
    const auto update = [&](parameter<double, cpu>& p) {
      optimizer.begin_step(ctx, 1e-2);
      p.begin_gradient();
      optimizer.update(ctx, p.reduce(ctx));
    };
    update(*one);
    CHECK_THROWS_WITH(
        update(*other),
        "adamw: two models have a parameter weight, and what this optimizer keeps is of the first one; each "
        "model needs an optimizer of its own");
    one.reset();  // a newly made model continues with the state
    auto again = made();
    update(*again);
  });
}

TEST_CASE("the norm counts every element once, for every way of storing it") {
  for (const auto& [dp_ranks, tp_ranks] : {std::pair{1, 1}, {2, 1}, {1, 2}, {2, 2}, {4, 2}}) {
    test::on_mesh(two{dp_ranks, tp_ranks}, sizes_of<matrix_rows, matrix_cols>(8, 8), 1, [&](const context<cpu>& ctx) {
      std::vector<double> value(64, 0), gradient(64, 1.0);
      gradient_norm<double> norm;
      std::deque<parameter<double, cpu>> all;
      for (const layout& stored :
           {layout_v<spec<matrix_rows, matrix_cols>>, layout_v<spec<shard<matrix_rows, tp>, matrix_cols>>,
            layout_v<spec<shard<matrix_rows, tp>, shard<matrix_cols, dp>>>,
            layout_v<spec<shard<matrix_rows, tp, dp>, matrix_cols>>,
            layout_v<spec<matrix_rows, matrix_cols, invariant<dp, tp>>>}) {
        const layout alike = layout_v<spec<batch, invariant<dp, tp>>>;
        all.emplace_back(ctx, parameter_info{"p", {8, 8}, {}, true}, stored, stored, alike,
                         parameter_place<double, cpu>(ctx.device, 64, value.data(), gradient.data()));
        norm.add(ctx, all.back().reduce(ctx));
      }
      CHECK(norm.total(ctx) == doctest::Approx(std::sqrt(5 * 64.0)).epsilon(1e-14));
    });
  }
}

TEST_CASE("clip factor") {
  CHECK(clip_factor(2.0, 1.0) == doctest::Approx(1.0 / (2.0 + 1e-6)).epsilon(1e-15));
  CHECK(clip_factor(0.5, 1.0) == 1.0);
  CHECK(clip_factor(1e9, 0.0) == 1.0);
  CHECK(clip_factor(0.0, 1.0) == 1.0);
  CHECK_THROWS_WITH_AS(static_cast<void>(clip_factor(std::nan(""), 1.0)),
                       doctest::Contains("clip_factor: the gradient norm is nan; an update would spoil every weight"),
                       error);
  CHECK_THROWS_AS(static_cast<void>(clip_factor(INFINITY, 0.0)), error);
}

TEST_CASE("settings out of range are refused by name") {
  const auto text = [](adamw_options o) { return test::text_thrown_by([&] { adamw<float> optimizer(o); }); };
  CHECK(text({}).empty());
  CHECK(text({1.0, 0.95, 1e-8, 0.1}).find("adamw: beta1 = 1,") == 0);
  CHECK(text({0.9, -0.5, 1e-8, 0.1}).find("adamw: beta2 = -0.5") == 0);
  CHECK(text({0.9, 0.95, 0.0, 0.1}).find("adamw: epsilon = 0") == 0);
  CHECK(text({0.9, 0.95, 1e-8, -1.0}).find("adamw: weight_decay = -1") == 0);
}
