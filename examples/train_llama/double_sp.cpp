#include "trainer_impl.hpp"

program double_sp() { return {run<double, plait::megatron_sp>, print_plan<double, plait::megatron_sp>}; }
