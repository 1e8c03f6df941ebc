// Draws line charts and timelines of pipelines as SVG, and makes traces for chrome://tracing and ui.perfetto.dev.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/io/json.hpp"
#include "plait/schedule/schedule.hpp"
#include "plait/schedule/verify.hpp"
#include "train_llama/observe/timeline.hpp"

namespace plait {

struct curve_point {
  double x = 0;
  double y = 0;
};

struct curve_series {
  std::string name;
  std::vector<curve_point> points;  ///< by rising x; points that are not finite (or beyond 1e30) leave a gap
  bool marks = false;               ///< whether each point has a mark
};

/// A horizontal line for comparison, for instance the text's unigram entropy.
struct curve_reference {
  std::string name;
  double y = 0;
};

struct curve_chart {
  std::string title = "Training loss";
  std::string x_label = "step";
  std::string y_label = "loss (nats per token)";
  std::vector<curve_series> series{};  ///< drawn in this order; at most four have different colours
  std::optional<curve_reference> reference{};
  double width = 860, height = 480;
};

namespace detail {

/// About `count` ticks in [low, high], at multiples of 1, 2 or 5 times a power of ten.
struct curve_ticks {
  double step = 1;
  int digits = 0;  // after the point
  std::vector<double> at;

  curve_ticks(double low, double high, int count, bool whole) {
    const double raw = (high - low) / count;
    const double power = std::pow(10.0, std::floor(std::log10(raw)));
    const double lead = raw / power;
    step = power * (lead <= 1.0 ? 1 : lead <= 2.0 ? 2 : lead <= 5.0 ? 5 : 10);
    if (whole) step = std::max(1.0, step);
    digits = std::clamp(static_cast<int>(std::ceil(-std::log10(step) - 1e-9)), 0, 9);
    const double first = std::ceil(low / step - 1e-9);
    for (int k = 0; k <= 2 * count + 2 && (first + k) * step <= high + 1e-9 * step; ++k)
      at.push_back((first + k) * step);
  }
};

/// Returns a text escaped for XML or HTML. Control characters other than ends of lines become blanks.
inline std::string xml_text(std::string_view text) {
  std::string out;
  for (const char c : text) {
    constexpr std::string_view special = "&<>\"";
    constexpr std::array<const char*, 4> escaped{"&amp;", "&lt;", "&gt;", "&quot;"};
    if (const std::size_t at = special.find(c); at != special.npos)
      out += escaped[at];
    else
      out += static_cast<unsigned char>(c) < 0x20 && c != '\n' ? ' ' : c;
  }
  return out;
}

/// Returns a value for a legend: three digits after the point, or as many as are useful.
inline std::string value_text(double value) {
  const double size = std::abs(value);
  if (size == 0 || (size >= 0.1 && size < 1000)) return fmt::format("{:.3f}", value);
  return size >= 1000 && size < 1e7 ? fmt::format("{:.0f}", value) : fmt::format("{:.3g}", value);
}
/// Returns a tick's label. Very large and small numbers have an exponent.
inline std::string tick_text(double value, const curve_ticks& ticks) {
  if (std::abs(value) < ticks.step * 1e-6) return "0";
  const double largest = std::max(std::abs(ticks.at.front()), std::abs(ticks.at.back()));
  return largest < 1e6 && ticks.digits < 6 ? fmt::format("{:.{}f}", value, ticks.digits) : fmt::format("{:g}", value);
}

/// The text of an SVG image; coordinates are its user units.
class svg_image {
 public:
  /// Begins with a background and the colours of texts and lines: light, or dark in dark viewers. `rules` are more
  /// style rules, and `dark_rules` those of dark viewers.
  svg_image(double width, double height, std::string_view rules = "", std::string_view dark_rules = "") {
    add(R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" height="{1:.0f}" )"
        "font-family=\"Helvetica, Arial, DejaVu Sans, sans-serif\" font-size=\"12\">\n<style>"
        ".ground{{fill:#fff}}.t{{fill:#222}}.s{{fill:#555}}.tick{{stroke:#999}}.grid{{stroke:#e7e9ec}}{2}"
        "@media (prefers-color-scheme:dark){{.ground{{fill:#15181c}}.t{{fill:#e8eaed}}.s{{fill:#a9b0b8}}"
        ".tick{{stroke:#717981}}.grid{{stroke:#2b3036}}{3}}}</style>\n"
        "<rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n",
        width, height, rules, dark_rules);
  }
  template <class... Args>
  void add(fmt::format_string<Args...> what, Args&&... args) {
    fmt::format_to(std::back_inserter(text_), what, std::forward<Args>(args)...);
  }
  void text(double x, double y, std::string_view what, std::string_view attributes) {
    add("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, attributes, xml_text(what));
  }
  void line(double x1, double y1, double x2, double y2, std::string_view attributes) {
    add("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", x1, y1, x2, y2, attributes);
  }
  void rectangle(double x, double y, double w, double h, std::string_view kind) {
    add("<rect class=\"{}\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\"/>\n", kind, x, y, w, h);
  }
  /// Ends the image and returns it.
  std::string end() { return std::move(text_) + "</svg>\n"; }

 private:
  std::string text_;
};

/// Draws a chart; coordinates are SVG user units.
class curve_drawing {
 public:
  explicit curve_drawing(const curve_chart& chart) : chart_(chart) { find_range(); }

