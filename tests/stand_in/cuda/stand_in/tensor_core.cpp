// The arithmetic of tensor cores, on the bits of registers.
#include "tensor_core.hpp"

#include <bit>
#include <cstdint>

namespace stand_in {
namespace {

/// The sum of `sum` and the products of the four bf16 in each word, added in order.
float dot4(std::uint64_t a, std::uint64_t b, float sum) {
  for (int i = 0; i < 4; ++i) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(a >> (16 * i)) << 16);
    const auto y = std::bit_cast<float>(static_cast<std::uint32_t>(b >> (16 * i)) << 16);
    sum += x * y;
  }
  return sum;
}

}  // namespace

void multiply_fragments(const executor::offer* warp, int lane, float (&c)[4]) {
  const int group = lane / 4, pair = lane % 4;
  for (int k = 0; k < 4; ++k) {
    const std::uint64_t row0 = warp[4 * group + k].words[0], row8 = warp[4 * group + k].words[1];
    const std::uint64_t column0 = warp[8 * pair + k].words[2], column1 = warp[8 * pair + 4 + k].words[2];
    c[0] = dot4(row0, column0, c[0]);
    c[1] = dot4(row0, column1, c[1]);
    c[2] = dot4(row8, column0, c[2]);
    c[3] = dot4(row8, column1, c[3]);
  }
}

}  // namespace stand_in
