#pragma once

#include "plait/nn/attention/cross_attention.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/pointwise.hpp"

// An encoder layer and a decoder layer (Vaswani et al. 2017), composed from plait's layers. As in BART (Lewis et al.
// 2020) they have biases, gelu, and LayerNorm after each sum. The decoder has two inputs, so it is a class of its own.
namespace encoder_decoder {

namespace pl = plait;

/// y = norm(x + layer(x)).
template <class Layer, class Norm>
class post_norm {
 public:
  using value_type = typename Norm::value_type;
  using device = typename Norm::device;
  using input = typename Norm::input;
  using output = typename Norm::output;
  template <class Spec>
  using tensor_of = pl::tensor<value_type, Spec, device>;

  struct saved {
    typename Layer::saved inner;
    tensor_of<output> sum;
    typename Norm::saved norm;
  };

  post_norm(Layer inner, Norm norm) : inner_(std::move(inner)), norm_(std::move(norm)) {}

  tensor_of<output> forward(const pl::microbatch<device>& mb, const tensor_of<input>& x, saved* keep = nullptr) {
    tensor_of<output> sum = inner_.forward(mb, x, keep ? &keep->inner : nullptr, &x);
    tensor_of<output> y = norm_.forward(mb, sum, keep ? &keep->norm : nullptr);
    if (keep) keep->sum = std::move(sum);
    return y;
  }
  tensor_of<pl::dual_t<input>> backward(const pl::microbatch<device>& mb, const tensor_of<input>& x, saved& kept,
                                        const tensor_of<pl::dual_t<output>>& dy) {
    const auto dsum = norm_.backward(mb, kept.sum, kept.norm, dy);
    auto dx = inner_.backward(mb, x, kept.inner, dsum);
    pl::kernels::accumulate(mb.ctx.device, dsum.data(), dx.data(), dx.size());
    return dx;
  }
  template <class F>
  void visit(F&& f) {
    inner_.visit(f);
    norm_.visit(f);
  }

 private:
  Layer inner_;
  Norm norm_;
};

/// The parts of both layers for a precision, a strategy and a device: their types, and functions that make them.
template <class P, pl::strategy S, class D>
struct parts {
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
  using gelu = pl::activation<P, pl::gelu, typename specs::wide, D>;
  using down = pl::linear<P, down_policy, D>;
  using mlp = pl::sequential<up, gelu, down>;
  using attention_part = post_norm<attention, norm>;
  using mlp_part = post_norm<mlp, norm>;
  using encoder = pl::sequential<attention_part, mlp_part>;

  static attention_part make_attention(const pl::context<D>& ctx, const std::string& name, bool causal) {
    return {attention(ctx, name + ".self_attn",
                      {.mask = causal ? pl::kernels::attention_mask::causal() : pl::kernels::attention_mask::full(),
                       .qkv_bias = true,
                       .output_bias = true}),
            norm(ctx, 1e-5, name + ".self_attn_layer_norm")};
  }
  static mlp_part make_mlp(const pl::context<D>& ctx, const std::string& name) {
    return {mlp(up(ctx, name + ".fc1"), gelu(), down(ctx, name + ".fc2")), norm(ctx, 1e-5, name + ".final_layer_norm")};
  }
};

/// Self-attention without a mask, then the MLP. For a decoder under S, an encoder under `on_source<S>`.
template <class P, pl::strategy S, class D = pl::cpu>
class encoder_layer : public parts<P, S, D>::encoder {
 public:
  encoder_layer(const pl::context<D>& ctx, const std::string& name)
      : parts<P, S, D>::encoder(parts<P, S, D>::make_attention(ctx, name, false), parts<P, S, D>::make_mlp(ctx, name)) {
  }
};

/// Causal self-attention, attention to the encoder's output, then the MLP.
template <class P, pl::strategy S, class D = pl::cpu>
class decoder_layer {
  using p = parts<P, S, D>;
  using cross_type = pl::cross_attention<P, S, D>;

 public:
  using value_type = typename cross_type::value_type;
  using device = D;
  using input = typename p::specs::residual;
  using output = input;
  using memory_input = typename cross_type::memory_input;
  using gradients = typename cross_type::gradients;
  template <class Spec>
  using tensor_of = pl::tensor<value_type, Spec, D>;

  struct saved {
    typename p::attention_part::saved self;
    typename cross_type::saved cross;
    typename p::norm::saved norm;
    typename p::mlp_part::saved mlp;
    tensor_of<input> queries, sum, normalized;  ///< the inputs of cross-attention, of its norm and of the MLP
  };

  decoder_layer(const pl::context<D>& ctx, const std::string& name)
      : self_(p::make_attention(ctx, name, true)),
        cross_(ctx, name + ".encoder_attn", {.q_bias = true, .k_bias = true, .v_bias = true, .output_bias = true}),
        norm_(ctx, 1e-5, name + ".encoder_attn_layer_norm"),
        mlp_(p::make_mlp(ctx, name)) {}

  tensor_of<output> forward(const pl::microbatch<D>& mb, const tensor_of<input>& x,
                            const tensor_of<memory_input>& memory, saved* keep = nullptr) {
    tensor_of<input> queries = self_.forward(mb, x, keep ? &keep->self : nullptr);
    tensor_of<input> sum = cross_.forward(mb, queries, memory, keep ? &keep->cross : nullptr, &queries);
    tensor_of<input> normalized = norm_.forward(mb, sum, keep ? &keep->norm : nullptr);
    tensor_of<output> y = mlp_.forward(mb, normalized, keep ? &keep->mlp : nullptr);
    if (keep) {
      keep->queries = std::move(queries);
      keep->sum = std::move(sum);
      keep->normalized = std::move(normalized);
    }
    return y;
  }
  /// The gradients of x and of the memory.
  gradients backward(const pl::microbatch<D>& mb, const tensor_of<input>& x, const tensor_of<memory_input>& memory,
                     saved& kept, const tensor_of<pl::dual_t<output>>& dy) {
    const auto dnormalized = mlp_.backward(mb, kept.normalized, kept.mlp, dy);
    const auto dsum = norm_.backward(mb, kept.sum, kept.norm, dnormalized);
    gradients d = cross_.backward(mb, kept.queries, memory, kept.cross, dsum);
    pl::kernels::accumulate(mb.ctx.device, dsum.data(), d.x.data(), d.x.size());
    d.x = self_.backward(mb, x, kept.self, d.x);
    return d;
  }
  template <class F>
  void visit(F&& f) {
    self_.visit(f);
    cross_.visit(f);
    norm_.visit(f);
    mlp_.visit(f);
  }

 private:
  typename p::attention_part self_;
  cross_type cross_;
  typename p::norm norm_;
  typename p::mlp_part mlp_;
};

}  // namespace encoder_decoder
