#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../keep_heap.hpp"
#include "../standard_descriptors.hpp"
#include "options.hpp"
#include "plait/comm/launch/rendezvous.hpp"
#include "plait/comm/threads.hpp"
#include "plait/core/error.hpp"
#include "plait/device/cpu.hpp"
#include "plan.hpp"
#include "run.hpp"
#include "train_llama/observe/report.hpp"

#ifdef PLAIT_WITH_MPI
#include "plait/comm/mpi.hpp"
#endif

std::atomic<int> interrupted = 0, save_asked = 0;

namespace {

/// Trains on one rank on the CPU.
std::string train_on_cpu(const setup& s, plait::any_communicator ranks) {
  plait::cpu device({.threads = s.opt.threads, .deterministic = static_cast<bool>(s.deterministic)});
  return train(s, *with_types(s.opt, [&]<class Precision, class S>() {
                 return make_llama_run<Precision, S, plait::cpu>(s, device, std::move(ranks));
               }));
}

/// Returns the setup of the options. Makes all checks that need no device.
setup checked(const options& opt, std::int64_t ranks) {
  setup s = prepare(opt, opt.dry_run ? -1 : ranks);
  s.recompute = recompute_of(s);
  s.cudnn = opt.device == "cuda" && has_cudnn() && in_bf16(opt) && opt.attention_kernel != "own";
  s.plans = plans_of(s);  // throws once if the model does not fit
  return s;
}

/// Returns the options with the fastest layout that this program accepts. Throws if it accepts none.
options with_plan(const options& opt, std::int64_t ranks) {
  std::string first;
  for (options& candidate : planned_options(opt, opt.dry_run ? -1 : ranks)) {
    options trial = candidate;  // checks only the layout; files are checked once, later
    trial.dry_run = true;
    trial.data.clear(), trial.data_weights.clear();
    try {
      checked(trial, -1);
      return std::move(candidate);
    } catch (const plait::error& e) {
      if (first.empty()) first = e.what();
    }
  }
  reject("--plan auto: no layout that fits can be trained with these options; of the fastest: {}", first);
}

/// Returns the checked setup, before ranks start.
setup ready(const options& given, std::int64_t ranks) {
  if (!given.dry_run) check_built(given);
  const options opt = given.plan == "auto" ? with_plan(given, ranks) : given;
  setup s = checked(opt, ranks);
  s.predicted = predict(s);
  return s;
}

bool tells_of_signals = false;

void on_interrupt(int signal) {
  if (interrupted) std::_Exit(128 + signal);  // the second Ctrl-C does not wait
  interrupted = signal;
  if (!tells_of_signals) return;
  const int error = errno;
  constexpr std::string_view text = "train_llama: the run ends after this step; a second signal ends it at once\n";
  if (::write(STDERR_FILENO, text.data(), text.size()) < 0) errno = error;  // a failed write is ignored
}

/// Installs signal handlers. An interrupted mpirun ends its processes by SIGTERM, and a closed terminal by SIGHUP. A
/// closed pipe and a limit on file sizes must not end the run by a signal: the calls that meet them return errors.
void watch_signals(const options& opt, bool speaks) {
  tells_of_signals = speaks;
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGINT, on_interrupt);
  std::signal(SIGTERM, on_interrupt);
  if (std::signal(SIGHUP, on_interrupt) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);  // under nohup
  if (!opt.checkpoint_dir.empty()) std::signal(SIGUSR1, [](int) { save_asked = 1; });
}

void complain(const char* why) {
  std::fflush(stdout);
  fmt::print(stderr, "train_llama: {}\n", why);
}

/// Returns the exit code of a run that ended normally, with a `problem` or by a signal.
int finish(const std::string& problem, bool speaks) {
  if (!problem.empty()) {
    if (speaks) complain(problem.c_str());
    return 1;
  }
  if (speaks) say_now();
  if (const int failure = output_failure(); speaks && failure != 0) {
    complain(
        fmt::format("standard output could not be written, so the output is not complete: {}", std::strerror(failure))
            .c_str());
    return 1;
  }
  return interrupted ? 128 + interrupted : 0;
}

