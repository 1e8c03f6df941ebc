#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "options.hpp"

// Words about a run, for its beginning and its plan.

/// "1 rank" or "2 ranks".
std::string counted(std::int64_t n, const char* what, const char* plural = "s");

/// "dp=2, tp=4": the extents as given, and how many ranks hold each key-value head where tp outnumbers them.
std::string mesh_text(const plait::mesh_shape& shape);

/// "pipeline: zb_v, stages of 3, 3, 3, 2 layers".
std::string pipeline_text(const setup& s, const std::vector<plait::stage_layers>& stages);

/// What layers recompute, as a line; empty where it is nothing and none was asked for.
std::string recompute_text(const setup& s);

/// The options as --plan auto has made them, as a line.
std::string plan_text(const setup& s);
