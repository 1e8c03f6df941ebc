// A mixture of experts as a layer: a router, an exchange of rows with the ranks of the experts, SwiGLU experts, and the
// weighted sum of their outputs. All collectives are derived from three specs.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/host_values.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/tensor_names.hpp"
#include "plait/deterministic/experts.hpp"
#include "plait/device/range.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/kernels/settings.hpp"
#include "plait/layout/experts.hpp"
#include "plait/layout/plan.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/linear/policy.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/moe/expert_adapters.hpp"
#include "plait/nn/moe/expert_capacity.hpp"
#include "plait/nn/moe/expert_exchange.hpp"
#include "plait/nn/moe/router_losses.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/tensor/check_values.hpp"
#include "plait/tensor/redistribution.hpp"

namespace plait {
namespace detail {

inline constexpr expert_dims mixture_dims{dim_of<experts>, dim_of<expert_slot>, dim_of<expert_choice>};

/// All layouts in a mixture, derived from the layouts of its input, of the experts' first weights [experts, width,
/// hidden] and of its output.
struct mixture_derivation {
  layout scores, choice;          ///< of the input's tokens
  layout gathered, weights;       ///< the input and the weights of its choice, in the layout from which rows are made
  layout rows, at_experts;        ///< [experts, slot, hidden], before and after the exchange
  layout inside, made, returned;  ///< [experts, slot, width]; [experts, slot, hidden] before and after rows return
  layout up, down;                ///< the experts' weights
  layout result;                  ///< before the redistribution to the output
  axis_list moved;                ///< the axes of the exchange
  plait::verdict verdict;
};

/// Axes that shard the inner width of experts see all tokens of their ranks; so do axes that shard experts but no
/// tokens. The gradients on such axes are therefore terms of a sum.
constexpr layout seen_by_experts(layout a, const layout& weight) {
  for (axis_id axis : union_of(weight.dims[0].axes, weight.dims[1].axes)) {
    if (!a.sharded_by(axis) || weight.dims[1].axes.contains(axis)) a.set(axis, state::replicated);
  }
  return a;
}

/// The layout of rows after they move from the ranks of their tokens to the ranks of their experts.
constexpr layout with_experts(layout rows, const axis_list& experts_axes) {
  for (axis_id axis : experts_axes) rows.append(mixture_dims.experts, axis);
  return rows;
}

constexpr mixture_derivation derive_mixture(const layout& input, const layout& weight, const layout& output) {
  mixture_derivation d;
  const dim_id hidden = input.dims.empty() ? dim_id{} : input.dims.back().dim;
  const dim_id width = weight.dims.size() > 1 ? weight.dims[1].dim : dim_id{};
  d.verdict = compare_dims(operand::weight, dim_list{mixture_dims.experts, width, hidden}, weight.dim_order());
  d.verdict.worsen(compare_dims(operand::output, input.dim_order(), output.dim_order()));
  if (!d.verdict.ok() || !width) return d;
  d.scores = input;
  d.scores.dims.back() = {mixture_dims.experts, {}};
  derived_layout next = choose_experts(d.scores, mixture_dims);
  d.choice = next.result;
  d.verdict.worsen(next.verdict);
  d.gathered = seen_by_experts(input, weight);
  d.weights = seen_by_experts(d.choice, weight);
  const axis_list& of_experts = weight.dims[0].axes;
  next = dispatch_rows(d.gathered, d.weights, mixture_dims, of_experts);
  d.rows = next.result;
  d.verdict.worsen(next.verdict);
  for (axis_id axis : of_experts)
    if (d.rows.dims[1].axes.contains(axis)) d.moved.push_back(axis);
  d.at_experts = with_experts(d.rows, of_experts);
  d.up = use_of(weight, d.at_experts);
  next = contract(d.at_experts, d.up, dim_list{mixture_dims.experts, mixture_dims.slot, width});
  d.inside = next.result;
  d.verdict.worsen(next.verdict);
  d.verdict.worsen(pointwise(combine::nonlinear, {&d.inside}).verdict);
  layout down = weight;
  std::swap(down.dims[1], down.dims[2]);
  d.down = use_of(down, d.inside);
  next = contract(d.inside, d.down, dim_list{mixture_dims.experts, mixture_dims.slot, hidden});
  d.made = next.result;
  d.verdict.worsen(next.verdict);
  d.returned = d.made;
  for (axis_id axis : d.moved) d.returned.append(mixture_dims.slot, axis);
  next = combine_rows(d.returned, d.weights, mixture_dims);
  d.result = next.result;
  d.verdict.worsen(next.verdict);
  for (axis_id axis : differing_axes(d.result, output))
    if (!weight.sharded_by(axis))
      d.verdict.worsen({layout_error::move_not_named, axis, output.sharded_by(axis), d.result.state_of(axis),
                        output.state_of(axis)});
  d.verdict.worsen(make_plan(d.result, output).verdict);
  return d;
}

template <class Policy>
struct mixture_value {
  static constexpr mixture_derivation derivation = derive_mixture(
      layout_v<typename Policy::input>, layout_v<typename Policy::weight>, layout_v<typename Policy::output>);
  static constexpr verdict value = derivation.verdict;
};
template <class Policy>
struct mixture_scores {
  static constexpr layout value = mixture_value<Policy>::derivation.scores;
};
template <class Policy>
struct router_weight {
  static constexpr layout value = [] {
    layout a;
    a.dims.push_back({mixture_dims.experts, {}});
    a.dims.push_back({layout_v<typename Policy::input>.dims.back().dim, {}});
    return a;
  }();
};

struct any_mixture {
  using input = spec<batch, seq, hidden>;
  using weight = spec<experts, ffn, hidden>;
  using output = input;
};
template <class Policy>
using policy_of_mixture = typename policy_or<Policy, any_mixture>::type;

template <template <class...> class>
struct any_template;

/// Reports members of a mixture's policy, or of its strategy, that are near to `exchange` and would be ignored.
template <class P, class T, class Device>
struct exchange_requirements {
  static constexpr bool named = requires { typename P::template exchange<T, Device>; };
  static constexpr bool of_other_kind =
      requires { sizeof(typename P::exchange); } || requires { typename any_template<P::template exchange>; };
  static_assert(
      named || !of_other_kind,
      "a policy's `exchange` is a template of two types: template <class T, class Device> using exchange = X;");
  static_assert(
      named || !requires { typename P::template exchnage<T, Device>; },
      "the policy has a member `exchnage`, which means nothing: did you mean `exchange`?");
};

/// Reports the specs that a mixture's policy lacks, and members of other layers' policies, which a mixture would
/// ignore. Only some similar names are refused, as in `policy_requirements`.
template <class P, class T, class Device>
struct mixture_requirements : spec_requirements<P>, exchange_requirements<P, T, Device> {
  static_assert(
      !requires { P::bias; }, "a mixture's experts have no bias: leave `bias` out of its policy");
  static_assert(
      !requires { P::has_bias; },
      "the policy has a member `has_bias`, which means nothing: a mixture's experts have no bias");
  static_assert(
      !requires { typename P::stored; },
      "a mixture stores its weights as it uses them: leave `stored` out of its policy");
  static_assert(
      !requires { typename P::store; },
      "the policy has a member `store`, which means nothing: a mixture stores its weights as it uses them");
  static_assert(
      !requires { typename P::overlap; },
      "a mixture's products do not overlap with collectives in chunks: leave `overlap` out of its policy");
};
template <class P, class T, class Device>
inline constexpr bool mixture_checked = sizeof(mixture_requirements<P, T, Device>) > 0;
/// A policy that is derived from a strategy names nothing itself.
template <class P, class T, class Device>
  requires requires { typename P::derived_from; }
inline constexpr bool mixture_checked<P, T, Device> =
    sizeof(exchange_requirements<typename P::derived_from, T, Device>) > 0;

inline void check_groups(const std::string& name, const kernels::router_settings& how, std::int64_t experts) {
  if (how.groups < 1 || experts % how.groups != 0)
    fail({name, ": its router has ", how.groups, " groups; legal are those that divide its ", experts, " experts"});
  if (how.chosen_groups < 1 || how.chosen_groups > how.groups)
    fail(
        {name, ": each token chooses ", how.chosen_groups, " of ", how.groups, " groups; legal are 1 to ", how.groups});
  const std::int64_t size = experts / how.groups, legal = how.chosen_groups * size;
  if (how.chosen > legal)
    fail({name, ": each token chooses ", how.chosen, " experts of ", how.chosen_groups, " groups of ", size,
          "; legal are 1 to ", legal});
  if (how.group_scores == kernels::group_scores::two_largest && size < 2)
    fail({name, ": group_scores::two_largest is for groups of 2 experts or more, and each has 1"});
}

/// The route of the rows of one forward pass to their experts and back. Indices of rows stay on the device.
template <class Exchange, compute_device Device>
struct expert_route {
  buffer<Device> tokens;  ///< the token of each row to send, ordered by peer, expert and token
  buffer<Device> places;  ///< [tokens, k]: index of each choice's row in `tokens`; negative if its expert is not among
                          ///< the peers'
  expert_rows rows;
  row_origins origins;                          ///< origins of the rows here, if deterministic sums need them
  std::optional<typename Exchange::route> way;  ///< of this pass; none without peers, and none with padded rows
  std::shared_ptr<const typename Exchange::route> way_of_all;  ///< of every pass with padded rows
  std::int64_t here() const { return rows.begin.back(); }
  const typename Exchange::route& route() const { return way_of_all ? *way_of_all : *way; }

