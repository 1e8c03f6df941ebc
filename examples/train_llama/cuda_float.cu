#include "cuda_llama_run.hpp"

make_run<plait::cuda> cuda_float(const options& opt) { return cuda_run<float>(opt); }
