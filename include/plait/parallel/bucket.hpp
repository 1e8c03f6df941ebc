// Parameters side by side in one flat array, which data-parallel ranks gather, reduce and split evenly, in place.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/communicator.hpp"
#include "plait/comm/world.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/deterministic/bucket.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/nn/parameter/info.hpp"
#include "plait/parallel/placement.hpp"
#include "plait/schedule/schedule.hpp"

namespace plait {

/// The communicators of data parallelism on one rank. Gathers and reductions have separate communicators. So the gather
/// of the next unit does not wait for the last unit's reduction, and neither waits for a layer's collective.
class data_ranks {
 public:
  /// Throws if an axis is named twice. Axes that the mesh lacks, and axes of one rank, are ignored.
  data_ranks(world& ranks, const data_axes& axes) : ranks_(&ranks) {
    for (const axis_id axis : ranks.shape().axes) {
      const bool cuts = axes.shard.find(axis) >= 0, copies = axes.replicate.find(axis) >= 0;
      if (cuts && copies) fail({"data_axes: ", axis.text(), " is among shard and replicate; legal is one of them"});
      if (ranks.shape().extent(axis) == 1) continue;
      if (cuts) shard_.push_back(axis);
      if (copies) replicate_.push_back(axis);
      if (cuts || copies) all_.push_back(axis);
    }
  }

  world& ranks() const { return *ranks_; }
  /// The shard axes with more than one rank, in the mesh's order.
  const axis_list& shard() const { return shard_; }
  const axis_list& replicate() const { return replicate_; }
  const axis_list& all() const { return all_; }

  /// The communicators over some axes, in the mesh's order. The first use creates them and is collective over the
  /// world.
  any_communicator& gathers(const axis_list& axes) { return ranks_->group(axes, world::channel::gathers); }
  any_communicator& reductions(const axis_list& axes) { return ranks_->group(axes, world::channel::reductions); }
  /// For each of `owners` ranks along `axes`: the cost of updating the arrays that it owns so far, with
  /// bucket_cut::whole.
  std::vector<double>& loads(const axis_list& axes, std::int64_t owners) {
    for (auto& [of, loads] : loads_)
      if (of == axes) return loads;
    return loads_.emplace_back(axes, std::vector<double>(static_cast<std::size_t>(owners), 0.0)).second;
  }

 private:
  world* ranks_;
  axis_list shard_, replicate_, all_;
  std::vector<std::pair<axis_list, std::vector<double>>> loads_;
};

// The axes over which a parameter's gradient is reduced, sorted by their role in data parallelism.

/// The axes over which a parameter's gradient is completed.
struct reduction_axes {
  axis_list shard;      ///< the axes of `data_axes::shard` over which it is partial
  axis_list replicate;  ///< the axes of `data_axes::replicate`
  axis_list rest;       ///< other axes, such as a norm's over tensor ranks; few elements

  friend bool operator==(const reduction_axes&, const reduction_axes&) = default;
};

/// Throws if a parameter is trainable but no pass of the step has added to its gradient, since the step would then only
/// decay it. A gradient in the caller's memory cannot be checked.
template <class Precision, compute_device Device>
void require_used(const parameter<Precision, Device>& p) {
  if (!p.trainable() || !p.gradient_is_empty()) return;
  fail({"training step: no pass has added to the gradient of the parameter ", p.name(),
        ", which the model visits; use it in every step, freeze it before the step is made, or leave it out of visit"});
}

/// Returns the axes over which a parameter's gradient is reduced, from the dual of its layout in use.
inline reduction_axes reduction_of(const layout& used, const data_ranks& ranks) {
  reduction_axes how;
  const layout gradient = dual(used);
  for (const axis_id axis : ranks.ranks().shape().axes) {
    if (gradient.state_of(axis) != state::partial || ranks.ranks().shape().extent(axis) == 1) continue;
    if (ranks.shard().find(axis) >= 0)
      how.shard.push_back(axis);
    else if (ranks.replicate().find(axis) >= 0)
      how.replicate.push_back(axis);
    else
      how.rest.push_back(axis);
  }
  return how;
}

/// Elements of a bucket whose gradients are summed over `comm` first. They are of one or several parameters.
struct reduced_range {
  std::int64_t begin = 0, end = 0;
  any_communicator* comm = nullptr;
  std::size_t array = 0, last = 0;  ///< of the last parameter: its array, and its number in that array
  bool even = true;                 ///< whether the array has the same size on all ranks
};

/// Joins adjacent ranges that are summed over the same ranks. All ranks must join the same ranges. In an array of
/// unequal sizes, the distances to its ends depend on the rank, so only its consecutive parameters are joined. Padding
/// to `block` may lie between other ranges.
inline void join_neighbours(std::vector<reduced_range>& all, std::int64_t block) {
  std::stable_sort(all.begin(), all.end(),
                   [](const reduced_range& a, const reduced_range& b) { return a.begin < b.begin; });
  std::vector<reduced_range> joined;
  for (const reduced_range& r : all) {
    const auto follows = [&](const reduced_range& before) {
      if (before.comm != r.comm) return false;
      if (before.even && r.even) return before.end == r.begin || round_up(before.end, block) == r.begin;
      return before.array == r.array && before.last + 1 == r.last;
    };
    if (!joined.empty() && follows(joined.back())) {
      joined.back().end = r.end;
      joined.back().last = r.last;
    } else {
      joined.push_back(r);
    }
  }
  all = std::move(joined);
}

}  // namespace plait

