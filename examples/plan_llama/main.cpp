#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <map>
#include <string>

#include "plait/core/error.hpp"
#include "plait/plan/hardware_json.hpp"
#include "rows.hpp"

namespace {

int run(int argc, char** argv) {
  CLI::App app{"Finds and prices layouts of a training step by calculation.", "plan_llama"};
  std::map<std::string, std::string> given;
  std::string layouts;
  for (const char* name : {"model", "cluster", "seq", "batch", "batch_tokens", "program", "precision"}) {
    std::string option = name;
    std::replace(option.begin(), option.end(), '_', '-');
    app.add_option("--" + option, given[name]);
  }
  app.add_option("--layouts", layouts, "a CSV file of layouts to price");
  std::string printed;
  app.add_option("--print-hardware", printed, "prints the description of a machine, to start a file from");
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    plait::fail({e.what(), " (--help lists the options)"});
  }
  if (!printed.empty()) {
    fmt::print("{}", plait::planner::hardware_text(plait::planner::load_hardware(printed, "--print-hardware")));
    return 0;
  }
  request common;
  for (const char* name : {"model", "cluster", "seq", "batch", "batch_tokens", "program", "precision"})
    if (!given[name].empty()) set_property(common, name, given[name], std::string("--") + name);
  if (!layouts.empty()) fmt::print("{}", price_rows(layouts, common));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::fflush(stdout);
    fmt::print(stderr, "plan_llama: {}\n", e.what());
    return 2;
  }
}
