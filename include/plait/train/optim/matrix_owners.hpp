// Matrices that the ranks of a group store in parts, shared out among them: each has one owner, who is sent the parts,
// works on the whole and sends them back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "plait/comm/world.hpp"
#include "plait/device/buffer.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/balance_owners.hpp"
#include "plait/layout/local_box.hpp"

namespace plait {

/// A matrix that is stored in parts: how it lies, and what its owner's work on it costs, in any unit.
struct stored_matrix {
  layout stored;
  dim_sizes sizes;
  double cost = 0;
};

/// The owners of matrices that the same axes shard, and their exchange made ready for one rank. In each round every
/// rank has at most one matrix, so that no more memory is needed than for one: its dearest one in the first round.
class matrix_owners {
 public:
  /// A round as this rank sees it; counts and offsets are in elements.
  struct round {
    std::vector<int> matrices;  ///< by owner; -1 where it has none any more
    int own = -1;               ///< this rank's
    /// This rank's parts of the round's matrices, by owner, as they lie one after the other.
    std::vector<std::size_t> part_size, part_at;
    /// The parts that all ranks have of this rank's matrix.
    std::vector<std::size_t> piece_size, piece_at;

    std::size_t part_elements() const { return part_at.back() + part_size.back(); }
    std::size_t own_elements() const { return piece_at.back() + piece_size.back(); }
  };

  /// `axes`, in the mesh's order, are those of several ranks that shard every one of `matrices`. Every rank of the
  /// group gives the same ones in the same order.
  matrix_owners(world& w, const axis_list& axes, const std::vector<stored_matrix>& matrices);

  const std::vector<round>& rounds() const { return rounds_; }
  /// Whether the group is this rank alone, so that a part is a whole matrix and there is nothing to exchange.
  bool alone() const { return group_ == nullptr; }

  /// Returns this rank's matrix of a round, whole and row-major; empty if it has none. `parts` are this rank's parts of
  /// the round's matrices, in memory for collectives. Collective over the group, which must not be one rank alone.
  template <compute_device Device>
  buffer<Device> collect(Device& device, const round& r, const void* parts, dtype type) const {
    const std::size_t element = size_of(type);
    auto pieces = buffer<Device>::for_collectives(device, r.own_elements() * element);
    group_->all_to_all_v(parts, r.part_size, r.part_at, pieces.data(), r.piece_size, r.piece_at, type);
    if (r.own < 0) return {};
    buffer<Device> whole(device, r.own_elements() * element);
    for_each_piece(r, [&](const box& piece, const box& all, std::size_t at) {
      kernels::copy_box(device, static_cast<const char*>(pieces.data()) + at * element, piece, whole.data(), all, piece,
                        static_cast<std::int64_t>(element));
    });
    return whole;
  }
  /// The way back: sends the parts of `whole`, this rank's matrix of a round, to the ranks that store them, and writes
  /// `parts`. Collective over the group.
  template <compute_device Device>
  void spread(Device& device, const round& r, const void* whole, void* parts, dtype type) const {
    const std::size_t element = size_of(type);
    auto pieces = buffer<Device>::for_collectives(device, r.own_elements() * element);
    for_each_piece(r, [&](const box& piece, const box& all, std::size_t at) {
      kernels::copy_box(device, whole, all, static_cast<char*>(pieces.data()) + at * element, piece, piece,
                        static_cast<std::int64_t>(element));
    });
    group_->all_to_all_v(pieces.data(), r.piece_size, r.piece_at, parts, r.part_size, r.part_at, type);
  }

 private:
  std::size_t elements(int matrix, std::size_t member) const {
    return matrix < 0 ? 0 : static_cast<std::size_t>(parts_[static_cast<std::size_t>(matrix)][member].local_size());
  }
  /// Calls f(part, whole, offset) for the part that each rank has of this rank's matrix.
  template <class F>
  void for_each_piece(const round& r, F&& f) const {
    if (r.own < 0) return;
    const std::vector<box>& parts = parts_[static_cast<std::size_t>(r.own)];
    box whole = parts[0];
    whole.local = whole.global;
    whole.offset = {};
    for (std::size_t rank = 0; rank < parts.size(); ++rank) f(parts[rank], whole, r.piece_at[rank]);
  }

  any_communicator* group_ = nullptr;
  std::vector<std::vector<box>> parts_;  ///< of each matrix, what each rank of the group stores
  std::vector<round> rounds_;
};

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/train/optim/matrix_owners.ipp"  // IWYU pragma: keep
#endif
