// Deterministic sums of gradients over tokens: each layer that uses parameters adds its leaves, and ranks add these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/world.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/function_ref.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/deterministic/exchange.hpp"
#include "plait/deterministic/leaves.hpp"
#include "plait/deterministic/sums.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/redistribution.hpp"

namespace plait {

/// The deterministic sum over tokens of the gradients that one layer adds to an array of parameters. A tied table has
/// two, one for each layer.
template <class Precision, compute_device Device>
class gradient_terms {
 public:
  using G = gradient_of<Precision>;

  gradient_terms(std::int64_t elements, token_leaves leaves)
      : leaves_(std::move(leaves)), sum_(elements, leaves_.leaves()) {}

  const token_leaves& leaves() const { return leaves_; }
  std::int64_t elements() const { return sum_.elements(); }
  bool empty() const { return sum_.empty(); }
  void clear() { sum_.clear(); }

  /// Calls write(leaf, G* out, bool adds) for each leaf of a microbatch. It must overwrite out with the leaf's terms,
  /// or add their complete sum to out if `adds` is set. `adds` is set only for leaves of up to `one_sum` rows, whose
  /// terms form one sum (`deterministic_products::chunk` for products; 0: never).
  void add(Device& device, std::int64_t index, std::int64_t count, std::int64_t one_sum,
           function_ref<void(const token_leaves::leaf&, G*, bool)> write);
  /// Calls write(G* out), which must overwrite out with all terms of a leaf.
  void add_leaf(Device& device, std::int64_t leaf, function_ref<void(G*)> write) {
    sum_.add(device, leaf, false, [&](G* out, bool) { write(out); });
  }
  /// Calls write(leaf, G* out) for each leaf of a microbatch. out has zeros. write must add the leaf's terms in some
  /// rows of `width` elements, and return these rows (`deterministic_sum::add_rows`).
  void add_rows(Device& device, std::int64_t index, std::int64_t count, std::int64_t width,
                function_ref<std::vector<std::int64_t>(const token_leaves::leaf&, G*)> write);
  /// Returns the partial sums of the elements from `begin` on.
  partial_sums<G, Device> parts(std::int64_t begin) { return sum_.parts().from(begin); }

  /// Returns the exchange over `axes`, for the partial sums that remain after the exchange over `done`.
  deterministic_exchange exchange(world& ranks, const axis_list& axes, const axis_list& done,
                                  world::channel purpose = world::channel::layers) const;

