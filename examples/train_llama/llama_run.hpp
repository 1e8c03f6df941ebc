// The training of a rank for one precision, strategy and device.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../about.hpp"
#include "llama_plan.hpp"
#include "options.hpp"
#include "plait/checkpoint/agree.hpp"
#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/model_weights.hpp"
#include "plait/checkpoint/saver.hpp"
#include "plait/comm/any_communicator.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/core/error.hpp"
#include "plait/core/types.hpp"
#include "plait/kernels/philox.hpp"
#include "plait/models/export_hugging_face.hpp"
#include "plait/models/hugging_face_directory.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/nn/moe/router_statistics.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/evaluate.hpp"
#include "plait/parallel/optim/chosen_optimizer.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/parallel/world.hpp"
#include "plait/tensor/context.hpp"
#include "run.hpp"
#include "train_llama/data/tokens.hpp"
#include "train_llama/observe/communication.hpp"
#include "train_llama/observe/step_events.hpp"

/// Exchanges the requests of all ranks once a step, while other collectives run, so that no rank waits for it. If other
/// collectives are called between `start` and `finish`, no other call may use the communicator `ranks`.
template <class Device>
class request_exchange {
 public:
  request_exchange(Device& device, plait::any_communicator ranks) : ranks_(std::move(ranks)), there_(device, 1) {}

  /// Collective, as `finish`.
  void start(const requests& own) {
    asked_ = own;
    if (ranks_.size() == 1) return;
    constexpr std::size_t numbers = sizeof(requests) / sizeof(double);
    there_.upload(&asked_, 1);
    ranks_.start_all_reduce(there_.data(), there_.data(), numbers, plait::dtype::f64, plait::reduce_op::max)
        .swap(in_flight_);
  }
  /// Returns the requests of all ranks, as each passed them to `start`.
  requests finish() {
    if (ranks_.size() == 1) return asked_;
    in_flight_.wait();
    there_.download(&asked_, 1);
    return asked_;
  }
  plait::any_communicator& ranks() { return ranks_; }

 private:
  plait::any_communicator ranks_;
  plait::host_values<requests, Device> there_;
  plait::request in_flight_;
  requests asked_;
};

/// Runs the steps of a device one by one. cuda_llama_run.hpp has the version for GPUs.
template <class Step, plait::compute_device Device>
class repeated_step {
 public:
  repeated_step(plait::context<Device>&, Step& step, const setup&, plait::any_communicator&) : step_(step) {}
  void run(plait::context<Device>& ctx) { step_.run(ctx); }
  /// Whether the next run replays a graph, which the ledger does not count.
  bool replays() const { return false; }

 private:
  Step& step_;
};

/// Reads a rank's part of microbatches from --data: its samples, and its positions of each sample.
template <plait::compute_device Device>
class rank_batches {
 public:
  rank_batches(const setup& s, const plait::context<Device>& ctx, bool documents)
      : s_(s), ctx_(ctx), documents_(documents) {}

  /// Fills microbatch i of a step whose first sample is `first`, as --data counts them.
  void fill(std::int64_t first, std::int64_t i, plait::host_tokens& ids, plait::host_tokens& labels,
            plait::host_starts& starts) const {
    const plait::box& part = ids.stored_part();
    const auto sample = [&](std::int64_t row) {
      return first + row - part.offset[0] +
             plait::first_sample_in_step(ctx_.deterministic, i, s_.microbatches, part.global[0], part.offset[0],
                                         part.local[0]);
    };
    fill_with(*s_.data, ids, labels, starts, [&](std::int64_t row) { return s_.data->training(sample(row)); });
  }

  /// Fills held-out microbatch i. If fewer sequences are left than the last microbatch has, the labels of its other
  /// sequences are `ignored`. So every mesh evaluates the same tokens.
  void fill_held_out(std::int64_t i, std::int64_t ignored, plait::host_tokens& ids, plait::host_tokens& labels,
                     plait::host_starts& starts) const {
    const plait::sampler& judged = *s_.judged();
    fill_with(judged, ids, labels, starts, [&](std::int64_t row) {
      return judged.evaluation(std::min(judged.held_out_samples() - 1, i * s_.sequences + row));
    });
    const plait::box& part = ids.stored_part();
    const std::int64_t left = judged.held_out_samples() - i * s_.sequences - part.offset[0];
    std::fill(labels.row(std::clamp<std::int64_t>(left, 0, part.local[0])), labels.data() + labels.size(), ignored);
  }

