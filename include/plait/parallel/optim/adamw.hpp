// AdamW on reduced gradients of parameters, or on the caller's tensors. A gradient that is still partial does not
// compile.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/kernels/moments.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/layout.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/parallel/optim/optimizer.hpp"
#include "plait/tensor/check_values.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait {
namespace detail {

/// Requires a gradient that can update a parameter stored as `Stored`: complete on every axis, and with the dual spec.
template <class Stored, class Gradient>
struct optimizer_value {
  static constexpr verdict value = [] {
    const layout stored = layout_v<Stored>, gradient = layout_v<Gradient>;
    verdict v;
    for (axis_id axis : gradient.partial)
      v.worsen({layout_error::unresolved_partial, axis, {}, state::partial, dual(stored.state_of(axis))});
    if (!v.ok()) return v;
    if (const verdict dims = compare_dims(operand::gradient, stored.dim_order(), gradient.dim_order()); !dims.ok())
      return dims;
    for (axis_id axis : differing_axes(gradient, dual(stored)))
      v.worsen({layout_error::wrong_dual, axis, gradient.sharded_by(axis), gradient.state_of(axis),
                dual(stored.state_of(axis))});
    return v;
  }();
};

}  // namespace detail

using kernels::moment_type;

struct adamw_options {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;  ///< for parameters that decay
  moment_type moments = moment_type::full;
};

/// AdamW with decoupled weight decay (Loshchilov and Hutter 2019). Its state has the parameters' stored layout, in the
/// format of `adamw_options::moments`. State is assigned to parameters by name, so a step may omit any parameter. Bias
/// corrections count a parameter's own updates. Stochastic rounding depends only on the context's seed, the step, the
/// parameter's name and the global index, so it is equal on every layout. Blocks of moments are counted in the stored
/// elements of the parameter's array. Data parallelism must not split them (`bucket_cut::blocks`).
///
/// Numbers that change in each step are in the device's memory, so a step does not wait and can be replayed as a graph.
///
///     optimizer.begin_step(ctx, learning_rate);
///     optimizer.update(ctx, layer);
template <class Precision, compute_device Device = cpu>
class adamw {
  using M = master_of<Precision>;
  using G = gradient_of<Precision>;
  using W = weight_of<Precision>;
  using A = arithmetic<M>;

 public:
  using reduced = reduced_gradient<Precision, Device>;

  explicit adamw(adamw_options options = {});

  /// Starts a step, in which every parameter may be updated once. Gradients are multiplied with `gradient_scale`.
  void begin_step(const context<Device>& ctx, double learning_rate, double gradient_scale = 1.0);
  /// Replaces the step's gradient scale by the factor in `clipped`, in the device's memory. If its `update` is 0, the
  /// step changes nothing.
  void clip_by(const context<Device>& ctx, const kernels::clip_numbers* clipped);
  /// Called when a training step begins to run. Throws unless `begin_step` was called exactly once since the last
  /// update or run, because it counts steps for the bias corrections.
  void take_step();
  /// Called when the last step was skipped, so the bias corrections do not count it.
  void forget_step();

  /// Takes a parameter after data parallelism has split it; of a loaded state this rank keeps its slice. Throws if the
  /// parameter is split within a block of 8-bit moments. Throws also for 8-bit moments with deterministic sums, because
  /// blocks depend on the elements that a rank stores.
  void prepare(const context<Device>& ctx, const parameter<Precision, Device>& p);

  /// Makes the checks of `prepare`.
  void check_cut(const context<Device>& ctx, const parameter<Precision, Device>& p) const {
    if (options_.moments != moment_type::int8) return;
    require_any_order(ctx, "adamw", "moments = int8, whose blocks differ between layouts; legal are full and bf16");
    if (!p.storage() || p.storage()->axes().empty()) return;
    if (p.storage()->cuts_at() % kernels::moment_block == 0) return;
    fail({"adamw: moments = int8 have a scale for each ", kernels::moment_block,
          " elements, and data parallelism cuts ", p.name(), " at any multiple of ", p.storage()->cuts_at(),
          "; legal cuts are bucket_cut::blocks(n), n a multiple of ", kernels::moment_block,
          ", and bucket_cut::whole, and legal moments with this one full and bf16"});
  }

