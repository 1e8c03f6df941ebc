// program: saver
#include "plait/checkpoint/saver.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plait/checkpoint/verify.hpp"
#include "support/saved_tensors.hpp"
#include "support/temp_folder.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("a save has the state at its call, in every rank's part, and reports its cost") {
  memory_file_system files;
  on_savers({2, 2}, files, {}, [&](saving_rank& r) {
    r.mine.fill(3);
    CHECK(r.saver
              .save(r.ctx, 3,
                    {.scalars = {{"seed", std::int64_t{5}}, {"loss", 2.5}, {"note", std::string("text")}},
                     .blobs = {{"tokenizer", "a b"}, {"none", ""}},
                     .tensors = r.mine.held()})
              .empty());
    r.mine.fill(4);  // training continues
    const auto ended = r.wait();
    CHECK(ended.size() == 1);
    CHECK(ended.at(0).step == 3);
    CHECK(ended.at(0).failure == "");
    CHECK(ended.at(0).warning == "");
    CHECK(ended.at(0).stall >= 0);
    CHECK(ended.at(0).background > 0);
    // Every element is written once, and ranks with equal elements share the work.
    const double bytes =
        all_reduce_scalar(r.ctx.device, r.ranks, static_cast<double>(ended.at(0).bytes), reduce_op::sum);
    CHECK(bytes == own_tensors::all_bytes + 3);
    const double most =
        all_reduce_scalar(r.ctx.device, r.ranks, static_cast<double>(ended.at(0).bytes), reduce_op::max);
    CHECK(most <= bytes / 4 + 16);

    own_tensors other(r.ctx, 0);
    const loaded_state loaded = load_tensors(r.ctx, r.ranks, "steps", {.tensors = other.held()}, files);
    CHECK(loaded.step == 3);
    CHECK(loaded.path == "steps/step-00000003");
    CHECK(loaded.scalar<std::int64_t>("seed") == 5);
    CHECK(loaded.scalar<double>("loss") == 2.5);
    CHECK(loaded.scalar<std::string>("note") == "text");
    CHECK(loaded.blob("tokenizer") == "a b");
    CHECK(loaded.blob("none") == "");
    CHECK_ERROR(loaded.blob("some"), "has no blob 'some'");
    CHECK_ERROR(loaded.scalar<double>("seed"), "has no scalar 'seed' of this type");
    CHECK(other == own_tensors(r.ctx, 3));
  });
  CHECK(verify_step(files, "steps/step-00000003").empty());
}

TEST_CASE("two saves are in flight at once, and a third waits for the first") {
  memory_file_system disk;
  gated_files files(disk);  // data files wait at the gate
  on_savers({2, 1}, files, {}, [&](saving_rank& r) {
    r.save(1);
    r.mine.fill(2);
    r.save(2);
    r.mine.fill(3);
    CHECK_FALSE(r.saver.has_finished_save());
    CHECK(r.finished().empty());  // the gate is closed, and the call does not wait
    std::thread opener;
    if (r.rank() == 0) {
      opener = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        files.open_gate();
      });
    }
    const auto first = r.save(3);
    CHECK(first.size() >= 1);
    CHECK(first.at(0).step == 1);
    while (r.rank() == 0 && !r.saver.has_finished_save()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (r.rank() == 1) CHECK_FALSE(r.saver.has_finished_save());  // only rank 0, which commits, knows
    r.meet();
    CHECK(r.finished().size() >= 1);
    r.wait();
    CHECK_FALSE(r.saver.has_finished_save());
    if (opener.joinable()) opener.join();
    for (std::uint64_t step = 1; step <= 3; ++step) r.check_load("steps/" + step_name(step), step);
  });
}

TEST_CASE("saves start while others end") {
  temp_folder dir;  // on disk: files in memory have a lock, which would order the threads
  on_ranks({2, 1}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors mine(ctx, 1);
    checkpoint_saver saver(ctx.device, ranks, {.directory = dir / "steps", .keep = {.last = 2}});
    std::size_t ended = 0;
    for (std::uint64_t step = 1; step <= 40; ++step)
      for (const finished_save& s : saver.save(ctx, step, {.tensors = mine.held()})) ended += s.failure.empty();
    for (const finished_save& s : saver.wait(ctx.device)) ended += s.failure.empty();
    CHECK(ended == 40);
  });
  CHECK(list_steps(machine_files(), dir / "steps").committed.size() == 2);
}

TEST_CASE("the newest, every n-th and the best step stay") {
  memory_file_system files;
  on_savers({1, 2}, files, {.keep = {.last = 2, .every = 4}}, [&](saving_rank& r) {
    for (std::uint64_t step = 1; step <= 7; ++step) {
      if (step == 2) r.saver.keep_best(2);
      r.save(step);
    }
    r.wait();
  });
  CHECK(steps_in(files, "steps") == std::vector<std::uint64_t>{7, 6, 4, 2});
}

