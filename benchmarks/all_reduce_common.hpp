#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "plait/comm/metrics.hpp"

// Times all-reduces of float sums in place. A program gets a size in bytes, repeats a few rounds, and rank 0 prints the
// best round's microseconds per operation. Other work on the machine can only add time.
namespace bench {

template <class AllReduce, class Barrier>
void all_reduce(int rank, std::size_t bytes, const AllReduce& all_reduce, const Barrier& barrier) {
  std::vector<float> x(bytes / sizeof(float), 0.0f);
  const int operations = static_cast<int>(std::clamp<std::size_t>((std::size_t{16} << 20) / bytes, 2, 500));
  double best = 1e30;
  for (int round = 0; round < 6; ++round) {
    barrier();
    const double start = plait::comm_clock();
    for (int i = 0; i < operations; ++i) all_reduce(x.data(), x.size());
    barrier();
    if (round > 0) best = std::min(best, (plait::comm_clock() - start) / operations);
  }
  if (rank == 0) std::printf("%.2f\n", best * 1e6);
}

}  // namespace bench
