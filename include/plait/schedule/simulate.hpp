// Simulates the times of a pipeline's schedule or of a whole step for given costs, without a device or a communicator.
// A pipeline is simulated as a step whose units are its stages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/schedule/schedule.hpp"

namespace plait {

struct timed_action {
  plait::action action;
  double start = 0;
  double end = 0;
  int sequence = 0;  ///< index in an order of all actions in which each follows those for which it waits
};

struct timed_transfer {
  plait::transfer transfer;
  double sent = 0;     ///< end of the action that makes its data
  double arrived = 0;  ///< sent + link
  int sequence = 0;    ///< that of the action that makes its data
};

namespace detail {

constexpr double busy_time(const std::vector<timed_action>& mine) {
  double sum = 0;
  for (const timed_action& a : mine) sum += a.end - a.start;
  return sum;
}
/// Time from a rank's first start to its last end.
constexpr double span_of(const std::vector<timed_action>& mine) {
  return mine.empty() ? 0 : mine.back().end - mine.front().start;
}
/// The largest idle fraction of a rank's own span.
constexpr double span_idle(const std::vector<std::vector<timed_action>>& ranks) {
  double worst = 0;
  for (const std::vector<timed_action>& mine : ranks)
    if (const double all = span_of(mine); all > 0) worst = std::max(worst, 1 - busy_time(mine) / all);
  return worst;
}

}  // namespace detail

/// A simulated step of the pipeline, in which every rank starts each action as soon as its inputs are there.
struct simulation {
  std::vector<std::vector<timed_action>> ranks;  ///< of each rank, in its order
  std::vector<timed_transfer> transfers;         ///< of all ranks, by time: the global transfer list
  double makespan = 0;                           ///< end of the last action on any rank

  constexpr double busy(int rank) const { return detail::busy_time(ranks[static_cast<std::size_t>(rank)]); }
  /// Time from a rank's first start to its last end.
  constexpr double span(int rank) const { return detail::span_of(ranks[static_cast<std::size_t>(rank)]); }
  /// The idle fraction of all ranks' time from 0 to the makespan. It is the loss of a step that ends with a global
  /// operation, such as a gradient norm.
  constexpr double makespan_idle() const {
    double sum = 0;
    for (const std::vector<timed_action>& mine : ranks) sum += detail::busy_time(mine);
    return makespan > 0 ? 1 - sum / (makespan * static_cast<double>(ranks.size())) : 0;
  }
  /// The largest idle fraction of a rank's own span, as in the zero-bubble papers. It is the loss of steps that
  /// overlap.
  constexpr double span_idle() const { return detail::span_idle(ranks); }
};

namespace detail {

/// Throws `error` unless the costs fit this shape; for illegal sizes it begins with `who`.
constexpr void require_costs(const char* who, const pipeline_shape& shape, const schedule_costs& costs) {
  require_legal(who, shape);
  const auto cheap = [](const action_times& t) {
    return t.forward >= 0 && t.backward >= 0 && t.input_backward >= 0 && t.weight_backward >= 0;
  };
  bool legal = cheap(costs.rank_part) && costs.link >= 0;
  for (const action_times& t : costs.stages) legal = legal && cheap(t);
  for (double t : costs.links) legal = legal && t >= 0;
  if (!legal) fail("schedule_costs: a time is negative, or is not a number");
  if (!(costs.stages.empty() || costs.stages.size() == static_cast<std::size_t>(shape.stages())))
    fail("schedule_costs: stages must have one entry per stage");
  if (!(costs.links.empty() || costs.links.size() == static_cast<std::size_t>(shape.ranks * shape.ranks)))
    fail("schedule_costs: links must have one entry per pair of ranks");
}

}  // namespace detail

// A whole step: passes in one stream, and gathers and reductions in two more streams that share a link.

namespace detail {

/// A rank's link: a queue of gathers, one of reductions and one of the reductions of copies. Queues that are not empty
/// share the bandwidth equally.
class shared_link {
 public:
  static constexpr std::size_t queues = 3;
  struct use {
    double begin, end;
  };