TEST_CASE("all ranks get the same error for an existing step, a directory in use, and a rank that never writes") {
  auto& files = never_destroyed<memory_file_system>();
  on_savers({2, 1}, files, {}, [&](saving_rank& r) {
    r.save(1);
    r.wait();
    CHECK_ERROR(r.save(1), "step 1 is not saved", "step 1 is in 'steps' already");
    CHECK_ERROR(checkpoint_saver(r.ctx.device, r.ranks, {.directory = "steps"}, files), "another writer");
    CHECK_ERROR(checkpoint_saver(r.ctx.device, r.ranks, {.directory = "absent/steps"}, files), "absent");
  });
  auto& gated = never_destroyed<gated_files>(files);
  gated.only("w00001");
  on_savers({2, 1}, gated, {.deadline = 3}, [&](saving_rank& r) {
    r.mine.fill(2);
    r.save(2);
    const auto ended = r.wait();
    gated.open_gate();
    REQUIRE(ended.size() == 1);
    CHECK(contains(ended[0].failure, "rank 1"));  // either rank 0 waited for rank 1, or rank 1 reports that it is stuck
    CHECK(contains(ended[0].failure, "saver_options::deadline"));
  });
  CHECK(steps_in(files, "steps") == std::vector<std::uint64_t>{1});
}

TEST_CASE("a directory on a disk of one host only is refused before a save") {
  memory_file_system shared, absent, own;
  own.make_directory("steps");
  on_ranks({3, 1}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    memory_file_system& files = ranks.rank() == 0 ? shared : ranks.rank() == 1 ? absent : own;
    CHECK_ERROR(checkpoint_saver(ctx.device, ranks, {.directory = "steps"}, files),
                "'steps' is not one directory for all ranks: ranks 1, 2 on " + detail::host_name(),
                "name a directory on a file system that all hosts share");
  });
  CHECK(shared.list("steps").empty());  // the files of the check were removed
  on_ranks({3, 1}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    CHECK_NOTHROW(checkpoint_saver(ctx.device, ranks, {.directory = "steps"}, shared));
  });
}

TEST_CASE("the best committed step stays until another is the best") {
  memory_file_system files;
  on_savers({1, 2}, files, {.keep = {.last = 1}}, [&](saving_rank& r) {
    const auto save = [&](std::uint64_t step) {
      r.save(step);
      CHECK(r.wait().at(0).failure == "");
      return steps_in(files, "steps");
    };
    r.saver.keep_best(1);
    save(1);
    CHECK(save(2) == std::vector<std::uint64_t>{2, 1});
    r.saver.keep_best(9);  // step 9 is never committed, as if its save had failed
    CHECK(save(3) == std::vector<std::uint64_t>{3, 1});
    r.saver.keep_best(4);
    CHECK(save(4) == std::vector<std::uint64_t>{4});
    r.meet();
    // A save that is in flight when the best step changes removes steps by the best one at its start.
    r.save(5);
    r.saver.keep_best(6);
    r.save(6);
    r.wait();
    CHECK(steps_in(files, "steps") == std::vector<std::uint64_t>{6});
  });
  // A later job starts with the best step of the previous one.
  on_savers({1, 2}, files, {.keep = {.last = 1}}, [&](saving_rank& r) {
    r.saver.begin_with_best(6);
    for (const std::uint64_t step : {7, 8}) {
      r.saver.keep_best(9);  // its save fails
      r.save(step);
      r.wait();
      CHECK(steps_in(files, "steps") == std::vector<std::uint64_t>{step, 6});
    }
  });
}

TEST_CASE("a call of the file system that hangs is an error after the deadline") {
  for (const std::string stuck : {"w00000", "w00001"}) {
    CAPTURE(stuck);
    auto& disk = never_destroyed<memory_file_system>();
    auto& files = never_destroyed<gated_files>(disk);
    files.only(stuck);
    on_savers({2, 1}, files, {.deadline = 3}, [&](saving_rank& r) {
      r.save(1);
      r.save(2);
      // The call returns although the gate is closed, and reports the earlier save.
      CHECK_ERROR(r.save(3), "step 3 is not saved", "stuck in a call of the file");
      CHECK(r.saver.has_finished_save());
      const auto ended = r.wait();
      REQUIRE(ended.size() == 2);
      for (const finished_save& s : ended) {
        CHECK(contains(s.failure, "saver_options::deadline"));
        CHECK(contains(s.failure, stuck == "w00000" ? "writing its file" : "rank 1"));
        CHECK(broadcast_text(r.ctx.device, r.ranks, s.failure) == s.failure);
      }
      r.meet();
      files.open_gate();
      // The file system responds again, and saves succeed again.
      bool saved = false;
      for (int i = 0; i < 400 && !saved; ++i) {
        try {
          r.save(3);
          saved = r.wait().at(0).failure.empty();  // a busy machine may need longer than the deadline
        } catch (const error&) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
      }
      REQUIRE(saved);
      r.check_load("steps", 1);
    });
    CHECK(steps_in(disk, "steps") == std::vector<std::uint64_t>{3});
    CHECK(list_steps(disk, "steps").leftovers.empty());
  }
}

