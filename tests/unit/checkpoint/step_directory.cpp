// program: steps
#include "plait/checkpoint/step_directory.hpp"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "plait/checkpoint/verify.hpp"
#include "plait/io/posix_file_system.hpp"
#include "support/memory_file_system.hpp"
#include "support/small_step.hpp"
#include "support/temp_folder.hpp"

namespace {

using plait::test::memory_file_system;
using plait::test::save_small_step;
using steps = std::vector<std::uint64_t>;

steps committed(plait::file_system& files, const std::string& root) {
  steps out;
  for (const auto& step : plait::list_steps(files, root).committed) out.push_back(step.step);
  return out;
}

}  // namespace

TEST_CASE("names of steps and files") {
  CHECK(plait::step_name(100) == "step-00000100");
  CHECK(plait::step_name(UINT64_MAX) == "step-18446744073709551615");
  for (const std::uint64_t step : {std::uint64_t{0}, std::uint64_t{99'999'999}, std::uint64_t{100'000'000}, UINT64_MAX})
    CHECK(plait::step_called(plait::step_name(step)) == step);
  for (const char* name : {"step-", "step-1", "step-000000100", "step-0000010x", "step--0000100", "step-+0000100",
                           "step-18446744073709551616", "Step-00000100", "step-00000100.tmp-1", "step-00000100 "})
    CHECK_FALSE_MESSAGE(plait::step_called(name), name);
  CHECK(plait::data_file_name(17) == "data/w00017.safetensors");
  CHECK(plait::data_file_name(123456) == "data/w123456.safetensors");
}

TEST_CASE("a step on disk: its files at each point, and the state that is read") {
  temp_folder dir;
  plait::posix_file_system files;
  const std::string root = dir / "checkpoints";
  plait::step_root writer(files, root + "/");
  CHECK(writer.path() == root);
  CHECK_FALSE(plait::newest_step(files, root));
  plait::manifest saved;
  {
    auto step = writer.begin(100);
    CHECK(step.step() == 100);
    CHECK(step.path().starts_with(root + "/step-00000100.tmp-"));
    CHECK(step.path().size() == root.size() + 18 + 1 + 32);
    saved = plait::test::write_small_step(files, step, 5);
    CHECK(committed(files, root).empty());
    CHECK(plait::list_steps(files, root).leftovers ==
          std::vector<plait::directory_entry>{{step.path(), plait::file_kind::directory}});
    CHECK(writer.remove_leftovers().empty());  // the step that this writer is writing
    CHECK(step.commit(saved).empty());
    CHECK_ERROR(step.commit(saved), "step 100 was committed or abandoned before");
  }
  CHECK(committed(files, root) == steps{100});
  CHECK(plait::newest_step(files, root)->path == root + "/step-00000100");
  CHECK(plait::read_step(files, root + "/step-00000100") == saved);
  CHECK(plait::verify_step(files, root + "/step-00000100").empty());
  CHECK(plait::missing_data(files, root + "/step-00000100").empty());
  CHECK(plait::read_whole(files, root + "/LATEST") == "step-00000100\n");
  const std::string commit = plait::read_whole(files, root + "/step-00000100/COMMIT");
  const std::string text = plait::read_whole(files, root + "/step-00000100/manifest.json");
  CHECK(contains(commit, "step 100\nmanifest.json " + std::to_string(text.size()) + " bytes, CRC-32C "));
  CHECK(files.list(root + "/step-00000100").size() == 3);
  CHECK_ERROR(writer.begin(100), "step 100 is in '" + root + "' already;", "discard it first");
  // A run resumed from an older step would look older than the step that it replaces.
  CHECK_ERROR(writer.begin(99), "step 100 in '" + root + "' is newer than step 99; discard the newer steps first");
  CHECK_ERROR(plait::step_root(files, root), "cannot lock '" + root + "'", "another writer");
  CHECK_ERROR(plait::read_step(files, root), "checkpoints' does not have the name of a step");
  CHECK_ERROR(plait::read_step(files, root + "/step-00000007"), "has no COMMIT");
}

