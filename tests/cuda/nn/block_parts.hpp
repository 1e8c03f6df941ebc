#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/threads/cuda.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/strategy.hpp"

/// Sizes of a small block, and one rank's parts of its output and gradients.
namespace plait::test {

/// One rank's part of a tensor.
struct part_values {
  std::string name;
  box part;
  std::vector<double> values;
};
/// One rank's output, input gradient and parameter gradients.
using block_outcome = std::vector<part_values>;

inline dim_sizes block_sizes() {
  return sizes_of<batch, seq, hidden, heads, kv_heads, head_dim, ffn, vocab>(4, 16, 32, 4, 4, 8, 64, 48);
}

template <class T, class Device>
part_values read_part(context<Device>& ctx, std::string name, const box& part, const T* data) {
  std::vector<T> host(static_cast<std::size_t>(part.local_size()));
  ctx.device.download(host.data(), data, host.size() * sizeof(T), ctx.device.main_stream());
  part_values out{std::move(name), part, {}};
  for (const T x : host) out.values.push_back(converted<double>(x));
  return out;
}

/// The values of a whole tensor that a rank's part of it has; a part without dims has all.
inline std::vector<double> values_in(const box& part, const part_values& whole) {
  if (part.dims == 0) return whole.values;
  std::vector<double> found;
  for (std::int64_t n = 0; n < part.local_size(); ++n) {
    std::int64_t place = 0, left = n, stride = 1;
    for (int d = part.dims - 1; d >= 0; --d) {
      place += (part.offset[d] + left % part.local[d]) * stride;
      left /= part.local[d], stride *= part.global[d];
    }
    found.push_back(whole.values.at(static_cast<std::size_t>(place)));
  }
  return found;
}

/// Returns run(ranks, device) of a mesh of one rank on the cpu.
template <class Mesh, class Run>
block_outcome on_cpu(const Mesh& mesh, const Run& run) {
  block_outcome out;
  threads::run(1, [&](threads::communicator c) {
    world ranks(mesh.shape(), c);
    cpu device;
    out = run(ranks, device);
  });
  return out;
}
/// Returns run(ranks, device) of each rank of a mesh, whose threads share a GPU.
template <class Mesh, class Run>
std::vector<block_outcome> on_gpu(const Mesh& mesh, const Run& run) {
  std::vector<block_outcome> all(static_cast<std::size_t>(mesh.size()));
  threads::run(static_cast<int>(mesh.size()), cuda::options{.workspace_bytes = 4 << 20},
               [&](threads::communicator c, cuda& device) {
                 world ranks(mesh.shape(), c);
                 all[static_cast<std::size_t>(ranks.rank())] = run(ranks, device);
               });
  return all;
}

}  // namespace plait::test
