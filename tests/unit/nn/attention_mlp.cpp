// program: layers
// Attention and the SwiGLU MLP under strategies: finite differences on one rank, meshes equal one rank.
#include "plait/kernels/settings.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/strategy.hpp"
#include "support/layer_check.hpp"
#include "support/on_mesh.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using four = megatron_sp::mesh;

template <class Make>
void check_sublayer(Make make, std::initializer_list<four> meshes) {
  const dim_sizes sizes = transformer_sizes(2, 8);
  const layer_values one = check_one(four{1, 1, 1, 1}, sizes, make, 25);
  check_meshes(meshes, sizes, one, make);
}

attention_options rotated(std::optional<kernels::llama3_rope_scaling> scaling = {}) {
  attention_options how;
  how.frequencies = kernels::rope_inverse_frequencies(4, 100.0, scaling);
  return how;
}

template <class S>
void check_attention(const attention_options& how) {
  const auto make = [how](const auto& ctx) {
    return self_attention<double, S, device_of<decltype(ctx)>>(ctx, "attention", how);
  };
  check_sublayer(make, {four{2, 1, 1, 1}, four{1, 1, 2, 1}, four{1, 1, 1, 2}, four{1, 1, 2, 2}, four{2, 1, 2, 1},
                        four{2, 1, 2, 2}, four{1, 1, 1, 4}});
}

template <class S, bool Bias>
void check_mlp() {
  const auto make = [](const auto& ctx) {
    return swiglu_mlp<double, S, device_of<decltype(ctx)>>(ctx, "mlp", {}, Bias);
  };
  check_sublayer(make, {four{2, 1, 1, 1}, four{1, 1, 2, 1}, four{1, 1, 2, 2}, four{2, 1, 4, 1}, four{1, 1, 2, 4}});
}

}  // namespace

TEST_CASE("attention") {
  check_attention<megatron_sp>(rotated());
  attention_options biased = rotated();
  biased.qkv_bias = biased.output_bias = true;
  check_attention<megatron_tp>(biased);
}

TEST_CASE("attention with Llama-3 rope scaling and biases") {
  attention_options how = rotated(kernels::llama3_rope_scaling{8.0, 1.0, 4.0, 16.0});
  how.qkv_bias = how.output_bias = true;
  check_attention<megatron_sp>(how);
}

TEST_CASE("attention with biases on queries, keys and values only, with norms of queries and keys, with sinks") {
  attention_options how = rotated();
  how.qkv_bias = true;
  check_attention<megatron_sp>(how);
  how.qkv_bias = false;
  how.qk_norm_epsilon = 1e-5;
  check_attention<megatron_sp>(how);
  how.sinks = true, how.score = {.cap = 0.5, .alibi = true};
  check_attention<stored_over_dp<megatron_tp>>(how);
}

TEST_CASE("attention without rotation, without a mask, with a window") {
  check_attention<megatron_sp>({});
  check_attention<megatron_sp>({.mask = kernels::attention_mask::full()});
  attention_options how = rotated();
  how.mask = kernels::attention_mask::window(3);
  check_attention<megatron_sp>(how);
}

TEST_CASE("SwiGLU MLP") {
  check_mlp<megatron_sp, false>();
  check_mlp<megatron_sp, true>();
  check_mlp<megatron_tp, true>();
}

namespace {

template <class Make>
std::string refused_at(const four& mesh, const dim_sizes& sizes, Make&& make) {
  return error_on_mesh(mesh, sizes, 1, make);
}

}  // namespace

