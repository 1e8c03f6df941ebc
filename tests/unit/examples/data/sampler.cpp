// program: files
#include "train_llama/data/sampler.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "support/temp_folder.hpp"

namespace {

using plait::permutation;
using plait::sampler;
using plait::sampler_config;
using tokens = std::vector<std::int64_t>;

std::string counting(std::size_t n) {
  std::string text(n, '\0');
  for (std::size_t i = 0; i < n; ++i) text[i] = static_cast<char>(i % 251);
  return text;
}

plait::token_source source_of(const temp_folder& dir, std::string_view text) {
  return plait::token_source({.paths = {dir.write("data.txt", text)}, .format = plait::token_format::bytes});
}

}  // namespace

TEST_CASE("a permutation hits every place once, for any size") {
  for (std::int64_t size : {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 64, 65, 100, 255, 256, 257, 1000, 4097}) {
    for (std::uint64_t seed : {0u, 1u, 99u}) {
      const permutation order(size, seed, 3);
      std::vector<int> seen(static_cast<std::size_t>(size));
      for (std::int64_t i = 0; i < size; ++i) {
        const std::int64_t image = order(i);
        REQUIRE(image >= 0);
        REQUIRE(image < size);
        ++seen[static_cast<std::size_t>(image)];
      }
      CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
    }
  }
  const permutation large(INT64_MAX, 5, 0);
  CHECK(large(0) != large(1));
  CHECK(large(INT64_MAX - 1) >= 0);
  static_assert(permutation(1, 0, 0)(0) == 0);
}

TEST_CASE("permutations of a given seed never change") {
  // A resumed run must use the same order. These values were computed by a separate program from the definition: eight
  // rounds, a key of both numbers, halves of the smallest even number of bits.
  const auto images = [](std::int64_t size, std::uint64_t seed, std::uint64_t stream) {
    const permutation order(size, seed, stream);
    return tokens{order(0), order(1), order(size / 2), order(size - 1)};
  };
  CHECK(images(10, 1, 0) == tokens{4, 1, 6, 5});
  CHECK(images(1000, 42, 7) == tokens{437, 960, 627, 576});
  CHECK(images(1'000'000'000'000, 3, std::uint64_t{1} << 40) ==
        tokens{810488183752, 379455977412, 277584626714, 554792162418});
  CHECK(images(INT64_MAX, 0xfedcba9876543210, 2) ==
        tokens{8082842707666679117, 448349555853501942, 2752734440975369943, 1626189837793339664});
}

TEST_CASE("seeds and epochs give unrelated orders, and all places are about equally likely") {
  std::map<std::vector<std::int64_t>, int> orders;
  constexpr int trials = 24000;
  for (int seed = 0; seed < trials; ++seed) {
    const permutation order(4, static_cast<std::uint64_t>(seed / 100), static_cast<std::uint64_t>(seed % 100));
    ++orders[{order(0), order(1), order(2), order(3)}];
  }
  double worst = 0;
  for (std::size_t from = 0; from < 4; ++from) {
    for (std::int64_t to = 0; to < 4; ++to) {
      int hits = 0;
      for (const auto& [order, n] : orders) hits += order[from] == to ? n : 0;
      worst = std::max(worst, std::abs(hits - trials / 4.0));
    }
  }
  CHECK(worst < 5 * 67);  // binomial deviation sqrt(24000 x 1/4 x 3/4) = 67

  const permutation a(10007, 1, 0), b(10007, 1, 1), c(10007, 2, 0);
  int fixed = 0, same = 0, rising = 0;
  for (std::int64_t i = 0; i < 10007; ++i) {
    fixed += a(i) == i;
    same += (a(i) == b(i)) + (a(i) == c(i));
    rising += i > 0 && a(i) > a(i - 1);
  }
  CHECK(fixed < 10);
  CHECK(same < 12);
  CHECK(std::abs(rising - 5003) < 5 * 29);  // deviation of the number of ascents: sqrt(n / 12)
}

TEST_CASE("an epoch visits every window once; the next one in another order") {
  temp_folder dir;
  const sampler samples(source_of(dir, counting(10 * 24 + 1 + 7)), {.seq = 10, .seed = 4});
  REQUIRE(samples.epoch_samples() == 24);
  CHECK(samples.held_out_samples() == 0);
  std::vector<std::int64_t> first, second;
  for (std::int64_t i = 0; i < 24; ++i) {
    first.push_back(samples.training(i).window);
    second.push_back(samples.training(24 + i).window);
  }
  CHECK(first != second);
  std::vector<std::int64_t> sorted = first, windows(24);
  std::sort(sorted.begin(), sorted.end());
  std::iota(windows.begin(), windows.end(), 0);
  CHECK(sorted == windows);
  CHECK(first != windows);
  std::sort(second.begin(), second.end());
  CHECK(second == windows);
  CHECK(samples.training(std::int64_t{24} * 1'000'000'000'000).window >= 0);

  const sampler plain(samples.source(), {.seq = 10, .seed = 4, .shuffle = false});
  CHECK(plain.training(3).window == 3);
  CHECK(plain.training(24).window == 0);
  CHECK_ERROR(plain.training(-1), "cursor", "-1");
}

