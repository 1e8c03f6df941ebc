// A small MLP in C: two residual layers x + down gelu(up x + b) learn a function, by gradient descent.
//
//   plain [STEPS]
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { layers = 2, samples = 32, width = 16, features = 64 };

// ---- kernels: they overwrite outputs and gradients of activations, and add to gradients of weights -----------------

// y [rows, out] = x [rows, in] w' [out, in]
static void matmul_forward(float* y, const float* x, const float* w, long rows, long in, long out) {
  for (long r = 0; r < rows; ++r)
    for (long o = 0; o < out; ++o) {
      float sum = 0;
      for (long i = 0; i < in; ++i) sum += x[r * in + i] * w[o * in + i];
      y[r * out + o] = sum;
    }
}
static void matmul_backward_input(float* dx, const float* dy, const float* w, long rows, long in, long out) {
  for (long r = 0; r < rows; ++r)
    for (long i = 0; i < in; ++i) {
      float sum = 0;
      for (long o = 0; o < out; ++o) sum += dy[r * out + o] * w[o * in + i];
      dx[r * in + i] = sum;
    }
}
static void matmul_backward_weight(float* dw, const float* dy, const float* x, long rows, long in, long out) {
  for (long r = 0; r < rows; ++r)
    for (long o = 0; o < out; ++o)
      for (long i = 0; i < in; ++i) dw[o * in + i] += dy[r * out + o] * x[r * in + i];
}
static void bias_forward(float* y, const float* b, long rows, long out) {
  for (long r = 0; r < rows; ++r)
    for (long o = 0; o < out; ++o) y[r * out + o] += b[o];
}
static void bias_backward(float* db, const float* dy, long rows, long out) {
  for (long r = 0; r < rows; ++r)
    for (long o = 0; o < out; ++o) db[o] += dy[r * out + o];
}

// y = 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
static void gelu_forward(float* y, const float* x, long n) {
  for (long i = 0; i < n; ++i)
    y[i] = 0.5f * x[i] * (1 + tanhf(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
}
static void gelu_backward(float* dx, const float* dy, const float* x, long n) {
  for (long i = 0; i < n; ++i) {
    const float t = tanhf(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i]));
    dx[i] = dy[i] * 0.5f * (1 + t + x[i] * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * x[i] * x[i]));
  }
}
static void residual_forward(float* y, const float* x, const float* branch, long n) {
  for (long i = 0; i < n; ++i) y[i] = x[i] + branch[i];
}
static void residual_backward(float* dx, const float* dbranch, long n) {
  for (long i = 0; i < n; ++i) dx[i] += dbranch[i];
}

// The mean square of y - target, and its gradient.
static double loss_backward(float* dy, const float* y, const float* target, long n) {
  double sum = 0;
  for (long i = 0; i < n; ++i) {
    const float apart = y[i] - target[i];
    sum += (double)apart * apart;
    dy[i] = 2 * apart / (float)n;
  }
  return sum / (double)n;
}

static void update(float* w, float* dw, long n, float rate) {
  for (long i = 0; i < n; ++i) w[i] -= rate * dw[i], dw[i] = 0;
}

// ---- the model -----------------------------------------------------------------------------------------------------

typedef struct {
  float *up_w, *up_b, *down_w;     // [features, width], [features], [width, features]
  float *dup_w, *dup_b, *ddown_w;  // their gradients
  float *x, *up, *active;          // kept by the forward pass: [samples, width], twice [samples, features]
} layer;
typedef struct {
  layer layer[layers];
  float *y, *branch;                    // [samples, width]
  float *dx, *dbranch, *dup, *dactive;  // gradients, of one layer at a time
} model;

static float* zeros(long n) { return calloc((size_t)n, sizeof(float)); }

// Writes numbers in [-scale, scale), which depend only on the state.
static void fill(float* x, long n, float scale, uint64_t* state) {
  for (long i = 0; i < n; ++i) {  // the generator of Knuth's MMIX
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    x[i] = scale * ((float)(*state >> 40) / (1 << 23) - 1);
  }
}

