#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "held_out_loss.hpp"
#include "model_run.hpp"
#include "plait/checkpoint/agree.hpp"
#include "plait/checkpoint/model_weights.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/models/export_hugging_face.hpp"
#include "plait/models/hugging_face_directory.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/optim/chosen_optimizer.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/step_communication.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/parallel/world.hpp"
#include "rank_batches.hpp"
#include "repeated_step.hpp"
#include "run_options.hpp"
#include "saved_states.hpp"
#include "signals.hpp"
#include "text_sampler.hpp"
#include "train_llama/observe/step_events.hpp"

template <class Device>
std::string name_of_device(const Device& device) {
  if constexpr (requires { device.name(); }) return device.name();
  return {};
}

/// A Llama on one rank: the stages of the pipeline that are this rank's.
template <class Precision, plait::strategy Strategy, plait::compute_device Device>
class llama_run final : public model_run {
  using stage_type = plait::llama<Precision, Strategy, Device>;
  using model_type = plait::pipeline<stage_type>;
  using tokens = typename model_type::tokens;
  using step_type = plait::training_step<stage_type>;
  using optimizer_type = plait::chosen_optimizer<Precision, Device>;

 public:
  llama_run(const setup& s, Device& device, plait::any_communicator ranks)
      : s_(s),
        device_(device),
        heard_(s.opt.trace.empty() && s.opt.timeline.empty() ? nullptr : std::make_shared<plait::recorder>()),
        world_(s.mesh, std::move(ranks), heard_),
        ctx_{device, world_.stage(),
             plait::llama_sizes<Strategy>(s.config, world_.stage().shape(), s.sequences, s.opt.seq, s.deterministic),
             s.opt.seed, plait::leaves_under<Strategy>(s.deterministic, world_.stage().shape())},
        stages_(stages_of<Precision, Strategy>(s, ctx_, world_.root())),
        model_(
            ctx_, world_.along(), s.schedule, stages_,
            [&](plait::stage_layers part, stage_type* first) {
              return std::make_unique<stage_type>(ctx_, s.config, model_options(s), part, first);
            },
            s.parallel),
        optimizer_(optimizer_options_of(s.opt)),
        states_(s, ctx_, world_.root(), model_, optimizer_),
        batches_(s, ctx_, model_.documents()),
        exchange_(device, asks_at_norm ? world_.root().split(0, world_.root().rank()) : world_.root()),
        since_(world_.stage().ledger()) {
    world_.stage().checks().set(s.opt.compared);
    if (s.weights)
      plait::load_weights(ctx_, model_, s.weights->entries, s.weights->source());
    else if (!s.first_step.empty())
      states_.load_first_step();
    else
      model_.visit([&](auto& p) { p.initialize(ctx_); });
    model_.gather_changed(ctx_);
    world_.stage().ledger().clear();
  }

  plait::step_result step(std::int64_t index, bool with_communication) override {
    if (!step_) {
      step_.emplace(ctx_, model_, optimizer_, s_.opt.clip);
      since_.begin();  // with what was loaded the ledger began anew
      if (asks_at_norm) step_->on_norm([&] { ask(); }, [&] { hear(); });
      repeated_.emplace(ctx_, *step_, s_, world_.root());
    }
    with_communication_ = with_communication;
    const std::int64_t first = states_.samples_before(index);
    step_->load(ctx_, first,
                [&](std::int64_t i, plait::host_tokens& ids, plait::host_tokens& labels, plait::host_starts& starts) {
                  batches_.fill(first - states_.data_begin(), i, ids, labels, starts);
                });
    optimizer_.begin_step(ctx_, s_.rate.at(index));
    if (!repeated_->replays()) ++counted_;
    if (heard_ && index == traced_step(s_.opt, states_.steps_before())) return trace_step();
    repeated_->run(ctx_);
    if (!asks_at_norm) ask(), hear();
    if (heard_) heard_->clear();
    return step_->result(ctx_);
  }
  const requests& asked() const override { return asked_; }
  const std::vector<plait::axis_communication>& communication() const override { return communication_; }

