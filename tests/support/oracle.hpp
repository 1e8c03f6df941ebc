#pragma once

#include <doctest/doctest.h>

#include <functional>
#include <string>

#include "plait/layout/check.hpp"
#include "plait/layout/rules.hpp"
#include "support/placed_value.hpp"

/// Finds by brute force what a rule should accept and return. An operation runs on every rank's local parts, for every
/// tuple of operand layouts. A layout of the result is right if and only if two conditions hold:
///
/// * value: the local results, assembled by that layout, equal the operation on whole tensors;
/// * adjoint: take a random gradient of the result, laid out by the dual of that layout, through the local adjoint. The
/// outputs, assembled by the dual of each operand's layout, are the true gradient.
///
/// The rule must accept a tuple if some layout of the result is right, and name that one.
namespace plait::test {

/// Operands of all ranks: `operands[i][rank]`.
using placed_operands = std::vector<shards>;

/// The mesh of an operation and the layouts of its operands. One rank with whole operands gives the true result.
struct place_of_work {
  world w;
  std::vector<layout> operands;
  std::int64_t ranks() const { return w.mesh.size(); }
  /// The first index of the part of `dim` that `rank` has of an operand.
  std::int64_t first(std::size_t operand, dim_id dim, std::size_t rank) const {
    const layout& a = operands[operand];
    return w.part(a, static_cast<std::int64_t>(rank)).offset[static_cast<std::size_t>(a.find(dim))];
  }
};

/// An operation as all ranks execute it. `forward` returns nothing where local sizes do not fit. `backward` returns one
/// gradient for each operand, empty for operands without a gradient.
struct operation {
  std::string text;
  std::vector<std::vector<dim_id>> operands;
  std::vector<dim_id> out;
  std::vector<bool> has_gradient;
  std::function<std::optional<shards>(const place_of_work&, const placed_operands&)> forward{};
  std::function<placed_operands(const place_of_work&, const placed_operands&, const shards& dy)> backward{};
  std::function<derived_layout(const std::vector<layout>&)> rule{};
  /// Makes valid indices; optional.
  std::function<void(std::size_t operand, array&, const dim_sizes&)> restrict_values{};
};

/// Gives an operation the passes of `work`.
template <class Work>
void set_passes(operation& op, const Work& work) {
  op.forward = [=](const place_of_work& p, const placed_operands& xs) { return work.forward(p, xs); };
  op.backward = [=](const place_of_work& p, const placed_operands& xs, const shards& dy) {
    return work.backward(p, xs, dy);
  };
}

/// Whether, on every rank, operands with a common dim have the same local size of it.
inline bool sizes_agree(const placed_operands& operands) {
  for (std::size_t rank = 0; rank < operands[0].size(); ++rank)
    for (const shards& a : operands)
      for (const shards& b : operands)
        for (dim_id dim : a[rank].dims)
          if (b[rank].has(dim) && a[rank].size_of(dim) != b[rank].size_of(dim)) return false;
  return true;
}

/// An array of the dims `dims` with the local sizes that `operands` have on `rank`.
inline array result_array(const std::vector<dim_id>& dims, const placed_operands& operands, std::size_t rank) {
  std::vector<std::int64_t> extents;
  for (dim_id dim : dims) {
    std::int64_t size = 1;
    for (const shards& a : operands)
      if (a[rank].has(dim)) size = a[rank].size_of(dim);
    extents.push_back(size);
  }
  return array(dims, extents);
}

/// An operation of one rank at a time, as a local product-like formula over the joint index space of operands and
/// result. `term(x)` is added to the result; `derivative(x, i)` is its derivative by operand i.
inline void set_local_formula(operation& op, std::function<element(const std::vector<element>&)> term,
                              std::function<element(const std::vector<element>&, std::size_t)> derivative) {
  const std::vector<dim_id> out = op.out;
  const auto loop = [](const placed_operands& xs, std::size_t rank, const array& y, auto body) {
    std::vector<const array*> all;
    for (const shards& x : xs) all.push_back(&x[rank]);
    all.push_back(&y);
    std::vector<element> values(xs.size());
    joint_loop(all).run([&](const std::vector<std::int64_t>& at) {
      for (std::size_t i = 0; i < xs.size(); ++i) values[i] = xs[i][rank].data[static_cast<std::size_t>(at[i])];
      body(values, at);
    });
  };
  op.forward = [=](const place_of_work& place, const placed_operands& xs) -> std::optional<shards> {
    if (!sizes_agree(xs)) return std::nullopt;
    shards ys;
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(place.ranks()); ++rank) {
      array y = result_array(out, xs, rank);
      loop(xs, rank, y, [&](const std::vector<element>& values, const std::vector<std::int64_t>& at) {
        y.data[static_cast<std::size_t>(at.back())] += term(values);
      });
      ys.push_back(y);
    }
    return ys;
  };
  op.backward = [=](const place_of_work& place, const placed_operands& xs, const shards& dy) {
    placed_operands gradients(xs.size());
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(place.ranks()); ++rank) {
      for (std::size_t i = 0; i < xs.size(); ++i) gradients[i].push_back(xs[i][rank].like());
      loop(xs, rank, dy[rank], [&](const std::vector<element>& values, const std::vector<std::int64_t>& at) {
        for (std::size_t i = 0; i < xs.size(); ++i)
          gradients[i][rank].data[static_cast<std::size_t>(at[i])] +=
              derivative(values, i) * dy[rank].data[static_cast<std::size_t>(at.back())];
      });
    }
    return gradients;
  };
}

