#include "measure.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "../keep_heap.hpp"
#include "../median.hpp"
#include "block_stack.hpp"
#include "communication_meter.hpp"
#include "plait/comm/any_communicator.hpp"
#include "plait/comm/threads.hpp"
#include "plait/device/cpu.hpp"
#include "plait/io/atomic_file.hpp"
#include "plan_llama/planner/calibrate.hpp"
#include "plan_llama/planner/hardware_json.hpp"
#ifdef PLAIT_WITH_MPI
#include "plait/comm/mpi.hpp"
#endif

namespace {

namespace pp = plait::planner;
using std::int64_t;

/// Returns the number of processors that this process may use.
int64_t processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

/// Measures on one of several ranks: kernels as a training step calls them, on as many ranks as there are cores, and
/// collectives between such kernels.
class measurer {
 public:
  measurer(plait::any_communicator all, int64_t cores) : all_(std::move(all)), cores_(cores) {
    working_ = std::min<int64_t>(all_.size(), cores_);
    mine_ = all_.rank() < working_;
    workers_ = all_.split(mine_ ? 0 : -1, all_.rank(), "calibration");
  }

  pp::measurements everything() {
    pp::measurements out;
    constexpr stack_sizes stacks[] = {{64, 64, 64, 4},     {256, 128, 64, 4},  {64, 64, 128, 4},
                                      {1024, 256, 128, 4}, {64, 64, 256, 8},   {256, 128, 256, 8},
                                      {1024, 512, 256, 8}, {256, 256, 384, 8}, {1024, 128, 384, 8}};
    if (mine_) {
      for (const stack_sizes& s : stacks) computed<float>(pp::number_kind::f32, s, out);
      if (plait::cpu::supports_bf16())
        for (const stack_sizes& s : stacks)
          if (s.tokens >= 256) computed<plait::bf16>(pp::number_kind::bf16, s, out);
    }
    meet(all_, !mine_);
    communication_meter links(all_, cores_);
    const int64_t most = std::min<int64_t>(all_.size(), 8);
    for (int64_t ranks = 2; ranks <= most; ranks *= 2) links.collectives(ranks, out);
    for (int64_t ranks = 2; ranks <= std::min(most, cores_); ranks *= 2) links.overlap(ranks, out);
    for (int64_t ranks = 2; ranks <= most; ranks *= 2)
      if (ranks > cores_) {  // the smallest group with more ranks than cores
        links.pipeline(ranks, out);
        break;
      }
    return out;
  }

 private:
  /// Returns the mean of seconds over all measuring ranks, equal on all.
  double mean(double seconds) {
    workers_.all_reduce(&seconds, &seconds, 1, plait::dtype::f64, plait::reduce_op::sum);
    return seconds / static_cast<double>(working_);
  }

  /// Measures the kernels of a stack of blocks. Kernels other than products are measured only in float, and together: a
  /// norm takes longer for its bytes than an addition, and every block has both in the same proportion.
  template <class T>
  void computed(pp::number_kind kind, const stack_sizes& sizes, pp::measurements& out) {
    constexpr int64_t stack_bytes = 24 << 20;  // more than a core's own caches hold
    constexpr int passes = 5;
    block_stack<T> stack(sizes, stack_bytes);
    stack.pass();  // touches its memory
    stack.forget();
    for (int pass = 0; pass < passes; ++pass) {
      workers_.barrier();
      stack.pass();
    }
    pp::measured_kernel moved;
    pp::measured_attention attention{.seq = static_cast<double>(sizes.seq)};
    pp::measured_activation activation;
    for (std::size_t i = 0; i < stack.works().size(); ++i) {
      const kernel_work& w = stack.works()[i];
      const double seconds = mean(typical(stack.seconds()[i], passes));
      if (w.m > 0) out.products.push_back({kind, w.m, w.n, w.k, seconds, w.adds});
      if (w.operations > 0) attention.operations += w.operations, attention.seconds += seconds;
      if (w.values > 0) activation.values += w.values * (w.backward ? 2 : 1), activation.seconds += seconds;
      if (w.bytes > 0) moved.bytes += w.bytes, moved.seconds += seconds, moved.launches += 1;
    }
    if (kind != pp::number_kind::f32) return;
    out.attention.push_back(attention);
    out.activations.push_back(activation);
    out.kernels.push_back(moved);
  }

  /// Returns the median over passes of a kernel's mean time in a pass. A step takes the sum of all its calls, and some
  /// are disturbed; the median of single calls would leave these out.
  static double typical(const std::vector<double>& calls, int passes) {
    const std::size_t each = calls.size() / static_cast<std::size_t>(passes);
    std::vector<double> means;
    for (std::size_t at = 0; at + each <= calls.size(); at += each) {
      double sum = 0;
      for (std::size_t i = at; i < at + each; ++i) sum += calls[i];
      means.push_back(sum / static_cast<double>(each));
    }
    return plait::median(means);
  }

  plait::any_communicator all_, workers_;
  int64_t cores_, working_ = 1;
  bool mine_ = true;
};

void check_ranks(int64_t ranks) {
  if (ranks < 2 || ranks > 1024)
    plait::fail({"--ranks is ", ranks, "; legal are 2 to 1024, with which collectives can be measured"});
}

/// Measures on each rank; the first rank writes the description.
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
  if (backend == "threads") plait::atomic_file(path, "--calibrate");  // checks that the file can be written
  if (backend == "threads") {
    check_ranks(ranks);
    plait::threads::run(static_cast<int>(ranks), [&](plait::threads::communicator all) {
      measure(plait::any_communicator(all), path, backend);
    });
    return;
  }
#ifdef PLAIT_WITH_MPI
  keep_heap();          // as the trainer does
  std::string refusal;  // an exception that left MPI's environment would be lost
  {
    const plait::mpi::environment environment(&argc, &argv);
    const int64_t started = plait::mpi::communicator::world().size();
    try {
      if (ranks != 0 && ranks != started)
        plait::fail({"--ranks is ", ranks, ", but mpirun has started ", started, " processes; they must be equal"});
      check_ranks(started);
    } catch (const plait::error& e) {
      refusal = e.what();
    }
    if (refusal.empty())
      plait::mpi::run(argc, argv, [&](plait::mpi::communicator all) {
        measure(plait::any_communicator(std::move(all)), path, backend);
      });
  }
  if (!refusal.empty()) plait::fail(refusal);
#else
  static_cast<void>(argc), static_cast<void>(argv);
  plait::fail(
      "--backend mpi: this program was built without MPI; install libopenmpi-dev and build again, or use --backend "
      "threads");
#endif
}
