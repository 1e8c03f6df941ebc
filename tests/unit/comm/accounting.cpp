// program: communicators
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/comm/threads.hpp"
#include "plait/comm/world.hpp"
#include "support/slow_link.hpp"
#include "train_llama/observe/communication.hpp"

using namespace plait;

static_assert(wire_bytes(collective::all_gather, 4, 10) == 120);
static_assert(wire_bytes(collective::reduce_scatter, 4, 40) == 120);
static_assert(wire_bytes(collective::all_reduce, 4, 40) == 240);
static_assert(wire_bytes(collective::all_to_all, 4, 40) == 120);
static_assert(wire_bytes(collective::broadcast, 4, 40) == 120);
static_assert(wire_bytes(collective::send, 4, 40) == 40);
static_assert(wire_bytes(collective::receive, 4, 40) == 0 && wire_bytes(collective::barrier, 4, 0) == 0);
// An all-reduce is a reduce-scatter and an all-gather; a single rank sends nothing.
static_assert(wire_bytes(collective::all_reduce, 8, 800) ==
              wire_bytes(collective::reduce_scatter, 8, 800) + wire_bytes(collective::all_gather, 8, 100));
static_assert(wire_bytes(collective::all_reduce, 1, 800) == 0);

TEST_CASE("a ledger removes what was added after a copy of it, and keeps its rows") {
  threads::run(2, [](threads::communicator& world) {
    auto book = std::make_shared<ledger>();
    any_communicator all = any_communicator(world).counted(book, nullptr);
    any_communicator other = all.split(0, all.rank(), "other");
    float x[2] = {}, y[4] = {};
    all.all_gather(x, y, 2, dtype::f32);
    const ledger::row* const row = &book->of("world");
    const ledger before = *book;
    all.all_gather(x, y, 2, dtype::f32);
    all.all_reduce(x, x, 2, dtype::f32, reduce_op::sum);
    other.all_reduce(x, x, 2, dtype::f32, reduce_op::sum);
    CHECK(book->total().calls == 4);
    book->restore(before);
    CHECK(book->total().calls == 1);
    CHECK(book->total("world", collective::all_gather).wire == before.total().wire);
    CHECK(book->total().seconds == before.total().seconds);
    CHECK(book->of("world").in_flight.seconds() == row->in_flight.seconds());
    CHECK(&book->of("world") == row);
    CHECK(book->total("other").calls == 0);
    all.all_gather(x, y, 2, dtype::f32);
    other.all_reduce(x, x, 2, dtype::f32, reduce_op::sum);
    CHECK(book->total().calls == 3);
  });
}

