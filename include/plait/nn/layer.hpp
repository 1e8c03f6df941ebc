// The concept of a layer: a class with typed input and output, a forward and a backward pass. Its calls check their
// arguments.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "plait/core/compiled.hpp"
#include "plait/core/containers.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/device.hpp"
#include "plait/device/range.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/apply.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/errors.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/layout/part.hpp"
#include "plait/layout/plan.hpp"
#include "plait/layout/spec.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/microbatch.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait {

// A program's own kernel inside a layer: a device runs it, and a counting device counts it.

/// The work of a kernel on this rank, which dry runs count and price.
struct kernel_cost {
  double bytes = 0;        ///< read and written
  double operations = 0;   ///< multiplications and additions, priced like matrix products of `of`
  dtype of = dtype::bf16;  ///< type of the operands
};

/// Calls f(), which computes on this rank's part of tensors or launches such a kernel. A dry run has no numbers, so it
/// does not call f and counts `cost`. Throws if a member of `cost` is negative or not a number.
template <compute_device Device, class F>
void kernel(const context<Device>& ctx, const kernel_cost& cost, F&& f) {
  if (!(cost.bytes >= 0 && cost.operations >= 0))
    fail({"kernel_cost: ", cost.bytes, " bytes and ", cost.operations, " operations; legal are 0 or more"});
  if constexpr (only_counts<Device>)
    ctx.device.count_kernel(cost.of, cost.operations, cost.bytes);
  else
    std::forward<F>(f)();
}

/// Calls `apply` (layout/apply.hpp) so that a dry run can plan it: the dry run counts the bytes of all arrays.
template <compute_device Device, class Rule, class Kernel, class... Outs, class... Ts, class... Ins>
void apply(const context<Device>& ctx, Rule rule, Kernel&& program, const outputs<Outs...>& out,
           const part<Ts, Ins>&... in) {
  const auto bytes_of = [](const auto&... a) {
    return (0.0 + ... + static_cast<double>(a.size() * static_cast<std::int64_t>(sizeof(*a.unchecked()))));
  };
  kernel(ctx, {.bytes = bytes_of(in...) + std::apply(bytes_of, out.parts)},
         [&] { apply(rule, std::forward<Kernel>(program), out, in...); });
}
template <compute_device Device, class Rule, class Kernel, class T, class Out, class... Ts, class... Ins>
void apply(const context<Device>& ctx, Rule rule, Kernel&& program, const part<T, Out>& out,
           const part<Ts, Ins>&... in) {
  apply(ctx, rule, std::forward<Kernel>(program), outputs<part<T, Out>>(out), in...);
}

// The errors for a class that is used as a layer but does not model `layer`: one for each missing or wrong member.

namespace detail {

// Detects whether a class has a member of a given name with any signature. A class that derives from both `L` and this
// one has an ambiguous name then.
struct named_forward {
  int forward;
};
struct named_backward {
  int backward;
};
struct named_visit {
  int visit;
};
template <class L, class Name>
struct named_twice : L, Name {};
template <class L>
concept can_derive = std::is_class_v<L> && !std::is_final_v<L>;
template <class L>
concept lacks_forward = can_derive<L> && requires { &named_twice<L, named_forward>::forward; };
template <class L>
concept lacks_backward = can_derive<L> && requires { &named_twice<L, named_backward>::backward; };
template <class L>
concept lacks_visit = can_derive<L> && requires { &named_twice<L, named_visit>::visit; };

/// Whether a class has the types that the other checks need.
template <class L>
concept names_layer_types = spec_like<typename L::input> && spec_like<typename L::output> && requires {
  typename L::value_type;
  typename L::device;
  typename L::saved;
} && compute_device<typename L::device>;

template <class L>
concept forwards =
    requires(L& l, const microbatch<typename L::device>& mb,
             const tensor<typename L::value_type, typename L::input, typename L::device>& x, typename L::saved& saved) {
      {
        l.forward(mb, x, &saved)
      } -> std::same_as<tensor<typename L::value_type, typename L::output, typename L::device>>;
    };
template <class L>
concept backwards =
    requires(L& l, const microbatch<typename L::device>& mb,
             const tensor<typename L::value_type, typename L::input, typename L::device>& x, typename L::saved& saved,
             const tensor<typename L::value_type, dual_t<typename L::output>, typename L::device>& dy) {
      {
        l.backward(mb, x, saved, dy)
      } -> std::same_as<tensor<typename L::value_type, dual_t<typename L::input>, typename L::device>>;
    };

/// A visitor of any parameter; nvcc rejects generic lambdas in concepts.
struct any_visitor {
  template <class Parameter>
  void operator()(Parameter&) const {}
};

}  // namespace detail

