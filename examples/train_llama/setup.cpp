#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "../about.hpp"
#include "../number_text.hpp"
#include "options.hpp"
#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/core/error.hpp"
#include "plait/device/product_choices.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/io/json.hpp"
#include "plait/io/json_tree.hpp"
#include "plait/io/mapped_file.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/kernels/moments.hpp"
#include "plait/models/hugging_face_directory.hpp"
#include "plait/models/llama_config.hpp"
#include "plait/models/llama_config_json.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/models/weights_order.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/schedule/parse.hpp"
#include "run.hpp"
#include "train_llama/data/tokenizer.hpp"
#include "train_llama/data/tokens.hpp"

namespace {

/// Returns the path without links, "." and "..". The file need not exist.
std::filesystem::path plain(const std::string& path) {
  std::error_code ignored;
  std::filesystem::path at = std::filesystem::absolute(path, ignored);
  // A link to a missing file is followed, too.
  for (int links = 0; links < 40 && std::filesystem::is_symlink(at, ignored); ++links) {
    const std::filesystem::path to = std::filesystem::read_symlink(at, ignored);
    if (ignored || std::filesystem::exists(at, ignored)) break;
    at = at.parent_path() / to;
  }
  return std::filesystem::weakly_canonical(at, ignored);
}

/// Whether the path is a pipe or a terminal, which keeps nothing.
bool is_stream(const std::string& path) {
  std::error_code ignored;
  const auto kind = std::filesystem::status(path, ignored).type();
  return kind == std::filesystem::file_type::character || kind == std::filesystem::file_type::fifo;
}

/// Whether two paths lead to one file. The file need not exist.
bool same_file(const std::string& a, const std::string& b) {
  std::error_code ignored;
  return std::filesystem::equivalent(a, b, ignored) || plain(a) == plain(b);
}

/// Whether `path` is `folder` or in it.
bool is_within(const std::string& path, const std::string& folder) {
  const std::filesystem::path way = plain(path).lexically_relative(plain(folder));
  return !way.empty() && *way.begin() != "..";
}

/// A file or folder that an option names.
using named_path = std::pair<const char*, std::string>;

/// Throws if `path` is in a saved state, or if a link in a saved state leads to it.
void check_saved(const char* flag, const std::string& path, const named_path& saved) {
  const auto refuse = [&](const char* why) {
    reject("{} names '{}', {} {} {}, where training states are kept; name a file elsewhere", flag, path, why,
           saved.first, saved.second);
  };
  if (is_within(path, saved.second)) refuse("in");
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return;
  using walk = std::filesystem::recursive_directory_iterator;
  const auto how = std::filesystem::directory_options::follow_directory_symlink |
                   std::filesystem::directory_options::skip_permission_denied;
  for (walk file(saved.second, how, ignored), end; !ignored && file != end; file.increment(ignored))
    if (same_file(path, file->path().string())) refuse("a file of");
}

/// Returns the folders of saved steps that a run reads or writes.
std::vector<named_path> saved_folders(const options& opt, bool begins_from_step) {
  std::vector<named_path> all;
  if (opt.resume != "none" && opt.resume != "auto") all.emplace_back("--resume", opt.resume);
  if (!opt.checkpoint_dir.empty()) all.emplace_back("--checkpoint-dir", opt.checkpoint_dir);
  if (begins_from_step) all.emplace_back("--init-from", opt.init_from);
  return all;
}

/// Refuses paths that are not UTF-8 and must be recorded in a saved step, whose manifest is UTF-8. Otherwise only the
/// first save would fail.
void check_names_in_steps(const options& opt) {
  if (opt.checkpoint_dir.empty()) return;
  for (const auto& [flag, name] : {std::pair("--model", &opt.model), std::pair("--schedule", &opt.schedule),
                                   std::pair("--tokenizer", &opt.tokenizer)})
    if (!plait::is_utf8(*name))
      reject("{} names a path that is not UTF-8, which no step in --checkpoint-dir could repeat; give it another name",
             flag);
}

/// Returns the files that a run writes.
std::vector<named_path> outputs_of(const options& opt) {
  std::vector<named_path> all = {{"--log", opt.log},
                                 {"--plot", opt.plot},
                                 {"--report", opt.report},
                                 {"--trace", opt.trace},
                                 {"--timeline", opt.timeline}};
  if (!std::filesystem::exists(opt.products)) all.emplace_back("--products", opt.products);
  std::erase_if(all, [](const named_path& one) { return one.second.empty(); });
  return all;
}

/// Returns the files that a run reads, or may read.
std::vector<named_path> inputs_of(const options& opt, bool begins_from_step) {
  std::vector<named_path> all;
  if (std::filesystem::exists(opt.products)) all.emplace_back("--products", opt.products);
  for (const std::string& path : opt.data) {
    for (const char* ending : {"", ".bin", ".idx"}) all.emplace_back("--data", path + ending);
    if (path.ends_with(".bin") || path.ends_with(".idx"))  // these are read in pairs
      for (const char* ending : {".bin", ".idx"}) all.emplace_back("--data", path.substr(0, path.size() - 4) + ending);
  }
  if (!opt.held_out_file.empty()) all.emplace_back("--held-out", opt.held_out_file);
  if (!opt.cluster.empty()) all.emplace_back("--cluster", opt.cluster.substr(0, opt.cluster.rfind(':')));
  all.emplace_back("--model", opt.model);
  all.emplace_back("--tokenizer", opt.tokenizer);
  std::error_code ignored;
  if (!opt.init_from.empty() && !begins_from_step)
    for (const auto& file : std::filesystem::recursive_directory_iterator(opt.init_from, ignored))
      all.emplace_back("--init-from", file.path().string());
  if (opt.schedule.ends_with(".csv")) all.emplace_back("--schedule", opt.schedule);
  return all;
}

/// Refuses an export into a folder of saved states, and saved states in the export's folder.
void check_export(const std::string& folder, const named_path& saved) {
  if (is_within(folder, saved.second))
    reject("--export-hf names '{}', in {} {}, where training states are kept; name a folder elsewhere", folder,
           saved.first, saved.second);
  if (is_within(saved.second, folder))
    reject("{} names '{}', where --export-hf {} makes a new folder at the end; name one elsewhere", saved.first,
           saved.second, folder);
}

/// Refuses outputs that cannot be written, that are also read or written twice, or that are in saved states. Leaves no
/// new files.
void check_files(const options& opt, bool begins_from_step) {
  check_names_in_steps(opt);
  const std::vector<named_path> outputs = outputs_of(opt), inputs = inputs_of(opt, begins_from_step);
  for (const auto& [flag, path] : outputs)
    for (const auto& [other, input] : inputs)
      if (same_file(path, input))
        reject("{} would overwrite '{}', which {} reads; name another file", flag, path, other);
  for (const named_path& saved : saved_folders(opt, begins_from_step)) {
    for (const auto& [flag, path] : outputs) check_saved(flag, path, saved);
    if (!opt.export_hf.empty()) check_export(opt.export_hf, saved);
  }
  if (!opt.report.empty() && is_stream(opt.log))
    reject("--report reads --log at the end, and '{}' keeps nothing; name a file", opt.log);
  for (const auto& [flag, path] : outputs)  // found now, not at the end of training
    if (!is_stream(path)) plait::atomic_file(path, flag);
  for (const auto& [flag, path] : outputs)
    for (const auto& [other, same] : outputs)
      if (flag != other && same_file(path, same) && !is_stream(path))
        reject("{} and {} both name '{}'; they need a file each", flag, other, path);
  if (opt.export_hf.empty()) return;
  plait::atomic_folder(opt.export_hf, "--export-hf");  // made and removed, as a check
  for (const auto& [flag, path] : outputs)
    if (is_within(path, opt.export_hf))
      reject("{} names '{}', where --export-hf {} makes a new folder at the end; name a file elsewhere", flag, path,
             opt.export_hf);
}

/// Finds the saved step that --init-from names, or the newest step in the folder that it names. Sets nothing if the
/// path is neither.
void find_first_step(std::string path, opened_model& m) {
  plait::file_system& files = plait::machine_files();
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  if (files.kind_of(path) != plait::file_kind::directory) return;
  const auto is_step = [](const std::filesystem::path& name) {
    return plait::step_called(name.filename().string()).has_value();
  };
  if (is_step(path) || is_step(plain(path))) {  // "." or a link may lead to a step
    m.first_step = is_step(path) ? path : plain(path).string();
    return;
  }
  std::vector<plait::invalid_step> invalid_steps;
  if (const auto newest = plait::newest_step(files, path, &invalid_steps)) m.first_step = newest->path;
  for (const plait::invalid_step& i : invalid_steps)
    plait::append(m.invalid_steps, {m.invalid_steps.empty() ? "" : "; ", "'", i.path, "': ", i.reason});
  if (m.first_step.empty() && !invalid_steps.empty())
    plait::fail({"'", path, "' has no saved step that is whole; ", m.invalid_steps});
}

/// Reads the model's shape that --model names.
plait::llama_config config_named(const std::string& model) {
  if (std::filesystem::exists(std::filesystem::path(model) / "config.json"))
    reject(
        "--model: '{0}' is the folder of a model; its shape alone, to begin from random weights, is "
        "--model {0}/config.json, and with its weights it is --init-from {0}",
        model);
  return plait::load_llama_config(model, "--model");
}

/// Refuses a model whose config.json cannot be written, if a step or an export needs one. Otherwise only the first save
/// would fail, and its training would be lost.
void check_written_config(const options& opt, const plait::llama_config& c) {
  const bool saves = !opt.checkpoint_dir.empty();
  if (!saves && opt.export_hf.empty()) return;
  try {
    static_cast<void>(plait::llama_config_text(c));
  } catch (const plait::error& e) {
    const char* flag = saves ? "--checkpoint-dir" : "--export-hf";
    reject("{} {}: {}; legal are other models, and no {}", flag, saves ? opt.checkpoint_dir : opt.export_hf, e.what(),
           flag);
  }
}

/// Returns the options of adapters as text, as on the command line.
std::string options_text(const saved_adapters& a) {
  return fmt::format("--lora {}{}{}", a.rank, a.rank > 0 ? fmt::format(" --lora-alpha {}", a.alpha) : "",
                     a.linears != "all" ? " --lora-linears " + a.linears : "");
}

/// Reads the record of its run from a saved step: the model, unless --model gives it, the data and --seq.
void read_first_step(const options& opt, opened_model& m) {
  const std::string& step = m.first_step;
  plait::loaded_state saved{.path = step};
  saved.scalars = about("--init-from", [&] { return plait::read_step(plait::machine_files(), step).scalars; });
  m.data = saved.find_scalar<std::string>("train.data").value_or("");
  m.seq = saved.find_scalar<std::int64_t>("train.seq").value_or(0);
  m.tokenizer = saved.find_scalar<std::string>("train.tokenizer").value_or("");
  m.adapters = adapters_saved(saved);
  const saved_adapters own{opt.lora, opt.lora_alpha, opt.lora_linears};
  if (m.adapters.rank > 0 && opt.command.empty() && m.adapters != own)
    reject("--init-from: '{}' has adapters of rank {} and alpha {}, and this run has {}; legal is {}", step,
           m.adapters.rank, m.adapters.alpha, options_text(own), options_text(m.adapters));
  if (opt.given("--model")) {
    m.config = config_named(opt.model);
    if (const std::string other = other_model_than(m.config, saved); !other.empty())
      plait::fail(
          {"--model ", opt.model, " is not the model of --init-from '", step, "': its ", other, "; leave out --model"});
    return;
  }
  if (const auto config = saved_model(saved)) {
    m.config = *config;
    return;
  }
  plait::fail({"--init-from: '", step,
               "' is a saved step that does not have its model's shape, as one of only weights "
               "or of an older program; give it by --model"});
}

/// Sets the model's mask to --attention-mask. A saved step has its mask in its config.json.
void set_attention_mask(const options& opt, plait::llama_config& c) {
  const std::string_view mask = opt.attention_mask, window = "window:";
  if (mask == "model") return;
  const std::int64_t width =
      mask.starts_with(window) ? number_of<std::int64_t>(mask.substr(window.size())).value_or(0) : 0;
  if (width < 0 || (width == 0 && mask != "causal"))
    reject("--attention-mask '{}' is unknown; legal are model, causal and window:N with N tokens from 1", mask);
  c.sliding_window = width;
  try {
    static_cast<void>(plait::llama_config_text(c));
  } catch (const plait::error& e) {
    plait::fail({"--attention-mask ", mask, ": ", e.what()});
  }
}

}  // namespace

