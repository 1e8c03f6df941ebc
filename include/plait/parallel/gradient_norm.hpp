// The norm of gradients of any layout over the mesh of one stage, and the factor of clipping.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/kernels/sums.hpp"
#include "plait/nn/parameter.hpp"

namespace plait {

/// The norm of the gradients of one stage; it counts every element once. (`training_step` sums over stages.) A
/// parameter's squares are summed over the axes that shard its stored layout or split it into slices. On other axes the
/// gradient is invariant, so they are not summed there. Each distinct set of axes needs one reduction of one number.
template <class Precision, compute_device Device = cpu>
class gradient_norm {
  using G = gradient_of<Precision>;

 public:
  /// Adds a gradient. If several pipeline stages share it, only the stage where it counts adds it.
  void add(const context<Device>& ctx, const reduced_gradient<Precision, Device>& g);
  /// Returns the sum of the squares, equal on every rank of the stage: one number in the device's memory, valid as long
  /// as this object. Collective over the mesh.
  const double* squares(const context<Device>& ctx);
  /// Writes the sum of the squares of all `stages` to `to`, in the device's memory. The sum is exact if the context's
  /// sums are deterministic. Collective over the mesh and the stages.
  void sum_over(const context<Device>& ctx, any_communicator& stages, double* to);
  /// Returns the norm, on the host.
  double total(const context<Device>& ctx);

 private:
  /// Returns the sum of the squares as integers in the device's memory; `kernels::sum_of_bins` converts them to one
  /// number. They are exact, so stages can add them in any order. Ranks with equal gradients each sum a share of them.
  std::int64_t* exact_squares(const context<Device>& ctx)
    requires has_deterministic_products<Device>;
  struct part {
    axis_list axes;
    any_communicator* group;  ///< null if no axis splits them
    std::vector<kernels::const_elements<G>> gradients;
  };
  /// The range of n elements that rank `index` of `ranks` sums. It begins at an aligned element.
  static element_range share_of(std::int64_t n, std::int64_t ranks, std::int64_t index) {
    constexpr std::int64_t together = 64;
    const std::int64_t each = ((n + ranks - 1) / ranks + together - 1) / together * together;
    return {std::min(index * each, n), std::min((index + 1) * each, n)};
  }
  part& share(world& w, const parameter<Precision, Device>& p) {
    axis_list axes;
    for (axis_id axis : w.shape().axes) {
      const bool cuts = p.storage() != nullptr && p.storage()->axes().find(axis) >= 0;
      if (w.shape().extent(axis) > 1 && (cuts || p.stored().sharded_by(axis))) axes.push_back(axis);
    }
    for (part& same : parts_)
      if (same.axes == axes) return same;
    parts_.push_back({axes, axes.empty() ? nullptr : &w.group(axes), {}});
    return parts_.back();
  }
  buffer<Device> sums_, bins_;
  std::vector<part> parts_;
};

/// The factor by which clipping to `limit` multiplies gradients (`kernels::clip_factor`), for a program's own loop.
/// Throws if the norm is not finite, since no factor makes such gradients usable.
inline double clip_factor(double norm, double limit) {
  if (!std::isfinite(norm))
    fail({"clip_factor: the gradient norm is ", norm,
          "; an update would spoil every weight: leave it out, and call forget_step() if begin_step was called"});
  return kernels::clip_factor(norm, limit);
}

template <class Precision, compute_device Device>
void gradient_norm<Precision, Device>::add(const context<Device>& ctx, const reduced_gradient<Precision, Device>& g) {
  part& p = share(ctx.ranks, g.parameter());
  if (g.parameter().counts()) p.gradients.push_back({g.data(), g.size()});
}

template <class Precision, compute_device Device>
const double* gradient_norm<Precision, Device>::squares(const context<Device>& ctx) {
  sums_ = make_buffer<double>(ctx.device, parts_.size() + 1);
  double* const all = sums_.template data<double>();
  ctx.device.zero(all, sums_.bytes(), ctx.device.main_stream());
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    double* const own = all + i + 1;
    kernels::add_sum_squares(ctx.device, std::span<const kernels::const_elements<G>>(parts_[i].gradients), own);
    if (parts_[i].group != nullptr) parts_[i].group->all_reduce(own, own, 1, dtype::f64, reduce_op::sum);
    kernels::accumulate(ctx.device, own, all, 1);
  }
  return all;
}

template <class Precision, compute_device Device>
void gradient_norm<Precision, Device>::sum_over(const context<Device>& ctx, any_communicator& stages, double* to) {
  const auto add_stages = [&](void* values, std::size_t count, dtype type) {
    if (stages.size() > 1) stages.all_reduce(values, values, count, type, reduce_op::sum);
  };
  if constexpr (has_deterministic_products<Device>) {
    if (sums_in_order(ctx)) {
      std::int64_t* const bins = exact_squares(ctx);
      add_stages(bins, kernels::exact_squares::words, dtype::i64);
      return kernels::sum_of_bins(ctx.device, static_cast<const std::int64_t*>(bins), to);
    }
  }
  ctx.device.copy(to, squares(ctx), sizeof(double), ctx.device.main_stream());
  add_stages(to, 1, dtype::f64);
}

template <class Precision, compute_device Device>
double gradient_norm<Precision, Device>::total(const context<Device>& ctx) {
  double sum = 0;
  ctx.device.download(&sum, squares(ctx), sizeof sum, ctx.device.main_stream());
  return std::sqrt(sum);
}

template <class Precision, compute_device Device>
std::int64_t* gradient_norm<Precision, Device>::exact_squares(const context<Device>& ctx)
  requires has_deterministic_products<Device>
{
  constexpr std::int64_t words = kernels::exact_squares::words;
  bins_ = make_buffer<std::int64_t>(ctx.device, static_cast<std::size_t>(words));
  auto* const all = bins_.template data<std::int64_t>();
  ctx.device.zero(all, bins_.bytes(), ctx.device.main_stream());
  const mesh_shape& mesh = ctx.ranks.shape();
  for (const part& p : parts_) {
    const axis_list alike = mesh.others(p.axes);
    std::vector<kernels::const_elements<G>> own;
    for (const kernels::const_elements<G>& g : p.gradients) {
      const element_range mine = share_of(g.size, mesh.size(alike), mesh.index_in(ctx.ranks.rank(), alike));
      if (mine.size() > 0) own.push_back({g.data + mine.begin, mine.size()});
    }
    kernels::add_exact_squares(ctx.device, std::span<const kernels::const_elements<G>>(own), all);
  }
  if (const axis_list over = ctx.ranks.pruned(mesh.others({})); !over.empty())
    ctx.ranks.group(over).all_reduce(all, all, words, dtype::i64, reduce_op::sum);
  return all;
}

PLAIT_COMPILED_TEMPLATE(class gradient_norm<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class gradient_norm<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class gradient_norm<double, cpu>)

}  // namespace plait

#include "plait/core/macros_on.hpp"
