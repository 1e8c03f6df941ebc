// Compares the kernels of mixtures of experts with plain formulas: the choice, its weights and their gradients.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "plait/kernels/kernels.hpp"
#include "support/test_data.hpp"

using namespace plait;
using kernels::expert_scores;
using kernels::group_scores;
using kernels::router_settings;

namespace {

/// The weights of one token over all experts, zero for those not chosen: all variants of the formula in one function.
std::vector<double> dense_weights(const std::vector<double>& z, const std::vector<double>& bias,
                                  const router_settings& how) {
  std::vector<double> p(z.size()), w(z.size());
  const std::size_t size = z.size() / static_cast<std::size_t>(how.groups);
  double all = 0;
  for (std::size_t e = 0; e < z.size(); ++e)
    all += p[e] = how.scores == expert_scores::softmax ? std::exp(z[e]) : 1 / (1 + std::exp(-z[e]));
  if (how.scores == expert_scores::softmax)
    for (double& x : p) x /= all;
  std::vector<double> u = p, groups;
  for (std::size_t e = 0; e < bias.size(); ++e) u[e] += bias[e];
  for (std::size_t g = 0; g < z.size(); g += size) {
    std::vector<double> of_group(&u[g], &u[g] + size);
    std::sort(of_group.rbegin(), of_group.rend());
    groups.push_back(of_group[0] + (how.group_scores == group_scores::two_largest ? of_group[1] : 0));
  }
  const auto better = [](const std::vector<double>& scores, std::size_t o, std::size_t e) {
    return scores[o] > scores[e] || (scores[o] == scores[e] && o < e);
  };
  double sum = 0;
  for (std::size_t e = 0; e < z.size(); ++e) {
    std::int64_t before = 0, groups_before = 0;
    for (std::size_t g = 0; g < groups.size(); ++g) groups_before += better(groups, g, e / size);
    for (std::size_t o = 0; o < z.size(); ++o) {
      std::int64_t before_its_group = 0;
      for (std::size_t g = 0; g < groups.size(); ++g) before_its_group += better(groups, g, o / size);
      before += before_its_group < how.chosen_groups && better(u, o, e);
    }
    if (groups_before < how.chosen_groups && before < how.chosen) sum += w[e] = p[e];
  }
  for (double& x : w) x *= how.scale / (how.normalised ? sum : 1);
  return w;
}

void check(const std::vector<double>& z, const router_settings& how, const std::vector<double>& bias = {}) {
  cpu device;
  const auto experts = static_cast<std::int64_t>(z.size());
  std::vector<std::int32_t> chosen(static_cast<std::size_t>(how.chosen));
  std::vector<double> weights(chosen.size()), dz(z.size()), dw(chosen.size());
  kernels::choose_experts(device, z.data(), bias.empty() ? nullptr : bias.data(), chosen.data(), weights.data(), 1,
                          experts, how);
  const std::vector<double> expected = dense_weights(z, bias, how);
  for (std::size_t j = 0; j < chosen.size(); ++j) {
    CHECK(weights[j] == doctest::Approx(expected[static_cast<std::size_t>(chosen[j])]).epsilon(1e-12));
    if (j > 0 && bias.empty())
      CHECK((weights[j] < weights[j - 1] || (weights[j] == weights[j - 1] && chosen[j] > chosen[j - 1])));
    // Depends on the expert, so the order of a token's experts has no effect.
    dw[j] = 0.3 + 0.2 * static_cast<double>(chosen[j]);
  }
  kernels::choose_experts_backward(device, z.data(), chosen.data(), dw.data(), dz.data(), 1, experts, how);
  if (how.normalised && how.chosen == 1) CHECK(dz == std::vector<double>(z.size()));  // the weight is constant
  const auto value = [&](const std::vector<double>& at) {
    double sum = 0;
    const std::vector<double> w = dense_weights(at, bias, how);
    for (std::size_t e = 0; e < w.size(); ++e) sum += w[e] * (0.3 + 0.2 * static_cast<double>(e));
    return sum;
  };
  for (std::size_t e = 0; e < z.size(); ++e) {
    std::vector<double> up = z, down = z;
    up[e] += 1e-6, down[e] -= 1e-6;
    CHECK(dz[e] == doctest::Approx((value(up) - value(down)) / 2e-6).epsilon(1e-6).scale(1));
  }
}

}  // namespace

TEST_CASE("weights of the chosen experts and their gradients") {
  const std::vector<double> z{0.3, -1.2, 2.1, 0.9, -0.4, 1.7};
  for (const expert_scores scores : {expert_scores::softmax, expert_scores::sigmoid})
    for (const bool normalised : {false, true})
      for (const std::int64_t k : {1, 2, 3, 6})
        check(z, {.chosen = k, .scores = scores, .normalised = normalised, .scale = 1.5});
  for (int i = 1; i < 30; ++i) check({-0.1 * i, -0.07 * i, 0.03 * i}, {.chosen = 1, .normalised = true});
  const std::vector<double> bias{0.5, 0.9, -0.6, 0.2, 0.1, -0.3};
  for (const expert_scores scores : {expert_scores::softmax, expert_scores::sigmoid})
    for (const group_scores by : {group_scores::largest, group_scores::two_largest})
      for (const bool normalised : {false, true})
        for (const std::int64_t k : {1, 2, 3, 4}) {
          const router_settings how{k, scores, normalised, 1.5, 3, 2, by};
          check(z, how);
          check(z, how, bias);
          check(z, {k, scores, normalised}, bias);
        }
}

