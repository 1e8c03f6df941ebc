// Programs that must end on every rank with an error text and a non-zero exit code: mpirun -n 4 throws
// throw|deadline|stop|abort|count
#include <chrono>
#include <csignal>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>

#include "plait/comm/mpi.hpp"

int main(int argc, char** argv) {
  const std::string how = argc > 1 ? argv[1] : "throw";
  return plait::mpi::run(argc, argv, [&](plait::mpi::communicator& world) {
    float x[2] = {1, 2};
    world.all_reduce(x, x, 2, plait::dtype::f32, plait::reduce_op::sum);
    world.set_deadline(how == "deadline" || how == "stop" ? 3 : 30);
    const bool odd_one = world.rank() == world.size() - 1;
    if (how == "throw" && odd_one) {
      plait::request open = world.start_all_reduce(x, x, 2, plait::dtype::f32, plait::reduce_op::sum);
      throw std::runtime_error("the weights are not finite");
    }
    if (how == "abort" && odd_one) world.abort("enough");
    if (how == "stop") {
      world.barrier();
      if (odd_one) std::raise(SIGSTOP);
      if (world.rank() == 2) {
        world.set_deadline(20);  // the other ranks end first, after this rank has reported which rank it waits for
        world.receive(x, 2, plait::dtype::f32, 3);
      }
      world.start_all_reduce(x, x, 2, plait::dtype::f32, plait::reduce_op::max).wait();
    }
    if (how == "deadline" && odd_one) std::this_thread::sleep_for(std::chrono::seconds(20));
    if (how == "count") {
      if (world.rank() == 0) world.send(x, 1, plait::dtype::f32, 1);
      if (world.rank() == 1) world.receive(x, 2, plait::dtype::f32, 0);
    }
    world.all_reduce(x, x, 2, plait::dtype::f32, plait::reduce_op::max);
    world.barrier();
    if (how != "count") std::puts("not reached");
  });
}
