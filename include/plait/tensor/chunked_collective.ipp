// The definitions of chunked_collective.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

PLAIT_INLINE chunked_collective::chunked_collective(const executor& moves, std::int64_t width, std::int64_t chunks,
                                                    std::string_view where) {
  const auto found = moves.lone();
  if (!found || width < 1 || found->inner % width != 0)
    fail({where, ": overlap in ", chunks, " chunks is of one all-gather, reduce-scatter or all-reduce of whole rows;",
          " here it would be of ", describe_steps(moves.planned())});
  kind_ = found->kind;
  comm_ = found->comm;
  ranks_ = kind_ == transition_kind::all_reduce ? 1 : found->ranks;
  rows_ = found->rows * (found->inner / width);
  width_ = width;
  const std::int64_t most = found->outer * rows_;
  if (chunks < 1 || chunks > most)
    fail(
        {where, ": overlap in ", chunks, " chunks, of ", most, " rows on each rank; legal are 1 to ", most, " chunks"});
  cut(found->outer, chunks);
}

PLAIT_INLINE void chunked_collective::cut(std::int64_t outer, std::int64_t chunks) {
  const auto share = [](std::int64_t n, std::int64_t i, std::int64_t of) { return n * i / of; };
  if (outer >= chunks) {
    for (std::int64_t c = 0; c < chunks; ++c) {
      const std::int64_t begin = share(outer, c, chunks);
      pieces_.push_back({begin, share(outer, c + 1, chunks) - begin, 0, rows_});
    }
  } else {
    for (std::int64_t o = 0; o < outer; ++o) {
      const std::int64_t here = share(chunks, o + 1, outer) - share(chunks, o, outer);
      for (std::int64_t c = 0; c < here; ++c) {
        const std::int64_t begin = share(rows_, c, here);
        pieces_.push_back({o, 1, begin, share(rows_, c + 1, here) - begin});
      }
    }
  }
  for (const piece& p : pieces_) largest_ = std::max(largest_, p.outers * p.rows);
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
