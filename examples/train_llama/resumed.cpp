#include "resumed.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../size_text.hpp"
#include "agreed.hpp"
#include "checkpoint_files.hpp"
#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/step_data.hpp"
#include "plait/core/vector.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plan.hpp"

namespace {

constexpr std::string_view between = ", --";     ///< options in the text that a step has of them
constexpr std::string_view of_model = "model:";  ///< begins the keys of a model there

/// Calls f(); an error of it begins with the option.
template <class F>
auto about(const std::string& option, F&& f) {
  try {
    return f();
  } catch (const plait::error& e) {
    const std::string why = e.what();
    plait::fail(why.starts_with("--") ? why : option + ": " + why);
  }
}

struct found_step {
  std::string path;
  plait::manifest saved;
};

/// Opens a step, and compares its tensors with those of the plan.
found_step fitting_step(const std::string& path, const run_plan& plan, bool weights_only) {
  plait::file_system& files = plait::machine_files();
  std::vector<plait::invalid_step> passed_over;
  found_step out{plait::detail::step_path(files, path, passed_over), {}};
  out.saved = plait::read_step(files, out.path);
  if (const std::string missing = plait::missing_data(files, out.path, out.saved); !missing.empty())
    plait::fail(missing);
  std::vector<plait::safetensors_declaration> wanted;
  for (const plait::safetensors_declaration& t : plan.state)
    if (!weights_only || !plait::is_of_optimizer(t.name)) wanted.push_back(t);
  static_cast<void>(plait::tensors_of_step(out.saved, wanted, "'" + out.path + "'", weights_only));
  return out;
}

std::string line_of(const char* option, const found_step& step, const char* what) {
  std::uint64_t bytes = 0;
  for (const plait::stored_file& file : step.saved.files) bytes += file.bytes;
  return fmt::format("{}: step {} of '{}', {}, saved as '{}', fits; {}\n", option, step.saved.step, step.path,
                     size_text(static_cast<double>(bytes)), step.saved.layout, what);
}

/// Whether steps can be written to --checkpoint-dir by this user; the newest that are there.
std::optional<std::uint64_t> newest_in(const std::string& directory) {
  plait::file_system& files = plait::machine_files();
  const auto kind = files.kind_of(directory);
  if (kind && *kind != plait::file_kind::directory) plait::fail({"'", directory, "' is no directory"});
  const std::filesystem::path parent = std::filesystem::path(directory).parent_path();
  const std::string written = kind ? directory : parent.empty() ? "." : parent.string();
  if (::access(written.c_str(), W_OK | X_OK) != 0)
    plait::fail({"cannot write to '", written, "': ", std::strerror(errno)});
  if (!kind) return {};
  const auto newest = plait::newest_step(files, directory);
  return newest ? std::optional(newest->step) : std::nullopt;
}

/// The options in the text that a step has of them, without hyphens before their names.
std::vector<std::pair<std::string_view, std::string_view>> options_in(std::string_view text) {
  std::vector<std::pair<std::string_view, std::string_view>> all;
  text.remove_prefix(std::min<std::size_t>(text.size(), 2));  // the first "--"
  while (!text.empty()) {
    const std::string_view one = text.substr(0, text.find(between));
    text.remove_prefix(std::min(text.size(), one.size() + between.size()));
    all.emplace_back(one.substr(0, one.find(' ')), one.substr(std::min(one.size(), one.find(' ') + 1)));
  }
  return all;
}

/// Calls f(name, value, value before) for each option that is not what it was when the step was saved, as far as the
/// step has it.
template <class F>
void each_changed(const setup& s, const plait::loaded_state& loaded, F&& f) {
  const std::string was = loaded.find_scalar<std::string>("train.options").value_or(""), is = training_text(s);
  for (const auto& [name, value] : options_in(is))
    for (const auto& [name_then, value_then] : options_in(was))
      if (name == name_then && value != value_then) f(name, value, value_then);
}

}  // namespace

std::string told_by(const plait::loaded_state& loaded, const char* scalar) {
  return loaded.find_scalar<std::string>(scalar).value_or("not recorded: older than this record");
}

std::string training_text(const setup& s) {
  constexpr std::string_view names[] = {
      "--strategy",  "--optimizer", "--muon-momentum", "--muon-scale",      "--muon-lr-ratio", "--weight-decay",
      "--clip",      "--dropout",   "--documents",     "--label-smoothing", "--z-loss",        "--precision",
      "--gradients", "--moments",   "--reduce-in",     "--deterministic",   "--on-nonfinite",  "--end-of-document"};
  std::string text = fmt::format("--global-batch {}", s.microbatches * s.sequences);
  for (const auto& [key, value] : model_settings(s.config))
    text += fmt::format("{}{}{} {}", between, of_model, key, value);
  for (const auto& [name, value] : s.opt.by_name)
    if (std::find(std::begin(names), std::end(names), name) != std::end(names))
      text += fmt::format("{}{} {}", between, name.substr(2), value);
  // A switch that is off is not among the options by name, and a step has to tell it from what an older one left out.
  return text + fmt::format("{}tf32 {}", between, s.opt.tf32);
}

