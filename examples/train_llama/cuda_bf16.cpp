#include "cuda_llama_run.hpp"
#include "strategies.hpp"

make_run<plait::cuda> cuda_bf16(const options& opt) {
  if (opt.precision == "bf16-no-masters")
    return make_llama_run<plait::bf16_no_masters, plait::megatron_sp, plait::cuda>;
  return with_strategy(opt,
                       []<class S>() -> make_run<plait::cuda> { return make_llama_run<plait::bf16, S, plait::cuda>; });
}
