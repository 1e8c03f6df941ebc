// The caller's memory for a layer's parameters, given to the layer's constructor, and its later replacement.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/part.hpp"
#include "plait/nn/parameter.hpp"

namespace plait {

/// Requests that the layer allocates this array when it is first needed: `{.weight = mine, .gradient =
/// pl::own_memory}`.
struct own_memory_t {};
inline constexpr own_memory_t own_memory{};

/// The place of an array: the caller's pointer, memory of the layer, or not given. The layer's constructor compares a
/// typed pointer (`part`) with its array: dims, axes and sizes.
template <class T>
class memory_at {
 public:
  constexpr memory_at() noexcept {}  // g++ 12 fails if it is defaulted and a member's initialiser names memory
  constexpr memory_at(own_memory_t) : named_(true) {}  // NOLINT: as members of parameter_memory
  constexpr memory_at(T* pointer) : at_(pointer), named_(true), given_(true) {}  // NOLINT
  constexpr memory_at(std::nullptr_t) : named_(true), given_(true) {}            // NOLINT
  template <class Other>
    requires same_bits<Other, T>
  memory_at(Other* pointer) : memory_at(elements_of<T>(pointer)) {}  // NOLINT
  template <class Other, spec_like Spec>
    requires(std::is_same_v<Other, T> || same_bits<Other, T>)
  memory_at(const part<Other, Spec>& typed)  // NOLINT
      : memory_at(typed.unchecked()) {
    placed_ = &layout_v<Spec>, size_ = typed.size();
  }

  /// Null for memory that the layer allocates.
  constexpr T* pointer() const { return at_; }
  constexpr bool named() const { return named_; }
  /// Whether the caller has given a pointer.
  constexpr bool given() const { return given_; }
  /// The layout and the number of elements of a typed pointer; null for a bare pointer.
  const layout* placed() const { return placed_; }
  std::int64_t size() const { return size_; }

 private:
  T* at_ = nullptr;
  const layout* placed_ = nullptr;
  std::int64_t size_ = 0;
  bool named_ = false;
  bool given_ = false;
};

/// The layouts of an array with the parameters of a layer: one, or several contiguous ones.
struct array_layouts {
  layout used, stored;
  std::int64_t used_size = 0, stored_size = 0;
  bool apart = false;    ///< whether storage and use differ for one of them
  bool several = false;  ///< no part can describe several
};

/// The caller's memory for a layer's parameters: this rank's part in the layout of use, with values, and with gradients
/// that are zero. A layer that is given none allocates its own. If the caller gives one array, it must name every array
/// of the layer, so that no allocation is hidden. `pl::own_memory` stands for arrays that the layer allocates.
///
/// Masters are the values between steps, in the stored layout. They exist if the precision rounds weights (`bf16`), or
/// if a policy's stored layout differs from that of use. With `pl::own_memory` they begin as copies of the caller's
/// weights, if the layouts are equal.
///
/// A parameter with a different stored layout also has separate reduced gradients, in the stored layout. Its weight is
/// in use from `gather` to the last pass, and its gradient from `zero_gradient` to `reduce`. At other times the program
/// may use this memory for other parameters (ZeRO).
template <class Precision>
struct parameter_memory {
  memory_at<weight_of<Precision>> weight{};
  memory_at<gradient_of<Precision>> gradient{};
  memory_at<weight_of<Precision>> bias{};
  memory_at<gradient_of<Precision>> bias_gradient{};
  memory_at<master_of<Precision>> master{};
  memory_at<master_of<Precision>> bias_master{};
  memory_at<gradient_of<Precision>> reduced{};
  memory_at<gradient_of<Precision>> bias_reduced{};

  /// Whether any array is given.
  bool names_any() const {
    return weight.named() || gradient.named() || bias.named() || bias_gradient.named() || master.named() ||
           bias_master.named() || reduced.named() || bias_reduced.named();
  }

  /// Throws if a pointer is null or an array is missing. Throws also if the layer does not need an array. Such arrays
  /// are the weight of another layer, a bias of a layer without one, and masters if nothing is rounded or stored
  /// differently. Throws also if a typed pointer has another layout than the array.
  void require_complete(const std::string& layer, const array_layouts* weights, const array_layouts* biases) const {
    constexpr bool rounded = !std::is_same_v<weight_of<Precision>, master_of<Precision>>;
    const bool w_apart = weights && weights->apart, b_apart = biases && biases->apart;
    const asked all[] = {{"weight", weight, weights, weights != nullptr, false},
                         {"gradient", gradient, weights, weights != nullptr, false},
                         {"master", master, weights, weights && (rounded || w_apart), true},
                         {"reduced", reduced, weights, w_apart, true},
                         {"bias", bias, biases, biases != nullptr, false},
                         {"bias_gradient", bias_gradient, biases, biases != nullptr, false},
                         {"bias_master", bias_master, biases, biases && (rounded || b_apart), true},
                         {"bias_reduced", bias_reduced, biases, b_apart, true}};
    std::string_view first;
    for (const asked& m : all) {
      if (!m.given) continue;
      m.require_right(layer);
      if (first.empty()) first = m.name;
    }
    if (first.empty()) return;
    for (const asked& m : all)
      if (m.needed && !m.named)
        fail({layer, ": memory gives ", first, " but not ", m.name,
              ": give a pointer, or pl::own_memory, and the layer allocates it"});
  }

