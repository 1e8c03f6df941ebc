// Which tensors of a saved step a program asks for, by their names and shapes alone: what is missing, what is there and
// asked for by nobody, what has another shape. Models on ranks compare for themselves: checkpoint/load_state.hpp.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/safetensors_writer.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// Returns whether a tensor of this name belongs to an optimizer, and is no weight.
inline bool is_of_optimizer(std::string_view name) { return name.starts_with("optim."); }

/// Returns the tensors of a step that are `wanted`, in that order; their types are not compared. Throws `error`, its
/// text starting with `source`, with the names of all that are missing, that nobody wants (of weights alone, where
/// `weights_only`), and that have another shape.
inline std::vector<const stored_tensor*> tensors_of_step(const manifest& saved,
                                                         const std::vector<safetensors_declaration>& wanted,
                                                         const std::string& source, bool weights_only) {
  std::map<std::string_view, const stored_tensor*> there;
  for (const stored_tensor& t : saved.tensors)
    if (!weights_only || !is_of_optimizer(t.name)) there.emplace(t.name, &t);
  std::vector<const stored_tensor*> found;
  std::vector<std::string> missing, unexpected;
  std::string wrong;
  for (const safetensors_declaration& w : wanted) {
    const auto at = there.find(w.name);
    if (at == there.end()) {
      missing.push_back(w.name);
      continue;
    }
    if (at->second->shape != w.shape)
      append(wrong, {wrong.empty() ? "" : "; ", "'", w.name, "' has the shape ", detail::shape_text(at->second->shape),
                     ", and the model needs ", detail::shape_text(w.shape)});
    found.push_back(at->second);
    there.erase(at);
  }
  for (const auto& [name, tensor] : there) unexpected.emplace_back(name);
  std::string problem;
  if (!missing.empty()) problem = cat({"the model needs ", detail::quoted(missing), ", which it has not"});
  if (!unexpected.empty())
    append(problem, {problem.empty() ? "" : "; ", "nothing in the model is ", detail::quoted(unexpected)});
  if (!wrong.empty()) append(problem, {problem.empty() ? "" : "; ", wrong});
  if (!problem.empty()) fail({source, ": ", problem});
  return found;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
