// program: attached_nccl
// A CUDA program's own communicator, stream and memory used by plait's layers, which own none of them and never wait.
// Runs with a stand-in for NCCL, whose ranks share a GPU, or with NCCL and one rank for each GPU.
#include <doctest/doctest.h>

#include <atomic>
#include <barrier>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "plait/device/cuda.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/norm.hpp"
#include "plait/tensor/nccl_attach.hpp"
#include "support/on_pointers.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using mesh_of_tp = plait::mesh<axis<tp>>;
struct up_policy {
  using mesh = mesh_of_tp;
  using input = spec<shard<seq, tp>, hidden>;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<seq, shard<ffn, tp>>;
};
struct down_policy {
  using mesh = mesh_of_tp;
  using input = spec<seq, shard<ffn, tp>>;
  using weight = spec<hidden, shard<ffn, tp>>;
  using output = spec<shard<seq, tp>, hidden>;
};

constexpr std::int64_t tokens = 8, width = 16, inner = 32;

/// A part of a matrix [rows, columns], from `row` and `column` on, in the program's memory.
struct matrix {
  std::int64_t rows, columns;
  cudaStream_t stream;
  float* data = nullptr;

  matrix(std::int64_t rows_, std::int64_t columns_, cudaStream_t stream_)
      : rows(rows_), columns(columns_), stream(stream_) {
    if (cudaMalloc(reinterpret_cast<void**>(&data), bytes()) != cudaSuccess) throw error("no memory");
    if (cudaMemsetAsync(data, 0, bytes(), stream) != cudaSuccess) throw error("no zeros");
  }
  matrix(const matrix&) = delete;
  ~matrix() { cudaFree(data); }
  std::size_t bytes() const { return static_cast<std::size_t>(rows * columns) * sizeof(float); }
  /// This part of `whole`, which has `of` columns.
  values part(const values& whole, std::int64_t of, std::int64_t row, std::int64_t column) const {
    values out;
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c)
        out.push_back(whole[static_cast<std::size_t>((row + r) * of + column + c)]);
    return out;
  }
  void write(const values& whole, std::int64_t of, std::int64_t row, std::int64_t column) {
    const values here = part(whole, of, row, column);
    const std::vector<float> host(here.begin(), here.end());
    cudaMemcpyAsync(data, host.data(), bytes(), cudaMemcpyHostToDevice, stream);
    cudaStreamSynchronize(stream);  // the source is destroyed
  }
  std::vector<float> read() const {
    std::vector<float> host(static_cast<std::size_t>(rows * columns));
    cudaMemcpyAsync(host.data(), data, bytes(), cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
    return host;
  }
  /// The norm of the difference from a part of `whole`, over the norm of that part.
  double off(const values& whole, std::int64_t of, std::int64_t row, std::int64_t column) const {
    const std::vector<float> host = read();
    return difference(values(host.begin(), host.end()), part(whole, of, row, column));
  }
};

/// a [m, k] times b, or with `transposed` b', in double.
values product(const values& a, const values& b, std::int64_t m, std::int64_t n, std::int64_t k, bool transposed) {
  values out(static_cast<std::size_t>(m * n));
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j)
      for (std::int64_t l = 0; l < k; ++l)
        out[static_cast<std::size_t>(i * n + j)] +=
            a[static_cast<std::size_t>(i * k + l)] * b[static_cast<std::size_t>(transposed ? j * k + l : l * n + j)];
  return out;
}
values turned(const values& a, std::int64_t rows, std::int64_t columns) {
  values out(a.size());
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c)
      out[static_cast<std::size_t>(c * rows + r)] = a[static_cast<std::size_t>(r * columns + c)];
  return out;
}

