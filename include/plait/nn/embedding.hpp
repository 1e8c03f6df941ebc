// Embeddings of tokens, whose tables may be sharded over rows or width, and learned positions. Combinators do not take
// them, because token ids have no gradient.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/layout/errors.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/parameter/memory.hpp"
#include "plait/tensor/check_values.hpp"
#include "plait/tensor/sequence_order.hpp"

namespace plait {
namespace detail {

struct lookup_derivation {
  layout table, product, output;  ///< the table as it is used; the lookup's result; the layer's output
  plait::verdict verdict;
};
constexpr lookup_derivation derive_lookup(const layout& ids, const layout& table, const layout& output) {
  lookup_derivation d;
  d.table = use_of(table, ids);
  d.output = output;
  const derived_layout product = lookup(d.table, ids, table.dims[0].dim);
  d.product = product.result;
  d.verdict = product.verdict;
  d.verdict.worsen(compare_dims(operand::output, d.product.dim_order(), output.dim_order()));
  if (d.verdict.ok()) d.verdict.worsen(only_moves(d.product, output, table.dims[0].axes));
  return d;
}

template <class Policy>
struct embedding_value {
  static constexpr lookup_derivation derivation = derive_lookup(
      layout_v<typename Policy::input>, layout_v<typename Policy::weight>, layout_v<typename Policy::output>);
  static constexpr verdict value = derivation.verdict;
};

struct any_embedding {
  using input = spec<seq>;
  using weight = spec<vocab, hidden>;
  using output = spec<seq, hidden>;
};
template <class Policy>
using embedding_policy = typename policy_or<Policy, any_embedding>::type;

}  // namespace detail

/// Options of an embedding: its initial values and the memory of its table; see `linear_options`.
template <class Precision>
struct embedding_options {
  initializer init{};
  parameter_memory<Precision> memory{};
  bool tied_across_stages = false;
  /// The id of the padding token, whose row receives no gradient; -1: none.
  std::int64_t padding_row = -1;
};

namespace detail {

/// The layouts of an embedding: ids, output, the table in use and between steps, and the lookup.
struct embedding_layouts {
  layout input, output, weight, stored;
  lookup_derivation lookup;
};
template <class Policy>
inline constexpr embedding_layouts layouts_of_embedding{
    layout_v<typename Policy::input>, layout_v<typename Policy::output>, layout_v<typename Policy::weight>,
    layout_v<typename stored_weight<Policy>::type>, embedding_value<Policy>::derivation};

/// The computation of an embedding, without specs as types.
template <class Precision, compute_device Device>
class embedding_core {
  using T = activation_of<Precision>;

 public:
  /// `layouts` must outlive this object.
  embedding_core(const context<Device>& ctx, const embedding_layouts& layouts, std::int64_t vocab,
                 const std::string& name, const embedding_options<Precision>& how);

  std::int64_t tokens() const { return tokens_; }
  /// Local elements of the output.
  std::int64_t output_size() const { return resolve_.moves().target().local_size(); }
  void require_context(const context<Device>& ctx) const {
    made_for_.require(weight()->name(), ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes);
  }
  template <std::integral Id>
  void forward(const microbatch<Device>& mb, const Id* ids, T* y);
  template <std::integral Id>
  void backward(const microbatch<Device>& mb, const Id* ids, const T* dy);
  void resize(const context<Device>& ctx);
  void rebind(const parameter_memory<Precision>& memory) {
    rebind_parameters<Precision, Device>(names_.layer(), {table_}, {}, memory);
  }

  const parameter_ptr<Precision, Device>& weight() const { return names_.checked(table_); }
  template <class F>
  void visit(F&& f) {
    f(*weight());
  }

