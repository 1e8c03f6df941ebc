#include "trainer_impl.hpp"

program double_tp() { return {run<double, plait::megatron_tp>, print_plan<double, plait::megatron_tp>}; }
