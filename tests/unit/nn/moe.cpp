// program: layers
// Mixtures of experts: finite differences on one rank, meshes equal one rank.
#include "plait/nn/moe.hpp"

#include "support/layer_check.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace {

dim_sizes mixture_sizes() {
  dim_sizes s = transformer_sizes(4, 8);
  s.set(dim_of<experts>, 8);
  return s;
}

// Experts over ep, which also shards tokens, with data parallelism beside it. Expert parallelism and tensor parallelism
// of Megatron's kind: the sequence is sharded over tp, and so is what experts are inside.
using three = mesh<axis<dp>, axis<ep>, axis<tp>>;
struct exchanged {
  using input = spec<shard<batch, dp, ep>, shard<seq, tp>, hidden>;
  using weight = spec<shard<experts, ep>, shard<ffn, tp>, hidden>;
  using output = input;
};
// The same without sequence parallelism.
struct sequence_on_all_ranks {
  using input = spec<shard<batch, dp, ep>, seq, hidden, invariant<tp>>;
  using weight = spec<shard<experts, ep>, shard<ffn, tp>, hidden>;
  using output = input;
};
// Experts over both axes, whole on their ranks.
struct folded {
  using input = spec<shard<batch, dp, ep>, shard<seq, tp>, hidden>;
  using weight = spec<shard<experts, tp, ep>, ffn, hidden>;
  using output = input;
};
// Tokens are whole over ep, and each rank computes its own experts; over tp rows are exchanged.
struct masked {
  using input = spec<shard<batch, dp>, shard<seq, tp>, hidden, invariant<ep>>;
  using weight = spec<shard<experts, ep, tp>, ffn, hidden>;
  using output = input;
};

template <class Policy>
void check_mixture(const kernels::router_settings& router, std::initializer_list<three> meshes,
                   const router_losses& losses = {}) {
  const auto make = [router, losses](const auto& ctx) {
    return moe<double, Policy, device_of<decltype(ctx)>>(ctx, "mixture", {router, {0, 0.5}, losses});
  };
  const dim_sizes sizes = mixture_sizes();
  const layer_values one = check_one(three{1, 1, 1}, sizes, make, 25);
  check_meshes(meshes, sizes, one, make);
}

}  // namespace

TEST_CASE("experts that rows travel to") {
  check_mixture<exchanged>({}, {three{2, 1, 1}, three{1, 2, 1}, three{1, 1, 2}, three{2, 2, 2}, three{1, 4, 2}});
}
TEST_CASE("experts of whole sequences, one for each token") {
  check_mixture<sequence_on_all_ranks>({.chosen = 1, .normalised = false},
                                       {three{2, 2, 1}, three{1, 1, 4}, three{1, 2, 2}, three{2, 2, 2}});
}
TEST_CASE("experts over two axes, with sigmoids for scores") {
  check_mixture<folded>({.chosen = 3, .scores = kernels::expert_scores::sigmoid, .scale = 2.5},
                        {three{1, 1, 2}, three{1, 2, 2}, three{2, 2, 2}, three{1, 4, 2}});
}
TEST_CASE("experts of tokens that all ranks have") {
  check_mixture<masked>({.chosen = 4, .normalised = false},
                        {three{1, 2, 1}, three{1, 2, 2}, three{2, 2, 2}, three{1, 4, 2}});
}

TEST_CASE("auxiliary losses are a part of the objective") {
  const router_losses each{.balance = {3}, .z_loss = 0.7}, together{{2, balance_over::microbatch}, 0.2};
  check_mixture<exchanged>({}, {three{2, 1, 1}, three{1, 2, 1}, three{1, 1, 2}, three{2, 2, 2}}, each);
  check_mixture<sequence_on_all_ranks>({.scores = kernels::expert_scores::sigmoid},
                                       {three{2, 2, 1}, three{1, 1, 4}, three{2, 2, 2}}, together);
  check_mixture<masked>({.chosen = 3}, {three{1, 2, 1}, three{1, 2, 2}, three{2, 2, 2}}, together);
}

