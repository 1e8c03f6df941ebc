// Deterministic results on every layout of ranks that share a GPU: products by one algorithm, exact sums, attention in
// chunks. In the stand-in every algorithm adds in a different order, and the heuristic's proposals depend on the sizes.
// program: training
// timeout: 240
#include <doctest/doctest.h>

#include "cuda/models/deterministic_llama.hpp"
#include "plait/comm/threads/cuda.hpp"

using namespace plait;
using namespace plait::test;

namespace {
constexpr auto launch = [](int ranks, const cuda::options& device, auto&& body) {
  threads::run(ranks, device, [&](threads::communicator c, cuda& own) { body(c, own); });
};
deterministic_result on_threads(const deterministic_layout& l, bool deterministic = true) {
  return train_deterministic(launch, l, deterministic);
}
deterministic_result mixture_on_threads(const deterministic_layout& l, bool deterministic = true) {
  return train_deterministic_mixture(launch, l, deterministic);
}
}  // namespace

TEST_CASE("one hash, loss and norm on every layout") {
  const different_orders unkind;
  const deterministic_result one = on_threads({});
  CHECK(one.norm > 0.1);
  CHECK(on_threads({1, 1, 1, 4}) == one);
  CHECK(on_threads({1, 1, 2, 2}) == one);
  CHECK(on_threads({2, 1, 1, 1, zero_level::gradients}) == one);
  CHECK(on_threads({1, 2, 1, 1, zero_level::replicated, chosen_policy::all_gather_kv}) == one);
  CHECK(on_threads({2, 2, 1, 1, zero_level::parameters}) == one);
  CHECK(on_threads({}, false).loss == doctest::Approx(one.loss).epsilon(2e-2));
}

TEST_CASE("one hash, loss and norm of a mixture of experts on every layout") {
  const different_orders unkind;
  const deterministic_result one = mixture_on_threads({});
  CHECK(one.norm > 0.1);
  CHECK(mixture_on_threads({.tp = 2, .microbatches = 2, .ep = 2}) == one);
  CHECK(mixture_on_threads({.dp = 2, .level = zero_level::parameters, .ep = 2}) == one);
  CHECK(mixture_on_threads({.cp = 2, .level = zero_level::gradients, .ep = 2}) == one);
  CHECK(mixture_on_threads({.tp = 2, .ep = 4}) == one);
  CHECK(mixture_on_threads({}, false).loss == doctest::Approx(one.loss).epsilon(2e-2));
}

#ifdef PLAIT_CUDA_STAND_IN
TEST_CASE("without deterministic sums the stand-in's bits depend on the layout, as a GPU's would") {
  const different_orders unkind;
  CHECK(on_threads({}, false).hash != on_threads({1, 1, 2, 1}, false).hash);
  CHECK(mixture_on_threads({}, false).hash != mixture_on_threads({.ep = 2}, false).hash);
}
#endif

TEST_CASE("layers without a fixed order are refused") {
  cuda device(cuda::options{.deterministic = true});
  CHECK_THROWS_WITH_AS(device.use_attention({}), doctest::Contains("legal is attention_backend::own"), error);
  auto memory = make_buffer<float>(device, 4096);
  float* const x = memory.data<float>();
  CHECK_THROWS_WITH_AS(device.gemm(false, false, 16, 16, 16, 1.0f, x + 1, 16, x + 512, 16, 0.0f, x + 1024, 16),
                       doctest::Contains("multiples of 16 bytes"), error);
  device.synchronize();
}
