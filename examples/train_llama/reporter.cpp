#include "reporter.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <system_error>
#include <utility>

#include "../median.hpp"
#include "../number_text.hpp"
#include "machine.hpp"
#include "plait/device/cpu.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/io/mapped_file.hpp"
#include "plait/models/hugging_face_directory.hpp"
#include "plait/nn/strategy.hpp"
#include "plan.hpp"
#include "train_llama/observe/pictures.hpp"
#include "train_llama/observe/step_events.hpp"

std::string mesh_text(const plait::mesh_shape& shape) {
  const std::int64_t tp = shape.extent(plait::axis_of<plait::tp>), copies = shape.extent(plait::axis_of<plait::tp_rep>);
  std::string text = fmt::format("dp={}", shape.extent(plait::axis_of<plait::dp>));
  for (plait::axis_id axis : {plait::axis_of<plait::pp>, plait::axis_of<plait::ep>, plait::axis_of<plait::cp>})
    if (shape.extent(axis) > 1) text += fmt::format(", {}={}", axis.text(), shape.extent(axis));
  text += fmt::format(", tp={}", tp * copies);
  if (copies > 1) text += fmt::format(", each key-value head on {} ranks", copies);
  return text;
}

std::string pipeline_text(const setup& s, const std::vector<plait::stage_layers>& stages) {
  std::string sizes;
  for (const plait::stage_layers& part : stages) sizes += (sizes.empty() ? "" : ", ") + std::to_string(part.size());
  return fmt::format("pipeline: {}, stages of {} layers", s.schedule.name.view(), sizes);
}

std::string adapters_text(const setup& s) {
  if (s.opt.lora == 0) return {};
  std::int64_t trained = 0;
  for (const run_plan& plan : *s.plans) trained += plan.trained;
  return fmt::format("adapters: rank {}, alpha {}, {} parameters; only these are trained\n", s.opt.lora,
                     s.opt.lora_alpha, trained);
}

std::string recompute_text(const setup& s) {
  std::int64_t full = 0, selective = 0;
  for (std::int64_t i = 0; i < s.config.layers; ++i) {
    full += s.recompute.of_layer(i) == plait::recompute::full;
    selective += s.recompute.of_layer(i) == plait::recompute::selective;
  }
  const bool head = s.recompute.of_head() != plait::recompute::none;
  if (full + selective == 0 && !head)
    return s.opt.recompute.starts_with("budget:")
               ? fmt::format("recompute: nothing, because --recompute {} has room for all\n", s.opt.recompute)
               : "";
  return fmt::format("recompute: of {}, {} in full and {} selectively{}\n", counted(s.config.layers, "layer"), full,
                     selective, head ? ", and the head selectively" : "");
}

std::string plan_text(const setup& s) {
  return fmt::format("plan: --mesh {}{} --data-parallel {}{} --micro-batch {} --recompute {}{}\n", s.opt.mesh,
                     s.schedule.shape.ranks > 1 ? " --schedule " + s.opt.schedule : "", s.opt.data_parallel,
                     s.opt.replicate_over != "none" ? " --replicate-over " + s.opt.replicate_over : "",
                     s.opt.micro_batch, s.opt.recompute, s.opt.offload != "none" ? " --offload " + s.opt.offload : "");
}

std::uint64_t per_rank(const plait::mesh_shape& shape, const std::string& label, plait::collective kind,
                       std::uint64_t wire) {
  if (kind == plait::collective::send) return wire;
  std::int64_t ranks = label == "pp ends" ? 2 : 1;
  for (plait::axis_id axis : shape.axes)
    if (fmt::format("+{}+", label).find(fmt::format("+{}+", axis.text())) != std::string::npos)
      ranks *= shape.extent(axis);
  return wire / static_cast<std::uint64_t>(ranks);
}
std::uint64_t per_rank(const plait::mesh_shape& shape, const plait::ledger::row& row, std::uint64_t steps) {
  std::uint64_t sum = 0;
  for (int k = 0; k < plait::collective_kinds; ++k)
    sum += per_rank(shape, row.label, static_cast<plait::collective>(k),
                    row.kinds[static_cast<std::size_t>(k)].wire / steps);
  return sum;
}

