// Code of README.md and the guide, compiled and run: tests/headers/snippets.py finds their lines here and in other
// tests.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <utility>
#include <vector>

#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/saver.hpp"
#include "plait/comm/threads.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/attention/chosen.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/parameter/free.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/parallel/units.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/verified.hpp"
#include "plait/tensor/tensor.hpp"
#include "support/temp_folder.hpp"

namespace pl = plait;
using pl::batch, pl::dp, pl::ffn, pl::hidden, pl::seq, pl::tp;

struct megatron_sp {  // tensor and sequence parallelism, all of it
  using mesh = pl::mesh<pl::axis<dp>, pl::axis<tp>>;
  using residual = pl::spec<pl::shard<batch, dp>, pl::shard<seq, tp>, hidden>;
  using query_heads = pl::shard<pl::heads, tp>;
  using key_heads = pl::shard<pl::kv_heads, tp>;
  using feed_forward = pl::shard<pl::ffn, tp>;
  using vocabulary = pl::shard<pl::vocab, tp>;
};

struct up_projection {
  using mesh = pl::mesh<pl::axis<dp>, pl::axis<tp>>;
  using input = pl::spec<pl::shard<batch, dp>, pl::shard<seq, tp>, hidden>;
  using weight = pl::spec<pl::shard<ffn, tp>, hidden>;
  using output = pl::spec<pl::shard<batch, dp>, seq, pl::shard<ffn, tp>>;
};

using long_context = pl::context_parallel<pl::megatron_sp, pl::ring<pl::cp>, pl::zigzag>;
static_assert(pl::verify<pl::interleaved<2>, pl::pipeline_ranks<4>, pl::microbatches<16>>());

struct chunked_sp : pl::megatron_sp {
  using overlap = pl::overlap<4>;
};
static_assert(pl::transformer_specs<chunked_sp>::down::overlap::chunks == 4);

struct row : pl::axis_tag<"row"> {};
struct rows_and_heads {
  using mesh = pl::mesh<pl::axis<row>, pl::axis<pl::tp>>;
  using residual = pl::spec<pl::shard<pl::batch, row>, pl::shard<pl::seq, pl::tp>, pl::hidden>;
  using query_heads = pl::shard<pl::heads, pl::tp>;
  using key_heads = pl::shard<pl::kv_heads, pl::tp>;
  using feed_forward = pl::shard<pl::ffn, pl::tp>;
  using vocabulary = pl::shard<pl::vocab, pl::tp>;
};
using model = pl::llama<float, rows_and_heads>;
static_assert(sizeof(model) > 0);

namespace {

void on_ranks(const pl::mesh_shape& shape, auto&& body) {
  pl::threads::run(static_cast<int>(shape.size()), [&](pl::threads::communicator ranks) {
    pl::world world(shape, ranks);
    pl::cpu device;
    pl::context<pl::cpu> context{device, world, {}, 1};
    context.sizes.set(pl::dim_of<batch>, 4);
    context.sizes.set(pl::dim_of<seq>, 8);
    context.sizes.set(pl::dim_of<hidden>, 16);
    context.sizes.set(pl::dim_of<ffn>, 24);
    body(world, context);
  });
}

}  // namespace