TEST_CASE("a ledger counts calls and bytes per group and kind") {
  threads::run(4, [](threads::communicator& world) {
    auto book = std::make_shared<ledger>();
    auto events = std::make_shared<recorder>();
    any_communicator all = any_communicator(world).counted(book, events);
    auto pair = all.split(all.rank() / 2, 0, "tp");
    std::vector<float> x(400), y(400);
    all.all_reduce(x.data(), x.data(), 100, dtype::f32, reduce_op::sum);
    all.all_reduce(x.data(), x.data(), 10, dtype::f64, reduce_op::sum);
    all.reduce_scatter(x.data(), y.data(), 25, dtype::f32, reduce_op::sum);
    all.all_gather(x.data(), y.data(), 25, dtype::f32);
    all.all_to_all(x.data(), y.data(), 25, dtype::f32);
    pair.broadcast(x.data(), 7, dtype::bf16, 0);
    pair.barrier();
    {
      request r = pair.start_all_reduce(x.data(), x.data(), 50, dtype::f32, reduce_op::max);
      CHECK(book->total("tp", collective::all_reduce).calls == 1);
      CHECK(events->events().back().end == 0);
    }
    comm_group g(pair);
    g.send(x.data(), 5, dtype::i32, 1 - pair.rank());
    g.receive(y.data(), 5, dtype::i32, 1 - pair.rank());
    g.end();

    const auto a = book->total("world", collective::all_reduce);
    CHECK(a.calls == 2);
    CHECK(a.payload == 480);
    CHECK(a.wire == 2 * 3 * 480);
    CHECK(a.seconds > 0);
    CHECK(book->total("world", collective::reduce_scatter).wire == 3 * 400);
    CHECK(book->total("world", collective::all_gather).wire == 4 * 3 * 100);
    CHECK(book->total("world", collective::all_to_all).wire == 3 * 400);
    CHECK(book->total("tp", collective::broadcast).wire == 14);
    CHECK(book->total("tp", collective::barrier).calls == 1);
    CHECK(book->total("tp", collective::all_reduce).wire == 2 * 200);
    CHECK(book->total("tp", collective::send).wire == 20);
    CHECK(book->total("tp", collective::receive).wire == 0);
    CHECK(book->total("tp").calls == 5);
    CHECK(book->total().calls == 10);
    CHECK(book->total("pp").calls == 0);

    const auto list = events->events();
    CHECK(list.size() == 10);
    for (const auto& e : list) {
      CHECK(e.end >= e.start);
      CHECK(e.waited <= e.end - e.start + 1e-9);
    }
    CHECK(list[7].asynchronous);
    CHECK(list[7].bytes == 200);
    CHECK(events->labels()[static_cast<std::size_t>(list[7].label)] == "tp");
    book->clear();
    CHECK(book->total().calls == 0);
  });
}

TEST_CASE("all_to_all_v: the mean over the ranks is the traffic of the group") {
  std::uint64_t wire[3] = {}, sent[3] = {};
  threads::run(3, [&](threads::communicator& world) {
    auto book = std::make_shared<ledger>();
    any_communicator c = any_communicator(world).counted(book);
    const auto me = static_cast<std::size_t>(c.rank());
    const std::vector<std::size_t> send(3, me), receive{0, 1, 2}, send_at(3, 0), receive_at{0, 4, 8};
    std::vector<float> x(16), y(16);
    c.all_to_all_v(x.data(), send, send_at, y.data(), receive, receive_at, dtype::f32);
    wire[me] = book->total().wire;
    sent[me] = 2 * me * 4;
  });
  CHECK(wire[0] + wire[1] + wire[2] == 3 * (sent[0] + sent[1] + sent[2]));
}

TEST_CASE("gathers and scatters of unequal parts count the sent bytes, without padding") {
  threads::run(3, [&](threads::communicator& world) {
    auto book = std::make_shared<ledger>();
    auto events = std::make_shared<recorder>();
    any_communicator c = any_communicator(world).counted(book, events, "tp");
    const std::vector<std::size_t> parts{3, 2, 2}, places{0, 3, 5};
    const std::size_t own = parts[static_cast<std::size_t>(c.rank())];
    std::vector<float> x(7), y(7);
    c.all_gather_v(x.data(), y.data(), parts, places, dtype::f32);
    c.start_reduce_scatter_v(y.data(), x.data(), parts, places, dtype::f32, reduce_op::sum).wait();
    const ledger::entry gathered = book->total("tp", collective::all_gather),
                        scattered = book->total("tp", collective::reduce_scatter);
    CHECK(gathered.payload == own * 4);
    CHECK(scattered.payload == 7 * 4);
    for (const ledger::entry& e : {gathered, scattered}) {
      CHECK(e.calls == 1);
      CHECK(e.wire == 2 * 7 * 4);
    }
    const auto list = events->events();
    REQUIRE(list.size() == 2);
    CHECK(list[0].kind == collective::all_gather);
    CHECK(list[0].bytes == own * 4);
    CHECK(list[1].kind == collective::reduce_scatter);
    CHECK(list[1].asynchronous);
    CHECK(world.unequal_parts(1));
    CHECK(c.unequal_parts(1));
  });
}

