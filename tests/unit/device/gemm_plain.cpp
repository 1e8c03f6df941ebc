// program: devices
// Products by plain loops are those of oneDNN and OpenBLAS.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "plait/device/cpu.hpp"
#include "plait/device/gemm_problem.hpp"

using namespace plait;

namespace {

template <class T>
std::vector<T> numbers(std::int64_t count, int seed) {
  std::vector<T> all;
  for (std::int64_t i = 0; i < count; ++i) all.push_back(static_cast<T>((i * 7 + seed) % 13 - 6) / T(4));
  return all;
}

template <class T, class Plain>
void check(Plain&& plain) {
  cpu device;
  for (const bool ta : {false, true})
    for (const bool tb : {false, true})
      for (const T beta : {T(0), T(2)}) {
        const gemm_problem p{ta, tb, 5, 4, 3, (ta ? 5 : 3) + 1, (tb ? 3 : 4) + 2, 4 + 3};
        const std::vector<T> a = numbers<T>(5 * p.lda, 1), b = numbers<T>(4 * p.ldb, 2);
        std::vector<T> c = numbers<T>(5 * p.ldc, 3), expected = c;
        device.gemm(ta, tb, p.m, p.n, p.k, T(0.5), a.data(), p.lda, b.data(), p.ldb, beta, expected.data(), p.ldc);
        plain(p, T(0.5), a.data(), b.data(), beta, c.data());
        CHECK(c == expected);  // of numbers with few bits, so nothing is rounded
      }
}

}  // namespace

TEST_CASE("in float and double") {
  check<float>([](const auto&... arguments) { plain_gemm().run(arguments...); });
  check<double>([](const auto&... arguments) { plain_product(arguments...); });
}

TEST_CASE("bf16 factors, and a result that was not initialised") {
  const bf16 a[2] = {to_bf16(1.5f), to_bf16(-2.0f)}, b[2] = {to_bf16(3.0f), to_bf16(0.25f)};
  float c = NAN;
  plain_gemm().run({false, false, 1, 1, 2, 2, 1, 1}, 2.0f, a, b, 0.0f, &c);
  CHECK(c == 2.0f * (1.5f * 3.0f - 2.0f * 0.25f));
  CHECK_FALSE(plain_gemm::supports_bf16());
}
