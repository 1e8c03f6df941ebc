// Saves training states while training goes on: every rank copies its share to host memory and returns; a thread of its
// own checksums and writes it, and rank 0's commits. Loading: checkpoint/load_state.hpp. What a step on disk is:
// checkpoint/step_directory.hpp.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "plait/checkpoint/agree.hpp"
#include "plait/checkpoint/held_state.hpp"
#include "plait/checkpoint/save_plan.hpp"
#include "plait/checkpoint/save_writer.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/comm/agreement.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/tensor/broadcast_text.hpp"

namespace plait {

struct saver_options {
  std::string directory;   ///< made if it is missing; one job at a time may save there
  retention keep{};        ///< which steps stay
  std::string layout{};    ///< in words, for people who look at a step; empty: the extents of the mesh
  double deadline = 1800;  ///< seconds that rank 0 waits for the files of the others, from its own on, and that a call
                           ///< of the file system may take on any rank
  /// Returns whether the program is to end, as after a signal: then such a call may take no more than `ending_deadline`
  /// seconds, of which a sync of a large file takes the most. Called from the thread that waits for saves.
  std::function<bool()> is_ending{};
  double ending_deadline = 120;
  /// On a GPU: how many bytes of the host's memory this rank may pin for its two staging arenas, each as large as its
  /// share; a save that needs more is refused. With 0 they are pageable: a driver copies to its own pinned memory
  /// first, and the host waits for every tensor.
  std::size_t pinned_bytes = std::numeric_limits<std::size_t>::max();
};

/// Saves steps of a job. Every member but the destructor is collective over `ranks`.
///
///     checkpoint_saver saver(device, ranks, {.directory = "checkpoints"});
///     saver.save(ctx, model, optimizer, step, {.scalars = scalars});        // copies, and returns
///     for (const finished_save& s : saver.finished(device)) report(s);       // once a step, for instance
///     for (const finished_save& s : saver.wait(device)) report(s);           // at the end
///
/// Two saves can be under way; a third waits for the first. Ranks that hold the same elements share the work of writing
/// them. A directory that is not one for all ranks is refused at construction. A save that fails leaves the steps
/// before it as they are, and nothing old is removed unless every byte of a step that stays has been compared with its
/// checksum: by each rank its own file, between saves or, where only the newest step stays, before it is committed;
/// where that is not done, or finds something, by rank 0. Where the file system does not answer, the saves under way
/// fail with words after the deadline, and further ones until it does.
class checkpoint_saver {
 public:
  template <compute_device Device>
  checkpoint_saver(Device& device, any_communicator ranks, saver_options options, file_system& files = machine_files())
      : ranks_(std::move(ranks)), options_(std::move(options)) {
    std::string why;
    std::optional<step_root> root;
    try {
      if (options_.keep.last < 1) fail("saver_options::keep.last is 0; legal is at least 1, the newest step");
      if (ranks_.rank() == 0) {
        root.emplace(files, options_.directory);
        root->remove_leftovers();  // of jobs that were killed
      }
    } catch (const std::exception& e) {
      why = e.what();
    }
    why = broadcast_text(device, ranks_, why);
    if (!why.empty()) throw error_of_all(why);
    require_one_directory(device, ranks_, options_.directory, "", files);
    writer_ = detail::save_writer::start(files, ranks_.rank(), ranks_.size(), options_.deadline, std::move(root));
  }
  checkpoint_saver(const checkpoint_saver&) = delete;
  checkpoint_saver& operator=(const checkpoint_saver&) = delete;
  /// Waits for this rank's part of saves under way; rank 0 gives up those that others have not written. Where a call of
  /// the file system does not return, its thread is left behind, and the file system must outlive it.
  ~checkpoint_saver() { writer_->finish(); }

