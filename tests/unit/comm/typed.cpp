// program: communicators
#include "plait/comm/typed.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/comm/world.hpp"
#include "plait/layout/apply.hpp"

using namespace plait;

namespace {

using pending = spec<seq, hidden, partial<tp>, invariant<dp>>;
using complete = spec<seq, hidden, replicate<tp>, invariant<dp>>;
using settled = spec<seq, hidden, invariant<dp, tp>>;
using scattered = spec<shard<seq, tp>, hidden, invariant<dp>>;
using pending_twice = spec<hidden, partial<dp, tp>>;
using scattered_twice = spec<shard<hidden, tp, dp>>;

// A typed group is a reference, without further data.
static_assert(sizeof(typed_group<any_communicator, dp, tp>) == sizeof(void*));
static_assert(std::is_trivially_copyable_v<part<float, pending>>);

template <class Body>
void on_two_by_two(const Body& body) {
  threads::run(4, [&](threads::communicator& comm) {
    world ranks(mesh<axis<dp, 2>, axis<tp, 2>>().shape(), any_communicator(comm));
    body(ranks);
  });
}
/// The place of this rank, with these global sizes.
rank_place at(const world& ranks, std::int64_t length, std::int64_t width) {
  return {ranks.shape(), ranks.rank(), sizes_of<seq, hidden>(length, width)};
}

}  // namespace

TEST_CASE("a typed all-reduce sums over its axes and changes the spec") {
  on_two_by_two([](world& ranks) {
    const auto t = static_cast<float>(ranks.coordinate(axis_of<tp>)),
               d = static_cast<float>(ranks.coordinate(axis_of<dp>));
    std::vector<float> x{1 + t, 10 * d}, y(2);
    const auto group = group_over<tp>(ranks);
    const rank_place here = at(ranks, 1, 2);
    const auto out = group.all_reduce(part<const float, pending>(here, x.data()), part<float, settled>(here, y.data()));
    static_assert(std::is_same_v<decltype(out), const part<float, settled>>);
    CHECK(out.unchecked() == y.data());
    CHECK(out.size() == 2);
    CHECK(y == std::vector<float>{3, 20 * d});

    const auto same = group.all_reduce<complete>(part<float, pending>(here, x.data()));
    static_assert(std::is_same_v<decltype(same), const part<float, complete>>);
    CHECK(same.unchecked() == x.data());
    CHECK(x == y);
  });
}

TEST_CASE("a reduction over two axes may name them in any order") {
  on_two_by_two([](world& ranks) {
    double x = static_cast<double>(1 << ranks.rank());
    const part<double, pending_twice> in(at(ranks, 1, 1), &x);
    group_over<tp, dp>(ranks).all_reduce<spec<hidden, replicate<dp, tp>>>(in);
    CHECK(x == 15);
    group_over<dp, tp>(ranks).all_reduce<spec<hidden, replicate<dp, tp>>>(in);
    CHECK(x == 60);
  });
}

TEST_CASE("all-gather and reduce-scatter of a first dim undo each other up to the group's size") {
  on_two_by_two([](world& ranks) {
    const auto group = group_over<tp>(ranks);
    const int t = static_cast<int>(ranks.coordinate(axis_of<tp>)), d = static_cast<int>(ranks.coordinate(axis_of<dp>));
    std::vector<int> own{100 * d + 10 * t, 100 * d + 10 * t + 1}, whole(4);
    const rank_place here = at(ranks, 2, 2);
    const auto y =
        group.all_gather(part<const int, scattered>(here, own.data()), part<int, complete>(here, whole.data()));
    static_assert(std::is_same_v<decltype(y), const part<int, complete>>);
    CHECK(whole == std::vector<int>{100 * d, 100 * d + 1, 100 * d + 10, 100 * d + 11});

    std::vector<int> back(2);
    group.reduce_scatter(part<const int, pending>(here, whole.data()), part<int, scattered>(here, back.data()));
    CHECK(back == std::vector<int>{2 * own[0], 2 * own[1]});
  });
}

TEST_CASE("parts are in the order of the axes that shard the dim, not in the mesh's") {
  on_two_by_two([](world& ranks) {
    const std::vector<float> x{0, 1, 2, 3};
    float mine = -1;
    const rank_place here = at(ranks, 1, 4);
    group_over<tp, dp>(ranks).reduce_scatter(part<const float, pending_twice>(here, x.data()),
                                             part<float, scattered_twice>(here, &mine));
    CHECK(mine == static_cast<float>(4 * ranks.shape().index_in(ranks.rank(), axis_list(axis_of<tp>, axis_of<dp>))));
  });
}

