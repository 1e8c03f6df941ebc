// program: files
#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>

#include "support/temp_folder.hpp"
#include "support/texts.hpp"
#include "train_llama/observe/run_log.hpp"

namespace {

using plait::format_duration;
using plait::format_rate;
using plait::progress;
using plait::step_record;
using plait::test::occurrences;
using std::chrono::milliseconds;

/// Runs `steps` updates, `between` apart, and returns what was printed.
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

TEST_CASE("what is known beside is shown, and what is not known is left out") {
  step_record record{.step = 3, .loss = 2, .grad_norm = 1, .lr = 1e-3, .tokens_per_second = 812, .comm_share = 0.5};
  const std::string line = "5 s left  step 3/9  loss 2.0000  grad 1.000  812 tok/s";
  CHECK(plait::format_progress(record, 9, 5) == line + "  lr 1.00e-03  comm 50%");
  record.mfu = 0.4149;
  CHECK(plait::format_progress(record, 9, 5) == line + "  MFU 41.5%  lr 1.00e-03  comm 50%");
  record.comm_share = std::nan("");
  CHECK(plait::format_progress(record, 9, 5) == line + "  MFU 41.5%  lr 1.00e-03");
}

TEST_CASE("the share of communication that was hidden stands behind its time, by axes") {
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

TEST_CASE("a line that is too long for a terminal loses whole items, the last first") {
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

TEST_CASE("an interval of no steps is refused") {
  CHECK_ERROR(progress({.steps = 1, .every = 0}, stderr), "every", "at least 1");
}
