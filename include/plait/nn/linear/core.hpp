// Linears that share an input, computed from a derivation that is a value. Specs are not checked here, but by the typed
// layers that hold one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/world.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/buffer.hpp"
#include "plait/device/range.hpp"
#include "plait/nn/layer_checks.hpp"
#include "plait/nn/linear/canonical.hpp"
#include "plait/nn/linear/lora.hpp"
#include "plait/nn/linear/overlap.hpp"
#include "plait/nn/linear/rule.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/nn/parameter/array.hpp"
#include "plait/nn/parameter/rebind.hpp"
#include "plait/tensor/check_values.hpp"
#include "plait/tensor/chunked_collective.hpp"
#include "plait/tensor/executor.hpp"

namespace plait {

// Descriptions of linears that share an input: names, stored layouts, bias, adapter, and the caller's memory.

/// One of the linears that share an input: its weight and bias as a checkpoint names them, and how they are stored.
struct linear_branch {
  parameter_info weight;
  layout stored_weight;
  bool bias = false;
  parameter_info bias_info;
  layout stored_bias;
  lora_options lora{};
};

namespace detail {

/// The dim of outputs that lie side by side.
struct columns : dim_tag<"columns"> {};

/// `a`, an output of one of several linears with this input, with its own dims as one dim that is whole here, and with
/// the states of the axes in `moving` alone: what is left is what all of them share.
inline layout side_by_side(const layout& a, const layout& input, const axis_list& moving) {
  layout shared;
  for (const dim_placement& p : a.dims)
    if (input.has(p.dim)) shared.dims.push_back(p);
  shared.dims.push_back({dim_of<columns>, {}});
  for (axis_id axis : moving)
    if (!a.sharded_by(axis)) shared.set(axis, a.state_of(axis));
  return shared;
}

}  // namespace detail
}  // namespace plait

namespace plait::detail {

// The biases of linears that share an input: their memory, their place in the output's rows, their gradients.

/// Whether the product that makes a weight's gradient may make the bias's in the same pass.
template <class Device, class T, class G>
concept fuses_bias_gradients = requires(Device& d, std::int64_t n, const T* in, G* out) {
  d.gemm_with_row_sums(true, false, n, n, n, 1.0, in, n, in, n, 0.0, out, n, out);
};

/// Biases in memory one after the other, of the branches that have one. Outputs are `batches` times rows, in which the
/// branches' columns lie side by side.
template <class Precision, compute_device Device>
class linear_biases {
  using T = activation_of<Precision>;
  using W = weight_of<Precision>;
  using G = gradient_of<Precision>;
  using parameter = plait::parameter<Precision, Device>;

 public:
  linear_biases() = default;
  /// `columns` are those of each branch's product, `callers` the memory of all biases, where it is the caller's.
  linear_biases(const context<Device>& ctx, const shared_linears& d, std::vector<linear_branch>& info,
                const parameter_memory<Precision>& callers, std::int64_t batches, std::vector<std::int64_t> columns)
      : batches_(batches), columns_(std::move(columns)), biases_(info.size()) {
    std::vector<std::int64_t> sizes(info.size());
    std::int64_t n = 0;
    for (std::size_t i = 0; i < info.size(); ++i) {
      total_ += columns_[i];
      all_ = all_ && info[i].bias;
      if (info[i].bias) n += sizes[i] = local_elements(d.branches[i].bias, ctx.ranks.shape(), ctx.sizes);
    }
    if (n == 0) return;
    const auto array = std::make_shared<parameter_array<Precision, Device>>(ctx.device, n, callers.bias.pointer(),
                                                                            callers.bias_gradient.pointer());
    master_of<Precision>* master = callers.bias_master.pointer();
    std::int64_t at = 0;
    for (std::size_t i = 0; i < info.size(); at += sizes[i++]) {
      if (!info[i].bias) continue;
      biases_[i] =
          std::make_shared<parameter>(ctx, std::move(info[i].bias_info), info[i].stored_bias, d.branches[i].bias_placed,
                                      d.branches[i].output, parameter_place<Precision, Device>{array, at, master});
      if (master) master += biases_[i]->size();
    }
    if (ctx.numerics.canonical() && trainable())
      terms_ = &array->add_terms(token_leaves(ctx.numerics, d.branches[0].output, ctx.ranks.shape(), ctx.sizes,
                                              ctx.ranks.rank(), token_grain::fine, first_name()));
  }

