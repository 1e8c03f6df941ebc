// The inner part of comm/mpi.hpp that finds out which ranks are on other hosts, and how fast messages go there.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <vector>

#include "plait/comm/mpi/calls.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::mpi::detail {

/// Returns the ranks that those of `comm` have in `other`; MPI_UNDEFINED of those that are not there.
inline std::vector<int> ranks_in(MPI_Comm comm, int size, MPI_Comm other) {
  MPI_Group from = MPI_GROUP_NULL, to = MPI_GROUP_NULL;
  check(MPI_Comm_group(comm, &from), "MPI_Comm_group");
  check(MPI_Comm_group(other, &to), "MPI_Comm_group");
  std::vector<int> own(static_cast<std::size_t>(size)), there(own.size());
  std::iota(own.begin(), own.end(), 0);
  check(MPI_Group_translate_ranks(from, size, own.data(), to, there.data()), "MPI_Group_translate_ranks");
  MPI_Group_free(&from);
  MPI_Group_free(&to);
  return there;
}

/// Returns the bytes a second that the slowest rank sends to another host while it receives as many from one, all at
/// one time; infinity where all are on one host. Collective; takes 20 ms or 16 MB, and no less than 2 MB.
inline double rate_between_hosts(MPI_Comm comm, int rank, int size, const std::vector<char>& far) {
  constexpr int bytes = 1 << 20;
  for (const int shift : {size / 2, 1}) {  // one next to the other, hosts differ somewhere
    const int to = (rank + shift) % size, from = (rank + size - shift) % size;
    int crosses = far[static_cast<std::size_t>(to)];
    check(MPI_Allreduce(MPI_IN_PLACE, &crosses, 1, MPI_INT, MPI_MAX, comm), "MPI_Allreduce");
    if (crosses == 0) continue;
    std::vector<char> out(bytes), in(bytes);
    double best = std::numeric_limits<double>::infinity(), total = 0;
    for (int round = 0; round < 2 || (round < 16 && total < 0.02); ++round) {
      MPI_Request under_way[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
      const double begin = MPI_Wtime();
      if (far[static_cast<std::size_t>(from)])
        check(MPI_Irecv(in.data(), bytes, MPI_BYTE, from, 0, comm, &under_way[0]), "MPI_Irecv");
      if (far[static_cast<std::size_t>(to)])
        check(MPI_Isend(out.data(), bytes, MPI_BYTE, to, 0, comm, &under_way[1]), "MPI_Isend");
      check(MPI_Waitall(2, under_way, MPI_STATUSES_IGNORE), "MPI_Waitall");
      double took = MPI_Wtime() - begin;
      check(MPI_Allreduce(MPI_IN_PLACE, &took, 1, MPI_DOUBLE, MPI_MAX, comm), "MPI_Allreduce");
      total += took;
      if (round > 0) best = std::min(best, took);  // the first opens connections, and takes what a link has saved up
    }
    return bytes / best;
  }
  return std::numeric_limits<double>::infinity();
}

/// Bytes a second below which a link between hosts is slow. What is started over such a link goes in pieces
/// (exchange.hpp). They take up to 1.4 s more of processor time for each GB, and hide a good part of the link's time.
/// Measured (benchmarks/results, two hosts): 6 to 28 % more tokens a second at 1 Gbit/s; at 10 Gbit/s up to 4 % fewer
/// in the mean.
inline constexpr double slow_link = 4e8;

/// Returns for each rank of a communicator whether it is reached over a slow link: the same answer on all ranks of a
/// host, and for both ranks of a pair. Collective.
inline std::vector<char> ranks_over_slow_link(MPI_Comm comm, int rank, int size) {
  MPI_Comm host = MPI_COMM_NULL, own = MPI_COMM_NULL;
  check(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host), "MPI_Comm_split_type");
  std::vector<char> far;
  for (const int there : ranks_in(comm, size, host)) far.push_back(there == MPI_UNDEFINED);
  MPI_Comm_free(&host);
  check(MPI_Comm_dup(comm, &own), "MPI_Comm_dup");  // the caller's may have messages of other code under way
  const bool slow = rate_between_hosts(own, rank, size, far) < slow_link;
  MPI_Comm_free(&own);
  return slow ? far : std::vector<char>(far.size());
}
/// Returns the same for a part of `whole`. Asks no other rank.
inline std::vector<char> ranks_over_slow_link(MPI_Comm part, int size, MPI_Comm whole,
                                              const std::vector<char>& of_whole) {
  std::vector<char> slow;
  for (const int there : ranks_in(part, size, whole)) slow.push_back(of_whole[static_cast<std::size_t>(there)]);
  return slow;
}

}  // namespace plait::mpi::detail

#include "plait/core/macros_on.hpp"
