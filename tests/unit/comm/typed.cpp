// program: communicators
#include "plait/comm/typed.hpp"

#include <doctest/doctest.h>

#include <type_traits>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/comm/world.hpp"

using namespace plait;

namespace {

using pending = spec<seq, hidden, partial<tp>, invariant<dp>>;
using complete = spec<seq, hidden, replicate<tp>, invariant<dp>>;
using settled = spec<seq, hidden, invariant<dp, tp>>;
using scattered = spec<shard<seq, tp>, hidden, invariant<dp>>;
using pending_twice = spec<hidden, partial<dp, tp>>;
using scattered_twice = spec<shard<hidden, tp, dp>>;

// A reference, and nothing else.
static_assert(sizeof(typed_group<any_communicator, dp, tp>) == sizeof(void*));
static_assert(std::is_trivially_copyable_v<part<float, pending>>);

template <class Body>
void on_two_by_two(const Body& body) {
  threads::run(4, [&](threads::communicator& comm) {
    world ranks(mesh<axis<dp, 2>, axis<tp, 2>>().shape(), any_communicator(comm));
    body(ranks);
  });
}
/// Where this rank stands, with these global sizes.
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

TEST_CASE("a reduction over two axes may name them in either order") {
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

TEST_CASE("parts lie in the order of the axes that shard the dim, not in the mesh's") {
  on_two_by_two([](world& ranks) {
    const std::vector<float> x{0, 1, 2, 3};
    float mine = -1;
    const rank_place here = at(ranks, 1, 4);
    group_over<tp, dp>(ranks).reduce_scatter(part<const float, pending_twice>(here, x.data()),
                                             part<float, scattered_twice>(here, &mine));
    CHECK(mine == static_cast<float>(4 * ranks.shape().index_in(ranks.rank(), axis_list(axis_of<tp>, axis_of<dp>))));
  });
}

TEST_CASE("messages and broadcasts carry parts, and one that was made for other sizes is refused") {
  on_two_by_two([](world& ranks) {
    using stage = spec<seq, hidden, invariant<tp>>;  // a stage's tensors lie on the mesh without dp
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
    CHECK_THROWS_WITH_AS((part<float, scattered>(at(ranks, 3, 2), y.data())),
                         doctest::Contains("seq is 3, sharded over tp=2 = 2 ranks"), error);
    CHECK_THROWS_WITH_AS((part<float, pending>(here, static_cast<float*>(nullptr))),
                         doctest::Contains("the pointer is null; it must point to this rank's 2 elements"), error);
  });
}