namespace plait::detail {

// The places of arrays in a bucket, by their sizes and costs.

/// Returns the places of arrays in a bucket of `slices` slices. With `loads`, one number per rank, every array has one
/// owner. Each array takes the space of its largest version on any rank, so ranks with equal values have equal slices
/// of them.
template <class Member, class Array>
bucket_placement place_arrays(std::span<const Member> members, const std::vector<Array*>& arrays, std::int64_t slices,
                              std::int64_t block, std::vector<double>* loads) {
  std::vector<std::int64_t> sizes;
  std::vector<double> costs(arrays.size(), 0.0);
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    sizes.push_back(0);
    for (const Member& m : members) {
      if (m.who->array().get() != arrays[i]) continue;
      sizes[i] += m.who->most_used();
      if (m.who->trainable()) costs[i] += update_cost(m.who->info());
    }
  }
  if (!loads) return place_evenly(sizes, slices, block);
  if (!members[0].who->info().tied_across_stages) return place_whole(sizes, costs, block, *loads);
  std::vector<double> none(loads->size(), 0.0);  // starts at zero, since two stages that sum their slices must place
                                                 // arrays alike
  bucket_placement out = place_whole(sizes, costs, block, none);
  for (std::size_t i = 0; i < none.size(); ++i) (*loads)[i] += none[i];
  return out;
}

}  // namespace plait::detail

namespace plait {

/// The contiguous arrays of a unit's parameters with equal reductions: a bucket as in Megatron-LLaMA and PyTorch's
/// FSDP. It is split evenly over the ranks, independent of the shapes in it. Each `zero_level` keeps:
///
///     level         values             gradients           master values and optimizer state
///     replicated    all                all                 all
///     optimizer     all                all                 a slice
///     gradients     all                all while summed,   a slice
///                                      then a slice
///     parameters    all while used,    all while used,     a slice
///                   else a slice       else a slice
template <class Precision, compute_device Device>
class parameter_bucket final : public flat_storage<Precision, Device> {
  using storage = flat_storage<Precision, Device>;
  using storage::axes_, storage::group_, storage::slice_, storage::rank_, storage::cuts_at_, storage::masters_,
      storage::rounded_, storage::gradients_;

 public:
  using parameter = plait::parameter<Precision, Device>;
  using array = parameter_array<Precision, Device>;
  using weight_type = weight_of<Precision>;
  using gradient_type = gradient_of<Precision>;
  using master_type = master_of<Precision>;

  /// One parameter, and the axes of its gradient's reduction.
  struct member {
    parameter* who;
    reduction_axes how;
  };

  /// Moves `members` with their values into a new bucket. They lie in `arrays`, and their reductions may differ only in
  /// `how.rest`. Collective over the axes.
  static std::shared_ptr<parameter_bucket> make(const context<Device>& ctx, std::vector<std::shared_ptr<array>> arrays,
                                                std::vector<member> members, zero_level level, bucket_cut cut,
                                                gradient_wire wire, data_ranks& ranks) {
    std::shared_ptr<parameter_bucket> bucket(
        new parameter_bucket(std::move(arrays), std::move(members), level, cut, wire, ranks));
    bucket->move_in(ctx, bucket);
    return bucket;
  }

  bool trainable() const { return trainable_; }