TEST_CASE("a dry run asks the rule of a kind of communicators for unequal parts") {
  mesh_shape shape;
  shape.add(axis_of<tp>, 2);
  const axis_list axes(axis_of<tp>);
  world as_most = world::counting(shape);
  CHECK(as_most.group(axes).unequal_parts(1));
  world as_nccl = world::counting(shape, 0, {}, nccl::takes_unequal_parts);
  CHECK_FALSE(as_nccl.group(axes).unequal_parts(65535));
  CHECK(as_nccl.group(axes).unequal_parts(65536));
}

TEST_CASE("a cleared recorder does not match an earlier ticket with a new event") {
  recorder r;
  CHECK(r.label("dp") == r.label("dp"));
  for (std::uint64_t i = 0; i < 4; ++i) CHECK(r.add({0, collective::send, i, 0, 0, 0, true}) == i);
  r.clear();
  CHECK(r.events().empty());
  CHECK(r.find(2) == nullptr);
  for (std::uint64_t i = 0; i < 5; ++i) CHECK(r.add({0, collective::send, 10 + i, 0, 0, 0, true}) == 4 + i);
  CHECK(r.find(2) == nullptr);  // an operation in flight does not match an event of another one
  CHECK(r.find(9) == nullptr);
  REQUIRE(r.find(7) != nullptr);
  CHECK(r.find(7)->bytes == 13);
  REQUIRE(r.events().size() == 5);
  CHECK(r.events().front().bytes == 10);
  CHECK(r.events().back().bytes == 14);
}

TEST_CASE("the flight recorder keeps the last operations in order") {
  flight_recorder f;
  CHECK(f.text() == "nothing");
  for (std::uint64_t i = 0; i < 20; ++i) {
    const auto ticket = f.start("a group with a name that is much too long for it", i, "send", i * 1024);
    f.mark(ticket, i % 2 == 0 ? flight_recorder::state::completed : flight_recorder::state::waiting);
  }
  f.mark(0, flight_recorder::state::started);  // no longer in the ring: must not change another event
  CHECK(f.text(2) ==
        "send #18 on 'a group with a name that is muc' 18 KB completed; "
        "send #19 on 'a group with a name that is muc' 19 KB waiting");
  CHECK(bytes_text(0) == "0 B");
  CHECK(bytes_text(1536) == "1.5 KB");
  CHECK(bytes_text(std::uint64_t{3} << 20) == "3 MB");
  CHECK(bytes_text(std::uint64_t{100} << 20) == "100 MB");
}

TEST_CASE("waiting for a late rank counts as time in the communicator") {
  std::atomic<int> arrived = 0;
  threads::run(2, [&](threads::communicator& world) {
    auto book = std::make_shared<ledger>();
    auto events = std::make_shared<recorder>();
    any_communicator c = any_communicator(world).counted(book, events);
    const auto late = [&](int time) {  // rank 0 sleeps when rank 1 is about to wait for it
      if (c.rank() == 1) arrived = time;
      while (arrived < time) std::this_thread::yield();
      if (c.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    };
    float x = 1;
    late(1);
    c.all_reduce(&x, &x, 1, dtype::f32, reduce_op::sum);
    if (c.rank() == 1) CHECK(book->total("world", collective::all_reduce).seconds > 0.01);
    late(2);
    c.start_all_gather(&x, std::vector<float>(2).data(), 0, dtype::f32).wait();
    if (c.rank() == 1) {
      CHECK(book->total("world", collective::all_gather).seconds > 0.01);
      CHECK(events->events().back().waited > 0.01);
    }
  });
}

TEST_CASE("reductions: from the first rank to the last, for any number of ranks and elements") {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    std::vector<std::vector<float>> inputs;
    std::mt19937 random(7);
    for (int r = 0; r < ranks; ++r) {
      inputs.emplace_back(2500);
      for (float& v : inputs.back()) v = std::uniform_real_distribution<float>(-1, 1)(random);
    }
    threads::run(ranks, [&](threads::communicator& c) {
      for (const std::size_t n : {1, 63, 64, 65, 130, 1024, 2500}) {
        const auto me = static_cast<std::size_t>(c.rank());
        std::vector<float> out(n);
        c.all_reduce(inputs[me].data(), out.data(), n, dtype::f32, reduce_op::sum);
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < n; ++i) {
          float expected = inputs[0][i];
          for (std::size_t r = 1; r < inputs.size(); ++r) expected += inputs[r][i];
          if (expected != out[i]) ++wrong;
        }
        CHECK(wrong == 0);
      }
    });
  }
}

