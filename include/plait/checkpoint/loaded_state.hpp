// The result of loading a training state, and the rules by which a step's tensors become a model's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "plait/checkpoint/held_state.hpp"
#include "plait/checkpoint/reads_ahead.hpp"
#include "plait/checkpoint/step_list.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// A state that has been loaded.
struct loaded_state {
  std::uint64_t step = 0;
  std::string path;                                          ///< the directory of the step
  saved_scalars scalars{};                                   ///< as they were saved
  std::vector<std::pair<std::string, std::string>> blobs{};  ///< likewise, on every rank
  std::uint64_t bytes = 0;                                   ///< that this rank has read
  std::vector<invalid_step> passed_over{};                   ///< newer steps beside it that are damaged; on rank 0

  /// Returns a scalar of this type; nothing where there is none.
  template <class T>
  std::optional<T> find_scalar(std::string_view name) const {
    for (const auto& [key, value] : scalars)
      if (key == name)
        if (const T* const found = std::get_if<T>(&value)) return *found;
    return std::nullopt;
  }
  /// Returns the scalar of this name. Throws `error` naming it where there is none.
  template <class T>
  T scalar(std::string_view name) const {
    if (const std::optional<T> found = find_scalar<T>(name)) return *found;
    fail({"'", path, "' has no scalar '", name, "' of this type"});
  }
  /// Returns the bytes of a blob. Throws `error` naming it where there is none.
  const std::string& blob(std::string_view name) const {
    for (const auto& [key, bytes_of_it] : blobs)
      if (key == name) return bytes_of_it;
    fail({"'", path, "' has no blob '", name, "'"});
  }
};

/// Thrown on every rank where a step has weights alone, and a run was to resume from it.
class no_optimizer_state : public error_of_all {
 public:
  using error_of_all::error_of_all;
};

/// Says how a step's tensors become those of a model where the two are not the same. Names are a parameter's or
/// "optim.PARAMETER.exp_avg" and the like, so that a rule sees both. A rule that is not given allows nothing.
struct load_rules {
  std::vector<held_tensor> tensors{};  ///< of the program's own, beside the model's and the optimizer's
  std::function<std::string(const std::string&)> stored_name{};  ///< what a tensor of the model is called in the step
  std::function<bool(const std::string&)> may_miss{};    ///< tensors of the model that keep what they have without one
  std::function<bool(const std::string&)> may_ignore{};  ///< tensors of the step that nothing in the model is
  std::size_t exchange_bytes = std::size_t{64} << 20;    ///< most that ranks send each other at once, of a rank
  /// Whether bytes are read to where they belong, where the host's memory is that. It takes no second copy of the state
  /// and half of the time, and after an error the tensors have no values: for a program that ends then.
  bool in_place = false;
  read_sizes read_ahead{};  ///< how much of the files a rank reads while it does something else
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
