// The MPI backend: the communicator, the start and end of MPI, and a main function for one process per rank. Buffers
// are in host memory. For GPUs, MPI only starts NCCL (comm/launch/nccl_mpi.hpp).
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/communicator.hpp"
#include "plait/comm/deadline.hpp"
#include "plait/comm/mpi/calls.hpp"
#include "plait/comm/mpi/pending.hpp"
#include "plait/comm/reduce.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"

namespace plait::mpi::detail {

// Messages, and large collectives made of messages: reductions, which add in the order of the ranks, and gathers.

inline std::byte* at(void* p, std::size_t bytes) { return static_cast<std::byte*>(p) + bytes; }
inline const std::byte* at(const void* p, std::size_t bytes) { return static_cast<const std::byte*>(p) + bytes; }

/// Calls f(first element, count) for pieces of at most `most` of n elements.
template <class F>
void in_pieces(std::size_t n, std::size_t most, const F& f) {
  for (std::size_t first = 0; first < n; first += most) f(first, static_cast<int>(std::min(most, n - first)));
}

// Empty messages are sent too, because the receiver waits for them. More than `most` elements go as several messages of
// one tag.
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

/// The most elements per message of a large collective that moves n elements between this rank and rank k. Over a slow
/// link it is 60 KiB: Open MPI over TCP sends up to 64 KiB with the header without asking the receiver first. For a
/// longer message, the request and the reply would queue behind all earlier data. All messages in flight would then
/// share the connection, and the first would end as late as the last. There are at most 2048 messages. Over fast links
/// pieces cost more processor time than they save.
inline std::size_t piece_of(const state& s, std::size_t k, std::size_t n, dtype t) {
  if (s.piece == 0 && !s.slow[k]) return s.limit;
  const std::size_t bytes = s.piece > 0 ? s.piece : std::max<std::size_t>(60 << 10, n * size_of(t) / 2048);
  return std::clamp<std::size_t>(bytes / size_of(t), 1, s.limit);
}

/// Each rank receives from every other rank and sends to it, in an order that starts after its own rank. Calls
/// receive(pending, rank, i), with i counting from 0, and send(pending, rank).
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

/// Adds `count` elements of this rank and those received in the buffer, in the order of the ranks. `own` may be `out`.
/// Frees the buffer.
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

/// Posts a reduce-scatter of slices of `per` of `total` elements, or of a ragged call's slices, of at most `per`. Each
/// rank sends the others their slices, and adds its own in the order of the ranks. For an all-reduce it then sends its
/// sum to the others. These messages have tag + 1, because a rank may send them after it has started other reductions.
/// If `per` is 0, each rank sends all of its elements to all ranks, and each adds all.
inline void post_reduction(pending& p, const call& c, std::size_t per, std::size_t total, int tag) {
  const std::size_t size = size_of(c.type), n = static_cast<std::size_t>(p.home->size),
                    own = static_cast<std::size_t>(p.home->rank);
  std::vector<std::size_t> most(n);  // kept for the second exchange, even if the limit changes
  for (std::size_t k = 0; k < n; ++k) most[k] = piece_of(*p.home, k, per == 0 ? total : per, c.type);
  const bool for_all = c.kind == collective::all_reduce;
  const auto begin = [=](std::size_t k) { return std::min(k * per, total); };
  const auto length = [=](std::size_t k) { return per == 0 ? total : begin(k + 1) - begin(k); };
  const std::size_t own_begin = c.ragged ? c.send_offsets[own] : begin(own);
  const std::size_t own_length = c.ragged ? c.send_counts[own] : length(own);
  const std::size_t bytes = own_length * size;
  p.buffer.resize(bytes * (n - 1));
  exchange(
      p,
      [&](pending& q, std::size_t k, std::size_t i) {
        add_receive(q, q.buffer.data() + i * bytes, own_length, c.type, static_cast<int>(k), tag, most[k]);
      },
      [&](pending& q, std::size_t k) {
        const std::size_t first = c.ragged ? c.send_offsets[k] : begin(k);
        const std::size_t count = c.ragged ? c.send_counts[k] : length(k);
        add_send(q, at(c.in, first * size), count, c.type, static_cast<int>(k), tag, most[k]);
      });
  p.then = [=](pending& q) {
    std::byte* const out = for_all ? at(c.out, own_begin * size) : static_cast<std::byte*>(c.out);
    add_up(q, c, at(c.in, own_begin * size), own_length, out);
    if (!for_all || per == 0) return;
    exchange(
        q,
        [&](pending& r, std::size_t k, std::size_t) {
          add_receive(r, at(c.out, begin(k) * size), length(k), c.type, static_cast<int>(k), tag + 1, most[k]);
        },
        [&](pending& r, std::size_t k) {
          add_send(r, out, own_length, c.type, static_cast<int>(k), tag + 1, most[k]);
        });
  };
}

/// Returns whether small asynchronous all-reduces also go as messages: in groups of few ranks with slow links. All
/// ranks of the group find the same answer, because then each has a rank on another host. MPI libraries reduce to one
/// rank, whose reply queues behind all that it started meanwhile: a step's norm behind the gathers of its update.
inline bool reduces_small(const state& s) {
  constexpr int few = 16;
  if (s.size == 1 || s.size > few) return false;
  return s.piece > 0 || std::find(s.slow.begin(), s.slow.end(), 1) != s.slow.end();
}

}  // namespace plait::mpi::detail

