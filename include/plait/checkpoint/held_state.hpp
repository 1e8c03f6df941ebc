// The part of a training state that a rank holds, as tensors, and the boxes that each rank writes. One sum over the
// ranks checks that their boxes cover all tensors.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/checkpoint/agree.hpp"
#include "plait/checkpoint/boxes.hpp"
#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/share.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/core/types.hpp"
#include "plait/device/cpu.hpp"
#include "plait/device/device.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/kernels/moments.hpp"
#include "plait/layout/layout.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/parallel/optim/optimizer.hpp"

namespace plait {

/// Whether a device copies to pinned host memory while the host continues (`cuda::start_download`).
template <class D>
concept downloads_later = requires(const D& device, void* to, const void* from, std::size_t bytes) {
  D::memory_for_downloads();
  device.start_download(to, from, bytes, device.main_stream());
  device.waiter(device.main_stream());
};

/// The part of a tensor that a rank holds: elements [begin, end), counted row-major, of a box. It refers to the model,
/// the optimizer and the context from which it was made.
struct held_tensor {
  std::string name;                 ///< a parameter's, or "optim.NAME.exp_avg" and the like
  std::vector<std::int64_t> shape;  ///< global, without padding
  box part;                         ///< with the dims of its layout and with padding
  std::int64_t begin = 0, end = 0;
  axis_list copies;    ///< axes of the stage's mesh whose ranks hold equal elements
  axis_list across{};  ///< axes that shard a dim after the leading one, and so split rows
  bool counts = true;  ///< whether a checkpoint takes it from this stage; of stages that share a parameter, one counts
  dtype type{};        ///< of its elements in a checkpoint
  /// Copies elements [from, to) of the part, at once or in the device's main stream (`downloads_later`), for which the
  /// caller then waits. For a program's own tensors in host memory, write it with `copy_past_cache`.
  std::function<void(std::int64_t from, std::int64_t to, std::byte* out)> read;
  /// Optional, for a save: copies the device's data, and returns a function that decodes the elements from it, or
  /// nothing if no decoding is needed. Another thread calls that function after the copies are complete.
  std::function<std::function<void()>(std::int64_t from, std::int64_t to, std::byte* out)> read_raw{};
  std::function<void(const std::byte* in)> write;  ///< writes all elements
  /// Optional: returns the device address of all elements, if they are contiguous. A load then writes there instead of
  /// calling `write`.
  std::function<std::byte*()> target{};
  /// Returns the part of the i-th rank along `across` whose other coordinates are this rank's. Only needed with such
  /// axes.
  std::function<box(std::int64_t i)> part_across{};

