// The trainer's report of saves at its end, and whether the last state is on disk; and the memory limit that it finds.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../../examples/train_llama/machine.hpp"
#include "../../../examples/train_llama/run.hpp"
#include "support/temp_folder.hpp"

std::atomic<int> interrupted{0}, save_asked{0};

namespace {

/// A run without training, whose saves end as a test decides.
class saves_alone final : public model_run {
 public:
  std::vector<std::uint64_t> begun;             ///< steps, in the order of their saves
  std::vector<plait::finished_save> will_end;   ///< result of the next waiting call for finished saves
  std::vector<std::string> refusals;            ///< errors of the next saves; empty: the save starts
  std::vector<plait::finished_save> in_flight;  ///< saves in flight, which succeed when they are waited for
  std::vector<std::int64_t> best;               ///< the best step, as passed to each save
  std::vector<double> losses;                   ///< held-out losses of the next saves

  std::vector<plait::finished_save> save(std::int64_t steps, const best_step& its_best) override {
    const auto step = static_cast<std::uint64_t>(steps);
    begun.push_back(step);
    best.push_back(its_best.step);
    const std::string refusal = refusals.empty() ? "" : refusals.front();
    if (!refusals.empty()) refusals.erase(refusals.begin());
    if (!refusal.empty()) throw plait::error_of_all(refusal);
    in_flight.push_back({.step = step});
    return {};
  }
  std::vector<plait::finished_save> ended_saves(bool wait) override {
    return wait ? end(in_flight.size()) : std::vector<plait::finished_save>();
  }
  std::vector<plait::finished_save> room_for_save() override {
    return end(in_flight.size() < 2 ? 0 : in_flight.size() - 1);
  }
  double all_reduce(double value, plait::reduce_op) override { return value; }

  // Members that a checkpointer does not call.
  plait::step_result step(std::int64_t, bool) override { return {}; }
  std::map<std::int64_t, plait::router_statistics> routers() override { return {}; }
  std::optional<double> evaluate() override {
    if (losses.empty()) return {};
    const double loss = losses.front();
    losses.erase(losses.begin());
    return loss;
  }
  std::vector<std::int64_t> sample() override { return {}; }
  std::uint64_t weights_hash() override { return 0; }
  std::vector<plait::parameter_hash> hashes(bool) override { return {}; }
  void write_model() override {}
  std::int64_t resume() override { return 0; }
  std::vector<plait::axis_communication> of_ranks(const std::vector<plait::axis_times>&) override { return {}; }
  std::string longest_wait(const std::string&) override { return {}; }
  std::vector<std::vector<plait::step_event>> traced() override { return {}; }
  plait::world& world() override { plait::fail("a run of saves alone has no world"); }
  std::size_t peak_bytes() const override { return 0; }

 private:
  /// Ends the oldest `count` saves in flight.
  std::vector<plait::finished_save> end(std::size_t count) {
    const auto behind = in_flight.begin() + static_cast<std::ptrdiff_t>(count);
    std::vector<plait::finished_save> ended(in_flight.begin(), behind);
    in_flight.erase(in_flight.begin(), behind);
    for (plait::finished_save& s : ended) {
      const auto outcome =
          std::find_if(will_end.begin(), will_end.end(), [&](const auto& t) { return t.step == s.step; });
      if (outcome == will_end.end()) continue;
      s = *outcome;
      will_end.erase(outcome);
    }
    return ended;
  }
};

/// Runs a checkpointer over steps 2, 4, ... `last`, each of which is saved. Returns its final report of the last state.
std::string failure_after(saves_alone& run, bool worth_saving = true, std::int64_t last = 6,
                          std::vector<std::uint64_t>* best = nullptr) {
  setup s{.opt = {}, .rate = plait::lr_schedule(plait::lr_schedule_config{})};
  s.opt.checkpoint_dir = "steps";
  s.opt.save_every = 2;
  if (!run.losses.empty()) s.opt.keep_best = "held-out";
  checkpointer saves(s, run, [&](const checkpointer::saved_step& n) {
    if (best != nullptr && n.is_best) best->push_back(n.save.step);
  });
  for (std::int64_t step = 2; step <= last; step += 2) saves.after(step, {});
  saves.finish(last, worth_saving);
  return saves.failure() + saves.damage();
}

using steps = std::vector<std::uint64_t>;

}  // namespace

