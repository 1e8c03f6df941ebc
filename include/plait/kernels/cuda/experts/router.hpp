// CUDA kernels of routers: the choice of experts and auxiliary losses. Test: tests/cuda/kernels/kernel_experts.cpp.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "plait/core/macros_off.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/elementwise.hpp"
#include "plait/kernels/cuda/launchers.hpp"
#include "plait/kernels/cuda/math.hpp"

namespace plait::kernels::detail {

// ---- scores: a warp for each token, with its probabilities in shared memory --------------------------------------

__device__ inline int lane_of() { return static_cast<int>(threadIdx.x) % warp_lanes; }

/// Returns the largest score of a token.
template <class S, class T>
__device__ inline S most_of_scores(const T* scores, int experts) {
  S most = number<S>(scores[0]);
  for (int e = lane_of(); e < experts; e += warp_lanes) {
    const S z = number<S>(scores[e]);
    most = z > most ? z : most;
  }
  return warp_max(most);
}

/// Computes the probabilities of one token's experts: softmax over all, or a sigmoid of each.
template <class T, class S>
__device__ inline void probabilities_of(const T* scores, S* p, int experts, expert_scores how) {
  if (how == expert_scores::sigmoid) {
    for (int e = lane_of(); e < experts; e += warp_lanes) p[e] = S(1) / (S(1) + exponential(-number<S>(scores[e])));
  } else {
    const S most = most_of_scores<S>(scores, experts);
    S sum = 0;
    for (int e = lane_of(); e < experts; e += warp_lanes) sum += p[e] = exponential(number<S>(scores[e]) - most);
    sum = warp_sum(sum);
    for (int e = lane_of(); e < experts; e += warp_lanes) p[e] /= sum;
  }
  __syncwarp();
}

/// Returns the divisor of the chosen experts' probabilities, as on the CPU.
template <class S>
__device__ inline S divisor_of(const S* p, const std::int32_t* chosen, const router_settings& how) {
  if (!how.normalised) return 1;
  S sum = 0;
  for (std::int64_t j = 0; j < how.chosen; ++j) sum += p[chosen[j]];
  return sum + static_cast<S>(how.scores == expert_scores::sigmoid ? 1e-20 : 0);
}

/// Returns the best of the legal experts, of equal ones the lower index. It is not legal afterwards.
template <class S>
__device__ inline int take_best(const S* scores, unsigned char* legal, int n) {
  int best = n;
  S most = 0;
  const auto meet = [&](int i, S score) {
    if (i < n && (best == n || score > most || (score == most && i < best))) best = i, most = score;
  };
  for (int i = lane_of(); i < n; i += warp_lanes)
    if (legal[i] != 0) meet(i, scores[i]);
  for (int offset = warp_lanes / 2; offset > 0; offset /= 2) {
    const int other = __shfl_xor_sync(whole_warp, best, offset);
    const S score = __shfl_xor_sync(whole_warp, most, offset);
    meet(other, score);
  }
  best = __shfl_sync(whole_warp, best, 0);  // with NaNs, lanes may have different ones
  if (lane_of() == 0 && best < n) legal[best] = 0;
  __syncwarp();
  return best;
}

/// Shared memory for one token's choice: probabilities with and without bias, the scores of groups, and which experts
/// are legal.
inline std::size_t bytes_to_choose(std::int64_t experts, std::int64_t groups, std::size_t number) {
  return static_cast<std::size_t>(2 * experts + groups) * number + static_cast<std::size_t>(experts + groups);
}

template <class S>
__device__ inline void keep_best_groups(const S* scores, S* of_groups, unsigned char* legal,
                                        unsigned char* legal_groups, int experts, const router_settings& how) {
  const int groups = static_cast<int>(how.groups), size = experts / groups;
  const bool all = how.chosen_groups == how.groups;
  for (int e = lane_of(); e < experts; e += warp_lanes) legal[e] = all ? 1 : 0;
  for (int g = lane_of(); !all && g < groups; g += warp_lanes) {
    S largest = -infinite<S>, second = -infinite<S>;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      const S u = scores[e], less = u < largest ? u : largest;
      second = less > second ? less : second;
      largest = u > largest ? u : largest;
    }
    of_groups[g] = how.group_scores == group_scores::two_largest ? largest + second : largest;
    legal_groups[g] = 1;
  }
  __syncwarp();
  for (std::int64_t j = 0; !all && j < how.chosen_groups; ++j) {
    const int g = take_best(of_groups, legal_groups, groups);
    for (int e = g * size + lane_of(); e < (g + 1) * size; e += warp_lanes) legal[e] = 1;
  }
  __syncwarp();
}

