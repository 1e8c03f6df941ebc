// The bugs of cuda_mlp.txt that compile, as programs made by ports.py, for GPUs that the CPU stands in for.
#include "ports/cuda_mlp.hpp"

#include <cstddef>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "plait/testing/program_parity.hpp"
#include "ports/ports.hpp"

namespace {
thread_local plait::testing::program_run* recorded = nullptr;
}  // namespace

#define main program
#include "ports/cuda_mlp.inc"
#undef main

int main() {
  const auto run = [](auto* train, int ranks, plait::testing::program_run& into) {
    ncclUniqueId id;
    right::check(ncclGetUniqueId(&id));
    std::vector<std::string> why(static_cast<std::size_t>(ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank)
      threads.emplace_back([&, rank] {
        try {
          cudaStream_t stream = nullptr;
          ncclComm_t comm = nullptr;
          recorded = &into;
          right::check(cudaStreamCreate(&stream));
          right::check(ncclCommInitRank(&comm, ranks, id, rank));
          train(comm, stream);
          right::check(ncclCommDestroy(comm));
          right::check(cudaStreamDestroy(stream));
        } catch (const std::exception& e) {
          why[static_cast<std::size_t>(rank)] = e.what();
        }
      });
    for (std::thread& t : threads) t.join();
    return why[0];
  };
  return ports::report(run, right::train, bugs);
}
