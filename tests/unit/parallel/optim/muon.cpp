// program: training_step
// Compares Muon over several steps with loops, for every layout of matrices, and the Newton-Schulz iteration alone;
// also the parameters that it takes, and errors.
#include "plait/parallel/optim/muon.hpp"

#include <doctest/doctest.h>

#include <deque>
#include <limits>

#include "plait/comm/threads.hpp"
#include "plait/parallel/optim/optimizer.hpp"
#include "support/layer_check.hpp"
#include "support/llama_parity.hpp"
#include "support/on_mesh.hpp"
#include "support/plain_muon.hpp"

using namespace plait;
using namespace plait::test;

namespace {

static_assert(optimizer<muon<double>, double, cpu> && optimizer<adamw<double>, double, cpu>);
static_assert(!optimizer<muon<float>, double, cpu>, "of another precision");
static_assert(optimizer<optimizer_ref<double, cpu>, double, cpu>);

struct grid_rows : dim_tag<"grid_rows"> {};
struct grid_columns : dim_tag<"grid_columns"> {};
using two = plait::mesh<axis<dp>, axis<tp>>;

/// A parameter of a test: its logical shape, and how it is stored.
struct tested {
  const char* name;
  std::vector<std::int64_t> shape;
  layout stored;
  bool decays = true, hidden_layer = true, stack = false;
  bool by_muon() const { return hidden_layer && shape.size() == (stack ? 3 : 2); }
};

/// Matrices that are whole, sharded by either dim, by both, or by one dim over two axes; one whose three dims are two
/// in its shape; stacks of matrices; and four parameters that AdamW updates.
std::vector<tested> all_tested() {
  return {{"whole", {12, 8}, layout_v<spec<grid_rows, grid_columns>>},
          {"by rows", {12, 8}, layout_v<spec<shard<grid_rows, tp>, grid_columns>>, false},
          {"by columns", {12, 8}, layout_v<spec<grid_rows, shard<grid_columns, tp>>>},
          {"more columns", {8, 12}, layout_v<spec<shard<grid_columns, tp>, grid_rows>>},
          {"square", {8, 8}, layout_v<spec<shard<heads, tp>, head_dim, grid_columns>>},
          {"by both", {12, 8}, layout_v<spec<shard<grid_rows, tp>, shard<grid_columns, dp>>>},
          {"over both", {8, 12}, layout_v<spec<shard<grid_columns, tp, dp>, grid_rows>>},
          {"over dp", {8, 12}, layout_v<spec<grid_columns, shard<grid_rows, dp>>>},
          {"a table", {12, 8}, layout_v<spec<shard<grid_rows, tp>, grid_columns>>, true, false},
          {"three dims", {4, 2, 8}, layout_v<spec<shard<heads, tp>, head_dim, grid_columns>>},
          {"experts", {4, 12, 8}, layout_v<spec<shard<heads, tp>, grid_rows, grid_columns>>, true, true, true},
          {"sharded experts",
           {4, 8, 12},
           layout_v<spec<shard<heads, dp>, grid_columns, shard<grid_rows, tp>>>,
           true,
           true,
           true},
          {"a norm", {12}, layout_v<spec<grid_rows>>, false}};
}

std::int64_t elements(const tested& t) {
  std::int64_t n = 1;
  for (const std::int64_t extent : t.shape) n *= extent;
  return n;
}

struct run_of_steps {
  std::vector<double> rates = {0.02, 0.03, 0.01};
  int skipped = -1;         ///< there is an extra step before this one, with gradients that are not finite
  bool one_by_one = false;  ///< each parameter is updated separately
};

/// The whole values after the steps, as each rank has them, in the order of all_tested().
std::vector<std::vector<std::vector<double>>> train(const two& mesh, const muon_options& options,
                                                    const run_of_steps& how = {}) {
  std::vector<std::vector<std::vector<double>>> all(static_cast<std::size_t>(mesh.size()));
  const dim_sizes sizes = sizes_of<grid_rows, grid_columns, heads, head_dim>(12, 8, 4, 2);
  on_mesh(mesh, sizes, 1, [&](const context<cpu>& ctx) {
    std::deque<parameter<double, cpu>> parameters;
    const std::vector<tested> list = all_tested();
    const auto put = [&](const tested& t, double* to, const std::vector<double>& whole) {
      const box part = local_box(t.stored, ctx.ranks.shape(), sizes, ctx.ranks.rank());
      box from = part;
      from.offset = {}, from.local = from.global;
      kernels::copy_box(ctx.device, whole.data(), from, to, part, part, sizeof(double));
    };
    for (const tested& t : list) {
      parameter_info info{t.name, t.shape, {}, t.decays, false, t.hidden_layer};
      info.stack = t.stack;
      auto& p =
          parameters.emplace_back(ctx, std::move(info), t.stored, t.stored, layout_v<spec<batch, invariant<dp, tp>>>);
      put(t, p.value(), random_numbers(elements(t), 7));
    }
    muon<double> optimizer(options);
    kernels::clip_numbers clipped{1.0, 0.5, 1.0};
    const auto step = [&](double rate, auto&& gradient_of) {
      std::vector<reduced_gradient<double, cpu>> reduced;
      for (std::size_t i = 0; i < list.size(); ++i) {
        parameters[i].gather(ctx);
        parameters[i].zero_gradient(ctx);
        put(list[i], parameters[i].used_gradient(ctx.device), gradient_of(i));
        reduced.push_back(parameters[i].reduce(ctx));
      }
      optimizer.begin_step(ctx, rate);
      optimizer.clip_by(ctx, &clipped);
      if (!how.one_by_one) return optimizer.update(ctx, reduced);
      for (auto& g : reduced) optimizer.update(ctx, std::move(g));
    };
    for (std::size_t s = 0; s < how.rates.size(); ++s) {
      if (how.skipped == static_cast<int>(s)) {
        clipped = {std::numeric_limits<double>::infinity(), 0.0, 0.0};
        step(1.0, [&](std::size_t i) {
          return std::vector<double>(static_cast<std::size_t>(elements(list[i])),
                                     std::numeric_limits<double>::quiet_NaN());
        });
        optimizer.forget_step();
        clipped = {1.0, 0.5, 1.0};
      }
      step(how.rates[s],
           [&](std::size_t i) { return random_numbers(elements(list[i]), static_cast<unsigned>(100 * s + i)); });
    }
    CHECK(optimizer.step() == static_cast<std::int64_t>(how.rates.size()));
    for (auto& p : parameters)
      all[static_cast<std::size_t>(ctx.ranks.rank())].push_back(gather_whole(ctx, p, std::as_const(p).value()));
  });
  return all;
}

/// The expected values, computed by loops; those of AdamW's parameters, by AdamW.
std::vector<std::vector<double>> expected(const muon_options& options, const run_of_steps& how = {}) {
  std::vector<std::vector<double>> all;
  const std::vector<tested> list = all_tested();
  for (std::size_t i = 0; i < list.size(); ++i) {
    const tested& t = list[i];
    const auto n = static_cast<std::size_t>(elements(t));
    std::vector<double> value = random_numbers(elements(t), 7), m(n), v(n);
    muon_options mine = options;
    if (!t.decays) mine.weight_decay = mine.adamw.weight_decay = 0;
    for (std::size_t s = 0; s < how.rates.size(); ++s) {
      std::vector<double> g = random_numbers(elements(t), static_cast<unsigned>(100 * s + i));
      for (double& x : g) x *= 0.5;
      if (t.by_muon()) {
        const std::size_t last = t.shape.size() - 1;
        const auto one = static_cast<std::size_t>(t.shape[last - 1] * t.shape[last]);
        for (std::size_t at = 0; at < n; at += one) {
          const auto part = [&](const std::vector<double>& of) { return std::vector(&of[at], &of[at] + one); };
          std::vector<double> matrix = part(value), momentum = part(m);
          plain_muon_step(matrix, momentum, part(g), t.shape[last - 1], t.shape[last], how.rates[s], mine);
          std::copy(matrix.begin(), matrix.end(), &value[at]);
          std::copy(momentum.begin(), momentum.end(), &m[at]);
        }
      } else {
        const adamw_options& o = mine.adamw;
        for (std::size_t k = 0; k < n; ++k) {
          m[k] = o.beta1 * m[k] + (1 - o.beta1) * g[k];
          v[k] = o.beta2 * v[k] + (1 - o.beta2) * g[k] * g[k];
          const double power = static_cast<double>(s + 1);
          const double mean = m[k] / (1 - std::pow(o.beta1, power)), square = v[k] / (1 - std::pow(o.beta2, power));
          value[k] -= how.rates[s] * (o.weight_decay * value[k] + mean / (std::sqrt(square) + o.epsilon));
        }
      }
    }
    all.push_back(std::move(value));
  }
  return all;
}

double largest(const std::vector<double>& a, const std::vector<double>& b) {
  double most = a.size() == b.size() ? 0.0 : HUGE_VAL;
  for (std::size_t i = 0; i < b.size() && i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

void check_all(const two& mesh, const muon_options& options, const run_of_steps& how = {}) {
  const auto all = train(mesh, options, how);
  const auto right = expected(options, how);
  for (std::size_t r = 0; r < all.size(); ++r)
    for (std::size_t i = 0; i < right.size(); ++i) {
      INFO("rank " << r << " of " << describe(mesh.shape()) << ", " << all_tested()[i].name);
      CHECK(largest(all[r][i], right[i]) < 1e-10);
    }
}

std::string said_by(const muon_options& o) {
  return text_thrown_by([&] { const muon<float> one(o); });
}

}  // namespace

TEST_CASE("three steps equal loops on one rank, with every option") {
  check_all(two{1, 1}, {});
  check_all(two{1, 1}, {.nesterov = false});
  check_all(two{1, 1}, {.scale = muon_scale::original});
  check_all(two{1, 1}, {.momentum = 0.0, .learning_rate_ratio = 5.0, .weight_decay = 0.3});
  check_all(two{1, 1}, {.newton_schulz = {.steps = 3}, .adamw = {.beta1 = 0.5, .weight_decay = 0.0}});
}

TEST_CASE("three steps equal loops on meshes, where the ranks that store parts share the work") {
  for (const two& mesh : {two{1, 2}, two{2, 1}, two{2, 2}, two{1, 4}, two{4, 1}, two{2, 4}}) check_all(mesh, {});
  check_all(two{2, 2}, {}, {.one_by_one = true});
}

TEST_CASE("a step whose gradients are not finite changes neither a weight nor a momentum") {
  for (const two& mesh : {two{1, 1}, two{2, 2}})
    for (const int skipped : {0, 1, 2}) {
      INFO("before step " << skipped);
      CHECK(train(mesh, {}, {.skipped = skipped}) == train(mesh, {}));
    }
}

TEST_CASE("of a Llama, all matrices except the embedding and the head are hidden") {
  threads::run(1, [](threads::communicator c) {
    world ranks(megatron_sp::mesh{1, 1, 1, 1}.shape(), c);
    cpu device;
    for (const bool tied : {false, true}) {
      llama_config config = small_config(4, 2);
      config.tie_embeddings = tied;
      config.qk_norm = config.attention_bias = true;
      const context<cpu> ctx{device, ranks, llama_sizes<megatron_sp>(config, ranks.shape(), 2, 8), 1};
      llama<double, megatron_sp> model(ctx, config);
      int hidden_ones = 0;
      model.visit([&](auto& p) {
        const bool projection = p.name().ends_with("_proj.weight");
        INFO(p.name());
        CHECK(is_hidden_matrix(p.info()) == projection);
        hidden_ones += projection;
      });
      CHECK(hidden_ones == 7 * config.layers);
    }
  });
}

TEST_CASE("options out of range are refused by name") {
  CHECK(said_by({}).empty());
  CHECK(said_by({.momentum = 1.0}) == "muon: momentum = 1, must be at least 0 and below 1");
  CHECK(said_by({.momentum = std::nan("")}).find("muon: momentum = ") == 0);
  CHECK(said_by({.learning_rate_ratio = 0}) == "muon: learning_rate_ratio = 0, must be positive and finite");
  CHECK(said_by({.weight_decay = -1}) == "muon: weight_decay = -1, must be at least 0");
  CHECK(said_by({.scale = static_cast<muon_scale>(7)}) == "muon: scale = 7, must be original or match_rms_adamw");
  CHECK(said_by({.newton_schulz = {.steps = 0}}) == "muon: newton_schulz.steps = 0, must be at least 1");
  CHECK(said_by({.newton_schulz = {.epsilon = 0}}) == "muon: newton_schulz.epsilon = 0, must be positive");
  CHECK(said_by({.adamw = {.beta1 = 2}}).find("adamw: beta1 = 2") == 0);
}

TEST_CASE("updates out of order are refused by name") {
  const auto failure_of = [](bool begun, int updates) {
    const dim_sizes sizes = sizes_of<grid_rows, grid_columns>(4, 2);
    return error_on_mesh(two{1, 1}, sizes, 1, [&](const context<cpu>& ctx) {
      const layout whole = layout_v<spec<grid_rows, grid_columns>>;
      muon<double> optimizer;
      if (begun) optimizer.begin_step(ctx, 0.1);
      for (int i = 0; i < updates; ++i) {
        parameter<double, cpu> p(ctx, {"up.weight", {4, 2}, {}}, whole, whole,
                                 layout_v<spec<batch, invariant<dp, tp>>>);
        p.zero_gradient(ctx);
        optimizer.update(ctx, p.reduce(ctx));
      }
    });
  };
  CHECK(failure_of(true, 1) == "");
  CHECK(has(failure_of(false, 1), "muon: begin_step comes before the first update"));
  CHECK(has(failure_of(true, 2), "muon: up.weight is updated twice in one step"));
}

// ---- the Newton-Schulz iteration -----------------------------------------------------------------------------------

namespace {

using matrix_shape = std::pair<std::int64_t, std::int64_t>;

/// The largest difference from the reference, for numbers near 1.
template <class T>
double error_of(const matrix_shape& s, const newton_schulz_options& how, double magnitude) {
  cpu device;
  std::vector<double> from = random_numbers(s.first * s.second, 3);
  for (double& x : from) x = static_cast<T>(x * magnitude);
  std::vector<T> x(from.begin(), from.end());
  newton_schulz<T>(device, x.data(), s.first, s.second, how);
  return largest({x.begin(), x.end()}, plain_newton_schulz(from, s.first, s.second, how));
}

}  // namespace

TEST_CASE("every shape equals loops, in double and in float") {
  for (const matrix_shape& s :
       {matrix_shape{1, 1}, {1, 7}, {7, 1}, {5, 5}, {3, 17}, {17, 3}, {33, 32}, {32, 33}, {64, 48}}) {
    INFO(s.first << " x " << s.second);
    for (const double magnitude : {1.0, 1e-6, 1e6}) {
      CHECK(error_of<double>(s, {}, magnitude) < 1e-13);
      CHECK(error_of<float>(s, {}, magnitude) < 1e-5);
    }
    CHECK(error_of<double>(s, {.steps = 2, .a = 1.5, .b = -0.5, .c = 0.0, .epsilon = 0.5}, 1.0) < 1e-13);
  }
}

TEST_CASE("the result is nearly orthogonal") {
  cpu device;
  const std::int64_t rows = 24, columns = 40;
  std::vector<double> x = random_numbers(rows * columns, 8);
  newton_schulz<double>(device, x.data(), rows, columns);
  double most = 0;
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j <= i; ++j) {
      double product = 0;
      for (std::int64_t k = 0; k < columns; ++k)
        product += x[static_cast<std::size_t>(i * columns + k)] * x[static_cast<std::size_t>(j * columns + k)];
      most = std::max(most, std::abs(product - (i == j ? 1.0 : 0.0)));
    }
  CHECK(most < 0.6);  // singular values are between 0.7 and 1.2, and not all 1
  CHECK(most > 0.01);
}

TEST_CASE("zeros stay zeros, and empty matrices need no work") {
  cpu device;
  std::vector<double> x(12, 0.0);
  newton_schulz<double>(device, x.data(), 3, 4);
  CHECK(x == std::vector<double>(12, 0.0));
  newton_schulz<double>(device, x.data(), 0, 4);
  CHECK(x == std::vector<double>(12, 0.0));
}
