// program: files
// Logs of runs are read as they were written, and compared. Results: the first different step, number and parameter;
// runs that went back to an earlier step; steps and hashes in one log only. Errors in a log name its line.
#include "checkpoint_tool/compare_runs.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/temp_folder.hpp"
#include "train_llama/observe/run_log.hpp"

using namespace plait;

namespace {

using steps = std::vector<std::int64_t>;

/// A step of a run; its weights were hashed if `hash` is not 0.
struct written {
  std::int64_t step;
  double loss;
  std::uint64_t hash = 0;
  bool resumed = false;  ///< the line has hashes only
};

std::vector<parameter_hash> model_of(std::uint64_t hash, bool gradients = true) {
  std::vector<parameter_hash> all = {{"model.embed_tokens.weight", 1},
                                     {"model.layers.10.mlp.up_proj.weight", hash},
                                     {"model.layers.2.mlp.up_proj.weight", ~hash},  // not in alphabetical order
                                     {"lm_head.weight", 2}};
  if (gradients) all[1].gradient = hash + 1, all[3].gradient = 3;
  return all;
}

/// The text that json_log writes for such a run.
std::string log_of(const std::vector<written>& run) {
  const temp_folder dir;
  {
    json_log log(dir / "log.jsonl");
    for (const written& w : run) {
      if (w.step > 0 && !w.resumed) log.step({.step = w.step, .loss = w.loss, .grad_norm = 1, .lr = 0.1});
      if (w.hash != 0) log.hashes(w.step, model_of(w.hash, w.step > 0 && !w.resumed));
      if (w.step == 2) log.write(json_object().add("save", json_object().add("step", w.step)));
    }
    log.summary(json_object().add("weights_hash", "ff"));
  }
  return dir.read("log.jsonl");
}
run_log read(const std::vector<written>& run) { return read_run_log(log_of(run), "x"); }

steps steps_of(const run_log& log) {
  steps all;
  for (const logged_step& s : log.steps) all.push_back(s.step);
  return all;
}

}  // namespace

TEST_CASE("a log is read unchanged: numbers to the last bit, hashes in the order of the model") {
  const double third = 1.0 / 3, small = 4.9e-324;
  const run_log log = read({{0, 0, 7}, {1, third}, {2, small, ~std::uint64_t{0}}, {3, std::nan("")}});
  CHECK(steps_of(log) == steps{0, 1, 2, 3});
  CHECK_FALSE(log.cut_short);
  CHECK(log.repeated.empty());
  CHECK_FALSE(log.steps[0].numbers);
  CHECK(log.steps[1].numbers->loss == third);
  CHECK(log.steps[2].numbers->loss == small);
  CHECK(log.steps[2].numbers->lr == 0.1);
  CHECK(std::isnan(log.steps[3].numbers->loss));
  CHECK(log.steps[0].weights == named_hashes{{"model.embed_tokens.weight", 1},
                                             {"model.layers.10.mlp.up_proj.weight", 7},
                                             {"model.layers.2.mlp.up_proj.weight", ~std::uint64_t{7}},
                                             {"lm_head.weight", 2}});
  CHECK(log.steps[0].gradients.empty());
  CHECK(log.steps[1].weights.empty());
  CHECK(log.steps[2].gradients == named_hashes{{"model.layers.10.mlp.up_proj.weight", 0}, {"lm_head.weight", 3}});
}

