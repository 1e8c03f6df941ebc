// A parameter between steps and in use: its gather, its gradient, the gradient's reduction, and the legal order of
// these calls.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/box.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/core/types.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/check.hpp"
#include "plait/nn/parameter/array.hpp"
#include "plait/nn/parameter/info.hpp"
#include "plait/tensor/check_values.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/microbatch.hpp"
#include "plait/tensor/redistribution.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait::detail {

// The errors for calls that a parameter's state forbids.

[[noreturn]] inline void refuse_ungathered(const std::string& name, parameter_state state) {
  fail({"parameter ", name, " is used while it is ", name_of(state),
        ": call gather(ctx) after its values change and before a layer reads it"});
}
[[noreturn]] inline void refuse_adding(const std::string& name, bool frozen, bool reduced) {
  if (frozen) fail({"parameter ", name, " is frozen, and has no gradient"});
  fail({"parameter ", name,
        reduced
            ? ": a backward pass adds to a gradient that has been reduced; call zero_gradient(ctx) to begin a new sum"
            : ": a backward pass adds to a gradient that has not begun; call zero_gradient(ctx) before it"});
}
[[noreturn]] inline void refuse_reduction(const std::string& name, bool frozen, bool reduced) {
  if (frozen) fail({"parameter ", name, " is frozen, and has no gradient to reduce"});
  fail({"parameter ", name,
        reduced
            ? ": reduce is called twice for one gradient, which would count it more than once; what it returned the "
              "first time goes to the optimizer"
            : ": reduce without a gradient; call zero_gradient(ctx), then backward passes, then reduce(ctx)"});
}
[[noreturn]] inline void refuse_lost_gradient(const std::string& name) {
  fail({"parameter ", name,
        ": zero_gradient would lose a gradient that passes have added to and that was not reduced; call reduce(ctx) "
        "before it, or discard_gradient(ctx) in its place"});
}
[[noreturn]] inline void refuse_unset_values(const std::string& name, bool callers, const std::string& stored) {
  if (callers)
    fail({"parameter ", name, ": gather would overwrite the caller's weights with values that have not been set, as ",
          stored, " in memory of its own; set them by fill_values(ctx, fill), or load them"});
  fail({"parameter ", name,
        ": gather would have layers read values that have not been set; call initialize(ctx) on every "
        "parameter, set values by fill_values(ctx, fill), or load them"});
}

}  // namespace plait::detail

namespace plait {

// The complete gradient of a parameter, which optimizers take.

template <class Precision, compute_device Device>
class parameter;

/// The complete gradient of a parameter. `parameter::reduce` returns it, and optimizers only accept this type.
template <class Precision, compute_device Device>
class reduced_gradient {
 public:
  using precision_type = Precision;

  reduced_gradient(reduced_gradient&&) noexcept = default;
  reduced_gradient& operator=(reduced_gradient&&) noexcept = default;

  plait::parameter<Precision, Device>& parameter() const { return *parameter_; }
  /// This rank's slice of the gradient; the whole gradient has the dual layout of `parameter().stored()`.
  const gradient_of<Precision>* data() const { return std::as_const(*parameter_).gradient(); }
  std::int64_t size() const { return parameter_->slice().size(); }

 private:
  friend class plait::parameter<Precision, Device>;
  explicit reduced_gradient(plait::parameter<Precision, Device>& p) : parameter_(&p) {}
  plait::parameter<Precision, Device>* parameter_;
};

namespace detail {
/// Refuses to compile if the optimizer's precision differs from the parameters'.
template <class OfOptimizer, class OfParameters>
constexpr void require_one_precision() {
  static_assert(std::is_same_v<OfOptimizer, OfParameters>,
                "the optimizer is of another precision than the parameters: write adamw<double> or muon<double> for "
                "layers of double, and so for float and bf16");
}
}  // namespace detail

/// A parameter in the form that layers, optimizers, initialisation, clipping and checkpoints use. `stored` is its
/// layout between steps, `used` the layout that layers need. A plan leads from one to the other; its mirror reduces the
/// gradient. `use_of` derives `used` from the parameter's placement and its partner's layout; a layer cannot choose it.
///
/// Between steps it has the precision's master type, in use the weight type; gradients have the gradient type. It has a
/// state (`parameter_state`). A call that the state forbids throws an error that names the parameter and the missing
/// call. Layers hold parameters by `shared_ptr`, so several layers can share one.
template <class Precision, compute_device Device>
class parameter {
 public:
  using precision_type = Precision;
  using weight_type = weight_of<Precision>;
  using gradient_type = gradient_of<Precision>;
  using master_type = master_of<Precision>;

  /// `stored` and `placed` have equal dims. `placed` is the placement of dims in use, without replication. `met` is the
  /// layout of the parameter's partner in a product, sum or lookup; it must mention every axis of the mesh.
  parameter(const context<Device>& ctx, parameter_info info, const layout& stored, const layout& placed,
            const layout& met, parameter_place<Precision, Device> place = {});
  parameter(const parameter&) = delete;
  parameter& operator=(const parameter&) = delete;

