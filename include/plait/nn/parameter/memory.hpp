// The caller's words about the memory of a layer's parameters: here, or the layer's own.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/precision.hpp"
#include "plait/core/same_bits.hpp"

namespace plait {

/// Says that the layer allocates a part of its parameters' memory, when it is first needed:
/// `{.weight = mine, .gradient = pl::own_memory}`.
struct own_memory_t {};
inline constexpr own_memory_t own_memory{};

/// Where memory lies, in the caller's words: at a pointer, in the layer's own memory, or nothing is said.
template <class T>
class memory_at {
 public:
  constexpr memory_at() noexcept {}  // g++ 12 breaks on a defaulted one where a member's own initialiser names memory
  constexpr memory_at(own_memory_t) : said_(true) {}                           // NOLINT: as members of parameter_memory
  constexpr memory_at(T* pointer) : at_(pointer), said_(true), here_(true) {}  // NOLINT
  constexpr memory_at(std::nullptr_t) : said_(true), here_(true) {}            // NOLINT
  template <class Other>
    requires same_bits<Other, T>
  memory_at(Other* pointer) : memory_at(elements_of<T>(pointer)) {}  // NOLINT

  /// Null for memory of the layer's own.
  constexpr T* pointer() const { return at_; }
  constexpr bool said() const { return said_; }
  /// Whether the caller has given a pointer.
  constexpr bool given() const { return here_; }

 private:
  T* at_ = nullptr;
  bool said_ = false;
  bool here_ = false;
};

/// The caller's memory for a layer's parameters: this rank's part, as it is used, with values in it and gradients that
/// are zero. A layer of which nothing is said has memory of its own. Who gives one of them says something of all that
/// the layer has, so that nothing is allocated unseen: `pl::own_memory` where the layer is to allocate it.
///
/// Masters are those of precisions whose weights are rounded (`bf16`), as the parameter is stored; with
/// `pl::own_memory` they begin as the caller's weights.
template <class Precision>
struct parameter_memory {
  memory_at<weight_of<Precision>> weight{};
  memory_at<gradient_of<Precision>> gradient{};
  memory_at<weight_of<Precision>> bias{};
  memory_at<gradient_of<Precision>> bias_gradient{};
  memory_at<master_of<Precision>> master{};
  memory_at<master_of<Precision>> bias_master{};

  /// Whether anything is said of any of it.
  bool says_anything() const {
    return weight.said() || gradient.said() || bias.said() || bias_gradient.said() || master.said() ||
           bias_master.said();
  }

  /// Throws if a pointer is null, if something is missing, or if the layer has no use for it: a weight that is another
  /// layer's, a bias without one, masters where nothing is rounded.
  void require_complete(const std::string& layer, bool with_weight, bool with_bias) const {
    constexpr bool rounded = !std::is_same_v<weight_of<Precision>, master_of<Precision>>;
    const struct {
      std::string_view name;
      bool said, given, null, needed;
    } all[] = {{"weight", weight.said(), weight.given(), !weight.pointer(), with_weight},
               {"gradient", gradient.said(), gradient.given(), !gradient.pointer(), with_weight},
               {"master", master.said(), master.given(), !master.pointer(), rounded && with_weight},
               {"bias", bias.said(), bias.given(), !bias.pointer(), with_bias},
               {"bias_gradient", bias_gradient.said(), bias_gradient.given(), !bias_gradient.pointer(), with_bias},
               {"bias_master", bias_master.said(), bias_master.given(), !bias_master.pointer(), rounded && with_bias}};
    std::string_view first;
    for (const auto& m : all) {
      if (!m.given) continue;
      if (!m.needed)
        fail({layer, ": memory.", m.name, " is given, and this layer has none (",
              m.name.starts_with("bias") ? with_bias ? "its bias is not rounded" : "it has no bias"
              : with_weight              ? "its weight is not rounded"
                                         : "its weight is another layer's",
              ")"});
      if (m.null)
        fail({layer, ": memory.", m.name,
              " is null: allocate it before the layer is made, or say pl::own_memory, and the "
              "layer allocates it"});
      if (first.empty()) first = m.name;
    }
    if (first.empty()) return;
    for (const auto& m : all)
      if (m.needed && !m.said)
        fail({layer, ": memory gives ", first, " and says nothing of ", m.name,
              ": give a pointer, or pl::own_memory, and the layer allocates it"});
  }
};

namespace detail {

struct memory_part {
  const char* name;
  bool said;
};

/// For a layer that is made of several: throws if something is said of the memory of one and nothing of another's.
inline void require_all_parts(std::string_view layer, std::initializer_list<memory_part> parts) {
  const char* first = nullptr;
  for (const memory_part& p : parts)
    if (p.said && !first) first = p.name;
  for (const memory_part& p : parts)
    if (first && !p.said)
      fail({layer, ": memory gives ", first, " and says nothing of ", p.name,
            ": give pointers, or pl::own_memory for its weight and gradient, and the layer allocates them"});
}

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