TEST_CASE("a program's own allocator, other pointers, other lengths") {
  std::size_t seen = 0;
  const auto my_allocate = [&](std::size_t bytes) {
    seen += bytes;
    return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  };
  const auto my_release = [&](void* at, std::size_t bytes) {
    seen -= bytes;
    std::free(at);
  };
  using rows = up_projection::input;
  {
    pl::cpu device({.memory = {my_allocate, my_release}});  // which then sees every byte
    pl::threads::run(1, [&](pl::threads::communicator ranks) {
      pl::world world(up_projection::mesh(1, 1).shape(), ranks);
      const pl::context<pl::cpu> context{device, world, pl::sizes_of<batch, seq, hidden, ffn>(2, 4, 8, 16), 1};
      const pl::context<pl::cpu> longer{device, world, pl::sizes_of<batch, seq, hidden, ffn>(2, 8, 8, 16), 1};
      std::vector<float> w(16 * 8, 1.0f), dw(w), w2(16 * 8, 2.0f), dw2(w2), output(2 * 8 * 16);
      const std::vector<float> input(2 * 8 * 8, 0.5f);
      float *const other_weights = w2.data(), *const other_gradients = dw2.data();
      const float* const my_input = input.data();
      pl::linear<float, up_projection> up(context, "up", {.memory = {w.data(), dw.data()}});
      pl::tensor<float, up_projection::output> out(longer, output.data());
      up.rebind({other_weights, other_gradients});  // other pointers, of which nothing is copied
      up.resize(longer);                            // a context of the same world, with other batches or lengths
      up.forward(longer, pl::view<rows>(longer, my_input), out);  // typed views, also of memory that is const
      if (output[0] != 8 || output.back() != 8) pl::fail("not the other weights, or not the longer text");
      if (seen != device.reserved_bytes()) pl::fail("bytes that the allocator does not see");
    });
  }
  CHECK(seen == 0);
}

TEST_CASE("the model of the first page") {
  const pl::mesh_shape shape = megatron_sp::mesh(2, 2).shape();
  pl::llama_config config;
  config.layers = 1;
  pl::threads::run(4, [&](pl::threads::communicator ranks) {
    pl::world world(shape, ranks);
    pl::cpu device;
    pl::context<pl::cpu> context{device, world, pl::llama_sizes<megatron_sp>(config, shape, 4, 16), 1};
    pl::llama<float, megatron_sp> model(context, config);  // embedding to loss, any mesh of dp x tp
    std::size_t parameters = 0;
    model.visit([&](auto&) { ++parameters; });
    CHECK(parameters == 12);
  });
}

TEST_CASE("a first strategy, on the layer's own memory and on the caller's") {
  static_assert(pl::axis_like<row>);
  on_ranks(up_projection::mesh(2, 2).shape(), [](pl::world& world, pl::context<pl::cpu>& context) {
    std::vector<float> weights, gradients, input, expected;
    {
      pl::linear<float, up_projection> up(context);
      up.visit([&](auto& p) { p.initialize(context); });
      pl::gather_parameters(context, up);
      pl::zero_gradients(context, up);
      pl::tensor<float, up_projection::input> x(context);
      pl::kernels::fill_normal(context.device, x.data(), x.part(), 1, 1, 0.0, 1.0);
      decltype(up)::saved kept;
      auto y = up.forward(context, x, &kept);  // all-gathers x over tp, then multiplies
      const auto gathers = world.ledger().total("tp", pl::collective::all_gather).calls;
      CHECK(gathers == 1);
      pl::tensor<float, pl::dual_t<up_projection::output>> dy(context);
      pl::kernels::fill(context.device, dy.data(), dy.size(), 1.0f);
      auto dx = up.backward(context, x, kept, dy);  // multiplies, then reduce-scatters over tp
      CHECK(world.ledger().total("tp", pl::collective::reduce_scatter).calls == 1);
      CHECK(world.ledger().total().calls == 2);
      CHECK(dx.size() == x.size());

      pl::adamw<float> optimizer;
      optimizer.begin_step(context, 1e-3);
      optimizer.update(context, up.weight()->reduce(context));
      CHECK(world.ledger().total("dp", pl::collective::all_reduce).calls == 1);
      up.weight()->initialize(context);

      const auto& stored = std::as_const(*up.weight());
      weights.assign(stored.value(), stored.value() + stored.size());
      gradients.resize(weights.size());
      input.assign(x.data(), x.data() + x.size());
      expected.assign(y.data(), y.data() + y.size());
    }
    std::vector<float> output(expected.size());
    float *my_weights = weights.data(), *my_gradients = gradients.data(), *my_activations = input.data();
    float* my_output = output.data();
    pl::linear<float, up_projection> up(context, "up", {.memory = {my_weights, my_gradients}});
    pl::part<float, up_projection::input> x(context, my_activations);  // each array gets its type once
    pl::part<float, up_projection::output> y(context, my_output);
    up.forward(context, x, y);
    CHECK(output == expected);

    pl::cpu& device = context.device;
    using table = pl::spec<pl::position, pl::hidden>;
    using rows = up_projection::input;
    context.sizes.set(pl::dim_of<pl::position>, 3);
    const auto columns = static_cast<std::size_t>(context.sizes.of(pl::dim_of<pl::hidden>));
    std::vector<float> everything(3 * columns, 2.0f), part(3 * columns), dpart(3 * columns);
    float *my_positions = part.data(), *my_dpositions = dpart.data();
    const float* all_positions = everything.data();
    pl::free_parameter<float, table, rows> positions(context, "wpe", {my_positions, my_dpositions});
    pl::take_part(device, *positions.weight(), all_positions, my_positions);
    gather_parameters(context, up, positions);    // before the first pass of a step;
    zero_gradients(context, up, positions);       // then passes, which add to my_gradients and my_dpositions;
    const auto mine = positions.values(context);  // a typed pointer, for your kernel
    my_dpositions[1] += mine.unchecked()[1];
    const auto before = world.ledger().total().calls;
    reduce_all(context, up, positions);  // then these are complete: one that several layers use, once
    CHECK(world.ledger().total().calls > before);
    CHECK(my_dpositions[1] == 2.0f * 4);
  });
}

