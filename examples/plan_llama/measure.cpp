#include "measure.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/threads.hpp"
#include "plait/device/cpu.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/plan/calibrate.hpp"
#include "plait/plan/hardware_json.hpp"
#ifdef PLAIT_WITH_MPI
#include "plait/comm/mpi.hpp"
#endif

namespace {

namespace pp = plait::planner;
namespace kernels = plait::kernels;
using plait::collective;
using std::int64_t;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// The processors that this process may use.
int64_t processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

/// One rank that measures with all others. Other work on the machine can only add time, so of several rounds the best
/// counts; within a round it is the slowest rank's that does.
class measurer {
 public:
  measurer(plait::any_communicator all, int64_t cores) : all_(std::move(all)), cores_(cores) {}

  pp::measurements everything() {
    pp::measurements out;
    products<float>(pp::number_kind::f32, out);
    if (plait::cpu::supports_bf16()) products<plait::bf16>(pp::number_kind::bf16, out);
    attention(out);
    elementwise(out);
    for (int64_t ranks = 2; ranks <= std::min<int64_t>(all_.size(), 8); ranks *= 2) communicated(ranks, out);
    return out;
  }

 private:
  static constexpr int rounds_ = 5;
  static constexpr double round_seconds_ = 4e-3;

  /// Seconds of one call of `work` on ranks that have a core each, all at the same time; the others wait.
  template <class F>
  double computed(F&& work) {
    return timed(all_, all_.rank() < cores_, work);
  }

  /// Seconds of one call of `work` on the ranks of `group`; of those that are not `working`, none.
  template <class F>
  double timed(plait::any_communicator& group, bool working, F&& work) {
    double once = 0;
    if (working) {
      work();  // touches its memory
      const double start = now();
      work();
      once = now() - start;
    }
    once = most(group, once);
    const int times = static_cast<int>(std::clamp(round_seconds_ / std::max(once, 1e-9), 1.0, 2000.0));
    double best = 1e30;
    for (int round = 0; round < rounds_; ++round) {
      group.barrier();
      const double start = now();
      if (working)
        for (int i = 0; i < times; ++i) work();
      best = std::min(best, most(group, working ? (now() - start) / times : 0.0));
    }
    return best;
  }

  static double most(plait::any_communicator& group, double value) {
    group.all_reduce(&value, &value, 1, plait::dtype::f64, plait::reduce_op::max);
    return value;
  }

  /// The products of layers: forward, of input gradients and of weight gradients.
  template <class T>
  void products(pp::number_kind kind, pp::measurements& out) {
    constexpr struct {
      int64_t tokens, in, out;
    } layers[] = {{64, 64, 64},   {128, 64, 192},   {256, 128, 128},  {512, 32, 64},
                  {256, 256, 64}, {512, 256, 1024}, {512, 1024, 256}, {1024, 512, 512}};
    plait::cpu device;
    for (const auto& l : layers) {
      const std::vector<T> x(static_cast<std::size_t>(l.tokens * l.in)), w(static_cast<std::size_t>(l.in * l.out)),
          dy(static_cast<std::size_t>(l.tokens * l.out));
      std::vector<float> result(std::max({x.size(), w.size(), dy.size()}));
      const auto add = [&](int64_t m, int64_t n, int64_t k, auto&& work) {
        out.products.push_back(
            {kind, static_cast<double>(m), static_cast<double>(n), static_cast<double>(k), computed(work)});
      };
      add(l.tokens, l.out, l.in, [&] {
        device.gemm(false, true, l.tokens, l.out, l.in, 1, x.data(), l.in, w.data(), l.in, 0, result.data(), l.out);
      });
      add(l.tokens, l.in, l.out, [&] {
        device.gemm(false, false, l.tokens, l.in, l.out, 1, dy.data(), l.out, w.data(), l.in, 0, result.data(), l.in);
      });
      add(l.out, l.in, l.tokens, [&] {
        device.gemm(true, false, l.out, l.in, l.tokens, 1, dy.data(), l.out, x.data(), l.in, 1, result.data(), l.in);
      });
    }
  }

