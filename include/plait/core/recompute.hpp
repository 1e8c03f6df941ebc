// Activation recomputation as data: how much each layer of a model keeps for its backward pass (see
// nn/combinators.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// How much a layer keeps for its backward pass. `none`: everything that the pass needs. `selective`: all but values
/// that are cheap to compute again (normalised values, activations, gathered inputs). `full`: its input only; the
/// forward pass runs again.
enum class recompute : std::uint8_t { none, selective, full };
inline constexpr int recompute_modes = 3;

constexpr const char* name_of(recompute policy) {
  return policy == recompute::none ? "none" : policy == recompute::selective ? "selective" : "full";
}

/// The mode of each layer, by its number in the whole model, and the mode of the head. The head's matrix product is
/// expensive, so the head supports `none` or `selective` only. One mode converts to a list that has it for all layers.
class layer_recompute {
 public:
  constexpr layer_recompute(recompute all = recompute::none)  // NOLINT: the conversion is the purpose
      : all_(all), head_(for_head(all)) {}
  /// Sets the modes of all layers of the model, and the head's mode.
  constexpr layer_recompute(std::vector<recompute> layers, recompute head)
      : by_layer_(std::move(layers)), head_(for_head(head)) {}
  /// Recomputes layers k - 1, 2 k - 1, ... in full, the head selectively, and nothing else. Throws for k < 1.
  static constexpr layer_recompute every(std::int64_t k) {
    if (k < 1) fail({"recompute: every ", k, " layers; legal is 1 or more"});
    layer_recompute out(recompute::full);
    out.every_ = k;
    return out;
  }

  constexpr recompute of_layer(std::int64_t i) const {
    if (by_layer_.empty()) return (i + 1) % every_ == 0 ? all_ : recompute::none;
    if (i < 0 || i >= static_cast<std::int64_t>(by_layer_.size()))
      fail({"recompute: layer ", i, " of a list for ", by_layer_.size(), " layers"});
    return by_layer_[static_cast<std::size_t>(i)];
  }
  constexpr recompute of_head() const { return head_; }

  friend constexpr bool operator==(const layer_recompute&, const layer_recompute&) = default;

 private:
  static constexpr recompute for_head(recompute wanted) {
    return wanted == recompute::none ? recompute::none : recompute::selective;
  }

  recompute all_ = recompute::none;
  std::int64_t every_ = 1;
  std::vector<recompute> by_layer_{};  ///< empty: modes are given by `all_` and `every_`
  recompute head_ = recompute::none;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
