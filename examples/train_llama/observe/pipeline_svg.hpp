// Draws timelines of pipelines as an SVG image. The times come from schedule/timeline.hpp, simulated, or from
// step_trace.hpp, measured. A trace can be zoomed: trace.hpp. See examples/pipeline_schedule.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/text.hpp"
#include "plait/schedule/schedule.hpp"
#include "plait/schedule/timeline.hpp"
#include "plait/schedule/verify.hpp"
#include "train_llama/observe/loss_curve.hpp"

namespace plait {

struct pipeline_svg_options {
  bool shared_scale = true;  ///< one scale of time for all timelines, whose times then have one unit
  bool tooltips = true;      ///< the name and times of an action under the pointer; left out beyond 5000 actions
};

namespace detail {

/// Draws timelines one under the other; coordinates are SVG user units.
class pipeline_drawing {
 public:
  pipeline_drawing(const std::vector<pipeline_timeline>& all, const pipeline_svg_options& options)
      : all_(all), options_(options) {
    std::size_t actions = 0;
    for (const pipeline_timeline& t : all) {
      longest_ = std::max(longest_, t.end() - t.begin());
      for (const auto& mine : t.ranks) actions += mine.size();
      for (const auto& mine : t.beside) actions += mine.size();
    }
    if (actions > 5000) options_.tooltips = false;
  }

  std::string svg() {
    double height = 12;
    for (const pipeline_timeline& t : all_) height += panel_height(t);
    height += legend_height;
    out_ = cat({"<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ", fixed(width, 0), " ", fixed(height, 0),
                "\" width=\"", fixed(width, 0), "\" height=\"", fixed(height, 0),
                "\" font-family=\"Helvetica, Arial, DejaVu Sans, sans-serif\" font-size=\"12\">\n"});
    style();
    out_ += "<rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n";
    double y = 12;
    for (const pipeline_timeline& t : all_) {
      panel(t, y);
      y += panel_height(t);
    }
    legend(y + 8);
    return out_ + "</svg>\n";
  }

 private:
  static constexpr double width = 960, left = 64, right = 826, row = 24, gap = 4, head = 50, foot = 34,
                          legend_height = 40, lane = 9;

  static double panel_height(const pipeline_timeline& t) {
    return head + static_cast<double>(t.ranks.size()) * rank_height(t) + foot;
  }
  /// Of a rank's passes and of the lanes under them.
  static double rank_height(const pipeline_timeline& t) {
    return row + gap + static_cast<double>(lanes_of(t).size()) * (lane + 1);
  }

  /// Lanes beside the passes show these; the norm and updates share one, and so do the parts of reductions.
  static constexpr std::array<step_op, 6> lane_ops{step_op::gather, step_op::reduce,        step_op::norm,
                                                   step_op::update, step_op::reduce_copies, step_op::reduce_ties};
  static constexpr std::array<const char*, 6> lane_names{"gather", "reduction", "norm",
                                                         "update", "reduction", "reduction"};
  /// The lane that shows entries of a kind.
  static constexpr step_op lane_of(step_op op) {
    if (op == step_op::norm) return step_op::update;
    return op == step_op::reduce_copies || op == step_op::reduce_ties ? step_op::reduce : op;
  }
  static constexpr std::array<const char*, 4> lane_colours{"#9668ca", "#d03961", "#757f8a", "#d1b21a"};
  static bool has_lane(const pipeline_timeline& t, step_op op) {
    for (const auto& mine : t.beside)
      for (const timed_entry& e : mine)
        if (e.entry.op == op) return true;
    return false;
  }
  static std::vector<step_op> lanes_of(const pipeline_timeline& t) {
    std::vector<step_op> lanes;
    for (const step_op own : {step_op::gather, step_op::reduce, step_op::update})
      if (std::any_of(lane_ops.begin(), lane_ops.end(),
                      [&](step_op op) { return lane_of(op) == own && has_lane(t, op); }))
        lanes.push_back(own);
    return lanes;
  }

