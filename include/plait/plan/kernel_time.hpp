// The time of kernels on one accelerator: products by their shape, attention by its operations, and what only moves
// memory by its bytes. Communication is in plan/network_time.hpp. Next: plan/block_time.hpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plait/core/macros_off.hpp"
#include "plait/plan/hardware.hpp"
#include "plait/plan/transformer_shape.hpp"

namespace plait::planner {

/// Bytes of an operand of a product.
constexpr double operand_bytes(number_kind kind) {
  return kind == number_kind::f32 ? 4 : kind == number_kind::bf16 ? 2 : 1;
}

/// Seconds of a dense product of m x k and k x n. The share of the peak falls where k is short, because a tile's start
/// and end cost as much as so many steps, more where it adds to a result that was there, as weight gradients do; and
/// where the result has few tiles for all cores; below that is the time in which the operands and the result pass
/// memory.
inline double product_seconds(const hardware& h, number_kind kind, double m, double n, double k, bool adds = false) {
  const double depth = h.product_depth + (adds ? h.adding_depth : 0);
  const double fill = k / (k + depth) * (m * n / (m * n + h.product_area));
  const double computed = 2 * m * n * k / (h.peak_of(kind) * h.share_of(kind) * fill);
  const double moved = (operand_bytes(kind) * (m * k + k * n) + (kind == number_kind::f32 ? 4 : 2) * m * n) /
                       (h.memory_bandwidth * h.memory_share);
  return h.launch + std::max(computed, moved);
}

/// Seconds of elementwise kernels that read and write so many bytes.
inline double memory_seconds(const hardware& h, double bytes, double launches) {
  return bytes / (h.memory_bandwidth * h.memory_share) + launches * h.launch;
}

/// The share of the bf16 peak (f32: of its own peak) that a fused attention kernel reaches.
inline double attention_rate(const hardware& h, const software& program) {
  const number_kind kind = program.products == number_kind::f32 ? number_kind::f32 : number_kind::bf16;
  const double generation = program.attention == attention_kernel::flash1   ? h.flash1
                            : program.attention == attention_kernel::flash2 ? h.flash2
                                                                            : 1;
  return h.peak_of(kind) * h.attention_share * generation;
}

/// The forward and the backward time of attention's core: scores, softmax and weighted values.
struct attention_seconds {
  double forward = 0, backward = 0;
};

/// Of `queries` positions over `seq` keys each, `width` being all query heads of the rank times head_dim. A fused
/// kernel computes what is visible, and the blocks that the causal mask cuts whole, 4 operations for each pair and
/// width forward, and 10 backward, where scores are made again (Dao, FlashAttention-2, 2023). Unfused, the whole square
/// is computed, 8 operations backward, and scores pass memory: 8 bytes forward and 14 backward of each, 5 more in both
/// with dropout (Korthikanti et al. 2022, section 4.1, counts what is kept of them).
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
  const double extra = program.fused ? 1 : 2;  // scale, mask and softmax in kernels of their own
  return {2 * product + memory_seconds(h, extra * (8 + dropout) * scores, 5),
          4 * product + memory_seconds(h, extra * (14 + dropout) * scores, 8)};
}

}  // namespace plait::planner

#include "plait/core/macros_on.hpp"
