#include <type_traits>

#include "plait/device/cuda.hpp"
#include "run.hpp"

make_run<plait::cuda> cuda_program(const options& opt) {
  return with_types(opt, []<class Precision, class S>() -> make_run<plait::cuda> {
    // options.cpp refuses these types on GPUs, and CMake writes no files for them: instantiations take long to compile.
    constexpr bool tensor_parallel_float = std::is_same_v<Precision, float> && std::is_same_v<S, plait::megatron_tp>;
    if constexpr (std::is_same_v<Precision, double> || tensor_parallel_float)
      return nullptr;
    else
      return make_llama_run<Precision, S, plait::cuda>;
  });
}
