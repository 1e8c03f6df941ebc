// The steps of a training run as a line of progress, and as a log of JSON lines, which can be read again.
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "number_text.hpp"
#include "plait/core/error.hpp"
#include "plait/io/json.hpp"
#include "plait/io/json_tree.hpp"
#include "plait/io/mapped_file.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/nn/moe/router_statistics.hpp"
#include "plait/parallel/step_result.hpp"
#include "train_llama/observe/communication.hpp"

namespace plait {

/// The report of one optimizer step. The numbers of the training are equal on every rank; times are those of the rank
/// that reports.
struct step_record {
  std::int64_t step = 0;         ///< counted from 1: steps finished
  double loss = 0;               ///< nats per counted token of the global batch
  double grad_norm = 0;          ///< before clipping
  double lr = 0;                 ///< in this step
  double tokens_per_second = 0;  ///< of all ranks together
  double comm_share = 0;         ///< share of the step's time that waited for communication, 0 to 1; NaN: not measured
  double mfu = 0;                ///< model flops utilisation, 0 to 1; 0: unknown
  bool skipped = false;          ///< whether the gradients were not finite, so that no weight has changed
  std::vector<axis_communication> communication{};  ///< of all ranks; empty: none, or unknown for this step
  double auxiliary = 0;                             ///< the routers' terms of the loss; 0: none
  double expert_imbalance = 0;  ///< the largest `router_statistics::imbalance` of a layer; 0: unknown for this step
  std::map<std::int64_t, router_statistics> routers{};  ///< by layer; empty: none, or unknown for this step
};

/// Returns a duration as text: "8 s", "3 min 05 s", "2 h 07 min", "4 d 03 h"; "?" if it is not a time.
inline std::string format_duration(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return "?";
  const auto s = std::llround(seconds);
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{} min {:02} s", s / 60, s % 60);
  if (s < 86400) return fmt::format("{} h {:02} min", s / 3600, s / 60 % 60);
  return fmt::format("{} d {:02} h", s / 86400, s / 3600 % 24);
}

/// Returns a rate in three digits: "812", "12.4k", "3.07M".
inline std::string format_rate(double value) {
  if (!(value >= 0) || value > 1e15) return "?";
  return three_digits(value, {"", "k", "M", "G", "T"});
}

/// Returns the hidden share of the communication over each axis, as "hidden dp 93% tp 0%"; "" if there was none or it
/// was not measured.
inline std::string format_hidden(const std::vector<axis_communication>& communication) {
  std::string text;
  for (const axis_communication& c : communication)
    if (!std::isnan(c.hidden()))
      text += fmt::format("{}{} {:.0f}%", text.empty() ? "hidden " : " ", c.axes, 100 * c.hidden());
  return text;
}

/// Returns the progress line of `record`, without a line end and without unknown values. Important values come first,
/// because a narrow terminal shows only these.
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

/// Returns the items of a progress line that fit in the columns of a terminal.
inline std::string_view first_columns(std::string_view line, std::size_t columns) {
  if (line.size() <= columns) return line;
  const std::size_t end = line.rfind("  ", columns);
  return line.substr(0, end == line.npos ? columns : end);
}

struct progress_config {
  std::int64_t steps = 0;       ///< of the whole training
  std::int64_t first_step = 0;  ///< steps of earlier runs, if training resumes
  std::int64_t every = 10;      ///< steps between lines without a terminal; the first and last step have one
};

/// Shows the progress of training, on one rank. On a terminal it is one line, rewritten at most ten times a second. In
/// a file or pipe it is plain lines. Output errors are ignored, because a closed terminal must not end a training run.
class progress {
 public:
  using clock = std::chrono::steady_clock;

  /// Writes to `out`, which must outlive this object, and checks whether it is a terminal.
  explicit progress(progress_config config, std::FILE* out = stderr)
      : progress(std::move(config), out, ::isatty(::fileno(out)) == 1) {}
  progress(progress_config config, std::FILE* out, bool terminal)
      : config_(std::move(config)), out_(out), terminal_(terminal), last_(clock::now()) {
    if (config_.every < 1) fail({"every: a line every ", config_.every, " steps; at least 1 is legal"});
  }
  ~progress() { finish(); }
  progress(const progress&) = delete;
  progress& operator=(const progress&) = delete;