  std::optional<double> evaluate() override {
    model_.settle();  // the gathers after the update belong to the step
    const plait::ledger before = world_.stage().ledger();
    const std::optional<double> loss = held_out_loss(ctx_, model_, batches_, [&] { return stop_asked(); });
    world_.stage().ledger().restore(before);
    return loss;
  }
  std::vector<std::int64_t> sample() override {
    return text_sampler<model_type, Device>(s_, ctx_, world_.root(), model_, batches_.order()).text([&] {
      return stop_asked();
    });
  }

  std::int64_t resume() override {
    if (!s_.opt.export_hf.empty()) {  // found now, and not when all steps are made
      const std::filesystem::path folder =
          std::filesystem::path(s_.opt.export_hf + "/").lexically_normal().parent_path();
      const std::string within = folder.parent_path().string();
      plait::require_one_directory(device_, world_.root(), within.empty() ? "." : within, "--export-hf: ");
    }
    return states_.resume();
  }
  std::int64_t newest_saved() override { return states_.newest_saved(); }
  best_step best_saved() override { return states_.best_saved(); }
  std::vector<plait::finished_save> save(std::int64_t steps, const best_step& best) override {
    return states_.save(steps, best);
  }
  std::vector<plait::finished_save> ended_saves(bool wait) override { return states_.ended_saves(wait); }
  std::vector<plait::finished_save> room_for_save() override { return states_.room_for_save(); }

  std::uint64_t weights_hash() override { return plait::weights_hash(ctx_, model_); }
  std::vector<plait::parameter_hash> hashes(bool gradients) override {
    model_.settle();  // the gathers after the update belong to the step
    const plait::ledger before = world_.stage().ledger();
    std::vector<plait::parameter_hash> all = plait::parameter_hashes(ctx_, model_, gradients);
    world_.stage().ledger().restore(before);
    return all;
  }
  void write_model() override {
    plait::export_hugging_face(ctx_, world_.root(), model_, s_.config, s_.opt.export_hf,
                               {.like = s_.exported_like(),
                                .order = plait::weights_order_from(s_.opt.export_order, "--export-order"),
                                .field = "--export-hf"});
  }
  double all_reduce(double value, plait::reduce_op op) override {
    return plait::all_reduce_scalar(device_, world_.root(), value, op);
  }
  std::vector<plait::axis_communication> of_ranks(const std::vector<plait::axis_times>& mine) override {
    return plait::communication_of_ranks(device_, world_.root(), mine);
  }
  std::string longest_wait(const std::string& axes) override {
    struct record {
      double seconds;
      char text[240];
    };
    const auto& executor = model_.executor();
    const plait::step_wait mine = plait::longest_wait(executor.step(), executor.along().rank(),
                                                      model_.executor().measured().waits(), axes, model_.unit_names());
    record own{mine.seconds, {}};
    mine.text(static_cast<double>(counted_)).copy(own.text, sizeof own.text - 1);
    std::string longest;
    double most = 0;
    const auto all = plait::gather_records<record>(device_, world_.root(), {own}, 0);
    for (std::size_t r = 0; r < all.size(); ++r)
      if (all[r][0].seconds > most) most = all[r][0].seconds, longest = plait::cat({all[r][0].text, ", on rank ", r});
    return longest;
  }
  std::int64_t rank() override { return world_.root().rank(); }
  plait::world& world() override { return world_.stage(); }
  const std::vector<plait::stage_layers>& stages() const override { return stages_; }
  std::vector<std::vector<plait::step_event>> traced() override {
    if (!heard_) return {};
    return plait::gather_events(device_, world_.root(), seen_);
  }
  std::int64_t counted_steps() const override { return counted_; }
  std::size_t peak_bytes() const override { return device_.peak_bytes(); }
  std::string device_name() const override { return name_of_device(device_); }

