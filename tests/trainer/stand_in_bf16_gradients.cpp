// In place of the trainer's cuda_bf16_gradients.cpp, for a GPU that the CPU stands in for, with one precision.
#include "cuda_llama_run.hpp"

make_run<plait::cuda> cuda_bf16_gradients(const options& opt) {
  if (opt.precision != "bf16") plait::fail("this program has no --gradients bf16 with --precision " + opt.precision);
  return make_llama_run<plait::bf16_gradients_float_masters, plait::megatron_sp, plait::cuda>;
}
