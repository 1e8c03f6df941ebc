// program: layers
// Layers on a program's own memory: required arguments, errors, and no other memory allocated or written. Layers are
// rebound to other pointers. Calls whose output overlaps an input they still read, and tensors of other sizes than a
// layer's, are errors.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/nn/attention.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/loss.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/pointwise.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "plait/tensor/redistribution.hpp"
#include "plait/tensor/tensor.hpp"
#include "support/on_pointers.hpp"
#include "support/small_layers.hpp"
#include "support/texts.hpp"

namespace plait::test::small_layers {

namespace {

using whole_rows = spec<seq, hidden, invariant<tp>>;
struct up_stored_cut : up {
  using stored = spec<ffn, shard<hidden, tp>>;
};
struct whole_table {
  using input = spec<shard<seq, tp>>;
  using weight = spec<vocab, hidden, invariant<tp>>;
  using output = rows;
};

/// Whether a tensor, or an rvalue of one, can be viewed with an equivalent spec.
template <class Tensor>
concept can_be_viewed = requires(Tensor&& t) { std::forward<Tensor>(t).template view_as<spec<seq, hidden>>(); };
static_assert(can_be_viewed<const tensor<float, whole_rows>&>);
static_assert(!can_be_viewed<tensor<float, whole_rows>>);

template <class T>
struct arrays {
  std::vector<T> weight = std::vector<T>(wide * width), gradient = std::vector<T>(wide * width);
};

}  // namespace

TEST_CASE("a caller that gives some of a layer's memory must decide about all of it") {
  const auto refused = [](auto make) {
    return on_ranks(1, [&](const context<cpu>& ctx) {
      std::vector<float> w(wide * width, 1.0f), g(wide * width), b(wide);
      make(ctx, w.data(), g.data(), b.data());
    });
  };
  CHECK(
      has(refused([](auto& ctx, float* w, float*, float*) { linear<float, up>(ctx, "up", {.memory = {.weight = w}}); }),
          "up: memory gives weight but not gradient: give a pointer, or pl::own_memory, and the layer "
          "allocates "
          "it"));
  CHECK(has(refused([](auto& ctx, float* w, float*, float*) {
              linear<float, up>(ctx, "up", {.memory = {w, static_cast<float*>(nullptr)}});
            }),
            "up: memory.gradient is null: allocate it before the layer is made, or say pl::own_memory, and the layer "
            "allocates "
            "it"));
  CHECK(has(refused([](auto& ctx, float* w, float* g, float*) {
              linear<float, up_with_bias>(ctx, "up", {.memory = {w, g}});
            }),
            "up: memory gives weight but not bias:"));
  CHECK(has(refused([](auto& ctx, float* w, float* g, float* b) {
              linear<float, up>(ctx, "up", {.memory = {w, g, b}});
            }),
            "up: memory.bias is given, and this layer has none (it has no bias)"));
  CHECK(has(refused([](auto& ctx, float* w, float* g, float* b) {
              linear<float, up>(ctx, "up", {.memory = {.weight = w, .gradient = g, .master = b}});
            }),
            "up: memory.master is given, and this layer has none (its weight is stored as it is used)"));
  CHECK(has(refused([](auto& ctx, float* w, float*, float*) { rms_norm<float, rows>(ctx, 1e-5, "norm", w, nullptr); }),
            "norm: memory.gradient is null"));
  CHECK(refused([](auto& ctx, float* w, float* g, float*) {
          linear<float, up>(ctx, "up", {.memory = {w, g}});
          linear<float, up>(ctx, "up", {.memory = {w, own_memory}});
          linear<float, up>(ctx, "up", {.memory = {part<float, up::weight>(ctx, w), part<float, up::weight>(ctx, g)}});
          linear<float, up_with_bias>(
              ctx, "up", {.memory = {.weight = w, .gradient = g, .bias = own_memory, .bias_gradient = own_memory}});
        }) == "");
}

TEST_CASE("a typed pointer has the layout of the layer's array, or is refused") {
  const auto refused = [](auto make) {
    return on_ranks(2, [&](const context<cpu>& ctx) {
      std::vector<float> w(2 * wide * width), g(w);
      make(ctx, w.data(), g.data());
    });
  };
  CHECK(has(refused([](auto& ctx, float* w, float* g) {
              linear<float, up>(ctx, "up", {.memory = {part<float, down::weight>(ctx, w), g}});
            }),
            "up: memory.weight is a part <hidden, shard<ffn, tp>>, and this array of the layer lies as "
            "<shard<ffn, tp>, hidden>: dims and their axes must be the same"));
  CHECK(has(refused([](auto& ctx, float* w, float* g) {
              const context<cpu> longer = with_sizes(ctx, sizes_of<seq, hidden, ffn>(tokens, width, 2 * wide));
              linear<float, up>(ctx, "up", {.memory = {w, part<float, up::weight>(longer, g)}});
            }),
            "up: memory.gradient is a part of 24 elements, and this array of the layer has 12: make both for one"));
  CHECK(has(refused([](auto& ctx, float* w, float* g) {
              linear<float, up> layer(ctx, "up", {.memory = {w, g}});
              layer.rebind({w, part<float, spec<ffn, hidden>>(ctx, g)});
            }),
            "up: memory.gradient is a part <ffn, hidden>, and this array"));
  CHECK(has(refused([](auto& ctx, float* w, float* g) {
              swiglu_mlp<float, tensor_strategy>(ctx, "mlp", {}, false, {}, 0,
                                                 {.gate_up = {part<float, up::weight>(ctx, w), g}, .down = {w, g}});
            }),
            "memory.weight is a part, and the layer has several parameters there, one after the other"));
}

TEST_CASE("rounded weights of the caller need masters, and nothing is overwritten") {
  const auto run = [](auto work) { return on_ranks(1, work); };
  CHECK(has(run([](const context<cpu>& ctx) {
              arrays<bf16> own_arrays;
              std::vector<float> gradient(wide * width);
              linear<bf16, up>(ctx, "up", {.memory = {own_arrays.weight.data(), gradient.data()}});
            }),
            "up: memory gives weight but not master"));
  CHECK(run([](const context<cpu>& ctx) {
          std::vector<bf16> weight(wide * width);
          for (std::size_t i = 0; i < weight.size(); ++i) weight[i] = to_bf16(static_cast<float>(i) + 0.5f);
          const std::vector<bf16> before = weight;
          std::vector<float> gradient(wide * width);
          linear<bf16, up> layer(
              ctx, "up", {.memory = {.weight = weight.data(), .gradient = gradient.data(), .master = own_memory}});
          gather_parameters(ctx, layer);  // forward only, so no master is made
          if (ctx.device.bytes_in_use() != 0) fail("bytes that nobody asked for");
          if (std::memcmp(weight.data(), before.data(), sizeof(bf16) * weight.size()) != 0)
            fail("gather has changed the caller's weights");
          const float master = std::as_const(*layer.weight()).value()[3];
          if (master != 3.5f) fail({"a master begins as ", master});
          layer.weight()->value()[3] = 7.0f;
          gather_parameters(ctx, layer);
          if (to_float(weight[3]) != 7.0f || to_float(weight[2]) != 2.5f)
            fail("masters are not rounded into the weights");
        }) == "");
  CHECK(run([](const context<cpu>& ctx) {
          std::vector<bf16> weight(wide * width);
          std::vector<float> gradient(wide * width), master(wide * width, 2.0f);
          linear<bf16, up> layer(
              ctx, "up", {.memory = {.weight = weight.data(), .gradient = gradient.data(), .master = master.data()}});
          gather_parameters(ctx, layer);
          if (to_float(weight[5]) != 2.0f) fail("the caller's masters are not what the weights are rounded from");
          if (ctx.device.bytes_in_use() != 0) fail("bytes that nobody asked for");
        }) == "");
}

TEST_CASE("a weight with a separate stored layout is not overwritten by unset values") {
  const auto use = [](bool fill) {
    return on_ranks(2, [&](const context<cpu>& ctx) {
      std::vector<float> weight(wide / 2 * width, 5.0f), gradient(wide / 2 * width);
      linear<float, up_stored_cut> layer(
          ctx, "up",
          {.memory = {
               .weight = weight.data(), .gradient = gradient.data(), .master = own_memory, .reduced = own_memory}});
      if (fill) layer.weight()->fill_values(ctx, [&](float* v) { std::fill_n(v, layer.weight()->size(), 3.0f); });
      gather_parameters(ctx, layer);
      if (weight[0] != 3.0f) fail("not gathered");
    });
  };
  CHECK(has(use(false),
            "parameter up.weight: gather would overwrite the caller's weights with values that have not been set"));
  CHECK(has(on_ranks(2,
                     [](const context<cpu>& ctx) {
                       std::vector<float> w(wide / 2 * width), g(w), shard(w);
                       linear<float, up_stored_cut>(
                           ctx, "up", {.memory = {.weight = w.data(), .gradient = g.data(), .master = shard.data()}});
                     }),
            "up: memory gives weight but not reduced"));
  CHECK(use(true) == "");
}

TEST_CASE("two parameters with one memory of the caller are refused by both names") {
  struct head {
    using input = whole_rows;
    using weight = spec<vocab, hidden, invariant<tp>>;
    using output = spec<seq, vocab, invariant<tp>>;
  };
  struct whole_lookup {
    using input = spec<seq, invariant<tp>>;
    using weight = spec<vocab, hidden, invariant<tp>>;
    using output = whole_rows;
  };
  // Calls step(ctx, embedding, head) with the head's weight and gradient this many elements after the embedding's.
  const auto failure_of = [](std::size_t weight_at, std::size_t gradient_at, auto step) {
    return on_ranks(2, [&](const context<cpu>& ctx) {
      std::vector<double> weight(2 * words * width), gradient(2 * words * width);
      embedding<double, whole_lookup> table(ctx, words, "table", {.memory = {weight.data(), gradient.data()}});
      linear<double, head> scores(ctx, "head", {.memory = {weight.data() + weight_at, gradient.data() + gradient_at}});
      step(ctx, table, scores);
    });
  };
  const std::size_t distance = words * width;
  const auto zero = [](auto& ctx, auto& table, auto& scores) { zero_gradients(ctx, table, scores); };
  const auto reduce = [](auto& ctx, auto& table, auto& scores) { reduce_all(ctx, table, scores); };
  const auto update = [](auto& ctx, auto& table, auto& scores) {
    adamw<double> optimizer;
    optimizer.begin_step(ctx, 1e-3);
    optimizer.update(ctx, table.weight()->reduce(ctx));
    optimizer.update(ctx, scores.weight()->reduce(ctx));
  };
  const std::string twice =
      " of parameter table.weight, and would be changed twice in a step; let one layer use the parameter of the other "
      "(linear_options::tied), or give each memory of its own";
  const std::string of_values = "the values of parameter head.weight share memory of the caller's with the values",
                    of_gradients = "the gradients of parameter head.weight share memory of the caller's with the ";
  const auto check = [&](auto step) {
    CHECK(has(failure_of(0, 0, step), of_values + twice));
    CHECK(has(failure_of(0, distance, step), of_values + twice));
    CHECK(has(failure_of(distance, 1, step), of_gradients + "gradients" + twice));
    CHECK(failure_of(distance, distance, step) == "");
  };
  check(zero), check(reduce), check(update);
  // A frozen weight does not change, and the shared weight of two layers changes once.
  CHECK(failure_of(0, 0, [](auto& ctx, auto& table, auto& scores) {
          scores.weight()->freeze();
          zero_gradients(ctx, table, scores);
          reduce_all(ctx, table, scores);
        }) == "");
  CHECK(failure_of(distance, distance, [](auto& ctx, auto& table, auto&) {
          linear<double, head> tied(ctx, "tied", {.tied = table.weight()});
          zero_gradients(ctx, table, tied);
          reduce_all(ctx, table, tied);
        }) == "");
  CHECK(has(
      on_ranks(2,
               [](const context<cpu>& ctx) {
                 std::vector<double> memory(words * width);
                 embedding<double, whole_lookup> table(ctx, words, "table", {.memory = {memory.data(), memory.data()}});
                 zero_gradients(ctx, table);
               }),
      "the gradients of parameter table.weight share memory of the caller's with the values" + twice));
}

TEST_CASE("typed tensors on the caller's memory are written in place") {
  CHECK(on_ranks(2, [](const context<cpu>& ctx) {
          linear<double, up> layer(ctx, "up");
          rms_norm<double, rows> norm(ctx, 1e-5, "norm");
          begin(ctx, layer, norm);
          std::vector<double> x(tokens / 2 * width), n(x), y(tokens * wide / 2), dx(x), dn(x);
          for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<double>(i) - 3 * ctx.ranks.rank();
          tensor<double, rows> in(ctx, x.data()), normed(ctx, n.data());
          tensor<double, up::output> out(ctx, y.data());
          rms_norm<double, rows>::saved kept_norm;
          linear<double, up>::saved kept;
          norm.forward(ctx, in, normed, &kept_norm);
          layer.forward(ctx, normed, out, &kept);
          rms_norm<double, rows>::saved kept_norm_2;
          linear<double, up>::saved kept_2;
          const auto normed_2 = norm.forward(ctx, in, &kept_norm_2);
          const auto out_2 = layer.forward(ctx, normed_2, &kept_2);
          for (std::int64_t i = 0; i < out_2.size(); ++i)
            if (out_2.data()[i] != y[static_cast<std::size_t>(i)]) fail("the output differs");
          tensor<double, dual_t<up::output>> dy(ctx);
          std::fill_n(dy.data(), dy.size(), 0.5);
          tensor<double, dual_t<rows>> dnormed(ctx, dn.data()), din(ctx, dx.data());
          layer.backward(ctx, normed, kept, dy, dnormed);
          norm.backward(ctx, in, kept_norm, dnormed, din);
          const auto dnormed_2 = layer.backward(ctx, normed_2, kept_2, dy);
          const auto din_2 = norm.backward(ctx, in, kept_norm_2, dnormed_2);
          for (std::int64_t i = 0; i < din_2.size(); ++i)
            if (din_2.data()[i] != dx[static_cast<std::size_t>(i)]) fail("the gradient differs");
        }) == "");
}

TEST_CASE("views of read-only memory") {
  static_assert(!std::is_convertible_v<const tensor<double, rows>&, part<double, rows>>);
  static_assert(std::is_convertible_v<const tensor<double, rows>&, part<const double, rows>>);
  CHECK(on_ranks(2, [](const context<cpu>& ctx) {
          linear<double, up> layer(ctx, "up");
          rms_norm<double, rows> norm(ctx, 1e-5, "norm");
          begin(ctx, layer, norm);
          std::vector<double> numbers(tokens / 2 * width), n(numbers), y(tokens * wide / 2), dx(numbers);
          for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<double>(i % 5) - 2;
          const std::vector<double> x = numbers;
          auto normed = view<rows>(ctx, n.data());
          auto out = view<up::output>(ctx, y.data());
          auto din = view<dual_t<rows>>(ctx, dx.data());
          static_assert(std::is_same_v<decltype(normed), tensor<double, rows>>);
          linear<double, up>::saved kept, kept_of_pointers;
          rms_norm<double, rows>::saved kept_norm;
          norm.forward(ctx, view<rows>(ctx, x.data()), normed, &kept_norm);
          const std::vector<double> read = n;
          layer.forward(ctx, view<rows>(ctx, read.data()), out, &kept);
          std::vector<double> expected(y), dexpected(dx);
          forward_on(layer, ctx, n.data(), expected.data(), &kept_of_pointers);
          if (y != expected) fail("the output differs");
          const std::vector<double> dy(y);
          layer.backward(ctx, view<rows>(ctx, read.data()), kept, view<dual_t<up::output>>(ctx, dy.data()), din);
          backward_on(layer, ctx, n.data(), kept_of_pointers, dy.data(), dexpected.data());
          if (dx != dexpected) fail("the gradient differs");
        }) == "");
}

TEST_CASE("tokens and labels of 32 bits, and a loss on pointers") {
  CHECK(has(on_ranks(2,
                     [](const context<cpu>& ctx) {
                       embedding<double, whole_table> table(ctx, 10, "table");
                       using logits_spec = spec<shard<seq, tp>, vocab>;
                       cross_entropy_loss<double, logits_spec, whole_table::input> loss(ctx, 10);
                       table.visit([&](auto& p) { p.initialize(ctx); });
                       gather_parameters(ctx, table);
                       std::vector<std::int32_t> narrow(tokens / 2);
                       std::vector<std::int64_t> ids(tokens / 2);
                       for (std::size_t i = 0; i < ids.size(); ++i)
                         ids[i] = narrow[i] = static_cast<std::int32_t>(3 * i % 10);
                       std::vector<double> y(tokens / 2 * width), y_narrow(y), logits(tokens / 2 * 10, 0.25),
                           gradient[2];
                       forward_on(table, ctx, ids.data(), y.data());
                       forward_on(table, ctx, narrow.data(), y_narrow.data());
                       if (y != y_narrow) fail("the rows of narrow tokens differ");
                       double losses[2];
                       const auto pass = [&](std::size_t k, auto* given) {
                         decltype(loss)::saved kept;
                         std::vector<double>& l = gradient[k] = logits;
                         for (std::size_t i = 0; i < l.size(); ++i) l[i] += 0.01 * static_cast<double>(i);
                         const part<double, logits_spec> all(ctx, l.data());
                         const auto labels = test::typed<whole_table::input>(ctx, given);
                         losses[k] = loss.forward(ctx, all, labels, &kept).data()[0];
                         loss.backward(ctx, all, labels, kept, loss_seed<decltype(loss)::output>::weighted(ctx, 1.0));
                         table.weight()->discard_gradient(ctx);
                         backward_on(table, ctx, given, y.data());
                         l.insert(l.end(), table.weight()->used_gradient(ctx.device),
                                  table.weight()->used_gradient(ctx.device) + table.weight()->used_size());
                       };
                       pass(0, ids.data()), pass(1, narrow.data());
                       if (losses[0] != losses[1] || gradient[0] != gradient[1] || losses[0] <= 0)
                         fail("narrow labels differ");
                       decltype(loss)::saved nothing;
                       loss.backward(ctx, part<double, logits_spec>(ctx, logits.data()),
                                     part<const std::int64_t, whole_table::input>(ctx, ids.data()), nothing,
                                     loss_seed<decltype(loss)::output>::weighted(ctx, 1.0));
                     }),
            "cross_entropy: backward without what forward keeps"));
}

TEST_CASE("a parameter of the program is summed over the rows of all ranks") {
  CHECK(on_ranks(2, [](const context<cpu>& ctx) {
          std::vector<double> scale(width, 2.0), dscale(width);
          free_parameter<double, spec<hidden>, rows> own_scale(ctx, "scale", {scale.data(), dscale.data()});
          free_parameter<double, spec<hidden>, whole_rows> of_whole_rows(ctx, "other");
          of_whole_rows.visit([&](auto& p) { p.initialize(ctx); });
          gather_parameters(ctx, own_scale, of_whole_rows);
          zero_gradients(ctx, own_scale, of_whole_rows);
          static_assert(std::is_same_v<decltype(own_scale)::used, spec<hidden, replicate<tp>>>);
          const auto values = own_scale.values(ctx);
          const auto gradients = own_scale.gradients(ctx);
          const auto other = of_whole_rows.gradients(ctx);
          for (std::int64_t c = 0; c < own_scale.size(); ++c) {
            gradients.unchecked()[c] += values.unchecked()[c] * static_cast<double>(1 + ctx.ranks.rank());
            other.unchecked()[c] += 1;
          }
          reduce_all(ctx, own_scale, of_whole_rows, own_scale);  // named twice, reduced once
          if (dscale[1] != 2.0 * (1 + 2)) fail("the gradient is not summed over the ranks of the rows");
          if (of_whole_rows.weight()->gradient()[0] != 1) fail("what all ranks compute alike is summed");
        }) == "");
  CHECK(has(on_ranks(9, [](const context<cpu>& ctx) { free_parameter<double, spec<hidden>, rows>(ctx, "scale"); }),
            "scale: its partner: a dim has fewer elements than there are ranks that shard it: seq is 8, sharded over "
            "tp=9 = "
            "9 ranks; it must be at least 9"));
}

TEST_CASE("ranks compare a gradient of the program with the spec of its parameter's use") {
  const auto trained = []<class Met>(Met, bool alike) {
    return on_ranks(2, [&](const context<cpu>& ctx) {
      free_parameter<double, spec<ffn, hidden>, Met> table(ctx, "table");
      table.visit([&](auto& p) { p.initialize(ctx); });
      for (int step = 0; step < 2; ++step) {
        gather_parameters(ctx, table);
        zero_gradients(ctx, table);
        for (std::int64_t i = 0; i < table.size(); ++i)
          table.gradients(ctx).unchecked()[i] += static_cast<double>(i + (alike ? 1 : 1 + ctx.ranks.rank()));
        reduce_all(ctx, table);
      }
    });
  };
  CHECK(trained(rows{}, false) == "");
  CHECK(trained(whole_rows{}, true) == "");
  CHECK(has(trained(whole_rows{}, false),
            "ranks along tp differ in the gradient of table (which meets <seq, hidden, invariant<tp>>), which the type "
            "calls equal"));
  CHECK(has(trained(rows{}, true),
            "the gradient of table (which meets <shard<seq, tp>, hidden>) is partial over tp, so that its 2 ranks hold "
            "terms of a sum, and all of them hold the same values"));
}

TEST_CASE("one rank's part of a whole array is taken and put back") {
  CHECK(on_ranks(2, [](const context<cpu>& ctx) {
          std::vector<double> whole(wide * width), back(wide * width, -1.0), part(wide * width / 2);
          for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<double>(i);
          for (const box& mine :
               {part_of<spec<shard<ffn, tp>, hidden>>(ctx), part_of<spec<ffn, shard<hidden, tp>>>(ctx)}) {
            take_part(ctx.device, mine, whole.data(), part.data());
            const auto first = static_cast<double>(mine.offset[0] * width + mine.offset[1]);
            if (part[0] != first || part[1] != first + 1) fail("another part");
            put_part(ctx.device, mine, part.data(), back.data());
            std::int64_t written = 0;
            for (std::size_t i = 0; i < back.size(); ++i)
              if (back[i] != -1.0 && (++written, back[i] != whole[i])) fail("back at another place");
            if (written < mine.local_size()) fail("not all of it is back");
          }
          const plait::part<double, spec<ffn, shard<hidden, tp>>> columns(ctx, part.data());
          std::fill(part.begin(), part.end(), 0.0);
          take_part(ctx.device, whole, columns);
          if (part[0] != static_cast<double>(columns.where().offset[1])) fail("a typed pointer takes another part");
          std::fill(back.begin(), back.end(), -1.0);
          put_part(ctx.device, columns, back);
          const auto first = static_cast<std::size_t>(columns.where().offset[1]);
          if (back[first] != whole[first] || back[(first + width / 2) % width] != -1.0) fail("typed: another place");
        }) == "");
}

TEST_CASE("a layer rebound to other memory reads and adds there") {
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

TEST_CASE("rebound masters are gathered before the weights are used") {
  CHECK(has(on_two_ranks([](const context<cpu>& ctx) {
              std::vector<bf16> w(width), v(w);
              std::vector<float> g(width), m(width, 2.0f), n(width, 3.0f);
              rms_norm<bf16, rows> norm(ctx, 1e-5, "norm",
                                        {.weight = w.data(), .gradient = g.data(), .master = m.data()});
              gather_parameters(ctx, norm);
              norm.rebind({.weight = v.data(), .gradient = g.data(), .master = n.data()});
              if (to_float(v[0]) == 3) fail("written before a gather");
              std::vector<bf16> x(4 * width), y(x);
              const auto used = text_thrown_by([&] { forward_on(norm, ctx, x.data(), y.data()); });
              if (!has(used, "norm.weight is used while it is stale")) fail("a stale weight is read: " + used);
              gather_parameters(ctx, norm);
              if (to_float(v[0]) != 3 || to_float(w[0]) != 2) fail("the masters are not rounded into the new weights");
              fail("done");
            }),
            "done"));
}

TEST_CASE("memory that the layer owns cannot be replaced") {
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
            "down: rebind does not give memory.weight, which is the caller's"));
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
  CHECK(on_two_ranks([](const context<cpu>& ctx) {
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
          // visit's order alternates weights and biases of q, k and v.
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
          const auto refused = [](const char* text, auto&& make) {
            if (const std::string found = text_thrown_by(make); !has(found, text)) fail("not refused: " + found);
          };
          refused("attention: memory gives qkv but not out",
                  [&] { self_attention<double, tensor_strategy>(ctx, "attention", how, {.qkv = memory.qkv}); });
          how.sinks = false;
          refused("attention: memory.sinks is of sinks, and this layer has none (attention_options::sinks)",
                  [&] { self_attention<double, tensor_strategy>(ctx, "attention", how, memory); });
          refused("mlp: memory gives gate_up but not down", [&] {
            swiglu_mlp<double, tensor_strategy>(ctx, "mlp", {}, false, {}, 0,
                                                {{gate_up.values.data(), gate_up.gradients.data()}, {}});
          });
        }) == "");
}

