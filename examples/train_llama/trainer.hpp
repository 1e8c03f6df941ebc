#pragma once

#include <csignal>

#include "options.hpp"
#include "plait/comm/any_communicator.hpp"

/// Set by Ctrl-C; the run ends after the step it is in.
extern volatile std::sig_atomic_t interrupted;

/// Trains on this rank, which is one of `ranks`; rank 0 reports and writes the outputs. Returns why the training could
/// not go on, the same on all ranks; empty if it could. One instantiation for each precision and strategy, in a
/// translation unit of its own.
using run_function = std::string (*)(const setup&, plait::any_communicator ranks);
/// Prints the plan of rank 0.
using plan_function = void (*)(const setup&);

struct program {
  run_function run;
  plan_function plan;
};

program float_sp();
program float_tp();
program float_sp_sharded();
program float_tp_sharded();
program double_sp();
program double_tp();
program double_sp_sharded();
program double_tp_sharded();
