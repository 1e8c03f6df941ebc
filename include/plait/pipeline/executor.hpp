// The executor of a pipeline schedule on one rank: it computes, sends and receives in the order of a program. Plans of
// redistributions have another executor: tensor/executor.hpp. Next: schedule/program.hpp for the program,
// pipeline/pipeline.hpp for a model's stages.
#pragma once

#include <concepts>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/recorder.hpp"
#include "plait/core/compiled.hpp"
#ifndef PLAIT_NO_CPU
#include "plait/device/cpu.hpp"
#endif
#include "plait/device/device.hpp"
#include "plait/schedule/arrivals.hpp"
#include "plait/schedule/program.hpp"
#include "plait/tensor/microbatch.hpp"

namespace plait {

/// An executor runs this rank's stages, by chunk. Activations and their gradients are tensors that may be of
/// other shapes between other stages; an empty one goes into the first stage and comes out of the last.
///
///     activation input(ctx, chunk)                               memory for what arrives from the stage before
///     gradient   output_gradient(ctx, chunk)                     memory for what arrives from the stage behind
///     activation forward(ctx, chunk, microbatch, activation, saved*)         null: there will be no backward pass
///     gradient   backward(ctx, chunk, microbatch, saved&, gradient, weight_work*)      null: weight gradients at once
///     void       finished(ctx, chunk)                            the chunk's gradients are complete
template <class S, class Device>
concept pipeline_stages =
    requires(S& s, const context<Device>& ctx, int chunk, int microbatch, typename S::activation x,
             typename S::gradient dy, typename S::saved& kept, weight_work* deferred) {
      { s.input(ctx, chunk) } -> std::same_as<typename S::activation>;
      { s.output_gradient(ctx, chunk) } -> std::same_as<typename S::gradient>;
      { s.forward(ctx, chunk, microbatch, std::move(x), &kept) } -> std::same_as<typename S::activation>;
      { s.backward(ctx, chunk, microbatch, kept, std::move(dy), deferred) } -> std::same_as<typename S::gradient>;
      s.finished(ctx, chunk);
    };

/// One line of a measured timeline: when a step of the program began and ended, in seconds of `comm_clock`. A send or a
/// receive lasts from its start until it was seen to be complete. To measure, the executor waits for the device after
/// each action.
struct pipeline_event {
  program_step step;
  double begin = 0, end = 0;
  std::uint64_t bytes = 0;  ///< of a message
  std::size_t memory = 0;   ///< bytes in use on the device after a compute
};

/// Runs one rank's program of a pipeline schedule. Receives are posted where the program has them, before they are
/// needed; sends are not waited for before the end, but for the memory they hold (`release_by_schedule`); an input is
/// waited for by the action that takes it. Gradients have a communicator of their own: where a communicator runs its
/// messages in one order, as NCCL's do, an activation that is late would hold up a gradient that is ready. Which rank
/// is which comes from the schedule: rank r of `along` is the pipeline's rank r.
template <compute_device Device>
class pipeline_executor {
 public:
  /// Collective over `along`. `plan` has been verified; every rank is given the same one, and the same costs to order
  /// the communication by.
  pipeline_executor(any_communicator along, const schedule& plan, const schedule_costs& costs = {})
      : along_(std::move(along)), shape_(plan.shape) {
    if (along_.size() != shape_.ranks)
      fail({"pipeline: the schedule ", plan.name.str(), " is for ", shape_.ranks, " ranks, and the pipeline axis has ",
            along_.size()});
    auto all = rank_program(plan, costs);
    arrived_ = arrived_sends(shape_, all, along_.rank());
    bool gradients = false;
    for (const std::vector<program_step>& program : all)
      for (const program_step& step : program)
        gradients = gradients || (step.kind == step_kind::send && step.transfer.kind == transfer_kind::gradient);
    if (gradients) back_ = along_.split(0, along_.rank(), along_.label());  // counted under the same label
    program_ = std::move(all[static_cast<std::size_t>(along_.rank())]);
  }

  const pipeline_shape& shape() const { return shape_; }
  const std::vector<program_step>& program() const { return program_; }
  any_communicator& along() { return along_; }
  const any_communicator& along() const { return along_; }

  /// Releases what has been sent once the schedule says that it has arrived, and asks nobody, so that runs can be
  /// recorded. More memory is held so: that of every activation until its gradient is back.
  void release_by_schedule() { by_schedule_ = true; }