TEST_CASE("sizes that do not fit are refused at run time, by name and value") {
  const auto attention = [](const context<cpu>& ctx) {
    self_attention<double, megatron_sp>(ctx, "attention", rotated());
  };
  dim_sizes sizes = transformer_sizes();
  sizes.set(dim_of<heads>, 12), sizes.set(dim_of<kv_heads>, 3), sizes.set(dim_of<seq>, 6);
  const std::string split = refused_at(four{1, 1, 1, 2}, sizes, attention);
  CHECK(has(split, "attention: heads = 12, kv_heads = 3, and a rank has query heads "));  // either rank may report it
  CHECK(has(split,
            " and kv heads 0 to 2: heads must be a multiple of kv_heads, and the query heads of a rank must be whole "
            "groups of 4 or lie in one group, whose kv head it has; blocks of 4 heads (dim_sizes::set) keep groups "
            "together"));
  sizes.set(dim_of<heads>, 4);
  CHECK(has(refused_at(four{1, 1, 1, 1}, sizes, attention), "heads = 4, kv_heads = 3"));
  sizes.set(dim_of<heads>, 2), sizes.set(dim_of<kv_heads>, 2);
  CHECK(has(refused_at(four{1, 1, 3, 1}, sizes, attention),
            "heads is 2, sharded over tp=3 = 3 ranks; it must be at least 3"));
  const auto wrong_frequencies = [](const context<cpu>& ctx) {
    self_attention<double, megatron_sp>(ctx, "attention", {.frequencies = {1.0}});
  };
  CHECK(has(refused_at(four{1, 1, 1, 1}, transformer_sizes(), wrong_frequencies),
            "1 rotary frequencies for head_dim = 4"));
  const auto mlp = [](const context<cpu>& ctx) { swiglu_mlp<double, megatron_sp>(ctx, "mlp"); };
  sizes = transformer_sizes();
  sizes.set(dim_of<ffn>, 3);
  CHECK(has(refused_at(four{1, 1, 4, 1}, sizes, mlp), "ffn is 3, sharded over tp=4 = 4 ranks; it must be at least 4"));
  sizes = transformer_sizes(4, 3);
  CHECK(has(refused_at(four{1, 1, 2, 2}, sizes, mlp), "seq is 3, sharded over tp=2 x tp_rep=2 = 4 ranks"));
  sizes = transformer_sizes(1, 8);
  CHECK(has(refused_at(four{2, 1, 1, 1}, sizes, mlp), "batch is 1, sharded over dp=2 = 2 ranks"));
}

namespace {

struct narrow {
  using input = spec<batch, hidden, invariant<tp>>;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<batch, shard<ffn, tp>>;
};
struct stored_badly {
  using input = spec<shard<batch, dp>, hidden, invariant<cp, tp, tp_rep>>;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<ffn, tp>, invariant<cp, tp_rep>>;
};

}  // namespace

TEST_CASE("a layer on a mesh whose axes it does not name, a size that the context does not have") {
  const auto make = [](const context<cpu>& ctx) { linear<double, narrow>(ctx, "up"); };
  CHECK(has(refused_at(four{2, 1, 1, 1}, transformer_sizes(), make),
            "up: input: a boundary spec must mention every axis of its mesh"));
  CHECK(has(refused_at(four{2, 1, 1, 1}, transformer_sizes(), make), "axis dp"));
  dim_sizes sizes;
  sizes.set(dim_of<batch>, 4), sizes.set(dim_of<hidden>, 4);
  const auto other = [](const context<cpu>& ctx) { linear<double, stored_badly>(ctx, "up"); };
  CHECK(has(refused_at(four{1, 1, 2, 1}, sizes, other), "the context gives no size for the dim ffn"));
}

TEST_CASE("a parameter may not be stored replicated or partial") {
  const auto make = [](const context<cpu>& ctx) {
    const layout stored = layout_v<spec<hidden, replicate<dp>>>;
    const layout met = layout_v<spec<shard<batch, dp>, hidden, invariant<cp, tp, tp_rep>>>;
    parameter<double, cpu>(ctx, {"w", {8}, {}, true}, stored, layout_v<spec<hidden>>, met);
  };
  CHECK(has(refused_at(four{2, 1, 1, 1}, transformer_sizes(), make), "parameter w: a forgotten reduction"));
}
