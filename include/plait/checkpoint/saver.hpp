// Saves training states while training continues. Each rank copies its shard to host memory, and a thread writes it.
// Rank 0 commits the step when all ranks have written theirs.
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
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "plait/checkpoint/agree.hpp"
#include "plait/checkpoint/held_state.hpp"
#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/share.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/checkpoint/verify.hpp"
#include "plait/comm/agreement.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/comm/world.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/io/file_system.hpp"
#include "plait/io/posix_file_system.hpp"

namespace plait {

namespace detail {

/// A save, from its staging until all ranks know its outcome.
struct save_job {
  using clock = std::chrono::steady_clock;

  std::uint64_t step = 0;
  saved_scalars scalars;
  std::string layout, path;
  retention keep{};                           ///< retention rules when the save began
  std::optional<step_in_progress> directory;  ///< on rank 0
  std::size_t arena = 0;
  staged_share share;
  std::function<void()> copies_end{};         ///< waits until the device has filled the arena; empty: already filled
  std::vector<std::function<void()>> rest{};  ///< functions that decode copied data into elements
  clock::time_point begin, staged;            ///< start of `save`; when the arena was filled, or the best estimate
  double stall = 0, background = 0;
  std::string failure, warning, damage;
  std::vector<stored_bytes> written{};  ///< the ranges of this rank's file

  // The writer's mutex guards the following members.
  const char* doing = "waiting for the save before it";
  clock::time_point since{};  ///< time of its last progress
  bool ended = false;         ///< this rank has written its file, or failed
  bool abandoned = false;     ///< other ranks no longer wait for it
};

/// The thread of a rank that writes jobs one after the other, without collectives or a device. The thread shares
/// ownership of this object. If a file system call never returns, the saver abandons both, so the file system must
/// outlive them.
class save_writer {
 public:
  using clock = save_job::clock;

  /// The failure of a rank that stopped because another one failed.
  static constexpr const char* stopped_for_another = "another rank has failed";

  save_writer(file_system& files, int rank, int ranks, double deadline, std::optional<step_root> root)
      : files_(files), rank_(rank), ranks_(ranks), deadline_(deadline), root_(std::move(root)) {}

  static std::shared_ptr<save_writer> start(file_system& files, int rank, int ranks, double deadline,
                                            std::optional<step_root> root) {
    auto writer = std::make_shared<save_writer>(files, rank, ranks, deadline, std::move(root));
    writer->thread_ = std::thread([writer] { writer->work(); });
    return writer;
  }

  step_root& root() { return *root_; }
  byte_buffer& arena(std::size_t i) { return arenas_[i]; }
  static constexpr std::size_t most_jobs = 2;
  /// Sets the best step that already exists. Called before the first job.
  void begin_with_best(std::uint64_t step) {
    const std::lock_guard lock(mutex_);
    best_ = step;
  }

