// The kernels of mixtures of experts on the CPU: the choice of experts, and the moves between tokens and rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/settings.hpp"
#include "plait/kernels/sums.hpp"

namespace plait::kernels {
namespace detail {

/// Computes the probabilities of one token's experts: softmax over all, or a sigmoid of each.
template <class T, class S>
void expert_probabilities(const T* scores, S* p, std::int64_t experts, expert_scores how) {
  if (how == expert_scores::sigmoid) {
    for (std::int64_t e = 0; e < experts; ++e) p[e] = S(1) / (S(1) + std::exp(-converted<S>(scores[e])));
    return;
  }
  S most = converted<S>(scores[0]), sum = 0;
  for (std::int64_t e = 1; e < experts; ++e) most = std::max(most, converted<S>(scores[e]));
  for (std::int64_t e = 0; e < experts; ++e) sum += p[e] = std::exp(converted<S>(scores[e]) - most);
  for (std::int64_t e = 0; e < experts; ++e) p[e] /= sum;
}

/// Returns the divisor of the chosen experts' probabilities: their sum, if weights are normalised. The small term comes
/// from DeepSeek-V3.
template <class S>
S weight_divisor(const S* p, const std::int32_t* chosen, const router_settings& how) {
  if (!how.normalised) return 1;
  S sum = 0;
  for (std::int64_t j = 0; j < how.chosen; ++j) sum += p[chosen[j]];
  return sum + static_cast<S>(how.scores == expert_scores::sigmoid ? 1e-20 : 0);
}

/// Puts the `n` best by `scores` first in `order`, the best one first; of equal ones the lower index first.
template <class S>
void best_first(std::vector<std::int32_t>& order, std::int64_t n, const std::vector<S>& scores) {
  std::partial_sort(order.begin(), order.begin() + n, order.end(), [&](std::int32_t a, std::int32_t b) {
    const S of_a = scores[static_cast<std::size_t>(a)], of_b = scores[static_cast<std::size_t>(b)];
    return of_a != of_b ? of_a > of_b : a < b;
  });
}

/// Sets `legal` to the experts of the best groups, by the `scores` of all experts.
template <class S>
void take_best_groups(const std::vector<S>& scores, std::vector<std::int32_t>& legal, const router_settings& how) {
  legal.resize(scores.size());
  std::iota(legal.begin(), legal.end(), 0);
  if (how.chosen_groups == how.groups) return;
  const std::size_t size = scores.size() / static_cast<std::size_t>(how.groups);
  std::vector<S> of_groups(static_cast<std::size_t>(how.groups));
  std::vector<std::int32_t> groups(of_groups.size());
  std::iota(groups.begin(), groups.end(), 0);
  for (std::size_t g = 0; g < of_groups.size(); ++g) {
    S largest = -std::numeric_limits<S>::infinity(), second = largest;
    for (std::size_t e = g * size; e < (g + 1) * size; ++e) {
      second = std::max(second, std::min(largest, scores[e]));
      largest = std::max(largest, scores[e]);
    }
    of_groups[g] = how.group_scores == group_scores::two_largest ? largest + second : largest;
  }
  best_first(groups, how.chosen_groups, of_groups);
  legal.clear();
  for (std::int64_t j = 0; j < how.chosen_groups; ++j)
    for (std::size_t e = 0; e < size; ++e)
      legal.push_back(groups[static_cast<std::size_t>(j)] * static_cast<std::int32_t>(size) +
                      static_cast<std::int32_t>(e));
}

/// Computes the probabilities for a balance loss, whose sum is 1. Returns the log-sum-exp of the scores.
template <class T, class S>
S balanced_probabilities(const T* scores, S* p, std::int64_t experts, expert_scores how) {
  S most = converted<S>(scores[0]), sum = 0, all = S(1e-20);  // if all sigmoids are 0
  for (std::int64_t e = 1; e < experts; ++e) most = std::max(most, converted<S>(scores[e]));
  for (std::int64_t e = 0; e < experts; ++e) sum += std::exp(converted<S>(scores[e]) - most);
  expert_probabilities(scores, p, experts, how);
  for (std::int64_t e = 0; e < experts; ++e) all += p[e];
  for (std::int64_t e = 0; e < experts; ++e) p[e] /= all;
  return most + std::log(sum);
}

}  // namespace detail

/// Chooses each token's experts, `chosen` [tokens, k], the best first, of equal ones the lower first, and their
/// `weights` [tokens, k]. `scores` is [tokens, experts]. A `bias` [experts], which may be null, is added to the
/// probabilities for the choice of experts and groups; weights do not include it. With `again`, `chosen` is an input,
/// and only the weights are computed.
template <class T, class B, class S>
void choose_experts(cpu&, const T* scores, const B* bias, std::int32_t* chosen, S* weights, std::int64_t tokens,
                    std::int64_t experts, const router_settings& how, bool again = false) {
  std::vector<S> p(static_cast<std::size_t>(experts)), biased;
  std::vector<std::int32_t> order;
  for (std::int64_t t = 0; t < tokens; ++t, scores += experts, chosen += how.chosen, weights += how.chosen) {
    detail::expert_probabilities(scores, p.data(), experts, how.scores);
    if (!again) {
      biased = p;
      for (std::size_t e = 0; bias && e < biased.size(); ++e) biased[e] += converted<S>(bias[e]);
      detail::take_best_groups(biased, order, how);
      detail::best_first(order, how.chosen, biased);
      std::copy_n(order.begin(), how.chosen, chosen);
    }
    const S divisor = detail::weight_divisor(p.data(), chosen, how);
    for (std::int64_t j = 0; j < how.chosen; ++j)
      weights[j] = p[static_cast<std::size_t>(chosen[j])] / divisor * static_cast<S>(how.scale);
  }
}

/// The gradient of the scores [tokens, experts] from that of the weights [tokens, k]. The choice has no gradient.
template <class T, class S>
void choose_experts_backward(cpu&, const T* scores, const std::int32_t* chosen, const S* dweights, T* dscores,
                             std::int64_t tokens, std::int64_t experts, const router_settings& how) {
  std::vector<S> p(static_cast<std::size_t>(experts)), dp(static_cast<std::size_t>(experts));
  for (std::int64_t t = 0; t < tokens; ++t) {
    detail::expert_probabilities(scores, p.data(), experts, how.scores);
    const S divisor = detail::weight_divisor(p.data(), chosen, how);
    S common = 0;  // the common term of the divisor's gradient
    if (how.normalised)
      for (std::int64_t j = 0; j < how.chosen; ++j)
        common += dweights[j] * (p[static_cast<std::size_t>(chosen[j])] / divisor);  // with one expert exactly dweights
    std::fill(dp.begin(), dp.end(), S(0));
    for (std::int64_t j = 0; j < how.chosen; ++j)
      dp[static_cast<std::size_t>(chosen[j])] = (dweights[j] - common) / divisor * static_cast<S>(how.scale);
    S mean = 0;
    if (how.scores == expert_scores::softmax)
      for (std::size_t e = 0; e < p.size(); ++e) mean += dp[e] * p[e];
    for (std::size_t e = 0; e < p.size(); ++e)
      dscores[e] =
          converted<T>(how.scores == expert_scores::softmax ? p[e] * (dp[e] - mean) : dp[e] * p[e] * (1 - p[e]));
    scores += experts, dscores += experts, chosen += how.chosen, dweights += how.chosen;
  }
}

/// counts [groups, experts] += how often `chosen` [groups, size] has each expert. A negative choice was dropped.
inline void count_experts(cpu&, const std::int32_t* chosen, std::int32_t* counts, std::int64_t groups,
                          std::int64_t size, std::int64_t experts) {
  for (std::int64_t g = 0; g < groups; ++g, counts += experts)
    for (std::int64_t j = 0; j < size; ++j, ++chosen)
      if (*chosen >= 0) ++counts[*chosen];
}

/// Computes the auxiliary losses of `scores` [groups, size, experts] as one number. It is by.z times the square of each
/// token's log-sum-exp, plus by.balance times each probability times its expert's number in `counts` [groups, experts].
/// These are integers, or numbers relative to their mean. Without counts (null) there is no balance loss. The
/// probabilities of a token have the sum 1: sigmoids are divided by their sum.
template <class T, class Count>
void router_loss(cpu&, const T* scores, const Count* counts, double* loss, std::int64_t groups, std::int64_t size,
                 std::int64_t experts, expert_scores how, const router_loss_scales& by) {
  using S = statistic_of<T>;
  std::vector<S> p(static_cast<std::size_t>(experts));
  *loss = 0;
  for (std::int64_t t = 0; t < groups * size; ++t, scores += experts) {
    const double all = static_cast<double>(detail::balanced_probabilities(scores, p.data(), experts, how));
    double own = by.z * all * all;
    for (std::int64_t e = 0; counts && e < experts; ++e)
      own += by.balance * converted<double>(counts[t / size * experts + e]) *
             static_cast<double>(p[static_cast<std::size_t>(e)]);
    if (by.entropy != 0)
      for (const S part : p)
        if (part > 0) own -= by.entropy * static_cast<double>(part) * std::log(static_cast<double>(part));
    *loss += by.quantum > 0 ? std::nearbyint(own / by.quantum) * by.quantum : own;
  }
}

/// Adds the gradient of `router_loss` times *seed to dscores; counts have no gradient.
template <class T, class Count>
void add_router_loss_gradient(cpu&, const T* scores, const Count* counts, const double* seed, T* dscores,
                              std::int64_t groups, std::int64_t size, std::int64_t experts, expert_scores how,
                              const router_loss_scales& by) {
  using S = statistic_of<T>;
  std::vector<S> p(static_cast<std::size_t>(experts));
  for (std::int64_t t = 0; t < groups * size; ++t, scores += experts, dscores += experts) {
    const double all = static_cast<double>(detail::balanced_probabilities(scores, p.data(), experts, how));
    const Count* const c = counts ? counts + t / size * experts : nullptr;
    double mean = 0;
    for (std::int64_t e = 0; c && e < experts; ++e)
      mean += converted<double>(c[e]) * static_cast<double>(p[static_cast<std::size_t>(e)]);
    for (std::int64_t e = 0; e < experts; ++e) {
      const double z = static_cast<double>(converted<S>(scores[e])), of_p = p[static_cast<std::size_t>(e)];
      const double slope = how == expert_scores::sigmoid ? 1 / (1 + std::exp(z)) : 1;
      const double balance = c ? by.balance * of_p * slope * (converted<double>(c[e]) - mean) : 0;
      const double d = balance + 2 * by.z * all * std::exp(z - all);
      dscores[e] = converted<T>(converted<S>(dscores[e]) + static_cast<S>(*seed * d));
    }
  }
}

/// Sets choices to -1 that exceed the `limit` of their expert in a sequence, counted in the order of choices and then
/// of positions. `whole` [samples, positions, k] has all choices. `choice` [samples, length, k] has those from position
/// `first` of each sequence on, or is the same array as `whole`. `in_text[p]` is the index of the token at position p
/// of the text.
inline void drop_choices(cpu&, const std::int32_t* whole, const std::int32_t* in_text, std::int64_t positions,
                         std::int32_t* choice, std::int64_t samples, std::int64_t first, std::int64_t length,
                         std::int64_t k, std::int64_t experts, std::int64_t limit) {
  std::vector<std::int64_t> taken(static_cast<std::size_t>(experts));
  for (std::int64_t s = 0; s < samples; ++s, whole += positions * k, choice += length * k) {
    std::fill(taken.begin(), taken.end(), 0);
    for (std::int64_t j = 0; j < k; ++j)
      for (std::int64_t p = 0; p < positions; ++p) {
        const std::int64_t i = in_text[p];
        const bool beyond = ++taken[static_cast<std::size_t>(whole[i * k + j])] > limit;
        if (beyond && i >= first && i < first + length) choice[(i - first) * k + j] = -1;
      }
  }
}

/// Sorts n choices, k per token, into rows by part, and by token within a part. `part_of[e]` is the part of expert e,
/// negative if another rank has its rows. counts [parts] gets the rows of each part. places [n] gets the row of each
/// choice, or -1. tokens [n] gets the token of each row, and is not written after the last row. With `padded`, its
/// parts begin at the given rows, and tokens [padded.rows] gets -1 for rows without a token.
inline void sort_choices(cpu&, const std::int32_t* choice, const std::int32_t* part_of, std::int64_t n, std::int64_t k,
                         std::int64_t parts, std::int32_t* counts, std::int32_t* places, std::int32_t* tokens,
                         padded_parts padded = {}) {
  const auto part = [&](std::int64_t j) { return choice[j] < 0 ? -1 : part_of[choice[j]]; };
  std::fill_n(counts, parts, 0);
  for (std::int64_t j = 0; j < n; ++j)
    if (part(j) >= 0) ++counts[part(j)];
  std::vector<std::int32_t> next(static_cast<std::size_t>(parts));
  if (padded.begins)
    std::copy_n(padded.begins, parts, next.begin()), std::fill_n(tokens, padded.rows, -1);
  else
    std::exclusive_scan(counts, counts + parts, next.begin(), 0);
  for (std::int64_t j = 0; j < n; ++j) {
    places[j] = part(j) < 0 ? -1 : next[static_cast<std::size_t>(part(j))]++;
    if (places[j] >= 0) tokens[places[j]] = static_cast<std::int32_t>(j / k);
  }
}

/// Computes the order by expert, and then by peer, of rows that arrived by peer and then by expert; counts [peers,
/// experts] has their numbers. Row i by expert is row sorted[i] in order of arrival, and `unsorted` is the inverse.
inline void sort_arrivals(cpu&, const std::int32_t* counts, std::int64_t peers, std::int64_t experts,
                          std::int32_t* sorted, std::int32_t* unsorted) {
  std::vector<std::int32_t> begins(static_cast<std::size_t>(peers * experts));
  std::exclusive_scan(counts, counts + peers * experts, begins.begin(), 0);
  std::int32_t lies = 0;
  for (std::int64_t e = 0; e < experts; ++e)
    for (std::int64_t i = e; i < peers * experts; i += experts)
      for (std::int32_t row = begins[static_cast<std::size_t>(i)], rows = counts[i]; rows > 0; --rows, ++row) {
        unsorted[row] = lies;
        sorted[lies++] = row;
      }
}

/// out [rows, width]: row i is row from[i] of `in`, or zeros if from[i] is negative.
template <class T>
void gather_rows(cpu&, const T* in, const std::int32_t* from, T* out, std::int64_t rows, std::int64_t width) {
  for (std::int64_t i = 0; i < rows; ++i) {
    if (from[i] < 0)
      std::fill_n(out + i * width, width, T{});
    else
      std::copy_n(in + from[i] * width, width, out + i * width);
  }
}

/// Changes the value that a router keeps for each expert by a rule, from the counts [experts] of all tokens of a step.
/// Does nothing if `clipped` says that the step was skipped; null: it was not.
template <class M>
void update_router_state(cpu&, M* values, const std::int32_t* counts, std::int64_t experts, router_state_rule rule,
                         const clip_numbers* clipped) {
  if (clipped && clipped->update == 0) return;
  const std::int64_t all = std::accumulate(counts, counts + experts, std::int64_t{0});
  for (std::int64_t e = 0; e < experts; ++e)
    values[e] = converted<M>(rule.next(static_cast<double>(values[e]), counts[e] * experts, all));
}

/// y [tokens, width]: the sum of a token's `rows`, at indices at[t, j], each times weights[t, j], or unweighted if
/// `weights` is null. A negative index is a row of another rank.
template <class T, class S>
void sum_rows(cpu&, const T* rows, const std::int32_t* at, const S* weights, T* y, std::int64_t tokens, std::int64_t k,
              std::int64_t width) {
  std::vector<S> sum(static_cast<std::size_t>(width));
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::fill(sum.begin(), sum.end(), S(0));
    for (std::int64_t j = t * k; j < (t + 1) * k; ++j) {
      if (at[j] < 0) continue;
      const S weight = weights ? weights[j] : S(1);
      for (std::int64_t c = 0; c < width; ++c)
        sum[static_cast<std::size_t>(c)] += weight * converted<S>(rows[at[j] * width + c]);
    }
    for (std::int64_t c = 0; c < width; ++c) y[t * width + c] = converted<T>(sum[static_cast<std::size_t>(c)]);
  }
}

