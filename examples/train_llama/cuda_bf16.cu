#include "cuda_llama_run.hpp"

make_run<plait::cuda> cuda_bf16(const options& opt) { return cuda_run<plait::bf16>(opt); }