TEST_CASE("ZeRO in a user's loop") {
  on_ranks(up_projection::mesh(2, 2).shape(), [](pl::world& world, pl::context<pl::cpu>& context) {
    pl::linear<float, up_projection> up(context);
    pl::adamw<float> optimizer;
    pl::parameter_units<float, pl::cpu> units(context, pl::zero_level::optimizer, {});
    units.add(context, 0, [&](auto&& f) { up.visit(f); });  // unit 0, whose optimizer state is cut over dp
    up.visit([&](auto& p) { p.initialize(context); });
    pl::tensor<float, up_projection::input> x(context);
    pl::kernels::fill_normal(context.device, x.data(), x.part(), 1, 1, 0.0, 1.0);
    pl::tensor<float, pl::dual_t<up_projection::output>> dy(context);
    pl::kernels::fill(context.device, dy.data(), dy.size(), 1.0f);
    decltype(up)::saved kept;
    optimizer.begin_step(context, 1e-3);

    units.begin_step(context);      // starts the gathers of what has changed
    units.enter(context, 0, true);  // waits for unit 0's; passes may add to its gradients now
    auto y = up.forward(context, x, &kept);
    auto dx = up.backward(context, x, kept, dy);
    units.reduce(context, 0);  // started: the backward passes of other units go on beside it
    decltype(units)::gradients reduced;
    units.finish_reduction(context, 0, reduced);
    for (auto& gradient : reduced) optimizer.update(context, std::move(gradient));

    CHECK(y.size() > 0);
    CHECK(dx.size() == x.size());
    CHECK(up.weight()->slice().size() < up.weight()->size());
    CHECK(world.ledger().total("dp", pl::collective::reduce_scatter).calls == 1);
    CHECK(world.ledger().total("dp", pl::collective::all_reduce).calls == 0);
  });
}