TEST_CASE("inputs and targets are a window and the window one token later; slices join up") {
  temp_folder dir;
  const std::string text = counting(200);
  const sampler samples(source_of(dir, text), {.seq = 9, .seed = 7});
  for (std::int64_t cursor = 0; cursor < 2 * samples.epoch_samples(); ++cursor) {
    tokens inputs(9), targets(9);
    samples.fill(samples.training(cursor), 0, samples.seq(), inputs.data(), targets.data());
    const std::int64_t start = 9 * samples.training(cursor).window;
    for (std::int64_t p = 0; p < 9; ++p) {
      const auto at = static_cast<std::size_t>(p), place = static_cast<std::size_t>(start + p);
      CHECK(inputs[at] == static_cast<unsigned char>(text[place]));
      CHECK(targets[at] == static_cast<unsigned char>(text[place + 1]));
    }
    tokens sliced_inputs(9), sliced_targets(9);
    for (std::int64_t first : {0, 3, 6}) {
      samples.fill(samples.training(cursor), first, 3, sliced_inputs.data() + first, sliced_targets.data() + first);
    }
    CHECK(sliced_inputs == inputs);
    CHECK(sliced_targets == targets);
  }
  tokens out(10);
  samples.fill(samples.training(0), 9, 0, out.data(), out.data());
  CHECK_ERROR(samples.fill(samples.training(0), 8, 2, out.data(), out.data()), "--seq", "[8, 8 + 2)");
}

TEST_CASE("held-out windows are the last ones and never trained on") {
  temp_folder dir;
  const sampler samples(source_of(dir, counting(101)), {.seq = 5, .seed = 1, .held_out = 0.1});
  CHECK(samples.epoch_samples() == 18);
  REQUIRE(samples.held_out_samples() == 2);
  for (std::int64_t i = 0; i < 18; ++i) CHECK(samples.training(i).window < 18);
  tokens inputs(5), targets(5);
  samples.fill(samples.evaluation(1), 0, 5, inputs.data(), targets.data());
  CHECK(inputs == tokens{95, 96, 97, 98, 99});
  CHECK(targets == tokens{96, 97, 98, 99, 100});
  CHECK_ERROR(samples.fill(samples.evaluation(2), 0, 5, inputs.data(), targets.data()), "--held-out", "sample 2",
              "keeps 2");
  CHECK(sampler(samples.source(), {.seq = 5, .held_out = 1e-9}).held_out_samples() == 1);
}

TEST_CASE("too little data and bad settings are refused by name") {
  temp_folder dir;
  const auto source = source_of(dir, counting(64));
  CHECK(sampler(source, {.seq = 63}).epoch_samples() == 1);
  CHECK_ERROR(sampler(source, {.seq = 64}), "--data", "--seq 64", "data.txt", "64 tokens", "takes 65");
  CHECK_ERROR(sampler(source, {.seq = 0}), "--seq", "0 positions");
  CHECK_ERROR(sampler(source, {.seq = 8, .held_out = 1.0}), "--held-out: 1 is no fraction");
  CHECK_ERROR(sampler(source, {.seq = 8, .held_out = -0.5}), "--held-out");
  CHECK_ERROR(sampler(source, {.seq = 63, .held_out = 0.1}), "--held-out", "none to train on");
  CHECK_ERROR(sampler(source, {.seq = 8, .held_out = 0.99}), "--held-out", "of 7 windows");
}

