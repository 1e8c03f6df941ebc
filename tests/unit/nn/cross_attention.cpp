// program: more_layers
// Attention of queries to another sequence's keys: the core, and cross-attention with strategies.
#include "plait/nn/attention/cross_attention.hpp"

#include "plait/kernels/settings.hpp"
#include "plait/nn/attention/chosen.hpp"
#include "plait/nn/strategy.hpp"
#include "support/layer_check.hpp"
#include "support/on_mesh.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using four = megatron_sp::mesh;

dim_sizes sizes_here() {
  dim_sizes sizes = transformer_sizes(2, 8);
  sizes.set(dim_of<source_seq>, 12);
  return sizes;
}

/// A tensor that is equal in every run.
template <class Spec, class Device>
tensor<double, Spec, Device> constant(const context<Device>& ctx, std::uint64_t stream) {
  if constexpr (std::is_same_v<Device, cpu>)
    return place_full<Spec>(ctx, random_full(layout_v<Spec>, ctx.sizes, stream));
  else
    return tensor<double, Spec, Device>(ctx);
}
template <class Spec, class Device>
tensor<double, Spec, Device> copy_of(const context<Device>& ctx, const tensor<double, Spec, Device>& x) {
  tensor<double, Spec, Device> y(ctx);
  ctx.device.copy(y.data(), x.data(), static_cast<std::size_t>(x.size()) * sizeof(double), ctx.device.main_stream());
  return y;
}

using q_spec = spec<shard<batch, dp>, shard<seq, cp>, shard<heads, tp, tp_rep>, head_dim>;
using k_spec = spec<shard<batch, dp>, source_seq, shard<kv_heads, tp>, head_dim, replicate<cp, tp_rep>>;

using sink_spec = attention_core<double, q_spec, k_spec>::sinks;
static_assert(std::is_same_v<sink_spec, spec<shard<heads, tp, tp_rep>, replicate<dp, cp>>>);

/// The core as a layer of its queries, of one tensor that is both keys and values, or of its sinks.
template <class Input, class Device>
struct core_layer : layer_types<double, Input, q_spec, Device> {
  using core = attention_core<double, q_spec, k_spec, Device>;
  using base = layer_types<double, Input, q_spec, Device>;
  using input = typename base::input;
  struct saved {
    typename core::saved inside;
    tensor<double, q_spec, Device> o;
  };
  core attention;
  tensor<double, q_spec, Device> q;
  tensor<double, k_spec, Device> k;
  tensor<double, sink_spec, Device> sinks;
  bool has_sinks;

  core_layer(const context<Device>& ctx, const attention_core_options& how, bool with_sinks)
      : attention(ctx, "core", how),
        q(constant<q_spec>(ctx, 11)),
        k(constant<k_spec>(ctx, 12)),
        sinks(constant<sink_spec>(ctx, 13)),
        has_sinks(with_sinks) {}
  tensor<double, q_spec, Device> forward(const microbatch<Device>& mb, const tensor<double, input, Device>& x,
                                         saved* keep) {
    auto* const inside = keep ? &keep->inside : nullptr;
    auto o = [&] {
      const auto* const s = has_sinks ? &sinks : nullptr;
      if constexpr (std::is_same_v<Input, q_spec>)
        return attention.forward(mb, copy_of(mb.ctx, x), copy_of(mb.ctx, k), copy_of(mb.ctx, k), inside, s);
      else if constexpr (std::is_same_v<Input, k_spec>)
        return attention.forward(mb, copy_of(mb.ctx, q), copy_of(mb.ctx, x), copy_of(mb.ctx, x), inside, s);
      else
        return attention.forward(mb, copy_of(mb.ctx, q), copy_of(mb.ctx, k), copy_of(mb.ctx, k), inside, &x);
    }();
    if (keep) keep->o = copy_of(mb.ctx, o);
    return o;
  }
  tensor<double, dual_t<input>, Device> backward(const microbatch<Device>& mb, const tensor<double, input, Device>&,
                                                 saved& kept, const tensor<double, dual_t<q_spec>, Device>& dy) {
    auto d = attention.backward(mb, kept.o, kept.inside, dy);
    CHECK(static_cast<bool>(d.head_sinks) == (kept.inside.head_sinks != nullptr));
    if constexpr (std::is_same_v<Input, q_spec>) {
      return std::move(d.q);
    } else if constexpr (std::is_same_v<Input, sink_spec>) {
      return std::move(d.head_sinks);
    } else {
      kernels::accumulate(mb.ctx.device, d.v.data(), d.k.data(), d.k.size());
      return std::move(d.k);
    }
  }
  template <class F>
  void visit(F&&) {}
};

