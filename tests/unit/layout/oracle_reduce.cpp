// program: layout_oracles
#include "support/oracle.hpp"

using namespace plait;
using namespace plait::test;

namespace layout_oracle_reduce {  // files of one program may have helpers of the same name

const dim_id m = dim_of<row>, n = dim_of<column>, g = dim_of<group>;

std::vector<dim_id> without(std::vector<dim_id> dims, dim_id dim) {
  std::erase(dims, dim);
  return dims;
}

operation sum_over(std::vector<dim_id> dims, dim_id dim) {
  operation op{"sum", {dims}, without(dims, dim), {true}};
  set_local_formula(
      op, [](const auto& x) { return x[0]; }, [](const auto&, std::size_t) { return element{1}; });
  op.rule = [dim](const std::vector<layout>& a) { return reduce_sum(a[0], dim); };
  return op;
}

/// The square of the sum over `dim`: like a maximum, it is complete only on a rank that has all of the dim.
operation nonlinear_over(std::vector<dim_id> dims, dim_id dim) {
  operation op = sum_over(dims, dim);
  op.text = "nonlinear reduction";
  const auto sum = op.forward;
  op.forward = [sum](const place_of_work& place, const placed_operands& xs) {
    std::optional<shards> ys = sum(place, xs);
    for (array& y : *ys)
      for (element& e : y.data) e *= e;
    return ys;
  };
  const auto spread_back = op.backward;
  op.backward = [=](const place_of_work& place, const placed_operands& xs, const shards& dy) {
    const shards sums = *sum(place, xs);
    shards scaled = dy;
    for (std::size_t r = 0; r < dy.size(); ++r)
      for (std::size_t i = 0; i < dy[r].data.size(); ++i) scaled[r].data[i] *= 2 * sums[r].data[i];
    return spread_back(place, xs, scaled);
  };
  op.rule = [dim](const std::vector<layout>& a) { return reduce_nonlinear(a[0], dim); };
  return op;
}

/// y = x w s with the statistic s = sum of x^2 over `dim`, summed over the ranks that share the dim. It has the
/// relevant properties of softmax (without w) and of norms: nonlinear in x, linear in w, and each result depends on the
/// whole dim.
class with_statistic {
 public:
  with_statistic(dim_id dim, bool has_weight) : dim_(dim), has_weight_(has_weight) {}

  std::optional<shards> forward(const place_of_work& place, const placed_operands& xs) const {
    if (!sizes_agree(xs)) return std::nullopt;
    const shards s = statistic(place, xs);
    shards ys;
    for (std::size_t r = 0; r < xs[0].size(); ++r) {
      array y = xs[0][r].like();
      each(xs, s, y, r, [&](element x, element w, element stat, element& out, std::size_t) { out = x * w * stat; });
      ys.push_back(y);
    }
    return ys;
  }
  placed_operands backward(const place_of_work& place, const placed_operands& xs, const shards& dy) const {
    const shards s = statistic(place, xs);
    shards inner = s;  // sum over the dim of w dy x
    placed_operands gradients(xs.size());
    for (std::size_t r = 0; r < dy.size(); ++r) {
      array unused = dy[r];
      std::fill(inner[r].data.begin(), inner[r].data.end(), element{0});
      each(xs, inner, unused, r,
           [&](element x, element w, element& sum, element& grad, std::size_t) { sum += w * grad * x; });
    }
    sum_in_groups(inner, place.operands[0].axes_of(dim_), place.w.mesh);
    for (std::size_t r = 0; r < dy.size(); ++r) {
      for (std::size_t i = 0; i < xs.size(); ++i) gradients[i].push_back(xs[i][r].like());
      array& dx = gradients[0][r] = dy[r];
      each(xs, s, dx, r, [&](element x, element w, element stat, element& d, std::size_t w_at) {
        if (has_weight_) gradients[1][r].data[w_at] += x * stat * d;
        d *= w * stat;
      });
      each(xs, inner, dx, r, [&](element x, element, element sum, element& d, std::size_t) { d += 2 * x * sum; });
    }
    return gradients;
  }

 private:
  shards statistic(const place_of_work& place, const placed_operands& xs) const {
    shards s;
    for (std::size_t r = 0; r < xs[0].size(); ++r) {
      s.push_back(result_array(without(xs[0][r].dims, dim_), xs, r));
      joint_loop({&xs[0][r], &s[r]}).run([&](const auto& at) {
        const element x = xs[0][r].data[static_cast<std::size_t>(at[0])];
        s[r].data[static_cast<std::size_t>(at[1])] += x * x;
      });
    }
    sum_in_groups(s, place.operands[0].axes_of(dim_), place.w.mesh);
    return s;
  }
  template <class Statistic, class Body>
  void each(const placed_operands& xs, Statistic& s, array& y, std::size_t r, Body&& body) const {
    const array one({}, {});
    const array& w = has_weight_ ? xs[1][r] : one;
    joint_loop({&xs[0][r], &w, &s[r], &y}).run([&](const auto& at) {
      body(xs[0][r].data[static_cast<std::size_t>(at[0])], has_weight_ ? w.data[static_cast<std::size_t>(at[1])] : 1,
           s[r].data[static_cast<std::size_t>(at[2])], y.data[static_cast<std::size_t>(at[3])],
           static_cast<std::size_t>(at[1]));
    });
  }

  dim_id dim_;
  bool has_weight_;
};

operation statistical(std::string text, std::vector<std::vector<dim_id>> operands, dim_id dim) {
  operation op{text, operands, operands[0], std::vector<bool>(operands.size(), true)};
  set_passes(op, with_statistic(dim, operands.size() == 2));
  op.rule = [=](const std::vector<layout>& a) {
    return a.size() == 2 ? normalize(a[0], a[1], dim) : pointwise(combine::nonlinear, {&a[0]});
  };
  return op;
}

TEST_CASE("sum over a dim") {
  check_rule(sum_over({m, n}, m), {m, n});
  check_rule(sum_over({m, n}, n), {m, n});
  check_rule(sum_over({n}, n), {n});
  check_rule(sum_over({g, m, n}, m), {g, m, n});
}
TEST_CASE("nonlinear reduction over a dim") {
  check_rule(nonlinear_over({m, n}, m), {m, n});
  check_rule(nonlinear_over({m, n}, n), {m, n});
  check_rule(nonlinear_over({g, m, n}, m), {g, m, n});
}
TEST_CASE("softmax over a dim that may be sharded") {
  check_rule(statistical("softmax", {{m, n}}, n), {m, n});
  check_rule(statistical("softmax", {{g, m, n}}, m), {g, m, n});
}
TEST_CASE("a norm with a weight over a dim that may be sharded") {
  check_rule(statistical("norm", {{m, n}, {n}}, n), {m, n});
  check_rule(statistical("norm", {{m, n}, {n}}, m), {m, n});
  check_rule(statistical("norm", {{g, m, n}, {n}}, n), {g, m, n});
}

}  // namespace layout_oracle_reduce
