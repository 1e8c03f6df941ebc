// program: training
// timeout: 600
// A whole Llama step on the GPU: in float it equals the CPU's, in bf16 it is near it, and ranks that share the GPU have
// the results of one rank.
#include <doctest/doctest.h>

#include "plait/comm/threads/cuda.hpp"
#include "plait/device/cuda.hpp"
#include "plait/schedule/generators.hpp"
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;
using plait::threads::on_one_gpu;

namespace llama_on_gpu {  // files of one program may have helpers of the same name

template <class Precision = float>
model_outcome train_on_cpu(const scenario& s) {
  return train_one<Precision, megatron_sp>(s);
}

template <class Precision>
model_outcome train_on_gpu(const scenario& s) {
  return train_one<Precision, megatron_sp>(s, on_one_gpu{});
}

/// Compares dp x cp x tp ranks that share the GPU with one rank.
void check_on_gpu(const scenario& s, const model_outcome& one, std::int64_t dp_ranks, std::int64_t tp_ranks,
                  std::int64_t cp_ranks = 1) {
  check_ranks<float, megatron_sp>(s, one, mesh_of<megatron_sp>(s, dp_ranks, tp_ranks, cp_ranks), nullptr, on_one_gpu{});
}

scenario small_scenario() {
  scenario s;
  s.config = small_config(8, 2);
  s.config.hidden = 32;
  s.config.head_dim = 8;
  s.config.ffn = 64;
  s.batch = 16;
  s.seq = 16;
  s.microbatches = 2;
  s.steps = 3;
  return s;
}

double largest_difference(const std::vector<named_values>& a, const std::vector<named_values>& b) {
  double most = 0;
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, relative_difference(a[i].values, b[i].values));
  return most;
}

using narrow = bf16_gradients_float_masters;

scenario narrow_scenario(optimizer_options optimizer) {
  scenario s{small_config(4, 2)};
  s.config.hidden = 32, s.config.head_dim = 8, s.config.ffn = 64, s.config.layers = 1;
  s.batch = 8, s.microbatches = 2, s.steps = 2;
  s.optimizer = optimizer;
  return s;
}

/// Both round activations and gradients to bf16 about ten times; master weights keep exact updates.
void check_near(const model_outcome& expected, const model_outcome& got) {
  REQUIRE(got.steps.size() == expected.steps.size());
  for (std::size_t i = 0; i < expected.steps.size(); ++i) {
    CHECK(got.steps[i].loss == doctest::Approx(expected.steps[i].loss).epsilon(1e-3));
    CHECK(got.steps[i].gradient_norm == doctest::Approx(expected.steps[i].gradient_norm).epsilon(1e-2));
  }
  check_tensors(got.initial, expected.initial, 1e-6, "initial value");
  check_tensors(got.first_gradients, expected.first_gradients, 2e-2, "gradient of the first step");
  check_tensors(got.weights, expected.weights, 2e-2, "weight after the last step");
}

TEST_CASE("in float a step on the GPU equals the CPU's") {
  const scenario s = small_scenario();
  const model_outcome expected = train_on_cpu(s), got = train_on_gpu<float>(s);
  for (std::size_t i = 0; i < expected.steps.size(); ++i) {
    CHECK(got.steps[i].tokens == expected.steps[i].tokens);
    CHECK(got.steps[i].loss == doctest::Approx(expected.steps[i].loss).epsilon(1e-5));
    CHECK(got.steps[i].gradient_norm == doctest::Approx(expected.steps[i].gradient_norm).epsilon(1e-5));
  }
  CHECK(largest_difference(got.initial, expected.initial) < 1e-6);
  CHECK(largest_difference(got.first_gradients, expected.first_gradients) < 1e-5);
  CHECK(largest_difference(got.weights, expected.weights) < 1e-5);
  CHECK(got.kept_bytes == got.predicted_kept);
}

TEST_CASE("in float a step with Muon equals the CPU's, also on ranks that share the work on a matrix") {
  scenario s = small_scenario();
  s.optimizer = muon_options{};
  s.steps = 2;
  const model_outcome expected = train_on_cpu(s), one = train_on_gpu<float>(s);
  CHECK(largest_difference(one.weights, expected.weights) < 1e-5);
  check_on_gpu(s, one, 2, 2);
  const model_outcome half = train_ranks<bf16, megatron_sp>(s, mesh_of<megatron_sp>(s, 1, 2), on_one_gpu{})[0];
  CHECK(half.steps.back().loss == doctest::Approx(expected.steps.back().loss).epsilon(1e-2));
  CHECK(largest_difference(half.weights, expected.weights) < 2e-2);
}

