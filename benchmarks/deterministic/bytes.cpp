// The bytes that a step of bench_deterministic should send, from dry runs. A separate file, because it takes long to
// compile.
#include "../meshed_llama.hpp"
#include "plait/plan/dry_run.hpp"

namespace bench {

std::uint64_t predicted_bytes(const case_of_run& l, const sizes_of_run& s, const plait::deterministic_leaves& leaves) {
  std::uint64_t bytes = 0;
  for (std::int64_t rank = 0; rank < l.shape().size(); ++rank) {
    plait::counting_device device;
    plait::pipeline_world ranks = plait::pipeline_world::counting(l.shape(), rank);
    stages<plait::counting_device> counted(device, ranks, l, s, leaves);
    bytes += plait::dry_run_step(counted.ctx, counted.model).traffic.total().wire;
  }
  return bytes;
}

}  // namespace bench
