// program: layers
// Helpers for programs with their own memory and loops: policies in one line, a layer with its saved values, the loss
// in one call, and parts of whole arrays for each rank.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/linear/policy.hpp"
#include "plait/nn/loss.hpp"
#include "plait/nn/norm.hpp"
#include "support/on_pointers.hpp"
#include "support/small_layers.hpp"

namespace plait::test::small_layers {

namespace {

using wide_rows = spec<seq, shard<ffn, tp>>;
using ids = spec<seq, invariant<tp>>;
using table = spec<shard<vocab, tp>, hidden>;
using logits = spec<seq, shard<vocab, tp>>;
using up_policy = biased_policy<rows, spec<shard<ffn, tp>, hidden>, wide_rows>;

std::vector<float> numbers(std::int64_t n, float first) {
  std::vector<float> all(static_cast<std::size_t>(n));
  std::iota(all.begin(), all.end(), first);
  for (float& v : all) v = 0.01f * v;
  return all;
}

/// Layers as members; their memory is given where they are declared.
struct program {
  const context<cpu>& ctx;
  std::vector<float>&w, &g;
  with_saved<layer_norm<float, rows>> norm{ctx, 1e-5, "norm", {&w[0], &g[0], &w[width], &g[width]}};
  with_saved<linear<float, up_policy>> up{
      ctx, "up", {.memory = {&w[2 * width], &g[2 * width], &w[w.size() - wide], &g[w.size() - wide]}}};
  void visit(auto&& f) { norm.visit(f), up.visit(f); }
};

}  // namespace

TEST_CASE("a layer with its saved has the results of one with the caller's saved") {
  const std::string why = on_ranks(2, [](const context<cpu>& ctx) {
    const std::int64_t own = tokens / 2 * width, out = tokens * wide / 2;
    std::vector<float> w = numbers(2 * width + wide * width + wide, 1), g(w.size());
    std::vector<float> x = numbers(own, 7), dy = numbers(out, 3);
    std::vector<float> y(static_cast<std::size_t>(out)), normed(x.size()), dnormed(x.size()), dx(x.size());
    program p{ctx, w, g};
    forward_on(p.norm, ctx, x.data(), normed.data());
    forward_on(p.up, ctx, normed.data(), y.data());
    backward_on(p.up, ctx, normed.data(), dy.data(), dnormed.data());
    backward_on(p.norm, ctx, x.data(), dnormed.data(), dx.data(), x.data());
    reduce_all(ctx, p);

    std::vector<float> w2 = w, g2(w.size());
    layer_norm<float, rows> norm(ctx, 1e-5, "norm", parameter_memory<float>{&w2[0], &g2[0], &w2[width], &g2[width]});
    linear<float, up_policy> up(
        ctx, "up", {.memory = {&w2[2 * width], &g2[2 * width], &w2[w.size() - wide], &g2[w.size() - wide]}});
    std::vector<float> y2(y.size()), normed2(x.size()), dnormed2(x.size()), dx2(x.size());
    decltype(norm)::saved norm_saved;
    decltype(up)::saved up_saved;
    forward_on(norm, ctx, x.data(), normed2.data(), &norm_saved);
    forward_on(up, ctx, normed2.data(), y2.data(), &up_saved);
    backward_on(up, ctx, normed2.data(), up_saved, dy.data(), dnormed2.data());
    backward_on(norm, ctx, x.data(), norm_saved, dnormed2.data(), dx2.data(), x.data());
    reduce_all(ctx, norm, up);
    CHECK(y == y2);
    CHECK(dx == dx2);
    CHECK(g == g2);
    CHECK(g[2] != 0);
    CHECK(g[g.size() - wide] != 0);
  });
  CHECK(why == "");
}

TEST_CASE("a norm with its saved refuses a second backward pass without a forward pass") {
  const std::string why = on_ranks(1, [](const context<cpu>& ctx) {
    with_saved<layer_norm<float, rows>> norm(ctx);
    begin(ctx, norm);
    const std::vector<float> x = numbers(tokens * width, 1);
    std::vector<float> dx(x.size());
    backward_on(norm, ctx, x.data(), x.data(), dx.data());
  });
  CHECK(has(why, "backward without what forward keeps"));
}

TEST_CASE("the loss and its gradient in one call equal those of two calls") {
  const std::string why = on_ranks(2, [](const context<cpu>& ctx) {
    const cross_entropy_loss<float, logits, ids> constant(ctx, words);
    auto loss = constant;
    const std::vector<std::int32_t> labels = {0, 9, 3, 4, 5, 6, 7, 1};
    std::vector<float> at_once = numbers(tokens * words / 2, static_cast<float>(ctx.ranks.rank())), in_turn = at_once;
    const auto seed = loss_seed<decltype(loss)::output>::weighted(ctx, 1.0 / tokens);
    decltype(loss)::saved kept;
    const part<float, logits> first(ctx, at_once.data()), second(ctx, in_turn.data());
    const part<const std::int32_t, ids> words_of(ctx, labels.data());
    const double expected = *loss.forward(ctx, second, words_of, &kept).data();
    loss.backward(ctx, second, words_of, kept, seed);
    CHECK(*loss.forward_backward(ctx, first, words_of, seed).data() == expected);
    CHECK(at_once == in_turn);
    CHECK(expected > tokens);
  });
  CHECK(why == "");
}

TEST_CASE("every rank takes its parts of whole arrays, and a tied array once") {
  const std::string why = on_ranks(2, [](const context<cpu>& ctx) {
    embedding<float, layer_policy<ids, table, rows>> lookup(ctx, words, "table");
    linear<float, up_policy> up(ctx, "up");
    linear<float, layer_policy<rows, table, logits>> head(ctx, "head", {.tied = lookup.weight()});
    const std::vector<float> whole = numbers(words * width + wide * width + wide, 1);
    CHECK(take_parts(ctx, whole.data(), lookup, head, up) == static_cast<std::int64_t>(whole.size()));
    const auto rank = static_cast<std::size_t>(ctx.ranks.rank());
    const auto begins = [&](auto& p, std::size_t at, std::size_t part) {
      for (std::size_t i = 0; i < part; ++i) CHECK(p->used_value()[i] == whole[at + rank * part + i]);
    };
    begins(lookup.weight(), 0, words * width / 2);
    begins(up.weight(), words * width, wide * width / 2);
    begins(up.bias(), words * width + wide * width, wide / 2);
  });
  CHECK(why == "");
}

TEST_CASE("whole arrays are copied in and out without padding, which is zero") {
  const std::string why = on_ranks(2, [](const context<cpu>& ctx) {
    // In the second case one rank has padding only.
    for (const std::int64_t rows_of_whole : {words - 1, words / 2 - 1}) {
      embedding<float, layer_policy<ids, table, rows>> lookup(ctx, rows_of_whole, "table");
      const auto n = static_cast<std::size_t>(rows_of_whole * width);
      std::vector<float> whole = numbers(n, 1), back(n, -1.0f);
      whole.resize(words * width, std::nanf(""));  // belongs to another array
      CHECK(take_parts(ctx, whole.data(), lookup) == static_cast<std::int64_t>(n));
      const float* const own = std::as_const(*lookup.weight()).value();
      const std::size_t begin = static_cast<std::size_t>(ctx.ranks.rank()) * words * width / 2;
      for (std::size_t i = 0; i < words * width / 2; ++i) CHECK(own[i] == (begin + i < n ? whole[begin + i] : 0.0f));
      put_part(ctx.device, *lookup.weight(), own, back.data());
      for (std::size_t i = 0; i < n; ++i) {
        const bool mine = i >= begin && i < begin + words * width / 2;
        CHECK(back[i] == (mine ? whole[i] : -1.0f));
      }
      std::vector<float> part(words * width / 2, 7.0f), behind(words * width, -1.0f);
      const box mine = lookup.weight()->part();  // a parameter's part includes its padding
      take_part(ctx.device, mine, whole.data(), part.data());
      CHECK(std::equal(part.begin(), part.end(), own));
      put_part(ctx.device, mine, part.data(), behind.data());
      CHECK(std::equal(back.begin(), back.end(), behind.begin()));
      for (std::size_t i = n; i < behind.size(); ++i) CHECK(behind[i] == -1.0f);
      whole.resize(n);
      put_part(ctx.device, *lookup.weight(), part.data(), whole);
      take_part(ctx.device, *lookup.weight(), whole, part.data());
      CHECK(take_parts(ctx, whole, lookup) == static_cast<std::int64_t>(n));
    }
  });
  CHECK(why == "");
}

TEST_CASE("a vocabulary of fewer elements than ranks is refused") {
  const std::string cut =
      ": a dim has fewer elements than there are ranks that shard it: vocab is 1, sharded over tp=2 = 2 ranks; it must "
      "be at least 2";
  const auto of_one = [](auto&& make) {
    return on_ranks(2, [&](const context<cpu>& ctx) {
      dim_sizes sizes = ctx.sizes;
      sizes.set(dim_of<vocab>, 1);
      make(context<cpu>{ctx.device, ctx.ranks, sizes, ctx.seed});
    });
  };
  CHECK(has(of_one([](const context<cpu>& ctx) { embedding<float, layer_policy<ids, table, rows>>(ctx, 1, "wte"); }),
            "wte" + cut));
  CHECK(has(of_one([](const context<cpu>& ctx) { linear<float, layer_policy<rows, table, logits>>(ctx, "head"); }),
            "head" + cut));
  CHECK(has(of_one([](const context<cpu>& ctx) { cross_entropy_loss<float, logits, ids>(ctx, 1); }),
            "cross_entropy: logits" + cut));
}

TEST_CASE("a whole array of another size than the parameters is refused") {
  const auto refused = [](auto&& body) {
    return on_ranks(2, [&](const context<cpu>& ctx) { body(ctx, std::vector<float>((words - 1) * width, 1.0f)); });
  };
  std::vector<float> part(words * width / 2);
  CHECK(has(refused([&](const context<cpu>& ctx, const std::vector<float>& whole) {
              std::vector<float> mine(words * width / 2);
              take_part(ctx.device, part_of<table>(ctx), whole, mine.data());
            }),
            "take_part: whole has 36 elements, and the part is of an array of 40; where a parameter is padded, give "
            "the parameter itself in place of a part: take_part(device, *layer.weight(), ...), whose array is "
            "without padding"));
  CHECK(has(refused([&](const context<cpu>& ctx, std::vector<float> whole) {
              std::vector<float> mine(words * width / 2);
              put_part(ctx.device, part_of<table>(ctx), mine.data(), whole);
            }),
            "put_part: whole has 36 elements, and the part is of an array of 40; where"));
  CHECK(has(refused([&](const context<cpu>& ctx, const std::vector<float>& whole) {
              linear<float, layer_policy<rows, table, logits>> head(ctx, "head");
              take_parts(ctx, whole, head);
            }),
            "take_parts: whole has 36 elements, and the parameters have 40 without padding; a weight that is "
            "padded and not tied needs its true shape (linear_options::shape)"));
  CHECK(refused([&](const context<cpu>& ctx, const std::vector<float>& whole) {
          linear<float, layer_policy<rows, table, logits>> head(ctx, "head", {.shape = {words - 1, width}});
          take_parts(ctx, whole, head);
        }) == "");
  CHECK(has(refused([&](const context<cpu>& ctx, const std::vector<float>&) {
              linear<float, layer_policy<rows, table, logits>> head(ctx, "head", {.shape = {words, width - 1}});
            }),
            "parameter head.weight: its shape 10 x 3 has 30 elements, which are not the first of 10 rows of 4, "
            "as the context's sizes give; only the leading dim may be padded"));
}

TEST_CASE("a backward pass after several forward passes belongs to the last") {
  const auto backward_of = [](int which, int forwards) {
    return on_ranks(2, [=](const context<cpu>& ctx) {
      with_saved<layer_norm<float, rows>> norm(ctx, 1e-5, "norm");
      with_saved<linear<float, up_policy>> up(ctx, "up");
      begin(ctx, norm, up);
      const std::vector<float> x[] = {numbers(tokens * width, 1), numbers(tokens * width, 2)};
      std::vector<float> y(tokens * wide), dx(tokens * width);
      for (int i = 0; i < forwards; ++i) forward_on(norm, ctx, x[i % 2].data(), dx.data());
      backward_on(norm, ctx, x[which].data(), x[0].data(), dx.data());
      for (int i = 0; i < forwards; ++i) forward_on(up, ctx, x[i % 2].data(), y.data());
      backward_on(up, ctx, x[which].data(), y.data(), dx.data());
    });
  };
  CHECK(backward_of(0, 1) == "");
  CHECK(backward_of(1, 2) == "");
  CHECK(backward_of(0, 3) == "");
  CHECK(has(backward_of(0, 2),
            "norm.weight: several forward passes have made this `saved`, and the backward pass has "
            "the input of another than the last"));
}

}  // namespace plait::test::small_layers