 private:
  /// Adds the gradients of a microbatch's tokens to `terms_`. Only one rank has a token's row, so the output's sum over
  /// ranks has one nonzero term.
  template <class Id>
  void add_terms(Device& on, std::int64_t index, std::int64_t count, const Id* ids, const T* d) {
    using G = gradient_of<Precision>;
    table_->begin_terms();
    const auto add = [&](const token_leaves::leaf& leaf, G* out) {  // adds to zeros
      buffer<Device> room_ids, room_d;
      const Id* const leaf_ids = rows_of_leaf(on, leaf, ids, 1, room_ids);
      const T* const leaf_d = rows_of_leaf(on, leaf, d, width_, room_d);
      keeping_padding_row(on, out, [&] {
        with_kernel_sum<T>(on, out, rows_ * width_, [&](auto* sums) {
          kernels::embedding_backward(on, leaf_ids, leaf_d, sums, leaf.count(), width_, first_, rows_, vocab_);
        });
      });
    };
    if constexpr (std::is_same_v<Device, cpu>) {  // on the CPU, code can read the ids
      terms_->add_rows(on, index, count, width_, [&](const token_leaves::leaf& leaf, G* out) {
        add(leaf, out);
        return rows_of_ids(leaf, ids);
      });
    } else {
      terms_->add(on, index, count, 0, [&](const token_leaves::leaf& leaf, G* out, bool) {
        on.zero(out, static_cast<std::size_t>(rows_ * width_) * sizeof(G), on.main_stream());
        add(leaf, out);
      });
    }
  }
  /// Returns the local rows of the table that a leaf's tokens look up, sorted, each once.
  template <class Id>
  std::vector<std::int64_t> rows_of_ids(const token_leaves::leaf& leaf, const Id* ids) const {
    std::vector<std::int64_t> rows;
    rows.reserve(static_cast<std::size_t>(leaf.count()));
    for (const token_leaves::rows& part : leaf.parts)
      for (std::int64_t t = part.first; t < part.first + part.count; ++t)
        if (const std::int64_t row = static_cast<std::int64_t>(ids[t]) - first_; row >= 0 && row < rows_)
          rows.push_back(row);
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    return rows;
  }
  void take_sizes(const context<Device>& ctx, const std::string& name) {
    ready_plan resolve(layouts_->lookup.product, layouts_->lookup.output, ctx.ranks, ctx.sizes, "output of " + name);
    ready_plan unresolve(resolve.backward(), ctx.ranks, ctx.sizes, "gradient of the output of " + name);
    tokens_ = resolve.source().local_size() / width_;
    resolve_ = {std::move(resolve), tokens_, width_};
    unresolve_ = {std::move(unresolve), tokens_, width_};
    made_for_.take(name, ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes,
                   {&layouts_->input, &layouts_->output, &layouts_->weight});
  }

  /// Calls add(), then restores the padding's row of the gradient if this rank has it. That row may hold the gradient
  /// of a tied head.
  template <class Gradient, class Add>
  void keeping_padding_row(Device& on, Gradient* gradient, Add&& add) const {
    const std::int64_t row = padding_row_ - first_;
    if (padding_row_ < 0 || row < 0 || row >= rows_) return add();
    const auto bytes = static_cast<std::size_t>(width_) * sizeof(Gradient);
    auto kept = make_buffer<Gradient>(on, static_cast<std::size_t>(width_));
    on.copy(kept.data(), gradient + row * width_, bytes, on.main_stream());
    add();
    on.copy(gradient + row * width_, kept.data(), bytes, on.main_stream());
  }

