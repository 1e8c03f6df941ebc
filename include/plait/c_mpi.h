// Starts the ranks of C programs (plait/c.h) on an MPI communicator.
#pragma once

#include <mpi.h>

#include "plait/c.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Runs `body` on this process as one rank of `comm`, which the caller keeps. Collective over `comm`. Returns as
/// `plait_run_threads` does. After an error the other ranks may still wait, and the caller ends them by MPI_Abort.
int plait_run_mpi(MPI_Comm comm, plait_body body, void* user, char* text, size_t size);

#ifdef __cplusplus
}
#endif

#if defined(__cplusplus) && defined(PLAIT_C_DEFINE)
#include "plait/comm/mpi.hpp"
int plait_run_mpi(MPI_Comm comm, plait_body body, void* user, char* text, size_t size) {
  return plait::c::explain(text, size, [&] { plait::c::run_rank(plait::mpi::communicator::attach(comm), body, user); });
}
#endif
