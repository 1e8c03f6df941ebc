// program: layers
// Layers on a program's own memory that are bound to other pointers.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plait/nn/attention.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "support/on_pointers.hpp"
#include "support/small_layers.hpp"
#include "support/texts.hpp"

namespace plait::test::small_layers {

TEST_CASE("a layer that is bound to other memory reads and adds there") {
  CHECK(on_two_ranks([](const context<cpu>& ctx) {
          struct arrays {
            std::vector<double> w = std::vector<double>(wide / 2 * width), dw = w, b = std::vector<double>(wide / 2),
                                db = b;
            parameter_memory<double> memory() { return {w.data(), dw.data(), b.data(), db.data()}; }
          } first, second;
          for (std::size_t i = 0; i < first.w.size(); ++i) first.w[i] = 0.1 * static_cast<double>(i), second.w[i] = 1;
          second.b[1] = 3;
          linear<double, up_with_bias> layer(ctx, "up", {.memory = first.memory()});
          const std::size_t bytes = ctx.device.bytes_in_use();
          std::vector<double> x(4 * width, 0.5), y(8 * wide / 2), dx(x);
          linear<double, up_with_bias>::saved kept;
          forward_on(layer, ctx, x.data(), y.data(), &kept);
          backward_on(layer, ctx, x.data(), kept, y.data(), dx.data());
          const std::vector<double> before = first.dw;
          if (before == second.dw) fail("nothing was added");
          kept = {};
          layer.rebind(second.memory());
          forward_on(layer, ctx, x.data(), y.data(), &kept);
          if (y[0] != 2 || y[1] != 5) fail("the new weights or biases are not read");
          backward_on(layer, ctx, x.data(), kept, y.data(), dx.data());
          if (first.dw != before) fail("what was left is written");
          if (second.dw[0] == 0 || second.db[1] == 0) fail("the new gradients are not added to");
          kept = {};
          if (ctx.device.bytes_in_use() != bytes) fail("bytes that nobody asked for");

          rms_norm<double, rows> norm(ctx, 1e-5, "norm", first.w.data(), first.dw.data());
          norm.rebind({second.w.data(), second.dw.data()});
          if (norm.weight()->used_value() != second.w.data()) fail("the norm reads what it had");
          std::vector<double> t(words / 2 * width), dt(t), u(t);
          embedding<double, split_table> table(ctx, words, "table", {.memory = {t.data(), dt.data()}});
          table.rebind({u.data(), dt.data()});
          if (table.weight()->used_value() != u.data()) fail("the embedding reads what it had");
          free_parameter<double, spec<hidden>, rows> scale(ctx, "scale", {first.w.data(), first.dw.data()});
          scale.rebind({second.w.data(), second.dw.data()});
          if (scale.values(ctx).unchecked() != second.w.data() || scale.gradients(ctx).unchecked() != second.dw.data())
            fail("the program's own parameter is where it was");
        }) == "");
}

TEST_CASE("masters that are bound elsewhere are gathered before the weights are used") {
  CHECK(has(on_two_ranks([](const context<cpu>& ctx) {
              std::vector<bf16> w(width), v(w);
              std::vector<float> g(width), m(width, 2.0f), n(width, 3.0f);
              rms_norm<bf16, rows> norm(ctx, 1e-5, "norm",
                                        {.weight = w.data(), .gradient = g.data(), .master = m.data()});
              gather_parameters(ctx, norm);
              norm.rebind({.weight = v.data(), .gradient = g.data(), .master = n.data()});
              if (to_float(v[0]) == 3) fail("written before a gather");
              std::vector<bf16> x(4 * width), y(x);
              try {
                forward_on(norm, ctx, x.data(), y.data());
                fail("a stale weight is read");
              } catch (const error& e) {
                if (!has(e.what(), "norm.weight is used while it is stale")) throw;
              }
              gather_parameters(ctx, norm);
              if (to_float(v[0]) != 3 || to_float(w[0]) != 2) fail("the masters are not rounded into the new weights");
              fail("done");
            }),
            "done"));
}

TEST_CASE("memory of the layer's own is not replaced") {
  const auto refused = [](auto work) {
    return on_two_ranks([&](const context<cpu>& ctx) {
      std::vector<double> w(wide * width), g(w), b(wide);
      work(ctx, w.data(), g.data(), b.data());
    });
  };
  CHECK(has(refused([](auto& ctx, double* w, double* g, double*) {
              linear<double, down> layer(ctx, "down");
              layer.rebind({w, g});
            }),
            "down: rebind gives memory.weight, which is the layer's own and is not replaced"));
  CHECK(has(refused([](auto& ctx, double* w, double* g, double*) {
              linear<double, down> layer(ctx, "down", {.memory = {w, own_memory}});
              layer.rebind({w, g});
            }),
            "down: rebind gives memory.gradient, which is the layer's own"));
  CHECK(has(refused([](auto& ctx, double* w, double* g, double*) {
              linear<double, down> layer(ctx, "down", {.memory = {w, g}});
              layer.rebind({own_memory, g});
            }),
            "down: rebind says nothing of memory.weight, which is the caller's"));
  CHECK(has(refused([](auto& ctx, double* w, double* g, double* b) {
              linear<double, up_with_bias> layer(
                  ctx, "up", {.memory = {.weight = w, .gradient = g, .bias = own_memory, .bias_gradient = own_memory}});
              layer.rebind({w, g, b, b});
            }),
            "up: rebind gives memory.bias, which is the layer's own"));
  CHECK(has(on_two_ranks([](const context<cpu>& ctx) {
              std::vector<bf16> w(width), v(w);
              std::vector<float> g(width);
              rms_norm<bf16, rows> norm(ctx, 1e-5, "norm",
                                        {.weight = w.data(), .gradient = g.data(), .master = own_memory});
              norm.weight()->value()[0] = 1;
              norm.rebind({.weight = v.data(), .gradient = g.data(), .master = own_memory});
            }),
            "norm: rebind moves the rounded weights of norm.weight, whose masters are in memory of the layer's own"));
}

TEST_CASE("attention and an MLP on the caller's memory") {
  CHECK(
      on_two_ranks([](const context<cpu>& ctx) {
        attention_options how;
        how.qkv_bias = true;
        how.qk_norm_epsilon = 1e-5;
        how.sinks = true;
        self_attention<double, tensor_strategy> plain(ctx, "attention", how);
        swiglu_mlp<double, tensor_strategy> plain_mlp(ctx, "mlp");
        begin(ctx, plain), begin(ctx, plain_mlp);
        struct pair {
          explicit pair(std::int64_t n) : values(static_cast<std::size_t>(n)), gradients(values) {}
          std::vector<double> values, gradients;
        };
        const std::int64_t heads_here = 2, kv_here = 1, head = 2;
        pair qkv((heads_here + 2 * kv_here) * head * width), bias((heads_here + 2 * kv_here) * head),
            out(width * heads_here * head), q(head), k(head), sinks(heads_here), gate_up(2 * wide / 2 * width),
            down_(width * wide / 2);
        // Weights and biases of q, k and v take turns in visit's order.
        std::size_t w = 0, b = 0;
        plain.visit([&](auto& p) {
          const std::string& name = p.name();
          std::vector<double>& to = name.find("o_proj") != std::string::npos   ? out.values
                                    : name.find("q_norm") != std::string::npos ? q.values
                                    : name.find("k_norm") != std::string::npos ? k.values
                                    : name.find("sinks") != std::string::npos  ? sinks.values
                                    : name.find(".bias") != std::string::npos  ? bias.values
                                                                               : qkv.values;
          std::size_t none = 0;
          std::size_t& begin_at = &to == &qkv.values ? w : &to == &bias.values ? b : none;
          for (std::int64_t e = 0; e < p.used_size(); ++e) to[begin_at++] = p.used_value()[e];
        });
        std::size_t m = 0;
        plain_mlp.visit([&](auto& p) {
          const bool is_down = p.name().find("down_proj") != std::string::npos;
          std::size_t none = 0, &begin_at = is_down ? none : m;
          for (std::int64_t e = 0; e < p.used_size(); ++e)
            (is_down ? down_ : gate_up).values[begin_at++] = p.used_value()[e];
        });
        const std::size_t bytes = ctx.device.bytes_in_use();
        const attention_memory<double> memory{
            {qkv.values.data(), qkv.gradients.data(), bias.values.data(), bias.gradients.data()},
            {out.values.data(), out.gradients.data()},
            {q.values.data(), q.gradients.data()},
            {k.values.data(), k.gradients.data()},
            {sinks.values.data(), sinks.gradients.data()}};
        self_attention<double, tensor_strategy> mine(ctx, "attention", how, memory);
        swiglu_mlp<double, tensor_strategy> mlp(
            ctx, "mlp", {}, false, {}, 0,
            {{gate_up.values.data(), gate_up.gradients.data()}, {down_.values.data(), down_.gradients.data()}});
        if (ctx.device.bytes_in_use() != bytes) fail("bytes that nobody asked for");
        if (pass(ctx, mine) != pass(ctx, plain) || pass(ctx, mlp) != pass(ctx, plain_mlp))
          fail("differs on the caller's memory");
        if (qkv.gradients[0] == 0 || down_.gradients[0] == 0 || sinks.gradients[0] == 0)
          fail("gradients are somewhere else");
        pair moved(static_cast<std::int64_t>(out.values.size()));
        moved.values = out.values;
        attention_memory<double> other = memory;
        other.out = {moved.values.data(), moved.gradients.data()};
        mine.rebind(other);
        if (pass(ctx, mine) != pass(ctx, plain)) fail("differs on other memory");
        if (moved.gradients[0] == 0) fail("rebind has moved nothing");
        try {
          self_attention<double, tensor_strategy>(ctx, "attention", how, {.qkv = memory.qkv});
          fail("part of the memory is enough");
        } catch (const error& e) {
          if (!has(e.what(), "attention: memory gives qkv and says nothing of out")) throw;
        }
        try {
          how.sinks = false;
          self_attention<double, tensor_strategy>(ctx, "attention", how, memory);
          fail("memory of a part that is not there is taken");
        } catch (const error& e) {
          if (!has(e.what(), "attention: memory.sinks is of sinks, and this layer has none (attention_options::sinks)"))
            throw;
        }
        try {
          swiglu_mlp<double, tensor_strategy>(ctx, "mlp", {}, false, {}, 0,
                                              {{gate_up.values.data(), gate_up.gradients.data()}, {}});
          fail("part of the memory is enough");
        } catch (const error& e) {
          if (!has(e.what(), "mlp: memory gives gate_up and says nothing of down")) throw;
        }
      }) == "");
}

}  // namespace plait::test::small_layers
