#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "model_run.hpp"
#include "plait/core/error.hpp"
#include "signals.hpp"

/// Saves what training leaves behind, and tells what has become of it.
class keeper {
 public:
  /// `tell(save, bytes of all ranks)` is called for each that has ended.
  keeper(const setup& s, model_run& run, std::function<void(const plait::finished_save&, double)> tell)
      : s_(s), run_(run), tell_(std::move(tell)), last_(run.newest_saved()) {}

  /// After a step: whether it is one to save.
  void after(std::int64_t steps) {
    if (s_.opt.checkpoint_dir.empty()) return;
    tell(run_.ended_saves(false));
    const bool asked = run_.all_reduce(save_asked.load(), plait::reduce_op::max) != 0;
    if (asked) save_asked = 0;
    if (asked || (s_.opt.save_every > 0 && steps % s_.opt.save_every == 0)) save(steps);
  }
  /// At the end, however it came.
  void finish(std::int64_t steps, bool worth_saving) {
    if (s_.opt.checkpoint_dir.empty()) return;
    if (worth_saving && steps > last_) save(steps);
    tell(run_.ended_saves(true));
  }
  /// What the last save failed with.
  const std::string& failure() const { return failure_; }

 private:
  void save(std::int64_t steps) {
    last_ = steps;
    try {
      tell(run_.save(steps));
    } catch (const plait::error_of_all& e) {
      failure_ = e.what();
      tell_({.step = static_cast<std::uint64_t>(steps), .failure = failure_}, 0);
    }
  }
  void tell(const std::vector<plait::finished_save>& ended) {
    for (const plait::finished_save& s : ended) {
      failure_ = s.failure;
      tell_(s, run_.all_reduce(static_cast<double>(s.bytes), plait::reduce_op::sum));
    }
  }

  const setup& s_;
  model_run& run_;
  std::function<void(const plait::finished_save&, double)> tell_;
  std::int64_t last_;  ///< step that was saved, or that a save was begun of
  std::string failure_;
};
