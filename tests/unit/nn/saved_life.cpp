// program: layers
// Saved values of a forward pass belong to one layer and one microbatch and are used once. A gradient is neither lost
// nor read before it is complete. Null memory and moved-from objects are refused.
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/nn/combinators.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/loss.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/parameter/free.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "plait/tensor/tensor.hpp"
#include "support/layer_check.hpp"
#include "support/on_mesh.hpp"
#include "support/on_pointers.hpp"
#include "support/small_layers.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using rows = spec<shard<batch, dp>, hidden>;
struct square {
  using input = rows;
  using weight = spec<ffn, hidden>;
  using output = spec<shard<batch, dp>, ffn>;
};
struct back {
  using input = spec<shard<batch, dp>, ffn>;
  using weight = spec<hidden, ffn>;
  using output = rows;
};

/// Calls body(ctx) on two ranks; returns the text of the error, or "".
template <class Body>
std::string error_on_ranks(Body&& body) {
  return error_on_mesh(plait::mesh<axis<dp>>{2}, sizes_of<batch, hidden, ffn, vocab>(8, 8, 16, 12), 3, body);
}
/// The same for body(ctx, layer, x, saved, dy) after a forward pass of the first of two layers.
template <class Layer, class Body>
std::string error_after_forward(Body&& body) {
  return error_on_ranks([&](const context<cpu>& ctx) {
    Layer layer = [&] {
      if constexpr (std::is_constructible_v<Layer, const context<cpu>&, double, std::string>)
        return Layer(ctx, 1e-5, "first");
      else
        return Layer(ctx, "first");
    }();
    begin(ctx, layer);
    tensor<float, typename Layer::input> x(ctx);
    tensor<float, dual_t<typename Layer::output>> dy(ctx);
    kernels::fill(ctx.device, x.data(), x.size(), 1.0);
    kernels::fill(ctx.device, dy.data(), dy.size(), 1.0);
    typename Layer::saved kept;
    layer.forward(ctx, x, &kept);
    body(ctx, layer, x, kept, dy);
  });
}
using up = linear<float, square>;
using norm = rms_norm<float, rows>;
using centred = layer_norm<float, rows>;

template <class Layer>
void check_used_once(const std::string& name) {
  const std::string each = "; each forward pass makes one `saved`, for one backward pass of the same layer";
  CHECK(error_after_forward<Layer>(
            [](auto& ctx, auto& l, auto& x, auto& kept, auto& dy) { l.backward(ctx, x, kept, dy); }) == "");
  CHECK(has(error_after_forward<Layer>([](auto& ctx, auto& l, auto& x, auto& kept, auto& dy) {
              l.backward(ctx, x, kept, dy);
              l.backward(ctx, x, kept, dy);
            }),
            name + ": this `saved` was used by a backward pass before" + each));
  CHECK(has(error_after_forward<Layer>([](auto& ctx, auto& l, auto& x, auto& kept, auto& dy) {
              microbatch<cpu> other(ctx);
              other.index = 2;
              l.backward(other, x, kept, dy);
            }),
            name + ": this `saved` is of microbatch 0, and the backward pass of 2" + each));
  CHECK(error_after_forward<Layer>([](auto& ctx, auto& l, auto& x, auto& kept, auto& dy) {
          l.backward(ctx, x, kept, dy);
          l.forward(ctx, x, &kept);
          l.backward(ctx, x, kept, dy);
        }) == "");
}

}  // namespace

