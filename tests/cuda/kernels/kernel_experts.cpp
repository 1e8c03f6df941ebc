// The kernels of mixtures of experts on a GPU against those of the CPU.
#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "plait/kernels/kernels.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using indices = std::vector<std::int32_t>;

template <class T>
std::vector<T> typed_values(const values& from) {
  std::vector<T> to;
  for (const double x : from) to.push_back(typed<T>(x));
  return to;
}
template <class T>
values widened_values(const std::vector<T>& from) {
  values to;
  for (const T x : from) to.push_back(widened(x));
  return to;
}
/// Halves, so that there are ties in every token, and they are exact on every device.
values scores_with_ties(std::int64_t n) {
  std::mt19937 generator(3);
  values scores(static_cast<std::size_t>(n));
  for (double& z : scores) z = 0.5 * static_cast<double>(generator() % 7) - 1.5;
  return scores;
}
/// Choices of k different experts for each token.
indices choices_of(std::int64_t tokens, std::int64_t k, std::int64_t experts) {
  std::mt19937 generator(5);
  indices choice;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto first = static_cast<std::int64_t>(generator() % 11);
    for (std::int64_t j = 0; j < k; ++j) choice.push_back(static_cast<std::int32_t>((first * first + j) % experts));
  }
  return choice;
}

template <class T, class B>
void check_choice(const kernels::router_settings& how, std::int64_t experts, bool biased) {
  using S = statistic_of<T>;
  constexpr std::int64_t tokens = 37;
  cuda device;
  cpu host;
  const auto n = static_cast<std::size_t>(tokens * how.chosen);
  const values z = scores_with_ties(tokens * experts), b = random_values<B>(experts, 2, 0.3),
               dw = random_values<S>(tokens * how.chosen, 4);
  number_array<T> scores(device, z), dscores(device, tokens * experts);
  number_array<B> bias(device, b);
  number_array<S> weights(device, tokens * how.chosen), dweights(device, dw);
  device_array<std::int32_t> chosen(device, indices(n));
  kernels::choose_experts(device, scores.view(), biased ? bias.view() : nullptr, chosen.data(), weights.data(), tokens,
                          experts, how);
  kernels::choose_experts_backward(device, scores.view(), chosen.data(), dweights.view(), dscores.data(), tokens,
                                   experts, how);
  const auto z_here = typed_values<T>(z);
  const auto b_here = typed_values<B>(b);
  const auto dw_here = typed_values<S>(dw);
  indices chosen_here(n);
  std::vector<S> weights_here(n);
  std::vector<T> dscores_here(z.size());
  kernels::choose_experts(host, z_here.data(), biased ? b_here.data() : nullptr, chosen_here.data(),
                          weights_here.data(), tokens, experts, how);
  kernels::choose_experts_backward(host, z_here.data(), chosen_here.data(), dw_here.data(), dscores_here.data(), tokens,
                                   experts, how);
  CHECK(chosen.read() == chosen_here);
  CHECK(difference(weights.read(), widened_values(weights_here)) < tolerance<S>);
  CHECK(difference(dscores.read(), widened_values(dscores_here)) < tolerance<T>);
}

template <class T, class B>
void check_choices() {
  using kernels::expert_scores, kernels::group_scores;
  for (const bool biased : {false, true}) {
    check_choice<T, B>({}, 8, biased);
    check_choice<T, B>({.chosen = 5, .normalised = false, .scale = 2.5}, 77, biased);
    check_choice<T, B>({.chosen = 8,
                        .scores = expert_scores::sigmoid,
                        .groups = 8,
                        .chosen_groups = 4,
                        .group_scores = group_scores::two_largest},
                       64, biased);
    check_choice<T, B>({.chosen = 6, .normalised = false, .groups = 40, .chosen_groups = 3}, 120, biased);
  }
}