opened_model open_model(const options& opt) {
  opened_model m;
  if (!opt.init_from.empty()) about("--init-from", [&] { find_first_step(opt.init_from, m); });
  if (opt.init_from.empty()) {
    m.config = config_named(opt.model);
  } else if (m.first_step.empty()) {
    if (opt.given("--model"))
      reject("--init-from {} has the model's shape in its config.json; leave out --model {}", opt.init_from, opt.model);
    m.weights = std::make_shared<const plait::model_directory>(plait::open_model_directory(
        opt.init_from, "--init-from", plait::weights_order_from(opt.weights_order, "--weights-order"),
        "--weights-order"));
    m.config = m.weights->config;
  } else {
    if (opt.given("--weights-order"))
      reject(
          "--weights-order {} is for model directories, and --init-from {} is a saved step, which has one order alone; "
          "leave it out",
          opt.weights_order, opt.init_from);
    if (opt.resume != "none" && opt.resume != "auto")
      reject("--resume {} takes the weights of a saved step, and so does --init-from {}; give one of them", opt.resume,
             opt.init_from);
    read_first_step(opt, m);
  }
  set_attention_mask(opt, m.config);
  return m;
}

namespace {

/// Returns the tokenizer.json of a model: that of --tokenizer, of the model's directory, or of its training.
std::string tokenizer_file(const options& opt, const opened_model& m) {
  if (opt.data_format == "bytes") {
    if (opt.tokenizer.empty()) return {};
    reject("--tokenizer {} makes tokens of text, and with --data-format bytes they are bytes; leave out one of the two",
           opt.tokenizer);
  }
  std::filesystem::path path = !opt.tokenizer.empty() ? opt.tokenizer : m.weights ? opt.init_from : m.tokenizer;
  if (path.empty() && opt.data_format == "text")
    plait::fail("--data-format text needs a tokenizer; name a tokenizer.json, or its folder, by --tokenizer");
  if (path.empty()) return {};
  if (std::filesystem::is_directory(path)) path /= "tokenizer.json";
  if (std::filesystem::exists(path)) return plain(path.string()).string();
  if (!opt.tokenizer.empty())
    reject("--tokenizer: there is no '{}'; name a tokenizer.json, or its folder", path.string());
  return m.weights ? "" : path.string();
}

/// Returns the tokenizer, which the first call reads.
const plait::tokenizer& read_tokenizer(setup& s) {
  const std::string& path = s.opt.tokenizer;
  if (!std::filesystem::exists(path))
    reject("--init-from: '{}' was trained with '{}', which does not exist; name it by --tokenizer", s.first_step, path);
  if (!s.tokenizer) s.tokenizer = std::make_shared<const plait::tokenizer>(path, "--tokenizer");
  return *s.tokenizer;
}
/// Returns the function that tokenizes text; empty without a tokenizer.
plait::text_encoder encoder_of(setup& s) {
  if (s.opt.tokenizer.empty()) return nullptr;
  return [&s](std::string_view text) { return read_tokenizer(s).encode(text); };
}

/// Returns why the tokens of a model without a tokenizer are not bytes; nothing if they may be.
std::string why_no_bytes(const setup& s, const opened_model& m) {
  if (s.weights && std::filesystem::exists(std::filesystem::path(s.opt.init_from) / "tokenizer.model"))
    return "has a tokenizer.model alone";
  for (const char* format : {"megatron", "nanogpt", "text"})
    if (m.data.find(fmt::format(" as {}", format)) != std::string::npos) return "was trained on tokens of a file";
  const bool of_bytes = m.data.find(" as bytes") != std::string::npos || s.config.vocab <= 256;
  return of_bytes ? "" : fmt::format("has {} tokens", s.config.vocab);
}
/// Refuses a command that needs a tokenizer, if none is known.
void check_bytes(const setup& s, const opened_model& m) {
  if (const std::string why = why_no_bytes(s, m); !why.empty())
    reject("{}: '{}' {}, and no tokenizer is known; name a tokenizer.json, or its folder, by --tokenizer",
           s.opt.command, s.opt.init_from, why);
}

/// Returns the tokens that end a text, from the folder of a model or of its tokenizer, in the order in which
/// transformers looks for them. There may be none.
std::vector<std::int64_t> end_tokens(const setup& s) {
  const std::filesystem::path folder =
      s.weights ? std::filesystem::path(s.opt.init_from) : std::filesystem::path(s.opt.tokenizer).parent_path();
  nlohmann::json value;
  std::string source;
  for (const auto& [name, key] : {std::pair("generation_config.json", "eos_token_id"),
                                  {"config.json", "eos_token_id"},
                                  {"tokenizer_config.json", "eos_token"}}) {
    const std::string path = (folder / name).string();
    if (!value.is_null() || folder.empty() || !std::filesystem::exists(path)) continue;
    const auto keys = plait::parse_json(plait::read_file(path, "generate"), "generate: '" + path + "'");
    if (keys.contains(key)) value = keys[key];
    source = fmt::format("generate: '{}': key '{}' is {}", path, key, value.dump());
  }
  if (value.is_null()) return {};
  if (value.is_number_unsigned()) return {value.get<std::int64_t>()};
  if (value.is_array() && std::all_of(value.begin(), value.end(), [](auto& id) { return id.is_number_unsigned(); }))
    return value.get<std::vector<std::int64_t>>();
  if (value.is_object()) value = value.value("content", nlohmann::json());
  if (value.is_string() && s.tokenizer)
    if (const std::vector<std::int64_t> text = s.tokenizer->encode(value.get<std::string>()); text.size() == 1)
      return text;
  reject("{}; legal is a token, or a list of tokens", source);
}

/// Opens the files of an option.
plait::token_source open_tokens(setup& s, std::vector<std::string> paths, const char* option) {
  return plait::token_source({.paths = std::move(paths),
                              .format = plait::token_format_from(s.opt.data_format),
                              .vocab = s.config.vocab,
                              .end_of_document = s.opt.end_of_document,
                              .flag = option},
                             encoder_of(s));
}

/// Opens --data.
void open_data(setup& s) {
  const options& opt = s.opt;
  std::vector<plait::token_source> sources;
  const bool blended = !opt.data_weights.empty();
  if (blended)
    for (const std::string& path : opt.data) sources.push_back(open_tokens(s, {path}, "--data"));
  else
    sources.push_back(open_tokens(s, opt.data, "--data"));
  const std::vector<double> weights = blended ? opt.data_weights : std::vector<double>{1};
  for (std::size_t i = 0; s.weights && opt.data_format == "auto" && i < sources.size(); ++i)
    if (sources[i].format() == plait::token_format::bytes &&
        std::filesystem::exists(std::filesystem::path(opt.init_from) / "tokenizer.model"))
      reject(
          "--data {}: it would be read as bytes, and --init-from {} has a tokenizer.model of its own; name "
          "its tokenizer.json by --tokenizer, or give --data-format bytes if bytes are meant",
          opt.data[i], opt.init_from);
  std::vector<double> shares(static_cast<std::size_t>(s.config.vocab));
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const std::vector<double> counts = plait::token_counts(sources[i]);  // checks all tokens
    for (std::size_t t = 0; t < shares.size(); ++t)
      shares[t] += weights[i] * counts[t] / static_cast<double>(sources[i].size());
  }
  s.entropy = plait::entropy(shares);
  s.bytes = sources[0].format() == plait::token_format::bytes;
  s.data.emplace(std::move(sources), weights,
                 plait::sampler_config{.seq = opt.seq,
                                       .seed = static_cast<std::uint64_t>(opt.seed),
                                       .held_out = opt.held_out,
                                       .documents = keeps_documents_apart(opt)});
  if (!opt.checkpoint_dir.empty() || opt.resume != "none") s.data_text = data_text(s.opt);
}

