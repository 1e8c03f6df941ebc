// The conformance suite for authors of communicators. Every rank calls `testing::conformance(comm)`; a failure throws
// `plait::error`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/communicator.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/version.hpp"

namespace plait::testing::conformance_parts {

/// A device's memory, one object per rank's thread. Arrays of the suite are allocated there inside a `memory_scope`,
/// otherwise in the host's memory.
class test_memory {
 public:
  virtual ~test_memory() = default;
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* data) noexcept = 0;
  virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
  virtual void download(void* to, const void* from, std::size_t bytes) = 0;
};

/// The memory of this thread's arrays; null: the host's.
inline test_memory*& memory_of_thread() {
  thread_local test_memory* current = nullptr;
  return current;
}

/// Allocates this thread's arrays from `memory` during its lifetime.
class memory_scope {
 public:
  explicit memory_scope(test_memory& memory) : before_(std::exchange(memory_of_thread(), &memory)) {}
  memory_scope(const memory_scope&) = delete;
  memory_scope& operator=(const memory_scope&) = delete;
  ~memory_scope() { memory_of_thread() = before_; }

 private:
  test_memory* before_;
};

template <class T>
std::vector<T> read(const T* from, std::size_t n) {
  std::vector<T> out(n);
  if (n == 0) return out;
  if (test_memory* memory = memory_of_thread()) {
    memory->download(out.data(), from, n * sizeof(T));
  } else {
    std::memcpy(out.data(), from, n * sizeof(T));
  }
  return out;
}

template <class T>
void write(T* to, const std::vector<T>& values) {
  if (values.empty()) return;
  if (test_memory* memory = memory_of_thread()) {
    memory->upload(to, values.data(), values.size() * sizeof(T));
  } else {
    std::memcpy(to, values.data(), values.size() * sizeof(T));
  }
}

/// `n` elements in the thread's memory.
template <class T>
class array {
 public:
  explicit array(std::size_t n) : array(std::vector<T>(n)) {}
  explicit array(std::vector<T> values) : host_(std::move(values)) {
    memory_ = memory_of_thread();
    if (memory_ == nullptr) return;
    device_ = static_cast<T*>(memory_->allocate(host_.size() * sizeof(T)));
    write(device_, host_);
  }
  array(array&& other) noexcept
      : host_(std::move(other.host_)), memory_(other.memory_), device_(std::exchange(other.device_, nullptr)) {}
  array& operator=(array&&) = delete;
  ~array() {
    if (device_ != nullptr) memory_->release(device_);
  }

  T* data() { return memory_ != nullptr ? device_ : host_.data(); }
  const T* data() const { return memory_ != nullptr ? device_ : host_.data(); }
  std::size_t size() const { return host_.size(); }
  /// Returns a copy of the current values.
  std::vector<T> values() const { return read(data(), size()); }

 private:
  std::vector<T> host_;
  test_memory* memory_ = nullptr;
  T* device_ = nullptr;
};

// Checks of single collectives and messages. Values are small integers, so sums are exact.

template <class T>
T make(int v) {
  return converted<T>(v);
}
template <class T>
double value(T x) {
  return converted<double>(x);
}

/// Element `i` of rank `rank` for test number `salt`, from 0 to 7.
inline int pattern(int rank, std::size_t i, unsigned salt) {
  std::uint64_t h = (static_cast<std::uint64_t>(rank) + 1) * 0x9e3779b97f4a7c15u ^ (i + 1) * 0xc2b2ae3d27d4eb4fu ^
                    salt * 0x165667b19e3779f9u;
  h ^= h >> 29;
  h *= 0xbf58476d1ce4e5b9u;
  return static_cast<int>(h >> 61);
}

template <class T>
array<T> data(int rank, std::size_t n, unsigned salt) {
  std::vector<T> out(n);
  for (std::size_t i = 0; i < n; ++i) out[i] = make<T>(pattern(rank, i, salt));
  return array<T>(std::move(out));
}

inline int reduced(int ranks, std::size_t i, unsigned salt, reduce_op op) {
  int acc = pattern(0, i, salt);
  for (int r = 1; r < ranks; ++r) {
    const int v = pattern(r, i, salt);
    acc = op == reduce_op::sum ? acc + v : op == reduce_op::max ? std::max(acc, v) : std::min(acc, v);
  }
  return acc;
}

