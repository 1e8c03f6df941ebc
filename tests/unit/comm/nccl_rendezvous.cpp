// program: communicators
// Addresses and ranks from the environment, and the exchange of rank 0's bytes over TCP on this machine.
#include <doctest/doctest.h>

#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "plait/comm/launch/rendezvous.hpp"
#include "support/meeting_places.hpp"
#include "support/temp_folder.hpp"
#include "support/texts.hpp"

using namespace plait;

namespace {

using plait::test::free_port;
using plait::test::has;
using plait::test::outcomes;
using plait::test::places;

using variables = std::map<std::string, std::string>;

nccl::launch_place parse(const variables& set) {
  return nccl::place_from([&](const char* name) {
    const auto found = set.find(name);
    return found == set.end() ? nullptr : found->second.c_str();
  });
}

std::string complaint(const variables& set) {
  try {
    parse(set);
  } catch (const error& e) {
    return e.what();
  }
  return "";
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

TEST_CASE("PLAIT_PORT is the port, whoever started the processes") {
  CHECK(parse(with(torchrun, "PLAIT_PORT", "29600")).port == 29600);
  CHECK(parse(with(with(torchrun, "PLAIT_PORT", "29600"), "TORCHELASTIC_USE_AGENT_STORE", "True")).port == 29600);
  CHECK(parse(with(slurm, "PLAIT_PORT", "29600")).port == 29600);
  CHECK(parse(with(with(slurm, "MASTER_PORT", "777"), "PLAIT_PORT", "29600")).port == 29600);
  CHECK(has(complaint(with(torchrun, "PLAIT_PORT", "0")), "PLAIT_PORT is '0', must be a number of at least 1"));
}

TEST_CASE("every missing or malformed variable is named") {
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

TEST_CASE("the bytes of rank 0 reach every rank, whoever is first") {
  for (const int size : {1, 2, 5, 16}) {
    for (const int late : {0, 200}) {
      for (const std::string& got : outcomes(places(size, free_port()), 20, late)) {
        CHECK(got == std::string("id\0of rank 0", 12));
      }
    }
  }
}

TEST_CASE("ranks that never come are named on those that came") {
  auto ranks = places(5, free_port());
  ranks.erase(ranks.begin() + 3, ranks.end());
  for (const std::string& got : outcomes(ranks, 3)) {
    CHECK(has(got, "not all 5 ranks came to 127.0.0.1:" + std::to_string(ranks[0].port)));
    CHECK(has(got, "(MASTER_ADDR, and MASTER_PORT or PLAIT_PORT) within 3 s"));
    CHECK(has(got, "missing ranks 3, 4"));
    CHECK(got.find("no address of this host") == std::string::npos);
  }
  auto elsewhere = places(2, free_port());
  elsewhere.pop_back();
  elsewhere[0].address = "192.0.2.1";  // of no host (RFC 5737)
  CHECK(
      has(outcomes(elsewhere, 0.3)[0],
          "missing rank 1; 192.0.2.1 is no address of this host, on which rank 0 runs: MASTER_ADDR must name rank 0's "
          "host"));
}

TEST_CASE("rank 0 that never comes") {
  auto ranks = places(2, free_port());
  ranks.erase(ranks.begin());
  const std::string got = outcomes(ranks, 0.3)[0];
  CHECK(has(got, "rank 1 could not reach rank 0 at 127.0.0.1:" + std::to_string(ranks[0].port)));
  CHECK(has(got, "Connection refused"));
  CHECK(has(got, "MASTER_ADDR must name the host on which rank 0 runs"));
  ranks[0].address = "no.such.host.invalid";
  CHECK(has(outcomes(ranks, 0.3)[0], "could not reach rank 0 at no.such.host.invalid"));
}

TEST_CASE("ranks that contradict each other end all") {
  auto ranks = places(3, free_port());
  ranks[2].rank = 1;
  bool told = false;
  for (const std::string& got : outcomes(ranks, 1)) {
    CHECK(got.find("error: ") == 0);
    told = told || got.find("two processes say that they are rank 1 of 3") != std::string::npos;
  }
  CHECK(told);
  ranks = places(2, free_port());
  ranks[1].size = 4;
  const auto got = outcomes(ranks, 1);
  CHECK(has(got[0], "rank 1 has 4 ranks, but rank 0 has 2"));
  CHECK(has(got[1], "rank 1 has 4 ranks, but rank 0 has 2"));
}

TEST_CASE("the job's token comes from the launcher and from its user") {
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

TEST_CASE("a rank with another token is named as missing, and one that comes too late learns why") {
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
  CHECK(comm_clock() - begun < 10);  // not the deadline
  CHECK(has(late[0], "rank 1 has 5 ranks, but rank 0 has 3"));
  others.join();
  CHECK(has(early[0], "rank 1 has 5 ranks, but rank 0 has 3"));
}

TEST_CASE("rank 0 listens where it is told") {
  auto ranks = places(2, free_port());
  ranks[0].bind = "203.0.113.7";  // an address of no host
  ranks.pop_back();
  ranks[0].size = 2;
  const std::string text = outcomes(ranks, 1)[0];
  CHECK(has(text, "cannot listen on port "));
  CHECK(has(text, "of 203.0.113.7"));
  CHECK(has(text, "PLAIT_BIND_ADDRESS"));
}

TEST_CASE("processes whose group torch.distributed has made meet beside its store") {
  const auto store = nccl::detail::listener(0);  // which holds MASTER_PORT, and reads what comes
  sockaddr_in6 address{};
  socklen_t length = sizeof address;
  REQUIRE(::getsockname(store.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
  const std::string held = std::to_string(ntohs(address.sin6_port)), port = std::to_string(free_port());
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
  for (const std::string& got : started(port.c_str())) CHECK(got == std::string("id\0of rank 0", 12));
}