  /// The number of held-out microbatches.
  std::int64_t held_out() const { return (s_.judged()->held_out_samples() + s_.sequences - 1) / s_.sequences; }

 private:
  /// Fills a microbatch. `place_of` returns the place in the data of a sample of the microbatch.
  template <class PlaceOf>
  void fill_with(const plait::sampler& from, plait::host_tokens& ids, plait::host_tokens& labels,
                 plait::host_starts& starts, PlaceOf&& place_of) const {
    for (std::int64_t row = 0; row < ids.rows(); ++row) {
      const plait::sampler::place place = place_of(ids.sample(row));
      for (const plait::token_run& run : ids.runs()) {
        from.fill(place, run.position, run.length, ids.row(row) + run.at, labels.row(row) + run.at);
        if (documents_) from.starts(place, run.position, run.length, starts.row(row) + run.at);
      }
    }
  }

  const setup& s_;
  const plait::context<Device>& ctx_;
  bool documents_;
};

/// Samples the tokens of a text from a model, equal on every mesh.
template <class Model, plait::compute_device Device>
class text_sampler {
 public:
  text_sampler(const setup& s, const plait::context<Device>& ctx, plait::any_communicator& ranks, Model& model)
      : s_(s), ctx_(ctx), ranks_(ranks), model_(model) {}

  /// Returns the prompt and the sampled tokens. There are fewer tokens if one ends the text, or if `stop_asked()`,
  /// equal on all ranks, says that the run ends. Collective.
  template <class Stop>
  std::vector<std::int64_t> text(Stop&& stop_asked) {
    std::vector<std::int64_t> text = prompt_tokens(s_);
    document_starts starts;  // one document
    if (model_.documents()) {
      starts = document_starts(ctx_);
      plait::upload(ctx_, plait::host_starts(starts.part(), order_), starts);
    }
    const auto total = static_cast<std::int64_t>(text.size()) + s_.opt.sample;
    for (auto place = static_cast<std::int64_t>(text.size()); place < total; ++place) {
      const std::int64_t length = std::min(place, s_.opt.seq), from = place - length;
      tokens ids(ctx_);
      plait::host_tokens host(ids.part(), order_);
      host.fill([&](std::int64_t, std::int64_t at) {
        return at < length ? text[static_cast<std::size_t>(from + at)] : std::int64_t{0};
      });
      plait::upload(ctx_, host, ids);
      const std::int64_t next = draw(model_.score(ctx_, ids, starts ? starts.data() : nullptr), length, place);
      if (std::find(s_.end_tokens.begin(), s_.end_tokens.end(), next) != s_.end_tokens.end()) break;
      text.push_back(next);
      if (stop_asked()) break;
    }
    return text;
  }

 private:
  using tokens = typename Model::tokens;
  using document_starts = typename Model::stage_type::document_starts;
  using score_type = plait::activation_of<typename Model::precision_type>;

  /// Returns the next token after `length` tokens in row 0, by Gumbel-max over the whole vocabulary. Random numbers are
  /// keyed by the place and the token, so every mesh samples the same text. Ranks communicate only one score each.
  std::int64_t draw(const typename Model::logits& scores, std::int64_t length, std::int64_t place) {
    const plait::box& part = scores.part();
    const std::int64_t vocab = s_.config.vocab, columns = part.local[2];
    constexpr double none = std::numeric_limits<double>::infinity();
    double best = -none;
    std::int64_t token = -1, last = -1;  // `last`: the index of the last token's scores, if this rank has them
    for (std::int64_t at = 0; scores && part.offset[0] == 0 && at < part.local[1]; ++at)
      if (order_.position(part.offset[1] + at) == length - 1) last = at;
    if (last >= 0) {
      std::vector<score_type> row(static_cast<std::size_t>(columns));
      ctx_.device.download(row.data(), scores.data() + last * columns, row.size() * sizeof(score_type),
                           ctx_.device.main_stream());
      for (std::int64_t c = 0; c < columns && part.offset[2] + c < vocab; ++c) {
        auto score = static_cast<double>(plait::widened(row[static_cast<std::size_t>(c)]));
        if (s_.opt.temperature > 0) {
          const double u = plait::kernels::uniform(ctx_.seed, 0x7361'6d70'6c65,
                                                   static_cast<std::uint64_t>(place * vocab + part.offset[2] + c));
          score = score / s_.opt.temperature - std::log(-std::log(std::max(u, 1e-300)));
        }
        if (score > best) best = score, token = part.offset[2] + c;
      }
    }
    const double top = plait::all_reduce_scalar(ctx_.device, ranks_, best, plait::reduce_op::max);
    // If tokens have the same score, the first wins, on whatever rank it is.
    const bool wins = best == top && token >= 0;
    const double winner = -plait::all_reduce_scalar(ctx_.device, ranks_, wins ? -static_cast<double>(token) : -none,
                                                    plait::reduce_op::max);
    if (winner == none)
      plait::fail(
          "sampling: no token has a finite score, so the last step's update has ruined the weights; try a smaller "
          "--lr");
    return static_cast<std::int64_t>(winner);
  }

