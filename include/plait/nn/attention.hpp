// The layer of self-attention with its projections, under a strategy.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/layout/errors.hpp"
#include "plait/nn/attention/chosen.hpp"
#include "plait/nn/attention/core.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/tensor/check_values.hpp"

namespace plait::detail {

// Norms of queries and keys inside self-attention (`attention_options::qk_norm_epsilon`).

/// The rotary tables of a rank's tokens, [tokens, head_dim / 2] each; null: no rotation.
template <class S>
struct rotary_tables {
  const S *cosine = nullptr, *sine = nullptr;
  std::int64_t tokens = 0;
};

template <compute_device Device>
struct head_norms_saved {
  std::array<buffer<Device>, 2> before, inv_rms;  ///< of queries, of keys

  template <class F>
  void visit(F&& f) {
    for (std::size_t i = 0; i < 2; ++i) f(before[i]), f(inv_rms[i]);
  }
};

/// RMSNorm of each head's query and of each head's key (Dehghani et al. 2023). Rows hold queries, keys and values side
/// by side. One weight [head_dim] serves all query heads, another all key heads. With `over_heads`, one norm covers all
/// queries of a token and another all its keys; their weights have the same widths. Ranks that share these heads gather
/// them first.
template <class Precision, compute_device Device>
class head_norms {
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;

 public:
  /// The input has `rows` rows of `stride` elements: `heads` queries, then `kv_heads` keys, then other columns.
  head_norms(const context<Device>& ctx, const std::string& name, const layout& queries, const layout& keys,
             double epsilon, bool over_heads, std::int64_t rows, std::int64_t heads, std::int64_t kv_heads,
             std::int64_t head_dim, std::int64_t stride,
             const std::array<parameter_memory<Precision>, 2>& callers = {});

  /// Takes the sizes of a context with another number of rows.
  void resize(const context<Device>& ctx, std::int64_t rows);
  void rebind(const std::array<parameter_memory<Precision>, 2>& callers, rebinding how);

  /// Normalises queries and keys in place, and rotates them in the same pass.
  void forward(const context<Device>& ctx, T* qkv, const rotary_tables<S>& rotation, head_norms_saved<Device>* keep);

  /// Overwrites the gradients of `forward`'s results in `dqkv` with the gradients of its inputs.
  void backward(const microbatch<Device>& mb, T* dqkv, const rotary_tables<S>& rotation,
                head_norms_saved<Device>& kept);

  template <class F>
  void visit(F&& f) {
    for (auto& weight : weights_) f(*weight);
  }

 private:
  /// The number of normalised vectors, and the width of each.
  std::int64_t vectors(std::size_t i) const { return over_heads_ ? rows_ : rows_ * heads_[i]; }
  std::int64_t width(std::size_t i) const { return weights_[i]->used_size(); }
  /// The number of elements of this rank's heads, and of the normalised vectors.
  std::size_t own(std::size_t i) const { return static_cast<std::size_t>(rows_ * heads_[i] * head_dim_); }
  std::size_t count(std::size_t i) const { return static_cast<std::size_t>(vectors(i) * width(i)); }
  /// Returns the result of a plan on `in`; if no data moves, this is the same memory.
  static buffer<Device> moved(Device& device, const ready_plan& plan, buffer<Device> in) {
    if (plan.trivial()) return in;
    auto out =
        buffer<Device>::for_collectives(device, static_cast<std::size_t>(plan.target().local_size()) * sizeof(T));
    plan.run(device, in.data(), out.data(), dtype_of<T>);
    return out;
  }
  static layout with_all_heads(layout a) {
    const axis_list axes = a.dims[2].axes;
    for (axis_id axis : axes) a.set(axis, state::invariant);
    return a;
  }
  std::int64_t bytes(std::int64_t elements) const { return elements * static_cast<std::int64_t>(sizeof(T)); }
  std::int64_t begin(std::size_t i) const { return i == 0 ? 0 : heads_[0] * head_dim_; }

  void take(Device& device, const T* qkv, std::size_t i, T* heads) const {
    const std::int64_t width = bytes(heads_[i] * head_dim_);
    kernels::copy_2d(device, qkv + begin(i), heads, rows_, width, bytes(stride_), width);
  }
  void put(Device& device, const T* heads, std::size_t i, T* qkv) const {
    const std::int64_t width = bytes(heads_[i] * head_dim_);
    kernels::copy_2d(device, heads, qkv + begin(i), rows_, width, width, bytes(stride_));
  }

