#include "model_tensors.hpp"

#include "plait/checkpoint/model_weights.hpp"
#include "plait/device/counting.hpp"
#include "plait/models/mixture_llama.hpp"
#include "plait/nn/strategy.hpp"

namespace {

template <class Model, class Strategy>
std::vector<plait::safetensors_declaration> tensors_of_model(const plait::llama_config& config,
                                                             const typename Strategy::mesh& one_rank) {
  plait::world ranks = plait::world::counting(one_rank.shape());
  plait::counting_device device;
  const plait::context<plait::counting_device> ctx{device, ranks,
                                                   plait::llama_sizes<Strategy>(config, ranks.shape(), 1, 1), 0};
  Model model(ctx, config);
  return shapes_of(ctx, model, plait::safetensors_dtype::f32);
}

}  // namespace

std::vector<plait::safetensors_declaration> tensors_of(const plait::llama_config& config) {
  using dense = plait::megatron_sp;
  using experts = plait::megatron_experts;
  if (config.mixture.experts == 0)
    return tensors_of_model<plait::llama<float, dense, plait::counting_device>, dense>(config, dense::mesh(1, 1, 1, 1));
  return tensors_of_model<plait::mixture_llama<float, experts, plait::counting_device>, experts>(
      config, experts::mesh(1, 1, 1, 1, 1));
}
