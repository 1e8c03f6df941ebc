#include "kernel_losses_reference.hpp"

#include "plait/kernels/cpu/cross_entropy.hpp"

namespace plait::test {

losses losses_on_cpu(const std::vector<double>& logits, const std::vector<std::int64_t>& targets,
                     const std::vector<double>& scale, const kernels::vocabulary_range& range,
                     const kernels::cross_entropy_settings& settings) {
  cpu device;
  const std::size_t n = targets.size();
  const auto rows = static_cast<std::int64_t>(n);
  losses made{std::vector<double>(n), std::vector<double>(n), std::vector<double>(n), logits};
  std::vector<double> target(n), sum(n);
  kernels::cross_entropy_local_statistics(device, logits.data(), targets.data(), made.row_max.data(),
                                          made.sum_exp.data(), target.data(), sum.data(), rows, range, settings);
  kernels::cross_entropy_loss(device, targets.data(), made.row_max.data(), made.sum_exp.data(), target.data(),
                              sum.data(), made.loss.data(), rows, range, settings);
  kernels::cross_entropy_backward(device, logits.data(), targets.data(), made.row_max.data(), made.sum_exp.data(),
                                  scale.data(), made.dlogits.data(), rows, range, settings);
  return made;
}

}  // namespace plait::test