// All scores are equal, so that every token chooses the first experts, and all others have no rows.
TEST_CASE("experts without rows") {
  const auto make = [](const auto& ctx) { return moe<double, exchanged, device_of<decltype(ctx)>>(ctx, "mixture"); };
  const dim_sizes sizes = mixture_sizes();
  const auto first_experts = [&](const three& mesh) {
    std::vector<double> norms(8);
    threads::run(static_cast<int>(mesh.size()), [&](threads::communicator& c) {
      cpu device;
      world ranks(mesh.shape(), c);
      const context<cpu> ctx{device, ranks, sizes, 1};
      auto layer = make(ctx);
      layer.visit([&](auto& p) {
        if (p.name() == "mixture.gate.weight")
          kernels::fill(device, p.value(), p.size(), 0.0);
        else
          p.initialize(ctx);
        p.gather(ctx), p.zero_gradient(ctx);
      });
      typename decltype(layer)::saved kept;
      const auto x = place_full<exchanged::input>(ctx, random_full(layout_v<exchanged::input>, sizes, 1));
      const auto dy = place_full<exchanged::input>(ctx, random_full(layout_v<exchanged::input>, sizes, 2));
      layer.forward(ctx, x, &kept);
      layer.backward(ctx, x, kept, dy);
      layer.visit([&](auto& p) {
        const auto gradient = p.reduce(ctx);
        if (p.name() != "mixture.experts.up_proj.weight") return;
        const auto all = collect_full(ctx, dual(p.stored()), gradient.data());
        if (ranks.rank() == 0)
          for (std::size_t i = 0; i < all.size(); ++i) norms[i / (all.size() / 8)] += all[i] * all[i];
      });
    });
    return norms;
  };
  const std::vector<double> one = first_experts(three{1, 1, 1});
  for (std::size_t e = 0; e < 8; ++e) CHECK((one[e] > 0) == (e < 2));
  for (const three& mesh : {three{1, 4, 1}, three{2, 2, 2}}) check_near(first_experts(mesh), one, 1e-12, "norms");
}

TEST_CASE("a mixture says what it cannot do") {
  threads::run(1, [](threads::communicator& c) {
    cpu device;
    world ranks(three{1, 1, 1}.shape(), c);
    const dim_sizes sizes = mixture_sizes();
    const context<cpu> ctx{device, ranks, sizes, 1};
    using layer = moe<float, exchanged>;
    for (const std::int64_t k : {0, 9})
      CHECK_THROWS_WITH(layer(ctx, "moe", {{.chosen = k}}),
                        cat({"moe: each token chooses ", k, " of 8 experts; legal are 1 to 8"}).c_str());
    CHECK_THROWS_WITH(layer(ctx, "moe", {.losses = {.z_loss = -1}}), "moe: z_loss = -1; legal is 0 (none) or more");
    CHECK_THROWS_WITH(layer(ctx, "moe", {.losses = {.balance = {-0.5}}}),
                      "moe: the weight of the balance loss is -0.5; legal is 0 (none) or more");
    struct flat_tokens {
      using input = spec<shard<batch, dp, ep, tp>, hidden>;
      using weight = spec<shard<experts, ep>, ffn, hidden>;
      using output = input;
    };
    CHECK_THROWS_WITH((moe<float, flat_tokens>(ctx, "moe", {.losses = {.balance = {1}}})),
                      "moe: balance_over::sequence, and the input has one dim of tokens, so that no sequence is known; "
                      "legal is balance_over::microbatch");
    layer made(ctx, "moe");
    made.visit([&](auto& p) { p.initialize(ctx), p.gather(ctx), p.zero_gradient(ctx); });
    tensor<float, exchanged::input> x(ctx);
    kernels::fill(device, x.data(), x.size(), 0.5f);
    layer::saved kept;
    CHECK_THROWS_WITH(made.backward(ctx, x, kept, made.forward(ctx, x)),
                      "moe: backward without what forward keeps: give forward a `saved`, and backward the same one");
  });
}
