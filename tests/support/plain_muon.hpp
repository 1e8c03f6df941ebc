#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "plait/parallel/optim/muon.hpp"

/// Muon on one matrix by loops in double, written from the papers.
namespace plait::test {

inline std::vector<double> random_numbers(std::int64_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<double> all(static_cast<std::size_t>(n));
  for (double& x : all) x = normal(generator);
  return all;
}

struct plain_matrix {
  std::int64_t rows = 0, columns = 0;
  std::vector<double> values;
  plain_matrix(std::int64_t r, std::int64_t c, std::vector<double> v = {}) : rows(r), columns(c), values(std::move(v)) {
    values.resize(static_cast<std::size_t>(r * c));
  }
  double& at(std::int64_t r, std::int64_t c) { return values[static_cast<std::size_t>(r * columns + c)]; }
  double at(std::int64_t r, std::int64_t c) const { return values[static_cast<std::size_t>(r * columns + c)]; }
};

inline plain_matrix transposed(const plain_matrix& a) {
  plain_matrix t(a.columns, a.rows);
  for (std::int64_t i = 0; i < a.rows; ++i)
    for (std::int64_t j = 0; j < a.columns; ++j) t.at(j, i) = a.at(i, j);
  return t;
}
inline plain_matrix product(const plain_matrix& a, const plain_matrix& b) {
  plain_matrix c(a.rows, b.columns);
  for (std::int64_t i = 0; i < a.rows; ++i)
    for (std::int64_t k = 0; k < a.columns; ++k)
      for (std::int64_t j = 0; j < b.columns; ++j) c.at(i, j) += a.at(i, k) * b.at(k, j);
  return c;
}
/// Returns x a + y b.
inline plain_matrix combined(double x, const plain_matrix& a, double y, const plain_matrix& b) {
  plain_matrix c = a;
  for (std::size_t i = 0; i < c.values.size(); ++i) c.values[i] = x * a.values[i] + y * b.values[i];
  return c;
}

/// Newton-Schulz iteration. As in the paper, a matrix with more rows than columns is transposed first.
inline std::vector<double> plain_newton_schulz(const std::vector<double>& g, std::int64_t rows, std::int64_t columns,
                                               const newton_schulz_options& how = {}) {
  plain_matrix x(rows, columns, g);
  if (rows > columns) x = transposed(x);
  double squares = 0;
  for (const double v : x.values) squares += v * v;
  for (double& v : x.values) v /= std::sqrt(squares) + how.epsilon;
  for (int step = 0; step < how.steps; ++step) {
    const plain_matrix a = product(x, transposed(x)), b = combined(how.b, a, how.c, product(a, a));
    x = combined(how.a, x, 1.0, product(b, x));
  }
  return (rows > columns ? transposed(x) : x).values;
}

/// One step on a matrix and its momentum.
inline void plain_muon_step(std::vector<double>& weight, std::vector<double>& momentum, const std::vector<double>& g,
                            std::int64_t rows, std::int64_t columns, double learning_rate, const muon_options& o) {
  std::vector<double> direction(g.size());
  for (std::size_t i = 0; i < g.size(); ++i) {
    momentum[i] = o.momentum * momentum[i] + (1 - o.momentum) * g[i];
    direction[i] = o.nesterov ? o.momentum * momentum[i] + (1 - o.momentum) * g[i] : momentum[i];
  }
  direction = plain_newton_schulz(direction, rows, columns, o.newton_schulz);
  const double r = static_cast<double>(rows), c = static_cast<double>(columns);
  const double size =
      o.scale == muon_scale::original ? (r > c ? std::sqrt(r / c) : 1.0) : 0.2 * std::sqrt(r > c ? r : c);
  const double rate = learning_rate * o.learning_rate_ratio;
  for (std::size_t i = 0; i < g.size(); ++i)
    weight[i] = weight[i] - rate * o.weight_decay * weight[i] - rate * size * direction[i];
}

}  // namespace plait::test
