// plain.c on several ranks, tensor-parallel: each has a part of the features. This file is C, too. layouts.h has the
// layouts of its arrays, and its collectives.
//
//   parallel [STEPS] [RANKS]     RANKS threads, 2 if none are given, or "mpi": the processes of mpirun
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layouts.h"

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

// ---- the kernels on arrays, as layouts.h declares them --------------------------------------------------------------

void gelu(inner y, inner x) { gelu_forward(y.data, x.data, x.size); }
void gelu_gradient(inner dx, inner dy, inner x) { gelu_backward(dx.data, dy.data, x.data, x.size); }
void down(terms y, inner x, down_weight w) { matmul_forward(y.data, x.data, w.data, samples, w.size / width, width); }
void down_input_gradient(inner dx, copies dy, down_weight w) {
  matmul_backward_input(dx.data, dy.data, w.data, samples, w.size / width, width);
}
void down_weight_gradient(down_weight dw, copies dy, inner x) {
  matmul_backward_weight(dw.data, dy.data, x.data, samples, dw.size / width, width);
}
void add_branch(residual y, residual x, residual branch) { residual_forward(y.data, x.data, branch.data, y.size); }
void add_gradient(residual dx, residual dbranch) { residual_backward(dx.data, dbranch.data, dx.size); }

// ---- the model -----------------------------------------------------------------------------------------------------

typedef struct {
  up_layer* up_layer;
  up_weight up_w, dup_w;
  up_bias up_b, dup_b;
  down_weight down_w, ddown_w;
  residual x;  // kept by the forward pass
  inner up, active;
} layer;
typedef struct {
  layer layer[layers];
  residual y;
  terms product;
  residual dx, dbranch;  // gradients, of one layer at a time
  inner dup, dactive;
} model;

static float* zeros(int64_t n) { return calloc((size_t)n, sizeof(float)); }
// Makes an array of zeros, as large as this rank's part.
#define MAKE(type) type##_of(c, zeros(type##_size(c)))

// Writes numbers in [-scale, scale), which depend only on the state.
static void fill(float* x, long n, float scale, uint64_t* state) {
  for (long i = 0; i < n; ++i) {  // the generator of Knuth's MMIX
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    x[i] = scale * ((float)(*state >> 40) / (1 << 23) - 1);
  }
}

static int make_model(plait_context* c, model* m) {
  uint64_t state = 1;
  float whole[features * width];  // an array of plain.c; every rank takes its part of it
  for (int i = 0; i < layers; ++i) {
    layer* l = &m->layer[i];
    l->up_w = MAKE(up_weight), l->dup_w = MAKE(up_weight);
    l->up_b = MAKE(up_bias), l->dup_b = MAKE(up_bias);
    l->down_w = MAKE(down_weight), l->ddown_w = MAKE(down_weight);
    fill(whole, features * width, 0.4f, &state);
    if (up_weight_take(c, whole, l->up_w)) return 1;
    fill(whole, width * features, 0.2f, &state);
    if (down_weight_take(c, whole, l->down_w)) return 1;
    l->up_layer = up_layer_make(c, l->up_w, l->dup_w.data, l->up_b, l->dup_b.data);
    l->x = MAKE(residual), l->up = MAKE(inner), l->active = MAKE(inner);
  }
  m->y = MAKE(residual), m->product = MAKE(terms);
  m->dx = MAKE(residual), m->dbranch = MAKE(residual);
  m->dup = MAKE(inner), m->dactive = MAKE(inner);
  return plait_failed(c);
}
static void free_model(model* m) {
  for (int i = 0; i < layers; ++i) {
    layer* l = &m->layer[i];
    float* all[] = {l->up_w.data,    l->dup_w.data, l->up_b.data, l->dup_b.data, l->down_w.data,
                    l->ddown_w.data, l->x.data,     l->up.data,   l->active.data};
    for (size_t k = 0; k < sizeof all / sizeof *all; ++k) free(all[k]);
  }
  float* all[] = {m->y.data, m->product.data, m->dx.data, m->dbranch.data, m->dup.data, m->dactive.data};
  for (size_t k = 0; k < sizeof all / sizeof *all; ++k) free(all[k]);
}

static int forward(plait_context* c, model* m) {
  for (int i = 0; i < layers; ++i) {
    layer* l = &m->layer[i];
    if (up_layer_forward(c, l->up_layer, l->x, l->up)) return 1;
    gelu(l->active, l->up);
    down(m->product, l->active, l->down_w);
    const residual branch = sum_terms(c, m->product);
    add_branch(i + 1 < layers ? m->layer[i + 1].x : m->y, l->x, branch);
  }
  return 0;
}
static int backward(plait_context* c, model* m) {
  for (int i = layers - 1; i >= 0; --i) {
    layer* l = &m->layer[i];
    const copies dy = copies_of_residual(c, m->dx);
    down_weight_gradient(l->ddown_w, dy, l->active);
    down_input_gradient(m->dactive, dy, l->down_w);
    gelu_gradient(m->dup, m->dactive, l->up);
    if (up_layer_backward(c, l->up_layer, l->x, m->dup, m->dbranch)) return 1;
    add_gradient(m->dx, m->dbranch);
  }
  return plait_reduce_gradients(c);
}

// The function to learn: target = sin(2 x + the next x of the sample).
static void read_batch(float* x, float* target, int step) {
  uint64_t state = 1000 + (uint64_t)step;
  fill(x, samples * width, 1, &state);
  for (long i = 0; i < samples * width; ++i) target[i] = sinf(2 * x[i] + x[i / width * width + (i + 1) % width]);
}

static int train(plait_context* c, void* user) {
  const int steps = *(const int*)user;
  float target[samples * width];
  model m = {0};
  const mlp_sizes sizes = {.tp = plait_ranks(c), .batch = samples, .hidden = width, .ffn = features};
  if (mlp_begin(c, sizes) || make_model(c, &m)) return 1;
  for (int step = 1; step <= steps; ++step) {
    read_batch(m.layer[0].x.data, target, step);
    if (plait_begin_step(c) || forward(c, &m)) return 1;
    const double loss = loss_backward(m.dx.data, m.y.data, target, samples * width);
    if (backward(c, &m)) return 1;
    for (int i = 0; i < layers; ++i) {
      layer* l = &m.layer[i];
      update(l->up_w.data, l->dup_w.data, l->up_w.size, 1);
      update(l->up_b.data, l->dup_b.data, l->up_b.size, 1);
      update(l->down_w.data, l->ddown_w.data, l->down_w.size, 1);
    }
    if (plait_rank(c) == 0) printf("step %d  loss %.9g\n", step, loss);
  }
  free_model(&m);
  return 0;
}

int main(int argc, char** argv) {
  int steps = argc > 1 ? atoi(argv[1]) : 20, failed = 0;
  char text[4096] = "";
#ifdef WITH_MPI
  if (argc > 2 && !strcmp(argv[2], "mpi")) {
    MPI_Init(&argc, &argv);
    if (plait_run_mpi(MPI_COMM_WORLD, train, &steps, text, sizeof text)) {
      fprintf(stderr, "%s\n", text);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return MPI_Finalize();
  }
#endif
  failed = plait_run_threads(argc > 2 ? atoi(argv[2]) : 2, train, &steps, text, sizeof text);
  if (failed) fprintf(stderr, "%s\n", text);
  return failed;
}