TEST_CASE("an unfinished step leaves no files") {
  temp_folder dir;
  plait::posix_file_system files;
  plait::step_root writer(files, dir / "r");
  const auto left = [&] {
    std::set<std::string> names;
    for (const auto& entry : files.list(dir / "r")) names.insert(entry.name);
    return names;
  };
  {
    auto step = writer.begin(1);
    plait::test::write_small_step(files, step, 1);
    auto moved = std::move(step);
    CHECK(left().size() == 2);
  }
  CHECK(left() == std::set<std::string>{".lock"});
  const auto refuse = [&](auto change, auto... parts) {
    auto step = writer.begin(1);
    auto m = plait::test::write_small_step(files, step, 1);
    change(m, step);
    CHECK_ERROR(step.commit(m), parts...);
    CHECK(left() == std::set<std::string>{".lock"});
  };
  refuse([](auto& m, auto&) { m.step = 2; }, "manifest is that of step 2, and the directory that of 1");
  refuse([](auto& m, auto&) { m.tensors[0].boxes.pop_back(); }, "manifest.json'", "tensor 'w'", "in no box");
  refuse([](auto& m, auto&) { m.files[0].bytes -= 1; }, "w00000.safetensors' has ", "the manifest says");
  refuse([&](auto&, auto& step) { files.remove_file(step.path() + "/" + plait::data_file_name(1)); }, "cannot open",
         "w00001");
  refuse([&](auto&, auto& step) { files.make_directory(step.path() + "/manifest.json"); }, "cannot rename",
         "manifest.json");
}

TEST_CASE("invalid roots") {
  temp_folder dir;
  plait::posix_file_system files;
  CHECK_ERROR(plait::step_root(files, ""), "name of the directory for checkpoints is empty");
  CHECK_ERROR(plait::step_root(files, dir.write("file", "x")), "file' is not a directory");
  CHECK_ERROR(plait::step_root(files, dir / "a/b"), "cannot make the directory '", "a/b': No such file");
  CHECK_ERROR(plait::list_steps(files, dir / "none"), "cannot list '", "none'");
  CHECK_ERROR(plait::newest_step(files, dir / "none"), "cannot list '", "none'");
}

TEST_CASE("errors name an invalid step with its reason, and the newest complete step is found") {
  memory_file_system files;
  plait::step_root writer(files, "r");
  for (const std::uint64_t step : {1, 2, 3, 4, 5, 6, 7, 8}) save_small_step(files, writer, step);
  files.remove_file("r/step-00000008/COMMIT");
  files.remove_file("r/step-00000007/manifest.json");
  files.contents("r/step-00000006/manifest.json")[100] ^= 1;
  files.contents("r/step-00000005/COMMIT").back() = ' ';
  files.contents("r/step-00000004/COMMIT").clear();
  files.rename("r/step-00000003", "r/step-00000033");  // a copy under another step's name
  files.contents("r/LATEST") = "step-99999999\n";
  const std::string suffix = "0123456789abcdef0123456789abcdef", left = "r/step-00000009.tmp-" + suffix;
  files.make_directory(left);
  // Files with names that no writer makes stay unchanged.
  const std::vector<std::string> others = {"r/step-00000009.tmp-mine",    "r/step-00000009.tmp-" + suffix + "0",
                                           "r/step-9.tmp-" + suffix,      "r/.trash",
                                           "r/.trash/step-00000009-mine", "r/.trash/photos"};
  for (const std::string& other : others) files.make_directory(other);
  const std::string gone = "r/.trash/step-00000001-" + suffix;
  files.make_directory(gone);
  files.make_directory("r/other");
  files.make_directory("r/step-9");
  const plait::step_list found = plait::list_steps(files, "r");
  CHECK(committed(files, "r") == steps{2, 1});
  CHECK(plait::newest_step(files, "r")->step == 2);
  REQUIRE(found.invalid.size() == 6);
  CHECK(found.invalid[0].path == "r/step-00000033");
  CHECK(
      found.invalid[0].reason ==
      "'r/step-00000033' holds step 3: it was renamed, or copied; a step is loaded under its own name, step-00000003");
  CHECK(contains(found.invalid[1].reason, "'r/step-00000008' has no COMMIT"));
  CHECK(contains(found.invalid[2].reason, "'r/step-00000007' has no manifest.json"));
  CHECK(contains(found.invalid[3].reason, "'r/step-00000006/COMMIT' is not that of its directory and manifest"));
  CHECK(contains(found.invalid[4].reason, "'r/step-00000005/COMMIT' is not"));
  CHECK(contains(found.invalid[5].reason, "it reads ''"));
  std::vector<std::string> leftovers;
  for (const plait::directory_entry& entry : found.leftovers) leftovers.push_back(entry.name);
  std::sort(leftovers.begin(), leftovers.end());
  CHECK(leftovers == std::vector<std::string>{gone, left});
  save_small_step(files, writer, 8);
  CHECK_ERROR(writer.begin(8), "step 8 is in 'r' already; discard it first");
  int aside = 0;
  for (const plait::directory_entry& entry : files.list("r")) aside += entry.name.starts_with("step-00000008.damaged-");
  CHECK(aside == 1);
  CHECK(plait::newest_step(files, "r")->step == 8);
  CHECK(writer.remove_leftovers().size() == 2);
  CHECK(plait::list_steps(files, "r").leftovers.empty());
  for (const std::string& other : others) CHECK_MESSAGE(files.kind_of(other), other);
  CHECK_ERROR(writer.discard(77), "cannot rename", "step-00000077");
}

