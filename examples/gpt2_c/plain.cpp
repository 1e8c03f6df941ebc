// A GPT-2 in C style: a block of malloc'ed memory for the weights, one for their gradients and one for the activations,
// its own kernels forward and backward, and its own AdamW. It trains on the bytes of a text, on one core. parallel.cpp
// is the same program on several ranks.
//
//   plain [STEPS] [TEXT]     10 and examples/data/kjv.txt if none are given
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "blocks.hpp"

namespace {

constexpr long layers = 4, head_size = 16;

struct config {
  long samples, length, width, heads, inner, vocab;
};
constexpr config gpt = {4, 64, 64, 4, 256, 256};

// ---- kernels: they overwrite outputs and gradients of activations, and add to gradients of weights -----------------

/// x [rows, width] = the rows of the table that the tokens name.
void lookup_forward(float* x, const int* tokens, const float* table, long rows, long width) {
  for (long r = 0; r < rows; ++r) memcpy(x + r * width, table + tokens[r] * width, width * sizeof(float));
}
void lookup_backward(float* dtable, const int* tokens, const float* dx, long rows, long width) {
  for (long r = 0; r < rows; ++r)
    for (long c = 0; c < width; ++c) dtable[tokens[r] * width + c] += dx[r * width + c];
}

/// x [samples, length, width] += places [length, width], the learned positions.
void places_forward(float* x, const float* places, long samples, long length, long width) {
  for (long b = 0; b < samples; ++b)
    for (long i = 0; i < length * width; ++i) x[b * length * width + i] += places[i];
}
void places_backward(float* dplaces, const float* dx, long samples, long length, long width) {
  for (long b = 0; b < samples; ++b)
    for (long i = 0; i < length * width; ++i) dplaces[i] += dx[b * length * width + i];
}

/// y = (x - mean) / sqrt(variance + 1e-5) w + b for each row; mean and inv, the root's inverse, are for backward.
void norm_forward(float* y, float* mean, float* inv, const float* x, const float* w, const float* b, long rows,
                  long width) {
  for (long r = 0; r < rows; ++r, x += width, y += width) {
    float sum = 0, squares = 0;
    for (long c = 0; c < width; ++c) sum += x[c];
    mean[r] = sum / width;
    for (long c = 0; c < width; ++c) squares += (x[c] - mean[r]) * (x[c] - mean[r]);
    inv[r] = 1 / sqrtf(squares / width + 1e-5f);
    for (long c = 0; c < width; ++c) y[c] = (x[c] - mean[r]) * inv[r] * w[c] + b[c];
  }
}
void norm_backward(float* dx, float* dw, float* db, const float* dy, const float* x, const float* w, const float* mean,
                   const float* inv, long rows, long width) {
  for (long r = 0; r < rows; ++r, x += width, dx += width, dy += width) {
    float sum = 0, dot = 0;
    for (long c = 0; c < width; ++c) {
      const float normed = (x[c] - mean[r]) * inv[r];
      dw[c] += dy[c] * normed;
      db[c] += dy[c];
      sum += dy[c] * w[c];
      dot += dy[c] * w[c] * normed;
    }
    for (long c = 0; c < width; ++c)
      dx[c] = (dy[c] * w[c] - sum / width - (x[c] - mean[r]) * inv[r] * dot / width) * inv[r];
  }
}

/// y [rows, out] = x [rows, in] w' + b, with w [out, in]; b may be null.
void matmul_forward(float* y, const float* x, const float* w, const float* b, long rows, long in, long out) {
  constexpr long lanes = 16;  // sums that a vector unit forms together
  for (long r = 0; r < rows; ++r)
    for (long o = 0; o < out; ++o) {
      float sums[lanes] = {}, sum = b ? b[o] : 0;
      for (long i = 0; i < in; i += lanes)
        for (long k = 0; k < lanes; ++k) sums[k] += x[r * in + i + k] * w[o * in + i + k];
      for (long k = 0; k < lanes; ++k) sum += sums[k];
      y[r * out + o] = sum;
    }
}
void matmul_backward(float* dx, float* dw, float* db, const float* dy, const float* x, const float* w, long rows,
                     long in, long out) {
  memset(dx, 0, rows * in * sizeof(float));
  for (long r = 0; r < rows; ++r)
    for (long o = 0; o < out; ++o) {
      const float d = dy[r * out + o];
      if (db) db[o] += d;
      for (long i = 0; i < in; ++i) dx[r * in + i] += d * w[o * in + i];
      for (long i = 0; i < in; ++i) dw[o * in + i] += d * x[r * in + i];
    }
}

/// Causal attention of qkv [samples, length, 3, heads, head_size]; probs [samples, heads, length, length] is for
/// backward.
void attention_forward(float* y, float* probs, const float* qkv, const config& c) {
  const long samples = c.samples, length = c.length, width = c.heads * head_size;
  const float scale = 1 / sqrtf(head_size);
  for (long b = 0; b < samples; ++b)
    for (long h = 0; h < c.heads; ++h)
      for (long t = 0; t < length; ++t) {
        const float* q = qkv + (b * length + t) * 3 * width + h * head_size;
        const float* k = qkv + b * length * 3 * width + width + h * head_size;
        const float* v = k + width;
        float* p = probs + ((b * c.heads + h) * length + t) * length;
        float* out = y + (b * length + t) * width + h * head_size;
        float top = -INFINITY, sum = 0;
        for (long s = 0; s <= t; ++s) {
          float dot = 0;
          for (long i = 0; i < head_size; ++i) dot += q[i] * k[s * 3 * width + i];
          p[s] = dot * scale;
          if (p[s] > top) top = p[s];
        }
        for (long s = 0; s <= t; ++s) sum += p[s] = expf(p[s] - top);
        for (long i = 0; i < head_size; ++i) out[i] = 0;
        for (long s = 0; s <= t; ++s) {
          p[s] /= sum;
          for (long i = 0; i < head_size; ++i) out[i] += p[s] * v[s * 3 * width + i];
        }
      }
}
void attention_backward(float* dqkv, const float* dy, const float* probs, const float* qkv, const config& c) {
  const long samples = c.samples, length = c.length, width = c.heads * head_size;
  const float scale = 1 / sqrtf(head_size);
  memset(dqkv, 0, samples * length * 3 * width * sizeof(float));
  for (long b = 0; b < samples; ++b)
    for (long h = 0; h < c.heads; ++h)
      for (long t = 0; t < length; ++t) {
        const long query = (b * length + t) * 3 * width + h * head_size;
        const long first_key = b * length * 3 * width + width + h * head_size;
        const float* p = probs + ((b * c.heads + h) * length + t) * length;
        const float* dout = dy + (b * length + t) * width + h * head_size;
        float mean = 0;  // of dp under p
        for (long s = 0; s <= t; ++s) {
          const long value = first_key + width + s * 3 * width;
          for (long i = 0; i < head_size; ++i) {
            mean += p[s] * dout[i] * qkv[value + i];
            dqkv[value + i] += p[s] * dout[i];
          }
        }
        for (long s = 0; s <= t; ++s) {
          const long key = first_key + s * 3 * width;
          float dp = 0;
          for (long i = 0; i < head_size; ++i) dp += dout[i] * qkv[key + width + i];
          const float dscore = p[s] * (dp - mean) * scale;
          for (long i = 0; i < head_size; ++i) {
            dqkv[query + i] += dscore * qkv[key + i];
            dqkv[key + i] += dscore * qkv[query + i];
          }
        }
      }
}

/// y = 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
void gelu_forward(float* y, const float* x, long n) {
  for (long i = 0; i < n; ++i)
    y[i] = 0.5f * x[i] * (1 + tanhf(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
}
void gelu_backward(float* dx, const float* dy, const float* x, long n) {
  for (long i = 0; i < n; ++i) {
    const float t = tanhf(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i]));
    dx[i] = dy[i] * 0.5f * (1 + t + x[i] * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * x[i] * x[i]));
  }
}

