#include "run.hpp"

// CMake writes a file for each of these types. It leaves out the others, because instantiations take long to compile.
make_run<plait::cuda> cuda_program(const options& opt) {
  using plait::megatron_sp;
  if (opt.mixture)
    return in_bf16(opt) ? make_llama_run<plait::bf16, plait::megatron_experts, plait::cuda>
                        : make_llama_run<float, plait::megatron_experts, plait::cuda>;
  const bool has_masters = opt.precision != "bf16-no-masters";
  if (!in_bf16(opt)) return make_llama_run<float, megatron_sp, plait::cuda>;
  if (has_bf16_gradients(opt))
    return has_masters ? make_llama_run<plait::bf16_gradients_float_masters, megatron_sp, plait::cuda>
                       : make_llama_run<plait::bf16_gradients, megatron_sp, plait::cuda>;
  if (!has_masters) return make_llama_run<plait::bf16_no_masters, megatron_sp, plait::cuda>;
  return opt.strategy == "sp" ? make_llama_run<plait::bf16, megatron_sp, plait::cuda>
                              : make_llama_run<plait::bf16, plait::megatron_tp, plait::cuda>;
}