/// Opens the file that --held-out names.
void open_held_out(setup& s, const opened_model& m) {
  const options& opt = s.opt;
  plait::token_source source = open_tokens(s, {opt.held_out_file}, "--held-out");
  if (opt.command == "evaluate" && opt.data_format == "auto" && source.format() == plait::token_format::bytes)
    check_bytes(s, m);
  static_cast<void>(plait::token_counts(source));  // checks all tokens
  s.held_out.emplace(
      std::move(source),
      plait::sampler_config{.seq = opt.seq, .all_held_out = true, .documents = keeps_documents_apart(opt)});
}

/// Reads the options of data parallelism. `dp` and `cp` are the extents of these axes.
void set_parallel(setup& s, std::int64_t dp, std::int64_t cp) {
  const options& opt = s.opt;
  plait::data_parallel& how = s.parallel.parallel;
  how.level = level_of(opt);
  how.prefetch = static_cast<int>(opt.prefetch);
  how.reshard_after_forward = opt.reshard_after_forward == "on";
  how.overlap = opt.overlap == "on";
  if (opt.given("--overlap") && dp * cp == 1)
    reject("--overlap {} hides nothing: with dp=1 and cp=1 no gradient is reduced over data ranks; leave it out",
           opt.overlap);
  s.parallel.offload_activations = offloads_activations(opt);
  if (opt.shard == "whole") s.parallel.cut = plait::bucket_cut::whole;
  if (opt.shard == "blocks") s.parallel.cut = plait::bucket_cut::blocks(plait::kernels::moment_block);
  if (opt.reduce_in != "full") {
    if (dp * cp == 1)
      reject(
          "--reduce-in {} is for gradients that are summed over the ranks of dp and cp, and here there is one; legal "
          "is full",
          opt.reduce_in);
    s.parallel.wire = opt.reduce_in == "bf16" ? plait::gradient_wire::bf16 : plait::gradient_wire::f32;
  }
  if (how.level == plait::zero_level::replicated) return;
  const bool over_dp = opt.replicate_over != "dp" && dp > 1, over_cp = opt.replicate_over != "cp" && cp > 1;
  if (!over_dp && !over_cp)
    reject(
        "--data-parallel {} cuts over the ranks of dp and cp{}, and with dp={} and cp={} there is one "
        "rank to cut over; legal is replicated",
        opt.data_parallel, opt.replicate_over == "none" ? "" : " but --replicate-over " + opt.replicate_over, dp, cp);
  if (opt.replicate_over != "none" && (opt.replicate_over == "dp" ? dp : cp) == 1)
    reject("--replicate-over {} names an axis of one rank; legal is none", opt.replicate_over);
  // The units of a rank: blocks, the embedding, the head.
  std::vector<std::int64_t> units(static_cast<std::size_t>(s.schedule.shape.ranks), 0);
  for (std::size_t stage = 0; stage < s.stages.size(); ++stage)
    units[static_cast<std::size_t>(s.schedule.shape.rank_of(static_cast<int>(stage)))] +=
        s.stages[stage].size() + (s.stages[stage].first ? 1 : 0) + (s.stages[stage].last ? 1 : 0);
  if (const std::int64_t fewest = *std::min_element(units.begin(), units.end()); opt.prefetch > fewest)
    reject(
        "--prefetch is {}, but a rank has {} units of parameters to gather: its blocks, the embedding "
        "and the head; legal is 0 to {}",
        opt.prefetch, fewest, fewest);
  plait::axis_list& cut = s.parallel.axes.shard;
  const plait::axis_list samples(plait::axis_of<plait::dp>, plait::axis_of<plait::ep>);
  if (opt.replicate_over == "dp") cut = plait::axis_list(plait::axis_of<plait::cp>);
  if (opt.replicate_over == "cp") cut = samples;
  if (opt.replicate_over == "dp") s.parallel.axes.replicate = samples;
  if (opt.replicate_over == "cp") s.parallel.axes.replicate = plait::axis_list(plait::axis_of<plait::cp>);
}

