// Programs' macros that are words of plait's: taken away between this header and core/macros_on.hpp, which every header
// that uses such a word includes at its end. Included any number of times. Test: tests/consumer/plain.sh warnings.
#include "plait/version.hpp"

#pragma push_macro("min")
#undef min
#pragma push_macro("max")
#undef max
#pragma push_macro("None")
#undef None
#pragma push_macro("I")
#undef I
#pragma push_macro("small")
#undef small
#pragma push_macro("check")
#undef check
#pragma push_macro("verify")
#undef verify
#pragma push_macro("require")
#undef require
#pragma push_macro("fail")
#undef fail
