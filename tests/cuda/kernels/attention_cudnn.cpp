// timeout: 300
// cuDNN's attention, or its stand-in, equals the cpu's attention for all strides and masks. Plans are made once for
// each shape, and context parallelism merges its pieces.
#include "plait/kernels/cuda/attention_cudnn.hpp"

#include "cuda/kernels/attention_check.hpp"
#include "cuda/nn/attention_cp_ranks.hpp"
#include "plait/comm/threads/cuda.hpp"
#include "plait/device/cuda.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;
using plait::kernels::attention_accumulate;

namespace {

/// Compares cuDNN's results with the cpu's, in bf16 and accumulated in float.
void check_both(const attention_piece& piece, const cudnn_attention_options& options = {}) {
  cuda device;  // for the handle
  cudnn_attention library(options);
  check<bf16>(piece, &library);
  check<bf16, float>(piece, &library);
}
void check_both(const attention_shape& shape, attention_accumulate add = {}) {
  check_both(attention_piece{.shape = shape, .accumulate = add});
}

/// The bits of the gradients of several equal calls.
std::vector<values> gradients(cudnn_attention& library, cuda& device, int times) {
  const attention_shape s = shape_of(1, 40, 40, 2, 1, 64, true);
  const int64_t q_size = 40 * 2 * 64, k_size = 40 * 64;
  number_array<bf16> q(device, random_values<bf16>(q_size, 1)), k(device, random_values<bf16>(k_size, 2)),
      v(device, random_values<bf16>(k_size, 3)), d_o(device, random_values<bf16>(q_size, 4)), o(device, q_size),
      dq(device, q_size), dk(device, k_size), dv(device, k_size);
  number_array<float> lse(device, values(2 * 40));
  std::vector<values> all;
  library.forward(device, q.view(), k.view(), v.view(), o.data(), lse.data(), s);
  for (int i = 0; i < times; ++i) {
    library.backward(device, q.view(), k.view(), v.view(), o.view(), lse.view(), d_o.view(), dq.data(), dk.data(),
                     dv.data(), s);
    for (number_array<bf16>* a : {&dq, &dk, &dv}) all.push_back(a->read());
  }
  return all;
}

}  // namespace

TEST_CASE("cuDNN's attention and its gradients are the processor's") {
  check_both(shape_of(2, 17, 17, 3, 1, 8, true));
  check_both(shape_of(1, 64, 130, 3, 1, 80, false));
  check_both(shape_of(1, 130, 130, 6, 2, 64, true), {true, true});
  check_both(shape_of(1, 130, 130, 1, 1, 128, true), {false, true});
  check_both(shape_of(1, 1, 17, 8, 1, 64, true, 16));     // the last token sees all keys
  check_both(shape_of(1, 64, 130, 1, 1, 64, true, 66));   // the last query and the last key have one position
  check_both(shape_of(1, 17, 64, 2, 1, 64, true, 1000));  // all queries see all keys
}

TEST_CASE("cuDNN's attention with a window") {
  for (const int64_t window : {1, 5, 16, 63, 64, 1000}) {
    attention_shape s = shape_of(1, 64, 64, 2, 1, 16, true);
    s.mask = kernels::attention_mask::window_or_causal(window);
    CAPTURE(window);
    check_both(s);
  }
}

TEST_CASE("cuDNN's attention of pieces of larger arrays") {
  attention_piece piece{.shape = shape_of(2, 17, 17, 4, 1, 8, true)};
  piece.q_lead = 3, piece.shape.q_batch = 24, piece.k_lead = 5, piece.shape.k_batch = 30;
  piece.lse_lead = 4, piece.shape.lse_stride = 40;
  piece.shape.q_stride = piece.shape.k_stride = piece.shape.v_stride = 6 * 8;
  piece.shape.o_stride = 40;
  check_both(piece);
  piece.shape.dq_stride = 64, piece.shape.dk_stride = 8, piece.shape.dv_stride = 16, piece.shape.do_stride = 80;
  for (const attention_accumulate add : {attention_accumulate{}, {true, false}, {false, true}, {true, true}}) {
    piece.accumulate = add;
    check_both(piece);
  }
}