  /// Shows a step. Call it after each step. The remaining time is estimated by the mean duration of recent steps.
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

  /// Ends the last line, which stays. Further calls do nothing until the next update.
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

/// Returns the communication of one or several steps, by axes, for the log.
inline json_object communication_object(const std::vector<axis_communication>& communication) {
  json_object all;
  for (const axis_communication& c : communication)
    all.add(c.axes, json_object()
                        .add("seconds", c.seconds)
                        .add("waited", c.waited)
                        .add("hidden", c.hidden())
                        .add("worst", c.worst)
                        .add("worst_rank", static_cast<std::int64_t>(c.worst_rank)));
  return all;
}

/// Returns the routers' statistics of a step, by layer, for the log.
inline json_object routers_object(const std::map<std::int64_t, router_statistics>& routers) {
  json_object all;
  for (const auto& [layer, of] : routers) {
    json_object one;
    one.add("load", of.load);
    if (!of.dropped.empty()) one.add("dropped", of.dropped);
    all.add(std::to_string(layer), one.add("entropy", of.entropy));
  }
  return all;
}

/// The log of a training run, one JSON object per line: a line for each step, and at last one line `{"summary": {..}}`.
/// A step is `{"step": 1, "loss": .., "grad_norm": .., "lr": .., "tokens_per_second": .., "comm_share": ..}`, with
/// `"mfu": ..` if known, and `"skipped": true` if the step was skipped. If ranks communicate, there is also
/// `"communication": {"dp": {"seconds": .., "waited": .., "hidden": .., "worst": .., "worst_rank": ..}, ..}`. It has
/// the members of `axis_communication` for each set of axes; values that were not measured are `null`.
///
/// Models with experts have `"auxiliary": ..` and `"expert_imbalance": ..`. Steps that are also printed have
/// `"routers": {"1": {"load": [..], "dropped": [..], "entropy": ..}, ..}`, with the members of `router_statistics` for
/// each layer; `dropped` is there only with a limit. Doubles read back exactly; NaN and infinities are `null`. Each
/// line reaches the operating system before the call returns. So a killed run keeps all lines except the one being
/// written.
class json_log {
 public:
  /// Starts an empty log. If the run `resumes` an earlier one, it continues the existing file, and removes a torn last
  /// line of a killed run. Otherwise the existing file is renamed (`kept`). Throws `error` with `flag` if the log
  /// cannot be written, or if another log writes to the file; the file then stays as it is.
  explicit json_log(std::string path, std::string flag = "log", bool resumes = false)
      : path_(std::move(path)), flag_(std::move(flag)) {
    open();
    int kept = -1;  // the file of an earlier run, locked until the new file is locked
    try {
      if (resumes) {
        drop_torn_line();
      } else if (keep()) {
        kept = std::exchange(file_, -1);
        open();
      }
    } catch (...) {
      close();
      if (kept >= 0) ::close(kept);
      throw;
    }
    if (kept >= 0) ::close(kept);
  }
  json_log(const json_log&) = delete;
  json_log& operator=(const json_log&) = delete;
  ~json_log() { close(); }

  void step(const step_record& record) {
    json_object line;
    line.add("step", record.step).add("loss", record.loss).add("grad_norm", record.grad_norm).add("lr", record.lr);
    line.add("tokens_per_second", record.tokens_per_second).add("comm_share", record.comm_share);
    if (record.mfu > 0) line.add("mfu", record.mfu);
    if (record.skipped) line.add("skipped", true);
    if (record.auxiliary > 0) line.add("auxiliary", record.auxiliary);
    if (record.expert_imbalance > 0) line.add("expert_imbalance", record.expert_imbalance);
    if (!record.routers.empty()) line.add("routers", routers_object(record.routers));
    if (!record.communication.empty()) line.add("communication", communication_object(record.communication));
    write(line);
  }
  /// Writes the hashes of all parameters after `step` steps (0: before the first), in the order of the model, as
  /// `{"hashes": {"step": 4, "weights": {"model.norm.weight": "00000000000000ff", ..}, "gradients": {..}}}`. Gradients
  /// are there only if `all` has them.
  void hashes(std::int64_t step, const std::vector<parameter_hash>& all) {
    json_object weights, gradients, line;
    bool any = false;
    for (const parameter_hash& p : all) {
      weights.add(p.name, hex_text(p.value));
      any = any || p.gradient;
      if (p.gradient) gradients.add(p.name, hex_text(*p.gradient));
    }
    line.add("step", step).add("weights", weights);
    if (any) line.add("gradients", gradients);
    write(json_object().add("hashes", line));
  }
  /// Writes the last line. `values` may have any members, for instance `peak_bytes`, `bytes_sent` with one member per
  /// axis,
  /// `communication` of all steps, `weights_hash`. `read_run_log` reads `held_out_loss` after `steps`, `peak_bytes`,
  /// texts by name in `options`, bytes by part in `memory`, and an SVG image in `timeline`.
  void summary(const json_object& values) { write(json_object().add("summary", values)); }
  /// Writes another line. A reader recognizes lines by their keys.
  void write(const json_object& line) {
    std::string text = line.text() + "\n";
    for (std::string_view rest = text; !rest.empty();) {
      const ssize_t written = detail::uninterrupted([&] { return ::write(file_, rest.data(), rest.size()); });
      if (written < 0) refuse("cannot append to");
      rest.remove_prefix(static_cast<std::size_t>(written));
    }
  }

