// Runs a correct program on one rank, and each program with a bug on two. Prints a line for each: the error, or how its
// record differs.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>

#include "plait/testing/program_parity.hpp"

namespace ports {

template <class Train>
struct port {
  const char* name;
  Train* train;
};

/// `run(train, ranks, into)` returns the text of the error, or "". Returns the exit code.
template <class Run, class Train, std::size_t Bugs>
int report(Run run, Train* right, const port<Train> (&bugs)[Bugs]) {
  plait::testing::program_run one, two;
  for (const std::string& why : {run(right, 1, one), run(right, 2, two), compare_runs(one, two).text()})
    if (!why.empty()) return std::fprintf(stderr, "without a bug: %s\n", why.c_str()), 1;
  for (const auto& [name, train] : bugs) {
    plait::testing::program_run many;
    const std::string why = run(train, 2, many);
    const std::string line = why.empty() ? "kit: " + compare_runs(one, many).text() : "run: " + why;
    std::printf("%s\t%s\n", name, line.c_str());
  }
  return 0;
}

}  // namespace ports
