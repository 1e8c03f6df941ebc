#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/kernels/kernels.hpp"
#include "plait/layout/enforce.hpp"
#include "plait/tensor/executor.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait {

/// How a parameter starts: normal with a deviation, or a constant.
struct initializer {
  double mean = 0;
  double std = 0.02;
};

/// What the user of a parameter knows of it: its name (Hugging Face's, in models) and its logical global shape, without
/// padding. `padded_dim` is the leading dim if that one is padded, with its true size in `shape[0]`.
struct parameter_info {
  std::string name;
  std::vector<std::int64_t> shape;
  initializer init;
  bool decays = true;  ///< whether weight decay applies: matrices yes, norm weights and biases no
};

/// Parameters are stored sharded or invariant: one stored replicated would reach the optimizer with a gradient that is
/// still partial.
constexpr verdict check_stored(const layout& stored) {
  verdict v;
  for (axis_id axis : stored.replicated)
    v.worsen({rule::unresolved_partial, axis, {}, state::partial, state::replicated});
  for (axis_id axis : stored.partial) v.worsen({rule::unresolved_partial, axis, {}, state::replicated, state::partial});
  return v;
}

/// A parameter as optimizers, initialisation, clipping and checkpoints see it: `stored` is how it lies between steps,
/// `used` how the layers need it. Between them is a plan; its mirror is the gradient's reduction.
///
/// A step is: `gather` once, any number of passes that add to `used_gradient`, `reduce` once. What the optimizer then
/// finds in `gradient` has the dual layout of `stored`, which has no partial axis left.
template <class T, compute_device Device>
class parameter_base {
 public:
  parameter_base() = default;
  parameter_base(context<Device>& ctx, parameter_info info, const layout& stored, const layout& used, T* used_memory,
                 T* gradient_memory)
      : info_(std::move(info)),
        stored_(stored),
        used_(used),
        gather_(stored, used, ctx.ranks, ctx.sizes, "parameter " + info_.name),
        reduce_(gather_.backward(), ctx.ranks, ctx.sizes, "gradient of " + info_.name),
        used_value_(used_memory),
        used_gradient_(gradient_memory) {
    enforce(check_stored(stored), "parameter " + info_.name);
    part_ = local_box(stored, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
    if (gather_.trivial()) return;
    stored_value_ = make_buffer<T>(ctx.device, static_cast<std::size_t>(size()));
    stored_gradient_ = make_buffer<T>(ctx.device, static_cast<std::size_t>(size()));
  }

  const std::string& name() const { return info_.name; }
  const parameter_info& info() const { return info_; }
  const layout& stored() const { return stored_; }
  const layout& used() const { return used_; }
  /// The part of the (padded) global parameter that this rank stores.
  const box& part() const { return part_; }
  std::int64_t size() const { return part_.local_size(); }

  /// Elements that this rank uses.
  std::int64_t used_size() const { return gather_.to().local_size(); }

  T* value() { return stored_value_.empty() ? used_value_ : stored_value_.template data<T>(); }
  T* gradient() { return stored_gradient_.empty() ? used_gradient_ : stored_gradient_.template data<T>(); }
  T* used_value() { return used_value_; }
  T* used_gradient() { return used_gradient_; }
  const executor& gather_plan() const { return gather_; }
  const executor& reduce_plan() const { return reduce_; }

  /// Fills the stored part with random numbers that depend on the seed, the parameter's name and the global index only,
  /// so they are the same on every mesh; padding is zero.
  void initialize(context<Device>& ctx) {
    T* const values = value();
    if (info_.init.std == 0) {
      kernels::fill(ctx.device, values, size(), static_cast<T>(info_.init.mean));
    } else {
      kernels::fill_normal(ctx.device, values, part_, ctx.seed, stream_of(info_.name), info_.init.mean, info_.init.std);
    }
    clear_padding(ctx, values);
  }
  /// Zeroes the rows beyond the logical size of the leading dim.
  void clear_padding(context<Device>& ctx, T* values) {
    std::int64_t logical = 1, padded = 1;
    for (std::int64_t n : info_.shape) logical *= n;
    for (int d = 0; d < part_.dims; ++d) padded *= part_.global[static_cast<std::size_t>(d)];
    if (logical == padded) return;
    const std::int64_t row = size() / part_.local[0];
    const std::int64_t first = std::max<std::int64_t>(0, info_.shape[0] - part_.offset[0]);
    if (first < part_.local[0])
      ctx.device.zero(values + first * row, static_cast<std::size_t>((part_.local[0] - first) * row) * sizeof(T),
                      ctx.device.main_stream());
  }

  void gather(context<Device>& ctx) {
    if (!stored_value_.empty()) gather_.run(ctx.device, value(), used_value_, dtype_of<T>);
  }
  void reduce(context<Device>& ctx) {
    if (!reduce_.trivial() || gradient() != used_gradient_)
      reduce_.run(ctx.device, used_gradient_, gradient(), dtype_of<T>);
  }
  void zero_gradient(context<Device>& ctx) {
    ctx.device.zero(used_gradient_, static_cast<std::size_t>(used_size()) * sizeof(T), ctx.device.main_stream());
  }

  /// FNV-1a of a name: the stream of its random numbers.
  static constexpr std::uint64_t stream_of(std::string_view name) {
    std::uint64_t hash = 14695981039346656037ull;
    for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
    return hash;
  }

 private:
  parameter_info info_;
  layout stored_, used_;
  executor gather_, reduce_;
  box part_;
  buffer<Device> stored_value_, stored_gradient_;
  T* used_value_ = nullptr;
  T* used_gradient_ = nullptr;
};

}  // namespace plait
