#include "cuda_llama_run.hpp"
#include "strategies.hpp"

// `check_device` refuses what is not here.
make_run<plait::cuda> cuda_bf16(const options& opt) {
  return with_strategy(opt, []<class S>() -> make_run<plait::cuda> {
    if constexpr (std::is_same_v<S, plait::stored_over_dp<plait::megatron_tp>>)
      return nullptr;
    else
      return make_llama_run<plait::bf16, S, plait::cuda>;
  });
}
