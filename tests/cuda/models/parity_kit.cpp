// timeout: 300
// program: training
// The parity kit on a GPU, which all ranks share.
#include <doctest/doctest.h>

#include "plait/comm/threads/cuda.hpp"
#include "plait/nn/linear.hpp"
#include "plait/testing/layer_parity.hpp"
#include "plait/testing/program_parity.hpp"
#include "support/gpt2_parity.hpp"

using namespace plait;
using namespace plait::test;
using plait::threads::on_one_gpu;

namespace {

using net = mesh<axis<dp>, axis<tp>>;

struct up {
  using mesh = net;
  using input = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, seq, shard<ffn, tp>>;
  static constexpr bool bias = true;
};

struct make_up {
  template <class Device>
  auto operator()(const context<Device>& ctx) const {
    return linear<double, up, Device>(ctx, "up");
  }
};

const mesh_shape one = megatron_sp::mesh{1, 1, 1, 1}.shape();
mesh_shape shape(std::int64_t d, std::int64_t t) { return megatron_sp::mesh{d, 1, t, 1}.shape(); }

}  // namespace

TEST_CASE("a layer on a GPU: finite differences, and meshes of ranks that share it") {
  const dim_sizes sizes = sizes_of<batch, seq, hidden, ffn>(4, 4, 6, 8);
  CHECK(check_layer(net{1, 1}, {net{2, 1}, net{1, 4}, net{2, 2}}, sizes, make_up{}, 1e-12, on_one_gpu{}).text() == "");
}

TEST_CASE("a model on a GPU") {
  const gpt2::config c = tiny_gpt2(1);
  model_setup how = gpt2_setup<megatron_sp>(c);
  how.batch = 4, how.steps = 2;
  CHECK(
      check_model(one, {shape(2, 1), shape(1, 2), shape(2, 2)}, how, make_gpt2<megatron_sp>(c), on_one_gpu{}).text() ==
      "");
}

TEST_CASE("faults on a GPU are found") {
  const dim_sizes sizes = sizes_of<batch, seq, hidden, ffn>(4, 4, 6, 8);
  layer_values alone = run_on(net{1, 1}, sizes, make_up{}, {}, on_one_gpu{})[0];
  alone.y[3] += 1e-6;
  CHECK(check_mesh(net{2, 1}, sizes, alone, make_up{}, 1e-12, on_one_gpu{}).text().find("output differs by") !=
        std::string::npos);
}

TEST_CASE("a program's record of arrays on a GPU takes no memory there, and has their numbers") {
  using columns = spec<batch, shard<hidden, tp>>;
  const auto record = [](program_run& run, int ranks, float wrong) {
    on_one_gpu{}(ranks, [&](auto& comm, cuda& device) {
      world all(mesh<axis<tp>>(ranks).shape(), comm);
      const context<cuda> ctx{device, all, sizes_of<batch, hidden>(2, 4), 1};
      tensor<float, columns, cuda> x(ctx);
      tensor<bf16, columns, cuda> y(ctx);
      std::vector<float> values(static_cast<std::size_t>(x.size()));
      std::vector<bf16> rounded;
      const box& part = x.part();
      for (std::int64_t i = 0; i < x.size(); ++i)
        values[static_cast<std::size_t>(i)] =
            static_cast<float>(i / part.local[1] * 4 + part.offset[1] + i % part.local[1] + 1) * wrong;
      for (const float v : values) rounded.push_back(to_bf16(v));
      device.upload(x.data(), values.data(), values.size() * sizeof(float), device.main_stream());
      device.upload(y.data(), rounded.data(), rounded.size() * sizeof(bf16), device.main_stream());
      const std::size_t before = device.bytes_in_use();
      program_record<cuda> into(ctx, run);
      into.step(0);
      into.add("y", y);
      into.add("x", view<columns>(ctx, static_cast<const float*>(x.data())));
      into.finish();
      CHECK(device.bytes_in_use() == before);
    });
  };
  program_run alone, two, wrong;
  record(alone, 1, 1), record(two, 2, 1), record(wrong, 2, 0.5f);
  CHECK(compare_runs(alone, two, {.relative = 0}).text() == "");
  CHECK(compare_runs(alone, wrong).text() ==
        "step 0, y: 8 of 8 elements differ by more than 8e-05; the first at [batch=0, hidden=0] is 1 in the first run "
        "(tp=1) and 0.5 in the second (tp=2); each is 1/2 of the first run's, a factor that the extent of tp gives");
}