  std::string name_;
  std::array<layout, 2> own_heads_;  ///< of queries, of keys
  double epsilon_;
  bool over_heads_;
  std::array<ready_plan, 2> gather_, cut_, gather_back_, cut_back_;  ///< for a norm over heads
  std::int64_t rows_ = 0;
  std::array<std::int64_t, 2> heads_;
  std::int64_t head_dim_, stride_;
  std::array<parameter_ptr<Precision, Device>, 2> weights_;
};

template <class Precision, compute_device Device>
head_norms<Precision, Device>::head_norms(const context<Device>& ctx, const std::string& name, const layout& queries,
                                          const layout& keys, double epsilon, bool over_heads, std::int64_t rows,
                                          std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim,
                                          std::int64_t stride,
                                          const std::array<parameter_memory<Precision>, 2>& callers)
    : name_(name),
      own_heads_{queries, keys},
      epsilon_(epsilon),
      over_heads_(over_heads),
      heads_{heads, kv_heads},
      head_dim_(head_dim),
      stride_(stride) {
  require_any_order(ctx, name, "norms of queries and keys");
  for (std::size_t i = 0; i < 2; ++i) {
    const std::string norm = name + (i == 0 ? ".q_norm" : ".k_norm");
    const layout& own = own_heads_[i];
    layout weight;
    if (over_heads) weight.dims.push_back({own.dims[2].dim, {}});
    weight.dims.push_back({own.dims[3].dim, {}});
    const std::int64_t wide = over_heads ? head_dim * ctx.sizes.of(own.dims[2].dim) : head_dim;
    weights_[i] = std::make_shared<parameter<Precision, Device>>(
        ctx, parameter_info{norm + ".weight", {wide}, {1, 0}, false}, weight, weight,
        over_heads ? with_all_heads(own) : own,
        parameter_place<Precision, Device>(ctx.device, wide, callers[i].weight.pointer(), callers[i].gradient.pointer(),
                                           callers[i].master.pointer()));
    require_memory<Precision, Device>(norm, {weights_[i]}, {}, callers[i]);
  }
  resize(ctx, rows);
}

template <class Precision, compute_device Device>
void head_norms<Precision, Device>::resize(const context<Device>& ctx, std::int64_t rows) {
  rows_ = rows;
  for (std::size_t i = 0; over_heads_ && i < 2; ++i) {
    const layout& own = own_heads_[i];
    gather_[i] = ready_plan(own, with_all_heads(own), ctx.ranks, ctx.sizes, name_);
    cut_[i] = ready_plan(with_all_heads(own), own, ctx.ranks, ctx.sizes, name_);
    gather_back_[i] = ready_plan(gather_[i].backward(), ctx.ranks, ctx.sizes, name_);
    cut_back_[i] = ready_plan(cut_[i].backward(), ctx.ranks, ctx.sizes, name_);
  }
}

template <class Precision, compute_device Device>
void head_norms<Precision, Device>::rebind(const std::array<parameter_memory<Precision>, 2>& callers, rebinding how) {
  for (std::size_t i = 0; i < 2; ++i) {
    const std::string_view name = weights_[i]->name();
    rebind_parameters<Precision, Device>(name.substr(0, name.rfind(".weight")), {weights_[i]}, {}, callers[i], false,
                                         how);
  }
}

template <class Precision, compute_device Device>
void head_norms<Precision, Device>::forward(const context<Device>& ctx, T* qkv, const rotary_tables<S>& rotation,
                                            head_norms_saved<Device>* keep) {
  for (std::size_t i = 0; i < 2; ++i) {
    auto before = make_buffer<T>(ctx.device, own(i));
    take(ctx.device, qkv, i, before.template data<T>());
    before = moved(ctx.device, gather_[i], std::move(before));
    auto after = make_buffer<T>(ctx.device, count(i));
    auto inv = make_buffer<S>(ctx.device, static_cast<std::size_t>(vectors(i)));
    kernels::norm_forward(ctx.device, before.template data<T>(), weights_[i]->used_value(), nullptr,
                          after.template data<T>(), nullptr, inv.template data<S>(), vectors(i), width(i), epsilon_);
    after = moved(ctx.device, cut_[i], std::move(after));
    if (rotation.cosine)
      kernels::rope_forward(ctx.device, static_cast<const T*>(after.template data<T>()), heads_[i] * head_dim_,
                            qkv + begin(i), rotation.cosine, rotation.sine, rows_, heads_[i], head_dim_, stride_,
                            rotation.tokens);
    else
      put(ctx.device, after.template data<T>(), i, qkv);
    if (!keep) continue;
    keep->before[i] = std::move(before);
    keep->inv_rms[i] = std::move(inv);
  }
}

template <class Precision, compute_device Device>
void head_norms<Precision, Device>::backward(const microbatch<Device>& mb, T* dqkv, const rotary_tables<S>& rotation,
                                             head_norms_saved<Device>& kept) {
  Device& device = mb.ctx.device;
  for (std::size_t i = 0; i < 2; ++i) {
    auto dy = make_buffer<T>(device, own(i));
    if (rotation.cosine)
      kernels::rope_backward(device, static_cast<const T*>(dqkv) + begin(i), stride_, dy.template data<T>(),
                             rotation.cosine, rotation.sine, rows_, heads_[i], head_dim_, heads_[i] * head_dim_,
                             rotation.tokens);
    else
      take(device, dqkv, i, dy.template data<T>());
    dy = moved(device, cut_back_[i], std::move(dy));
    auto dx = make_buffer<T>(device, count(i));
    const T* const x = kept.before[i].template data<T>();
    const S* const inv = kept.inv_rms[i].template data<S>();
    auto& weight = *weights_[i];
    kernels::norm_backward(device, x, weight.used_value(), dy.template data<T>(), nullptr, inv, dx.template data<T>(),
                           static_cast<gradient_of<T>*>(nullptr), nullptr, vectors(i), width(i));
    dx = moved(device, gather_back_[i], std::move(dx));
    put(device, dx.template data<T>(), i, dqkv);
    if (weight.trainable())
      mb.on_weights([this, &device, i, x, inv, dy = std::move(dy)] {
        with_kernel_sum<T>(device, weights_[i]->used_gradient(device), width(i), [&](auto* sums) {
          kernels::norm_backward_dweight(device, x, dy.template data<T>(), nullptr, inv, sums, nullptr, vectors(i),
                                         width(i));
        });
      });
  }
}

PLAIT_COMPILED_TEMPLATE(class head_norms<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class head_norms<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class head_norms<double, cpu>)

}  // namespace plait::detail

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

