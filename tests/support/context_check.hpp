#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "layer_check.hpp"
#include "on_mesh.hpp"
#include "plait/kernels/settings.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/strategy.hpp"

/// Self-attention under context-parallel strategies, in any order of the sequence, against one rank.
namespace plait::test {

/// A mask, the kind of packed documents, and what changes scores. Documents: three in each sequence; or one, whose last
/// quarter (all tokens of some ranks) sees nothing.
struct masking {
  const char* name = "causal";
  kernels::attention_mask mask{};
  bool documents = false, nothing_at_end = false;
  kernels::attention_score score{};
  bool sinks = false;
};
using masks = kernels::attention_mask;
/// Chunks of 6 tokens, as in Llama 4. The other mask has every third token and near ones, as in sparse transformers.
inline bool same_chunk(std::int64_t query, std::int64_t key) { return query / 6 == key / 6; }
inline bool strided(std::int64_t query, std::int64_t key) { return key % 3 == 0 || query - key < 2; }
inline const std::vector<masking> maskings{
    {},
    {"window", masks::window(7)},
    {"itself and one", masks::window(2)},
    {"full", masks::full()},
    {"local", masks::local(3, 6)},
    {"ahead", masks::local(0, 5)},
    {"all before, three after", masks::local(masks::all, 3)},
    {"two before, all after", masks::local(2, masks::all)},
    {"prefix", masks::prefix_lm(11)},
    {"long prefix", masks::prefix_lm(27)},
    {"documents", {}, true},
    {"documents in a window", masks::window(4), true},
    {"masked ranks", {}, true, true},
    {"documents, full", masks::full(), true},
    {"documents, local", masks::local(3, 6), true},
    {"documents, two before and all after", masks::local(2, masks::all), true, false, {.alibi = true}},
    {"documents with a prefix", masks::prefix_lm(11), true},
    {"masked ranks, full", masks::full(), true, true, {}, true},
    {"cap", {}, false, false, {.cap = 0.3}},
    {"ALiBi", {}, false, false, {.alibi = true}},
    {"cap and ALiBi, full", masks::full(), false, false, {.cap = 0.3, .alibi = true}},
    {"cap and ALiBi with documents in a window", masks::window(4), true, false, {.cap = 0.3, .alibi = true}},
    {"chunks", masks::causal().where(same_chunk)},
    {"whole chunks with ALiBi", masks::full().where(same_chunk), false, false, {.alibi = true}},
    {"strides with documents in a window", masks::window(9).where(strided), true},
    {"sinks", {}, false, false, {}, true},
    {"sinks in a window", masks::window(7), false, false, {}, true},
    {"sinks and masked ranks", {}, true, true, {.cap = 0.3, .alibi = true}, true},
};

struct attention_case {
  std::int64_t batch_size = 2, seq_size = 32, heads_size = 8, kv_size = 2;
  masking mask{};

