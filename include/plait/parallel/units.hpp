// The parameters of a rank's stages, divided into units that a step gathers, reduces and updates one by one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/parallel/bucket.hpp"
#include "plait/tensor/check_values.hpp"

namespace plait {

/// The units of a rank. Parameters with equal reductions are together in a bucket. Exceptions stay outside of buckets:
/// parameters in the caller's memory, and those whose strategy stores them in another layout than that of use. These
/// are gathered and reduced individually, which only `zero_level::replicated` allows.
template <class Precision, compute_device Device>
class parameter_units {
 public:
  using parameter = plait::parameter<Precision, Device>;
  using bucket = parameter_bucket<Precision, Device>;
  using gradients = std::vector<reduced_gradient<Precision, Device>>;

  /// `axes` are the axes, in the mesh of a stage, over which data is distributed.
  parameter_units(const context<Device>& ctx, zero_level level, const data_axes& axes,
                  bucket_cut cut = bucket_cut::even, gradient_wire wire = gradient_wire::full);
  ~parameter_units();
  parameter_units(const parameter_units&) = delete;
  parameter_units& operator=(const parameter_units&) = delete;

  /// Adds the next unit, whose parameters `visit(f)` visits. Parameters of earlier units are shared with them.
  /// Collective over the data axes: it makes buckets and moves the parameters' values there. Throws if two parameters
  /// share the caller's memory.
  template <class Visit>
  void add(const context<Device>& ctx, int stage, Visit&& visit) {
    std::vector<parameter*> all;
    visit([&](parameter& p) { all.push_back(&p); });
    add_unit(ctx, stage, all);
  }

  int size() const { return static_cast<int>(units_.size()); }
  const step_unit& described(int unit) const { return at(unit).described; }
  /// Returns the common beginning of the names of a unit's parameters, such as "model.layers.0", or else one of the
  /// names.
  std::string name(int unit) const;
  /// Whether another rank shares one of the unit's parameters.
  bool tied(int unit) const { return at(unit).tied; }

  /// Begins a step: gradients are empty, and gathers of values that have changed are started. Throws if a reduction of
  /// the last step was not finished.
  void begin_step(const context<Device>& ctx);
  /// Begins passes without gradients, as `begin_step` begins a step.
  void begin_forward(const context<Device>& ctx);
  /// Starts the gathers of values that have changed since the last gather.
  void gather_changed(const context<Device>& ctx);
  void gather(const context<Device>& ctx, int unit);
  void release(int unit);
  /// Begins the use of a unit in a pass. `adds`: the pass adds to its gradients.
  void enter(const context<Device>& ctx, int unit, bool adds);
  /// Starts the reduction of a unit's gradients; no pass may add to them afterwards. Throws, with the parameter's name,
  /// if no pass has used a parameter, and if the reduction was already started.
  void reduce(const context<Device>& ctx, int unit);
  /// In a hybrid, starts the second part of a unit's reduction, over the ranks that hold copies of its pieces.
  void reduce_copies(int unit);
  /// If other stages share a unit's parameters, starts the last part of its reduction: the sum over these stages.
  void reduce_ties(const context<Device>& ctx, int unit);
  /// Whether reductions have a second part, because several ranks hold the same pieces.
  bool hybrid() const { return level_ != zero_level::replicated && !ranks_.replicate().empty(); }
  /// Waits until a unit's gradients are summed. If pieces are kept, it then frees the memory of whole gradients.
  void finish_sum(int unit);
  /// Waits for the reduction of a unit, and appends its reduced gradients to `out`. Throws if the reduction was not
  /// started.
  void finish_reduction(const context<Device>& ctx, int unit, gradients& out);
  /// Drops the reductions of a step that an exception has ended, so that another step can begin.
  void abandon_step();
  /// Makes later steps never query whether an operation is complete, because a recording cannot query it.
  void stop_polling() { polls_ = false; }
  /// Waits until all operations in flight are complete.
  void wait_for_transfers();

 private:
  void add_unit(const context<Device>& ctx, int stage, const std::vector<parameter*>& all);

