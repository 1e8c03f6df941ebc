// program: plan
#include <doctest/doctest.h>

#include <string>

#include "cases.hpp"
#include "plait/plan/machine_time.hpp"
#include "plan_llama/planner/hardware_json.hpp"
#include "support/texts.hpp"
#include "train_llama/machine.hpp"

namespace {

/// A machine of two nodes whose numbers are easy to multiply.
pp::hardware plain_machine() {
  pp::hardware h;
  h.name = "plain";
  h.peak = {1e12, 2e12, 0};
  h.memory = 1e10;
  h.memory_bandwidth = 1e11;
  h.product_share = {0.5, 0.5, 0};
  h.attention_share = 0.5;
  h.memory_share = 0.5;
  h.levels = {{"inside", 4, 100e9, 1, 1e-6, 0, 0}, {"outside", 0, 10e9, 1, 1e-5, 0, 0}};
  return h;
}

std::string refusal_of(const std::string& text) {
  return plait::test::text_thrown_by([&] { pp::parse_hardware(text, "my.json"); });
}

}  // namespace

TEST_CASE("every known machine is valid, and its description is read unchanged") {
  const std::vector<pp::hardware> all = pp::known_hardware();
  CHECK(all.size() == 7);
  for (const pp::hardware& h : all) {
    CAPTURE(h.name);
    CHECK_NOTHROW(pp::validate(h, h.name));
    const std::string text = pp::hardware_text(h);
    CHECK(pp::hardware_text(pp::parse_hardware(text, "text")) == text);
    CHECK(pp::parse_hardware(text, "text").levels.back().bandwidth == h.levels.back().bandwidth);
  }
  CHECK(pp::hardware_called("gb200", "--cluster").levels[0].ranks == 72);
}

TEST_CASE("peaks are those used for utilisation") {
  for (const char* name : {"A100", "H100", "H200", "GH200", "B200"}) {
    CAPTURE(name);
    const pp::hardware h = pp::hardware_called(name, "x");
    const std::string reported = std::string("NVIDIA ") + name + " 80GB HBM3";
    CHECK(h.peak_of(pp::number_kind::bf16) ==
          doctest::Approx(1e12 * plait::known_peak_tflops(reported, plait::product_kind::bf16)).epsilon(1e-3));
  }
}

TEST_CASE("a description starts with a known machine and replaces the given numbers") {
  const pp::hardware h = pp::parse_hardware(R"({"like": "h100", "name": "mine", "memory": 9.6e10, "launch": 0.001,
    "product_share": {"bf16": 0.25}, "levels": [{"name": "one", "ranks": 0, "bandwidth": 1e9, "latency": 1e-6}]})",
                                            "my.json");
  CHECK(h.name == "mine");
  CHECK(h.memory == 9.6e10);
  CHECK(h.launch == 0.001);
  CHECK(h.share_of(pp::number_kind::bf16) == 0.25);
  CHECK(h.share_of(pp::number_kind::fp8) == h100.share_of(pp::number_kind::fp8));
  CHECK(h.levels.size() == 1);
  CHECK(h.memory_bandwidth == h100.memory_bandwidth);
}

TEST_CASE("a description's invalid values are refused by key") {
  const auto with = [](const std::string& members) { return R"({"like": "h100", "name": "m", )" + members + "}"; };
  CHECK(refusal_of(with(R"("memry": 1)")).starts_with("my.json: unknown key 'memry'; legal are like, name, peak, "));
  CHECK(refusal_of(with(R"("memory": "80 GB")")) == R"(my.json: memory is "80 GB"; legal is a number)");
  CHECK(refusal_of(with(R"("memory": -1)")) == "my.json: memory is -1; legal is a positive number");
  CHECK(refusal_of(with(R"("memory_share": 1.5)")) ==
        "my.json: memory_share is 1.5; legal is a share above 0, at most 1");
  CHECK(refusal_of(with(R"("host_bandwidth": 55)")) ==
        "my.json: host_bandwidth is 55 bytes per second; legal is 1e6 or more, and 50 GB/s is 50e9");
  CHECK(refusal_of(with(R"("host_memory": -1)")) == "my.json: host_memory is -1; legal is 0 or more");
  CHECK(refusal_of(with(R"("tensor_hidden": 1)")) == "my.json: tensor_hidden is 1; legal is 0 or more and below 1");
  CHECK(refusal_of(with(R"("peak": {"int4": 1})")) == "my.json: unknown key 'peak.int4'; legal are f32, bf16, fp8");
  CHECK(refusal_of(with(R"("levels": [])")) ==
        "my.json: levels is empty; legal is one level or more, from the inside to the outside");
  CHECK(refusal_of(with(R"("levels": [{"name": "a", "ranks": 8, "bandwidth": 1e9, "latency": 0}])")) ==
        "my.json: levels[0].ranks is 8; legal is 0 for the outermost level, which joins all");
  CHECK(refusal_of(with(R"("levels": [{"name": "a", "ranks": 0, "latency": 0}])")) ==
        "my.json: levels[0].bandwidth is missing");
  CHECK(refusal_of(with(R"("levels": [{"name": "a", "ranks": 8, "bandwidth": 1e9, "latency": 0},
    {"name": "b", "ranks": 12, "bandwidth": 1e9, "latency": 0}, {"name": "c", "ranks": 0, "bandwidth": 1e9, "latency": 0}])")) ==
        "my.json: levels[1].ranks is 12; legal is a multiple of the level inside it, 8");
  CHECK(refusal_of(with(R"("levels": [{"name": "a", "ranks": 0, "bandwidth": 900, "latency": 0}])")) ==
        "my.json: levels[0].bandwidth is 900 bytes per second; legal is 1e6 or more, and 50 GB/s is 50e9");
  CHECK(refusal_of(with(R"("levels": [{"name": "a", "ranks": 2.5, "bandwidth": 1e9, "latency": 0}])")) ==
        "my.json: levels[0].ranks is 2.5; legal is an integer");
  CHECK(refusal_of(R"({"name": "m"})") == "my.json: peak is missing");
  CHECK(refusal_of("[]") == "my.json: the file is of type array; legal is an object");
  CHECK(refusal_of(with(R"("peak": 5)")) == "my.json: peak is of type number; legal is an object");
  CHECK(refusal_of(with(R"("levels": {})")) == "my.json: levels is of type object; legal is a list");
  CHECK(refusal_of(R"({"like": "h100"})") == "my.json: name is missing");
  CHECK(refusal_of(R"({"like": "h900", "name": "m"})")
            .starts_with("my.json: like: unknown hardware 'h900'; known are a100, "));
}