traffic traffic_of(const setup& s, model_run& run, std::int64_t steps) {
  plait::world& w = run.world();
  const plait::ledger predicted = plan_of_rank(s, run.rank, run.stages).traffic;
  traffic out;
  const auto seen = static_cast<std::uint64_t>(run.counted_steps), all = static_cast<std::uint64_t>(steps);
  for (const auto& row : predicted.rows) w.ledger().of(row.label);  // predicted rows that were not sent count as 0
  // The number of rows that experts get depends on the tokens. Types determine only the number of exchanges.
  const auto total_of = [&](const plait::ledger& l, const std::string& label) {
    plait::ledger::entry total = l.total(label);
    for (const auto& row : l.rows)
      if (s.opt.mixture && row.label == label)
        total.wire -= row.kinds[static_cast<std::size_t>(plait::collective::all_to_all)].wire;
    return total;
  };
  for (const auto& row : w.ledger().rows) {
    const plait::ledger::entry total = total_of(w.ledger(), row.label), expected = total_of(predicted, row.label);
    out.as_predicted = out.as_predicted && total.wire == expected.wire * seen && total.calls == expected.calls * seen;
    if (total.calls == 0) continue;
    const std::uint64_t bytes = per_rank(s.mesh, row, seen) * all;
    out.bytes.add(row.label, bytes);
    out.text +=
        fmt::format("{}{} over {}", out.text.empty() ? "" : ", ", size_text(static_cast<double>(bytes)), row.label);
  }
  out.as_predicted = run.all_reduce(out.as_predicted ? 1 : 0, plait::reduce_op::min) > 0;
  return out;
}

const plait::axis_communication* most_waited(const std::vector<plait::axis_communication>& communication) {
  const plait::axis_communication* most = nullptr;
  for (const plait::axis_communication& c : communication)
    if (!std::isnan(c.waited) && (most == nullptr || c.waited > most->waited)) most = &c;
  return most;
}

namespace {

plait::product_kind kind_of(const options& opt) {
  return in_bf16(opt) ? plait::product_kind::bf16 : opt.tf32 ? plait::product_kind::tf32 : plait::product_kind::f32;
}

}  // namespace

utilisation::utilisation(const setup& s, std::string device)
    : s_(s), device_(std::move(device)), flops_(plait::flops_per_token(s.config, s.opt.seq)) {
  peak_ = s.opt.peak_tflops > 0 ? s.opt.peak_tflops : plait::known_peak_tflops(device_, kind_of(s.opt));
}

std::string utilisation::operations() const {
  if (s_.opt.device == "cpu" && peak_ == 0) return {};
  return fmt::format("operations: {:.4g} GFLOP a token, {:.4g} with the causal half of attention alone\n",
                     flops_.total() / 1e9, flops_.causal() / 1e9);
}

std::string utilisation::heading() const {
  std::string text;
  if (s_.opt.device == "cuda")
    text = fmt::format("on {}{}, attention: {}, {}\n", s_.devices > 1 ? fmt::format("{} x ", s_.devices) : "", device_,
                       !s_.cudnn && in_bf16(s_.opt) && s_.opt.attention_kernel == "auto"
                           ? "plait's (this program was built without cuDNN, whose attention is faster)"
                       : !s_.cudnn                          ? "plait's"
                       : s_.opt.attention_kernel == "cudnn" ? "cuDNN's"
                                                            : "cuDNN's where it can be",
                       s_.as_graph ? "each step replayed as a graph" : "no graph");
  else if (in_bf16(s_.opt) && !plait::cpu::supports_bf16())
    text =
        "this processor has no instructions for bf16 (avx512_bf16): its products are of floats, and float is faster\n";
  text += operations();
  if (peak_ > 0)
    text += fmt::format(
        "peak: {:g} TFLOP/s, {}\n", peak_,
        s_.opt.peak_tflops > 0 ? "as --peak-tflops says" : fmt::format("dense {}", plait::name_of(kind_of(s_.opt))));
  else if (s_.opt.device == "cuda")
    text += fmt::format("peak: not known for {} of '{}'; give --peak-tflops to see the utilisation (MFU)\n",
                        plait::name_of(kind_of(s_.opt)), device_);
  return text;
}