  const std::string& name() const { return info_.name; }
  const parameter_info& info() const { return info_; }
  const layout& stored() const { return stored_; }
  const layout& used() const { return used_; }
  /// Whether the placement of dims differs between storage and use: with ZeRO, or a policy's `stored`.
  bool stored_differently() const { return stored_apart_; }
  /// The part of the (padded) global parameter that belongs to this rank in the stored layout.
  const box& part() const { return part_; }
  std::int64_t size() const { return part_.local_size(); }
  /// The slice of `part` that this rank stores and updates between steps. It is the whole part, unless data parallelism
  /// splits the part over the ranks of `storage()->axes()`.
  storage_slice slice() const { return storage_ ? slice_of(storage_->rank()) : storage_slice{0, size()}; }
  storage_slice slice_of(std::int64_t rank) const { return storage_->slice_of(in_storage_, size(), rank); }
  /// The flat storage in which data parallelism keeps the parameter; null: the parameter has its own memory.
  flat_storage<Precision, Device>* storage() const { return storage_; }
  /// The global (padded) sizes and the blocks of its dims. They include dims that the context lacks, such as an
  /// adapter's rank.
  const dim_sizes& sizes() const { return sizes_; }
  /// Local elements in use; `most_used` is the largest number over all ranks, and equal on all of them.
  std::int64_t used_size() const { return gather_.target().local_size(); }
  std::int64_t most_used() const { return most_used_; }
  parameter_state state() const {
    if (!is_current()) return phase_ == phase::updated ? parameter_state::updated : parameter_state::stale;
    if (phase_ == phase::reduced) return parameter_state::reduced;
    const bool sums = phase_ == phase::accumulating || phase_ == phase::reducing;
    return sums ? parameter_state::accumulating : parameter_state::gathered;
  }

  /// Master values, for changes; the parameter becomes stale. Throws if this rank has only a slice; use `fill_values`
  /// then.
  master_type* value();
  /// Master values of this rank's slice.
  const master_type* value() const { return const_cast<parameter*>(this)->master(); }
  /// Master values of this rank's slice, for changes; the parameter becomes stale.
  master_type* changed_slice();
  /// Whether values have changed since the last gather, except by an optimizer's update.
  bool values_changed() const { return changed_; }
  /// Calls fill(values), which writes all values of this rank's part, and keeps those that this rank stores.
  template <class F>
  void fill_values(const context<Device>& ctx, F&& fill) {
    if (!storage_ || storage_->axes().empty()) return fill(value());
    auto whole = make_buffer<master_type>(ctx.device, static_cast<std::size_t>(size()));
    fill(whole.template data<master_type>());
    const storage_slice own = slice();
    ctx.device.copy(changed_slice(), whole.template data<master_type>() + own.begin,
                    static_cast<std::size_t>(own.size()) * sizeof(master_type), ctx.device.main_stream());
  }
  /// The gradient of this rank's slice. Throws if passes have added to it and `reduce` has not completed it, unless no
  /// reduction is needed.
  const gradient_type* gradient() const;

  /// Returns the values that layers read. Throws while the parameter is stale.
  const weight_type* used_value() const {
    require_gathered();
    return array_->values() + at_;
  }
  /// Returns the gradient to which backward passes add; the first call after `zero_gradient` zeroes it. Throws unless
  /// the parameter is accumulating, if it is frozen, or if sums are deterministic.
  gradient_type* used_gradient(Device& device);
  /// Whether the gradient is empty since `zero_gradient`. A pass that writes every element can then overwrite it.
  bool gradient_is_empty() const { return empty_; }
  /// Returns the gradient for a pass that writes every element. Throws like `used_gradient`.
  gradient_type* overwritten_gradient() {
    begin_terms();
    if (ordered_) detail::refuse_unordered(info_.name);
    return summed();
  }
  /// Adds a `gradient_terms` for a new user of its array and returns it. Throws after data parallelism has taken over
  /// the array.
  gradient_terms<Precision, Device>& add_terms(token_leaves leaves) {
    if (storage_) detail::refuse_late_layer(info_.name);
    return array_->add_terms(std::move(leaves));
  }
  /// Begins additions to the `gradient_terms` of its array. Throws like `used_gradient`.
  void begin_terms() { require_accumulating(), empty_ = false, note_adding(); }
  /// Makes the check of `used_value` alone, for layers that keep several parameters in one array.
  void require_gathered() const {
    if (!is_current()) detail::refuse_ungathered(info_.name, state());
  }
  /// Makes the check of `used_gradient` alone.
  void require_accumulating() const {
    if (phase_ != phase::accumulating) detail::refuse_adding(info_.name, frozen_, reduction_begun());
    if (gradient_use_ && !gradient_use_->valid && !only_counts<Device>)
      refuse(
          ": a backward pass adds to its gradient, whose memory another parameter's gradient has taken; call "
          "zero_gradient(ctx) before the pass, and reduce(ctx) before the memory serves the next");
    if (!ordered_ && !array_->can_have_gradients())
      refuse(
          ": a backward pass adds to its gradient, for which data parallelism has lent no memory; "
          "enter(ctx, unit, true) comes before the pass");
  }

