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
    bool is_best = false;          ///< of all that are saved until this one
  };

  keeper(const setup& s, model_run& run, std::function<void(const news&)> tell)
      : s_(s), run_(run), tell_(std::move(tell)), last_(run.newest_saved()), kept_(run.best_saved()) {}

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
  /// What is wrong with the save of the newest step, which was committed; rank 0 knows.
  const std::string& damage() const { return damage_; }

 private:
  void save(std::int64_t steps) {
    last_ = steps;
    tell(run_.room_for_save());  // the best that stays is known by what has failed
    std::optional<double>& loss = judged_[static_cast<std::uint64_t>(steps)];
    if (s_.opt.keep_best == "held-out") loss = run_.evaluate();
    best_step best = kept_;
    for (const auto& [step, its] : judged_)
      if (its && *its < best.loss) best = {static_cast<std::int64_t>(step), *its};
    try {
      tell(run_.save(steps, best));
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
      damage_ = save.damage;
    }
    const std::optional<double> loss = judged_.extract(save.step).mapped();
    const bool is_best = save.failure.empty() && loss && *loss < kept_.loss;
    if (is_best) kept_ = {step, *loss};
    tell_({save, bytes, loss, is_best});
  }

  const setup& s_;
  model_run& run_;
  std::function<void(const news&)> tell_;
  std::int64_t last_;                                      ///< step that was saved, or that a save was begun of
  std::int64_t newest_ended_ = -1;                         ///< step of a save
  best_step kept_;                                         ///< the best that is on the disk
  std::map<std::uint64_t, std::optional<double>> judged_;  ///< held-out losses of saves that are under way
  std::string failure_, damage_;                           ///< of the save of `newest_ended_`
};
