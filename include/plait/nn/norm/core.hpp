// The part that both norms over the last dim share: sizes, parameters, sums over rows.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/nn/layer/apart.hpp"
#include "plait/nn/layer/made_for.hpp"
#include "plait/nn/layer/names.hpp"
#include "plait/nn/norm/rule.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/nn/parameter/kernel_sum.hpp"
#include "plait/nn/parameter/rebind.hpp"

namespace plait {
namespace detail {

/// Runs `work(dy)` as a weight gradient; if it is deferred, on a copy of dy that the task owns.
template <class T, compute_device Device, class F>
void with_gradient_kept(const microbatch<Device>& mb, const T* dy, std::int64_t count, F work) {
  if (!mb.deferred) return work(dy);
  Device& device = mb.ctx.device;
  auto copy = make_buffer<T>(device, static_cast<std::size_t>(count));
  device.copy(copy.data(), dy, copy.bytes(), device.main_stream());
  mb.on_weights([copy = std::move(copy), work]() mutable { work(copy.template data<T>()); });
}

/// The shared part of both norms: sizes, the group that shares a row, and parameters of the last dim.
template <class Precision, compute_device Device>
class norm_core {
 public:
  using W = weight_of<Precision>;
  using G = gradient_of<Precision>;
  using S = statistic_of<Precision>;
  using K = gradient_of<activation_of<Precision>>;  ///< in which kernels sum gradients
  static constexpr bool in_place = sums_in_place<activation_of<Precision>, G>;

  norm_core(const context<Device>& ctx, const layout& input, const layout& stored, const layout& placed,
            const std::string& name, bool with_bias, const parameter_memory<Precision>& callers)
      : columns_global(ctx.sizes.of(input.dims.back().dim)), names(name) {
    enforce(check_boundary(input, ctx.ranks.shape()), name + ": input");
    take_sizes(ctx, input, name);
    const axis_list sharing = ctx.ranks.pruned(input.dims.back().axes);
    if (!sharing.empty()) row_group = &ctx.ranks.group(sharing);
    callers.require_complete(name, true, with_bias);
    const auto make = [&](const char* which, double start, const auto& value, const auto& gradient,
                          const auto& master) {
      return std::make_shared<parameter<Precision, Device>>(
          ctx, parameter_info{name + which, {columns_global}, {start, 0}, false}, stored, placed, input,
          parameter_place<Precision, Device>(ctx.device, local_elements(placed, ctx.ranks.shape(), ctx.sizes),
                                             value.pointer(), gradient.pointer(), master.pointer()));
    };
    weight = make(".weight", 1, callers.weight, callers.gradient, callers.master);
    if (with_bias) bias = make(".bias", 0, callers.bias, callers.bias_gradient, callers.bias_master);
    if (!ctx.numerics.canonical()) return;
    if (row_group)
      fail({name, ": canonical numerics (deterministic) have no order for norms of rows that ranks share"});
    const token_leaves leaves(ctx.numerics, input, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank(), token_grain::fine,
                              name);
    for (auto* p : {&weight, &bias})
      if (*p) (*p)->add_terms(leaves);
    canonical = true;
  }