TEST_CASE("programs are found by name") {
  for (const pp::software& s : pp::known_software()) CHECK(pp::software_called(s.name, "x").name == s.name);
  CHECK_THROWS_WITH_AS(pp::software_called("caffe", "--program"),
                       doctest::Contains("--program: unknown program 'caffe'; known are plait, "), plait::error);
}

TEST_CASE("a ring inside a node and across nodes takes the bytes of its slowest link") {
  const pp::hardware h = plain_machine();
  using plait::collective;
  // 4 ranks of one node: 3/4 of 8 GB over 100 GB/s, and 3 steps of a microsecond.
  const pp::group_place node = pp::place_group(h, {4, 1});
  CHECK(pp::collective_seconds(h, node, collective::all_gather, 8e9) == doctest::Approx(0.06 + 3e-6));
  CHECK(pp::collective_seconds(h, node, collective::reduce_scatter, 8e9) == doctest::Approx(0.06 + 3e-6));
  // An all-reduce moves twice as much; its tree has 2 log2(4) steps where a ring has 6.
  CHECK(pp::collective_seconds(h, node, collective::all_reduce, 8e9) == doctest::Approx(0.12 + 4e-6));
  // 8 ranks on two nodes: 7/8 of 8 GB through the four links of a node together, 1.75 GB each.
  const pp::group_place two = pp::place_group(h, {8, 1});
  CHECK(two.together[0] == 4);
  CHECK(pp::collective_seconds(h, two, collective::all_gather, 8e9) == doctest::Approx(0.175 + 6e-6 + 1e-5));
  // One rank on each of 8 nodes: only its own link, 7 steps.
  const pp::group_place apart = pp::place_group(h, {8, 4});
  CHECK(apart.together[0] == 1);
  CHECK(pp::collective_seconds(h, apart, collective::all_gather, 8e9) == doctest::Approx(0.7 + 7e-5));
  // Two axes: 2 ranks side by side on each of 3 nodes.
  const pp::group_place both = pp::place_group(h, {2, 2}, {3, 4});
  CHECK(both.size == 6);
  CHECK(both.together[0] == 2);
  CHECK(pp::collective_seconds(h, both, collective::all_gather, 6e9) == doctest::Approx(0.25 + 3e-6 + 2e-5));
  // In an all-to-all only data for other nodes cross, on each rank's own link: 4 of 8 parts of 8 GB.
  CHECK(pp::collective_seconds(h, two, collective::all_to_all, 8e9) == doctest::Approx(0.4 + 6e-6 + 1e-5));
  CHECK(pp::collective_seconds(h, pp::place_group(h, {1, 1}), collective::all_reduce, 8e9) == 0);
}

TEST_CASE("a message takes the link between neighbours") {
  const pp::hardware h = plain_machine();
  CHECK(pp::message_seconds(h, {2, 2}, 1e9) == doctest::Approx(0.01 + 1e-6));
  CHECK(pp::message_seconds(h, {2, 4}, 1e9) == doctest::Approx(0.1 + 1e-5));
  CHECK(pp::message_seconds(h, {1, 4}, 1e9) == 0);
}

TEST_CASE("an all-reduce on 8 H100 is within a quarter of nccl-tests from 1 MB to 1 GB") {
  const pp::group_place node = pp::place_group(h100, {8, 1});
  struct {
    double bytes, microseconds;
  } const measured[] = {{1048576, 27.37},    {4194304, 54.19},    {16777216, 123.8},
                        {67108864, 324.7},   {134217728, 586.4},  {268435456, 1112.5},
                        {536870912, 2151.0}, {1073741824, 4029.4}};  // NVIDIA/dgxc-benchmarking@841f546 nccl/README.md
  for (const auto& m : measured) {
    CAPTURE(m.bytes);
    const double found = 1e6 * pp::collective_seconds(h100, node, plait::collective::all_reduce, m.bytes);
    CHECK(found / m.microseconds > 0.75);
    CHECK(found / m.microseconds < 1.25);
  }
}