  /// One hue for each kind, from deep for the first chunk to pale for the last.
  static std::string colour(action_kind kind, int chunk, int chunks) {
    constexpr std::array<std::array<double, 2>, 4> deep_and_pale_lightness{{{38, 68}, {31, 60}, {30, 58}, {45, 74}}};
    constexpr std::array<std::array<double, 2>, 4> hues_and_saturations{{{212, 62}, {140, 45}, {178, 55}, {32, 80}}};
    const auto k = static_cast<std::size_t>(kind);
    const double share = chunks > 1 ? static_cast<double>(chunk) / (chunks - 1) : 0;
    const auto& [deep, pale] = deep_and_pale_lightness[k];
    const auto& [hue, saturation] = hues_and_saturations[k];
    return rgb_of(hue, saturation / 100, (deep + share * (pale - deep)) / 100);
  }
  /// "#255d9d" of 212 degrees, 0.62 and 0.38: some programs that draw SVG know no hsl(). The formula is that of CSS
  /// Color 4.
  static std::string rgb_of(double hue, double saturation, double lightness) {
    const double a = saturation * std::min(lightness, 1 - lightness);
    std::string text = "#";
    for (const double channel : {0, 8, 4}) {
      const double k = std::fmod(channel + hue / 30, 12.0);
      const auto value = std::lround(255 * (lightness - a * std::max(-1.0, std::min({k - 3, 9 - k, 1.0}))));
      for (const long digit : {value / 16, value % 16}) text += "0123456789abcdef"[digit];
    }
    return text;
  }
  static bool is_pale(action_kind kind, int chunk, int chunks) {
    return chunks > 1 && 2 * chunk > chunks - 1 - (kind == action_kind::weight_backward ? 1 : 0);
  }

  /// Light by default; viewers that say they are dark get a dark ground.
  void style() {
    out_ +=
        "<style>.ground{fill:#fff}.idle{fill:#e7e9ec}.t{fill:#222}.s{fill:#555}.tick{stroke:#999}"
        ".on{fill:#fff;font-size:10px;text-anchor:middle}.op{fill:#14181d;font-size:10px;text-anchor:middle}"
        "@media (prefers-color-scheme:dark){.ground{fill:#15181c}.idle{fill:#2b3036}.t{fill:#e8eaed}"
        ".s{fill:#a9b0b8}.tick{stroke:#717981}}";
    // A class for each colour in use: most of the image is its cells.
    for (const pipeline_timeline& t : all_)
      for (int kind = 0; kind < 4; ++kind)
        for (int chunk = 0; chunk < t.shape.chunks; ++chunk) {
          const auto k = static_cast<action_kind>(kind);
          std::string rule = ".";  // sums of temporaries set off a false -Wrestrict of g++ 12
          rule.append(class_of(k, chunk, t.shape.chunks)).append("{fill:");
          rule.append(colour(k, chunk, t.shape.chunks)).append("}");
          if (out_.find(rule) == out_.npos && uses(t, k)) out_ += rule;
        }
    for (std::size_t i = 0; i < lane_ops.size(); ++i)
      if (std::any_of(all_.begin(), all_.end(), [&](const auto& t) { return has_lane(t, lane_ops[i]); }))
        append(out_, {".", lane_names[i], "{fill:", lane_colours[i], "}"});
    out_ += "</style>\n";
  }
  static bool uses(const pipeline_timeline& t, action_kind kind) {
    for (const auto& mine : t.ranks)
      for (const timed_action& a : mine)
        if (a.action.kind == kind) return true;
    return false;
  }
  static std::string class_of(action_kind kind, int chunk, int chunks) {
    return std::string(1, letter(kind)).append(std::to_string(chunk)).append("-").append(std::to_string(chunks));
  }

