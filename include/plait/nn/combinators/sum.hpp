// A redistribution as a layer, and the sum of branches that share one gather and one reduction. The sum x + f(x) is not
// here: nn/combinators/residual.hpp.
#pragma once

#include <cstddef>
#include <string>
#include <tuple>
#include <utility>

#include "plait/core/macros_off.hpp"
#include "plait/layout/errors.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/layer/apart.hpp"
#include "plait/nn/layer/made_for.hpp"
#include "plait/nn/layer/names.hpp"
#include "plait/nn/layer/other_arrays.hpp"
#include "plait/tensor/redistribute.hpp"

namespace plait {

/// Brings a tensor from one spec to another of the same dims: a `redistribute` as a layer, with its adjoint.
template <class T, spec_like From, spec_like To, compute_device Device = cpu>
class redistribution : public layer_types<T, From, To, Device>,
                       public other_arrays<redistribution<T, From, To, Device>, T, From, To, Device> {
  static_assert(enforced<detail::redistribution_value<From, To>, among<From, To>, From, To>);

 public:
  using other_arrays<redistribution, T, From, To, Device>::forward;
  using other_arrays<redistribution, T, From, To, Device>::backward;
  struct saved {};

  explicit redistribution(const context<Device>& ctx, const std::string& name = "redistribution")
      : names_(name),
        made_for_(ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes, {&layout_v<From>, &layout_v<To>}),
        there_(layout_v<From>, layout_v<To>, ctx.ranks, ctx.sizes, name),
        back_(there_.backward(), ctx.ranks, ctx.sizes, "gradient of " + name) {
    enforce(check_boundary(layout_v<From>, ctx.ranks.shape()), name + ": input");
    enforce(check_boundary(layout_v<To>, ctx.ranks.shape()), name + ": output");
    detail::require_no_sum(ctx, there_, name);
    detail::require_no_sum(ctx, back_, "gradient of " + name);
  }
  tensor<T, To, Device> forward(const microbatch<Device>& mb, const tensor<T, From, Device>& x, saved* = nullptr) {
    made_for_.require(names_.layer(), mb.ctx.ranks.shape(), mb.ctx.ranks.rank(), mb.ctx.sizes);
    detail::require_size(names_.layer(), "x", x.size(), input_size());
    tensor<T, To, Device> y(mb.ctx);
    there_.run(mb.ctx.device, x.data(), y.data(), dtype_of<T>);
    return y;
  }
  template <spec_like Gradient>
  tensor<T, dual_t<From>, Device> backward(const microbatch<Device>& mb, const tensor<T, From, Device>&, saved&,
                                           const tensor<T, Gradient, Device>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, To>, among<From, To>, Gradient, To>);
    made_for_.require(names_.layer(), mb.ctx.ranks.shape(), mb.ctx.ranks.rank(), mb.ctx.sizes);
    detail::require_size(names_.layer(), "dy", dy.size(), back_.source().local_size());
    tensor<T, dual_t<From>, Device> dx(mb.ctx);
    back_.run(mb.ctx.device, dy.data(), dx.data(), dtype_of<T>);
    return dx;
  }
  template <class F>
  void visit(F&&) {}
  /// Local elements.
  std::int64_t input_size() const { return there_.source().local_size(); }
  /// Whether no data moves.
  bool trivial() const { return there_.trivial() && back_.trivial(); }

 private:
  detail::layer_names names_;
  detail::made_for made_for_;
  executor there_, back_;
};

/// The sum of branches that share their input, as the parallel block of PaLM (Chowdhery et al. 2022) or a low-rank
/// adapter beside its linear: the input is brought from `Input` to what all branches take once, their outputs, which
/// may be partial, are added and brought to `Output` once; so are, going back, their gradients.
template <spec_like Input, spec_like Output, class First, class... Rest>
class sum : public detail::refused_layer<First, First> {
  static_assert(detail::all_layers<First, Rest...>);

 public:
  template <class Device>
  sum(const context<Device>&, const std::string&, First, Rest...) {}
};