void residual_forward(float* y, const float* x, const float* branch, long n) {
  for (long i = 0; i < n; ++i) y[i] = x[i] + branch[i];
}
void residual_backward(float* dx, const float* dbranch, long n) {
  for (long i = 0; i < n; ++i) dx[i] += dbranch[i];
}

/// The mean cross-entropy of logits [rows, vocab], which become their gradient.
double loss_and_gradient(float* logits, const int* labels, long rows, long vocab) {
  double loss = 0;
  for (long r = 0; r < rows; ++r, logits += vocab) {
    float top = -INFINITY, sum = 0;
    for (long v = 0; v < vocab; ++v)
      if (logits[v] > top) top = logits[v];
    for (long v = 0; v < vocab; ++v) sum += expf(logits[v] - top);
    loss += logf(sum) + top - logits[labels[r]];
    for (long v = 0; v < vocab; ++v) logits[v] = (expf(logits[v] - top) / sum - (v == labels[r])) / rows;
  }
  return loss / rows;
}

// ---- memory --------------------------------------------------------------------------------------------------------

struct layer_parameters {
  float *norm1_w, *norm1_b, *qkv_w, *qkv_b, *proj_w, *proj_b, *norm2_w, *norm2_b, *up_w, *up_b, *down_w, *down_b;
};
struct parameters {
  float *table, *places, *norm_w, *norm_b;
  layer_parameters layer[layers];
};
/// All tensors, in the order in which they lie in a block.
std::vector<tensor> tensors_of(parameters& p, const config& c) {
  const long width = c.width, mixed = c.heads * head_size;
  std::vector<tensor> all = {{&p.table, c.vocab * width, 0, 0.02f},
                             {&p.places, c.length * width, 0, 0.02f},
                             {&p.norm_w, width, 1, 0},
                             {&p.norm_b, width, 0, 0}};
  for (layer_parameters& l : p.layer)
    all.insert(all.end(), {{&l.norm1_w, width, 1, 0},
                           {&l.norm1_b, width, 0, 0},
                           {&l.qkv_w, 3 * mixed * width, 0, 0.02f},
                           {&l.qkv_b, 3 * mixed, 0, 0},
                           {&l.proj_w, width * mixed, 0, 0.02f / sqrtf(2 * layers)},
                           {&l.proj_b, width, 0, 0},
                           {&l.norm2_w, width, 1, 0},
                           {&l.norm2_b, width, 0, 0},
                           {&l.up_w, c.inner * width, 0, 0.02f},
                           {&l.up_b, c.inner, 0, 0},
                           {&l.down_w, width * c.inner, 0, 0.02f / sqrtf(2 * layers)},
                           {&l.down_b, width, 0, 0}});
  return all;
}

