// The definitions of check_values.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::detail {

PLAIT_INLINE std::uint32_t equal_axes(const mesh_shape& mesh, const layout& a, const axis_list& other_than) {
  std::uint32_t bits = 0;
  for (std::size_t i = 0; i < mesh.axes.size(); ++i) {
    const state s = a.state_of(mesh.axes[i]);
    if (mesh.extents[i] > 1 && (s == state::invariant || s == state::replicated) && !other_than.contains(mesh.axes[i]))
      bits |= 1u << i;
  }
  return bits;
}
PLAIT_INLINE std::uint32_t term_axes(const mesh_shape& mesh, const layout& a) {
  std::uint32_t bits = 0;
  for (std::size_t i = 0; i < mesh.axes.size(); ++i)
    if (mesh.extents[i] > 1 && a.state_of(mesh.axes[i]) == state::partial) bits |= 1u << i;
  return bits;
}

PLAIT_INLINE std::vector<std::uint64_t> combined_hashes(const mesh_shape& mesh,
                                                        const std::vector<noted_value>& values) {
  std::vector<std::uint64_t> combined(mesh.axes.size() + 2);
  for (const noted_value& v : values) {
    const std::uint64_t one = fnv1a(v.name) ^ v.digest.hash;
    for (std::size_t i = 0; i < mesh.axes.size(); ++i)
      if (v.equal >> i & 1)
        combined[i] = kernels::detail::hash_of_word(
            one, kernels::detail::mixed_index(static_cast<std::int64_t>(combined[i] >> 1)));
    if (v.terms != 0) ++combined[mesh.axes.size() + 1];
  }
  combined[mesh.axes.size()] = values.size();
  return combined;
}

/// The ranks along axis i of the mesh in whose line `rank` is, in order.
PLAIT_INLINE std::vector<std::size_t> line_of(const mesh_shape& mesh, std::int64_t rank, std::size_t i) {
  std::vector<std::size_t> ranks;
  const axis_list along(mesh.axes[i]);
  for (std::int64_t r = 0; r < mesh.size(); ++r)
    if (mesh.group_of(r, along) == mesh.group_of(rank, along)) ranks.push_back(static_cast<std::size_t>(r));
  return ranks;
}

PLAIT_INLINE bool combined_differ(const mesh_shape& mesh, std::span<const std::uint64_t> of_ranks) {
  const std::size_t axes = mesh.axes.size();
  std::int64_t stride = mesh.size();
  for (std::size_t i = 0; i < axes; ++i) {
    stride /= mesh.extents[i];
    for (std::int64_t r = 0; r < mesh.size(); ++r) {
      const std::int64_t first = r - mesh.coordinate(r, mesh.axes[i]) * stride;
      if (of_ranks[static_cast<std::size_t>(r) * (axes + 2) + i] !=
          of_ranks[static_cast<std::size_t>(first) * (axes + 2) + i])
        return true;
    }
  }
  return false;
}

PLAIT_INLINE std::vector<std::uint64_t> hashes_of_terms(const std::vector<noted_value>& values) {
  constexpr std::int64_t least = 8;  // fewer may be equal by chance
  std::vector<std::uint64_t> hashes;
  for (const noted_value& v : values)
    if (v.terms != 0) hashes.push_back(v.size < least || !(v.digest.squares > 0) ? 0 : v.digest.hash);
  return hashes;
}

PLAIT_INLINE std::string text_of_equal_terms(const mesh_shape& mesh, std::int64_t rank,
                                             const std::vector<noted_value>& values,
                                             std::span<const std::uint64_t> of_ranks, std::size_t count) {
  std::size_t at = 0;
  for (const noted_value& v : values) {
    if (v.terms == 0) continue;
    const std::size_t mine = at++;
    for (std::size_t i = 0; i < mesh.axes.size(); ++i) {
      if (!(v.terms >> i & 1)) continue;
      const std::uint64_t own = of_ranks[static_cast<std::size_t>(rank) * count + mine];
      bool equal = own != 0;
      for (const std::size_t r : line_of(mesh, rank, i)) equal = equal && of_ranks[r * count + mine] == own;
      if (!equal) continue;
      const char* const axis = mesh.axes[i].text();
      return cat({"checked values: ", v.name, " is partial over ", axis, ", so that its ", mesh.extents[i],
                  " ranks hold terms of a sum, and all of them hold the same values, which the sum would count ",
                  mesh.extents[i], " times; a value whose gradient is equal on all ranks is invariant<", axis,
                  ">, and not replicate<", axis, ">"});
    }
  }
  return {};
}