/// Sums the values of the ranks of each group in place: the all-reduce inside an operation.
inline void sum_in_groups(shards& values, const axis_list& axes, const mesh_shape& mesh) {
  if (mesh.size(axes) == 1) return;
  shards sums = values;
  for (std::size_t r = 0; r < values.size(); ++r)
    for (std::size_t s = 0; s < values.size(); ++s)
      if (r != s &&
          mesh.group_of(static_cast<std::int64_t>(r), axes) == mesh.group_of(static_cast<std::int64_t>(s), axes))
        sums[r] += values[s];
  values = sums;
}

struct oracle_outcome {
  int tuples = 0, right = 0;
};

class oracle {
 public:
  oracle(const operation& op, const world& w) : op_(op), random_(20240607) {
    place_.w = w;
    alone_.w.sizes = w.sizes;
    for (std::size_t i = 0; i < op.operands.size(); ++i) {
      truth_.push_back(random_array(op.operands[i], w.sizes, random_));
      if (op.restrict_values) op.restrict_values(i, truth_.back(), w.sizes);
      layout whole;
      for (dim_id dim : op.operands[i]) whole.dims.push_back({dim, {}});
      alone_.operands.push_back(whole);
      choices_.push_back(layouts_that_fit(op.operands[i], w));
      spread_.emplace_back();
      for (const layout& a : choices_.back()) spread_.back().push_back(spread(truth_.back(), a, w, random_));
    }
    placed_operands whole;
    for (const array& x : truth_) whole.push_back({x});
    y_ = (*op.forward(alone_, whole))[0];
    dy_ = random_array(op.out, w.sizes, random_);
    gradients_ = op.backward(alone_, whole, {dy_});
    results_ = layouts_that_fit(op.out, w);
    for (const layout& a : results_) dy_spread_.push_back(spread(dy_, dual(a), w, random_));
  }

  /// Compares the rule with the brute-force result for every tuple of operand layouts.
  oracle_outcome run() {
    oracle_outcome outcome;
    std::vector<std::size_t> at(choices_.size(), 0);
    for (;;) {
      compare(at, outcome);
      std::size_t i = at.size();
      while (i > 0 && ++at[i - 1] == choices_[i - 1].size()) at[--i] = 0;
      if (i == 0) break;
    }
    CAPTURE(op_.text);
    CHECK_MESSAGE(complaints_ == 0, op_.text << " on " << describe(place_.w.mesh) << ": " << complaints_ << " of "
                                             << outcome.tuples << " tuples wrong");
    CHECK(outcome.right > 0);
    return outcome;
  }

 private:
  void compare(const std::vector<std::size_t>& at, oracle_outcome& outcome) {
    place_.operands.clear();
    placed_operands xs;
    for (std::size_t i = 0; i < at.size(); ++i) {
      place_.operands.push_back(choices_[i][at[i]]);
      xs.push_back(spread_[i][at[i]]);
    }
    std::vector<const layout*> right;
    if (const std::optional<shards> ys = op_.forward(place_, xs))
      for (std::size_t s = 0; s < results_.size(); ++s)
        if (assemble(*ys, results_[s], place_.w) == y_ && adjoint_is_right(xs, s)) right.push_back(&results_[s]);
    const derived_layout derived = op_.rule(place_.operands);
    ++outcome.tuples;
    outcome.right += static_cast<int>(!right.empty());
    const bool agree =
        derived.verdict.ok() ? right.size() == 1 && equivalent(*right[0], derived.result) : right.empty();
    if (agree) return;
    if (++complaints_ > 12) return;
    std::string text = op_.text;
    for (const layout& a : place_.operands) text += "  " + describe(a);
    text += "\n    rule:   " + (derived.verdict.ok() ? describe(derived.result) : describe(derived.verdict)) +
            "\n    oracle:";
    for (const layout* a : right) text += " " + describe(*a);
    MESSAGE(text);
  }

  bool adjoint_is_right(const placed_operands& xs, std::size_t s) const {
    const placed_operands gradients = op_.backward(place_, xs, dy_spread_[s]);
    for (std::size_t i = 0; i < xs.size(); ++i)
      if (op_.has_gradient[i] && assemble(gradients[i], dual(place_.operands[i]), place_.w) != gradients_[i][0])
        return false;
    return true;
  }

  const operation& op_;
  std::mt19937_64 random_;
  place_of_work place_, alone_;
  std::vector<array> truth_;
  std::vector<std::vector<layout>> choices_;
  std::vector<std::vector<shards>> spread_;
  array y_, dy_;
  placed_operands gradients_;
  std::vector<layout> results_;
  std::vector<shards> dy_spread_;
  int complaints_ = 0;
};

/// Runs the oracle on one-axis meshes of 2 and 3 ranks, and on two-axis meshes. Every dim in `dims` gets a size that
/// divides by all ranks of the mesh.
inline void check_rule(const operation& op, std::initializer_list<dim_id> dims, bool two_axes = true) {
  for (const mesh_shape& mesh : {make_mesh({2}), make_mesh({3}), make_mesh({2, 2}), make_mesh({2, 3})}) {
    if (mesh.axes.size() > 1 && !two_axes) continue;
    world w{mesh, {}};
    for (dim_id dim : dims) w.sizes.set(dim, mesh.size());
    oracle(op, w).run();
  }
}

}  // namespace plait::test
