// The auxiliary losses of a router (balance between experts, and the z-loss), and the counts of its choices. They are
// equal on every mesh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/kernels/settings.hpp"
#include "plait/layout/rules.hpp"
#include "plait/nn/moe/router_statistics.hpp"
#include "plait/tensor/microbatch.hpp"
#include "plait/tensor/redistribution.hpp"

namespace plait {

/// The set of tokens over which a balance loss counts and averages.
enum class balance_over : std::uint8_t { sequence, microbatch, step };

/// The loss weight * E * sum_e f_e P_e, for E experts, k experts per token, and a set of n tokens. f_e is expert e's
/// fraction of the n k choices. P_e is the mean of its probability over the tokens; sigmoids are first divided by their
/// sum. The value is `weight` if all experts are chosen equally often. The set is
///
///     sequence    each sequence; the value is the mean over all (DeepSeek-V3, 2412.19437, equations 17 to 20).
///     microbatch  the tokens of a microbatch over the whole mesh; the value is the mean over all microbatches
///                 (Fedus et al. 2021; Megatron-LM's `aux_loss`, but over all data ranks).
///     step        all tokens of the step, but f_e is of the step before: the last that was not skipped. In the first
///                 step, f_e is 1 / E.
///
/// The mesh changes none of them. The number of microbatches changes `microbatch` alone: its f_e and P_e are both means
/// over a microbatch, and a mean of products is not the product of means.
///
/// The idea of `step`, a balance over the global batch in which a sequence may use few experts, is from Qiu et al.
/// 2025, "Demons in the Detail" (2501.11873). They add up the counts of the microbatches so far. The counts of the step
/// before are known in the first pass: the loss is then linear in P_e, and microbatches add in any order. A mixture
/// keeps them as `NAME.gate.last_load` (`moe`).
struct balance_loss {
  double weight = 0;
  balance_over over = balance_over::sequence;
};

/// The coefficients of a router's auxiliary losses; 0: no loss.
struct router_losses {
  balance_loss balance{};
  /// Coefficient of the mean over tokens of log(sum_e exp(score_e))^2, which keeps scores small (ST-MoE, Zoph et al.
  /// 2022).
  double z_loss = 0;

  constexpr bool any() const { return balance.weight != 0 || z_loss != 0; }
};

namespace detail {

/// The auxiliary losses of one router: their value, which goes to `microbatch::auxiliary`, and the gradient of scores.
/// Each term has one factor of global sizes, so the loss is a plain sum over ranks and microbatches. The only
/// collective sums the counts of experts. With `balance_over::step` there is none. Passes then get `last`, the load of
/// experts in the last step, which is 1 at the mean.
template <compute_device Device>
class router_loss_terms {
 public:
  router_loss_terms() = default;
  /// `scores` is the layout [samples, positions.., experts].
  router_loss_terms(const context<Device>& ctx, const layout& scores, const router_losses& how,
                    const kernels::router_settings& router, const std::string& name)
      : how_(how), router_(router) {
    if (!(how.z_loss >= 0)) fail({name, ": z_loss = ", how.z_loss, "; legal is 0 (none) or more"});
    if (!(how.balance.weight >= 0))
      fail({name, ": the weight of the balance loss is ", how.balance.weight, "; legal is 0 (none) or more"});
    if (balances() && by_sequence() && scores.dims.size() < 3)
      fail({name, ": balance_over::sequence, and the input has one dim of tokens, so that no sequence is known; legal ",
            "are balance_over::microbatch and step"});
    if (!how_.any()) return;
    if (const axis_list all = ctx.ranks.pruned(ctx.ranks.shape().others({})); !all.empty())
      ctx.ranks.group(all);  // creates the group now, not in the first step, which completes the sum
    take_sizes(ctx, scores, name);
  }

