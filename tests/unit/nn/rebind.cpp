// program: layers
// Layers on a program's own memory that are bound to other pointers, and layers that take other batches and lengths:
// each against a layer that is made anew.
#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/cross_entropy.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/layer/with_saved.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/parameter/free.hpp"

namespace rebind {  // files of one program may have helpers of one name

using namespace plait;

namespace {

using two = plait::mesh<axis<tp>>;
using rows = spec<shard<seq, tp>, hidden>;
struct up {
  using input = rows;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<seq, shard<ffn, tp>>;
  static constexpr bool bias = true;
};
struct down {
  using input = up::output;
  using weight = spec<hidden, shard<ffn, tp>>;
  using output = rows;
};
struct table_policy {
  using input = spec<seq, invariant<tp>>;
  using weight = spec<shard<vocab, tp>, hidden>;
  using output = rows;
};
struct tensor_strategy {
  using mesh = two;
  using residual = spec<batch, shard<seq, tp>, hidden>;
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
};

constexpr std::int64_t width = 4, wide = 6, words = 10;

dim_sizes sizes_for(std::int64_t tokens, std::int64_t samples = 1) {
  return sizes_of<batch, seq, hidden, ffn, vocab, heads, kv_heads, head_dim>(samples, tokens, width, wide, words, 4, 2,
                                                                             2);
}

/// Runs work(ctx) on each of two ranks, with 8 tokens, and returns what was thrown, or nothing.
template <class F>
std::string on_two_ranks(F work) {
  try {
    threads::run(2, [&](threads::communicator c) {
      world w(two{2}.shape(), c);
      cpu device;
      work(context<cpu>{device, w, sizes_for(8), 1});
    });
  } catch (const error& e) {
    return e.what();
  }
  return "";
}
bool says(const std::string& all, const std::string& part) { return all.find(part) != std::string::npos; }

context<cpu> with_sizes(const context<cpu>& ctx, const dim_sizes& sizes) {
  return {ctx.device, ctx.ranks, sizes, ctx.seed};
}

template <class Layer>
void begin(const context<cpu>& ctx, Layer& layer) {
  layer.visit([&](auto& p) { p.initialize(ctx); });
  gather_parameters(ctx, layer);
  zero_gradients(ctx, layer);
}

template <class T>
std::vector<double> numbers(const T* from, std::int64_t count) {
  std::vector<double> all;
  for (std::int64_t i = 0; i < count; ++i) all.push_back(static_cast<double>(from[i]));
  return all;
}

/// The output, the input's gradient and the weights' gradients of a pass with numbers that follow from the sizes.
template <class Layer>
std::vector<double> pass(const context<cpu>& ctx, Layer& layer) {
  using T = typename Layer::value_type;
  tensor<T, typename Layer::input> x(ctx);
  tensor<T, dual_t<typename Layer::output>> dy(ctx);
  for (std::int64_t i = 0; i < x.size(); ++i) x.data()[i] = static_cast<T>(0.1 * static_cast<double>(i % 7) - 0.2);
  for (std::int64_t i = 0; i < dy.size(); ++i) dy.data()[i] = static_cast<T>(0.05 * static_cast<double>(i % 5) - 0.1);
  zero_gradients(ctx, layer);
  typename Layer::saved kept;
  const auto y = layer.forward(ctx, x, &kept);
  const auto dx = layer.backward(ctx, x, kept, dy);
  std::vector<double> all = numbers(y.data(), y.size());
  const std::vector<double> gradient = numbers(dx.data(), dx.size());
  all.insert(all.end(), gradient.begin(), gradient.end());
  layer.visit([&](auto& p) {
    if (!p.trainable()) return;
    const std::vector<double> g = numbers(p.used_gradient(ctx.device), p.used_size());
    all.insert(all.end(), g.begin(), g.end());
  });
  return all;
}

/// Whether a layer that is resized, to more and to less, computes what one does that is made with those sizes. `make`
/// takes a context.
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

TEST_CASE("a layer that is resized computes what one does that is made for those sizes") {
  CHECK(on_two_ranks([](const context<cpu>& ctx) {
          check_resized(ctx, "linear", [](auto& c) { return linear<double, up>(c, "up"); });
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

TEST_CASE("an embedding and a loss that are resized") {
  CHECK(on_two_ranks([](const context<cpu>& ctx) {
          using loss_type = cross_entropy_loss<double, spec<seq, shard<vocab, tp>>, spec<seq, invariant<tp>>>;
          const auto run = [](const context<cpu>& c, auto& table, auto& loss) {
            const auto tokens = static_cast<std::size_t>(c.sizes.of(dim_of<seq>));
            std::vector<std::int64_t> ids(tokens);
            for (std::size_t i = 0; i < tokens; ++i) ids[i] = static_cast<std::int64_t>(3 * i % words);
            std::vector<double> y(tokens / 2 * width), logits(tokens * words / 2, 0.25);
            for (std::size_t i = 0; i < logits.size(); ++i) logits[i] += 0.01 * static_cast<double>(i);
            table.forward(c, ids.data(), y.data());
            zero_gradients(c, table);
            table.backward(c, ids.data(), y.data());
            using seed = loss_seed<typename loss_type::output>;
            y.push_back(loss.forward_backward(c, logits.data(), ids.data(), seed::weighted(c, 1.0)).data()[0]);
            y.insert(y.end(), logits.begin(), logits.end());
            const std::vector<double> g = numbers(table.weight()->used_gradient(c.device), table.weight()->used_size());
            y.insert(y.end(), g.begin(), g.end());
            return y;
          };
          embedding<double, table_policy> table(ctx, words, "table");
          loss_type loss(ctx, words);
          begin(ctx, table);
          run(ctx, table, loss);
          for (const std::int64_t tokens : {16, 4}) {
            const context<cpu> other = with_sizes(ctx, sizes_for(tokens));
            table.resize(other), loss.resize(other);
            embedding<double, table_policy> made(other, words, "table");
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
  CHECK(says(refused([](auto& ctx, auto longer, double* x, double* y, auto*) {
               linear<double, up> layer(ctx, "up");
               begin(ctx, layer);
               layer.forward(longer, x, y);
             }),
             "up.weight: " + other));
  CHECK(says(refused([](auto& ctx, auto longer, double* x, double* y, auto*) {
               linear<double, up> layer(ctx, "up");
               begin(ctx, layer);
               linear<double, up>::saved kept;
               layer.forward(ctx, x, y, &kept);
               layer.backward(longer, x, kept, y, static_cast<double*>(nullptr));
             }),
             "up.weight: " + other));
  CHECK(says(refused([](auto& ctx, auto longer, double* x, double* y, auto*) {
               rms_norm<double, rows> norm(ctx);
               begin(ctx, norm);
               norm.forward(longer, x, y);
             }),
             "norm.weight: " + other));
  CHECK(says(refused([](auto& ctx, auto longer, double* x, double* y, auto*) {
               layer_norm<double, rows> norm(ctx);
               begin(ctx, norm);
               layer_norm<double, rows>::saved kept;
               norm.forward(ctx, x, y, &kept);
               norm.backward(longer, x, kept, y, x);
             }),
             "norm.weight: " + other));
  CHECK(says(refused([](auto& ctx, auto longer, double*, double* y, std::int64_t* ids) {
               embedding<double, table_policy> table(ctx, words, "table");
               begin(ctx, table);
               table.forward(longer, ids, y);
             }),
             "table.weight: " + other));
  CHECK(says(refused([](auto& ctx, auto longer, double*, double* y, std::int64_t* ids) {
               cross_entropy_loss<double, spec<seq, shard<vocab, tp>>, spec<seq, invariant<tp>>> loss(ctx, words);
               loss.forward(longer, y, ids);
             }),
             "cross_entropy: " + other));
  CHECK(refused([](auto& ctx, auto, double* x, double* y, auto*) {  // sizes of dims that the layer does not have
          linear<double, up> layer(ctx, "up");
          begin(ctx, layer);
          context<cpu> more = ctx;
          more.sizes.set(dim_of<vocab>, 2 * words);
          layer.forward(more, x, y);
        }) == "");
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
  CHECK(says(refused([](auto& ctx) { return linear<double, up>(ctx, "up"); }),
             "up.weight: resize changes hidden from 4 to 8, and the weight has this dim"));
  CHECK(says(refused([](auto& ctx) { return rms_norm<double, rows>(ctx); }),
             "norm: resize changes hidden from 4 to 8, and the weight has this dim"));
  CHECK(says(on_two_ranks([](const context<cpu>& ctx) {
               embedding<double, table_policy> table(ctx, words, "table");
               context<cpu> wider = ctx;
               wider.sizes.set(dim_of<hidden>, 2 * width);
               table.resize(wider);
             }),
             "table: resize changes hidden from 4 to 8, and the table has this dim"));
}

TEST_CASE("a layer that keeps what it has saved forgets it when it is resized") {
  CHECK(says(on_two_ranks([](const context<cpu>& ctx) {
               with_saved<rms_norm<double, rows>> norm(ctx);
               begin(ctx, norm);
               const context<cpu> other = with_sizes(ctx, sizes_for(16));
               std::vector<double> x(32, 1.0), y(32), dx(32);
               norm.forward(ctx, x.data(), y.data());
               norm.resize(other);
               norm.backward(other, x.data(), y.data(), dx.data());
             }),
             "norm.weight: backward without what forward keeps"));
}

TEST_CASE("a layer that is bound to other memory reads and adds there") {
  CHECK(on_two_ranks([](const context<cpu>& ctx) {
          struct arrays {
            std::vector<double> w = std::vector<double>(wide / 2 * width), dw = w, b = std::vector<double>(wide / 2),
                                db = b;
            parameter_memory<double> memory() { return {w.data(), dw.data(), b.data(), db.data()}; }
          } first, second;
          for (std::size_t i = 0; i < first.w.size(); ++i) first.w[i] = 0.1 * static_cast<double>(i), second.w[i] = 1;
          second.b[1] = 3;
          linear<double, up> layer(ctx, "up", {.memory = first.memory()});
          const std::size_t bytes = ctx.device.bytes_in_use();
          std::vector<double> x(4 * width, 0.5), y(8 * wide / 2), dx(x);
          linear<double, up>::saved kept;
          layer.forward(ctx, x.data(), y.data(), &kept);
          layer.backward(ctx, x.data(), kept, y.data(), dx.data());
          const std::vector<double> before = first.dw;
          if (before == second.dw) fail("nothing was added");
          kept = {};
          layer.rebind(second.memory());
          layer.forward(ctx, x.data(), y.data(), &kept);
          if (y[0] != 2 || y[1] != 5) fail("the new weights or biases are not read");
          layer.backward(ctx, x.data(), kept, y.data(), dx.data());
          if (first.dw != before) fail("what was left is written");
          if (second.dw[0] == 0 || second.db[1] == 0) fail("the new gradients are not added to");
          kept = {};
          if (ctx.device.bytes_in_use() != bytes) fail("bytes that nobody asked for");

          rms_norm<double, rows> norm(ctx, 1e-5, "norm", first.w.data(), first.dw.data());
          norm.rebind({second.w.data(), second.dw.data()});
          if (norm.weight()->used_value() != second.w.data()) fail("the norm reads what it had");
          std::vector<double> t(words / 2 * width), dt(t), u(t);
          embedding<double, table_policy> table(ctx, words, "table", {.memory = {t.data(), dt.data()}});
          table.rebind({u.data(), dt.data()});
          if (table.weight()->used_value() != u.data()) fail("the embedding reads what it had");
          free_parameter<double, spec<hidden>, rows> scale(ctx, "scale", {first.w.data(), first.dw.data()});
          scale.rebind({second.w.data(), second.dw.data()});
          if (scale.values() != second.w.data() || scale.gradients(ctx.device) != second.dw.data())
            fail("the program's own parameter is where it was");
        }) == "");
}

TEST_CASE("masters that are bound elsewhere are gathered before the weights are used") {
  CHECK(says(on_two_ranks([](const context<cpu>& ctx) {
               std::vector<bf16> w(width), v(w);
               std::vector<float> g(width), m(width, 2.0f), n(width, 3.0f);
               rms_norm<bf16, rows> norm(ctx, 1e-5, "norm",
                                         {.weight = w.data(), .gradient = g.data(), .master = m.data()});
               gather_parameters(ctx, norm);
               norm.rebind({.weight = v.data(), .gradient = g.data(), .master = n.data()});
               if (to_float(v[0]) == 3) fail("written before a gather");
               std::vector<bf16> x(4 * width), y(x);
               try {
                 norm.forward(ctx, x.data(), y.data());
                 fail("a stale weight is read");
               } catch (const error& e) {
                 if (!says(e.what(), "norm.weight is used while it is stale")) throw;
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
  CHECK(says(refused([](auto& ctx, double* w, double* g, double*) {
               linear<double, down> layer(ctx, "down");
               layer.rebind({w, g});
             }),
             "down: rebind gives memory.weight, which is the layer's own and is not replaced"));
  CHECK(says(refused([](auto& ctx, double* w, double* g, double*) {
               linear<double, down> layer(ctx, "down", {.memory = {w, own_memory}});
               layer.rebind({w, g});
             }),
             "down: rebind gives memory.gradient, which is the layer's own"));
  CHECK(says(refused([](auto& ctx, double* w, double* g, double*) {
               linear<double, down> layer(ctx, "down", {.memory = {w, g}});
               layer.rebind({own_memory, g});
             }),
             "down: rebind says nothing of memory.weight, which is the caller's"));
  CHECK(says(refused([](auto& ctx, double* w, double* g, double* b) {
               linear<double, up> layer(
                   ctx, "up",
                   {.memory = {.weight = w, .gradient = g, .bias = own_memory, .bias_gradient = own_memory}});
               layer.rebind({w, g, b, b});
             }),
             "up: rebind gives memory.bias, which is the layer's own"));
  CHECK(says(on_two_ranks([](const context<cpu>& ctx) {
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
  CHECK(on_two_ranks([](const context<cpu>& ctx) {
          attention_options how;
          how.qkv_bias = true;
          how.qk_norm_epsilon = 1e-5;
          self_attention<double, tensor_strategy> plain(ctx, "attention", how);
          swiglu_mlp<double, tensor_strategy> plain_mlp(ctx, "mlp");
          begin(ctx, plain), begin(ctx, plain_mlp);
          struct pair {
            explicit pair(std::int64_t n) : values(static_cast<std::size_t>(n)), gradients(values) {}
            std::vector<double> values, gradients;
          };
          const std::int64_t heads_here = 2, kv_here = 1, head = 2;
          pair qkv((heads_here + 2 * kv_here) * head * width), bias((heads_here + 2 * kv_here) * head),
              out(width * heads_here * head), q(head), k(head), gate_up(2 * wide / 2 * width), down_(width * wide / 2);
          // Weights and biases of q, k and v take turns in visit's order.
          std::size_t w = 0, b = 0;
          plain.visit([&](auto& p) {
            const std::string& name = p.name();
            std::vector<double>& to = name.find("o_proj") != std::string::npos   ? out.values
                                      : name.find("q_norm") != std::string::npos ? q.values
                                      : name.find("k_norm") != std::string::npos ? k.values
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
              {k.values.data(), k.gradients.data()}};
          self_attention<double, tensor_strategy> mine(ctx, "attention", how, memory);
          swiglu_mlp<double, tensor_strategy> mlp(
              ctx, "mlp", {}, false, {}, 0,
              {{gate_up.values.data(), gate_up.gradients.data()}, {down_.values.data(), down_.gradients.data()}});
          if (ctx.device.bytes_in_use() != bytes) fail("bytes that nobody asked for");
          if (pass(ctx, mine) != pass(ctx, plain) || pass(ctx, mlp) != pass(ctx, plain_mlp))
            fail("differs on the caller's memory");
          if (qkv.gradients[0] == 0 || down_.gradients[0] == 0) fail("gradients are somewhere else");
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
            if (!says(e.what(), "attention: memory gives qkv and says nothing of out")) throw;
          }
          try {
            swiglu_mlp<double, tensor_strategy>(ctx, "mlp", {}, false, {}, 0,
                                                {{gate_up.values.data(), gate_up.gradients.data()}, {}});
            fail("part of the memory is enough");
          } catch (const error& e) {
            if (!says(e.what(), "mlp: memory gives gate_up and says nothing of down")) throw;
          }
        }) == "");
}

}  // namespace rebind
