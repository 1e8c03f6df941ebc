// Sums in canonical order: leaves that are added on a rank as they come, and parts of them that ranks exchange. How
// many leaves a sum has, and whose they are, its users say: nn/token_leaves.hpp, nn/feature_leaves.hpp. Next:
// core/leaves.hpp for the tree.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/core/leaves.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/buffer.hpp"
#include "plait/kernels/kernels.hpp"

namespace plait {

/// Partial sums of one canonical sum, each of the same number of elements, and the memory that they lie in.
template <class E, compute_device Device>
struct partial_sums {
  std::vector<tree_node> nodes;
  std::vector<E*> values;
  std::vector<buffer<Device>> memory;

  /// Views of a part of each, from `begin` on, in the same memory.
  partial_sums from(std::int64_t begin) const {
    partial_sums part{nodes, values, {}};
    for (E*& v : part.values) v += begin;
    return part;
  }
};

/// The leaves of a sum that one rank has so far, joined as far as they are neighbours. E is the type of the sum.
template <class E, compute_device Device>
class canonical_sum {
 public:
  canonical_sum() = default;
  canonical_sum(std::int64_t elements, std::int64_t leaves) : elements_(elements), tree_(leaves) {}

  std::int64_t elements() const { return elements_; }
  std::int64_t leaves() const { return tree_.leaves(); }
  bool empty() const { return tree_.roots().empty(); }
  void clear() { tree_.clear(); }

  /// Calls write(E* leaf, bool adds), which writes all terms of this leaf, or, where `adds` is set, adds their complete
  /// sum to what is there: that is the leaf's neighbour, which spares a pass. `write` is never asked to add unless
  /// `may_add`.
  template <class Write>
  void add(Device& device, std::int64_t leaf, bool may_add, Write&& write) {
    const auto join = [&](buffer<Device>& a, buffer<Device>& b) {
      kernels::accumulate(device, static_cast<const E*>(b.template data<E>()), a.template data<E>(), elements_);
    };
    if (auto* const other = may_add ? tree_.neighbour({0, leaf}) : nullptr; other && other->node.level == 0) {
      write(other->value.template data<E>(), true);
      bool added = true;  // those two; what their sum joins is added as usual
      tree_.insert({0, leaf}, buffer<Device>(), [&](buffer<Device>& a, buffer<Device>& b) {
        if (!std::exchange(added, false)) return join(a, b);
        if (a.empty()) a.swap(b);
      });
      return;
    }
    auto terms = make_collective_buffer<E>(device, static_cast<std::size_t>(elements_));
    write(terms.template data<E>(), false);
    tree_.insert({0, leaf}, std::move(terms), join);
  }

  /// The partial sums, which stay here.
  partial_sums<E, Device> parts() {
    partial_sums<E, Device> all;
    for (auto& e : tree_.roots()) all.nodes.push_back(e.node), all.values.push_back(e.value.template data<E>());
    return all;
  }

 private:
  std::int64_t elements_ = 0;
  leaf_tree<buffer<Device>> tree_{1};
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
