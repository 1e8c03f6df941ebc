// The rank, size and meeting place of a process, from the environment variables of torchrun or Slurm. It reads
// variables and opens no connection, and needs no NCCL, although its names are in plait::nccl.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::nccl {

/// A process among the processes that a launcher has started, and where its rank 0 is met.
struct launch_place {
  int rank = 0;
  int size = 1;
  int local_rank = 0;   ///< among the processes of this host: the index of its GPU
  std::string address;  ///< of the host of rank 0: a name or an address
  int port = 0;         ///< where rank 0 listens
  std::string token{};  ///< what the job's processes know and others do not: rank 0 turns away who lacks it
  std::string bind{};   ///< the address that rank 0 listens on; empty: all, or the loopback where `address` is that
};

namespace detail {

inline constexpr int any_number = std::numeric_limits<int>::max();
inline constexpr std::size_t most_token_bytes = 200;

/// Returns the number in an environment variable; `who` is what sets it.
template <class Get>
int number_in(const Get& get, const char* name, const char* who, int least, int most) {
  const char* const text = get(name);
  if (text == nullptr || *text == '\0') fail({"nccl: ", name, " is not set; ", who, " sets it"});
  int value = 0;
  const char* const end = text + std::strlen(text);
  const auto [stop, problem] = std::from_chars(text, end, value);
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

}  // namespace detail

namespace detail {

/// The name of the job and its secret; no process of another job has both.
template <class Get>
std::string token_in(const Get& get) {
  const auto value = [&](const char* name) {
    const char* const text = get(name);
    return std::string(text == nullptr ? "" : text);
  };
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

/// Reads the environment, where `get(name)` is a variable's value or null: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
/// and MASTER_PORT, as torchrun sets them; otherwise SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID. Under Slurm, rank
/// 0's host is MASTER_ADDR or the first of the step's node list. The port is MASTER_PORT or made from the job's number,
/// so that two jobs on a host do not meet. The token is the job's name (TORCHELASTIC_RUN_ID, or Slurm's job and step)
/// and the secret in PLAIT_TOKEN or in the file that PLAIT_TOKEN_FILE names; PLAIT_BIND_ADDRESS is where rank 0
/// listens. Throws `plait::error` that names the variable that is missing or malformed.
///
/// PLAIT_PORT, where it is set, is the port, however the processes were started: a program in which torch.distributed,
/// or a store of its own, listens on MASTER_PORT sets it to another free port of rank 0's host. It is equal on all
/// ranks. Where TORCHELASTIC_USE_AGENT_STORE is "True", torchrun's agent listens on MASTER_PORT itself, and the next
/// port is used.
template <class Get>
launch_place place_from(const Get& get) {
  launch_place out;
  out.token = detail::token_in(get);
  if (const char* const bind = get("PLAIT_BIND_ADDRESS")) out.bind = bind;
  const auto set = [&](const char* name) {
    const char* const text = get(name);
    return text != nullptr && *text != '\0';
  };
  if (set("RANK") || set("WORLD_SIZE")) {
    const char* const who = "torchrun, or whoever starts the processes,";
    out.size = detail::number_in(get, "WORLD_SIZE", who, 1, detail::any_number);
    out.rank = detail::number_in(get, "RANK", who, 0, out.size - 1);
    out.local_rank = detail::number_in(get, "LOCAL_RANK", who, 0, out.size - 1);
    if (!set("MASTER_ADDR")) fail({"nccl: MASTER_ADDR is not set; ", who, " sets it"});
    out.address = get("MASTER_ADDR");
    const bool taken =
        set("TORCHELASTIC_USE_AGENT_STORE") && std::string_view(get("TORCHELASTIC_USE_AGENT_STORE")) == "True";
    out.port = set("PLAIT_PORT")
                   ? detail::number_in(get, "PLAIT_PORT", who, 1, 65535)
                   : detail::number_in(get, "MASTER_PORT", who, 1, taken ? 65534 : 65535) + (taken ? 1 : 0);
    return out;
  }
  if (!set("SLURM_PROCID")) {
    fail(
        "nccl: the environment names no ranks: neither RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT "
        "(torchrun) nor SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID (srun) are set");
  }
  out.size = detail::number_in(get, "SLURM_NTASKS", "srun", 1, detail::any_number);
  out.rank = detail::number_in(get, "SLURM_PROCID", "srun", 0, out.size - 1);
  out.local_rank = detail::number_in(get, "SLURM_LOCALID", "srun", 0, out.size - 1);
  if (set("MASTER_ADDR")) {
    out.address = get("MASTER_ADDR");
  } else {
    for (const char* const name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
      if (out.address.empty() && set(name)) out.address = detail::first_host(get(name));
    }
    if (out.address.empty()) fail("nccl: neither MASTER_ADDR nor SLURM_STEP_NODELIST is set; srun sets the latter");
  }
  out.port = set("PLAIT_PORT") ? detail::number_in(get, "PLAIT_PORT", "the job's script", 1, 65535)
             : set("MASTER_PORT")
                 ? detail::number_in(get, "MASTER_PORT", "the job's script", 1, 65535)
                 : 20000 + detail::number_in(get, "SLURM_JOB_ID", "Slurm", 0, detail::any_number) % 20000;
  return out;
}

/// Reads this process's environment.
inline launch_place place_from_environment() {
  return place_from([](const char* name) { return std::getenv(name); });
}

}  // namespace plait::nccl

#include "plait/core/macros_on.hpp"
