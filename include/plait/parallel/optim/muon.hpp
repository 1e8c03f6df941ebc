// Muon: matrices of hidden layers move in directions that are nearly orthogonal; AdamW updates everything else.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/world.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/buffer.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/balance_owners.hpp"
#include "plait/layout/local_box.hpp"
#include "plait/parallel/optim/muon_options.hpp"
#include "plait/parallel/optim/optimizer_state.hpp"
#include "plait/tensor/check_values.hpp"

namespace plait {

// Matrices that the ranks of a group store in parts, shared out among them: each has one owner, who is sent the parts,
// works on the whole and sends them back.

/// A matrix that is stored in parts: how it lies, and what its owner's work on it costs, in any unit.
struct stored_matrix {
  layout stored;
  dim_sizes sizes;
  double cost = 0;
};

/// The owners of matrices that the same axes shard, and their exchange made ready for one rank. In each round every
/// rank has at most one matrix, so that no more memory is needed than for one: its dearest one in the first round.
class matrix_owners {
 public:
  /// A round as this rank sees it; counts and offsets are in elements.
  struct round {
    std::vector<int> matrices;  ///< by owner; -1 where it has none any more
    int own = -1;               ///< this rank's
    /// This rank's parts of the round's matrices, by owner, as they lie one after the other.
    std::vector<std::size_t> part_size, part_at;
    /// The parts that all ranks have of this rank's matrix.
    std::vector<std::size_t> piece_size, piece_at;

    std::size_t part_elements() const { return part_at.back() + part_size.back(); }
    std::size_t own_elements() const { return piece_at.back() + piece_size.back(); }
  };

  /// `axes`, in the mesh's order, are those of several ranks that shard every one of `matrices`. Every rank of the
  /// group gives the same ones in the same order.
  matrix_owners(world& w, const axis_list& axes, const std::vector<stored_matrix>& matrices);

  const std::vector<round>& rounds() const { return rounds_; }
  /// Whether the group is this rank alone, so that a part is a whole matrix and there is nothing to exchange.
  bool alone() const { return group_ == nullptr; }

  /// Returns this rank's matrix of a round, whole and row-major; empty if it has none. `parts` are this rank's parts of
  /// the round's matrices, in memory for collectives. Collective over the group, which must not be one rank alone.
  template <compute_device Device>
  buffer<Device> collect(Device& device, const round& r, const void* parts, dtype type) const {
    const std::size_t element = size_of(type);
    auto pieces = buffer<Device>::for_collectives(device, r.own_elements() * element);
    group_->all_to_all_v(parts, r.part_size, r.part_at, pieces.data(), r.piece_size, r.piece_at, type);
    if (r.own < 0) return {};
    buffer<Device> whole(device, r.own_elements() * element);
    for_each_piece(r, [&](const box& piece, const box& all, std::size_t at) {
      kernels::copy_box(device, static_cast<const char*>(pieces.data()) + at * element, piece, whole.data(), all, piece,
                        static_cast<std::int64_t>(element));
    });
    return whole;
  }
  /// The way back: sends the parts of `whole`, this rank's matrix of a round, to the ranks that store them, and writes
  /// `parts`. Collective over the group.
  template <compute_device Device>
  void spread(Device& device, const round& r, const void* whole, void* parts, dtype type) const {
    const std::size_t element = size_of(type);
    auto pieces = buffer<Device>::for_collectives(device, r.own_elements() * element);
    for_each_piece(r, [&](const box& piece, const box& all, std::size_t at) {
      kernels::copy_box(device, whole, all, static_cast<char*>(pieces.data()) + at * element, piece, piece,
                        static_cast<std::int64_t>(element));
    });
    group_->all_to_all_v(pieces.data(), r.piece_size, r.piece_at, parts, r.part_size, r.part_at, type);
  }

