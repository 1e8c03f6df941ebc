// NCCL communicators for processes that MPI has started. MPI carries NCCL's id, and finds the processes of each host;
// tensors go through NCCL only.
#pragma once

#include <mpi.h>

#include "plait/comm/launch/nccl.hpp"
#include "plait/comm/mpi.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::nccl {

/// Returns the index of this process among those of its host, which is the GPU to choose. Collective.
inline int local_rank(const mpi::communicator& ranks) {
  MPI_Comm host = MPI_COMM_NULL;
  mpi::detail::check(MPI_Comm_split_type(ranks.get(), MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host),
                     "MPI_Comm_split_type");
  int rank = 0;
  mpi::detail::check(MPI_Comm_rank(host, &rank), "MPI_Comm_rank");
  MPI_Comm_free(&host);
  return rank;
}

/// Returns the NCCL communicator of the processes of `ranks`. It needs MPI only to share the id. Collective.
inline communicator from_mpi(mpi::communicator& ranks, cuda& device, const options& settings = {}) {
  ncclUniqueId id{};
  if (ranks.rank() == 0) id = new_id();
  ranks.broadcast(&id, sizeof id, dtype::u8, 0);
  return connect(device, id, ranks.rank(), ranks.size(), settings);
}

}  // namespace plait::nccl

#include "plait/core/macros_on.hpp"