/// Reports every member that a class lacks to model `layer`. A combinator instantiates it if one of its classes is not
/// a layer.
template <class L>
struct layer_requirements {
  static_assert(
      requires { typename L::value_type; }, "a layer names its `value_type`, the numbers of its tensors");
  static_assert(
      requires { typename L::device; }, "a layer names its `device`, such as plait::cpu");
  static_assert(
      requires { requires spec_like<typename L::input>; }, "a layer names its `input`, a plait::spec");
  static_assert(
      requires { requires spec_like<typename L::output>; }, "a layer names its `output`, a plait::spec");
  static_assert(
      requires { requires std::is_default_constructible_v<typename L::saved>; },
      "a layer names its `saved`, what a forward pass keeps in addition to its input: a default-constructible type");
  static_assert(!detail::lacks_forward<L>,
                "a layer needs a member `forward(mb, x, saved)` that returns a tensor of its `output`");
  static_assert(!detail::lacks_backward<L>,
                "a layer needs a member `backward(mb, x, saved, dy)` that returns a tensor of dual_t<input>");
  static_assert(!detail::lacks_visit<L>, "a layer needs a member `visit(f)` that calls f with each of its parameters");
  static constexpr bool askable = detail::names_layer_types<L>;
  static constexpr bool forward_fits = [] {
    if constexpr (askable && !detail::lacks_forward<L>) return detail::forwards<L>;
    return true;
  }();
  static constexpr bool backward_fits = [] {
    if constexpr (askable && !detail::lacks_backward<L>) return detail::backwards<L>;
    return true;
  }();
  static_assert(forward_fits,
                "a layer's `forward(mb, x, saved)` takes a tensor of its `input` and returns one of its `output`");
  static_assert(backward_fits,
                "a layer's `backward(mb, x, saved, dy)` takes dy as a tensor of dual_t<output> and returns one of "
                "dual_t<input>");
};

namespace detail {

template <std::size_t Number, class... Layers>
struct nth_layer_of {
  using type = void;
};
template <std::size_t Number, class... Layers>
  requires(Number < sizeof...(Layers))
struct nth_layer_of<Number, Layers...> : std::tuple_element<Number, std::tuple<Layers...>> {};
template <std::size_t Number, class... Layers>
using nth_layer = typename nth_layer_of<Number, Layers...>::type;

/// A base of combinators that are refused. It has a layer's calls, so the program's uses of the combinator cause no
/// further errors.
template <class First, class Last>
struct refused_layer {};
template <names_layer_types First, names_layer_types Last>
struct refused_layer<First, Last> {
  using value_type = typename First::value_type;
  using device = typename First::device;
  using input = typename First::input;
  using output = typename Last::output;
  struct saved {};
  template <class... Arguments>
  tensor<value_type, output, device> forward(Arguments&&...) {
    return {};
  }
  template <class... Arguments>
  tensor<value_type, dual_t<input>, device> backward(Arguments&&...) {
    return {};
  }
  template <class F>
  void visit(F&&) {}
};

template <bool Ok, class L>
struct layer_consequence {};
template <class L>
struct layer_consequence<false, L> : layer_requirements<L> {};

/// Refuses a layer on GPUs in a file that does not include its kernels (plait/cuda.hpp).
template <class Device>
struct kernels_there {
  static_assert(has_kernels<Device>,
                "plait: the kernels of layers on GPUs are neither compiled here nor elsewhere: let nvcc compile this "
                "file, or define PLAIT_COMPILED_CUDA and link with include/plait/compiled_cuda*.cu (CMake: "
                "plait::compiled_cuda)");
  static constexpr bool checked = true;
};

}  // namespace detail

/// The types of a layer that takes a `tensor<T, Input, Device>` and returns a `tensor<T, Output, Device>`. As a base it
/// adds no data members.
template <class T, spec_like Input, spec_like Output, compute_device Device>
struct layer_types {
  static_assert(detail::kernels_there<Device>::checked);
  using value_type = T;
  using device = Device;
  using input = Input;
  using output = Output;
  template <class Spec>
  using tensor_of = tensor<T, Spec, Device>;
};

