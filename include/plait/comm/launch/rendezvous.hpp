// How a process under torchrun or Slurm finds its rank, and how all processes get some bytes of rank 0 over TCP. The
// bytes are NCCL's id; this header does not need NCCL. Test: tests/unit/comm/nccl_rendezvous.cpp.
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
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/deadline.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::nccl {

/// A process among those that a launcher has started, and the address where rank 0 listens.
struct launch_place {
  int rank = 0;
  int size = 1;
  int local_rank = 0;   ///< among the processes of this host: the index of its GPU
  std::string address;  ///< host of rank 0: a name or an address
  int port = 0;         ///< port on which rank 0 listens
  std::string token{};  ///< a secret of the job: rank 0 refuses connections without it
  std::string bind{};   ///< address on which rank 0 listens; empty: all, or loopback if `address` is loopback
};

namespace detail {

inline constexpr int any_number = std::numeric_limits<int>::max();
inline constexpr std::size_t most_token_bytes = 200;

/// Returns the value of an environment variable, empty if it is not set.
template <class Get>
std::string_view value_of(const Get& get, const char* name) {
  const char* const text = get(name);
  return text == nullptr ? "" : text;
}

/// Returns the number in an environment variable. `who` is the program that sets the variable.
template <class Get>
int number_in(const Get& get, const char* name, const char* who, int least, int most) {
  const std::string_view text = value_of(get, name);
  if (text.empty()) fail({"nccl: ", name, " is not set; ", who, " sets it"});
  int value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, problem] = std::from_chars(text.data(), end, value);
  if (problem != std::errc() || stop != end || value < least || value > most) {
    fail({"nccl: ", name, " is '", text, "', must be a number of at least ", least,
          most == any_number ? "" : cat({" and at most ", most})});
  }
  return value;
}

/// The first host of a list in Slurm's notation: "gpu[03-05,9],login" gives "gpu03".
inline std::string first_host(std::string_view list) {
  std::string host;
  for (std::size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      host += list[i];
      continue;
    }
    const std::size_t close = list.find(']', i);
    if (close == std::string_view::npos) fail({"nccl: the list of hosts '", list, "' has an open bracket"});
    const std::string_view inside = list.substr(i + 1, close - i - 1);
    host += inside.substr(0, inside.find_first_of("-,"));
    i = close;
  }
  if (host.empty()) fail({"nccl: the list of hosts '", list, "' names none"});
  return host;
}

/// The name of the job and its secret. No process of another job has both.
template <class Get>
std::string token_in(const Get& get) {
  const auto value = [&](const char* name) { return std::string(value_of(get, name)); };
  std::string job = value("TORCHELASTIC_RUN_ID"), secret = value("PLAIT_TOKEN");
  if (job.empty() && !value("SLURM_JOB_ID").empty()) job = value("SLURM_JOB_ID") + "." + value("SLURM_STEP_ID");
  if (const std::string path = value("PLAIT_TOKEN_FILE"); !path.empty()) {
    if (!secret.empty()) fail("nccl: PLAIT_TOKEN and PLAIT_TOKEN_FILE are both set; one of them is needed");
    std::FILE* const file = std::fopen(path.c_str(), "rb");
    char bytes[256];
    const std::size_t n = file == nullptr ? 0 : std::fread(bytes, 1, sizeof bytes, file);
    if (file != nullptr) std::fclose(file);
    secret.assign(bytes, n);
    while (!secret.empty() && (secret.back() == '\n' || secret.back() == '\r')) secret.pop_back();
    if (secret.empty()) fail({"nccl: PLAIT_TOKEN_FILE is '", path, "', which cannot be read or is empty"});
  }
  const std::string token = secret.empty() ? job : job + ":" + secret;
  if (token.size() > most_token_bytes)
    fail({"nccl: the token of the job has ", token.size(), " bytes, at most ", most_token_bytes,
          " are legal: shorten PLAIT_TOKEN, or what PLAIT_TOKEN_FILE names"});
  return token;
}

}  // namespace detail

