// One operation of a communicator as a value, with the bytes that it counts for and the checks that all backends share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "plait/core/collective.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"

namespace plait {

/// One operation of a communicator as a value: what a rank asks for, how it is counted and recorded, and what a backend
/// is given. Counts are elements of the dtype. communicator.hpp says what each kind does; a member that a kind does not
/// name is not read.
struct call {
  using counts = std::span<const std::size_t>;

  collective kind = collective::barrier;
  const void* in = nullptr;  ///< what this rank hands in: all kinds but receive
  void* out = nullptr;       ///< what it gets: all kinds but send; the same as `in` for a broadcast
  std::size_t count = 0;     ///< of a rank's part (all_gather, reduce_scatter), of a pair's (all_to_all), else of all
  dtype type = dtype::u8;
  reduce_op op = reduce_op::sum;
  int peer = 0;         ///< the root of a broadcast, the other rank of a message
  int tag = 0;          ///< of a message
  bool ragged = false;  ///< all_to_all with a count and an offset for each peer, in place of `count`
  counts send_counts{}, send_offsets{}, receive_counts{}, receive_offsets{};

  constexpr const char* name() const { return ragged ? "all_to_all_v" : name_of(kind); }

  /// Returns the bytes that a rank of a group of `ranks` hands in, as in wire_bytes.
  constexpr std::uint64_t payload(int ranks) const {
    if (ragged) return sum(send_counts) * size_of(type);
    const bool for_each = kind == collective::reduce_scatter || kind == collective::all_to_all;
    return count * size_of(type) * (for_each ? static_cast<std::uint64_t>(ranks) : 1);
  }

  /// Returns the bytes on the wire, as wire_bytes counts them; see `ledger` for ragged ones.
  constexpr std::uint64_t wire(int rank, int ranks) const {
    if (!ragged) return wire_bytes(kind, ranks, payload(ranks));
    const std::size_t own = static_cast<std::size_t>(rank);
    const std::size_t kept = own < send_counts.size() ? send_counts[own] : 0;
    return (sum(send_counts) - kept) * size_of(type) * static_cast<std::uint64_t>(ranks);
  }

  static constexpr std::size_t sum(counts c) {
    std::size_t total = 0;
    for (const std::size_t n : c) total += n;
    return total;
  }
};

/// Whether reductions of this element type exist (bytes can be moved, not added).
constexpr bool reducible(dtype type) { return type != dtype::u8; }

namespace detail {

void check_peer(const char* what, const char* role, int peer, int size);

void check_pointer(const char* what, const void* data, std::size_t bytes);

/// in and out must not overlap, except that the smaller may be exactly at `place` bytes into the larger.
void check_buffers(const char* what, const void* in, std::size_t in_bytes, const void* out, std::size_t out_bytes,
                   std::size_t place, bool may_alias);

/// Of a ragged all_to_all: what is received goes where nothing else is received and nothing is sent from.
void check_parts(const call& c);

}  // namespace detail

/// Throws unless `rank` of a group of `ranks` may make this call: the checks that all backends share.
void check(const call& c, int rank, int ranks);

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/comm/call.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
