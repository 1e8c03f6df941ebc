#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "plait/nn/strategy.hpp"
#include "support/llama_parity.hpp"
#include "support/split_strategy.hpp"

/// Strategies that the library does not have, each in a few lines, and Llamas with them.
namespace plait::test {

using namespace plait::testing;

struct row : axis_tag<"row"> {};
struct column : axis_tag<"column"> {};
struct depth : axis_tag<"depth"> {};
struct replica : axis_tag<"replica"> {};

/// Two-dimensional tensor parallelism: every matrix is sharded over `row` and `column`, the residual's features over
/// `column`.
struct grid {
  using mesh = plait::mesh<axis<dp>, axis<row>, axis<column>>;
  using residual = spec<shard<batch, dp>, seq, shard<hidden, column>, invariant<row>>;
  using query_heads = shard<heads, row>;
  using key_heads = shard<kv_heads, row>;
  using feed_forward = shard<ffn, row>;
  using vocabulary = shard<vocab, row>;
};

/// `grid` with the residual's sequence sharded over `row`: each rank has one part of row x column of every tensor.
struct grid_sp : grid {
  using residual = spec<shard<batch, dp>, shard<seq, row>, shard<hidden, column>>;
};

/// 2.5-dimensional tensor parallelism: the grid, with the batch over a third axis.
struct grid_with_depth : grid {
  using mesh = plait::mesh<axis<dp>, axis<depth>, axis<row>, axis<column>>;
  using residual = spec<shard<batch, dp, depth>, seq, shard<hidden, column>, invariant<row>>;
};

/// The grid with parameters stored over the data-parallel ranks as well.
using stored_grid = stored_over_dp<grid>;

/// Hybrid sharding: the batch is sharded over two axes, and stored parameters over one of them only, the one with the
/// faster network.
struct hybrid : split {
  using mesh = plait::mesh<axis<replica>, axis<dp>, axis<tp>>;
  using residual = spec<shard<batch, replica, dp>, seq, hidden, invariant<tp>>;
  template <class Weight>
  using stored = shard_further<Weight, hidden, dp>;
};

/// `hybrid` with a sequence-parallel residual.
struct hybrid_sp : hybrid {
  using residual = spec<shard<batch, replica, dp>, shard<seq, tp>, hidden>;
};

inline llama_config tiny_llama() {
  llama_config config;
  config.vocab = 29, config.hidden = 24, config.layers = 2, config.heads = 8, config.kv_heads = 4;
  config.head_dim = 4, config.ffn = 40, config.initializer_range = 0.1;
  return config;
}

/// Compares a Llama with strategy S on each mesh, given by its extents, with one rank.
template <strategy S, class Launch = on_cpu>
findings check_llama(std::initializer_list<std::vector<std::int64_t>> meshes, const llama_config& config = tiny_llama(),
                     const llama_options& options = {}, const Launch& launch = {}) {
  model_setup how;
  how.sizes = [=](const mesh_shape& mesh, std::int64_t samples) { return llama_sizes<S>(config, mesh, samples, 8); };
  how.layers = config.layers, how.vocab = config.vocab, how.batch = 48;
  std::vector<mesh_shape> shapes;
  for (const std::vector<std::int64_t>& extents : meshes) {
    mesh_shape& shape = shapes.emplace_back();
    for (std::size_t i = 0; i < extents.size(); ++i) shape.add(S::mesh::static_shape().axes[i], extents[i]);
  }
  return check_model(shapes.front(), shapes, how, make_llama<double, S>(config, options), launch);
}

}  // namespace plait::test
