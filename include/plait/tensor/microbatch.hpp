// A microbatch during its pass through layers: the context, recomputation and deferred weight gradients.
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

/// Observer of a pass through the layers. `enter` receives the parameter unit of a stage that the pass uses next.
class unit_watcher {
 public:
  virtual void enter(int unit) = 0;

 protected:
  ~unit_watcher() = default;
};

/// Deferred weight gradients, in order. Pipeline schedules run them in a rank's idle time.
class weight_work {
 public:
  weight_work() = default;
  template <class F>
  void add(F&& work) {
    tasks_.push_back(std::make_unique<holder<std::decay_t<F>>>(std::forward<F>(work)));
  }
  std::size_t size() const { return tasks_.size(); }
  /// Assigns the tasks that are added after this call to another unit of parameters.
  void enter(int unit) {
    if (units_.empty() || units_.back().unit != unit) units_.push_back({unit, tasks_.size()});
  }
  /// Runs and forgets the tasks. A `watcher` that is not null receives the unit of the tasks that follow.
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
    std::size_t begin;  ///< index of the unit's first task
  };
  std::vector<std::unique_ptr<task>> tasks_;
  std::vector<unit_begin> units_;
};

/// Returns the index in a step of a rank's first sample in microbatch `index` of `count`. The rank has `local` of the
/// microbatch's `global` samples, from `offset` on. Usually one microbatch's samples follow another's. With
/// deterministic sums a rank's samples of a step are contiguous instead. So each rank sums one part of the step, for
/// any number of microbatches.
constexpr std::int64_t first_sample_in_step(const deterministic_leaves& leaves, std::int64_t index, std::int64_t count,
                                            std::int64_t global, std::int64_t offset, std::int64_t local) {
  return leaves ? offset * count + index * local : index * global + offset;
}

/// The auxiliary losses of a step on one rank, a term of a sum over all ranks. Forward passes add to it.
struct auxiliary_sum {
  double* value = nullptr;  ///< one number in the device's memory
  bool used = false;        ///< whether a layer has added to it
};

/// One microbatch during its pass through layers: the context, and the state that differs between microbatches. Each
/// layer passes it to its sublayers. A context converts to a microbatch, so a layer that is used alone takes a context.
template <compute_device Device>
struct microbatch {
  microbatch(const context<Device>& where) : ctx(where) {}  // NOLINT: the conversion is the purpose

  const context<Device>& ctx;
  /// Global index of its first sample, over all steps. Dropout depends on it, so it differs between samples but not
  /// between meshes.
  std::int64_t first_sample = 0;
  /// Index of this microbatch in its step, and their number. Deterministic sums over samples depend on both.
  std::int64_t index = 0, count = 1;
  /// Whether dropout drops elements; true in training. `pipeline::evaluate` and the library's scoring code set it to
  /// false. A program that evaluates layers itself must do so too.
  bool drops = true;
  /// For sequences packed from documents: for each of this rank's tokens, the position of the first token of its
  /// document. In the device's memory; null if there are no documents. Must not decrease along the text.
  const std::int32_t* document_starts = nullptr;
  /// Collects the weight gradients of `backward`; null: `backward` computes them at once.
  weight_work* deferred = nullptr;
  /// How many activations a forward pass keeps.
  recompute policy = recompute::none;
  /// A policy for each block of a stack; empty: `policy` holds for all blocks.
  std::span<const recompute> policies{};
  /// Where layers add their auxiliary losses; null: layers do not compute them, as in evaluation.
  auxiliary_sum* auxiliary = nullptr;
  /// Whether a backward pass repeats this forward pass. Counts per microbatch must then not count it again.
  bool repeats = false;
  /// The observer of the units of parameters that the pass uses; null: none.
  unit_watcher* units = nullptr;
  /// Number of the first unit of these layers in their stage; negative: they are all in one unit.
  int first_unit = 0;

  /// Makes this microbatch `i` of `of` in a step whose first sample is `first`. `part` describes this rank's samples of
  /// a microbatch.
  void place_in_step(std::int64_t i, std::int64_t of, std::int64_t first, const box& part) {
    index = i, count = of;
    first_sample = first - part.offset[0] +
                   first_sample_in_step(ctx.deterministic, i, of, part.global[0], part.offset[0], part.local[0]);
  }
  /// Returns this microbatch with another policy.
  microbatch keeping(recompute what) const {
    return with([&](microbatch& m) { m.policy = what, m.policies = {}; });
  }
  /// Returns this microbatch for a forward pass that a backward pass repeats.
  microbatch repeated() const {
    return with([](microbatch& m) { m.repeats = true; });
  }
  /// Returns this microbatch for a stack with one policy per block; the policies must outlive it.
  microbatch keeping(std::span<const recompute> of_blocks) const {
    return with([&](microbatch& m) { m.policies = of_blocks; });
  }
  /// Returns this microbatch for one block of a stack.
  microbatch at_block(std::size_t i) const {
    return enter(static_cast<int>(i)).keeping(policies.empty() ? policy : policies[i]);
  }
  /// Returns this microbatch for a stack whose first block is unit `first` of the stage.
  microbatch units_from(int first) const {
    return with([&](microbatch& m) { m.first_unit = first; });
  }
  /// Announces, in both directions, that the pass now uses the parameters of this unit. Returns this microbatch for
  /// layers inside the unit, which announce nothing.
  microbatch enter(int unit) const {
    if (first_unit < 0) return *this;
    if (units) units->enter(first_unit + unit);
    if (deferred) deferred->enter(first_unit + unit);
    return units_from(-1);
  }
  /// Runs `task` now or defers it. A deferred task outlives this object, so it must not refer to it.
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
