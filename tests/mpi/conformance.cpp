// The conformance suite over MPI: mpirun -n 4 conformance
#include "support/conformance.hpp"

#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/ledger.hpp"
#include "plait/comm/mpi.hpp"

int main(int argc, char** argv) {
  return plait::mpi::run(argc, argv, [](plait::mpi::communicator& world) {
    plait::test::conformance(world, 1, 60);
    plait::any_communicator any(world);
    plait::test::check_types(any);
    plait::any_communicator counted = any.counted(std::make_shared<plait::ledger>());
    plait::test::check_types(counted);
    plait::test::check_interleaved(counted);

    // Large ones that are started go by messages, in place or not.
    for (const std::size_t n : {std::size_t{9001}, std::size_t{100000}})
      for (const plait::test::how h : {plait::test::how::started, plait::test::how::started_in_place}) {
        plait::test::check_all_reduce<float>(world, n, plait::reduce_op::sum, h, 3);
        plait::test::check_all_reduce<double>(world, n, plait::reduce_op::max, h, 4);
        plait::test::check_reduce_scatter<float>(world, n, plait::reduce_op::sum, h, 5);
      }

    // Several under way, whose phases meet in another order on each rank, and that are asked before they are waited
    // for.
    std::vector<std::vector<float>> sums;
    std::vector<plait::request> open;
    for (int i = 0; i < 4; ++i) sums.emplace_back(20000, static_cast<float>(world.rank() + 1 + i));
    for (std::vector<float>& sum : sums) {
      open.push_back(
          world.start_all_reduce(sum.data(), sum.data(), sum.size(), plait::dtype::f32, plait::reduce_op::sum));
      if (world.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      for (const plait::request& r : open) static_cast<void>(r.done());
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      while (!open[i].done()) {
      }
      if (!open[i].done()) plait::fail("a request that was done is not");
      open[i].wait();
      const int n = world.size();
      for (const float x : sums[i])
        if (x != static_cast<float>(n * (n + 1) / 2 + static_cast<int>(i) * n)) plait::fail({"a sum is ", x});
    }

    auto small = world.split(0, world.rank(), "small pieces");  // the paths of counts that exceed an int
    small.set_limit(100);
    plait::test::check_types(small);
    plait::test::check_random(small, 5, 40);

    auto attached = plait::mpi::communicator::attach(MPI_COMM_WORLD);
    plait::test::check_all_reduce<float>(attached, 1000, plait::reduce_op::sum, plait::test::how::direct, 1);
    if (world.rank() == 0) std::puts("conformance: ok");
  });
}