  std::int64_t size() const { return end - begin; }
  std::size_t element_bytes() const { return size_of(type); }
};

/// Data that a program saves together with a model and its optimizer.
struct saved_extras {
  saved_scalars scalars{};                                   ///< must be equal on all ranks; rank 0's are written
  std::vector<std::pair<std::string, std::string>> blobs{};  ///< names and bytes; rank 0's are written
  std::vector<held_tensor> tensors{};                        ///< tensors of the program, such as an average of weights
};

namespace detail {

/// Decodes moments in 8 bits to bf16, which represents each of them exactly. A code is a small floating-point number;
/// each block of codes has a power of 2 as its scale. There are `n` elements, and the first one is at index `place` of
/// the first scale's block. The codes may occupy the last `n` bytes of the output.
inline void decode_moments(optimizer_tensor::code kind, const std::uint8_t* codes, const std::uint8_t* scales,
                           std::int64_t place, std::int64_t n, bf16* out) {
  const bool first = kind == optimizer_tensor::code::first_moment;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint8_t code = codes[i], scale = scales[(place + i) / kernels::moment_block];
    out[i] = to_bf16(first ? kernels::first_moment(code, scale) : kernels::second_moment(code, scale));
  }
}
/// Encodes numbers as codes and scales, rounded to nearest. Numbers that `decode_moments` has made keep their value.
inline void encode_moments(const optimizer_tensor& t, const bf16* in, std::uint8_t* codes, std::uint8_t* scales) {
  constexpr std::uint32_t nearest = 0x8000;
  const bool first = t.coded == optimizer_tensor::code::first_moment;
  for (std::int64_t begin = 0; begin < t.size;) {
    const std::int64_t block = (t.place + begin) / kernels::moment_block;
    const std::int64_t end = std::min((block + 1) * kernels::moment_block - t.place, t.size);
    float most = 0;
    for (std::int64_t i = begin; i < end; ++i) most = std::max(most, std::abs(to_float(in[i])));
    const std::uint8_t scale = scales[block] = kernels::moment_scale(most);
    for (std::int64_t i = begin; i < end; ++i) {
      const float x = to_float(in[i]);
      codes[i] = first ? kernels::first_moment_code(x, scale, nearest) : kernels::second_moment_code(x, scale, nearest);
    }
    begin = end;
  }
}

/// Returns how many blocks, whole or partial, a part of an optimizer's tensor overlaps.
inline std::int64_t scales_of(const optimizer_tensor& t) {
  return (t.place + t.size + kernels::moment_block - 1) / kernels::moment_block;
}

/// Returns whether the optimizer's state is in host memory, which collectives cannot access.
template <compute_device Device>
bool keeps_on_host(const Device& device) {
  if constexpr (requires { device.host_bytes_in_use(); }) return device.host_bytes_in_use() > 0;
  return false;
}

/// Copies bytes of the device to `out`. On a GPU with pinned `out`, the copy is queued in the main stream.
template <compute_device Device>
void read_to_host(const context<Device>& ctx, std::byte* out, const void* from, std::size_t bytes) {
  if constexpr (std::is_same_v<Device, cpu>)
    copy_past_cache(out, static_cast<const std::byte*>(from), bytes);
  else if constexpr (downloads_later<Device>)
    ctx.device.start_download(out, from, bytes, ctx.device.main_stream());
  else
    ctx.device.download(out, from, bytes, ctx.device.main_stream());
}

/// Elements [from, to) of moments in 8 bits: their blocks are `first` and the following ones.
struct coded_range {
  coded_range(const optimizer_tensor& t, std::int64_t from, std::int64_t to)
      : first((t.place + from) / kernels::moment_block),
        blocks(to == from ? 0 : (t.place + to - 1) / kernels::moment_block + 1 - first),
        place((t.place + from) % kernels::moment_block) {}
  std::int64_t first, blocks, place;  ///< `place`: index of the first element in its block
};

template <compute_device Device>
void read_optimizer(const context<Device>& ctx, const optimizer_tensor& t, std::int64_t from, std::int64_t to,
                    std::byte* out) {
  const auto stream = ctx.device.main_stream();
  const std::size_t width = size_of(t.type);
  if (t.coded == optimizer_tensor::code::none)
    return read_to_host(ctx, out, t.values + static_cast<std::size_t>(from) * width,
                        static_cast<std::size_t>(to - from) * width);
  const coded_range range(t, from, to);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(to - from)), scales(static_cast<std::size_t>(range.blocks));
  ctx.device.download(codes.data(), t.values + from, codes.size(), stream);
  ctx.device.download(scales.data(), t.scales + range.first, scales.size(), stream);
  decode_moments(t.coded, codes.data(), scales.data(), range.place, to - from, reinterpret_cast<bf16*>(out));
}
/// Copies the scales of elements to the beginning of `out`, and their codes to its second half: half of the output's
/// bytes. Returns a function that decodes them in place. If scales would not fit, decodes at once.
template <compute_device Device>
std::function<void()> read_codes(const context<Device>& ctx, const optimizer_tensor& t, std::int64_t from,
                                 std::int64_t to, std::byte* out) {
  const coded_range range(t, from, to);
  const std::int64_t n = to - from;
  if (range.blocks > n || n == 0) return read_optimizer(ctx, t, from, to, out), nullptr;
  read_to_host(ctx, out + n, t.values + from, static_cast<std::size_t>(n));
  read_to_host(ctx, out, t.scales + range.first, static_cast<std::size_t>(range.blocks));
  return [kind = t.coded, range, n, out] {
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(out);
    const std::vector<std::uint8_t> scales(bytes, bytes + range.blocks);
    decode_moments(kind, bytes + n, scales.data(), range.place, n, reinterpret_cast<bf16*>(out));
  };
}
template <compute_device Device>
void write_optimizer(const context<Device>& ctx, const optimizer_tensor& t, const std::byte* in) {
  const auto stream = ctx.device.main_stream();
  if (t.coded == optimizer_tensor::code::none)
    return ctx.device.upload(t.values, in, static_cast<std::size_t>(t.size) * size_of(t.type), stream);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(t.size)), scales(static_cast<std::size_t>(scales_of(t)));
  encode_moments(t, reinterpret_cast<const bf16*>(in), codes.data(), scales.data());
  ctx.device.upload(t.values, codes.data(), codes.size(), stream);
  ctx.device.upload(t.scales, scales.data(), scales.size(), stream);
}

