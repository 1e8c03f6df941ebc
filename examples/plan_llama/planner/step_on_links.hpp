// Simulates a step of many ranks with the links that they share. Messages of the pipeline, collectives of data
// parallelism and communication within passes slow each other down on a shared link. One pipeline represents all equal
// ones, so a simulation of 100,000 ranks takes seconds.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "plan_llama/planner/link_loads.hpp"
#include "plan_llama/planner/sharded_on_links.hpp"
#include "plan_llama/planner/simulated_step.hpp"

namespace plait::planner {

/// The messages and collectives of a step, with the seconds that each takes without others.
struct link_work {
  using transfer = link_transfer;
  transfer message;                      ///< between stages; equal in both directions
  std::vector<transfer> gather, reduce;  ///< of each stage's parameters and gradients, over dp and cp
  std::vector<transfer> copies;          ///< of its reduced pieces, over the equal copies of a hybrid
  std::vector<std::int64_t> layers;      ///< of each stage
  double pass_load = 0;                  ///< load of passes by tp, cp or ep
  std::size_t pass_level = 0;
};

namespace detail {

inline link_work work_on_links(hardware h, const training_job& job, const training_layout& l) {
  for (network_level& level : h.levels) level.shared_by = 1;  // times without other transfers
  const software& program = job.program;
  link_work out;
  const double values = rank_sizes(job, l).tokens * static_cast<double>(job.model.hidden) / static_cast<double>(l.tp);
  const double bytes = program.activation_bytes() * values;
  out.message = {message_seconds(h, l.pp_axis(), bytes), level_of_message(h, l.pp_axis())};
  if (out.message.seconds > 0) out.message.load = 1 - message_seconds(h, l.pp_axis(), 0) / out.message.seconds;
  const data_groups groups(h, l);
  const group_place &data = groups.cut, copies = place_group(h, l.expert_copies_axis(), l.expert_copies_over_dp());
  const double first_parameters = job.model.of_first_blocks().layer_parameters();
  for (std::int64_t stage = 0; stage < l.stages(); ++stage) {
    const block_counts blocks = blocks_of_stage(job.model, l.stages(), stage);
    out.layers.push_back(blocks.all());
    double parameters = (static_cast<double>(blocks.alike) * job.model.layer_parameters() +
                         static_cast<double>(blocks.first) * first_parameters) /
                        static_cast<double>(l.tp);
    const double experts =
        static_cast<double>(blocks.alike) * job.model.layer_experts() / static_cast<double>(l.expert_pieces());
    const double table = static_cast<double>(job.model.vocab * job.model.hidden) / static_cast<double>(l.tp);
    if (stage == 0) parameters += table;
    if (stage + 1 == l.stages() && !is_tied_here(job, l)) parameters += table;
    const bool whole = l.zero == zero_level::replicated;
    const auto of = [&](double seconds) { return link_work::transfer{seconds, outermost_level(data), 1}; };
    const data_groups of_experts(copies);
    const reduction_time own(h, program, l, groups, parameters * program.reduced_bytes);
    const reduction_time theirs(h, program, l, of_experts, experts * program.reduced_bytes);
    out.reduce.push_back({own.reduce + (experts > 0 ? theirs.reduce : 0),
                          outermost_level(sums_whole(program, l) ? groups.all : data), 1});
    out.copies.push_back({own.copies, outermost_level(groups.copies), 1});
    const double in = gather_seconds(h, program, l, groups, parameters * program.weight_bytes) +
                      (experts > 0 ? gather_seconds(h, program, l, of_experts, experts * program.weight_bytes) : 0);
    out.gather.push_back(of(whole ? 0 : in));
  }
  const pass_load passes(h, l, block_time(h, job, l));
  out.pass_load = passes.share, out.pass_level = passes.level;
  return out;
}

/// Simulates one pipeline's step event by event: all active passes and transfers advance at the rate that their links
/// allow, until the next one ends.
class link_simulation {
 public:
  link_simulation(const hardware& h, const training_job& job, const training_layout& l, const plait::schedule& s)
      : job_(job), l_(l), s_(s), hidden_(h.data_hidden), work_(work_on_links(h, job, l)), loads_(h, l) {
    const auto cells = static_cast<std::size_t>(s.shape.stages() * s.shape.microbatches);
    uses_.resize(static_cast<std::size_t>(s.shape.stages()));
    for (std::size_t p = 0; p < s.order.size(); ++p)
      for (std::size_t i = 0; i < s.order[p].size(); ++i) {
        use& u = uses_[stage_at(p, s.order[p][i])];
        if (s.order[p][i].kind == action_kind::forward) u.first = std::min(u.first, i);
        if (frees_activations(s.order[p][i].kind)) u.last = i;
      }
    forward_.resize(cells), backward_.resize(cells), input_.resize(cells), gradient_.resize(cells);
  }

