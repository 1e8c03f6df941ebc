// program: kernels
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "plait/kernels/kernels.hpp"
#include "support/attention_pieces.hpp"
#include "support/kernel_support.hpp"
#include "support/naive_attention.hpp"
#include "support/test_data.hpp"

namespace {

using plait::cpu;
using plait::kernels::attention_backward;
using plait::kernels::attention_delta;
using plait::kernels::attention_forward;
using plait::kernels::attention_shape;
using plait::kernels::join_sinks;
using plait::kernels::sink_gradients;
using plait::test::attention_piece;
using plait::test::random_documents;
using plait::test::shape_of;
using std::int64_t;
using values = std::vector<double>;

/// Normally distributed numbers that T represents exactly.
template <class T>
values seeded_values(int64_t n, unsigned seed) {
  const std::vector<T> numbers = kernel_support::random_values<T>(n, seed);
  return values(numbers.begin(), numbers.end());
}

/// The largest difference, relative to the largest element.
template <class T>
double error_of(const std::vector<T>& got, const values& expected) {
  double worst = 0, largest = 0.1;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (static_cast<double>(got[i]) == expected[i]) continue;
    largest = std::fmax(largest, std::abs(expected[i]));
    const double error = std::abs(static_cast<double>(got[i]) - expected[i]);
    worst = error <= worst ? worst : error;
  }
  return worst / largest;
}

/// Compares whole arrays: elements outside of the piece's tokens must not change.
template <class T>
void check(const attention_piece& given, double tolerance) {
  const attention_shape s = given.shape.checked();
  CAPTURE(s.batch);
  CAPTURE(s.q_len);
  CAPTURE(s.k_len);
  CAPTURE(s.heads);
  CAPTURE(s.kv_heads);
  CAPTURE(s.head_dim);
  CAPTURE(describe(s.mask));
  CAPTURE(s.first_visible);
  CAPTURE(s.end_visible);
  CAPTURE(s.q_offset);
  CAPTURE(s.k_offset);
  CAPTURE(s.score.cap);
  CAPTURE(s.score.alibi);
  CAPTURE(given.sinks);
  const int64_t q_tokens = s.batch * s.q_batch, k_tokens = s.batch * s.k_batch;
  const values q = seeded_values<T>(q_tokens * s.q_stride, 1), k = seeded_values<T>(k_tokens * s.k_stride, 2),
               v = seeded_values<T>(k_tokens * s.v_stride, 3), d_o = seeded_values<T>(q_tokens * s.do_stride, 4);
  values o = seeded_values<T>(q_tokens * s.o_stride, 5), lse = seeded_values<T>(s.batch * s.heads * s.lse_stride, 6),
         dq = seeded_values<T>(q_tokens * s.dq_stride, 7), dk = seeded_values<T>(k_tokens * s.dk_stride, 8),
         dv = seeded_values<T>(k_tokens * s.dv_stride, 9);
  const auto typed = [](const values& x) { return std::vector<T>(x.begin(), x.end()); };
  const values sinks = seeded_values<T>(s.heads, 10);
  values dsinks(sinks.size());
  const std::vector<T> q_(typed(q)), k_(typed(k)), v_(typed(v)), d_o_(typed(d_o));
  const std::vector<T> sinks_(typed(sinks));
  std::vector<T> dsinks_(sinks.size());
  std::vector<T> o_(typed(o)), lse_(typed(lse)), dq_(typed(dq)), dk_(typed(dk)), dv_(typed(dv)), delta(lse_);
  plait::test::naive_attention(
      s,
      {q.data() + given.q_lead * s.q_stride, k.data() + given.k_lead * s.k_stride, v.data() + given.k_lead * s.v_stride,
       d_o.data() + given.q_lead * s.do_stride, o.data() + given.q_lead * s.o_stride, lse.data() + given.lse_lead,
       dq.data() + given.q_lead * s.dq_stride, dk.data() + given.k_lead * s.dk_stride,
       dv.data() + given.k_lead * s.dv_stride, given.sinks ? sinks.data() : nullptr, dsinks.data()},
      given.accumulate);

  cpu device;
  plait::test::run_piece(device, given,
                         plait::test::piece_arrays<T, T, T>{q_.data(), k_.data(), v_.data(), d_o_.data(), sinks_.data(),
                                                            o_.data(), dq_.data(), dk_.data(), dv_.data(), lse_.data(),
                                                            delta.data(), dsinks_.data()});
  CHECK(error_of(o_, o) < tolerance);
  CHECK(error_of(lse_, lse) < tolerance);
  CHECK(error_of(dq_, dq) < tolerance);
  CHECK(error_of(dk_, dk) < tolerance);
  CHECK(error_of(dv_, dv) < tolerance);
  CHECK(error_of(dsinks_, dsinks) < tolerance);
  CHECK(device.bytes_in_use() == 0);
}

