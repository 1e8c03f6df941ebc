#include "model_tensors.hpp"

#include "plait/checkpoint/model_weights.hpp"
#include "plait/device/counting.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"

std::vector<plait::safetensors_declaration> tensors_of(const plait::llama_config& config) {
  using strategy = plait::megatron_sp;
  plait::world ranks = plait::world::counting(strategy::mesh{1, 1, 1, 1}.shape());
  plait::counting_device device;
  const plait::context<plait::counting_device> ctx{device, ranks,
                                                   plait::llama_sizes<strategy>(config, ranks.shape(), 1, 1), 0};
  plait::llama<float, strategy, plait::counting_device> model(ctx, config);
  return shapes_of(ctx, model, plait::safetensors_dtype::f32);
}
