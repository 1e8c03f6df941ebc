// Trains a residual network, on one processor, to predict the next byte of a text. The program has its own autograd,
// model and optimizer. zero.cpp is this program on several ranks, which shard weights, gradients and moments
// (ZeRO 3).
//
//     own_autograd_plain [STEPS [TEXT]]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tape.hpp"

namespace {

constexpr long vocab = 128, window = 16, width = 48, inner = 128, blocks = 4, samples = 32;

// ---- weights -------------------------------------------------------------------------------------------------------

/// Matrices that are used together, one after the other in one array.
struct unit {
  std::vector<matrix> parts;
  long size = 0;
  std::vector<float> value, gradient, moment1, moment2;
};

/// A shape, and the deviation of the first values; 0: all are ones.
struct shape {
  long rows, columns;
  float deviation;
};

void make_unit(unit& u, const std::vector<shape>& shapes) {
  for (const shape& s : shapes) u.parts.push_back({s.rows, s.columns}), u.size += s.rows * s.columns;
  for (std::vector<float>* all : {&u.value, &u.gradient, &u.moment1, &u.moment2}) all->resize(u.size);
  float* value = u.value.data();
  float* gradient = u.gradient.data();
  for (matrix& m : u.parts) {
    m.value = value, m.gradient = gradient;
    value += m.size(), gradient += m.size();
  }
}

/// Writes normally distributed numbers (Box and Muller's), equal in every run.
void initialize(float* to, const std::vector<shape>& shapes, unsigned long long state) {
  const auto uniform = [&] {  // in (0, 1), by the generator of Knuth's MMIX
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (static_cast<double>(state >> 40) + 0.5) / (1 << 24);
  };
  for (const shape& s : shapes)
    for (long i = 0; i < s.rows * s.columns; ++i) {
      const double length = std::sqrt(-2 * std::log(uniform())), angle = 6.283185307179586 * uniform();
      *to++ = s.deviation == 0 ? 1 : s.deviation * static_cast<float>(length * std::cos(angle));
    }
}

const std::vector<shape> first = {{vocab, width, 0.5f}, {window * width, width, 0.05f}};
const std::vector<shape> block = {{1, width, 0}, {width, inner, 0.1f}, {1, inner, 0.01f}, {inner, width, 0.03f}};
const std::vector<shape> last = {{1, width, 0}, {width, vocab, 0.05f}};

struct model {
  std::vector<unit> units;  // the first, the blocks, the last
};

void make_model(model& m) {
  m.units.resize(blocks + 2);
  for (long i = 0; i < blocks + 2; ++i) {
    const std::vector<shape>& shapes = i == 0 ? first : i <= blocks ? block : last;
    make_unit(m.units[i], shapes);
    initialize(m.units[i].value.data(), shapes, i + 1);
  }
}

// ---- a step --------------------------------------------------------------------------------------------------------

/// Returns the loss, and leaves its gradients in the units.
double run(tape& t, model& m, const std::vector<int>& ids, const std::vector<int>& labels) {
  const unit& start = m.units.front();
  const matrix* x = &t.multiply(t.look_up(start.parts[0], ids, window), start.parts[1]);
  for (long i = 1; i <= blocks; ++i) {
    const unit& u = m.units[i];
    const matrix& inner_rows = t.add_row(t.multiply(t.normalize(*x, u.parts[0]), u.parts[1]), u.parts[2]);
    x = &t.add(*x, t.multiply(t.swish(inner_rows), u.parts[3]));
  }
  const unit& end = m.units.back();
  const matrix& scores = t.multiply(t.normalize(*x, end.parts[0]), end.parts[1]);
  const double loss = t.cross_entropy(scores, labels, 1.0f / samples);
  for (unit& u : m.units) std::fill(u.gradient.begin(), u.gradient.end(), 0.0f);
  t.backward();
  t.clear();
  return loss / samples;
}

double gradient_norm(const model& m) {
  double squares = 0;
  for (const unit& u : m.units)
    for (const float g : u.gradient) squares += static_cast<double>(g) * static_cast<double>(g);
  return std::sqrt(squares);
}

/// AdamW on gradients times `scale`.
void update(model& m, int step, float rate, float scale) {
  const float beta1 = 0.9f, beta2 = 0.95f, decay = 0.01f;
  const float correct1 = 1 - std::pow(beta1, static_cast<float>(step));
  const float correct2 = 1 - std::pow(beta2, static_cast<float>(step));
  for (unit& u : m.units) {
    for (std::size_t i = 0; i < u.value.size(); ++i) {
      const float g = scale * u.gradient[i];
      u.moment1[i] = beta1 * u.moment1[i] + (1 - beta1) * g;
      u.moment2[i] = beta2 * u.moment2[i] + (1 - beta2) * g * g;
      const float root = std::sqrt(u.moment2[i] / correct2) + 1e-8f;
      u.value[i] -= rate * (u.moment1[i] / correct1 / root + decay * u.value[i]);
    }
  }
}

/// Sample n, counted over all steps, is the text from byte 997 n on.
void read_samples(std::vector<int>& ids, std::vector<int>& labels, const std::vector<unsigned char>& text, long from,
                  long count) {
  ids.clear(), labels.clear();
  for (long n = from; n < from + count; ++n) {
    const std::size_t at = n * 997 % (text.size() - window);
    for (long i = 0; i < window; ++i) ids.push_back(text[at + i] % vocab);
    labels.push_back(text[at + window] % vocab);
  }
}

void train(int steps, const std::vector<unsigned char>& text) {
  model m;
  make_model(m);
  tape t;
  std::vector<int> ids, labels;
  for (int step = 1; step <= steps; ++step) {
    read_samples(ids, labels, text, (step - 1) * samples, samples);
    const double loss = run(t, m, ids, labels);
    const double norm = gradient_norm(m);
    update(m, step, 3e-3f, static_cast<float>(std::min(1.0, 1.0 / norm)));
    std::printf("step %d  loss %.9g  gradient norm %.9g\n", step, loss, norm);
  }
  long floats = 0;
  for (const unit& u : m.units) floats += 4 * u.size;
  std::fprintf(stderr, "%ld bytes of weights, gradients and moments\n", 4 * floats);
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 10;
  const char* path = argc > 2 ? argv[2] : "examples/data/kjv.txt";
  std::vector<unsigned char> text;
  std::FILE* file = std::fopen(path, "rb");
  for (int byte; file && (byte = std::getc(file)) != EOF;) text.push_back(static_cast<unsigned char>(byte));
  if (file) std::fclose(file);
  if (text.size() <= window) return std::fprintf(stderr, "there is no text to read in %s\n", path), 1;
  train(steps, text);
  return 0;
}
