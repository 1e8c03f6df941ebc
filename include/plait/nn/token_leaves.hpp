// The leaves of canonical sums over tokens: which rows of a rank's arrays belong to which, and which leaves each rank
// has in a step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plait/core/leaves.hpp"
#include "plait/core/numerics.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/nn/sequence_order.hpp"

namespace plait {

/// How fine the leaves of a sum over tokens are. Sums over rows that tensor parallelism shards too, as norms' are under
/// sequence parallelism, are `fine`: each chunk of the sequence is cut into `numerics::features` more.
enum class token_grain : std::uint8_t { coarse, fine };

/// The canonical leaves of tokens that lie as [batch, seq, ...] or [batch, zseq, ...]: a chunk of the sequence of a
/// group of samples of the step. Leaves of one chunk follow each other, so that ranks of data parallelism have
/// neighbours.
class token_leaves {
 public:
  /// Neighbouring rows of this rank's array, which is [samples, tokens of the sequence, ...].
  struct rows {
    std::int64_t first = 0, count = 0;
  };
  struct leaf {
    std::int64_t number = 0;
    std::vector<rows> parts;
    std::int64_t count() const {
      std::int64_t n = 0;
      for (const rows& r : parts) n += r.count;
      return n;
    }
  };

  token_leaves() = default;
  /// `tokens` is the layout of what has the rows. Throws `plait::error` that names `name` where its dims are not those,
  /// and where a rank would have parts of leaves.
  token_leaves(const numerics& order, const layout& tokens, const mesh_shape& mesh, const dim_sizes& sizes,
               std::int64_t rank, token_grain grain, std::string name);

  std::int64_t leaves() const { return chunks_ * samples_; }
  /// The leaves of microbatch `index` of `count` in the step. Throws where its samples are no whole groups.
  std::vector<leaf> of_microbatch(std::int64_t index, std::int64_t count) const;
  /// The leaves that `rank` has after all microbatches of a step.
  std::vector<leaf_range> of_step(std::int64_t rank) const;

 private:
  struct piece {
    std::int64_t chunk, at;
  };
  std::vector<piece> pieces_of(std::int64_t offset, std::int64_t length) const;

  numerics order_;
  layout tokens_;
  mesh_shape mesh_;
  dim_sizes sizes_;
  std::string name_;
  sequence_order sequence_;
  std::int64_t chunks_ = 1, samples_ = 1, chunk_ = 1;  ///< chunk_: tokens in a chunk
  std::int64_t batch_ = 1, local_batch_ = 1, first_batch_ = 0, local_tokens_ = 1;
  std::vector<piece> pieces_;
};

/// The leaves of a dim of features: the greatest number that divides both it and `numerics::features`.
std::int64_t feature_leaves(const numerics& order, std::int64_t size);

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/nn/token_leaves.ipp"  // IWYU pragma: keep
#endif
