// Simulates a step with cut parameters (ZeRO-3) and without a pipeline, on the links that its ranks share. Each unit is
// gathered before it is used, forward and backward, and its gradients are reduced after the backward pass.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "plan_llama/planner/link_loads.hpp"
#include "plan_llama/planner/step_time.hpp"

namespace plait::planner::detail {

/// The share of time that a part's passes communicate over their slowest axis, and the network level of that axis.
struct pass_load {
  double share = 0;
  std::size_t level = 0;

  pass_load(const hardware& h, const training_layout& l, const part_time& part) {
    const double all = part.forward.sum() + part.input.sum() + part.weight.sum();
    const std::pair<double, group_place> over[] = {
        {part.forward.tensor + part.input.tensor, place_group(h, l.tp_axis())},
        {part.forward.context + part.input.context, place_group(h, l.cp_axis())},
        {part.forward.experts + part.input.experts, place_group(h, l.ep_axis(), l.ep_over_dp())}};
    const auto& most = *std::max_element(std::begin(over), std::end(over),
                                         [](const auto& x, const auto& y) { return x.first < y.first; });
    share = all > 0 ? most.first / all : 0;
    level = outermost_level(most.second);
  }
};

/// A unit: parameters that are gathered and reduced together (a block, the embedding or the head), with the seconds of
/// its passes and transfers in a microbatch, each without others.
struct sharded_unit {
  double forward = 0, backward = 0;
  pass_load load;
  link_transfer gather, reduce, copies;  ///< copies: the sum over copies in a hybrid
};

inline std::vector<sharded_unit> sharded_units(hardware h, const training_job& job, const training_layout& l) {
  for (network_level& level : h.levels) level.shared_by = 1;  // times without other transfers
  const stage_times times(h, job, l);
  const data_groups groups(h, l), of_experts(place_group(h, l.expert_copies_axis(), l.expert_copies_over_dp()));
  const software& program = job.program;
  const transformer_shape& m = job.model;
  const auto tp = static_cast<double>(l.tp);
  const auto unit = [&](const part_time& part, double parameters, double reduced, double experts) {
    sharded_unit u{part.forward.sum(),
                   part.backward() + accumulation_seconds(h, job, l, reduced + experts),
                   pass_load(h, l, part),
                   {},
                   {},
                   {}};
    const std::size_t level = outermost_level(groups.cut);
    const auto both = [&](collective kind, double values, double bytes) {
      return collective_seconds(h, groups.cut, kind, values * bytes) +
             (experts > 0 ? collective_seconds(h, of_experts.cut, kind, experts * bytes) : 0);
    };
    u.gather = {both(collective::all_gather, parameters, program.weight_bytes), level, 1};
    if (reduced + experts > 0) {
      const double piece = reduced * program.reduced_bytes / static_cast<double>(groups.cut.size);
      u.reduce = {both(collective::reduce_scatter, reduced, program.reduced_bytes), level, 1};
      u.copies = {collective_seconds(h, groups.copies, collective::all_reduce, piece), outermost_level(groups.copies),
                  1};
    }
    return u;
  };
  std::vector<sharded_unit> out;
  const double embedding = m.embedding_parameters() / tp, head = static_cast<double>(m.vocab * m.hidden) / tp;
  out.push_back(unit(times.embedding, embedding, embedding, 0));
  const sharded_unit block = unit(times.block, m.layer_parameters() / tp, m.layer_parameters() / tp,
                                  m.layer_experts() / static_cast<double>(l.expert_pieces()));
  if (m.dense_layers > 0) {
    const double first = m.of_first_blocks().layer_parameters() / tp;
    out.insert(out.end(), static_cast<std::size_t>(m.dense_layers), unit(times.first_block, first, first, 0));
  }
  out.insert(out.end(), static_cast<std::size_t>(m.layers - m.dense_layers), block);
  out.push_back(unit(times.head, head, m.tied ? 0 : head, 0));  // a tied head is reduced with the embedding
  return out;
}

/// Simulates one rank's step event by event; all ranks meet at every unit. At one time there are at most one pass, one
/// gather and one reduction. With overlap a unit is gathered while the one before it is used, so two units are whole. A
/// unit that is used twice in a row is not gathered again.
class sharded_simulation {
 public:
  sharded_simulation(const hardware& h, const training_job& job, const training_layout& l)
      : overlaps_(job.program.overlaps_data),
        gathers_late_(job.program.gathers_late),
        reduces_each_(job.program.reduces_each_microbatch),
        hidden_(h.data_hidden),
        microbatches_(static_cast<std::size_t>(l.microbatches(job))),
        units_(sharded_units(h, job, l)),
        loads_(h, l) {}

