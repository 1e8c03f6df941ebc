// Compares by digests, over ranks, the values that types declare equal. Layers, steps and optimizers note values;
// `require_equal` compares any tensor. A value is equal along its invariant and replicated axes (layout/layout.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/agreement.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/comm/value_checks.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/function_ref.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/kernels/sums.hpp"
#include "plait/layout/layout.hpp"
#include "plait/tensor/microbatch.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait {
namespace detail {

/// The layout of the gradient of a tensor with spec `Spec`.
template <spec_like Spec>
inline constexpr layout dual_v = layout_v<dual_t<Spec>>;

/// Returns, as bits, the axes of the mesh along which `a` declares values equal, except the axes in `other_than`.
inline std::uint32_t equal_axes(const mesh_shape& mesh, const layout& a, const axis_list& other_than = {}) {
  std::uint32_t bits = 0;
  for (std::size_t i = 0; i < mesh.axes.size(); ++i) {
    const state s = a.state_of(mesh.axes[i]);
    if (mesh.extents[i] > 1 && (s == state::invariant || s == state::replicated) && !other_than.contains(mesh.axes[i]))
      bits |= 1u << i;
  }
  return bits;
}
/// Returns the axes along which ranks hold terms of a sum, as bits.
inline std::uint32_t term_axes(const mesh_shape& mesh, const layout& a) {
  std::uint32_t bits = 0;
  for (std::size_t i = 0; i < mesh.axes.size(); ++i)
    if (mesh.extents[i] > 1 && a.state_of(mesh.axes[i]) == state::partial) bits |= 1u << i;
  return bits;
}

/// The settings of a context, by name, that must be equal on all ranks.
template <compute_device Device>
std::vector<setting> values_of_context(const context<Device>& ctx) {
  const dim_sizes& sizes = ctx.sizes;
  const deterministic_leaves& how = ctx.deterministic;
  std::vector<setting> values{{"mesh", text_of(ctx.ranks.shape())}, {"seed", cat({ctx.seed})}};
  for (std::size_t i = 0; i < sizes.dims.size(); ++i) values.push_back({sizes.dims[i].text(), cat({sizes.sizes[i]})});
  values.push_back({"deterministic", cat({how.features, ",", how.samples, ",", how.sequence, ",", how.zigzag})});
  return values;
}

/// Takes the noted values, and downloads their digests from the device.
template <compute_device Device>
std::vector<noted_value> take_noted(Device& device, value_checks& checks) {
  std::vector<kernels::value_digest> all;
  checks.take_blocks([&](kernels::value_digest* block, std::size_t count) {
    all.resize(all.size() + count);
    device.download(all.data() + (all.size() - count), block, count * sizeof(kernels::value_digest),
                    device.main_stream());
  });
  std::vector<noted_value> values = checks.take();
  for (noted_value& v : values)
    if (v.slot >= 0) v.digest = all[static_cast<std::size_t>(v.slot)];
  return values;
}

/// gather(own, count) returns `count` numbers of each rank; a rank with fewer numbers adds zeros. Collective.
using gather_numbers = function_ref<std::vector<std::uint64_t>(std::vector<std::uint64_t>, std::size_t)>;

/// Compares values that all ranks of the mesh have noted in the same order. Throws `error_of_all`. Collective.
void compare_noted(const mesh_shape& mesh, std::int64_t rank, const std::vector<noted_value>& values, double tolerance,
                   gather_numbers gather);
template <compute_device Device>
void compare_noted(const context<Device>& ctx, const std::vector<noted_value>& values, double tolerance) {
  any_communicator& root = ctx.ranks.root();
  if (root.size() == 1) return;
  compare_noted(ctx.ranks.shape(), root.rank(), values, tolerance,
                [&](std::vector<std::uint64_t> own, std::size_t count) {
                  return gather_all(ctx.device, root, std::move(own), count);
                });
}

/// Notes elements in the device's memory as a value.
template <class T, compute_device Device>
void note_digest(const context<Device>& ctx, value_checks& to, noted_value value, const T* data) {
  if constexpr (std::is_base_of_v<cpu, Device>) {
    value.digest = kernels::digest_of(data, value.size);
  } else if constexpr (!only_counts<Device>) {
    const auto [slot, at] = to.next_slot([&] {
      constexpr std::size_t bytes = value_checks::block * sizeof(kernels::value_digest);
      if constexpr (requires { ctx.device.allocate_own(bytes); })
        return static_cast<kernels::value_digest*>(ctx.device.allocate_own(bytes));
      else
        return static_cast<kernels::value_digest*>(ctx.device.allocate(bytes, ctx.device.main_stream()));
    });
    value.slot = slot;
    kernels::digest(ctx.device, data, value.size, at);
  }
  to.note(std::move(value));
}
/// Whether values are noted in this step.
template <compute_device Device>
bool notes_values(const context<Device>& ctx) {
  if constexpr (only_counts<Device>)
    return false;
  else
    return ctx.ranks.checks().on() && ctx.ranks.size() > 1 && !ctx.ranks.calls();
}

/// Compares the values of the last step and those noted since then.
template <compute_device Device>
void compare_values(const context<Device>& ctx) {
  if (!notes_values(ctx)) return;
  value_checks& checks = ctx.ranks.checks();
  compare_noted(ctx, take_noted(ctx.device, checks), checks.how().tolerance);
}
/// Begins a step: compares the noted values, and decides whether to note the values of this step. Collective if the
/// previous step was checked.
template <compute_device Device>
void begin_checked_step(const context<Device>& ctx) {
  compare_values(ctx);
  ctx.ranks.checks().begin_step();
}

/// Notes a value with layout `a` and `size` elements on this rank.
template <class T, compute_device Device>
void note_value(const context<Device>& ctx, const layout& a, std::string_view what, std::string_view of, const T* data,
                std::int64_t size, const axis_list& cut = {}) {
  if constexpr (!only_counts<Device>) {
    if (!notes_values(ctx)) return;
    const mesh_shape& mesh = ctx.ranks.shape();
    noted_value value{cat({what, of}), equal_axes(mesh, a, cut), term_axes(mesh, a), size};
    if ((value.equal | value.terms) == 0) return;
    note_digest(ctx, ctx.ranks.checks(), std::move(value), data);
  }
}
/// Notes a layer's tensor at a boundary.
template <class T, compute_device Device>
void note_boundary(const microbatch<Device>& mb, const layout& a, std::string_view what, std::string_view layer,
                   const T* data, std::int64_t size) {
  if (!notes_values(mb.ctx)) return;
  if (layer.ends_with(".weight")) layer.remove_suffix(std::string_view(".weight").size());
  if (mb.count == 1) return note_value(mb.ctx, a, what, layer, data, size);
  note_value(mb.ctx, a, what, cat({layer, " in microbatch ", mb.index}), data, size);
}
/// Notes numbers in the host's memory.
template <class T, compute_device Device>
void note_on_host(const context<Device>& ctx, const layout& a, std::string name, const T* data, std::int64_t size) {
  if (!notes_values(ctx)) return;
  noted_value value{std::move(name), equal_axes(ctx.ranks.shape(), a), 0, size};
  value.digest = kernels::digest_of(data, size);
  if (value.equal != 0) ctx.ranks.checks().note(std::move(value));
}
/// Notes the values of a parameter, once per step.
template <compute_device Device, class Parameter>
void note_parameter(const context<Device>& ctx, const Parameter& p) {
  if (ctx.ranks.checks().first_time(&p))
    note_value(ctx, p.used(), "the values of ", p.name(), p.used_value(), p.used_size());
}
/// Notes the values of a layer's parameters, each once per step.
template <compute_device Device, class Layer>
void note_parameters(const context<Device>& ctx, Layer& layer) {
  if (!notes_values(ctx)) return;
  layer.visit([&](auto& p) { note_parameter(ctx, p); });
}
/// Notes the inputs of a layer's forward pass: its input tensor and the values of its parameters.
template <compute_device Device, class Layer, class T>
void note_forward(const microbatch<Device>& mb, Layer& layer, const layout& a, std::string_view name, const T* x,
                  std::int64_t size) {
  note_boundary(mb, a, "the input of ", name, x, size);
  note_parameters(mb.ctx, layer);
}
/// Notes the gradient of a layer's output; `a` is the dual of its layout.
template <compute_device Device, class T>
void note_backward(const microbatch<Device>& mb, const layout& a, std::string_view name, const T* dy,
                   std::int64_t size) {
  note_boundary(mb, a, "the gradient of the output of ", name, dy, size);
}

/// Notes elements that an optimizer holds for this rank's piece of a parameter.
template <class T, compute_device Device, class Parameter>
void note_piece(const context<Device>& ctx, const Parameter& p, std::string_view what, const T* data,
                std::int64_t size) {
  note_value(ctx, p.stored(), what, p.name(), data, size, p.storage() ? p.storage()->axes() : axis_list());
}
/// Notes the operands of an optimizer's update: a parameter's reduced gradient and its master values.
template <compute_device Device, class Gradient>
void note_update(const context<Device>& ctx, const Gradient& gradient) {
  if (!notes_values(ctx)) return;
  const auto& p = gradient.parameter();
  note_piece(ctx, p, "the reduced gradient of ", gradient.data(), gradient.size());
  note_piece(ctx, p, "the stored values of ", std::as_const(p).value(), gradient.size());
}
/// Throws `disagreement` unless all ranks have equal values; does nothing in a step that is not checked. Collective
/// over the ranks of all pipeline stages.
template <compute_device Device, class Values>
void agree_in_checked_step(const context<Device>& ctx, std::string_view who, Values&& values) {
  if constexpr (!only_counts<Device>) {
    world& ranks = ctx.ranks;
    if (ranks.checks().on() && ranks.everyone().size() > 1 && !ranks.calls())
      require_equal_values(ctx.device, ranks.everyone(), who, values());
  }
}
/// Throws `disagreement` unless every stage has the same hashes. The ranks of one stage may have different hashes.
/// `hash` is this rank's hash. Collective like `agree_in_checked_step`.
template <compute_device Device>
void agree_over_stages(const context<Device>& ctx, std::string_view who, std::string_view what, std::uint64_t hash) {
  if (ctx.ranks.everyone().size() == ctx.ranks.root().size()) return;
  agree_in_checked_step(ctx, who, [&] {
    std::uint64_t of_stage = fnv1a("");
    for (const std::uint64_t one : gather_all(ctx.device, ctx.ranks.root(), {hash}, 1))
      of_stage = kernels::detail::hash_of_word(one, of_stage);
    return std::vector<setting>{{std::string(what), cat({of_stage})}};
  });
}
/// Throws `disagreement` unless ranks have equal contexts. It compares each context once.
template <compute_device Device>
void agree_on_context(const context<Device>& ctx) {
  if constexpr (!only_counts<Device>) {
    if (!notes_values(ctx)) return;
    const std::vector<setting> values = values_of_context(ctx);
    std::uint64_t hash = fnv1a("");
    for (const setting& k : values) hash = fnv1a(k.value, fnv1a("=", fnv1a(k.name, hash)));
    if (ctx.ranks.checks().context() == hash) return;
    require_equal_values(ctx.device, ctx.ranks.root(), "context", values);
    ctx.ranks.checks().context() = hash;
  }
}
/// Makes the next step compare values again, after a load or a change of sizes. Collective.
template <compute_device Device>
void arm_checks(const context<Device>& ctx) {
  ctx.ranks.checks().arm();
  agree_on_context(ctx);
}

#define PLAIT_INSTANTIATE(T)                                                                                      \
  PLAIT_COMPILED_TEMPLATE(void note_value(const context<cpu>&, const layout&, std::string_view, std::string_view, \
                                          const T*, std::int64_t, const axis_list&))                              \
  PLAIT_COMPILED_TEMPLATE(void note_boundary(const microbatch<cpu>&, const layout&, std::string_view,             \
                                             std::string_view, const T*, std::int64_t))
PLAIT_INSTANTIATE(float)
PLAIT_INSTANTIATE(bf16)
PLAIT_INSTANTIATE(double)
PLAIT_INSTANTIATE(std::int32_t)
PLAIT_INSTANTIATE(std::int64_t)
#undef PLAIT_INSTANTIATE
PLAIT_COMPILED_TEMPLATE(void compare_values(const context<cpu>&))
PLAIT_COMPILED_TEMPLATE(void agree_on_context(const context<cpu>&))
PLAIT_COMPILED_TEMPLATE(void agree_over_stages(const context<cpu>&, std::string_view, std::string_view, std::uint64_t))
PLAIT_COMPILED_TEMPLATE(void note_on_host(const context<cpu>&, const layout&, std::string, const std::int64_t*,
                                          std::int64_t))

}  // namespace detail

