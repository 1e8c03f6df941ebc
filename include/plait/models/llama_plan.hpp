// A Llama's configuration as the planner's sizes of a transformer. Nothing is priced here: plan/step_time.hpp does
// that. Another model gives the planner such a shape itself: plan/transformer_shape.hpp.
#pragma once

#include "plait/models/llama_config.hpp"
#include "plait/plan/transformer_shape.hpp"

namespace plait {

/// The sizes of a Llama for the planner. Biases of some products and norms of queries and keys are too small to count.
inline planner::transformer_shape plan_shape(const llama_config& c) {
  planner::transformer_shape m;
  m.vocab = c.vocab, m.hidden = c.hidden, m.layers = c.layers;
  m.heads = c.heads, m.kv_heads = c.kv_heads, m.head_dim = c.head_dim, m.ffn = c.ffn;
  m.tied = c.tie_embeddings;
  m.window = c.sliding_window;
  return m;
}

}  // namespace plait
