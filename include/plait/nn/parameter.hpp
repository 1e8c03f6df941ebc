// A parameter between steps and in use: its gather, its gradient, its reduction, and the order of these calls. It
// holds no optimizer state: train/optim/adamw.hpp. Next: nn/parameter/use.hpp, tests/unit/nn/parameter_life.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/hash.hpp"
#include "plait/core/precision.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/describe.hpp"
#include "plait/nn/parameter/use.hpp"
#include "plait/tensor/executor.hpp"
#include "plait/tensor/microbatch.hpp"

namespace plait {

/// How a parameter starts: normal with a deviation, or a constant.
struct initializer {
  double mean = 0;
  double std = 0.02;
};

/// Describes a parameter to its users.
struct parameter_info {
  std::string name;                 ///< unique in a model; Hugging Face's, in models
  std::vector<std::int64_t> shape;  ///< logical and global, without padding; only the leading dim may be padded
  initializer init;
  bool decays = true;  ///< whether weight decay applies: matrices yes, norm weights and biases no
  /// Whether the first and the last stage of a pipeline both have this parameter, as a tied embedding: its gradient is
  /// summed over the two.
  bool tied_across_stages = false;
};

/// Where a parameter stands. A step is: `gather`; `zero_gradient`; any number of passes; `reduce`; the optimizer's
/// `update` with what `reduce` returned.
enum class parameter_state : std::uint8_t {
  stale,         ///< the stored values have changed: layers must not read it before `gather`
  gathered,      ///< layers may read it
  accumulating,  ///< backward passes add to its gradient
  reduced,       ///< the gradient is complete, and waits for an optimizer
  updated        ///< stale, by an optimizer
};

constexpr const char* name_of(parameter_state s) {
  switch (s) {
    case parameter_state::stale:
      return "stale";
    case parameter_state::gathered:
      return "gathered";
    case parameter_state::accumulating:
      return "accumulating";
    case parameter_state::reduced:
      return "reduced";
    case parameter_state::updated:
      return "updated";
  }
  return "?";
}

template <class Precision, compute_device Device>
class parameter;

/// The complete gradient of a parameter: `parameter::reduce` returns it, and an optimizer takes nothing else of one.
template <class Precision, compute_device Device>
class reduced_gradient {
 public:
  reduced_gradient(reduced_gradient&&) noexcept = default;
  reduced_gradient& operator=(reduced_gradient&&) noexcept = default;

  plait::parameter<Precision, Device>& parameter() const { return *parameter_; }
  /// This rank's part, in the dual layout of `parameter().stored()`.
  const gradient_of<Precision>* data() const { return std::as_const(*parameter_).gradient(); }
  std::int64_t size() const { return parameter_->size(); }

 private:
  friend class plait::parameter<Precision, Device>;
  explicit reduced_gradient(plait::parameter<Precision, Device>& p) : parameter_(&p) {}
  plait::parameter<Precision, Device>* parameter_;
};

/// Memory for a parameter as it is used, of the caller's or of a layer that keeps several side by side. Null: memory of
/// the parameter's own.
template <class Precision>
struct used_memory {
  weight_of<Precision>* value = nullptr;
  gradient_of<Precision>* gradient = nullptr;
  /// Whether they are the caller's, who has put values there, and has zeroed the gradient: where nothing is to be
  /// gathered, the parameter begins its life gathered, and accumulating.
  bool callers_value = false, callers_gradient = false;
};

/// A parameter as layers, optimizers, initialisation, clipping and checkpoints see it: `stored` is how it lies between
/// steps, `used` how the layers need it. Between them is a plan; its mirror is the gradient's reduction. How it is used
/// follows from its placement and from what it meets (`use_of`); a layer cannot state it.
///
/// Between steps it is of the precision's master type, in use of its weight type; gradients are of its gradient type.
/// It has a life (`parameter_state`), and every call that does not fit throws an error that names the parameter and the
/// call that is missing. Layers hold parameters by `shared_ptr`: one that several layers use is one object.
template <class Precision, compute_device Device>
class parameter {
 public:
  using precision_type = Precision;
  using weight_type = weight_of<Precision>;
  using gradient_type = gradient_of<Precision>;
  using master_type = master_of<Precision>;

