// A microbatch on its way through layers: recomputation, deferred weight gradients, and the context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/box.hpp"
#include "plait/core/recompute.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

/// Observer of a pass through the layers: `enter` gets the unit of a stage's parameters that it uses from then on.
class unit_watcher {
 public:
  virtual void enter(int unit) = 0;

 protected:
  ~unit_watcher() = default;
};

/// Deferred weight gradients, in order. Pipeline schedules run them where a rank would be idle.
class weight_work {
 public:
  weight_work() = default;
  template <class F>
  void add(F&& work) {
    tasks_.push_back(std::make_unique<holder<std::decay_t<F>>>(std::forward<F>(work)));
  }
  std::size_t size() const { return tasks_.size(); }
  /// Tasks that are added from here on are of another unit of parameters.
  void enter(int unit) {
    if (units_.empty() || units_.back().unit != unit) units_.push_back({unit, tasks_.size()});
  }
  /// Runs and forgets the tasks. `watcher`, where it is not null, gets the unit of the tasks that follow.
  void run(unit_watcher* watcher = nullptr) {
    std::size_t next = 0;
    for (std::size_t i = 0; i <= tasks_.size(); ++i) {
      for (; next < units_.size() && units_[next].begin == i; ++next)
        if (watcher) watcher->enter(units_[next].unit);
      if (i == tasks_.size()) break;
      tasks_[i]->run();
      tasks_[i].reset();
    }
    tasks_.clear();
    units_.clear();
  }

 private:
  struct task {
    virtual ~task() = default;
    virtual void run() = 0;
  };
  template <class F>
  struct holder final : task {
    explicit holder(F f) : work(std::move(f)) {}
    void run() override { work(); }
    F work;
  };
  struct unit_begin {
    int unit;
    std::size_t begin;  ///< of its tasks
  };
  std::vector<std::unique_ptr<task>> tasks_;
  std::vector<unit_begin> units_;
};

/// Returns the index in a step of the first sample that a rank has in microbatch `index` of `count`. The rank has
/// `local` of the microbatch's `global` samples, from `offset` on. Microbatches follow each other in a step. With
/// deterministic sums the samples of a rank follow each other. So a rank has one part of a sum over samples for any
/// number of microbatches.
constexpr std::int64_t first_sample_in_step(const deterministic_leaves& leaves, std::int64_t index, std::int64_t count,
                                            std::int64_t global, std::int64_t offset, std::int64_t local) {
  return leaves ? offset * count + index * local : index * global + offset;
}

/// The auxiliary losses of a step on one rank: a term of a sum over all ranks. Layers add to it in forward passes.
struct auxiliary_sum {
  double* value = nullptr;  ///< one number in the device's memory
  bool used = false;        ///< whether a layer has added to it
};

/// One microbatch on its way through the layers: the context, and what differs from one microbatch to the next. Every
/// layer hands it on to the layers it is made of. A context converts to a microbatch of its own, so that a layer that
/// is used alone takes a context.
template <compute_device Device>
struct microbatch {
  microbatch(const context<Device>& where) : ctx(where) {}  // NOLINT: the conversion is the purpose

  const context<Device>& ctx;
  /// Global index of its first sample, over all steps: with it, dropout differs from sample to sample, but not from
  /// mesh to mesh.
  std::int64_t first_sample = 0;
  /// Which microbatch of its step it is, and of how many: deterministic sums over samples go by it.
  std::int64_t index = 0, count = 1;
  /// Whether dropout drops elements: true in training. `pipeline::evaluate` and all code that makes scores set it to
  /// false. A program that evaluates layers itself must do so too.
  bool drops = true;
  /// For sequences packed from documents: the position of the first token of each token's document, in the device's
  /// memory, one for each of this rank's tokens; null: none. Must not decrease along the text.
  const std::int32_t* document_starts = nullptr;
  /// Where `backward` puts weight gradients; null: it computes them at once.
  weight_work* deferred = nullptr;
  /// How much a forward pass keeps.
  recompute policy = recompute::none;
  /// Of each block, for a stack whose blocks differ in that; empty: all by `policy`.
  std::span<const recompute> policies{};
  /// Where layers add their auxiliary losses; null: they are not asked for, as in evaluation.
  auxiliary_sum* auxiliary = nullptr;
  /// Whether a backward pass runs a forward pass again: what counts once for each microbatch is not counted again.
  bool repeats = false;
  /// The observer of the units of parameters that the pass uses; null: none.
  unit_watcher* units = nullptr;
  /// The number of the first unit of the layers that this goes through, in its stage; negative: they are in one unit.
  int first_unit = 0;

  /// Makes it the i-th of `of` in a step whose first sample is `first`; `part` are this rank's samples of a microbatch.
  void place_in_step(std::int64_t i, std::int64_t of, std::int64_t first, const box& part) {
    index = i, count = of;
    first_sample = first - part.offset[0] +
                   first_sample_in_step(ctx.deterministic, i, of, part.global[0], part.offset[0], part.local[0]);
  }
  /// Returns this microbatch under another policy.
  microbatch keeping(recompute what) const {
    return with([&](microbatch& m) { m.policy = what, m.policies = {}; });
  }
  /// Returns this microbatch for a forward pass that a backward pass runs again.
  microbatch repeated() const {
    return with([](microbatch& m) { m.repeats = true; });
  }
  /// Returns this microbatch for a stack whose blocks have these policies; they must outlive it.
  microbatch keeping(std::span<const recompute> of_blocks) const {
    return with([&](microbatch& m) { m.policies = of_blocks; });
  }
  /// Returns this microbatch for one block of a stack.
  microbatch at_block(std::size_t i) const {
    return enter(static_cast<int>(i)).keeping(policies.empty() ? policy : policies[i]);
  }
  /// Returns this microbatch for a stack whose first block is unit `first` of its stage.
  microbatch units_from(int first) const {
    return with([&](microbatch& m) { m.first_unit = first; });
  }
  /// Announces that the pass uses the parameters of this unit from here on, in both directions. Returns this microbatch
  /// for layers within the unit, which announce none.
  microbatch enter(int unit) const {
    if (first_unit < 0) return *this;
    if (units) units->enter(first_unit + unit);
    if (deferred) deferred->enter(first_unit + unit);
    return units_from(-1);
  }
  /// Runs `task` now, or defers it. A task that is deferred outlives this object: it must not refer to it.
  template <class F>
  void on_weights(F&& task) const {
    if (deferred)
      deferred->add(std::forward<F>(task));
    else
      task();
  }

 private:
  template <class Change>
  microbatch with(const Change& change) const {
    microbatch other = *this;
    change(other);
    return other;
  }
};

}  // namespace plait
