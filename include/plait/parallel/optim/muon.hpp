// Muon, which updates matrices of hidden layers in nearly orthogonal directions; AdamW updates all other parameters.
#pragma once

#include <algorithm>
#include <cmath>
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
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/layout.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "plait/parallel/optim/optimizer.hpp"
#include "plait/parallel/placement.hpp"
#include "plait/tensor/check_values.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

// The Newton-Schulz iteration that makes a matrix nearly orthogonal, by products on the device.

/// The polynomial of a step, a s + b s^3 + c s^5 for each singular value s, and the number of steps. The default
/// (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks") maps values between 0.002 and 1 to
/// values between 0.7 and 1.2 in five steps.
struct newton_schulz_options {
  int steps = 5;
  double a = 3.4445, b = -4.7750, c = 2.0315;
  double epsilon = 1e-7;  ///< added to the norm by which the matrix is first divided
};

/// Replaces the row-major `x` [rows, columns] approximately by U V', where U S V' is its singular value decomposition:
///   X = x / (|x| + epsilon);  in each step: A = X X';  B = b A + c A^2;  X = a X + B X,
/// with the Frobenius norm. If there are more rows than columns, A = X' X and X = a X + X B, which gives the same
/// result with a smaller A. T is float or double. Products take factors of type `Factor` (T, or bf16 for float), and
/// sum in T. A zero matrix stays zero. The host does not wait.
template <class Factor, class T, compute_device Device>
void newton_schulz(Device& device, T* x, std::int64_t rows, std::int64_t columns,
                   const newton_schulz_options& how = {}) {
  const std::int64_t n = rows * columns, k = std::min(rows, columns);
  if (n == 0) return;
  const bool tall = rows > columns;
  auto sum = make_buffer<double>(device, 1);
  auto* const squares = sum.template data<double>();
  device.zero(squares, sizeof(double), device.main_stream());
  const kernels::const_elements<T> all{x, n};
  kernels::add_sum_squares(device, std::span<const kernels::const_elements<T>>(&all, 1), squares);
  kernels::divide_by_norm(device, static_cast<const T*>(x), x, n, squares, how.epsilon);

  auto products = make_buffer<T>(device, static_cast<std::size_t>(k * k));
  auto x_factors = make_buffer<Factor>(device, static_cast<std::size_t>(n)),
       a_factors = make_buffer<Factor>(device, static_cast<std::size_t>(k * k));
  T* const a = products.template data<T>();
  auto* const xf = x_factors.template data<Factor>();
  auto* const af = a_factors.template data<Factor>();
  const auto as_factors = [&](const T* from, Factor* to, std::int64_t count) {
    if constexpr (std::is_same_v<T, Factor>) {
      device.copy(to, from, static_cast<std::size_t>(count) * sizeof(T), device.main_stream());
    } else {
      kernels::cast(device, from, to, count);
    }
  };
  const T one = 1, zero = 0, scale = static_cast<T>(how.a), linear = static_cast<T>(how.b),
          square = static_cast<T>(how.c);
  for (int step = 0; step < how.steps; ++step) {
    as_factors(x, xf, n);
    device.gemm(tall, !tall, k, k, tall ? rows : columns, one, static_cast<const Factor*>(xf), columns,
                static_cast<const Factor*>(xf), columns, zero, a, k);
    as_factors(a, af, k * k);
    device.gemm(false, false, k, k, k, square, static_cast<const Factor*>(af), k, static_cast<const Factor*>(af), k,
                linear, a, k);
    as_factors(a, af, k * k);
    if (tall) {
      device.gemm(false, false, rows, columns, k, one, static_cast<const Factor*>(xf), columns,
                  static_cast<const Factor*>(af), k, scale, x, columns);
    } else {
      device.gemm(false, false, rows, columns, k, one, static_cast<const Factor*>(af), k,
                  static_cast<const Factor*>(xf), columns, scale, x, columns);
    }
  }
}

// The policy of Muon: its options, the parameters that it updates, and the size of a matrix' update.

/// The factor of a matrix' update, in addition to the learning rate; names as in torch.optim.Muon.
enum class muon_scale : std::uint8_t {
  original,         ///< max(1, rows / columns)^0.5 (Jordan et al. 2024)
  match_rms_adamw,  ///< 0.2 max(rows, columns)^0.5, the size of AdamW's updates (Liu et al. 2025, arXiv 2502.16982)
};

