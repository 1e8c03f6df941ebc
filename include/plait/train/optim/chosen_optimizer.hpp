// One of plait's optimizers, chosen when a program runs, as from its command line. Programs that always take the same
// one need no such choice. Next: train/optim/adamw.hpp, train/optim/muon.hpp, examples/train_llama.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <variant>

#include "plait/train/optim/muon.hpp"
#include "plait/train/optim/optimizer.hpp"

namespace plait {

/// The options of an optimizer say which one it is.
using optimizer_options = std::variant<adamw_options, muon_options>;

/// Returns how many numbers of a parameter's master type its optimizer keeps for each of its elements.
inline int moments_of(const optimizer_options& options, const parameter_info& info) {
  return std::holds_alternative<muon_options>(options) && is_hidden_matrix(info) ? 1 : 2;
}

/// An optimizer whose kind its options say.
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
  void forget_step() {
    std::visit([](auto& one) { one.forget_step(); }, one_);
  }
  std::int64_t step() const {
    return std::visit([](const auto& one) { return one.step(); }, one_);
  }

 private:
  using any = std::variant<adamw<Precision, Device>, muon<Precision, Device>>;
  static any made(const adamw_options& o) { return any(std::in_place_type<adamw<Precision, Device>>, o); }
  static any made(const muon_options& o) { return any(std::in_place_type<muon<Precision, Device>>, o); }

  any one_;
};

}  // namespace plait