  constexpr explicit shared_link(double bandwidth) : bandwidth_(bandwidth) {}

  /// Starts a transfer at time `at`, which must not be before earlier transfers. Returns its number.
  constexpr std::size_t post(int queue, double at, double bytes, double latency) {
    advance(at);
    ends_.push_back(-1);
    begins_.push_back(queues_[queue].empty() ? at : -1);
    queues_[queue].all.push_back({ends_.size() - 1, bandwidth_ > 0 ? bytes + latency * bandwidth_ : 0});
    return ends_.size() - 1;
  }
  /// Returns the begin and end of a transfer on the link; negative: not known yet.
  constexpr use known_use_of(std::size_t number) const { return {begins_[number], ends_[number]}; }
  /// Returns the end of a transfer.
  constexpr double end_of(std::size_t number) {
    while (ends_[number] < 0) finish_next();
    return ends_[number];
  }
  constexpr void advance(double until) {
    while (now_ < until) {
      if (used_queues() == 0) {
        now_ = until;
        return;
      }
      if (bandwidth_ > 0 && now_ + next_queue().front().left / rate() > until) {
        move(until - now_);
        return;
      }
      finish_next();
    }
  }
  /// The times when the link was in use.
  constexpr const std::vector<use>& uses() const { return uses_; }

 private:
  struct queued {
    std::size_t number;
    double left;  ///< bytes that remain
  };
  struct line {
    std::vector<queued> all{};
    std::size_t head = 0;
    constexpr bool empty() const { return head == all.size(); }
    constexpr queued& front() { return all[head]; }
  };

  constexpr int used_queues() const {
    int used = 0;
    for (const auto& q : queues_) used += q.empty() ? 0 : 1;
    return used;
  }
  constexpr double rate() const { return bandwidth_ / used_queues(); }
  /// The queue whose first transfer ends next. There must be one.
  constexpr line& next_queue() {
    line* next = nullptr;
    for (line& q : queues_)
      if (!q.empty() && (next == nullptr || q.front().left < next->front().left)) next = &q;
    return *next;
  }
  constexpr void move(double time) {
    if (time <= 0) return;
    const double bytes = time * rate();
    for (auto& q : queues_)
      if (!q.empty()) q.front().left = std::max(0.0, q.front().left - bytes);  // rounding must not make it negative
    if (!uses_.empty() && uses_.back().end == now_)
      uses_.back().end = now_ + time;
    else
      uses_.push_back({now_, now_ + time});
    now_ += time;
  }
  constexpr void finish_next() {
    line& next = next_queue();
    if (bandwidth_ > 0) move(next.front().left / rate());
    ends_[next.front().number] = now_;
    ++next.head;
    if (!next.empty()) begins_[next.front().number] = now_;
  }

