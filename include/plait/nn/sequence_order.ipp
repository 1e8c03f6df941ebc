// The definitions of sequence_order.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait {

namespace detail {

PLAIT_INLINE std::vector<token_run> joined(std::vector<token_run> runs) {
  std::sort(runs.begin(), runs.end(), [](const token_run& a, const token_run& b) { return a.position < b.position; });
  std::vector<token_run> result;
  for (const token_run& r : runs) {
    if (r.length == 0) continue;
    if (!result.empty() && result.back().position + result.back().length == r.position &&
        result.back().at + result.back().length == r.at)
      result.back().length += r.length;
    else
      result.push_back(r);
  }
  return result;
}

}  // namespace detail

PLAIT_INLINE sequence_order sequence_order::zigzag(std::int64_t length, std::int64_t ranks, const std::string& field,
                                                   const std::string& axes) {
  const std::int64_t pieces = 2 * ranks;
  if (ranks < 1) fail({"zigzag order for ", ranks, " ranks; at least 1 is legal"});
  if (ranks == 1) return {length, 1};
  if (length % pieces != 0) {
    const std::int64_t below = length / pieces * pieces;
    fail({field, " is ", length, "; in zigzag order over ", ranks, " ", axes, " it must be divisible by 2 x ", ranks,
          " = ", pieces, below > 0 ? cat({"; the nearest lengths are ", below, " and "}) : "; the least length is ",
          below + pieces});
  }
  return {length, pieces};
}

PLAIT_INLINE std::vector<token_run> sequence_order::runs(std::int64_t first, std::int64_t count) const {
  const std::int64_t size = length_ / pieces_;
  std::vector<token_run> all;
  for (std::int64_t i = first; i < first + count;) {
    const std::int64_t here = std::min(first + count, (i / size + 1) * size) - i;
    all.push_back({i - first, position(i), here});
    i += here;
  }
  return detail::joined(std::move(all));
}

PLAIT_INLINE std::vector<visible_piece> visible_pieces(const std::vector<token_run>& queries,
                                                       const std::vector<token_run>& keys, std::int64_t window,
                                                       bool exact) {
  const auto sees_all = [](const token_run& q, const token_run& k) { return k.position + k.length - 1 <= q.position; };
  const auto follows = [](const token_run& a, const token_run& b) { return a.at + a.length == b.at; };
  std::vector<visible_piece> pieces;
  for (std::size_t i = 0; i < queries.size(); ++i) {
    const token_run& q = queries[i];
    const std::size_t begin = pieces.size();
    for (const token_run& k : keys) {
      if (!sees(q, k, window)) continue;
      if (!exact && pieces.size() > begin && follows(pieces.back().keys, k) && sees_all(q, pieces.back().keys)) {
        token_run& together = pieces.back().keys;
        together.length += k.length;
        together.position = k.position + k.length - together.length;
      } else {
        pieces.push_back({q, k, i, 1});
      }
    }
    if (exact || begin == 0 || pieces.size() != begin + 1) continue;
    visible_piece& before = pieces[begin - 1];
    const bool alone = begin == 1 || pieces[begin - 2].first_run + pieces[begin - 2].runs != i;
    if (alone && before.first_run + before.runs == i && before.keys == pieces[begin].keys &&
        sees_all(before.queries, before.keys) && follows(before.queries, q)) {
      before.queries.length += q.length;
      ++before.runs;
      pieces.pop_back();
    }
  }
  return pieces;
}

PLAIT_INLINE std::int64_t visible_pairs(const std::vector<token_run>& queries, const std::vector<token_run>& keys,
                                        std::int64_t window) {
  std::int64_t pairs = 0;
  for (const token_run& q : queries)
    for (const token_run& k : keys)
      for (std::int64_t p = q.position; p < q.position + q.length; ++p) {
        const std::int64_t first = window > 0 ? std::max(k.position, p - window + 1) : k.position;
        pairs += std::max<std::int64_t>(0, std::min(k.position + k.length, p + 1) - first);
      }
  return pairs;
}

PLAIT_INLINE std::vector<std::int64_t> causal_work(const sequence_order& order, std::int64_t ranks,
                                                   std::int64_t window) {
  const std::vector<token_run> keys = order.runs(0, order.length());
  const std::int64_t part = order.length() / ranks;
  std::vector<std::int64_t> work;
  for (std::int64_t r = 0; r < ranks; ++r) work.push_back(visible_pairs(order.runs(r * part, part), keys, window));
  return work;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
