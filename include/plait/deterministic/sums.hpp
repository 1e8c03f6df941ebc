// Sums in deterministic order: leaves that a rank adds as they arrive, and partial sums that ranks exchange.
// deterministic/leaves.hpp and deterministic/feature_sum.hpp define the leaves of a sum.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/core/function_ref.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/deterministic/leaves.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/kernels.hpp"

namespace plait {

/// The partial sums of one deterministic sum, all with equal numbers of elements, and their memory.
template <class E, compute_device Device>
struct partial_sums {
  std::vector<tree_node> nodes;
  std::vector<E*> values;
  std::vector<buffer<Device>> memory;

  /// Returns views of the elements from `begin` on of each partial sum, in this memory.
  partial_sums from(std::int64_t begin) const {
    partial_sums part{nodes, values, {}};
    for (E*& v : part.values) v += begin;
    return part;
  }
};

/// One rank's leaves of a sum, joined where they are neighbours. E is the type of the sum.
template <class E, compute_device Device>
class deterministic_sum {
 public:
  deterministic_sum() = default;
  deterministic_sum(std::int64_t elements, std::int64_t leaves) : elements_(elements), tree_(leaves) {}

  std::int64_t elements() const { return elements_; }
  std::int64_t leaves() const { return tree_.leaves(); }
  bool empty() const { return tree_.roots().empty(); }
  void clear() { tree_.clear(); }

  /// Calls write(E* leaf, bool adds). It must write all terms of this leaf, or, if `adds` is set, add their complete
  /// sum to the memory's contents. These are then the leaf's neighbour, which saves a pass. `adds` is never set unless
  /// `may_add`.
  void add(Device& device, std::int64_t leaf, bool may_add, function_ref<void(E*, bool)> write) {
    auto* const other = may_add ? tree_.neighbour({0, leaf}) : nullptr;
    const bool adds = other && other->node.level == 0;
    terms mine;
    if (!adds) mine.memory = make_collective_buffer<E>(device, static_cast<std::size_t>(elements_));
    write((adds ? other->value : mine).memory.template data<E>(), adds);
    insert(device, leaf, std::move(mine), adds);
  }

  /// Adds a leaf that has terms in only some rows of `width` elements, such as a table's gradient. `write(E* leaf)`
  /// must add the terms to zeros, and return the indices of these rows, ascending and unique. Other rows are zeros,
  /// which are not added. A sum that begins at +0 is never -0, so the bits are equal. Memory of joined leaves is reused
  /// until `release_rows`.
  void add_rows(Device& device, std::int64_t leaf, std::int64_t width,
                function_ref<std::vector<std::int64_t>(E*)> write) {
    terms mine;
    if (zeros_.empty()) {
      mine.memory = make_collective_buffer<E>(device, static_cast<std::size_t>(elements_));
      device.zero(mine.memory.data(), static_cast<std::size_t>(elements_) * sizeof(E), device.main_stream());
    } else {
      mine.memory = std::move(zeros_.back());
      zeros_.pop_back();
    }
    mine.rows = write(mine.memory.template data<E>());
    tree_.insert({0, leaf}, std::move(mine), [&](terms& a, terms& b) { join_rows(device, width, a, b); });
  }

  void release_rows() { zeros_.clear(); }

  /// Returns the partial sums, which remain in this object's memory.
  partial_sums<E, Device> parts() {
    partial_sums<E, Device> all;
    for (auto& e : tree_.roots()) all.nodes.push_back(e.node), all.values.push_back(e.value.memory.template data<E>());
    return all;
  }

 private:
  struct terms {
    buffer<Device> memory;
    std::vector<std::int64_t> rows;  ///< of leaves with terms in only some rows
  };

  /// `added`: whether the leaf was already added to its neighbour. The result then joins further sums as usual.
  void insert(Device& device, std::int64_t leaf, terms mine, bool added) {
    tree_.insert({0, leaf}, std::move(mine), [&](terms& a, terms& b) {
      if (!std::exchange(added, false)) return join_all(device, a, b);
      if (a.memory.empty()) a.memory.swap(b.memory);
    });
  }
  void join_all(Device& device, terms& a, terms& b) const {
    kernels::accumulate(device, static_cast<const E*>(b.memory.template data<E>()), a.memory.template data<E>(),
                        elements_);
  }
  /// Adds b to a. Afterwards b's memory has zeros, for the next leaf.
  void join_rows(Device& device, std::int64_t width, terms& a, terms& b) {
    E *const to = a.memory.template data<E>(), *const from = b.memory.template data<E>();
    for (const std::int64_t row : b.rows) {
      kernels::accumulate(device, static_cast<const E*>(from + row * width), to + row * width, width);
      device.zero(from + row * width, static_cast<std::size_t>(width) * sizeof(E), device.main_stream());
    }
    std::vector<std::int64_t> all;
    all.reserve(a.rows.size() + b.rows.size());
    std::set_union(a.rows.begin(), a.rows.end(), b.rows.begin(), b.rows.end(), std::back_inserter(all));
    a.rows = std::move(all);
    zeros_.push_back(std::move(b.memory));
  }

  std::int64_t elements_ = 0;
  leaf_tree<terms> tree_{1};
  std::vector<buffer<Device>> zeros_;  ///< memory for leaves of rows
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