TEST_CASE("a program that ends waits for a hanging call of the file system only as long as configured") {
  auto& disk = never_destroyed<memory_file_system>();
  auto& files = never_destroyed<gated_files>(disk);
  std::atomic<bool> ending = false;
  on_savers({2, 1}, files, {.is_ending = [&] { return ending.load(); }, .ending_deadline = 0.2}, [&](saving_rank& r) {
    r.save(1);
    ending = true;
    CHECK(contains(r.wait().at(0).failure, "for more than 0.2 s in one call of the file system"));
  });
  files.open_gate();
}

TEST_CASE("a saver ends although a call of the file system hangs") {
  auto& disk = never_destroyed<memory_file_system>();
  auto& files = never_destroyed<gated_files>(disk);
  on_savers({1, 1}, files, {.deadline = 0.2}, [](saving_rank& r) { r.save(1); });
  files.open_gate();
}

TEST_CASE("if any operation fails, all ranks get the same error, older steps stay, and the next save works") {
  using enum fault;
  int failures = 0, done = 0;
  // In the second round writes fail after the calls that started them have returned, as with io_uring.
  const std::vector<std::pair<fault, bool>> kinds{
      {io_error, false}, {no_space, false}, {short_write, false}, {io_error, true}, {short_write, true}};
  for (const auto& [kind_of, deferred] : kinds) {
    const fault kind = kind_of;
    // The order of two ranks' operations varies, so one missing operation does not yet mean the end.
    for (std::size_t n = 0, past = 0; past < 3; ++n) {
      memory_file_system files;
      if (deferred) files.defer_writes();
      bool reached = false;
      std::atomic<int> failed_ranks = 0, warned = 0;
      on_savers({1, 2}, files, {}, [&](saving_rank& r) {
        r.save(1);
        r.wait();
        if (r.rank() == 0) files.fail_at(files.operations() + n, kind);
        r.meet();
        r.mine.fill(2);
        std::string why;
        try {
          r.save(2);
          const auto ended = r.wait();
          REQUIRE(ended.size() == 1);
          why = ended[0].failure;
          if (!ended[0].warning.empty()) ++warned;
        } catch (const error& e) {
          why = e.what();
        }
        if (!why.empty()) ++failed_ranks;
        const std::string zero = broadcast_text(r.ctx.device, r.ranks, why);
        CHECK(zero == why);
        r.meet();
        if (r.rank() == 0) {
          reached = files.fault_happened();
          files.fail_at(0, kind);  // the save made fewer operations
        }
        r.meet();
        r.mine.fill(3);
        r.save(3);
        CHECK(r.wait().at(0).failure == "");
        for (const std::uint64_t step : {1, 3}) r.check_load("steps/" + step_name(step), step);
      });
      CAPTURE(n);
      const bool there = steps_in(files, "steps") == std::vector<std::uint64_t>{3, 2, 1};
      CHECK((failed_ranks == 0 || failed_ranks == 2));
      CHECK(there == (failed_ranks == 0));
      past = reached ? 0 : past + 1;
      if (reached) ++(failed_ranks > 0 ? failures : done);
    }
  }
  CHECK(failures > 60);
  CHECK(done > 0);  // failures after LATEST, or while old files are removed
}

TEST_CASE("a crash at any operation of a save of two ranks leaves the new step or the previous one") {
  memory_file_system disk;
  watched_files files(disk);
  std::size_t newer = 0, older = 0;
  on_savers({2, 1}, files, {}, [&](saving_rank& r) {
    r.save(1);
    r.wait();
    r.mine.fill(2);
    if (r.rank() == 0) files.watch();
    r.meet();
    r.save(2);
    r.wait();
  });
  REQUIRE(files.crashes().size() > 100);
  for (const auto& after : files.crashes()) {
    const auto newest = newest_step(*after, "steps");
    REQUIRE(newest);
    REQUIRE((newest->step == 1 || newest->step == 2));
    ++(newest->step == 2 ? newer : older);
    REQUIRE(verify_step(*after, newest->path).empty());
    REQUIRE(verify_step(*after, "steps/" + step_name(1)).empty());
    on_ranks({1, 1}, [&](const context<cpu>& ctx, any_communicator& ranks) {
      own_tensors other(ctx, 0);
      load_tensors(ctx, ranks, "steps", {.tensors = other.held()}, *after);
      CHECK(other == own_tensors(ctx, newest->step));
      // The next job saves to this directory, and no unfinished step remains.
      checkpoint_saver saver(ctx.device, ranks, {.directory = "steps"}, *after);
      CHECK(list_steps(*after, "steps").leftovers.empty());
      saver.save(ctx, 3, {.tensors = other.held()});
      CHECK(saver.wait(ctx.device).at(0).failure == "");
    });
  }
  CHECK(newer > 0);
  CHECK(older > 0);
}