  /// `stored` and `placed` have the same dims; `placed` is how the dims lie in use, without replication; `met` is the
  /// layout of what it is multiplied with, added to or looked up by, which mentions every axis of the mesh.
  parameter(const context<Device>& ctx, parameter_info info, const layout& stored, const layout& placed,
            const layout& met, used_memory<Precision> memory = {})
      : info_(std::move(info)),
        stored_(stored),
        used_(checked_use(ctx, info_.name, placed, met)),
        gather_(stored, used_, ctx.ranks, ctx.sizes, "parameter " + info_.name),
        reduce_(gather_.backward(), ctx.ranks, ctx.sizes, "gradient of " + info_.name),
        used_value_(memory.value),
        used_gradient_(memory.gradient),
        callers_gradient_(memory.callers_gradient) {
    enforce(check_stored(stored), "parameter " + info_.name);
    part_ = local_box(stored, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
    const auto n = static_cast<std::size_t>(used_size()), stored_n = static_cast<std::size_t>(size());
    if (!used_value_) {
      own_value_ = make_collective_buffer<weight_type>(ctx.device, n);
      used_value_ = own_value_.template data<weight_type>();
    }
    if (!used_gradient_) {
      own_gradient_ = make_collective_buffer<gradient_type>(ctx.device, n);
      used_gradient_ = own_gradient_.template data<gradient_type>();
    }
    if (rounded) stored_value_ = make_buffer<master_type>(ctx.device, stored_n);  // `gather` sends it rounded
    if (!rounded && !gather_.trivial()) stored_value_ = make_collective_buffer<master_type>(ctx.device, stored_n);
    if (!gather_.trivial()) stored_gradient_ = make_collective_buffer<gradient_type>(ctx.device, stored_n);
    current_ = memory.callers_value && !rounded && gather_.trivial();
    if (memory.callers_gradient) phase_ = phase::accumulating;
  }
  parameter(const parameter&) = delete;
  parameter& operator=(const parameter&) = delete;

  const std::string& name() const { return info_.name; }
  const parameter_info& info() const { return info_; }
  const layout& stored() const { return stored_; }
  const layout& used() const { return used_; }
  /// The part of the (padded) global parameter that this rank stores.
  const box& part() const { return part_; }
  std::int64_t size() const { return part_.local_size(); }
  /// The global (padded) sizes of its dims, of which the context need not know all: an adapter's rank is its own.
  dim_sizes sizes() const {
    dim_sizes all;
    for (std::size_t d = 0; d < stored_.dims.size(); ++d) all.set(stored_.dims[d].dim, part_.global[d]);
    return all;
  }
  /// Elements that this rank uses.
  std::int64_t used_size() const { return gather_.target().local_size(); }
  parameter_state state() const {
    if (!current_) return phase_ == phase::updated ? parameter_state::updated : parameter_state::stale;
    return phase_ == phase::accumulating ? parameter_state::accumulating
           : phase_ == phase::reduced    ? parameter_state::reduced
                                         : parameter_state::gathered;
  }

  /// Master values, for whoever changes them: the parameter is stale then.
  master_type* value() {
    current_ = rounded_current_ = false;
    if (phase_ == phase::updated) phase_ = phase::none;  // what an optimizer has rounded is not these values
    return master();
  }
  const master_type* value() const { return const_cast<parameter*>(this)->master(); }
  /// The gradient as it is stored: complete after `reduce`, and nothing to read before.
  gradient_type* gradient() {
    return stored_gradient_.empty() ? used_gradient_ : stored_gradient_.template data<gradient_type>();
  }
  const gradient_type* gradient() const { return const_cast<parameter*>(this)->gradient(); }

  /// Returns the values that layers read. Throws while the parameter is stale.
  const weight_type* used_value() const {
    require_gathered();
    return used_value_;
  }
  /// Returns the gradient that backward passes add to; the first that asks since `zero_gradient` has it zeroed. Throws
  /// unless the parameter is accumulating; not for a frozen one.
  gradient_type* used_gradient(Device& device) {
    require_accumulating();
    if (empty_) clear_gradient(device);
    return used_gradient_;
  }
  /// Whether nothing has been added since `zero_gradient`, so that a pass which writes every element need not add.
  bool gradient_is_empty() const { return empty_; }
  /// Returns the gradient for such a pass. Throws as `used_gradient` does.
  gradient_type* overwritten_gradient() {
    require_accumulating();
    empty_ = false;
    return used_gradient_;
  }
  /// The check of `used_value` alone, for layers that keep several parameters in one array.
  void require_gathered() const {
    if (current_) return;
    fail({"parameter ", info_.name, " is used while it is ", name_of(state()),
          ": call gather(ctx) after its values change and before a layer reads it"});
  }
  /// The check of `used_gradient` alone.
  void require_accumulating() const {
    if (phase_ == phase::accumulating) return;
    if (frozen_) fail({"parameter ", info_.name, " is frozen, and has no gradient"});
    fail({"parameter ", info_.name,
          phase_ == phase::reduced
              ? ": a backward pass adds to a gradient that has been reduced; call zero_gradient(ctx) to begin a new sum"
              : ": a backward pass adds to a gradient that has not begun; call zero_gradient(ctx) before it"});
  }

  /// A frozen parameter has no gradient: no memory for one, no product, no reduction, no optimizer state. For good.
  void freeze() {
    frozen_ = true;
    phase_ = phase::none;
    own_gradient_.reset();
    stored_gradient_.reset();
    used_gradient_ = nullptr;
    held_gradient_.reset();
  }
  bool trainable() const { return !frozen_; }

  /// Fills the stored part with random numbers that depend on the seed, the parameter's name and the global index only,
  /// so they are the same on every mesh; padding is zero.
  void initialize(const context<Device>& ctx) {
    master_type* const values = value();
    if (info_.init.std == 0) {
      kernels::fill(ctx.device, values, size(), static_cast<master_type>(info_.init.mean));
    } else {
      kernels::fill_normal(ctx.device, values, part_, ctx.seed, stream_of(info_.name), info_.init.mean, info_.init.std);
    }
    clear_padding(ctx, values);
  }
  /// Zeroes the rows beyond the logical size of the leading dim.
  void clear_padding(const context<Device>& ctx, master_type* values) const {
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

  /// Brings the stored values to where layers read them. Collective over the axes of its plan.
  void gather(const context<Device>& ctx) {
    if constexpr (!rounded) {
      if (!stored_value_.empty()) gather_.run(ctx.device, master(), used_value_, dtype_of<weight_type>);
    } else if (gather_.trivial()) {
      if (!rounded_current_) kernels::cast(ctx.device, master(), used_value_, size());
      rounded_current_ = true;
    } else {  // rounded before it travels: half the bytes
      auto part = make_collective_buffer<weight_type>(ctx.device, static_cast<std::size_t>(size()));
      kernels::cast(ctx.device, master(), part.template data<weight_type>(), size());
      gather_.run(ctx.device, part.data(), used_value_, dtype_of<weight_type>);
    }
    current_ = true;
    if (phase_ == phase::updated) phase_ = phase::none;
  }
  /// Begins the sum of a gradient: the first pass forgets what was there, but in memory of the caller's, which is
  /// zeroed at once. Nothing for a frozen parameter.
  void zero_gradient(const context<Device>& ctx) {
    if (frozen_) return;
    phase_ = phase::accumulating;
    empty_ = true;
    if (callers_gradient_) clear_gradient(ctx.device);
  }
  /// Begins a gradient that the caller, whose memory it is, has zeroed.
  void begin_gradient() {
    if (!frozen_) phase_ = phase::accumulating, empty_ = false;
  }
  /// Completes the gradient over every axis over which it is partial, and over the stages that share the parameter.
  /// Collective over those. Throws unless backward passes may have added to it since the last `zero_gradient`.
  [[nodiscard]] reduced_gradient<Precision, Device> reduce(const context<Device>& ctx) {
    if (frozen_) fail({"parameter ", info_.name, " is frozen, and has no gradient to reduce"});
    if (phase_ != phase::accumulating)
      fail({"parameter ", info_.name,
            phase_ == phase::reduced
                ? ": reduce is called twice for one gradient, which would count it more than once; "
                  "what it returned the first time goes to the optimizer"
                : ": reduce without a gradient; call zero_gradient(ctx), then backward passes, "
                  "then reduce(ctx)"});
    if (empty_) clear_gradient(ctx.device);  // no pass has met it
    if (!reduce_.trivial() || gradient() != used_gradient_)
      reduce_.run(ctx.device, used_gradient_, gradient(), dtype_of<gradient_type>);
    if (stages_)
      stages_.all_reduce(gradient(), gradient(), static_cast<std::size_t>(size()), dtype_of<gradient_type>,
                         reduce_op::sum);
    phase_ = phase::reduced;
    return reduced_gradient<Precision, Device>(*this);
  }

  /// For optimizers: the master values to change, and, where they are rounded in place, where the rounded ones go (the
  /// optimizer then writes all of them). The parameter counts as updated from now on.
  struct update_target {
    master_type* master;
    weight_type* rounded;  ///< null: `gather` will round
  };
  update_target begin_update() {
    if (phase_ != phase::reduced)
      fail({"parameter ", info_.name, ": an optimizer updates it while it is ", name_of(state()),
            "; reduce(ctx) comes first, and each gradient is used once"});
    const bool in_place = rounded && gather_.trivial();
    phase_ = phase::updated;
    current_ = false;
    rounded_current_ = in_place;
    return {master(), in_place ? used_value_ : nullptr};
  }

  /// Makes `reduce` also sum over the stages of a pipeline that share this parameter. `counts` is true on one of them,
  /// where norms and hashes count it.
  void join_stages(any_communicator stages, bool counts) {
    stages_ = std::move(stages);
    counts_ = counts;
  }
  any_communicator& stages() { return stages_; }
  /// Whether this rank's stages are the ones for which it counts in a norm or a hash over all stages.
  bool counts() const { return counts_; }

  /// Keeps the memory that was handed in as `used_memory::gradient` alive until the parameter is frozen.
  void hold_gradient(std::shared_ptr<buffer<Device>> memory) { held_gradient_ = std::move(memory); }

  const executor& gather_plan() const { return gather_; }
  const executor& reduce_plan() const { return reduce_; }

  /// Returns the stream of random numbers of a parameter with this name.
  static constexpr std::uint64_t stream_of(std::string_view name) { return fnv1a(name); }

 private:
  static constexpr bool rounded = !std::is_same_v<weight_type, master_type>;
  enum class phase : std::uint8_t { none, accumulating, reduced, updated };

  static layout checked_use(const context<Device>& ctx, const std::string& name, const layout& placed,
                            const layout& met) {
    enforce(check_boundary(met, ctx.ranks.shape()), cat({"parameter ", name, ": what it meets, ", describe(met)}));
    return use_of(placed, met);
  }

  void clear_gradient(Device& device) {
    device.zero(used_gradient_, static_cast<std::size_t>(used_size()) * sizeof(gradient_type), device.main_stream());
    empty_ = false;
  }

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
  buffer<Device> own_value_, own_gradient_;
  buffer<Device> stored_value_, stored_gradient_;
  std::shared_ptr<buffer<Device>> held_gradient_;
  weight_type* used_value_ = nullptr;
  gradient_type* used_gradient_ = nullptr;
  any_communicator stages_;
  phase phase_ = phase::none;
  bool current_ = false;          ///< whether layers may read the used values
  bool rounded_current_ = false;  ///< whether the used values are the stored ones, rounded
  bool counts_ = true;
  bool frozen_ = false;
  bool empty_ = false;             ///< whether the gradient counts as zero, whatever its memory holds
  bool callers_gradient_ = false;  ///< whether that memory is the caller's, who may add to it as well
};

/// How layers hold parameters.
template <class Precision, compute_device Device>
using parameter_ptr = std::shared_ptr<parameter<Precision, Device>>;

/// Gathers all parameters of a layer or a model, before a step's first pass. Collective.
template <compute_device Device, class Layer>
void gather_parameters(const context<Device>& ctx, Layer& layer) {
  layer.visit([&](auto& p) { p.gather(ctx); });
}
/// Begins the gradients of all parameters of a layer or a model.
template <compute_device Device, class Layer>
void zero_gradients(const context<Device>& ctx, Layer& layer) {
  layer.visit([&](auto& p) { p.zero_gradient(ctx); });
}

PLAIT_COMPILED_TEMPLATE(class parameter<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class parameter<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class parameter<double, cpu>)

}  // namespace plait
