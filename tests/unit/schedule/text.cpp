// program: schedules
// Schedules by name, from PyTorch's CSV, as a user's policy, and made for given costs.
#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "plait/schedule/parse.hpp"
#include "support/temp_folder.hpp"
#include "support/test_data.hpp"

using namespace plait;

namespace {

std::string text_of_file(const std::string& name) {
  std::ifstream file(plait::test::test_data() + "/" + name, std::ios::binary);
  REQUIRE(file.good());
  return {std::istreambuf_iterator<char>(file), {}};
}

/// `message` comes after the name of the schedule.
void refuses(std::string_view text, int ranks, int microbatches, const std::string& message) {
  CAPTURE(text);
  CHECK_THROWS_WITH_AS(parse_schedule(text, ranks, microbatches), cat({"schedule ", text, ": ", message}).c_str(),
                       error);
}

void refuses_csv(std::string_view text, const std::string& message) {
  CAPTURE(text);
  CHECK_THROWS_WITH_AS(schedule_from_csv(text), message.c_str(), error);
}

const std::string not_divisible =
    "interleaved 1F1B passes groups of as many microbatches as the pipeline has ranks: the number of microbatches must "
    "be divisible by the number of ranks; the nearest legal ";

/// One microbatch after the other: valid, and slow.
struct one_at_a_time {
  static constexpr int chunks = 2;
  static constexpr schedule make(const pipeline_shape& shape) {
    schedule s{"one_at_a_time", shape, {}};
    s.order.resize(static_cast<std::size_t>(shape.ranks));
    for (auto& order : s.order)
      for (int mb = 0; mb < shape.microbatches; ++mb) {
        for (int chunk = 0; chunk < shape.chunks; ++chunk) order.push_back(forward_of(chunk, mb));
        for (int chunk = shape.chunks; chunk-- > 0;) order.push_back(backward_of(chunk, mb));
      }
    return s;
  }
};

}  // namespace

TEST_CASE("schedules by name") {
  const std::vector<std::pair<std::string, schedule>> all = {{"gpipe", make_schedule<gpipe>(4, 8)},
                                                             {"1f1b", make_schedule<one_f_one_b>(4, 8)},
                                                             {"interleaved:2", make_schedule<interleaved<2>>(4, 8)},
                                                             {"interleaved:3", make_schedule<interleaved<3>>(4, 8)},
                                                             {"zb_h1", make_schedule<zb_h1>(4, 8)},
                                                             {"zb_h2", make_schedule<zb_h2>(4, 8)},
                                                             {"zb_v", make_schedule<zb_v>(4, 8)},
                                                             {"v_half", make_schedule<v_half>(4, 8)},
                                                             {"v_min", make_schedule<v_min>(4, 8)},
                                                             {"dualpipe_v", make_schedule<dualpipe_v>(4, 8)}};
  for (const auto& [name, expected] : all) {
    CAPTURE(name);
    const schedule s = parse_schedule(name, 4, 8);
    CHECK(s.shape == expected.shape);
    CHECK(s.order == expected.order);
    CHECK(s.name == expected.name);
  }
  CHECK(parse_schedule("automatic", 4, 8).shape.chunks == 1);
  CHECK(parse_schedule("automatic:2", 4, 8).shape.placement == stage_placement::vee);
}

TEST_CASE("errors name the option, the value and the valid values") {
  refuses("foo", 4, 8,
          "unknown schedule; legal are gpipe, 1f1b, interleaved:V (V chunks per rank, as in "
          "interleaved:2), zb_h1, zb_h2, zb_v, v_half, v_min, dualpipe_v, automatic, automatic:2 (two chunks in a "
          "vee), or a FILE.csv");
  for (const char* text : {"interleaved", "interleaved:", "interleaved:1", "interleaved:2x", "interleaved:256"})
    refuses(text, 4, 8, "interleaved needs the number of chunks per rank, 2 to 255, as in interleaved:2");
  for (const char* text : {"automatic:", "automatic:3", "automatic:x"})
    refuses(text, 4, 8, "automatic has 1 or 2 chunks per rank, as in automatic:2");
  refuses("interleaved:2", 4, 14,
          "with 4 pipeline ranks and 14 microbatches: " + not_divisible + "numbers of microbatches are 12 and 16");
  refuses("interleaved:2", 4, 3,
          "with 4 pipeline ranks and 3 microbatches: " + not_divisible + "number of microbatches is 4");
  refuses("dualpipe_v", 4, 7,
          "with 4 pipeline ranks and 7 microbatches: this schedule fills both directions of the "
          "pipeline: it needs more microbatches; the nearest legal number of microbatches is 8");
  refuses("1f1b", 4, 0,
          "with 4 pipeline ranks and 0 microbatches: the shape of a pipeline needs 1 to 1024 ranks, 1 "
          "to 255 chunks on each and 1 to 65535 microbatches, of which the product is at most 4194304, and a schedule "
          "has one list of actions for each rank");
  refuses("none.csv", 4, 8, "the file cannot be read");
  const temp_folder dir;
  REQUIRE(::mkfifo((dir / "pipe.csv").c_str(), 0600) == 0);
  std::filesystem::create_directory(dir / "folder.csv");
  std::filesystem::create_symlink("/dev/zero", dir / "device.csv");
  refuses(dir / "folder.csv", 4, 8, "it is a folder; name a file");
  for (const char* name : {"pipe.csv", "device.csv"})
    refuses(dir / name, 4, 8, "it is not a regular file; pipes and devices are not read");
}