/// Refuses --tensor-overlap if linears send nothing over tp, or for more chunks than tokens.
void check_tensor_overlap(const options& opt, std::int64_t cp, std::int64_t tp) {
  if (opt.tensor_overlap == 1) return;
  if (tp == 1)
    reject(
        "--tensor-overlap {} hides nothing: with tp=1 linears send nothing; legal is 1, or more "
        "ranks along tp",
        opt.tensor_overlap);
  const std::int64_t tokens = opt.micro_batch * opt.seq / cp / (opt.strategy == "sp" ? tp : 1);
  if (opt.tensor_overlap > tokens)
    reject("--tensor-overlap is {}, but a rank has {} tokens of a microbatch to send; legal is 1 to {}",
           opt.tensor_overlap, tokens, tokens);
}

/// Reads --deterministic. Refuses leaves that this mesh, or the sizes of model and batch, do not divide.
void set_deterministic(setup& s, std::int64_t dp, std::int64_t cp, std::int64_t tp) {
  const plait::deterministic_leaves& n = s.opt.leaves;
  s.deterministic = n;
  if (!n) return;
  const auto refuse = [&](const char* which, std::int64_t leaves, const std::string& why) {
    reject("--deterministic {}: {} leaves of {}, {}", s.opt.deterministic, leaves, which, why);
  };
  const plait::llama_config& c = s.config;
  if (tp > c.kv_heads)
    reject(
        "--deterministic has no order for kv heads that ranks share, and --mesh has tp={} for {} kv "
        "heads; legal are up to {}",
        tp, c.kv_heads, c.kv_heads);
  if (c.qk_norm) plait::fail("--deterministic has no order for norms of queries and keys, which this model has");
  for (const auto& [name, size] : {std::pair{"heads", c.heads},
                                   {"kv heads", c.kv_heads},
                                   {"ffn", c.ffn},
                                   {"ffn of shared experts", c.mixture.shared_ffn},
                                   {"ffn of dense layers", c.mixture.dense_ffn}})
    if (const std::int64_t leaves = std::gcd(n.features, size); size > 0 && leaves < tp)
      refuse(name, leaves,
             fmt::format("as many as divide {} and {}, cannot be divided over tp={}; the first number must have a "
                         "common divisor with {} that is at least {}",
                         n.features, size, tp, size, tp));
  if (n.features < tp)
    refuse("the vocabulary", n.features, fmt::format("cannot be divided over tp={}; legal are {} or more", tp, tp));
  const std::int64_t batch = s.microbatches * s.sequences, parts = dp * s.microbatches;
  if (n.samples % parts != 0 || batch % n.samples != 0)
    refuse("samples", n.samples,
           fmt::format("cannot be divided over {}={} and {} microbatches of {} sequences in a step; legal are "
                       "multiples of {} that divide {}",
                       s.opt.mixture ? "dp x ep" : "dp", dp, s.microbatches, batch, parts, batch));
  const bool routed = s.opt.mixture && tp > 1;  // a router sees the tokens of one rank of tp
  const std::int64_t of_context = s.zigzag && cp > 1 ? 2 * cp : cp, pieces = of_context * (routed ? tp : 1);
  const std::int64_t least = std::max(of_context, cp * (s.opt.strategy == "sp" ? tp : 1));
  if (n.sequence % pieces != 0 && n.sequence < least)
    refuse("the sequence", n.sequence,
           fmt::format("cannot be divided over cp={}{}{}; legal are {}{} or more", cp,
                       s.zigzag && cp > 1 ? " in zigzag order" : "",
                       routed ? fmt::format(" and, for routers, tp={}", tp) : "",
                       least > pieces ? fmt::format("multiples of {}, and ", pieces) : "", least));
  if (s.opt.seq % (n.sequence * n.features) != 0)
    refuse(
        "the sequence", n.sequence,
        fmt::format("of which each is cut into {} for norms, do not divide --seq {}; legal are numbers whose product "
                    "with {} divides it",
                    n.features, s.opt.seq, n.features));
}

