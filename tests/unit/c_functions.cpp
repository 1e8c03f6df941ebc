// The C functions of plait/c.h: collectives, layers and errors, called as a C program calls them.
#include <doctest/doctest.h>

#define PLAIT_C_DEFINE
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "c_mlp/layouts.h"

using pl::dp, pl::pp;

PLAIT_C_SIZES(grid, (pp, tp), (batch, hidden));
PLAIT_C_ARRAY(some_rows, float, pl::spec<pl::shard<batch, tp>, hidden>);
PLAIT_C_ARRAY(row_bias, float, pl::spec<hidden, pl::invariant<tp>>);
PLAIT_C_ALL_GATHER(gather_rows, some_rows, residual, tp);
PLAIT_C_REDUCE_SCATTER(scatter_terms, terms, some_rows, tp);
PLAIT_C_BROADCAST(share_rows, residual, tp);
PLAIT_C_SEND(send_rows, residual, pp);
PLAIT_C_RECEIVE(receive_rows, residual, pp);
PLAIT_C_LINEAR(row_layer, inner, residual, down_weight);
PLAIT_C_SIZES(data, (dp), (batch, hidden, ffn));
PLAIT_C_ARRAY(samples, float, pl::spec<pl::shard<batch, dp>, hidden>);
PLAIT_C_ARRAY(samples_out, float, pl::spec<pl::shard<batch, dp>, ffn>);
PLAIT_C_ARRAY(shared_weight, float, pl::spec<ffn, hidden, pl::invariant<dp>>);
PLAIT_C_LINEAR(shared_layer, samples, samples_out, shared_weight);
PLAIT_C_BIASED_LINEAR(biased_row_layer, inner, residual, down_weight, row_bias);

namespace {

/// Runs `body` on threads. Returns the text of the error, empty without one.
std::string run(int ranks, const std::function<int(plait_context*)>& body) {
  char text[4096] = "";
  auto* const user = const_cast<std::function<int(plait_context*)>*>(&body);
  const auto call = [](plait_context* c, void* f) { return (*static_cast<std::function<int(plait_context*)>*>(f))(c); };
  const int failed = plait_run_threads(ranks, call, user, text, sizeof text);
  CHECK((failed != 0) == (text[0] != 0));
  return text;
}
int begin(plait_context* c) { return mlp_begin(c, {plait_ranks(c), 4, 2, 8}); }

/// Memory of a rank: each array is filled with 1, 2, ...
struct memory {
  std::vector<std::vector<float>> blocks{};
  float* operator()(std::int64_t size, float first = 1) {
    blocks.emplace_back(static_cast<std::size_t>(size));
    for (float& x : blocks.back()) x = first++;
    return blocks.back().data();
  }
};
#define MAKE(array) array##_of(c, all(array##_size(c)))

std::vector<float> values(const float* data, std::int64_t size) { return {data, data + size}; }

}  // namespace

TEST_CASE("C functions of collectives") {
  const std::string text = run(2, [](plait_context* c) {
    memory all;
    if (begin(c)) return 1;
    terms t = MAKE(terms);
    const residual sum = sum_terms(c, t);
    CHECK(sum.data == t.data);
    CHECK(values(sum.data, sum.size) == std::vector<float>{2, 4, 6, 8, 10, 12, 14, 16});
    const some_rows some = scatter_terms(c, MAKE(terms), all(4));
    CHECK(some.size == 4);
    CHECK(some.data[0] == (plait_rank(c) == 0 ? 2 : 10));
    const residual whole = gather_rows(c, some, all(8));
    CHECK(values(whole.data, whole.size) == values(sum.data, sum.size));
    for (float* x = whole.data; x != whole.data + whole.size; ++x) *x += static_cast<float>(plait_rank(c));
    CHECK(share_rows(c, whole, 1) == 0);
    CHECK(whole.data[0] == 3);
    const copies copy = copies_of_residual(c, whole);
    CHECK(copy.data == whole.data);
    CHECK(copy.size == whole.size);
    return plait_failed(c);
  });
  CHECK(text == "");
}

TEST_CASE("C functions of messages along an axis") {
  const std::string text = run(4, [](plait_context* c) {
    memory all;
    if (grid_begin(c, {2, 2, 1, 2})) return 1;
    const residual x = residual_of(c, all(2, 10.0f * static_cast<float>(plait_rank(c))));
    CHECK((plait_rank(c) < 2 ? send_rows(c, x, 1, 7) : receive_rows(c, x, 0, 7)) == 0);
    CHECK(x.data[1] == static_cast<float>(10 * (plait_rank(c) % 2) + 1));
    return plait_failed(c);
  });
  CHECK(text == "");
}

