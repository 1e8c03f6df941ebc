// The definitions of verify.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait {

PLAIT_INLINE std::string describe(const step_verdict& v) {
  if (v.ok()) return "ok";
  std::string text;
  if (v.rank >= 0) {
    append(text, {"rank ", v.rank});
    if (v.position >= 0)
      append(text, {", entry ", v.position, " (", describe(v.entry), ")"});
    else
      append(text, {", ", describe(v.entry)});
    text += ": ";
  }
  text += text_of(v.code);
  if (v.other_position >= 0) {
    text += "; see ";
    if (v.other_rank != v.rank) append(text, {"rank ", v.other_rank, ", "});
    append(text, {"entry ", v.other_position, " (", describe(v.other), ")"});
  }
  if (v.code == step_error::over_memory || v.code == step_error::over_host_memory)
    append(text, {": ", v.bytes, " bytes, of which ", v.limit, " are allowed"});
  if (!v.pipeline.empty()) text += ": " + v.pipeline;
  return text;
}

namespace detail {

/// Follows one rank's program entry by entry, and checks it.
class step_walk {
 public:
  step_walk(const step_schedule& s, int rank, const step_memory& memory)
      : s_(s),
        program_(s.programs[static_cast<std::size_t>(rank)]),
        rank_(rank),
        memory_(memory),
        state_(s.units.size()) {
    for (unit_state& u : state_) u.gathered = s.gathered_between_steps();
    for (const step_entry& e : program_)
      keeps_ = keeps_ || (e.op == step_op::pass && e.pass.kind != action_kind::forward);
    if (keeps_) kept_.resize(s.units.size() * static_cast<std::size_t>(s.shape.microbatches));
  }

  step_verdict run() {
    if (step_verdict v = passes(); !v.ok()) return v;
    for (at_ = 0; at_ < static_cast<int>(program_.size()); ++at_)
      if (step_verdict v = take(entry()); !v.ok()) return v;
    return ending();
  }
  /// The entries of collectives that this rank shares with others, in order: ties and the norm.
  const std::vector<std::pair<int, step_entry>>& shared() const { return shared_; }
  /// The most bytes of gathered parameters and of gradients at a time.
  double peak() const { return peak_; }
  /// The most bytes of offloaded activations at a time.
  double host_peak() const { return host_peak_; }

 private:
  struct unit_state {
    bool gathered = false;
    int released = -1, added = -1, reduced = -1, copies = -1, ties = -1;  ///< index of the last such entry
    int updated = -1;
    int gathered_at = -1;
    bool whole = true;  ///< its gradient, if it has one
  };
  /// The place of the activations of a unit and a microbatch.
  struct kept_state {
    enum { none, kept, leaving, away } where = none;
    int at = -1;           ///< index of the last entry that kept or moved them
    bool on_host = false;  ///< whether the host's memory has a copy
  };

  const step_entry& entry() const { return program_[static_cast<std::size_t>(at_)]; }
  unit_state& of(int unit) { return state_[static_cast<std::size_t>(unit)]; }
  kept_state& kept(int unit, int microbatch) {
    return kept_[static_cast<std::size_t>(unit * s_.shape.microbatches + microbatch)];
  }
  const step_unit& described(int unit) const { return s_.units[static_cast<std::size_t>(unit)]; }
  step_verdict refuse(step_error code, int other = -1) const {
    step_verdict v{.code = code, .rank = rank_, .position = at_, .entry = entry()};
    if (other >= 0) v.other_rank = rank_, v.other_position = other, v.other = program_[static_cast<std::size_t>(other)];
    return v;
  }
  step_verdict missing(step_error code, step_op op, int unit, int other) const {
    step_verdict v{.code = code, .rank = rank_, .entry = {op, unit}};
    if (other >= 0) v.other_rank = rank_, v.other_position = other, v.other = program_[static_cast<std::size_t>(other)];
    return v;
  }

