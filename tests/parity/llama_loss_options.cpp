// timeout: 300
// program: llama_options
// The loss is a sum over counted tokens of the global batch: label smoothing, z-loss, ignored tokens, microbatches.
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

namespace {

scenario smoothed() {
  scenario s{small_config()};
  s.options.loss.label_smoothing = 0.1;
  s.options.loss.z_loss = 1e-2;
  return s;
}

}  // namespace

TEST_CASE("label smoothing and z-loss over a sharded vocabulary that the ranks do not divide") {
  check_some<double, megatron_sp>(smoothed());
}

TEST_CASE("all tokens of one data-parallel rank are masked") {
  scenario s = smoothed();
  s.masked_from = 4, s.masked_to = 8;  // rank 1 of dp = 4, half of rank 0 of dp = 2
  check_some<double, megatron_sp>(s);
  s.masked_from = 0, s.masked_to = 8;
  check_some<double, megatron_sp>(s);
}

TEST_CASE("all tokens of one microbatch are masked") {
  scenario s{small_config()};
  s.masked_from = 4, s.masked_to = 8;
  const model_outcome one = train_one<double, megatron_sp>(s);
  s.microbatches = 4;
  check_mesh<double, megatron_sp>(s, one, 1, 1);
  check_mesh<double, megatron_sp>(s, one, 2, 2);
  check_mesh<double, megatron_sp>(s, one, 4, 2);
}

TEST_CASE("with no token counted there is no loss, no gradient and no NaN") {
  scenario s = smoothed();
  s.masked_from = 0, s.masked_to = s.batch;
  for (const auto& [dp_ranks, tp_ranks] : {std::pair{1, 1}, {2, 2}}) {
    for (const model_outcome& r : train_mesh<double, megatron_sp>(s, dp_ranks, tp_ranks)) {
      CHECK(r.steps[0].loss == 0);
      CHECK(r.steps[0].gradient_norm == 0);
      CHECK(r.steps[0].tokens == 0);
      for (const named_values& w : r.weights)
        for (double v : w.values) REQUIRE(std::isfinite(v));
    }
  }
}

TEST_CASE("the number of microbatches changes neither results nor bytes on dp") {
  scenario s{small_config()};
  const model_outcome one = train_one<double, megatron_sp>(s);
  std::uint64_t bytes_on_dp = 0;
  for (const std::int64_t microbatches : {1, 2, 4}) {
    s.microbatches = microbatches;
    check_mesh<double, megatron_sp>(s, one, 1, 1);
    check_mesh<double, megatron_sp>(s, one, 2, 2);
    check_mesh<double, megatron_sp>(s, one, 4, 4);
    check_mesh<double, stored_over_dp<megatron_sp>>(s, one, 2, 2);
    const std::vector<model_outcome> all = train_mesh<double, megatron_sp>(s, 4, 2);
    std::uint64_t bytes = 0;
    for (const ledger::row& row : all[0].sent.rows)
      if (row.label.find("dp") != std::string::npos) bytes += all[0].sent.total(row.label).wire;
    if (microbatches == 1) bytes_on_dp = bytes;
    CHECK(bytes > 0);
    CHECK(bytes == bytes_on_dp);
  }
}

TEST_CASE("the loss in chunks of tokens has the same value and gradients") {
  scenario s = smoothed();
  s.masked_from = 4, s.masked_to = 8;
  const model_outcome one = train_one<double, megatron_sp>(s);
  s.options.loss_chunks = 2, s.microbatches = 2;
  check_mesh<double, megatron_sp>(s, one, 1, 1);
  check_mesh<double, megatron_sp>(s, one, 2, 4);
  check_mesh<double, megatron_tp>(s, one, 1, 8);
  s.options.loss_chunks = 3;  // does not divide the number of a rank's positions
  check_mesh<double, megatron_sp>(s, one, 2, 2);
  scenario uneven = smoothed();
  uneven.seq = 13;
  const model_outcome whole = train_one<double, megatron_sp>(uneven);
  uneven.options.loss_chunks = 2;
  check_mesh<double, megatron_sp>(uneven, whole, 2, 4);
  s.config.tie_embeddings = true;
  s.options.loss_chunks = 1;
  const model_outcome tied = train_one<double, megatron_sp>(s);
  s.options.loss_chunks = 4;
  s.parallel.parallel.level = zero_level::parameters;
  check_mesh<double, megatron_sp>(s, tied, 4, 2);
}
