// program: layout_oracles
#include "support/oracle.hpp"

using namespace plait;
using namespace plait::test;

namespace layout_oracle_lookup {  // files of one program may have helpers of the same name

const dim_id rows = dim_of<row>, n = dim_of<column>, t = dim_of<token>, b = dim_of<line>;

/// Calls `body(row at, result at)` for each element of the result whose row this rank has.
template <class Body>
void each_lookup(const place_of_work& place, const placed_operands& xs, const array& y, std::size_t r, Body&& body) {
  const array &table = xs[0][r], &ids = xs[1][r];
  const element first = static_cast<element>(place.first(0, rows, r)), held = static_cast<element>(table.size_of(rows));
  const std::int64_t row_stride = table.stride(rows), column_stride = table.stride(n);
  const std::int64_t width = table.size_of(n), y_stride = y.stride(n);
  for (std::size_t i = 0; i < ids.data.size(); ++i) {
    const element id = ids.data[i] - first;
    if (id >= held) continue;
    for (std::int64_t c = 0; c < width; ++c)
      body(static_cast<std::size_t>(static_cast<std::int64_t>(id) * row_stride + c * column_stride),
           static_cast<std::size_t>(static_cast<std::int64_t>(i) * width + c * y_stride));
  }
}

operation lookup_of(std::vector<dim_id> table_dims, std::vector<dim_id> ids) {
  std::vector<dim_id> out = ids;
  for (dim_id dim : table_dims)
    if (!(dim == rows)) out.push_back(dim);
  operation op{"lookup", {table_dims, ids}, out, {true, false}};
  op.forward = [out](const place_of_work& place, const placed_operands& xs) -> std::optional<shards> {
    if (!sizes_agree(xs)) return std::nullopt;
    shards ys;
    for (std::size_t r = 0; r < xs[0].size(); ++r) {
      array y = result_array(out, xs, r);
      each_lookup(place, xs, y, r, [&](std::size_t from, std::size_t to) { y.data[to] = xs[0][r].data[from]; });
      ys.push_back(y);
    }
    return ys;
  };
  op.backward = [](const place_of_work& place, const placed_operands& xs, const shards& dy) {
    placed_operands gradients(2);
    for (std::size_t r = 0; r < dy.size(); ++r) {
      array table = xs[0][r].like();
      each_lookup(place, xs, dy[r], r, [&](std::size_t from, std::size_t to) { table.data[from] += dy[r].data[to]; });
      gradients[0].push_back(table);
      gradients[1].emplace_back();
    }
    return gradients;
  };
  op.rule = [](const std::vector<layout>& a) { return lookup(a[0], a[1], rows); };
  return op;
}

/// loss = s^2 - x[label] with s = sum of x over the classes, both summed over the ranks that share the classes:
/// nonlinear in x, and complete on every rank.
class entropy {
 public:
  explicit entropy(std::vector<dim_id> out) : out_(std::move(out)) {}

  std::optional<shards> forward(const place_of_work& place, const placed_operands& xs) const {
    if (!sizes_agree(xs)) return std::nullopt;
    shards ys = sums(place, xs), picked;
    for (std::size_t r = 0; r < xs[0].size(); ++r) {
      picked.push_back(ys[r].like());
      each_label(place, xs, ys[r], r, [&](std::size_t x, std::size_t y) { picked[r].data[y] += xs[0][r].data[x]; });
    }
    sum_in_groups(picked, place.operands[0].axes_of(rows), place.w.mesh);
    for (std::size_t r = 0; r < ys.size(); ++r)
      for (std::size_t i = 0; i < ys[r].data.size(); ++i)
        ys[r].data[i] = ys[r].data[i] * ys[r].data[i] - picked[r].data[i];
    return ys;
  }
  placed_operands backward(const place_of_work& place, const placed_operands& xs, const shards& dy) const {
    const shards s = sums(place, xs);
    placed_operands gradients(2);
    for (std::size_t r = 0; r < dy.size(); ++r) {
      array dx = xs[0][r].like();
      joint_loop({&dx, &dy[r]}).run([&](const auto& at) {
        const std::size_t i = static_cast<std::size_t>(at[1]);
        dx.data[static_cast<std::size_t>(at[0])] += 2 * s[r].data[i] * dy[r].data[i];
      });
      each_label(place, xs, dy[r], r, [&](std::size_t x, std::size_t y) { dx.data[x] -= dy[r].data[y]; });
      gradients[0].push_back(dx);
      gradients[1].emplace_back();
    }
    return gradients;
  }

 private:
  shards sums(const place_of_work& place, const placed_operands& xs) const {
    shards s;
    for (std::size_t r = 0; r < xs[0].size(); ++r) {
      s.push_back(result_array(out_, xs, r));
      joint_loop({&xs[0][r], &s[r]}).run([&](const auto& at) {
        s[r].data[static_cast<std::size_t>(at[1])] += xs[0][r].data[static_cast<std::size_t>(at[0])];
      });
    }
    sum_in_groups(s, place.operands[0].axes_of(rows), place.w.mesh);
    return s;
  }
  /// Calls `body(logit at, result at)` for each label whose logit this rank has.
  template <class Body>
  static void each_label(const place_of_work& place, const placed_operands& xs, const array& y, std::size_t r,
                         Body&& body) {
    const element first = static_cast<element>(place.first(0, rows, r));
    const element held = static_cast<element>(xs[0][r].size_of(rows));
    const std::int64_t stride = xs[0][r].stride(rows);
    joint_loop({&xs[1][r], &y, &xs[0][r]}).run([&](const auto& at) {
      const std::int64_t c = at[2] / stride % static_cast<std::int64_t>(held);
      const element id = xs[1][r].data[static_cast<std::size_t>(at[0])] - first;
      if (id == static_cast<element>(c)) body(static_cast<std::size_t>(at[2]), static_cast<std::size_t>(at[1]));
    });
  }

  std::vector<dim_id> out_;
};

operation cross_entropy_of(std::vector<dim_id> logits) {
  std::vector<dim_id> out = logits;
  std::erase(out, rows);
  operation op{"cross_entropy", {logits, out}, out, {true, false}};
  set_passes(op, entropy(out));
  op.rule = [](const std::vector<layout>& a) { return cross_entropy(a[0], a[1], rows); };
  return op;
}

/// Compares the rule for indices below the number of rows. Every row occurs if there are enough indices.
void check_indexed(operation op, std::initializer_list<dim_id> dims) {
  op.restrict_values = [](std::size_t operand, array& a, const dim_sizes& sizes) {
    if (operand != 1) return;
    for (std::size_t i = 0; i < a.data.size(); ++i) a.data[i] = (a.data[i] + i) % static_cast<element>(sizes.of(rows));
  };
  check_rule(op, dims);
}

TEST_CASE("lookup of a vector of ids") { check_indexed(lookup_of({rows, n}, {t}), {rows, n, t}); }
TEST_CASE("lookup of a matrix of ids") { check_indexed(lookup_of({rows, n}, {b, t}), {rows, n, b, t}); }
TEST_CASE("lookup in a table with rows last") { check_indexed(lookup_of({n, rows}, {t}), {rows, n, t}); }
TEST_CASE("cross-entropy over classes that may be sharded") {
  check_indexed(cross_entropy_of({t, rows}), {t, rows});
  check_indexed(cross_entropy_of({b, t, rows}), {b, t, rows});
}

}  // namespace layout_oracle_lookup
