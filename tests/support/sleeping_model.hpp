// A model whose blocks sleep instead of computing, and the simulation of its step. Tests measure with it how much of a
// slow link's time a policy of data parallelism hides, where ranks outnumber cores.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/schedule/expand.hpp"
#include "plait/schedule/generators.hpp"
#include "plait/schedule/simulate.hpp"
#include "plait/schedule/verify.hpp"

namespace plait::testing {

/// A step of sleeping blocks between an embedding and a head that take almost no time.
struct sleeping_shape {
  int ranks = 2, layers = 1;
  double block = 0;           ///< seconds of a block's forward pass; its backward pass takes twice that
  std::int64_t elements = 0;  ///< of the parameter of a block
  double bandwidth = 0;       ///< bytes per second that a rank sends; 0: communication takes no time
  std::int64_t microbatches = 1;
};

/// A block with one parameter, whose passes sleep.
class sleeping_block : public layer_types<float, transformer_specs<megatron_sp>::residual,
                                          transformer_specs<megatron_sp>::residual, cpu> {
  using parameter = plait::parameter<float, cpu>;
  struct rows : dim_tag<"rows"> {};

 public:
  struct saved {};

  sleeping_block(const context<cpu>& ctx, const sleeping_shape& s, std::int64_t i) : seconds_(s.block) {
    context<cpu> own{ctx.device, ctx.ranks, ctx.sizes, ctx.seed};
    own.sizes.set(dim_of<rows>, s.elements);
    const layout stored = layout_v<spec<rows>>;
    weight_ = std::make_shared<parameter>(own, parameter_info{cat({"block.", i}), {s.elements}, {}, false}, stored,
                                          stored, layout_v<transformer_specs<megatron_sp>::residual>);
  }
  tensor_of<output> forward(const microbatch<cpu>& mb, const tensor_of<input>& x, saved*) {
    static_cast<void>(weight_->used_value());
    return pass<input>(mb, x, seconds_);
  }
  template <spec_like Gradient>
  tensor_of<dual_t<input>> backward(const microbatch<cpu>& mb, const tensor_of<input>&, saved&,
                                    const tensor_of<Gradient>& dy) {
    weight_->used_gradient(mb.ctx.device);
    return pass<dual_t<input>>(mb, dy, 2 * seconds_);
  }
  template <class F>
  void visit(F&& f) {
    f(*weight_);
  }

 private:
  template <class To, class From>
  static tensor_of<To> pass(const microbatch<cpu>& mb, const From& x, double seconds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    tensor_of<To> y(mb.ctx);
    std::copy_n(x.data(), x.size(), y.data());
    std::this_thread::sleep_until(end);
    return y;
  }

  double seconds_;
  std::shared_ptr<parameter> weight_;
};
static_assert(layer<sleeping_block>);

using layers_around = plait::detail::llama_layers<float, megatron_sp, cpu, swiglu_mlp<float, megatron_sp>>;

/// The model, with the sizes that its context needs.
class sleeping_model
    : public language_model<layers_around::embedding, sleeping_block, layers_around::head, layers_around::loss> {
  using layers = layers_around;
  using base = language_model<layers::embedding, sleeping_block, layers::head, layers::loss>;

 public:
  static dim_sizes sizes(const sleeping_shape& s, const mesh_shape& mesh) {
    return llama_sizes<megatron_sp>(tiny(), mesh, s.ranks, 4);
  }
  sleeping_model(const context<cpu>& ctx, const sleeping_shape& s)
      : base(
            ctx, tiny().vocab, {0, s.layers, true, true}, {}, nullptr,
            [&] { return layers::embedding(ctx, tiny().vocab, "embedding"); },
            [&](std::int64_t i) { return sleeping_block(ctx, s, i); },
            [&](const auto& of_head, const auto&) {
              return layers::head(layers::norm(of_head, 1e-5, "norm"), layers::output(of_head, "head"));
            }) {}

 private:
  static llama_config tiny() { return {.vocab = 16, .hidden = 16, .layers = 1, .heads = 2, .kv_heads = 2, .ffn = 16}; }
};

/// The simulation of the step's program. Throws `error` where `verify` refuses it.
inline step_simulation simulate_sleeping(const sleeping_shape& s, const data_parallel& policy, double gather_bytes,
                                         double reduce_bytes) {
  std::vector<step_unit> units(static_cast<std::size_t>(s.layers) + 2);
  step_costs costs;
  for (std::size_t u = 0; u < units.size(); ++u) {
    const bool block = u > 0 && u + 1 < units.size();
    units[u].parameters = block ? s.elements : 0;
    const double time = block ? s.block : 0;
    costs.units.push_back({time, 2 * time, time, time});
  }
  costs.data_ranks = s.ranks;
  costs.gather_bytes = gather_bytes, costs.reduce_bytes = reduce_bytes;
  costs.bandwidth = s.bandwidth;
  const step_schedule program =
      expand(make_schedule<one_f_one_b>(1, static_cast<int>(s.microbatches)), std::move(units), policy);
  require_verified(program);
  return simulate(program, costs);
}

}  // namespace plait::testing
