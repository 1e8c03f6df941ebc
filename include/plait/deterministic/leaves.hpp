// The leaves of deterministic sums: the binary tree over them, and the rows of a rank's arrays that belong to each leaf
// of a sum over tokens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/tensor/sequence_order.hpp"

namespace plait {

/// Leaves [begin, end).
struct leaf_range {
  std::int64_t begin = 0, end = 0;
  friend constexpr bool operator==(const leaf_range&, const leaf_range&) = default;
};

/// A partial sum: the sum of the existing leaves from index * 2^level to (index + 1) * 2^level - 1.
struct tree_node {
  int level = 0;
  std::int64_t index = 0;
  constexpr std::int64_t first() const { return index << level; }
  friend constexpr bool operator==(const tree_node&, const tree_node&) = default;
};

/// The partial sums of one deterministic sum on this rank. An inserted sum joins its neighbour in the tree as soon as
/// both are present. So the result does not depend on the order of insertion. If the number of leaves is not a power of
/// two, the tree is that of the next power, without the missing leaves.
template <class Value>
class leaf_tree {
 public:
  struct entry {
    tree_node node;
    Value value;
  };

  explicit leaf_tree(std::int64_t leaves = 1) : leaves_(leaves) {
    if (leaves < 1) fail({"a sum over ", leaves, " leaves; at least 1"});
    while ((std::int64_t{1} << top_) < leaves) ++top_;
  }

  std::int64_t leaves() const { return leaves_; }
  /// Returns the partial sums, in the order of their first leaves.
  const std::vector<entry>& roots() const { return roots_; }
  std::vector<entry>& roots() { return roots_; }
  bool complete() const { return roots_.size() == 1 && roots_[0].node == tree_node{top_, 0}; }
  void clear() { roots_.clear(); }

  /// Returns the neighbour of `node` that it joins with, if it is present; else null.
  entry* neighbour(const tree_node& node) {
    const tree_node n = promoted(node);
    if (n.level == top_) return nullptr;
    const auto at = place({n.level, n.index ^ 1});
    return at != roots_.end() && at->node == tree_node{n.level, n.index ^ 1} ? &*at : nullptr;
  }

  /// Inserts a partial sum. add(a, b) must add b, whose leaves come later, to a. Throws if one of the leaves is already
  /// present.
  template <class Add>
  void insert(tree_node node, Value value, Add&& add) {
    for (;;) {
      node = promoted(node);
      entry* const other = neighbour(node);
      if (other == nullptr) break;
      Value theirs = std::move(other->value);
      const bool after = other->node.index > node.index;
      roots_.erase(roots_.begin() + (other - roots_.data()));
      if (!after) std::swap(value, theirs);
      add(value, theirs);
      node = {node.level + 1, node.index >> 1};
    }
    const auto at = place(node);
    if ((at != roots_.end() && overlap(at->node, node)) || (at != roots_.begin() && overlap(std::prev(at)->node, node)))
      fail({"leaf ", node.first(), " of ", leaves_, " is added to a deterministic sum twice"});
    roots_.insert(at, entry{node, std::move(value)});
  }

 private:
  static bool overlap(const tree_node& a, const tree_node& b) {
    const int level = std::max(a.level, b.level);
    return a.index >> (level - a.level) == b.index >> (level - b.level);
  }
  /// Returns the highest ancestor that equals `node`: a node equals its parent if none of the neighbour's leaves exist.
  tree_node promoted(tree_node n) const {
    while (n.level < top_ && ((n.index ^ 1) << n.level) >= leaves_) n = {n.level + 1, n.index >> 1};
    return n;
  }
  typename std::vector<entry>::iterator place(const tree_node& n) {
    return std::lower_bound(roots_.begin(), roots_.end(), n.first(),
                            [](const entry& e, std::int64_t first) { return e.node.first() < first; });
  }

