// program: layout_oracles
#include "support/oracle.hpp"

using namespace plait;
using namespace plait::test;

namespace layout_oracle_attend {  // files of one program may have helpers of the same name

const dim_id b = dim_of<line>, s = dim_of<seq>, h = dim_of<heads>, kv = dim_of<kv_heads>, d = dim_of<head_dim>;

/// Causal grouped-query attention with integer weights: w_ij = c_ij (sum over j <= i of c_ij^2) with the scores c_ij =
/// q_i . k_j. Like softmax it is nonlinear, depends on the whole row, and is not linear in q or k. It is linear in v.
class attention {
 public:
  explicit attention(std::int64_t heads_per_kv) : heads_per_kv_(heads_per_kv) {}

  std::optional<shards> forward(const place_of_work& place, const placed_operands& xs) const {
    if (!fits(place, xs)) return std::nullopt;
    shards ys;
    for (std::size_t r = 0; r < xs[0].size(); ++r) {
      const array& v = xs[2][r];
      array y = xs[0][r].like();
      each_row(place, xs, r, [&](std::int64_t i, const auto& scores, const auto& q_at, const auto&, const auto& v_at) {
        const element total = square_sum(scores);
        for (std::int64_t j = 0; j <= i; ++j)
          for (std::int64_t c = 0; c < v.size_of(d); ++c)
            y.data[q_at(i, c)] += scores[static_cast<std::size_t>(j)] * total * v.data[v_at(j, c)];
      });
      ys.push_back(y);
    }
    return ys;
  }

  placed_operands backward(const place_of_work& place, const placed_operands& xs, const shards& dy) const {
    placed_operands gradients(3);
    for (std::size_t r = 0; r < dy.size(); ++r) {
      const array &q = xs[0][r], &k = xs[1][r], &v = xs[2][r];
      array dq = q.like(), dk = k.like(), dv = v.like();
      each_row(place, xs, r,
               [&](std::int64_t i, const auto& scores, const auto& q_at, const auto& k_at, const auto& v_at) {
                 const element total = square_sum(scores);
                 std::vector<element> dw(scores.size());
                 element inner = 0;  // sum over j of dw_j c_j
                 for (std::int64_t j = 0; j <= i; ++j) {
                   const std::size_t n = static_cast<std::size_t>(j);
                   for (std::int64_t c = 0; c < v.size_of(d); ++c) {
                     dw[n] += dy[r].data[q_at(i, c)] * v.data[v_at(j, c)];
                     dv.data[v_at(j, c)] += scores[n] * total * dy[r].data[q_at(i, c)];
                   }
                   inner += dw[n] * scores[n];
                 }
                 for (std::int64_t j = 0; j <= i; ++j) {
                   const std::size_t n = static_cast<std::size_t>(j);
                   const element dc = dw[n] * total + 2 * scores[n] * inner;
                   for (std::int64_t c = 0; c < q.size_of(d); ++c) {
                     dq.data[q_at(i, c)] += dc * k.data[k_at(j, c)];
                     dk.data[k_at(j, c)] += dc * q.data[q_at(i, c)];
                   }
                 }
               });
      gradients[0].push_back(dq), gradients[1].push_back(dk), gradients[2].push_back(dv);
    }
    return gradients;
  }

 private:
  static element square_sum(const std::vector<element>& scores) {
    element total = 0;
    for (element c : scores) total += c * c;
    return total;
  }
  /// The local index of the kv head that the local query head `head` uses; out of range if this rank does not have it.
  std::int64_t kv_head(const place_of_work& place, std::size_t operand, std::size_t rank, std::int64_t head) const {
    return (place.first(0, h, rank) + head) / heads_per_kv_ - place.first(operand, kv, rank);
  }
  bool fits(const place_of_work& place, const placed_operands& xs) const {
    for (std::size_t r = 0; r < xs[0].size(); ++r) {
      for (dim_id dim : {b, s, d})
        for (std::size_t operand : {1, 2})
          if (xs[0][r].size_of(dim) != xs[operand][r].size_of(dim)) return false;
      for (std::size_t operand : {1, 2})
        for (std::int64_t head : {std::int64_t{0}, xs[0][r].size_of(h) - 1})
          if (const std::int64_t there = kv_head(place, operand, r, head);
              there < 0 || there >= xs[operand][r].size_of(kv))
            return false;
    }
    return true;
  }
  /// The index in `a` of element `c` of row `j` of one head.
  static auto index_in(const array& a, std::int64_t line, dim_id heads_of, std::int64_t head) {
    const std::int64_t first = line * a.stride(b) + head * a.stride(heads_of), row = a.stride(s), step = a.stride(d);
    return [=](std::int64_t j, std::int64_t c) { return static_cast<std::size_t>(first + j * row + c * step); };
  }
  /// Calls body(i, scores, q_at, k_at, v_at) for each query row i of each head; the last three give indices.
  template <class Body>
  void each_row(const place_of_work& place, const placed_operands& xs, std::size_t r, Body&& body) const {
    const array &q = xs[0][r], &k = xs[1][r], &v = xs[2][r];
    for (std::int64_t line = 0; line < q.size_of(b); ++line)
      for (std::int64_t head = 0; head < q.size_of(h); ++head) {
        const auto q_at = index_in(q, line, h, head), k_at = index_in(k, line, kv, kv_head(place, 1, r, head)),
                   v_at = index_in(v, line, kv, kv_head(place, 2, r, head));
        for (std::int64_t i = 0; i < q.size_of(s); ++i) {
          std::vector<element> scores(static_cast<std::size_t>(i) + 1);
          for (std::int64_t j = 0; j <= i; ++j)
            for (std::int64_t c = 0; c < q.size_of(d); ++c)
              scores[static_cast<std::size_t>(j)] += q.data[q_at(i, c)] * k.data[k_at(j, c)];
          body(i, scores, q_at, k_at, v_at);
        }
      }
  }

  std::int64_t heads_per_kv_;
};

operation attention_of(std::vector<dim_id> q, std::vector<dim_id> k, std::int64_t heads_per_kv) {
  operation op{"attend, " + std::to_string(heads_per_kv) + " heads per kv head", {q, k, k}, q, {true, true, true}};
  set_passes(op, attention(heads_per_kv));
  op.rule = [](const std::vector<layout>& a) { return attend(a[0], a[1], a[2], {s, h, kv}); };
  return op;
}

void check_attention(std::initializer_list<std::int64_t> extents, bool lines, std::int64_t heads_per_kv) {
  world w{make_mesh(extents), {}};
  for (dim_id dim : {b, s, h, kv, d}) w.sizes.set(dim, w.mesh.size());
  w.sizes.set(h, heads_per_kv * w.mesh.size());
  const operation op = lines ? attention_of({b, s, h, d}, {b, s, kv, d}, heads_per_kv)
                             : attention_of({s, h, d}, {s, kv, d}, heads_per_kv);
  oracle(op, w).run();
}

TEST_CASE("attention on one axis") {
  for (std::int64_t extent : {2, 3})
    for (std::int64_t heads_per_kv : {1, 2}) check_attention({extent}, true, heads_per_kv);
}
TEST_CASE("attention on two axes, as many kv heads as heads") { check_attention({2, 2}, false, 1); }
TEST_CASE("attention on two axes, grouped") { check_attention({2, 2}, false, 2); }
TEST_CASE("attention on two axes of different extents") { check_attention({2, 3}, false, 1); }

}  // namespace layout_oracle_attend
