// The executor of a step on one rank: it runs the entries of a program in order. Entries compute, send, receive,
// gather, reduce and update.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/core/compiled.hpp"
#ifndef PLAIT_NO_CPU
#include "plait/device/cpu.hpp"
#endif
#include "plait/core/macros_off.hpp"
#include "plait/device/device.hpp"
#include "plait/parallel/offload.hpp"
#include "plait/schedule/schedule.hpp"
#ifndef PLAIT_COMPILED
#include "plait/schedule/expand.hpp"
#include "plait/schedule/verify.hpp"
#endif
#include "plait/tensor/microbatch.hpp"

namespace plait {

/// One line of a measured timeline: begin and end of an entry of the program, in seconds of `comm_clock`. A send or a
/// receive lasts from its start until the executor sees its completion. To measure, the executor waits for the device
/// after each action.
struct pipeline_event {
  step_entry step;
  double begin = 0, end = 0;
  std::uint64_t bytes = 0;  ///< of a message
  std::size_t memory = 0;   ///< bytes in use on the device after a compute
};

/// Measures the times and waits of a rank's program. Waits are recorded in every run, by place: the index of an entry
/// in the rank's program. The index after the last entry is the end of the step.
class step_watch {
 public:
  /// Receives the times of entries, in seconds of `comm_clock`; null: no times. To measure, the executor waits for the
  /// device. Each unit of a pass has its own time, without the wait before it. Gathers and reductions have the time of
  /// their start. The norm and updates have their time with waits.
  std::vector<timed_entry>* times = nullptr;

  /// The waits of all runs so far.
  const wait_times& waits() const { return waits_; }

  /// Counts the calls in `book` as this run's, until `end_run`.
  void begin_run(ledger& book) {
    book_ = &book;
    book.waits = &waits_;
  }
  void end_run() noexcept {
    waits_.at(-1);
    if (book_ != nullptr) book_->waits = nullptr;
    book_ = nullptr;
  }
  void at(std::size_t entry) {
    if (book_ != nullptr) waits_.at(static_cast<int>(entry));
  }

  /// Begins the time of an entry's computation. It ends before the next entry's begins.
  template <class Device>
  void begin(Device& device, const step_entry& e) {
    if (times == nullptr) return;
    device.synchronize();
    waited_ = waits_.seconds();
    times->push_back({e, comm_clock(), 0, 0});
  }
  template <class Device>
  void end(Device& device) {
    if (times == nullptr) return;
    device.synchronize();
    times->back().end = comm_clock();
    times->back().waited = waits_.seconds() - waited_;
  }

 private:
  wait_times waits_;
  ledger* book_ = nullptr;
  double waited_ = 0;  ///< when the entry began
};

/// The stages that an executor runs on this rank, by chunk. Activations and their gradients are tensors, whose shapes
/// may differ between stages. The first stage's input and the last stage's output are empty.
///
///     activation input(ctx, chunk)                      allocates the message from the previous stage
///     gradient   output_gradient(ctx, chunk)            allocates the message from the next stage
///     activation forward(ctx, chunk, microbatch, activation, saved*)      null: no backward pass follows
///     gradient   backward(ctx, chunk, microbatch, saved&, gradient, weight_work*)      null: weight gradients at once
///
/// Steps with more than computation and messages also require
///
///     void       perform(ctx, step_entry)              runs a gather, release, reduction, norm or update
///     void       enter(ctx, unit, action_kind)         begins the use of a unit's parameters by a pass
///     void       watch(unit_watcher*)                  sets the observer to which passes of stages with several units
///                                                      announce each unit, by its number in the stage; null: none
///     void       visit_kept(chunk, unit, saved&, f)    calls f(memory) for each value that a unit keeps: see `model`
template <class S, class Device>
concept pipeline_stages =
    requires(S& s, const context<Device>& ctx, int chunk, int microbatch, typename S::activation x,
             typename S::gradient dy, typename S::saved& kept, weight_work* deferred) {
      { s.input(ctx, chunk) } -> std::same_as<typename S::activation>;
      { s.output_gradient(ctx, chunk) } -> std::same_as<typename S::gradient>;
      { s.forward(ctx, chunk, microbatch, std::move(x), &kept) } -> std::same_as<typename S::activation>;
      { s.backward(ctx, chunk, microbatch, kept, std::move(dy), deferred) } -> std::same_as<typename S::gradient>;
    };

namespace detail {

/// The tensor of a message: `count` elements.
struct message_elements {
  void* data = nullptr;
  std::size_t count = 0;
  dtype type{};
};

/// The stages of a run and their tensors, without their types: the executor's code is compiled once for all models. A
/// slot is one microbatch of one chunk, and keeps what its passes and messages need.
template <class Device>
class stage_slots {
 public:
  /// Runs a pass on the tensors of `slot`. The result stays there.
  virtual void forward(int slot, const action& a, bool keeps) = 0;
  virtual void backward(int slot, const action& a, weight_work* deferred) = 0;
  /// Releases the values that a forward pass has kept.
  virtual void release_kept(int slot) = 0;
  /// Moves a result to the next stage on this rank.
  virtual void move_result(transfer_kind kind, int from, int to) = 0;
  /// The result of a pass, which a message sends.
  virtual message_elements result(transfer_kind kind, int slot) = 0;
  virtual void release_result(transfer_kind kind, int slot) = 0;
  /// Allocates the tensor that a message arrives in.
  virtual message_elements make_input(transfer_kind kind, int slot, int chunk) = 0;
  /// Offloads, drops or reloads the values that a unit, by its number in the stage, keeps of a microbatch.
  virtual void move_kept(const step_entry& e, int unit, int slot, offloaded_unit<Device>& host) = 0;
  virtual void perform(const step_entry& e) = 0;
  virtual void enter(int unit, action_kind kind) = 0;
  virtual void watch(unit_watcher* who) = 0;

