// The order of a sequence's tokens along its dim, original or zigzag, and the work of causal attention in this order.
// Programs that load token ids ask it for the tokens' positions.
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
#include "plait/kernels/settings.hpp"
#include "plait/layout/layout.hpp"

namespace plait {

/// A run of `length` tokens that are contiguous both in memory and in the text. The first is at index `at` of a local
/// array and at `position` of the text.
struct token_run {
  std::int64_t at = 0;
  std::int64_t position = 0;
  std::int64_t length = 0;
  friend bool operator==(const token_run&, const token_run&) = default;
};

namespace detail {
/// Returns the runs sorted by position in the text. Runs that are contiguous in memory and in the text are joined.
std::vector<token_run> joined(std::vector<token_run> runs);
}  // namespace detail

/// The order of tokens along a dim that shards a sequence: original (`seq`) or zigzag (`zseq`). For c ranks, zigzag
/// cuts the sequence into 2c pieces. Piece r and its mirror, piece 2c - 1 - r, are adjacent, in places 2r and 2r + 1.
/// So rank r of c holds these two, and every rank sees equally many tokens under a causal mask. If 2c does not divide
/// the length, pieces differ by one token.
///
/// Only code that needs a token's position knows the order: the data loader, positions, attention and dropout.
class sequence_order {
 public:
  sequence_order() = default;
  static sequence_order original(std::int64_t length) { return {length, 1}; }
  /// Each piece has whole blocks of tokens (`dim_sizes::set`). Throws if there are more ranks than blocks. In the
  /// message, `field` names the length and `axes` the ranks.
  static sequence_order zigzag(std::int64_t length, std::int64_t ranks, const std::string& field = "the sequence",
                               const std::string& axes = "context-parallel ranks", std::int64_t block = 1) {
    if (ranks < 1) fail({"zigzag order for ", ranks, " ranks; at least 1 is legal"});
    if (length < ranks * block)
      fail(
          {field, " is ", length, "; in zigzag order over ", ranks, " ", axes, " the least length is ", ranks * block});
    return {length, ranks, ranks == 1 ? 1 : block};
  }

  std::int64_t length() const { return length_; }
  bool is_text() const { return ranks_ == 1; }

  /// The position in the text of the token at `index` along the dim.
  std::int64_t position(std::int64_t index) const { return run_at(index).position; }
  /// The positions of the tokens at indices `first` to `first + count - 1`, such as a rank's part of the dim.
  std::vector<std::int64_t> positions(std::int64_t first, std::int64_t count) const {
    std::vector<std::int64_t> all(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) all[static_cast<std::size_t>(i)] = position(first + i);
    return all;
  }
  /// Returns these positions as runs in the order of the text. A run's `at` is relative to `first`.
  std::vector<token_run> runs(std::int64_t first, std::int64_t count) const;

  friend bool operator==(const sequence_order&, const sequence_order&) = default;

 private:
  sequence_order(std::int64_t length, std::int64_t ranks, std::int64_t block = 1)
      : length_(length), ranks_(ranks), block_(block) {}

  /// The run of tokens from `index` to the end of its piece; its `at` is the index. A rank with tokens [b, e) of the
  /// dim has two pieces of a text of n tokens: [ceil(b/2), ceil(e/2)) and then [n - floor(e/2), n - floor(b/2)).
  token_run run_at(std::int64_t index) const {
    if (ranks_ == 1) return {index, index, length_ - index};
    const std::int64_t blocks = length_ / block_, unit = index / block_;
    const std::int64_t rank = ((unit + 1) * ranks_ - 1) / blocks;  // the last rank that begins at or before `unit`
    const std::int64_t begin = part_begin(blocks, ranks_, rank), end = part_begin(blocks, ranks_, rank + 1);
    const std::int64_t first = (begin + 1) / 2, front = ((end + 1) / 2 - first) * block_, at = index - begin * block_;
    if (at < front) return {index, first * block_ + at, front - at};
    return {index, length_ - end / 2 * block_ + at - front, end * block_ - index};
  }