  /// Checks that each pass is whole, in the order of its units.
  step_verdict passes() {
    std::vector<int> left;  // units that the current pass has not yet run, the next one last
    action going{};
    for (at_ = 0; at_ < static_cast<int>(program_.size()); ++at_) {
      const step_entry& e = entry();
      if (e.op == step_op::norm) continue;
      if (e.op == step_op::send || e.op == step_op::receive) {
        if (!left.empty()) return refuse(step_error::message_within_pass);
        continue;
      }
      if (e.unit < 0 || e.unit >= static_cast<int>(s_.units.size())) return refuse(step_error::unknown_unit);
      if (s_.rank_of(e.unit) != rank_) return refuse(step_error::wrong_rank);
      if (e.op != step_op::pass) continue;
      if (left.empty()) {
        const int stage = described(e.unit).stage;
        for (int u = 0; u < static_cast<int>(s_.units.size()); ++u)
          if (described(u).stage == stage) left.push_back(u);
        if (e.pass.kind == action_kind::forward) std::reverse(left.begin(), left.end());
        going = e.pass;
        if (s_.shape.chunk_of(stage) != e.pass.chunk) return refuse(step_error::pass_incomplete);
      }
      if (!(e.pass == going) || e.unit != left.back()) return refuse(step_error::pass_incomplete);
      left.pop_back();
    }
    if (!left.empty()) return missing(step_error::pass_incomplete, step_op::pass, left.back(), -1);
    return {};
  }

  step_verdict take(const step_entry& e) {
    switch (e.op) {
      case step_op::pass:
        return take_pass(e);
      case step_op::gather:
        return take_gather(e);
      case step_op::release:
        return take_release(e);
      case step_op::reduce:
        return take_reduction(e);
      case step_op::reduce_copies:
        return take_copies(e);
      case step_op::reduce_ties:
        return take_ties(e);
      case step_op::norm:
        return take_norm(e);
      case step_op::update:
        return take_update(e);
      case step_op::offload:
      case step_op::drop:
      case step_op::reload:
        return take_move(e);
      default:
        return {};
    }
  }

  /// Checks an offload, a drop or a reload of activations.
  step_verdict take_move(const step_entry& e) {
    const int next = e.unit + 1, stage = described(e.unit).stage;
    const bool known = keeps_ && e.pass.kind == action_kind::forward && e.pass.microbatch < s_.shape.microbatches &&
                       e.pass.chunk == s_.shape.chunk_of(stage);
    if (!known) return refuse(step_error::offload_of_none);
    kept_state& k = kept(e.unit, e.pass.microbatch);
    const double bytes = described(e.unit).kept_bytes;
    const int before = std::exchange(k.at, at_);
    switch (e.op) {
      case step_op::offload:
        if (k.where == kept_state::none) return refuse(step_error::offload_of_none, before);
        if (k.where != kept_state::kept) return refuse(step_error::offloaded_twice, before);
        k.where = kept_state::leaving;
        k.on_host = true;
        host_bytes_ += bytes;
        host_peak_ = std::max(host_peak_, host_bytes_);
        break;
      case step_op::drop:
        if (k.where != kept_state::leaving) return refuse(step_error::dropped_without_copy, before);
        if (next < static_cast<int>(s_.units.size()) && described(next).stage == stage &&
            kept(next, e.pass.microbatch).at < 0)
          return refuse(step_error::dropped_in_use, before);
        k.where = kept_state::away;
        kept_bytes_ -= bytes;
        break;
      default:
        if (k.where != kept_state::away) return refuse(step_error::reloaded_on_device, before);
        k.where = kept_state::kept;
        kept_bytes_ += bytes;
    }
    if (memory_.most_on_host < 0 || host_bytes_ <= memory_.most_on_host) return weigh();
    step_verdict v = refuse(step_error::over_host_memory);
    v.bytes = host_bytes_, v.limit = memory_.most_on_host;
    return v;
  }
  /// Checks that a pass of one unit may keep activations, or may read those that it has kept.
  step_verdict take_kept(const step_entry& e) {
    if (!keeps_) return {};
    kept_state& k = kept(e.unit, e.pass.microbatch);
    if (e.pass.kind == action_kind::forward) {
      k = {kept_state::kept, at_};
      kept_bytes_ += described(e.unit).kept_bytes;
      return weigh();
    }
    if (k.where == kept_state::leaving) return refuse(step_error::used_while_copied, k.at);
    if (k.where == kept_state::away) return refuse(step_error::used_after_drop, k.at);
    if (std::exchange(k.on_host, false)) host_bytes_ -= described(e.unit).kept_bytes;  // the copy back is complete
    if (k.where == kept_state::kept && frees_activations(e.pass.kind)) {
      k = {kept_state::none, at_};
      kept_bytes_ -= described(e.unit).kept_bytes;
    }
    return {};
  }

