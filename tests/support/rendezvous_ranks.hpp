// Ranks in threads that rendezvous over TCP on this machine, and the result of each.
#pragma once

#include <doctest/doctest.h>
#include <netinet/in.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "plait/comm/launch/rendezvous.hpp"

namespace plait::test {

/// A port that was free a moment ago.
inline int free_port() {
  const nccl::detail::tcp_socket s = nccl::detail::listener(0);
  sockaddr_in6 address{};
  socklen_t length = sizeof address;
  REQUIRE(::getsockname(s.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
  return ntohs(address.sin6_port);  // both address families have the port at this offset
}

/// The payload that each rank received, or the text of its error after "error: ".
inline std::vector<std::string> outcomes(std::vector<nccl::launch_place> ranks, double deadline, int late_ms = 0) {
  std::vector<std::string> out(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        if (ranks[i].rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(late_ms));
        out[i] = nccl::share(ranks[i], ranks[i].rank == 0 ? std::string("id\0of rank 0", 12) : "", deadline);
      } catch (const error& e) {
        out[i] = std::string("error: ") + e.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return out;
}

inline std::vector<nccl::launch_place> places(int size, int port) {
  std::vector<nccl::launch_place> out;
  for (int r = 0; r < size; ++r) out.push_back({r, size, r, "127.0.0.1", port});
  return out;
}

}  // namespace plait::test
