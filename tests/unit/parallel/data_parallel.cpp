// program: data_parallel
// Policies of data parallelism: the bytes that a step sends, the memory of a rank, and the errors.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "plait/parallel/optim/chosen_optimizer.hpp"
#include "support/llama_parity.hpp"
#include "support/on_mesh.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// Traffic and memory of one of `ranks` data ranks in the second of two steps.
struct measured {
  double gathered = 0, scattered = 0, reduced = 0;  ///< bytes that the rank sends
  double between = 0;                               ///< bytes held between steps
  double peak = 0, predicted_peak = 0;
  double elements = 0;  ///< of its buckets, with padding
};

/// Elements of all parameters in buckets: arrays at multiples of 128, and each unit in `ranks` such pieces.
double padded(small_llama& model, std::int64_t ranks) {
  std::int64_t all = 0;
  const auto rounded = [](std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; };
  for (int u = 0; u < model.units(); ++u) {
    std::int64_t unit = 0;
    std::vector<const void*> seen;
    model.visit_unit(u, [&](auto& p) {
      if (std::find(seen.begin(), seen.end(), p.array().get()) != seen.end()) return;
      seen.push_back(p.array().get());
      unit += rounded(p.array()->size(), 128);
    });
    all += rounded(unit, 128 * ranks);
  }
  return static_cast<double>(all);
}

pipeline_options at_level(zero_level level) { return {.parallel = {.level = level}}; }

/// The text of the error of work(ctx) on data ranks, or "".
template <class Work>
std::string error_on_ranks(int ranks, const scenario& s, const Work& work) {
  return text_thrown_by([&] { on_llama_mesh(ranks, 1, s, 1, work); });
}

measured measure(const scenario& s, int ranks, const pipeline_options& how) {
  measured found;
  on_llama_mesh(ranks, 1, s, 1, [&](const context<cpu>& ctx) {
    small_llama model(ctx, s.config);
    adamw<double> optimizer;
    training_step step(ctx, model, optimizer, s.microbatches, 1.0, how);
    model.visit([&](auto& p) { p.initialize(ctx); });
    for (int i = 0; i < 2; ++i) {
      ctx.ranks.ledger().clear();
      ctx.device.reset_peak();
      run_step(ctx, step, optimizer, s, i, 1e-3);
      static_cast<void>(step.result(ctx));
      step.model().wait_for_transfers();
    }
    if (ctx.ranks.rank() != ranks - 1) return;
    const auto sent = [&](collective kind) {
      return static_cast<double>(ctx.ranks.ledger().total("dp", kind).wire) / ranks;
    };
    found.gathered = sent(collective::all_gather);
    found.scattered = sent(collective::reduce_scatter);
    found.reduced = sent(collective::all_reduce);
    found.between = static_cast<double>(ctx.device.bytes_in_use());
    found.peak = static_cast<double>(ctx.device.peak_bytes());
    found.elements = padded(model, how.parallel.level == zero_level::replicated ? 1 : ranks);

    world counted = world::counting(ctx.ranks.shape(), ctx.ranks.rank());
    counting_device counts;
    const context<counting_device> there{counts, counted, ctx.sizes, 1};
    llama<double, megatron_sp, counting_device> same(there, s.config);
    pipeline<llama<double, megatron_sp, counting_device>> whole(there, same, static_cast<int>(s.microbatches), how);
    found.predicted_peak = static_cast<double>(dry_run_step(there, whole).peak_bytes);
  });
  return found;
}

bool near(double a, double b, double tolerance) { return std::abs(a - b) <= tolerance * std::abs(b); }

}  // namespace

TEST_CASE("a step sends the bytes of the formula, for any number of microbatches") {
  scenario s = deep();
  s.config.layers = 3;
  for (const int ranks : {2, 4})
    for (const std::int64_t microbatches : {1, 2, 4})
      for (const zero_level level : all_levels) {
        CAPTURE(ranks);
        CAPTURE(microbatches);
        CAPTURE(static_cast<int>(level));
        s.microbatches = microbatches;
        pipeline_options how = at_level(level);
        const measured m = measure(s, ranks, how);
        const double once = m.elements * 8 * (ranks - 1) / ranks;  // a gather or a reduce-scatter of all elements
        // In addition to gradients, a step reduces the norm and numbers of the loss.
        const double numbers = 200;
        if (level == zero_level::replicated) {
          CHECK(m.gathered == 0);
          CHECK(m.scattered == 0);
          CHECK(m.reduced >= 2 * once);
          CHECK(m.reduced <= 2 * once + numbers);
          continue;
        }
        CHECK(m.scattered == once);
        CHECK(m.reduced <= numbers);
        if (level != zero_level::parameters) CHECK(m.gathered == once);
        if (level == zero_level::parameters) {
          // Once for each use; adjacent uses share one.
          CHECK(m.gathered <= 2 * once * static_cast<double>(microbatches));
          how.parallel.prefetch = 0;
          CHECK(measure(s, ranks, how).gathered == 2 * once * static_cast<double>(microbatches));
          how.parallel.prefetch = 1;
          how.parallel.reshard_after_forward = false;
          CHECK(measure(s, ranks, how).gathered <= once * static_cast<double>(microbatches));
        }
      }
}

