// The exchange by which a few bytes of rank 0, the id of an NCCL communicator, reach every rank over TCP. Rank 0
// listens; every other rank connects and says who it is; when all have come, each gets the bytes, and if some never
// come, those that did learn which. It is no channel for tensors, and is over when `share` returns. Test:
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
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/launch/environment.hpp"
#include "plait/comm/recorder.hpp"
#include "plait/core/error.hpp"

namespace plait::nccl {
namespace detail {

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

// Messages: "plaitid1", rank and size as 4 bytes each, most significant first; the answer: 1 or 0 for yes or no, the
// length, and the bytes or the reason.
inline constexpr std::string_view hello_magic = "plaitid1";
inline constexpr std::size_t hello_bytes = 16;
inline constexpr std::size_t longest_answer = 1 << 16;

inline void put_word(std::string& to, std::uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) to += static_cast<char>(value >> shift & 0xff);
}
inline std::uint32_t word_at(const char* from) {
  std::uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = value << 8 | static_cast<unsigned char>(from[i]);
  return value;
}
inline std::string answer_of(bool yes, std::string_view text) {
  std::string out;
  put_word(out, yes ? 1 : 0);
  put_word(out, static_cast<std::uint32_t>(text.size()));
  return out.append(text);
}

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
  fail({"nccl: rank 0 cannot listen on port ", port, ": ", std::strerror(problem),
        "; choose a free port by MASTER_PORT"});
}

/// The side of rank 0.
class meeting {
 public:
  meeting(const launch_place& here, double deadline)
      : size_(here.size), seconds_(deadline), until_(comm_clock() + deadline), listener_(listener(here.port)) {
    here_.resize(static_cast<std::size_t>(size_));
  }

  void hold(std::string_view payload) {
    while (missing() != "") {
      if (comm_clock() >= until_) {
        refuse(cat({"nccl: not all ", size_, " ranks came within ", seconds_, " s: missing ", missing()}));
      }
      look();
    }
    const std::string answer = answer_of(true, payload);
    for (std::size_t r = 1; r < here_.size(); ++r) {
      if (!here_[r].send_all(answer, comm_clock() + 5)) {
        refuse(cat({"nccl: rank ", r, " left before it had the communicator's id"}));
      }
    }
  }

 private:
  struct newcomer {
    tcp_socket socket;
    std::array<char, hello_bytes> text;
    std::size_t have = 0;
  };

  std::string missing() const {
    std::string out;
    int named = 0, more = 0;
    for (std::size_t r = 1; r < here_.size(); ++r) {
      if (here_[r]) continue;
      if (++named > 16) {
        ++more;
      } else {
        append(out, {(out.empty() ? "rank " : ", rank "), r});
      }
    }
    return more == 0 ? out : cat({out, " and ", more, " more"});
  }

  [[noreturn]] void refuse(const std::string& why) {
    const std::string answer = answer_of(false, why);
    for (const tcp_socket& s : here_) {
      if (s) s.send_all(answer, comm_clock() + 1);
    }
    fail(why);
  }

  /// Waits for something to happen, and does what it asks for.
  void look() {
    std::vector<pollfd> watched{{listener_.get(), POLLIN, 0}};
    for (const newcomer& n : newcomers_) watched.push_back({n.socket.get(), POLLIN, 0});
    for (const tcp_socket& s : here_) {
      if (s) watched.push_back({s.get(), POLLIN, 0});
    }
    ::poll(watched.data(), watched.size(), static_cast<int>(std::clamp((until_ - comm_clock()) * 1000, 1.0, 1000.0)));
    for (tcp_socket& s : here_) {  // a rank that has gone again may come back
      char byte;
      if (s && ::recv(s.get(), &byte, 1, MSG_PEEK) == 0) s = tcp_socket();
    }
    for (newcomer& n : newcomers_) listen_to(n);
    std::erase_if(newcomers_, [](const newcomer& n) { return !n.socket; });
    for (;;) {
      tcp_socket s(::accept(listener_.get(), nullptr, nullptr));
      if (!s) break;
      newcomers_.push_back({std::move(s), {}, 0});
    }
  }

