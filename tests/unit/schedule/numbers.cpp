// program: schedules
// Idle shares, peaks and published rates of plait's schedules; and each of them is valid.
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "plait/schedule/parse.hpp"
#include "plait/schedule/verified.hpp"
#include "support/test_data.hpp"

using namespace plait;

namespace {

double makespan_idle_time(const schedule& s, const simulation& t) { return t.makespan - 3.0 * s.shape.microbatches; }

template <class Policy, class Check>
void for_sizes(const Check& check) {
  for (int p : {2, 4, 8, 16})
    for (int k = 1; k <= 8; ++k) {
      const int m = k * p;
      if (!check_shape<Policy>(shape_of<Policy>(p, m)).ok()) continue;
      CAPTURE(p);
      CAPTURE(m);
      const schedule s = make_schedule<Policy>(p, m);
      check(s, simulate(s), p, m);
    }
}

double peak(const schedule& s, int rank) { return peak_activations(s, rank); }

template <class Policy>
void verifies(int p, int m) {
  if (!check_shape<Policy>(shape_of<Policy>(p, m)).ok()) return;
  CAPTURE(p);
  CAPTURE(m);
  const schedule s = make_schedule<Policy>(p, m);
  CAPTURE(s.name.str());
  CHECK(describe(verify(s)) == "ok");
}
template <class... Policies>
void all_verify(const type_list<Policies...>&, int p, int m) {
  (verifies<Policies>(p, m), ...);
}

}  // namespace

TEST_CASE("1F1B and GPipe: idle (p-1)/(m+p-1), activations min(m, p-r) and m") {
  for_sizes<one_f_one_b>([](const schedule& s, const simulation& t, int p, int m) {
    CHECK(t.makespan_idle() == doctest::Approx((p - 1.0) / (m + p - 1)).epsilon(1e-12));
    for (int r = 0; r < p; ++r) CHECK(peak(s, r) == std::min(m, p - r));
  });
  for_sizes<gpipe>([](const schedule& s, const simulation& t, int p, int m) {
    CHECK(t.makespan_idle() == doctest::Approx((p - 1.0) / (m + p - 1)).epsilon(1e-12));
    for (int r = 0; r < p; ++r) CHECK(peak(s, r) == m);
  });
}

TEST_CASE_TEMPLATE("interleaved: idle ((p-1)/v)/(m+(p-1)/v), activations p(1+(p-1)/(pv))", Policy, interleaved<2>,
                   interleaved<3>, interleaved<4>) {
  for_sizes<Policy>([](const schedule& s, const simulation& t, int p, int m) {
    const double v = Policy::chunks, idle = (p - 1) / v;
    CHECK(t.makespan_idle() == doctest::Approx(idle / (m + idle)).epsilon(1e-9));
    const double formula = m == p ? p : p * (1 + (p - 1) / (p * v));
    CHECK(peak_activations(s) == doctest::Approx(formula).epsilon(1e-12));
    CHECK(peak(s, 0) == peak_activations(s));
    // v times the messages of 1F1B, and those from the last rank to the first.
    CHECK(t.transfers.size() == static_cast<std::size_t>(2 * m * (s.shape.stages() - 1)));
  });
}

TEST_CASE("ZB-H1: idle (p-1)/(3m+p-1) with p activations on every rank") {
  for_sizes<zb_h1>([](const schedule& s, const simulation& t, int p, int m) {
    CHECK(t.makespan_idle() == doctest::Approx((p - 1.0) / (3 * m + p - 1)).epsilon(1e-12));
    for (int r = 0; r < p; ++r) CHECK(peak(s, r) == p);
  });
}

TEST_CASE("ZB-H2: no idle time within spans for m >= 2p-1, p-1 in the makespan, 2p-1 activations") {
  for_sizes<zb_h2>([](const schedule& s, const simulation& t, int p, int m) {
    if (m < 2 * p - 1) return;
    CHECK(t.span_idle() == 0);
    CHECK(makespan_idle_time(s, t) == p - 1);
    for (int r = 0; r < p; ++r) CHECK(peak(s, r) == 2 * p - 1);
  });
}

TEST_CASE("ZB-V: no idle time within spans for m >= 2p-1, (p-1)/2 in the makespan, p activations") {
  for_sizes<zb_v>([](const schedule& s, const simulation& t, int p, int m) {
    CHECK(peak_activations(s) == p);
    if (m < 2 * p - 1) return;
    CHECK(t.span_idle() == doctest::Approx(0));
    CHECK(makespan_idle_time(s, t) == doctest::Approx((p - 1) / 2.0));
    for (int r = 0; r < p; ++r) CHECK(peak(s, r) == p);
  });
}

