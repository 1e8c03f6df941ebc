#pragma once

#include <cmath>
#include <span>
#include <vector>

#include "plait/nn/parameter.hpp"

namespace plait {

/// The global norm of gradients, every element counted once: a parameter's squares are summed over the axes that shard
/// it as stored, and over no other, because there the gradient is invariant. One reduction of one number for each
/// distinct set of axes.
template <compute_device Device>
class gradient_norm {
 public:
  /// Adds a parameter's gradient, which must be reduced.
  template <class T>
  void add(context<Device>& ctx, parameter_base<T, Device>& p) {
    const kernels::const_elements<T> one{p.gradient(), p.size()};
    kernels::add_sum_squares(ctx.device, std::span(&one, 1), &share(ctx.ranks, p.stored()).squares);
  }
  /// The norm; the same on every rank. Collective over the mesh.
  double total(context<Device>& ctx) {
    double squares = 0;
    for (part& s : parts_) {
      if (!s.axes.empty()) ctx.ranks.group(s.axes).all_reduce(&s.squares, &s.squares, 1, dtype::f64, reduce_op::sum);
      squares += s.squares;
    }
    return std::sqrt(squares);
  }
  /// The sets of axes reduced over, as `total` does.
  std::vector<axis_list> groups() const {
    std::vector<axis_list> all;
    for (const part& s : parts_)
      if (!s.axes.empty()) all.push_back(s.axes);
    return all;
  }
  /// Makes the entry of a parameter's axes without adding anything.
  template <class T>
  void prepare(context<Device>& ctx, const parameter_base<T, Device>& p) {
    share(ctx.ranks, p.stored());
  }

 private:
  struct part {
    axis_list axes;
    double squares = 0;
  };
  part& share(const world& w, const layout& stored) {
    axis_list axes;
    for (axis_id axis : w.shape().axes)
      if (w.shape().extent(axis) > 1 && stored.sharded_by(axis)) axes.push_back(axis);
    for (part& s : parts_)
      if (s.axes == axes) return s;
    parts_.push_back({axes, 0});
    return parts_.back();
  }
  std::vector<part> parts_;
};

/// What clipping to `limit` multiplies gradients with: PyTorch's clip_grad_norm_, limit / (norm + 1e-6) where below 1.
/// A limit of 0 does not clip.
inline double clip_factor(double norm, double limit) {
  const double factor = limit / (norm + 1e-6);
  return limit > 0 && factor < 1 ? factor : 1.0;
}

}  // namespace plait