  std::int64_t leaves_;
  int top_ = 0;
  std::vector<entry> roots_;
};

/// Returns the partial sums that remain after all neighbours among `nodes` have joined.
std::vector<tree_node> joined_nodes(std::span<const tree_node> nodes, std::int64_t leaves);
/// Returns the partial sums of a rank that has added the leaves of `ranges`.
std::vector<tree_node> roots_of(std::span<const leaf_range> ranges, std::int64_t leaves);

/// Returns the layout of an array's rows: without the dims of `features`.
inline layout without_dims(layout a, const layout& features) {
  const auto all = a.dims;
  a.dims = {};
  for (const dim_placement& p : all)
    if (!features.has(p.dim)) a.dims.push_back(p);
  return a;
}

/// Returns the greatest number that divides every rank's part of a dim, and so the start of each part.
inline std::int64_t common_part(const dim_placement& p, const mesh_shape& mesh, const dim_sizes& sizes) {
  const std::int64_t ranks = mesh.size(p.axes);
  std::int64_t common = sizes.of(p.dim);
  for (std::int64_t i = 1; i < ranks; ++i) common = std::gcd(common, sizes.begin_of(p.dim, ranks, i));
  return common;
}

namespace detail {
/// Returns the end of an error text if blocks of a dim would give ranks whole leaves; else an empty text.
inline std::string or_blocks(const dim_placement& p, const mesh_shape& mesh, const dim_sizes& sizes,
                             std::int64_t leaves) {
  const std::int64_t size = sizes.of(p.dim);
  if (size % leaves != 0 || leaves < mesh.size(p.axes)) return {};
  return cat({", or ", p.dim.text(), " in blocks of ", size / leaves, " (dim_sizes::set)"});
}
}  // namespace detail

/// The size of leaves in a sum over tokens. If tensor parallelism shards the rows too, as for norms under sequence
/// parallelism, leaves are `fine`. Each chunk of the sequence then has `deterministic_leaves::features` leaves.
enum class token_grain : std::uint8_t { coarse, fine };

/// The deterministic leaves of rows with layout [batch, seq] or [batch, zseq]. A leaf is a chunk of the sequence in a
/// group of the step's samples. Leaves of one chunk are consecutive, so that data-parallel ranks have neighbours. In a
/// step with one microbatch, the rows of another first dim count as samples. Without a second dim `seq` or `zseq` there
/// is one chunk. Further dims must be whole on every rank: their rows belong to the leaf of their token.
class token_leaves {
 public:
  /// Consecutive rows of this rank's array.
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
  /// `tokens` has only the dims of the rows. Throws `plait::error` that names `name` if the rows have no leaves, or if
  /// a rank would have a part of a leaf.
  token_leaves(const deterministic_leaves& order, const layout& tokens, const mesh_shape& mesh, const dim_sizes& sizes,
               std::int64_t rank, token_grain grain, std::string name);

  std::int64_t leaves() const { return chunks_ * samples_; }
  /// Returns the leaves of microbatch `index` of `count` in the step. If the order splits tokens
  /// (`deterministic_leaves::token_chunks`), they belong to one chunk of its tokens. Throws if its samples are not
  /// whole groups.
  std::vector<leaf> of_microbatch(std::int64_t index, std::int64_t count) const;
  /// Returns the leaves that `rank` has after all microbatches of a step.
  std::vector<leaf_range> of_step(std::int64_t rank) const;
  /// Returns the same leaves for ranks that exchange them: after a step, each rank has all leaves of its group over
  /// `axes`.
  token_leaves of_groups(axis_list axes) const {
    token_leaves all = *this;
    all.shared_ = std::move(axes);
    return all;
  }

 private:
  struct piece {
    std::int64_t chunk, at;
  };
  std::vector<piece> pieces_of(std::int64_t offset, std::int64_t length) const;
  /// Returns this rank's pieces of the sequence in a chunk of its tokens, and their offsets there.
  std::vector<piece> pieces_in_chunk(std::int64_t chunk) const;
  /// Throws if the rows have no leaves. Returns whether their second dim is a sequence.
  bool require_leaves() const;
  /// Throws on every rank, with one text, if any rank would have a part of a chunk of the sequence.
  void require_whole_chunks() const;
  /// Returns the number of tokens, and the first token, of a box's part of the sequence.
  std::pair<std::int64_t, std::int64_t> along_sequence(const box& part) const {
    return has_sequence_ ? std::pair{part.offset[1], part.local[1]} : std::pair<std::int64_t, std::int64_t>{0, 1};
  }