  template <class F>
  void visit(F&& f) {
    f(tokens);
    f(places);
    if (way) visit_saved(*way, f);
  }
};

/// The ranks that exchange rows, and the experts of each. Without peers rows stay on their rank.
template <class Exchange, compute_device Device>
class expert_peers {
 public:
  using route_type = expert_route<Exchange, Device>;

  expert_peers() = default;
  /// `sizes` has the context's sizes and the number of experts per token; rows have `width` elements. `most_rows`,
  /// given the box of a rank's choice, returns the most rows that the rank sends to one expert, if rows are padded.
  expert_peers(const context<Device>& ctx, const mixture_derivation& d, const dim_sizes& sizes, std::int64_t width,
               const std::function<std::int64_t(const box&)>& most_rows) {
    const mesh_shape& mesh = ctx.ranks.shape();
    const axis_list over = ctx.ranks.pruned(d.moved);
    const std::int64_t group = mesh.group_of(ctx.ranks.rank(), over);
    group_.peers = mesh.size(over);
    group_.all_experts = sizes.of(mixture_dims.experts);
    group_.width = width;
    std::vector<std::int32_t> part_of(static_cast<std::size_t>(group_.all_experts), -1);
    std::vector<std::int64_t> peers;
    std::int64_t most_of_expert = 0;
    for (std::int64_t r = 0; r < mesh.size(); ++r)
      if (mesh.group_of(r, over) == group) {
        const box chosen = local_box(d.weights, mesh, sizes, r);
        peers.push_back(r);
        group_.experts = std::max(group_.experts, local_box(d.up, mesh, sizes, r).local[0]);
        group_.most_sent = std::max(group_.most_sent, chosen.local_size());
        if (most_rows) most_of_expert = std::max(most_of_expert, most_rows(chosen));
      }
    for (const std::int64_t r : peers) {
      const box own = local_box(d.up, mesh, sizes, r);
      for (std::int64_t e = 0; e < own.local[0]; ++e)
        part_of[static_cast<std::size_t>(own.offset[0] + e)] =
            static_cast<std::int32_t>(mesh.index_in(r, over) * group_.experts + e);
    }
    const std::int64_t k = sizes.of(mixture_dims.chosen);
    group_.most_received = group_.peers * group_.most_sent / k * std::min(k, group_.experts);
    part_of_ = make_buffer<std::int32_t>(ctx.device, part_of.size());
    ctx.device.upload(part_of_.data(), part_of.data(), part_of_.bytes(), ctx.device.main_stream());
    if (group_.peers > 1) {
      group_.ranks = &ctx.ranks.group(over);
      exchange_.emplace(ctx.device, group_);
    }
    if (most_rows) pad(ctx.device, part_of, most_of_expert);
  }

  /// Returns the route for this rank's choice [tokens, k]. Collective over the peers. Indices are computed on the
  /// device. Unless rows are padded, counts are downloaded, since exchanges and products take their sizes on the host.
  /// This is the only wait of a forward pass. With `origins`, the route has the origin of each row.
  route_type route(const context<Device>& ctx, const std::int32_t* choice, std::int64_t tokens, std::int64_t k,
                   bool origins) const {
    Device& on = ctx.device;
    const std::int64_t parts = group_.peers * group_.experts;
    route_type r;
    if (padded()) r.rows = padded_rows_, r.way_of_all = padded_way_;
    r.rows.choices = tokens * k;
    r.tokens = make_buffer<std::int32_t>(on, static_cast<std::size_t>(padded() ? r.rows.leaving : tokens * k));
    r.places = make_buffer<std::int32_t>(on, static_cast<std::size_t>(tokens * k));
    host_values<std::int32_t, Device> counts(on, 2 * static_cast<std::size_t>(parts));
    kernels::sort_choices(on, choice, part_of_.template data<std::int32_t>(), tokens * k, k, parts, counts.data(),
                          r.places.template data<std::int32_t>(), r.tokens.template data<std::int32_t>(),
                          kernels::padded_parts{padded_begins_.template data<std::int32_t>(), r.rows.leaving});
    if (padded()) return r;
    if (exchange_)
      r.way.emplace(exchange_->open(on, counts, r.rows));
    else
      keep_rows(counts, r.rows);
    if (origins) r.origins = origins_of(on, r);
    return r;
  }

