// Ranks with a GPU each, or that there are none. PLAIT_WITH_NCCL is set where plait::nccl is there.
#include <cstdint>
#include <utility>
#include <vector>

#include "agreed.hpp"
#include "check_memory.hpp"
#include "cuda_device.hpp"
#ifdef PLAIT_WITH_NCCL
#include "plait/comm/launch/nccl.hpp"
#ifdef PLAIT_WITH_MPI
#include "plait/comm/launch/nccl_mpi.hpp"
#endif
#endif

#ifdef PLAIT_WITH_NCCL
namespace {

/// Of the GPUs that this process sees. Launchers may show each process its own alone; NCCL refuses one that is taken.
/// The process looks at no other: that takes half a GB of it, and fails where another process has it for itself.
int gpu_of(const setup& s, std::int64_t rank, int local_rank) {
  const int index = local_rank % count_gpus();
  check_gpu(s, index, least_bytes_of(s, rank).gpu);
  return index;
}

plait::nccl::options nccl_options(const setup& s) { return {.deadline = s.opt.deadline}; }

}  // namespace

bool has_nccl() { return true; }

void start_on_all_gpus(const setup& s, const rank_body& body) {
  std::vector<int> devices;
  const int count = count_gpus();
  if (s.mesh.size() > count)
    plait::fail("--mesh " + s.opt.mesh + " has " + std::to_string(s.mesh.size()) +
                " ranks, but --backend nccl was started as one process, which sees " + std::to_string(count) +
                (count == 1 ? " GPU" : " GPUs") +
                "; start it by torchrun, srun or mpirun on several machines, or let "
                "ranks share a GPU by --backend threads");
  check_gpu(s, 0, least_bytes_of(s, 0).gpu);
  for (int i = 0; i < s.mesh.size(); ++i) devices.push_back(i);
  plait::nccl::run(devices, device_options(s, 0), nccl_options(s),
                   [&](plait::nccl::communicator ranks, plait::cuda& device) {
                     run_on_gpu(s, device, plait::any_communicator(std::move(ranks)), body);
                   });
}

void start_launched(const setup& s, const rank_body& body) {
  const plait::nccl::launch_place place = plait::nccl::place_from_environment();
  plait::cuda device(device_options(s, gpu_of(s, place.rank, place.local_rank)));
  plait::any_communicator ranks(plait::nccl::from_environment(device, nccl_options(s)));
  plait::require_agreement(device, ranks, agreed_settings(s));
  run_on_gpu(s, device, std::move(ranks), body);
}

#ifdef PLAIT_WITH_MPI
void start_by_mpi(const setup& s, plait::mpi::communicator& ranks, const rank_body& body) {
  plait::cuda device(device_options(s, gpu_of(s, ranks.rank(), plait::nccl::local_rank(ranks))));
  run_on_gpu(s, device, plait::nccl::from_mpi(ranks, device, nccl_options(s)), body);
}
#endif
#else
bool has_nccl() { return false; }

void start_on_all_gpus(const setup& s, const rank_body&) { check_built(s.opt); }
void start_launched(const setup& s, const rank_body&) { check_built(s.opt); }
void start_by_mpi(const setup& s, plait::mpi::communicator&, const rank_body&) { check_built(s.opt); }
#endif