  double bandwidth_, now_ = 0;
  line queues_[queues];
  std::vector<double> begins_, ends_;  ///< negative: not known yet
  std::vector<use> uses_;
};

}  // namespace detail

/// The costs of a step's parts. Times are in one unit of any kind; bandwidths are in bytes per such unit.
struct step_costs {
  std::vector<action_times> units{};  ///< of each unit, for one microbatch
  std::vector<double> updates{};      ///< of each unit's optimizer; empty: no time
  std::vector<double> ties{};         ///< of each unit's sum with the unit that shares its parameters; empty: no time
  double norm = 0;                    ///< after all gradients are reduced
  double message = 0;                 ///< from the end of a pass until its result is on the next stage's rank
  std::vector<double> links{};        ///< of each pair of ranks, [from * ranks + to], which replaces `message`; empty:
                                      ///< none
  int data_ranks = 1;                 ///< n, which shard a unit's parameters
  int copy_ranks = 1;                 ///< r, which hold copies of one piece, in a hybrid
  double gather_bytes = 2;            ///< bytes per parameter in a gather
  double reduce_bytes = 4;            ///< bytes per gradient in a reduction
  double bandwidth = 0;       ///< of a rank's link to the others of its data axes; 0: communication takes no time
  double latency = 0;         ///< of a gather or a reduction
  double copy_bandwidth = 0;  ///< of copies of activations, in one queue for both directions; 0: they take no time
};

/// Returns the bytes that a rank sends for a gather or a reduction of a unit over n ranks: (n-1)/n of its bytes. The
/// all-reduce of replicated gradients sends twice as many. The sum over r ranks with copies of a piece sends 2 (r-1)/r
/// of the piece.
constexpr double wire_bytes(const step_schedule& s, const step_costs& costs, step_op op, int unit) {
  const double n = costs.data_ranks, size = static_cast<double>(s.units[static_cast<std::size_t>(unit)].parameters);
  const double part = size * (n - 1) / n;
  if (op == step_op::gather) return part * costs.gather_bytes;
  if (op == step_op::reduce_copies)
    return 2.0 * (costs.copy_ranks - 1) / costs.copy_ranks * size / n * costs.reduce_bytes;
  return part * costs.reduce_bytes * (s.policy.level == zero_level::replicated ? 2 : 1);
}

/// A step among equal steps: the last of several steps that were simulated in sequence.
struct step_simulation {
  std::vector<std::vector<timed_entry>> ranks;  ///< of each rank, in its program's order; relative to the step's begin
  /// The gathers and reductions on each rank's link during the step, including those that the previous step started.
  /// Each begins when the earlier ones of its kind are complete. If it ends after the step, this is the part within the
  /// step.
  std::vector<std::vector<timed_entry>> links;
  /// Each rank's sums with the ranks of units that share its units' parameters. A sum begins when both ranks have
  /// started it and earlier sums of these ranks are complete.
  std::vector<std::vector<timed_entry>> ties;
  /// The copies of activations of each rank, in the order of its offloads and reloads.
  std::vector<std::vector<timed_entry>> copies;
  std::vector<double> link_busy;    ///< for each rank: the time in which its link was in use during the step
  std::vector<double> link_hidden;  ///< the part of this time in which passes or updates ran
  double period = 0;                ///< from the end of one step to the end of the next

  /// The fraction of communication over the data axes that computation hid; 1 without communication.
  double hidden_share() const {
    double busy = 0, hidden = 0;
    for (const double t : link_busy) busy += t;
    for (const double t : link_hidden) hidden += t;
    return busy > 0 ? hidden / busy : 1;
  }
  /// The idle time of a rank before entries of this kind: before passes for gathers or messages, before the norm and
  /// updates for reductions.
  double waited(int rank, step_op op) const {
    double sum = 0;
    for (const timed_entry& e : ranks[static_cast<std::size_t>(rank)])
      if (e.entry.op == op) sum += e.waited;
    return sum;
  }
};

namespace detail {

/// Simulates the ranks of a pipeline, each with its own time, until all have run `steps` steps. The inner loops use
/// plain pointers, because a compiler counts every call of a vector's member in a constant expression.
class step_clock {
 public:
  constexpr step_clock(const step_schedule& s, const step_costs& costs, int steps)
      : s_(s),
        units_(s.units.data()),
        unit_count_(static_cast<int>(s.units.size())),
        costs_(costs),
        steps_(steps),
        cells_(static_cast<std::size_t>(s.shape.stages()) * static_cast<std::size_t>(s.shape.microbatches)),
        gathers_(s.units.size(), none),
        reductions_(s.units.size(), none),
        copies_(s.units.size(), none),
        norms_(static_cast<std::size_t>(steps)),
        ties_(static_cast<std::size_t>(steps) * s.units.size(), -1.0),
        ends_(static_cast<std::size_t>(steps) * 2 * cells_, -1.0) {
    ranks_.reserve(s.programs.size());
    for (const std::vector<step_entry>& program : s.programs) {
      ranks_.push_back({shared_link(costs.bandwidth)});
      ranks_.back().begins.push_back(0);
      ranks_.back().last.resize(program.size());
    }
  }

