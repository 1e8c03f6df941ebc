// Which boxes of a training state each rank writes, and whether the plans of all ranks make whole tensors: one sum over
// the ranks shows that before a byte is written.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "plait/checkpoint/agree.hpp"
#include "plait/checkpoint/boxes.hpp"
#include "plait/checkpoint/held_state.hpp"
#include "plait/checkpoint/share.hpp"
#include "plait/core/hash.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/device.hpp"

namespace plait {

/// One rank's part of a save.
struct share_plan {
  /// Elements [begin, end) of a tensor, which go to byte `to` of what is staged.
  struct copy {
    const held_tensor* from;
    std::int64_t begin, end;
    std::size_t to;
  };
  std::vector<staged_share::staged_box> boxes;
  std::vector<copy> copies;  ///< one for each box
  std::size_t bytes = 0;
};

/// Plans what this rank writes of `held`, which is sorted by the size of elements, so that each of them lies on a
/// multiple of its size. Ranks that hold the same elements write a part of them each.
template <compute_device Device>
share_plan plan_share(const context<Device>& ctx, std::vector<held_tensor>& held) {
  std::stable_sort(held.begin(), held.end(),
                   [](const held_tensor& a, const held_tensor& b) { return a.element_bytes() > b.element_bytes(); });
  share_plan plan;
  for (const held_tensor& h : held) {
    if (!h.counts) continue;
    const auto [begin, end] = own_share(ctx, h);
    for (const placed_box& b : boxes_of_part(h.part, begin, end, h.shape, h.name)) {
      const std::int64_t at = begin + b.at;
      plan.boxes.push_back({h.name, safetensors_dtype_of(h.type), b.where});
      plan.copies.push_back({&h, at, at + b.where.local_size(), plan.bytes});
      plan.bytes += static_cast<std::size_t>(b.where.local_size()) * h.element_bytes();
    }
  }
  return plan;
}

namespace detail {

constexpr std::uint64_t mixed(std::uint64_t x) {  // the finalizer of splitmix64 (Steele, Lea & Flood 2014)
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// Sum of hashes of a box's corners, which are known by tensor and place, with the sign that the corner has in the
/// differences, along every dim, of the function that is 1 in the box and 0 elsewhere.
inline std::uint64_t corner_sum(std::uint64_t tensor, const std::array<std::int64_t, max_dims>& offset,
                                const std::array<std::int64_t, max_dims>& extent, int dims) {
  std::uint64_t sum = 0;
  for (unsigned corner = 0; corner < 1U << dims; ++corner) {
    std::uint64_t hash = mixed(tensor);
    bool negative = false;
    for (std::size_t d = 0; d < static_cast<std::size_t>(dims); ++d) {
      const bool far = (corner >> d & 1U) != 0;
      hash = mixed(hash ^ static_cast<std::uint64_t>(offset[d] + (far ? extent[d] : 0)));
      negative = negative != far;
    }
    sum += negative ? 0 - hash : hash;
  }
  return sum;
}

/// Returns what a box adds to the sum of its tensor, which is 0 when all boxes of all ranks are added that cover it:
/// the corners of boxes beside each other cancel, and those that are left are the whole tensor's, which the box at its
/// first element takes away. (So a tensor that is there twice, all of it, adds up to 0 too.)
inline std::uint64_t box_sum(const staged_share::staged_box& b) {
  std::uint64_t tensor = fnv1a(b.tensor, fnv1a(name_of(b.dtype)));
  bool first = true;
  for (std::size_t d = 0; d < static_cast<std::size_t>(b.where.dims); ++d) {
    tensor = mixed(tensor ^ static_cast<std::uint64_t>(b.where.global[d]));
    first = first && b.where.offset[d] == 0;
  }
  const std::uint64_t own = corner_sum(tensor, b.where.offset, b.where.local, b.where.dims);
  return first ? own - corner_sum(tensor, {}, b.where.global, b.where.dims) : own;
}

/// "F32 [13, 6] in [0:4, 0:6], [4:5, 0:2]": what a rank would write of a tensor, as it would say so.
inline std::string part_text(const std::vector<staged_share::staged_box>& boxes, const std::string& tensor) {
  std::string text;
  std::size_t more = 0;
  for (const staged_share::staged_box& b : boxes) {
    if (b.tensor != tensor) continue;
    const std::vector<std::int64_t> shape(b.where.global.begin(), b.where.global.begin() + b.where.dims);
    if (text.empty()) text = cat({name_of(b.dtype), " ", shape_text(shape), " in "});
    if (text.size() > 120) {
      ++more;
      continue;
    }
    stored_box part;
    part.offset = b.where.offset, part.extent = b.where.local;
    append(text, {text.ends_with(" in ") ? "" : ", ", text_of_box({tensor, b.dtype, shape, {}}, part)});
  }
  if (more > 0) append(text, {" and ", more, " more"});
  return text;
}

/// Adds three numbers over all ranks, modulo 2^64: in halves, whose sums stay below 2^63. Collective.
template <compute_device Device>
std::array<std::uint64_t, 3> sums_of_ranks(Device& device, any_communicator& ranks, std::array<std::uint64_t, 3> own) {
  if (ranks.size() == 1) return own;
  std::array<std::int64_t, 6> halves{};
  for (std::size_t i = 0; i < own.size(); ++i) {
    halves[2 * i] = static_cast<std::int64_t>(own[i] & 0xffffffffU);
    halves[2 * i + 1] = static_cast<std::int64_t>(own[i] >> 32);
  }
  auto there = make_collective_buffer<std::int64_t>(device, halves.size());
  auto* const at = there.template data<std::int64_t>();
  device.upload(at, halves.data(), sizeof halves, device.main_stream());
  ranks.all_reduce(at, at, halves.size(), dtype::i64, reduce_op::sum);
  device.download(halves.data(), at, sizeof halves, device.main_stream());
  for (std::size_t i = 0; i < own.size(); ++i)
    own[i] = static_cast<std::uint64_t>(halves[2 * i]) + (static_cast<std::uint64_t>(halves[2 * i + 1]) << 32);
  return own;
}

/// Finds the tensors whose boxes do not cover them, of which each rank knows those that it has. Collective.
template <compute_device Device>
std::string plan_differences(Device& device, any_communicator& ranks,
                             const std::vector<staged_share::staged_box>& boxes) {
  struct record {
    std::uint64_t name, sum;
  };
  std::map<std::uint64_t, std::uint64_t> own, all;
  std::map<std::uint64_t, std::string> names;
  for (const staged_share::staged_box& b : boxes) {
    const std::uint64_t name = fnv1a(b.tensor);
    own[name] += box_sum(b);
    names[name] = b.tensor;
  }
  std::vector<record> mine;
  for (const auto& [name, sum] : own) mine.push_back({name, sum});
  for (const std::vector<record>& theirs : gather_records(device, ranks, mine))
    for (const record& r : theirs) all[r.name] += r.sum;
  constexpr std::size_t most = 3;  // tensors are told in full, the first by their hashes
  std::vector<std::uint64_t> wrong;
  for (const auto& [name, sum] : all)
    if (sum != 0) wrong.push_back(name);
  std::string text;
  for (std::size_t i = 0; i < std::min(wrong.size(), most); ++i) {
    const auto known = names.find(wrong[i]);
    const std::string part =
        known == names.end() ? "" : cat({"'", known->second, "'\t", part_text(boxes, known->second)});
    std::string name, said;
    const std::vector<std::string> parts = gather_texts(device, ranks, part);
    for (std::size_t r = 0; r < parts.size(); ++r) {
      const std::size_t tab = parts[r].find('\t');
      if (tab == parts[r].npos) continue;
      name = parts[r].substr(0, tab);
      if (said.size() < 800) append(said, {said.empty() ? "" : "; ", "rank ", r, " has ", parts[r].substr(tab + 1)});
    }
    append(text, {text.empty() ? "" : "; ", name, ": ", said});
  }
  if (wrong.size() > most) append(text, {"; and ", wrong.size() - most, " tensors more"});
  return text;
}

}  // namespace detail

/// Throws `error_of_all` unless the plans of all ranks are for the same step, and together have each element of a
/// tensor as often as its first, of one type and shape: so much one sum of a 64-bit hash shows, but for a chance of
/// 2^-64. The text names tensors that are not so, and what which rank has of them. (That ranks do not write all of a
/// tensor twice is what rank 0 sees in their notes, before it commits.) A rank that has no plan gives its `problem`
/// instead. Collective over `ranks`.
template <compute_device Device>
void agree_on_plan(Device& device, any_communicator& ranks, std::uint64_t step, const share_plan& plan,
                   const std::string& problem = {}) {
  const auto others = static_cast<std::uint64_t>(ranks.size() - 1);
  const std::uint64_t hash = detail::mixed(step), of_step = ranks.rank() == 0 ? others * hash : 0 - hash;
  std::uint64_t of_boxes = 0;
  for (const staged_share::staged_box& b : plan.boxes) of_boxes += detail::box_sum(b);
  const auto [boxes, steps, problems] =
      detail::sums_of_ranks(device, ranks, {of_boxes, of_step, problem.empty() ? 0U : 1U});
  const std::string what = cat({"checkpoint: step ", step, " is not saved: "});
  if (problems != 0) agree_on(device, ranks, problem, what);
  if (steps != 0) {
    std::string said;
    const std::vector<std::string> all = gather_texts(device, ranks, cat({step}));
    for (std::size_t r = 0; r < std::min<std::size_t>(all.size(), 16); ++r)
      append(said, {r == 0 ? "" : ", ", "rank ", r, " ", all[r]});
    throw error_of_all(cat({"checkpoint: nothing is saved: ranks are at different steps: ", said}));
  }
  if (boxes != 0)
    throw error_of_all(cat({what, "the ranks' parts do not make whole tensors, of one type and shape: ",
                            detail::plan_differences(device, ranks, plan.boxes)}));
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