namespace plait::mpi {

/// Initialises MPI if necessary, and then also finalises it. Requests MPI_THREAD_MULTIPLE.
class environment {
 public:
  explicit environment(int* argc = nullptr, char*** argv = nullptr) {
    int running = 0;
    detail::check(MPI_Initialized(&running), "MPI_Initialized");
    if (running) return;
    int provided = 0;
    detail::check(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    owner_ = true;
  }
  environment(const environment&) = delete;
  environment& operator=(const environment&) = delete;
  ~environment() {
    if (!owner_) return;
    if (std::uncaught_exceptions() > 0) detail::end_all("an exception left the MPI environment");  // others would hang
    MPI_Finalize();
  }

 private:
  bool owner_ = false;
};

/// A rank's handle of an MPI communicator; communicator.hpp documents the operations. Every MPI call is checked. A wait
/// longer than the deadline ends all ranks, with a text that names the operation and the missing ranks. The MPI library
/// chooses the order of a reduction. Exceptions are asynchronous reductions that are large, or of few ranks over slow
/// links: they go as messages, and add in the order of the ranks. Large gathers go as messages too. A thread of this
/// class advances the large ones. For one collective, all ranks call `run` or all call `start`, because MPI does not
/// match the two.
class communicator : public verbs<communicator> {
  using pending = detail::pending;
  using operation = detail::operation;

 public:
  communicator() = default;

  /// Returns a communicator of all processes. It is a duplicate, so it does not interfere with other users of
  /// MPI_COMM_WORLD.
  static communicator world() {
    MPI_Comm copy = MPI_COMM_NULL;
    detail::check(MPI_Comm_dup(MPI_COMM_WORLD, &copy), "MPI_Comm_dup");
    return communicator(copy, true, "world");
  }
  /// Uses a caller's communicator, which must outlive this object and its copies. Meanwhile it must not be used for
  /// other things or attached again. It is not freed here, and gets its error handler back at the end. Collective over
  /// it, as `world` is over all ranks: with several hosts, their links are measured. Throws on MPI_COMM_NULL.
  static communicator attach(MPI_Comm comm, std::string_view label = "attached") {
    if (comm == MPI_COMM_NULL)
      fail({"attach: the MPI_Comm of '", label, "' is MPI_COMM_NULL; give one that this process is in, such as a ",
            "duplicate of MPI_COMM_WORLD"});
    return communicator(comm, false, label);
  }

  explicit operator bool() const { return state_ != nullptr; }
  int rank() const { return self().rank; }
  int size() const { return self().size; }
  const std::string& label() const { return self().label; }
  bool unequal_parts(std::size_t) const { return true; }
  MPI_Comm get() const { return self().comm; }