TEST_CASE("sizes beyond the largest are refused before a schedule is made") {
  const std::string sizes =
      "the shape of a pipeline needs 1 to 1024 ranks, 1 to 255 chunks on each and 1 to 65535 microbatches, of which "
      "the product is at most 4194304";
  REQUIRE(std::string(PLAIT_SCHEDULE_SIZES) == sizes);
  const int largest = std::numeric_limits<int>::max();
  const auto refuses_sizes = [&](const std::string& text, int ranks, int microbatches) {
    refuses(text, ranks, microbatches,
            "with " + std::to_string(ranks) + " pipeline ranks and " + std::to_string(microbatches) +
                " microbatches: " + sizes + ", and a schedule has one list of actions for each rank");
  };
  for (const char* name : {"gpipe", "1f1b", "interleaved:2", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v",
                           "automatic", "automatic:2", "none.csv"})
    for (const auto& [ranks, microbatches] :
         {std::pair{0, 8}, {-1, 8}, {1025, 8}, {largest, 8}, {4, -8}, {4, 65536}, {4, largest}, {largest, largest}})
      refuses_sizes(name, ranks, microbatches);
  // Each is valid, but their product is not.
  refuses_sizes("gpipe", 65, 65535);
  refuses_sizes("zb_v", 64, 32768 + 1);
  refuses_sizes("interleaved:255", 128, 256);

  CHECK(pipeline_shape{max_pipeline_ranks, 1, 4096}.legal());
  CHECK(pipeline_shape{64, 1, max_microbatches}.legal());
  CHECK(pipeline_shape{2, max_chunks, 8192}.legal());
  for (const pipeline_shape& shape : {pipeline_shape{1024, 1, 4097},
                                      {1024, 128, 32768},
                                      {1025, 1, 1},
                                      {1, 256, 1},
                                      {1, 1, 65536},
                                      {0, 1, 1},
                                      {1, 0, 1},
                                      {1, 1, 0}}) {
    CHECK(!shape.legal());
    CHECK_THROWS_AS(automatic(shape), error);
    CHECK_THROWS_AS(make_greedy(shape, {}, {}, 4), error);
    CHECK_THROWS_AS(simulate({"none", shape, {}}), error);
    CHECK_THROWS_AS(refill_weights({"none", shape, {}}, {}, 0, 4), error);
  }
  CHECK_THROWS_WITH(automatic({1024, 2, 4096}),
                    ("schedule automatic (1024 ranks, 2 chunks each, 4096 microbatches): " + sizes).c_str());
  CHECK_THROWS_WITH(make_schedule<gpipe>(2048, 1), ("schedule gpipe (2048 ranks, 1 microbatches): " + sizes +
                                                    ", and a schedule has one list of actions for each rank")
                                                       .c_str());
  // The text names the nearest valid number, which is valid.
  refuses("interleaved:2", 1000, 2001,
          "with 1000 pipeline ranks and 2001 microbatches: " + not_divisible + "number of microbatches is 2000");
}

