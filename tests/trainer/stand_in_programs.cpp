// In place of the trainer's cuda_bf16.cpp and cuda_float.cpp, for a GPU that the CPU stands in for. One strategy will
// do: in what they differ is not the GPU's.
#include "cuda_llama_run.hpp"

namespace {

void check(const options& opt) {
  if (opt.strategy != "sp") plait::fail("this program has --strategy sp alone");
}

}  // namespace

make_run<plait::cuda> cuda_float(const options& opt) {
  check(opt);
  return make_llama_run<float, plait::megatron_sp, plait::cuda>;
}

make_run<plait::cuda> cuda_bf16(const options& opt) {
  check(opt);
  if (opt.precision != "bf16") plait::fail("this program has no --precision " + opt.precision);
  return [](const setup& s, plait::cuda& device, plait::any_communicator ranks) -> std::unique_ptr<model_run> {
    if (s.zigzag) plait::fail("this program has no zigzag order in bf16");
    using strategy = in_context<plait::megatron_sp, plait::contiguous>;
    return std::make_unique<llama_run<plait::bf16, strategy, plait::cuda>>(s, device, std::move(ranks));
  };
}