  /// Freezes the parameter, which cannot be undone. It then has no gradient memory, product, reduction or optimizer
  /// state.
  void freeze();
  bool trainable() const { return !frozen_; }

  /// A change of values after the updates of a step, for rules without a gradient. It may be collective over the
  /// context's mesh. `clipped`, in the device's memory, says whether the step is skipped, and then values must stay; if
  /// null, it is not skipped. A change that waits for the device cannot be recorded in a graph.
  using step_rule = std::function<void(parameter&, const context<Device>&, const kernels::clip_numbers* clipped)>;
  /// Sets the change that ends each step. Copies of a layer share it.
  void at_end_of_step(step_rule change) { end_of_step_ = std::move(change); }
  bool changes_at_end_of_step() const { return end_of_step_ != nullptr; }
  /// Makes the change of `at_end_of_step`, if there is one. `training_step` does so; a program with its own steps must
  /// do so too.
  void end_step(const context<Device>& ctx, const kernels::clip_numbers* clipped = nullptr) {
    if (end_of_step_) end_of_step_(*this, ctx, clipped);
  }
  /// Master values for a `step_rule`. As after an optimizer's update, the parameter becomes stale, but `values_changed`
  /// keeps its result. Throws like `value`.
  master_type* value_in_step() {
    const bool changed = changed_;
    master_type* const values = value();
    changed_ = changed;
    return values;
  }
  /// For a program's own kernel: in a checked step, ranks compare the gradient terms that it added with the states that
  /// the spec `met` promises.
  void check_terms(std::string met) { met_ = std::move(met); }

  /// Fills the stored part with random numbers that depend only on the seed, the parameter's name and the global index.
  /// So they are equal on every mesh. Padding is zero.
  void initialize(const context<Device>& ctx);
  /// Zeroes the rows beyond the logical size of the leading dim.
  void clear_padding(const context<Device>& ctx, master_type* values) const {
    detail::zero_padding(ctx.device, part_, values);
  }

  /// Gathers the stored values for the layers. Collective over the axes of its plan. If data parallelism keeps the
  /// parameter, it gathers all parameters of the same storage, collective over the axes that split it.
  void gather(const context<Device>& ctx);
  /// Begins the sum of a gradient. The first pass overwrites old values; the caller's memory is zeroed at once instead.
  /// Does nothing for a frozen parameter. Throws if passes have added to a gradient that needs a reduction and `reduce`
  /// was not called. To drop such a gradient, call `discard_gradient`.
  void zero_gradient(const context<Device>& ctx);
  /// Does the same, called by `zero_gradients`.
  void zero_gradient_in_step(const context<Device>& ctx) {
    zero_gradient(ctx);
    begun_in_ = sums_->calls;
  }
  /// Whether a call of `zero_gradients` has begun the gradient in this step.
  bool begun_in_step() const { return begun_in_ > 0 && begun_in_ >= sums_->first; }
  /// Begins the sum of a gradient, even if the previous one was never reduced.
  void discard_gradient(const context<Device>& ctx);
  /// Drops the terms that passes have added, after an exception has ended the step. It does not wait.
  void abandon_gradient() { added_ = false; }
  /// Begins a gradient in the caller's memory, which the caller has zeroed.
  void begin_gradient() {
    if (!frozen_) phase_ = phase::accumulating, empty_ = false;
  }
  /// Completes the gradient over every axis over which it is partial, and over the stages that share the parameter.
  /// Collective over these axes and stages. Throws unless a gradient was begun since the last reduction.
  [[nodiscard]] reduced_gradient<Precision, Device> reduce(const context<Device>& ctx) {
    start_reduction(ctx);
    return finish_reduction();
  }
  /// Does the same as `reduce` in two calls; the sum over stages that share the parameter is in flight between them.
  void start_reduction(const context<Device>& ctx);
  [[nodiscard]] reduced_gradient<Precision, Device> finish_reduction();

  /// The memory that an optimizer writes: the master values of this rank's slice. If values are rounded in place, it
  /// also has the array for the rounded values, and the optimizer must write all of them. The parameter's state becomes
  /// `updated`.
  struct update_target {
    master_type* master;
    weight_type* rounded;  ///< null: `gather` rounds
  };
  update_target begin_update();