std::string changed_options(const setup& s, const plait::loaded_state& loaded) {
  std::string text;
  each_changed(s, loaded, [&](std::string_view name, std::string_view value, std::string_view before) {
    text += fmt::format("{}--{} {}, which was {}", text.empty() ? "" : "; ", name, value, before);
  });
  return text;
}

std::optional<plait::llama_config> saved_model(const plait::loaded_state& loaded) {
  const std::string text = loaded.find_scalar<std::string>("train.options").value_or("");
  plait::dynamic_vector<plait::setting> settings;
  for (const auto& [name, value] : options_in(text))
    if (name.starts_with(of_model)) settings.push_back({std::string(name.substr(of_model.size())), std::string(value)});
  return model_of(settings);
}

bool judges_otherwise(const setup& s, const plait::loaded_state& loaded) {
  bool otherwise = false;
  each_changed(s, loaded, [&](std::string_view name, std::string_view, std::string_view) {
    for (const char* judging : {"documents", "end-of-document", "label-smoothing", "z-loss"})
      otherwise = otherwise || name == judging;
  });
  return otherwise;
}

std::string other_options_of(const setup& s, const std::string& path) {
  try {
    plait::file_system& files = plait::machine_files();
    std::vector<plait::invalid_step> passed_over;
    const std::string step = plait::detail::step_path(files, path, passed_over);
    const std::string other = changed_options(s, {.path = step, .scalars = plait::read_step(files, step).scalars});
    return other.empty() ? "" : fmt::format("this run has other options than '{}': {}; ", step, other);
  } catch (const plait::error&) {  // the state that cannot be loaded has an error already
    return "";
  }
}

void check_resumed(const setup& s, const plait::loaded_state& loaded) {
  const auto same = [&](const char* option, const char* scalar, std::int64_t here) {
    const auto there = loaded.scalar<std::int64_t>(scalar);
    if (there != here)
      throw plait::error_of_all(plait::cat({option, " is ", here, ", and '", loaded.path, "' was saved with ", there,
                                            ", by which it knows its place in the data; legal is ", there}));
  };
  same("--seed", "train.seed", static_cast<std::int64_t>(s.opt.seed));
  same("--seq", "train.seq", s.opt.seq);
  const std::string there = told_by(loaded, "train.data");
  if (s.data && there != s.data_text && s.opt.on_new_data == "stop" && !there.empty())
    throw plait::error_of_all(
        plait::cat({"--data, --data-weights or --held-out is not what '", loaded.path,
                    "' was saved with, so that its place in the data means nothing: it was [", there, "], and is [",
                    s.data_text, "]; --on-new-data begin goes on with the first sample of the new data"}));
  const std::string rate = told_by(loaded, "train.rate");
  if (static_cast<std::int64_t>(loaded.step) < s.opt.steps && rate != s.rate_text && s.opt.on_new_schedule == "stop" &&
      !rate.empty())
    throw plait::error_of_all(
        plait::cat({"--lr, --lr-schedule, --min-lr-ratio, --warmup or --steps gives another learning rate than '",
                    loaded.path, "' was trained with: it was [", rate, "], and is [", s.rate_text,
                    "]; --on-new-schedule follow goes on at step ", loaded.step + 1, " of the new course"}));
}

std::string planned_state_text(const setup& s, const run_plan& plan) {
  std::string text;
  const std::string& directory = s.opt.checkpoint_dir;
  std::optional<std::uint64_t> newest;
  if (!directory.empty()) static_cast<void>(checkpoint_files(s.opt));  // what the run would refuse
  if (!directory.empty()) newest = about("--checkpoint-dir", [&] { return newest_in(directory); });
  std::int64_t begins = 0;
  const std::string resumed = s.opt.resume == "none"   ? ""
                              : s.opt.resume != "auto" ? s.opt.resume
                              : newest                 ? directory
                                                       : "";
  if (!resumed.empty()) {
    std::string other;
    const found_step step = about("--resume", [&] {
      found_step found = [&] {
        try {
          return fitting_step(resumed, plan, false);
        } catch (const plait::error& e) {
          plait::fail(other_options_of(s, resumed) + e.what());
        }
      }();
      const plait::loaded_state state{.step = found.saved.step, .path = found.path, .scalars = found.saved.scalars};
      check_resumed(s, state);
      other = changed_options(s, state);
      return found;
    });
    begins = static_cast<std::int64_t>(step.saved.step);
    if (begins > s.opt.steps)
      plait::fail(fmt::format("--steps is {}, and {} are behind what --resume {} names; ask for more steps",
                              s.opt.steps, begins, s.opt.resume));
    text += line_of("--resume", step, "its bytes are compared with their checksums when it is loaded");
    if (!other.empty()) text += fmt::format("--resume: other options than before: {}\n", other);
  } else if (s.opt.resume == "auto") {
    text += fmt::format("--resume auto: nothing is saved in '{}' yet\n", directory);
  }
  if (!s.first_step.empty())
    text += line_of("--init-from", about("--init-from", [&] { return fitting_step(s.first_step, plan, true); }),
                    resumed.empty() ? "its weights are taken, with a new optimizer" : "--resume takes its place");
  if (newest && static_cast<std::int64_t>(*newest) > begins)
    plait::fail({"--checkpoint-dir: '", directory, "' has step ", *newest, " already, and this run begins after step ",
                 begins, "; --resume auto goes on from the newest, and another directory takes what this run saves"});
  return text;
}
