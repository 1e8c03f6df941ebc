// The code of plait that depends on no user type, compiled once. A program that defines PLAIT_COMPILED links it.
// Compile it with that program's compiler and flags. CMake's target is plait::compiled. Without CMake, also compile
// compiled_files.cpp for programs that read or write models and training states.
#undef PLAIT_COMPILED  // a program may define it for all its files
#define PLAIT_COMPILING
#include "plait/models/language_model.hpp"
#include "plait/models/llama_config.hpp"
#include "plait/nn.hpp"
#include "plait/schedule/order.hpp"
#include "plait/train.hpp"
