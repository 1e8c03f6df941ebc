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
      array y = xs[0][r].like();
      each_row(place, xs, r, [&](const row& at) {
        const element total = square_sum(at);
        for (std::int64_t j = 0; j <= at.i; ++j)
          for (std::int64_t c = 0; c < at.width; ++c)
            y.data[at.q(at.i, c)] += at.scores[static_cast<std::size_t>(j)] * total * at.v_data[at.v(j, c)];
      });
      ys.push_back(y);
    }
    return ys;
  }

  placed_operands backward(const place_of_work& place, const placed_operands& xs, const shards& dy) const {
    placed_operands gradients(3);
    for (std::size_t r = 0; r < dy.size(); ++r) {
      array dq = xs[0][r].like(), dk = xs[1][r].like(), dv = xs[2][r].like();
      each_row(place, xs, r, [&](const row& at) {
        const element total = square_sum(at);
        std::vector<element> dw(static_cast<std::size_t>(at.i) + 1);
        element inner = 0;  // sum over j of dw_j c_j
        for (std::int64_t j = 0; j <= at.i; ++j) {
          const std::size_t n = static_cast<std::size_t>(j);
          for (std::int64_t c = 0; c < at.width; ++c) {
            dw[n] += dy[r].data[at.q(at.i, c)] * at.v_data[at.v(j, c)];
            dv.data[at.v(j, c)] += at.scores[static_cast<std::size_t>(j)] * total * dy[r].data[at.q(at.i, c)];
          }
          inner += dw[n] * at.scores[static_cast<std::size_t>(j)];
        }
        for (std::int64_t j = 0; j <= at.i; ++j) {
          const element dc =
              dw[static_cast<std::size_t>(j)] * total + 2 * at.scores[static_cast<std::size_t>(j)] * inner;
          for (std::int64_t c = 0; c < at.depth; ++c) {
            dq.data[at.q(at.i, c)] += dc * at.k_data[at.k(j, c)];
            dk.data[at.k(j, c)] += dc * at.q_data[at.q(at.i, c)];
          }
        }
      });
      gradients[0].push_back(dq), gradients[1].push_back(dk), gradients[2].push_back(dv);
    }
    return gradients;
  }

 private:
  /// One query row of one head with its keys.
  struct row {
    const array *q_array, *k_array, *v_array;
    std::int64_t line, i, head, k_head, v_head, depth, width;
    std::vector<element> scores;
    const element *q_data, *k_data, *v_data;

    static std::size_t at(const array& a, std::int64_t line, std::int64_t i, dim_id head_dim_of, std::int64_t head,
                          std::int64_t c) {
      return static_cast<std::size_t>(line * a.stride(b) + i * a.stride(s) + head * a.stride(head_dim_of) +
                                      c * a.stride(d));
    }
    std::size_t q(std::int64_t j, std::int64_t c) const { return at(*q_array, line, j, h, head, c); }
    std::size_t k(std::int64_t j, std::int64_t c) const { return at(*k_array, line, j, kv, k_head, c); }
    std::size_t v(std::int64_t j, std::int64_t c) const { return at(*v_array, line, j, kv, v_head, c); }
  };

  static element square_sum(const row& at) {
    element total = 0;
    for (element c : at.scores) total += c * c;
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
  template <class Body>
  void each_row(const place_of_work& place, const placed_operands& xs, std::size_t r, Body&& body) const {
    const array &q = xs[0][r], &k = xs[1][r], &v = xs[2][r];
    for (std::int64_t line = 0; line < q.size_of(b); ++line)
      for (std::int64_t head = 0; head < q.size_of(h); ++head)
        for (std::int64_t i = 0; i < q.size_of(s); ++i) {
          row at{&q,
                 &k,
                 &v,
                 line,
                 i,
                 head,
                 kv_head(place, 1, r, head),
                 kv_head(place, 2, r, head),
                 q.size_of(d),
                 v.size_of(d),
                 std::vector<element>(static_cast<std::size_t>(i) + 1),
                 q.data.data(),
                 k.data.data(),
                 v.data.data()};
          for (std::int64_t j = 0; j <= i; ++j)
            for (std::int64_t c = 0; c < at.depth; ++c)
              at.scores[static_cast<std::size_t>(j)] += q.data[at.q(i, c)] * k.data[at.k(j, c)];
          body(at);
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