namespace {

/// Results of three layers on a rank.
struct results {
  std::vector<float> y, z, dx, dup_w, dup_b, dw, dw2, db;
};
int run_layers(plait_context* c, results& out) {
  memory all, whole;
  if (begin(c)) return 1;
  const up_weight up_w = MAKE(up_weight), dup_w = MAKE(up_weight);
  const up_bias up_b = MAKE(up_bias), dup_b = MAKE(up_bias);
  const down_weight w = MAKE(down_weight), dw = MAKE(down_weight), w2 = MAKE(down_weight), dw2 = MAKE(down_weight);
  const row_bias b = MAKE(row_bias), db = MAKE(row_bias);
  const residual x = MAKE(residual), y = MAKE(residual), z = MAKE(residual), dx = MAKE(residual);
  const inner h = MAKE(inner), dh = MAKE(inner);
  if (up_weight_take(c, whole(16, -8), up_w) || up_bias_take(c, whole(8, -3), up_b) ||
      down_weight_take(c, whole(16, -7), w) || down_weight_take(c, whole(16, -5), w2))
    return 1;
  up_layer* const up = up_layer_make(c, up_w, dup_w.data, up_b, dup_b.data);
  row_layer* const row = row_layer_make(c, w, dw.data);
  biased_row_layer* const biased = biased_row_layer_make(c, w2, dw2.data, b, db.data);
  if (plait_begin_step(c) || up_layer_forward(c, up, x, h) || row_layer_forward(c, row, h, y) ||
      biased_row_layer_forward(c, biased, h, z) || biased_row_layer_backward(c, biased, h, z, dh) ||
      row_layer_backward(c, row, h, y, {}) || up_layer_backward(c, up, x, dh, dx) || plait_reduce_gradients(c))
    return 1;
  out = {values(y.data, y.size),         values(z.data, z.size),         values(dx.data, dx.size),
         values(dup_w.data, dup_w.size), values(dup_b.data, dup_b.size), values(dw.data, dw.size),
         values(dw2.data, dw2.size),     values(db.data, db.size)};
  return 0;
}

}  // namespace

TEST_CASE("layers of C have the results of one rank on two") {
  results one, two[2];
  CHECK(run(1, [&](plait_context* c) { return run_layers(c, one); }) == "");
  CHECK(run(2, [&](plait_context* c) { return run_layers(c, two[plait_rank(c)]); }) == "");
  // The expected values: the first sample is (1, 2), so h_k is (-8 + 2 k) + 2 (-7 + 2 k) + (-3 + k).
  float first = 0;
  for (int k = 0; k < 8; ++k) first += static_cast<float>((-25 + 7 * k) * (-7 + k));
  CHECK(one.y[0] == first);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const results& own = two[rank];
    CHECK(own.y == one.y);
    CHECK(own.z == one.z);
    CHECK(own.dx == one.dx);
    CHECK(own.db == one.db);
    CHECK(own.dup_w == values(one.dup_w.data() + 8 * rank, 8));
    CHECK(own.dup_b == values(one.dup_b.data() + 4 * rank, 4));
    for (std::size_t i = 0; i < 8; ++i) {
      CHECK(own.dw[i] == one.dw[i / 4 * 8 + 4 * rank + i % 4]);
      CHECK(own.dw2[i] == one.dw2[i / 4 * 8 + 4 * rank + i % 4]);
    }
  }
}

TEST_CASE("the gradient of a replicated weight in C is the ranks' sum only after its reduction") {
  const std::string text = run(2, [](plait_context* c) {
    memory all;
    if (data_begin(c, {plait_ranks(c), 2, 2, 1})) return 1;
    const samples x = samples_of(c, all(2));  // (1, 2) on each rank
    const samples_out y = MAKE(samples_out);
    const shared_weight w = MAKE(shared_weight), dw = MAKE(shared_weight);
    shared_layer* const layer = shared_layer_make(c, w, dw.data);
    for (int step = 0; step < 2; ++step) {
      if (plait_begin_step(c) || shared_layer_forward(c, layer, x, y)) return 1;
      CHECK(y.data[0] == 5);
      y.data[0] = 1;
      if (shared_layer_backward(c, layer, x, y, {})) return 1;
      CHECK(values(dw.data, 2) == std::vector<float>{1, 2});
      if (plait_reduce_gradients(c)) return 1;
      CHECK(values(dw.data, 2) == std::vector<float>{2, 4});
    }
    return 0;
  });
  CHECK(text == "");
}

