#include "measure.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "block_stack.hpp"
#include "plait/comm/any_communicator.hpp"
#include "plait/comm/threads.hpp"
#include "plait/device/cpu.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/plan/calibrate.hpp"
#include "plait/plan/hardware_json.hpp"
#ifdef PLAIT_WITH_MPI
#include "plait/comm/mpi.hpp"
#endif

namespace {

namespace pp = plait::planner;
using plait::collective;
using std::int64_t;

/// The processors that this process may use.
int64_t processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

double median(std::vector<double> of) {
  const auto middle = of.begin() + static_cast<std::ptrdiff_t>(of.size() / 2);
  std::nth_element(of.begin(), middle, of.end());
  return *middle;
}

/// One rank that measures with all others: kernels as a training step calls them, on as many ranks as have a core each,
/// and collectives between such kernels. Medians count, as other work on the machine disturbs some calls and not most.
class measurer {
 public:
  measurer(plait::any_communicator all, int64_t cores) : all_(std::move(all)), cores_(cores) {}

  pp::measurements everything() {
    pp::measurements out;
    constexpr stack_sizes stacks[] = {{64, 64, 64, 4},     {256, 128, 64, 4},  {64, 64, 128, 4},
                                      {1024, 256, 128, 4}, {64, 64, 256, 8},   {256, 128, 256, 8},
                                      {1024, 512, 256, 8}, {256, 256, 384, 8}, {1024, 128, 384, 8}};
    for (const stack_sizes& s : stacks) computed<float>(pp::number_kind::f32, s, out);
    if (plait::cpu::supports_bf16())
      for (const stack_sizes& s : stacks)
        if (s.tokens >= 256) computed<plait::bf16>(pp::number_kind::bf16, s, out);
    for (int64_t ranks = 2; ranks <= std::min<int64_t>(all_.size(), 8); ranks *= 2) communicated(ranks, out);
    return out;
  }

 private:
  /// Seconds that are equal on all ranks: the mean of those that measured.
  double mean(double seconds, int64_t measured) {
    all_.all_reduce(&seconds, &seconds, 1, plait::dtype::f64, plait::reduce_op::sum);
    return seconds / static_cast<double>(measured);
  }

  /// The kernels of a stack of blocks. Others than products are measured in float alone.
  template <class T>
  void computed(pp::number_kind kind, const stack_sizes& sizes, pp::measurements& out) {
    constexpr int64_t stack_bytes = 24 << 20;  // more than a core's own caches
    constexpr int passes = 4;
    const int64_t working = std::min<int64_t>(all_.size(), cores_);
    const bool mine = all_.rank() < working;
    block_stack<T> stack(sizes, mine ? stack_bytes : 0);
    stack.pass();  // touches its memory
    stack.forget();
    for (int pass = 0; pass < passes; ++pass) {
      all_.barrier();
      if (mine) stack.pass();
    }
    double attention = 0, operations = 0;
    for (std::size_t i = 0; i < stack.works().size(); ++i) {
      const kernel_work& w = stack.works()[i];
      const double seconds = mean(mine ? median(stack.seconds()[i]) : 0, working);
      if (w.m > 0) out.products.push_back({kind, w.m, w.n, w.k, seconds, w.adds});
      if (kind != pp::number_kind::f32) continue;
      attention += w.operations > 0 ? seconds : 0, operations += w.operations;
      if (w.values > 0) out.activations.push_back({w.values, seconds, w.backward});
      if (w.bytes > 0) out.kernels.push_back({w.bytes, seconds});
    }
    if (operations > 0) out.attention.push_back({operations, attention, static_cast<double>(sizes.seq)});
  }

  /// Products between which ranks communicate, about `seconds` long.
  struct between {
    static constexpr int64_t size = 256;
    static constexpr int sets = 16;  // of operands, so that a core's own caches do not hold them
    plait::cpu device{};
    std::vector<float> x = std::vector<float>(sets * size * size, 1.0f), w = x, y = x;
    int times = 1, at = 0;

    explicit between(double seconds) {
      once();
      const double start = seconds_now();
      once();
      times = static_cast<int>(std::clamp(seconds / (seconds_now() - start), 1.0, 1000.0));
    }
    void once() {
      const auto offset = static_cast<std::size_t>(at = (at + 1) % sets) * size * size;
      device.gemm(false, true, size, size, size, 1, &x[offset], size, &w[offset], size, 0, &y[offset], size);
    }
    void operator()() {
      for (int i = 0; i < times; ++i) once();
    }
  };

