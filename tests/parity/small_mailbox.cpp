// timeout: 120
// program: small
// A user-defined communicator (examples/guide/mailbox.hpp) trains a Llama as one rank does.
#include <doctest/doctest.h>

#include "guide/mailbox.hpp"
#include "support/more_strategies.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// Launches ranks that communicate by mailboxes.
struct by_mail {
  template <class F>
  void operator()(int ranks, F&& body) const {
    mail::run(ranks, [&](mail::mailbox comm) {
      cpu device;
      body(comm, device);
    });
  }
};

}  // namespace

TEST_CASE("a communicator of six members trains a Llama as one rank does") {
  CHECK(check_llama<megatron_sp>({{1, 1, 2, 1}, {2, 1, 2, 1}}, tiny_llama(), {}, by_mail{}).text() == "");
}
