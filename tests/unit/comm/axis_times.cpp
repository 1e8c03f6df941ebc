// program: communicators
// What is under way, what is waited for, and what share of it is hidden.
#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#include "plait/comm/metrics.hpp"
#include "plait/comm/threads.hpp"
#include "plait/comm/world.hpp"
#include "support/slow_link.hpp"
#include "train_llama/observe/communication.hpp"

using namespace plait;

namespace {

void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

/// In-process ranks that say of themselves what those on a device do.
struct enqueuing : verbs<enqueuing> {
  enqueuing() = default;
  threads::communicator inner;

  explicit operator bool() const { return static_cast<bool>(inner); }
  int rank() const { return inner.rank(); }
  int size() const { return inner.size(); }
  const std::string& label() const { return inner.label(); }
  bool enqueues() const { return true; }
  request start(const call& c) { return inner.start(c); }
  void run(const call& c) { inner.run(c); }
  enqueuing split(int color, int key, std::string_view name = {}) {
    enqueuing out;
    out.inner = inner.split(color, key, name);
    return out;
  }
  void abort(const std::string& why) noexcept { inner.abort(why); }
};

}  // namespace

TEST_CASE("what is under way together counts once") {
  busy_time t;
  t.add(0, 1);
  CHECK(t.seconds() == 1);
  t.open();  // [2, 6], told last
  t.add(2, 2.5);
  t.open();  // [3, 4]
  t.add(3, 3.5);
  t.add(5, 7);  // a call meanwhile
  CHECK(t.seconds() == 1 + 0.5 + 0.5 + 2);
  t.add(3.5, 4);
  t.last();
  CHECK(t.seconds() == 1 + 0.5 + 1 + 2);
  t.add(2.5, 6);
  t.last();
  CHECK(t.seconds() == 1 + 5);
  t.add(8, 8);  // nothing
  t.add(9, 10);
  CHECK(t.seconds() == 7);
  t.clear();
  CHECK(t.seconds() == 0);

  busy_time many;  // far more spans than are kept apart
  many.open();
  for (int i = 0; i < 5000; ++i) many.add(i, i + 0.5);
  CHECK(many.seconds() == 2500);
  many.add(0, 5000);
  many.last();
  CHECK(many.seconds() == 5000);
}

TEST_CASE("a request knows when its operation was complete") {
  struct witness final : request_observer {
    request_times seen;
    void waited(std::uint64_t, const request_times& t) noexcept override { seen = t; }
  };
  threads::run(2, [](threads::communicator c) {
    const auto told = std::make_shared<witness>();
    float x = 1;
    {
      request r = c.start_all_reduce(&x, &x, 1, dtype::f32, reduce_op::sum);
      r.observe(told, 0, comm_clock());
      c.barrier();
      CHECK(r.completed_at() > 0);
      const double known = r.completed_at();
      sleep(0.02);
      r.wait();
      CHECK(told->seen.completed == known);
      CHECK(told->seen.waited_from - known >= 0.02);
      CHECK(told->seen.waited_to >= told->seen.waited_from);
    }
    request late;
    if (c.rank() == 1) {
      late = c.start_all_reduce(&x, &x, 1, dtype::f32, reduce_op::sum);
      late.observe(told, 0, comm_clock());
      CHECK(late.completed_at() == 0);
      c.send(&x, 1, dtype::f32, 0, 0);
      late.wait();
      CHECK(told->seen.completed == 0);  // it was not when waiting began
      CHECK(told->seen.waited_to - told->seen.waited_from > 0.01);
    } else {
      c.receive(&x, 1, dtype::f32, 1, 0);
      sleep(0.2);
      c.all_reduce(&x, &x, 1, dtype::f32, reduce_op::sum);
    }
  });
}

TEST_CASE("the hidden share of a started operation is what was not waited for") {
  // Each all-reduce takes 200 ms on the link, of which the rank computes `hidden`.
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
      sleep(0.05);  // neither under way nor waited for
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
  measure(0.3, true, t);  // over before anybody waits: no longer under way than the link says
  CHECK(t[0].hidden() > 0.9);
  CHECK(t[0].seconds < 0.55);
  measure(0.3, false, t);
  CHECK(t[0].waited >= 0.4);
  CHECK(t[0].hidden() == doctest::Approx(0).epsilon(1e-6));
}

TEST_CASE("what only enqueues is not measured, and one rank communicates nothing") {
  threads::run(2, [](threads::communicator c) {
    enqueuing e;
    e.inner = c;
    const auto book = std::make_shared<ledger>();
    any_communicator all = any_communicator(e).counted(book);
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
