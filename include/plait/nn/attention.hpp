#pragma once

#include <cmath>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/layout/errors.hpp"
#include "plait/nn/context_parallel/chosen.hpp"
#include "plait/nn/recompute.hpp"
#include "plait/nn/sublayer.hpp"

namespace plait {
namespace detail {
template <class S>
struct attend_value {
  using specs = transformer_specs<S>;
  static constexpr verdict value =
      attend(layout_v<typename specs::queries>, layout_v<typename specs::keys>, layout_v<typename specs::keys>,
             {specs::sequence, dim_of<heads>, dim_of<kv_heads>, context_axes<typename specs::attention>})
          .verdict;
};
}  // namespace detail

/// What bounds the tokens that a token sees, beside the causal mask.
struct attention_options {
  /// A token sees itself and window - 1 tokens before it; 0: all before it.
  std::int64_t window = 0;
  /// Whether sequences are packed from documents, which do not see each other: then `context::document_starts` names
  /// the first token of each token's document.
  bool documents = false;
  /// What `chosen_context` is.
  context_choice context = context_choice::ring;
};

/// Grouped-query causal self-attention with rotary positions under a strategy: queries, keys and values are one product
/// over one gathered input; attention runs on the rank's own heads in blocks, so that no seq x seq array exists; the
/// output projection brings the result back to the residual. Where the strategy shards heads over more axes than kv
/// heads, keys and values are replicated over the rest, and their gradients are summed there because their types say
/// so. Where it leaves the sequence sharded, its policy `S::attention` says how attention sees all of it.
///
/// Rotary positions are those of the text, counted from the beginning of the sequence, also where documents are packed.
template <class Precision, class S, compute_device Device = cpu>
class self_attention {
  using T = activation_of<Precision>;
  using statistic = statistic_of<Precision>;
  using specs = transformer_specs<S>;
  using qkv_value = detail::linear_value<typename specs::query, typename specs::key, typename specs::key>;
  using out_value = detail::linear_value<typename specs::attention_output>;
  using engine = typename specs::attention::template engine<Precision, Device>;
  static_assert(attention_engine<engine, Precision, Device>,
                "the engine of a strategy's attention policy must model plait::attention_engine");

 public:
  using value_type = T;
  using device = Device;
  using input = typename specs::residual;
  using output = typename specs::residual;
  static_assert(enforced<qkv_value, S, input, typename specs::queries, typename specs::keys>);
  static_assert(enforced<detail::attend_value<S>, S, typename specs::queries, typename specs::keys>);
  static_assert(enforced<out_value, S, input, typename specs::queries>);

  struct saved {
    linear_saved<Device> in, out;
    buffer<Device> qkv;       ///< [rows, (heads + 2 kv_heads) local, head_dim], q and k rotated; if the engine needs it
    buffer<Device> attended;  ///< [rows, heads local, head_dim]
    typename engine::saved engine_saved;
    const std::int32_t* document_starts = nullptr;  ///< the caller's, who keeps it as he does the input
  };