  /// Makes `reduce` also sum over the pipeline stages that share this parameter. `counts` is true on one of them, where
  /// norms and hashes include the parameter.
  void join_stages(any_communicator stages, bool counts) {
    stages_ = std::move(stages);
    counts_ = counts;
  }
  any_communicator& stages() { return stages_; }
  /// Whether norms and hashes over all stages include the parameter on this stage.
  bool counts() const { return counts_; }
  const std::shared_ptr<parameter_array<Precision, Device>>& array() const { return array_; }
  std::int64_t array_offset() const { return at_; }
  const ready_plan& gather_plan() const { return gather_; }
  /// Calls f(what, begin, elements) for each of the caller's arrays that hold values, gradients, masters or reduced
  /// gradients. `between_steps`: only for arrays that keep their numbers between passes.
  template <class F>
  void visit_callers_memory(F&& f, bool between_steps = false) const {
    if (array_->callers_values() && !(between_steps && values_pass_by()))
      f("values", array_->existing_values() + at_, used_size());
    if (array_->callers_gradients() && trainable() && !(between_steps && gradients_pass_by()))
      f("gradients", array_->gradients() + at_, used_size());
    if (callers_master_) f("masters", callers_master_, size());
    if (callers_reduced_ && trainable()) f("reduced gradients", callers_reduced_, size());
  }
  /// Returns the stream of random numbers of a parameter with this name.
  static constexpr std::uint64_t stream_of(std::string_view name) { return fnv1a(name); }

 private:
  friend class flat_storage<Precision, Device>;
  friend class detail::parameter_rebinding<Precision, Device>;
  static constexpr bool rounded = !std::is_same_v<weight_type, master_type>;
  enum class phase : std::uint8_t { none, accumulating, reducing, reduced, updated };
  /// Whether the gradient of a pass is incomplete without a reduction.
  bool needs_reduction() const { return storage_ || stages_ || ordered_ || !reduce_.trivial() || gradients_pass_by(); }
  /// Whether the caller's memory holds values, or gradients, only during passes, because the stored ones are elsewhere.
  bool values_pass_by() const { return stored_apart_ && array_->callers_values(); }
  bool gradients_pass_by() const { return stored_apart_ && array_->callers_gradients(); }
  template <class E>
  std::size_t used_bytes() const {
    return static_cast<std::size_t>(used_size()) * sizeof(E);
  }
  [[noreturn]] void refuse(std::string_view text) const { fail({"parameter ", info_.name, text}); }
  static void take_memory(const context<Device>& ctx, const std::shared_ptr<detail::memory_use>& use,
                          const void* memory, std::size_t bytes) {
    if (use && !only_counts<Device>) ctx.ranks.memory_uses().take(memory, bytes, use);
  }
  /// Records that a pass adds to the gradient.
  void note_adding() {
    if (!added_) added_in_ = sums_->calls;
    if (added_in_ < sums_->first && needs_reduction() && !only_counts<Device>)
      refuse(
          ": a backward pass adds to a gradient of the step before, which was not reduced; zero_gradients has begun "
          "this "
          "step without it: give its layer to zero_gradients and reduce_all, or have `visit` visit it");
    added_ = true;
  }
  bool is_current() const { return current_ && (!values_use_ || values_use_->valid || only_counts<Device>); }
  bool reduction_begun() const { return phase_ == phase::reducing || phase_ == phase::reduced; }

  void require_given() const {
    if (!only_counts<Device> && !given_ && slice().size() > 0)
      detail::refuse_unset_values(info_.name, array_->callers_values(), describe(stored_));
  }
  void clear_gradient(Device& device) {
    device.zero(summed(), static_cast<std::size_t>(used_size()) * sizeof(gradient_type), device.main_stream());
    empty_ = false;
  }
  reduced_gradient<Precision, Device> complete_gradient() {
    phase_ = phase::reduced;
    return reduced_gradient<Precision, Device>(*this);
  }

  void set_changed() {
    current_ = rounded_current_ = false;
    changed_ = given_ = true;
    if (phase_ == phase::updated) phase_ = phase::none;  // the optimizer's rounded values are outdated
  }
  void set_current(bool current) {
    if (current) require_given(), changed_ = false;
    current_ = current;
    if (current && phase_ == phase::updated) phase_ = phase::none;
  }
  void move_to(const context<Device>& ctx, flat_storage<Precision, Device>& storage, std::int64_t at);
  /// Where this rank's slice begins in the storage's slice.
  std::int64_t storage_begin() const { return in_storage_ + slice().begin - storage_->rank() * storage_->slice_; }

  gradient_type* summed() { return array_->gradients() + at_; }
  bool empty_terms() const { return array_->terms().empty(); }
  bool has_stored_values() const { return callers_master_ || !stored_value_.empty(); }
  master_type* master();
  gradient_type* stored_gradient();

