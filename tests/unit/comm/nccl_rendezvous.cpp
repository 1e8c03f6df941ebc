// program: communicators
// Addresses and ranks from the environment, and the exchange of rank 0's bytes over TCP on this machine.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <ctime>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/launch/rendezvous.hpp"
#include "support/temp_folder.hpp"
#include "support/texts.hpp"

using namespace plait;

namespace {

using plait::test::has;
using plait::test::text_thrown_by;

int port_of(const nccl::detail::tcp_socket& s) {
  sockaddr_in6 address{};
  socklen_t length = sizeof address;
  REQUIRE(::getsockname(s.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
  return ntohs(address.sin6_port);  // both address families have the port at this offset
}
/// A port that was free a moment ago.
int free_port() { return port_of(nccl::detail::listener(0)); }

/// The payload of rank 0.
const std::string id("id\0of rank 0", 12);

/// The payload that each rank received, or the text of its error after "error: ".
std::vector<std::string> outcomes(std::vector<nccl::launch_place> ranks, double deadline, int late_ms = 0) {
  std::vector<std::string> out(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        if (ranks[i].rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(late_ms));
        out[i] = nccl::share(ranks[i], ranks[i].rank == 0 ? id : "", deadline);
      } catch (const error& e) {
        out[i] = std::string("error: ") + e.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return out;
}

std::vector<nccl::launch_place> places(int size, int port) {
  std::vector<nccl::launch_place> out;
  for (int r = 0; r < size; ++r) out.push_back({r, size, r, "127.0.0.1", port});
  return out;
}

using variables = std::map<std::string, std::string>;

nccl::launch_place parse(const variables& set) {
  return nccl::place_from([&](const char* name) {
    const auto found = set.find(name);
    return found == set.end() ? nullptr : found->second.c_str();
  });
}

std::string complaint(const variables& set) {
  return text_thrown_by([&] { parse(set); });
}

const variables torchrun = {
    {"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}};
const variables slurm = {{"SLURM_PROCID", "3"},
                         {"SLURM_NTASKS", "4"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_STEP_NODELIST", "gpu[03-05,9],login"},
                         {"SLURM_JOB_ID", "1234567"}};

variables with(variables set, const char* name, const char* value) {
  set[name] = value;
  return set;
}
variables without(variables set, const char* name) {
  set.erase(name);
  return set;
}

}  // namespace

TEST_CASE("torchrun's variables") {
  const auto p = parse(torchrun);
  CHECK(p.rank == 5);
  CHECK(p.size == 8);
  CHECK(p.local_rank == 1);
  CHECK(p.address == "node0");
  CHECK(p.port == 29500);
  CHECK(parse(with(torchrun, "TORCHELASTIC_USE_AGENT_STORE", "True")).port == 29501);
  CHECK(parse(with(torchrun, "TORCHELASTIC_USE_AGENT_STORE", "False")).port == 29500);
  CHECK(parse(with(torchrun, "SLURM_PROCID", "0")).rank == 5);
}

TEST_CASE("Slurm's variables") {
  const auto p = parse(slurm);
  CHECK(p.rank == 3);
  CHECK(p.size == 4);
  CHECK(p.local_rank == 1);
  CHECK(p.address == "gpu03");
  CHECK(p.port == 20000 + 1234567 % 20000);
  CHECK(parse(with(slurm, "MASTER_PORT", "777")).port == 777);
  CHECK(parse(with(slurm, "MASTER_ADDR", "10.0.0.1")).address == "10.0.0.1");
  for (const auto& [list, host] :
       variables{{"a", "a"}, {"a,b", "a"}, {"n[1-4]", "n1"}, {"n[007,9-12]x,m", "n007x"}, {"r[1-2]n[3-4]", "r1n3"}}) {
    CHECK(parse(with(slurm, "SLURM_STEP_NODELIST", list.c_str())).address == host);
  }
}

TEST_CASE("PLAIT_PORT is the port for every launcher") {
  CHECK(parse(with(torchrun, "PLAIT_PORT", "29600")).port == 29600);
  CHECK(parse(with(with(torchrun, "PLAIT_PORT", "29600"), "TORCHELASTIC_USE_AGENT_STORE", "True")).port == 29600);
  CHECK(parse(with(slurm, "PLAIT_PORT", "29600")).port == 29600);
  CHECK(parse(with(with(slurm, "MASTER_PORT", "777"), "PLAIT_PORT", "29600")).port == 29600);
  CHECK(has(complaint(with(torchrun, "PLAIT_PORT", "0")), "PLAIT_PORT is '0', must be a number of at least 1"));
}

TEST_CASE("errors name every missing or malformed variable") {
  for (const char* const name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    CHECK(has(complaint(without(torchrun, name)), std::string(name) + " is not set; torchrun"));
  }
  for (const char* const name : {"SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"}) {
    CHECK(has(complaint(without(slurm, name)), std::string(name) + " is not set; "));
  }
  CHECK(has(complaint(without(slurm, "SLURM_STEP_NODELIST")), "neither MASTER_ADDR nor SLURM_STEP_NODELIST is set"));
  CHECK(has(complaint(with(torchrun, "RANK", "8")), "RANK is '8', must be a number of at least 0 and at most 7"));
  CHECK(has(complaint(with(torchrun, "RANK", "2x")), "RANK is '2x'"));
  CHECK(has(complaint(with(torchrun, "WORLD_SIZE", "0")), "WORLD_SIZE is '0', must be a number of at least 1"));
  CHECK(has(complaint(with(torchrun, "MASTER_PORT", "99999")), "MASTER_PORT is '99999'"));
  CHECK(has(complaint(with(slurm, "SLURM_STEP_NODELIST", "n[1-")), "has an open bracket"));
  CHECK(has(complaint({}), "the environment names no ranks"));
}

TEST_CASE("the bytes of rank 0 reach every rank, in any order of arrival") {
  for (const int size : {1, 2, 5, 16}) {
    for (const int late : {0, 200}) {
      for (const std::string& got : outcomes(places(size, free_port()), 20, late)) CHECK(got == id);
    }
  }
}

TEST_CASE("the ranks that arrived name those that never did") {
  auto ranks = places(5, free_port());
  ranks.erase(ranks.begin() + 3, ranks.end());
  for (const std::string& got : outcomes(ranks, 3)) {
    CHECK(has(got, "not all 5 ranks came to 127.0.0.1:" + std::to_string(ranks[0].port)));
    CHECK(has(got, "(MASTER_ADDR, and MASTER_PORT or PLAIT_PORT) within 3 s"));
    CHECK(has(got, "missing ranks 3, 4"));
    CHECK(got.find("not an address of this host") == std::string::npos);
  }
  auto elsewhere = places(2, free_port());
  elsewhere.pop_back();
  elsewhere[0].address = "192.0.2.1";  // belongs to no host (RFC 5737)
  CHECK(has(
      outcomes(elsewhere, 0.3)[0],
      "missing rank 1; 192.0.2.1 is not an address of this host, on which rank 0 runs: MASTER_ADDR must name rank 0's "
      "host"));
}

TEST_CASE("rank 0 never arrives") {
  auto ranks = places(2, free_port());
  ranks.erase(ranks.begin());
  const std::string got = outcomes(ranks, 0.3)[0];
  CHECK(has(got, "rank 1 could not reach rank 0 at 127.0.0.1:" + std::to_string(ranks[0].port)));
  CHECK(has(got, "Connection refused"));
  CHECK(has(got, "MASTER_ADDR must name the host on which rank 0 runs"));
  ranks[0].address = "no.such.host.invalid";
  CHECK(has(outcomes(ranks, 0.3)[0], "could not reach rank 0 at no.such.host.invalid"));
}

TEST_CASE("ranks with contradictory settings end all ranks") {
  auto ranks = places(3, free_port());
  ranks[2].rank = 1;
  std::string all;
  for (const std::string& got : outcomes(ranks, 1)) {
    CHECK(got.find("error: ") == 0);
    all += got;
  }
  CHECK(has(all, "two processes say that they are rank 1 of 3"));
  ranks = places(2, free_port());
  ranks[1].size = 4;
  for (const std::string& got : outcomes(ranks, 1)) CHECK(has(got, "rank 1 has 4 ranks, but rank 0 has 2"));
}

TEST_CASE("the job's token comes from the launcher and its user") {
  CHECK(parse(torchrun).token.empty());
  CHECK(parse(with(torchrun, "TORCHELASTIC_RUN_ID", "job7")).token == "job7");
  CHECK(parse(with(with(torchrun, "TORCHELASTIC_RUN_ID", "job7"), "PLAIT_TOKEN", "secret")).token == "job7:secret");
  CHECK(parse(with(slurm, "SLURM_STEP_ID", "2")).token == "1234567.2");
  CHECK(parse(with(torchrun, "PLAIT_BIND_ADDRESS", "10.0.0.1")).bind == "10.0.0.1");
  const temp_folder folder;
  const std::string path = folder / "token";
  std::ofstream(path) << "from a file\n";
  CHECK(parse(with(torchrun, "PLAIT_TOKEN_FILE", path.c_str())).token == ":from a file");
  CHECK(has(complaint(with(with(torchrun, "PLAIT_TOKEN_FILE", path.c_str()), "PLAIT_TOKEN", "x")), "are both set"));
  CHECK(has(complaint(with(torchrun, "PLAIT_TOKEN_FILE", (path + "?").c_str())), "cannot be read or is empty"));
  CHECK(has(complaint(with(torchrun, "PLAIT_TOKEN", std::string(300, 'x').c_str())), "at most 200 are legal"));
}

TEST_CASE("a rank with another token is reported as missing, and a late one gets the reason") {
  auto ranks = places(3, free_port());
  for (auto& r : ranks) r.token = "job";
  ranks[2].token = "bob";
  const auto got = outcomes(ranks, 3);
  CHECK(has(got[0], "missing rank 2"));
  CHECK(has(got[0], "with another job's token were turned away"));
  CHECK(has(got[1], "missing rank 2"));
  CHECK(has(got[2], "as rank 0 of another job does"));

  ranks = places(3, free_port());
  std::vector<std::string> early;
  auto wrong = ranks[1];
  wrong.size = 5;
  std::thread others([&] { early = outcomes({ranks[0], wrong}, 20); });
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  const double begun = comm_clock();
  const auto late = outcomes({ranks[2]}, 20);
  CHECK(comm_clock() - begun < 10);  // before the deadline
  CHECK(has(late[0], "rank 1 has 5 ranks, but rank 0 has 3"));
  others.join();
  CHECK(has(early[0], "rank 1 has 5 ranks, but rank 0 has 3"));
}

TEST_CASE("rank 0 listens on the given address") {
  auto ranks = places(2, free_port());
  ranks[0].bind = "203.0.113.7";  // an address of no host
  ranks.pop_back();
  ranks[0].size = 2;
  const std::string text = outcomes(ranks, 1)[0];
  CHECK(has(text, "cannot listen on port "));
  CHECK(has(text, "of 203.0.113.7"));
  CHECK(has(text, "PLAIT_BIND_ADDRESS"));
}

TEST_CASE("processes with a group of torch.distributed rendezvous next to its store") {
  const auto store = nccl::detail::listener(0);  // occupies MASTER_PORT, and reads what arrives
  const std::string held = std::to_string(port_of(store)), port = std::to_string(free_port());
  const auto started = [&](const char* plait_port) {
    std::vector<nccl::launch_place> ranks;
    for (const char* const rank : {"0", "1"}) {
      variables set = {{"RANK", rank},
                       {"WORLD_SIZE", "2"},
                       {"LOCAL_RANK", rank},
                       {"MASTER_ADDR", "127.0.0.1"},
                       {"MASTER_PORT", held}};
      if (plait_port != nullptr) set["PLAIT_PORT"] = plait_port;
      ranks.push_back(parse(set));
    }
    return outcomes(ranks, 1);
  };
  const auto refused = started(nullptr);
  CHECK(has(refused[0], "rank 0 cannot listen on port " + held));
  for (const std::string& text : refused) CHECK(has(text, "choose a free port by PLAIT_PORT, the same for all ranks"));
  for (const std::string& got : started(port.c_str())) CHECK(got == id);
}

// Strangers on the port of the rendezvous: the bytes that they send, their number, and the time that they stay.
namespace {

using nccl::detail::tcp_socket;

tcp_socket connection(const nccl::launch_place& to) {
  std::string problem;
  tcp_socket s = nccl::detail::connected(to.address, to.port, comm_clock() + 10, problem);
  REQUIRE_MESSAGE(s, problem);
  return s;
}
tcp_socket greeted(const nccl::launch_place& by) {
  tcp_socket s = connection(by);
  REQUIRE(s.send_all(nccl::detail::hello_of(by), comm_clock() + 5));
  return s;
}
/// The payload of rank 0's answer, or nothing.
std::string answer_on(const tcp_socket& s, double seconds) {
  char answer[8 + 12];
  return s.receive_all(answer, sizeof answer, comm_clock() + seconds) ? std::string(answer + 8, 12) : "";
}
/// Whether the other side has closed the connection.
bool is_closed(const tcp_socket& s) {
  char byte = 0;
  return ::recv(s.get(), &byte, 1, MSG_PEEK) == 0;
}
std::size_t closed(const std::vector<tcp_socket>& all, std::size_t first, std::size_t last) {
  std::size_t out = 0;
  for (std::size_t i = first; i < last; ++i) out += is_closed(all[i]);
  return out;
}
/// Waits until `condition`, at most 10 s.
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
    holding = std::thread([this] { problem = text_thrown_by([&] { first.hold(id); }); });
  }
  /// Rank 1 connects; returns what it receives.
  std::string end() {
    const std::string got = outcomes({ranks[1]}, 20)[0];
    holding.join();
    CHECK(problem == "");
    return got;
  }
};

/// Limits the process to this number of unused descriptors.
class few_descriptors {
 public:
  explicit few_descriptors(rlim_t more) {
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before_) == 0);
    const int next = ::fcntl(0, F_DUPFD, 0);  // the lowest free one
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

TEST_CASE("strangers of every kind do not disturb ranks that connect") {
  auto ranks = places(3, free_port());
  for (auto& r : ranks) r.token = "job:secret";
  nccl::launch_place guess = ranks[1];
  std::vector<std::string> greetings{"", "GET / HTTP/1.1\r\n\r\n", "plaitid1" + std::string(8, '\0'),
                                     nccl::detail::hello_of(ranks[1]).substr(0, 12),
                                     nccl::detail::hello_of(ranks[1]) + "!"};
  for (const char* token : {"", "job:secreT", "job:secret and more"}) {  // 16 bytes longer than the first two
    for (const int size : {3, 4}) {
      guess.token = token;
      guess.size = size;
      greetings.push_back(nccl::detail::hello_of(guess));
    }
  }
  std::vector<std::string> zero;
  std::thread first([&] { zero = outcomes({ranks[0]}, 20); });
  std::vector<tcp_socket> open;
  std::string problem;
  const double until = comm_clock() + 5;
  for (const std::string& text : greetings) {
    tcp_socket s;
    while (!(s = nccl::detail::connected(ranks[1].address, ranks[1].port, until, problem)) && comm_clock() < until)
      std::this_thread::yield();
    REQUIRE(s);
    s.send_all(text, until);
    open.push_back(std::move(s));
  }
  for (int i = 0; i < 400; ++i)
    open.push_back(nccl::detail::connected(ranks[1].address, ranks[1].port, until, problem));  // and send nothing
  const double begun = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  CHECK(cpu_seconds() - begun < 0.3);  // rank 0 waits without spinning
  const auto rest = outcomes({ranks[1], ranks[2]}, 20);
  first.join();
  for (const std::string& got : {zero[0], rest[0], rest[1]}) CHECK(got == id);
}

TEST_CASE("a stranger gets no answer, and an occupied port is an error") {
  two_ranks two({});
  two.hold();
  const tcp_socket stranger = connection(two.ranks[1]);
  REQUIRE(stranger.send_all("GET / HTTP/1.1\r\n\r\n", comm_clock() + 1));
  char c = 0;
  CHECK_FALSE(stranger.receive_all(&c, 1, comm_clock() + 2));
  CHECK(two.end() == id);

  const tcp_socket taken = nccl::detail::listener(0);
  const nccl::launch_place first = places(2, port_of(taken))[0];
  CHECK(has(outcomes({first}, 1)[0],
            "rank 0 cannot listen on port " + std::to_string(first.port) + " of 127.0.0.1: Address already"));
}

TEST_CASE("rank 0 keeps a limited number of silent strangers, and closes the oldest") {
  two_ranks two({.most = 4, .seconds = 60});
  two.hold();
  std::vector<tcp_socket> silent;
  for (int i = 0; i < 10; ++i) silent.push_back(connection(two.ranks[1]));
  CHECK(comes_true([&] { return closed(silent, 0, 6) == 6; }));
  CHECK(closed(silent, 6, 10) == 0);
  CHECK(two.end() == id);
}

TEST_CASE("silent strangers are disconnected after a time, without other events") {
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
  const tcp_socket last = greeted(two.ranks[1]);
  {
    const few_descriptors two_more(2);
    two.hold();
    CHECK(answer_on(last, 15) == id);
  }
  two.holding.join();
  CHECK(two.problem == "");
}

TEST_CASE("rank 0 waits without spinning while its process has no free descriptor for the next rank") {
  two_ranks two({});
  const tcp_socket last = greeted(two.ranks[1]);
  {
    const few_descriptors none(0);
    const double begun = cpu_seconds();
    two.hold();
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    CHECK(cpu_seconds() - begun < 0.3);
  }
  two.holding.join();
  CHECK(two.problem == "");
  CHECK(answer_on(last, 5) == id);
}
