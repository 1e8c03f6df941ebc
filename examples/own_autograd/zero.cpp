// plain.cpp on several ranks, which shard weights, gradients and moments (ZeRO 3): a unit's weights are whole only
// while its passes use them. The autograd, the model and the optimizer are still the program's own.
//
//     own_autograd_zero [STEPS [TEXT [RANKS]]]                       on threads
//     mpirun -n RANKS own_autograd_zero STEPS TEXT mpi               on processes
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/comm/typed.hpp"
#include "plait/nn/parameter/free.hpp"
#include "tape.hpp"
#ifdef PLAIT_WITH_MPI
#include "plait/comm/mpi.hpp"
#endif

namespace {

namespace pl = plait;
using pl::batch;
using pl::dp;

struct weights : pl::dim_tag<"weights"> {};          // all of a unit, one after the other
using sample_rows = pl::spec<pl::shard<batch, dp>>;  // they meet rows of samples, of which each rank has some
using shards = pl::spec<pl::shard<weights, dp>>;     // how they are stored
using parameter = pl::free_parameter<float, pl::spec<weights>, sample_rows, shards>;

constexpr long vocab = 128, window = 16, width = 48, inner = 128, blocks = 4, samples = 32;

// ---- weights -------------------------------------------------------------------------------------------------------

/// Matrices that are used together, one after the other in one array. Each rank has a shard of it.
struct unit {
  std::vector<matrix> parts;
  long size = 0;
  std::vector<float> value, gradient, moment1, moment2;
  std::optional<pl::context<pl::cpu>> ctx;
  std::optional<parameter> whole;
};

/// A shape, and the deviation of the first values; 0: all are ones.
struct shape {
  long rows, columns;
  float deviation;
};

/// Memory for whole units, which take turns in it.
struct whole_units {
  std::vector<float> value[2], gradient;
};

void make_unit(unit& u, const std::vector<shape>& shapes, long number, whole_units& memory,
               const pl::context<pl::cpu>& ctx) {
  for (const shape& s : shapes) u.parts.push_back({s.rows, s.columns}), u.size += s.rows * s.columns;
  const long ranks = ctx.ranks.size(), shard = (u.size + ranks - 1) / ranks;
  u.ctx.emplace(ctx.device, ctx.ranks, pl::sizes_of<weights, batch>(shard * ranks, samples));
  for (std::vector<float>* all : {&u.value, &u.gradient, &u.moment1, &u.moment2}) all->resize(shard);
  std::vector<float>& value = memory.value[number % 2];
  for (std::vector<float>* all : {&value, &memory.gradient})
    if (all->size() < static_cast<std::size_t>(shard * ranks)) all->resize(shard * ranks);
}
/// Makes a unit's parameter, after the memory of all units is allocated.
void make_parameter(unit& u, long number, whole_units& memory) {
  u.whole.emplace(*u.ctx, "unit" + std::to_string(number),
                  pl::parameter_memory<float>{.weight = memory.value[number % 2].data(),
                                              .gradient = memory.gradient.data(),
                                              .master = u.value.data(),
                                              .reduced = u.gradient.data()});
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
  whole_units memory;
};

void make_model(model& m, const pl::context<pl::cpu>& ctx) {
  m.units.resize(blocks + 2);
  const auto shapes_of = [](long i) -> const std::vector<shape>& {
    return i == 0 ? first : i <= blocks ? block : last;
  };
  for (long i = 0; i < blocks + 2; ++i) make_unit(m.units[i], shapes_of(i), i, m.memory, ctx);
  for (long i = 0; i < blocks + 2; ++i) {
    unit& u = m.units[i];
    make_parameter(u, i, m.memory);
    const pl::box own = pl::part_of<shards>(*u.ctx);
    std::vector<float> whole(own.global[0]);
    initialize(whole.data(), shapes_of(i), i + 1);
    u.whole->weight()->fill_values(*u.ctx, [&](float* to) { std::copy_n(&whole[own.offset[0]], own.local[0], to); });
  }
}

// ---- units in use --------------------------------------------------------------------------------------------------

/// Gathers a unit's weights for a pass, and sets its gradient to zero for a backward pass.
void enter(unit& u, bool backward) {
  u.whole->weight()->gather(*u.ctx);
  if (backward) u.whole->weight()->zero_gradient(*u.ctx);
  float* value = const_cast<float*>(u.whole->values(*u.ctx).unchecked());  // the tape only reads it
  float* gradient = backward ? u.whole->gradients(*u.ctx).unchecked() : nullptr;
  for (matrix& m : u.parts) {
    m.value = value, m.gradient = gradient;
    value += m.size();
    if (backward) gradient += m.size();
  }
}
/// Call it before the forward pass of a unit: the backward pass will end with the sum of its gradient over ranks.
void begin_unit(tape& t, unit& u) {
  enter(u, false);
  t.record([&u] { static_cast<void>(u.whole->weight()->reduce(*u.ctx)); });
}
/// Call it after the forward pass of a unit.
void end_unit(tape& t, unit& u) {
  t.record([&u] { enter(u, true); });
}
/// Returns the sum of `mine` over the ranks.
double sum(const pl::context<pl::cpu>& ctx, double mine) {
  const pl::part<double, pl::spec<pl::partial<dp>>> terms(ctx, &mine);
  pl::group_over<dp>(ctx.ranks).all_reduce<pl::spec<pl::invariant<dp>>>(terms);
  return mine;
}

// ---- a step --------------------------------------------------------------------------------------------------------

/// Returns the loss, and leaves its gradients in the units.
double run(tape& t, model& m, const std::vector<int>& ids, const std::vector<int>& labels) {
  unit& start = m.units.front();
  begin_unit(t, start);
  const matrix* x = &t.multiply(t.look_up(start.parts[0], ids, window), start.parts[1]);
  end_unit(t, start);
  for (long i = 1; i <= blocks; ++i) {
    unit& u = m.units[i];
    begin_unit(t, u);
    const matrix& inner_rows = t.add_row(t.multiply(t.normalize(*x, u.parts[0]), u.parts[1]), u.parts[2]);
    x = &t.add(*x, t.multiply(t.swish(inner_rows), u.parts[3]));
    end_unit(t, u);
  }
  unit& end = m.units.back();
  begin_unit(t, end);
  const matrix& scores = t.multiply(t.normalize(*x, end.parts[0]), end.parts[1]);
  end_unit(t, end);
  const double loss = t.cross_entropy(scores, labels, 1.0f / samples);
  t.backward();
  t.clear();
  return sum(*start.ctx, loss) / samples;
}

double gradient_norm(const model& m) {
  double squares = 0;
  for (const unit& u : m.units)
    for (const float g : u.gradient) squares += static_cast<double>(g) * static_cast<double>(g);
  return std::sqrt(sum(*m.units[0].ctx, squares));
}

/// AdamW on gradients times `scale`.
void update(model& m, int step, float rate, float scale) {
  const float beta1 = 0.9f, beta2 = 0.95f, decay = 0.01f;
  const float correct1 = 1 - std::pow(beta1, static_cast<float>(step));
  const float correct2 = 1 - std::pow(beta2, static_cast<float>(step));
  for (unit& u : m.units) {
    static_cast<void>(u.whole->weight()->begin_update());
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

void train(const pl::any_communicator& ranks, int steps, const std::vector<unsigned char>& text) {
  pl::world world(pl::mesh<pl::axis<dp>>(ranks.size()).shape(), ranks);
  pl::cpu device;
  const pl::context<pl::cpu> ctx{device, world, pl::sizes_of<batch>(samples)};
  const pl::box own = pl::part_of<sample_rows>(ctx);
  model m;
  make_model(m, ctx);
  tape t;
  std::vector<int> ids, labels;
  for (int step = 1; step <= steps; ++step) {
    read_samples(ids, labels, text, (step - 1) * samples + own.offset[0], own.local[0]);
    const double loss = run(t, m, ids, labels);
    const double norm = gradient_norm(m);
    update(m, step, 3e-3f, static_cast<float>(std::min(1.0, 1.0 / norm)));
    if (ranks.rank() == 0) std::printf("step %d  loss %.9g  gradient norm %.9g\n", step, loss, norm);
  }
  long floats = m.memory.value[0].size() + m.memory.value[1].size() + m.memory.gradient.size();
  for (const unit& u : m.units) floats += 4 * u.value.size();
  if (ranks.rank() == 0) std::fprintf(stderr, "%ld bytes of weights, gradients and moments\n", 4 * floats);
}

}  // namespace

int main(int argc, char** argv) try {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 10;
  const char* path = argc > 2 ? argv[2] : "examples/data/kjv.txt";
  std::vector<unsigned char> text;
  std::FILE* file = std::fopen(path, "rb");
  for (int byte; file && (byte = std::getc(file)) != EOF;) text.push_back(static_cast<unsigned char>(byte));
  if (file) std::fclose(file);
  if (text.size() <= window) return std::fprintf(stderr, "there is no text to read in %s\n", path), 1;
#ifdef PLAIT_WITH_MPI
  if (argc > 3 && !std::strcmp(argv[3], "mpi"))
    return pl::mpi::run(argc, argv, [&](auto ranks) { train(ranks, steps, text); });
#endif
  pl::threads::run(argc > 3 ? std::atoi(argv[3]) : 2, [&](auto ranks) { train(ranks, steps, text); });
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "own_autograd_zero: %s\n", e.what());
  return 1;
}