TEST_CASE("retention keeps the last, every n-th and the best step, and never removes the only verified one") {
  memory_file_system files;
  plait::step_root writer(files, "r");
  for (std::uint64_t step = 10; step <= 100; step += 10) save_small_step(files, writer, step);
  CHECK_ERROR(writer.retain({.last = 0}), "retention.last is 0", "at least 1");
  plait::retained done = writer.retain({.last = 2, .every = 40, .best = 30});
  CHECK(done.kept == steps{100, 90, 80, 40, 30});
  CHECK(done.removed == steps{70, 60, 50, 20, 10});
  CHECK(done.refusal.empty());
  CHECK(committed(files, "r") == steps{100, 90, 80, 40, 30});
  CHECK(files.list("r/.trash").empty());
  CHECK(writer.retain({.last = 10}).removed.empty());

  const auto all_bad = [](const plait::committed_step& step) { return "bad " + std::to_string(step.step); };
  done = writer.retain({.last = 2}, all_bad);
  CHECK(done.refusal == "bad 100; bad 90");
  CHECK(done.removed.empty());
  CHECK(done.kept == steps{100, 90, 80, 40, 30});
  // By default only the lengths of the files are checked; verifying a step finds damage to their bytes.
  files.contents("r/step-00000100/data/w00000.safetensors").pop_back();
  files.contents("r/step-00000090/data/w00001.safetensors")[4150] ^= 1;
  done = writer.retain({.last = 1});
  CHECK(contains(done.refusal, "step-00000100/data/w00000.safetensors' has "));
  const auto verified = [&](const plait::committed_step& step) {
    const auto faults = plait::verify_step(files, step.path);
    return faults.empty() ? std::string() : faults.front();
  };
  done = writer.retain({.last = 2}, verified);
  CHECK(contains(done.refusal, "is damaged: tensor 'm'"));
  CHECK(committed(files, "r") == steps{100, 90, 80, 40, 30});
  done = writer.retain({.last = 3}, verified);
  CHECK(done.removed == steps{40, 30});
  done = writer.retain({.last = 1, .best = 80}, verified);
  CHECK(done.kept == steps{100, 80});
}

TEST_CASE("a step elsewhere is read through its link, and never removed") {
  const temp_folder dir;
  plait::posix_file_system files;
  const std::string root = dir / "r", elsewhere = dir / "elsewhere";
  files.make_directory(elsewhere);
  plait::step_root writer(files, root);
  for (const std::uint64_t step : {10, 20}) save_small_step(files, writer, step);
  const std::string moved = elsewhere + "/step-00000020", link = root + "/step-00000020";
  files.rename(link, moved);
  REQUIRE(::symlink(moved.c_str(), link.c_str()) == 0);
  CHECK(committed(files, root) == steps{20, 10});
  CHECK(plait::newest_step(files, root)->step == 20);
  save_small_step(files, writer, 30);
  CHECK(writer.retain({.last = 1}).removed == steps{10});
  CHECK(committed(files, root) == steps{30, 20});
  // A link with any name, and ".", name the steps that they point to.
  REQUIRE(::symlink(link.c_str(), (dir / "best").c_str()) == 0);
  std::vector<plait::invalid_step> invalid_steps;
  CHECK(plait::step_called(
            std::filesystem::path(plait::detail::step_path(files, dir / "best", invalid_steps)).filename().string()) ==
        20);
  CHECK(plait::read_step(files, plait::detail::step_path(files, moved + "/.", invalid_steps)).step == 20);
  writer.discard(20);
  CHECK(committed(files, root) == steps{30});
  CHECK(plait::verify_step(files, moved).empty());
}

TEST_CASE("two writers of one root in memory") {
  memory_file_system files;
  auto first = std::make_unique<plait::step_root>(files, "r");
  CHECK_ERROR(plait::step_root(files, "r"), "cannot lock 'r'");
  first.reset();
  plait::step_root second(files, "r");
  save_small_step(files, second, 1);
  CHECK(committed(files, "r") == steps{1});
}