TEST_CASE("a rank holds the bytes of the formula and of the dry run") {
  scenario s = deep();
  s.config.hidden = 96, s.config.ffn = 256;
  for (const int ranks : {2, 4})
    for (const zero_level level : all_levels) {
      CAPTURE(ranks);
      CAPTURE(static_cast<int>(level));
      const measured m = measure(s, ranks, at_level(level));
      const double n = m.elements;
      const double expected = level == zero_level::replicated  ? n * (8 + 8 + 16)
                              : level == zero_level::optimizer ? n * (8 + 8 + 16.0 / ranks)
                              : level == zero_level::gradients ? n * (8 + 24.0 / ranks)
                                                               : n * 32 / ranks;
      const double data = 2 * 8.0 * static_cast<double>(s.batch * s.seq) / ranks;  // ids and labels
      CHECK(near(m.between, expected + data, 0.02));
      CHECK(near(m.peak, m.predicted_peak, 0.02));
    }
}

namespace {

/// A Llama that visits one parameter that its passes do not use.
class with_spare : public small_llama {
 public:
  with_spare(const context<cpu>& ctx, const llama_config& c)
      : small_llama(ctx, c), spare_(ctx, 1e-5, "spare", layout_v<typename specs::norm_weight>) {}
  template <class F>
  void visit(F&& f) {
    small_llama::visit(f);
    spare_.visit(f);
  }
  template <class F>
  void visit_unit(int unit, F&& f) {
    small_llama::visit_unit(unit, f);
    if (unit == 2) spare_.visit(f);
  }

 private:
  rms_norm<double, typename specs::residual, cpu> spare_;
};

}  // namespace

TEST_CASE("a parameter that no pass uses is refused by name at the first step, but a frozen one is not") {
  const scenario s = deep();
  const auto failure_of = [&](zero_level level, int ranks, bool frozen) {
    return error_on_ranks(ranks, s, [&](const context<cpu>& ctx) {
      with_spare model(ctx, s.config);
      if (frozen)
        model.visit([](auto& p) {
          if (p.name() == "spare.weight") p.freeze();
        });
      adamw<double> optimizer;
      training_step step(ctx, model, optimizer, 1, 1.0, at_level(level));
      step.model().visit([&](auto& p) { p.initialize(ctx); });
      run_step(ctx, step, optimizer, s, 0, 1e-3);
      static_cast<void>(step.result(ctx));
    });
  };
  for (const int ranks : {1, 2})
    for (const zero_level level : all_levels) {
      if (ranks == 1 && level != zero_level::replicated) continue;
      CAPTURE(static_cast<int>(level));
      CHECK(has(failure_of(level, ranks, false),
                "training step: no pass has added to the gradient of the parameter spare.weight, which the model "
                "visits; use it in every step, freeze it before the step is made, or leave it out of visit"));
      CHECK(failure_of(level, ranks, true) == "");
    }
}

TEST_CASE("with bucket_cut::whole every rank has about the same share of the optimizer's work") {
  const scenario s = deep();
  for (const int ranks : {2, 4}) {
    std::vector<double> loads(static_cast<std::size_t>(ranks), 0.0);
    on_llama_mesh(ranks, 1, s, 1, [&](const context<cpu>& ctx) {
      small_llama model(ctx, s.config);
      pipeline_options how = at_level(zero_level::optimizer);
      how.cut = bucket_cut::whole;
      pipeline<small_llama> whole(ctx, model, 1, how);
      model.visit([&](auto& p) {
        if (p.slice().size() > 0) loads[static_cast<std::size_t>(ctx.ranks.rank())] += update_cost(p.info());
      });
    });
    double most = 0, sum = 0;
    for (const double load : loads) most = std::max(most, load), sum += load;
    CAPTURE(ranks);
    CHECK(most <= 1.2 * sum / ranks);
  }
}