PLAIT_INLINE std::string text_of_difference(const mesh_shape& mesh, std::int64_t rank, const noted_value& mine,
                                            const std::vector<sent_value>& of_ranks, double tolerance) {
  const auto place = [&](std::size_t r) {
    std::string text;
    for (const axis_id axis : mesh.axes)
      append(text, {text.empty() ? "" : ", ", axis.text(), "=", mesh.coordinate(static_cast<std::int64_t>(r), axis)});
    return cat({"rank ", r, " (", text, ")"});
  };
  for (std::size_t i = 0; i < mesh.axes.size(); ++i) {
    if (!(mine.equal >> i & 1)) continue;
    const std::vector<std::size_t> line = line_of(mesh, rank, i);
    const auto same = [&](std::size_t a, std::size_t b) {
      return of_ranks[a].name == of_ranks[b].name && of_ranks[a].digest.hash == of_ranks[b].digest.hash;
    };
    // Finds the value that most ranks of the line hold; of several, the first.
    std::size_t usual = line[0], most = 0;
    for (const std::size_t candidate : line) {
      std::size_t alike = 0;
      for (const std::size_t r : line) alike += same(candidate, r);
      if (alike > most) usual = candidate, most = alike;
    }
    double largest = 0;
    std::vector<std::size_t> others, usuals;
    bool other_call = false;
    for (const std::size_t r : line) {
      if (same(r, usual)) {
        usuals.push_back(r);
        continue;
      }
      double squares = 0;
      for (int k = 0; k < kernels::digest_sketches; ++k) {
        const double d = of_ranks[r].digest.sketch[k] - of_ranks[usual].digest.sketch[k];
        squares += d * d / kernels::digest_sketches;
      }
      const double norm = std::sqrt(std::fmax(of_ranks[r].digest.squares, of_ranks[usual].digest.squares));
      double relative = squares == 0 ? 0 : std::sqrt(squares) / norm;
      if (of_ranks[r].name != of_ranks[usual].name) other_call = true;
      if (!other_call && relative <= tolerance && tolerance > 0) continue;
      if (!(relative <= largest)) largest = relative;
      others.push_back(r);
    }
    if (others.empty()) continue;
    if (other_call)
      return cat({"checked values: ranks along ", mesh.axes[i].text(), " made different calls: where ",
                  place(static_cast<std::size_t>(rank)), " has ", mine.name, ", ", ranks_text(others),
                  others.size() == 1 ? " has" : " have", " another value than ", ranks_text(usuals),
                  "; ranks along an axis make the same calls in the same order"});
    char number[32];
    std::snprintf(number, sizeof number, "%.1e", largest);
    return cat({"checked values: ranks along ", mesh.axes[i].text(), " differ in ", mine.name,
                ", which the type calls equal: ", others.size() == 1 ? place(others[0]) : ranks_text(others),
                others.size() == 1 ? " differs from " : " differ from ", ranks_text(usuals), " by ", number,
                " of the norm",
                largest < 1e-4 ? "; value_check::within(x) tolerates what unlike processors round" : ""});
  }
  return {};
}

PLAIT_INLINE std::vector<setting> values_of_context(const mesh_shape& mesh, const dim_sizes& sizes, std::uint64_t seed,
                                                    const deterministic_leaves& how) {
  std::vector<setting> values{{"mesh", text_of(mesh)}, {"seed", cat({seed})}};
  for (std::size_t i = 0; i < sizes.dims.size(); ++i) values.push_back({sizes.dims[i].text(), cat({sizes.sizes[i]})});
  values.push_back({"deterministic", cat({how.features, ",", how.samples, ",", how.sequence, ",", how.zigzag})});
  return values;
}
PLAIT_INLINE std::uint64_t hash_of_values(std::span<const setting> values) {
  std::uint64_t hash = fnv1a("");
  for (const setting& k : values) hash = fnv1a(k.value, fnv1a("=", fnv1a(k.name, hash)));
  return hash;
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
