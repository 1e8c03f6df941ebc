// program: training_step
// The states of a parameter: calls that are forgotten, repeated or out of order are refused by name.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "plait/nn/embedding.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/gradient_norm.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "support/layer_check.hpp"
#include "support/on_mesh.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using two = plait::mesh<axis<dp>, axis<tp>>;
using rows = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
struct up_policy {
  using mesh = two;
  using input = rows;
  using weight = spec<shard<ffn, tp>, hidden>;
  using stored = spec<shard<ffn, tp>, shard<hidden, dp>>;
  using output = spec<shard<batch, dp>, seq, shard<ffn, tp>>;
  static constexpr bool bias = true;
};
using up = linear<double, up_policy>;
struct down {
  using input = spec<shard<batch, dp>, seq, shard<ffn, tp>>;
  using weight = spec<hidden, shard<ffn, tp>>;
  using stored = spec<shard<hidden, dp>, shard<ffn, tp>>;
  using output = rows;
  static constexpr bool bias = true;
};

/// Calls body(context, layer, x, dy) on every rank of dp 2 x tp 2; returns the text of a rank's error, or "".
template <class Body>
std::string error_on_ranks(Body&& body) {
  return error_on_mesh(two{2, 2}, transformer_sizes(), 5, [&](const context<cpu>& ctx) {
    up layer(ctx, "up");
    tensor<double, rows> x(ctx);
    tensor<double, dual_t<up_policy::output>> dy(ctx);
    kernels::fill(ctx.device, x.data(), x.size(), 1.0);
    kernels::fill(ctx.device, dy.data(), dy.size(), 1.0);
    initialize(ctx, layer);
    body(ctx, layer, x, dy);
  });
}
}  // namespace

TEST_CASE("all states of a parameter, twice") {
  CHECK(error_on_ranks([](auto& ctx, auto& layer, auto& x, auto& dy) {
          adamw<double> optimizer;
          for (int step = 0; step < 2; ++step) {
            const auto all_are = [&](parameter_state s) {
              layer.visit([&](auto& p) {
                if (p.state() != s) fail(p.name() + " is " + name_of(p.state()) + ", and should be " + name_of(s));
              });
            };
            all_are(step == 0 ? parameter_state::stale : parameter_state::updated);
            gather_parameters(ctx, layer);
            all_are(parameter_state::gathered);
            zero_gradients(ctx, layer);
            all_are(parameter_state::accumulating);
            up::saved kept;
            layer.forward(ctx, x, &kept);
            layer.backward(ctx, x, kept, dy);
            optimizer.begin_step(ctx, 1e-3);
            layer.visit([&](auto& p) {
              auto reduced = p.reduce(ctx);
              if (p.state() != parameter_state::reduced) fail("not reduced");
              optimizer.update(ctx, std::move(reduced));
            });
          }
        }) == "");
}

TEST_CASE("a layer does not read a parameter before it is gathered") {
  CHECK(has(error_on_ranks([](auto& ctx, auto& layer, auto& x, auto&) { layer.forward(ctx, x); }),
            "parameter up.weight is used while it is stale: call gather(ctx)"));
  CHECK(has(error_on_ranks([](auto& ctx, auto& layer, auto& x, auto&) {
              gather_parameters(ctx, layer);
              layer.bias()->value()[0] = 1;
              layer.forward(ctx, x);
            }),
            "parameter up.bias is used while it is stale"));
  CHECK(has(error_on_ranks([](auto& ctx, auto& layer, auto& x, auto& dy) {
              adamw<double> optimizer;
              gather_parameters(ctx, layer);
              zero_gradients(ctx, layer);
              up::saved kept;
              layer.backward(ctx, x, kept, dy);
              optimizer.begin_step(ctx, 1e-3);
              optimizer.update(ctx, layer);
              layer.forward(ctx, x);
            }),
            "parameter up.weight is used while it is updated"));
}

TEST_CASE("values that were never set are not gathered") {
  const std::string unset = ": gather would have layers read values that have not been set; call initialize(ctx)";
  CHECK(has(error_on_ranks([](auto& ctx, auto&, auto&, auto&) {
              up fresh(ctx, "fresh");
              gather_parameters(ctx, fresh);
            }),
            "parameter fresh.weight" + unset));
  CHECK(has(error_on_ranks([](auto& ctx, auto&, auto&, auto&) {
              up fresh(ctx, "fresh");
              fresh.weight()->initialize(ctx);
              gather_parameters(ctx, fresh);
            }),
            "parameter fresh.bias" + unset));
  CHECK(error_on_ranks([](auto& ctx, auto&, auto&, auto&) {
          up fresh(ctx, "fresh");
          fresh.weight()->initialize(ctx);
          fresh.bias()->fill_values(ctx, [&](double* v) { std::fill_n(v, fresh.bias()->size(), 0.0); });
          gather_parameters(ctx, fresh);
        }) == "");
}

