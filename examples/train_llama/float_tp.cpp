#include "llama_run.hpp"

std::unique_ptr<model_run> float_tp(const setup& s, plait::cpu& device, plait::any_communicator ranks) {
  return make_llama_run<float, plait::megatron_tp>(s, device, std::move(ranks));
}
