// program: schedules
// Drawings and traces of pipelines.
#include "train_llama/observe/pictures.hpp"

#include <doctest/doctest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "plait/schedule/expand.hpp"
#include "plait/schedule/parse.hpp"
#include "support/temp_folder.hpp"
#include "support/texts.hpp"

using namespace plait;

namespace {

using test::occurrences;

/// The number after `before` in `text`, starting at `at`; moves `at` to its end.
double number_after(std::string_view text, std::string_view before, std::size_t& at) {
  at = text.find(before, at);
  REQUIRE(at != text.npos);
  at += before.size();
  return std::stod(std::string(text.substr(at, 30)));
}

}  // namespace

TEST_CASE("a drawing has a cell for each action, in the row of its rank, within the scale") {
  const pipeline_timeline a = timeline_of(parse_schedule("1f1b", 4, 8)), b = timeline_of(parse_schedule("zb_v", 4, 8));
  const std::string svg = pipeline_svg({a, b});
  CHECK(occurrences(svg, "<title>") == 4 * 16 + 4 * 48);
  CHECK(occurrences(svg, "class=\"F0-1\"") == 32);
  CHECK(occurrences(svg, "class=\"B0-1\"") == 32);
  for (const char* kind : {"F", "I", "W"})
    for (const char* chunk : {"0-2", "1-2"})
      CHECK(occurrences(svg, "class=\"" + std::string(kind) + chunk + "\"") == 32);
  CHECK(contains(svg, ">1f1b, 4 ranks, 8 microbatches</text>"));
  CHECK(contains(svg, ">zb_v, 4 ranks with 2 chunks each, 8 microbatches</text>"));
  CHECK(contains(svg, "27.3 % idle, 27.3 % within a rank's own span; length 33<"));
  CHECK(contains(svg, "5.9 % idle, 0.0 % within a rank's own span; length 25.5<"));
  CHECK(contains(svg, "<title>B0.0, stage 3: 4 to 6</title>"));
  CHECK(contains(svg, "prefers-color-scheme:dark"));
  CHECK(occurrences(svg, "<g>") == occurrences(svg, "</g>"));
  // Colours as numbers that every program for SVG supports.
  CHECK(contains(svg, ".F0-1{fill:#255d9d}.B0-1{fill:#2b7343}"));
  CHECK(!contains(svg, "hsl("));

  // The last backward of rank 0 ends with the row: at 826 of 960, as the longer timeline fills the scale.
  std::size_t at = svg.find("<title>B7.0, stage 0");
  const double x = number_after(svg, "x=\"", at), w = number_after(svg, "width=\"", at);
  CHECK(x + w == doctest::Approx(826).epsilon(0.002));
  CHECK(w == doctest::Approx((826.0 - 64) * 2 / 33).epsilon(0.02));
}

TEST_CASE("a whole step has lanes for gathers, reductions, and the norm with updates") {
  // Two blocks of 1, 2 a pass. On the link a gather takes 1 and a reduction 2; the norm and updates take 0.5.
  std::vector<step_unit> units(2);
  for (step_unit& u : units) u.parameters = 2;
  step_costs costs{.units = {{1, 2, 1, 1}, {1, 2, 1, 1}}, .updates = {0.5, 0.5}, .norm = 0.5, .data_ranks = 2};
  costs.gather_bytes = 1, costs.reduce_bytes = 2, costs.bandwidth = 1;
  const step_schedule step = expand(make_schedule<one_f_one_b>(1, 1), units, {.level = zero_level::optimizer});
  const pipeline_timeline t = timeline_of(step, costs, "a step", "ms");
  // The last gather of the previous step may reach into the second forward pass; then F, B, and the second reduction.
  REQUIRE(t.ranks.size() == 1);
  REQUIRE(t.beside.size() == 1);
  std::map<step_op, std::vector<timed_entry>> of;
  for (const timed_entry& e : t.beside[0]) of[e.entry.op].push_back(e);
  REQUIRE(of[step_op::reduce].size() == 2);
  CHECK(of[step_op::reduce][0].entry.unit == 1);
  const double first = of[step_op::reduce][0].start;
  CHECK(of[step_op::reduce][0].end == doctest::Approx(first + 2));
  CHECK(of[step_op::reduce][1].start == doctest::Approx(first + 2));
  REQUIRE(of[step_op::norm].size() == 1);
  CHECK(of[step_op::norm][0].start == doctest::Approx(first + 4));
  CHECK(of[step_op::update].size() == 2);
  CHECK(of[step_op::update][1].end == doctest::Approx(first + 5.5));
  // The gather after the first update takes 1 from there, of which this step has half; the other half is in the next
  // one.
  double gathered = 0;
  for (const timed_entry& e : of[step_op::gather]) gathered += e.end - e.start;
  CHECK(gathered == doctest::Approx(2));  // of this step and of the previous one
  CHECK(t.end() == doctest::Approx(first + 5.5));
  CHECK(t.busy(0) == doctest::Approx(6 + 1.5));

  const std::string svg = pipeline_svg({t});
  CHECK(occurrences(svg, "class=\"reduction\"") == 2 + 1);  // and one in the legend
  CHECK(occurrences(svg, "class=\"gather\"") == of[step_op::gather].size() + 1);
  CHECK(occurrences(svg, "class=\"norm\"") == 1 + 1);
  CHECK(occurrences(svg, "class=\"update\"") == 2 + 1);
  CHECK(contains(svg, ">gathers</text>"));
  CHECK(contains(svg, ">reductions</text>"));
  CHECK(contains(svg, "<title>update of unit 1: "));
  CHECK(occurrences(svg, "<g>") == occurrences(svg, "</g>"));
  CHECK(occurrences(svg, "class=\"F0-1\"") == t.ranks[0].size() - 1);
  const std::string alone = pipeline_svg({timeline_of(make_schedule<one_f_one_b>(1, 1))});
  for (const char* lane : {"gather", "reduction", "norm", "update"}) CHECK(!contains(alone, lane));
}

