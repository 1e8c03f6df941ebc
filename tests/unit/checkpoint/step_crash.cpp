// program: steps
// timeout: 240
#include <doctest/doctest.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/step_directory.hpp"
#include "plait/checkpoint/verify.hpp"
#include "support/memory_file_system.hpp"
#include "support/small_step.hpp"

namespace {

using plait::test::crashed;
using plait::test::fault;
using plait::test::keep;
using plait::test::memory_file_system;

/// Saves the steps in `steps`, and keeps the newest `last` ones.
void save(memory_file_system& files, const std::vector<std::uint64_t>& steps, std::uint64_t last = 2) {
  plait::step_root root(files, "r");
  root.remove_leftovers();
  for (const std::uint64_t step : steps) {
    plait::test::save_small_step(files, root, step);
    if (last > 0) root.retain({.last = last});
  }
}

/// The committed steps; each must be complete and unchanged. Crashes at many places leave equal files, which are
/// checked only once.
std::set<std::uint64_t> whole_steps(memory_file_system& files) {
  static std::map<std::string, std::set<std::uint64_t>> known;
  const auto [place, is_new] = known.try_emplace(files.image());
  std::set<std::uint64_t>& out = place->second;
  if (!is_new || !files.kind_of("r")) return out;
  for (const plait::committed_step& step : plait::list_steps(files, "r").committed) {
    const auto faults = plait::verify_step(files, step.path);
    CHECK_MESSAGE(faults.empty(), faults.front());
    const plait::manifest m = plait::read_step(files, step.path);
    CHECK(std::get<std::int64_t>(m.scalars[0].second) == static_cast<std::int64_t>(step.step));
    out.insert(step.step);
  }
  return out;
}

/// The operations of a save of steps 1 and 2, and of the next save with it.
std::pair<std::size_t, std::size_t> operations_of_saves(std::uint64_t last = 2) {
  memory_file_system files;
  save(files, {1, 2});
  const std::size_t first = files.operations();
  save(files, {3}, last);
  const std::size_t all = files.operations();
  CHECK(whole_steps(files) == (last == 0 ? std::set<std::uint64_t>{1, 2, 3} : std::set<std::uint64_t>{2, 3}));
  return {first, all};
}

}  // namespace

TEST_CASE("a crash at any operation of a save loses at most the step that was being saved") {
  const auto [first, all] = operations_of_saves();
  REQUIRE(all > first + 60);
  std::set<std::set<std::uint64_t>> seen;
  std::set<std::string> resumed_from;
  for (const keep mode : plait::test::all_keeps) {
    const unsigned seeds = mode == keep::none || mode == keep::all ? 1 : 6;
    for (std::size_t at = 0; at <= all; ++at) {
      memory_file_system files;
      files.crash_at(at);
      bool saved[2] = {false, false};
      try {
        save(files, {1, 2});
        saved[0] = true;
        save(files, {3});
        saved[1] = true;
      } catch (const crashed&) {
      }
      for (unsigned seed = 0; seed < seeds; ++seed) {
        CAPTURE(static_cast<int>(mode));
        CAPTURE(at);
        CAPTURE(seed);
        const auto after = files.after_crash(mode, seed + 1000 * static_cast<unsigned>(at));
        const std::set<std::uint64_t> found = whole_steps(*after);
        seen.insert(found);
        if (saved[0]) CHECK(found.count(2) == 1);  // never the older step
        if (saved[1]) CHECK(found.count(3) == 1);
        const auto newest = after->kind_of("r") ? plait::newest_step(*after, "r") : std::nullopt;
        if (saved[0]) CHECK(newest.has_value());
        if (newest) CHECK(found.count(newest->step) == 1);
        // The result can be resumed from: the next writer removes leftovers and saves.
        if (!resumed_from.insert(after->image()).second) continue;
        {
          plait::step_root root(*after, "r");
          root.remove_leftovers();
          plait::test::save_small_step(*after, root, 9);
        }
        CHECK(plait::list_steps(*after, "r").leftovers.empty());
        std::set<std::uint64_t> then = found;
        then.insert(9);
        CHECK(whole_steps(*after) == then);
      }
    }
  }
  // All possible results occurred, so the crashes were at the right places.
  CHECK(seen == std::set<std::set<std::uint64_t>>{{}, {1}, {1, 2}, {1, 2, 3}, {2, 3}});
}

TEST_CASE("an operation that fails is an error and keeps saved steps, after a crash too") {
  std::size_t refused = 0, saved_after = 0;
  for (const std::uint64_t last : {2, 0}) {  // 0: no step is removed, and nothing happens after the save
    const auto [first, all] = operations_of_saves(last);
    for (const fault kind : {fault::io_error, fault::no_space, fault::short_write}) {
      for (std::size_t at = first; at < all; ++at) {
        CAPTURE(static_cast<int>(kind));
        CAPTURE(at);
        memory_file_system files;
        save(files, {1, 2});
        REQUIRE(files.operations() == first);
        files.fail_at(at, kind);
        bool saved = false;
        try {
          save(files, {3}, last);
          saved = true;
        } catch (const plait::error& e) {
          ++refused;
          const std::string text = e.what();
          CHECK(text.find("'r") != text.npos);
          CHECK((text.find("Input/output error") != text.npos || text.find("No space left") != text.npos));
        }
        if (saved && files.fault_happened()) ++saved_after;
        for (const keep mode : plait::test::all_keeps) {
          const auto after = files.after_crash(mode, static_cast<unsigned>(at));
          const std::set<std::uint64_t> found = whole_steps(*after);
          CHECK(found.count(2) == 1);
          if (saved) CHECK(found.count(3) == 1);
        }
        CHECK(whole_steps(files).count(2) == 1);
      }
    }
  }
  CHECK(refused > 150);
  CHECK(saved_after > 0);  // in writing LATEST
}

TEST_CASE("a failure followed by a crash at any later operation") {
  const auto [first, all] = operations_of_saves();
  for (std::size_t at = first; at < all; ++at) {
    for (std::size_t later = 1; later < 40; later += 1 + at % 3) {
      CAPTURE(at);
      CAPTURE(later);
      memory_file_system files;
      save(files, {1, 2});
      files.fail_at(at, fault::io_error);
      files.crash_at(at + later);
      try {
        save(files, {3});
      } catch (const plait::error&) {
        try {
          save(files, {4});  // the user starts again
        } catch (const crashed&) {
        } catch (const plait::error&) {
        }
      } catch (const crashed&) {
      }
      for (const keep mode : {keep::none, keep::some, keep::garbage}) {
        const auto after = files.after_crash(mode, static_cast<unsigned>(1000 * at + later));
        const std::set<std::uint64_t> found = whole_steps(*after);
        CHECK((found.count(2) == 1 || (found.count(3) == 1 && found.count(4) == 1)));  // the newest two
      }
    }
  }
}
