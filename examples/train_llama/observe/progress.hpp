// The progress of a training run for people: the numbers of a step, as a line on a terminal or lines in a file.
#pragma once

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/comm/metrics.hpp"
#include "plait/core/error.hpp"

namespace plait {

/// The report of one optimizer step. The numbers of the training are equal on every rank; times are those of the rank
/// that reports.
struct step_record {
  std::int64_t step = 0;         ///< counted from 1: steps finished
  double loss = 0;               ///< nats per counted token of the global batch
  double grad_norm = 0;          ///< before clipping
  double lr = 0;                 ///< applied in this step
  double tokens_per_second = 0;  ///< of all ranks together
  double comm_share = 0;         ///< share of the step's time that was spent waiting in communication, 0 to 1; NaN: not
                                 ///< measured
  double mfu = 0;                ///< model flops utilisation, 0 to 1; 0: not known
  bool skipped = false;          ///< whether the gradients were not finite, so that no weight has changed
  std::vector<axis_communication> communication{};  ///< of all ranks; empty: none, or not known for this step
  double auxiliary = 0;                             ///< the loss's terms of routers; 0: there are none
  double expert_imbalance = 0;  ///< the most chosen expert of a layer over the mean; 0: not known for this step
};

/// A duration as people read it: "8 s", "3 min 05 s", "2 h 07 min", "4 d 03 h"; "?" for what is no time.
inline std::string format_duration(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return "?";
  const auto s = std::llround(seconds);
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{} min {:02} s", s / 60, s % 60);
  if (s < 86400) return fmt::format("{} h {:02} min", s / 3600, s / 60 % 60);
  return fmt::format("{} d {:02} h", s / 86400, s / 3600 % 24);
}

/// A rate in three digits: "812", "12.4k", "3.07M".
inline std::string format_rate(double value) {
  if (!(value >= 0) || value > 1e15) return "?";
  const char* unit = "";
  for (const char* next : {"k", "M", "G", "T"}) {
    if (value < 999.5) break;
    value /= 1000;
    unit = next;
  }
  return fmt::format("{:.{}f}{}", value, *unit == '\0' || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2, unit);
}

/// Returns the share of the communication over each axis that was hidden behind something else, as "hidden dp 93% tp
/// 0%"; "" if nothing was communicated or measured.
inline std::string format_hidden(const std::vector<axis_communication>& communication) {
  std::string text;
  for (const axis_communication& c : communication)
    if (!std::isnan(c.hidden()))
      text += fmt::format("{}{} {:.0f}%", text.empty() ? "hidden " : " ", c.axes, 100 * c.hidden());
  return text;
}

/// The progress line of `record`, without a line end; what is not known is left out. What matters most comes first, for
/// a narrow terminal has no room for the rest.
inline std::string format_progress(const step_record& record, std::int64_t steps, double seconds_left) {
  std::string text =
      fmt::format("{} left  step {}/{}  loss {:.4f}  grad {:.3f}  {} tok/s", format_duration(seconds_left), record.step,
                  steps, record.loss, record.grad_norm, format_rate(record.tokens_per_second));
  if (record.mfu > 0) text += fmt::format("  MFU {:.1f}%", 100 * record.mfu);
  text += fmt::format("  lr {:.2e}", record.lr);
  if (!std::isnan(record.comm_share)) text += fmt::format("  comm {:.0f}%", 100 * record.comm_share);
  const std::string hidden = format_hidden(record.communication);
  return hidden.empty() ? text : text + "  " + hidden;
}

/// The beginning of a progress line in so many columns, without the item that they would cut.
inline std::string_view first_columns(std::string_view line, std::size_t columns) {
  if (line.size() <= columns) return line;
  const std::size_t end = line.rfind("  ", columns);
  return line.substr(0, end == line.npos ? columns : end);
}

struct progress_config {
  std::int64_t steps = 0;       ///< of the whole training
  std::int64_t first_step = 0;  ///< steps finished before, when training resumes
  std::int64_t every = 10;      ///< without a terminal: a line every so many steps, and for the first and last
};

/// Shows how training goes, on one rank. On a terminal it is one line that is rewritten at most ten times a second;
/// else, in a file or pipe, plain lines. Output errors are ignored: a closed terminal must not end a training run.
class progress {
 public:
  using clock = std::chrono::steady_clock;

  /// Writes to `out`, which must outlive this; whether it is a terminal is found out.
  explicit progress(progress_config config, std::FILE* out = stderr)
      : progress(std::move(config), out, ::isatty(::fileno(out)) == 1) {}
  progress(progress_config config, std::FILE* out, bool terminal)
      : config_(std::move(config)), out_(out), terminal_(terminal), last_(clock::now()) {
    if (config_.every < 1) fail({"every: a line every ", config_.every, " steps; at least 1 is legal"});
  }
  ~progress() { finish(); }
  progress(const progress&) = delete;
  progress& operator=(const progress&) = delete;

  /// After each step. The remaining time follows from the mean duration of recent steps.
  void update(const step_record& record) { update(record, clock::now()); }
  void update(const step_record& record, clock::time_point now) {
    const double seconds = std::chrono::duration<double>(now - last_).count();
    last_ = now;
    ++updates_;
    const double weight = std::max(1.0 / static_cast<double>(updates_), 0.05);
    seconds_per_step_ += weight * (seconds - seconds_per_step_);
    const bool ends = record.step >= config_.steps;
    const std::string line = format_progress(
        record, config_.steps,
        seconds_per_step_ * static_cast<double>(std::max<std::int64_t>(0, config_.steps - record.step)));
    if (!terminal_) {
      if (ends || record.step == config_.first_step + 1 || record.step % config_.every == 0) put(line + "\n");
      return;
    }
    line_ = line;
    if (!ends && shown_ && now - drawn_ < std::chrono::milliseconds(100)) return;
    drawn_ = now;
    draw();
  }

  /// Leaves the last line standing and ends it. Further calls do nothing until the next update.
  void finish() {
    if (!shown_) return;
    draw();
    put("\n");
    shown_ = false;
  }

 private:
  void draw() {
    shown_ = true;
    put(fmt::format("\r{}\x1b[K", first_columns(line_, columns())));
  }
  // A line as wide as the terminal would wrap, and the next carriage return would not reach its start.
  std::size_t columns() const {
    winsize size{};
    if (::ioctl(::fileno(out_), TIOCGWINSZ, &size) != 0 || size.ws_col < 2) return 119;
    return size.ws_col - 1u;
  }
  void put(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), out_);
    std::fflush(out_);
  }

  progress_config config_;
  std::FILE* out_;
  bool terminal_;
  clock::time_point last_;
  clock::time_point drawn_{};
  std::int64_t updates_ = 0;
  double seconds_per_step_ = 0;
  std::string line_;
  bool shown_ = false;
};

}  // namespace plait