/// Half of the meshes. A layer's other inputs have the other half.
template <class Make>
void check(const std::string& name, bool first_half, Make make) {
  const layer_values& one = check_once(name, four{1, 1, 1, 1}, sizes_here(), make, 25);
  if (first_half)
    check_meshes({four{2, 1, 1, 1}, four{1, 1, 2, 2}, four{2, 2, 2, 1}}, sizes_here(), one, make);
  else
    check_meshes({four{1, 1, 2, 1}, four{1, 2, 1, 2}}, sizes_here(), one, make);
}

void check_core(const std::string& name, const attention_core_options& how, bool queries_with_sinks, bool first_half) {
  check(name + " q", first_half,
        [=](const auto& ctx) { return core_layer<q_spec, device_of<decltype(ctx)>>(ctx, how, queries_with_sinks); });
  check(name + " k", !first_half,
        [=](const auto& ctx) { return core_layer<k_spec, device_of<decltype(ctx)>>(ctx, how, !queries_with_sinks); });
  check(name + " sinks", first_half,
        [=](const auto& ctx) { return core_layer<sink_spec, device_of<decltype(ctx)>>(ctx, how, true); });
}

}  // namespace

TEST_CASE("attention of one sequence to another: plain, causal, rotated, with a window, with sinks") {
  const auto frequencies = kernels::rope_inverse_frequencies(4, 100.0);
  check_core("full", {}, false, false);
  check_core("causal", {.mask = {}}, true, false);
  check_core("window", {.mask = kernels::attention_mask::window(3), .frequencies = frequencies}, false, true);
  check_core("scaled", {.scale = 0.1, .frequencies = frequencies}, true, true);
}

TEST_CASE("the core equals self-attention's engine, and its rotation the kernel's") {
  on_mesh(four{1, 1, 1, 1}, sizes_here(), 7, [](const context<cpu>& ctx) {
    using q_same = spec<shard<batch, dp>, seq, shard<heads, tp, tp_rep>, head_dim, replicate<cp>>;
    using k_same = spec<shard<batch, dp>, seq, shard<kv_heads, tp>, head_dim, replicate<cp, tp_rep>>;
    const auto q = constant<q_same>(ctx, 1);
    const auto k = constant<k_same>(ctx, 2), v = constant<k_same>(ctx, 3);
    const auto output = [&](const attention_core_options& how, const auto& from, const auto& to) {
      attention_core<double, q_same, k_same> core(ctx, "core", how);
      const auto o = core.forward(ctx, copy_of(ctx, from), copy_of(ctx, to), copy_of(ctx, v));
      return std::vector<double>(o.data(), o.data() + o.size());
    };
    kernels::attention_shape shape;
    shape.batch = 2, shape.q_len = shape.k_len = 8, shape.heads = 4, shape.kv_heads = 2, shape.head_dim = 4;
    shape.scale = 0.5;
    context_attention<double, whole_sequence> engine(ctx, shape, sequence_order::original(8));
    std::vector<double> expected(static_cast<std::size_t>(q.size()));
    engine.forward(ctx, {q.data(), k.data(), v.data()}, expected.data(), nullptr);
    check_near(output({.mask = {}}, q, k), expected, 1e-14, "causal");

    const auto frequencies = kernels::rope_inverse_frequencies(4, 100.0);
    std::vector<std::int64_t> positions{0, 1, 2, 3, 4, 5, 6, 7};
    std::vector<double> table(8 * 2 * 2);
    kernels::rope_table(ctx.device, positions.data(), 8, std::span<const double>(frequencies), table.data(),
                        table.data() + 16);
    auto turned_q = copy_of(ctx, q);
    auto turned_k = copy_of(ctx, k);
    kernels::rope_forward(ctx.device, turned_q.data(), 16, turned_q.data(), table.data(), table.data() + 16, 16, 4, 4,
                          16, 8);
    kernels::rope_forward(ctx.device, turned_k.data(), 8, turned_k.data(), table.data(), table.data() + 16, 16, 2, 4, 8,
                          8);
    const auto rotated = output({.frequencies = frequencies}, q, k);
    check_near(rotated, output({}, turned_q, turned_k), 1e-14, "rotated");
    CHECK(largest_difference(rotated, output({}, q, k)) > 1e-3);
    CHECK_THROWS_AS((attention_core<double, q_same, k_same>(ctx, "core", {.frequencies = {1.0}})), error);
  });
}