  /// Starts to gather the values for the layers; `finish_gather` waits. Does nothing if they are already gathered.
  void start_gather(const context<Device>& ctx) {
    if (gathering_ || !stale()) return;
    require_in_storage();
    constexpr dtype type = dtype_of<weight_type>;
    if (!values_) {
      make_values(ctx);
      place_values(values_);
    }
    weight_type* const slot = values_ + rank_ * slice_;
    weight_type* const own = level_ == zero_level::parameters && rounded ? rounded_ : slot;
    if constexpr (rounded) {
      bool all_rounded = true;
      for (const member& m : members_) all_rounded = all_rounded && storage::rounded_current(*m.who);
      if (!all_rounded) kernels::cast(ctx.device, masters_, own, slice_);
    }
    gathering_ = true;
    const void* const from = !rounded && level_ == zero_level::parameters ? static_cast<const void*>(masters_) : own;
    if (axes_.empty()) {  // this rank has all values; with zero_level::parameters, layers read a copy
      const auto bytes = static_cast<std::size_t>(slice_) * sizeof(weight_type);
      if (from != values_) ctx.device.copy(values_, from, bytes, ctx.device.main_stream());
      return;
    }
    gathers_->start_all_gather(from, values_, static_cast<std::size_t>(slice_), type).swap(gather_);
  }
  void finish_gather() {
    if (!gathering_) return;
    gather_.wait();
    gathering_ = false;
    set_current(true);
  }
  void gather(const context<Device>& ctx) override {
    start_gather(ctx);
    finish_gather();
  }
  void wait_for_transfers() override { finish_gather(); }
  /// Whether values have changed since the last gather, by an optimizer or in another way.
  bool stale() const {
    return std::any_of(members_.begin(), members_.end(), [](const member& m) {
      return m.who->state() == parameter_state::stale || m.who->state() == parameter_state::updated;
    });
  }
  /// Frees the memory of the values that layers read. Does something at `zero_level::parameters` only.
  void release() {
    if (level_ != zero_level::parameters) return;
    require_in_storage();
    finish_gather();
    set_current(false);
    whole_values_.reset();
    place_values(nullptr);
  }

  /// Begins the gradients of a step, which are empty. Waits for reductions that remain from a step that an exception
  /// ended.
  void begin_step(const context<Device>& ctx) {
    require_in_storage();
    reduction_.wait(), copying_.wait(), tying_.wait();
    if (sums_) sums_->abandon();
    copies_started_ = ties_started_ = false;
    sent_.reset();
    for (const member& m : members_) m.who->zero_gradient(ctx);
  }
  /// Drops the terms that passes have added, after an exception has ended the step.
  void abandon() {
    for (const member& m : members_) m.who->abandon_gradient();
  }
  /// Prepares memory for a pass that will add to the gradients.
  void need_gradients(const context<Device>& ctx) {
    if (!trainable_ || summed_) return;
    if (sums_ && level_ >= zero_level::gradients && !axes_.empty()) {  // the sums have their own memory
      if (!gradients_) make_reduced(ctx);
      return;
    }
    whole_gradients_ = make_collective_buffer<gradient_type>(ctx.device, static_cast<std::size_t>(total_));
    summed_ = whole_gradients_.template data<gradient_type>();
    if (!gradients_) make_reduced(ctx);
    for (std::size_t i = 0; i < arrays_.size(); ++i) arrays_[i]->use_gradients(summed_ + begins_[i]);
  }
  /// Starts the reduction; `finish_reduction` waits for it.
  void start_reduction(const context<Device>& ctx) {
    ctx.ranks.checks().note_reduction();
    need_gradients(ctx);
    for (const member& m : members_) require_used(*m.who);
    for (const member& m : members_) storage::begin_reduction(*m.who);
    if (sums_) return sums_->start(ctx);
    constexpr dtype type = dtype_of<gradient_type>;
    for (const reduced_range& r : rest_)
      r.comm->all_reduce(summed_ + r.begin, summed_ + r.begin, static_cast<std::size_t>(r.end - r.begin), type,
                         reduce_op::sum);
    if (!reductions_) return;
    if (wire_ != gradient_wire::full) {
      sent_ = make_collective_buffer<sent_type>(ctx.device, static_cast<std::size_t>(total_));
      kernels::cast(ctx.device, summed_, sent_.template data<sent_type>(), total_);
      start_sum(sent_.template data<sent_type>(), own_sent(), dtype_of<sent_type>);
    } else {
      start_sum(summed_, gradients_, type);
    }
  }
  /// Waits until this rank's gradients are summed over the ranks that shard them. If it keeps only a slice, it then
  /// frees the memory of all gradients.
  void finish_sum() {
    reduction_.wait();
    free_gradients();
  }
  /// In a hybrid, starts to sum the slice over the ranks with copies of it; `finish_reduction` waits. First it waits
  /// for the sum over the ranks that shard the gradients.
  void start_copies() {
    if (!copies_) return;
    finish_sum();
    const auto n = static_cast<std::size_t>(slice_);
    void* const at = sent_.empty() ? static_cast<void*>(gradients_) : own_sent();
    const dtype type = sent_.empty() ? dtype_of<gradient_type> : dtype_of<sent_type>;
    copies_->start_all_reduce(at, at, n, type, reduce_op::sum).swap(copying_);
    copies_started_ = true;
  }
  /// If other stages share the parameters, starts to sum the gradients over these stages; `finish_reduction` waits.
  /// First it waits for the sums over this stage's ranks.
  void start_ties(const context<Device>& ctx) {
    if (!tied()) return;
    finish_own(ctx);
    const auto n = static_cast<std::size_t>(axes_.empty() ? total_ : slice_);
    storage::stages_of(*members_[0].who)
        .start_all_reduce(gradients_, gradients_, n, dtype_of<gradient_type>, reduce_op::sum)
        .swap(tying_);
    ties_started_ = true;
  }
  /// Calls f(reduced gradient) for each parameter, in order.
  template <class F>
  void finish_reduction(const context<Device>& ctx, F&& f) {
    if (!tied())
      finish_own(ctx);
    else if (!std::exchange(ties_started_, false))
      fail({"parameter_bucket: start_ties is missing before finish_reduction of ", members_[0].who->name()});
    tying_.wait();
    for (const member& m : members_)
      if (m.who->trainable()) f(storage::complete(*m.who));
  }
  /// Lets operations in flight progress, for backends that must be polled.
  void progress() {
    if (gathering_ && gather_) static_cast<void>(gather_.done());
    if (reduction_) static_cast<void>(reduction_.done());
    if (copying_) static_cast<void>(copying_.done());
    if (tying_) static_cast<void>(tying_.done());
  }

