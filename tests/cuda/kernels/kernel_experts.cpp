// program: kernels
// Compares the kernels of mixtures of experts on a GPU with those of the cpu.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "plait/kernels/kernels.hpp"

using namespace plait;
using namespace plait::test;

namespace kernel_experts {  // files of one program may have helpers of the same name

using indices = std::vector<std::int32_t>;

/// Multiples of 1/2, so every token has ties and all are exact on every device.
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
  struct made {
    indices chosen;
    values weights, dscores;
  };
  const auto run = [&]<class Device>(Device device) {
    number_array<T, Device> scores(device, scores_with_ties(tokens * experts)), dscores(device, tokens * experts);
    number_array<B, Device> bias(device, random_values<B>(experts, 2, 0.3));
    number_array<S, Device> weights(device, tokens * how.chosen);
    number_array<S, Device> dweights(device, random_values<S>(tokens * how.chosen, 4));
    device_array<std::int32_t, Device> chosen(device, indices(static_cast<std::size_t>(tokens * how.chosen)));
    kernels::choose_experts(device, scores.view(), biased ? bias.view() : nullptr, chosen.data(), weights.data(),
                            tokens, experts, how);
    kernels::choose_experts_backward(device, scores.view(), chosen.data(), dweights.view(), dscores.data(), tokens,
                                     experts, how);
    return made{chosen.read(), weights.read(), dscores.read()};
  };
  const made got = run(cuda{}), expected = run(cpu{});
  CHECK(got.chosen == expected.chosen);
  CHECK(difference(got.weights, expected.weights) < tolerance<S>);
  CHECK(difference(got.dscores, expected.dscores) < tolerance<T>);
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

enum class balanced_by : std::uint8_t { nothing, counts, load };  // load: relative to a mean

template <class T, class Load = statistic_of<T>>
void check_losses(kernels::expert_scores how, balanced_by what, std::int64_t experts) {
  constexpr std::int64_t groups = 3, size = 11, k = 2;
  constexpr kernels::router_loss_scales by{.balance = 0.01, .z = 0.02, .entropy = 0.3};
  struct made {
    indices counts;
    double loss;
    values dscores;
  };
  const auto run = [&]<class Device>(Device device) {
    number_array<T, Device> scores(device, random_values<T>(groups * size * experts, 6));
    number_array<T, Device> dscores(device, random_values<T>(groups * size * experts, 7));
    device_array<std::int32_t, Device> chosen(device, choices_of(groups * size, k, experts));
    device_array<std::int32_t, Device> counts(device, indices(static_cast<std::size_t>(groups * experts), 2));
    device_array<double, Device> loss(device, {9.0}), seed(device, {0.5});
    kernels::count_experts(device, chosen.data(), counts.data(), groups, size * k, experts);
    number_array<Load, Device> load(device, random_values<Load>(groups * experts, 8));
    const auto add = [&](const auto* of_experts) {
      kernels::router_loss(device, scores.view(), of_experts, loss.data(), groups, size, experts, how, by);
      kernels::add_router_loss_gradient(device, scores.view(), of_experts, seed.data(), dscores.data(), groups, size,
                                        experts, how, by);
    };
    if (what == balanced_by::load)
      add(load.view());
    else
      add(what == balanced_by::counts ? counts.data() : nullptr);
    return made{counts.read(), loss.read()[0], dscores.read()};
  };
  const made got = run(cuda{}), expected = run(cpu{});
  CHECK(got.counts == expected.counts);
  CHECK(got.loss == doctest::Approx(expected.loss).epsilon(tolerance<statistic_of<T>>));
  CHECK(difference(got.dscores, expected.dscores) < tolerance<T>);
}

template <class T>
void check_rows(std::int64_t width, std::size_t lead) {
  using S = statistic_of<T>;
  constexpr std::int64_t tokens = 9, k = 2, rows = 15;
  indices at, from;  // one row for each choice except three
  for (std::int32_t j = 0; j < tokens * k; ++j) at.push_back(j % 6 == 4 ? -1 : (j - (j + 1) / 6) * 7 % 15);
  for (std::int32_t row = 0; row < rows; ++row) from.push_back(row % 4 == 2 ? -1 : row * 5 % 9);  // -1: padding
  struct made {
    std::vector<T> taken;
    std::vector<values> numbers;
    values dweights;
  };
  const auto run = [&]<class Device>(Device device) {
    const values of_tokens(static_cast<std::size_t>(tokens * width)), r = random_values<T>(rows * width, 2);
    number_array<T, Device> in(device, random_values<T>(tokens * width, 1), lead), of_rows(device, r, lead),
        gates(device, random_values<T>(tokens, 4)), taken(device, values(r.size()), lead),
        sums(device, of_tokens, lead), plain_sums(device, of_tokens, lead), drows(device, r, lead),
        gated(device, of_tokens, lead), dgated(device, of_tokens, lead), dgates(device, tokens);
    number_array<S, Device> weights(device, random_values<S>(tokens * k, 3)), dweights(device, tokens * k);
    device_array<std::int32_t, Device> places(device, at), sources(device, from);
    kernels::gather_rows(device, in.view(), sources.data(), taken.data(), rows, width);
    kernels::sum_rows(device, of_rows.view(), places.data(), weights.view(), sums.data(), tokens, k, width);
    kernels::sum_rows(device, of_rows.view(), places.data(), static_cast<const S*>(nullptr), plain_sums.data(), tokens,
                      k, width);
    kernels::sum_rows_backward(device, of_rows.view(), places.data(), weights.view(), in.view(), drows.data(),
                               dweights.data(), tokens, k, width);
    kernels::multiply_by_gates(device, in.view(), gates.view(), gated.data(), tokens, width);
    kernels::multiply_by_gates_backward(device, in.view(), gates.view(), sums.view(), dgated.data(), dgates.data(),
                                        tokens, width);
    return made{taken.raw(),
                {sums.read(), plain_sums.read(), drows.read(), gated.read(), dgated.read(), dgates.read()},
                dweights.read()};
  };
  const made got = run(cuda{}), expected = run(cpu{});
  CHECK(test::same_bits(got.taken, expected.taken));
  for (std::size_t i = 0; i < expected.numbers.size(); ++i) {
    CAPTURE(i);
    CHECK(difference(got.numbers[i], expected.numbers[i]) < tolerance<T>);
  }
  CHECK(difference(got.dweights, expected.dweights) < tolerance<S>);
}

TEST_CASE("the choice of experts with exact ties, its weights and their gradients") {
  check_choices<float, float>();
  check_choices<double, double>();
  check_choices<bf16, float>();
  check_choices<bf16, bf16>();
}

TEST_CASE_TEMPLATE("a router's losses and their gradients", T, float, double, bf16) {
  for (const auto how : {kernels::expert_scores::softmax, kernels::expert_scores::sigmoid})
    for (const auto what : {balanced_by::nothing, balanced_by::counts, balanced_by::load})
      for (const std::int64_t experts : {4, 70}) check_losses<T>(how, what, experts);
  check_losses<bf16, bf16>(kernels::expert_scores::softmax, balanced_by::load, 70);
}

TEST_CASE_TEMPLATE("rows of experts, taken and summed, and gates", T, float, double, bf16) {
  for (const std::int64_t width : {1, 7, 64, 328})
    for (const std::size_t lead : {std::size_t{0}, std::size_t{1}}) check_rows<T>(width, lead);
}

TEST_CASE("choices beyond the limit of experts") {
  constexpr std::int64_t samples = 3, positions = 70, first = 20, length = 40, k = 3, experts = 7, limit = 17;
  indices in_text;
  for (std::int32_t p = 0; p < positions; ++p) in_text.push_back(p * 11 % 70);
  const indices whole = choices_of(samples * positions, k, experts);
  indices part;
  for (std::int64_t s = 0; s < samples; ++s)
    part.insert(part.end(), whole.begin() + (s * positions + first) * k,
                whole.begin() + (s * positions + first + length) * k);
  const auto run = [&]<class Device>(Device device) {
    device_array<std::int32_t, Device> order(device, in_text), all(device, whole), own(device, part);
    kernels::drop_choices(device, all.data(), order.data(), positions, own.data(), samples, first, length, k, experts,
                          limit);
    kernels::drop_choices(device, all.data(), order.data(), positions, all.data(), samples, 0, positions, k, experts,
                          limit);
    return std::pair(own.read(), all.read());
  };
  CHECK(run(cuda{}) == run(cpu{}));
}

TEST_CASE("the route of rows, with dropped choices and experts of other ranks") {
  constexpr std::int64_t tokens = 333, k = 3, experts = 12, peers = 2, of_each = 4, parts = peers * of_each;
  const indices part_of{4, 5, 6, 7, -1, -1, -1, -1, 0, 1, 2, 3};
  indices choice = choices_of(tokens, k, experts);
  for (std::size_t j = 0; j < choice.size(); j += 13) choice[j] = -1;
  const auto run = [&]<class Device>(Device device) {
    device_array<std::int32_t, Device> chosen(device, choice), table(device, part_of),
        counts(device, indices(parts, 9)), places(device, indices(choice.size())),
        of_rows(device, indices(choice.size(), -7));
    kernels::sort_choices(device, chosen.data(), table.data(), tokens * k, k, parts, counts.data(), places.data(),
                          of_rows.data());
    std::size_t rows = 0;
    for (const std::int32_t c : counts.read()) rows += static_cast<std::size_t>(c);
    device_array<std::int32_t, Device> sorted(device, indices(rows)), unsorted(device, indices(rows));
    kernels::sort_arrivals(device, counts.data(), peers, of_each, sorted.data(), unsorted.data());
    indices begins;  // of parts with room for all tokens and some more
    for (std::int32_t part = 0; part < parts; ++part) begins.push_back(part * 340);
    device_array<std::int32_t, Device> padded_begins(device, begins), padded_places(device, indices(choice.size())),
        padded_rows(device, indices(parts * 340, -7));
    kernels::sort_choices(device, chosen.data(), table.data(), tokens * k, k, parts, counts.data(),
                          padded_places.data(), padded_rows.data(), {padded_begins.data(), parts * 340});
    return std::vector{counts.read(),   places.read(),        of_rows.read(),    sorted.read(),
                       unsorted.read(), padded_places.read(), padded_rows.read()};
  };
  const auto got = run(cuda{}), expected = run(cpu{});
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CAPTURE(i);
    CHECK(got[i] == expected[i]);
  }
  const indices &places = expected[5], &of_rows = expected[6];
  std::size_t sent = 0;
  for (std::size_t j = 0; j < choice.size(); ++j) {  // each choice has its token's row in the part of its expert
    if (places[j] < 0) continue;
    ++sent;
    CHECK(places[j] / 340 == part_of[static_cast<std::size_t>(choice[j])]);
    CHECK(of_rows[static_cast<std::size_t>(places[j])] == static_cast<std::int32_t>(j) / k);
  }
  CHECK(std::count(of_rows.begin(), of_rows.end(), -1) == static_cast<std::ptrdiff_t>(of_rows.size() - sent));
}