  const embedding_layouts* layouts_;
  layer_names names_;
  std::int64_t vocab_, padding_row_, tokens_ = 0, first_ = 0, rows_ = 0, width_ = 0;
  row_stage resolve_, unresolve_;
  made_for made_for_;
  parameter_ptr<Precision, Device> table_;
  gradient_terms<Precision, Device>* terms_ = nullptr;  ///< replaces a single running sum
};

template <class Precision, compute_device Device>
embedding_core<Precision, Device>::embedding_core(const context<Device>& ctx, const embedding_layouts& layouts,
                                                  std::int64_t vocab, const std::string& name,
                                                  const embedding_options<Precision>& how)
    : layouts_(&layouts), names_(name), vocab_(vocab), padding_row_(how.padding_row) {
  enforce(check_boundary(layouts_->input, ctx.ranks.shape()), name + ": input");
  enforce(check_boundary(layouts_->output, ctx.ranks.shape()), name + ": output");
  enforce_parts(layouts_->weight, ctx.ranks.shape(), ctx.sizes, name);
  const box used = local_box(layouts_->lookup.table, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
  const std::int64_t padded = used.global[0];
  if (vocab_ < 1 || vocab_ > padded) fail({name, ": vocab = ", vocab_, ", must be 1 to the padded size ", padded});
  if (padding_row_ < -1 || padding_row_ >= vocab_)
    fail({name, ": padding_row = ", padding_row_, ", must be -1 (none) to ", vocab_ - 1});
  first_ = used.offset[0];
  rows_ = used.local[0];
  width_ = used.local[1];
  table_ = std::make_shared<parameter<Precision, Device>>(
      ctx, parameter_info{name + ".weight", {vocab_, used.global[1]}, how.init, true, how.tied_across_stages, false},
      layouts_->stored, layouts_->weight, layouts_->input,
      parameter_place<Precision, Device>(ctx.device, used.local_size(), how.memory.weight.pointer(),
                                         how.memory.gradient.pointer(), how.memory.master.pointer(),
                                         how.memory.reduced.pointer()));
  require_memory<Precision, Device>(name, {table_}, {}, how.memory);
  take_sizes(ctx, name);
  if (width_ != used.global[1] || !resolve_.moves().planned().to.partial.empty())
    require_any_order(ctx, name, "a table whose rows are cut");
  terms_ = terms_of_layer(ctx, *table_, layouts_->input, token_grain::coarse, name);
}

template <class Precision, compute_device Device>
template <std::integral Id>
void embedding_core<Precision, Device>::forward(const microbatch<Device>& mb, const Id* ids, T* y) {
  Device& on = mb.ctx.device;
  const range profiled(on, names_.forward());
  made_for_.require(table_->name(), mb.ctx.ranks.shape(), mb.ctx.ranks.rank(), mb.ctx.sizes);
  require_array(table_->name(), "ids", ids, tokens_);
  require_array(table_->name(), "y", y, resolve_.moves().target().local_size());
  resolve_.reduce(on, y, {0, tokens_}, [&](row_range, T* out) {
    kernels::embedding_forward(on, ids, table_->used_value(), out, tokens_, width_, first_, rows_, vocab_);
  });
  note_forward(mb, *this, layouts_->input, table_->name(), ids, tokens_);
}

template <class Precision, compute_device Device>
template <std::integral Id>
void embedding_core<Precision, Device>::backward(const microbatch<Device>& mb, const Id* ids, const T* dy) {
  if (!weight()->trainable()) return;
  Device& on = mb.ctx.device;
  const range profiled(on, names_.backward());
  made_for_.require(table_->name(), mb.ctx.ranks.shape(), mb.ctx.ranks.rank(), mb.ctx.sizes);
  require_array(table_->name(), "ids", ids, tokens_);
  require_array(table_->name(), "dy", dy, unresolve_.moves().source().local_size());
  note_backward(mb, dual(layouts_->output), table_->name(), dy, unresolve_.moves().source().local_size());
  buffer<Device> resolved;
  const T* d = unresolve_.gather(on, dy, resolved);
  if (mb.deferred && resolved.empty()) {
    resolved = make_buffer<T>(on, static_cast<std::size_t>(tokens_ * width_));
    on.copy(resolved.data(), dy, resolved.bytes(), on.main_stream());
    d = resolved.template data<T>();
  }
  mb.on_weights([this, &on, ids, d, index = mb.index, count = mb.count, resolved = std::move(resolved)] {
    const range weights_shown(on, names_.weights());
    if (terms_) return add_terms(on, index, count, ids, d);
    auto* const gradient = table_->used_gradient(on);
    keeping_padding_row(on, gradient, [&] {
      with_kernel_sum<T>(on, gradient, rows_ * width_, [&](auto* sums) {
        kernels::embedding_backward(on, ids, d, sums, tokens_, width_, first_, rows_, vocab_);
      });
    });
  });
}

template <class Precision, compute_device Device>
void embedding_core<Precision, Device>::resize(const context<Device>& ctx) {
  require_resizable(names_.layer(), terms_ != nullptr);
  arm_checks(ctx);
  for (const dim_placement& p : layouts_->weight.dims)
    if (const std::int64_t* const was = made_for_.size_of(p.dim); was && *was != ctx.sizes.of(p.dim))
      fail({names_.layer(), ": resize changes ", p.dim.text(), " from ", *was, " to ", ctx.sizes.of(p.dim),
            ", and the table has this dim: make another embedding for another table"});
  take_sizes(ctx, names_.layer());
}

PLAIT_COMPILED_TEMPLATE(class embedding_core<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class embedding_core<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class embedding_core<double, cpu>)
#define PLAIT_INSTANTIATE(T, Id)                                                                       \
  PLAIT_COMPILED_TEMPLATE(void embedding_core<T, cpu>::forward(const microbatch<cpu>&, const Id*, T*)) \
  PLAIT_COMPILED_TEMPLATE(void embedding_core<T, cpu>::backward(const microbatch<cpu>&, const Id*, const T*))
PLAIT_INSTANTIATE(float, std::int32_t)
PLAIT_INSTANTIATE(float, std::int64_t)
PLAIT_INSTANTIATE(bf16, std::int32_t)
PLAIT_INSTANTIATE(bf16, std::int64_t)
PLAIT_INSTANTIATE(double, std::int32_t)
PLAIT_INSTANTIATE(double, std::int64_t)
#undef PLAIT_INSTANTIATE

}  // namespace detail

/// Token embedding under a policy that names `input` (the ids), `weight` (the table: vocabulary first) and `output`. If
/// the vocabulary is sharded, the lookup's result is partial. The output's spec determines the reduction: an
/// all-reduce, or a reduce-scatter onto the sequence.
template <class Precision, class Policy, compute_device Device = cpu>
class embedding
    : public other_arrays<embedding<Precision, Policy, Device>, std::int64_t,
                          typename detail::embedding_policy<Policy>::input,
                          typename detail::embedding_policy<Policy>::output, Device, activation_of<Precision>> {
  using policy = detail::embedding_policy<Policy>;
  using value = detail::embedding_value<policy>;
  using T = activation_of<Precision>;

 public:
  using precision_type = Precision;
  using value_type = T;
  using device = Device;
  using input = typename policy::input;
  using weight_spec = typename policy::weight;
  using output = typename policy::output;
  using token = std::int64_t;
  using options = embedding_options<Precision>;
  static_assert(detail::kernels_there<Device>::checked);
  static_assert(detail::policy_checked<Policy>);
  static_assert(!detail::policy_requirements<policy>::names_bias,
                "an embedding has no bias: leave `bias` out of its policy");
  static_assert(
      !requires { typename policy::overlap; },
      "an embedding has no product to overlap with: leave `overlap` out of its policy");
  static_assert(enforced<value, policy, input, weight_spec, output>);
  static_assert(enforced<detail::stored_value<policy>, policy, typename detail::stored_weight<policy>::type>);
  static_assert(inside_mesh<policy, input, output>);
  using other_arrays<embedding, token, input, output, Device, T>::forward;
  using other_arrays<embedding, token, input, output, Device, T>::backward;

  /// `vocab` is the true size of the vocabulary; the context's size of that dim may be larger (padding).
  embedding(const context<Device>& ctx, std::int64_t vocab, const std::string& name = "embedding",
            const options& how = {})
      : core_(ctx, detail::layouts_of_embedding<policy>, vocab, name, how) {}

  tensor<T, output, Device> forward(const microbatch<Device>& mb, const tensor<token, input, Device>& ids) {
    tensor<T, output, Device> y(mb.ctx);
    detail::require_size(weight()->name(), "ids", ids.size(), core_.tokens());
    core_.forward(mb, ids.data(), y.data());
    return y;
  }
  /// Forward on the caller's memory; ids have 32 or 64 bits.
  template <class Id>
    requires std::integral<std::remove_const_t<Id>>
  void forward(const microbatch<Device>& mb, const part<Id, input>& ids, const part<T, output>& y) {
    core_.require_context(mb.ctx);
    detail::require_part(weight()->name(), "ids", ids, core_.tokens());
    detail::require_part(weight()->name(), "y", y, core_.output_size());
    core_.forward(mb, static_cast<const Id*>(ids.unchecked()), y.unchecked());
  }

  /// Adds to the table's gradient. The ids must live until deferred gradients are computed. Deferred tasks run in
  /// order, so the gradient of a tied output projection is added first.
  template <spec_like Gradient>
  void backward(const microbatch<Device>& mb, const tensor<token, input, Device>& ids,
                const tensor<T, Gradient, Device>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, policy, Gradient, output>);
    core_.backward(mb, ids.data(), dy.data());
  }
  /// Backward on the caller's memory.
  template <class Id, class Numbers, spec_like Gradient>
    requires std::integral<std::remove_const_t<Id>>
  void backward(const microbatch<Device>& mb, const part<Id, input>& ids, const part<Numbers, Gradient>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, policy, Gradient, output>);
    const part<const T, Gradient> d = dy;
    core_.require_context(mb.ctx);
    detail::require_part(weight()->name(), "ids", ids, core_.tokens());
    detail::require_part(weight()->name(), "dy", d, core_.output_size());
    core_.backward(mb, static_cast<const Id*>(ids.unchecked()), d.unchecked());
  }

