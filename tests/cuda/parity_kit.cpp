// timeout: 300
// program: training
// The kit that compares with one rank does so on a GPU too, where all ranks share one device.
#include <doctest/doctest.h>

#include "plait/nn/linear.hpp"
#include "plait/testing/launch_cuda.hpp"
#include "plait/testing/layer_parity.hpp"
#include "support/gpt2_parity.hpp"

using namespace plait;
using namespace plait::test;

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

TEST_CASE("what is wrong on a GPU is found") {
  const dim_sizes sizes = sizes_of<batch, seq, hidden, ffn>(4, 4, 6, 8);
  layer_values alone = run_on(net{1, 1}, sizes, make_up{}, {}, on_one_gpu{})[0];
  alone.y[3] += 1e-6;
  CHECK(check_mesh(net{2, 1}, sizes, alone, make_up{}, 1e-12, on_one_gpu{}).text().find("output differs by") !=
        std::string::npos);
}
