// Measures for --calibrate the cost of communication for ranks that compute in between, as in a training step. Groups
// of ranks may have more ranks than there are cores.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "../median.hpp"
#include "block_stack.hpp"
#include "plait/comm/any_communicator.hpp"
#include "plait/device/cpu.hpp"
#include "plan_llama/planner/calibrate.hpp"

/// Waits for all ranks of a group. An `idle` rank sleeps while it waits: under MPI a waiting rank polls, which slows
/// down measuring ranks if there are more ranks than cores.
inline void meet(plait::any_communicator& all, bool idle) {
  double in = 0, out = 0;
  plait::request met = all.start_all_reduce(&in, &out, 1, plait::dtype::f64, plait::reduce_op::sum);
  while (idle && !met.done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  met.wait();
}

/// Products between which ranks communicate, about `seconds` long.
class work_between {
 public:
  explicit work_between(double seconds) {
    once();
    const double start = seconds_now();
    once();
    times_ = static_cast<int>(std::clamp(seconds / (seconds_now() - start), 1.0, 1000.0));
  }
  /// Makes the work equally long on all ranks of a group.
  void agree(plait::any_communicator& group) {
    double shared = times_;
    group.all_reduce(&shared, &shared, 1, plait::dtype::f64, plait::reduce_op::min);
    times_ = static_cast<int>(shared);
  }
  void operator()(int repeats = 1) {
    for (int i = 0; i < repeats * times_; ++i) once();
  }

 private:
  static constexpr std::int64_t size = 256;
  static constexpr int sets = 16;  // sets of operands: too many for a core's own caches

  void once() {
    const auto offset = static_cast<std::size_t>(at_ = (at_ + 1) % sets) * size * size;
    device_.gemm(false, true, size, size, size, 1, &x_[offset], size, &w_[offset], size, 0, &y_[offset], size);
  }

  plait::cpu device_;
  std::vector<float> x_ = std::vector<float>(sets * size * size, 1.0f), w_ = x_, y_ = x_;
  int times_ = 1, at_ = 0;
};

/// Measures the communication of the first ranks of `all`.
class communication_meter {
 public:
  communication_meter(plait::any_communicator all, std::int64_t cores) : all_(std::move(all)), cores_(cores) {}

  /// Measures all-reduces, gathers, scatters and messages from 1 KB to 16 MB between computations. So the times include
  /// waits for other ranks, wake-ups, and fetches of data that another core has just written, which collectives one
  /// after the other do not show. Each time is the difference of rounds with and without the call; these alternate.
  void collectives(std::int64_t ranks, plait::planner::measurements& out) {
    plait::any_communicator group = first(ranks);
    if (group) collectives_of(group, out);
    meet(all_, !group);
  }

  /// Measures reductions that start before a computation and are waited for after it, as those of gradients during a
  /// backward pass. The result is the time in addition to the computation, which is half as long as the reduction.
  void overlap(std::int64_t ranks, plait::planner::measurements& out) {
    plait::any_communicator group = first(ranks);
    if (group) overlap_of(group, out);
    meet(all_, !group);
  }

  /// Measures a pipeline of more ranks than cores, in the order of 1F1B, with equally long passes. The result is the
  /// time in addition to its work on the cores, for each message that a pass waits for. A rank whose message has come
  /// must still wait for a core on which another rank computes.
  void pipeline(std::int64_t ranks, plait::planner::measurements& out) {
    plait::any_communicator group = first(ranks);
    if (group) pipeline_of(group, out);
    meet(all_, !group);
  }

 private:
  static constexpr auto f32 = plait::dtype::f32;

  plait::any_communicator first(std::int64_t ranks) {
    return all_.split(all_.rank() < ranks ? 0 : -1, all_.rank(), "calibration");
  }

  /// Returns the seconds of `work` on the slowest rank.
  template <class Work>
  static double timed(plait::any_communicator& group, Work&& work) {
    group.barrier();
    const double start = seconds_now();
    work();
    double seconds = seconds_now() - start;
    group.all_reduce(&seconds, &seconds, 1, plait::dtype::f64, plait::reduce_op::max);
    return seconds;
  }

  void collectives_of(plait::any_communicator& group, plait::planner::measurements& out) {
    using plait::collective;
    constexpr double work_seconds = 6e-4, round_seconds = 2.4e-2;
    constexpr int rounds = 5, results = 4;
    const std::int64_t ranks = group.size();
    work_between work(work_seconds);
    work.agree(group);
    const auto sum = plait::reduce_op::sum;
    const auto turns = std::max<std::int64_t>(1, ranks / cores_);
    for (std::int64_t bytes = 1 << 10; bytes <= 1 << 24; bytes *= bytes < 1 << 18 ? 16 : 4) {
      const auto whole = static_cast<std::size_t>(bytes / 4), part = whole / static_cast<std::size_t>(ranks);
      std::vector<float> x(whole);
      std::vector<std::vector<float>> y(results, std::vector<float>(whole));
      const int times = static_cast<int>(std::max(
          3.0, round_seconds / (work_seconds * static_cast<double>(turns) + static_cast<double>(bytes) / 5e9)));
      float value = 0;
      const auto round = [&](auto&& call) {
        return timed(group,
                     [&] {
                       for (int i = 0; i < times; ++i) {
                         work();
                         std::fill(x.begin(), x.end(), value += 1.0f);
                         call(y[static_cast<std::size_t>(i % results)].data());
                       }
                     }) /
               times;
      };
      const auto one_way = [&](float* to) {  // a message to the peer and one back, one after the other
        const int peer = 1 - group.rank();
        if (group.rank() == 0) group.send(x.data(), whole, f32, peer), group.receive(to, whole, f32, peer);
        if (group.rank() == 1) group.receive(to, whole, f32, peer), group.send(x.data(), whole, f32, peer);
      };
      std::vector<double> alone, reduced, gathered, scattered, sent;
      for (int i = -1; i < rounds; ++i) {
        const double seconds[] = {round([](float*) {}),
                                  round([&](float* to) { group.all_reduce(x.data(), to, whole, f32, sum); }),
                                  round([&](float* to) { group.all_gather(x.data(), to, part, f32); }),
                                  round([&](float* to) { group.reduce_scatter(x.data(), to, part, f32, sum); }),
                                  ranks == 2 ? round(one_way) : 0};
        if (i < 0) continue;  // the first round only touches memory
        alone.push_back(seconds[0]), reduced.push_back(seconds[1]), gathered.push_back(seconds[2]);
        scattered.push_back(seconds[3]), sent.push_back(seconds[4]);
      }
      const double without = plait::median(alone);
      std::vector<double> off;
      for (const double seconds : alone) off.push_back(std::abs(seconds - without));
      const auto add = [&](collective kind, const std::vector<double>& with, double parts = 1) {
        out.collectives.push_back({kind, ranks, static_cast<double>(bytes),
                                   std::max(0.0, plait::median(with) - without) / parts, plait::median(off) / parts});
      };
      add(collective::all_reduce, reduced);
      add(collective::all_gather, gathered);
      add(collective::reduce_scatter, scattered);
      if (ranks == 2) add(collective::send, sent, 2);
    }
  }

  static void overlap_of(plait::any_communicator& group, plait::planner::measurements& out) {
    constexpr std::size_t values = 1 << 21;
    constexpr int rounds = 7;
    std::vector<float> x(values, 1.0f), y(values);
    const auto start = [&] { return group.start_all_reduce(x.data(), y.data(), values, f32, plait::reduce_op::sum); };
    const auto reduce = [&] { start().wait(); };
    reduce();  // touches memory
    work_between work(timed(group, reduce) / 2);
    work.agree(group);
    std::vector<double> alone, computing, both;
    for (int i = 0; i < rounds; ++i) {
      alone.push_back(timed(group, reduce));
      computing.push_back(timed(group, [&] { work(); }));
      both.push_back(timed(group, [&] {
        plait::request in_flight = start();
        work();
        in_flight.wait();
      }));
    }
    out.overlaps.push_back({plait::median(alone), plait::median(computing), plait::median(both)});
  }

  void pipeline_of(plait::any_communicator& group, plait::planner::measurements& found) {
    constexpr double pass_seconds = 4e-3;    // longer than a scheduler's time slice
    constexpr std::size_t values = 1 << 16;  // a message this large blocks its sender until it is received
    constexpr int rounds = 5;
    const int ranks = group.size(), rank = group.rank(), microbatches = 2 * ranks;
    const bool first = rank == 0, last = rank + 1 == ranks;
    work_between pass(pass_seconds);
    pass.agree(group);
    std::vector<float> out(values, 1.0f), back(values, 1.0f);
    std::vector<std::vector<float>> in(static_cast<std::size_t>(microbatches), out), gradient = in;
    const auto round = [&] {
      std::vector<plait::request> arriving, returning, sent;  // `sent` is waited for at the end, as in a step
      for (int k = 0; k < microbatches; ++k) {
        const auto at = static_cast<std::size_t>(k);
        if (!first) arriving.push_back(group.start_receive(in[at].data(), values, f32, rank - 1));
        if (!last) returning.push_back(group.start_receive(gradient[at].data(), values, f32, rank + 1, 1));
      }
      const auto forward = [&](int k) {
        if (!first) arriving[static_cast<std::size_t>(k)].wait();
        pass();
        if (!last) sent.push_back(group.start_send(out.data(), values, f32, rank + 1));
      };
      const auto backward = [&](int k) {
        if (!last) returning[static_cast<std::size_t>(k)].wait();
        pass();
        if (!first) sent.push_back(group.start_send(back.data(), values, f32, rank - 1, 1));
      };
      const int ahead = ranks - 1 - rank;
      for (int k = 0; k < ahead; ++k) forward(k);
      for (int k = ahead; k < microbatches; ++k) forward(k), backward(k - ahead);
      for (int k = microbatches - ahead; k < microbatches; ++k) backward(k);
      for (plait::request& r : sent) r.wait();
    };
    plait::any_communicator workers = group.split(rank < cores_ ? 0 : -1, rank, "calibration");
    std::vector<double> piped, alone;
    for (int i = 0; i < rounds; ++i) {
      piped.push_back(timed(group, round));
      // Only as many ranks as there are cores work. More ranks would take proportionally longer.
      if (workers) alone.push_back(timed(workers, [&] { pass(2 * microbatches); }));
      meet(group, !workers);
    }
    if (!workers) return;
    const double turns = static_cast<double>(ranks) / static_cast<double>(cores_);
    found.pipelines.push_back({ranks, microbatches, plait::median(piped), turns * plait::median(alone)});
  }

  plait::any_communicator all_;
  std::int64_t cores_;
};
