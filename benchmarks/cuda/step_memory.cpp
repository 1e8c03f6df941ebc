#include "step_memory.hpp"

#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/plan/dry_run.hpp"

std::int64_t bench::planned_bytes(const plait::llama_config& config, std::int64_t tokens, std::int64_t seq,
                                  std::int64_t microbatches) {
  using model = plait::llama<plait::bf16, plait::megatron_sp, plait::counting_device>;
  const plait::mesh_shape one = plait::megatron_sp::mesh{1, 1, 1, 1}.shape();
  plait::world ranks = plait::world::counting(one, 0);
  plait::counting_device device;
  const plait::context<plait::counting_device> ctx{
      device, ranks, plait::llama_sizes<plait::megatron_sp>(config, one, tokens / seq, seq), 7};
  model layers(ctx, config, plait::llama_options{});
  plait::pipeline<model> step(ctx, layers, static_cast<int>(microbatches));
  return plait::dry_run_step(ctx, step).peak_bytes;
}