TEST_CASE("removal compares every byte of a step that stays, and removes nothing if none is complete") {
  memory_file_system disk;
  damaging_files files(disk);
  on_savers({1, 2}, files, {.keep = {.last = 1}}, [&](saving_rank& r) {
    r.save(1);
    CHECK(r.wait().at(0).warning == "");
    if (r.rank() == 0) files.damage(2, true);
    r.meet();
    r.save(2);
    const finished_save second = r.wait().at(0);
    CHECK(second.failure == "");
    if (r.rank() == 0) CHECK(contains(second.warning, "has another checksum than when it was written"));
    if (r.rank() == 0) CHECK(contains(second.damage, "has another checksum than when it was written"));
    CHECK(steps_in(files, "steps") == std::vector<std::uint64_t>{2, 1});
    r.meet();
    r.save(3);
    const finished_save third = r.wait().at(0);
    CHECK(third.warning == "");
    CHECK(third.damage == "");
    CHECK(steps_in(files, "steps") == std::vector<std::uint64_t>{3});
  });
}

TEST_CASE("before a removal no rank reads a whole step again if all ranks have read their parts") {
  memory_file_system disk;
  damaging_files damaged(disk);
  counting_files files(damaged);
  on_savers({1, 2}, files, {.keep = {.last = 2}}, [&](saving_rank& r) {
    const auto own = static_cast<std::uint32_t>(r.rank());
    for (std::uint64_t step = 1; step <= 8; ++step) {
      if (step == 5 && r.rank() == 0) damaged.damage(5);
      r.meet();
      r.save(step);
      const finished_save done = r.wait().at(0);
      CHECK(done.failure == "");
      CHECK(done.warning == "");
      const int times = step == 6 ? 2 : 1;
      for (int i = 0; i < 24000 && files.closed(step, own) < times; ++i)  // up to two minutes, for a very slow machine
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      r.meet();
    }
  });
  CHECK(steps_in(disk, "steps") == std::vector<std::uint64_t>{8, 7});
  for (const std::uint64_t step : {1, 2, 3, 4, 5, 7, 8})
    for (const std::uint32_t writer : {0, 1}) CHECK(files.opened(step, writer) == 1);
  // A rank found an error in step 5, so rank 0 read the next step.
  for (const std::uint32_t writer : {0, 1}) CHECK(files.opened(6, writer) == 2);
}

TEST_CASE("if only the newest step stays, each rank reads its own file first, and none reads the whole step") {
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

TEST_CASE("a step is read again only if no earlier step stays for the next save") {
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

TEST_CASE("files of a failed save are removed, even if another rank adds some meanwhile") {
  memory_file_system disk;
  crossing_files crossing(disk);
  failing_files files(crossing, 0);
  on_savers({1, 1}, files, {}, [&](saving_rank& r) {
    r.save(1);
    CHECK(contains(r.wait().at(0).failure, "no space"));
    CHECK(list_steps(disk, "steps").leftovers.empty());
  });
  CHECK(crossing.has_met());
  // The same for leftovers of a killed job of which one rank is still running.
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

TEST_CASE("training does not wait for ranks that are still writing after another rank's save failed") {
  memory_file_system disk;
  failing_files failing(disk, 2);
  gated_files second(failing);  // rank 0 removes the directory before rank 1 creates its file in it
  gated_files files(static_cast<file_system&>(second));
  second.only("w00001");
  files.only("w00000");
  on_savers({3, 1}, files, {.deadline = 60}, [&](saving_rank& r) {
    r.save(1);
    while (r.rank() == 2 && !r.saver.has_finished_save()) std::this_thread::yield();
    CHECK(r.finished().empty());
    files.open_gate();
    while (!list_steps(disk, "steps").leftovers.empty()) std::this_thread::yield();
    second.open_gate();
    const auto ended = r.wait();
    REQUIRE(ended.size() == 1);
    CHECK(contains(ended[0].failure, "rank 2: "));
    CHECK(contains(ended[0].failure, "no space"));
  });
  CHECK(list_steps(disk, "steps").leftovers.empty());
}