  Device* device_;
  parameter_info info_;
  std::string met_;  ///< the partner's spec as promised by a program; empty: a layer derives it
  layout stored_, used_;
  ready_plan gather_, reduce_;
  box part_;
  dim_sizes sizes_;
  std::int64_t most_used_ = 0;
  std::shared_ptr<parameter_array<Precision, Device>> array_;
  std::int64_t at_ = 0;  ///< offset in the array
  master_type* callers_master_ = nullptr;
  gradient_type* callers_reduced_ = nullptr;
  std::shared_ptr<detail::memory_use> values_use_, gradient_use_;  ///< for the caller's memory that several parameters
                                                                   ///< share
  buffer<Device> stored_value_, stored_gradient_;
  flat_storage<Precision, Device>* storage_ = nullptr;
  std::int64_t in_storage_ = 0;
  any_communicator stages_;
  request tying_;  ///< the sum over `stages_`
  phase phase_ = phase::none;
  bool current_ = false;          ///< whether layers may read the used values
  bool rounded_current_ = false;  ///< whether the used values are the stored ones, rounded
  bool changed_ = true;           ///< whether values have changed from outside since they were last rounded or gathered
  bool given_ = false;            ///< whether stored values have been set
  bool counts_ = true, frozen_ = false, ordered_ = false;
  bool stored_apart_ = false;  ///< whether the placement in storage differs from that in use
  bool added_ = false;         ///< whether a pass has added to the gradient since its sum began
  bool empty_ = false;         ///< whether the gradient counts as zero, regardless of its memory
  step_rule end_of_step_;
  detail::unreduced_sums* sums_;
  std::int64_t begun_in_ = 0;  ///< number of the last `zero_gradients` call that included it
  std::int64_t added_in_ = 0;  ///< number of the last such call before a pass began to add to it
};

template <class Precision, compute_device Device>
using parameter_ptr = std::shared_ptr<parameter<Precision, Device>>;

template <class Precision, compute_device Device>
parameter<Precision, Device>::parameter(const context<Device>& ctx, parameter_info info, const layout& stored,
                                        const layout& placed, const layout& met,
                                        parameter_place<Precision, Device> place)
    : device_(&ctx.device),
      info_(std::move(info)),
      stored_(stored),
      used_(detail::checked_use(ctx.ranks.shape(), info_.name, placed, met)),
      gather_(stored, used_, ctx.ranks, ctx.sizes, "parameter " + info_.name),
      reduce_(gather_.backward(), ctx.ranks, ctx.sizes, "gradient of " + info_.name),
      array_(std::move(place.array)),
      at_(place.offset),
      callers_master_(place.master),
      callers_reduced_(place.reduced),
      ordered_(sums_in_order(ctx)),
      stored_apart_(detail::stored_differently(stored, placed)),
      sums_(&ctx.ranks.sums()) {
  enforce(check_stored(stored), "parameter " + info_.name);
  detail::agree_on_context(ctx);
  part_ = local_box(stored, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
  part_.padding = detail::padding_of(info_, part_);
  for (std::size_t d = 0; d < stored.dims.size(); ++d)
    sizes_.set(stored.dims[d].dim, part_.global[d], ctx.sizes.block_of(stored.dims[d].dim));
  most_used_ = most_elements(used_, ctx.ranks.shape(), ctx.sizes);
  if (!array_) array_ = std::make_shared<parameter_array<Precision, Device>>(ctx.device, used_size());
  array_->add_parameter();
  given_ = callers_master_ || (array_->callers_values() && !stored_apart_);
  current_ = given_ && !callers_master_;
  if (array_->callers_gradients() && !stored_apart_) phase_ = phase::accumulating;
  if (values_pass_by()) values_use_.reset(new detail::memory_use{&info_.name, nullptr});
  if (gradients_pass_by()) gradient_use_.reset(new detail::memory_use{&info_.name, &added_});
  if (ordered_ && sizeof(gradient_type) < sizeof(float)) detail::refuse_narrow(info_.name);
}

template <class Precision, compute_device Device>
auto parameter<Precision, Device>::value() -> master_type* {
  if (storage_ && !storage_->axes().empty())
    fail({"parameter ", info_.name, ": this rank has elements ", slice().begin, " to ", slice().end, " of ", size(),
          ", because data parallelism cuts it; change its values by fill_values(ctx, fill)"});
  return changed_slice();
}

template <class Precision, compute_device Device>
auto parameter<Precision, Device>::changed_slice() -> master_type* {
  if (storage_) storage_->wait_for_transfers();  // otherwise a gather of the old values would mark these as gathered
  set_changed();
  return master();
}

template <class Precision, compute_device Device>
auto parameter<Precision, Device>::gradient() const -> const gradient_type* {
  if ((added_ || phase_ == phase::reducing) && needs_reduction())
    refuse(
        ": its gradient is read before it is complete, so that it is this rank's term of a sum; call reduce(ctx) "
        "before");
  return const_cast<parameter*>(this)->stored_gradient();
}

template <class Precision, compute_device Device>
auto parameter<Precision, Device>::used_gradient(Device& device) -> gradient_type* {
  require_accumulating();
  if (ordered_) detail::refuse_unordered(info_.name);
  if (empty_) clear_gradient(device);
  note_adding();
  return summed();
}

template <class Precision, compute_device Device>
void parameter<Precision, Device>::freeze() {
  if (frozen_) return;
  if (storage_) fail({"parameter ", info_.name, ": freeze comes before data parallelism lays parameters side by side"});
  frozen_ = true;
  phase_ = phase::none;
  stored_gradient_.reset();
  array_->freeze_parameter();
}

template <class Precision, compute_device Device>
void parameter<Precision, Device>::initialize(const context<Device>& ctx) {
  fill_values(ctx, [&](master_type* values) {
    detail::fill_initial(ctx, info_, part_, stream_of(info_.name), values);
    clear_padding(ctx, values);
  });
}

template <class Precision, compute_device Device>
void parameter<Precision, Device>::gather(const context<Device>& ctx) {
  if (storage_) {
    if (!current_) storage_->gather(ctx);
    return;
  }
  require_given();
  take_memory(ctx, values_use_, array_->values() + at_, used_bytes<weight_type>());
  if constexpr (!rounded) {
    if (!gather_.trivial() || values_pass_by())
      gather_.run(ctx.device, master(), array_->values() + at_, dtype_of<weight_type>);
    master();  // allocates the masters
  } else if (gather_.trivial()) {
    if (!rounded_current_ && (has_stored_values() || !array_->callers_values()))
      kernels::cast(ctx.device, master(), array_->values() + at_, size());
  } else {  // rounded before the transfer: half the bytes
    auto part = make_collective_buffer<weight_type>(ctx.device, static_cast<std::size_t>(size()));
    kernels::cast(ctx.device, master(), part.template data<weight_type>(), size());
    gather_.run(ctx.device, part.data(), array_->values() + at_, dtype_of<weight_type>);
  }
  set_current(true);
  rounded_current_ = gather_.trivial() && !values_pass_by();
}

template <class Precision, compute_device Device>
void parameter<Precision, Device>::zero_gradient(const context<Device>& ctx) {
  if (added_ && needs_reduction() && !only_counts<Device>) detail::refuse_lost_gradient(info_.name);
  discard_gradient(ctx);
}

template <class Precision, compute_device Device>
void parameter<Precision, Device>::discard_gradient(const context<Device>& ctx) {
  if (frozen_) return;
  added_ = false;
  tying_.wait();  // a sum that remains from a step that an exception ended
  phase_ = phase::accumulating;
  empty_ = true;
  array_->clear_terms();
  if (gradients_pass_by()) take_memory(ctx, gradient_use_, array_->gradients() + at_, used_bytes<gradient_type>());
  if (array_->callers_gradients()) clear_gradient(ctx.device);
}

template <class Precision, compute_device Device>
void parameter<Precision, Device>::start_reduction(const context<Device>& ctx) {
  if (frozen_ || phase_ != phase::accumulating) detail::refuse_reduction(info_.name, frozen_, reduction_begun());
  if (storage_)
    fail({"parameter ", info_.name, ": data parallelism keeps it together with others, which the step reduces"});
  if (empty_) clear_gradient(ctx.device);  // no pass has added to it
  added_ = false;
  if (!met_.empty() && detail::notes_values(ctx))
    detail::note_value(ctx, dual(used_), "the gradient of ", cat({info_.name, " (which meets ", met_, ")"}), summed(),
                       used_size());
  ctx.ranks.checks().note_reduction();
  gradient_type* const out = stored_gradient();
  if (ordered_ && !empty_terms())
    join_terms(ctx, array_->terms(), at_, dual(used_), gather_, out, info_.name);
  else if (!reduce_.trivial() || out != summed())
    reduce_.run(ctx.device, summed(), out, dtype_of<gradient_type>);
  if (stages_)
    stages_.start_all_reduce(out, out, static_cast<std::size_t>(size()), dtype_of<gradient_type>, reduce_op::sum)
        .swap(tying_);
  phase_ = phase::reducing;
}

template <class Precision, compute_device Device>
reduced_gradient<Precision, Device> parameter<Precision, Device>::finish_reduction() {
  if (phase_ != phase::reducing)
    refuse(": finish_reduction without start_reduction(ctx), which starts what it waits for");
  tying_.wait();
  return complete_gradient();
}

template <class Precision, compute_device Device>
auto parameter<Precision, Device>::begin_update() -> update_target {
  if (phase_ != phase::reduced)
    fail({"parameter ", info_.name, ": an optimizer updates it while it is ", name_of(state()),
          "; reduce(ctx) comes first, and each gradient is used once"});
  weight_type* to = nullptr;
  if (rounded && storage_ && storage_->rounded_)
    to = storage_->rounded_ + storage_begin();
  else if (rounded && !storage_ && gather_.trivial() && !values_pass_by())
    to = array_->values() + at_;
  phase_ = phase::updated;
  current_ = false;
  rounded_current_ = to != nullptr;
  return {master(), to};
}

template <class Precision, compute_device Device>
void parameter<Precision, Device>::move_to(const context<Device>& ctx, flat_storage<Precision, Device>& storage,
                                           std::int64_t at) {
  if (storage_ && !storage_->axes().empty() && !(storage.slice_of(at, size(), storage.rank()) == slice()))
    fail({"parameter ", info_.name, ": another training step has cut it in another way; a model has one policy"});
  const bool has_values = storage_ || (rounded ? !stored_value_.empty() : array_->has_values());
  const master_type* const old = has_values ? master() - slice().begin : nullptr;
  if (storage_) storage_->wait_for_transfers();  // otherwise a gather to the old place would count for the new one
  storage_ = &storage, in_storage_ = at, rounded_current_ = false;
  const storage_slice own = slice();
  if (old)
    ctx.device.copy(master(), old + own.begin, static_cast<std::size_t>(own.size()) * sizeof(master_type),
                    ctx.device.main_stream());
  stored_value_.reset();
}

template <class Precision, compute_device Device>
auto parameter<Precision, Device>::master() -> master_type* {
  if (storage_) return storage_->masters_ + storage_begin();
  if (callers_master_) return callers_master_;
  if constexpr (!rounded) {
    if (gather_.trivial() && !values_pass_by()) return array_->values() + at_;
  }
  if (stored_value_.empty()) {  // with rounding, `gather` sends rounded values
    const auto n = static_cast<std::size_t>(size());
    stored_value_ =
        rounded ? make_optimizer_buffer<master_type>(*device_, n) : make_collective_buffer<master_type>(*device_, n);
    if constexpr (rounded) {  // masters of the caller's weights begin with their values
      if (array_->callers_values() && !stored_apart_)
        kernels::cast(*device_, array_->values() + at_, stored_value_.template data<master_type>(), size());
    }
  }
  return stored_value_.template data<master_type>();
}

template <class Precision, compute_device Device>
auto parameter<Precision, Device>::stored_gradient() -> gradient_type* {
  if (storage_) return storage_->gradients_ + storage_begin();
  if (callers_reduced_) return callers_reduced_;
  if (gather_.trivial() && !gradients_pass_by()) return summed();
  if (stored_gradient_.empty() && trainable())
    stored_gradient_ = make_collective_buffer<gradient_type>(*device_, static_cast<std::size_t>(size()));
  return stored_gradient_.template data<gradient_type>();
}

PLAIT_COMPILED_TEMPLATE(class parameter<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class parameter<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class parameter<double, cpu>)
PLAIT_COMPILED_TEMPLATE(void detail::note_parameter(const context<cpu>&, const parameter<float, cpu>&))
PLAIT_COMPILED_TEMPLATE(void detail::note_parameter(const context<cpu>&, const parameter<bf16, cpu>&))
PLAIT_COMPILED_TEMPLATE(void detail::note_parameter(const context<cpu>&, const parameter<double, cpu>&))

}  // namespace plait

namespace plait::detail {

// Refuses two parameters in the same memory of the caller: their gradient would be reduced twice, and their values
// updated twice.

/// The callers' arrays that parameters use, by address.
class memory_users {
 public:
  /// Throws, with both names, if the parameter shares the caller's memory with a parameter that was added before. The
  /// same parameter may be added again, and frozen parameters are ignored. `between_steps`: memory that parameters
  /// share in turn during passes is ignored, because their values are stored elsewhere.
  template <class Parameter>
  void add(const Parameter& p, bool between_steps = false) {
    if (!p.trainable()) return;
    p.visit_callers_memory(
        [&](const char* what, const auto* begin, std::int64_t elements) {
          add(&p, p.name(), what, begin, static_cast<std::size_t>(elements) * sizeof *begin);
        },
        between_steps);
  }
  /// Adds an array whose owner is known by name only.
  void add(const std::string& name, const void* begin, std::size_t bytes) {
    add(nullptr, name, "values", begin, bytes);
  }
  void clear() { users_.clear(); }

