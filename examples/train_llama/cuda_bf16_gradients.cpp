#include "cuda_llama_run.hpp"

make_run<plait::cuda> cuda_bf16_gradients(const options& opt) {
  if (opt.precision == "bf16-no-masters") return make_llama_run<plait::bf16_gradients, plait::megatron_sp, plait::cuda>;
  return make_llama_run<plait::bf16_gradients_float_masters, plait::megatron_sp, plait::cuda>;
}