TEST_CASE("in bf16 a step is near the float one, with master weights in float") {
  const scenario s = small_scenario();
  const model_outcome expected = train_on_cpu(s), got = train_on_gpu<bf16>(s);
  for (std::size_t i = 0; i < expected.steps.size(); ++i) {
    CHECK(got.steps[i].loss == doctest::Approx(expected.steps[i].loss).epsilon(1e-2));
    CHECK(got.steps[i].gradient_norm == doctest::Approx(expected.steps[i].gradient_norm).epsilon(2e-2));
  }
  CHECK(largest_difference(got.initial, expected.initial) < 1e-6);  // the master weights are not rounded
  CHECK(largest_difference(got.first_gradients, expected.first_gradients) < 2e-2);
  CHECK(got.kept_bytes == got.predicted_kept);
}

TEST_CASE("ranks that share a GPU have the results of one rank") {
  const scenario s = small_scenario();
  const model_outcome one = train_on_gpu<float>(s);
  for (const std::int64_t ranks : {2, 4, 8})
    for (std::int64_t tp_ranks = 1; tp_ranks <= ranks; tp_ranks *= 2) check_on_gpu(s, one, ranks / tp_ranks, tp_ranks);
}

TEST_CASE("ranks that share a sequence have the results of one rank") {
  scenario s = small_scenario();
  s.config.layers = 1, s.batch = 4, s.microbatches = 1;
  s.steps = 2;  // the first step also allocates arrays that stay
  const model_outcome one = train_on_gpu<float>(s);
  check_on_gpu(s, one, 1, 2, 2);
  const model_outcome half = train_ranks<bf16, megatron_sp>(s, mesh_of<megatron_sp>(s, 1, 1, 4), on_one_gpu{})[0];
  for (std::size_t i = 0; i < one.steps.size(); ++i)
    CHECK(half.steps[i].loss == doctest::Approx(one.steps[i].loss).epsilon(1e-2));
  CHECK(largest_difference(half.first_gradients, one.first_gradients) < 2e-2);
  CHECK(half.kept_bytes == half.predicted_kept);
}

TEST_CASE("stages of a pipeline have the results of one rank") {
  scenario s = small_scenario();
  s.config.layers = 3, s.microbatches = 4, s.steps = 2;
  s.config.tie_embeddings = true;
  const model_outcome one = train_on_gpu<float>(s);
  check_pipeline<float, megatron_sp>(s, one, {1, 2, 2}, make_schedule<one_f_one_b>(2, 4), on_one_gpu{});
  check_pipeline<float, megatron_sp>(s, one, {2, 3, 1}, make_schedule<zb_h1>(3, 4), on_one_gpu{});
  s.config.layers = 4;
  const model_outcome four = train_on_gpu<float>(s);
  check_pipeline<float, megatron_sp>(s, four, {1, 2, 1}, make_schedule<zb_v>(2, 4), on_one_gpu{});
}

TEST_CASE("every optimizer trains with gradients in bf16 on a GPU as on the processor") {
  const optimizer_options all[] = {adamw_options{}, adamw_options{.moments = moment_type::bf16},
                                   adamw_options{.moments = moment_type::int8}, muon_options{},
                                   muon_options{.adamw = {.moments = moment_type::bf16}}};
  for (const optimizer_options& optimizer : all) {
    CAPTURE(optimizer.index());
    const scenario s = narrow_scenario(optimizer);
    const model_outcome got = train_on_gpu<narrow>(s);
    check_near(train_on_cpu<narrow>(s), got);
    CHECK(got.kept_bytes == got.predicted_kept);
    std::size_t in_bf16 = 0;
    for (const named_values& gradient : got.first_gradients)
      for (const double value : gradient.values) in_bf16 += converted<double>(converted<bf16>(value)) == value;
    std::size_t elements = 0;
    for (const named_values& gradient : got.first_gradients) elements += gradient.values.size();
    CHECK(in_bf16 == elements);
  }
}

TEST_CASE("ranks that sum bf16 gradients in bf16 or in float train as one rank") {
  scenario s = narrow_scenario(adamw_options{.moments = moment_type::bf16});
  const model_outcome expected = train_on_cpu<narrow>(s);
  for (const gradient_wire wire : {gradient_wire::full, gradient_wire::f32}) {
    s.parallel.wire = wire;
    for (const zero_level level : {zero_level::replicated, zero_level::gradients}) {
      s.parallel.parallel.level = level;
      for (const model_outcome& r : train_ranks<narrow, megatron_sp>(s, mesh_of<megatron_sp>(s, 2, 2), on_one_gpu{})) {
        check_near(expected, r);
        CHECK(compare_ledgers(r.sent, r.predicted, true).text() == "");
      }
    }
  }
}

}  // namespace llama_on_gpu
