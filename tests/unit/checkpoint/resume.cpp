// program: saver
// A loop resumes or starts on all ranks alike, even if one of them does not see the newest step yet.
#include <doctest/doctest.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plait/checkpoint/load_state.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/moe.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "support/on_mesh.hpp"
#include "support/saved_tensors.hpp"

using namespace plait;
using namespace plait::test;

namespace {

struct square {
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<ffn, tp>>;
};
struct with_bias : square {
  static constexpr bool bias = true;
};
struct mixture {
  using input = spec<shard<batch, dp>, seq, hidden, invariant<tp>>;
  using weight = spec<shard<experts, dp>, shard<ffn, tp>, hidden>;
  using output = input;
};
const dim_sizes mixture_sizes = sizes_of<batch, seq, hidden, ffn, experts>(4, 2, 8, 16, 4);
using net = plait::mesh<axis<dp>, axis<tp>>;

template <class Layer>
void save(const context<cpu>& ctx, Layer& layer, adamw<float>& optimizer, std::uint64_t step,
          memory_file_system& disk) {
  checkpoint_saver saver(ctx.device, ctx.ranks.root(), {.directory = "steps"}, disk);
  saver.save(ctx, layer, optimizer, step);
  CHECK(saver.wait(ctx.device).at(0).failure == "");
}

/// A file system on which one rank sees no steps.
class blind_files final : public other_files {
 public:
  using other_files::other_files;
  std::vector<directory_entry> list(const std::string&) override { return {}; }
};

/// The step that each of four ranks resumes from, 0 if training starts; rank 3 does not see existing steps.
std::vector<std::uint64_t> resumed(memory_file_system& disk) {
  std::vector<std::uint64_t> steps(4);
  blind_files blind(static_cast<file_system&>(disk));
  on_mesh(net{2, 2}, sizes_of<batch, hidden, ffn>(4, 8, 16), 1, [&](const context<cpu>& ctx) {
    linear<float, square> layer(ctx, "up");
    adamw<float> optimizer;
    file_system& files = ctx.ranks.rank() == 3 ? static_cast<file_system&>(blind) : disk;
    const auto found = resume_or_initialize(ctx, ctx.ranks.root(), layer, optimizer, "steps", {}, files);
    gather_parameters(ctx, layer);
    steps[static_cast<std::size_t>(ctx.ranks.rank())] = found ? found->step : 0;
    if (!found) save(ctx, layer, optimizer, 5, disk);
  });
  return steps;
}

}  // namespace

TEST_CASE("all ranks resume or start, as one of them decides") {
  memory_file_system disk;
  CHECK(resumed(disk) == std::vector<std::uint64_t>{0, 0, 0, 0});
  CHECK(resumed(disk) == std::vector<std::uint64_t>{5, 5, 5, 5});
  disk.remove_file("steps/step-00000005/" + std::string(detail::commit_file));
  CHECK_THROWS_WITH(resumed(disk), doctest::Contains("'steps' has steps, and none is whole: 'steps/step-00000005': "));
}

TEST_CASE("the steps in which a parameter was not updated are saved, and loaded on another mesh") {
  memory_file_system disk;
  const auto on = [&](const net& shape, auto&& body) {
    on_mesh(shape, sizes_of<batch, hidden, ffn>(4, 8, 16), 1, [&](const context<cpu>& ctx) {
      linear<float, with_bias> layer(ctx, "up");
      adamw<float> optimizer;
      body(ctx, layer, optimizer);
    });
  };
  using missed = std::map<std::string, std::int64_t>;
  on(net{2, 2}, [&](auto& ctx, auto& layer, auto& optimizer) {
    layer.visit([&](auto& p) { p.initialize(ctx); });
    for (int step = 0; step < 3; ++step) {
      gather_parameters(ctx, layer);
      zero_gradients(ctx, layer);
      optimizer.begin_step(ctx, 1e-2);
      layer.visit([&](auto& p) {
        auto gradient = p.reduce(ctx);
        if (step == 1 || p.name() == "up.weight") optimizer.update(ctx, std::move(gradient));
      });
    }
    CHECK(optimizer.missed_steps() == missed{{"up.bias", 2}});
    save(ctx, layer, optimizer, 3, disk);
  });
  on(net{1, 1}, [&](auto& ctx, auto& layer, auto& optimizer) {
    load_state(ctx, ctx.ranks.root(), layer, optimizer, "steps", {}, disk);
    CHECK(optimizer.step() == 3);
    CHECK(optimizer.missed_steps() == missed{{"up.bias", 2}});
  });
}

TEST_CASE("the bias of the choice of experts and their last load are saved, and loaded on another mesh") {
  memory_file_system disk;
  enum class part { saves, loads, has_no_load };
  for (const auto& [dp_ranks, tp_ranks, does] :
       {std::tuple{2, 2, part::saves}, {4, 1, part::loads}, {1, 1, part::loads}, {1, 1, part::has_no_load}})
    on_mesh(net{dp_ranks, tp_ranks}, mixture_sizes, 1, [&, does = does](const context<cpu>& ctx) {
      const bool first = does == part::saves;
      const balance_over over = does == part::has_no_load ? balance_over::sequence : balance_over::step;
      moe<float, mixture> layer(ctx, "mlp", {.losses = {.balance = {1, over}}, .bias_rate = 0.001});
      adamw<float> optimizer;
      CHECK(resume_or_initialize(ctx, ctx.ranks.root(), layer, optimizer, "steps", {}, disk).has_value() != first);
      int states = 0;
      layer.visit([&](auto& p) {
        if (!p.changes_at_end_of_step()) return;
        ++states;
        for (int e = 0; e < 4; ++e) {
          const float begins = is_last_load(p.name()), expected = begins + 0.25f * static_cast<float>(e - 1);
          if (first) CHECK(std::as_const(p).value()[e] == begins);
          if (first) p.value()[e] = expected;
          CHECK(std::as_const(p).value()[e] == expected);
        }
      });
      CHECK(states == (does == part::has_no_load ? 1 : 2));
      if (first) save(ctx, layer, optimizer, 5, disk);
    });
}

TEST_CASE("a mixture resumes from a step without the last load of experts as if all were chosen alike") {
  memory_file_system disk;
  for (const balance_over over : {balance_over::microbatch, balance_over::step})
    on_mesh(net{2, 1}, mixture_sizes, 1, [&](const context<cpu>& ctx) {
      moe<float, mixture> layer(ctx, "mlp", {.losses = {.balance = {1, over}}});
      adamw<float> optimizer;
      const bool found = resume_or_initialize(ctx, ctx.ranks.root(), layer, optimizer, "steps", {}, disk).has_value();
      CHECK(found == (over == balance_over::step));
      gather_parameters(ctx, layer);
      layer.visit([&](const auto& p) {
        for (int e = 0; is_last_load(p.name()) && e < 4; ++e) CHECK(p.value()[e] == 1);
      });
      if (!found) save(ctx, layer, optimizer, 5, disk);
    });
}
