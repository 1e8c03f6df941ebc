// program: training
// timeout: 300
// Optimizer state and activations in host memory: the results have the same bits, and the device needs less memory.
#include "plait/parallel/offload.hpp"

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cstddef>
#include <string>

#include "cuda/parallel/small_training.hpp"
#include "plait/device/counting.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/device.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("a step whose optimizer's state is offloaded has the same bits, replayed or not") {
  scenario s = small_scenario();
  for (const optimizer_options& optimizer : every_optimizer()) {
    s.optimizer = optimizer;
    const auto here = train_small(s, false);
    CHECK(here.host_bytes == 0);
    for (const bool as_graph : {false, true}) {
      const auto away = train_small(s, as_graph, false, {.offload_optimizer = true});
      CHECK(away.losses == here.losses);
      CHECK(away.weights == here.weights);
      CHECK(away.host_bytes == here.optimizer_bytes);
      if (!as_graph) CHECK(here.peak_bytes - away.peak_bytes == here.optimizer_bytes);
    }
  }
}

TEST_CASE("a step whose activations are offloaded has the same bits, replayed or not") {
  scenario s = small_scenario();
  s.config.layers = 5;
  for (const recompute keep : {recompute::none, recompute::full}) {
    s.options.keep = keep;
    const auto here = train_small(s, false);
    for (const bool as_graph : {false, true})
      for (const bool optimizer : {false, true}) {
        const auto away = train_small(s, as_graph, false, {.offload_optimizer = optimizer}, true);
        CHECK(away.losses == here.losses);
        CHECK(away.weights == here.weights);
        CHECK(away.host_bytes == (optimizer ? here.optimizer_bytes : 0));
        if (!as_graph && !optimizer) CHECK(away.peak_bytes < here.peak_bytes);
      }
  }
}

TEST_CASE("offloaded memory is reused only after its copy, and restored unchanged") {
  cuda device;
  const std::size_t bytes = 64;
  buffer<cuda> kept(device, bytes);
  void* const place = kept.data();
  const auto visit = [&](auto&& f) { f(kept); };
  for (int round = 0; round < 3; ++round) {
    device.zero(kept.data(), bytes, device.main_stream());
    offloaded_unit<cuda> unit(device);
    unit.offload(visit);
    CHECK(device.host_bytes_in_use() == bytes);
    unit.drop(visit);
    CHECK(device.bytes_in_use() == 0);
    {
      buffer<cuda> other(device, bytes);
      CHECK(other.data() == place);
      plait::detail::cuda_check(cudaMemsetAsync(other.data(), 'x', bytes, device.main_stream().handle()), "filling");
    }
    unit.reload(visit);
    CHECK(kept.data() == place);
    unit.wait();
    std::string back(bytes, 'y');
    device.download(back.data(), kept.data(), bytes, device.main_stream());
    CHECK(back == std::string(bytes, '\0'));
  }
  CHECK(device.host_bytes_in_use() == 0);
}

TEST_CASE("memory for optimizers is the host's on request, and is reused") {
  for (const bool offloads : {false, true}) {
    cuda device({.offload_optimizer = offloads});
    const std::size_t bytes = 1000;
    void* first = nullptr;
    {
      auto memory = make_optimizer_buffer<std::byte>(device, bytes);
      first = memory.data();
      CHECK(device.host_bytes_in_use() == (offloads ? bytes : 0));
      CHECK(device.bytes_in_use() == (offloads ? 0 : bytes));
      device.zero(first, bytes, device.main_stream());
      std::string back(bytes, 'x');
      device.download(back.data(), first, bytes, device.main_stream());
      CHECK(back == std::string(bytes, '\0'));
      const auto other = make_buffer<std::byte>(device, bytes);
      device.copy(memory.data(), other.data(), bytes, device.main_stream());
      CHECK(device.bytes_in_use() == (offloads ? bytes : 2 * bytes));
    }
    device.synchronize();
    CHECK(device.host_bytes_in_use() == 0);
    CHECK(device.bytes_in_use() == 0);
    if (offloads) CHECK(make_optimizer_buffer<std::byte>(device, bytes).data() == first);
  }
}

TEST_CASE("a plan counts offloaded bytes separately") {
  counting_device device(true);
  const auto a = make_optimizer_buffer<float>(device, 10);
  const auto b = make_buffer<float>(device, 1);
  CHECK(device.host_bytes_in_use() == 40);
  CHECK(device.bytes_in_use() == 4);
  CHECK(device.peak_bytes() == 4);
}