  /// Returns the new name of an earlier run's log: "train.jsonl.1" for "train.jsonl", with the first free number. Empty
  /// if there was no such log.
  const std::string& kept() const { return kept_; }

 private:
  /// Opens and locks the log. Between the two, another run may rename the opened file. So it repeats this until the
  /// locked file has the log's name.
  void open() {
    while (true) {
      file_ =
          detail::uninterrupted([&] { return ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666); });
      if (file_ < 0) refuse("cannot write");
      if (::flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        close();
        fail({flag_, ": '", path_, "' is being written by another run; give each its own log"});
      }
      struct ::stat opened {
      }, named{};
      if (::fstat(file_, &opened) != 0) refuse("cannot ask for the size of");
      if (::stat(path_.c_str(), &named) == 0 && opened.st_dev == named.st_dev && opened.st_ino == named.st_ino) return;
      close();
    }
  }
  /// Cuts the file after its last whole line, because text appended to a torn line would be torn, too. Does nothing
  /// unless it is a regular file.
  void drop_torn_line() {
    struct ::stat file {};
    if (::fstat(file_, &file) != 0) refuse("cannot ask for the size of");
    if (!S_ISREG(file.st_mode) || file.st_size == 0) return;
    // The log itself is open only for writing: a pipe that is open for both would never wait for its reader.
    const mapped_file lines(path_, flag_);
    const std::string_view text(reinterpret_cast<const char*>(lines.bytes().data()), lines.bytes().size());
    const auto whole = static_cast<off_t>(text.rfind('\n') + 1);  // 0 if no line ends
    if (whole == file.st_size) return;
    if (detail::uninterrupted([&] { return ::ftruncate(file_, whole); }) != 0) refuse("cannot cut the torn line off");
  }
  /// Renames the open file unless it is empty, and then closes it. A link keeps the log's name.
  bool keep() {
    namespace fs = std::filesystem;
    std::error_code why;
    if (!fs::is_regular_file(path_, why) || fs::is_empty(path_, why)) return false;
    std::error_code not_there;
    const std::string file = fs::is_symlink(path_, not_there) ? fs::canonical(path_, not_there).string() : path_;
    for (int n = 1; fs::exists(kept_ = file + "." + std::to_string(n), not_there);) ++n;
    fs::rename(file, kept_, why);
    if (why)
      fail({flag_, ": '", path_, "' is the log of an earlier run, which cannot be renamed to '", kept_,
            "': ", why.message(), "; name another file"});
    return true;
  }
  [[noreturn]] void refuse(const char* what) {
    const int why = errno;
    close();
    fail({flag_, ": ", what, " '", path_, "': ", std::strerror(why)});
  }
  void close() {
    if (file_ >= 0) ::close(file_);
    file_ = -1;
  }

