// program: communicators
// The guide's communicator (examples/guide/mailbox.hpp) passes the conformance suite; the guide states its lines.
// parity/small_mailbox.cpp shows that it trains a Llama as one rank does.
#include "guide/mailbox.hpp"

#include <doctest/doctest.h>

#include "plait/comm/any_communicator.hpp"
#include "support/conformance.hpp"

using namespace plait;
using mail::mailbox;

TEST_CASE("a communicator of six members passes the conformance suite") {
  for (const int ranks : {1, 2, 3, 4})
    CHECK_NOTHROW(mail::run(ranks, [](mailbox comm) {
      testing::short_conformance(comm);
      test::check_nans(comm);
      any_communicator any(comm);
      testing::short_conformance(any, 2);
    }));
}

TEST_CASE("abort ends the ranks that wait") {
  CHECK_THROWS_WITH_AS(mail::run(2,
                                 [](mailbox comm) {
                                   if (comm.rank() == 1) return comm.abort("enough");
                                   comm.barrier();
                                 }),
                       "the post office is closed: enough", error);
}