/// A program's own layer should call its kernels by `kernel(ctx, cost, f)`. A dry run then counts them. If the layer
/// touches its memory in another way, the dry run ends the program.
///
/// Combinators, language models and dry runs require these members of a layer, in addition to the types of
/// `layer_types`:
///
///     struct saved;                          // the values that `forward` keeps, in addition to its input
///     tensor_of<output> forward(mb, const tensor_of<input>& x, saved* keep);            // null: no backward pass
///     tensor_of<dual_t<input>> backward(mb, const tensor_of<input>& x, saved&, const tensor_of<dual_t<output>>& dy);
///     template <class F> void visit(F&& f);  // f(parameter) for each parameter
///
/// `mb` is a `const microbatch<Device>&`. The caller keeps a layer's input until the backward pass and its deferred
/// weight gradients are finished. A forward pass clears the values of an earlier one in its `saved`
/// (testing/layer_parity.hpp checks this). A layer does not declare the bytes that it sends, keeps and allocates;
/// `dry_run` counts them. If a class is used as a layer but lacks a member, `layer_requirements` reports it.
template <class L>
concept layer = detail::names_layer_types<L> && std::default_initializable<typename L::saved> && detail::forwards<L> &&
                detail::backwards<L> && requires(L& l) { l.visit(detail::any_visitor{}); };

/// Calls f(memory) for each tensor and buffer in a layer's `saved`, if this has a `visit(f)`.
template <class Saved, class F>
void visit_saved(Saved& kept, F&& f) {
  if constexpr (requires { kept.visit(f); }) kept.visit(f);
}

/// A layer whose forward pass can add a tensor to its output, if possible without a separate pass over memory.
template <class L>
concept adds_to_output =
    layer<L> &&
    requires(L& l, const microbatch<typename L::device>& mb,
             const tensor<typename L::value_type, typename L::input, typename L::device>& x, typename L::saved& saved,
             const tensor<typename L::value_type, typename L::output, typename L::device>& addend) {
      l.forward(mb, x, &saved, &addend);
    };

/// A layer whose backward pass can add a tensor to its input's gradient in the same way.
template <class L>
concept adds_to_gradient =
    layer<L> &&
    requires(L& l, const microbatch<typename L::device>& mb,
             const tensor<typename L::value_type, typename L::input, typename L::device>& x, typename L::saved& saved,
             const tensor<typename L::value_type, dual_t<typename L::output>, typename L::device>& dy,
             const tensor<typename L::value_type, dual_t<typename L::input>, typename L::device>& addend) {
      l.backward(mb, x, saved, dy, &addend);
    };

/// Whether a layer declares that its output is cheap to recompute (`static constexpr bool cheap = true;`), such as a
/// norm or an activation. Its output is not kept under `recompute::selective`.
template <class L>
inline constexpr bool is_cheap = [] {
  if constexpr (requires { L::cheap; })
    return bool{L::cheap};
  else
    return false;
}();

namespace detail {

/// Reports the missing members of each class that a combinator takes and that is not a layer.
template <class... Layers>
inline constexpr bool all_layers = (sizeof(layer_consequence<layer<Layers>, Layers>) + ...) > 0;

/// Refuses a gradient whose spec is not the dual spec.
template <class Given, class Expected>
struct dual_value_check {
  static constexpr verdict value = [] {
    const layout given = layout_v<Given>, expected = dual(layout_v<Expected>);
    if (const verdict v = compare_dims(operand::gradient, expected.dim_order(), given.dim_order()); !v.ok()) return v;
    for (axis_id axis : differing_axes(given, expected))
      return verdict{layout_error::wrong_dual, axis, given.sharded_by(axis), given.state_of(axis),
                     expected.state_of(axis)};
    return verdict{};
  }();
};

/// Runs `work(dy)`, which computes a weight gradient. If it is deferred, the task has its own copy of dy.
template <class T, compute_device Device, class F>
void with_gradient_kept(const microbatch<Device>& mb, const T* dy, std::int64_t count, F work) {
  if (!mb.deferred) return work(dy);
  Device& device = mb.ctx.device;
  auto copy = make_buffer<T>(device, static_cast<std::size_t>(count));
  device.copy(copy.data(), dy, copy.bytes(), device.main_stream());
  mb.on_weights([copy = std::move(copy), work]() mutable { work(copy.template data<T>()); });
}

/// Computes y = layer(x) + addend, in one pass if the layer can do it.
template <layer L, class Input, class Addend>
auto forward_plus(L& l, const microbatch<typename L::device>& mb, const Input& x, typename L::saved* keep,
                  const Addend& addend) {
  if constexpr (adds_to_output<L>) {
    return l.forward(mb, x, keep, &addend);
  } else {
    auto y = l.forward(mb, x, keep);
    kernels::accumulate(mb.ctx.device, addend.data(), y.data(), y.size());
    return y;
  }
}
/// Computes the layer's input gradient plus `addend`.
template <layer L, class Input, class Gradient, class Addend>
auto backward_plus(L& l, const microbatch<typename L::device>& mb, const Input& x, typename L::saved& kept,
                   const Gradient& dy, const Addend& addend) {
  if constexpr (adds_to_gradient<L>) {
    return l.backward(mb, x, kept, dy, &addend);
  } else {
    auto dx = l.backward(mb, x, kept, dy);
    kernels::accumulate(mb.ctx.device, addend.data(), dx.data(), dx.size());
    return dx;
  }
}

}  // namespace detail
}  // namespace plait