  std::string svg() {
    out_.text(12, 26, chart_.title, "class=\"t\" font-size=\"15\" font-weight=\"bold\"");
    axes();
    if (!any_) out_.text((left + right_) / 2, (top + bottom_) / 2, "no data", "class=\"s\" text-anchor=\"middle\"");
    if (any_) reference();
    for (std::size_t i = 0; i < chart_.series.size(); ++i) curve(chart_.series[i], colours[i % colours.size()]);
    legend();
    return out_.end();
  }

 private:
  static constexpr double left = 66, top = 78;
  static constexpr std::array<const char*, 4> colours{"#2f7fc4", "#d1571b", "#2f9a55", "#8f63bd"};  // visible on both
  static constexpr const char* reference_colour = "#888";
  static constexpr std::size_t crowd = 380;  // a series of more points is drawn in columns of two units

  // Values beyond 1e30 are left out: differences of such values would overflow.
  static bool finite(double v) { return std::abs(v) < 1e30; }
  static bool finite(const curve_point& p) { return finite(p.x) && finite(p.y); }
  double x_of(double x) const { return left + (x - x_low_) / (x_high_ - x_low_) * (right_ - left); }
  double y_of(double y) const { return bottom_ - (y - y_low_) / (y_high_ - y_low_) * (bottom_ - top); }

  void find_range() {
    double x0 = std::numeric_limits<double>::infinity(), x1 = -x0, y0 = x0, y1 = -x0;
    for (const curve_series& series : chart_.series) {
      for (const curve_point& p : series.points) {
        if (!finite(p)) continue;
        any_ = true;
        x0 = std::min(x0, p.x), x1 = std::max(x1, p.x);
        y0 = std::min(y0, p.y), y1 = std::max(y1, p.y);
      }
    }
    if (!any_) return;
    if (chart_.reference && finite(chart_.reference->y)) {
      y0 = std::min(y0, chart_.reference->y), y1 = std::max(y1, chart_.reference->y);
    }
    if (x1 - x0 <= 1e-9 * std::abs(x1)) {
      const double reach = std::max(1.0, 1e-6 * std::abs(x1));
      x0 -= reach, x1 += reach;
    }
    const double margin = y1 - y0 > 1e-9 * std::abs(y1) ? 0.06 * (y1 - y0) : std::max(0.5, 0.1 * std::abs(y0));
    x_low_ = x0, x_high_ = x1;
    y_low_ = y0 >= 0 ? std::max(0.0, y0 - margin) : y0 - margin;
    y_high_ = y1 + margin;
  }