 private:
  /// On a GPU the host is far ahead of a step's norm, and a step may be replayed without it; gathers have a stream of
  /// their own there, so that nothing asked after a step waits for them.
  static constexpr bool asks_at_norm = std::is_same_v<Device, plait::cpu>;

  /// Starts to bring together what the ranks ask for; `hear` has the answers.
  void ask() {
    mine_ = since_.since();
    exchange_.start({static_cast<double>(interrupted.load()), static_cast<double>(save_asked.load()),
                     states_.has_finished_save() ? 1.0 : 0.0, static_cast<double>(mine_.size())});
  }
  void hear() {
    asked_ = exchange_.finish();
    communication_.clear();
    if (with_communication_ && asked_.communication > 0)
      communication_ = plait::communication_of_ranks(device_, exchange_.ranks(), mine_,
                                                     static_cast<std::size_t>(asked_.communication));
    since_.begin();
  }

  /// A step whose actions, collectives and messages are remembered.
  plait::step_result trace_step() {
    std::vector<plait::pipeline_event> events;
    world_.root().barrier();
    device_.synchronize();
    heard_->clear();
    const double origin = plait::comm_clock();
    std::vector<plait::timed_entry> times;
    plait::step_executor<Device>& executor = model_.executor();
    executor.events = &events;
    executor.measured().times = &times;
    repeated_->run(ctx_);
    if (!asks_at_norm) ask(), hear();
    const plait::step_result result = step_->result(ctx_);
    executor.events = nullptr;
    executor.measured().times = nullptr;
    model_.settle();  // the gathers after the update end too
    const plait::timed_program program{executor.step(), executor.along().rank(), times};
    const plait::axis_list along(plait::axis_of<plait::pp>);
    const auto group = static_cast<std::uint64_t>(s_.mesh.group_of(rank(), along));
    seen_ = plait::events_of(s_.schedule.shape, events, *heard_, group, origin, &program);
    return result;
  }

  /// Whether the run was interrupted on any rank: an answer that all ranks share.
  bool stop_asked() { return all_reduce(interrupted.load(), plait::reduce_op::max) != 0; }

  const setup& s_;
  Device& device_;
  std::shared_ptr<plait::recorder> heard_;  ///< what is communicated, if a step is to be traced
  plait::pipeline_world world_;
  plait::context<Device> ctx_;
  std::vector<plait::stage_layers> stages_;
  model_type model_;
  optimizer_type optimizer_;
  saved_states<model_type, optimizer_type, Device> states_;
  rank_batches<tokens, Strategy, Device> batches_;
  request_exchange<Device> exchange_;
  requests asked_;                                        ///< of the last step
  plait::communication_clock since_;                      ///< the norm of the step before
  std::vector<plait::axis_times> mine_;                   ///< of this rank, until then
  std::vector<plait::axis_communication> communication_;  ///< of all, where it was brought together
  bool with_communication_ = false;
  std::optional<step_type> step_;  ///< from the first step on
  std::optional<repeated_step<step_type, Device>> repeated_;
  std::vector<plait::step_event> seen_;  ///< of the traced step
  std::int64_t counted_ = 0;
};

template <class Precision, plait::strategy Strategy, plait::compute_device Device>
std::unique_ptr<model_run> make_llama_run(const setup& s, Device& device, plait::any_communicator ranks) {
  if constexpr (has_original_order<Precision, Strategy, Device>) {
    if (!s.zigzag)
      return std::make_unique<llama_run<Precision, in_context<Strategy, plait::contiguous>, Device>>(s, device,
                                                                                                     std::move(ranks));
  }
  return std::make_unique<llama_run<Precision, in_context<Strategy, plait::zigzag>, Device>>(s, device,
                                                                                             std::move(ranks));
}
