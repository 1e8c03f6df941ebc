// timeout: 120
// program: small
// Small enough for thread sanitizer: one step on a mesh of 2 x 2 ranks against one rank, and deferred weight gradients.
#include "support/llama_parity.hpp"
#include "support/on_mesh.hpp"

using namespace plait;
using namespace plait::test;

namespace {

scenario tiny() {
  scenario s{small_config(4, 1)};
  s.config.layers = 1;
  s.config.hidden = 16, s.config.ffn = 32;
  s.batch = s.seq = 4;
  s.steps = 2;
  return s;
}

/// The gradients of one microbatch, with weight gradients computed at once or deferred to the end of the backward pass.
template <strategy S>
std::vector<std::vector<named_values>> gradients_of(const scenario& s, bool deferred, std::int64_t dp_ranks,
                                                    std::int64_t tp_ranks) {
  const tensor_extents split = split_tensor_ranks(tp_ranks, s.config.kv_heads);
  const typename S::mesh mesh{dp_ranks, 1, split.tp, split.tp_rep};
  std::vector<std::vector<named_values>> all(static_cast<std::size_t>(mesh.size()));
  on_mesh(mesh, llama_sizes<S>(s.config, mesh.shape(), s.batch, s.seq), 3, [&](const context<cpu>& ctx) {
    llama<double, S> model(ctx, s.config, s.options);
    model.visit([&](auto& p) {
      p.initialize(ctx);
      p.gather(ctx);
      p.zero_gradient(ctx);
    });
    typename llama<double, S>::tokens ids(ctx), labels(ctx);
    host_tokens host_ids(ids.part(), model.order()), host_labels(host_ids);
    fill_tokens(s, 0, host_ids, host_labels);
    upload(ctx, host_ids, ids);
    upload(ctx, host_labels, labels);
    typename llama<double, S>::saved kept;
    weight_work later;
    microbatch<cpu> mb(ctx);
    mb.deferred = deferred ? &later : nullptr;
    model.forward(mb, ids, labels, &kept);
    const auto seed = llama<double, S>::mean::seed_type::weighted(ctx, 1.0 / 64);
    model.backward(mb, ids, labels, kept, seed);
    if (deferred) {
      CHECK(later.size() > 0);
      later.run();
      CHECK(later.size() == 0);
    }
    model.visit([&](auto& p) { static_cast<void>(p.reduce(ctx)); });
    all[static_cast<std::size_t>(ctx.ranks.rank())] = gather_gradients(ctx, model);
  });
  return all;
}

template <strategy S>
void check_deferred(const scenario& s, double tolerance) {
  for (const auto& [dp_ranks, tp_ranks] : {std::pair{1, 1}, {2, 2}}) {
    const auto now = gradients_of<S>(s, false, dp_ranks, tp_ranks),
               later = gradients_of<S>(s, true, dp_ranks, tp_ranks);
    for (std::size_t r = 0; r < now.size(); ++r) check_tensors(later[r], now[r], tolerance, "deferred gradient");
  }
}

}  // namespace

TEST_CASE("dp 2 x tp 2") {
  const scenario s = tiny();
  check_mesh<double, megatron_sp>(s, train_one<double, megatron_sp>(s), 2, 2);
}

TEST_CASE("deferred weight gradients have the same bits") {
  scenario s = tiny();
  s.config.attention_bias = s.config.mlp_bias = true;
  for (const recompute policy : {recompute::none, recompute::selective, recompute::full}) {
    s.options.keep = policy;
    check_deferred<megatron_sp>(s, 0.0);
    check_deferred<megatron_tp>(s, 0.0);
  }
}

TEST_CASE("a tied table adds its two gradients in one order, deferred or not") {
  scenario s = tiny();
  s.config.tie_embeddings = true;
  s.config.vocab = 7;  // tokens repeat, so some rows of the table sum more than two terms
  check_deferred<megatron_sp>(s, 0.0);
}

TEST_CASE("a world has only the communicators that its model uses") {
  scenario s = tiny();
  s.config.kv_heads = 2;
  const megatron_sp::mesh mesh{2, 2, 2, 1};
  on_mesh(mesh, llama_sizes<megatron_sp>(s.config, mesh.shape(), s.batch, s.seq), 3, [&](const context<cpu>& ctx) {
    REQUIRE(ctx.ranks.communicators() == 0);
    const llama<double, megatron_sp> model(ctx, s.config, s.options);
    const std::size_t made = ctx.ranks.communicators();
    // Activations travel along tp, keys and values along cp. Gradients are summed over dp and cp, those of norms over
    // tp as well. No other set of axes has a communicator.
    CHECK(made == 4);
    for (const axis_list& axes : {axis_list(axis_of<tp>), axis_list(axis_of<cp>), axis_list(axis_of<dp>, axis_of<cp>),
                                  axis_list(axis_of<dp>, axis_of<cp>, axis_of<tp>)})
      static_cast<void>(ctx.ranks.group(axes));
    CHECK(ctx.ranks.communicators() == made);
  });
}
