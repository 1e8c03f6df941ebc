// program: files
#include "train_llama/observe/report.hpp"

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

using plait::json_log;
using plait::json_object;
using plait::read_run_log;
using plait::report_page;
using plait::test::occurrences;

/// The text of a log: three steps, with saves after the second and the third, and a summary.
std::string whole_log(const temp_folder& dir) {
  json_log log(dir / "run.jsonl");
  const auto step = [&](std::int64_t n, double loss, double exposed) {
    log.step({.step = n,
              .loss = loss,
              .grad_norm = 0.5 * loss,
              .lr = 1e-3,
              .tokens_per_second = 1000.0 * static_cast<double>(n),
              .communication = {{"dp", 8e-3, exposed}, {"t<p", 2e-3, 2e-3}, {"pp", std::nan(""), std::nan("")}}});
  };
  step(1, 5.5, 1e-3);
  step(2, 4.25, 3e-3);
  log.write(json_object().add("save", json_object().add("step", 2).add("held_out_loss", 4.5)));
  step(3, 3.125, 2e-3);
  log.write(json_object().add("save", json_object().add("step", 3).add("held_out_loss", 3.75)));
  log.summary(
      json_object()
          .add("steps", 3)
          .add("held_out_loss", 3.75)
          .add("peak_bytes", 4.5e6)
          .add("options", json_object().add("--model", "tiny").add("--mesh", "dp=2,tp=2").add("--prompt", "<b>"))
          .add("memory", json_object().add("weights", 3e6).add("gradients", 1e6))
          .add("timeline", "<svg >step 3</svg>"));
  return dir.read("run.jsonl");
}

}  // namespace

TEST_CASE("the page has the log's numbers, and loads nothing") {
  const temp_folder dir;
  whole_log(dir);
  plait::write_report(dir / "run.jsonl", dir / "page.html", "LOG", "PAGE");
  const std::string page = dir.read("page.html");
  CHECK(contains(page, "<h1>tiny on dp=2,tp=2</h1>"));
  CHECK(contains(page, "<dt>steps<dd>3<"));
  CHECK(contains(page, "<dt>last loss<dd>3.1250<"));
  CHECK(contains(page, "<dt>held-out loss, step 3<dd>3.7500<"));
  CHECK(contains(page, "<dt>median rate<dd>2.00k tokens/s<"));
  CHECK(contains(page, "<dt>peak memory of a rank<dd>4.50 MB<"));
  CHECK(contains(page, "training (last 3.125)"));
  CHECK(contains(page, "held out (last 3.750)"));
  CHECK(contains(page, "norm (last 1.562)"));
  CHECK(contains(page, "rate (last 0.001)"));
  CHECK(contains(page, "all ranks (last 3000)"));
  CHECK(contains(page, "dp (last 2.000)"));
  CHECK(contains(page, "<tr><td>dp<td>6 ms<td>2 ms<td>75.0 %"));  // means over the steps
  CHECK(contains(page, "<tr><td>t&lt;p<td>0 ms<td>2 ms<td>0.0 %"));
  CHECK(!contains(page, "<td>pp<td>"));  // it was not measured
  CHECK(contains(page, "<tr><td>weights<td>3.00 MB"));
  CHECK(contains(page, "<div class=\"bar\"><u style=\"width:75.0%\">"));
  CHECK(contains(page, "<tr><td>in all<td>4.00 MB"));
  CHECK(contains(page, "<svg >step 3</svg>"));
  CHECK(contains(page, "<span>--prompt</span> &lt;b&gt;"));
  CHECK(occurrences(page, "<svg") == 6);
  CHECK(occurrences(page, "http") == occurrences(page, "xmlns=\"http://www.w3.org/2000/svg\""));
  for (const char* loads : {"<script", "<link", "<img", "@import", "url(", "src=", "href="})
    CHECK(!contains(page, loads));
  CHECK(!contains(page, "nan"));
}