TEST_CASE("available memory is the kernel's number, limited by control groups") {
  const temp_folder dir;
  const std::string root = dir / "";
  CHECK_FALSE(available_memory(root));
  std::filesystem::create_directories(dir / "proc/self");
  dir.write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 4000 kB\nSwapFree: 500 kB\n");
  CHECK(available_memory(root) == 4500.0 * 1024);
  // Version 2: the group has no limit, but its parent has.
  dir.write("proc/self/cgroup", "0::/job/step\n");
  std::filesystem::create_directories(dir / "sys/fs/cgroup/job/step");
  dir.write("sys/fs/cgroup/job/step/memory.max", "max\n");
  dir.write("sys/fs/cgroup/job/memory.max", "2000000\n");
  dir.write("sys/fs/cgroup/job/memory.current", "1500000\n");
  dir.write("sys/fs/cgroup/job/memory.stat", "anon 5\ninactive_file 300000\nactive_file 200000\n");
  CHECK(available_memory(root) == 1000000 + 500.0 * 1024);
  // Version 1, in a container: the path is the host's.
  dir.write("proc/self/cgroup", "9:cpu:/\n4:memory:/host/path\n");
  std::filesystem::create_directories(dir / "sys/fs/cgroup/memory");
  dir.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000\n");
  dir.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "3000000\n");
  dir.write("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 100\n");
  CHECK(available_memory(root) == 500.0 * 1024);
}

TEST_CASE("a last save that fails at once is repeated after earlier ones have ended") {
  saves_alone run;
  run.refusals = {"", "", "no memory"};
  CHECK(failure_after(run).empty());
  CHECK(run.begun == steps{2, 4, 6, 6});
}

TEST_CASE("a last save that fails twice is reported although older ones succeed") {
  saves_alone run;
  run.refusals = {"", "", "no memory", "still none"};
  CHECK(failure_after(run) == "still none");
  CHECK(run.begun == steps{2, 4, 6, 6});
  saves_alone diverged;
  diverged.refusals = {"", "", "no memory"};
  CHECK(failure_after(diverged, false) == "no memory");
  CHECK(diverged.begun == steps{2, 4, 6});
}

TEST_CASE("a failed older save is not a failure of the last") {
  saves_alone run;
  run.will_end = {{.step = 4, .failure = "a full disk"}};
  CHECK(failure_after(run).empty());
  CHECK(run.begun == steps{2, 4, 6});
  saves_alone last;
  last.will_end = {{.step = 6, .failure = "a full disk"}};
  CHECK(failure_after(last).empty());
  CHECK(last.begun == steps{2, 4, 6, 6});
}

TEST_CASE("a damaged last save is reported, and a damaged older one is not") {
  saves_alone run;
  run.will_end = {{.step = 4, .damage = "a wrong sum"}};
  CHECK(failure_after(run).empty());
  saves_alone last;
  last.will_end = {{.step = 6, .damage = "a wrong sum"}};
  CHECK(failure_after(last) == "a wrong sum");
}

TEST_CASE("if the save of the best step fails, the best of the other steps replaces it") {
  saves_alone run;
  run.losses = {5, 1, 2, 3, 4};
  run.will_end = {{.step = 4, .failure = "a full disk"}};
  std::vector<std::uint64_t> reported;
  CHECK(failure_after(run, true, 10, &reported).empty());
  // Step 4 is in flight when 6 is saved, and has failed when 8 is saved.
  CHECK(run.best == std::vector<std::int64_t>{2, 4, 4, 6, 6});
  CHECK(reported == steps{2, 6});
}
