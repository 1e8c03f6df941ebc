// What an optimizer keeps of each parameter from one step to the next, by the parameter's name. It computes nothing,
// and no checkpoint holds it. Next: train/optim/adamw.hpp and train/optim/muon.hpp, which keep theirs so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "plait/core/error.hpp"
#include "plait/device/buffer.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

/// Bytes for each parameter on this rank, zero at first. They belong to a parameter by its name, so that any of them
/// may be left out of any step.
template <compute_device Device>
class optimizer_state {
 public:
  /// `optimizer`, a literal, is its name in errors.
  explicit optimizer_state(const char* optimizer) : optimizer_(optimizer) {}

  /// Begins a step, in which every parameter may be updated once.
  void begin_step() { ++begun_; }

  /// Returns the `bytes` of a parameter of `n` elements for its update in this step. Throws before the first step, at a
  /// second update in one step, and where the parameter had another size.
  std::byte* update(const context<Device>& ctx, const std::string& name, std::int64_t n, std::size_t bytes) {
    if (begun_ == 0) fail({optimizer_, ": begin_step comes before the first update"});
    kept& state = kept_[name];
    if (state.memory.empty()) {
      state.memory = make_optimizer_buffer<std::byte>(ctx.device, bytes);
      state.size = n;
      ctx.device.zero(state.memory.data(), state.memory.bytes(), ctx.device.main_stream());
    }
    if (state.size != n)
      fail({optimizer_, ": ", name, " has ", n, " elements on this rank, and its state is of ", state.size,
            ": two parameters have this name, or its layout has changed"});
    if (state.updated_in == begun_)
      fail({optimizer_, ": ", name,
            " is updated twice in one step: two parameters have this name, or begin_step was not called"});
    state.updated_in = begun_;
    return state.memory.template data<std::byte>();
  }

 private:
  struct kept {
    buffer<Device> memory;
    std::int64_t size = 0;
    std::int64_t updated_in = 0;  ///< the step that was begun then
  };

  const char* optimizer_;
  std::unordered_map<std::string, kept> kept_;
  std::int64_t begun_ = 0;  ///< begin_step was called so often
};

}  // namespace plait
