// expect-gcc: from 'const char [24]' to 'plait::name'
// expect-clang: no viable conversion from 'const char[24]'
#include "plait/layout/spec.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
struct right : axis_tag<"an_axis_of_sixte"> {};
#else
struct wrong : axis_tag<"an_axis_of_23_character"> {};
#endif
