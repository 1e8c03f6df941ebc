#include "set_deterministic.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <utility>

#include "plait/core/error.hpp"

void set_deterministic(setup& s, std::int64_t dp, std::int64_t cp, std::int64_t tp) {
  const plait::deterministic_leaves& n = s.opt.leaves;
  s.deterministic = n;
  if (!n) return;
  const auto refuse = [&](const char* which, std::int64_t leaves, const std::string& why) {
    plait::fail(fmt::format("--deterministic {}: {} leaves of {}, {}", s.opt.deterministic, leaves, which, why));
  };
  const plait::llama_config& c = s.config;
  if (tp > c.kv_heads)
    plait::fail(
        fmt::format("--deterministic has no order for kv heads that ranks share, and --mesh has tp={} for {} kv "
                    "heads; legal are up to {}",
                    tp, c.kv_heads, c.kv_heads));
  if (c.qk_norm) plait::fail("--deterministic has no order for norms of queries and keys, which this model has");
  for (const auto& [name, size] : {std::pair{"heads", c.heads}, {"kv heads", c.kv_heads}, {"ffn", c.ffn}})
    if (const std::int64_t leaves = std::gcd(n.features, size); leaves % tp != 0)
      refuse(name, leaves,
             fmt::format("as many as divide {} and {}, cannot be shared out over tp={}; the first number must have a "
                         "common divisor with {} that is a multiple of {}",
                         n.features, size, tp, size, tp));
  if (n.features % tp != 0)
    refuse("the vocabulary", n.features, fmt::format("cannot be shared out over tp={}; legal are multiples of it", tp));
  const std::int64_t batch = s.microbatches * s.sequences, parts = dp * s.microbatches;
  if (n.samples % parts != 0 || batch % n.samples != 0)
    refuse("samples", n.samples,
           fmt::format("cannot be shared out over dp={} and {} microbatches of {} sequences in a step; legal are "
                       "multiples of {} that divide {}",
                       dp, s.microbatches, batch, parts, batch));
  const std::int64_t pieces = s.zigzag && cp > 1 ? 2 * cp : cp;
  if (n.sequence % pieces != 0)
    refuse("the sequence", n.sequence,
           fmt::format("cannot be shared out over cp={}{}; legal are multiples of {}", cp,
                       s.zigzag && cp > 1 ? " in zigzag order" : "", pieces));
  if (s.opt.seq % (n.sequence * n.features) != 0)
    refuse(
        "the sequence", n.sequence,
        fmt::format("of which each is cut into {} for norms, do not divide --seq {}; legal are numbers whose product "
                    "with {} divides it",
                    n.features, s.opt.seq, n.features));
}