 private:
  /// One array as the caller gives it, with the layer's requirements.
  struct asked {
    template <class T>
    asked(std::string_view n, const memory_at<T>& at, const array_layouts* a, bool is_needed, bool is_stored)
        : name(n),
          named(at.named()),
          given(at.given()),
          null(!at.pointer()),
          needed(is_needed),
          stored(is_stored),
          array(a),
          placed(at.placed()),
          size(at.size()) {}

    void require_right(const std::string& layer) const {
      const bool of_bias = name.starts_with("bias");
      if (!needed)
        fail({layer, ": memory.", name, " is given, and this layer has none (",
              of_bias ? array ? "its bias is stored as it is used" : "it has no bias"
              : array ? "its weight is stored as it is used"
                      : "its weight is another layer's",
              ")"});
      if (null)
        fail({layer, ": memory.", name,
              " is null: allocate it before the layer is made, or say pl::own_memory, and the layer allocates it"});
      if (!placed) return;
      if (array->several)
        fail({layer, ": memory.", name, " is a part, and the layer has several parameters there, one after the other: ",
              "give a pointer to the first, by unchecked()"});
      const layout& expected = stored ? array->stored : array->used;
      const std::int64_t elements = stored ? array->stored_size : array->used_size;
      if (!(placed->dims == expected.dims))
        fail({layer, ": memory.", name, " is a part ", describe(*placed), ", and this array of the layer lies as ",
              describe(expected), ": dims and their axes must be the same"});
      if (size != elements)
        fail({layer, ": memory.", name, " is a part of ", size, " elements, and this array of the layer has ", elements,
              ": make both for one context"});
    }

    std::string_view name;
    bool named, given, null, needed, stored;
    const array_layouts* array;
    const layout* placed;
    std::int64_t size;
  };
};

namespace detail {

struct memory_part {
  const char* name;
  bool named;
};

/// For a layer of several sublayers: throws if the caller gives the memory of some and not of others.
inline void require_all_parts(std::string_view layer, std::initializer_list<memory_part> parts) {
  const char* first = nullptr;
  for (const memory_part& p : parts)
    if (p.named && !first) first = p.name;
  for (const memory_part& p : parts)
    if (first && !p.named)
      fail({layer, ": memory gives ", first, " but not ", p.name,
            ": give pointers, or pl::own_memory for its weight and gradient, and the layer allocates them"});
}

}  // namespace detail

}  // namespace plait

namespace plait::detail {

// Later changes of the caller's memory. Memory that the layer owns is not replaced.

/// Binds contiguous parameters, such as the weights of several linears, to other memory.
template <class Precision, compute_device Device>
class parameter_rebinding {
  using parameters = std::vector<parameter_ptr<Precision, Device>>;

 public:
  /// `prefix` is "bias_" or "", and selects the members of `parameter_memory`.
  parameter_rebinding(std::string_view layer, std::string_view prefix, const parameters& all,
                      memory_at<weight_of<Precision>> values, memory_at<gradient_of<Precision>> gradients,
                      memory_at<master_of<Precision>> masters, memory_at<gradient_of<Precision>> reduced)
      : layer_(layer),
        prefix_(prefix),
        all_(all),
        values_(values),
        gradients_(gradients),
        masters_(masters),
        reduced_(reduced) {}

  /// Throws if memory that the layer owns would be replaced, or if the caller's memory is not given again.
  void check() const {
    for (const auto& p : all_) {
      if (!p) continue;
      const auto& array = *p->array_;
      check(prefix_.empty() ? "weight" : "bias", array.callers_values(), values_.given());
      check("gradient", array.callers_gradients(), gradients_.given());
      check("master", p->callers_master_ != nullptr, masters_.given());
      check("reduced", p->callers_reduced_ != nullptr, reduced_.given());
      if (p->gradients_pass_by() && p->added_ && array.existing_gradients() != gradients_.pointer())
        refuse_lost_gradient(p->name());
      if (p->rounded && array.callers_values() && !p->stored_value_.empty() && moves(array))
        fail({layer_, ": rebind moves the rounded weights of ", p->name(),
              ", whose masters are in memory of the layer's own and have values: gather would overwrite the new "
              "weights with them. Give memory.master when the layer is made, and move both"});
    }
  }

