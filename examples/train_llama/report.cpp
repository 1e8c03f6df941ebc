#include "report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../size_text.hpp"
#include "checkpoint_files.hpp"
#include "keeper.hpp"
#include "plait/core/median.hpp"
#include "plait/data/text.hpp"
#include "plait/models/hugging_face_directory.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/nn/strategies.hpp"
#include "plait/observe/json_log.hpp"
#include "plait/observe/loss_curve.hpp"
#include "plait/observe/pipeline_svg.hpp"
#include "plait/observe/progress.hpp"
#include "plait/observe/step_timeline.hpp"
#include "plait/schedule/verify.hpp"
#include "planned.hpp"
#include "resumed.hpp"
#include "say.hpp"
#include "signals.hpp"
#include "utilisation.hpp"

namespace {

using clock_type = std::chrono::steady_clock;

double seconds(clock_type::time_point a, clock_type::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

std::string counted(std::int64_t n, const char* what, const char* plural = "s") {
  return fmt::format("{} {}{}", n, what, n == 1 ? "" : plural);
}

/// "dp=2, tp=4": the extents as given, and how many ranks hold each key-value head where tp outnumbers them.
std::string mesh_text(const plait::mesh_shape& shape) {
  const std::int64_t tp = shape.extent(plait::axis_of<plait::tp>), copies = shape.extent(plait::axis_of<plait::tp_rep>);
  std::string text = fmt::format("dp={}", shape.extent(plait::axis_of<plait::dp>));
  for (plait::axis_id axis : {plait::axis_of<plait::pp>, plait::axis_of<plait::cp>})
    if (shape.extent(axis) > 1) text += fmt::format(", {}={}", axis.text(), shape.extent(axis));
  text += fmt::format(", tp={}", tp * copies);
  if (copies > 1) text += fmt::format(", each key-value head on {} ranks", copies);
  return text;
}

/// What one rank of a group sends of what all of them do. A message is counted by its sender alone.
std::uint64_t per_rank(const plait::mesh_shape& shape, const std::string& label, plait::collective kind,
                       std::uint64_t wire) {
  if (kind == plait::collective::send) return wire;
  std::int64_t ranks = label == "pp ends" ? 2 : 1;
  for (plait::axis_id axis : shape.axes)
    if (fmt::format("+{}+", label).find(fmt::format("+{}+", axis.text())) != std::string::npos)
      ranks *= shape.extent(axis);
  return wire / static_cast<std::uint64_t>(ranks);
}
std::uint64_t per_rank(const plait::mesh_shape& shape, const plait::ledger::row& row, std::uint64_t steps = 1) {
  std::uint64_t sum = 0;
  for (int k = 0; k < plait::collective_kinds; ++k)
    sum += per_rank(shape, row.label, static_cast<plait::collective>(k),
                    row.kinds[static_cast<std::size_t>(k)].wire / steps);
  return sum;
}

/// "pipeline: zb_v, stages of 3, 3, 3, 2 layers".
std::string pipeline_text(const setup& s, const std::vector<plait::stage_layers>& stages) {
  std::string sizes;
  for (const plait::stage_layers& part : stages) sizes += (sizes.empty() ? "" : ", ") + std::to_string(part.size());
  return fmt::format("pipeline: {}, stages of {} layers", s.schedule.name.view(), sizes);
}

/// What --plan auto made of the options, as a line.
std::string plan_text(const setup& s) {
  return fmt::format("plan: --mesh {}{} --data-parallel {} --micro-batch {} --recompute {}\n", s.opt.mesh,
                     s.schedule.shape.ranks > 1 ? " --schedule " + s.opt.schedule : "", s.opt.data_parallel,
                     s.opt.micro_batch, s.opt.recompute);
}

/// Where the first weights come from, where that may not be what was meant; a line, or nothing.
std::string weights_text(const setup& s) {
  if (s.weights) return fmt::format("weights: {} tensors of '{}'\n", s.weights->entries.size(), s.opt.init_from);
  if (!s.first_step.empty())
    return fmt::format("weights: those of '{}', with a new optimizer\n{}", s.first_step,
                       s.passed_over.empty() ? "" : fmt::format("newer ones are not whole: {}\n", s.passed_over));
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

/// Writes what the traced step looked like, and prints its bubble beside that of the simulation, in which each action
/// takes the mean of its measured times.
void show(const setup& s, const std::vector<std::vector<plait::step_event>>& ranks) {
  if (!s.opt.trace.empty()) plait::write_chrome_trace(plait::trace_of(ranks), s.opt.trace);
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
      plait::timeline_of(s.schedule, along, fmt::format("measured: step {}", traced_step(s.opt) + 1));
  std::int64_t data_ranks = 1;
  for (const plait::axis_id axis : s.parallel.axes.shard) data_ranks *= s.mesh.extent(axis);
  const plait::costed_step parts = plait::measured_step(s.schedule, s.parallel.parallel, peers,
                                                        static_cast<int>(data_ranks), s.config.tie_embeddings);
  const plait::pipeline_timeline simulated =
      plait::timeline_of(parts.step, parts.costs, "simulated: " + plait::title_of(s.schedule), "ms");
  if (shape.ranks > 1)
    say("bubble of step {}: {:.1f} % measured, {:.1f} % simulated from the mean times of its parts\n",
        traced_step(s.opt) + 1, 100 * measured.idle(), 100 * simulated.idle());
  if (!s.opt.timeline.empty()) plait::write_pipeline_svg({simulated, measured}, s.opt.timeline, "--timeline");
}

/// How many steps are from one line of progress to the next, where there is no terminal.
std::int64_t steps_between_lines(const setup& s) { return std::max<std::int64_t>(1, s.opt.steps / 20); }

/// Whether the ranks bring together what the communication of a step cost: where it is logged or printed.
bool gathers_communication(const setup& s, std::int64_t step) {
  const bool line = step == 0 || step + 1 == s.opt.steps || (step + 1) % steps_between_lines(s) == 0;
  return s.mesh.size() > 1 && (line || !s.opt.log.empty());
}

/// What the ranks have sent in all steps, and whether that is what the types say.
struct traffic {
  plait::json_object bytes;  ///< of a rank, by axis
  std::string text;
  bool as_predicted = true;
};

traffic traffic_of(const setup& s, model_run& run, std::int64_t steps) {
  plait::world& w = run.world();
  const plait::ledger predicted = plan_of_rank(s, run.rank(), run.stages()).traffic;
  traffic out;
  const auto seen = static_cast<std::uint64_t>(run.counted_steps()), all = static_cast<std::uint64_t>(steps);
  for (const auto& row : predicted.rows) w.ledger().of(row.label);  // what was predicted and not sent counts too
  for (const auto& row : w.ledger().rows) {
    const plait::ledger::entry total = w.ledger().total(row.label), expected = predicted.total(row.label);
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

/// The axes for which ranks have waited longest; null where it is not known.
const plait::axis_communication* most_waited(const std::vector<plait::axis_communication>& communication) {
  const plait::axis_communication* most = nullptr;
  for (const plait::axis_communication& c : communication)
    if (!std::isnan(c.waited) && (most == nullptr || c.waited > most->waited)) most = &c;
  return most;
}

/// Rank 0's outputs.
class reporter {
 public:
  /// The run goes on after `resumed` steps of others.
  reporter(const setup& s, model_run& run, std::int64_t resumed) : s_(s), shape_(s.mesh), use_(s, run.device_name()) {
    if (!s.opt.log.empty()) log_.emplace(s.opt.log, "--log", resumed > 0);
    say("{} parameters, {} ({}), {} of {} tokens a step in {}, {}\n", plait::parameter_count(s.config),
        counted(shape_.size(), "rank"), mesh_text(shape_), counted(s.sequences * s.microbatches, "sequence"), s.opt.seq,
        counted(s.microbatches, "microbatch", "es"), s.opt.precision);
    say("{}", weights_text(s));
    say("{}", checkpoint_io_text(s.opt));
    if (s.schedule.shape.ranks > 1) say("{}\n", pipeline_text(s, run.stages()));
    if (s.opt.plan == "auto") say("{}", plan_text(s));
    say("{}", use_.heading());
    if (resumed > 0)
      say("goes on from step {}\n", resumed);
    else if (s.opt.resume == "auto")
      say("--resume auto: nothing is saved in '{}' yet\n", s.opt.checkpoint_dir);
    say_now();
    display_.emplace(
        plait::progress_config{.steps = s.opt.steps, .first_step = resumed, .every = steps_between_lines(s)});
  }

  void step(plait::step_record record, double took) {
    took_.push_back(took);
    record.mfu = use_.of_step(record.tokens_per_second);
    if (log_) log_->step(record);
    if (record.communication.empty()) record.communication = shown_;  // a terminal shows the last one known
    shown_ = record.communication;
    display_->update(record);
    curve_.points.push_back({static_cast<double>(record.step), record.loss});
  }

  void hashes(std::int64_t step, const std::vector<plait::parameter_hash>& all) { log_->hashes(step, all); }

  /// What became of a save; it has its time on a rank, and all ranks' bytes.
  void saved(const keeper::news& news) {
    const plait::finished_save& s = news.save;
    const double bytes = news.bytes;
    plait::json_object line;
    line.add("step", s.step)
        .add("bytes", static_cast<std::uint64_t>(bytes))
        .add("stall", s.stall)
        .add("background", s.background);
    if (news.loss) line.add("held_out_loss", *news.loss).add("best", news.is_best);
    if (!s.failure.empty()) line.add("failure", s.failure);
    if (!s.warning.empty()) line.add("warning", s.warning);
    if (log_) log_->write(plait::json_object().add("save", line));
    display_->finish();  // a line of its own
    if (s.failure.empty())
      say("saved step {}: {} in {:.2f} s ({}/s) behind the training, which it stopped for {:.1f} ms{}\n", s.step,
          size_text(bytes), s.background, size_text(bytes / s.background), 1e3 * s.stall,
          news.loss ? fmt::format("; held-out loss {:.4f}{}", *news.loss, news.is_best ? ", the best so far" : "")
                    : "");
    else
      fmt::print(stderr, "train_llama: step {} is NOT saved: {}\n", s.step, s.failure);
    if (!s.warning.empty()) fmt::print(stderr, "train_llama: saving step {}: {}\n", s.step, s.warning);
    say_now();
  }

  struct ending {
    std::int64_t steps = 0;    ///< in all
    std::int64_t resumed = 0;  ///< of them, in runs before
    std::int64_t skipped = 0;
    double last_loss = 0;
    double seconds = 0;
    bool diverged = false;
    traffic sent{};
    double peak_bytes = 0;
    std::vector<plait::axis_communication> communication{};  ///< of all steps
    std::string longest_wait{};
    std::optional<double> held_out{};
    std::uint64_t hash = 0;
    std::vector<std::vector<plait::step_event>> traced{};  ///< of each rank
  };

  void finish(const ending& e) {
    const bool interrupted_early = e.steps < s_.opt.steps && !e.diverged;
    display_->finish();
    plait::json_object summary;
    summary.add("steps", e.steps).add("loss", e.last_loss).add("parameters", plait::parameter_count(s_.config));
    if (e.resumed > 0) summary.add("resumed_at", e.resumed);
    summary.add("seconds", e.seconds);
    if (e.held_out) summary.add("held_out_loss", *e.held_out);
    summary.add("skipped_steps", e.skipped);
    summary.add("peak_bytes", static_cast<std::int64_t>(e.peak_bytes)).add("bytes_sent", e.sent.bytes);
    summary.add("bytes_as_predicted", e.sent.as_predicted);
    if (!e.communication.empty()) summary.add("communication", plait::communication_object(e.communication));
    summary.add("weights_hash", fmt::format("{:016x}", e.hash)).add("interrupted", interrupted_early);
    use_.add_to(summary);
    if (s_.predicted) summary.add("prediction", prediction_json(*s_.predicted, median_step(), e.peak_bytes));
    if (log_) log_->summary(summary);
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
    say("\npeak memory of a rank: {}\nsent by a rank: {}{}\n{}hash of the weights: {:016x}\n{}",
        size_text(e.peak_bytes), e.sent.text.empty() ? "nothing" : e.sent.text,
        e.sent.as_predicted ? ", as predicted from the types" : ", NOT as predicted from the types",
        communication_text(e), e.hash, use_.ending());
    if (s_.predicted && !took_.empty()) say("{}", beside_measured(*s_.predicted, median_step(), e.peak_bytes));
    if (!s_.opt.plot.empty()) draw();
    if (!e.traced.empty() && e.steps > traced_step(s_.opt))
      show(s_, e.traced);
    else if (!e.traced.empty())
      say("nothing is traced: the run ended before step {}\n", traced_step(s_.opt) + 1);
    say_now();
  }

 private:
  /// How much of the communication was hidden, over which axes the ranks waited longest, and what did.
  static std::string communication_text(const ending& e) {
    const plait::axis_communication* most = most_waited(e.communication);
    if (most == nullptr || e.steps == e.resumed) return {};
    return fmt::format("communication: {}; waited longest over {}, {:.2g} ms a step{}{}\n",
                       plait::format_hidden(e.communication), most->axes,
                       1e3 * most->waited / static_cast<double>(e.steps - e.resumed),
                       e.longest_wait.empty() ? "" : "; ", e.longest_wait);
  }
  /// Seconds of the median step; 0 where there was none.
  double median_step() const { return took_.empty() ? 0 : plait::median(took_); }

  void draw() {
    plait::curve_chart chart;
    chart.title =
        fmt::format("{} on {}", s_.begins_from_weights() ? s_.opt.init_from : s_.opt.model, mesh_text(shape_));
    chart.series.push_back(std::move(curve_));
    if (s_.entropy > 0) chart.reference = plait::curve_reference{"unigram entropy", s_.entropy};
    plait::write_curve(chart, s_.opt.plot, "--plot");
  }

  const setup& s_;
  plait::mesh_shape shape_;
  utilisation use_;
  std::optional<plait::json_log> log_;
  std::optional<plait::progress> display_;
  std::vector<plait::axis_communication> shown_;
  std::vector<double> took_;  ///< seconds of each step
  plait::curve_series curve_{"training", {}};
};

}  // namespace

std::string train(const setup& s, model_run& run) {
  plait::world& w = run.world();
  std::int64_t resumed = 0;
  try {
    resumed = run.resume();
  } catch (const plait::error_of_all& e) {
    return e.what();
  }
  if (resumed > s.opt.steps)
    return fmt::format("--steps is {}, and {} are behind what --resume {} names; ask for more steps", s.opt.steps,
                       resumed, s.opt.resume);
  if (resumed < s.opt.steps && !s.data)
    return fmt::format("--data is missing: {} of --steps {} are done; name a text file, or token files (.bin)", resumed,
                       s.opt.steps);
  std::optional<reporter> report;
  if (run.rank() == 0) report.emplace(s, run, resumed);

  const auto begin = clock_type::now();
  reporter::ending end{.steps = resumed, .resumed = resumed, .last_loss = std::numeric_limits<double>::quiet_NaN()};
  std::string problem;
  plait::communication_clock whole(w.ledger());
  keeper saves(s, run, [&](const keeper::news& news) {
    if (report) report->saved(news);
  });
  std::int64_t hashed = -1;
  const auto hash = [&] {  // with --log-hashes; collective
    if (std::exchange(hashed, end.steps) == end.steps) return;
    const auto all = run.hashes(s.opt.log_gradient_hashes && end.steps > end.resumed);
    if (report) report->hashes(end.steps, all);
  };
  if (s.opt.log_hashes > 0) hash();
  bool stops = run.all_reduce(interrupted.load(), plait::reduce_op::max) != 0;  // steps ask within them
  for (std::int64_t step = end.resumed; step < s.opt.steps && !stops; ++step) {
    const auto start = clock_type::now();
    const double waited = w.ledger().total().seconds;
    const plait::step_result r = run.step(step, gathers_communication(s, step));
    stops = run.asked().stop != 0;
    const double stepped = seconds(start, clock_type::now());
    // On a GPU the host waits for the whole step, not for its communication.
    const double share = s.opt.device == "cpu" ? (w.ledger().total().seconds - waited) / stepped
                                               : std::numeric_limits<double>::quiet_NaN();
    end.steps = step + 1;
    end.last_loss = r.loss;
    if (report)
      report->step({end.steps, r.loss, r.gradient_norm, s.rate.at(step), static_cast<double>(r.tokens) / stepped, share,
                    0, r.skipped, run.communication()},
                   stepped);
    end.skipped += r.skipped;
    if (s.opt.log_hashes > 0 && end.steps % s.opt.log_hashes == 0) hash();
    if (r.skipped && s.opt.on_nonfinite == "stop") {  // as all ranks see it; the weights are as they were
      problem = fmt::format(
          "step {} has the loss {:g} and the gradient norm {:g}; try a smaller --lr (now {}) or {} (now {})", end.steps,
          r.loss, r.gradient_norm, s.opt.lr, s.opt.clip > 0 ? "--clip" : "a limit of the norm by --clip", s.opt.clip);
      break;
    }
    saves.after(end.steps, run.asked());
  }
  if (s.opt.log_hashes > 0) hash();  // the last, however it came
  end.seconds = seconds(begin, clock_type::now());
  end.diverged = !problem.empty();
  saves.finish(end.steps, !end.diverged && (end.steps > 0 || s.begins_from_weights()));
  if (s.mesh.size() > 1) end.communication = run.of_ranks(whole.since());
  if (const plait::axis_communication* most = most_waited(end.communication))
    end.longest_wait = run.longest_wait(most->axes);
  end.sent = traffic_of(s, run, end.steps - end.resumed);
  end.peak_bytes = run.all_reduce(static_cast<double>(run.peak_bytes()), plait::reduce_op::max);
  if (problem.empty() && s.data && s.data->held_out_samples() >= s.sequences) end.held_out = run.evaluate();
  end.hash = run.weights_hash();
  end.traced = run.traced();
  if (report) report->finish(end);
  if (s.opt.sample > 0 && end.steps == s.opt.steps && problem.empty()) {
    const std::vector<std::int64_t> text = run.sample();
    if (report) say("\nsampled text:\n{}\n", plait::decode_bytes(text));
  }
  if (!s.opt.export_hf.empty() && end.steps == s.opt.steps && problem.empty()) {
    run.write_model();
    if (report) say("the model is in '{}'\n", s.opt.export_hf);
  } else if (!s.opt.export_hf.empty() && report) {
    say("nothing is written to --export-hf {}: {} of {} steps were done\n", s.opt.export_hf, end.steps, s.opt.steps);
  }
  if (problem.empty() && !saves.failure().empty()) problem = "the last state is not saved: " + saves.failure();
  return problem;
}

/// What is cut over which axes, as a line; empty where there is one data rank.
std::string data_parallel_text(const setup& s) {
  const auto over = [&](const plait::axis_list& axes) {
    std::string names;
    for (const plait::axis_id axis : axes)
      if (s.mesh.extent(axis) > 1)
        names += fmt::format("{}{}={}", names.empty() ? "" : ",", axis.text(), s.mesh.extent(axis));
    return names;
  };
  const plait::pipeline_options& how = s.parallel;
  const std::string cut = over(how.axes.shard), copied = over(how.axes.replicate);
  if (cut.empty() && copied.empty()) return {};
  const bool replicated = how.parallel.level == plait::zero_level::replicated;
  std::string text = fmt::format("data parallel: {} over {}", s.opt.data_parallel,
                                 replicated || copied.empty() ? cut : cut + ", equal over " + copied);
  if (how.parallel.level == plait::zero_level::parameters)
    text += fmt::format(", gathered {} ahead{}", counted(how.parallel.prefetch, "use"),
                        how.parallel.reshard_after_forward ? "" : ", kept from forward to backward pass");
  return text + (how.parallel.overlap ? "" : ", reduced after the last pass") + "\n";
}

/// Into how many pieces linears cut what they send, as a line; empty where they cut nothing.
std::string tensor_overlap_text(const options& opt) {
  if (opt.tensor_overlap == 1) return {};
  return fmt::format("tensor parallel: linears gather and reduce in {} chunks, beside their products\n",
                     opt.tensor_overlap);
}

/// What layers recompute, as a line; empty where it is nothing.
std::string recompute_text(const setup& s) {
  std::int64_t full = 0, selective = 0;
  for (std::int64_t i = 0; i < s.config.layers; ++i) {
    full += s.recompute.of_layer(i) == plait::recompute::full;
    selective += s.recompute.of_layer(i) == plait::recompute::selective;
  }
  const bool head = s.recompute.of_head() != plait::recompute::none;
  if (full + selective == 0 && !head) return {};
  return fmt::format("recompute: of {}, {} in full and {} selectively{}\n", counted(s.config.layers, "layer"), full,
                     selective, head ? ", and the head selectively" : "");
}

void print_plan(const setup& s, const run_plan& plan) {
  const std::string saved = planned_state_text(s, plan);  // what does not fit is said before all else
  if (s.opt.plan == "auto") say("{}", plan_text(s));
  say("model: {} parameters\nmesh: {}, {}\n{}{}step: {} of {} of {} tokens, {}\n{}\n", plait::parameter_count(s.config),
      counted(s.mesh.size(), "rank"), mesh_text(s.mesh), data_parallel_text(s),
      tensor_overlap_text(s.opt) + recompute_text(s), counted(s.microbatches, "microbatch", "es"),
      counted(s.sequences, "sequence"), s.opt.seq, s.opt.precision, utilisation(s, "").operations());
  if (s.schedule.shape.ranks > 1) {
    const plait::simulation times =
        plait::simulate(s.schedule, plait::schedule_costs_of(plait::llama_part_flops(s.config, s.opt.seq), s.stages));
    say("{}; idle {:.1f} % by counted operations; at most {:g} microbatches kept in a rank's layers\n\n",
        pipeline_text(s, s.stages), 100 * times.makespan_idle(), plait::peak_activations(s.schedule));
  }
  say("activations\n");
  for (const run_plan::activation& a : plan.activations)
    say("  {:10} {}  ({} a rank)\n", a.name, a.layout, size_text(a.bytes));
  say("\nparameters (as layers of the same kind share a layout, those of layer 0 stand for all)\n");
  for (const run_plan::parameter& p : plan.parameters) {
    if (p.name.find("layers.") != std::string::npos && p.name.find("layers.0.") == std::string::npos) continue;
    say("  {:46} stored {}{}\n", p.name, p.stored, p.used.empty() ? "" : ", used " + p.used);
  }
  say("\ncollectives of a step, for one rank\n");
  if (plan.traffic.rows.empty()) say("  none\n");
  plait::json_object sent;
  for (const auto& row : plan.traffic.rows) {
    sent.add(row.label, per_rank(s.mesh, row));
    for (int k = 0; k < plait::collective_kinds; ++k) {
      const auto& e = row.kinds[static_cast<std::size_t>(k)];
      if (e.calls == 0) continue;
      say("  {:12} {:14} {:6} call{} {:>9} handed in, {:>9} sent\n", row.label,
          plait::name_of(static_cast<plait::collective>(k)), e.calls, e.calls == 1 ? ", " : "s,",
          size_text(static_cast<double>(e.payload)),
          size_text(static_cast<double>(per_rank(s.mesh, row.label, static_cast<plait::collective>(k), e.wire))));
    }
  }
  say("  bytes sent in a step, by axis: {}\n", sent.text());
  if (const std::string order = order_text(s); !order.empty()) say("  {}", order);
  say("\nmemory of a rank\n");
  const auto row = [](const char* what, double bytes) { say("  {:12} {:>12}\n", what, size_text(bytes)); };
  row("weights", plan.weights);
  row("gradients", plan.gradients);
  row("optimizer", plan.optimizer);
  row("activations", plan.kept);
  row("in all", plan.bytes());
  if (plan.on_host > 0) row("on the host", plan.on_host);
  if (plan.saved > 0)
    say("  {:12} {:>12}, of the host: two copies of the {} that the rank writes of a step to --checkpoint-dir\n",
        "staging", size_text(2 * plan.saved), size_text(plan.saved));
  if (s.predicted) say("\n{}", prediction_text(*s.predicted));
  if (!saved.empty()) say("\n{}", saved);
}
