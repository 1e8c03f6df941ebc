// The C functions that layouts.h declares.
#define PLAIT_C_DEFINE
#include "layouts.h"