double utilisation::of_step(double tokens_per_second) {
  const double mfu =
      plait::model_flops_utilisation(tokens_per_second, flops_.total(), peak_, static_cast<double>(s_.devices));
  if (mfu > 0) steps_.push_back(mfu);
  return mfu;
}

double utilisation::median() const { return plait::median(steps_); }

std::string utilisation::ending() const {
  if (steps_.empty()) return {};
  return fmt::format("MFU of the median step: {:.1f}% ({:.1f}% with the causal half of attention)\n", 100 * median(),
                     100 * median() * causal());
}

void utilisation::add_to(plait::json_object& summary) const {
  if (peak_ == 0) return;
  summary.add("peak_tflops", peak_).add("devices", s_.devices).add("flops_per_token", flops_.total());
  if (!steps_.empty()) summary.add("mfu", median()).add("mfu_causal", median() * causal());
}

namespace {

/// Returns a line on the source of the initial weights, if it may not be the intended one; otherwise nothing.
std::string weights_text(const setup& s) {
  if (s.weights)
    return fmt::format("weights: {} tensors of '{}'{}\n", s.weights->entries.size(), s.opt.init_from,
                       s.weights->untied ? ", whose head differs from its embedding, though config.json ties them: "
                                           "both are trained"
                                         : "");
  if (!s.first_step.empty())
    return fmt::format("weights: those of '{}', with a new optimizer\n{}", s.first_step,
                       s.invalid_steps.empty() ? "" : fmt::format("newer ones are not whole: {}\n", s.invalid_steps));
  const auto folder = std::filesystem::path(s.opt.model).parent_path();
  std::error_code ignored;
  for (const char* name : {plait::safetensors_file_name, plait::safetensors_index_name})
    if (s.opt.model.ends_with(".json") && std::filesystem::exists(folder / name, ignored))
      return fmt::format(
          "weights: random ones (--seed {}), not those of '{}' beside --model, which --init-from {} would "
          "load\n",
          s.opt.seed, name, folder.empty() ? "." : folder.string());
  return {};
}

/// Returns two timelines of the traced step: simulated, with the mean of its measured times for each action, and
/// measured.
std::vector<plait::pipeline_timeline> timelines_of(const setup& s, std::int64_t step,
                                                   const std::vector<std::vector<plait::step_event>>& ranks) {
  const plait::pipeline_shape& shape = s.schedule.shape;
  std::vector<std::vector<plait::step_event>> along;  // the pipeline of rank 0
  std::vector<std::vector<std::vector<plait::step_event>>> peers(static_cast<std::size_t>(shape.ranks));
  const plait::axis_list pipeline(plait::axis_of<plait::pp>);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const auto rank = static_cast<std::int64_t>(r);
    if (s.mesh.group_of(rank, pipeline) == 0) along.push_back(ranks[r]);
    peers[static_cast<std::size_t>(s.mesh.coordinate(rank, plait::axis_of<plait::pp>))].push_back(ranks[r]);
  }
  const plait::pipeline_timeline measured =
      plait::timeline_of(s.schedule, along, fmt::format("measured: step {}", step + 1));
  std::int64_t data_ranks = 1;
  for (const plait::axis_id axis : s.parallel.axes.shard) data_ranks *= s.mesh.extent(axis);
  const plait::costed_step parts = plait::measured_step(s.schedule, s.parallel.parallel, peers,
                                                        static_cast<int>(data_ranks), s.config.tie_embeddings);
  return {plait::timeline_of(parts.step, parts.costs, "simulated: " + plait::title_of(s.schedule), "ms"), measured};
}

