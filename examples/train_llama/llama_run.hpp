#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <type_traits>
#include <utility>

#include "checkpoint_files.hpp"
#include "model_run.hpp"
#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/load_weights.hpp"
#include "plait/checkpoint/saver.hpp"
#include "plait/data/text.hpp"
#include "plait/kernels/philox.hpp"
#include "plait/models/export_hugging_face.hpp"
#include "plait/models/hugging_face_directory.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/nn/strategies.hpp"
#include "plait/observe/step_waits.hpp"
#include "plait/pipeline/pipeline.hpp"
#include "plait/pipeline/world.hpp"
#include "plait/tensor/all_reduce_scalar.hpp"
#include "plait/train/optim/chosen_optimizer.hpp"
#include "plait/train/parameter_hashes.hpp"
#include "plait/train/step_communication.hpp"
#include "plait/train/train_step.hpp"
#include "plait/train/weights_hash.hpp"
#include "resumed.hpp"
#include "signals.hpp"

inline plait::llama_options model_options(const setup& s) {
  const options& opt = s.opt;
  return {.keep = s.recompute,
          .dropout = opt.dropout,
          .loss = {.label_smoothing = opt.label_smoothing, .z_loss = opt.z_loss},
          .attention = {.documents = keeps_documents_apart(opt), .context = s.context},
          .overlap = opt.tensor_overlap};
}

inline plait::optimizer_options optimizer_options_of(const options& opt) {
  const plait::moment_type moments = opt.moments == "bf16"   ? plait::moment_type::bf16
                                     : opt.moments == "int8" ? plait::moment_type::int8
                                                             : plait::moment_type::full;
  const plait::adamw_options adamw{.weight_decay = opt.weight_decay, .moments = moments};
  if (opt.optimizer == "adamw") return adamw;
  return plait::muon_options{
      .momentum = opt.muon_momentum,
      .scale = opt.muon_scale == "original" ? plait::muon_scale::original : plait::muon_scale::match_rms_adamw,
      .learning_rate_ratio = opt.muon_lr_ratio,
      .weight_decay = opt.weight_decay,
      .adamw = adamw};
}

/// How a device repeats a step: as it is. (GPUs: cuda_llama_run.hpp.)
template <class Step, plait::compute_device Device>
class repeated_step {
 public:
  repeated_step(plait::context<Device>&, Step& step, const setup&, plait::any_communicator&) : step_(step) {}
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

/// A strategy of the command line, with the attention policy that it names and the sequence placed as it says.
template <class Strategy, class Placement>
using in_context = plait::context_parallel<Strategy, plait::chosen<plait::cp>, Placement>;

/// What --split measured gives, or `s.stages`. Collective.
template <class Precision, plait::strategy Strategy, plait::compute_device Device>
std::vector<plait::stage_layers> stages_of(const setup& s, plait::context<Device>& ctx, plait::any_communicator& all) {
  if (s.opt.split != "measured" || s.stages.size() == 1) return s.stages;
  plait::llama_options options = model_options(s);
  options.attention.documents = false;  // what is measured has none
  plait::llama_part_times parts = plait::measure_llama_parts<Precision, Strategy>(ctx, s.config, options);
  for (plait::action_times* part : {&parts.layer, &parts.embedding, &parts.head})
    for (double* time : {&part->forward, &part->backward, &part->input_backward, &part->weight_backward})
      *time = plait::all_reduce_scalar(ctx.device, all, *time, plait::reduce_op::max);
  return plait::split_layers(plait::stage_costs_of(parts, s.config.layers), static_cast<std::int64_t>(s.stages.size()));
}

/// A Llama on one rank: the stages of the pipeline that are this rank's.
template <class Precision, plait::strategy Strategy, plait::compute_device Device>
class llama_run final : public model_run {
  using stage_type = plait::llama<Precision, Strategy, Device>;
  using model_type = plait::pipeline<stage_type>;
  using tokens = typename model_type::tokens;
  using document_starts = typename stage_type::document_starts;
  using activation = plait::activation_of<Precision>;
  using step_type = plait::training_step<stage_type>;