/// Prints the plan, or calls `run`, which trains and returns its problem. Returns the exit code.
template <class Run>
int plan_or_train(const setup& s, bool speaks, Run&& run) {
  if (s.opt.dry_run) {
    std::string problem;
    try {
      if (speaks) print_plan(s);
    } catch (const std::exception& e) {  // other processes end without an error, and wait for this one
      problem = e.what();
    }
    return finish(problem, speaks);
  }
  watch_signals(s.opt, speaks);
  return finish(run(), speaks);
}

/// Returns the number of processes that a launcher started, from the first variable that is set; 0: none is set.
int processes_by(std::initializer_list<const char*> variables) {
  for (const char* name : variables)
    if (const char* size = std::getenv(name)) return std::atoi(size);
  return 0;
}
int processes_of_mpirun() { return processes_by({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}); }

/// Throws if a launcher started several processes with --backend threads: each would train alone, and all would write
/// the same files.
void refuse_lonely_processes(const options& opt) {
  const auto refuse = [](int processes, const char* launcher, const char* advice) {
    if (processes > 1)
      reject(
          "--backend threads: this is one of {} processes that {} started, and each would train alone; give {}, or "
          "start the program without {}",
          processes, launcher, advice, launcher);
  };
  refuse(processes_of_mpirun(), "mpirun", opt.device == "cuda" ? "--backend nccl" : "--backend mpi");
  if (processes_of_mpirun() == 0)
    refuse(processes_by({"SLURM_STEP_NUM_TASKS"}), "srun",
           opt.device == "cuda" ? "--backend nccl" : "--backend mpi, and srun --mpi=pmix");
  if (std::getenv("RANK")) refuse(processes_by({"WORLD_SIZE"}), "torchrun", "--device cuda --backend nccl");
}

/// Throws if the ranks of this process need more than the host's memory.
void refuse_without_room(const setup& s, double bytes) {
  if (const std::string fault = host_memory_fault(s, bytes); !fault.empty()) plait::fail(fault);
}

int train_threads(int argc, char** argv) {
  options opt;
  if (!parse(argc, argv, opt)) return 0;
  if (!opt.dry_run) refuse_lonely_processes(opt);
  const setup s = ready(opt, -1);
  if (!opt.dry_run) refuse_without_room(s, least_bytes_of_all(s).host);
  return plan_or_train(s, true, [&] {
    std::string problem;
    const auto keep = [&](std::string mine, std::int64_t rank) {
      if (rank == 0) problem = std::move(mine);
    };
    if (opt.device == "cuda") {
      start_on_one_gpu(s, [&](model_run& run) { keep(train(s, run), run.rank); });
    } else {
      plait::threads::run(static_cast<int>(s.mesh.size()),
                          [&](plait::threads::communicator ranks) { keep(train_on_cpu(s, ranks), ranks.rank()); });
    }
    return problem;
  });
}

#ifdef PLAIT_WITH_MPI
/// Prints once why ranks refuse the run, and returns whether any rank does. Collective.
bool complained_once(plait::mpi::communicator& world, std::string why) {
  int speaker = why.empty() ? world.size() : world.rank(), refusing = why.empty() ? 0 : 1;
  world.all_reduce(&speaker, &speaker, 1, plait::dtype::i32, plait::reduce_op::min);
  world.all_reduce(&refusing, &refusing, 1, plait::dtype::i32, plait::reduce_op::sum);
  if (speaker == world.rank()) {
    if (refusing < world.size()) why = fmt::format("rank {}: {}", speaker, why);  // the other ranks accept the run
    complain(why.c_str());
  }
  return speaker < world.size();
}

/// Returns the bytes that the ranks of this host together need in its memory. Collective.
double bytes_on_host(const least_bytes& mine) {
  double sum = mine.host;
  MPI_Comm host = MPI_COMM_NULL;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_DOUBLE, MPI_SUM, host);
  MPI_Comm_free(&host);
  return sum;
}

