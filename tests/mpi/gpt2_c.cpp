// ranks: 1 2 4
// Compares examples/gpt2_c: every rank runs the plain program, then its part of the parallel one, with tensor
// parallelism and with and without sequence parallelism. Each step of the parallel program starts with the plain
// program's weights. The test compares each gradient tensor with the rank's part of the plain program's, element by
// element. examples/gpt2_c/CMakeLists.txt makes tensor_parallel.cpp from parallel.cpp.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "../../examples/gpt2_c/blocks.hpp"
#include "plait/comm/mpi.hpp"
#include "plait/core/error.hpp"
#include "plait/nn.hpp"
#include "plait/parallel/gradient_norm.hpp"

// Three programs in one file: their includes are above.
#define main program
namespace plain {
#include "../../examples/gpt2_c/plain.cpp"
}
namespace sequence_parallel {
#include "../../examples/gpt2_c/parallel.cpp"
}
namespace tensor_parallel {
#include "gpt2_c/tensor_parallel.cpp"
}
#undef main

namespace pl = plait;

namespace {

constexpr int steps = 3;
constexpr float allowed = 1e-5f;  // relative to a tensor's largest gradient: ranks sum in other orders
int failures = 0;

std::vector<unsigned char> read_text() {
  std::vector<unsigned char> text;
  std::FILE* const file = std::fopen(PLAIT_EXAMPLE_DATA "/kjv.txt", "rb");
  for (int byte; file && (byte = std::getc(file)) != EOF;) text.push_back(static_cast<unsigned char>(byte));
  if (file) std::fclose(file);
  return text;
}

/// The weights before each step of the plain program, their gradients, and the sizes of the tensors, in its order.
struct plain_steps {
  std::vector<std::vector<float>> weights, gradients;
  std::vector<long> sizes;
};

plain_steps run_plain(const std::vector<unsigned char>& text) {
  plain::model m;
  plain::make_model(m, plain::gpt);
  initialize(plain::tensors_of(m.w, plain::gpt));
  plain_steps out;
  for (const tensor& t : plain::tensors_of(m.g, plain::gpt)) out.sizes.push_back(t.size);
  std::vector<int> tokens(plain::gpt.samples * plain::gpt.length), labels(tokens.size());
  for (int step = 1; step <= steps; ++step) {
    out.weights.emplace_back(m.weights, m.weights + m.size);
    plain::read_batch(tokens.data(), labels.data(), text, step - 1);
    plain::forward(m, tokens.data(), labels.data());
    plain::backward(m, tokens.data());
    out.gradients.emplace_back(m.gradients, m.gradients + m.size);
    plain::update(m, step, 1e-3f);
  }
  plain::free_model(m);
  return out;
}

/// The types of a parallel program. Both programs use the same names.
template <class Blocks, class Model, class Config, class Residual>
struct program_types {
  using blocks = Blocks;  // the program's memory
  using model = Model;    // plait's layers on it
  using config = Config;
  using residual = Residual;
};

/// Makes one rank of a parallel program as its `train` does, and compares its gradients in every step.
template <class Program>
void compare(const char* name, const pl::any_communicator& ranks, const std::vector<unsigned char>& text,
             const plain_steps& expected) {
  const plain::config& gpt = plain::gpt;
  pl::world world(pl::mesh<pl::axis<pl::tp>>(ranks.size()).shape(), ranks);
  pl::cpu device;
  const pl::context<pl::cpu> ctx{
      device, world,
      pl::sizes_of<pl::batch, pl::seq, sequence_parallel::keys, tensor_parallel::keys, pl::position, pl::hidden,
                   sequence_parallel::three, tensor_parallel::three, pl::heads, pl::head_dim, pl::ffn, pl::vocab>(
          gpt.samples, gpt.length, gpt.length, gpt.length, gpt.length, gpt.width, 3, 3, gpt.heads, plain::head_size,
          gpt.inner, gpt.vocab)};
  const pl::box own = pl::part_of<typename Program::residual>(ctx);
  const long n = ranks.size();
  const typename Program::config mine = {gpt.samples,   gpt.length,    gpt.width,    gpt.heads / n,
                                         gpt.inner / n, gpt.vocab / n, own.local[1], own.offset[1]};
  typename Program::blocks blocks{mine, {ctx}};
  make_model(blocks);
  typename Program::model m{blocks, ctx};
  for (long i = 0; i < plain::layers; ++i) m.layer.push_back({ctx, m.w.layer[i], m.g.layer[i]});
  std::vector<int> tokens(gpt.samples * gpt.length), labels(tokens.size());
  for (int step = 1; step <= steps; ++step) {
    plain::read_batch(tokens.data(), labels.data(), text, step - 1);
    pl::take_parts(ctx, expected.weights[step - 1].data(), m);
    forward(m, {ctx, tokens.data()}, {ctx, labels.data()});
    backward(m, {ctx, tokens.data()});
    gradient_norm(m);                                       // reduces the gradients
    const float* at = expected.gradients[step - 1].data();  // of the next tensor
    std::size_t tensor = 0;
    m.visit([&](auto& p) {
      std::vector<float> part(p.size());
      pl::take_part(device, p, at, part.data());
      float largest = 0, apart = 0;
      for (long i = 0; i < expected.sizes[tensor]; ++i) largest = std::fmax(largest, std::fabs(at[i]));
      for (std::size_t i = 0; i < part.size(); ++i) apart = std::fmax(apart, std::fabs(part[i] - p.gradient()[i]));
      if (!(largest > 0) || !(apart <= allowed * largest)) {
        ++failures;
        std::fprintf(stderr, "%s, rank %d, step %d, %s: the gradients differ by %g, and the largest is %g\n", name,
                     static_cast<int>(ranks.rank()), step, p.name().c_str(), static_cast<double>(apart),
                     static_cast<double>(largest));
      }
      at += expected.sizes[tensor++];
    });
    if (tensor != expected.sizes.size())
      plait::fail({name, ": ", tensor, " parameters, and plain.cpp has ", expected.sizes.size()});
  }
  free_model(m);
}

}  // namespace

int main(int argc, char** argv) {
  return pl::mpi::run(argc, argv, [](const pl::any_communicator& ranks) {
    const std::vector<unsigned char> text = read_text();
    const plain_steps expected = run_plain(text);
    namespace sp = sequence_parallel;
    namespace tp = tensor_parallel;
    compare<program_types<sp::model, sp::model_on_ranks, sp::config, sp::residual>>("parallel.cpp", ranks, text,
                                                                                    expected);
    compare<program_types<tp::model, tp::model_on_ranks, tp::config, tp::residual>>("tensor_parallel.cpp", ranks, text,
                                                                                    expected);
    if (failures > 0) plait::fail({failures, " gradient tensors differ from the plain program's"});
  });
}
