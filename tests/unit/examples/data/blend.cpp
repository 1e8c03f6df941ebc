// program: files
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "support/temp_folder.hpp"
#include "train_llama/data/sampler.hpp"

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
    CHECK(worst < 6);  // drawn at random it would be some hundreds
  }
}

TEST_CASE("a blend goes on behind 2^32 samples") {
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

TEST_CASE("a blend gives the answers that it always gave") {
  // A run that is continued must go on with the sources it began with. Worked out in Python from the definition.
  const plait::blend sources({0.5, 0.3, 0.2});
  std::vector<std::size_t> first;
  for (std::int64_t i = 0; i < 12; ++i) first.push_back(sources.at(i).source);
  CHECK(first == std::vector<std::size_t>{0, 1, 0, 2, 0, 0, 1, 0, 2, 1, 0, 1});
}

TEST_CASE("weights that are none") {
  CHECK_ERROR(plait::blend({}), "--data-weights: no weight");
  CHECK_ERROR(plait::blend({1, 0}), "--data-weights: 0 is no weight");
  CHECK_ERROR(plait::blend({1, -2}), "-2 is no weight");
  CHECK_ERROR(plait::blend({std::numeric_limits<double>::quiet_NaN()}), "is no weight");
  CHECK_ERROR(plait::blend({std::numeric_limits<double>::infinity()}), "--data-weights: ", "is no weight");
  CHECK_ERROR(plait::blend({1e308, 1e308}), "more than a double");
  CHECK_ERROR(plait::blend({1, 1e-12, 1}), "1e-12", "less than one sample in 2^32");
}