template <class T, class Expected>
void expect(const char* what, const T* data, std::size_t n, const Expected& expected) {
  const std::vector<T> got = read(data, n);
  for (std::size_t i = 0; i < n; ++i) {
    if (value(got[i]) != static_cast<double>(expected(i))) {
      fail({"conformance: ", what, " of ", n, " ", name_of(dtype_of<T>), ": element ", i, " is ", value(got[i]),
            ", expected ", expected(i)});
    }
  }
}

inline void expect(bool ok, const char* what) {
  if (!ok) fail({"conformance: ", what});
}

/// "started" runs the asynchronous version and waits.
enum class how { direct, in_place, started, started_in_place };
inline constexpr how all_ways[] = {how::direct, how::in_place, how::started, how::started_in_place};
inline bool in_place(how h) { return h == how::in_place || h == how::started_in_place; }
inline bool started(how h) { return h == how::started || h == how::started_in_place; }

template <class T, class C>
void check_all_reduce(C& comm, std::size_t n, reduce_op op, how h, unsigned salt) {
  auto in = data<T>(comm.rank(), n, salt);
  array<T> other(n);
  T* out = in_place(h) ? in.data() : other.data();
  if (started(h))
    comm.start_all_reduce(in.data(), out, n, dtype_of<T>, op).wait();
  else
    comm.all_reduce(in.data(), out, n, dtype_of<T>, op);
  expect("all_reduce", out, n, [&](std::size_t i) { return reduced(comm.size(), i, salt, op); });
  if (!in_place(h)) expect("input", in.data(), n, [&](std::size_t i) { return pattern(comm.rank(), i, salt); });
}

template <class T, class C>
void check_all_gather(C& comm, std::size_t n, how h, unsigned salt) {
  auto in = data<T>(comm.rank(), n, salt);
  array<T> out(n * static_cast<std::size_t>(comm.size()));
  T* place = out.data() + n * static_cast<std::size_t>(comm.rank());
  if (in_place(h)) write(place, in.values());
  const T* from = in_place(h) ? place : in.data();
  if (started(h))
    comm.start_all_gather(from, out.data(), n, dtype_of<T>).wait();
  else
    comm.all_gather(from, out.data(), n, dtype_of<T>);
  expect("all_gather", out.data(), out.size(),
         [&](std::size_t i) { return pattern(static_cast<int>(i / n), i % n, salt); });
}

template <class T, class C>
void check_reduce_scatter(C& comm, std::size_t n, reduce_op op, how h, unsigned salt) {
  auto in = data<T>(comm.rank(), n * static_cast<std::size_t>(comm.size()), salt);
  array<T> other(n);
  const std::size_t shift = n * static_cast<std::size_t>(comm.rank());
  T* out = in_place(h) ? in.data() + shift : other.data();
  if (started(h))
    comm.start_reduce_scatter(in.data(), out, n, dtype_of<T>, op).wait();
  else
    comm.reduce_scatter(in.data(), out, n, dtype_of<T>, op);
  expect("reduce_scatter", out, n, [&](std::size_t i) { return reduced(comm.size(), shift + i, salt, op); });
  const std::vector<T> kept = in.values();
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (in_place(h) && i >= shift && i < shift + n) continue;
    expect(value(kept[i]) == pattern(comm.rank(), i, salt), "reduce_scatter changed its input");
  }
}

