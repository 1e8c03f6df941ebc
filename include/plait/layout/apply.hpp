// Typed calls of a program's own kernels. `apply` calls a kernel on bare pointers if the specs of its arrays agree with
// a rule; otherwise the call does not compile. So no nonlinear kernel can read a pending sum.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <tuple>
#include <type_traits>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/part.hpp"
#include "plait/layout/rules.hpp"
#include "plait/layout/spec.hpp"

namespace plait {

namespace detail {

/// An operand of a kernel: its layout, and whether it holds indices (token ids, labels), which have no gradient.
struct kernel_operand {
  layout lies;
  bool indices = false;
};
using kernel_operands = std::initializer_list<kernel_operand>;

/// The layout of operand `a`, with the states of indices adapted to the operand `first`. A rank only needs the right
/// part of indices, so for them invariant and replicated are equivalent.
constexpr layout operand_layout(kernel_operand a, const layout& first) {
  if (a.indices)
    for (axis_id axis : union_of(a.lies.mentioned(), first.mentioned()))
      if (!a.lies.sharded_by(axis) && a.lies.state_of(axis) != state::partial)
        a.lies.set(axis, first.state_of(axis) == state::invariant ? state::invariant : state::replicated);
  return a.lies;
}

/// Removes the dims `mixed` from `a`. The kernel mixes their elements, so they must be whole.
constexpr void remove_dims(layout& a, const dim_list& mixed, verdict& v) {
  for (dim_id dim : mixed) {
    const int at = a.find(dim);
    if (at < 0) continue;
    for (axis_id axis : a.axes_of(dim))
      v.worsen({layout_error::reduced_over_shard, axis, dim, state::varying, state::varying});
    a.dims.erase(static_cast<std::size_t>(at));
  }
}

/// The layout of a kernel's result that is elementwise along all dims except `mixed`; along these the kernel may do
/// anything. `out` are the dims of the result.
constexpr derived_layout derive_pointwise(combine how, const dim_list& mixed, const dim_list& out,
                                          kernel_operands all) {
  derived_layout r;
  static_vector<layout, 5> in;
  std::size_t widest = 0;  // the index of the operand that has all dims of the result except the mixed ones
  for (const kernel_operand& a : all) {
    in.push_back(operand_layout(a, all.begin()->lies));
    remove_dims(in.back(), mixed, r.verdict);
    if (in.back().dims.size() > in[widest].dims.size()) widest = in.size() - 1;
  }
  if (!r.verdict.ok()) return r;
  if (widest != 0) std::swap(in[0], in[widest]);
  static_vector<const layout*, 5> at;
  for (const layout& a : in) at.push_back(&a);
  const derived_layout joined = pointwise(how, at);
  r = joined;
  r.result.dims = {};
  bool fits = true;
  for (dim_id dim : out) {
    fits = fits && (joined.result.has(dim) || mixed.contains(dim));
    r.result.dims.push_back({dim, joined.result.axes_of(dim)});
  }
  for (const dim_placement& p : joined.result.dims) fits = fits && out.contains(p.dim);
  if (!fits) r.verdict.worsen(compare_dims(operand::output, joined.result.dim_order(), out));
  return r;
}

}  // namespace detail

/// The rules that `apply` knows. The program names the rule that its kernel follows; plait derives the layouts.
namespace rule {

/// A kernel that works element by element along all dims except `Mixed`. Along `Mixed` it may do anything, and these
/// dims must be whole.
template <combine How, dim_like... Mixed>
struct elementwise {
  /// The rule of a kernel that also mixes the elements along these dims, as attention does along seq and head_dim.
  template <dim_like... Dims>
  static constexpr elementwise<How, Mixed..., Dims...> over() {
    return {};
  }
  static constexpr derived_layout derive(const dim_list& out, detail::kernel_operands in) {
    dim_list mixed;
    (mixed.push_back(dim_of<Mixed>), ...);
    return detail::derive_pointwise(How, mixed, out, in);
  }
};
/// Linear in all operands jointly: add, subtract, scale, cast, copy.
inline constexpr elementwise<combine::sum> sum{};
/// Linear in each operand: the backward kernel of a function, dx = f'(x) dy, or a gate.
inline constexpr elementwise<combine::product> product{};
/// Not linear: an activation, a softmax, a norm.
inline constexpr elementwise<combine::nonlinear> nonlinear{};

/// Adds its operands to the output's current content, which counts as an operand of the sum: y += x.
struct add_rule : elementwise<combine::sum> {
  static constexpr bool updates = true;
};
inline constexpr add_rule add{};

/// A contraction of two operands over every dim that the output lacks: a matrix product, or the gradient of a scale.
struct contraction_rule {
  static constexpr std::size_t operands = 2;
  static constexpr derived_layout derive(const dim_list& out, detail::kernel_operands in) {
    return contract(in.begin()[0].lies, in.begin()[1].lies, out);
  }
};
inline constexpr contraction_rule contraction{};

/// A sum of one operand over every dim that the output lacks: the gradient of a bias.
struct reduction_rule {
  static constexpr std::size_t operands = 1;
  static constexpr derived_layout derive(const dim_list& out, detail::kernel_operands in) {
    derived_layout r{in.begin()->lies, {}};
    for (dim_id dim : in.begin()->lies.dim_order())
      if (!out.contains(dim)) r.result = reduce_sum(r.result, dim).result;
    return r;
  }
};
inline constexpr reduction_rule reduction{};

/// Rows of a table (the first operand) at the ids in the second operand. The kernel must write zeros for rows that this
/// rank does not hold.
template <dim_like Rows>
struct lookup_rule {
  static constexpr std::size_t operands = 2;
  static constexpr derived_layout derive(const dim_list&, detail::kernel_operands in) {
    return lookup(in.begin()[0].lies, in.begin()[1].lies, dim_of<Rows>);
  }
};
template <dim_like Rows>
inline constexpr lookup_rule<Rows> rows_of{};

}  // namespace rule

/// The outputs of a kernel that writes several arrays.
template <class... Outs>
struct outputs {
  explicit outputs(const Outs&... all) : parts(all...) {}
  std::tuple<const Outs&...> parts;
};

/// The local sizes of a kernel's dims on this rank.
class local_sizes {
 public:
  void add(const layout& a, const box& where) {
    for (std::size_t d = 0; d < a.dims.size(); ++d) sizes_.set(a.dims[d].dim, where.local[d]);
  }
  std::int64_t operator[](dim_id dim) const {
    const std::int64_t size = sizes_.of(dim);
    if (size < 0) fail({"local_sizes: no array of this kernel has the dim ", dim.text()});
    return size;
  }

