// program: kernels
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "plait/kernels/kernels.hpp"
#include "support/kernel_support.hpp"

using namespace kernel_support;
using plait::cpu;
namespace kernels = plait::kernels;
using kernels::cross_entropy_settings;
using kernels::vocabulary_range;

namespace {

/// The weighted sum of the losses of all rows, by the definition; logits are [rows, vocab].
double reference(const std::vector<double>& x, const std::vector<int64_t>& targets, const std::vector<double>& weights,
                 int64_t vocab, const cross_entropy_settings& s) {
  double total = 0;
  for (std::size_t r = 0; r < targets.size(); ++r) {
    if (targets[r] == s.ignore_index) continue;
    const double* row = x.data() + r * static_cast<std::size_t>(vocab);
    double sum = 0, mean = 0;
    for (int64_t c = 0; c < vocab; ++c) {
      sum += std::exp(row[c]);
      mean += row[c] / static_cast<double>(vocab);
    }
    const double lse = std::log(sum);
    total += weights[r] * ((1 - s.label_smoothing) * (lse - row[targets[r]]) + s.label_smoothing * (lse - mean) +
                           s.z_loss * lse * lse);
  }
  return total;
}

struct result {
  double loss = 0;
  std::vector<double> gradient;  ///< [rows, vocab], without padding
  double padding_gradient = 0;
};

/// Calls the kernels over a vocabulary split into ranges of the given width (the last has padding, some may be padding
/// only), and reduces their results. `one_pass` computes the statistics relative to the local maximum.
template <class T>
result sharded(cpu& device, const std::vector<double>& x, const std::vector<int64_t>& targets,
               const std::vector<double>& weights, int64_t vocab, int64_t width, int64_t ranks,
               const cross_entropy_settings& s, bool one_pass) {
  const auto rows = static_cast<int64_t>(targets.size());
  const std::size_t n = targets.size();
  std::vector<std::vector<T>> logits(static_cast<std::size_t>(ranks));
  std::vector<std::vector<T>> local_max(logits.size(), std::vector<T>(n)), local_sum = local_max;
  std::vector<T> maximum(n, -std::numeric_limits<T>::infinity()), sum_exp(n), target_logit(n), sum_logits(n), a(n),
      b(n), c(n);
  const auto range_of = [&](int64_t rank) { return vocabulary_range{width, rank * width, vocab}; };
  for (int64_t rank = 0; rank < ranks; ++rank) {
    auto& mine = logits[static_cast<std::size_t>(rank)];
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t col = rank * width; col < (rank + 1) * width; ++col) {
        mine.push_back(col < vocab ? static_cast<T>(x[static_cast<std::size_t>(r * vocab + col)])
                                   : T(1e30));  // padding must have no effect
      }
    }
    const auto i = static_cast<std::size_t>(rank);
    if (one_pass) {
      kernels::cross_entropy_local_statistics(device, mine.data(), targets.data(), local_max[i].data(),
                                              local_sum[i].data(), b.data(), c.data(), rows, range_of(rank), s);
      kernels::accumulate(device, b.data(), target_logit.data(), rows);
      kernels::accumulate(device, c.data(), sum_logits.data(), rows);
    } else {
      kernels::cross_entropy_max(device, mine.data(), local_max[i].data(), rows, range_of(rank));
    }
    for (std::size_t r = 0; r < n; ++r) maximum[r] = std::max(maximum[r], local_max[i][r]);
  }
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto i = static_cast<std::size_t>(rank);
    if (one_pass) {
      kernels::cross_entropy_rescale(device, local_max[i].data(), maximum.data(), local_sum[i].data(), rows);
      kernels::accumulate(device, local_sum[i].data(), sum_exp.data(), rows);
    } else {
      kernels::cross_entropy_statistics(device, logits[i].data(), targets.data(), maximum.data(), a.data(), b.data(),
                                        c.data(), rows, range_of(rank), s);
      kernels::accumulate(device, a.data(), sum_exp.data(), rows);
      kernels::accumulate(device, b.data(), target_logit.data(), rows);
      kernels::accumulate(device, c.data(), sum_logits.data(), rows);
    }
  }
  result out;
  std::vector<T> loss(n);
  kernels::cross_entropy_loss(device, targets.data(), maximum.data(), sum_exp.data(), target_logit.data(),
                              sum_logits.data(), loss.data(), rows, range_of(0), s);
  for (std::size_t r = 0; r < n; ++r) out.loss += weights[r] * static_cast<double>(loss[r]);
  const std::vector<T> scale(weights.begin(), weights.end());
  out.gradient.assign(x.size(), 0.0);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    auto& mine = logits[static_cast<std::size_t>(rank)];
    kernels::cross_entropy_backward(device, mine.data(), targets.data(), maximum.data(), sum_exp.data(), scale.data(),
                                    mine.data(), rows, range_of(rank), s);  // in place
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t col = 0; col < width; ++col) {
        const auto value = static_cast<double>(mine[static_cast<std::size_t>(r * width + col)]);
        const int64_t global = rank * width + col;
        if (global < vocab)
          out.gradient[static_cast<std::size_t>(r * vocab + global)] = value;
        else
          out.padding_gradient += std::abs(value);
      }
    }
  }
  return out;
}

}  // namespace

