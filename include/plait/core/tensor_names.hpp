// The names of saved tensors that are not weights of a model.
#pragma once

#include <string_view>

#include "plait/core/macros_off.hpp"

namespace plait {

/// Whether a parameter of this name belongs to a low-rank adapter.
inline bool is_of_adapter(std::string_view name) { return name.find(".lora_") != name.npos; }

/// How the name ends of the load of a mixture's experts in the last step (`moe`). A state that does not have it is
/// loaded without it, and a model that does not need it leaves it out.
inline constexpr const char* last_load_suffix = ".gate.last_load";
inline bool is_last_load(std::string_view name) { return name.ends_with(last_load_suffix); }

/// Whether a tensor of this name belongs to an optimizer.
inline bool is_of_optimizer(std::string_view name) { return name.starts_with("optim."); }

}  // namespace plait

#include "plait/core/macros_on.hpp"
