// The version of plait, and `pl`, its short name.
#pragma once

#define PLAIT_VERSION_MAJOR 0
#define PLAIT_VERSION_MINOR 1
#define PLAIT_VERSION_PATCH 0

namespace plait {}
namespace pl = plait;  // the name that users' code reads best with