constexpr std::int64_t max_threads = 1024, max_threads_of_a_gpu = 64;

/// Throws unless `value`, an option of the user, is a multiple of `parts`.
void divides(const char* flag, std::int64_t value, const std::string& by, std::int64_t parts) {
  if (value % parts == 0) return;
  const std::int64_t below = value / parts * parts, above = below + parts;
  const std::string nearest = below == 0 ? fmt::format("the least that is: {}", above)
                                         : fmt::format("the nearest that are: {} and {}", below, above);
  reject("{} is {}, which is not divisible by {} = {}; {}", flag, value, by, parts, nearest);
}

/// Sets the schedule, and the layers of each stage.
void plan_stages(setup& s, std::int64_t pp) {
  const auto ranks = static_cast<int>(pp), microbatches = static_cast<int>(s.microbatches);
  plait::llama_part_times parts = plait::llama_part_flops(s.config, s.opt.seq);
  if (s.opt.split == "even") parts = {.layer = {1, 2, 1, 1}, .embedding = {0, 0, 0, 0}, .head = {0, 0, 0, 0}};
  const plait::stage_costs balance = plait::stage_costs_of(parts, s.config.layers);
  const auto split = [&](const plait::schedule& plan) {
    if (plan.shape.stages() > s.config.layers)
      reject(
          "--schedule {} has {} stages on pp={} ranks, but the model has {}; legal are a smaller "
          "pp, fewer chunks, and a model of at least as many layers",
          s.opt.schedule, plan.shape.stages(), pp,
          s.config.layers == 1 ? "1 layer" : fmt::format("{} layers", s.config.layers));
    return plait::split_layers(balance, plan.shape.stages());
  };
  // The costs of an automatic schedule depend on the layers of each stage, and these on the number of chunks.
  plait::schedule_costs costs;
  if (s.opt.schedule.starts_with("automatic")) {
    plait::schedule like =
        plait::parse_schedule(s.opt.schedule.ends_with(":2") ? "zb_v" : "zb_h1", ranks, microbatches);
    costs = plait::schedule_costs_of(parts, split(like));
  }
  s.schedule = parse_schedule(s.opt, ranks, microbatches, costs);
  s.stages = split(s.schedule);
}