namespace plait::detail {

// The checks of a layer's calls: arrays, sizes, mesh, and the `saved` of a forward pass.

/// Marks the `saved` of a forward pass, so that one backward pass of the same layer and microbatch can use it once.
/// `layer` is an address that stays with the layer, such as its first parameter. `input` is the address of the input
/// that the backward pass must receive, or null.
class saved_stamp {
 public:
  void make(const void* layer, std::int64_t microbatch, const void* input) {
    overwritten_ = layer_ && !used_;
    layer_ = layer, microbatch_ = microbatch, input_ = input, used_ = false;
  }
  /// Throws unless the `saved` was made by a forward pass of this layer and microbatch, or by none, and was not used
  /// before. Throws also if several forward passes have made it since the last use, and the input differs from the last
  /// pass's.
  void use(std::string_view name, const void* layer, std::int64_t microbatch, const void* input) {
    constexpr const char* each = "; each forward pass makes one `saved`, for one backward pass of the same layer";
    if (used_) fail({name, ": this `saved` was used by a backward pass before", each});
    if (layer_ && layer_ != layer) fail({name, ": this `saved` was made by another layer", each});
    if (layer_ && microbatch_ != microbatch)
      fail({name, ": this `saved` is of microbatch ", microbatch_, ", and the backward pass of ", microbatch, each});
    if (overwritten_ && input_ != input)
      fail({name,
            ": several forward passes have made this `saved`, and the backward pass has the input of another than ",
            "the last", each});
    used_ = true;
  }

 private:
  const void* layer_ = nullptr;
  const void* input_ = nullptr;
  std::int64_t microbatch_ = 0;
  bool used_ = false, overwritten_ = false;
};

/// The name of a layer and of its ranges in profiles. Each call of a layer first uses a member. If the layer was moved
/// from, every member throws with its name.
class layer_names {
 public:
  layer_names() = default;
  explicit layer_names(std::string_view layer) : layer_(std::make_shared<const std::string>(layer)), ranges_(layer) {}
  layer_names(const layer_names&) = default;
  layer_names& operator=(const layer_names&) = default;
  layer_names(layer_names&& from) noexcept
      : layer_(from.layer_), ranges_(std::move(from.ranges_)), mark_(std::move(from.mark_)) {}
  layer_names& operator=(layer_names&& from) noexcept {
    layer_ = from.layer_;
    ranges_ = std::move(from.ranges_);
    mark_ = std::move(from.mark_);
    return *this;
  }

  const std::string& layer() const { return checked(*layer_); }
  const char* forward() const { return checked(ranges_).forward(); }
  const char* backward() const { return checked(ranges_).backward(); }
  const char* weights() const { return checked(ranges_).weights(); }
  /// Returns `part`, a member of the layer.
  template <class T>
  T& checked(T& part) const {
    if (mark_.moved()) refuse();
    return part;
  }

 private:
  [[noreturn]] void refuse() const {
    fail({layer_ ? *layer_ : "a layer", ": it was moved from, and is used; use the object that it was moved to"});
  }

  std::shared_ptr<const std::string> layer_;
  range_names ranges_;
  moved_mark mark_;
};

/// The mesh, this rank's number in it, and the global sizes of a layer's boundary dims at its construction or last
/// resize. Each call compares them with its context, because bare pointers have no sizes.
class made_for {
 public:
  made_for() = default;
  made_for(const mesh_shape& mesh, std::int64_t rank, const dim_sizes& sizes,
           std::initializer_list<const layout*> boundaries)
      : mesh_(mesh), rank_(rank) {
    for (const layout* a : boundaries) add(sizes, *a);
  }
  /// Takes the sizes of a resized layer. Throws if the mesh differs, because the layer's parameters are laid out on the
  /// old one.
  void take(std::string_view layer, const mesh_shape& mesh, std::int64_t rank, const dim_sizes& sizes,
            std::initializer_list<const layout*> boundaries) {
    if (!mesh_.axes.empty()) require_mesh(layer, mesh, rank);
    *this = made_for(mesh, rank, sizes, boundaries);
  }
  /// Adds the dims of another boundary.
  void add(const dim_sizes& sizes, const layout& a) {
    for (const dim_placement& p : a.dims) {
      if (size_of(p.dim)) continue;
      const int at = sizes.dims.find(p.dim);
      if (at >= 0) dims_.push_back({p.dim, sizes.sizes[static_cast<std::size_t>(at)], static_cast<std::size_t>(at)});
    }
  }