TEST_CASE("V-Half and V-Min: about a half and a third of 1F1B's activations, half and two thirds of its idle time") {
  const auto within = [](double idle_factor, double peak_factor, double peak_offset) {
    return [=](const schedule& s, const simulation& t, int p, int m) {
      if (m < 2 * p) return;
      CHECK(makespan_idle_time(s, t) <= idle_factor * (p - 1) + 1e-9);
      CHECK(makespan_idle_time(s, t) >= idle_factor * (p - 1) - 0.5 - 1e-9);
      CHECK(peak_activations(s) <= p * peak_factor + peak_offset + 1e-9);
      CHECK(peak_activations(s) >= p * peak_factor);
    };
  };
  for_sizes<v_half>(within(1.5, 1.0 / 2, 1.5));
  for_sizes<v_min>(within(2, 1.0 / 3, 4.0 / 3));
  // Each remainder of p has its own building block, or its own place in one.
  for (int p = 1; p <= 13; ++p) {
    within(1.5, 1.0 / 2, 1.5)(make_schedule<v_half>(p, 2 * p), simulate(make_schedule<v_half>(p, 2 * p)), p, 2 * p);
    within(2, 1.0 / 3, 4.0 / 3)(make_schedule<v_min>(p, 2 * p), simulate(make_schedule<v_min>(p, 2 * p)), p, 2 * p);
  }
}

TEST_CASE("DualPipeV: p + 1/2 activations, idle within the published (p-1)(F&B + B - 3W)") {
  for_sizes<dualpipe_v>([](const schedule& s, const simulation& t, int p, int m) {
    for (int r = 0; r < p; ++r) CHECK(peak(s, r) == p + 0.5);
    CHECK(makespan_idle_time(s, t) == doctest::Approx((p - 1) / 2.0));
    // Chunk times F, I, W; the pair F&B takes F + I + W here.
    for (const auto& [f, i, w] : {std::array{1.0, 1.0, 1.0}, {1.0, 1.1, 0.6}, {3.0, 3.2, 3.1}, {1.0, 2.0, 1.0}}) {
      schedule_costs costs;
      costs.rank_part = {2 * f, 2 * (i + w), 2 * i, 2 * w};
      const double idle = simulate(s, costs).makespan - 2 * m * (f + i + w);
      CHECK(idle <= (p - 1) * ((f + i + w) + (i + w) - 3 * w) + 1e-9);
    }
  });
}

TEST_CASE("the rates of the zero-bubble paper, from its profiled times") {
  std::ifstream file(plait::test::test_data() + "/zero_bubble_rates.csv");
  std::string line;
  std::getline(file, line);
  int rows = 0;
  while (std::getline(file, line)) {
    std::vector<std::string> cells;
    std::stringstream text(line);
    for (std::string cell; std::getline(text, cell, ',');) cells.push_back(cell);
    REQUIRE(cells.size() == 10);
    CAPTURE(line);
    const std::string name = cells[1];
    const int p = std::stoi(cells[2]), m = std::stoi(cells[3]);
    const double f = std::stod(cells[5]), i = std::stod(cells[6]), w = std::stod(cells[7]), c = std::stod(cells[8]);
    schedule_costs costs;
    costs.rank_part = {f, i + w, i, w};
    costs.link = c;
    const schedule s = parse_schedule(name == "interleaved" ? name + ":" + cells[4] : name, p, m);
    const simulation t = simulate(s, costs);
    double length = t.makespan;
    if (name == "zb_h2") {  // the paper counts each rank's own span
      length = 0;
      for (int r = 0; r < p; ++r) length = std::max(length, t.span(r));
    }
    if (name == "interleaved") length -= p * c;  // as the note under the table says
    CHECK(std::abs(1 - m * (f + i + w) / length - std::stod(cells[9])) <= 5.1e-5);
    ++rows;
  }
  CHECK(rows == 48);
}

TEST_CASE("every schedule that plait makes is valid") {
  for (int p : {1, 2, 3, 4, 5, 8, 16})
    for (int m : {1, 2, 3, 4, 5, 7, 8, 12, 16, 32}) {
      all_verify(detail::hand_made_policies{}, p, m);
      all_verify(type_list<interleaved<2>, interleaved<3>, interleaved<4>>{}, p, m);
    }
}

TEST_CASE("times of single stages and links") {
  const schedule s = make_schedule<one_f_one_b>(2, 1);
  schedule_costs costs;
  costs.stages = {{.forward = 1, .backward = 3}, {.forward = 2, .backward = 5}};
  costs.links = {0, 0.5, 0.25, 0};
  const simulation t = simulate(s, costs);
  CHECK(t.makespan == 1 + 0.5 + 2 + 5 + 0.25 + 3);
  CHECK(t.busy(0) == 4);
  CHECK(t.span(1) == 7);
  CHECK(t.makespan_idle() == doctest::Approx(1 - 11 / (2 * 11.75)));
  CHECK(t.span_idle() == doctest::Approx(1 - 4 / 11.75));
  REQUIRE(t.transfers.size() == 2);
  CHECK(t.transfers[0].transfer == transfer{transfer_kind::activation, 0, 1, 0});
  CHECK(t.transfers[0].arrived == 1.5);
  CHECK(t.transfers[1].sent == 8.5);

  costs.links.pop_back();
  CHECK_THROWS_WITH(simulate(s, costs), "schedule_costs: links must have one entry per pair of ranks");
  costs.links.clear();
  costs.stages.pop_back();
  CHECK_THROWS_WITH(simulate(s, costs), "schedule_costs: stages must have one entry per stage");
  CHECK_THROWS_WITH(simulate(s, {.link = -1}), "schedule_costs: a time is negative, or is not a number");
}