  void text(double x, double y, std::string_view what, std::string_view attributes) {
    append(out_,
           {"<text x=\"", fixed(x, 1), "\" y=\"", fixed(y, 1), "\" ", attributes, ">", xml_text(what), "</text>\n"});
  }
  void rectangle(double x, double y, double w, double h, std::string_view kind) {
    append(out_, {"<rect class=\"", kind, "\" x=\"", fixed(x, 2), "\" y=\"", fixed(y, 1), "\" width=\"", fixed(w, 2),
                  "\" height=\"", fixed(h, 1), "\"/>\n"});
  }
  static std::string percent(double share) { return fixed(100 * share, 1) + " %"; }
  static std::string number(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.4g", value);
    return text;
  }

  void panel(const pipeline_timeline& t, double y) {
    const double begin = t.begin(), length = options_.shared_scale ? longest_ : t.end() - begin;
    const double scale = length > 0 ? (right - left) / length : 0;
    const auto x_of = [&](double time) { return left + (time - begin) * scale; };
    text(12, y + 17, t.title, "class=\"t\" font-size=\"15\" font-weight=\"bold\"");
    text(12, y + 36,
         cat({percent(t.idle()), " idle, ", percent(t.span_idle()), " within a rank's own span; length ",
              number(t.end() - begin), t.unit.empty() ? "" : " " + t.unit}),
         "class=\"s\"");
    text(right + 62, y + head - 5, "idle", "class=\"s\" text-anchor=\"end\" font-size=\"11\"");
    text(width - 12, y + head - 5, "peak", "class=\"s\" text-anchor=\"end\" font-size=\"11\"");
    find_numbered(t, scale);
    double top = y + head;
    for (std::size_t r = 0; r < t.ranks.size(); ++r, top += rank_height(t)) {
      text(left - 8, top + 16, cat({"rank ", r}), "class=\"t\" text-anchor=\"end\"");
      rectangle(left, top, x_of(t.end()) - left, row, "idle");
      for (const timed_action& a : t.ranks[r]) cell(t, static_cast<int>(r), a, x_of(a.start), x_of(a.end), top);
      std::vector<action> order;
      for (const timed_action& a : t.ranks[r])
        if (order.empty() || !(order.back() == a.action)) order.push_back(a.action);  // once where it is there in parts
      if (r < t.beside.size()) lanes(t, t.beside[r], x_of, top + row + 1);
      text(right + 62, top + 16, percent(t.idle(r)), "class=\"s\" text-anchor=\"end\"");
      text(width - 12, top + 16, number(static_cast<double>(peak_chunks(order)) / t.shape.chunks),
           "class=\"s\" text-anchor=\"end\"");
    }
    if (length <= 0) return;
    const curve_ticks ticks(0, length, 8, false);
    for (double at : ticks.at) {
      const double x = left + at * scale;
      append(out_, {"<path class=\"tick\" d=\"M", fixed(x, 1), " ", fixed(top - 1, 1), "v5\"/>\n"});
      text(x, top + 15, tick_text(at, ticks), "class=\"s\" text-anchor=\"middle\" font-size=\"10\"");
    }
  }

  /// The lanes of a rank, from `y` down.
  template <class Scale>
  void lanes(const pipeline_timeline& t, const std::vector<timed_entry>& beside, const Scale& x_of, double y) {
    for (const step_op op : lanes_of(t)) {
      const std::string_view name = op == step_op::gather ? "gathers" : op == step_op::reduce ? "reductions" : "update";
      text(left - 8, y + lane - 1.5, name, "class=\"s\" text-anchor=\"end\" font-size=\"8\"");
      rectangle(left, y, x_of(t.end()) - left, lane, "idle");
      for (const timed_entry& e : beside) {
        if (lane_of(e.entry.op) != op) continue;
        if (options_.tooltips)
          append(out_, {"<g><title>", describe(e.entry), ": ", number(e.start - t.begin()), " to ",
                        number(e.end - t.begin()), "</title>"});
        const double from = x_of(e.start), to = x_of(e.end);
        const auto kind = std::find(lane_ops.begin(), lane_ops.end(), e.entry.op) - lane_ops.begin();
        rectangle(from, y, std::max(0.4, to - from - (to - from > 3 ? 0.7 : 0)), lane,
                  lane_names[static_cast<std::size_t>(kind)]);
        if (options_.tooltips) out_ += "</g>\n";
      }
      y += lane + 1;
    }
  }

