// The actions of a pipeline: F, B, I and W of one microbatch in one chunk. Messages are no actions: they are derived
// in schedule/program.hpp. Which stage a chunk is: schedule/pipeline_shape.hpp.
#pragma once

#include <cstdint>
#include <string>

#include "plait/core/text.hpp"
#include "plait/version.hpp"

namespace plait {

/// A computation of a rank for one microbatch in one of its chunks of the model.
///
/// A *backward* is either one action, B, or two (arXiv 2401.10241): I gives the gradient of the chunk's input, on which
/// the stage before waits, and W the gradients of its weights, on which nobody waits.
enum class action_kind : std::uint8_t { forward, backward, input_backward, weight_backward };

/// F, B, I or W.
constexpr char letter(action_kind kind) { return "FBIW"[static_cast<std::size_t>(kind)]; }

/// True for B and I, which give the gradient that the stage before waits for.
constexpr bool gives_input_gradient(action_kind kind) {
  return kind == action_kind::backward || kind == action_kind::input_backward;
}
/// True for B and W, after which the activations of the microbatch are no longer needed.
constexpr bool frees_activations(action_kind kind) {
  return kind == action_kind::backward || kind == action_kind::weight_backward;
}

/// One entry of a schedule. Generators, verifier, simulator, executor and trace share it; which stage a chunk is, the
/// `pipeline_shape` says.
struct action {
  action_kind kind = action_kind::forward;
  std::uint8_t chunk = 0;        ///< of the rank's own chunks, 0 to v - 1
  std::uint16_t microbatch = 0;  ///< 0 to m - 1

  friend constexpr bool operator==(const action&, const action&) = default;
};
static_assert(sizeof(action) == 4);

constexpr action forward_of(int chunk, int microbatch) {
  return {action_kind::forward, static_cast<std::uint8_t>(chunk), static_cast<std::uint16_t>(microbatch)};
}
constexpr action backward_of(int chunk, int microbatch) {
  return {action_kind::backward, static_cast<std::uint8_t>(chunk), static_cast<std::uint16_t>(microbatch)};
}
constexpr action input_backward_of(int chunk, int microbatch) {
  return {action_kind::input_backward, static_cast<std::uint8_t>(chunk), static_cast<std::uint16_t>(microbatch)};
}
constexpr action weight_backward_of(int chunk, int microbatch) {
  return {action_kind::weight_backward, static_cast<std::uint8_t>(chunk), static_cast<std::uint16_t>(microbatch)};
}

/// "F3.1": the forward of microbatch 3 in chunk 1.
inline std::string describe(const action& a) { return cat({letter(a.kind), a.microbatch, ".", a.chunk}); }

}  // namespace plait
