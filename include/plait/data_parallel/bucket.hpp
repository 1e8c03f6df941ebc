// Parameters laid side by side in one flat array, which is gathered, reduced and cut evenly over data-parallel ranks,
// in place. When, is the step's business: schedule/step/step_schedule.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/request.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/data_parallel/canonical_bucket.hpp"
#include "plait/data_parallel/place_arrays.hpp"
#include "plait/data_parallel/placement.hpp"
#include "plait/data_parallel/ranks.hpp"
#include "plait/data_parallel/reduction.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/schedule/step/step_schedule.hpp"

namespace plait {

/// The arrays of a unit's parameters that are reduced alike, one after the other in one array of `zero_level`'s making
/// (buckets as in Megatron-LLaMA and PyTorch's FSDP: each cut evenly over the ranks, whatever the shapes in it):
///
///     level         values             gradients           master values and optimizer state
///     replicated    all                all                 all
///     optimizer     all                all                 a piece
///     gradients     all                all while summed,   a piece
///                                      then a piece
///     parameters    all while used,    likewise            a piece
///                   else a piece
template <class Precision, compute_device Device>
class parameter_bucket final : public parameter_home<Precision, Device> {
  using home = parameter_home<Precision, Device>;
  using home::axes_, home::group_, home::piece_, home::rank_, home::cuts_at_, home::masters_, home::rounded_,
      home::gradients_;

 public:
  using parameter = plait::parameter<Precision, Device>;
  using array = parameter_array<Precision, Device>;
  using weight_type = weight_of<Precision>;
  using gradient_type = gradient_of<Precision>;
  using master_type = master_of<Precision>;

  /// One parameter, and how its gradient is reduced.
  struct member {
    parameter* who;
    reduction_axes how;
  };

  /// Moves `members`, which lie in `arrays` and differ in `how.rest` at most, from where they are into a bucket, values
  /// included. Collective over the axes.
  static std::shared_ptr<parameter_bucket> make(const context<Device>& ctx, std::vector<std::shared_ptr<array>> arrays,
                                                std::vector<member> members, zero_level level, bucket_cut cut,
                                                gradient_wire wire, data_ranks& ranks) {
    std::shared_ptr<parameter_bucket> bucket(
        new parameter_bucket(std::move(arrays), std::move(members), level, cut, wire, ranks));
    bucket->move_in(ctx, bucket);
    return bucket;
  }

  std::int64_t elements() const { return total_; }
  bool trainable() const { return trainable_; }