std::vector<attention_piece> plain_pieces() {
  std::vector<attention_shape> all{
      shape_of(1, 1, 1, 1, 1, 1),      shape_of(2, 5, 5, 2, 1, 3),     shape_of(1, 64, 64, 1, 1, 16),
      shape_of(2, 65, 65, 4, 2, 8),    shape_of(1, 127, 127, 3, 3, 5), shape_of(1, 129, 300, 2, 1, 16),
      shape_of(1, 300, 129, 2, 1, 16), shape_of(1, 257, 257, 8, 1, 4), shape_of(1, 33, 513, 4, 4, 7),
      shape_of(1, 4, 0, 2, 2, 4),      shape_of(1, 0, 4, 2, 2, 4),     shape_of(1, 20, 20, 24, 1, 8)};
  const std::size_t plain = all.size();
  for (std::size_t i = 0; i < plain; ++i) {
    attention_shape s = all[i];
    s.mask = plait::kernels::attention_mask::full();
    all.push_back(s);
    s.mask = plait::kernels::attention_mask::local(s.k_len / 3, s.k_len / 4);
    all.push_back(s);
    s.mask = plait::kernels::attention_mask::prefix_lm(s.k_len / 2);
    all.push_back(s);
    s.mask = plait::kernels::attention_mask::full().where([](int64_t q, int64_t k) { return q / 50 == k / 50 + 1; });
    all.push_back(s);
    s.mask = {};
    s.q_offset = s.k_len / 2;  // some queries see all keys
    all.push_back(s);
    s.q_offset = 0;
    s.k_offset = s.q_len / 3;  // some queries see no key
    all.push_back(s);
    s.k_offset = s.q_len + 10;  // no query sees a key
    all.push_back(s);
    s.k_offset = 0;
    s.q_offset = s.k_len + 10;  // every query sees all keys
    all.push_back(s);
  }
  std::vector<attention_piece> pieces;
  for (const attention_shape& s : all) pieces.push_back({.shape = s});
  return pieces;
}

}  // namespace

TEST_CASE("attention in double equals the definition, forward and backward") {
  for (const attention_piece& p : plain_pieces()) check<double>(p, 1e-12);
}

TEST_CASE("attention in float equals the definition to float accuracy") {
  for (const attention_piece& p : plain_pieces()) check<float>(p, 3e-6);
}

TEST_CASE("attention inside fused projections does not change the other columns") {
  attention_shape s = shape_of(2, 70, 70, 4, 2, 8);
  s.q_stride = s.k_stride = s.v_stride = 4 * 8 + 2 * 2 * 8;
  s.o_stride = 40;
  check<double>({.shape = s}, 1e-12);
  check<float>({.shape = s}, 3e-6);
  check<double>({.shape = s, .accumulate = {true, true}}, 1e-12);
}

TEST_CASE("attention of pieces with windows, documents, offsets and strides equals the definition") {
  plait::test::picker numbers(7);
  std::vector<std::int32_t> documents;
  for (int i = 0; i < 150; ++i) {
    plait::test::piece_sizes most;
    if (i % 4 == 0) most.q_len = 400;
    if (i % 3 == 0) most.k_len = 700;
    const attention_piece p = plait::test::random_piece(numbers, most, documents);
    CAPTURE(i);
    check<double>(p, 1e-12);
    if (i % 5 == 0) check<float>(p, 5e-6);
  }
}

