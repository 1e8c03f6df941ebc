// The exchange of partial sums between ranks. Each rank gets the parts of an array that it needs, and adds them in
// deterministic order, which does not depend on a backend.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/world.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/deterministic/leaves.hpp"
#include "plait/deterministic/sums.hpp"

namespace plait {

/// Elements [begin, end) of an array.
struct element_range {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
};

/// Returns equal parts of `elements` for `ranks` ranks, in order; the last ones may be smaller.
inline std::vector<element_range> even_parts(std::int64_t elements, std::int64_t ranks) {
  const std::int64_t size = (elements + ranks - 1) / ranks;
  std::vector<element_range> parts;
  for (std::int64_t r = 0; r < ranks; ++r)
    parts.push_back({std::min(r * size, elements), std::min((r + 1) * size, elements)});
  return parts;
}

/// Returns the ranks of a world that share the group of `axes` with `rank`, in the group's order.
inline std::vector<std::int64_t> ranks_of_group(const mesh_shape& mesh, const axis_list& axes, std::int64_t rank) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(mesh.size(axes)));
  for (std::int64_t r = 0; r < mesh.size(); ++r)
    if (mesh.group_of(r, axes) == mesh.group_of(rank, axes)) all[static_cast<std::size_t>(mesh.index_in(r, axes))] = r;
  return all;
}

/// The exchange of a group's partial sums, and the partial sums after it. Each partial sum is sent once, from its rank
/// to each rank that needs a part of it. With one partial sum per rank, an all-reduce in two exchanges sends 2 (n-1)/n
/// of the array, as a ring does.
class deterministic_exchange {
 public:
  deterministic_exchange() = default;
  /// `members` lists the partial sums of each rank of `comm`, in a sum of `leaves` leaves.
  deterministic_exchange(any_communicator& comm, std::vector<std::vector<tree_node>> members, std::int64_t leaves)
      : comm_(&comm), members_(std::move(members)), leaves_(leaves) {
    std::vector<tree_node> all;
    for (const auto& nodes : members_) all.insert(all.end(), nodes.begin(), nodes.end());
    joined_ = joined_nodes(all, leaves);
  }

  explicit operator bool() const { return comm_ != nullptr; }
  int ranks() const { return comm_->size(); }
  /// The partial sums after the exchange.
  const std::vector<tree_node>& joined() const { return joined_; }

  /// An exchange in progress.
  template <class E, compute_device Device>
  struct in_flight {
    partial_sums<E, Device> own;
    std::vector<element_range> parts;
    buffer<Device> received;
    std::vector<request> moving;  ///< one for each round: the most partial sums of any rank
  };

  /// Starts to send each rank k of the group the elements parts[k] of all partial sums. `own` and its memory must stay
  /// valid until `finish`.
  template <class E, compute_device Device>
  in_flight<E, Device> start(Device& device, partial_sums<E, Device> own, std::vector<element_range> parts) const {
    check(own.nodes);
    in_flight<E, Device> moves{std::move(own), std::move(parts), {}, {}};
    const std::size_t n = members_.size(), self = static_cast<std::size_t>(comm_->rank());
    const auto mine = static_cast<std::size_t>(moves.parts[self].size());
    std::size_t rounds = 0, all = 0;
    for (const auto& nodes : members_) rounds = std::max(rounds, nodes.size()), all += nodes.size();
    all -= members_[self].size();
    moves.received = make_collective_buffer<E>(device, all * mine);
    E* next = moves.received.template data<E>();
    std::vector<std::size_t> send(n), send_at(n), receive(n), receive_at(n);
    for (std::size_t r = 0; r < rounds; ++r) {  // the r-th partial sum of each rank
      const bool sends = r < moves.own.values.size();
      std::size_t came = 0;
      for (std::size_t k = 0; k < n; ++k) {
        const auto part = static_cast<std::size_t>(moves.parts[k].size());
        send[k] = sends && k != self ? part : 0;
        send_at[k] = sends ? static_cast<std::size_t>(moves.parts[k].begin) : 0;
        receive[k] = r < members_[k].size() && k != self ? mine : 0;
        receive_at[k] = came;
        came += receive[k];
      }
      moves.moving.push_back(comm_->start_all_to_all_v(sends ? moves.own.values[r] : nullptr, send, send_at, next,
                                                       receive, receive_at, dtype_of<E>));
      next += came;
    }
    return moves;
  }
  /// Waits, and adds the received sums. Returns this rank's part of the sums `joined()`: in `into`, if there is one sum
  /// and `into` is not null. Otherwise they may be in the memory that was passed to `start`, which is not changed.
  template <class E, compute_device Device>
  partial_sums<E, Device> finish(Device& device, in_flight<E, Device>&& moves, E* into = nullptr) const {
    for (request& r : moves.moving) r.wait();
    const std::size_t self = static_cast<std::size_t>(comm_->rank());
    const std::int64_t mine = moves.parts[self].size();
    struct place {
      E* value = nullptr;
      bool received = false;  // whether this sum's memory may be overwritten; of two sums that join, at least one's may
    };
    struct addition {
      const E *x, *y;
      E* sum;
    };
    std::vector<addition> additions;
    leaf_tree<place> tree(leaves_);
    E* next = moves.received.template data<E>();
    for (std::size_t r = 0, left = 1; left != 0; ++r) {
      left = 0;
      for (std::size_t k = 0; k < members_.size(); ++k) {
        if (r >= members_[k].size()) continue;
        const place at = k == self ? place{moves.own.values[r] + moves.parts[self].begin, false} : place{next, true};
        tree.insert(members_[k][r], at, [&](place& x, const place& y) {
          const place sum = x.received ? x : y;
          additions.push_back({x.value, y.value, sum.value});
          x = sum;
        });
        if (k != self) next += mine;
        ++left;
      }
    }
    partial_sums<E, Device> all;
    for (const auto& e : tree.roots()) all.nodes.push_back(e.node), all.values.push_back(e.value.value);
    if (into && all.values.size() == 1) {
      if (!additions.empty())
        additions.back().sum = into;
      else
        device.copy(into, all.values[0], static_cast<std::size_t>(mine) * sizeof(E), device.main_stream());
      all.values[0] = into;
    }
    // On the host, block by block, so that nested sums stay in the cache.
    const std::int64_t block = std::is_same_v<Device, cpu> ? std::int64_t{4096} : std::max<std::int64_t>(mine, 1);
    for (std::int64_t at = 0; at < mine; at += block)
      for (const addition& a : additions) add(device, a.x + at, a.y + at, a.sum + at, std::min(block, mine - at));
    all.memory = std::move(moves.own.memory);
    all.memory.push_back(std::move(moves.received));
    return all;
  }
  template <class E, compute_device Device>
  partial_sums<E, Device> run(Device& device, partial_sums<E, Device> own, std::vector<element_range> parts,
                              E* into = nullptr) const {
    return finish(device, start(device, std::move(own), std::move(parts)), into);
  }

