// The algorithms of products: measured, kept as text, used by all ranks alike; and measuring changes no result.
#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "plait/comm/threads/cuda.hpp"
#include "plait/device/buffer.hpp"
#include "plait/train/product_tuning.hpp"

using namespace plait;

namespace {

const cuda::options small{.workspace_bytes = 2 << 20};

/// A product of m x 24 and 24 x 16 numbers, added to a C of ones.
struct product {
  cuda& device;
  std::int64_t m;
  std::int64_t n = 16, k = 24;
  buffer<cuda> a = filled(m * k, 0.25f), b = filled(k * n, 0.5f), c = filled(m * n, 1.0f);

  buffer<cuda> filled(std::int64_t count, float step) const {
    std::vector<float> numbers(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = step * static_cast<float>(i % 7);
    auto out = make_buffer<float>(device, numbers.size());
    device.upload(out.data(), numbers.data(), out.bytes(), device.main_stream());
    return out;
  }
  std::vector<float> run() {
    device.gemm(false, false, m, n, k, 1.0, a.data<float>(), k, b.data<float>(), n, 1.0, c.data<float>(), n);
    std::vector<float> out(static_cast<std::size_t>(m * n));
    device.download(out.data(), c.data(), c.bytes(), device.main_stream());
    return out;
  }
};

std::vector<float> expected(std::int64_t m) {
  cuda device(small);
  return product{device, m}.run();
}

}  // namespace

TEST_CASE("a product is measured when it is met, and computed as before") {
  const std::vector<float> plain = expected(8);
  cuda device(small);
  device.measure_products(16);
  product p{device, 8};
  CHECK(p.run() == plain);
  CHECK(device.products().size() == 1);
  CHECK(p.run() != plain);  // C has grown
  CHECK(device.products().size() == 1);
  product{device, 9}.run();
  CHECK(device.products().size() == 2);

  // The text is all that another process needs.
  const std::string text = device.products().text();
  const product_choices read = product_choices::parse(text, "products.txt");
  CHECK(read.text() == text);
  cuda other(small);
  other.use_products(read);
  CHECK(other.products().text() == text);
  CHECK(product{other, 8}.run().size() == plain.size());
}

TEST_CASE("a product that sums a factor's rows is chosen apart from the one that does not") {
  cuda device(small);
  product p{device, 8};
  device.measure_products(3);
  auto sums = make_buffer<float>(device, 8);
  const auto run = [&](cuda& on, product& q) {
    return on.gemm_with_row_sums(false, false, 8, q.n, q.k, 1.0, q.a.data<float>(), q.k, q.b.data<float>(), q.n, 1.0,
                                 q.c.data<float>(), q.n, sums.data<float>());
  };
  const std::vector<float> plain = p.run();
  product again{device, 8};
  CHECK(run(device, again));
  std::vector<float> both(plain.size()), found(8);
  device.download(both.data(), again.c.data(), again.c.bytes(), device.main_stream());
  CHECK(both == plain);
  device.download(found.data(), sums.data(), sums.bytes(), device.main_stream());
  for (std::size_t row = 0; row < 8; ++row) {
    float expected_sum = 0;
    for (std::size_t c = 0; c < 24; ++c) expected_sum += 0.25f * static_cast<float>((row * 24 + c) % 7);
    CHECK(found[row] == expected_sum);
  }
  CHECK(device.products().size() == 2);

  // Choices of the time before there were such sums hold for the products that they name.
  std::string text = device.products().text();
  const std::size_t with_sums = text.find(" 012 "), line = text.rfind('\n', with_sums) + 1;
  REQUIRE(with_sums != std::string::npos);
  text.erase(line, text.find('\n', line) + 1 - line);
  cuda other(small);
  other.use_products(product_choices::parse(text, "products.txt"));
  product here{other, 8};
  CHECK(here.run() == plain);
  CHECK(run(other, here));
}

TEST_CASE("sums that a product cannot make are left to kernels") {
  cuda device(small), rounding({.tf32 = true, .workspace_bytes = 2 << 20});
  product p{device, 8}, q{rounding, 8};
  auto sums = make_buffer<float>(device, 12);
  const auto makes = [&](product& x, float* to) {
    return x.device.gemm_with_row_sums(false, false, x.m, x.n, x.k, 1.0, x.a.data<float>(), x.k, x.b.data<float>(), x.n,
                                       0.0, x.c.data<float>(), x.n, to);
  };
  CHECK(makes(p, sums.data<float>()));
  CHECK_FALSE(makes(p, sums.data<float>() + 1));
  CHECK_FALSE(makes(q, sums.data<float>()));
}

TEST_CASE("choices of other machines, and numbers out of range, are refused") {
  cuda device(small);
  CHECK_THROWS_WITH_AS(device.measure_products(0), doctest::Contains("0 candidates, must be 1"), error);
  CHECK_THROWS_WITH_AS(device.measure_products(65), doctest::Contains("to 64"), error);
  const std::string mine = device.products().machine();
  CHECK_THROWS_WITH_AS(device.use_products(product_choices("GPU of yesterday, cuBLASLt 1")),
                       doctest::Contains("products: measured on 'GPU of yesterday, cuBLASLt 1', and this is '"), error);
  device.measure_products(2);
  product{device, 8}.run();
  std::string text = device.products().text();
  const std::size_t at = text.rfind(": ", text.rfind(" us (")) + 2;  // where the candidate stands
  text.replace(at, 1, "63");
  cuda other(small);
  other.use_products(product_choices::parse(text, "products.txt"));
  product p{other, 8};
  CHECK_THROWS_WITH_AS(p.run(), doctest::Contains("the choice is candidate 63, but cuBLASLt has "), error);
}

TEST_CASE("a text that is damaged is refused with its line") {
  const auto refused = [](std::string_view text) {
    try {
      static_cast<void>(product_choices::parse(text, "file"));
    } catch (const error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(refused("") == "file: there is no first line, which begins with 'plait products 1: '");
  CHECK(refused("plait products 2: x\n") == "file: line 1 must begin with 'plait products 1: '");
  CHECK(refused("plait products 1: x\nfloat 8 8 8: one\n") ==
        "file: line 2 is no product with its choice: 'float 8 8 8: one'");
  CHECK(refused("plait products 1: x\nfloat 8 8 8: -1, 2.0 us (the first: 3.0 us)\n") != "");
  CHECK(refused("plait products 1: x\nfloat 8 8 8: 1, 2.0 us (the first: 3.0 us)\n") == "");
  CHECK(refused("plait products 1: x\nfloat 8 8 8: 1, 2.0 us (the fi") != "");
}

TEST_CASE("all ranks use one choice for a product, and know those of the others") {
  const auto body = [](threads::communicator& comm, cuda& device) {
    any_communicator all(comm);
    device.measure_products(3);
    product{device, 8}.run();                 // every rank's
    product{device, 20 + comm.rank()}.run();  // a rank's own
    const product_choices agreed = agree_on_products(device, all);
    CHECK(agreed.size() == 4);
    CHECK(device.products().text() == agreed.text());
    product{device, 22}.run();
  };
  CHECK_NOTHROW(threads::run(3, small, body));
}

#ifdef PLAIT_CUDA_STAND_IN
TEST_CASE("the fastest is chosen, and used") {
  for (const int fastest : {0, 1, 2}) {
    CAPTURE(fastest);
    for (int i = 0; i < 3; ++i) stand_in::product_delay[i] = i == fastest ? 0 : 3000;
    cuda device(small);
    device.measure_products(3);
    product{device, 8}.run();
    const product_choices chosen = device.products();
    device.use_products(chosen);
    int before[3];
    for (int i = 0; i < 3; ++i) before[i] = stand_in::products_done[i];
    product{device, 8}.run();
    for (int i = 0; i < 3; ++i) CHECK(stand_in::products_done[i] - before[i] == (i == fastest ? 1 : 0));
  }
  for (auto& delay : stand_in::product_delay) delay = 0;
}

TEST_CASE("nothing is measured while a step is recorded") {
  cuda device(small);
  device.measure_products(3);
  product p{device, 8};
  device.synchronize();
  cudaGraph_t graph = nullptr;
  REQUIRE(cudaStreamBeginCapture(device.main_stream().handle(), cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  device.gemm(false, false, p.m, p.n, p.k, 1.0, p.a.data<float>(), p.k, p.b.data<float>(), p.n, 1.0, p.c.data<float>(),
              p.n);
  REQUIRE(cudaStreamEndCapture(device.main_stream().handle(), &graph) == cudaSuccess);
  cudaGraphDestroy(graph);
  CHECK(device.products().size() == 0);
}
#endif
