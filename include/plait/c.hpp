// The functions that the macros of plait/c.h call.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/deadline.hpp"
#include "plait/comm/threads.hpp"
#include "plait/comm/typed.hpp"
#include "plait/comm/world.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/tag.hpp"
#include "plait/core/text.hpp"
#include "plait/device/cpu.hpp"
#include "plait/layout/apply.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/layout/part.hpp"
#include "plait/layout/plan.hpp"
#include "plait/layout/rules.hpp"
#include "plait/layout/spec.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/linear/policy.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/tensor/check_values.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait::c {

/// A layer that a context owns.
class any_layer {
 public:
  virtual ~any_layer() = default;
  virtual void begin_step(const context<cpu>& here) = 0;
  virtual void reduce(const context<cpu>& here) = 0;
};

}  // namespace plait::c

/// One rank of a C program, which holds a pointer to it.
struct plait_context {
  explicit plait_context(plait::any_communicator all) : ranks(std::move(all)) {}

  const char* text() const { return text_.c_str(); }
  /// Returns the context of layers. Throws before the program has given the mesh and the sizes.
  const plait::context<plait::cpu>& here() const {
    if (!here_) plait::fail("the context has no mesh yet: call the function of PLAIT_C_SIZES first");
    return *here_;
  }
  void begin(const plait::mesh_shape& mesh, const plait::dim_sizes& sizes) {
    if (here_) plait::fail("the context has a mesh already");
    world_.emplace(mesh, ranks);
    for (const plait::axis_id axis : mesh.axes)  // collective over the mesh; a message may involve only a few ranks
      if (mesh.extent(axis) > 1) world_->group(plait::axis_list(axis));
    here_.emplace(plait::context<plait::cpu>{device_, *world_, sizes});
  }
  /// Calls `f` and returns 0. If `f` throws, keeps the exception's text after the name of the function, and returns 1.
  /// After an earlier error it does nothing and returns 1.
  template <class F>
  int call(const char* name, F&& f) noexcept {
    if (!text_.empty()) return 1;
    try {
      f();
      return 0;
    } catch (...) {
      text_ = plait::cat({name, ": ", plait::detail::exception_text()});
      return 1;
    }
  }

  plait::any_communicator ranks;
  std::vector<std::unique_ptr<plait::c::any_layer>> layers;

 private:
  plait::cpu device_;
  std::optional<plait::world> world_;
  std::optional<plait::context<plait::cpu>> here_;
  std::string text_;
};