TEST_CASE("the first difference: its step, numbers and parameters") {
  const std::vector<written> run = {{0, 0, 5}, {1, 2.5}, {2, 2.25, 6}, {3, 2.125}, {4, 2.0625, 7}};
  const run_comparison same = compare_runs(read(run), read(run));
  CHECK(same.equal());
  CHECK(same.compared == steps{0, 1, 2, 3, 4});
  CHECK(same.hashed == steps{0, 2, 4});
  CHECK(same.first_weights() == nullptr);

  std::vector<written> other = run;
  other[3].loss = std::nextafter(2.125, 3.0);
  other[4].hash = 8;
  const run_comparison found = compare_runs(read(run), read(other));
  REQUIRE(found.differences.size() == 2);
  CHECK(found.differences[0].step == 3);
  REQUIRE(found.differences[0].numbers.size() == 1);
  CHECK(found.differences[0].numbers[0].name == "loss");
  CHECK(found.differences[0].numbers[0].a == 2.125);
  CHECK(found.differences[0].numbers[0].b == other[3].loss);
  CHECK(found.differences[0].weights.compared == 0);
  REQUIRE(found.first_weights() == &found.differences[1]);
  const hash_difference& weights = found.differences[1].weights;
  CHECK(found.differences[1].numbers.empty());
  CHECK(weights.compared == 4);
  REQUIRE(weights.differing.size() == 2);
  CHECK(weights.differing[0].name == "model.layers.10.mlp.up_proj.weight");
  CHECK(weights.differing[0].a == 7);
  CHECK(weights.differing[0].b == 8);
  CHECK(found.differences[1].gradients.compared == 2);
  CHECK(found.differences[1].gradients.differing.size() == 1);

  other = run;
  other[1].loss = std::nan("");
  CHECK(compare_runs(read(run), read(other)).differences.size() == 1);
  CHECK(compare_runs(read(other), read(other)).equal());
  other[1].loss = -0.0;
  std::vector<written> zero = run;
  zero[1].loss = 0.0;
  CHECK(compare_runs(read(zero), read(other)).differences.size() == 1);
}

TEST_CASE("steps and hashes in one log only are reported, and are not a difference") {
  const run_comparison found = compare_runs(read({{0, 0, 5}, {1, 2, 6}, {2, 1, 7}, {3, 1, 8}}),
                                            read({{1, 2, 6, true}, {2, 1}, {3, 1, 8}, {4, 1, 9}}));
  CHECK(found.equal());
  CHECK(found.compared == steps{1, 2, 3});
  CHECK(found.only_a == steps{0});
  CHECK(found.only_b == steps{4});
  CHECK(found.hashed == steps{1, 3});
  CHECK(found.hashed_only_a == steps{2});
  CHECK(found.hashed_only_b.empty());
  CHECK(found.apart.empty());

  const run_comparison nothing = compare_runs(read({{1, 2}, {2, 1}}), read({{1, 0, 6, true}, {2, 1}}));
  CHECK(nothing.compared == steps{2});
  CHECK(nothing.apart == steps{1});
  CHECK(nothing.hashed_only_b == steps{1});
}

TEST_CASE("parameters of one model only") {
  run_log a = read({{0, 0, 5}}), b = a;
  b.steps[0].weights[1].first = "model.layers.10.mlp.gate_proj.weight";
  b.steps[0].weights.emplace_back("extra", 1);
  const run_comparison found = compare_runs(a, b);
  REQUIRE(found.differences.size() == 1);
  const hash_difference& weights = found.differences[0].weights;
  CHECK(weights.compared == 3);
  CHECK(weights.differing.empty());
  CHECK(weights.only_a == std::vector<std::string>{"model.layers.10.mlp.up_proj.weight"});
  CHECK(weights.only_b == std::vector<std::string>{"model.layers.10.mlp.gate_proj.weight", "extra"});
}

TEST_CASE("the layer of a parameter") {
  static_assert(layer_of("model.layers.3.mlp.up_proj.weight") == "model.layers.3");
  static_assert(layer_of("h.12.attn.c_attn.bias") == "h.12");
  static_assert(layer_of("model.embed_tokens.weight") == "model.embed_tokens");
  static_assert(layer_of("lm_head.weight") == "lm_head");
  static_assert(layer_of("wpe") == "wpe");
  static_assert(layer_of("layer1.weight") == "layer1");
  static_assert(layer_of("a..7") == "a..7");
  static_assert(layer_of("").empty());
}

