// Prints the launches of kernels with dynamic shared memory: name, threads of a block, bytes. ptxas reports neither
// number, so budget.py runs this program, compiled with the stand-in for CUDA.
#include <cstdio>

#include "plait/kernels/cuda/attention_kernels.hpp"
#include "plait/kernels/cuda/experts/router.hpp"

namespace {

using namespace plait::kernels::detail;
using plait::kernels::warp_lanes;

/// The last template argument of the kernels of attention, as c++filt writes it. The rule is the one of
/// cuda/rule_mask.cu.
constexpr const char* sizes_of_attention[] = {"attention_sizes", "scored_attention_sizes",
                                              "ruled_attention_sizes<&test::same_chunk> "};

template <int Width>
void print_mma(const char* name, int threads, std::size_t bytes) {
  for (const char* sizes : sizes_of_attention) std::printf("%s<%d, %s> %d %zu\n", name, Width, sizes, threads, bytes);
}

template <class T, int Width>
void print_scalar(const char* name, const char* type, std::size_t bytes) {
  for (const char* sizes : sizes_of_attention)
    std::printf("%s<%s, %d, %s> %d %zu\n", name, type, Width, sizes, scalar_threads, bytes);
}

template <class T, int Width>
void print_scalars(const char* type) {
  print_scalar<T, Width>("attention_forward_scalar", type, scalar_forward_tiles<T, Width>::shared_bytes);
  for (const char* name : {"attention_key_gradients_scalar", "attention_query_gradients_scalar"})
    print_scalar<T, Width>(name, type, scalar_backward_tiles<T, Width>::shared_bytes);
}

template <int Width>
void print_all() {
  using forward = forward_tiles<Width>;
  using backward = backward_tiles<Width>;
  print_mma<Width>("attention_forward_mma", forward::threads, forward::shared_bytes);
  print_mma<Width>("attention_key_gradients_mma", backward::threads, backward::key_shared_bytes);
  print_mma<Width>("attention_query_gradients_mma", backward::threads, backward::query_shared_bytes);
  print_scalars<float, Width>("float");
  print_scalars<double, Width>("double");
}

/// The kernels of a router of 256 experts in 8 groups, as in DeepSeek-V3.
void print_router(const char* types, const char* choice, const char* counted, std::size_t number) {
  const std::size_t bytes = 256 * number;
  std::printf("choose_for_tokens<%s> %d %zu\n", choice, warp_lanes, bytes_to_choose(256, 8, number));
  std::printf("choose_for_tokens_backward<%s> %d %zu\n", types, warp_lanes, 2 * bytes);
  for (const char* losses : {choice, counted}) {
    std::printf("router_losses_of<%s> %d %zu\n", losses, warp_lanes, bytes);
    std::printf("add_router_gradients<%s> %d %zu\n", losses, warp_lanes, bytes);
  }
}

}  // namespace

int main() {
  print_router("float, float", "float, float, float", "float, int, float", sizeof(float));
  print_router("bf16, float", "bf16, float, float", "bf16, int, float", sizeof(float));
  std::printf("choose_for_tokens<bf16, bf16, float> %d %zu\n", warp_lanes, bytes_to_choose(256, 8, sizeof(float)));
  std::printf("router_losses_of<bf16, bf16, float> %d %zu\n", warp_lanes, 256 * sizeof(float));
  std::printf("add_router_gradients<bf16, bf16, float> %d %zu\n", warp_lanes, 256 * sizeof(float));
  print_router("double, double", "double, double, double", "double, int, double", sizeof(double));
  print_all<64>();
  print_all<128>();
  print_all<256>();
}