/// Returns the i-th rank of the group of `rank` along `axes`, which are in the mesh's order.
inline std::int64_t rank_in_group(const mesh_shape& mesh, std::int64_t rank, const axis_list& axes, std::int64_t i) {
  std::int64_t out = 0, stride = 1;
  for (std::size_t a = mesh.axes.size(); a-- > 0;) {
    const std::int64_t extent = mesh.extents[a];
    std::int64_t at = mesh.coordinate(rank, mesh.axes[a]);
    if (axes.contains(mesh.axes[a])) at = std::exchange(i, i / extent) % extent;
    out += at * stride;
    stride *= extent;
  }
  return out;
}

/// Describes this rank's part of one parameter: its box, and which ranks hold copies of it.
template <class Precision, compute_device Device>
held_tensor held_part(const context<Device>& ctx, const parameter<Precision, Device>& p) {
  held_tensor held;
  held.shape = p.info().shape;
  held.part = p.part();
  held.begin = p.slice().begin;
  held.end = p.slice().end;
  const mesh_shape& mesh = ctx.ranks.shape();
  const axis_list sharding = sharding_axes(p.stored(), mesh);
  for (const axis_id axis : mesh.axes)
    if (mesh.extent(axis) > 1 && !sharding.contains(axis) && !(p.storage() && p.storage()->axes().contains(axis)))
      held.copies.push_back(axis);
  held.counts = p.counts();
  const layout& stored = p.stored();
  for (const axis_id axis : sharding)
    for (std::size_t d = 1; d < stored.dims.size(); ++d)
      if (stored.dims[d].axes.contains(axis)) held.across.push_back(axis);
  held.part_across = [&ctx, &p, axes = held.across](std::int64_t i) {
    const mesh_shape& ranks = ctx.ranks.shape();
    return local_box(p.stored(), ranks, p.sizes(), rank_in_group(ranks, ctx.ranks.rank(), axes, i));
  };
  return held;
}

}  // namespace detail

/// Lists this rank's part of the master values of every parameter that `model.visit` yields, by the parameter's name.
/// Rounded weights are not listed, because they follow from the master values.
template <compute_device Device, class Model>
std::vector<held_tensor> held_weights(const context<Device>& ctx, Model& model) {
  std::vector<held_tensor> all;
  model.visit([&]<class Precision>(parameter<Precision, Device>& p) {
    using M = master_of<Precision>;
    held_tensor& held = all.emplace_back(detail::held_part(ctx, p));
    held.name = p.name();
    held.type = dtype_of<M>;
    held.read = [&ctx, &p](std::int64_t from, std::int64_t to, std::byte* out) {
      detail::read_to_host(ctx, out, std::as_const(p).value() + (from - p.slice().begin),
                           static_cast<std::size_t>(to - from) * sizeof(M));
    };
    held.write = [&ctx, &p](const std::byte* in) {
      ctx.device.upload(p.changed_slice(), in, static_cast<std::size_t>(p.slice().size()) * sizeof(M),
                        ctx.device.main_stream());
    };
    held.target = [&p] { return reinterpret_cast<std::byte*>(p.changed_slice()); };
  });
  return all;
}