struct muon_options {
  double momentum = 0.95;
  bool nesterov = true;
  muon_scale scale = muon_scale::match_rms_adamw;
  double learning_rate_ratio = 1.0;  ///< the learning rate of hidden matrices divided by the step's, which AdamW uses
  double weight_decay = 0.1;         ///< for hidden matrices that decay
  newton_schulz_options newton_schulz{};
  adamw_options adamw{};  ///< for all other parameters; `moments` is also the format of Muon's momentum
};

/// Throws unless the options are legal.
inline void check(const muon_options& o) {
  if (!(o.momentum >= 0 && o.momentum < 1)) fail({"muon: momentum = ", o.momentum, ", must be at least 0 and below 1"});
  if (!(o.learning_rate_ratio > 0 && std::isfinite(o.learning_rate_ratio)))
    fail({"muon: learning_rate_ratio = ", o.learning_rate_ratio, ", must be positive and finite"});
  if (!(o.weight_decay >= 0)) fail({"muon: weight_decay = ", o.weight_decay, ", must be at least 0"});
  if (o.scale != muon_scale::original && o.scale != muon_scale::match_rms_adamw)
    fail({"muon: scale = ", static_cast<int>(o.scale), ", must be original or match_rms_adamw"});
  if (o.newton_schulz.steps < 1) fail({"muon: newton_schulz.steps = ", o.newton_schulz.steps, ", must be at least 1"});
  if (!(o.newton_schulz.epsilon > 0))
    fail({"muon: newton_schulz.epsilon = ", o.newton_schulz.epsilon, ", must be positive"});
  if (o.adamw.moments != moment_type::full && o.adamw.moments != moment_type::bf16)
    fail({"muon: adamw.moments = ", name_of(o.adamw.moments), ", must be full or bf16, as Muon's own momentum is"});
}

/// Returns the factor of a matrix' update.
inline double scale_of(muon_scale scale, std::int64_t rows, std::int64_t columns) {
  const auto r = static_cast<double>(rows), c = static_cast<double>(columns);
  return scale == muon_scale::original ? std::sqrt(std::max(1.0, r / c)) : 0.2 * std::sqrt(std::max(r, c));
}

// Distributes matrices that a group of ranks stores in parts. Each matrix has one owner, which collects its parts,
// works on the whole matrix and returns the parts.

/// A matrix that is stored in parts: its layout, and the cost of its owner's work in any unit.
struct stored_matrix {
  layout stored;
  dim_sizes sizes;
  double cost = 0;
};

/// The owners of the matrices that one set of axes shards, and their exchange, prepared for one rank. In each round a
/// rank has at most one matrix, so it needs memory for one. The costliest matrix comes first.
class matrix_owners {
 public:
  /// A round from this rank's viewpoint; counts and offsets are in elements.
  struct round {
    std::vector<int> matrices;  ///< index of each owner's matrix; -1 if it has none left
    int own = -1;               ///< index of this rank's matrix
    /// This rank's parts of the round's matrices: sizes and offsets, by owner.
    std::vector<std::size_t> part_size, part_at;
    /// All ranks' parts of this rank's matrix: sizes and offsets.
    std::vector<std::size_t> piece_size, piece_at;

    std::size_t part_elements() const { return part_at.back() + part_size.back(); }
    std::size_t own_elements() const { return piece_at.back() + piece_size.back(); }
  };

  /// `axes`, in the mesh's order, have several ranks and shard each of `matrices`. Every rank of the group passes equal
  /// matrices in the same order.
  matrix_owners(world& w, const axis_list& axes, const std::vector<stored_matrix>& matrices);

  const std::vector<round>& rounds() const { return rounds_; }
  /// Whether the group has one rank, so parts are whole matrices and no exchange is needed.
  bool alone() const { return group_ == nullptr; }

  /// Returns this rank's whole, row-major matrix of a round; empty if it has none. `parts` holds this rank's parts of
  /// the round's matrices, in memory for collectives. Collective over the group, which must have several ranks.
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
  /// The inverse: sends the parts of `whole`, this rank's matrix of a round, to the ranks that store them. Receives
  /// this rank's `parts`. Collective over the group.
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
  /// Calls f(part, whole, offset) for each rank's part of this rank's matrix.
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
  std::vector<std::vector<box>> parts_;  ///< for each matrix, each rank's part
  std::vector<round> rounds_;
};

