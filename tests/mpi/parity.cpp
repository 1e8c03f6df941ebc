// timeout: 240
// ranks: 4 8 16
// Compares meshes of all MPI ranks (every mesh of 4 and 8 ranks) with one rank in the same process: loss, gradients and
// weights of a small Llama, and the ledger.
#define DOCTEST_CONFIG_IMPLEMENT  // the header needs doctest; this program has its own checks
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "plait/comm/mpi.hpp"
#include "plait/schedule/generators.hpp"
#include "plait/testing/program_parity.hpp"
#include "support/llama_parity.hpp"

namespace {

using namespace plait;
using namespace plait::test;

struct chunked_sp : megatron_sp {  // messages of tensor parallelism are in flight during products
  using overlap = plait::overlap<2>;
};

int failures = 0;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "parity: %s\n", what.c_str());
}

/// Compares this rank, of a mesh or of a pipeline, with one rank in its own process.
template <class T, strategy S>
void compare(mpi::communicator& world_of_mpi, const scenario& s, const mesh_shape& mesh,
             const schedule* plan = nullptr) {
  const model_outcome one = train_one<T, S>(s);
  const auto make = make_llama<T, S>(s.config, s.options);
  const model_setup how = setup_of<T, S>(s);
  pipeline_world ranks(mesh, any_communicator(world_of_mpi));
  cpu device;
  const model_outcome got = train_rank(ranks, device, how, make, plan);
  findings found = compare_models(got, one, how);
  found.require(plan || got.parameters == one.parameters, "another number of parameters");
  expect(found.empty(),
         cat({describe(mesh), plan ? plan->name.str() : "", " rank ", world_of_mpi.rank(), ": ", found.text()}));
}

/// Compares the stages of a pipeline, one on each rank or, with several chunks, more.
void compare_pipeline(mpi::communicator& world_of_mpi, scenario s, std::int64_t pp_ranks, const schedule& plan) {
  s.config.layers = plan.shape.stages() + 1;
  s.microbatches = plan.shape.microbatches;
  s.steps = 2;
  const mesh_shape shape = pipeline_mesh{world_of_mpi.size() / pp_ranks / 2, pp_ranks, 2}.shape(s.config.kv_heads);
  compare<double, megatron_sp>(world_of_mpi, s, shape, &plan);
}

/// Compares the records that processes write to files with the record of one process.
void compare_records(mpi::communicator& c) {
  cpu device;
  any_communicator all(c), self(c.split(c.rank(), 0));
  std::string folder = (std::filesystem::temp_directory_path() / "plait-record-XXXXXX").string();
  if (c.rank() == 0 && ::mkdtemp(folder.data()) == nullptr) fail("cannot make a temporary folder");
  folder = broadcast_text(device, all, folder);
  const auto record = [&](any_communicator& ranks, const std::string& name, double wrong) {
    using columns = spec<batch, shard<hidden, tp>>;
    world mesh_ranks(mesh<axis<tp>>(ranks.size()).shape(), ranks);
    const context<cpu> ctx{device, mesh_ranks, sizes_of<batch, hidden>(2, 2 * c.size()), 1};
    tensor<double, columns> x(ctx);
    const box& part = x.part();
    for (std::int64_t i = 0; i < x.size(); ++i)
      x.data()[i] = wrong * static_cast<double>(i / part.local[1] * 100 + part.offset[1] + i % part.local[1] + 1);
    program_record<cpu> into(ctx, folder + name);
    into.step(0);
    into.add("x", x);
    into.add_scalar<spec<partial<tp>>>("share", 1.0 / ranks.size());
    into.finish();
  };
  if (c.rank() == 0) record(self, "/one", 1);
  record(all, "/many", 1);
  record(all, "/wrong", 1.0 / c.size());
  c.barrier();
  if (c.rank() != 0) return;
  const program_run one(folder + "/one");
  const std::string right = compare_runs(one, program_run(folder + "/many")).text();
  const std::string wrong = compare_runs(one, program_run(folder + "/wrong")).text();
  expect(right.empty(), "records: " + right);
  expect(wrong.starts_with("step 0, x: ") && wrong.ends_with("a factor that the extent of tp gives"),
         "records of a wrong program: " + wrong);
  std::filesystem::remove_all(folder);
}

}  // namespace

int main(int argc, char** argv) {
  return mpi::run(argc, argv, [](mpi::communicator& c) {
    scenario s{small_config(16, 2)};
    s.config.hidden = 32, s.config.ffn = 64;
    s.batch = s.seq = 32;
    s.microbatches = 2;
    s.options.loss.label_smoothing = 0.1;
    s.options.dropout = 0.1;
    // tests/parity compares every mesh of 16 ranks in one process; here a few of each kind are enough.
    const bool few = c.size() > 8;
    for (std::int64_t tp_ranks = 1; tp_ranks <= c.size(); ++tp_ranks) {
      if (c.size() % tp_ranks != 0 || (few && tp_ranks != 4)) continue;
      compare<double, megatron_sp>(c, s, mesh_of<megatron_sp>(s, c.size() / tp_ranks, tp_ranks));
      if (c.size() == 4 || tp_ranks == 4)
        compare<float, stored_over_dp<chunked_sp>>(c, s, mesh_of<chunked_sp>(s, c.size() / tp_ranks, tp_ranks));
    }
    if (!few) compare<double, megatron_sp>(c, s, mesh_of<megatron_sp>(s, 1, 1, c.size()));
    compare<double, megatron_sp>(c, s, mesh_of<megatron_sp>(s, 1, 2, c.size() / 2));
    for (int pp_ranks = few ? 4 : 2; pp_ranks * 2 <= c.size(); pp_ranks *= 2) {
      compare_pipeline(c, s, pp_ranks, make_schedule<one_f_one_b>(pp_ranks, 4));
      compare_pipeline(c, s, pp_ranks, make_schedule<zb_v>(pp_ranks, 8));
    }
    compare_records(c);
    if (failures > 0) fail(std::to_string(failures) + " comparisons failed");
    if (c.rank() == 0) std::puts("parity: ok");
  });
}
