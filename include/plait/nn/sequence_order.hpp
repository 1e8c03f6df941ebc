// The order of a sequence's tokens along its dim, original or zigzag, and the arithmetic of causal attention on it. It
// moves no tokens: whoever fills token ids asks for their positions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plait/core/error.hpp"

namespace plait {

/// Tokens that follow each other both where they are stored and in the text: `length` of them, the first at index `at`
/// of a local array and at `position` of the text.
struct token_run {
  std::int64_t at = 0;
  std::int64_t position = 0;
  std::int64_t length = 0;
  friend bool operator==(const token_run&, const token_run&) = default;
};

namespace detail {
/// Runs in original order; those that continue each other, in memory and in original order, become one.
std::vector<token_run> joined(std::vector<token_run> runs);
}  // namespace detail

/// The order of the tokens along a dim that shards a sequence: the original one (`seq`), or zigzag (`zseq`). For c
/// ranks, zigzag cuts the sequence into 2c pieces and puts piece r and its mirror, piece 2c - 1 - r, next to each
/// other, in place 2r and 2r + 1. Sharded over the c ranks, rank r then has these two, and every rank sees the same
/// number of tokens under a causal mask.
///
/// Only what depends on a token's position knows the order: the loader of data, positions, attention and dropout.
class sequence_order {
 public:
  sequence_order() = default;
  static sequence_order original(std::int64_t length) { return {length, 1}; }
  /// Throws unless 2 * `ranks` divides `length`. `field` names the length in the message, `axes` the ranks.
  static sequence_order zigzag(std::int64_t length, std::int64_t ranks, const std::string& field = "the sequence",
                               const std::string& axes = "context-parallel ranks");

  std::int64_t length() const { return length_; }
  bool is_text() const { return pieces_ == 1; }

  /// The position in the text of the token at `index` of the dim.
  std::int64_t position(std::int64_t index) const {
    if (pieces_ == 1) return index;
    const std::int64_t size = length_ / pieces_, place = index / size;
    return (place % 2 == 0 ? place / 2 : pieces_ - 1 - place / 2) * size + index % size;
  }
  /// The positions of the tokens at indices `first` to `first + count - 1`: of a rank's part of the dim.
  std::vector<std::int64_t> positions(std::int64_t first, std::int64_t count) const {
    std::vector<std::int64_t> all(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) all[static_cast<std::size_t>(i)] = position(first + i);
    return all;
  }
  /// The positions as runs in original order; a run's `at` counts from `first`.
  std::vector<token_run> runs(std::int64_t first, std::int64_t count) const;

  friend bool operator==(const sequence_order&, const sequence_order&) = default;

 private:
  sequence_order(std::int64_t length, std::int64_t pieces) : length_(length), pieces_(pieces) {}
  std::int64_t length_ = 0;
  std::int64_t pieces_ = 1;
};

/// Whether some token of `queries` sees one of `keys` under a causal mask; with a window, the token at position p sees
/// those from p - window + 1 on (0: all).
inline bool sees(const token_run& queries, const token_run& keys, std::int64_t window = 0) {
  const std::int64_t last_query = queries.position + queries.length - 1, last_key = keys.position + keys.length - 1;
  return keys.position <= last_query && (window == 0 || last_key > queries.position - window);
}
inline bool sees(const std::vector<token_run>& queries, const std::vector<token_run>& keys, std::int64_t window = 0) {
  for (const token_run& q : queries)
    for (const token_run& k : keys)
      if (sees(q, k, window)) return true;
  return false;
}

/// Queries and keys for one call of a kernel; the queries are runs `first_run` to `first_run + runs - 1`.
struct visible_piece {
  token_run queries, keys;
  std::size_t first_run = 0, runs = 1;
};

/// The pieces of a causal attention in which some query sees some key. Without `exact`, runs that are stored side by
/// side become one piece although the text has others between them, where the mask allows it: keys that are seen as a
/// whole may be counted from anywhere, and so may queries that see all keys. With a window or documents, positions must
/// be those of the text: `exact`.
std::vector<visible_piece> visible_pieces(const std::vector<token_run>& queries, const std::vector<token_run>& keys,
                                          std::int64_t window, bool exact);

/// How many pairs of a query and a key see each other: the work of causal attention.
std::int64_t visible_pairs(const std::vector<token_run>& queries, const std::vector<token_run>& keys,
                           std::int64_t window = 0);

/// The causal work of each of `ranks` ranks that share out the sequence, in pairs of a query and a key.
std::vector<std::int64_t> causal_work(const sequence_order& order, std::int64_t ranks, std::int64_t window = 0);

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/nn/sequence_order.ipp"  // IWYU pragma: keep
#endif
