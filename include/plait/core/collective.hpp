// The kinds of collectives and messages, and the bytes that each puts on the wire.
#pragma once

#include <cstdint>

#include "plait/core/macros_off.hpp"

namespace plait {

/// The kinds of communication that are counted, predicted and recorded.
enum class collective : std::uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  broadcast,
  send,
  receive,
  barrier
};

inline constexpr int collective_kinds = 8;

enum class reduce_op : std::uint8_t { sum, max, min };

constexpr const char* name_of(collective kind) {
  constexpr const char* names[] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                                   "broadcast",  "send",       "receive",        "barrier"};
  return names[static_cast<std::size_t>(kind)];
}

/// The name of a collective whose parts have unequal sizes.
constexpr const char* ragged_name_of(collective kind) {
  return kind == collective::all_gather       ? "all_gather_v"
         : kind == collective::reduce_scatter ? "reduce_scatter_v"
                                              : "all_to_all_v";
}

constexpr const char* name_of(reduce_op op) {
  constexpr const char* names[] = {"sum", "max", "min"};
  return names[static_cast<std::size_t>(op)];
}

/// Returns the bytes on the wire of a ring-optimal algorithm, summed over the n ranks of the group. The sum over the
/// group is an exact integer; one rank's share of an all-reduce, 2 (n-1)/n B, is not.
///
/// `bytes` is the size of one rank's input: its contribution to an all-gather, its whole input of a reduce-scatter,
/// all-reduce or all-to-all, the message of a broadcast or a send. The bytes of a message are counted at the sender.
constexpr std::uint64_t wire_bytes(collective kind, int ranks, std::uint64_t bytes) {
  const auto n = static_cast<std::uint64_t>(ranks < 1 ? 1 : ranks);
  switch (kind) {
    case collective::all_gather:
      return n * (n - 1) * bytes;
    case collective::all_reduce:
      return 2 * (n - 1) * bytes;
    case collective::reduce_scatter:
    case collective::all_to_all:
    case collective::broadcast:
      return (n - 1) * bytes;
    case collective::send:
      return bytes;
    case collective::receive:
    case collective::barrier:
      return 0;
  }
  return 0;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
