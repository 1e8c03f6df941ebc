// The conformance suite over MPI: mpirun -n 4 conformance
#include "support/conformance.hpp"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <thread>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/comm/mpi.hpp"

int main(int argc, char** argv) {
  return plait::mpi::run(argc, argv, [](plait::mpi::communicator& world) {
    plait::test::conformance(world, 1, 60);
    plait::any_communicator any(world);
    plait::test::check_types(any);
    plait::any_communicator counted = any.counted(std::make_shared<plait::ledger>());
    plait::test::check_types(counted);
    plait::test::check_interleaved(counted);

    // Large reductions and gathers that are started travel as messages: in place or not, in pieces (as between hosts)
    // or whole (as within one). Between hosts small reductions do too.
    auto as_far = world.split(0, world.rank(), "as between hosts");
    as_far.set_piece(60 << 10);
    plait::any_communicator any_far(as_far);
    plait::test::check_types(any_far);
    plait::test::check_interleaved(any_far);
    for (plait::mpi::communicator comm : {world, as_far, as_far.split(0, -world.rank())})
      for (const std::size_t n : {std::size_t{3}, std::size_t{1000}, std::size_t{9001}, std::size_t{100000}})
        for (const plait::test::how h : {plait::test::how::started, plait::test::how::started_in_place}) {
          plait::test::check_all_reduce<float>(comm, n, plait::reduce_op::sum, h, 3);
          plait::test::check_all_reduce<double>(comm, n, plait::reduce_op::max, h, 4);
          plait::test::check_reduce_scatter<float>(comm, n, plait::reduce_op::sum, h, 5);
          plait::test::check_all_gather<double>(comm, n, h, 6);
          plait::test::check_all_gather<plait::bf16>(comm, n + 7383, h, 7);  // one element more than a piece
        }

    // Several sums in flight. Each rank starts their phases in another order and tests them before it waits.
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

    // Gathers and a reduction in flight together on two communicators, in many pieces each. The ranks wait for the last
    // one first.
    auto first = world.split(0, world.rank(), "first"), beside = world.split(0, -world.rank(), "beside");
    first.set_piece(60 << 10);
    beside.set_piece(10001);
    const auto ranks = static_cast<std::size_t>(world.size());
    std::vector<std::vector<float>> all(6, std::vector<float>(150001 * ranks));
    std::vector<float> added(150001, 1.0f);
    std::vector<plait::request> gathers;
    for (std::size_t i = 0; i < all.size(); ++i) {
      plait::mpi::communicator& comm = i % 2 == 0 ? first : beside;
      float* const own = all[i].data() + 150001 * static_cast<std::size_t>(comm.rank());
      for (std::size_t k = 0; k < 150001; ++k)
        own[k] = static_cast<float>(comm.rank() * 1000003 % 4096) + static_cast<float>((k + i) % 8191);
      gathers.push_back(comm.start_all_gather(own, all[i].data(), 150001, plait::dtype::f32));
      if (i == 2)
        gathers.push_back(
            first.start_all_reduce(added.data(), added.data(), added.size(), plait::dtype::f32, plait::reduce_op::sum));
    }
    for (; !gathers.empty(); gathers.pop_back()) gathers.back().wait();
    for (std::size_t i = 0; i < all.size(); ++i)
      for (std::size_t r = 0; r < ranks; ++r)
        for (std::size_t k = 0; k < 150001; ++k)
          if (const float x = all[i][r * 150001 + k];
              x != static_cast<float>(static_cast<int>(r) * 1000003 % 4096) + static_cast<float>((k + i) % 8191))
            plait::fail({"gather ", i, ": element ", k, " of rank ", r, " is ", x});
    for (const float x : added)
      if (x != static_cast<float>(world.size())) plait::fail({"a sum beside gathers is ", x});

    // The rate between two hosts: ranks in halves, then alternating ranks. All ranks must have the same rate.
    const int mine = world.rank(), size = world.size();
    for (const bool in_turns : {false, true}) {
      const auto host = [&](int r) { return in_turns ? r % 2 : 2 * r / size; };
      std::vector<char> far;
      for (int r = 0; r < size; ++r) far.push_back(host(r) != host(mine));
      const double rate = plait::mpi::detail::rate_between_hosts(MPI_COMM_WORLD, mine, size, far);
      double least = rate, most = rate;
      world.all_reduce(&rate, &least, 1, plait::dtype::f64, plait::reduce_op::min);
      world.all_reduce(&rate, &most, 1, plait::dtype::f64, plait::reduce_op::max);
      if (least != most) plait::fail({"the rate between hosts is ", least, " on one rank and ", most, " on another"});
      if (std::isfinite(rate) != (size > 1) || rate <= 0) plait::fail({"the rate between hosts is ", rate});
    }

    auto small = world.split(0, world.rank(), "small pieces");  // the code for counts that exceed an int
    small.set_limit(100);
    plait::test::check_types(small);
    plait::test::check_all_gather<float>(small, 9001, plait::test::how::started, 8);
    plait::test::check_random(small, 5, 40);

    auto attached = plait::mpi::communicator::attach(MPI_COMM_WORLD);
    plait::test::check_all_reduce<float>(attached, 1000, plait::reduce_op::sum, plait::test::how::direct, 1);
    if (world.rank() == 0) std::puts("conformance: ok");
  });
}
