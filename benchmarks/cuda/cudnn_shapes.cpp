// Asks cuDNN's front end whether it supports attention of every shape of the tests and benchmarks on Hopper: forward,
// and backward with sums in a fixed order and in any order. This needs no GPU. Prints a table; the exit code is 1 if a
// shape is refused.
#include <cstdio>
#include <string>

#include "plait/kernels/cuda/attention_cudnn.hpp"

namespace {

using shape = plait::kernels::attention_shape;

shape of(std::int64_t batch, std::int64_t q_len, std::int64_t k_len, std::int64_t heads, std::int64_t kv_heads,
         std::int64_t head_dim, bool causal = true) {
  shape s;
  s.batch = batch, s.q_len = q_len, s.k_len = k_len, s.heads = heads, s.kv_heads = kv_heads, s.head_dim = head_dim;
  s.mask = causal ? kernels::attention_mask::causal() : kernels::attention_mask::full(), s.scale = 0.125;
  return s;
}
/// Returns the shape with only the last queries of longer sequences.
shape ending(shape s) {
  s.q_offset = s.k_len - s.q_len;
  return s;
}
shape windowed(shape s, std::int64_t window) {
  s.mask = kernels::attention_mask::window_or_causal(window);
  return s;
}
/// Returns the shape with queries, keys and values in one array, as a projection makes them.
shape fused(shape s) {
  s.q_stride = s.k_stride = s.v_stride = (s.heads + 2 * s.kv_heads) * s.head_dim;
  return s;
}

std::string answer(const shape& s, bool backward, bool fixed) {
  plait::cudnn_attention::graph graph;
  graph.set_sm_version(90).set_sm_count(132);
  plait::cudnn_attention::describe(graph, s, backward, {.deterministic = fixed});
  auto status = graph.validate();
  return status.is_good() ? "ok" : status.get_message();
}

}  // namespace

int main() {
  const shape shapes[] = {
      // the step's, at every length, of SmolLM-1.7B and of models with heads of 128
      fused(of(8, 2048, 2048, 32, 32, 64)), fused(of(4, 4096, 4096, 32, 32, 64)), of(1, 16384, 16384, 32, 32, 64),
      fused(of(8, 2048, 2048, 24, 8, 128)), fused(of(8, 2048, 2048, 32, 8, 128)), fused(of(8, 2048, 2048, 16, 16, 128)),
      // a ring's pieces
      ending(of(1, 4096, 16384, 32, 32, 64)), of(1, 4096, 4096, 32, 32, 64, false), of(1, 4096, 4096, 32, 32, 64),
      // the tests'
      of(2, 17, 17, 3, 1, 8), of(1, 64, 130, 3, 1, 80, false), of(1, 130, 130, 6, 2, 64), of(1, 130, 130, 1, 1, 128),
      ending(of(1, 1, 17, 8, 1, 64)), ending(of(1, 64, 130, 1, 1, 64)), of(1, 17, 64, 2, 1, 64, false),
      windowed(of(1, 64, 64, 2, 1, 16), 1), windowed(of(1, 64, 64, 2, 1, 16), 5), windowed(of(1, 64, 64, 2, 1, 16), 63),
      fused(of(2, 17, 17, 4, 1, 8)), of(1, 40, 40, 2, 1, 64), of(1, 50, 50, 2, 1, 64), of(1, 32, 32, 2, 1, 64)};
  int refused = 0;
  std::printf("cuDNN %zu, for sm_90\n\n", cudnnGetVersion());
  std::puts(
      "| batch | queries | keys | heads | key heads | head_dim | mask | forward | backward, fixed | backward, any |");
  std::puts("|---:|---:|---:|---:|---:|---:|---|---|---|---|");
  for (const shape& given : shapes) {
    const shape s = given.checked();
    const std::string answers[] = {answer(s, false, true), answer(s, true, true), answer(s, true, false)};
    for (const std::string& a : answers) refused += a != "ok";
    const std::string mask = describe(s.mask);
    std::printf("| %ld | %ld | %ld | %ld | %ld | %ld | %s | %s | %s | %s |\n", s.batch, s.q_len, s.k_len, s.heads,
                s.kv_heads, s.head_dim, mask.c_str(), answers[0].c_str(), answers[1].c_str(), answers[2].c_str());
  }
  return refused == 0 ? 0 : 1;
}
