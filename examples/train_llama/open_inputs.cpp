#include "open_inputs.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "check_files.hpp"
#include "data_text.hpp"
#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/models/hugging_face_directory.hpp"
#include "plait/models/llama_config_json.hpp"
#include "plait/models/weights_order.hpp"
#include "resumed.hpp"
#include "train_llama/data/text.hpp"
#include "train_llama/data/token_source.hpp"

namespace {

/// Finds the saved step that --init-from names, or the newest in what it names; neither has the name of one: nothing.
void find_first_step(std::string path, opened_model& m) {
  plait::file_system& files = plait::machine_files();
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  if (files.kind_of(path) != plait::file_kind::directory) return;
  const auto is_step = [](const std::filesystem::path& name) {
    return plait::step_called(name.filename().string()).has_value();
  };
  if (is_step(path) || is_step(plain(path))) {  // "." and links have names of their own
    m.first_step = is_step(path) ? path : plain(path).string();
    return;
  }
  std::vector<plait::invalid_step> passed_over;
  if (const auto newest = plait::newest_step(files, path, &passed_over)) m.first_step = newest->path;
  for (const plait::invalid_step& i : passed_over)
    plait::append(m.passed_over, {m.passed_over.empty() ? "" : "; ", "'", i.path, "': ", i.reason});
  if (m.first_step.empty() && !passed_over.empty())
    plait::fail({"'", path, "' has no saved step that is whole; ", m.passed_over});
}

/// Returns the shape of the model that a saved step is of, by its manifest.
plait::llama_config model_of_step(const std::string& step) {
  plait::loaded_state saved{.path = step};
  try {
    saved.scalars = plait::read_step(plait::machine_files(), step).scalars;
  } catch (const plait::error& e) {
    plait::fail({"--init-from: ", e.what()});
  }
  if (const auto config = saved_model(saved)) {
    plait::validate(*config, "--init-from: '" + step + "'");
    return *config;
  }
  plait::fail({"--init-from: '", step,
               "' is a saved step that does not tell its model's shape, as one of weights alone "
               "or of an older program; give it by --model"});
}

/// Reads the shape that --model names.
plait::llama_config config_named(const std::string& model) {
  if (std::filesystem::exists(std::filesystem::path(model) / "config.json"))
    plait::fail(
        fmt::format("--model: '{0}' is the folder of a model; its shape alone, to begin from random weights, is "
                    "--model {0}/config.json, and with its weights it is --init-from {0}",
                    model));
  return plait::load_llama_config(model, "--model");
}

}  // namespace

opened_model open_model(const options& opt) {
  opened_model m;
  if (!opt.init_from.empty()) {
    try {
      find_first_step(opt.init_from, m);
    } catch (const plait::error& e) {
      plait::fail({"--init-from: ", e.what()});
    }
  }
  if (opt.init_from.empty()) {
    m.config = config_named(opt.model);
  } else if (m.first_step.empty()) {
    if (opt.model_given)
      plait::fail("--init-from " + opt.init_from + " has the model's shape in its config.json; leave out --model " +
                  opt.model);
    m.weights = std::make_shared<const plait::model_directory>(plait::open_model_directory(
        opt.init_from, "--init-from", plait::weights_order_from(opt.weights_order, "--weights-order"),
        "--weights-order"));
    m.config = m.weights->config;
  } else {
    if (opt.weights_order_given)
      plait::fail("--weights-order " + opt.weights_order + " is for model directories, and --init-from " +
                  opt.init_from + " is a saved step, which has one order alone; leave it out");
    if (opt.resume != "none" && opt.resume != "auto")
      plait::fail("--resume " + opt.resume + " takes the weights of a saved step, and so does --init-from " +
                  opt.init_from + "; give one of them");
    m.config = opt.model_given ? config_named(opt.model) : model_of_step(m.first_step);
  }
  return m;
}

void open_data(setup& s) {
  const options& opt = s.opt;
  std::vector<plait::token_source> sources;
  const auto add = [&](std::vector<std::string> paths) {
    sources.emplace_back(
        plait::token_source_config{.paths = std::move(paths),
                                   .format = plait::token_format_from(opt.data_format, "--data-format"),
                                   .vocab = s.config.vocab,
                                   .end_of_document = opt.end_of_document,
                                   .flag = "--data",
                                   .format_flag = "--data-format",
                                   .vocab_flag = "--model",
                                   .end_of_document_flag = "--end-of-document"});
  };
  const bool blended = !opt.data_weights.empty();
  if (blended)
    for (const std::string& path : opt.data) add({path});
  else
    add(opt.data);
  const std::vector<double> weights = blended ? opt.data_weights : std::vector<double>{1};
  for (std::size_t i = 0; s.weights && opt.data_format == "auto" && i < sources.size(); ++i)
    for (const char* name : {"tokenizer.json", "tokenizer.model"})
      if (sources[i].format() == plait::token_format::bytes &&
          std::filesystem::exists(std::filesystem::path(opt.init_from) / name))
        plait::fail(
            fmt::format("--data {}: it would be read as bytes, and --init-from {} has a {} of its own; give token "
                        "files (.bin) that it made, or --data-format bytes if bytes are meant",
                        opt.data[i], opt.init_from, name));
  std::vector<double> shares(static_cast<std::size_t>(s.config.vocab));
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const std::vector<double> counts = plait::token_counts(sources[i]);  // checks them all
    for (std::size_t t = 0; t < shares.size(); ++t)
      shares[t] += weights[i] * counts[t] / static_cast<double>(sources[i].size());
  }
  s.entropy = plait::entropy(shares);
  s.bytes = sources[0].format() == plait::token_format::bytes;
  s.data.emplace(std::move(sources), weights,
                 plait::sampler_config{.seq = opt.seq,
                                       .seed = opt.seed,
                                       .held_out = opt.held_out,
                                       .documents = keeps_documents_apart(opt),
                                       .seq_flag = "--seq",
                                       .held_out_flag = "--held-out",
                                       .documents_flag = "--documents"},
                 "--data-weights");
  if (!opt.checkpoint_dir.empty() || opt.resume != "none") s.data_text = data_text(opt);
}
