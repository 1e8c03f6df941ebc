// program: training_step
// Values that types declare equal on ranks are compared over the ranks. The checks find and name one different value on
// one rank, at each kind of place. They find nothing without a fault: all other tests of ranks run with the checks of a
// first step.
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/saver.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "plait/parallel/optim/muon.hpp"
#include "plait/parallel/train_step.hpp"
#include "support/layer_check.hpp"
#include "support/memory_file_system.hpp"
#include "support/on_mesh.hpp"
#include "support/split_strategy.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace checked_runs {
namespace {

using small_mesh = split::mesh;
using model_type = llama<float, split>;

/// One rank's program, in which a fault may change a value.
struct run {
  world& ranks;
  context<cpu> ctx;
  model_type model;
  adamw<float> optimizer;
  pipeline_options options{};
  double clip = 1, rate = 1e-2;
  std::int64_t microbatches = 2, first_sample = 0;
  int steps = 3;
  std::function<void(std::int64_t, host_tokens&, host_tokens&, host_starts&)> change_tokens = [](auto&&...) {};
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
      step.load(ctx, first_sample + i * 8, [&](std::int64_t m, host_tokens& ids, host_tokens& labels, host_starts& s) {
        for (std::int64_t k = 0; k < ids.size(); ++k)
          labels.data()[k] = ((ids.data()[k] = (k + m + 3 * ids.sample(0)) % 13) + 1) % 13;
        change_tokens(m, ids, labels, s);
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
  deterministic_leaves deterministic{};
};

/// The text of the error if `fault` changes the program of rank 3 of dp 2 x tp 2, and `before` its settings; "" without
/// an error.
template <class Before, class Fault>
std::string error_of_model(Before&& before, Fault&& fault) {
  return text_thrown_by([&] {
    threads::run(4, [&](threads::communicator c) {
      const bool odd = c.rank() == 3;
      setting s;
      if (odd) before(s);
      world ranks(s.mesh.shape(), c);
      cpu device;
      const context<cpu> ctx{device, ranks, llama_sizes<split>(small, s.mesh.shape(), 4, s.length), s.seed,
                             s.deterministic};
      run r{ranks, ctx, model_type(ctx, small), adamw<float>(s.adamw)};
      r.model.visit([&](auto& p) { p.initialize(ctx); });
      fault(r, odd);
      r.train();
    });
  });
}
const auto nothing = [](auto&&...) {};

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
struct replicated_down : down {
  using output = spec<shard<batch, dp>, hidden, replicate<tp>>;
};

/// Flips one bit of the third float, or of the fifth number in bf16.
void flip(const void* values) {
  auto* const byte = static_cast<std::byte*>(const_cast<void*>(values)) + 8;
  *byte ^= std::byte{0x40};
}

/// The fault of rank 3 in a program with its own loop and optimizer.
struct loop_fault {
  std::string place{};                               ///< flips a bit of the values at this place
  std::uint64_t later_step = 0, later_position = 0;  ///< changes the saved numbers
};

template <class Down = down, class Optimizer = adamw<float>, class Options = adamw_options>
std::string error_of_loop(const loop_fault& fault, const Options& options = {}) {
  memory_file_system disk;
  return text_thrown_by([&] {
    on_mesh(small_mesh{2, 2}, sizes_of<batch, hidden, ffn>(8, 16, 32), 3, [&](const context<cpu>& ctx) {
      ctx.ranks.checks().set(value_check::always);
      const bool odd = ctx.ranks.rank() == 3;
      int step = 0;
      const auto place = [&](const std::string& name, const void* values) {
        if (odd && name + cat({" of step ", step}) == fault.place) flip(values);
      };
      rms_norm<float, rows> norm(ctx, 1e-5, "norm");
      linear<float, up> first(ctx, "up");
      linear<float, Down> second(ctx, "down");
      rms_norm<float, typename Down::output> last(ctx, 1e-5, "last");
      Optimizer optimizer(options);
      const auto each = [&](auto&& f) { each_parameter(f, norm, first, second, last); };
      each([&](auto& p) { p.initialize(ctx); });
      for (; step < 3; ++step) {  // the values of a step are compared when the next step starts
        each([&](auto& p) { p.gather(ctx), place("gathered " + p.name(), p.used_value()), p.zero_gradient(ctx); });
        tensor<float, rows> x(ctx);
        kernels::fill_normal(ctx.device, x.data(), x.part(), 7, 1, 0.0, 1.0);
        place("x", x.data());
        typename decltype(norm)::saved kept_norm;
        typename decltype(first)::saved kept_first;
        typename decltype(second)::saved kept_second;
        typename decltype(last)::saved kept_last;
        const auto n = norm.forward(ctx, x, &kept_norm);
        place("n", n.data());
        const auto h = first.forward(ctx, n, &kept_first);
        const auto y = second.forward(ctx, h, &kept_second);
        place("y", y.data());
        const auto z = last.forward(ctx, y, &kept_last);
        tensor<float, dual_t<typename Down::output>> dz(ctx);
        for (std::int64_t i = 0; i < z.size(); ++i) dz.data()[i] = z.data()[i] * x.data()[i] / 8;
        place("dz", dz.data());
        const auto dy = last.backward(ctx, y, kept_last, dz);
        place("dy", dy.data());
        const auto dh = second.backward(ctx, h, kept_second, dy);
        const auto dn = first.backward(ctx, n, kept_first, dh);
        place("dn", dn.data());
        norm.backward(ctx, x, kept_norm, dn);
        optimizer.begin_step(ctx, 1e-2);
        each([&](auto& p) {
          auto reduced = p.reduce(ctx);
          place("gradient " + p.name(), reduced.data());
          place("stored " + p.name(), std::as_const(p).value());
          optimizer.visit_state(ctx, p, [&](const optimizer_tensor& t) { place("state " + p.name(), t.values); });
          optimizer.update(ctx, std::move(reduced));
          place("updated " + p.name(), std::as_const(p).value());
        });
      }
      checkpoint_saver saver(ctx.device, ctx.ranks.root(), {.directory = "steps"}, disk);
      const std::uint64_t later = odd ? fault.later_step : 0;
      const auto position = static_cast<std::int64_t>(odd ? fault.later_position : 0);
      saver.save(ctx, 1 + later, {.scalars = {{"position", position}}});
    });
  });
}

/// The error of a model's step after all ranks save and load a state, and rank 3 then changes something.
template <class Change>
std::string error_after_load(Change&& change) {
  memory_file_system disk;
  return error_of_model(nothing, [&](run& r, bool odd) {
    r.before_run = [&r, &disk, &change, odd](int step) {
      if (step != 1) return;
      checkpoint_saver saver(r.ctx.device, r.ranks.root(), {.directory = "steps"}, disk);
      saver.save(r.ctx, r.model, r.optimizer, 1);
      saver.wait(r.ctx.device);
      load_state(r.ctx, r.ranks.root(), r.model, r.optimizer, "steps", {}, disk);
      if (odd) change(r);
    };
  });
}

/// The error of a model's step in which rank 3 changes tokens of microbatch 1.
template <class Change>
std::string error_of_tokens(Change&& change) {
  return error_of_model(nothing, [&](run& r, bool odd) {
    r.change_tokens = [&change, odd](std::int64_t m, auto& ids, auto& labels, auto& starts) {
      if (odd && m == 1) change(ids, labels, starts);
    };
  });
}

}  // namespace

TEST_CASE("one different value on one rank, at each kind of place") {
  CHECK(error_of_model(nothing, nothing) == "");
  CHECK(error_of_loop({}) == "");
  CHECK(error_of_loop<down, muon<float>>({}, muon_options{}) == "");
  CHECK(error_after_load([](run&) {}) == "");
  const auto set = [](auto change) { return error_of_model(change, nothing); };
  const auto differ = [](const std::string& axis, const std::string& what) {
    return cat({"checked values: ranks along ", axis, " differ in ", what,
                ", which the type calls equal: rank 3 (dp=1, tp=1) differs from rank ", axis == "tp" ? 2 : 1, " by "});
  };
  const struct {
    std::string place, error_of, named;
  } faults[] = {
      // Settings of contexts, steps and optimizers.
      {"seed", set([](setting& s) { s.seed = 2; }),
       "context: rank 3 runs with seed 2, ranks 0 to 2 with seed 1; every rank needs the same values"},
      {"size of a dim", set([](setting& s) { s.length = 16; }), "context: rank 3 runs with seq 16, ranks 0 to 2 with"},
      {"mesh", set([](setting& s) {
         s.mesh = small_mesh{4, 1};
       }),
       "context: rank 3 runs with mesh dp=4,tp=1, ranks 0 to 2 with mesh dp=2,tp=2; "},
      {"deterministic", set([](setting& s) { s.deterministic = deterministic<4>{}; }),
       "context: rank 3 runs with deterministic 4,4,1,0, ranks 0 to 2 with deterministic 0,0,0,0"},
      {"learning rate", error_of_model(nothing, [](run& r, bool odd) { r.rate = odd ? 0.0100000001 : 0.01; }),
       "adamw::begin_step: rank 3 runs with learning_rate 0.0100000001, ranks 0 to 2 with learning_rate 0.01;"},
      {"weight decay", set([](setting& s) { s.adamw.weight_decay = 0.2; }),
       "adamw::begin_step: rank 3 runs with weight_decay 0.2, ranks 0 to 2 with weight_decay 0.1"},
      {"first beta", set([](setting& s) { s.adamw.beta1 = 0.8; }), "rank 3 runs with beta1 0.8, ranks 0 to 2 with"},
      {"second beta", set([](setting& s) { s.adamw.beta2 = 0.9; }), "rank 3 runs with beta2 0.9, ranks 0 to 2 with"},
      {"epsilon", set([](setting& s) { s.adamw.epsilon = 1e-9; }), "rank 3 runs with epsilon 1e-09, ranks 0 to 2"},
      {"form of moments", set([](setting& s) { s.adamw.moments = moment_type::bf16; }),
       "rank 3 runs with moments bf16"},
      {"clip limit", error_of_model(nothing, [](run& r, bool odd) { r.clip = odd ? 2 : 1; }),
       "training step: rank 3 runs with clip 2"},
      {"microbatches", error_of_model(nothing, [](run& r, bool odd) { r.microbatches = odd ? 1 : 2; }),
       "rank 3 runs with microbatches 1"},
      {"first sample", error_of_model(nothing, [](run& r, bool odd) { r.first_sample = odd ? 8 : 0; }),
       "training_step::load: rank 3 runs with first_sample 8"},
      // Tokens, along an axis that does not shard them.
      {"token", error_of_tokens([](auto& ids, auto&, auto&) { ids.data()[3] = 5; }),
       differ("tp", "the ids of microbatch 1")},
      {"label", error_of_tokens([](auto&, auto& labels, auto&) { labels.data()[3] = -100; }),
       differ("tp", "the labels of microbatch 1")},
      {"document start", error_of_tokens([](auto&, auto&, auto& starts) { starts.data()[3] = 3; }),
       differ("tp", "the document starts of microbatch 1")},
      // Inputs of layers.
      {"input of a layer", error_of_loop({"x of step 0"}), differ("tp", "the input of norm")},
      {"invariant activation", error_of_loop({"n of step 0"}), differ("tp", "the input of up")},
      {"replicated activation", error_of_loop<replicated_down>({"y of step 0"}), differ("tp", "the input of last")},
      {"gradient of the loss", error_of_loop({"dz of step 0"}), differ("tp", "the gradient of the output of last")},
      {"gradient of an output", error_of_loop({"dn of step 0"}), differ("tp", "the gradient of the output of norm")},
      {"gradient before a reduction", error_of_loop({"dy of step 0"}),
       differ("tp", "the gradient of the output of down")},
      // Parameters and their gradients.
      {"initial value",
       error_of_model(nothing,
                      [](run& r, bool odd) {
                        if (odd) flip(r.named("norm").value());
                      }),
       "norm.weight, which the type calls equal: rank 3"},
      {"values that rank 0 alone has",
       error_of_model(nothing,
                      [](run& r, bool) {
                        if (r.ranks.rank() == 0)
                          r.model.visit([&](auto& p) { kernels::fill(r.ctx.device, p.value(), p.size(), 0.1); });
                      }),
       "ranks along dp differ in the values of model.embed_tokens.weight, which the type calls equal: rank "},
      {"loaded value", error_after_load([](run& r) { flip(r.named("down_proj").value()); }),
       differ("dp", "the values of model.layers.0.mlp.down_proj.weight")},
      {"gathered value", error_of_loop({"gathered up.weight of step 0"}), differ("dp", "the values of up.weight")},
      {"updated value", error_of_loop({"updated up.weight of step 0"}), differ("dp", "the values of up.weight")},
      {"stored value", error_of_loop({"stored up.weight of step 0"}), differ("dp", "the stored values of up.weight")},
      {"reduced gradient", error_of_loop({"gradient up.weight of step 0"}),
       differ("dp", "the reduced gradient of up.weight")},
      {"reduced gradient of a bias", error_of_loop({"gradient down.bias of step 0"}),
       "differ in the reduced gradient of down.bias, which"},
      {"reduced gradient of a norm", error_of_loop({"gradient norm.weight of step 0"}),
       "differ in the reduced gradient of norm.weight, which"},
      // State of optimizers.
      {"moment", error_of_loop({"state up.weight of step 1"}), differ("dp", "the moments of up.weight")},
      {"moment in bf16", error_of_loop({"state up.weight of step 1"}, adamw_options{.moments = moment_type::bf16}),
       differ("dp", "the moments of up.weight")},
      {"momentum", error_of_loop<down, muon<float>>({"state up.weight of step 1"}, muon_options{}),
       differ("dp", "the momentum of up.weight")},
      {"loaded moment", error_after_load([](run& r) {
         r.optimizer.visit_state(r.ctx, r.named("down_proj"), [](const optimizer_tensor& t) { flip(t.values); });
       }),
       differ("dp", "the moments of model.layers.0.mlp.down_proj.weight")},
      // Saved values.
      {"scalar of a save", error_of_loop({.later_position = 1}),
       "checkpoint: step 1 is not saved: rank 3 runs with position 1, ranks 0 to 2 with position 0"},
      {"step of a save", error_of_loop({.later_step = 1}),
       "checkpoint: nothing is saved: ranks are at different steps: rank 0 1, rank 1 1, rank 2 1, rank 3 2"},
  };
  for (const auto& fault : faults) {
    CAPTURE(fault.place);
    CAPTURE(fault.error_of);
    CHECK(has(fault.error_of, fault.named));
  }
  // Terms of a sum differ between ranks.
  CHECK(
      has(error_of_loop<replicated_down>({}),
          "the gradient of the output of last is partial over tp, so that its 2 ranks hold terms of a sum, and all of "
          "them hold the same values, which the sum would count 2 times; a value whose gradient is equal on all ranks "
          "is invariant<tp>, and not replicate<tp>"));
}

TEST_CASE("one different element of a parameter or a gradient on one rank, at each level of ZeRO") {
  for (const auto level : {zero_level::replicated, zero_level::optimizer, zero_level::parameters}) {
    CAPTURE(static_cast<int>(level));
    const auto parameter_of = [&](const char* name, std::int64_t element) {
      return error_of_model(nothing, [&](run& r, bool odd) {
        r.options.parallel.level = level;
        if (odd) r.named(name).value()[element] += 1e-3f;
      });
    };
    CHECK(has(parameter_of("norm", 1), "norm.weight, which the type calls equal"));
    if (level == zero_level::replicated) {  // at other levels only one data rank has each element
      CHECK(has(parameter_of("q_proj", 2),
                "ranks along dp differ in the values of model.layers.0.self_attn.q_proj.weight, which"));
      CHECK(has(parameter_of("embed", 0), "ranks along dp differ in the values of model.embed_tokens.weight, which"));
      CHECK(has(parameter_of("down_proj", 5), "down_proj.weight, which the type calls equal: rank "));
    }
  }
  // After the first step: on request after a load, or in every n-th step.
  const auto later = [](value_check how, bool armed) {
    return error_of_model(nothing, [&](run& r, bool odd) {
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

TEST_CASE("a program compares a tensor itself, with a tolerance") {
  const auto told_by_hand = [](float change, double tolerance) -> std::string {
    try {
      on_mesh(small_mesh{2, 2}, sizes_of<batch, hidden, ffn>(64, 64, 32), 3, [&](const context<cpu>& ctx) {
        tensor<float, rows> x(ctx);
        kernels::fill_normal(ctx.device, x.data(), x.part(), 7, 1, 0.0, 1.0);
        if (ctx.ranks.rank() == 0)
          for (std::int64_t i = 0; i < x.size(); ++i) x.data()[i] *= 1 + (i % 2 ? change : -change);
        ctx.ranks.checks().set(value_check::off);
        require_equal(ctx, x, "the state", tolerance);
        tensor<float, wide> h(ctx);
        kernels::fill(ctx.device, h.data(), h.size(), static_cast<float>(ctx.ranks.coordinate(axis_of<tp>)));
        require_equal(ctx, h);  // along tp no part of its type is equal, and dp shards it too
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
