// expect: optimizers take gradients in float or double, and this precision has them in bf16: update its parameters with an optimizer of your own, or use bf16 or bf16_no_masters
#include "plait/train/optim/adamw.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
using precision_type = bf16_no_masters;
#else
using precision_type = bf16_gradients;
#endif

void make() { adamw<precision_type> optimizer; }
