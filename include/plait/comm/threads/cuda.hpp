// The in-process backend for ranks that share one GPU. The last rank to arrive enqueues an operation's kernel or copies
// after the earlier work of all ranks. Every rank's main stream waits for them. Ranks with a GPU each use
// comm/launch/nccl.hpp.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include "plait/comm/threads.hpp"
#include "plait/comm/threads/operation.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda.hpp"

namespace plait::threads {

namespace detail {

/// A CUDA event, reused between operations.
class cuda_mark final : public device_mark {
 public:
  cuda::event event;
};

inline cuda_mark& mark_in(std::unique_ptr<device_mark>& place) {
  if (place == nullptr) place = std::make_unique<cuda_mark>();
  return static_cast<cuda_mark&>(*place);
}

}  // namespace detail

/// Runs operations on one GPU that all ranks of a group share. They run in the last arriver's side stream, after the
/// earlier work of all ranks' main streams.
class cuda_engine : public device_engine {
 public:
  cuda_engine(cudaStream_t main, cudaStream_t side) : main_(main), side_(side) {}
  explicit cuda_engine(const cuda& device)
      : cuda_engine(device.main_stream().handle(), device.side_stream().handle()) {}

  /// Sets the streams of later operations.
  void set_streams(cudaStream_t main, cudaStream_t side) {
    main_ = cuda::stream(main);
    side_ = cuda::stream(side);
  }

  void check(const char* what, const void* data) const override {
    cudaPointerAttributes found{};
    const cudaError_t status = cudaPointerGetAttributes(&found, data);
    if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
    if (status != cudaSuccess || found.type == cudaMemoryTypeUnregistered) {
      fail({what,
            ": a pointer to the host's memory, but this communicator works on a device's; upload "
            "the data, or use the communicator that has no device"});
    }
    int here = 0;
    plait::detail::cuda_check(cudaGetDevice(&here), "asking for the GPU");
    if (found.type == cudaMemoryTypeDevice && found.device != here) {
      fail({what, ": memory of device ", found.device, " on a rank of device ", here,
            "; in-process ranks share one GPU (use NCCL for several)"});
    }
  }

  void arrive(detail::part& mine) override { detail::mark_in(mine.mark).event.record(main_); }

  void run(detail::operation& op) override {
    for (detail::part& p : op.parts) side_.wait(detail::mark_in(p.mark).event);
    enqueue(op);
    detail::mark_in(op.end).event.record(side_);
  }

  void leave(detail::operation& op) override { main_.wait(detail::mark_in(op.end).event); }
  bool reached(detail::operation& op) const override {
    return static_cast<const detail::cuda_mark&>(*op.end).event.done();
  }

 private:
  /// Enqueues the kernel or the copies of an operation in the side stream.
  void enqueue(detail::operation& op);

  cuda::stream main_, side_;
};

/// Returns the ranks of `comm` on the memory of a GPU that they share. Collective. Each rank has its own device object,
/// which must outlive the communicator, its splits and its requests. A call returns when all ranks have made it. Later
/// work in the main stream sees its results.
inline communicator on(communicator& comm, const cuda& device) {
  return comm.on(std::make_shared<cuda_engine>(device));
}

/// Runs `body(communicator, device)` on `ranks` threads that share a GPU. It reports errors as `run(ranks, body)` does.
template <class F>
void run(int ranks, const cuda::options& options, F&& body) {
  run(ranks, [&](communicator& host) {
    cuda device(options);
    communicator comm = on(host, device);
    body(comm, device);
  });
}

/// Starts the ranks of a parity check on one GPU (testing/layer_parity.hpp): `check_mesh(mesh, sizes, one, make, 1e-12,
/// on_one_gpu{})`.
struct on_one_gpu {
  cuda::options options{};

  template <class F>
  void operator()(int ranks, F&& body) const {
    run(ranks, options, body);
  }
};

}  // namespace plait::threads

#ifdef PLAIT_CUDA_KERNELS
#include "plait/comm/reduce.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/math.hpp"

