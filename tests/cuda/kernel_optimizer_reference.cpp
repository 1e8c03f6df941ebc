#include "kernel_optimizer_reference.hpp"

#include <span>

#include "plait/kernels/cpu/optimizer.hpp"
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

template <class M, class G, class S>
void adamw_rounded_on_cpu(rounded_numbers<M, S>& tensor, const std::vector<G>& gradient,
                          kernels::adamw_rounded_tensor<M, G, M, S> like, const kernels::adamw_settings& settings,
                          const kernels::adamw_scalars& scalars) {
  cpu device;
  like.master = tensor.master.data(), like.gradient = gradient.data();
  like.m = tensor.m.data(), like.v = tensor.v.data();
  like.m_scales = tensor.m_scales.data(), like.v_scales = tensor.v_scales.data();
  like.weight = nullptr;
  kernels::adamw_update(device, std::span<const kernels::adamw_rounded_tensor<M, G, M, S>>(&like, 1), settings,
                        &scalars);
}

#define PLAIT_ROUNDED_ON_CPU(M, G, S)                                                                           \
  template void adamw_rounded_on_cpu(rounded_numbers<M, S>&, const std::vector<G>&,                             \
                                     kernels::adamw_rounded_tensor<M, G, M, S>, const kernels::adamw_settings&, \
                                     const kernels::adamw_scalars&);
PLAIT_ROUNDED_ON_CPU(float, float, bf16)
PLAIT_ROUNDED_ON_CPU(float, float, std::uint8_t)
PLAIT_ROUNDED_ON_CPU(bf16, float, float)
PLAIT_ROUNDED_ON_CPU(bf16, float, bf16)
PLAIT_ROUNDED_ON_CPU(bf16, float, std::uint8_t)
PLAIT_ROUNDED_ON_CPU(bf16, bf16, float)
PLAIT_ROUNDED_ON_CPU(bf16, bf16, bf16)
PLAIT_ROUNDED_ON_CPU(bf16, bf16, std::uint8_t)
PLAIT_ROUNDED_ON_CPU(double, double, bf16)
PLAIT_ROUNDED_ON_CPU(double, double, std::uint8_t)

kernels::clip_numbers clip_on_cpu(double squares, double limit) {
  cpu device;
  kernels::clip_numbers made{-1, -1, -1};
  kernels::clip(device, &squares, limit, &made);
  return made;
}

}  // namespace plait::test