TEST_CASE("a gradient is zeroed, added to, reduced once, and used once") {
  CHECK(has(error_on_ranks([](auto& ctx, auto& layer, auto& x, auto& dy) {
              gather_parameters(ctx, layer);
              up::saved kept;
              layer.backward(ctx, x, kept, dy);
            }),
            "parameter up.weight: a backward pass adds to a gradient that has not begun; call zero_gradient(ctx)"));
  CHECK(has(error_on_ranks([](auto& ctx, auto& layer, auto&, auto&) {
              gather_parameters(ctx, layer);
              static_cast<void>(layer.weight()->reduce(ctx));
            }),
            "parameter up.weight: reduce without a gradient"));
  CHECK(has(error_on_ranks([](auto& ctx, auto& layer, auto&, auto&) {
              zero_gradients(ctx, layer);
              static_cast<void>(layer.weight()->reduce(ctx));
              static_cast<void>(layer.weight()->reduce(ctx));
            }),
            "parameter up.weight: reduce is called twice for one gradient"));
  CHECK(has(error_on_ranks([](auto& ctx, auto& layer, auto& x, auto& dy) {
              gather_parameters(ctx, layer);
              zero_gradients(ctx, layer);
              up::saved kept;
              static_cast<void>(layer.weight()->reduce(ctx));
              layer.backward(ctx, x, kept, dy);
            }),
            "parameter up.weight: a backward pass adds to a gradient that has been reduced"));
  CHECK(has(error_on_ranks([](auto& ctx, auto& layer, auto&, auto&) {
              adamw<double> optimizer;
              zero_gradients(ctx, layer);
              auto reduced = layer.weight()->reduce(ctx);
              layer.weight()->zero_gradient(ctx);
              optimizer.begin_step(ctx, 1e-3);
              optimizer.update(ctx, std::move(reduced));
            }),
            "parameter up.weight: an optimizer updates it while it is stale; reduce(ctx) comes first"));
}

TEST_CASE("the first pass writes a gradient, later ones add, and without a pass it is zero") {
  CHECK(error_on_ranks([](auto& ctx, auto& layer, auto& x, auto& dy) {
          gather_parameters(ctx, layer);
          const auto gradients = [&](int passes) {
            zero_gradients(ctx, layer);
            layer.visit([&](auto& p) {  // its previous state is discarded
              std::fill_n(p.used_gradient(ctx.device), p.used_size(), std::numeric_limits<double>::quiet_NaN());
              p.discard_gradient(ctx);
            });
            for (int i = 0; i < passes; ++i) {
              up::saved kept;
              layer.backward(ctx, x, kept, dy);
            }
            std::vector<double> all;
            layer.visit([&](auto& p) {
              if (p.gradient_is_empty() != (passes == 0)) fail(p.name() + ": gradient_is_empty");
              const auto reduced = p.reduce(ctx);
              all.insert(all.end(), reduced.data(), reduced.data() + reduced.size());
            });
            return all;
          };
          const std::vector<double> one = gradients(1), three = gradients(3), none = gradients(0);
          for (std::size_t i = 0; i < one.size(); ++i) {
            if (one[i] == 0 || three[i] != 3 * one[i]) fail("three passes do not give three times the gradient of one");
            if (none[i] != 0) fail("no pass leaves something");
          }
        }) == "");
  // In the caller's memory, to which the caller may add as well, gradients are zeroed at once.
  CHECK(error_on_ranks([](auto& ctx, auto&, auto&, auto&) {
          std::vector<double> weight(64), gradient(64, 1.0);
          rms_norm<double, rows> norm(ctx, 1e-5, "norm", weight.data(), gradient.data());
          norm.weight()->zero_gradient(ctx);
          for (std::int64_t i = 0; i < norm.weight()->used_size(); ++i)
            if (gradient[static_cast<std::size_t>(i)] != 0) fail("the caller's gradient is not zeroed");
        }) == "");
}

TEST_CASE("a frozen parameter has no gradient, no reduction and no state") {
  CHECK(error_on_ranks([](auto& ctx, auto& layer, auto& x, auto& dy) {
          gather_parameters(ctx, layer);
          zero_gradients(ctx, layer);
          for (const auto& p : {layer.weight(), layer.bias()}) {  // its memory is allocated on first use
            p->used_gradient(ctx.device);
            static_cast<void>(p->reduce(ctx));
          }
          const std::size_t before = ctx.device.bytes_in_use();
          const auto bytes =
              static_cast<std::size_t>(layer.weight()->size() + layer.weight()->used_size()) * sizeof(double);
          layer.weight()->freeze();
          if (before - ctx.device.bytes_in_use() != bytes) fail("the gradient's memory is still there");
          gather_parameters(ctx, layer);
          zero_gradients(ctx, layer);
          ctx.ranks.ledger().clear();
          up::saved kept;
          const auto y = layer.forward(ctx, x, &kept);
          if (!kept.gathered.empty()) fail("what only the weight's gradient needs is kept");
          const auto dx = layer.backward(ctx, x, kept, dy);
          if (dx.data()[0] == 0) fail("no gradient of the input");
          if (ctx.ranks.ledger().total("tp", collective::all_gather).calls != 1) fail("gathered for a frozen weight");
          adamw<double> optimizer;
          optimizer.begin_step(ctx, 1e-3);
          const std::size_t unfrozen = ctx.device.bytes_in_use();
          layer.visit([&](auto& p) {
            if (p.trainable()) optimizer.update(ctx, p.reduce(ctx));
          });
          if (ctx.device.bytes_in_use() - unfrozen !=
              2 * static_cast<std::size_t>(layer.bias()->size()) * sizeof(double))
            fail("state of a frozen parameter");
        }) == "");
  CHECK(has(error_on_ranks([](auto& ctx, auto& layer, auto&, auto&) {
              layer.weight()->freeze();
              static_cast<void>(layer.weight()->reduce(ctx));
            }),
            "parameter up.weight is frozen, and has no gradient to reduce"));
}