  step_verdict take_gather(const step_entry& e) {
    unit_state& u = of(e.unit);
    if (u.gathered && u.updated < u.gathered_at) return refuse(step_error::gathered_twice, u.gathered_at);
    // A replicated optimizer updates parameters in place, so no gather is needed.
    if (u.gathered && (u.updated < 0 || s_.policy.level == zero_level::replicated))
      return refuse(step_error::gathered_twice);
    u.gathered = true;
    u.gathered_at = at_;
    return weigh();
  }
  step_verdict take_release(const step_entry& e) {
    unit_state& u = of(e.unit);
    if (!u.gathered) return refuse(step_error::released_twice, u.released);
    u.gathered = false;
    u.released = at_;
    return {};
  }
  step_verdict take_copies(const step_entry& e) {
    unit_state& u = of(e.unit);
    if (!s_.policy.hybrid) return refuse(step_error::copies_of_none);
    if (!described(e.unit).trainable) return refuse(step_error::frozen);
    if (u.copies >= 0) return refuse(step_error::copies_twice, u.copies);
    if (u.reduced < 0) return refuse(step_error::copies_before_reduction, later(step_op::reduce, e.unit));
    u.copies = at_;
    return {};
  }
  /// Checks that the norm follows every part of each reduction.
  step_verdict take_norm(const step_entry& e) {
    if (norm_ >= 0) return refuse(step_error::norm_twice, norm_);
    norm_ = at_;
    shared_.push_back({at_, e});
    for (int unit = 0; unit < static_cast<int>(state_.size()); ++unit) {
      if (!mine(unit) || !described(unit).trainable) continue;
      const unit_state& u = of(unit);
      const auto part = [&](step_op op, step_error code) {
        const int at = later(op, unit);
        return at >= 0 ? refuse(step_error::norm_too_early, at) : missing(code, op, unit, at_);
      };
      if (u.reduced < 0) return part(step_op::reduce, step_error::reduction_missing);
      if (s_.policy.hybrid && u.copies < 0) return part(step_op::reduce_copies, step_error::copies_missing);
      if (described(unit).tied_to >= 0 && u.ties < 0) return part(step_op::reduce_ties, step_error::ties_missing);
    }
    return {};
  }
  step_verdict take_update(const step_entry& e) {
    unit_state& u = of(e.unit);
    if (!described(e.unit).trainable) return refuse(step_error::frozen);
    if (u.updated >= 0) return refuse(step_error::updated_twice, u.updated);
    if (u.reduced < 0) return refuse(step_error::updated_before_reduction, u.added);
    if (s_.policy.hybrid && u.copies < 0) return refuse(step_error::updated_before_copies, u.reduced);
    if (described(e.unit).tied_to >= 0 && u.ties < 0) return refuse(step_error::updated_before_ties, u.reduced);
    if (s_.policy.clip && norm_ < 0) return refuse(step_error::updated_before_norm, u.reduced);
    u.updated = at_;
    return {};
  }

  /// The index of the next such entry of a unit; -1: none.
  int later(step_op op, int unit) const {
    for (int i = at_; i < static_cast<int>(program_.size()); ++i)
      if (const step_entry& e = program_[static_cast<std::size_t>(i)]; e.op == op && e.unit == unit) return i;
    return -1;
  }

  step_verdict take_pass(const step_entry& e) {
    for (const int unit : s_.used_by(e.unit))
      if (step_verdict v = take_use(e, unit); !v.ok()) return v;
    return take_kept(e);
  }
  step_verdict take_use(const step_entry& e, int unit) {
    unit_state& u = of(unit);
    if (reads_parameters(e.pass.kind)) {
      if (u.updated >= 0 && u.gathered_at < u.updated) return refuse(step_error::used_after_update, u.updated);
      if (!u.gathered && u.released >= 0) return refuse(step_error::used_after_release, u.released);
      if (!u.gathered) return refuse(step_error::used_before_gather);
    }
    if (!adds_gradient(e.pass.kind)) return {};
    trains_ = true;
    if (!described(unit).trainable) return {};
    if (u.reduced >= 0) return refuse(step_error::reduced_too_early, u.reduced);
    u.added = at_;
    if (s_.limits_reducing())
      for (; reducing_.size() > s_.most_reducing; reducing_.pop_front()) of(reducing_.front()).whole = false;
    return weigh();
  }