namespace {

/// Cross-attention as a layer of x with a constant memory, or of the memory with a constant x.
template <class S, bool OfX, class Device>
struct cross_layer : layer_types<double,
                                 std::conditional_t<OfX, typename cross_attention<double, S, Device>::input,
                                                    typename cross_attention<double, S, Device>::memory_input>,
                                 typename cross_attention<double, S, Device>::output, Device> {
  using inner = cross_attention<double, S, Device>;
  using x_spec = typename inner::input;
  using memory_spec = typename inner::memory_input;
  using input = std::conditional_t<OfX, x_spec, memory_spec>;
  using output = typename inner::output;
  using saved = typename inner::saved;
  inner attention;
  tensor<double, x_spec, Device> x;
  tensor<double, memory_spec, Device> memory;

  cross_layer(const context<Device>& ctx, const cross_attention_options& how)
      : attention(ctx, "cross", how), x(constant<x_spec>(ctx, 11)), memory(constant<memory_spec>(ctx, 12)) {}
  tensor<double, output, Device> forward(const microbatch<Device>& mb, const tensor<double, input, Device>& in,
                                         saved* keep) {
    if constexpr (OfX)
      return attention.forward(mb, in, memory, keep);
    else
      return attention.forward(mb, x, in, keep);
  }
  tensor<double, dual_t<input>, Device> backward(const microbatch<Device>& mb, const tensor<double, input, Device>& in,
                                                 saved& kept, const tensor<double, dual_t<output>, Device>& dy) {
    if constexpr (OfX)
      return attention.backward(mb, in, memory, kept, dy).x;
    else
      return attention.backward(mb, x, in, kept, dy).memory;
  }
  template <class F>
  void visit(F&& f) {
    attention.visit(f);
  }
};

template <class S>
void check_cross(const std::string& name, const cross_attention_options& how, bool first_half) {
  check(name + " x", first_half,
        [how](const auto& ctx) { return cross_layer<S, true, device_of<decltype(ctx)>>(ctx, how); });
  check(name + " memory", !first_half,
        [how](const auto& ctx) { return cross_layer<S, false, device_of<decltype(ctx)>>(ctx, how); });
}

}  // namespace

TEST_CASE("cross-attention, sequence-parallel, tensor-parallel, with parameters stored over dp") {
  check_cross<megatron_sp>("plain", {}, true);
  check_cross<megatron_tp>("biased", {.q_bias = true, .v_bias = true, .output_bias = true}, false);
  check_cross<stored_over_dp<megatron_sp>>("biased", {.q_bias = true, .v_bias = true, .output_bias = true}, true);
}

TEST_CASE("cross-attention of tokens in zigzag order, and with adapters") {
  check_cross<context_parallel<megatron_sp, ring<cp>, zigzag>>("output bias", {.output_bias = true}, false);
  check_cross<megatron_sp>("adapted", {.lora = {.k = {2, 1.5}, .o = {3, 0.5}}}, true);
}

TEST_CASE("cross-attention gathers x once and the memory once") {
  const auto make = [](const auto& ctx) {
    return cross_layer<megatron_sp, true, device_of<decltype(ctx)>>(ctx, cross_attention_options{});
  };
  const layer_plan plan = dry_run(four{1, 1, 2, 1}.shape(), sizes_here(), 0, make);
  CHECK(plan.forward.total("tp", collective::all_gather).calls == 2);
  CHECK(plan.forward.total("tp", collective::reduce_scatter).calls == 1);
  CHECK(plan.backward.total("tp", collective::all_gather).calls == 1);
  CHECK(plan.backward.total("tp", collective::reduce_scatter).calls == 2);
}