 private:
  static constexpr bool rounded = !std::is_same_v<weight_type, master_type>;
  void require_in_storage() const {
    if (members_[0].who->storage() != this)
      fail({"training step: another one has been made for this model since, and parameter ", members_[0].who->name(),
            " lies where that one put it; use the newer"});
  }
  /// The type in which gradients travel if this is not their own type.
  using sent_type = std::conditional_t<std::is_same_v<gradient_type, bf16>, float, bf16>;

  /// Makes deterministic sums for all arrays.
  void take_terms(const context<Device>& ctx) {
    const reduction_axes& how = members_[0].how;
    axis_list joined = axes_.empty() ? how.shard : axis_list();
    for (const axis_id axis : how.replicate) joined.push_back(axis);
    sums_.emplace(axes_, ctx.ranks.shape().in_order(joined), slice_, rank_);
    copies_ = nullptr;  // the deterministic sums include these ranks
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      const member* first = nullptr;
      for (const member& m : members_) {
        if (m.who->array().get() != arrays_[i] || !m.who->trainable()) continue;
        if (first && !(first->how.rest == m.how.rest))
          require_any_order(
              ctx, "parameter " + m.who->name(),
              "parameters side by side that are reduced over different axes, as this one and " + first->who->name());
        first = &m;
      }
      if (first)
        sums_->add(ctx, arrays_[i]->terms(), arrays_[i]->size(), begins_[i], first->how.rest, first->who->name());
    }
  }

