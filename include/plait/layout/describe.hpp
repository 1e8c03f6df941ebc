#pragma once

#include <string>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/layout/plan.hpp"

namespace plait {

/// "cp, tp".
inline std::string describe(const axis_list& axes) {
  std::string text;
  for (axis_id axis : axes) text += (text.empty() ? "" : ", ") + std::string(axis.text());
  return text;
}

/// A layout as its spec is written: "<shard<seq, cp, tp>, hidden, partial<dp>>".
inline std::string describe(const layout& a) {
  std::string items;
  const auto add = [&items](const std::string& item) { items += (items.empty() ? "" : ", ") + item; };
  for (const dim_placement& p : a.dims)
    add(p.axes.empty() ? p.dim.text() : cat({"shard<", p.dim.text(), ", ", describe(p.axes), ">"}));
  if (!a.replicated.empty()) add(cat({"replicate<", describe(a.replicated), ">"}));
  if (!a.partial.empty()) add(cat({"partial<", describe(a.partial), ">"}));
  if (!a.invariant.empty()) add(cat({"invariant<", describe(a.invariant), ">"}));
  return cat({"<", items, ">"});
}

/// "2 dp * 4 tp".
inline std::string describe(const mesh_shape& mesh) {
  std::string text;
  for (std::size_t i = 0; i < mesh.axes.size(); ++i) {
    const std::int64_t extent = mesh.extents[i];
    append(text, {i == 0 ? "" : " * ", extent == dynamic ? "?" : std::to_string(extent), " ", mesh.axes[i].text()});
  }
  return text;
}

/// "all_gather of seq over cp, tp (varying -> replicated)".
inline std::string describe(const step& s) {
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

/// The rule that was broken, then its facts: " [axis tp, dim hidden, varying and replicated]", or, where dims differ,
/// " [weight: <ffn, hidden> expected, <hidden, ffn> given]".
inline std::string describe(const verdict& v) {
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

/// The two ends of a plan, then one line for each step.
inline std::string describe(const plan& p) {
  std::string text = cat({describe(p.from), " -> ", describe(p.to)});
  if (!p.verdict.ok()) return cat({text, ": ", describe(p.verdict)});
  if (p.steps.empty()) return text + ": nothing to do";
  for (const step& s : p.steps) append(text, {"\n  ", describe(s), ": ", describe(s.after)});
  return text;
}

/// Throws the run-time twin of the `static_assert` unless the verdict is ok. `where` names the layer or the tensor.
inline void enforce(const verdict& v, std::string_view where) {
  if (!v.ok()) fail({where, ": ", describe(v)});
}

}  // namespace plait
