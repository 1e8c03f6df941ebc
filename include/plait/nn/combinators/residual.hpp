// A residual branch that begins with a norm, as a layer. A norm behind the sum is not this:
// examples/encoder_decoder.hpp has one.
#pragma once

#include <utility>

#include "plait/layout/errors.hpp"
#include "plait/nn/combinators/sequential.hpp"
#include "plait/nn/dropout.hpp"
#include "plait/nn/layer/open_sum.hpp"

namespace plait {

/// y = x + dropout(layer(norm(x))): the residual branch of a transformer. Where no product of the layer adds x, the sum
/// is left open for what comes next, and its norm adds in the pass in which it reads.
template <class Norm, class Layer>
class residual : public detail::refused_layer<Norm, Norm> {
  static_assert(detail::all_layers<Norm, Layer>);

 public:
  template <class... Dropout>
  residual(Norm, Layer, const Dropout&...) {}
};

template <layer Norm, layer Layer>
class residual<Norm, Layer> : public other_arrays_between<residual<Norm, Layer>, Norm, Norm> {
  using arrays = other_arrays_between<residual, Norm, Norm>;

 public:
  using arrays::backward;
  using arrays::forward;
  using first_layer = Norm;
  using value_type = typename Norm::value_type;
  using device = typename Norm::device;
  using input = typename Norm::input;
  using output = input;
  static_assert(detail::fits<layout_error::branch_ends_elsewhere, 0, Norm, 1, Layer>);
  static_assert(detail::fits<layout_error::branch_ends_elsewhere, 1, Layer, 0, Norm>);
  template <class Spec>
  using tensor_of = tensor<value_type, Spec, device>;
  using stream_sum = open_sum<value_type, output, device>;

  struct saved {
    typename Norm::saved norm;
    tensor_of<input> normalized;  ///< empty if it is made again
    typename Layer::saved inner;
  };

  residual(Norm norm, Layer inner, dropout<value_type, input, device> drop = {0.0, ""})
      : norm_(std::move(norm)), inner_(std::move(inner)), drop_(drop) {}

  tensor_of<output> forward(const microbatch<device>& mb, const tensor_of<input>& x, saved* keep = nullptr) {
    stream_sum in = detail::closed_view(mb, x);
    return forward(mb, in, keep).take(mb.ctx.device);
  }
  /// This takes a sum and leaves one. It closes x, whose memory must live until y is closed.
  stream_sum forward(const microbatch<device>& mb, stream_sum& x, saved* keep = nullptr) {
    if (keep) *keep = {};  // of an earlier pass
    tensor_of<input> normalized = normalize(mb, x, keep ? &keep->norm : nullptr);
    const tensor_of<input>& stream = x.close(mb.ctx.device);
    const auto in = normalized.template view_as<typename Layer::input>();
    auto* const kept = keep ? &keep->inner : nullptr;
    const bool in_product = !drop_.drops(mb) && detail::adds_in_product(inner_);
    tensor_of<output> y =
        (in_product ? detail::forward_plus(inner_, mb, in, kept, stream.template view_as<typename Layer::output>())
                    : inner_.forward(mb, in, kept))
            .template as<output>();
    drop_.forward(mb, y);
    if (keep && mb.policy == recompute::none) keep->normalized = std::move(normalized);
    if (in_product) return stream_sum(std::move(y));
    return stream_sum(std::move(y), tensor_of<output>(mb.ctx, const_cast<value_type*>(stream.data())));
  }

  template <spec_like Gradient>
  tensor_of<dual_t<input>> backward(const microbatch<device>& mb, const tensor_of<input>& x, saved& kept,
                                    const tensor_of<Gradient>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, among<input>, Gradient, output>);
    if (!kept.normalized) kept.normalized = norm_.forward(mb, x, nullptr);
    const tensor_of<dual_t<output>>* into_branch = &dy;
    tensor_of<dual_t<output>> dropped;
    if (drop_.drops(mb)) {
      device& d = mb.ctx.device;
      dropped = tensor_of<dual_t<output>>(mb.ctx);
      d.copy(dropped.data(), dy.data(), static_cast<std::size_t>(dy.size()) * sizeof(value_type), d.main_stream());
      drop_.backward(mb, dropped);
      into_branch = &dropped;
    }
    auto dnormalized = inner_.backward(mb, kept.normalized.template view_as<typename Layer::input>(), kept.inner,
                                       into_branch->template view_as<dual_t<typename Layer::output>>());
    return detail::backward_plus(norm_, mb, x, kept.norm, dnormalized.template view_as<dual_t<typename Norm::output>>(),
                                 dy);
  }

  template <class F>
  void visit(F&& f) {
    norm_.visit(f);
    inner_.visit(f);
  }
  Norm& norm() { return norm_; }
  Layer& inner() { return inner_; }

 private:
  tensor_of<input> normalize(const microbatch<device>& mb, stream_sum& x, typename Norm::saved* keep) {
    if constexpr (closes_sums<Norm>)
      return norm_.forward(mb, x, keep);
    else
      return norm_.forward(mb, x.close(mb.ctx.device), keep);
  }

  Norm norm_;
  Layer inner_;
  dropout<value_type, input, device> drop_;
};

}  // namespace plait