TEST_CASE("samples of several sources") {
  temp_folder dir;
  std::vector<plait::token_source> sources;
  for (const char c : {'a', 'b', 'c'})
    sources.push_back(
        plait::token_source({.paths = {dir.write(std::string(1, c), std::string(c == 'a' ? 41 : 81, c))}}));
  const sampler_config how{.seq = 8, .seed = 3, .held_out = 0.2};
  const sampler samples(sources, {2, 1, 1}, how);
  CHECK(samples.sources() == 3);
  CHECK(samples.epoch_samples(0) == 4);  // of 5 windows
  CHECK(samples.epoch_samples(2) == 8);
  CHECK(samples.held_out_samples() == 1 + 2 + 2);
  std::map<std::int64_t, int> counts;
  std::map<std::size_t, std::vector<std::int64_t>> windows;
  tokens in(8), out(8);
  for (std::int64_t i = 0; i < 64; ++i) {
    samples.fill(samples.training(i), 0, samples.seq(), in.data(), out.data());
    CHECK(in == tokens(8, in[0]));
    CHECK(static_cast<std::size_t>(in[0] - 'a') == samples.training(i).source);
    ++counts[in[0]];
    windows[samples.training(i).source].push_back(samples.training(i).window);
  }
  CHECK(std::abs(counts['a'] - 32) <= 3);
  CHECK(std::abs(counts['b'] - 16) <= 3);
  for (auto& [source, all] : windows) {  // every epoch of a source has each of its windows once
    const auto epoch = static_cast<std::size_t>(samples.epoch_samples(source));
    for (std::size_t begin = 0; begin + epoch <= all.size(); begin += epoch) {
      std::sort(all.begin() + static_cast<std::ptrdiff_t>(begin),
                all.begin() + static_cast<std::ptrdiff_t>(begin + epoch));
      for (std::size_t i = 0; i < epoch; ++i) CHECK(all[begin + i] == static_cast<std::int64_t>(i));
    }
  }
  for (std::int64_t i = 0; i < 5; ++i) {
    samples.fill(samples.evaluation(i), 0, 8, in.data(), out.data());
    CHECK(static_cast<std::size_t>(in[0] - 'a') == samples.training(i).source);  // by weight, as samples of training
  }
  CHECK_ERROR(samples.fill(samples.evaluation(5), 0, 8, in.data(), out.data()), "evaluation sample 5", "keeps 5");
  CHECK_ERROR(samples.fill(samples.evaluation(-1), 0, 8, in.data(), out.data()), "evaluation sample -1");
  CHECK_ERROR(sampler(sources, {1, 1}, how), "--data-weights: 2 weights for 3 sources");

  // Evaluation draws from a source in proportion to its weight, not its size. A large source keeps 40 windows, a small
  // one 3. The small one has three times the weight, so its windows repeat and give three quarters of the samples.
  {
    std::string text;
    for (int i = 0; i < 641; ++i) text += static_cast<char>(i / 8);
    const sampler both({plait::token_source({.paths = {dir.write("long", text)}, .format = plait::token_format::bytes}),
                        plait::token_source({.paths = {dir.write("short", std::string(41, 'z'))}})},
                       {1, 3}, {.seq = 8, .seed = 3, .held_out = 0.5});
    REQUIRE(both.held_out_samples() == 40 + 3);
    std::vector<std::int64_t> of_long;
    for (std::int64_t i = 0; i < 43; ++i) {
      both.fill(both.evaluation(i), 0, 8, in.data(), out.data());
      if (in[0] != 'z') of_long.push_back(in[0]);
    }
    REQUIRE(std::abs(static_cast<double>(of_long.size()) - 43 / 4.0) < 2);
    for (std::size_t i = 0; i < of_long.size(); ++i) CHECK(of_long[i] == 40 + static_cast<std::int64_t>(i));
  }

  // Sources of equal size are read in different orders.
  const sampler twins({sources[1], sources[2]}, {1, 1}, {.seq = 2, .seed = 3});
  std::map<std::size_t, std::vector<std::int64_t>> orders;
  for (std::int64_t i = 0; i < 60; ++i) orders[twins.training(i).source].push_back(twins.training(i).window);
  orders[0].resize(20);
  orders[1].resize(20);
  CHECK(orders[0] != orders[1]);
}