  std::string path_;
  std::string flag_;
  std::string kept_;
  int file_ = -1;
};

/// Hashes of parameters by their names, in the order of the model.
using named_hashes = std::vector<std::pair<std::string, std::uint64_t>>;

/// A step in a log, with the numbers that a report shows; a number is NaN if the log has null or lacks it. The hashes
/// are of the state after the step. Step 0 has only hashes.
struct logged_step {
  std::int64_t step = 0;
  std::optional<step_record> numbers{};
  named_hashes weights{}, gradients{};  ///< empty: not hashed
};

/// A run, as read from its log.
struct run_log {
  std::vector<logged_step> steps;           ///< in ascending order
  std::vector<std::int64_t> repeated;       ///< steps that a resumed run made again; the last ones count
  std::vector<std::int64_t> hashed_anew{};  ///< steps that were hashed again with another result
  bool cut_short = false;                   ///< whether the last line is torn, as a killed run may leave it
  std::vector<std::pair<std::int64_t, double>> held_out{};  ///< steps and held-out losses, in ascending order
  // From the last summary; empty or NaN if it lacks them.
  std::vector<std::pair<std::string, std::string>> options{};  ///< by name
  std::vector<std::pair<std::string, double>> memory{};        ///< planned bytes of the rank that needs most, by part
  double peak_bytes = std::numeric_limits<double>::quiet_NaN();
  std::string timeline{};  ///< an SVG image
};

namespace detail {

class run_log_reader {
  using json = nlohmann::ordered_json;

 public:
  explicit run_log_reader(const std::string& source) : source_(source) {}

  run_log read(std::string_view text) {
    for (std::size_t number = 1; !text.empty(); ++number) {
      const std::size_t end = text.find('\n');
      const std::string_view line = text.substr(0, end);
      where_ = cat({source_, ", line ", number});
      if (end != text.npos) {
        take(parse_json<json>(line, where_));
        text.remove_prefix(end + 1);
        continue;
      }
      log_.cut_short = !json::accept(line);
      if (!log_.cut_short) take(parse_json<json>(line, where_));
      break;
    }
    if (log_.steps.empty())
      fail({source_, ": no line has a step", log_.cut_short ? ", and the last is not whole" : "",
            "; legal is a log of a training run, as json_log writes it"});
    return std::move(log_);
  }

 private:
  /// Reads a line, and ignores lines of unknown kinds.
  void take(const json& line) {
    if (!line.is_object()) fail({where_, ": it is ", line.type_name(), "; legal is an object on each line"});
    if (line.contains("hashes")) return take_hashes(object(line, "hashes"));
    if (line.contains("save")) return take_held_out(object(line, "save"), "step", "save.");
    if (line.contains("summary")) return take_summary(object(line, "summary"));
    if (line.contains("step")) take_numbers(line);
  }
  void take_held_out(const json& line, const char* step_key, std::string_view of) {
    if (!line.contains("held_out_loss")) return;
    const std::int64_t step = step_of(line, step_key, of);
    const double loss = number(line, "held_out_loss", of);
    drop_held_out(step);
    log_.held_out.emplace_back(step, loss);
  }
  /// Removes the held-out losses from a step on, because the run makes them again.
  void drop_held_out(std::int64_t step) {
    while (!log_.held_out.empty() && log_.held_out.back().first >= step) log_.held_out.pop_back();
  }
  void take_summary(const json& summary) {
    take_held_out(summary, "steps", "summary.");
    log_.peak_bytes = optional_number(summary, "peak_bytes", "summary.");
    log_.options.clear(), log_.memory.clear(), log_.timeline.clear();
    if (summary.contains("options"))
      for (const auto& [name, value] : object(summary, "options", "summary.").items())
        log_.options.emplace_back(name, text(summary["options"], name.c_str(), "summary.options."));
    if (summary.contains("memory"))
      for (const auto& [name, value] : object(summary, "memory", "summary.").items())
        log_.memory.emplace_back(name, number(summary["memory"], name.c_str(), "summary.memory."));
    if (!summary.contains("timeline")) return;
    log_.timeline = text(summary, "timeline", "summary.");
    if (!log_.timeline.starts_with("<svg ") || log_.timeline.find("<script") != std::string::npos)
      fail({where_, ": summary.timeline is not an image; legal is SVG without scripts"});
  }
  void take_numbers(const json& line) {
    const std::int64_t step = step_of(line);
    if (!log_.steps.empty() && log_.steps.back().step >= step && begun_) {  // the run went back
      const auto first = std::find_if(log_.steps.begin(), log_.steps.end(), [&](auto& s) { return s.step >= step; });
      for (auto at = first; at != log_.steps.end(); ++at)
        if (at->numbers) log_.repeated.push_back(at->step);
      log_.steps.erase(first, log_.steps.end());
      drop_held_out(step);
    }
    begun_ = true;
    step_record numbers{.step = step,
                        .loss = number(line, "loss"),
                        .grad_norm = number(line, "grad_norm"),
                        .lr = number(line, "lr"),
                        .tokens_per_second = optional_number(line, "tokens_per_second")};
    numbers.expert_imbalance = optional_number(line, "expert_imbalance");
    if (line.contains("communication"))
      for (const auto& [axes, value] : object(line, "communication").items()) {
        const json& times = object(line["communication"], axes.c_str(), "communication.");
        const std::string of = cat({"communication.", axes, "."});
        numbers.communication.push_back({axes, number(times, "seconds", of), number(times, "waited", of)});
      }
    at(step).numbers = std::move(numbers);
  }
  void take_hashes(const json& line) {
    const std::int64_t step = step_of(line);
    logged_step& to = at(step);
    const named_hashes before = std::exchange(to.weights, hashes_in(line, "weights"));
    if (to.weights.empty()) fail({where_, ": hashes has no weights"});
    if (!before.empty() && before != to.weights) log_.hashed_anew.push_back(step);
    if (line.contains("gradients")) to.gradients = hashes_in(line, "gradients");
  }

