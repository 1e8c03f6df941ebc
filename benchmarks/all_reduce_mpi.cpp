// mpirun -n RANKS all_reduce_mpi BYTES [plait]: times MPI_Allreduce, or plait::mpi with its deadline
#include <string>

#include "all_reduce_common.hpp"
#include "plait/comm/mpi.hpp"

int main(int argc, char** argv) {
  return plait::mpi::run(argc, argv, [&](plait::mpi::communicator& comm) {
    const std::size_t bytes = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1u << 20;
    const bool plait_calls = argc > 2 && std::string(argv[2]) == "plait";
    bench::all_reduce(
        comm.rank(), bytes,
        [&](float* x, std::size_t n) {
          if (plait_calls) {
            comm.all_reduce(x, x, n, plait::dtype::f32, plait::reduce_op::sum);
          } else {
            MPI_Allreduce(MPI_IN_PLACE, x, static_cast<int>(n), MPI_FLOAT, MPI_SUM, comm.get());
          }
        },
        [&] { MPI_Barrier(comm.get()); });
  });
}