 private:
  dim_sizes sizes_;
};

namespace detail {

template <class Part>
using pointer_of = decltype(std::declval<const Part&>().unchecked());

template <class Rule, class Out, class... Ins>
struct kernel_value {
  static constexpr verdict value = [] {
    const layout& out = layout_v<typename Out::spec>;
    const derived_layout derived = [&] {
      if constexpr (requires { Rule::updates; })
        return Rule::derive(out.dim_order(),
                            {{out}, {layout_v<typename Ins::spec>, std::integral<typename Ins::value_type>}...});
      else
        return Rule::derive(out.dim_order(),
                            {{layout_v<typename Ins::spec>, std::integral<typename Ins::value_type>}...});
    }();
    if (!derived.verdict.ok()) return derived.verdict;
    if (const verdict v = compare_dims(operand::output, derived.result.dim_order(), out.dim_order()); !v.ok()) return v;
    for (axis_id axis : differing_axes(derived.result, out)) {
      const dim_id dim = derived.result.sharded_by(axis) ? derived.result.sharded_by(axis) : out.sharded_by(axis);
      return verdict{layout_error::output_not_derived, axis, dim, derived.result.state_of(axis), out.state_of(axis)};
    }
    return verdict{};
  }();
};

/// Carries the facts that a compile error of `apply` shows: the rule, the output and the operands.
template <class Rule, class Out, class... Ins>
struct kernel_with {};

/// Refuses to compile unless the spec of `Out` is the one that the rule derives from `Ins`.
template <class Rule, class Out, class... Ins>
inline constexpr bool follows =
    enforced<kernel_value<Rule, Out, Ins...>, kernel_with<Rule, typename Out::spec, typename Ins::spec...>,
             typename Out::spec, typename Ins::spec...>;

/// Whether a rule takes this number of operands.
template <class Rule, std::size_t Operands>
inline constexpr bool takes_operands = Operands >= 1 && Operands <= 4;
template <class Rule, std::size_t Operands>
  requires requires { Rule::operands; }
inline constexpr bool takes_operands<Rule, Operands> = Operands == Rule::operands;

/// Whether a kernel can be called with its outputs, its operands and the further argument `More`; void: none.
template <class Kernel, class More, class First, class Others, class... Ts>
inline constexpr bool takes_kernel_arguments = false;
template <class Kernel, class More, class First, class... Outs, class... Ts>
inline constexpr bool takes_kernel_arguments<Kernel, More, First, outputs<Outs...>, Ts...> =
    std::is_invocable_v<Kernel, pointer_of<First>, pointer_of<Outs>..., const Ts*..., More>;
template <class Kernel, class First, class... Outs, class... Ts>
inline constexpr bool takes_kernel_arguments<Kernel, void, First, outputs<Outs...>, Ts...> =
    std::is_invocable_v<Kernel, pointer_of<First>, pointer_of<Outs>..., const Ts*...>;

[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_kernel_sizes(dim_id dim, std::int64_t in, std::int64_t out) {
  fail({"apply: ", dim.text(), " is ", in, " in an operand and ", out,
        " in the output; make all arrays of a kernel for one context, or one rank_place"});
}
[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_kernel_memory() {
  fail("apply: an array of this kernel has no memory");
}

/// Throws unless the two arrays have equal global sizes of the dims that they share.
template <class Out, class In>
void require_equal_sizes(const Out& out, const In& in) {
  int d = 0;
  for (const dim_placement& p : layout_v<typename Out::spec>.dims) {
    const int at = layout_v<typename In::spec>.find(p.dim);
    if (at >= 0 && in.where().global[at] != out.where().global[d])
      refuse_kernel_sizes(p.dim, in.where().global[at], out.where().global[d]);
    ++d;
  }
}

}  // namespace detail

/// Returns a kernel that appends these arguments to its arrays: `bind_back(attention, samples, length)`.
template <class Kernel, class... Arguments>
auto bind_back(Kernel kernel, Arguments... arguments) {
  return [=](auto*... arrays) { return kernel(arrays..., arguments...); };
}

/// Calls a program's kernel on bare pointers: kernel(out, in...). A kernel may take one argument after them:
/// `local_sizes`, or the number of local elements of the first output.
///
/// Does not compile if the specs disagree with the rule, or if an output's spec is not the derived one. Throws if an
/// array has no memory, or if the arrays have different sizes of a dim. `apply` does nothing else: the kernel alone
/// writes the outputs.
///
///     pl::apply(pl::rule::nonlinear, gelu_forward, active, up);       // void gelu_forward(float*, const float*, long)
///     pl::apply(pl::rule::product, gelu_backward, dup, dactive, up);  // dup has the dual of up's spec
///     pl::apply(pl::rule::nonlinear.over<seq, three, head_dim>(), attention, mixed, qkv);
template <class Rule, class Kernel, class First, class... Outs, class... Ts, spec_like... Ins>
void apply(Rule, Kernel&& kernel, const outputs<First, Outs...>& out, const part<Ts, Ins>&... in) {
  constexpr bool countable = detail::takes_operands<Rule, sizeof...(Ins)>;
  static_assert(
      countable,
      "a kernel has one to four operands in addition to its outputs: a contraction two, a reduction one, rows_of a "
      "table and ids");
  if constexpr (countable)
    static_assert(
        (detail::follows<Rule, First, part<Ts, Ins>...> && ... && detail::follows<Rule, Outs, part<Ts, Ins>...>));
  std::apply(
      [&](const First& first, const Outs&... others) {
        if ((!first || ... || !others) || (... || !in)) detail::refuse_kernel_memory();
        (detail::require_equal_sizes(first, others), ...);
        (detail::require_equal_sizes(first, in), ...);
        const auto call = [&](const auto&... more) {
          std::forward<Kernel>(kernel)(first.unchecked(), others.unchecked()...,
                                       static_cast<const Ts*>(in.unchecked())..., more...);
        };
        if constexpr (detail::takes_kernel_arguments<Kernel, const local_sizes&, First, outputs<Outs...>, Ts...>) {
          local_sizes sizes;
          (sizes.add(layout_v<Ins>, in.where()), ...);
          (sizes.add(layout_v<typename Outs::spec>, others.where()), ...);
          sizes.add(layout_v<typename First::spec>, first.where());
          call(sizes);
        } else if constexpr (detail::takes_kernel_arguments<Kernel, std::int64_t, First, outputs<Outs...>, Ts...>) {
          call(first.size());
        } else {
          constexpr bool fits = detail::takes_kernel_arguments<Kernel, void, First, outputs<Outs...>, Ts...>;
          static_assert(fits,
                        "a kernel takes a pointer to each output and a pointer to const for each operand, in their "
                        "order, and then local_sizes, a number of elements, or nothing");
          if constexpr (fits) call();
        }
      },
      out.parts);
}
template <class Rule, class Kernel, class T, spec_like Out, class... Ts, spec_like... Ins>
part<T, Out> apply(Rule rule, Kernel&& kernel, const part<T, Out>& out, const part<Ts, Ins>&... in) {
  apply(rule, std::forward<Kernel>(kernel), outputs<part<T, Out>>(out), in...);
  return out;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