namespace {

/// The error of work(context, layer, saved, x, y, d) on one rank; each array has twice the room that a layer needs.
template <class Layer, class Work>
std::string refused_by(Work work) {
  return on_ranks(1, [&](const context<cpu>& ctx) {
    std::vector<double> x(2 * tokens * wide, 1.0), y(x), d(x);
    Layer layer = [&] {
      if constexpr (std::is_constructible_v<Layer, const context<cpu>&, double, std::string>)
        return Layer(ctx, 1e-5, "norm");
      else
        return Layer(ctx, "up");
    }();
    begin(ctx, layer);
    typename Layer::saved kept;
    work(ctx, layer, kept, x.data(), y.data(), d.data());
  });
}
using up_linear = linear<double, up>;
using rms = rms_norm<double, rows>;

}  // namespace

TEST_CASE("a call whose output overlaps an input that it still reads is refused") {
  CHECK(has(refused_by<up_linear>([](auto& ctx, auto& layer, auto& kept, double* x, auto*, auto*) {
              forward_on(layer, ctx, x, x, &kept);
            }),
            "up.weight: forward writes y while it still reads x, and both are one array"));
  CHECK(has(refused_by<up_linear>([](auto& ctx, auto& layer, auto& kept, double* x, double* y, auto*) {
              forward_on(layer, ctx, x, y, &kept, y);
            }),
            "up.weight: forward writes y while it still reads addend"));
  CHECK(has(refused_by<up_linear>([](auto& ctx, auto& layer, auto& kept, double* x, double* y, auto*) {
              forward_on(layer, ctx, x, y, &kept);
              backward_on(layer, ctx, x, kept, y, x);
            }),
            "up.weight: backward writes dx while it still reads x"));
  CHECK(has(refused_by<rms>([](auto& ctx, auto& norm, auto& kept, double* x, double* dx, double* dy) {
              backward_on(norm, ctx, x, kept, dy, dx);
            }),
            "norm.weight: backward without what forward keeps"));
  CHECK(has(refused_by<rms>([](auto& ctx, auto& norm, auto& kept, double* x, double* y, double* dy) {
              forward_on(norm, ctx, x, y, &kept);
              backward_on(norm, ctx, x, kept, dy, dy);
            }),
            "norm.weight: backward writes dx while it still reads dy"));
  CHECK(
      has(refused_by<layer_norm<double, rows>>([](auto& ctx, auto& norm, auto& kept, double* x, double* y, double* dy) {
            forward_on(norm, ctx, x, y, &kept);
            backward_on(norm, ctx, x, kept, dy, x);
          }),
          "norm.weight: backward writes dx while it still reads x"));
}

