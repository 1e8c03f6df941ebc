// The concept of an optimizer for training steps, and one type that holds any of them.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plait/core/containers.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/sums.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

// The state that an optimizer keeps for each parameter between steps, by the parameter's name.

/// One tensor of an optimizer's state for a parameter's piece, in the device's memory, for checkpoints.
struct optimizer_tensor {
  const char* name;  ///< the name in PyTorch's optimizers, such as "exp_avg"
  /// The format of an element: a number of `type`, or 8 bits with a scale per block (kernels/moments.hpp).
  enum class code : std::uint8_t { none, first_moment, second_moment } coded = code::none;
  dtype type = dtype::f32;
  std::byte* values = nullptr;
  std::byte* scales = nullptr;  ///< if coded
  std::int64_t place = 0;       ///< index of the first element in its block
  std::int64_t size = 0;        ///< elements
};

/// The state bytes of each parameter on this rank, initially zero. They are assigned to parameters by name, so a step
/// may omit any parameter.
template <compute_device Device>
class optimizer_state {
 public:
  /// `optimizer` is a literal with the optimizer's name for errors.
  explicit optimizer_state(const char* optimizer) : optimizer_(optimizer) {}

  /// Begins a step, in which every parameter may be updated once.
  void begin_step() {
    require_here();
    ++begun_;
    users_.clear();
  }
  /// Called when the last step was skipped: parameters that it omitted have then not missed it. n calls before the next
  /// step mean the last n steps. Each step is forgotten only once, so counts of missed steps stay nonnegative.
  void forget_step() {
    if (updated_in_ != begun_) return;
    std::int64_t round = rounds_;
    for (auto at = forgotten_.rbegin(); at != forgotten_.rend() && *at == round; ++at) --round;
    if (round <= begin_) return;  // a step before `resume`
    forgotten_.insert(std::upper_bound(forgotten_.begin(), forgotten_.end(), round), round);
    for (auto& [name, state] : kept_)
      if (state.round > round && state.left_out_of(round)) --state.missed;  // its last update has counted this step
  }

  /// Returns the `bytes` of a parameter of `n` elements for its update in this step. `owner` is an object with the
  /// parameter's lifetime, or null. Throws before the first step, and at a second update in one step. Throws also if
  /// the state has another size, or belongs to another living parameter.
  std::byte* update(const context<Device>& ctx, const std::string& name, std::int64_t n, std::size_t bytes,
                    const std::shared_ptr<const void>& owner = {}) {
    require_here();
    if (begun_ == 0) fail({optimizer_, ": begin_step comes before the first update"});
    kept& state = of(ctx, name, n, bytes);
    if (state.updated_in == begun_)
      fail({optimizer_, ": ", name,
            " is updated twice in one step: two parameters have this name, or begin_step was not called"});
    if (owner) {
      if (const auto other = state.owner.lock(); other && other != owner)
        fail({optimizer_, ": two models have a parameter ", name,
              ", and what this optimizer keeps is of the first one; ", "each model needs an optimizer of its own"});
      state.owner = owner;
    }
    state.updated_in = begun_;
    if (updated_in_ != begun_) updated_in_ = begun_, ++rounds_;
    state.missed += missed_since(state.round);
    state.move_to(rounds_);
    return state.memory.template data<std::byte>();
  }
  /// Registers a parameter, or values with a name only, for an update in this step. Throws if they share the caller's
  /// memory with others of this step.
  template <class Parameter>
  void require_own_memory(const Parameter& p) {
    users_.add(p, true);
  }
  void require_own_memory(const std::string& name, const void* values, std::size_t bytes) {
    users_.add(name, values, bytes);
  }
  /// Whether a parameter of `n` elements has a state.
  bool has(const std::string& name, std::int64_t n) const {
    const auto at = kept_.find(name);
    return at != kept_.end() && at->second.size == n;
  }
  /// A range of bytes to keep from a state that is split.
  struct part {
    std::size_t from, to, bytes;
  };
  /// Reduces a parameter's state to `parts`, this rank's piece under data parallelism. It then has `n` elements and
  /// `bytes`.
  void cut(const context<Device>& ctx, const std::string& name, std::int64_t n, std::size_t bytes,
           std::initializer_list<part> parts) {
    kept& state = kept_.at(name);
    const buffer<Device> whole = std::move(state.memory);
    state.memory = make_optimizer_buffer<std::byte>(ctx.device, bytes);
    state.size = n;
    for (const part& p : parts)
      ctx.device.copy(state.memory.template data<std::byte>() + p.to, whole.template data<std::byte>() + p.from,
                      p.bytes, ctx.device.main_stream());
  }
  /// Frees the state of a parameter without elements on this rank; the number of missed steps stays.
  void drop(const std::string& name) {
    const auto at = kept_.find(name);
    if (at != kept_.end()) at->second.memory = {}, at->second.size = 0;
  }
  /// The number of steps that omitted a parameter before its last update.
  std::int64_t missed(const std::string& name) const {
    const auto at = kept_.find(name);
    return at == kept_.end() ? 0 : at->second.missed;
  }
  /// For each parameter with a state that steps omitted: their number up to the next step.
  std::map<std::string, std::int64_t> missed_steps() const {
    std::map<std::string, std::int64_t> all;
    for (const auto& [name, state] : kept_)
      if (const std::int64_t n = state.missed + missed_since(state.round, rounds_ + 1); n != 0) all.emplace(name, n);
    return all;
  }
  /// Continues with the result of `missed_steps`. Parameters that it lacks have missed no step.
  void resume(std::map<std::string, std::int64_t> missed) {
    begin_ = rounds_;
    before_ = std::move(missed);
    for (auto& [name, state] : kept_) start(name, state);
  }
  /// Returns a parameter's state bytes, for saving or loading at any time.
  std::byte* find(const context<Device>& ctx, const std::string& name, std::int64_t n, std::size_t bytes) {
    return of(ctx, name, n, bytes).memory.template data<std::byte>();
  }