/// Reads the environment; `get(name)` is a variable's value or null. It reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
/// and MASTER_PORT, as torchrun sets them, else SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID. Under Slurm, rank 0's
/// host is MASTER_ADDR or the first of the step's node list. The port is MASTER_PORT, or is derived from the job's
/// number, so that two jobs on a host use different ports. The token is the job's name (TORCHELASTIC_RUN_ID, or Slurm's
/// job and step) and the secret in PLAIT_TOKEN, or in the file that PLAIT_TOKEN_FILE names. PLAIT_BIND_ADDRESS is the
/// address on which rank 0 listens. Throws `plait::error` that names a missing or malformed variable.
///
/// If PLAIT_PORT is set, it is the port, under every launcher. Set it to a free port of rank 0's host if
/// torch.distributed, or a store of the program, listens on MASTER_PORT. It must be equal on all ranks. If
/// TORCHELASTIC_USE_AGENT_STORE is "True", torchrun's agent listens on MASTER_PORT, and the next port is used.
template <class Get>
launch_place place_from(const Get& get) {
  launch_place out;
  out.token = detail::token_in(get);
  out.bind = detail::value_of(get, "PLAIT_BIND_ADDRESS");
  const auto set = [&](const char* name) { return !detail::value_of(get, name).empty(); };
  const bool torchrun = set("RANK") || set("WORLD_SIZE");
  if (!torchrun && !set("SLURM_PROCID")) {
    fail(
        "nccl: the environment names no ranks: neither RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT "
        "(torchrun) nor SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID (srun) are set");
  }
  const auto number = [&](const char* of_torchrun, const char* of_slurm, int least, int most) {
    const char* const who = torchrun ? "torchrun or another launcher" : "srun";
    return detail::number_in(get, torchrun ? of_torchrun : of_slurm, who, least, most);
  };
  out.size = number("WORLD_SIZE", "SLURM_NTASKS", 1, detail::any_number);
  out.rank = number("RANK", "SLURM_PROCID", 0, out.size - 1);
  out.local_rank = number("LOCAL_RANK", "SLURM_LOCALID", 0, out.size - 1);
  if (set("MASTER_ADDR")) {
    out.address = get("MASTER_ADDR");
  } else if (torchrun) {
    fail("nccl: MASTER_ADDR is not set; torchrun or another launcher sets it");
  } else {
    for (const char* const name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
      if (out.address.empty() && set(name)) out.address = detail::first_host(get(name));
    }
    if (out.address.empty()) fail("nccl: neither MASTER_ADDR nor SLURM_STEP_NODELIST is set; srun sets the latter");
  }
  const bool taken = torchrun && detail::value_of(get, "TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (set("PLAIT_PORT"))
    out.port = number("PLAIT_PORT", "PLAIT_PORT", 1, 65535);
  else if (torchrun || set("MASTER_PORT"))
    out.port = number("MASTER_PORT", "MASTER_PORT", 1, taken ? 65534 : 65535) + (taken ? 1 : 0);
  else
    out.port = 20000 + detail::number_in(get, "SLURM_JOB_ID", "Slurm", 0, detail::any_number) % 20000;
  return out;
}

/// Reads the environment of this process.
inline launch_place place_from_environment() {
  return place_from([](const char* name) { return std::getenv(name); });
}

}  // namespace plait::nccl

namespace plait::nccl::detail {

/// Owns a non-blocking socket.
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

  /// Waits until the socket can be read (or written). Returns false after the time limit.
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
    return all_of(bytes.size(), POLLOUT, until, [&](std::size_t done) {
      return ::send(handle_, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
    });
  }
  bool receive_all(char* to, std::size_t bytes, double until) const {
    return all_of(bytes, POLLIN, until, [&](std::size_t done) { return ::recv(handle_, to + done, bytes - done, 0); });
  }

 private:
  /// Calls `some(done)`, which moves more bytes and returns their number, until all bytes are moved.
  template <class Some>
  bool all_of(std::size_t bytes, short events, double until, const Some& some) const {
    for (std::size_t done = 0; done < bytes;) {
      const ssize_t n = some(done);
      if (n == 0 || (n < 0 && ((errno != EAGAIN && errno != EINTR) || !ready(events, until)))) return false;
      if (n > 0) done += static_cast<std::size_t>(n);
    }
    return true;
  }

  int handle_ = -1;
};

inline constexpr const char* free_port_hint =
    "choose a free port by PLAIT_PORT, the same for all ranks (MASTER_PORT is torch.distributed's own where that has "
    "made a process group by env://)";

/// Returns the first socket of an address of `host` for which `open(socket, address)` returns 0. Otherwise returns an
/// empty socket, and `problem` has the reason: the error of the name's resolution, or the system error that `open`
/// returned.
template <class Open>
tcp_socket first_socket(const std::string& host, int port, int flags, std::string& problem, const Open& open) {
  addrinfo wanted{}, *first = nullptr;
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = flags;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &first);
  if (code != 0) problem = ::gai_strerror(code);
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> all(first, [](addrinfo* p) { ::freeaddrinfo(p); });
  for (const addrinfo* a = first; a != nullptr; a = a->ai_next) {
    tcp_socket s(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
    const int error = s ? open(s, *a) : errno;
    if (error == 0) return s;
    problem = std::strerror(error);
  }
  return {};
}