/// Does what a program does without plait: creates a thread, a stream and a communicator for each rank and its GPU.
/// Returns "" if it ran.
template <class F>
std::string on_ranks(int ranks, const F& body, bool default_stream = false) {
  int there = 0;
  if (cudaGetDeviceCount(&there) != cudaSuccess || there == 0) return "no GPU";
#ifndef PLAIT_CUDA_STAND_IN
  if (there < ranks) return "";
#endif
  ncclUniqueId id;
  REQUIRE(ncclGetUniqueId(&id) == ncclSuccess);
  std::mutex mutex;
  std::barrier<> meeting(ranks);
  std::string first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      ncclComm_t comm = nullptr;
      cudaStream_t stream = nullptr;
      const bool made = cudaSetDevice(rank % there) == cudaSuccess &&
                        (default_stream || cudaStreamCreate(&stream) == cudaSuccess) &&
                        ncclCommInitRank(&comm, ranks, id, rank) == ncclSuccess;
      std::string text = made ? "" : "the rank cannot start";
      try {
        if (made) body(comm, stream, rank, meeting);
      } catch (const std::exception& e) {
        text = e.what();
      }
      meeting.arrive_and_drop();
      if (made && (cudaStreamSynchronize(stream) != cudaSuccess || ncclCommDestroy(comm) != ncclSuccess)) {
        text += " the caller's communicator or stream is broken";
      }
      if (stream != nullptr) cudaStreamDestroy(stream);
      const std::lock_guard lock(mutex);
      if (first.empty()) first = text;
    });
  }
  for (std::thread& t : threads) t.join();
  return first;
}

/// Compares two linears on the program's pointers, forward and backward, with products in double.
void check_pair(ncclComm_t comm, cudaStream_t stream, int rank, std::barrier<>& meeting) {
  const values x = random_values<float>(tokens * width, 1), w1 = random_values<float>(inner * width, 2),
               w2 = random_values<float>(width * inner, 3), dz = random_values<float>(tokens * width, 4);
  const values y = product(x, w1, tokens, inner, width, true), z = product(y, w2, tokens, width, inner, true);
  const values dy = product(dz, w2, tokens, inner, width, false), dx = product(dy, w1, tokens, width, inner, false);
  const values dw1 = product(turned(dy, tokens, inner), x, inner, width, tokens, false);
  const values dw2 = product(turned(dz, tokens, width), y, width, inner, tokens, false);

  auto here =
      attach<mesh_of_tp>(comm, stream, sizes_of<seq, hidden, ffn>(tokens, width, inner), {.workspace_bytes = 1 << 20});
  const std::int64_t ranks = here.ranks().size(), t = tokens / ranks, f = inner / ranks;
  CHECK(here.ranks().rank() == rank);
  matrix mx(t, width, stream), my(tokens, f, stream), mz(t, width, stream), mdz(t, width, stream),
      mdy(tokens, f, stream), mdx(t, width, stream);
  matrix mw1(f, width, stream), mdw1(f, width, stream), mw2(width, f, stream), mdw2(width, f, stream);
  mx.write(x, width, rank * t, 0);
  mdz.write(dz, width, rank * t, 0);
  mw1.write(w1, width, rank * f, 0);
  mw2.write(w2, inner, 0, rank * f);

  linear<float, up_policy, cuda> up(here, "up", {.memory = {mw1.data, mdw1.data}});
  linear<float, down_policy, cuda> down(here, "down", {.memory = {mw2.data, mdw2.data}});
  linear_saved<cuda> up_kept, down_kept;
  here.device().reset_peak();
  CHECK(here.device().bytes_in_use() == 0);  // the layers own no memory

  std::atomic<bool> begun{false};
  cudaLaunchHostFunc(
      stream, [](void* flag) { static_cast<std::atomic<bool>*>(flag)->store(true); }, &begun);
  forward_on(up, here, mx.data, my.data, &up_kept);
  forward_on(down, here, my.data, mz.data, &down_kept);
  const auto gathered = static_cast<std::size_t>(ranks == 1 ? 0 : tokens * width) * sizeof(float);
  CHECK(here.device().bytes_in_use() == gathered);
  backward_on(down, here, my.data, down_kept, mdz.data, mdy.data);
  backward_on(up, here, mx.data, up_kept, mdy.data, mdx.data);
#ifdef PLAIT_CUDA_STAND_IN  // the stand-in runs work as late as possible by default
  if (stand_in::runtime::instance().order == stand_in::stream_order::late) CHECK(!begun);
#endif
  meeting.arrive_and_wait();  // while one rank waits for its stream, the work of the others runs too
  CHECK(here.device().bytes_in_use() == 0);
  CHECK((here.device().peak_bytes() == 0) == (ranks == 1));

  CHECK(my.off(y, inner, 0, rank * f) < 1e-5);
  CHECK(mz.off(z, width, rank * t, 0) < 1e-5);
  CHECK(mdy.off(dy, inner, 0, rank * f) < 1e-5);
  CHECK(mdx.off(dx, width, rank * t, 0) < 1e-5);
  CHECK(mdw1.off(dw1, width, rank * f, 0) < 1e-5);
  CHECK(mdw2.off(dw2, inner, 0, rank * f) < 1e-5);
}

}  // namespace

