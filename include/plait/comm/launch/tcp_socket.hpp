// A TCP socket that does not block, and how one comes to be: by listening, or by connecting within a time. Test:
// tests/unit/comm/nccl_rendezvous.cpp.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "plait/comm/recorder.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::nccl::detail {

/// Owns a socket, which does not block.
class tcp_socket {
 public:
  tcp_socket() = default;
  explicit tcp_socket(int handle) : handle_(handle) {
    if (handle >= 0) ::fcntl(handle, F_SETFL, ::fcntl(handle, F_GETFL, 0) | O_NONBLOCK);
  }
  tcp_socket(tcp_socket&& other) noexcept : handle_(std::exchange(other.handle_, -1)) {}
  tcp_socket& operator=(tcp_socket&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~tcp_socket() {
    if (handle_ >= 0) ::close(handle_);
  }
  explicit operator bool() const { return handle_ >= 0; }
  int get() const { return handle_; }

  /// Until the socket can be read (or written), or the time is up; false then.
  bool ready(short events, double until) const {
    for (;;) {
      const double left = until - comm_clock();
      if (left <= 0) return false;
      pollfd p{handle_, events, 0};
      const int found = ::poll(&p, 1, static_cast<int>(std::min(left * 1000 + 1, 1e6)));
      if (found > 0) return true;
      if (found < 0 && errno != EINTR) return false;
    }
  }
  bool send_all(std::string_view bytes, double until) const {
    while (!bytes.empty()) {
      const ssize_t n = ::send(handle_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n > 0) {
        bytes.remove_prefix(static_cast<std::size_t>(n));
      } else if (n == 0 || (errno != EAGAIN && errno != EINTR) || !ready(POLLOUT, until)) {
        return false;
      }
    }
    return true;
  }
  bool receive_all(char* to, std::size_t bytes, double until) const {
    while (bytes != 0) {
      const ssize_t n = ::recv(handle_, to, bytes, 0);
      if (n > 0) {
        to += n;
        bytes -= static_cast<std::size_t>(n);
      } else if (n == 0 || (errno != EAGAIN && errno != EINTR) || !ready(POLLIN, until)) {
        return false;
      }
    }
    return true;
  }

 private:
  int handle_ = -1;
};

inline constexpr const char* free_port_hint =
    "choose a free port by PLAIT_PORT, the same for all ranks (MASTER_PORT is torch.distributed's own where that has "
    "made a process group by env://)";

/// Listens on one address of this host.
inline tcp_socket listener_on(const std::string& address, int port) {
  addrinfo wanted{}, *found = nullptr;
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_PASSIVE;
  const std::string number = std::to_string(port);
  const int code = ::getaddrinfo(address.c_str(), number.c_str(), &wanted, &found);
  std::string problem = code == 0 ? "" : ::gai_strerror(code);
  tcp_socket out;
  for (const addrinfo* a = found; a != nullptr && !out; a = a->ai_next) {
    tcp_socket s(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
    const int on = 1;
    if (s) ::setsockopt(s.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (s && ::bind(s.get(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(s.get(), 1024) == 0) {
      out = std::move(s);
    } else {
      problem = std::strerror(errno);
    }
  }
  if (found != nullptr) ::freeaddrinfo(found);
  if (!out)
    fail({"nccl: rank 0 cannot listen on port ", port, " of ", address, ": ", problem, "; ", free_port_hint,
          ", or an address of rank 0's host by PLAIT_BIND_ADDRESS"});
  return out;
}

/// Listens on all addresses.
inline tcp_socket listener(int port) {
  int problem = 0;
  for (const int family : {AF_INET6, AF_INET}) {
    tcp_socket s(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!s) {
      problem = errno;
      continue;
    }
    const int on = 1, off = 0;
    ::setsockopt(s.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    int bound = -1;
    if (family == AF_INET6) {
      ::setsockopt(s.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
      sockaddr_in6 any{};
      any.sin6_family = AF_INET6;
      any.sin6_addr = in6addr_any;
      any.sin6_port = htons(static_cast<std::uint16_t>(port));
      bound = ::bind(s.get(), reinterpret_cast<const sockaddr*>(&any), sizeof any);
    } else {
      sockaddr_in any{};
      any.sin_family = AF_INET;
      any.sin_addr.s_addr = htonl(INADDR_ANY);
      any.sin_port = htons(static_cast<std::uint16_t>(port));
      bound = ::bind(s.get(), reinterpret_cast<const sockaddr*>(&any), sizeof any);
    }
    if (bound == 0 && ::listen(s.get(), 1024) == 0) return s;
    problem = errno;
    if (problem == EADDRINUSE) break;
  }
  fail({"nccl: rank 0 cannot listen on port ", port, ": ", std::strerror(problem), "; ", free_port_hint});
}

/// Whether an address that the name stands for is one of this host's. Those of forwarding services are not.
inline bool is_of_this_host(const std::string& address) {
  addrinfo wanted{}, *found = nullptr;
  wanted.ai_socktype = SOCK_STREAM;
  if (::getaddrinfo(address.c_str(), nullptr, &wanted, &found) != 0) return false;
  bool own = false;
  for (const addrinfo* a = found; a != nullptr && !own; a = a->ai_next) {
    const tcp_socket s(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
    own = s && ::bind(s.get(), a->ai_addr, a->ai_addrlen) == 0;
  }
  if (found != nullptr) ::freeaddrinfo(found);
  return own;
}

/// A connection, or an empty socket and the reason in `problem`.
inline tcp_socket connected(const std::string& address, int port_number, double until, std::string& problem) {
  addrinfo wanted{}, *found = nullptr;
  wanted.ai_socktype = SOCK_STREAM;
  const std::string port = std::to_string(port_number);
  if (const int code = ::getaddrinfo(address.c_str(), port.c_str(), &wanted, &found); code != 0) {
    problem = ::gai_strerror(code);
    return {};
  }
  tcp_socket out;
  for (const addrinfo* a = found; a != nullptr && !out; a = a->ai_next) {
    tcp_socket s(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
    int status = 0;
    if (!s) {
      status = errno;
    } else if (::connect(s.get(), a->ai_addr, a->ai_addrlen) != 0) {
      status = errno;
      if (status == EINPROGRESS) {
        socklen_t length = sizeof status;
        if (!s.ready(POLLOUT, std::min(until, comm_clock() + 5))) {
          status = ETIMEDOUT;
        } else {
          ::getsockopt(s.get(), SOL_SOCKET, SO_ERROR, &status, &length);
        }
      }
    }
    if (status == 0) {
      out = std::move(s);
    } else {
      problem = std::strerror(status);
    }
  }
  ::freeaddrinfo(found);
  return out;
}

}  // namespace plait::nccl::detail

#include "plait/core/macros_on.hpp"