 private:
  struct user {
    std::uintptr_t end;
    const void* parameter;
    std::string name;
    const char* what;
  };

  void add(const void* parameter, const std::string& name, const char* what, const void* memory, std::size_t bytes);

  std::map<std::uintptr_t, user> users_;
};

#ifndef PLAIT_COMPILED
PLAIT_INLINE void memory_users::add(const void* parameter, const std::string& name, const char* what,
                                    const void* memory, std::size_t bytes) {
  if (bytes == 0) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(memory), end = begin + bytes;
  const auto next = users_.lower_bound(begin);
  const auto check = [&](const auto& at) {
    const user& other = at->second;
    if (at->first >= end || begin >= other.end) return;
    if (parameter == other.parameter && name == other.name && std::string_view(what) == other.what) return;
    fail({"the ", what, " of parameter ", name, " share memory of the caller's with the ", other.what, " of parameter ",
          other.name,
          ", and would be changed twice in a step; let one layer use the parameter of the other "
          "(linear_options::tied), or give each memory of its own"});
  };
  if (next != users_.end()) check(next);
  if (next != users_.begin()) check(std::prev(next));
  users_.try_emplace(begin, user{end, parameter, name, what});
}
#endif

}  // namespace plait::detail

namespace plait {

// The calls of a step for all parameters of layers or models.

/// Calls f with each parameter of the layers or models, in their order. A parameter that several layers share, such as
/// a tied table, is visited once.
template <class F, class... Layers>
void each_parameter(F&& f, Layers&... layers) {
  std::vector<const void*> met;
  const auto first_time = [&](auto& p) {
    if (std::find(met.begin(), met.end(), &p) != met.end()) return;
    met.push_back(&p);
    f(p);
  };
  (layers.visit(first_time), ...);
}
/// Initialises all parameters of layers or models (`parameter::initialize`).
template <compute_device Device, class... Layers>
void initialize(const context<Device>& ctx, Layers&... layers) {
  each_parameter([&](auto& p) { p.initialize(ctx); }, layers...);
}
/// Gathers all parameters of layers or models, before a step's first pass. First it compares noted values of the last
/// step (`value_check`). Collective.
template <compute_device Device, class... Layers>
void gather_parameters(const context<Device>& ctx, Layers&... layers) {
  detail::compare_values(ctx);
  each_parameter([&](auto& p) { p.gather(ctx); }, layers...);
}
/// `take_part` and `put_part` for this rank's part of the parameter `p`; `whole` has no padding.
template <class Parameter, class Whole, class T, compute_device Device>
  requires requires(const Parameter& p) { p.info(); }
void take_part(Device& device, const Parameter& p, const Whole& whole, T* out) {
  take_part(device, p.part(), whole, out);
}
template <class Parameter, class T, class Whole, compute_device Device>
  requires requires(const Parameter& p) { p.info(); }
void put_part(Device& device, const Parameter& p, const T* in, Whole&& whole) {
  put_part(device, p.part(), in, whole);
}
/// Sets all parameters of layers or models, and gathers them. `whole`, in the device's memory, holds whole row-major
/// arrays without padding, one after another in the order of `visit`. Every rank takes its parts. Returns the number of
/// elements of the arrays. Collective.
template <compute_device Device, class T, class... Layers>
std::int64_t take_parts(const context<Device>& ctx, const T* whole, Layers&... layers) {
  std::int64_t taken = 0;
  each_parameter(
      [&](auto& p) {
        p.fill_values(ctx, [&](auto* values) { take_part(ctx.device, p, whole + taken, values); });
        p.gather(ctx);
        taken += without_padding(p.part()).global_size();
      },
      layers...);
  return taken;
}
/// `take_parts` for a vector or a span. Throws, and sets nothing, if its number of elements differs from the arrays'.
template <compute_device Device, detail::counted_array Whole, class... Layers>
std::int64_t take_parts(const context<Device>& ctx, const Whole& whole, Layers&... layers) {
  std::int64_t needed = 0;
  each_parameter([&](auto& p) { needed += without_padding(p.part()).global_size(); }, layers...);
  if (const auto given = static_cast<std::int64_t>(whole.size()); given != needed)
    fail({"take_parts: whole has ", given, " elements, and the parameters have ", needed,
          " without padding; a weight that is padded and not tied needs its true shape (linear_options::shape)"});
  return take_parts(ctx, whole.data(), layers...);
}
/// Begins the gradients of all parameters of layers or models. Throws if two of them share the caller's memory. If a
/// step omits a parameter whose gradient needs a reduction, a later backward pass throws. First it compares noted
/// values of the last step (`value_check`); then it is collective.
template <compute_device Device, class... Layers>
void zero_gradients(const context<Device>& ctx, Layers&... layers) {
  detail::memory_users users;
  detail::unreduced_sums& sums = ctx.ranks.sums();
  bool again = false;
  each_parameter([&](auto& p) { again = again || p.begun_in_step(); }, layers...);
  ++sums.calls;
  if (again) {
    detail::begin_checked_step(ctx);
    sums.first = sums.calls;
  }
  each_parameter(
      [&](auto& p) {
        users.add(p);
        p.zero_gradient_in_step(ctx);
      },
      layers...);
}
/// Completes the gradients of all parameters of layers or models, each once, after a step's last pass. It is for
/// programs with their own optimizer, which then read `gradient()` or their own memory. The `update` of plait's
/// optimizers and `training_step` reduce gradients themselves. Throws if two parameters share the caller's memory.
/// Collective.
template <compute_device Device, class... Layers>
void reduce_all(const context<Device>& ctx, Layers&... layers) {
  detail::memory_users users;
  each_parameter(
      [&](auto& p) {
        users.add(p);
        if (p.trainable()) static_cast<void>(p.reduce(ctx));
      },
      layers...);
}

namespace detail {

struct parameter_visitor {  // nvcc rejects generic lambdas in concepts
  template <class Parameter>
  void operator()(Parameter&) const {}
};
/// Whether it is a layer or a model, not a parameter.
template <class L>
concept visits_parameters = requires(L& l) { l.visit(parameter_visitor{}); };

/// Reduces the gradients of all trainable parameters of layers or models, for an optimizer's update. Collective.
template <class Precision, compute_device Device, class... Layers>
std::vector<reduced_gradient<Precision, Device>> reduced_gradients(const context<Device>& ctx, Layers&... layers) {
  std::vector<reduced_gradient<Precision, Device>> all;
  each_parameter(
      [&](auto& p) {
        using other = typename std::remove_cvref_t<decltype(p)>::precision_type;
        if constexpr (std::is_same_v<other, Precision>) {
          if (p.trainable()) all.push_back(p.reduce(ctx));
        } else {
          require_one_precision<Precision, other>();
        }
      },
      layers...);
  return all;
}

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
