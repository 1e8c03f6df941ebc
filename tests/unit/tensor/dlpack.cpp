#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/io/json_tree.hpp"
#include "plait/tensor/interop.hpp"

using namespace plait;

namespace {

using mesh_type = mesh<axis<tp, 2>>;
using sharded = spec<batch, shard<hidden, tp>>;

template <class F>
void on_rank(F f) {
  threads::run(2, [&](threads::communicator c) {
    cpu device;
    world w(mesh_type{}.shape(), c);
    dim_sizes sizes;
    sizes.set(dim_of<batch>, 3), sizes.set(dim_of<hidden>, 8);
    context<cpu> ctx{device, w, sizes, 1};
    if (w.rank() == 1) f(ctx);
  });
}

}  // namespace

TEST_CASE("a tensor is exported with its memory, and imported as a view of it") {
  on_rank([](context<cpu>& ctx) {
    tensor<float, sharded> x(ctx);
    for (std::int64_t i = 0; i < x.size(); ++i) x.data()[i] = static_cast<float>(i);
    const float* const memory = x.data();
    dlpack::managed_tensor* const out = dlpack::export_tensor(ctx.device, std::move(x));
    CHECK_FALSE(x);
    CHECK(out->dl_tensor.data == memory);
    CHECK(out->dl_tensor.ndim == 2);
    CHECK(out->dl_tensor.shape[0] == 3);
    CHECK(out->dl_tensor.shape[1] == 4);
    CHECK(out->dl_tensor.strides == nullptr);
    CHECK(out->dl_tensor.dtype.code == 2);
    CHECK(out->dl_tensor.dtype.bits == 32);
    {
      const auto back = dlpack::import_tensor<float, sharded>(ctx, out->dl_tensor, "x");
      CHECK(back.data() == memory);
      CHECK_FALSE(back.owning());
      CHECK(back.data()[11] == 11.0f);
    }
    const std::size_t held = ctx.device.bytes_in_use();
    out->deleter(out);
    CHECK(held - ctx.device.bytes_in_use() == 12 * sizeof(float));
  });
}

TEST_CASE("an offset in bytes and strides of dims with one element are used") {
  on_rank([](context<cpu>& ctx) {
    std::vector<double> memory(16);
    std::int64_t shape[] = {3, 4}, strides[] = {4, 1};
    dlpack::tensor_view from{};
    from.data = memory.data();
    from.byte_offset = 2 * sizeof(double);
    from.device.device_type = static_cast<decltype(from.device.device_type)>(1);
    from.ndim = 2;
    from.dtype = {2, 64, 1};
    from.shape = shape;
    from.strides = strides;
    CHECK(dlpack::import_tensor<double, sharded>(ctx, from, "x").data() == memory.data() + 2);
    const auto refused = [&](const char* text) {
      CHECK_THROWS_WITH_AS((dlpack::import_tensor<double, sharded>(ctx, from, "x")), doctest::Contains(text),
                           plait::error);
    };
    strides[0] = 5;
    refused("x: the DLPack tensor has shape [3, 4], and this rank's part of");
    strides[0] = 4, shape[1] = 8;
    refused("has shape [3, 8]");
    refused("is [3, 4], row-major without gaps");
    shape[1] = 4, from.ndim = 1;
    refused("has shape [3]");
    from.ndim = 2, from.dtype.bits = 32;
    refused("elements of code 2, 32 bits, 1 lanes; needed is double");
    from.dtype.bits = 64, from.device.device_type = static_cast<decltype(from.device.device_type)>(2);
    refused("x: the DLPack tensor lies on device 2:0; the context's is 1:0");
  });
}

TEST_CASE("a part's layout is exported with it, also as JSON") {
  on_rank([](context<cpu>& ctx) {
    const exported_layout out = export_layout<sharded>(ctx);
    CHECK(out.spec == "<batch, shard<hidden, tp>>");
    REQUIRE(out.dims.size() == 2);
    CHECK(out.dims[0].name == "batch");
    CHECK(out.dims[0].axes.empty());
    CHECK(out.dims[1].name == "hidden");
    CHECK(out.dims[1].global == 8);
    CHECK(out.dims[1].local == 4);
    CHECK(out.dims[1].offset == 4);
    CHECK(out.dims[1].axes == std::vector<std::string>{"tp"});
    REQUIRE(out.mesh.size() == 1);
    CHECK(out.mesh[0].name == "tp");
    CHECK(out.mesh[0].extent == 2);
    CHECK(out.mesh[0].coordinate == 1);
    CHECK(out.mesh[0].state == "varying");
    CHECK(parse_json(out.json(), "the layout") == parse_json(R"({"spec": "<batch, shard<hidden, tp>>",
                         "dims": [{"name": "batch", "global": 3, "local": 3, "offset": 0, "axes": []},
                                  {"name": "hidden", "global": 8, "local": 4, "offset": 4, "axes": ["tp"]}],
                         "mesh": [{"name": "tp", "extent": 2, "coordinate": 1, "state": "varying"}]})",
                                                             "what is expected"));
  });
}

TEST_CASE("an imported tensor with another layout is refused by name, although its shape fits") {
  on_rank([](context<cpu>& ctx) {
    using terms = spec<batch, hidden, partial<tp>>;
    using sums = spec<batch, hidden, invariant<tp>>;
    tensor<float, sharded> x(ctx);
    dlpack::managed_tensor* const part = dlpack::export_tensor(ctx.device, std::move(x));
    const auto came_as = [&](const exported_layout& layout) {
      return dlpack::import_tensor<float, sharded>(ctx, part->dl_tensor, layout, "x").data();
    };
    const auto refused = [&](const exported_layout& layout, const char* text) {
      CHECK_THROWS_WITH_AS(came_as(layout), doctest::Contains(text), plait::error);
    };
    const exported_layout own = export_layout<sharded>(ctx);
    CHECK(came_as(own) == part->dl_tensor.data);
    exported_layout other = own;
    other.dims[1].offset = 0;  // as exported by rank 0
    refused(other, ("x: the DLPack tensor came as " + other.json() + ", and " + own.json() + " is needed").c_str());
    other = own, other.dims[1].global = 4;
    refused(other, R"("name": "hidden", "global": 4)");
    refused(export_layout<terms>(ctx), R"(came as {"spec": "<batch, hidden, partial<tp>>")");
    refused(export_layout<spec<shard<hidden, tp>, batch>>(ctx), R"(came as {"spec": "<shard<hidden, tp>, batch>")");
    other = own, other.mesh[0].extent = 4;
    refused(other, R"("mesh": [{"name": "tp", "extent": 4)");
    other = own, other.mesh.push_back({"dp", 1, 0, "partial"});
    CHECK(came_as(other) == part->dl_tensor.data);  // one rank along dp: no sum is pending
    part->deleter(part);

    tensor<float, terms> y(ctx);
    dlpack::managed_tensor* const term = dlpack::export_tensor(ctx.device, std::move(y));
    CHECK_THROWS_WITH_AS((dlpack::import_tensor<float, sums>(ctx, term->dl_tensor, export_layout<terms>(ctx), "y")),
                         doctest::Contains(R"("state": "partial"}]}, and {"spec": "<batch, hidden, invariant<tp>>")"),
                         plait::error);
    using unmentioned = spec<batch, hidden>;  // also invariant
    CHECK(dlpack::import_tensor<float, unmentioned>(ctx, term->dl_tensor, export_layout<sums>(ctx), "y").data() ==
          term->dl_tensor.data);
    term->deleter(term);
  });
}
