#pragma once

#include <cstdint>
#include <vector>

#include "plait/kernels/settings.hpp"
#include "plait/kernels/sums.hpp"

namespace plait::test {

/// One tensor's numbers between steps.
struct adamw_numbers {
  std::vector<double> master, m, v;
};

/// The processor's step.
void adamw_on_cpu(adamw_numbers& tensor, const std::vector<double>& gradient, double weight_decay,
                  const kernels::adamw_settings& settings, const kernels::adamw_scalars& scalars);

/// One tensor between steps whose moments are kept as S: bf16, or codes in blocks.
template <class M, class S>
struct rounded_numbers {
  std::vector<M> master;
  std::vector<S> m, v;
  std::vector<std::uint8_t> m_scales, v_scales;
};

/// The processor's step with moments, and where M is bf16 values, that are rounded stochastically; `like` says
/// everything but where the arrays are. M, G and S: as plait::compiled_cuda has them.
template <class M, class G, class S>
void adamw_rounded_on_cpu(rounded_numbers<M, S>& tensor, const std::vector<G>& gradient,
                          kernels::adamw_rounded_tensor<M, G, M, S> like, const kernels::adamw_settings& settings,
                          const kernels::adamw_scalars& scalars);

/// What the processor clips with.
kernels::clip_numbers clip_on_cpu(double squares, double limit);

}  // namespace plait::test