/// Returns the planned bytes, by part, of the rank that needs most.
plait::json_object memory_object(const setup& s) {
  const run_plan& plan = fullest_plan(s);
  plait::json_object parts;
  parts.add("weights", plan.weights).add("gradients", plan.gradients).add("optimizer", plan.optimizer);
  parts.add("activations", plan.kept);
  if (plan.attention > 0) parts.add("attention", plan.attention);
  return parts;
}

plait::json_object options_object(const options& opt) {
  plait::json_object all;
  for (const auto& [name, value] : opt.by_name) all.add(name, plait::is_utf8(value) ? value : "not UTF-8");
  return all;
}

/// Returns a line with the hidden share of communication, the axes over which ranks waited longest, and the part that
/// waited.
std::string communication_text(const reporter::ending& e) {
  const plait::axis_communication* most = most_waited(e.communication);
  if (most == nullptr || e.steps == e.resumed) return {};
  return fmt::format("communication: {}; waited longest over {}, {:.2g} ms a step{}{}\n",
                     plait::format_hidden(e.communication), most->axes,
                     1e3 * most->waited / static_cast<double>(e.steps - e.resumed), e.longest_wait.empty() ? "" : "; ",
                     e.longest_wait);
}

}  // namespace

std::int64_t steps_between_lines(const setup& s) { return std::max<std::int64_t>(1, s.opt.steps / 20); }

reporter::reporter(const setup& s, model_run& run, std::int64_t resumed)
    : s_(s), shape_(s.mesh), use_(s, run.device_name) {
  if (!s.opt.log.empty()) log_.emplace(s.opt.log, "--log", resumed > 0);
  if (log_ && !log_->kept().empty()) say("the log of an earlier run is '{}' now\n", log_->kept());
  say("{} parameters{}, {} ({}), {} of {} tokens a step in {}, {}\n", plait::parameter_count(s.config),
      s.opt.mixture ? fmt::format(", of which a token uses {}", plait::active_parameter_count(s.config)) : "",
      counted(shape_.size(), "rank"), mesh_text(shape_), counted(s.sequences * s.microbatches, "sequence"), s.opt.seq,
      counted(s.microbatches, "microbatch", "es"), precision_text(s.opt));
  say("{}{}", weights_text(s), adapters_text(s));
  say("{}", checkpoint_io_text(s.opt));
  if (s.schedule.shape.ranks > 1) say("{}\n", pipeline_text(s, run.stages));
  say("{}", recompute_text(s));
  if (s.opt.plan == "auto") say("{}", plan_text(s));
  say("{}", use_.heading());
  if (resumed > 0)
    say("continues from step {}\n", resumed);
  else if (s.opt.resume == "auto")
    say("--resume auto: nothing is saved in '{}' yet\n", s.opt.checkpoint_dir);
  say_now();
  display_.emplace(
      plait::progress_config{.steps = s.opt.steps, .first_step = resumed, .every = steps_between_lines(s)});
  if (resumed > 0 && !s.opt.plot.empty()) begin_curves(resumed);
}

/// Reads the losses of earlier steps, if the log that this run continues has them.
void reporter::begin_curves(std::int64_t resumed) {
  std::error_code ignored;
  const std::string& log = s_.opt.log;
  if (!std::filesystem::is_regular_file(log, ignored) || std::filesystem::file_size(log, ignored) == 0) return;
  try {
    const std::string text = plait::read_file(log, "--log", std::numeric_limits<std::size_t>::max());
    curves_ = plait::loss_curves(plait::read_run_log(text, fmt::format("--log: '{}'", log)), resumed);
  } catch (const plait::error& e) {  // the run continues without earlier losses
    fmt::print(stderr, "train_llama: --plot begins after step {}: {}\n", resumed, e.what());
  }
}

