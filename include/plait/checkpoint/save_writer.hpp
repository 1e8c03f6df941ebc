// The thread of a rank that writes what a save has staged, and on rank 0 commits it when all ranks have written theirs.
// It calls no collective and knows no device; checkpoint/saver.hpp stages, and is where ranks meet.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/share.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/checkpoint/verify.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/io/file_system.hpp"

namespace plait::detail {

/// A save, from when it is staged until all ranks know its end.
struct save_job {
  using clock = std::chrono::steady_clock;

  std::uint64_t step = 0;
  saved_scalars scalars;
  std::string layout, path;
  retention keep{};                           ///< as it was when the save began
  std::optional<step_in_progress> directory;  ///< on rank 0
  std::size_t arena = 0;
  staged_share share;
  std::function<void()> copies_end{};         ///< waits until the device has filled the arena; none: it is filled
  std::vector<std::function<void()>> rest{};  ///< what makes elements of what was copied
  clock::time_point begin, staged;            ///< of `save`; when the arena was filled, as far as is known
  double stall = 0, background = 0;
  std::string failure, warning, damage;
  std::vector<stored_bytes> written{};  ///< the parts of this rank's file

  // Under the writer's mutex.
  const char* doing = "waiting for the save before it";
  clock::time_point since{};  ///< when it last went on
  bool ended = false;         ///< this rank's part
  bool abandoned = false;     ///< the others no longer wait for it
};

/// Writes jobs one after the other. Its thread holds it too: where a call of the file system never returns, the saver
/// leaves both behind, and the file system must outlive them.
class save_writer {
 public:
  using clock = save_job::clock;

