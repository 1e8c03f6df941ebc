// The definitions of check.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "plait/core/compiled.hpp"
#include "plait/core/text.hpp"

namespace plait {

PLAIT_INLINE std::string describe(const axis_list& axes) {
  std::string text;
  for (axis_id axis : axes) text += (text.empty() ? "" : ", ") + std::string(axis.text());
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

PLAIT_INLINE std::string describe(const mesh_shape& mesh) {
  std::string text;
  for (std::size_t i = 0; i < mesh.axes.size(); ++i) {
    const std::int64_t extent = mesh.extents[i];
    append(text, {i == 0 ? "" : " * ", extent == dynamic ? "?" : std::to_string(extent), " ", mesh.axes[i].text()});
  }
  return text;
}

PLAIT_INLINE std::string describe(const redistribution_step& s) {
  std::string text = name_of(s.kind);
  if (s.dim) text += std::string(" of ") + s.dim.text();
  return cat({text, " over ", describe(s.axes), " (", name_of(s.from), " -> ", name_of(s.to), ")"});
}

PLAIT_INLINE std::string describe(const dim_list& dims) {
  std::string text;
  for (dim_id dim : dims) text += (text.empty() ? "" : ", ") + std::string(dim.text());
  return cat({"<", text, ">"});
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
