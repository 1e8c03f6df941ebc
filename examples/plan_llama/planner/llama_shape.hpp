// Converts a Llama's configuration to the planner's sizes of a transformer (transformer_shape.hpp).
#pragma once

#include <array>
#include <string_view>

#include "plait/models/llama_config.hpp"
#include "plan_llama/planner/transformer_shape.hpp"

namespace plait {

/// Returns the sizes of a Llama for the planner. Biases of some products and of routers are too small to count.
inline planner::transformer_shape plan_shape(const llama_config& c) {
  planner::transformer_shape m;
  m.vocab = c.vocab, m.hidden = c.hidden, m.layers = c.layers;
  m.heads = c.heads, m.kv_heads = c.kv_heads, m.head_dim = c.head_dim, m.ffn = c.ffn;
  m.tied = c.tie_embeddings;
  m.window = c.sliding_window;
  m.qk_norm = c.qk_norm, m.qk_norm_over_heads = c.qk_norm_over_heads;
  m.experts = c.mixture.experts, m.shared_ffn = c.mixture.shared_ffn, m.shared_gate = c.mixture.shared_gate;
  m.dense_layers = c.mixture.dense_layers, m.first_ffn = c.mixture.dense_ffn;
  m.chosen = m.experts > 0 ? c.mixture.router.chosen : 0;
  return m;
}

/// Shapes for planning that are too large to train on one machine. models/llama_config.hpp has the other presets.
struct named_shape {
  std::string_view name;
  planner::transformer_shape shape;
};

inline constexpr std::array<named_shape, 5> large_llamas{
    {{"llama-2-13b", {32000, 5120, 40, 40, 40, 128, 13824}},
     {"llama-2-70b", {32000, 8192, 80, 64, 8, 128, 28672}},
     {"llama-3-70b", {128256, 8192, 80, 64, 8, 128, 28672}},
     {"llama-3-405b", {128256, 16384, 126, 128, 8, 128, 53248}},
     {"llama-3.1-405b", {128256, 16384, 126, 128, 8, 128, 53248}}}};

/// Returns the shape called `name`; null if it is not in `large_llamas`.
inline const planner::transformer_shape* find_large_llama(std::string_view name) {
  for (const named_shape& one : large_llamas)
    if (one.name == name) return &one.shape;
  return nullptr;
}

}  // namespace plait
