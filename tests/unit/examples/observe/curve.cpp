// program: files
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "support/temp_folder.hpp"
#include "support/texts.hpp"
#include "train_llama/observe/pictures.hpp"

namespace {

using plait::curve_chart;
using plait::curve_point;
using plait::curve_svg;
using plait::test::occurrences;

/// Whether tags are closed in order and no stray markup or number that SVG lacks is left in the text.
bool well_formed(std::string_view svg) {
  std::vector<std::string_view> open;
  if (contains(svg, "nan") || contains(svg, "inf")) return false;
  while (!svg.empty()) {
    if (svg[0] != '<') {
      svg.remove_prefix(std::min(svg.find('<'), svg.size()));
      continue;
    }
    const std::size_t end = svg.find('>');
    if (end == svg.npos) return false;
    const std::string_view tag = svg.substr(1, end - 1);
    if (tag.find('<') != tag.npos) return false;
    const std::string_view name = tag.substr(tag[0] == '/', tag.find_first_of(" /", 1) - (tag[0] == '/'));
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return false;
      open.pop_back();
    } else if (!tag.ends_with('/')) {
      open.push_back(name);
    }
    svg.remove_prefix(end + 1);
  }
  return open.empty();
}

curve_chart falling(int points) {
  curve_chart chart;
  chart.series = {{"training", {}}};
  for (int i = 1; i <= points; ++i) chart.series[0].points.push_back({double(i), 2 + 3.0 / i});
  return chart;
}

}  // namespace

TEST_CASE("empty, one point, few points") {
  const std::string none = curve_svg({});
  CHECK(well_formed(none));
  CHECK(contains(none, ">no data<"));
  CHECK(contains(none, ">Training loss<"));
  CHECK(contains(none, ">step<"));
  CHECK(contains(none, "loss (nats per token)"));
  CHECK(occurrences(none, "<path") == 0);

  const std::string one = curve_svg(falling(1));
  CHECK(well_formed(one));
  CHECK(occurrences(one, "<circle") == 1);
  CHECK(!contains(one, "no data"));

  const std::string few = curve_svg(falling(5));
  CHECK(well_formed(few));
  CHECK(occurrences(few, "<path") == 1);
  for (const char* tick : {">2.5<", ">3.0<", ">4.5<", ">1<", ">5<"}) CHECK(contains(few, tick));
  CHECK(contains(few, "training (last 2.600)"));
}

TEST_CASE("reference line, second series, and text that needs escaping") {
  curve_chart chart = falling(20);
  chart.title = "a < b & \"c\"";
  chart.series.push_back({"held out", {{10, 3.5}, {20, 3.25}}});
  chart.reference = plait::curve_reference{"unigram entropy", 6.5};
  const std::string svg = curve_svg(chart);
  CHECK(well_formed(svg));
  CHECK(contains(svg, ">a &lt; b &amp; &quot;c&quot;<"));
  CHECK(contains(svg, "unigram entropy 6.500"));
  CHECK(contains(svg, "held out (last 3.250)"));
  CHECK(occurrences(svg, "<path") == 2);
  CHECK(occurrences(svg, "stroke-dasharray") == 2);  // the line and its place in the legend
  CHECK(contains(svg, ">6<"));                       // the axis reaches up to the reference
}

TEST_CASE("long series stay small and readable; gaps stay gaps") {
  CHECK(curve_svg(falling(100000)).size() < 40000);
  CHECK(contains(curve_svg(falling(100000)), "fill-opacity"));
  CHECK(well_formed(curve_svg(falling(100000))));

  curve_chart chart = falling(9);
  chart.series[0].points[4].y = std::nan("");
  CHECK(occurrences(curve_svg(chart), "<path") == 2);
  chart.series[0].points[2].y = std::numeric_limits<double>::infinity();
  CHECK(occurrences(curve_svg(chart), "<path") == 2);
  CHECK(occurrences(curve_svg(chart), "<circle") == 1);
  CHECK(well_formed(curve_svg(chart)));
  for (auto& p : chart.series[0].points) p.y = std::nan("");
  CHECK(contains(curve_svg(chart), "no data"));
}

TEST_CASE("ranges of any size") {
  for (const std::vector<double>& values : std::vector<std::vector<double>>{{2, 2, 2},
                                                                            {0, 0},
                                                                            {-1, 1},
                                                                            {1e-9, 2e-9},
                                                                            {1e17, 1e17 + 16},
                                                                            {-9e29, 9e29},
                                                                            {1e308, 1},
                                                                            {0, 1e6},
                                                                            {5, 5 + 1e-15}}) {
    curve_chart chart;
    chart.series = {{"s", {}}};
    for (double v : values) chart.series[0].points.push_back({double(chart.series[0].points.size()), v});
    const std::string svg = curve_svg(chart);
    CAPTURE(values);
    CHECK(well_formed(svg));
    CHECK(svg.size() < 8000);
    CHECK(occurrences(svg, "text-anchor=\"end\"") >= 2);
  }
}

TEST_CASE("the image is written whole, and errors name the field") {
  temp_folder dir;
  plait::write_curve(falling(3), dir / "loss.svg");
  CHECK(dir.read("loss.svg") == curve_svg(falling(3)));
  CHECK(dir.entries() == 1);
  CHECK_ERROR(plait::write_curve({}, dir / "absent/loss.svg"), "curve", "absent/loss.svg", "No such file");
}
