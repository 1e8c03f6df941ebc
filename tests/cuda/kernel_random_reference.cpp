#include "kernel_random_reference.hpp"

#include "plait/kernels/cpu/random.hpp"

namespace plait::test {

random_part random_on_cpu(const box& part, std::uint64_t seed, std::uint64_t stream, const std::vector<double>& x,
                          double p) {
  cpu device;
  random_part made{x, x, x};
  kernels::fill_normal(device, made.normal.data(), part, seed, stream, 0.5, 2.0);
  kernels::fill_uniform(device, made.uniform.data(), part, seed, stream, -1.0, 3.0);
  kernels::dropout_forward(device, x.data(), made.dropped.data(), part, seed, stream, p);
  return made;
}

}  // namespace plait::test
