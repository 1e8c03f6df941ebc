// program: kernels
// Moments and values that are rounded to save memory: their codes, the mean of roundings, and AdamW's step with them.
#include "plait/kernels/moments.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "plait/kernels/kernels.hpp"
#include "support/kernel_support.hpp"

using namespace kernel_support;
using plait::bf16;
using plait::box;
using plait::cpu;
namespace kernels = plait::kernels;
using kernels::first_moment;
using kernels::first_moment_code;
using kernels::second_moment;
using kernels::second_moment_code;

namespace {

std::uint8_t as_code(int code) { return static_cast<std::uint8_t>(code); }

/// The mean of `round`'s results for each of the 65536 random numbers.
template <class Round>
double mean_of(Round&& round) {
  double sum = 0;
  for (std::uint32_t random = 0; random < 65536; ++random) sum += static_cast<double>(round(random));
  return sum / 65536;
}

/// A tensor of floats whose moments have type S.
template <class S>
struct kept_tensor {
  std::vector<float> master;
  std::vector<bf16> weight;
  std::vector<S> m, v;
  std::vector<std::uint8_t> m_scales, v_scales;
  explicit kept_tensor(const std::vector<float>& start)
      : master(start),
        weight(start.size()),
        m(start.size()),
        v(start.size()),
        m_scales(start.size() / 256 + 2),
        v_scales(start.size() / 256 + 2) {}

  /// Elements `from` to `to` of the tensor, whose first element is at index `begin` of a block.
  kernels::adamw_rounded_tensor<float, float, bf16, S> part(const std::vector<float>& gradient, std::size_t from,
                                                            std::size_t to, std::int64_t begin) {
    const auto place = static_cast<std::int64_t>(from) + begin;
    const box whole{1, {static_cast<std::int64_t>(master.size())}, {0}, {static_cast<std::int64_t>(master.size())}};
    return {master.data() + from,
            gradient.data() + from,
            m.data() + from,
            v.data() + from,
            m_scales.data() + place / 256,
            v_scales.data() + place / 256,
            weight.data() + from,
            static_cast<std::int64_t>(to - from),
            place % 256,
            0.1,
            {kernels::run_map::of(whole), static_cast<std::int64_t>(from), 77}};
  }
  double first(std::size_t i, std::int64_t begin) const {
    if constexpr (std::is_same_v<S, bf16>)
      return plait::to_float(m[i]);
    else
      return first_moment(m[i], m_scales[(i + static_cast<std::size_t>(begin)) / 256]);
  }
  double second(std::size_t i, std::int64_t begin) const {
    if constexpr (std::is_same_v<S, bf16>)
      return plait::to_float(v[i]);
    else
      return second_moment(v[i], v_scales[(i + static_cast<std::size_t>(begin)) / 256]);
  }
};

kernels::adamw_settings some_settings() { return {0.9, 0.95, 1e-8}; }

/// Steps with gradients of magnitudes from 1 down to 1/100 in each block; the parts end at `cuts`.
template <class S>
kept_tensor<S> trained(std::size_t n, const std::vector<std::size_t>& cuts, std::int64_t begin, std::int64_t steps,
                       std::uint64_t seed = 5) {
  cpu device;
  kept_tensor<S> t(random_values<float>(static_cast<int64_t>(n), 3));
  const kernels::adamw_settings s = some_settings();
  for (std::int64_t step = 1; step <= steps; ++step) {
    std::vector<float> g = random_values<float>(static_cast<int64_t>(n), static_cast<unsigned>(step + 10));
    for (std::size_t i = 0; i < n; ++i) g[i] *= std::pow(0.1f, static_cast<float>(i % 3));
    const auto scalars = kernels::adamw_scalars_of(s, 0.01, step, 0.5, seed);
    std::vector<kernels::adamw_rounded_tensor<float, float, bf16, S>> parts;
    std::size_t from = 0;
    for (const std::size_t to : cuts) {
      parts.push_back(t.part(g, from, to, begin));
      from = to;
    }
    kernels::adamw_update(device, std::span<const kernels::adamw_rounded_tensor<float, float, bf16, S>>(parts), s,
                          &scalars);
  }
  return t;
}

/// The same steps with moments in float.
std::vector<float> trained_in_full(std::size_t n, std::int64_t steps, std::vector<float>& m, std::vector<float>& v) {
  cpu device;
  auto master = random_values<float>(static_cast<int64_t>(n), 3);
  m.assign(n, 0), v.assign(n, 0);
  const kernels::adamw_settings s = some_settings();
  for (std::int64_t step = 1; step <= steps; ++step) {
    std::vector<float> g = random_values<float>(static_cast<int64_t>(n), static_cast<unsigned>(step + 10));
    for (std::size_t i = 0; i < n; ++i) g[i] *= std::pow(0.1f, static_cast<float>(i % 3));
    const auto scalars = kernels::adamw_scalars_of(s, 0.01, step, 0.5);
    const kernels::adamw_tensor<float, float, bf16> one{
        master.data(), g.data(), m.data(), v.data(), nullptr, static_cast<std::int64_t>(n), 0.1};
    kernels::adamw_update(device, std::span<const kernels::adamw_tensor<float, float, bf16>>(&one, 1), s, &scalars);
  }
  return master;
}

}  // namespace

