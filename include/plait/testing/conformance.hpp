// The conformance suite for communicators, for those who write one: every rank calls `testing::conformance(comm)`, and
// a difference throws `plait::error`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/testing/conformance_collectives.hpp"

namespace plait::testing::conformance_parts {

template <class C>
void check_splits(C& comm) {
  const int r = comm.rank(), p = comm.size();
  {  // all in one, reversed
    C all = comm.split(0, -r);
    expect(static_cast<bool>(all) && all.size() == p && all.rank() == p - 1 - r, "split of one color, reversed");
    check_all_gather<float>(all, 3, how::direct, 1);
  }
  {  // each alone
    C alone = comm.split(r, 0);
    expect(alone.size() == 1 && alone.rank() == 0, "split into single ranks");
    check_type<float>(alone, 5, 2);
  }
  {  // odd and even
    C half = comm.split(r % 2, r, "half");
    expect(half.rank() == r / 2 && half.size() == (p + 1 - r % 2) / 2, "split into odd and even ranks");
    expect(std::string(half.label()) == "half", "label of a split");
    check_type<float>(half, 100, 3);
    check_chain(half);
    C quarter = half.split(half.rank() % 2, 0);  // a split of a split
    check_all_reduce<double>(quarter, 17, reduce_op::sum, how::direct, 4);
    check_all_reduce<double>(half, 17, reduce_op::sum, how::direct, 5);
  }
  {  // only the last rank has no part
    C rest = comm.split(r == p - 1 ? -1 : 7, 0);
    expect(static_cast<bool>(rest) == (r != p - 1), "a negative color gives an empty communicator");
    if (rest) check_all_reduce<float>(rest, 9, reduce_op::max, how::direct, 6);
  }
  {
    C none = comm.split(-1, 0);
    expect(!none, "split without any color");
  }
}

/// A grid of two axes: requests of both directions and of the whole are in flight together.
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
    if (round % 2 == 0) check_all_reduce<float>(row, 10, reduce_op::min, how::direct, round);  // overtakes the others
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

/// More requests in flight than any window is likely to hold; waited for backwards, or by the destructor.
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

/// Random operations on the whole group and on two kinds of subgroups, the same ones on every rank.
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

/// Sums that round: equal on all ranks and in every repetition.
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

/// Arguments that are wrong on the face of it are refused before anything is sent, so the group stays usable.
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

/// Every operation and dtype once or twice, for places where each operation is slow.
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
