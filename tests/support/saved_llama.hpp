#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "four_axes.hpp"
#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/saver.hpp"
#include "temp_folder.hpp"

/// Small Llamas whose training state is saved on one layout and loaded on another.
namespace plait::test {

/// A layout: a mesh, a schedule, and the placement of parameters, gradients and optimizer state.
struct saved_layout {
  pipeline_mesh mesh;
  int schedule = 0;  ///< see `some_schedule`
  pipeline_options parallel{};
  chosen_policy context = chosen_policy::ring;
};

/// A digest of a training state, by name: hashes of whole tensors without padding, and the numbers of steps.
struct state_digest {
  std::map<std::string, std::uint64_t> tensors;
  std::int64_t optimizer_steps = 0;
  std::vector<double> losses;  ///< of the steps of the run
  friend bool operator==(const state_digest&, const state_digest&) = default;
};

/// The names of tensors that differ or that only one of them has.
inline std::string differences(const state_digest& a, const state_digest& b) {
  std::string names;
  for (const auto& [name, hash] : a.tensors)
    if (const auto found = b.tensors.find(name); found == b.tensors.end() || found->second != hash)
      append(names, {names.empty() ? "" : " ", name});
  for (const auto& [name, hash] : b.tensors)
    if (!a.tensors.contains(name)) append(names, {" only ", name});
  return names;
}

template <class Precision>
using saved_strategy = context_parallel<megatron_sp, chosen<cp>, zigzag>;

/// The model and optimizer of one rank, the argument of `body`.
template <class Precision>
struct saved_run {
  using stage_type = llama<Precision, saved_strategy<Precision>, cpu>;
  const context<cpu>& ctx;
  any_communicator& ranks;
  pipeline<stage_type>& model;
  chosen_optimizer<Precision, cpu>& optimizer;
  training_step<stage_type>& step;
  const scenario& s;
  std::vector<double>& losses;