  /// Returns the seconds until the last rank has its reduced gradients. `costs` has the times of each stage's passes.
  double run(const schedule_costs& costs) {
    for (auto* of : {&forward_, &backward_, &input_, &gradient_}) of->assign(of->size(), 0);
    places_.assign(s_.order.size(), {});
    for (std::size_t p = 0; p < places_.size(); ++p) {
      places_[p].gathered.assign(static_cast<std::size_t>(s_.shape.chunks), 0);
      for (int c = 0; c < s_.shape.chunks; ++c) queue_gather(p, c);
      next_collective(p);
    }
    now_ = 0;
    for (;;) {
      for (std::size_t p = 0; p < places_.size(); ++p) start(p, costs);
      if (going_.empty()) return now_;
      advance();
    }
  }

 private:
  enum class what : std::uint8_t { pass, message, collective };
  struct going {
    what kind;
    std::size_t from, to, level;
    double left, load;
    std::size_t cell = 0;  ///< the message, or the place's action
    bool forward = false;
  };
  struct use {
    std::size_t first = std::numeric_limits<std::size_t>::max(), last = 0;
  };
  struct piece {
    link_work::transfer work;
    double part;
    int chunk;  ///< chunk of a gather; -1: a reduction
  };
  struct place {
    std::size_t at = 0;
    bool busy = false, held = false, collecting = false;
    std::vector<int> gathered{};  ///< pieces of each chunk: 1 has the first layer, 2 all
    std::vector<piece> waiting{};
    std::size_t next = 0;
  };

  std::size_t stage_at(std::size_t p, const action& a) const {
    return static_cast<std::size_t>(s_.shape.stage_of(static_cast<int>(p), a.chunk));
  }
  std::size_t cell_of(std::size_t stage, const action& a) const {
    return stage * static_cast<std::size_t>(s_.shape.microbatches) + a.microbatch;
  }

  bool gathers_beside() const { return job_.program.overlaps_data && !job_.program.broadcasts_slices; }
  void queue_gather(std::size_t p, int chunk) {
    const auto stage = static_cast<std::size_t>(s_.shape.stage_of(static_cast<int>(p), chunk));
    if (work_.gather[stage].seconds == 0) {
      places_[p].gathered[static_cast<std::size_t>(chunk)] = 2;
      return;
    }
    const double first = 1 / static_cast<double>(std::max<std::int64_t>(1, work_.layers[stage]));
    const bool beside = gathers_beside();
    places_[p].waiting.push_back({work_.gather[stage], beside ? first : 0.5, chunk});
    places_[p].waiting.push_back({work_.gather[stage], beside ? 1 - first : 0.5, chunk});
  }
  /// Queues the reduction of a stage. All of it but the last layer's part may run during the pass that ends its
  /// gradients.
  void queue_reduction(std::size_t p, std::size_t stage, bool at_the_start) {
    const double last = 1 / static_cast<double>(std::max<std::int64_t>(1, work_.layers[stage]));
    const double part = at_the_start ? 1 - last : job_.program.overlaps_data ? last : 1;
    for (const link_work::transfer& all : {work_.reduce[stage], work_.copies[stage]})
      if (all.seconds > 0 && part > 0) places_[p].waiting.push_back({all, part, -1});
    next_collective(p);
  }
  void next_collective(std::size_t p) {
    place& mine = places_[p];
    if (mine.collecting || mine.next == mine.waiting.size()) return;
    const piece& c = mine.waiting[mine.next];
    mine.collecting = true;
    begin({what::collective, p, p, c.work.level, c.part * c.work.seconds, c.work.load});
  }
  void begin(going g) {
    loads_.add(g.level, g.from, g.to, g.load);
    going_.push_back(g);
  }

  /// Whether the place's next action has its inputs.
  bool ready(std::size_t p, const action& a) const {
    const std::size_t stage = stage_at(p, a), cell = cell_of(stage, a);
    if (a.kind == action_kind::forward) {
      const int have = places_[p].gathered[static_cast<std::size_t>(a.chunk)];
      return (stage == 0 || input_[cell]) && have >= (gathers_beside() ? 1 : 2);
    }
    if (!gives_input_gradient(a.kind)) return backward_[cell];
    return forward_[cell] && (stage + 1 == uses_.size() || gradient_[cell]);
  }
  bool reduces(std::size_t p, const action& a) const {
    const bool each = job_.program.reduces_each_microbatch && l_.zero == zero_level::gradients;
    return frees_activations(a.kind) && (each || uses_[stage_at(p, a)].last == places_[p].at);
  }
  void start(std::size_t p, const schedule_costs& costs) {
    place& mine = places_[p];
    if (mine.busy || mine.at == s_.order[p].size()) return;
    const action a = s_.order[p][mine.at];
    if (!ready(p, a)) return;
    mine.busy = true;
    begin({what::pass, p, p, work_.pass_level, costs.of(s_.shape, a.kind, static_cast<int>(stage_at(p, a))),
           work_.pass_load});
    if (job_.program.overlaps_data && reduces(p, a)) queue_reduction(p, stage_at(p, a), true);
  }