  dim_sizes sizes() const {
    dim_sizes s = transformer_sizes(batch_size, seq_size);
    s.set(dim_of<hidden>, 16);
    s.set(dim_of<heads>, heads_size);
    s.set(dim_of<kv_heads>, kv_size);
    return s;
  }
  attention_options options() const {
    return {.mask = mask.mask, .score = mask.score, .sinks = mask.sinks, .documents = mask.documents};
  }
  std::int32_t document_start(std::int64_t sample, std::int64_t position) const {
    if (mask.nothing_at_end) return static_cast<std::int32_t>(position < seq_size * 3 / 4 ? 0 : seq_size);
    const std::int64_t first = 5 + sample, second = seq_size / 2 + 3;
    return static_cast<std::int32_t>(position < first ? 0 : position < second ? first : second);
  }
};

/// Rows of a global [batch, seq, width] between the original order and that of a sequence dim.
inline std::vector<double> reordered(const std::vector<double>& from, const attention_case& c,
                                     const sequence_order& order, bool to_text) {
  std::vector<double> to(from.size());
  const std::size_t seq_size = static_cast<std::size_t>(c.seq_size);
  const std::size_t width = from.size() / (static_cast<std::size_t>(c.batch_size) * seq_size);
  for (std::size_t row = 0; row < from.size() / width; ++row) {
    const auto position = static_cast<std::size_t>(order.position(static_cast<std::int64_t>(row % seq_size)));
    const std::size_t text = row - row % seq_size + position;
    for (std::size_t i = 0; i < width; ++i)
      to[(to_text ? text : row) * width + i] = from[(to_text ? row : text) * width + i];
  }
  return to;
}

template <class T>
std::vector<T> as_type(const std::vector<double>& v) {
  return std::vector<T>(v.begin(), v.end());
}

/// The layer of a case; `document_starts` of its tokens must live as long as the microbatch.
template <class T, strategy S, class Device>
self_attention<T, S, Device> attention_of(const context<Device>& ctx, const attention_case& c) {
  attention_options how = c.options();
  how.frequencies = kernels::rope_inverse_frequencies(4, 100.0, {});
  return self_attention<T, S, Device>(ctx, "attention", std::move(how));
}

/// The bytes that the layer keeps and sends, by a dry run.
template <class T, strategy S>
layer_plan plan_of_attention(const mesh_shape& mesh, std::int64_t rank, const attention_case& c) {
  world ranks = world::counting(mesh, rank);
  counting_device device;
  const context<counting_device> ctx{device, ranks, c.sizes(), 99};
  auto layer = attention_of<T, S>(ctx, c);
  gather_parameters(ctx, layer);
  zero_gradients(ctx, layer);
  ranks.ledger().clear();
  using input = typename decltype(layer)::input;
  const tensor<T, input, counting_device> x(ctx);
  const tensor<T, dual_t<input>, counting_device> dy(ctx);
  const std::int32_t nothing = 0;
  microbatch<counting_device> mb(ctx);
  if (c.options().documents) mb.document_starts = &nothing;
  layer_plan plan;
  typename decltype(layer)::saved kept;
  const auto before = static_cast<std::int64_t>(device.bytes_in_use());
  {
    const auto y = layer.forward(mb, x, &kept);
    plan.kept_bytes =
        static_cast<std::int64_t>(device.bytes_in_use()) - before - y.size() * static_cast<std::int64_t>(sizeof(T));
  }
  plan.forward = ranks.ledger();
  ranks.ledger().clear();
  layer.backward(mb, x, kept, dy);
  plan.backward = ranks.ledger();
  return plan;
}

/// One rank's results, in the original order. Checks that kept bytes and communication are as predicted.
template <class T, strategy S>
layer_values attend_on_rank(world& ranks, const attention_case& c) {
  cpu device;
  const context<cpu> ctx{device, ranks, c.sizes(), 99};
  auto layer = attention_of<T, S>(ctx, c);
  using layer_type = decltype(layer);
  fill_parameters(ctx, layer, {});
  const sequence_order order = sequence_order_of<S>(ranks.shape(), ctx.sizes);
  const box part = local_box(layout_v<typename transformer_specs<S>::tokens>, ranks.shape(), ctx.sizes, ranks.rank());
  const std::vector<std::int64_t> positions = order.positions(part.offset[1], part.local[1]);
  std::vector<std::int32_t> starts;
  for (std::int64_t b = 0; b < part.local[0]; ++b)
    for (const std::int64_t p : positions) starts.push_back(c.document_start(part.offset[0] + b, p));
  microbatch<cpu> mb(ctx);
  if (c.options().documents) mb.document_starts = starts.data();

  using input = typename layer_type::input;
  const auto x =
      place_full<input>(ctx, as_type<T>(reordered(random_full(layout_v<input>, ctx.sizes, 1), c, order, false)));
  const auto dy = place_full<dual_t<input>>(
      ctx, as_type<T>(reordered(random_full(layout_v<input>, ctx.sizes, 2), c, order, false)));
  layer_values out;
  ranks.ledger().clear();
  typename layer_type::saved kept;
  const std::size_t before = device.bytes_in_use();
  const auto y = layer.forward(mb, x, &kept);
  const auto held =
      static_cast<std::int64_t>(device.bytes_in_use() - before) - y.size() * static_cast<std::int64_t>(sizeof(T));
  const ledger forward = ranks.ledger();
  ranks.ledger().clear();
  const auto dx = layer.backward(mb, x, kept, dy);
  const layer_plan plan = plan_of_attention<T, S>(ranks.shape(), ranks.rank(), c);
  CHECK(held == plan.kept_bytes);
  CHECK(compare_ledgers(forward, plan.forward).text() == "");
  CHECK(compare_ledgers(ranks.ledger(), plan.backward).text() == "");
  out.y = reordered(collect_full(ctx, layout_v<input>, y.data()), c, order, true);
  out.dx = reordered(collect_full(ctx, layout_v<dual_t<input>>, dx.data()), c, order, true);
  layer.visit([&](auto& p) {
    const auto gradient = p.reduce(ctx);
    out.gradients.emplace_back(p.name(), collect_full(ctx, dual(p.stored()), gradient.data()));
  });
  return out;
}

template <class T, strategy S>
std::vector<layer_values> attend_on(const typename S::mesh& mesh, const attention_case& c) {
  std::vector<layer_values> all(static_cast<std::size_t>(mesh.size()));
  threads::run(static_cast<int>(mesh.size()), [&](threads::communicator comm) {
    world ranks(mesh.shape(), comm);
    all[static_cast<std::size_t>(ranks.rank())] = attend_on_rank<T, S>(ranks, c);
  });
  return all;
}

/// Bytes that the ranks of a cp group send each other in attention, forward and backward, by a dry run.
struct sent_bytes {
  std::uint64_t forward = 0, backward = 0;
};
template <class T, strategy S>
sent_bytes context_bytes(const typename S::mesh& mesh, const attention_case& c) {
  sent_bytes sum;
  for (std::int64_t r = 0; r < mesh.size(); ++r) {
    const layer_plan plan = plan_of_attention<T, S>(mesh.shape(), r, c);
    for (const auto& [book, bytes] : {std::pair{&plan.forward, &sum.forward}, {&plan.backward, &sum.backward}})
      for (const ledger::row& row : book->rows) {
        if (!row.label.starts_with("cp")) continue;
        for (int k = 0; k < collective_kinds; ++k) {
          const auto kind = static_cast<collective>(k);
          const std::uint64_t wire = row.kinds[static_cast<std::size_t>(k)].wire;
          // A send counts the bytes of one rank; a collective counts those of all ranks of the group.
          *bytes +=
              wire / (kind == collective::send ? 1 : static_cast<std::uint64_t>(mesh.shape().extent(axis_of<cp>)));
        }
      }
  }
  return sum;
}

/// The text of the error for an attention layer that cannot be made.
template <class T, strategy S>
std::string layer_refusal(const typename S::mesh& mesh, const attention_case& c, attention_options how) {
  return text_thrown_by([&] {
    cpu device;
    world ranks = world::counting(mesh.shape(), 0);
    const context<cpu> ctx{device, ranks, c.sizes(), 99};
    how.frequencies = kernels::rope_inverse_frequencies(4, 100.0, {});
    self_attention<T, S> layer(ctx, "layer", std::move(how));
  });
}

using four = megatron_sp::mesh;

/// The results of one rank in double, computed once for all strategies and meshes of a program.
inline const layer_values& attend_alone(const attention_case& c) {
  static std::map<std::tuple<std::string, std::int64_t, std::int64_t>, layer_values> all;
  const auto [one, is_new] = all.try_emplace({c.mask.name, c.kv_size, c.seq_size});
  if (is_new) one->second = attend_on<double, context_parallel<megatron_sp, whole_sequence>>(four{1, 1, 1, 1}, c)[0];
  return one->second;
}

/// Compares every mask on every mesh with one rank in double. The numbers of kv heads alternate, so every mask and
/// every mesh meets both. Most sequence lengths do not divide by the ranks.
template <class T, strategy S>
void check_context(std::initializer_list<typename S::mesh> meshes) {
  std::size_t turn = 0;
  for (const masking& mask : maskings) {
    std::size_t place = turn++;
    for (const typename S::mesh& mesh : meshes) {
      const std::int64_t ranks = mesh.shape().size(context_axes<typename S::attention>), kv = place++ % 2 == 0 ? 2 : 8;
      const attention_case c{.seq_size = kv == 8 && 32 % (2 * ranks) == 0 ? 32 : 37, .kv_size = kv, .mask = mask};
      const layer_values& one = attend_alone(c);
      INFO(mask.name << ", " << kv << " kv heads, " << describe(mesh.shape()));
      for (const layer_values& got : attend_on<T, S>(mesh, c)) {
        constexpr double tolerance = sizeof(T) == 8 ? 1e-12 : 1e-5;
        check_near(got.y, one.y, tolerance, "output");
        check_near(got.dx, one.dx, tolerance, "gradient of the input");
        REQUIRE(got.gradients.size() == one.gradients.size());
        for (std::size_t i = 0; i < got.gradients.size(); ++i)
          check_near(got.gradients[i].second, one.gradients[i].second, tolerance,
                     "gradient of " + got.gradients[i].first);
      }
    }
  }
}

}  // namespace plait::test
