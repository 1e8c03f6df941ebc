// program: files
#include "train_llama/observe/run_log.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/temp_folder.hpp"
#include "support/texts.hpp"

using nlohmann::json;
using plait::json_log;
using plait::json_object;

TEST_CASE("numbers are read exactly, with their type") {
  for (double value :
       {0.0, 1.0, -2.5, 0.1, 1.0 / 3, 5.545177444479562, 1e300, 4.9e-324, 1e16, 123456789.0, 0x1.fffffffffffffp-3}) {
    const json back = json::parse(plait::json_number(value));
    CHECK(back.get<double>() == value);
    CHECK(back.is_number_float());
  }
  CHECK(plait::json_number(std::nan("")) == "null");
  CHECK(plait::json_number(std::numeric_limits<double>::infinity()) == "null");

  json_object object;
  object.add("i", std::int64_t{-9007199254740993}).add("u", ~std::uint64_t{0}).add("b", true).add("f", 0.1f);
  object.add("s", "a\"b\\c\n\t\x01\x7f\xc3\xa9").add("list", std::vector<double>{1, 0.5}).add("none", json_object());
  object.add("nested", json_object().add("tp", 1).add("dp, x", 2)).add("words", std::vector<std::string>{"a, b", "c"});
  object.add_null("n").add("empty", std::vector<int>{});
  for (const json& back : {json::parse(object.text()), json::parse(object.lines())}) {
    CHECK(back["i"] == -9007199254740993);
    CHECK(back["u"] == ~std::uint64_t{0});
    CHECK(back["b"] == true);
    CHECK(back["f"].get<float>() == 0.1f);
    CHECK(back["s"] == "a\"b\\c\n\t\x01\x7f\xc3\xa9");
    CHECK(back["list"] == json({1.0, 0.5}));
    CHECK(back["none"] == json::object());
    CHECK(back["nested"]["dp, x"] == 2);
    CHECK(back["words"] == json({"a, b", "c"}));
    CHECK(back["n"].is_null());
    CHECK(back["empty"] == json::array());
  }
  CHECK(object.text().find('\n') == std::string::npos);
}

TEST_CASE("a line per step, each on disk at once, then the summary") {
  temp_folder dir;
  dir.write("log.jsonl", "what an earlier run left\n");
  json_log log(dir / "log.jsonl");
  CHECK(dir.read("log.jsonl").empty());
  log.step(
      {.step = 1, .loss = 5.5, .grad_norm = std::nan(""), .lr = 0.1, .tokens_per_second = 1234.5, .comm_share = 0.25});
  std::istringstream first(dir.read("log.jsonl"));
  json line = json::parse(first);
  CHECK(line.size() == 6);
  CHECK(line["step"] == 1);
  CHECK(line["loss"] == 5.5);
  CHECK(line["grad_norm"].is_null());
  CHECK(line["lr"] == 0.1);
  CHECK(line["tokens_per_second"] == 1234.5);
  CHECK(line["comm_share"] == 0.25);

  log.step({.step = 2,
            .comm_share = std::nan(""),
            .mfu = 0.25,
            .auxiliary = 0.5,
            .expert_imbalance = 1.5,
            .routers = {{1, {{2, 6}, {}, 0.5}}, {10, {{8, 0}, {3, 0}, 0.25}}}});
  std::istringstream second(dir.read("log.jsonl"));
  second.ignore(1000, '\n');
  line = json::parse(second);
  CHECK(line["comm_share"].is_null());
  CHECK(line["mfu"] == 0.25);
  CHECK(line["auxiliary"] == 0.5);
  CHECK(line["expert_imbalance"] == 1.5);
  CHECK(line["routers"].dump() ==
        R"({"1":{"entropy":0.5,"load":[2,6]},"10":{"dropped":[3,0],"entropy":0.25,"load":[8,0]}})");
  log.step({.step = 3, .communication = {{"dp", 2e-3, 0.5e-3, 0.5, 3}, {"tp", std::nan(""), std::nan(""), 0, -1}}});
  std::istringstream third(dir.read("log.jsonl"));
  third.ignore(1000, '\n').ignore(1000, '\n');
  line = json::parse(third);
  CHECK(line["communication"].size() == 2);
  CHECK(line["communication"]["dp"] ==
        json({{"seconds", 2e-3}, {"waited", 0.5e-3}, {"hidden", 0.75}, {"worst", 0.5}, {"worst_rank", 3}}));
  CHECK(line["communication"]["tp"]["seconds"].is_null());
  CHECK(line["communication"]["tp"]["hidden"].is_null());
  log.summary(json_object()
                  .add("peak_bytes", 4096)
                  .add("bytes_sent", json_object().add("tp", 10).add("dp", 20))
                  .add("weights_hash", "00ff"));
  const std::string text = dir.read("log.jsonl");
  CHECK(std::count(text.begin(), text.end(), '\n') == 4);
  const json last = json::parse(text.substr(text.rfind('\n', text.size() - 2) + 1));
  CHECK(last["summary"]["bytes_sent"]["dp"] == 20);
  CHECK(last["summary"]["weights_hash"] == "00ff");
}

