#include "kernel_norms_reference.hpp"

#include "plait/kernels/cpu/norms.hpp"

namespace plait::test {

namespace {

norm_arrays sized(std::size_t n, std::size_t columns) {
  const std::size_t rows = n / columns;
  return {std::vector<double>(n), std::vector<double>(rows),    std::vector<double>(rows),
          std::vector<double>(n), std::vector<double>(columns), std::vector<double>(columns)};
}

}  // namespace

norm_arrays rms_norm_on_cpu(const std::vector<double>& x, const std::vector<double>& weight,
                            const std::vector<double>& dy, const std::vector<double>& addend, double eps) {
  cpu device;
  norm_arrays made = sized(x.size(), weight.size());
  const auto columns = static_cast<std::int64_t>(weight.size());
  const auto rows = static_cast<std::int64_t>(made.inverse.size());
  kernels::rms_norm_forward(device, x.data(), weight.data(), made.y.data(), made.inverse.data(), rows, columns, eps);
  kernels::rms_norm_backward(device, x.data(), weight.data(), dy.data(), made.inverse.data(), made.dx.data(),
                             made.dweight.data(), rows, columns, addend.data());
  return made;
}

norm_arrays layer_norm_on_cpu(const std::vector<double>& x, const std::vector<double>& weight,
                              const std::vector<double>& bias, const std::vector<double>& dy,
                              const std::vector<double>& addend, double eps) {
  cpu device;
  norm_arrays made = sized(x.size(), weight.size());
  const auto columns = static_cast<std::int64_t>(weight.size());
  const auto rows = static_cast<std::int64_t>(made.inverse.size());
  kernels::layer_norm_forward(device, x.data(), weight.data(), bias.data(), made.y.data(), made.mean.data(),
                              made.inverse.data(), rows, columns, eps);
  kernels::layer_norm_backward(device, x.data(), weight.data(), dy.data(), made.mean.data(), made.inverse.data(),
                               made.dx.data(), made.dweight.data(), made.dbias.data(), rows, columns, addend.data());
  return made;
}

}  // namespace plait::test