  /// Puts the parameters into the state of a layer that is constructed on this memory. Values or masters with a new
  /// address are read there; gradients with a new address are a begun sum.
  void apply() const {
    master_of<Precision>* master = masters_.pointer();
    gradient_of<Precision>* reduced = reduced_.pointer();
    bool values_moved = false, gradients_moved = false, first = true;
    for (const auto& p : all_) {
      if (!p) continue;
      auto& array = *p->array_;
      if (first) {
        values_moved = array.callers_values() && moves(array);
        gradients_moved = array.callers_gradients() && array.existing_gradients() != gradients_.pointer();
        array.rebind(values_.pointer(), gradients_.pointer());
        first = false;
      }
      if (values_moved || p->callers_master_ != master) {
        p->callers_master_ = master;
        p->rounded_current_ = false;
        p->current_ = array.callers_values() && !master && !p->stored_apart_;
      }
      p->callers_reduced_ = reduced;
      if (gradients_moved && p->gradients_pass_by())
        p->gradient_use_->valid = false;
      else if (gradients_moved)
        p->begin_gradient();
      if (master) master += p->size();
      if (reduced) reduced += p->size();
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
    fail({layer_, ": rebind does not give memory.", prefix, what,
          ", which is the caller's: give a pointer, the one it has or another"});
  }

  std::string_view layer_, prefix_;
  const parameters& all_;
  memory_at<weight_of<Precision>> values_;
  memory_at<gradient_of<Precision>> gradients_;
  memory_at<master_of<Precision>> masters_;
  memory_at<gradient_of<Precision>> reduced_;
};

/// Whether a rebinding is done or only checked. A layer of several sublayers first checks all, so it changes all of
/// them or none.
enum class rebinding : std::uint8_t { done, checked };

/// The layouts of an array with these parameters; none if there are no parameters.
template <class Precision, compute_device Device>
std::optional<array_layouts> layouts_of(const std::vector<parameter_ptr<Precision, Device>>& all) {
  std::optional<array_layouts> out;
  for (const auto& p : all) {
    if (!p) continue;
    if (out)
      out->several = true;
    else
      out = array_layouts{p->used(), p->stored(), p->used_size(), p->size()};
    out->apart = out->apart || p->stored_differently();
  }
  return out;
}
/// Throws unless the caller's memory fits a layer with these parameters. `tied`: the weight belongs to another layer. A
/// parameter is null for a branch without a bias.
template <class Precision, compute_device Device>
void require_memory(std::string_view layer, const std::vector<parameter_ptr<Precision, Device>>& weights,
                    const std::vector<parameter_ptr<Precision, Device>>& biases,
                    const parameter_memory<Precision>& memory, bool tied = false) {
  const auto of_weights = layouts_of<Precision, Device>(weights), of_biases = layouts_of<Precision, Device>(biases);
  memory.require_complete(std::string(layer), tied ? nullptr : &*of_weights, of_biases ? &*of_biases : nullptr);
}

#define PLAIT_INSTANTIATE(T)                                                                                       \
  PLAIT_COMPILED_TEMPLATE(void require_memory<T, cpu>(std::string_view, const std::vector<parameter_ptr<T, cpu>>&, \
                                                      const std::vector<parameter_ptr<T, cpu>>&,                   \
                                                      const parameter_memory<T>&, bool))
PLAIT_INSTANTIATE(float)
PLAIT_INSTANTIATE(bf16)
PLAIT_INSTANTIATE(double)
#undef PLAIT_INSTANTIATE

/// Binds a layer's weights and biases to other memory that the caller owns, or throws and changes nothing. A `tied`
/// weight is bound by its own layer.
template <class Precision, compute_device Device>
void rebind_parameters(std::string_view layer, const std::vector<parameter_ptr<Precision, Device>>& weights,
                       const std::vector<parameter_ptr<Precision, Device>>& biases,
                       const parameter_memory<Precision>& memory, bool tied = false, rebinding how = rebinding::done) {
  require_memory<Precision, Device>(layer, weights, biases, memory, tied);
  const parameter_rebinding<Precision, Device> of_weights(layer, "", weights, memory.weight, memory.gradient,
                                                          memory.master, memory.reduced);
  const parameter_rebinding<Precision, Device> of_biases(layer, "bias_", biases, memory.bias, memory.bias_gradient,
                                                         memory.bias_master, memory.bias_reduced);
  if (!tied) of_weights.check();
  of_biases.check();
  if (how == rebinding::checked) return;
  if (!tied) of_weights.apply();
  of_biases.apply();
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