TEST_CASE("a page of a log with steps only leaves out the missing parts") {
  const std::string page = report_page(read_run_log(R"({"step": 7, "loss": 2.5, "grad_norm": null, "lr": 0.5})", "x"));
  CHECK(contains(page, "<h1>A training run</h1>"));
  CHECK(contains(page, "<dt>steps<dd>7<"));
  CHECK(occurrences(page, "<svg") == 2);  // the loss and the learning rate
  for (const char* absent : {"Gradient", "ommunication", "emory", "Options", "held out", "simulated"})
    CHECK(!contains(page, absent));
}

TEST_CASE("held-out losses are points with marks, one for repeated steps") {
  const temp_folder dir;
  const std::string text = whole_log(dir);
  const auto curves = plait::loss_curves(read_run_log(text, "x"));
  REQUIRE(curves.size() == 2);
  CHECK(curves[0].points.size() == 3);
  REQUIRE(curves[1].points.size() == 2);
  CHECK(curves[1].points[0].x == 2);
  CHECK(curves[1].points[1].y == 3.75);
  CHECK(occurrences(plait::curve_svg({.series = curves}), "<circle") == 3);  // one is in the legend
  const plait::run_log back = read_run_log(text + R"({"step": 2, "loss": 4, "grad_norm": 1, "lr": 1})", "x");
  CHECK(back.held_out.empty());
  CHECK(plait::loss_curves(back)[0].points.back().y == 4);
  CHECK(plait::loss_curves(read_run_log(text, "x"), 2)[1].points.size() == 1);
}

TEST_CASE("errors name the line and field of a log") {
  const std::string good = R"({"step": 1, "loss": 2, "grad_norm": 1, "lr": 1})"
                           "\n";
  const auto refused = [&](const char* line, const char* why) {
    CAPTURE(line);
    CHECK_ERROR(read_run_log(good + line, "x"), why);
  };
  refused(R"({"step": 2, "loss": 2, "grad_norm": 1, "lr": 1, "tokens_per_second": "9"})",
          "x, line 2: tokens_per_second is \"9\"; legal are numbers and null");
  refused(R"({"step": 2, "loss": 2, "grad_norm": 1, "lr": 1, "communication": []})",
          "x, line 2: communication is []; legal is an object");
  refused(R"({"step": 2, "loss": 2, "grad_norm": 1, "lr": 1, "communication": {"dp": 1}})",
          "x, line 2: communication.dp is 1; legal is an object");
  refused(R"({"step": 2, "loss": 2, "grad_norm": 1, "lr": 1, "communication": {"dp": {"seconds": 1}}})",
          "x, line 2: communication.dp.waited is missing; legal are numbers and null");
  refused(R"({"save": 1})", "x, line 2: save is 1; legal is an object");
  refused(R"({"save": {"held_out_loss": 1}})", "x, line 2: save.step is missing; legal are integers from 0 on");
  refused(R"({"summary": {"steps": 1, "held_out_loss": true}})", "x, line 2: summary.held_out_loss is true; legal are");
  refused(R"({"summary": {"options": {"--seq": 3}}})", "x, line 2: summary.options.--seq is 3; legal is a text");
  refused(R"({"summary": {"memory": {"weights": "1"}}})", "x, line 2: summary.memory.weights is \"1\"; legal are");
  refused(R"({"summary": {"timeline": 1}})", "x, line 2: summary.timeline is 1; legal is a text");
  refused(R"({"summary": {"timeline": "<svg ><script>"}})",
          "x, line 2: summary.timeline is not an image; legal is SVG without scripts");
}

TEST_CASE("errors name a log or a page that cannot be opened") {
  const temp_folder dir;
  CHECK_ERROR(plait::write_report(dir / "absent", dir / "page.html", "LOG", "PAGE"), "LOG", "absent", "No such file");
  whole_log(dir);
  CHECK_ERROR(plait::write_report(dir / "run.jsonl", dir / "absent/page.html", "LOG", "PAGE"), "PAGE", "No such file");
}

namespace {

using plait::curve_chart;
using plait::curve_point;
using plait::curve_svg;
using plait::test::occurrences;

/// Whether tags are closed in order, and the text has no other markup and no number that SVG does not allow.
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
  CHECK(occurrences(svg, "stroke-dasharray") == 2);  // the line and its entry in the legend
  CHECK(contains(svg, ">6<"));                       // the axis includes the reference
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
