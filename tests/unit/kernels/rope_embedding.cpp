// program: kernels
#include <doctest/doctest.h>

#include <cmath>
#include <complex>
#include <vector>

#include "plait/kernels/kernels.hpp"
#include "support/kernel_support.hpp"

using namespace kernel_support;
using plait::cpu;
namespace kernels = plait::kernels;

TEST_CASE("inverse frequencies, plain and stretched as for Llama 3") {
  const auto plain = kernels::rope_inverse_frequencies(8, 10000.0);
  CHECK(plain.size() == 4);
  CHECK(plain[0] == 1.0);
  CHECK(plain[1] == doctest::Approx(0.1));
  CHECK(plain[3] == doctest::Approx(0.001));

  // Llama 3.1: theta 500000, head_dim 128, factor 8. Wavelengths above 8192 are stretched by eight, those below 2048
  // kept.
  const auto base = kernels::rope_inverse_frequencies(128, 500000.0);
  const auto scaled = kernels::rope_inverse_frequencies(128, 500000.0, kernels::llama3_rope_scaling{8, 1, 4, 8192});
  int kept = 0, blended = 0, stretched = 0;
  for (std::size_t i = 0; i < 64; ++i) {
    const double wavelength = 2 * M_PI / base[i], ratio = scaled[i] / base[i];
    if (wavelength < 2048) {
      CHECK(ratio == 1.0);
      ++kept;
    } else if (wavelength > 8192) {
      CHECK(ratio == 0.125);
      ++stretched;
    } else {
      const double smooth = (8192 / wavelength - 1) / 3;
      CHECK(ratio == doctest::Approx(smooth + (1 - smooth) / 8));
      ++blended;
    }
  }
  CHECK(kept == 29);
  CHECK(blended == 6);
  CHECK(stretched == 29);
  CHECK_THROWS_WITH_AS(kernels::rope_inverse_frequencies(7, 1e4), "rope: head_dim = 7, must be positive and even",
                       plait::error);
  CHECK_THROWS_AS(kernels::rope_inverse_frequencies(8, 0.0), plait::error);
  CHECK_THROWS_AS(kernels::rope_inverse_frequencies(8, 1e4, kernels::llama3_rope_scaling{8, 4, 1, 8192}), plait::error);
}

TEST_CASE_TEMPLATE("rotation is a product of complex numbers, in place in a fused row, and backward undoes it", T,
                   float, double) {
  cpu device;
  const int64_t seq = 6, batch = 2, heads = 3, dim = 10, stride = 50;
  const auto frequencies = kernels::rope_inverse_frequencies(dim, 100.0);
  const std::vector<int64_t> positions{0, 1, 5, 100, 2, 7};  // in any order
  std::vector<T> cosine(static_cast<std::size_t>(seq * dim / 2)), sine(cosine.size());
  kernels::rope_table<T>(device, positions.data(), seq, frequencies, cosine.data(), sine.data());
  const auto x = random_values<T>(batch * seq * stride, 1);
  auto y = x;
  kernels::rope_forward(device, y.data() + 4, stride, y.data() + 4, cosine.data(), sine.data(), batch * seq, heads, dim,
                        stride, seq);
  const double tolerance = sizeof(T) == 4 ? 2e-6 : 1e-14;
  for (int64_t r = 0; r < batch * seq; ++r) {
    for (int64_t c = 0; c < stride; ++c) {
      const auto at = static_cast<std::size_t>(r * stride + c);
      const int64_t inside = c - 4;
      if (inside < 0 || inside >= heads * dim) {
        CHECK(y[at] == x[at]);
      } else if (inside % dim < dim / 2) {
        const std::size_t partner = at + dim / 2;
        const double angle = static_cast<double>(positions[static_cast<std::size_t>(r % seq)]) *
                             frequencies[static_cast<std::size_t>(inside % dim)];
        const auto turned = std::complex<double>(static_cast<double>(x[at]), static_cast<double>(x[partner])) *
                            std::polar(1.0, static_cast<double>(static_cast<T>(angle)));
        CHECK(std::abs(static_cast<double>(y[at]) - turned.real()) < 5 * tolerance);
        CHECK(std::abs(static_cast<double>(y[partner]) - turned.imag()) < 5 * tolerance);
      }
    }
  }
  const int64_t width = heads * dim;
  std::vector<T> packed(static_cast<std::size_t>(batch * seq * width));
  auto z = x;
  kernels::rope_forward(device, x.data() + 4, stride, packed.data(), cosine.data(), sine.data(), batch * seq, heads,
                        dim, width, seq);
  for (int64_t r = 0; r < batch * seq; ++r)
    CHECK(std::equal(packed.begin() + r * width, packed.begin() + (r + 1) * width, y.begin() + r * stride + 4));
  kernels::rope_backward(device, packed.data(), width, z.data() + 4, cosine.data(), sine.data(), batch * seq, heads,
                         dim, stride, seq);
  kernels::rope_backward(device, y.data() + 4, stride, y.data() + 4, cosine.data(), sine.data(), batch * seq, heads,
                         dim, stride, seq);
  CHECK(difference(y, x) < tolerance);
  CHECK(z == y);
}

TEST_CASE_TEMPLATE("embedding over vocabulary ranges sums to the whole", Id, std::int32_t, int64_t) {
  cpu device;
  const int64_t vocab = 11, width = 5, tokens = 40;
  const auto table = random_values<double>(vocab * width, 1), dy = random_values<double>(tokens * width, 2);
  std::vector<Id> ids;
  for (int64_t t = 0; t < tokens; ++t) ids.push_back(static_cast<Id>(t * t % vocab));
  std::vector<double> sum(dy.size()), gradient;
  for (const auto& [first, rows] :
       {std::pair<int64_t, int64_t>{0, 4}, {4, 4}, {8, 4}}) {  // the last has one row of padding
    std::vector<double> part(static_cast<std::size_t>(rows * width), 99.0), y(dy.size()), dpart(part.size());
    for (int64_t i = 0; i < rows * width && first * width + i < vocab * width; ++i) {
      part[static_cast<std::size_t>(i)] = table[static_cast<std::size_t>(first * width + i)];
    }
    kernels::embedding_forward(device, ids.data(), part.data(), y.data(), tokens, width, first, rows, vocab);
    kernels::accumulate(device, y.data(), sum.data(), tokens * width);
    kernels::embedding_backward(device, ids.data(), dy.data(), dpart.data(), tokens, width, first, rows, vocab);
    gradient.insert(gradient.end(), dpart.begin(), dpart.end());
  }
  std::vector<double> expected(gradient.size());
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = 0; c < width; ++c) {
      const auto row = static_cast<int64_t>(ids[static_cast<std::size_t>(t)]);
      CHECK(sum[static_cast<std::size_t>(t * width + c)] == table[static_cast<std::size_t>(row * width + c)]);
      expected[static_cast<std::size_t>(row * width + c)] += dy[static_cast<std::size_t>(t * width + c)];
    }
  }
  CHECK(gradient == expected);
  ids[3] = static_cast<Id>(vocab);
  std::vector<double> y(dy.size());
  CHECK_THROWS_WITH_AS(
      kernels::embedding_forward(device, ids.data(), table.data(), y.data(), tokens, width, 0, vocab, vocab),
      "embedding: token 3 has id 11, legal are 0 to 10", plait::error);
  ids[3] = -1;
  CHECK_THROWS_WITH_AS(
      kernels::embedding_backward(device, ids.data(), dy.data(), y.data(), tokens, width, 0, vocab, vocab),
      "embedding: token 3 has id -1, legal are 0 to 10", plait::error);
}
