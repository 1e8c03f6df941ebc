// The seconds of work that a program on the counting_device asks for, on a machine by its description: products by
// shape, attention, and kernels by their bytes, by the formulas of plan/kernel_time.hpp. Communication is in the
// ledger.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plait/core/dtype.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/counting.hpp"
#include "plait/plan/kernel_time.hpp"

namespace plait::planner {

/// Seconds of computing, by what they are spent on.
struct computed_seconds {
  double products = 0, attention = 0, memory = 0;

  constexpr double total() const { return products + attention + memory; }
  friend constexpr computed_seconds operator-(const computed_seconds& a, const computed_seconds& b) {
    return {a.products - b.products, a.attention - b.attention, a.memory - b.memory};
  }
  constexpr computed_seconds& operator+=(const computed_seconds& b) {
    products += b.products, attention += b.attention, memory += b.memory;
    return *this;
  }
  friend constexpr computed_seconds operator*(double factor, const computed_seconds& a) {
    return {factor * a.products, factor * a.attention, factor * a.memory};
  }
};

/// Adds up the seconds of what a `counting_device` is asked for (`counting_device::tell`). The hardware must outlive
/// it.
class work_clock final : public work_meter {
 public:
  explicit work_clock(const hardware& h) : h_(h) {}

  const computed_seconds& now() const { return seconds_; }

  /// Throws where the hardware has no peak for such numbers.
  void product(dtype of, double m, double n, double k, bool adds) override {
    const number_kind kind = kind_of(of);
    if (h_.peak_of(kind) == 0)
      fail({"hardware ", h_.name, " has no products in ", name_of(kind), ", in which the program multiplies"});
    seconds_.products += product_seconds(h_, kind, m, n, k, adds);
  }
  void attention(dtype of, double operations, std::int64_t keys, bool forward) override {
    // A causal kernel computes half of a square and the blocks that its mask cuts.
    const double blocks = 1 + h_.attention_block / static_cast<double>(std::max<std::int64_t>(keys, 1));
    seconds_.attention += operations * blocks / attention_rate(h_, kind_of(of)) + (forward ? 1 : 2) * h_.launch;
  }
  void moved(double bytes) override { seconds_.memory += memory_seconds(h_, bytes, 1); }
  void kernel(dtype of, double operations, double bytes) override {
    const double moved = memory_seconds(h_, bytes, 1);
    const double peak = operations > 0 ? h_.peak_of(kind_of(of)) : 1;
    if (peak == 0)
      fail({"hardware ", h_.name, " has no products in ", name_of(kind_of(of)), ", in which a kernel_cost counts"});
    seconds_.memory += std::max(moved, operations / peak + h_.launch);
  }
  void activation(double bytes, double values, bool backward) override {
    seconds_.memory += activation_seconds(h_, bytes, values, backward) + h_.launch;
  }

 private:
  static number_kind kind_of(dtype of) {
    if (of == dtype::f32) return number_kind::f32;
    if (of == dtype::bf16) return number_kind::bf16;
    fail({"the planner prices products of float and bf16, and the program multiplies in ", name_of(of)});
  }

  const hardware& h_;
  computed_seconds seconds_;
};

}  // namespace plait::planner

#include "plait/core/macros_on.hpp"