 public:
  llama_run(const setup& s, Device& device, plait::any_communicator ranks)
      : s_(s),
        device_(device),
        heard_(s.opt.trace.empty() && s.opt.timeline.empty() ? nullptr : std::make_shared<plait::recorder>()),
        world_(s.mesh, std::move(ranks), heard_),
        ctx_{device, world_.stage(),
             plait::llama_sizes<Strategy>(s.config, world_.stage().shape(), s.sequences, s.opt.seq, s.numerics),
             s.opt.seed, plait::numerics_under<Strategy>(s.numerics, world_.stage().shape())},
        order_(plait::sequence_order_of<Strategy>(world_.stage().shape(), ctx_.sizes)),
        stages_(stages_of<Precision, Strategy>(s, ctx_, world_.root())),
        model_(
            ctx_, world_.along(), s.schedule, stages_,
            [&](plait::stage_layers part, stage_type* first) {
              return std::make_unique<stage_type>(ctx_, s.config, model_options(s), part, first);
            },
            s.parallel),
        optimizer_(optimizer_options_of(s.opt)),
        exchange_(device, asks_at_norm ? world_.root().split(0, world_.root().rank()) : world_.root()),
        since_(world_.stage().ledger()) {
    if (s.weights)
      plait::load_weights(ctx_, model_, s.weights->entries, s.weights->source());
    else if (!s.first_step.empty())
      load_first_step();
    else
      model_.visit([&](auto& p) { p.initialize(ctx_); });
    model_.gather_changed(ctx_);
    world_.stage().ledger().clear();
  }

  plait::step_result step(std::int64_t index, bool with_communication) override {
    if (!step_) {
      step_.emplace(ctx_, model_, optimizer_, s_.opt.clip);
      since_.begin();  // with what was loaded the ledger began anew
      if (asks_at_norm) step_->around_norm([&] { ask(); }, [&] { hear(); });
      if (norm_) step_->keep_norm(ctx_, *norm_);
      repeated_.emplace(ctx_, *step_, s_, world_.root());
    }
    with_communication_ = with_communication;
    const std::int64_t first = samples_before(index);
    const plait::box part =
        plait::local_box(plait::layout_v<typename tokens::spec>, ctx_.ranks.shape(), ctx_.sizes, ctx_.ranks.rank());
    const auto sample = [&](std::int64_t i, std::int64_t row) {
      return first - data_begin_ + row - part.offset[0] +
             plait::first_sample_in_step(ctx_.numerics, i, s_.microbatches, part.global[0], part.offset[0],
                                         part.local[0]);
    };
    step_->load(ctx_, first,
                [&](std::int64_t i, plait::host_tokens& ids, plait::host_tokens& labels, plait::host_starts& starts) {
                  fill(
                      ids, labels, starts,
                      [&](std::int64_t row, auto... rest) { s_.data->fill(sample(i, row), rest...); },
                      [&](std::int64_t row, auto... rest) { s_.data->starts(sample(i, row), rest...); });
                });
    optimizer_.begin_step(ctx_, s_.rate.at(index));
    if (!repeated_->replays()) ++counted_;
    if (heard_ && index == traced_step(s_.opt)) return trace_step();
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
    const std::optional<double> loss = held_out_loss();
    world_.stage().ledger().restore(before);
    return loss;
  }

