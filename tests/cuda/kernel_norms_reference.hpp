#pragma once

#include <cstdint>
#include <vector>

namespace plait::test {

/// What a norm makes, in double; RMS norm has neither mean nor dbias.
struct norm_arrays {
  std::vector<double> y, mean, inverse, dx, dweight, dbias;
};

/// The processor's norms. dx includes `addend`.
norm_arrays rms_norm_on_cpu(const std::vector<double>& x, const std::vector<double>& weight,
                            const std::vector<double>& dy, const std::vector<double>& addend, double eps);
norm_arrays layer_norm_on_cpu(const std::vector<double>& x, const std::vector<double>& weight,
                              const std::vector<double>& bias, const std::vector<double>& dy,
                              const std::vector<double>& addend, double eps);

}  // namespace plait::test
