// expect: safetensors files are little-endian and are used in place
// Makes the standard library report a big-endian processor.
#ifndef PLAIT_FAIL_FIX
#undef __BYTE_ORDER__
#define __BYTE_ORDER__ __ORDER_BIG_ENDIAN__
#endif
#include "plait/checkpoint/safetensors.hpp"
