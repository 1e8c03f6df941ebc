// A world on a communicator that the caller owns and still uses afterwards.
#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "plait/comm/mpi.hpp"
#include "plait/comm/world.hpp"

namespace pl = plait;

/// The next operation reports the error of an operation whose request was dropped. Returns the number of mistakes.
int test_dropped_request(pl::mpi::communicator comm) {
  const int rank = comm.rank(), next = (rank + 1) % comm.size(), last = (rank + comm.size() - 1) % comm.size();
  float four[4] = {}, ten[10] = {};
  {
    const pl::request received = comm.start_receive(ten, 10, pl::dtype::f32, last, 0);
    comm.send(four, 4, pl::dtype::f32, next, 0);
  }
  try {
    comm.barrier();
  } catch (const pl::error& e) {
    const std::string text = e.what();
    if (text.find("got 4 elements, expected 10 (its request was dropped)") != text.npos) {
      comm.barrier();
      return 0;
    }
    std::printf("the next operation says: %s\n", text.c_str());
    return 1;
  }
  std::printf("the next operation says nothing of a receive that got too little\n");
  return 1;
}

/// Ranks wait for a message and for a large sum in different orders, where MPI supports one thread only.
int test_one_thread(pl::mpi::communicator comm) {
  const int rank = comm.rank(), peer = rank ^ 1;
  std::vector<float> all(1 << 16, 1.0f);
  float sent = static_cast<float>(rank), got = -1;
  pl::request sum = comm.start_all_reduce(all.data(), all.data(), all.size(), pl::dtype::f32, pl::reduce_op::sum);
  if (rank % 2 == 0) {
    if (peer < comm.size()) comm.receive(&got, 1, pl::dtype::f32, peer, 3);
    sum.wait();
  } else {
    sum.wait();
    comm.send(&sent, 1, pl::dtype::f32, peer, 3);
  }
  const bool right = all.front() == static_cast<float>(comm.size()) && all.back() == all.front() &&
                     (rank % 2 != 0 || got == static_cast<float>(peer));
  if (!right) std::printf("a sum or a message is wrong where one thread moves both\n");
  return right ? 0 : 1;
}

/// A sum in flight keeps the size of pieces with which it was started.
int test_new_piece(pl::mpi::communicator comm) {
  std::vector<float> all(1 << 18, 1.0f);
  if (comm.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  pl::request sum = comm.start_all_reduce(all.data(), all.data(), all.size(), pl::dtype::f32, pl::reduce_op::sum);
  if (comm.rank() == 0) sum.wait();
  comm.set_piece(4096);
  if (comm.rank() != 0) sum.wait();
  const bool right = all.front() == static_cast<float>(comm.size()) && all.back() == all.front();
  if (!right) std::printf("a sum is wrong where the size of pieces changes\n");
  return right ? 0 : 1;
}

/// A null communicator is an error of plait; MPI would stop the program.
int test_null_communicator() {
  std::string text = "nothing";
  try {
    pl::mpi::communicator::attach(MPI_COMM_NULL, "mine");
  } catch (const pl::error& e) {
    text = e.what();
  }
  if (text ==
      "attach: the MPI_Comm of 'mine' is MPI_COMM_NULL; give one that this process is in, such as a duplicate "
      "of MPI_COMM_WORLD")
    return 0;
  std::printf("of MPI_COMM_NULL, attach says: %s\n", text.c_str());
  return 1;
}

/// An attached communicator cannot be attached again until the first attachment ends, but its duplicate can.
int test_second_attach(MPI_Comm comm) {
  const pl::mpi::communicator first = pl::mpi::communicator::attach(comm);
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Comm_dup(comm, &copy);
  pl::mpi::communicator::attach(copy).barrier();
  MPI_Comm_free(&copy);
  try {
    const pl::mpi::communicator second = pl::mpi::communicator::attach(comm);
  } catch (const pl::error& e) {
    const std::string text = e.what();
    if (text.find("this MPI_Comm is attached already") != text.npos) return 0;
    std::printf("a second attach says: %s\n", text.c_str());
    return 1;
  }
  std::printf("a communicator is attached twice\n");
  return 1;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int bad = 0;
  {
    MPI_Comm my_comm = MPI_COMM_NULL;
    MPI_Comm_dup(MPI_COMM_WORLD, &my_comm);
    int ranks = 0;
    MPI_Comm_size(my_comm, &ranks);
    const pl::mesh_shape shape = pl::mesh<pl::axis<pl::dp>, pl::axis<pl::tp, 2>>(ranks / 2).shape();
    MPI_Comm_set_errhandler(my_comm, MPI_ERRORS_ARE_FATAL);
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
    MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
    MPI_Comm_get_errhandler(my_comm, &handler);
    if (handler != MPI_ERRORS_ARE_FATAL) std::printf("the communicator has another error handler than before\n"), ++bad;
    bad += test_null_communicator();
    bad += test_second_attach(my_comm);
    bad += test_new_piece(pl::mpi::communicator::attach(my_comm));
    bad += test_dropped_request(pl::mpi::communicator::attach(my_comm));
    bad += test_one_thread(pl::mpi::communicator::attach(my_comm));
    MPI_Comm_free(&my_comm);
  }
  MPI_Finalize();
  if (bad != 0) std::printf("a group or the attached communicator gave a wrong sum\n");
  return bad == 0 ? 0 : 1;
}