  void axes() {
    const curve_ticks x(x_low_, x_high_, static_cast<int>(chart_.width / 90), true);
    const curve_ticks y(y_low_, y_high_, static_cast<int>(chart_.height / 60), false);
    for (double value : y.at) {
      out_.line(left, y_of(value), right_, y_of(value), "class=\"grid\"");
      out_.text(left - 7, y_of(value) + 4, tick_text(value, y), "class=\"s\" text-anchor=\"end\"");
    }
    for (double value : x.at) {
      out_.line(x_of(value), top, x_of(value), bottom_ + 5, "class=\"grid\"");
      out_.text(x_of(value), bottom_ + 18, tick_text(value, x), "class=\"s\" text-anchor=\"middle\"");
    }
    out_.line(left, top, left, bottom_, "class=\"tick\"");
    out_.line(left, bottom_, right_, bottom_, "class=\"tick\"");
    out_.text((left + right_) / 2, chart_.height - 10, chart_.x_label, "class=\"s\" text-anchor=\"middle\"");
    const double middle = (top + bottom_) / 2;
    if (!chart_.y_label.empty())
      out_.text(16, middle, chart_.y_label,
                fmt::format("class=\"s\" text-anchor=\"middle\" transform=\"rotate(-90 16 {:.1f})\"", middle));
  }

  void reference() {
    if (!chart_.reference || !finite(chart_.reference->y)) return;
    const double y = y_of(chart_.reference->y);
    out_.line(left, y, right_, y,
              fmt::format("stroke=\"{}\" stroke-width=\"1.5\" stroke-dasharray=\"7 5\"", reference_colour));
  }

  void mark(double x, double y, std::string_view colour) {
    out_.add("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"{}\"/>\n", x, y, colour);
  }

  /// Draws a polyline for each run of finite points. Draws a mark for a run of one point, and with `marks` for each
  /// point.
  void polyline(const std::vector<curve_point>& points, std::string_view colour, bool marks) {
    for (std::size_t begin = 0; begin < points.size();) {
      if (!finite(points[begin])) {
        ++begin;
        continue;
      }
      std::size_t end = begin;
      std::string path;
      for (; end < points.size() && finite(points[end]); ++end)
        path += fmt::format("{}{:.1f} {:.1f}", end == begin ? "M" : "L", x_of(points[end].x), y_of(points[end].y));
      if (end - begin > 1)
        out_.add("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\" stroke-linejoin=\"round\"/>\n", path,
                 colour);
      for (std::size_t i = begin; i < end && (marks || end - begin == 1); ++i)
        mark(x_of(points[i].x), y_of(points[i].y), colour);
      begin = end;
    }
  }

  void curve(const curve_series& series, std::string_view colour) {
    if (series.points.size() <= crowd) return polyline(series.points, colour, series.marks);
    // Columns of two units: a pale band from the least to the largest value, and a line through the means.
    const auto columns = static_cast<std::size_t>((right_ - left) / 2);
    struct column {
      double x = 0, y = 0, low = std::numeric_limits<double>::infinity(), high = -low;
      std::size_t count = 0;
    };
    std::vector<column> sums(columns);
    for (const curve_point& p : series.points) {
      if (!finite(p)) continue;
      const double place = (p.x - x_low_) / (x_high_ - x_low_) * static_cast<double>(columns);
      column& c = sums[std::min(columns - 1, static_cast<std::size_t>(place))];
      c.x += p.x, c.y += p.y, ++c.count;
      c.low = std::min(c.low, p.y), c.high = std::max(c.high, p.y);
    }
    std::string upper, lower;
    std::vector<curve_point> means;
    for (const column& c : sums) {
      if (c.count == 0) continue;
      const double n = static_cast<double>(c.count);
      means.push_back({c.x / n, c.y / n});
      const double x = x_of(means.back().x);
      upper += fmt::format("{}{:.1f} {:.1f}", upper.empty() ? "M" : "L", x, y_of(c.high));
      lower = fmt::format("L{:.1f} {:.1f}{}", x, y_of(c.low), lower);
    }
    if (means.size() > 1) out_.add("<path d=\"{}{}Z\" fill=\"{}\" fill-opacity=\"0.22\"/>\n", upper, lower, colour);
    polyline(means, colour, series.marks);
  }