  const setup& s_;
  const plait::context<Device>& ctx_;
  plait::any_communicator& ranks_;
  Model& model_;
  const plait::sequence_order order_ = model_.order();
};

/// Loads and saves the states of a rank's run, as --init-from, --resume and --checkpoint-dir say. It has the run's
/// place in the data and its learning rate schedule. All functions are collective, except those that only return a
/// value.
template <class Model, class Optimizer, plait::compute_device Device>
class saved_states {
 public:
  saved_states(const setup& s, plait::context<Device>& ctx, plait::any_communicator& ranks, Model& model,
               Optimizer& optimizer)
      : s_(s), ctx_(ctx), ranks_(ranks), model_(model), optimizer_(optimizer) {}

  /// Loads only the weights of the step that --init-from names. The step may have adapters.
  void load_first_step() {
    about("--init-from", [&] {
      plait::load_weights_of_step(ctx_, ranks_, model_, s_.first_step,
                                  {.may_miss = plait::is_of_adapter, .in_place = true});
    });
  }

  /// Loads the step that --resume names. Returns the number of earlier steps, 0 if it names no step, and sets the steps
  /// that --checkpoint-dir has.
  std::int64_t resume(std::int64_t& newest_saved, best_step& best_saved) {
    if (!s_.opt.checkpoint_dir.empty()) open_saver();
    std::string path = s_.opt.resume == "none" || s_.opt.resume == "auto" ? "" : s_.opt.resume;
    const std::string newest = of_rank_0([&]() -> std::string {
      const auto step = plait::newest_step(plait::machine_files(), s_.opt.checkpoint_dir);
      return step ? std::to_string(step->step) : "";
    });
    if (!newest.empty()) newest_saved = std::stoll(newest);
    if (s_.opt.resume == "auto" && newest_saved >= 0) path = s_.opt.checkpoint_dir;
    if (!path.empty()) load(path);
    if (newest_saved > steps_before_)
      throw plait::error_of_all(
          plait::cat({"--checkpoint-dir: '", s_.opt.checkpoint_dir, "' has step ", newest_saved,
                      " already, and this run begins after step ", steps_before_,
                      "; --resume auto continues from the newest; another directory can take this run's steps"}));
    forget_best_elsewhere();
    if (best_.step >= 0 && saver_ && s_.opt.keep_best != "none")
      saver_->begin_with_best(static_cast<std::uint64_t>(best_.step));
    best_saved = best_;
    return steps_before_;
  }
  /// The number of steps before this run.
  std::int64_t steps_before() const { return steps_before_; }

  /// Saves the state after `steps` steps.
  std::vector<plait::finished_save> save(std::int64_t steps, const best_step& best) {
    const bool has_moved = steps > steps_before_;
    plait::saved_scalars scalars{{"train.steps", steps},
                                 {"train.samples", samples_before(steps)},
                                 {"train.seed", s_.opt.seed},
                                 {"train.seq", s_.opt.seq},
                                 {"train.data", data_text_},
                                 {"train.tokenizer", tokenizer_},
                                 {"train.rate", has_moved ? s_.rate_text : rate_text_},
                                 {"train.options", has_moved || steps == 0 ? training_text(s_) : options_text_},
                                 {"train.data_begin", data_begin_}};
    if (best.step >= 0) {
      scalars.emplace_back("train.best.step", best.step);
      scalars.emplace_back("train.best.held_out_loss", best.loss);
      if (s_.opt.keep_best != "none") saver_->keep_best(static_cast<std::uint64_t>(best.step));
    }
    return saver_->save(ctx_, model_, optimizer_, static_cast<std::uint64_t>(steps), {.scalars = std::move(scalars)});
  }
  std::vector<plait::finished_save> ended_saves(bool wait) {
    if (!saver_) return {};
    return wait ? saver_->wait(ctx_.device) : saver_->finished(ctx_.device);
  }
  std::vector<plait::finished_save> room_for_save() {
    return saver_ ? saver_->wait_for_room(ctx_.device) : std::vector<plait::finished_save>();
  }

