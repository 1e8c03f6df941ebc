// program: prices
// A user's model, the GPT-2 of the examples, is priced from its types: memory, bytes and time.
#include "plait/plan/program_price.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../../../examples/gpt2.hpp"
#include "plait/comm/threads.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/plan/hardware.hpp"
#include "plan_llama/planner/parse_layout.hpp"
#include "plan_llama/planner/step_time.hpp"

namespace {

using namespace plait;
namespace pp_ = plait::planner;

constexpr std::int64_t samples = 2, sequence = 32, rounds = 4;

gpt2::config small() {
  gpt2::config c;
  c.vocab = 512, c.positions = sequence, c.hidden = 128, c.layers = 4, c.heads = 4;
  return c;
}

mesh_shape mesh_of(std::int64_t p, std::int64_t d, std::int64_t t) {
  mesh_shape mesh;
  mesh.add(axis_of<pp>, p), mesh.add(axis_of<dp>, d), mesh.add(axis_of<cp>, 1);
  mesh.add(axis_of<tp>, t), mesh.add(axis_of<tp_rep>, 1);
  return mesh;
}

pp_::program_layout layout_of(const mesh_shape& mesh, const gpt2::config& c, zero_level level) {
  pp_::program_layout l;
  l.mesh = mesh;
  const auto stages = static_cast<int>(mesh.extent(axis_of<pp>));
  l.plan = make_schedule<one_f_one_b>(stages, rounds);
  l.parts = split_layers({std::vector<double>(static_cast<std::size_t>(c.layers), 1.0), 0, 0}, stages);
  l.how.parallel.level = level;
  return l;
}

template <class Precision>
pp_::program_price price_of(const pp_::hardware& h, const pp_::program_layout& l, const gpt2::config& c,
                            std::int64_t length = sequence) {
  using stage = gpt2::model<Precision, megatron_sp, counting_device>;
  return pp_::price_program<stage>(
      h, l,
      [&](const mesh_shape& mesh) {
        return gpt2::sizes<megatron_sp>(c, mesh, samples * mesh.extent(axis_of<dp>), length);
      },
      [&](const context<counting_device>& ctx, stage_layers part, const stage* first) {
        return std::make_unique<stage>(ctx, c, part, first);
      });
}

/// Measurements of the second step of a run.
struct measured {
  std::int64_t peak = 0;
  ledger traffic;
};

std::vector<measured> run_of(const pp_::program_layout& l, const gpt2::config& c) {
  using stage = gpt2::model<float, megatron_sp>;
  std::vector<measured> out(static_cast<std::size_t>(l.mesh.size()));
  threads::run(static_cast<int>(l.mesh.size()), [&](threads::communicator all) {
    pipeline_world ranks(l.mesh, any_communicator(all));
    cpu device;
    const mesh_shape& mesh = ranks.stage().shape();
    const context<cpu> ctx{device, ranks.stage(),
                           gpt2::sizes<megatron_sp>(c, mesh, samples * mesh.extent(axis_of<dp>), sequence), 1};
    pipeline<stage> model(
        ctx, ranks.along(), l.plan, l.parts,
        [&](stage_layers part, const stage* first) { return std::make_unique<stage>(ctx, c, part, first); }, l.how);
    model.visit([&](auto& p) { p.initialize(ctx); });
    adamw<float> optimizer;
    training_step step(ctx, model, optimizer, 1.0);
    for (int i = 0; i < 2; ++i) {
      ctx.ranks.ledger().clear();
      step.load(ctx, 0, [](std::int64_t, host_tokens& ids, host_tokens& labels) {
        for (std::int64_t k = 0; k < ids.size(); ++k)
          ids.data()[k] = labels.data()[k] = static_cast<std::int32_t>(k % 96);
      });
      optimizer.begin_step(ctx, 1e-3);
      device.reset_peak();
      step.run(ctx);
    }
    out[static_cast<std::size_t>(all.rank())] = {static_cast<std::int64_t>(device.peak_bytes()), ctx.ranks.ledger()};
  });
  return out;
}

}  // namespace