/// Refuses more chunks of the loss than a rank has positions, and chunks with a schedule that keeps all logits.
void check_loss_chunks(const setup& s, std::int64_t cp, std::int64_t tp) {
  const std::int64_t chunks = s.opt.loss_chunks, ranks = cp * (s.opt.strategy == "sp" ? tp : 1);
  const std::int64_t here = s.opt.seq / ranks;
  if (chunks == 1) return;
  const auto refuse = [&](const std::string& why) { reject("--loss-chunks {}: {}", chunks, why); };
  if (chunks > here) refuse(fmt::format("each rank has {} positions of a sequence; legal are 1 to {}", here, here));
  if (s.opt.leaves && s.opt.seq % ranks != 0)
    refuse(fmt::format("{} ranks have unequally many of {} positions of a sequence; legal with --deterministic is 1",
                       ranks, s.opt.seq));
  if (s.opt.leaves && here % chunks != 0)
    refuse(fmt::format(
        "each rank has {} positions of a sequence; legal with --deterministic are those that divide them", here));
  if (s.opt.leaves && s.opt.leaves.sequence * (here / chunks) % s.opt.seq != 0)
    refuse(
        fmt::format("chunks of {} positions on each rank are not whole leaves of --deterministic {}; legal there, as "
                    "the third number, are multiples of {}",
                    here / chunks, s.opt.deterministic, s.opt.seq / (here / chunks)));
  if (s.opt.leaves && s.zigzag && cp > 1 && s.opt.leaves.sequence % (2 * cp) != 0)
    refuse(
        fmt::format("each rank along cp={} has two pieces of a sequence in zigzag order, and they are not whole leaves "
                    "of --deterministic {}; legal there, as the third number, are multiples of {}",
                    cp, s.opt.deterministic, 2 * cp));
  for (const auto& actions : s.schedule.order)
    for (const plait::action& a : actions)
      if (a.kind == plait::action_kind::weight_backward)
        refuse(
            fmt::format("--schedule {} defers weight gradients, for which the gradients of all logits wait; legal is "
                        "1, or a schedule such as 1f1b",
                        s.opt.schedule));
}

/// Refuses options that models with experts do not support, and ep for models without experts.
void check_mixture(const options& opt, const plait::llama_config& c, std::int64_t ep, std::int64_t tp) {
  if (!opt.mixture && ep > 1) reject("--mesh {} has ep={}, and the model has no experts; legal is ep=1", opt.mesh, ep);
  for (const auto& [option, value] : {std::pair{"--balance-loss", opt.balance_loss},
                                      {"--router-z-loss", opt.router_z_loss},
                                      {"--expert-limit", opt.expert_limit},
                                      {"--expert-bias-rate", opt.expert_bias_rate}})
    if (!opt.mixture && value != 0)
      reject("{} {} is for models with experts, and this one has none; legal is 0", option, value);
  if (opt.balance_over != "sequence" && opt.balance_loss == 0)
    reject("--balance-over {} is for a --balance-loss, which is 0; legal is sequence", opt.balance_over);
  if (opt.expert_rows != "counted" && !opt.mixture)
    reject("--expert-rows {} is for models with experts, and this one has none; legal is counted", opt.expert_rows);
  if (!opt.mixture) return;
  if (c.mixture.experts < ep)
    reject("--mesh {}: ep={} is more than the model's num_experts, which is {}", opt.mesh, ep, c.mixture.experts);
  for (const auto& [key, width] :
       {std::pair{"shared_expert_intermediate_size", c.mixture.shared_ffn}, {"intermediate_size", c.mixture.dense_ffn}})
    if (width > 0 && width < tp)
      reject("--mesh {}: tp={} is more than the model's {}, which is {}", opt.mesh, tp, key, width);
  if (opt.expert_bias_rate > 0 && !c.mixture.correction_bias)
    reject(
        "--expert-bias-rate {} is for models whose router has biases, and this one has none; legal "
        "is 0, or a model such as tiny-dots1",
        opt.expert_bias_rate);
  const auto refuse = [](const std::string& option, const char* legal) {
    reject("{} is not supported for models with experts; legal is {}", option, legal);
  };
  if (opt.expert_rows == "padded" && opt.leaves)
    plait::fail("--expert-rows padded is not supported under deterministic sums; legal is counted");
  if (opt.balance_over == "microbatch" && opt.leaves)
    plait::fail(
        "--balance-over microbatch: under --deterministic a microbatch has other samples on each mesh; legal are "
        "sequence and step");
  if (opt.graph == "on" && opt.expert_rows == "counted")
    plait::fail(
        "--graph on: a step with experts waits for their counts on the host, which a graph cannot replay; "
        "legal are --graph off and --expert-rows padded");
  if (opt.strategy != "sp") refuse("--strategy " + opt.strategy, "sp");
  if (opt.precision != "float" && opt.precision != "bf16") refuse("--precision " + opt.precision, "float or bf16");
  if (has_bf16_gradients(opt)) refuse("--gradients bf16", "full");
}

