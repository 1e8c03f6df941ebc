#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "plait/comm/communicator.hpp"
#include "plait/comm/mpi_pending.hpp"

namespace plait::mpi {

/// Initialises MPI if nobody has, and finalises it then. Asks for MPI_THREAD_MULTIPLE.
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

/// A rank's handle of an MPI communicator; see communicator.hpp for what the operations mean. Every MPI call is
/// checked. An operation that is waited for and does not finish within the deadline ends all ranks, with a text that
/// names it. The order of a reduction is the MPI library's choice. All ranks use the same form of a collective, the
/// direct one or the started one: MPI does not match the two.
class communicator {
  using counts = std::span<const std::size_t>;
  using pending = detail::pending;

 public:
  communicator() = default;

  /// All processes. Works on a duplicate, so that other users of MPI_COMM_WORLD are not disturbed.
  static communicator world() {
    MPI_Comm copy = MPI_COMM_NULL;
    detail::check(MPI_Comm_dup(MPI_COMM_WORLD, &copy), "MPI_Comm_dup");
    return communicator(copy, true, "world");
  }
  /// A communicator of the caller's, which is not freed here and must not be used for other things at the same time.
  static communicator attach(MPI_Comm comm, std::string_view label = "attached") {
    return communicator(comm, false, label);
  }

  explicit operator bool() const { return state_ != nullptr; }
  int rank() const { return self().rank; }
  int size() const { return self().size; }
  const std::string& label() const { return self().label; }
  MPI_Comm get() const { return self().comm; }

  /// Seconds until an operation that has not finished ends all ranks; 0 waits for ever. Splits inherit it.
  void set_deadline(double seconds) { self().deadline = seconds; }
  /// The most elements that one MPI call is given (INT_MAX unless told); larger counts are cut, or wrapped in a type.
  /// It must be the same on all ranks. Splits inherit it.
  void set_limit(std::size_t elements) { self().limit = std::clamp<std::size_t>(elements, 1, INT_MAX); }
  const flight_recorder& flight() const { return *self().flight; }

  void all_reduce(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    post_all_reduce(true, in, out, n, t, op).wait();
  }
  void all_gather(const void* in, void* out, std::size_t n, dtype t) { post_all_gather(true, in, out, n, t).wait(); }
  void reduce_scatter(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    post_reduce_scatter(true, in, out, n, t, op).wait();
  }
  void all_to_all(const void* in, void* out, std::size_t n, dtype t) { post_all_to_all(true, in, out, n, t).wait(); }
  void all_to_all_v(const void* in, counts sc, counts so, void* out, counts rc, counts ro, dtype t) {
    post_all_to_all_v(in, sc, so, out, rc, ro, t).wait();
  }
  void broadcast(void* data, std::size_t n, dtype t, int root) { post_broadcast(true, data, n, t, root).wait(); }
  void send(const void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    post_send(data, n, t, peer, tag).wait();
  }
  void receive(void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    post_receive(data, n, t, peer, tag).wait();
  }
  void barrier() {
    pending p = begin("barrier", 0);
    detail::issue(p, true, "MPI_Barrier", MPI_Barrier, MPI_Ibarrier, self().comm);
    p.wait();
  }

  request start_all_reduce(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    return started(post_all_reduce(false, in, out, n, t, op));
  }
  request start_all_gather(const void* in, void* out, std::size_t n, dtype t) {
    return started(post_all_gather(false, in, out, n, t));
  }
  request start_reduce_scatter(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    return started(post_reduce_scatter(false, in, out, n, t, op));
  }
  request start_all_to_all(const void* in, void* out, std::size_t n, dtype t) {
    return started(post_all_to_all(false, in, out, n, t));
  }
  request start_all_to_all_v(const void* in, counts sc, counts so, void* out, counts rc, counts ro, dtype t) {
    return started(post_all_to_all_v(in, sc, so, out, rc, ro, t));
  }
  request start_broadcast(void* data, std::size_t n, dtype t, int root) {
    return started(post_broadcast(false, data, n, t, root));
  }
  request start_send(const void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    return started(post_send(data, n, t, peer, tag));
  }
  request start_receive(void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    return started(post_receive(data, n, t, peer, tag));
  }

