// program: training_step
// What types call equal on ranks is compared over them: one value of one rank that is another is found and named, and
// nothing is found where all is right (every other test of ranks runs with the checks of a first step).
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/saver.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategies.hpp"
#include "plait/train/optim/adamw.hpp"
#include "plait/train/train_step.hpp"
#include "support/layer_check.hpp"
#include "support/memory_file_system.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace checked_runs {
namespace {

using small_mesh = plait::mesh<axis<dp>, axis<tp>>;
struct two_axes {
  using mesh = small_mesh;
  using residual = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
};
using model_type = llama<float, two_axes>;

/// One rank's program, in which a fault may change something.
struct run {
  world& ranks;
  context<cpu> ctx;
  model_type model;
  adamw<float> optimizer;
  pipeline_options options{};
  double clip = 1, rate = 1e-2;
  std::int64_t microbatches = 2, first_sample = 0;
  int steps = 3;
  std::function<void(std::int64_t, host_tokens&, host_tokens&)> change_tokens = [](auto...) {};
  std::function<void(int step)> before_run = [](int) {};

  parameter<float, cpu>& named(const std::string& name) {
    parameter<float, cpu>* found = nullptr;
    model.visit([&](auto& p) {
      if (p.name().find(name) != std::string::npos && !found) found = &p;
    });
    if (!found) fail("no parameter " + name);
    return *found;
  }
  void train() {
    training_step step(ctx, model, optimizer, microbatches, clip, options);
    for (int i = 0; i < steps; ++i) {
      step.load(ctx, first_sample + i * 8, [&](std::int64_t m, host_tokens& ids, host_tokens& labels) {
        for (std::int64_t k = 0; k < ids.size(); ++k)
          labels.data()[k] = ((ids.data()[k] = (k + m + 3 * ids.sample(0)) % 13) + 1) % 13;
        change_tokens(m, ids, labels);
      });
      before_run(i);
      optimizer.begin_step(ctx, rate);
      step.run(ctx);
      step.result(ctx);
    }
  }
};

const llama_config small{.vocab = 13, .hidden = 16, .layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 4, .ffn = 24};

struct setting {
  small_mesh mesh{2, 2};
  std::uint64_t seed = 1;
  std::int64_t length = 8;
  adamw_options adamw{};
};

/// What is said where `fault` changes the program of rank 3 of dp 2 x tp 2, `before` what it is made from; "" if
/// nothing is.
template <class Before, class Fault>
std::string told(Before&& before, Fault&& fault) {
  try {
    threads::run(4, [&](threads::communicator c) {
      const bool odd = c.rank() == 3;
      setting s;
      if (odd) before(s);
      world ranks(s.mesh.shape(), c);
      cpu device;
      const context<cpu> ctx{device, ranks, llama_sizes<two_axes>(small, s.mesh.shape(), 4, s.length), s.seed};
      run r{ranks, ctx, model_type(ctx, small), adamw<float>(s.adamw)};
      r.model.visit([&](auto& p) { p.initialize(ctx); });
      fault(r, odd);
      r.train();
    });
  } catch (const error& e) {
    return e.what();
  }
  return {};
}
const auto nothing = [](auto&&...) {};

}  // namespace

TEST_CASE("what contexts and steps are made from is the same on all ranks") {
  CHECK(told(nothing, nothing) == "");
  CHECK(has(told([](setting& s) { s.seed = 2; }, nothing),
            "context: rank 3 runs with seed 2, ranks 0 to 2 with seed 1; every rank needs the same values"));
  CHECK(has(told(
                [](setting& s) {
                  s.mesh = small_mesh{4, 1};
                },
                nothing),
            "context: rank 3 runs with mesh dp=4,tp=1, ranks 0 to 2 with mesh dp=2,tp=2; "));
  CHECK(has(told([](setting& s) { s.length = 16; }, nothing), "context: rank 3 runs with seq 16, ranks 0 to 2 with"));
  CHECK(has(told([](setting& s) { s.adamw.weight_decay = 0.2; }, nothing),
            "adamw::begin_step: rank 3 runs with weight_decay 0.2, ranks 0 to 2 with weight_decay 0.1"));
  CHECK(has(told(nothing, [](run& r, bool odd) { r.rate = odd ? 0.0100000001 : 0.01; }),
            "adamw::begin_step: rank 3 runs with learning_rate 0.0100000001, ranks 0 to 2 with learning_rate 0.01;"));
  CHECK(has(told(nothing, [](run& r, bool odd) { r.clip = odd ? 2 : 1; }), "training step: rank 3 runs with clip 2"));
  CHECK(has(told(nothing, [](run& r, bool odd) { r.microbatches = odd ? 1 : 2; }), "rank 3 runs with microbatches 1"));
  CHECK(has(told(nothing, [](run& r, bool odd) { r.first_sample = odd ? 8 : 0; }),
            "training_step::load: rank 3 runs with first_sample 8"));
}

