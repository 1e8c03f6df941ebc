// program: attention_cp
// Ring attention on up to 8 ranks equals one rank: forward, all gradients, bytes sent and kept.
#include "plait/nn/attention/chosen.hpp"
#include "support/context_check.hpp"
#include "support/on_mesh.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("ring, contiguous") {
  check_context<double, megatron_sp>(
      {four{1, 2, 1, 1}, four{1, 3, 1, 1}, four{1, 4, 1, 1}, four{1, 7, 1, 1}, four{1, 8, 1, 1}, four{2, 2, 2, 1}});
}

TEST_CASE("ring, zigzag") {
  check_context<double, context_parallel<megatron_sp, ring<cp>, zigzag>>(
      {four{1, 1, 1, 1}, four{1, 2, 1, 1}, four{1, 3, 2, 1}, four{1, 4, 1, 1}, four{1, 5, 1, 1}, four{1, 6, 1, 1},
       four{1, 7, 1, 1}, four{1, 8, 1, 1}, four{1, 2, 2, 1}, four{1, 2, 1, 2}});
}

TEST_CASE("ring, zigzag, in float") {
  check_context<float, context_parallel<megatron_sp, ring<cp>, zigzag>>({four{1, 4, 1, 1}, four{1, 2, 2, 1}});
}

TEST_CASE(
    "a ring sends (c-1)/c of keys and values, and as much again backward, with gradients in the type of statistics") {
  using zig = context_parallel<megatron_sp, ring<cp>, zigzag>;
  for (const std::int64_t ranks : {2, 4, 8})
    for (const std::int64_t kv : {2, 8}) {
      attention_case c;
      c.kv_size = kv;
      const auto block = static_cast<std::uint64_t>(2 * c.batch_size * c.seq_size / ranks * kv * 4) * sizeof(float);
      const auto hops = static_cast<std::uint64_t>(ranks * (ranks - 1));
      const sent_bytes all = context_bytes<float, zig>(four{1, ranks, 1, 1}, c);
      CHECK(all.forward == hops * block);
      CHECK(all.backward == 2 * hops * block);
      const sent_bytes half = context_bytes<float, megatron_sp>(four{1, ranks, 1, 1}, c);
      CHECK(half.forward == hops / 2 * block);  // blocks that no query sees do not travel
      CHECK(half.backward == hops * block);
      c.mask.mask =
          masks::window(7);  // of 7 tokens: blocks of 8 or more reach the next rank only, blocks of 4 the next two
      const sent_bytes near = context_bytes<float, megatron_sp>(four{1, ranks, 1, 1}, c);
      CHECK(near.forward == static_cast<std::uint64_t>(ranks == 8 ? 7 + 6 : ranks - 1) * block);
    }
}

namespace {

/// A policy whose engine does not declare sinks.
struct without_sinks : whole_sequence {
  template <class Precision, class Device>
  struct engine : whole_attention<Precision, Device> {
    using whole_attention<Precision, Device>::whole_attention;
    static constexpr bool with_sinks = false;
  };
};

}  // namespace

TEST_CASE("invalid rings are refused by name and value") {
  attention_case c;
  CHECK(layer_refusal<float, megatron_sp>(four{1, 2, 1, 1}, c, {.mask = kernels::attention_mask::local(-1, 0)}) ==
        "layer: mask.before = -1, must be from 0 to 2^62, which is all");
  CHECK(layer_refusal<float, megatron_sp>(four{1, 2, 1, 1}, c, {.mask = {5, 0, 3}}) ==
        "layer: mask.prefix = 3, must be at least 0, and 0 where mask.before is not all");
  using other = context_parallel<megatron_sp, without_sinks>;
  CHECK(layer_refusal<float, other>(four{1, 1, 1, 1}, c, {.sinks = true}) ==
        "layer: the engine of this attention policy has no sinks (attention_options::sinks)");
  CHECK(layer_refusal<float, other>(four{1, 1, 1, 1}, c, {}).empty());
  c.seq_size = 3;
  using zig = context_parallel<megatron_sp, ring<cp>, zigzag>;
  const std::string parts = "seq is 3, sharded over cp=4 = 4 ranks; it must be at least 4";
  CHECK(has(layer_refusal<float, megatron_sp>(four{1, 4, 1, 1}, c, {}), parts));
  CHECK(has(layer_refusal<float, zig>(four{1, 4, 1, 1}, c, {}), "z" + parts));
  CHECK(layer_refusal<float, zig>(four{1, 3, 1, 1}, c, {}).empty());
}