 private:
  std::size_t elements(int matrix, std::size_t member) const {
    return matrix < 0 ? 0 : static_cast<std::size_t>(parts_[static_cast<std::size_t>(matrix)][member].local_size());
  }
  /// Calls f(part, whole, offset) for the part that each rank has of this rank's matrix.
  template <class F>
  void for_each_piece(const round& r, F&& f) const {
    if (r.own < 0) return;
    const std::vector<box>& parts = parts_[static_cast<std::size_t>(r.own)];
    box whole = parts[0];
    whole.local = whole.global;
    whole.offset = {};
    for (std::size_t rank = 0; rank < parts.size(); ++rank) f(parts[rank], whole, r.piece_at[rank]);
  }

  any_communicator* group_ = nullptr;
  std::vector<std::vector<box>> parts_;  ///< of each matrix, what each rank of the group stores
  std::vector<round> rounds_;
};

/// Muon (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982) with decoupled weight decay, on the matrices of hidden
/// layers (`is_hidden_matrix`), and AdamW on all other parameters. It keeps one moment of a matrix, as it is stored.
///
/// The ranks of a group that store parts of matrices share the work between them: each matrix has one owner, who makes
/// it orthogonal and sends the parts back. Ranks that store whole copies, as along dp, each do the same work. All ranks
/// of a stage update the same parameters in the same order.
///
/// On a GPU in bf16, the factors of products are bf16 and their sums float.
template <class Precision, compute_device Device = cpu>
class muon {
  using M = master_of<Precision>;
  using G = gradient_of<Precision>;
  using W = weight_of<Precision>;

 public:
  using reduced = reduced_gradient<Precision, Device>;

  explicit muon(muon_options options = {}) : options_(options), others_(options.adamw) { check(options); }

  /// Starts a step, in which every parameter may be updated once. Gradients are multiplied with `gradient_scale`.
  void begin_step(const context<Device>& ctx, double learning_rate, double gradient_scale = 1.0) {
    others_.begin_step(ctx, learning_rate, gradient_scale);
    detail::agree_in_checked_step(ctx, "muon::begin_step", [&] {
      return std::vector<setting>{{"momentum", exact_text(options_.momentum)},
                                  {"nesterov", options_.nesterov ? "yes" : "no"},
                                  {"learning_rate_ratio", exact_text(options_.learning_rate_ratio)},
                                  {"weight_decay", exact_text(options_.weight_decay)}};
    });
    momenta_.begin_step();
  }
  /// See `adamw::clip_by`.
  void clip_by(const context<Device>& ctx, const kernels::clip_numbers* clipped) { others_.clip_by(ctx, clipped); }
  /// See `adamw::take_step`.
  void take_step() { others_.take_step(); }
  /// See `adamw::forget_step`.
  void forget_step() { others_.forget_step(); }
  /// How many steps there were, without skipped ones.
  std::int64_t step() const { return others_.step(); }
  /// See `adamw::resume`.
  void resume(std::int64_t step, std::map<std::string, std::int64_t> missed = {}) {
    others_.resume(step, std::move(missed));
  }
  /// See `adamw::missed_steps`.
  std::map<std::string, std::int64_t> missed_steps() const { return others_.missed_steps(); }
  /// Calls f(optimizer_tensor) for the momentum of a hidden matrix, and for others as `adamw::visit_state`.
  template <class F>
  void visit_state(const context<Device>& ctx, const parameter<Precision, Device>& p, F&& f) {
    if (!is_hidden_matrix(p.info())) return others_.visit_state(ctx, p, f);
    const std::int64_t n = p.piece().size();
    if (n == 0) return;
    f(optimizer_tensor{"momentum_buffer", optimizer_tensor::code::none, narrow() ? dtype::bf16 : dtype_of<M>,
                       momenta_.find(ctx, p.name(), n, momentum_bytes(n)), nullptr, 0, n});
  }

