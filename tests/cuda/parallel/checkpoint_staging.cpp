// program: training
// Host memory for the copies of a save on a GPU. It is pinned, filled in the order of the main stream while the host
// continues, and complete before it is hashed. Its size stays within the limit.
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/parallel/small_training.hpp"
#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/saver.hpp"
#include "plait/device/device.hpp"
#include "support/saved_tensors.hpp"
#include "support/temp_folder.hpp"

using namespace plait;
using namespace plait::test;

namespace {

constexpr std::size_t unbounded = std::numeric_limits<std::size_t>::max();

/// Numbers on the GPU, and the kinds of memory that saves copied them to.
struct numbers {
  numbers(const context<cuda>& c, std::string called, std::int64_t n)
      : ctx(c), name(std::move(called)), size(n), memory(make_buffer<float>(c.device, static_cast<std::size_t>(n))) {}
  float* values() { return memory.data<float>(); }
  std::size_t bytes() const { return static_cast<std::size_t>(size) * sizeof(float); }
  void fill(float value) {
    const std::vector<float> all(static_cast<std::size_t>(size), value);
    ctx.device.upload(values(), all.data(), bytes(), ctx.device.main_stream());
  }
  void zero() { ctx.device.zero(values(), bytes(), ctx.device.main_stream()); }
  bool all_are(float value) {
    std::vector<float> all(static_cast<std::size_t>(size));
    ctx.device.download(all.data(), values(), bytes(), ctx.device.main_stream());
    return std::all_of(all.begin(), all.end(), [&](float x) { return x == value; });
  }
  held_tensor held() {
    held_tensor h = held_in_memory(name, values(), size);
    h.copies = axis_list(axis_of<dp>);
    h.read = [this](std::int64_t from, std::int64_t to, std::byte* out) {
      cudaPointerAttributes found{};
      CHECK(cudaPointerGetAttributes(&found, out) == cudaSuccess);
      kinds.push_back(found.type);
      plait::detail::read_to_host(ctx, out, values() + from, static_cast<std::size_t>(to - from) * sizeof(float));
    };
    h.write = [this](const std::byte* in) { ctx.device.upload(values(), in, bytes(), ctx.device.main_stream()); };
    return h;
  }
  const context<cuda>& ctx;
  std::string name;
  std::int64_t size;
  buffer<cuda> memory;
  std::vector<cudaMemoryType> kinds{};
};

std::vector<held_tensor> held_of(std::vector<numbers>& all) {
  std::vector<held_tensor> held;
  for (numbers& n : all) held.push_back(n.held());
  return held;
}

}  // namespace

TEST_CASE("a save on a GPU has the state at its call, even if the stream copies later") {
  const scenario s = small_scenario();
  for (const std::int64_t ranks : {1, 2}) {
    for (const std::size_t pinned_bytes : {unbounded, std::size_t{0}}) {
      const temp_folder folder;
      on_gpu(s, ranks, s.batch / s.microbatches, [&](const context<cuda>& ctx) {
        std::vector<numbers> mine;
        for (int i = 0; i < 8; ++i) mine.emplace_back(ctx, cat({"numbers.", i}), 1000 + i);
        checkpoint_saver saver(ctx.device, ctx.ranks.root(),
                               {.directory = folder / "steps", .pinned_bytes = pinned_bytes});
        for (std::uint64_t step = 1; step <= 12; ++step) {
          for (numbers& n : mine) n.fill(static_cast<float>(step));
          saver.save(ctx, step, {.tensors = held_of(mine)});
          std::this_thread::sleep_for(std::chrono::milliseconds(10));  // its thread is working
          for (numbers& n : mine) n.zero();
          const auto ended = saver.wait(ctx.device);
          CHECK(ended.at(0).failure == "");
          CHECK(ended.at(0).stall > 0);
          load_tensors(ctx, ctx.ranks.root(), folder / "steps", {.tensors = held_of(mine)});
          for (numbers& n : mine) CHECK(n.all_are(static_cast<float>(step)));
        }
        const cudaMemoryType kind = pinned_bytes > 0 ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
        for (numbers& n : mine) CHECK(std::count(n.kinds.begin(), n.kinds.end(), kind) == 12);
      });
    }
  }
}

