// The log of a training run for programs: a JSON object on each line. For people there are progress.hpp and
// loss_curve.hpp; the flight recorder of collectives is in comm/metrics.hpp.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/io/json.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/parallel/step_result.hpp"
#include "train_llama/observe/step_record.hpp"

namespace plait {

/// The communication of a step or of several, by axes, as it is logged.
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

/// The log of a training run, one JSON object per line: a line for each step,
/// `{"step": 1, "loss": .., "grad_norm": .., "lr": .., "tokens_per_second": .., "comm_share": ..}`, then
/// `"mfu": ..` if that is known and `"skipped": true` if the step was, and at last one line `{"summary": {..}}`. Where
/// ranks communicate there is also `"communication": {"dp": {"seconds": .., "waited": .., "hidden": .., "worst": ..,
/// "worst_rank": ..}, ..}`, with the members of `axis_communication` for each axes; `null` is what was not measured.
/// Doubles read back exactly; NaN and infinities are `null`. Each line reaches the operating system before the call
/// returns, so a killed run keeps all lines but the one being written.
class json_log {
 public:
  /// Starts an empty log, or, where the run `goes_on` from an earlier one, continues the file that is there, without
  /// the line at its end that a killed run may have left torn. Lines of an earlier run are kept otherwise: their file
  /// is renamed, see `kept`. Throws `error` naming `flag` when the log cannot be written, and when another log writes
  /// to it: what is there stays.
  explicit json_log(std::string path, std::string flag = "log", bool goes_on = false)
      : path_(std::move(path)), flag_(std::move(flag)) {
    open();
    if (goes_on)
      drop_torn_line();
    else if (keep()) {
      const int kept = std::exchange(file_, -1);  // locked until the new one is
      try {
        open();
      } catch (...) {
        ::close(kept);
        throw;
      }
      ::close(kept);
    }
  }
  json_log(json_log&& other) noexcept
      : path_(std::move(other.path_)),
        flag_(std::move(other.flag_)),
        kept_(std::move(other.kept_)),
        file_(std::exchange(other.file_, -1)) {}
  json_log& operator=(json_log&&) = delete;
  ~json_log() { close(); }

  void step(const step_record& record) {
    json_object line;
    line.add("step", record.step).add("loss", record.loss).add("grad_norm", record.grad_norm).add("lr", record.lr);
    line.add("tokens_per_second", record.tokens_per_second).add("comm_share", record.comm_share);
    if (record.mfu > 0) line.add("mfu", record.mfu);
    if (record.skipped) line.add("skipped", true);
    if (!record.communication.empty()) line.add("communication", communication_object(record.communication));
    write(line);
  }
  /// The hashes of all parameters after so many steps, 0 before the first, in the order of the model:
  /// `{"hashes": {"step": 4, "weights": {"model.norm.weight": "00000000000000ff", ..}, "gradients": {..}}}`, the
  /// gradients where there are any.
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
  /// The last line. `values` is the caller's, for instance `peak_bytes`, `bytes_sent` with one member per axis,
  /// `communication` of all steps, `weights_hash`.
  void summary(const json_object& values) { write(json_object().add("summary", values)); }
  /// Any other line; a reader tells lines apart by their keys.
  void write(const json_object& line) {
    std::string text = line.text() + "\n";
    for (std::string_view rest = text; !rest.empty();) {
      const ssize_t written = detail::uninterrupted([&] { return ::write(file_, rest.data(), rest.size()); });
      if (written < 0) refuse("cannot append to");
      rest.remove_prefix(static_cast<std::size_t>(written));
    }
  }

  const std::string& path() const { return path_; }
  /// Returns the name that the log of an earlier run has now: "train.jsonl.1" of "train.jsonl", with the first number
  /// that is free. Empty: there was none.
  const std::string& kept() const { return kept_; }

 private:
  /// Opens the log, and locks the file that has its name then: between the two, another run may rename the one that was
  /// opened.
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
  /// Cuts the file behind its last whole line: what is appended to a part of one would be no line either. Only a
  /// regular file has such an end.
  void drop_torn_line() {
    struct ::stat file {};
    if (::fstat(file_, &file) != 0) refuse("cannot ask for the size of");
    if (!S_ISREG(file.st_mode) || file.st_size == 0) return;
    // The log itself is open for writing alone, since a pipe that is open for both would never wait for its reader.
    const int lines = detail::uninterrupted([&] { return ::open(path_.c_str(), O_RDONLY | O_CLOEXEC); });
    if (lines < 0) refuse("cannot read the end of");
    off_t whole = file.st_size;  // bytes up to the last line's end, as far as has been looked
    char piece[4096];
    bool ends = false;
    while (whole > 0 && !ends) {
      const off_t begin = whole - std::min(whole, off_t{sizeof piece});
      const auto size = static_cast<std::size_t>(whole - begin);
      const ssize_t got = detail::uninterrupted([&] { return ::pread(lines, piece, size, begin); });
      if (got != static_cast<ssize_t>(size)) {
        if (got >= 0) errno = EIO;  // nobody else writes to it
        const int why = errno;
        ::close(lines);
        errno = why;
        refuse("cannot read the end of");
      }
      const std::size_t end = std::string_view(piece, size).rfind('\n');
      ends = end != std::string_view::npos;
      whole = ends ? begin + static_cast<off_t>(end) + 1 : begin;
    }
    ::close(lines);
    if (whole == file.st_size) return;
    if (detail::uninterrupted([&] { return ::ftruncate(file_, whole); }) != 0) refuse("cannot cut the torn line off");
  }
  /// Renames the open file if there is anything in it, and closes it then. A link goes on to name the log.
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

}  // namespace plait