  bool any() const {
    return !biases_.empty() && std::any_of(biases_.begin(), biases_.end(), [](const auto& p) { return p != nullptr; });
  }
  /// Null for a branch without one.
  const parameter_ptr<Precision, Device>& operator[](std::size_t i) const { return biases_[i]; }
  const std::vector<parameter_ptr<Precision, Device>>& all() const { return biases_; }
  std::size_t size() const { return biases_.size(); }
  bool trainable() const {
    return std::any_of(biases_.begin(), biases_.end(), [](const auto& p) { return p && p->trainable(); });
  }
  void require_gathered() const {
    for (const auto& p : biases_)
      if (p) p->require_gathered();
  }
  /// The row that a product may add to each row of its result; null unless it is one row, with all branches in it.
  const W* row() const { return all_ && batches_ == 1 && !biases_.empty() ? biases_[0]->used_value() : nullptr; }

  /// Adds them to the output, of `size` elements.
  void add(Device& device, T* y, std::int64_t size) const {
    each(0, biases_.size(), [&](parameter& p, std::int64_t at, std::int64_t n, std::int64_t stride) {
      const std::int64_t rows = size / stride / batches_;
      for (std::int64_t b = 0; b < batches_; ++b)
        kernels::add_bias(device, p.used_value() + b * n, y + b * rows * stride + at, rows, n, stride);
    });
  }
  /// Adds to the gradients of those from `begin` to `end`, by a pass over the output's gradient.
  void add_gradients(Device& device, const T* dy, std::int64_t size, std::size_t begin, std::size_t end) const {
    each(begin, end, [&](parameter& p, std::int64_t at, std::int64_t n, std::int64_t stride) {
      if (!p.trainable()) return;
      const std::int64_t rows = size / stride / batches_;
      for (std::int64_t b = 0; b < batches_; ++b)
        with_kernel_sum<T>(device, p.used_gradient(device) + b * n, n, [&](auto* sums) {
          kernels::bias_gradient(device, dy + b * rows * stride + at, sums, rows, n, stride);
        });
    });
  }
  /// Adds those of a microbatch, whose output's gradient is dy, to the canonical sums over tokens.
  void add_terms(Device& device, std::int64_t index, std::int64_t count, const T* dy) const {
    if (terms_ == nullptr || !trainable()) return;
    for (const auto& p : biases_)
      if (p && p->trainable()) p->begin_terms();
    // A product that is scattered over its own features is wider than the output.
    const std::int64_t stride = biases_.size() == 1 ? biases_[0]->used_size() / batches_ : total_;
    terms_->add(device, index, count, 0, [&](const token_leaves::leaf& leaf, G* out, bool) {
      buffer<Device> room;
      const T* const rows = rows_of_leaf(device, leaf, dy, stride, room);
      std::int64_t to = 0;
      each(0, biases_.size(), [&](parameter&, std::int64_t at, std::int64_t n, std::int64_t) {
        device.zero(out + to, static_cast<std::size_t>(n) * sizeof(G), device.main_stream());
        with_kernel_sum<T>(device, out + to, n, [&](auto* sums) {
          kernels::bias_gradient(device, rows + at, sums, leaf.count(), n, stride);
        });
        to += n;
      });
    });
  }
  /// Adds to the same gradients what product(sums) writes, `columns` sums: in place where nothing was added yet,
  /// otherwise by a pass over so many numbers. False where product(sums) is, or does not make the gradients of all.
  template <class F>
  bool add_gradients_by(Device& device, std::size_t begin, std::size_t end, std::int64_t columns, F&& product) const {
    if (batches_ != 1) return false;
    bool overwrites = true;
    for (std::size_t i = begin; i < end; ++i) {
      if (!biases_[i] || !biases_[i]->trainable()) return false;
      overwrites = overwrites && biases_[i]->gradient_is_empty();
    }
    const auto n = static_cast<std::size_t>(columns);
    G* gradient = nullptr;
    for (std::size_t i = end; i-- > begin;)  // the first one's is where all begin
      gradient = overwrites ? biases_[i]->overwritten_gradient() : biases_[i]->used_gradient(device);
    buffer<Device> terms;
    if (!overwrites) terms = make_buffer<G>(device, n);
    const bool done = product(overwrites ? gradient : terms.template data<G>());
    if (done && !overwrites) kernels::accumulate(device, terms.template data<G>(), gradient, columns);
    if (!done && overwrites) device.zero(gradient, n * sizeof(G), device.main_stream());
    return done;
  }

