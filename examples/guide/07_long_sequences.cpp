// Counts the bytes that attention sends and keeps, on one rank and on four ranks that share the sequence, under three
// policies. A dry run counts them, so no attention is computed.
#include <cstdio>
#include <exception>

#include "plait/nn/attention.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/plan/dry_run.hpp"

namespace pl = plait;

using ring = pl::context_parallel<pl::megatron_sp, pl::ring<pl::cp>, pl::zigzag>;
using all_keys = pl::context_parallel<pl::megatron_sp, pl::all_gather_kv<pl::cp>, pl::zigzag>;
using ulysses = pl::context_parallel<pl::megatron_sp, pl::ulysses<pl::cp>>;  // balanced in any order

/// Returns the megabytes that one rank sends over cp. A ledger counts a message once, and a collective for all ranks.
double megabytes_of_rank(const pl::ledger& sent, std::int64_t ranks) {
  const auto messages = static_cast<double>(sent.total("cp", pl::collective::send).wire);
  const auto all = static_cast<double>(sent.total("cp").wire);
  return (messages + (all - messages) / static_cast<double>(ranks)) / 1e6;
}

template <class Strategy>
void show(const char* name, std::int64_t ranks, std::int64_t kv_heads) {
  const pl::mesh_shape mesh = pl::megatron_sp::mesh(1, ranks, 1, 1).shape();
  const pl::dim_sizes sizes =
      pl::sizes_of<pl::batch, pl::seq, pl::zseq, pl::hidden, pl::heads, pl::kv_heads, pl::head_dim>(
          1, 32768, 32768, 4096, 32, kv_heads, 128);
  using attention = pl::self_attention<pl::bf16, Strategy, pl::counting_device>;
  const pl::layer_plan plan = pl::dry_run(mesh, sizes, 0, [](const auto& ctx) { return attention(ctx, "attention"); });
  std::printf("%-14s %2d kv heads: a rank sends %4.0f MB forward, %4.0f backward, and keeps %4.0f\n", name,
              static_cast<int>(kv_heads), megabytes_of_rank(plan.forward, ranks),
              megabytes_of_rank(plan.backward, ranks), static_cast<double>(plan.kept_bytes) / 1e6);
}

int main() try {
  show<ring>("one rank", 1, 8);
  for (const std::int64_t kv_heads : {8, 32}) {
    show<ring>("ring", 4, kv_heads);
    show<all_keys>("all_gather_kv", 4, kv_heads);
    show<ulysses>("ulysses", 4, kv_heads);
  }
} catch (const std::exception& e) {
  std::fprintf(stderr, "07_long_sequences: %s\n", e.what());
  return 1;
}