  bool has_finished_save() const { return saver_ && saver_->has_finished_save(); }

  /// Returns the number of samples that the run was trained on before step `index`.
  std::int64_t samples_before(std::int64_t index) const {
    return samples_before_ + (index - steps_before_) * s_.microbatches * s_.sequences;
  }
  /// The number of the run's first sample of the present data.
  std::int64_t data_begin() const { return data_begin_; }

 private:
  void open_saver() {
    plait::file_system* files = nullptr;
    plait::agree(ctx_.device, ranks_, [&] { files = &checkpoint_files(s_.opt); });
    about("--checkpoint-dir", [&] {
      saver_.emplace(
          ctx_.device, ranks_,
          plait::saver_options{
              .directory = s_.opt.checkpoint_dir,
              .keep = {.last = static_cast<std::uint64_t>(s_.opt.keep),
                       .every = static_cast<std::uint64_t>(s_.opt.keep_every)},
              .layout = s_.opt.mesh + ", " + s_.opt.data_parallel + ", schedule " + s_.opt.schedule + ", " +
                        precision_text(s_.opt),
              .is_ending = [] { return interrupted.load() != 0; },
              .pinned_bytes = s_.opt.checkpoint_staging == "pinned" ? std::numeric_limits<std::size_t>::max() : 0},
          *files);
    });
  }

  /// Loads the state of the newest step in `path`, or of `path` itself.
  void load(const std::string& path) {
    plait::loaded_state loaded;
    try {
      loaded = plait::load_state(ctx_, ranks_, model_, optimizer_, path, {.in_place = true});  // an error ends the run
    } catch (const plait::no_optimizer_state& e) {
      throw plait::error_of_all(plait::cat({"--resume: ", e.what(), ", as --init-from does"}));
    } catch (const plait::error_of_all& e) {
      throw plait::error_of_all(plait::cat({"--resume: ", why_not_resumed(s_, path, e.what())}));
    }
    ctx_.ranks.ledger().clear();
    for (const plait::invalid_step& i : loaded.invalid_steps)
      std::fputs(plait::cat({"train_llama: --resume passes over '", i.path, "': ", i.reason, "\n"}).c_str(), stderr);
    check_resumed(s_, loaded);
    steps_before_ = loaded.scalar<std::int64_t>("train.steps");
    samples_before_ = loaded.scalar<std::int64_t>("train.samples");
    data_begin_ = loaded.find_scalar<std::int64_t>("train.data_begin").value_or(0);
    const std::string there = saved_text(loaded, "train.data");
    if (!s_.data)
      data_text_ = there;
    else if (there != data_text_)
      data_begin_ = samples_before_;
    rate_text_ = saved_text(loaded, "train.rate");
    if (tokenizer_.empty()) tokenizer_ = loaded.find_scalar<std::string>("train.tokenizer").value_or("");
    options_text_ = loaded.find_scalar<std::string>("train.options").value_or("");
    if (const std::string other = changed_options(s_, loaded); !other.empty() && ranks_.rank() == 0)
      std::fputs(plait::cat({"train_llama: --resume: other options than before: ", other, "\n"}).c_str(), stderr);
    // A loss over other data, or over other tokens, cannot be compared with later losses.
    if (const auto best = loaded.find_scalar<std::int64_t>("train.best.step");
        best && (!s_.data || (there == data_text_ && !judges_otherwise(s_, loaded))))
      best_ = {*best, loaded.scalar<double>("train.best.held_out_loss")};
  }