namespace plait::threads {

namespace detail {

inline constexpr int most_device_ranks = 64;

/// The ranks' buffers, as a kernel argument.
struct part_table {
  const void* in[most_device_ranks];
  void* out[most_device_ranks];
};

/// out_r[i] = in_0[i] op ... op in_{inputs-1}[i] for every rank r, in the order of the ranks, with the CPU's arithmetic
/// and therefore the CPU's bits. With `Scatter`, rank r = blockIdx.y gets elements [r * count, (r + 1) * count). A
/// thread reads an element of all inputs before it writes it, so an output may be its rank's input.
template <reduce_op Op, class T, bool Scatter>
static __global__ void reduce_parts(part_table parts, int ranks, long long count, bool vectors) {
  using S = arithmetic<T>;
  constexpr int wide = kernels::vector16<T>::size;
  const long long shift = Scatter ? count * static_cast<long long>(blockIdx.y) : 0;
  const int first = Scatter ? static_cast<int>(blockIdx.y) : 0, last = Scatter ? first + 1 : ranks;
  const long long me = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long packs = vectors ? count / wide : 0;
  for (long long i = me; i < packs; i += step) {
    kernels::vector16<T> pack = kernels::load_vector(static_cast<const T*>(parts.in[0]) + shift + i * wide);
    S acc[wide];
    for (int j = 0; j < wide; ++j) acc[j] = kernels::number<S>(pack.at[j]);
    for (int k = 1; k < ranks; ++k) {
      pack = kernels::load_vector(static_cast<const T*>(parts.in[k]) + shift + i * wide);
      for (int j = 0; j < wide; ++j) acc[j] = plait::detail::reduced<Op>(acc[j], kernels::number<S>(pack.at[j]));
    }
    for (int j = 0; j < wide; ++j) pack.at[j] = kernels::number<T>(acc[j]);
    for (int r = first; r < last; ++r) kernels::store_vector(static_cast<T*>(parts.out[r]) + i * wide, pack);
  }
  for (long long i = packs * wide + me; i < count; i += step) {
    S acc = kernels::number<S>(static_cast<const T*>(parts.in[0])[shift + i]);
    for (int k = 1; k < ranks; ++k) {
      acc = plait::detail::reduced<Op>(acc, kernels::number<S>(static_cast<const T*>(parts.in[k])[shift + i]));
    }
    for (int r = first; r < last; ++r) static_cast<T*>(parts.out[r])[i] = kernels::number<T>(acc);
  }
}

enum class spread { root_to_all, gather, exchange };

/// Moves blocks of `count` words between ranks; each blockIdx.y moves one:
///   root_to_all  in[root] to every out
///   gather       in[k] to block k of every out
///   exchange     block t of in[f] to block f of out[t]
template <class Word, spread How>
static __global__ void copy_parts(part_table parts, int ranks, int root, long long count, bool vectors) {
  constexpr int wide = kernels::vector16<Word>::size;
  const int y = static_cast<int>(blockIdx.y);
  const int from = How == spread::root_to_all ? root : How == spread::gather ? y : y / ranks;
  const int first = How == spread::exchange ? y % ranks : 0, last = How == spread::exchange ? first + 1 : ranks;
  const Word* const in = static_cast<const Word*>(parts.in[from]) + (How == spread::exchange ? first * count : 0);
  const long long shift = How == spread::root_to_all ? 0 : from * count;
  const long long me = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long packs = vectors ? count / wide : 0;
  for (int r = first; r < last; ++r) {
    Word* const out = static_cast<Word*>(parts.out[r]) + shift;
    if (out == in) continue;
    for (long long i = me; i < packs; i += step)
      kernels::store_vector(out + i * wide, kernels::load_vector(in + i * wide));
    for (long long i = packs * wide + me; i < count; i += step) out[i] = in[i];
  }
}

/// Enqueues operations in a stream.
class cuda_operations {
 public:
  explicit cuda_operations(cudaStream_t side) : side_(side) {}

  void enqueue(operation& op) {
    const signature& s = op.what;
    const std::size_t size = size_of(s.type);
    switch (s.kind) {
      case collective::receive:
      case collective::barrier:
        return;
      case collective::send:
        return copy(op.parts[1].out, op.parts[0].in, s.count * size);
      case collective::all_reduce:
      case collective::reduce_scatter:
        return plait::detail::with_reduction(s.op, s.type, [&]<reduce_op Op, class T>() {
          if (s.ragged) return reduce_v<Op, T>(op);
          s.kind == collective::all_reduce ? reduce<Op, T, false>(op) : reduce<Op, T, true>(op);
        });
      case collective::all_gather:
        return s.ragged ? exchange_v(op, size) : move<spread::gather>(op, size);
      case collective::all_to_all:
        return s.ragged ? exchange_v(op, size) : move<spread::exchange>(op, size);
      case collective::broadcast:
        return move<spread::root_to_all>(op, size);
    }
  }

