// timeout: 300
// A few layouts of each kind from checkpoint.cpp, few enough for the sanitizers.
#include <vector>

#include "support/saved_llama.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("a few layouts load each other's saves, with full moments and with moments of 8 bits") {
  scenario s = saved_scenario();
  s.config.layers = 2;
  std::vector<saved_layout> few;
  for (std::size_t i : {5, 8, 13}) few.push_back(many_layouts().at(i));
  check_pairs<double>(s, few);
  s.optimizer = adamw_options{.moments = moment_type::int8};
  s.config.ffn = 32;  // blocks then have the same elements on all layouts
  few.pop_back();
  few.front().parallel.cut = bucket_cut::blocks(256);
  few.back().mesh = {1, 1, 2, 1};
  check_pairs<double>(s, few);
}
