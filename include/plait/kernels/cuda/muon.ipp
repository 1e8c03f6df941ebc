// The kernels and launches of kernels/cuda/muon.hpp, which includes this where CUDA is compiled.
#pragma once

#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/adamw_rounded.hpp"
#include "plait/kernels/cuda/math.hpp"
#include "plait/kernels/cuda/tensor_table.hpp"

namespace plait::kernels {

namespace detail {

inline constexpr std::int64_t muon_chunk = 8192;  ///< elements of a block; a multiple of every pack
inline constexpr int muon_threads = 256;

/// The elements of a block: those of one chunk of one entry.
struct chunk_of_entry {
  int entry;
  std::int64_t begin;
  int size;
  template <class Entry>
  __device__ explicit chunk_of_entry(const tensor_table<Entry>& table) {
    const int chunk = static_cast<int>(blockIdx.x);
    entry = table.entry_of(chunk);
    begin = (chunk - table.first_chunk[entry]) * muon_chunk;
    const std::int64_t left = table.entries[entry].size - begin;
    size = static_cast<int>(left < muon_chunk ? left : muon_chunk);
  }
};

/// One element's momentum and direction. A skipped step has no direction, and changes no momentum.
template <class M>
struct muon_momentum_arithmetic {
  bool skipped;
  M scale, rest, ahead;
  __device__ muon_momentum_arithmetic(const muon_settings& settings, const adamw_scalars& scalars)
      : skipped(scalars.update == 0.0),
        scale(static_cast<M>(scalars.gradient_scale)),
        rest(static_cast<M>(1.0 - settings.momentum)),
        ahead(static_cast<M>(settings.nesterov ? settings.momentum : 1.0)) {}
  /// Returns the direction.
  __device__ M next(M& m, M g) const {
    if (skipped) return M(0);
    g *= scale;
    m += (g - m) * rest;
    return g + (m - g) * ahead;
  }
};

template <class M, class G>
__global__ static void muon_momentum_step(const tensor_table<muon_momentum_tensor<M, G>> table,
                                          const muon_settings settings, const adamw_scalars* scalars) {
  constexpr int width = vector16<M>::size;
  using pack = element_pack<M, width>;
  using gradients = element_pack<G, width>;
  const chunk_of_entry here(table);
  const G* const gradient = table.entries[here.entry].gradient + here.begin;
  M* const momentum = table.entries[here.entry].momentum + here.begin;
  M* const direction = table.entries[here.entry].direction + here.begin;
  const muon_momentum_arithmetic<M> arithmetic(settings, *scalars);
  int done = 0;
  if (holds_packs<width>(gradient) && holds_packs<width>(momentum) && holds_packs<width>(direction)) {
    done = here.size / width * width;
    for (int i = static_cast<int>(threadIdx.x) * width; i < done; i += muon_threads * width) {
      pack m = *reinterpret_cast<pack*>(momentum + i), d;
      const gradients g = *reinterpret_cast<const gradients*>(gradient + i);
      for (int j = 0; j < width; ++j) d.at[j] = arithmetic.next(m.at[j], number<M>(g.at[j]));
      *reinterpret_cast<pack*>(momentum + i) = m;
      *reinterpret_cast<pack*>(direction + i) = d;
    }
  }
  for (int i = done + static_cast<int>(threadIdx.x); i < here.size; i += muon_threads) {
    M m = momentum[i];
    direction[i] = arithmetic.next(m, number<M>(gradient[i]));
    momentum[i] = m;
  }
}

template <class M, class G>
__global__ static void muon_rounded_momentum_step(const tensor_table<muon_rounded_tensor<M, G>> table,
                                                  const muon_settings settings, const adamw_scalars* scalars) {
  constexpr int together = 4;  // elements whose random words come from one block of Philox
  const chunk_of_entry here(table);
  const muon_rounded_tensor<M, G>& entry = table.entries[here.entry];
  const muon_momentum_arithmetic<M> arithmetic(settings, *scalars);
  neighbours_words words(entry.elements, scalars->rounding);
  for (int i = static_cast<int>(threadIdx.x) * together; i < here.size; i += muon_threads * together) {
    for (int j = i; j < i + together && j < here.size; ++j) {
      const std::int64_t at = here.begin + j;
      M m = number<M>(entry.momentum[at]);
      entry.direction[at] = arithmetic.next(m, number<M>(entry.gradient[at]));
      if (!arithmetic.skipped) entry.momentum[at] = to_bf16_stochastically(static_cast<float>(m), words.of(at));
    }
  }
}

template <class M, class W>
__global__ static void muon_update_step(const tensor_table<muon_tensor<M, W>> table, const adamw_scalars* scalars) {
  if (scalars->update == 0.0) return;
  constexpr int width = vector16<M>::size;
  using pack = element_pack<M, width>;
  using weights = element_pack<W, width>;
  const chunk_of_entry here(table);
  const muon_tensor<M, W>& entry = table.entries[here.entry];
  M* const master = entry.master + here.begin;
  const M* const direction = entry.direction + here.begin;
  W* const weight = entry.weight == nullptr ? nullptr : entry.weight + here.begin;
  const double learning_rate = scalars->learning_rate;
  const M decay = static_cast<M>(1.0 - learning_rate * entry.weight_decay);
  const M rate = static_cast<M>(learning_rate * entry.scale);
  int done = 0;
  if (holds_packs<width>(master) && holds_packs<width>(direction) && holds_packs<width>(weight)) {
    done = here.size / width * width;
    for (int i = static_cast<int>(threadIdx.x) * width; i < done; i += muon_threads * width) {
      pack p = *reinterpret_cast<pack*>(master + i);
      const pack d = *reinterpret_cast<const pack*>(direction + i);
      for (int j = 0; j < width; ++j) p.at[j] = p.at[j] * decay - d.at[j] * rate;
      *reinterpret_cast<pack*>(master + i) = p;
      if (weight != nullptr) {
        weights rounded;
        for (int j = 0; j < width; ++j) rounded.at[j] = number<W>(p.at[j]);
        *reinterpret_cast<weights*>(weight + i) = rounded;
      }
    }
  }
  for (int i = done + static_cast<int>(threadIdx.x); i < here.size; i += muon_threads) {
    const M p = master[i] * decay - direction[i] * rate;
    master[i] = p;
    if (weight != nullptr) weight[i] = number<W>(p);
  }
}

template <class T>
__global__ static void divide_by_norm_of(const T* x, T* y, std::int64_t n, const double* squares, double epsilon) {
  const T factor = static_cast<T>(1.0 / (sqrt(*squares) + epsilon));
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
    y[i] = x[i] * factor;
}

}  // namespace detail

template <class M, class G>
void muon_momentum(cuda& device, std::span<const muon_momentum_tensor<M, G>> tensors, const muon_settings& settings,
                   const adamw_scalars* scalars) {
  detail::for_each_table(tensors, detail::muon_chunk, [&](const auto& table, int chunks) {
    plait::detail::launch(device, {static_cast<unsigned>(chunks), detail::muon_threads},
                          detail::muon_momentum_step<M, G>, table, settings, scalars);
  });
}

template <class M, class G>
void muon_momentum(cuda& device, std::span<const muon_rounded_tensor<M, G>> tensors, const muon_settings& settings,
                   const adamw_scalars* scalars) {
  detail::for_each_table(tensors, detail::muon_chunk, [&](const auto& table, int chunks) {
    plait::detail::launch(device, {static_cast<unsigned>(chunks), detail::muon_threads},
                          detail::muon_rounded_momentum_step<M, G>, table, settings, scalars);
  });
}

template <class M, class W>
void muon_update(cuda& device, std::span<const muon_tensor<M, W>> tensors, const adamw_scalars* scalars) {
  detail::for_each_table(tensors, detail::muon_chunk, [&](const auto& table, int chunks) {
    plait::detail::launch(device, {static_cast<unsigned>(chunks), detail::muon_threads}, detail::muon_update_step<M, W>,
                          table, scalars);
  });
}

template <class T>
void divide_by_norm(cuda& device, const T* x, T* y, std::int64_t n, const double* squares, double epsilon) {
  if (n <= 0) return;
  plait::detail::launch(device, {plait::detail::blocks_for(n, 256, 4096), 256}, detail::divide_by_norm_of<T>, x, y, n,
                        squares, epsilon);
}

}  // namespace plait::kernels