 private:
  static constexpr int threads = 256;

  void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes == 0 || to == from) return;
    plait::detail::cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, side_), "copying");
  }
  void exchange_v(operation& op, std::size_t size) {
    for (std::size_t from = 0; from < op.parts.size(); ++from) {
      for (std::size_t to = 0; to < op.parts.size(); ++to) {
        const part &f = op.parts[from], &t = op.parts[to];
        copy(t.out + t.receive_offsets[from] * size, f.in + f.send_offsets[to] * size, f.send_counts[to] * size);
      }
    }
  }

  /// Returns the table, and whether every block of `block` bytes begins on a 16-byte boundary.
  static std::pair<part_table, bool> table_of(const operation& op, std::size_t block) {
    if (op.parts.size() > most_device_ranks) {
      fail({"a group of ", op.parts.size(), " in-process ranks on a device; at most ", most_device_ranks,
            " are supported"});
    }
    part_table table{};
    bool aligned = block % 16 == 0;
    for (std::size_t r = 0; r < op.parts.size(); ++r) {
      table.in[r] = op.parts[r].in;
      table.out[r] = op.parts[r].out;
      aligned = aligned && kernels::aligned16(op.parts[r].in, op.parts[r].out);
    }
    return {table, aligned};
  }
  static unsigned blocks(std::size_t count, std::size_t size) {
    return plait::detail::blocks_for(static_cast<std::int64_t>(count * size), threads * 16, 512);
  }

  template <reduce_op Op, class T, bool Scatter>
  void reduce(operation& op) {
    const std::size_t count = op.what.count;
    if (count == 0) return;
    const auto [table, aligned] = table_of(op, Scatter ? count * sizeof(T) : 0);
    const auto ranks = static_cast<int>(op.parts.size());
    const unsigned rows = Scatter ? static_cast<unsigned>(ranks) : 1u;
    plait::detail::launch(side_, {dim3(blocks(count, sizeof(T)), rows), dim3(threads), 0}, reduce_parts<Op, T, Scatter>,
                          table, ranks, static_cast<long long>(count), aligned);
  }

  /// A reduce_scatter into parts of unequal sizes, with one launch for each part.
  template <reduce_op Op, class T>
  void reduce_v(operation& op) {
    const auto ranks = static_cast<int>(op.parts.size());
    for (std::size_t r = 0; r < op.parts.size(); ++r) {
      const std::size_t count = op.parts[r].send_counts[r];
      if (count == 0) continue;
      part_table table = table_of(op, 0).first;
      bool aligned = kernels::aligned16(op.parts[r].out);
      for (std::size_t k = 0; k < op.parts.size(); ++k) {
        table.in[k] = static_cast<const T*>(table.in[k]) + op.parts[k].send_offsets[r];
        aligned = aligned && kernels::aligned16(table.in[k]);
      }
      table.out[0] = op.parts[r].out;
      plait::detail::launch(side_, {dim3(blocks(count, sizeof(T))), dim3(threads), 0}, reduce_parts<Op, T, true>, table,
                            ranks, static_cast<long long>(count), aligned);
    }
  }

  template <spread How>
  void move(operation& op, std::size_t size) {
    switch (size) {
      case 1:
        return move_words<std::uint8_t, How>(op);
      case 2:
        return move_words<std::uint16_t, How>(op);
      case 4:
        return move_words<std::uint32_t, How>(op);
      default:
        return move_words<std::uint64_t, How>(op);
    }
  }
  template <class Word, spread How>
  void move_words(operation& op) {
    const std::size_t count = op.what.count;
    if (count == 0) return;
    const auto [table, aligned] = table_of(op, How == spread::root_to_all ? 0 : count * sizeof(Word));
    const auto ranks = static_cast<int>(op.parts.size());
    const int rows = How == spread::root_to_all ? 1 : How == spread::gather ? ranks : ranks * ranks;
    plait::detail::launch(side_, {dim3(blocks(count, sizeof(Word)), static_cast<unsigned>(rows)), dim3(threads), 0},
                          copy_parts<Word, How>, table, ranks, op.what.root, static_cast<long long>(count), aligned);
  }

  cudaStream_t side_;
};

}  // namespace detail

PLAIT_CUDA_INLINE void cuda_engine::enqueue(detail::operation& op) {
  detail::cuda_operations(side_.handle()).enqueue(op);
}

}  // namespace plait::threads
#endif

#include "plait/core/macros_on.hpp"
