// The collectives of linears that share an input, made ready for the sizes of a context, and the sizes of their
// products.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plait/comm/world.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/nn/layer/made_for.hpp"
#include "plait/nn/linear/overlap.hpp"
#include "plait/nn/linear/rule.hpp"
#include "plait/tensor/chunked_collective.hpp"
#include "plait/tensor/executor.hpp"

namespace plait::detail {

/// The collectives of linears that share an input, forward and backward, and the matrices that they multiply: `batches`
/// times [rows, inner] by [inner, columns], of which each branch has its own.
class linear_moves {
 public:
  /// `name` is the first weight's.
  linear_moves(world& ranks, const dim_sizes& sizes, const shared_linears& d, const std::string& name);

  /// Pipelines the collectives that stand beside a product with it, in so many chunks.
  void cut(std::int64_t chunks, const std::string& name);

  /// Makes everything anew for other sizes. Throws, and changes nothing, where a weight would have another size.
  void take_sizes(world& ranks, const dim_sizes& sizes, const shared_linears& d, const std::string& name);

  /// Throws unless a call's sizes are those that the moves were made for.
  void require_sizes(const std::string& name, const mesh_shape& mesh, std::int64_t rank, const dim_sizes& now) const {
    made_for_.require(name, mesh, rank, now);
  }

  /// Elements of the input.
  std::int64_t input_size() const { return gather_.source().local_size(); }
  /// Elements of the output, of all branches.
  std::int64_t output_size() const { return resolve_.target().local_size(); }

 protected:
  executor gather_, spread_, resolve_, unresolve_;
  chunked_collective gather_chunks_, spread_chunks_, resolve_chunks_, unresolve_chunks_;  ///< where they overlap
  std::int64_t batches_ = 1, rows_ = 1, inner_ = 1, total_ = 0;
  std::vector<std::int64_t> columns_;  ///< of each branch

 private:
  void make_resolution(world& ranks, dim_sizes sizes, const shared_linears& d, const std::string& name);

  std::int64_t chunks_ = 1;
  made_for made_for_;
};

}  // namespace plait::detail

#ifndef PLAIT_COMPILED
#include "plait/nn/linear/moves.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
