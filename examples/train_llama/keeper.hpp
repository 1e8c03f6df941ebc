#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "model_run.hpp"
#include "plait/core/error.hpp"
#include "signals.hpp"

/// Saves what training leaves behind, and tells what has become of it.
class keeper {
 public:
  /// What is told of a save that has ended.
  struct news {
    plait::finished_save save;
    double bytes = 0;              ///< of all ranks
    std::optional<double> loss{};  ///< held-out, of --keep-best
    bool is_best = false;          ///< of all until it was saved
  };

  keeper(const setup& s, model_run& run, std::function<void(const news&)> tell)
      : s_(s), run_(run), tell_(std::move(tell)), last_(run.newest_saved()), best_(run.best_saved()) {}

  /// After a step: whether it is one to save. Ranks meet here where all know that there is a reason.
  void after(std::int64_t steps, const requests& asked) {
    if (s_.opt.checkpoint_dir.empty()) return;
    if (asked.ended_saves != 0) tell(run_.ended_saves(false));
    if (asked.save != 0) save_asked = 0;
    if (asked.save != 0 || (s_.opt.save_every > 0 && steps % s_.opt.save_every == 0)) save(steps);
  }
  /// At the end, however it came. A save of this very step that has failed is tried once more, when those before it no
  /// longer take room or time.
  void finish(std::int64_t steps, bool worth_saving) {
    if (s_.opt.checkpoint_dir.empty()) return;
    tell(run_.ended_saves(true));
    const bool has_failed = steps == newest_ended_ && !failure_.empty();
    if (worth_saving && (steps > last_ || has_failed)) save(steps);
    tell(run_.ended_saves(true));
  }
  /// What the save of the newest step failed with.
  const std::string& failure() const { return failure_; }

 private:
  void save(std::int64_t steps) {
    last_ = steps;
    judgement& judged = judged_[static_cast<std::uint64_t>(steps)] = {.before = best_};
    if (s_.opt.keep_best == "held-out") judged.loss = run_.evaluate();
    if (judged.loss && *judged.loss < best_.loss) best_ = {steps, *judged.loss};
    judged.is_best = best_.step == steps;
    try {
      tell(run_.save(steps, best_));
    } catch (const plait::error_of_all& e) {
      ended({.step = static_cast<std::uint64_t>(steps), .failure = e.what()}, 0);
    }
  }
  void tell(const std::vector<plait::finished_save>& saves) {
    for (const plait::finished_save& s : saves)
      ended(s, run_.all_reduce(static_cast<double>(s.bytes), plait::reduce_op::sum));
  }
  void ended(const plait::finished_save& save, double bytes) {
    const auto step = static_cast<std::int64_t>(save.step);
    if (step >= newest_ended_) {  // a save that fails at once ends before older ones that are under way
      newest_ended_ = step;
      failure_ = save.failure;
    }
    const auto judged = judged_.extract(save.step).mapped();
    if (!save.failure.empty() && judged.is_best && best_.step == step)
      best_ = judged.before;  // what is not there is not the best
    tell_({save, bytes, judged.loss, judged.is_best});
  }

  struct judgement {
    std::optional<double> loss{};
    bool is_best = false;
    best_step before{};
  };

  const setup& s_;
  model_run& run_;
  std::function<void(const news&)> tell_;
  std::int64_t last_;               ///< step that was saved, or that a save was begun of
  std::int64_t newest_ended_ = -1;  ///< step of a save
  best_step best_;
  std::map<std::uint64_t, judgement> judged_;  ///< saves that are under way
  std::string failure_;                        ///< of the save of `newest_ended_`
};