TEST_CASE("a user's model takes the priced memory and sends the priced bytes, on every rank of the pipeline") {
  const struct {
    std::int64_t pipeline, data, tensor;
    zero_level level;
  } cases[] = {{1, 1, 1, zero_level::replicated},
               {1, 1, 4, zero_level::replicated},
               {2, 1, 2, zero_level::replicated},
               {2, 2, 1, zero_level::optimizer},
               {1, 4, 1, zero_level::parameters}};
  for (const auto& [p, d, t, level] : cases) {
    CAPTURE(p);
    CAPTURE(d);
    CAPTURE(t);
    const pp_::program_layout l = layout_of(mesh_of(p, d, t), small(), level);
    const pp_::program_price price = price_of<float>(pp_::hardware_called("h100", "x"), l, small());
    const std::vector<measured> ran = run_of(l, small());
    REQUIRE(price.ranks.size() == static_cast<std::size_t>(p));
    for (std::int64_t place = 0; place < p; ++place) {
      const measured& real = ran[static_cast<std::size_t>(place * d * t)];
      const pp_::rank_price& priced = price.ranks[static_cast<std::size_t>(place)];
      CHECK(static_cast<double>(priced.peak_bytes) == doctest::Approx(static_cast<double>(real.peak)).epsilon(0.05));
      for (const ledger::row& row : real.traffic.rows) {
        CAPTURE(row.label);
        CHECK(priced.traffic.total(row.label).calls == real.traffic.total(row.label).calls);
        CHECK(priced.traffic.total(row.label).payload == real.traffic.total(row.label).payload);
      }
      CHECK(priced.traffic.total().payload == real.traffic.total().payload);
    }
    CHECK(price.fits);
    CHECK(price.step() > 0);
  }
}

TEST_CASE("messages of a pipeline are priced by its schedule, not with the collectives during passes") {
  pp_::program_layout l = layout_of(mesh_of(2, 1, 1), small(), zero_level::replicated);
  const double few = price_of<float>(pp_::hardware_called("h100", "x"), l, small()).ranks[0].data;
  l.plan = make_schedule<one_f_one_b>(2, 4 * l.plan.shape.microbatches);
  CHECK(price_of<float>(pp_::hardware_called("h100", "x"), l, small()).ranks[0].data ==
        doctest::Approx(few).epsilon(1e-9));
}

TEST_CASE("passes hide the communication of data parallelism, without a pipeline too") {
  const pp_::hardware h = pp_::hardware_called("h100", "x");
  for (const zero_level level : {zero_level::replicated, zero_level::optimizer, zero_level::parameters}) {
    CAPTURE(static_cast<int>(level));
    pp_::program_layout l = layout_of(mesh_of(1, 8, 1), small(), level);
    const pp_::program_price beside = price_of<float>(h, l, small());
    l.overlaps_data = false;
    const pp_::program_price behind = price_of<float>(h, l, small());
    CHECK(behind.exposed == behind.ranks[0].data);
    CHECK(beside.ranks[0].data == behind.ranks[0].data);
    CHECK(beside.exposed < 0.9 * behind.exposed);
    CHECK(beside.exposed > 0.2 * behind.exposed);  // a fourth at least, for four layers
  }
}

TEST_CASE("the sum of a tied embedding's gradients over the ends of a pipeline has a price") {
  const pp_::hardware h = pp_::hardware_called("h100", "x");
  const pp_::program_price price =
      price_of<float>(h, layout_of(mesh_of(4, 1, 1), small(), zero_level::replicated), small());
  const double bytes = 512.0 * 128 * 4;
  CHECK(static_cast<double>(price.ranks[0].traffic.total("pp ends").payload) == bytes);
  const double ends = pp_::collective_seconds(h, pp_::place_group(h, {2, 3}), collective::all_reduce, bytes);
  CHECK(price.ranks[0].data - price.ranks[1].data == doctest::Approx(ends).epsilon(1e-6));
  CHECK(price.ranks[3].data == doctest::Approx(price.ranks[0].data).epsilon(1e-6));
}