template <class F>
bool reporter::written(F&& write) {
  try {
    write();
    return true;
  } catch (const plait::error& e) {
    if (display_) display_->finish();  // ends the progress line
    say_now();
    fmt::print(stderr, "train_llama: {}; the run continues without it\n", e.what());
    if (failure_.empty()) failure_ = e.what();
    return false;
  }
}

template <class F>
void reporter::logged(F&& add) {
  if (log_ && !written([&] { add(*log_); })) log_.reset();
}

void reporter::hashes(std::int64_t step, const std::vector<plait::parameter_hash>& all) {
  logged([&](plait::json_log& log) { log.hashes(step, all); });
}

void reporter::evaluated(std::int64_t step, double loss) {
  add_held_out(step, loss);
  logged([&](plait::json_log& log) {
    log.write(
        plait::json_object().add("evaluation", plait::json_object().add("step", step).add("held_out_loss", loss)));
  });
  display_->finish();  // ends the progress line
  say("step {}: held-out loss {:.4f}\n", step, loss);
  say_now();
}

void reporter::step(plait::step_record record, double took) {
  took_.push_back(took);
  record.mfu = use_.of_step(record.tokens_per_second);
  logged([&](plait::json_log& log) { log.step(record); });
  if (record.communication.empty()) record.communication = shown_;  // shows the last known value
  shown_ = record.communication;
  display_->update(record);
  curves_[0].points.push_back({static_cast<double>(record.step), record.loss});
}

void reporter::add_held_out(std::int64_t step, double loss) {
  std::vector<plait::curve_point>& points = curves_[1].points;
  const auto at = static_cast<double>(step);
  if (points.empty() || points.back().x < at) points.push_back({at, loss});  // a step is drawn once
}

void reporter::saved(const checkpointer::saved_step& result) {
  const plait::finished_save& s = result.save;
  const double bytes = result.bytes;
  plait::json_object line;
  line.add("step", s.step)
      .add("bytes", static_cast<std::uint64_t>(bytes))
      .add("stall", s.stall)
      .add("background", s.background);
  if (result.loss) add_held_out(s.step, *result.loss);
  if (result.loss) line.add("held_out_loss", *result.loss).add("best", result.is_best);
  if (!s.failure.empty()) line.add("failure", s.failure);
  if (!s.warning.empty()) line.add("warning", s.warning);
  logged([&](plait::json_log& log) { log.write(plait::json_object().add("save", line)); });
  display_->finish();  // ends the progress line
  if (s.failure.empty())
    say("saved step {}: {} in {:.2f} s ({}/s) during training, which it stopped for {:.1f} ms{}\n", s.step,
        size_text(bytes), s.background, size_text(bytes / s.background), 1e3 * s.stall,
        result.loss ? fmt::format("; held-out loss {:.4f}{}", *result.loss, result.is_best ? ", the best so far" : "")
                    : "");
  else
    fmt::print(stderr, "train_llama: step {} is NOT saved: {}\n", s.step, s.failure);
  if (!s.warning.empty()) fmt::print(stderr, "train_llama: saving step {}: {}\n", s.step, s.warning);
  say_now();
}

