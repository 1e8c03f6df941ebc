// program: context_order
// The keys that queries see: runs of tokens that are joined, and the kernel calls that cover all visible pairs.

#include "plait/tensor/sequence_order.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "support/token_runs.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// Runs of a text's tokens from `from` to `to` - 1 in original order, some of which are missing. They are split at
/// random and stored in any order, some with a gap before them. `joined`, or as split.
runs_of random_runs(std::mt19937& random, std::int64_t from, std::int64_t to, bool joined) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const int longest = 1 + below(8), left_out = below(3), out_of_order = below(3), gaps = below(2);
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces;  // position and length
  for (std::int64_t at = from + below(3); at < to;) {
    const std::int64_t here = std::min<std::int64_t>(to - at, 1 + below(longest));
    if (left_out == 0 || below(4) != 0) pieces.emplace_back(at, here);
    at += here;
  }
  if (out_of_order == 1) std::shuffle(pieces.begin(), pieces.end(), random);
  if (out_of_order == 2 && pieces.size() > 1)
    std::rotate(pieces.begin(), pieces.begin() + below(static_cast<int>(pieces.size())), pieces.end());
  runs_of all;
  std::int64_t stored = below(3);
  for (const auto& [position, here] : pieces) {
    if (gaps == 1 && below(4) == 0) ++stored;
    all.push_back({stored, position, here});
    stored += here;
  }
  if (joined) return detail::joined(std::move(all));
  return all;
}

/// `random_runs` of 20 tokens are stored at lower indices: they begin below 3, and each token may follow a gap.
constexpr std::size_t most_stored = 3 + 2 * 20;

/// The position in the text of each stored token.
using places = std::map<std::int64_t, std::int64_t>;
places places_of(const runs_of& runs) {
  places all;
  for (const token_run& r : runs)
    for (std::int64_t i = 0; i < r.length; ++i) all[r.at + i] = r.position + i;
  return all;
}

using mask_type = kernels::attention_mask;

bool visible(std::int64_t query, std::int64_t key, const mask_type& mask) {
  if (key < mask.prefix) return true;
  return (mask.after == mask.all || key <= query + mask.after) &&
         (mask.before == mask.all || query - key <= mask.before);
}

/// Checks that kernels compute each pair of stored tokens once that the mask allows: a kernel knows only where a piece
/// starts, in memory and in the text, and its length.
void check_coverage(const std::vector<visible_piece>& pieces, const runs_of& queries, const places& q_places,
                    const places& k_places, const mask_type& mask) {
  std::vector<int> covered(most_stored * most_stored), expected(covered.size());
  const auto pair_of = [](std::int64_t q_at, std::int64_t k_at) {
    return static_cast<std::size_t>(q_at) * most_stored + static_cast<std::size_t>(k_at);
  };
  for (const visible_piece& p : pieces) {
    REQUIRE(p.first_run + p.runs <= queries.size());
    CHECK(p.queries.at == queries[p.first_run].at);
    CHECK(p.queries.position == queries[p.first_run].position);
    std::int64_t length = 0, some = 0;
    for (std::size_t r = 0; r < p.runs; ++r) length += queries[p.first_run + r].length;
    CHECK(p.queries.length == length);
    for (std::int64_t i = 0; i < p.queries.length; ++i)
      for (std::int64_t j = 0; j < p.keys.length; ++j) {
        if (!visible(p.queries.position + i, p.keys.position + j, mask)) continue;
        ++covered.at(pair_of(p.queries.at + i, p.keys.at + j));
        ++some;
      }
    CHECK(some > 0);  // every kernel call computes something
  }
  for (const auto& [q_at, q] : q_places)
    for (const auto& [k_at, k] : k_places) expected.at(pair_of(q_at, k_at)) = visible(q, k, mask);
  CHECK(covered == expected);
}

/// Masks for sequences of up to 24 positions.
const std::vector<mask_type> masks{mask_type::causal(),     mask_type::window(1),   mask_type::window(3),
                                   mask_type::window(6),    mask_type::window(20),  mask_type::window(100),
                                   mask_type::full(),       mask_type::local(4, 2), mask_type::local(0, 5),
                                   {mask_type::all, 3},     {2, mask_type::all},    mask_type::prefix_lm(5),
                                   mask_type::prefix_lm(14)};

}  // namespace

TEST_CASE("visible pairs, and whether there are any, equal a count") {
  for (const mask_type& mask : masks)
    for (std::int64_t q = 0; q < 12; ++q)
      for (std::int64_t k = 0; k < 12; ++k) {
        const token_run queries{0, q, 4}, keys{0, k, 3};
        std::int64_t pairs = 0;
        for (std::int64_t i = q; i < q + 4; ++i)
          for (std::int64_t j = k; j < k + 3; ++j) pairs += visible(i, j, mask);
        CHECK(visible_pairs({queries}, {keys}, mask) == pairs);
        CHECK(sees(queries, keys, mask) == (pairs > 0));
      }
}

TEST_CASE("pieces cover all visible pairs once, and are few") {
  for (const std::int64_t ranks : {1, 2, 4})
    for (const mask_type& mask : masks)
      for (const bool zig : {false, true}) {
        const auto blocks = blocks_of(zig ? sequence_order::zigzag(32, ranks) : sequence_order::original(32), ranks);
        for (const runs_of& queries : blocks)
          for (const runs_of& keys : blocks) {
            const auto pieces = visible_pieces(queries, keys, mask, false);
            check_coverage(pieces, queries, places_of(queries), places_of(keys), mask);
            if (!mask.needs_positions()) CHECK(pieces.size() <= (queries == keys ? queries.size() : 1));
          }
      }
}

