#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

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
  for (const T x : host) {
    if constexpr (std::is_same_v<T, bf16>)
      out.values.push_back(static_cast<double>(std::bit_cast<float>(std::uint32_t{x.bits} << 16)));
    else
      out.values.push_back(static_cast<double>(x));
  }
  return out;
}

}  // namespace plait::test