TEST_CASE("cuDNN's gradients have equal bits on request") {
  cuda device;
  cudnn_attention fixed;
  const std::vector<values> bits = gradients(fixed, device, 4);
  for (std::size_t i = 3; i < bits.size(); ++i) CHECK(bits[i] == bits[i - 3]);
  cudnn_attention any({.deterministic = false});
  const std::vector<values> close = gradients(any, device, 1);
  for (std::size_t i = 0; i < close.size(); ++i) CHECK(difference(close[i], bits[i]) < 1e-2);
  check_both({.shape = shape_of(1, 50, 50, 2, 1, 64, true)}, {.deterministic = false});
}

TEST_CASE("attention that cuDNN does not support is reported, and runs on plait's kernels if the choice is automatic") {
  cuda device;
  cudnn_attention library;
  const auto reason = [&](const auto& change) {
    attention_shape s = shape_of(1, 32, 32, 2, 1, 64, true);
    change(s);
    CHECK(library.supports(s, dtype::bf16) == library.refusal(s).empty());
    return library.refusal(s);
  };
  using S = attention_shape&;
  const std::int32_t documents[32] = {};
  CHECK(reason([](S) {}) == "");
  CHECK_FALSE(library.supports(shape_of(1, 32, 32, 2, 1, 64, true), dtype::f32));
  CHECK(reason([](S s) { s.k_len = 0; }) == "batch, q_len and k_len must be at least 1");
  CHECK(reason([](S s) { s.head_dim = 12; }) == "head_dim must be a multiple of 8 up to 128");
  CHECK(reason([](S s) { s.head_dim = 136; }) == "head_dim must be a multiple of 8 up to 128");
  CHECK(reason([&](S s) { s.first_visible = documents; }) == "first_visible must not be given");
  CHECK(reason([&](S s) { s.end_visible = documents; }) == "end_visible must not be given");
  CHECK(reason([](S s) { s.lse_stride = 40; }) == "lse_stride must be q_len");
  CHECK(reason([](S s) { s.q_offset = 3; }) == "under a causal mask, queries and keys must begin or end together");
  CHECK(reason([](S s) { s.q_len = 40, s.k_offset = 8; }) ==
        "under a causal mask, queries and keys must begin or end together");  // some queries see no key
  CHECK(reason([](S s) { s.q_len = 40, s.mask = kernels::attention_mask::window(4); }) ==
        "a window must be causal, with equal offsets and q_len at most k_len");
  CHECK(reason([](S s) { s.mask = kernels::attention_mask::local(3, 2); }) == "a mask must be causal or full");
  CHECK(reason([](S s) { s.mask = kernels::attention_mask::prefix_lm(5); }) == "a mask must be causal or full");
  CHECK(reason([](S s) { s.q_len = 8, s.q_offset = 24, s.mask = kernels::attention_mask::window(4); }) ==
        "a window must be causal, with equal offsets and q_len at most k_len");
  CHECK(reason([](S s) { s.q_offset = 3, s.k_len = 3; }) == "");                   // all queries see all keys
  CHECK(reason([](S s) { s.mask = kernels::attention_mask::window(32); }) == "");  // the window hides no key
  number_array<bf16> x(device, values(32 * 2 * 64));
  number_array<float> lse(device, values(64));
  attention_shape odd = shape_of(1, 32, 32, 2, 1, 64, true);
  odd.q_offset = 3;
  CHECK_THROWS_WITH_AS(library.forward(device, x.view(), x.view(), x.view(), x.data(), lse.data(), odd),
                       "cudnn_attention: under a causal mask, queries and keys must begin or end together", error);
  device.use_attention({attention_backend::automatic, &library});
  CHECK_NOTHROW(kernels::attention_forward<bf16>(device, x.view(), x.view(), x.view(), x.data(), lse.data(), odd));
  device.synchronize();
}