struct layer_activations {
  float *norm1, *qkv, *probs, *mixed, *sum1, *norm2, *up, *active, *sum2;
  float *mean1, *inv1, *mean2, *inv2;  // of the norms
};
struct activations {
  float *encoded, *branch, *norm, *logits;
  float *mean, *inv;
  layer_activations layer[layers];
  float *dx, *dbranch, *dnorm, *dqkv, *dmixed, *dup, *dactive;  // gradients, of one layer at a time
};

std::vector<tensor> tensors_of(activations& a, const config& c) {
  const long rows = c.samples * c.length, mixed = c.heads * head_size;
  const long stream = rows * c.width;  // the values between two layers
  std::vector<tensor> all;
  for (float** at : {&a.encoded, &a.branch, &a.norm, &a.dx, &a.dbranch, &a.dnorm}) all.push_back({at, stream});
  for (layer_activations& l : a.layer) {
    for (float** at : {&l.norm1, &l.sum1, &l.norm2, &l.sum2}) all.push_back({at, stream});
    for (float** at : {&l.mean1, &l.inv1, &l.mean2, &l.inv2}) all.push_back({at, rows});
    all.insert(all.end(),
               {{&l.qkv, rows * 3 * mixed}, {&l.probs, rows * c.heads * c.length}, {&l.mixed, rows * mixed}});
    all.insert(all.end(), {{&l.up, rows * c.inner}, {&l.active, rows * c.inner}});
  }
  all.insert(all.end(), {{&a.mean, rows}, {&a.inv, rows}});
  all.push_back({&a.logits, rows * c.vocab});
  all.insert(all.end(), {{&a.dqkv, rows * 3 * mixed}, {&a.dmixed, rows * mixed}});
  all.insert(all.end(), {{&a.dup, rows * c.inner}, {&a.dactive, rows * c.inner}});
  return all;
}