void reporter::finish(const ending& e) {
  const bool interrupted_early = e.steps < s_.opt.steps && !e.diverged;
  display_->finish();
  plait::json_object summary;
  summary.add("steps", e.steps).add("loss", e.last_loss).add("parameters", plait::parameter_count(s_.config));
  if (e.resumed > 0) summary.add("resumed_at", e.resumed);
  summary.add("seconds", e.seconds);
  if (e.held_out) summary.add("held_out_loss", *e.held_out);
  if (e.held_out) add_held_out(e.steps, *e.held_out);
  summary.add("skipped_steps", e.skipped);
  summary.add("peak_bytes", static_cast<std::int64_t>(e.peak_bytes)).add("bytes_sent", e.sent.bytes);
  summary.add("bytes_as_predicted", e.sent.as_predicted);
  if (!e.communication.empty()) summary.add("communication", plait::communication_object(e.communication));
  summary.add("weights_hash", fmt::format("{:016x}", e.hash)).add("interrupted", interrupted_early);
  use_.add_to(summary);
  if (s_.predicted) summary.add("prediction", prediction_json(*s_.predicted, median_step(), e.peak_bytes));
  const std::int64_t step = traced_step(s_.opt, e.resumed);
  std::vector<plait::pipeline_timeline> timelines;
  if (e.steps > step && std::any_of(e.traced.begin(), e.traced.end(), [](const auto& rank) { return !rank.empty(); }))
    timelines = timelines_of(s_, step, e.traced);
  if (log_) summary.add("options", options_object(s_.opt)).add("memory", memory_object(s_));
  const std::string timeline = timelines.empty() ? "" : plait::pipeline_svg(timelines);
  if (!timeline.empty()) summary.add("timeline", timeline);
  logged([&](plait::json_log& log) { log.summary(summary); });
  say("{}{} in {}",
      e.diverged          ? "diverged: "
      : interrupted_early ? "interrupted: "
                          : "",
      counted(e.steps - e.resumed, "step"),
      e.seconds < 60 ? fmt::format("{:.1f} s", e.seconds) : plait::format_duration(e.seconds));
  if (e.steps > e.resumed) say(", last loss {:.4f}", e.last_loss);
  if (e.skipped > 0) say(", {} skipped", counted(e.skipped, "step"));
  if (e.held_out) say(", held-out loss {:.4f}", *e.held_out);
  if (s_.entropy > 0) say("; the data's unigram entropy is {:.4f}", s_.entropy);
  say("\npeak memory of a rank: {}\nsent by a rank: {}{}\n{}hash of the weights: {:016x}\n{}", size_text(e.peak_bytes),
      e.sent.text.empty() ? "nothing" : e.sent.text,
      !e.sent.as_predicted ? ", NOT as predicted from the types"
      : s_.opt.mixture     ? ", as predicted from the types but for the rows of experts"
                           : ", as predicted from the types",
      communication_text(e), e.hash, use_.ending());
  if (s_.predicted && !took_.empty()) say("{}", beside_measured(*s_.predicted, median_step(), e.peak_bytes));
  if (!s_.opt.plot.empty()) written([&] { draw(); });
  if (!s_.opt.report.empty()) written([&] { plait::write_report(s_.opt.log, s_.opt.report, "--log", "--report"); });
  if (timelines.empty() && !e.traced.empty()) say("nothing is traced: the run ended before step {}\n", step + 1);
  if (!timelines.empty()) {
    const auto trace = [&] { return plait::to_chrome_trace(plait::trace_of(e.traced)); };
    if (!s_.opt.trace.empty()) written([&] { plait::write_file_atomically(s_.opt.trace, trace(), "--trace"); });
    if (s_.schedule.shape.ranks > 1)
      say("bubble of step {}: {:.1f} % measured, {:.1f} % simulated from the mean times of its parts\n", step + 1,
          100 * timelines[1].idle(), 100 * timelines[0].idle());
    if (!s_.opt.timeline.empty())
      written([&] { plait::write_file_atomically(s_.opt.timeline, timeline, "--timeline"); });
  }
  say_now();
}

double reporter::median_step() const { return took_.empty() ? 0 : plait::median(took_); }

void reporter::draw() {
  plait::curve_chart chart;
  chart.title = fmt::format("{} on {}", s_.begins_from_weights() ? s_.opt.init_from : s_.opt.model, mesh_text(shape_));
  chart.series = std::move(curves_);
  if (s_.entropy > 0) chart.reference = plait::curve_reference{"unigram entropy", s_.entropy};
  plait::write_file_atomically(s_.opt.plot, plait::curve_svg(chart), "--plot");
}