TEST_CASE("context parallelism merges cuDNN's pieces, each rounded once") {
  const context_inputs in = random_inputs<bf16>({}, false);
  const context_arrays expected = context_on_cpu(in);
  const auto on_ranks = [&]<class Policy>(Policy, int ranks, bool zigzag) {
    const auto launch = [&](int n, auto&& body) {
      threads::run(n, cuda::options{.workspace_bytes = 1 << 20}, [&](threads::communicator comm, cuda& device) {
        cudnn_attention attention;
        device.use_attention({attention_backend::cudnn, &attention});
        body(comm, device);
      });
    };
    return attend_on<bf16, Policy>(launch, in, ranks, zigzag);
  };
  const values one = errors_of(on_ranks(ring<cp>{}, 1, true), expected);
  check_below(one, 1e-2);
  const auto no_worse = [&](const context_arrays& got) { check_no_worse(errors_of(got, expected), one, 1.5); };
#ifdef PLAIT_CUDA_STAND_IN
  constexpr int most_ranks = 8;
#else
  constexpr int most_ranks = 4;  // each rank makes all of cuDNN's plans again
#endif
  for (int ranks = 2; ranks <= most_ranks; ranks *= 2) no_worse(on_ranks(ring<cp>{}, ranks, true));
  no_worse(on_ranks(all_gather_kv<cp>{}, most_ranks, true));
  no_worse(on_ranks(ulysses<cp>{}, 4, true));
}

#ifdef PLAIT_CUDA_STAND_IN
TEST_CASE("cuDNN's plans are made once for each shape and direction") {
  cuda device;
  cudnn_attention library;
  const int before = stand_in::cudnn_graphs;
  const attention_shape s = shape_of(1, 16, 16, 2, 1, 64, true);
  const auto made = [&] { return stand_in::cudnn_graphs - before; };
  CHECK(library.supports(s, dtype::bf16));
  CHECK(made() == 2);
  number_array<bf16> x(device, values(16 * 2 * 64));
  number_array<float> lse(device, values(32));
  for (int i = 0; i < 3; ++i) library.forward(device, x.view(), x.view(), x.view(), x.data(), lse.data(), s);
  CHECK(made() == 2);
  int expected_plans = 2;
  const auto differs = [&](const auto& change) {
    attention_shape other = s;
    change(other);
    if (library.supports(other, dtype::bf16)) expected_plans += 2;
    CHECK(made() == expected_plans);
    CHECK(library.supports(other, dtype::bf16));
    CHECK(made() == expected_plans);
  };
  using S = attention_shape&;
  differs([](S o) { o.batch = 2; });
  differs([](S o) { o.q_len = 8; });
  differs([](S o) { o.k_len = 24; });
  differs([](S o) { o.heads = 4; });
  differs([](S o) { o.kv_heads = 2; });
  differs([](S o) { o.head_dim = 56; });
  differs([](S o) { o.scale = 2; });
  differs([](S o) { o.mask = kernels::attention_mask::full(); });
  differs([](S o) { o.mask = kernels::attention_mask::window(4); });
  differs([](S o) { o.q_len = 8, o.q_offset = 8; });
  differs([](S o) { o.q_batch = 32; });
  differs([](S o) { o.k_batch = 32; });
  differs([](S o) { o.q_stride = 256; });
  differs([](S o) { o.k_stride = 256; });
  differs([](S o) { o.v_stride = 256; });
  differs([](S o) { o.o_stride = 256; });
  differs([](S o) { o.do_stride = 256; });
  differs([](S o) { o.dq_stride = 256; });
  differs([](S o) { o.dk_stride = 256; });
  differs([](S o) { o.dv_stride = 256; });
  CHECK(library.supports(s, dtype::bf16));
  CHECK(made() == expected_plans);
}