TEST_CASE("tensors of other sizes than the layer's are refused") {
  const auto longer_than = [](const context<cpu>& ctx) {
    context<cpu> longer = ctx;
    longer.sizes.set(dim_of<seq>, 2 * tokens);
    return longer;
  };
  // A layer's input is too long: in a context with the input's length or with the layer's.
  const auto refused = [&](auto make, bool in_its_context = false) {
    return on_ranks(1, [&](const context<cpu>& ctx) {
      auto layer = make(ctx);
      begin(ctx, layer);
      const context<cpu> longer = longer_than(ctx);
      const tensor<double, typename decltype(layer)::input> x(longer);
      layer.forward(in_its_context ? longer : ctx, x);
    });
  };
  const std::string other = ": x has 64 elements on this rank, and the layer was made for 32";
  CHECK(has(refused([](auto& ctx) { return up_linear(ctx, "up"); }, true), "up.weight" + other));
  CHECK(has(refused([](auto& ctx) { return rms(ctx, 1e-5, "norm"); }, true), "norm.weight" + other));
  // A layer without its own sizes uses those of the context.
  CHECK(has(refused([](auto&) { return activation<double, gelu, rows>(); }), "activation" + other));
  CHECK(has(refused([](auto& ctx) { return redistribution<double, rows, spec<seq, hidden, replicate<tp>>>(ctx); }),
            "redistribution" + other));
  CHECK(has(refused([](auto& ctx) { return swiglu_mlp<double, tensor_strategy>(ctx, "mlp"); }),
            "mlp.gate_proj.weight" + other));
  CHECK(has(refused([](auto& ctx) { return self_attention<double, tensor_strategy>(ctx, "attention"); }),
            "attention.q_proj.weight" + other));
  CHECK(has(on_ranks(2,
                     [&](const context<cpu>& ctx) {
                       const tensor<double, rows> x(ctx);
                       redistribute<spec<seq, hidden, replicate<tp>>>(longer_than(ctx), x);
                     }),
            "redistribute: in has 16 elements, and in this context there are 32"));
}