TEST_CASE("saved values are used once, by their layer and microbatch") {
  check_used_once<up>("first.weight");
  check_used_once<norm>("first.weight");
  check_used_once<centred>("first.weight");
  CHECK(has(error_after_forward<up>([](auto& ctx, auto& l, auto& x, auto& kept, auto& dy) {
              up second(ctx, "second");
              begin(ctx, second);
              static_cast<void>(l);
              second.backward(ctx, x, kept, dy);
            }),
            "second.weight: this `saved` was made by another layer"));
  CHECK(has(error_on_ranks([](const context<cpu>& ctx) {
              sequential all{up(ctx, "up"), linear<float, back>(ctx, "down")};
              begin(ctx, all);
              tensor<float, rows> x(ctx);
              tensor<float, dual_t<rows>> dy(ctx);
              kernels::fill(ctx.device, x.data(), x.size(), 1.0);
              kernels::fill(ctx.device, dy.data(), dy.size(), 1.0);
              decltype(all)::saved kept;
              all.forward(ctx, x, &kept);
              all.backward(ctx, x, kept, dy);
              all.backward(ctx, x, kept, dy);
            }),
            "down.weight: this `saved` was used by a backward pass before"));
  CHECK(has(error_on_ranks([](const context<cpu>& ctx) {
              cross_entropy_loss<float, spec<shard<batch, dp>, vocab>, spec<shard<batch, dp>>> loss(ctx, 12);
              std::vector<float> numbers(48, 0.5f);
              const std::vector<std::int64_t> classes(4, 1);
              const part<float, spec<shard<batch, dp>, vocab>> logits(ctx, numbers.data());
              const part<const std::int64_t, spec<shard<batch, dp>>> labels(ctx, classes.data());
              decltype(loss)::saved kept;
              loss.forward(ctx, logits, labels, &kept);
              const auto seed = loss_seed<decltype(loss)::output>::weighted(ctx, 1.0);
              loss.backward(ctx, logits, labels, kept, seed);
              loss.backward(ctx, logits, labels, kept, seed);
            }),
            "cross_entropy: this `saved` was used by a backward pass before"));
}

TEST_CASE("a gradient is neither lost nor read before it is complete") {
  const std::string lost =
      "parameter first.weight: zero_gradient would lose a gradient that passes have added to and that was not reduced; "
      "call reduce(ctx) before it, or discard_gradient(ctx) in its place";
  CHECK(has(error_after_forward<up>([](auto& ctx, auto& l, auto& x, auto& kept, auto& dy) {
              l.backward(ctx, x, kept, dy);
              zero_gradients(ctx, l);
            }),
            lost));
  CHECK(has(error_after_forward<norm>([](auto& ctx, auto& l, auto& x, auto& kept, auto& dy) {
              l.backward(ctx, x, kept, dy);
              zero_gradients(ctx, l);
            }),
            lost));
  CHECK(error_after_forward<up>([](auto& ctx, auto& l, auto& x, auto& kept, auto& dy) {
          zero_gradients(ctx, l);  // there is no gradient yet
          l.backward(ctx, x, kept, dy);
          l.weight()->discard_gradient(ctx);
          l.forward(ctx, x, &kept);
          l.backward(ctx, x, kept, dy);
          reduce_all(ctx, l);
          static_cast<void>(std::as_const(*l.weight()).gradient());
          zero_gradients(ctx, l);
        }) == "");
  CHECK(has(error_after_forward<up>([](auto& ctx, auto& l, auto& x, auto& kept, auto& dy) {
              l.backward(ctx, x, kept, dy);
              static_cast<void>(std::as_const(*l.weight()).gradient());
            }),
            "parameter first.weight: its gradient is read before it is complete, so that it is this rank's term of a "
            "sum; call reduce(ctx) before"));
}

TEST_CASE("a step that leaves a parameter out is refused, and layers may start one by one") {
  const auto steps_of = [](auto&& step) {
    return error_on_ranks([&](const context<cpu>& ctx) {
      up first(ctx, "first"), second(ctx, "second");
      begin(ctx, first, second);
      const tensor<float, rows> x(ctx);
      const tensor<float, dual_t<up::output>> dy(ctx);
      for (int i = 0; i < 3; ++i)
        step(ctx, first, second, [&](up& l) {
          up::saved kept;
          l.forward(ctx, x, &kept), l.backward(ctx, x, kept, dy);
        });
    });
  };
  CHECK(has(steps_of([](auto& ctx, up& first, up& second, auto&& pass) {
              zero_gradients(ctx, first);
              pass(first), pass(second);
              reduce_all(ctx, first);
            }),
            "parameter second.weight: a backward pass adds to a gradient of the step before, which was not reduced; "
            "zero_gradients has begun this step without it: give its layer to zero_gradients and reduce_all, or have "
            "`visit` visit it"));
  CHECK(steps_of([](auto& ctx, up& first, up& second, auto&& pass) {
          zero_gradients(ctx, first);
          pass(first);
          zero_gradients(ctx, second);
          pass(second), pass(first);
          reduce_all(ctx, second);
          pass(first);
          reduce_all(ctx, first);
        }) == "");
}