/// Returns a text with all that the learning rate of a step depends on. A constant rate does not depend on the number
/// of steps.
std::string rate_text(const plait::lr_schedule_config& c) {
  const std::string warm = fmt::format(", {} of warm-up", c.warmup_steps);
  if (c.decay == plait::lr_decay::constant) return fmt::format("constant at {}{}", c.peak, warm);
  return fmt::format("{} from {} to {} of it in {} steps{}", plait::name_of(c.decay), c.peak, c.min_ratio, c.steps,
                     warm);
}

/// Returns the learning rate schedule.
plait::lr_schedule rate_of(const options& opt) {
  return plait::lr_schedule({.peak = opt.lr,
                             .steps = std::max<std::int64_t>(opt.steps, 1),
                             .warmup_steps = opt.warmup < 0 ? std::min(opt.steps, (opt.steps + 9) / 10) : opt.warmup,
                             .min_ratio = opt.min_lr_ratio,
                             .decay = plait::lr_decay_from(opt.lr_schedule, "--lr-schedule"),
                             .peak_field = "--lr",
                             .steps_field = "--steps",
                             .warmup_field = "--warmup",
                             .min_ratio_field = "--min-lr-ratio"});
}

/// Reads --attention and --seq, which say how ranks share a sequence.
void set_sequence(setup& s, std::int64_t cp, std::int64_t tp) {
  const options& opt = s.opt;
  s.zigzag = cp > 1 && !opt.attention.ends_with(":contiguous");  // on one rank the orders are the same
  if (opt.attention.starts_with("all_gather_kv")) s.context = plait::chosen_policy::all_gather_kv;
  if (opt.attention.starts_with("ulysses")) s.context = plait::chosen_policy::ulysses;
  if (cp > 1 && !s.zigzag && (opt.device == "cuda" || opt.strategy != "sp" || has_bf16_gradients(opt)))
    reject("--attention {} is built for {} alone; legal here is {}:zigzag", opt.attention,
           has_bf16_gradients(opt) ? "--gradients full" : "--device cpu and --strategy sp",
           opt.attention.substr(0, opt.attention.find(':')));
  if (cp > 1 && !s.zigzag && opt.mixture)
    reject("--attention {} is not supported for models with experts; legal is {}:zigzag", opt.attention,
           opt.attention.substr(0, opt.attention.find(':')));
  if (opt.given("--attention") && cp == 1 && opt.plan != "auto")
    reject(
        "--attention {} says how ranks along cp share a sequence, and --mesh {} has one; leave it out, or give cp in "
        "--mesh",
        opt.attention, opt.mesh);
  const std::int64_t ranks = cp * (opt.strategy == "sp" ? tp : 1);
  if (opt.seq < ranks)
    reject("--seq is {}, and {} ranks of {} share a sequence, each with a token at least; legal are {} and more",
           opt.seq, ranks,
           ranks == cp ? "cp"
           : cp == 1   ? "tp"
                       : "cp and tp",
           ranks);
  if (opt.tensor_overlap > 1)
    divides("--seq", opt.seq, "the ranks that share a sequence, as --tensor-overlap needs it,", ranks);
  if (opt.seq > s.config.max_position)
    reject("--seq is {}, but the model's max_position_embeddings is {}", opt.seq, s.config.max_position);
}

/// Makes the mesh from the axes of --mesh. Ranks along tp that share kv heads become a separate axis.
void set_mesh(setup& s, const plait::mesh_shape& given) {
  const bool one_gpu = s.opt.device == "cuda", threads = s.opt.backend == "threads";
  const std::int64_t most = one_gpu ? max_threads_of_a_gpu : max_threads;
  if (threads && !s.opt.dry_run && given.size() > most)
    reject("--mesh {}: {} ranks; one {} (--backend threads) runs at most {}", s.opt.mesh, given.size(),
           one_gpu ? "GPU" : "process", most);
  s.mesh.add(plait::axis_of<plait::dp>, given.extent(plait::axis_of<plait::dp>));
  s.mesh.add(plait::axis_of<plait::pp>, given.extent(plait::axis_of<plait::pp>));
  if (s.opt.mixture) s.mesh.add(plait::axis_of<plait::ep>, given.extent(plait::axis_of<plait::ep>));
  s.mesh.add(plait::axis_of<plait::cp>, given.extent(plait::axis_of<plait::cp>));
  const plait::tensor_extents t = plait::split_tensor_ranks(given.extent(plait::axis_of<plait::tp>), s.config.kv_heads);
  s.mesh.add(plait::axis_of<plait::tp>, t.tp);
  s.mesh.add(plait::axis_of<plait::tp_rep>, t.tp_rep);
  s.devices = threads ? 1 : given.size();
}

/// Reads --graph, which says whether steps are replayed.
void set_graph(setup& s) {
  const options& opt = s.opt;
  const bool meets_on_host = opt.backend == "threads" && s.mesh.size() > 1;
  const bool watched = !opt.trace.empty() || !opt.timeline.empty();
  if (opt.graph == "on" && watched)
    plait::fail("--graph on with --trace or --timeline: a replayed step records no times; legal is --graph off");
  if (opt.graph == "on" && meets_on_host)
    reject(
        "--graph on: {} ranks that share a GPU (--backend threads) meet on the host for every collective, which a "
        "graph cannot replay; legal are --graph off, one rank, and --backend nccl",
        s.mesh.size());
  s.as_graph = opt.device == "cuda" && opt.graph != "off" && opt.dropout == 0 && !meets_on_host && !watched &&
               (!opt.mixture || opt.expert_rows == "padded");
}