TEST_CASE("every code of a moment is stable under any random bits, and a larger scale loses nothing") {
  for (const int scale : {32, 33, 90, 127, 200, 255})
    for (int code = 0; code < 256; ++code)
      for (const std::uint32_t random : {0u, 1u, 0x8000u, 0xFFFFu}) {
        const std::uint8_t s = as_code(scale), c = as_code(code);
        CAPTURE(scale);
        CAPTURE(code);
        if (code != 0x80) CHECK(first_moment_code(first_moment(c, s), s, random) == c);  // there is only one zero
        if (scale < 255) CHECK(second_moment_code(second_moment(c, s), s, random) == c);
        if (scale < 254 && (code & 0x7F) >= 16)
          CHECK(first_moment(first_moment_code(first_moment(c, s), as_code(scale + 1), random), as_code(scale + 1)) ==
                first_moment(c, s));
      }
  for (int code = 1; code < 0x80; ++code)
    CHECK(first_moment(as_code(code), 127) > first_moment(as_code(code - 1), 127));
  for (int code = 1; code < 0x100; ++code)
    CHECK(second_moment(as_code(code), 127) > second_moment(as_code(code - 1), 127));
  CHECK(first_moment(1, 127) == 0x1p-17f);
  CHECK(first_moment(0xFF, 127) == -1.875f);
  CHECK(second_moment(0, 127) == 0x1p-31f);
  CHECK(second_moment(255, 127) == 1.875f);
}

TEST_CASE("a block's largest moment fits its scale, and blocks of tiny numbers are zero") {
  for (const float most : {1.0f, 1.5f, 1.874f, 1.875f, 1.8750001f, 1.9999999f, 3e-7f, 1e30f}) {
    const std::uint8_t scale = kernels::moment_scale(most);
    for (const std::uint32_t random : {0u, 0xFFFFu}) {
      CHECK(std::abs(first_moment(first_moment_code(most, scale, random), scale) - most) <= most / 8);
      CHECK(std::abs(second_moment(second_moment_code(most, scale, random), scale) - most) <= most / 8);
    }
  }
  for (const float most : {0.0f, 1e-38f, 1e-30f}) {
    CHECK(kernels::moment_scale(most) == 0);
    CHECK(first_moment(first_moment_code(-most, 0, 0xFFFF), 0) == 0);
    CHECK(second_moment(second_moment_code(most, 0, 0xFFFF), 0) == 0);
  }
}

TEST_CASE("the mean of roundings is the rounded number") {
  for (const float x : {1.0f, 1.3f, -0.7f, 0.0123f, -3e-4f, 2e-6f, 1e-7f}) {
    CAPTURE(x);
    const double exact = x, bound = 1e-5 * std::abs(exact) + 1e-9;  // 16 bits of a step of 1/8
    CHECK(std::abs(mean_of([&](std::uint32_t r) { return first_moment(first_moment_code(x, 127, r), 127); }) - exact) <
          bound);
    const float square = x * x;
    if (square > 0x1p-31f)
      CHECK(std::abs(mean_of([&](std::uint32_t r) { return second_moment(second_moment_code(square, 127, r), 127); }) -
                     square) < 1e-5 * square);
    CHECK(mean_of([&](std::uint32_t r) { return plait::to_float(kernels::to_bf16_stochastically(x, r)); }) == exact);
  }
  CHECK(second_moment(second_moment_code(1e-12f, 127, 0xFFFF), 127) == 0x1p-31f);  // never zero
  const float infinite = std::numeric_limits<float>::infinity(), none = std::numeric_limits<float>::quiet_NaN();
  for (const std::uint32_t random : {0u, 0xFFFFu}) {
    CHECK(plait::to_float(kernels::to_bf16_stochastically(-infinite, random)) == -infinite);
    CHECK(std::isnan(plait::to_float(kernels::to_bf16_stochastically(none, random))));
    CHECK(plait::to_float(kernels::to_bf16_stochastically(-1.5f, random)) == -1.5f);
  }
}