// ---- the model -----------------------------------------------------------------------------------------------------

struct model {
  config c;
  parameters w, g;  // weights and their gradients
  activations a;
  long size;                                                // of each block of parameters
  float *weights, *gradients, *moment1, *moment2, *memory;  // the blocks
};

void make_model(model& m, const config& c) {
  m.c = c;
  m.size = total(tensors_of(m.w, c));
  m.weights = make_block(tensors_of(m.w, c));
  m.gradients = make_block(tensors_of(m.g, c));
  m.memory = make_block(tensors_of(m.a, c));
  m.moment1 = static_cast<float*>(calloc(m.size, sizeof(float)));
  m.moment2 = static_cast<float*>(calloc(m.size, sizeof(float)));
}
void free_model(model& m) {
  for (float* block : {m.weights, m.gradients, m.moment1, m.moment2, m.memory}) free(block);
}

/// Returns the mean loss; the logits become their gradient.
double forward(model& m, const int* tokens, const int* labels) {
  const config& c = m.c;
  const long rows = c.samples * c.length, width = c.width;
  const long mixed = c.heads * head_size, stream = rows * width;
  lookup_forward(m.a.encoded, tokens, m.w.table, rows, width);
  places_forward(m.a.encoded, m.w.places, c.samples, c.length, width);
  const float* x = m.a.encoded;
  for (long i = 0; i < layers; ++i) {
    const layer_parameters& w = m.w.layer[i];
    const layer_activations& a = m.a.layer[i];
    norm_forward(a.norm1, a.mean1, a.inv1, x, w.norm1_w, w.norm1_b, rows, width);
    matmul_forward(a.qkv, a.norm1, w.qkv_w, w.qkv_b, rows, width, 3 * mixed);
    attention_forward(a.mixed, a.probs, a.qkv, c);
    matmul_forward(m.a.branch, a.mixed, w.proj_w, w.proj_b, rows, mixed, width);
    residual_forward(a.sum1, x, m.a.branch, stream);
    norm_forward(a.norm2, a.mean2, a.inv2, a.sum1, w.norm2_w, w.norm2_b, rows, width);
    matmul_forward(a.up, a.norm2, w.up_w, w.up_b, rows, width, c.inner);
    gelu_forward(a.active, a.up, rows * c.inner);
    matmul_forward(m.a.branch, a.active, w.down_w, w.down_b, rows, c.inner, width);
    residual_forward(a.sum2, a.sum1, m.a.branch, stream);
    x = a.sum2;
  }
  norm_forward(m.a.norm, m.a.mean, m.a.inv, x, m.w.norm_w, m.w.norm_b, rows, width);
  matmul_forward(m.a.logits, m.a.norm, m.w.table, nullptr, rows, width, c.vocab);
  return loss_and_gradient(m.a.logits, labels, rows, c.vocab);
}

