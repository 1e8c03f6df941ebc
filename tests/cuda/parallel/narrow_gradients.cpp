// timeout: 300
// Compares training with gradients in bf16 on a GPU with the cpu: every optimizer that supports them, gradients that
// ranks sum in bf16 or in float, and tensor ranks.
#include <doctest/doctest.h>

#include "plait/comm/threads/cuda.hpp"
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using narrow = bf16_gradients_float_masters;

scenario small_scenario(optimizer_options optimizer) {
  scenario s{small_config(4, 2)};
  s.config.hidden = 32, s.config.head_dim = 8, s.config.ffn = 64, s.config.layers = 1;
  s.batch = 8, s.microbatches = 2, s.steps = 2;
  s.optimizer = optimizer;
  return s;
}

rank_outcome train_on_cpu(const scenario& s) { return train_one<narrow, megatron_sp>(s); }

std::vector<rank_outcome> train_on_gpu(const scenario& s, std::int64_t dp_ranks, std::int64_t tp_ranks) {
  const megatron_sp::mesh mesh{dp_ranks, 1, tp_ranks, 1};
  std::vector<rank_outcome> all(static_cast<std::size_t>(mesh.size()));
  threads::run(static_cast<int>(mesh.size()), cuda::options{}, [&](threads::communicator c, cuda& device) {
    world ranks(mesh.shape(), c);
    all[static_cast<std::size_t>(ranks.rank())] = train_rank<narrow, megatron_sp>(s, ranks, device);
  });
  return all;
}

/// Both round activations and gradients to bf16 about ten times; master weights keep exact updates.
void check_near(const rank_outcome& expected, const rank_outcome& got) {
  REQUIRE(got.steps.size() == expected.steps.size());
  for (std::size_t i = 0; i < expected.steps.size(); ++i) {
    CHECK(got.steps[i].loss == doctest::Approx(expected.steps[i].loss).epsilon(1e-3));
    CHECK(got.steps[i].gradient_norm == doctest::Approx(expected.steps[i].gradient_norm).epsilon(1e-2));
  }
  check_tensors(got.initial, expected.initial, 1e-6, "initial value");
  check_tensors(got.first_gradients, expected.first_gradients, 2e-2, "gradient of the first step");
  check_tensors(got.weights, expected.weights, 2e-2, "weight after the last step");
}

}  // namespace

TEST_CASE("every optimizer trains with gradients in bf16 on a GPU as on the processor") {
  const optimizer_options all[] = {adamw_options{}, adamw_options{.moments = moment_type::bf16},
                                   adamw_options{.moments = moment_type::int8}, muon_options{},
                                   muon_options{.adamw = {.moments = moment_type::bf16}}};
  for (const optimizer_options& optimizer : all) {
    CAPTURE(optimizer.index());
    const scenario s = small_scenario(optimizer);
    const rank_outcome got = std::move(train_on_gpu(s, 1, 1)[0]);
    check_near(train_on_cpu(s), got);
    CHECK(got.saved_measured == got.saved_predicted);
    std::size_t in_bf16 = 0;
    for (const named_values& gradient : got.first_gradients)
      for (const double value : gradient.values) in_bf16 += converted<double>(converted<bf16>(value)) == value;
    std::size_t elements = 0;
    for (const named_values& gradient : got.first_gradients) elements += gradient.values.size();
    CHECK(in_bf16 == elements);
  }
}

TEST_CASE("ranks that sum bf16 gradients in bf16 or in float train as one rank") {
  scenario s = small_scenario(adamw_options{.moments = moment_type::bf16});
  const rank_outcome expected = train_on_cpu(s);
  for (const gradient_wire wire : {gradient_wire::full, gradient_wire::f32}) {
    s.parallel.wire = wire;
    for (const zero_level level : {zero_level::replicated, zero_level::gradients}) {
      s.parallel.parallel.level = level;
      for (const rank_outcome& r : train_on_gpu(s, 2, 2)) {
        check_near(expected, r);
        CHECK(compare_ledgers(r.measured, r.predicted, true).text() == "");
      }
    }
  }
}