namespace detail {
/// Prefix of a parameter's name in a saved step. That scalar counts the steps in which the optimizer skipped the
/// parameter.
inline constexpr const char* missed_prefix = "optimizer.missed.";
}  // namespace detail

/// Lists the optimizer's state for every trainable parameter, as "optim.PARAMETER.exp_avg" and the like. A user's own
/// optimizer takes part if it has `visit_state`, as `adamw` does. Moments in 8 bits are listed with their decoded
/// values, in bf16.
template <compute_device Device, class Model, class Optimizer>
std::vector<held_tensor> held_optimizer(const context<Device>& ctx, Model& model, Optimizer& optimizer) {
  std::vector<held_tensor> all;
  model.visit([&]<class Precision>(parameter<Precision, Device>& p) {
    if (!p.trainable()) return;
    optimizer.visit_state(ctx, p, [&](const optimizer_tensor& t) {
      held_tensor& held = all.emplace_back(detail::held_part(ctx, p));
      held.name = "optim." + p.name() + "." + t.name;
      held.type = t.coded == optimizer_tensor::code::none ? t.type : dtype::bf16;
      held.read = [&ctx, t, first = held.begin](std::int64_t from, std::int64_t to, std::byte* out) {
        detail::read_optimizer(ctx, t, from - first, to - first, out);
      };
      if (t.coded != optimizer_tensor::code::none)
        held.read_raw = [&ctx, t, first = held.begin](std::int64_t from, std::int64_t to, std::byte* out) {
          return detail::read_codes(ctx, t, from - first, to - first, out);
        };
      held.write = [&ctx, t](const std::byte* in) { detail::write_optimizer(ctx, t, in); };
      if (t.coded == optimizer_tensor::code::none && !detail::keeps_on_host(ctx.device))
        held.target = [t] { return t.values; };
    });
  });
  return all;
}

/// Lists weights and optimizer state, which together are the state of a saved step.
template <compute_device Device, class Model, class Optimizer>
std::vector<held_tensor> held_state(const context<Device>& ctx, Model& model, Optimizer& optimizer) {
  std::vector<held_tensor> all = held_weights(ctx, model);
  for (held_tensor& h : held_optimizer(ctx, model, optimizer)) all.push_back(std::move(h));
  return all;
}

/// Returns the range of elements that this rank writes and reads. The ranks of `held.copies`, which hold equal
/// elements, have consecutive ranges of equal size.
template <compute_device Device>
std::pair<std::int64_t, std::int64_t> own_share(const context<Device>& ctx, const held_tensor& held) {
  const mesh_shape& mesh = ctx.ranks.shape();
  const std::int64_t copies = mesh.size(held.copies), own = mesh.index_in(ctx.ranks.rank(), held.copies);
  return {held.begin + held.size() * own / copies, held.begin + held.size() * (own + 1) / copies};
}

/// One rank's part of a save.
struct share_plan {
  /// Elements [begin, end) of a tensor, which are copied to byte `to` of the staging memory.
  struct copy {
    const held_tensor* from;
    std::int64_t begin, end;
    std::size_t to;
  };
  std::vector<staged_share::staged_box> boxes;
  std::vector<copy> copies;  ///< one for each box
  std::size_t bytes = 0;
};

/// Plans what this rank writes of `held`. Boxes are sorted by the size of their elements, so that each is aligned to
/// it. Ranks that hold equal elements each write a part of them.
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