  std::vector<std::int64_t> sample() override {
    std::vector<std::int64_t> text = plait::encode_bytes(s_.opt.prompt);
    if (text.empty()) text.push_back('\n');
    document_starts starts;  // one document
    if (model_.documents()) {
      starts = document_starts(ctx_);
      plait::upload(ctx_, plait::host_starts(starts.part()), starts);
    }
    const auto total = static_cast<std::int64_t>(text.size()) + s_.opt.sample;
    for (auto place = static_cast<std::int64_t>(text.size()); place < total; ++place) {
      const std::int64_t length = std::min(place, s_.opt.seq), from = place - length;
      tokens ids(ctx_);
      plait::host_tokens host(ids.part());
      const std::int64_t rows = ids.part().local[0], columns = ids.part().local[1];
      for (std::int64_t row = 0; row < rows; ++row)
        for (std::int64_t column = 0; column < columns; ++column) {
          const std::int64_t at = order_.position(ids.part().offset[1] + column);
          host.data()[row * columns + column] = at < length ? text[static_cast<std::size_t>(from + at)] : 0;
        }
      plait::upload(ctx_, host, ids);
      text.push_back(draw(model_.score(ctx_, ids, starts ? starts.data() : nullptr), length, place));
      if (stop_asked()) break;
    }
    return text;
  }

  std::int64_t resume() override {
    if (!s_.opt.checkpoint_dir.empty()) open_saver();
    std::string path = s_.opt.resume == "none" || s_.opt.resume == "auto" ? "" : s_.opt.resume, problem;
    std::optional<plait::committed_step> newest;  // of those that this run adds to
    try {
      if (rank() == 0 && saver_) newest = plait::newest_step(plait::machine_files(), s_.opt.checkpoint_dir);
    } catch (const std::exception& e) {
      problem = e.what();
    }
    plait::agree_on(device_, world_.root(), problem, "--checkpoint-dir: ");
    newest_saved_ =
        static_cast<std::int64_t>(all_reduce(newest ? static_cast<double>(newest->step) : -1.0, plait::reduce_op::max));
    if (s_.opt.resume == "auto" && newest_saved_ >= 0) path = s_.opt.checkpoint_dir;
    if (!path.empty()) load(path);
    if (newest_saved_ > steps_before_)
      problem = plait::cat({"'", s_.opt.checkpoint_dir, "' has step ", newest_saved_, " already, and this run begins ",
                            "after step ", steps_before_, "; --resume auto goes on from the newest, and another ",
                            "directory takes what this run saves"});
    plait::agree_on(device_, world_.root(), problem, "--checkpoint-dir: ");
    forget_best_elsewhere();
    return steps_before_;
  }
  std::int64_t newest_saved() override { return newest_saved_; }
  best_step best_saved() override { return best_; }
  std::vector<plait::finished_save> save(std::int64_t steps, const best_step& best) override {
    plait::saved_scalars scalars{{"train.steps", steps},
                                 {"train.samples", samples_before(steps)},
                                 {"train.seed", static_cast<std::int64_t>(s_.opt.seed)},
                                 {"train.seq", s_.opt.seq},
                                 {"train.data", data_text_},
                                 {"train.rate", steps > steps_before_ ? s_.rate_text : rate_text_},
                                 {"train.data_begin", data_begin_}};
    if (const auto kept = step_ ? step_->kept_norm(ctx_) : norm_) {
      scalars.emplace_back("train.clip.norm", kept->norm);
      scalars.emplace_back("train.clip.factor", kept->factor);
      scalars.emplace_back("train.clip.update", kept->update);
    }
    if (best.step >= 0) {
      scalars.emplace_back("train.best.step", best.step);
      scalars.emplace_back("train.best.held_out_loss", best.loss);
      if (s_.opt.keep_best != "none") saver_->keep_best(static_cast<std::uint64_t>(best.step));
    }
    return saver_->save(ctx_, model_, optimizer_, static_cast<std::uint64_t>(steps), {.scalars = std::move(scalars)});
  }
  std::vector<plait::finished_save> ended_saves(bool wait) override {
    if (!saver_) return {};
    return wait ? saver_->wait(device_) : saver_->finished(device_);
  }

