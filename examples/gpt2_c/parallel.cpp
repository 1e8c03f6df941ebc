// plain.cpp on several ranks, tensor- and sequence-parallel. Each rank has a part of the weights and of the
// activations, in the program's own memory. plait computes products, norms, lookup and loss, and calls all collectives.
//
//   parallel [STEPS] [TEXT] [RANKS]     RANKS threads, 2 if none are given, or "mpi": the processes of mpirun
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <span>
#include <vector>

#include "blocks.hpp"
#include "plait/nn.hpp"
#include "plait/parallel/gradient_norm.hpp"
#ifdef PLAIT_WITH_MPI
#include "plait/comm/mpi.hpp"
#endif

namespace pl = plait;
using pl::batch, pl::seq, pl::hidden, pl::heads, pl::head_dim, pl::ffn, pl::vocab, pl::position, pl::tp;

namespace {

// ---- layouts -------------------------------------------------------------------------------------------------------

struct three : pl::dim_tag<"three"> {};  // query, key and value
struct keys : pl::dim_tag<"keys"> {};    // the tokens that a query sees
using my_heads = pl::shard<heads, tp>;
using my_ffn = pl::shard<ffn, tp>;
using residual = pl::spec<batch, pl::shard<seq, tp>, hidden>;
using ids = pl::spec<batch, seq, pl::invariant<tp>>;
using per_head = pl::spec<batch, seq, my_heads, head_dim>;
using projected = pl::spec<batch, seq, three, my_heads, head_dim>;
using probabilities = pl::spec<batch, my_heads, seq, keys>;
using inner = pl::spec<batch, seq, my_ffn>;
using learned_places = pl::free_parameter<float, pl::spec<position, hidden>, residual>;
struct without_batch {
  static constexpr pl::layout value = pl::reduce_sum(pl::layout_v<learned_places::met>, pl::dim_of<batch>).result;
};
using own_places = pl::spec_from<without_batch, learned_places::met>;
using logits = pl::spec<batch, seq, pl::shard<vocab, tp>>;
using table = pl::spec<pl::shard<vocab, tp>, hidden>;
template <class Spec>
using array = pl::part<float, Spec>;
template <class Input, class Weight, class Output>
using linear = pl::with_saved<pl::linear<float, pl::biased_policy<Input, Weight, Output>>>;
using norm_layer = pl::with_saved<pl::layer_norm<float, residual>>;

constexpr long layers = 4, head_size = 16;

struct config {
  long samples, length, width, heads, inner, vocab;
  long own_length = 0, first = 0;  // number and first of the positions that a rank has between layers
};
constexpr config gpt = {4, 64, 64, 4, 256, 256};

// ---- kernels: they overwrite outputs and gradients of activations, and add to gradients of weights -----------------

/// x [samples, length, width] += places [length, width], the learned positions.
void places_forward(float* x, const float* places, long samples, long length, long width) {
  for (long b = 0; b < samples; ++b)
    for (long i = 0; i < length * width; ++i) x[b * length * width + i] += places[i];
}
void places_backward(float* dplaces, const float* dx, long samples, long length, long width) {
  for (long b = 0; b < samples; ++b)
    for (long i = 0; i < length * width; ++i) dplaces[i] += dx[b * length * width + i];
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

/// Makes arrays of zeros, each in the size of this rank's part.
struct memory {
  const pl::context<pl::cpu>& ctx;
  std::vector<void*> blocks{};
  template <class Spec>
  operator array<Spec>() {
    blocks.push_back(calloc(pl::part_of<Spec>(ctx).local_size(), sizeof(float)));
    return {ctx, static_cast<float*>(blocks.back())};
  }
};
struct layer_activations {
  memory& all;
  array<residual> norm1 = all, sum1 = all, norm2 = all, sum2 = all;
  array<projected> qkv = all;
  array<probabilities> probs = all;
  array<per_head> mixed = all;
  array<inner> up = all, active = all;
};
struct activations {
  memory& all;
  array<residual> encoded = all, branch = all, norm = all;
  array<logits> scores = all;
  layer_activations layer[layers] = {{all}, {all}, {all}, {all}};
  array<residual> dx = all, dbranch = all, dnorm = all;  // gradients, of one layer at a time
  array<projected> dqkv = all;
  array<per_head> dmixed = all;
  array<inner> dup = all, dactive = all;
};

// ---- the model -----------------------------------------------------------------------------------------------------

struct model {
  config c;
  memory arrays;
  parameters w{}, g{};  // weights and their gradients
  activations a{arrays};
  long size = 0;                                           // of each block of parameters
  float *weights{}, *gradients{}, *moment1{}, *moment2{};  // the blocks
};

void make_model(model& m) {
  const config& c = m.c;
  m.size = total(tensors_of(m.w, c));
  m.weights = make_block(tensors_of(m.w, c));
  m.gradients = make_block(tensors_of(m.g, c));
  m.moment1 = static_cast<float*>(calloc(m.size, sizeof(float)));
  m.moment2 = static_cast<float*>(calloc(m.size, sizeof(float)));
}
void free_model(model& m) {
  for (float* block : {m.weights, m.gradients, m.moment1, m.moment2}) free(block);
  for (void* block : m.arrays.blocks) free(block);
}

/// plait's layers on the program's blocks: here of one layer, below of the whole model.
struct layer_on_ranks {
  const pl::context<pl::cpu>& ctx;
  const layer_parameters &w, &g;
  norm_layer norm1{ctx, 1e-5, "norm1", {w.norm1_w, g.norm1_w, w.norm1_b, g.norm1_b}};
  linear<residual, pl::spec<three, my_heads, head_dim, hidden>, projected> qkv{
      ctx, "qkv", {.memory = {w.qkv_w, g.qkv_w, w.qkv_b, g.qkv_b}}};
  linear<per_head, pl::spec<hidden, my_heads, head_dim>, residual> proj{
      ctx, "proj", {.memory = {w.proj_w, g.proj_w, w.proj_b, g.proj_b}}};
  norm_layer norm2{ctx, 1e-5, "norm2", {w.norm2_w, g.norm2_w, w.norm2_b, g.norm2_b}};
  linear<residual, pl::spec<my_ffn, hidden>, inner> up{ctx, "up", {.memory = {w.up_w, g.up_w, w.up_b, g.up_b}}};
  linear<inner, pl::spec<hidden, my_ffn>, residual> down{
      ctx, "down", {.memory = {w.down_w, g.down_w, w.down_b, g.down_b}}};
  void visit(auto&& f) { norm1.visit(f), qkv.visit(f), proj.visit(f), norm2.visit(f), up.visit(f), down.visit(f); }
};
struct model_on_ranks : model {
  const pl::context<pl::cpu>& ctx;
  pl::embedding<float, pl::layer_policy<ids, table, residual>> lookup{
      ctx, gpt.vocab, "table", {.memory = {w.table, g.table}}};
  learned_places places{ctx, "places", {w.places, g.places}};
  norm_layer last_norm{ctx, 1e-5, "norm", {w.norm_w, g.norm_w, w.norm_b, g.norm_b}};
  pl::with_saved<pl::linear<float, pl::layer_policy<residual, table, logits>>> head{
      ctx, "head", {.tied = lookup.weight()}};
  pl::cross_entropy_loss<float, logits, ids> loss{ctx, gpt.vocab};
  std::vector<layer_on_ranks> layer{};
  void visit(auto&& f) {  // in the order of tensors_of
    lookup.visit(f), places.visit(f), last_norm.visit(f);
    for (layer_on_ranks& l : layer) l.visit(f);
  }
};

// Dims that attention mixes must be whole on a rank. Along batch and heads it works element by element.
constexpr auto attends = pl::rule::nonlinear.over<seq, keys, three, head_dim>();
constexpr auto attends_back = pl::rule::product.over<seq, keys, three, head_dim>();

/// Returns the learned places of a rank's positions, a part of `all`.
template <class T, class Spec>
auto own_rows(const model_on_ranks& m, const pl::part<T, Spec>& all) {
  return pl::part<T, own_places>(m.ctx, all.unchecked() + m.c.first * m.c.width);
}

/// Returns the mean loss; the scores become their gradient.
double forward(model_on_ranks& m, const pl::part<int, ids>& tokens, const pl::part<int, ids>& labels) {
  const config& c = m.c;
  const auto add_places = pl::bind_back(places_forward, c.samples, c.own_length, c.width);
  m.lookup.forward(m.ctx, tokens, m.a.encoded);
  apply(pl::rule::add, add_places, m.a.encoded, own_rows(m, m.places.values(m.ctx)));
  array<residual> x = m.a.encoded;
  for (long i = 0; i < layers; ++i) {
    layer_on_ranks& l = m.layer[i];
    const layer_activations& a = m.a.layer[i];
    l.norm1.forward(m.ctx, x, a.norm1);
    l.qkv.forward(m.ctx, a.norm1, a.qkv);
    apply(attends, pl::bind_back(attention_forward, c), pl::outputs(a.mixed, a.probs), a.qkv);
    l.proj.forward(m.ctx, a.mixed, m.a.branch);
    apply(pl::rule::sum, residual_forward, a.sum1, x, m.a.branch);
    l.norm2.forward(m.ctx, a.sum1, a.norm2);
    l.up.forward(m.ctx, a.norm2, a.up);
    apply(pl::rule::nonlinear, gelu_forward, a.active, a.up);
    l.down.forward(m.ctx, a.active, m.a.branch);
    apply(pl::rule::sum, residual_forward, a.sum2, a.sum1, m.a.branch);
    x = a.sum2;
  }
  m.last_norm.forward(m.ctx, x, m.a.norm);
  m.head.forward(m.ctx, m.a.norm, m.a.scores);
  const double rows = static_cast<double>(c.samples * c.length);
  const auto seed = pl::loss_seed<decltype(m.loss)::output>::weighted(m.ctx, 1.0 / rows);
  return *m.loss.forward_backward(m.ctx, m.a.scores, labels, seed).data() / rows;
}

void backward(model_on_ranks& m, const pl::part<int, ids>& tokens) {
  const config& c = m.c;
  const array<residual>&dx = m.a.dx, &dbranch = m.a.dbranch, &dnorm = m.a.dnorm;
  const auto add_rows = pl::bind_back(places_backward, c.samples, c.own_length, c.width);
  pl::zero_gradients(m.ctx, m);
  m.head.backward(m.ctx, m.a.norm, m.a.scores.dual(), dnorm);
  m.last_norm.backward(m.ctx, m.a.layer[layers - 1].sum2, dnorm, dx);
  for (long i = layers - 1; i >= 0; --i) {
    layer_on_ranks& l = m.layer[i];
    const layer_activations& a = m.a.layer[i];
    l.down.backward(m.ctx, a.active, dx, m.a.dactive);
    apply(pl::rule::product, gelu_backward, m.a.dup, m.a.dactive, a.up);
    l.up.backward(m.ctx, a.norm2, m.a.dup, dnorm);
    l.norm2.backward(m.ctx, a.sum1, dnorm, dbranch);
    apply(pl::rule::add, residual_backward, dx, dbranch);
    l.proj.backward(m.ctx, a.mixed, dx, m.a.dmixed);
    apply(attends_back, pl::bind_back(attention_backward, c), m.a.dqkv, m.a.dmixed, a.probs, a.qkv);
    l.qkv.backward(m.ctx, a.norm1, m.a.dqkv, dnorm);
    l.norm1.backward(m.ctx, i > 0 ? m.a.layer[i - 1].sum2 : m.a.encoded, dnorm, dbranch);
    apply(pl::rule::add, residual_backward, dx, dbranch);
  }
  apply(pl::rule::reduction, add_rows, own_rows(m, m.places.gradients(m.ctx)), dx);
  m.lookup.backward(m.ctx, tokens, dx);
}

/// Sums gradients over the ranks that share a weight, and returns the norm over all ranks' weights.
double gradient_norm(model_on_ranks& m) {
  pl::gradient_norm<float> all;
  m.visit([&](auto& p) { all.add(m.ctx, p.reduce(m.ctx)); });
  return all.total(m.ctx);
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

void train(const pl::any_communicator& ranks, int steps, const std::vector<unsigned char>& text) {
  pl::world world(pl::mesh<pl::axis<tp>>(ranks.size()).shape(), ranks);
  pl::cpu device;
  const auto sizes = pl::sizes_of<batch, seq, keys, position, hidden, three, heads, head_dim, ffn, vocab>(
      gpt.samples, gpt.length, gpt.length, gpt.length, gpt.width, 3, gpt.heads, head_size, gpt.inner, gpt.vocab);
  const pl::context<pl::cpu> ctx{device, world, sizes};
  const pl::box own = pl::part_of<residual>(ctx);
  const long n = ranks.size();
  int tokens[gpt.samples * gpt.length], labels[gpt.samples * gpt.length];
  model blocks{
      {gpt.samples, gpt.length, gpt.width, gpt.heads / n, gpt.inner / n, gpt.vocab / n, own.local[1], own.offset[1]},
      {ctx}};
  make_model(blocks);
  model_on_ranks m{blocks, ctx};
  for (long i = 0; i < layers; ++i) m.layer.push_back({ctx, m.w.layer[i], m.g.layer[i]});
  parameters whole;  // the arrays of plain.cpp; every rank takes its parts of them
  float* const block = make_block(tensors_of(whole, gpt));
  initialize(tensors_of(whole, gpt));
  pl::take_parts(ctx, std::span(block, total(tensors_of(whole, gpt))), m);
  free(block);
  for (int step = 1; step <= steps; ++step) {
    read_batch(tokens, labels, text, step - 1);
    const double loss = forward(m, {ctx, tokens}, {ctx, labels});
    backward(m, {ctx, tokens});
    const double norm = gradient_norm(m);
    update(m, step, 1e-3f);
    if (ranks.rank() == 0) printf("step %d  loss %.9g  gradient norm %.9g\n", step, loss, norm);
  }
  free_model(m);
}

}  // namespace

int main(int argc, char** argv) try {
  const int steps = argc > 1 ? atoi(argv[1]) : 10;
  const char* path = argc > 2 ? argv[2] : "examples/data/kjv.txt";
  std::vector<unsigned char> text;
  FILE* file = fopen(path, "rb");
  for (int byte; file && (byte = getc(file)) != EOF;) text.push_back(static_cast<unsigned char>(byte));
  if (file) fclose(file);
  if (text.size() <= gpt.length + 1) return fprintf(stderr, "there is no text to read in %s\n", path), 1;
#ifdef PLAIT_WITH_MPI
  if (argc > 3 && !strcmp(argv[3], "mpi"))
    return pl::mpi::run(argc, argv, [&](auto ranks) { train(ranks, steps, text); });
#endif
  pl::threads::run(argc > 3 ? atoi(argv[3]) : 2, [&](auto ranks) { train(ranks, steps, text); });
  return 0;
} catch (const std::exception& e) {
  return fprintf(stderr, "gpt2_c_parallel: %s\n", e.what()), 1;
}