  /// Draws under the title a stroke and the name of each curve with its last value, then the reference.
  void legend() {
    double x = 12, y = 44;
    const auto item = [&](const std::string& name, std::string_view colour, std::string_view dash, bool marks) {
      const double length = 26 + 6.4 * static_cast<double>(name.size());  // 6.4: about the mean width of a letter
      if (x > 12 && x + length > chart_.width) x = 12, y += 16;
      out_.line(x, y, x + 20, y, fmt::format("stroke=\"{}\" stroke-width=\"2.5\" {}", colour, dash));
      if (marks) mark(x + 10, y, colour);
      out_.text(x + 26, y + 4, name, "class=\"t\"");
      x += length + 16;
    };
    for (std::size_t i = 0; i < chart_.series.size(); ++i) {
      const auto& points = chart_.series[i].points;
      if (points.empty()) continue;
      const auto last = std::find_if(points.rbegin(), points.rend(), [](const curve_point& p) { return finite(p); });
      const std::string value = last == points.rend() ? "" : fmt::format(" (last {})", value_text(last->y));
      item(chart_.series[i].name + value, colours[i % colours.size()], "", chart_.series[i].marks);
    }
    if (chart_.reference && finite(chart_.reference->y))
      item(fmt::format("{} {}", chart_.reference->name, value_text(chart_.reference->y)), reference_colour,
           "stroke-dasharray=\"7 4\"", false);
  }

  const curve_chart& chart_;
  const double right_ = chart_.width - 24, bottom_ = chart_.height - 50;
  svg_image out_{chart_.width, chart_.height};
  bool any_ = false;
  double x_low_ = 0, x_high_ = 10, y_low_ = 0, y_high_ = 1;
};

}  // namespace detail

/// Returns a line chart as a standalone SVG image. Without any finite point it says "no data". A series of more than
/// 380 points is drawn as its range and mean per column, so the size of the image is bounded.
inline std::string curve_svg(const curve_chart& chart) { return detail::curve_drawing(chart).svg(); }

namespace detail {

/// Draws timelines one under the other; coordinates are SVG user units.
class pipeline_drawing {
 public:
  explicit pipeline_drawing(const std::vector<pipeline_timeline>& all)
      : all_(all), out_(width, height(), colours(), ".idle{fill:#2b3036}") {
    std::size_t actions = 0;
    for (const pipeline_timeline& t : all) {
      longest_ = std::max(longest_, t.end() - t.begin());
      for (const auto& mine : t.ranks) actions += mine.size();
      for (const auto& mine : t.beside) actions += mine.size();
    }
    tooltips_ = actions <= 5000;
  }

  std::string svg() {
    double y = margin;
    for (const pipeline_timeline& t : all_) {
      panel(t, y);
      y += panel_height(t);
    }
    legend(y + 8);
    return out_.end();
  }

 private:
  static constexpr double width = 960, left = 64, right = 826, row = 24, gap = 4, head = 50, foot = 34,
                          legend_height = 40, lane = 9, margin = 12;

  double height() const {
    double sum = margin + legend_height;
    for (const pipeline_timeline& t : all_) sum += panel_height(t);
    return sum;
  }
  static double panel_height(const pipeline_timeline& t) {
    return head + static_cast<double>(t.ranks.size()) * rank_height(t) + foot;
  }
  /// Returns the height of a rank's passes and of the lanes under them.
  static double rank_height(const pipeline_timeline& t) {
    return row + gap + static_cast<double>(lanes_of(t).size()) * (lane + 1);
  }

  /// The kinds of entries in the lanes under the passes. All reductions are one kind. The norm is in the lane of
  /// updates.
  struct lane_kind {
    step_op op, lane;
    const char *name, *colour;
  };
  static constexpr std::array<lane_kind, 4> lane_kinds{{{step_op::gather, step_op::gather, "gather", "#9668ca"},
                                                        {step_op::reduce, step_op::reduce, "reduction", "#d03961"},
                                                        {step_op::norm, step_op::update, "norm", "#757f8a"},
                                                        {step_op::update, step_op::update, "update", "#d1b21a"}}};
  /// Returns the kind of an operation; null if no lane shows it.
  static const lane_kind* kind_of(step_op op) {
    const bool reduces = op == step_op::reduce_copies || op == step_op::reduce_ties;
    for (const lane_kind& kind : lane_kinds)
      if (kind.op == (reduces ? step_op::reduce : op)) return &kind;
    return nullptr;
  }
  static bool shows(const pipeline_timeline& t, const lane_kind& kind) {
    for (const auto& mine : t.beside)
      for (const timed_entry& e : mine)
        if (kind_of(e.entry.op) == &kind) return true;
    return false;
  }
  bool shows(const lane_kind& kind) const {
    return std::any_of(all_.begin(), all_.end(), [&](const auto& t) { return shows(t, kind); });
  }
  static std::vector<step_op> lanes_of(const pipeline_timeline& t) {
    std::vector<step_op> lanes;
    for (const lane_kind& kind : lane_kinds)
      if (shows(t, kind) && (lanes.empty() || lanes.back() != kind.lane)) lanes.push_back(kind.lane);
    return lanes;
  }

