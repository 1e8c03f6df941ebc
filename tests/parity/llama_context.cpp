// timeout: 120
// program: llama_options
// Context parallelism in a Llama, for cases that four_axes.cpp does not have: ranks without a counted token, windows,
// packed documents, dropout and recomputation, parameters stored over dp. Every rank has the results of one rank.
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

namespace {

template <class Placement>
using under = stored_over_dp<context_parallel<megatron_tp, chosen<cp>, Placement>>;

struct context_scenario {
  llama_options options{};
  std::vector<std::int64_t> masked{};  ///< positions of all samples whose labels do not count
  std::int64_t microbatches = 1;
};

constexpr std::int64_t length = 16, samples = 4;

std::int32_t document_start(std::int64_t sample, std::int64_t position) {
  return static_cast<std::int32_t>(position < 3 + sample ? 0 : position < 12 ? 3 + sample : 12);
}

template <strategy S>
ledger predicted(const context_scenario& c, const llama_config& config, const mesh_shape& shape, std::int64_t rank) {
  world ranks = world::counting(shape, rank);
  counting_device device;
  const context<counting_device> ctx{device, ranks, llama_sizes<S>(config, shape, samples / c.microbatches, length)};
  using model_type = llama<double, S, counting_device>;
  model_type model(ctx, config, c.options);
  pipeline<model_type> whole(ctx, model, static_cast<int>(c.microbatches));
  return dry_run_step(ctx, whole).traffic;
}

template <strategy S>
std::vector<rank_outcome> train(const context_scenario& c, const mesh_shape& shape) {
  std::vector<rank_outcome> all(static_cast<std::size_t>(shape.size()));
  threads::run(static_cast<int>(shape.size()), [&](threads::communicator comm) {
    world ranks(shape, comm);
    cpu device;
    llama_config config = small_config(8, 2);
    config.hidden = 16, config.ffn = 32;
    const std::int64_t microbatch = samples / c.microbatches;
    const context<cpu> ctx{device, ranks, llama_sizes<S>(config, shape, microbatch, length), 5};
    llama<double, S> model(ctx, config, c.options);
    adamw<double> optimizer;
    model.visit([&](auto& p) { p.initialize(ctx); });
    rank_outcome out;
    out.initial = gather_values(ctx, model);
    out.initial_hash = weights_hash(ctx, model);
    for (int step = 0; step < 2; ++step) {
      ranks.ledger().clear();
      const auto fill = [&](std::int64_t k, auto& ids, auto& labels, auto& starts) {
        const std::int64_t first = k * microbatch;
        ids.fill([&](std::int64_t sample, std::int64_t position) {
          return learnable_token(first + sample, position, config.vocab);
        });
        labels.fill([&](std::int64_t sample, std::int64_t position) {
          const bool masked = std::find(c.masked.begin(), c.masked.end(), position) != c.masked.end();
          return masked ? -100 : learnable_token(first + sample, position + 1, config.vocab);
        });
        starts.fill(
            [&](std::int64_t sample, std::int64_t position) { return document_start(first + sample, position); });
      };
      out.steps.push_back(train_step(ctx, model, optimizer, c.microbatches, 1e-2, 1.0, 0, fill));
      out.measured = ranks.ledger();
      if (step == 0) out.first_gradients = gather_gradients(ctx, model);
    }
    out.predicted = predicted<S>(c, config, shape, ranks.rank());
    out.last_gradients = gather_gradients(ctx, model);
    out.weights = gather_values(ctx, model);
    all[static_cast<std::size_t>(ranks.rank())] = std::move(out);
  });
  return all;
}

/// Both placements on dp x cp x tp ranks.
void check(context_scenario c, std::initializer_list<megatron_sp::mesh> meshes) {
  context_scenario whole = c;
  whole.microbatches = 1;
  const rank_outcome one = std::move(train<under<contiguous>>(whole, megatron_sp::mesh{1, 1, 1, 1}.shape())[0]);
  CHECK(std::isfinite(one.steps[1].loss));
  for (const megatron_sp::mesh& mesh : meshes) {
    INFO(describe(mesh.shape()));
    const auto compare = [&](const std::vector<rank_outcome>& all) {
      for (const rank_outcome& got : all) {
        check_parity(one, got, 1e-10);
        CHECK(compare_ledgers(got.measured, got.predicted, true).text() == "");
      }
    };
    compare(train<under<contiguous>>(c, mesh.shape()));
    compare(train<under<zigzag>>(c, mesh.shape()));
  }
}

using four = megatron_sp::mesh;

}  // namespace

