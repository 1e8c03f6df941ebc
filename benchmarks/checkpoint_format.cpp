#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "plait/checkpoint/boxes.hpp"
#include "plait/checkpoint/manifest.hpp"
#include "plait/io/crc32c.hpp"

/// Measures the costs of the checkpoint format on one thread: checksums, compared with `copy`, the memory's rate, and
/// manifests of `boxes` boxes, 16 for each tensor.
namespace {

std::vector<std::byte> bytes_of(const benchmark::State& state) {
  std::mt19937_64 random(1);
  std::vector<std::byte> out(static_cast<std::size_t>(state.range(0)));
  for (std::size_t i = 0; i + 8 <= out.size(); i += 8) {
    const std::uint64_t word = random();
    std::memcpy(out.data() + i, &word, 8);
  }
  return out;
}
void count_bytes(benchmark::State& state) { state.SetBytesProcessed(state.iterations() * state.range(0)); }

void copy(benchmark::State& state) {
  const auto from = bytes_of(state);
  std::vector<std::byte> to(from.size());
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), from.size());
    benchmark::DoNotOptimize(to.data());
    benchmark::ClobberMemory();
  }
  count_bytes(state);
}
void crc32c(benchmark::State& state) {
  const auto data = bytes_of(state);
  for (auto _ : state) benchmark::DoNotOptimize(plait::crc32c(data));
  count_bytes(state);
}
void crc32c_by_tables(benchmark::State& state) {
  const auto data = bytes_of(state);
  for (auto _ : state) benchmark::DoNotOptimize(plait::detail::crc32c_by_tables(~0u, data));
  count_bytes(state);
}
void sizes(benchmark::internal::Benchmark* b) { b->Arg(4 << 10)->Arg(256 << 10)->Arg(256 << 20); }
BENCHMARK(copy)->Apply(sizes);
BENCHMARK(crc32c)->Apply(sizes);
BENCHMARK(crc32c_by_tables)->Apply(sizes);

/// Returns a manifest of matrices of 4096 x 4096 floats, each in a grid of 4 x 4 boxes, with a file for every 1024
/// boxes.
plait::manifest grid(std::int64_t boxes) {
  plait::manifest m;
  m.layout = "grid";
  constexpr std::uint64_t header = 4096, box_bytes = 1024 * 1024 * 4;
  for (std::int64_t i = 0; i < boxes; ++i) {
    if (i % 1024 == 0) m.files.push_back({"data/w" + std::to_string(i / 1024) + ".safetensors", header, header, 1});
    if (i % 16 == 0) {
      m.tensors.push_back(
          {"model.layers." + std::to_string(i / 16) + ".weight", plait::safetensors_dtype::f32, {4096, 4096}, {}});
    }
    plait::stored_box part;
    part.offset = {i % 16 / 4 * 1024, i % 4 * 1024};
    part.extent = {1024, 1024};
    part.stored = {static_cast<std::uint32_t>(m.files.size() - 1), static_cast<std::uint32_t>(i * 2654435761u),
                   m.files.back().bytes, box_bytes};
    m.files.back().bytes += box_bytes;
    m.tensors.back().boxes.push_back(part);
  }
  return m;
}

void manifest_check(benchmark::State& state) {
  const plait::manifest m = grid(state.range(0));
  for (auto _ : state) plait::check_manifest(m, "x");
}
void manifest_write(benchmark::State& state) {
  const plait::manifest m = grid(state.range(0));
  for (auto _ : state) {
    const std::string text = plait::manifest_text(m);
    state.counters["MB"] = static_cast<double>(text.size()) * 1e-6;
  }
}
void manifest_read(benchmark::State& state) {
  const std::string text = plait::manifest_text(grid(state.range(0)));
  for (auto _ : state) benchmark::DoNotOptimize(plait::parse_manifest(text).tensors.size());
}
BENCHMARK(manifest_check)->Arg(2'000'000)->Unit(benchmark::kMillisecond);
BENCHMARK(manifest_write)->Arg(2'000'000)->Unit(benchmark::kMillisecond);
BENCHMARK(manifest_read)->Arg(2'000'000)->Unit(benchmark::kMillisecond);

/// Returns the boxes of one tensor that is cut into a square grid.
std::vector<plait::box> tiles(std::int64_t side) {
  std::vector<plait::box> out;
  plait::box b;
  b.dims = 2;
  b.global = {64 * side, 64 * side};
  b.local = {64, 64};
  for (std::int64_t i = 0; i < side * side; ++i) {
    b.offset = {i / side * 64, i % side * 64};
    out.push_back(b);
  }
  return out;
}
void manifest_check_of_one_tensor(benchmark::State& state) {
  plait::manifest m;
  m.files = {{"data/w", 0, 0, 1}};
  m.tensors = {{"t", plait::safetensors_dtype::f32, {64 * state.range(0), 64 * state.range(0)}, {}}};
  for (const plait::box& b : tiles(state.range(0))) {
    plait::stored_box part;
    part.offset = b.offset;
    part.extent = b.local;
    part.stored = {0, 1, m.files[0].bytes, 64 * 64 * 4};
    m.files[0].bytes += 64 * 64 * 4;
    m.tensors[0].boxes.push_back(part);
  }
  for (auto _ : state) plait::check_manifest(m, "x");
}
void index_build(benchmark::State& state) {
  const auto boxes = tiles(state.range(0));
  for (auto _ : state) benchmark::DoNotOptimize(plait::box_index(boxes));
}
void index_query(benchmark::State& state) {
  const auto boxes = tiles(state.range(0));
  const plait::box_index index(boxes);
  std::mt19937_64 random(1);
  for (auto _ : state) {
    plait::box wanted = boxes[random() % boxes.size()];
    wanted.local = {100, 100};
    benchmark::DoNotOptimize(index.overlapping(wanted));
  }
}
BENCHMARK(manifest_check_of_one_tensor)->Arg(1414)->Unit(benchmark::kMillisecond);
BENCHMARK(index_build)->Arg(1414)->Unit(benchmark::kMillisecond);
BENCHMARK(index_query)->Arg(1414);

}  // namespace

BENCHMARK_MAIN();