  /// Returns a colour: one hue for each kind, from deep for the first chunk to pale for the last.
  static std::string colour(action_kind kind, int chunk, int chunks) {
    using rgb = std::array<double, 3>;
    constexpr rgb deep_and_pale[4][2] = {{{37, 93, 157}, {123, 170, 224}},
                                         {{43, 115, 67}, {107, 199, 138}},
                                         {{34, 119, 116}, {89, 207, 203}},
                                         {{207, 121, 23}, {242, 192, 136}}};
    const auto& [deep, pale] = deep_and_pale[static_cast<std::size_t>(kind)];
    const double share = chunks > 1 ? static_cast<double>(chunk) / (chunks - 1) : 0;
    std::string text = "#";
    for (std::size_t i = 0; i < 3; ++i)
      text += fmt::format("{:02x}", std::lround(deep[i] + share * (pale[i] - deep[i])));
    return text;
  }
  static bool is_pale(action_kind kind, int chunk, int chunks) {
    return chunks > 1 && 2 * chunk > chunks - 1 - (kind == action_kind::weight_backward ? 1 : 0);
  }

  /// Returns a style class for each colour in use, because cells are most of the image.
  std::string colours() const {
    std::string rules =
        ".idle{fill:#e7e9ec}.on{fill:#fff;font-size:10px;text-anchor:middle}"
        ".op{fill:#14181d;font-size:10px;text-anchor:middle}";
    for (const pipeline_timeline& t : all_)
      for (int kind = 0; kind < 4; ++kind)
        for (int chunk = 0; chunk < t.shape.chunks; ++chunk) {
          const auto k = static_cast<action_kind>(kind);
          const std::string rule =
              fmt::format(".{}{{fill:{}}}", class_of(k, chunk, t.shape.chunks), colour(k, chunk, t.shape.chunks));
          if (rules.find(rule) == rules.npos && uses(t, k)) rules += rule;
        }
    for (const lane_kind& kind : lane_kinds)
      if (shows(kind)) rules += fmt::format(".{}{{fill:{}}}", kind.name, kind.colour);
    return rules;
  }
  static bool uses(const pipeline_timeline& t, action_kind kind) {
    for (const auto& mine : t.ranks)
      for (const timed_action& a : mine)
        if (a.action.kind == kind) return true;
    return false;
  }
  static std::string class_of(action_kind kind, int chunk, int chunks) {
    return fmt::format("{}{}-{}", letter(kind), chunk, chunks);
  }
  static std::string percent(double share) { return fmt::format("{:.1f} %", 100 * share); }
  static std::string number(double value) { return fmt::format("{:.4g}", value); }

