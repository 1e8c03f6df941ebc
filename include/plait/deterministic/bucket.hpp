// The reduction of a bucket whose gradients are deterministic sums, in place of its all-reduce or reduce-scatter.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/world.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/deterministic/exchange.hpp"
#include "plait/deterministic/gradient_terms.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

/// Reduces the gradients of a bucket, one array after the other. It reduces over norms' additional axes first. Then it
/// reduces over data-parallel ranks, each of which gets its slice.
template <class Precision, compute_device Device>
class deterministic_bucket {
  using G = gradient_of<Precision>;
  using terms_type = gradient_terms<Precision, Device>;

 public:
  /// For a bucket that is split over the ranks of `cut` into slices of `slice` elements. This rank has slice number
  /// `rank`. Over `joined`, the bucket is reduced without being split. Either list of axes may be empty.
  deterministic_bucket(axis_list cut, axis_list joined, std::int64_t slice, std::int64_t rank)
      : cut_(std::move(cut)), joined_(std::move(joined)), slice_(slice), rank_(rank) {}

  /// Adds the sums of an array, one for each of its `users`. The array has `size` elements, and begins at `begin` in
  /// the bucket. `rest` are further axes of its gradients; `name` is one of its parameters. Collective over the axes.
  void add(const context<Device>& ctx, const std::vector<std::unique_ptr<terms_type>>& users, std::int64_t size,
           std::int64_t begin, const axis_list& rest, const std::string& name) {
    for (const auto& terms : users) {
      sum& s = sums_.emplace_back();
      s.terms = terms.get(), s.size = size, s.begin = begin, s.name = name;
      s.adds = terms != users.front();
      axis_list done;
      const auto exchange = [&](deterministic_exchange& to, const axis_list& over, world::channel purpose) {
        if (over.empty()) return;
        to = terms->exchange(ctx.ranks, over, done, purpose);
        for (axis_id axis : over) done.push_back(axis);
      };
      exchange(s.rest, rest, world::channel::layers);
      exchange(s.cut, cut_, world::channel::reductions);
      exchange(s.joined, joined_, world::channel::reductions);
    }
  }

  /// Starts the reductions over the axes that split the bucket.
  void start(const context<Device>& ctx) {
    for (sum& s : sums_) {
      const std::int64_t n = s.size;
      partial_sums<G, Device> own = s.terms->parts(0);
      if (own.nodes.empty())
        fail({"gradient of ", s.name, ": a layer that uses it has added no deterministic sum in this step"});
      if (s.rest) own = s.rest.run_everywhere(ctx.device, std::move(own), n);
      if (s.cut)
        s.moving.emplace(s.cut.start(ctx.device, std::move(own), parts_of(s.begin, n, s.cut.ranks())));
      else
        s.whole = std::move(own);
    }
  }
  /// Waits for the reductions, and writes this rank's slice of the complete gradients, or all of them.
  void finish(const context<Device>& ctx, G* gradients) {
    for (sum& s : sums_) {
      const element_range mine = s.moving ? s.moving->parts[static_cast<std::size_t>(rank_)] : element_range{0, s.size};
      G* const to = gradients + s.begin + mine.begin - (cut_.empty() ? 0 : rank_ * slice_);
      G* const into = s.adds ? nullptr : to;  // then the last exchange writes directly to the gradients
      partial_sums<G, Device> own;
      if (s.moving) {
        own = s.cut.finish(ctx.device, std::move(*s.moving), s.joined ? nullptr : into);
        s.moving.reset();
      } else {
        own = std::exchange(s.whole, {});
      }
      if (s.joined) own = s.joined.run_everywhere(ctx.device, std::move(own), mine.size(), into);
      const G* const complete = detail::complete_sum(own, s.terms->leaves().leaves(), s.name);
      if (s.adds)
        kernels::accumulate(ctx.device, complete, to, mine.size());
      else if (complete != to)
        ctx.device.copy(to, complete, static_cast<std::size_t>(mine.size()) * sizeof(G), ctx.device.main_stream());
      s.terms->clear();
    }
  }
  /// Waits for reductions in progress, and drops their results.
  void abandon() {
    for (sum& s : sums_) s.moving.reset(), s.whole = {};
  }

 private:
  /// The sums that one layer adds to one array.
  struct sum {
    terms_type* terms = nullptr;
    std::int64_t size = 0, begin = 0;
    std::string name;
    bool adds = false;  ///< whether it is added to another layer's sum
    deterministic_exchange rest, cut, joined;
    partial_sums<G, Device> whole{};
    std::optional<deterministic_exchange::in_flight<G, Device>> moving{};
  };

  std::vector<element_range> parts_of(std::int64_t begin, std::int64_t size, std::int64_t ranks) const {
    std::vector<element_range> parts;
    for (std::int64_t r = 0; r < ranks; ++r)
      parts.push_back({std::clamp<std::int64_t>(r * slice_ - begin, 0, size),
                       std::clamp<std::int64_t>((r + 1) * slice_ - begin, 0, size)});
    return parts;
  }

  axis_list cut_, joined_;
  std::int64_t slice_ = 0, rank_ = 0;
  std::vector<sum> sums_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
