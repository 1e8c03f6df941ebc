// Undefines the program's macros whose names plait uses, until core/macros_on.hpp restores them. Every header that uses
// one of these names includes core/macros_on.hpp at its end. Both may be included many times. Test:
// tests/consumer/plain.sh warnings.
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