  std::int64_t length_ = 0;
  std::int64_t ranks_ = 1;
  std::int64_t block_ = 1;  ///< tokens that are never split between ranks
};

inline std::int64_t tokens_of(const std::vector<token_run>& runs) {
  std::int64_t tokens = 0;
  for (const token_run& r : runs) tokens += r.length;
  return tokens;
}

/// Whether some token of `queries` attends to some token of `keys`.
inline bool sees(const token_run& queries, const token_run& keys, const kernels::attention_mask& mask = {}) {
  const std::int64_t last_query = queries.position + queries.length - 1, last_key = keys.position + keys.length - 1;
  return keys.position < mask.end(last_query) && last_key >= mask.first(queries.position);
}
inline bool sees(const std::vector<token_run>& queries, const std::vector<token_run>& keys,
                 const kernels::attention_mask& mask = {}) {
  for (const token_run& q : queries)
    for (const token_run& k : keys)
      if (sees(q, k, mask)) return true;
  return false;
}

/// The queries and keys of one kernel call. The queries are runs `first_run` to `first_run + runs - 1`.
struct visible_piece {
  token_run queries, keys;
  std::size_t first_run = 0, runs = 1;
};

/// Returns the pairs of query and key runs in which some query attends to some key. If the mask allows it, runs that
/// are adjacent in memory become one piece, even if they are apart in the text. Then positions need not be those of the
/// text: keys that all queries see may have any position, and so may queries that see all keys. With `exact`, and with
/// masks that need positions, all positions are those of the text.
std::vector<visible_piece> visible_pieces(const std::vector<token_run>& queries, const std::vector<token_run>& keys,
                                          const kernels::attention_mask& mask, bool exact);

/// The number of pairs of a query and a key that attend to each other: the work of attention.
std::int64_t visible_pairs(const std::vector<token_run>& queries, const std::vector<token_run>& keys,
                           const kernels::attention_mask& mask = {});

/// The work of each rank, in pairs of a query and a key, if `ranks` ranks shard the sequence.
std::vector<std::int64_t> attention_work(const sequence_order& order, std::int64_t ranks,
                                         const kernels::attention_mask& mask = {});

#ifndef PLAIT_COMPILED
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

PLAIT_INLINE std::vector<token_run> sequence_order::runs(std::int64_t first, std::int64_t count) const {
  std::vector<token_run> all;
  for (std::int64_t i = first; i < first + count;) {
    const token_run whole = run_at(i);
    const std::int64_t here = std::min(first + count - i, whole.length);
    all.push_back({i - first, whole.position, here});
    i += here;
  }
  return detail::joined(std::move(all));
}

PLAIT_INLINE std::vector<visible_piece> visible_pieces(const std::vector<token_run>& queries,
                                                       const std::vector<token_run>& keys,
                                                       const kernels::attention_mask& mask, bool exact) {
  exact = exact || mask.needs_positions();
  const auto sees_all = [&](const token_run& q, const token_run& k) {
    return k.position + k.length <= mask.end(q.position);  // without `exact`, every query sees all earlier keys
  };
  const auto follows = [](const token_run& a, const token_run& b) { return a.at + a.length == b.at; };
  std::vector<visible_piece> pieces;
  for (std::size_t i = 0; i < queries.size(); ++i) {
    const token_run& q = queries[i];
    const std::size_t begin = pieces.size();
    for (const token_run& k : keys) {
      if (!sees(q, k, mask)) continue;
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
                                        const kernels::attention_mask& mask) {
  std::int64_t pairs = 0;
  for (const token_run& q : queries)
    for (const token_run& k : keys)
      for (std::int64_t p = q.position; p < q.position + q.length; ++p)
        pairs += std::max<std::int64_t>(
            0, std::min(k.position + k.length, mask.end(p)) - std::max(k.position, mask.first(p)));
  return pairs;
}

PLAIT_INLINE std::vector<std::int64_t> attention_work(const sequence_order& order, std::int64_t ranks,
                                                      const kernels::attention_mask& mask) {
  const std::vector<token_run> keys{{0, 0, order.length()}};  // the storage order of keys does not affect the work
  std::vector<std::int64_t> work;
  for (std::int64_t r = 0; r < ranks; ++r) {
    const std::int64_t begin = part_begin(order.length(), ranks, r), end = part_begin(order.length(), ranks, r + 1);
    work.push_back(visible_pairs(order.runs(begin, end - begin), keys, mask));
  }
  return work;
}
#endif

}  // namespace plait

#include "plait/core/macros_on.hpp"