TEST_CASE("errors name a cuDNN that is too old, refuses, or fails, and a handle ends with its object") {
  const int handles = stand_in::cudnn_handles;
  stand_in::cudnn_version = 80907;
  CHECK_THROWS_WITH_AS(cudnn_attention(), "cudnn_attention: cuDNN is 80907, must be at least 90000 (version 9)", error);
  stand_in::cudnn_version = 91400;
  cuda device;
  {
    cudnn_attention library;
    CHECK(stand_in::cudnn_handles == handles + 1);
    const attention_shape s = shape_of(1, 16, 16, 2, 1, 64, true), t = shape_of(1, 17, 17, 2, 1, 64, true);
    number_array<bf16> x(device, values(17 * 2 * 64));
    number_array<float> lse(device, values(34));
    const auto forward = [&](const attention_shape& shape) {
      library.forward(device, x.view(), x.view(), x.view(), x.data(), lse.data(), shape);
    };
    stand_in::cudnn_refusal = "no such engine";
    CHECK_FALSE(library.supports(s, dtype::bf16));
    CHECK(library.refusal(s) == "no such engine");
    stand_in::cudnn_refusal = "";
    CHECK_THROWS_WITH_AS(forward(s), "cudnn_attention: cuDNN refuses the shape: no such engine", error);
    // A call may fail for lack of memory; the device then releases its unused memory and tries again.
    { const auto unused = make_buffer<std::byte>(device, 1 << 20); }
    CHECK(device.cached_bytes() >= 1 << 20);
    stand_in::cudnn_failures = 1;
    CHECK_NOTHROW(forward(t));
    CHECK(device.cached_bytes() < 1 << 20);
    stand_in::cudnn_failures = 2;
    CHECK_THROWS_WITH_AS(forward(t), "cudnn_attention: cuDNN failed: CUDNN_STATUS_EXECUTION_FAILED", error);
    CHECK(stand_in::cudnn_failures == 0);
    device.synchronize();
    // A graph is recorded once, so the call is not repeated and memory is not released.
    cuda_graph graph(device);
    forward(t);
    stand_in::cudnn_failures = 1;
    CHECK_THROWS_WITH_AS(graph.record([&] { forward(t); }), doctest::Contains("cuDNN failed"), error);
    CHECK(stand_in::cudnn_failures == 0);
    forward(t);
    CHECK_NOTHROW(graph.record([&] { forward(t); }));
    graph.launch();
    device.synchronize();
  }
  CHECK(stand_in::cudnn_handles == handles);
}

TEST_CASE("the memory for a fixed order is known before the choice, and refused if the device has less") {
  cuda device;
  cudnn_attention fixed, any({.deterministic = false});
  attention_shape s = shape_of(1, 1 << 20, 1 << 20, 32, 32, 64, true);
  CHECK(s.fixed_order_bytes() == std::int64_t{64} << 40);
  CHECK(shape_of(2, 65, 129, 3, 1, 64, false).fixed_order_bytes() == 2 * 2 * 3 * 128 * 256);
  CHECK(fixed.refusal(s).starts_with("it needs 70368744178664 bytes for itself, and the device has "));
  CHECK(has(fixed.refusal(s), "; with cudnn_attention_options::deterministic = false it needs far less"));
  CHECK_FALSE(fixed.supports(s, dtype::bf16));
  CHECK(any.supports(s, dtype::bf16));

  // A workspace smaller than the device's memory, but larger than its free memory.
  std::size_t free = 0, total = 0;
  REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
  s = shape_of(1, 1 << 10, 1 << 10, 1, 1, 8, true);
  while (static_cast<std::size_t>(4 * s.fixed_order_bytes()) < total) s.q_len = s.k_len = 2 * s.q_len;
  std::vector<buffer<cuda>> taken;
  for (int i = 0; i < 3; ++i) taken.push_back(make_buffer<std::byte>(device, total / 4));
  float* const x = nullptr;
  bf16* const none = nullptr;
  CHECK_THROWS_WITH_AS(
      fixed.backward(device, none, none, none, none, x, none, none, none, none, s),
      doctest::Contains("bytes for the backward pass itself; with cudnn_attention_options::deterministic = false"),
      error);
}

TEST_CASE("the option of equal bits reaches cuDNN") {
  cuda device;
  for (const bool fixed : {true, false}) {
    cudnn_attention library({.deterministic = fixed});
    const int before = stand_in::cudnn_fixed_gradients, other = stand_in::cudnn_other_gradients;
    static_cast<void>(gradients(library, device, 2));
    CHECK(stand_in::cudnn_fixed_gradients - before == (fixed ? 2 : 0));
    CHECK(stand_in::cudnn_other_gradients - other == (fixed ? 0 : 2));
  }
}
#endif