TEST_CASE("invalid costs and limits are refused") {
  const pipeline_shape shape{.ranks = 2, .microbatches = 4};
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK_THROWS_WITH(
      automatic(shape, {}, {.max_activations = nan}),
      "schedule automatic: max_activations is not a number; legal are 1 and more, and any negative number "
      "for no limit");
  schedule_costs costs;
  costs.stages.resize(1);
  CHECK_THROWS_WITH(automatic(shape, costs), "schedule_costs: stages must have one entry per stage");
  CHECK_THROWS_WITH(make_greedy(shape, costs, {}, 4), "schedule_costs: stages must have one entry per stage");
  CHECK_THROWS_WITH(refill_weights(make_schedule<gpipe>(2, 4), costs, 0, 4),
                    "schedule_costs: stages must have one entry per stage");
  costs = {};
  costs.links.resize(3);
  CHECK_THROWS_WITH(automatic(shape, costs), "schedule_costs: links must have one entry per pair of ranks");
  costs = {};
  costs.link = nan;
  CHECK_THROWS_WITH(automatic(shape, costs), "schedule_costs: a time is negative, or is not a number");
  // A factor of any size is accepted.
  for (double warm_up : {nan, -1e300, 1e300, std::numeric_limits<double>::infinity()})
    CHECK(verify(make_greedy(shape, {}, {.warm_up = warm_up}, 4)).ok());
}

TEST_CASE("PyTorch's schedules are read, and equal those of plait") {
  for (const auto& [file, ours] : {std::pair{"pytorch_interleaved_1f1b_p4_m8.csv", make_schedule<interleaved<2>>(4, 8)},
                                   {"pytorch_zbv_p4_m8.csv", make_schedule<zb_v>(4, 8)},
                                   {"pytorch_dualpipe_v_p4_m8.csv", make_schedule<dualpipe_v>(4, 8)}}) {
    CAPTURE(file);
    const schedule theirs = schedule_from_csv(text_of_file(file));
    CHECK(theirs.shape == ours.shape);
    CHECK(theirs.order == ours.order);
  }

  // A schedule that plait does not make: Megatron's order with I and W, where W is delayed.
  const schedule zero = schedule_from_csv(text_of_file("pytorch_interleaved_zero_bubble_p4_m8.csv"), "zb_interleaved");
  CHECK(describe(verify(zero)) == "ok");
  CHECK(zero.shape == pipeline_shape{4, 2, 8, stage_placement::straight});
  CHECK(simulate(zero).makespan < simulate(make_schedule<interleaved<2>>(4, 8)).makespan);
  CHECK(parse_schedule(plait::test::test_data() + "/pytorch_interleaved_zero_bubble_p4_m8.csv", 4, 8).order ==
        zero.order);
  const std::string path = plait::test::test_data() + "/pytorch_zbv_p4_m8.csv";
  refuses(path, 2, 8, "the file has 4 rows, one for each pipeline rank, and there are 2 ranks");
  refuses(path, 4, 16, "the file has 8 microbatches, and the step has 16");
}