TEST_CASE("the choices and weights of transformers' routers") {
  std::ifstream file(plait::test::test_data() + "/routers.json");
  const auto golden = nlohmann::json::parse(file);
  CHECK(golden.size() == 8);
  cpu device;
  for (const auto& [name, c] : golden.items()) {
    CAPTURE(name);
    const router_settings how{
        c.at("chosen"),
        c.at("scores") == "sigmoid" ? expert_scores::sigmoid : expert_scores::softmax,
        c.at("normalised"),
        c.at("scale"),
        c.at("groups"),
        c.at("chosen_groups"),
        c.at("group_scores") == "two_largest" ? group_scores::two_largest : group_scores::largest};
    const auto bias = c.value("bias", std::vector<float>{});
    std::vector<std::int32_t> chosen(static_cast<std::size_t>(how.chosen));
    std::vector<float> weights(chosen.size());
    for (std::size_t t = 0; t < c.at("scores_of").size(); ++t) {
      const auto z = c.at("scores_of")[t].get<std::vector<float>>();
      kernels::choose_experts(device, z.data(), bias.empty() ? nullptr : bias.data(), chosen.data(), weights.data(), 1,
                              static_cast<std::int64_t>(z.size()), how);
      std::vector<std::int32_t> ascending = chosen;
      std::sort(ascending.begin(), ascending.end());
      CHECK(ascending == c.at("chosen_experts")[t].get<std::vector<std::int32_t>>());
      for (std::size_t j = 0; j < chosen.size(); ++j) {
        const auto place =
            static_cast<std::size_t>(std::find(ascending.begin(), ascending.end(), chosen[j]) - ascending.begin());
        CHECK(weights[j] == doctest::Approx(c.at("weights")[t][place].get<double>()).epsilon(1e-6));
      }
    }
  }
}

// Mixtral's balance loss has no factor 1 / k, so it is k when plait's is 1.
TEST_CASE("the balance loss and the z-loss of transformers") {
  std::ifstream file(plait::test::test_data() + "/router_losses.json");
  const auto golden = nlohmann::json::parse(file);
  const auto scores = golden.at("scores").at("values").get<std::vector<double>>();
  const auto tokens = golden.at("scores").at("shape")[0].get<std::int64_t>(),
             experts = golden.at("scores").at("shape")[1].get<std::int64_t>();
  cpu device;
  for (const auto& c : golden.at("cases")) {
    const auto k = c.at("chosen").get<std::int64_t>();
    const auto balance = c.at("balance").get<double>(), z_loss = c.at("z_loss").get<double>(),
               n = static_cast<double>(tokens);
    std::vector<std::int32_t> chosen(static_cast<std::size_t>(tokens * k)), counts(static_cast<std::size_t>(experts));
    std::vector<double> weights(chosen.size()), dscores(scores.size());
    kernels::choose_experts(device, scores.data(), static_cast<const double*>(nullptr), chosen.data(), weights.data(),
                            tokens, experts, {.chosen = k});
    kernels::count_experts(device, chosen.data(), counts.data(), 1, tokens * k, experts);
    const kernels::router_loss_scales by{balance * static_cast<double>(experts) / (n * n), z_loss / n};
    double loss = 0, seed = 1;
    kernels::router_loss(device, scores.data(), counts.data(), &loss, 1, tokens, experts, expert_scores::softmax, by);
    kernels::add_router_loss_gradient(device, scores.data(), counts.data(), &seed, dscores.data(), 1, tokens, experts,
                                      expert_scores::softmax, by);
    CHECK(loss == doctest::Approx(c.at("loss").get<double>()).epsilon(1e-13));
    const auto expected = c.at("dscores").at("values").get<std::vector<double>>();
    REQUIRE(expected.size() == dscores.size());
    for (std::size_t i = 0; i < dscores.size(); ++i)
      CHECK(dscores[i] == doctest::Approx(expected[i]).epsilon(1e-12).scale(1));
  }
}

