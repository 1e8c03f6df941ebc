// The beginning of a training loop: where a job before has saved, its state, and else new weights. One rank looks for
// all, since a file system may show a step to some ranks later.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/step_list.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/machine_files.hpp"
#include "plait/tensor/broadcast_text.hpp"

namespace plait {

namespace detail {

/// Returns the newest step in `directory`, or "" where there is none. Throws where there are steps, and none is whole.
inline std::string newest_step_or_none(file_system& files, const std::string& directory) {
  if (!files.kind_of(directory)) return {};
  std::vector<invalid_step> passed_over;
  if (const auto newest = newest_step(files, directory, &passed_over)) return newest->path;
  if (passed_over.empty()) return {};
  fail({"'", directory, "' has steps, and none is whole: '", passed_over[0].path, "': ", passed_over[0].reason,
        "; to begin anew, use another directory"});
}

}  // namespace detail

/// Loads the newest step in `directory`, as `load_state` does, or initializes every parameter of `model` where there is
/// none; rank 0 decides which, for all. Returns what was loaded; nothing where training begins. Throws `error_of_all`
/// where steps are there and none is whole. Collective over `ranks`, which are those of all stages.
///
///     const auto found = resume_or_initialize(ctx, ranks, model, optimizer, "steps");
///     for (std::uint64_t done = found ? found->step : 0; done < steps; ++done) ...
template <compute_device Device, class Model, class Optimizer>
std::optional<loaded_state> resume_or_initialize(const context<Device>& ctx, any_communicator ranks, Model& model,
                                                 Optimizer& optimizer, const std::string& directory,
                                                 load_rules rules = {}, file_system& files = machine_files()) {
  std::string answer;  // the path of a step; after a blank, an error
  if (ranks.rank() == 0) {
    try {
      answer = detail::newest_step_or_none(files, directory);
    } catch (const std::exception& e) {
      answer = std::string(" ") + e.what();
    }
  }
  answer = broadcast_text(ctx.device, ranks, answer);
  if (answer.starts_with(' ')) throw error_of_all(answer.substr(1));
  if (!answer.empty()) return load_state(ctx, ranks, model, optimizer, answer, std::move(rules), files);
  model.visit([&](auto& p) { p.initialize(ctx); });
  return std::nullopt;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