  /// Forgets the best step if --checkpoint-dir does not have it.
  void forget_best_elsewhere() {
    if (best_.step < 0) return;
    const std::string path = s_.opt.checkpoint_dir + "/" + plait::step_name(static_cast<std::uint64_t>(best_.step));
    const std::string here = of_rank_0([&]() -> std::string {
      return plait::machine_files().kind_of(path) == plait::file_kind::directory ? path : "";
    });
    if (saver_ && here.empty()) best_ = {};
  }

  /// Returns on every rank what rank 0 finds in --checkpoint-dir; nothing if nothing is saved.
  template <class Find>
  std::string of_rank_0(Find&& find) {
    return saver_ ? plait::text_of_rank_0(ctx_.device, ranks_, "--checkpoint-dir: ", find) : std::string();
  }

  const setup& s_;
  plait::context<Device>& ctx_;
  plait::any_communicator& ranks_;
  Model& model_;
  Optimizer& optimizer_;
  std::optional<plait::checkpoint_saver> saver_;
  std::int64_t steps_before_ = 0, samples_before_ = 0;  ///< at the resumed step
  std::int64_t data_begin_ = 0;
  std::string tokenizer_ = s_.opt.tokenizer;  ///< or that of the resumed step; empty: unknown
  std::string data_text_ = s_.data_text;      ///< describes the run's data
  std::string rate_text_, options_text_;      ///< of the resumed step
  best_step best_;                            ///< of --keep-best
};

/// The training of a Llama on one rank, with this rank's stages of the pipeline.
template <class Precision, plait::strategy Strategy, plait::compute_device Device>
class llama_run final : public model_run {
  using stage_type = typename model_of<Precision, Strategy, Device>::type;
  using model_type = plait::pipeline<stage_type>;
  using step_type = plait::training_step<stage_type>;
  using optimizer_type = plait::chosen_optimizer<Precision, Device>;

 public:
  llama_run(const setup& s, Device& device, plait::any_communicator ranks)
      : s_(s),
        device_(device),
        recorder_(s.opt.trace.empty() && s.opt.timeline.empty() ? nullptr : std::make_shared<plait::recorder>()),
        world_(s.mesh, std::move(ranks), recorder_),
        ctx_{device, world_.stage(), sizes_of<Strategy>(s, world_.stage().shape()),
             static_cast<std::uint64_t>(s.opt.seed),
             plait::leaves_under<Strategy>(s.deterministic, world_.stage().shape())},
        model_(
            ctx_, world_.along(), s.schedule, stages = stages_of<Precision, Strategy>(s, ctx_, world_.root()),
            [&](plait::stage_layers part, stage_type* first) {
              return make_stage(ctx_, s, model_options(s), part, first);
            },
            s.parallel),
        optimizer_(optimizer_options_of(s.opt)),
        states_(s, ctx_, world_.root(), model_, optimizer_),
        batches_(s, ctx_, model_.documents()),
        exchange_(device, exchanges_at_norm ? world_.root().split(0, world_.root().rank()) : world_.root()),
        since_(world_.stage().ledger()) {
    rank = world_.root().rank();
    if constexpr (requires { device.name(); }) device_name = device.name();
    world_.stage().checks().set(s.opt.compared);
    model_.visit([&](auto& p) {
      if (!s.begins_from_weights() || plait::is_of_adapter(p.name())) p.initialize(ctx_);
    });
    if (s.weights) plait::load_weights(ctx_, model_, s.weights->entries, s.weights->source(), {}, plait::is_of_adapter);
    if (!s.first_step.empty()) states_.load_first_step();
    model_.gather_changed(ctx_);
    world_.stage().ledger().clear();
  }

  plait::step_result step(std::int64_t index, bool with_communication) override {
    if (!step_) {
      step_.emplace(ctx_, model_, optimizer_, s_.opt.clip);
      since_.begin();  // a load has reset the ledger
      if (exchanges_at_norm) step_->on_norm([&] { start_exchange(); }, [&] { finish_exchange(); });
      repeated_.emplace(ctx_, *step_, s_, world_.root());
    }
    judged_.reset();
    with_communication_ = with_communication;
    const std::int64_t first = states_.samples_before(index);
    step_->load(ctx_, first,
                [&](std::int64_t i, plait::host_tokens& ids, plait::host_tokens& labels, plait::host_starts& starts) {
                  batches_.fill(first - states_.data_begin(), i, ids, labels, starts);
                });
    optimizer_.begin_step(ctx_, s_.rate.at(index));
    if (!repeated_->replays()) ++counted_steps;
    if (recorder_ && index == traced_step(s_.opt, states_.steps_before())) return trace_step();
    repeated_->run(ctx_);
    if (!exchanges_at_norm) start_exchange(), finish_exchange();
    if (recorder_) recorder_->clear();
    return step_->result(ctx_);
  }