  communicator split(int color, int key, std::string_view label = {}) {
    MPI_Comm child = MPI_COMM_NULL;
    detail::check(MPI_Comm_split(self().comm, color < 0 ? MPI_UNDEFINED : color, key, &child), "MPI_Comm_split");
    if (child == MPI_COMM_NULL) return {};
    communicator out(child, true, label.empty() ? cat({self().label, ".", color}) : std::string(label), state_.get());
    out.set_deadline(self().deadline);
    out.set_limit(self().limit);
    return out;
  }

  void abort(const std::string& why) noexcept { detail::end_all("called abort: " + why); }

 private:
  static constexpr int reserved_tag = 32767;  // the largest that every MPI library offers; of all_to_all_v

  communicator(MPI_Comm comm, bool owned, std::string_view label, const detail::state* parent = nullptr)
      : state_(std::make_shared<detail::state>()) {
    state_->comm = comm;
    state_->owned = owned;
    state_->label = label;
    state_->ops = parent ? parent->ops : std::make_shared<detail::operations>();
    state_->flight = parent ? parent->flight : std::make_shared<flight_recorder>();
    state_->dog = parent ? parent->dog : std::make_shared<detail::watchdog>();
    detail::check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    detail::check(MPI_Comm_rank(comm, &state_->rank), "MPI_Comm_rank");
    detail::check(MPI_Comm_size(comm, &state_->size), "MPI_Comm_size");
  }

  detail::state& self() const {
    if (!state_) fail("a communicator without a group was used (its rank has a negative color in the split)");
    return *state_;
  }

  pending begin(const char* name, std::size_t bytes) {
    pending p;
    detail::state& s = self();
    p.home = state_;
    p.name = name;
    p.bytes = bytes;
    p.sequence = s.sequence++;
    p.ticket = s.flight->start(s.label, p.sequence, name, bytes);
    return p;
  }

  static request started(pending&& p) {
    static constexpr request_ops table = {[](void* owner, void*) { static_cast<pending*>(owner)->wait(); },
                                          [](void* owner, void*) {
                                            if (static_cast<pending*>(owner)->test()) return true;
                                            std::this_thread::yield();
                                            return false;
                                          },
                                          [](void* owner, void*) noexcept {
                                            // While an exception unwinds this rank, others may never join; the
                                            // exception is about to end all ranks.
                                            if (std::uncaught_exceptions() == 0) static_cast<pending*>(owner)->wait();
                                          }};
    return request(table, std::make_shared<pending>(std::move(p)), nullptr);
  }

  std::size_t ranks() const { return static_cast<std::size_t>(self().size); }
  static std::byte* at(void* p, std::size_t bytes) { return static_cast<std::byte*>(p) + bytes; }
  static const std::byte* at(const void* p, std::size_t bytes) { return static_cast<const std::byte*>(p) + bytes; }

  /// Calls f(first element, count) for pieces that fit one MPI call.
  template <class F>
  void pieces(std::size_t n, const F& f) const {
    for (std::size_t first = 0; first < n; first += self().limit) {
      f(first, static_cast<int>(std::min(self().limit, n - first)));
    }
  }

  pending post_all_reduce(bool blocking, const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    plait::detail::check_reducible("all_reduce", t);
    const std::size_t size = size_of(t);
    const detail::state& s = self();
    plait::detail::check_buffers("all_reduce", in, n * size, out, n * size, 0);
    pending p = begin("all_reduce", n * size);
    pieces(n, [&](std::size_t first, int count) {
      const void* from = in == out ? MPI_IN_PLACE : at(in, first * size);
      detail::issue(p, blocking, "MPI_Allreduce", MPI_Allreduce, MPI_Iallreduce, from,
                    static_cast<void*>(at(out, first * size)), count, detail::type_of(t), s.ops->of(op, t), s.comm);
    });
    return p;
  }

