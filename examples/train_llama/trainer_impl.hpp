#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "plait/data/text.hpp"
#include "plait/kernels/philox.hpp"
#include "plait/models/llama.hpp"
#include "plait/models/strategies.hpp"
#include "plait/observe/json_log.hpp"
#include "plait/observe/loss_curve.hpp"
#include "plait/observe/progress.hpp"
#include "plait/parallel/weights_hash.hpp"
#include "plait/plan/step_traffic.hpp"
#include "trainer.hpp"

namespace {

using plait::context;
using plait::cpu;

inline plait::recompute recompute_of(const options& opt) {
  return opt.recompute == "none"   ? plait::recompute::none
         : opt.recompute == "full" ? plait::recompute::full
                                   : plait::recompute::selective;
}

inline plait::llama_options model_options(const options& opt) {
  return {recompute_of(opt), opt.dropout, {.label_smoothing = opt.label_smoothing, .z_loss = opt.z_loss}};
}

/// Fills this rank's part of a microbatch: `read` is given a sample of the microbatch, its first position, how many,
/// and where they go.
template <class Tokens, class Read>
void fill(Tokens& ids, Tokens& labels, Read&& read) {
  const plait::box& part = ids.part();
  for (std::int64_t row = 0; row < part.local[0]; ++row) {
    const std::int64_t at = row * part.local[1];
    read(part.offset[0] + row, part.offset[1], part.local[1], ids.data() + at, labels.data() + at);
  }
}

/// Whether the run was interrupted on any rank: an answer that all ranks share.
inline bool stop_asked(context<cpu>& ctx) {
  int stop = interrupted;
  ctx.ranks.root().all_reduce(&stop, &stop, 1, plait::dtype::i32, plait::reduce_op::max);
  return stop != 0;
}

/// The next token after `length` tokens in row 0: Gumbel-max over the whole vocabulary, with random numbers keyed by
/// the place and the token, so that every mesh draws the same text. Nothing but one score per rank is communicated.
template <class T, class Logits>
std::int64_t draw(context<cpu>& ctx, const Logits& scores, std::int64_t length, std::int64_t place, std::int64_t vocab,
                  double temperature) {
  const plait::box& part = scores.part();
  double best = -std::numeric_limits<double>::infinity();
  std::int64_t token = -1;
  if (part.offset[0] == 0) {
    const T* const row = scores.data() + (length - 1) * part.local[2];
    for (std::int64_t c = 0; c < part.local[2] && part.offset[2] + c < vocab; ++c) {
      double score = static_cast<double>(row[c]);
      if (temperature > 0) {
        const double u = plait::kernels::uniform(ctx.seed, 0x7361'6d70'6c65,
                                                 static_cast<std::uint64_t>(place * vocab + part.offset[2] + c));
        score = score / temperature - std::log(-std::log(std::max(u, 1e-300)));
      }
      if (score > best) best = score, token = part.offset[2] + c;
    }
  }
  double top = best;
  ctx.ranks.root().all_reduce(&best, &top, 1, plait::dtype::f64, plait::reduce_op::max);
  std::int64_t winner = best == top ? token : -1;
  ctx.ranks.root().all_reduce(&winner, &winner, 1, plait::dtype::i64, plait::reduce_op::max);
  return winner;
}

template <class T, class Model>
std::vector<std::int64_t> sample_text(context<cpu>& ctx, Model& model, const setup& s) {
  std::vector<std::int64_t> text = plait::encode_bytes(s.opt.prompt);
  if (text.empty()) text.push_back('\n');
  const std::int64_t window = s.opt.seq;
  const auto total = static_cast<std::int64_t>(text.size()) + s.opt.sample;
  for (auto place = static_cast<std::int64_t>(text.size()); place < total; ++place) {
    const std::int64_t length = std::min(place, window), from = place - length;
    typename Model::tokens ids(ctx);
    for (std::int64_t row = 0; row < ids.part().local[0]; ++row)
      for (std::int64_t column = 0; column < ids.part().local[1]; ++column)
        ids.data()[row * ids.part().local[1] + column] =
            column < length ? text[static_cast<std::size_t>(from + column)] : 0;
    text.push_back(draw<T>(ctx, model.score(ctx, ids), length, place, s.config.vocab, s.opt.temperature));
    if (stop_asked(ctx)) break;
  }
  return text;
}

/// Mean loss over the held-out samples, as many whole microbatches as there are; nothing if interrupted.
template <class Model>
std::optional<double> evaluate(context<cpu>& ctx, Model& model, const setup& s) {
  double sum = 0;
  const std::int64_t batches = s.data->held_out_samples() / s.sequences;
  for (std::int64_t i = 0; i < batches; ++i) {
    if (stop_asked(ctx)) return {};
    typename Model::tokens ids(ctx), labels(ctx);
    fill(ids, labels, [&](std::int64_t row, auto... rest) { s.data->fill_held_out(i * s.sequences + row, rest...); });
    sum += *model.forward(ctx, ids, labels, nullptr).data();
  }
  sum = plait::resolve_scalar(ctx, plait::layout_v<typename Model::loss_sum::spec>.partial, sum);
  return sum / static_cast<double>(batches * s.sequences * s.opt.seq);
}

/// 1234567 as "1.23 MB".
inline std::string size_text(double bytes) {
  const char* unit = "B";
  for (const char* next : {"kB", "MB", "GB", "TB"}) {
    if (bytes < 999.5) break;
    bytes /= 1000;
    unit = next;
  }
  return fmt::format("{:.{}f} {}", bytes, *unit == 'B' || bytes >= 99.95 ? 0 : bytes >= 9.995 ? 1 : 2, unit);
}

inline std::string counted(std::int64_t n, const char* what, const char* plural = "s") {
  return fmt::format("{} {}{}", n, what, n == 1 ? "" : plural);
}

/// "dp=2, tp=4": the extents as given, and how many ranks hold each key-value head where tp outnumbers them.
inline std::string mesh_text(const plait::mesh_shape& shape) {
  const std::int64_t tp = shape.extent(plait::axis_of<plait::tp>), copies = shape.extent(plait::axis_of<plait::tp_rep>);
  std::string text = fmt::format("dp={}, tp={}", shape.extent(plait::axis_of<plait::dp>), tp * copies);
  if (copies > 1) text += fmt::format(", each key-value head on {} ranks", copies);
  return text;
}

inline std::uint64_t per_rank(const plait::world& w, const std::string& label, std::uint64_t wire) {
  std::int64_t ranks = 1;
  for (plait::axis_id axis : w.shape().axes)
    if (("+" + label + "+").find("+" + std::string(axis.text()) + "+") != std::string::npos)
      ranks *= w.shape().extent(axis);
  return wire / static_cast<std::uint64_t>(ranks);
}

template <class T, class S>
std::string run(const setup& s, plait::any_communicator ranks) {
  using model_type = plait::llama<T, S>;
  using clock = std::chrono::steady_clock;
  const auto seconds = [](clock::time_point a, clock::time_point b) {
    return std::chrono::duration<double>(b - a).count();
  };
  plait::world w(s.mesh, ranks);
  cpu device({s.opt.threads});
  context<cpu> ctx{device, w, plait::llama_sizes<S>(s.config, w.shape(), s.sequences, s.opt.seq), s.opt.seed};
  model_type model(ctx, s.config, model_options(s.opt));
  plait::adamw<T> optimizer({.weight_decay = s.opt.weight_decay});
  model.visit([&](auto& p) { p.initialize(ctx); });

  const bool reports = w.rank() == 0;
  std::optional<plait::json_log> log;
  std::optional<plait::progress> display;
  plait::curve_series curve{"training", {}};
  const std::int64_t count = plait::parameter_count(s.config);
  if (reports) {
    if (!s.opt.log.empty()) log.emplace(s.opt.log);
    fmt::print("{} parameters, {} ({}), {} of {} tokens a step in {}, {}\n", count, counted(w.size(), "rank"),
               mesh_text(w.shape()), counted(s.sequences * s.microbatches, "sequence"), s.opt.seq,
               counted(s.microbatches, "microbatch", "es"), s.opt.precision);
    std::fflush(stdout);
    display.emplace(plait::progress_config{.steps = s.opt.steps, .every = std::max<std::int64_t>(1, s.opt.steps / 20)});
  }

  const auto begin = clock::now();
  w.ledger().clear();
  std::int64_t done = 0;
  std::string problem;
  double last_loss = std::numeric_limits<double>::quiet_NaN();
  for (std::int64_t step = 0; step < s.opt.steps; ++step) {
    if (stop_asked(ctx)) break;
    const auto start = clock::now();
    const double waited = w.ledger().total().seconds;
    const std::int64_t first = step * s.microbatches * s.sequences;
    ctx.first_sample = first;
    const double rate = s.rate.at(step);
    const plait::step_result r = plait::train_step(
        ctx, model, optimizer, s.microbatches, rate, s.opt.clip, [&](std::int64_t i, auto& ids, auto& labels) {
          fill(ids, labels,
               [&](std::int64_t row, auto... rest) { s.data->fill(first + i * s.sequences + row, rest...); });
        });
    const double took = seconds(start, clock::now());
    done = step + 1;
    last_loss = r.loss;
    if (reports) {
      const plait::step_record record{done,
                                      r.loss,
                                      r.gradient_norm,
                                      rate,
                                      static_cast<double>(r.tokens) / took,
                                      (w.ledger().total().seconds - waited) / took};
      if (log) log->step(record);
      display->update(record);
      curve.points.push_back({static_cast<double>(done), r.loss});
    }
    if (!std::isfinite(r.loss) || !std::isfinite(r.gradient_norm)) {  // as all ranks see it
      problem = fmt::format(
          "step {} has the loss {:g} and the gradient norm {:g}; try a smaller --lr (now {}) or --clip (now {})", done,
          r.loss, r.gradient_norm, s.opt.lr, s.opt.clip);
      break;
    }
  }
  const double took = seconds(begin, clock::now());

  plait::json_object sent;
  std::string sent_text;
  plait::ledger predicted = plait::predict_step_traffic(ctx, model, optimizer, s.microbatches);
  bool as_predicted = true;
  for (const auto& row : predicted.rows) w.ledger().of(row.label);  // what was predicted and not sent counts too
  for (const auto& row : w.ledger().rows) {
    const plait::ledger::entry total = w.ledger().total(row.label), expected = predicted.total(row.label);
    as_predicted = as_predicted && total.wire == expected.wire * static_cast<std::uint64_t>(done) &&
                   total.calls == expected.calls * static_cast<std::uint64_t>(done);
    if (total.calls == 0) continue;
    const std::uint64_t bytes = per_rank(w, row.label, total.wire);
    sent.add(row.label, bytes);
    sent_text +=
        fmt::format("{}{} over {}", sent_text.empty() ? "" : ", ", size_text(static_cast<double>(bytes)), row.label);
  }
  double peak = static_cast<double>(device.peak_bytes());
  w.root().all_reduce(&peak, &peak, 1, plait::dtype::f64, plait::reduce_op::max);
  model.visit([&](auto& p) { p.gather(ctx); });  // what is evaluated and sampled is what the last step left
  std::optional<double> held_out;
  if (problem.empty() && s.data->held_out_samples() >= s.sequences) held_out = evaluate(ctx, model, s);
  const std::uint64_t hash = plait::weights_hash(ctx, model);
  if (reports) {
    display->finish();
    plait::json_object summary;
    summary.add("steps", done).add("loss", last_loss).add("parameters", count).add("seconds", took);
    if (held_out) summary.add("held_out_loss", *held_out);
    summary.add("peak_bytes", static_cast<std::int64_t>(peak))
        .add("bytes_sent", sent)
        .add("bytes_as_predicted", as_predicted);
    summary.add("weights_hash", fmt::format("{:016x}", hash)).add("interrupted", done < s.opt.steps && problem.empty());
    if (log) log->summary(summary);
    fmt::print("{}{} in {}",
               !problem.empty()     ? "diverged: "
               : done < s.opt.steps ? "interrupted: "
                                    : "",
               counted(done, "step"), took < 60 ? fmt::format("{:.1f} s", took) : plait::format_duration(took));
    if (done > 0) fmt::print(", last loss {:.4f}", last_loss);
    if (held_out) fmt::print(", held-out loss {:.4f}", *held_out);
    if (s.entropy > 0) fmt::print("; the data's unigram entropy is {:.4f}", s.entropy);
    fmt::print("\npeak memory of a rank: {}\nsent by a rank: {}{}\nhash of the weights: {:016x}\n", size_text(peak),
               sent_text.empty() ? "nothing" : sent_text,
               as_predicted ? ", as predicted from the types" : ", NOT as predicted from the types", hash);
    if (!s.opt.plot.empty()) {
      plait::curve_chart chart;
      chart.title = fmt::format("{} on {}", s.opt.model, mesh_text(w.shape()));
      chart.series.push_back(std::move(curve));
      if (s.entropy > 0) chart.reference = plait::curve_reference{"unigram entropy", s.entropy};
      plait::write_curve(chart, s.opt.plot, "--plot");
    }
    std::fflush(stdout);
  }
  if (s.opt.sample > 0 && done == s.opt.steps && problem.empty()) {
    const std::vector<std::int64_t> text = sample_text<T>(ctx, model, s);
    if (reports) fmt::print("\nsampled text:\n{}\n", plait::decode_bytes(text));
  }
  return problem;
}

/// Everything that is known before anything runs: how each tensor lies, what a step sends, what a rank holds.
template <class T, class S>
void print_plan(const setup& s) {
  using model_type = plait::llama<T, S>;
  using specs = plait::transformer_specs<S>;
  plait::world w = plait::world::planned(s.mesh);
  cpu device({s.opt.threads});
  context<cpu> ctx{device, w, plait::llama_sizes<S>(s.config, w.shape(), s.sequences, s.opt.seq), s.opt.seed};
  model_type model(ctx, s.config, model_options(s.opt));
  plait::adamw<T> optimizer;
  fmt::print("model: {} parameters\nmesh: {}, {}\nstep: {} of {} of {} tokens, {}\n\n",
             plait::parameter_count(s.config), counted(w.size(), "rank"), mesh_text(w.shape()),
             counted(s.microbatches, "microbatch", "es"), counted(s.sequences, "sequence"), s.opt.seq, s.opt.precision);
  fmt::print("activations\n");
  const auto show = [&](const char* name, const plait::layout& a) {
    fmt::print("  {:10} {}  ({} a rank)\n", name, plait::describe(a),
               size_text(static_cast<double>(plait::local_elements(a, w.shape(), ctx.sizes)) * sizeof(T)));
  };
  show("residual", plait::layout_v<typename specs::residual>);
  show("queries", plait::layout_v<typename specs::queries>);
  show("keys", plait::layout_v<typename specs::keys>);
  show("ffn", plait::layout_v<typename specs::wide>);
  show("logits", plait::layout_v<typename specs::logits>);
  fmt::print("\nparameters (as layers of the same kind share a layout, those of layer 0 stand for all)\n");
  double stored = 0, used = 0;
  model.visit([&](auto& p) {
    stored += static_cast<double>(p.size()) * sizeof(T);
    used += static_cast<double>(p.used_size()) * sizeof(T);
    if (p.name().find("layers.") != std::string::npos && p.name().find("layers.0.") == std::string::npos) return;
    std::string line = fmt::format("  {:46} stored {}", p.name(), plait::describe(p.stored()));
    if (!plait::equivalent(p.stored(), p.used())) line += fmt::format(", used {}", plait::describe(p.used()));
    fmt::print("{}\n", line);
  });
  fmt::print("\ncollectives of a step, for one rank\n");
  const plait::ledger traffic = plait::predict_step_traffic(ctx, model, optimizer, s.microbatches);
  if (traffic.rows.empty()) fmt::print("  none\n");
  for (const auto& row : traffic.rows)
    for (int k = 0; k < plait::collective_kinds; ++k) {
      const auto& e = row.kinds[static_cast<std::size_t>(k)];
      if (e.calls == 0) continue;
      fmt::print("  {:12} {:14} {:6} call{} {:>9} handed in, {:>9} sent\n", row.label,
                 plait::name_of(static_cast<plait::collective>(k)), e.calls, e.calls == 1 ? ", " : "s,",
                 size_text(static_cast<double>(e.payload)),
                 size_text(static_cast<double>(per_rank(w, row.label, e.wire))));
    }
  plait::json_object sent;
  for (const auto& row : traffic.rows) sent.add(row.label, per_rank(w, row.label, traffic.total(row.label).wire));
  fmt::print("  bytes sent in a step, by axis: {}\n", sent.text());
  const bool sharded = stored != used;
  const double gradients = sharded ? stored + used : stored, weights = sharded ? stored + used : stored;
  const auto kept = static_cast<double>(model.saved_bytes(ctx));
  fmt::print(
      "\nmemory of a rank\n  weights      {:>12}\n  gradients    {:>12}\n  moments      {:>12}\n  activations  "
      "{:>12}\n  in all       {:>12}\n",
      size_text(weights), size_text(gradients), size_text(2 * stored), size_text(kept),
      size_text(weights + gradients + 2 * stored + kept));
}

}  // namespace
