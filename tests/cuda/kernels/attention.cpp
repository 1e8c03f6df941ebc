// races: *are the processor's<plait::bf16>
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <type_traits>
#include <vector>

#include "cuda/kernels/attention_check.hpp"
#include "cuda/kernels/rounding_library.hpp"

namespace plait::test {
kernels::attention_mask chunks();  // rule_mask.cu
}

namespace {

using namespace plait::test;
using plait::bf16;
using plait::cuda;
using plait::dtype;
using plait::statistic_of;
using plait::kernels::attention_accumulate;
using plait::kernels::attention_backward;
using plait::kernels::attention_delta;
using plait::kernels::attention_forward;
using plait::kernels::attention_shape;
using plait::kernels::require_attention;
using std::int64_t;
using masks = plait::kernels::attention_mask;

template <class T>
void check(const attention_shape& shape, attention_accumulate accumulate = {}) {
  check<T>(attention_piece{.shape = shape, .accumulate = accumulate});
}

}  // namespace

TEST_CASE_TEMPLATE("CUDA attention and its gradients are the processor's", T, float, double, bf16) {
  check<T>(shape_of(2, 17, 17, 3, 1, 8, true));
  check<T>(shape_of(1, 1, 17, 8, 1, 64, true, 16));
  check<T>(shape_of(1, 1, 1, 2, 2, 8, false));
  check<T>(shape_of(1, 64, 64, 2, 2, 64, true));
  check<T>(shape_of(1, 130, 130, 1, 1, 128, true));
  check<T>(shape_of(1, 64, 130, 3, 1, 80, false));
  check<T>(shape_of(1, 130, 130, 6, 2, 64, true));
  check<T>(shape_of(1, 40, 70, 1, 1, 256, true, 20));
  check<T>(shape_of(1, 17, 33, 1, 1, 200, false));
}

TEST_CASE_TEMPLATE("CUDA attention of tokens with offsets", T, float, double, bf16) {
  check<T>(shape_of(1, 64, 130, 1, 1, 64, true, 66));          // the last tokens see all keys
  check<T>(shape_of(1, 130, 17, 1, 1, 64, true, 0, 100));      // a hundred queries see no key
  check<T>(shape_of(2, 17, 17, 2, 1, 64, true, 0, 17));        // no query sees a key
  check<T>(shape_of(1, 17, 64, 2, 1, 64, true, 1000, 0));      // all queries see all keys
  check<T>(shape_of(1, 130, 64, 1, 1, 64, true, 0, 1 << 20));  // far after the keys
  for (const int64_t ahead : {-33, -16, -1, 1, 14, 15, 30, 31, 47}) {
    check<T>(shape_of(1, 70, 90, 1, 1, 16, true, 100 + ahead, 100));
  }
}

TEST_CASE_TEMPLATE("CUDA attention of slices of a fused projection, with gaps and added gradients", T, float, double,
                   bf16) {
  attention_shape s = shape_of(2, 17, 33, 4, 1, 8, true, 16);
  s.q_stride = s.k_stride = s.v_stride = 6 * 8;
  s.o_stride = 40;
  check<T>(s);
  s.dq_stride = 64;
  s.dk_stride = 8;
  s.dv_stride = 16;
  s.do_stride = 80;
  check<T>(s, {false, true});
  check<T>(shape_of(1, 40, 17, 1, 1, 144, true, 0, 20), {true, true});
}

TEST_CASE_TEMPLATE("CUDA attention of nothing", T, float, double, bf16) {
  check<T>(shape_of(0, 17, 17, 1, 1, 8, true));
  check<T>(shape_of(1, 0, 17, 1, 1, 8, true));
  check<T>(shape_of(1, 17, 0, 1, 1, 8, true));
}

TEST_CASE_TEMPLATE("CUDA attention of pieces with windows, documents, offsets and strides", T, float, double, bf16) {
  picker numbers(std::is_same_v<T, bf16> ? 3 : 4);
  std::vector<std::int32_t> documents;
  for (int i = 0; i < 10; ++i) {
    piece_sizes most{.q_len = 150, .k_len = 150, .batch = 2, .heads = 2, .head_dim = 64, .unit = 8};
    if (i % 5 == 4)
      most = {.q_len = 90, .k_len = 90, .batch = 1, .heads = 1, .head_dim = i == 4 ? 128 : 256, .unit = 8};
    const attention_piece p = random_piece(numbers, most, documents);
    CAPTURE(i);
    if (i % 2 == 0) {
      check<T>(p);
    } else {
      check<T, statistic_of<T>>(p);
    }
  }
}

