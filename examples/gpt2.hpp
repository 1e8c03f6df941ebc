#pragma once

#include "plait/models/language_model.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/pointwise.hpp"

// GPT-2 (Radford et al. 2019), composed from plait's layers: learned positions, LayerNorm, biases, and an output
// projection that is the embedding's table. The model runs on any mesh and under any pipeline schedule, with
// recomputation and dry runs. gpt2.cpp trains it.
namespace gpt2 {

namespace pl = plait;

struct config {
  std::int64_t vocab = 50257, positions = 1024, hidden = 768, layers = 12, heads = 12;
  double epsilon = 1e-5;
  pl::initializer init{0, 0.02};
};

template <pl::strategy S>
pl::dim_sizes sizes(const config& c, const pl::mesh_shape& mesh, std::int64_t microbatch, std::int64_t sequence) {
  const std::int64_t over = mesh.size(pl::layout_v<pl::spec<typename S::vocabulary>>.dims[0].axes);
  return pl::sizes_of<pl::batch, pl::seq, pl::zseq, pl::position, pl::hidden, pl::heads, pl::kv_heads, pl::head_dim,
                      pl::ffn, pl::vocab>(microbatch, sequence, sequence, c.positions, c.hidden, c.heads, c.heads,
                                          c.hidden / c.heads, 4 * c.hidden, (c.vocab + over - 1) / over * over);
}

/// The types of the model's layers for a precision, a strategy and a device.
template <class P, pl::strategy S, class D>
struct layers {
  using specs = pl::transformer_specs<S>;
  struct up_policy : specs::up {
    static constexpr bool bias = true;
  };
  struct down_policy : specs::down {
    static constexpr bool bias = true;
  };
  using norm = pl::layer_norm<P, typename specs::residual, D>;
  using attention = pl::self_attention<P, S, D>;
  using up = pl::linear<P, up_policy, D>;
  using gelu = pl::activation<P, pl::gelu_tanh, typename specs::wide, D>;
  using down = pl::linear<P, down_policy, D>;
  using mlp = pl::sequential<up, gelu, down>;
  using block = pl::sequential<pl::residual<norm, attention>, pl::residual<norm, mlp>>;
  using embedding = pl::positioned_embedding<P, typename specs::embedding, D>;
  using output = pl::linear<P, typename specs::head, D>;
  using head = pl::sequential<norm, output>;
  using loss = pl::cross_entropy_loss<P, typename specs::logits, typename specs::tokens, D>;
  using model = pl::language_model<embedding, block, head, loss>;
};

/// The whole model, or one stage of a pipeline.
template <class P, pl::strategy S, class D = pl::cpu>
class model : public layers<P, S, D>::model {
  using l = layers<P, S, D>;

 public:
  model(const pl::context<D>& ctx, const config& c) : model(ctx, c, {0, c.layers, true, true}) {}
  model(const pl::context<D>& ctx, const config& c, pl::stage_layers part, const model* first_stage = nullptr,
        pl::language_model_options how = {})
      : l::model(
            ctx, c.vocab, part, in_order(ctx, how), first_stage,
            [&] {
              return typename l::embedding({ctx, c.vocab, "wte", {.init = c.init, .tied_across_stages = !part.last}},
                                           {ctx, "wpe", in_order(ctx, how).order, c.init});
            },
            [&](std::int64_t i) {
              const std::string name = "h." + std::to_string(i);
              const pl::attention_options attention{
                  .qkv_bias = true, .output_bias = true, .init = c.init, .output_init = c.init};
              return
                  typename l::block({typename l::norm(ctx, c.epsilon, name + ".ln_1"),
                                     typename l::attention(ctx, name + ".attn", attention)},
                                    {typename l::norm(ctx, c.epsilon, name + ".ln_2"),
                                     typename l::mlp(typename l::up(ctx, name + ".mlp.c_fc", {.init = c.init}), {},
                                                     typename l::down(ctx, name + ".mlp.c_proj", {.init = c.init}))});
            },
            [&](const auto& of_head, const auto& table) {
              using output = typename l::output;
              const typename output::options how_made{
                  .shape = {c.vocab, c.hidden}, .init = c.init, .tied = table, .tied_across_stages = true};
              return typename l::head(typename l::norm(of_head, c.epsilon, "ln_f"), output(of_head, "wte", how_made));
            }) {}

 private:
  static pl::language_model_options in_order(const pl::context<D>& ctx, pl::language_model_options how) {
    how.order = pl::sequence_order_of<S>(ctx.ranks.shape(), ctx.sizes);
    return how;
  }
};

}  // namespace gpt2
