// One of plait's optimizers, chosen at run time, such as from a command line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "plait/core/macros_off.hpp"
#include "plait/parallel/optim/muon.hpp"
#include "plait/parallel/optim/optimizer.hpp"

namespace plait {

/// The options of an optimizer; their type selects the optimizer.
using optimizer_options = std::variant<adamw_options, muon_options>;

/// Returns the bytes of state that an optimizer keeps for `elements` of a parameter that this rank updates. `place` is
/// the index of the first element in its block (`moment_places`).
template <class Precision>
std::size_t moment_bytes(const optimizer_options& options, const parameter_info& info, std::int64_t elements,
                         std::int64_t place = 0) {
  constexpr std::size_t full = sizeof(arithmetic<master_of<Precision>>);
  if (const auto* const only = std::get_if<adamw_options>(&options))
    return kernels::places_of(only->moments, full, elements, place).bytes;
  const kernels::moment_places both =
      kernels::places_of(std::get<muon_options>(options).adamw.moments, full, elements, place);
  return is_hidden_matrix(info) ? both.second : both.bytes;  // bytes of one of the two optimizers
}

/// An optimizer whose options select its kind.
template <class Precision, compute_device Device = cpu>
class chosen_optimizer {
 public:
  using reduced = reduced_gradient<Precision, Device>;

  explicit chosen_optimizer(const optimizer_options& options)
      : one_(std::visit([](const auto& o) { return made(o); }, options)) {}

  void begin_step(const context<Device>& ctx, double learning_rate) {
    std::visit([&](auto& one) { one.begin_step(ctx, learning_rate); }, one_);
  }
  void clip_by(const context<Device>& ctx, const kernels::clip_numbers* clipped) {
    std::visit([&](auto& one) { one.clip_by(ctx, clipped); }, one_);
  }
  void update(const context<Device>& ctx, std::span<reduced> gradients) {
    std::visit([&](auto& one) { one.update(ctx, gradients); }, one_);
  }
  void prepare(const context<Device>& ctx, const parameter<Precision, Device>& p) {
    std::visit([&](auto& one) { one.prepare(ctx, p); }, one_);
  }
  void take_step() {
    std::visit([](auto& one) { one.take_step(); }, one_);
  }
  void forget_step() {
    std::visit([](auto& one) { one.forget_step(); }, one_);
  }
  std::int64_t step() const {
    return std::visit([](const auto& one) { return one.step(); }, one_);
  }
  void resume(std::int64_t step, std::map<std::string, std::int64_t> missed = {}) {
    std::visit([&](auto& one) { one.resume(step, std::move(missed)); }, one_);
  }
  std::map<std::string, std::int64_t> missed_steps() const {
    return std::visit([](const auto& one) { return one.missed_steps(); }, one_);
  }
  template <class F>
  void visit_state(const context<Device>& ctx, const parameter<Precision, Device>& p, F&& f) {
    std::visit([&](auto& one) { one.visit_state(ctx, p, f); }, one_);
  }

 private:
  /// Whether Muon is available. It has no stochastic rounding, so it needs masters.
  static constexpr bool has_muon = std::is_same_v<master_of<Precision>, arithmetic<master_of<Precision>>>;
  using any = std::conditional_t<has_muon, std::variant<adamw<Precision, Device>, muon<Precision, Device>>,
                                 std::variant<adamw<Precision, Device>>>;
  static any made(const adamw_options& o) { return any(std::in_place_type<adamw<Precision, Device>>, o); }
  static any made(const muon_options& o) {
    if constexpr (has_muon) return any(std::in_place_type<muon<Precision, Device>>, o);
    fail("muon: this precision has no master weights; legal are float, double and bf16, and with this one adamw");
  }

  any one_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