TEST_CASE("null pointers are refused by name") {
  const float* const none = nullptr;
  const auto of_linear = [&](auto&& call) {
    return error_after_forward<up>([&](auto& ctx, auto& l, auto& x, auto& kept, auto& dy) {
      std::vector<float> y(64), dx(32);
      call(ctx, l, x.data(), y.data(), kept, dy.data(), dx.data());
    });
  };
  CHECK(has(of_linear([&](auto& ctx, auto& l, auto*, float* y, auto&, auto*, auto*) { forward_on(l, ctx, none, y); }),
            "first.weight: x is a null pointer; it must point to this rank's 32 elements"));
  CHECK(has(of_linear([&](auto& ctx, auto& l, auto* x, float*, auto&, auto*, auto*) {
              forward_on(l, ctx, static_cast<const float*>(x), static_cast<float*>(nullptr));
            }),
            "first.weight: y is a null pointer; it must point to this rank's 64 elements"));
  CHECK(has(of_linear([&](auto& ctx, auto& l, auto* x, float*, auto& kept, auto*, float* dx) {
              backward_on(l, ctx, static_cast<const float*>(x), kept, none, dx);
            }),
            "first.weight: dy is a null pointer"));
  CHECK(has(error_after_forward<norm>(
                [&](auto& ctx, auto& l, auto&, auto&, auto& dy) { forward_on(l, ctx, none, dy.data()); }),
            "first.weight: x is a null pointer"));
  CHECK(has(error_on_ranks([](const context<cpu>& ctx) {
              cross_entropy_loss<float, spec<shard<batch, dp>, vocab>, spec<shard<batch, dp>>> loss(ctx, 12);
              const std::vector<float> logits(48);
              loss.forward(ctx, part<const float, spec<shard<batch, dp>, vocab>>(ctx, logits.data()),
                           part<const std::int64_t, spec<shard<batch, dp>>>());
            }),
            "cross_entropy: labels is a null pointer"));
  CHECK(has(
      error_on_ranks([](const context<cpu>& ctx) { static_cast<void>(view<rows>(ctx, static_cast<float*>(nullptr))); }),
      "view: the pointer is a null pointer; it must point to this rank's 32 elements"));
  CHECK(has(error_on_ranks([&](const context<cpu>& ctx) { static_cast<void>(view<rows>(ctx, none)); }),
            "the pointer is null; it must point to this rank's 32 elements"));
  CHECK(has(error_after_forward<up>([&](auto& ctx, auto& l, auto& x, auto&, auto&) {
              take_part(ctx.device, x.part(), none, x.data());
              static_cast<void>(l);
            }),
            "take_part: whole is a null pointer; it must point to the whole array's 64 elements"));
  CHECK(has(error_after_forward<up>([&](auto& ctx, auto& l, auto& x, auto&, auto&) {
              put_part(ctx.device, x.part(), none, x.data());
              static_cast<void>(l);
            }),
            "put_part: in is a null pointer; it must point to this rank's 32 elements"));
}

