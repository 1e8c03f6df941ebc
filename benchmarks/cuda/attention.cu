// Causal attention on the shapes of a Llama: plait's own kernels and, where it was built, cuDNN's. Operations are those
// of the half that the mask leaves: 2 products forward, 5 backward.
#include <cmath>

#include "attention.hpp"
#include "harness.hpp"
#include "plait/kernels/kernels.hpp"

namespace {

using namespace bench;
namespace kernels = plait::kernels;

void measure(cuda& device, const options& o, parts& all, std::int64_t seq, plait::attention_library* cudnn) {
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
  const std::string length = "." + (o.tiny ? std::string(seq == 8 ? "2048" : "4096") : std::to_string(seq)) + ".";
  for (const bool own : {true, false}) {
    if (!own && cudnn == nullptr) continue;
    const plait::attention_choice choice{own ? plait::attention_backend::own : plait::attention_backend::cudnn, cudnn};
    const std::string id = std::string("attention.") + (own ? "own" : "cudnn") + length;
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
        .print();
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (bench::no_gpu()) return 77;
  return bench::run_main(count, arguments, {"--tokens"}, [](const options& o, parts& all) {
    cuda device;
    std::unique_ptr<plait::attention_library> cudnn;
    all.run("attention.cudnn", [&] { cudnn = make_cudnn_attention(); });
    for (const std::int64_t seq : {2048, 4096})
      all.run("attention." + std::to_string(seq),
              [&] { measure(device, o, all, o.tiny ? seq / 256 : seq, cudnn.get()); });
  });
}