  struct kept_unit {
    step_unit described;
    std::vector<std::shared_ptr<bucket>> buckets;
    std::vector<parameter*> alone;
    bool tied = false, reducing = false;
  };

  [[noreturn]] void refuse(const char* what, int unit, const char* why) const {
    fail({"data parallelism: ", what, " of unit ", unit, ", ", name(unit), ", ", why});
  }

  static const char* name_of(zero_level level) {
    constexpr const char* names[] = {"zero_level::replicated", "zero_level::optimizer", "zero_level::gradients",
                                     "zero_level::parameters"};
    return names[static_cast<std::size_t>(level)];
  }
  kept_unit& at(int i) { return units_[static_cast<std::size_t>(i)]; }
  const kept_unit& at(int i) const { return units_[static_cast<std::size_t>(i)]; }

  /// Polls operations in flight, because backends such as MPI progress only when they are polled.
  void progress() {
    if (!polls_) return;
    for (kept_unit& u : units_)
      for (const auto& b : u.buckets) b->progress();
  }

  /// Puts arrays whose members have equal reductions over data axes into buckets.
  void make_buckets(const context<Device>& ctx, kept_unit& u, const std::vector<parameter*>& own);
  /// Returns the reason why a parameter cannot lie in a bucket, or "".
  std::string reason_outside_bucket(const parameter& p, const reduction_axes& how,
                                    const std::vector<parameter*>& own) const {
    const auto& array = *p.array();
    if (!p.gather_plan().trivial()) return " is stored as " + describe(p.stored()) + ", by its strategy's `stored`";
    if (array.callers_values() || array.callers_gradients()) return " lies in the caller's memory";
    for (const parameter* other : own)
      if (other->array() == p.array())
        if (const reduction_axes theirs = reduction_of(other->used(), ranks_);
            !(theirs.shard == how.shard) || !(theirs.replicate == how.replicate) ||
            other->info().tied_across_stages != p.info().tied_across_stages)
          return cat({" shares an array with ", other->name(), ", which is reduced over other axes"});
    return {};
  }