  /// `frequencies` are the inverse rotary frequencies, head_dim / 2 of them. Positions are 0 ... seq - 1.
  self_attention(context<Device>& ctx, const std::string& name, std::span<const double> frequencies,
                 initializer init = {}, initializer output_init = {}, bool bias = false, attention_options options = {})
      : names_(name),
        qkv_(ctx, qkv_value::derivation,
             {detail::describe_branch<typename specs::query, Precision, Device, 3>(ctx, name + ".q_proj", init, bias),
              detail::describe_branch<typename specs::key, Precision, Device, 3>(ctx, name + ".k_proj", init, bias),
              detail::describe_branch<typename specs::key, Precision, Device, 3>(ctx, name + ".v_proj", init, bias)}),
        out_(ctx, out_value::derivation,
             {detail::describe_branch<typename specs::attention_output, Precision, Device, 1>(ctx, name + ".o_proj",
                                                                                              output_init, bias)}),
        documents_(options.documents) {
    enforce_boundary<input>(ctx, name + ": input");
    const std::int64_t rank = ctx.ranks.rank();
    const mesh_shape& mesh = ctx.ranks.shape();
    const box q = local_box(layout_v<typename specs::queries>, mesh, ctx.sizes, rank);
    const box k = local_box(layout_v<typename specs::keys>, mesh, ctx.sizes, rank);
    const std::int64_t local_heads = q.local[2], local_kv = k.local[2];
    const std::int64_t group = q.global[2] / k.global[2];  // query heads for each kv head
    // The queries here may need only some of the kv heads here, where kv heads are replicated over further axes.
    const std::int64_t first = q.offset[2] / group - k.offset[2];
    const std::int64_t used = local_heads >= group ? local_heads / group : 1;
    if (q.global[2] % k.global[2] != 0 || (local_heads >= group ? local_heads % group : group % local_heads) != 0)
      fail(name + ": heads = " + std::to_string(q.global[2]) + ", kv_heads = " + std::to_string(k.global[2]) + " and " +
           std::to_string(local_heads) +
           " heads on each rank: heads must be a multiple of kv_heads, and the heads of a rank "
           "must be whole groups or a whole part of one group of " +
           std::to_string(group));
    key_at_ = (local_heads + first) * q.local[3];
    value_at_ = (local_heads + local_kv + first) * q.local[3];
    kv_width_ = local_kv * q.local[3];
    shape_.batch = q.local[0];
    shape_.q_len = shape_.k_len = q.local[1];
    shape_.heads = local_heads;
    shape_.kv_heads = used;
    shape_.head_dim = q.local[3];
    shape_.scale = 1.0 / std::sqrt(static_cast<double>(shape_.head_dim));
    shape_.q_stride = shape_.k_stride = shape_.v_stride = qkv_.columns();
    shape_.window = options.window;
    if (static_cast<std::int64_t>(frequencies.size()) * 2 != shape_.head_dim)
      fail(name + ": " + std::to_string(frequencies.size()) +
           " rotary frequencies for head_dim = " + std::to_string(shape_.head_dim) + ", must be half of it");
    if (options.window < 0)
      fail(name + ": attention_window is " + std::to_string(options.window) + "; at least 1, or 0 for none");
    const sequence_order order = sequence_order_of<S>(mesh, ctx.sizes);
    const axis_list& axes = context_axes<typename specs::attention>;
    attention_part part{shape_,     {},   static_cast<std::size_t>(mesh.index_in(rank, axes)),
                        documents_, name, options.context};
    for (std::int64_t at = 0; at < q.global[1]; at += shape_.q_len) part.blocks.push_back(order.runs(at, shape_.q_len));
    engine_ = engine(ctx, part, axes);
    const std::vector<std::int64_t> positions = order.positions(q.offset[1], shape_.q_len);
    rotations_ = make_buffer<statistic>(ctx.device, positions.size() * frequencies.size() * 2);
    kernels::rope_table(ctx.device, positions.data(), shape_.q_len, frequencies, cosine(), sine());
  }

  /// `addend`, such as the stream that a residual branch leaves, is added to the output where it is not null.
  tensor<T, output, Device> forward(context<Device>& ctx, const tensor<T, input, Device>& x, saved* keep = nullptr,
                                    recompute policy = recompute::none,
                                    const tensor<T, output, Device>* addend = nullptr) {
    const range shown(ctx.device, names_.forward());
    auto qkv = make_buffer<T>(ctx.device, static_cast<std::size_t>(qkv_.output_size()));
    auto attended = make_buffer<T>(ctx.device, static_cast<std::size_t>(attended_size()));
    T* const q = qkv.template data<T>();
    qkv_.forward(ctx, x.data(), q, keep && policy == recompute::none ? &keep->in : nullptr);
    rotate(ctx, q, [](auto&&... a) { kernels::rope_forward(a...); });
    const std::int32_t* const documents = document_starts(ctx);
    engine_.forward(ctx, inputs(q, documents), attended.template data<T>(), keep ? &keep->engine_saved : nullptr);
    if (keep && engine_.keeps_inputs()) keep->qkv = std::move(qkv);
    qkv.reset();
    tensor<T, output, Device> y(ctx);
    out_.forward(ctx, attended.template data<T>(), y.data(), keep ? &keep->out : nullptr,
                 addend ? addend->data() : nullptr);
    if (keep) {
      keep->attended = std::move(attended);
      keep->document_starts = documents;
    }
    return y;
  }

