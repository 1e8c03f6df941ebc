#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "model_run.hpp"
#include "plait/data/text.hpp"
#include "plait/kernels/philox.hpp"
#include "plait/models/llama.hpp"
#include "plait/models/strategies.hpp"
#include "plait/parallel/agree.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/parallel/weights_hash.hpp"
#include "plait/plan/step_traffic.hpp"
#include "signals.hpp"

inline plait::llama_options model_options(const options& opt) {
  const plait::recompute keep = opt.recompute == "none"   ? plait::recompute::none
                                : opt.recompute == "full" ? plait::recompute::full
                                                          : plait::recompute::selective;
  return {keep, opt.dropout, {.label_smoothing = opt.label_smoothing, .z_loss = opt.z_loss}};
}

/// How a device repeats a step: as it is. (GPUs: cuda_llama_run.hpp.)
template <class Step, plait::compute_device Device>
class repeated_step {
 public:
  repeated_step(plait::context<Device>&, Step& step, bool) : step_(step) {}
  void run(plait::context<Device>& ctx) { step_.run(ctx); }
  /// Whether the next run is one that the ledger does not see.
  bool replays() const { return false; }

 private:
  Step& step_;
};

template <class Device>
std::string name_of_device(const Device& device) {
  if constexpr (requires { device.name(); }) return device.name();
  return {};
}

/// A Llama on one rank, one stage.
template <class Precision, plait::strategy Strategy, plait::compute_device Device>
class llama_run final : public model_run {
  using model_type = plait::llama<Precision, Strategy, Device>;
  using tokens = typename model_type::tokens;
  using activation = plait::activation_of<Precision>;
  using step_type = plait::training_step<model_type, Precision, Device>;

 public:
  llama_run(const setup& s, Device& device, plait::any_communicator ranks)
      : s_(s),
        device_(device),
        world_(s.mesh, std::move(ranks)),
        ctx_{device, world_, plait::llama_sizes<Strategy>(s.config, s.mesh, s.sequences, s.opt.seq), s.opt.seed},
        model_(ctx_, s.config, model_options(s.opt)),
        optimizer_({.weight_decay = s.opt.weight_decay}) {
    model_.visit([&](auto& p) { p.initialize(ctx_); });
    world_.ledger().clear();
  }

  plait::step_result step(std::int64_t index) override {
    if (!step_) {
      step_.emplace(ctx_, model_, optimizer_, s_.microbatches, s_.opt.clip);
      repeated_.emplace(ctx_, *step_, s_.as_graph);
    }
    const std::int64_t first = index * s_.microbatches * s_.sequences;
    ctx_.first_sample = first;
    step_->load(ctx_, [&](std::int64_t i, plait::host_tokens& ids, plait::host_tokens& labels) {
      fill(ids, labels,
           [&](std::int64_t row, auto... rest) { s_.data->fill(first + i * s_.sequences + row, rest...); });
    });
    optimizer_.begin_step(ctx_, s_.rate.at(index));
    if (!repeated_->replays()) ++counted_;
    repeated_->run(ctx_);
    gathered_ = false;
    return step_->result(ctx_);
  }

  std::optional<double> evaluate() override {
    gather();
    auto sum = plait::make_buffer<double>(device_, 1);
    double* const there = sum.template data<double>();
    device_.zero(there, sizeof(double), device_.main_stream());
    const std::int64_t batches = s_.data->held_out_samples() / s_.sequences;
    for (std::int64_t i = 0; i < batches; ++i) {
      if (stop_asked()) return {};
      tokens ids(ctx_), labels(ctx_);
      plait::host_tokens host_ids(ids.part()), host_labels(ids.part());
      fill(host_ids, host_labels,
           [&](std::int64_t row, auto... rest) { s_.data->fill_held_out(i * s_.sequences + row, rest...); });
      plait::upload(ctx_, host_ids, ids);
      plait::upload(ctx_, host_labels, labels);
      const auto loss = model_.forward(ctx_, ids, labels, nullptr);
      plait::kernels::accumulate(device_, loss.data(), there, 1);
    }
    plait::resolve_in_place(ctx_, plait::layout_v<typename model_type::loss_sum::spec>.partial, there);
    double total = 0;
    device_.download(&total, there, sizeof total, device_.main_stream());
    return total / static_cast<double>(batches * s_.sequences * s_.opt.seq);
  }

