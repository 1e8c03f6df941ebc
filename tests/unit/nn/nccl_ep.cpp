// Mixtures with a policy that exchanges rows by NCCL EP: on meshes, values and gradients equal one rank.
#include "plait/nn/moe/nccl_ep.hpp"

#include "plait/nn/moe.hpp"
#include "plait/nn/moe/expert_mlp.hpp"
#include "support/layer_check.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using three = mesh<axis<dp>, axis<ep>, axis<tp>>;
struct exchanged {
  using input = spec<shard<batch, dp, ep>, shard<seq, tp>, hidden>;
  using weight = spec<shard<experts, ep>, shard<ffn, tp>, hidden>;
  using output = input;
  template <class T, class Device>
  using exchange = nccl_ep_exchange<T, Device>;
};
// Other ranks have some of the experts, and ranks of tp exchange rows.
struct masked {
  using input = spec<shard<batch, dp>, shard<seq, tp>, hidden, invariant<ep>>;
  using weight = spec<shard<experts, ep, tp>, ffn, hidden>;
  using output = input;
  template <class T, class Device>
  using exchange = nccl_ep_exchange<T, Device>;
};
struct experts_by_nccl_ep : megatron_experts {
  template <class T, class Device>
  using exchange = nccl_ep_exchange<T, Device>;
};
using five = experts_by_nccl_ep::mesh;

/// Sizes for which most ranks have uneven parts, or none has.
dim_sizes sizes(std::int64_t samples = 5, std::int64_t length = 9, std::int64_t inside = 17) {
  dim_sizes s = transformer_sizes(samples, length);
  s.set(dim_of<experts>, 8);
  s.set(dim_of<ffn>, inside);
  return s;
}
/// Compares every rank of the meshes with one rank, also with deferred gradients. A dry run predicts the default
/// exchange only, so the traffic is not compared.
template <class Layer, class Mesh>
void check_exchange(const Mesh& alone, std::initializer_list<Mesh> meshes) {
  const auto make = [](const auto& ctx) {
    return typename Layer::template of<device_of<decltype(ctx)>>(ctx, "mixture", {{.chosen = 3}, {0, 0.5}});
  };
  nccl_ep_stand_in::dispatches = 0, nccl_ep_stand_in::combines = 0;
  const layer_values one = run_on(alone, sizes(), make)[0];
  CHECK(nccl_ep_stand_in::dispatches.load() == 0);  // a single rank exchanges nothing
  int passes = 0;
  for (const Mesh& mesh : meshes)
    for (const layer_run& how : {layer_run{}, layer_run{.deferred = true}})
      for (layer_values& at : run_on(mesh, sizes(), make, how)) {
        at.found = {};
        CHECK(compare_layers(at, one, 1e-12).text() == "");
        for (const ledger::row& row : at.sent.rows) CHECK(at.sent.total(row.label, collective::all_to_all).calls == 0);
        passes += 2;  // forward and backward
      }
  CHECK(nccl_ep_stand_in::dispatches.load() == passes);
  CHECK(nccl_ep_stand_in::combines.load() == passes);
}
template <class Policy>
struct mixture_of {
  template <class Device>
  using of = moe<double, Policy, Device>;
};
struct mlp_by_nccl_ep {
  template <class Device>
  using of = expert_mlp<double, experts_by_nccl_ep, Device>;
};
}  // namespace

TEST_CASE("rows travel by the exchange of a policy or a strategy, forward and backward") {
  check_exchange<mixture_of<exchanged>>(three{1, 1, 1}, {three{1, 2, 1}, three{2, 2, 2}, three{1, 4, 2}});
  check_exchange<mixture_of<masked>>(three{1, 1, 1}, {three{1, 2, 2}, three{2, 2, 2}});
  check_exchange<mlp_by_nccl_ep>(five{1, 1, 1, 1, 1}, {five{1, 2, 1, 1, 1}, five{1, 2, 1, 2, 1}});
}
TEST_CASE("errors of NCCL EP are errors with its text") {
  threads::run(1, [](threads::communicator& c) {
    cpu device;
    any_communicator ranks(c);
    CHECK_THROWS_WITH((nccl_ep_exchange<double, cpu>(device, {.ranks = &ranks, .width = 8})),
                      "nccl_ep_exchange: ncclEpCreateGroup: invalid argument");
  });
}
TEST_CASE("deterministic sums need an exchange with origins") {
  threads::run(1, [](threads::communicator& c) {
    cpu device({.deterministic = true});
    world ranks(three{1, 1, 1}.shape(), c);
    const dim_sizes of_mine = sizes(4, 8, 16);
    const context<cpu> ctx{device, ranks, of_mine, 1, {4, 4, 4}};
    CHECK_THROWS_WITH((moe<float, exchanged>(ctx, "moe")),
                      "moe: deterministic sums need the origins of rows, and its exchange gives none; legal is an "
                      "exchange with `origins`");
    const context<cpu> other{device, ranks, of_mine, 1};
    CHECK_THROWS_WITH((moe<float, exchanged>(other, "moe", {.padded = true})),
                      "moe: padded rows need an exchange with `open_padded`, and its exchange has none; legal are "
                      "all_to_all_exchange and moe_options::padded = false");
  });
}
