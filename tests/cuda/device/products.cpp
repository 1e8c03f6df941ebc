// The algorithms of products: measured, stored as text, and equal on all ranks. Measuring changes no result.
#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/host_values.hpp"
#include "plait/comm/threads/cuda.hpp"
#include "plait/device/device.hpp"
#include "support/texts.hpp"

using namespace plait;

namespace {

const cuda::options small{.workspace_bytes = 2 << 20};

/// A matrix of `count` multiples of `step`, plus `least`.
template <class T>
buffer<cuda> filled(cuda& device, std::int64_t count, float step, float least = 0) {
  std::vector<T> numbers(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = converted<T>(step * static_cast<float>(i % 7) + least);
  auto out = make_buffer<T>(device, numbers.size());
  device.upload(out.data(), numbers.data(), out.bytes(), device.main_stream());
  return out;
}
template <class T>
std::vector<float> read_floats(cuda& device, const buffer<cuda>& from) {
  std::vector<T> out(from.bytes() / sizeof(T));
  device.download(out.data(), from.data(), from.bytes(), device.main_stream());
  std::vector<float> numbers;
  for (const T& x : out) numbers.push_back(converted<float>(x));
  return numbers;
}

/// A product of an m x 24 and a 24 x 16 matrix, added to a C of multiples of 1.
struct product {
  cuda& device;
  std::int64_t m;
  std::int64_t n = 16, k = 24;
  buffer<cuda> a = filled<float>(device, m* k, 0.25f), b = filled<float>(device, k* n, 0.5f),
               c = filled<float>(device, m* n, 1.0f);

  std::vector<float> run() {
    device.gemm(false, false, m, n, k, 1.0, a.data<float>(), k, b.data<float>(), n, 1.0, c.data<float>(), n);
    return read_floats<float>(device, c);
  }
};

/// Whether cuBLASLt has an algorithm for this product with sums; it is optional for plait.
bool optional(bool made) {
#ifdef PLAIT_CUDA_STAND_IN
  CHECK(made);  // the stand-in has one
#endif
  return made;
}

std::vector<float> expected(std::int64_t m) {
  cuda device(small);
  return product{device, m}.run();
}

#ifdef PLAIT_CUDA_STAND_IN
const std::atomic<int>& grouped_calls = stand_in::grouped_products;
const std::atomic<int>& strided_calls = stand_in::strided_products;
#else
const std::atomic<int> grouped_calls = 0, strided_calls = 0;
#endif

/// Calls check(), which makes `calls` calls for several products, as `counter` shows where there is one.
template <class Check>
void count_calls([[maybe_unused]] const std::atomic<int>& counter, [[maybe_unused]] int calls, const Check& check) {
  [[maybe_unused]] const int before = counter;
  check();
#ifdef PLAIT_CUDA_STAND_IN
  CHECK(counter - before == calls);
#endif
}

/// Three products of 6, none and 11 rows of one buffer with a factor each, added to `c` [17, 16]. Without `by_rows`,
/// products over those rows, added to `c` [3, 24, 16]. `in_one_call`: by `gemm_groups`, otherwise by `gemm`.
template <class In, class Out>
std::vector<float> run_groups(cuda& device, bool by_rows, bool in_one_call, std::int64_t shift = 0) {
  const std::int64_t n = 16, k = 24, rows[] = {6, 0, 11};
  const auto a = filled<In>(device, 17 * k + shift, 0.25f, -1),
             b = filled<In>(device, (by_rows ? 3 * k : 17) * n, 0.5f, -1);
  auto c = filled<Out>(device, (by_rows ? 17 : 3 * k) * n, 1.0f, -1);
  std::vector<gemm_group<In, Out>> groups;
  for (std::int64_t g = 0, at = 0; g < 3; at += rows[g++]) {
    const In* const from = a.template data<In>() + at * k + shift;
    if (by_rows) {
      groups.push_back({{false, false, rows[g], n, k, k, n, n},
                        from,
                        b.template data<In>() + g * k * n,
                        c.template data<Out>() + at * n});
    } else {
      groups.push_back({{true, false, k, n, rows[g], k, n, n},
                        from,
                        b.template data<In>() + at * n,
                        c.template data<Out>() + g * k * n});
    }
  }
  if (in_one_call) {
    gemm_groups(device, 1.0, groups, 1.0);
  } else {
    for (const auto& [p, x, y, z] : groups)
      device.gemm(p.trans_a, p.trans_b, p.m, p.n, p.k, 1.0, x, p.lda, y, p.ldb, 1.0, z, p.ldc);
  }
  return read_floats<Out>(device, c);
}

/// Checks that products of groups equal those of `gemm`; sums are exact. `calls`: the number of calls for several
/// products.
template <class In, class Out>
void check_groups(const cuda::options& how, int calls, std::int64_t shift = 0) {
  cuda device(how);
  count_calls(grouped_calls, calls, [&] {
    for (const bool by_rows : {true, false}) {
      CAPTURE(by_rows);
      CHECK(run_groups<In, Out>(device, by_rows, true, shift) == run_groups<In, Out>(device, by_rows, false, shift));
    }
  });
}

}  // namespace

TEST_CASE("products of several sizes are one call of cuBLAS, or one call each if it does not support that") {
  check_groups<float, float>(small, 2);
  check_groups<double, double>(small, 2);
  check_groups<bf16, bf16>(small, 2);
  check_groups<bf16, float>(small, 0);
  check_groups<float, float>({.workspace_bytes = 2 << 20, .deterministic = true}, 0);
  // A starts at an odd address. Sums of 24 terms are read in units of 16 bytes, and those of 6 in units of 4.
  check_groups<bf16, bf16>(small, 0, 1);
  check_groups<float, float>(small, 2, 1);
}

namespace {

/// The sums of three products of 5 rows with two factors each, as the experts' gates and ups. With `gap`, the last
/// product's rows begin later, so that distances differ.
template <class In, class Out>
void check_strided(const cuda::options& how, std::int64_t gap, int calls, bool captured = false) {
  constexpr std::int64_t m = 5, n = 8, k = 12, count = 3;
  cuda device(how);
  const auto run = [&](bool together) {
    const auto a = filled<In>(device, count * m * k + gap, 0.25f, -1),
               b = filled<In>(device, 2 * count * k * n, 0.5f, -1);
    auto c = filled<Out>(device, count * m * 2 * n, 1.0f, -1);
    std::vector<gemm_group<In, Out>> groups;
    for (const std::int64_t half : {0, 1})
      for (std::int64_t g = 0; g < count; ++g)
        groups.push_back({{false, true, m, n, k, k, k, 2 * n},
                          a.template data<In>() + g * m * k + (g == count - 1 ? gap : 0),
                          b.template data<In>() + (half * count + g) * k * n,
                          c.template data<Out>() + g * m * 2 * n + half * n});
    const auto multiply = [&] { gemm_groups(device, 2.0, groups, 1.0); };
    if (!together) {
      for (const auto& [p, x, y, z] : groups)
        device.gemm(p.trans_a, p.trans_b, p.m, p.n, p.k, 2.0, x, p.lda, y, p.ldb, 1.0, z, p.ldc);
    } else if (captured) {
      cuda_graph graph(device);
      graph.record(multiply);
      graph.launch();
    } else {
      multiply();
    }
    return read_floats<Out>(device, c);
  };
  const std::vector<float> expected = run(false);
  count_calls(strided_calls, calls, [&] { CHECK(run(true) == expected); });
}

}  // namespace

TEST_CASE("products of one size at equal distances are one call of cuBLAS, which a graph can record") {
  for (const bool captured : {false, true}) {
    CAPTURE(captured);
    check_strided<float, float>(small, 0, 2, captured);
    check_strided<double, double>(small, 0, 2, captured);
    check_strided<bf16, bf16>(small, 0, 2, captured);
    check_strided<bf16, float>(small, 0, 2, captured);
    check_strided<float, float>({.workspace_bytes = 2 << 20, .deterministic = true}, 0, 0, captured);
  }
  check_strided<float, float>(small, 12, 0);        // four runs: one call for several sizes
  check_strided<float, float>(small, 12, 2, true);  // a graph records runs of two products, and single ones
}

TEST_CASE("a product is measured at its first use, and its result is unchanged") {
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

  // Another process needs the text only.
  const std::string text = device.products().text();
  const product_choices read = product_choices::parse(text, "products.txt");
  CHECK(read.text() == text);
  cuda other(small);
  other.use_products(read);
  CHECK(other.products().text() == text);
  CHECK(product{other, 8}.run().size() == plain.size());
}

TEST_CASE("a product that sums a factor's rows has its own choice of algorithm") {
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
  if (!optional(run(device, again))) return;
  CHECK(read_floats<float>(device, again.c) == plain);
  const std::vector<float> found = read_floats<float>(device, sums);
  for (std::size_t row = 0; row < 8; ++row) {
    float expected_sum = 0;
    for (std::size_t c = 0; c < 24; ++c) expected_sum += 0.25f * static_cast<float>((row * 24 + c) % 7);
    CHECK(found[row] == expected_sum);
  }
  CHECK(device.products().size() == 2);

  // Choices that were stored before such sums existed apply to the products that they name.
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

TEST_CASE("kernels compute the sums that a product cannot") {
  cuda device(small), rounding({.tf32 = true, .workspace_bytes = 2 << 20});
  product p{device, 8}, q{rounding, 8};
  auto sums = make_buffer<float>(device, 12);
  const auto makes = [&](product& x, float* to) {
    return x.device.gemm_with_row_sums(false, false, x.m, x.n, x.k, 1.0, x.a.data<float>(), x.k, x.b.data<float>(), x.n,
                                       0.0, x.c.data<float>(), x.n, to);
  };
  static_cast<void>(optional(makes(p, sums.data<float>())));
  CHECK_FALSE(makes(p, sums.data<float>() + 1));
  CHECK_FALSE(makes(q, sums.data<float>()));
}

TEST_CASE("products take matrices with any alignment, and a bias with the required one only") {
  cuda device(small);
  product p{device, 8};
  const std::vector<float> plain = p.run();
  std::vector<float> out(plain.size());
  // The same numbers, one element after an aligned address.
  auto a = make_buffer<float>(device, 8 * 24 + 1), b = make_buffer<float>(device, 24 * 16 + 1),
       c = make_buffer<float>(device, 8 * 16 + 1);
  product fresh{device, 8};
  for (const auto& [to, from] : {std::pair(&a, &fresh.a), {&b, &fresh.b}, {&c, &fresh.c}})
    device.copy(to->data<float>() + 1, from->data(), from->bytes(), device.main_stream());
  const auto multiply = [&](const float* x, const float* y, float* to, const float* bias = nullptr) {
    device.gemm(false, false, 8, 16, 24, 1.0, x, 24, y, 16, 1.0, to, 16, gemm_epilogue<float>{.bias = bias});
    device.download(out.data(), to, out.size() * sizeof(float), device.main_stream());
  };
  multiply(a.data<float>() + 1, b.data<float>() + 1, c.data<float>() + 1);
  CHECK(out == plain);

  for (const float step : {1.0f, 2.0f, 4.0f}) {
    product q{device, 8};
    const buffer<cuda> bias = filled<float>(device, 17, step);
    multiply(q.a.data<float>(), q.b.data<float>(), q.c.data<float>(), bias.data<float>());
    bool right = true;
    for (std::size_t i = 0; i < out.size(); ++i)
      right = right && out[i] == plain[i] + step * static_cast<float>(i % 16 % 7);
    CHECK(right);
    CHECK_THROWS_WITH_AS(multiply(q.a.data<float>(), q.b.data<float>(), q.c.data<float>(), bias.data<float>() + 1),
                         doctest::Contains("the bias must begin at a multiple of 16 bytes"), error);
  }
}

TEST_CASE("sums of products in bf16 are rounded once, for every split of the sum") {
  cuda device(small);
  constexpr std::int64_t m = 8, n = 16, k = 256;
  const buffer<cuda> a = filled<bf16>(device, m * k, 0.25f), b = filled<bf16>(device, k * n, 0.5f);
  auto c = make_buffer<bf16>(device, m * n);
  device.gemm(false, false, m, n, k, 1.0, a.data<bf16>(), k, b.data<bf16>(), n, 0.0, c.data<bf16>(), n);
  const std::vector<float> out = read_floats<bf16>(device, c);
  bool right = true;
  for (std::int64_t row = 0; row < m; ++row)
    for (std::int64_t column = 0; column < n; ++column) {
      float sum = 0;  // exact: multiples of 1/8 below 2^12
      for (std::int64_t i = 0; i < k; ++i)
        sum += 0.125f * static_cast<float>((row * k + i) % 7 * ((i * n + column) % 7));
      right = right && out[static_cast<std::size_t>(row * n + column)] == widened(converted<bf16>(sum));
    }
  CHECK(right);
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
  const std::size_t at = text.rfind(": ", text.rfind(" us (")) + 2;  // the position of the chosen candidate
  text.replace(at, 1, "63");
  cuda other(small);
  other.use_products(product_choices::parse(text, "products.txt"));
  product p{other, 8};
  CHECK_THROWS_WITH_AS(p.run(), doctest::Contains("the choice is candidate 63, but cuBLASLt has "), error);
}

TEST_CASE("a damaged text is refused, naming the line") {
  const auto refused = [](std::string_view text) {
    return test::text_thrown_by([&] { static_cast<void>(product_choices::parse(text, "file")); });
  };
  CHECK(refused("") == "file: there is no first line, which begins with 'plait products 1: '");
  CHECK(refused("plait products 2: x\n") == "file: line 1 must begin with 'plait products 1: '");
  CHECK(refused("plait products 1: x\nfloat 8 8 8: one\n") ==
        "file: line 2 is not a product with its choice: 'float 8 8 8: one'");
  CHECK(refused("plait products 1: x\nfloat 8 8 8: -1, 2.0 us (the first: 3.0 us)\n") != "");
  CHECK(refused("plait products 1: x\nfloat 8 8 8: 1, 2.0 us (the first: 3.0 us)\n") == "");
  CHECK(refused("plait products 1: x\nfloat 8 8 8: 1, 2.0 us (the fi") != "");
}

TEST_CASE("the choices, their text and a log name a product that could not be measured for lack of memory") {
  const char* const machine = "plait products 1: x\n";
  const char* const product = "float float 00 8 16 24 24 16 16 0 1 0 2097152 256 256 256 256";
  product_choices here("x");
  CHECK(here.unmeasured_text() == "");
  here.leave_out(product, 512);
  here.leave_out("bf16 float 10 7 5 3 rest", 0);
  CHECK(here.size() == 0);
  CHECK(here.unmeasured().at(product) == 512);
  CHECK(here.text() == std::string(machine) +
                           "bf16 float 10 7 5 3 rest: not measured, met while a graph was recorded\n" + product +
                           ": not measured, no room for 512 bytes\n");
  CHECK(product_choices::parse(here.text(), "file").text() == here.text());
  CHECK(here.unmeasured_text() ==
        "products: 2 could not be measured and use the library's first algorithm: m=7 n=5 k=3 of bf16 to float (met "
        "while a graph was recorded), m=8 n=16 k=24 of float to float (no room for 512 bytes); to have them measured, "
        "leave more of the GPU's memory free while they are, as a smaller microbatch does");
  for (int i = 0; i < 8; ++i) here.leave_out(std::string("float float 00 9 9 ") + std::to_string(i), 4);
  CHECK(test::has(here.unmeasured_text(), "m=9 n=9 k=5 of"));
  CHECK(here.unmeasured_text().find("m=9 n=9 k=6 of") == std::string::npos);
  CHECK(test::has(here.unmeasured_text(), " and 2 more; "));

  // Another rank's choice applies to this rank, in either order of merging.
  product_choices other("x");
  other.set(product, {3, 1.5, 2.5});
  product_choices first = here, second = other;
  first.merge(other);
  second.merge(here);
  for (const product_choices* both : {&first, &second}) {
    CHECK(both->find(product) != nullptr);
    CHECK(both->unmeasured().size() == 9);
    CHECK(both->unmeasured().count(product) == 0);
  }
  here.set(product, {3, 1.5, 2.5});
  CHECK(here.unmeasured().size() == 9);

  for (const char* bad : {"no room for 0 bytes", "no room for bytes", "no room for 5", "no room for 5 bytesx", "late"})
    CHECK_THROWS_WITH_AS(product_choices::parse(std::string(machine) + "p: not measured, " + bad + "\n", "file"),
                         doctest::Contains("file: line 2 is not a product with its choice"), error);
}

TEST_CASE("deterministic products are neither measured nor chosen") {
  cuda device({.workspace_bytes = 4096, .deterministic = true});
  CHECK_THROWS_WITH_AS(device.measure_products(2), doctest::Contains("products: cuda::options::deterministic has one"),
                       error);
  product_choices some(device.products().machine());
  CHECK_NOTHROW(device.use_products(some));
  some.set("float float 00 8 16 24", {1, 1, 2});
  CHECK_THROWS_WITH_AS(device.use_products(some), doctest::Contains("or leave deterministic off"), error);
  CHECK_NOTHROW(device.measure_products(1));
}

TEST_CASE("all ranks use one choice for a product, and know the other ranks' choices") {
  const auto body = [](threads::communicator& comm, cuda& device) {
    any_communicator all(comm);
    device.measure_products(3);
    product{device, 8}.run();                 // on every rank
    product{device, 20 + comm.rank()}.run();  // on one rank only
    const product_choices agreed = agree_on_products(device, all);
    CHECK(agreed.size() == 4);
    CHECK(device.products().text() == agreed.text());
    product{device, 22}.run();
  };
  CHECK_NOTHROW(threads::run(3, small, body));
}

#ifdef PLAIT_CUDA_STAND_IN
TEST_CASE("the fastest algorithm is chosen and used") {
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

TEST_CASE("a proposal that fails is dropped, but the first one failing is an error") {
  const std::vector<float> plain = expected(8);
  for (int i = 0; i < 3; ++i) stand_in::product_delay[i] = i == 1 ? 0 : 3000;
  cuda device(small);
  device.measure_products(3);
  stand_in::unable_algorithm = 1;
  CHECK(product{device, 8}.run() == plain);
  REQUIRE(device.products().size() == 1);
  device.use_products(device.products());
  CHECK(product{device, 8}.run() == plain);
  stand_in::unable_algorithm = 0;
  cuda other(small);
  other.measure_products(3);
  CHECK_THROWS_WITH_AS((product{other, 8}.run()), doctest::Contains("timing the product"), error);
  stand_in::unable_algorithm = -1;
  for (auto& delay : stand_in::product_delay) delay = 0;
}

TEST_CASE("nothing is measured while a step is recorded") {
  cuda device(small);
  device.measure_products(3);
  product p{device, 8};
  device.synchronize();
  cuda_graph(device).record([&] {
    device.gemm(false, false, p.m, p.n, p.k, 1.0, p.a.data<float>(), p.k, p.b.data<float>(), p.n, 1.0,
                p.c.data<float>(), p.n);
  });
  CHECK(device.products().size() == 0);
  REQUIRE(device.products().unmeasured().size() == 1);
  CHECK(device.products().unmeasured().begin()->second == 0);
}

namespace {

/// Takes all of the GPU's memory except `left` bytes, while it exists.
struct taken_memory {
  void* data = nullptr;
  explicit taken_memory(std::size_t left) {
    std::size_t free = 0, total = 0;
    REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
    REQUIRE(cudaMalloc(&data, free - left) == cudaSuccess);
  }
  taken_memory(const taken_memory&) = delete;
  ~taken_memory() { cudaFree(data); }
};

}  // namespace

TEST_CASE("with little memory products give the same results, and unmeasured ones are listed") {
  const std::vector<float> plain = expected(8);
  cuda device(small);
  product p{device, 8}, q{device, 2};
  device.measure_products(3);
  {
    const taken_memory rest(256);  // enough for q's 2 x 16 numbers, but not for p's
    CHECK(p.run() == plain);
    q.run();
  }
  CHECK(device.products().size() == 1);
  REQUIRE(device.products().unmeasured().size() == 1);
  const auto& [name, missing] = *device.products().unmeasured().begin();
  CHECK(name.find("float float 00 8 16 24 24 16 16 ") == 0);
  CHECK(missing == 8 * 16 * sizeof(float));
  CHECK(test::has(device.products().unmeasured_text(), "m=8 n=16 k=24 of float to float (no room for 512 bytes)"));

  // The choices that the ranks share keep the products that no rank has measured.
  std::atomic<bool> all_have{true};
  const auto body = [&](threads::communicator& comm, cuda& d) {
    any_communicator all(comm);
    product a{d, 8}, b{d, 9 + comm.rank()};
    d.measure_products(3);
    if (comm.rank() == 0) a.run();
    all.barrier();
    {
      std::optional<taken_memory> rest;
      if (comm.rank() == 0) rest.emplace(256);
      all.barrier();
      a.run();
      b.run();
      all.barrier();
    }
    const product_choices agreed = agree_on_products(d, all);
    if (agreed.size() != 1 || agreed.unmeasured().size() != 2 || d.products().unmeasured() != agreed.unmeasured())
      all_have = false;
  };
  CHECK_NOTHROW(threads::run(2, small, body));
  CHECK(all_have);
}

TEST_CASE("an error of cuBLAS names the first product and the number of products") {
  cuda device(small);
  stand_in::failing_product = 1;
  CHECK_THROWS_WITH_AS((run_groups<float, float>(device, true, true)),
                       doctest::Contains("gemm(trans_a=0, trans_b=0, m=6, n=16, k=24, lda=24, ldb=16, ldc=16), the "
                                         "first of 2 products in one call: cuBLAS: starting the products: "),
                       error);
  CHECK(stand_in::failing_product == 0);
  CHECK(run_groups<float, float>(device, true, true) == run_groups<float, float>(device, true, false));
}

TEST_CASE("an error of a call for products of one size names the first product") {
  cuda device(small);
  const auto a = make_buffer<float>(device, 2 * 5 * 12), b = make_buffer<float>(device, 2 * 8 * 12);
  auto c = make_buffer<float>(device, 2 * 5 * 8);
  std::vector<gemm_group<float, float>> groups;
  for (const std::int64_t g : {0, 1})
    groups.push_back({{false, true, 5, 8, 12, 12, 12, 8},
                      a.data<float>() + g * 5 * 12,
                      b.data<float>() + g * 8 * 12,
                      c.data<float>() + g * 5 * 8});
  stand_in::failing_product = 1;
  CHECK_THROWS_WITH_AS(gemm_groups(device, 1.0, groups, 0.0),
                       doctest::Contains("gemm(trans_a=0, trans_b=1, m=5, n=8, k=12, lda=12, ldb=12, ldc=8), the first "
                                         "of 2 products in one call: cuBLAS: starting the products: "),
                       error);
  CHECK(stand_in::failing_product == 0);
}

TEST_CASE("a product for which cuBLASLt has no algorithm is refused, with the size of its workspace") {
  cuda device(small);
  product p{device, 8};
  stand_in::no_algorithms = true;
  CHECK_THROWS_WITH_AS(
      p.run(), doctest::Contains(": cuBLASLt has no algorithm for this product of float to float with "), error);
  CHECK_THROWS_WITH_AS(p.run(), doctest::Contains(" bytes of workspace (cuda::options::workspace_bytes)"), error);
  stand_in::no_algorithms = false;
  CHECK(p.run() == expected(8));
}
#endif