  /// Returns false if the next entry of some rank waits for an event that never happens.
  constexpr bool run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t r = 0; r < ranks_.size(); ++r)
        while (advance(r)) moved = true;
    }
    return std::all_of(ranks_.begin(), ranks_.end(), [&](const rank_clock& r) { return r.step == steps_; });
  }

  /// The entries that a rank has run in its last step, in order.
  constexpr std::span<const timed_entry> entries(std::size_t rank) const {
    const rank_clock& r = ranks_[rank];
    return {r.last.data(), r.step == steps_ ? r.last.size() : r.at};
  }

  step_simulation last_step() {
    step_simulation out;
    double end = 0, before = 0;
    for (rank_clock& r : ranks_) {
      r.link.advance(r.now);
      const double begin = r.begins[static_cast<std::size_t>(steps_ - 1)];
      end = std::max(end, r.now);
      before = std::max(before, begin);
      double busy = 0, hidden = 0;
      for (const shared_link::use& u : r.link.uses()) {
        const double from = std::max(u.begin, begin), to = std::min(u.end, r.now);
        if (to > from) busy += to - from;
        for (const timed_entry& e : r.last) hidden += std::max(0.0, std::min(to, e.end) - std::max(from, e.start));
      }
      out.link_busy.push_back(busy);
      out.link_hidden.push_back(hidden);
      std::vector<timed_entry>& on_link = out.links.emplace_back();
      for (std::size_t i = 0; i < r.posted.size(); ++i) {
        const shared_link::use known = r.link.known_use_of(i);
        const double until = known.end < 0 ? r.now : std::min(known.end, r.now), from = std::max(known.begin, begin);
        if (known.begin >= 0 && until > from) on_link.push_back({r.posted[i], from - begin, until - begin, 0});
      }
      for (timed_entry& e : r.last) e.start -= begin, e.end -= begin;
      for (timed_entry& e : r.ties) e.start -= begin, e.end -= begin;
      for (timed_entry& e : r.copies) e.start -= begin, e.end -= begin;
      out.ranks.push_back(r.last);
      out.ties.push_back(r.ties);
      out.copies.push_back(r.copies);
    }
    out.period = end - before;
    return out;
  }

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);
  struct rank_clock {
    shared_link link;
    std::vector<timed_entry> last{}, ties{}, copies{};  ///< of the last step
    std::vector<step_entry> posted{};                   ///< indexed by their numbers on the link
    std::vector<double> begins{};                       ///< of each step
    std::vector<int> tying{};                           ///< units, in the order of their sums in this step
    double now = 0;
    double copied = 0;  ///< end of its last copy
    std::size_t at = 0;
    int step = 0;
  };

  /// The ends of F, or of B or I, of a stage's microbatches in a step; negative: not known yet.
  constexpr double* ends(int step, bool forward, int stage) {
    return ends_.data() + (static_cast<std::size_t>(step) * 2 + (forward ? 0 : 1)) * cells_ +
           static_cast<std::size_t>(stage) * static_cast<std::size_t>(s_.shape.microbatches);
  }

  /// Runs the next entry of a rank. Returns false if it waits for another rank, or if the rank has finished.
  constexpr bool advance(std::size_t rank) {
    rank_clock& r = ranks_.data()[rank];
    if (r.step == steps_) return false;
    const std::vector<step_entry>& program = s_.programs.data()[rank];
    if (r.at == program.size()) {
      r.begins.push_back(r.now);
      r.at = 0;
      r.tying.clear();
      ++r.step;
      return true;
    }
    const step_entry& e = program.data()[r.at];
    double ready = r.now, lasts = 0;
    if (!begin(rank, e, ready, lasts)) return false;
    const double start = std::max(ready, r.now);
    r.last.data()[r.at++] = {e, start, start + lasts, start - r.now, sequence_++};
    r.now = start + lasts;
    if (e.op == step_op::pass) end_pass(r, e);
    return true;
  }

  /// Begins an entry, which can start at `ready` and occupies the rank for `lasts`. Returns false if it waits for
  /// another rank.
  constexpr bool begin(std::size_t rank, const step_entry& e, double& ready, double& lasts) {
    rank_clock& r = ranks_.data()[rank];
    const auto unit = static_cast<std::size_t>(e.unit);
    switch (e.op) {
      case step_op::pass:
        lasts = costs_.units.data()[unit].of(e.pass.kind);
        if (!input_is_there(r, e, ready)) return false;
        if (!r.posted.empty() && reads_parameters(e.pass.kind))
          for (const int used : s_.used_by(e.unit)) wait_for(r, gathers_[static_cast<std::size_t>(used)], ready);
        if (!copy_ends_.empty() && e.pass.kind != action_kind::forward) ready = std::max(ready, copy_end(e));
        return true;
      case step_op::gather:
        gathers_[unit] = post(r, 0, e, ready);
        return true;
      case step_op::reduce:
        reductions_[unit] = post(r, 1, e, ready);
        return true;
      case step_op::reduce_copies:
        wait_for(r, reductions_[unit], ready);
        copies_[unit] = post(r, 2, e, ready);
        return true;
      case step_op::reduce_ties:
        wait_for_reduction(r, unit, ready);
        tie(r.step, e.unit) = ready;
        r.tying.push_back(e.unit);
        return true;
      case step_op::norm:
        lasts = costs_.norm;
        return begin_norm(rank, ready);
      case step_op::update:
        lasts = costs_.updates.empty() ? 0 : costs_.updates[unit];
        return finish_reduction(r, e.unit, ready);
      case step_op::offload:
      case step_op::reload:
        copy(r, e);
        return true;
      case step_op::drop:
        ready = std::max(ready, copy_end(e));
        return true;
      default:
        return true;
    }
  }
  /// The end of the last copy of a unit's values of a microbatch.
  constexpr double& copy_end(const step_entry& e) {
    const auto microbatches = static_cast<std::size_t>(s_.shape.microbatches);
    if (copy_ends_.empty()) copy_ends_.assign(s_.units.size() * microbatches, 0.0);
    return copy_ends_[static_cast<std::size_t>(e.unit) * microbatches + e.pass.microbatch];
  }
  /// Starts a copy of activations after the rank's earlier copies.
  constexpr void copy(rank_clock& r, const step_entry& e) {
    const double begin = std::max(r.now, r.copied);
    r.copied = begin + (costs_.copy_bandwidth > 0 ? units_[e.unit].kept_bytes / costs_.copy_bandwidth : 0);
    copy_end(e) = r.copied;
    if (r.step == steps_ - 1) r.copies.push_back({e, begin, r.copied, 0});
  }
  /// The norm begins on all ranks when the last rank has its reduced gradients.
  constexpr bool begin_norm(std::size_t rank, double& ready) {
    std::vector<double>& arrived = norms_[static_cast<std::size_t>(ranks_[rank].step)];
    if (arrived.empty()) arrived.assign(ranks_.size(), -1.0);
    if (arrived[rank] < 0) {
      double there = ranks_[rank].now;
      for (const step_entry& e : s_.programs[rank])
        if (e.unit >= 0 && e.op == s_.last_reduction(e.unit) && !finish_reduction(ranks_[rank], e.unit, there))
          return false;
      arrived[rank] = there;
    }
    ready = *std::max_element(arrived.begin(), arrived.end());
    return *std::min_element(arrived.begin(), arrived.end()) >= 0;
  }
  /// Puts an entry in a queue of the rank's link, and returns its number there.
  constexpr std::size_t post(rank_clock& r, int queue, const step_entry& e, double at) {
    r.posted.push_back(e);
    return r.link.post(queue, at, wire_bytes(s_, costs_, e.op, e.unit), costs_.latency);
  }
  /// Advances `time` to the end of the transfer with this number, if there is one.
  constexpr void wait_for(rank_clock& r, std::size_t number, double& time) {
    if (number != none) time = std::max(time, r.link.end_of(number));
  }

  /// Advances `time` to the end of a unit's reduction over the data axes of its stage.
  constexpr void wait_for_reduction(rank_clock& r, std::size_t unit, double& time) {
    wait_for(r, reductions_[unit], time);
    wait_for(r, copies_[unit], time);
  }
  /// The time when a unit's rank has started its sum with the unit that shares its parameters; negative: not known yet.
  constexpr double& tie(int step, int unit) {
    return ties_[static_cast<std::size_t>(step) * s_.units.size() + static_cast<std::size_t>(unit)];
  }
  /// The begin of the sum of a tied unit that its own rank has started; negative: not known yet.
  constexpr double tie_begin(const rank_clock& r, int unit) {
    const auto twin_of = [&](int u) { return s_.units[static_cast<std::size_t>(u)].tied_to; };
    const double theirs = tie(r.step, twin_of(unit));
    if (theirs < 0) return theirs;
    double begin = std::max(tie(r.step, unit), theirs);
    for (const int before : r.tying) {
      if (before == unit) break;
      if (s_.rank_of(twin_of(before)) == s_.rank_of(twin_of(unit)))
        begin = std::max(begin, tie_begin(r, before) + tie_time(before));
    }
    return begin;
  }
  constexpr double tie_time(int unit) const {
    return costs_.ties.empty() ? 0 : costs_.ties[static_cast<std::size_t>(unit)];
  }
  /// Advances `time` to the end of a unit's reduction, including the sum over stages. Returns false if the other rank
  /// has not started that sum.
  constexpr bool finish_reduction(rank_clock& r, int unit, double& time) {
    wait_for_reduction(r, static_cast<std::size_t>(unit), time);
    if (s_.units[static_cast<std::size_t>(unit)].tied_to < 0) return true;
    const double begin = tie_begin(r, unit), end = begin + tie_time(unit);
    if (begin < 0) return false;
    if (r.step == steps_ - 1 && end > begin &&
        std::none_of(r.ties.begin(), r.ties.end(), [&](const timed_entry& e) { return e.entry.unit == unit; }))
      r.ties.push_back({{step_op::reduce_ties, unit}, begin, end, 0});
    time = std::max(time, end);
    return true;
  }
  /// Advances `ready` to the arrival of a pass's input. Returns false if this is not known yet.
  constexpr bool input_is_there(const rank_clock& r, const step_entry& e, double& ready) {
    const int stage = units_[e.unit].stage;
    const bool forward = e.pass.kind == action_kind::forward;
    if (!is_end(e.unit, forward)) return true;
    if (!forward && ends(r.step, gives_input_gradient(e.pass.kind), stage)[e.pass.microbatch] < 0) return false;
    const int from = source_of(s_.shape, e.pass.kind, stage);
    if (from < 0) return true;
    const double there = ends(r.step, forward, from)[e.pass.microbatch];
    if (there < 0) return false;
    const double message =
        link_time(s_.shape, s_.shape.rank_of(from), s_.shape.rank_of(stage), costs_.message, costs_.links);
    ready = std::max(ready, there + message);
    return true;
  }
  /// Records the end of a pass after its last unit.
  constexpr void end_pass(const rank_clock& r, const step_entry& e) {
    const bool forward = e.pass.kind == action_kind::forward;
    if (e.pass.kind != action_kind::weight_backward && is_end(e.unit, !forward))
      ends(r.step, forward, units_[e.unit].stage)[e.pass.microbatch] = r.now;
  }
  /// Whether a unit is the first of its stage, or its last.
  constexpr bool is_end(int unit, bool first) const {
    const int next = first ? unit - 1 : unit + 1;
    return next < 0 || next == unit_count_ || units_[next].stage != units_[unit].stage;
  }

  const step_schedule& s_;
  const step_unit* units_;
  int unit_count_;
  const step_costs& costs_;
  int steps_, sequence_ = 0;
  std::size_t cells_;
  std::vector<rank_clock> ranks_{};
  std::vector<std::size_t> gathers_, reductions_, copies_;  ///< number on its rank's link of each unit's last transfer
  std::vector<std::vector<double>> norms_;                  ///< for each step: when each rank reached it
  /// For each step and unit: when its rank started its sum with a tied unit; negative: not known yet.
  std::vector<double> ties_;
  std::vector<double> ends_;
  std::vector<double> copy_ends_{};  ///< for each unit and microbatch; empty without copies
};

}  // namespace detail

