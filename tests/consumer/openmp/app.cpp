// A program with its own OpenMP threads. The numbers of threads that it set for OpenMP and OpenBLAS stay the same
// before, during and after its use of plait. Layers also run within its parallel regions.
#include <cblas.h>
#include <omp.h>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "plait/nn.hpp"

namespace pl = plait;

namespace {

using rows = pl::spec<pl::batch, pl::hidden, pl::invariant<pl::tp>>;
using wide = pl::spec<pl::batch, pl::shard<pl::ffn, pl::tp>>;
constexpr int own_threads = 3, blas_threads = 2;
constexpr std::int64_t samples = 32, width = 64, inner = 96;
int failures = 0;

void expect(bool holds, const char* what) {
  if (!holds) {
#pragma omp atomic
    ++failures;
    std::fprintf(stderr, "%s\n", what);
  }
}

/// The program's parallel region and its settings are unchanged.
void expect_own(const char* when) {
  int met = 0;
#pragma omp parallel reduction(+ : met)
  ++met;
  expect(met == own_threads && omp_get_max_threads() == own_threads, when);
  expect(openblas_get_num_threads() == blas_threads, "OpenBLAS has another number of threads");
}

/// The sum of the outputs of a column-parallel linear over `ranks` ranks.
template <class T>
double product_sum(int ranks, bool looks_at_threads) {
  double sum = 0;
  pl::threads::run(ranks, [&](pl::threads::communicator c) {
    pl::world world(pl::mesh<pl::axis<pl::tp>>(ranks).shape(), c);
    pl::cpu device;
    if (looks_at_threads && c.rank() == 0) omp_set_num_threads(own_threads);  // in this thread, which plait started
    const pl::context<pl::cpu> ctx{device, world, pl::sizes_of<pl::batch, pl::hidden, pl::ffn>(samples, width, inner)};
    std::vector<T> weight(static_cast<std::size_t>(inner / ranks * width), T(0.5)), gradient(weight.size()),
        x(samples * width, T(0.25)), y(static_cast<std::size_t>(samples * inner / ranks)), dx(x.size());
    pl::linear<T, pl::layer_policy<rows, pl::spec<pl::shard<pl::ffn, pl::tp>, pl::hidden>, wide>> up(
        ctx, "up", {.memory = {weight.data(), gradient.data()}});
    typename decltype(up)::saved kept;
    const pl::part<const T, rows> in(ctx, x.data());
    up.forward(ctx, in, pl::part<T, wide>(ctx, y.data()), &kept);
    up.backward(ctx, in, kept, pl::part<const T, pl::dual_t<wide>>(ctx, y.data()),
                pl::part<T, pl::dual_t<rows>>(ctx, dx.data()));
    if (looks_at_threads && c.rank() == 0)
      expect(omp_get_max_threads() == own_threads, "a product has set the threads");
    double mine = 0;
    for (const T value : y) mine += static_cast<double>(value);
    c.all_reduce(&mine, &mine, 1, pl::dtype::f64, pl::reduce_op::sum);
    if (c.rank() == 0) sum = mine;
  });
  return sum;
}

}  // namespace

int main() {
  omp_set_dynamic(0);
  omp_set_num_threads(own_threads);
  openblas_set_num_threads(blas_threads);
  expect_own("before plait");
  const double expected = 0.5 * 0.25 * width * samples * inner;
  expect(product_sum<float>(2, true) == expected, "the product of floats");
  expect_own("after a product of oneDNN");
  expect(product_sum<double>(2, true) == expected, "the product of doubles");
  expect_own("after a product of OpenBLAS");
#pragma omp parallel
  {
    expect(omp_get_num_threads() == own_threads, "the number of threads of a region that uses plait");
    expect(product_sum<float>(1, false) == expected, "the product within a region");
    expect(omp_get_num_threads() == own_threads, "the number of threads after plait");
  }
  expect_own("after a region that uses plait");
  return failures == 0 ? 0 : 1;
}