  /// Takes other sizes for a norm that is made; throws under canonical numerics, which are fixed by the sizes.
  void resize(const context<Device>& ctx, const layout& input) {
    require_resizable(names.layer(), canonical);
    arm_checks(ctx);
    take_sizes(ctx, input, names.layer());
  }
  /// Takes the sizes of the context; all but the last dim's may change.
  void take_sizes(const context<Device>& ctx, const layout& input, const std::string& name) {
    if (const std::int64_t now = ctx.sizes.of(input.dims.back().dim); now != columns_global)
      fail({name, ": resize changes ", input.dims.back().dim.text(), " from ", columns_global, " to ", now,
            ", and the weight has this dim: make another norm for another width"});
    const box part = local_box(input, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
    enforce_divides(input, ctx.ranks.shape(), ctx.sizes, name);
    columns = part.local[static_cast<std::size_t>(part.dims - 1)];
    rows = part.local_size() / columns;
    sizes.take(name, ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes, {&input});
  }
  /// Throws unless the sizes of a call's context are those that the norm was made for.
  void require_sizes(const context<Device>& ctx) const {
    sizes.require(weight->name(), ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes);
  }
  void rebind(const parameter_memory<Precision>& callers) {
    rebind_parameters<Precision, Device>(names.layer(), {weight}, {bias}, callers);
  }

  /// Sums per-row values over the ranks that share the rows.
  void sum_rows(S* values, std::int64_t count) {
    if (row_group) row_group->all_reduce(values, values, static_cast<std::size_t>(count), dtype_of<S>, reduce_op::sum);
  }

  /// The input: x, or x + addend where there is one.
  template <class T>
  const T* added(Device& device, const T* x, const T* addend, T* sum) const {
    if (addend == nullptr) return x;
    kernels::add(device, x, addend, sum, rows * columns);
    return sum;
  }

  void require_forward_sizes(std::int64_t x, std::int64_t y) const {
    require_size(names.checked(*weight).name(), "x", x, rows * columns);
    require_size(weight->name(), "y", y, rows * columns);
  }
  void require_backward_sizes(std::int64_t x, std::int64_t dy, std::int64_t dx) const {
    require_size(names.checked(*weight).name(), "x", x, rows * columns);
    require_size(weight->name(), "dy", dy, rows * columns);
    require_size(weight->name(), "dx", dx, rows * columns);
  }
  /// Throws where the caller's x or the other array is null.
  void require_arrays(const void* x, const char* name, const void* other) const {
    require_array(weight->name(), "x", x, rows * columns);
    require_array(weight->name(), name, other, rows * columns);
  }
  /// Throws where a backward pass would read what no forward pass has kept, or what it has overwritten.
  template <class T>
  void check_backward(const buffer<Device>& kept, const T* x, const T* dy, const T* dx, const T* addend) const {
    if (kept.empty() && rows != 0)
      fail({"the norm of ", weight->name(),
            ": backward without what forward keeps: give forward a `saved`, and backward "
            "the same one, once"});
    const std::int64_t size = rows * columns;
    require_arrays(x, "dy", dy);
    require_apart(weight->name(), "backward", {dx, size, "dx"},
                  {{x, size, "x"}, {dy, size, "dy"}, {addend, size, "addend"}});
  }

  /// Adds to the canonical sums over tokens of a parameter: add(row of x, ..., G* out) of some rows adds to out.
  template <class T, class Add>
  void add_terms(Device& device, parameter<Precision, Device>& p, std::int64_t index, std::int64_t count, const T* x,
                 const T* dy, const S* inverse, const S* mean, Add&& add) const {
    if (!p.trainable()) return;
    p.begin_terms();
    p.array()->terms()[0]->add(device, index, count, 0, [&](const token_leaves::leaf& leaf, G* out, bool) {
      buffer<Device> room[4];
      device.zero(out, static_cast<std::size_t>(columns) * sizeof(G), device.main_stream());
      with_kernel_sum<T>(device, out, columns, [&](K* sums) {
        add(rows_of_leaf(device, leaf, x, columns, room[0]), rows_of_leaf(device, leaf, dy, columns, room[1]),
            rows_of_leaf(device, leaf, inverse, 1, room[2]),
            mean ? rows_of_leaf(device, leaf, mean, 1, room[3]) : nullptr, sums, leaf.count());
      });
    });
  }

  std::int64_t rows = 0, columns = 0, columns_global = 0;
  made_for sizes;
  any_communicator* row_group = nullptr;
  layer_names names;
  parameter_ptr<Precision, Device> weight, bias;
  bool canonical = false;

  /// Where kernels add gradients in a pass that makes dx as well; null for a frozen parameter, or if they are deferred,
  /// or narrower than what kernels sum in.
  K* weight_sum(Device& device, bool now) const { return sum_of(device, *weight, now); }
  K* bias_sum(Device& device, bool now) const { return sum_of(device, *bias, now); }
  /// The gradient; null for a frozen parameter.
  G* weight_gradient(Device& device) const { return weight->trainable() ? weight->used_gradient(device) : nullptr; }
  G* bias_gradient(Device& device) const { return bias->trainable() ? bias->used_gradient(device) : nullptr; }

 private:
  static K* sum_of(Device& device, parameter<Precision, Device>& p, bool now) {
    if constexpr (in_place) {
      if (now && p.trainable()) return p.used_gradient(device);
    }
    return nullptr;
  }
};

}  // namespace detail

PLAIT_COMPILED_TEMPLATE(class detail::norm_core<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class detail::norm_core<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class detail::norm_core<double, cpu>)

}  // namespace plait

#include "plait/core/macros_on.hpp"
