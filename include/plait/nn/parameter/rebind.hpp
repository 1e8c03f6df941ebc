// Other memory of the caller's for a layer's parameters, after the layer was made. Memory of the layer's own is not
// replaced.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/nn/parameter.hpp"

namespace plait::detail {

/// Binds parameters that lie one after the other in one array, such as the weights of several linears, to other memory.
template <class Precision, compute_device Device>
class parameter_rebinding {
  using parameters = std::vector<parameter_ptr<Precision, Device>>;

 public:
  /// `prefix` is "bias_" or "": where the parameters' memory is in `memory`.
  parameter_rebinding(std::string_view layer, std::string_view prefix, const parameters& all,
                      memory_at<weight_of<Precision>> values, memory_at<gradient_of<Precision>> gradients,
                      memory_at<master_of<Precision>> masters)
      : layer_(layer), prefix_(prefix), all_(all), values_(values), gradients_(gradients), masters_(masters) {}

  /// Throws where memory of the layer's own would be replaced, or the caller's is not named again.
  void check() const {
    for (const auto& p : all_) {
      if (!p) continue;
      const auto& array = *p->array_;
      check(prefix_.empty() ? "weight" : "bias", array.callers_values(), values_.given());
      check("gradient", array.callers_gradients(), gradients_.given());
      check("master", p->callers_master_ != nullptr, masters_.given());
      if (p->rounded && array.callers_values() && !p->stored_value_.empty() && moves(array))
        fail({layer_, ": rebind moves the rounded weights of ", p->name(),
              ", whose masters are in memory of the layer's own and have values: gather would overwrite the new "
              "weights with them. Give memory.master when the layer is made, and move both"});
    }
  }

  /// The parameters are then as a layer that is made on this memory has them: where values or masters are elsewhere,
  /// they are read there; where gradients are, a sum has begun in them.
  void apply() const {
    master_of<Precision>* master = masters_.pointer();
    bool values_moved = false, gradients_moved = false, first = true;
    for (const auto& p : all_) {
      if (!p) continue;
      auto& array = *p->array_;
      if (first) {
        values_moved = array.callers_values() && moves(array);
        gradients_moved = array.callers_gradients() && array.gradients() != gradients_.pointer();
        array.rebind(values_.pointer(), gradients_.pointer());
        first = false;
      }
      if (values_moved || p->callers_master_ != master) {
        p->callers_master_ = master;
        p->rounded_current_ = false;
        p->current_ = array.callers_values() && !master && p->gather_.trivial();
      }
      if (gradients_moved) p->begin_gradient();
      if (master) master += p->size();
    }
  }

 private:
  bool moves(const parameter_array<Precision, Device>& array) const {
    return array.existing_values() != values_.pointer();
  }
  void check(const char* what, bool callers, bool given) const {
    if (callers == given) return;
    const std::string_view prefix = std::string_view(what) == "bias" ? "" : prefix_;
    if (given)
      fail({layer_, ": rebind gives memory.", prefix, what,
            ", which is the layer's own and is not replaced: give a pointer when the layer is made, or leave it out of "
            "rebind by pl::own_memory"});
    fail({layer_, ": rebind says nothing of memory.", prefix, what,
          ", which is the caller's: give a pointer, the one it has or another"});
  }

  std::string_view layer_, prefix_;
  const parameters& all_;
  memory_at<weight_of<Precision>> values_;
  memory_at<gradient_of<Precision>> gradients_;
  memory_at<master_of<Precision>> masters_;
};

/// Whether a rebinding is done, or only checked, by a layer that is made of several and changes all of them or none.
enum class rebinding : std::uint8_t { done, checked };

/// Binds a layer's weights and biases to other memory of the caller's, or throws and changes nothing. `tied`: the
/// weight is another layer's, which binds it. Null parameters are those of branches without a bias.
template <class Precision, compute_device Device>
void rebind_parameters(std::string_view layer, const std::vector<parameter_ptr<Precision, Device>>& weights,
                       const std::vector<parameter_ptr<Precision, Device>>& biases,
                       const parameter_memory<Precision>& memory, bool tied = false, rebinding how = rebinding::done) {
  bool with_bias = false;
  for (const auto& p : biases) with_bias = with_bias || p;
  memory.require_complete(std::string(layer), !tied, with_bias);
  const parameter_rebinding<Precision, Device> of_weights(layer, "", weights, memory.weight, memory.gradient,
                                                          memory.master);
  const parameter_rebinding<Precision, Device> of_biases(layer, "bias_", biases, memory.bias, memory.bias_gradient,
                                                         memory.bias_master);
  if (!tied) of_weights.check();
  of_biases.check();
  if (how == rebinding::checked) return;
  if (!tied) of_weights.apply();
  of_biases.apply();
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
