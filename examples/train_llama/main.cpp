#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

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
  if (opt.precision == "float") {
    if (sharded) return sp ? float_sp_sharded() : float_tp_sharded();
    return sp ? float_sp() : float_tp();
  }
  if (sharded) return sp ? double_sp_sharded() : double_tp_sharded();
  return sp ? double_sp() : double_tp();
}

void on_interrupt(int signal) {
  if (interrupted) std::_Exit(128 + signal);  // the second Ctrl-C does not wait
  interrupted = signal;
}

/// mpirun asks its processes to end by SIGTERM, when it is interrupted itself.
void watch_signals() {
  std::signal(SIGINT, on_interrupt);
  std::signal(SIGTERM, on_interrupt);
}

void complain(const char* why) {
  std::fflush(stdout);
  fmt::print(stderr, "train_llama: {}\n", why);
}

/// The exit code of a run that ended by itself, by a `problem` or by a signal.
int finish(const std::string& problem, bool speaks) {
  if (!problem.empty()) {
    if (speaks) complain(problem.c_str());
    return 1;
  }
  return interrupted ? 128 + interrupted : 0;
}

/// Under mpirun, as many processes as it started would train alone and write the same files.
void refuse_lonely_processes() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
    if (const char* size = std::getenv(name); size && std::atoi(size) > 1)
      plait::fail(
          fmt::format("--backend threads: this is one of {} processes that mpirun started, and each would train alone; "
                      "give --backend mpi, or start the program without mpirun",
                      size));
}

int train_threads(int argc, char** argv) {
  options opt;
  if (!parse(argc, argv, opt)) return 0;
  if (opt.dry_run) {
    choose(opt).plan(prepare(opt, -1));
    return 0;
  }
  refuse_lonely_processes();
  const setup s = prepare(opt, -1);
  watch_signals();
  std::string problem;
  plait::threads::run(static_cast<int>(s.mesh.size()), [&](plait::threads::communicator ranks) {
    std::string mine = choose(opt).run(s, plait::any_communicator(ranks));
    if (ranks.rank() == 0) problem = std::move(mine);
  });
  return finish(problem, true);
}

#ifdef PLAIT_WITH_MPI
/// Every process reads the options and the data for itself; what one of them refuses is said once, and all end.
int train_mpi(int argc, char** argv) {
  const plait::mpi::environment environment(&argc, &argv);
  plait::mpi::communicator world = plait::mpi::communicator::world();
  options opt;
  std::optional<setup> s;
  std::string why;
  bool helped = false;
  try {
    // Only rank 0 answers --help; the others parse for the errors.
    helped = !parse(argc, argv, opt, world.rank() == 0);
    if (!helped) s.emplace(prepare(opt, opt.dry_run ? -1 : world.size()));
  } catch (const std::exception& e) {
    why = e.what();
  }
  int speaker = why.empty() ? world.size() : world.rank();
  world.all_reduce(&speaker, &speaker, 1, plait::dtype::i32, plait::reduce_op::min);
  if (speaker == world.rank()) complain(why.c_str());
  if (speaker < world.size()) return 1;
  if (helped) return 0;
  if (opt.dry_run) {
    if (world.rank() == 0) choose(opt).plan(*s);
    return 0;
  }
  watch_signals();
  std::string problem;
  plait::mpi::run(argc, argv, [&](plait::mpi::communicator ranks) {
    problem = choose(opt).run(*s, plait::any_communicator(ranks));
  });
  return finish(problem, world.rank() == 0);
}
#endif

/// The last --backend of the command line, before it is parsed: what MPI is asked for must be known when errors are.
std::string_view backend(int argc, char** argv) {
  std::string_view found;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--backend" && i + 1 < argc) found = argv[i + 1];
    if (word.starts_with("--backend=")) found = word.substr(10);
  }
  return found;
}

int train(int argc, char** argv) {
  if (backend(argc, argv) != "mpi") return train_threads(argc, argv);
#ifdef PLAIT_WITH_MPI
  return train_mpi(argc, argv);
#else
  plait::fail("--backend mpi: this program was built without MPI; install libopenmpi-dev and build again");
#endif
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return train(argc, argv);
  } catch (const std::exception& e) {
    complain(e.what());
    return 1;
  }
}