/// Throws `error_of_all` on every rank unless ranks have equal elements along the axes over which the tensor is
/// invariant or replicated. The text names the axis, the ranks and the size of the difference. Differences up to
/// `tolerance` times the norm count as equal. Collective over the world, at any `value_check`.
template <class T, spec_like Spec, compute_device Device>
void require_equal(const context<Device>& ctx, const tensor<T, Spec, Device>& value, std::string_view name = "a tensor",
                   double tolerance = 0) {
  if (ctx.ranks.size() == 1 || ctx.ranks.calls()) return;
  noted_value one{std::string(name), detail::equal_axes(ctx.ranks.shape(), layout_v<Spec>), 0, value.size()};
  if constexpr (std::is_base_of_v<cpu, Device>) {
    one.digest = kernels::digest_of(value.data(), one.size);
  } else {
    auto there = make_buffer<kernels::value_digest>(ctx.device, 1);
    auto* const at = there.template data<kernels::value_digest>();
    kernels::digest(ctx.device, value.data(), one.size, at);
    ctx.device.download(&one.digest, at, sizeof one.digest, ctx.device.main_stream());
  }
  detail::compare_noted(ctx, {one}, tolerance);
}

}  // namespace plait

#ifndef PLAIT_COMPILED
namespace plait::detail {

/// Returns for each axis the combined hash of all noted values that must be equal along it. The number of values and
/// the number of terms of sums follow.
inline std::vector<std::uint64_t> combined_hashes(const mesh_shape& mesh, const std::vector<noted_value>& values) {
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

/// The ranks that differ from `rank` in their coordinate along axis i only, in order, with `rank` itself.
inline std::vector<std::size_t> line_of(const mesh_shape& mesh, std::int64_t rank, std::size_t i) {
  std::vector<std::size_t> ranks;
  const axis_list along(mesh.axes[i]);
  for (std::int64_t r = 0; r < mesh.size(); ++r)
    if (mesh.group_of(r, along) == mesh.group_of(rank, along)) ranks.push_back(static_cast<std::size_t>(r));
  return ranks;
}

/// Whether the ranks of a line differ in the combined hash of some axis.
inline bool combined_differ(const mesh_shape& mesh, std::span<const std::uint64_t> of_ranks) {
  const std::size_t numbers = mesh.axes.size() + 2;
  std::int64_t stride = mesh.size();
  for (std::size_t i = 0; i < mesh.axes.size(); ++i) {
    stride /= mesh.extents[i];
    for (std::int64_t r = 0; r < mesh.size(); ++r) {
      const auto own = static_cast<std::size_t>(r);
      const auto first = static_cast<std::size_t>(r - mesh.coordinate(r, mesh.axes[i]) * stride);
      if (of_ranks[own * numbers + i] != of_ranks[first * numbers + i]) return true;
    }
  }
  return false;
}

/// Returns the hashes of terms of sums that have enough elements to differ; 0 for other values.
inline std::vector<std::uint64_t> hashes_of_terms(const std::vector<noted_value>& values) {
  constexpr std::int64_t least = 8;  // smaller terms may be equal by chance
  std::vector<std::uint64_t> hashes;
  for (const noted_value& v : values)
    if (v.terms != 0) hashes.push_back(v.size < least || !(v.digest.squares > 0) ? 0 : v.digest.hash);
  return hashes;
}

/// Returns the error of a term of a sum that equals another rank's term, or "", from the viewpoint of `rank`.
/// `of_ranks` has `count` hashes for each rank.
inline std::string text_of_equal_terms(const mesh_shape& mesh, std::int64_t rank,
                                       const std::vector<noted_value>& values, std::span<const std::uint64_t> of_ranks,
                                       std::size_t count) {
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

/// A noted value in the form that ranks send for a comparison: numbers of 64 bits.
struct sent_value {
  std::uint64_t name = 0;
  kernels::value_digest digest{};
};

/// Returns the error of the value `mine` of `rank`, or "". `of_ranks[r]` is the value that rank r sent for comparison.
inline std::string text_of_difference(const mesh_shape& mesh, std::int64_t rank, const noted_value& mine,
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
    // Finds the value that most ranks of the line hold; in a tie, the first.
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

/// A difference that this rank has found, and the index of the value in the order of notes. The first one is reported.
struct noted_problem {
  static constexpr std::uint64_t none = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t place = none;
  std::string text;
};

/// Returns the first of at most `most` values that differs between ranks of a line with this rank. Collective.
inline noted_problem first_difference(const mesh_shape& mesh, std::int64_t rank, const std::vector<noted_value>& values,
                                      std::size_t most, double tolerance, gather_numbers gather) {
  constexpr std::size_t chunk = 1024, words = sizeof(sent_value) / sizeof(std::uint64_t);
  const auto ranks = static_cast<std::size_t>(mesh.size());
  static const noted_value none{};
  noted_problem found;
  for (std::size_t begin = 0; begin < most; begin += chunk) {
    const std::size_t count = std::min(chunk, most - begin);
    const auto value = [&](std::size_t i) -> const noted_value& { return i < values.size() ? values[i] : none; };
    std::vector<std::uint64_t> own;
    for (std::size_t i = begin; i < begin + count; ++i) {
      const auto numbers = std::bit_cast<std::array<std::uint64_t, words>>(
          i < values.size() ? sent_value{fnv1a(value(i).name), value(i).digest} : sent_value{});
      own.insert(own.end(), numbers.begin(), numbers.end());
    }
    const auto all = gather(std::move(own), count * words);
    for (std::size_t i = 0; i < count && found.text.empty(); ++i) {
      std::vector<sent_value> of_ranks(ranks);
      for (std::size_t r = 0; r < ranks; ++r)
        std::memcpy(static_cast<void*>(&of_ranks[r]), all.data() + (r * count + i) * words, sizeof(sent_value));
      found.text = text_of_difference(mesh, rank, value(begin + i), of_ranks, tolerance);
      if (!found.text.empty()) found.place = begin + i;
    }
    const auto places = gather({found.place}, 1);
    if (*std::min_element(places.begin(), places.end()) != noted_problem::none) break;
  }
  return found;
}

PLAIT_INLINE void compare_noted(const mesh_shape& mesh, std::int64_t rank, const std::vector<noted_value>& values,
                                double tolerance, gather_numbers gather) {
  const std::size_t axes = mesh.axes.size(), ranks = static_cast<std::size_t>(mesh.size());
  const auto combined = gather(combined_hashes(mesh, values), axes + 2);
  std::size_t most = 0, most_terms = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    most = std::max<std::size_t>(most, combined[r * (axes + 2) + axes]);
    most_terms = std::max<std::size_t>(most_terms, combined[r * (axes + 2) + axes + 1]);
  }
  noted_problem found;
  if (combined_differ(mesh, combined)) found = first_difference(mesh, rank, values, most, tolerance, gather);
  if (most_terms != 0) {
    const auto terms = gather(hashes_of_terms(values), most_terms);
    if (found.text.empty()) found.text = text_of_equal_terms(mesh, rank, values, terms, most_terms);
    if (!found.text.empty()) found.place = std::min(found.place, noted_problem::none - 1);
  }
  // All ranks throw the same text, from the first rank that found the earliest differing value.
  const auto places = gather({found.place}, 1);
  const auto first = std::min_element(places.begin(), places.end());
  if (*first == noted_problem::none) return;
  const auto speaker = static_cast<std::size_t>(first - places.begin());
  const std::size_t bytes = static_cast<std::size_t>(gather({found.text.size()}, 1)[speaker]);
  const std::size_t words = bytes / sizeof(std::uint64_t) + 1;
  std::vector<std::uint64_t> text(words);
  std::memcpy(text.data(), found.text.data(), std::min(found.text.size(), bytes));
  const auto texts = gather(std::move(text), words);
  throw error_of_all(std::string(reinterpret_cast<const char*>(texts.data() + speaker * words), bytes));
}

}  // namespace plait::detail
#endif

#include "plait/core/macros_on.hpp"