 private:
  token_leaves leaves_;
  deterministic_sum<G, Device> sum_;
};

template <class Precision, compute_device Device>
void gradient_terms<Precision, Device>::add(Device& device, std::int64_t index, std::int64_t count,
                                            std::int64_t one_sum,
                                            function_ref<void(const token_leaves::leaf&, G*, bool)> write) {
  for (const token_leaves::leaf& l : leaves_.of_microbatch(index, count))
    sum_.add(device, l.number, l.count() <= one_sum, [&](G* out, bool adds) { write(l, out, adds); });
}

template <class Precision, compute_device Device>
void gradient_terms<Precision, Device>::add_rows(
    Device& device, std::int64_t index, std::int64_t count, std::int64_t width,
    function_ref<std::vector<std::int64_t>(const token_leaves::leaf&, G*)> write) {
  for (const token_leaves::leaf& l : leaves_.of_microbatch(index, count))
    sum_.add_rows(device, l.number, width, [&](G* out) { return write(l, out); });
  sum_.release_rows();
}

template <class Precision, compute_device Device>
deterministic_exchange gradient_terms<Precision, Device>::exchange(world& ranks, const axis_list& axes,
                                                                   const axis_list& done,
                                                                   world::channel purpose) const {
  std::vector<std::vector<tree_node>> members;
  for (const std::int64_t member : ranks_of_group(ranks.shape(), axes, ranks.rank())) {
    std::vector<leaf_range> own;
    for (const std::int64_t with : ranks_of_group(ranks.shape(), done, member))
      for (const leaf_range& r : leaves_.of_step(with)) own.push_back(r);
    members.push_back(roots_of(own, leaves_.leaves()));
  }
  return {ranks.group(axes, purpose), std::move(members), leaves_.leaves()};
}

PLAIT_COMPILED_TEMPLATE(class gradient_terms<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class gradient_terms<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class gradient_terms<double, cpu>)

/// Gives a layer a deterministic sum over `tokens` of its gradients for `to`, a parameter or an array of several.
/// Returns null if the context's sums are not deterministic.
template <class Parameter, compute_device Device>
auto* terms_of_layer(const context<Device>& ctx, Parameter& to, const layout& tokens, token_grain grain,
                     const std::string& name) {
  using terms = std::remove_reference_t<decltype(to.add_terms(token_leaves()))>;
  if (!ctx.deterministic) return static_cast<terms*>(nullptr);
  return &to.add_terms(
      token_leaves(ctx.deterministic, tokens, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank(), grain, name));
}

namespace detail {

[[noreturn]] inline void refuse_unordered(const std::string& name) {
  fail({"parameter ", name,
        ": its layer adds to the gradient in an order that depends on the layout, and the context wants deterministic "
        "sums; use layers that have a deterministic order, or leave deterministic out"});
}
[[noreturn]] inline void refuse_late_layer(const std::string& name) {
  fail({"parameter ", name,
        ": a layer begins to use it after data parallelism has put it into a bucket, whose deterministic sums "
        "would miss this layer's terms; make all layers before the training step"});
}
[[noreturn]] inline void refuse_narrow(const std::string& name) {
  fail({"parameter ", name, ": deterministic sums have gradients in float or double, and here they are ",
        "bf16; use another precision"});
}

/// Returns the sum of all leaves. Throws unless it is complete.
template <class E, class Device>
const E* complete_sum(const partial_sums<E, Device>& sums, std::int64_t leaves, const std::string& name) {
  if (sums.nodes != roots_of(std::vector<leaf_range>{{0, leaves}}, leaves))
    fail({"gradient of ", name, ": its deterministic sum over ", leaves,
          " leaves of tokens is not complete: ", sums.nodes.size(),
          " partial sums are left, after every rank's; each microbatch of a step is to be added once"});
  return sums.values[0];
}

/// Returns the rows of a leaf as one contiguous array: in place, or copied to `room` from rows `stride` apart.
template <class T, class Device>
const T* rows_of_leaf(Device& device, const token_leaves::leaf& leaf, const T* from, std::int64_t width,
                      buffer<Device>& room) {
  if (leaf.parts.size() == 1) return from + leaf.parts[0].first * width;
  if (room.empty()) room = make_buffer<T>(device, static_cast<std::size_t>(leaf.count() * width));
  T* to = room.template data<T>();
  for (const token_leaves::rows& r : leaf.parts) {
    device.copy(to, from + r.first * width, static_cast<std::size_t>(r.count * width) * sizeof(T),
                device.main_stream());
    to += r.count * width;
  }
  return room.template data<T>();
}

}  // namespace detail

/// Writes the complete gradient of the elements from `begin` on of an array, for a parameter outside buckets. It sums
/// each of `users` over all axes over which `gradient` is partial, and then adds the users. Throws if the parameter's
/// stored and used layouts differ. Collective over these axes.
template <class Precision, compute_device Device>
void join_terms(const context<Device>& ctx,
                const std::vector<std::unique_ptr<gradient_terms<Precision, Device>>>& users, std::int64_t begin,
                const layout& gradient, const ready_plan& gather, gradient_of<Precision>* out,
                const std::string& name) {
  using G = gradient_of<Precision>;
  if (!gather.trivial())
    fail({"parameter ", name,
          ": deterministic sums need a parameter that is stored as it is used, and its strategy's `stored` ",
          "shards it; use a level of data parallelism for that"});
  const axis_list axes = ctx.ranks.pruned(ctx.ranks.shape().in_order(gradient.partial));
  const std::int64_t n = gather.source().local_size();
  bool first = true;
  for (const auto& user : users) {
    if (user->empty()) continue;
    partial_sums<G, Device> sums = user->parts(begin);
    if (!axes.empty()) sums = user->exchange(ctx.ranks, axes, {}).run_everywhere(ctx.device, std::move(sums), n);
    const G* const sum = detail::complete_sum(sums, user->leaves().leaves(), name);
    if (first)
      ctx.device.copy(out, sum, static_cast<std::size_t>(n) * sizeof(G), ctx.device.main_stream());
    else
      kernels::accumulate(ctx.device, sum, out, n);
    first = false;
  }
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