TEST_CASE("attach: layers on a program's own communicator, stream and pointers") {
  for (const int ranks : {1, 2, 4}) {
    CAPTURE(ranks);
    CHECK(on_ranks(ranks, check_pair) == "");
  }
}

namespace {
/// Ranks that are threads need this from the program: opens the memory pool of a GPU to the other connected GPUs.
void open_pool() {
  int here = 0, there = 0;
  cudaMemPool_t pool = nullptr;
  if (cudaGetDevice(&here) != cudaSuccess || cudaGetDeviceCount(&there) != cudaSuccess ||
      cudaDeviceGetDefaultMemPool(&pool, here) != cudaSuccess)
    throw error("no pool");
  for (int peer = 0; peer < there; ++peer) {
    int connected = 0;
    if (peer == here || cudaDeviceCanAccessPeer(&connected, peer, here) != cudaSuccess || connected == 0) continue;
    cudaMemAccessDesc access{};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = peer;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    if (cudaMemPoolSetAccess(pool, &access, 1) != cudaSuccess) throw error("no access to the pool");
  }
}
}  // namespace

TEST_CASE("attach: a program's own allocator sees every byte") {
  const auto body = [](ncclComm_t comm, cudaStream_t stream, int, std::barrier<>& meeting) {
    open_pool();
    std::size_t bytes = 0, calls = 0;
    const auto asks = [&](std::size_t n, cudaStream_t where) -> void* {
      void* at = nullptr;
      if (cudaMallocAsync(&at, n, where) != cudaSuccess) return nullptr;
      ++calls;
      bytes += n;
      return at;
    };
    const auto gives_back = [&](void* at, std::size_t n, cudaStream_t where) {
      bytes -= n;
      cudaFreeAsync(at, where);
    };
    {
      auto here = attach<mesh_of_tp>(comm, stream, sizes_of<seq, hidden, ffn>(tokens, width, inner),
                                     {.workspace_bytes = 1 << 20, .memory = {asks, gives_back}});
      if (bytes < std::size_t{1} << 20 || bytes != here.device().reserved_bytes()) fail("made beside the allocator");
      const std::int64_t ranks = here.ranks().size();
      matrix x(tokens / ranks, width, stream), y(tokens, inner / ranks, stream), w(inner / ranks, width, stream),
          dw(inner / ranks, width, stream);
      linear<float, up_policy, cuda> up(here, "up", {.memory = {w.data, dw.data}});
      const std::size_t before = calls;
      linear_saved<cuda> kept;
      forward_on(up, here, x.data, y.data, &kept);
      matrix dx(tokens / ranks, width, stream);
      backward_on(up, here, x.data, kept, y.data, dx.data);
      if (bytes != here.device().reserved_bytes()) fail("called beside the allocator");
      if ((calls > before) != (ranks > 1)) fail("a gathered input comes from the allocator");
      meeting.arrive_and_wait();
    }
    if (bytes != 0) fail("bytes that do not come back");
  };
  for (const int ranks : {1, 2}) CHECK(on_ranks(ranks, body) == "");
}