TEST_CASE_TEMPLATE("the values that routers keep change after a step that is not skipped", M, float, double) {
  constexpr std::int64_t experts = 200;
  indices counts;
  for (std::int32_t e = 0; e < experts; ++e) counts.push_back(e * 7 % 13);
  const auto run = [&]<class Device>(Device device) {
    device_array<std::int32_t, Device> of_step(device, counts);
    std::vector<values> made;
    for (const double update : {1.0, 0.0})
      for (const kernels::router_state_rule rule : {kernels::router_state_rule{true, 0.125}, {}}) {
        number_array<M, Device> kept(device, random_values<M>(experts, 1));
        auto clipped = make_buffer<kernels::clip_numbers>(device, 1);
        const kernels::clip_numbers numbers{.update = update};
        device.upload(clipped.data(), &numbers, sizeof numbers, device.main_stream());
        const auto* const found = clipped.template data<kernels::clip_numbers>();
        kernels::update_router_state(device, kept.data(), of_step.data(), experts, rule, found);
        made.push_back(kept.read());
      }
    return made;
  };
  const auto got = run(cuda{}), expected = run(cpu{});
  CHECK(got == expected);
  CHECK(expected[0] != expected[1]);
  const values before = random_values<M>(experts, 1);
  CHECK((expected[2] == before && expected[3] == before));
}

}  // namespace kernel_experts
