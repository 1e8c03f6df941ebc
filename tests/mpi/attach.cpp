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

int mistakes = 0;

void expect(bool right, const std::string& otherwise) {
  if (right) return;
  ++mistakes;
  std::printf("%s\n", otherwise.c_str());
}
/// The text of the error that call() throws.
template <class Call>
std::string text_of(const Call& call) {
  try {
    call();
  } catch (const pl::error& e) {
    return e.what();
  }
  return "nothing";
}

/// The next operation reports the error of an operation whose request was dropped.
void test_dropped_request(pl::mpi::communicator comm) {
  const int rank = comm.rank(), next = (rank + 1) % comm.size(), last = (rank + comm.size() - 1) % comm.size();
  float four[4] = {}, ten[10] = {};
  {
    const pl::request received = comm.start_receive(ten, 10, pl::dtype::f32, last, 0);
    comm.send(four, 4, pl::dtype::f32, next, 0);
  }
  const std::string text = text_of([&] { comm.barrier(); });
  expect(text.find("got 4 elements, expected 10 (its request was dropped)") != text.npos,
         "of a receive that got too little, the next operation says: " + text);
  comm.barrier();
}

/// Ranks wait for a message and for a large sum in different orders, where MPI supports one thread only.
void test_one_thread(pl::mpi::communicator comm) {
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
  expect(all.front() == static_cast<float>(comm.size()) && all.back() == all.front() &&
             (rank % 2 != 0 || got == static_cast<float>(peer)),
         "a sum or a message is wrong where one thread moves both");
}

/// A sum in flight keeps the size of pieces with which it was started.
void test_new_piece(pl::mpi::communicator comm) {
  std::vector<float> all(1 << 18, 1.0f);
  if (comm.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  pl::request sum = comm.start_all_reduce(all.data(), all.data(), all.size(), pl::dtype::f32, pl::reduce_op::sum);
  if (comm.rank() == 0) sum.wait();
  comm.set_piece(4096);
  if (comm.rank() != 0) sum.wait();
  expect(all.front() == static_cast<float>(comm.size()) && all.back() == all.front(),
         "a sum is wrong where the size of pieces changes");
}

/// An attached communicator cannot be attached again until the first attachment ends, but its duplicate can.
void test_second_attach(MPI_Comm comm) {
  const pl::mpi::communicator first = pl::mpi::communicator::attach(comm);
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Comm_dup(comm, &copy);
  pl::mpi::communicator::attach(copy).barrier();
  MPI_Comm_free(&copy);
  const std::string text = text_of([&] { pl::mpi::communicator::attach(comm); });
  expect(text.find("this MPI_Comm is attached already") != text.npos, "a second attach says: " + text);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
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
      expect(sum == static_cast<double>(2 * first + 1), "a group gave a wrong sum");
    }
    int still = 1, all = 0;
    MPI_Allreduce(&still, &all, 1, MPI_INT, MPI_SUM, my_comm);  // the caller's communicator still works
    expect(all == ranks, "the attached communicator gave a wrong sum");
    MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
    MPI_Comm_get_errhandler(my_comm, &handler);
    expect(handler == MPI_ERRORS_ARE_FATAL, "the communicator has another error handler than before");
    // A null communicator is an error of plait; MPI would stop the program.
    const std::string text = text_of([] { pl::mpi::communicator::attach(MPI_COMM_NULL, "mine"); });
    expect(text ==
               "attach: the MPI_Comm of 'mine' is MPI_COMM_NULL; give one that this process is in, such as a "
               "duplicate of MPI_COMM_WORLD",
           "of MPI_COMM_NULL, attach says: " + text);
    test_second_attach(my_comm);
    test_new_piece(pl::mpi::communicator::attach(my_comm));
    test_dropped_request(pl::mpi::communicator::attach(my_comm));
    test_one_thread(pl::mpi::communicator::attach(my_comm));
    MPI_Comm_free(&my_comm);
  }
  MPI_Finalize();
  return mistakes == 0 ? 0 : 1;
}
