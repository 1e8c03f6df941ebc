// Reads the text of a mesh, such as "dp=2,tp=4", into a `mesh_shape`. tests/unit/layout/parse.cpp lists the message of
// every mistake.
#pragma once

#include <charconv>
#include <string>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/layout/mesh.hpp"

namespace plait {

namespace detail {

[[noreturn]] inline void bad_mesh(std::string_view text, const std::string& what) { fail({"mesh ", text, ": ", what}); }

/// The axes of a mesh as a user may write them: "dp, cp=2 (fixed), tp".
inline std::string list_axes(const mesh_shape& known) {
  std::string list;
  for (std::size_t i = 0; i < known.axes.size(); ++i) {
    if (i > 0) list += ", ";
    list += known.axes[i].text();
    if (known.extents[i] != dynamic) append(list, {"=", known.extents[i], " (fixed)"});
  }
  return list;
}

constexpr std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

inline int find_axis(const mesh_shape& known, std::string_view name) {
  for (std::size_t i = 0; i < known.axes.size(); ++i)
    if (name == known.axes[i].text()) return static_cast<int>(i);
  return -1;
}

inline std::int64_t parse_extent(std::string_view text, std::string_view item, std::string_view value) {
  std::int64_t extent = 0;
  const auto [end, problem] = std::from_chars(value.data(), value.data() + value.size(), extent);
  if (problem == std::errc::result_out_of_range)
    bad_mesh(text, cat({"\"", item, "\" has an extent beyond the number of ranks of any machine"}));
  if (value.find(' ') != value.npos)
    bad_mesh(text, cat({"\"", item, "\" has a space in it; axes are separated by commas, as in dp=2,tp=4"}));
  if (problem != std::errc{} || end != value.data() + value.size() || extent < 1)
    bad_mesh(text, cat({"\"", item, "\" is not AXIS=EXTENT with a positive whole number, as in tp=4"}));
  return extent;
}

inline mesh_shape parse_mesh(std::string_view text, std::int64_t ranks, const mesh_shape& known) {
  static_vector<std::int64_t, max_axes> written;
  for (std::size_t i = 0; i < known.axes.size(); ++i) written.push_back(0);
  for (std::string_view rest = trimmed(text); !rest.empty();) {
    const std::size_t comma = rest.find(',');
    const std::string_view item = trimmed(rest.substr(0, comma));
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
    if (item.empty() || (comma != std::string_view::npos && rest.empty()))
      bad_mesh(text, "a comma without an axis next to it; legal is a list like dp=2,tp=4");
    const std::size_t equals = item.find('=');
    const std::string name(trimmed(item.substr(0, equals)));
    const int i = find_axis(known, name);
    if (i < 0 && equals == std::string_view::npos)
      bad_mesh(text, cat({"\"", item, "\" names no axis; legal is a list of AXIS=EXTENT, as in dp=2,tp=4, of the axes ",
                          list_axes(known)}));
    if (i < 0) bad_mesh(text, cat({"unknown axis \"", name, "\"; the axes of this mesh are ", list_axes(known)}));
    const std::size_t at = static_cast<std::size_t>(i);
    if (written[at] != 0) bad_mesh(text, cat({"axis \"", name, "\" is given twice"}));
    written[at] = parse_extent(text, item, equals == std::string_view::npos ? "" : trimmed(item.substr(equals + 1)));
    if (known.extents[at] != dynamic && written[at] != known.extents[at])
      bad_mesh(text, cat({"axis \"", name, "\" has the fixed extent ", known.extents[at], ", not ", written[at]}));
  }

  mesh_shape shape;
  std::string product;
  std::int64_t size = 1;
  for (std::size_t i = 0; i < known.axes.size(); ++i) {
    const std::int64_t extent = written[i] != 0 ? written[i] : known.extents[i] != dynamic ? known.extents[i] : 1;
    if (extent > (std::int64_t{1} << 31) / size) bad_mesh(text, "the extents multiply to more than 2147483648 ranks");
    size *= extent;
    shape.add(known.axes[i], extent);
    append(product, {i > 0 ? " * " : "", known.axes[i].text(), "=", extent});
  }
  if (ranks >= 0 && size != ranks)
    bad_mesh(text, cat({"the extents ", product, " multiply to ", size, " ranks, and there are ", ranks}));
  return shape;
}

}  // namespace detail

/// Returns the shape that a text such as "dp=2,tp=4" gives to `Mesh`; axes come in any order. Axes that the text leaves
/// out have their static extent, or 1. `ranks` is the number of existing ranks; a negative number skips this check.
///
/// Throws `error` if an axis is unknown or given twice, or if an extent is not a positive number or contradicts a
/// static one. Throws it also if the product of the extents is not `ranks`.
template <mesh_like Mesh>
mesh_shape parse_mesh(std::string_view text, std::int64_t ranks = -1) {
  return detail::parse_mesh(text, ranks, Mesh::static_shape());
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