TEST_CASE("queries whose document starts after the first block of keys start from nothing") {
  attention_shape s = shape_of(2, 256, 456, 2, 2, 8);
  s.q_offset = 200;
  std::vector<std::int32_t> documents(512, 300);
  for (std::size_t b : {0, 1}) {
    std::fill_n(documents.begin() + static_cast<std::ptrdiff_t>(256 * b), 10, 0);
    std::fill_n(documents.begin() + static_cast<std::ptrdiff_t>(256 * b + 10), 90, 210);
  }
  s.first_visible = documents.data();
  check<double>({.shape = s}, 1e-12);
}

TEST_CASE("every rank's halves of a zigzag sequence with all visiting halves give the whole attention") {
  // Chunks 0 to 2 ranks - 1; rank r has chunks r and 2 ranks - 1 - r, one after the other in memory.
  const int64_t ranks = 3, chunk = 37, len = 2 * ranks * chunk, batch = 2, heads = 4, kv_heads = 2, d = 8;
  plait::test::picker numbers(3);
  std::vector<std::int32_t> documents;
  for (int64_t b = 0; b < batch; ++b) {
    const auto of_batch = random_documents(numbers, 0, len);
    documents.insert(documents.end(), of_batch.begin(), of_batch.end());
  }
  for (const int64_t window : {0, 50}) {
    for (const bool packed : {false, true}) {
      attention_shape whole = shape_of(batch, len, len, heads, kv_heads, d);
      whole.mask = plait::kernels::attention_mask::window_or_causal(window);
      if (packed) whole.first_visible = documents.data();
      const int64_t q_token = heads * d, k_token = kv_heads * d;
      const values q = seeded_values<double>(batch * len * q_token, 1),
                   k = seeded_values<double>(batch * len * k_token, 2),
                   v = seeded_values<double>(batch * len * k_token, 3),
                   d_o = seeded_values<double>(batch * len * q_token, 4);
      values o(q.size()), lse(static_cast<std::size_t>(batch * heads * len)), dq(q.size()), dk(k.size()), dv(v.size());
      plait::test::naive_attention(
          whole, {q.data(), k.data(), v.data(), d_o.data(), o.data(), lse.data(), dq.data(), dk.data(), dv.data()});
      // A rank's tokens are the two chunks of every batch; dk and dv are summed on the rank of the keys.
      cpu device;
      const auto chunk_of = [&](int64_t rank, int64_t half) { return half == 0 ? rank : 2 * ranks - 1 - rank; };
      const auto local = [&](const auto& from, int64_t rank, int64_t token) {
        std::remove_cvref_t<decltype(from)> to(static_cast<std::size_t>(batch * 2 * chunk * token));
        for (int64_t half : {0, 1}) {
          plait::kernels::copy_3d(device, from.data() + chunk_of(rank, half) * chunk * token,
                                  to.data() + half * chunk * token, batch, 1, chunk * token * int64_t{sizeof(to[0])},
                                  len * token * int64_t{sizeof(to[0])}, 0, 2 * chunk * token * int64_t{sizeof(to[0])},
                                  0);
        }
        return to;
      };
      std::vector<values> dk_(ranks, values(static_cast<std::size_t>(batch * 2 * chunk * k_token))), dv_ = dk_;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const values q_ = local(q, rank, q_token), d_o_ = local(d_o, rank, q_token);
        const auto documents_ = local(documents, rank, 1);
        const auto rows = static_cast<std::size_t>(batch * heads * 2 * chunk);
        values o_(q_.size()), dq_(q_.size()), o_part(q_.size()), delta(rows), lse_part(rows),
            lse_(rows, -std::numeric_limits<double>::infinity());
        const auto each_pair = [&](auto use) {
          for (int64_t step = 0; step < ranks; ++step) {
            for (int64_t pair = 0; pair < 4; ++pair) {
              const int64_t from = (rank + step) % ranks, mine = pair / 2, theirs = pair % 2;
              attention_shape s = whole;
              s.q_len = s.k_len = chunk;
              s.q_batch = s.k_batch = s.lse_stride = 2 * chunk;
              s.q_offset = chunk_of(rank, mine) * chunk;
              s.k_offset = chunk_of(from, theirs) * chunk;
              if (packed) s.first_visible = documents_.data() + mine * chunk;
              use(s, from, mine * chunk, theirs * chunk);
            }
          }
        };
        each_pair([&](const attention_shape& s, int64_t from, int64_t mine, int64_t theirs) {
          const values k_ = local(k, from, k_token), v_ = local(v, from, k_token);
          attention_forward(device, q_.data() + mine * q_token, k_.data() + theirs * k_token,
                            v_.data() + theirs * k_token, o_part.data() + mine * q_token, lse_part.data() + mine, s);
          plait::kernels::merge_lse(device, o_.data() + mine * q_token, lse_.data() + mine,
                                    o_part.data() + mine * q_token, lse_part.data() + mine, q_token, s);
        });
        attention_shape all = whole;
        all.q_len = 2 * chunk;
        attention_delta(device, o_.data(), d_o_.data(), delta.data(), all);
        each_pair([&](const attention_shape& s, int64_t from, int64_t mine, int64_t theirs) {
          const values k_ = local(k, from, k_token), v_ = local(v, from, k_token);
          const auto at = static_cast<std::size_t>(from);
          attention_backward(device, q_.data() + mine * q_token, k_.data() + theirs * k_token,
                             v_.data() + theirs * k_token, o_.data() + mine * q_token, lse_.data() + mine,
                             d_o_.data() + mine * q_token, dq_.data() + mine * q_token,
                             dk_[at].data() + theirs * k_token, dv_[at].data() + theirs * k_token, s, {true, true},
                             delta.data() + mine);
        });
        CHECK(error_of(o_, local(o, rank, q_token)) < 1e-12);
        CHECK(error_of(dq_, local(dq, rank, q_token)) < 1e-12);
        for (int64_t row = 0; row < batch * heads; ++row) {
          for (int64_t i = 0; i < 2 * chunk; ++i) {
            const int64_t token = chunk_of(rank, i / chunk) * chunk + i % chunk;
            const double got = lse_[static_cast<std::size_t>(row * 2 * chunk + i)];
            const double expected = lse[static_cast<std::size_t>(row * len + token)];
            if (got != expected && !(std::abs(got - expected) < 1e-12)) CHECK(got == expected);
          }
        }
      }
      for (int64_t rank = 0; rank < ranks; ++rank) {
        CHECK(error_of(dk_[static_cast<std::size_t>(rank)], local(dk, rank, k_token)) < 1e-12);
        CHECK(error_of(dv_[static_cast<std::size_t>(rank)], local(dv, rank, k_token)) < 1e-12);
      }
    }
  }
}