/// Reads --micro-batch and --global-batch.
void set_batch(setup& s, std::int64_t dp, std::int64_t ep) {
  const options& opt = s.opt;
  s.sequences = opt.micro_batch * dp * ep;
  const std::int64_t global = opt.global_batch == 0 ? s.sequences : opt.global_batch;
  const std::string experts = ep > 1 ? fmt::format(" times ep={}", ep) : "";
  divides("--global-batch", global, fmt::format("--micro-batch {} times dp={}{}", opt.micro_batch, dp, experts),
          s.sequences);
  s.microbatches = global / s.sequences;
  if (s.microbatches > plait::max_microbatches)
    reject("--global-batch {} has {} microbatches; at most {} are legal", global, s.microbatches,
           plait::max_microbatches);
}

/// Opens --data and --held-out. Text is sampled only if an option asks for it, or if the data are text.
void read_data(setup& s, const opened_model& m) {
  const options& opt = s.opt;
  if (!opt.data.empty())
    open_data(s);
  else if (!opt.dry_run && ((opt.steps > 0 && opt.resume == "none") || opt.held_out > 0))
    plait::fail("--data is missing: name a text file, or token files (.bin)");
  if (!opt.held_out_file.empty()) open_held_out(s, m);
  if (opt.command == "generate" && opt.tokenizer.empty()) check_bytes(s, m);
  const bool samples = opt.command == "generate" || s.bytes || opt.given("--sample") || opt.given("--prompt") ||
                       opt.given("--temperature");
  if (!samples) s.opt.sample = 0;
}

/// Refuses a prompt with a token that the model does not have.
void check_prompt(const setup& s) {
  if (s.opt.sample == 0) return;
  for (const std::int64_t token : prompt_tokens(s))
    if (token >= s.config.vocab)
      reject(
          "--prompt: its {} {} is not a token, as the model's vocab_size is {}; choose another prompt, or "
          "--sample 0",
          s.tokenizer ? "token" : "byte", token, s.config.vocab);
}

}  // namespace

std::vector<std::int64_t> prompt_tokens(const setup& s) {
  std::vector<std::int64_t> tokens = s.tokenizer ? s.tokenizer->prefix() : std::vector<std::int64_t>();
  const std::string text = s.opt.prompt.empty() && tokens.empty() ? "\n" : s.opt.prompt;
  const std::vector<std::int64_t> more = s.tokenizer ? s.tokenizer->encode(text) : plait::encode_bytes(text);
  tokens.insert(tokens.end(), more.begin(), more.end());
  return tokens;
}

std::string text_of(const setup& s, std::span<const std::int64_t> tokens) {
  if (!s.tokenizer) return plait::decode_bytes(tokens);
  return plait::printable(s.tokenizer->decode(tokens.subspan(std::min(tokens.size(), s.tokenizer->prefix().size()))));
}

setup prepare(const options& given_options, std::int64_t ranks) {
  options opt = given_options;
  opened_model m = open_model(opt);
  if (!opt.command.empty() && !opt.given("--seq"))  // commands use the --seq of the training
    opt.seq = m.seq > 0 ? m.seq : std::min(opt.seq, m.config.max_position);
  if (!opt.command.empty())
    opt.lora = m.adapters.rank, opt.lora_alpha = m.adapters.alpha, opt.lora_linears = m.adapters.linears;
  opt.tokenizer = tokenizer_file(opt, m);
  if (const std::int64_t wanted = parse_mesh(opt).size(); ranks == 1 && wanted > 1)
    reject("--mesh {} has {} ranks, but --backend {} was started as one process: start it with {} {}", opt.mesh, wanted,
           opt.backend, opt.backend == "nccl" ? "torchrun --nproc-per-node" : "mpirun -n", wanted);
  const plait::mesh_shape given = parse_mesh(opt, ranks);
  const std::int64_t dp = given.extent(plait::axis_of<plait::dp>), tp = given.extent(plait::axis_of<plait::tp>);
  const std::int64_t pp = given.extent(plait::axis_of<plait::pp>), cp = given.extent(plait::axis_of<plait::cp>);
  const std::int64_t ep = given.extent(plait::axis_of<plait::ep>);
  opt.mixture = m.config.mixture.experts > 0;
  check_written_config(opt, m.config);
  check_mixture(opt, m.config, ep, tp);
  plait::require_order(plait::weights_order_from(opt.export_order, "--export-order"), m.config, "--export-order");
  plait::check_tensor_ranks(m.config, tp, "--mesh");

  setup s{.opt = opt, .config = m.config, .rate = rate_of(opt), .weights = m.weights, .first_step = m.first_step};
  s.invalid_steps = m.invalid_steps;
  s.rate_text = rate_text(s.rate.config());
  set_sequence(s, cp, tp);
  set_mesh(s, given);
  set_graph(s);
  set_batch(s, dp, ep);
  plan_stages(s, pp);
  set_parallel(s, dp * ep, cp);
  check_tensor_overlap(opt, cp, tp);
  set_deterministic(s, dp * ep, cp, tp);
  check_loss_chunks(s, cp, tp);
  read_data(s, m);
  if (opt.dry_run) return s;
  if (!opt.tokenizer.empty() && (s.opt.sample > 0 || !given_options.tokenizer.empty())) read_tokenizer(s);
  if (opt.command == "generate") s.end_tokens = end_tokens(s);
  check_prompt(s);
  check_files(opt, !s.first_step.empty());
  if (std::filesystem::exists(opt.products)) {
    s.products = plait::read_file(opt.products, "--products");
    static_cast<void>(plait::product_choices::parse(s.products, "--products: '" + opt.products + "'"));
  }
  return s;
}
