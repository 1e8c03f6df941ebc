// The definitions of all_gather_kv.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"

namespace plait {

namespace detail {

PLAIT_INLINE text_assembly::text_assembly(const std::vector<std::vector<token_run>>& blocks, std::size_t first,
                                          std::size_t count, std::int64_t tokens)
    : tokens_(tokens) {
  for (std::size_t b = 0; b < count; ++b)
    for (const token_run& r : blocks[first + b]) pieces_.push_back({b, r.at, 0, r.position, r.length});
  std::sort(pieces_.begin(), pieces_.end(), [](const piece& a, const piece& b) { return a.position < b.position; });
  std::int64_t at = 0;
  std::vector<token_run> runs;
  for (piece& p : pieces_) {
    p.to = at;
    runs.push_back({at, p.position, p.length});
    at += p.length;
  }
  length_ = at;
  runs_ = joined(std::move(runs));
}

}  // namespace detail

}  // namespace plait