  /// Where `run` puts what happened when; null: nowhere.
  std::vector<pipeline_event>* events = nullptr;

  /// The whole program. With `keeps` false, which is for programs without backward passes, nothing is kept.
  template <class Stages>
    requires pipeline_stages<Stages, Device>
  void run(const context<Device>& ctx, Stages& stages, bool keeps = true) {
    pass<Stages> p(*this, ctx, stages, keeps);
    for (std::size_t i = 0; i < program_.size(); ++i) switch (const program_step& step = program_[i]; step.kind) {
        case step_kind::compute:
          p.compute(step, arrived_[i]);
          break;
        case step_kind::send:
          p.send(step);
          break;
        case step_kind::receive:
          p.receive(step);
          break;
      }
    p.finish();
  }

 private:
  /// The state of one run. Slots are indexed [chunk * microbatches + microbatch].
  template <class Stages>
  struct pass {
    using activation = typename Stages::activation;
    using gradient = typename Stages::gradient;
    template <class Tensor>
    struct message {
      Tensor data;
      request pending;
      std::size_t event = 0;
    };
    struct slot {
      typename Stages::saved kept;
      weight_work later;
      message<activation> in, out;
      message<gradient> gradient_in, gradient_out;
    };
    struct outgoing {  // empty once it is released
      message<activation> value;
      message<gradient> back;
      request& pending() { return value.pending ? value.pending : back.pending; }
      std::size_t event() const { return value.data ? value.event : back.event; }
      bool released() const { return !value.data && !back.data; }
    };

    pass(pipeline_executor& e, const context<Device>& context, Stages& s, bool keeping)
        : owner(e),
          ctx(context),
          stages(s),
          keeps(keeping),
          rank(e.along_.rank()),
          slots(static_cast<std::size_t>(e.shape_.chunks) * static_cast<std::size_t>(e.shape_.microbatches)),
          left(static_cast<std::size_t>(e.shape_.chunks), 0) {
      for (const program_step& step : e.program_)
        if (step.kind == step_kind::compute && frees_activations(step.action.kind)) ++left[step.action.chunk];
    }

    slot& at(int chunk, int microbatch) {
      return slots[static_cast<std::size_t>(chunk) * static_cast<std::size_t>(owner.shape_.microbatches) +
                   static_cast<std::size_t>(microbatch)];
    }

    /// `arrived`: sends that are through once the action has its input.
    void compute(const program_step& step, const std::vector<std::size_t>& arrived) {
      const int chunk = step.action.chunk, microbatch = step.action.microbatch;
      const int stage = owner.shape_.stage_of(rank, chunk);
      slot& s = at(chunk, microbatch);
      switch (step.action.kind) {
        case action_kind::forward: {
          arrive(s.in);
          release(arrived);
          const std::size_t event = begin(step);
          s.out.data = stages.forward(ctx, chunk, microbatch, std::move(s.in.data), keeps ? &s.kept : nullptr);
          end(event);
          if (stage + 1 < owner.shape_.stages() && owner.shape_.rank_of(stage + 1) == rank)
            at(owner.shape_.chunk_of(stage + 1), microbatch).in.data = std::move(s.out.data);
          return;
        }
        case action_kind::backward:
        case action_kind::input_backward: {
          arrive(s.gradient_in);
          release(arrived);
          const std::size_t event = begin(step);
          weight_work* const deferred = step.action.kind == action_kind::input_backward ? &s.later : nullptr;
          s.gradient_out.data =
              stages.backward(ctx, chunk, microbatch, s.kept, std::move(s.gradient_in.data), deferred);
          if (stage > 0 && owner.shape_.rank_of(stage - 1) == rank)
            at(owner.shape_.chunk_of(stage - 1), microbatch).gradient_in.data = std::move(s.gradient_out.data);
          if (step.action.kind == action_kind::backward) forget(s, chunk);
          return end(event);
        }
        case action_kind::weight_backward: {
          release(arrived);
          const std::size_t event = begin(step);
          s.later.run();
          forget(s, chunk);
          return end(event);
        }
      }
    }