template <spec_like Input, spec_like Output, layer First, layer... Rest>
class sum<Input, Output, First, Rest...>
    : public other_arrays<sum<Input, Output, First, Rest...>, typename First::value_type, Input, Output,
                          typename First::device> {
  using arrays = other_arrays<sum, typename First::value_type, Input, Output, typename First::device>;

 public:
  using arrays::backward;
  using arrays::forward;
  using value_type = typename First::value_type;
  using device = typename First::device;
  using input = Input;
  using output = Output;
  using shared = typename First::input;
  using pending = typename First::output;
  static_assert((equivalent(layout_v<typename Rest::input>, layout_v<shared>) && ...),
                "the branches of a sum take one input: let their policies name the same input spec");
  static_assert((equivalent(layout_v<typename Rest::output>, layout_v<pending>) && ...),
                "the branches of a sum end alike: let their policies name the same output spec");
  template <class Spec>
  using tensor_of = tensor<value_type, Spec, device>;

  struct saved {
    tensor_of<shared> gathered;  ///< empty if it is the input itself, or made again
    std::tuple<typename First::saved, typename Rest::saved...> branches;
  };

  sum(const context<device>& ctx, const std::string& name, First first, Rest... rest)
      : gather_(ctx, "input of " + name),
        resolve_(ctx, "output of " + name),
        branches_(std::move(first), std::move(rest)...) {}

  tensor_of<output> forward(const microbatch<device>& mb, const tensor_of<input>& x, saved* keep = nullptr) {
    if (keep) *keep = {};  // of an earlier pass
    tensor_of<shared> gathered = gather(mb, x);
    tensor_of<pending> y = add_up(mb, gathered, keep, std::index_sequence_for<Rest...>{});
    if (keep && !gather_.trivial() && mb.policy == recompute::none) keep->gathered = std::move(gathered);
    if constexpr (resolved)
      return std::move(y).template as<output>();
    else
      return resolve_.forward(mb, y);
  }
  template <spec_like Gradient>
  tensor_of<dual_t<input>> backward(const microbatch<device>& mb, const tensor_of<input>& x, saved& kept,
                                    const tensor_of<Gradient>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, among<input, output>, Gradient, output>);
    const tensor_of<dual_t<pending>> dpending = unresolve(mb, dy);
    if (!kept.gathered) kept.gathered = gather(mb, x);
    tensor_of<dual_t<shared>> dshared = back(mb, kept, dpending, std::index_sequence_for<Rest...>{});
    if constexpr (taken) {
      return std::move(dshared).template as<dual_t<input>>();
    } else {
      typename redistribution<value_type, input, shared, device>::saved nothing;
      return gather_.backward(mb, x, nothing, dshared);
    }
  }
  template <class F>
  void visit(F&& f) {
    std::apply([&](auto&... b) { (b.visit(f), ...); }, branches_);
  }
  template <std::size_t I>
  auto& get() {
    return std::get<I>(branches_);
  }

 private:
  /// Whether the branches take the input as it is, and their sum is the output as it is: then nothing is copied.
  static constexpr bool taken = equivalent(layout_v<input>, layout_v<shared>);
  static constexpr bool resolved = equivalent(layout_v<pending>, layout_v<output>);

  /// Returns dy as the branches take it: a view of it where nothing moves.
  template <spec_like Gradient>
  tensor_of<dual_t<pending>> unresolve(const microbatch<device>& mb, const tensor_of<Gradient>& dy) {
    if constexpr (resolved) {
      return tensor_of<dual_t<pending>>(mb.ctx, const_cast<value_type*>(dy.data()));
    } else {
      typename redistribution<value_type, pending, output, device>::saved none;
      const tensor_of<pending> no_output;
      return resolve_.backward(mb, no_output, none, dy);
    }
  }
  /// Returns x as the branches take it: a view of it where nothing moves.
  tensor_of<shared> gather(const microbatch<device>& mb, const tensor_of<input>& x) {
    if (gather_.trivial()) return tensor_of<shared>(mb.ctx, const_cast<value_type*>(x.data()));
    return gather_.forward(mb, x);
  }
  template <std::size_t... Is>
  tensor_of<pending> add_up(const microbatch<device>& mb, const tensor_of<shared>& x, saved* keep,
                            std::index_sequence<Is...>) {
    tensor_of<pending> y = std::get<0>(branches_).forward(mb, x, keep ? &std::get<0>(keep->branches) : nullptr);
    ((y = one_more<Is + 1>(mb, x, keep, y)), ...);
    return y;
  }
  template <std::size_t I>
  tensor_of<pending> one_more(const microbatch<device>& mb, const tensor_of<shared>& x, saved* keep,
                              const tensor_of<pending>& before) {
    using branch = std::tuple_element_t<I, std::tuple<First, Rest...>>;
    return detail::forward_plus(std::get<I>(branches_), mb, x.template view_as<typename branch::input>(),
                                keep ? &std::get<I>(keep->branches) : nullptr,
                                before.template view_as<typename branch::output>())
        .template as<pending>();
  }
  template <class Gradient, std::size_t... Is>
  tensor_of<dual_t<shared>> back(const microbatch<device>& mb, saved& kept, const Gradient& dy,
                                 std::index_sequence<Is...>) {
    tensor_of<dual_t<shared>> dx = std::get<0>(branches_).backward(mb, kept.gathered, std::get<0>(kept.branches), dy);
    ((dx = one_more_back<Is + 1>(mb, kept, dy, dx)), ...);
    return dx;
  }
  template <std::size_t I, class Gradient>
  tensor_of<dual_t<shared>> one_more_back(const microbatch<device>& mb, saved& kept, const Gradient& dy,
                                          const tensor_of<dual_t<shared>>& before) {
    using branch = std::tuple_element_t<I, std::tuple<First, Rest...>>;
    return detail::backward_plus(std::get<I>(branches_), mb, kept.gathered.template view_as<typename branch::input>(),
                                 std::get<I>(kept.branches), dy.template view_as<dual_t<typename branch::output>>(),
                                 before.template view_as<dual_t<typename branch::input>>())
        .template as<dual_t<shared>>();
  }

  redistribution<value_type, input, shared, device> gather_;
  redistribution<value_type, pending, output, device> resolve_;
  std::tuple<First, Rest...> branches_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
