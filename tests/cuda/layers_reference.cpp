#include "cuda/layers_reference.hpp"

#include "plait/comm/threads.hpp"

namespace plait::test {
namespace {

template <class S>
block_outcome one_rank() {
  block_outcome out;
  threads::run(1, [&](threads::communicator c) {
    world ranks(typename S::mesh{1, 1, 1, 1}.shape(), c);
    cpu device;
    out = run_block<float, S>(ranks, device);
  });
  return out;
}

}  // namespace

block_outcome block_on_cpu(const std::string& strategy) {
  return strategy == "megatron_tp" ? one_rank<megatron_tp>() : one_rank<megatron_sp>();
}

}  // namespace plait::test