  void add(std::shared_ptr<save_job> next) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(next));
    }
    changed_.notify_all();
  }
  bool has_ended(const save_job& j) {
    const std::lock_guard lock(mutex_);
    return j.ended;
  }
  /// Limits each later file system call to `seconds`.
  void limit_calls(double seconds) {
    const std::lock_guard lock(mutex_);
    patience_ = std::min(patience_, seconds);
  }
  /// Returns the time limit of a file system call, in seconds.
  double patience() {
    const std::lock_guard lock(mutex_);
    return patience_;
  }
  /// Returns the operation that a job has been in for longer than the deadline, or an empty text. Waiting for other
  /// ranks has a separate deadline.
  std::string stuck_at(const save_job& j) {
    const std::lock_guard lock(mutex_);
    return is_stuck(j) ? j.doing : "";
  }
  /// Whether the thread is still busy with an abandoned job.
  bool is_blocked() {
    const std::lock_guard lock(mutex_);
    return active_job_ != nullptr && (active_job_->abandoned || verification_is_stuck());
  }
  /// Called when all ranks know that a save is committed. If the step is due for verification, this rank re-reads its
  /// file while it is idle. Once all ranks have done so, rank 0 can remove older steps without reading the whole step.
  void committed(const save_job& j) {
    const std::string root = j.path.substr(0, j.path.rfind('/'));
    {
      const std::lock_guard lock(mutex_);
      if (!verification_turns_.is_next(j.keep.last)) return;
      verification_.emplace(j.step,
                            cat({root, "/", step_name(j.step), "/", data_file_name(static_cast<std::uint32_t>(rank_))}),
                            j.written);
    }
    changed_.notify_all();
  }
  /// Stops this rank's part of a job that failed on another rank.
  void stop(const save_job& j) {
    {
      const std::lock_guard lock(mutex_);
      failed_elsewhere_ = &j;
    }
    changed_.notify_all();
  }
  /// Waits for this rank's part of the job; returns false after the deadline.
  bool wait_for_end(const save_job& j) {
    std::unique_lock lock(mutex_);
    while (!j.ended) {
      if (is_stuck(j)) return false;
      changed_.wait_for(lock, std::chrono::milliseconds(20));
    }
    return true;
  }
  /// Removes the oldest job, even if it has not ended.
  void forget() {
    const std::lock_guard lock(mutex_);
    failed_elsewhere_ = nullptr;  // the next job may get the same address
    if (!jobs_.front()->ended) {
      jobs_.front()->abandoned = true;
      abandoned_jobs_.push_back(jobs_.front());
    }
    jobs_.pop_front();
  }
  /// Waits until a job or a verification changes its state, at most for `limit`.
  void wait_for_change(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, limit);
  }
  /// Waits for the remaining jobs. Rank 0 abandons jobs for which other ranks' files are missing. Detaches the thread
  /// if it is stuck after `patience`, at most ten seconds.
  void finish() {
    std::unique_lock lock(mutex_);
    ending_ = true;
    changed_.notify_all();
    const auto begin = clock::now();
    const double moment = std::clamp(patience_, 1.0, 10.0);
    const auto stuck = [&] {
      return active_job_ != nullptr && seconds_since(begin) > moment &&
             (active_job_->abandoned || seconds_since(active_job_->since) > patience_);
    };
    while (!thread_exited_ && !stuck()) changed_.wait_for(lock, std::chrono::milliseconds(20));
    const bool exited = thread_exited_;
    lock.unlock();
    if (exited)
      thread_.join();
    else
      thread_.detach();
  }

 private:
  static double seconds(clock::time_point from, clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  }
  static double seconds_since(clock::time_point t) { return seconds(t, clock::now()); }

  /// Requires mutex_.
  bool is_stuck(const save_job& j) const {
    if (j.ended || active_job_ == nullptr) return false;
    return active_job_ == &j ? seconds_since(j.since) > patience_ : active_job_->abandoned || verification_is_stuck();
  }
  /// Requires mutex_.
  bool verification_is_stuck() const {
    return active_job_ == &verification_job_ && seconds_since(verification_job_.since) > patience_;
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      std::shared_ptr<save_job> next;
      changed_.wait(lock, [&] {
        for (const auto& j : jobs_) {
          if (next == nullptr && !j->ended) next = j;
        }
        return next != nullptr || ending_ || verification_;
      });
      if (next == nullptr && ending_) break;
      if (next == nullptr) {
        verify_some(lock);
        continue;
      }
      active_job_ = next.get();
      next->doing = "writing its file";
      next->since = clock::now();
      lock.unlock();
      write(*next);
      lock.lock();
      if (next->background == 0) next->background = seconds_since(next->staged);
      next->ended = true;
      active_job_ = nullptr;
      changed_.notify_all();
      next.reset();
      const auto gone = std::exchange(abandoned_jobs_, {});
      lock.unlock();
      for (const auto& j : gone) {  // removes their directories once the file system responds again
        if (j->directory) j->directory->abandon();
      }
      lock.lock();
    }
    verification_.reset();
    root_.reset();  // releases the directory before `finish` returns
    thread_exited_ = true;
    changed_.notify_all();
  }
  /// Re-reads some bytes of the file that is due for verification. Requires mutex_, and releases it during the read.
  void verify_some(std::unique_lock<std::mutex>& lock) {
    std::optional<own_file_check> check = std::exchange(verification_, std::nullopt);
    verification_job_.since = clock::now();
    active_job_ = &verification_job_;
    lock.unlock();
    const own_file_check::state state = check->read_next(files_);
    lock.lock();
    active_job_ = nullptr;
    changed_.notify_all();
    if (state == own_file_check::state::whole) {
      read_again_ = check->step();
    } else if (state == own_file_check::state::faulty) {
      verification_turns_.forget();  // rank 0 reads the step and reports the fault
    } else if (!verification_) {
      verification_ = std::move(check);
    }
  }
  /// Notes that a job has made progress and is not stuck.
  void report_progress(save_job& j, const char* doing) {
    const std::lock_guard lock(mutex_);
    j.doing = doing;
    j.since = clock::now();
  }
  /// Throws if the job was abandoned, or has failed on another rank.
  void require_wanted(const save_job& j) {
    const std::lock_guard lock(mutex_);
    if (j.abandoned || failed_elsewhere_ == &j) fail(stopped_for_another);
  }
  /// Begins the next operation of a job. Throws if no rank needs the job any more.
  void begin_operation(save_job& j, const char* doing) {
    require_wanted(j);
    report_progress(j, doing);
  }
  bool is_stopped(const save_job& j) {
    const std::lock_guard lock(mutex_);
    return failed_elsewhere_ == &j;
  }
  void write(save_job& j) {
    const auto writer = static_cast<std::uint32_t>(rank_);
    const std::string name = writer_name(writer);
    try {
      if (j.copies_end) {
        begin_operation(j, "waiting for the device's copies");
        std::exchange(j.copies_end, nullptr)();
        j.staged = clock::now();
      }
      if (!j.rest.empty()) {
        begin_operation(j, "decoding copied data");
        for (const std::function<void()>& make : std::exchange(j.rest, {})) make();
      }
      written_share done =
          write_share(files_, j.path, writer, j.share, [&] { begin_operation(j, "writing its file"); });
      j.written = ranges_of(done);
      done.read_again = takes_the_place_of_all(j) && is_whole(j) ? j.step : read_again_;
      has_written_ = true;
      if (writer == 0)
        commit(j, done);
      else
        leave_text(j.path, name + ".note", note_text(done));
    } catch (const std::exception& e) {
      j.failure = is_stopped(j) ? stopped_for_another : e.what();  // rank 0 may have removed the directory
      if (writer == 0) j.directory->abandon();
      try {
        if (writer != 0) leave_text(j.path, name + ".failed", j.failure);
      } catch (const std::exception&) {  // rank 0 sees the failure in take_ended
      }
    }
  }
  /// Whether only this step will be kept. Each rank then re-reads its file before the commit, so that rank 0 can remove
  /// the older step without reading all files.
  bool takes_the_place_of_all(const save_job& j) {
    if (j.keep.last > 1) return false;
    const std::string root = j.path.substr(0, j.path.rfind('/'));
    return has_written_ || !steps_by_name(files_, files_.list(root), root).empty();
  }
  /// Re-reads this rank's file, and returns whether it equals the written data. If not, rank 0 reads the step and
  /// reports the fault.
  bool is_whole(save_job& j) {
    own_file_check check(j.step, j.path + "/" + data_file_name(static_cast<std::uint32_t>(rank_)), j.written);
    auto state = own_file_check::state::unfinished;
    while (state == own_file_check::state::unfinished) {
      begin_operation(j, "reading its file again");
      state = check.read_next(files_);
    }
    return state == own_file_check::state::whole;
  }
  /// Writes a text for rank 0, which removes it before the commit. The file is not synced.
  void leave_text(const std::string& directory, const std::string& name, const std::string& text) {
    const std::string path = directory + "/" + name;
    files_.create(path + ".tmp")->write(0, std::as_bytes(std::span(text)));
    files_.rename(path + ".tmp", path);
  }
  /// Adds the files of the other ranks as they arrive. Resets `whole`, the step that this rank has verified, unless all
  /// others have verified it too.
  void collect(save_job& j, manifest& all, std::map<std::string, std::size_t>& known,
               std::optional<std::uint64_t>& whole) {
    const auto begin = clock::now();
    const auto waited = [&] { return std::chrono::duration_cast<std::chrono::milliseconds>(clock::now() - begin); };
    std::vector<bool> have(static_cast<std::size_t>(ranks_), false);
    have[0] = true;
    std::size_t missing = have.size() - 1;
    for (auto pause = std::chrono::milliseconds(1); missing > 0;
         pause = std::clamp<std::chrono::milliseconds>(waited() / 16, pause, std::chrono::milliseconds(100))) {
      begin_operation(j, "waiting for the files of other ranks");
      for (const directory_entry& entry : files_.list(j.path)) {
        const std::string path = j.path + "/" + entry.name;
        if (entry.name.ends_with(".failed")) fail({"rank ", writer_of(entry.name), ": ", read_whole(files_, path)});
        if (!entry.name.ends_with(".note")) continue;
        const written_share theirs = parse_note(read_whole(files_, path));
        if (theirs.read_again != whole) whole.reset();
        add_share(all, known, theirs);
        files_.remove_file(path);
        have.at(writer_of(entry.name)) = true;
        --missing;
      }
      if (missing == 0) break;
      const auto first = std::find(have.begin(), have.end(), false) - have.begin();
      if (seconds_since(begin) > deadline_)
        fail({missing, " of ", have.size(), " ranks, rank ", first, " among them, have written nothing within ",
              deadline_, " s (saver_options::deadline)"});
      std::unique_lock lock(mutex_);
      if (changed_.wait_for(lock, pause, [&] { return failed_elsewhere_ == &j || ending_; })) fail(stopped_for_another);
    }
  }
  void commit(save_job& j, const written_share& own) {
    manifest all;
    all.step = j.step;
    all.layout = j.layout;
    all.scalars = std::move(j.scalars);
    std::map<std::string, std::size_t> known;
    add_share(all, known, own);
    std::optional<std::uint64_t> whole = own.read_again;
    collect(j, all, known, whole);
    begin_operation(j, "committing the step");
    j.warning = j.directory->commit(all);
    j.background = seconds_since(j.staged);
    const auto warn = [&](const std::string& what) { append(j.warning, {j.warning.empty() ? "" : "; ", what}); };
    try {
      const retained kept = root_->retain(
          to_keep(j),
          [&](const committed_step& step) {
            const auto faults =
                verify_step(files_, step.path, [&] { begin_operation(j, "verifying the steps that stay"); });
            begin_operation(j, "removing older steps");
            if (step.step == j.step && !faults.empty()) j.damage = faults.front();
            return faults.empty() ? std::string() : faults.front();
          },
          whole);
      if (!kept.refusal.empty()) warn(kept.refusal);
    } catch (const std::exception& e) {  // the step is saved: this is only a warning
      warn(cat({"older steps are not removed: ", e.what()}));
    }
  }
  /// Returns the retention of a save. A best step that was never committed does not replace one that was.
  retention to_keep(const save_job& j) {
    retention keep = j.keep;
    if (keep.best && !files_.kind_of(path_in(root_->path(), step_name(*keep.best)))) keep.best = best_;
    best_ = keep.best;
    return keep;
  }

  file_system& files_;
  const int rank_, ranks_;
  const double deadline_;
  double patience_ = deadline_;    ///< time limit of a file system call, in seconds; guarded by mutex_
  std::optional<step_root> root_;  ///< on rank 0
  std::optional<std::uint64_t> best_{};
  check_turns verification_turns_;
  std::optional<own_file_check> verification_;
  save_job verification_job_;                  ///< `active_job_` points to it during a verification
  std::optional<std::uint64_t> read_again_{};  ///< the newest step whose file of this rank was verified
  bool has_written_ = false;
  std::array<byte_buffer, most_jobs> arenas_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<save_job>> jobs_;  ///< oldest first
  std::vector<std::shared_ptr<save_job>> abandoned_jobs_;
  const save_job* active_job_ = nullptr;        ///< the job that the thread is writing
  const save_job* failed_elsewhere_ = nullptr;  ///< the save that failed on another rank
  bool ending_ = false, thread_exited_ = false;
  std::thread thread_;
};

}  // namespace detail