  void panel(const pipeline_timeline& t, double y) {
    const double begin = t.begin(), length = longest_;
    const double scale = length > 0 ? (right - left) / length : 0;
    const auto x_of = [&](double time) { return left + (time - begin) * scale; };
    out_.text(12, y + 17, t.title, "class=\"t\" font-size=\"15\" font-weight=\"bold\"");
    out_.text(12, y + 36,
              fmt::format("{} idle, {} within a rank's own span; length {}{}{}", percent(t.idle()),
                          percent(t.span_idle()), number(t.end() - begin), t.unit.empty() ? "" : " ", t.unit),
              "class=\"s\"");
    out_.text(right + 62, y + head - 5, "idle", "class=\"s\" text-anchor=\"end\" font-size=\"11\"");
    out_.text(width - 12, y + head - 5, "peak", "class=\"s\" text-anchor=\"end\" font-size=\"11\"");
    find_numbered(t, scale);
    double top = y + head;
    for (std::size_t r = 0; r < t.ranks.size(); ++r, top += rank_height(t)) {
      out_.text(left - 8, top + 16, fmt::format("rank {}", r), "class=\"t\" text-anchor=\"end\"");
      out_.rectangle(left, top, x_of(t.end()) - left, row, "idle");
      for (const timed_action& a : t.ranks[r]) cell(t, static_cast<int>(r), a, x_of(a.start), x_of(a.end), top);
      std::vector<action> order;
      for (const timed_action& a : t.ranks[r])
        if (order.empty() || !(order.back() == a.action)) order.push_back(a.action);  // an action in parts counts once
      if (r < t.beside.size()) lanes(t, t.beside[r], x_of, top + row + 1);
      out_.text(right + 62, top + 16, percent(t.idle(r)), "class=\"s\" text-anchor=\"end\"");
      out_.text(width - 12, top + 16, number(static_cast<double>(peak_chunks(order)) / t.shape.chunks),
                "class=\"s\" text-anchor=\"end\"");
    }
    if (length <= 0) return;
    const curve_ticks ticks(0, length, 8, false);
    for (double at : ticks.at) {
      const double x = left + at * scale;
      out_.add("<path class=\"tick\" d=\"M{:.1f} {:.1f}v5\"/>\n", x, top - 1);
      out_.text(x, top + 15, tick_text(at, ticks), "class=\"s\" text-anchor=\"middle\" font-size=\"10\"");
    }
  }

  /// Draws the lanes of a rank, from `y` down.
  template <class Scale>
  void lanes(const pipeline_timeline& t, const std::vector<timed_entry>& beside, const Scale& x_of, double y) {
    for (const step_op op : lanes_of(t)) {
      const std::string_view name = op == step_op::gather ? "gathers" : op == step_op::reduce ? "reductions" : "update";
      out_.text(left - 8, y + lane - 1.5, name, "class=\"s\" text-anchor=\"end\" font-size=\"8\"");
      out_.rectangle(left, y, x_of(t.end()) - left, lane, "idle");
      for (const timed_entry& e : beside) {
        const lane_kind* const kind = kind_of(e.entry.op);
        if (kind == nullptr || kind->lane != op) continue;
        if (tooltips_)
          out_.add("<g><title>{}: {} to {}</title>", describe(e.entry), number(e.start - t.begin()),
                   number(e.end - t.begin()));
        const double from = x_of(e.start), to = x_of(e.end);
        out_.rectangle(from, y, std::max(0.4, to - from - (to - from > 3 ? 0.7 : 0)), lane, kind->name);
        if (tooltips_) out_.add("</g>\n");
      }
      y += lane + 1;
    }
  }

  static double number_width(const pipeline_timeline& t) {
    return 5.8 * static_cast<double>(std::to_string(t.shape.microbatches - 1).size()) + 2;
  }
  /// Decides for each kind whether its cells show the number of their microbatch: they do if the longest number fits in
  /// a cell of mean width. All cells of a kind show it or none, because a difference would look like a meaning. In
  /// whole steps, where actions may be in parts, small parts show none.
  void find_numbered(const pipeline_timeline& t, double scale) {
    const double need = number_width(t);
    for (std::size_t kind = 0; kind < 4; ++kind) {
      double width_sum = 0, cells = 0;
      for (const auto& mine : t.ranks)
        for (const timed_action& a : mine)
          if (a.action.kind == static_cast<action_kind>(kind)) width_sum += (a.end - a.start) * scale, ++cells;
      numbered_[kind] = cells > 0 && width_sum / cells >= need;
    }
  }

  void cell(const pipeline_timeline& t, int rank, const timed_action& a, double from, double to, double top) {
    const action_kind kind = a.action.kind;
    const int chunk = a.action.chunk, chunks = t.shape.chunks;
    const double line = to - from > 3 ? 0.7 : 0;  // a gap between neighbours, if they are wide enough
    if (tooltips_)
      out_.add("<g><title>{}, stage {}: {} to {}</title>", describe(a.action), t.shape.stage_of(rank, chunk),
               number(a.start - t.begin()), number(a.end - t.begin()));
    out_.rectangle(from, top, to - from - line, row, class_of(kind, chunk, chunks));
    if (numbered_[static_cast<std::size_t>(kind)] && (t.beside.empty() || to - from >= number_width(t)))
      out_.text((from + to - line) / 2, top + 15.6, std::to_string(a.action.microbatch),
                is_pale(kind, chunk, chunks) ? "class=\"op\"" : "class=\"on\"");
    if (tooltips_) out_.add("</g>\n");
  }

