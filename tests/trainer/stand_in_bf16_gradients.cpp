// Compiles one precision of the trainer for a GPU that the CPU stands in for.
#include "cuda_llama_run.hpp"

template std::unique_ptr<model_run> make_llama_run<plait::bf16_gradients_float_masters, plait::megatron_sp,
                                                   plait::cuda>(const setup&, plait::cuda&, plait::any_communicator);