TEST_CASE_TEMPLATE("CUDA attention of masks with a rule of the program", T, float, double, bf16) {
  for (const int64_t head_dim : {16, 72, 136}) {
    attention_shape s = shape_of(1, 70, 90, 4, 2, head_dim, true, 30, 10);
    s.mask = chunks();
    check<T>(s);
    s.mask.before = 15, s.mask.after = 3;
    check<T>(s, {true, true});
    s.mask.before = s.mask.after = masks::all;
    s.q_offset = 80, s.k_offset = 0;  // the last queries see no key
    check<T>(s);
  }
  picker numbers(5);
  std::vector<std::int32_t> documents;
  for (int i = 0; i < 4; ++i) {
    attention_piece p =
        random_piece(numbers, {.q_len = 90, .k_len = 90, .batch = 2, .heads = 2, .head_dim = 64, .unit = 8}, documents);
    p.shape.mask.allows = chunks().allows;
    p.shape.mask.gpu_kernels = chunks().gpu_kernels;
    CAPTURE(i);
    check<T, statistic_of<T>>(p);
  }
}

TEST_CASE_TEMPLATE("CUDA attention skips tiles that no query sees", T, float, double, bf16) {
  const int64_t len = 192, width = 8;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  cuda device;
  std::vector<std::int32_t> documents(static_cast<std::size_t>(len), 0);
  std::fill(documents.begin() + 128, documents.end(), 128);
  device_array<std::int32_t> documents_(device, documents);
  for (const bool packed : {false, true}) {
    attention_shape s = shape_of(1, len, len, 1, 1, width);
    if (packed) s.first_visible = documents_.data();
    s.mask = plait::kernels::attention_mask::window_or_causal(packed ? 0 : 64);
    // No query from 128 on sees a key before 64.
    const values x = random_values<T>(len * width, 1), rows(static_cast<std::size_t>(len));
    values k = x, d_o = x;
    std::fill_n(k.begin(), 64 * width, nan);
    std::fill(d_o.begin() + 128 * width, d_o.end(), nan);
    number_array<T> clean_(device, x), k_(device, k), d_o_(device, d_o), o_(device, x), dq_(device, x), dk_(device, x),
        dv_(device, x);
    number_array<statistic_of<T>> lse_(device, rows);
    const auto clean = [&](number_array<T>& array, int64_t begin, int64_t end) {
      const values got = array.read();
      for (int64_t i = begin * width; i < end * width; ++i) {
        if (std::isnan(got[static_cast<std::size_t>(i)])) return false;
      }
      return true;
    };
    const T* const at = clean_.data();
    attention_forward<T>(device, at, k_.data(), k_.data(), o_.data(), lse_.data(), s);
    CHECK(clean(o_, 128, len));
    CHECK(!clean(o_, 0, 1));
    attention_forward<T>(device, at, at, at, o_.data(), lse_.data(), s);
    attention_backward<T>(device, at, k_.data(), at, o_.data(), lse_.data(), at, dq_.data(), dk_.data(), dv_.data(), s);
    CHECK(clean(dq_, 128, len));
    CHECK(clean(dk_, 64, len));
    CHECK(!clean(dq_, 0, 1));
    attention_backward<T>(device, at, at, at, o_.data(), lse_.data(), d_o_.data(), dq_.data(), dk_.data(), dv_.data(),
                          s);
    CHECK(clean(dk_, 0, 64));
    CHECK(clean(dv_, 0, 64));
    CHECK(!clean(dv_, len - 1, len));
  }
}

