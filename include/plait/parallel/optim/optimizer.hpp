// The concept of an optimizer, as a training step needs it, and one type for all of them.
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

// The state that an optimizer keeps of each parameter between steps, by the parameter's name.

/// One tensor of what an optimizer keeps of a parameter's piece, in the device's memory, as checkpoints see it.
struct optimizer_tensor {
  const char* name;  ///< as PyTorch's optimizers call it, such as "exp_avg"
  /// How an element is kept: as a number of `type`, or in 8 bits with a scale for each block (kernels/moments.hpp).
  enum class code : std::uint8_t { none, first_moment, second_moment } coded = code::none;
  dtype type = dtype::f32;
  std::byte* values = nullptr;
  std::byte* scales = nullptr;  ///< of coded ones
  std::int64_t place = 0;       ///< of the first element in its block
  std::int64_t size = 0;        ///< elements
};

/// Bytes for each parameter on this rank, zero at first. They belong to a parameter by its name, so that any of them
/// may be left out of any step.
template <compute_device Device>
class optimizer_state {
 public:
  /// `optimizer`, a literal, is its name in errors.
  explicit optimizer_state(const char* optimizer) : optimizer_(optimizer) {}

  /// Begins a step, in which every parameter may be updated once.
  void begin_step() {
    require_here();
    ++begun_;
    users_.clear();
  }
  /// The last step was skipped: no parameter that was left out of it has missed one. Called n times before the next
  /// step, it is the last n steps: each is forgotten once, so that no count of missed steps is below 0.
  void forget_step() {
    if (updated_in_ != begun_) return;
    std::int64_t round = rounds_;
    for (auto at = forgotten_.rbegin(); at != forgotten_.rend() && *at == round; ++at) --round;
    if (round <= begin_) return;  // before this object was resumed
    forgotten_.insert(std::upper_bound(forgotten_.begin(), forgotten_.end(), round), round);
    for (auto& [name, state] : kept_)
      if (state.round > round && state.left_out_of(round)) --state.missed;  // counted at its last update
  }

  /// Returns the `bytes` of a parameter of `n` elements for its update in this step. `owner`, where it is not null, is
  /// what lives as long as the parameter. Throws before the first step, and at a second update in one step. Throws also
  /// where the state has another size, or belongs to another parameter that still exists.
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
  /// A parameter, or values that are known by a name alone, are about to be updated in this step. Throws where they
  /// share memory of the caller's with others of this step.
  template <class Parameter>
  void require_own_memory(const Parameter& p) {
    users_.add(p, true);
  }
  void require_own_memory(const std::string& name, const void* values, std::size_t bytes) {
    users_.add(name, values, bytes);
  }
  /// Whether there is a state of a parameter of `n` elements.
  bool has(const std::string& name, std::int64_t n) const {
    const auto at = kept_.find(name);
    return at != kept_.end() && at->second.size == n;
  }
  /// Bytes that stay where a state is cut.
  struct part {
    std::size_t from, to, bytes;
  };
  /// Keeps `parts` of a parameter's state, which is of `n` elements and `bytes` from now on: the piece that data
  /// parallelism gives this rank.
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
  /// Of a parameter without elements on this rank it keeps only the steps that it missed.
  void drop(const std::string& name) {
    const auto at = kept_.find(name);
    if (at != kept_.end()) at->second.memory = {}, at->second.size = 0;
  }
  /// How many steps a parameter was left out of before its last update, from the first step on.
  std::int64_t missed(const std::string& name) const {
    const auto at = kept_.find(name);
    return at == kept_.end() ? 0 : at->second.missed;
  }
  /// As `missed`, up to the next step, of each parameter that has a state and was left out of some.
  std::map<std::string, std::int64_t> missed_steps() const {
    std::map<std::string, std::int64_t> all;
    for (const auto& [name, state] : kept_)
      if (const std::int64_t n = state.missed + missed_since(state.round, rounds_ + 1); n != 0) all.emplace(name, n);
    return all;
  }
  /// Goes on with what `missed_steps` gave. A parameter that is not in it has missed none.
  void resume(std::map<std::string, std::int64_t> missed) {
    begin_ = rounds_;
    before_ = std::move(missed);
    for (auto& [name, state] : kept_) start(name, state);
  }
  /// Returns them, to be saved or loaded at any time.
  std::byte* find(const context<Device>& ctx, const std::string& name, std::int64_t n, std::size_t bytes) {
    return of(ctx, name, n, bytes).memory.template data<std::byte>();
  }

 private:
  struct kept {
    buffer<Device> memory;
    std::int64_t size = 0;
    std::int64_t updated_in = 0;         ///< the step that was begun then
    std::int64_t round = 0, missed = 0;  ///< of the last update, and the steps that it was left out of before
    std::uint64_t updates = 1;           ///< bit i: whether it was updated in the round `round` - i
    std::weak_ptr<const void> owner;

    void move_to(std::int64_t next) {
      const std::int64_t by = next - round;
      updates = (by < 64 ? updates << by : 0) | 1;
      round = next;
    }
    /// Whether a round before the last update, one of 63, was no update.
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
    if (state.memory.empty()) {  // or of no elements
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
  std::int64_t begun_ = 0;       ///< begin_step was called so often
  std::int64_t updated_in_ = 0;  ///< the last of these in which a parameter was updated
  /// The number of steps in which a parameter was updated. A step that is replayed as a graph calls no update, and is
  /// not counted: it updates the parameters of the step before, so that none misses it.
  std::int64_t rounds_ = 0;
  std::vector<std::int64_t> forgotten_;         ///< the rounds that were skipped
  std::int64_t begin_ = 0;                      ///< the round in which this object was resumed, or 0
  std::map<std::string, std::int64_t> before_;  ///< the steps that parameters had missed before that
};

/// An optimizer of parameters of this precision on this device. In a step come, in this order,
///
/// * `begin_step(ctx, learning_rate)`: puts the step's numbers into the device's memory;
/// * `clip_by(ctx, numbers)`: takes the factor of the gradients from there, and where `update` is 0, the step changes
///   neither a weight nor the optimizer's state, on all ranks alike;
/// * `update(ctx, gradients)`: updates the parameters. It waits for nothing, and what it launches is the same in every
///   step, so that a GPU can replay it.
///
/// `forget_step()` notes that the last step changed nothing; `step()` is the number of the other steps.
///
/// It may have a `prepare(ctx, parameter)`, which a training step calls for every parameter of its stage, on all ranks,
/// when it is made: it throws where the parameter, as data parallelism cuts it, cannot be updated, and asks for the
/// communicators that its update needs. It may have a `take_step()`, which each run of a training step calls first: it
/// throws where `begin_step` was not called once for the run.
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

/// Any optimizer of the caller's, which must outlive this: a training step is compiled once, whatever optimizer a
/// program chooses when it runs. Copies refer to one optimizer.
template <class Precision, compute_device Device>
class optimizer_ref {
  using reduced = reduced_gradient<Precision, Device>;

 public:
  template <class O>
    requires(!std::same_as<std::remove_cv_t<O>, optimizer_ref> && optimizer<O, Precision, Device>)
  optimizer_ref(O& o)  // NOLINT: conversion from any optimizer is the purpose
      : optimizer_(std::addressof(o)), calls_(&calls_of<O>) {}

  /// An optimizer of another precision is refused in words.
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