TEST_CASE("blocks of keys that no query sees are skipped, and blocks of queries that see no key") {
  const int64_t len = 640, width = 8;
  std::vector<std::int32_t> documents(static_cast<std::size_t>(len), 0);
  std::fill(documents.begin() + 256, documents.end(), 256);
  for (const int how : {0, 1, 2}) {
    attention_shape s = shape_of(1, len, len, 1, 1, width);
    if (how == 0) s.mask = plait::kernels::attention_mask::window(64);
    if (how == 1) s.first_visible = documents.data();
    if (how == 2) s.mask.allows = [](int64_t query, int64_t key) { return query < 256 || key >= 512; };
    cpu device;
    values q = seeded_values<double>(len * width, 1), k = seeded_values<double>(len * width, 2), v = k, d_o = q, o(q),
           dq(q), dk(k), dv(v), lse(static_cast<std::size_t>(len));
    const auto nan = std::numeric_limits<double>::quiet_NaN();
    // The first 64 tokens do not affect those from 256 on, nor the reverse.
    const int64_t unseen = how == 2 ? 256 : 0;  // the first block always starts the sums
    std::fill_n(k.begin() + unseen * width, 64 * width, nan);
    std::fill_n(v.begin() + unseen * width, 64 * width, nan);
    attention_forward(device, q.data(), k.data(), v.data(), o.data(), lse.data(), s);
    attention_backward(device, q.data(), k.data(), v.data(), o.data(), lse.data(), d_o.data(), dq.data(), dk.data(),
                       dv.data(), s);
    bool clean = true;
    for (int64_t i = 256 * width; i < len * width; ++i) {
      for (const values* array : {&o, &dq, &dk, &dv})
        clean = clean && !std::isnan((*array)[static_cast<std::size_t>(i)]);
    }
    CHECK(clean);
    CHECK(std::isnan(o[0]) == (how != 2));
  }
}

