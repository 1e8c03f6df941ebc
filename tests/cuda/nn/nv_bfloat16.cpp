// Layers take arrays of CUDA's bf16 without a cast. Every call gives the same bits as a call with plait's bf16.
#include <cuda_bf16.h>
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "plait/comm/threads/cuda.hpp"
#include "plait/device/cuda.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/linear/policy.hpp"
#include "plait/nn/loss.hpp"
#include "plait/nn/norm.hpp"
#include "support/on_pointers.hpp"

using namespace plait;
using plait::test::backward_on;
using plait::test::forward_on;

namespace {

using rows = spec<shard<batch, dp>, hidden, invariant<tp>>;
using ids = spec<shard<batch, dp>, invariant<tp>>;
using table = spec<vocab, hidden>;
using logits = spec<shard<batch, dp>, vocab, invariant<tp>>;
constexpr std::int64_t samples = 8, width = 16, words = 32;

static_assert(sizeof(__nv_bfloat16) == sizeof(bf16));
static_assert(!same_bits<float, bf16> && !same_bits<std::uint16_t, bf16>);

/// Device memory of bf16 numbers of either type.
class numbers {
 public:
  numbers(cuda& device, std::int64_t n, float first = 0)
      : device_(&device), memory_(device, 2 * static_cast<std::size_t>(n)) {
    std::vector<__nv_bfloat16> values;
    for (std::int64_t i = 0; i < n; ++i)
      values.push_back(__float2bfloat16(first == 0 ? 0.0f : first + 0.125f * static_cast<float>(i * 7 % 13) - 0.75f));
    device.upload(memory_.data(), values.data(), memory_.bytes(), device.main_stream());
  }
  template <class T>
  T* as() {
    return memory_.template data<T>();
  }
  std::vector<std::uint16_t> bits() const {
    std::vector<std::uint16_t> out(memory_.bytes() / 2);
    device_->download(out.data(), memory_.data(), memory_.bytes(), device_->main_stream());
    return out;
  }

 private:
  cuda* device_;
  buffer<cuda> memory_;
};

/// The bits of all results of layers on arrays of T, which is plait's bf16 or CUDA's.
template <class T>
std::vector<std::vector<std::uint16_t>> outcomes(cuda& device, const context<cuda>& ctx) {
  numbers x(device, samples * width, 1), weight(device, words * width, 0.5f), norm_weight(device, width, 1),
      y(device, samples * width), z(device, samples * words), dz(device, samples * words, 0.25f),
      dy(device, samples * width), dx(device, samples * width);
  auto gradient = make_buffer<float>(device, words * width), norm_gradient = make_buffer<float>(device, width);
  device.zero(gradient.data(), gradient.bytes(), device.main_stream());
  device.zero(norm_gradient.data(), norm_gradient.bytes(), device.main_stream());

  with_saved<rms_norm<bf16, rows, cuda>> norm(
      ctx, 1e-5, "norm",
      {.weight = norm_weight.as<T>(), .gradient = norm_gradient.data<float>(), .master = own_memory});
  using head_layer = linear<bf16, layer_policy<rows, table, logits>, cuda>;
  head_layer head(ctx, "head",
                  {.memory = {.weight = weight.as<T>(), .gradient = gradient.data<float>(), .master = own_memory}});
  gather_parameters(ctx, norm, head);
  zero_gradients(ctx, norm, head);
  const T* const input = x.as<T>();
  typename head_layer::saved kept;
  forward_on(norm, ctx, input, y.as<T>());
  forward_on(head, ctx, y.as<T>(), z.as<T>(), &kept);
  backward_on(head, ctx, y.as<T>(), kept, dz.as<T>(), dy.as<T>());
  backward_on(norm, ctx, input, dy.as<T>(), dx.as<T>());

  numbers seen(device, samples * width), dseen(device, samples * width, 0.125f);
  embedding<bf16, layer_policy<ids, table, rows>, cuda> lookup(
      ctx, words, "table",
      {.memory = {.weight = weight.as<T>(), .gradient = gradient.data<float>(), .master = own_memory}});
  gather_parameters(ctx, lookup);
  auto tokens = make_buffer<std::int32_t>(device, samples);
  std::vector<std::int32_t> chosen;
  for (std::int64_t i = 0; i < samples; ++i) chosen.push_back(static_cast<std::int32_t>(i * 5 % words));
  device.upload(tokens.data(), chosen.data(), tokens.bytes(), device.main_stream());
  forward_on(lookup, ctx, tokens.data<std::int32_t>(), seen.as<T>());
  backward_on(lookup, ctx, tokens.data<std::int32_t>(), static_cast<const T*>(dseen.as<T>()));

  cross_entropy_loss<bf16, logits, ids, cuda> loss(ctx, words);
  const auto seed = loss_seed<typename decltype(loss)::output, cuda>::weighted(ctx, 0.125);
  loss.forward_backward(ctx, part<bf16, logits>(part<T, logits>(ctx, z.as<T>())),
                        part<const std::int32_t, ids>(ctx, tokens.data<std::int32_t>()), seed);

  std::vector<std::uint16_t> halves(2 * words * width);  // of the float gradients
  device.download(halves.data(), gradient.data(), gradient.bytes(), device.main_stream());
  return {y.bits(), z.bits(), dy.bits(), dx.bits(), seen.bits(), halves};
}

}  // namespace

TEST_CASE("layers take CUDA's bf16 like plait's") {
  threads::run(2, cuda::options{.workspace_bytes = 1 << 20}, [](threads::communicator ranks, cuda& device) {
    world mesh_ranks(mesh<axis<dp, 1>, axis<tp, 2>>{}.shape(), ranks);
    const context<cuda> ctx{device, mesh_ranks, sizes_of<batch, hidden, vocab>(samples, width, words)};
    const auto expected = outcomes<bf16>(device, ctx), got = outcomes<__nv_bfloat16>(device, ctx);
    CHECK(got == expected);
    for (const auto& array : expected) CHECK(array != std::vector<std::uint16_t>(array.size(), 0));
  });
}

TEST_CASE("a pointer is equal in both types") {
  __nv_bfloat16 one{};
  bf16* const ours = from_cuda(&one);
  CHECK(static_cast<void*>(ours) == &one);
  CHECK(to_cuda(ours) == &one);
  static_assert(std::is_same_v<decltype(from_cuda(static_cast<const __nv_bfloat16*>(&one))), const bf16*>);
}
