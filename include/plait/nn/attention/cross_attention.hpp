// Attention to the output of an encoder, and the strategy of that encoder. Combinators do not take it, because it has
// two inputs.
#pragma once

#include <string>
#include <utility>

#include "plait/nn/attention.hpp"
#include "plait/nn/attention/core.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/layer.hpp"
#include "plait/tensor/check_values.hpp"

namespace plait {
namespace detail {

/// `Spec` with `source_seq` in place of the dim of tokens.
template <class Spec>
struct on_source_value {
  static constexpr layout value = [] {
    layout a = layout_v<Spec>;
    const dim_id sequence = sequence_of(a);
    for (dim_placement& p : a.dims)
      if (p.dim == sequence) p.dim = dim_of<source_seq>;
    return a;
  }();
};
template <class Spec>
using on_source_t = spec_from<on_source_value<Spec>, Spec, spec<source_seq>>;

/// The layout of a memory that all queries see: whole along its sequence, and replicated over the axes of heads and of
/// context parallelism.
constexpr layout seen_by_all(layout memory, const axis_list& axes) {
  for (axis_id axis : axes) memory.set(axis, state::replicated);
  return memory;
}

template <class S, class Memory>
struct cross_values {
  using specs = transformer_specs<S>;
  static constexpr axis_list axes =
      union_of(sharding_axes(layout_v<typename specs::query_dims>), context_axes<typename specs::attention>);
  struct seen {
    static constexpr layout value = seen_by_all(layout_v<Memory>, axes);
  };
  struct keys {
    static constexpr layout value = inside_branch(layout_v<Memory>, layout_v<typename specs::key_dims>, axes);
  };
};

}  // namespace detail

/// The strategy of an encoder whose output a decoder under `Base` attends to. It equals `Base`, but its dim of tokens
/// is `source_seq`, with its own length.
template <class Base>
struct on_source : Base {
  using residual = detail::on_source_t<typename Base::residual>;
};
template <class Base>
  requires requires {
    typename Base::branch_input;
    typename Base::branch_output;
  }
struct on_source<Base> : Base {
  using residual = detail::on_source_t<typename Base::residual>;
  using branch_input = detail::on_source_t<typename Base::branch_input>;
  using branch_output = detail::on_source_t<typename Base::branch_output>;
};

/// Options of a cross-attention, in addition to its strategy.
struct cross_attention_options {
  bool q_bias = false, k_bias = false, v_bias = false, output_bias = false;
  initializer init{};
  initializer output_init{};
  attention_lora lora{};
  std::int64_t overlap = 0;  ///< like `linear_options::overlap`; the gather of the memory is not chunked, since two
                             ///< products use it
};

/// Attention with two inputs (Vaswani et al. 2017) under a strategy: queries from x, keys and values from a memory,
/// such as an encoder's output. Each query attends to the whole memory, without a mask or positions. x has the layout
/// of `self_attention`'s input. The memory has the same layout with `source_seq` as its dim of tokens; one gather
/// serves keys and values. With context parallelism x stays sharded, and the memory is gathered over those axes too.
///
/// Parameters are named `NAME.q_proj`, `k_proj`, `v_proj`, `o_proj`. This class does not model `layer`: its owner
/// passes the memory and adds up the memory's gradient.
template <class Precision, class S, compute_device Device = cpu>
class cross_attention {
  using T = activation_of<Precision>;
  using specs = transformer_specs<S>;

 public:
  using value_type = T;
  using device = Device;
  using input = typename specs::branch_input;
  using memory_input = detail::on_source_t<input>;
  using output = typename specs::branch_output;
  template <class Spec>
  using tensor_of = tensor<T, Spec, Device>;

 private:
  using values = detail::cross_values<S, memory_input>;
  using seen = spec_from<typename values::seen, memory_input, typename specs::query_dims>;
  using keys = spec_from<typename values::keys, memory_input, typename specs::query_dims, typename specs::key_dims>;
  using queries = typename specs::queries;
  using key = typename specs::template policy<seen, typename specs::key::weight, keys>;
  using query_value = detail::linear_value<typename specs::query>;
  using key_value = detail::linear_value<key>;
  using out_value = detail::linear_value<typename specs::attention_output>;
  static_assert(enforced<query_value, S, input, queries>);
  static_assert(enforced<key_value, S, memory_input, keys>);
  static_assert(enforced<out_value, S, input, queries>);
  using core = attention_core<Precision, queries, keys, Device>;
  using gathering = redistribution<T, memory_input, seen, Device>;

 public:
  struct saved {
    linear_saved<Device> q, k, v, out;
    tensor_of<seen> gathered;  ///< the gathered memory; empty if it equals the memory or will be gathered again
    tensor_of<queries> attended;
    typename core::saved inside;

    template <class F>
    void visit(F&& f) {
      for (auto* linear : {&q, &k, &v, &out}) linear->visit(f);
      f(gathered);
      f(attended);
      inside.visit(f);
    }
  };
  struct gradients {
    tensor_of<dual_t<input>> x;
    tensor_of<dual_t<memory_input>> memory;
  };