  /// Gives every rank all of the joined sums, in `into` as for `finish`. For a small array or two ranks, each rank adds
  /// everything. Otherwise each rank adds one part, and sends it to the others.
  template <class E, compute_device Device>
  partial_sums<E, Device> run_everywhere(Device& device, partial_sums<E, Device> own, std::int64_t elements,
                                         E* into = nullptr) const {
    constexpr std::int64_t small = 4096;
    const std::int64_t n = comm_->size();
    if (n <= 2 || elements <= small)
      return run(device, std::move(own), std::vector<element_range>(static_cast<std::size_t>(n), {0, elements}), into);
    const std::vector<element_range> parts = even_parts(elements, n);
    const element_range mine = parts[static_cast<std::size_t>(comm_->rank())];
    partial_sums<E, Device> all;
    all.nodes = joined_;
    for (std::size_t i = 0; i < joined_.size(); ++i) {
      if (!into || joined_.size() > 1)
        all.memory.push_back(make_collective_buffer<E>(device, static_cast<std::size_t>(elements)));
      all.values.push_back(all.memory.empty() ? into : all.memory.back().template data<E>());
    }
    const partial_sums<E, Device> part = run(device, std::move(own), parts, all.values[0] + mine.begin);
    for (std::size_t i = 0; i < all.values.size(); ++i) {
      E* const to = all.values[i] + mine.begin;
      if (part.values[i] != to)
        device.copy(to, part.values[i], static_cast<std::size_t>(mine.size()) * sizeof(E), device.main_stream());
      spread(all.values[i], parts);
    }
    return all;
  }

  /// Sends this rank's part of an array, which is already in place, to all ranks, and receives theirs.
  template <class E>
  void spread(E* whole, const std::vector<element_range>& parts) const {
    const std::size_t n = parts.size(), self = static_cast<std::size_t>(comm_->rank());
    std::vector<std::size_t> send(n, static_cast<std::size_t>(parts[self].size())), send_at(n, 0), receive(n),
        receive_at(n);
    for (std::size_t k = 0; k < n; ++k) {
      receive[k] = static_cast<std::size_t>(parts[k].size());
      receive_at[k] = static_cast<std::size_t>(parts[k].begin);
    }
    send[self] = receive[self] = 0;
    const E* const own = whole + parts[self].begin;
    comm_->all_to_all_v(own, send, send_at, whole, receive, receive_at, dtype_of<E>);
  }

 private:
  void check(const std::vector<tree_node>& own) const {
    if (own == members_[static_cast<std::size_t>(comm_->rank())]) return;
    fail({"a deterministic sum over ", leaves_, " leaves is incomplete on this rank: it has ", own.size(),
          " partial sums where its layout has ", members_[static_cast<std::size_t>(comm_->rank())].size(),
          "; some leaf of the step was not added"});
  }
  /// sum = x + y; sum may be x or y.
  template <class E, compute_device Device>
  static void add(Device& device, const E* x, const E* y, E* sum, std::int64_t n) {
    if (sum == x || sum == y)
      kernels::accumulate(device, sum == x ? y : x, sum, n);
    else
      kernels::add(device, x, y, sum, n);
  }

  any_communicator* comm_ = nullptr;
  std::vector<std::vector<tree_node>> members_;
  std::vector<tree_node> joined_;
  std::int64_t leaves_ = 1;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
