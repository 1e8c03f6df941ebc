#include "cuda_llama_run.hpp"

// In one translation unit, as they share the kernels. `check_device` refuses what is not here.
make_run<plait::cuda> cuda_bf16(const options& opt) {
  if (opt.strategy == "tp") return make_llama_run<plait::bf16, plait::megatron_tp, plait::cuda>;
  return opt.store == "sharded" ? make_llama_run<plait::bf16, plait::stored_over_dp<plait::megatron_sp>, plait::cuda>
                                : make_llama_run<plait::bf16, plait::megatron_sp, plait::cuda>;
}