  /// Prepares the embedding for the batches and lengths of this context (`linear::resize`).
  void resize(const context<Device>& ctx) { core_.resize(ctx); }
  /// Binds the table to other memory that the caller owns (`linear::rebind`).
  void rebind(const parameter_memory<Precision>& memory) { core_.rebind(memory); }

  const parameter_ptr<Precision, Device>& weight() const { return core_.weight(); }
  template <class F>
  void visit(F&& f) {
    core_.visit(f);
  }

 private:
  detail::embedding_core<Precision, Device> core_;
};

// Learned positions, and an embedding of tokens that adds them.

/// y = x + table[position of the token]: learned positions (GPT-2). `Spec` has samples, tokens and features. The table
/// is [position, features], and its features are placed like those of `Spec`. A rank's gradient has the rows of its own
/// tokens; its type determines the axes over which it is summed.
template <class Precision, spec_like Spec, compute_device Device = cpu>
class learned_positions
    : public layer_types<activation_of<Precision>, Spec, Spec, Device>,
      public other_arrays<learned_positions<Precision, Spec, Device>, activation_of<Precision>, Spec, Spec, Device> {
  using T = activation_of<Precision>;
  static_assert(layout_v<Spec>.dims.size() == 3, "learned positions take [samples, tokens, features]");

 public:
  using other_arrays<learned_positions, T, Spec, Spec, Device>::forward;
  using other_arrays<learned_positions, T, Spec, Spec, Device>::backward;
  struct saved {};

  /// The context gives the size of the dim `position`, which must be at least the sequence's size. `order` is the order
  /// of the sequence's tokens.
  learned_positions(const context<Device>& ctx, const std::string& name, sequence_order order = {},
                    initializer init = {})
      : names_(name) {
    const layout& given = layout_v<Spec>;
    made_for_ = detail::made_for(ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes, {&given});
    layout placed;
    placed.dims.push_back({dim_of<position>, {}});
    placed.dims.push_back(given.dims.back());
    const box part = local_box(given, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
    rows_ = ctx.sizes.of(dim_of<position>);
    if (rows_ < part.global[1])
      fail({name, ": the context gives the dim position the size ", rows_, ", and the sequence has ", part.global[1],
            " tokens; at least as many positions are legal"});
    width_ = part.local[2];
    table_ = std::make_shared<parameter<Precision, Device>>(
        ctx, parameter_info{name + ".weight", {rows_, part.global[2]}, init, true, false, false}, placed, placed,
        given);
    if (order.length() == 0 && given.dims[1].dim == dim_of<zseq>)
      fail({name, ": learned positions of tokens in zigzag order need their sequence_order"});
    if (order.length() == 0) order = sequence_order::original(part.global[1]);
    std::vector<std::int64_t> positions;
    for (std::int64_t i = 0; i < part.local[0]; ++i)
      for (const std::int64_t p : order.positions(part.offset[1], part.local[1])) positions.push_back(p);
    tokens_ = static_cast<std::int64_t>(positions.size());
    positions_ = make_buffer<std::int64_t>(ctx.device, positions.size());
    ctx.device.upload(positions_.data(), positions.data(), positions_.bytes(), ctx.device.main_stream());
  }

  tensor<T, Spec, Device> forward(const microbatch<Device>& mb, const tensor<T, Spec, Device>& x, saved* = nullptr) {
    const range profiled(mb.ctx.device, names_.forward());
    made_for_.require(table_->name(), mb.ctx.ranks.shape(), mb.ctx.ranks.rank(), mb.ctx.sizes);
    tensor<T, Spec, Device> y(mb.ctx);
    detail::require_size(table_->name(), "x", x.size(), y.size());
    kernels::embedding_forward(mb.ctx.device, ids(), table_->used_value(), y.data(), tokens_, width_, std::int64_t{0},
                               rows_, rows_);
    kernels::accumulate(mb.ctx.device, x.data(), y.data(), x.size());
    return y;
  }
  template <spec_like Gradient>
  tensor<T, dual_t<Spec>, Device> backward(const microbatch<Device>& mb, const tensor<T, Spec, Device>&, saved&,
                                           const tensor<T, Gradient, Device>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, Spec>, among<Spec>, Gradient, Spec>);
    const range profiled(mb.ctx.device, names_.backward());
    made_for_.require(table_->name(), mb.ctx.ranks.shape(), mb.ctx.ranks.rank(), mb.ctx.sizes);
    Device& on = mb.ctx.device;
    tensor<T, dual_t<Spec>, Device> dx(mb.ctx);
    detail::require_size(table_->name(), "dy", dy.size(), dx.size());
    on.copy(dx.data(), dy.data(), static_cast<std::size_t>(dy.size()) * sizeof(T), on.main_stream());
    if (!table_->trainable()) return dx;
    detail::with_gradient_kept(mb, dy.data(), dy.size(), [this, &on](const T* d) {
      const range weights_shown(on, names_.weights());
      detail::with_kernel_sum<T>(on, table_->used_gradient(on), rows_ * width_, [&](auto* sums) {
        kernels::embedding_backward(on, ids(), d, sums, tokens_, width_, std::int64_t{0}, rows_, rows_);
      });
    });
    return dx;
  }
  template <class F>
  void visit(F&& f) {
    f(*names_.checked(table_));
  }

 private:
  const std::int64_t* ids() const { return positions_.template data<std::int64_t>(); }

  detail::layer_names names_;
  detail::made_for made_for_;
  std::int64_t rows_ = 0, width_ = 0, tokens_ = 0;
  buffer<Device> positions_;
  parameter_ptr<Precision, Device> table_;
};

/// An embedding of tokens followed by positions, in the form that a `language_model` takes.
template <class Precision, class Policy, compute_device Device = cpu>
class positioned_embedding {
 public:
  using input = typename Policy::input;
  using output = typename Policy::output;
  using tokens = embedding<Precision, Policy, Device>;
  using positions = learned_positions<Precision, output, Device>;

  positioned_embedding(tokens t, positions p) : tokens_(std::move(t)), positions_(std::move(p)) {}

  auto forward(const microbatch<Device>& mb, const tensor<std::int64_t, input, Device>& ids) {
    return positions_.forward(mb, tokens_.forward(mb, ids));
  }
  template <class Gradient>
  void backward(const microbatch<Device>& mb, const tensor<std::int64_t, input, Device>& ids, const Gradient& dy) {
    typename positions::saved nothing;
    const tensor<activation_of<Precision>, output, Device> unused;
    tokens_.backward(mb, ids, positions_.backward(mb, unused, nothing, dy));
  }
  const parameter_ptr<Precision, Device>& weight() const { return tokens_.weight(); }
  template <class F>
  void visit(F&& f) {
    tokens_.visit(f);
    positions_.visit(f);
  }

 private:
  tokens tokens_;
  positions positions_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