struct saver_options {
  std::string directory;  ///< created if it is missing; only one program at a time may save there
  retention keep{};       ///< which steps are kept
  std::string layout{};   ///< a text for people who examine a step; empty: the extents of the mesh
  /// Seconds that rank 0 waits for the other ranks' files after its own is written. It is also the time limit of a file
  /// system call on any rank.
  double deadline = 1800;
  /// Returns whether the program is ending, as after a signal. A file system call may then take at most
  /// `ending_deadline` seconds; the sync of a large file takes longest. The thread that waits for saves calls it.
  std::function<bool()> is_ending{};
  double ending_deadline = 120;
  /// On a GPU: the bytes of host memory that this rank may pin for its two staging arenas. Each arena is as large as
  /// the rank's share. A save that needs more is refused. With 0 the arenas are pageable: the driver copies by way of
  /// its own pinned memory, and the host waits for every tensor.
  std::size_t pinned_bytes = std::numeric_limits<std::size_t>::max();
};

/// Saves steps of a job. Every member but the destructor is collective over `ranks`.
///
///     checkpoint_saver saver(device, ranks, {.directory = "checkpoints"});
///     saver.save(ctx, model, optimizer, step, {.scalars = scalars});        // copies, and returns
///     for (const finished_save& s : saver.finished(device)) report(s);       // once a step, for instance
///     for (const finished_save& s : saver.wait(device)) report(s);           // at the end
///
/// Two saves can be in progress; a third waits for the first. Ranks that hold equal elements share the work of writing
/// them. The constructor refuses a directory that is not the same for all ranks. A failed save leaves the earlier steps
/// unchanged.
///
/// Old steps are removed only after every byte of a kept step has been compared with its checksum. Each rank reads its
/// own file for this, between saves or, if only the newest step is kept, before the commit. Rank 0 reads the whole step
/// if that was not done or found a fault. If the file system does not respond, saves in progress fail after the
/// deadline, and later ones fail until it responds.
class checkpoint_saver {
 public:
  template <compute_device Device>
  checkpoint_saver(Device& device, any_communicator ranks, saver_options options, file_system& files = machine_files())
      : ranks_(std::move(ranks)), options_(std::move(options)) {
    std::optional<step_root> root;
    text_of_rank_0(device, ranks_, "", [&] {
      if (options_.keep.last < 1) fail("saver_options::keep.last is 0; legal is at least 1, the newest step");
      root.emplace(files, options_.directory);
      root->remove_leftovers();  // from jobs that were killed
      return root->path();
    });
    require_one_directory(device, ranks_, options_.directory, "", files);
    writer_ = detail::save_writer::start(files, ranks_.rank(), ranks_.size(), options_.deadline, std::move(root));
  }
  checkpoint_saver(const checkpoint_saver&) = delete;
  checkpoint_saver& operator=(const checkpoint_saver&) = delete;
  /// Waits for this rank's part of saves in progress. Rank 0 abandons saves for which other ranks' files are missing.
  /// If a file system call does not return, the thread is detached, and the file system must outlive it.
  ~checkpoint_saver() { writer_->finish(); }