TEST_CASE("runs are joined only if they are adjacent in the text and in memory") {
  CHECK(detail::joined({{0, 0, 4}, {4, 4, 4}}) == runs_of{{0, 0, 8}});
  CHECK(detail::joined({{0, 0, 4}, {5, 4, 4}}) == runs_of{{0, 0, 4}, {5, 4, 4}});  // a gap in memory
  CHECK(detail::joined({{0, 0, 4}, {4, 5, 4}}) == runs_of{{0, 0, 4}, {4, 5, 4}});  // a gap in the text
  CHECK(detail::joined({{4, 4, 4}, {0, 0, 4}}) == runs_of{{0, 0, 8}});             // in any order
  CHECK(detail::joined({{0, 4, 4}, {4, 0, 4}}) == runs_of{{4, 0, 4}, {0, 4, 4}});  // stored in reverse order
  CHECK(detail::joined({{0, 0, 2}, {9, 2, 0}, {2, 2, 2}}) == runs_of{{0, 0, 4}});  // an empty run between them
  CHECK(detail::joined({{3, 3, 0}}).empty());
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    const runs_of cut = random_runs(random, 0, 30, false), whole = detail::joined(cut);
    CHECK(places_of(whole) == places_of(cut));
    for (std::size_t i = 0; i < whole.size(); ++i) {
      CHECK(whole[i].length > 0);
      if (i == 0) continue;
      const token_run &a = whole[i - 1], &b = whole[i];
      CHECK(a.position + a.length <= b.position);
      CHECK(!(a.position + a.length == b.position && a.at + a.length == b.at));
    }
  }
}

TEST_CASE("visibility between random runs, and the number of visible pairs, equal a count") {
  std::mt19937 random(6);
  for (int round = 0; round < 300; ++round) {
    const runs_of queries = random_runs(random, 0, 24, true), keys = random_runs(random, 0, 24, true);
    const places q_places = places_of(queries), k_places = places_of(keys);
    for (const mask_type& mask : masks) {
      std::int64_t pairs = 0;
      for (const auto& [q_at, q] : q_places)
        for (const auto& [k_at, k] : k_places) pairs += visible(q, k, mask) ? 1 : 0;
      CHECK(visible_pairs(queries, keys, mask) == pairs);
      CHECK(sees(queries, keys, mask) == (pairs > 0));
    }
  }
}

TEST_CASE("pieces of random runs cover all pairs that the mask allows once, and are as few as possible") {
  std::mt19937 random(7);
  int fewer = 0, queries_together = 0;
  for (int round = 0; round < 3000; ++round) {
    const runs_of keys = random_runs(random, 0, 20, true);
    const std::int64_t from = round % 3 == 0 ? 20 : 0;  // many after all keys, so they see all of them
    const runs_of queries = round % 4 == 0 ? keys : random_runs(random, from, from + 20, true);
    // Ranks split a text at the same places for queries and keys: no run of keys starts inside one of queries.
    const bool same_cuts = std::none_of(queries.begin(), queries.end(), [&](const token_run& q) {
      return std::any_of(keys.begin(), keys.end(), [&](const token_run& k) {
        return k.position > q.position && k.position < q.position + q.length;
      });
    });
    const places q_places = places_of(queries), k_places = places_of(keys);
    for (std::size_t m = 0; m < 2 * masks.size(); ++m) {
      const mask_type& mask = masks[m / 2];
      const bool documents = m % 2 == 1, exact = documents || mask.needs_positions();
      if (!exact && !same_cuts) continue;
      const std::vector<visible_piece> pieces = visible_pieces(queries, keys, mask, documents);
      CAPTURE(exact);
      CAPTURE(describe(mask));
      check_coverage(pieces, queries, q_places, k_places, mask);
      std::size_t seeing = 0;
      for (const token_run& q : queries)
        for (const token_run& k : keys) seeing += sees(q, k, mask) ? 1 : 0;
      if (exact) {
        CHECK(pieces.size() == seeing);
        for (const visible_piece& p : pieces) {
          CHECK(p.runs == 1);
          CHECK(p.queries == queries[p.first_run]);
          CHECK(std::find(keys.begin(), keys.end(), p.keys) != keys.end());
        }
        continue;
      }
      fewer += pieces.size() < seeing ? 1 : 0;
      queries_together += std::any_of(pieces.begin(), pieces.end(), [](const auto& p) { return p.runs > 1; }) ? 1 : 0;
      const auto all_seen = [&](const visible_piece& p) {
        return mask.sees_all() || p.keys.position + p.keys.length - 1 <= p.queries.position;
      };
      const auto of_run = [&](std::size_t run) {
        return std::count_if(pieces.begin(), pieces.end(),
                             [&](const visible_piece& p) { return p.first_run <= run && run < p.first_run + p.runs; });
      };
      for (std::size_t i = 1; i < pieces.size(); ++i) {
        const visible_piece &a = pieces[i - 1], &b = pieces[i];
        if (a.first_run == b.first_run) {
          const bool one_key_run = all_seen(a) && a.keys.at + a.keys.length == b.keys.at;
          CHECK(!one_key_run);
        } else if (a.first_run + a.runs == b.first_run && of_run(a.first_run) == 1 && of_run(b.first_run) == 1) {
          const bool one_query_run = a.keys == b.keys && all_seen(a) && a.queries.at + a.queries.length == b.queries.at;
          CHECK(!one_query_run);
        }
      }
    }
  }
  MESSAGE(fewer << " of 3000 in fewer pieces than runs see runs, " << queries_together << " with queries together");
  CHECK(fewer > 300);
  CHECK(queries_together > 25);
}