  template <spec_like Gradient>
  tensor<T, dual_t<input>, Device> backward(context<Device>& ctx, const tensor<T, input, Device>& x, saved& kept,
                                            const tensor<T, Gradient, Device>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, S, Gradient, output>);
    const range shown(ctx.device, names_.backward());
    auto dattended = make_buffer<T>(ctx.device, static_cast<std::size_t>(attended_size()));
    auto dqkv = make_buffer<T>(ctx.device, static_cast<std::size_t>(qkv_.output_size()));
    const T* const q = kept.qkv.template data<T>();
    T* const dq = dqkv.template data<T>();
    out_.backward(ctx, kept.attended.template data<T>(), kept.out, dy.data(), dattended.template data<T>());
    if (shape_.kv_heads * shape_.head_dim != kv_width_) ctx.device.zero(dq, dqkv.bytes(), ctx.device.main_stream());
    engine_.backward(ctx, inputs(q, kept.document_starts), kept.attended.template data<T>(),
                     dattended.template data<T>(), kept.engine_saved,
                     attention_gradients<T>{dq, dq + key_at_, dq + value_at_});
    rotate(ctx, dq, [](auto&&... a) { kernels::rope_backward(a...); });
    tensor<T, dual_t<input>, Device> dx(ctx);
    qkv_.backward(ctx, x.data(), kept.in, dq, dx.data());
    return dx;
  }

  std::int64_t saved_bytes(const context<Device>&, recompute policy = recompute::none) const {
    const std::int64_t inputs = engine_.keeps_inputs() ? qkv_.output_size() : 0;
    return (inputs + attended_size()) * static_cast<std::int64_t>(sizeof(T)) + engine_.saved_bytes() +
           out_.saved_bytes() + (policy == recompute::none ? qkv_.saved_bytes() : 0);
  }
  template <class F>
  void visit(F&& f) {
    qkv_.visit(f);
    out_.visit(f);
  }
  template <class F>
  void visit_collectives(F&& f, recompute policy = recompute::none) const {
    qkv_.visit_collectives(f, policy);
    engine_.visit_collectives(f);
    out_.visit_collectives(f);
  }

 private:
  statistic* cosine() { return rotations_.template data<statistic>(); }
  statistic* sine() { return cosine() + shape_.q_len * shape_.head_dim / 2; }
  std::int64_t attended_size() const { return shape_.batch * shape_.q_len * shape_.heads * shape_.head_dim; }

  attention_inputs<T> inputs(const T* q, const std::int32_t* documents) const {
    return q ? attention_inputs<T>{q, q + key_at_, q + value_at_, documents}
             : attention_inputs<T>{nullptr, nullptr, nullptr, documents};
  }
  const std::int32_t* document_starts(const context<Device>& ctx) const {
    if ((ctx.document_starts != nullptr) != documents_)
      fail(documents_
               ? "attention_options::documents is set, but the context has no document_starts for this microbatch"
               : "the context has document_starts, but attention_options::documents is not set: this model would "
                 "ignore them");
    return ctx.document_starts;
  }

  /// Applies a rotation to queries and to all local keys, which lie side by side.
  template <class F>
  void rotate(context<Device>& ctx, T* qkv, F kernel) {
    const std::int64_t turned = shape_.heads + kv_width_ / shape_.head_dim;
    kernel(ctx.device, qkv, static_cast<const statistic*>(cosine()), static_cast<const statistic*>(sine()),
           shape_.batch * shape_.q_len, turned, shape_.head_dim, qkv_.columns(), shape_.q_len);
  }

  range_names names_;
  linear_core<Precision, Device, 3> qkv_;
  linear_core<Precision, Device, 1> out_;
  kernels::attention_shape shape_;
  engine engine_;
  bool documents_ = false;
  std::int64_t key_at_ = 0, value_at_ = 0, kv_width_ = 0;  ///< in elements of a row of qkv
  buffer<Device> rotations_;
};

}  // namespace plait