TEST_CASE("a user's model takes the time of the formulas for a transformer of its sizes") {
  gpt2::config c;  // GPT-2 small
  c.vocab = 51200, c.positions = 1024;
  const pp_::hardware h = pp_::hardware_called("h100", "x");
  pp_::training_job job;
  job.model = {c.vocab,      c.hidden, c.layers, c.heads, c.heads, c.hidden / c.heads,
               4 * c.hidden, false,    true,     true,    false,   c.positions};
  job.seq = 1024;
  job.program.overlaps_tensor = job.program.async_tensor = false;  // as in this strategy
  for (const char* text : {"dp=1,zero=0", "tp=2,zero=0", "tp=4,dp=2,zero=1", "pp=2,tp=2,dp=2,zero=1", "dp=8,zero=1"}) {
    CAPTURE(std::string(text));
    pp_::training_layout formula = pp_::parse_layout(text, "x");
    formula.microbatch = samples;
    job.global_batch = samples * rounds * formula.dp;
    const pp_::layout_price expected = pp_::price(h, job, formula);
    const pp_::program_price found =
        price_of<bf16>(h, layout_of(mesh_of(formula.pp, formula.dp, formula.tp), c, formula.zero), c, 1024);
    double products = 0, attention = 0;
    for (const pp_::rank_price& r : found.ranks)
      products = std::max(products, r.passes.products), attention = std::max(attention, r.passes.attention);
    CHECK(products == doctest::Approx(expected.seconds.products).epsilon(0.02));
    CHECK(attention == doctest::Approx(expected.seconds.attention).epsilon(0.02));
    CHECK(found.ranks[0].communication == doctest::Approx(expected.seconds.tensor).epsilon(0.1));
    CHECK(found.step() == doctest::Approx(expected.step()).epsilon(0.1));
    CHECK(static_cast<double>(found.peak_bytes) == doctest::Approx(expected.memory.allocated()).epsilon(0.1));
  }
}

TEST_CASE("a program's price falls with more ranks, and reports what has no price and what does not fit") {
  const gpt2::config c = small();
  pp_::hardware h = pp_::hardware_called("h100", "x");
  const auto one = layout_of(mesh_of(1, 1, 1), c, zero_level::replicated);
  CHECK_THROWS_WITH(price_of<double>(h, one, c),
                    "the planner prices products of float and bf16, and the program multiplies in double");
  auto away = one;
  away.how.offload_activations = true;
  CHECK_THROWS_WITH(price_of<float>(h, away, c),
                    "price_program: copies of offloaded activations have no price; legal is offload_activations = 0");
  h.peak[static_cast<std::size_t>(pp_::number_kind::f32)] = 0;
  CHECK_THROWS_WITH(price_of<float>(h, one, c),
                    doctest::Contains("has no products in f32, in which the program multiplies"));
  h = pp_::hardware_called("h100", "x");
  h.reserved = 0, h.memory = static_cast<double>(price_of<float>(h, one, c).peak_bytes) - 1;
  CHECK_FALSE(price_of<float>(h, one, c).fits);
  // Ranks that share a core run one after the other.
  h = pp_::hardware_called("h100", "x");
  const auto four = layout_of(mesh_of(1, 4, 1), c, zero_level::replicated);
  const double separate = price_of<float>(h, four, c).step();
  h.cores = 1;
  CHECK(price_of<float>(h, four, c).step() > 3 * separate);
  const auto stages = layout_of(mesh_of(4, 1, 1), c, zero_level::replicated);
  const double at_once = price_of<float>(h, stages, c).step();
  h.turn = 1e-3;  // a message that has arrived waits for a core
  CHECK(price_of<float>(h, stages, c).step() > at_once + 6e-3);
  h.turn = 0;
  // A pipeline has a bubble, and its passes take at least their sum over the ranks.
  const pp_::program_price piped = price_of<float>(h, layout_of(mesh_of(4, 1, 1), c, zero_level::replicated), c);
  CHECK(piped.bubble > 0);
  CHECK(price_of<float>(h, one, c).bubble == 0);
}
