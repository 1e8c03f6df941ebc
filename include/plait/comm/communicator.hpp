#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/comm/reduce.hpp"
#include "plait/comm/request.hpp"
#include "plait/core/dtype.hpp"
#include "plait/core/error.hpp"
#include "plait/core/wire.hpp"

namespace plait {

// One concept per collective, so that an algorithm asks for what it uses. Counts are elements of the dtype. Every rank
// of a group calls the collectives of one communicator in the same order with the same counts. Common to all models:
//
//   all_reduce(in, out, n, type, op)       out[i] = in_0[i] op ... op in_{p-1}[i], bit-identical on every rank; in ==
//   out allowed all_gather(in, out, n, type)           out[r * n + i] = in_r[i]; in may be its own place in out
//   reduce_scatter(in, out, n, type, op)   out[i] = reduction of in_k[rank * n + i]; out may be its own place in in
//   all_to_all(in, out, n, type)           out[k * n + i] = in_k[rank * n + i]
//   all_to_all_v(...)                      the same with a count and an offset per peer, in elements
//   broadcast(data, n, type, root)         data = data of root
//   send / receive(data, n, type, peer, tag)  matched by (sender, receiver, tag) in order; a send may wait for its
//                                          receive, so a ring of sends belongs in a comm_group
//   barrier()
//
// The maximum and the minimum of numbers of which one is a NaN is a NaN, whichever rank has it. (Not on NCCL, which
// gives that of the others: ask for the sum as well where a NaN must be seen there.)
//
// Any other overlap of in and out is refused. `start_x` is x without waiting; all ranks of a group use the same of the
// two. `split(color, key)` makes the subgroups:
// ranks of one color, ordered by key, then by rank; a negative color gives an empty communicator (false as a bool).
// `abort` ends every rank of the world with an error. A communicator is a cheap handle: copies share the sequence of
// operations; it belongs to the thread of its rank.

template <class C>
concept ranked = requires(const C& c) {
  { c.rank() } -> std::same_as<int>;
  { c.size() } -> std::same_as<int>;
};

template <class C>
concept all_reducer = requires(C& c, const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
  c.all_reduce(in, out, n, t, op);
  { c.start_all_reduce(in, out, n, t, op) } -> std::same_as<request>;
};

template <class C>
concept all_gatherer = requires(C& c, const void* in, void* out, std::size_t n, dtype t) {
  c.all_gather(in, out, n, t);
  { c.start_all_gather(in, out, n, t) } -> std::same_as<request>;
};

template <class C>
concept reduce_scatterer = requires(C& c, const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
  c.reduce_scatter(in, out, n, t, op);
  { c.start_reduce_scatter(in, out, n, t, op) } -> std::same_as<request>;
};

template <class C>
concept all_to_aller =
    requires(C& c, const void* in, void* out, std::size_t n, std::span<const std::size_t> s, dtype t) {
      c.all_to_all(in, out, n, t);
      c.all_to_all_v(in, s, s, out, s, s, t);
      { c.start_all_to_all(in, out, n, t) } -> std::same_as<request>;
      { c.start_all_to_all_v(in, s, s, out, s, s, t) } -> std::same_as<request>;
    };

template <class C>
concept broadcaster = requires(C& c, void* data, std::size_t n, dtype t) {
  c.broadcast(data, n, t, 0);
  { c.start_broadcast(data, n, t, 0) } -> std::same_as<request>;
};

template <class C>
concept point_to_point = requires(C& c, const void* in, void* out, std::size_t n, dtype t) {
  c.send(in, n, t, 0);
  c.send(in, n, t, 0, 1);
  c.receive(out, n, t, 0);
  c.receive(out, n, t, 0, 1);
  { c.start_send(in, n, t, 0, 1) } -> std::same_as<request>;
  { c.start_receive(out, n, t, 0, 1) } -> std::same_as<request>;
};

template <class C>
concept barrier_capable = requires(C& c) { c.barrier(); };

template <class C>
concept splittable = requires(C& c, std::string_view label) {
  { c.split(0, 0) } -> std::same_as<C>;
  { c.split(0, 0, label) } -> std::same_as<C>;
};

template <class C>
concept abortable = requires(C& c, const std::string& why) {
  { c.abort(why) } noexcept;
};

/// Everything that the rest of plait needs of a backend.
template <class C>
concept communicator =
    std::copyable<C> && std::default_initializable<C> && std::constructible_from<bool, const C&> && ranked<C> &&
    all_reducer<C> && all_gatherer<C> && reduce_scatterer<C> && all_to_aller<C> && broadcaster<C> &&
    point_to_point<C> && barrier_capable<C> && splittable<C> && abortable<C> && requires(const C& c) {
      { c.label() } -> std::convertible_to<std::string>;
    };

/// Sends and receives that progress together, whatever their order: nothing waits before the end of the group, so
/// rings and exchanges cannot block each other.
///
///     comm_group ring(comm);
///     ring.send(out, n, dtype::f32, next);
///     ring.receive(in, n, dtype::f32, previous);
///     ring.end();
///
/// The destructor ends the group too, but cannot throw: then the next operation reports the error. A model with
/// `begin_group()` and `end_group()` has them called around the starts.
template <class C>
  requires point_to_point<C>
class comm_group {
 public:
  explicit comm_group(C& comm) : comm_(comm), open_(true) {
    if constexpr (hooked) comm_.begin_group();
  }
  comm_group(const comm_group&) = delete;
  comm_group& operator=(const comm_group&) = delete;
  ~comm_group() {
    try {
      end();
    } catch (...) {
      requests_.clear();
    }
  }

