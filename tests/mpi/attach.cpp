// A world on a communicator of the caller's, which stays the caller's.
#include <mpi.h>

#include <cstdio>

#include "plait/comm/mpi.hpp"
#include "plait/comm/world.hpp"

namespace pl = plait;

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int bad = 0;
  {
    MPI_Comm my_comm = MPI_COMM_NULL;
    MPI_Comm_dup(MPI_COMM_WORLD, &my_comm);
    int ranks = 0;
    MPI_Comm_size(my_comm, &ranks);
    const pl::mesh_shape shape = pl::mesh<pl::axis<pl::dp>, pl::axis<pl::tp, 2>>(ranks / 2).shape();
    {
      pl::world world(shape, pl::mpi::communicator::attach(my_comm));
      double sum = static_cast<double>(world.rank());
      world.group(pl::axis_list(pl::axis_of<pl::tp>)).all_reduce(&sum, &sum, 1, pl::dtype::f64, pl::reduce_op::sum);
      const std::int64_t first = world.rank() / 2 * 2;
      bad += sum != static_cast<double>(2 * first + 1);
    }
    int still = 1, all = 0;
    MPI_Allreduce(&still, &all, 1, MPI_INT, MPI_SUM, my_comm);  // the caller's communicator still works
    bad += all != ranks;
    MPI_Comm_free(&my_comm);
  }
  MPI_Finalize();
  if (bad != 0) std::printf("a group or the attached communicator gave a wrong sum\n");
  return bad == 0 ? 0 : 1;
}
