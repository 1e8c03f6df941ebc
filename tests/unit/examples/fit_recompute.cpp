// program: schedules
// The choice of recomputed layers by a budget, compared with brute force, and the microbatches in flight of schedules.
#include "train_llama/fit_recompute.hpp"

#include <doctest/doctest.h>

#include <functional>
#include <random>

#include "plait/core/recompute.hpp"
#include "plait/schedule/parse.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using in_flight = std::vector<std::vector<chunk_in_flight>>;

/// The largest number of bytes that a choice keeps, and its cost.
std::pair<std::int64_t, double> weigh(const std::vector<chunk_prices>& chunks, const in_flight& times,
                                      const std::vector<std::vector<int>>& modes) {
  double cost = 0;
  std::vector<recompute_price> sums(chunks.size());
  for (std::size_t c = 0; c < chunks.size(); ++c)
    for (std::size_t l = 0; l < chunks[c].size(); ++l) {
      const recompute_price& p = chunks[c][l][static_cast<std::size_t>(modes[c][l])];
      sums[c].bytes += p.bytes, sums[c].deferred += p.deferred, cost += p.cost;
    }
  std::int64_t most = 0;
  for (const auto& time : times) {
    std::int64_t held = 0;
    for (std::size_t c = 0; c < chunks.size(); ++c)
      held += time[c].forward * sums[c].bytes + time[c].deferred * sums[c].deferred;
    most = std::max(most, held);
  }
  return {most, cost};
}

/// Calls the function for every choice.
void for_all(const std::vector<chunk_prices>& chunks,
             const std::function<void(const std::vector<std::vector<int>>&)>& f) {
  std::vector<std::vector<int>> modes;
  for (const chunk_prices& c : chunks) modes.emplace_back(c.size(), 0);
  while (true) {
    f(modes);
    bool carried = true;
    for (std::size_t c = 0; carried && c < chunks.size(); ++c)
      for (std::size_t l = 0; carried && l < chunks[c].size(); ++l) {
        carried = ++modes[c][l] == static_cast<int>(chunks[c][l].size());
        if (carried) modes[c][l] = 0;
      }
    if (carried) return;
  }
}

constexpr recompute_choice constant_choice() {
  const layer_prices block{{10, 0, 0}, {6, 0, 1}, {0, 0, 5}};
  return choose_recompute({chunk_prices(4, block)}, {{{2, 0}}}, 44);
}
// With 22 bytes for a microbatch: from 40, selective blocks save 4 each at cost 1, and one full block 10 at cost 5.
static_assert(constant_choice().cost == 7 && constant_choice().bytes == 44);

}  // namespace

TEST_CASE("the choice is the cheapest that fits, and the least budget is exact if none fits") {
  std::minstd_rand random(7);
  const auto number = [&](int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); };
  int fits = 0, refused = 0;
  for (int turn = 0; turn < 600; ++turn) {
    std::vector<chunk_prices> chunks(static_cast<std::size_t>(1 + number(3)));
    for (chunk_prices& c : chunks) {
      const bool alike = number(2) == 0;
      const auto make = [&] {
        layer_prices modes;
        for (int m = 1 + number(3); m > 0; --m) modes.push_back({number(12), number(8), number(20) * 0.5});
        return modes;
      };
      const layer_prices one = make();
      for (int l = 1 + number(chunks.size() == 1 ? 6 : 2); l > 0; --l) c.push_back(alike ? one : make());
    }
    in_flight times(static_cast<std::size_t>(1 + number(3)));
    for (auto& time : times)
      for (std::size_t c = 0; c < chunks.size(); ++c) time.push_back({number(4), number(3)});
    const std::int64_t budget = number(120);
    std::int64_t least = INT64_MAX;
    double best = 1e30;
    for_all(chunks, [&](const auto& modes) {
      const auto [bytes, cost] = weigh(chunks, times, modes);
      least = std::min(least, bytes);
      if (bytes <= budget) best = std::min(best, cost);
    });
    const recompute_choice found = choose_recompute(chunks, times, budget);
    CAPTURE(turn);
    if (least > budget) {
      ++refused;
      CHECK(found.modes.empty());
      CHECK(found.least == least);
      continue;
    }
    ++fits;
    REQUIRE(found.modes.size() == chunks.size());
    const auto [bytes, cost] = weigh(chunks, times, found.modes);
    CHECK(bytes <= budget);
    CHECK(bytes == found.bytes);
    CHECK(cost == doctest::Approx(best));
    CHECK(found.cost == doctest::Approx(best));
  }
  CHECK(fits > 200);
  CHECK(refused > 50);
}

