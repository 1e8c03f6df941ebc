// Measures how much of a slow link's time linears hide between tensor-parallel ranks. A column-parallel and a
// row-parallel linear run forward and backward, with collectives in chunks during the products. The same linears that
// wait for each collective are compared. Ranks are threads that sleep in place of multiplying, so they need no cores.
// The link is a wrapper that delays the completion of transfers by the time of a link.
//
//   bench_tensor_overlap [--ranks N] [--chunks N] [--product-ms T] [--rounds N]
//
// A product takes T, and a collective half of it. Exits with 1 unless at least 90 % of the time that chunks can hide is
// hidden: forward, all but the first chunk of a gather and the last of a reduction; backward, all but the first of a
// gather.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <thread>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/nn/linear.hpp"
#include "support/slow_link.hpp"
#include "timing.hpp"

namespace {

using namespace plait;

struct sizes {
  std::int64_t ranks, chunks, product_ms, rounds;
};

constexpr std::int64_t tokens = 512, width = 64;

/// A device that sleeps for the time of its products. If a sleep is too long, the next product that follows at once
/// sleeps less.
class sleeping_cpu : public cpu {
  using clock = std::chrono::steady_clock;

 public:
  double seconds_per_multiplication = 0;

  template <class... Arguments>
  void gemm(bool, bool, std::int64_t m, std::int64_t n, std::int64_t k, Arguments&&...) {
    const double multiplications = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    const clock::time_point now = clock::now();
    if (now - woke_ > std::chrono::microseconds(100)) end_ = now;
    end_ += std::chrono::duration_cast<clock::duration>(
        std::chrono::duration<double>(multiplications * seconds_per_multiplication));
    std::this_thread::sleep_until(end_);
    woke_ = clock::now();
  }

 private:
  clock::time_point end_, woke_;  ///< when the last product should end, and when the sleep really ended
};

using mesh = plait::mesh<axis<tp>>;
using stream = spec<shard<seq, tp>, hidden>;
using inside = spec<seq, shard<ffn, tp>>;
struct column {
  using input = stream;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = inside;
};
struct row {
  using input = inside;
  using weight = spec<hidden, shard<ffn, tp>>;
  using output = stream;
};

/// The seconds of passes of all ranks together.
struct pass_times {
  double forward = 0, backward = 0;
};
pass_times median(const std::vector<pass_times>& all) {
  std::vector<double> forward, backward;
  for (const pass_times& t : all) forward.push_back(t.forward), backward.push_back(t.backward);
  return {bench::median(forward), bench::median(backward)};
}

/// A linear on one rank, with its input and gradient.
template <class Policy>
class passes {
  using layer = linear<float, Policy, sleeping_cpu>;

 public:
  passes(const context<sleeping_cpu>& ctx, std::int64_t chunks)
      : ctx_(ctx), layer_(ctx, "layer", {.overlap = chunks}), x_(ctx), dy_(ctx) {
    layer_.visit([&](auto& p) { p.initialize(ctx); });
    gather_parameters(ctx, layer_);
    zero_gradients(ctx, layer_);
    std::fill_n(x_.data(), x_.size(), 0.01f);
    std::fill_n(dy_.data(), dy_.size(), 0.02f);
  }
  pass_times run() {
    any_communicator& all = ctx_.ranks.root();
    typename layer::saved kept;
    const auto together = [&](auto&& work) {
      all.barrier();
      return bench::seconds([&] {
        work();
        all.barrier();
      });
    };
    pass_times t;
    t.forward = together([&] { layer_.forward(ctx_, x_, &kept); });
    t.backward = together([&] { layer_.backward(ctx_, x_, kept, dy_); });
    return t;
  }

 private:
  const context<sleeping_cpu>& ctx_;
  layer layer_;
  tensor<float, typename Policy::input, sleeping_cpu> x_;
  tensor<float, dual_t<typename Policy::output>, sleeping_cpu> dy_;
};

struct outcome {
  pass_times bare, waiting, overlapping;
};

template <class Policy>
outcome measure(const sizes& s) {
  outcome out;
  const double product = 1e-3 * static_cast<double>(s.product_ms);
  threads::run(static_cast<int>(s.ranks), [&](threads::communicator c) {
    double bandwidth = 0, free = 0;
    const testing::link_time link = [&](const call&, double bytes, double now) {
      if (bandwidth == 0) return now;
      free = std::max(free, now) + bytes / bandwidth;
      return free;
    };
    world w(mesh{s.ranks}.shape(), any_communicator(testing::slow_communicator(c, link)));
    sleeping_cpu device;
    const context<sleeping_cpu> ctx{device, w, sizes_of<seq, hidden, ffn>(s.ranks * tokens, width, s.ranks * width)};
    passes<Policy> whole(ctx, 1), cut(ctx, s.chunks);
    device.seconds_per_multiplication = product / static_cast<double>(s.ranks * tokens * width * width);
    const double sent = static_cast<double>((s.ranks - 1) * tokens * width) * sizeof(float);  // per rank and collective
    std::vector<pass_times> bare, waiting, overlapping;
    for (std::int64_t i = 0; i < s.rounds; ++i) {
      bandwidth = 0;
      bare.push_back(whole.run());
      bandwidth = sent / (product / 2);
      waiting.push_back(whole.run());
      overlapping.push_back(cut.run());
    }
    if (c.rank() == 0) out = {median(bare), median(waiting), median(overlapping)};
  });
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const bench::numbers given(argc, argv);
    given.only({"--ranks", "--chunks", "--product-ms", "--rounds"});
    const sizes s{given.of("--ranks", 4), given.of("--chunks", 8), given.of("--product-ms", 80),
                  given.of("--rounds", 5)};
    if (s.ranks < 2) fail("--ranks is 1; a collective has at least 2");
    if (s.chunks < 2) fail("--chunks is 1; an overlap has at least 2");
    const auto ms = [](double seconds) { return seconds * 1e3; };
    const double collective = 0.5e-3 * static_cast<double>(s.product_ms);
    fmt::print("{} ranks, {} chunks, a product of {} ms, a collective of {:g}, medians of {} in ms\n", s.ranks,
               s.chunks, s.product_ms, ms(collective), s.rounds);
    bool enough = true;
    const auto report = [&](const char* name, const outcome& t, double forward_allowed, double backward_allowed) {
      fmt::print("{:26}{:>10}{:>10}\n", name, "forward", "backward");
      const auto line = [&](const char* what, const pass_times& p) {
        fmt::print("{:26}{:10.2f}{:10.2f}\n", what, ms(p.forward), ms(p.backward));
      };
      line("no delay", t.bare);
      line("that waits", t.waiting);
      line("that overlaps", t.overlapping);
      const auto hidden = [&](double waiting, double overlapping) {
        return std::clamp((waiting - overlapping) / collective, 0.0, 1.0);
      };
      const double forward = hidden(t.waiting.forward, t.overlapping.forward);
      const double backward = hidden(t.waiting.backward, t.overlapping.backward);
      fmt::print("hidden: {:.0f} % forward, of {:.0f} % that chunks allow; {:.0f} % of {:.0f} % backward\n",
                 100 * forward, 100 * forward_allowed, 100 * backward, 100 * backward_allowed);
      enough = enough && forward >= 0.9 * forward_allowed && backward >= 0.9 * backward_allowed;
    };
    const double all_but_one = 1 - 1 / static_cast<double>(s.chunks);
    report("column-parallel", measure<column>(s), all_but_one, 1);
    report("row-parallel", measure<row>(s), all_but_one, all_but_one);
    return enough ? 0 : 1;
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 2;
  }
}
