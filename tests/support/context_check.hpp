#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "layer_check.hpp"
#include "plait/kernels/rope_frequencies.hpp"
#include "plait/models/strategies.hpp"
#include "plait/nn/attention.hpp"

/// Self-attention under context-parallel strategies, in any order of the sequence, against one rank.
namespace plait::test {

enum class masking { plain, window, documents, masked_ranks };

inline const char* name_of(masking m) {
  return m == masking::plain       ? "plain"
         : m == masking::window    ? "window"
         : m == masking::documents ? "documents"
                                   : "masked";
}

struct attention_case {
  std::int64_t batch_size = 2, seq_size = 32, heads_size = 8, kv_size = 2;
  masking mask = masking::plain;

  dim_sizes sizes() const {
    dim_sizes s = transformer_sizes(batch_size, seq_size);
    s.set(dim_of<hidden>, 16);
    s.set(dim_of<heads>, heads_size);
    s.set(dim_of<kv_heads>, kv_size);
    return s;
  }
  attention_options options() const { return {mask == masking::window ? 7 : 0, mask >= masking::documents}; }
  /// Three documents in each sequence; or one, whose last quarter (all of some ranks) sees nothing.
  std::int32_t document_start(std::int64_t sample, std::int64_t position) const {
    if (mask == masking::masked_ranks) return static_cast<std::int32_t>(position < seq_size * 3 / 4 ? 0 : seq_size);
    const std::int64_t first = 5 + sample, second = seq_size / 2 + 3;
    return static_cast<std::int32_t>(position < first ? 0 : position < second ? first : second);
  }
};

/// Rows of a global [batch, seq, width] between the order of the text and that of a sequence dim.
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
template <class T>
std::vector<double> collect_as_double(context<cpu>& ctx, const layout& from, const T* local) {
  const executor moves(from, whole_of(from), ctx.ranks, ctx.sizes, "collecting");
  std::vector<T> out(static_cast<std::size_t>(moves.to().local_size()));
  moves.run(ctx.device, local, out.data(), dtype_of<T>);
  return std::vector<double>(out.begin(), out.end());
}

/// One rank's share: everything in the order of the text. What is kept and what is communicated is as predicted.
template <class T, strategy S>
layer_values attend_on_rank(world& ranks, const attention_case& c) {
  cpu device;
  context<cpu> ctx{device, ranks, c.sizes(), 99};
  const std::vector<double> frequencies = kernels::rope_inverse_frequencies(4, 100.0, {});
  using layer_type = self_attention<T, S>;
  layer_type layer(ctx, "attention", frequencies, {}, {}, false, c.options());
  layer.visit([&](auto& p) {
    kernels::fill_normal(device, p.value(), p.part(), 5, p.stream_of(p.name()), 0.2, 0.4);
    p.gather(ctx);
    p.zero_gradient(ctx);
  });
  const sequence_order order = sequence_order_of<S>(ranks.shape(), ctx.sizes);
  const box part = local_box(layout_v<typename transformer_specs<S>::tokens>, ranks.shape(), ctx.sizes, ranks.rank());
  const std::vector<std::int64_t> positions = text_positions<S>(ctx);
  std::vector<std::int32_t> starts;
  for (std::int64_t b = 0; b < part.local[0]; ++b)
    for (const std::int64_t p : positions) starts.push_back(c.document_start(part.offset[0] + b, p));
  if (c.options().documents) ctx.document_starts = starts.data();

  using input = typename layer_type::input;
  const auto x =
      place_full<input>(ctx, as_type<T>(reordered(random_full(layout_v<input>, ctx.sizes, 1), c, order, false)));
  const auto dy = place_full<dual_t<input>>(
      ctx, as_type<T>(reordered(random_full(layout_v<input>, ctx.sizes, 2), c, order, false)));
  layer_values out;
  ranks.ledger().clear();
  typename layer_type::saved kept;
  const std::size_t before = device.bytes_in_use();
  const auto y = layer.forward(ctx, x, &kept);
  const auto held =
      static_cast<std::int64_t>(device.bytes_in_use() - before) - y.size() * static_cast<std::int64_t>(sizeof(T));
  CHECK(held == layer.saved_bytes(ctx));
  const ledger forward = ranks.ledger();
  ranks.ledger().clear();
  ctx.document_starts = nullptr;  // the backward pass knows them from the forward pass
  const auto dx = layer.backward(ctx, x, kept, dy);
  ledger expected_forward, expected_backward;
  layer.visit_collectives([&](const char* pass, const collective_cost& cost) {
    if (ranks.pruned(cost.axes).empty()) return;
    (pass[0] == 'f' ? expected_forward : expected_backward)
        .of(label_of(ranks.pruned(cost.axes)))
        .kinds[static_cast<std::size_t>(cost.kind)] += {1, cost.payload, cost.wire, 0.0};
  });
  check_books(forward, expected_forward);
  check_books(ranks.ledger(), expected_backward);
  out.y = reordered(collect_as_double(ctx, layout_v<input>, y.data()), c, order, true);
  out.dx = reordered(collect_as_double(ctx, layout_v<dual_t<input>>, dx.data()), c, order, true);
  layer.visit([&](auto& p) {
    p.reduce(ctx);
    out.gradients.emplace_back(p.name(), collect_as_double(ctx, dual(p.stored()), p.gradient()));
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

/// Bytes that the ranks of a cp group send each other in attention, forward and backward, without anything running.
struct sent_bytes {
  std::uint64_t forward = 0, backward = 0;
};
template <class T, strategy S>
sent_bytes context_bytes(const typename S::mesh& mesh, const attention_case& c) {
  sent_bytes sum;
  for (std::int64_t r = 0; r < mesh.size(); ++r) {
    cpu device;
    world ranks = world::planned(mesh.shape(), r);
    context<cpu> ctx{device, ranks, c.sizes(), 99};
    const self_attention<T, S> layer(ctx, "attention", kernels::rope_inverse_frequencies(4, 100.0, {}), {}, {}, false,
                                     c.options());
    layer.visit_collectives([&](const char* pass, const collective_cost& cost) {
      if (cost.axes.empty() || !(cost.axes[0] == axis_of<cp>)) return;
      const bool whole_group = cost.kind != collective::send;  // whose wire bytes are those of all its ranks
      (pass[0] == 'f' ? sum.forward : sum.backward) +=
          cost.wire / (whole_group ? static_cast<std::uint64_t>(mesh.shape().size(cost.axes)) : 1);
    });
  }
  return sum;
}

/// What an attention layer that cannot be made says.
template <class T, strategy S>
std::string layer_refusal(const typename S::mesh& mesh, const attention_case& c, const attention_options& options) {
  try {
    cpu device;
    world ranks = world::planned(mesh.shape(), 0);
    context<cpu> ctx{device, ranks, c.sizes(), 99};
    self_attention<T, S> layer(ctx, "layer", kernels::rope_inverse_frequencies(4, 100.0, {}), {}, {}, false, options);
  } catch (const error& e) {
    return e.what();
  }
  return "";
}

/// Every case on every mesh against `one(case)`, the values of one rank.
template <class T, strategy S, class One>
void check_context(std::initializer_list<typename S::mesh> meshes, One&& one) {
  for (const std::int64_t kv : {2, 8})
    for (const masking mask : {masking::plain, masking::window, masking::documents, masking::masked_ranks}) {
      attention_case c;
      c.kv_size = kv, c.mask = mask;
      const layer_values expected = one(c);
      for (const typename S::mesh& mesh : meshes) {
        INFO(name_of(mask) << ", " << kv << " kv heads, " << describe(mesh.shape()));
        for (const layer_values& got : attend_on<T, S>(mesh, c)) {
          constexpr double tolerance = sizeof(T) == 8 ? 1e-12 : 1e-5;
          check_near(got.y, expected.y, tolerance, "output");
          check_near(got.dx, expected.dx, tolerance, "gradient of the input");
          REQUIRE(got.gradients.size() == expected.gradients.size());
          for (std::size_t i = 0; i < got.gradients.size(); ++i)
            check_near(got.gradients[i].second, expected.gradients[i].second, tolerance,
                       "gradient of " + got.gradients[i].first);
        }
      }
    }
}

}  // namespace plait::test
