// The concept of a model, whole or one pipeline stage, from token ids to a summed loss.
#pragma once

#include <concepts>
#include <cstdint>
#include <utility>

#include "plait/nn/layer.hpp"
#include "plait/nn/loss.hpp"
#include "plait/parallel/placement.hpp"

namespace plait {

/// A model that a pipeline runs: one stage from token ids to a summed loss, or the whole model with one stage.
/// `language_model` models this concept. A program's own model has
///
///     types       precision_type; device; tokens (a tensor of ids, and of labels); activation (the message between
///                 stages) and gradient (the gradient of an activation); logits; saved (the values that a forward
///                 pass keeps); mean (the `token_mean` of its loss)
///     part()      the layers that this stage has
///     forward_layers(mb, ids, x, saved*) -> activation      x is empty in the first stage, which takes the ids
///     backward_layers(mb, ids, saved&, dy) -> gradient      empty result in the first stage
///     forward_loss(mb, x, labels, saved*) -> summed loss    in the last stage, like the next two
///     backward_loss(mb, labels, saved&, seed) -> gradient
///     forward_scores(mb, x) -> logits
///     visit(f)    calls f(parameter) once for each parameter
///     ignore_index(), documents(), dropout()
///     order()     the `sequence_order` of its tokens; not needed if they are never in zigzag order
///
/// A model that computes its loss in chunks of tokens has `loss_in_backward()`. If this returns true, a training step
/// calls `keep_for_loss(mb, x, saved&)` instead of forward_loss. It then passes a pointer to the loss to backward_loss.
///
/// A parameter that the first and the last stage share must be marked (`parameter_info::tied_across_stages`).
///
/// A model may divide its parameters into several units, so that data parallelism communicates one unit while others
/// are in use. It then also has `units()`, their number, and `visit_unit(i, f)`. Its passes call `mb.enter(i)` before
/// they use unit i: forward in the order 0, 1, ..., backward in reverse. Otherwise a stage is one unit.
///
/// A model whose activations can be offloaded has `visit_kept(i, saved&, f)`. It calls f for tensors and buffers that
/// passes of unit i keep. Passes of other units must not read them, except the forward pass of the next unit. Values
/// that it does not visit stay on the device.
template <class M>
concept model = requires(M& m, const M& c, const microbatch<typename M::device>& mb, const typename M::tokens& ids,
                         typename M::activation x, typename M::gradient dy, typename M::saved& kept,
                         const typename M::mean::seed_type& seed) {
  typename M::precision_type;
  typename M::logits;
  { c.part() } -> std::convertible_to<stage_layers>;
  { m.forward_layers(mb, ids, std::move(x), &kept) } -> std::same_as<typename M::activation>;
  { m.backward_layers(mb, ids, kept, std::move(dy)) } -> std::same_as<typename M::gradient>;
  m.forward_loss(mb, std::move(x), ids, &kept);
  { m.backward_loss(mb, ids, kept, seed) } -> std::same_as<typename M::gradient>;
  { m.forward_scores(mb, std::move(x)) } -> std::same_as<typename M::logits>;
  m.visit(detail::any_visitor{});
  { c.ignore_index() } -> std::convertible_to<std::int64_t>;
  { c.documents() } -> std::convertible_to<bool>;
  { c.dropout() } -> std::convertible_to<double>;
};

/// Whether a stage divides its parameters into announced units (see `model`).
template <class M>
concept announces_units = requires(M& m) {
  { m.units() } -> std::convertible_to<int>;
  m.visit_unit(0, detail::any_visitor{});
};

/// Whether a stage's kept values can be offloaded (see `model`).
template <class M>
concept gives_kept = requires(M& m, typename M::saved& kept) { m.visit_kept(0, kept, detail::any_visitor{}); };

namespace detail {

template <class M>
concept may_make_loss_in_backward = requires(const M& m) { m.loss_in_backward(); };

/// The forward pass of a training step from the last stage's layers to the loss. `take(sum)` receives the loss, in this
/// call or in the backward pass.
template <class M, class Take>
void forward_loss_of_step(M& m, const microbatch<typename M::device>& mb, typename M::activation x,
                          const typename M::tokens& labels, typename M::saved& kept, Take&& take) {
  if constexpr (may_make_loss_in_backward<M>)
    if (m.loss_in_backward()) return m.keep_for_loss(mb, std::move(x), kept);
  take(m.forward_loss(mb, std::move(x), labels, &kept));
}
/// The backward pass of `forward_loss_of_step`.
template <class M, class Take>
typename M::gradient backward_loss_of_step(M& m, const microbatch<typename M::device>& mb,
                                           const typename M::tokens& labels, typename M::saved& kept,
                                           const typename M::mean::seed_type& seed, Take&& take) {
  if constexpr (may_make_loss_in_backward<M>)
    if (m.loss_in_backward()) {
      typename M::loss_sum sum;
      auto dx = m.backward_loss(mb, labels, kept, seed, &sum);
      take(sum);
      return dx;
    }
  return m.backward_loss(mb, labels, kept, seed);
}

}  // namespace detail
}  // namespace plait