  /// Sets the seconds until an unfinished operation ends all ranks; 0: no limit. Splits inherit it.
  void set_deadline(double seconds) { self().deadline = seconds; }
  /// Sets the most elements of one MPI call (default INT_MAX); larger counts are split, or use a derived type. It must
  /// be equal on all ranks. Splits inherit it.
  void set_limit(std::size_t elements) { self().limit = std::clamp<std::size_t>(elements, 1, INT_MAX); }
  /// Sets the most bytes of one message of a large asynchronous collective. 0, the default: 60 KiB over links between
  /// hosts below 3 Gbit/s, as `world` and `attach` measure them, and no limit elsewhere (`piece_of`). It must be equal
  /// on all ranks. Splits inherit it.
  void set_piece(std::size_t bytes) { self().piece = bytes; }
  const flight_recorder& flight() const { return *self().flight; }

  void run(const call& c) { operation(post(true, c), false).wait(); }
  [[nodiscard]] request start(const call& c) {
    pending p = post(false, c);
    const bool moved = p.bytes >= large && self().size > 1;
    return request(std::make_shared<operation>(std::move(p), moved));
  }

  communicator split(int color, int key, std::string_view label = {}) {
    MPI_Comm child = MPI_COMM_NULL;
    detail::check(MPI_Comm_split(self().comm, color < 0 ? MPI_UNDEFINED : color, key, &child), "MPI_Comm_split");
    if (child == MPI_COMM_NULL) return {};
    communicator out(child, true, label.empty() ? cat({self().label, ".", color}) : std::string(label), state_.get());
    out.set_deadline(self().deadline);
    out.set_limit(self().limit);
    out.set_piece(self().piece);
    return out;
  }

  void abort(const std::string& why) noexcept { detail::end_all("called abort: " + why); }

 private:
  static constexpr int reserved_tag = 32767;  // the largest that every MPI library offers; for ragged calls
  static constexpr int exchange_tag = 1 << 15, exchange_tags = 1 << 19;  // of collectives as messages
  static constexpr std::size_t large = 1 << 15;  // a thread advances asynchronous operations from this many bytes on

  communicator(MPI_Comm comm, bool owned, std::string_view label, const detail::state* parent = nullptr)
      : state_(std::make_shared<detail::state>()) {
    state_->comm = comm;
    state_->owned = owned;
    state_->label = label;
    state_->ops = parent ? parent->ops : std::make_shared<detail::operations>();
    state_->flight = parent ? parent->flight : std::make_shared<flight_recorder>();
    state_->most_tag = detail::most_tag();
    state_->dog = parent ? parent->dog : std::make_shared<detail::watchdog>();
    state_->progress = parent ? parent->progress : std::make_shared<detail::progress_thread>();
    state_->called.set_label(label);
    if (!owned) state_->mark();
    if (!owned) detail::check(MPI_Comm_get_errhandler(comm, &state_->callers), "MPI_Comm_get_errhandler");
    detail::check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    detail::check(MPI_Comm_rank(comm, &state_->rank), "MPI_Comm_rank");
    detail::check(MPI_Comm_size(comm, &state_->size), "MPI_Comm_size");
    state_->relatives = parent ? parent->relatives : std::make_shared<detail::family>(comm, state_->rank, state_->size);
    state_->relatives->calls.push_back(&state_->called);
    state_->slow = parent ? detail::ranks_over_slow_link(comm, state_->size, parent->comm, parent->slow)
                          : detail::ranks_over_slow_link(comm, state_->rank, state_->size);
  }

  detail::state& self() const { return plait::detail::held_by(state_); }

  pending begin(const char* name, std::size_t bytes) {
    pending p;
    detail::state& s = self();
    if (!s.dropped.empty()) fail({std::exchange(s.dropped, {}), " (its request was dropped)"});
    p.home = state_;
    p.name = name;
    p.bytes = bytes;
    p.sequence = s.sequence++;
    p.ticket = s.flight->start(s.label, p.sequence, name, bytes);
    return p;
  }

  std::size_t ranks() const { return static_cast<std::size_t>(self().size); }