TEST_CASE("errors of C have a text") {
  const auto on_one = [&](const std::function<void(plait_context*)>& body, const std::string& wanted) {
    const std::string text = run(1, [&](plait_context* c) { return body(c), 0; });
    INFO(text);
    CHECK(text.substr(0, text.find('\n')) == "rank 0: " + wanted);
  };
  float few[4] = {};
  on_one([](plait_context* c) { residual_size(c); },
         "residual_size: the context has no mesh yet: call the function of PLAIT_C_SIZES first");
  on_one([](plait_context* c) { begin(c), begin(c); }, "mlp_begin: the context has a mesh already");
  on_one([](plait_context* c) { begin(c), residual_of(c, nullptr); },
         "residual_of: part <batch, hidden, invariant<tp>>: the pointer is null; it must point to this rank's 8 "
         "elements");
  on_one(
      [](plait_context* c) {
        begin(c), sum_terms(c, {nullptr, 8});
      },
      "sum_terms: the array terms has no memory: its pointer is null");
  on_one(
      [&](plait_context* c) {
        begin(c), sum_terms(c, {few, 4});
      },
      "sum_terms: the array terms has 4 elements, and this rank's part has 8; make it by terms_of on this context");
  on_one([](plait_context* c) { begin(c), up_layer_forward(c, nullptr, {}, {}); },
         "up_layer_forward: the layer is null");
  on_one(
      [](plait_context* c) {
        mlp_begin(c, {2, 4, 2, 8});
      },
      "mlp_begin: the mesh has 2 ranks, but the communicator has 1: the extents of the axes must multiply to the "
      "number of ranks");
  CHECK(run(9, [](plait_context* c) { return begin(c) || inner_size(c) == 0; })
            .find("inner_size: tensor <batch, shard<ffn, tp>>: a dim has fewer elements than there are ranks") !=
        std::string::npos);
  CHECK(run(0, [](plait_context*) { return 0; }) == "threads::run: ranks is 0; at least 1 is needed");
  const std::string own = run(1, [](plait_context*) { return 7; });
  CHECK(own.substr(0, own.find('\n')) == "rank 0: the program's function returned 7");
}

TEST_CASE("after an error of C no call runs, and the first text stays") {
  const std::string text = run(1, [](plait_context* c) {
    memory all;
    if (begin(c)) return 1;
    const terms t = MAKE(terms);
    CHECK(plait_failed(c) == 0);
    CHECK(std::string(plait_error(c)) == "");
    const residual none = sum_terms(c, {t.data, 1});
    CHECK(none.data == t.data);
    CHECK(none.size == 0);
    CHECK(plait_failed(c) == 1);
    const std::string first = plait_error(c);
    CHECK(terms_size(c) == 0);
    CHECK(share_rows(c, none, 0) == 1);
    CHECK(up_layer_make(c, {}, nullptr, {}, nullptr) == nullptr);
    CHECK(plait_begin_step(c) == 1);
    CHECK(plait_reduce_gradients(c) == 1);
    CHECK(plait_error(c) == first);
    return 0;
  });
  CHECK(text.find("rank 0: sum_terms: the array terms has 1 elements") == 0);
}

TEST_CASE("a null context of C is an error") {
  CHECK(std::string(plait_error(nullptr)) == "the context is null");
  CHECK(plait_failed(nullptr) == 1);
  CHECK(plait_rank(nullptr) == -1);
  CHECK(plait_ranks(nullptr) == 0);
  CHECK(residual_size(nullptr) == 0);
  CHECK(plait_begin_step(nullptr) == 1);
}

TEST_CASE("a layer of C finds in the first step that an array differs between ranks") {
  const std::string text = run(2, [](plait_context* c) {
    memory all;
    if (begin(c)) return 1;
    const up_weight w = MAKE(up_weight), dw = MAKE(up_weight);
    const up_bias b = MAKE(up_bias), db = MAKE(up_bias);
    const residual x = MAKE(residual);
    up_layer* const up = up_layer_make(c, w, dw.data, b, db.data);
    x.data[0] += static_cast<float>(plait_rank(c));
    return plait_begin_step(c) + up_layer_forward(c, up, x, MAKE(inner)) + plait_begin_step(c);
  });
  INFO(text);
  const char* const wanted =
      "plait_begin_step: checked values: ranks along tp differ in the input of up_layer.0, which the type calls equal";
  CHECK(text.find(wanted) != std::string::npos);
}

// Kernels that the example, a C program, calls.
void gelu(inner, inner) {}
void gelu_gradient(inner, inner, inner) {}
void down(terms, inner, down_weight) {}
void down_input_gradient(inner, copies, down_weight) {}
void down_weight_gradient(down_weight, copies, inner) {}
void add_branch(residual, residual, residual) {}
void add_gradient(residual, residual) {}
