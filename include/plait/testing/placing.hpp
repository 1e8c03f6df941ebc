// Global values spread over the ranks of a mesh, and collected again, for tests. In training each rank fills its own
// part instead (parallel/train_step.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plait/comm/metrics.hpp"
#include "plait/core/text.hpp"
#include "plait/tensor/redistribution.hpp"
#include "plait/tensor/tensor.hpp"
#include "plait/testing/findings.hpp"

namespace plait::testing {

/// A number from -1 to 1 that depends on the stream and the index only.
inline double random_at(std::uint64_t stream, std::int64_t i) {
  std::uint64_t x = stream * 0x9e3779b97f4a7c15ull + static_cast<std::uint64_t>(i) * 0xbf58476d1ce4e5b9ull + 12345;
  x ^= x >> 31, x *= 0x94d049bb133111ebull, x ^= x >> 29, x *= 0xbf58476d1ce4e5b9ull, x ^= x >> 32;
  return static_cast<double>(x >> 11) / 9007199254740992.0 * 2 - 1;
}

/// A text that a model can learn: the next token follows from the last, but for one in nine.
inline std::int64_t learnable_token(std::int64_t sample, std::int64_t position, std::int64_t vocab) {
  const std::int64_t noise = (sample * 7919 + position * 104729) % 9 == 0 ? sample + position : 0;
  return (sample * 11 + position * 5 + noise + (sample * sample) % 13) % vocab;
}

/// `a` on one rank: every dim whole.
inline layout whole_of(const layout& a) {
  layout whole;
  for (const dim_placement& p : a.dims) whole.dims.push_back({p.dim, {}});
  return whole;
}

/// A whole array of such numbers, row-major.
inline std::vector<double> random_full(const layout& a, const dim_sizes& sizes, std::uint64_t stream) {
  std::int64_t n = 1;
  for (const dim_placement& p : a.dims) n *= sizes.of(p.dim);
  std::vector<double> v(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) v[static_cast<std::size_t>(i)] = random_at(stream, i);
  return v;
}

/// A tensor whose whole value is `full`, laid out as `Spec` (a partial one has all of it on one rank). Collective.
template <class Spec, class T, class Device>
tensor<T, Spec, Device> place_full(const context<Device>& ctx, const std::vector<T>& full) {
  const ready_plan moves(whole_of(layout_v<Spec>), layout_v<Spec>, ctx.ranks, ctx.sizes, "placing");
  auto there = make_buffer<T>(ctx.device, full.size());
  ctx.device.upload(there.data(), full.data(), there.bytes(), ctx.device.main_stream());
  tensor<T, Spec, Device> out(ctx);
  moves.run(ctx.device, there.data(), out.data(), dtype_of<T>);
  return out;
}
/// The whole value; `local` is this rank's part. Collective.
template <class T, class Device>
std::vector<double> collect_full(const context<Device>& ctx, const layout& from, const T* local) {
  const ready_plan moves(from, whole_of(from), ctx.ranks, ctx.sizes, "collecting");
  auto there = make_buffer<T>(ctx.device, static_cast<std::size_t>(moves.target().local_size()));
  moves.run(ctx.device, local, there.data(), dtype_of<T>);
  std::vector<T> out(static_cast<std::size_t>(moves.target().local_size()));
  ctx.device.download(out.data(), there.data(), there.bytes(), ctx.device.main_stream());
  return std::vector<double>(out.begin(), out.end());
}

/// Two ledgers agree in calls, payload and wire bytes. (The wire bytes of an all-to-all are a mean over ranks in one
/// and a rank's own in the other.)
inline findings compare_ledgers(const ledger& measured, const ledger& predicted, bool wire_of_exchanges = false) {
  findings found;
  for (const ledger* book : {&measured, &predicted})
    for (const ledger::row& row : book->rows)
      for (int k = 0; k < collective_kinds; ++k) {
        const auto kind = static_cast<collective>(k);
        const ledger::entry m = measured.total(row.label, kind), p = predicted.total(row.label, kind);
        const bool wire = m.wire == p.wire || (kind == collective::all_to_all && !wire_of_exchanges);
        if (m.calls == p.calls && m.payload == p.payload && wire) continue;
        found.add(cat({row.label, " ", name_of(kind), ": ", m.calls, " calls of ", m.payload, " bytes (", m.wire,
                       " on the wire), and predicted were ", p.calls, " of ", p.payload, " (", p.wire, ")"}));
      }
  return found;
}

}  // namespace plait::testing