  /// Issues the MPI calls of an operation. Messages and ragged exchanges use the same calls for both values of
  /// `blocking`.
  pending post(bool blocking, const call& c) {
    const detail::state& s = self();
    check(c, s.rank, s.size);
    const bool message = c.kind == collective::send || c.kind == collective::receive;
    if (message && (c.tag < 0 || c.tag >= reserved_tag))
      fail({c.name(), ": tag is ", c.tag, "; MPI takes 0 to ", reserved_tag - 1});
    pending p = begin(c.name(), c.payload(s.size));
    if (message)
      p.peer = c.peer;
    else
      p.before = self().called.collectives++;
    switch (c.kind) {
      case collective::all_reduce:
        if (!blocking && by_messages(c))
          detail::post_reduction(p, c, (c.count + ranks() - 1) / ranks(), c.count, exchange_tags_of());
        else if (!blocking && has_exchange_tags() && detail::reduces_small(s))
          detail::post_reduction(p, c, 0, c.count, exchange_tags_of());
        else
          post_all_reduce(p, blocking, c);
        break;
      case collective::all_gather:
        if (c.ragged)
          post_all_to_all_v(p, c);
        else if (!blocking && by_messages(c))
          detail::post_gather(p, c, exchange_tags_of());
        else
          post_all_gather(p, blocking, c);
        break;
      case collective::reduce_scatter:
        if (c.ragged)
          detail::post_reduction(p, c, *std::max_element(c.send_counts.begin(), c.send_counts.end()),
                                 call::sum(c.send_counts), reserved_tag);
        else if (!blocking && by_messages(c))
          detail::post_reduction(p, c, c.count, c.count * ranks(), exchange_tags_of());
        else
          post_reduce_scatter(p, blocking, c);
        break;
      case collective::all_to_all:
        c.ragged ? post_all_to_all_v(p, c) : post_all_to_all(p, blocking, c);
        break;
      case collective::broadcast:
        post_broadcast(p, blocking, c);
        break;
      case collective::send:
        detail::add_send(p, c.in, c.count, c.type, c.peer, c.tag, self().limit);
        break;
      case collective::receive:
        detail::add_receive(p, c.out, c.count, c.type, c.peer, c.tag, self().limit);
        break;
      case collective::barrier:
        detail::issue(p, blocking, "MPI_Barrier", MPI_Barrier, MPI_Ibarrier, s.comm);
        break;
    }
    return p;
  }

  void post_all_reduce(pending& p, bool blocking, const call& c) const {
    const detail::state& s = self();
    const std::size_t size = size_of(c.type);
    detail::in_pieces(c.count, self().limit, [&](std::size_t first, int count) {
      const void* from = c.in == c.out ? MPI_IN_PLACE : detail::at(c.in, first * size);
      detail::issue(p, blocking, "MPI_Allreduce", MPI_Allreduce, MPI_Iallreduce, from,
                    static_cast<void*>(detail::at(c.out, first * size)), count, detail::type_of(c.type),
                    s.ops->of(c.op, c.type), s.comm);
    });
  }

  /// Moves `c.count` elements to or from each rank in one call. If an int cannot hold the count, one element of a
  /// derived type holds them all.
  template <class Issue>
  void by_rank(const call& c, const Issue& issue) const {
    if (c.count * ranks() > self().limit)
      issue(1, detail::big_type(c.count, c.type, self().limit).get());
    else
      issue(static_cast<int>(c.count), detail::type_of(c.type));
  }

  void post_all_gather(pending& p, bool blocking, const call& c) const {
    const detail::state& s = self();
    const std::size_t bytes = c.count * size_of(c.type), place = bytes * static_cast<std::size_t>(s.rank);
    const void* from = bytes != 0 && c.in == detail::at(c.out, place) ? MPI_IN_PLACE : c.in;
    by_rank(c, [&](int count, MPI_Datatype type) {
      detail::issue(p, blocking, "MPI_Allgather", MPI_Allgather, MPI_Iallgather, from, count, type, c.out, count, type,
                    s.comm);
    });
  }

