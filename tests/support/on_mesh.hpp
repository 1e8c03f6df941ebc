#pragma once

#include <cstdint>
#include <string>

#include "plait/comm/threads.hpp"
#include "plait/device/cpu.hpp"
#include "plait/tensor/context.hpp"
#include "texts.hpp"

/// Runs a test on the ranks of a mesh, which are threads with a cpu device each, and returns their errors.
namespace plait::test {

/// Runs work(ctx) on each rank; with `leaves`, under deterministic sums.
template <class Mesh, class Work>
void on_mesh(const Mesh& mesh, const dim_sizes& sizes, std::uint64_t seed, Work&& work,
             const deterministic_leaves& leaves = {}) {
  threads::run(static_cast<int>(mesh.size()), [&](threads::communicator c) {
    cpu device({.deterministic = static_cast<bool>(leaves)});
    world ranks(mesh.shape(), c);
    work(context<cpu>{device, ranks, sizes, seed, leaves});
  });
}

/// The text of the error that the same run throws, or "".
template <class Mesh, class Work>
std::string error_on_mesh(const Mesh& mesh, const dim_sizes& sizes, std::uint64_t seed, Work&& work) {
  return text_thrown_by([&] { on_mesh(mesh, sizes, seed, work); });
}

}  // namespace plait::test