 private:
  std::string first_name() const {
    for (const auto& p : biases_)
      if (p) return p->name();
    return {};
  }
  /// Calls f(parameter, offset in a row, columns, row stride) for each from `begin` to `end`.
  template <class F>
  void each(std::size_t begin, std::size_t end, F&& f) const {
    std::int64_t at = 0;
    for (std::size_t i = 0; i < end; ++i) {
      const std::int64_t n = biases_[i] ? biases_[i]->used_size() / batches_ : columns_[i];
      if (biases_[i] && i >= begin) f(*biases_[i], at, n, biases_.size() == 1 ? n : total_);
      at += n;
    }
  }

  std::int64_t batches_ = 1, total_ = 0;
  std::vector<std::int64_t> columns_;
  std::vector<parameter_ptr<Precision, Device>> biases_;
  gradient_terms<Precision, Device>* terms_ = nullptr;  ///< under canonical numerics
  bool all_ = true;
};

PLAIT_COMPILED_TEMPLATE(class linear_biases<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class linear_biases<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class linear_biases<double, cpu>)

// The collectives of linears that share an input, made ready for the sizes of a context, and the sizes of their
// products.

/// The collectives of linears that share an input, forward and backward, and the matrices that they multiply: `batches`
/// times [rows, inner] by [inner, columns], of which each branch has its own.
class linear_moves {
 public:
  /// `name` is the first weight's.
  linear_moves(world& ranks, const dim_sizes& sizes, const shared_linears& d, const std::string& name);

  /// Pipelines the collectives that stand beside a product with it, in so many chunks.
  void cut(std::int64_t chunks, const std::string& name);

  /// Makes everything anew for other sizes. Throws, and changes nothing, where a weight would have another size.
  void take_sizes(world& ranks, const dim_sizes& sizes, const shared_linears& d, const std::string& name);

  /// Throws unless a call's sizes are those that the moves were made for.
  void require_sizes(const std::string& name, const mesh_shape& mesh, std::int64_t rank, const dim_sizes& now) const {
    made_for_.require(name, mesh, rank, now);
  }

  /// Elements of the input.
  std::int64_t input_size() const { return gather_.source().local_size(); }
  /// Elements of the output, of all branches.
  std::int64_t output_size() const { return resolve_.target().local_size(); }

 protected:
  executor gather_, spread_, resolve_, unresolve_;
  chunked_collective gather_chunks_, spread_chunks_, resolve_chunks_, unresolve_chunks_;  ///< where they overlap
  std::int64_t batches_ = 1, rows_ = 1, inner_ = 1, total_ = 0;
  std::vector<std::int64_t> columns_;  ///< of each branch

 private:
  void make_resolution(world& ranks, dim_sizes sizes, const shared_linears& d, const std::string& name);

  std::int64_t chunks_ = 1;
  made_for made_for_;
};

}  // namespace plait::detail