TEST_CASE("hashes have a separate line, by the names of parameters in the order of the model") {
  temp_folder dir;
  json_log log(dir / "log.jsonl");
  log.hashes(0, {{"b", 255}, {"a", ~std::uint64_t{0}}});
  log.hashes(1, {{"b", 1, 2}, {"a", 3}});
  CHECK(dir.read("log.jsonl") ==
        R"({"hashes": {"step": 0, "weights": {"b": "00000000000000ff", "a": "ffffffffffffffff"}}}
{"hashes": {"step": 1, "weights": {"b": "0000000000000001", "a": "0000000000000003"}, "gradients": {"b": "0000000000000002"}}}
)");
}

TEST_CASE("a log has one writer, and a second one does not change it") {
  temp_folder dir;
  const std::string path = dir / "log.jsonl";
  {
    json_log first(path);
    first.step({.step = 1});
    CHECK_ERROR(json_log(dir / "log.jsonl"), "log: '" + path + "' is being written by another run");
    CHECK_ERROR(json_log(path, "--log", true), "is being written by another run");
    first.step({.step = 2});
  }
  {
    json_log again(path, "--log", true);
    again.step({.step = 3});
  }
  const std::string all = dir.read("log.jsonl");
  CHECK(std::count(all.begin(), all.end(), '\n') == 3);
}

TEST_CASE("of two runs that start at once one gets the log") {
  temp_folder dir;
  for (int round = 0; round < 3000; ++round) {
    const std::string name = "log" + std::to_string(round);
    dir.write(name, "what an earlier run left\n");
    std::atomic<int> here = 0, began = 0;
    const auto run = [&] {
      std::optional<json_log> log;
      ++here;
      while (here < 2) std::this_thread::yield();
      try {
        log.emplace(dir / name);
        ++began;
      } catch (const plait::error&) {
      }
      ++here;
      while (here < 4) std::this_thread::yield();
    };
    std::thread other(run);
    run();
    other.join();
    CHECK(began == 1);
    CHECK(dir.read(name + ".1") == "what an earlier run left\n");
    CHECK(dir.read(name).empty());
  }
}

TEST_CASE("a resumed run removes the incomplete line, and no other") {
  const temp_folder dir;
  const auto continued = [&](const std::string& there) {
    dir.write("log.jsonl", there);
    json_log(dir / "log.jsonl", "--log", true).step({.step = 9});
    return dir.read("log.jsonl");
  };
  const std::string whole = "{\"save\": {}}\n{\"save\": {}}\n", added = continued("");
  CHECK(continued(whole) == whole + added);
  CHECK(continued(whole + "{\"step\": 3, \"lo") == whole + added);
  CHECK(continued(whole + std::string(10000, ' ')) == whole + added);  // longer than one read
  CHECK(continued(std::string(4095, ' ') + "\n" + std::string(4096, 'x')) == std::string(4095, ' ') + "\n" + added);
  CHECK(continued("{\"step\": 1") == added);
  json_log("/dev/null", "--log", true).step({.step = 1});
  const plait::run_log log = plait::read_run_log(continued(whole + "{\"st"), "log");
  CHECK(log.steps.size() == 1);
}