  /// A rank says this where another has failed otherwise.
  static constexpr const char* gave_up = "another rank has failed";

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
  /// Before the first job: the best step that is there.
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
  /// Limits each call of the file system to `seconds` from now on.
  void hurry(double seconds) {
    const std::lock_guard lock(mutex_);
    patience_ = std::min(patience_, seconds);
  }
  /// Returns how many seconds a call of the file system may take.
  double patience() {
    const std::lock_guard lock(mutex_);
    return patience_;
  }
  /// Returns what a job has been at without going on for longer than the deadline, or nothing. Whoever waits for
  /// others has a deadline of its own.
  std::string stuck_at(const save_job& j) {
    const std::lock_guard lock(mutex_);
    return is_stuck(j) ? j.doing : "";
  }
  /// Whether the thread is still at a job that nobody waits for.
  bool lags() {
    const std::lock_guard lock(mutex_);
    return current_ != nullptr && (current_->abandoned || check_is_stuck());
  }
  /// A save is committed, as all ranks know. Where that is in turn, its file is read again when there is nothing else
  /// to do: once all ranks have read theirs, no rank has to read the step alone before older ones are removed.
  void committed(const save_job& j) {
    const std::string root = j.path.substr(0, j.path.rfind('/'));
    {
      const std::lock_guard lock(mutex_);
      if (!turns_.is_next(j.keep.last)) return;
      check_.emplace(j.step,
                     cat({root, "/", step_name(j.step), "/", data_file_name(static_cast<std::uint32_t>(rank_))}),
                     j.written);
    }
    changed_.notify_all();
  }
  /// Another rank has failed with the job: this one's part of it ends soon.
  void give_up(const save_job& j) {
    {
      const std::lock_guard lock(mutex_);
      gone_ = &j;
    }
    changed_.notify_all();
  }
  /// Returns once this rank's part of the job has ended; false where that goes on for longer than the deadline.
  bool end(const save_job& j) {
    std::unique_lock lock(mutex_);
    while (!j.ended) {
      if (is_stuck(j)) return false;
      changed_.wait_for(lock, std::chrono::milliseconds(20));
    }
    return true;
  }
  /// Takes the oldest job off, whether it has ended or not.
  void forget() {
    const std::lock_guard lock(mutex_);
    gone_ = nullptr;  // the next save may be made where this one was
    if (!jobs_.front()->ended) {
      jobs_.front()->abandoned = true;
      left_behind_.push_back(jobs_.front());
    }
    jobs_.pop_front();
  }
  /// Waits a moment for something to end.
  void wait_a_little() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::milliseconds(5));
  }
  /// Waits for the jobs that are left; rank 0 gives up those that others have not written. Leaves the thread behind
  /// where one is stuck, after a last moment.
  void finish() {
    std::unique_lock lock(mutex_);
    ending_ = true;
    changed_.notify_all();
    const auto begin = clock::now();
    const double moment = std::clamp(patience_, 1.0, 10.0);
    const auto stuck = [&] {
      return current_ != nullptr && seconds_since(begin) > moment &&
             (current_->abandoned || seconds_since(current_->since) > patience_);
    };
    while (!left_ && !stuck()) changed_.wait_for(lock, std::chrono::milliseconds(20));
    const bool left = left_;
    lock.unlock();
    if (left)
      thread_.join();
    else
      thread_.detach();
  }

 private:
  static double seconds(clock::time_point from, clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  }
  static double seconds_since(clock::time_point t) { return seconds(t, clock::now()); }

  /// Requires the mutex.
  bool is_stuck(const save_job& j) const {
    if (j.ended || current_ == nullptr) return false;
    return current_ == &j ? seconds_since(j.since) > patience_ : current_->abandoned || check_is_stuck();
  }
  /// Requires the mutex.
  bool check_is_stuck() const { return current_ == &checking_ && seconds_since(checking_.since) > patience_; }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      std::shared_ptr<save_job> next;
      changed_.wait(lock, [&] {
        for (const auto& j : jobs_) {
          if (next == nullptr && !j->ended) next = j;
        }
        return next != nullptr || ending_ || check_;
      });
      if (next == nullptr && ending_) break;
      if (next == nullptr) {
        check_a_piece(lock);
        continue;
      }
      current_ = next.get();
      next->doing = "writing its file";
      next->since = clock::now();
      lock.unlock();
      write(*next);
      lock.lock();
      if (next->background == 0) next->background = seconds_since(next->staged);
      next->ended = true;
      current_ = nullptr;
      changed_.notify_all();
      next.reset();
      const auto gone = std::exchange(left_behind_, {});
      lock.unlock();
      for (const auto& j : gone) {  // what there is of them is removed where the file system answers again
        if (j->directory) j->directory->abandon();
      }
      lock.lock();
    }
    check_.reset();
    root_.reset();  // the directory is free for others before anybody knows
    left_ = true;
    changed_.notify_all();
  }
  /// Reads again what is in turn, until that ends or there is something else to do.
  void check_a_piece(std::unique_lock<std::mutex>& lock) {
    std::optional<own_file_check> check = std::exchange(check_, std::nullopt);
    checking_.since = clock::now();
    current_ = &checking_;
    lock.unlock();
    const own_file_check::state state = check->go_on(files_);
    lock.lock();
    current_ = nullptr;
    changed_.notify_all();
    if (state == own_file_check::state::whole) {
      read_again_ = check->step();
    } else if (state == own_file_check::state::faulty) {
      turns_.forget();  // rank 0 will read the step, and say what is wrong
    } else if (!check_) {
      check_ = std::move(check);
    }
  }
  /// Says that a job is not stuck. Throws where nobody waits for it any more.
  void goes_on(save_job& j, const char* doing) {
    const std::lock_guard lock(mutex_);
    if (j.abandoned || gone_ == &j) fail(gave_up);
    j.doing = doing;
    j.since = clock::now();
  }
  bool is_given_up(const save_job& j) {
    const std::lock_guard lock(mutex_);
    return gone_ == &j;
  }
  void write(save_job& j) {
    const auto writer = static_cast<std::uint32_t>(rank_);
    const std::string name = writer_name(writer);
    try {
      if (j.copies_end) {
        goes_on(j, "waiting for the device's copies");
        std::exchange(j.copies_end, nullptr)();
        j.staged = clock::now();
      }
      if (!j.rest.empty()) {
        goes_on(j, "decoding what was copied");
        for (const std::function<void()>& make : std::exchange(j.rest, {})) make();
      }
      written_share done = write_share(files_, j.path, writer, j.share, [&] { goes_on(j, "writing its file"); });
      j.written = ranges_of(done);
      done.read_again = takes_the_place_of_all(j) && is_whole(j) ? j.step : read_again_;
      has_written_ = true;
      if (writer == 0)
        commit(j, done);
      else
        leave(j.path, name + ".note", note_text(done));
    } catch (const std::exception& e) {
      j.failure = is_given_up(j) ? gave_up : e.what();  // then rank 0 may have removed the directory
      if (writer == 0) j.directory->abandon();
      try {
        if (writer != 0) leave(j.path, name + ".failed", j.failure);
      } catch (const std::exception&) {  // rank 0 learns of it when all ranks meet
      }
    }
  }
  /// Whether only this step will stay: where each rank reads its own file again before the step is committed, rank 0
  /// need not read all of them alone before the older one goes.
  bool takes_the_place_of_all(const save_job& j) {
    if (j.keep.last > 1) return false;
    const std::string root = j.path.substr(0, j.path.rfind('/'));
    return has_written_ || !steps_by_name(files_, files_.list(root), root).empty();
  }
  /// Reads this rank's file again. Where it is not what was written, rank 0 will read the step, and say what is wrong.
  bool is_whole(save_job& j) {
    own_file_check check(j.step, j.path + "/" + data_file_name(static_cast<std::uint32_t>(rank_)), j.written);
    auto state = own_file_check::state::under_way;
    while (state == own_file_check::state::under_way) {
      goes_on(j, "reading its file again");
      state = check.go_on(files_);
    }
    return state == own_file_check::state::whole;
  }
  /// Puts a text where rank 0 finds it whole. It is gone before the step is committed, and nobody syncs it.
  void leave(const std::string& directory, const std::string& name, const std::string& text) {
    const std::string path = directory + "/" + name;
    files_.create(path + ".tmp")->write(0, std::as_bytes(std::span(text)));
    files_.rename(path + ".tmp", path);
  }
  /// Adds what the other ranks have written, as soon as it is there. `whole`, the step that this rank has read its part
  /// of again, is left if all others have, too.
  void collect(save_job& j, manifest& all, std::map<std::string, std::size_t>& known,
               std::optional<std::uint64_t>& whole) {
    const auto begin = clock::now();
    const auto waited = [&] { return std::chrono::duration_cast<std::chrono::milliseconds>(clock::now() - begin); };
    std::vector<bool> have(static_cast<std::size_t>(ranks_), false);
    have[0] = true;
    std::size_t missing = have.size() - 1;
    for (auto pause = std::chrono::milliseconds(1); missing > 0;
         pause = std::clamp<std::chrono::milliseconds>(waited() / 16, pause, std::chrono::milliseconds(100))) {
      goes_on(j, "waiting for the files of other ranks");
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
      if (changed_.wait_for(lock, pause, [&] { return gone_ == &j || ending_; })) fail(gave_up);
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
    goes_on(j, "committing the step");
    j.warning = j.directory->commit(all);
    j.background = seconds_since(j.staged);
    const auto warn = [&](const std::string& what) { append(j.warning, {j.warning.empty() ? "" : "; ", what}); };
    try {
      const retained kept = root_->retain(
          to_keep(j),
          [&](const committed_step& step) {
            const auto faults = verify_step(files_, step.path, [&] { goes_on(j, "verifying the steps that stay"); });
            goes_on(j, "removing older steps");
            if (step.step == j.step && !faults.empty()) j.damage = faults.front();
            return faults.empty() ? std::string() : faults.front();
          },
          whole);
      if (!kept.refusal.empty()) warn(kept.refusal);
    } catch (const std::exception& e) {  // the step is saved
      warn(cat({"older steps are not removed: ", e.what()}));
    }
  }
  /// The retention of a save. A best step that was never committed does not take the place of one that was.
  retention to_keep(const save_job& j) {
    retention keep = j.keep;
    if (keep.best && !files_.kind_of(path_in(root_->path(), step_name(*keep.best)))) keep.best = best_;
    best_ = keep.best;
    return keep;
  }

  file_system& files_;
  const int rank_, ranks_;
  const double deadline_;
  double patience_ = deadline_;    ///< with one call of the file system; under the mutex
  std::optional<step_root> root_;  ///< on rank 0
  std::optional<std::uint64_t> best_{};
  check_turns turns_;
  std::optional<own_file_check> check_;
  save_job checking_;                          ///< stands for it where `current_` is asked
  std::optional<std::uint64_t> read_again_{};  ///< the newest step whose file of this rank is whole on the disk
  bool has_written_ = false;
  std::array<byte_buffer, most_jobs> arenas_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<save_job>> jobs_;  ///< oldest first
  std::vector<std::shared_ptr<save_job>> left_behind_;
  const save_job* current_ = nullptr;  ///< which the thread is at
  const save_job* gone_ = nullptr;     ///< the save with which another rank has failed
  bool ending_ = false, left_ = false;
  std::thread thread_;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
