// Measures the cost of equal bits on every layout: a training step with deterministic sums against the usual one, in
// turn, on one rank and on 2 x 2 x 2. It also compares the bytes that a step sends with a dry run: bytes on the wire in
// a rank's ledger, as a mean over ranks. Processor time is that of all ranks together, which other work on the machine
// disturbs less.
//
//   bench_deterministic [--rounds N] [--hidden N] [--layers N] [--seq N] [--batch N] [--microbatches N]
//                       [--features N] [--samples N] [--sequence N]
#include <fmt/format.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>

#include "meshed_llama.hpp"
#include "plait/comm/threads.hpp"
#include "plait/parallel/train_step.hpp"
#include "timing.hpp"

using namespace plait;

namespace bench {

/// Returns the bytes on the wire in the ledgers of all ranks after a step, from a dry run of each rank. Defined in
/// deterministic/bytes.cpp.
std::uint64_t predicted_bytes(const case_of_run& l, const sizes_of_run& s, const deterministic_leaves& leaves);

}  // namespace bench

namespace {

using bench::case_of_run;
using bench::sizes_of_run;

struct result {
  double usual = 1e30, deterministic = 1e30, usual_used = 1e30, deterministic_used = 1e30;
  std::uint64_t hash = 0, usual_bytes = 0, sent = 0, predicted = 0;
};

result measure(const case_of_run& l, const sizes_of_run& s, const deterministic_leaves& leaves) {
  result best;
  threads::run(static_cast<int>(l.shape().size()), [&](threads::communicator comm) {
    bench::trainee<cpu> usual(l, s, {}, comm), deterministic(l, s, leaves, comm);
    for (std::int64_t i = 0; i <= s.rounds; ++i) {  // the first one warms up
      const auto a = usual.step(i), b = deterministic.step(i);
      if (comm.rank() != 0 || i == 0) continue;
      best.usual = std::min(best.usual, a.seconds);
      best.usual_used = std::min(best.usual_used, a.processor_seconds);
      best.deterministic = std::min(best.deterministic, b.seconds);
      best.deterministic_used = std::min(best.deterministic_used, b.processor_seconds);
      best.usual_bytes = a.bytes, best.sent = b.bytes;
    }
    const std::uint64_t hash = deterministic.hash();
    if (comm.rank() == 0) best.hash = hash;
  });
  best.predicted = bench::predicted_bytes(l, s, leaves);
  return best;
}

}  // namespace

int main(int argc, char** argv) try {
  const bench::numbers given(argc, argv);
  const sizes_of_run s = sizes_of_run::of(given, given.of("--batch", 8), given.of("--microbatches", 2));
  const llama_config& c = s.config;
  const deterministic_leaves leaves{given.of("--features", 8), given.of("--samples", 4), given.of("--sequence", 4)};
  fmt::print(
      "hidden {}, {} layers, {} sequences of {} tokens in {} microbatches; leaves: {} of features, {} of samples, {} "
      "of a sequence\n",
      c.hidden, c.layers, s.batch, s.seq, s.microbatches, leaves.features, leaves.samples, leaves.sequence);
  fmt::print("{:24} {:>8} {:>10} {:>6} {:>16} {:>9} {:>9} {:>9} {:>17}\n", "ranks", "usual s", "same bits", "ratio",
             "processor ratio", "usual MB", "predicted", "sent MB", "hash");
  const double target = c.hidden >= 1024 ? 1.1 : 1.2;
  bool reached = true, same = true, as_predicted = true;
  std::optional<std::uint64_t> hash;
  for (const case_of_run& l : {case_of_run{1, 1, 1, 1}, {2, 1, 2, 2}, {1, 2, 2, 2}}) {
    const result r = measure(l, s, leaves);
    if (!hash) hash = r.hash;
    same = same && r.hash == *hash;
    reached = reached && r.deterministic / r.usual <= target;
    as_predicted = as_predicted && r.sent == r.predicted;
    const auto megabytes = [&](std::uint64_t bytes) {
      return 1e-6 * static_cast<double>(bytes) / static_cast<double>(l.shape().size());
    };
    fmt::print("{:24} {:8.3f} {:10.3f} {:6.3f} {:16.3f} {:9.1f} {:9.1f} {:9.1f}  {:016x}\n",
               fmt::format("dp={} pp={} cp={} tp={}", l.dp_ranks, l.pp_ranks, l.cp_ranks, l.tp_ranks), r.usual,
               r.deterministic, r.deterministic / r.usual, r.deterministic_used / r.usual_used,
               megabytes(r.usual_bytes), megabytes(r.predicted), megabytes(r.sent), r.hash);
  }
  fmt::print("target: a ratio of {} or less: {}; one hash: {}; bytes as predicted: {}\n", target,
             reached ? "reached" : "missed", same ? "yes" : "NO", as_predicted ? "yes" : "NO");
  return same && as_predicted ? 0 : 1;
} catch (const std::exception& e) {
  fmt::print(stderr, "bench_deterministic: {}\n", e.what());
  return 1;
}