  static double number_width(const pipeline_timeline& t) {
    return 5.8 * static_cast<double>(std::to_string(t.shape.microbatches - 1).size()) + 2;
  }
  /// A kind's cells have their microbatch written in them where the longest number fits in one of mean width: some with
  /// and some without would read as a meaning. Of whole steps, whose actions may be there in parts, small parts do not.
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
    const double line = to - from > 3 ? 0.7 : 0;  // what parts neighbours, where it would not eat them up
    if (options_.tooltips)
      append(out_, {"<g><title>", describe(a.action), ", stage ", t.shape.stage_of(rank, chunk), ": ",
                    number(a.start - t.begin()), " to ", number(a.end - t.begin()), "</title>"});
    rectangle(from, top, to - from - line, row, class_of(kind, chunk, chunks));
    if (numbered_[static_cast<std::size_t>(kind)] && (t.beside.empty() || to - from >= number_width(t)))
      text((from + to - line) / 2, top + 15.6, std::to_string(a.action.microbatch),
           is_pale(kind, chunk, chunks) ? "class=\"op\"" : "class=\"on\"");
    if (options_.tooltips) out_ += "</g>\n";
  }

  /// The kinds that occur, those of passes each with the shades of its chunks.
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
        append(out_, {"<rect x=\"", fixed(x, 1), "\" y=\"", fixed(y, 1), "\" width=\"14\" height=\"14\" fill=\"",
                      colour(kind, chunk, chunks), "\"/>\n"});
      text(x + 6, y + 11.5, names[static_cast<std::size_t>(k)], "class=\"t\"");
      x += 6 + 6.3 * static_cast<double>(std::string_view(names[static_cast<std::size_t>(k)]).size()) + 18;
    }
    for (std::size_t i = 0; i < lane_ops.size(); ++i) {
      if (std::none_of(all_.begin(), all_.end(), [&](const auto& t) { return has_lane(t, lane_ops[i]); })) continue;
      rectangle(x, y, 14, 14, lane_names[i]);
      text(x + 20, y + 11.5, lane_names[i], "class=\"t\"");
      x += 20 + 6.3 * static_cast<double>(std::string_view(lane_names[i]).size()) + 12;
    }
    rectangle(x, y, 14, 14, "idle");
    text(x + 20, y + 11.5, "idle", "class=\"t\"");
    if (widest->shape.chunks > 1)
      text(width - 12, y + 11.5, "first chunk dark, last pale", "class=\"s\" text-anchor=\"end\"");
  }

  const std::vector<pipeline_timeline>& all_;
  pipeline_svg_options options_;
  std::string out_;
  double longest_ = 0;
  std::array<bool, 4> numbered_{};  ///< of the panel being drawn, by kind
};

}  // namespace detail

/// Timelines, simulated or measured, one under the other, as a standalone SVG image 960 wide: a row for each rank, a
/// colour for each kind and chunk, the number of the microbatch where it fits, idle time as the ground of a row, and
/// each rank's idle share and peak of activations (in microbatch-stages) beside it. Timelines of whole steps have lanes
/// under each row for gathers, for reductions, and for the norm and updates. Readable on light and dark grounds.
inline std::string pipeline_svg(const std::vector<pipeline_timeline>& timelines,
                                const pipeline_svg_options& options = {}) {
  return detail::pipeline_drawing(timelines, options).svg();
}

/// Writes the image in one step; `error` naming `flag` when it cannot.
inline void write_pipeline_svg(const std::vector<pipeline_timeline>& timelines, const std::string& path,
                               const std::string& flag = "timeline", const pipeline_svg_options& options = {}) {
  write_file_atomically(path, pipeline_svg(timelines, options), flag);
}

}  // namespace plait
