// The kernels and launches of kernels/cuda/adamw.hpp, which includes this where CUDA is compiled.
#pragma once

#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/math.hpp"
#include "plait/kernels/cuda/tensor_table.hpp"

namespace plait::kernels {

namespace detail {

inline constexpr std::int64_t adamw_chunk = 8192;  ///< elements of a block; a multiple of every pack
inline constexpr int adamw_threads = 256;

/// The numbers of a step in the type of the arithmetic.
template <class M>
struct adamw_numbers {
  M rate, root_scale, one_minus_b1, b2, one_minus_b2, epsilon, gradient_scale, decay;

  /// From what `adamw_share_numbers` has computed.
  __device__ static adamw_numbers of(const double* shared, const adamw_settings& settings) {
    return {static_cast<M>(shared[0]),      static_cast<M>(shared[1]),          static_cast<M>(1 - settings.beta1),
            static_cast<M>(settings.beta2), static_cast<M>(1 - settings.beta2), static_cast<M>(settings.epsilon),
            static_cast<M>(shared[2]),      static_cast<M>(shared[3])};
  }
  __device__ void update(M& p, M g, M& mean, M& square) const {
    g *= gradient_scale;
    mean += (g - mean) * one_minus_b1;
    square = square * b2 + g * g * one_minus_b2;
    p = p * decay - rate * mean / (sqrt(square) * root_scale + epsilon);
  }
};

/// Divisions and roots in double, once for each block of threads, all of which call it.
__device__ inline void adamw_share_numbers(double* shared, const adamw_scalars& scalars, double weight_decay) {
  if (threadIdx.x == 0) {
    const double learning_rate = scalars.learning_rate;
    shared[0] = learning_rate / scalars.correction1;
    shared[1] = 1.0 / sqrt(scalars.correction2);
    shared[2] = scalars.gradient_scale;
    shared[3] = 1.0 - learning_rate * weight_decay;
  }
  __syncthreads();
}

template <class M, class G, class W>
__global__ static void adamw_step(const tensor_table<adamw_tensor<M, G, W>> table, const adamw_settings settings,
                                  const adamw_scalars* scalars) {
  if (scalars->update == 0.0) return;
  constexpr int width = vector16<M>::size;
  using masters = element_pack<M, width>;
  using gradients = element_pack<G, width>;
  using weights = element_pack<W, width>;
  const int chunk = static_cast<int>(blockIdx.x), entry = table.entry_of(chunk);
  const std::int64_t begin = (chunk - table.first_chunk[entry]) * adamw_chunk;
  const std::int64_t left = table.entries[entry].size - begin;
  const int size = static_cast<int>(left < adamw_chunk ? left : adamw_chunk);
  M* const master = table.entries[entry].master + begin;
  const G* const gradient = table.entries[entry].gradient + begin;
  M* const m = table.entries[entry].m + begin;
  M* const v = table.entries[entry].v + begin;
  W* const weight = table.entries[entry].weight == nullptr ? nullptr : table.entries[entry].weight + begin;

  __shared__ double shared_numbers[4];
  adamw_share_numbers(shared_numbers, *scalars, table.entries[entry].weight_decay);
  const adamw_numbers<M> numbers = adamw_numbers<M>::of(shared_numbers, settings);

  int done = 0;
  if (holds_packs<width>(master) && holds_packs<width>(gradient) && holds_packs<width>(m) && holds_packs<width>(v) &&
      holds_packs<width>(weight)) {
    done = size / width * width;
    for (int i = static_cast<int>(threadIdx.x) * width; i < done; i += adamw_threads * width) {
      masters p = *reinterpret_cast<masters*>(master + i);
      masters mean = *reinterpret_cast<masters*>(m + i), square = *reinterpret_cast<masters*>(v + i);
      const gradients g = *reinterpret_cast<const gradients*>(gradient + i);
      for (int j = 0; j < width; ++j) numbers.update(p.at[j], number<M>(g.at[j]), mean.at[j], square.at[j]);
      *reinterpret_cast<masters*>(master + i) = p;
      *reinterpret_cast<masters*>(m + i) = mean;
      *reinterpret_cast<masters*>(v + i) = square;
      if (weight != nullptr) {
        weights rounded;
        for (int j = 0; j < width; ++j) rounded.at[j] = number<W>(p.at[j]);
        *reinterpret_cast<weights*>(weight + i) = rounded;
      }
    }
  }
  for (int i = done + static_cast<int>(threadIdx.x); i < size; i += adamw_threads) {
    M p = master[i], mean = m[i], square = v[i];
    numbers.update(p, number<M>(gradient[i]), mean, square);
    master[i] = p;
    m[i] = mean;
    v[i] = square;
    if (weight != nullptr) weight[i] = number<W>(p);
  }
}

}  // namespace detail

template <class M, class G, class W>
void adamw_update(cuda& device, std::span<const adamw_tensor<M, G, W>> tensors, const adamw_settings& settings,
                  const adamw_scalars* scalars) {
  detail::for_each_table(tensors, detail::adamw_chunk, [&](const auto& table, int chunks) {
    plait::detail::launch(device, {static_cast<unsigned>(chunks), detail::adamw_threads}, detail::adamw_step<M, G, W>,
                          table, settings, scalars);
  });
}

}  // namespace plait::kernels
