// The exchange of partial sums between ranks: each rank gets those parts of an array that it is to have, and adds them
// in canonical order, so that no backend's order of ranks enters. Next: tensor/canonical_sum.hpp for sums on a rank,
// tests/unit/tensor/canonical_exchange.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/world.hpp"
#include "plait/core/leaves.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/tensor/canonical_sum.hpp"

namespace plait {

/// Elements `begin` to `end` - 1 of an array.
struct element_range {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
};

/// The even parts of `elements` for `ranks` ranks, in order; the last ones may be smaller.
std::vector<element_range> even_parts(std::int64_t elements, std::int64_t ranks);

/// The ranks of a world that are with `rank` in the group of `axes`, in the group's order.
std::vector<std::int64_t> ranks_of_group(const mesh_shape& mesh, const axis_list& axes, std::int64_t rank);

/// Which partial sums the ranks of a group have, and what joining all of them leaves. Messages go once, from who has a
/// partial sum to who is to have a part of it: with one partial sum a rank, an all-reduce in two exchanges sends
/// 2 (n-1)/n of the array, as a ring does.
class canonical_exchange {
 public:
  canonical_exchange() = default;
  /// `members` are the partial sums of each rank of `comm`, over a sum of `leaves` leaves.
  canonical_exchange(any_communicator& comm, std::vector<std::vector<tree_node>> members, std::int64_t leaves);

  explicit operator bool() const { return comm_ != nullptr; }
  int ranks() const { return comm_->size(); }
  /// The partial sums that there are afterwards.
  const std::vector<tree_node>& joined() const { return joined_; }

  /// An exchange that is under way.
  template <class E, compute_device Device>
  struct under_way {
    partial_sums<E, Device> own;
    std::vector<element_range> parts;
    buffer<Device> received;
    std::vector<request> moving;  ///< one for each partial sum of the rank that has most
  };

  /// Starts to bring rank k of the group the elements parts[k] of all partial sums. `own` and what it views must stay
  /// until the end.
  template <class E, compute_device Device>
  under_way<E, Device> start(Device& device, partial_sums<E, Device> own, std::vector<element_range> parts) const {
    check(own.nodes);
    under_way<E, Device> moves{std::move(own), std::move(parts), {}, {}};
    const std::size_t n = members_.size();
    const auto mine = static_cast<std::size_t>(moves.parts[static_cast<std::size_t>(comm_->rank())].size());
    std::size_t rounds = 0, all = 0;
    for (const auto& nodes : members_) rounds = std::max(rounds, nodes.size()), all += nodes.size();
    moves.received = make_collective_buffer<E>(device, all * mine);
    E* next = moves.received.template data<E>();
    std::vector<std::size_t> send(n), send_at(n), receive(n), receive_at(n);
    for (std::size_t r = 0; r < rounds; ++r) {  // the r-th partial sum of each, from where it is
      const bool sends = r < moves.own.values.size();
      std::size_t came = 0;
      for (std::size_t k = 0; k < n; ++k) {
        send[k] = sends ? static_cast<std::size_t>(moves.parts[k].size()) : 0;
        send_at[k] = sends ? static_cast<std::size_t>(moves.parts[k].begin) : 0;
        receive[k] = r < members_[k].size() ? mine : 0;
        receive_at[k] = came;
        came += receive[k];
      }
      moves.moving.push_back(comm_->start_all_to_all_v(sends ? moves.own.values[r] : nullptr, send, send_at, next,
                                                       receive, receive_at, dtype_of<E>));
      next += came;
    }
    return moves;
  }
  /// Waits, and joins what has come: this rank's part of the sums `joined()`.
  template <class E, compute_device Device>
  partial_sums<E, Device> finish(Device& device, under_way<E, Device>&& moves) const {
    for (request& r : moves.moving) r.wait();
    const std::int64_t mine = moves.parts[static_cast<std::size_t>(comm_->rank())].size();
    leaf_tree<E*> tree(leaves_);
    E* next = moves.received.template data<E>();
    for (std::size_t r = 0, left = 1; left != 0; ++r) {
      left = 0;
      for (const std::vector<tree_node>& nodes : members_) {
        if (r >= nodes.size()) continue;
        tree.insert(nodes[r], next,
                    [&](E* x, E* y) { kernels::accumulate(device, static_cast<const E*>(y), x, mine); });
        next += mine;
        ++left;
      }
    }
    partial_sums<E, Device> all;
    for (const auto& e : tree.roots()) all.nodes.push_back(e.node), all.values.push_back(e.value);
    all.memory.push_back(std::move(moves.received));
    return all;
  }
  template <class E, compute_device Device>
  partial_sums<E, Device> run(Device& device, partial_sums<E, Device> own, std::vector<element_range> parts) const {
    return finish(device, start(device, std::move(own), std::move(parts)));
  }

  /// Brings every rank all of the joined sums: whole at once where the array is small or the ranks are two, otherwise
  /// each rank joins a part, and sends it to the others.
  template <class E, compute_device Device>
  partial_sums<E, Device> run_everywhere(Device& device, partial_sums<E, Device> own, std::int64_t elements) const {
    constexpr std::int64_t small = 4096;
    const std::int64_t n = comm_->size();
    if (n <= 2 || elements <= small)
      return run(device, std::move(own), std::vector<element_range>(static_cast<std::size_t>(n), {0, elements}));
    const std::vector<element_range> parts = even_parts(elements, n);
    const partial_sums<E, Device> part = run(device, std::move(own), parts);
    partial_sums<E, Device> all;
    for (std::size_t i = 0; i < part.nodes.size(); ++i) {
      all.memory.push_back(make_collective_buffer<E>(device, static_cast<std::size_t>(elements)));
      all.values.push_back(all.memory.back().template data<E>());
      spread(part.values[i], all.values[i], parts);
    }
    all.nodes = part.nodes;
    return all;
  }

  /// Gathers parts of an array, which each rank has one of, on all ranks.
  template <class E>
  void spread(const E* part, E* whole, const std::vector<element_range>& parts) const {
    const std::size_t n = parts.size();
    const auto own = static_cast<std::size_t>(parts[static_cast<std::size_t>(comm_->rank())].size());
    const std::vector<std::size_t> send(n, own), send_at(n, 0);
    std::vector<std::size_t> receive(n), receive_at(n);
    for (std::size_t k = 0; k < n; ++k) {
      receive[k] = static_cast<std::size_t>(parts[k].size());
      receive_at[k] = static_cast<std::size_t>(parts[k].begin);
    }
    comm_->all_to_all_v(part, send, send_at, whole, receive, receive_at, dtype_of<E>);
  }

 private:
  void check(const std::vector<tree_node>& own) const;

  any_communicator* comm_ = nullptr;
  std::vector<std::vector<tree_node>> members_;
  std::vector<tree_node> joined_;
  std::int64_t leaves_ = 1;
};

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/tensor/canonical_exchange.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
