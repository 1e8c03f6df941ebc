// Draws a line chart, such as a training loss, as an SVG image. Timelines of pipelines are drawn by pipeline_svg.hpp.
// The numbers of a step: step_record.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/text.hpp"
#include "plait/io/atomic_file.hpp"

namespace plait {

struct curve_point {
  double x = 0;
  double y = 0;
};

struct curve_series {
  std::string name;
  std::vector<curve_point> points;  ///< by rising x; points that are not finite (or beyond 1e30) leave a gap
};

/// A horizontal line to compare with, for instance the text's unigram entropy.
struct curve_reference {
  std::string name;
  double y = 0;
};

struct curve_chart {
  std::string title = "Training loss";
  std::string x_label = "step";
  std::string y_label = "loss (nats per token)";
  std::vector<curve_series> series;  ///< drawn in this order; at most four have colours of their own
  std::optional<curve_reference> reference;
};

namespace detail {

/// Places for about `count` ticks in [low, high]: multiples of 1, 2 or 5 times a power of ten.
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

inline std::string xml_text(std::string_view text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

inline std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}
/// A tick's label; very large and small numbers with an exponent.
inline std::string tick_text(double value, const curve_ticks& ticks) {
  if (std::abs(value) < ticks.step * 1e-6) return "0";
  const double largest = std::max(std::abs(ticks.at.front()), std::abs(ticks.at.back()));
  if (largest < 1e6 && ticks.digits < 6) return fixed(value, ticks.digits);
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

/// Draws a chart; coordinates are SVG user units.
class curve_drawing {
 public:
  explicit curve_drawing(const curve_chart& chart) : chart_(chart) { find_range(); }

  std::string svg() {
    out_ = cat({"<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ", fixed(width, 0), " ", fixed(height, 0),
                "\" width=\"", fixed(width, 0), "\" height=\"", fixed(height, 0),
                "\" font-family=\"Helvetica, Arial, DejaVu Sans, sans-serif\" font-size=\"13\" fill=\"#333\">\n"});
    out_ += "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n";
    text(left, 30, chart_.title, "font-size=\"17\" font-weight=\"bold\" fill=\"#111\"");
    axes();
    if (!any_)
      text((left + right) / 2, (top + bottom) / 2, "no data", "text-anchor=\"middle\" fill=\"#888\" font-size=\"16\"");
    if (any_) reference();
    for (std::size_t i = 0; i < chart_.series.size(); ++i) curve(chart_.series[i], colours[i % colours.size()]);
    legend();
    return out_ + "</svg>\n";
  }

 private:
  static constexpr double width = 860, height = 480, left = 76, right = 824, top = 76, bottom = 418;
  static constexpr std::array<const char*, 4> colours{"#1f6fb4", "#d1571b", "#2c8a4b", "#7b4fa6"};
  static constexpr const char* reference_colour = "#777";
  static constexpr std::size_t crowd =
      380;  // points of a series that is drawn as bands and means, a column being two units wide

  // A run that diverges to 1e30 has nothing left to show, and differences of such values would overflow.
  static bool finite(double v) { return std::abs(v) < 1e30; }
  static bool finite(const curve_point& p) { return finite(p.x) && finite(p.y); }
  double x_of(double x) const { return left + (x - x_low_) / (x_high_ - x_low_) * (right - left); }
  double y_of(double y) const { return bottom - (y - y_low_) / (y_high_ - y_low_) * (bottom - top); }

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

  void text(double x, double y, std::string_view what, std::string_view style = "") {
    append(out_, {"<text x=\"", fixed(x, 1), "\" y=\"", fixed(y, 1), "\" ", style, ">", xml_text(what), "</text>\n"});
  }
  void line(double x1, double y1, double x2, double y2, std::string_view style) {
    append(out_, {"<line x1=\"", fixed(x1, 1), "\" y1=\"", fixed(y1, 1), "\" x2=\"", fixed(x2, 1), "\" y2=\"",
                  fixed(y2, 1), "\" ", style, "/>\n"});
  }

  void axes() {
    const curve_ticks x(x_low_, x_high_, 9, true), y(y_low_, y_high_, 7, false);
    for (double value : y.at) {
      line(left, y_of(value), right, y_of(value), "stroke=\"#e4e4e4\"");
      text(left - 9, y_of(value) + 4.5, tick_text(value, y), "text-anchor=\"end\"");
    }
    for (double value : x.at) {
      line(x_of(value), top, x_of(value), bottom, "stroke=\"#f0f0f0\"");
      line(x_of(value), bottom, x_of(value), bottom + 5, "stroke=\"#555\"");
      text(x_of(value), bottom + 20, tick_text(value, x), "text-anchor=\"middle\"");
    }
    line(left, top, left, bottom, "stroke=\"#555\"");
    line(left, bottom, right, bottom, "stroke=\"#555\"");
    text((left + right) / 2, height - 16, chart_.x_label, "text-anchor=\"middle\"");
    const double middle = (top + bottom) / 2;
    text(22, middle, chart_.y_label,
         cat({"text-anchor=\"middle\" transform=\"rotate(-90 22 ", fixed(middle, 1), ")\""}));
  }

  void reference() {
    if (!chart_.reference || !finite(chart_.reference->y)) return;
    const double y = y_of(chart_.reference->y);
    line(left, y, right, y, cat({"stroke=\"", reference_colour, "\" stroke-width=\"1.5\" stroke-dasharray=\"7 5\""}));
  }

  /// One polyline for each run of finite points, a dot for a run of one.
  void polyline(const std::vector<curve_point>& points, std::string_view colour) {
    for (std::size_t begin = 0; begin < points.size();) {
      if (!finite(points[begin])) {
        ++begin;
        continue;
      }
      std::size_t end = begin;
      std::string path;
      for (; end < points.size() && finite(points[end]); ++end) {
        append(path, {end == begin ? "M" : "L", fixed(x_of(points[end].x), 1), " ", fixed(y_of(points[end].y), 1)});
      }
      if (end - begin == 1) {
        append(out_, {"<circle cx=\"", fixed(x_of(points[begin].x), 1), "\" cy=\"", fixed(y_of(points[begin].y), 1),
                      "\" r=\"3.5\" fill=\"", colour, "\"/>\n"});
      } else {
        append(out_, {"<path d=\"", path, "\" fill=\"none\" stroke=\"", colour,
                      "\" stroke-width=\"2\" stroke-linejoin=\"round\"/>\n"});
      }
      begin = end;
    }
  }

  void curve(const curve_series& series, std::string_view colour) {
    if (series.points.size() <= crowd) return polyline(series.points, colour);
    // Columns of two units: a pale band from the least to the largest value, and a line through the means.
    constexpr auto columns = static_cast<std::size_t>((right - left) / 2);
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
      const std::string x = fixed(x_of(means.back().x), 1);
      append(upper, {upper.empty() ? "M" : "L", x, " ", fixed(y_of(c.high), 1)});
      lower = cat({"L", x, " ", fixed(y_of(c.low), 1), lower});
    }
    if (means.size() > 1) {
      append(out_, {"<path d=\"", upper, lower, "Z\" fill=\"", colour, "\" fill-opacity=\"0.22\"/>\n"});
    }
    polyline(means, colour);
  }

  /// One row under the title: a stroke and the name of each curve with its last value, then the reference.
  void legend() {
    double x = left;
    const auto item = [&](const std::string& name, std::string_view colour, std::string_view dash) {
      line(x, 53, x + 24, 53, cat({"stroke=\"", colour, "\" stroke-width=\"2.5\" ", dash}));
      text(x + 31, 57.5, name);
      x += 31 + 7.2 * static_cast<double>(name.size()) + 26;  // 7.2: about the mean width of a letter at this size
    };
    for (std::size_t i = 0; i < chart_.series.size(); ++i) {
      const auto& points = chart_.series[i].points;
      const auto last = std::find_if(points.rbegin(), points.rend(), [](const curve_point& p) { return finite(p); });
      const std::string value = last == points.rend() ? "" : cat({" (last ", fixed(last->y, 3), ")"});
      item(chart_.series[i].name + value, colours[i % colours.size()], "");
    }
    if (chart_.reference && finite(chart_.reference->y)) {
      item(cat({chart_.reference->name, " ", fixed(chart_.reference->y, 3)}), reference_colour,
           "stroke-dasharray=\"7 4\"");
    }
  }

  const curve_chart& chart_;
  std::string out_;
  bool any_ = false;
  double x_low_ = 0, x_high_ = 10, y_low_ = 0, y_high_ = 1;
};

}  // namespace detail

/// A line chart as a standalone SVG image of 860 x 480. Without any finite point it says "no data". A series of more
/// than 380 points is drawn as its range and mean per column, so the size of the image is bounded.
inline std::string curve_svg(const curve_chart& chart) { return detail::curve_drawing(chart).svg(); }

/// Writes the chart in one step; `error` naming `flag` when it cannot.
inline void write_curve(const curve_chart& chart, const std::string& path, const std::string& flag = "curve") {
  write_file_atomically(path, curve_svg(chart), flag);
}

}  // namespace plait