  zero_level level_;
  bucket_cut cut_;
  gradient_wire wire_;
  data_ranks ranks_;
  std::vector<kept_unit> units_;
  std::map<const parameter*, int> owner_;
  detail::memory_users users_;
  bool polls_ = true;
};

template <class Precision, compute_device Device>
parameter_units<Precision, Device>::parameter_units(const context<Device>& ctx, zero_level level, const data_axes& axes,
                                                    bucket_cut cut, gradient_wire wire)
    : level_(level), cut_(cut), wire_(wire), ranks_(ctx.ranks, axes) {
  constexpr dtype type = dtype_of<gradient_of<Precision>>;
  if ((wire == gradient_wire::bf16 && type != dtype::f32) || (wire == gradient_wire::f32 && type != dtype::bf16))
    fail({"data parallelism: gradient_wire::", plait::name_of(wire), " is for gradients in ",
          wire == gradient_wire::bf16 ? "float" : "bf16", ", and here they are in ", plait::name_of(type), "; legal ",
          type == dtype::f64   ? "is full"
          : type == dtype::f32 ? "are full and bf16"
                               : "are full and f32"});
  if (wire != gradient_wire::full)
    require_any_order(ctx, "data parallelism",
                      cat({"gradient_wire::", plait::name_of(wire), ", which rounds gradients; legal is full"}));
  if (level == zero_level::replicated && cut != bucket_cut::even)
    fail({"data parallelism: ", cut.is_whole() ? "bucket_cut::whole" : "bucket_cut::blocks",
          " cuts nothing at zero_level::replicated; legal is even"});
  if (level != zero_level::replicated && ranks_.shard().empty())
    fail({"data parallelism: ", name_of(level), " shards over the axes of data_axes::shard, along which this mesh has ",
          "one rank, so it would save nothing; use zero_level::replicated"});
}

template <class Precision, compute_device Device>
void parameter_units<Precision, Device>::add_unit(const context<Device>& ctx, int stage,
                                                  const std::vector<parameter*>& all) {
  const int number = size();
  kept_unit& u = units_.emplace_back();
  u.described.stage = stage;
  u.described.trainable = false;
  std::vector<parameter*> own;
  for (parameter* p : all) {
    const auto [at, mine] = owner_.try_emplace(p, number);
    if (mine) {
      own.push_back(p);
    } else if (at->second != number) {
      if (u.described.uses >= 0 && u.described.uses != at->second)
        fail({"data parallelism: a unit uses parameters of two others, of which ", p->name(),
              " is one; a unit may share parameters with one other"});
      u.described.uses = at->second;
    }
  }
  for (const parameter* p : own) {
    users_.add(*p, true);
    u.described.parameters += p->used_size();
    u.described.trainable = u.described.trainable || p->trainable();
    u.tied = u.tied || p->info().tied_across_stages;
  }
  make_buckets(ctx, u, own);
}

template <class Precision, compute_device Device>
std::string parameter_units<Precision, Device>::name(int unit) const {
  std::string first, common;
  for (const auto& [p, of] : owner_) {
    if (of != unit) continue;
    const std::string& name = p->name();
    if (first.empty()) common = name;
    if (first.empty() || name < first) first = name;
    std::size_t same = 0;
    while (same < std::min(common.size(), name.size()) && common[same] == name[same]) ++same;
    common.resize(same);
  }
  const std::size_t dot = common == first ? std::string::npos : common.rfind('.');
  return common == first || dot == std::string::npos ? first : common.substr(0, dot);
}

template <class Precision, compute_device Device>
void parameter_units<Precision, Device>::begin_step(const context<Device>& ctx) {
  for (int i = 0; i < size(); ++i)
    if (at(i).reducing) refuse("begin_step", i, "whose reduction is under way: call finish_reduction before");
  detail::begin_checked_step(ctx);
  for (kept_unit& u : units_) {
    for (const auto& b : u.buckets) {
      if (level_ == zero_level::parameters) b->release();
      b->begin_step(ctx);
    }
    for (parameter* p : u.alone) {
      p->gather(ctx);
      p->zero_gradient(ctx);
    }
  }
  gather_changed(ctx);
}

template <class Precision, compute_device Device>
void parameter_units<Precision, Device>::begin_forward(const context<Device>& ctx) {
  for (kept_unit& u : units_) {
    for (const auto& b : u.buckets)
      if (level_ == zero_level::parameters) b->release();
    for (parameter* p : u.alone) p->gather(ctx);
  }
  gather_changed(ctx);
}

template <class Precision, compute_device Device>
void parameter_units<Precision, Device>::gather_changed(const context<Device>& ctx) {
  if (level_ == zero_level::parameters) return;  // these are gathered at each use
  for (kept_unit& u : units_)
    for (const auto& b : u.buckets) b->start_gather(ctx);
}

template <class Precision, compute_device Device>
void parameter_units<Precision, Device>::gather(const context<Device>& ctx, int unit) {
  for (const auto& b : at(unit).buckets) b->start_gather(ctx);
  for (parameter* p : at(unit).alone) p->gather(ctx);
}

template <class Precision, compute_device Device>
void parameter_units<Precision, Device>::release(int unit) {
  for (const auto& b : at(unit).buckets) b->release();
}

template <class Precision, compute_device Device>
void parameter_units<Precision, Device>::enter(const context<Device>& ctx, int unit, bool adds) {
  for (const int used : used_units{{unit, at(unit).described.uses}})
    for (const auto& b : at(used).buckets) {
      b->finish_gather();
      if (adds) b->need_gradients(ctx);
    }
  progress();
}

template <class Precision, compute_device Device>
void parameter_units<Precision, Device>::reduce(const context<Device>& ctx, int unit) {
  if (at(unit).reducing) refuse("reduce", unit, "whose reduction is under way already");
  for (const auto& b : at(unit).buckets)
    if (b->trainable()) b->start_reduction(ctx);
  for (const parameter* p : at(unit).alone) require_used(*p);
  at(unit).reducing = true;
}

template <class Precision, compute_device Device>
void parameter_units<Precision, Device>::reduce_copies(int unit) {
  for (const auto& b : at(unit).buckets)
    if (b->trainable()) b->start_copies();
}

template <class Precision, compute_device Device>
void parameter_units<Precision, Device>::reduce_ties(const context<Device>& ctx, int unit) {
  for (const auto& b : at(unit).buckets) b->start_ties(ctx);
  for (parameter* p : at(unit).alone)
    if (p->trainable() && p->stages()) p->start_reduction(ctx);
}

template <class Precision, compute_device Device>
void parameter_units<Precision, Device>::finish_sum(int unit) {
  for (const auto& b : at(unit).buckets)
    if (b->trainable()) b->finish_sum();
}

template <class Precision, compute_device Device>
void parameter_units<Precision, Device>::finish_reduction(const context<Device>& ctx, int unit, gradients& out) {
  if (!std::exchange(at(unit).reducing, false)) refuse("finish_reduction", unit, "without reduce before it");
  for (const auto& b : at(unit).buckets)
    if (b->trainable()) b->finish_reduction(ctx, [&](auto g) { out.push_back(std::move(g)); });
  for (parameter* p : at(unit).alone)
    if (p->trainable()) out.push_back(p->stages() ? p->finish_reduction() : p->reduce(ctx));
}

template <class Precision, compute_device Device>
void parameter_units<Precision, Device>::abandon_step() {
  for (kept_unit& u : units_) {
    u.reducing = false;
    for (const auto& b : u.buckets) b->abandon();
    for (parameter* p : u.alone) p->abandon_gradient();
  }
}

template <class Precision, compute_device Device>
void parameter_units<Precision, Device>::wait_for_transfers() {
  for (kept_unit& u : units_)
    for (const auto& b : u.buckets) b->finish_gather();
}

template <class Precision, compute_device Device>
void parameter_units<Precision, Device>::make_buckets(const context<Device>& ctx, kept_unit& u,
                                                      const std::vector<parameter*>& own) {
  struct group {
    reduction_axes how;
    bool tied, trainable;
    std::vector<std::shared_ptr<parameter_array<Precision, Device>>> arrays;
    std::vector<typename bucket::member> members;
  };
  std::vector<group> groups;
  for (parameter* p : own) {
    const reduction_axes how = reduction_of(p->used(), ranks_);
    const bool complete = how.shard.empty() && how.replicate.empty();
    if (complete || (!p->array()->trainable() && level_ != zero_level::parameters)) {  // a bucket would have no work
                                                                                       // for it
      u.alone.push_back(p);
      continue;
    }
    if (const std::string why = reason_outside_bucket(*p, how, own); !why.empty()) {
      if (level_ != zero_level::replicated && !how.shard.empty())
        fail({"data parallelism: ", name_of(level_), " cuts what lies as it is used, and the parameter ", p->name(),
              why, "; use zero_level::replicated"});
      if (wire_ != gradient_wire::full && p->trainable())
        fail({"data parallelism: gradient_wire::", plait::name_of(wire_),
              " is for gradients that are reduced side by side, and the parameter ", p->name(), why,
              "; use gradient_wire::full"});
      u.alone.push_back(p);
      continue;
    }
    const bool tied = p->info().tied_across_stages;
    auto g = std::find_if(groups.begin(), groups.end(), [&](const group& other) {
      return other.how.shard == how.shard && other.how.replicate == how.replicate && other.tied == tied &&
             other.trainable == p->array()->trainable();
    });
    if (g == groups.end()) g = groups.insert(groups.end(), {how, tied, p->array()->trainable(), {}, {}});
    if (std::find(g->arrays.begin(), g->arrays.end(), p->array()) == g->arrays.end()) g->arrays.push_back(p->array());
    g->members.push_back({p, how});
  }
  for (group& g : groups)
    u.buckets.push_back(bucket::make(ctx, std::move(g.arrays), std::move(g.members), level_, cut_, wire_, ranks_));
}

template <class Precision, compute_device Device>
parameter_units<Precision, Device>::~parameter_units() = default;

PLAIT_COMPILED_TEMPLATE(class parameter_units<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class parameter_units<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class parameter_units<double, cpu>)

}  // namespace plait

#include "plait/core/macros_on.hpp"