  /// Throws if the context of a call has another mesh or another place in it; the text has both.
  void require_mesh(std::string_view layer, const mesh_shape& mesh, std::int64_t rank) const {
    bool same = rank == rank_ && mesh.axes.size() == mesh_.axes.size();
    for (std::size_t i = 0; same && i < mesh.axes.size(); ++i)
      same = mesh.axes[i] == mesh_.axes[i] && mesh.extents[i] == mesh_.extents[i];
    if (!same) refuse_mesh(layer, mesh, rank);
  }
  /// Throws if the context of a call has other sizes or another mesh; the text has the dim and both sizes. One context
  /// keeps sizes at fixed places of its table, so the usual check is a few comparisons without a search.
  void require(std::string_view layer, const mesh_shape& mesh, std::int64_t rank, const dim_sizes& now) const {
    require_mesh(layer, mesh, rank);
    for (const made_dim& d : dims_) {
      if (d.at < now.dims.size() && now.sizes[d.at] == d.size && now.dims[d.at] == d.dim) continue;
      if (const std::int64_t other = now.of(d.dim); other != d.size) refuse(layer, d, other);
    }
  }
  /// Returns the size of a dim, or null if no boundary has the dim.
  const std::int64_t* size_of(dim_id dim) const {
    for (const made_dim& d : dims_)
      if (d.dim == dim) return &d.size;
    return nullptr;
  }

 private:
  struct made_dim {
    dim_id dim;
    std::int64_t size = 0;
    std::size_t at = 0;  ///< index in the table of sizes
  };

  [[noreturn]] static void refuse(std::string_view layer, const made_dim& d, std::int64_t now) {
    fail({layer, ": the context of this call has ", d.dim.text(), " = ", now, ", and the layer was made for ", d.size,
          ": call the layer's resize(ctx), or make the layer, with a context of these sizes"});
  }

  [[noreturn]] void refuse_mesh(std::string_view layer, const mesh_shape& mesh, std::int64_t rank) const {
    fail({layer, ": the context of this call has rank ", rank, " of the mesh ", describe(mesh),
          ", and the layer was made for rank ", rank_, " of ", describe(mesh_),
          ": make the layer with a context of this mesh"});
  }

  mesh_shape mesh_;
  std::int64_t rank_ = 0;
  static_vector<made_dim, 24> dims_;
};

/// An array of a call, as a range of bytes. A null array or one without bytes overlaps nothing.
struct named_array {
  template <class T>
  constexpr named_array(const T* begin, std::int64_t elements, const char* called)
      : at(begin), bytes(static_cast<std::size_t>(elements) * sizeof(T)), name(called) {}

  const void* at;
  std::size_t bytes;
  const char* name;
};

/// Throws if an array that `call` of `layer` reads overlaps the array that it writes.
inline void require_no_overlap(std::string_view layer, const char* call, const named_array& written,
                               std::initializer_list<named_array> read) {
  if (written.at == nullptr || written.bytes == 0) return;
  const auto begin_of = [](const named_array& a) { return reinterpret_cast<std::uintptr_t>(a.at); };
  const std::uintptr_t begin = begin_of(written), end = begin + written.bytes;
  for (const named_array& in : read) {
    const std::uintptr_t first = begin_of(in);
    if (in.at == nullptr || in.bytes == 0 || first >= end || begin >= first + in.bytes) continue;
    if (in.at == written.at)
      fail(
          {layer, ": ", call, " writes ", written.name, " while it still reads ", in.name, ", and both are one array"});
    const std::uintptr_t last = first + in.bytes < end ? first + in.bytes : end;
    fail({layer, ": ", call, " writes ", written.name, " while it still reads ", in.name, ", and they share ",
          last - (first > begin ? first : begin), " bytes"});
  }
}

/// Throws unless a tensor of a call has the number of elements that the layer was made for.
inline void require_size(std::string_view layer, const char* name, std::int64_t has, std::int64_t made_for) {
  if (has == made_for) return;
  if (has == 0)
    fail({layer, ": ", name, " has no elements, and the layer was made for ", made_for,
          " on this rank: the tensor was moved from, or never made, or views a null pointer"});
  fail({layer, ": ", name, " has ", has, " elements on this rank, and the layer was made for ", made_for,
        ": call the layer's resize(ctx), or make the layer, with a context of these sizes"});
}

/// Checks an array like `require_size`. An array without memory passes: the call leaves it out, or the layer itself
/// checks it.
template <class Part>
void require_part(std::string_view layer, const char* name, const Part& a, std::int64_t made_for) {
  if (a) require_size(layer, name, a.size(), made_for);
}

/// Returns the memory of an addend, or null without one. Throws like `require_size`.
template <class Tensor>
auto addend_array(std::string_view layer, const Tensor* addend, std::int64_t made_for) {
  if (addend) require_size(layer, "addend", addend->size(), made_for);
  return addend ? addend->data() : nullptr;
}

}  // namespace plait::detail