  /// Returns the seconds until the last gradients are reduced. Passes take `slower` times their time.
  double run(double slower) {
    now_ = 0, used_ = begun_ = gathered_ = 0;
    reductions_.clear();
    for (going& g : going_) g = {};
    const std::size_t uses = 2 * units_.size() * microbatches_;
    for (;;) {
      start_gather(uses);
      if (used_ < uses && !pass().on && ready()) start_pass(slower);
      start_reduction();
      if (!advance()) return now_;
    }
  }

 private:
  enum lane : std::size_t { passes, gathers, reductions, lanes };
  struct going {
    bool on = false;
    double left = 0, load = 0;
    std::size_t level = 0;
  };

  going& pass() { return going_[passes]; }
  bool backward(std::size_t use) const { return use / units_.size() % 2 == 1; }
  std::size_t unit_of(std::size_t use) const {
    const std::size_t at = use % units_.size();
    return backward(use) ? units_.size() - 1 - at : at;
  }
  /// Whether the use before has gathered this unit.
  bool kept(std::size_t use) const { return use > 0 && unit_of(use) == unit_of(use - 1); }
  bool nothing_to_reduce() const { return !going_[reductions].on && reductions_.empty(); }

  void start_gather(std::size_t uses) {
    while (!going_[gathers].on && gathered_ < uses) {
      // With overlap, the use before must have begun. Without overlap, it and its reduction must have ended.
      const bool beside = overlaps_ && !(gathers_late_ && backward(gathered_));
      if (gathered_ > (beside ? begun_ : used_) || (!overlaps_ && (pass().on || !nothing_to_reduce()))) return;
      const link_transfer& t = units_[unit_of(gathered_)].gather;
      if (kept(gathered_) || t.seconds == 0)
        ++gathered_;
      else
        begin(gathers, t);
    }
  }
  bool ready() const { return gathered_ > used_ && (overlaps_ || nothing_to_reduce()); }
  void start_pass(double slower) {
    const sharded_unit& u = units_[unit_of(used_)];
    begin(passes, {slower * (backward(used_) ? u.backward : u.forward), u.load.level, u.load.share});
    begun_ = used_ + 1;
    start_gather(2 * units_.size() * microbatches_);
  }
  void start_reduction() {
    if (going_[reductions].on || reductions_.empty()) return;
    begin(reductions, reductions_.front());
    reductions_.pop_front();
  }
  void begin(lane at, const link_transfer& t) {
    going_[at] = {true, t.seconds, t.load, t.level};
    loads_.add(t.level, 0, 0, t.load);
  }
  void finish(lane at) {
    going_[at].on = false;
    loads_.add(going_[at].level, 0, 0, -going_[at].load);
    if (at == gathers) ++gathered_;
    if (at != passes) return;
    const sharded_unit& u = units_[unit_of(used_)];
    const bool last = used_ >= 2 * units_.size() * (microbatches_ - 1);
    if (backward(used_) && (reduces_each_ || last))
      for (const link_transfer& t : {u.reduce, u.copies})
        if (t.seconds > 0) reductions_.push_back(t);
    ++used_;
  }

  /// Advances time to the next end of a pass or transfer. Returns false if there are none.
  bool advance() {
    double step = std::numeric_limits<double>::infinity(), slowed[lanes] = {};
    for (std::size_t i = 0; i < lanes; ++i) {
      if (!going_[i].on) continue;
      slowed[i] = loads_.slowing(going_[i].level, 0, 0, going_[i].load);
      // A collective during a pass gets the share of the time that the pass leaves.
      if (i != passes && pass().on) slowed[i] /= hidden_;
      step = std::min(step, going_[i].left * slowed[i]);
    }
    if (step == std::numeric_limits<double>::infinity()) return false;
    now_ += step;
    for (std::size_t i = 0; i < lanes; ++i) {
      if (!going_[i].on) continue;
      going_[i].left -= step / slowed[i];
      if (going_[i].left <= 1e-12 * now_) finish(static_cast<lane>(i));
    }
    return true;
  }

  bool overlaps_, gathers_late_, reduces_each_;
  double hidden_;
  std::size_t microbatches_;
  std::vector<sharded_unit> units_;
  link_loads loads_;
  std::size_t used_ = 0;      ///< uses of units whose pass has ended
  std::size_t begun_ = 0;     ///< uses of units whose pass has begun
  std::size_t gathered_ = 0;  ///< uses whose unit is gathered
  std::deque<link_transfer> reductions_;
  going going_[lanes];
  double now_ = 0;
};

}  // namespace plait::planner::detail