  /// Copies the state of this moment: the model's weights, what `optimizer` keeps of them, and `extras`. Throws
  /// `error_of_all` where the ranks' parts do not fit together (`agree_on_plan`), there is no memory for the copy, the
  /// step is there already, its directory cannot be made, or a save before it is stuck. Returns the saves that it had
  /// to wait for.
  ///
  /// On a GPU the copies go to pinned memory in the main stream, so that whatever the program puts there afterwards,
  /// the next update above all, finds them done: the host returns at once and prepares the next step, the GPU begins
  /// with it when the last byte has left, and `finished_save::stall` counts until then. Copies in a stream of their own
  /// could hide behind the next forward pass only if each of whatever writes states in place waited for them, a
  /// replayed graph, a load and the allocator among these: one that forgot would spoil a save that no checksum finds.
  /// Moments in 8 bits are copied as they are, and decoded behind the training.
  template <compute_device Device, class Model, class Optimizer>
  std::vector<finished_save> save(const context<Device>& ctx, Model& model, Optimizer& optimizer, std::uint64_t step,
                                  saved_extras extras = {}) {
    for (held_tensor& h : held_weights(ctx, model)) extras.tensors.push_back(std::move(h));
    for (held_tensor& h : held_optimizer(ctx, model, optimizer)) extras.tensors.push_back(std::move(h));
    extras.scalars.emplace_back("optimizer.step", std::int64_t{optimizer.step()});
    if constexpr (requires { optimizer.missed_steps(); })
      for (auto& [name, missed] : of_all_ranks(ctx.device, optimizer.missed_steps()))
        extras.scalars.emplace_back(detail::missed_prefix + name, missed);
    return save(ctx, step, std::move(extras));
  }
  /// Copies what a program holds, without a model.
  template <compute_device Device>
  std::vector<finished_save> save(const context<Device>& ctx, std::uint64_t step, saved_extras extras) {
    const auto begin = clock::now();
    told_later_ = wait_for_room(ctx.device);
    if (all_reduce_scalar(ctx.device, ranks_, writer_->lags() ? 1.0 : 0.0, reduce_op::max) != 0)
      throw error_of_all(cat(
          {"checkpoint: step ", step, " is not saved: a save before it is stuck in a call of the ", "file system"}));
    agree_on_scalars(ctx.device, step, extras.scalars);
    auto next = std::make_shared<detail::save_job>();
    next->begin = begin;
    next->step = step;
    next->keep = options_.keep;
    next->scalars = std::move(extras.scalars);
    next->layout = options_.layout.empty() ? layout_text(ctx.ranks.shape()) : options_.layout;
    const share_plan plan = agreed_plan(ctx, step, extras, *next);
    std::string answer;  // the directory, or, after a blank, why there is none
    try {
      if (ranks_.rank() == 0) {
        next->directory.emplace(writer_->root().begin(step));
        answer = next->directory->path();
      }
    } catch (const std::exception& e) {
      answer = std::string(" ") + e.what();
    }
    answer = broadcast_text(ctx.device, ranks_, answer);
    if (answer.starts_with(' '))
      throw error_of_all(cat({"checkpoint: step ", step, " is not saved: ", answer.substr(1)}));
    next->path = answer;
    try {
      stage(plan, extras, *next);
    } catch (...) {  // the arena stays until the device has made the copies before
      ctx.device.main_stream().synchronize();
      throw;
    }
    if constexpr (downloads_later<Device>) next->copies_end = ctx.device.waiter(ctx.device.main_stream());
    next->staged = clock::now();
    next->stall = std::chrono::duration<double>(next->staged - begin).count();
    jobs_.push_back(next);
    writer_->add(std::move(next));
    return std::exchange(told_later_, {});
  }
  /// Returns the saves that have ended since the last call, and waits for none.
  template <compute_device Device>
  std::vector<finished_save> finished(Device& device) {
    std::vector<finished_save> all = std::exchange(told_later_, {});
    while (!jobs_.empty()) {
      const auto some = take_ended(device);
      if (some.empty()) break;
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }
  /// Waits for all saves that are under way.
  template <compute_device Device>
  std::vector<finished_save> wait(Device& device) {
    std::vector<finished_save> all = std::exchange(told_later_, {});
    while (!jobs_.empty())
      for (finished_save& s : wait_for_one(device)) all.push_back(std::move(s));
    return all;
  }
  /// Waits until another save would wait for none, and returns the saves that have ended by then: for who decides what
  /// to save, or what is the best, by what has become of those before.
  template <compute_device Device>
  std::vector<finished_save> wait_for_room(Device& device) {
    while (jobs_.size() >= detail::save_writer::most_jobs)
      for (finished_save& s : wait_for_one(device)) told_later_.push_back(std::move(s));
    return std::exchange(told_later_, {});
  }
  std::size_t under_way() const { return jobs_.size(); }
  /// Returns whether this rank has something to tell of its oldest save. While no rank has, `finished` returns nothing,
  /// so that ranks which ask each other something anyway can ask that with it. Not collective.
  bool has_news() const {
    std::string stuck_at;
    return !told_later_.empty() || (!jobs_.empty() && own_state(*jobs_.front(), stuck_at) != under_way_still);
  }
  /// From the next save on step `best`, which may be that one, is kept whatever its age, and the one before it no
  /// longer is for this reason, once `best` is committed. Not collective.
  void keep_best(std::uint64_t best) { options_.keep.best = best; }
  /// Before the first save of a job that goes on: `best` is there already, and is kept until another best is committed.
  /// Not collective.
  void begin_with_best(std::uint64_t best) {
    keep_best(best);
    writer_->begin_with_best(best);
  }

 private:
  using clock = detail::save_job::clock;

  static std::string layout_text(const mesh_shape& mesh) {
    if (mesh.size() == 1) return "one rank";
    std::string text;
    for (std::size_t i = 0; i < mesh.axes.size(); ++i)
      append(text, {i == 0 ? "" : ", ", mesh.axes[i].text(), "=", mesh.extents[i]});
    return text;
  }

  /// Returns what some rank has: each has the parameters of its own stages. Collective.
  template <class Device>
  std::map<std::string, std::int64_t> of_all_ranks(Device& device, std::map<std::string, std::int64_t> own) {
    if (all_reduce_scalar(device, ranks_, own.empty() ? 0.0 : 1.0, reduce_op::max) == 0) return own;
    std::string text;
    for (const auto& [name, number] : own) append(text, {name, "\n", number, "\n"});
    for (int r = 0; r < ranks_.size(); ++r) {
      std::istringstream lines(broadcast_text(device, ranks_, text, r));
      for (std::string name, number; std::getline(lines, name) && std::getline(lines, number);)
        own.emplace(name, std::stoll(number));
    }
    return own;
  }
  /// Throws where ranks would save other scalars: those of rank 0 would be restored on all.
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

  /// Plans what this rank writes, which fits what the others plan, and makes room for it: a difference is told before
  /// anything is written.
  template <compute_device Device>
  share_plan agreed_plan(const context<Device>& ctx, std::uint64_t step, saved_extras& extras, detail::save_job& next) {
    share_plan plan;
    std::string problem;
    try {
      plan = plan_share(ctx, extras.tensors);
      make_room<Device>(plan.bytes, extras, next);
    } catch (const std::exception& e) {
      problem = e.what();
    }
    agree_on_plan(ctx.device, ranks_, step, plan, problem);
    return plan;
  }

  /// Gives a save an arena that no other uses, for a rank's tensors and, on rank 0, the blobs.
  template <compute_device Device>
  void make_room(std::size_t bytes, const saved_extras& extras, detail::save_job& next) {
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

  // ---- where ranks meet ---------------------------------------------------------------------------------------------

  /// The highest state that any rank sees of a save decides for all.
  enum state { under_way_still, committed, failed, stuck };

  /// Returns what this rank sees of a save. `stuck_at` becomes what it is stuck at; empty: nothing.
  state own_state(const detail::save_job& j, std::string& stuck_at) const {
    if (options_.is_ending && options_.is_ending()) writer_->hurry(options_.ending_deadline);
    stuck_at = writer_->stuck_at(j);
    if (!stuck_at.empty()) return stuck;
    if (!writer_->has_ended(j)) return under_way_still;
    return !j.failure.empty() ? failed : ranks_.rank() == 0 ? committed : under_way_still;
  }
  /// The oldest save, if all ranks may forget it: rank 0 has committed it, or some rank has failed. All of them, where
  /// a rank is stuck with the oldest.
  template <compute_device Device>
  std::vector<finished_save> take_ended(Device& device) {
    detail::save_job& j = *jobs_.front();
    std::string stuck_at;
    const state mine = own_state(j, stuck_at);
    const auto all = static_cast<int>(all_reduce_scalar(device, ranks_, static_cast<double>(mine), reduce_op::max));
    if (all == under_way_still) return {};
    if (all == stuck) return give_up_all(device, stuck_at);
    if (all == failed) {  // everybody comes to an end, which training does not wait for
      writer_->give_up(j);
      if (all_reduce_scalar(device, ranks_, writer_->has_ended(j) ? 0.0 : 1.0, reduce_op::max) != 0) return {};
    }
    const bool here = writer_->end(j);
    finished_save out = outcome_of(j, here);
    if (all == failed) {
      // A rank that failed by itself says so, and not one that wrote its part, or gave up for its sake.
      const bool own = here && !j.failure.empty() && j.failure != detail::save_writer::gave_up;
      out.failure = said_by_one(device, own, here ? j.failure : std::string());
    }
    if (all == committed && here) writer_->committed(j);
    writer_->forget();
    jobs_.pop_front();
    return {out};
  }
  /// The saves under way, of which none will be waited for any more.
  template <compute_device Device>
  std::vector<finished_save> give_up_all(Device& device, const std::string& stuck_at) {
    const std::string why = said_by_one(
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
  /// The text of the first rank that has something to say, with its number where it is not 0.
  template <compute_device Device>
  std::string said_by_one(Device& device, bool speaks, const std::string& text) {
    const double first =
        all_reduce_scalar(device, ranks_, speaks ? -static_cast<double>(ranks_.rank()) : -1e18, reduce_op::max);
    const int who = static_cast<int>(-first);
    const std::string said = broadcast_text(device, ranks_, text, who);
    return who == 0 ? said : cat({"rank ", who, ": ", said});
  }
  /// Leaves out what the writer may still change, unless the job has `ended`.
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
      writer_->wait_a_little();
    }
  }

  any_communicator ranks_;
  saver_options options_;
  std::deque<std::shared_ptr<detail::save_job>> jobs_;  ///< oldest first; likewise in the writer
  std::vector<finished_save> told_later_;               ///< that a save has waited for before it failed itself
  std::shared_ptr<detail::save_writer> writer_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
