// Makes a page about a training run from its log: one HTML file with numbers and pictures, which needs no other files.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "median.hpp"
#include "number_text.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/io/mapped_file.hpp"
#include "train_llama/observe/pictures.hpp"
#include "train_llama/observe/run_log.hpp"

namespace plait {

/// Returns the losses of a log's steps up to `last`, and the held-out losses, which have marks.
inline std::vector<curve_series> loss_curves(const run_log& log,
                                             std::int64_t last = std::numeric_limits<std::int64_t>::max()) {
  std::vector<curve_series> curves{{"training", {}}, {"held out", {}, true}};
  for (const logged_step& s : log.steps)
    if (s.numbers && s.step <= last) curves[0].points.push_back({static_cast<double>(s.step), s.numbers->loss});
  for (const auto& [step, loss] : log.held_out)
    if (step <= last) curves[1].points.push_back({static_cast<double>(step), loss});
  return curves;
}

namespace detail {

/// The style: light and dark colours as in the pictures, and up to three pictures in a row.
inline constexpr std::string_view report_style = R"(
:root{color-scheme:light dark}
body{margin:0 auto;padding:16px;max-width:1320px;font:15px/1.45 Helvetica,Arial,"DejaVu Sans",sans-serif;color:#222;background:#f4f5f7}
h1{font-size:22px;margin:4px 0 12px}h2{font-size:15px;margin:0 0 8px}p{margin:8px 0 0;color:#555}
section{background:#fff;border-radius:6px;padding:12px;overflow-x:auto}section>svg{display:block}
.all{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,minmax(min(100%,390px),1fr))}
.picture{padding:0}.picture>svg{width:100%;height:auto}.whole{grid-column:1/-1}.wide>svg{min-width:760px}
@media(min-width:1240px){.wide{grid-column:span 2}}@media not (min-width:1240px){.wide{grid-column:1/-1}}
dl{display:grid;gap:8px 20px;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));margin:0}
dt{color:#555;font-size:13px}dd{margin:0;font-size:19px;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%}th,td{text-align:right;padding:3px 0 3px 10px}th{color:#555;font-weight:normal}
th:first-child,td:first-child{text-align:left;padding-left:0}
.bar{display:flex;height:8px;margin-bottom:6px;background:#e7e9ec}.bar i{background:#2f9a55}.bar b{background:#d1571b}
.bar u{background:#2f7fc4}.options{columns:300px;font-size:13px;overflow-wrap:anywhere}.options span{color:#555}
@media(prefers-color-scheme:dark){body{color:#e8eaed;background:#0c0e11}section{background:#15181c}.bar{background:#2b3036}
p,dt,th,.options span{color:#a9b0b8}}
)";

class report_writer {
 public:
  explicit report_writer(const run_log& log) : log_(log) {
    for (const logged_step& s : log.steps)
      if (s.numbers) steps_.push_back(&s);
    for (const logged_step* s : steps_)
      for (const axis_communication& c : s->numbers->communication)
        if (std::find(axes_.begin(), axes_.end(), c.axes) == axes_.end()) axes_.push_back(c.axes);
  }

  std::string page() {
    const std::string title = xml_text(this->title());
    out_ = fmt::format(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
        "content=\"width=device-width\">\n<title>{0}</title>\n<style>{1}</style>\n<h1>{0}</h1>\n<div class=\"all\">\n",
        title, report_style);
    facts();
    charts();
    communication();
    memory();
    if (!log_.timeline.empty()) section("picture wide", "", log_.timeline);
    options();
    return out_ + "</div>\n</html>\n";
  }

 private:
  static constexpr double nan = std::numeric_limits<double>::quiet_NaN();

  void section(std::string_view kind, std::string_view title, std::string_view content) {
    out_ += fmt::format("<section class=\"{}\">\n", kind);
    if (!title.empty()) out_ += fmt::format("<h2>{}</h2>\n", title);
    out_ += fmt::format("{}</section>\n", content);
  }

  std::string title() const {
    const auto option = [&](std::string_view name) {
      const auto found =
          std::find_if(log_.options.begin(), log_.options.end(), [&](auto& o) { return o.first == name; });
      return found == log_.options.end() ? std::string() : found->second;
    };
    if (option("--model").empty()) return "A training run";
    return fmt::format("{} on {}", option("--model"), option("--mesh"));
  }

  void facts() {
    std::string list;
    const auto fact = [&](std::string_view name, const std::string& value) {
      list += fmt::format("<div><dt>{}<dd>{}</div>\n", name, value);
    };
    std::vector<double> rates;
    for (const logged_step* s : steps_)
      if (std::isfinite(s->numbers->tokens_per_second)) rates.push_back(s->numbers->tokens_per_second);
    if (!steps_.empty()) {
      fact("steps", fmt::format("{}", steps_.back()->step));
      fact("last loss", fmt::format("{:.4f}", steps_.back()->numbers->loss));
    }
    if (!log_.held_out.empty())
      fact(fmt::format("held-out loss, step {}", log_.held_out.back().first),
           fmt::format("{:.4f}", log_.held_out.back().second));
    if (!rates.empty()) fact("median rate", format_rate(median(rates)) + " tokens/s");
    if (std::isfinite(log_.peak_bytes)) fact("peak memory of a rank", size_text(log_.peak_bytes));
    section("whole", "", fmt::format("<dl>\n{}</dl>\n", list));
  }

  /// Returns one curve over the steps. `value` returns its value for a step.
  template <class Value>
  curve_series series(std::string name, Value&& value) const {
    curve_series out{std::move(name), {}};
    for (const logged_step* s : steps_) out.points.push_back({static_cast<double>(s->step), value(*s->numbers)});
    return out;
  }
  /// Draws the curves that have points.
  void chart(std::string title, std::vector<curve_series> curves) {
    std::erase_if(curves, [](const curve_series& c) {
      return std::none_of(c.points.begin(), c.points.end(), [](const curve_point& p) { return std::isfinite(p.y); });
    });
    if (curves.empty()) return;
    section("picture", "",
            curve_svg(
                {.title = std::move(title), .y_label = "", .series = std::move(curves), .width = 410, .height = 290}));
  }
  void charts() {
    chart("Loss (nats per token)", loss_curves(log_));
    chart("Gradient norm before clipping", {series("norm", [](const step_record& n) { return n.grad_norm; })});
    chart("Learning rate", {series("rate", [](const step_record& n) { return n.lr; })});
    chart("Tokens per second", {series("all ranks", [](const step_record& n) { return n.tokens_per_second; })});
    chart("Most chosen expert over the mean",
          {series("worst layer", [](const step_record& n) { return n.expert_imbalance; })});
    std::vector<curve_series> exposed;
    for (const std::string& axes : axes_)
      exposed.push_back(series(axes, [&](const step_record& n) { return 1e3 * times_over(n, axes).waited; }));
    chart("Exposed communication (ms a step)", std::move(exposed));
  }

  static axis_communication times_over(const step_record& n, const std::string& axes) {
    for (const axis_communication& c : n.communication)
      if (c.axes == axes) return c;
    return {axes, nan, nan};
  }

  /// Writes the means of each set of axes over the steps that have measured it.
  void communication() {
    std::vector<axis_communication> means;
    double longest = 0;
    for (const std::string& axes : axes_) {
      axis_communication mean{axes};
      double count = 0;
      for (const logged_step* s : steps_)
        if (const axis_communication c = times_over(*s->numbers, axes); std::isfinite(c.seconds + c.waited))
          mean.seconds += c.seconds, mean.waited += c.waited, ++count;
      if (count == 0) continue;
      mean.seconds /= count, mean.waited /= count;
      longest = std::max(longest, mean.seconds);
      means.push_back(mean);
    }
    if (means.empty()) return;
    std::string rows = "<table>\n<tr><th>axes<th>hidden<th>exposed<th>share hidden\n";
    for (const axis_communication& c : means)
      rows += fmt::format(
          "<tr><td>{}<td>{:.3g} ms<td>{:.3g} ms<td>{:.1f} %\n<tr><td colspan=\"4\"><div class=\"bar\"><i "
          "style=\"width:{:.1f}%\"></i><b style=\"width:{:.1f}%\"></b></div>\n",
          xml_text(c.axes), 1e3 * (c.seconds - c.waited), 1e3 * c.waited, 100 * c.hidden(),
          100 * (c.seconds - c.waited) / longest, 100 * c.waited / longest);
    section("", "Communication of a step, mean",
            rows + "</table>\n<p>green: hidden; orange: exposed, for which ranks wait</p>\n");
  }

  void memory() {
    double all = 0;
    for (const auto& [part, bytes] : log_.memory) all += bytes;
    if (!(all > 0)) return;
    std::string rows = "<table>\n";
    for (const auto& [part, bytes] : log_.memory)
      rows += fmt::format(
          "<tr><td>{}<td>{}\n<tr><td colspan=\"2\"><div class=\"bar\"><u style=\"width:{:.1f}%\"></u></div>\n",
          xml_text(part), size_text(bytes), 100 * bytes / all);
    rows += fmt::format("<tr><td>in all<td>{}\n</table>\n", size_text(all));
    if (std::isfinite(log_.peak_bytes)) rows += fmt::format("<p>measured peak: {}</p>\n", size_text(log_.peak_bytes));
    section("", "Planned memory of a rank", rows);
  }

  void options() {
    std::string list;
    for (const auto& [name, value] : log_.options)
      list += fmt::format("<div><span>{}</span> {}</div>\n", xml_text(name), xml_text(value));
    if (!list.empty()) section("whole", "Options", fmt::format("<div class=\"options\">\n{}</div>\n", list));
  }

  const run_log& log_;
  std::vector<const logged_step*> steps_;  ///< the steps that have numbers
  std::vector<std::string> axes_;          ///< the axes with communication, in the order of the log
  std::string out_;
};

}  // namespace detail

/// Returns the page of a run. Parts that need missing data are left out.
inline std::string report_page(const run_log& log) { return detail::report_writer(log).page(); }

/// Writes the page of the run whose log is in the file `log`. Throws `error` with `log_flag` and the line if the file
/// is not a log, and with `page_flag` if the page cannot be written.
inline void write_report(const std::string& log, const std::string& page, const std::string& log_flag,
                         const std::string& page_flag) {
  const std::string text = read_file(log, log_flag, std::numeric_limits<std::size_t>::max());
  write_file_atomically(page, report_page(read_run_log(text, cat({log_flag, ": '", log, "'"}))), page_flag);
}

}  // namespace plait