  void attention(pp::measurements& out) {
    for (const int64_t seq : {128, 512}) {
      kernels::attention_shape s;
      s.q_len = s.k_len = seq;
      s.heads = s.kv_heads = 4;
      s.head_dim = 32;
      s.scale = 0.17;
      const auto size = static_cast<std::size_t>(seq * s.heads * s.head_dim);
      std::vector<float> q(size, 0.1f), k(size, 0.2f), v(size, 0.3f), o(size), dq(size), dk(size), dv(size),
          lse(static_cast<std::size_t>(s.heads * seq));
      plait::cpu device;
      const double pairs =
          static_cast<double>(seq) * static_cast<double>(seq) * static_cast<double>(s.heads * s.head_dim) / 2;
      out.attention.push_back({4 * pairs, computed([&] {
                                 kernels::attention_forward(device, q.data(), k.data(), v.data(), o.data(), lse.data(),
                                                            s);
                               })});
      out.attention.push_back({10 * pairs, computed([&] {
                                 kernels::attention_backward(device, q.data(), k.data(), v.data(), o.data(), lse.data(),
                                                             q.data(), dq.data(), dk.data(), dv.data(), s);
                               })});
    }
  }

  /// Norms and activations, both ways, by the bytes that block_time.hpp counts for them.
  void elementwise(pp::measurements& out) {
    plait::cpu device;
    for (const int64_t rows : {16, 128, 1024, 8192}) {
      constexpr int64_t columns = 128;
      const auto size = static_cast<std::size_t>(rows * columns);
      const std::vector<float> x(2 * size, 0.5f), weight(columns, 1.0f);
      std::vector<float> y(2 * size), inverse(static_cast<std::size_t>(rows), 1.0f), dweight(columns);
      const auto bytes = static_cast<double>(4 * size);
      const auto add = [&](double values, auto&& work) { out.kernels.push_back({values * bytes, computed(work)}); };
      add(2, [&] {
        kernels::rms_norm_forward(device, x.data(), weight.data(), y.data(), inverse.data(), rows, columns, 1e-5);
      });
      add(3, [&] {
        kernels::rms_norm_backward(device, x.data(), weight.data(), x.data(), inverse.data(), y.data(), dweight.data(),
                                   rows, columns);
      });
      add(3, [&] { kernels::swiglu_forward(device, x.data(), y.data(), rows, columns); });
      add(5, [&] { kernels::swiglu_backward(device, x.data(), x.data(), y.data(), rows, columns); });
    }
  }

  /// All-reduces, gathers, scatters and messages from 1 KB to 16 MB of the first so many ranks.
  void communicated(int64_t ranks, pp::measurements& out) {
    const bool mine = all_.rank() < ranks;
    plait::any_communicator group = all_.split(mine ? 0 : -1, all_.rank(), "calibration");
    for (int64_t bytes = 1 << 10; bytes <= 1 << 24; bytes *= 4) {
      const auto whole = static_cast<std::size_t>(bytes / 4), part = whole / static_cast<std::size_t>(ranks);
      std::vector<float> x(mine ? whole : 0), y(mine ? whole : 0);
      const auto add = [&](collective kind, auto&& work) {
        double seconds = mine ? timed(group, true, work) : 0;
        seconds = most(all_, seconds);
        out.collectives.push_back({kind, ranks, static_cast<double>(bytes), seconds});
      };
      const auto f32 = plait::dtype::f32;
      const auto sum = plait::reduce_op::sum;
      add(collective::all_reduce, [&] { group.all_reduce(x.data(), y.data(), whole, f32, sum); });
      add(collective::all_gather, [&] { group.all_gather(x.data(), y.data(), part, f32); });
      add(collective::reduce_scatter, [&] { group.reduce_scatter(x.data(), y.data(), part, f32, sum); });
      if (ranks == 2)  // one way; the receiver's time counts, as it is the longer one
        add(collective::send, [&] {
          const int peer = 1 - group.rank();
          group.rank() == 0 ? group.send(x.data(), whole, f32, peer) : group.receive(y.data(), whole, f32, peer);
        });
    }
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