 protected:
  ~stage_slots() = default;
};

/// The slots of one type of stages.
template <class Stages, class Device>
class typed_slots final : public stage_slots<Device> {
 public:
  typed_slots(const context<Device>& ctx, Stages& stages, const pipeline_shape& shape)
      : ctx_(ctx),
        stages_(stages),
        slots_(std::make_unique<slot[]>(static_cast<std::size_t>(shape.chunks) *
                                        static_cast<std::size_t>(shape.microbatches))) {}

  void forward(int number, const action& a, bool keeps) override {
    slot& s = at(number);
    s.out = stages_.forward(ctx_, a.chunk, a.microbatch, std::move(s.in), keeps ? &s.kept : nullptr);
  }
  void backward(int number, const action& a, weight_work* deferred) override {
    slot& s = at(number);
    s.gradient_out = stages_.backward(ctx_, a.chunk, a.microbatch, s.kept, std::move(s.gradient_in), deferred);
  }
  void release_kept(int number) override {
    auto& kept = at(number).kept;  // in place, since g++ 12 warns of a temporary's members
    std::destroy_at(&kept), std::construct_at(&kept);
  }
  void move_result(transfer_kind kind, int from, int to) override {
    if (kind == transfer_kind::activation)
      at(to).in = std::move(at(from).out);
    else
      at(to).gradient_in = std::move(at(from).gradient_out);
  }
  message_elements result(transfer_kind kind, int number) override {
    return kind == transfer_kind::activation ? elements(at(number).out) : elements(at(number).gradient_out);
  }
  void release_result(transfer_kind kind, int number) override {
    if (kind == transfer_kind::activation)
      at(number).out = {};
    else
      at(number).gradient_out = {};
  }
  message_elements make_input(transfer_kind kind, int number, int chunk) override {
    if (kind == transfer_kind::activation) return elements(at(number).in = stages_.input(ctx_, chunk));
    return elements(at(number).gradient_in = stages_.output_gradient(ctx_, chunk));
  }
  void move_kept(const step_entry& e, int unit, int number, offloaded_unit<Device>& host) override {
    const auto visit = [&](auto&& f) {
      if constexpr (requires(slot& s) { stages_.visit_kept(0, 0, s.kept, f); })
        stages_.visit_kept(e.pass.chunk, unit, at(number).kept, f);
      else
        fail({"step: ", describe(e), ", for which these stages have no member `visit_kept`"});
    };
    if (e.op == step_op::offload) host.offload(visit);
    if (e.op == step_op::drop) host.drop(visit);
    if (e.op == step_op::reload) host.reload(visit);
  }
  void perform(const step_entry& e) override {
    if constexpr (requires { stages_.perform(ctx_, e); })
      stages_.perform(ctx_, e);
    else
      fail({"step: ", describe(e), ", for which these stages have no member `perform`"});
  }
  void enter(int unit, action_kind kind) override {
    if constexpr (requires { stages_.enter(ctx_, unit, kind); }) stages_.enter(ctx_, unit, kind);
  }
  void watch(unit_watcher* who) override {
    if constexpr (requires { stages_.watch(who); }) stages_.watch(who);
  }

