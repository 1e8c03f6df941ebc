// program: saver
#include <doctest/doctest.h>

#include <atomic>
#include <string>
#include <vector>

#include "plait/checkpoint/load_state.hpp"
#include "support/saved_tensors.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("whatever read of a load fails, every rank is told the same, nothing is changed, and the next load works") {
  memory_file_system files;
  on_ranks({2, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors mine(ctx, 1);
    checkpoint_saver saver(ctx.device, ranks, {.directory = "steps"}, files);
    saver.save(ctx, 1, {.blobs = {{"tokenizer", "a b"}}, .tensors = mine.held()});
    CHECK(saver.wait(ctx.device).at(0).failure == "");
  });
  const std::string before = files.image();
  int failures = 0;
  for (std::size_t n = 0;; ++n) {
    CAPTURE(n);
    std::atomic<int> told = 0;
    bool reached = false;
    on_ranks({1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
      own_tensors other(ctx, 7);
      const auto load = [&] { load_tensors(ctx, ranks, "steps", {.tensors = other.held()}, files); };
      const auto meet = [&] { all_reduce_scalar(ctx.device, ranks, 0.0, reduce_op::sum); };
      const std::size_t begin = files.operations();
      meet();
      if (ranks.rank() == 0) files.fail_at(begin + n, fault::io_error);
      meet();
      std::string why;
      try {
        load();
      } catch (const error_of_all& e) {
        why = e.what();
      }
      CHECK(broadcast_text(ctx.device, ranks, why) == why);
      if (!why.empty()) {
        ++told;
        CHECK(contains(why, "Input/output error"));
        CHECK(contains(why, "steps"));  // which file
        CHECK(other == own_tensors(ctx, 7));
      }
      meet();
      if (ranks.rank() == 0) {
        reached = files.operations() > begin + n;
        files.fail_at(0, fault::io_error);  // it is past
      }
      meet();
      load();
      CHECK(other == own_tensors(ctx, 1));
    });
    if (!reached) break;
    CHECK(told == 2);
    ++failures;
  }
  CHECK(failures > 20);
  CHECK(files.image() == before);
}
