#include "trainer_impl.hpp"

program float_sp_sharded() {
  return {run<float, plait::stored_over_dp<plait::megatron_sp>>,
          print_plan<float, plait::stored_over_dp<plait::megatron_sp>>};
}