TEST_CASE("cross entropy on any split equals the definition, with smoothing, z-loss, padding and ignored rows") {
  cpu device;
  const int64_t rows = 6, vocab = 29;
  const auto x = random_values<double>(rows * vocab, 1, 3.0);
  const std::vector<int64_t> targets{0, 28, -100, 15, 14, 7};
  const std::vector<double> weights{1.0, 0.5, 3.0, 2.0, 1.0, 0.25};
  for (const double smoothing : {0.0, 0.1}) {
    for (const double z : {0.0, 0.01}) {
      const cross_entropy_settings s{-100, smoothing, z};
      const auto f = [&](const std::vector<double>& in) { return reference(in, targets, weights, vocab, s); };
      const double expected = f(x);
      const auto gradient = numeric_gradient(x, f);
      for (const auto& [width, ranks] : {std::pair<int64_t, int64_t>{29, 1}, {32, 1}, {15, 2}, {8, 4}, {16, 3}}) {
        for (const bool one_pass : {false, true}) {
          CAPTURE(width);
          CAPTURE(smoothing);
          CAPTURE(z);
          CAPTURE(one_pass);
          const result d = sharded<double>(device, x, targets, weights, vocab, width, ranks, s, one_pass);
          CHECK(d.loss == doctest::Approx(expected).epsilon(1e-13));
          CHECK(difference(d.gradient, gradient) < 1e-8);
          CHECK(d.padding_gradient == 0.0);
          const result f32 = sharded<float>(device, x, targets, weights, vocab, width, ranks, s, one_pass);
          CHECK(f32.loss == doctest::Approx(expected).epsilon(1e-6));
          CHECK(difference(f32.gradient, d.gradient) < 1e-6);
          CHECK(f32.padding_gradient == 0.0);
        }
      }
    }
  }
}

TEST_CASE("large logits do not overflow and a large vocabulary keeps its digits") {
  cpu device;
  const int64_t vocab = 32000;
  auto x = random_values<double>(2 * vocab, 3);
  for (auto& v : x) v += 500;
  const std::vector<int64_t> targets{31999, 5};
  const cross_entropy_settings s;
  const result whole = sharded<float>(device, x, targets, {1, 1}, vocab, vocab, 1, s, false);
  const result split = sharded<float>(device, x, targets, {1, 1}, vocab, vocab / 4, 4, s, true);
  const result exact = sharded<double>(device, x, targets, {1, 1}, vocab, vocab, 1, s, false);
  CHECK(std::abs(whole.loss / exact.loss - 1) < 5e-6);  // logits of 500 have a rounding error of 6e-5
  CHECK(std::abs(split.loss / whole.loss - 1) < 1e-6);
  CHECK(difference(split.gradient, whole.gradient) < 1e-6);
}

TEST_CASE("a target outside the vocabulary is an error that names it") {
  cpu device;
  const std::vector<float> x(8);
  const std::vector<std::int32_t> targets{3, 4};
  float a[2] = {}, b[2], c[2];
  CHECK_THROWS_WITH_AS(
      kernels::cross_entropy_statistics(device, x.data(), targets.data(), a, b, c, static_cast<float*>(nullptr), 2,
                                        vocabulary_range{4, 0, 4}, {}),
      "cross_entropy: row 1 has target 4, legal are 0 to 3 and ignore_index = -100", plait::error);
  CHECK_THROWS_WITH_AS(kernels::cross_entropy_loss(device, targets.data(), a, b, c, static_cast<float*>(nullptr), a, 1,
                                                   vocabulary_range{4, 0, 4}, {-100, 0.1, 0.0}),
                       "cross_entropy_loss: label_smoothing needs sum_logits", plait::error);
}