  parameter_bucket(std::vector<std::shared_ptr<array>> arrays, std::vector<member> members, zero_level level,
                   bucket_cut cut, gradient_wire wire, data_ranks& ranks)
      : level_(level), block_(cut.block()), wire_(wire), members_(std::move(members)) {
    // Arrays with reductions over other axes come first, so they are adjacent.
    const auto has_rest = [&](const std::shared_ptr<array>& a) {
      return std::any_of(members_.begin(), members_.end(),
                         [&](const member& m) { return m.who->array() == a && !m.how.rest.empty(); });
    };
    std::stable_partition(arrays.begin(), arrays.end(), [&](const auto& a) { return !has_rest(a); });
    for (const auto& a : arrays) {
      trainable_ = trainable_ || a->trainable();
      arrays_.push_back(a.get());
    }
    const reduction_axes& how = members_[0].how;
    if (level != zero_level::replicated) axes_ = how.shard;
    axis_list reduced = how.shard;
    if (axes_.empty()) {
      reduced = {};
      for (const axis_id axis : ranks.all())
        if (how.shard.find(axis) >= 0 || how.replicate.find(axis) >= 0) reduced.push_back(axis);
    } else if (!how.replicate.empty() && trainable_) {
      copies_ = &ranks.reductions(how.replicate);
    }
    if (!reduced.empty() && trainable_) reductions_ = &ranks.reductions(reduced);
    std::int64_t slices = 1;
    if (!axes_.empty()) {
      gathers_ = &ranks.gathers(axes_);
      group_ = *gathers_;
      rank_ = gathers_->rank();
      slices = gathers_->size();
    }
    std::int64_t elements = 0;
    for (const array* a : arrays_) elements += a->size();
    if (elements < slices)
      fail({"data parallelism: ", members_[0].who->name(), " and what is kept with it have ", elements,
            elements == 1 ? " element" : " elements", ", which cannot be cut over ", slices,
            " ranks; legal are zero_level::replicated, and fewer ranks along data_axes::shard"});
    bucket_placement at = detail::place_arrays(std::span<const member>(members_), arrays_, slices, block_,
                                               cut.is_whole() ? &ranks.loads(axes_, slices) : nullptr);
    begins_ = std::move(at.begins);
    slice_ = at.slice;
    cuts_at_ = cut.is_whole() ? 0 : block_;
    total_ = slice_ * slices;
  }

  /// The number of the array in which a parameter lies.
  std::size_t array_of(const parameter& p) const {
    for (std::size_t i = 0; i < arrays_.size(); ++i)
      if (arrays_[i] == p.array().get()) return i;
    fail({"parameter_bucket: ", p.name(), " lies in no array of it"});
  }
  /// Whether all ranks have equally many elements of a parameter.
  static bool is_even(const parameter& p, const mesh_shape& mesh) {
    std::int64_t whole = 1, parts = 1;
    for (const std::int64_t extent : p.info().shape) whole *= extent;
    for (const dim_placement& d : p.used().dims) parts *= mesh.size(d.axes);
    return p.most_used() * parts == whole;
  }
  void move_in(const context<Device>& ctx, const std::shared_ptr<parameter_bucket>& self) {
    const bool separate_masters = rounded || level_ == zero_level::parameters;
    if (separate_masters) {
      const auto n = static_cast<std::size_t>(slice_);
      own_masters_ = rounded ? make_optimizer_buffer<master_type>(ctx.device, n)
                             : make_collective_buffer<master_type>(ctx.device, n);
      masters_ = own_masters_.template data<master_type>();
    }
    if (rounded && level_ == zero_level::parameters) {
      own_rounded_ = make_collective_buffer<weight_type>(ctx.device, static_cast<std::size_t>(slice_));
      rounded_ = own_rounded_.template data<weight_type>();
    }
    if (level_ != zero_level::parameters) {
      make_values(ctx);
      if constexpr (rounded)
        rounded_ = values_ + rank_ * slice_;
      else
        masters_ = values_ + rank_ * slice_;
    }
    if (separate_masters)
      ctx.device.zero(masters_, own_masters_.bytes(), ctx.device.main_stream());  // padding is sent too
    move_members(ctx);
    if (ctx.deterministic) take_terms(ctx);
    for (array* a : arrays_) a->lend(self);
    if (values_) place_values(values_);
    set_current(false);
  }
  void move_members(const context<Device>& ctx) {
    std::vector<std::size_t> met(arrays_.size(), 0);
    std::vector<bool> even(arrays_.size(), true);
    for (const member& m : members_)
      if (!is_even(*m.who, ctx.ranks.shape())) even[array_of(*m.who)] = false;
    for (const member& m : members_) {
      const std::size_t i = array_of(*m.who);
      const std::int64_t at = begins_[i] + m.who->array_offset();
      storage::move(ctx, *m.who, *this, at);
      const std::size_t number = met[i]++;
      if (m.how.rest.empty() || !m.who->trainable()) continue;
      rest_.push_back({at, at + m.who->size(), &ctx.ranks.group(m.how.rest), i, number, even[i]});
    }
    join_neighbours(rest_, block_);
  }