  /// Sends rows to the ranks of their experts, which receive them ordered by expert. Calls `meanwhile()` during the
  /// transfer.
  template <class Work>
  buffer<Device> dispatch(Device& on, const route_type& r, buffer<Device> leaving, Work&& meanwhile) const {
    if (exchange_) return exchange_->dispatch(on, r.route(), std::move(leaving), meanwhile);
    meanwhile();
    return leaving;
  }
  /// Sends rows back to their origins, in the order in which they left.
  buffer<Device> combine(Device& on, const route_type& r, buffer<Device> rows) const {
    return exchange_ ? exchange_->combine(on, r.route(), std::move(rows)) : std::move(rows);
  }
  /// Allocates `bytes` for rows to send; with an exchange, in memory that the communicator can send.
  buffer<Device> memory(Device& on, std::size_t bytes) const {
    return exchange_ ? buffer<Device>::for_collectives(on, bytes) : buffer<Device>(on, bytes);
  }

  bool padded() const { return !padded_begins_.empty(); }

 private:
  /// Makes the route of all passes, on which each peer sends `most` rows to each expert.
  void pad(Device& on, const std::vector<std::int32_t>& part_of, std::int64_t most) {
    std::vector<std::int32_t> counts(static_cast<std::size_t>(group_.peers * group_.experts));
    for (const std::int32_t part : part_of)
      if (part >= 0) counts[static_cast<std::size_t>(part)] = static_cast<std::int32_t>(most);
    std::vector<std::int32_t> begins(counts.size());
    std::exclusive_scan(counts.begin(), counts.end(), begins.begin(), 0);
    if (exchange_) {
      if constexpr (opens_padded<Exchange, Device>)
        padded_way_ =
            std::make_shared<const typename Exchange::route>(exchange_->open_padded(on, counts, padded_rows_));
    } else {
      padded_rows_.begin.assign(begins.begin(), begins.end());
      padded_rows_.begin.push_back(padded_rows_.leaving = begins.back() + counts.back());
    }
    padded_begins_ = make_buffer<std::int32_t>(on, begins.size());
    on.upload(padded_begins_.data(), begins.data(), padded_begins_.bytes(), on.main_stream());
  }
  void keep_rows(host_values<std::int32_t, Device>& counts, expert_rows& rows) const {
    std::vector<std::int32_t> values(static_cast<std::size_t>(group_.experts));
    if constexpr (only_counts<Device>)  // a dry run assumes that all experts are chosen equally often
      for (std::int64_t row = 0; row < rows.choices * group_.experts / group_.all_experts; ++row)
        ++values[static_cast<std::size_t>(row % group_.experts)];
    else
      counts.download(values.data(), values.size());
    rows.begin.assign(1, 0);
    for (const std::int32_t n : values) rows.begin.push_back(rows.begin.back() + n);
    rows.leaving = rows.begin.back();
  }
  row_origins origins_of(Device& on, const route_type& r) const {
    row_origins all;
    if (exchange_) {
      if constexpr (gives_origins<Exchange, Device>) all = exchange_->origins(on, *r.way, r.tokens);
      return all;
    }
    all.peers.resize(static_cast<std::size_t>(r.here()));
    all.tokens.resize(static_cast<std::size_t>(r.here()));
    if constexpr (!only_counts<Device>)
      on.download(all.tokens.data(), r.tokens.data(), all.tokens.size() * sizeof(std::int32_t), on.main_stream());
    return all;
  }