  step_verdict take_reduction(const step_entry& e) {
    unit_state& u = of(e.unit);
    if (!described(e.unit).trainable) return refuse(step_error::frozen);
    if (u.reduced >= 0) return refuse(step_error::reduced_twice, u.reduced);
    u.reduced = at_;
    reducing_.push_back(e.unit);
    return weigh();
  }
  step_verdict take_ties(const step_entry& e) {
    unit_state& u = of(e.unit);
    if (described(e.unit).tied_to < 0) return refuse(step_error::ties_of_none);
    if (!described(e.unit).trainable) return refuse(step_error::frozen);
    if (u.ties >= 0) return refuse(step_error::ties_twice, u.ties);
    if (u.reduced < 0) return refuse(step_error::ties_before_reduction, later(step_op::reduce, e.unit));
    if (s_.policy.hybrid && u.copies < 0)
      return refuse(step_error::ties_before_copies, later(step_op::reduce_copies, e.unit));
    u.ties = at_;
    shared_.push_back({at_, e});
    return {};
  }

  step_verdict ending() {
    for (int unit = 0; unit < static_cast<int>(state_.size()); ++unit) {
      if (!mine(unit)) continue;
      const unit_state& u = of(unit);
      const bool trainable = described(unit).trainable && trains_;
      if (trainable && u.reduced < 0) return missing(step_error::reduction_missing, step_op::reduce, unit, u.added);
      if (trainable && s_.policy.hybrid && u.copies < 0)
        return missing(step_error::copies_missing, step_op::reduce_copies, unit, u.reduced);
      if (trainable && described(unit).tied_to >= 0 && u.ties < 0)
        return missing(step_error::ties_missing, step_op::reduce_ties, unit, u.reduced);
      if (trainable && s_.policy.clip && norm_ < 0)
        return missing(step_error::norm_missing, step_op::norm, -1, u.reduced);
      if (trainable && u.updated < 0) return missing(step_error::update_missing, step_op::update, unit, u.reduced);
      if (!s_.gathered_between_steps() && u.gathered)
        return missing(step_error::ends_gathered, step_op::release, unit, u.gathered_at);
      const bool stale = trainable && s_.policy.level != zero_level::replicated && u.gathered_at < u.updated;
      if (s_.gathered_between_steps() && (!u.gathered || stale))
        return missing(step_error::ends_released, step_op::gather, unit, u.gathered ? u.updated : u.released);
    }
    return {};
  }

  bool mine(int unit) const { return s_.rank_of(unit) == rank_; }
  /// Sums gathered parameters, gradients from their first addition to their update, and activations.
  step_verdict weigh() {
    double bytes = kept_bytes_;
    for (int unit = 0; unit < static_cast<int>(state_.size()); ++unit) {
      if (!mine(unit)) continue;
      const unit_state& u = of(unit);
      const double n = static_cast<double>(described(unit).parameters);
      bytes += n * memory_.parameter * (u.gathered ? 1.0 : 1.0 / memory_.data_ranks);
      if (u.added >= 0) bytes += n * memory_.gradient * (u.whole ? 1.0 : 1.0 / memory_.data_ranks);
    }
    peak_ = std::max(peak_, bytes);
    if (memory_.most < 0 || bytes <= memory_.most) return {};
    step_verdict v = refuse(step_error::over_memory);
    v.bytes = bytes, v.limit = memory_.most;
    return v;
  }