TEST_CASE("documents are neither forgotten nor ignored") {
  for (const bool expected : {false, true}) {
    attention_case c;
    const std::string text = error_on_mesh(four{1, 1, 1, 1}, c.sizes(), 99, [&](const context<cpu>& ctx) {
      using layer_type = self_attention<double, context_parallel<megatron_sp, whole_sequence>>;
      layer_type layer(ctx, "attention", {.documents = expected});
      layer.visit([&](auto& p) { p.initialize(ctx); });
      gather_parameters(ctx, layer);
      const std::vector<std::int32_t> starts(static_cast<std::size_t>(c.batch_size * c.seq_size));
      microbatch<cpu> mb(ctx);
      if (!expected) mb.document_starts = starts.data();
      const tensor<double, layer_type::input> x(ctx);
      layer.forward(mb, x);
    });
    CHECK(has(text, expected ? "the microbatch has no document_starts" : "attention_options::documents is not set"));
  }
}

TEST_CASE("if one rank fails, the others do not wait for its keys") {
  const attention_case c{.mask = {"documents", {}, true}};
  const std::string text = error_on_mesh(four{1, 4, 1, 1}, c.sizes(), 99, [&](const context<cpu>& ctx) {
    using layer_type = self_attention<double, megatron_sp>;
    layer_type layer(ctx, "attention", c.options());
    layer.visit([&](auto& p) { p.initialize(ctx); });
    gather_parameters(ctx, layer);
    const std::vector<std::int32_t> starts(static_cast<std::size_t>(c.batch_size * c.seq_size / 4));
    microbatch<cpu> mb(ctx);
    if (ctx.ranks.rank() != 1) mb.document_starts = starts.data();
    tensor<double, layer_type::input> x(ctx);
    std::fill_n(x.data(), x.size(), 0.5);
    layer.forward(mb, x);
  });
  CHECK(has(text, "rank 1: attention_options::documents is set, but the microbatch has no document_starts"));
}

namespace {

struct peaks {
  std::int64_t forward = 0, backward = 0;  ///< the most numbers that rank 0 held in addition to the caller's arrays
};

template <class Policy>
peaks most_memory(std::int64_t ranks, std::int64_t length) {
  peaks most;
  on_mesh(mesh<axis<cp>>{ranks}, {}, 0, [&](const context<cpu>& ctx) {
    kernels::attention_shape shape;
    shape.heads = 2, shape.kv_heads = 1, shape.head_dim = 32;
    context_attention<double, Policy> attention(ctx, shape, sequence_order::zigzag(length, ranks));
    const auto n = static_cast<std::size_t>(length / ranks * 64);
    std::vector<double> q(n, 0.1), k(n / 2, 0.1), v(n / 2, 0.2), o(n), dq(n), dk(n / 2), dv(n / 2);
    typename context_attention<double, Policy>::saved kept;
    const auto held = [&] { return static_cast<std::int64_t>(ctx.device.peak_bytes() / sizeof(double)); };
    attention.forward(ctx, {q.data(), k.data(), v.data()}, o.data(), &kept);
    if (ctx.ranks.rank() == 0) most.forward = held();
    ctx.device.reset_peak();
    attention.backward(ctx, {q.data(), k.data(), v.data()}, o.data(), q.data(), kept,
                       {dq.data(), dk.data(), dv.data()});
    if (ctx.ranks.rank() == 0) most.backward = held();
  });
  return most;
}

}  // namespace

TEST_CASE("two blocks of keys and values exist at a time, for any number of ranks") {
  const std::int64_t tokens = 256, block = tokens * 64;  // of one rank; numbers in a block of keys and values
  const peaks four_ranks = most_memory<ring<cp>>(4, 4 * tokens), eight_ranks = most_memory<ring<cp>>(8, 8 * tokens);
  CHECK(eight_ranks.forward <= four_ranks.forward + block / 4);
  CHECK(eight_ranks.backward <= four_ranks.backward + block / 4);
  const peaks gathered = most_memory<all_gather_kv<cp>>(8, 8 * tokens);
  CHECK(gathered.forward > eight_ranks.forward + 4 * block);
  CHECK(gathered.backward > eight_ranks.backward + 4 * block);
  CHECK(gathered.backward < tokens * 8 * tokens);  // no array has a score for each pair
}
