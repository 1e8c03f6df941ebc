// program: communicators
// Strangers on the port where ranks meet: what they send, how many they are, and how long they stay.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <ctime>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/launch/rendezvous.hpp"
#include "support/meeting_places.hpp"
#include "support/texts.hpp"

using namespace plait;

namespace {

using nccl::detail::tcp_socket;
using plait::test::free_port;
using plait::test::has;
using plait::test::outcomes;
using plait::test::places;

const std::string id("id\0of rank 0", 12);

tcp_socket connection(const nccl::launch_place& to) {
  std::string problem;
  tcp_socket s = nccl::detail::connected(to.address, to.port, comm_clock() + 10, problem);
  REQUIRE_MESSAGE(s, problem);
  return s;
}
/// Whether the other side has closed it.
bool is_closed(const tcp_socket& s) {
  char byte = 0;
  return ::recv(s.get(), &byte, 1, MSG_PEEK) == 0;
}
std::size_t closed(const std::vector<tcp_socket>& all, std::size_t first, std::size_t last) {
  std::size_t out = 0;
  for (std::size_t i = first; i < last; ++i) out += is_closed(all[i]);
  return out;
}
/// Waits until `condition`, for 10 s at most.
template <class F>
bool comes_true(const F& condition) {
  const double until = comm_clock() + 10;
  while (!condition() && comm_clock() < until) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return condition();
}
double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

/// Rank 0 of two in a thread, and the greeting of rank 1.
struct two_ranks {
  std::vector<nccl::launch_place> ranks = places(2, free_port());
  nccl::detail::rendezvous_server first;
  std::string problem;
  std::thread holding;

  explicit two_ranks(nccl::detail::connection_limits limits) : first(ranks[0], 20, limits) {}
  ~two_ranks() {
    if (holding.joinable()) holding.join();
  }
  void hold() {
    holding = std::thread([this] {
      try {
        first.hold(id);
      } catch (const error& e) {
        problem = e.what();
      }
    });
  }
  /// Rank 1 comes; what it gets.
  std::string end() {
    const std::string got = outcomes({ranks[1]}, 20)[0];
    holding.join();
    CHECK(problem == "");
    return got;
  }
};

/// Leaves the process at most so many descriptors that are not in use.
class few_descriptors {
 public:
  explicit few_descriptors(rlim_t more) {
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before_) == 0);
    const int next = ::fcntl(0, F_DUPFD, 0);  // the lowest that is free
    REQUIRE(next >= 0);
    ::close(next);
    rlimit few = before_;
    few.rlim_cur = static_cast<rlim_t>(next) + more;
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  }
  few_descriptors(const few_descriptors&) = delete;
  few_descriptors& operator=(const few_descriptors&) = delete;
  ~few_descriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

}  // namespace

TEST_CASE("strangers of every kind harm nobody while the ranks join") {
  const int port = free_port();
  auto ranks = places(3, port);
  for (auto& r : ranks) r.token = "job:secret";
  nccl::launch_place guess = ranks[1];
  std::vector<std::string> greetings{"", "GET / HTTP/1.1\r\n\r\n", "plaitid1" + std::string(8, '\0'),
                                     nccl::detail::hello_of(ranks[1]).substr(0, 12),
                                     nccl::detail::hello_of(ranks[1]) + "!"};
  for (const char* token : {"", "job:secreT", "job:secret and more"}) {  // 16 bytes more than the first two have
    for (const int size : {3, 4}) {
      guess.token = token;
      guess.size = size;
      greetings.push_back(nccl::detail::hello_of(guess));
    }
  }
  std::vector<std::string> zero, rest;
  std::thread first([&] { zero = outcomes({ranks[0]}, 20); });
  std::vector<nccl::detail::tcp_socket> open;
  std::string problem;
  const double until = comm_clock() + 5;
  for (const std::string& text : greetings) {
    nccl::detail::tcp_socket s;
    while (!(s = nccl::detail::connected(ranks[1].address, ranks[1].port, until, problem)) && comm_clock() < until)
      std::this_thread::yield();
    REQUIRE(s);
    s.send_all(text, until);
    open.push_back(std::move(s));
  }
  for (int i = 0; i < 400; ++i)
    open.push_back(nccl::detail::connected(ranks[1].address, ranks[1].port, until, problem));  // and say nothing
  const double cpu = static_cast<double>(std::clock());
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  CHECK((static_cast<double>(std::clock()) - cpu) / CLOCKS_PER_SEC < 0.3);  // rank 0 waits, and does not spin
  rest = outcomes({ranks[1], ranks[2]}, 20);
  first.join();
  for (const std::string& got : {zero[0], rest[0], rest[1]}) CHECK(got == std::string("id\0of rank 0", 12));
}