 private:
  struct slot {
    typename Stages::saved kept;
    typename Stages::activation in, out;
    typename Stages::gradient gradient_in, gradient_out;
  };
  slot& at(int number) { return slots_[static_cast<std::size_t>(number)]; }
  template <class Tensor>
  static message_elements elements(Tensor& t) {
    return {t.data(), static_cast<std::size_t>(t.size()), dtype_of<typename Tensor::value_type>};
  }

  const context<Device>& ctx_;
  Stages& stages_;
  std::unique_ptr<slot[]> slots_;
};

/// Returns the step of a schedule without gathers, reductions and updates.
step_schedule step_of_stages(const schedule& plan, const schedule_costs& costs);
/// Throws if `verify` refuses the program of `rank`. Returns its `arrived_sends`, and sets `gradients` to whether any
/// rank sends gradients.
std::vector<std::vector<std::size_t>> checked_program(const step_schedule& step, int rank, bool& gradients);

}  // namespace detail

/// Runs one rank's program of a step. Receives are posted at their place in the program, before they are needed; the
/// action that uses the message waits for it. Sends are completed at the end, or earlier to release their memory
/// (`release_by_schedule`). Gradients have a separate communicator, because some communicators (NCCL's) run messages in
/// one order: a late activation would delay a gradient that is ready. Rank r of `along` is rank r of the schedule.
template <compute_device Device>
class step_executor {
 public:
  /// Collective over `along`. Every rank passes the same step, except that other ranks' units may differ where no
  /// message concerns them. Throws if `verify` refuses this rank's part.
  step_executor(any_communicator along, step_schedule step);
  step_executor(step_executor&&) noexcept;
  step_executor& operator=(step_executor&&) noexcept;
  ~step_executor();
  /// Runs a pipeline's schedule without gathers, reductions and updates.
  step_executor(any_communicator along, const schedule& plan, const schedule_costs& costs = {})
      : step_executor(std::move(along), detail::step_of_stages(plan, costs)) {}

  const pipeline_shape& shape() const { return step_.shape; }
  const step_schedule& step() const { return step_; }
  any_communicator& along() { return along_; }
  const any_communicator& along() const { return along_; }

  /// Releases sent tensors when the schedule guarantees their arrival, without a query of the device, so runs can be
  /// recorded. This keeps each activation until its gradient returns, which needs more memory.
  void release_by_schedule() { by_schedule_ = true; }

  /// Receives the events of a run; null: no events.
  std::vector<pipeline_event>* events = nullptr;
  /// Returns the measurements of runs with `keeps`, by entries of the program.
  step_watch& measured() { return watch_; }

  /// Runs the whole program. With `keeps` false, for programs without backward passes, nothing is kept.
  template <class Stages>
    requires pipeline_stages<Stages, Device>
  void run(const context<Device>& ctx, Stages& stages, bool keeps = true) {
    detail::typed_slots<Stages, Device> slots(ctx, stages, step_.shape);
    pass(*this, ctx, slots, keeps).run();
  }

 private:
  /// The state of one run. Slots are indexed [chunk * microbatches + microbatch].
  struct pass final : unit_watcher {
    struct slot {
      weight_work later;
      request in, gradient_in;
      std::size_t in_event = 0, gradient_in_event = 0;
    };
    struct outgoing {
      transfer_kind kind;
      int slot;
      request pending{};
      std::size_t event = 0;
      bool released = false;
    };

    pass(step_executor& e, const context<Device>& context, detail::stage_slots<Device>& s, bool keeping);
    ~pass();

    void run();
    static bool between_passes(step_op op) {
      return op != step_op::pass && op != step_op::send && op != step_op::receive;
    }
    void perform();
    /// Makes the current pass wait for the kept values of its unit, and frees their copies in the host's memory.
    void arrive_kept(int unit);
    /// Makes a unit of its stage the current one of this pass. Does nothing if it already is.
    void enter(int unit) override;
    void begin_pass(const action& a);
    void end_pass();
    /// `arrived` lists the sends that are complete once the action has its input.
    void compute(const action& what, const std::vector<std::size_t>& arrived);
    void send(const step_entry& e);
    void receive(const step_entry& e);
    /// Starts a send or a receive. Returns its event.
    std::size_t start(const step_entry& e, const detail::message_elements& m, request& pending);
    void arrive(request& pending, std::size_t event);
    void release(outgoing& o);
    void release(const std::vector<std::size_t>& arrived);
    /// Returns a tag that distinguishes the messages from one rank to another on one communicator. It is small, because
    /// MPI only guarantees tags up to 32767.
    int tag_of(const transfer& t) const;
    std::size_t begin(const step_entry& step);
    void end(std::size_t event);
    int number_of(int chunk, int microbatch) const { return chunk * owner.shape().microbatches + microbatch; }
    slot& at(int number) { return slots[static_cast<std::size_t>(number)]; }

