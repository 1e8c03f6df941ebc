// The concept of an optimizer, as a training step needs it, and one type for all of them.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>

#include "plait/kernels/elements.hpp"
#include "plait/nn/parameter.hpp"

namespace plait {

/// An optimizer of parameters of this precision on this device. In a step come, in this order,
///
/// * `begin_step(ctx, learning_rate)`: puts the step's numbers into the device's memory;
/// * `clip_by(ctx, numbers)`: takes the factor of the gradients from there, and where `update` is 0, the step changes
///   neither a weight nor the optimizer's state, on all ranks alike;
/// * `update(ctx, gradients)`: updates the parameters. It waits for nothing, and what it launches is the same in every
///   step, so that a GPU can replay it.
///
/// `forget_step()` says that the last step was one that changed nothing; `step()` is the number of the others.
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
/// program chooses when it runs. Copies refer to the same one.
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
