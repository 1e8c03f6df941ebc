// States that are saved and loaded with ZeRO. examples/guide/05_loop.cpp has a loop with data, resumed on another mesh.
#include <doctest/doctest.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/saver.hpp"
#include "plait/comm/threads.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/parallel/train_step.hpp"
#include "support/temp_folder.hpp"

namespace pl = plait;

TEST_CASE("a state can be loaded before or after its training step is made, at every level of ZeRO") {
  enum class loads { never, before, after };
  const temp_folder folder;
  const auto hash_after = [&](pl::zero_level level, pl::moment_type moments, loads when) {
    std::uint64_t hash = 0;
    pl::threads::run(2, [&](pl::threads::communicator all) {
      pl::world world(pl::megatron_sp::mesh(2, 1, 1, 1).shape(), all);
      pl::cpu device;
      pl::llama_config config;
      config.layers = 1;
      const pl::context<pl::cpu> context{device, world, pl::llama_sizes<pl::megatron_sp>(config, world.shape(), 4, 16),
                                         1};
      pl::llama<float, pl::megatron_sp> model(context, config);
      pl::adamw<float> optimizer({.moments = moments});
      pl::pipeline_options options;
      options.parallel.level = level;
      if (level != pl::zero_level::replicated) options.cut = pl::bucket_cut::blocks(256);
      const auto load = [&] { pl::load_state(context, world.root(), model, optimizer, folder / "steps"); };
      if (when == loads::never) model.visit([&](auto& p) { p.initialize(context); });
      if (when == loads::before) load();
      pl::training_step step(context, model, optimizer, 1, 1.0, options);
      if (when == loads::after) load();
      for (std::int64_t i = optimizer.step(); i < 2; ++i) {
        step.load(context, 4 * i, [&](std::int64_t, pl::host_tokens& ids, pl::host_tokens& labels) {
          ids.fill([&](std::int64_t sample, std::int64_t at) { return (4 * i + sample) * at % 23; });
          labels.fill([&](std::int64_t sample, std::int64_t at) { return (4 * i + sample) * (at + 1) % 23; });
        });
        optimizer.begin_step(context, 1e-2);
        step.run(context);
        if (i == 1) break;
        pl::checkpoint_saver saver(device, world.root(), {.directory = folder / "steps"});
        saver.save(context, model, optimizer, 1);
        for (const auto& save : saver.wait(device)) CHECK(save.failure == "");
      }
      CHECK(optimizer.missed_steps().empty());  // also for parameters of which this rank has no element
      const std::uint64_t mine = pl::weights_hash(context, model);
      if (world.rank() == 0) hash = mine;
    });
    return hash;
  };
  for (const pl::zero_level level :
       {pl::zero_level::replicated, pl::zero_level::optimizer, pl::zero_level::gradients, pl::zero_level::parameters})
    for (const pl::moment_type moments : {pl::moment_type::full, pl::moment_type::int8}) {
      std::filesystem::remove_all(folder / "steps");
      const std::uint64_t through = hash_after(level, moments, loads::never);
      CHECK(hash_after(level, moments, loads::before) == through);
      CHECK(hash_after(level, moments, loads::after) == through);
    }
}
