// program: layers
// Layers that are resized to other batches and lengths, each compared with a new layer; and calls in a context with
// other sizes than the layer's.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plait/nn/attention.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/loss.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "support/on_pointers.hpp"
#include "support/small_layers.hpp"
#include "support/texts.hpp"

namespace plait::test::small_layers {

namespace {

/// Whether a layer resized up and down computes the same as a new layer of those sizes. `make` takes a context.
template <class Make>
void check_resized(const context<cpu>& ctx, const char* what, Make make) {
  auto layer = make(ctx);
  begin(ctx, layer);
  pass(ctx, layer);
  for (const dim_sizes& sizes : {sizes_for(16), sizes_for(4, 3), sizes_for(8)}) {
    const context<cpu> other = with_sizes(ctx, sizes);
    layer.resize(other);
    auto made = make(other);
    begin(other, made);
    if (pass(other, layer) != pass(other, made)) fail({what, ": differs from a layer that is made for these sizes"});
  }
}

}  // namespace

TEST_CASE("a resized layer has the results of a new one of that size") {
  CHECK(on_two_ranks([](const context<cpu>& ctx) {
          check_resized(ctx, "linear", [](auto& c) { return linear<double, up_with_bias>(c, "up"); });
          check_resized(ctx, "linear that reduces", [](auto& c) { return linear<double, down>(c, "down"); });
          check_resized(ctx, "overlapped linear",
                        [](auto& c) { return linear<double, down>(c, "down", {.overlap = 2}); });
          check_resized(ctx, "adapted linear",
                        [](auto& c) { return linear<double, down>(c, "down", {.lora = {.rank = 2}}); });
          check_resized(ctx, "rms_norm", [](auto& c) { return rms_norm<double, rows>(c); });
          check_resized(ctx, "layer_norm", [](auto& c) { return layer_norm<double, rows>(c); });
          check_resized(ctx, "mlp", [](auto& c) { return swiglu_mlp<double, tensor_strategy>(c, "mlp"); });
          check_resized(ctx, "attention", [](auto& c) {
            attention_options how;
            how.frequencies = {1.0};
            how.qk_norm_epsilon = 1e-5;
            return self_attention<double, tensor_strategy>(c, "attention", how);
          });
        }) == "");
}

TEST_CASE("a resized embedding and loss") {
  CHECK(on_two_ranks([](const context<cpu>& ctx) {
          using loss_type = cross_entropy_loss<double, spec<seq, shard<vocab, tp>>, spec<seq, invariant<tp>>>;
          const auto run = [](const context<cpu>& c, auto& table, auto& loss) {
            const auto length = static_cast<std::size_t>(c.sizes.of(dim_of<seq>));
            std::vector<std::int64_t> ids(length);
            for (std::size_t i = 0; i < length; ++i) ids[i] = static_cast<std::int64_t>(3 * i % words);
            std::vector<double> y(length / 2 * width), logits(length * words / 2, 0.25);
            for (std::size_t i = 0; i < logits.size(); ++i) logits[i] += 0.01 * static_cast<double>(i);
            forward_on(table, c, ids.data(), y.data());
            zero_gradients(c, table);
            backward_on(table, c, ids.data(), y.data());
            using seed = loss_seed<typename loss_type::output>;
            const part<double, spec<seq, shard<vocab, tp>>> typed_logits(c, logits.data());
            const part<const std::int64_t, spec<seq, invariant<tp>>> labels(c, ids.data());
            y.push_back(loss.forward_backward(c, typed_logits, labels, seed::weighted(c, 1.0)).data()[0]);
            y.insert(y.end(), logits.begin(), logits.end());
            const std::vector<double> g = numbers(table.weight()->used_gradient(c.device), table.weight()->used_size());
            y.insert(y.end(), g.begin(), g.end());
            return y;
          };
          embedding<double, split_table> table(ctx, words, "table");
          loss_type loss(ctx, words);
          begin(ctx, table);
          run(ctx, table, loss);
          for (const std::int64_t length : {16, 4}) {
            const context<cpu> other = with_sizes(ctx, sizes_for(length));
            table.resize(other), loss.resize(other);
            embedding<double, split_table> made(other, words, "table");
            loss_type made_loss(other, words);
            begin(other, made);
            if (run(other, table, loss) != run(other, made, made_loss)) fail("differs");
          }
        }) == "");
}

TEST_CASE("a call on pointers in a context of other sizes is refused") {
  const auto refused = [](auto work) {
    return on_two_ranks([&](const context<cpu>& ctx) {
      std::vector<double> x(64), y(64);
      std::vector<std::int64_t> ids(64);
      work(ctx, with_sizes(ctx, sizes_for(16)), x.data(), y.data(), ids.data());
    });
  };
  const std::string other = "the context of this call has seq = 16, and the layer was made for 8: call the layer's";
  CHECK(has(refused([](auto& ctx, auto longer, double* x, double* y, auto*) {
              linear<double, up_with_bias> layer(ctx, "up");
              begin(ctx, layer);
              forward_on(layer, longer, x, y);
            }),
            "up.weight: " + other));
  CHECK(has(refused([](auto& ctx, auto longer, double* x, double* y, auto*) {
              linear<double, up_with_bias> layer(ctx, "up");
              begin(ctx, layer);
              linear<double, up_with_bias>::saved kept;
              forward_on(layer, ctx, x, y, &kept);
              backward_on(layer, longer, x, kept, y, static_cast<double*>(nullptr));
            }),
            "up.weight: " + other));
  CHECK(has(refused([](auto& ctx, auto longer, double* x, double* y, auto*) {
              rms_norm<double, rows> norm(ctx);
              begin(ctx, norm);
              forward_on(norm, longer, x, y);
            }),
            "norm.weight: " + other));
  CHECK(has(refused([](auto& ctx, auto longer, double* x, double* y, auto*) {
              layer_norm<double, rows> norm(ctx);
              begin(ctx, norm);
              layer_norm<double, rows>::saved kept;
              forward_on(norm, ctx, x, y, &kept);
              backward_on(norm, longer, x, kept, y, x);
            }),
            "norm.weight: " + other));
  CHECK(has(refused([](auto& ctx, auto longer, double*, double* y, std::int64_t* ids) {
              embedding<double, split_table> table(ctx, words, "table");
              begin(ctx, table);
              forward_on(table, longer, ids, y);
            }),
            "table.weight: " + other));
  CHECK(has(refused([](auto& ctx, auto longer, double*, double* y, std::int64_t* ids) {
              cross_entropy_loss<double, spec<seq, shard<vocab, tp>>, spec<seq, invariant<tp>>> loss(ctx, words);
              loss.forward(longer, part<const double, spec<seq, shard<vocab, tp>>>(longer, y),
                           part<const std::int64_t, spec<seq, invariant<tp>>>(longer, ids));
            }),
            "cross_entropy: " + other));
  using moved_rows = spec<seq, hidden, invariant<tp>>;
  CHECK(has(refused([](auto& ctx, auto longer, double*, double*, auto*) {
              redistribution<double, rows, moved_rows> layer(ctx, "moved");
              const tensor<double, rows> x(ctx);
              layer.forward(longer, x);
            }),
            "moved: " + other));
  CHECK(has(refused([](auto& ctx, auto longer, double*, double*, auto*) {
              redistribution<double, rows, moved_rows> layer(ctx, "moved");
              typename decltype(layer)::saved none;
              layer.backward(longer, tensor<double, rows>(ctx), none, tensor<double, dual_t<moved_rows>>(ctx));
            }),
            "moved: " + other));
  CHECK(refused([](auto& ctx, auto, double* x, double* y, auto*) {  // sizes of dims that the layer does not have
          linear<double, up_with_bias> layer(ctx, "up");
          begin(ctx, layer);
          context<cpu> more = ctx;
          more.sizes.set(dim_of<vocab>, 2 * words);
          forward_on(layer, more, x, y);
        }) == "");
}

TEST_CASE("a call, or a resize, in a context of another rank of a mesh is refused") {
  // Equal sizes, but two worlds that number the ranks differently.
  const auto refused = [](auto work) {
    return on_two_ranks([&](const context<cpu>& ctx) {
      world turned(ctx.ranks.shape(), ctx.ranks.root().split(0, 1 - ctx.ranks.rank()));
      linear<double, up_with_bias> layer(ctx, "up");
      rms_norm<double, rows> norm(ctx);
      embedding<double, split_table> table(ctx, words, "table");
      begin(ctx, layer), begin(ctx, norm), begin(ctx, table);
      const context<cpu> there{ctx.device, turned, ctx.sizes, ctx.seed};
      work(there, layer, norm, table);
    });
  };
  const std::string other = ": the context of this call has rank ", made = ", and the layer was made for rank ";
  std::vector<double> x(64), y(64);
  std::vector<std::int64_t> ids(64);
  for (const std::string& text : {
           refused([&](auto& there, auto& layer, auto&, auto&) { forward_on(layer, there, x.data(), y.data()); }),
           refused([&](auto& there, auto& layer, auto&, auto&) { layer.resize(there); }),
           refused([&](auto& there, auto&, auto& norm, auto&) { forward_on(norm, there, x.data(), y.data()); }),
           refused([&](auto& there, auto&, auto& norm, auto&) { norm.resize(there); }),
           refused([&](auto& there, auto&, auto&, auto& table) { forward_on(table, there, ids.data(), y.data()); }),
           refused([&](auto& there, auto&, auto&, auto& table) { table.resize(there); }),
       }) {
    CHECK(has(text, other));
    CHECK(has(text, made));
  }
}

TEST_CASE("a resize that would change a weight is refused, and changes nothing") {
  const auto refused = [](auto make) {
    return on_two_ranks([&](const context<cpu>& ctx) {
      auto layer = make(ctx);
      if constexpr (requires { typename decltype(layer)::saved; }) begin(ctx, layer);
      context<cpu> wider = with_sizes(ctx, sizes_for(16));
      wider.sizes.set(dim_of<hidden>, 2 * width);
      try {
        layer.resize(wider);
      } catch (const error& e) {
        pass(ctx, layer);
        throw;
      }
    });
  };
  CHECK(has(refused([](auto& ctx) { return linear<double, up_with_bias>(ctx, "up"); }),
            "up.weight: resize changes hidden from 4 to 8, and the weight has this dim"));
  CHECK(has(refused([](auto& ctx) { return rms_norm<double, rows>(ctx); }),
            "norm: resize changes hidden from 4 to 8, and the weight has this dim"));
  CHECK(has(on_two_ranks([](const context<cpu>& ctx) {
              embedding<double, split_table> table(ctx, words, "table");
              context<cpu> wider = ctx;
              wider.sizes.set(dim_of<hidden>, 2 * width);
              table.resize(wider);
            }),
            "table: resize changes hidden from 4 to 8, and the table has this dim"));
}

TEST_CASE("a layer that owns its saved values discards them when it is resized") {
  CHECK(has(on_two_ranks([](const context<cpu>& ctx) {
              with_saved<rms_norm<double, rows>> norm(ctx);
              begin(ctx, norm);
              const context<cpu> other = with_sizes(ctx, sizes_for(16));
              std::vector<double> x(32, 1.0), y(32), dx(32);
              forward_on(norm, ctx, x.data(), y.data());
              norm.resize(other);
              backward_on(norm, other, x.data(), y.data(), dx.data());
            }),
            "norm.weight: backward without what forward keeps"));
}

}  // namespace plait::test::small_layers