namespace plait::c {

/// The element type and the spec of one of the program's array structs.
template <class Array>
struct array;
template <class T, spec_like Spec>
struct array_of {
  using element = T;
  using spec = Spec;
};
template <class Array>
using spec_of = typename array<Array>::spec;
template <class Array>
using element_of = typename array<Array>::element;
template <class Array>
using part_type = part<element_of<Array>, spec_of<Array>>;

/// Calls `f` on a context that is not null.
template <class F>
int call(plait_context* c, const char* name, F&& f) noexcept {
  return c == nullptr ? 1 : c->call(name, std::forward<F>(f));
}
/// Returns what `f` makes, or `otherwise` after an error.
template <class Result, class F>
Result make(plait_context* c, const char* name, Result otherwise, F&& f) noexcept {
  call(c, name, [&] { otherwise = f(); });
  return otherwise;
}

/// Returns an array of the program as a typed pointer. Throws if the pointer is null or the size is not this rank's.
template <class Array>
part_type<Array> part_from(plait_context& c, const Array& from) {
  const std::int64_t size = part_of<spec_of<Array>>(c.here()).local_size();
  if (from.data == nullptr && size > 0) fail({"the array ", array<Array>::text, " has no memory: its pointer is null"});
  if (from.size != size)
    fail({"the array ", array<Array>::text, " has ", from.size, " elements, and this rank's part has ", size,
          "; make it by ", array<Array>::text, "_of on this context"});
  return part_type<Array>(c.here(), from.data);
}
template <class Array>
Array to_c(const part_type<Array>& from) {
  return {from.unchecked(), from.size()};
}

template <class Sizes, class... Axes, class... Dims>
int begin_with(plait_context* c, const char* name, const Sizes& given, type_list<Axes...>, type_list<Dims...>) {
  return call(c, name, [&] {
    const auto numbers = std::bit_cast<std::array<std::int64_t, sizeof...(Axes) + sizeof...(Dims)>>(given);
    std::size_t next = 0;
    const auto take = [&] { return numbers[next++]; };
    const mesh<axis<Axes>...> ranks{(static_cast<void>(axis_of<Axes>), take())...};
    dim_sizes sizes;
    (sizes.set(dim_of<Dims>, take()), ...);
    c->begin(ranks.shape(), sizes);
  });
}
template <class Axes, class Dims, class Sizes>
int begin(plait_context* c, const char* name, const Sizes& sizes) {
  return begin_with(c, name, sizes, Axes{}, Dims{});
}

template <class Array>
std::int64_t size_of(plait_context* c, const char* name) {
  return make(c, name, std::int64_t{0}, [&] { return part_of<spec_of<Array>>(c->here()).local_size(); });
}
template <class Array>
Array give_type(plait_context* c, const char* name, element_of<Array>* data) {
  return make(c, name, Array{data, 0}, [&] { return to_c<Array>({c->here(), data}); });
}
template <class Array>
int take(plait_context* c, const char* name, const element_of<Array>* whole, const Array& to) {
  return call(c, name, [&] { take_part(c->here().device, whole, part_from(*c, to)); });
}

template <class To, axis_like... Axes, class From>
To all_reduce(plait_context* c, const char* name, const From& in) {
  return make(c, name, To{in.data, 0}, [&] {
    return to_c<To>(group_over<Axes...>(c->here().ranks).template all_reduce<spec_of<To>>(part_from(*c, in)));
  });
}
template <class To, axis_like... Axes, class From>
To all_gather(plait_context* c, const char* name, const From& in, element_of<To>* memory) {
  return make(c, name, To{memory, 0}, [&] {
    return to_c<To>(
        group_over<Axes...>(c->here().ranks).all_gather(part_from(*c, in), part_type<To>(c->here(), memory)));
  });
}
template <class To, axis_like... Axes, class From>
To reduce_scatter(plait_context* c, const char* name, const From& in, element_of<To>* memory) {
  return make(c, name, To{memory, 0}, [&] {
    const part_type<To> out(c->here(), memory);
    return to_c<To>(group_over<Axes...>(c->here().ranks).reduce_scatter(part_from(*c, in), out));
  });
}
template <axis_like... Axes, class Array>
int send(plait_context* c, const char* name, const Array& x, int peer, int tag) {
  return call(c, name, [&] { group_over<Axes...>(c->here().ranks).send(part_from(*c, x), peer, tag); });
}
template <axis_like... Axes, class Array>
int receive(plait_context* c, const char* name, const Array& x, int peer, int tag) {
  return call(c, name, [&] { group_over<Axes...>(c->here().ranks).receive(part_from(*c, x), peer, tag); });
}
template <axis_like... Axes, class Array>
int broadcast(plait_context* c, const char* name, const Array& x, int root) {
  return call(c, name, [&] { group_over<Axes...>(c->here().ranks).broadcast(part_from(*c, x), root); });
}

/// Whether a plan sends and changes no data.
constexpr bool only_relabels(const plan& way) {
  for (const redistribution_step& step : way.steps)
    if (step.kind != transition_kind::relabel) return false;
  return true;
}
template <class To, class From>
To relabel(plait_context* c, const char* name, const From& in) {
  using way = plait::detail::plan_between<spec_of<From>, spec_of<To>>;
  static_assert(enforced<way, among<spec_of<From>, spec_of<To>>, spec_of<From>, spec_of<To>>);
  static_assert(only_relabels(way::steps), "PLAIT_C_RELABEL is for specs between which no data moves or changes");
  return make(c, name, To{in.data, 0},
              [&] { return to_c<To>(plait::detail::part_access::with_spec<spec_of<To>>(part_from(*c, in))); });
}

template <class Array>
concept array_like = requires { typename spec_of<Array>; };

/// Refuses to compile unless the arrays of a kernel satisfy the rule. The output is the first array.
template <class Rule, class Out, class... Ins>
constexpr bool arrays_follow(type_list<Out, Ins...>) {
  constexpr bool countable = plait::detail::takes_operands<Rule, sizeof...(Ins)>;
  static_assert(countable,
                "a kernel has an output and one to four operands: a contraction two, a reduction one, rows_of a table "
                "and ids");
  if constexpr (countable) static_assert(plait::detail::follows<Rule, part_type<Out>, part_type<Ins>...>);
  return true;
}
template <class... Arrays>
constexpr type_list<Arrays...> arrays_among(type_list<Arrays...> found, type_list<>) {
  return found;
}
template <class... Arrays, class Next, class... Rest>
constexpr auto arrays_among(type_list<Arrays...>, type_list<Next, Rest...>) {
  using found = std::conditional_t<array_like<Next>, type_list<Arrays..., Next>, type_list<Arrays...>>;
  return arrays_among(found{}, type_list<Rest...>{});
}
/// Does so for a kernel with these parameters; those that are not arrays are ignored.
template <class Rule, class... Parameters>
constexpr bool follows_rule(Rule, void (*)(Parameters...)) {
  return arrays_follow<Rule>(arrays_among(type_list<>{}, type_list<Parameters...>{}));
}

/// Whether a spec has this layout. An axis that a layout leaves out counts as invariant.
template <class Spec>
constexpr bool lies_as(const layout& other) {
  return layout_v<Spec>.dim_order() == other.dim_order() && differing_axes(layout_v<Spec>, other).empty();
}

/// A linear layer whose policy uses the program's arrays.
template <class Input, class Output, class Weight, class... Bias>
class layer : public any_layer {
  struct policy : layer_policy<spec_of<Input>, spec_of<Weight>, spec_of<Output>> {
    static constexpr bool bias = sizeof...(Bias) > 0;
  };
  using linear_type = linear<element_of<Input>, policy>;

