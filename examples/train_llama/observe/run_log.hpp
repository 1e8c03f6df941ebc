// Reads the log of a training run: the numbers and hashes of each step, in any file that json_log.hpp has written. It
// needs nlohmann/json.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/io/json_tree.hpp"

namespace plait {

/// Hashes of parameters by their names, in the order of the model.
using named_hashes = std::vector<std::pair<std::string, std::uint64_t>>;

/// The numbers of a step that do not depend on the time it took; NaN where the log has null.
struct logged_numbers {
  double loss = 0, grad_norm = 0, lr = 0;
};

/// A step as a log has it. The hashes are those of the state after it; before the first step, they are all there is.
struct logged_step {
  std::int64_t step = 0;
  std::optional<logged_numbers> numbers{};
  named_hashes weights{}, gradients{};  ///< empty: not hashed
};

/// A run as its log has it.
struct run_log {
  std::vector<logged_step> steps;      ///< in ascending order
  std::vector<std::int64_t> repeated;  ///< steps that were made again, by a run that went back; the last ones count
  std::vector<std::int64_t> hashed_anew{};  ///< steps whose weights were hashed again, and were others by then
  bool cut_short = false;                   ///< whether the last line is not whole, as a killed run may leave it
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
  /// Lines of other kinds say nothing of a step.
  void take(const json& line) {
    if (!line.is_object()) fail({where_, ": it is ", line.type_name(), "; legal is an object on each line"});
    if (const auto hashes = line.find("hashes"); hashes != line.end()) return take_hashes(*hashes);
    if (line.contains("step")) take_numbers(line);
  }
  void take_numbers(const json& line) {
    const std::int64_t step = step_of(line);
    if (!log_.steps.empty() && log_.steps.back().step >= step && begun_) {  // the run went back
      const auto first = std::find_if(log_.steps.begin(), log_.steps.end(), [&](auto& s) { return s.step >= step; });
      for (auto at = first; at != log_.steps.end(); ++at)
        if (at->numbers) log_.repeated.push_back(at->step);
      log_.steps.erase(first, log_.steps.end());
    }
    begun_ = true;
    at(step).numbers = logged_numbers{number(line, "loss"), number(line, "grad_norm"), number(line, "lr")};
  }
  void take_hashes(const json& line) {
    if (!line.is_object()) fail({where_, ": hashes is ", line.type_name(), "; legal is an object"});
    const std::int64_t step = step_of(line);
    logged_step& to = at(step);
    const named_hashes before = std::exchange(to.weights, hashes_in(line, "weights"));
    if (to.weights.empty()) fail({where_, ": hashes has no weights"});
    if (!before.empty() && before != to.weights) log_.hashed_anew.push_back(step);
    if (line.contains("gradients")) to.gradients = hashes_in(line, "gradients");
  }

  /// The entry of a step, which is made where there is none.
  logged_step& at(std::int64_t step) {
    const auto place = std::lower_bound(log_.steps.begin(), log_.steps.end(), step,
                                        [](const logged_step& s, std::int64_t n) { return s.step < n; });
    if (place != log_.steps.end() && place->step == step) return *place;
    return *log_.steps.insert(place, {.step = step});
  }

  std::int64_t step_of(const json& line) const {
    const auto found = line.find("step");
    if (found == line.end() || !found->is_number_integer() || found->get<std::int64_t>() < 0)
      fail({where_, ": step is ", found == line.end() ? "missing" : found->dump(), "; legal are integers from 0 on"});
    return found->get<std::int64_t>();
  }
  double number(const json& line, const char* key) const {
    const auto found = line.find(key);
    if (found != line.end() && found->is_null()) return std::numeric_limits<double>::quiet_NaN();
    if (found == line.end() || !found->is_number())
      fail(
          {where_, ": ", key, " is ", found == line.end() ? "missing" : found->dump(), "; legal are numbers and null"});
    return found->get<double>();
  }
  named_hashes hashes_in(const json& line, const char* key) const {
    const auto found = line.find(key);
    if (found == line.end() || !found->is_object())
      fail({where_, ": ", key, " is ", found == line.end() ? "missing" : found->dump(),
            "; legal is an object of hashes by parameter"});
    named_hashes out;
    for (const auto& [name, hash] : found->items()) {
      const std::string digits = hash.is_string() ? hash.get<std::string>() : std::string();
      std::uint64_t value = 0;
      const auto [end, fault] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
      if (digits.size() != 16 || fault != std::errc() || end != digits.data() + digits.size())
        fail({where_, ": the hash of '", name, "' is ", hash.dump(), "; legal are 16 hexadecimal digits"});
      out.emplace_back(name, value);
    }
    return out;
  }

  const std::string& source_;
  std::string where_;
  run_log log_{};
  bool begun_ = false;  ///< whether a line with numbers has been met
};

}  // namespace detail

/// Returns the run whose log is `text`. Where a run went back to an earlier step, because it was resumed into the same
/// log, its last word on each step counts. Throws `error`, its text starting with `source`, for a line that is no JSON
/// object or has not what it must have; of the last line, only if its end was written.
inline run_log read_run_log(std::string_view text, const std::string& source) {
  return detail::run_log_reader(source).read(text);
}

}  // namespace plait
