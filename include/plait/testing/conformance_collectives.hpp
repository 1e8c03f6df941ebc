// Checks of each collective and message by itself; values are small integers, so that sums are exact. The suite is
// elsewhere: testing/conformance.hpp calls them all.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "plait/comm/communicator.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/testing/conformance_memory.hpp"

namespace plait::testing::conformance_parts {

template <class T>
T make(int v) {
  if constexpr (std::is_same_v<T, bf16>) {
    return plait::to_bf16(static_cast<float>(v));
  } else {
    return static_cast<T>(v);
  }
}

template <class T>
double value(T x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return static_cast<double>(plait::to_float(x));
  } else {
    return static_cast<double>(x);
  }
}

/// In 0..7: element `i` of rank `rank`, for test number `salt`.
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

/// "started" runs the asynchronous twin and waits.
enum class how { direct, in_place, started, started_in_place };
inline constexpr how all_ways[] = {how::direct, how::in_place, how::started, how::started_in_place};
inline bool in_place(how h) { return h == how::in_place || h == how::started_in_place; }
inline bool started(how h) { return h == how::started || h == how::started_in_place; }

template <class T, class C>
void check_all_reduce(C& comm, std::size_t n, reduce_op op, how h, unsigned salt) {
  auto in = data<T>(comm.rank(), n, salt);
  array<T> other(n);
  T* out = in_place(h) ? in.data() : other.data();
  if (started(h)) {
    request r = comm.start_all_reduce(in.data(), out, n, dtype_of<T>, op);
    r.wait();
  } else {
    comm.all_reduce(in.data(), out, n, dtype_of<T>, op);
  }
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
  if (started(h)) {
    request r = comm.start_all_gather(from, out.data(), n, dtype_of<T>);
    r.wait();
  } else {
    comm.all_gather(from, out.data(), n, dtype_of<T>);
  }
  expect("all_gather", out.data(), out.size(),
         [&](std::size_t i) { return pattern(static_cast<int>(i / n), i % n, salt); });
}

template <class T, class C>
void check_reduce_scatter(C& comm, std::size_t n, reduce_op op, how h, unsigned salt) {
  auto in = data<T>(comm.rank(), n * static_cast<std::size_t>(comm.size()), salt);
  array<T> other(n);
  const std::size_t shift = n * static_cast<std::size_t>(comm.rank());
  T* out = in_place(h) ? in.data() + shift : other.data();
  if (started(h)) {
    request r = comm.start_reduce_scatter(in.data(), out, n, dtype_of<T>, op);
    r.wait();
  } else {
    comm.reduce_scatter(in.data(), out, n, dtype_of<T>, op);
  }
  expect("reduce_scatter", out, n, [&](std::size_t i) { return reduced(comm.size(), shift + i, salt, op); });
  const std::vector<T> kept = in.values();
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (in_place(h) && i >= shift && i < shift + n) continue;
    expect(value(kept[i]) == pattern(comm.rank(), i, salt), "reduce_scatter changed its input");
  }
}

/// A NaN on any rank is the maximum and the minimum, whichever rank has it; elements without one are as ever. Every
/// third element has a NaN on one rank, every seventh on all; where one rank has it, others have an infinity at times.
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
  for (std::size_t i = 0; i < all; ++i) {
    if constexpr (std::is_same_v<T, bf16>)
      typed[i] = plait::to_bf16(static_cast<float>(mine[i]));
    else
      typed[i] = static_cast<T>(mine[i]);
  }
  array<T> in(std::move(typed)), other(n);
  const std::size_t shift = scatter ? n * static_cast<std::size_t>(comm.rank()) : 0;
  T* const out = in_place(h) ? in.data() + shift : other.data();
  request r;
  if (scatter) {
    if (started(h))
      r = comm.start_reduce_scatter(in.data(), out, n, dtype_of<T>, op);
    else
      comm.reduce_scatter(in.data(), out, n, dtype_of<T>, op);
  } else {
    if (started(h))
      r = comm.start_all_reduce(in.data(), out, n, dtype_of<T>, op);
    else
      comm.all_reduce(in.data(), out, n, dtype_of<T>, op);
  }
  r.wait();
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
  if (started(h)) {
    request r = comm.start_all_to_all(in.data(), out.data(), n, dtype_of<T>);
    r.wait();
  } else {
    comm.all_to_all(in.data(), out.data(), n, dtype_of<T>);
  }
  expect("all_to_all", out.data(), out.size(), [&](std::size_t i) {
    return pattern(static_cast<int>(i / n), static_cast<std::size_t>(comm.rank()) * n + i % n, salt);
  });
}

/// Rank a sends (a + 2 b + salt) % 5 * scale elements to rank b; gaps of one element between the blocks.
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
  if (started(h)) {
    request r = comm.start_all_to_all_v(in.data(), sc, so, out.data(), rc, ro, dtype_of<T>);
    r.wait();
  } else {
    comm.all_to_all_v(in.data(), sc, so, out.data(), rc, ro, dtype_of<T>);
  }
  for (std::size_t k = 0; k < p; ++k) {
    expect("all_to_all_v", out.data() + ro[k], rc[k] + 1, [&](std::size_t i) {
      return i == rc[k] ? 9 : pattern(static_cast<int>(k), i, salt + static_cast<unsigned>(me));
    });
  }
}

template <class T, class C>
void check_broadcast(C& comm, std::size_t n, int root, how h, unsigned salt) {
  auto x = data<T>(comm.rank(), n, salt);
  if (started(h)) {
    request r = comm.start_broadcast(x.data(), n, dtype_of<T>, root);
    r.wait();
  } else {
    comm.broadcast(x.data(), n, dtype_of<T>, root);
  }
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

/// Sizes at which a backend may change its algorithm, not multiples of anything.
template <class C>
void check_large(C& comm) {
  for (const std::size_t n : {std::size_t{40001}, std::size_t{300007}}) {
    for (const how h : {how::in_place, how::started}) {
      check_all_reduce<float>(comm, n, reduce_op::sum, h, 7);
      check_reduce_scatter<bf16>(comm, n, reduce_op::sum, h, 8);
      check_all_gather<float>(comm, n, h, 9);
      check_all_to_all<bf16>(comm, n, h, 10);
      check_all_to_all_v<std::int32_t>(comm, n / 4, h, 11);
      check_broadcast<double>(comm, n, 0, h, 12);
    }
    check_ring<float>(comm, n, 13);
  }
  // Bytes, each of which tells what it is, in pieces that are cut into whole units of work or have a byte more.
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

}  // namespace plait::testing::conformance_parts

#include "plait/core/macros_on.hpp"