TEST_CASE("NaN in one part is not hidden by another part that saw no key") {
  cpu device;
  const double nothing = -std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  const attention_shape s = shape_of(1, 2, 2, 1, 1, 1);
  values o{0, 5}, lse{nothing, 0.5};
  const values other{nan, 0}, lse_other{nan, nothing};
  plait::kernels::merge_lse(device, o.data(), lse.data(), other.data(), lse_other.data(), 1, s);
  CHECK(std::isnan(o[0]));
  CHECK(std::isnan(lse[0]));
  CHECK(o[1] == 5);
  CHECK(lse[1] == 0.5);
}

TEST_CASE("scratch does not grow with the sequence") {
  std::size_t peak[2];
  for (int i = 0; i < 2; ++i) {
    const int64_t len = i == 0 ? 300 : 900;
    cpu device;
    const attention_shape s = shape_of(1, len, len, 2, 1, 8);
    const std::vector<float> q(static_cast<std::size_t>(len * 16), 1.0f), k(static_cast<std::size_t>(len * 8), 1.0f);
    std::vector<float> o(q.size()), lse(static_cast<std::size_t>(2 * len)), dq(q.size()), dk(k.size()), dv(k.size());
    attention_forward(device, q.data(), k.data(), k.data(), o.data(), lse.data(), s);
    attention_backward(device, q.data(), k.data(), k.data(), o.data(), lse.data(), q.data(), dq.data(), dk.data(),
                       dv.data(), s);
    peak[i] = device.peak_bytes();
  }
  CHECK(peak[0] == peak[1]);
}

TEST_CASE("masks, documents, caps, ALiBi and sinks give the results and gradients of PyTorch's FlexAttention") {
  std::ifstream file(plait::test::test_data() + "/attention.json");
  const auto golden = nlohmann::json::parse(file);
  const auto numbers = [](const nlohmann::json& of, const char* name) {
    return of.at(name).at("values").get<values>();
  };
  const auto positions = [](const nlohmann::json& of) {
    return of.is_null() ? plait::kernels::attention_mask::all : of.get<int64_t>();
  };
  const values q = numbers(golden, "q"), k = numbers(golden, "k"), v = numbers(golden, "v"),
               d_o = numbers(golden, "dout"), sinks = numbers(golden, "sinks");
  const auto documents = golden.at("documents").get<std::vector<std::int32_t>>();
  const auto sizes = golden.at("q").at("shape").get<std::vector<int64_t>>();
  CHECK(golden.at("cases").size() == 16);
  for (const auto& c : golden.at("cases")) {
    attention_shape s = shape_of(1, sizes[0], sizes[0], sizes[1], golden.at("k").at("shape")[1], sizes[2]);
    s.mask = {positions(c.at("before")), positions(c.at("after")), c.at("prefix")};
    s.score.cap = c.value("cap", 0.0), s.score.alibi = c.value("alibi", false);
    if (c.value("documents", false)) s.first_visible = documents.data();
    CAPTURE(describe(s.mask));
    CAPTURE(s.score.cap);
    CAPTURE(s.score.alibi);
    cpu device;
    values o(q), lse(static_cast<std::size_t>(s.heads * s.q_len)), delta(lse), dq(q), dk(k), dv(v),
        dsinks(sinks.size());
    attention_forward(device, q.data(), k.data(), v.data(), o.data(), lse.data(), s);
    const bool has_sinks = c.value("sinks", false);
    CAPTURE(has_sinks);
    if (has_sinks) join_sinks(device, sinks.data(), o.data(), lse.data(), s);
    attention_delta(device, o.data(), d_o.data(), delta.data(), s);
    if (has_sinks) sink_gradients(device, sinks.data(), lse.data(), delta.data(), dsinks.data(), s);
    attention_backward(device, q.data(), k.data(), v.data(), o.data(), lse.data(), d_o.data(), dq.data(), dk.data(),
                       dv.data(), s, {}, delta.data());
    CHECK(error_of(o, numbers(c, "out")) < 1e-13);
    CHECK(error_of(lse, numbers(c, "lse")) < 1e-13);
    CHECK(error_of(dq, numbers(c, "dq")) < 1e-13);
    CHECK(error_of(dk, numbers(c, "dk")) < 1e-13);
    CHECK(error_of(dv, numbers(c, "dv")) < 1e-13);
    CHECK(error_of(dsinks, numbers(c, "dsinks")) < 1e-13);
  }
}

