// program: communicators
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/threads.hpp"
#include "plait/comm/threads.ipp"  // what ranks share
#include "plait/comm/world.hpp"
#include "support/texts.hpp"

using namespace plait;
using rank_comm = threads::communicator;

namespace {

using plait::test::has;

/// The text of the error that ends a run; empty without one.
template <class F>
std::string text_of(int ranks, const F& body) {
  return plait::test::text_thrown_by([&] { threads::run(ranks, body); });
}

void add_up(rank_comm& c, std::size_t n = 4) {
  std::vector<float> x(n, 1.0f);
  c.all_reduce(x.data(), x.data(), n, dtype::f32, reduce_op::sum);
}

}  // namespace

TEST_CASE("a rank that throws ends the others, in every kind of wait") {
  std::atomic<int> stopped{0};
  const std::string text = text_of(5, [&](rank_comm& c) {
    add_up(c);
    float x = 0;
    try {
      if (c.rank() == 3) throw std::runtime_error("the data ran out");
      if (c.rank() == 0) c.receive(&x, 1, dtype::f32, 3);
      if (c.rank() == 1) c.send(&x, 1, dtype::f32, 3);
      add_up(c);
    } catch (const threads::stopped& e) {
      CHECK(has(e.what(), "was stopped: rank 3: the data ran out"));
      CHECK(has(e.what(), "rank " + std::to_string(c.rank()) + ": "));
      ++stopped;
      throw;
    }
  });
  CHECK(stopped == 4);
  CHECK(text.find("rank 3: the data ran out") == 0);
  CHECK(has(text, "rank 3: all_reduce #0 on 'world' 16 B completed"));
}

TEST_CASE("the rank's exception is nested, of any type") {
  try {
    threads::run(3, [](rank_comm& c) {
      if (c.rank() == 1) throw 42;
      c.barrier();
    });
    FAIL("no error");
  } catch (const error& e) {
    CHECK(has(e.what(), "rank 1: an exception that is not a std::exception"));
    CHECK_THROWS_AS(std::rethrow_if_nested(e), int);
  }
}

TEST_CASE("an exception with requests in flight reports the exception, not the requests") {
  for (int turn = 0; turn < 50; ++turn) {
    const std::string text = text_of(4, [](rank_comm& c) {
      std::vector<float> x(1000, 1.0f), y(4);
      request a = c.start_all_reduce(x.data(), x.data(), x.size(), dtype::f32, reduce_op::sum);
      request b = c.rank() == 2 ? c.start_receive(y.data(), 4, dtype::f32, 0, 9) : request();
      if (c.rank() == 2) throw std::runtime_error("out of memory");
      a.wait();
      c.barrier();
    });
    CHECK(text.find("rank 2: out of memory") == 0);
  }
}

