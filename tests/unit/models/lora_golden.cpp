// program: golden
// Compares adapters of a Llama with Hugging Face's peft: logits, loss, and the gradients of A and B; there are no
// others.
#include <string>
#include <vector>

#include "plait/checkpoint/model_weights.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/models/llama.hpp"
#include "plait/models/llama_config_json.hpp"
#include "plait/nn/strategy.hpp"
#include "support/layer_check.hpp"
#include "support/test_data.hpp"

using namespace plait;
using namespace plait::test;

namespace {

struct adapted {
  double logits = 1, loss = 1;
  std::vector<std::pair<std::string, double>> gradients;
};

/// Differences relative to the largest golden value.
template <class S>
adapted run_adapted(std::int64_t dp_ranks, std::int64_t tp_ranks) {
  const std::string folder = plait::test::test_data() + "/llama_lora";
  const std::string prefix = "base_model.model.";  // peft's, for every name
  const llama_config config = read_llama_config(folder + "/config.json");
  const safetensors_reader weights(folder + "/model.safetensors"), adapters(folder + "/adapter_model.safetensors");
  const safetensors_reader golden(folder + "/golden.safetensors");
  std::vector<safetensors_entry> entries(weights.entries().begin(), weights.entries().end());
  for (safetensors_entry entry : adapters.entries()) {
    entry.name = entry.name.substr(prefix.size());
    entries.push_back(entry);
  }
  const auto ids_golden = golden.read<std::int64_t>("input_ids"), labels_golden = golden.read<std::int64_t>("labels");
  const std::int64_t batches = golden.at("input_ids").shape[0], length = golden.at("input_ids").shape[1];
  const tensor_extents extents = split_tensor_ranks(tp_ranks, config.kv_heads);
  adapted found;
  threads::run(static_cast<int>(dp_ranks * tp_ranks), [&](threads::communicator comm) {
    const typename S::mesh mesh{dp_ranks, 1, extents.tp, extents.tp_rep};
    world ranks(mesh.shape(), comm);
    cpu device;
    const context<cpu> ctx{device, ranks, llama_sizes<S>(config, ranks.shape(), batches, length)};
    const lora_options adapter{.rank = 3, .scale = 2.0};
    using model_type = llama<double, S>;
    model_type model(ctx, config, {.attention = {.lora = {.q = adapter, .v = adapter}}, .mlp = {.down = adapter}});
    freeze_all_but_adapters(model);
    load_weights(ctx, model, entries, "llama_lora");
    using tokens = typename model_type::tokens;
    const auto ids =
        place_full<typename tokens::spec>(ctx, std::vector<std::int64_t>(ids_golden.begin(), ids_golden.end()));
    const auto labels =
        place_full<typename tokens::spec>(ctx, std::vector<std::int64_t>(labels_golden.begin(), labels_golden.end()));
    double counted = 0;
    for (std::int64_t label : labels_golden) counted += label != -100;

    gather_parameters(ctx, model);
    zero_gradients(ctx, model);
    const auto scores = model.score(ctx, ids);
    const auto padded = collect_full(ctx, layout_v<typename decltype(scores)::spec>, scores.data());
    typename model_type::saved kept;
    const auto sum = model.forward(ctx, ids, labels, &kept);
    model.backward(ctx, ids, labels, kept, model_type::mean::seed_type::weighted(ctx, 1.0 / counted));
    double loss = *sum.data() / counted;
    if (dp_ranks > 1) ranks.group(axis_list{axis_of<dp>}).all_reduce(&loss, &loss, 1, dtype::f64, reduce_op::sum);
    std::vector<double> logits;
    const std::int64_t width = ctx.sizes.of(dim_of<vocab>);
    for (std::int64_t row = 0; row < batches * length; ++row)
      for (std::int64_t v = 0; v < config.vocab; ++v)
        logits.push_back(padded[static_cast<std::size_t>(row * width + v)]);
    const bool first = ranks.rank() == 0;
    if (first) {
      found.logits = largest_difference(logits, golden.read<double>("logits"));
      found.loss = std::abs(loss / golden.read<double>("loss")[0] - 1);
    }
    model.visit([&](auto& p) {
      if (!p.trainable()) return;
      const auto reduced = p.reduce(ctx);
      const context<cpu> own{ctx.device, ctx.ranks, p.sizes()};
      const auto gradient = collect_full(own, p.stored(), reduced.data());
      if (first)
        found.gradients.emplace_back(p.name(),
                                     largest_difference(gradient, golden.read<double>("grad." + prefix + p.name())));
    });
  });
  return found;
}

template <class S>
void check_adapted(std::int64_t dp_ranks, std::int64_t tp_ranks) {
  CAPTURE(dp_ranks);
  CAPTURE(tp_ranks);
  const adapted found = run_adapted<S>(dp_ranks, tp_ranks);
  CHECK(found.logits < 1e-6);
  CHECK(found.loss < 1e-6);
  CHECK(found.gradients.size() == 12);
  for (const auto& [name, difference] : found.gradients) CHECK_MESSAGE(difference < 1e-6, name);
}

}  // namespace

TEST_CASE("a Llama with adapters on q, v and down equals Hugging Face's peft") {
  check_adapted<megatron_sp>(1, 1);
  check_adapted<megatron_sp>(2, 1);
  check_adapted<megatron_sp>(1, 2);
  check_adapted<megatron_sp>(2, 4);
  check_adapted<megatron_tp>(2, 2);
}