TEST_CASE("tokens are the same along axes that do not shard them") {
  CHECK(
      has(told(nothing,
               [](run& r, bool odd) {
                 r.change_tokens = [odd](std::int64_t m, auto& ids, auto&) {
                   if (odd && m == 1) ids.data()[3] = 5;
                 };
               }),
          "checked values: ranks along tp differ in the ids of microbatch 1, which the type calls equal: rank 3 (dp=1, "
          "tp=1) differs from rank 2 by "));
  CHECK(has(told(nothing,
                 [](run& r, bool odd) {
                   r.change_tokens = [odd](std::int64_t, auto&, auto& labels) {
                     if (odd) labels.data()[3] = -100;
                   };
                 }),
            "ranks along tp differ in the labels of microbatch 0, which"));
}

TEST_CASE("one element of a parameter or a gradient of one rank, at each level of ZeRO") {
  for (const auto level : {zero_level::replicated, zero_level::optimizer, zero_level::parameters}) {
    CAPTURE(static_cast<int>(level));
    const auto parameter_of = [&](const char* name, std::int64_t element) {
      return told(nothing, [&](run& r, bool odd) {
        r.options.parallel.level = level;
        if (odd) r.named(name).value()[element] += 1e-3f;
      });
    };
    CHECK(has(parameter_of("norm", 1), "norm.weight, which the type calls equal"));
    if (level == zero_level::replicated) {  // elsewhere each element lives on one data rank
      CHECK(has(parameter_of("q_proj", 2),
                "ranks along dp differ in the values of model.layers.0.self_attn.q_proj.weight, which"));
      CHECK(has(parameter_of("embed", 0), "ranks along dp differ in the values of model.embed_tokens.weight, which"));
      CHECK(has(parameter_of("down_proj", 5), "down_proj.weight, which the type calls equal: rank "));
    }
  }
  // After the first step, and where a load or every n-th step asks for it.
  const auto later = [](value_check how, bool armed) {
    return told(nothing, [&](run& r, bool odd) {
      r.ranks.checks().set(how);
      r.before_run = [&r, odd, armed](int step) {
        if (step == 1 && armed) r.ranks.checks().arm();
        if (step == 1 && odd) r.named("down_proj").value()[0] += 1e-3f;
      };
    });
  };
  CHECK(later(value_check::first, false) == "");
  CHECK(later(value_check::off, false) == "");
  CHECK(has(later(value_check::always, false), "the values of model.layers.0.mlp.down_proj.weight"));
  CHECK(has(later(value_check::every(1), false), "by "));
  CHECK(later(value_check::every(4), false) == "");
  CHECK(later(value_check::always.within(0.1), false) == "");
  CHECK(has(later(value_check::first, true), "the values of model.layers.0.mlp.down_proj.weight"));
}

namespace {

using rows = spec<shard<batch, dp>, hidden, invariant<tp>>;
using wide = spec<shard<batch, dp>, shard<ffn, tp>>;
struct up {
  using input = rows;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = wide;
};
struct down {
  using input = wide;
  using weight = spec<hidden, shard<ffn, tp>>;
  using output = rows;
  static constexpr bool bias = true;
};
using replicated_rows = spec<shard<batch, dp>, hidden, replicate<tp>>;
struct replicated_down : down {
  using output = replicated_rows;
};

/// What a program with a loop and an optimizer of its own is told: `fault` changes values of rank 3 at a place.
template <class Down>
std::string told_by_loop(const std::function<void(const std::string&, float*)>& fault, const char* save = nullptr) {
  memory_file_system disk;
  try {
    threads::run(4, [&](threads::communicator c) {
      world ranks(small_mesh{2, 2}.shape(), c);
      cpu device;
      const context<cpu> ctx{device, ranks, sizes_of<batch, hidden, ffn>(8, 16, 32), 3};
      const auto place = [&](const std::string& name, const float* values) {
        if (c.rank() == 3) fault(name, const_cast<float*>(values));
      };
      linear<float, up> first(ctx, "up");
      rms_norm<float, rows> norm(ctx, 1e-5, "norm");
      linear<float, Down> second(ctx, "down");
      adamw<float> optimizer;
      each_parameter([&](auto& p) { p.initialize(ctx); }, norm, first, second);
      for (int step = 0; step < 2; ++step) {
        gather_parameters(ctx, norm, first, second);
        zero_gradients(ctx, norm, first, second);
        tensor<float, rows> x(ctx);
        kernels::fill_normal(device, x.data(), x.part(), 7, 1, 0.0, 1.0);
        if (step == 0) place("x", x.data());
        typename decltype(norm)::saved kept_norm;
        typename decltype(first)::saved kept_first;
        typename decltype(second)::saved kept_second;
        const auto n = norm.forward(ctx, x, &kept_norm);
        if (step == 0) place("n", n.data());
        const auto h = first.forward(ctx, n, &kept_first);
        const auto y = second.forward(ctx, h, &kept_second);
        tensor<float, dual_t<typename Down::output>> dy(ctx);
        for (std::int64_t i = 0; i < y.size(); ++i) dy.data()[i] = y.data()[i] / 8;
        if (step == 0) place("dy", dy.data());
        const auto dh = second.backward(ctx, h, kept_second, dy);
        auto dn = first.backward(ctx, n, kept_first, dh);
        if (step == 0) place("dn", dn.data());
        norm.backward(ctx, x, kept_norm, dn);
        optimizer.begin_step(ctx, 1e-2);
        each_parameter(
            [&](auto& p) {
              auto reduced = p.reduce(ctx);
              if (step == 0) place("gradient of " + p.name(), reduced.data());
              optimizer.update(ctx, std::move(reduced));
            },
            norm, first, second);
      }
      if (!save) return;
      any_communicator all(c);
      checkpoint_saver saver(device, all, {.directory = "steps"}, disk);
      saver.save(ctx, 1, {.scalars = {{save, std::int64_t{c.rank() == 3}}}});
    });
  } catch (const error& e) {
    return e.what();
  }
  return {};
}
std::string told_by_loop_at(const std::string& where) {
  return told_by_loop<down>([&](const std::string& name, float* values) {
    if (name == where) values[2] *= 1.001f;
  });
}

}  // namespace

