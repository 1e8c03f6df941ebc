// program: files
#include "plait/parallel/optim/lr_schedule.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "support/temp_folder.hpp"

using doctest::Approx;
using plait::lr_decay;
using plait::lr_schedule;

TEST_CASE("cosine: linear warm-up, the peak, half way down, the floor at the last step") {
  const lr_schedule lr({.peak = 2.0, .steps = 110, .warmup_steps = 10, .min_ratio = 0.1});
  CHECK(lr.at(0) == Approx(0.2));
  CHECK(lr.at(4) == Approx(1.0));
  CHECK(lr.at(9) == 2.0);
  CHECK(lr.at(59) == Approx(1.1));
  CHECK(lr.at(34) == Approx(0.2 + 1.8 * (1 + std::cos(std::acos(-1.0) / 4)) / 2));
  CHECK(lr.at(109) == Approx(0.2));
  CHECK(lr.at(100000) == Approx(0.2));
  for (int s = 10; s < 109; ++s) CHECK(lr.at(s + 1) < lr.at(s));
}

TEST_CASE("linear and constant") {
  const lr_schedule linear({.peak = 1.0, .steps = 12, .warmup_steps = 2, .min_ratio = 0.5, .decay = lr_decay::linear});
  CHECK(linear.at(1) == 1.0);
  CHECK(linear.at(6) == Approx(0.75));
  CHECK(linear.at(11) == Approx(0.5));
  const lr_schedule constant({.peak = 1.0, .steps = 12, .warmup_steps = 4, .decay = lr_decay::constant});
  CHECK(constant.at(0) == 0.25);
  CHECK(constant.at(3) == 1.0);
  CHECK(constant.at(99) == 1.0);
}

TEST_CASE("edges: no warm-up, only warm-up, one step") {
  CHECK(lr_schedule({.peak = 1.0, .steps = 4, .min_ratio = 0, .decay = lr_decay::linear}).at(0) == 0.75);
  const lr_schedule warm({.peak = 1.0, .steps = 4, .warmup_steps = 4, .min_ratio = 0.1});
  CHECK(warm.at(3) == 1.0);
  CHECK(warm.at(4) == Approx(0.1));
  CHECK(lr_schedule({.peak = 1.0, .steps = 1, .min_ratio = 0.25}).at(0) == 0.25);
}

TEST_CASE("each field is refused by name") {
  CHECK_ERROR(lr_schedule({.peak = 0}), "peak", "positive");
  CHECK_ERROR(lr_schedule({.peak = -1}), "peak");
  CHECK_ERROR(lr_schedule({.peak = std::numeric_limits<double>::quiet_NaN()}), "peak");
  CHECK_ERROR(lr_schedule({.peak = std::numeric_limits<double>::infinity()}), "peak");
  CHECK_ERROR(lr_schedule({.steps = 0}), "steps", "0 steps");
  CHECK_ERROR(lr_schedule({.steps = 10, .warmup_steps = 11}), "warmup_steps", "11", "0 to 10", "steps");
  CHECK_ERROR(lr_schedule({.steps = 10, .warmup_steps = -1}), "warmup_steps", "-1");
  CHECK_ERROR(lr_schedule({.min_ratio = 1.5}), "min_ratio", "1.5");
  CHECK_ERROR(lr_schedule({.min_ratio = std::nan("")}), "min_ratio");
  CHECK_ERROR(lr_schedule({.steps = 1}).at(-1), "step -1");
  CHECK(plait::lr_decay_from("cosine") == lr_decay::cosine);
  CHECK_ERROR(plait::lr_decay_from("step"), "decay", "'step'", "constant, linear, cosine");
}