  void send(std::size_t p, std::size_t to_stage, std::size_t cell, bool forward) {
    const auto to = static_cast<std::size_t>(s_.shape.rank_of(static_cast<int>(to_stage)));
    auto& arrived = forward ? input_ : gradient_;
    if (to == p || work_.message.seconds == 0)
      arrived[cell] = 1;
    else
      begin({what::message, p, to, work_.message.level, work_.message.seconds, work_.message.load, cell, forward});
  }
  void finish_pass(std::size_t p) {
    place& mine = places_[p];
    const action a = s_.order[p][mine.at];
    const std::size_t stage = stage_at(p, a), cell = cell_of(stage, a);
    const auto row = static_cast<std::size_t>(s_.shape.microbatches);
    // The first pass of a stage cannot end before the last of its parameters has been gathered.
    mine.held = a.kind == action_kind::forward && mine.gathered[static_cast<std::size_t>(a.chunk)] < 2;
    if (mine.held) return;
    if (a.kind == action_kind::forward) {
      forward_[cell] = 1;
      if (stage + 1 < uses_.size()) send(p, stage + 1, cell + row, true);
    }
    if (gives_input_gradient(a.kind)) {
      backward_[cell] = 1;
      if (stage > 0) send(p, stage - 1, cell - row, false);
    }
    if (reduces(p, a)) queue_reduction(p, stage, false);
    mine.busy = false;
    ++mine.at;
  }
  void finish(const going& g) {
    if (g.kind == what::message) {
      (g.forward ? input_ : gradient_)[g.cell] = 1;
    } else if (g.kind == what::pass) {
      finish_pass(g.from);
    } else {
      place& mine = places_[g.from];
      const int chunk = mine.waiting[mine.next++].chunk;
      if (chunk >= 0) ++mine.gathered[static_cast<std::size_t>(chunk)];
      mine.collecting = false;
      next_collective(g.from);
      if (mine.held) finish_pass(g.from);
    }
  }

  /// Advances time to the next end of a pass or transfer.
  void advance() {
    double step = std::numeric_limits<double>::infinity();
    slowed_.clear();
    for (const going& g : going_) {
      double slower = loads_.slowing(g.level, g.from, g.to, g.load);
      // A collective during a pass gets the share of the time that the pass leaves, which may be 0.
      const place& mine = places_[g.from];
      if (g.kind == what::collective && mine.busy && !mine.held) slower /= hidden_;
      slowed_.push_back(slower);
      step = std::min(step, g.left * slower);
    }
    now_ += step;
    std::vector<going> ended;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < going_.size(); ++i) {
      going_[i].left -= step / slowed_[i];
      if (going_[i].left <= 1e-12 * now_) {
        loads_.add(going_[i].level, going_[i].from, going_[i].to, -going_[i].load);
        ended.push_back(going_[i]);
      } else {
        going_[kept++] = going_[i];
      }
    }
    going_.resize(kept);
    for (const going& g : ended) finish(g);
  }

  const training_job& job_;
  const training_layout& l_;
  const plait::schedule& s_;
  double hidden_;
  link_work work_;
  link_loads loads_;
  std::vector<use> uses_;
  std::vector<char> forward_, backward_, input_, gradient_;  ///< for each cell: passes done, and messages arrived
  std::vector<place> places_;
  std::vector<going> going_;
  std::vector<double> slowed_;
  double now_ = 0;
};

}  // namespace detail

/// Returns the seconds of a step on the links of the machine, including the optimizer and the waits for offloaded
/// activations. With a disturbance each replica has passes of different lengths; up to `replicas` are simulated one by
/// one. Without one, one replica represents all. Ranks of one replica that share a link meet at simulated times. Other
/// replicas are assumed to do the same at the same time. With cut parameters all replicas meet at every layer, so the
/// slowest represents all.
inline double step_on_links(const hardware& h, const training_job& job, const layout_price& priced,
                            const disturbance& d = {}, std::int64_t replicas = 1) {
  const training_layout& l = priced.layout;
  const step_costing even = cost_schedule(h, job, l);
  const bool alike = d.jitter == 0 && d.slow_rank == 1;
  const std::int64_t drawn = alike ? 1 : std::min(std::max<std::int64_t>(replicas, 1), l.dp);
  disturbed_costs draws(even, l, d);
  double worst = 0;
  if (l.zero == zero_level::parameters) {
    double slowest = 0;
    for (std::int64_t r = 0; r < drawn; ++r)
      slowest = std::max(slowest, draws.of_replica(r).stages[0].forward / even.costs.stages[0].forward);
    worst = detail::sharded_simulation(h, job, l).run(slowest);
  } else {
    detail::link_simulation pipeline(h, job, l, even.schedule);
    for (std::int64_t r = 0; r < drawn; ++r) worst = std::max(worst, pipeline.run(draws.of_replica(r)));
  }
  return worst + priced.seconds.optimizer + priced.seconds.offload;
}

}  // namespace plait::planner
