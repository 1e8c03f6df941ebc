// Restores the program's macros that core/macros_off.hpp has undefined. Both files must list the same names.
#include "plait/version.hpp"

#pragma pop_macro("min")
#pragma pop_macro("max")
#pragma pop_macro("None")
#pragma pop_macro("I")
#pragma pop_macro("small")
#pragma pop_macro("check")
#pragma pop_macro("verify")
#pragma pop_macro("require")
#pragma pop_macro("fail")