// The lines of the README, unchanged.
namespace readme {

namespace pl = plait;
struct up_projection {
  using mesh = pl::mesh<pl::axis<dp>, pl::axis<tp>>;
  using input = pl::spec<pl::shard<batch, dp>, pl::shard<seq, tp>, hidden>;
  using weight = pl::spec<pl::shard<ffn, tp>, hidden>;
  using output = pl::spec<pl::shard<batch, dp>, seq, pl::shard<ffn, tp>>;
};

void run(ncclComm_t my_comm, cudaStream_t my_stream, const up_projection::mesh& mesh) {
  const dim_sizes sizes = sizes_of<batch, seq, hidden, ffn>(2, 4, 8, 16);
  matrix activations(1, 2 * 4 * 8 / 2, my_stream), output(2 * 4, 16 / 2, my_stream), weights(16 / 2, 8, my_stream),
      gradients(16 / 2, 8, my_stream);
  activations.write(values(32, 1.0), 32, 0, 0);
  weights.write(values(64, 0.5), 8, 0, 0);
  float *my_activations = activations.data, *my_output = output.data, *my_weights = weights.data,
        *my_gradients = gradients.data;
  // clang-format off
  auto here = pl::attach(mesh, my_comm, my_stream, sizes);    // an ncclComm_t and a cudaStream_t; nothing is owned
  pl::linear<float, up_projection, pl::cuda> up(here, "up", {.memory = {my_weights, my_gradients}});
  pl::part<float, up_projection::input> x(here, my_activations);   // each array gets its type once
  pl::part<float, up_projection::output> y(here, my_output);
  up.forward(here, x, y);                                     // in my_stream, and the host waits for nothing
  // clang-format on
  CHECK(output.off(values(64, 4.0), 8, 0, 0) == 0);
}

}  // namespace readme

// The first example of README, unchanged and compiled.
// clang-format off
namespace readme_door {

namespace pl = plait;
using pl::batch, pl::seq, pl::hidden, pl::ffn, pl::dp, pl::tp;
struct up_projection {
  using mesh = pl::mesh<pl::axis<dp>, pl::axis<tp>>;
  using input = pl::spec<pl::shard<batch, dp>, pl::shard<seq, tp>, hidden>;
  using weight = pl::spec<pl::shard<ffn, tp>, hidden>;
  using output = pl::spec<pl::shard<batch, dp>, seq, pl::shard<ffn, tp>>;
};

void forward(ncclComm_t comm, cudaStream_t stream, float* weight, float* gradient, float* input, float* output) {
  auto here = pl::attach(up_projection::mesh(2, 4), comm, stream, pl::sizes_of<batch, seq, hidden, ffn>(8, 512, 1024, 4096));
  pl::linear<float, up_projection, pl::cuda> up(here, "up", {.memory = {weight, gradient}});
  pl::part<float, up_projection::input> x(here, input);     // each array gets its type once
  pl::part<float, up_projection::output> y(here, output);
  up.forward(here, x, y);                                   // all-gathers x over tp, then multiplies
}
}  // namespace readme_door
// clang-format on

TEST_CASE("attach: as the README shows it") {
  CHECK(on_ranks(2, [](ncclComm_t comm, cudaStream_t stream, int, std::barrier<>&) {
          readme::run(comm, stream, readme::up_projection::mesh(1, 2));
        }) == "");
}

TEST_CASE("attach: the default stream is the default stream") {
  CHECK(on_ranks(
            1,
            [](ncclComm_t comm, cudaStream_t stream, int rank, std::barrier<>& meeting) {
              REQUIRE(stream == nullptr);
              {
                auto here = attach<mesh_of_tp>(comm, stream);
                const cudaStream_t used = here.device().main_stream().handle();
                CHECK((used == cudaStreamLegacy || used == cudaStreamPerThread));
              }
              check_pair(comm, stream, rank, meeting);
            },
            true) == "");
}

