#include <fmt/format.h>

#include <cstdio>
#include <exception>

#include "plait/comm/threads.hpp"
#include "plait/core/error.hpp"
#include "trainer.hpp"
#ifdef PLAIT_WITH_MPI
#include "plait/comm/mpi.hpp"
#endif

volatile std::sig_atomic_t interrupted = 0;

namespace {

program choose(const options& opt) {
  const bool sp = opt.strategy == "sp", sharded = opt.store == "sharded";
  if (opt.precision == "float") return sp ? (sharded ? float_sp_sharded() : float_sp()) : (sharded ? float_tp_sharded() : float_tp());
  return sp ? (sharded ? double_sp_sharded() : double_sp()) : (sharded ? double_tp_sharded() : double_tp());
}

void on_interrupt(int) {
  if (interrupted) std::_Exit(130);  // the second Ctrl-C does not wait
  interrupted = 1;
}

int train(int argc, char** argv) {
  options opt;
  if (!parse(argc, argv, opt)) return 0;
  if (opt.dry_run) {
    choose(opt).plan(prepare(opt, -1));
    return 0;
  }
  std::signal(SIGINT, on_interrupt);
  if (opt.backend == "mpi") {
#ifdef PLAIT_WITH_MPI
    return plait::mpi::run(argc, argv, [&](plait::mpi::communicator ranks) {
      choose(opt).run(prepare(opt, ranks.size()), plait::any_communicator(ranks));
    });
#else
    plait::fail("--backend mpi: this program was built without MPI; install libopenmpi-dev and build again");
#endif
  }
  const setup s = prepare(opt, -1);
  plait::threads::run(static_cast<int>(s.mesh.size()),
                      [&](plait::threads::communicator ranks) { choose(opt).run(s, plait::any_communicator(ranks)); });
  return interrupted ? 130 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return train(argc, argv);
  } catch (const std::exception& e) {
    std::fflush(stdout);
    fmt::print(stderr, "train_llama: {}\n", e.what());
    return 1;
  }
}
