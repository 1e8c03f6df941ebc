// program: saver
#include <doctest/doctest.h>

#include <atomic>
#include <string>
#include <vector>

#include "plait/checkpoint/load_state.hpp"
#include "support/saved_tensors.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// Fails each read of a load in turn. `in_place`: the tensors have no values then, and ranks have begun to send them.
void fail_each_read(const bool in_place) {
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
    on_ranks({in_place ? 2 : 1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
      own_tensors other(ctx, 7);
      const auto load = [&] {
        const read_sizes blocks{2, 64};
        load_tensors(ctx, ranks, "steps", {.tensors = other.held(in_place), .in_place = in_place, .read_ahead = blocks},
                     files);
      };
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
        if (!in_place) CHECK(other == own_tensors(ctx, 7));
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
    CHECK(told == (in_place ? 4 : 2));
    ++failures;
  }
  CHECK(failures > 20);
  CHECK(files.image() == before);
}

}  // namespace

TEST_CASE("whatever read of a load fails, every rank is told the same, nothing is changed, and the next load works") {
  fail_each_read(false);
}

TEST_CASE("the same in place, where ranks that have read theirs do not wait for one that has failed") {
  fail_each_read(true);
}

TEST_CASE("sizes of reads that make no sense are refused on all ranks") {
  memory_file_system files;
  on_ranks({1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors mine(ctx, 1);
    checkpoint_saver saver(ctx.device, ranks, {.directory = "steps"}, files);
    saver.save(ctx, 1, {.tensors = mine.held()});
    saver.wait(ctx.device);
    CHECK_ERROR(load_tensors(ctx, ranks, "steps", {.tensors = mine.held(), .read_ahead = {0, 4096}}, files),
                "read_ahead.threads is 0; legal are 1 to 64");
    CHECK_ERROR(load_tensors(ctx, ranks, "steps", {.tensors = mine.held(), .read_ahead = {2, 1}}, files),
                "read_ahead.bytes is 1; legal are 64 to 1073741824");
  });
}