  cross_attention(const context<Device>& ctx, const std::string& name, const cross_attention_options& how = {})
      : names_(name),
        gather_(ctx, name + ": memory"),
        q_(ctx, query_value::derivation,
           {detail::describe_branch<typename specs::query>(ctx, name + ".q_proj", how.init, how.q_bias, how.lora.q)},
           {}, {}, detail::chosen_overlap<typename specs::query>(how.overlap, name)),
        k_(ctx, key_value::derivation,
           {detail::describe_branch<key>(ctx, name + ".k_proj", how.init, how.k_bias, how.lora.k)}),
        v_(ctx, key_value::derivation,
           {detail::describe_branch<key>(ctx, name + ".v_proj", how.init, how.v_bias, how.lora.v)}),
        out_(ctx, out_value::derivation,
             {detail::describe_branch<typename specs::attention_output>(ctx, name + ".o_proj", how.output_init,
                                                                        how.output_bias, how.lora.o)},
             {}, {}, detail::chosen_overlap<typename specs::query>(how.overlap, name)),
        core_(ctx, name) {
    enforce_boundary<input>(ctx, name + ": input");
  }

  /// Adds `addend`, such as the residual stream, to the output unless it is null.
  tensor_of<output> forward(const microbatch<Device>& mb, const tensor_of<input>& x,
                            const tensor_of<memory_input>& source, saved* keep = nullptr,
                            const tensor_of<output>* addend = nullptr) {
    const range profiled(mb.ctx.device, names_.forward());
    check_sizes(x, source);
    if (keep) *keep = {};  // drops the values of an earlier pass
    tensor_of<seen> gathered = gather(mb, source);
    tensor_of<queries> q(mb.ctx);
    tensor_of<keys> k(mb.ctx), v(mb.ctx);
    q_.forward(mb, x.data(), q.data(), keep ? &keep->q : nullptr);
    k_.forward(mb, gathered.data(), k.data(), keep ? &keep->k : nullptr);
    v_.forward(mb, gathered.data(), v.data(), keep ? &keep->v : nullptr);
    tensor_of<queries> attended =
        core_.forward(mb, std::move(q), std::move(k), std::move(v), keep ? &keep->inside : nullptr);
    tensor_of<output> y(mb.ctx);
    out_.forward(mb, attended.data(), y.data(), keep ? &keep->out : nullptr,
                 detail::addend_array(out_.weight(0)->name(), addend, out_.output_size()));
    detail::note_forward(mb, *this, layout_v<input>, q_.weight(0)->name(), x.data(), x.size());
    detail::note_forward(mb, *this, layout_v<memory_input>, k_.weight(0)->name(), source.data(), source.size());
    if (!keep) return y;
    if (gathered.owning() && mb.policy == recompute::none) keep->gathered = std::move(gathered);
    keep->attended = std::move(attended);
    return y;
  }

  /// Returns the gradients of both inputs. `x` and `source` are the inputs of the forward pass, which the caller has
  /// kept.
  template <spec_like Gradient>
  gradients backward(const microbatch<Device>& mb, const tensor_of<input>& x, const tensor_of<memory_input>& source,
                     saved& kept, const tensor_of<Gradient>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, S, Gradient, output>);
    const range profiled(mb.ctx.device, names_.backward());
    check_sizes(x, source);
    detail::require_size(q_.weight(0)->name(), "dy", dy.size(), out_.output_size());
    detail::note_backward(mb, detail::dual_v<output>, out_.weight(0)->name(), dy.data(), dy.size());
    tensor_of<dual_t<queries>> dattended(mb.ctx);
    out_.backward(mb, kept.attended.data(), kept.out, dy.data(), dattended.data());
    const auto inside = core_.backward(mb, kept.attended, kept.inside, dattended);
    if (!kept.gathered) kept.gathered = gather(mb, source);
    const T* const m = kept.gathered.data();
    tensor_of<dual_t<seen>> from_keys(mb.ctx), dseen(mb.ctx);
    k_.backward(mb, m, kept.k, inside.k.data(), from_keys.data());
    v_.backward(mb, m, kept.v, inside.v.data(), dseen.data(), from_keys.data());
    typename gathering::saved none;
    gradients d{tensor_of<dual_t<input>>(mb.ctx), gather_.backward(mb, source, none, dseen)};
    q_.backward(mb, x.data(), kept.q, inside.q.data(), d.x.data());
    return d;
  }

  template <class F>
  void visit(F&& f) {
    for (auto* linear : {&q_, &k_, &v_, &out_}) linear->visit(f);
  }

 private:
  void check_sizes(const tensor_of<input>& x, const tensor_of<memory_input>& source) const {
    detail::require_size(q_.weight(0)->name(), "x", x.size(), q_.input_size());
    detail::require_size(q_.weight(0)->name(), "the memory", source.size(), gather_.input_size());
  }
  /// Returns the gathered memory; a view of `source` if no data moves.
  tensor_of<seen> gather(const microbatch<Device>& mb, const tensor_of<memory_input>& source) {
    if (gather_.trivial()) return tensor_of<seen>(mb.ctx, const_cast<T*>(source.data()));
    return gather_.forward(mb, source);
  }

  detail::layer_names names_;
  gathering gather_;
  linear_core<Precision, Device> q_, k_, v_, out_;
  core core_;
};

}  // namespace plait
