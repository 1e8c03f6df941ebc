// The times of a step for given costs: passes in one stream, gathers and reductions in two more that share a link, and
// who waits for what. Nothing is measured here. Next: schedule/step/expand.hpp for the steps, schedule/simulate.hpp for
// pipelines without data parallelism.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/schedule/step/step_schedule.hpp"

namespace plait {

/// What the parts of a step cost. Times are in any one unit, bandwidths in bytes per such unit.
struct step_costs {
  std::vector<action_times> units{};  ///< of each unit, for one microbatch
  std::vector<double> updates{};      ///< of each unit's optimizer; empty: nothing
  double norm = 0;                    ///< once all gradients are reduced
  double message = 0;                 ///< from the end of a pass until the next stage's rank has its result
  int data_ranks = 1;                 ///< n, that share a unit's parameters
  double gather_bytes = 2;            ///< of a parameter, as it is gathered
  double reduce_bytes = 4;            ///< of a gradient, as it is reduced
  double bandwidth = 0;  ///< of a rank's link to the others of its data axes; 0: communication takes no time
  double latency = 0;    ///< of a gather or a reduction
};

/// Returns the bytes that a rank sends for a gather or a reduction of a unit over n ranks: (n-1)/n of it, and for the
/// all-reduce of replicated gradients twice that.
inline double wire_bytes(const step_schedule& s, const step_costs& costs, step_op op, int unit) {
  const double n = costs.data_ranks, size = static_cast<double>(s.units[static_cast<std::size_t>(unit)].parameters);
  const double part = size * (n - 1) / n;
  if (op == step_op::gather) return part * costs.gather_bytes;
  return part * costs.reduce_bytes * (s.policy.level == zero_level::replicated ? 2 : 1);
}

struct timed_entry {
  step_entry entry;
  double start = 0, end = 0;
  double waited = 0;  ///< how long the rank stood still before it, for a message, a gather, reductions or other ranks
};

/// A step among equal steps, the last of several that were simulated one after the other.
struct step_simulation {
  std::vector<std::vector<timed_entry>> ranks;  ///< of each rank, in its program's order; times from the step's begin
  /// The gathers and reductions on each rank's link during the step, from when those of the kind before them are over;
  /// also what the step before has started, and of what goes on after it the part that lies in the step.
  std::vector<std::vector<timed_entry>> links;
  std::vector<double> link_busy;    ///< of each rank: how long its link was in use during the step
  std::vector<double> link_hidden;  ///< of that, how long passes or updates went on
  double period = 0;                ///< from one step's end to the next one's

  /// The share of communication over the data axes that went on while something was computed; 1 where there is none.
  double hidden_share() const {
    double busy = 0, hidden = 0;
    for (const double t : link_busy) busy += t;
    for (const double t : link_hidden) hidden += t;
    return busy > 0 ? hidden / busy : 1;
  }
  /// How long a rank stood still for entries of this kind: passes that wait for gathers or messages, the norm and
  /// updates for reductions.
  double waited(int rank, step_op op) const {
    double sum = 0;
    for (const timed_entry& e : ranks[static_cast<std::size_t>(rank)])
      if (e.entry.op == op) sum += e.waited;
    return sum;
  }
};

namespace detail {

/// A rank's link: a queue of gathers and one of reductions. Where both have something, each gets half of the bandwidth.
class shared_link {
 public:
  struct use {
    double begin, end;
  };

  explicit shared_link(double bandwidth) : bandwidth_(bandwidth) {}

  /// Starts a transfer at a time, which must not be before earlier ones; returns its number.
  std::size_t post(int queue, double at, double bytes, double latency) {
    advance(at);
    ends_.push_back(-1);
    begins_.push_back(queues_[queue].empty() ? at : -1);
    queues_[queue].push_back({ends_.size() - 1, bandwidth_ > 0 ? bytes + latency * bandwidth_ : 0});
    return ends_.size() - 1;
  }
  /// When it went on the link, and when it was over; negative: not by now.
  use known_use_of(std::size_t number) const { return {begins_[number], ends_[number]}; }
  /// Returns when it is over.
  double end_of(std::size_t number) {
    while (ends_[number] < 0) finish_next();
    return ends_[number];
  }
  void advance(double until) {
    while (now_ < until) {
      if (queues_[0].empty() && queues_[1].empty()) {
        now_ = until;
        return;
      }
      if (next_end() > until) {
        move(until - now_);
        return;
      }
      finish_next();
    }
  }
  /// The times when it was in use.
  const std::vector<use>& uses() const { return uses_; }

 private:
  struct transfer {
    std::size_t number;
    double left;  ///< bytes
  };