template <class T>
void check_losses(kernels::expert_scores how, bool balances, std::int64_t experts) {
  constexpr std::int64_t groups = 3, size = 11, k = 2;
  constexpr kernels::router_loss_scales by{.balance = 0.01, .z = 0.02, .entropy = 0.3};
  cuda device;
  cpu host;
  const auto n = static_cast<std::size_t>(groups * experts);
  const values z = random_values<T>(groups * size * experts, 6), d = random_values<T>(groups * size * experts, 7);
  const indices choice = choices_of(groups * size, k, experts);
  number_array<T> scores(device, z), dscores(device, d);
  device_array<std::int32_t> chosen(device, choice), counts(device, indices(n, 2));
  device_array<double> loss(device, {9.0}), seed(device, {0.5});
  kernels::count_experts(device, chosen.data(), counts.data(), groups, size * k, experts);
  const std::int32_t* const counted = balances ? counts.data() : nullptr;
  kernels::router_loss(device, scores.view(), counted, loss.data(), groups, size, experts, how, by);
  kernels::add_router_loss_gradient(device, scores.view(), counted, seed.data(), dscores.data(), groups, size, experts,
                                    how, by);
  const auto z_here = typed_values<T>(z);
  auto d_here = typed_values<T>(d);
  indices counts_here(n, 2);
  double loss_here = 0, seed_here = 0.5;
  kernels::count_experts(host, choice.data(), counts_here.data(), groups, size * k, experts);
  const std::int32_t* const counted_here = balances ? counts_here.data() : nullptr;
  kernels::router_loss(host, z_here.data(), counted_here, &loss_here, groups, size, experts, how, by);
  kernels::add_router_loss_gradient(host, z_here.data(), counted_here, &seed_here, d_here.data(), groups, size, experts,
                                    how, by);
  CHECK(counts.read() == counts_here);
  CHECK(loss.read()[0] == doctest::Approx(loss_here).epsilon(tolerance<statistic_of<T>>));
  CHECK(difference(dscores.read(), widened_values(d_here)) < tolerance<T>);
}

template <class T>
void check_rows(std::int64_t width, std::size_t lead) {
  using S = statistic_of<T>;
  constexpr std::int64_t tokens = 9, k = 2, rows = 15;
  cuda device;
  cpu host;
  indices at, from;  // a row for each choice but three
  for (std::int32_t j = 0; j < tokens * k; ++j) at.push_back(j % 6 == 4 ? -1 : (j - (j + 1) / 6) * 7 % 15);
  for (std::int32_t row = 0; row < rows; ++row) from.push_back(row * 5 % 9);
  const values x = random_values<T>(tokens * width, 1), r = random_values<T>(rows * width, 2),
               w = random_values<S>(tokens * k, 3), g = random_values<T>(tokens, 4);
  number_array<T> in(device, x, lead), of_rows(device, r, lead), gates(device, g),
      taken(device, values(r.size()), lead), sums(device, values(x.size()), lead),
      plain_sums(device, values(x.size()), lead), drows(device, r, lead), gated(device, values(x.size()), lead),
      dgated(device, values(x.size()), lead), dgates(device, tokens);
  number_array<S> weights(device, w), dweights(device, tokens * k);
  device_array<std::int32_t> places(device, at), sources(device, from);
  kernels::take_rows(device, in.view(), sources.data(), taken.data(), rows, width);
  kernels::sum_rows(device, of_rows.view(), places.data(), weights.view(), sums.data(), tokens, k, width);
  kernels::sum_rows(device, of_rows.view(), places.data(), static_cast<const S*>(nullptr), plain_sums.data(), tokens, k,
                    width);
  kernels::sum_rows_backward(device, of_rows.view(), places.data(), weights.view(), in.view(), drows.data(),
                             dweights.data(), tokens, k, width);
  kernels::multiply_by_gates(device, in.view(), gates.view(), gated.data(), tokens, width);
  kernels::multiply_by_gates_backward(device, in.view(), gates.view(), sums.view(), dgated.data(), dgates.data(),
                                      tokens, width);
  const auto x_here = typed_values<T>(x), r_here = typed_values<T>(r), g_here = typed_values<T>(g);
  const auto w_here = typed_values<S>(w);
  std::vector<T> taken_here(r.size()), sums_here(x.size()), plain_here(x.size()),
      drows_here = r_here, gated_here(x.size()), dgated_here(x.size()), dgates_here(g.size());
  std::vector<S> dweights_here(w.size());
  kernels::take_rows(host, x_here.data(), from.data(), taken_here.data(), rows, width);
  kernels::sum_rows(host, r_here.data(), at.data(), w_here.data(), sums_here.data(), tokens, k, width);
  kernels::sum_rows(host, r_here.data(), at.data(), static_cast<const S*>(nullptr), plain_here.data(), tokens, k,
                    width);
  kernels::sum_rows_backward(host, r_here.data(), at.data(), w_here.data(), x_here.data(), drows_here.data(),
                             dweights_here.data(), tokens, k, width);
  kernels::multiply_by_gates(host, x_here.data(), g_here.data(), gated_here.data(), tokens, width);
  kernels::multiply_by_gates_backward(host, x_here.data(), g_here.data(), sums_here.data(), dgated_here.data(),
                                      dgates_here.data(), tokens, width);
  CHECK(test::same_bits(taken.raw(), taken_here));
  CHECK(difference(sums.read(), widened_values(sums_here)) < tolerance<T>);
  CHECK(difference(plain_sums.read(), widened_values(plain_here)) < tolerance<T>);
  CHECK(difference(drows.read(), widened_values(drows_here)) < tolerance<T>);
  CHECK(difference(dweights.read(), widened_values(dweights_here)) < tolerance<S>);
  CHECK(difference(gated.read(), widened_values(gated_here)) < tolerance<T>);
  CHECK(difference(dgated.read(), widened_values(dgated_here)) < tolerance<T>);
  CHECK(difference(dgates.read(), widened_values(dgates_here)) < tolerance<T>);
}

}  // namespace