  const step_schedule& s_;
  const std::vector<step_entry>& program_;
  int rank_, at_ = 0, norm_ = -1;
  step_memory memory_;
  std::vector<unit_state> state_;
  std::deque<int> reducing_;  ///< units with whole gradients whose reductions have begun
  std::vector<std::pair<int, step_entry>> shared_;
  std::vector<kept_state> kept_;            ///< for each unit and microbatch
  double kept_bytes_ = 0, host_bytes_ = 0;  ///< of activations, on the device and in the host's memory
  double peak_ = 0, host_peak_ = 0;
  bool keeps_ = false;   ///< whether the program has a backward pass, so that forward passes keep activations
  bool trains_ = false;  ///< whether there was a backward pass so far
};

/// Compares the collectives that two ranks share: ties and the norm must be equal, in the same order.
PLAIT_INLINE step_verdict shared_order(const step_schedule& s, int a,
                                       const std::vector<std::pair<int, step_entry>>& first, int b,
                                       const std::vector<std::pair<int, step_entry>>& second) {
  const auto concerns = [&](const step_entry& e, int rank) {
    return e.op == step_op::norm || s.rank_of(s.units[static_cast<std::size_t>(e.unit)].tied_to) == rank;
  };
  // A tie is identified by the smaller of its two units on both ranks.
  const auto key = [&](const step_entry& e) {
    return e.op == step_op::norm ? -1 : std::min(e.unit, s.units[static_cast<std::size_t>(e.unit)].tied_to);
  };
  std::vector<std::pair<int, step_entry>> one, two;
  for (const auto& e : first)
    if (concerns(e.second, b)) one.push_back(e);
  for (const auto& e : second)
    if (concerns(e.second, a)) two.push_back(e);
  for (std::size_t i = 0; i < std::min(one.size(), two.size()); ++i)
    if (key(one[i].second) != key(two[i].second))
      return {.code = step_error::collectives_cross,
              .rank = a,
              .position = one[i].first,
              .entry = one[i].second,
              .other_rank = b,
              .other_position = two[i].first,
              .other = two[i].second};
  if (one.size() == two.size()) return {};
  const bool more = one.size() > two.size();
  const auto& [position, entry] = more ? one[two.size()] : two[one.size()];
  return {.code = step_error::collective_missing,
          .rank = more ? a : b,
          .position = position,
          .entry = entry,
          .other_rank = more ? b : a};
}

PLAIT_INLINE std::vector<std::vector<step_entry>> pipeline_of(const step_schedule& s) {
  std::vector<std::vector<step_entry>> programs(s.programs.size());
  for (std::size_t r = 0; r < s.programs.size(); ++r) {
    std::optional<action> last;
    for (const step_entry& e : s.programs[r]) {
      if (e.op == step_op::send || e.op == step_op::receive) programs[r].push_back(e);
      if (e.op != step_op::pass) continue;
      if (!last || !(*last == e.pass)) programs[r].push_back({step_op::pass, -1, e.pass});
      last = e.pass;
    }
  }
  return programs;
}

}  // namespace detail

PLAIT_INLINE step_verdict verify(const step_schedule& s, const step_memory& memory, const verify_options& options) {
  if (!s.shape.legal() || s.programs.size() != static_cast<std::size_t>(s.shape.ranks))
    return {.code = step_error::pipeline_refused, .pipeline = text_of(schedule_error::shape_illegal)};
  std::vector<detail::step_walk> walks;
  for (int r = 0; r < s.shape.ranks; ++r)
    if (step_verdict v = walks.emplace_back(s, r, memory).run(); !v.ok()) return v;
  const std::vector<std::vector<step_entry>> programs = detail::pipeline_of(s);
  schedule order{"step", s.shape, {}};
  for (const std::vector<step_entry>& program : programs) {
    order.order.emplace_back();
    for (const step_entry& line : program)
      if (line.op == step_op::pass) order.order.back().push_back(line.pass);
  }
  schedule_verdict pipeline = detail::check_actions(order, options.max_activations);
  if (pipeline.ok()) pipeline = verify_programs(s.shape, programs, options.posting);
  if (!pipeline.ok()) return {.code = step_error::pipeline_refused, .pipeline = describe(pipeline)};
  for (int a = 0; a < s.shape.ranks; ++a)
    for (int b = a + 1; b < s.shape.ranks; ++b)
      if (step_verdict v = detail::shared_order(s, a, walks[static_cast<std::size_t>(a)].shared(), b,
                                                walks[static_cast<std::size_t>(b)].shared());
          !v.ok())
        return v;
  return {};
}

PLAIT_INLINE void require_verified(const step_schedule& s, int rank, const step_memory& memory) {
  if (const step_verdict v = detail::step_walk(s, rank, memory).run(); !v.ok()) fail({"step: ", describe(v)});
  const schedule_verdict messages = detail::check_steps(s.shape, detail::pipeline_of(s));
  if (!messages.ok())
    fail({"step: ", describe(step_verdict{.code = step_error::pipeline_refused, .pipeline = describe(messages)})});
}