  double rate() const { return queues_[0].empty() || queues_[1].empty() ? bandwidth_ : bandwidth_ / 2; }
  double next_end() const {
    double least = -1;
    for (const auto& q : queues_)
      if (!q.empty() && (least < 0 || q.front().left < least)) least = q.front().left;
    return bandwidth_ > 0 ? now_ + least / rate() : now_;
  }
  void move(double time) {
    if (time <= 0) return;
    const double bytes = time * rate();
    for (auto& q : queues_)
      if (!q.empty()) q.front().left = std::max(0.0, q.front().left - bytes);  // rounding must not go below
    if (!uses_.empty() && uses_.back().end == now_)
      uses_.back().end = now_ + time;
    else
      uses_.push_back({now_, now_ + time});
    now_ += time;
  }
  void finish_next() {
    double least = -1;
    std::size_t first = 0;
    for (std::size_t q = 0; q < 2; ++q)
      if (!queues_[q].empty() && (least < 0 || queues_[q].front().left < least))
        least = queues_[q].front().left, first = q;
    if (bandwidth_ > 0) move(least / rate());
    ends_[queues_[first].front().number] = now_;
    queues_[first].pop_front();
    if (!queues_[first].empty()) begins_[queues_[first].front().number] = now_;
  }

  double bandwidth_, now_ = 0;
  std::deque<transfer> queues_[2];
  std::vector<double> begins_, ends_;  ///< negative: not yet
  std::vector<use> uses_;
};

/// The ranks of a pipeline, each in its own time, until all have run so many steps.
class step_clock {
 public:
  step_clock(const step_schedule& s, const step_costs& costs, int steps)
      : s_(s),
        costs_(costs),
        steps_(steps),
        cells_(static_cast<std::size_t>(s.shape.stages()) * static_cast<std::size_t>(s.shape.microbatches)) {
    for (std::size_t r = 0; r < s.programs.size(); ++r) {
      ranks_.push_back({shared_link(costs.bandwidth), std::vector<std::size_t>(s.units.size(), none),
                        std::vector<std::size_t>(s.units.size(), none)});
      ranks_.back().begins.push_back(0);
    }
    norms_.resize(static_cast<std::size_t>(steps));
    arrivals_.assign(static_cast<std::size_t>(steps) * 2 * cells_, -1.0);
  }

  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t r = 0; r < ranks_.size(); ++r)
        while (advance(r)) moved = true;
    }
    for (const rank_clock& r : ranks_)
      if (r.step < steps_) fail("simulate: the step cannot finish; verify names the entry");
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
      out.ranks.push_back(r.last);
    }
    out.period = end - before;
    return out;
  }

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);
  struct rank_clock {
    shared_link link;
    std::vector<std::size_t> gathers, reductions;  ///< the last of each unit on the link
    std::vector<timed_entry> last{};               ///< of the last step
    std::vector<step_entry> posted{};              ///< by their numbers on the link
    std::vector<double> begins{};                  ///< of each step
    double now = 0;
    std::size_t at = 0;
    int step = 0;
  };

  /// When the input of a pass is there: negative, not yet.
  double& arrival(int step, bool gradient, int stage, int microbatch) {
    return arrivals_[(static_cast<std::size_t>(step) * 2 + (gradient ? 1 : 0)) * cells_ +
                     static_cast<std::size_t>(stage * s_.shape.microbatches + microbatch)];
  }

  /// Runs the next entry of a rank; false where it waits for another rank, or is through.
  bool advance(std::size_t rank) {
    rank_clock& r = ranks_[rank];
    if (r.step == steps_) return false;
    const std::vector<step_entry>& program = s_.programs[rank];
    if (r.at == program.size()) {
      r.begins.push_back(r.now);
      r.at = 0;
      ++r.step;
      return true;
    }
    const step_entry& e = program[r.at];
    double ready = r.now, lasts = 0;
    const auto unit = static_cast<std::size_t>(e.unit);
    switch (e.op) {
      case step_op::pass: {
        if (!input_is_there(r, e, ready)) return false;
        if (reads_parameters(e.pass.kind) && r.gathers[unit] != none)
          ready = std::max(ready, r.link.end_of(r.gathers[unit]));
        lasts = costs_.units[unit].of(e.pass.kind);
        break;
      }
      case step_op::gather:
        r.posted.push_back(e);
        r.gathers[unit] = r.link.post(0, r.now, wire_bytes(s_, costs_, e.op, e.unit), costs_.latency);
        break;
      case step_op::reduce:
        r.posted.push_back(e);
        r.reductions[unit] = r.link.post(1, r.now, wire_bytes(s_, costs_, e.op, e.unit), costs_.latency);
        break;
      case step_op::norm: {
        std::vector<double>& arrived = norms_[static_cast<std::size_t>(r.step)];
        if (arrived.empty()) arrived.assign(ranks_.size(), -1.0);
        if (arrived[rank] < 0) {
          double there = r.now;
          for (const std::size_t transfer : r.reductions)
            if (transfer != none) there = std::max(there, r.link.end_of(transfer));
          arrived[rank] = there;
        }
        if (*std::min_element(arrived.begin(), arrived.end()) < 0) return false;
        ready = *std::max_element(arrived.begin(), arrived.end());
        lasts = costs_.norm;
        break;
      }
      case step_op::update:
        if (r.reductions[unit] != none) ready = std::max(ready, r.link.end_of(r.reductions[unit]));
        lasts = costs_.updates.empty() ? 0 : costs_.updates[unit];
        break;
      default:
        break;
    }
    const double start = std::max(ready, r.now);
    if (r.step == steps_ - 1) r.last.push_back({e, start, start + lasts, start - r.now});
    r.now = start + lasts;
    if (e.op == step_op::pass) hand_on(r, e);
    ++r.at;
    return true;
  }

  bool input_is_there(const rank_clock& r, const step_entry& e, double& ready) {
    const int stage = s_.units[static_cast<std::size_t>(e.unit)].stage, mb = e.pass.microbatch;
    const bool forward = e.pass.kind == action_kind::forward;
    if (!forward && !gives_input_gradient(e.pass.kind)) return true;
    if (!is_end(e.unit, forward)) return true;
    if (forward ? stage == 0 : stage == s_.shape.stages() - 1) return true;
    const double there = arrival(r.step, !forward, stage, mb);
    if (there < 0) return false;
    ready = std::max(ready, there);
    return true;
  }
  /// The result of a pass's last unit reaches the next stage.
  void hand_on(const rank_clock& r, const step_entry& e) {
    const int stage = s_.units[static_cast<std::size_t>(e.unit)].stage;
    const bool forward = e.pass.kind == action_kind::forward;
    if (!forward && !gives_input_gradient(e.pass.kind)) return;
    if (!is_end(e.unit, !forward)) return;
    const int to = forward ? stage + 1 : stage - 1;
    if (to < 0 || to == s_.shape.stages()) return;
    const bool same_rank = s_.shape.rank_of(to) == s_.shape.rank_of(stage);
    arrival(r.step, !forward, to, e.pass.microbatch) = r.now + (same_rank ? 0 : costs_.message);
  }
  /// Whether a unit is the first of its stage, or the last one.
  bool is_end(int unit, bool first) const {
    const int next = first ? unit - 1 : unit + 1;
    return next < 0 || next == static_cast<int>(s_.units.size()) ||
           s_.units[static_cast<std::size_t>(next)].stage != s_.units[static_cast<std::size_t>(unit)].stage;
  }

  const step_schedule& s_;
  step_costs costs_;
  int steps_;
  std::size_t cells_;
  std::vector<rank_clock> ranks_;
  std::vector<std::vector<double>> norms_;  ///< of each step: when each rank reached it
  std::vector<double> arrivals_;
};

}  // namespace detail

