// Saves training states while training goes on: every rank copies its share to host memory and returns; a thread of its
// own checksums and writes it, and rank 0's commits. Loading: checkpoint/load_state.hpp. What a step on disk is:
// checkpoint/step_directory.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plait/checkpoint/finished_save.hpp"
#include "plait/checkpoint/held_state.hpp"
#include "plait/checkpoint/plan_agreement.hpp"
#include "plait/checkpoint/share.hpp"
#include "plait/checkpoint/share_plan.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/tensor/broadcast_text.hpp"

namespace plait {

struct saver_options {
  std::string directory;   ///< made if it is missing; one job at a time may save there
  retention keep{};        ///< which steps stay
  std::string layout{};    ///< in words, for people who look at a step; empty: the extents of the mesh
  double deadline = 1800;  ///< seconds that rank 0 waits for the files of the others, from its own on
};

/// Saves steps of a job. Every member but the destructor is collective over `ranks`.
///
///     checkpoint_saver saver(device, ranks, {.directory = "checkpoints"});
///     saver.save(ctx, model, optimizer, step, {.scalars = scalars});        // copies, and returns
///     for (const finished_save& s : saver.finished(device)) report(s);       // once a step, for instance
///     for (const finished_save& s : saver.wait(device)) report(s);           // at the end
///
/// Two saves can be under way; a third waits for the first. Ranks that hold the same elements share the work of writing
/// them. The directory must be one for all ranks. A save that fails leaves the steps before it as they are.
class checkpoint_saver {
 public:
  template <compute_device Device>
  checkpoint_saver(Device& device, any_communicator ranks, saver_options options, file_system& files = machine_files())
      : ranks_(std::move(ranks)), options_(std::move(options)), files_(files) {
    std::string why;
    try {
      if (ranks_.rank() == 0) {
        root_.emplace(files_, options_.directory);
        root_->remove_leftovers();  // of jobs that were killed
      }
    } catch (const std::exception& e) {
      why = e.what();
    }
    why = broadcast_text(device, ranks_, why);
    if (!why.empty()) throw error_of_all(why);
    thread_ = std::thread([this] { work(); });
  }
  checkpoint_saver(const checkpoint_saver&) = delete;
  checkpoint_saver& operator=(const checkpoint_saver&) = delete;
  /// Waits for this rank's part of saves under way; rank 0 gives up those that others have not written.
  ~checkpoint_saver() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  /// Copies the state of this moment: the model's weights, what `optimizer` keeps of them, and `extras`. Throws
  /// `error_of_all` where the ranks' parts do not fit together (`agree_on_plan`), the step is there already, or its
  /// directory cannot be made. Returns the saves that it had
  /// to wait for.
  template <compute_device Device, class Model, class Optimizer>
  std::vector<finished_save> save(const context<Device>& ctx, Model& model, Optimizer& optimizer, std::uint64_t step,
                                  saved_extras extras = {}) {
    for (held_tensor& h : held_weights(ctx, model)) extras.tensors.push_back(std::move(h));
    for (held_tensor& h : held_optimizer(ctx, model, optimizer)) extras.tensors.push_back(std::move(h));
    extras.scalars.emplace_back("optimizer.step", std::int64_t{optimizer.step()});
    return save(ctx, step, std::move(extras));
  }
  /// Copies what a program holds, without a model.
  template <compute_device Device>
  std::vector<finished_save> save(const context<Device>& ctx, std::uint64_t step, saved_extras extras) {
    const auto begin = clock::now();
    std::vector<finished_save> before;
    while (jobs_.size() >= arenas_.size()) {
      for (finished_save& s : wait_for_one(ctx.device)) before.push_back(std::move(s));
    }
    auto next = std::make_unique<job>();
    next->step = step;
    next->scalars = std::move(extras.scalars);
    next->layout = options_.layout.empty() ? layout_text(ctx.ranks.shape()) : options_.layout;
    const share_plan plan = agreed_plan(ctx, step, extras);
    std::string answer;  // the directory, or, after a blank, why there is none
    try {
      if (ranks_.rank() == 0) {
        next->directory.emplace(root_->begin(step));
        answer = next->directory->path();
      }
    } catch (const std::exception& e) {
      answer = std::string(" ") + e.what();
    }
    answer = broadcast_text(ctx.device, ranks_, answer);
    if (answer.starts_with(' '))
      throw error_of_all(cat({"checkpoint: step ", step, " is not saved: ", answer.substr(1)}));
    next->path = answer;
    stage(plan, extras, *next);
    next->staged = clock::now();
    next->stall = seconds(begin, next->staged);
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(next));
    }
    changed_.notify_all();
    return before;
  }
  /// Returns the saves that have ended since the last call, and waits for none.
  template <compute_device Device>
  std::vector<finished_save> finished(Device& device) {
    std::vector<finished_save> all;
    while (!jobs_.empty()) {
      if (const auto one = take_ended(device))
        all.push_back(*one);
      else
        break;
    }
    return all;
  }
  /// Waits for all saves that are under way.
  template <compute_device Device>
  std::vector<finished_save> wait(Device& device) {
    std::vector<finished_save> all;
    while (!jobs_.empty())
      for (finished_save& s : wait_for_one(device)) all.push_back(std::move(s));
    return all;
  }
  std::size_t under_way() const { return jobs_.size(); }
  /// From now on step `best` is kept whatever its age, and the one before it no longer is for this reason. Not
  /// collective.
  void keep_best(std::uint64_t best) {
    const std::lock_guard lock(mutex_);
    options_.keep.best = best;
  }

 private:
  using clock = std::chrono::steady_clock;
  static double seconds(clock::time_point from, clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  }
  /// A save, from when it is staged until all ranks know its end.
  struct job {
    std::uint64_t step = 0;
    saved_scalars scalars;
    std::string layout, path;
    std::optional<step_in_progress> directory;  ///< on rank 0
    std::size_t arena = 0;
    staged_share share;
    clock::time_point staged;
    double stall = 0, background = 0;
    std::string failure, warning;
    bool ended = false;  ///< this rank's part; under the mutex
  };

  /// What rank 0 says where it has waited for a rank that failed otherwise.
  static constexpr const char* gave_up = "another rank has failed";

  static std::string layout_text(const mesh_shape& mesh) {
    if (mesh.size() == 1) return "one rank";
    std::string text;
    for (std::size_t i = 0; i < mesh.axes.size(); ++i)
      append(text, {i == 0 ? "" : ", ", mesh.axes[i].text(), "=", mesh.extents[i]});
    return text;
  }

  /// Plans what this rank writes, which fits what the others plan: a difference is told before anything is written.
  template <compute_device Device>
  share_plan agreed_plan(const context<Device>& ctx, std::uint64_t step, saved_extras& extras) {
    share_plan plan;
    std::string problem;
    try {
      plan = plan_share(ctx, extras.tensors);
    } catch (const std::exception& e) {
      problem = e.what();
    }
    agree_on_plan(ctx.device, ranks_, step, plan, problem);
    return plan;
  }

  /// Copies this rank's share into an arena that no save uses.
  void stage(const share_plan& plan, const saved_extras& extras, job& next) {
    next.share.boxes = plan.boxes;
    std::size_t bytes = plan.bytes;
    const std::size_t tensors = bytes;
    if (ranks_.rank() == 0) {
      for (const auto& [name, text] : extras.blobs) {
        next.share.blobs.emplace_back(name, text.size());
        bytes += text.size();
      }
    }
    next.arena = jobs_.empty() ? 0 : 1 - jobs_.front()->arena;
    byte_buffer& arena = arenas_[next.arena];
    arena.grow(bytes);
    for (const share_plan::copy& c : plan.copies) c.from->read(c.begin, c.end, arena.data() + c.to);
    std::size_t at = tensors;
    if (ranks_.rank() == 0) {
      for (const auto& [name, text] : extras.blobs) {
        std::memcpy(arena.data() + at, text.data(), text.size());
        at += text.size();
      }
    }
    next.share.bytes = std::span<const std::byte>(arena.data(), bytes);
  }

  // ---- the thread of this rank --------------------------------------------------------------------------------------

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      job* next = nullptr;
      changed_.wait(lock, [&] {
        for (const auto& j : jobs_) {
          if (next == nullptr && !j->ended) next = j.get();
        }
        return next != nullptr || ending_;
      });
      if (next == nullptr) return;
      lock.unlock();
      write(*next);
      lock.lock();
      if (next->background == 0) next->background = seconds(next->staged, clock::now());
      next->ended = true;
      changed_.notify_all();
    }
  }
  void write(job& j) {
    const auto writer = static_cast<std::uint32_t>(ranks_.rank());
    const std::string name = detail::writer_name(writer);
    try {
      const written_share done = write_share(files_, j.path, writer, j.share);
      if (writer == 0)
        commit(j, done);
      else
        leave(j.path, name + ".note", note_text(done));
    } catch (const std::exception& e) {
      j.failure = e.what();
      if (writer == 0) j.directory->abandon();
      try {
        if (writer != 0) leave(j.path, name + ".failed", j.failure);
      } catch (const std::exception&) {  // rank 0 learns of it when all ranks meet
      }
    }
  }
  /// Puts a text where rank 0 finds it whole. It is gone before the step is committed, and nobody syncs it.
  void leave(const std::string& directory, const std::string& name, const std::string& text) {
    const std::string path = directory + "/" + name;
    files_.create(path + ".tmp")->write(0, std::as_bytes(std::span(text)));
    files_.rename(path + ".tmp", path);
  }
  void commit(job& j, const written_share& own) {
    manifest all;
    all.step = j.step;
    all.layout = j.layout;
    all.scalars = std::move(j.scalars);
    std::map<std::string, std::size_t> known;
    add_share(all, known, own);
    const auto begin = clock::now();
    const auto waited = [&] { return std::chrono::duration_cast<std::chrono::milliseconds>(clock::now() - begin); };
    std::vector<bool> have(static_cast<std::size_t>(ranks_.size()), false);
    have[0] = true;
    std::size_t missing = have.size() - 1;
    for (auto pause = std::chrono::milliseconds(1); missing > 0;
         pause = std::clamp<std::chrono::milliseconds>(waited() / 16, pause, std::chrono::milliseconds(100))) {
      for (const directory_entry& entry : files_.list(j.path)) {
        const std::string path = j.path + "/" + entry.name;
        if (entry.name.ends_with(".failed"))
          fail({"rank ", detail::writer_of(entry.name), ": ", read_whole(files_, path)});
        if (!entry.name.ends_with(".note")) continue;
        add_share(all, known, parse_note(read_whole(files_, path)));
        files_.remove_file(path);
        have.at(detail::writer_of(entry.name)) = true;
        --missing;
      }
      if (missing == 0) break;
      const auto first = std::find(have.begin(), have.end(), false) - have.begin();
      if (seconds(begin, clock::now()) > options_.deadline)
        fail({missing, " of ", have.size(), " ranks, rank ", first, " among them, have written nothing within ",
              options_.deadline, " s (saver_options::deadline)"});
      std::unique_lock lock(mutex_);
      if (changed_.wait_for(lock, pause, [&] { return gone_ == &j || ending_; })) fail(gave_up);
    }
    j.warning = j.directory->commit(all);
    j.background = seconds(j.staged, clock::now());
    const retention keep = [&] {
      const std::lock_guard lock(mutex_);
      return options_.keep;
    }();
    const auto warn = [&](const std::string& what) { append(j.warning, {j.warning.empty() ? "" : "; ", what}); };
    try {
      const retained kept = root_->retain(keep);
      if (!kept.refusal.empty()) warn(kept.refusal);
    } catch (const std::exception& e) {  // the step is saved
      warn(cat({"older steps are not removed: ", e.what()}));
    }
  }

  // ---- where ranks meet ---------------------------------------------------------------------------------------------

  /// The oldest save, if all ranks may forget it: rank 0 has committed it, or some rank has failed.
  template <compute_device Device>
  std::optional<finished_save> take_ended(Device& device) {
    bool ended = false;
    job& j = *jobs_.front();
    {
      const std::lock_guard lock(mutex_);
      ended = j.ended;
    }
    const bool failed = ended && !j.failure.empty();
    const double state = failed ? 2 : ended && ranks_.rank() == 0 ? 1 : 0;
    const double all = all_reduce_scalar(device, ranks_, state, reduce_op::max);
    if (all == 0) return {};
    if (all == 2) {  // everybody comes to an end; rank 0 does not wait for files that will not come
      {
        const std::lock_guard lock(mutex_);
        gone_ = &j;
      }
      changed_.notify_all();
    }
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return j.ended; });
    }
    finished_save out{j.step, {}, j.share.bytes.size(), j.stall, j.background, j.warning};
    if (all == 2) {
      // A rank that failed by itself says so rather than rank 0, who may only have waited for it.
      const bool own = failed && !(ranks_.rank() == 0 && j.failure == gave_up);
      const double speaker =
          all_reduce_scalar(device, ranks_, own ? -static_cast<double>(ranks_.rank()) : -1e18, reduce_op::max);
      const int who = static_cast<int>(-speaker);
      out.failure = broadcast_text(device, ranks_, j.failure, who);
      if (who != 0) out.failure = cat({"rank ", who, ": ", out.failure});
    }
    {
      const std::lock_guard lock(mutex_);
      gone_ = nullptr;  // the next save may be made where this one was
      jobs_.pop_front();
    }
    return out;
  }
  template <compute_device Device>
  std::vector<finished_save> wait_for_one(Device& device) {
    while (true) {
      if (const auto one = take_ended(device)) return {*one};
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, std::chrono::milliseconds(5));
    }
  }

  any_communicator ranks_;
  saver_options options_;
  file_system& files_;
  std::optional<step_root> root_;  ///< on rank 0
  std::array<byte_buffer, 2> arenas_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<job>> jobs_;  ///< oldest first; changed by the rank's thread alone
  bool ending_ = false;
  const job* gone_ = nullptr;  ///< the save with which another rank has failed
  std::thread thread_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