TEST_CASE("one element at each boundary of a loop of one's own") {
  CHECK(told_by_loop<down>(nothing) == "");
  const auto says = [](const std::string& what) {
    return "ranks along tp differ in " + what +
           ", which the type calls equal: rank 3 (dp=1, tp=1) differs from rank 2 by";
  };
  CHECK(has(told_by_loop_at("x"), says("the input of norm")));
  CHECK(has(told_by_loop_at("n"), says("the input of up")));
  CHECK(has(told_by_loop_at("dy"), says("the gradient of the output of down")));
  CHECK(has(told_by_loop_at("dn"), says("the gradient of the output of norm")));
  CHECK(has(told_by_loop_at("gradient of up.weight"),
            "ranks along dp differ in the reduced gradient of up.weight, which"));
  CHECK(has(told_by_loop_at("gradient of down.bias"), "differ in the reduced gradient of down.bias, which"));
  CHECK(has(told_by_loop_at("gradient of norm.weight"), "differ in the reduced gradient of norm.weight, which"));
  CHECK(
      has(told_by_loop<replicated_down>(nothing),
          "the gradient of the output of down is partial over tp, so that its 2 ranks hold terms of a sum, and all of "
          "them hold the same values, which the sum would count 2 times; a value whose gradient is equal on all ranks "
          "is invariant<tp>, and not replicate<tp>"));
  CHECK(has(told_by_loop<down>(nothing, "position"),
            "checkpoint: step 1 is not saved: rank 3 runs with position 1, ranks 0 to 2 with position 0"));
}

TEST_CASE("a tensor is compared by hand, and by how much it differs") {
  const auto told_by_hand = [](float change, double tolerance) -> std::string {
    try {
      threads::run(4, [&](threads::communicator c) {
        world ranks(small_mesh{2, 2}.shape(), c);
        cpu device;
        const context<cpu> ctx{device, ranks, sizes_of<batch, hidden, ffn>(64, 64, 32), 3};
        tensor<float, rows> x(ctx);
        kernels::fill_normal(device, x.data(), x.part(), 7, 1, 0.0, 1.0);
        if (c.rank() == 0)
          for (std::int64_t i = 0; i < x.size(); ++i) x.data()[i] *= 1 + (i % 2 ? change : -change);
        ranks.checks().set(value_check::off);
        require_equal(ctx, x, "the state", tolerance);
        tensor<float, wide> h(ctx);
        kernels::fill(device, h.data(), h.size(), static_cast<float>(ranks.coordinate(axis_of<tp>)));
        require_equal(ctx, h);  // nothing of its type is equal along tp, and dp shards it too
      });
    } catch (const error_of_all& e) {
      return e.what();
    } catch (const error& e) {
      return e.what();
    }
    return {};
  };
  CHECK(told_by_hand(0, 0) == "");
  CHECK(has(told_by_hand(0.5f, 0),
            "checked values: ranks along tp differ in the state, which the type calls equal: rank 1 (dp=0, tp=1) "
            "differs from rank 0 by "));
  const std::string rounding = told_by_hand(1e-6f, 0);
  CHECK(has(rounding, "e-0"));
  CHECK(has(rounding, "value_check::within(x) tolerates what unlike processors round"));
  CHECK(told_by_hand(1e-6f, 1e-5) == "");
  CHECK(told_by_hand(1e-2f, 1e-5) != "");
  CHECK_THROWS_WITH_AS(static_cast<void>(value_check::every(0)),
                       "value_check::every(0): legal is 1 or more; value_check::off compares nothing", error);
  CHECK_THROWS_AS(static_cast<void>(value_check::always.within(1)), error);
}

}  // namespace checked_runs