  /// Saves the current state: the model's weights, the state of `optimizer`, and `extras`. Throws `error_of_all` if the
  /// ranks' parts do not fit together (`agree_on_plan`), or memory for the copy is exhausted. It also throws if the
  /// step exists, its directory cannot be made, or an earlier save is stuck. Returns the saves that it had to wait for.
  ///
  /// On a GPU the copies go to pinned memory in the main stream, so the next update runs after them. The host returns
  /// at once and prepares the next step. The GPU begins that step when the last byte is copied, and
  /// `finished_save::stall` counts until then. A separate stream would need a wait in everything that writes states in
  /// place: a replayed graph, a load, the allocator. One missing wait would corrupt a save, and no checksum would
  /// detect it. Moments in 8 bits are copied as codes, and decoded while training continues.
  template <compute_device Device, class Model, class Optimizer>
  std::vector<finished_save> save(const context<Device>& ctx, Model& model, Optimizer& optimizer, std::uint64_t step,
                                  saved_extras extras = {}) {
    for (held_tensor& h : held_state(ctx, model, optimizer)) extras.tensors.push_back(std::move(h));
    extras.scalars.emplace_back("optimizer.step", std::int64_t{optimizer.step()});
    if constexpr (requires { optimizer.missed_steps(); })
      for (auto& [name, missed] : of_all_ranks(ctx.device, optimizer.missed_steps()))
        extras.scalars.emplace_back(detail::missed_prefix + name, missed);
    return save(ctx, step, std::move(extras));
  }
  /// Saves what a program holds, without a model.
  template <compute_device Device>
  std::vector<finished_save> save(const context<Device>& ctx, std::uint64_t step, saved_extras extras) {
    const auto begin = clock::now();
    unreported_ = wait_for_room(ctx.device);
    if (all_reduce_scalar(ctx.device, ranks_, writer_->is_blocked() ? 1.0 : 0.0, reduce_op::max) != 0)
      throw error_of_all(cat(
          {"checkpoint: step ", step, " is not saved: a save before it is stuck in a call of the ", "file system"}));
    agree_on_scalars(ctx.device, step, extras.scalars);
    auto next = std::make_shared<detail::save_job>();
    next->begin = begin;
    next->step = step;
    next->keep = options_.keep;
    next->scalars = std::move(extras.scalars);
    next->layout = options_.layout.empty() ? text_of(ctx.ranks.shape()) : options_.layout;
    const share_plan plan = agreed_plan(ctx, step, extras, *next);
    next->path = text_of_rank_0(ctx.device, ranks_, cat({"checkpoint: step ", step, " is not saved: "}), [&] {
      next->directory.emplace(writer_->root().begin(step));
      return next->directory->path();
    });
    try {
      stage(plan, extras, *next);
    } catch (...) {  // the device may still write earlier copies to the arena
      ctx.device.main_stream().synchronize();
      throw;
    }
    if constexpr (downloads_later<Device>) next->copies_end = ctx.device.waiter(ctx.device.main_stream());
    next->staged = clock::now();
    next->stall = std::chrono::duration<double>(next->staged - begin).count();
    jobs_.push_back(next);
    writer_->add(std::move(next));
    return std::exchange(unreported_, {});
  }
  /// Returns the saves that have ended since the last call. Does not wait.
  template <compute_device Device>
  std::vector<finished_save> finished(Device& device) {
    std::vector<finished_save> all = std::exchange(unreported_, {});
    while (!jobs_.empty()) {
      const auto some = take_ended(device);
      if (some.empty()) break;
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }
  /// Waits for all saves in progress.
  template <compute_device Device>
  std::vector<finished_save> wait(Device& device) {
    std::vector<finished_save> all = std::exchange(unreported_, {});
    while (!jobs_.empty())
      for (finished_save& s : wait_for_one(device)) all.push_back(std::move(s));
    return all;
  }
  /// Waits until another save could begin at once, and returns the saves that have ended. Call it if their outcome
  /// decides what to save next.
  template <compute_device Device>
  std::vector<finished_save> wait_for_room(Device& device) {
    while (jobs_.size() >= detail::save_writer::most_jobs)
      for (finished_save& s : wait_for_one(device)) unreported_.push_back(std::move(s));
    return std::exchange(unreported_, {});
  }
  /// Returns whether this rank knows the outcome of a save. While no rank does, `finished` returns nothing. So a
  /// program can add this to another reduction and skip the call. Not collective.
  bool has_finished_save() const {
    std::string stuck_at;
    return !unreported_.empty() || (!jobs_.empty() && own_state(*jobs_.front(), stuck_at) != unfinished);
  }
  /// Keeps step `best` at any age, from the next save on; it may be the next save's step. Once it is committed, the
  /// previous best step is no longer kept for this reason. Not collective.
  void keep_best(std::uint64_t best) { options_.keep.best = best; }
  /// For a resumed job, before its first save: step `best` exists, and is kept until another best step is committed.
  /// Not collective.
  void begin_with_best(std::uint64_t best) {
    keep_best(best);
    writer_->begin_with_best(best);
  }

 private:
  using clock = detail::save_job::clock;

  /// Returns the union of all ranks' entries, because each rank has only its stages' parameters. Collective.
  template <class Device>
  std::map<std::string, std::int64_t> of_all_ranks(Device& device, std::map<std::string, std::int64_t> own) {
    if (all_reduce_scalar(device, ranks_, own.empty() ? 0.0 : 1.0, reduce_op::max) == 0) return own;
    manifest mine;
    for (const auto& [name, number] : own) mine.scalars.emplace_back(name, number);
    for (const std::string& text : gather_texts(device, ranks_, detail::unchecked_text(mine)))
      for (const auto& [name, number] : detail::manifest_from(text, "the numbers of a rank").scalars)
        own.emplace(name, std::get<std::int64_t>(number));
    return own;
  }
  /// Throws if ranks would save different scalars, because rank 0's are restored on all ranks.
  template <compute_device Device>
  void agree_on_scalars(Device& device, std::uint64_t step, const saved_scalars& scalars) {
    std::vector<setting> values;
    for (const auto& [name, scalar] : scalars)
      values.push_back({name, std::visit(
                                  [](const auto& v) {
                                    using type = std::decay_t<decltype(v)>;
                                    if constexpr (std::is_same_v<type, double>)
                                      return exact_text(v);
                                    else if constexpr (std::is_same_v<type, std::string>)
                                      return v;
                                    else
                                      return std::to_string(v);
                                  },
                                  scalar)});
    detail::require_equal_values(device, ranks_, cat({"checkpoint: step ", step, " is not saved"}), values);
  }

  /// Plans what this rank writes, and allocates memory for it. If the ranks' plans do not fit together, throws before
  /// anything is written.
  template <compute_device Device>
  share_plan agreed_plan(const context<Device>& ctx, std::uint64_t step, saved_extras& extras, detail::save_job& next) {
    share_plan plan;
    std::string problem;
    try {
      plan = plan_share(ctx, extras.tensors);
      assign_arena<Device>(plan.bytes, extras, next);
    } catch (const std::exception& e) {
      problem = e.what();
    }
    agree_on_plan(ctx.device, ranks_, step, plan, problem);
    return plan;
  }

  /// Gives a save an unused arena, for a rank's tensors and, on rank 0, the blobs.
  template <compute_device Device>
  void assign_arena(std::size_t bytes, const saved_extras& extras, detail::save_job& next) {
    if (ranks_.rank() == 0) {
      for (const auto& [name, text] : extras.blobs) {
        next.share.blobs.emplace_back(name, text.size());
        bytes += text.size();
      }
    }
    next.arena = jobs_.empty() ? 0 : 1 - jobs_.front()->arena;
    byte_buffer& arena = writer_->arena(next.arena);
    host_memory from{};
    if constexpr (downloads_later<Device>) {
      if (options_.pinned_bytes > 0) {
        const std::size_t all = std::max(bytes, arena.size()) + writer_->arena(1 - next.arena).size();
        if (all > options_.pinned_bytes)
          fail({"to stage ", bytes, " bytes, this rank would have ", all, " bytes of pinned memory, and ",
                "saver_options::pinned_bytes is ", options_.pinned_bytes,
                "; allow it more, or 0, with which saves are staged in pageable memory and wait longer"});
        from = Device::memory_for_downloads();
      }
    }
    arena.grow(bytes, from);
    next.share.bytes = std::span<const std::byte>(arena.data(), bytes);
  }
  /// Copies this rank's share into its arena.
  void stage(const share_plan& plan, const saved_extras& extras, detail::save_job& next) {
    next.share.boxes = plan.boxes;
    byte_buffer& arena = writer_->arena(next.arena);
    for (const share_plan::copy& c : plan.copies) {
      std::byte* const to = arena.data() + c.to;
      if (!c.from->read_raw)
        c.from->read(c.begin, c.end, to);
      else if (std::function<void()> rest = c.from->read_raw(c.begin, c.end, to))
        next.rest.push_back(std::move(rest));
    }
    std::size_t at = plan.bytes;
    if (ranks_.rank() == 0) {
      for (const auto& [name, text] : extras.blobs) {
        std::memcpy(arena.data() + at, text.data(), text.size());
        at += text.size();
      }
    }
  }

  // ---- collective decisions on saves --------------------------------------------------------------------------------

  /// The state of a save on one rank. The maximum over the ranks decides for all.
  enum state { unfinished, committed, failed, stuck };

  /// Returns the state of a save on this rank. Sets `stuck_at` to the operation in which it is stuck, or to an empty
  /// text.
  state own_state(const detail::save_job& j, std::string& stuck_at) const {
    if (options_.is_ending && options_.is_ending()) writer_->limit_calls(options_.ending_deadline);
    stuck_at = writer_->stuck_at(j);
    if (!stuck_at.empty()) return stuck;
    if (!writer_->has_ended(j)) return unfinished;
    return !j.failure.empty() ? failed : ranks_.rank() == 0 ? committed : unfinished;
  }
  /// Returns the oldest save, if all ranks may drop it: rank 0 has committed it, or some rank has failed. If a rank is
  /// stuck in it, returns all saves.
  template <compute_device Device>
  std::vector<finished_save> take_ended(Device& device) {
    detail::save_job& j = *jobs_.front();
    std::string stuck_at;
    const state mine = own_state(j, stuck_at);
    const auto all = static_cast<int>(all_reduce_scalar(device, ranks_, static_cast<double>(mine), reduce_op::max));
    if (all == unfinished) return {};
    if (all == stuck) return fail_all(device, stuck_at);
    if (all == failed) {  // all ranks end this save, without blocking training
      writer_->stop(j);
      if (all_reduce_scalar(device, ranks_, writer_->has_ended(j) ? 0.0 : 1.0, reduce_op::max) != 0) return {};
    }
    const bool here = writer_->wait_for_end(j);
    finished_save out = outcome_of(j, here);
    if (all == failed) {
      // Report the rank whose own write failed, not ranks that succeeded or stopped because of it.
      const bool own = here && !j.failure.empty() && j.failure != detail::save_writer::stopped_for_another;
      out.failure = first_error_of(device, own, here ? j.failure : std::string());
    }
    if (all == committed && here) writer_->committed(j);
    writer_->forget();
    jobs_.pop_front();
    return {out};
  }
  /// Fails all saves in progress, because one of them is stuck.
  template <compute_device Device>
  std::vector<finished_save> fail_all(Device& device, const std::string& stuck_at) {
    const std::string why = first_error_of(
        device, !stuck_at.empty(),
        cat({"it has been ", stuck_at, " for more than ", writer_->patience(),
             " s in one call of the file system or the device, which does not answer (saver_options::deadline)"}));
    std::vector<finished_save> all;
    for (; !jobs_.empty(); jobs_.pop_front()) {
      all.push_back(outcome_of(*jobs_.front(), false));
      all.back().failure = all.size() == 1 ? why : cat({"step ", all.front().step, " before it is stuck: ", why});
      writer_->forget();
    }
    return all;
  }
  /// Returns the text of the first rank that `has_failed`, with its number unless it is rank 0. Collective.
  template <compute_device Device>
  std::string first_error_of(Device& device, bool has_failed, const std::string& text) {
    const double first =
        all_reduce_scalar(device, ranks_, has_failed ? -static_cast<double>(ranks_.rank()) : -1e18, reduce_op::max);
    const int rank = static_cast<int>(-first);
    const std::string error = broadcast_text(device, ranks_, text, rank);
    return rank == 0 ? error : cat({"rank ", rank, ": ", error});
  }
  /// Returns the outcome of a job. Unless it has `ended`, members that the writer may still change are left out.
  static finished_save outcome_of(const detail::save_job& j, bool ended) {
    finished_save out{.step = j.step, .bytes = j.share.bytes.size(), .stall = j.stall};
    if (!ended) return out;
    out.background = j.background;
    out.warning = j.warning;
    out.damage = j.damage;
    out.stall = std::max(j.stall, std::chrono::duration<double>(j.staged - j.begin).count());
    return out;
  }
  template <compute_device Device>
  std::vector<finished_save> wait_for_one(Device& device) {
    while (true) {
      if (auto some = take_ended(device); !some.empty()) return some;
      writer_->wait_for_change(std::chrono::milliseconds(5));
    }
  }

  any_communicator ranks_;
  saver_options options_;
  std::deque<std::shared_ptr<detail::save_job>> jobs_;  ///< oldest first, as in the writer
  std::vector<finished_save> unreported_;               ///< finished saves not yet returned to the caller
  std::shared_ptr<detail::save_writer> writer_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
