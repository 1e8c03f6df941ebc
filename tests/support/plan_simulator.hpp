#pragma once

#include <optional>
#include <stdexcept>

#include "plait/layout/plan.hpp"
#include "support/placed_value.hpp"

/// Executes the steps of plans on integers for the ranks of a group. Counts the elements that a ring-optimal algorithm
/// sends: one for each element that a rank copies, or adds, from another.
namespace plait::test {

class plan_simulator {
 public:
  explicit plan_simulator(const world& w) : w_(w) {}

  /// Elements sent so far, by all ranks together.
  std::uint64_t sent() const { return sent_; }

  shards run(const plan& p, shards value) {
    for (std::size_t i = 0; i < p.steps.size(); ++i) value = run(p.steps[i], p.before(i), p.steps[i].after, value);
    return value;
  }

 private:
  shards run(const redistribution_step& s, const layout& before, const layout& after, const shards& held) {
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
          result.push_back(cut(mine, inside(w_.part(after, rank), w_.part(before, rank))));
          break;
        case transition_kind::pad:
          result.push_back(zeros(after, rank));
          paste(result.back(), mine, inside(w_.part(before, rank), w_.part(after, rank)));
          break;
        case transition_kind::all_gather:
          result.push_back(zeros(after, rank));
          for (std::int64_t i = 0; i < count; ++i) {
            const std::size_t r = member(rank, s.axes, i);
            paste(result.back(), held[r], inside(w_.part(before, static_cast<std::int64_t>(r)), w_.part(after, rank)));
          }
          sent_ += result.back().data.size() - mine.data.size();
          break;
        case transition_kind::reduce_scatter:
          result.push_back(cut(sum(held, rank, s.axes), inside(w_.part(after, rank), w_.part(before, rank))));
          sent_ += static_cast<std::uint64_t>(count - 1) * result.back().data.size();
          break;
        case transition_kind::all_reduce:
          result.push_back(sum(held, rank, s.axes));
          // Each element is added n - 1 times across ranks, wherever the sum is computed, and then copied to n - 1
          // ranks.
          if (index == 0) sent_ += 2 * static_cast<std::uint64_t>(count - 1) * mine.data.size();
          break;
        case transition_kind::all_to_all:
          result.push_back(exchanged(held, before, after, s.axes, rank));
          break;
      }
    }
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

  /// A part of a tensor, relative to the box that contains it.
  static box inside(box part, const box& whole) {
    for (int d = 0; d < part.dims; ++d) part.offset[d] -= whole.offset[d], part.global[d] = whole.local[d];
    return part;
  }
  array zeros(const layout& a, std::int64_t rank) const {
    const box part = w_.part(a, rank);
    return {dims_of(a), {part.local.begin(), part.local.begin() + part.dims}};
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
      paste(a, cut(held[static_cast<std::size_t>(from)], inside(*common, there)), inside(*common, wanted));
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
