// Turns verdicts into errors. `enforced` and `boundary` refuse to compile and show the facts as types; `enforce`
// throws. `describe` writes layouts, meshes and plans as text for the messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/layout/errors.hpp"
#include "plait/layout/plan.hpp"
#include "plait/layout/rules.hpp"
#include "plait/layout/spec.hpp"

namespace plait {

/// The facts of a compile error, as types that the compiler prints. Facts that a rule does not know are left out.
template <class Axis>
struct on_axis {};
template <class Dim>
struct on_dim {};
template <state First, state Second>
struct states {};
template <operand Operand>
struct of_operand {};
template <class... Dims>
struct expected_dims {};
template <class... Dims>
struct given_dims {};
template <class... Specs>
struct among {};
struct unknown_tag {};

/// Whether an earlier check has refused `Where`, a policy or a strategy. Later checks of what is derived from it are
/// then silent, so one mistake gives one error.
template <class Where>
inline constexpr bool refused_before = false;

namespace detail {

template <std::size_t I, class List>
struct tag_or_unknown {
  using type = type_at<I, List>;
};
template <std::size_t I, class List>
  requires(I >= List::size)
struct tag_or_unknown<I, List> {
  using type = unknown_tag;
};

/// The facts of the verdict `Verdict::value`, whose tags are among `Dims` and `Axes`.
template <class Verdict, class Dims, class Axes>
struct facts {
  static constexpr verdict v = Verdict::value;

  template <dim_id Dim>
  using dim_tag_of = typename tag_or_unknown<index_of(Dim, Dims{}), Dims>::type;
  template <template <class...> class List, std::size_t... Is>
  static List<dim_tag_of<v.expected[Is]>...> expected(std::index_sequence<Is...>);
  template <template <class...> class List, std::size_t... Is>
  static List<dim_tag_of<v.given[Is]>...> given(std::index_sequence<Is...>);

  template <bool Known, class... Facts>
  using if_known = std::conditional_t<Known, type_list<Facts...>, type_list<>>;
  using type = concat<
      if_known<static_cast<bool>(v.axis), on_axis<typename tag_or_unknown<index_of(v.axis, Axes{}), Axes>::type>>,
      if_known<static_cast<bool>(v.dim) && v.code != layout_error::dims_differ, on_dim<dim_tag_of<v.dim>>>,
      if_known<v.first != state::invariant || v.second != state::invariant, states<v.first, v.second>>,
      if_known<!v.expected.empty() || !v.given.empty(), of_operand<v.of>,
               decltype(expected<expected_dims>(std::make_index_sequence<v.expected.size()>{})),
               decltype(given<given_dims>(std::make_index_sequence<v.given.size()>{}))>>;
};

template <layout_error Error, class Facts>
struct refused_with;
template <layout_error Error, class... Facts>
struct refused_with<Error, type_list<Facts...>> {
  using type = refused<Error, Facts...>;
};

template <class Verdict, class Where, class... Specs>
struct layout_refusal {
  using found = facts<Verdict, concat<typename Specs::dims...>, concat<typename Specs::axes...>>;
  using type = typename refused_with<found::v.code, concat<typename found::type, type_list<Where>>>::type;
};
/// `accepted`, or the class whose instantiation is the error.
template <class Verdict, class Where, class... Specs>
using consequence = typename consequence_of<Verdict::value.ok(), layout_refusal<Verdict, Where, Specs...>>::type;
/// Like `consequence`, but `accepted` after an earlier refusal.
template <class Verdict, class Where, class... Specs>
using later_consequence = typename consequence_of<refused_before<Where> || Verdict::value.ok(),
                                                  layout_refusal<Verdict, Where, Specs...>>::type;

}  // namespace detail

/// Refuses to compile unless the verdict `Verdict::value` is ok. The message shows the offending axis and dim, found
/// among the tags of `Specs`, and the states of the operands there. It also shows `Where`, the policy or layer that is
/// wrong.
template <class Verdict, class Where, class... Specs>
inline constexpr bool enforced = sizeof(detail::later_consequence<Verdict, Where, Specs...>) > 0;

namespace detail {

template <class Spec, class Mesh>
struct boundary_verdict {
  static constexpr verdict value = check_boundary(layout_v<Spec>, Mesh::static_shape());
};
template <class Mesh>
struct mesh_tags {
  using dims = type_list<>;
  using axes = typename Mesh::tags;
};

}  // namespace detail

/// Refuses to compile unless `Spec` mentions every axis of `Mesh` and no other. `Where` is the policy or layer whose
/// boundary this is; the message names it. tensor/context.hpp checks a mesh that is known at run time only.
template <spec_like Spec, mesh_like Mesh, class Where>
inline constexpr bool boundary =
    sizeof(detail::later_consequence<detail::boundary_verdict<Spec, Mesh>, Where, Spec, detail::mesh_tags<Mesh>>) > 0;

/// "cp, tp".
std::string describe(const axis_list& axes);

/// A layout as its spec is written: "<shard<seq, cp, tp>, hidden, partial<dp>>".
std::string describe(const layout& a);

/// "2 dp * 4 tp".
std::string describe(const mesh_shape& mesh);

/// "all_gather of seq over cp, tp (varying -> replicated)".
inline std::string describe(const redistribution_step& s) {
  std::string text = name_of(s.kind);
  if (s.dim) text += std::string(" of ") + s.dim.text();
  return cat({text, " over ", describe(s.axes), " (", name_of(s.from), " -> ", name_of(s.to), ")"});
}

/// "<batch, seq, hidden>".
inline std::string describe(const dim_list& dims) {
  std::string text;
  for (dim_id dim : dims) text += (text.empty() ? "" : ", ") + std::string(dim.text());
  return cat({"<", text, ">"});
}

/// The broken rule, then its facts: " [axis tp, dim hidden, varying and replicated]". Where dims differ: " [weight:
/// <ffn, hidden> expected, <hidden, ffn> given]".
std::string describe(const verdict& v);

/// The two layouts of a plan, then one line for each step.
std::string describe(const plan& p);

/// Throws, unless the verdict is ok, an `error` with the text of the corresponding `static_assert`. `where` names the
/// layer or the tensor.
inline void enforce(const verdict& v, std::string_view where) {
  if (!v.ok()) fail({where, ": ", describe(v)});
}

}  // namespace plait

