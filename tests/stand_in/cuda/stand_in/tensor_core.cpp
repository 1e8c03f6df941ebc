// The arithmetic of tensor cores, on the bits of registers.
#include "tensor_core.hpp"

#include <bit>
#include <cstdint>

namespace stand_in {

float dot4(unsigned long long a, unsigned long long b, float sum) {
  for (int i = 0; i < 4; ++i) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(a >> (16 * i)) << 16);
    const auto y = std::bit_cast<float>(static_cast<std::uint32_t>(b >> (16 * i)) << 16);
    sum += x * y;
  }
  return sum;
}

}  // namespace stand_in