  std::map<std::int64_t, plait::router_statistics> routers() override {
    std::map<std::int64_t, plait::router_statistics> routers;
    if constexpr (plait::mixture_strategy<Strategy>) {
      const plait::ledger before = world_.stage().ledger();
      const auto experts = static_cast<std::size_t>(s_.config.mixture.experts), row = 2 * experts + 2;
      std::vector<double> all(static_cast<std::size_t>(s_.config.layers) * row);  // has any, load, dropped, entropy
      for (stage_type* const stage : model_.stages())
        for (std::int64_t i = 0; i < stage->part().size(); ++i) {
          const plait::router_statistics own =
              stage->block_at(static_cast<std::size_t>(i)).template get<1>().inner().statistics(ctx_);
          if (own.load.empty() || ctx_.ranks.rank() != 0) continue;
          double* const to = all.data() + static_cast<std::size_t>(stage->part().begin + i) * row;
          to[0] = 1, to[row - 1] = own.entropy;
          std::copy(own.load.begin(), own.load.end(), to + 1);
          std::copy(own.dropped.begin(), own.dropped.end(), to + 1 + experts);
        }
      plait::all_reduce_values(device_, world_.root(), all.data(), all.size(), plait::reduce_op::sum);
      for (std::int64_t i = 0; i < s_.config.layers; ++i) {
        const double *const of = all.data() + static_cast<std::size_t>(i) * row, *const dropped = of + 1 + experts;
        if (of[0] == 0) continue;
        plait::router_statistics& to = routers[i] = {{of + 1, dropped}, {}, of[row - 1]};
        if (s_.opt.expert_limit > 0) to.dropped.assign(dropped, dropped + experts);
      }
      world_.stage().ledger().restore(before);
    }
    return routers;
  }

  std::optional<double> evaluate() override {
    if (judged_) return judged_;  // a step may be evaluated for --eval-every, a save and the end
    model_.wait_for_transfers();  // the gathers after the update belong to the step
    const plait::ledger before = world_.stage().ledger();
    const auto fill = [&](std::int64_t i, auto&... parts) {
      batches_.fill_held_out(i, model_.ignore_index(), parts...);
    };
    const auto loss = plait::evaluate(ctx_, model_, batches_.held_out(), fill, [&] { return stop_asked(); });
    world_.stage().ledger().restore(before);
    if (loss && loss->tokens == 0) plait::fail("--held-out: no held-out token has a target: each ends its document");
    if (loss) judged_ = loss->mean();
    return judged_;
  }
  std::vector<std::int64_t> sample() override {
    return text_sampler<model_type, Device>(s_, ctx_, world_.root(), model_).text([&] { return stop_asked(); });
  }

  std::int64_t resume() override {
    if (!s_.opt.export_hf.empty()) {  // so that an error is found before training
      const std::filesystem::path folder =
          std::filesystem::path(s_.opt.export_hf + "/").lexically_normal().parent_path();
      const std::string within = folder.parent_path().string();
      plait::require_one_directory(device_, world_.root(), within.empty() ? "." : within, "--export-hf: ");
    }
    return states_.resume(newest_saved, best_saved);
  }
  std::vector<plait::finished_save> save(std::int64_t steps, const best_step& best) override {
    return states_.save(steps, best);
  }
  std::vector<plait::finished_save> ended_saves(bool wait) override { return states_.ended_saves(wait); }
  std::vector<plait::finished_save> room_for_save() override { return states_.room_for_save(); }