TEST_CASE("an optimizer finds its state by name, in any order of updates") {
  // A parameter that is not updated for some steps, and then again.
  std::vector<double> with, without;
  for (std::vector<double>* result : {&with, &without})
    CHECK(error_on_ranks([&](auto& ctx, auto& layer, auto& x, auto& dy) {
            adamw<double> optimizer;
            for (int step = 0; step < 3; ++step) {
              gather_parameters(ctx, layer);
              zero_gradients(ctx, layer);
              up::saved kept;
              layer.backward(ctx, x, kept, dy);
              optimizer.begin_step(ctx, 1e-2);
              layer.visit([&](auto& p) {
                auto reduced = p.reduce(ctx);
                const bool skipped = result == &without && step == 1 && p.name() == "up.weight";
                if (!skipped) optimizer.update(ctx, std::move(reduced));
              });
            }
            const auto bias = gather_whole(ctx, *layer.bias(), std::as_const(*layer.bias()).value());
            if (ctx.ranks.rank() == 0) *result = bias;
          }) == "");
  CHECK(with == without);  // the bias has its own moments, in any order of updates
  CHECK(has(
      error_on_ranks([](auto& ctx, auto& layer, auto&, auto&) {
        adamw<double> optimizer;
        up other(ctx, "up");
        zero_gradients(ctx, layer);
        zero_gradients(ctx, other);
        optimizer.begin_step(ctx, 1e-3);
        optimizer.update(ctx, layer.weight()->reduce(ctx));
        optimizer.update(ctx, other.weight()->reduce(ctx));
      }),
      "adamw: up.weight is updated twice in one step: two parameters have this name, or begin_step was not called"));
  CHECK(has(error_on_ranks([](auto& ctx, auto& layer, auto&, auto&) {
              adamw<double> optimizer;
              rms_norm<double, rows> other(ctx, 1e-5, "up");
              zero_gradients(ctx, layer);
              zero_gradients(ctx, other);
              optimizer.begin_step(ctx, 1e-3);
              optimizer.update(ctx, layer.weight()->reduce(ctx));
              optimizer.begin_step(ctx, 1e-3);
              optimizer.update(ctx, other.weight()->reduce(ctx));
            }),
            "adamw: up.weight has 8 elements on this rank, and its state is of 32"));
  CHECK(has(error_on_ranks([](auto& ctx, auto& layer, auto&, auto&) {
              adamw<double> optimizer;
              zero_gradients(ctx, layer);
              optimizer.update(ctx, layer.weight()->reduce(ctx));
            }),
            "adamw: begin_step comes before the first update"));
}

TEST_CASE("the use of a parameter is derived from its operand, over every axis of the mesh") {
  static_assert(std::is_same_v<use_t<spec<hidden>, rows>, spec<hidden, replicate<dp, tp>>>);
  CHECK(error_on_ranks([](auto& ctx, auto&, auto&, auto&) {
          // A user-defined layer gives two specs for its parameter: its storage and its use.
          const parameter<double, cpu> scale(ctx, {"scale", {8}, {1, 0}}, layout_v<spec<hidden>>,
                                             layout_v<spec<hidden>>, layout_v<rows>);
          if (!(dual(scale.used()) == layout_v<spec<hidden, partial<dp, tp>>>)) fail("the gradient is not partial");
        }) == "");
  CHECK(has(error_on_ranks([](auto& ctx, auto&, auto&, auto&) {
              const parameter<double, cpu> scale(ctx, {"scale", {8}, {1, 0}}, layout_v<spec<hidden>>,
                                                 layout_v<spec<hidden>>, layout_v<spec<batch, shard<seq, tp>, hidden>>);
            }),
            "parameter scale: its partner, <batch, shard<seq, tp>, hidden>: a boundary spec must mention every axis"));
}

TEST_CASE("biases are stored like weights") {
  CHECK(error_on_ranks([](auto& ctx, auto&, auto&, auto&) {
          const linear<double, down> layer(ctx, "down");
          if (!(layer.bias()->stored() == layout_v<spec<shard<hidden, dp>>>)) fail(describe(layer.bias()->stored()));
        }) == "");
}