/// Checks that a NaN on any rank is the maximum and the minimum, and that elements without a NaN are as usual. Every
/// third element has a NaN on one rank, every seventh on all. If one rank has a NaN, others have an infinity in some
/// elements.
template <class T, class C>
void check_nan(C& comm, std::size_t n, reduce_op op, how h, unsigned salt, bool scatter) {
  const auto p = static_cast<std::size_t>(comm.size());
  const std::size_t all = scatter ? n * p : n;
  const auto is_nan = [&](std::size_t i) { return i % 3 == 0 || i % 7 == 0; };
  const auto values = [&](std::size_t rank) {
    std::vector<double> x(all);
    for (std::size_t i = 0; i < all; ++i) {
      x[i] = pattern(static_cast<int>(rank), i, salt);
      if (i % 7 == 0 || (i % 3 == 0 && i / 3 % p == rank))
        x[i] = std::numeric_limits<double>::quiet_NaN();
      else if (i % 3 == 0 && i % 2 == 0)
        x[i] = op == reduce_op::min ? -INFINITY : INFINITY;
    }
    return x;
  };
  const std::vector<double> mine = values(static_cast<std::size_t>(comm.rank()));
  std::vector<T> typed(all);
  std::transform(mine.begin(), mine.end(), typed.begin(), [](double x) { return converted<T>(x); });
  array<T> in(std::move(typed)), other(n);
  const std::size_t shift = scatter ? n * static_cast<std::size_t>(comm.rank()) : 0;
  T* const out = in_place(h) ? in.data() + shift : other.data();
  const call what{.kind = scatter ? collective::reduce_scatter : collective::all_reduce,
                  .in = in.data(),
                  .out = out,
                  .count = n,
                  .type = dtype_of<T>,
                  .op = op};
  if (started(h))
    comm.start(what).wait();
  else
    comm.run(what);
  const std::vector<T> got = read(out, n);
  for (std::size_t i = 0; i < n; ++i) {
    const double x = value(got[i]);
    if (is_nan(shift + i) ? x == x : x != static_cast<double>(reduced(comm.size(), shift + i, salt, op)))
      fail({"conformance: ", name_of(op), " of ", name_of(dtype_of<T>), " with NaN: element ", i, " of rank ",
            comm.rank(), " is ", x});
  }
}

template <class C>
void check_nans(C& comm) {
  unsigned salt = 20;
  for (const std::size_t n : {std::size_t{42}, std::size_t{3001}})
    for (const how h : all_ways)
      for (const reduce_op op : {reduce_op::max, reduce_op::min})
        for (const bool scatter : {false, true}) {
          check_nan<float>(comm, n, op, h, ++salt, scatter);
          check_nan<double>(comm, n, op, h, ++salt, scatter);
          check_nan<bf16>(comm, n, op, h, ++salt, scatter);
        }
}

template <class T, class C>
void check_all_to_all(C& comm, std::size_t n, how h, unsigned salt) {
  const auto p = static_cast<std::size_t>(comm.size());
  auto in = data<T>(comm.rank(), n * p, salt);
  array<T> out(n * p);
  if (started(h))
    comm.start_all_to_all(in.data(), out.data(), n, dtype_of<T>).wait();
  else
    comm.all_to_all(in.data(), out.data(), n, dtype_of<T>);
  expect("all_to_all", out.data(), out.size(), [&](std::size_t i) {
    return pattern(static_cast<int>(i / n), static_cast<std::size_t>(comm.rank()) * n + i % n, salt);
  });
}

/// Rank a sends (a + 2 b + salt) % 5 * scale elements to rank b. Gaps of one element separate the blocks.
template <class T, class C>
void check_all_to_all_v(C& comm, std::size_t scale, how h, unsigned salt) {
  const auto p = static_cast<std::size_t>(comm.size()), me = static_cast<std::size_t>(comm.rank());
  const auto count = [&](std::size_t a, std::size_t b) { return (a + 2 * b + salt) % 5 * scale; };
  std::vector<std::size_t> sc(p), so(p), rc(p), ro(p);
  std::size_t sends = 0, receives = 0;
  for (std::size_t k = 0; k < p; ++k) {
    sc[k] = count(me, k), so[k] = sends, sends += sc[k] + 1;
    rc[k] = count(k, me), ro[k] = receives, receives += rc[k] + 1;
  }
  std::vector<T> blocks(sends);
  for (std::size_t k = 0; k < p; ++k) {
    for (std::size_t i = 0; i < sc[k]; ++i)
      blocks[so[k] + i] = make<T>(pattern(comm.rank(), i, salt + static_cast<unsigned>(k)));
  }
  const array<T> in(std::move(blocks));
  array<T> out(std::vector<T>(receives, make<T>(9)));
  if (started(h))
    comm.start_all_to_all_v(in.data(), sc, so, out.data(), rc, ro, dtype_of<T>).wait();
  else
    comm.all_to_all_v(in.data(), sc, so, out.data(), rc, ro, dtype_of<T>);
  for (std::size_t k = 0; k < p; ++k) {
    expect("all_to_all_v", out.data() + ro[k], rc[k] + 1, [&](std::size_t i) {
      return i == rc[k] ? 9 : pattern(static_cast<int>(k), i, salt + static_cast<unsigned>(me));
    });
  }
}

