#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <exception>

#include "../standard_descriptors.hpp"
#include "commands.hpp"
#include "plait/core/error.hpp"
#include "table.hpp"

namespace {

/// Runs the given command. Returns the exit code.
int run(int argc, char** argv) {
  CLI::App app{"Looks into training states that were saved on any layout, and compares runs by their logs.",
               "checkpoint_tool"};
  app.footer("Exit codes: 0, 1 where verify finds a fault or diff or compare-runs a difference, 2 for an error.");

  inspect_options look;
  CLI::App* const inspecting = app.add_subcommand("inspect", "Lists the content of a step or a folder of steps.");
  inspecting->add_option("PATH", look.path, "a step or a folder of steps")->required();
  inspecting->add_flag("--tensors", look.tensors, "list the tensors of a step");
  inspecting->add_flag("--files", look.files, "list the data files of a step, and what each writer wrote");
  inspecting->add_flag("--json", look.json, "for machines: one JSON object, sizes in bytes");

  std::string verified;
  CLI::App* const verifying = app.add_subcommand("verify", "Reads every byte of a step, and compares every checksum.");
  verifying->add_option("PATH", verified, "a step, or a folder of steps for all of them")->required();

  diff_options compared;
  CLI::App* const comparing = app.add_subcommand("diff", "Compares two steps, whatever layouts saved them.");
  comparing->add_option("A", compared.a, "a step")->required();
  comparing->add_option("B", compared.b, "another")->required();
  comparing
      ->add_option("--tolerance", compared.tolerance,
                   "by how much elements may differ and count as equal, relative to the largest of their tensor")
      ->capture_default_str();

  std::string log_a, log_b;
  CLI::App* const comparing_runs = app.add_subcommand(
      "compare-runs", "Finds the first step, and the first parameter in it, at which two runs differ in any bit.");
  comparing_runs->add_option("A", log_a, "the log of a run, which train_llama --log --log-hashes wrote")->required();
  comparing_runs->add_option("B", log_b, "another")->required();

  export_options exported;
  CLI::App* const exporting =
      app.add_subcommand("export-safetensors", "Writes the whole tensors of a step as one safetensors file.");
  exporting->add_option("STEP", exported.step, "a step")->required();
  exporting->add_option("OUT", exported.out, "the file to write, which must not exist")->required();
  exporting->add_flag("--weights-only", exported.weights_only, "leave out the optimizer's state");

  export_hf_options model;
  CLI::App* const exporting_model =
      app.add_subcommand("export-hf", "Writes the weights of a step as a directory that transformers opens.");
  exporting_model->add_option("STEP", model.step, "a step")->required();
  exporting_model->add_option("DIR", model.out, "the directory to write, which must not exist")->required();
  exporting_model
      ->add_option("--config", model.config,
                   "the model's config.json, or a model directory, whose tokenizer goes into the new one")
      ->required();
  exporting_model->add_option("--dtype", model.dtype, "F64, F32 or BF16; not given: what the step has");
  exporting_model->add_option("--shard-bytes", model.shard_bytes, "most bytes of tensors in a file")
      ->capture_default_str();
  exporting_model
      ->add_option("--weights-order", model.weights_order,
                   "in whose names and order: hugging-face, which transformers opens, megatron or meta")
      ->capture_default_str();

  import_hf_options imported;
  CLI::App* const importing = app.add_subcommand(
      "import-hf", "Writes the weights of a Hugging Face directory as step 0, from which a run of any layout begins.");
  importing->add_option("DIR", imported.model, "the model directory")->required();
  importing->add_option("FOLDER", imported.folder, "of steps, to which the new one is added; made if it is missing")
      ->required();
  importing->add_option("--dtype", imported.dtype, "F64, F32 or BF16; not given: what each tensor has");
  importing
      ->add_option("--weights-order", imported.weights_order,
                   "names and order of the tensors, if there is a Hugging Face config.json: hugging-face, "
                   "megatron or meta")
      ->capture_default_str();

  reshard_options cut;
  CLI::App* const resharding = app.add_subcommand(
      "reshard", "Writes a step anew into another folder, with as many data files as wanted, each with as much.");
  resharding->add_option("STEP", cut.step, "a step")->required();
  resharding->add_option("FOLDER", cut.folder, "of steps, to which the new one is added; made if it is missing")
      ->required();
  resharding->add_option("--writers", cut.writers, "how many data files")->capture_default_str();

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    plait::fail({e.what(), " (--help lists the commands and their options)"});
  }
  if (app.get_subcommands().empty())
    plait::fail(
        "give a command: inspect, verify, diff, compare-runs, export-safetensors, export-hf, import-hf or reshard "
        "(see --help)");
  if (inspecting->parsed()) inspect(look);
  if (verifying->parsed() && !verify(verified)) return exit_found;
  if (comparing->parsed() && !diff(compared)) return exit_found;
  if (comparing_runs->parsed() && !compare_runs(log_a, log_b)) return exit_found;
  if (exporting->parsed()) export_safetensors(exported);
  if (exporting_model->parsed()) export_hf(model);
  if (importing->parsed()) import_hf(imported);
  if (resharding->parsed()) reshard(cut);
  return exit_equal;
}

void complain(const char* why) {
  std::fflush(stdout);
  fmt::print(stderr, "checkpoint_tool: {}\n", printable(why));
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a limit on file sizes becomes an error of the write
  try {
    plait::open_standard_descriptors();
    const int code = run(argc, argv);
    if (std::fflush(stdout) == 0) return code;
    complain("the output cannot be written");
  } catch (const std::exception& e) {
    complain(e.what());
  }
  return exit_error;
}