TEST_CASE("options and models that do not fit a policy are refused by name") {
  const auto failure_of = [](auto&& body) {
    const scenario s = deep();
    return error_on_ranks(2, s, [&](const context<cpu>& ctx) { body(ctx, s); });
  };
  const pipeline_options three = at_level(zero_level::parameters);
  CHECK(has(failure_of([&](auto& ctx, const scenario& s) {
              small_llama model(ctx, s.config);
              pipeline<small_llama> step(ctx, model, 1, three);
              model.visit([&](auto& p) { p.value(); });
            }),
            "because data parallelism cuts it; change its values by fill_values(ctx, fill)"));
  CHECK(has(failure_of([&](auto& ctx, const scenario& s) {
              small_llama model(ctx, s.config);
              pipeline<small_llama> step(ctx, model, 1, at_level(zero_level::replicated));
              model.visit([&](auto& p) { p.initialize(ctx); });
              gather_parameters(ctx, model);
              zero_gradients(ctx, model);
              model.visit([&](auto& p) { static_cast<void>(p.reduce(ctx)); });
            }),
            "parameter model.embed_tokens.weight: data parallelism keeps it together with others"));
  CHECK(has(failure_of([&](auto& ctx, const scenario& s) {
              small_llama model(ctx, s.config);
              pipeline<small_llama> step(ctx, model, 1, three);
              model.visit([&](auto& p) { p.freeze(); });
            }),
            "parameter model.embed_tokens.weight: freeze comes before data parallelism lays parameters side by side"));
  CHECK(has(failure_of([&](auto& ctx, const scenario& s) {
              llama<double, stored_over_dp<megatron_sp>, cpu> model(ctx, s.config);
              pipeline<llama<double, stored_over_dp<megatron_sp>, cpu>> step(ctx, model, 1, three);
            }),
            "shard<hidden, dp>>, by its strategy's `stored`; use zero_level::replicated"));
  CHECK(has(failure_of([&](auto& ctx, const scenario& s) {
              small_llama model(ctx, s.config);
              pipeline<small_llama> one(ctx, model, 1, three);
              pipeline<small_llama> two(ctx, model, 1, at_level(zero_level::replicated));
            }),
            "another training step has cut it in another way; a model has one policy"));
  CHECK(has(failure_of([&](auto& ctx, const scenario& s) {
              small_llama model(ctx, s.config);
              adamw<double> optimizer;
              training_step one(ctx, model, optimizer, 1, 1.0), two(ctx, model, optimizer, 1, 1.0);
              run_step(ctx, one, optimizer, s, 0, 1e-3);
            }),
            "training step: another one has been made for this model since"));
  // The error is thrown when the step is made, not at its first update.
  CHECK(has(failure_of([&](auto& ctx, const scenario& s) {
              small_llama model(ctx, s.config);
              adamw<double> optimizer({.moments = moment_type::int8});
              training_step step(ctx, model, optimizer, 1, 1.0, at_level(zero_level::optimizer));
            }),
            "adamw: moments = int8 have a scale for each 256 elements, and data parallelism cuts"));
  CHECK(has(failure_of([&](auto& ctx, const scenario& s) {
              small_llama model(ctx, s.config);
              chosen_optimizer<double> optimizer(muon_options{});
              training_step step(ctx, model, optimizer, 1, 1.0, at_level(zero_level::gradients));
            }),
            "muon: data parallelism cuts the matrix model.layers."));
  CHECK(has(failure_of([&](auto& ctx, const scenario& s) {
              small_llama model(ctx, s.config);
              pipeline_options how = at_level(zero_level::optimizer);
              how.axes.shard = axis_list(axis_of<tp>);
              pipeline<small_llama> step(ctx, model, 1, how);
            }),
            "zero_level::optimizer shards over the axes of data_axes::shard, along which this mesh has one rank"));
  CHECK(has(failure_of([&](auto& ctx, const scenario& s) {
              small_llama model(ctx, s.config);
              pipeline_options how = at_level(zero_level::optimizer);
              how.axes.replicate = axis_list(axis_of<dp>);
              pipeline<small_llama> step(ctx, model, 1, how);
            }),
            "data_axes: dp is among shard and replicate; legal is one of them"));
  CHECK(has(failure_of([&](auto& ctx, const scenario& s) {
              std::vector<double> weight(64), gradient(64);
              struct one_norm {  // in the caller's memory
                rms_norm<double, typename transformer_specs<megatron_sp>::residual> norm;
              };
              one_norm n{{ctx, 1e-5, "norm", weight.data(), gradient.data()}};
              parameter_units<double, cpu> units(ctx, zero_level::optimizer, {});
              units.add(ctx, 0, [&](auto&& f) { n.norm.visit(f); });
              static_cast<void>(s);
            }),
            "the parameter norm.weight lies in the caller's memory; use zero_level::replicated"));
  CHECK(has(failure_of([&](auto& ctx, const scenario& s) {
              dim_sizes sizes = ctx.sizes;
              sizes.set(dim_of<hidden>, 1);
              const context<cpu> small{ctx.device, ctx.ranks, sizes, 1};
              rms_norm<double, typename transformer_specs<megatron_sp>::residual> norm(small, 1e-5, "norm");
              parameter_units<double, cpu> units(small, zero_level::optimizer, {});
              units.add(small, 0, [&](auto&& f) { norm.visit(f); });
              static_cast<void>(s);
            }),
            "data parallelism: norm.weight and what is kept with it have 1 element, which cannot be cut over 2 ranks; "
            "legal are zero_level::replicated, and fewer ranks along data_axes::shard"));
}