TEST_CASE("messages and broadcasts carry parts, and a part of other sizes is refused") {
  on_two_by_two([](world& ranks) {
    using stage = spec<seq, hidden, invariant<tp>>;  // the tensors of a stage have no axis dp
    const rank_place here = at(ranks, 1, 2), larger = at(ranks, 2, 2);
    const auto group = group_over<dp>(ranks);
    std::vector<float> x{1, 2}, y(4);
    if (ranks.coordinate(axis_of<dp>) == 0)
      group.send(part<const float, stage>(here, x.data()), 1);
    else
      CHECK(group.receive(part<float, stage>(here, y.data()), 0).unchecked()[1] == 2);
    x[0] = static_cast<float>(ranks.coordinate(axis_of<dp>));
    group.broadcast(part<float, settled>(here, x.data()), 1);
    CHECK(x[0] == 1);
    const auto over_tp = group_over<tp>(ranks);
    CHECK_THROWS_WITH_AS(
        over_tp.all_reduce(part<const float, pending>(here, x.data()), part<float, settled>(larger, y.data())),
        "all_reduce: in and out are parts of tensors of other sizes; make both for one context, or one rank_place",
        error);
    CHECK_THROWS_WITH_AS((part<float, scattered>(at(ranks, 1, 2), y.data())),
                         doctest::Contains("seq is 1, sharded over tp=2 = 2 ranks"), error);
    CHECK_THROWS_WITH_AS((part<float, pending>(here, static_cast<float*>(nullptr))),
                         doctest::Contains("the pointer is null; it must point to this rank's 2 elements"), error);
    CHECK((part<float, pending>(here, y).unchecked()) == y.data());  // a vector, whose size is known
    CHECK((part<const float, pending>(here, std::as_const(y)).size()) == 2);
    std::vector<float> narrow(1);
    CHECK_THROWS_WITH_AS((part<float, pending>(here, narrow)),
                         doctest::Contains("the array has 1 elements; this rank's part has 2"), error);
  });
}

namespace {

// A program without layers: its products, activation, bias and gradients, with typed groups between them.
using tokens_in = spec<seq, hidden, replicate<tp>>;
using first_weight = spec<shard<ffn, tp>, hidden>;
using inner = spec<seq, shard<ffn, tp>>;
using second_weight = spec<vocab, shard<ffn, tp>>;
using terms = spec<seq, vocab, partial<tp>>;
using result = spec<seq, vocab, replicate<tp>>;
using bias_of_rows = spec<vocab, replicate<tp>>;

/// y [rows, out] = x [rows, in] w [out, in]'.
void multiply(double* y, const double* x, const double* w, std::int64_t rows, std::int64_t in, std::int64_t out) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t o = 0; o < out; ++o) {
      y[r * out + o] = 0;
      for (std::int64_t i = 0; i < in; ++i) y[r * out + o] += x[r * in + i] * w[o * in + i];
    }
}
void square(double* y, const double* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = x[i] * x[i];
}

constexpr std::int64_t length = 3, width = 4, wide = 8, words = 5;

