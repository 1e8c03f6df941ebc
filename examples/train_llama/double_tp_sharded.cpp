#include "trainer_impl.hpp"

program double_tp_sharded() {
  return {run<double, plait::stored_over_dp<plait::megatron_tp>>,
          print_plan<double, plait::stored_over_dp<plait::megatron_tp>>};
}