  void update(const context<Device>& ctx, reduced g) { update(ctx, std::span<reduced>(&g, 1)); }
  /// Updates several parameters together.
  void update(const context<Device>& ctx, std::span<reduced> gradients);
  /// Reduces the gradients of all trainable parameters of layers or models, and updates them. Collective.
  template <detail::visits_parameters Layer, detail::visits_parameters... Layers>
  void update(const context<Device>& ctx, Layer& layer, Layers&... layers) {
    std::vector<reduced> all = detail::reduced_gradients<Precision>(ctx, layer, layers...);
    update(ctx, std::span<reduced>(all));
  }
  /// Refuses a gradient of another precision with a readable text.
  template <class Other>
    requires(!std::is_same_v<Other, Precision>)
  void update(const context<Device>&, const reduced_gradient<Other, Device>&) {
    detail::require_one_precision<Precision, Other>();
  }
  /// Refuses a parameter in place of its gradient.
  template <class Parameter>
    requires requires(Parameter& p) { p.gather_plan(); }
  void update(const context<Device>&, Parameter&) {
    static_assert(always_false<Parameter>,
                  "an optimizer takes what `reduce` returns, so that no reduction is forgotten: write "
                  "optimizer.update(ctx, parameter.reduce(ctx))");
  }
  /// Updates a tensor of the caller; `name` identifies its state. A gradient that is still partial over some axis does
  /// not compile, because its reduction was forgotten.
  template <spec_like Stored, spec_like Gradient>
  void update(const context<Device>& ctx, const std::string& name, tensor<M, Stored, Device>& p,
              const tensor<G, Gradient, Device>& gradient, bool decays = true) {
    static_assert(enforced<detail::optimizer_value<Stored, Gradient>, among<Stored, Gradient>, Gradient, Stored>);
    begun_ = 0;
    const box part = local_box(layout_v<Stored>, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
    if (p.size() != part.local_size() || gradient.size() != p.size())
      fail({"adamw: ", name, " has ", p.size(), " elements and its gradient ", gradient.size(),
            "; this rank's part has ", part.local_size(),
            ": a tensor of none was moved from, or views a null pointer"});
    moments_.require_own_memory(name, p.data(), static_cast<std::size_t>(p.size()) * sizeof(M));
    run(ctx, {{p.data(),
               gradient.data(),
               nullptr,
               p.size(),
               decay_of(decays),
               name,
               0,
               {kernels::run_map::of(part), 0, parameter<Precision, Device>::stream_of(name)}}});
  }
  /// The number of steps, without skipped ones.
  std::int64_t step() const { return step_; }
  /// Continues after `step` steps, for code that loads the state of `visit_state`.
  void resume(std::int64_t step, std::map<std::string, std::int64_t> missed = {});
  /// For each parameter that steps omitted: the number of these steps. Part of the state, like `step`.
  std::map<std::string, std::int64_t> missed_steps() const { return moments_.missed_steps(); }
  /// Calls f(optimizer_tensor) for both moments of this rank's slice of `p`; they are zero before the first step.
  template <class F>
  void visit_state(const context<Device>& ctx, const parameter<Precision, Device>& p, F&& f) {
    using code = optimizer_tensor::code;
    const std::int64_t n = p.slice().size(), place = place_of(p);
    if (n == 0) return;
    const kernels::moment_places at = kernels::places_of(options_.moments, sizeof(A), n, place);
    std::byte* const memory = moments_.find(ctx, p.name(), n, at.bytes);
    const bool coded = options_.moments == moment_type::int8;
    const dtype type = options_.moments == moment_type::full ? dtype_of<A> : coded ? dtype::u8 : dtype::bf16;
    f(optimizer_tensor{"exp_avg", coded ? code::first_moment : code::none, type, memory,
                       coded ? memory + at.first_scales : nullptr, place, n});
    f(optimizer_tensor{"exp_avg_sq", coded ? code::second_moment : code::none, type, memory + at.second,
                       coded ? memory + at.second_scales : nullptr, place, n});
  }
  /// Returns the numbers of the step, in the device's memory, for an optimizer that passes parameters to this one.
  /// Valid from the first step on, as long as this object.
  const kernels::adamw_scalars* scalars() const { return scalars_.template data<kernels::adamw_scalars>(); }

 private:
  /// The numbers that must be equal on all ranks.
  std::vector<setting> numbers_of(double learning_rate, double gradient_scale) const {
    return {{"learning_rate", exact_text(learning_rate)}, {"gradient_scale", exact_text(gradient_scale)},
            {"beta1", exact_text(options_.beta1)},        {"beta2", exact_text(options_.beta2)},
            {"epsilon", exact_text(options_.epsilon)},    {"weight_decay", exact_text(options_.weight_decay)},
            {"moments", name_of(options_.moments)},       {"step", cat({step_})}};
  }
  kernels::adamw_settings settings() const { return {options_.beta1, options_.beta2, options_.epsilon}; }

  /// Notes both moments of this rank's slice for comparison, except in the first step, when they are zero. 8-bit
  /// moments are not noted, since differences of codes have no meaning.
  void note_moments(const context<Device>& ctx, const parameter<Precision, Device>& p) {
    if constexpr (!only_counts<Device>) {
      if (step_ == 1 || options_.moments == moment_type::int8 || !detail::notes_values(ctx)) return;
      const std::int64_t n = p.slice().size();
      const std::size_t bytes = kernels::places_of(options_.moments, sizeof(A), n, 0).bytes;
      const std::byte* const memory = n == 0 ? nullptr : moments_.find(ctx, p.name(), n, bytes);
      if (options_.moments == moment_type::bf16)
        detail::note_piece(ctx, p, "the moments of ", reinterpret_cast<const bf16*>(memory), 2 * n);
      else
        detail::note_piece(ctx, p, "the moments of ", reinterpret_cast<const A*>(memory), 2 * n);
    }
  }

  /// The index of a slice's first element in its block of moments.
  static std::int64_t place_of(const parameter<Precision, Device>& p) {
    return (p.array_offset() + p.slice().begin) % kernels::moment_block;
  }
  double decay_of(bool decays) const { return decays ? options_.weight_decay : 0; }

  /// One tensor of a step, or this rank's slice of it.
  struct one {
    M* master;
    const G* gradient;
    W* rounded;
    std::int64_t size;
    double weight_decay;
    std::string name;
    std::int64_t place;  ///< of its first element in its block of moments
    kernels::rounded_elements elements;
    std::shared_ptr<const void> owner{};  ///< an object with the parameter's lifetime; null for a tensor of the caller
    std::byte* state = nullptr;
  };

  /// Writes the numbers of this step to the device's memory, for parameters that missed `missed` steps.
  void put_numbers(const context<Device>& ctx, buffer<Device>& to, std::int64_t missed) {
    if (to.empty()) to = make_buffer<kernels::adamw_scalars>(ctx.device, 1);
    auto numbers = kernels::adamw_scalars_of(settings(), learning_rate_, std::max<std::int64_t>(1, step_ - missed),
                                             gradient_scale_, ctx.seed);
    numbers.rounding = kernels::rounding_seed_of(ctx.seed, static_cast<std::uint64_t>(step_));
    ctx.device.upload(to.data(), &numbers, sizeof numbers, ctx.device.main_stream());
  }
  static void take_clip(const context<Device>& ctx, buffer<Device>& to, const double* factor, const double* update) {
    auto* const numbers = to.template data<kernels::adamw_scalars>();
    ctx.device.copy(&numbers->gradient_scale, factor, sizeof(double), ctx.device.main_stream());
    ctx.device.copy(&numbers->update, update, sizeof(double), ctx.device.main_stream());
  }
  const kernels::adamw_scalars* numbers_for(const context<Device>& ctx, std::int64_t missed) {
    if (missed == 0) return scalars();
    buffer<Device>& numbers = late_[missed];
    if (numbers.empty()) {  // for a parameter's first update
      put_numbers(ctx, numbers, missed);
      take_clip(ctx, numbers, &scalars()->gradient_scale, &scalars()->update);
    }
    return numbers.template data<kernels::adamw_scalars>();
  }

  void run(const context<Device>& ctx, std::vector<one> tensors) {
    std::map<std::int64_t, std::vector<one>> by_missed;
    for (one& t : tensors) {
      t.state = moments_.update(ctx, t.name, t.size, places_of(t).bytes, t.owner);
      by_missed[moments_.missed(t.name)].push_back(std::move(t));
    }
    for (const auto& [missed, some] : by_missed) run(ctx, some, numbers_for(ctx, missed));
  }
  void run(const context<Device>& ctx, const std::vector<one>& tensors, const kernels::adamw_scalars* numbers) {
    if (options_.moments == moment_type::bf16) return run_rounded<bf16>(ctx, tensors, numbers);
    if (options_.moments == moment_type::int8) return run_rounded<std::uint8_t>(ctx, tensors, numbers);
    if constexpr (!std::is_same_v<M, A>) {  // no masters, so values are rounded
      run_rounded<A>(ctx, tensors, numbers);
    } else {
      std::vector<kernels::adamw_tensor<M, G, W>> all;
      for (const one& t : tensors) {
        auto* const m = reinterpret_cast<A*>(t.state);
        all.push_back({t.master, t.gradient, m, m + t.size, t.rounded, t.size, t.weight_decay});
      }
      launch(ctx, all, numbers);
    }
  }
  template <class S>
  void run_rounded(const context<Device>& ctx, const std::vector<one>& tensors, const kernels::adamw_scalars* numbers) {
    std::vector<kernels::adamw_rounded_tensor<M, G, W, S>> all;
    for (const one& t : tensors) {
      const kernels::moment_places places = places_of(t);
      std::byte* const at = t.state;
      auto* const scales = reinterpret_cast<std::uint8_t*>(at);
      all.push_back({t.master, t.gradient, reinterpret_cast<S*>(at), reinterpret_cast<S*>(at + places.second),
                     scales + places.first_scales, scales + places.second_scales, t.rounded, t.size, t.place,
                     t.weight_decay, t.elements});
    }
    launch(ctx, all, numbers);
  }
  kernels::moment_places places_of(const one& t) const {
    return kernels::places_of(options_.moments, sizeof(A), t.size, t.place);
  }
  template <class Tensor>
  void launch(const context<Device>& ctx, const std::vector<Tensor>& tensors, const kernels::adamw_scalars* numbers) {
    kernels::adamw_update(ctx.device, std::span<const Tensor>(tensors), settings(), numbers);
  }

  adamw_options options_;
  optimizer_state<Device> moments_{"adamw"};
  buffer<Device> scalars_;
  std::map<std::int64_t, buffer<Device>> late_;  ///< like `scalars_`, by the number of missed steps
  std::int64_t step_ = 0;                        ///< number of the step, for the bias corrections
  int begun_ = 0;                                ///< calls of begin_step since the last update
  double learning_rate_ = 0, gradient_scale_ = 1;
};

template <class Precision, compute_device Device>
adamw<Precision, Device>::adamw(adamw_options options) : options_(options) {
  const auto unit = [](const char* name, double value) {
    if (!(value >= 0 && value < 1)) fail({"adamw: ", name, " = ", value, ", must be at least 0 and below 1"});
  };
  unit("beta1", options.beta1);
  unit("beta2", options.beta2);
  if (!(options.epsilon > 0)) fail({"adamw: epsilon = ", options.epsilon, ", must be positive"});
  if (!(options.weight_decay >= 0)) fail({"adamw: weight_decay = ", options.weight_decay, ", must be at least 0"});
  if (name_of(options.moments)[0] == '?')
    fail({"adamw: moments = ", static_cast<int>(options.moments), ", must be full, bf16 or int8"});
}

template <class Precision, compute_device Device>
void adamw<Precision, Device>::begin_step(const context<Device>& ctx, double learning_rate, double gradient_scale) {
  if (!(learning_rate >= 0 && std::isfinite(learning_rate)))
    fail({"adamw: the learning rate is ", learning_rate, "; legal is 0 or more"});
  if (!std::isfinite(gradient_scale))
    fail({"adamw: the gradient scale is ", gradient_scale, "; legal is any finite number"});
  detail::begin_checked_step(ctx);
  detail::agree_in_checked_step(ctx, "adamw::begin_step", [&] { return numbers_of(learning_rate, gradient_scale); });
  ++step_, ++begun_;
  moments_.begin_step();
  learning_rate_ = learning_rate, gradient_scale_ = gradient_scale;
  put_numbers(ctx, scalars_, 0);
  std::map<std::int64_t, buffer<Device>> late;
  for (const auto& [name, missed] : moments_.missed_steps()) {
    if (late.contains(missed)) continue;
    buffer<Device>& numbers = late[missed] = std::move(late_[missed]);  // stays at the address that a graph reads
    put_numbers(ctx, numbers, missed);
  }
  late_ = std::move(late);
}

template <class Precision, compute_device Device>
void adamw<Precision, Device>::clip_by(const context<Device>& ctx, const kernels::clip_numbers* clipped) {
  if (scalars_.empty()) fail("adamw: begin_step comes before the first step is run");
  take_clip(ctx, scalars_, &clipped->factor, &clipped->update);
  for (auto& [missed, numbers] : late_) take_clip(ctx, numbers, &clipped->factor, &clipped->update);
}

template <class Precision, compute_device Device>
void adamw<Precision, Device>::take_step() {
  const int begun = std::exchange(begun_, 0);
  if (begun == 0) fail("adamw: begin_step(ctx, learning_rate) comes before each run(ctx) of a training step");
  if (begun > 1)
    fail({"adamw: begin_step was called ", begun,
          " times before one run(ctx) of a training step; it comes once for a "
          "step, whatever the number of microbatches"});
}

template <class Precision, compute_device Device>
void adamw<Precision, Device>::forget_step() {
  --step_;
  moments_.forget_step();
}

template <class Precision, compute_device Device>
void adamw<Precision, Device>::prepare(const context<Device>& ctx, const parameter<Precision, Device>& p) {
  check_cut(ctx, p);
  const storage_slice slice = p.slice();
  if (slice.size() == p.size() || !moments_.has(p.name(), p.size())) return;
  if (slice.size() == 0) return moments_.drop(p.name());
  const auto at = [&](std::int64_t n, std::int64_t begin) {
    return kernels::places_of(options_.moments, sizeof(A), n, (p.array_offset() + begin) % kernels::moment_block);
  };
  const kernels::moment_places whole = at(p.size(), 0), now = at(slice.size(), slice.begin);
  const std::size_t bytes = now.second,
                    begin = whole.second / static_cast<std::size_t>(p.size()) * static_cast<std::size_t>(slice.begin);
  const std::size_t scales = now.second_scales - now.first_scales;
  const auto block =
      static_cast<std::size_t>((p.array_offset() % kernels::moment_block + slice.begin) / kernels::moment_block);
  moments_.cut(ctx, p.name(), slice.size(), now.bytes,
               {{begin, 0, bytes},
                {whole.second + begin, now.second, bytes},
                {whole.first_scales + block, now.first_scales, scales},
                {whole.second_scales + block, now.second_scales, scales}});
}

template <class Precision, compute_device Device>
void adamw<Precision, Device>::update(const context<Device>& ctx, std::span<reduced> gradients) {
  begun_ = 0;
  std::vector<one> all;
  all.reserve(gradients.size());
  for (reduced& g : gradients) {
    auto& p = g.parameter();
    check_cut(ctx, p);
    moments_.require_own_memory(p);
    detail::note_update(ctx, g);
    note_moments(ctx, p);
    const storage_slice slice = p.slice();
    const G* const values = g.data();
    const auto target = p.begin_update();
    all.push_back({target.master,
                   values,
                   target.rounded,
                   g.size(),
                   decay_of(p.info().decays),
                   p.name(),
                   place_of(p),
                   {kernels::run_map::of(p.part()), slice.begin, p.stream_of(p.name())},
                   p.array()});
  }
  run(ctx, std::move(all));
}

template <class Precision, compute_device Device>
void adamw<Precision, Device>::resume(std::int64_t step, std::map<std::string, std::int64_t> missed) {
  step_ = step;
  moments_.resume(std::move(missed));
}

PLAIT_COMPILED_TEMPLATE(class adamw<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class adamw<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class adamw<double, cpu>)

}  // namespace plait

#include "plait/core/macros_on.hpp"
