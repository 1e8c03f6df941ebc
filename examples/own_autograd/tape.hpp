#pragma once

// The program's own autograd: matrices of floats, and a tape of the operations on them. plain.cpp and zero.cpp share
// this file.
#include <cmath>
#include <cstddef>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

/// A row-major matrix in the caller's memory, and its gradient.
struct matrix {
  long rows = 0, columns = 0;
  float* value = nullptr;
  float* gradient = nullptr;

  long size() const { return rows * columns; }
};

/// Records the operations of a forward pass and runs their gradients in the opposite order. Its results live until
/// `clear`. Operands are read when they are used, so the memory of a matrix may change between the two passes.
class tape {
 public:
  /// y = x w.
  matrix& multiply(const matrix& x, const matrix& w) {
    matrix& y = make(x.rows, w.columns);
    for (long r = 0; r < x.rows; ++r)
      for (long k = 0; k < x.columns; ++k)
        for (long c = 0; c < w.columns; ++c)
          y.value[r * y.columns + c] += x.value[r * x.columns + k] * w.value[k * w.columns + c];
    record([&x, &w, &y] {
      for (long r = 0; r < x.rows; ++r)
        for (long k = 0; k < x.columns; ++k) {
          const float in = x.value[r * x.columns + k];
          float sum = 0;
          for (long c = 0; c < w.columns; ++c) {
            sum += y.gradient[r * y.columns + c] * w.value[k * w.columns + c];
            w.gradient[k * w.columns + c] += in * y.gradient[r * y.columns + c];
          }
          x.gradient[r * x.columns + k] += sum;
        }
    });
    return y;
  }

  /// y = x + b; the row b is added to every row.
  matrix& add_row(const matrix& x, const matrix& b) {
    matrix& y = make(x.rows, x.columns);
    for (long i = 0; i < y.size(); ++i) y.value[i] = x.value[i] + b.value[i % y.columns];
    record([&x, &b, &y] {
      for (long i = 0; i < y.size(); ++i) {
        x.gradient[i] += y.gradient[i];
        b.gradient[i % y.columns] += y.gradient[i];
      }
    });
    return y;
  }

  /// y = a + b.
  matrix& add(const matrix& a, const matrix& b) {
    matrix& y = make(a.rows, a.columns);
    for (long i = 0; i < y.size(); ++i) y.value[i] = a.value[i] + b.value[i];
    record([&a, &b, &y] {
      for (long i = 0; i < y.size(); ++i) a.gradient[i] += y.gradient[i], b.gradient[i] += y.gradient[i];
    });
    return y;
  }

  /// y = x sigmoid(x).
  matrix& swish(const matrix& x) {
    matrix& y = make(x.rows, x.columns);
    for (long i = 0; i < y.size(); ++i) y.value[i] = x.value[i] / (1 + std::exp(-x.value[i]));
    record([&x, &y] {
      for (long i = 0; i < y.size(); ++i) {
        const float gate = 1 / (1 + std::exp(-x.value[i]));
        x.gradient[i] += y.gradient[i] * (gate + y.value[i] * (1 - gate));
      }
    });
    return y;
  }

  /// Divides each row by its root mean square, and multiplies it by a row of scales.
  matrix& normalize(const matrix& x, const matrix& scale) {
    matrix& y = make(x.rows, x.columns);
    std::vector<float> inverse(static_cast<std::size_t>(x.rows));
    for (long r = 0; r < x.rows; ++r) {
      float squares = 0;
      for (long c = 0; c < x.columns; ++c) squares += x.value[r * x.columns + c] * x.value[r * x.columns + c];
      const float i = 1 / std::sqrt(squares / static_cast<float>(x.columns) + 1e-6f);
      for (long c = 0; c < x.columns; ++c) y.value[r * x.columns + c] = x.value[r * x.columns + c] * i * scale.value[c];
      inverse[static_cast<std::size_t>(r)] = i;
    }
    record([&x, &scale, &y, inverse = std::move(inverse)] {
      for (long r = 0; r < x.rows; ++r) {
        const float i = inverse[static_cast<std::size_t>(r)];
        const long first = r * x.columns;
        float dot = 0;
        for (long c = 0; c < x.columns; ++c) {
          scale.gradient[c] += y.gradient[first + c] * x.value[first + c] * i;
          dot += y.gradient[first + c] * scale.value[c] * x.value[first + c];
        }
        dot *= i * i / static_cast<float>(x.columns);
        for (long c = 0; c < x.columns; ++c)
          x.gradient[first + c] += i * (y.gradient[first + c] * scale.value[c] - dot * x.value[first + c]);
      }
    });
    return y;
  }

  /// Makes a row for each `group` ids: the rows of the table with these ids, one after the other.
  matrix& look_up(const matrix& table, const std::vector<int>& ids, long group) {
    matrix& y = make(static_cast<long>(ids.size()) / group, group * table.columns);
    for (long i = 0; i < y.size(); ++i)
      y.value[i] = table.value[ids[static_cast<std::size_t>(i / table.columns)] * table.columns + i % table.columns];
    record([&table, ids, &y] {
      for (long i = 0; i < y.size(); ++i) {
        const long row = ids[static_cast<std::size_t>(i / table.columns)];
        table.gradient[row * table.columns + i % table.columns] += y.gradient[i];
      }
    });
    return y;
  }

  /// Returns the sum of -log softmax(scores)[label] over the rows. `seed` is the gradient of the trained loss with
  /// respect to this sum.
  double cross_entropy(const matrix& scores, const std::vector<int>& labels, float seed) {
    double loss = 0;
    std::vector<float> gradient(static_cast<std::size_t>(scores.size()));
    for (long r = 0; r < scores.rows; ++r) {
      const float* const row = scores.value + r * scores.columns;
      const long label = labels[static_cast<std::size_t>(r)];
      float largest = row[0], sum = 0;
      for (long c = 1; c < scores.columns; ++c) largest = std::fmax(largest, row[c]);
      for (long c = 0; c < scores.columns; ++c) sum += std::exp(row[c] - largest);
      loss += static_cast<double>(std::log(sum) + largest - row[label]);
      for (long c = 0; c < scores.columns; ++c)
        gradient[static_cast<std::size_t>(r * scores.columns + c)] =
            seed * (std::exp(row[c] - largest) / sum - (c == label ? 1.0f : 0.0f));
    }
    record([&scores, gradient = std::move(gradient)] {
      for (long i = 0; i < scores.size(); ++i) scores.gradient[i] += gradient[static_cast<std::size_t>(i)];
    });
    return loss;
  }

  /// Calls `work` when the backward pass reaches this place.
  void record(std::function<void()> work) { backward_.push_back(std::move(work)); }

  void backward() {
    while (!backward_.empty()) {
      backward_.back()();
      backward_.pop_back();
    }
  }
  /// Frees the results of a step.
  void clear() {
    backward_.clear();
    results_.clear();
  }

 private:
  struct result {
    matrix shape;
    std::vector<float> value, gradient;
  };
  matrix& make(long rows, long columns) {
    const auto n = static_cast<std::size_t>(rows * columns);
    result& r = results_.emplace_back(result{{rows, columns}, std::vector<float>(n), std::vector<float>(n)});
    r.shape.value = r.value.data(), r.shape.gradient = r.gradient.data();
    return r.shape;
  }

  std::deque<result> results_;  ///< a deque, so that results keep their addresses
  std::vector<std::function<void()>> backward_;
};