/// Listens on `address` of this host, or on all addresses if it is empty. The address "::" accepts IPv4 connections
/// too.
inline tcp_socket listener(int port, const std::string& address = "") {
  std::string problem;
  for (const std::string& one : address.empty() ? std::vector<std::string>{"::", "0.0.0.0"} : std::vector{address}) {
    tcp_socket listening = first_socket(one, port, AI_PASSIVE, problem, [](const tcp_socket& s, const addrinfo& a) {
      const int on = 1, off = 0;
      ::setsockopt(s.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
      if (a.ai_family == AF_INET6) ::setsockopt(s.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
      return ::bind(s.get(), a.ai_addr, a.ai_addrlen) == 0 && ::listen(s.get(), 1024) == 0 ? 0 : errno;
    });
    if (listening) return listening;
    if (problem == std::strerror(EADDRINUSE)) break;  // otherwise try IPv4, for hosts without IPv6
  }
  fail({"nccl: rank 0 cannot listen on port ", port, address.empty() ? "" : " of ", address, ": ", problem, "; ",
        free_port_hint, address.empty() ? "" : ", or an address of rank 0's host by PLAIT_BIND_ADDRESS"});
}

/// Whether the name resolves to an address of this host. Addresses of forwarding services do not count.
inline bool is_of_this_host(const std::string& address) {
  std::string ignored;
  return static_cast<bool>(first_socket(address, 0, 0, ignored, [](const tcp_socket& s, const addrinfo& a) {
    return ::bind(s.get(), a.ai_addr, a.ai_addrlen) == 0 ? 0 : errno;
  }));
}

/// Returns a connection, or an empty socket with the reason in `problem`.
inline tcp_socket connected(const std::string& address, int port, double until, std::string& problem) {
  return first_socket(address, port, 0, problem, [&](const tcp_socket& s, const addrinfo& a) {
    int status = ::connect(s.get(), a.ai_addr, a.ai_addrlen) == 0 ? 0 : errno;
    socklen_t length = sizeof status;
    if (status != EINPROGRESS) return status;
    if (!s.ready(POLLOUT, std::min(until, comm_clock() + 5))) return ETIMEDOUT;
    ::getsockopt(s.get(), SOL_SOCKET, SO_ERROR, &status, &length);
    return status;
  });
}

// A greeting has "plaitid2", then rank, size and the token's length as 4 bytes each, most significant first, then the
// token. The answer has 1 for yes or 0 for no, the length, and the bytes or the reason. The token is not encrypted: it
// keeps out processes that can reach the port, but not those that read the network.
inline constexpr std::string_view hello_magic = "plaitid2";
inline constexpr std::size_t hello_head = 20;
inline constexpr std::size_t longest_answer = 1 << 16;
inline constexpr double refusal_grace = 3;  ///< seconds during which rank 0 answers with the reason after a failure

/// Limits on the resources of rank 0 that unknown connections can use.
struct connection_limits {
  std::size_t most = 256;  ///< connections that have sent no greeting; a new one replaces the oldest
  double seconds = 5;      ///< time limit for a connection's greeting
};

inline std::string word_of(std::size_t value) {
  const std::uint32_t sent = htonl(static_cast<std::uint32_t>(value));
  return {reinterpret_cast<const char*>(&sent), sizeof sent};
}
inline std::uint32_t word_at(const char* from) {
  std::uint32_t sent = 0;
  std::memcpy(&sent, from, sizeof sent);
  return ntohl(sent);
}
inline std::string answer_of(bool yes, std::string_view text) {
  return cat({word_of(yes ? 1 : 0), word_of(text.size()), text});
}

inline std::string hello_of(const launch_place& here) {
  return cat({hello_magic, word_of(static_cast<std::size_t>(here.rank)), word_of(static_cast<std::size_t>(here.size)),
              word_of(here.token.size()), here.token});
}
/// Compares in constant time, so that the time does not reveal a common prefix.
inline bool equal_tokens(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned differing = 0;
  for (std::size_t i = 0; i < a.size(); ++i) differing |= static_cast<unsigned char>(a[i] ^ b[i]);
  return differing == 0;
}

inline tcp_socket listener(const launch_place& here) {
  const std::string& a = here.address;  // other hosts must not reach a job that runs on one host
  const bool is_loopback = a == "localhost" || a == "::1" || a.starts_with("127.");
  return listener(here.port, here.bind.empty() && is_loopback ? a : here.bind);
}

/// The address of the rendezvous, and the variables that name it.
inline std::string where(const launch_place& here) {
  return cat({here.address, ":", here.port, " (MASTER_ADDR, and MASTER_PORT or PLAIT_PORT)"});
}

/// Rank 0 of the rendezvous: it listens, and every other rank connects and sends its rank. When all have connected,
/// each gets the payload. If some never connect, the others get an error that names them.
class rendezvous_server {
 public:
  rendezvous_server(const launch_place& here, double deadline, connection_limits limits = {})
      : size_(here.size),
        address_(here.address),
        where_(where(here)),
        token_(here.token),
        limits_(limits),
        seconds_(deadline),
        until_(comm_clock() + deadline),
        listener_(listener(here)) {
    here_.resize(static_cast<std::size_t>(size_));
  }

  void hold(std::string_view payload) {
    for (std::vector<std::size_t> missing; !(missing = those_missing()).empty();) {
      if (comm_clock() >= until_) {
        refuse(
            cat({"nccl: not all ", size_, " ranks came to ", where_, " within ", seconds_, " s: missing ",
                 plait::detail::ranks_text(missing),
                 is_of_this_host(address_)
                     ? std::string()
                     : cat({"; ", address_, " is not an address of this host, on which rank 0 runs: MASTER_ADDR must ",
                            "name rank 0's host"}),
                 (turned_away_ == 0 ? std::string()
                                    : cat({"; ", turned_away_,
                                           " greetings with another job's token were turned away (PLAIT_TOKEN and "
                                           "PLAIT_TOKEN_FILE must be the same on all ranks)"}))}));
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
  struct connection {
    tcp_socket socket;
    std::string text;
    double until;
  };

  std::vector<std::size_t> those_missing() const {
    std::vector<std::size_t> missing;
    for (std::size_t r = 1; r < here_.size(); ++r)
      if (!here_[r]) missing.push_back(r);
    return missing;
  }

  /// Refuses all ranks: those that have connected, and those that connect within `refusal_grace`.
  [[noreturn]] void refuse(const std::string& why) {
    refusal_ = answer_of(false, why);
    until_ = comm_clock() + std::min(refusal_grace, seconds_);
    std::vector<bool> notified(here_.size());
    notified[0] = true;
    for (;; look()) {
      for (std::size_t r = 1; r < here_.size(); ++r)
        if (const tcp_socket s = std::move(here_[r])) notified[r] = s.send_all(refusal_, comm_clock() + 1);
      if (comm_clock() >= until_ || std::find(notified.begin(), notified.end(), false) == notified.end()) fail(why);
    }
  }

  /// Waits for events on the sockets, and handles them.
  void look() {
    // Without free descriptors the listener would be ready all the time, so it is not polled then.
    std::vector<pollfd> watched{{listener_.get(), static_cast<short>(full_ ? 0 : POLLIN), 0}};
    for (const connection& n : connections_) watched.push_back({n.socket.get(), POLLIN, 0});
    for (const tcp_socket& s : here_) {
      if (s) watched.push_back({s.get(), POLLIN, 0});
    }
    ::poll(watched.data(), watched.size(),
           static_cast<int>(std::clamp((until_ - comm_clock()) * 1000, 1.0, full_ ? 100.0 : 1000.0)));
    // A rank whose connection was lost may connect again. Ranks send nothing after the greeting.
    for (tcp_socket& s : here_) {
      char byte;
      if (s && ::recv(s.get(), &byte, 1, MSG_PEEK) >= 0) s = tcp_socket();
    }
    for (connection& n : connections_) listen_to(n);
    std::erase_if(connections_, [](const connection& n) { return !n.socket || comm_clock() > n.until; });
    for (full_ = false;;) {
      tcp_socket s(::accept(listener_.get(), nullptr, nullptr));
      if (!s) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        full_ = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
        if (full_ && !connections_.empty()) connections_.erase(connections_.begin());
        break;
      }
      if (connections_.size() >= limits_.most) connections_.erase(connections_.begin());
      connections_.push_back({std::move(s), {}, comm_clock() + limits_.seconds});
    }
  }

  /// Reads the received part of a greeting. Drops the connection if the greeting is malformed or of another job.
  void listen_to(connection& n) {
    const std::size_t wanted = hello_head + token_.size();
    char bytes[hello_head + most_token_bytes];
    const ssize_t got = ::recv(n.socket.get(), bytes, wanted - n.text.size(), 0);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) n.socket = tcp_socket();
    if (got <= 0) return;
    n.text.append(bytes, static_cast<std::size_t>(got));
    const std::string_view text = n.text;
    if (text.substr(0, hello_magic.size()) != hello_magic.substr(0, text.size())) {
      n.socket = tcp_socket();  // not a rank of this job
      return;
    }
    const bool other_token = text.size() >= hello_head && word_at(text.data() + 16) != token_.size();
    if (!other_token && text.size() < wanted) return;
    if (other_token || !equal_tokens(text.substr(hello_head), token_)) {
      ++turned_away_;
      n.socket = tcp_socket();
      return;
    }
    const std::uint32_t rank = word_at(text.data() + 8), size = word_at(text.data() + 12);
    std::string why;
    if (size != static_cast<std::uint32_t>(size_)) {
      why = cat({"nccl: rank ", rank, " has ", size, " ranks, but rank 0 has ", size_});
    } else if (rank == 0 || rank >= size || here_[rank]) {
      why = cat({"nccl: two processes say that they are rank ", rank, " of ", size});
    }
    if (!why.empty()) {
      n.socket.send_all(refusal_.empty() ? answer_of(false, why) : refusal_, comm_clock() + 1);
      n.socket = tcp_socket();
      if (refusal_.empty()) refuse(why);
      return;
    }
    here_[rank] = std::move(n.socket);
  }

  int size_;
  std::string address_, where_, token_;
  connection_limits limits_;
  double seconds_, until_;
  tcp_socket listener_;
  std::vector<tcp_socket> here_;  ///< by rank; empty until the rank has connected
  std::vector<connection> connections_;
  int turned_away_ = 0;
  bool full_ = false;    ///< whether the last connection failed because no descriptor was free
  std::string refusal_;  ///< the answer to every rank after a refusal
};

/// Connects to rank 0, as every other rank, and returns the payload.
inline std::string ask(const launch_place& here, double deadline) {
  const std::string at = where(here);
  const std::string hello = hello_of(here);
  std::string problem = "no answer";
  const double until = comm_clock() + deadline;
  do {
    const tcp_socket s = connected(here.address, here.port, until, problem);
    std::array<char, 8> head;
    const double answer_until = comm_clock() + deadline + 2;  // rank 0 started earlier, so its deadline ends first
    if (s && s.send_all(hello, answer_until)) {
      problem = "it closed the connection without an answer, as rank 0 of another job does, or gave none";
      if (s.receive_all(head.data(), head.size(), answer_until)) {
        const std::uint32_t yes = word_at(head.data()), length = word_at(head.data() + 4);
        if (yes > 1 || length > longest_answer)
          fail({"nccl: the process that listens on ", at, " is not rank 0 of this program; ", free_port_hint});
        std::string text(length, '\0');
        if (s.receive_all(text.data(), length, answer_until)) {
          if (yes == 0) fail(text);
          return text;
        }
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  } while (comm_clock() < until);
  fail({"nccl: rank ", here.rank, " could not reach rank 0 at ", at, " within ", deadline, " s: ", problem,
        "; MASTER_ADDR must name the host on which rank 0 runs; if something else listens there, ", free_port_hint});
}

}  // namespace plait::nccl::detail

namespace plait::nccl {

/// Returns rank 0's `payload` (at most 64 KB) on every rank. Collective over all processes of a launch. Throws
/// `plait::error` after `deadline` seconds. On rank 0 and the ranks that reached it, the text names the ranks that did
/// not connect. On other ranks it gives the reason why rank 0 was not reached. Throws at once if two processes have one
/// rank or the sizes differ.
inline std::string share(const launch_place& here, const std::string& payload, double deadline) {
  if (payload.size() > detail::longest_answer) fail("nccl: share takes at most 64 KB");
  if (here.token.size() > detail::most_token_bytes)
    fail({"nccl: launch_place::token has ", here.token.size(), " bytes, at most ", detail::most_token_bytes,
          " are legal"});
  if (here.size == 1) return payload;
  if (here.rank != 0) return detail::ask(here, deadline);
  detail::rendezvous_server(here, deadline).hold(payload);
  return payload;
}

}  // namespace plait::nccl

#include "plait/core/macros_on.hpp"