  /// All-reduces, gathers, scatters and messages from 1 KB to 16 MB of the first so many ranks, between computations as
  /// in a training step: what a rank waits for the others, and what it costs to be woken, count, which collectives one
  /// after the other do not show. Each is the difference of rounds with and without it, which alternate.
  void communicated(int64_t ranks, pp::measurements& out) {
    constexpr double work_seconds = 6e-4, round_seconds = 2.4e-2;
    constexpr int rounds = 5;
    const bool mine = all_.rank() < ranks;
    plait::any_communicator group = all_.split(mine ? 0 : -1, all_.rank(), "calibration");
    if (!mine) return all_.barrier();
    between work(work_seconds);
    double shared = work.times;  // all ranks work as long
    group.all_reduce(&shared, &shared, 1, plait::dtype::f64, plait::reduce_op::min);
    work.times = static_cast<int>(shared);
    const auto f32 = plait::dtype::f32;
    const auto sum = plait::reduce_op::sum;
    const auto turns = std::max<int64_t>(1, ranks / cores_);
    for (int64_t bytes = 1 << 10; bytes <= 1 << 24; bytes *= bytes == 1 << 22 ? 4 : 16) {
      const auto whole = static_cast<std::size_t>(bytes / 4), part = whole / static_cast<std::size_t>(ranks);
      std::vector<float> x(whole, 1.0f), y(whole);
      const int times = static_cast<int>(std::max(
          3.0, round_seconds / (work_seconds * static_cast<double>(turns) + static_cast<double>(bytes) / 5e9)));
      const auto round = [&](auto&& call) {
        group.barrier();
        const double start = seconds_now();
        for (int i = 0; i < times; ++i) work(), call();
        double seconds = (seconds_now() - start) / times;
        group.all_reduce(&seconds, &seconds, 1, plait::dtype::f64, plait::reduce_op::max);
        return seconds;
      };
      const auto one_way = [&] {  // there and back are two messages of which each is waited for
        const int peer = 1 - group.rank();
        if (group.rank() == 0) group.send(x.data(), whole, f32, peer), group.receive(y.data(), whole, f32, peer);
        if (group.rank() == 1) group.receive(y.data(), whole, f32, peer), group.send(x.data(), whole, f32, peer);
      };
      std::vector<double> alone, reduced, gathered, scattered, sent;
      for (int i = -1; i < rounds; ++i) {
        const double seconds[] = {round([] {}), round([&] { group.all_reduce(x.data(), y.data(), whole, f32, sum); }),
                                  round([&] { group.all_gather(x.data(), y.data(), part, f32); }),
                                  round([&] { group.reduce_scatter(x.data(), y.data(), part, f32, sum); }),
                                  ranks == 2 ? round(one_way) : 0};
        if (i < 0) continue;  // touches memory
        alone.push_back(seconds[0]), reduced.push_back(seconds[1]), gathered.push_back(seconds[2]);
        scattered.push_back(seconds[3]), sent.push_back(seconds[4]);
      }
      const double least = 1e-7;  // less cannot be told from the rounds' noise
      const auto add = [&](collective kind, const std::vector<double>& with, double parts = 1) {
        const double seconds = std::max(least, (median(with) - median(alone)) / parts);
        out.collectives.push_back({kind, ranks, static_cast<double>(bytes), seconds});
      };
      add(collective::all_reduce, reduced);
      add(collective::all_gather, gathered);
      add(collective::reduce_scatter, scattered);
      if (ranks == 2) add(collective::send, sent, 2);
    }
    all_.barrier();
  }

  plait::any_communicator all_;
  int64_t cores_;
};

void check_ranks(int64_t ranks) {
  if (ranks < 2 || ranks > 1024)
    plait::fail({"--ranks is ", ranks, "; legal are 2 to 1024, with which collectives can be measured"});
}

/// Measures on one rank of all, and writes what it was on the first.
void measure(plait::any_communicator all, const std::string& path, const std::string& backend) {
  const int64_t ranks = all.size(), here = processors();
  measurer m(all, here);
  pp::measurements found = m.everything();
  if (all.rank() != 0) return;
  const auto memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  found.name = fmt::format("CPU ({} cores, {})", here, backend);
  found.memory = memory / static_cast<double>(ranks);
  found.cores = here;
  found.link = backend == "mpi" ? "MPI" : "shared memory";
  const pp::hardware h = pp::calibrated(found);
  plait::write_file_atomically(path, pp::hardware_text(h), "--calibrate");
  fmt::print(
      "{} ranks on {} cores: products {:.3g} GFLOP/s in f32{}, memory {:.3g} GB/s, links {:.3g} GB/s and {:.2g} us; "
      "written to '{}'\n",
      ranks, here, h.peak[0] / 1e9, h.peak[1] > 0 ? fmt::format(" and {:.3g} in bf16", h.peak[1] / 1e9) : "",
      h.memory_bandwidth / 1e9, h.levels[0].bandwidth / 1e9, 1e6 * h.levels[0].latency, path);
}

}  // namespace

void calibrate_to(const std::string& path, int64_t ranks, const std::string& backend, int argc, char** argv) {
  if (backend == "threads") plait::atomic_file(path, "--calibrate");  // can be written, and leaves no trace
  if (backend == "threads") {
    check_ranks(ranks);
    plait::threads::run(static_cast<int>(ranks), [&](plait::threads::communicator all) {
      measure(plait::any_communicator(all), path, backend);
    });
    return;
  }
#ifdef PLAIT_WITH_MPI
  const plait::mpi::environment environment(&argc, &argv);
  const int64_t started = plait::mpi::communicator::world().size();
  if (ranks != 0 && ranks != started)
    plait::fail({"--ranks is ", ranks, ", but mpirun has started ", started, " processes; they must be equal"});
  check_ranks(started);
  plait::mpi::run(argc, argv, [&](plait::mpi::communicator all) {
    measure(plait::any_communicator(std::move(all)), path, backend);
  });
#else
  static_cast<void>(argc), static_cast<void>(argv);
  plait::fail(
      "--backend mpi: this program was built without MPI; install libopenmpi-dev and build again, or use --backend "
      "threads");
#endif
}