TEST_CASE("strangers on the port are sent away, and a taken port is said") {
  const int port = free_port();
  std::thread stranger([&] {
    nccl::launch_place p{1, 2, 1, "127.0.0.1", port};
    std::string problem;
    for (int i = 0; i < 100; ++i) {
      const auto s = nccl::detail::connected(p.address, p.port, comm_clock() + 1, problem);
      if (s) {
        s.send_all("GET / HTTP/1.1\r\n\r\n", comm_clock() + 1);
        char c = 0;
        CHECK_FALSE(s.receive_all(&c, 1, comm_clock() + 2));
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  auto ranks = places(2, port);
  std::vector<std::string> zero;
  std::thread first([&] { zero = outcomes({ranks[0]}, 20); });
  stranger.join();
  CHECK(outcomes({ranks[1]}, 20)[0] == std::string("id\0of rank 0", 12));
  first.join();
  CHECK(zero[0] == std::string("id\0of rank 0", 12));

  const auto taken = nccl::detail::listener(port);
  CHECK(has(outcomes({ranks[0]}, 1)[0],
            "rank 0 cannot listen on port " + std::to_string(port) + " of 127.0.0.1: Address already"));
}

TEST_CASE("of strangers that say nothing, rank 0 keeps so many, and the oldest make room") {
  two_ranks two({.most = 4, .seconds = 60});
  two.hold();
  std::vector<tcp_socket> silent;
  for (int i = 0; i < 10; ++i) silent.push_back(connection(two.ranks[1]));
  CHECK(comes_true([&] { return closed(silent, 0, 6) == 6; }));
  CHECK(closed(silent, 6, 10) == 0);
  CHECK(two.end() == id);
}

TEST_CASE("strangers that say nothing are sent away after a time, though nothing else happens") {
  two_ranks two({.most = 256, .seconds = 0.2});
  two.hold();
  std::vector<tcp_socket> silent;
  for (int i = 0; i < 3; ++i) silent.push_back(connection(two.ranks[1]));
  CHECK(comes_true([&] { return closed(silent, 0, 3) == 3; }));
  CHECK(two.end() == id);
}

TEST_CASE("more strangers than descriptors keep no rank out") {
  two_ranks two({.most = 256, .seconds = 60});
  std::vector<tcp_socket> silent;
  for (int i = 0; i < 6; ++i) silent.push_back(connection(two.ranks[1]));
  const tcp_socket last = connection(two.ranks[1]);
  REQUIRE(last.send_all(nccl::detail::hello_of(two.ranks[1]), comm_clock() + 5));
  {
    const few_descriptors two_more(2);
    two.hold();
    char answer[8 + 12];
    const bool answered = last.receive_all(answer, sizeof answer, comm_clock() + 15);
    CHECK(answered);
    CHECK((!answered || std::string(answer + 8, 12) == id));
  }
  two.holding.join();
  CHECK(two.problem == "");
}

TEST_CASE("rank 0 waits, and does not spin, while its process has no descriptor for the next rank") {
  two_ranks two({});
  const tcp_socket last = connection(two.ranks[1]);
  REQUIRE(last.send_all(nccl::detail::hello_of(two.ranks[1]), comm_clock() + 5));
  {
    const few_descriptors none(0);
    const double begun = cpu_seconds();
    two.hold();
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    CHECK(cpu_seconds() - begun < 0.3);
  }
  two.holding.join();
  CHECK(two.problem == "");
  char answer[8 + 12];
  REQUIRE(last.receive_all(answer, sizeof answer, comm_clock() + 5));
  CHECK(std::string(answer + 8, 12) == id);
}