TEST_CASE_TEMPLATE("CUDA attention over pieces of the keys, merged in the statistics' type, is as accurate as over all",
                   T, float, double, bf16) {
  using S = statistic_of<T>;
  const int64_t len = 80, pieces = 8, part = len / pieces, heads = 1, d = 64, width = heads * d;
  const attention_shape whole = shape_of(1, len, len, heads, heads, d, true);
  const values q = random_values<T>(len * width, 1), k = random_values<T>(len * width, 2);
  const values v = random_values<T>(len * width, 3), d_o = random_values<T>(len * width, 4);
  const values zeros(static_cast<std::size_t>(len * width)), rows(static_cast<std::size_t>(len * heads)),
      unseen(static_cast<std::size_t>(len * heads), -std::numeric_limits<double>::infinity());
  const attention_arrays expected =
      attention_on_cpu({.shape = whole}, q, k, v, d_o, {zeros, rows, zeros, zeros, zeros});

  cuda device;
  number_array<T> q_(device, q), k_(device, k), v_(device, v), d_o_(device, d_o), whole_o_(device, zeros),
      whole_dq_(device, zeros), whole_dk_(device, zeros), whole_dv_(device, zeros);
  number_array<S> o_(device, zeros), other_(device, zeros), dq_(device, zeros), dk_(device, zeros), dv_(device, zeros),
      lse_(device, unseen), other_lse_(device, rows), delta_(device, rows);
  const auto keys_of = [&](int64_t piece) {
    attention_shape s = whole;
    s.k_len = part;
    s.k_offset = piece * part;
    return s;
  };
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t first = i * part * width;
    attention_forward<T>(device, q_.view(), k_.view() + first, v_.view() + first, other_.data(), other_lse_.data(),
                         keys_of(i));
    plait::kernels::merge_lse<S>(device, o_.data(), lse_.data(), other_.view(), other_lse_.view(), width, whole);
  }
  attention_delta<T>(device, o_.view(), d_o_.view(), delta_.data(), whole);
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t first = i * part * width;
    attention_backward<T>(device, q_.view(), k_.view() + first, v_.view() + first, o_.view(), lse_.view(), d_o_.view(),
                          dq_.data(), dk_.data() + first, dv_.data() + first, keys_of(i), {true, true}, delta_.view());
  }
  check_lse<T>(lse_.read(), expected.lse);
  attention_forward<T>(device, q_.view(), k_.view(), v_.view(), whole_o_.data(), lse_.data(), whole);
  attention_backward<T>(device, q_.view(), k_.view(), v_.view(), whole_o_.view(), lse_.view(), d_o_.view(),
                        whole_dq_.data(), whole_dk_.data(), whole_dv_.data(), whole);
  device.synchronize();
  const auto good = [&](number_array<S>& merged, number_array<T>& at_once, const values& right) {
    const double error = difference(merged.read(), right), error_at_once = difference(at_once.read(), right);
    CHECK(error < tolerance<T>);
    // If T is the statistics' type, both errors are a few roundings, which differ between processors.
    CHECK(error <= 1.5 * error_at_once + 8 * static_cast<double>(std::numeric_limits<S>::epsilon()));
  };
  good(o_, whole_o_, expected.o);
  good(dq_, whole_dq_, expected.dq);
  good(dk_, whole_dk_, expected.dk);
  good(dv_, whole_dv_, expected.dv);
}

TEST_CASE("CUDA attention refuses arrays that its kernels cannot read") {
  cuda device;
  number_array<bf16> memory(device, values(1024));
  number_array<float> lse(device, values(512));
  const auto forward = [&](const attention_shape& s, int64_t offset) {
    bf16* const at = memory.data() + offset;
    attention_forward<bf16>(device, at, at, at, at, lse.data(), s);
  };
  CHECK_THROWS_WITH_AS(forward(shape_of(1, 2, 2, 1, 1, 12, true), 0),
                       "attention: head_dim = 12, for bf16 a multiple of 8", plait::error);
  CHECK_THROWS_WITH_AS(forward(shape_of(1, 2, 2, 1, 1, 264, true), 0),
                       "attention: head_dim = 264, on a GPU at most 256", plait::error);
  CHECK_THROWS_WITH_AS(forward(shape_of(1, 2, 2, 1, 1, 8, true), 1),
                       "attention: bf16 arrays must begin on a 16-byte boundary", plait::error);
  attention_shape odd = shape_of(1, 2, 2, 1, 1, 8, true);
  odd.mask = masks::causal().where(chunks().allows);
  CHECK_THROWS_WITH_AS(forward(odd, 0),
                       "attention: this mask's rule is for the CPU alone; for a GPU write mask.where<rule>() in a file "
                       "that nvcc compiles, with PLAIT_HOST_DEVICE before the function rule",
                       plait::error);
  odd.mask = {};
  odd.k_stride = 12;
  CHECK_THROWS_WITH_AS(forward(odd, 0), "attention: a stride of 12, for bf16 a multiple of 8", plait::error);
}

