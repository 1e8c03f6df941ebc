// Compares a Llama on a mesh with golden values from transformers (tests/data/make_llama_goldens.py).
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/model_weights.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/comm/threads.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/models/llama.hpp"
#include "plait/models/weights_order.hpp"
#include "plait/nn/linear/lora.hpp"
#include "support/whole_tensor.hpp"

namespace plait::test {

/// Names that a Llama's checkpoint may hold in addition to its parameters.
template <class Config>
parameter_aliases tied_names(const Config& config) {
  if (!config.tie_embeddings) return {};
  return {{"lm_head.weight", "model.embed_tokens.weight"}};
}

/// Differences between a model's numbers and the golden ones, relative to the largest of each kind.
struct golden_findings {
  double logits = 0, loss = 0;
  std::vector<std::pair<std::string, double>> gradients;
  bool padding_is_zero = true;
};

/// The golden gradients, by the model's names of its parameters; the file has `prefix` before them.
inline std::vector<weight_tensor> golden_gradients(const std::string& file, const llama_config& config,
                                                   const std::string& prefix) {
  std::vector<weight_tensor> all;
  for (weight_tensor& e : weights_of_file(file, "path"))
    if (e.name.starts_with(prefix)) all.push_back(std::move(e)), all.back().name.erase(0, prefix.size());
  return config.mixture.experts > 0 ? weights_of_experts(all, config, file) : all;
}

inline std::vector<double> values_of(const std::vector<weight_tensor>& all, const std::string& name) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const weight_tensor& e) { return e.name == name; });
  if (found == all.end()) fail({"there is no golden '", name, "'"});
  std::vector<float> values(static_cast<std::size_t>(found->size()));
  found->read(0, found->size(), reinterpret_cast<std::byte*>(values.data()));
  return {values.begin(), values.end()};
}

/// The names that peft gives a model's parameters begin with this.
inline const std::string peft_prefix = "base_model.model.";

/// Runs the model of `folder` with `weights` on a mesh. If it is `adapted`, only its adapters are trained.
template <class Model, strategy S>
golden_findings run_golden(const std::string& folder, const llama_config& config,
                           std::span<const weight_tensor> weights, const mesh_shape& mesh, bool adapted = false,
                           const llama_options& options = {}) {
  using value_type = typename Model::logits::value_type;
  const safetensors_reader golden(folder + "/golden.safetensors");
  const auto gradients =
      golden_gradients(folder + "/golden.safetensors", config, adapted ? "grad." + peft_prefix : "grad.");
  const auto ids_golden = golden.read<std::int64_t>("input_ids"), labels_golden = golden.read<std::int64_t>("labels");
  const std::int64_t batch_size = golden.at("input_ids").shape[0], length = golden.at("input_ids").shape[1];
  golden_findings found;
  threads::run(static_cast<int>(mesh.size()), [&](threads::communicator comm) {
    world ranks(mesh, comm);
    cpu device;
    const context<cpu> ctx{device, ranks, llama_sizes<S>(config, ranks.shape(), batch_size, length)};
    Model model(ctx, config, options);
    if (adapted) freeze_all_but_adapters(model);
    load_weights(ctx, model, weights, "model.safetensors", tied_names(config));
    using tokens = typename Model::tokens;
    tokens ids(ctx), labels(ctx);
    const auto cut = [&](tokens& t, const std::vector<std::int64_t>& full) {
      const box& b = t.part();
      for (std::int64_t i = 0; i < b.local[0]; ++i)
        for (std::int64_t j = 0; j < b.local[1]; ++j)
          t.data()[i * b.local[1] + j] = full[static_cast<std::size_t>((b.offset[0] + i) * length + b.offset[1] + j)];
    };
    cut(ids, ids_golden);
    cut(labels, labels_golden);
    double counted = 0;
    for (std::int64_t label : labels_golden) counted += label != -100;

    gather_parameters(ctx, model);
    zero_gradients(ctx, model);
    auto scores = model.score(ctx, ids);
    auto full_scores = gathered(ctx, layout_v<typename decltype(scores)::spec>, scores.data());
    typename Model::saved kept;
    const auto sum = model.forward(ctx, ids, labels, &kept);
    model.backward(ctx, ids, labels, kept, Model::mean::seed_type::weighted(ctx, 1.0 / counted));
    double loss = *sum.data() / counted;
    const axis_list pending = ranks.pruned(layout_v<typename Model::loss_sum::spec>.partial);
    if (!pending.empty()) ranks.group(pending).all_reduce(&loss, &loss, 1, dtype::f64, reduce_op::sum);

    const bool first = ranks.rank() == 0;
    const std::int64_t padded = ctx.sizes.of(dim_of<vocab>);
    if (first) {
      std::vector<value_type> logits;
      for (std::int64_t row = 0; row < batch_size * length; ++row)
        for (std::int64_t v = 0; v < config.vocab; ++v)
          logits.push_back(full_scores[static_cast<std::size_t>(row * padded + v)]);
      found.logits = distance(logits, golden.read<double>("logits"));
      found.loss = std::abs(loss - golden.read<double>("loss")[0]) / golden.read<double>("loss")[0];
    }
    model.visit([&](auto& p) {
      if (!p.trainable()) return;  // transformers has it as a buffer
      const auto reduced = p.reduce(ctx);
      const auto gradient = gathered(context<cpu>{ctx.device, ctx.ranks, p.sizes()}, p.stored(), reduced.data());
      if (!first) return;
      const auto expected = values_of(gradients, p.name());
      found.gradients.emplace_back(p.name(), distance(gradient, expected));
      for (std::size_t i = expected.size(); i < gradient.size(); ++i)
        found.padding_is_zero = found.padding_is_zero && gradient[i] == 0;
    });
  });
  return found;
}

/// Checks that logits and loss differ by less than `limit`, and gradients by less than `limit_of_gradients`, and that
/// at least this number of gradients was compared.
inline void check_golden(const golden_findings& found, std::size_t gradients, double limit, double limit_of_gradients) {
  CHECK(found.logits < limit);
  CHECK(found.loss < limit);
  CHECK(found.padding_is_zero);
  CHECK(found.gradients.size() >= gradients);
  for (const auto& [parameter, error] : found.gradients) CHECK_MESSAGE(error < limit_of_gradients, parameter);
}

}  // namespace plait::test

#include "plait/core/macros_on.hpp"