    void send(const program_step& step) {
      const transfer& t = step.transfer;
      slot& s = at(owner.shape_.chunk_of(t.from_stage), t.microbatch);
      const std::size_t event = begin(step);
      sent.emplace_back();
      if (t.kind == transfer_kind::activation) {
        sent.back().value = std::move(s.out);
        start_send(sent.back().value, t, event);
      } else {
        sent.back().back = std::move(s.gradient_out);
        start_send(sent.back().back, t, event);
      }
    }
    void receive(const program_step& step) {
      const transfer& t = step.transfer;
      const int chunk = owner.shape_.chunk_of(t.to_stage);
      slot& s = at(chunk, t.microbatch);
      const std::size_t event = begin(step);
      if (t.kind == transfer_kind::activation) {
        s.in.data = stages.input(ctx, chunk);
        start_receive(s.in, t, event);
      } else {
        s.gradient_in.data = stages.output_gradient(ctx, chunk);
        start_receive(s.gradient_in, t, event);
      }
    }

    void finish() {
      for (outgoing& o : sent) release(o);
    }

    template <class Tensor>
    void start_send(message<Tensor>& m, const transfer& t, std::size_t event) {
      m.event = event;
      owner.channel(t)
          .start_send(m.data.data(), static_cast<std::size_t>(m.data.size()), type_of(m.data),
                      owner.shape_.rank_of(t.to_stage), tag_of(t))
          .swap(m.pending);
      sized(event, m.data);
    }
    template <class Tensor>
    void start_receive(message<Tensor>& m, const transfer& t, std::size_t event) {
      m.event = event;
      owner.channel(t)
          .start_receive(m.data.data(), static_cast<std::size_t>(m.data.size()), type_of(m.data),
                         owner.shape_.rank_of(t.from_stage), tag_of(t))
          .swap(m.pending);
      sized(event, m.data);
    }
    template <class Tensor>
    void arrive(message<Tensor>& m) {
      if (!m.pending) return;
      m.pending.wait();
      end(m.event);
    }
    void release(outgoing& o) {
      if (o.released()) return;
      o.pending().wait();
      end(o.event());
      o = {};
    }
    void release(const std::vector<std::size_t>& arrived) {
      if (owner.by_schedule_) {
        for (const std::size_t i : arrived) release(sent[i]);
      } else {
        for (; oldest < sent.size() && sent[oldest].pending().done(); ++oldest) release(sent[oldest]);
      }
    }
    void forget(slot& s, int chunk) {
      s.kept = {};
      if (--left[static_cast<std::size_t>(chunk)] == 0) stages.finished(ctx, chunk);
    }

    template <class Tensor>
    static constexpr dtype type_of(const Tensor&) {
      return dtype_of<typename Tensor::value_type>;
    }
    int tag_of(const transfer& t) const { return static_cast<int>(detail::slot_of(owner.shape_, t)); }

    std::size_t begin(const program_step& step) {
      if (!owner.events) return 0;
      if (step.kind == step_kind::compute) ctx.device.synchronize();  // what it waited for is not its own time
      owner.events->push_back({step, comm_clock(), 0, 0, 0});
      return owner.events->size() - 1;
    }
    void end(std::size_t event) {
      if (!owner.events) return;
      pipeline_event& e = (*owner.events)[event];
      if (e.step.kind == step_kind::compute) {
        ctx.device.synchronize();
        e.memory = ctx.device.bytes_in_use();
      }
      e.end = comm_clock();
    }
    template <class Tensor>
    void sized(std::size_t event, const Tensor& data) {
      if (owner.events)
        (*owner.events)[event].bytes = static_cast<std::uint64_t>(data.size()) * sizeof(typename Tensor::value_type);
    }

    pipeline_executor& owner;
    const context<Device>& ctx;
    Stages& stages;
    bool keeps;
    int rank;
    std::vector<slot> slots;
    std::vector<int> left;      ///< of each chunk: actions that free activations
    std::deque<outgoing> sent;  ///< in the program's order
    std::size_t oldest = 0;     ///< that has not been released
  };

  any_communicator& channel(const transfer& t) { return t.kind == transfer_kind::gradient ? back_ : along_; }

  any_communicator along_, back_;
  pipeline_shape shape_;
  std::vector<program_step> program_;
  std::vector<std::vector<std::size_t>> arrived_;  ///< before each step, by the schedule
  bool by_schedule_ = false;
};

PLAIT_COMPILED_TEMPLATE(class pipeline_executor<cpu>)

}  // namespace plait
