// expect: token files are little-endian and are read in place
// A compiler for a big-endian processor, as far as the standard library asks.
#ifndef PLAIT_FAIL_FIX
#undef __BYTE_ORDER__
#define __BYTE_ORDER__ __ORDER_BIG_ENDIAN__
#endif
#include "../../examples/train_llama/data/tokens.hpp"
