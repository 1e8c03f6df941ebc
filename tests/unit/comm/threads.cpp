// timeout: 300
// The threads backend: the conformance suite, on many ranks.
#include "plait/comm/threads.hpp"

#include <doctest/doctest.h>

#include <memory>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "support/conformance.hpp"

using namespace plait;

namespace {

// More repetitions take minutes with sanitizers, and find no further errors.
#ifdef PLAIT_TEST_SANITIZED
constexpr bool sanitized = true;
#else
constexpr bool sanitized = false;
#endif

}  // namespace

TEST_CASE("threads: conformance on any number of ranks") {
  const std::vector<int> sizes = sanitized ? std::vector{3} : std::vector{1, 2, 3, 4, 7, 16};
  for (const int ranks : sizes) {
    CAPTURE(ranks);
    CHECK_NOTHROW(threads::run(ranks, [](threads::communicator& comm) { test::conformance(comm); }));
  }
}

TEST_CASE("threads: conformance through any_communicator, counted or not") {
  CHECK_NOTHROW(threads::run(sanitized ? 2 : 4, [](const threads::communicator& comm) {
    any_communicator any(comm);
    if (!sanitized) test::conformance(any, 11);  // counted calls make the same ones
    auto book = std::make_shared<ledger>();
    any_communicator counted = any.counted(book, std::make_shared<recorder>());
    test::conformance(counted, 12);
    any_communicator twice(counted.counted(std::make_shared<ledger>()));
    test::check_types(twice, {0, 3, 257});
  }));
}

TEST_CASE("threads: random stress") {
  for (unsigned seed = 1; seed <= (sanitized ? 4 : 12); ++seed) {
    CAPTURE(seed);
    const int ranks = static_cast<int>(2 + seed * 7 % 9), steps = sanitized ? 150 : 300;
    CHECK_NOTHROW(
        threads::run(ranks, [&](threads::communicator& comm) { test::check_random(comm, seed * 100, steps); }));
  }
}

TEST_CASE("threads: many small operations reuse their memory and keep their order") {
  CHECK_NOTHROW(threads::run(8, [](threads::communicator& comm) {
    auto pair = comm.split(comm.rank() / 2, comm.rank());
    for (int i = 0; i < (sanitized ? 600 : 3000); ++i) {
      int x = i + comm.rank();
      comm.all_reduce(&x, &x, 1, dtype::i32, reduce_op::max);
      test::expect(x == i + 7, "max");
      int y = x;
      pair.all_reduce(&y, &y, 1, dtype::i32, reduce_op::sum);
      test::expect(y == 2 * x, "sum");
    }
  }));
}