/// The output and the gradient of the second bias, whose loss is half the sum of squares.
std::vector<double> run_on(world& ranks) {
  const rank_place here{ranks.shape(), ranks.rank(), sizes_of<seq, hidden, ffn, vocab>(length, width, wide, words)};
  const auto numbers = [&]<class Spec>(std::vector<double>& room, Spec) {
    const box where = part_of<Spec>(here);
    for (std::int64_t i = 0; i < where.local[0]; ++i)
      for (std::int64_t j = 0; j < where.local[1]; ++j)
        room.push_back(0.1 * static_cast<double>((where.offset[0] + i) * 7 % 5 + (where.offset[1] + j) * 3 % 7) - 0.3);
    return part<const double, Spec>(here, room.data());
  };
  std::vector<double> room[3], a(length * wide), b(a), c(length * words), bias(words, 0.5), dbias(words);
  const auto x = numbers(room[0], tokens_in());
  const auto w1 = numbers(room[1], first_weight());
  const auto w2 = numbers(room[2], second_weight());
  const part<double, inner> h(here, a.data()), active(here, b.data());
  const part<double, terms> y_terms(here, c.data());
  const auto product_over = [](auto in_dim, auto out_dim) {
    return [=](double* out, const double* in, const double* w, const local_sizes& n) {
      multiply(out, in, w, n[dim_of<seq>], n[in_dim], n[out_dim]);
    };
  };
  apply(rule::contraction, product_over(dim_of<hidden>, dim_of<ffn>), h, x, w1);
  apply(rule::nonlinear, square, active, h);
  apply(rule::contraction, product_over(dim_of<ffn>, dim_of<vocab>), y_terms, active, w2);
  const part<double, result> y = group_over<tp>(ranks).all_reduce<result>(y_terms);
  const auto add_bias = [](double* out, const double* in) {
    for (std::int64_t i = 0; i < length * words; ++i) out[i] += in[i % words];
  };
  apply(rule::add, add_bias, y, part<const double, bias_of_rows>(here, bias.data()));
  // The gradient of y is y, partial as the dual of a replicated value: each rank has its share of it.
  const part<double, dual_t<result>> dy(here, b.data());
  apply(
      rule::sum, [](double* out, const double* in) { std::copy_n(in, length * words, out); },
      part<double, result>(here, b.data()), y);
  for (std::int64_t i = 0; i < dy.size(); ++i) dy.unchecked()[i] /= static_cast<double>(ranks.size());
  const part<double, dual_t<bias_of_rows>> db(here, dbias.data());
  apply(
      rule::reduction,
      [](double* out, const double* in) {
        for (std::int64_t i = 0; i < length * words; ++i) out[i % words] += in[i];
      },
      db, dy);
  group_over<tp>(ranks).all_reduce<spec<vocab, invariant<tp>>>(db);
  c.insert(c.end(), dbias.begin(), dbias.end());
  return c;
}

}  // namespace

TEST_CASE("a program's kernels between typed groups have the results of one rank on two") {
  std::vector<double> expected;
  for (const int n : {1, 2, 4})
    threads::run(n, [&](threads::communicator& comm) {
      world ranks(mesh<axis<tp>>(n).shape(), any_communicator(comm));
      const std::vector<double> made = run_on(ranks);
      if (n == 1) expected = made;
      for (std::size_t i = 0; i < made.size(); ++i) CHECK(made[i] == doctest::Approx(expected[i]).epsilon(1e-12));
    });
}

TEST_CASE("a kernel refuses arrays of other sizes, and arrays without memory") {
  const rank_place here{mesh<axis<tp, 1>>::static_shape(), 0, sizes_of<seq, hidden>(2, 3)};
  const rank_place longer{here.mesh, 0, sizes_of<seq, hidden>(4, 3)};
  using rows = spec<seq, hidden, invariant<tp>>;
  std::vector<float> x(12, 1.0f), y(12);
  bool called = false;
  const auto kernel = [&](float*, const float*) { called = true; };
  CHECK_THROWS_WITH_AS(
      apply(rule::nonlinear, kernel, part<float, rows>(longer, y.data()), part<const float, rows>(here, x.data())),
      "apply: seq is 2 in an operand and 4 in the output; make all arrays of a kernel for one context, or one "
      "rank_place",
      error);
  CHECK_THROWS_WITH_AS(apply(rule::nonlinear, kernel, part<float, rows>(), part<const float, rows>(here, x.data())),
                       "apply: an array of this kernel has no memory", error);
  CHECK_FALSE(called);
  // Two outputs, and further arguments.
  const part<float, rows> first(here, y.data()), second(here, y.data() + 6);
  apply(rule::nonlinear,
        bind_back([](float* a, float* b, const float* in, float factor) { a[0] = in[0] * factor, b[0] = 7; }, 3.0f),
        outputs(first, second), part<const float, rows>(here, x.data()));
  CHECK(y[0] == 3);
  CHECK(y[6] == 7);
  CHECK_THROWS_WITH_AS(local_sizes()[dim_of<ffn>], "local_sizes: no array of this kernel has the dim ffn", error);
  CHECK(first.extent<seq>() == 2);
  CHECK(first.extent(dim_of<hidden>) == 3);
  CHECK_THROWS_WITH_AS(first.extent(dim_of<ffn>), doctest::Contains("has no dim ffn"), error);
}