 private:
  struct kept {
    buffer<Device> memory;
    std::int64_t size = 0;
    std::int64_t updated_in = 0;         ///< `begun_` at the last update
    std::int64_t round = 0, missed = 0;  ///< `rounds_` at the last update; steps that omitted the parameter before
    std::uint64_t updates = 1;           ///< bit i: whether round `round` - i updated it
    std::weak_ptr<const void> owner;

    void move_to(std::int64_t next) {
      const std::int64_t by = next - round;
      updates = (by < 64 ? updates << by : 0) | 1;
      round = next;
    }
    /// Whether one of the last 63 rounds before the last update omitted the parameter.
    bool left_out_of(std::int64_t earlier) const {
      const std::int64_t ago = round - earlier;
      return ago < 64 && (updates >> ago & 1) == 0;
    }
  };

  void require_here() const {
    if (mark_.moved()) fail({optimizer_, ": it was moved from, and is used; use the object that it was moved to"});
  }
  void start(const std::string& name, kept& state) const {
    const auto at = before_.find(name);
    state.round = begin_, state.updates = 1, state.missed = at == before_.end() ? 0 : at->second;
  }
  std::int64_t missed_since(std::int64_t round, std::int64_t until) const {
    const auto first = std::upper_bound(forgotten_.begin(), forgotten_.end(), round);
    const auto last = std::lower_bound(first, forgotten_.end(), until);
    return until - round - 1 - (last - first);
  }
  std::int64_t missed_since(std::int64_t round) const { return missed_since(round, rounds_); }

  kept& of(const context<Device>& ctx, const std::string& name, std::int64_t n, std::size_t bytes) {
    const auto [at, is_new] = kept_.try_emplace(name);
    kept& state = at->second;
    if (is_new) start(name, state);
    if (state.memory.empty()) {  // or has no elements
      state.memory = make_optimizer_buffer<std::byte>(ctx.device, bytes);
      state.size = n;
      ctx.device.zero(state.memory.data(), state.memory.bytes(), ctx.device.main_stream());
    }
    if (state.size != n)
      fail({optimizer_, ": ", name, " has ", n, " elements on this rank, and its state is of ", state.size,
            ": two parameters have this name, or its layout has changed"});
    return state;
  }

  const char* optimizer_;
  moved_mark mark_;
  detail::memory_users users_;  ///< in this step
  std::unordered_map<std::string, kept> kept_;
  std::int64_t begun_ = 0;       ///< number of calls of begin_step
  std::int64_t updated_in_ = 0;  ///< `begun_` at the last step that updated a parameter
  /// The number of steps in which a parameter was updated. A step that is replayed as a graph makes no call and is not
  /// counted; it updates the same parameters as the step before, so none misses it.
  std::int64_t rounds_ = 0;
  std::vector<std::int64_t> forgotten_;         ///< the rounds that were skipped
  std::int64_t begin_ = 0;                      ///< the round of `resume`, or 0
  std::map<std::string, std::int64_t> before_;  ///< the steps that parameters missed before `resume`
};

