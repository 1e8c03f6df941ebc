// Replaces the trainer's cuda_llama_run.cpp, for a GPU that the CPU stands in for. It has one strategy: the strategies
// use the GPU in the same way.
#include "cuda_llama_run.hpp"

make_run<plait::cuda> cuda_program(const options& opt) {
  if (opt.mixture && in_bf16(opt)) plait::fail("this program has experts with --precision float alone");
  if (opt.mixture) return make_llama_run<float, plait::megatron_experts, plait::cuda>;
  if (opt.strategy != "sp") plait::fail("this program has --strategy sp alone");
  if (!in_bf16(opt)) return make_llama_run<float, plait::megatron_sp, plait::cuda>;
  if (opt.precision != "bf16") plait::fail("this program has no --precision " + opt.precision);
  if (has_bf16_gradients(opt))
    return make_llama_run<plait::bf16_gradients_float_masters, plait::megatron_sp, plait::cuda>;
  return [](const setup& s, plait::cuda& device, plait::any_communicator ranks) -> std::unique_ptr<model_run> {
    if (s.zigzag) plait::fail("this program has no zigzag order in bf16");
    using strategy = in_context<plait::megatron_sp, plait::contiguous>;
    return std::make_unique<llama_run<plait::bf16, strategy, plait::cuda>>(s, device, std::move(ranks));
  };
}