/// Low-rank adapters of a self-attention's linears.
struct attention_lora {
  lora_options q{}, k{}, v{}, o{};
};

/// Options of a self-attention, in addition to its strategy.
struct attention_options {
  /// Which tokens a token attends to, under every policy of context parallelism.
  kernels::attention_mask mask{};
  /// The change of each score before the softmax.
  kernels::attention_score score{};
  /// Whether each head has a sink: a weight whose exponential is added to the softmax sum of every query, as in
  /// gpt-oss.
  bool sinks = false;
  /// Whether sequences are packed from documents, which do not attend to each other. `microbatch::document_starts` then
  /// has the first token of each token's document. It works with every mask; a mask's prefix is a prefix of the whole
  /// sequence.
  bool documents = false;
  /// The policy that `chosen` selects.
  chosen_policy context = chosen_policy::ring;
  /// Inverse rotary frequencies, head_dim / 2 of them; none: queries and keys are not rotated.
  std::vector<double> frequencies{};
  bool qkv_bias = false;
  bool output_bias = false;
  /// The epsilon of an RMSNorm of each head's query and key before the rotation; 0: no norm.
  double qk_norm_epsilon = 0;
  bool qk_norm_over_heads = false;  ///< one norm of all queries of a token, and one of all its keys (OLMoE)
  initializer init{};
  initializer output_init{};
  attention_lora lora{};
  std::int64_t overlap = 0;  ///< as `linear_options::overlap`
};

/// The caller's memory for an attention's weights (`parameter_memory`), this rank's part. The weights of queries, keys
/// and values are contiguous, [(heads + 2 kv_heads) local, head_dim, hidden], and so are their biases. The last three
/// members hold the weights of the query and key norms and the sinks [heads local], if the attention has them.
template <class Precision>
struct attention_memory {
  parameter_memory<Precision> qkv{}, out{}, q_norm{}, k_norm{}, sinks{};
};

