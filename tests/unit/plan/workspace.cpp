// program: program_memory
// The memory that a layer's calls take from a program's allocator equals that of a dry run, to the byte.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/pointwise.hpp"
#include "plait/plan/dry_run.hpp"
#include "support/on_mesh.hpp"
#include "support/on_pointers.hpp"
#include "support/small_layers.hpp"

namespace workspace {  // files of one program may have helpers of the same name

using namespace plait;
using namespace plait::test::small_layers;
using plait::test::backward_on;
using plait::test::forward_on;

namespace {

const dim_sizes sizes = sizes_of<seq, hidden, ffn>(12, 10, 14);

template <class Device>
using up_on = linear<float, up, Device>;
template <class Device>
using down_on = linear<float, down, Device>;
template <class Device>
using moved_on = redistribution<float, rows, spec<seq, hidden, invariant<tp>>, Device>;
template <class Device>
struct bent_on : activation<float, gelu, rows, Device> {
  explicit bent_on(const context<Device>&) {}
};
template <class Device>
using norm_on = rms_norm<float, rows, Device>;

/// Calls a layer on the program's arrays twice, on each of two ranks. Returns the bytes that the first calls of rank 0
/// took from its allocator; throws if later calls take more.
template <class L>
call_workspace measured() {
  call_workspace found;
  threads::run(2, [&](threads::communicator c) {
    world w(two{2}.shape(), c);
    std::int64_t bytes = 0;
    cpu device({.memory = {[&](std::size_t n) {
                             bytes += static_cast<std::int64_t>(n);
                             return std::aligned_alloc(64, (n + 63) / 64 * 64);
                           },
                           [&](void* p, std::size_t n) {
                             bytes -= static_cast<std::int64_t>(n);
                             std::free(p);
                           }}});
    const context<cpu> ctx{device, w, sizes, 1};
    const auto local = [&](const layout& a) {
      return static_cast<std::size_t>(local_box(a, w.shape(), sizes, w.rank()).local_size());
    };
    std::vector<float> x(local(layout_v<typename L::input>), 1.0f), dx(x), y(local(layout_v<typename L::output>), 1.0f),
        dy(y), weight(200, 0.5f), gradient(weight);
    L layer = [&] {
      if constexpr (requires { L::derivation; })
        return L(ctx, "layer", {.memory = {weight.data(), gradient.data()}});
      else
        return L(ctx, 1e-5, "layer", weight.data(), gradient.data());
    }();
    if (bytes != 0) fail("a layer on the program's memory allocates when it is made");
    for (int turn = 0; turn < 2; ++turn) {
      typename L::saved kept;
      forward_on(layer, ctx, x.data(), y.data(), &kept);
      const std::int64_t forward = bytes;
      backward_on(layer, ctx, x.data(), kept, dy.data(), dx.data());
      if (turn == 0 && w.rank() == 0) found = {forward, bytes - forward};
      if (turn == 1 && (forward != bytes)) fail("later calls take more");
    }
    if (bytes != static_cast<std::int64_t>(device.reserved_bytes())) fail("bytes that the allocator does not see");
  });
  return found;
}

template <template <class> class Layer>
void check_workspace() {
  const call_workspace predicted =
      workspace_bytes(two{2}.shape(), sizes, 0, [](const auto& ctx) { return Layer<counting_device>(ctx); });
  const call_workspace took = measured<Layer<cpu>>();
  CHECK(predicted.forward == took.forward);
  CHECK(predicted.backward == took.backward);
  CHECK(took.forward + took.backward > 0);
}

/// The same for a layer that returns its results.
template <template <class> class Layer>
void check_returned() {
  const call_workspace predicted =
      workspace_bytes(two{2}.shape(), sizes, 0, [](const auto& ctx) { return Layer<counting_device>(ctx); });
  call_workspace took;
  test::on_mesh(two{2}, sizes, 1, [&](const context<cpu>& ctx) {
    Layer<cpu> layer(ctx);
    using L = Layer<cpu>;
    const tensor<float, typename L::input> x(ctx);
    const tensor<float, dual_t<typename L::output>> dy(ctx);
    ctx.device.release_cache();
    const auto before = static_cast<std::int64_t>(ctx.device.reserved_bytes());
    typename L::saved kept;
    const auto y = layer.forward(ctx, x, &kept);
    const auto between = static_cast<std::int64_t>(ctx.device.reserved_bytes());
    const auto dx = layer.backward(ctx, x, kept, dy);
    if (ctx.ranks.rank() == 0)
      took = {between - before, static_cast<std::int64_t>(ctx.device.reserved_bytes()) - between};
  });
  CHECK(predicted.forward == took.forward);
  CHECK(predicted.backward == took.backward);
  CHECK(took.backward > 0);
}

}  // namespace

TEST_CASE("a redistribution, which returns what it gathers") { check_returned<moved_on>(); }
TEST_CASE("an activation, whose gradient is as large as its result") { check_returned<bent_on>(); }
TEST_CASE("a linear that gathers") { check_workspace<up_on>(); }
TEST_CASE("a linear that reduces") { check_workspace<down_on>(); }
TEST_CASE("a norm") { check_workspace<norm_on>(); }

}  // namespace workspace