TEST_CASE("ranks without a counted token") {
  for (const chosen_policy how : {chosen_policy::ring, chosen_policy::all_gather_kv, chosen_policy::ulysses}) {
    context_scenario c;
    c.options.attention.context = how;
    c.masked = {0,  1,  12,
                13, 14, 15};  // the last of four ranks has them in original order, the first one in zigzag order
    check(c, {four{1, 4, 1, 1}, four{2, 4, 1, 1}});
  }
}

TEST_CASE("dropout and recomputation") {
  for (const recompute keep : {recompute::selective, recompute::full}) {
    context_scenario c;
    c.options.keep = keep;
    c.options.dropout = 0.2;
    check(c, {four{1, 2, 2, 1}});
  }
}

TEST_CASE("windows and packed documents, recomputed") {
  context_scenario c;
  c.options.keep = recompute::full;
  c.options.attention.mask = kernels::attention_mask::window(5);
  check(c, {four{2, 2, 1, 1}});
  c.options.attention = {.documents = true, .context = chosen_policy::ulysses};
  c.microbatches = 2;
  check(c, {four{1, 2, 2, 1}, four{1, 4, 1, 2}});
}

TEST_CASE("starts of documents that are missing or impossible are refused") {
  const auto refused = [](auto&& fill) {
    std::string text;
    try {
      threads::run(1, [&](threads::communicator comm) {
        using strategy_type = under<zigzag>;
        const mesh_shape shape = megatron_sp::mesh{1, 1, 1, 1}.shape();
        world ranks(shape, comm);
        cpu device;
        const llama_config config = small_config(4, 2);
        context<cpu> ctx{device, ranks, llama_sizes<strategy_type>(config, shape, 1, length), 5};
        llama<double, strategy_type> model(ctx, config, {.attention = {.documents = true}});
        adamw<double> optimizer;
        training_step step(ctx, model, optimizer, 1, 1.0);
        step.load(ctx, 0, fill);
      });
    } catch (const error& e) {
      text = e.what();
    }
    return text.substr(0, text.find('\n'));
  };
  CHECK(refused([](std::int64_t, host_tokens&, host_tokens&) {}) ==
        "rank 0: training_step: attention_options::documents is set, so fill must take (i, ids, labels, starts)");
  const auto with = [&](auto&& start) {
    return refused([&](std::int64_t, host_tokens&, host_tokens&, host_starts& starts) {
      starts.fill([&](std::int64_t, std::int64_t position) { return start(position); });
    });
  };
  CHECK(with([](std::int64_t p) { return p / 4 * 4; }).empty());
  CHECK(with([](std::int64_t p) { return p / 4 * 4 + 4; }) ==  // ends of documents instead of starts
        "rank 0: training step: the token at position 0 of sample 0 has the document start 4; legal is its own "
        "position, where a document begins, or one before it, from 0");
  CHECK(with([](std::int64_t p) { return p / 4; }) ==  // indices of documents instead of starts
        "rank 0: training step: the token at position 4 of sample 0 has the document start 1; legal is its own "
        "position, where a document begins, or that of the token before, 0");
  CHECK(with([](std::int64_t p) { return p - 100; }).find("position 0") != std::string::npos);
  CHECK(with([](std::int64_t p) { return p < 8 ? 4 : 0; }).find("position 0") != std::string::npos);
  CHECK(with([](std::int64_t p) { return p < 8 ? p : 0; }).find("position 8 of sample 0 has") != std::string::npos);
}
