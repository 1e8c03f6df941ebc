#include "cuda_llama_run.hpp"

make_run<plait::cuda> cuda_float(const options&) { return make_llama_run<float, plait::megatron_sp, plait::cuda>; }