TEST_CASE("ALiBi's slopes are those of the paper, for any number of heads and any share of them") {
  const plait::kernels::attention_score twelve{.alibi = true, .all_heads = 12};
  for (int64_t h = 0; h < 12; ++h) CHECK(twelve.slope(h) == std::exp2(h < 8 ? -1.0 - h : 7.5 - h));
  const plait::kernels::attention_score share{.alibi = true, .all_heads = 16, .first_head = 14};
  CHECK(share.slope(0) == std::exp2(-7.5));
  CHECK(share.slope(1) == 1.0 / 256);
  CHECK(plait::kernels::attention_score{.cap = 3, .all_heads = 2}.slope(0) == 0);
}

namespace {
PLAIT_HOST_DEVICE bool both_even(int64_t query, int64_t key) { return query % 2 == 0 && key % 2 == 0; }
}  // namespace

TEST_CASE("a mask can be described as text") {
  using plait::kernels::attention_mask;
  CHECK(describe(attention_mask::window(5).where([](int64_t q, int64_t k) { return q % 2 == k % 2; })) ==
        "window 5 and a rule of the program's");
  CHECK(describe(attention_mask::full()) == "full");
  const attention_mask even = attention_mask::full().where<both_even>();  // in a file that nvcc does not compile
  CHECK(even == attention_mask::full().where(both_even));
  CHECK(even.gpu_kernels == nullptr);
}

TEST_CASE("impossible shapes are refused by name") {
  attention_shape s = shape_of(1, 4, 4, 3, 2, 4);
  CHECK_THROWS_WITH_AS(s.checked(), "attention: heads = 3, must be a multiple of kv_heads = 2", plait::error);
  s = shape_of(1, 4, 4, 2, 2, 4);
  s.q_stride = 7;
  CHECK_THROWS_WITH_AS(s.checked(), "attention: q_stride = 7, must be at least 8, the elements of a token",
                       plait::error);
  s.q_stride = 0;
  s.k_batch = 3;
  CHECK_THROWS_WITH_AS(s.checked(), "attention: k_batch = 3, must be 0 or at least k_len = 4", plait::error);
  s.k_batch = 0;
  s.mask.after = -1;
  CHECK_THROWS_WITH_AS(s.checked(), "attention: mask.after = -1, must be from 0 to 2^62, which is all", plait::error);
  s.mask = {};
  s.score.cap = -1;
  CHECK_THROWS_WITH_AS(s.checked(), "attention: score.cap = -1, must be at least 0; 0 is no cap", plait::error);
  s.score = {.all_heads = 4, .first_head = 3};
  CHECK_THROWS_WITH_AS(s.checked(), "attention: score.first_head = 3, must be from 0 to 2", plait::error);
  s.score = {};
  const std::int32_t documents[4] = {};
  s.first_visible = documents;
  s.k_offset = -1;
  CHECK_THROWS_WITH_AS(
      s.checked(), "attention: k_offset = -1, must be from 0 to 2147483647 where first_visible or end_visible is given",
      plait::error);
}
