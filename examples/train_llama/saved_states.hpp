#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint_files.hpp"
#include "model_run.hpp"
#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/model_weights.hpp"
#include "plait/checkpoint/saver.hpp"
#include "plait/comm/host_values.hpp"
#include "resumed.hpp"
#include "signals.hpp"

/// The saved states of a rank's run: what --init-from, --resume and --checkpoint-dir name. Knows the run's place in the
/// data and the learning rate's course. All but the plain questions are collective.
template <class Model, class Optimizer, plait::compute_device Device>
class saved_states {
 public:
  saved_states(const setup& s, plait::context<Device>& ctx, plait::any_communicator& ranks, Model& model,
               Optimizer& optimizer)
      : s_(s), ctx_(ctx), ranks_(ranks), model_(model), optimizer_(optimizer) {}

  /// Loads the weights of the step that --init-from names, and nothing else.
  void load_first_step() {
    try {
      plait::load_weights_of_step(ctx_, ranks_, model_, s_.first_step, {.in_place = true});
    } catch (const plait::error_of_all& e) {
      throw plait::error_of_all(plait::cat({"--init-from: ", e.what()}));
    }
  }

  /// Loads what --resume names, and returns how many steps there were before: 0 where it names nothing.
  std::int64_t resume() {
    if (!s_.opt.checkpoint_dir.empty()) open_saver();
    std::string path = s_.opt.resume == "none" || s_.opt.resume == "auto" ? "" : s_.opt.resume, problem;
    std::optional<plait::committed_step> newest;  // of those that this run adds to
    try {
      if (ranks_.rank() == 0 && saver_) newest = plait::newest_step(plait::machine_files(), s_.opt.checkpoint_dir);
    } catch (const std::exception& e) {
      problem = e.what();
    }
    plait::agree_on(ctx_.device, ranks_, problem, "--checkpoint-dir: ");
    newest_saved_ =
        static_cast<std::int64_t>(all_reduce(newest ? static_cast<double>(newest->step) : -1.0, plait::reduce_op::max));
    if (s_.opt.resume == "auto" && newest_saved_ >= 0) path = s_.opt.checkpoint_dir;
    if (!path.empty()) load(path);
    if (newest_saved_ > steps_before_)
      problem = plait::cat({"'", s_.opt.checkpoint_dir, "' has step ", newest_saved_, " already, and this run begins ",
                            "after step ", steps_before_, "; --resume auto goes on from the newest, and another ",
                            "directory takes what this run saves"});
    plait::agree_on(ctx_.device, ranks_, problem, "--checkpoint-dir: ");
    forget_best_elsewhere();
    if (best_.step >= 0 && saver_ && s_.opt.keep_best != "none")
      saver_->begin_with_best(static_cast<std::uint64_t>(best_.step));
    return steps_before_;
  }
  /// How many steps there were before this run.
  std::int64_t steps_before() const { return steps_before_; }
  std::int64_t newest_saved() const { return newest_saved_; }
  const best_step& best_saved() const { return best_; }

  /// Saves the state after so many steps.
  std::vector<plait::finished_save> save(std::int64_t steps, const best_step& best) {
    plait::saved_scalars scalars{{"train.steps", steps},
                                 {"train.samples", samples_before(steps)},
                                 {"train.seed", static_cast<std::int64_t>(s_.opt.seed)},
                                 {"train.seq", s_.opt.seq},
                                 {"train.data", data_text_},
                                 {"train.rate", steps > steps_before_ ? s_.rate_text : rate_text_},
                                 {"train.options", steps > steps_before_ ? training_text(s_) : options_text_},
                                 {"train.data_begin", data_begin_}};
    if (best.step >= 0) {
      scalars.emplace_back("train.best.step", best.step);
      scalars.emplace_back("train.best.held_out_loss", best.loss);
      if (s_.opt.keep_best != "none") saver_->keep_best(static_cast<std::uint64_t>(best.step));
    }
    return saver_->save(ctx_, model_, optimizer_, static_cast<std::uint64_t>(steps), {.scalars = std::move(scalars)});
  }
  std::vector<plait::finished_save> ended_saves(bool wait) {
    if (!saver_) return {};
    return wait ? saver_->wait(ctx_.device) : saver_->finished(ctx_.device);
  }
  std::vector<plait::finished_save> room_for_save() {
    return saver_ ? saver_->wait_for_room(ctx_.device) : std::vector<plait::finished_save>();
  }

  bool has_finished_save() const { return saver_ && saver_->has_finished_save(); }

  /// The samples that the run was trained on before step `index`.
  std::int64_t samples_before(std::int64_t index) const {
    return samples_before_ + (index - steps_before_) * s_.microbatches * s_.sequences;
  }
  /// The run's sample that was the first of its data.
  std::int64_t data_begin() const { return data_begin_; }