TEST_CASE("attach: norms on the caller's parameters") {
  CHECK(on_ranks(2, [](ncclComm_t comm, cudaStream_t stream, int, std::barrier<>&) {
          auto here = attach(mesh_of_tp(2), comm, stream, sizes_of<seq, hidden>(tokens, width));
          const std::int64_t t = tokens / 2;
          matrix x(t, width, stream), y(t, width, stream), dx(t, width, stream), w(1, width, stream),
              dw(1, width, stream);
          x.write(values(tokens * width, 2.0), width, 0, 0);
          w.write(values(width, 3.0), width, 0, 0);
          rms_norm<float, spec<shard<seq, tp>, hidden>, cuda> norm(here, 0.0, "norm", w.data, dw.data);
          CHECK(here.device().bytes_in_use() == 0);
          decltype(norm)::saved kept;
          forward_on(norm, here, x.data, y.data, &kept);
          backward_on(norm, here, x.data, kept, x.data, dx.data);
          static_cast<void>(norm.weight()->reduce(here));  // partial over tp: the rows are sharded, the weight is not
          CHECK(y.off(values(tokens * width, 3.0), width, 0, 0) < 1e-6);
          CHECK(dw.off(values(width, 2.0 * tokens), width, 0, 0) < 1e-6);
        }) == "");
}

namespace {

struct table_policy {
  using input = spec<seq, invariant<tp>>;
  using weight = spec<shard<vocab, tp>, hidden>;
  using output = spec<shard<seq, tp>, hidden>;
};
struct up_policy_with_bias : up_policy {
  static constexpr bool bias = true;
};

}  // namespace

TEST_CASE("attach: the caller's bias and table") {
  CHECK(on_ranks(2, [](ncclComm_t comm, cudaStream_t stream, int rank, std::barrier<>&) {
          auto here = attach<mesh_of_tp>(comm, stream, sizes_of<seq, hidden, ffn, vocab>(tokens, width, inner, 6));
          const std::int64_t t = tokens / 2, f = inner / 2;
          matrix ids(tokens, 2, stream), table(3, width, stream), dtable(3, width, stream), x(t, width, stream),
              dx(t, width, stream), w(f, width, stream), dw(f, width, stream), b(1, f, stream), db(1, f, stream),
              y(tokens, f, stream);
          table.write(values(6 * width, 2.0), width, 0, 0);
          w.write(values(inner * width, 1.0), width, 0, 0);
          b.write(values(inner, 0.5), inner, 0, rank * f);
          embedding<float, table_policy, cuda> embed(here, 6, "embed", {.memory = {table.data, dtable.data}});
          linear<float, up_policy_with_bias, cuda> up(here, "up", {.memory = {w.data, dw.data, b.data, db.data}});
          CHECK(here.device().bytes_in_use() == 0);
          const auto* tokens_of_zero = reinterpret_cast<const std::int64_t*>(ids.data);
          linear_saved<cuda> kept;
          forward_on(embed, here, tokens_of_zero, x.data);
          forward_on(up, here, x.data, y.data, &kept);
          backward_on(up, here, x.data, kept, y.data, dx.data);
          backward_on(embed, here, tokens_of_zero, dx.data);
          const double out = 2.0 * width + 0.5;
          CHECK(y.off(values(tokens * inner, out), inner, 0, 0) < 1e-6);
          CHECK(db.off(values(inner, out * tokens), inner, 0, 0) < 1e-6);
          values expected(6 * width, 0.0);  // all tokens are 0, a row of rank 0
          for (std::int64_t c = 0; c < width; ++c) expected[static_cast<std::size_t>(c)] = out * inner * tokens;
          CHECK(dtable.off(expected, width, 3 * rank, 0) < 1e-6);
          CHECK(here.device().bytes_in_use() == 0);
        }) == "");
}