  /// Returns the entry of a step; makes it if there is none.
  logged_step& at(std::int64_t step) {
    const auto place = std::lower_bound(log_.steps.begin(), log_.steps.end(), step,
                                        [](const logged_step& s, std::int64_t n) { return s.step < n; });
    if (place != log_.steps.end() && place->step == step) return *place;
    return *log_.steps.insert(place, {.step = step});
  }

  // Each function reads a member. Its error names the member after `of`, the members that contain it.
  [[noreturn]] void refuse(const json& line, const char* key, std::string_view of, const char* legal) const {
    const auto found = line.find(key);
    fail({where_, ": ", of, key, " is ", found == line.end() ? "missing" : found->dump(), "; legal ", legal});
  }
  const json& object(const json& line, const char* key, std::string_view of = "") const {
    const auto found = line.find(key);
    if (found == line.end() || !found->is_object()) refuse(line, key, of, "is an object");
    return *found;
  }
  std::int64_t step_of(const json& line, const char* key = "step", std::string_view of = "") const {
    const auto found = line.find(key);
    if (found == line.end() || !found->is_number_integer() || found->get<std::int64_t>() < 0)
      refuse(line, key, of, "are integers from 0 on");
    return found->get<std::int64_t>();
  }
  double number(const json& line, const char* key, std::string_view of = "") const {
    const auto found = line.find(key);
    if (found != line.end() && found->is_null()) return std::numeric_limits<double>::quiet_NaN();
    if (found == line.end() || !found->is_number()) refuse(line, key, of, "are numbers and null");
    return found->get<double>();
  }
  double optional_number(const json& line, const char* key, std::string_view of = "") const {
    return line.contains(key) ? number(line, key, of) : std::numeric_limits<double>::quiet_NaN();
  }
  std::string text(const json& line, const char* key, std::string_view of) const {
    const auto found = line.find(key);
    if (found == line.end() || !found->is_string()) refuse(line, key, of, "is a text");
    return found->get<std::string>();
  }
  named_hashes hashes_in(const json& line, const char* key) const {
    named_hashes out;
    for (const auto& [name, hash] : object(line, key, "hashes.").items()) {
      const std::string digits = hash.is_string() ? hash.get<std::string>() : std::string();
      const auto value = number_of<std::uint64_t>(digits, 16);
      if (digits.size() != 16 || !value)
        fail({where_, ": the hash of '", name, "' is ", hash.dump(), "; legal are 16 hexadecimal digits"});
      out.emplace_back(name, *value);
    }
    return out;
  }

  const std::string& source_;
  std::string where_;
  run_log log_{};
  bool begun_ = false;  ///< whether a line with numbers has been read
};

}  // namespace detail

/// Returns the run whose log is `text`. If a run was resumed at an earlier step, the last line of each step counts.
/// Throws
/// `error`, which begins with `source`, for a line that is not a JSON object or lacks a member. A torn last line is no
/// error.
inline run_log read_run_log(std::string_view text, const std::string& source) {
  return detail::run_log_reader(source).read(text);
}

}  // namespace plait