namespace plait {

// The memory that linears keep between their passes, and whether a device adds within a product.

/// The memory that linears keep of a forward pass beyond their input: the gathered input, unless it is the input
/// itself, or is to be gathered again, or no weight needs it; what adapters have between their two weights.
template <compute_device Device>
struct linear_saved {
  buffer<Device> gathered, adapted;
  detail::saved_stamp stamp{};
};

namespace detail {

/// Whether a product on the device can add a row to each row of its result, and a matrix, in the same pass.
template <class Device, class T>
concept fuses_additions = requires(Device& d, std::int64_t n, const T* in, T* out) {
  d.gemm(false, true, n, n, n, 1.0, in, n, in, n, 0.0, out, n, {in, in});
};

}  // namespace detail

/// The computation of linears that share an input, without types: everything follows from their derivation.
/// Weights lie one below the other in one matrix, so all products are one; the outputs of several lie side by side in
/// rows.
template <class Precision, compute_device Device>
class linear_core : detail::linear_moves {
 public:
  using T = activation_of<Precision>;
  using W = weight_of<Precision>;
  using G = gradient_of<Precision>;
  using parameter = plait::parameter<Precision, Device>;
  /// `callers` holds the weights of all branches one after the other, and so their biases. `shared` is a weight of
  /// another layer for this one to use, or null; one linear alone can have it. `overlap` are the chunks of collectives
  /// that are pipelined with products (nn/linear/overlap.hpp), 1 for none.
  linear_core(const context<Device>& ctx, const shared_linears& d, std::vector<linear_branch> info,
              const parameter_memory<Precision>& callers = {}, parameter_ptr<Precision, Device> shared = nullptr,
              std::int64_t overlap = 1)
      : linear_moves(ctx.ranks, ctx.sizes, d, info[0].weight.name),
        names_(std::string_view(info[0].weight.name).substr(0, info[0].weight.name.rfind(".weight"))),
        inputs_first_(d.branches[0].inputs_first),
        weights_(info.size()),
        adapters_(info.size()) {
    const bool with_bias = std::any_of(info.begin(), info.end(), [](const linear_branch& b) { return b.bias; });
    callers.require_complete(names_.layer(), !shared, with_bias);
    make_adapters(ctx, d, info);
    if (overlap != 1) cut(overlap, info[0].weight.name);
    if (shared)
      share(std::move(shared), d, info[0].weight.name);
    else
      make_weights(ctx, d, info, callers);
    biases_ = detail::linear_biases<Precision, Device>(ctx, d, info, callers, batches_, columns_);
    for (std::size_t i = 0; i < info.size(); ++i)
      for (const auto* base : {&weight(i), &bias(i)})
        if (info[i].lora.rank != 0 && *base) (*base)->freeze();
    if (!ctx.numerics.canonical()) return;
    canonical_ = {ctx,
                  d,
                  resolve_,
                  spread_,
                  {rows_, inner_, total_, inputs_first_, columns_},
                  batches_ != 1,
                  adapters_.any(),
                  overlap != 1,
                  names_.layer()};
    if (weights_trainable()) terms_ = &weights_[0]->add_terms(canonical_.tokens());
  }

  std::int64_t rows() const { return batches_ * rows_; }
  std::int64_t columns() const { return total_; }
  /// Whether an addend of the output is added in the product's own pass.
  bool adds_in_product() const { return detail::fuses_additions<Device, T> && resolve_.trivial(); }
  using linear_moves::input_size;
  using linear_moves::output_size;

  /// Makes the collectives ready for the sizes of the context, in the same world: batches and lengths may change, and
  /// the weights' dims may not. What a forward pass has kept is of the sizes before.
  void resize(const context<Device>& ctx, const shared_linears& d) {
    detail::require_resizable(weight(0)->name(), static_cast<bool>(canonical_));
    detail::arm_checks(ctx);
    take_sizes(ctx.ranks, ctx.sizes, d, weights_[0]->name());
    adapters_.resize(rows_);
  }
  /// Binds all weights and biases to other memory of the caller's, of which it says as much as for the constructor.
  void rebind(const parameter_memory<Precision>& callers, detail::rebinding how = detail::rebinding::done) {
    detail::rebind_parameters(names_.layer(), weights_, biases_.all(), callers, tied_, how);
  }