  std::uint64_t weights_hash() override { return plait::weights_hash(ctx_, model_); }
  std::vector<plait::parameter_hash> hashes(bool gradients) override {
    model_.wait_for_transfers();  // the gathers after the update belong to the step
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
      double seconds = 0;
      plait::fixed_text<240> text{};
    };
    const auto& executor = model_.executor();
    const plait::step_wait mine = plait::longest_wait(executor.step(), executor.along().rank(),
                                                      model_.executor().measured().waits(), axes, model_.unit_names());
    const record own{mine.seconds, mine.text(static_cast<double>(counted_steps))};
    std::string longest;
    double most = 0;
    const auto all = plait::gather_records<record>(device_, world_.root(), {own}, 0);
    for (std::size_t r = 0; r < all.size(); ++r)
      if (all[r][0].seconds > most)
        most = all[r][0].seconds, longest = plait::cat({all[r][0].text.view(), ", on rank ", r});
    return longest;
  }
  plait::world& world() override { return world_.stage(); }
  std::vector<std::vector<plait::step_event>> traced() override {
    if (!recorder_) return {};
    return plait::gather_records(device_, world_.root(), seen_, 0);
  }
  std::size_t peak_bytes() const override { return device_.peak_bytes(); }

 private:
  /// Whether ranks exchange requests during the norm. On a GPU they do not: the host is far ahead of the norm, and a
  /// step may be replayed without the host. Gathers have their own stream there, so an exchange after a step does not
  /// wait for them.
  static constexpr bool exchanges_at_norm = std::is_same_v<Device, plait::cpu>;

  /// Starts the exchange of the ranks' requests. `finish_exchange` receives them.
  void start_exchange() {
    mine_ = since_.since();
    exchange_.start({static_cast<double>(interrupted.load()), static_cast<double>(save_asked.load()),
                     states_.has_finished_save() ? 1.0 : 0.0, static_cast<double>(mine_.size())});
  }
  void finish_exchange() {
    asked = exchange_.finish();
    communication.clear();
    if (with_communication_ && asked.communication > 0)
      communication = plait::communication_of_ranks(device_, exchange_.ranks(), mine_,
                                                    static_cast<std::size_t>(asked.communication));
    since_.begin();
  }

  /// Runs a step and records its actions, collectives and messages.
  plait::step_result trace_step() {
    std::vector<plait::pipeline_event> events;
    world_.root().barrier();
    device_.synchronize();
    recorder_->clear();
    const double origin = plait::comm_clock();
    std::vector<plait::timed_entry> times;
    plait::step_executor<Device>& executor = model_.executor();
    executor.events = &events;
    executor.measured().times = &times;
    repeated_->run(ctx_);
    if (!exchanges_at_norm) start_exchange(), finish_exchange();
    const plait::step_result result = step_->result(ctx_);
    executor.events = nullptr;
    executor.measured().times = nullptr;
    model_.wait_for_transfers();  // the gathers after the update end too
    const plait::timed_program program{executor.step(), executor.along().rank(), times};
    const plait::axis_list along(plait::axis_of<plait::pp>);
    const auto group = static_cast<std::uint64_t>(s_.mesh.group_of(rank, along));
    seen_ = plait::events_of(s_.schedule.shape, events, *recorder_, group, origin, &program);
    return result;
  }

  /// Returns whether the run was interrupted on any rank, equal on all ranks. Collective.
  bool stop_asked() { return all_reduce(interrupted.load(), plait::reduce_op::max) != 0; }

  const setup& s_;
  Device& device_;
  std::shared_ptr<plait::recorder> recorder_;  ///< records communication if a step is traced
  plait::pipeline_world world_;
  plait::context<Device> ctx_;
  model_type model_;
  optimizer_type optimizer_;
  saved_states<model_type, optimizer_type, Device> states_;
  rank_batches<Device> batches_;
  request_exchange<Device> exchange_;
  plait::communication_clock since_;     ///< counts from the norm of the step before
  std::vector<plait::axis_times> mine_;  ///< this rank's times up to the last norm
  bool with_communication_ = false;
  std::optional<step_type> step_;  ///< made for the first step
  std::optional<repeated_step<step_type, Device>> repeated_;
  std::vector<plait::step_event> seen_;  ///< of the traced step
  std::optional<double> judged_;         ///< the held-out loss after the last step, once it is known
};

template <class Precision, plait::strategy Strategy, plait::compute_device Device>
std::unique_ptr<model_run> make_llama_run(const setup& s, Device& device, plait::any_communicator ranks) {
  return in_order<Precision, Strategy, Device>(s, [&]<class Placed>() -> std::unique_ptr<model_run> {
    return std::make_unique<llama_run<Precision, Placed, Device>>(s, device, std::move(ranks));
  });
}