TEST_CASE("weights and optimizer state are copied to pinned memory, and do not change there") {
  const scenario s = small_scenario();
  const temp_folder folder;
  on_gpu(s, 1, s.batch / s.microbatches, [&](const context<cuda>& ctx) {
    small_model model(ctx, s.config, s.options);
    chosen_optimizer<bf16, cuda> optimizer(s.optimizer);
    checkpoint_saver saver(ctx.device, ctx.ranks.root(), {.directory = folder / "steps"});
    for (std::uint64_t step = 1; step <= 6; ++step) {
      const context<cuda> other{ctx.device, ctx.ranks, ctx.sizes, 100 + step};
      model.visit([&](auto& p) { p.initialize(other); });
      const std::uint64_t before = weights_hash(ctx, model);
      saver.save(ctx, model, optimizer, step);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      model.visit([&](auto& p) {
        ctx.device.zero(p.changed_slice(), static_cast<std::size_t>(p.slice().size()) * sizeof(float),
                        ctx.device.main_stream());
      });
      CHECK(saver.wait(ctx.device).at(0).failure == "");
      CHECK(weights_hash(ctx, model) != before);
      load_state(ctx, ctx.ranks.root(), model, optimizer, folder / "steps");
      CHECK(weights_hash(ctx, model) == before);
    }
  });
}

TEST_CASE("moments in 8 bits are copied to pinned memory as codes, and decoded later") {
  scenario s = small_scenario();
  s.optimizer = adamw_options{.moments = moment_type::int8};
  const temp_folder folder;
  on_gpu(s, 1, s.batch / s.microbatches, [&](const context<cuda>& ctx) {
    small_model model(ctx, s.config, s.options);
    chosen_optimizer<bf16, cuda> optimizer(s.optimizer);
    const auto moments = [&] {
      std::vector<std::vector<bf16>> all;
      for (const held_tensor& h : held_optimizer(ctx, model, optimizer))
        h.read(h.begin, h.end,
               reinterpret_cast<std::byte*>(all.emplace_back(static_cast<std::size_t>(h.size())).data()));
      return all;
    };
    const auto set = [&](float scale) {
      for (const held_tensor& h : held_optimizer(ctx, model, optimizer)) {
        std::vector<bf16> numbers;
        for (std::int64_t i = 0; i < h.size(); ++i) numbers.push_back(to_bf16(scale * static_cast<float>(i % 97 + 1)));
        h.write(reinterpret_cast<const std::byte*>(numbers.data()));
      }
    };
    const auto same = [](const std::vector<std::vector<bf16>>& a, const std::vector<std::vector<bf16>>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
        return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(bf16)) == 0;
      });
    };
    checkpoint_saver saver(ctx.device, ctx.ranks.root(), {.directory = folder / "steps"});
    for (std::uint64_t step = 1; step <= 6; ++step) {
      set(static_cast<float>(step));
      const auto before = moments();
      saver.save(ctx, model, optimizer, step);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // its thread is working
      set(0);
      CHECK(saver.wait(ctx.device).at(0).failure == "");
      CHECK(!same(moments(), before));
      load_state(ctx, ctx.ranks.root(), model, optimizer, folder / "steps");
      CHECK(same(moments(), before));
    }
  });
}

TEST_CASE("more pinned memory than allowed or available is refused on all ranks, naming the field") {
  const scenario s = small_scenario();
  const temp_folder folder;
  on_gpu(s, 2, s.batch / s.microbatches, [&](const context<cuda>& ctx) {
    std::vector<numbers> mine;
    mine.emplace_back(ctx, "numbers", 1000);  // 2000 bytes on each rank
    mine[0].fill(1);
    {
      checkpoint_saver saver(ctx.device, ctx.ranks.root(), {.directory = folder / "steps", .pinned_bytes = 3999});
      saver.save(ctx, 1, {.tensors = held_of(mine)});
      CHECK_ERROR(saver.save(ctx, 2, {.tensors = held_of(mine)}),
                  "step 2 is not saved: ", "to stage 2000 bytes, this rank would have 4000 bytes of pinned memory",
                  "saver_options::pinned_bytes is 3999; allow it more, or 0");
      CHECK(saver.wait(ctx.device).at(0).failure == "");
      saver.save(ctx, 2, {.tensors = held_of(mine)});  // in the arena of the first save
      CHECK(saver.wait(ctx.device).at(0).failure == "");
    }
#ifdef PLAIT_CUDA_STAND_IN  // pinning more memory than a machine has may crash it
    checkpoint_saver saver(ctx.device, ctx.ranks.root(), {.directory = folder / "steps"});
    std::vector<held_tensor> held = held_of(mine);
    held[0].shape = {std::int64_t{1} << 44};
    held[0].part.global[0] = held[0].part.local[0] = held[0].end = std::int64_t{1} << 44;
    CHECK_ERROR(saver.save(ctx, 3, {.tensors = held}), "step 3 is not saved: ", "the host has no room for",
                "bytes of pinned memory", "saver_options::pinned_bytes");
    saver.save(ctx, 3, {.tensors = held_of(mine)});
    CHECK(saver.wait(ctx.device).at(0).failure == "");
#endif
  });
}
