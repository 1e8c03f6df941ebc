// timeout: 600
// program: policies
// Every layout loads a training state that any other layout saved, bit for bit.
#include <cmath>
#include <string>
#include <vector>

#include "support/saved_llama.hpp"
#include "support/temp_folder.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("AdamW, an odd vocabulary: layouts of every kind load what layouts of every kind save") {
  check_pairs(saved_scenario(), many_layouts());
}

TEST_CASE("Muon, a tied head: every other layout loads what every other layout saves, with whole matrices") {
  scenario s = saved_scenario();
  s.config.tie_embeddings = true;
  s.optimizer = muon_options{};
  const std::vector<saved_layout> all = many_layouts();
  std::vector<saved_layout> whole;
  for (std::size_t i = 1; i < all.size(); i += 2) {
    saved_layout l = all[i];
    if (l.parallel.parallel.level != zero_level::replicated) l.parallel.cut = bucket_cut::whole;
    whole.push_back(l);
  }
  check_pairs(s, whole);
}

TEST_CASE("AdamW with a tied head, Muon with an untied one: layouts of each kind load what others save") {
  scenario s = saved_scenario();
  s.config.tie_embeddings = true;
  std::vector<saved_layout> tied, whole;
  for (const std::size_t i :
       {0, 4, 9, 16, 17, 19}) {  // both ends of a pipeline on one stage, on two, and on one rank (placement in a V)
    saved_layout l = many_layouts().at(i);
    tied.push_back(l);
    if (l.parallel.parallel.level != zero_level::replicated) l.parallel.cut = bucket_cut::whole;
    whole.push_back(l);
  }
  check_pairs(s, tied);
  s.config.tie_embeddings = false;
  s.optimizer = muon_options{};
  check_pairs(s, whole);
}

TEST_CASE("bf16 weights with float masters, moments in 16 and in 8 bits: layouts with the same blocks") {
  std::vector<saved_layout> few;
  for (std::size_t i : {0, 2, 5, 9, 13, 18, 19}) few.push_back(many_layouts().at(i));
  scenario s = saved_scenario();
  s.optimizer = adamw_options{.moments = moment_type::bf16};
  check_pairs<bf16>(s, few);
  // Blocks are counted in a rank's part; 8-bit moments are rounded again where a block has other elements.
  s.optimizer = adamw_options{.moments = moment_type::int8};
  for (const std::int64_t tp_ranks : {1, 2}) {
    std::vector<saved_layout> alike;
    for (saved_layout l : few) {
      if (l.parallel.parallel.level != zero_level::replicated) l.parallel.cut = bucket_cut::blocks(256);
      if (l.mesh.tp == tp_ranks) alike.push_back(l);
    }
    check_pairs<bf16>(s, alike);
  }
}

TEST_CASE("a resumed run has the same bits on the same layout, and parity on another") {
  const scenario s = saved_scenario();
  const std::vector<saved_layout> all = many_layouts();
  for (std::size_t i : {1, 4, 12, 15, 18}) {
    const temp_folder folder;
    const state_digest through = run_saved<double>(s, all[i], 1, [&](auto& run) {
      run.train(0, 2);
      run.save(folder / "steps", 2);
      run.train(2, 4);
    });
    const auto resumed = [&](const saved_layout& how) {
      return run_saved<double>(s, how, 2, [&](auto& run) {
        load_state(run.ctx, run.ranks, run.model, run.optimizer, folder / "steps");
        run.train(2, 4);
      });
    };
    CAPTURE(text_of(all[i]));
    const state_digest same = resumed(all[i]);
    CHECK(differences(same, through) == "");
    REQUIRE(same.losses.size() == 2);
    CHECK(same.losses[0] == through.losses.at(2));
    CHECK(same.losses[1] == through.losses.at(3));
    const state_digest other = resumed(all[(i + 5) % all.size()]);
    for (std::size_t k = 0; k < 2; ++k)
      CHECK(std::abs(other.losses.at(k) - through.losses.at(k + 2)) <= 1e-10 * through.losses.at(k + 2));
  }
}