/// Trains as a process of MPI. Every process reads the options and the data itself. If one refuses them, its error is
/// printed once, and all end.
int train_mpi(int argc, char** argv) {
  keep_heap();
  const plait::mpi::environment environment(&argc, &argv);
  plait::mpi::communicator world = plait::mpi::communicator::world();
  options opt;
  std::optional<setup> s;
  std::vector<plait::setting> settings;
  std::string why;
  bool helped = false;
  try {
    // Only rank 0 answers --help; the others parse for the errors.
    helped = !parse(argc, argv, opt, world.rank() == 0);
    if (!helped) s.emplace(ready(opt, world.size()));
    if (!helped) settings = agreed_settings(*s);
  } catch (const std::exception& e) {
    why = e.what();
  }
  if (complained_once(world, why)) return 1;
  try {
    plait::any_communicator ranks(world);
    std::vector<plait::setting> help;  // compared first: a process with --help has read nothing else
    if (helped) help.push_back({"--help", ""});
    plait::require_agreement(ranks, help);
    plait::require_agreement(ranks, settings);
  } catch (const plait::disagreement& e) {
    if (world.rank() == 0) complain(e.what());
    return 1;
  }
  if (helped) return 0;
  if (!opt.dry_run && complained_once(world, host_memory_fault(*s, bytes_on_host(least_bytes_of(*s, world.rank())))))
    return 1;
  return plan_or_train(*s, world.rank() == 0, [&] {
    std::string problem;
    plait::mpi::run(argc, argv, [&](plait::mpi::communicator ranks) {
      ranks.set_deadline(opt.deadline);
      if (opt.device == "cuda")
        start_by_mpi(*s, ranks, [&](model_run& run) { problem = train(*s, run); });
      else
        problem = train_on_cpu(*s, plait::any_communicator(ranks));
    });
    return problem;
  });
}
#else
int train_mpi(int, char**) {
  plait::fail(
      "--backend mpi: this program was built without MPI, which --backend nccl needs under mpirun, too; install "
      "libopenmpi-dev and build again");
}
#endif

/// Trains with NCCL. A process that torchrun or srun started is one rank. A process that was started alone has all
/// ranks. Under mpirun `train_mpi` runs instead.
int train_nccl(int argc, char** argv) {
  const bool launched = std::getenv("RANK") || std::getenv("WORLD_SIZE") || std::getenv("SLURM_PROCID");
  const plait::nccl::launch_place place =
      launched ? plait::nccl::place_from_environment() : plait::nccl::launch_place{};
  try {
    options opt;
    if (!parse(argc, argv, opt, place.rank == 0)) return 0;
    const setup s = ready(opt, launched ? place.size : -1);
    if (!opt.dry_run) refuse_without_room(s, (launched ? least_bytes_of(s, place.rank) : least_bytes_of_all(s)).host);
    return plan_or_train(s, place.rank == 0, [&] {
      std::string problem;
      const rank_body body = [&](model_run& run) {
        std::string mine = train(s, run);
        if (run.rank == place.rank) problem = std::move(mine);
      };
      launched ? start_launched(s, body) : start_on_all_gpus(s, body);
      return problem;
    });
  } catch (const plait::disagreement& e) {  // thrown on all ranks
    if (place.rank == 0) complain(e.what());
    return 1;
  } catch (const std::exception& e) {
    if (place.size == 1) throw;
    reject("rank {}: {}", place.rank, e.what());
  }
}

/// Returns the last --backend of the command line before the command line is parsed: under MPI, errors of parsing are
/// reported collectively.
std::string_view backend(int argc, char** argv) {
  std::string_view found;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--backend" && i + 1 < argc) found = argv[i + 1];
    if (word.starts_with("--backend=")) found = word.substr(10);
  }
  return found;
}

/// Runs `train_llama report LOG PAGE`.
int report(int argc, char** argv) {
  if (argc != 4) plait::fail("report takes a log and the page to write: train_llama report LOG PAGE");
  plait::write_report(argv[2], argv[3], "LOG", "PAGE");
  return 0;
}

int start(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "report") return report(argc, argv);
  const std::string_view wanted = backend(argc, argv);
  if (wanted == "mpi") return train_mpi(argc, argv);
  if (wanted == "nccl") return processes_of_mpirun() > 0 ? train_mpi(argc, argv) : train_nccl(argc, argv);
  return train_threads(argc, argv);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    plait::open_standard_descriptors();
    return start(argc, argv);
  } catch (const std::exception& e) {
    complain(e.what());
    return 1;
  }
}
