#include "trainer_impl.hpp"

program float_sp() { return {run<float, plait::megatron_sp>, print_plan<float, plait::megatron_sp>}; }