static void make_model(model* m) {
  uint64_t state = 1;
  for (int i = 0; i < layers; ++i) {
    layer* l = &m->layer[i];
    l->up_w = zeros(features * width), l->dup_w = zeros(features * width);
    l->up_b = zeros(features), l->dup_b = zeros(features);
    l->down_w = zeros(width * features), l->ddown_w = zeros(width * features);
    fill(l->up_w, features * width, 0.4f, &state);
    fill(l->down_w, width * features, 0.2f, &state);
    l->x = zeros(samples * width), l->up = zeros(samples * features), l->active = zeros(samples * features);
  }
  m->y = zeros(samples * width), m->branch = zeros(samples * width);
  m->dx = zeros(samples * width), m->dbranch = zeros(samples * width);
  m->dup = zeros(samples * features), m->dactive = zeros(samples * features);
}
static void free_model(model* m) {
  for (int i = 0; i < layers; ++i) {
    layer* l = &m->layer[i];
    float* all[] = {l->up_w, l->dup_w, l->up_b, l->dup_b, l->down_w, l->ddown_w, l->x, l->up, l->active};
    for (size_t k = 0; k < sizeof all / sizeof *all; ++k) free(all[k]);
  }
  float* all[] = {m->y, m->branch, m->dx, m->dbranch, m->dup, m->dactive};
  for (size_t k = 0; k < sizeof all / sizeof *all; ++k) free(all[k]);
}

static void forward(model* m) {
  for (int i = 0; i < layers; ++i) {
    layer* l = &m->layer[i];
    matmul_forward(l->up, l->x, l->up_w, samples, width, features);
    bias_forward(l->up, l->up_b, samples, features);
    gelu_forward(l->active, l->up, samples * features);
    matmul_forward(m->branch, l->active, l->down_w, samples, features, width);
    residual_forward(i + 1 < layers ? m->layer[i + 1].x : m->y, l->x, m->branch, samples * width);
  }
}
static void backward(model* m) {
  for (int i = layers - 1; i >= 0; --i) {
    layer* l = &m->layer[i];
    matmul_backward_weight(l->ddown_w, m->dx, l->active, samples, features, width);
    matmul_backward_input(m->dactive, m->dx, l->down_w, samples, features, width);
    gelu_backward(m->dup, m->dactive, l->up, samples * features);
    bias_backward(l->dup_b, m->dup, samples, features);
    matmul_backward_weight(l->dup_w, m->dup, l->x, samples, width, features);
    matmul_backward_input(m->dbranch, m->dup, l->up_w, samples, width, features);
    residual_backward(m->dx, m->dbranch, samples * width);
  }
}

// The function to learn: target = sin(2 x + the next x of the sample).
static void read_batch(float* x, float* target, int step) {
  uint64_t state = 1000 + (uint64_t)step;
  fill(x, samples * width, 1, &state);
  for (long i = 0; i < samples * width; ++i) target[i] = sinf(2 * x[i] + x[i / width * width + (i + 1) % width]);
}

int main(int argc, char** argv) {
  const int steps = argc > 1 ? atoi(argv[1]) : 20;
  float target[samples * width];
  model m;
  make_model(&m);
  for (int step = 1; step <= steps; ++step) {
    read_batch(m.layer[0].x, target, step);
    forward(&m);
    const double loss = loss_backward(m.dx, m.y, target, samples * width);
    backward(&m);
    for (int i = 0; i < layers; ++i) {
      layer* l = &m.layer[i];
      update(l->up_w, l->dup_w, features * width, 1);
      update(l->up_b, l->dup_b, features, 1);
      update(l->down_w, l->ddown_w, width * features, 1);
    }
    printf("step %d  loss %.9g\n", step, loss);
  }
  free_model(&m);
  return 0;
}