template <class T, class B, class S>
__global__ static void choose_for_tokens(const T* scores, const B* bias, std::int32_t* chosen, S* weights,
                                         std::int64_t tokens, int experts, router_settings how, bool again) {
  PLAIT_DYNAMIC_SHARED(S, p);
  S *const u = p + experts, *const of_groups = u + experts;
  auto* const legal = reinterpret_cast<unsigned char*>(of_groups + how.groups);
  for (std::int64_t t = blockIdx.x; t < tokens; t += gridDim.x) {
    probabilities_of(scores + t * experts, p, experts, how.scores);
    std::int32_t* const own = chosen + t * how.chosen;
    if (!again) {
      for (int e = lane_of(); e < experts; e += warp_lanes) u[e] = bias == nullptr ? p[e] : p[e] + number<S>(bias[e]);
      __syncwarp();
      keep_best_groups(u, of_groups, legal, legal + experts, experts, how);
      for (std::int64_t j = 0; j < how.chosen; ++j) {
        const int best = take_best(u, legal, experts);
        if (lane_of() == 0) own[j] = best;
      }
      __syncwarp();
    }
    const S divisor = divisor_of(p, own, how);
    for (std::int64_t j = lane_of(); j < how.chosen; j += warp_lanes)
      weights[t * how.chosen + j] = p[own[j]] / divisor * static_cast<S>(how.scale);
    __syncwarp();
  }
}

template <class T, class S>
__global__ static void choose_for_tokens_backward(const T* scores, const std::int32_t* chosen, const S* dweights,
                                                  T* dscores, std::int64_t tokens, int experts, router_settings how) {
  PLAIT_DYNAMIC_SHARED(S, p);
  S* const dp = p + experts;
  const bool softmax = how.scores == expert_scores::softmax;
  for (std::int64_t t = blockIdx.x; t < tokens; t += gridDim.x) {
    const std::int32_t* const own = chosen + t * how.chosen;
    const S* const dw = dweights + t * how.chosen;
    probabilities_of(scores + t * experts, p, experts, how.scores);
    const S divisor = divisor_of(p, own, how);
    S common = 0;  // the common term of the divisor's gradient
    for (std::int64_t j = 0; how.normalised && j < how.chosen; ++j) common += dw[j] * (p[own[j]] / divisor);
    for (int e = lane_of(); e < experts; e += warp_lanes) dp[e] = 0;
    __syncwarp();
    for (std::int64_t j = lane_of(); j < how.chosen; j += warp_lanes)
      dp[own[j]] = (dw[j] - common) / divisor * static_cast<S>(how.scale);
    __syncwarp();
    S mean = 0;
    for (int e = lane_of(); softmax && e < experts; e += warp_lanes) mean += dp[e] * p[e];
    mean = warp_sum(mean);
    for (int e = lane_of(); e < experts; e += warp_lanes)
      dscores[t * experts + e] = number<T>(softmax ? p[e] * (dp[e] - mean) : dp[e] * p[e] * (1 - p[e]));
    __syncwarp();
  }
}

/// Computes a token's probabilities for a balance loss, and returns the log-sum-exp of its scores, as on the CPU.
template <class T, class S>
__device__ inline double balanced_probabilities_of(const T* scores, S* p, int experts, expert_scores how) {
  const S most = most_of_scores<S>(scores, experts);
  S sum = 0, all = 0;
  for (int e = lane_of(); e < experts; e += warp_lanes) sum += exponential(number<S>(scores[e]) - most);
  sum = warp_sum(sum);
  probabilities_of(scores, p, experts, how);
  for (int e = lane_of(); e < experts; e += warp_lanes) all += p[e];
  all = warp_sum(all) + S(1e-20);  // if all sigmoids are 0
  for (int e = lane_of(); e < experts; e += warp_lanes) p[e] /= all;
  __syncwarp();
  return static_cast<double>(most) + log(static_cast<double>(sum));
}

/// Computes a token's terms of a router's losses.
template <class T, class Count, class S>
__global__ static void router_losses_of(const T* scores, const Count* counts, double* losses, std::int64_t tokens,
                                        std::int64_t size, int experts, expert_scores how, router_loss_scales by) {
  PLAIT_DYNAMIC_SHARED(S, p);
  for (std::int64_t t = blockIdx.x; t < tokens; t += gridDim.x) {
    const double all = balanced_probabilities_of(scores + t * experts, p, experts, how);
    double own = 0;
    for (int e = lane_of(); e < experts; e += warp_lanes) {
      const auto part = static_cast<double>(p[e]);
      if (counts != nullptr) own += by.balance * number<double>(counts[t / size * experts + e]) * part;
      if (by.entropy != 0 && part > 0) own -= by.entropy * part * log(part);
    }
    own = warp_sum(own) + by.z * all * all;
    if (lane_of() == 0) losses[t] = by.quantum > 0 ? rint(own / by.quantum) * by.quantum : own;
    __syncwarp();
  }
}