namespace plait {

// A layer's calls with arrays of other types. Types with equal bits are accepted; another spec, precision or kind of
// array is refused with a readable text.

/// Facts in an error: the index of a layer in a combinator, from 0, and the spec of its output or input.
template <std::size_t Number, class Layer, class Spec>
struct output_of_layer {};
template <std::size_t Number, class Layer, class Spec>
struct input_of_layer {};
/// A fact in an error: the spec of the tensor that the program gives to a layer.
template <class Spec>
struct given_tensor {};

namespace detail {

/// Checks that a layer's output has the layout of the next one's input. A mentioned invariant axis equals an
/// unmentioned one.
constexpr verdict check_fit(layout_error code, const layout& output, const layout& input) {
  if (equivalent(output, input)) return {};
  verdict v = compare_dims(operand::none, input.dim_order(), output.dim_order());
  if (!v.ok()) {
    v.code = code;
    return v;
  }
  for (axis_id axis : differing_axes(output, input)) {
    const dim_id dim = output.sharded_by(axis) ? output.sharded_by(axis) : input.sharded_by(axis);
    return {code, axis, dim, output.state_of(axis), input.state_of(axis)};
  }
  for (const dim_placement& p : output.dims)  // equal axes in another order
    if (!(p.axes == input.axes_of(p.dim))) return {code, p.axes[0], p.dim, state::varying, state::varying};
  return {code, {}, {}};
}

template <layout_error Error, class A, class B>
struct fit_value {
  static constexpr verdict value = check_fit(Error, layout_v<typename A::output>, layout_v<typename B::input>);
};

/// Refuses to compile unless the output of layer I (`A`) fits the input of layer J (`B`).
template <layout_error Error, std::size_t I, class A, std::size_t J, class B>
inline constexpr bool fits =
    sizeof(consequence<fit_value<Error, A, B>,
                       among<output_of_layer<I, A, typename A::output>, input_of_layer<J, B, typename B::input>>,
                       typename A::output, typename B::input>) > 0;

/// The verdict on a tensor's spec. Specs that are equivalent but not equal are refused too; `view_as` converts between
/// them.
template <class Given, class Layer>
struct input_value {
  static constexpr verdict value = [] {
    verdict v = check_fit(layout_error::input_does_not_fit, layout_v<Given>, layout_v<typename Layer::input>);
    v.code = layout_error::input_does_not_fit;
    return v;
  }();
};

/// Refuses a tensor whose spec differs from the input of `Layer`, which may be the first layer of a combinator.
template <class Given, class Layer>
inline constexpr bool takes =
    sizeof(consequence<input_value<Given, Layer>,
                       among<given_tensor<Given>, input_of_layer<0, Layer, typename Layer::input>>, Given,
                       typename Layer::input>) > 0;

template <std::size_t First, class... Layers>
inline constexpr bool fit_together = true;
template <std::size_t First, class A, class B, class... Rest>
inline constexpr bool fit_together<First, A, B, Rest...> =
    fits<layout_error::layers_do_not_fit, First, A, First + 1, B> && fit_together<First + 1, B, Rest...>;

template <class X>
concept any_tensor = requires {
  typename X::value_type;
  requires spec_like<typename X::spec>;
};
/// A bare pointer to numbers, or an array that decays to one.
template <class X>
concept bare_pointer = std::is_pointer_v<std::decay_t<X>> &&
                       (std::is_arithmetic_v<std::remove_cv_t<std::remove_pointer_t<std::decay_t<X>>>> ||
                        std::same_as<std::remove_cv_t<std::remove_pointer_t<std::decay_t<X>>>, bf16> ||
                        same_bits<std::remove_cv_t<std::remove_pointer_t<std::decay_t<X>>>, bf16>);
template <class X>
concept any_range = !any_tensor<X> && !bare_pointer<X> && requires(const X& x) {
  x.data();
  x.size();
  x.begin();
};

template <class X>
inline constexpr bool is_part = false;
template <class T, class Spec>
inline constexpr bool is_part<part<T, Spec>> = true;

/// Whether an argument has numbers of another type than T. The caller's token ids may have 32 or 64 bits, and labels
/// accompany numbers of T.
template <class X, class T>
concept other_numbers =
    any_tensor<X> &&
    !(is_part<X> && std::integral<typename X::value_type> &&
      std::integral<T>)&&!std::same_as<typename X::value_type, T> &&
    !same_bits<typename X::value_type, T> &&
    (std::floating_point<typename X::value_type> || std::same_as<typename X::value_type, bf16> || std::integral<T>);
template <class X, class T>
concept no_numbers = other_numbers<X, T> || any_range<X> || bare_pointer<X>;
template <class X, class Spec>
concept other_spec = any_tensor<X> && !std::same_as<typename X::spec, Spec>;
/// Whether the array for the result, the first of `More` with numbers of T, has another spec than `Spec`.
template <class T, class Spec, class... More>
inline constexpr bool other_result = false;
template <class T, class Spec, any_tensor Result, class... More>
inline constexpr bool other_result<T, Spec, Result, More...> =
    std::same_as<typename Result::value_type, T> && other_spec<Result, Spec>;
template <class X, class Layer>
concept other_saved = std::is_class_v<X> && !any_tensor<X> && !any_range<X> &&
                      requires { requires !std::same_as<X, typename Layer::saved>; };

/// The error for numbers of another type: compilers print the two types and the layer.
template <class Given, class Expected, class Layer>
struct numbers_of_one_type {
  static_assert(std::is_same_v<Given, Expected>,
                "an array has numbers of another type than the layer's: make the layer of that precision, as in "
                "linear<double, ...>, or convert the numbers");
};
template <class Array, class Layer>
struct array_of_layer {
  static_assert(!any_range<Array> && !bare_pointer<Array>,
                "a layer takes tensors, or typed pointers: give an array its spec once, as in plait::part<float, Spec> "
                "x(ctx, pointer), and pass x to layers");
};
template <class Given, class Expected, class Layer>
struct result_of_layer {
  static_assert(std::is_same_v<Given, Expected>,
                "the array for the result of a layer has another spec than the result: make the part with the layer's "
                "`output`, or, for an input's gradient, with the dual of its `input`");
};
template <class Spec, class Layer, class Result, class... More>
constexpr void refuse_result() {
  static_assert(sizeof(result_of_layer<typename Result::spec, Spec, Layer>) > 0);
}
template <class Saved, class Layer>
struct saved_of_layer {
  static_assert(std::is_same_v<Saved, typename Layer::saved>,
                "a backward pass takes the `saved` that a forward pass of the same layer has made");
};

/// The layer that an error names; for a combinator, its first layer.
template <class Layer>
struct named_layer {
  using type = Layer;
};
template <class Layer>
  requires requires { typename Layer::first_layer; }
struct named_layer<Layer> : named_layer<typename Layer::first_layer> {};

/// Reports the errors of one argument of a layer with numbers of T.
template <class Layer, class T, class X>
constexpr void refuse_array() {
  if constexpr (any_range<X> || bare_pointer<X>)
    static_assert(sizeof(array_of_layer<X, Layer>) > 0);
  else if constexpr (other_numbers<X, T>)
    static_assert(sizeof(numbers_of_one_type<typename X::value_type, T, Layer>) > 0);
}
/// Reports the errors of the first argument.
template <class Layer, class T, class Input, class X>
constexpr void refuse_input() {
  using named = typename named_layer<Layer>::type;
  refuse_array<named, T, X>();
  if constexpr (!no_numbers<X, T> && other_spec<X, Input>) static_assert(takes<typename X::spec, named>);
}

}  // namespace detail

/// A base of layers with overloads of `forward` and `backward` for wrong arguments. Their instantiation is a compile
/// error that names the reason. Layers import them by `using`.
template <class Layer, class T, spec_like Input, spec_like Output, compute_device Device, class Made = T>
class other_arrays {
 public:
  template <class X, class... More>
    requires(detail::no_numbers<X, T> || detail::other_spec<X, Input> || (detail::no_numbers<More, Made> || ...) ||
             detail::other_result<Made, Output, More...>)
  tensor<Made, Output, Device> forward(const microbatch<Device>&, const X&, const More&...) {
    detail::refuse_input<Layer, T, Input, X>();
    if constexpr (!detail::no_numbers<X, T> && !detail::other_spec<X, Input>) {
      (detail::refuse_array<Layer, Made, More>(), ...);
      if constexpr (detail::other_result<Made, Output, More...>) detail::refuse_result<Output, Layer, More...>();
    }
    return {};
  }
  template <class X, class Saved, class Gradient, class... More>
    requires(detail::no_numbers<X, T> || detail::other_spec<X, Input> || detail::other_saved<Saved, Layer> ||
             detail::no_numbers<Gradient, Made> || (detail::no_numbers<More, T> || ...) ||
             detail::other_result<T, dual_t<Input>, More...>)
  tensor<T, dual_t<Input>, Device> backward(const microbatch<Device>&, const X&, const Saved&, const Gradient&,
                                            const More&...) {
    detail::refuse_input<Layer, T, Input, X>();
    if constexpr (!detail::no_numbers<X, T> && !detail::other_spec<X, Input>) {
      if constexpr (detail::other_saved<Saved, Layer>)
        static_assert(sizeof(detail::saved_of_layer<Saved, Layer>) > 0);
      else if constexpr (detail::no_numbers<Gradient, Made>)
        detail::refuse_array<Layer, Made, Gradient>();
      else
        (detail::refuse_array<Layer, T, More>(), ...);
      if constexpr (detail::other_result<T, dual_t<Input>, More...>)
        detail::refuse_result<dual_t<Input>, Layer, More...>();
    }
    return {};
  }
  /// Backward for layers that keep nothing.
  template <class X, class Gradient>
    requires(!requires { typename Layer::saved; } &&
             (detail::no_numbers<X, T> || detail::other_spec<X, Input> || detail::no_numbers<Gradient, Made>))
  void backward(const microbatch<Device>&, const X&, const Gradient&) {
    detail::refuse_input<Layer, T, Input, X>();
    if constexpr (!detail::no_numbers<X, T> && !detail::other_spec<X, Input>)
      detail::refuse_array<Layer, Made, Gradient>();
  }
};

/// The base of a combinator.
template <class Layer, class First, class Last>
using other_arrays_between = other_arrays<Layer, typename First::value_type, typename First::input,
                                          typename Last::output, typename First::device>;

// A layer that keeps the `saved` of its forward pass, for programs with one microbatch at a time.

/// A linear or a norm that keeps the `saved` of its last forward pass, so its calls only take the program's arrays.
/// Each forward pass clears the values of the one before, and a backward pass uses them up. A backward pass throws if
/// its input is not that of the last forward pass.
template <class Layer>
class with_saved : public Layer {
  using mb = microbatch<typename Layer::device>;
  using T = typename Layer::value_type;
  template <class Spec>
  using reads = part<const T, Spec>;
  template <class Spec>
  using writes = part<T, Spec>;