TEST_CASE("after a run goes back, its last number for a step counts") {
  const run_log log =
      read({{0, 0, 5}, {1, 2}, {2, 1.5, 6}, {3, 1.25}, {4, 1.125, 7}, {2, 0, 6, true}, {3, 1.375}, {4, 1.0, 9}});
  CHECK(steps_of(log) == steps{0, 1, 2, 3, 4});
  CHECK(log.repeated == steps{3, 4});
  CHECK(log.hashed_anew.empty());
  CHECK(log.steps[2].gradients.size() == 2);
  CHECK(log.steps[3].numbers->loss == 1.375);
  CHECK(log.steps[4].weights[1].second == 9);
  const run_log shorter = read({{1, 2}, {2, 1.5}, {3, 1.25, 8}, {1, 0, 5, true}, {2, 1.75}});
  CHECK(steps_of(shorter) == steps{1, 2});
  CHECK(shorter.repeated == steps{2, 3});
  CHECK(read({{1, 2}, {2, 1.5, 6}, {2, 0, 4, true}, {3, 1}}).hashed_anew == steps{2});
}

TEST_CASE("an incomplete last line is ignored; other damage is reported by its line") {
  const std::string text = log_of({{0, 0, 5}, {1, 2, 6}});
  const std::size_t last = text.find("{\"step\": 1, \"loss");
  for (const std::size_t kept : {last + 1, last + 20, text.find('\n', last) - 1}) {
    const run_log cut = read_run_log(std::string_view(text).substr(0, kept), "x");
    CHECK(cut.cut_short);
    CHECK(steps_of(cut) == steps{0});
  }
  const run_log unended = read_run_log(std::string_view(text).substr(0, text.find('\n', last)), "x");
  CHECK_FALSE(unended.cut_short);
  CHECK(steps_of(unended) == steps{0, 1});

  CHECK_ERROR(read_run_log("", "A: 'x'"), "A: 'x': no line has a step; legal is a log of a training run");
  CHECK_ERROR(read_run_log("{\"st", "x"), "no line has a step, and the last is not whole");
  CHECK_ERROR(read_run_log("{\"summary\": {}}\n", "x"), "no line has a step");
  const std::string good = R"({"step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1})"
                           "\n";
  CHECK_ERROR(read_run_log(good + "hello\n", "x"), "x, line 2: malformed JSON");
  CHECK_ERROR(read_run_log(good + "\n" + good, "x"), "x, line 2: malformed JSON");
  CHECK_ERROR(read_run_log(good + "[1]\n", "x"), "x, line 2: it is array; legal is an object");
  CHECK_ERROR(read_run_log(good + R"({"step": -1})"
                                  "\n",
                           "x"),
              "line 2: step is -1; legal are integers from 0 on");
  CHECK_ERROR(read_run_log(R"({"step": 18446744073709551615})", "x"), "line 1: step is 18446744073709551615;");
  CHECK_ERROR(read_run_log(R"({"step": "1"})", "x"), "step is \"1\"; legal");
  CHECK_ERROR(read_run_log(R"({"step": 1, "loss": 2})", "x"), "grad_norm is missing; legal are numbers and null");
  CHECK_ERROR(read_run_log(R"({"step": 1, "loss": "2"})", "x"), "loss is \"2\"; legal");
  CHECK_ERROR(read_run_log(R"({"step": 1, "step": 2})", "x"), "the key 'step' appears twice");
  CHECK_ERROR(read_run_log(R"({"hashes": 5})", "x"), "hashes is 5; legal is an object");
  CHECK_ERROR(read_run_log(R"({"hashes": {"weights": {}}})", "x"), "step is missing; legal");
  CHECK_ERROR(read_run_log(R"({"hashes": {"step": 0}})", "x"), "hashes.weights is missing; legal is an object");
  CHECK_ERROR(read_run_log(R"({"hashes": {"step": 0, "weights": {}}})", "x"), "hashes has no weights");
  for (const char* hash :
       {"\"\"", "5", "\"123\"", "\"0123456789abcdeg\"", "\"0123456789abcdef0\"", "\"-123456789abcdef\""})
    CHECK_ERROR(read_run_log(cat({"{\"hashes\": {\"step\": 0, \"weights\": {\"w\": ", hash, "}}}"}), "x"),
                "the hash of 'w' is " + std::string(hash) + "; legal are 16 hexadecimal digits");
}
