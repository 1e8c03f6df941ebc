// Measures causal attention on the shapes of a Llama: plait's own kernels and, if built, cuDNN's, also with sums in any
// order; and attention in a ring of four ranks. Operations are counted for the half that the mask leaves: 2 products
// forward, 5 backward.
#include <cmath>

#include "attention.hpp"
#include "harness.hpp"
#include "plait/kernels/kernels.hpp"

namespace {

using namespace bench;
namespace kernels = plait::kernels;

/// cuDNN's attention, if it was built: with sums in a fixed order, and with sums in any order.
struct libraries {
  std::unique_ptr<plait::attention_library> cudnn, any_order;
};

std::string length_of(const options& o, std::int64_t seq) { return std::to_string(o.tiny ? seq * 256 : seq); }

void measure(cuda& device, const options& o, parts& all, std::int64_t seq, const libraries& there) {
  const shapes s = shapes::of(o);
  kernels::attention_shape shape;
  shape.batch = s.tokens / seq;
  shape.q_len = shape.k_len = seq;
  shape.heads = s.model.heads;
  shape.kv_heads = s.model.kv_heads;
  shape.head_dim = s.model.head_dim;
  shape.scale = 1 / std::sqrt(static_cast<double>(shape.head_dim));
  const std::int64_t q = shape.heads * shape.head_dim, kv = shape.kv_heads * shape.head_dim, width = q + 2 * kv;
  shape.q_stride = shape.k_stride = shape.v_stride = width;
  const auto qkv = random_arrays<bf16>(device, s.tokens * width, 1), d_o = random_arrays<bf16>(device, s.tokens * q, 1);
  const arrays<bf16> out(device, s.tokens * q, 1), dqkv(device, s.tokens * width, 1);
  const arrays<float> lse(device, s.tokens * shape.heads, 1);

  std::vector<timed_call> calls;
  const double square = static_cast<double>(s.tokens) * static_cast<double>(seq) * static_cast<double>(q) / 2;
  const auto in_step = static_cast<double>(s.model.layers * s.microbatches);
  const struct {
    const char* name;
    plait::attention_library* library;
  } ways[] = {{"own", nullptr}, {"cudnn", there.cudnn.get()}, {"any_order", there.any_order.get()}};
  for (const auto& way : ways) {
    const bool own = std::string(way.name) == "own";
    if (!own && way.library == nullptr) continue;
    const plait::attention_choice choice{own ? plait::attention_backend::own : plait::attention_backend::cudnn,
                                         way.library};
    const std::string id = std::string("attention.") + way.name + "." + length_of(o, seq) + ".";
    calls.push_back({id + "forward", 2 * 2 * square, 1, [=, &device](int) {
                       const bf16* const x = qkv(0);
                       device.use_attention(choice);
                       kernels::attention_forward(device, x, x + q, x + q + kv, out(0), lse(0), shape);
                     }});
    calls.push_back({id + "backward", 5 * 2 * square, 1, [=, &device](int) {
                       const bf16* const x = qkv(0);
                       bf16* const d = dqkv(0);
                       device.use_attention(choice);
                       kernels::attention_backward(device, x, x + q, x + q + kv, static_cast<const bf16*>(out(0)),
                                                   static_cast<const float*>(lse(0)), static_cast<const bf16*>(d_o(0)),
                                                   d, d + q, d + q + kv, shape);
                     }});
  }
  take_turns(device, calls, o, all);
  for (const timed_call& call : calls) {
    if (!o.wants(call.id)) continue;
    row(call.id, call.work / median(call.seconds) / 1e12)
        .number("seconds", median(call.seconds))
        .number("operations", call.work)
        .number("step_calls", in_step)
        .print();
  }
}

/// Measures the last of four ranks in a ring that share a sequence as long as a microbatch: its queries with one block
/// of keys after another, merged in float, against one call for all keys. Forward, with the attention that a step would
/// use.
void measure_ring(cuda& device, const options& o, parts& all, const libraries& there) {
  const std::string id = "attention.ring.forward";
  if (!o.wants(id)) return;
  constexpr std::int64_t ranks = 4;
  const shapes s = shapes::of(o);
  const std::int64_t seq = s.tokens;
  kernels::attention_shape whole;
  whole.heads = s.model.heads, whole.kv_heads = s.model.kv_heads, whole.head_dim = s.model.head_dim;
  whole.scale = 1 / std::sqrt(static_cast<double>(whole.head_dim));
  whole.q_len = seq / ranks, whole.k_len = seq, whole.q_offset = seq - whole.q_len;
  const std::int64_t width = whole.heads * whole.head_dim, kv_width = whole.kv_heads * whole.head_dim;
  const std::int64_t rows = whole.batch * whole.q_len;
  const auto q = random_arrays<bf16>(device, rows * width, 1);
  const auto k = random_arrays<bf16>(device, s.tokens * kv_width, 1), v = random_arrays<bf16>(device, k.all(), 1);
  const arrays<bf16> part(device, rows * width, 1);
  const arrays<float> merged(device, rows * width, 1), lse(device, rows * whole.heads, 1),
      part_lse(device, rows * whole.heads, 1);
  device.use_attention({plait::attention_backend::automatic, there.cudnn.get()});
  const auto call = [=, &device](const kernels::attention_shape& shape, std::int64_t first) {
    const bf16 *const keys = k(0) + first * kv_width, *const values = v(0) + first * kv_width;
    kernels::attention_forward(device, static_cast<const bf16*>(q(0)), keys, values, part(0), part_lse(0), shape);
  };
  std::vector<timed_call> both{{id, 0, 1,
                                [=, &device](int) {
                                  kernels::fill(device, lse(0), rows * whole.heads, -HUGE_VALF);
                                  device.zero(merged(0), static_cast<std::size_t>(rows * width) * sizeof(float),
                                              device.main_stream());
                                  for (std::int64_t piece = 0; piece < ranks; ++piece) {
                                    kernels::attention_shape shape = whole;
                                    shape.k_batch = seq, shape.k_len = whole.q_len;
                                    shape.k_offset = piece * whole.q_len;
                                    if (piece + 1 < ranks) shape.mask = kernels::attention_mask::full();
                                    call(shape, shape.k_offset);
                                    kernels::merge_lse(device, merged(0), lse(0), static_cast<const bf16*>(part(0)),
                                                       static_cast<const float*>(part_lse(0)), width, shape);
                                  }
                                }},
                               {"attention in one call", 0, 1, [=](int) { call(whole, 0); }}};
  take_turns(device, both, o, all);
  if (both.size() < 2) plait::fail("nothing to compare a ring with");
  row(id, median_of_rounds(both[1].seconds, both[0].seconds, [](double once, double ring) { return once / ring; }))
      .number("seconds", median(both[0].seconds))
      .number("step_calls", 0)
      .known(1e6 * median(both[1].seconds), "us, one call")
      .print();
}

}  // namespace

int main(int count, char** arguments) {
  return bench::run_main(count, arguments, {"--tokens"}, [](const options& o, parts& all) {
    cuda device;
    libraries there;
    all.run("attention.cudnn", [&] { there = {make_cudnn_attention(), make_cudnn_attention(false)}; });
    for (const std::int64_t seq : {2048, 4096}) {
      const std::int64_t length = o.tiny ? seq / 256 : seq;
      all.run("attention." + std::to_string(seq), [&] { measure(device, o, all, length, there); });
    }
    all.run("attention.ring", [&] { measure_ring(device, o, all, there); });
  });
}
