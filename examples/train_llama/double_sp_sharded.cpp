#include "llama_run.hpp"

std::unique_ptr<model_run> double_sp_sharded(const setup& s, plait::cpu& device, plait::any_communicator ranks) {
  return make_llama_run<double, plait::stored_over_dp<plait::megatron_sp>>(s, device, std::move(ranks));
}
