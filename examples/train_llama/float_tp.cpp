#include "trainer_impl.hpp"

program float_tp() { return {run<float, plait::megatron_tp>, print_plan<float, plait::megatron_tp>}; }