    step_executor& owner;
    const context<Device>& ctx;
    detail::stage_slots<Device>& stages;
    bool keeps;
    int rank;
    const std::vector<step_entry>& program;
    std::vector<slot> slots;
    std::map<std::pair<int, int>, offloaded_unit<Device>> offloaded;  ///< by unit and microbatch
    std::deque<outgoing> sent;                                        ///< in the program's order
    std::size_t oldest = 0;                                           ///< index of the first send that is not released
    std::size_t at_entry = 0;                                         ///< index of the next entry of the program
    action now{};                                                     ///< the current pass
    int stage_now = 0, unit_now = -1;
  };
  struct units {
    int first = 0, count = 0;
  };
  any_communicator& channel(const transfer& t) { return t.kind == transfer_kind::gradient ? back_ : along_; }

  any_communicator along_, back_;
  step_schedule step_;
  std::vector<units> units_of_;                    ///< of each stage
  std::vector<std::vector<std::size_t>> arrived_;  ///< sends to release before each pass or message, by the schedule
  bool by_schedule_ = false;
  step_watch watch_;
};

template <compute_device Device>
step_executor<Device>::step_executor(any_communicator along, step_schedule step)
    : along_(std::move(along)), step_(std::move(step)), units_of_(static_cast<std::size_t>(step_.shape.stages())) {
  if (along_.size() != step_.shape.ranks)
    fail({"pipeline: the schedule is for ", step_.shape.ranks, " ranks, and the pipeline axis has ", along_.size()});
  bool gradients = false;
  arrived_ = detail::checked_program(step_, along_.rank(), gradients);
  for (std::size_t u = 0; u < step_.units.size(); ++u) {
    units& of = units_of_[static_cast<std::size_t>(step_.units[u].stage)];
    if (of.count++ == 0) of.first = static_cast<int>(u);
  }
  if (gradients) back_ = along_.split(0, along_.rank(), along_.label());  // counted under the same label
}

template <compute_device Device>
step_executor<Device>::step_executor(step_executor&&) noexcept = default;
template <compute_device Device>
step_executor<Device>& step_executor<Device>::operator=(step_executor&&) noexcept = default;
template <compute_device Device>
step_executor<Device>::~step_executor() = default;

template <compute_device Device>
step_executor<Device>::pass::pass(step_executor& e, const context<Device>& context, detail::stage_slots<Device>& s,
                                  bool keeping)
    : owner(e),
      ctx(context),
      stages(s),
      keeps(keeping),
      rank(e.along_.rank()),
      program(e.step_.programs[static_cast<std::size_t>(rank)]),
      slots(static_cast<std::size_t>(e.shape().chunks) * static_cast<std::size_t>(e.shape().microbatches)) {
  if (keeps) owner.watch_.begin_run(ctx.ranks.ledger());
}
template <compute_device Device>
step_executor<Device>::pass::~pass() {
  owner.watch_.end_run();
}

template <compute_device Device>
void step_executor<Device>::pass::run() {
  stages.watch(this);
  for (std::size_t line = 0; at_entry < program.size(); ++line) {  // `line` counts passes and messages
    while (at_entry < program.size() && between_passes(program[at_entry].op)) perform();
    if (at_entry == program.size()) break;
    const step_entry& e = program[at_entry];
    owner.watch_.at(at_entry);
    if (e.op == step_op::pass) {
      compute(e.pass, owner.arrived_[line]);
      continue;
    }
    ++at_entry;
    e.op == step_op::send ? send(e) : receive(e);
  }
  stages.watch(nullptr);
  owner.watch_.at(program.size());
  for (outgoing& o : sent) release(o);
}

template <compute_device Device>
void step_executor<Device>::pass::perform() {
  owner.watch_.at(at_entry);
  const step_entry& e = program[at_entry++];
  owner.watch_.begin(ctx.device, e);
  if (moves_activations(e.op)) {
    const int stage = owner.shape().stage_of(rank, e.pass.chunk);
    stages.move_kept(e, e.unit - owner.units_of_[static_cast<std::size_t>(stage)].first,
                     number_of(e.pass.chunk, e.pass.microbatch),
                     offloaded.try_emplace({e.unit, e.pass.microbatch}, ctx.device).first->second);
  } else {
    stages.perform(e);
  }
  owner.watch_.end(ctx.device);
}

template <compute_device Device>
void step_executor<Device>::pass::arrive_kept(int unit) {
  const auto found = offloaded.find({unit, now.microbatch});
  if (found == offloaded.end()) return;
  found->second.wait();
  offloaded.erase(found);
}

template <compute_device Device>
void step_executor<Device>::pass::enter(int unit) {
  unit += owner.units_of_[static_cast<std::size_t>(stage_now)].first;
  if (unit == unit_now) return;
  if (unit_now >= 0) owner.watch_.end(ctx.device);
  while (at_entry < program.size() && between_passes(program[at_entry].op)) perform();
  if (at_entry == program.size() || program[at_entry].op != step_op::pass || !(program[at_entry].pass == now) ||
      program[at_entry].unit != unit)
    fail({"step: a pass of stage ", stage_now, " announces unit ", unit, " where the step has ",
          at_entry == program.size() ? "its end" : describe(program[at_entry]),
          "; a model announces its units in their order, and going back in the reverse"});
  owner.watch_.at(at_entry);
  unit_now = unit;
  arrive_kept(unit);
  stages.enter(unit, now.kind);
  owner.watch_.begin(ctx.device, program[at_entry++]);
}

template <compute_device Device>
void step_executor<Device>::pass::begin_pass(const action& a) {
  now = a;
  stage_now = owner.shape().stage_of(rank, a.chunk);
  unit_now = -1;
  if (owner.units_of_[static_cast<std::size_t>(stage_now)].count == 1) enter(0);
}

template <compute_device Device>
void step_executor<Device>::pass::end_pass() {
  const bool forward = now.kind == action_kind::forward;
  const units& of = owner.units_of_[static_cast<std::size_t>(stage_now)];
  // Enters the units without work in this pass, such as those without weight gradients.
  if (now.kind == action_kind::weight_backward)
    for (int unit = of.count; unit-- > 0;)
      if (of.first + unit < (unit_now < 0 ? of.first + of.count : unit_now)) enter(unit);
  if (unit_now != (forward ? of.first + of.count - 1 : of.first))
    fail({"step: ", describe(now), " ends without having announced all ", of.count, " units of stage ", stage_now,
          "; a model with units() calls microbatch::enter for each of them"});
  owner.watch_.end(ctx.device);
}

template <compute_device Device>
void step_executor<Device>::pass::compute(const action& what, const std::vector<std::size_t>& arrived) {
  const step_entry step{step_op::pass, -1, what, {}};
  const int stage = owner.shape().stage_of(rank, what.chunk), number = number_of(what.chunk, what.microbatch);
  slot& s = at(number);
  const auto neighbour = [&](int other) { return number_of(owner.shape().chunk_of(other), what.microbatch); };
  switch (what.kind) {
    case action_kind::forward: {
      arrive(s.in, s.in_event);
      release(arrived);
      const std::size_t event = begin(step);
      begin_pass(what);
      stages.forward(number, what, keeps);
      end_pass();
      end(event);
      if (stage + 1 < owner.shape().stages() && owner.shape().rank_of(stage + 1) == rank)
        stages.move_result(transfer_kind::activation, number, neighbour(stage + 1));
      return;
    }
    case action_kind::backward:
    case action_kind::input_backward: {
      arrive(s.gradient_in, s.gradient_in_event);
      release(arrived);
      const std::size_t event = begin(step);
      begin_pass(what);
      stages.backward(number, what, what.kind == action_kind::input_backward ? &s.later : nullptr);
      end_pass();
      if (stage > 0 && owner.shape().rank_of(stage - 1) == rank)
        stages.move_result(transfer_kind::gradient, number, neighbour(stage - 1));
      if (what.kind == action_kind::backward) stages.release_kept(number);
      return end(event);
    }
    case action_kind::weight_backward: {
      release(arrived);
      const std::size_t event = begin(step);
      begin_pass(what);
      s.later.run(this);
      end_pass();
      stages.release_kept(number);
      return end(event);
    }
  }
}

template <compute_device Device>
void step_executor<Device>::pass::send(const step_entry& e) {
  const int number = number_of(owner.shape().chunk_of(e.transfer.from_stage), e.transfer.microbatch);
  sent.push_back({e.transfer.kind, number});
  sent.back().event = start(e, stages.result(e.transfer.kind, number), sent.back().pending);
}
template <compute_device Device>
void step_executor<Device>::pass::receive(const step_entry& e) {
  const int chunk = owner.shape().chunk_of(e.transfer.to_stage), number = number_of(chunk, e.transfer.microbatch);
  slot& s = at(number);
  const detail::message_elements into = stages.make_input(e.transfer.kind, number, chunk);
  if (e.transfer.kind == transfer_kind::activation)
    s.in_event = start(e, into, s.in);
  else
    s.gradient_in_event = start(e, into, s.gradient_in);
}
template <compute_device Device>
std::size_t step_executor<Device>::pass::start(const step_entry& e, const detail::message_elements& m,
                                               request& pending) {
  const transfer& t = e.transfer;
  const std::size_t event = begin(e);
  any_communicator& channel = owner.channel(t);
  if (e.op == step_op::send)
    channel.start_send(m.data, m.count, m.type, owner.shape().rank_of(t.to_stage), tag_of(t)).swap(pending);
  else
    channel.start_receive(m.data, m.count, m.type, owner.shape().rank_of(t.from_stage), tag_of(t)).swap(pending);
  if (owner.events) (*owner.events)[event].bytes = std::uint64_t{m.count} * size_of(m.type);
  return event;
}

template <compute_device Device>
void step_executor<Device>::pass::arrive(request& pending, std::size_t event) {
  if (!pending) return;
  pending.wait();
  end(event);
}
template <compute_device Device>
void step_executor<Device>::pass::release(outgoing& o) {
  if (o.released) return;
  o.pending.wait();
  end(o.event);
  stages.release_result(o.kind, o.slot);
  o.released = true;
}
template <compute_device Device>
void step_executor<Device>::pass::release(const std::vector<std::size_t>& arrived) {
  if (owner.by_schedule_) {
    for (const std::size_t i : arrived) release(sent[i]);
  } else {
    for (; oldest < sent.size() && sent[oldest].pending.done(); ++oldest) release(sent[oldest]);
  }
}

template <compute_device Device>
int step_executor<Device>::pass::tag_of(const transfer& t) const {
  const pipeline_shape& shape = owner.shape();
  int chunk = 0;
  while (shape.stage_of(shape.rank_of(t.from_stage), chunk) != t.from_stage) ++chunk;
  return chunk * shape.microbatches + t.microbatch;
}

template <compute_device Device>
std::size_t step_executor<Device>::pass::begin(const step_entry& step) {
  if (!owner.events) return 0;
  if (step.op == step_op::pass) ctx.device.synchronize();  // the wait for earlier work is not part of its time
  owner.events->push_back({step, comm_clock(), 0, 0, 0});
  return owner.events->size() - 1;
}
template <compute_device Device>
void step_executor<Device>::pass::end(std::size_t event) {
  if (!owner.events) return;
  pipeline_event& e = (*owner.events)[event];
  if (e.step.op == step_op::pass) {
    ctx.device.synchronize();
    e.memory = ctx.device.bytes_in_use();
  }
  e.end = comm_clock();
}

PLAIT_COMPILED_TEMPLATE(class step_executor<cpu>)

#ifndef PLAIT_COMPILED
PLAIT_INLINE step_schedule detail::step_of_stages(const schedule& plan, const schedule_costs& costs) {
  return expand(plan, units_of_stages(plan.shape, false), {.clip = false}, costs);
}

PLAIT_INLINE std::vector<std::vector<std::size_t>> detail::checked_program(const step_schedule& step, int rank,
                                                                           bool& gradients) {
  require_verified(step, rank);
  const std::vector<std::vector<step_entry>> all = pipeline_of(step);
  for (const std::vector<step_entry>& program : all)
    for (const step_entry& line : program)
      gradients = gradients || (line.op == step_op::send && line.transfer.kind == transfer_kind::gradient);
  return arrived_sends(step.shape, all, rank);
}
#endif

}  // namespace plait

#include "plait/core/macros_on.hpp"