  void send(const void* data, std::size_t count, dtype type, int peer, int tag = 0) {
    requests_.push_back(comm_.start_send(data, count, type, peer, tag));
  }
  void receive(void* data, std::size_t count, dtype type, int peer, int tag = 0) {
    requests_.push_back(comm_.start_receive(data, count, type, peer, tag));
  }

  /// Waits for all of them.
  void end() {
    if (std::exchange(open_, false)) {
      if constexpr (hooked) comm_.end_group();
    }
    for (request& r : requests_) r.wait();
    requests_.clear();
  }

 private:
  static constexpr bool hooked = requires(C& c) {
    c.begin_group();
    c.end_group();
  };
  C& comm_;
  bool open_;
  std::vector<request> requests_;
};

namespace detail {

// Checks of arguments that all backends share; `what` names the operation in the text.

inline void check_reducible(const char* what, dtype type) {
  if (!reducible(type)) {
    fail({what, ": dtype is ", name_of(type), "; reductions exist for float, double, bf16, int32, int64"});
  }
}

inline void check_peer(const char* what, const char* role, int peer, int size) {
  if (peer < 0 || peer >= size) {
    fail({what, ": ", role, " is ", peer, "; the group has ranks 0 to ", size - 1});
  }
}

inline void check_pointer(const char* what, const void* data, std::size_t bytes) {
  if (data == nullptr && bytes != 0) fail({what, ": a null pointer for ", bytes, " bytes"});
}

/// in and out must not overlap, except that the smaller may be exactly at `place` bytes into the larger.
inline void check_buffers(const char* what, const void* in, std::size_t in_bytes, const void* out,
                          std::size_t out_bytes, std::size_t place, bool may_alias = true) {
  check_pointer(what, in, in_bytes);
  check_pointer(what, out, out_bytes);
  if (in_bytes == 0 || out_bytes == 0) return;
  const auto a = reinterpret_cast<std::uintptr_t>(in), b = reinterpret_cast<std::uintptr_t>(out);
  if (a + in_bytes <= b || b + out_bytes <= a) return;
  if (may_alias && (in_bytes <= out_bytes ? a == b + place : b == a + place)) return;
  fail({what, ": in and out overlap",
        may_alias ? " and are not in place (the smaller buffer at its rank's own place in the larger)" : "",
        "; use separate buffers"});
}

inline void check_counts(const char* what, int size, std::span<const std::size_t> a, std::span<const std::size_t> b,
                         std::span<const std::size_t> c, std::span<const std::size_t> d) {
  const auto n = static_cast<std::size_t>(size);
  if (a.size() != n || b.size() != n || c.size() != n || d.size() != n) {
    fail({what, ": counts and offsets need one entry for each of the ", size, " ranks of the group"});
  }
}

}  // namespace detail
}  // namespace plait