TEST_CASE("attention alone, on one array with queries, keys and values") {
  on_ranks(pl::mesh<pl::axis<dp>>(1).shape(), [](pl::world&, pl::context<pl::cpu>& context) {
    constexpr std::int64_t samples = 2, length = 5, heads = 3, head_dim = 4, mixed = heads * head_dim;
    std::vector<float> qkv(samples * length * 3 * mixed), dqkv(qkv.size()), y(samples * length * mixed);
    for (std::size_t i = 0; i < qkv.size(); ++i) qkv[i] = std::sin(static_cast<float>(i));
    std::vector<float> dy(y.size(), 1.0f);
    const float *q = qkv.data(), *k = q + mixed, *v = k + mixed, *d_o = dy.data();
    float *dq = dqkv.data(), *dk = dq + mixed, *dv = dk + mixed, *o = y.data();
    const double scale = 0.5;
    pl::kernels::attention_shape shape{.batch = samples, .heads = heads, .kv_heads = heads, .head_dim = head_dim};
    shape.scale = scale, shape.q_stride = shape.k_stride = shape.v_stride = 3 * mixed;  // from token to token
    pl::context_attention<float, pl::whole_sequence> attention(context, shape, pl::sequence_order::original(length));
    decltype(attention)::saved kept;
    attention.forward(context, {q, k, v}, o, &kept);
    attention.backward(context, {q, k, v}, o, d_o, kept, {dq, dk, dv});

    double worst = 0;
    for (std::int64_t b = 0; b < samples; ++b)
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t t = 0; t < length; ++t) {
          const auto at = [&](const float* from, std::int64_t token, std::int64_t i) {
            return static_cast<double>(from[(b * length + token) * 3 * mixed + h * head_dim + i]);
          };
          std::vector<double> sums(head_dim);
          double total = 0;
          for (std::int64_t s = 0; s <= t; ++s) {
            double dot = 0;
            for (std::int64_t i = 0; i < head_dim; ++i) dot += at(q, t, i) * at(k, s, i);
            total += std::exp(dot * scale);
            for (std::int64_t i = 0; i < head_dim; ++i)
              sums[static_cast<std::size_t>(i)] += std::exp(dot * scale) * at(v, s, i);
          }
          for (std::int64_t i = 0; i < head_dim; ++i)
            worst = std::max(worst, std::abs(sums[static_cast<std::size_t>(i)] / total -
                                             static_cast<double>(o[((b * length + t) * heads + h) * head_dim + i])));
        }
    CHECK(worst < 1e-6);
    double values = 0;  // each row of probabilities has the sum 1, so the gradients of values have that of d_o
    for (std::size_t token = 0; token < samples * length; ++token)
      for (std::size_t i = 0; i < mixed; ++i) values += static_cast<double>(dv[token * 3 * mixed + i]);
    CHECK(values == doctest::Approx(static_cast<double>(dy.size())));
  });
}

TEST_CASE("a training state, saved by four ranks and loaded by two") {
  const temp_folder folder;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder / "");
  const auto weights_on = [](pl::mesh_shape shape, std::uint64_t step, std::int64_t samples) {
    std::vector<float> weights;
    on_ranks(shape, [&, samples](pl::world& world, pl::context<pl::cpu>& context) mutable {
      pl::cpu& device = context.device;
      pl::any_communicator& ranks = world.root();
      pl::linear<float, up_projection> model(context, "up");
      pl::adamw<float> optimizer;
      model.visit([&](auto& p) { p.initialize(context); });
      if (step > 0) {
        model.weight()->value()[0] = 1.5f;
        const auto report = [](const pl::finished_save& save) { CHECK(save.failure == ""); };
        pl::checkpoint_saver saver(device, ranks, {.directory = "steps", .keep = {.last = 3}});
        saver.save(context, model, optimizer, step, {.scalars = {{"samples", samples}}});  // copies, and returns
        for (const auto& save : saver.wait(device)) report(save);                          // or finished(), once a step
      } else {
        const auto loaded = pl::load_state(context, ranks, model, optimizer, "steps");  // on any layout
        samples = loaded.scalar<std::int64_t>("samples");
        CHECK(samples == 96);
        CHECK(loaded.step == 7);
      }
      const auto whole = pl::gather_whole(context, *model.weight(), std::as_const(*model.weight()).value());
      if (ranks.rank() == 0) weights = whole;
    });
    return weights;
  };
  const auto saved = weights_on(up_projection::mesh(2, 2).shape(), 7, 96);
  CHECK(saved.at(0) == 1.5f);
  CHECK(weights_on(up_projection::mesh(1, 2).shape(), 0, 0) == saved);
  std::filesystem::current_path(before);
}