  /// Adds the value, if the microbatch collects it, and returns the counts for `backward`. `keeps`: a backward pass
  /// will follow.
  template <class T, class Load>
  buffer<Device> forward(const microbatch<Device>& mb, const T* scores, const std::int32_t* choice, const Load* last,
                         bool keeps) {
    const bool adds = mb.auxiliary && !mb.repeats;
    if (!how_.any() || !(adds || keeps)) return {};
    Device& on = mb.ctx.device;
    buffer<Device> counts;
    if (balances() && !last) counts = count(on, choice);
    if (!adds) return counts;
    auto term = make_buffer<double>(on, 1), own = make_buffer<double>(on, 1);
    with_load(counts, last, [&](const auto* load) {
      kernels::router_loss(on, scores, load, term.template data<double>(), groups_, size_, experts_, router_.scores,
                           scales(mb));
    });
    share_.run(on, term.data(), own.data(), dtype::f64);
    kernels::accumulate(on, own.template data<double>(), mb.auxiliary->value, 1);
    mb.auxiliary->used = true;
    return counts;
  }
  /// Adds to the gradient of scores.
  template <class T, class Load>
  void backward(const microbatch<Device>& mb, const T* scores, const buffer<Device>& counts, const Load* last,
                T* dscores) const {
    if (!how_.any()) return;
    with_load(counts, last, [&](const auto* load) {
      kernels::add_router_loss_gradient(mb.ctx.device, scores, load, seed_.template data<double>(), dscores, groups_,
                                        size_, experts_, router_.scores, scales(mb));
    });
  }
  void take_sizes(const context<Device>& ctx, const layout& scores, const std::string& name) {
    if (!how_.any()) return;
    const std::size_t kept = balances() && by_sequence() ? 1 : 0;  // dims that count the sets of tokens
    layout counted = scores, summed = scores;
    while (counted.dims.size() > kept + 1) counted = reduce_sum(counted, counted.dims[kept].dim).result;
    while (!summed.dims.empty()) summed = reduce_sum(summed, summed.dims.back().dim).result;
    complete_counts_ = ready_plan(counted, completed(counted), ctx.ranks, ctx.sizes, name);
    layout everywhere;
    for (axis_id axis : ctx.ranks.shape().axes) everywhere.set(axis, state::partial);
    share_ = ready_plan(summed, everywhere, ctx.ranks, ctx.sizes, name);
    experts_ = ctx.sizes.of(scores.dims.back().dim);
    sets_ = kept > 0 ? ctx.sizes.of(scores.dims[0].dim) : 1;
    tokens_ = 1;
    for (std::size_t i = 0; i + 1 < scores.dims.size(); ++i) tokens_ *= ctx.sizes.of(scores.dims[i].dim);
    groups_ = complete_counts_.source().local_size() / experts_;
    size_ = local_box(scores, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank()).local_size() / experts_ / groups_;
    make_seed(ctx);
  }

 private:
  bool balances() const { return how_.balance.weight > 0; }
  bool by_sequence() const { return how_.balance.over == balance_over::sequence; }
  /// Calls f with what stands for f_e: the load of the last step, or counts.
  template <class Load, class F>
  static void with_load(const buffer<Device>& counts, const Load* last, F&& f) {
    last ? f(last) : f(counts.template data<std::int32_t>());
  }

  /// Computes the gradient of a rank's term: the adjoint of the plan that shares terms between ranks, applied to 1.
  void make_seed(const context<Device>& ctx) {
    const ready_plan back(share_.backward(), ctx.ranks, ctx.sizes, "auxiliary losses");
    auto one = make_buffer<double>(ctx.device, 1);
    const double value = 1;
    ctx.device.upload(one.data(), &value, sizeof value, ctx.device.main_stream());
    seed_ = make_buffer<double>(ctx.device, 1);
    back.run(ctx.device, one.data(), seed_.data(), dtype::f64);
  }
  /// Counts how often each expert is chosen in each set of tokens, over all ranks.
  buffer<Device> count(Device& on, const std::int32_t* choice) const {
    const auto n = static_cast<std::size_t>(groups_ * experts_);
    auto own = buffer<Device>::for_collectives(on, n * sizeof(std::int32_t));
    on.zero(own.data(), own.bytes(), on.main_stream());
    kernels::count_experts(on, choice, own.template data<std::int32_t>(), groups_, size_ * router_.chosen, experts_);
    if (complete_counts_.trivial()) return own;
    auto all = buffer<Device>::for_collectives(on, own.bytes());
    complete_counts_.run(on, own.data(), all.data(), dtype::i32);
    return all;
  }
  kernels::router_loss_scales scales(const microbatch<Device>& mb) const {
    const auto all = static_cast<double>(tokens_), sets = static_cast<double>(sets_),
               microbatches = static_cast<double>(mb.count), of_set = all / sets;
    constexpr double exact_to_512 = 0x1p-44;
    const double mean_count = static_cast<double>(router_.chosen) * of_set / static_cast<double>(experts_),
                 mean = how_.balance.over == balance_over::step ? 1 : mean_count;
    return {how_.balance.weight / (mean * all * microbatches), how_.z_loss / (all * microbatches),
            sums_in_order(mb.ctx) ? exact_to_512 : 0};
  }

  router_losses how_;
  kernels::router_settings router_;
  ready_plan complete_counts_;
  ready_plan share_;     ///< from a rank's term to a part of the sum over the mesh; one of several equal ranks keeps it
  buffer<Device> seed_;  ///< one double
  std::int64_t experts_ = 0, groups_ = 0, size_ = 0;  ///< sets of tokens on this rank, and its tokens of each
  std::int64_t sets_ = 0, tokens_ = 0;                ///< sets and tokens of a microbatch over the whole mesh
};

/// Counts the choices of a router in a step.
template <compute_device Device>
class router_counts {
 public:
  /// `scores` is the layout [samples, positions.., experts]. `limited`: `add` also receives the choices within a limit.
  router_counts(const context<Device>& ctx, const layout& scores, const kernels::router_settings& router, bool limited,
                std::string name)
      : scores_(scores), router_(router), name_(std::move(name)) {
    const auto experts = static_cast<std::size_t>(ctx.sizes.of(scores.dims.back().dim));
    counts_ = make_buffer<std::int32_t>(ctx.device, limited ? 2 * experts : experts);
    entropy_ = make_buffer<double>(ctx.device, 1);
  }

