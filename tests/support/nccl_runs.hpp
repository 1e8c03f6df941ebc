#pragma once

#include <string>

#include "plait/comm/launch/nccl.hpp"
#include "support/nccl_devices.hpp"

namespace plait::test {

/// Options of a device for tests of communicators: a small workspace. NCCL gets a deadline that busy machines meet.
inline const cuda::options small{.workspace_bytes = 4096};
inline const nccl::options careful{.deadline = 60, .check_pointers = true};

/// The text of the error that stops `ranks` NCCL ranks running `body`; empty without an error or with too few GPUs.
template <class F>
std::string text_of(int ranks, const nccl::options& settings, const F& body) {
  if (devices(ranks).empty()) return "";
  try {
    nccl::run(devices(ranks), small, settings, body);
  } catch (const error& e) {
    return e.what();
  }
  return "";
}

}  // namespace plait::test