#ifndef PLAIT_COMPILED
namespace plait {

PLAIT_INLINE std::string describe(const axis_list& axes) {
  std::string text;
  for (axis_id axis : axes) text += (text.empty() ? "" : ", ") + std::string(axis.text());
  return text;
}

PLAIT_INLINE std::string describe(const mesh_shape& mesh) {
  std::string text;
  for (std::size_t i = 0; i < mesh.axes.size(); ++i) {
    const std::int64_t extent = mesh.extents[i];
    append(text, {i == 0 ? "" : " * ", extent == dynamic ? "?" : std::to_string(extent), " ", mesh.axes[i].text()});
  }
  return text;
}

PLAIT_INLINE std::string describe(const layout& a) {
  std::string items;
  const auto add = [&items](const std::string& item) { items += (items.empty() ? "" : ", ") + item; };
  for (const dim_placement& p : a.dims)
    add(p.axes.empty() ? p.dim.text() : cat({"shard<", p.dim.text(), ", ", describe(p.axes), ">"}));
  if (!a.replicated.empty()) add(cat({"replicate<", describe(a.replicated), ">"}));
  if (!a.partial.empty()) add(cat({"partial<", describe(a.partial), ">"}));
  if (!a.invariant.empty()) add(cat({"invariant<", describe(a.invariant), ">"}));
  return cat({"<", items, ">"});
}

PLAIT_INLINE std::string describe(const verdict& v) {
  std::string facts;
  const auto add = [&facts](const std::string& fact) { facts += (facts.empty() ? "" : ", ") + fact; };
  if (v.axis) add(std::string("axis ") + v.axis.text());
  const bool lists = !v.expected.empty() || !v.given.empty();
  if (v.dim && !lists) add(std::string("dim ") + v.dim.text());
  if (v.first != state::invariant || v.second != state::invariant)
    add(v.first == v.second ? name_of(v.first) : cat({name_of(v.first), " and ", name_of(v.second)}));
  if (lists)
    add(cat({v.of == operand::none ? "" : std::string(name_of(v.of)) + ": ", describe(v.expected), " expected, ",
             describe(v.given), " given"}));
  return text_of(v.code) + (v.ok() || facts.empty() ? "" : cat({" [", facts, "]"}));
}

PLAIT_INLINE std::string describe(const plan& p) {
  std::string text = cat({describe(p.from), " -> ", describe(p.to)});
  if (!p.verdict.ok()) return cat({text, ": ", describe(p.verdict)});
  if (p.steps.empty()) return text + ": nothing to do";
  for (const redistribution_step& s : p.steps) append(text, {"\n  ", describe(s), ": ", describe(s.after)});
  return text;
}

}  // namespace plait
#endif

#include "plait/core/macros_on.hpp"