  /// Throws where data parallelism cuts a hidden matrix, or another parameter as `adamw::prepare` says. Collective: a
  /// rank that owns none of the matrices takes part in making the communicators of those that do.
  void prepare(const context<Device>& ctx, const parameter<Precision, Device>& p) {
    if (!is_hidden_matrix(p.info())) return others_.prepare(ctx, p);
    check_cut(ctx, p);
    if (p.piece().size() == 0) momenta_.drop(p.name());  // another data rank's; loaded before that was known
  }
  /// The checks of `prepare`.
  void check_cut(const context<Device>& ctx, const parameter<Precision, Device>& p) const {
    if (!is_hidden_matrix(p.info())) return others_.check_cut(ctx, p);
    const axis_list axes = sharding_axes(p.stored(), ctx.ranks.shape());
    if (!axes.empty()) static_cast<void>(ctx.ranks.group(axes));
    const std::int64_t n = p.piece().size();
    if (n != 0 && n != p.size())
      fail({"muon: data parallelism cuts the matrix ", p.name(),
            " into pieces, and its update needs all of it: use bucket_cut::whole, or zero_level::replicated"});
  }

  /// A gradient of another precision is refused in words.
  template <class Other>
    requires(!std::is_same_v<Other, Precision>)
  void update(const context<Device>&, const reduced_gradient<Other, Device>&) {
    detail::require_one_precision<Precision, Other>();
  }
  void update(const context<Device>& ctx, reduced g) { update(ctx, std::span<reduced>(&g, 1)); }
  /// Updates several parameters together. Collective over the axes that shard hidden matrices.
  void update(const context<Device>& ctx, std::span<reduced> gradients) {
    std::vector<reduced> matrices, others;
    for (reduced& g : gradients) {
      auto& p = g.parameter();
      momenta_.require_own_memory(p);
      const bool hidden = is_hidden_matrix(p.info());
      if (hidden) {
        detail::note_update(ctx, g);
        note_momentum(ctx, p);
      }
      if (hidden && g.size() == 0) {  // another data rank's
        static_cast<void>(p.begin_update());
        continue;
      }
      check_cut(ctx, p);
      (hidden ? matrices : others).push_back(std::move(g));
    }
    others_.update(ctx, std::span<reduced>(others));
    if (matrices.empty()) return;
    std::vector<matrix> all;
    std::vector<std::string> names;
    for (const reduced& g : matrices) {
      all.push_back(describe(ctx, g));
      names.push_back(g.parameter().name());
    }
    auto known = shared_out_.find(names);
    if (known == shared_out_.end()) known = shared_out_.emplace(std::move(names), share_out(ctx, matrices)).first;
    for (const group& of_axes : known->second)
      for (const matrix_owners::round& r : of_axes.owners.rounds()) run(ctx, of_axes, r, all);
  }

 private:
  /// A hidden matrix in a step.
  struct matrix {
    const G* gradient;
    std::byte* momentum;
    M* master;
    W* rounded;
    std::int64_t columns, size;
    double scale, decay;
    kernels::rounded_elements elements;
  };
  /// The matrices that the same axes shard, by their places in the step.
  struct group {
    axis_list axes;
    std::vector<std::size_t> members;
    matrix_owners owners;
  };

  matrix describe(const context<Device>& ctx, const reduced& g) {
    auto& p = g.parameter();
    const G* const gradient = g.data();
    const auto target = p.begin_update();
    std::byte* const momentum = momenta_.update(ctx, p.name(), p.size(), momentum_bytes(p.size()), p.array());
    const std::int64_t rows = p.info().shape[0], columns = p.info().shape[1];
    const double rate = options_.learning_rate_ratio;
    return {gradient,
            momentum,
            target.master,
            target.rounded,
            columns,
            p.size(),
            rate * scale_of(options_.scale, rows, columns),
            p.info().decays ? rate * options_.weight_decay : 0.0,
            {kernels::run_map::of(p.part()), 0, p.stream_of(p.name())}};
  }
  /// Notes this rank's momentum, but in the first step, where it is zero.
  void note_momentum(const context<Device>& ctx, const parameter<Precision, Device>& p) {
    if constexpr (!only_counts<Device>) {
      if (step() == 1 || !detail::notes_values(ctx)) return;
      const std::int64_t n = p.piece().size();
      const std::byte* const memory = n == 0 ? nullptr : momenta_.find(ctx, p.name(), n, momentum_bytes(n));
      if (narrow())
        detail::note_piece(ctx, p, "the momentum of ", reinterpret_cast<const bf16*>(memory), n);
      else
        detail::note_piece(ctx, p, "the momentum of ", reinterpret_cast<const M*>(memory), n);
    }
  }
  bool narrow() const { return options_.adamw.moments == moment_type::bf16; }
  std::size_t momentum_bytes(std::int64_t elements) const {
    return static_cast<std::size_t>(elements) * (narrow() ? sizeof(bf16) : sizeof(M));
  }