/// Returns the times of a step among equal steps. It simulates three and returns the last, so gathers after an update
/// overlap with the next forward pass. Each rank runs its program. A gather or a reduction begins on its link after the
/// earlier entries of its kind. Messages take `costs.message`. The sum of a tied unit takes `costs.ties` after both
/// ranks have reached it; the ranks continue meanwhile.
///
/// `verify` must accept the step, and every stage must have a unit. Throws `error` for costs of wrong sizes, and if
/// tied units have different costs.
inline step_simulation simulate(const step_schedule& s, const step_costs& costs) {
  if (costs.units.size() != s.units.size()) fail("step_costs: units must have one entry per unit");
  if (!costs.updates.empty() && costs.updates.size() != s.units.size())
    fail("step_costs: updates must have one entry per unit");
  if (!costs.links.empty() && costs.links.size() != static_cast<std::size_t>(s.shape.ranks * s.shape.ranks))
    fail("step_costs: links must have one entry per pair of ranks");
  if (!costs.ties.empty() && costs.ties.size() != s.units.size()) fail("step_costs: ties must have one entry per unit");
  for (std::size_t u = 0; u < costs.ties.size(); ++u)
    if (const int twin = s.units[u].tied_to; twin >= 0 && costs.ties[static_cast<std::size_t>(twin)] != costs.ties[u])
      fail({"step_costs: ties is ", costs.ties[u], " of unit ", u, " and ", costs.ties[static_cast<std::size_t>(twin)],
            " of unit ", twin, ", which exchange with each other; give both the same"});
  if (costs.data_ranks < 1) fail({"step_costs: data_ranks is ", costs.data_ranks, "; legal is 1 or more"});
  if (costs.copy_ranks < 1) fail({"step_costs: copy_ranks is ", costs.copy_ranks, "; legal is 1 or more"});
  if (costs.copy_ranks > 1 && !s.policy.hybrid)
    fail({"step_costs: copy_ranks is ", costs.copy_ranks, ", but the policy is not a hybrid; legal is 1"});
  std::vector<bool> has_units(static_cast<std::size_t>(s.shape.stages()), false);
  for (const step_unit& u : s.units) has_units[static_cast<std::size_t>(u.stage)] = true;
  for (std::size_t stage = 0; stage < has_units.size(); ++stage)
    if (!has_units[stage]) fail({"simulate: stage ", stage, " has no unit, so its passes have no place in the step"});
  detail::step_clock clock(s, costs, 3);
  if (!clock.run()) fail("simulate: the step cannot finish; verify names the entry");
  return clock.last_step();
}

