// Runs the test cases that the command line selects. It is an error to select none.
#pragma once

#include <doctest/doctest.h>

#include <cstdio>

namespace plait::test {

/// Counts the test cases that pass the filters of the command line.
struct chosen_cases : doctest::IReporter {
  static inline unsigned count = 0;

  explicit chosen_cases(const doctest::ContextOptions&) {}
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats& run) override { count += run.numTestCasesPassingFilters; }
  void test_case_start(const doctest::TestCaseData&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
};

inline int run_doctest(int count, char** arguments) {
  doctest::registerReporter<chosen_cases>("chosen_cases", 0, false);
  doctest::Context context(count, arguments);
  const int result = context.run();
  if (context.shouldExit()) return result;  // --help, or a list of test cases
  if (chosen_cases::count == 0) {
    std::fputs("the command line chooses none of this program's test cases\n", stderr);
    return 1;
  }
  return result;
}

}  // namespace plait::test
