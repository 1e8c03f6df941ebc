// timeout: 300
// A whole Llama step on the GPU: in float it equals the CPU's, in bf16 it is near it, and ranks that share the GPU have
// the results of one rank.
#include "plait/comm/threads/cuda.hpp"
#include "plait/device/cuda.hpp"
#include "plait/schedule/generators.hpp"
#include "support/llama_parity.hpp"
#include "support/pipeline_parity.hpp"

namespace plait::test {

/// The scenario on one rank of the cpu with megatron_sp: in llama_reference.cpp, which nvcc does not compile.
rank_outcome train_on_cpu(const scenario& s);

}  // namespace plait::test

using namespace plait;
using namespace plait::test;

namespace {

template <class Precision, strategy S>
std::vector<rank_outcome> train_on_gpu(const scenario& s, std::int64_t dp_ranks, std::int64_t tp_ranks,
                                       std::int64_t cp_ranks = 1) {
  const tensor_extents split = split_tensor_ranks(tp_ranks, s.config.kv_heads);
  const typename S::mesh mesh{dp_ranks, cp_ranks, split.tp, split.tp_rep};
  std::vector<rank_outcome> all(static_cast<std::size_t>(mesh.size()));
  threads::run(static_cast<int>(mesh.size()), cuda::options{}, [&](threads::communicator c, cuda& device) {
    world ranks(mesh.shape(), c);
    all[static_cast<std::size_t>(ranks.rank())] = train_rank<Precision, S>(s, ranks, device);
  });
  return all;
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

}  // namespace

TEST_CASE("in float a step on the GPU equals the CPU's") {
  const scenario s = small_scenario();
  const rank_outcome expected = train_on_cpu(s), got = std::move(train_on_gpu<float, megatron_sp>(s, 1, 1)[0]);
  for (std::size_t i = 0; i < expected.steps.size(); ++i) {
    CHECK(got.steps[i].tokens == expected.steps[i].tokens);
    CHECK(got.steps[i].loss == doctest::Approx(expected.steps[i].loss).epsilon(1e-5));
    CHECK(got.steps[i].gradient_norm == doctest::Approx(expected.steps[i].gradient_norm).epsilon(1e-5));
  }
  CHECK(largest_difference(got.initial, expected.initial) < 1e-6);
  CHECK(largest_difference(got.first_gradients, expected.first_gradients) < 1e-5);
  CHECK(largest_difference(got.weights, expected.weights) < 1e-5);
  CHECK(got.saved_measured == got.saved_predicted);
}

TEST_CASE("in float a step with Muon equals the CPU's, also on ranks that share the work on a matrix") {
  scenario s = small_scenario();
  s.optimizer = muon_options{};
  s.steps = 2;
  const rank_outcome expected = train_on_cpu(s), one = std::move(train_on_gpu<float, megatron_sp>(s, 1, 1)[0]);
  CHECK(largest_difference(one.weights, expected.weights) < 1e-5);
  for (const rank_outcome& r : train_on_gpu<float, megatron_sp>(s, 2, 2)) {
    check_parity(one, r, 1e-5);
    CHECK(compare_ledgers(r.measured, r.predicted, true).text() == "");
  }
  const rank_outcome half = std::move(train_on_gpu<bf16, megatron_sp>(s, 1, 2)[0]);
  CHECK(half.steps.back().loss == doctest::Approx(expected.steps.back().loss).epsilon(1e-2));
  CHECK(largest_difference(half.weights, expected.weights) < 2e-2);
}

TEST_CASE("in bf16 a step is near the float one, with master weights in float") {
  const scenario s = small_scenario();
  const rank_outcome expected = train_on_cpu(s), got = std::move(train_on_gpu<bf16, megatron_sp>(s, 1, 1)[0]);
  for (std::size_t i = 0; i < expected.steps.size(); ++i) {
    CHECK(got.steps[i].loss == doctest::Approx(expected.steps[i].loss).epsilon(1e-2));
    CHECK(got.steps[i].gradient_norm == doctest::Approx(expected.steps[i].gradient_norm).epsilon(2e-2));
  }
  CHECK(largest_difference(got.initial, expected.initial) < 1e-6);  // the master weights are not rounded
  CHECK(largest_difference(got.first_gradients, expected.first_gradients) < 2e-2);
  CHECK(got.saved_measured == got.saved_predicted);
}

TEST_CASE("ranks that share a GPU have the results of one rank") {
  const scenario s = small_scenario();
  const rank_outcome one = std::move(train_on_gpu<float, megatron_sp>(s, 1, 1)[0]);
  for (const std::int64_t ranks : {2, 4, 8})
    for (std::int64_t tp_ranks = 1; tp_ranks <= ranks; tp_ranks *= 2) {
      INFO("dp=" << ranks / tp_ranks << " tp=" << tp_ranks);
      for (const rank_outcome& r : train_on_gpu<float, megatron_sp>(s, ranks / tp_ranks, tp_ranks)) {
        check_parity(one, r, 1e-5);
        CHECK(compare_ledgers(r.measured, r.predicted, true).text() == "");
        CHECK(r.saved_measured == r.saved_predicted);
      }
    }
}

TEST_CASE("ranks that share a sequence have the results of one rank") {
  scenario s = small_scenario();
  s.config.layers = 1, s.batch = 4, s.microbatches = 1, s.steps = 1;
  const rank_outcome one = std::move(train_on_gpu<float, megatron_sp>(s, 1, 1)[0]);
  for (const rank_outcome& r : train_on_gpu<float, megatron_sp>(s, 1, 2, 2)) {
    check_parity(one, r, 1e-5);
    CHECK(compare_ledgers(r.measured, r.predicted, true).text() == "");
    CHECK(r.saved_measured == r.saved_predicted);
  }
  const rank_outcome half = std::move(train_on_gpu<bf16, megatron_sp>(s, 1, 1, 4)[0]);
  for (std::size_t i = 0; i < one.steps.size(); ++i)
    CHECK(half.steps[i].loss == doctest::Approx(one.steps[i].loss).epsilon(1e-2));
  CHECK(largest_difference(half.first_gradients, one.first_gradients) < 2e-2);
  CHECK(half.saved_measured == half.saved_predicted);
}

TEST_CASE("stages of a pipeline have the results of one rank") {
  scenario s = small_scenario();
  s.config.layers = 3, s.microbatches = 4, s.steps = 2;
  s.config.tie_embeddings = true;
  const rank_outcome one = std::move(train_on_gpu<float, megatron_sp>(s, 1, 1)[0]);
  const auto launch = [](int ranks, auto&& body) { threads::run(ranks, cuda::options{}, body); };
  check_pipeline_on<float, megatron_sp>(launch, s, one, {1, 2, 2}, make_schedule<one_f_one_b>(2, 4), 1e-5);
  check_pipeline_on<float, megatron_sp>(launch, s, one, {2, 3, 1}, make_schedule<zb_h1>(3, 4), 1e-5);
  s.config.layers = 4;
  const rank_outcome four = std::move(train_on_gpu<float, megatron_sp>(s, 1, 1)[0]);
  check_pipeline_on<float, megatron_sp>(launch, s, four, {1, 2, 1}, make_schedule<zb_v>(2, 4), 1e-5);
}