PLAIT_INLINE void require_verified(const step_schedule& s, const step_memory& memory, const verify_options& options) {
  if (const step_verdict v = verify(s, memory, options); !v.ok()) fail({"step: ", describe(v)});
}

PLAIT_INLINE double peak_bytes(const step_schedule& s, int rank, step_memory memory) {
  memory.most = -1;
  detail::step_walk walk(s, rank, memory);
  static_cast<void>(walk.run());
  return walk.peak();
}
PLAIT_INLINE double peak_host_bytes(const step_schedule& s, int rank) {
  detail::step_walk walk(s, rank, {});
  static_cast<void>(walk.run());
  return walk.host_peak();
}

PLAIT_INLINE std::vector<std::vector<std::size_t>> arrived_sends(const pipeline_shape& shape,
                                                                 const std::vector<std::vector<step_entry>>& programs,
                                                                 int rank) {
  using clock = std::vector<std::size_t>;  // for each rank: the number of its earlier steps
  struct message {
    clock sent;             // empty: not sent yet, or taken
    std::size_t taken = 0;  // the receiver's steps up to the action that takes it; 0: not taken yet
  };
  const std::size_t ranks = programs.size();
  std::vector<message> messages(detail::slots(shape));
  std::vector<clock> now(ranks, clock(ranks, 0));
  std::vector<std::vector<std::size_t>> arrived(programs[static_cast<std::size_t>(rank)].size());
  std::vector<std::pair<std::size_t, transfer>> open;  // sends of `rank`
  std::size_t sends = 0;

  const auto take = [&](std::size_t r, const step_entry& step) {  // false: the message is not sent yet
    transfer t;
    if (!detail::input_of(shape, static_cast<int>(r), step.pass, t)) return true;
    message& m = messages[detail::slot_of(shape, t)];
    if (m.sent.empty()) return false;
    for (std::size_t i = 0; i < ranks; ++i)
      if (m.sent[i] > now[r][i]) now[r][i] = m.sent[i];
    m.taken = now[r][r] + 1;
    m.sent = clock();
    return true;
  };
  const auto look = [&](const clock& mine, std::vector<std::size_t>& out) {
    std::size_t left = 0;
    for (const auto& [number, t] : open) {
      const std::size_t taken = messages[detail::slot_of(shape, t)].taken;
      if (taken != 0 && mine[static_cast<std::size_t>(shape.rank_of(t.to_stage))] >= taken)
        out.push_back(number);
      else
        open[left++] = {number, t};
    }
    open.resize(left);
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t r = 0; r < ranks; ++r) {
      for (std::size_t& i = now[r][r]; i < programs[r].size(); ++i, moved = true) {
        const step_entry& step = programs[r][i];
        if (step.op == step_op::pass && !take(r, step)) break;
        const bool mine = static_cast<int>(r) == rank;
        if (step.op == step_op::pass && mine) look(now[r], arrived[i]);
        if (step.op != step_op::send) continue;
        messages[detail::slot_of(shape, step.transfer)].sent = now[r];
        if (mine) open.emplace_back(sends++, step.transfer);
      }
    }
  }
  return arrived;
}

PLAIT_INLINE std::string describe(const schedule_verdict& v) {
  if (v.ok()) return "ok";
  std::string text;
  const bool in_program = v.code >= schedule_error::send_misplaced;
  if (v.rank >= 0) {
    append(text, {"rank ", v.rank, ", "});
    if (v.position >= 0) append(text, {in_program ? "step " : "action ", v.position, " "});
    text += "(" + describe(v.step) + "): ";
  }
  text += text_of(v.code);
  if (v.other_rank >= 0) {
    append(text, {"; it waits for rank ", v.other_rank});
    if (v.other_position >= 0)
      append(text, {", which is stuck at ", in_program ? "step " : "action ", v.other_position, " (",
                    describe(v.other_step), ")"});
  }
  if (v.below > 0 || v.above > 0) {
    const bool both = v.below > 0 && v.above > 0;
    text += v.code == schedule_error::over_activation_limit ? "; the nearest legal limit is "
            : both                                          ? "; the nearest legal numbers of microbatches are "
                                                            : "; the nearest legal number of microbatches is ";
    if (v.below > 0) text += std::to_string(v.below);
    if (both) text += " and ";
    if (v.above > 0) text += std::to_string(v.above);
  }
  return text;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
