// Who reads what of tensors whose rows are cut over ranks. A file has rows one after the other, so that a part of each
// is many short runs with gaps between them: ranks that hold parts of the same rows read whole rows instead, each some
// of them, and send each other the parts. Plans only: checkpoint/exchange_shares.hpp sends.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plait/checkpoint/part_boxes.hpp"
#include "plait/core/box.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// A box of a rank's share of a tensor, and how it is read.
struct planned_read {
  placed_box own;            ///< what this rank needs
  std::vector<box> parts{};  ///< what each of the ranks needs that read rows for each other; empty: each reads its own
  std::vector<box> slabs{};  ///< and what each of them reads: some rows, all of them as wide as all parts together
  std::size_t self = 0;      ///< which of those ranks this is

  bool by_rows() const { return !parts.empty(); }
  const box& read() const { return by_rows() ? slabs[self] : own.where; }
};

namespace detail {

/// The smallest box that has several parts of the same rows, if they tile it; else one without elements.
inline box joined_rows(const std::vector<box>& parts) {
  box all = parts.front();
  std::int64_t elements = 0;
  for (const box& b : parts) {
    if (b.dims != all.dims || b.offset[0] != all.offset[0] || b.local[0] != all.local[0]) return {};
    for (std::size_t d = 1; d < static_cast<std::size_t>(all.dims); ++d) {
      const std::int64_t end = std::max(all.offset[d] + all.local[d], b.offset[d] + b.local[d]);
      all.offset[d] = std::min(all.offset[d], b.offset[d]);
      all.local[d] = end - all.offset[d];
    }
    elements += b.local_size();
  }
  if (elements != all.local_size()) all.dims = 0;
  return all;
}

/// Some rows of a box: the i-th of `n` shares of them.
inline box rows_of(box all, std::int64_t i, std::int64_t n) {
  const std::int64_t rows = all.local[0], first = rows * i / n;
  all.offset[0] += first;
  all.local[0] = rows * (i + 1) / n - first;
  return all;
}

}  // namespace detail

/// Plans how rank `self` of several reads its share of a tensor: `shares` are those of all of them (`boxes_of_part`),
/// the same on every rank, and so is what `short_runs(box)` answers, whether the runs of a box are short and have gaps
/// between them in the files. A box is read by rows where that is so for one of the ranks.
template <class ShortRuns>
std::vector<planned_read> plan_reads(const std::vector<std::vector<placed_box>>& shares, std::size_t self,
                                     ShortRuns&& short_runs) {
  std::vector<planned_read> all;
  const auto ranks = static_cast<std::int64_t>(shares.size());
  const bool alike =
      std::all_of(shares.begin(), shares.end(), [&](const auto& s) { return s.size() == shares.front().size(); });
  for (std::size_t k = 0; k < shares[self].size(); ++k) {
    planned_read& next = all.emplace_back(planned_read{shares[self][k]});
    next.self = self;
    if (ranks == 1 || !alike || next.own.where.dims < 2 || next.own.where.local[0] < 2) continue;
    std::vector<box> parts;
    for (const std::vector<placed_box>& share : shares) parts.push_back(share[k].where);
    const box joined = detail::joined_rows(parts);
    if (joined.dims == 0 || std::none_of(parts.begin(), parts.end(), short_runs)) continue;
    for (std::int64_t i = 0; i < ranks; ++i) next.slabs.push_back(detail::rows_of(joined, i, ranks));
    next.parts = std::move(parts);
  }
  return all;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