TEST_CASE("a written schedule is read unchanged") {
  for (const char* name : {"1f1b", "interleaved:3", "zb_h2", "zb_v", "dualpipe_v"}) {
    const schedule s = parse_schedule(name, 3, 6);
    const schedule back = schedule_from_csv(to_csv(s));
    CHECK(back.shape == s.shape);
    CHECK(back.order == s.order);
  }
  CHECK(to_csv(make_schedule<zb_h1>(2, 2)) == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n");
  CHECK(schedule_from_csv(",0F0 ,,\"0B0\",\r\n1F0,1B0,,\r\n").order[0].size() == 2);
}

TEST_CASE("errors name a bad cell by row and column") {
  refuses_csv("0F0,0B0\n1F0,1SEND_B0\n",
              "schedule CSV, row 2, cell 2 \"1SEND_B0\": an action is STAGE, then F, B, I or W, then MICROBATCH, as in "
              "2F0; communication is derived, not given");
  for (const char* cell : {"F0", "0F", "0X0", "-", "0F0.5", "-1F0", "0F-1", "(0F0;0X0)OVERLAP_F_B"}) {
    CAPTURE(cell);
    CHECK_THROWS_AS(schedule_from_csv(cell), error);
  }
  refuses_csv("0F65535,0B65535", "schedule CSV, row 1, cell 1 \"0F65535\": microbatches are numbered from 0 to 65534");
  for (const char* number : {"2147483647", "2147483648", "99999999999999999999"}) {
    const std::string cell = number;
    refuses_csv(cell + "F0", "schedule CSV, row 1, cell 1 \"" + cell + "F0\": stages are numbered from 0 to 261119");
    refuses_csv("0F" + cell,
                "schedule CSV, row 1, cell 1 \"0F" + cell + "\": microbatches are numbered from 0 to 65534");
  }
  refuses_csv("0F0,-1F0", "schedule CSV, row 1, cell 2 \"-1F0\": stages are numbered from 0 to 261119");
  refuses_csv("0F-1", "schedule CSV, row 1, cell 1 \"0F-1\": microbatches are numbered from 0 to 65534");
  const std::string endless(1000, 'x');
  refuses_csv(endless, "schedule CSV, row 1, cell 1 \"" + endless.substr(0, 57) +
                           "...\": an action is STAGE, then F, B, I or W, then MICROBATCH, as in 2F0; communication "
                           "is derived, not given");
  refuses_csv("", "schedule CSV: no action in the text; a row for each rank with cells as in 0F0,0B0");
}

TEST_CASE("a placement that is neither straight nor a vee is refused") {
  refuses_csv("1F0,1B0\n0F0,0B0\n",
              "schedule CSV: stage 1 stands in row 1, where neither a straight placement (row 2) nor a vee (row 2) has "
              "it");
  refuses_csv("0F0,2F0\n1F0\n", "schedule CSV: 3 stages do not divide evenly among 2 rows, one row for each rank");
}

TEST_CASE("a short file with large numbers is refused before memory is allocated") {
  // Rows without any action, and one with a single forward.
  const auto text = [](int ranks, int stage, int microbatch) {
    return std::string(static_cast<std::size_t>(ranks - 1), '\n') + std::to_string(stage) + "F" +
           std::to_string(microbatch) + "\n";
  };
  // 255 chunks are the most, on any number of ranks.
  CHECK(schedule_from_csv(text(1, 254, 0)).shape == pipeline_shape{1, 255, 1, stage_placement::straight});
  refuses_csv(text(1, 255, 0),
              "schedule CSV: 256 stages on 1 rows, one row for each rank, are more than 255 chunks on each");
  CHECK(schedule_from_csv(text(3, 3 * 255 - 1, 0)).shape.chunks == 255);
  refuses_csv(text(3, 3 * 256 - 1, 0),
              "schedule CSV: 768 stages on 3 rows, one row for each rank, are more than 255 chunks on each");

  const std::string too_many =
      " microbatches): the shape of a pipeline needs 1 to 1024 ranks, 1 to 255 chunks on each and 1 to 65535 "
      "microbatches, of which the product is at most 4194304";
  CHECK(schedule_from_csv(text(1, 63, 65534)).shape.chunks == 64);
  refuses_csv(text(1, 64, 65534), "schedule CSV (1 ranks, 65 chunks each, 65535" + too_many);
  // 258 * 255 * 65535 is slightly above 2^32: an int would keep only the excess, and the index would be out of bounds.
  const std::string wraps = text(258, 258 * 255 - 1, 65534);
  CHECK(wraps.size() < 330);
  refuses_csv(wraps, "schedule CSV (258 ranks, 255 chunks each, 65535" + too_many);
  // A product that still fits in an int: two thousand million.
  const std::string large = text(128, 128 * 255 - 1, 65534);
  CHECK(large.size() < 141);
  refuses_csv(large, "schedule CSV (128 ranks, 255 chunks each, 65535" + too_many);

  std::string rows;
  for (int r = 0; r < 1024; ++r) rows += std::to_string(r) + "F0," + std::to_string(r) + "B0\n";
  CHECK(schedule_from_csv(rows).shape.ranks == 1024);
  refuses_csv(rows + "1024F0\n", "schedule CSV: more than 1024 rows, one row for each rank");
}

TEST_CASE("a file with an invalid schedule is refused when it is parsed") {
  const temp_folder folder;
  const std::string path = folder.write("wrong.csv", "0F0,0B0\n1B0,1F0\n");
  refuses(path, 2, 1,
          "with 2 pipeline ranks and 1 microbatch: rank 1, action 0 (B0.0): a backward comes before the "
          "forward of its microbatch in the same stage");
}

TEST_CASE("a user's policy needs only make") {
  CHECK(schedule_name_of<one_at_a_time>() == "custom");
  const schedule s = make_schedule<one_at_a_time>(3, 4);
  CHECK(s.shape.chunks == 2);
  CHECK(describe(verify(s)) == "ok");
  CHECK(peak_activations(s) == 1);
  CHECK(simulate(s).makespan_idle() == doctest::Approx(2.0 / 3));
  CHECK_THROWS_AS(make_schedule<one_at_a_time>(0, 4), error);
  CHECK_THROWS_WITH(
      make_schedule<interleaved<2>>(4, 6),
      ("schedule interleaved (4 ranks, 6 microbatches): " + not_divisible + "numbers of microbatches are 4 and 8")
          .c_str());
}

TEST_CASE("an automatic schedule is no longer than any hand-made one, and keeps the limit") {
  for (double w : {0.5, 1.4})
    for (double link : {0.0, 0.2})
      for (int chunks : {1, 2}) {
        const int p = 4, m = 10;
        schedule_costs costs;
        costs.rank_part = {1.0, 1.2 + w, 1.2, w};
        costs.link = link;
        const pipeline_shape shape{p, chunks, m, chunks == 2 ? stage_placement::vee : stage_placement::straight};
        std::vector<schedule> hand_made;
        if (chunks == 1)
          hand_made = {make_schedule<gpipe>(p, m), make_schedule<one_f_one_b>(p, m), make_schedule<zb_h1>(p, m),
                       make_schedule<zb_h2>(p, m)};
        else
          hand_made = {make_schedule<zb_v>(p, m), make_schedule<dualpipe_v>(p, m), make_schedule<v_half>(p, m),
                       make_schedule<v_min>(p, m)};
        for (double limit : {-1.0, 4.0, 1.0}) {
          CAPTURE(limit);
          const schedule s = automatic(shape, costs, {.max_activations = limit, .improvements = 500});
          CHECK(describe(verify(s, {.max_activations = limit})) == "ok");
          const double length = simulate(s, costs).makespan;
          for (const schedule& other : hand_made)
            if (limit < 0 || peak_activations(other) <= limit)
              CHECK(length <= simulate(other, costs).makespan * (1 + 1e-9));
          CHECK(automatic(shape, costs, {.max_activations = limit, .improvements = 500}).order == s.order);
        }
      }
}

TEST_CASE("an automatic schedule uses the known costs") {
  // The 1.5B row of the zero-bubble paper, one slower stage, and a memory limit between ZB-H1 and ZB-H2.
  schedule_costs costs;
  for (int stage = 0; stage < 4; ++stage) {
    const double slow = stage == 3 ? 1.2 : 1.0;
    costs.stages.push_back({18.5 * slow, 27.4 * slow, 18.1 * slow, 9.3 * slow});
  }
  costs.link = 0.6;
  const auto length = [&](const schedule& s) { return simulate(s, costs).makespan; };
  const schedule s = automatic({.ranks = 4, .microbatches = 12}, costs, {.max_activations = 5});
  CHECK(peak_activations(s) <= 5);
  CHECK(length(s) < 0.99 * length(make_schedule<zb_h1>(4, 12)));

  // By span, the search finds the value of ZB-H2.
  const schedule spanned = automatic({.ranks = 4, .microbatches = 12}, {}, {.by_span = true});
  CHECK(simulate(spanned).span_idle() == 0);
  CHECK_THROWS_WITH(automatic({.ranks = 4, .microbatches = 12}, {}, {.max_activations = 0.5}),
                    "schedule automatic: max_activations is 0.5, and a rank must keep at least 1");
}

TEST_CASE("moving the Ws turns 1F1B into ZB-H1, and saves idle time with uneven costs") {
  const int p = 4, m = 12;
  const auto least = [&](const schedule& s, const schedule_costs& costs, int limit) {
    double length = 1e30;
    for (double patience : {0.0, 0.25, 0.5, 0.75, 1.0}) {
      const schedule refilled = refill_weights(s, costs, patience, limit);
      CHECK(describe(verify(refilled, {.max_activations = static_cast<double>(limit) / s.shape.chunks})) == "ok");
      length = std::min(length, simulate(refilled, costs).makespan);
    }
    return length;
  };
  CHECK(least(make_schedule<one_f_one_b>(p, m), {}, p) == simulate(make_schedule<zb_h1>(p, m)).makespan);
  const schedule interleaved_1f1b = make_schedule<interleaved<2>>(p, m);
  CHECK(simulate(interleaved_1f1b).makespan == 3 * m + 4.5);
  CHECK(least(interleaved_1f1b, {}, 11) == 3 * m + 1.5);  // the number of chunks that interleaved 1F1B keeps

  schedule_costs uneven;
  uneven.rank_part = {18.5, 27.4, 18.1, 9.3};
  uneven.link = 0.6;
  const schedule h1 = make_schedule<zb_h1>(p, m);
  CHECK(least(h1, uneven, p) == doctest::Approx(simulate(h1, uneven).makespan));
  CHECK(least(h1, uneven, m) < 0.97 * simulate(h1, uneven).makespan);
}
