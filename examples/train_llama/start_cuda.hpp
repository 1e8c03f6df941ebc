#pragma once

#include <functional>

#include "model_run.hpp"

namespace plait::mpi {
class communicator;
}

// How the ranks of a run on GPUs are started. Each function hands every rank's training to `body`, in the rank's own
// thread. A program without CUDA, NCCL or cuDNN has them, too: `check_built` says how to build with it.
using rank_body = std::function<void(model_run&)>;

/// Throws `plait::error` unless this program has what the options ask for.
void check_built(const options& opt);
bool has_cudnn();

/// The ranks are threads of this process and share a GPU.
void start_on_one_gpu(const setup& s, const rank_body& body);
/// The ranks are threads of this process, each with a GPU of its own, from the first on.
void start_on_all_gpus(const setup& s, const rank_body& body);
/// This process is the rank that torchrun's or Slurm's variables name.
void start_launched(const setup& s, const rank_body& body);
/// This process is the same rank as in MPI.
void start_by_mpi(const setup& s, plait::mpi::communicator& ranks, const rank_body& body);