namespace {

/// The attention of another library, which supports some head_dims in bf16 and only counts its calls.
class counting_library final : public plait::attention_library {
 public:
  counting_library(int64_t least_head_dim, int64_t most_head_dim) : least(least_head_dim), most(most_head_dim) {}
  int64_t least, most;
  int forwards = 0, backwards = 0;
  bool supports(const attention_shape& shape, dtype type) override {
    return type == dtype::bf16 && shape.head_dim >= least && shape.head_dim <= most;
  }
  void forward(cuda&, const bf16*, const bf16*, const bf16*, bf16*, float*, const attention_shape&) override {
    ++forwards;
  }
  void backward(cuda&, const bf16*, const bf16*, const bf16*, const bf16*, const float*, const bf16*, bf16*, bf16*,
                bf16*, const attention_shape&) override {
    ++backwards;
  }
};

}  // namespace

TEST_CASE("the library's attention runs where it is chosen and supported") {
  using plait::attention_backend;
  using plait::attention_choice;
  using plait::kernels::attention_backend_for;
  counting_library library(64, 64);
  const attention_shape small = shape_of(1, 4, 4, 1, 1, 8, true), usual = shape_of(1, 4, 4, 1, 1, 64, true);
  const attention_choice automatic{attention_backend::automatic, &library}, forced{attention_backend::cudnn, &library};
  CHECK(attention_backend_for({}, usual) == attention_backend::own);
  CHECK(attention_backend_for(automatic, small) == attention_backend::own);
  CHECK(attention_backend_for(automatic, usual) == attention_backend::cudnn);
  CHECK(attention_backend_for(automatic, usual, {.accumulate = {true, false}}) == attention_backend::cudnn);
  CHECK(attention_backend_for(automatic, usual, {.float_output = true}) == attention_backend::cudnn);
  CHECK(attention_backend_for(automatic, usual, {.gradients = true, .has_output = false}) == attention_backend::own);
  CHECK(attention_backend_for({attention_backend::own, &library}, usual) == attention_backend::own);
  CHECK_THROWS_WITH_AS(
      attention_backend_for({attention_backend::cudnn, nullptr}, usual),
      "attention: cuDNN is chosen, but the device was given no attention_library; give cuda::use_attention "
      "one, or choose attention_backend::own",
      plait::error);
  CHECK_THROWS_WITH_AS(attention_backend_for(forced, small),
                       "attention: cuDNN is chosen, but does not support bf16, head_dim = 8, q_len = 4, k_len = 4, "
                       "offsets 0 and 0; choose attention_backend::automatic or own",
                       plait::error);

  attention_shape packed = usual;
  const std::int32_t documents[4] = {};
  packed.first_visible = packed.end_visible = documents;
  CHECK(attention_backend_for(automatic, packed) == attention_backend::own);
  attention_shape ruled = usual;
  ruled.mask = chunks();
  CHECK(attention_backend_for(automatic, ruled) == attention_backend::own);
  CHECK_THROWS_WITH_AS(attention_backend_for(forced, ruled),
                       "attention: cuDNN is chosen, but does not support a rule of the mask; choose "
                       "attention_backend::automatic or own",
                       plait::error);
  attention_shape scored = usual;
  scored.score = {.cap = 50, .alibi = true};
  CHECK(attention_backend_for(automatic, scored) == attention_backend::own);
  CHECK_THROWS_WITH_AS(attention_backend_for(forced, scored),
                       "attention: cuDNN is chosen, but does not support a cap of scores, ALiBi; choose "
                       "attention_backend::automatic or own",
                       plait::error);
  CHECK_THROWS_WITH_AS(attention_backend_for(forced, packed, {.gradients = true, .has_output = false}),
                       "attention: cuDNN is chosen, but does not support gradients without the output, "
                       "first_visible, end_visible; choose attention_backend::automatic or own",
                       plait::error);

  cuda device;
  number_array<bf16> memory(device, values(1024));
  number_array<float> lse(device, values(512));
  bf16* const x = memory.data();
  attention_forward<bf16>(device, x, x, x, x, lse.data(), usual, forced);
  attention_backward<bf16>(device, x, x, x, x, lse.data(), x, x, x, x, usual, {}, nullptr, automatic);
  attention_forward<bf16>(device, x, x, x, x, lse.data(), small, automatic);
  attention_forward<bf16>(device, x, x, x, lse.data() + 256, lse.data(), usual, automatic);  // in float
  device.synchronize();
  CHECK(library.forwards == 2);
  CHECK(library.backwards == 1);
}