void backward(model& m, const int* tokens) {
  const config& c = m.c;
  const long rows = c.samples * c.length, width = c.width;
  const long mixed = c.heads * head_size, stream = rows * width;
  float *dx = m.a.dx, *dbranch = m.a.dbranch, *dnorm = m.a.dnorm;
  memset(m.gradients, 0, m.size * sizeof(float));
  matmul_backward(dnorm, m.g.table, nullptr, m.a.logits, m.a.norm, m.w.table, rows, width, c.vocab);
  const float* x = m.a.layer[layers - 1].sum2;
  norm_backward(dx, m.g.norm_w, m.g.norm_b, dnorm, x, m.w.norm_w, m.a.mean, m.a.inv, rows, width);
  for (long i = layers - 1; i >= 0; --i) {
    const layer_parameters &w = m.w.layer[i], &g = m.g.layer[i];
    const layer_activations& a = m.a.layer[i];
    x = i > 0 ? m.a.layer[i - 1].sum2 : m.a.encoded;
    matmul_backward(m.a.dactive, g.down_w, g.down_b, dx, a.active, w.down_w, rows, c.inner, width);
    gelu_backward(m.a.dup, m.a.dactive, a.up, rows * c.inner);
    matmul_backward(dnorm, g.up_w, g.up_b, m.a.dup, a.norm2, w.up_w, rows, width, c.inner);
    norm_backward(dbranch, g.norm2_w, g.norm2_b, dnorm, a.sum1, w.norm2_w, a.mean2, a.inv2, rows, width);
    residual_backward(dx, dbranch, stream);
    matmul_backward(m.a.dmixed, g.proj_w, g.proj_b, dx, a.mixed, w.proj_w, rows, mixed, width);
    attention_backward(m.a.dqkv, m.a.dmixed, a.probs, a.qkv, c);
    matmul_backward(dnorm, g.qkv_w, g.qkv_b, m.a.dqkv, a.norm1, w.qkv_w, rows, width, 3 * mixed);
    norm_backward(dbranch, g.norm1_w, g.norm1_b, dnorm, x, w.norm1_w, a.mean1, a.inv1, rows, width);
    residual_backward(dx, dbranch, stream);
  }
  places_backward(m.g.places, dx, c.samples, c.length, width);
  lookup_backward(m.g.table, tokens, dx, rows, width);
}

double gradient_norm(const model& m) {
  double squares = 0;
  for (long i = 0; i < m.size; ++i) squares += static_cast<double>(m.gradients[i]) * m.gradients[i];
  return sqrt(squares);
}

/// AdamW, with the same decay for all weights.
void update(model& m, int step, float rate) {
  const float beta1 = 0.9f, beta2 = 0.95f, decay = 0.1f;
  const float correct1 = 1 - powf(beta1, step), correct2 = 1 - powf(beta2, step);
  for (long i = 0; i < m.size; ++i) {
    m.moment1[i] = beta1 * m.moment1[i] + (1 - beta1) * m.gradients[i];
    m.moment2[i] = beta2 * m.moment2[i] + (1 - beta2) * m.gradients[i] * m.gradients[i];
    const float scale = sqrtf(m.moment2[i] / correct2) + 1e-8f;
    m.weights[i] -= rate * (m.moment1[i] / correct1 / scale + decay * m.weights[i]);
  }
}

// ---- training ------------------------------------------------------------------------------------------------------

/// Sample n, counted over all steps, is the text from byte 997 n on.
void read_batch(int* tokens, int* labels, const std::vector<unsigned char>& text, int step) {
  for (long b = 0; b < gpt.samples; ++b)
    for (long t = 0; t < gpt.length; ++t) {
      const std::size_t at = (step * gpt.samples + b) * 997 % (text.size() - gpt.length - 1) + t;
      tokens[b * gpt.length + t] = text[at];
      labels[b * gpt.length + t] = text[at + 1];
    }
}

void train(int steps, const std::vector<unsigned char>& text) {
  int tokens[gpt.samples * gpt.length], labels[gpt.samples * gpt.length];
  model m;
  make_model(m, gpt);
  initialize(tensors_of(m.w, gpt));
  for (int step = 1; step <= steps; ++step) {
    read_batch(tokens, labels, text, step - 1);
    const double loss = forward(m, tokens, labels);
    backward(m, tokens);
    const double norm = gradient_norm(m);
    update(m, step, 1e-3f);
    printf("step %d  loss %.9g  gradient norm %.9g\n", step, loss, norm);
  }
  free_model(m);
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? atoi(argv[1]) : 10;
  const char* path = argc > 2 ? argv[2] : "examples/data/kjv.txt";
  std::vector<unsigned char> text;
  FILE* file = fopen(path, "rb");
  for (int byte; file && (byte = getc(file)) != EOF;) text.push_back(static_cast<unsigned char>(byte));
  if (file) fclose(file);
  if (text.size() <= gpt.length + 1) return fprintf(stderr, "there is no text to read in %s\n", path), 1;
  train(steps, text);
  return 0;
}
