// Tensors of a GPU through DLPack: the device's number, the memory, and the layout, which DLPack does not carry.
#include <doctest/doctest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "plait/comm/threads/cuda.hpp"
#include "plait/device/cuda.hpp"
#include "plait/tensor/interop.hpp"

using namespace plait;

TEST_CASE("a GPU's part is exported with its layout, and imported as a view of the same memory") {
  using sharded = spec<batch, shard<hidden, tp>>;
  using rows = spec<shard<batch, tp>, hidden>;  // as many elements, and here an equal shape
  threads::run(2, [&](threads::communicator ranks) {
    cuda device({.workspace_bytes = 4096});
    world mesh_ranks(mesh<axis<tp, 2>>{}.shape(), ranks);
    const context<cuda> ctx{device, mesh_ranks, sizes_of<batch, hidden>(4, 4)};
    tensor<float, sharded, cuda> x(ctx);
    std::vector<float> values(8), back(8);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(i) + 100.0f * static_cast<float>(mesh_ranks.rank());
    device.upload(x.data(), values.data(), values.size() * sizeof(float), device.main_stream());
    const float* const memory = x.data();
    const exported_layout beside = export_layout<sharded>(ctx);
    dlpack::managed_tensor* const out = dlpack::export_tensor(device, std::move(x));
    CHECK(static_cast<int>(out->dl_tensor.device.device_type) == 2);
    CHECK(out->dl_tensor.device.device_id == device.index());
    CHECK(out->dl_tensor.shape[1] == 2);
    CHECK(beside.dims[1].offset == 2 * mesh_ranks.rank());
    {
      const auto view = dlpack::import_tensor<float, sharded>(ctx, out->dl_tensor, beside, "x");
      CHECK(view.data() == memory);
      device.download(back.data(), view.data(), back.size() * sizeof(float), device.main_stream());
      CHECK(back == values);
    }
    CHECK_THROWS_WITH_AS(
        (dlpack::import_tensor<float, rows>(ctx, out->dl_tensor, beside, "x")),
        doctest::Contains(("x: the DLPack tensor came as " + beside.json() + ", and {\"spec\": ").c_str()),
        plait::error);
    out->dl_tensor.device.device_type = static_cast<decltype(out->dl_tensor.device.device_type)>(1);
    CHECK_THROWS_WITH_AS((dlpack::import_tensor<float, sharded>(ctx, out->dl_tensor, beside, "x")),
                         doctest::Contains("x: the DLPack tensor lies on device 1:0; the context's is 2:0"),
                         plait::error);
    out->deleter(out);
  });
}