/// Times of a step among equal steps: three are simulated, and the last is returned, so that gathers after an update
/// hide behind the next forward pass as far as they can. Each rank goes through its program; a gather or a reduction is
/// on its link from the time at which the entries before it are over, in the order of its kind; sends take
/// `costs.message`, and the exchange of ties between stages nothing. The step must be one that `verify` accepts, and
/// every stage must have a unit. Throws `error` for costs of other sizes.
inline step_simulation simulate(const step_schedule& s, const step_costs& costs) {
  if (costs.units.size() != s.units.size()) fail("step_costs: units has not one entry per unit");
  if (!costs.updates.empty() && costs.updates.size() != s.units.size())
    fail("step_costs: updates has not one entry per unit");
  if (costs.data_ranks < 1) fail({"step_costs: data_ranks is ", costs.data_ranks, "; legal is 1 or more"});
  std::vector<bool> has_units(static_cast<std::size_t>(s.shape.stages()), false);
  for (const step_unit& u : s.units) has_units[static_cast<std::size_t>(u.stage)] = true;
  for (std::size_t stage = 0; stage < has_units.size(); ++stage)
    if (!has_units[stage]) fail({"simulate: stage ", stage, " has no unit, so its passes have no place in the step"});
  detail::step_clock clock(s, costs, 3);
  clock.run();
  return clock.last_step();
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