/// Parts of sizes n, n + 1, 0, and so on, separated by gaps of one element.
struct unequal_parts {
  unequal_parts(std::size_t ranks, std::size_t n, unsigned salt) : counts(ranks), offsets(ranks) {
    for (std::size_t k = 0; k < ranks; ++k) {
      const std::size_t kind = (k + salt) % 3;
      counts[k] = kind == 2 ? 0 : n + kind, offsets[k] = size, size += counts[k] + 1;
    }
  }
  std::vector<std::size_t> counts, offsets;
  std::size_t size = 0;
};

/// Whether a backend supports all-gathers and reduce-scatters of unequal parts of any size.
template <class C>
constexpr bool has_unequal_parts = requires(const C& comm, std::size_t bytes) { comm.unequal_parts(bytes); };

template <class T, class C>
void check_all_gather_v(C& comm, std::size_t n, how h, unsigned salt) {
  const unequal_parts all(static_cast<std::size_t>(comm.size()), n, salt);
  const auto in = data<T>(comm.rank(), all.counts[static_cast<std::size_t>(comm.rank())], salt);
  array<T> out(std::vector<T>(all.size, make<T>(9)));
  if (started(h))
    comm.start_all_gather_v(in.data(), out.data(), all.counts, all.offsets, dtype_of<T>).wait();
  else
    comm.all_gather_v(in.data(), out.data(), all.counts, all.offsets, dtype_of<T>);
  for (std::size_t k = 0; k < all.counts.size(); ++k)
    expect("all_gather_v", out.data() + all.offsets[k], all.counts[k] + 1,
           [&](std::size_t i) { return i == all.counts[k] ? 9 : pattern(static_cast<int>(k), i, salt); });
}

template <class T, class C>
void check_reduce_scatter_v(C& comm, std::size_t n, reduce_op op, how h, unsigned salt) {
  const unequal_parts all(static_cast<std::size_t>(comm.size()), n, salt);
  const std::size_t me = static_cast<std::size_t>(comm.rank()), own = all.counts[me];
  const auto in = data<T>(comm.rank(), all.size, salt);
  array<T> out(std::vector<T>(own + 1, make<T>(9)));
  if (started(h))
    comm.start_reduce_scatter_v(in.data(), out.data(), all.counts, all.offsets, dtype_of<T>, op).wait();
  else
    comm.reduce_scatter_v(in.data(), out.data(), all.counts, all.offsets, dtype_of<T>, op);
  expect("reduce_scatter_v", out.data(), own + 1, [&](std::size_t i) {
    return i == own ? 9 : static_cast<int>(reduced(comm.size(), all.offsets[me] + i, salt, op));
  });
  expect("input", in.data(), all.size, [&](std::size_t i) { return pattern(comm.rank(), i, salt); });
}

template <class T, class C>
void check_broadcast(C& comm, std::size_t n, int root, how h, unsigned salt) {
  auto x = data<T>(comm.rank(), n, salt);
  if (started(h))
    comm.start_broadcast(x.data(), n, dtype_of<T>, root).wait();
  else
    comm.broadcast(x.data(), n, dtype_of<T>, root);
  expect("broadcast", x.data(), n, [&](std::size_t i) { return pattern(root, i, salt); });
}