  void listen_to(newcomer& n) {
    const ssize_t got = ::recv(n.socket.get(), n.text.data() + n.have, hello_bytes - n.have, 0);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) n.socket = tcp_socket();
    if (got <= 0) return;
    n.have += static_cast<std::size_t>(got);
    if (std::string_view(n.text.data(), std::min(n.have, hello_magic.size())) != hello_magic.substr(0, n.have)) {
      n.socket = tcp_socket();  // no rank of ours
    }
    if (!n.socket || n.have < hello_bytes) return;
    const std::uint32_t rank = word_at(n.text.data() + 8), size = word_at(n.text.data() + 12);
    std::string why;
    if (size != static_cast<std::uint32_t>(size_)) {
      why = cat({"nccl: rank ", rank, " has ", size, " ranks, but rank 0 has ", size_});
    } else if (rank == 0 || rank >= size || here_[rank]) {
      why = cat({"nccl: two processes say that they are rank ", rank, " of ", size});
    }
    if (!why.empty()) {
      n.socket.send_all(answer_of(false, why), comm_clock() + 1);
      refuse(why);
    }
    here_[rank] = std::move(n.socket);
  }

  int size_;
  double seconds_, until_;
  tcp_socket listener_;
  std::vector<tcp_socket> here_;  ///< by rank; empty until the rank has come
  std::vector<newcomer> newcomers_;
};

/// A connection to rank 0, or an empty socket and the reason in `problem`.
inline tcp_socket connected(const launch_place& here, double until, std::string& problem) {
  addrinfo wanted{}, *found = nullptr;
  wanted.ai_socktype = SOCK_STREAM;
  const std::string port = std::to_string(here.port);
  if (const int code = ::getaddrinfo(here.address.c_str(), port.c_str(), &wanted, &found); code != 0) {
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

/// The side of the other ranks.
inline std::string ask(const launch_place& here, double deadline) {
  const std::string where = cat({here.address, ":", here.port});
  std::string hello(hello_magic), problem = "no answer";
  put_word(hello, static_cast<std::uint32_t>(here.rank));
  put_word(hello, static_cast<std::uint32_t>(here.size));
  const double until = comm_clock() + deadline;
  do {
    const tcp_socket s = connected(here, until, problem);
    std::array<char, 8> head;
    const double answer_until = comm_clock() + deadline + 2;  // rank 0, which was there first, gives up before
    if (s && s.send_all(hello, answer_until)) {
      problem = "it closed the connection without an answer, or gave none";
      if (s.receive_all(head.data(), head.size(), answer_until)) {
        const std::uint32_t yes = word_at(head.data()), length = word_at(head.data() + 4);
        if (yes > 1 || length > longest_answer)
          fail({"nccl: what listens on ", where, " is not rank 0 of this program"});
        std::string text(length, '\0');
        if (s.receive_all(text.data(), length, answer_until)) {
          if (yes == 0) fail(text);
          return text;
        }
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  } while (comm_clock() < until);
  fail({"nccl: rank ", here.rank, " could not reach rank 0 at ", where, " within ", deadline, " s: ", problem});
}

}  // namespace detail

/// Collective over all processes of a launch: returns rank 0's `payload` (at most 64 KB) on every rank. Throws
/// `plait::error` after `deadline` seconds: on rank 0 and those that reached it with the ranks that never came, on the
/// others with why rank 0 was not reached; at once where two processes claim one rank or the sizes differ.
inline std::string share(const launch_place& here, const std::string& payload, double deadline) {
  if (payload.size() > detail::longest_answer) fail("nccl: share takes at most 64 KB");
  if (here.size == 1) return payload;
  if (here.rank != 0) return detail::ask(here, deadline);
  detail::meeting(here, deadline).hold(payload);
  return payload;
}

}  // namespace plait::nccl