TEST_CASE("of equal scores the lower expert is chosen; large scores do not overflow") {
  cpu device;
  const std::vector<float> z{1e4f, 3.0f, 1e4f, 1e4f};
  std::int32_t chosen[2];
  float weights[2];
  kernels::choose_experts(device, z.data(), static_cast<const float*>(nullptr), chosen, weights, 1, 4, {.chosen = 2});
  CHECK((chosen[0] == 0 && chosen[1] == 2 && weights[0] == 0.5f && weights[1] == 0.5f));
  const float alike[]{1, 1, 1, 1, 1, 1, 1, 1}, bias[]{0, 0, 1, 1, 0, 1.5f, 1, 1};
  for (const group_scores by : {group_scores::largest, group_scores::two_largest}) {
    const router_settings two_groups{.groups = 4, .chosen_groups = 2, .group_scores = by};
    kernels::choose_experts(device, alike, static_cast<const float*>(nullptr), chosen, weights, 1, 8, two_groups);
    CHECK((chosen[0] == 0 && chosen[1] == 1 && weights[0] == 0.5f && weights[1] == 0.5f));
    kernels::choose_experts(device, alike, bias, chosen, weights, 1, 8, two_groups);
    CHECK((chosen[0] == (by == group_scores::largest ? 5 : 2) && chosen[1] == (by == group_scores::largest ? 2 : 3)));
  }
}

TEST_CASE("rows of other ranks add nothing, and have no gradient") {
  cpu device;
  const std::vector<float> rows{1, 2, 3, 4}, w{0.5f, 2.0f, 1.0f, 4.0f}, dy{1, 1, 2, 0};
  const std::vector<std::int32_t> at{1, -1, 0, -1};  // two tokens of two experts each, in rows of two
  std::vector<float> y(4), drows(4), dw(4);
  kernels::sum_rows(device, rows.data(), at.data(), w.data(), y.data(), 2, 2, 2);
  CHECK(y == std::vector<float>{1.5f, 2, 1, 2});
  kernels::sum_rows(device, rows.data(), at.data(), static_cast<const float*>(nullptr), y.data(), 2, 2, 2);
  CHECK(y == std::vector<float>{3, 4, 1, 2});
  kernels::sum_rows_backward(device, rows.data(), at.data(), w.data(), dy.data(), drows.data(), dw.data(), 2, 2, 2);
  CHECK(drows == std::vector<float>{2, 0, 0.5f, 0.5f});
  CHECK(dw == std::vector<float>{7, 0, 2, 0});
  const std::vector<std::int32_t> from{1, 1, 0};
  std::vector<float> taken(6);
  kernels::gather_rows(device, rows.data(), from.data(), taken.data(), 3, 2);
  CHECK(taken == std::vector<float>{3, 4, 3, 4, 1, 2});
}

TEST_CASE("counts of experts are exact beyond the integers that bf16 has") {
  cpu device;
  const std::vector<std::int32_t> chosen(300, 1);
  std::vector<std::int32_t> counts(4, 0);
  for (int pass = 0; pass < 2; ++pass) kernels::count_experts(device, chosen.data(), counts.data(), 1, 300, 2);
  CHECK(counts == std::vector<std::int32_t>{0, 600, 0, 0});
  kernels::count_experts(device, chosen.data(), counts.data(), 2, 150, 2);
  CHECK(counts == std::vector<std::int32_t>{0, 750, 0, 150});
}

TEST_CASE("choices beyond the limit are dropped: later choices first, then later positions") {
  cpu device;
  constexpr std::int64_t samples = 2, positions = 8, k = 3, experts = 4, limit = 5, first = 2, length = 4;
  std::vector<std::int32_t> whole, in_text{3, 0, 6, 1, 7, 2, 5, 4};
  for (std::int32_t i = 0; i < samples * positions; ++i)
    for (std::int32_t j = 0; j < k; ++j) whole.push_back((i * i + i / 3 + j) % experts);  // three different ones
  std::vector<std::int32_t> expected = whole, here, expected_here;
  int dropped = 0;
  for (std::int64_t s = 0; s < samples; ++s)
    for (std::int64_t i = 0; i < positions; ++i)
      for (std::int64_t j = 0; j < k; ++j) {
        const auto at = [&](std::int64_t token, std::int64_t choice) {
          return static_cast<std::size_t>((s * positions + token) * k + choice);
        };
        const auto place = [&](std::int64_t token) { return std::find(in_text.begin(), in_text.end(), token); };
        int before = 0;  // the number of earlier choices of the same expert
        for (std::int64_t token = 0; token < positions; ++token)
          for (std::int64_t choice = 0; choice < k; ++choice)
            before +=
                whole[at(token, choice)] == whole[at(i, j)] && (choice < j || (choice == j && place(token) < place(i)));
        if (before >= limit) expected[at(i, j)] = -1, ++dropped;
        if (i < first || i >= first + length) continue;
        here.push_back(whole[at(i, j)]);
        expected_here.push_back(expected[at(i, j)]);
      }
  CHECK((dropped > 4 && dropped < samples * positions * k / 2));
  kernels::drop_choices(device, whole.data(), in_text.data(), positions, here.data(), samples, first, length, k,
                        experts, limit);
  CHECK(here == expected_here);
  kernels::drop_choices(device, whole.data(), in_text.data(), positions, whole.data(), samples, 0, positions, k,
                        experts, limit);
  CHECK(whole == expected);
}