TEST_CASE("a new run keeps an earlier run's log under the first free number") {
  temp_folder dir;
  const std::string path = dir / "log.jsonl";
  std::vector<std::string> kept;
  for (int run = 1; run <= 3; ++run) {
    json_log log(path);
    kept.push_back(log.kept());
    CHECK(dir.read("log.jsonl").empty());
    log.step({.step = run});
  }
  CHECK(kept == std::vector<std::string>{"", path + ".1", path + ".2"});
  for (int run = 1; run <= 2; ++run)
    CHECK(dir.read("log.jsonl." + std::to_string(run)).starts_with("{\"step\": " + std::to_string(run) + ","));
  CHECK(json_log(path, "--log", true).kept().empty());
  // An empty file is not a log, and a device has no content to keep.
  dir.write("empty.jsonl", "");
  CHECK(json_log(dir / "empty.jsonl").kept().empty());
  CHECK(json_log("/dev/null").kept().empty());
  // A link to the log still names it afterwards.
  std::filesystem::create_directory(dir / "far");
  std::filesystem::create_symlink("far/log.jsonl", dir / "link.jsonl");
  for (int run = 1; run <= 2; ++run) json_log(dir / "link.jsonl").step({.step = run});
  CHECK(dir.read("far/log.jsonl").starts_with("{\"step\": 2,"));
  CHECK(dir.read("far/log.jsonl.1").starts_with("{\"step\": 1,"));
}

TEST_CASE("a log of an earlier run that cannot be renamed stays") {
  temp_folder dir;
  const std::string name(255, 'a');  // the longest possible
  json_log(dir / name).step({.step = 1});
  CHECK_ERROR(json_log(dir / name), "log: '" + (dir / name) + "' is the log of an earlier run",
              "File name too long; name another file");
  CHECK(dir.read(name).starts_with("{\"step\": 1,"));
}

TEST_CASE("a log that cannot be written is an error that names the field") {
  temp_folder dir;
  CHECK_ERROR(json_log(dir / "absent/log"), "log", "absent/log", "No such file");
  CHECK_ERROR(json_log(dir / "", "--json"), "--json", "s a directory");
  json_log full("/dev/full");
  CHECK_ERROR(full.step({}), "log", "/dev/full", "No space left");
}

namespace {

using plait::format_duration;
using plait::format_rate;
using plait::progress;
using plait::step_record;
using plait::test::occurrences;
using std::chrono::milliseconds;

/// Runs `steps` updates at intervals of `between`, and returns the printed text.
std::string printed(plait::progress_config config, bool terminal, milliseconds between = milliseconds(1000)) {
  temp_folder dir;
  {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> out(std::fopen((dir / "out").c_str(), "wb"), &std::fclose);
    progress line(config, out.get(), terminal);
    auto now = progress::clock::now();
    for (std::int64_t s = config.first_step + 1; s <= config.steps; ++s) {
      now += between;
      line.update(
          {.step = s, .loss = 4.25, .grad_norm = 0.5, .lr = 1e-3, .tokens_per_second = 12345, .comm_share = 0.125},
          now);
    }
  }
  return dir.read("out");
}

}  // namespace

TEST_CASE("durations and rates") {
  CHECK(format_duration(0) == "0 s");
  CHECK(format_duration(59.4) == "59 s");
  CHECK(format_duration(59.6) == "1 min 00 s");
  CHECK(format_duration(185) == "3 min 05 s");
  CHECK(format_duration(7620) == "2 h 07 min");
  CHECK(format_duration(86400 * 4 + 3 * 3600) == "4 d 03 h");
  CHECK(format_duration(-1) == "?");
  CHECK(format_duration(0.0 / 0.0) == "?");
  CHECK(format_rate(0) == "0");
  CHECK(format_rate(812.3) == "812");
  CHECK(format_rate(999.6) == "1.00k");
  CHECK(format_rate(12345) == "12.3k");
  CHECK(format_rate(99960) == "100k");
  CHECK(format_rate(3.07e6) == "3.07M");
  CHECK(format_rate(-1) == "?");
}

