#pragma once

#include <doctest/doctest.h>

#include <string>

#include "plait/comm/launch/nccl.hpp"
#include "support/nccl_devices.hpp"
#include "support/texts.hpp"

namespace plait::test {

/// Options of a device for tests of communicators: a small workspace. NCCL gets a deadline that busy machines meet.
inline const cuda::options small{.workspace_bytes = 4096};
inline const nccl::options careful{.deadline = 60, .check_pointers = true};

/// The text of the error that stops `ranks` NCCL ranks running `body`; empty without an error or with too few GPUs.
template <class F>
std::string text_of(int ranks, const nccl::options& settings, const F& body) {
  if (devices(ranks).empty()) return "";
  return text_thrown_by([&] { nccl::run(devices(ranks), small, settings, body); });
}

/// Runs `body` on NCCL ranks, without an error; does nothing with too few GPUs.
template <class F>
void on_ranks(int ranks, const nccl::options& settings, const F& body) {
  CHECK(text_of(ranks, settings, body) == "");
}
template <class F>
void on_ranks(int ranks, const F& body) {
  on_ranks(ranks, careful, body);
}

}  // namespace plait::test