template <class T, class C>
void check_ring(C& comm, std::size_t n, unsigned salt) {
  const int p = comm.size(), next = (comm.rank() + 1) % p, previous = (comm.rank() + p - 1) % p;
  const auto a = data<T>(comm.rank(), n, salt), b = data<T>(comm.rank(), n, salt + 1);
  array<T> from_previous(n), from_next(n), second(n);
  comm_group ring(comm);
  ring.send(a.data(), n, dtype_of<T>, next, 1);
  ring.send(b.data(), n, dtype_of<T>, previous, 2);
  ring.send(b.data(), n, dtype_of<T>, next, 1);
  ring.receive(from_next.data(), n, dtype_of<T>, next, 2);
  ring.receive(from_previous.data(), n, dtype_of<T>, previous, 1);
  ring.receive(second.data(), n, dtype_of<T>, previous, 1);
  ring.end();
  expect("ring", from_previous.data(), n, [&](std::size_t i) { return pattern(previous, i, salt); });
  expect("ring, second message", second.data(), n, [&](std::size_t i) { return pattern(previous, i, salt + 1); });
  expect("ring, other way", from_next.data(), n, [&](std::size_t i) { return pattern(next, i, salt + 1); });
}

/// Blocking messages from each rank to the next.
template <class C>
void check_chain(C& comm) {
  array<std::int32_t> x(std::vector<std::int32_t>{1});
  if (comm.rank() > 0) comm.receive(x.data(), 1, dtype::i32, comm.rank() - 1);
  write(x.data(), {x.values()[0] + 1});
  if (comm.rank() + 1 < comm.size()) comm.send(x.data(), 1, dtype::i32, comm.rank() + 1);
  expect(x.values()[0] == comm.rank() + 2, "chain of messages");
}

template <class T, class C>
void check_type(C& comm, std::size_t n, unsigned salt) {
  for (const how h : all_ways) {
    if constexpr (reducible(dtype_of<T>)) {
      for (const reduce_op op : {reduce_op::sum, reduce_op::max, reduce_op::min}) {
        check_all_reduce<T>(comm, n, op, h, salt++);
        check_reduce_scatter<T>(comm, n, op, h, salt++);
      }
    }
    check_all_gather<T>(comm, n, h, salt++);
    if (in_place(h)) continue;
    check_all_to_all<T>(comm, n, h, salt++);
    check_all_to_all_v<T>(comm, n, h, salt++);
    if constexpr (has_unequal_parts<C>) {
      check_all_gather_v<T>(comm, n, h, salt++);
      if constexpr (reducible(dtype_of<T>))
        for (const reduce_op op : {reduce_op::sum, reduce_op::max, reduce_op::min})
          check_reduce_scatter_v<T>(comm, n, op, h, salt++);
    }
    check_broadcast<T>(comm, n, comm.size() - 1, h, salt++);
  }
  check_ring<T>(comm, n, salt);
}

template <class C>
void check_types(C& comm, const std::vector<std::size_t>& sizes = {0, 1, 3, 257, 2000}) {
  for (const std::size_t n : sizes) {
    check_type<float>(comm, n, 1);
    check_type<double>(comm, n, 2);
    check_type<bf16>(comm, n, 3);
    check_type<std::int32_t>(comm, n, 4);
    check_type<std::int64_t>(comm, n, 5);
    check_type<std::uint8_t>(comm, n, 6);
  }
}

/// Sizes at which a backend may change its algorithm, not multiples of any unit.
template <class C>
void check_large(C& comm) {
  for (const std::size_t n : {std::size_t{40001}, std::size_t{300007}}) {
    for (const how h : {how::in_place, how::started}) {
      check_all_reduce<float>(comm, n, reduce_op::sum, h, 7);
      check_reduce_scatter<bf16>(comm, n, reduce_op::sum, h, 8);
      check_all_gather<float>(comm, n, h, 9);
      check_all_to_all<bf16>(comm, n, h, 10);
      check_all_to_all_v<std::int32_t>(comm, n / 4, h, 11);
      if constexpr (has_unequal_parts<C>) {
        check_all_gather_v<float>(comm, n, h, 19);
        check_reduce_scatter_v<bf16>(comm, n, reduce_op::sum, h, 20);
      }
      check_broadcast<double>(comm, n, 0, h, 12);
    }
    check_ring<float>(comm, n, 13);
  }
  // Bytes that encode their index, in whole units of work or with one byte more.
  for (const std::size_t n : {std::size_t{1} << 16, (std::size_t{1} << 16) + 1}) {
    for (const how h : {how::direct, how::in_place, how::started}) {
      check_all_gather<std::uint8_t>(comm, n, h, 14);
      if (in_place(h)) continue;
      check_all_to_all<std::uint8_t>(comm, n, h, 15);
      check_all_to_all_v<std::uint8_t>(comm, n, h, 16);
      check_broadcast<std::uint8_t>(comm, n, comm.size() - 1, h, 17);
    }
    check_ring<std::uint8_t>(comm, n, 18);
  }
}