TEST_CASE("attach: layers and their collectives recorded in a graph") {
  for (const int ranks : {1, 2, 4}) {
    CAPTURE(ranks);
    CHECK(on_ranks(ranks, [](ncclComm_t comm, cudaStream_t stream, int rank, std::barrier<>&) {
            auto here = attach<mesh_of_tp>(comm, stream, sizes_of<seq, hidden, ffn>(tokens, width, inner));
            const std::int64_t n = here.ranks().size(), t = tokens / n, f = inner / n;
            matrix x(t, width, stream), y(tokens, f, stream), z(t, width, stream), dy(tokens, f, stream),
                dx(t, width, stream), w1(f, width, stream), dw1(f, width, stream), w2(width, f, stream),
                dw2(width, f, stream);
            w1.write(random_values<float>(inner * width, 2), width, rank * f, 0);
            w2.write(random_values<float>(width * inner, 3), inner, 0, rank * f);
            linear<float, up_policy, cuda> up(here, "up", {.memory = {w1.data, dw1.data}});
            linear<float, down_policy, cuda> down(here, "down", {.memory = {w2.data, dw2.data}});
            const auto step = [&] {
              linear_saved<cuda> up_kept, down_kept;
              for (const matrix* m : {&dw1, &dw2}) here.device().zero(m->data, m->bytes(), here.device().main_stream());
              forward_on(up, here, x.data, y.data, &up_kept);
              forward_on(down, here, y.data, z.data, &down_kept);
              backward_on(down, here, y.data, down_kept, z.data, dy.data);
              backward_on(up, here, x.data, up_kept, dy.data, dx.data);
            };
            const auto results = [&] {
              return std::vector<std::vector<float>>{z.read(), dx.read(), dw1.read(), dw2.read()};
            };
            std::vector<std::vector<std::vector<float>>> expected;
            for (unsigned turn = 0; turn < 2; ++turn) {
              x.write(random_values<float>(tokens * width, 10 + turn), width, rank * t, 0);
              step();
              expected.push_back(results());
            }
            CHECK(expected[0] != expected[1]);
            cuda_graph graph(here.device());
            graph.record(step);
            for (unsigned turn = 0; turn < 2; ++turn) {
              x.write(random_values<float>(tokens * width, 10 + turn), width, rank * t, 0);
              graph.launch();
              CHECK(results() == expected[turn]);
            }
          }) == "");
  }
}

TEST_CASE("attach: a null communicator is refused") {
  const char* text =
      "attach: the ncclComm_t is null; give one that ncclCommInitRank has made, or let nccl::connect make "
      "one";
  using any_dp = plait::mesh<axis<dp>, axis<tp, 2>>;
  CHECK_THROWS_WITH_AS(attach(mesh_of_tp(2), nullptr, nullptr), text, plait::error);
  CHECK_THROWS_WITH_AS(attach<any_dp>(nullptr, nullptr), text, plait::error);
  CHECK_THROWS_WITH_AS(nccl::attach(nullptr, cudaStream_t{}), text, plait::error);
}

TEST_CASE("attach: a mesh of another size than the communicator is refused, and the communicator still works") {
  using wrong = plait::mesh<axis<dp>, axis<tp, 3>>;
  const auto refused = [](auto make) {
    return on_ranks(2, [&](ncclComm_t comm, cudaStream_t stream, int rank, std::barrier<>& meeting) {
      CHECK_THROWS_WITH_AS(make(comm, stream), doctest::Contains("communicator has 2"), plait::error);
      check_pair(comm, stream, rank, meeting);
    });
  };
  CHECK(refused([](ncclComm_t comm, cudaStream_t stream) { auto here = attach<wrong>(comm, stream); }) == "");
  CHECK(refused([](ncclComm_t comm, cudaStream_t stream) { auto here = attach(mesh_of_tp(3), comm, stream); }) == "");
}