TEST_CASE_TEMPLATE("adamw with rounded moments is near the one with floats", S, bf16, std::uint8_t) {
  constexpr std::size_t n = 1000;
  std::vector<float> m, v;
  CHECK(trained<S>(n, {n}, 0, 1).master == trained_in_full(n, 1, m, v));  // the first step rounds only its results
  const auto exact = trained_in_full(n, 20, m, v);
  const kept_tensor<S> t = trained<S>(n, {n}, 0, 20);
  double m_error = 0, v_error = 0, moved = 0, error = 0;
  const auto start = random_values<float>(n, 3);
  for (std::size_t i = 0; i < n; ++i) {
    m_error += std::pow(t.first(i, 0) - m[i], 2) / v[i] / n;
    v_error += std::pow(t.second(i, 0) / v[i] - 1, 2) / n;
    moved += std::pow(exact[i] - start[i], 2);
    error += std::pow(t.master[i] - exact[i], 2);
    CHECK(t.weight[i].bits == plait::to_bf16(t.master[i]).bits);
  }
  const double step = std::is_same_v<S, bf16> ? 0.04 / 16 : 0.04;  // bf16 has 4 more bits
  CHECK(std::sqrt(m_error) < step);
  CHECK(std::sqrt(m_error) > 0.1 * step);
  CHECK(std::sqrt(v_error) < 4 * step);
  CHECK(std::sqrt(v_error) > 0.4 * step);
  CHECK(std::sqrt(error / moved) < 2 * step);
}

TEST_CASE_TEMPLATE("pieces that end at blocks have the bits of the whole", S, bf16, std::uint8_t) {
  for (const std::int64_t begin : {0, 100}) {
    const auto at = [&](std::size_t blocks) { return 256 * blocks - static_cast<std::size_t>(begin); };
    const kept_tensor<S> whole = trained<S>(1000, {1000}, begin, 3),
                         pieces = trained<S>(1000, {at(1), at(3), 1000}, begin, 3);
    const auto bits = [](const std::vector<S>& x) {
      const auto* const p = reinterpret_cast<const unsigned char*>(x.data());
      return std::vector<unsigned char>(p, p + x.size() * sizeof(S));
    };
    CHECK(whole.master == pieces.master);
    CHECK(bits(whole.m) == bits(pieces.m));
    CHECK(bits(whole.v) == bits(pieces.v));
    CHECK(whole.m_scales == pieces.m_scales);
    CHECK(whole.v_scales == pieces.v_scales);
    const kept_tensor<S> other = trained<S>(1000, {1000}, begin, 3, 6);
    CHECK(bits(whole.m) != bits(other.m));  // another seed
  }
}

TEST_CASE_TEMPLATE("values in bf16 change on average by steps that rounding to nearest would lose", S, float, bf16,
                   std::uint8_t) {
  cpu device;
  constexpr std::int64_t n = 8192;
  const kernels::adamw_settings s = some_settings();
  std::vector<bf16> value(n, plait::to_bf16(1.0f));
  std::vector<float> g(n, 0.5f);
  std::vector<S> m(n), v(n);
  std::vector<std::uint8_t> m_scales(n / 256), v_scales(n / 256);
  const box whole{2, {64, 128}, {0, 0}, {64, 128}};
  for (std::int64_t step = 1; step <= 50; ++step) {
    const auto scalars = kernels::adamw_scalars_of(s, 1e-4, step, 1.0, 9);
    const kernels::adamw_rounded_tensor<bf16, float, bf16, S> one{value.data(),
                                                                  g.data(),
                                                                  m.data(),
                                                                  v.data(),
                                                                  m_scales.data(),
                                                                  v_scales.data(),
                                                                  nullptr,
                                                                  n,
                                                                  0,
                                                                  0.0,
                                                                  {kernels::run_map::of(whole), 0, 3}};
    kernels::adamw_update(device, std::span(&one, 1), s, &scalars);
  }
  double mean = 0, squares = 0;
  for (const bf16 x : value) mean += plait::to_float(x) / n;
  for (const bf16 x : value) squares += std::pow(plait::to_float(x) - mean, 2) / n;
  // 50 steps of 1e-4; bf16 below 1 are 2^-8 apart. A mean's deviation is about 0.00005.
  CHECK(std::abs(mean - (1 - 50e-4)) < 2.5e-4);
  CHECK(squares > 1e-6);
}

TEST_CASE_TEMPLATE("moments decay at 0.999 as they should", S, bf16, std::uint8_t) {
  cpu device;
  constexpr std::size_t n = 4096;
  const kernels::adamw_settings s{0.9, 0.999, 1e-8};
  kept_tensor<S> t(std::vector<float>(n, 1.0f));
  std::vector<float> g(n, 1.0f);
  for (std::int64_t step = 1; step <= 301; ++step) {
    auto scalars = kernels::adamw_scalars_of(s, 0.0, step, 1.0, 9);
    const auto one = t.part(g, 0, n, 0);
    kernels::adamw_update(device, std::span(&one, 1), s, &scalars);
    std::fill(g.begin(), g.end(), 0.0f);
  }
  double mean = 0;
  for (std::size_t i = 0; i < n; ++i) mean += t.second(i, 0) / n;
  // 0.001 * 0.999^300. With rounding to the nearest bf16, nothing would change after the first step.
  CHECK(std::abs(mean / (0.001 * std::pow(0.999, 300)) - 1) < (std::is_same_v<S, bf16> ? 0.01 : 0.05));
}
