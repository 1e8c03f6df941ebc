// program: communicators
// What a communicator of one's own takes: support/mailbox.hpp has six members, and passes the conformance suite. That
// it trains a Llama as one rank does is shown by parity/small_mailbox.cpp.
#include "support/mailbox.hpp"

#include <doctest/doctest.h>

#include <fstream>
#include <string>

#include "plait/comm/any_communicator.hpp"
#include "support/conformance.hpp"
#include "support/test_data.hpp"

using namespace plait;
using namespace plait::test;

namespace {

mailbox all_ranks(const std::shared_ptr<post_office>& office, int rank, int ranks) {
  return mailbox(office, "world", "world", rank, ranks);
}

}  // namespace

TEST_CASE("a communicator of six members conforms") {
  for (const int ranks : {1, 2, 3, 4})
    CHECK_NOTHROW(run_with_office(ranks, [&](const std::shared_ptr<post_office>& office, int rank) {
      mailbox comm = all_ranks(office, rank, ranks);
      testing::short_conformance(comm);
      check_nans(comm);
      any_communicator any(comm);
      testing::short_conformance(any, 2);
    }));
}

TEST_CASE("abort ends who waits") {
  CHECK_THROWS_WITH_AS(run_with_office(2,
                                       [](const std::shared_ptr<post_office>& office, int rank) {
                                         mailbox comm = all_ranks(office, rank, 2);
                                         if (rank == 1) return comm.abort("enough");
                                         comm.barrier();
                                       }),
                       "the post office is closed: enough", error);
}

TEST_CASE("it has fewer than 80 lines") {
  std::string line;
  std::ifstream in(plait::test::test_data() + "/../support/mailbox.hpp");
  REQUIRE(in.is_open());
  int lines = 0;
  bool inside = false;
  while (std::getline(in, line)) {
    inside = inside || line.find("class mailbox") == 0;
    const auto first = line.find_first_not_of(' ');
    lines += inside && first != line.npos && line.compare(first, 2, "//") != 0;
    inside = inside && line != "};";
  }
  MESSAGE("lines of class mailbox: " << lines);
  CHECK(lines > 20);
  CHECK(lines < 80);
}