/// The gradients of `sum_rows` from dy [tokens, width]: for its rows, and for its weights [tokens, k].
template <class T, class S>
void sum_rows_backward(cpu&, const T* rows, const std::int32_t* at, const S* weights, const T* dy, T* drows,
                       S* dweights, std::int64_t tokens, std::int64_t k, std::int64_t width) {
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t j = t * k; j < (t + 1) * k; ++j) {
      S dot = 0;
      for (std::int64_t c = 0; at[j] >= 0 && c < width; ++c) {
        const S d = converted<S>(dy[t * width + c]);
        dot += d * converted<S>(rows[at[j] * width + c]);
        drows[at[j] * width + c] = converted<T>(weights[j] * d);
      }
      dweights[j] = dot;
    }
}

/// y [rows, width]: each row of `x` times the sigmoid of its gate.
template <class T>
void multiply_by_gates(cpu&, const T* x, const T* gates, T* y, std::int64_t rows, std::int64_t width) {
  using S = arithmetic<T>;
  for (std::int64_t r = 0; r < rows; ++r) {
    const S gate = S(1) / (S(1) + std::exp(-converted<S>(gates[r])));
    for (std::int64_t c = r * width; c < (r + 1) * width; ++c) y[c] = converted<T>(gate * converted<S>(x[c]));
  }
}

/// The gradients of `multiply_by_gates` from dy [rows, width]: for x, and for the gates [rows].
template <class T>
void multiply_by_gates_backward(cpu&, const T* x, const T* gates, const T* dy, T* dx, T* dgates, std::int64_t rows,
                                std::int64_t width) {
  using S = arithmetic<T>;
  for (std::int64_t r = 0; r < rows; ++r) {
    const S gate = S(1) / (S(1) + std::exp(-converted<S>(gates[r])));
    S dot = 0;
    for (std::int64_t c = r * width; c < (r + 1) * width; ++c) {
      dot += converted<S>(dy[c]) * converted<S>(x[c]);
      dx[c] = converted<T>(gate * converted<S>(dy[c]));
    }
    dgates[r] = converted<T>(dot * gate * (1 - gate));
  }
}

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
