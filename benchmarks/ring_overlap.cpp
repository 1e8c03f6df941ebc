// Measures how much of a slow link's time ring attention hides. Messages travel while a rank computes. This is compared
// with the same ring that waits for each message where it starts, and with gathered keys. Ranks are threads of this
// process, so run no more ranks than cores. The link is a wrapper that delays messages by the time of a link.
//
//   bench_ring_overlap [--ranks N] [--tokens N] [--rounds N] [--heads N] [--head-dim N]
//
// --tokens are those of one rank. A second table has the same link under other masks. Exits with 1 unless at least 90 %
// of the time that can be hidden is hidden.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/nn/attention/chosen.hpp"
#include "slow_link.hpp"
#include "timing.hpp"

namespace {

using namespace plait;

struct sizes {
  std::int64_t ranks, tokens, rounds, heads, head_dim;
};
/// The seconds of passes of all ranks together, and the seconds that a rank only waited for the link.
struct pass_times {
  double forward = 0, backward = 0;
  double forward_waits = 0, backward_waits = 0;
};

/// The mask of attention, and the order of the sequence.
struct sight {
  const char* name;
  kernels::attention_mask mask = kernels::attention_mask::causal();
  bool zigzag = true;
  std::int64_t document = 0;  ///< tokens of each document; 0: there are none
};

template <class Policy>
class passes {
 public:
  passes(const context<cpu>& ctx, const sizes& s, const sight& of)
      : ctx_(ctx), attention_(ctx, shape_of(s, of.mask), order_of(s, of.zigzag), of.document > 0) {
    if (of.document > 0)
      for (const std::int64_t p : attention_.positions())
        begins_.push_back(static_cast<std::int32_t>(p / of.document * of.document));
    const auto n = static_cast<std::size_t>(s.tokens * s.heads * s.head_dim), kv = n / 4;
    for (std::vector<float>* v : {&q_, &o_, &d_o_, &dq_}) v->assign(n, 0.01f);
    for (std::vector<float>* v : {&k_, &v_, &dk_, &dv_}) v->assign(kv, 0.02f);
  }

  void forward() { attention_.forward(ctx_, inputs(), o_.data(), &kept_); }
  void backward() {
    attention_.backward(ctx_, inputs(), o_.data(), d_o_.data(), kept_, {dq_.data(), dk_.data(), dv_.data()});
  }

 private:
  static sequence_order order_of(const sizes& s, bool zigzag) {
    const std::int64_t length = s.tokens * s.ranks;
    return zigzag ? sequence_order::zigzag(length, s.ranks) : sequence_order::original(length);
  }
  static kernels::attention_shape shape_of(const sizes& s, const kernels::attention_mask& mask) {
    kernels::attention_shape shape;
    shape.mask = mask;
    shape.heads = s.heads, shape.kv_heads = s.heads / 4, shape.head_dim = s.head_dim;
    shape.scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
    return shape;
  }
  attention_inputs<float> inputs() const {
    return {q_.data(), k_.data(), v_.data(), begins_.empty() ? nullptr : begins_.data()};
  }