TEST_CASE("reductions: order of the ranks, rounding, NaN, wrap-around") {
  threads::run(3, [](threads::communicator& c) {
    const float terms[] = {1e8f, 1.0f, -1e8f};
    float x = terms[c.rank()];
    c.all_reduce(&x, &x, 1, dtype::f32, reduce_op::sum);
    CHECK(x == 0.0f);  // (1e8 + 1) - 1e8 in float; another order gives 1

    const float halves[] = {256.0f, 0.75f, 0.75f};  // summed in float: 257.5, rounded at the end to 258
    bf16 b = to_bf16(halves[c.rank()]);
    c.all_reduce(&b, &b, 1, dtype::bf16, reduce_op::sum);
    CHECK(to_float(b) == 258.0f);

    for (int who = 0; who < 3; ++who) {
      for (const reduce_op op : {reduce_op::max, reduce_op::min, reduce_op::sum}) {
        double d = c.rank() == who ? std::numeric_limits<double>::quiet_NaN() : 1.0;
        c.all_reduce(&d, &d, 1, dtype::f64, op);
        CHECK(std::isnan(d));
        bf16 n = to_bf16(c.rank() == who ? std::numeric_limits<float>::quiet_NaN() : 1.0f);
        c.all_reduce(&n, &n, 1, dtype::bf16, op);
        CHECK(std::isnan(to_float(n)));
      }
    }
    std::int32_t big = std::numeric_limits<std::int32_t>::max();
    c.all_reduce(&big, &big, 1, dtype::i32, reduce_op::sum);
    CHECK(big == 2147483645);  // 3 * (2^31 - 1) modulo 2^32
  });
}

namespace {

void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

/// In-process ranks that claim to enqueue operations, as ranks on a device do.
struct enqueuing : threads::communicator {
  enqueuing() = default;
  explicit enqueuing(threads::communicator ranks) : threads::communicator(std::move(ranks)) {}
  bool enqueues() const { return true; }
  enqueuing split(int color, int key, std::string_view name = {}) {
    return enqueuing(threads::communicator::split(color, key, name));
  }
};

}  // namespace

TEST_CASE("operations in flight together count once") {
  busy_time t;
  t.add(0, 1);
  CHECK(t.seconds() == 1);
  t.open();  // [2, 6], closed last
  t.add(2, 2.5);
  t.open();  // [3, 4]
  t.add(3, 3.5);
  t.add(5, 7);  // one call in the middle
  CHECK(t.seconds() == 1 + 0.5 + 0.5 + 2);
  t.add(3.5, 4);
  t.close();
  CHECK(t.seconds() == 1 + 0.5 + 1 + 2);
  t.add(2.5, 6);
  t.close();
  CHECK(t.seconds() == 1 + 5);
  t.add(8, 8);  // empty
  t.add(9, 10);
  CHECK(t.seconds() == 7);
  t.clear();
  CHECK(t.seconds() == 0);

  busy_time many;  // far more spans than the object keeps separately
  many.open();
  for (int i = 0; i < 5000; ++i) many.add(i, i + 0.5);
  CHECK(many.seconds() == 2500);
  many.add(0, 5000);
  many.close();
  CHECK(many.seconds() == 5000);
}

