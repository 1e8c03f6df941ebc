// The part of plait::compiled that reads and writes files; it needs nlohmann/json (see compiled.cpp). A program without
// model directories and training states does not need it.
#ifndef PLAIT_COMPILED
#define PLAIT_COMPILED  // compiled.cpp has everything else
#endif
#define PLAIT_COMPILING_FILES
#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/models/export_hugging_face.hpp"
#include "plait/models/llama_config_json.hpp"