  std::vector<std::int64_t> sample() override {
    gather();
    std::vector<std::int64_t> text = plait::encode_bytes(s_.opt.prompt);
    if (text.empty()) text.push_back('\n');
    const auto total = static_cast<std::int64_t>(text.size()) + s_.opt.sample;
    for (auto place = static_cast<std::int64_t>(text.size()); place < total; ++place) {
      const std::int64_t length = std::min(place, s_.opt.seq), from = place - length;
      tokens ids(ctx_);
      plait::host_tokens host(ids.part());
      const std::int64_t rows = ids.part().local[0], columns = ids.part().local[1];
      for (std::int64_t row = 0; row < rows; ++row)
        for (std::int64_t column = 0; column < columns; ++column) {
          const std::int64_t at = ids.part().offset[1] + column;
          host.data()[row * columns + column] = at < length ? text[static_cast<std::size_t>(from + at)] : 0;
        }
      plait::upload(ctx_, host, ids);
      text.push_back(draw(model_.score(ctx_, ids), length, place));
      if (stop_asked()) break;
    }
    return text;
  }

  std::uint64_t weights_hash() override { return plait::weights_hash(ctx_, model_); }
  double agree(double value, plait::reduce_op op) override { return plait::agree(ctx_, value, op); }
  plait::world& world() override { return world_; }
  std::int64_t counted_steps() const override { return counted_; }
  plait::ledger predicted_traffic() override {
    return plait::predict_step_traffic(ctx_, model_, optimizer_, s_.microbatches);
  }
  std::size_t peak_bytes() const override { return device_.peak_bytes(); }
  std::string device_name() const override { return name_of_device(device_); }

 private:
  /// Fills this rank's part of a microbatch: `read` is given a sample of the microbatch, its first position, how many,
  /// and where they go.
  template <class Read>
  static void fill(plait::host_tokens& ids, plait::host_tokens& labels, Read&& read) {
    const plait::box& part = ids.part();
    for (std::int64_t row = 0; row < part.local[0]; ++row) {
      const std::int64_t at = row * part.local[1];
      read(part.offset[0] + row, part.offset[1], part.local[1], ids.data() + at, labels.data() + at);
    }
  }

  void gather() {
    if (!gathered_) model_.visit([&](auto& p) { p.gather(ctx_); });
    gathered_ = true;
  }
  /// Whether the run was interrupted on any rank: an answer that all ranks share.
  bool stop_asked() { return agree(interrupted, plait::reduce_op::max) != 0; }

  static double number(activation x) {
    if constexpr (std::is_same_v<activation, plait::bf16>) {
      return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16));
    } else {
      return static_cast<double>(x);
    }
  }

  /// The next token after `length` tokens in row 0: Gumbel-max over the whole vocabulary, with random numbers keyed by
  /// the place and the token, so that every mesh draws the same text. Nothing but one score per rank is communicated.
  std::int64_t draw(const typename model_type::logits& scores, std::int64_t length, std::int64_t place) {
    const plait::box& part = scores.part();
    const std::int64_t vocab = s_.config.vocab, columns = part.local[2];
    double best = -std::numeric_limits<double>::infinity();
    std::int64_t token = -1;
    if (part.offset[0] == 0) {
      std::vector<activation> row(static_cast<std::size_t>(columns));
      device_.download(row.data(), scores.data() + (length - 1) * columns, row.size() * sizeof(activation),
                       device_.main_stream());
      for (std::int64_t c = 0; c < columns && part.offset[2] + c < vocab; ++c) {
        double score = number(row[static_cast<std::size_t>(c)]);
        if (s_.opt.temperature > 0) {
          const double u = plait::kernels::uniform(ctx_.seed, 0x7361'6d70'6c65,
                                                   static_cast<std::uint64_t>(place * vocab + part.offset[2] + c));
          score = score / s_.opt.temperature - std::log(-std::log(std::max(u, 1e-300)));
        }
        if (score > best) best = score, token = part.offset[2] + c;
      }
    }
    const double top = agree(best, plait::reduce_op::max);
    const double winner = agree(best == top ? static_cast<double>(token) : -1.0, plait::reduce_op::max);
    return static_cast<std::int64_t>(winner);
  }

  const setup& s_;
  Device& device_;
  plait::world world_;
  plait::context<Device> ctx_;
  model_type model_;
  plait::adamw<Precision, Device> optimizer_;
  std::optional<step_type> step_;  ///< from the first step on
  std::optional<repeated_step<step_type, Device>> repeated_;
  std::int64_t counted_ = 0;
  bool gathered_ = false;
};