/// Returns the signed sum of hashes of a box's corners; a hash depends on the tensor and the place. The sign of a
/// corner is its sign in the differences of the box's indicator function along every dim.
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

/// Returns the term of a box in the sum of its tensor, which is 0 if the boxes of all ranks cover the tensor. Corners
/// of adjacent boxes cancel. Only the whole tensor's corners remain, and the box at its first element subtracts them.
/// (A tensor that is completely covered twice also gives 0.)
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

/// Returns the boxes of a tensor that a rank would write as text, such as "F32 [13, 6] in [0:4, 0:6], [4:5, 0:2]".
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

/// Adds three numbers over all ranks, modulo 2^64, as halves whose sums stay below 2^63. Collective.
template <compute_device Device>
std::array<std::uint64_t, 3> sums_of_ranks(Device& device, any_communicator& ranks, std::array<std::uint64_t, 3> own) {
  if (ranks.size() == 1) return own;
  std::array<std::int64_t, 6> halves{};
  for (std::size_t i = 0; i < own.size(); ++i) {
    halves[2 * i] = static_cast<std::int64_t>(own[i] & 0xffffffffU);
    halves[2 * i + 1] = static_cast<std::int64_t>(own[i] >> 32);
  }
  all_reduce_values(device, ranks, halves.data(), halves.size(), reduce_op::sum);
  for (std::size_t i = 0; i < own.size(); ++i)
    own[i] = static_cast<std::uint64_t>(halves[2 * i]) + (static_cast<std::uint64_t>(halves[2 * i + 1]) << 32);
  return own;
}

/// Returns a text with the tensors that the ranks' boxes do not cover exactly, and the boxes of each rank. Collective.
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
  constexpr std::size_t most = 3;  // the text lists this many tensors, in order of their hashes
  std::vector<std::uint64_t> wrong;
  for (const auto& [name, sum] : all)
    if (sum != 0) wrong.push_back(name);
  std::string text;
  for (std::size_t i = 0; i < std::min(wrong.size(), most); ++i) {
    const auto known = names.find(wrong[i]);
    const std::string part =
        known == names.end() ? "" : cat({"'", known->second, "'\t", part_text(boxes, known->second)});
    std::string name, parts_text;
    const std::vector<std::string> parts = gather_texts(device, ranks, part);
    for (std::size_t r = 0; r < parts.size(); ++r) {
      const std::size_t tab = parts[r].find('\t');
      if (tab == parts[r].npos) continue;
      name = parts[r].substr(0, tab);
      if (parts_text.size() < 800)
        append(parts_text, {parts_text.empty() ? "" : "; ", "rank ", r, " has ", parts[r].substr(tab + 1)});
    }
    append(text, {text.empty() ? "" : "; ", name, ": ", parts_text});
  }
  if (wrong.size() > most) append(text, {"; and ", wrong.size() - most, " tensors more"});
  return text;
}

}  // namespace detail

/// Throws `error_of_all` unless the plans of all ranks are for one step and agree on types and shapes. Together they
/// must cover every element of a tensor equally often. One sum of a 64-bit hash checks this; it misses an error with
/// probability 2^-64. The text names tensors that differ, with the boxes of each rank. (When rank 0 reads the notes
/// before the commit, it checks that no tensor is written twice.) A rank without a plan passes its `problem` instead.
/// Collective over `ranks`.
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
    std::string steps_text;
    const std::vector<std::string> all = gather_texts(device, ranks, cat({step}));
    for (std::size_t r = 0; r < std::min<std::size_t>(all.size(), 16); ++r)
      append(steps_text, {r == 0 ? "" : ", ", "rank ", r, " ", all[r]});
    throw error_of_all(cat({"checkpoint: nothing is saved: ranks are at different steps: ", steps_text}));
  }
  if (boxes != 0)
    throw error_of_all(cat({what, "the ranks' parts do not make whole tensors, of one type and shape: ",
                            detail::plan_differences(device, ranks, plan.boxes)}));
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