  pending post_all_gather(bool blocking, const void* in, void* out, std::size_t n, dtype t) {
    const detail::state& s = self();
    const std::size_t bytes = n * size_of(t), place = bytes * static_cast<std::size_t>(s.rank);
    plait::detail::check_buffers("all_gather", in, bytes, out, bytes * ranks(), place);
    const void* from = bytes != 0 && in == at(out, place) ? MPI_IN_PLACE : in;
    pending p = begin("all_gather", bytes);
    const auto call = [&](int count, MPI_Datatype type) {
      detail::issue(p, blocking, "MPI_Allgather", MPI_Allgather, MPI_Iallgather, from, count, type, out, count, type,
                    s.comm);
    };
    if (n * ranks() > s.limit) {
      call(1, detail::big_type(n, t, s.limit).get());
    } else {
      call(static_cast<int>(n), detail::type_of(t));
    }
    return p;
  }

  pending post_reduce_scatter(bool blocking, const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    plait::detail::check_reducible("reduce_scatter", t);
    const detail::state& s = self();
    const std::size_t size = size_of(t), bytes = n * size, place = bytes * static_cast<std::size_t>(s.rank);
    plait::detail::check_buffers("reduce_scatter", in, bytes * ranks(), out, bytes, place);
    pending p = begin("reduce_scatter", bytes * ranks());
    void* to = out;
    if (bytes != 0 && out == at(in, place)) {  // MPI has no such form: reduce aside, copy when complete
      p.buffer.resize(bytes);
      p.copy_to = out;
      to = p.buffer.data();
    }
    const MPI_Op mpi_op = s.ops->of(op, t);
    if (n * ranks() <= s.limit) {
      detail::issue(p, blocking, "MPI_Reduce_scatter_block", MPI_Reduce_scatter_block, MPI_Ireduce_scatter_block, in,
                    to, static_cast<int>(n), detail::type_of(t), mpi_op, s.comm);
      return p;
    }
    for (int root = 0; root < s.size; ++root) {
      pieces(n, [&](std::size_t first, int count) {
        const std::size_t shift = (static_cast<std::size_t>(root) * n + first) * size;
        void* const result = root == s.rank ? at(to, first * size) : nullptr;
        detail::issue(p, blocking, "MPI_Reduce", MPI_Reduce, MPI_Ireduce, static_cast<const void*>(at(in, shift)),
                      result, count, detail::type_of(t), mpi_op, root, s.comm);
      });
    }
    return p;
  }

  pending post_all_to_all(bool blocking, const void* in, void* out, std::size_t n, dtype t) {
    const detail::state& s = self();
    const std::size_t bytes = n * size_of(t) * ranks();
    plait::detail::check_buffers("all_to_all", in, bytes, out, bytes, 0, s.size == 1);
    pending p = begin("all_to_all", bytes);
    const void* from = bytes != 0 && in == out ? MPI_IN_PLACE : in;
    const auto call = [&](int count, MPI_Datatype type) {
      detail::issue(p, blocking, "MPI_Alltoall", MPI_Alltoall, MPI_Ialltoall, from, count, type, out, count, type,
                    s.comm);
    };
    if (n * ranks() > s.limit) {
      call(1, detail::big_type(n, t, s.limit).get());
    } else {
      call(static_cast<int>(n), detail::type_of(t));
    }
    return p;
  }

