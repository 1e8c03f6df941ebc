// Sums in deterministic order: leaves that are added on a rank as they come, and parts of them that ranks exchange. Its
// users define how many leaves a sum has, and whose they are: deterministic/leaves.hpp, deterministic/feature_sum.hpp.
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

/// Partial sums of one deterministic sum, each of equally many elements, and the memory that they lie in.
template <class E, compute_device Device>
struct partial_sums {
  std::vector<tree_node> nodes;
  std::vector<E*> values;
  std::vector<buffer<Device>> memory;

  /// Views of a part of each, from `begin` on, in this memory.
  partial_sums from(std::int64_t begin) const {
    partial_sums part{nodes, values, {}};
    for (E*& v : part.values) v += begin;
    return part;
  }
};

/// The leaves of a sum that one rank has so far, joined as far as they are neighbours. E is the type of the sum.
template <class E, compute_device Device>
class deterministic_sum {
 public:
  deterministic_sum() = default;
  deterministic_sum(std::int64_t elements, std::int64_t leaves) : elements_(elements), tree_(leaves) {}

  std::int64_t elements() const { return elements_; }
  std::int64_t leaves() const { return tree_.leaves(); }
  bool empty() const { return tree_.roots().empty(); }
  void clear() { tree_.clear(); }

  /// Calls write(E* leaf, bool adds), which writes all terms of this leaf, or, where `adds` is set, adds their complete
  /// sum to what is there: that is the leaf's neighbour, which spares a pass. `write` is never asked to add unless
  /// `may_add`.
  void add(Device& device, std::int64_t leaf, bool may_add, function_ref<void(E*, bool)> write) {
    auto* const other = may_add ? tree_.neighbour({0, leaf}) : nullptr;
    const bool adds = other && other->node.level == 0;
    terms mine;
    if (!adds) mine.memory = make_collective_buffer<E>(device, static_cast<std::size_t>(elements_));
    write((adds ? other->value : mine).memory.template data<E>(), adds);
    insert(device, leaf, std::move(mine), adds);
  }

  /// Adds a leaf that has terms in some rows of `width` elements alone, such as a table's gradient: `write(E* leaf)`
  /// adds to zeros, and returns the numbers of these rows, in order, each once. Other rows are zeros, which are not
  /// added: a sum that begins at +0 is never -0, so that the bits are equal. Memory of joined leaves is kept for the
  /// next ones until `release_rows`.
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

  /// The partial sums, which stay here.
  partial_sums<E, Device> parts() {
    partial_sums<E, Device> all;
    for (auto& e : tree_.roots()) all.nodes.push_back(e.node), all.values.push_back(e.value.memory.template data<E>());
    return all;
  }

 private:
  struct terms {
    buffer<Device> memory;
    std::vector<std::int64_t> rows;  ///< of leaves that have terms in some rows alone
  };

  /// `added`: whether the leaf was added to its neighbour already: what their sum joins is added as usual.
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
  /// b's memory is zeros then, for the next leaf.
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
  std::vector<buffer<Device>> zeros_;  ///< for leaves of rows
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