  expert_group group_;
  buffer<Device> part_of_;            ///< for each expert: its peer and its index there, in one number
  std::optional<Exchange> exchange_;  ///< none without peers
  buffer<Device> padded_begins_;      ///< the first row of each part; empty: rows are not padded
  expert_rows padded_rows_;           ///< if rows are padded
  std::shared_ptr<const typename Exchange::route> padded_way_;
};

}  // namespace detail

/// Options of a mixture of experts, including its router's.
struct moe_options {
  kernels::router_settings router{};
  initializer init{};
  router_losses losses{};
  expert_limit limit{};
  /// Every rank sends to each expert as many rows as the limit allows, or without a limit as it has tokens. Rows
  /// without a token are zeros. Sizes are then the same in every pass, so no pass waits for its device, and
  /// `graph_step` records the step. More rows travel and are computed: with a limit `factor` times as many on ranks
  /// with whole sequences, and without one experts / chosen times as many. If n ranks share a sequence, up to n times
  /// as many.
  bool padded = false;
  /// The rate of a bias that balances experts without a loss (DeepSeek-V3; Wang et al. 2024); none: no bias. The router
  /// chooses experts by probability plus bias; the weights of a choice do not include the bias. After each step the
  /// bias grows by this rate for experts that were chosen less often than the mean. It falls by this rate for those
  /// chosen more often. 0 keeps it constant.
  std::optional<double> bias_rate{};
  /// Low-rank adapters of each expert's matrices, which are then frozen: `NAME.experts.gate_proj.lora_A.weight`
  /// [experts, rank, hidden] and `lora_B.weight` [experts, width, rank]. up_proj and down_proj have the same. The pair
  /// of one expert is peft's adapter of this expert's linear.
  mlp_lora lora{};
};

/// A mixture of SwiGLU experts (Shazeer et al. 2017). The output of each token is the sum of its experts' outputs times
/// their weights. No row is dropped, unless there is a limit. The policy names three specs, such as
///
///     struct experts_over_ep {
///       using input = spec<shard<batch, dp, ep>, shard<seq, tp>, hidden>;
///       using weight = spec<shard<experts, ep>, shard<ffn, tp>, hidden>;    // of gate and up; transposed for down
///       using output = input;
///     };
///
/// The ranks of an axis that shards experts and tokens exchange rows. If an axis shards experts but no tokens, each
/// rank computes the rows of its own experts, and a reduction sums over experts. The same holds for an axis that shards
/// the width. A policy or strategy may name the exchange (`expert_exchange`); all_to_all_exchange is the default. A
/// policy may name its `mesh`, like a linear's. The router's weight, [experts, hidden], is on all ranks. Parameters are
/// named `NAME.gate.weight`, `NAME.experts.gate_proj.weight`, `NAME.experts.up_proj.weight` and
/// `NAME.experts.down_proj.weight`. With a `bias_rate` there is also `NAME.gate.e_score_correction_bias` [experts],
/// which has no gradient. With `balance_over::step` there is also `NAME.gate.last_load` [experts]: how often the last
/// step chose each expert, divided by the mean. It begins as 1, also if a checkpoint does not have it. Directories of
/// weights never have it.
///
/// A forward pass waits once for its device to get the counts of rows, unless they are padded (`moe_options::padded`).
/// Without padding a graph cannot record it.
template <class Precision, class Policy, compute_device Device = cpu>
class moe : public layer_types<activation_of<Precision>, typename detail::policy_of_mixture<Policy>::input,
                               typename detail::policy_of_mixture<Policy>::output, Device> {
  using policy = detail::policy_of_mixture<Policy>;
  using T = activation_of<Precision>;
  using A = arithmetic<T>;
  using S = statistic_of<Precision>;
  using exchange = typename detail::exchange_of<Policy, T, Device>::type;
  using adapters = detail::expert_adapters<Precision, Device>;
  using value = detail::mixture_value<policy>;
  using scores = spec_from<detail::mixture_scores<policy>, typename policy::input, spec<experts>>;
  using router_layer =
      linear<Precision,
             layer_policy<typename policy::input,
                          spec_from<detail::router_weight<policy>, typename policy::input, spec<experts>>, scores>,
             Device>;
  static constexpr const detail::mixture_derivation& derived = value::derivation;

 public:
  using input = typename policy::input;
  using output = typename policy::output;
  static_assert(detail::mixture_checked<Policy, T, Device>);
  static_assert(enforced<value, policy, input, typename policy::weight, output>);
  static_assert(inside_mesh<policy, input, output>);
  static_assert(detail::exchange_of<Policy, T, Device>::accepted,
                "a mixture's exchange is a policy: a type with a constructor X(device, expert_group), a route, and the "
                "members open, dispatch and combine (nn/moe/expert_exchange.hpp)");
  /// The bytes that the layer sends and keeps depend on the choice. A dry run assumes that all experts are chosen
  /// equally often.
  static constexpr bool ragged = true;

  struct saved {
    detail::saved_stamp stamp;
    typename router_layer::saved router;
    tensor<T, scores, Device> scored;
    buffer<Device> choice;    ///< [tokens, k], of the input's tokens
    buffer<Device> weights;   ///< [tokens, k], of the tokens whose rows are summed
    buffer<Device> returned;  ///< the rows to sum
    buffer<Device> counts;    ///< of the choice, for a balance loss
    detail::expert_route<exchange, Device> route;
    buffer<Device> in, gate_up, activated;  ///< of the rows of this rank's experts
    typename adapters::arrays hidden;       ///< of adapters, [rows, rank]

    template <class F>
    void visit(F&& f) {
      router.visit(f);
      f(scored);
      for (auto* one : {&choice, &weights, &returned, &counts, &in, &gate_up, &activated}) f(*one);
      for (buffer<Device>& one : hidden) f(one);
      route.visit(f);
    }
  };

  moe(const context<Device>& ctx, const std::string& name, const moe_options& how = {})
      : names_(name),
        how_(checked(ctx, name, how)),
        router_(ctx, name + ".gate", {.init = how.init}),
        counts_(std::make_shared<detail::router_counts<Device>>(ctx, layout_v<scores>, how.router, how.limit.factor > 0,
                                                                name)),
        bias_(correction_bias(ctx, name)),
        last_load_(last_load(ctx, name)),
        gate_(weight(ctx, name + ".experts.gate_proj.weight", derived.up, derived.at_experts)),
        up_(weight(ctx, name + ".experts.up_proj.weight", derived.up, derived.at_experts)),
        down_(weight(ctx, name + ".experts.down_proj.weight", derived.down, derived.inside)) {
    adapt(ctx, adapters::gate, *gate_, derived.at_experts, derived.inside, how.lora.gate);
    adapt(ctx, adapters::up, *up_, derived.at_experts, derived.inside, how.lora.up);
    adapt(ctx, adapters::down, *down_, derived.inside, derived.made, how.lora.down);
    losses_ = {ctx, layout_v<scores>, how.losses, how.router, name};
    if (sums_in_order(ctx)) take_deterministic_stages(ctx);
    take_sizes(ctx);
  }

  tensor<T, output, Device> forward(const microbatch<Device>& mb, const tensor<T, input, Device>& x,
                                    saved* keep = nullptr) {
    return forward(mb, x, keep, [] {});
  }
  /// Calls `meanwhile()` while rows travel to their experts.
  template <std::invocable Work>
  tensor<T, output, Device> forward(const microbatch<Device>& mb, const tensor<T, input, Device>& x, saved* keep,
                                    Work&& meanwhile) {
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, names_.forward());
    detail::require_size(names_.layer(), "x", x.size(), tokens_ * hidden_);
    saved own;
    saved& s = keep ? *keep : own;
    detail::saved_stamp stamp = s.stamp;
    stamp.make(gate_.get(), mb.index, x.data());
    s = {};  // drops the values of an earlier pass
    s.stamp = stamp;
    s.scored = router_.forward(mb, x, keep ? &s.router : nullptr);
    choose(mb, s);
    s.counts = losses_.forward(mb, s.scored.data(), s.choice.template data<std::int32_t>(), values_of(last_load_),
                               keep != nullptr);
    if (!keep && mb.auxiliary && !mb.repeats && mb.policy == recompute::full)
      first_choices_.insert_or_assign(mb.index, std::move(s.choice));
    buffer<Device> gathered;
    const T* const tokens = moved(ctx.device, gather_, x.data(), gathered);
    auto leaving = rows_to_send(ctx.device, s.route.rows.leaving);
    kernels::gather_rows(ctx.device, tokens, s.route.tokens.template data<std::int32_t>(), leaving.template data<T>(),
                         s.route.rows.leaving, hidden_);
    s.route.tokens.reset();  // rows return by `places`
    s.in = peers_.dispatch(ctx.device, s.route, std::move(leaving), meanwhile);
    s.returned = peers_.combine(ctx.device, s.route, run_experts(ctx.device, s));
    auto sums = make_buffer<T>(ctx.device, static_cast<std::size_t>(seen_ * hidden_));
    kernels::sum_rows(ctx.device, s.returned.template data<T>(), s.route.places.template data<std::int32_t>(),
                      s.weights.template data<S>(), sums.template data<T>(), seen_, how_.router.chosen, hidden_);
    tensor<T, output, Device> y(ctx);
    sum_.run(ctx.device, sums.data(), y.data(), dtype_of<T>);
    detail::note_forward(mb, *this, layout_v<input>, gate_->name(), x.data(), x.size());
    return y;
  }

