#include "llama_run.hpp"

std::unique_ptr<model_run> float_tp_sharded(const setup& s, plait::cpu& device, plait::any_communicator ranks) {
  return std::make_unique<llama_run<float, plait::stored_over_dp<plait::megatron_tp>, plait::cpu>>(s, device,
                                                                                                   std::move(ranks));
}