TEST_CASE("overlapping arrays are refused at any offset") {
  const auto refused = [](auto work) {
    return on_ranks(1, [&](const context<cpu>& ctx) {
      std::vector<double> all(4 * tokens * wide, 1.0);
      linear<double, up> layer(ctx, "up", {.memory = {all.data() + 3 * tokens * wide, own_memory}});
      gather_parameters(ctx, layer);
      zero_gradients(ctx, layer);
      linear<double, up>::saved kept;
      work(ctx, layer, kept, all.data());
    });
  };
  constexpr std::int64_t in = tokens * width, out = tokens * wide;
  CHECK(
      has(refused([](auto& ctx, auto& layer, auto& kept, double* p) { forward_on(layer, ctx, p, p + in - 2, &kept); }),
          "up.weight: forward writes y while it still reads x, and they share 16 bytes"));
  CHECK(
      has(refused([](auto& ctx, auto& layer, auto& kept, double* p) { forward_on(layer, ctx, p + out - 1, p, &kept); }),
          "up.weight: forward writes y while it still reads x, and they share 8 bytes"));
  CHECK(has(
      refused([](auto& ctx, auto& layer, auto& kept, double* p) { forward_on(layer, ctx, p, p + 3 * out - 1, &kept); }),
      "up.weight: forward writes y while it still reads the weight, and they share 192 bytes"));
  CHECK(has(refused([](auto& ctx, auto& layer, auto& kept, double* p) {
              forward_on(layer, ctx, p, p + in, &kept);
              backward_on(layer, ctx, p, kept, p + in, p + in + out - 3);
            }),
            "up.weight: backward writes dx while it still reads dy, and they share 24 bytes"));
  CHECK(refused([](auto& ctx, auto& layer, auto& kept, double* p) {  // one after the other in memory
          forward_on(layer, ctx, p, p + in, &kept);
          backward_on(layer, ctx, p, kept, p + in, p + in + out);
        }) == "");
  CHECK(has(refused_by<rms>([](auto& ctx, auto& norm, auto& kept, double* x, double* y, auto*) {
              forward_on(norm, ctx, x, y, &kept);
              backward_on(norm, ctx, x, kept, y, y + in - 1);
            }),
            "norm.weight: backward writes dx while it still reads dy, and they share 8 bytes"));
}

}  // namespace plait::test::small_layers