 public:
  using numbers = element_of<Input>;
  layer(const context<cpu>& here, const std::string& name, const parameter_memory<numbers>& memory)
      : linear_(here, name, {.memory = memory}) {}

  /// Refuses to compile if a gradient or the bias has another spec than the program's array for it.
  static constexpr bool arrays_fit() {
    constexpr bool self_dual = std::is_same_v<spec_of<Input>, dual_t<spec_of<Input>>> &&
                               std::is_same_v<spec_of<Output>, dual_t<spec_of<Output>>>;
    static_assert(self_dual,
                  "the input and the output of a layer of a C program are sharded or invariant on each axis, so that a "
                  "gradient has its array's spec");
    constexpr bool bias_fits = (lies_as<spec_of<Bias>>(linear_type::derivation.branches[0].bias_placed) && ...);
    static_assert(
        bias_fits,
        "the bias array has another spec than the layer's bias, which is sharded as the output along its dims");
    return true;
  }

  void begin_step(const context<cpu>& here) override {
    linear_.visit([&](auto& p) { p.gather(here), p.zero_gradient(here); });
  }
  void reduce(const context<cpu>& here) override {
    linear_.visit([&](auto& p) { static_cast<void>(p.reduce(here)); });
  }
  with_saved<linear_type>& passes() { return linear_; }

 private:
  with_saved<linear_type> linear_;
};

/// Calls `f` with the linear of `layer`, which must not be null.
template <class Layer, class F>
int call_layer(plait_context* c, const char* name, Layer* layer, F&& f) {
  return call(c, name, [&] {
    if (layer == nullptr) fail("the layer is null");
    f(layer->passes());
  });
}
template <class Layer>
Layer* add_layer(plait_context& c, const char* name, const parameter_memory<typename Layer::numbers>& memory) {
  static_assert(Layer::arrays_fit());
  auto made = std::make_unique<Layer>(c.here(), cat({name, ".", c.layers.size()}), memory);
  Layer* const out = made.get();
  c.layers.push_back(std::move(made));
  return out;
}
template <class Layer, class Weight>
Layer* make_layer(plait_context* c, const char* name, const Weight& w, element_of<Weight>* dw) {
  return make(c, name, static_cast<Layer*>(nullptr), [&] {
    return add_layer<Layer>(*c, Layer::text, {part_from(*c, w).unchecked(), dw});
  });
}
template <class Layer, class Weight, class Bias>
Layer* make_layer(plait_context* c, const char* name, const Weight& w, element_of<Weight>* dw, const Bias& b,
                  element_of<Bias>* db) {
  return make(c, name, static_cast<Layer*>(nullptr), [&] {
    return add_layer<Layer>(*c, Layer::text, {part_from(*c, w).unchecked(), dw, part_from(*c, b).unchecked(), db});
  });
}
template <class Input, class Output, class Layer>
int forward(plait_context* c, const char* name, Layer* layer, const Input& x, const Output& y) {
  return call_layer(c, name, layer, [&](auto& l) { l.forward(c->here(), part_from(*c, x), part_from(*c, y)); });
}
template <class Input, class Output, class Layer>
int backward(plait_context* c, const char* name, Layer* layer, const Input& x, const Output& dy, const Input& dx) {
  return call_layer(c, name, layer, [&](auto& l) {
    const part_type<Input> to = dx.data == nullptr && dx.size == 0 ? part_type<Input>() : part_from(*c, dx);
    l.backward(c->here(), part_from(*c, x), part_from(*c, dy).dual(), to.dual());
  });
}

inline int begin_step(plait_context* c) {
  return call(c, "plait_begin_step", [&] {
    plait::detail::begin_checked_step(c->here());
    for (const auto& layer : c->layers) layer->begin_step(c->here());
  });
}
inline int reduce_gradients(plait_context* c) {
  return call(c, "plait_reduce_gradients", [&] {
    for (const auto& layer : c->layers) layer->reduce(c->here());
  });
}

/// Runs the body of a C program as one rank. Throws after an error, or if the body returns a nonzero number.
inline void run_rank(const any_communicator& ranks, int (*body)(plait_context*, void*), void* user) {
  plait_context c(ranks);
  const int code = body(&c, user);
  if (const std::string text = c.text(); !text.empty()) fail(text);
  if (code != 0) fail({"the program's function returned ", code});
}
/// Calls `f` and returns 0, or writes the text of its exception and returns 1.
template <class F>
int explain(char* text, std::size_t size, F&& f) noexcept {
  try {
    f();
    return 0;
  } catch (...) {
    if (text != nullptr) std::snprintf(text, size, "%s", plait::detail::exception_text().c_str());
    return 1;
  }
}
inline int run_threads(int ranks, int (*body)(plait_context*, void*), void* user, char* text, std::size_t size) {
  return explain(text, size, [&] { threads::run(ranks, [&](auto all) { run_rank(all, body, user); }); });
}

}  // namespace plait::c

#include "plait/core/macros_on.hpp"
