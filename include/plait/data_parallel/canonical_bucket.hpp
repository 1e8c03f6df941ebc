// The reduction of a bucket whose gradients are canonical sums: array by array, over norms' own axes first, then over
// data-parallel ranks, who get their pieces. It replaces no collective otherwise.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/nn/parameter.hpp"

namespace plait {

/// The axes over which a bucket's gradients are reduced, one set after the other; any may be empty.
struct canonical_axes {
  axis_list cut;     ///< over whose ranks the bucket is cut
  axis_list joined;  ///< over which it is reduced and stays whole
};

template <class Precision, compute_device Device>
class canonical_bucket {
  using G = gradient_of<Precision>;
  using array_type = parameter_array<Precision, Device>;
  using terms_type = gradient_terms<Precision, Device>;

 public:
  canonical_bucket() = default;
  /// Of a bucket that is cut into pieces of `piece` elements, of which this rank has the one of `rank`.
  canonical_bucket(canonical_axes axes, std::int64_t piece, std::int64_t rank)
      : axes_(std::move(axes)), piece_(piece), rank_(rank) {}

  /// Adds the arrays of a bucket's members, which begin there in it. Collective over the axes.
  template <class Member>
  void add(const context<Device>& ctx, std::span<const Member> members, const std::vector<array_type*>& arrays,
           const std::vector<std::int64_t>& begins) {
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      const Member* first = nullptr;
      for (const Member& m : members) {
        if (m.who->array().get() != arrays[i] || !m.who->trainable()) continue;
        if (first && !(first->how.rest == m.how.rest))
          fail({"parameter ", m.who->name(),
                ": canonical numerics (deterministic) have no order for parameters side by "
                "side that are reduced over different axes, as this one and ",
                first->who->name()});
        first = &m;
      }
      if (first) add(ctx, *arrays[i], begins[i], first->how.rest, first->who->name());
    }
  }
  /// Adds an array that begins at `begin` in the bucket; `rest` are further axes of its gradients. `name` is one of its
  /// parameters. Collective over the axes.
  void add(const context<Device>& ctx, array_type& array, std::int64_t begin, const axis_list& rest,
           const std::string& name) {
    for (const auto& terms : array.terms()) {
      sum& s = sums_.emplace_back();
      s.array = &array, s.terms = terms.get(), s.begin = begin, s.name = name;
      s.adds = terms != array.terms().front();
      axis_list done;
      const auto exchange = [&](canonical_exchange& to, const axis_list& over, world::channel purpose) {
        if (over.empty()) return;
        to = terms->exchange(ctx.ranks, over, done, purpose);
        for (axis_id axis : over) done.push_back(axis);
      };
      exchange(s.rest, rest, world::channel::layers);
      exchange(s.cut, axes_.cut, world::channel::reductions);
      exchange(s.joined, axes_.joined, world::channel::reductions);
    }
  }

  /// Starts the reductions over the axes that cut the bucket.
  void start(const context<Device>& ctx) {
    for (sum& s : sums_) {
      const std::int64_t n = s.array->size();
      partial_sums<G, Device> own = s.terms->parts(0);
      if (own.nodes.empty())
        fail({"gradient of ", s.name, ": a layer that uses it has added no canonical sum in this step"});
      if (s.rest) own = s.rest.run_everywhere(ctx.device, std::move(own), n);
      if (s.cut)
        s.moving.emplace(s.cut.start(ctx.device, std::move(own), parts_of(s.begin, n, s.cut.ranks())));
      else
        s.whole = std::move(own);
    }
  }
  /// Waits, and writes this rank's piece of the complete gradients, or all of them.
  void finish(const context<Device>& ctx, G* gradients) {
    for (sum& s : sums_) {
      const element_range mine =
          s.moving ? s.moving->parts[static_cast<std::size_t>(rank_)] : element_range{0, s.array->size()};
      G* const to = gradients + s.begin + mine.begin - (axes_.cut.empty() ? 0 : rank_ * piece_);
      G* const into = s.adds ? nullptr : to;  // the last exchange writes there
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
  /// Waits for what is under way, and forgets it.
  void abandon() {
    for (sum& s : sums_) s.moving.reset(), s.whole = {};
  }

 private:
  /// The sums that one layer adds to one array.
  struct sum {
    array_type* array = nullptr;
    terms_type* terms = nullptr;
    std::int64_t begin = 0;
    std::string name;
    bool adds = false;  ///< to what another layer has added
    canonical_exchange rest, cut, joined;
    partial_sums<G, Device> whole{};
    std::optional<canonical_exchange::under_way<G, Device>> moving{};
  };

  std::vector<element_range> parts_of(std::int64_t begin, std::int64_t size, std::int64_t ranks) const {
    std::vector<element_range> parts;
    for (std::int64_t r = 0; r < ranks; ++r)
      parts.push_back({std::clamp<std::int64_t>(r * piece_ - begin, 0, size),
                       std::clamp<std::int64_t>((r + 1) * piece_ - begin, 0, size)});
    return parts;
  }

  canonical_axes axes_;
  std::int64_t piece_ = 0, rank_ = 0;
  std::vector<sum> sums_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
