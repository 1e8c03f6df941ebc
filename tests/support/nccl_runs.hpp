#pragma once

#include <string>

#include "plait/comm/launch/nccl.hpp"
#include "support/nccl_devices.hpp"

namespace plait::test {

/// What tests of communicators ask of a device and of NCCL: little memory, and a deadline that busy machines keep.
inline const cuda::options small{.workspace_bytes = 4096};
inline const nccl::options careful{.deadline = 60, .check_pointers = true};

/// The text of the error that ends `ranks` NCCL ranks of `body`; empty where none does, or there are too few GPUs.
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
