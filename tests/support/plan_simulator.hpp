#pragma once

#include <optional>
#include <stdexcept>

#include "plait/layout/plan.hpp"
#include "support/placed_value.hpp"

/// Executes plans on integers, by what each step means for the ranks of a group and without the layouts where it can:
/// only an all-to-all reads them. Counts the elements that a ring-optimal algorithm puts on the wire: one for each
/// element that a rank takes, or adds, from another.
namespace plait::test {

class plan_simulator {
 public:
  explicit plan_simulator(const world& w) : w_(w) {}

  /// Elements sent so far, by all ranks together.
  std::uint64_t sent() const { return sent_; }

  shards run(const plan& p, shards value) {
    for (std::size_t i = 0; i < p.steps.size(); ++i) value = run(p.steps[i], p.before(i), value);
    return value;
  }

 private:
  shards run(const redistribution_step& s, const layout& before, const shards& held) {
    shards result;
    for (std::int64_t rank = 0; rank < w_.mesh.size(); ++rank) {
      const array& mine = held[static_cast<std::size_t>(rank)];
      const std::int64_t index = w_.mesh.index_in(rank, s.axes), count = w_.mesh.size(s.axes);
      switch (s.kind) {
        case transition_kind::relabel:
          result.push_back(mine);
          break;
        case transition_kind::keep_one:
          result.push_back(index == 0 ? mine : mine.like());
          break;
        case transition_kind::slice:
          result.push_back(piece(mine, s.dim, index, count));
          break;
        case transition_kind::pad:
          result.push_back(joined(mine, s.dim, count, [&](std::int64_t i) { return i == index ? &mine : nullptr; }));
          break;
        case transition_kind::all_gather:
          result.push_back(joined(mine, s.dim, count, [&](std::int64_t i) { return &held[member(rank, s.axes, i)]; }));
          sent_ += static_cast<std::uint64_t>(count - 1) * mine.data.size();
          break;
        case transition_kind::reduce_scatter:
          result.push_back(piece(sum(held, rank, s.axes), s.dim, index, count));
          break;
        case transition_kind::all_reduce:
          result.push_back(sum(held, rank, s.axes));
          break;
        case transition_kind::all_to_all:
          result.push_back(exchanged(held, before, s.after, s.axes, rank));
          break;
      }
    }
    // A reduction of n ranks adds each element n - 1 times across ranks, wherever the sum is made; an all-reduce then
    // copies each sum to n - 1 ranks.
    const std::uint64_t groups = static_cast<std::uint64_t>(w_.mesh.size() / w_.mesh.size(s.axes));
    const std::uint64_t crossings = static_cast<std::uint64_t>(w_.mesh.size(s.axes) - 1) * held[0].data.size() * groups;
    if (s.kind == transition_kind::reduce_scatter) sent_ += crossings;
    if (s.kind == transition_kind::all_reduce) sent_ += 2 * crossings;
    return result;
  }

  /// The rank at `index` in the group of `rank` over `axes`.
  std::size_t member(std::int64_t rank, const axis_list& axes, std::int64_t index) const {
    for (std::int64_t r = 0; r < w_.mesh.size(); ++r)
      if (w_.mesh.group_of(r, axes) == w_.mesh.group_of(rank, axes) && w_.mesh.index_in(r, axes) == index)
        return static_cast<std::size_t>(r);
    throw std::logic_error("no such member");
  }
  array sum(const shards& held, std::int64_t rank, const axis_list& axes) const {
    array total = held[static_cast<std::size_t>(rank)].like();
    for (std::int64_t i = 0; i < w_.mesh.size(axes); ++i) total += held[member(rank, axes, i)];
    return total;
  }

  static box whole_box(const array& a) {
    box b;
    b.dims = static_cast<int>(a.dims.size());
    for (std::size_t d = 0; d < a.dims.size(); ++d) b.global[d] = b.local[d] = a.sizes[d];
    return b;
  }
  static array piece(const array& a, dim_id dim, std::int64_t index, std::int64_t count) {
    box b = whole_box(a);
    const std::size_t d = static_cast<std::size_t>(a.find(dim));
    if (b.global[d] % count != 0) throw std::logic_error("a slice of what does not divide");
    b.local[d] = b.global[d] / count;
    b.offset[d] = index * b.local[d];
    return cut(a, b);
  }
  /// `count` arrays of the shape of `mine` side by side along `dim`; zeros where `part(i)` is null.
  template <class Part>
  static array joined(const array& mine, dim_id dim, std::int64_t count, Part&& part) {
    const std::size_t d = static_cast<std::size_t>(mine.find(dim));
    array a = mine;
    a.sizes[d] *= count;
    a = array(a.dims, a.sizes);
    box b = whole_box(a);
    b.local[d] = mine.sizes[d];
    for (std::int64_t i = 0; i < count; ++i) {
      b.offset[d] = i * b.local[d];
      if (const array* p = part(i)) paste(a, *p, b);
    }
    return a;
  }
  array exchanged(const shards& held, const layout& before, const layout& after, const axis_list& axes,
                  std::int64_t rank) {
    const box wanted = w_.part(after, rank);
    array a(held[0].dims, {wanted.local.begin(), wanted.local.begin() + wanted.dims});
    std::int64_t filled = 0;
    for (std::int64_t i = 0; i < w_.mesh.size(axes); ++i) {
      const std::int64_t from = static_cast<std::int64_t>(member(rank, axes, i));
      const box there = w_.part(before, from);
      const std::optional<box> common = intersect(wanted, there);
      if (!common) continue;
      box target = *common, source = *common;
      for (std::size_t d = 0; d < a.dims.size(); ++d) {
        target.offset[d] -= wanted.offset[d], target.global[d] = wanted.local[d];
        source.offset[d] -= there.offset[d], source.global[d] = there.local[d];
      }
      paste(a, cut(held[static_cast<std::size_t>(from)], source), target);
      filled += common->local_size();
      if (from != rank) sent_ += static_cast<std::uint64_t>(common->local_size());
    }
    if (filled != wanted.local_size()) throw std::logic_error("an all-to-all whose group does not hold what it needs");
    return a;
  }

  const world& w_;
  std::uint64_t sent_ = 0;
};

}  // namespace plait::test
