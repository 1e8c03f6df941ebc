#pragma once

#include "plait/layout/check.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/plan.hpp"
#include "plait/schedule/errors.hpp"  // as in a program that trains: the texts of both are told apart

/// What the cases of the layout rules share: a policy to blame, and checks as a layer makes them.
namespace cases {

using namespace plait;

struct my_policy;

template <dim_list Out, class A, class B>
struct product_of {
  static constexpr verdict value = contract(layout_v<A>, layout_v<B>, Out).verdict;
};
template <combine How, class A, class B>
struct combination_of {
  static constexpr verdict value = pointwise(How, {&layout_v<A>, &layout_v<B>}).verdict;
};
template <class A>
struct nonlinear_of {
  static constexpr verdict value = pointwise(combine::nonlinear, {&layout_v<A>}).verdict;
};
template <class A, class Dim>
struct maximum_of {
  static constexpr verdict value = reduce_nonlinear(layout_v<A>, dim_of<Dim>).verdict;
};
template <class From, class To>
struct move_of {
  static constexpr verdict value = make_plan(layout_v<From>, layout_v<To>).verdict;
};
template <class Q, class KV>
struct attention_of {
  static constexpr verdict value =
      attend(layout_v<Q>, layout_v<KV>, layout_v<KV>, {dim_of<seq>, dim_of<heads>, dim_of<kv_heads>}).verdict;
};
template <class A, class Mesh, class Dim, std::int64_t Size>
struct parts_of {
  static constexpr verdict value = [] {
    dim_sizes sizes;
    sizes.set(dim_of<Dim>, Size);
    return check_parts(layout_v<A>, Mesh::static_shape(), sizes);
  }();
};
template <class... Dims>
inline constexpr dim_list out{dim_of<Dims>...};

}  // namespace cases