TEST_CASE("buffers of a stopped rank exist until the others have finished with them") {
  for (int turn = 0; turn < 20; ++turn) {
    const std::string text = text_of(4, [&](rank_comm& c) {
      std::vector<float> x(400'000, 1.0f);
      request r = c.start_all_reduce(x.data(), x.data(), x.size(), dtype::f32, reduce_op::sum);
      if (c.rank() == turn % 4) c.abort("enough");
      r.wait();
      c.barrier();
    });
    CHECK(has(text, "rank " + std::to_string(turn % 4) + " called abort: enough"));
  }
}

TEST_CASE("a rank stopped inside shared work returns when no other uses its buffers") {
  for (int turn = 0; turn < 25; ++turn) {
    const std::string text = text_of(4, [&](rank_comm& c) {
      rank_comm part = c.split(c.rank() == 3 ? -1 : 0, 0);
      std::vector<float> x(1'000'000, 1.0f);
      c.barrier();
      if (c.rank() == 3) {
        std::this_thread::sleep_for(std::chrono::microseconds(turn * 60));
        c.abort("enough");
        return;
      }
      try {
        for (;;) part.all_reduce(x.data(), x.data(), x.size(), dtype::f32, reduce_op::max);
      } catch (const error&) {
        // Every element is 1 before and after. A writer that is still running would overwrite these values.
        std::fill(x.begin(), x.end(), 2.0f);
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        CHECK(std::all_of(x.begin(), x.end(), [](float v) { return v == 2.0f; }));
        throw;
      }
    });
    CHECK(has(text, "rank 3 called abort: enough"));
  }
}

TEST_CASE("a wait for an operation that all ranks have joined outlasts the failure of the run") {
  threads::detail::run_state run(2);
  threads::detail::operation op;
  op.parts.resize(2);
  op.world_ranks = {0, 1};
  op.begin({}, 0, nullptr);
  op.arrived = 2;
  std::atomic<int> result{-1};
  std::thread waiter([&] { result = run.wait(0, op, threads::detail::operation::finished, 0); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  run.fail("a fault elsewhere");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(result == -1);
  run.signal(op, threads::detail::operation::finished);
  waiter.join();
  CHECK(result == 1);
}

TEST_CASE("deadlock: a rank has returned, before the others wait or after that") {
  for (const int late : {0, 20}) {
    const std::string text = text_of(3, [&](rank_comm& c) {
      if (c.rank() != 1) return add_up(c);
      std::this_thread::sleep_for(std::chrono::milliseconds(late));
    });
    CHECK(text.find("deadlock: no rank can continue") == 0);
    for (const std::string rank : {"rank 0", "rank 2"})
      CHECK(has(text, rank + " waits in all_reduce(4 float, sum) #0 on 'world': missing ranks 1"));
    CHECK(has(text, "rank 1 has returned"));
  }
}

TEST_CASE("deadlock: send without receive, receive without send, wrong tag") {
  float x = 0;
  std::string text = text_of(2, [&](rank_comm& c) {
    if (c.rank() == 0) c.send(&x, 1, dtype::f32, 1);
  });
  CHECK(has(text, "rank 0 waits in send to rank 1 (1 float, tag 0) on 'world': the other side is missing"));
  text = text_of(2, [&](rank_comm& c) {
    if (c.rank() == 1) c.receive(&x, 1, dtype::f32, 0, 5);
    if (c.rank() == 0) c.send(&x, 1, dtype::f32, 1, 4);
  });
  CHECK(has(text, "rank 1 waits in receive from rank 0 (1 float, tag 5)"));
  CHECK(has(text, "rank 0 waits in send to rank 1 (1 float, tag 4)"));
}

TEST_CASE("deadlock: a ring of blocking sends, two groups in cross order, one rank alone") {
  std::string text = text_of(4, [](rank_comm& c) {
    int x = 0;
    c.send(&x, 1, dtype::i32, (c.rank() + 1) % 4);
    c.receive(&x, 1, dtype::i32, (c.rank() + 3) % 4);
  });
  CHECK(has(text, "rank 3 waits in send to rank 0"));
  text = text_of(2, [](rank_comm& c) {
    rank_comm a = c.split(0, 0, "a"), b = c.split(0, 0, "b");
    c.rank() == 0 ? a.barrier() : b.barrier();
    c.rank() == 0 ? b.barrier() : a.barrier();
  });
  CHECK(has(text, "rank 0 waits in barrier #0 on 'a': missing ranks 1"));
  CHECK(has(text, "rank 1 waits in barrier #0 on 'b': missing ranks 0"));
  text = text_of(1, [](rank_comm& c) {
    int x = 0;
    c.receive(&x, 1, dtype::i32, 0);
  });
  CHECK(has(text, "rank 0 waits in receive from rank 0"));
}

TEST_CASE("slow ranks are not a deadlock") {
  for (int turn = 0; turn < 10; ++turn) {
    CHECK_NOTHROW(threads::run(4, [&](rank_comm& c) {
      if (c.rank() == turn % 4) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      add_up(c);
      int x = 0;
      if (c.rank() == 0) c.send(&x, 1, dtype::i32, 3);
      if (c.rank() == 3) std::this_thread::sleep_for(std::chrono::milliseconds(2)), c.receive(&x, 1, dtype::i32, 0);
    }));
  }
}

TEST_CASE("mismatched collectives are found at once") {
  const auto mismatch = [](const auto& odd) {
    return text_of(3, [&](rank_comm& c) {
      std::vector<double> x(30);
      add_up(c);
      if (c.rank() != 2) {
        c.all_reduce(x.data(), x.data(), 10, dtype::f32, reduce_op::sum);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
        odd(c, x.data());
      }
    });
  };
  // Rank 2 is late, so it usually finds the mismatch. On a busy machine any rank may, and the text names it.
  const auto names_both = [&](const std::string& text, const std::string& odd_call) {
    const std::string head = "mismatched collective #1 on 'world': rank ", usual = "all_reduce(10 float, sum)";
    for (const std::string other : {"0", "1"})
      if (text.find(head + "2 calls " + odd_call + ", but rank " + other + " called " + usual) != std::string::npos ||
          text.find(head + other + " calls " + usual + ", but rank 2 called " + odd_call) != std::string::npos)
        return true;
    MESSAGE("rank 2's " << odd_call << " is not named\nin: " << text);
    return false;
  };
  CHECK(names_both(mismatch([](rank_comm& c, double* x) { c.all_reduce(x, x, 9, dtype::f32, reduce_op::sum); }),
                   "all_reduce(9 float, sum)"));
  CHECK(names_both(mismatch([](rank_comm& c, double* x) { c.all_reduce(x, x, 10, dtype::bf16, reduce_op::sum); }),
                   "all_reduce(10 bf16, sum)"));
  CHECK(names_both(mismatch([](rank_comm& c, double* x) { c.all_reduce(x, x, 10, dtype::f32, reduce_op::max); }),
                   "all_reduce(10 float, max)"));
  CHECK(names_both(mismatch([](rank_comm& c, double* x) { c.all_gather(x, x + 5, 3, dtype::i64); }),
                   "all_gather(3 int64)"));
  CHECK(names_both(mismatch([](rank_comm& c, double*) { c.barrier(); }), "barrier"));
  CHECK(names_both(mismatch([](rank_comm& c, double*) { auto s = c.split(0, 0); }), "split"));
}

TEST_CASE("mismatched roots, messages and counts per peer") {
  double x[8] = {};
  CHECK(has(text_of(2, [&](rank_comm& c) { c.broadcast(x + 4 * c.rank(), 4, dtype::f64, c.rank()); }),
            "broadcast(4 double, root "));
  CHECK(has(
      text_of(2, [&](rank_comm& c) { c.rank() == 0 ? c.send(x, 3, dtype::f32, 1) : c.receive(x, 4, dtype::f32, 0); }),
      "mismatched message on 'world', tag 0: rank 0 sends 3 float, but rank 1 receives 4 float"));
  CHECK(has(
      text_of(2, [&](rank_comm& c) { c.rank() == 0 ? c.send(x, 1, dtype::f64, 1) : c.receive(x, 1, dtype::i64, 0); }),
      "rank 0 sends 1 double, but rank 1 receives 1 int64"));
  CHECK(has(text_of(2,
                    [&](rank_comm& c) {
                      const std::size_t send[] = {0, 2}, none[] = {0, 0};
                      double a[4] = {}, b[4] = {};
                      c.rank() == 0 ? c.all_to_all_v(a, send, none, b, none, none, dtype::f64)
                                    : c.all_to_all_v(a, none, none, b, none, none, dtype::f64);
                    }),
            "in all_to_all_v rank 0 sends 2 double to rank 1, which expects 0"));
  CHECK(has(text_of(2,
                    [&](rank_comm& c) {
                      const std::size_t mine[] = {1, c.rank() == 0 ? 2u : 1u}, places[] = {0, 1};
                      double a[4] = {}, b[4] = {};
                      c.all_gather_v(a, b, mine, places, dtype::f64);
                    }),
            "in all_gather_v rank 1 sends 1 double to rank 0, which expects 2"));
}

TEST_CASE("abort through any_communicator; a stopped world refuses all calls") {
  const std::string text = text_of(3, [](rank_comm& c) {
    any_communicator any(c);
    if (c.rank() == 0) any.abort("the loss is not a number");
    CHECK_THROWS_AS(
        [&] {
          any.barrier();
          any.barrier();
        }(),
        threads::stopped);
    CHECK_THROWS_AS(any.barrier(), threads::stopped);
    CHECK_THROWS_AS(any.split(0, 0), threads::stopped);
  });
  CHECK(text.find("rank 0 called abort: the loss is not a number") == 0);
}

TEST_CASE("a mesh on an empty communicator is refused") {
  const char* text =
      "world: the communicator is empty; give it the one of threads::run, of mpi::run, or of nccl::connect or attach";
  CHECK_THROWS_WITH_AS(world(mesh<axis<dp>>{2}.shape(), any_communicator{}), text, error);
  CHECK_THROWS_WITH_AS(world(mesh<axis<dp>>{2}.shape(), rank_comm{}), text, error);
  const char* used =
      "a communicator that holds nothing was used: no group was given to it, or its rank has a negative color in the "
      "split";
  CHECK_THROWS_WITH_AS(any_communicator{}.barrier(), used, error);
  CHECK_THROWS_WITH_AS(rank_comm{}.barrier(), used, error);
}

TEST_CASE("polling a request that cannot complete ends with the error") {
  const std::string text = text_of(2, [](rank_comm& c) {
    if (c.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      throw std::runtime_error("gone");
    }
    float x = 0;
    request r = c.start_receive(&x, 1, dtype::f32, 1);
    while (!r.done()) {
    }
  });
  CHECK(text.find("rank 1: gone") == 0);
}

TEST_CASE("every rank throws: one error is reported; many failing runs end") {
  for (int turn = 0; turn < 200; ++turn) {
    const std::string text = text_of(6, [&](rank_comm& c) {
      auto half = c.split(c.rank() % 2, 0);
      for (int i = 0; i < 5; ++i) {
        add_up(half);
        if (i == turn % 5 && c.rank() == turn % 6) throw std::runtime_error("fault");
        add_up(c);
      }
    });
    CHECK(text.find("rank " + std::to_string(turn % 6) + ": fault") == 0);
  }
  CHECK(has(text_of(4, [](rank_comm&) { throw std::runtime_error("all"); }), ": all"));
  CHECK(has(text_of(0, [](rank_comm&) {}), "ranks is 0; at least 1"));
}
