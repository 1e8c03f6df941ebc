#pragma once

#include <csignal>

/// Set by Ctrl-C; the run ends after the step it is in.
extern volatile std::sig_atomic_t interrupted;