  static std::vector<group> share_out(const context<Device>& ctx, const std::vector<reduced>& matrices) {
    struct part {
      axis_list axes;
      std::vector<std::size_t> members;
      std::vector<stored_matrix> stored;
    };
    std::vector<part> parts;
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      const auto& p = matrices[i].parameter();
      const axis_list axes = sharding_axes(p.stored(), ctx.ranks.shape());
      auto at = std::find_if(parts.begin(), parts.end(), [&](const part& one) { return one.axes == axes; });
      if (at == parts.end()) at = parts.insert(parts.end(), {axes, {}, {}});
      at->members.push_back(i);
      at->stored.push_back({p.stored(), p.sizes(), update_cost(p.info())});
    }
    std::vector<group> groups;
    for (const part& one : parts)
      groups.push_back({one.axes, one.members, matrix_owners(ctx.ranks, one.axes, one.stored)});
    return groups;
  }

  /// One round: momenta, then this rank's matrix made orthogonal, then all updates.
  void run(const context<Device>& ctx, const group& of_axes, const matrix_owners::round& r,
           const std::vector<matrix>& all) {
    auto directions = make_collective_buffer<M>(ctx.device, r.part_elements());
    std::vector<kernels::muon_momentum_tensor<M, G>> momenta;
    std::vector<kernels::muon_rounded_tensor<M, G>> narrow_momenta;
    std::vector<kernels::muon_tensor<M, W>> updates;
    for (std::size_t owner = 0; owner < r.matrices.size(); ++owner) {
      if (r.matrices[owner] < 0) continue;
      const matrix& m = all[of_axes.members[static_cast<std::size_t>(r.matrices[owner])]];
      M* const direction = directions.template data<M>() + r.part_at[owner];
      if (narrow())
        narrow_momenta.push_back({m.gradient, reinterpret_cast<bf16*>(m.momentum), direction, m.size, m.elements});
      else
        momenta.push_back({m.gradient, reinterpret_cast<M*>(m.momentum), direction, m.size});
      updates.push_back({m.master, direction, m.rounded, m.size, m.scale, m.decay});
    }
    const kernels::muon_settings settings{options_.momentum, options_.nesterov};
    if (narrow())
      kernels::muon_momentum(ctx.device, std::span<const kernels::muon_rounded_tensor<M, G>>(narrow_momenta), settings,
                             others_.scalars());
    else
      kernels::muon_momentum(ctx.device, std::span<const kernels::muon_momentum_tensor<M, G>>(momenta), settings,
                             others_.scalars());
    buffer<Device> collected;
    if (!of_axes.owners.alone()) collected = of_axes.owners.collect(ctx.device, r, directions.data(), dtype_of<M>);
    if (r.own >= 0) {
      M* const whole = of_axes.owners.alone() ? directions.template data<M>() : collected.template data<M>();
      const std::int64_t columns = all[of_axes.members[static_cast<std::size_t>(r.own)]].columns;
      newton_schulz<W>(ctx.device, whole, static_cast<std::int64_t>(r.own_elements()) / columns, columns,
                       options_.newton_schulz);
    }
    if (!of_axes.owners.alone()) of_axes.owners.spread(ctx.device, r, collected.data(), directions.data(), dtype_of<M>);
    kernels::muon_update(ctx.device, std::span<const kernels::muon_tensor<M, W>>(updates), others_.scalars());
  }

  muon_options options_;
  adamw<Precision, Device> others_;
  optimizer_state<Device> momenta_{"muon"};
  std::map<std::vector<std::string>, std::vector<group>> shared_out_;  ///< by the matrices of a step
};

PLAIT_COMPILED_TEMPLATE(class muon<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class muon<double, cpu>)
PLAIT_COMPILED_TEMPLATE(class muon<bf16, cpu>)

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/parallel/optim/muon.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
