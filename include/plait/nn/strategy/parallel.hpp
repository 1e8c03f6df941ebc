// A strategy for blocks in which attention and MLP stand side by side, with one gather and one reduction.
#pragma once

#include "plait/layout/errors.hpp"
#include "plait/nn/strategy.hpp"

namespace plait {
namespace detail {

/// The residual with the axes of a branch's weights in another state, which shard nothing of it then.
template <class S, state State>
struct beside_value {
  static constexpr layout value = [] {
    layout a = layout_v<typename S::residual>;
    for (axis_id axis : sharding_axes(layout_v<spec<typename S::query_heads>>)) {
      for (dim_placement& p : a.dims)
        if (const int at = p.axes.find(axis); at >= 0) p.axes.erase(static_cast<std::size_t>(at));
      a.set(axis, State);
    }
    return a;
  }();
};

}  // namespace detail

/// `Base` for blocks whose branches stand side by side (PaLM, Chowdhery et al. 2022): y = x + attention(norm(x)) +
/// mlp(norm(x)). Attention and MLP take the stream replicated over the axes of their weights and end partial over them,
/// so that `sum<residual, residual, attention, mlp>` gathers once and reduces once for both, each way.
template <class Base>
struct in_parallel : Base {
  static_assert(detail::sharding_axes(layout_v<spec<typename Base::query_heads>>) ==
                    detail::sharding_axes(layout_v<spec<typename Base::feed_forward>>),
                "branches side by side need heads and ffn sharded over the same axes, in the same order");
  using branch_input = spec_from<detail::beside_value<Base, state::replicated>, typename Base::residual,
                                 spec<typename Base::query_heads>>;
  using branch_output =
      spec_from<detail::beside_value<Base, state::partial>, typename Base::residual, spec<typename Base::query_heads>>;
};

}  // namespace plait