  template <spec_like Gradient>
  tensor<T, dual_t<input>, Device> backward(const microbatch<Device>& mb, const tensor<T, input, Device>& x, saved& s,
                                            const tensor<T, Gradient, Device>& dy) {
    return backward(mb, x, s, dy, [] {});
  }
  /// Calls `meanwhile()` while gradients travel to the experts.
  template <spec_like Gradient, std::invocable Work>
  tensor<T, dual_t<input>, Device> backward(const microbatch<Device>& mb, const tensor<T, input, Device>& x, saved& s,
                                            const tensor<T, Gradient, Device>& dy, Work&& meanwhile) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, policy, Gradient, output>);
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, names_.backward());
    detail::require_size(names_.layer(), "x", x.size(), tokens_ * hidden_);
    s.stamp.use(names_.layer(), gate_.get(), mb.index, x.data());
    if (s.scored.size() != tokens_ * experts_)
      fail(
          {names_.layer(), ": backward without what forward keeps: give forward a `saved`, and backward the same one"});
    detail::note_backward(mb, detail::dual_v<output>, down_->name(), dy.data(), dy.size());
    const std::int64_t k = how_.router.chosen;
    buffer<Device> of_sums;
    const T* const dsums = moved(ctx.device, sum_back_, dy.data(), of_sums);
    auto drows = rows_to_send(ctx.device, s.route.rows.leaving);
    if (peers_.padded()) ctx.device.zero(drows.data(), drows.bytes(), ctx.device.main_stream());
    auto dweights = make_buffer<S>(ctx.device, static_cast<std::size_t>(seen_ * k));
    kernels::sum_rows_backward(ctx.device, s.returned.template data<T>(), s.route.places.template data<std::int32_t>(),
                               s.weights.template data<S>(), dsums, drows.template data<T>(),
                               dweights.template data<S>(), seen_, k, hidden_);
    s.returned = {};
    auto din = run_experts_backward(mb, s, peers_.dispatch(ctx.device, s.route, std::move(drows), meanwhile));
    const auto dleaving = peers_.combine(ctx.device, s.route, std::move(din));
    auto dtokens = make_buffer<T>(ctx.device, static_cast<std::size_t>(seen_ * hidden_));
    kernels::sum_rows(ctx.device, dleaving.template data<T>(), s.route.places.template data<std::int32_t>(),
                      static_cast<const S*>(nullptr), dtokens.template data<T>(), seen_, k, hidden_);
    tensor<T, dual_t<input>, Device> of_rows(ctx);
    gather_back_.run(ctx.device, dtokens.data(), of_rows.data(), dtype_of<T>);
    buffer<Device> of_choice;
    const S* const dchoice = moved(ctx.device, weights_back_, dweights.template data<S>(), of_choice);
    tensor<T, dual_t<scores>, Device> dscores(ctx);
    kernels::choose_experts_backward(ctx.device, s.scored.data(), s.choice.template data<std::int32_t>(), dchoice,
                                     dscores.data(), tokens_, experts_, how_.router);
    losses_.backward(mb, s.scored.data(), s.counts, values_of(last_load_), dscores.data());
    return router_.backward(mb, x, s.router, dscores, &of_rows);
  }

  /// How often all tokens of the last training step chose each expert, [experts]; empty before the first step.
  /// Collective over the mesh; waits for the device.
  std::vector<std::int64_t> load(const context<Device>& ctx) const { return counts_->load(ctx); }
  /// Returns `load` with the dropped choices and the router's entropy. Collective over the mesh; waits for the device.
  router_statistics statistics(const context<Device>& ctx) const { return counts_->statistics(ctx); }

  /// Prepares the layer for the batches and lengths of this context (`linear::resize`).
  void resize(const context<Device>& ctx) {
    detail::require_resizable(names_.layer(), static_cast<bool>(sums_));
    router_.resize(ctx);
    losses_.take_sizes(ctx, layout_v<scores>, names_.layer());
    take_sizes(ctx);
  }
  template <class F>
  void visit(F&& f) {
    router_.visit(f);
    for (const auto* p : {&bias_, &last_load_})
      if (*p) f(*names_.checked(*p).get());
    for (const auto* p : {&gate_, &up_, &down_}) f(*names_.checked(*p).get());
    adapters_.visit(f);
  }

 private:
  static const moe_options& checked(const context<Device>& ctx, const std::string& name, const moe_options& how) {
    enforce_boundary<input>(ctx, name + ": input");
    enforce_boundary<output>(ctx, name + ": output");
    enforce_parts(derived.up, ctx.ranks.shape(), ctx.sizes, name);
    const std::int64_t all = ctx.sizes.of(detail::mixture_dims.experts);
    if (how.router.chosen < 1 || how.router.chosen > all)
      fail({name, ": each token chooses ", how.router.chosen, " of ", all, " experts; legal are 1 to ", all});
    detail::check_groups(name, how.router, all);
    if (how.padded && sums_in_order(ctx))
      fail({name, ": its rows are not padded under deterministic sums; legal is moe_options::padded = false"});
    const balance_loss& balance = how.losses.balance;
    if (balance.weight > 0 && balance.over == balance_over::microbatch && sums_in_order(ctx))
      fail({name,
            ": balance_over::microbatch under deterministic sums, and a microbatch has other samples on each "
            "mesh; legal are balance_over::sequence and step"});
    if (how.padded && !detail::opens_padded<exchange, Device>)
      fail({name, ": padded rows need an exchange with `open_padded`, and its exchange has none; legal are ",
            "all_to_all_exchange and moe_options::padded = false"});
    if (how.bias_rate && !(*how.bias_rate >= 0))
      fail({name, ": bias_rate = ", *how.bias_rate, "; legal is 0 (the bias stays) or more"});
    return how;
  }
  parameter_ptr<Precision, Device> weight(const context<Device>& ctx, std::string name, const layout& used,
                                          const layout& met) const {
    layout placed;
    std::vector<std::int64_t> shape;
    for (const dim_placement& p : used.dims) placed.dims.push_back(p), shape.push_back(ctx.sizes.of(p.dim));
    parameter_info info{std::move(name), std::move(shape), how_.init};
    info.stack = true;
    return std::make_shared<parameter<Precision, Device>>(ctx, std::move(info), placed, placed, met);
  }
  /// Freezes a stack of weights and adds an adapter to it, if there is one.
  void adapt(const context<Device>& ctx, typename adapters::which i, parameter<Precision, Device>& p,
             const layout& rows, const layout& product, const lora_options& how) {
    if (how.rank == 0) return;
    adapters_.emplace(i, ctx, p.info(), rows, i == adapters::down ? derived.down : derived.up, product, how);
    p.freeze();
  }
  /// Makes the bias of the choice; null without a bias.
  parameter_ptr<Precision, Device> correction_bias(const context<Device>& ctx, const std::string& name) const {
    if (!how_.bias_rate) return nullptr;
    auto bias = router_state(ctx, name + ".gate.e_score_correction_bias", 0);
    if (*how_.bias_rate > 0) change_after_steps(*bias, {true, *how_.bias_rate});
    return bias;
  }
  /// The state that a balance loss over a step takes for f_e; null: there is none.
  parameter_ptr<Precision, Device> last_load(const context<Device>& ctx, const std::string& name) const {
    if (!(how_.losses.balance.weight > 0) || how_.losses.balance.over != balance_over::step) return nullptr;
    auto load = router_state(ctx, name + last_load_suffix, 1);
    load->initialize(ctx);  // what is loaded need not have it
    change_after_steps(*load, {});
    return load;
  }
  /// A value for each expert that steps change, whole on every rank.
  parameter_ptr<Precision, Device> router_state(const context<Device>& ctx, std::string name, double begins) const {
    layout placed, met;
    placed.dims.push_back({detail::mixture_dims.experts, {}});
    for (axis_id axis : ctx.ranks.shape().axes) met.set(axis, state::invariant);
    parameter_info info{std::move(name), {ctx.sizes.of(detail::mixture_dims.experts)}, {begins, 0}};
    info.decays = false;
    auto kept = std::make_shared<parameter<Precision, Device>>(ctx, std::move(info), placed, placed, met);
    kept->freeze();
    return kept;
  }
  /// After a step, the counts of all ranks are summed, and every rank makes the same change of each expert's value.
  void change_after_steps(parameter<Precision, Device>& kept, kernels::router_state_rule rule) const {
    kept.at_end_of_step([of_step = counts_, rule](auto& p, const context<Device>& at, const auto* clipped) {
      const buffer<Device> counts = of_step->load_on_device(at);
      if (counts.empty()) return;
      kernels::update_router_state(at.device, p.value_in_step(), counts.template data<std::int32_t>(), p.size(), rule,
                                   clipped);
    });
  }
  /// The values that passes read; null without a state.
  static const master_of<Precision>* values_of(const parameter_ptr<Precision, Device>& kept) {
    if (!kept) return nullptr;
    kept->require_gathered();
    return std::as_const(*kept).value();
  }
  void take_deterministic_stages(const context<Device>& ctx) {
    if (!detail::gives_origins<exchange, Device>)
      fail({names_.layer(), ": deterministic sums need the origins of rows, and its exchange gives none; legal is an ",
            "exchange with `origins`"});
    if (adapters_)
      fail({names_.layer(), ": experts have no adapters under deterministic sums; legal is a lora of rank 0"});
    sums_ = {ctx, derived, names_.layer()};
    std::size_t i = 0;
    for (const auto* p : {&gate_, &up_, &down_}) terms_[i++] = &(*p)->add_terms(sums_.leaves());
    outputs_ = &moe::sum_outputs, input_gradients_ = &moe::sum_input_gradients, gradients_ = &moe::sum_gradients;
  }
  void take_sizes(const context<Device>& ctx) {
    const std::string& name = names_.layer();
    dim_sizes sizes = ctx.sizes;
    sizes.set(detail::mixture_dims.chosen, how_.router.chosen);
    gather_ = ready_plan(layout_v<input>, derived.gathered, ctx.ranks, sizes, name);
    gather_back_ = ready_plan(gather_.backward(), ctx.ranks, sizes, name);
    weights_ = ready_plan(derived.choice, derived.weights, ctx.ranks, sizes, name);
    weights_back_ = ready_plan(weights_.backward(), ctx.ranks, sizes, name);
    sum_ = ready_plan(derived.result, layout_v<output>, ctx.ranks, sizes, name);
    sum_back_ = ready_plan(sum_.backward(), ctx.ranks, sizes, name);
    if (sums_) {  // ranks that share experts have complete rows, so they slice where others reduce
      const auto cut = [&](ready_plan& p, const layout& from, const layout& to) {
        p = ready_plan(sums_.complete(from), to, ctx.ranks, sizes, name);
      };
      cut(sum_, derived.result, layout_v<output>);
      cut(gather_back_, dual(derived.gathered), dual(layout_v<input>));
      cut(weights_back_, dual(derived.weights), dual(derived.choice));
    }
    capacity_ = {ctx, derived.choice, sizes, sizes.of(detail::mixture_dims.experts), how_.limit, name};
    experts_ = sizes.of(detail::mixture_dims.experts);
    hidden_ = gather_.source().local[static_cast<std::size_t>(gather_.source().dims - 1)];
    std::function<std::int64_t(const box&)> most_rows;
    if (how_.padded)
      most_rows = [this](const box& chosen) {
        const std::int64_t sequences = chosen.dims == 3 ? chosen.local[0] : 1;
        const std::int64_t tokens = chosen.local_size() / how_.router.chosen;
        return sequences == 0 ? 0 : sequences * capacity_.most_of(tokens / sequences);
      };
    peers_ = {ctx, derived, sizes, hidden_, most_rows};
    tokens_ = weights_.source().local_size() / how_.router.chosen;
    seen_ = weights_.target().local_size() / how_.router.chosen;
    width_ = local_box(derived.up, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank()).local[1];
  }

  /// Returns the array that a plan makes of `in`: `in` itself if no data moves, otherwise an array in `room`.
  template <class E>
  static const E* moved(Device& on, const ready_plan& plan, const E* in, buffer<Device>& room) {
    if (plan.trivial()) return in;
    room = buffer<Device>::for_collectives(on, static_cast<std::size_t>(plan.target().local_size()) * sizeof(E));
    plan.run(on, in, room.data(), dtype_of<E>);
    return room.template data<E>();
  }
  buffer<Device> rows_to_send(Device& on, std::int64_t rows) const {
    return peers_.memory(on, static_cast<std::size_t>(rows * hidden_) * sizeof(T));
  }

  /// If this forward pass is repeated, takes the choice of the first pass; returns whether there was one. A repeated
  /// product may have other bits, and a different choice would not match the loss.
  bool take_first_choice(const microbatch<Device>& mb, saved& s) {
    const auto first = mb.repeats ? first_choices_.find(mb.index) : first_choices_.end();
    if (first == first_choices_.end()) return false;
    s.choice = std::move(first->second);
    first_choices_.erase(first);
    return true;
  }
  /// Computes the experts of each token, their weights and the route of the rows.
  void choose(const microbatch<Device>& mb, saved& s) {
    const context<Device>& ctx = mb.ctx;
    Device& on = ctx.device;
    const std::int64_t k = how_.router.chosen;
    const bool again = take_first_choice(mb, s);
    if (!again) s.choice = make_buffer<std::int32_t>(on, static_cast<std::size_t>(tokens_ * k));
    auto weights = make_buffer<S>(on, static_cast<std::size_t>(tokens_ * k));
    kernels::choose_experts(on, s.scored.data(), values_of(bias_), s.choice.template data<std::int32_t>(),
                            weights.template data<S>(), tokens_, experts_, how_.router, again);
    buffer<Device> kept, seen;
    if (capacity_) {
      kept = make_buffer<std::int32_t>(on, static_cast<std::size_t>(tokens_ * k));
      on.copy(kept.data(), s.choice.data(), kept.bytes(), on.main_stream());
      capacity_.drop(on, kept.template data<std::int32_t>());
    }
    counts_->add(mb, s.scored.data(), s.choice.template data<std::int32_t>(),
                 capacity_ ? kept.template data<std::int32_t>() : nullptr, tokens_, experts_);
    const std::int32_t* const choice =
        moved(on, weights_, (capacity_ ? kept : s.choice).template data<std::int32_t>(), seen);
    if (moved(on, weights_, weights.template data<S>(), s.weights) == weights.template data<S>())
      s.weights = std::move(weights);
    if constexpr (requires { on.capturing(on.main_stream()); }) {
      if (!how_.padded && on.capturing(on.main_stream()))
        fail({names_.layer(), ": a pass waits for the counts of experts' rows, which a graph cannot record; legal is ",
              "moe_options::padded = true"});
    }
    s.route = peers_.route(ctx, choice, seen_, k, static_cast<bool>(sums_));
  }

  using group_of_sum = gemm_group<T, gradient_of<Precision>>;  ///< for a weight's gradient

  /// Returns the experts' outputs for their rows [here, hidden]: down(silu(gate x) * up x).
  buffer<Device> run_experts(Device& on, saved& s) const {
    const std::int64_t here = s.route.here(), f = width_, h = hidden_;
    s.gate_up = make_buffer<T>(on, static_cast<std::size_t>(here * 2 * f));
    s.activated = make_buffer<T>(on, static_cast<std::size_t>(here * f));
    auto made = make_buffer<T>(on, static_cast<std::size_t>(here * h));
    T *const gate_up = s.gate_up.template data<T>(), *const activated = s.activated.template data<T>();
    const T* const in = s.in.template data<T>();
    std::vector<gemm_group<T, T>> groups;
    const auto& begin = s.route.rows.begin;
    for (const auto& [weight, column] : {std::pair(gate_->used_value(), std::int64_t{0}), {up_->used_value(), f}})
      for (std::size_t i = 0; i + 1 < begin.size(); ++i) {
        const std::int64_t e = static_cast<std::int64_t>(i), at = begin[i], n = begin[i + 1] - at;
        if (n > 0)
          groups.push_back(
              {{false, true, n, f, h, h, h, 2 * f}, in + at * h, weight + e * f * h, gate_up + at * 2 * f + column});
      }
    gemm_groups(on, 1.0, groups, 0.0);
    adapters_.forward(adapters::gate, on, begin, in, s.hidden, {gate_up, 2 * f, 0});
    adapters_.forward(adapters::up, on, begin, in, s.hidden, {gate_up, 2 * f, f});
    kernels::swiglu_forward(on, gate_up, activated, here, f);
    (this->*outputs_)(on, begin, activated, made.template data<T>());
    adapters_.forward(adapters::down, on, begin, activated, s.hidden, {made.template data<T>(), h, 0});
    return made;
  }
  void make_outputs(Device& on, const std::vector<std::int64_t>& begin, const T* activated, T* made) const {
    add_outputs(on, begin, activated, 0, width_, made, A(0));
  }
  void sum_outputs(Device& on, const std::vector<std::int64_t>& begin, const T* activated, T* made) const {
    sums_.sum_width(on, begin.back(), hidden_, width_, made,
                    [&](std::int64_t first, std::int64_t columns, A* out, A beta) {
                      add_outputs(on, begin, activated, first, columns, out, beta);
                    });
  }
  /// out [rows, hidden] = beta out + the product of `columns` columns of the width, from `first`.
  template <class Out>
  void add_outputs(Device& on, const std::vector<std::int64_t>& begin, const T* activated, std::int64_t first,
                   std::int64_t columns, Out* out, A beta) const {
    const std::int64_t f = width_, h = hidden_;
    const T* const down = down_->used_value() + first;
    detail::multiply_groups(on, begin, 1.0, beta, [&](std::int64_t e, std::int64_t at, std::int64_t n) {
      const gemm_problem p{false, true, n, h, columns, f, f, h};
      return gemm_group<T, Out>{p, activated + at * f + first, down + e * h * f, out + at * h};
    });
  }
  /// Returns the gradient of the experts' input rows, given that of their outputs. The weights' gradients may be
  /// deferred.
  buffer<Device> run_experts_backward(const microbatch<Device>& mb, saved& s, buffer<Device> dmade) {
    Device& on = mb.ctx.device;
    const std::int64_t here = s.route.here(), f = width_, h = hidden_;
    auto dactivated = make_buffer<T>(on, static_cast<std::size_t>(here * f));
    const T *const from = dmade.template data<T>(), *const down = down_->used_value();
    T* const into = dactivated.template data<T>();
    detail::multiply_groups(on, s.route.rows.begin, 1.0, 0.0, [&](std::int64_t e, std::int64_t at, std::int64_t n) {
      return gemm_group<T, T>{{false, false, n, f, h, h, f, f}, from + at * h, down + e * h * f, into + at * f};
    });
    typename adapters::arrays dhidden;
    adapters_.backward(adapters::down, on, s.route.rows.begin, {from, h, 0}, dhidden, into);
    auto dgate_up = make_buffer<T>(on, static_cast<std::size_t>(here * 2 * f));
    kernels::swiglu_backward(on, s.gate_up.template data<T>(), dactivated.template data<T>(),
                             dgate_up.template data<T>(), here, f);
    auto din = make_buffer<T>(on, static_cast<std::size_t>(here * h));
    const T* const of_both = dgate_up.template data<T>();
    (this->*input_gradients_)(on, s.route.rows.begin, of_both, din.template data<T>());
    adapters_.backward(adapters::gate, on, s.route.rows.begin, {of_both, 2 * f, 0}, dhidden, din.template data<T>());
    adapters_.backward(adapters::up, on, s.route.rows.begin, {of_both, 2 * f, f}, dhidden, din.template data<T>());
    mb.on_weights([this, &on, f, index = mb.index, count = mb.count, begin = s.route.rows.begin,
                   origins = std::move(s.route.origins), in = std::move(s.in), activated = std::move(s.activated),
                   dmade = std::move(dmade), dgate_up = std::move(dgate_up), hidden = std::move(s.hidden),
                   dhidden = std::move(dhidden)] {
      const range shown(on, names_.weights());
      const T *const x = in.template data<T>(), *const inside = activated.template data<T>();
      const T *const d = dmade.template data<T>(), *const both = dgate_up.template data<T>();
      (this->*gradients_)(on, index, count, begin, origins, x, inside, d, both);
      adapters_.add_gradients(adapters::gate, on, begin, x, {both, 2 * f, 0}, hidden, dhidden);
      adapters_.add_gradients(adapters::up, on, begin, x, {both, 2 * f, f}, hidden, dhidden);
      adapters_.add_gradients(adapters::down, on, begin, inside, {d, hidden_, 0}, hidden, dhidden);
    });
    return din;
  }
  void make_input_gradients(Device& on, const std::vector<std::int64_t>& begin, const T* dgate_up, T* din) const {
    add_input_gradients(on, begin, dgate_up, 0, width_, din, A(0));
  }
  void sum_input_gradients(Device& on, const std::vector<std::int64_t>& begin, const T* dgate_up, T* din) const {
    sums_.sum_width(on, begin.back(), hidden_, width_, din,
                    [&](std::int64_t first, std::int64_t columns, A* out, A beta) {
                      add_input_gradients(on, begin, dgate_up, first, columns, out, beta);
                    });
  }
  /// out [rows, hidden] = beta out + the product of `columns` columns of gate and up, from `first`.
  template <class Out>
  void add_input_gradients(Device& on, const std::vector<std::int64_t>& begin, const T* dgate_up, std::int64_t first,
                           std::int64_t columns, Out* out, A beta) const {
    const std::int64_t f = width_, h = hidden_;
    for (const auto& [of, column] : {std::pair(gate_.get(), std::int64_t{0}), std::pair(up_.get(), f)}) {
      const T* const weight = of->used_value() + first * h;
      const std::int64_t from = column + first;  // a rank without rows has no array, so this is only an offset
      detail::multiply_groups(
          on, begin, 1.0, column == 0 ? beta : A(1), [&](std::int64_t e, std::int64_t at, std::int64_t n) {
            const gemm_problem p{false, false, n, h, columns, 2 * f, h, h};
            return gemm_group<T, Out>{p, dgate_up + at * 2 * f + from, weight + e * f * h, out + at * h};
          });
    }
  }
  /// Adds to the gradients of experts' weights. An expert without rows adds nothing, but its gradient is still reduced.
  void add_gradients(Device& on, std::int64_t, std::int64_t, const std::vector<std::int64_t>& begin, const row_origins&,
                     const T* in, const T* activated, const T* dmade, const T* dgate_up) {
    const std::int64_t f = width_, h = hidden_;
    for (const auto& [p, column] : {std::pair(gate_.get(), std::int64_t{0}), std::pair(up_.get(), f)}) {
      if (!p->trainable()) continue;
      gradient_of<Precision>* const sum = p->used_gradient(on);
      const std::int64_t from = column;
      detail::multiply_groups(on, begin, 1.0, 1.0, [&](std::int64_t e, std::int64_t at, std::int64_t n) {
        return group_of_sum{
            {true, false, f, h, n, 2 * f, h, h}, dgate_up + at * 2 * f + from, in + at * h, sum + e * f * h};
      });
    }
    if (!down_->trainable()) return;
    gradient_of<Precision>* const sum = down_->used_gradient(on);
    detail::multiply_groups(on, begin, 1.0, 1.0, [&](std::int64_t e, std::int64_t at, std::int64_t n) {
      return group_of_sum{{true, false, h, f, n, h, f, f}, dmade + at * h, activated + at * f, sum + e * h * f};
    });
  }

  void sum_gradients(Device& on, std::int64_t index, std::int64_t count, const std::vector<std::int64_t>& begin,
                     const row_origins& origins, const T* in, const T* activated, const T* dmade, const T* dgate_up) {
    const std::int64_t f = width_, h = hidden_;
    const auto leaves = sums_.by_leaf(index, count, begin, origins.peers, origins.tokens);
    const auto add = [&](auto& p, gradient_terms<Precision, Device>* terms, detail::expert_factor<T> of_outputs,
                         detail::expert_factor<T> of_inputs) {
      if (!p.trainable()) return;
      p.begin_terms();
      sums_.add_products(on, *terms, leaves, of_outputs, of_inputs);
    };
    add(*gate_, terms_[0], {dgate_up, f, 2 * f}, {in, h, h});
    add(*up_, terms_[1], {dgate_up + f, f, 2 * f}, {in, h, h});
    add(*down_, terms_[2], {dmade, h, h}, {activated, f, f});
  }

  // The stages of the experts' products, chosen at construction; deterministic sums replace them.
  using row_stage = void (moe::*)(Device&, const std::vector<std::int64_t>& begin, const T* from, T* to) const;
  using gradient_stage = void (moe::*)(Device&, std::int64_t index, std::int64_t count,
                                       const std::vector<std::int64_t>& begin, const row_origins&, const T* in,
                                       const T* activated, const T* dmade, const T* dgate_up);

  detail::layer_names names_;
  moe_options how_;
  router_layer router_;
  std::shared_ptr<detail::router_counts<Device>> counts_;
  parameter_ptr<Precision, Device> bias_, last_load_;  ///< null without them
  parameter_ptr<Precision, Device> gate_, up_, down_;
  adapters adapters_;
  detail::expert_peers<exchange, Device> peers_;
  detail::expert_capacity<Device> capacity_;
  std::map<std::int64_t, buffer<Device>> first_choices_;  ///< of microbatches whose forward pass will be repeated
  detail::router_loss_terms<Device> losses_;
  detail::deterministic_experts<Precision, Device> sums_;
  gradient_terms<Precision, Device>* terms_[3] = {};  ///< for gate, up and down
  row_stage outputs_ = &moe::make_outputs, input_gradients_ = &moe::make_input_gradients;
  gradient_stage gradients_ = &moe::add_gradients;
  ready_plan gather_, gather_back_, weights_, weights_back_, sum_, sum_back_;
  std::int64_t experts_ = 0, hidden_ = 0, width_ = 0;
  std::int64_t tokens_ = 0, seen_ = 0;  ///< numbers of tokens: of this rank's input, and of those whose rows it sums
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
