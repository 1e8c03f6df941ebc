// What programs that define PLAIT_COMPILED link with: plait's code that names no user's type, compiled once, with the
// compiler and the flags of those programs. CMake's target is plait::compiled; without CMake, compile this file.
#undef PLAIT_COMPILED  // which may be defined for all files of a program
#define PLAIT_COMPILING
#include "plait/models/language_model.hpp"
#include "plait/nn.hpp"
#include "plait/train.hpp"