TEST_CASE("a library's attention adds, writes float and leaves gaps unchanged, as plait's own") {
  rounding_library library;
  attention_piece piece{.shape = shape_of(2, 17, 33, 4, 1, 8, true, 1000)};  // all queries see all keys
  const auto check_both = [&](attention_accumulate add) {
    piece.accumulate = add;
    check<bf16>(piece, &library);
    check<bf16, float>(piece, &library);
  };
  check_both({});
  check_both({true, true});
  piece.shape.k_len = 17, piece.shape.q_offset = 0;  // causal, from the first key
  piece.q_lead = 3, piece.shape.q_batch = 24, piece.k_lead = 5, piece.shape.k_batch = 30;
  piece.lse_lead = 4, piece.shape.lse_stride = 40;
  piece.shape.q_stride = piece.shape.k_stride = piece.shape.v_stride = 6 * 8;
  piece.shape.o_stride = 40;
  check_both({true, false});
  piece.shape.dq_stride = 64, piece.shape.dk_stride = 8, piece.shape.dv_stride = 16, piece.shape.do_stride = 80;
  piece.given_delta = true;
  check_both({});
  check_both({false, true});
  piece.shape.q_offset = 9, piece.shape.k_len = 30;  // the last four keys are after every query
  piece.shape.k_batch = 40;
  check_both({false, true});
  CHECK(library.forwards == 12);
  CHECK(library.backwards == 12);
}

#ifdef PLAIT_CUDA_STAND_IN
TEST_CASE("attention that needs more shared memory than the GPU has is refused, with the numbers") {
  ::setenv("PLAIT_STAND_IN_SHARED_KB", "99", 1);  // as on GPUs of compute capability 8.6, 8.9 and 12.0
  {
    cuda device;
    CHECK_NOTHROW(require_attention(device, dtype::bf16, 128));
    CHECK_NOTHROW(require_attention(device, dtype::f32, 64));
    CHECK_THROWS_WITH_AS(
        require_attention(device, dtype::bf16, 256),
        "attention: head_dim = 256 in bf16 needs 135936 bytes of shared memory, of which a block on GPU "
        "0 (stand-in) has 101376; use a smaller head_dim, an attention_library such as cuDNN's, or a "
        "GPU with more",
        plait::error);
    CHECK_THROWS_AS(require_attention(device, dtype::f32, 256), plait::error);
    // The error is the same with a library that does not support the attention, or does not support float.
    counting_library library(1, 128);
    device.use_attention({plait::attention_backend::automatic, &library});
    CHECK_THROWS_WITH_AS(require_attention(device, dtype::bf16, 256),
                         doctest::Contains("has 101376, and the device's attention_library does not support it; use a "
                                           "smaller head_dim, or a GPU with more"),
                         plait::error);
    CHECK_THROWS_AS(require_attention(device, dtype::f32, 256), plait::error);
    CHECK_NOTHROW(require_attention(device, dtype::bf16, 128));
    device.use_attention({plait::attention_backend::cudnn, &library});
    CHECK_THROWS_WITH_AS(require_attention(device, dtype::bf16, 256),
                         doctest::Contains("cuDNN is chosen, but does not support head_dim = 256"), plait::error);
    library.most = 256;
    CHECK_NOTHROW(require_attention(device, dtype::bf16, 256));
    device.use_attention({plait::attention_backend::automatic, &library});
    CHECK_NOTHROW(require_attention(device, dtype::bf16, 256));
  }
  ::setenv("PLAIT_STAND_IN_SHARED_KB", "163", 1);
  {
    cuda device;
    CHECK_NOTHROW(require_attention(device, dtype::bf16, 256));
  }
  ::unsetenv("PLAIT_STAND_IN_SHARED_KB");
}
#endif