TEST_CASE("the choice of experts with exact ties, its weights and their gradients") {
  check_choices<float, float>();
  check_choices<double, double>();
  check_choices<bf16, float>();
  check_choices<bf16, bf16>();
}

TEST_CASE_TEMPLATE("a router's losses and their gradients", T, float, double, bf16) {
  for (const auto how : {kernels::expert_scores::softmax, kernels::expert_scores::sigmoid})
    for (const bool balances : {false, true})
      for (const std::int64_t experts : {4, 70}) check_losses<T>(how, balances, experts);
}

TEST_CASE_TEMPLATE("rows of experts, taken and summed, and gates", T, float, double, bf16) {
  for (const std::int64_t width : {1, 7, 64, 328})
    for (const std::size_t lead : {std::size_t{0}, std::size_t{1}}) check_rows<T>(width, lead);
}

TEST_CASE("choices beyond the limit of experts") {
  constexpr std::int64_t samples = 3, positions = 70, first = 20, length = 40, k = 3, experts = 7, limit = 17;
  cuda device;
  cpu host;
  indices in_text;
  for (std::int32_t p = 0; p < positions; ++p) in_text.push_back(p * 11 % 70);
  indices whole = choices_of(samples * positions, k, experts), part;
  for (std::int64_t s = 0; s < samples; ++s)
    part.insert(part.end(), whole.begin() + (s * positions + first) * k,
                whole.begin() + (s * positions + first + length) * k);
  device_array<std::int32_t> order(device, in_text), all(device, whole), own(device, part);
  kernels::drop_choices(device, all.data(), order.data(), positions, own.data(), samples, first, length, k, experts,
                        limit);
  kernels::drop_choices(device, all.data(), order.data(), positions, all.data(), samples, 0, positions, k, experts,
                        limit);
  kernels::drop_choices(host, whole.data(), in_text.data(), positions, part.data(), samples, first, length, k, experts,
                        limit);
  kernels::drop_choices(host, whole.data(), in_text.data(), positions, whole.data(), samples, 0, positions, k, experts,
                        limit);
  CHECK(own.read() == part);
  CHECK(all.read() == whole);
}

TEST_CASE("the route of rows, with dropped choices and experts of other ranks") {
  constexpr std::int64_t tokens = 333, k = 3, experts = 12, peers = 2, of_each = 4, parts = peers * of_each;
  cuda device;
  cpu host;
  const indices part_of{4, 5, 6, 7, -1, -1, -1, -1, 0, 1, 2, 3};
  indices choice = choices_of(tokens, k, experts);
  for (std::size_t j = 0; j < choice.size(); j += 13) choice[j] = -1;
  const auto n = static_cast<std::size_t>(tokens * k);
  device_array<std::int32_t> chosen(device, choice), table(device, part_of), counts(device, indices(parts, 9)),
      places(device, indices(n)), of_rows(device, indices(n, -7));
  kernels::sort_choices(device, chosen.data(), table.data(), tokens * k, k, parts, counts.data(), places.data(),
                        of_rows.data());
  indices counts_here(parts, 9), places_here(n), tokens_here(n, -7);
  kernels::sort_choices(host, choice.data(), part_of.data(), tokens * k, k, parts, counts_here.data(),
                        places_here.data(), tokens_here.data());
  CHECK(counts.read() == counts_here);
  CHECK(places.read() == places_here);
  CHECK(of_rows.read() == tokens_here);
  std::size_t rows = 0;
  for (const std::int32_t c : counts_here) rows += static_cast<std::size_t>(c);
  device_array<std::int32_t> sorted(device, indices(rows)), unsorted(device, indices(rows));
  kernels::sort_arrivals(device, counts.data(), peers, of_each, sorted.data(), unsorted.data());
  indices sorted_here(rows), unsorted_here(rows);
  kernels::sort_arrivals(host, counts_here.data(), peers, of_each, sorted_here.data(), unsorted_here.data());
  CHECK(sorted.read() == sorted_here);
  CHECK(unsorted.read() == unsorted_here);
}