TEST_CASE("a request knows when its operation completed") {
  struct witness final : request_observer {
    request_times seen;
    void waited(std::uint64_t, const request_times& t) noexcept override { seen = t; }
  };
  threads::run(2, [](threads::communicator c) {
    const auto observer = std::make_shared<witness>();
    float x = 1;
    {
      request r = c.start_all_reduce(&x, &x, 1, dtype::f32, reduce_op::sum);
      r.observe(observer, 0, comm_clock());
      c.barrier();
      CHECK(r.completed_at() > 0);
      const double known = r.completed_at();
      sleep(0.02);
      r.wait();
      CHECK(observer->seen.completed == known);
      CHECK(observer->seen.waited_from - known >= 0.02);
      CHECK(observer->seen.waited_to >= observer->seen.waited_from);
    }
    request late;
    if (c.rank() == 1) {
      late = c.start_all_reduce(&x, &x, 1, dtype::f32, reduce_op::sum);
      late.observe(observer, 0, comm_clock());
      CHECK(late.completed_at() == 0);
      c.send(&x, 1, dtype::f32, 0, 0);
      late.wait();
      CHECK(observer->seen.completed == 0);  // not when the wait started
      CHECK(observer->seen.waited_to - observer->seen.waited_from > 0.01);
    } else {
      c.receive(&x, 1, dtype::f32, 1, 0);
      sleep(0.2);
      c.all_reduce(&x, &x, 1, dtype::f32, reduce_op::sum);
    }
  });
}

TEST_CASE("the hidden share of a started operation is the time without waiting") {
  // Each all-reduce takes 200 ms on the link; the rank computes during `hidden` of them.
  const auto measure = [](double hidden, bool started, std::vector<axis_times>& out) {
    threads::run(2, [&](threads::communicator c) {
      testing::slow_communicator slow(c, [](const call&, double, double now) { return now + 0.2; });
      mesh_shape shape;
      shape.add(axis_of<dp>, 2);
      world w(shape, any_communicator(slow));
      any_communicator& group = w.group(axis_list(axis_of<dp>));
      communication_clock clock(w.ledger());
      CHECK(clock.since().empty());
      float x = 1;
      for (int i = 0; i < 2; ++i) {
        if (started) {
          request r = group.start_all_reduce(&x, &x, 1, dtype::f32, reduce_op::sum);
          sleep(hidden);
          r.wait();
        } else {
          group.all_reduce(&x, &x, 1, dtype::f32, reduce_op::sum);
          sleep(hidden);
        }
      }
      sleep(0.05);  // neither in flight nor waited for
      if (c.rank() == 0) out = clock.since();
      clock.begin();
      CHECK(clock.since().empty());
    });
  };
  std::vector<axis_times> t;
  measure(0.1, true, t);
  REQUIRE(t.size() == 1);
  CHECK(t[0].axes == "dp");
  CHECK(t[0].seconds >= 0.4);
  CHECK(t[0].hidden() > 0.3);
  CHECK(t[0].hidden() < 0.9);
  measure(0.3, true, t);  // complete before the wait: in flight only as long as the link takes
  CHECK(t[0].hidden() > 0.9);
  CHECK(t[0].seconds < 0.55);
  measure(0.3, false, t);
  CHECK(t[0].waited >= 0.4);
  CHECK(t[0].hidden() == doctest::Approx(0).epsilon(1e-6));
}

TEST_CASE("operations that are only enqueued are not measured, and one rank communicates nothing") {
  threads::run(2, [](threads::communicator c) {
    const auto book = std::make_shared<ledger>();
    any_communicator all = any_communicator(enqueuing(c)).counted(book);
    any_communicator alone = all.split(all.rank(), 0, "alone");
    communication_clock clock(*book);
    float x = 1;
    alone.all_reduce(&x, &x, 1, dtype::f32, reduce_op::sum);
    CHECK(clock.since().empty());
    all.all_reduce(&x, &x, 1, dtype::f32, reduce_op::sum);
    const std::vector<axis_times> t = clock.since();
    REQUIRE(t.size() == 1);
    CHECK(std::isnan(t[0].seconds));
    CHECK(std::isnan(t[0].hidden()));
  });
}