  /// Starts to bring the values to where layers read them; `finish_gather` waits. Nothing where they are there.
  void start_gather(const context<Device>& ctx) {
    if (gathering_ || !stale()) return;
    require_home();
    constexpr dtype type = dtype_of<weight_type>;
    if (!values_) {
      make_values(ctx);
      place_values(values_);
    }
    weight_type* const slot = values_ + rank_ * piece_;
    weight_type* const own = level_ == zero_level::parameters && rounded ? rounded_ : slot;
    if constexpr (rounded) {
      bool all_rounded = true;
      for (const member& m : members_) all_rounded = all_rounded && home::rounded_current(*m.who);
      if (!all_rounded) kernels::cast(ctx.device, masters_, own, piece_);
    }
    gathering_ = true;
    const void* const from = !rounded && level_ == zero_level::parameters ? static_cast<const void*>(masters_) : own;
    if (axes_.empty()) {  // all of it is here, and with zero_level::parameters elsewhere than where layers read
      const auto bytes = static_cast<std::size_t>(piece_) * sizeof(weight_type);
      if (from != values_) ctx.device.copy(values_, from, bytes, ctx.device.main_stream());
      return;
    }
    gathers_->start_all_gather(from, values_, static_cast<std::size_t>(piece_), type).swap(gather_);
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
  void settle() override { finish_gather(); }
  /// Whether somebody has changed values since the last gather, or an optimizer has.
  bool stale() const {
    return std::any_of(members_.begin(), members_.end(), [](const member& m) {
      return m.who->state() == parameter_state::stale || m.who->state() == parameter_state::updated;
    });
  }
  /// Gives back the memory of the values that layers read. Only `zero_level::parameters` does without.
  void release() {
    if (level_ != zero_level::parameters) return;
    require_home();
    finish_gather();
    set_current(false);
    whole_values_.reset();
    place_values(nullptr);
  }

  /// The gradients of a step begin: nothing was added yet. Waits for reductions of a step that an exception has ended.
  void begin_step(const context<Device>& ctx) {
    require_home();
    reduction_.wait(), copying_.wait(), tying_.wait(), terms_.abandon();
    copies_started_ = ties_started_ = false;
    sent_.reset();
    for (const member& m : members_) m.who->zero_gradient(ctx);
  }
  /// Gives up what passes have added, since an exception has ended the step.
  void abandon() {
    for (const member& m : members_) m.who->abandon_gradient();
  }
  /// A pass is about to add to the gradients.
  void need_gradients(const context<Device>& ctx) {
    if (!trainable_ || summed_) return;
    if (canonical_ && level_ >= zero_level::gradients &&
        !axes_.empty()) {  // the sums of arrays have memory of their own
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
    for (const member& m : members_) home::begin_reduction(*m.who);
    if (canonical_) return terms_.start(ctx);
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
  /// Waits until this rank's gradients are summed over the ranks that share them out. Where it keeps a piece alone, the
  /// memory of all gradients is free then.
  void finish_sum() {
    reduction_.wait();
    if (!canonical_) free_gradients();
  }
  /// In a hybrid, starts to sum the piece over the ranks that hold the same one; `finish_reduction` waits. Before that
  /// it waits for the sum over those that share the gradients out.
  void start_copies() {
    if (!copies_ || canonical_) return;
    finish_sum();
    const auto n = static_cast<std::size_t>(piece_);
    void* const at = sent_.empty() ? static_cast<void*>(gradients_) : own_sent();
    const dtype type = sent_.empty() ? dtype_of<gradient_type> : dtype_of<sent_type>;
    copies_->start_all_reduce(at, at, n, type, reduce_op::sum).swap(copying_);
    copies_started_ = true;
  }
  /// Where other stages have the parameters too, starts to sum the gradients over those; `finish_reduction` waits.
  /// Before that it waits for the sums over this stage's ranks.
  void start_ties(const context<Device>& ctx) {
    if (!tied()) return;
    finish_own(ctx);
    const auto n = static_cast<std::size_t>(axes_.empty() ? total_ : piece_);
    home::stages_of(*members_[0].who)
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
      if (m.who->trainable()) f(home::complete(*m.who));
  }
  /// Lets what is under way go on, where a backend needs to be asked.
  void progress() {
    if (gathering_ && gather_) static_cast<void>(gather_.done());
    if (reduction_) static_cast<void>(reduction_.done());
    if (copying_) static_cast<void>(copying_.done());
    if (tying_) static_cast<void>(tying_.done());
  }

 private:
  static constexpr bool rounded = !std::is_same_v<weight_type, master_type>;
  void require_home() const {
    if (members_[0].who->home() != this)
      fail({"training step: another one has been made for this model since, and parameter ", members_[0].who->name(),
            " lies where that one put it; use the newer"});
  }
  /// The type in which gradients travel that do not in their own.
  using sent_type = std::conditional_t<std::is_same_v<gradient_type, bf16>, float, bf16>;

  /// Takes the canonical sums of all arrays.
  void take_terms(const context<Device>& ctx) {
    const reduction_axes& how = members_[0].how;
    axis_list joined = axes_.empty() ? how.shard : axis_list();
    for (const axis_id axis : how.replicate) joined.push_back(axis);
    terms_ = {{axes_, ctx.ranks.shape().in_order(joined)}, piece_, rank_};
    terms_.add(ctx, std::span<const member>(members_), arrays_, begins_);
  }

  parameter_bucket(std::vector<std::shared_ptr<array>> arrays, std::vector<member> members, zero_level level,
                   bucket_cut cut, gradient_wire wire, data_ranks& ranks)
      : level_(level), block_(cut.block()), wire_(wire), members_(std::move(members)) {
    // Those that are reduced over other axes first lie next to each other.
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
    std::int64_t pieces = 1;
    if (!axes_.empty()) {
      gathers_ = &ranks.gathers(axes_);
      group_ = *gathers_;
      rank_ = gathers_->rank();
      pieces = gathers_->size();
    }
    std::int64_t elements = 0;
    for (const array* a : arrays_) elements += a->size();
    if (elements < pieces)
      fail({"data parallelism: ", members_[0].who->name(), " and what is kept with it have ", elements,
            elements == 1 ? " element" : " elements", ", which cannot be cut over ", pieces,
            " ranks; legal are zero_level::replicated, and fewer ranks along data_axes::shard"});
    bucket_placement at = detail::place_arrays(std::span<const member>(members_), arrays_, pieces, block_,
                                               cut.is_whole() ? &ranks.loads(axes_, pieces) : nullptr);
    begins_ = std::move(at.begins);
    piece_ = at.piece;
    cuts_at_ = cut.is_whole() ? 0 : block_;
    total_ = piece_ * pieces;
  }

  std::int64_t begin_of(const parameter& p) const {
    for (std::size_t i = 0; i < arrays_.size(); ++i)
      if (arrays_[i] == p.array().get()) return begins_[i] + p.array_offset();
    fail({"parameter_bucket: ", p.name(), " lies in no array of it"});
  }
  void move_in(const context<Device>& ctx, const std::shared_ptr<parameter_bucket>& self) {
    const bool apart = rounded || level_ == zero_level::parameters;
    if (apart) {
      const auto n = static_cast<std::size_t>(piece_);
      own_masters_ = rounded ? make_optimizer_buffer<master_type>(ctx.device, n)
                             : make_collective_buffer<master_type>(ctx.device, n);
      masters_ = own_masters_.template data<master_type>();
    }
    if (rounded && level_ == zero_level::parameters) {
      own_rounded_ = make_collective_buffer<weight_type>(ctx.device, static_cast<std::size_t>(piece_));
      rounded_ = own_rounded_.template data<weight_type>();
    }
    if (level_ != zero_level::parameters) {
      make_values(ctx);
      if constexpr (rounded)
        rounded_ = values_ + rank_ * piece_;
      else
        masters_ = values_ + rank_ * piece_;
    }
    if (apart) ctx.device.zero(masters_, own_masters_.bytes(), ctx.device.main_stream());  // padding is sent too
    for (const member& m : members_) {
      const std::int64_t at = begin_of(*m.who);
      home::move(ctx, *m.who, *this, at);
      if (m.how.rest.empty() || !m.who->trainable()) continue;
      rest_.push_back({at, at + m.who->size(), &ctx.ranks.group(m.how.rest)});
    }
    join_neighbours(rest_, block_);
    if ((canonical_ = ctx.numerics.canonical())) take_terms(ctx);
    for (array* a : arrays_) a->lend(self);
    if (values_) place_values(values_);
    set_current(false);
  }

  void make_values(const context<Device>& ctx) {
    whole_values_ = make_collective_buffer<weight_type>(ctx.device, static_cast<std::size_t>(total_));
    if (level_ != zero_level::parameters)
      ctx.device.zero(whole_values_.data(), whole_values_.bytes(), ctx.device.main_stream());
    values_ = whole_values_.template data<weight_type>();
  }
  /// Tells the arrays where their values are; null: nowhere.
  void place_values(weight_type* at) {
    values_ = at;
    for (std::size_t i = 0; i < arrays_.size(); ++i) arrays_[i]->use_values(at ? at + begins_[i] : nullptr);
  }
  void make_reduced(const context<Device>& ctx) {
    if (axes_.empty()) {
      gradients_ = summed_;
    } else if (level_ == zero_level::optimizer) {
      gradients_ = summed_ + rank_ * piece_;
    } else {
      own_gradients_ = make_collective_buffer<gradient_type>(ctx.device, static_cast<std::size_t>(piece_));
      gradients_ = own_gradients_.template data<gradient_type>();
    }
  }
  /// Starts to sum `all` over the data ranks: all of it in place, or this rank's piece into `own`.
  template <class E>
  void start_sum(E* all, E* own, dtype type) {
    if (axes_.empty())
      reductions_->start_all_reduce(all, all, static_cast<std::size_t>(total_), type, reduce_op::sum).swap(reduction_);
    else
      reductions_->start_reduce_scatter(all, own, static_cast<std::size_t>(piece_), type, reduce_op::sum)
          .swap(reduction_);
  }
  /// Whether other stages have these parameters too, and sum their gradients with this one's.
  bool tied() const { return trainable_ && home::stages_of(*members_[0].who); }
  /// Waits until this rank's gradients are summed over all ranks of its stage, in their own type.
  void finish_own(const context<Device>& ctx) {
    if (copies_ && !canonical_ && !std::exchange(copies_started_, false))
      fail({"parameter_bucket: start_copies is missing before finish_reduction of ", members_[0].who->name()});
    finish_sum();
    copying_.wait();
    if (canonical_) {
      terms_.finish(ctx, gradients_);
      free_gradients();
    } else if (!sent_.empty()) {
      kernels::cast(ctx.device, own_sent(), gradients_, axes_.empty() ? total_ : piece_);
      sent_.reset();
    }
  }
  /// Gives back the memory of all gradients where a piece of them is kept.
  void free_gradients() {
    if (level_ < zero_level::gradients || axes_.empty()) return;
    summed_ = nullptr;
    whole_gradients_.reset();
    for (const auto& a : arrays_) a->use_gradients(nullptr);
  }
  /// Where this rank's gradients are summed as they are sent.
  sent_type* own_sent() { return sent_.template data<sent_type>() + (axes_.empty() ? 0 : rank_ * piece_); }
  void set_current(bool current) {
    for (const member& m : members_) home::set_current(*m.who, current);
  }

  zero_level level_;
  std::int64_t block_;  ///< at multiples of which arrays and pieces begin
  gradient_wire wire_;
  std::vector<member> members_;
  std::vector<array*> arrays_;        ///< which keep the bucket alive
  std::vector<std::int64_t> begins_;  ///< of the arrays
  std::int64_t total_ = 0;
  bool trainable_ = false, gathering_ = false, copies_started_ = false, ties_started_ = false;
  any_communicator* gathers_ = nullptr;
  any_communicator* reductions_ = nullptr;  ///< null: nothing to reduce over data axes
  any_communicator* copies_ = nullptr;      ///< of pieces, in a hybrid
  std::vector<reduced_range> rest_;
  buffer<Device> whole_values_, whole_gradients_, own_masters_, own_rounded_, own_gradients_;
  buffer<Device> sent_;  ///< gradients as they travel, where that is not their own type
  weight_type* values_ = nullptr;
  gradient_type* summed_ = nullptr;
  request gather_, reduction_, copying_, tying_;
  canonical_bucket<Precision, Device> terms_;  ///< under canonical numerics
  bool canonical_ = false;
};

PLAIT_COMPILED_TEMPLATE(class parameter_bucket<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class parameter_bucket<double, cpu>)
PLAIT_COMPILED_TEMPLATE(class parameter_bucket<bf16, cpu>)

}  // namespace plait

#include "plait/core/macros_on.hpp"
