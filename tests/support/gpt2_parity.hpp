#pragma once

#include <memory>
#include <string>

#include "../../examples/gpt2.hpp"
#include "plait/nn/strategy.hpp"
#include "support/model_parity.hpp"

/// Small GPT-2s, of examples/gpt2.hpp, for the kit of support/model_parity.hpp.
namespace plait::test {

using namespace plait::testing;

inline gpt2::config tiny_gpt2(std::int64_t layers) {
  gpt2::config c;
  c.vocab = 29, c.positions = 12, c.hidden = 16, c.layers = layers, c.heads = 4, c.init = {0, 0.1};
  return c;
}

template <strategy S>
model_setup gpt2_setup(const gpt2::config& c, std::int64_t microbatches = 2, std::int64_t sequence = 8) {
  model_setup how;
  how.sizes = [=](const mesh_shape& mesh, std::int64_t samples) { return gpt2::sizes<S>(c, mesh, samples, sequence); };
  how.layers = c.layers, how.vocab = c.vocab, how.microbatches = microbatches;
  how.vanishes = [](const std::string& name) { return name.find("k_proj.bias") != name.npos; };
  return how;
}

template <strategy S>
auto make_gpt2(const gpt2::config& c, language_model_options options = {}) {
  return [=](const auto& ctx, stage_layers part, auto first) {
    using model_type = gpt2::model<double, S, device_of<decltype(ctx)>>;
    return std::make_unique<model_type>(ctx, c, part, first, options);
  };
}

}  // namespace plait::test
