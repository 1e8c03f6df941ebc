// all_reduce_threads RANKS BYTES: times all-reduces of in-process ranks
#include "all_reduce_common.hpp"
#include "plait/comm/threads.hpp"

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 4;
  const std::size_t bytes = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1u << 20;
  plait::threads::run(ranks, [&](plait::threads::communicator& comm) {
    bench::all_reduce(
        comm.rank(), bytes,
        [&](float* x, std::size_t n) { comm.all_reduce(x, x, n, plait::dtype::f32, plait::reduce_op::sum); },
        [&] { comm.barrier(); });
  });
}