// A pipeline without a step.

namespace detail {

/// Merges adjacent ranges of transfers, each sorted by time. `begins` ends with the end of the last range.
constexpr void merge_transfers(std::vector<timed_transfer>& all, std::vector<std::size_t> begins) {
  std::vector<timed_transfer> merged(all);
  while (begins.size() > 2) {
    if (begins.size() % 2 == 0) begins.push_back(all.size());  // an empty range
    std::size_t kept = 1;
    for (std::size_t i = 0; i + 2 < begins.size(); i += 2) {
      const timed_transfer *a = all.data() + begins[i], *b = all.data() + begins[i + 1];
      const timed_transfer *const middle = b, *const end = all.data() + begins[i + 2];
      for (timed_transfer* to = merged.data() + begins[i]; a != middle || b != end; ++to) {
        const bool second =
            a == middle || (b != end && (a->sent != b->sent ? b->sent < a->sent : b->sequence < a->sequence));
        *to = second ? *b++ : *a++;
      }
      begins[kept++] = begins[i + 2];
    }
    begins.resize(kept);
    all.swap(merged);
  }
}

/// Runs a schedule as a step whose units are its stages. Its actions must name existing chunks and microbatches.
/// Returns false if it cannot finish; `out` then has the actions that ran.
constexpr bool run_schedule(const schedule& s, const schedule_costs& costs, simulation& out) {
  const pipeline_shape& shape = s.shape;
  step_schedule step{shape, {}, units_of_stages(shape), std::vector<std::vector<step_entry>>(s.order.size())};
  step_costs times{.message = costs.link, .links = costs.links};
  for (int stage = 0; stage < shape.stages(); ++stage) {
    action_times& of = times.units.emplace_back(costs.stages.empty() ? costs.rank_part
                                                                     : costs.stages[static_cast<std::size_t>(stage)]);
    if (costs.stages.empty())
      of = {of.forward / shape.chunks, of.backward / shape.chunks, of.input_backward / shape.chunks,
            of.weight_backward / shape.chunks};
  }
  for (std::size_t r = 0; r < s.order.size(); ++r) {
    step.programs[r].resize(s.order[r].size());
    const action* a = s.order[r].data();
    for (step_entry *to = step.programs[r].data(), *const end = to + s.order[r].size(); to != end; ++to, ++a)
      *to = {step_op::pass, shape.stage_of(static_cast<int>(r), a->chunk), *a};
  }
  step_clock clock(step, times, 1);
  const bool finished = clock.run();

  out = {};
  out.ranks.resize(s.order.size());
  out.transfers.reserve(2 * static_cast<std::size_t>(shape.stages() * shape.microbatches));
  std::vector<std::size_t> begins;  // of each rank's transfers
  for (std::size_t r = 0; r < s.order.size(); ++r) {
    const int rank = static_cast<int>(r);
    begins.push_back(out.transfers.size());
    const std::span<const timed_entry> ran = clock.entries(r);
    out.ranks[r].resize(ran.size());
    timed_action* to = out.ranks[r].data();
    for (const timed_entry *e = ran.data(), *const end = e + ran.size(); e != end; ++e) {
      *to++ = {e->entry.pass, e->start, e->end, e->sequence};
      const int from = e->entry.unit, target = target_of(shape, e->entry.pass.kind, from);
      const int peer = target < 0 ? rank : shape.rank_of(target);
      if (peer == rank) continue;
      const auto kind = target > from ? transfer_kind::activation : transfer_kind::gradient;
      const double arrived = e->end + costs.of_link(shape, rank, peer);
      out.transfers.push_back({{kind, from, target, e->entry.pass.microbatch}, e->end, arrived, e->sequence});
    }
    if (!ran.empty()) out.makespan = std::max(out.makespan, ran.back().end);
  }
  begins.push_back(out.transfers.size());
  merge_transfers(out.transfers, std::move(begins));
  return finished;
}

}  // namespace detail

/// Returns the times of all actions and messages of one step. `verify` must accept the schedule. Throws `error` if it
/// cannot finish, has illegal sizes, or names a chunk or a microbatch that does not exist. Throws also if `costs` has a
/// negative time or a table of wrong size.
constexpr simulation simulate(const schedule& s, const schedule_costs& costs = {}) {
  detail::require_costs("simulate", s.shape, costs);
  if (s.order.size() != static_cast<std::size_t>(s.shape.ranks))
    fail("simulate: the schedule must have one list of actions for each rank");
  for (const std::vector<action>& order : s.order)
    for (const action& a : order)
      if (a.chunk >= s.shape.chunks || a.microbatch >= s.shape.microbatches)
        fail("simulate: the schedule names a chunk or a microbatch that it does not have; verify names the action");
  simulation result;
  if (!detail::run_schedule(s, costs, result)) fail("simulate: the schedule cannot finish; verify names the action");
  return result;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