  /// By messages, which take any count and offset. (Ranks could not choose between this and MPI_Ialltoallv by the size,
  /// because they see different sizes.)
  pending post_all_to_all_v(const void* in, counts sc, counts so, void* out, counts rc, counts ro, dtype t) {
    plait::detail::check_counts("all_to_all_v", size(), sc, so, rc, ro);
    const std::size_t size = size_of(t);
    std::size_t sent = 0, received = 0;
    for (std::size_t k = 0; k < sc.size(); ++k) sent += sc[k], received += rc[k];
    plait::detail::check_pointer("all_to_all_v", in, sent * size);
    plait::detail::check_pointer("all_to_all_v", out, received * size);
    pending p = begin("all_to_all_v", sent * size);
    for (std::size_t step = 0; step < ranks(); ++step) {  // everybody starts with another peer
      const std::size_t k = (static_cast<std::size_t>(rank()) + step) % ranks();
      add_receive(p, at(out, ro[k] * size), rc[k], t, static_cast<int>(k), reserved_tag);
    }
    for (std::size_t step = 0; step < ranks(); ++step) {
      const std::size_t k = (static_cast<std::size_t>(rank()) + step) % ranks();
      add_send(p, at(in, so[k] * size), sc[k], t, static_cast<int>(k), reserved_tag);
    }
    return p;
  }

  pending post_broadcast(bool blocking, void* data, std::size_t n, dtype t, int root) {
    plait::detail::check_peer("broadcast", "root", root, size());
    plait::detail::check_pointer("broadcast", data, n * size_of(t));
    pending p = begin("broadcast", n * size_of(t));
    pieces(n, [&](std::size_t first, int count) {
      detail::issue(p, blocking, "MPI_Bcast", MPI_Bcast, MPI_Ibcast, static_cast<void*>(at(data, first * size_of(t))),
                    count, detail::type_of(t), root, self().comm);
    });
    return p;
  }

  pending post_send(const void* data, std::size_t n, dtype t, int peer, int tag) {
    check_message("send", data, n * size_of(t), peer, tag);
    pending p = begin("send", n * size_of(t));
    add_send(p, data, n, t, peer, tag);
    return p;
  }
  pending post_receive(void* data, std::size_t n, dtype t, int peer, int tag) {
    check_message("receive", data, n * size_of(t), peer, tag);
    pending p = begin("receive", n * size_of(t));
    add_receive(p, data, n, t, peer, tag);
    return p;
  }

  void check_message(const char* what, const void* data, std::size_t bytes, int peer, int tag) const {
    plait::detail::check_peer(what, "peer", peer, size());
    plait::detail::check_pointer(what, data, bytes);
    if (tag < 0 || tag >= reserved_tag) {
      fail({what, ": tag is ", tag, "; MPI takes 0 to ", reserved_tag - 1});
    }
  }

  // An empty message is sent too: it is a message.
  void add_send(pending& p, const void* data, std::size_t n, dtype t, int peer, int tag) const {
    const auto call = [&](std::size_t first, int count) {
      detail::check(
          MPI_Isend(at(data, first * size_of(t)), count, detail::type_of(t), peer, tag, self().comm, p.next()),
          "MPI_Isend");
    };
    n == 0 ? call(0, 0) : pieces(n, call);
  }
  void add_receive(pending& p, void* data, std::size_t n, dtype t, int peer, int tag) const {
    const auto call = [&](std::size_t first, int count) {
      p.expected.push_back(count);
      detail::check(
          MPI_Irecv(at(data, first * size_of(t)), count, detail::type_of(t), peer, tag, self().comm, p.next()),
          "MPI_Irecv");
    };
    p.type = detail::type_of(t);
    n == 0 ? call(0, 0) : pieces(n, call);
  }

  std::shared_ptr<detail::state> state_;
};

static_assert(plait::communicator<communicator>);

/// The main function of an MPI program: initialises, calls `body(communicator)` with all processes, finalises. A rank
/// that throws prints why, with its last operations, and ends all ranks with a non-zero exit code.
template <class F>
int run(int argc, char** argv, F&& body) {
  const environment env(&argc, &argv);
  communicator world = communicator::world();
  std::string why;
  try {
    body(world);
    return 0;
  } catch (const std::exception& e) {
    why = e.what();
  } catch (...) {
    why = "an exception that is not a std::exception";
  }
  detail::end_all(cat({why, "\nlast operations: ", world.flight().text(16)}));
}

}  // namespace plait::mpi
