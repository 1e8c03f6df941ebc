// What linears hide of a slow link between tensor-parallel ranks: a column-parallel and a row-parallel linear, forward
// and backward, with their collectives in chunks beside the products against the same linears that wait for each
// collective. Ranks are threads of this process and share its cores, so no more of them than cores should run; the link
// is a wrapper that completes what is sent as late as a link would.
//
//   bench_tensor_overlap [--ranks N] [--tokens N] [--hidden N] [--rounds N] [--chunks N]
//
// --tokens are those of all ranks together, in one sequence. The link is such that what is sent takes half as long as
// what is computed. Exits with 1 unless at least 80 % is hidden of what chunks allow: forward, all but the first chunk
// of a gather and the last of a reduction; backward, all but the first chunk of a gather.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/nn/linear.hpp"
#include "plait/testing/slow_link.hpp"
#include "timing.hpp"

namespace {

using namespace plait;

struct sizes {
  std::int64_t ranks, tokens, hidden, rounds, chunks;
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

/// Seconds of passes that all ranks make together.
struct pass_times {
  double forward = 0, backward = 0;
};

/// A linear on one rank, with what it is given.
template <class Policy>
class passes {
  using layer = linear<float, Policy>;

 public:
  passes(const context<cpu>& ctx, std::int64_t chunks)
      : ctx_(ctx), layer_(ctx, "layer", {.overlap = chunks}), x_(ctx), dy_(ctx) {
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
  const context<cpu>& ctx_;
  layer layer_;
  tensor<float, typename Policy::input> x_;
  tensor<float, dual_t<typename Policy::output>> dy_;
};

/// The least of some rounds: on a machine that does other work only that means something.
struct least {
  pass_times best{1e30, 1e30};
  void add(const pass_times& t) {
    best.forward = std::min(best.forward, t.forward);
    best.backward = std::min(best.backward, t.backward);
  }
};

struct outcome {
  pass_times bare, waiting, overlapping;
  double collective = 0;  ///< seconds of one on the link
};

template <class Policy>
outcome measure(const sizes& s) {
  outcome out;
  threads::run(static_cast<int>(s.ranks), [&](threads::communicator c) {
    double seconds_per_byte = 0, free = 0;
    const testing::link_time link = [&](const call& what, double bytes, double now) {
      if (what.kind == collective::barrier) return now;
      free = std::max(free, now) + bytes * seconds_per_byte;
      return free;
    };
    world w(mesh{s.ranks}.shape(), any_communicator(testing::slow_communicator(c, link)));
    cpu device;
    const context<cpu> ctx{device, w, sizes_of<seq, hidden, ffn>(s.tokens, s.hidden, 4 * s.hidden)};
    passes<Policy> whole(ctx, 1), cut(ctx, s.chunks);
    least bare, waiting, overlapping;
    whole.run(), cut.run();
    for (std::int64_t i = 0; i < s.rounds; ++i) bare.add(whole.run());
    // Each pass has one collective; the forward pass computes less.
    double collective = bare.best.forward / 2;
    w.root().broadcast(&collective, 1, dtype::f64, 0);
    const double bytes = static_cast<double>(s.tokens * s.hidden) * sizeof(float) * static_cast<double>(s.ranks - 1) /
                         static_cast<double>(s.ranks);
    for (std::int64_t i = 0; i < s.rounds; ++i) {
      seconds_per_byte = 0;
      bare.add(whole.run());
      seconds_per_byte = collective / bytes;
      waiting.add(whole.run());
      overlapping.add(cut.run());
    }
    if (c.rank() == 0) out = {bare.best, waiting.best, overlapping.best, collective};
  });
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const bench::numbers given(argc, argv);
    given.only({"--ranks", "--tokens", "--hidden", "--rounds", "--chunks"});
    const sizes s{given.of("--ranks", 2), given.of("--tokens", 1024), given.of("--hidden", 512),
                  given.of("--rounds", 9), given.of("--chunks", 8)};
    if (s.ranks < 2) fail("--ranks is 1; a collective has at least 2");
    if (s.chunks < 2) fail("--chunks is 1; an overlap has at least 2");
    const auto ms = [](double seconds) { return seconds * 1e3; };
    fmt::print("{} ranks, {} tokens, {} x {}, {} chunks, the least of {}, in ms\n", s.ranks, s.tokens, s.hidden,
               4 * s.hidden, s.chunks, s.rounds);
    bool enough = true;
    const auto report = [&](const char* name, const outcome& t, double forward_allowed, double backward_allowed) {
      fmt::print("{}: a collective takes {:.2f} on the link\n{:26}{:>10}{:>10}\n", name, ms(t.collective), "",
                 "forward", "backward");
      const auto line = [&](const char* what, const pass_times& p) {
        fmt::print("{:26}{:10.2f}{:10.2f}\n", what, ms(p.forward), ms(p.backward));
      };
      line("no delay", t.bare);
      line("that waits", t.waiting);
      line("that overlaps", t.overlapping);
      const auto hidden = [&](double waiting, double overlapping) {
        return std::clamp((waiting - overlapping) / t.collective, 0.0, 1.0);
      };
      const double forward = hidden(t.waiting.forward, t.overlapping.forward);
      const double backward = hidden(t.waiting.backward, t.overlapping.backward);
      fmt::print("hidden: {:.0f} % forward, of {:.0f} % that chunks allow; {:.0f} % of {:.0f} % backward\n",
                 100 * forward, 100 * forward_allowed, 100 * backward, 100 * backward_allowed);
      enough = enough && forward >= 0.8 * forward_allowed && backward >= 0.8 * backward_allowed;
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
