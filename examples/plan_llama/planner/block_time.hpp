// The times of one transformer block, of the embedding and of the head, for one microbatch on one rank: forward,
// backward, and recomputation. step_time.hpp adds them up to a step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "plait/plan/machine_time.hpp"
#include "plan_llama/planner/training_layout.hpp"

namespace plait::planner {

/// Operations per second of the program's fused attention kernel.
inline double attention_rate(const hardware& h, const software& program) {
  const double generation = program.attention == attention_kernel::flash1   ? h.flash1
                            : program.attention == attention_kernel::flash2 ? h.flash2
                                                                            : 1;
  return attention_rate(h, program.products) * generation;
}

/// The forward and the backward time of attention without projections: scores, softmax and weighted values.
struct attention_seconds {
  double forward = 0, backward = 0;
};

/// Returns the times of `queries` positions over `seq` keys each. `width` is the number of the rank's query heads times
/// head_dim. A fused kernel computes visible pairs, and whole blocks that the causal mask cuts. For each pair and width
/// it has 4 operations forward, and 10 backward, where scores are computed again (Dao, FlashAttention-2, 2023). An
/// unfused kernel computes the whole square, with 8 operations backward, and moves scores through memory: 8 bytes
/// forward and 14 backward for each, and 5 more in both with dropout (Korthikanti et al. 2022, section 4.1, counts the
/// kept bytes).
inline attention_seconds attention_time(const hardware& h, const software& program, const transformer_shape& m,
                                        double queries, std::int64_t seq, double width) {
  const double square = queries * static_cast<double>(seq);
  if (program.attention != attention_kernel::unfused) {
    const double visible = m.visible(seq) + h.attention_block / (2 * static_cast<double>(seq));
    const double rate = attention_rate(h, program), seen = square * width * std::min(1.0, visible);
    return {4 * seen / rate + h.launch, 10 * seen / rate + 2 * h.launch};
  }
  const number_kind kind = program.products == number_kind::f32 ? number_kind::f32 : number_kind::bf16;
  const auto depth = static_cast<double>(m.head_dim);
  const double fill = depth / (depth + h.product_depth);
  const double product = 2 * square * width / (h.peak_of(kind) * h.share_of(kind) * fill);
  const double heads = width / depth, scores = square * heads * program.activation_bytes() / 2;
  const double dropout = m.dropout ? 5 : 0;
  const double extra = program.fused ? 1 : 2;  // unfused: scale, mask and softmax are separate kernels
  return {2 * product + memory_seconds(h, extra * (8 + dropout) * scores, 5),
          4 * product + memory_seconds(h, extra * (14 + dropout) * scores, 8)};
}

/// Seconds of a pass by purpose. Communication is the part that overlap does not hide.
struct pass_time {
  double products = 0, attention = 0, memory = 0, tensor = 0, context = 0, experts = 0;

  constexpr double computing() const { return products + attention + memory; }
  constexpr double sum() const { return computing() + tensor + context + experts; }
  constexpr pass_time& operator+=(const pass_time& other) {
    products += other.products, attention += other.attention, memory += other.memory;
    tensor += other.tensor, context += other.context, experts += other.experts;
    return *this;
  }
  friend constexpr pass_time operator*(double factor, const pass_time& p) {
    return {factor * p.products, factor * p.attention, factor * p.memory,
            factor * p.tensor,   factor * p.context,   factor * p.experts};
  }
};

/// The passes of a block, an embedding or a head. `input` and `weight` are the halves of the backward pass.
struct part_time {
  pass_time forward, input, weight, again;  ///< again: recomputation

  constexpr double backward() const { return input.sum() + weight.sum() + again.sum(); }
};

/// Sizes of one microbatch on one rank that all formulas share.
struct rank_sizes {
  double tokens = 0;                    ///< tokens of the microbatch on the rank
  double cut_tokens = 0;                ///< tokens on the rank under sequence parallelism
  double sent = 0;                      ///< rows that it sends to experts
  double routed = 0;                    ///< rows that its experts get, if all are chosen equally often
  double query = 0, kv = 0, vocab = 0;  ///< widths on the rank
  double dense = 0, expert = 0;         ///< widths of the MLP that all tokens pass, and of an expert
  double exchanged_kv =
      0;  ///< width of keys, or of values, as ulysses sends and keeps them: at least a head for each rank of cp
  double hidden = 0;

