#include "trainer_impl.hpp"

program double_sp_sharded() {
  return {run<double, plait::stored_over_dp<plait::megatron_sp>>,
          print_plan<double, plait::stored_over_dp<plait::megatron_sp>>};
}