TEST_CASE("a pipeline of long sequences") {
  const auto shape =
      pl::mesh<pl::axis<pl::pp>, pl::axis<dp>, pl::axis<pl::cp>, pl::axis<tp>, pl::axis<pl::tp_rep>>(2, 1, 2, 1, 1)
          .shape();
  pl::llama_config config;
  config.layers = 2;
  const double clip = 1.0;
  const pl::schedule plan = pl::make_schedule<pl::one_f_one_b>(2, 2);
  const auto parts = pl::split_layers({{1, 1}, 0, 0}, plan.shape.stages());
  pl::threads::run(4, [&](pl::threads::communicator all_ranks) {
    pl::pipeline_world ranks(shape, all_ranks);  // the mesh of a stage, and the ranks along pp
    pl::cpu device;
    const pl::context<pl::cpu> context{device, ranks.stage(),
                                       pl::llama_sizes<long_context>(config, ranks.stage().shape(), 2, 16), 1};
    const auto make_stage = [&](pl::stage_layers part, pl::llama<float, long_context>* first) {
      return std::make_unique<pl::llama<float, long_context>>(context, config, pl::llama_options{}, part, first);
    };
    pl::adamw<float> optimizer;
    pl::pipeline_options options;
    options.parallel.level = pl::zero_level::optimizer;
    pl::pipeline<pl::llama<float, long_context>> model(context, ranks.along(), plan, parts, make_stage, options);
    pl::training_step step(context, model, optimizer, clip);
    model.visit([&](auto& p) { p.initialize(context); });
    double first = 0, last = 0;
    for (int i = 0; i < 3; ++i) {
      step.load(context, i * 4, [](std::int64_t, auto& ids, auto& labels) {
        for (std::int64_t t = 0; t < ids.size(); ++t) ids.data()[t] = t % 7, labels.data()[t] = (t + 1) % 7;
      });
      optimizer.begin_step(context, 1e-2);
      step.run(context);
      last = step.result(context).loss;
      if (i == 0) first = last;
    }
    CHECK(last < first);
  });
}

TEST_CASE("the policy of data parallelism") {
  const pl::mesh_shape shape = megatron_sp::mesh(2, 1).shape();
  pl::llama_config config;
  config.layers = 2;
  const std::int64_t microbatches = 2;
  const double clip = 1.0;
  const auto losses = [&](bool zero3) {
    std::vector<double> out;
    pl::threads::run(2, [&](pl::threads::communicator ranks) {
      pl::world world(shape, ranks);
      pl::cpu device;
      const pl::context<pl::cpu> context{device, world, pl::llama_sizes<megatron_sp>(config, shape, 4, 16), 1};
      pl::llama<float, megatron_sp> model(context, config);
      model.visit([&](auto& p) { p.initialize(context); });
      pl::adamw<float> optimizer;
      pl::pipeline_options options;  // replicated by default
      if (zero3) {
        options.parallel = {.level = pl::zero_level::parameters, .prefetch = 2};
      }
      pl::training_step step(context, model, optimizer, microbatches, clip, options);
      for (int i = 0; i < 3; ++i) {
        step.load(context, i * 8, [](std::int64_t, auto& ids, auto& labels) {
          for (std::int64_t t = 0; t < ids.size(); ++t) ids.data()[t] = t % 7, labels.data()[t] = (t + 1) % 7;
        });
        optimizer.begin_step(context, 1e-2);
        step.run(context);
        const double loss = step.result(context).loss;
        if (world.rank() == 0) out.push_back(loss);
      }
    });
    return out;
  };
  const std::vector<double> replicated = losses(false), cut = losses(true);
  CHECK(replicated.back() < replicated.front());
  for (std::size_t i = 0; i < cut.size(); ++i) CHECK(cut[i] == doctest::Approx(replicated[i]).epsilon(1e-5));
}