template <class C>
void check_splits(C& comm) {
  const int r = comm.rank(), p = comm.size();
  {  // one group of all ranks, reversed
    C all = comm.split(0, -r);
    expect(static_cast<bool>(all) && all.size() == p && all.rank() == p - 1 - r, "split of one color, reversed");
    check_all_gather<float>(all, 3, how::direct, 1);
  }
  {  // one group per rank
    C alone = comm.split(r, 0);
    expect(alone.size() == 1 && alone.rank() == 0, "split into single ranks");
    check_type<float>(alone, 5, 2);
  }
  {  // odd and even ranks
    C half = comm.split(r % 2, r, "half");
    expect(half.rank() == r / 2 && half.size() == (p + 1 - r % 2) / 2, "split into odd and even ranks");
    expect(std::string(half.label()) == "half", "label of a split");
    check_type<float>(half, 100, 3);
    check_chain(half);
    C quarter = half.split(half.rank() % 2, 0);  // a split of a split
    check_all_reduce<double>(quarter, 17, reduce_op::sum, how::direct, 4);
    check_all_reduce<double>(half, 17, reduce_op::sum, how::direct, 5);
  }
  {  // the last rank belongs to no group
    C rest = comm.split(r == p - 1 ? -1 : 7, 0);
    expect(static_cast<bool>(rest) == (r != p - 1), "a negative color gives an empty communicator");
    if (rest) check_all_reduce<float>(rest, 9, reduce_op::max, how::direct, 6);
  }
  {
    C none = comm.split(-1, 0);
    expect(!none, "split without any color");
  }
}

/// Checks a grid of two axes: requests of both axes and of the whole grid are in flight together.
template <class C>
void check_interleaved(C& comm) {
  const int columns = comm.size() % 2 == 0 ? 2 : 1;
  C row = comm.split(comm.rank() / columns, comm.rank()), column = comm.split(comm.rank() % columns, comm.rank());
  const std::size_t n = 1000;
  for (unsigned round = 0; round < 6; ++round) {
    auto a = data<float>(row.rank(), n, round), b = data<float>(column.rank(), n, round + 50);
    auto c = data<float>(comm.rank(), n, round + 99);
    array<float> gathered(n * static_cast<std::size_t>(column.size()));
    request x = row.start_all_reduce(a.data(), a.data(), n, dtype::f32, reduce_op::sum);
    request y = column.start_all_gather(b.data(), gathered.data(), n, dtype::f32);
    request z = comm.start_all_reduce(c.data(), c.data(), n, dtype::f32, reduce_op::max);
    if (round % 2 == 0) check_all_reduce<float>(row, 10, reduce_op::min, how::direct, round);  // completes first
    request* order[] = {&x, &y, &z};
    std::rotate(order, order + round % 3, order + 3);
    if (round >= 3) std::swap(order[0], order[1]);
    for (request* q : order) {
      if (round == 5) {
        while (!q->done()) {
        }
      }
      q->wait();
      expect(!*q && q->done(), "a request that was waited for is empty");
    }
    expect("row", a.data(), n, [&](std::size_t i) { return reduced(row.size(), i, round, reduce_op::sum); });
    expect("column", gathered.data(), gathered.size(),
           [&](std::size_t i) { return pattern(static_cast<int>(i / n), i % n, round + 50); });
    expect("both", c.data(), n, [&](std::size_t i) { return reduced(comm.size(), i, round + 99, reduce_op::max); });
  }
}