TEST_CASE("without a terminal: plain lines, first, every n-th and last") {
  const std::string text = printed({.steps = 25, .every = 10}, false);
  CHECK(occurrences(text, "\n") == 4);
  CHECK(occurrences(text, "\r") == 0);
  CHECK(text.starts_with("24 s left  step 1/25  loss 4.2500  grad 0.500  12.3k tok/s  lr 1.00e-03  comm 12%\n"));
  CHECK(contains(text, "step 10/25"));
  CHECK(contains(text, "step 20/25"));
  CHECK(contains(text, "step 25/25"));
  CHECK(contains(text, "\n0 s left  step 25/25"));
  CHECK(occurrences(printed({.steps = 25, .first_step = 22, .every = 10}, false), "\n") == 2);
}

TEST_CASE("values that are known are shown, and the others are left out") {
  step_record record{.step = 3, .loss = 2, .grad_norm = 1, .lr = 1e-3, .tokens_per_second = 812, .comm_share = 0.5};
  const std::string line = "5 s left  step 3/9  loss 2.0000  grad 1.000  812 tok/s";
  CHECK(plait::format_progress(record, 9, 5) == line + "  lr 1.00e-03  comm 50%");
  record.mfu = 0.4149;
  CHECK(plait::format_progress(record, 9, 5) == line + "  MFU 41.5%  lr 1.00e-03  comm 50%");
  record.comm_share = std::nan("");
  CHECK(plait::format_progress(record, 9, 5) == line + "  MFU 41.5%  lr 1.00e-03");
}

TEST_CASE("the hidden share of communication follows its time, by axes") {
  step_record record{.step = 3, .loss = 2, .grad_norm = 1, .lr = 1e-3, .tokens_per_second = 812, .comm_share = 0.5};
  record.communication = {{"dp", 2e-3, 0.14e-3, 0.9, 1}, {"tp", 1e-3, 1e-3, 0, 0}};
  CHECK(plait::format_hidden(record.communication) == "hidden dp 93% tp 0%");
  CHECK(contains(plait::format_progress(record, 9, 5), "tok/s  lr 1.00e-03  comm 50%  hidden dp 93% tp 0%"));
  record.communication[0].seconds = record.communication[0].waited = std::nan("");  // not measured
  CHECK(plait::format_hidden(record.communication) == "hidden tp 0%");
  record.communication.pop_back();
  CHECK(plait::format_hidden(record.communication).empty());
  CHECK(plait::format_progress(record, 9, 5).ends_with("tok/s  lr 1.00e-03  comm 50%"));
  CHECK(plait::format_hidden({}).empty());
}

TEST_CASE("a line that is too long for a terminal loses whole items, starting with the last") {
  const step_record record{.step = 123456,
                           .loss = 12.3456,
                           .grad_norm = 123.456,
                           .lr = 3e-4,
                           .tokens_per_second = 123456,
                           .comm_share = 0.5,
                           .mfu = 0.4149};
  const std::string line = plait::format_progress(record, 1000000, 86400 * 13);
  CHECK(plait::first_columns(line, 79) ==
        "13 d 00 h left  step 123456/1000000  loss 12.3456  grad 123.456  123k tok/s");
  CHECK(plait::first_columns(line, line.size()) == line);
  CHECK(plait::first_columns(line, 9) == "13 d 00 h");  // its first item has 14 columns
}

TEST_CASE("on a terminal: one line rewritten, ended once") {
  const std::string text = printed({.steps = 5}, true);
  CHECK(occurrences(text, "\n") == 1);
  CHECK(text.ends_with("\x1b[K\n"));
  CHECK(occurrences(text, " left  step") == 6);  // five steps, and once more at the end
  const std::string fast = printed({.steps = 500}, true, milliseconds(1));
  CHECK(occurrences(fast, " left  step") < 10);
  CHECK(contains(fast, "step 500/500"));
}

TEST_CASE("remaining time follows the recent steps") {
  CHECK(contains(printed({.steps = 100, .every = 50}, false, milliseconds(2000)), "step 50/100"));
  const std::string text = printed({.steps = 100, .every = 40}, false, milliseconds(2000));
  CHECK(contains(text, "2 min 00 s left  step 40/100"));
}

TEST_CASE("an interval of zero steps is refused") {
  CHECK_ERROR(progress({.steps = 1, .every = 0}, stderr), "every", "at least 1");
}