 public:
  using input = typename Layer::input;
  using output = typename Layer::output;
  using Layer::Layer;
  /// Calls the layer's own `forward` on the caller's memory; `more` are its further arguments, such as an addend.
  template <class... More>
  void forward(const mb& in, const reads<input>& x, const writes<output>& y, More&&... more) {
    Layer::forward(in, x, y, &saved_, std::forward<More>(more)...);
  }
  /// `dy` is a part whose spec is the dual of the output's.
  template <class Numbers, spec_like Gradient, class... More>
  void backward(const mb& in, const reads<input>& x, const part<Numbers, Gradient>& dy, const writes<dual_t<input>>& dx,
                More&&... more) {
    Layer::backward(in, x, saved_, dy, dx, std::forward<More>(more)...);
  }
  /// Overloads for wrong arguments; the layer's own overload refuses to compile and names the reason.
  template <class X, class... More>
    requires(detail::no_numbers<X, T> || detail::other_spec<X, input> || (detail::no_numbers<More, T> || ...) ||
             detail::other_result<T, output, More...>)
  void forward(const mb& in, const X& x, const More&... more) {
    Layer::forward(in, x, more...);
  }
  template <class X, class Gradient, class... More>
    requires(detail::no_numbers<X, T> || detail::other_spec<X, input> || detail::no_numbers<Gradient, T> ||
             (detail::no_numbers<More, T> || ...) || detail::other_result<T, dual_t<input>, More...>)
  void backward(const mb& in, const X& x, const Gradient& dy, const More&... more) {
    Layer::backward(in, x, saved_, dy, more...);
  }
  /// Resizes the layer and clears its `saved`.
  void resize(const context<typename Layer::device>& ctx) {
    Layer::resize(ctx);
    saved_ = {};
  }

 private:
  typename Layer::saved saved_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