  /// Draws the legend of the kinds that occur; passes have the shades of their chunks.
  void legend(double y) {
    constexpr std::array<const char*, 4> names{"forward", "backward", "input gradient", "weight gradient"};
    const pipeline_timeline* widest = nullptr;
    for (const pipeline_timeline& t : all_)
      if (!widest || t.shape.chunks > widest->shape.chunks) widest = &t;
    if (!widest) return;
    const int chunks = std::min(widest->shape.chunks, 6);
    double x = 12;
    for (int k = 0; k < 4; ++k) {
      const auto kind = static_cast<action_kind>(k);
      if (std::none_of(all_.begin(), all_.end(), [&](const auto& t) { return uses(t, kind); })) continue;
      for (int chunk = 0; chunk < chunks; ++chunk, x += 14)
        out_.add("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"14\" height=\"14\" fill=\"{}\"/>\n", x, y,
                 colour(kind, chunk, chunks));
      out_.text(x + 6, y + 11.5, names[static_cast<std::size_t>(k)], "class=\"t\"");
      x += 6 + 6.3 * static_cast<double>(std::string_view(names[static_cast<std::size_t>(k)]).size()) + 18;
    }
    for (const lane_kind& kind : lane_kinds) {
      if (!shows(kind)) continue;
      out_.rectangle(x, y, 14, 14, kind.name);
      out_.text(x + 20, y + 11.5, kind.name, "class=\"t\"");
      x += 20 + 6.3 * static_cast<double>(std::string_view(kind.name).size()) + 12;
    }
    out_.rectangle(x, y, 14, 14, "idle");
    out_.text(x + 20, y + 11.5, "idle", "class=\"t\"");
    if (widest->shape.chunks > 1)
      out_.text(width - 12, y + 11.5, "first chunk dark, last pale", "class=\"s\" text-anchor=\"end\"");
  }