TEST_CASE("a large drawing is small, an empty one is valid, and odd titles are well formed") {
  const pipeline_timeline large = timeline_of(parse_schedule("interleaved:4", 16, 64));
  const std::string svg = pipeline_svg({large});
  CHECK(occurrences(svg, "<title>") == 0);
  CHECK(svg.size() < 1'200'000);
  CHECK(contains(pipeline_svg({}), "</svg>"));
  pipeline_timeline empty;
  empty.title = "<&>\"";
  empty.ranks.resize(2);
  const std::string odd = pipeline_svg({empty});
  CHECK(contains(odd, "&lt;&amp;&gt;&quot;"));
  CHECK(!contains(odd, "nan"));
  CHECK(!contains(odd, "inf"));
}

TEST_CASE("idle shares of a timeline that does not start at 0") {
  pipeline_timeline t{"measured", "ms", {.ranks = 2, .chunks = 1, .microbatches = 1}, {}};
  t.ranks = {{{forward_of(0, 0), 10, 11, 0}, {backward_of(0, 0), 15, 17, 3}},
             {{forward_of(0, 0), 11.5, 12.5, 1}, {backward_of(0, 0), 12.5, 14.5, 2}}};
  CHECK(t.begin() == 10);
  CHECK(t.end() == 17);
  CHECK(t.idle(0) == doctest::Approx(4.0 / 7));
  CHECK(t.idle() == doctest::Approx(4.0 / 7));
  CHECK(t.span_idle() == doctest::Approx(4.0 / 7));
  const schedule s = make_schedule<zb_h2>(4, 8);
  const simulation simulated = simulate(s);
  const pipeline_timeline same = timeline_of(s);
  CHECK(same.idle() == doctest::Approx(simulated.makespan_idle()));
  CHECK(same.span_idle() == doctest::Approx(simulated.span_idle()));
}

TEST_CASE("a trace has every event, and an arrow for each message") {
  const schedule s = parse_schedule("interleaved:2", 2, 4);
  const simulation times = simulate(s);
  trace t = trace_of(timeline_of(s), 1e6);
  t.events.push_back({.rank = 1,
                      .track = 1,
                      .name = "all_reduce \"x\"\n",
                      .category = "collective",
                      .start_ns = 1'234'567,
                      .duration_ns = 89,
                      .bytes = 4096,
                      .axis = "dp"});
  t.tracks.push_back({1, 1, "collectives"});
  const std::string text = to_chrome_trace(t);
  CHECK(nlohmann::json::accept(text));
  CHECK(occurrences(text, "\"ph\":\"X\"") == 2 * 16 + 1);
  CHECK(occurrences(text, "\"ph\":\"s\"") == times.transfers.size());
  CHECK(occurrences(text, "\"ph\":\"f\"") == times.transfers.size());
  CHECK(contains(text, "\"name\":\"rank 1\""));
  CHECK(contains(text,
                 "{\"ph\":\"X\",\"name\":\"all_reduce \\\"x\\\"\\n\",\"cat\":\"collective\",\"pid\":1,\"tid\":1,"
                 "\"ts\":1234.567,\"dur\":0.089,\"args\":{\"bytes\":4096,\"axis\":\"dp\"}}"));
  // F0.0 of rank 0 takes half a unit, and its message leads to F0.0 of rank 1.
  CHECK(contains(text,
                 "{\"ph\":\"X\",\"name\":\"F0.0\",\"cat\":\"forward\",\"pid\":0,\"tid\":0,\"ts\":0.000,"
                 "\"dur\":500.000,\"args\":{}}"));
  CHECK(contains(text, "{\"ph\":\"s\",\"name\":\"p2p\",\"cat\":\"flow\",\"pid\":0,\"tid\":0,\"ts\":499.999,\"id\":1}"));
  CHECK(contains(text,
                 "{\"ph\":\"f\",\"bp\":\"e\",\"name\":\"p2p\",\"cat\":\"flow\",\"pid\":1,\"tid\":0,\"ts\":500.000,"
                 "\"id\":1}"));
  std::multiset<std::uint64_t> out, in;
  for (const trace_event& e : t.events) {
    if (e.flow_out != 0) out.insert(e.flow_out);
    if (e.flow_in != 0) in.insert(e.flow_in);
  }
  CHECK(out == in);
  CHECK(std::set<std::uint64_t>(out.begin(), out.end()).size() == out.size());
}

TEST_CASE("a trace's times count from its earliest start, and an empty one is valid") {
  CHECK(nlohmann::json::accept(to_chrome_trace({})));
  trace t;
  t.events.push_back({.name = "late", .start_ns = 1'700'000'000'000'000'123, .duration_ns = 1'500});
  t.events.push_back({.name = "early", .start_ns = 1'700'000'000'000'000'000, .duration_ns = 0});
  const std::string text = to_chrome_trace(t);
  CHECK(contains(text, "\"ts\":0.123,\"dur\":1.500"));
  CHECK(contains(text, "\"ts\":0.000,\"dur\":0.000"));
}
