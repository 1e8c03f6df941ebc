#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

#include "commands.hpp"
#include "plait/core/error.hpp"
#include "table.hpp"

namespace {

/// Runs the command that is asked for. Returns the exit code.
int run(int argc, char** argv) {
  CLI::App app{"Looks into training states that were saved on any layout.", "checkpoint_tool"};
  app.footer("Exit codes: 0, 1 where verify finds a fault or diff a difference, 2 for an error.");

  inspect_options look;
  CLI::App* const inspecting = app.add_subcommand("inspect", "Tells what a step, or a folder of steps, holds.");
  inspecting->add_option("PATH", look.path, "a step or a folder of steps")->required();
  inspecting->add_flag("--tensors", look.tensors, "list the tensors of a step");
  inspecting->add_flag("--files", look.files, "list the data files of a step, and what each writer wrote");
  inspecting->add_flag("--json", look.json, "for machines: one JSON object, sizes in bytes");

  std::string verified;
  CLI::App* const verifying = app.add_subcommand("verify", "Reads every byte of a step, and compares every checksum.");
  verifying->add_option("PATH", verified, "a step, or a folder of steps for all of them")->required();

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    plait::fail({e.what(), " (--help lists the commands and their options)"});
  }
  if (app.get_subcommands().empty()) plait::fail("give a command: inspect or verify (--help tells more)");
  if (inspecting->parsed()) inspect(look);
  if (verifying->parsed() && !verify(verified)) return exit_found;
  return exit_equal;
}

void complain(const char* why) {
  std::fflush(stdout);
  fmt::print(stderr, "checkpoint_tool: {}\n", printable(why));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int code = run(argc, argv);
    if (std::fflush(stdout) == 0) return code;
    complain("what is printed cannot be written");
  } catch (const std::exception& e) {
    complain(e.what());
  }
  return exit_error;
}
