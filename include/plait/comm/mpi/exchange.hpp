// The inner part of comm/mpi.hpp that posts messages, and large collectives as messages: reductions, added in the order
// of the ranks, and gathers, in pieces that follow each other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "plait/comm/call.hpp"
#include "plait/comm/mpi/calls.hpp"
#include "plait/comm/mpi/pending.hpp"
#include "plait/comm/reduce.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"

namespace plait::mpi::detail {

inline std::byte* at(void* p, std::size_t bytes) { return static_cast<std::byte*>(p) + bytes; }
inline const std::byte* at(const void* p, std::size_t bytes) { return static_cast<const std::byte*>(p) + bytes; }

/// Calls f(first element, count) for pieces of at most `most` of n elements.
template <class F>
void in_pieces(std::size_t n, std::size_t most, const F& f) {
  for (std::size_t first = 0; first < n; first += most) f(first, static_cast<int>(std::min(most, n - first)));
}

// An empty message is sent too: it is a message. One of more than `most` elements goes as several of its tag.
inline void add_send(pending& p, const void* data, std::size_t n, dtype t, int peer, int tag, std::size_t most) {
  const auto call = [&](std::size_t first, int count) {
    check(MPI_Isend(at(data, first * size_of(t)), count, type_of(t), peer, tag, p.home->comm, p.next()), "MPI_Isend");
  };
  n == 0 ? call(0, 0) : in_pieces(n, most, call);
}
inline void add_receive(pending& p, void* data, std::size_t n, dtype t, int peer, int tag, std::size_t most) {
  const auto call = [&](std::size_t first, int count) {
    p.expected.push_back(count);
    check(MPI_Irecv(at(data, first * size_of(t)), count, type_of(t), peer, tag, p.home->comm, p.next()), "MPI_Irecv");
  };
  p.type = type_of(t);
  n == 0 ? call(0, 0) : in_pieces(n, most, call);
}

/// The most elements in a message of a large collective, in which n go between this rank and rank k. Over a slow link
/// 60 KiB, which Open MPI over TCP sends without asking the receiver first (up to 64 KiB with a header): of a longer
/// message the question and the answer follow all that was sent before. Then all messages under way share the
/// connection, so that the first ends with the last, in whatever order they are waited for. Not more than 2048
/// messages. Elsewhere pieces cost the processor more time than they save.
inline std::size_t piece_of(const state& s, std::size_t k, std::size_t n, dtype t) {
  if (s.piece == 0 && !s.slow[k]) return s.limit;
  const std::size_t bytes = s.piece > 0 ? s.piece : std::max<std::size_t>(60 << 10, n * size_of(t) / 2048);
  return std::clamp<std::size_t>(bytes / size_of(t), 1, s.limit);
}

/// Each rank receives from every other and sends to it, each beginning with another one: receive(pending, rank, i), i
/// counting from 0, and send(pending, rank).
template <class Receive, class Send>
void exchange(pending& p, const Receive& receive, const Send& send) {
  const auto n = static_cast<std::size_t>(p.home->size), own = static_cast<std::size_t>(p.home->rank);
  for (std::size_t step = 1; step < n; ++step) receive(p, (own + step) % n, step - 1);
  for (std::size_t step = 1; step < n; ++step) send(p, (own + step) % n);
}

/// Posts a gather of `c.count` elements from each rank.
inline void post_gather(pending& p, const call& c, int tag) {
  const std::size_t bytes = c.count * size_of(c.type);
  const auto most = [&](std::size_t k) { return piece_of(*p.home, k, c.count, c.type); };
  std::byte* const own = at(c.out, bytes * static_cast<std::size_t>(p.home->rank));
  if (c.in != own) std::memcpy(own, c.in, bytes);
  exchange(
      p,
      [&](pending& q, std::size_t k, std::size_t) {
        add_receive(q, at(c.out, k * bytes), c.count, c.type, static_cast<int>(k), tag, most(k));
      },
      [&](pending& q, std::size_t k) { add_send(q, c.in, c.count, c.type, static_cast<int>(k), tag, most(k)); });
}

/// Adds up `count` elements of this rank's and what the others have sent to the buffer, in the order of the ranks;
/// `own` may be `out`. The buffer is free then.
inline void add_up(pending& p, const call& c, const std::byte* own, std::size_t count, std::byte* out) {
  const std::size_t n = static_cast<std::size_t>(p.home->size), self = static_cast<std::size_t>(p.home->rank),
                    size = size_of(c.type);
  plait::detail::with_reduction(c.op, c.type, [&]<reduce_op Op, class T>() {
    plait::detail::reduce_range<Op, T>(
        static_cast<int>(n),
        [&](int k) {
          const std::size_t rank = static_cast<std::size_t>(k);
          return rank == self ? own : p.buffer.data() + (rank + n - self - 1) % n * count * size;
        },
        0, count,
        [&](std::size_t first, const T* block, std::size_t some) {
          std::memcpy(out + first * size, block, some * size);
        });
  });
  p.buffer = {};
}

/// Posts a reduce-scatter of slices of `per` of `total` elements: each rank sends the others their slices, and adds up
/// its own in the order of the ranks. For an all-reduce, it then sends its sum to the others, by the tag after `tag`,
/// for a rank may begin that after it has started other reductions.
inline void post_reduction(pending& p, const call& c, std::size_t per, std::size_t total, int tag) {
  const std::size_t size = size_of(c.type), n = static_cast<std::size_t>(p.home->size),
                    own = static_cast<std::size_t>(p.home->rank);
  std::vector<std::size_t> most(n);  // for the second half too, whatever is set meanwhile
  for (std::size_t k = 0; k < n; ++k) most[k] = piece_of(*p.home, k, per, c.type);
  const bool for_all = c.kind == collective::all_reduce;
  const auto begin = [=](std::size_t k) { return std::min(k * per, total); };
  const auto length = [=](std::size_t k) { return begin(k + 1) - begin(k); };
  const std::size_t bytes = length(own) * size;
  p.buffer.resize(bytes * (n - 1));
  exchange(
      p,
      [&](pending& q, std::size_t k, std::size_t i) {
        add_receive(q, q.buffer.data() + i * bytes, length(own), c.type, static_cast<int>(k), tag, most[k]);
      },
      [&](pending& q, std::size_t k) {
        add_send(q, at(c.in, begin(k) * size), length(k), c.type, static_cast<int>(k), tag, most[k]);
      });
  p.then = [=](pending& q) {
    std::byte* const out = for_all ? at(c.out, begin(own) * size) : static_cast<std::byte*>(c.out);
    add_up(q, c, at(c.in, begin(own) * size), length(own), out);
    if (!for_all) return;
    exchange(
        q,
        [&](pending& r, std::size_t k, std::size_t) {
          add_receive(r, at(c.out, begin(k) * size), length(k), c.type, static_cast<int>(k), tag + 1, most[k]);
        },
        [&](pending& r, std::size_t k) {
          add_send(r, out, length(own), c.type, static_cast<int>(k), tag + 1, most[k]);
        });
  };
}

/// Returns whether small all-reduces that are started go as messages too: among few ranks, some of which are reached
/// over a slow link; the same on all of them, since each has ranks of another host then. A library reduces them to one
/// rank, whose answer follows all that was started there meanwhile: the norm of a step after the gathers of its
/// update.
inline bool reduces_small(const state& s) {
  constexpr int few = 16;
  if (s.size == 1 || s.size > few) return false;
  return s.piece > 0 || std::find(s.slow.begin(), s.slow.end(), 1) != s.slow.end();
}
/// Posts an all-reduce of few elements: each rank sends all of its own to every other, and adds up all of them.
inline void post_small_reduction(pending& p, const call& c, int tag) {
  const std::size_t bytes = c.count * size_of(c.type);
  p.buffer.resize(bytes * static_cast<std::size_t>(p.home->size - 1));
  exchange(
      p,
      [&](pending& q, std::size_t k, std::size_t i) {
        add_receive(q, q.buffer.data() + i * bytes, c.count, c.type, static_cast<int>(k), tag, q.home->limit);
      },
      [&](pending& q, std::size_t k) { add_send(q, c.in, c.count, c.type, static_cast<int>(k), tag, q.home->limit); });
  p.then = [c](pending& q) { add_up(q, c, at(c.in, 0), c.count, at(c.out, 0)); };
}

}  // namespace plait::mpi::detail

#include "plait/core/macros_on.hpp"