template <class T, class Count, class S>
__global__ static void add_router_gradients(const T* scores, const Count* counts, const double* seed, T* dscores,
                                            std::int64_t tokens, std::int64_t size, int experts, expert_scores how,
                                            router_loss_scales by) {
  PLAIT_DYNAMIC_SHARED(S, p);
  for (std::int64_t t = blockIdx.x; t < tokens; t += gridDim.x) {
    const double all = balanced_probabilities_of(scores + t * experts, p, experts, how);
    const Count* const c = counts == nullptr ? nullptr : counts + t / size * experts;
    double mean = 0;
    for (int e = lane_of(); c != nullptr && e < experts; e += warp_lanes)
      mean += number<double>(c[e]) * static_cast<double>(p[e]);
    mean = warp_sum(mean);
    for (int e = lane_of(); e < experts; e += warp_lanes) {
      const double z = static_cast<double>(number<S>(scores[t * experts + e])), of_p = static_cast<double>(p[e]);
      const double slope = how == expert_scores::sigmoid ? 1 / (1 + exp(z)) : 1;
      const double balance = c == nullptr ? 0 : by.balance * of_p * slope * (number<double>(c[e]) - mean);
      T& d = dscores[t * experts + e];
      d = number<T>(number<S>(d) + static_cast<S>(*seed * (balance + 2 * by.z * all * exp(z - all))));
    }
    __syncwarp();
  }
}

/// Launches a warp for each of `tokens`, with `bytes` of shared memory.
template <class... Parameters, class... Arguments>
void launch_warps(cuda& device, std::int64_t tokens, std::size_t bytes, void (*kernel)(Parameters...),
                  Arguments... arguments) {
  if (tokens <= 0) return;
  plait::detail::allow_shared(kernel, bytes);
  plait::detail::launch(device, {plait::detail::blocks_for(tokens, 1), warp_lanes, bytes}, kernel, arguments...);
}
}  // namespace plait::kernels::detail

namespace plait::kernels {

template <class T, class B, class S>
void choose_experts(cuda& device, const T* scores, const B* bias, std::int32_t* chosen, S* weights, std::int64_t tokens,
                    std::int64_t experts, const router_settings& how, bool again) {
  detail::launch_warps(device, tokens, detail::bytes_to_choose(experts, how.groups, sizeof(S)),
                       detail::choose_for_tokens<T, B, S>, scores, bias, chosen, weights, tokens, experts, how, again);
}

template <class T, class S>
void choose_experts_backward(cuda& device, const T* scores, const std::int32_t* chosen, const S* dweights, T* dscores,
                             std::int64_t tokens, std::int64_t experts, const router_settings& how) {
  detail::launch_warps(device, tokens, static_cast<std::size_t>(2 * experts) * sizeof(S),
                       detail::choose_for_tokens_backward<T, S>, scores, chosen, dweights, dscores, tokens, experts,
                       how);
}

template <class T, class Count>
void router_loss(cuda& device, const T* scores, const Count* counts, double* loss, std::int64_t groups,
                 std::int64_t size, std::int64_t experts, expert_scores how, const router_loss_scales& by) {
  using S = statistic_of<T>;
  auto memory = make_buffer<double>(device, static_cast<std::size_t>(groups * size));
  auto* const terms = memory.template data<double>();
  detail::launch_warps(device, groups * size, static_cast<std::size_t>(experts) * sizeof(S),
                       detail::router_losses_of<T, Count, S>, scores, counts, terms, groups * size, size, experts, how,
                       by);
  sum<double>(device, terms, groups * size, loss);
}

template <class T, class Count>
void add_router_loss_gradient(cuda& device, const T* scores, const Count* counts, const double* seed, T* dscores,
                              std::int64_t groups, std::int64_t size, std::int64_t experts, expert_scores how,
                              const router_loss_scales& by) {
  using S = statistic_of<T>;
  detail::launch_warps(device, groups * size, static_cast<std::size_t>(experts) * sizeof(S),
                       detail::add_router_gradients<T, Count, S>, scores, counts, seed, dscores, groups * size, size,
                       experts, how, by);
}

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