  std::uint64_t weights_hash() override { return plait::weights_hash(ctx_, model_); }
  std::vector<plait::parameter_hash> hashes(bool gradients) override {
    model_.settle();  // the gathers after the update belong to the step
    const plait::ledger before = world_.stage().ledger();
    std::vector<plait::parameter_hash> all = plait::parameter_hashes(ctx_, model_, gradients);
    world_.stage().ledger().restore(before);
    return all;
  }
  void write_model() override {
    plait::export_hugging_face(
        ctx_, world_.root(), model_, s_.config, s_.opt.export_hf,
        {.like = s_.weights ? s_.opt.init_from : "", .order = plait::weights_order_from(s_.opt.export_order)});
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
  /// Fills this rank's part of a microbatch: `read` is given a sample of the microbatch, the first position of some
  /// tokens that follow each other, how many, and where they go; `read_starts` likewise, for the documents.
  template <class Read, class ReadStarts>
  void fill(plait::host_tokens& ids, plait::host_tokens& labels, plait::host_starts& starts, Read&& read,
            ReadStarts&& read_starts) const {
    const plait::box& part = ids.part();
    for (std::int64_t row = 0; row < part.local[0]; ++row)
      for (const plait::token_run& run : order_.runs(part.offset[1], part.local[1])) {
        const std::int64_t at = row * part.local[1] + run.at;
        read(part.offset[0] + row, run.position, run.length, ids.data() + at, labels.data() + at);
        if (model_.documents()) read_starts(part.offset[0] + row, run.position, run.length, starts.data() + at);
      }
  }

  void fill_held_out(std::int64_t i, plait::host_tokens& ids, plait::host_tokens& labels,
                     plait::host_starts& starts) const {
    fill(
        ids, labels, starts,
        [&](std::int64_t row, auto... rest) { s_.data->fill_held_out(i * s_.sequences + row, rest...); },
        [&](std::int64_t row, auto... rest) { s_.data->starts_held_out(i * s_.sequences + row, rest...); });
  }
  /// Mean loss over the held-out samples; nothing if interrupted.
  std::optional<double> held_out_loss() {
    const std::int64_t batches = s_.data->held_out_samples() / s_.sequences;
    typename model_type::mean mean(ctx_);
    mean.count(ctx_, held_out_targets(batches));
    mean.begin(ctx_);
    typename model_type::batch batch;  // as many microbatches as fill the pipeline go through it together
    std::vector<document_starts> starts;
    for (std::int64_t i = 0; i < batches; ++i) {
      auto& [ids, labels] = batch.emplace_back(tokens(ctx_), tokens(ctx_));
      plait::host_tokens host_ids(ids.part()), host_labels(ids.part());
      plait::host_starts host_starts(ids.part());
      fill_held_out(i, host_ids, host_labels, host_starts);
      plait::upload(ctx_, host_ids, ids);
      plait::upload(ctx_, host_labels, labels);
      if (model_.documents()) plait::upload(ctx_, host_starts, starts.emplace_back(ctx_));
      if (static_cast<int>(batch.size()) < 4 * model_.shape().stages() && i + 1 < batches) continue;
      if (stop_asked()) return {};
      std::vector<const std::int32_t*> of_batch;
      for (const document_starts& one : starts) of_batch.push_back(one.data());
      model_.evaluate(ctx_, batch, mean, of_batch);
      batch.clear();
      starts.clear();
    }
    model_.sum_over_stages(ctx_, mean.pending_sum());
    mean.finish(ctx_);
    double sum = 0, count = 0;
    device_.download(&sum, mean.loss_sum(), sizeof sum, device_.main_stream());
    device_.download(&count, mean.tokens(), sizeof count, device_.main_stream());
    return sum / count;
  }
  /// This rank's targets that count, of so many microbatches.
  std::int64_t held_out_targets(std::int64_t batches) const {
    const plait::box part =
        plait::local_box(plait::layout_v<typename tokens::spec>, ctx_.ranks.shape(), ctx_.sizes, ctx_.ranks.rank());
    if (!model_.documents()) return batches * part.local_size();
    plait::host_tokens ids(part), labels(part);
    plait::host_starts starts(part);
    std::int64_t counted = 0;
    for (std::int64_t i = 0; i < batches; ++i) {
      fill_held_out(i, ids, labels, starts);
      counted += labels.size() - std::count(labels.data(), labels.data() + labels.size(), model_.ignore_index());
    }
    return counted;
  }

  /// On a GPU the host is far ahead of a step's norm, and a step may be replayed without it; gathers have a stream of
  /// their own there, so that nothing asked after a step waits for them.
  static constexpr bool asks_at_norm = std::is_same_v<Device, plait::cpu>;

  /// Starts to bring together what the ranks ask for; `hear` has the answers.
  void ask() {
    mine_ = since_.since();
    exchange_.start({static_cast<double>(interrupted.load()), static_cast<double>(save_asked.load()),
                     saver_ && saver_->has_news() ? 1.0 : 0.0, static_cast<double>(mine_.size())});
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
    plait::pipeline_executor<Device>& executor = model_.executor();
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

  void open_saver() {
    plait::file_system* files = nullptr;
    std::string problem;
    try {
      files = &checkpoint_files(s_.opt);
    } catch (const std::exception& e) {
      problem = e.what();
    }
    plait::agree_on(device_, world_.root(), problem, "");
    try {
      saver_.emplace(device_, world_.root(),
                     plait::saver_options{.directory = s_.opt.checkpoint_dir,
                                          .keep = {.last = static_cast<std::uint64_t>(s_.opt.keep),
                                                   .every = static_cast<std::uint64_t>(s_.opt.keep_every)},
                                          .layout = s_.opt.mesh + ", " + s_.opt.data_parallel + ", schedule " +
                                                    s_.opt.schedule + ", " + s_.opt.precision},
                     *files);
    } catch (const plait::error_of_all& e) {
      throw plait::error_of_all(plait::cat({"--checkpoint-dir: ", e.what()}));
    }
  }

  /// Loads the weights of the step that --init-from names, and nothing else.
  void load_first_step() {
    try {
      plait::load_weights_of_step(ctx_, world_.root(), model_, s_.first_step, {.in_place = true});
    } catch (const plait::error_of_all& e) {
      throw plait::error_of_all(plait::cat({"--init-from: ", e.what()}));
    }
  }

  /// Loads the state of the newest step in `path`, or of `path` itself.
  void load(const std::string& path) {
    const plait::loaded_state loaded =
        plait::load_state(ctx_, world_.root(), model_, optimizer_, path, {.in_place = true});  // an error ends the run
    world_.stage().ledger().clear();
    for (const plait::invalid_step& i : loaded.passed_over)
      std::fputs(plait::cat({"train_llama: --resume passes over '", i.path, "': ", i.reason, "\n"}).c_str(), stderr);
    check_resumed(s_, loaded);
    steps_before_ = loaded.scalar<std::int64_t>("train.steps");
    samples_before_ = loaded.scalar<std::int64_t>("train.samples");
    data_begin_ = loaded.find_scalar<std::int64_t>("train.data_begin").value_or(0);
    const std::string there = told_by(loaded, "train.data");
    if (!s_.data)
      data_text_ = there;
    else if (there != data_text_)
      data_begin_ = samples_before_;
    rate_text_ = told_by(loaded, "train.rate");
    const auto has = [&](const char* scalar) {
      return std::any_of(loaded.scalars.begin(), loaded.scalars.end(),
                         [&](const auto& s) { return s.first == scalar; });
    };
    if (has("train.best.step") && (!s_.data || there == data_text_))  // the loss of other data says nothing
      best_ = {loaded.scalar<std::int64_t>("train.best.step"), loaded.scalar<double>("train.best.held_out_loss")};
    for (const auto& [name, value] : loaded.scalars)
      if (name == "train.clip.norm" && s_.opt.clip_norm == "delayed")
        norm_ = {loaded.scalar<double>("train.clip.norm"), loaded.scalar<double>("train.clip.factor"),
                 loaded.scalar<double>("train.clip.update")};
  }

  /// The best of a run is the best of what this directory has, or there is none yet.
  void forget_best_elsewhere() {
    if (best_.step < 0 || !saver_) return;
    std::string problem;
    bool here = false;
    try {
      const std::string path = s_.opt.checkpoint_dir + "/" + plait::step_name(static_cast<std::uint64_t>(best_.step));
      here = rank() == 0 && plait::machine_files().kind_of(path) == plait::file_kind::directory;
    } catch (const std::exception& e) {
      problem = e.what();
    }
    plait::agree_on(device_, world_.root(), problem, "--checkpoint-dir: ");
    if (all_reduce(here ? 1 : 0, plait::reduce_op::max) == 0) best_ = {};
  }

  /// The samples that were trained on before step `index`.
  std::int64_t samples_before(std::int64_t index) const {
    return samples_before_ + (index - steps_before_) * s_.microbatches * s_.sequences;
  }

  /// Whether the run was interrupted on any rank: an answer that all ranks share.
  bool stop_asked() { return all_reduce(interrupted.load(), plait::reduce_op::max) != 0; }

  static double number(activation x) {
    if constexpr (std::is_same_v<activation, plait::bf16>) {
      return static_cast<double>(plait::to_float(x));
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
    std::int64_t token = -1, last = -1;  // where the last token's scores are here
    for (std::int64_t at = 0; scores && part.offset[0] == 0 && at < part.local[1]; ++at)
      if (order_.position(part.offset[1] + at) == length - 1) last = at;
    if (last >= 0) {
      std::vector<activation> row(static_cast<std::size_t>(columns));
      device_.download(row.data(), scores.data() + last * columns, row.size() * sizeof(activation),
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
    const double top = all_reduce(best, plait::reduce_op::max);
    const double winner = all_reduce(best == top ? static_cast<double>(token) : -1.0, plait::reduce_op::max);
    if (winner < 0)
      plait::fail(
          "sampling: no token has a finite score, so the last step's update has ruined the weights; try a smaller "
          "--lr");
    return static_cast<std::int64_t>(winner);
  }

  const setup& s_;
  Device& device_;
  std::shared_ptr<plait::recorder> heard_;  ///< what is communicated, if a step is to be traced
  plait::pipeline_world world_;
  plait::context<Device> ctx_;
  plait::sequence_order order_;
  std::vector<plait::stage_layers> stages_;
  model_type model_;
  plait::chosen_optimizer<Precision, Device> optimizer_;
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
  std::optional<plait::checkpoint_saver> saver_;
  std::int64_t steps_before_ = 0, samples_before_ = 0;  ///< where it was resumed
  std::int64_t data_begin_ = 0;                         ///< the run's sample that was the first of its data
  std::string data_text_ = s_.data_text;                ///< of its data
  std::string rate_text_;                               ///< of the steps that were resumed
  best_step best_;                                      ///< of --keep-best
  std::int64_t newest_saved_ = -1;                      ///< in --checkpoint-dir, at the beginning
  std::optional<plait::kernels::clip_numbers> norm_;    ///< as it was then, where the norm is delayed
};

/// Whether the program can also leave the sequence in its original order: every instantiation takes its time to
/// compile. On one context-parallel rank the orders are the same.
template <class Strategy, class Device>
inline constexpr bool has_original_order =
    std::is_same_v<Strategy, plait::megatron_sp> && std::is_same_v<Device, plait::cpu>;

template <class Precision, plait::strategy Strategy, plait::compute_device Device>
std::unique_ptr<model_run> make_llama_run(const setup& s, Device& device, plait::any_communicator ranks) {
  if constexpr (has_original_order<Strategy, Device>) {
    if (!s.zigzag)
      return std::make_unique<llama_run<Precision, in_context<Strategy, plait::contiguous>, Device>>(s, device,
                                                                                                     std::move(ranks));
  }
  return std::make_unique<llama_run<Precision, in_context<Strategy, plait::zigzag>, Device>>(s, device,
                                                                                             std::move(ranks));
}
