// Meshes, specs, redistribution plans and pipeline schedules: everything that is decided before a program runs. This
// header needs only the standard library, and most of it is `constexpr`.
#pragma once

#include "plait/layout/check.hpp"
#include "plait/layout/cost.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/layout/parse.hpp"
#include "plait/layout/plan.hpp"
#include "plait/layout/rules.hpp"
#include "plait/layout/spec.hpp"
#include "plait/schedule/automatic.hpp"
#include "plait/schedule/simulate.hpp"
#include "plait/schedule/verified.hpp"