  /// `addend`, of the output's size, is added to it where it is not null. Throws where y is x or addend.
  void forward(const microbatch<Device>& mb, const T* x, T* y, linear_saved<Device>* keep, const T* addend = nullptr) {
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, names_.forward());
    require_gathered();
    const std::string& name = weights_[0]->name();
    require_sizes(name, ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes);
    detail::require_array(name, "x", x, input_size());
    detail::require_array(name, "y", y, output_size());
    detail::require_no_overlap(name, "forward", {y, output_size(), "y"},
                               {{x, input_size(), "x"}, {addend, output_size(), "addend"}, weights_read()});
    buffer<Device> gathered;
    if (gather_chunks_ || !gather_.trivial()) gathered = gathered_room(ctx);
    if (!gather_chunks_ && !gather_.trivial()) gather_.run(ctx.device, x, gathered.data(), dtype_of<T>);
    const T* const input = gathered.empty() ? x : gathered.template data<T>();
    buffer<Device> adapted = adapters_.room(ctx.device);
    if (canonical_.sums_output()) {
      const bool biased = biases_.any();
      canonical_.forward(ctx.device, input, weights(), y, biased ? nullptr : addend, output_size());
      biases_.add(ctx.device, y, output_size());
      if (biased && addend) kernels::accumulate(ctx.device, addend, y, output_size());
    } else if (resolve_.trivial()) {
      bool biased = false;
      const auto product = [&](std::int64_t first, std::int64_t rows) {
        biased = multiply(ctx, true, total_, inner_, {first, rows}, input, y + first * total_,
                          addend ? addend + first * total_ : nullptr, true);
        adapters_.add_outputs(ctx.device, {first, rows}, input, adapted, y + first * total_);
      };
      if (gather_chunks_)
        gather_chunks_.gather(ctx.device, x, gathered.data(), dtype_of<T>, product);
      else
        product(0, rows());
      if (!biased) biases_.add(ctx.device, y, output_size());
    } else {
      if (resolve_chunks_) {
        resolve_chunks_
            .reduce(ctx.device, y, dtype_of<T>,
                    [&](std::int64_t first, std::int64_t rows, void* to) {
                      multiply(ctx, true, total_, inner_, {first, rows}, input, static_cast<T*>(to), nullptr, false);
                      adapters_.add_outputs(ctx.device, {first, rows}, input, adapted, static_cast<T*>(to));
                    })
            .wait();
      } else {
        auto product = make_buffer<T>(ctx.device, static_cast<std::size_t>(rows() * total_));
        multiply(ctx, true, total_, inner_, all_rows(), input, product.template data<T>(), nullptr, false);
        adapters_.add_outputs(ctx.device, all_rows(), input, adapted, product.template data<T>());
        resolve_.run(ctx.device, product.data(), y, dtype_of<T>);
      }
      biases_.add(ctx.device, y, output_size());
      if (addend) kernels::accumulate(ctx.device, addend, y, output_size());
    }
    if (keep) {
      detail::saved_stamp stamp = keep->stamp;
      stamp.make(weights_[0].get(), mb.index, x);
      *keep = {};  // of an earlier pass
      keep->stamp = stamp;
    }
    if (!keep || mb.policy != recompute::none) return;
    if (weights_trainable()) keep->gathered = std::move(gathered);
    if (adapters_.trainable()) keep->adapted = std::move(adapted);
  }

