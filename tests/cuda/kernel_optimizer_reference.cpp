#include "kernel_optimizer_reference.hpp"

#include <span>

#include "plait/kernels/cpu/adamw.hpp"
#include "plait/kernels/cpu/reductions.hpp"

namespace plait::test {

void adamw_on_cpu(adamw_numbers& tensor, const std::vector<double>& gradient, double weight_decay,
                  const kernels::adamw_settings& settings, const kernels::adamw_scalars& scalars) {
  cpu device;
  const kernels::adamw_tensor<double, double, double> one{
      tensor.master.data(), gradient.data(), tensor.m.data(),
      tensor.v.data(),      nullptr,         static_cast<std::int64_t>(gradient.size()),
      weight_decay};
  kernels::adamw_update(device, std::span(&one, 1), settings, &scalars);
}

kernels::clip_numbers clip_on_cpu(double squares, double limit) {
  cpu device;
  kernels::clip_numbers made{-1, -1, -1};
  kernels::clip(device, &squares, limit, &made);
  return made;
}

}  // namespace plait::test
