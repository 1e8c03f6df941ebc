// Programs that define PLAIT_COMPILED link with this file: it compiles once the code of plait that names no user's
// type, with the compiler and the flags of those programs. CMake's target is plait::compiled; without CMake, compile
// it, and compiled_files.cpp for programs that read or write models and training states.
#undef PLAIT_COMPILED  // which may be defined for all files of a program
#define PLAIT_COMPILING
#include "plait/models/language_model.hpp"
#include "plait/models/llama_config.hpp"
#include "plait/nn.hpp"
#include "plait/schedule/order.hpp"
#include "plait/train.hpp"