  void post_reduce_scatter(pending& p, bool blocking, const call& c) const {
    const detail::state& s = self();
    const std::size_t n = c.count, size = size_of(c.type), bytes = n * size;
    void* to = c.out;
    if (bytes != 0 && c.out == detail::at(c.in, bytes * static_cast<std::size_t>(s.rank))) {
      p.buffer.resize(bytes);  // MPI has no in-place form: reduce into a buffer, copy when complete
      p.copy_to = c.out;
      to = p.buffer.data();
    }
    const MPI_Op op = s.ops->of(c.op, c.type);
    if (n * ranks() <= s.limit) {
      detail::issue(p, blocking, "MPI_Reduce_scatter_block", MPI_Reduce_scatter_block, MPI_Ireduce_scatter_block, c.in,
                    to, static_cast<int>(n), detail::type_of(c.type), op, s.comm);
      return;
    }
    for (int root = 0; root < s.size; ++root) {
      detail::in_pieces(n, self().limit, [&](std::size_t first, int count) {
        const std::size_t shift = (static_cast<std::size_t>(root) * n + first) * size;
        void* const result = root == s.rank ? detail::at(to, first * size) : nullptr;
        detail::issue(p, blocking, "MPI_Reduce", MPI_Reduce, MPI_Ireduce,
                      static_cast<const void*>(detail::at(c.in, shift)), result, count, detail::type_of(c.type), op,
                      root, s.comm);
      });
    }
  }

  /// Whether an asynchronous collective goes as messages. For a reduction, MPI libraries reduce to one rank and send
  /// from there, which takes at least twice the time. They complete large gathers that run concurrently together.
  bool by_messages(const call& c) const { return c.payload(size()) >= large && size() > 1 && has_exchange_tags(); }
  bool has_exchange_tags() const { return self().most_tag >= exchange_tag + exchange_tags; }

  /// Returns the tag of the next collective as messages; it also uses the following tag.
  int exchange_tags_of() const { return exchange_tag + static_cast<int>(2 * self().exchanges++ % exchange_tags); }

  void post_all_to_all(pending& p, bool blocking, const call& c) const {
    const void* from = c.count != 0 && c.in == c.out ? MPI_IN_PLACE : c.in;
    by_rank(c, [&](int count, MPI_Datatype type) {
      detail::issue(p, blocking, "MPI_Alltoall", MPI_Alltoall, MPI_Ialltoall, from, count, type, c.out, count, type,
                    self().comm);
    });
  }

  /// Posts messages, which take any count and offset. (Ranks see different sizes, so they could not all choose
  /// MPI_Ialltoallv by size.)
  void post_all_to_all_v(pending& p, const call& c) const {
    const std::size_t size = size_of(c.type);
    for (std::size_t step = 0; step < ranks(); ++step) {  // ranks start with different peers
      const std::size_t k = (static_cast<std::size_t>(rank()) + step) % ranks();
      detail::add_receive(p, detail::at(c.out, c.receive_offsets[k] * size), c.receive_counts[k], c.type,
                          static_cast<int>(k), reserved_tag, self().limit);
    }
    for (std::size_t step = 0; step < ranks(); ++step) {
      const std::size_t k = (static_cast<std::size_t>(rank()) + step) % ranks();
      detail::add_send(p, detail::at(c.in, c.send_offsets[k] * size), c.send_counts[k], c.type, static_cast<int>(k),
                       reserved_tag, self().limit);
    }
  }

  void post_broadcast(pending& p, bool blocking, const call& c) const {
    detail::in_pieces(c.count, self().limit, [&](std::size_t first, int count) {
      detail::issue(p, blocking, "MPI_Bcast", MPI_Bcast, MPI_Ibcast,
                    static_cast<void*>(detail::at(c.out, first * size_of(c.type))), count, detail::type_of(c.type),
                    c.peer, self().comm);
    });
  }

  std::shared_ptr<detail::state> state_;
};

static_assert(plait::communicator<communicator>);

/// The main function of an MPI program: initialises MPI, calls `body(communicator)` with all processes, and finalises.
/// A rank that throws prints the error with its last operations, and ends all ranks with a nonzero exit code.
template <class F>
int run(int argc, char** argv, F&& body) {
  const environment env(&argc, &argv);
  communicator world = communicator::world();
  std::string why;
  try {
    body(world);
    return 0;
  } catch (...) {
    why = plait::detail::exception_text();
  }
  detail::end_all(cat({why, "\nlast operations: ", world.flight().text(16)}));
}

}  // namespace plait::mpi

#include "plait/core/macros_on.hpp"
