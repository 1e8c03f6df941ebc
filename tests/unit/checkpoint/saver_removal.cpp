// program: saver
#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "plait/checkpoint/saver.hpp"
#include "support/saved_tensors.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("a removal compares every byte of a step that stays, and removes nothing where none is whole") {
  memory_file_system disk;
  damaging_files files(disk);
  on_ranks({1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors mine(ctx, 1);
    checkpoint_saver saver(ctx.device, ranks, {.directory = "steps", .keep = {.last = 1}}, files);
    saver.save(ctx, 1, {.tensors = mine.held()});
    CHECK(saver.wait(ctx.device).at(0).warning == "");
    if (ranks.rank() == 0) files.damage(2, true);
    all_reduce_scalar(ctx.device, ranks, 0.0, reduce_op::sum);
    saver.save(ctx, 2, {.tensors = mine.held()});
    const finished_save second = saver.wait(ctx.device).at(0);
    CHECK(second.failure == "");
    if (ranks.rank() == 0) CHECK(contains(second.warning, "has another checksum than when it was written"));
    if (ranks.rank() == 0) CHECK(contains(second.damage, "has another checksum than when it was written"));
    CHECK(steps_in(files, "steps") == std::vector<std::uint64_t>{2, 1});
    all_reduce_scalar(ctx.device, ranks, 0.0, reduce_op::sum);
    saver.save(ctx, 3, {.tensors = mine.held()});
    const finished_save third = saver.wait(ctx.device).at(0);
    CHECK(third.warning == "");
    CHECK(third.damage == "");
    CHECK(steps_in(files, "steps") == std::vector<std::uint64_t>{3});
  });
}

TEST_CASE("before a removal no rank reads a step alone that all ranks have read their parts of") {
  memory_file_system disk;
  damaging_files damaged(disk);
  counting_files files(damaged);
  on_ranks({1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors mine(ctx, 1);
    checkpoint_saver saver(ctx.device, ranks, {.directory = "steps", .keep = {.last = 2}}, files);
    const auto own = static_cast<std::uint32_t>(ranks.rank());
    for (std::uint64_t step = 1; step <= 8; ++step) {
      if (step == 5 && ranks.rank() == 0) damaged.damage(5);
      all_reduce_scalar(ctx.device, ranks, 0.0, reduce_op::sum);
      saver.save(ctx, step, {.tensors = mine.held()});
      const finished_save done = saver.wait(ctx.device).at(0);
      CHECK(done.failure == "");
      CHECK(done.warning == "");
      const int times = step == 6 ? 2 : 1;
      for (int i = 0; i < 24000 && files.closed(step, own) < times; ++i)  // two minutes, where the machine stands still
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      all_reduce_scalar(ctx.device, ranks, 0.0, reduce_op::sum);
    }
  });
  CHECK(steps_in(disk, "steps") == std::vector<std::uint64_t>{8, 7});
  for (const std::uint64_t step : {1, 2, 3, 4, 5, 7, 8})
    for (const std::uint32_t writer : {0, 1}) CHECK(files.opened(step, writer) == 1);
  // Step 5 is not what was written, as one rank found, so that rank 0 read the step after it.
  for (const std::uint32_t writer : {0, 1}) CHECK(files.opened(6, writer) == 2);
}

TEST_CASE("where only the newest step stays, each rank has read its own file before, and none reads the step alone") {
  memory_file_system disk;
  counting_files files(disk);
  on_ranks({1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors mine(ctx, 1);
    for (const std::uint64_t first : {1, 3}) {  // the second job finds a step of the first
      checkpoint_saver saver(ctx.device, ranks, {.directory = "steps", .keep = {.last = 1}}, files);
      for (std::uint64_t step = first; step < first + 2; ++step) {
        saver.save(ctx, step, {.blobs = {{"tokenizer", "a b"}}, .tensors = mine.held()});
        const finished_save done = saver.wait(ctx.device).at(0);
        CHECK(done.failure == "");
        CHECK(done.warning == "");
      }
    }
  });
  CHECK(steps_in(disk, "steps") == std::vector<std::uint64_t>{4});
  for (const std::uint64_t step : {1, 2, 3, 4})
    for (const std::uint32_t writer : {0, 1}) CHECK(files.opened(step, writer) == 0);
}

TEST_CASE("a step is read again only where none that was stays for the next save") {
  using turns = std::vector<std::uint64_t>;
  const auto turns_of = [](std::uint64_t last) {
    detail::check_turns next;
    turns all;
    for (std::uint64_t step = 1; step <= 7; ++step)
      if (next.is_next(last)) all.push_back(step);
    return all;
  };
  CHECK(turns_of(1) == turns{});
  CHECK(turns_of(2) == turns{1, 2, 3, 4, 5, 6, 7});
  CHECK(turns_of(3) == turns{1, 3, 5, 7});
  CHECK(turns_of(4) == turns{1, 4, 7});
}

TEST_CASE("what a save leaves that fails goes, whatever another rank puts there meanwhile") {
  memory_file_system disk;
  crossing_files crossing(disk);
  failing_files files(crossing, 0);
  on_ranks({1, 1}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors mine(ctx, 1);
    checkpoint_saver saver(ctx.device, ranks, {.directory = "steps"}, files);
    saver.save(ctx, 1, {.tensors = mine.held()});
    CHECK(contains(saver.wait(ctx.device).at(0).failure, "no space"));
    CHECK(list_steps(disk, "steps").leftovers.empty());
  });
  CHECK(crossing.has_met());
  // So does what a job left that was killed, of which a rank lives on.
  crossing_files again(disk);
  const std::string left = "steps/step-00000002.tmp-" + std::string(32, '0');
  again.make_directory(left);
  again.make_directory(left + "/data");
  on_ranks({1, 1}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    const checkpoint_saver saver(ctx.device, ranks, {.directory = "steps"}, again);
  });
  CHECK(again.has_met());
  CHECK(list_steps(disk, "steps").leftovers.empty());
}

TEST_CASE("training does not wait for the ranks that go on where one has failed with a save") {
  memory_file_system disk;
  failing_files failing(disk, 2);
  gated_files second(failing);  // rank 0 removes the directory before rank 1 makes its file there
  gated_files files(static_cast<file_system&>(second));
  second.only("w00001");
  files.only("w00000");
  on_ranks({3, 1}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors mine(ctx, 1);
    checkpoint_saver saver(ctx.device, ranks, {.directory = "steps", .deadline = 60}, files);
    saver.save(ctx, 1, {.tensors = mine.held()});
    while (ranks.rank() == 2 && !saver.has_finished_save()) std::this_thread::yield();
    CHECK(saver.finished(ctx.device).empty());
    files.open_gate();
    while (!list_steps(disk, "steps").leftovers.empty()) std::this_thread::yield();
    second.open_gate();
    const auto ended = saver.wait(ctx.device);
    REQUIRE(ended.size() == 1);
    CHECK(contains(ended[0].failure, "rank 2: "));
    CHECK(contains(ended[0].failure, "no space"));
  });
  CHECK(list_steps(disk, "steps").leftovers.empty());
}
