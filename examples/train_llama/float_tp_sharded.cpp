#include "trainer_impl.hpp"

program float_tp_sharded() {
  return {run<float, plait::stored_over_dp<plait::megatron_tp>>,
          print_plan<float, plait::stored_over_dp<plait::megatron_tp>>};
}
