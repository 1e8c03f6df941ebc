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

// A reference and a pointer, and nothing else.
static_assert(sizeof(typed_group<any_communicator, dp, tp>) == sizeof(void*));
static_assert(sizeof(local_part<float, pending>) == sizeof(void*));
static_assert(std::is_trivially_copyable_v<local_part<float, pending>>);

template <class Body>
void on_two_by_two(const Body& body) {
  threads::run(4, [&](threads::communicator& comm) {
    world ranks(mesh<axis<dp, 2>, axis<tp, 2>>().shape(), any_communicator(comm));
    body(ranks);
  });
}

}  // namespace

TEST_CASE("a typed all-reduce sums over its axes and changes the spec") {
  on_two_by_two([](world& ranks) {
    const auto t = static_cast<float>(ranks.coordinate(axis_of<tp>)),
               d = static_cast<float>(ranks.coordinate(axis_of<dp>));
    std::vector<float> x{1 + t, 10 * d}, y(2);
    const auto group = group_over<tp>(ranks);
    const auto out =
        group.all_reduce(local_part<const float, pending>{x.data()}, local_part<float, settled>{y.data()}, 2);
    static_assert(std::is_same_v<decltype(out), const local_part<float, settled>>);
    CHECK(out.data == y.data());
    CHECK(y == std::vector<float>{3, 20 * d});

    const auto same = group.all_reduce<complete>(local_part<float, pending>{x.data()}, 2);
    static_assert(std::is_same_v<decltype(same), const local_part<float, complete>>);
    CHECK(same.data == x.data());
    CHECK(x == y);
  });
}

TEST_CASE("a reduction over two axes may name them in either order") {
  on_two_by_two([](world& ranks) {
    double x = static_cast<double>(1 << ranks.rank());
    const local_part<double, pending_twice> in{&x};
    group_over<tp, dp>(ranks).all_reduce<spec<hidden, replicate<dp, tp>>>(in, 1);
    CHECK(x == 15);
    group_over<dp, tp>(ranks).all_reduce<spec<hidden, replicate<dp, tp>>>(in, 1);
    CHECK(x == 60);
  });
}

TEST_CASE("all-gather and reduce-scatter of a first dim undo each other up to the group's size") {
  on_two_by_two([](world& ranks) {
    const auto group = group_over<tp>(ranks);
    const int t = static_cast<int>(ranks.coordinate(axis_of<tp>)), d = static_cast<int>(ranks.coordinate(axis_of<dp>));
    std::vector<int> part{100 * d + 10 * t, 100 * d + 10 * t + 1}, whole(4);
    const auto y =
        group.all_gather(local_part<const int, scattered>{part.data()}, local_part<int, complete>{whole.data()}, 2);
    static_assert(std::is_same_v<decltype(y), const local_part<int, complete>>);
    CHECK(whole == std::vector<int>{100 * d, 100 * d + 1, 100 * d + 10, 100 * d + 11});

    std::vector<int> back(2);
    group.reduce_scatter(local_part<const int, pending>{whole.data()}, local_part<int, scattered>{back.data()}, 2);
    CHECK(back == std::vector<int>{2 * part[0], 2 * part[1]});
  });
}

TEST_CASE("parts lie in the order of the axes that shard the dim, not in the mesh's") {
  on_two_by_two([](world& ranks) {
    const std::vector<float> x{0, 1, 2, 3};
    float mine = -1;
    group_over<tp, dp>(ranks).reduce_scatter(local_part<const float, pending_twice>{x.data()},
                                             local_part<float, scattered_twice>{&mine}, 1);
    CHECK(mine == static_cast<float>(4 * ranks.shape().index_in(ranks.rank(), axis_list(axis_of<tp>, axis_of<dp>))));
  });
}