  const context<cpu>& ctx_;
  context_attention<float, Policy> attention_;
  typename context_attention<float, Policy>::saved kept_;
  std::vector<float> q_, k_, v_, o_, d_o_, dq_, dk_, dv_;
  std::vector<std::int32_t> begins_;  ///< beginning of each token's document
};

template <class Pass>
pass_times time_of(Pass& pass, any_communicator& ranks, const bench::link& link) {
  const auto together = [&](auto&& work, double& waits) {
    ranks.barrier();
    const double before = link.waited;
    const double took = bench::seconds([&] {
      work();
      ranks.barrier();
    });
    waits = (link.waited - before) / ranks.size();
    ranks.barrier();
    return took;
  };
  pass_times t;
  t.forward = together([&] { pass.forward(); }, t.forward_waits);
  t.backward = together([&] { pass.backward(); }, t.backward_waits);
  return t;
}

/// Returns the least times of all rounds: on a machine with other work only these are meaningful.
pass_times least_of(const std::vector<pass_times>& all) {
  pass_times least = all[0];
  for (const pass_times& t : all) {
    least.forward = std::min(least.forward, t.forward);
    least.backward = std::min(least.backward, t.backward);
    least.forward_waits = std::min(least.forward_waits, t.forward_waits);
    least.backward_waits = std::min(least.backward_waits, t.backward_waits);
  }
  return least;
}

struct outcome {
  pass_times bare, waiting, overlapping, gathered;
  double message = 0;  ///< seconds of a message with a block of keys and values
};

/// Calls f(ctx, all, link, use) on each rank; use(seconds_per_byte, overlaps) sets the link for all.
template <class F>
void on_ranks(const sizes& s, F&& f) {
  bench::link link;
  threads::run(static_cast<int>(s.ranks), [&](threads::communicator comm) {
    world w(mesh<axis<cp>>(s.ranks).shape(), any_communicator(bench::slow_link<threads::communicator>(comm, &link)));
    cpu device;
    const context<cpu> ctx{device, w, {}};
    any_communicator& all = w.root();
    f(ctx, all, link, [&](double seconds_per_byte, bool overlaps) {
      all.barrier();
      if (w.rank() == 0) link.seconds_per_byte = seconds_per_byte, link.overlaps = overlaps;
      all.barrier();
    });
  });
}

/// Returns the bytes of a rank's keys and values.
double block_bytes(const sizes& s) {
  return 2.0 * static_cast<double>(s.tokens * s.heads / 4 * s.head_dim) * sizeof(float);
}

outcome measure(const sizes& s) {
  outcome out;
  on_ranks(s, [&](const context<cpu>& ctx, any_communicator& all, bench::link& link, auto&& use) {
    const sight causal{"causal"};
    passes<ring<cp>> around(ctx, s, causal);
    passes<all_gather_kv<cp>> gathered(ctx, s, causal);
    const double block = block_bytes(s);
    std::vector<pass_times> bare, waiting, overlapping, gathering;
    time_of(around, all, link), time_of(gathered, all, link);
    for (std::int64_t i = 0; i < s.rounds; ++i) bare.push_back(time_of(around, all, link));
    // A message takes half of the time that a rank computes in a step, so all of it can be hidden.
    double message = least_of(bare).forward / static_cast<double>(2 * s.ranks);
    all.broadcast(&message, 1, dtype::f64, 0);
    bare.clear();
    for (std::int64_t i = 0; i < s.rounds; ++i) {
      use(0, true);
      bare.push_back(time_of(around, all, link));
      use(message / block, false);
      waiting.push_back(time_of(around, all, link));
      use(message / block, true);
      overlapping.push_back(time_of(around, all, link));
      gathering.push_back(time_of(gathered, all, link));
    }
    if (all.rank() == 0) out = {least_of(bare), least_of(waiting), least_of(overlapping), least_of(gathering), message};
  });
  return out;
}

/// Prints for each mask the share of the link's time that ranks wait for. A block takes `message` seconds. Times on the
/// link are counted, and waits are medians, because a rank that another program delays waits less.
void print_masks(const sizes& s, double message) {
  using kernels::attention_mask;
  const std::int64_t length = s.tokens * s.ranks;
  const sight all_sights[] = {{"full, contiguous", attention_mask::full(), false},
                              {"causal, contiguous", attention_mask::causal(), false},
                              {"causal, zigzag"},
                              {"window of an eighth, contiguous", attention_mask::window(length / 8), false},
                              {"prefix of a quarter, zigzag", attention_mask::prefix_lm(length / 4)},
                              {"documents of a quarter, zigzag", attention_mask::causal(), true, length / 4}};
  fmt::print("\nboth passes on that link by mask, the median of {}, in ms of a rank\n{:34}{:>10}{:>22}{:>22}\n",
             s.rounds, "", "on link", "waits, no overlap", "waits, overlap");
  for (const sight& of : all_sights) {
    double on_link = 0;
    std::vector<double> waits[2];  // without and with overlap
    on_ranks(s, [&](const context<cpu>& ctx, any_communicator& all, bench::link& link, auto&& use) {
      passes<ring<cp>> around(ctx, s, of);
      time_of(around, all, link);
      for (std::int64_t i = 0; i < s.rounds; ++i)
        for (const bool overlaps : {false, true}) {
          use(message / block_bytes(s), overlaps);
          const double before = link.in_use;
          const pass_times t = time_of(around, all, link);
          if (all.rank() != 0) continue;
          on_link = (link.in_use - before) / static_cast<double>(s.ranks);
          waits[overlaps].push_back(t.forward_waits + t.backward_waits);
        }
    });
    const double alone = bench::median(waits[0]), exposed = bench::median(waits[1]);
    fmt::print("{:34}{:10.2f}{:13.2f} = {:4.0f} %{:13.2f} = {:4.0f} %\n", of.name, 1e3 * on_link, 1e3 * alone,
               100 * alone / on_link, 1e3 * exposed, 100 * exposed / on_link);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const bench::numbers given(argc, argv);
    given.only({"--ranks", "--tokens", "--rounds", "--heads", "--head-dim"});
    const sizes s{given.of("--ranks", 2), given.of("--tokens", 1024), given.of("--rounds", 9), given.of("--heads", 8),
                  given.of("--head-dim", 64)};
    if (s.heads % 4 != 0) fail("--heads is " + std::to_string(s.heads) + ", must be a multiple of 4");
    if (s.ranks < 2) fail("--ranks is 1; a ring has at least 2");
    if (s.tokens % 2 != 0) fail("--tokens is " + std::to_string(s.tokens) + ", must be even");
    const outcome t = measure(s);
    const auto ms = [](double seconds) { return seconds * 1e3; };
    fmt::print("{} ranks, {} tokens each, {} heads of {}, the least of {}, in ms\n", s.ranks, s.tokens, s.heads,
               s.head_dim, s.rounds);
    fmt::print("a block of keys and values takes {:.2f} on the link\n{:34}{:>10}{:>10}{:>24}\n", ms(t.message), "",
               "forward", "backward", "of these, waiting");
    const auto row = [&](const char* name, const pass_times& p) {
      fmt::print("{:34}{:10.2f}{:10.2f}{:12.2f}{:10.2f}\n", name, ms(p.forward), ms(p.backward), ms(p.forward_waits),
                 ms(p.backward_waits));
    };
    row("ring, no delay", t.bare);
    row("ring that waits for each message", t.waiting);
    row("ring that overlaps", t.overlapping);
    row("gathered keys", t.gathered);
    // Forward, every message can be hidden. Backward, the last message of gradients, back to their rank, cannot.
    const auto hidden = [](double waiting, double overlapping, double last) {
      return std::min(1.0, (waiting - overlapping) / std::max(waiting - last, 1e-9));
    };
    const double forward = hidden(t.waiting.forward_waits, t.overlapping.forward_waits, 0);
    const double backward = hidden(t.waiting.backward_waits, t.overlapping.backward_waits, t.message);
    fmt::print("hidden: {:.0f} % of what can be, forward; {:.0f} %, backward; gathered keys over the ring: {:.2f}\n",
               100 * forward, 100 * backward,
               (t.gathered.forward + t.gathered.backward) / (t.overlapping.forward + t.overlapping.backward));
    print_masks(s, t.message);
    return forward >= 0.9 && backward >= 0.9 ? 0 : 1;
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 2;
  }
}