  rank_sizes(const training_job& job, const training_layout& l)
      : tokens(static_cast<double>(l.microbatch) * static_cast<double>(job.seq) / static_cast<double>(l.cp)),
        cut_tokens(l.cuts_sequence() ? tokens / static_cast<double>(l.tp) : tokens),
        sent(l.folds_experts ? cut_tokens : tokens),
        routed(sent * static_cast<double>(job.model.chosen)),
        query(job.model.query_width() / static_cast<double>(l.tp)),
        kv(static_cast<double>(job.model.head_dim) *
           std::max(1.0, static_cast<double>(job.model.kv_heads) / static_cast<double>(l.tp))),
        vocab(static_cast<double>(job.model.vocab) / static_cast<double>(l.tp)),
        dense(static_cast<double>(job.model.dense_ffn()) / static_cast<double>(l.tp)),
        expert(static_cast<double>(job.model.ffn) / static_cast<double>(l.folds_experts ? 1 : l.tp)),
        exchanged_kv(l.context == context_kind::ulysses ? std::max(kv, static_cast<double>(l.cp * job.model.head_dim))
                                                        : kv),
        hidden(static_cast<double>(job.model.hidden)) {}

  /// Returns the number of values between the products of MLPs.
  double activated() const { return tokens * dense + routed * expert; }
};

/// Returns the number of a block's parts that all tokens pass: attention, and an MLP.
inline double dense_parts(const transformer_shape& m) { return m.dense_ffn() > 0 ? 2 : 1; }
/// Returns the number of parts around which tensor parallelism communicates. Experts that it cuts are one part.
inline double tensor_parts(const transformer_shape& m, const training_layout& l) {
  return dense_parts(m) + (m.experts > 0 && !l.folds_experts ? 1 : 0);
}

/// Returns the seconds in which each rank sends its tokens, `bytes` together, to the ranks of `chosen` experts each, or
/// gets them back. Experts are chosen evenly. An all-to-all sends a token once for each of its experts. With `once`, a
/// token is sent once into every unit that has one of its experts, and is forwarded within the unit (DeepEP).
inline double exchange_seconds(const hardware& h, const group_place& g, double bytes, double chosen, bool once) {
  if (!once) return collective_seconds(h, g, collective::all_to_all, bytes * chosen);
  const auto n = static_cast<double>(g.size);
  double steps = 0;
  crossing_seconds all;
  each_crossed_level(h, g, [&](const network_level& level, double inside, double together) {
    const double units = n / inside, others = (units - 1) * (1 - std::pow(1 - 1 / units, chosen));
    all.add(level, bytes * std::min(others, chosen * (n - inside) / n) * sharing(level) / level.bandwidth);
    steps += (n / inside - n / together) * level.latency;
  });
  return all.launch + steps + all.slowest;
}

namespace detail {

/// Returns the seconds that a tensor-parallel pass around one sub-layer waits for an all-gather and a reduce-scatter,
/// or for an all-reduce. Overlap in chunks needs links as fast as those of the innermost level; beyond it nothing is
/// hidden. Backward, the reduction of input gradients may run during the products of weight gradients: the
/// reduce-scatter, or the all-reduce.
inline double tensor_seconds(const hardware& h, const training_job& job, const training_layout& l, double bytes,
                             bool backward) {
  if (l.tp == 1) return 0;
  const group_place group = place_group(h, l.tp_axis());
  const software& program = job.program;
  if (backward && program.async_tensor && !program.overlaps_tensor)
    return l.cuts_sequence() ? collective_seconds(h, group, collective::all_gather, bytes) : 0;
  const double all = l.cuts_sequence() ? collective_seconds(h, group, collective::all_gather, bytes) +
                                             collective_seconds(h, group, collective::reduce_scatter, bytes)
                                       : collective_seconds(h, group, collective::all_reduce, bytes);
  const bool near = group.together.front() == group.size;
  return all * (near && program.overlaps_tensor ? 1 - h.tensor_hidden : 1);
}

/// Returns the seconds that attention waits for keys and values of other ranks, forward and backward.
inline attention_seconds context_seconds(const hardware& h, const training_job& job, const training_layout& l,
                                         const rank_sizes& z, const attention_seconds& attention) {
  if (l.cp == 1) return {};
  const double e = job.program.activation_bytes(), own = z.tokens * 2 * z.kv * e, cp = static_cast<double>(l.cp);
  const group_place group = place_group(h, l.cp_axis());
  if (l.context == context_kind::all_gather_kv)
    return {collective_seconds(h, group, collective::all_gather, own * cp),
            collective_seconds(h, group, collective::all_gather, own * cp) +
                collective_seconds(h, group, collective::reduce_scatter, own * cp)};
  if (l.context == context_kind::ulysses) {  // exchanges q, k and v, then the output; and their gradients
    const double there = collective_seconds(h, group, collective::all_to_all,
                                            z.tokens * (z.query + 2 * z.exchanged_kv) * e),
                 back = collective_seconds(h, group, collective::all_to_all, z.tokens * z.query * e);
    return {there + back, there + back};
  }
  // In a ring a block of keys and values travels while the one before it is used; gradients travel with them.
  const auto waits = [&](double bytes, double computed) {
    const double hop = message_seconds(h, l.cp_axis(), bytes) + 2 * h.launch;
    return (cp - 1) * std::max(hop - computed / cp, 0.0) + (cp - 1) * 2 * h.launch;
  };
  return {waits(own, attention.forward), waits(2 * own, attention.backward)};
}

/// Returns the seconds of copies that put gathered tokens of tp in their places, or tokens before a reduction in the
/// order of ranks. With several sequences they are read and written.
inline double packing_seconds(const hardware& h, const training_job& job, const training_layout& l, double bytes) {
  return job.program.packs && l.cuts_sequence() && l.microbatch > 1 ? memory_seconds(h, 2 * bytes, 1) : 0;
}

/// Bytes that a block's elementwise kernels read and write for one microbatch.
struct elementwise {
  double norms = 0, additions = 0, rotary = 0, backward = 0, launches = 0;
  double activation = 0, activation_backward = 0;  ///< separate, because computing may take longer than moving