  const std::vector<pipeline_timeline>& all_;
  svg_image out_;
  double longest_ = 0;              // one scale of time for all timelines
  bool tooltips_ = true;            // the name and times of an action under the pointer
  std::array<bool, 4> numbered_{};  ///< whether cells have numbers in the present panel, by kind
};

}  // namespace detail

/// Returns timelines, simulated or measured, one under the other, as a standalone SVG image 960 wide. Each rank has a
/// row, and each kind and chunk a colour. Cells have the number of the microbatch if it fits. Idle time is the
/// background of a row. At the side are each rank's idle share and peak of activations (in microbatch-stages).
/// Timelines of whole steps have lanes under each row for gathers, for reductions, and for the norm and updates.
inline std::string pipeline_svg(const std::vector<pipeline_timeline>& timelines) {
  return detail::pipeline_drawing(timelines).svg();
}

/// An event of a rank, with its times: a computation, a collective, a message, a save.
struct trace_event {
  int rank = 0;
  int track = 0;              ///< one of the rank's tracks, for instance 0 for computation and 1 for communication
  std::string name{};         ///< "F3.1", "all_reduce"
  std::string category{};     ///< "compute", "collective", "p2p"; viewers filter by it
  std::int64_t start_ns = 0;  ///< by one clock for all ranks
  std::int64_t duration_ns = 0;
  std::uint64_t bytes = 0;     ///< moved; 0: not shown
  std::string axis{};          ///< mesh axis of a communication; empty: not shown
  std::uint64_t flow_out = 0;  ///< an arrow leads from the end of this event to the event with this number as `flow_in`
  std::uint64_t flow_in = 0;   ///< 0: no arrow. Each number is used by one pair of events.
};

/// The name of a track. A track without a name has its number as name.
struct trace_track {
  int rank = 0;
  int track = 0;
  std::string name;
};

/// Events of all ranks, in any order.
struct trace {
  std::vector<trace_event> events;
  std::vector<trace_track> tracks;
};

/// Returns the trace in the JSON format of chrome://tracing and ui.perfetto.dev: a process for each rank, a thread for
/// each of its tracks, a complete event for each event, and arrows. Times count from the earliest start.
inline std::string to_chrome_trace(const trace& t) {
  std::int64_t origin = std::numeric_limits<std::int64_t>::max();
  std::set<int> ranks;
  for (const trace_event& e : t.events) origin = std::min(origin, e.start_ns), ranks.insert(e.rank);
  std::vector<std::string> lines;
  const auto name = [&](const char* what, int rank, int track, const std::string& called, int order) {
    lines.push_back(fmt::format(R"({{"ph":"M","name":"{}_name","pid":{},"tid":{},"args":{{"name":{}}}}})", what, rank,
                                track, json_string(called)));
    lines.push_back(fmt::format(R"({{"ph":"M","name":"{}_sort_index","pid":{},"tid":{},"args":{{"sort_index":{}}}}})",
                                what, rank, track, order));
  };
  for (const int rank : ranks) name("process", rank, 0, fmt::format("rank {}", rank), rank);
  for (const trace_track& track : t.tracks) name("thread", track.rank, track.track, track.name, track.track);
  for (const trace_event& e : t.events) {
    const std::string place = fmt::format(R"("pid":{},"tid":{})", e.rank, e.track);
    const auto microseconds = [&](std::int64_t ns) { return fmt::format("{:.3f}", static_cast<double>(ns) / 1e3); };
    const std::string start = microseconds(e.start_ns - origin);
    std::vector<std::string> args;
    if (e.bytes > 0) args.push_back(fmt::format(R"("bytes":{})", e.bytes));
    if (!e.axis.empty()) args.push_back(fmt::format(R"("axis":{})", json_string(e.axis)));
    lines.push_back(fmt::format(R"({{"ph":"X","name":{},"cat":{},{},"ts":{},"dur":{},"args":{{{}}}}})",
                                json_string(e.name), json_string(e.category), place, start, microseconds(e.duration_ns),
                                fmt::join(args, ",")));
    // The ends of an arrow must be within their events, so the first is just before the event's end.
    const std::int64_t last = e.start_ns - origin + std::max<std::int64_t>(0, e.duration_ns - 1);
    if (e.flow_out != 0)
      lines.push_back(fmt::format(R"({{"ph":"s","name":"p2p","cat":"flow",{},"ts":{},"id":{}}})", place,
                                  microseconds(last), e.flow_out));
    if (e.flow_in != 0)
      lines.push_back(fmt::format(R"({{"ph":"f","bp":"e","name":"p2p","cat":"flow",{},"ts":{},"id":{}}})", place, start,
                                  e.flow_in));
  }
  return fmt::format("{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n{}\n]}}\n", fmt::join(lines, ",\n"));
}

/// Returns a pipeline's timeline as events, with arrows from actions that send a message to those that need it.
/// `ns_per_unit` is the length of the timeline's unit.
inline trace trace_of(const pipeline_timeline& timeline, double ns_per_unit) {
  trace t;
  const auto number_of = [&](const transfer& message) { return 1 + detail::slot_of(timeline.shape, message); };
  const double begin = timeline.begin();
  const auto ns = [&](double time) { return static_cast<std::int64_t>((time - begin) * ns_per_unit + 0.5); };
  for (std::size_t r = 0; r < timeline.ranks.size(); ++r) {
    const int rank = static_cast<int>(r);
    t.tracks.push_back({rank, 0, "pipeline"});
    for (const timed_action& a : timeline.ranks[r]) {
      trace_event e{.rank = rank,
                    .name = describe(a.action),
                    .category = a.action.kind == action_kind::forward ? "forward" : "backward",
                    .start_ns = ns(a.start),
                    .duration_ns = ns(a.end) - ns(a.start)};
      transfer message;
      if (detail::output_of(timeline.shape, rank, a.action, message)) e.flow_out = number_of(message);
      if (detail::input_of(timeline.shape, rank, a.action, message)) e.flow_in = number_of(message);
      t.events.push_back(std::move(e));
    }
  }
  return t;
}

}  // namespace plait