  deterministic_leaves order_;
  layout tokens_;
  mesh_shape mesh_;
  dim_sizes sizes_;
  std::string name_;
  sequence_order sequence_;
  bool has_sequence_ = false;
  std::int64_t inner_ = 1;                             ///< rows of a token
  std::int64_t chunks_ = 1, samples_ = 1, chunk_ = 1;  ///< chunk_: tokens in a chunk
  std::int64_t batch_ = 1, local_batch_ = 1, first_batch_ = 0, local_tokens_ = 1;
  std::int64_t unit_ = 1;  ///< samples per unit; every rank has whole units
  std::vector<piece> pieces_;
  axis_list shared_;  ///< axes whose ranks have each other's leaves
};

/// Returns the leaves of a feature dim: the greatest common divisor of `size` and `deterministic_leaves::features`.
inline std::int64_t feature_leaves(const deterministic_leaves& leaves, std::int64_t size) {
  return std::gcd(leaves.features, size);
}

/// Returns the leaves, `leaves` in total, of each of `ranks` ranks that divide a dim, in order. Returns nothing if some
/// rank would have a part of a leaf.
inline std::vector<leaf_range> leaves_of_ranks(const dim_sizes& sizes, dim_id dim, std::int64_t ranks,
                                               std::int64_t leaves) {
  std::vector<leaf_range> all;
  for (std::int64_t r = 0; r < ranks; ++r) {
    const std::int64_t end = sizes.begin_of(dim, ranks, r + 1) * leaves;
    if (end % sizes.of(dim) != 0) return {};
    all.push_back({all.empty() ? 0 : all.back().end, end / sizes.of(dim)});
  }
  return all;
}

/// Whether sums over a dim have leaves. True for the library's dims that tensor parallelism shards, and for every dim
/// that `placed`, a policy's layout, shards.
constexpr bool has_feature_leaves(dim_id dim, const layout& placed) {
  return dim == dim_of<heads> || dim == dim_of<kv_heads> || dim == dim_of<ffn> || dim == dim_of<vocab> ||
         !placed.axes_of(dim).empty();
}

#ifndef PLAIT_COMPILED
PLAIT_INLINE std::vector<tree_node> joined_nodes(std::span<const tree_node> nodes, std::int64_t leaves) {
  leaf_tree<char> tree(leaves);
  for (const tree_node& node : nodes) tree.insert(node, 0, [](char&, char&) {});
  std::vector<tree_node> joined;
  for (const auto& e : tree.roots()) joined.push_back(e.node);
  return joined;
}

PLAIT_INLINE std::vector<tree_node> roots_of(std::span<const leaf_range> ranges, std::int64_t leaves) {
  std::vector<tree_node> nodes;
  for (const leaf_range& r : ranges)
    for (std::int64_t leaf = r.begin; leaf < r.end; ++leaf) nodes.push_back({0, leaf});
  return joined_nodes(nodes, leaves);
}

PLAIT_INLINE token_leaves::token_leaves(const deterministic_leaves& order, const layout& tokens, const mesh_shape& mesh,
                                        const dim_sizes& sizes, std::int64_t rank, token_grain grain, std::string name)
    : order_(order), tokens_(tokens), mesh_(mesh), sizes_(sizes), name_(std::move(name)) {
  has_sequence_ = require_leaves();
  const bool zigzag = has_sequence_ && tokens.dims[1].dim == dim_of<zseq>;
  if (zigzag && order.zigzag < 1)
    fail({name_, ": deterministic sums of a sequence in zigzag order need to know its ranks: give the context ",
          "leaves_under<strategy>(leaves, mesh)"});
  if (order.token_chunks > 1) sizes_.set(tokens.dims[1].dim, sizes.of(tokens.dims[1].dim) * order.token_chunks);
  const box here = local_box(tokens, mesh, sizes_, rank);
  const std::int64_t length = has_sequence_ ? here.global[1] : 1;
  if (has_sequence_) chunks_ = order.sequence * (grain == token_grain::fine ? order.features : 1);
  samples_ = order.samples;
  batch_ = here.global[0], local_batch_ = here.local[0], first_batch_ = here.offset[0];
  local_tokens_ = along_sequence(here).second;
  inner_ = here.local_size() / (local_batch_ * local_tokens_);
  if (length % chunks_ != 0)
    fail({name_, ": deterministic sums cut a sequence of ", length, " tokens into ", chunks_,
          " chunks (deterministic_leaves::sequence = ", order.sequence,
          chunks_ == order.sequence ? "" : cat({" times deterministic_leaves::features = ", order.features}),
          "), which do not divide it"});
  chunk_ = length / chunks_;
  sequence_ = sequence_order::original(length);
  if (zigzag)
    sequence_ = sequence_order::zigzag(length, order.zigzag, "the sequence", "context-parallel ranks",
                                       sizes_.block_of(dim_of<zseq>));
  if (has_sequence_) require_whole_chunks();
  const auto [first, count] = along_sequence(here);
  pieces_ = pieces_of(first, count);
  unit_ = common_part(tokens.dims[0], mesh, sizes_);
  if (samples_ % (batch_ / unit_) != 0)
    fail({name_, ": deterministic sums have deterministic_leaves::samples = ", samples_, " leaves of samples, which ",
          mesh.size(tokens.dims[0].axes), " ranks of ", describe(tokens), " cannot divide; legal for ",
          tokens.dims[0].dim.text(), " = ", batch_, " are multiples of ", batch_ / unit_,
          detail::or_blocks(tokens.dims[0], mesh, sizes_, samples_)});
}

PLAIT_INLINE void token_leaves::require_whole_chunks() const {
  const dim_placement& along = tokens_.dims[1];
  const std::int64_t ranks = mesh_.size(along.axes), finer = chunks_ / order_.sequence;
  std::int64_t common = sequence_.length(), cut = 0;
  for (std::int64_t i = 0; i < ranks; ++i) {
    const std::int64_t begin = sizes_.begin_of(along.dim, ranks, i), end = sizes_.begin_of(along.dim, ranks, i + 1);
    for (const token_run& run : sequence_.runs(begin, end - begin)) {
      common = std::gcd(common, std::gcd(run.position, run.length));
      if (cut == 0 && (run.position % chunk_ != 0 || run.length % chunk_ != 0)) cut = run.length;
    }
  }
  if (cut == 0) return;
  const std::int64_t runs = sequence_.length() / common;
  fail({name_, ": deterministic_leaves::sequence = ", order_.sequence, " makes chunks of ", chunk_, " of the ",
        sequence_.length(), " tokens, and one of ", ranks, " ranks has ", cut, " neighbours of ", describe(tokens_),
        "; legal are multiples of ", runs / std::gcd(runs, finer), detail::or_blocks(along, mesh_, sizes_, chunks_)});
}

PLAIT_INLINE bool token_leaves::require_leaves() const {
  const bool sequence =
      tokens_.dims.size() >= 2 && (tokens_.dims[1].dim == dim_of<seq> || tokens_.dims[1].dim == dim_of<zseq>);
  bool legal = !tokens_.dims.empty() && !(tokens_.dims[0].dim == dim_of<zseq>);
  for (std::size_t d = sequence ? 2 : 1; d < tokens_.dims.size(); ++d)
    legal = legal && mesh_.size(tokens_.dims[d].axes) == 1 && !(tokens_.dims[d].dim == dim_of<zseq>);
  if (!legal)
    fail({name_, ": deterministic sums have an order for rows of [batch, seq], of [batch, zseq], or of another first ",
          "dim, with further dims whole on every rank; these are of ", describe(tokens_)});
  return sequence;
}

PLAIT_INLINE std::vector<token_leaves::piece> token_leaves::pieces_of(std::int64_t offset, std::int64_t length) const {
  std::vector<piece> all;
  for (const token_run& run : sequence_.runs(offset, length))
    for (std::int64_t at = 0; at < run.length; at += chunk_) all.push_back({(run.position + at) / chunk_, run.at + at});
  return all;
}

PLAIT_INLINE std::vector<token_leaves::piece> token_leaves::pieces_in_chunk(std::int64_t chunk) const {
  const std::int64_t chunks = order_.token_chunks, length = order_.chunk_positions;
  if (chunks == 1) return pieces_;
  std::vector<piece> all;
  for (const piece& p : pieces_)
    if (p.at / length % chunks == chunk) all.push_back({p.chunk, p.at / (length * chunks) * length + p.at % length});
  return all;
}

PLAIT_INLINE std::vector<token_leaves::leaf> token_leaves::of_microbatch(std::int64_t index, std::int64_t count) const {
  const std::vector<piece> pieces = pieces_in_chunk(index % order_.token_chunks);
  const std::int64_t tokens = local_tokens_ / order_.token_chunks;
  index /= order_.token_chunks, count /= order_.token_chunks;
  if (count != 1 && !(tokens_.dims[0].dim == dim_of<batch>))
    fail({name_, ": deterministic sums over ", count, " microbatches of a step support only rows of batch, and ",
          "these are rows of ", describe(tokens_), "; use one microbatch"});
  const std::int64_t all = batch_ * count, group = all / samples_;
  if (all % samples_ != 0 || unit_ % group != 0)
    fail({name_, ": deterministic_leaves::samples = ", samples_, " leaves of ", all, " samples in a step are ",
          all % samples_ != 0 ? "uneven" : cat({group, " samples each"}), ", and ranks have multiples of ", unit_,
          " in a microbatch; legal are multiples of ", batch_ / unit_ * count, " that divide ", all});
  std::vector<leaf> leaves;
  const std::int64_t first = (first_batch_ * count + index * local_batch_) / group;
  for (const piece& p : pieces)
    for (std::int64_t s = 0; s < local_batch_ / group; ++s) {
      leaf l{p.chunk * samples_ + first + s, {}};
      for (std::int64_t b = s * group; b < (s + 1) * group; ++b) {
        const rows next{(b * tokens + p.at) * inner_, chunk_ * inner_};
        if (!l.parts.empty() && l.parts.back().first + l.parts.back().count == next.first)
          l.parts.back().count += next.count;
        else
          l.parts.push_back(next);
      }
      leaves.push_back(std::move(l));
    }
  return leaves;
}

PLAIT_INLINE std::vector<leaf_range> token_leaves::of_step(std::int64_t rank) const {
  std::vector<leaf_range> all;
  for (std::int64_t r = 0; r < mesh_.size(); ++r) {
    if (mesh_.group_of(r, shared_) != mesh_.group_of(rank, shared_)) continue;
    const box there = local_box(tokens_, mesh_, sizes_, r);
    const std::int64_t first = there.offset[0] * samples_ / batch_, count = there.local[0] * samples_ / batch_;
    const auto [begin, length] = along_sequence(there);
    for (const piece& p : pieces_of(begin, length))
      all.push_back({p.chunk * samples_ + first, p.chunk * samples_ + first + count});
  }
  return all;
}
#endif

namespace detail {

/// Throws for a resize of a layer with deterministic sums, because their leaves depend on its original sizes.
inline void require_resizable(std::string_view layer, bool deterministic) {
  if (deterministic)
    fail({layer,
          ": resize with deterministic sums, whose leaves are those of the sizes that the layer was "
          "made for: make another layer for other sizes"});
}

}  // namespace detail

}  // namespace plait

#include "plait/core/macros_on.hpp"