TEST_CASE("documents kept apart") {
  temp_folder dir;
  const plait::token_source source({.paths = {dir.write("t", "ab.cde..fghij.k")}, .end_of_document = '.'});
  const sampler samples(source, {.seq = 7, .shuffle = false, .documents = true, .no_target = -1});
  tokens in(7), out(7);
  samples.fill(samples.training(0), 0, samples.seq(), in.data(), out.data());
  CHECK(in == tokens{'a', 'b', '.', 'c', 'd', 'e', '.'});
  CHECK(out == tokens{'b', '.', -1, 'd', 'e', '.', -1});
  samples.fill(samples.training(1), 0, samples.seq(), in.data(), out.data());
  CHECK(in == tokens{'.', 'f', 'g', 'h', 'i', 'j', '.'});
  CHECK(out == tokens{-1, 'g', 'h', 'i', 'j', '.', -1});
  using starts = std::vector<std::int32_t>;
  starts found(7);
  samples.starts(samples.training(0), 0, 7, found.data());
  CHECK(found == starts{0, 0, 0, 3, 3, 3, 3});
  samples.starts(samples.training(1), 0, 7, found.data());
  CHECK(found == starts{0, 1, 1, 1, 1, 1, 1});
  // Ranks with pieces of a sequence read the same tokens as one rank.
  for (std::int64_t cursor : {0, 1})
    for (std::int64_t cut = 0; cut <= 7; ++cut) {
      tokens whole_in(7), whole_out(7), part_in(7), part_out(7);
      starts whole(7), part(7);
      samples.fill(samples.training(cursor), 0, samples.seq(), whole_in.data(), whole_out.data());
      samples.starts(samples.training(cursor), 0, 7, whole.data());
      for (const auto& [first, count] : {std::pair{std::int64_t{0}, cut}, {cut, 7 - cut}}) {
        samples.fill(samples.training(cursor), first, count, part_in.data() + first, part_out.data() + first);
        samples.starts(samples.training(cursor), first, count, part.data() + first);
      }
      CHECK(part_in == whole_in);
      CHECK(part_out == whole_out);
      CHECK(part == whole);
    }
  CHECK_ERROR(samples.starts(samples.training(0), 3, 5, found.data()), "positions [3, 3 + 5)");
  CHECK_ERROR(sampler(source_of(dir, "abcdefgh"), {.seq = 2, .documents = true}), "--documents: '", "is read as bytes",
              "--end-of-document");
  const sampler all(source, {.seq = 3, .held_out = 0.25, .documents = true});
  all.starts(all.evaluation(0), 0, 3, found.data());
  CHECK(found[0] == 0);
}

TEST_CASE("a blend gives each source its samples in order, and its share of every prefix") {
  for (const std::vector<double>& weights :
       {std::vector<double>{1}, {1, 1}, {0.7, 0.2, 0.1}, {1e-6, 1, 3}, {5, 1, 1, 1, 1, 1, 1}, {1e300, 1e299}}) {
    const plait::blend sources(weights);
    CHECK(sources.sources() == weights.size());
    double sum = 0, worst = 0;
    for (const double w : weights) sum += w;
    std::vector<std::int64_t> seen(weights.size());
    for (std::int64_t i = 0; i < 200000; ++i) {
      const auto [source, index] = sources.at(i);
      REQUIRE(index == seen[source]++);
      for (std::size_t k = 0; k < weights.size(); ++k)
        worst =
            std::max(worst, std::abs(static_cast<double>(seen[k]) - static_cast<double>(i + 1) * (weights[k] / sum)));
    }
    CHECK(worst < 6);  // random draws would give several hundred
  }
}

TEST_CASE("a blend continues beyond 2^32 samples") {
  const plait::blend sources({3, 2, 1});
  std::vector<std::int64_t> last(3, -1);
  for (const std::int64_t begin : {(std::int64_t{1} << 32) - 50, (std::int64_t{7} << 32) - 50}) {
    std::fill(last.begin(), last.end(), -1);
    for (std::int64_t i = begin; i < begin + 100; ++i) {
      const auto [source, index] = sources.at(i);
      if (last[source] >= 0) CHECK(index == last[source] + 1);
      CHECK(std::abs(static_cast<double>(index) / static_cast<double>(i) - (3.0 - static_cast<double>(source)) / 6) <
            1e-8);
      last[source] = index;
    }
  }
}

TEST_CASE("blends of given weights never change") {
  // A resumed run must use the same order of sources. Computed in Python from the definition.
  const plait::blend sources({0.5, 0.3, 0.2});
  std::vector<std::size_t> first;
  for (std::int64_t i = 0; i < 12; ++i) first.push_back(sources.at(i).source);
  CHECK(first == std::vector<std::size_t>{0, 1, 0, 2, 0, 0, 1, 0, 2, 1, 0, 1});
}

TEST_CASE("invalid weights") {
  CHECK_ERROR(plait::blend({}), "--data-weights: no weight");
  CHECK_ERROR(plait::blend({1, 0}), "--data-weights: 0 is no weight");
  CHECK_ERROR(plait::blend({1, -2}), "-2 is no weight");
  CHECK_ERROR(plait::blend({std::numeric_limits<double>::quiet_NaN()}), "is no weight");
  CHECK_ERROR(plait::blend({std::numeric_limits<double>::infinity()}), "--data-weights: ", "is no weight");
  CHECK_ERROR(plait::blend({1e308, 1e308}), "more than a double");
  CHECK_ERROR(plait::blend({1, 1e-12, 1}), "1e-12", "less than one sample in 2^32");
}
