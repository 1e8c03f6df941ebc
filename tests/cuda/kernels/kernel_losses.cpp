// program: kernels
// races: *<float>*
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "plait/kernels/cpu/cross_entropy.hpp"
#include "plait/kernels/cuda/kernels.hpp"
#include "plait/kernels/settings.hpp"
#include "support/kernel_support.hpp"

namespace kernel_losses {  // files of one program may have helpers of the same name

using namespace plait::test;
using plait::bf16;
using plait::cuda;
using plait::statistic_of;
using plait::kernels::cross_entropy_settings;
using plait::kernels::vocabulary_range;
using std::int64_t;

struct losses {
  values row_max, sum_exp, loss, dlogits;
};

/// The cpu's losses of rows of `range.columns` logits, the whole vocabulary, and their gradients, where the gradient of
/// row r's loss is scale[r].
losses losses_on_cpu(const values& logits, const std::vector<int64_t>& targets, const values& scale,
                     const vocabulary_range& range, const cross_entropy_settings& settings) {
  plait::cpu device;
  const std::size_t n = targets.size();
  const auto rows = static_cast<int64_t>(n);
  losses made{values(n), values(n), values(n), logits};
  values target(n), sum(n);
  plait::kernels::cross_entropy_local_statistics(device, logits.data(), targets.data(), made.row_max.data(),
                                                 made.sum_exp.data(), target.data(), sum.data(), rows, range, settings);
  plait::kernels::cross_entropy_loss(device, targets.data(), made.row_max.data(), made.sum_exp.data(), target.data(),
                                     sum.data(), made.loss.data(), rows, range, settings);
  plait::kernels::cross_entropy_backward(device, logits.data(), targets.data(), made.row_max.data(),
                                         made.sum_exp.data(), scale.data(), made.dlogits.data(), rows, range, settings);
  return made;
}

struct problem {
  int64_t rows, columns, vocab;  ///< columns of the whole vocabulary, with padding
  int64_t ranks;
};

std::vector<int64_t> targets_of(const problem& p) {
  std::vector<int64_t> targets;
  for (int64_t r = 0; r < p.rows; ++r) targets.push_back(r % 5 == 3 ? -100 : (r * 7919 + p.vocab - 1) % p.vocab);
  return targets;
}

/// The steps of a vocabulary split over ranks, all on one device; the host does the reductions.
template <class T>
void check(const problem& p, const cross_entropy_settings& s, bool one_pass, bool in_place) {
  using S = statistic_of<T>;
  CAPTURE(sizeof(T));
  CAPTURE(p.rows);
  CAPTURE(p.columns);
  CAPTURE(p.vocab);
  CAPTURE(p.ranks);
  CAPTURE(one_pass);
  const values logits = random_values<T>(p.rows * p.columns, 1, 3.0), scale = random_values<S>(p.rows, 2);
  const std::vector<int64_t> targets = targets_of(p);
  const losses expected = losses_on_cpu(logits, targets, scale, {p.columns, 0, p.vocab}, s);

  cuda device;
  device_array<int64_t> ids(device, targets);
  const int64_t width = p.columns / p.ranks;
  values row_max(targets.size(), -std::numeric_limits<double>::infinity()), sums(3 * targets.size());
  std::vector<values> local_max(static_cast<std::size_t>(p.ranks)), local_sums = local_max;
  const auto range_of = [&](int64_t rank) { return vocabulary_range{width, rank * width, p.vocab}; };
  const auto logits_of = [&](int64_t rank) {  // rows that do not start on a 16-byte boundary
    return number_array<T>(device, kernel_support::columns_of(logits, p.columns, rank * width, width), 1);
  };
  for (int64_t rank = 0; rank < p.ranks; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    auto x = logits_of(rank);
    number_array<S> maximum(device, p.rows), made(device, 3 * p.rows);
    if (one_pass) {
      plait::kernels::cross_entropy_local_statistics(device, x.view(), ids.data(), maximum.data(), made.data(),
                                                     made.data() + p.rows, made.data() + 2 * p.rows, p.rows,
                                                     range_of(rank), s);
    } else {
      plait::kernels::cross_entropy_max(device, x.view(), maximum.data(), p.rows, range_of(rank));
    }
    local_max[at] = maximum.read();
    local_sums[at] = made.read();
    for (std::size_t r = 0; r < row_max.size(); ++r) row_max[r] = std::fmax(row_max[r], local_max[at][r]);
  }
  number_array<S> global_max(device, row_max);
  for (int64_t rank = 0; rank < p.ranks; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    number_array<S> made(device, local_sums[at]), maximum(device, local_max[at]);
    if (one_pass) {
      plait::kernels::cross_entropy_rescale<S>(device, maximum.data(), global_max.data(), made.data(), p.rows);
    } else {
      auto x = logits_of(rank);
      plait::kernels::cross_entropy_statistics(device, x.view(), ids.data(), global_max.data(), made.data(),
                                               made.data() + p.rows, made.data() + 2 * p.rows, p.rows, range_of(rank),
                                               s);
    }
    const values share = made.read();
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += share[i];
  }
  const double exact = std::fmin(tolerance<T>, 1e-5);  // statistics of bf16 are float
  CHECK(difference(row_max, expected.row_max) == 0);
  CHECK(difference(values(sums.begin(), sums.begin() + p.rows), expected.sum_exp) < exact);

  number_array<S> made(device, sums), loss(device, p.rows), factor(device, scale);
  const S* const sum_logits = s.label_smoothing != 0 ? made.data() + 2 * p.rows : nullptr;
  plait::kernels::cross_entropy_loss<S>(device, ids.data(), global_max.data(), made.data(), made.data() + p.rows,
                                        sum_logits, loss.data(), p.rows, range_of(0), s);
  CHECK(difference(loss.read(), expected.loss) < exact);
  for (int64_t rank = 0; rank < p.ranks; ++rank) {
    auto x = logits_of(rank);
    number_array<T> elsewhere(device, values(static_cast<std::size_t>(p.rows * width), 7.0), 2);
    auto& d = in_place ? x : elsewhere;
    plait::kernels::cross_entropy_backward(device, x.view(), ids.data(), global_max.data(), made.data(), factor.data(),
                                           d.data(), p.rows, range_of(rank), s);
    CHECK(difference(d.read(), kernel_support::columns_of(expected.dlogits, p.columns, rank * width, width)) <
          tolerance<T>);
  }
  device.synchronize();
}

TEST_CASE_TEMPLATE("cross entropy equals the processor's for whole, split and padded vocabularies", T, float, double,
                   bf16) {
  const problem problems[] = {{0, 16, 16, 1},   {1, 1, 1, 1},    {5, 101, 101, 1},   {7, 128, 128, 1},
                              {6, 112, 101, 2}, {6, 112, 90, 7}, {3, 5003, 4999, 1}, {2, 9000, 8999, 2}};
  for (const problem& p : problems) {
    check<T>(p, {}, true, true);
    check<T>(p, {}, false, false);
  }
}

TEST_CASE_TEMPLATE("label smoothing and the loss on the normaliser equal the processor's", T, float, double, bf16) {
  for (const cross_entropy_settings s : {cross_entropy_settings{-100, 0.1, 0.0}, {-100, 0.0, 0.02}, {-1, 0.2, 0.05}}) {
    cross_entropy_settings ignoring = s;
    ignoring.ignore_index = -100;
    check<T>({9, 80, 75, 2}, ignoring, true, false);
    check<T>({9, 75, 75, 1}, ignoring, false, true);
    check<T>({3, 8200, 8199, 1}, ignoring, true, true);  // several vectors for each thread
  }
}

TEST_CASE("losses have the same bits in every run") {
  const problem p{6, 3001, 3001, 1};
  cuda device;
  device_array<int64_t> ids(device, targets_of(p));
  number_array<float> x(device, random_values<float>(p.rows * p.columns, 3));
  std::vector<float> first, first_gradient;
  for (int run = 0; run < 3; ++run) {
    number_array<float> made(device, 4 * p.rows), ones(device, values(6, 1.0)), d(device, p.rows * p.columns);
    float* const m = made.data();
    plait::kernels::cross_entropy_local_statistics(device, x.view(), ids.data(), m, m + 6, m + 12, m + 18, p.rows,
                                                   {p.columns, 0, p.vocab}, {});
    plait::kernels::cross_entropy_backward(device, x.view(), ids.data(), m, m + 6, ones.data(), d.data(), p.rows,
                                           {p.columns, 0, p.vocab}, {});
    if (run == 0) {
      first = made.raw();
      first_gradient = d.raw();
    }
    CHECK(plait::test::same_bits(first, made.raw()));
    CHECK(plait::test::same_bits(first_gradient, d.raw()));
  }
}

TEST_CASE("masked logits of minus infinity contribute nothing") {
  cuda device;
  const double none = -std::numeric_limits<double>::infinity();
  values logits(600, none);
  logits[511] = 2.0;
  logits[3] = 1.0;
  number_array<float> x(device, logits), made(device, 4);
  device_array<int64_t> ids(device, std::vector<int64_t>{3});
  float* const m = made.data();
  plait::kernels::cross_entropy_local_statistics(device, x.view(), ids.data(), m, m + 1, m + 2, m + 3, 1, {600, 0, 600},
                                                 {});
  const values got = made.read();
  CHECK(got[0] == 2.0);
  CHECK(got[1] == doctest::Approx(1 + std::exp(-1.0)));
  CHECK(got[2] == 1.0);
}

TEST_CASE("a NaN logit gives a NaN loss") {
  cuda device;
  for (const std::size_t at : {0, 5, 4500}) {
    values logits(4600, at == 0 ? -std::numeric_limits<double>::infinity() : 1.0);
    logits[at] = std::numeric_limits<double>::quiet_NaN();
    logits[7] = 2.0;
    number_array<float> x(device, logits), made(device, 4), loss(device, 1);
    device_array<int64_t> ids(device, std::vector<int64_t>{7});
    float* const m = made.data();
    plait::kernels::cross_entropy_local_statistics(device, x.view(), ids.data(), m, m + 1, m + 2, m + 3, 1,
                                                   {4600, 0, 4600}, {});
    plait::kernels::cross_entropy_loss<float>(device, ids.data(), m, m + 1, m + 2, nullptr, loss.data(), 1,
                                              {4600, 0, 4600}, {});
    CHECK(std::isnan(loss.read()[0]));
  }
}

TEST_CASE("a target outside the vocabulary is reported when the host waits for the device") {
  cuda device;
  number_array<float> x(device, values(40)), made(device, 16);
  device_array<int64_t> ids(device, std::vector<int64_t>{1, 9, -100, 10});
  float* const m = made.data();
  plait::kernels::cross_entropy_local_statistics<float>(device, x.view(), ids.data(), m, m + 4, m + 8, nullptr, 4,
                                                        {10, 0, 10}, {});
  const char* const text = "cross_entropy: row 3 has target 10, legal are 0 to 9 and ignore_index";
  CHECK_THROWS_WITH_AS(device.synchronize(), text, plait::error);
  device.synchronize();  // a fault is reported once
  plait::kernels::cross_entropy_loss<float>(device, ids.data(), m, m + 4, m + 8, nullptr, m + 12, 4, {10, 0, 10}, {});
  CHECK(made.read()[15] == 0.0);
  CHECK_THROWS_WITH_AS(device.synchronize(), text, plait::error);
  number_array<float> d(device, 40);
  plait::kernels::cross_entropy_backward(device, x.view(), ids.data(), m, m + 4, m + 12, d.data(), 4, {10, 0, 10}, {});
  CHECK_THROWS_WITH_AS(device.synchronize(), text, plait::error);
  CHECK_THROWS_WITH_AS(plait::kernels::cross_entropy_loss<float>(device, ids.data(), m, m + 4, m + 8, nullptr, m + 12,
                                                                 4, {10, 0, 10}, {-100, 0.1, 0.0}),
                       "cross_entropy_loss: label_smoothing needs sum_logits", plait::error);
}

}  // namespace kernel_losses
