// program: kernels
// races: looked-up*<float>
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/cpu/embedding.hpp"
#include "plait/kernels/cuda/kernels.hpp"

namespace kernel_embedding {  // files of one program may have helpers of the same name

using namespace plait::test;
using plait::bf16;
using plait::cuda;
using plait::gradient_of;
using std::int64_t;

/// The part of a table [vocab, width] on a rank.
struct table_part {
  int64_t width, first, rows, vocab;
};

/// Ids of which a few are frequent, as in text.
std::vector<int64_t> ids_of(int64_t tokens, int64_t vocab) {
  std::mt19937 generator(11);
  std::geometric_distribution<int64_t> draw(0.03);
  std::vector<int64_t> ids;
  for (int64_t t = 0; t < tokens; ++t) ids.push_back(draw(generator) * 7 % vocab);
  return ids;
}

template <class T>
void check(const std::vector<int64_t>& ids, const table_part& part, std::size_t lead) {
  using G = gradient_of<T>;
  CAPTURE(sizeof(T));
  CAPTURE(ids.size());
  CAPTURE(part.width);
  CAPTURE(part.first);
  CAPTURE(part.rows);
  const auto tokens = static_cast<int64_t>(ids.size());
  const values table = random_values<T>(part.rows * part.width, 1), dy = random_values<T>(tokens * part.width, 2);
  const values before = random_values<G>(part.rows * part.width, 3);
  values expected(dy.size()), expected_gradient = before;
  plait::cpu host;
  plait::kernels::embedding_forward(host, ids.data(), table.data(), expected.data(), tokens, part.width, part.first,
                                    part.rows, part.vocab);
  plait::kernels::embedding_backward(host, ids.data(), dy.data(), expected_gradient.data(), tokens, part.width,
                                     part.first, part.rows, part.vocab);

  cuda device;
  device_array<int64_t> tokens_(device, ids);
  number_array<T> table_(device, table, lead), dy_(device, dy, lead), y(device, values(dy.size(), 7.0), lead);
  number_array<G> dtable(device, before, lead), again(device, before, lead);
  plait::kernels::embedding_forward<T>(device, tokens_.data(), table_.data(), y.data(), tokens, part.width, part.first,
                                       part.rows, part.vocab);
  for (auto* to : {&dtable, &again}) {
    plait::kernels::embedding_backward<T>(device, tokens_.data(), dy_.data(), to->data(), tokens, part.width,
                                          part.first, part.rows, part.vocab);
  }
  device.synchronize();
  CHECK(y.read() == expected);
  CHECK(difference(dtable.read(), expected_gradient) < (sizeof(T) == 8 ? 1e-12 : 1e-5));
  CHECK(same_bits(dtable.raw(), again.raw()));
}

TEST_CASE_TEMPLATE("looked-up rows and their gradients equal the processor's", T, float, double, bf16) {
  for (const int64_t tokens : {0, 1, 37, 700}) {
    for (const int64_t width : {1, 24, 61}) {
      const std::vector<int64_t> ids = ids_of(tokens, 501);
      check<T>(ids, {width, 0, 501, 501}, 0);
      check<T>(ids, {width, 0, 501, 501}, 1);
      check<T>(ids, {width, 5, 50, 501}, 0);    // a part of a split table
      check<T>(ids, {width, 480, 40, 501}, 0);  // with rows of padding after the vocabulary
      check<T>(ids, {width, 520, 20, 501}, 0);  // only padding
    }
  }
  check<T>(std::vector<int64_t>(300, 4), {2056, 0, 5, 5}, 0);  // one row for all tokens, wider than a block
  std::vector<int64_t> ids = ids_of(1500, 501);
  for (std::size_t t = 0; t < ids.size(); t += t % 3 + 1) ids[t] = t % 5 == 0 ? 100 : 11;  // two frequent rows
  check<T>(ids, {24, 0, 501, 501}, 0);
  check<T>(ids, {24, 8, 60, 501}, 1);
}

/// The gradient of the rows of a table of width 1: the first 128 tokens of a row are added one by one, then sums of
/// 128.
std::vector<float> sums_of_rows(const std::vector<int64_t>& ids, const values& dy, std::size_t rows) {
  std::vector<float> sums(rows), pieces(rows);
  std::vector<int> seen(rows);
  const auto close = [&](std::size_t row) {
    if (seen[row] > 128) sums[row] += pieces[row];
    pieces[row] = 0;
  };
  for (std::size_t t = 0; t < ids.size(); ++t) {
    const auto row = static_cast<std::size_t>(ids[t]);
    if (seen[row] % 128 == 0) close(row);
    (seen[row] < 128 ? sums : pieces)[row] += static_cast<float>(dy[t]);
    ++seen[row];
  }
  for (std::size_t row = 0; row < rows; ++row) close(row);
  return sums;
}

void check_order(const std::vector<int64_t>& ids, std::size_t rows) {
  cuda device;
  const auto tokens = static_cast<int64_t>(ids.size()), count = static_cast<int64_t>(rows);
  const values dy = random_values<float>(tokens, 4);
  const std::vector<float> expected = sums_of_rows(ids, dy, rows);
  const std::vector<int64_t> turned(ids.rbegin(), ids.rend());
  std::vector<float> backwards = sums_of_rows(turned, values(dy.rbegin(), dy.rend()), rows);
  REQUIRE(backwards != expected);
  device_array<int64_t> there(device, ids);
  number_array<float> from(device, dy), to(device, count);
  plait::kernels::embedding_backward<float>(device, there.data(), from.data(), to.data(), tokens, 1, 0, count, count);
  CHECK(to.raw() == expected);
}

TEST_CASE("a row's tokens are added in their order") {
  check_order(ids_of(400, 3), 3);
  check_order(std::vector<int64_t>(129, 1), 2);
  check_order(std::vector<int64_t>(65, 1), 2);
  check_order(std::vector<int64_t>(64, 1), 2);
  std::vector<int64_t> ids = ids_of(66000, 7);
  std::fill(ids.begin() + 65500, ids.end(), 5);
  check_order(ids, 7);
  check_order(ids, 70000);  // rows of more than 16 bits
}

TEST_CASE("an id outside the vocabulary is reported when the host waits for the device") {
  cuda device;
  device_array<int64_t> tokens(device, std::vector<int64_t>{3, 0, 1});
  number_array<float> table(device, values(6, 1.0)), y(device, 6), d(device, 6);
  plait::kernels::embedding_forward<float>(device, tokens.data(), table.data(), y.data(), 3, 2, 0, 3, 3);
  CHECK_THROWS_WITH_AS(device.synchronize(), "embedding: token 0 has id 3, legal are 0 to 2", plait::error);
  CHECK(y.read() == values{0, 0, 1, 1, 1, 1});
  plait::kernels::embedding_backward<float>(device, tokens.data(), y.data(), d.data(), 3, 2, 0, 3, 3);
  CHECK_THROWS_WITH_AS(device.synchronize(), "embedding: token 0 has id 3, legal are 0 to 2", plait::error);
  CHECK(d.read() == values{1, 1, 1, 1, 0, 0});
}

TEST_CASE("the gradient of a recorded step equals that of a step without a graph") {
  cuda device;
  const std::vector<int64_t> ids = ids_of(700, 501);
  device_array<int64_t> tokens(device, ids);
  number_array<float> dy(device, random_values<float>(700 * 24, 2)), at_once(device, 501 * 24),
      recorded(device, 501 * 24);
  const auto add_to = [&](number_array<float>& to) {
    plait::kernels::embedding_backward<float>(device, tokens.data(), dy.data(), to.data(), 700, 24, 0, 501, 501);
  };
  add_to(at_once);
  plait::cuda_graph graph(device);
  graph.record([&] { add_to(recorded); });
  for (int replay = 0; replay < 2; ++replay) {
    device.zero(recorded.data(), 501 * 24 * sizeof(float), device.main_stream());
    graph.launch();
    device.synchronize();
    CHECK(same_bits(recorded.raw(), at_once.raw()));
  }
}

}  // namespace kernel_embedding