  constexpr double forward() const { return norms + additions + rotary; }
};

/// Returns the bytes of elementwise kernels. Values of each token, forward: a norm 2 hidden; a residual addition 3
/// hidden with a byte of dropout's mask; rotary positions 2 (query + kv); the activation 3 or 2 wide. Backward: a norm
/// with the addition of the residual's gradient 4 hidden; rotary positions 2 (query + kv); the activation 5 or 3 wide.
///
/// Llama's reference code has one kernel for each operation, and norms and rotary positions in float: a norm has 36
/// bytes forward and 62 backward, rotary positions 20 and 20, the activation 10 and 18. Gradients of biases read those
/// of each product. A GPT's eager kernels (PyTorch's native_layer_norm_backward, autograd's sums) are: a norm backward
/// in two kernels 5 hidden; the sum of a residual's gradients 3 hidden; the joined gradients of queries, keys and
/// values 2 (query + 2 kv). FlashAttention 1 first reads its output and the output's gradient. It sets, reads and
/// rounds a float gradient of queries: 7 query.
inline elementwise elementwise_bytes(const training_job& job, const rank_sizes& z) {
  const transformer_shape& m = job.model;
  const double e = job.program.activation_bytes(), half = e / 2, gates = m.wide_products();
  const bool apart = !job.program.fused, reference = apart && m.gated;
  const double hidden = z.hidden * z.cut_tokens, heads = m.positions == 0 ? (z.query + z.kv) * z.tokens : 0;
  const double wide = z.activated(), masks = m.dropout ? 2 * hidden : 0;
  elementwise out;
  out.norms = (reference && !job.program.fused_norms ? 72 * half : 4 * e) * hidden;
  out.additions = 6 * e * hidden + masks;
  out.rotary = (apart ? 20 * half : 2 * e) * heads;
  out.activation = (reference ? 10 * half : (gates + 1) * e) * wide;
  out.activation_backward = (reference ? 18 * half : (2 * gates + 1) * e) * wide;
  out.backward = (reference && !job.program.fused_norms ? 124 * half : 8 * e) * hidden + out.rotary + masks;
  if (apart && !m.gated) {
    out.backward += 8 * e * hidden + 2 * e * z.tokens * (z.query + 2 * z.kv);
    if (job.program.attention == attention_kernel::flash1) out.backward += 7 * e * z.tokens * z.query;
  }
  if (m.biases) out.backward += e * (z.tokens * (z.query + 2 * z.kv) + wide + 2 * hidden);
  out.launches = reference ? 30 : apart ? 12 : 6;
  if (m.experts > 0) {
    // Tokens are copied into the order of their experts and back, on both sides of the exchange. The router's scores
    // are in float.
    const double moved = e * z.hidden * (2 * z.sent + 6 * z.routed);
    const double scores = 24 * z.cut_tokens * static_cast<double>(m.experts);
    out.additions += moved + scores, out.backward += moved + scores, out.launches += 10;
  }
  return out;
}

/// Returns the seconds of one grouped product of all experts of a rank, with m rows together. Each expert has its own
/// matrix to read.
inline double grouped_product_seconds(const hardware& h, number_kind kind, double m, double n, double k, double experts,
                                      bool adds = false) {
  const double matrices = operand_bytes(kind) * (experts - 1) * k * n / (h.memory_bandwidth * h.memory_share);
  return product_seconds(h, kind, m, n, k, adds) + matrices;
}

/// Adds the times of a block's experts: their products, the router's product, and the exchange of tokens with the ranks
/// of their experts, forward and backward.
inline void add_experts(part_time& out, const hardware& h, const training_job& job, const training_layout& l,
                        const rank_sizes& z) {
  const transformer_shape& m = job.model;
  const number_kind kind = job.program.products;
  const double mine = static_cast<double>(m.experts) / static_cast<double>(l.ep), gates = m.wide_products();
  const struct {
    double in, out;
  } products[] = {{z.hidden, gates * z.expert}, {z.expert, z.hidden}};
  for (const auto& p : products) {
    out.forward.products += grouped_product_seconds(h, kind, z.routed, p.out, p.in, mine);
    out.input.products += grouped_product_seconds(h, kind, z.routed, p.in, p.out, mine);
    // The weight gradient of each expert sums over the tokens of that expert.
    out.weight.products += mine * (product_seconds(h, kind, p.out, p.in, z.routed / mine, true) - h.launch) + h.launch;
  }
  const auto wide = static_cast<double>(m.experts);
  const number_kind router = kind == number_kind::f32 ? kind : number_kind::bf16;
  out.forward.products += product_seconds(h, router, z.cut_tokens, wide, z.hidden);
  out.input.products += product_seconds(h, router, z.cut_tokens, z.hidden, wide);
  out.weight.products += product_seconds(h, router, wide, z.hidden, z.cut_tokens, true);
  if (m.limited)
    for (const axis_place& axis : {l.tp_axis(), l.cp_axis()})
      if (axis.extent > 1)
        out.forward.experts += collective_seconds(h, place_group(h, axis), collective::all_gather,
                                                  4 * z.tokens * static_cast<double>(m.chosen));
  const double there = exchange_seconds(h, place_group(h, l.ep_axis(), l.ep_over_dp()),
                                        z.sent * z.hidden * job.program.activation_bytes(),
                                        static_cast<double>(m.chosen), job.program.sends_tokens_once);
  out.forward.experts += 2 * there;
  out.input.experts = 2 * there;
}

}  // namespace detail

/// Returns the times of a block for one microbatch. Operands in fp8 are made from bf16, also transposed: 4 bytes each.
inline part_time block_time(const hardware& h, const training_job& job, const training_layout& l) {
  const transformer_shape& m = job.model;
  const software& program = job.program;
  const rank_sizes z(job, l);
  const double e = program.activation_bytes(), gates = m.wide_products();
  const number_kind kind = program.products;
  part_time out;

  const struct {
    double in, out;
  } products[] = {
      {z.hidden, z.query + 2 * z.kv}, {z.query, z.hidden}, {z.hidden, gates * z.dense}, {z.dense, z.hidden}};
  for (const auto& p : products) {
    if (p.in * p.out == 0) break;  // there is no dense MLP
    out.forward.products += product_seconds(h, kind, z.tokens, p.out, p.in);
    out.input.products += product_seconds(h, kind, z.tokens, p.in, p.out);
    out.weight.products += product_seconds(h, kind, p.out, p.in, z.tokens, true);
  }

  if (m.experts > 0) detail::add_experts(out, h, job, l, z);

  const attention_seconds attention = attention_time(h, program, m, z.tokens, job.seq, z.query);
  out.forward.attention = attention.forward;
  out.input.attention = attention.backward;

  const detail::elementwise moved = detail::elementwise_bytes(job, z);
  double forward = moved.forward(), backward = moved.backward;
  if (kind == number_kind::fp8) {
    const double mlp_inputs = z.hidden * (z.routed + (z.dense > 0 ? z.tokens : 0));
    forward += 4 * (z.tokens * (z.hidden + z.query) + mlp_inputs + z.activated());
    backward += 4 * (z.tokens * (z.hidden + z.query + 2 * z.kv) + mlp_inputs + gates * z.activated());
  }
  const double values = z.activated();
  const double activated = activation_seconds(h, moved.activation, values, false);
  out.forward.memory = memory_seconds(h, forward, moved.launches) + activated;
  out.input.memory = memory_seconds(h, backward, 1.5 * moved.launches) +
                     activation_seconds(h, moved.activation_backward, values, true);

  const double whole = z.tokens * z.hidden * e;
  const double parts = tensor_parts(m, l);
  out.forward.tensor = parts * detail::tensor_seconds(h, job, l, whole, false);
  out.input.tensor = parts * detail::tensor_seconds(h, job, l, whole, true);
  if (m.qk_norm_over_heads && l.tp > 1) {
    const double heads = collective_seconds(h, place_group(h, l.tp_axis()), collective::all_gather,
                                            e * z.tokens * (m.query_width() + m.kv_width()));
    out.forward.tensor += heads, out.input.tensor += heads;
  }
  if (program.gathers_again && l.cuts_sequence())
    out.input.tensor += parts * collective_seconds(h, place_group(h, l.tp_axis()), collective::all_gather, whole);
  const double packed = 2 * parts * detail::packing_seconds(h, job, l, whole);
  out.forward.memory += packed, out.input.memory += packed;
  const attention_seconds context = detail::context_seconds(h, job, l, z, attention);
  out.forward.context = context.forward;
  out.input.context = context.backward;

  if (l.recompute == plait::recompute::full) {
    out.again = (1.0 / static_cast<double>(l.recompute_every)) * out.forward;
  } else if (l.recompute == plait::recompute::selective) {
    if (program.selective_drops_scores_only)
      out.again.attention = attention.forward;
    else
      out.again.memory = memory_seconds(h, moved.norms, moved.launches / 2) + activated;
  }
  // If kernels are short, the host's time counts.
  const auto at_least = [&](pass_time& pass, double others) {
    if (program.host_seconds > 0) pass.memory += std::max(0.0, program.host_seconds - pass.sum() - others);
  };
  at_least(out.forward, 0);
  at_least(out.input, out.weight.sum());
  return out;
}

/// Returns the times of the head: the final norm, the output projection and the loss.
inline part_time head_time(const hardware& h, const training_job& job, const training_layout& l) {
  const rank_sizes z(job, l);
  const number_kind kind = job.program.products == number_kind::f32 ? number_kind::f32 : number_kind::bf16;
  const double e = job.program.activation_bytes();
  part_time out;
  out.forward.products = product_seconds(h, kind, z.tokens, z.vocab, z.hidden);
  out.input.products = product_seconds(h, kind, z.tokens, z.hidden, z.vocab);
  out.weight.products = product_seconds(h, kind, z.vocab, z.hidden, z.tokens, true);
  const double logits = z.tokens * z.vocab * job.program.loss_bytes / 2;
  out.forward.memory = memory_seconds(h, logits + 2 * e * z.hidden * z.cut_tokens, 4);
  out.input.memory = memory_seconds(h, logits + 4 * e * z.hidden * z.cut_tokens, 4);
  const double whole = z.tokens * z.hidden * e, packed = detail::packing_seconds(h, job, l, whole);
  out.forward.memory += packed, out.input.memory += packed;
  out.forward.tensor = detail::tensor_seconds(h, job, l, whole, false) / 2;
  out.input.tensor = detail::tensor_seconds(h, job, l, whole, true) / 2;
  return out;
}

/// Returns the times of the embedding: rows are looked up, and gradients are added.
inline part_time embedding_time(const hardware& h, const training_job& job, const training_layout& l) {
  const rank_sizes z(job, l);
  const double e = job.program.activation_bytes(), dropout = job.model.dropout ? 3 : 0;
  part_time out;
  out.forward.memory = memory_seconds(h, (2 * e + dropout * e) * z.hidden * z.tokens, 2);
  out.weight.memory = memory_seconds(h, (e + 8 + dropout * e) * z.hidden * z.tokens, 2);
  const double packed = detail::packing_seconds(h, job, l, z.tokens * z.hidden * e);
  out.forward.memory += packed, out.weight.memory += packed;
  out.forward.tensor = detail::tensor_seconds(h, job, l, z.tokens * z.hidden * e, false) / 2;
  return out;
}

}  // namespace plait::planner
