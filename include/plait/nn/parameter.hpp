#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/precision.hpp"
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
/// Between steps it is of the precision's master type, in use of its weight type; gradients are of its gradient type,
/// where they are summed as well as where they are stored.
///
/// A step is: `gather` once, any number of passes that add to `used_gradient`, `reduce` once. What the optimizer then
/// finds in `gradient` has the dual layout of `stored`, which has no partial axis left.
template <class Precision, compute_device Device>
class parameter_base {
 public:
  using weight_type = weight_of<Precision>;
  using gradient_type = gradient_of<Precision>;
  using master_type = master_of<Precision>;

  parameter_base() = default;
  parameter_base(context<Device>& ctx, parameter_info info, const layout& stored, const layout& used,
                 weight_type* used_memory, gradient_type* gradient_memory)
      : info_(std::move(info)),
        stored_(stored),
        used_(used),
        gather_(stored, used, ctx.ranks, ctx.sizes, "parameter " + info_.name),
        reduce_(gather_.backward(), ctx.ranks, ctx.sizes, "gradient of " + info_.name),
        used_value_(used_memory),
        used_gradient_(gradient_memory) {
    enforce(check_stored(stored), "parameter " + info_.name);
    part_ = local_box(stored, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
    if (rounded || !gather_.trivial())
      stored_value_ = make_buffer<master_type>(ctx.device, static_cast<std::size_t>(size()));
    if (!gather_.trivial()) stored_gradient_ = make_buffer<gradient_type>(ctx.device, static_cast<std::size_t>(size()));
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

  /// What is stored, for whoever changes it: layers see the change after the next `gather`.
  master_type* value() {
    current_ = false;
    return master();
  }
  const master_type* value() const { return const_cast<parameter_base*>(this)->master(); }
  gradient_type* gradient() {
    return stored_gradient_.empty() ? used_gradient_ : stored_gradient_.template data<gradient_type>();
  }
  weight_type* used_value() { return used_value_; }
  gradient_type* used_gradient() { return used_gradient_; }
  /// Where an optimizer that updates `value` may write the rounded values too, so that the next `gather` has nothing
  /// left to do; null where there is no such place. It must then write all of them.
  weight_type* rounded_copy() {
    if (!rounded || !gather_.trivial()) return nullptr;
    current_ = true;
    return used_value_;
  }
  const executor& gather_plan() const { return gather_; }
  const executor& reduce_plan() const { return reduce_; }

  /// Fills the stored part with random numbers that depend on the seed, the parameter's name and the global index only,
  /// so they are the same on every mesh; padding is zero.
  void initialize(context<Device>& ctx) {
    master_type* const values = value();
    if (info_.init.std == 0) {
      kernels::fill(ctx.device, values, size(), static_cast<master_type>(info_.init.mean));
    } else {
      kernels::fill_normal(ctx.device, values, part_, ctx.seed, stream_of(info_.name), info_.init.mean, info_.init.std);
    }
    clear_padding(ctx, values);
  }
  /// Zeroes the rows beyond the logical size of the leading dim.
  void clear_padding(context<Device>& ctx, master_type* values) {
    std::int64_t logical = 1, padded = 1;
    for (std::int64_t n : info_.shape) logical *= n;
    for (int d = 0; d < part_.dims; ++d) padded *= part_.global[static_cast<std::size_t>(d)];
    if (logical == padded) return;
    const std::int64_t row = size() / part_.local[0];
    const std::int64_t first = std::max<std::int64_t>(0, info_.shape[0] - part_.offset[0]);
    if (first < part_.local[0])
      ctx.device.zero(values + first * row,
                      static_cast<std::size_t>((part_.local[0] - first) * row) * sizeof(master_type),
                      ctx.device.main_stream());
  }

  void gather(context<Device>& ctx) {
    if constexpr (!rounded) {
      if (!stored_value_.empty()) gather_.run(ctx.device, master(), used_value_, dtype_of<weight_type>);
    } else if (gather_.trivial()) {
      if (!current_) kernels::cast(ctx.device, master(), used_value_, size());
      current_ = true;
    } else {  // rounded before it travels: half the bytes
      auto part = make_buffer<weight_type>(ctx.device, static_cast<std::size_t>(size()));
      kernels::cast(ctx.device, master(), part.template data<weight_type>(), size());
      gather_.run(ctx.device, part.data(), used_value_, dtype_of<weight_type>);
    }
  }
  void reduce(context<Device>& ctx) {
    if (!reduce_.trivial() || gradient() != used_gradient_)
      reduce_.run(ctx.device, used_gradient_, gradient(), dtype_of<gradient_type>);
  }
  void zero_gradient(context<Device>& ctx) {
    ctx.device.zero(used_gradient_, static_cast<std::size_t>(used_size()) * sizeof(gradient_type),
                    ctx.device.main_stream());
  }

  /// FNV-1a of a name: the stream of its random numbers.
  static constexpr std::uint64_t stream_of(std::string_view name) {
    std::uint64_t hash = 14695981039346656037ull;
    for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
    return hash;
  }

 private:
  static constexpr bool rounded = !std::is_same_v<weight_type, master_type>;

  master_type* master() {
    if constexpr (!rounded) {
      if (stored_value_.empty()) return used_value_;
    }
    return stored_value_.template data<master_type>();
  }

  parameter_info info_;
  layout stored_, used_;
  executor gather_, reduce_;
  box part_;
  buffer<Device> stored_value_, stored_gradient_;
  weight_type* used_value_ = nullptr;
  gradient_type* used_gradient_ = nullptr;
  bool current_ = false;  ///< whether the used values are the stored ones, rounded
};

}  // namespace plait