/// An optimizer of parameters of this precision on this device. A step calls, in this order,
///
/// * `begin_step(ctx, learning_rate)`: writes the step's numbers to the device's memory;
/// * `clip_by(ctx, numbers)`: reads the factor of the gradients there. If `update` is 0, the step changes no weight and
///   no state of the optimizer, on all ranks;
/// * `update(ctx, gradients)`: updates the parameters. It does not wait, and launches the same work in every step, so
///   that a GPU can replay it.
///
/// `forget_step()` marks the last step as skipped; `step()` is the number of the other steps.
///
/// An optimizer may have a `prepare(ctx, parameter)`. A training step calls it on construction for every parameter of
/// its stage, on all ranks. It throws if the parameter, as split by data parallelism, cannot be updated; and it creates
/// the communicators for its update. An optimizer may have a `take_step()`, which each run of a training step calls
/// first. It throws unless `begin_step` was called once for the run.
template <class O, class Precision, class Device>
concept optimizer =
    requires(O& o, const O& seen, const context<Device>& ctx, double learning_rate,
             const kernels::clip_numbers* clipped, std::span<reduced_gradient<Precision, Device>> gradients) {
      o.begin_step(ctx, learning_rate);
      o.clip_by(ctx, clipped);
      o.update(ctx, gradients);
      o.forget_step();
      { seen.step() } -> std::convertible_to<std::int64_t>;
    };

/// A reference to any optimizer of the caller, which must outlive this. So a training step is compiled once for all
/// optimizers that a program may choose at run time. Copies refer to the same optimizer.
template <class Precision, compute_device Device>
class optimizer_ref {
  using reduced = reduced_gradient<Precision, Device>;

 public:
  template <class O>
    requires(!std::same_as<std::remove_cv_t<O>, optimizer_ref> && optimizer<O, Precision, Device>)
  optimizer_ref(O& o)  // NOLINT: conversion from any optimizer is the purpose
      : optimizer_(std::addressof(o)), calls_(&calls_of<O>) {}

  /// Refuses an optimizer of another precision with a readable text.
  template <class O>
    requires(!std::same_as<typename O::reduced::precision_type, Precision>)
  optimizer_ref(O&) : optimizer_(nullptr), calls_(nullptr) {  // NOLINT: as above
    detail::require_one_precision<typename O::reduced::precision_type, Precision>();
  }

  void begin_step(const context<Device>& ctx, double learning_rate) {
    calls_->begin_step(optimizer_, ctx, learning_rate);
  }
  void clip_by(const context<Device>& ctx, const kernels::clip_numbers* clipped) {
    calls_->clip_by(optimizer_, ctx, clipped);
  }
  void update(const context<Device>& ctx, std::span<reduced> gradients) { calls_->update(optimizer_, ctx, gradients); }
  void prepare(const context<Device>& ctx, const parameter<Precision, Device>& p) {
    calls_->prepare(optimizer_, ctx, p);
  }
  void take_step() { calls_->take_step(optimizer_); }
  void forget_step() { calls_->forget_step(optimizer_); }
  std::int64_t step() const { return calls_->step(optimizer_); }

 private:
  struct calls {
    void (*begin_step)(void*, const context<Device>&, double);
    void (*clip_by)(void*, const context<Device>&, const kernels::clip_numbers*);
    void (*update)(void*, const context<Device>&, std::span<reduced>);
    void (*prepare)(void*, const context<Device>&, const parameter<Precision, Device>&);
    void (*take_step)(void*);
    void (*forget_step)(void*);
    std::int64_t (*step)(const void*);
  };
  template <class O>
  static constexpr calls calls_of{
      [](void* o, const context<Device>& ctx, double rate) { static_cast<O*>(o)->begin_step(ctx, rate); },
      [](void* o, const context<Device>& ctx, const kernels::clip_numbers* n) { static_cast<O*>(o)->clip_by(ctx, n); },
      [](void* o, const context<Device>& ctx, std::span<reduced> g) { static_cast<O*>(o)->update(ctx, g); },
      [](void* o, const context<Device>& ctx, const parameter<Precision, Device>& p) {
        if constexpr (requires(O& own) { own.prepare(ctx, p); }) static_cast<O*>(o)->prepare(ctx, p);
      },
      [](void* o) {
        if constexpr (requires(O& own) { own.take_step(); }) static_cast<O*>(o)->take_step();
      },
      [](void* o) { static_cast<O*>(o)->forget_step(); },
      [](const void* o) { return static_cast<std::int64_t>(static_cast<const O*>(o)->step()); }};

  void* optimizer_;
  const calls* calls_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