 private:
  void open_saver() {
    plait::file_system* files = nullptr;
    std::string problem;
    try {
      files = &checkpoint_files(s_.opt);
    } catch (const std::exception& e) {
      problem = e.what();
    }
    plait::agree_on(ctx_.device, ranks_, problem, "");
    try {
      saver_.emplace(
          ctx_.device, ranks_,
          plait::saver_options{
              .directory = s_.opt.checkpoint_dir,
              .keep = {.last = static_cast<std::uint64_t>(s_.opt.keep),
                       .every = static_cast<std::uint64_t>(s_.opt.keep_every)},
              .layout = s_.opt.mesh + ", " + s_.opt.data_parallel + ", schedule " + s_.opt.schedule + ", " +
                        precision_text(s_.opt),
              .is_ending = [] { return interrupted.load() != 0; },
              .pinned_bytes = s_.opt.checkpoint_staging == "pinned" ? std::numeric_limits<std::size_t>::max() : 0},
          *files);
    } catch (const plait::error_of_all& e) {
      throw plait::error_of_all(plait::cat({"--checkpoint-dir: ", e.what()}));
    }
  }

  /// Loads the state of the newest step in `path`, or of `path` itself.
  void load(const std::string& path) {
    plait::loaded_state loaded;
    try {
      loaded = plait::load_state(ctx_, ranks_, model_, optimizer_, path, {.in_place = true});  // an error ends the run
    } catch (const plait::no_optimizer_state& e) {
      throw plait::error_of_all(plait::cat({"--resume: ", e.what(), ", as --init-from does"}));
    } catch (const plait::error_of_all& e) {
      throw plait::error_of_all(plait::cat({"--resume: ", other_options_of(s_, path), e.what()}));
    }
    ctx_.ranks.ledger().clear();
    for (const plait::invalid_step& i : loaded.passed_over)
      std::fputs(plait::cat({"train_llama: --resume passes over '", i.path, "': ", i.reason, "\n"}).c_str(), stderr);
    check_resumed(s_, loaded);
    steps_before_ = loaded.scalar<std::int64_t>("train.steps");
    samples_before_ = loaded.scalar<std::int64_t>("train.samples");
    data_begin_ = loaded.find_scalar<std::int64_t>("train.data_begin").value_or(0);
    const std::string there = told_by(loaded, "train.data");
    if (!s_.data)
      data_text_ = there;
    else if (there != data_text_)
      data_begin_ = samples_before_;
    rate_text_ = told_by(loaded, "train.rate");
    options_text_ = loaded.find_scalar<std::string>("train.options").value_or("");
    if (const std::string other = changed_options(s_, loaded); !other.empty() && ranks_.rank() == 0)
      std::fputs(plait::cat({"train_llama: --resume: other options than before: ", other, "\n"}).c_str(), stderr);
    const auto has = [&](const char* scalar) {
      return std::any_of(loaded.scalars.begin(), loaded.scalars.end(),
                         [&](const auto& s) { return s.first == scalar; });
    };
    // A loss of other data, or of other tokens of them, says nothing of those to come.
    if (has("train.best.step") && (!s_.data || (there == data_text_ && !judges_otherwise(s_, loaded))))
      best_ = {loaded.scalar<std::int64_t>("train.best.step"), loaded.scalar<double>("train.best.held_out_loss")};
  }

  /// The best of a run is the best of what this directory has, or there is none yet.
  void forget_best_elsewhere() {
    if (best_.step < 0 || !saver_) return;
    std::string problem;
    bool here = false;
    try {
      const std::string path = s_.opt.checkpoint_dir + "/" + plait::step_name(static_cast<std::uint64_t>(best_.step));
      here = ranks_.rank() == 0 && plait::machine_files().kind_of(path) == plait::file_kind::directory;
    } catch (const std::exception& e) {
      problem = e.what();
    }
    plait::agree_on(ctx_.device, ranks_, problem, "--checkpoint-dir: ");
    if (all_reduce(here ? 1 : 0, plait::reduce_op::max) == 0) best_ = {};
  }

  double all_reduce(double value, plait::reduce_op op) {
    return plait::all_reduce_scalar(ctx_.device, ranks_, value, op);
  }

  const setup& s_;
  plait::context<Device>& ctx_;
  plait::any_communicator& ranks_;
  Model& model_;
  Optimizer& optimizer_;
  std::optional<plait::checkpoint_saver> saver_;
  std::int64_t steps_before_ = 0, samples_before_ = 0;  ///< where it was resumed
  std::int64_t data_begin_ = 0;
  std::string data_text_ = s_.data_text;  ///< of its data
  std::string rate_text_, options_text_;  ///< of the steps that were resumed
  best_step best_;                        ///< of --keep-best
  std::int64_t newest_saved_ = -1;        ///< in --checkpoint-dir, at the beginning
};