/// Starts more requests than any window is likely to hold, and waits for them in reverse or in the destructor.
template <class C>
void check_many_requests(C& comm) {
  constexpr std::size_t count = 70, n = 50;
  std::vector<array<std::int32_t>> x;
  for (unsigned k = 0; k < count; ++k) x.push_back(data<std::int32_t>(comm.rank(), n, k));
  {
    std::vector<request> requests;
    for (auto& v : x) {
      requests.push_back(comm.start_all_reduce(v.data(), v.data(), n, dtype::i32, reduce_op::sum));
    }
    for (std::size_t k = count; k-- > count / 2;) requests[k].wait();
  }
  for (unsigned k = 0; k < count; ++k) {
    expect("many", x[k].data(), n, [&](std::size_t i) { return reduced(comm.size(), i, k, reduce_op::sum); });
  }
}

/// Runs random operations on the whole group and on two kinds of subgroups; they are equal on every rank.
template <class C>
void check_random(C& comm, unsigned seed, int steps) {
  std::mt19937 random(seed);
  C half = comm.split(comm.rank() % 2, 0), block = comm.split(comm.rank() / 3, 0);
  for (int s = 0; s < steps; ++s) {
    const unsigned salt = random() % 1000;
    const std::size_t n = random() % (random() % 8 == 0 ? 20000 : 200);
    const how h = all_ways[random() % 4];
    const auto op = static_cast<reduce_op>(random() % 3);
    const auto which = random() % 3, kind = random() % 8;
    C& c = which == 0 ? comm : which == 1 ? half : block;
    switch (kind) {
      case 0:
        check_all_reduce<bf16>(c, n, op, h, salt);
        break;
      case 1:
        check_all_gather<float>(c, n, h, salt);
        break;
      case 2:
        check_reduce_scatter<double>(c, n, op, h, salt);
        break;
      case 3:
        check_all_to_all<std::int64_t>(c, n, h, salt);
        break;
      case 4:
        check_all_to_all_v<float>(c, n / 4, h, salt);
        break;
      case 5:
        check_broadcast<std::uint8_t>(c, n, static_cast<int>(salt) % c.size(), h, salt);
        break;
      case 6:
        check_ring<float>(c, n, salt);
        break;
      default:
        c.barrier();
    }
  }
}

/// Checks that sums with rounding are equal on all ranks and in every repetition.
template <class C>
void check_same_bits(C& comm) {
  const std::size_t n = 100'003;
  std::vector<float> first;
  array<float> x(n);
  for (int round = 0; round < 3; ++round) {
    std::mt19937 random(static_cast<unsigned>(comm.rank()) + 1);
    std::vector<float> values(n);
    for (float& v : values) v = std::uniform_real_distribution<float>(-1, 1)(random);
    write(x.data(), values);
    comm.all_reduce(x.data(), x.data(), n, dtype::f32, reduce_op::sum);
    const std::vector<float> sums = x.values();
    if (round == 0) first = sums;
    expect(std::memcmp(first.data(), sums.data(), n * sizeof(float)) == 0, "an all_reduce differs when it is repeated");
  }
  array<float> gathered(n * static_cast<std::size_t>(comm.size()));
  comm.all_gather(x.data(), gathered.data(), n, dtype::f32);
  const std::vector<float> all = gathered.values();
  for (int r = 0; r < comm.size(); ++r) {
    expect(std::memcmp(all.data() + n * static_cast<std::size_t>(r), first.data(), n * sizeof(float)) == 0,
           "an all_reduce differs between ranks");
  }
}

template <class F>
void expect_refused(const F& call, const char* part) {
  try {
    call();
  } catch (const error& e) {
    expect(std::string(e.what()).find(part) != std::string::npos, e.what());
    return;
  }
  fail({"conformance: not refused: ", part});
}