  void train(std::int64_t from, std::int64_t to) {
    for (std::int64_t i = from; i < to; ++i) {
      run_step(ctx, step, optimizer, s, i, s.learning_rate);
      losses.push_back(step.result(ctx).loss);
    }
  }
  void save(const std::string& directory, std::uint64_t number, saved_extras extras = {}) {
    checkpoint_saver saver(ctx.device, ranks, {.directory = directory});
    saver.save(ctx, model, optimizer, number, std::move(extras));
    for (const finished_save& done : saver.wait(ctx.device)) {
      if (!done.failure.empty()) fail(done.failure);
    }
  }
};

/// Runs body(saved_run&) on every rank of a layout, with weights of this `seed`. Returns the digest of the state after
/// it.
template <class Precision, class Body>
state_digest run_saved(scenario s, const saved_layout& how, std::uint64_t seed, const Body& body) {
  s.options.attention.context = how.context;
  s.parallel = how.parallel;
  const mesh_shape shape = how.mesh.shape(s.config.kv_heads);
  const schedule plan = some_schedule(how.schedule, static_cast<int>(how.mesh.pp), static_cast<int>(s.microbatches),
                                      static_cast<int>(s.config.layers));
  state_digest digest;
  std::mutex mutex;
  threads::run(static_cast<int>(shape.size()), [&](threads::communicator c) {
    using run = saved_run<Precision>;
    using stage_type = typename run::stage_type;
    pipeline_world ranks(shape, any_communicator(c));
    ranks.stage().checks().set(value_check::always);
    cpu device;
    const context<cpu> ctx{device, ranks.stage(), microbatch_sizes<saved_strategy<Precision>>(s, ranks.stage().shape()),
                           20260};
    auto model = make_stages<stage_type>(ctx, ranks.along(), s, plan);
    chosen_optimizer<Precision, cpu> optimizer(s.optimizer);
    const context<cpu> seeded{device, ranks.stage(), ctx.sizes, seed};
    model.visit([&](auto& p) { p.initialize(seeded); });
    training_step<stage_type> step(ctx, model, optimizer, s.clip);
    std::vector<double> losses;
    run mine{ctx, ranks.root(), model, optimizer, step, s, losses};
    body(mine);

    std::map<std::string, std::uint64_t> tensors;
    const auto add = [&](const std::string& name, const auto& p, const auto* values) {
      const auto all = gather_whole(ctx, p, values);
      std::size_t count = 1;
      for (const std::int64_t n : p.info().shape) count *= static_cast<std::size_t>(n);
      tensors[name] = fnv1a(std::string_view(reinterpret_cast<const char*>(all.data()), count * sizeof(all[0])));
    };
    std::map<std::string, held_tensor> held;
    for (held_tensor& h : held_optimizer(ctx, model, optimizer)) held[h.name] = h;
    model.visit([&](auto& p) {
      add(p.name(), p, std::as_const(p).value());
      std::vector<std::string> names = {"exp_avg", "exp_avg_sq"};
      if (std::holds_alternative<muon_options>(s.optimizer) && is_hidden_matrix(p.info())) names = {"momentum_buffer"};
      for (const std::string& name : names) {
        const std::string full = "optim." + p.name() + "." + name;
        const auto as = [&]<class T>(T) {
          std::vector<T> values(static_cast<std::size_t>(p.slice().size()));
          if (const auto found = held.find(full); found != held.end())  // this rank has a part of the tensor
            found->second.read(found->second.begin, found->second.end, reinterpret_cast<std::byte*>(values.data()));
          add(full, p, values.data());
        };
        const auto* adam = std::get_if<adamw_options>(&s.optimizer);
        if constexpr (std::is_same_v<Precision, double>)
          as(double{});
        else if (adam && adam->moments != moment_type::full)
          as(bf16{});
        else
          as(float{});
      }
    });
    const std::lock_guard lock(mutex);
    digest.tensors.insert(tensors.begin(), tensors.end());
    digest.optimizer_steps = optimizer.step();
    digest.losses = losses;
  });
  return digest;
}

/// Layouts of all kinds: data, pipeline, context and tensor parallel, every policy and cut, chunks in V.
inline std::vector<saved_layout> many_layouts() {
  const auto zero = [](zero_level level, bucket_cut cut = bucket_cut::even) {
    pipeline_options how{.parallel = {.level = level}};
    how.cut = cut;
    return how;
  };
  const auto hybrid = [&](zero_level level) {
    pipeline_options how = zero(level);
    how.axes.shard = axis_list(axis_of<dp>);
    how.axes.replicate = axis_list(axis_of<cp>);
    return how;
  };
  using enum zero_level;
  return {
      {{1, 1, 1, 1}, 0, {}},
      {{2, 1, 1, 1}, 0, zero(replicated)},
      {{2, 1, 1, 1}, 0, zero(optimizer)},
      {{4, 1, 1, 1}, 0, zero(gradients)},
      {{3, 1, 1, 1}, 0, zero(parameters)},
      {{2, 1, 2, 1}, 0, zero(parameters, bucket_cut::blocks(128))},
      {{1, 1, 4, 1}, 0, {}},
      {{1, 1, 8, 1}, 0, {}},
      {{1, 1, 1, 2}, 0, {}},
      {{1, 1, 2, 2}, 0, zero(optimizer), chosen_policy::ulysses},
      {{2, 1, 1, 2}, 0, zero(parameters), chosen_policy::all_gather_kv},
      {{2, 1, 1, 2}, 0, hybrid(optimizer)},
      {{2, 1, 2, 2}, 0, hybrid(parameters)},
      {{1, 2, 1, 1}, 0, {}},
      {{1, 3, 1, 1}, 1, {}},
      {{1, 2, 2, 1}, 4, {}},
      {{2, 2, 1, 1}, 5, zero(gradients)},
      {{1, 2, 1, 1}, 6, {}},
      {{2, 2, 2, 1}, 5, zero(parameters)},
      {{2, 2, 2, 2}, 4, zero(optimizer, bucket_cut::whole)},
      {{1, 4, 2, 1}, 3, {}},
      {{2, 1, 4, 1}, 0, zero(gradients, bucket_cut::whole)},
  };
}

inline std::string text_of(const saved_layout& l) {
  return cat({"dp=", l.mesh.dp, ",pp=", l.mesh.pp, ",cp=", l.mesh.cp, ",tp=", l.mesh.tp, " schedule ", l.schedule,
              " level ", static_cast<int>(l.parallel.parallel.level)});
}

inline scenario saved_scenario() {
  scenario s = four_axes_scenario();
  s.config.layers = 5;
  s.batch = 48, s.microbatches = 4, s.seq = 17;
  return s;
}

/// The settings of a layout as numbers.
inline std::array<std::int64_t, 8> settings_of(const saved_layout& l) {
  const int level = static_cast<int>(l.parallel.parallel.level);
  const int cut = l.parallel.cut == bucket_cut::even ? 0 : l.parallel.cut == bucket_cut::whole ? 1 : 2;
  return {l.mesh.dp,  l.mesh.pp, l.mesh.cp, l.mesh.tp,
          l.schedule, level,     cut,       l.parallel.axes.replicate.empty() ? 0 : 1};
}

/// The pairs (saved layout, loading layout) that tests run. Each layout is paired with itself and, both ways, with the
/// first. Further pairs follow until every value of a setting was loaded by every value of that setting.
inline std::vector<std::pair<std::size_t, std::size_t>> pairs_of(const std::vector<saved_layout>& layouts) {
  std::vector<std::pair<std::size_t, std::size_t>> pairs;
  std::set<std::array<std::int64_t, 3>> met;
  for (std::size_t from = 0; from < layouts.size(); ++from)
    for (std::size_t to = 0; to < layouts.size(); ++to) {
      bool wanted = from == to || from == 0 || to == 0;
      for (std::size_t i = 0; i < 8; ++i)
        if (met.insert({static_cast<std::int64_t>(i), settings_of(layouts[from])[i], settings_of(layouts[to])[i]})
                .second)
          wanted = true;
      if (wanted) pairs.emplace_back(from, to);
    }
  return pairs;
}

/// Every layout trains and saves two steps. The layouts of pairs_of() load them into models with other weights.
template <class Precision = double>
void check_pairs(const scenario& s, const std::vector<saved_layout>& layouts) {
  const auto pairs = pairs_of(layouts);
  for (std::size_t from = 0; from < layouts.size(); ++from) {
    const temp_folder folder;
    const state_digest saved = run_saved<Precision>(s, layouts[from], 1, [&](auto& run) {
      run.train(0, 2);
      run.save(folder / "steps", 2);
    });
    REQUIRE(saved.optimizer_steps == 2);
    for (const auto& [saved_on, to] : pairs) {
      if (saved_on != from) continue;
      CAPTURE(text_of(layouts[from]));
      CAPTURE(text_of(layouts[to]));
      const state_digest loaded = run_saved<Precision>(s, layouts[to], 2, [&](auto& run) {
        const loaded_state got = load_state(run.ctx, run.ranks, run.model, run.optimizer, folder / "steps");
        if (got.step != 2) fail("another step");
      });
      CHECK(loaded.optimizer_steps == saved.optimizer_steps);
      CHECK(differences(loaded, saved) == "");
    }
  }
}

}  // namespace plait::test
