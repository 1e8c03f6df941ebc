#pragma once

#include <atomic>

/// The signal that asks the run to end after the step it is in, such as Ctrl-C's; else 0. A handler sets it, and the
/// threads of all ranks read it.
extern std::atomic<int> interrupted;
/// Whether SIGUSR1 has asked for a save since the last one.
extern std::atomic<int> save_asked;
static_assert(std::atomic<int>::is_always_lock_free);  // else no signal handler may touch it