/// Checks that obviously wrong arguments are refused before anything is sent, so the group stays usable.
template <class C>
void check_arguments(C& comm) {
  array<float> x(64 * static_cast<std::size_t>(comm.size()));
  array<std::uint8_t> bytes(4);
  expect_refused([&] { comm.all_reduce(bytes.data(), bytes.data(), 4, dtype::u8, reduce_op::sum); }, "dtype is uint8");
  expect_refused([&] { comm.reduce_scatter(bytes.data(), bytes.data(), 0, dtype::u8, reduce_op::sum); },
                 "dtype is uint8");
  expect_refused([&] { comm.all_reduce(x.data(), x.data() + 1, 8, dtype::f32, reduce_op::sum); }, "overlap");
  expect_refused([&] { comm.all_reduce(nullptr, x.data(), 8, dtype::f32, reduce_op::sum); }, "null pointer");
  expect_refused([&] { comm.broadcast(x.data(), 8, dtype::f32, comm.size()); }, "root is");
  expect_refused([&] { comm.send(x.data(), 8, dtype::f32, -1); }, "peer is -1");
  if (comm.size() > 1) {
    expect_refused([&] { comm.all_to_all(x.data(), x.data(), 8, dtype::f32); }, "use separate buffers");
    expect_refused([&] { comm.all_to_all_v(x.data(), {}, {}, x.data(), {}, {}, dtype::f32); }, "one entry for each");
    const std::vector<std::size_t> ones(static_cast<std::size_t>(comm.size()), 1), zeros(ones.size(), 0);
    std::vector<std::size_t> places(ones.size());
    for (std::size_t k = 0; k < places.size(); ++k) places[k] = k;
    expect_refused([&] { comm.all_to_all_v(x.data(), ones, places, x.data() + 1, ones, places, dtype::f32); },
                   "in and out overlap");
    if constexpr (has_unequal_parts<C>) {
      expect_refused([&] { comm.all_gather_v(x.data(), x.data(), {}, {}, dtype::f32); }, "one entry for each");
      expect_refused([&] { comm.all_gather_v(x.data(), x.data(), ones, places, dtype::f32); }, "in and out overlap");
      expect_refused([&] { comm.reduce_scatter_v(x.data(), x.data(), ones, places, dtype::f32, reduce_op::sum); },
                     "in and out overlap");
    }
    expect_refused([&] { comm.all_to_all_v(x.data() + 32, ones, zeros, x.data(), ones, zeros, dtype::f32); },
                   "parts that are received overlap");
  }
  C empty;
  expect(!empty, "a default communicator is empty");
  expect_refused([&] { empty.barrier(); }, "negative color");
  check_all_reduce<float>(comm, 5, reduce_op::sum, how::direct, 1);
}

template <plait::communicator C>
void conformance(C& comm, unsigned seed = 1, int random_steps = 150) {
  check_types(comm);
  check_large(comm);
  check_chain(comm);
  check_splits(comm);
  check_interleaved(comm);
  check_many_requests(comm);
  check_same_bits(comm);
  check_nans(comm);
  check_arguments(comm);
  for (unsigned s = 0; s < 2; ++s) check_random(comm, seed + s, random_steps);
}

/// Runs every operation and dtype once or twice, for environments where each operation is slow.
template <plait::communicator C>
void short_conformance(C& comm, unsigned seed = 1, int random_steps = 10) {
  for (const how h : {how::direct, how::started_in_place}) {
    check_all_reduce<float>(comm, 0, reduce_op::sum, h, seed);
    check_all_reduce<float>(comm, 1027, reduce_op::sum, h, seed);
    check_all_reduce<double>(comm, 257, reduce_op::max, h, seed);
    check_reduce_scatter<bf16>(comm, 131, reduce_op::sum, h, seed);
    check_reduce_scatter<std::int64_t>(comm, 64, reduce_op::min, h, seed);
    check_all_gather<std::uint8_t>(comm, 33, h, seed);
    check_all_gather<float>(comm, 128, h, seed);
    check_all_to_all<std::int32_t>(comm, 65, h, seed);
    check_all_to_all_v<bf16>(comm, 19, h, seed);
    if constexpr (has_unequal_parts<C>) {
      check_all_gather_v<bf16>(comm, 21, h, seed);
      check_reduce_scatter_v<float>(comm, 35, reduce_op::sum, h, seed);
    }
    check_broadcast<double>(comm, 100, comm.size() / 2, h, seed);
  }
  check_ring<float>(comm, 77, seed);
  check_chain(comm);
  check_splits(comm);
  check_interleaved(comm);
  check_many_requests(comm);
  check_arguments(comm);
  check_random(comm, seed, random_steps);
}

}  // namespace plait::testing::conformance_parts

namespace plait::testing {
using conformance_parts::conformance;
using conformance_parts::short_conformance;
}  // namespace plait::testing

#include "plait/core/macros_on.hpp"