  /// Adds a microbatch's `scores` [tokens, experts] and choice [tokens, k]. `kept` has the choices within the limit;
  /// null without a limit. A microbatch index that was already added begins a new step and clears the counts.
  template <class T>
  void add(const microbatch<Device>& mb, const T* scores, const std::int32_t* choice, const std::int32_t* kept,
           std::int64_t tokens, std::int64_t experts) {
    if (!mb.auxiliary || mb.repeats) return;
    Device& on = mb.ctx.device;
    const auto i = static_cast<std::size_t>(mb.index), all = static_cast<std::size_t>(mb.count);
    if (seen_.size() != all || seen_[i]) {
      seen_.assign(all, false);
      on.zero(counts_.data(), counts_.bytes(), on.main_stream());
      on.zero(entropy_.data(), entropy_.bytes(), on.main_stream());
    }
    seen_[i] = true;
    auto* const counts = counts_.template data<std::int32_t>();
    kernels::count_experts(on, choice, counts, 1, tokens * router_.chosen, experts);
    if (kept) kernels::count_experts(on, kept, counts + experts, 1, tokens * router_.chosen, experts);
    auto own = make_buffer<double>(on, 1);
    constexpr kernels::router_loss_scales exact_to_millions_of_tokens{.quantum = 0x1p-28, .entropy = 1};
    kernels::router_loss(on, scores, static_cast<const std::int32_t*>(nullptr), own.template data<double>(), 1, tokens,
                         experts, router_.scores, exact_to_millions_of_tokens);
    kernels::accumulate(on, own.template data<double>(), entropy_.template data<double>(), 1);
  }

  /// How often all tokens have chosen each expert, int32 [experts]; empty before the first step. Collective.
  buffer<Device> load_on_device(const context<Device>& ctx) {
    return seen_.empty() ? buffer<Device>{} : complete_counts(ctx, 0);
  }
  /// Does the same on the host; waits for the device.
  std::vector<std::int64_t> load(const context<Device>& ctx) {
    return seen_.empty() ? std::vector<std::int64_t>{} : total(ctx, 0);
  }
  /// Returns the statistics of the step. Collective like `load`.
  router_statistics statistics(const context<Device>& ctx) {
    router_statistics all{load(ctx)};
    if (all.load.empty()) return all;
    const std::size_t bytes = all.load.size() * sizeof(std::int32_t);
    if (counts_.bytes() > bytes) {
      all.dropped = total(ctx, all.load.size());
      for (std::size_t e = 0; e < all.load.size(); ++e) all.dropped[e] = all.load[e] - all.dropped[e];
    }
    if (!complete_entropy_) complete_entropy_ = over_all_tokens(ctx, 0);
    read<double>(ctx, complete<double>(ctx, *complete_entropy_, entropy_.template data<double>(), 1), &all.entropy);
    all.entropy *= static_cast<double>(router_.chosen) /
                   static_cast<double>(std::accumulate(all.load.begin(), all.load.end(), std::int64_t{0}));
    return all;
  }

 private:
  std::vector<std::int64_t> total(const context<Device>& ctx, std::size_t at) {
    const buffer<Device> all = complete_counts(ctx, at);
    std::vector<std::int32_t> counts(all.bytes() / sizeof(std::int32_t));
    read(ctx, all, counts.data());
    return {counts.begin(), counts.end()};
  }
  buffer<Device> complete_counts(const context<Device>& ctx, std::size_t at) {
    if (!complete_counts_) complete_counts_ = over_all_tokens(ctx, 1);
    return complete<std::int32_t>(ctx, *complete_counts_, counts_.template data<std::int32_t>() + at,
                                  static_cast<std::size_t>(complete_counts_->source().local_size()));
  }
  /// Returns the plan of a sum over tokens, which keeps the last `dims` dims of the scores.
  ready_plan over_all_tokens(const context<Device>& ctx, std::size_t dims) const {
    layout summed = scores_;
    while (summed.dims.size() > dims) summed = reduce_sum(summed, summed.dims[0].dim).result;
    return ready_plan(summed, completed(summed), ctx.ranks, ctx.sizes, name_);
  }
  template <class E>
  static buffer<Device> complete(const context<Device>& ctx, const ready_plan& plan, const E* own, std::size_t count) {
    auto all = buffer<Device>::for_collectives(ctx.device, count * sizeof(E));
    plan.run(ctx.device, own, all.data(), dtype_of<E>);
    return all;
  }
  template <class E>
  static void read(const context<Device>& ctx, const buffer<Device>& all, E* host) {
    ctx.device.synchronize();
    ctx.device.download(host, all.data(), all.bytes(), ctx.device.main_stream());
  }

  layout scores_;
  kernels::router_settings router_;
  std::string name_;
  buffer<Device> counts_, entropy_;  ///< [1 or 2, experts] of all choices, and of those within the limit; a sum over
                                     ///< tokens
  std::vector<bool> seen_;           ///< which microbatches of the step were added
  std::optional<ready_plan> complete_counts_, complete_entropy_;
};

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