  /// dx is overwritten, with the sum of the gradient and `addend` where that is not null; x, dy and addend must not be
  /// dx, and it throws where one is. If weight gradients are deferred, x must live until they are computed; dy need
  /// not.
  void backward(const microbatch<Device>& mb, const T* x, linear_saved<Device>& saved, const T* dy, T* dx,
                const T* addend = nullptr) {
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, names_.backward());
    require_gathered();
    const std::string& name = weights_[0]->name();
    require_sizes(name, ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes);
    detail::require_array(name, "x", x, input_size());
    detail::require_array(name, "dy", dy, output_size());
    saved.stamp.use(name, weights_[0].get(), mb.index, x);
    detail::require_no_overlap(
        name, "backward", {dx, input_size(), "dx"},
        {{x, input_size(), "x"}, {dy, output_size(), "dy"}, {addend, input_size(), "addend"}, weights_read()});
    const bool weights = weights_trainable(), trains = weights || biases_.trainable();
    buffer<Device> resolved, kept_dy;
    const T* d = dy;
    if (mb.deferred && trains && (biases_.trainable() || unresolve_.trivial())) {
      kept_dy = make_buffer<T>(ctx.device, static_cast<std::size_t>(output_size()));
      ctx.device.copy(kept_dy.data(), dy, kept_dy.bytes(), ctx.device.main_stream());
      d = dy = kept_dy.template data<T>();
    }
    if (!unresolve_.trivial()) {
      resolved = make_buffer<T>(ctx.device, static_cast<std::size_t>(rows() * total_));
      if (!unresolve_chunks_ || !dx) unresolve_.run(ctx.device, dy, resolved.data(), dtype_of<T>);
      d = resolved.template data<T>();
    }
    whole_gather<Device> again;  // of what was not kept, beside the product for dx
    if (weights && saved.gathered.empty() && !gather_.trivial()) {
      saved.gathered = gathered_room(ctx);
      if (gather_chunks_ && dx)
        again = gather_chunks_.start_whole(ctx.device, x, saved.gathered.data(), dtype_of<T>);
      else
        gather_.run(ctx.device, x, saved.gathered.data(), dtype_of<T>);
    }
    buffer<Device> dadapted = adapters_.room(ctx.device);
    chunks_under_way<Device> spreading;
    if (dx && spread_chunks_) {
      spreading =
          spread_chunks_.reduce(ctx.device, dx, dtype_of<T>, [&](std::int64_t first, std::int64_t rows, void* to) {
            multiply(ctx, false, inner_, total_, {first, rows}, d, static_cast<T*>(to), nullptr, false);
            adapters_.add_input_gradients(ctx.device, {first, rows}, d, dadapted, static_cast<T*>(to));
          });
    } else if (dx && canonical_.sums_input_gradient()) {
      canonical_.backward(ctx.device, d, this->weights(), dx, addend, input_size());
    } else if (dx) {
      buffer<Device> gathered;
      T* out = dx;
      if (!spread_.trivial()) {
        gathered = gathered_room(ctx);
        out = gathered.template data<T>();
      }
      const auto product = [&](std::int64_t first, std::int64_t rows) {
        multiply(ctx, false, inner_, total_, {first, rows}, d, out + first * inner_,
                 out == dx && addend ? addend + first * inner_ : nullptr, false);
        adapters_.add_input_gradients(ctx.device, {first, rows}, d, dadapted, out + first * inner_);
      };
      if (unresolve_chunks_)
        unresolve_chunks_.gather(ctx.device, dy, resolved.data(), dtype_of<T>, product);
      else
        product(0, rows());
      if (out != dx) spread_.run(ctx.device, out, dx, dtype_of<T>);
    }
    if (!dx) adapters_.hidden_gradients(ctx.device, all_rows(), d, dadapted);
    again.finish(ctx.device);
    if (adapters_.trainable() && saved.adapted.empty()) {
      saved.adapted = adapters_.room(ctx.device);
      const T* const in = saved.gathered.empty() ? x : saved.gathered.template data<T>();
      adapters_.hidden(ctx.device, all_rows(), in, saved.adapted);
    }
    if (trains)
      mb.on_weights([this, &ctx, x, dy, d, index = mb.index, count = mb.count, resolved = std::move(resolved),
                     kept_dy = std::move(kept_dy), gathered = std::move(saved.gathered),
                     adapted = std::move(saved.adapted), dadapted = std::move(dadapted)] {
        const range weights_shown(ctx.device, names_.weights());
        const T* const input = gathered.empty() ? x : gathered.template data<T>();
        if (canonical_)
          canonical_gradients(ctx, index, count, d, input, dy);
        else
          gradients(ctx, d, input, dy);
        adapters_.weight_gradients(ctx.device, input, d, adapted, dadapted);
      });
    if (!dx || spread_.trivial() || canonical_.sums_input_gradient()) return;
    spreading.wait();
    if (addend) kernels::accumulate(ctx.device, addend, dx, spread_.target().local_size());
  }

  const parameter_ptr<Precision, Device>& weight(std::size_t i) const { return names_.checked(weights_)[i]; }
  const parameter_ptr<Precision, Device>& bias(std::size_t i) const { return names_.checked(biases_)[i]; }
  template <class F>
  void visit(F&& f) {
    for (std::size_t i = 0; i < names_.checked(weights_).size(); ++i) {
      f(*weights_[i]);
      if (biases_[i]) f(*biases_[i]);
      adapters_.visit(i, f);
    }
  }

 private:
  void make_adapters(const context<Device>& ctx, const shared_linears& d, const std::vector<linear_branch>& info) {
    std::int64_t at = 0;
    for (std::size_t i = 0; i < info.size(); at += columns_[i++])
      if (info[i].lora.rank != 0)
        adapters_.emplace(i, ctx, d.gathered, d.branches[i], info[i].weight, info[i].stored_weight, info[i].lora,
                          detail::product_part{batches_, rows_, inner_, columns_[i], total_, at});
  }
  void make_weights(const context<Device>& ctx, const shared_linears& d, std::vector<linear_branch>& info,
                    const parameter_memory<Precision>& callers) {
    const std::int64_t n = batches_ * total_ * inner_;
    const auto array = std::make_shared<parameter_array<Precision, Device>>(ctx.device, n, callers.weight.pointer(),
                                                                            callers.gradient.pointer());
    master_of<Precision>* master = callers.master.pointer();
    std::int64_t at = 0;
    for (std::size_t i = 0; i < info.size(); at += batches_ * columns_[i++] * inner_) {
      weights_[i] =
          std::make_shared<parameter>(ctx, std::move(info[i].weight), info[i].stored_weight, d.branches[i].placed,
                                      d.gathered, parameter_place<Precision, Device>{array, at, master});
      if (master) master += weights_[i]->size();
    }
  }
  void share(parameter_ptr<Precision, Device> shared, const shared_linears& d, const std::string& name) {
    if (weights_.size() > 1) fail({name, ": linears that share an input cannot use the parameter of another layer"});
    if (!equivalent(shared->used(), d.branches[0].weight))
      fail({name, ": the parameter ", shared->name(), " is used in two layouts, ", describe(shared->used()), " and ",
            describe(d.branches[0].weight), "; its users must shard it alike"});
    weights_[0] = std::move(shared);
    tied_ = true;
  }

  /// Whether anything is to be done for gradients of weights and adapters, and of biases.
  bool weights_trainable() const {
    return adapters_.trainable() ||
           std::any_of(weights_.begin(), weights_.end(), [](const auto& p) { return p->trainable(); });
  }
  void require_gathered() const {
    for (const auto& p : weights_) p->require_gathered();
    biases_.require_gathered();
  }
  const W* weights() const { return weights_[0]->used_value(); }
  detail::named_array weights_read() const { return {weights(), batches_ * total_ * inner_, "the weight"}; }

  buffer<Device> gathered_room(const context<Device>& ctx) const {
    return make_buffer<T>(ctx.device, static_cast<std::size_t>(rows() * inner_));
  }

  using row_range = detail::row_range;
  row_range all_rows() const { return {0, rows()}; }

  /// out = a [all rows, k] times the weight, or its transpose, in some of the rows, plus `addend` and the biases where
  /// they are wanted; `out` and `addend` are [these rows, n]. Returns whether the biases are added already.
  bool multiply(const context<Device>& ctx, bool transposed, std::int64_t n, std::int64_t k, row_range rows, const T* a,
                T* out, const T* addend, bool biases) {
    // cuBLASLt's table of types names no bias for double, and its kernels may read 16 bytes of a bias at a time.
    constexpr bool fuses_bias = std::is_same_v<W, T> && !std::is_same_v<T, double>;
    const bool with_bias =
        fuses_bias && biases && biases_.row() != nullptr && reinterpret_cast<std::uintptr_t>(biases_.row()) % 16 == 0;
    for (std::int64_t at = rows.first, end = at + rows.count, count = 0; at < end; at += count) {
      const std::int64_t b = at / rows_, before = at - rows.first;
      count = std::min(end, (b + 1) * rows_) - at;
      const T* const from = a + at * k;
      const W* const weight = weights() + b * total_ * inner_;
      T* const to = out + before * n;
      const auto [as_stored, row] = std::pair(transposed != inputs_first_, inputs_first_ ? total_ : inner_);
      if constexpr (detail::fuses_additions<Device, T>) {
        const T* bias = nullptr;
        if constexpr (fuses_bias) bias = with_bias ? biases_.row() : nullptr;
        ctx.device.gemm(false, as_stored, count, n, k, 1.0, from, k, weight, row, addend ? 1.0 : 0.0, to, n,
                        {bias, addend ? addend + before * n : nullptr});
      } else {
        ctx.device.gemm(false, as_stored, count, n, k, 1.0, from, k, weight, row, 0.0, to, n);
      }
    }
    if constexpr (detail::fuses_additions<Device, T>) {
      return with_bias;
    } else {
      if (addend) kernels::accumulate(ctx.device, addend, out, rows.count * n);
      return false;
    }
  }

  /// Adds to the gradients of the weights that have one, or writes them where nothing was added yet: branches that lie
  /// below each other in one product. Then to those of the biases, which are sums of dy.
  void gradients(const context<Device>& ctx, const T* d, const T* in, const T* dy) {
    std::int64_t at = 0;
    for (std::size_t i = 0; i < weights_.size();) {
      if (!weights_[i]->trainable()) {
        biases_.add_gradients(ctx.device, dy, output_size(), i, i + 1);
        at += columns_[i++];
        continue;
      }
      const std::int64_t first = at;
      const std::size_t begin = i;
      bool overwrites = rows_ > 0;
      for (; i < weights_.size() && weights_[i]->trainable(); at += columns_[i++])
        overwrites = overwrites && weights_[i]->gradient_is_empty();
      G* gradient = nullptr;
      for (std::size_t j = i; j-- > begin;)  // the first one's is where all begin
        gradient = overwrites ? weights_[j]->overwritten_gradient() : weights_[j]->used_gradient(ctx.device);
      const arithmetic<T> keep = overwrites ? 0 : 1;
      if constexpr (detail::fuses_bias_gradients<Device, T, G>) {
        // A bias behind a reduction adds to other rows than the product has.
        const auto product = [&](G* sums) {
          return ctx.device.gemm_with_row_sums(true, false, at - first, inner_, rows_, 1.0, d + first, total_, in,
                                               inner_, keep, gradient, inner_, sums);
        };
        if (!inputs_first_ && unresolve_.trivial() && rows_ > 0 &&
            biases_.add_gradients_by(ctx.device, begin, i, at - first, product))
          continue;
      }
      for (std::int64_t b = 0; b < batches_; ++b) {
        const T *a = d + b * rows_ * total_ + first, *c = in + b * rows_ * inner_;
        std::int64_t m = at - first, n = inner_, lda = total_;
        if (inputs_first_) std::swap(a, c), m = lda = inner_, n = total_;
        ctx.device.gemm(true, false, m, n, rows_, 1.0, a, lda, c, n, keep, gradient + b * total_ * inner_, n);
      }
      biases_.add_gradients(ctx.device, dy, output_size(), begin, i);
    }
  }

  /// Adds the gradients under canonical numerics, where only leaves of a step are added.
  void canonical_gradients(const context<Device>& ctx, std::int64_t index, std::int64_t count, const T* d, const T* in,
                           const T* dy) {
    for (const auto& p : weights_)
      if (p->trainable()) p->begin_terms();
    if (terms_ && weights_trainable()) canonical_.add_weights(ctx.device, *terms_, index, count, d, in);
    biases_.add_terms(ctx.device, index, count, dy);
  }

  detail::layer_names names_;
  bool tied_ = false;                                      ///< whether the weight is another layer's
  bool inputs_first_ = false;                              ///< whether the weight lies as [in, out]
  std::vector<parameter_ptr<Precision, Device>> weights_;  ///< of all branches, one after the other in memory
  detail::linear_biases<Precision, Device> biases_;
  detail::lora_adapters<Precision, Device> adapters_;
  detail::canonical_linear<Precision, Device> canonical_;  ///< under canonical numerics
  gradient_terms<Precision, Device>* terms_ = nullptr;     ///< of the weights, likewise
};

PLAIT_COMPILED_TEMPLATE(class linear_core<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class linear_core<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class linear_core<double, cpu>)

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/nn/linear/core.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