TEST_CASE("of equal layers the first ones keep less") {
  const layer_prices block{{10, 0, 0}, {0, 0, 5}};
  const recompute_choice c = choose_recompute({chunk_prices(5, block)}, {{{1, 0}}}, 30);
  CHECK(c.modes == std::vector<std::vector<int>>{{1, 1, 0, 0, 0}});
}

TEST_CASE("a hundred layers and many chunks take no time") {
  const layer_prices block{{1000, 700, 0}, {640, 600, 13}, {0, 700, 101}};
  const recompute_choice one = choose_recompute({chunk_prices(128, block)}, {{{9, 0}}}, 9 * 50'000);
  CHECK(one.bytes <= 9 * 50'000);
  CHECK(one.bytes > 9 * 49'000);
  const in_flight times{{{4, 0}, {4, 1}, {4, 0}, {3, 2}}, {{5, 0}, {3, 1}, {3, 2}, {3, 2}}};
  const recompute_choice four = choose_recompute(std::vector<chunk_prices>(4, chunk_prices(8, block)), times, 70'000);
  CHECK(four.bytes <= 70'000);
  CHECK(four.bytes > 65'000);
}

TEST_CASE("microbatches in flight are those of the schedule") {
  const auto of = [](const char* name, int ranks, int microbatches, int rank) {
    return most_in_flight(parse_schedule(name, ranks, microbatches), rank);
  };
  for (int rank = 0; rank < 4; ++rank) CHECK(of("1f1b", 4, 8, rank) == in_flight{{{4 - rank, 0}}});  // min(m, p - r)
  CHECK(of("1f1b", 4, 2, 0) == in_flight{{{2, 0}}});
  CHECK(of("gpipe", 2, 5, 1) == in_flight{{{5, 0}}});
  // ZB-H1 keeps p on every rank, including those that wait for their weight gradients.
  for (int rank = 0; rank < 4; ++rank) {
    int most = 0;
    for (const auto& time : of("zb_h1", 4, 8, rank)) most = std::max(most, time[0].forward + time[0].deferred);
    CHECK(most == 4);
  }
  const in_flight both = of("interleaved:2", 2, 4, 0);
  for (const auto& time : both) CHECK(time.size() == 2);
}

TEST_CASE("modes by layer") {
  const layer_recompute third = layer_recompute::every(3);
  for (int i = 0; i < 9; ++i) CHECK(third.of_layer(i) == (i % 3 == 2 ? recompute::full : recompute::none));
  CHECK(third.of_head() == recompute::selective);
  CHECK(layer_recompute::every(1) == layer_recompute(recompute::full));
  const layer_recompute list({recompute::none, recompute::selective}, recompute::none);
  CHECK(list.of_layer(1) == recompute::selective);
  CHECK(text_thrown_by([&] { static_cast<void>(list.of_layer(2)); }) == "recompute: layer 2 of a list for 2 layers");
  CHECK(text_thrown_by([] { static_cast<void>(layer_recompute::every(0)); }) ==
        "recompute: every 0 layers; legal is 1 or more");
  CHECK(has(text_thrown_by([] {
              static_cast<void>(choose_recompute({{{}}}, {{{1, 0}}}, 1));
            }),
            "a layer has no mode to choose"));
  CHECK(has(text_thrown_by([] {
              static_cast<void>(choose_recompute({}, {{{1, 0}}}, 1));
            }),
            "prices of 0 chunks, and microbatches in flight of 1"));
}