/// Grouped-query self-attention under a strategy. One product on one gathered input computes queries, keys and values.
/// Attention runs on the rank's own heads in blocks, so no seq x seq array exists. The output projection returns the
/// result to the residual's layout.
///
/// The strategy may shard heads over more axes than kv heads. Keys and values are then replicated over the other axes,
/// so their types demand a sum of their gradients there. If the strategy keeps the sequence sharded, its policy
/// `S::attention` defines how queries reach all keys.
///
/// Rotary positions count from the beginning of the sequence, also if documents are packed. Parameters are named
/// `NAME.q_proj`, `k_proj`, `v_proj`, `o_proj`, `q_norm`, `k_norm` and `sinks`.
template <class Precision, class S, compute_device Device = cpu>
class self_attention : public layer_types<activation_of<Precision>, typename transformer_specs<S>::branch_input,
                                          typename transformer_specs<S>::branch_output, Device>,
                       public other_arrays<self_attention<Precision, S, Device>, activation_of<Precision>,
                                           typename transformer_specs<S>::branch_input,
                                           typename transformer_specs<S>::branch_output, Device> {
  using T = activation_of<Precision>;
  using statistic = statistic_of<Precision>;
  using specs = transformer_specs<S>;
  using qkv_value = detail::linear_value<typename specs::query, typename specs::key, typename specs::key>;
  using out_value = detail::linear_value<typename specs::attention_output>;
  using engine = typename specs::attention::template engine<Precision, Device>;
  static_assert(attention_engine<engine, Precision, Device>,
                "the engine of a strategy's attention policy must model plait::attention_engine");

 public:
  using input = typename specs::branch_input;
  using output = typename specs::branch_output;
  using other_arrays<self_attention, T, input, output, Device>::forward;
  using other_arrays<self_attention, T, input, output, Device>::backward;
  static_assert(enforced<qkv_value, S, input, typename specs::queries, typename specs::keys>);
  static_assert(enforced<detail::attend_value<S>, S, typename specs::queries, typename specs::keys>);
  static_assert(enforced<out_value, S, input, typename specs::queries>);

  struct saved {
    linear_saved<Device> in, out;
    buffer<Device> qkv;       ///< [rows, (heads + 2 kv_heads) local, head_dim], q and k rotated; if the engine needs it
    buffer<Device> attended;  ///< [rows, heads local, head_dim]
    detail::head_norms_saved<Device> norms;
    typename engine::saved engine_saved;

    template <class F>
    void visit(F&& f) {
      in.visit(f);
      out.visit(f);
      f(qkv);
      f(attended);
      norms.visit(f);
      visit_saved(engine_saved, f);
    }
  };

  self_attention(const context<Device>& ctx, const std::string& name, attention_options options = {},
                 const attention_memory<Precision>& memory = {})
      : names_(name),
        options_(std::move(options)),
        qkv_(ctx, qkv_value::derivation,
             {detail::describe_branch<typename specs::query>(ctx, name + ".q_proj", options_.init, options_.qkv_bias,
                                                             options_.lora.q),
              detail::describe_branch<typename specs::key>(ctx, name + ".k_proj", options_.init, options_.qkv_bias,
                                                           options_.lora.k),
              detail::describe_branch<typename specs::key>(ctx, name + ".v_proj", options_.init, options_.qkv_bias,
                                                           options_.lora.v)},
             memory.qkv, {}, detail::chosen_overlap<typename specs::query>(options_.overlap, name)),
        out_(ctx, out_value::derivation,
             {detail::describe_branch<typename specs::attention_output>(ctx, name + ".o_proj", options_.output_init,
                                                                        options_.output_bias, options_.lora.o)},
             memory.out, {}, detail::chosen_overlap<typename specs::query>(options_.overlap, name)) {
    enforce_boundary<input>(ctx, name + ": input");
    const bool norms = options_.qk_norm_epsilon > 0;
    check_memory(name, memory);
    take_sizes(ctx, name);
    if (norms)
      norms_.emplace(ctx, name, layout_v<typename specs::queries>, layout_v<typename specs::keys>,
                     options_.qk_norm_epsilon, options_.qk_norm_over_heads, shape_.batch * shape_.q_len, shape_.heads,
                     kv_heads_, shape_.head_dim, qkv_.columns(), std::array{memory.q_norm, memory.k_norm});
    if (options_.sinks) make_sinks(ctx, name, memory.sinks);
  }

  /// Adds `addend`, such as the residual stream, to the output unless it is null.
  tensor<T, output, Device> forward(const microbatch<Device>& mb, const tensor<T, input, Device>& x,
                                    saved* keep = nullptr, const tensor<T, output, Device>* addend = nullptr) {
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, names_.forward());
    check_documents(mb);
    detail::require_size(qkv_.weight(0)->name(), "x", x.size(), qkv_.input_size());
    auto qkv = make_buffer<T>(ctx.device, static_cast<std::size_t>(qkv_.output_size()));
    auto attended = make_buffer<T>(ctx.device, static_cast<std::size_t>(attended_size()));
    T* const q = qkv.template data<T>();
    qkv_.forward(mb, x.data(), q, keep ? &keep->in : nullptr);
    if (norms_)
      norms_->forward(ctx, q, rotation(), keep ? &keep->norms : nullptr);
    else
      rotate(ctx, q, [](auto&&... a) { kernels::rope_forward(a...); });
    engine_.forward(ctx, inputs(q, mb), attended.template data<T>(), keep ? &keep->engine_saved : nullptr);
    if (keep && engine_.keeps_inputs()) keep->qkv = std::move(qkv);
    qkv.reset();
    tensor<T, output, Device> y(ctx);
    out_.forward(mb, attended.template data<T>(), y.data(), keep ? &keep->out : nullptr,
                 detail::addend_array(out_.weight(0)->name(), addend, out_.output_size()));
    if (keep) keep->attended = std::move(attended);
    detail::note_forward(mb, *this, layout_v<input>, qkv_.weight(0)->name(), x.data(), x.size());
    return y;
  }

  template <spec_like Gradient>
  tensor<T, dual_t<input>, Device> backward(const microbatch<Device>& mb, const tensor<T, input, Device>& x,
                                            saved& kept, const tensor<T, Gradient, Device>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, S, Gradient, output>);
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, names_.backward());
    detail::require_size(qkv_.weight(0)->name(), "x", x.size(), qkv_.input_size());
    detail::require_size(qkv_.weight(0)->name(), "dy", dy.size(), out_.output_size());
    detail::note_backward(mb, detail::dual_v<output>, out_.weight(0)->name(), dy.data(), dy.size());
    auto dattended = make_buffer<T>(ctx.device, static_cast<std::size_t>(attended_size()));
    auto dqkv = make_buffer<T>(ctx.device, static_cast<std::size_t>(qkv_.output_size()));
    const T* const q = kept.qkv.template data<T>();
    const bool sinks = sinks_ && sinks_->trainable();
    auto dsinks = make_buffer<statistic>(ctx.device, sinks ? static_cast<std::size_t>(shape_.heads) : 0);
    T* const dq = dqkv.template data<T>();
    out_.backward(mb, kept.attended.template data<T>(), kept.out, dy.data(), dattended.template data<T>());
    if (shape_.kv_heads != kv_heads_) ctx.device.zero(dq, dqkv.bytes(), ctx.device.main_stream());
    engine_.backward(ctx, inputs(q, mb), kept.attended.template data<T>(), dattended.template data<T>(),
                     kept.engine_saved,
                     attention_gradients<T>{dq, dq + key_at_, dq + value_at_, dsinks.template data<statistic>()});
    if (sinks) add_sink_gradients(mb, std::move(dsinks));
    if (norms_)
      norms_->backward(mb, dq, rotation(), kept.norms);
    else
      rotate(ctx, dq, [](auto&&... a) { kernels::rope_backward(a...); });
    tensor<T, dual_t<input>, Device> dx(ctx);
    qkv_.backward(mb, x.data(), kept.in, dq, dx.data());
    return dx;
  }

  /// Prepares the attention for the batches and lengths of this context (`linear::resize`).
  void resize(const context<Device>& ctx) {
    qkv_.resize(ctx, qkv_value::derivation);
    out_.resize(ctx, out_value::derivation);
    take_sizes(ctx, names_.layer());
    if (norms_) norms_->resize(ctx, shape_.batch * shape_.q_len);
  }
  /// Binds all weights to other memory that the caller owns (`linear::rebind`).
  void rebind(const attention_memory<Precision>& memory) {
    check_memory(names_.layer(), memory);
    const std::array of_norms{memory.q_norm, memory.k_norm};
    for (const auto how : {detail::rebinding::checked, detail::rebinding::done}) {
      qkv_.rebind(memory.qkv, how);
      out_.rebind(memory.out, how);
      if (norms_) norms_->rebind(of_norms, how);
      if (sinks_) rebind_sinks(memory.sinks, how);
    }
  }

  bool adds_in_product() const { return out_.adds_in_product(); }
  template <class F>
  void visit(F&& f) {
    qkv_.visit(f);
    if (norms_) norms_->visit(f);
    if (sinks_) f(*sinks_);
    out_.visit(f);
  }

 private:
  /// Throws if the caller gives memory for some of the weights only.
  void check_memory(const std::string& name, const attention_memory<Precision>& memory) const {
    const detail::memory_part qkv{"qkv", memory.qkv.names_any()}, out{"out", memory.out.names_any()},
        q_norm{"q_norm", memory.q_norm.names_any()}, k_norm{"k_norm", memory.k_norm.names_any()},
        sinks{"sinks", memory.sinks.names_any()};
    const bool norms = options_.qk_norm_epsilon > 0;
    detail::require_all_parts(name,
                              {qkv, out, norms ? q_norm : qkv, norms ? k_norm : qkv, options_.sinks ? sinks : qkv});
    if (!norms && (q_norm.named || k_norm.named))
      fail({name, ": memory.q_norm and memory.k_norm are of norms, and this layer has none (qk_norm_epsilon is 0)"});
    if (!options_.sinks && sinks.named)
      fail({name, ": memory.sinks is of sinks, and this layer has none (attention_options::sinks)"});
  }
  /// Makes one sink per head, sharded like the heads.
  void make_sinks(const context<Device>& ctx, const std::string& name, const parameter_memory<Precision>& memory) {
    require_any_order(ctx, name, "attention sinks");
    if (!detail::takes_sinks<engine>)
      fail({name, ": the engine of this attention policy has no sinks (attention_options::sinks)"});
    layout heads;
    heads.dims.push_back(layout_v<typename specs::queries>.dims[2]);
    sinks_ = std::make_shared<parameter<Precision, Device>>(
        ctx, parameter_info{name + ".sinks", {shape_.score.all_heads}, options_.init, false}, heads, heads,
        layout_v<typename specs::queries>,
        parameter_place<Precision, Device>(ctx.device, shape_.heads, memory.weight.pointer(), memory.gradient.pointer(),
                                           memory.master.pointer()));
    detail::require_memory<Precision, Device>(name + ".sinks", {sinks_}, {}, memory);
  }
  void rebind_sinks(const parameter_memory<Precision>& memory, detail::rebinding how) {
    detail::rebind_parameters<Precision, Device>(sinks_->name(), {sinks_}, {}, memory, false, how);
  }
  void add_sink_gradients(const microbatch<Device>& mb, buffer<Device> dsinks) {
    mb.on_weights([this, &device = mb.ctx.device, dsinks = std::move(dsinks)] {
      detail::with_kernel_sum<T>(device, sinks_->used_gradient(device), shape_.heads, [&](auto* sums) {
        kernels::accumulate(device, dsinks.template data<statistic>(), sums, shape_.heads);
      });
    });
  }
  /// Takes the sizes of the context: the shape of this rank's attention, its engine and its rotary tables.
  void take_sizes(const context<Device>& ctx, const std::string& name) {
    const std::int64_t rank = ctx.ranks.rank();
    const mesh_shape& mesh = ctx.ranks.shape();
    const box q = local_box(layout_v<typename specs::queries>, mesh, ctx.sizes, rank);
    const box k = local_box(layout_v<typename specs::keys>, mesh, ctx.sizes, rank);
    const detail::local_heads own = detail::share_of_heads(q, k, name);
    kv_heads_ = k.local[2];
    key_at_ = (q.local[2] + own.first) * q.local[3];
    value_at_ = (q.local[2] + kv_heads_ + own.first) * q.local[3];
    shape_.batch = q.local[0];
    shape_.q_len = shape_.k_len = q.local[1];
    shape_.heads = q.local[2];
    shape_.kv_heads = own.used;
    shape_.head_dim = q.local[3];
    kernels::require_attention(ctx.device, dtype_of<activation_of<Precision>>, shape_.head_dim);
    shape_.scale = 1.0 / std::sqrt(static_cast<double>(shape_.head_dim));
    shape_.q_stride = shape_.k_stride = shape_.v_stride = qkv_.columns();
    shape_.mask = options_.mask;
    kernels::require_legal(shape_.mask, name);
    shape_.score = options_.score;
    shape_.score.all_heads = q.global[2], shape_.score.first_head = q.offset[2];
    if (rotates() && static_cast<std::int64_t>(options_.frequencies.size()) * 2 != shape_.head_dim)
      fail({name, ": ", options_.frequencies.size(), " rotary frequencies for head_dim = ", shape_.head_dim,
            ", must be half of it"});
    const sequence_order order = sequence_order_of<S>(mesh, ctx.sizes);
    const axis_list& axes = context_axes<typename specs::attention>;
    attention_part part{
        shape_, {}, static_cast<std::size_t>(mesh.index_in(rank, axes)), options_.documents, name, options_.context};
    if (own.used * q.global[2] != q.local[2] * k.global[2] || own.used != k.local[2])
      require_any_order(ctx, name, "kv heads that ranks share; shard heads over no more ranks than kv_heads");
    part.chunk = detail::chunk_of<engine>(ctx, q.global[1], name);
    const std::int64_t ranks = mesh.size(axes);
    for (std::int64_t r = 0; r < ranks; ++r) {
      const std::int64_t begin = ctx.sizes.begin_of(specs::sequence, ranks, r),
                         end = ctx.sizes.begin_of(specs::sequence, ranks, r + 1);
      part.blocks.push_back(order.runs(begin, end - begin));
    }
    engine_ = engine(ctx, part, axes);
    if (!rotates()) return;
    const std::vector<std::int64_t> positions = order.positions(q.offset[1], shape_.q_len);
    rotations_ = make_buffer<statistic>(ctx.device, positions.size() * options_.frequencies.size() * 2);
    kernels::rope_table(ctx.device, positions.data(), shape_.q_len, std::span<const double>(options_.frequencies),
                        cosine(), sine());
  }
  bool rotates() const { return !options_.frequencies.empty(); }
  statistic* cosine() { return rotations_.template data<statistic>(); }
  statistic* sine() { return cosine() + shape_.q_len * shape_.head_dim / 2; }
  detail::rotary_tables<statistic> rotation() {
    return rotates() ? detail::rotary_tables<statistic>{cosine(), sine(), shape_.q_len}
                     : detail::rotary_tables<statistic>{};
  }
  std::int64_t attended_size() const { return shape_.batch * shape_.q_len * shape_.heads * shape_.head_dim; }

  attention_inputs<T> inputs(const T* q, const microbatch<Device>& mb) const {
    const T* const sinks = sinks_ ? sinks_->used_value() : nullptr;
    return q ? attention_inputs<T>{q, q + key_at_, q + value_at_, mb.document_starts, sinks}
             : attention_inputs<T>{nullptr, nullptr, nullptr, mb.document_starts, sinks};
  }
  void check_documents(const microbatch<Device>& mb) const {
    if ((mb.document_starts != nullptr) == options_.documents) return;
    fail(options_.documents
             ? "attention_options::documents is set, but the microbatch has no document_starts"
             : "the microbatch has document_starts, but attention_options::documents is not set: this model would "
               "ignore them");
  }

  /// Rotates queries and all local keys, which are adjacent in memory.
  template <class F>
  void rotate(const context<Device>& ctx, T* qkv, F kernel) {
    if (!rotates()) return;
    kernel(ctx.device, qkv, qkv_.columns(), qkv, static_cast<const statistic*>(cosine()),
           static_cast<const statistic*>(sine()), shape_.batch * shape_.q_len, shape_.heads + kv_heads_,
           shape_.head_dim, qkv_.columns(), shape_.q_len);
  }

  detail::layer_names names_;
  attention_options options_;
  linear_core<Precision, Device> qkv_;
  linear_core<Precision, Device> out_;
  kernels::attention_shape shape_;
  engine engine_;
  std::optional<detail::head_norms<Precision, Device>> norms_;
  parameter_ptr<Precision, Device> sinks_;  ///< null without sinks
  std::int64_t key_at_ = 0, value_at_ = 0;  ///< in elements within a row of qkv
  std::int64_t kv_heads_ = 0;               ///< on this rank, including unused ones
  buffer<Device> rotations_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
