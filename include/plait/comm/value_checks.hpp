// The values that a rank notes for comparison with other ranks, and the steps in which ranks compare them. They compare
// digests of values that types call equal. tensor/check_values.hpp notes and compares them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/kernels/sums.hpp"
#include "plait/layout/mesh.hpp"

namespace plait {

/// In which steps ranks compare the values that types call equal: seeds, sizes and the optimizer's numbers, tokens,
/// layers' boundary values, parameters, reduced gradients and moments. The default is `first`.
struct value_check {
  /// Every n-th step, from the first. Throws unless n is at least 1.
  static value_check every(std::int64_t n) {
    if (n < 1) fail({"value_check::every(", n, "): legal is 1 or more; value_check::off compares nothing"});
    return {n};
  }
  static const value_check always;  ///< every step
  static const value_check off;     ///< nothing
  static const value_check first;   ///< the first step, and the first after a call of `value_checks::arm`

  /// Returns this check with a tolerance: differences up to `relative` times a value's norm are no error. It is for
  /// ranks whose processors round differently.
  value_check within(double relative) const {
    if (!(relative >= 0 && relative < 1))
      fail({"value_check::within(", relative, "): legal is at least 0 and below 1"});
    value_check other = *this;
    other.tolerance = relative;
    return other;
  }

  std::int64_t period = 0;  ///< 0: the first step; negative: none
  double tolerance = 0;
};
inline constexpr value_check value_check::always{1, 0}, value_check::off{-1, 0}, value_check::first{0, 0};

/// A value that a rank has noted for comparison.
struct noted_value {
  std::string name;         ///< such as "the input of up"
  std::uint32_t equal = 0;  ///< one bit for each mesh axis along which all ranks must hold equal values
  std::uint32_t terms = 0;  ///< one bit for each mesh axis along which ranks hold terms of a sum
  std::int64_t size = 0;    ///< elements on this rank
  std::int64_t slot = -1;   ///< place of its digest in the device's memory; negative: `digest` has it
  kernels::value_digest digest{};
};

/// The noted values of one rank of a world. A step is the time between two calls of `begin_step`.
class value_checks {
 public:
  /// The most values that are noted between two comparisons; further ones are ignored.
  static constexpr std::size_t most_values = 1 << 16;
  /// Digests per block of a device's memory.
  static constexpr std::size_t block = 1024;

  void set(value_check how) {
    how_ = how;
    turn();
  }
  const value_check& how() const { return how_; }
  /// While this object lives, nothing is noted or compared. It is for passes that ranks run different numbers of times.
  class pause {
   public:
    explicit pause(value_checks& checks) : checks_(checks), was_(std::exchange(checks.on_, false)) {}
    ~pause() { checks_.on_ = was_; }
    pause(const pause&) = delete;
    pause& operator=(const pause&) = delete;

   private:
    value_checks& checks_;
    bool was_;
  };
  /// Whether values of this step are noted.
  bool on() const { return on_; }
  /// Compares values of the next whole step again, because something was changed, such as by a load.
  void arm() {
    armed_until_ = step_ + 1;
    turn();
  }
  /// Notes that a reduction of gradients has begun. The next call of `begin_step` then begins another step.
  void note_reduction() { reduced_ = true; }
  /// Begins the next step if gradients were reduced in this one. Values of this step have been compared.
  void begin_step() {
    if (step_ > 0 && !std::exchange(reduced_, false)) return;
    ++step_;
    turn();
  }
  std::int64_t step() const { return step_; }

  void note(noted_value value) {
    if (values_.size() < most_values) values_.push_back(std::move(value));
  }
  const std::vector<noted_value>& values() const { return values_; }
  /// Returns whether `what` occurs for the first time since the last comparison.
  bool first_time(const void* what) {
    if (std::find(met_.begin(), met_.end(), what) != met_.end()) return false;
    met_.push_back(what);
    return true;
  }
  /// Returns the next digest and its number. `make()` allocates a block of them in the device's memory. The device
  /// keeps the blocks as long as it lives.
  template <class Make>
  std::pair<std::int64_t, kernels::value_digest*> next_slot(Make&& make) {
    const std::size_t at = slots_++;
    if (at / block == blocks_.size()) blocks_.push_back(make());
    return {static_cast<std::int64_t>(at), blocks_[at / block] + at % block};
  }
  /// Calls f(digests, count) for each block. Its digests are free afterwards.
  template <class F>
  void take_blocks(F&& f) {
    for (std::size_t at = 0; at < slots_; at += block) f(blocks_[at / block], std::min(block, slots_ - at));
    slots_ = 0;
  }
  /// Takes the noted values for a comparison.
  std::vector<noted_value> take() {
    met_.clear();
    return std::exchange(values_, {});
  }
  /// The hash of the last compared context. An unchanged context is not compared again.
  std::uint64_t& context() { return context_; }

 private:
  void turn() {
    const bool due = how_.period > 0 && (step_ == 0 || (step_ - 1) % how_.period == 0);
    on_ = how_.period >= 0 && (due || step_ <= armed_until_);
  }

  value_check how_ = value_check::first;
  std::int64_t step_ = 0, armed_until_ = 1;
  bool on_ = true, reduced_ = false;
  std::vector<noted_value> values_;
  std::vector<const void*> met_;
  std::vector<kernels::value_digest*> blocks_;
  std::size_t slots_ = 0;
  std::uint64_t context_ = 0;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
