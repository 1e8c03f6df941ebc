#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "reporter.hpp"
#include "run.hpp"
#include "train_llama/data/tokens.hpp"

namespace {

using clock_type = std::chrono::steady_clock;

double seconds(clock_type::time_point a, clock_type::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

/// Whether a line of progress is printed for a step, counted from 0.
bool has_line(const setup& s, std::int64_t step) {
  return step == 0 || step + 1 == s.opt.steps || (step + 1) % steps_between_lines(s) == 0;
}

/// Whether ranks exchange the times of a step's communication: they do if it is logged or printed.
bool gathers_communication(const setup& s, std::int64_t step) {
  return s.mesh.size() > 1 && (has_line(s, step) || !s.opt.log.empty());
}

/// Adds the statistics of routers to a record. A model may have thousands of experts, so a log has all only in some
/// steps.
void take_routers(const setup& s, model_run& run, plait::step_record& record) {
  if (!s.opt.mixture || s.opt.log.empty()) return;
  record.routers = run.routers();
  for (const auto& [layer, of] : record.routers)
    record.expert_imbalance = std::max(record.expert_imbalance, of.imbalance());
  if (!has_line(s, record.step - 1)) record.routers.clear();
}

/// Prints the text that the model samples after --prompt.
std::string generate(const setup& s, model_run& run) {
  const std::vector<std::int64_t> text = run.sample();
  if (run.rank == 0) say("{}\n", text_of(s, text));
  return {};
}

/// Prints the loss over the held-out data.
std::string evaluate(const setup& s, model_run& run) {
  const std::optional<double> loss = run.evaluate();
  if (loss && run.rank == 0)
    say("held-out loss {:.4f}, perplexity {:.4g}, of {} sequences of {} tokens\n", *loss, std::exp(*loss),
        s.judged()->held_out_samples(), s.opt.seq);
  return {};
}

}  // namespace

std::string train(const setup& s, model_run& run) {
  if (s.opt.command == "generate") return generate(s, run);
  if (s.opt.command == "evaluate") return evaluate(s, run);
  plait::world& w = run.world();
  std::int64_t resumed = 0;
  try {
    resumed = run.resume();
  } catch (const plait::error_of_all& e) {
    return e.what();
  }
  if (resumed > s.opt.steps)
    return fmt::format("--steps is {}, and {} were done before --resume {}; ask for more steps", s.opt.steps, resumed,
                       s.opt.resume);
  if (resumed < s.opt.steps && !s.data)
    return fmt::format("--data is missing: {} of --steps {} are done; name a text file, or token files (.bin)", resumed,
                       s.opt.steps);
  std::optional<reporter> report;
  if (run.rank == 0) report.emplace(s, run, resumed);

  const auto begin = clock_type::now();
  reporter::ending end{.steps = resumed, .resumed = resumed, .last_loss = std::numeric_limits<double>::quiet_NaN()};
  std::string problem;
  plait::communication_clock whole(w.ledger());
  checkpointer saves(s, run, [&](const checkpointer::saved_step& result) {
    if (report) report->saved(result);
  });
  std::int64_t hashed = -1;
  const auto hash = [&] {  // with --log-hashes; collective
    if (std::exchange(hashed, end.steps) == end.steps) return;
    const auto all = run.hashes(s.opt.log_gradient_hashes && end.steps > end.resumed);
    if (report) report->hashes(end.steps, all);
  };
  if (s.opt.log_hashes > 0) hash();
  bool stops = run.all_reduce(interrupted.load(), plait::reduce_op::max) != 0;  // later, steps exchange it
  for (std::int64_t step = end.resumed; step < s.opt.steps && !stops; ++step) {
    const auto start = clock_type::now();
    const double waited = w.ledger().total().seconds;
    const plait::step_result r = run.step(step, gathers_communication(s, step));
    stops = run.asked.stop != 0;
    const double stepped = seconds(start, clock_type::now());
    // On a GPU the host waits for the whole step, not for its communication.
    const double share = s.opt.device == "cpu" ? (w.ledger().total().seconds - waited) / stepped
                                               : std::numeric_limits<double>::quiet_NaN();
    end.steps = step + 1;
    end.last_loss = r.loss;
    plait::step_record record{
        end.steps, r.loss, r.gradient_norm, s.rate.at(step),   static_cast<double>(r.tokens) / stepped,
        share,     0,      r.skipped,       run.communication, r.auxiliary};
    take_routers(s, run, record);
    if (report) report->step(std::move(record), stepped);
    end.skipped += r.skipped;
    if (s.opt.log_hashes > 0 && end.steps % s.opt.log_hashes == 0) hash();
    if (s.opt.eval_every > 0 && end.steps % s.opt.eval_every == 0 && !r.skipped)
      if (const std::optional<double> loss = run.evaluate(); loss && report) report->evaluated(end.steps, *loss);
    if (r.skipped && s.opt.on_nonfinite == "stop") {  // equal on all ranks; the step has changed no weight
      problem = fmt::format(
          "step {} has the loss {:g} and the gradient norm {:g}; try a smaller --lr (now {}) or {} (now {})", end.steps,
          r.loss, r.gradient_norm, s.opt.lr, s.opt.clip > 0 ? "--clip" : "a limit of the norm by --clip", s.opt.clip);
      break;
    }
    if (r.tokens == 0) {
      problem = fmt::format(
          "--data: no token of step {} has a target, so that it learns nothing: each ends its document; join documents "
          "by --documents joined, or leave such short ones out",
          end.steps);
      break;
    }
    saves.after(end.steps, run.asked);
  }
  if (s.opt.log_hashes > 0) hash();  // also of the last step
  end.seconds = seconds(begin, clock_type::now());
  end.diverged = !problem.empty();
  saves.finish(end.steps, !end.diverged && (end.steps > 0 || s.begins_from_weights()));
  if (s.mesh.size() > 1) end.communication = run.of_ranks(whole.since());
  if (const plait::axis_communication* most = most_waited(end.communication))
    end.longest_wait = run.longest_wait(most->axes);
  end.sent = traffic_of(s, run, end.steps - end.resumed);
  end.peak_bytes = run.all_reduce(static_cast<double>(run.peak_bytes()), plait::reduce_op::max);
  if (problem.empty() && s.judged()) end.held_out = run.evaluate();
  end.hash = run.weights_hash();
  end.traced = run.traced();
  if (report) report->finish(end);
  if (s.opt.sample > 0 && end.steps == s.opt.steps && problem.empty()) {
    const std::vector<std::int64_t> text = run.sample();
    if (report) say("\nsampled text:\n{}\n", text_of(s, text));
  }
  if (!s.opt.export_hf.empty() && end.steps == s.opt.steps && problem.empty()) {
    run.write_model();
    if (report) say("the model is in '{}'\n", s.opt.export_hf);
  } else if (!s.opt.export_hf.empty() && report) {
    say("nothing is written to --export-hf {}: {} of {} steps were done\n", s.opt.export_hf, end.steps, s.opt.steps);
  }
  if (problem.empty() && !saves.failure().empty()) problem = "the last state is not saved: " + saves.failure();
  if (problem.empty() && !saves.damage().empty())
    problem = "the last state that was saved is damaged: " + saves.damage();
  if (problem.empty() && report) problem = report->failure();
  return problem;
}