/// Muon (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982) with decoupled weight decay, on the matrices of hidden
/// layers (`is_hidden_matrix`), and AdamW on all other parameters. Each matrix of a stack has an update of its own, as
/// each expert's does. It keeps one moment per matrix, in the stored layout.
///
/// Ranks that store parts of matrices share the work: each matrix has one owner, which makes it orthogonal and returns
/// the parts. Ranks with whole copies, such as along dp, each do all of the work. All ranks of a stage must update
/// their parameters in the same order.
///
/// On a GPU in bf16, products have bf16 factors and float sums.
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
  /// The number of steps, without skipped ones.
  std::int64_t step() const { return others_.step(); }
  /// See `adamw::resume`.
  void resume(std::int64_t step, std::map<std::string, std::int64_t> missed = {}) {
    others_.resume(step, std::move(missed));
  }
  /// See `adamw::missed_steps`.
  std::map<std::string, std::int64_t> missed_steps() const { return others_.missed_steps(); }
  /// Calls f(optimizer_tensor) for the momentum of a hidden matrix; for other parameters calls `adamw::visit_state`.
  template <class F>
  void visit_state(const context<Device>& ctx, const parameter<Precision, Device>& p, F&& f) {
    if (!is_hidden_matrix(p.info())) return others_.visit_state(ctx, p, f);
    const std::int64_t n = p.slice().size();
    if (n == 0) return;
    f(optimizer_tensor{"momentum_buffer", optimizer_tensor::code::none, narrow() ? dtype::bf16 : dtype_of<M>,
                       momenta_.find(ctx, p.name(), n, momentum_bytes(n)), nullptr, 0, n});
  }

  /// Throws if data parallelism splits a hidden matrix; for other parameters calls `adamw::prepare`. Collective: ranks
  /// without matrices also take part in creating the owners' communicators.
  void prepare(const context<Device>& ctx, const parameter<Precision, Device>& p) {
    if (!is_hidden_matrix(p.info())) return others_.prepare(ctx, p);
    check_cut(ctx, p);
    if (p.slice().size() == 0) momenta_.drop(p.name());  // another data rank's state, loaded before the split
  }
  /// Makes the checks of `prepare`.
  void check_cut(const context<Device>& ctx, const parameter<Precision, Device>& p) const {
    if (!is_hidden_matrix(p.info())) return others_.check_cut(ctx, p);
    const axis_list axes = sharding_axes(layout_of_matrix(p), ctx.ranks.shape());
    if (!axes.empty()) static_cast<void>(ctx.ranks.group(axes));
    const std::int64_t n = p.slice().size();
    if (n != 0 && n != p.size())
      fail({"muon: data parallelism cuts the matrix ", p.name(),
            " into pieces, and its update needs all of it: use bucket_cut::whole, or zero_level::replicated"});
  }

  /// Reduces the gradients of all trainable parameters of layers or models, and updates them. Collective.
  template <detail::visits_parameters Layer, detail::visits_parameters... Layers>
  void update(const context<Device>& ctx, Layer& layer, Layers&... layers) {
    std::vector<reduced> all = detail::reduced_gradients<Precision>(ctx, layer, layers...);
    update(ctx, std::span<reduced>(all));
  }
  /// Refuses a gradient of another precision with a readable text.
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
      if (hidden && g.size() == 0) {  // belongs to another data rank
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
      describe(ctx, g, all);
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
  /// The matrices that one set of axes shards, by their indices in the step.
  struct group {
    axis_list axes;
    std::vector<std::size_t> members;
    matrix_owners owners;
  };

  /// The number of a parameter's matrices on this rank.
  static std::int64_t matrices_of(const parameter<Precision, Device>& p) {
    return p.info().stack ? p.part().local[0] : 1;
  }
  /// The layout of each of a parameter's matrices.
  static layout layout_of_matrix(const parameter<Precision, Device>& p) {
    layout one = p.stored();
    if (p.info().stack) one.dims.erase(0);
    return one;
  }
  /// Adds the matrices of a parameter on this rank to `all`.
  void describe(const context<Device>& ctx, const reduced& g, std::vector<matrix>& all) {
    auto& p = g.parameter();
    const G* const gradient = g.data();
    const auto target = p.begin_update();
    std::byte* const momentum = momenta_.update(ctx, p.name(), p.size(), momentum_bytes(p.size()), p.array());
    const std::size_t last = p.info().shape.size() - 1;
    const std::int64_t rows = p.info().shape[last - 1], columns = p.info().shape[last];
    const std::int64_t size = p.size() / matrices_of(p);
    const double rate = options_.learning_rate_ratio;
    for (std::int64_t at = 0; at < p.size(); at += size)
      all.push_back({gradient + at,
                     momentum + momentum_bytes(at),
                     target.master + at,
                     target.rounded ? target.rounded + at : nullptr,
                     columns,
                     size,
                     rate * scale_of(options_.scale, rows, columns),
                     p.info().decays ? rate * options_.weight_decay : 0.0,
                     {kernels::run_map::of(p.part()), at, p.stream_of(p.name())}});
  }
  /// Notes this rank's momentum for comparison, except in the first step, when it is zero.
  void note_momentum(const context<Device>& ctx, const parameter<Precision, Device>& p) {
    if constexpr (!only_counts<Device>) {
      if (step() == 1 || !detail::notes_values(ctx)) return;
      const std::int64_t n = p.slice().size();
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
    std::size_t index = 0;
    for (const reduced& g : matrices) {
      const auto& p = g.parameter();
      const layout one_matrix = layout_of_matrix(p);
      const axis_list axes = sharding_axes(one_matrix, ctx.ranks.shape());
      auto at = std::find_if(parts.begin(), parts.end(), [&](const part& one) { return one.axes == axes; });
      if (at == parts.end()) at = parts.insert(parts.end(), {axes, {}, {}});
      for (std::int64_t i = 0; i < matrices_of(p); ++i) {
        at->members.push_back(index++);
        at->stored.push_back({one_matrix, p.sizes(), update_cost(p.info())});
      }
    }
    std::vector<group> groups;
    for (const part& one : parts)
      groups.push_back({one.axes, one.members, matrix_owners(ctx.ranks, one.axes, one.stored)});
    return groups;
  }

  /// Runs one round: updates momenta, makes this rank's matrix orthogonal, then applies all updates.
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

inline matrix_owners::matrix_owners(world& w, const axis_list& axes, const std::vector<stored_matrix>& matrices) {
  std::vector<std::int64_t> members(static_cast<std::size_t>(w.shape().size(axes)));
  const auto group = w.shape().group_of(w.rank(), axes);
  for (std::int64_t r = 0; r < w.size(); ++r)
    if (w.shape().group_of(r, axes) == group) members[static_cast<std::size_t>(w.shape().index_in(r, axes))] = r;
  const auto here = static_cast<std::size_t>(w.shape().index_in(w.rank(), axes));
  if (members.size() > 1) group_ = &w.group(axes);

  std::vector<double> costs;
  for (const stored_matrix& m : matrices) {
    costs.push_back(m.cost);
    std::vector<box>& parts = parts_.emplace_back();
    for (const std::int64_t r : members) parts.push_back(local_box(m.stored, w.shape(), m.sizes, r));
  }
  const std::vector<int> owner_of = balance_owners(costs, static_cast<int>(members.size()));
  std::vector<std::vector<int>> owned(members.size());
  for (std::size_t i = 0; i < matrices.size(); ++i)
    owned[static_cast<std::size_t>(owner_of[i])].push_back(static_cast<int>(i));
  std::size_t most = 0;
  for (std::vector<int>& of_one : owned) {
    std::stable_sort(of_one.begin(), of_one.end(), [&](int a, int b) {
      return costs[static_cast<std::size_t>(a)] > costs[static_cast<std::size_t>(b)];
    });
    most = std::max(most, of_one.size());
  }
  for (std::size_t i = 0; i < most; ++i) {
    round& r = rounds_.emplace_back();
    for (const std::vector<int>& of_one : owned) r.matrices.push_back(i < of_one.size() ? of_one[i] : -1);
    r.own = r.matrices[here];
    for (std::size_t rank = 0; rank < members.size(); ++rank) {
      r.part_size.push_back(elements(r.matrices[rank], here));
      r.piece_size.push_back(elements(r.own, rank));
    }
    r.part_at.resize(members.size());
    r.piece_at.resize(members.size());
    std::exclusive_scan(r.part_size.begin(), r.part_size.end(), r.part_at.begin(), std::size_t{0});
    std::exclusive_scan(r.piece_size.begin(), r.piece_size.end(), r.piece_at.begin(), std::size_t{0});
  }
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