  void make_values(const context<Device>& ctx) {
    whole_values_ = make_collective_buffer<weight_type>(ctx.device, static_cast<std::size_t>(total_));
    if (level_ != zero_level::parameters)
      ctx.device.zero(whole_values_.data(), whole_values_.bytes(), ctx.device.main_stream());
    values_ = whole_values_.template data<weight_type>();
  }
  /// Gives the arrays the address of their values; null: no memory.
  void place_values(weight_type* at) {
    values_ = at;
    for (std::size_t i = 0; i < arrays_.size(); ++i) arrays_[i]->use_values(at ? at + begins_[i] : nullptr);
  }
  void make_reduced(const context<Device>& ctx) {
    if (axes_.empty()) {
      gradients_ = summed_;
    } else if (level_ == zero_level::optimizer) {
      gradients_ = summed_ + rank_ * slice_;
    } else {
      own_gradients_ = make_collective_buffer<gradient_type>(ctx.device, static_cast<std::size_t>(slice_));
      gradients_ = own_gradients_.template data<gradient_type>();
    }
  }
  /// Starts to sum `all` over the data ranks: the whole of it in place, or this rank's slice into `own`.
  template <class E>
  void start_sum(E* all, E* own, dtype type) {
    if (axes_.empty())
      reductions_->start_all_reduce(all, all, static_cast<std::size_t>(total_), type, reduce_op::sum).swap(reduction_);
    else
      reductions_->start_reduce_scatter(all, own, static_cast<std::size_t>(slice_), type, reduce_op::sum)
          .swap(reduction_);
  }
  /// Whether other stages share these parameters, so gradients are summed over these stages.
  bool tied() const { return trainable_ && storage::stages_of(*members_[0].who); }
  /// Waits until this rank's gradients are summed over all ranks of its stage, and converts them to their own type.
  void finish_own(const context<Device>& ctx) {
    if (copies_ && !std::exchange(copies_started_, false))
      fail({"parameter_bucket: start_copies is missing before finish_reduction of ", members_[0].who->name()});
    finish_sum();
    copying_.wait();
    if (sums_) {
      sums_->finish(ctx, gradients_);
    } else if (!sent_.empty()) {
      kernels::cast(ctx.device, own_sent(), gradients_, axes_.empty() ? total_ : slice_);
      sent_.reset();
    }
  }
  /// Frees the memory of all gradients, if the rank keeps a slice of them.
  void free_gradients() {
    if (level_ < zero_level::gradients || axes_.empty()) return;
    summed_ = nullptr;
    whole_gradients_.reset();
    for (const auto& a : arrays_) a->use_gradients(nullptr);
  }
  /// This rank's gradients in the type in which they are sent and summed.
  sent_type* own_sent() { return sent_.template data<sent_type>() + (axes_.empty() ? 0 : rank_ * slice_); }
  void set_current(bool current) {
    for (const member& m : members_) storage::set_current(*m.who, current);
  }

  zero_level level_;
  std::int64_t block_;  ///< arrays and slices begin at its multiples
  gradient_wire wire_;
  std::vector<member> members_;
  std::vector<array*> arrays_;        ///< these keep the bucket alive
  std::vector<std::int64_t> begins_;  ///< of the arrays
  std::int64_t total_ = 0;
  bool trainable_ = false, gathering_ = false, copies_started_ = false, ties_started_ = false;
  any_communicator* gathers_ = nullptr;
  any_communicator* reductions_ = nullptr;  ///< null: no reduction over data axes
  any_communicator* copies_ = nullptr;      ///< of slices, in a hybrid
  std::vector<reduced_range> rest_;
  buffer<Device> whole_values_, whole_gradients_, own_masters_, own_rounded_, own_gradients_;
  buffer<Device> sent_;  ///< gradients in the type of sending, if this is not their own
  weight_type* values_ = nullptr;
  gradient_type* summed_ = nullptr;
  request gather_, reduction_, copying_, tying_;
  std::optional<deterministic_bucket<Precision, Device>> sums_;  ///< replaces reductions
};

PLAIT_COMPILED_TEMPLATE(class parameter_bucket<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class parameter_bucket<double, cpu>)
PLAIT_COMPILED_TEMPLATE(class parameter_bucket<bf16, cpu>)

}  // namespace plait

#include "plait/core/macros_on.hpp"
