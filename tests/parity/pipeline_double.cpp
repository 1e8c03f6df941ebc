// timeout: 300
// program: pipelines
// Pipelines, in double: every schedule, on meshes of up to 16 ranks, equals one rank.
#include "plait/models/llama_stages.hpp"
#include "plait/schedule/generators.hpp"
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// Use at least as many layers as the largest pipeline has stages, and an odd number.
scenario tiny(std::int64_t layers, std::int64_t microbatches) {
  scenario s{small_config(4, 2)};
  s.config.hidden = 16, s.config.ffn = 24, s.config.vocab = 29;
  s.config.layers = layers;
  s.batch = 16, s.seq = 8, s.microbatches = microbatches;
  s.steps = 3;
  return s;
}

template <class Policy>
void check(const scenario& s, const model_outcome& one, std::initializer_list<pipeline_mesh> meshes) {
  for (const pipeline_mesh& m : meshes)
    check_pipeline<double, megatron_sp>(
        s, one, m, make_schedule<Policy>(static_cast<int>(m.pp), static_cast<int>(s.microbatches)));
}

}  // namespace

TEST_CASE("one chunk a rank") {
  const scenario s = tiny(17, 8);
  const model_outcome one = train_one<double, megatron_sp>(s);
  CHECK(one.steps.back().loss < one.steps.front().loss);
  check<gpipe>(s, one, {{1, 1, 1}, {1, 2, 1}, {2, 4, 2}, {1, 16, 1}});
  check<one_f_one_b>(s, one, {{1, 1, 1}, {1, 3, 1}, {2, 2, 2}, {2, 2, 4}, {1, 16, 1}});
  check<zb_h1>(s, one, {{1, 4, 2}, {2, 8, 1}, {1, 5, 1}});
  check<zb_h2>(s, one, {{1, 2, 2}, {2, 4, 1}, {1, 4, 4}});
}

TEST_CASE("several chunks a rank") {
  const scenario s = tiny(17, 8);
  const model_outcome one = train_one<double, megatron_sp>(s);
  check<interleaved<2>>(s, one, {{1, 2, 1}, {2, 4, 2}, {1, 8, 1}});
  check<interleaved<4>>(s, one, {{2, 2, 1}, {1, 4, 1}, {1, 1, 1}});
  check<zb_v>(s, one, {{1, 2, 1}, {2, 4, 2}, {1, 8, 2}});
  check<dualpipe_v>(s, one, {{1, 2, 2}, {1, 4, 1}, {2, 2, 1}});
}

TEST_CASE("tied embeddings, on one rank and on two, and the loss in chunks of tokens") {
  scenario s = tiny(5, 4);
  s.config.tie_embeddings = true;
  const model_outcome one = train_one<double, megatron_sp>(s);
  s.options.loss_chunks = 4;
  check<one_f_one_b>(s, one, {{1, 2, 1}, {2, 3, 2}});
  check<zb_h1>(s, one, {{1, 4, 2}});
  check<interleaved<2>>(s, one, {{1, 2, 2}});
  check<zb_v>(s, one, {{2, 2, 2}});
}

TEST_CASE("microbatches that pp does not divide, all tokens of some masked") {
  for (const std::int64_t microbatches : {1, 2, 16}) {
    scenario s = tiny(5, microbatches);
    s.masked_from = 4, s.masked_to = 9;
    const model_outcome one = train_one<double, megatron_sp>(s);
    check<gpipe>(s, one, {{1, 3, 1}, {1, 4, 2}});
    s.options.loss_chunks = 2;
    check<one_f_one_b>(s, one, {{1, 3, 1}, {1, 4, 1}});
    check<zb_h1>(s, one, {{1, 3, 1}, {1, 5, 1}});
    check<zb_v>(s, one, {{1, 2, 1}});
  }
}

TEST_CASE("packed documents, different in every microbatch") {
  scenario s = tiny(5, 4);
  s.options.attention.documents = true;
  for (const recompute keep : {recompute::none, recompute::full}) {
    s.options.keep = keep;
    const model_outcome one = train_one<double, megatron_sp>(s);
    check<one_f_one_b>(s, one, {{1, 2, 1, 2}, {2, 3, 1, 1}});
    check<zb_v>(s, one, {{1, 2, 2, 2}});
  }
  scenario plain = s;
  plain.options.attention.documents = false;
  const model_outcome without = train_one<double, megatron_sp>(plain), with = train_one<double, megatron_sp>(s);
  CHECK(without.steps[0].loss != with.steps[0].loss);
}

TEST_CASE("recomputation, dropout, biases, parameters stored over dp") {
  scenario s = tiny(5, 4);
  s.config.attention_bias = s.config.mlp_bias = true;
  s.options.dropout = 0.1;
  for (const recompute keep : {recompute::none, recompute::selective, recompute::full}) {
    s.options.keep = keep;
    const model_outcome one = train_one<double, megatron_sp>(s);
    check<one_f_one_b>(s, one, {{2, 2, 1}});
    check<zb_h1>(s, one, {{1, 2, 2}});
    if (keep == recompute::full)
      check_pipeline<double, stored_over_dp<megatron_sp>>(s, one, {2, 2, 2}, make_schedule<zb_v>(2, 4));
  }
}

TEST_CASE("the costs of the parts add up to the model's, and measured costs are equal on all ranks") {
  const llama_config& c = *find_llama_preset("smollm-1.7b");
  const llama_part_times parts = llama_part_flops(c, 2048);
  const double whole = static_cast<double>(c.layers) * (parts.layer.forward + parts.layer.backward) +
                       parts.head.forward + parts.head.backward;
  CHECK(whole == doctest::Approx(flops_per_token(c, 2048).causal()).epsilon(1e-3));  // without the norms' weights
  const stage_costs balance = stage_costs_of(parts, c.layers);
  const std::vector<stage_layers> split = split_layers(balance, 4);
  CHECK(split.back().size() < split.front().size());  // the head costs as much as some layers
  const schedule_costs costs = schedule_costs_of(parts, split);
  double sum = 0;
  for (const action_times& t : costs.stages) sum += t.forward + t.input_backward + t.weight_backward;
  CHECK(sum == doctest::Approx(whole));

  std::vector<llama_part_times> measured(2);
  threads::run(2, [&](threads::communicator k) {
    const megatron_sp::mesh mesh{1, 1, 2, 1};
    world ranks(mesh.shape(), k);
    cpu device;
    const scenario s = tiny(1, 1);
    context<cpu> ctx{device, ranks, llama_sizes<megatron_sp>(s.config, mesh.shape(), s.batch, s.seq), 1};
    measured[static_cast<std::size_t>(k.rank())] =
        measure_llama_parts<llama<double, megatron_sp>>(ctx, s.config, s.options);
    CHECK(device.bytes_in_use() == 0);
  });
  for (action_times llama_part_times::*part : {&llama_part_times::layer, &llama_part_times::head}) {
    const action_times &a = measured[0].*part, &b = measured[1].*part;
    CHECK(a.forward > 0);
    CHECK(a.input_backward > 0);
    CHECK(a.weight_backward > 0);
    CHECK(a.forward == b.forward);
    CHECK(a.backward == b.backward);
    CHECK(a.backward == doctest::Approx(a.input_backward + a.weight_backward));
  }
}