TEST_CASE("moved-from layers, optimizers and tensors are refused by name") {
  const std::string moved = ": it was moved from, and is used; use the object that it was moved to";
  // Each call on a moved-from layer is an error, and none on the layer that it was moved to.
  const auto check = [&]<class Layer>(std::type_identity<Layer>, const std::string& name) {
    CHECK(error_after_forward<Layer>([](auto& ctx, auto& l, auto& x, auto& kept, auto& dy) {
            Layer other = std::move(l);
            other.backward(ctx, x, kept, dy);
            l = std::move(other);
            other = std::move(l);
            other.forward(ctx, x);
          }) == "");
    const auto refused = [&](auto&& call) {
      CHECK(has(error_after_forward<Layer>([&](auto& ctx, auto& l, auto& x, auto& kept, auto& dy) {
                  const Layer other = std::move(l);
                  call(ctx, l, x, kept, dy);
                }),
                name + moved));
    };
    refused([](auto& ctx, auto& l, auto& x, auto&, auto&) { l.forward(ctx, x); });
    refused([](auto& ctx, auto& l, auto& x, auto& kept, auto& dy) { l.backward(ctx, x, kept, dy); });
    refused([](auto& ctx, auto& l, auto&, auto&, auto&) { gather_parameters(ctx, l); });
    if constexpr (requires(Layer& l, const context<cpu>& ctx) { l.resize(ctx); }) {
      refused([](auto& ctx, auto& l, auto&, auto&, auto&) { l.resize(ctx); });
      refused([](auto&, auto& l, auto&, auto&, auto&) { l.rebind({}); });
    }
    if constexpr (requires(Layer& l) { l.weight(); })
      refused([](auto&, auto& l, auto&, auto&, auto&) { static_cast<void>(l.weight()); });
  };
  check(std::type_identity<up>{}, "first");
  check(std::type_identity<norm>{}, "first");
  check(std::type_identity<centred>{}, "first");
  // A deferred weight gradient belongs to its layer.
  CHECK(has(error_after_forward<up>([](auto& ctx, auto& l, auto& x, auto& kept, auto& dy) {
              weight_work later;
              microbatch<cpu> mb(ctx);
              mb.deferred = &later;
              l.backward(mb, x, kept, dy);
              const up other = std::move(l);
              later.run();
            }),
            "first" + moved));
  // Layers made of layers.
  CHECK(has(error_on_ranks([](const context<cpu>& ctx) {
              std::vector<sequential<up, linear<float, back>>> blocks;
              for (const char* name : {"one", "two"})
                blocks.emplace_back(up(ctx, name), linear<float, back>(ctx, std::string(name) + " back"));
              stack all(std::move(blocks));
              const auto other = std::move(all);
              all.forward(ctx, tensor<float, rows>(ctx));
            }),
            "a stack of layers" + moved));
  CHECK(has(error_on_ranks([](const context<cpu>& ctx) {
              sequential all{up(ctx, "up"), linear<float, back>(ctx, "down")};
              const auto other = std::move(all);
              all.visit([&](auto& p) { p.initialize(ctx); });
            }),
            "up" + moved));
  // Objects that are not layers.
  struct lookup {
    using input = spec<shard<batch, dp>>;
    using weight = spec<vocab, hidden>;
    using output = rows;
  };
  const auto refused = [&](auto&& make, auto&& call, const std::string& name) {
    CHECK(has(error_on_ranks([&](const context<cpu>& ctx) {
                auto one = make(ctx);
                const auto other = std::move(one);
                call(ctx, one);
              }),
              name + moved));
  };
  const auto table = [](auto& ctx) { return embedding<float, lookup>(ctx, 12, "table"); };
  const std::vector<std::int64_t> ids(4);
  std::vector<float> y(32);
  refused(
      table, [](auto& ctx, auto& l) { l.forward(ctx, tensor<std::int64_t, lookup::input>(ctx)); }, "table");
  refused(
      table, [&](auto& ctx, auto& l) { forward_on(l, ctx, ids.data(), y.data()); }, "table");
  refused(
      table, [&](auto& ctx, auto& l) { backward_on(l, ctx, ids.data(), y.data()); }, "table");
  refused(
      table, [](auto& ctx, auto& l) { zero_gradients(ctx, l); }, "table");
  const auto own = [](auto& ctx) { return free_parameter<float, spec<hidden>, rows>(ctx, "own"); };
  refused(
      own, [](auto& ctx, auto& p) { static_cast<void>(p.values(ctx)); }, "own");
  refused(
      own, [](auto& ctx, auto& p) { gather_parameters(ctx, p); }, "own");
  refused([](auto&) { return adamw<float>(); }, [](auto& ctx, auto& o) { o.begin_step(ctx, 1e-3); }, "adamw");
  // A tensor.
  const std::string none =
      " has no elements, and the layer was made for 32 on this rank: the tensor was moved from, or never made, or "
      "views "
      "a null pointer";
  CHECK(has(error_after_forward<up>([](auto& ctx, auto& l, auto& x, auto&, auto&) {
              const auto other = std::move(x);
              l.forward(ctx, x);
            }),
            "first.weight: x" + none));
  CHECK(has(error_after_forward<norm>([](auto& ctx, auto& l, auto& x, auto& kept, auto& dy) {
              const tensor<float, dual_t<rows>> addend;
              l.backward(ctx, x, kept, dy, &addend);
            }),
            "first.weight: addend" + none));
}
